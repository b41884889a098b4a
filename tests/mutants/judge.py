"""Which of our tests notice a mutant.

    python -m tests.mutants.judge AREA ...              the mutants of the list
    python -m tests.mutants.judge AREA ... --remember   the same; writes down which tests noticed each
    python -m tests.mutants.judge AREA --search [--every 3]    mutants made by rule; prints those that survive

Tests are collected once. For each mutant the process forks, changes our code and runs the tests one by one,
until two have failed, or one did in ``check_invariants``. Those come first that noticed it when that was last
written down; then those that have noticed most mutants for the time that they take.
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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field

import pytest

from tests.mutants.areas import AREAS, LEFT_OUT
from tests.mutants.candidates import candidates_of
from tests.mutants.edits import Edit
from tests.mutants.mutants import MUTANTS
from tests.mutants.noticed import name_of, noticed, remember

_CPU_SECONDS = 120
"""After that of its own processor time a mutant is said to hang, however busy the machine is."""

_TEST_CPU_SECONDS = 15
"""After that a test fails, as it hangs."""

_SECONDS = 1800
"""After that it is said to hang without computing."""


@dataclass
class Verdict:
    """What became of a mutant.

    Attributes:
        area: whose tests were run.
        failed: the tests that failed, with the first line of their error.
        passed: those that did not, and their seconds.
        is_invariant: whether one failed in ``check_invariants``.
        hangs: whether it was killed.
        seconds: of all tests together.
    """

    area: str
    edit: Edit
    failed: dict[str, str] = field(default_factory=dict)
    passed: dict[str, float] = field(default_factory=dict)
    is_invariant: bool = False
    hangs: bool = False
    seconds: float = 0.0

    @property
    def is_seen(self) -> bool:
        """Whether more than one test noticed it, or an invariant did. One test of many values is one."""
        return len({_function_of(test) for test in self.failed}) > 1 or self.is_invariant

    @property
    def enough(self) -> list[str]:
        """Failed tests that suffice: the last, as nothing ran after it, and another unless one will do."""
        *others, last = self.failed
        other = next((test for test in others if _function_of(test) != _function_of(last)), None)
        return [last] if other is None or self.is_invariant else [other, last]


@dataclass
class _Child:
    area: str
    edit: Edit
    pid: int
    pipe: int
    since: float


@dataclass
class _Worth:
    """What a test has noticed, whatever its parameters, and the time that it took to notice nothing."""

    guess: float  # as long as it has always failed
    num_failed: int = 0
    num_passed: int = 0
    seconds: float = 0.0

    def passed(self, seconds: float) -> None:
        self.num_passed += 1
        self.seconds += seconds

    @property
    def per_second(self) -> float:
        """How likely it is to notice the next mutant, for a second of its time."""
        seconds = self.seconds / self.num_passed if self.num_passed else self.guess
        return (self.num_failed + 1) / (self.num_failed + self.num_passed + 2) / max(seconds, 0.001)


class _Reports:
    """Collects what fails in a child, and how long the rest takes."""

    def __init__(self, verdict: Verdict) -> None:
        self.verdict = verdict

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        passed = self.verdict.passed
        passed[report.nodeid] = passed.get(report.nodeid, 0.0) + report.duration
        if report.failed:
            text = str(report.longrepr)
            last = [line for line in text.splitlines() if line.startswith("E ")]
            self.verdict.failed[report.nodeid] = last[0][2:].strip()[:150] if last else ""
            self.verdict.is_invariant |= ": in check_invariants" in text
        if report.nodeid in self.verdict.failed:
            del passed[report.nodeid]


class Judge:
    """A pytest plugin that runs the tests not once, but once for each mutant."""

    def __init__(self, edits: Mapping[str, Sequence[Edit]], processes: int, log: str | None = None) -> None:
        """``edits``: by area. ``log``: a file to add a line of JSON to for each verdict."""
        self.verdicts: list[Verdict] = []
        self._edits = [(area, edit) for area, some in edits.items() for edit in some]
        self._processes = processes
        self._log = log
        self._worth: dict[str, _Worth] = {}  # by name, without parameters
        self._noticed = {area: noticed(area) for area in edits}

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
        """Those that draw what they try are taken to last long."""
        items[:] = [item for item in items if getattr(item, "originalname", item.name) not in LEFT_OUT]
        for item in items:
            draws = hasattr(getattr(item, "obj", None), "hypothesis")
            self._worth[_function_of(item.nodeid)] = _Worth(5.0 if draws else 0.05)

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        assert not session.testsfailed, "our tests cannot be collected"
        children: list[_Child] = []
        waiting = list(reversed(self._edits))
        while waiting or children:
            while waiting and len(children) < self._processes:
                children.append(self._in_child(session, *waiting.pop()))
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
                    self._note(Verdict(child.area, child.edit, hangs=True))
        passed = {test for verdict in self.verdicts for test in verdict.passed}
        noticed = {test for verdict in self.verdicts for test in verdict.failed}
        alone = noticed - passed  # what has passed with some mutant does not fail without any
        items = [item for item in session.items if item.nodeid in alone]
        for number in range(self._processes):
            session.items = items[number :: self._processes]
            children.append(self._in_child(session))
        failed = [test for child in children for test in self._read(child).failed]
        assert not failed, f"these fail without a mutant: {failed}"
        return True

    def _note(self, verdict: Verdict) -> None:
        self.verdicts.append(verdict)
        for test, seconds in verdict.passed.items():
            self._worth[_function_of(test)].passed(seconds)
        for function in {_function_of(test) for test in verdict.failed} & self._worth.keys():
            self._worth[function].num_failed += 1
        if self._log is not None:
            said = {key: value for key, value in asdict(verdict).items() if key != "passed"}
            with open(self._log, "a") as log:
                log.write(json.dumps({**said, "is_seen": verdict.is_seen}) + "\n")

    def _in_child(self, session: pytest.Session, area: str = "", edit: Edit | None = None) -> _Child:
        reading, writing = os.pipe()
        pid = os.fork()
        if pid:
            os.close(writing)
            return _Child(area, edit or Edit("nothing", "", ""), pid, reading, time.monotonic())
        if edit is not None:  # without a mutant all have their time, on a slow machine, too
            resource.setrlimit(resource.RLIMIT_CPU, (_CPU_SECONDS, _CPU_SECONDS))
        signal.signal(signal.SIGXCPU, signal.SIG_DFL)
        signal.signal(signal.SIGVTALRM, _fail)
        began = time.monotonic()
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        verdict = Verdict(area, edit or Edit("nothing", "", ""))
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

    def _run(self, session: pytest.Session, verdict: Verdict, *, all_of_them: bool) -> None:
        files = None if all_of_them else AREAS[verdict.area].tests
        waiting = {
            item.nodeid: item
            for item in session.items
            if files is None or item.nodeid.partition("::")[0] in files
        }
        item = self._next(waiting, verdict)
        while item is not None and (all_of_them or not verdict.is_seen):
            following = self._next(waiting, verdict)
            if not all_of_them:
                signal.setitimer(signal.ITIMER_VIRTUAL, _TEST_CPU_SECONDS, _TEST_CPU_SECONDS)
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if item.nodeid in verdict.passed:
                self._worth[_function_of(item.nodeid)].passed(verdict.passed[item.nodeid])
            item = following
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)

    def _next(self, waiting: dict[str, pytest.Item], verdict: Verdict) -> pytest.Item | None:
        """The most promising one of those that wait, which it leaves; those last that are no second test."""
        failed = {_function_of(test) for test in verdict.failed}
        known = self._noticed.get(verdict.area, {}).get(name_of(verdict.edit), ())

        def promise(test: str) -> tuple[bool, bool, float]:
            function = _function_of(test)
            return function not in failed, test in known, self._worth[function].per_second

        best = max(waiting, key=promise, default=None)
        return None if best is None else waiting.pop(best)

    @staticmethod
    def _read(child: _Child) -> Verdict:
        with os.fdopen(child.pipe, "rb") as pipe:
            said = pipe.read()
        _, status = os.waitpid(child.pid, 0)
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL):
            return Verdict(child.area, child.edit, hangs=True)
        if not said:
            return Verdict(child.area, child.edit, {"the process": "died"})
        return Verdict(**{**json.loads(said), "edit": child.edit})


def _fail(*_: object) -> None:
    raise TimeoutError(f"after {_TEST_CPU_SECONDS} s it has not ended")


def _function_of(test: str) -> str:
    return test.partition("[")[0]


def judge(edits: Mapping[str, Sequence[Edit]], processes: int = 2, log: str | None = None) -> list[Verdict]:
    """Verdicts on these mutants, by area; in a process of its own that has imported none of our tests."""
    plugin = Judge(edits, processes, log)
    files = dict.fromkeys(file for area in edits for file in AREAS[area].tests)
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
    status = pytest.main([*quiet, "-o", "python_files=test_*.py machines.py", *files], plugins=[plugin])
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
    parser.add_argument("areas", choices=AREAS, nargs="+", metavar="AREA")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--search", action="store_true")
    how.add_argument("--remember", action="store_true")
    parser.add_argument("--every", type=int, default=1, help="with --search: every so manieth mutant only")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--log", metavar="FILE", help="add the verdicts to it, a line of JSON each")
    arguments = parser.parse_args()
    search = arguments.search
    edits = {area: _found(area, arguments.every) if search else MUTANTS[area] for area in arguments.areas}
    verdicts = judge(edits, arguments.processes, arguments.log)
    survivors = [verdict for verdict in verdicts if not verdict.is_seen]
    for area in arguments.areas if arguments.remember else ():
        seen = [each for each in verdicts if each.is_seen and each.area == area]
        remember(area, ((each.edit, each.enough) for each in seen))
    for verdict in survivors if search else verdicts:
        print(*_lines(verdict), sep="\n", flush=True)
    print(f"{len(verdicts)} mutants, {len(survivors)} noticed by fewer than two tests and no invariant")
    return 1 if survivors and not search else 0


if __name__ == "__main__":
    sys.exit(main())
