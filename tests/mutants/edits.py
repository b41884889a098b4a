"""Our code with one piece of its text replaced, for as long as a test runs."""

import importlib
import inspect
import textwrap
from dataclasses import dataclass
from functools import reduce
from types import CodeType, FunctionType
from typing import Any

import pytest


@dataclass(frozen=True)
class Edit:
    """``old`` in the text of a function becomes ``new``.

    Attributes:
        function: by its module and name, ``allocator.slot_pool:SlotPool.take``; a method, a property or a
            plain function.
        old: must occur there exactly once, as it is indented when the function itself is not.
        new: instead of it.
    """

    function: str
    old: str
    new: str

    def apply(self, patch: pytest.MonkeyPatch) -> None:
        """Make the change for the life of ``patch``. Whoever has the function already sees it, too.

        Raises:
            LookupError: the old text is not there, or more than once.
        """
        function = self._find()
        source = textwrap.dedent(inspect.getsource(function))
        if (found := source.count(self.old)) != 1:
            raise LookupError(f"{self.old!r} occurs {found} times in {self.function}, not once:\n{source}")
        patch.setattr(function, "__code__", _compiled(source.replace(self.old, self.new), function))

    def _find(self) -> FunctionType:
        module, _, path = self.function.partition(":")
        owner: Any = importlib.import_module(module)
        *outer, name = path.split(".")
        owner = reduce(getattr, outer, owner)
        found = inspect.getattr_static(owner, name)
        for wrapped in ("fget", "__func__"):
            found = getattr(found, wrapped, None) or found
        found = inspect.unwrap(found)  # of a decorator
        assert isinstance(found, FunctionType), f"{self.function} is {found!r}"
        return found


def _compiled(source: str, function: FunctionType) -> CodeType:
    names: dict[str, Any] = {}
    lines = [
        "from __future__ import annotations",
        "def _within_a_class(__class__):",
    ]  # which super() asks for
    lines += ["    " + line for line in source.splitlines()] + [f"    return {function.__name__}"]
    exec(compile("\n".join(lines), f"<edited {function.__name__}>", "exec"), {**function.__globals__}, names)
    made = names["_within_a_class"](None)
    for wrapped in ("fget", "__func__"):
        made = getattr(made, wrapped, None) or made
    edited: CodeType = inspect.unwrap(made).__code__
    return edited
