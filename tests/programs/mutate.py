"""Change the pure core in one place at a time, and see whether a test notices.

`python tests/programs/mutate.py [MODULE...]`, from the root of the checkout. The exit code is 1 if
a change survives that is not in `mutants.txt`, where every one that may survive stands with the
reason for it.

The tests are collected once. For each mutant the process forks, changes the code of the function,
or the value of the constant, in place, and runs the tests, the fastest first, up to the first that
fails. What is not changed: texts for people (f-strings, arguments of `raise`), annotations, and the
fields of classes.
"""

from __future__ import annotations

import ast
import copy
import importlib
import json
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Final

import attrs
import pytest
from _pytest.runner import runtestprotocol

ROOT: Final = Path(__file__).parents[2]
ALLOWED: Final = Path(__file__).with_name("mutants.txt")
TESTS: Final = {
    "llamatrio.wire.lines": ["lines", "corpus", "cuts"],
    "llamatrio.wire.records": ["records", "corpus"],
    "llamatrio.wire.sse": ["sse", "reply"],
    "llamatrio.wire.ansi": ["ansi"],
    "llamatrio.wire.redaction": ["redaction", "ansi"],
    "llamatrio.lifecycle.phases": ["phases", "readme"],
    "llamatrio.lifecycle.queue": ["queue"],
}
SLOWEST: Final = 5.0  # seconds; a test that takes longer than that is not run
PATIENCE: Final = 20.0  # seconds, beside three times what the tests take
MEMORY: Final = 3 * 2**30

CENSUS: Final = "nothing_left"

COMPARISONS: Final[dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]]] = {
    ast.Lt: (ast.LtE, ast.GtE), ast.LtE: (ast.Lt, ast.Gt), ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt), ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,), ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,), ast.In: (ast.NotIn,), ast.NotIn: (ast.In,),
}  # fmt: skip
OPERATORS: Final[dict[type[ast.operator], type[ast.operator]]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.Pow: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.Add, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr,
}  # fmt: skip
# In the table of phases a name stands for a member of one of these.
FAMILIES: Final = [
    ["unloaded", "loading", "started", "stopping", "resident", "unloading"],
    ["open_", "spawn", "dispatch", "cancel", "close", "drop", "fail", "interrupt", "end", "adopt"],
    ["wait", "refuse", "postpone"],
    ["START", "STOP", "UNLOAD", "RECONFIGURE", "READY", "AGAIN", "GONE", "IDLE"],
    ["UNLOADED", "LOADING", "STARTED", "STOPPING", "RESIDENT", "UNLOADING"],
]


@attrs.frozen
class Mutant:
    """One change.

    Attributes:
      module: Where.
      place: The function or the constant.
      line: Its number.
      change: What was there, and what is there now.
      tree: The module as it is then.
    """

    module: str
    place: str
    line: int
    change: str
    tree: ast.Module

    @property
    def name(self) -> str:
        return f"{self.module.removeprefix('llamatrio.')} {self.place}: {self.change}"


# -- changes -----------------------------------------------------------------------------------


