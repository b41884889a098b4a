"""Which of our tests notice a mutant.

    python -m tests.mutants.judge AREA                  the mutants of the list
    python -m tests.mutants.judge AREA --search [--every 3]    mutants made by rule; prints those that survive

Tests are collected once. For each mutant the process forks, changes our code and runs the tests one by one,
until two have failed, or one did in ``check_invariants``.
"""

import argparse
import json
import os
import random
import resource
import select
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

import pytest

from tests.mutants.areas import AREAS, LEFT_OUT
from tests.mutants.candidates import candidates_of
from tests.mutants.edits import Edit
from tests.mutants.mutants import MUTANTS

_CPU_SECONDS = 60
"""After that of its own processor time a mutant is said to hang, however busy the machine is."""

_SECONDS = 1800
"""After that it is said to hang without computing."""


@dataclass
class Verdict:
    """What became of a mutant: the tests that failed, with the first line of their error."""

    edit: Edit
    failed: dict[str, str] = field(default_factory=dict)
    is_invariant: bool = False
    hangs: bool = False
    seconds: float = 0.0

    @property
    def is_seen(self) -> bool:
        """Whether more than one test noticed it, or an invariant did. One test of many values is one."""
        return len({test.partition("[")[0] for test in self.failed}) > 1 or self.is_invariant


@dataclass
class _Child:
    edit: Edit
    pid: int
    pipe: int
    since: float


class _Reports:
    """Collects what fails in a child."""

    def __init__(self, verdict: Verdict) -> None:
        self.verdict = verdict

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            text = str(report.longrepr)
            last = [line for line in text.splitlines() if line.startswith("E ")]
            self.verdict.failed[report.nodeid] = last[0][2:].strip()[:150] if last else ""
            self.verdict.is_invariant |= ": in check_invariants" in text


