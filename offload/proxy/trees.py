"""How much of a prompt engines have, as they say themselves: what policies ask before what is remembered."""

from collections.abc import Mapping, Sequence

import msgspec

from offload.fleet_config import Address
from offload.peering.locating import question_of
from offload.peering.tls import client_context
from offload.proxy.asking import Doors
from offload.proxy.faults import EngineError
from offload.proxy.members import Leg
from offload.proxy.metrics import ProxyMetrics
from offload.proxy.policies import Request
from offload.proxy.settings import ProxySettings
from offload.proxy.upstream import Upstreams

__all__ = ["EngineTrees"]

MODELS_SECONDS = 30.0
"""After which an engine is asked again which adapters it has."""

Adapters = Mapping[str, tuple[str, str] | None]
"""Names and paths of LoRA adapters by model; None: a model without one."""


class EngineTrees:
    """A ``Tree``: engines whose addresses in the fleet are known hash it, and look into their pools."""

    def __init__(self, settings: ProxySettings, upstreams: Upstreams, metrics: ProxyMetrics) -> None:
        """Connect to nobody yet. Raises ConfigError: a file of TLS is not as it must be."""
        context = None if settings.fleet_tls is None else client_context(settings.fleet_tls)
        self._doors = Doors(dict(settings.fleet), settings.fleet_key, context, settings.locate_seconds)
        self._seconds = settings.locate_seconds
        self._upstreams = upstreams
        self._metrics = metrics
        self._adapters: dict[str, tuple[float, Adapters]] = {}

    def add(self, url: str, address: Address) -> None:
        """An engine has come that can be asked there."""
        self._doors.open(url, address)

    def remove(self, url: str) -> None:
        """It is asked no more. Idempotent."""
        self._doors.shut(url)
        self._adapters.pop(url, None)

    def address_of(self, url: str) -> Address | None:
        """Where an engine is asked; None: it is not."""
        return self._doors.address_of(url)

    async def close(self) -> None:
        """Let go of all connections."""
        await self._doors.close()

    def check_invariants(self) -> None:
        """It knows adapters of engines that it asks, and of no others. For tests."""
        self._doors.check_invariants()
        others = [url for url in self._adapters if url not in self._doors]
        assert not others, f"adapters of {others} are known, which are never asked"

    async def depths(
        self, token_ids: Sequence[int], request: Request, urls: Sequence[str]
    ) -> Mapping[str, int]:
        """Leading tokens that pools have, of engines that say so in time. O(tokens), one question each."""
        asked = [url for url in dict.fromkeys(urls) if url in self._doors]
        salt = request.body.get("cache_salt")
        if not asked or not isinstance(salt, str | None):
            return {}
        is_known, adapter = await self._adapter(request, asked[0])
        if not is_known:
            return {}
        try:
            question = question_of(token_ids, salt or "", adapter)
        except ValueError:  # engines refuse such a request
            return {}
        located = await self._doors.ask(asked, question)
        self._metrics.located.labels(
            "all" if len(located) == len(asked) else "some" if located else "none"
        ).inc()
        return located

    async def _adapter(self, request: Request, url: str) -> tuple[bool, tuple[str, str] | None]:
        """Whether it is known what a model's name means, and the adapter that it means; None: none."""
        if not request.model:
            return True, None
        now = self._doors.now()
        when, models = self._adapters.get(url, (float("-inf"), {}))
        if now > when + (MODELS_SECONDS if request.model in models else 1.0):
            self._adapters[url] = (now, models)  # one request asks, others go on with what is known
            models = await self._models(url, request)
            if url in self._doors:  # it may have been removed meanwhile
                self._adapters[url] = (now, models)
        return request.model in models, models.get(request.model)

    async def _models(self, url: str, request: Request) -> Adapters:
        headers = {} if request.authorization is None else {"Authorization": request.authorization}
        try:
            answer = await self._upstreams.get(f"{url}/v1/models", Leg(lambda: False), self._seconds, headers)
            cards = msgspec.json.decode(answer.body, type=_Models).data
        except (EngineError, ValueError, RecursionError):
            return {}
        return {card.id: (card.id, card.root or "") if card.parent else None for card in cards}


class _Card(msgspec.Struct):
    id: str
    root: str | None = None
    parent: str | None = None


class _Models(msgspec.Struct):
    """What ``/v1/models`` answers, as far as it matters."""

    data: list[_Card]
