"""Bodies of answers in vLLM's shape: whole, or as events of a stream."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from offload.testing.upstream.generation import Step, chat_logprobs, completion_logprobs

__all__ = ["Shape", "usage"]


class Shape(NamedTuple):
    """How answers to one request look.

    Attributes:
        id, model: of all of its chunks.
        is_chat: whether it came to /v1/chat/completions.
        wants: of ``return_token_ids``, ``logprobs``, ``include_usage`` and ``continuous_usage``, those set.
    """

    id: str
    model: str
    is_chat: bool
    wants: frozenset[str]

    @classmethod
    def of(cls, id: str, model: str, is_chat: bool, body: Mapping[str, Any]) -> "Shape":
        """As the request says."""
        options = body.get("stream_options") or {}
        wants = {
            "return_token_ids": body.get("return_token_ids"),
            "logprobs": body.get("logprobs") not in (None, False),
            "include_usage": options.get("include_usage"),
            "continuous_usage": options.get("include_usage") and options.get("continuous_usage_stats"),
        }
        return cls(id, model, is_chat, frozenset(name for name, is_set in wants.items() if is_set))

    def first(self, index: int, prompt: Sequence[int]) -> dict[str, Any] | None:
        """The chunk before the first token, which a chat has."""
        if not self.is_chat:
            return None
        choice = {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        chunk = self._chunk([choice])
        chunk["prompt_token_ids"] = list(prompt) if "return_token_ids" in self.wants else None
        return chunk

    def chunk(self, index: int, step: Step, prompt: Sequence[int] | None, offset: int) -> dict[str, Any]:
        """A chunk with tokens. ``prompt``: with the first of them; ``offset``: of its text."""
        ids = list(step.tokens) if "return_token_ids" in self.wants else None
        choice: dict[str, Any] = {"index": index}
        if self.is_chat:
            choice["delta"] = {"content": step.text}
            choice["logprobs"] = chat_logprobs(step.tokens) if "logprobs" in self.wants else None
            choice["finish_reason"] = step.finish_reason
            if step.finish_reason is not None:
                choice["stop_reason"] = step.stop_reason
            choice["token_ids"] = ids
            return self._chunk([choice])
        choice["text"] = step.text
        choice["logprobs"] = completion_logprobs(step.tokens, offset) if "logprobs" in self.wants else None
        choice["finish_reason"], choice["stop_reason"] = step.finish_reason, step.stop_reason
        choice["prompt_token_ids"] = list(prompt) if prompt is not None and ids is not None else None
        choice["token_ids"] = ids
        return self._chunk([choice])

    def last(self, num_prompt: int, num_tokens: int) -> dict[str, Any] | None:
        """The chunk behind the last token, if the client wants its usage."""
        if "include_usage" not in self.wants:
            return None
        return {**self._chunk([]), "usage": usage(num_prompt, num_tokens)}

    def whole(
        self,
        prompts: Sequence[Sequence[int]],
        answers: Sequence[tuple[list[int], Step]],
        echo: Sequence[str] | None,
        params: Mapping[str, Any] | None,
    ) -> dict[str, Any]:
        """An answer that is no stream. ``answers``: all tokens of each choice, and text and end as a step."""
        choices = []
        for index, (tokens, step) in enumerate(answers):
            prompt = list(prompts[index * len(prompts) // len(answers)])
            ids = tokens if "return_token_ids" in self.wants else None
            choice: dict[str, Any] = {
                "index": index,
                "finish_reason": step.finish_reason,
                "stop_reason": step.stop_reason,
                "token_ids": ids,
                "logprobs": None,
            }
            if self.is_chat:
                choice["message"] = {"role": "assistant", "content": step.text, "tool_calls": []}
                choice["logprobs"] = chat_logprobs(tokens) if "logprobs" in self.wants else None
            else:
                choice["text"] = (echo[index * len(echo) // len(answers)] if echo else "") + step.text
                choice["logprobs"] = completion_logprobs(tokens, 0) if "logprobs" in self.wants else None
                choice["prompt_token_ids"] = prompt if ids is not None else None
            choices.append(choice)
        told = self._chunk(choices)
        told["object"] = "chat.completion" if self.is_chat else "text_completion"
        if self.is_chat:
            told["prompt_token_ids"] = list(prompts[0]) if "return_token_ids" in self.wants else None
        told["usage"] = usage(sum(map(len, prompts)), sum(len(tokens) for tokens, _ in answers))
        told["kv_transfer_params"] = params
        return told

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        return {"id": self.id, "object": kind, "created": 1, "model": self.model, "choices": choices}


def usage(num_prompt: int, num_tokens: int) -> dict[str, Any]:
    """Tokens of a request."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_tokens,
        "total_tokens": num_prompt + num_tokens,
    }