class Judge:
    """A pytest plugin that runs the tests not once, but once for each mutant."""

    def __init__(self, edits: list[Edit], processes: int, log: str | None = None) -> None:
        """``log``: a file to add a line of JSON to for each verdict."""
        self.verdicts: list[Verdict] = []
        self._edits = edits
        self._processes = processes
        self._log = log

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> None:
        """Property tests draw less, and do not look for the smallest example."""
        import hypothesis  # pytest wants to see it first

        from tests import strategies

        thorough = strategies.thorough

        def quick(max_examples: int, steps: int = 50) -> hypothesis.settings:
            return hypothesis.settings(
                thorough(max_examples, steps),
                max_examples=max(10, max_examples // 5),
                print_blob=False,
                report_multiple_bugs=False,
                phases=[hypothesis.Phase.generate],
            )

        strategies.thorough = quick
        hypothesis.settings.register_profile("quick", quick(100))
        hypothesis.settings.load_profile("quick")

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Those that draw what they try come last: they take longest."""
        items[:] = [item for item in items if getattr(item, "originalname", item.name) not in LEFT_OUT]
        items.sort(key=lambda item: hasattr(getattr(item, "obj", None), "hypothesis"))

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        assert not session.testsfailed, "our tests cannot be collected"
        children: list[_Child] = []
        waiting = list(reversed(self._edits))
        while waiting or children:
            while waiting and len(children) < self._processes:
                children.append(self._in_child(session, waiting.pop()))
            ready, _, _ = select.select([child.pipe for child in children], [], [], 1.0)
            for child in list(children):
                if child.pipe in ready:
                    children.remove(child)
                    self._note(self._read(child))
                elif time.monotonic() > child.since + _SECONDS:
                    children.remove(child)
                    os.kill(child.pid, signal.SIGKILL)
                    os.waitpid(child.pid, 0)
                    os.close(child.pipe)
                    self._note(Verdict(child.edit, hangs=True))
        noticed = {test for verdict in self.verdicts for test in verdict.failed}
        session.items = [item for item in session.items if item.nodeid in noticed]
        without = self._read(self._in_child(session, None))
        assert not without.failed, f"these fail without a mutant: {without.failed}"
        return True

    def _note(self, verdict: Verdict) -> None:
        self.verdicts.append(verdict)
        if self._log is not None:
            with open(self._log, "a") as log:
                log.write(json.dumps({**asdict(verdict), "is_seen": verdict.is_seen}) + "\n")

    def _in_child(self, session: pytest.Session, edit: Edit | None) -> _Child:
        reading, writing = os.pipe()
        pid = os.fork()
        if pid:
            os.close(writing)
            return _Child(edit or Edit("nothing", "", ""), pid, reading, time.monotonic())
        resource.setrlimit(resource.RLIMIT_CPU, (_CPU_SECONDS, _CPU_SECONDS))
        signal.signal(signal.SIGXCPU, signal.SIG_DFL)
        began = time.monotonic()
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        verdict = Verdict(edit or Edit("nothing", "", ""))
        try:
            if edit is not None:
                edit.apply(pytest.MonkeyPatch())
            session.config.pluginmanager.unregister(name="terminalreporter")
            session.config.pluginmanager.register(_Reports(verdict))
            self._run(session, verdict, all_of_them=edit is None)
        except BaseException as error:
            verdict.failed["itself"] = repr(error)
        verdict.seconds = time.monotonic() - began
        os.write(writing, json.dumps(asdict(verdict)).encode())
        os._exit(0)

    @staticmethod
    def _run(session: pytest.Session, verdict: Verdict, *, all_of_them: bool) -> None:
        for item, following in zip(session.items, [*session.items[1:], None], strict=True):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if verdict.is_seen and not all_of_them:
                return

    @staticmethod
    def _read(child: _Child) -> Verdict:
        with os.fdopen(child.pipe, "rb") as pipe:
            said = pipe.read()
        _, status = os.waitpid(child.pid, 0)
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL):
            return Verdict(child.edit, hangs=True)
        if not said:
            return Verdict(child.edit, {"the process": "died"})
        return Verdict(**{**json.loads(said), "edit": child.edit})


def judge(area: str, edits: list[Edit], processes: int = 2, log: str | None = None) -> list[Verdict]:
    """Verdicts on these mutants; in a process of its own that has imported none of our tests."""
    plugin = Judge(edits, processes, log)
    quiet = [
        "-q",
        "--no-header",
        "--no-summary",
        "--tb=short",
        "-p",
        "no:cacheprovider",
        "-W",
        "ignore::pytest.PytestAssertRewriteWarning",
    ]
    status = pytest.main([*quiet, "-o", "python_files=*.py", *AREAS[area].tests], plugins=[plugin])
    assert status == 0, f"pytest ended with {status}"
    return plugin.verdicts


def _found(area: str, every: int) -> list[Edit]:
    edits = [edit for module in AREAS[area].sources for edit in candidates_of(module)]
    return random.Random(0).sample(edits, max(1, len(edits) // every))


def _lines(verdict: Verdict) -> Iterator[str]:
    yield f"{'seen' if verdict.is_seen else 'SURVIVES'}  {verdict.edit.function}"
    yield f"    - {verdict.edit.old}"
    yield f"    + {verdict.edit.new}"
    if verdict.hangs:
        yield "    hangs"
    for test, error in verdict.failed.items():
        yield f"    {test}: {error}"


def main() -> int:
    """Print verdicts; the exit status is 1 if a mutant of the list survives."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("area", choices=AREAS)
    parser.add_argument("--search", action="store_true")
    parser.add_argument("--every", type=int, default=1, help="with --search: every so manieth mutant only")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--log", metavar="FILE", help="add the verdicts to it, a line of JSON each")
    arguments = parser.parse_args()
    edits = _found(arguments.area, arguments.every) if arguments.search else MUTANTS[arguments.area]
    verdicts = judge(arguments.area, edits, arguments.processes, arguments.log)
    survivors = [verdict for verdict in verdicts if not verdict.is_seen]
    for verdict in survivors if arguments.search else verdicts:
        print(*_lines(verdict), sep="\n", flush=True)
    print(f"{len(verdicts)} mutants, {len(survivors)} noticed by fewer than two tests and no invariant")
    return 1 if survivors and not arguments.search else 0


if __name__ == "__main__":
    sys.exit(main())
