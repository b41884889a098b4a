"""``kv-offload explain``: where the KV of a request came from, and why it was not more."""

import argparse
import json
from typing import Any

from offload.errors import OperatorError
from offload.operator.client import ask_each, choose
from offload.status_command import add_engine_options, directory_of, tell_silent


def add_explain_command(commands: Any) -> None:
    """Add the subcommand to those of a parser."""
    explain: argparse.ArgumentParser = commands.add_parser(
        "explain",
        help="where the KV of a request came from, and why it was not more",
        description="Asks the engines of this user that run, as kv-offload status does. All choices of a "
        "request are told, and both legs of one that was handed over. Each engine remembers its latest "
        "10,000 requests.",
    )
    explain.add_argument("id", help="in the client's response (cmpl-..., chatcmpl-...), or its X-Request-Id")
    add_engine_options(explain)
    explain.set_defaults(run=_explain)


def _explain(options: argparse.Namespace) -> int:
    directory = directory_of(options)
    answers, silent = ask_each(
        choose(directory, options.engine), lambda each: (each.name, each.ask("explain", id=options.id))
    )
    found = [{"engine": name, **request} for name, told in answers for request in told["requests"]]
    if options.json:
        print(json.dumps({"directory": str(directory), "requests": found, "silent": silent}, indent=2))
    status = tell_silent(silent)
    if not found:
        raise OperatorError(
            f"no request {options.id[:100]!r} is remembered by {', '.join(name for name, _ in answers)}; "
            f"give the id of the response or its X-Request-Id. Engines remember their latest requests since "
            f"their start, so ask soon, and on the host of the engine that answered"
        )
    if not options.json:
        print("\n".join(_printable(line) for each in found for line in lines_of(each)))
    return status


def _printable(line: str) -> str:
    """Clients choose ids: a terminal is told nothing by them."""
    return "".join(each if each.isprintable() else "?" for each in line)


def lines_of(told: dict[str, Any]) -> list[str]:
    """For people."""
    answer = f", {told['answer_tokens']:,} of answer" if told["answer_tokens"] else ""
    sources = ", ".join(f"{num:,} {source}" for source, num in told["tokens"].items())
    saved = told["saved_seconds"]
    worth = "" if saved is None else f"; {'saved' if saved >= 0 else 'lost'} {abs(saved):.3f} s, by estimate"
    lines = [
        f"request  {told['request']} at engine {told['engine']}: {told['state']}, came "
        f"{told['arrived_seconds_ago']:.1f} s ago",
        f"tokens   {told['prompt_tokens']:,} of prompt{answer}: {sources or 'it waits for its turn'}",
        f"waited   {told['held_seconds']:.3f} s for others, tiers and peers, "
        f"{told['restoring_seconds']:.3f} s for its restore, "
        f"{told['aside_seconds']:.3f} s while others went first{worth}",
    ]
    if told["preemptions"]:
        again, times = told["again_tokens"], told["preemptions"]
        lines.append(f"again    {again:,} tokens from caches, after {times} preemptions")
    lines += [
        f"missing  {each['tokens']:,} tokens from token {each['from_token']:,} on: {each['text']}"
        for each in told["missing"]
    ]
    lines += [
        f"stored   not from position {position:,} on: {why}" for why, position in told["unstored"].items()
    ]
    if told["hand_off"]:
        lines.append(f"handed   {told['hand_off']}")
    return lines
