"""What is asked of a running ``vllm serve``, or what speaks like it, over HTTP."""

import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from http.client import HTTPResponse
from typing import Any

__all__ = ["HttpServer", "ServerError"]

_REQUEST_SECONDS = 600.0
_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*?)(?:_total)?(?:\{.*\})? (\S+)", re.MULTILINE)


class ServerError(RuntimeError):
    """The server cannot be reached or refuses; the message names the address and its answer."""


class HttpServer:
    """A server at an address such as http://localhost:8000. ServerError from all that asks it.

    Args:
        base_url: with or without ``/v1`` at the end.
        api_key: sent as bearer token, if any.
    """

    def __init__(self, base_url: str, api_key: str | None = None) -> None:
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def open(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        seconds: float = _REQUEST_SECONDS,
        headers: Mapping[str, str] | None = None,
    ) -> HTTPResponse:
        """Ask for a path below the address, with a body in JSON if there is one; close what is returned."""
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(self.base_url + path, data, {**self._headers, **(headers or {})})
            response = urllib.request.urlopen(request, timeout=seconds)
        except urllib.error.HTTPError as error:
            detail = error.read().decode(errors="replace")[:500]
            raise ServerError(f"{self.base_url}{path} answered {error.code}: {detail}") from error
        except (OSError, ValueError) as error:
            raise ServerError(f"cannot reach {self.base_url}{path}: {error}") from error
        assert isinstance(response, HTTPResponse)
        return response

    def is_healthy(self) -> bool:
        """Whether it answers."""
        try:
            with self.open("/health", seconds=5.0) as response:
                return response.status == 200
        except ServerError:
            return False

    def first_model(self) -> str:
        """The first model that it lists."""
        with self.open("/v1/models") as response:
            models = json.load(response)["data"]
        if not models:
            raise ServerError(f"{self.base_url}/v1/models lists no model; name one with --model")
        return str(models[0]["id"])

    def metrics(self) -> dict[str, float]:
        """``/metrics`` by name, without ``_total`` and labels; values of several label sets are added up."""
        with self.open("/metrics") as response:
            text = response.read().decode()
        values: dict[str, float] = {}
        for name, value in _SAMPLE.findall(text):
            values[name] = values.get(name, 0.0) + float(value)
        return values

    def first_token(self, body: Mapping[str, Any]) -> float:
        """Ask for a completion and wait for its end; returns the seconds to its first token.

        ``body`` is that of ``/v1/completions``: a prompt of token ids, and what else there is to say.
        """
        whole = {"temperature": 0.0, "ignore_eos": True, **body, "stream": True}
        sent_at = time.perf_counter()
        first_at = None
        with self.open("/v1/completions", whole) as response:
            for line in response:
                if not line.startswith(b"data:") or line[5:].strip() == b"[DONE]":
                    continue
                event = json.loads(line[5:])
                if "error" in event:
                    raise ServerError(f"{self.base_url}: {event['error']}")
                if first_at is None and event.get("choices"):
                    first_at = time.perf_counter()
        if first_at is None:
            raise ServerError(f"{self.base_url}: the answer had no token")
        return first_at - sent_at