def replacements(node: ast.AST) -> Iterator[ast.AST]:
    """Give what may stand in the place of a node."""
    match node:
        case ast.Compare(ops=[op]):
            for other in COMPARISONS[type(op)]:
                yield ast.Compare(node.left, [other()], node.comparators)
        case ast.Compare():
            for at, op in enumerate(node.ops):
                for other in COMPARISONS[type(op)]:
                    ops = [*node.ops[:at], other(), *node.ops[at + 1 :]]
                    yield ast.Compare(node.left, ops, node.comparators)
        case ast.BoolOp():
            yield ast.BoolOp(ast.And() if isinstance(node.op, ast.Or) else ast.Or(), node.values)
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            yield node.operand
        case ast.BinOp(op=op) if type(op) in OPERATORS:
            yield ast.BinOp(node.left, OPERATORS[type(op)](), node.right)
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield ast.Constant(value + 1)
        case ast.Constant(value=str(value)):
            yield ast.Constant(f"{value}X")
        case ast.Constant(value=bytes(value)):
            yield ast.Constant(value + b"X")
        case ast.IfExp():
            yield ast.IfExp(node.test, node.orelse, node.body)
        case ast.Slice() if node.lower or node.upper:
            if node.lower:
                yield ast.Slice(None, node.upper)
            if node.upper:
                yield ast.Slice(node.lower, None)
        case ast.Name(ctx=ast.Load()) | ast.Attribute(ctx=ast.Load()):
            yield from next_members(node)
        case ast.Tuple(ctx=ast.Load()) | ast.List(ctx=ast.Load()) | ast.Set():
            for at in range(len(node.elts)):
                shorter = copy.copy(node)
                shorter.elts = node.elts[:at] + node.elts[at + 1 :]
                yield shorter
        case ast.Dict():
            for at in range(len(node.keys)):
                keys, values = list(node.keys), list(node.values)
                del keys[at], values[at]
                yield ast.Dict(keys, values)
        case ast.AugAssign(op=op) if type(op) in OPERATORS:
            yield ast.AugAssign(node.target, OPERATORS[type(op)](), node.value)
            yield ast.Pass()
        case ast.Break():
            yield ast.Continue()
        case ast.Continue():
            yield ast.Break()
        case ast.Return(value=ast.expr() as value) if not is_none(value):
            yield ast.Return(ast.Constant(None))
        case ast.Expr(value=ast.Constant(value=str())):
            pass  # a docstring
        case ast.Expr() | ast.Delete() | ast.Raise():
            yield ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield ast.Pass()
        case ast.If() if not isinstance(node.test, ast.Compare | ast.UnaryOp):
            yield ast.If(ast.UnaryOp(ast.Not(), node.test), node.body, node.orelse)
        case ast.comprehension() if node.ifs:
            yield ast.comprehension(node.target, node.iter, [], node.is_async)
        case ast.Match():
            for at, each in enumerate(node.cases):
                if len(node.cases) > 1:
                    yield ast.Match(node.subject, node.cases[:at] + node.cases[at + 1 :])
                if each.guard is not None:
                    cases = list(node.cases)
                    cases[at] = ast.match_case(each.pattern, None, each.body)
                    yield ast.Match(node.subject, cases)
        case _:
            pass


def next_members(node: ast.Name | ast.Attribute) -> Iterator[ast.AST]:
    name = node.id if isinstance(node, ast.Name) else node.attr
    for family in FAMILIES:
        if name in family:
            other = family[(family.index(name) + 1) % len(family)]
            if isinstance(node, ast.Name):
                yield ast.Name(other, ast.Load())
            else:
                yield ast.Attribute(node.value, other, ast.Load())


def is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def mutants_of(module: str) -> Iterator[Mutant]:
    tree = ast.parse(SOURCES[module])
    for statement in tree.body:
        yield from within(module, tree, statement, "")


def within(module: str, tree: ast.Module, node: ast.stmt, prefix: str) -> Iterator[Mutant]:
    """Give the mutants of one statement of a module, or of a class."""
    match node:
        case ast.ClassDef():
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef):
                    yield from within(module, tree, inner, f"{prefix}{node.name}.")
        case ast.FunctionDef():
            yield from changes(module, tree, node, f"{prefix}{node.name}")
        case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
            if "TypeAlias" not in ast.unparse(node) and "TypeVar" not in ast.unparse(node):
                yield from changes(module, tree, node, name)
        case _:
            pass


SKIPPED: Final = {"annotation", "returns", "decorator_list", "args", "type_params"}


