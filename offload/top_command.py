"""``kv-offload top``: how engines stand and what they do, again and again, in a terminal."""

import argparse
import json
import os
import select
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from offload.doctor.command import BY_ITS_WORD
from offload.doctor.finding import Told, is_understood
from offload.errors import ConfigError, OperatorError
from offload.operator.client import ask_each, choose
from offload.status_command import add_engine_options, directory_of
from offload.top_view import Flow, flow_between, lines_of

_LEAST_SECONDS, _MOST_SECONDS = 0.1, 86_400.0


def add_top_command(commands: Any) -> None:
    """Add the subcommand to those of a parser."""
    top: argparse.ArgumentParser = commands.add_parser(
        "top",
        help="how the engines that run stand and what they do, again and again",
        description="Asks the engines of this user that run, as kv-offload status does, every few seconds. "
        "Ctrl-C ends it. Where the output is no terminal, it prints one view after the other.",
    )
    add_engine_options(top)
    top.add_argument("--once", action="store_true", help="print one view, of the last minutes, and end")
    top.add_argument(
        "--seconds", type=float, default=2.0, metavar="S", help="from one view to the next (default: 2)"
    )
    top.set_defaults(run=_top)


class Watched:
    """Engines as they were asked last."""

    def __init__(self, directory: Path, name: str | None) -> None:
        """None was asked yet. ``name``: that one only; None: all."""
        self._directory = directory
        self._name = name
        self._before: dict[str, Told] = {}
        self.silent: list[str] = []
        """Why others are left out of the last look."""

    def look(self) -> list[tuple[Told, Flow]]:
        """How each stands, and what it did since the last look. One that does not answer is left out.

        Raises:
            OperatorError: there is none, or none answers.
        """
        engines, found = choose(self._directory, self._name), []
        answers, self.silent = ask_each(engines, lambda each: (each.name, each.ask("status")))
        for name, told in answers:
            if not is_understood(told):
                self.silent.append(f"engine {name} runs another release; run the top of that one")
                continue
            found.append((told, flow_between(self._before.get(name), told)))
            self._before[name] = told
        if not found:
            raise OperatorError("; ".join(self.silent))
        return found


def _top(options: argparse.Namespace) -> int:
    if not _LEAST_SECONDS <= options.seconds <= _MOST_SECONDS:
        raise ConfigError(
            f"--seconds is {options.seconds:g}; give a number from {_LEAST_SECONDS} to {_MOST_SECONDS:g}"
        )
    watched = Watched(directory_of(options), options.engine)
    console = Console(highlight=False)
    if options.once:
        _print(console, watched, watched.look(), as_json=options.json)
        return 0
    first = watched.look()  # refused at once if there is none
    try:
        with _waiting(options.seconds) as wait:
            if options.json or not console.is_terminal:
                _print(console, watched, first, as_json=options.json)
                for found in _again(watched, wait):
                    if isinstance(found, OperatorError):
                        print(found, file=sys.stderr)
                    else:
                        _print(console, watched, found, as_json=options.json)
            else:
                _draw(console, watched, wait, first)
    except (KeyboardInterrupt, BrokenPipeError):
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (nobody reads what is left of it)
    return 0


@contextmanager
def _waiting(seconds: float) -> Iterator[Callable[[], None]]:
    """Inside, a wait from one view to the next. A new size of the terminal ends it, or the one after it."""
    reading, writing = os.pipe()
    for end in (reading, writing):
        os.set_blocking(end, False)
    # A signal that is only blocked may go to another thread, which drops it; a handler writes into the pipe.
    before = signal.signal(signal.SIGWINCH, lambda *_: None)
    outer = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)

    def wait() -> None:
        if select.select([reading], [], [], seconds)[0]:
            os.read(reading, 1 << 16)

    try:
        yield wait
    finally:
        signal.set_wakeup_fd(outer)
        signal.signal(signal.SIGWINCH, before)
        os.close(reading)
        os.close(writing)


def _again(watched: Watched, wait: Callable[[], None]) -> Iterator[list[tuple[Told, Flow]] | OperatorError]:
    while True:
        wait()
        try:
            yield watched.look()
        except OperatorError as error:  # others may start
            yield error


def _draw(
    console: Console, watched: Watched, wait: Callable[[], None], first: list[tuple[Told, Flow]]
) -> None:
    shown = _shown(first, watched.silent)
    with Live(shown, console=console, screen=True, auto_refresh=False, vertical_overflow="ellipsis") as live:
        live.refresh()
        for found in _again(watched, wait):
            if isinstance(found, OperatorError):
                live.update(Text(str(found)), refresh=True)
            else:
                live.update(_shown(found, watched.silent), refresh=True)


def _print(console: Console, watched: Watched, found: list[tuple[Told, Flow]], *, as_json: bool) -> None:
    if as_json or not console.is_terminal:
        for each in watched.silent:
            print(each, file=sys.stderr)
    if as_json:
        engines = [{**told, "flow": flow._asdict(), "wrong": _wrong(told)} for told, flow in found]
        print(json.dumps({"engines": engines}), flush=True)
    elif console.is_terminal:
        console.print(_shown(found, watched.silent))
    else:  # no line is cut
        lines = [line for told, flow in found for line in lines_of(told, flow, _wrong(told))]
        print("\n".join(f"{label:<6} {text}" for label, text in lines), flush=True)


def _shown(found: list[tuple[Told, Flow]], silent: list[str]) -> RenderableType:
    lines = [line for told, flow in found for line in _engine(told, flow)]
    return Group(*lines, *(Text(each, "red", no_wrap=True, overflow="ellipsis") for each in silent))


def _engine(told: Told, flow: Flow) -> list[Text]:
    """Lines; what does not fit into one is cut."""
    wrong = _wrong(told)
    lines = []
    for label, text in lines_of(told, flow, wrong):
        line = Text(no_wrap=True, overflow="ellipsis").append(f"{label:<6} ", "bold")
        lines.append(line.append(text, "red" if label == "wrong" and wrong else ""))
    return lines


def _wrong(told: Told) -> list[str]:
    """Names of what the doctor finds by the engine's word."""
    return sorted({finding.name for check in BY_ITS_WORD for finding in check(told)})
