"""Mutants made by rule: one operator, number, statement or pair of arguments at a time."""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from importlib import import_module
from types import FunctionType

from tests.mutants.edits import Edit

_COMPARE: dict[type[ast.cmpop], list[type[ast.cmpop]]] = {
    ast.Lt: [ast.LtE, ast.GtE],
    ast.LtE: [ast.Lt, ast.Gt],
    ast.Gt: [ast.GtE, ast.LtE],
    ast.GtE: [ast.Gt, ast.Lt],
    ast.Eq: [ast.NotEq],
    ast.NotEq: [ast.Eq],
    ast.Is: [ast.IsNot],
    ast.IsNot: [ast.Is],
    ast.In: [ast.NotIn],
    ast.NotIn: [ast.In],
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}
_NAMES = {"min": "max", "max": "min", "True": "False", "False": "True", "any": "all", "all": "any"}


def candidates_of(module_name: str) -> Iterator[Edit]:
    """All mutants of a module that change one line, if that is there once in its function."""
    module = import_module(module_name)
    for owner in [module, *(each for each in vars(module).values() if inspect.isclass(each))]:
        if owner is not module and owner.__module__ != module_name:
            continue
        prefix = "" if owner is module else f"{owner.__name__}."
        for name, found in list(vars(owner).items()):
            function = inspect.unwrap(
                getattr(found, "fget", None) or getattr(found, "__func__", None) or found
            )
            if not isinstance(function, FunctionType) or function.__module__ != module_name:
                continue
            if name in ("check_invariants", "__repr__") or name.startswith("<"):
                continue
            if function.__code__.co_freevars not in ((), ("__class__",)):
                continue
            try:
                source = textwrap.dedent(inspect.getsource(function))
            except OSError:  # made by a dataclass
                continue
            if source.lstrip().startswith(("def", "@")):
                yield from _of_function(f"{module_name}:{prefix}{name}", source)


def _of_function(function: str, source: str) -> Iterator[Edit]:
    lines = source.split("\n")
    tree = ast.parse(source)
    seen: set[str] = set()
    for line_no, start, stop, new in _changes(tree, source):
        line = lines[line_no - 1]
        text = (line[:start] + new + line[stop:]).strip()
        if source.count(line.strip()) == 1 and text not in seen and text != line.strip():
            seen.add(text)
            yield Edit(function, line.strip(), text)


def _changes(tree: ast.AST, source: str) -> Iterator[tuple[int, int, int, str]]:
    """Line, columns, and what to put there."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            continue
        line, end = getattr(node, "lineno", 0), getattr(node, "end_lineno", 0)
        if not line or line != end:
            continue
        where = line, node.col_offset, node.end_col_offset  # type: ignore[attr-defined]
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            for other in _COMPARE.get(type(node.ops[0]), []):
                yield *where, ast.unparse(ast.Compare(node.left, [other()], node.comparators))
        elif isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
            yield (
                *where,
                "(" + ast.unparse(ast.BinOp(node.left, _ARITHMETIC[type(node.op)](), node.right)) + ")",
            )
        elif isinstance(node, ast.BoolOp):
            other_op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            yield *where, "(" + ast.unparse(ast.BoolOp(other_op, node.values)) + ")"
            for value in node.values:
                yield *where, "(" + ast.unparse(value) + ")"
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield *where, ast.unparse(node.operand)
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            yield *where, str(node.value + 1)
        elif (isinstance(node, ast.Constant) and type(node.value) is bool) or isinstance(node, ast.Name):
            name = node.id if isinstance(node, ast.Name) else str(node.value)
            if name in _NAMES:
                yield *where, _NAMES[name]
        elif isinstance(node, ast.Call) and len(node.args) == 2 and not isinstance(node.args[0], ast.Starred):
            yield *where, ast.unparse(ast.Call(node.func, node.args[::-1], node.keywords))
        elif (
            (isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant))
            or isinstance(node, ast.AugAssign)
            or (isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute | ast.Subscript))
        ):
            yield *where, "pass"
        elif isinstance(node, ast.Return) and node.value is not None:
            yield *where, "return None"