def changes(module: str, tree: ast.Module, root: ast.AST, place: str) -> Iterator[Mutant]:
    """Change each node below in each way, one at a time, and put it back."""
    for field, value in ast.iter_fields(root):
        if isinstance(root, ast.FunctionDef) and field in SKIPPED:
            continue
        if field == "annotation" or isinstance(root, ast.JoinedStr | ast.Raise):
            continue
        if isinstance(root, ast.Expr) and isinstance(root.value, ast.Constant):
            continue  # a docstring
        items = value if isinstance(value, list) else [value]
        for at, child in enumerate(items):
            if not isinstance(child, ast.AST):
                continue
            for other in replacements(child):
                line = getattr(child, "lineno", getattr(root, "lineno", 0))
                put(root, field, at, other)
                ast.fix_missing_locations(tree)
                change = f"{brief(child)} -> {brief(other)}"
                yield Mutant(module, place, line, change, tree)
                put(root, field, at, child)
            yield from changes(module, tree, child, place)


def put(root: ast.AST, field: str, at: int, node: ast.AST) -> None:
    value = getattr(root, field)
    if isinstance(value, list):
        value[at] = node
    else:
        setattr(root, field, node)


def brief(node: ast.AST) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 100 else f"{text[:60]} ... {text[-35:]}"


# -- in the forked process ---------------------------------------------------------------------


def apply(mutant: Mutant) -> None:
    """Change the library in this process."""
    module = sys.modules[mutant.module]
    code = compile(mutant.tree, module.__file__ or "", "exec")
    if "." in mutant.place or isinstance(vars(module).get(mutant.place), FunctionType):
        function_of(module, mutant.place).__code__ = code_of(code, mutant.place)
        if mutant.place == "_table":
            rebind(module, "TABLE", module._table())
        return
    scratch = dict(vars(module))
    for node in mutant.tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and target.id == mutant.place:
            exec(compile(ast.Module([node], []), "", "exec"), scratch)
    rebind(module, mutant.place, scratch[mutant.place])


def function_of(module: ModuleType, place: str) -> FunctionType:
    owner: object = module
    *classes, name = place.split(".")
    for part in classes:
        owner = vars(owner)[part]
    found = vars(owner)[name]
    found = getattr(found, "fget", None) or getattr(found, "__func__", found)
    assert isinstance(found, FunctionType)
    return found


def code_of(code: CodeType, place: str) -> CodeType:
    for part in place.split("."):
        inner = [item for item in code.co_consts if isinstance(item, CodeType)]
        code = next(item for item in inner if item.co_name == part)
    return code


def rebind(module: ModuleType, name: str, value: object) -> None:
    """Give a constant another value, also where it was imported."""
    old = vars(module)[name]
    for other in list(sys.modules.values()):
        if getattr(other, "__dict__", {}).get(name) is old:
            setattr(other, name, value)


# -- the runs ----------------------------------------------------------------------------------


class Runner:
    """A plugin of pytest that runs what was collected again and again."""

    def __init__(self, modules: Sequence[str]) -> None:
        self.modules = modules
        self.survivors: list[Mutant] = []
        self.counts: dict[str, list[int]] = {}

    def pytest_sessionstart(self) -> None:
        """Let nobody look for the simplest example that fails: it takes long."""
        from hypothesis import Phase, settings  # pytest wants to be the first to import it

        settings.register_profile("mutants", phases=(Phase.explicit, Phase.generate), database=None)
        settings.load_profile("mutants")

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        for module in self.modules:
            names = [f"test_{name}.py" for name in TESTS[module]]
            items = [item for item in session.items if item.path.name in names]
            # Those run another Python, which reads the library as it is.
            items = [item for item in items if "command" not in item.name]
            for item in items:  # what a pure test leaves behind is not asked every time
                assert isinstance(item, pytest.Function)
                item.fixturenames[:] = [name for name in item.fixturenames if name != CENSUS]
            items, seconds = self.measure(items)
            say(f"{module}: {len(items)} tests, {seconds:.1f} s")
            counts = self.counts.setdefault(module, [0, 0])
            for mutant in mutants_of(module):
                counts[0] += 1
                if fork(partial(survives, mutant, items), PATIENCE + 3 * seconds):
                    counts[1] += 1
                    self.survivors.append(attrs.evolve(mutant, tree=ast.Module([], [])))
                    say(f"  line {mutant.line}, {mutant.name}")
            say(f"{module}: {counts[0]} mutants, {counts[1]} survive")
            # Or something else than the mutants made tests fail, and nothing is known.
            assert fork(partial(all_pass, items), PATIENCE + 3 * seconds)
        return True

    def measure(self, items: list[pytest.Item]) -> tuple[list[pytest.Item], float]:
        """Sort tests by how long they take, without those that take very long."""
        reader, writer = os.pipe()

        def run() -> bool:
            os.write(writer, json.dumps([*run_all(items)]).encode())
            return True

        assert fork(run, 600.0)
        os.close(writer)
        with os.fdopen(reader, "rb") as pipe:
            seconds = json.loads(pipe.read())
        assert None not in seconds, [i.nodeid for i, s in zip(items, seconds, strict=True) if not s]
        pairs = sorted(zip(seconds, range(len(items)), strict=True))
        kept = [(time, items[at]) for time, at in pairs if time <= SLOWEST]
        return [item for _, item in kept], sum(time for time, _ in kept)


