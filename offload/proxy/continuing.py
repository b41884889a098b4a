"""Which answers can go on at another engine after their first byte.

The other engine is given the prompt and the answer so far as one prompt. So an answer cannot go on whose rest
depends on how these two are told apart, or on a state that only the first engine has.
"""

from collections.abc import Mapping
from typing import Any

__all__ = ["why_not_continued"]

_MUST_BE_UNSET = (
    "seed",
    "prompt_logprobs",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "echo",
    "use_beam_search",
    "prompt_embeds",
    "presence_penalty",
    "frequency_penalty",
    "bad_words",
    "repetition_detection",
    "watermarking",
    "suffix",
    "ec_transfer_params",
)
"""Fields that have a default which does nothing, and any other value counts what one engine has said."""


def why_not_continued(body: Mapping[str, Any], is_chat: bool, num_prompts: int) -> str | None:
    """Why a stream can only end where it began; None: it can go on elsewhere. O(messages)."""
    for key in _MUST_BE_UNSET:
        value = body.get(key)
        if value is not None and (key == "seed" or value not in (0, False, "", [], {})):
            return key
    if body.get("n") not in (None, 1):
        return "n"
    if num_prompts != 1:
        return "several prompts"
    shape = body.get("response_format")
    if shape is not None and not (isinstance(shape, dict) and shape.get("type") == "text"):
        return "response_format"
    if body.get("thinking_token_budget") not in (None, -1):
        return "thinking_token_budget"
    arguments = body.get("vllm_xargs")
    if arguments and not (
        isinstance(arguments, dict) and all(key.startswith("cpu_offload_") for key in arguments)
    ):
        return "vllm_xargs"
    if body.get("stop") and not body.get("include_stop_str_in_output"):
        # Behind a break stop strings must be shown to be found; then a token that ends the answer is, too.
        if body.get("stop_token_ids"):
            return "stop and stop_token_ids"
        if body.get("skip_special_tokens") is False:
            return "stop and skip_special_tokens"
    if not _are_numbers(body):
        return "limits that are no numbers"
    return _why_not_chat(body) if is_chat else None


def _why_not_chat(body: Mapping[str, Any]) -> str | None:
    if body.get("tools") and body.get("tool_choice") != "none":
        return "tools"
    messages = body.get("messages")
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list) and not all(
            isinstance(part, dict) and part.get("type") == "text" for part in content
        ):
            return "content that is no text"
    return None


def _are_numbers(body: Mapping[str, Any]) -> bool:
    limits = ("max_tokens", "max_completion_tokens", "min_tokens")
    return all(body.get(key) is None or type(body[key]) is int for key in limits)