def survives(mutant: Mutant, items: Sequence[pytest.Item]) -> bool:
    try:
        apply(mutant)
    except Exception:  # noqa: BLE001
        return False  # whatever a mutant raises when it is made, it is noticed
    return all_pass(items)


def all_pass(items: Sequence[pytest.Item]) -> bool:
    return None not in run_all(items)


def run_all(items: Sequence[pytest.Item]) -> Iterator[float | None]:
    """Run tests; give the seconds that each took, or None if it failed."""
    for item, following in zip_longest(items, items[1:]):
        before = time.perf_counter()
        reports = runtestprotocol(item, log=False, nextitem=following)
        passed = all(report.passed for report in reports)
        yield time.perf_counter() - before if passed else None


def fork(work: Callable[[], bool], seconds: float) -> bool:
    """Do it in a process of its own; give whether it said yes in time."""
    if not (pid := os.fork()):
        code = 1
        try:
            os.setsid()
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))  # for loops without an end
            null = os.open(os.devnull, os.O_RDWR)
            for fd in (0, 1, 2):
                os.dup2(null, fd)
            code = 0 if work() else 1
        finally:
            os._exit(code)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.002)
    say(f"  no end after {seconds:.0f} s")
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return False


def say(text: str) -> None:
    os.write(SAID, f"{text}\n".encode())


SAID: Final = os.dup(1)
SOURCES: Final[dict[str, str]] = {}


def main() -> int:
    modules = sys.argv[1:] or list(TESTS)
    files = sorted({f"{ROOT}/tests/test_{name}.py" for one in modules for name in TESTS[one]})
    for module in modules:  # at once, before somebody works on them
        SOURCES[module] = Path(importlib.import_module(module).__file__ or "").read_text()
    runner = Runner(modules)
    # Whole runs are limited in time, so that no test needs to be.
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory:
        os.environ["TMPDIR"] = directory  # a test that fails at once leaves its own behind
        tempfile.tempdir = None
        pytest.main(
            ["-q", "-p", "no:cacheprovider", "--timeout=0", "-n", "0", *files], plugins=[runner]
        )
    lines = ALLOWED.read_text().splitlines() if ALLOWED.exists() else []
    allowed = {line.strip() for line in lines if line and not line.startswith("#")}
    unknown = [mutant for mutant in runner.survivors if mutant.name not in allowed]
    for mutant in unknown:
        say(f"no reason is given for line {mutant.line}, {mutant.name}")
    say(
        f"{sum(count for count, _ in runner.counts.values())} mutants, "
        f"{len(runner.survivors)} survive, {len(unknown)} of them without a reason"
    )
    return 1 if unknown else 0


if __name__ == "__main__":
    sys.exit(main())
