"""The rooms of the package: who may import whom, and what every name owes its reader."""

from __future__ import annotations

import ast
import copy
import importlib
import inspect
import pickle
import pkgutil
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import llamatrio
from llamatrio import outcomes
from llamatrio.child.exits import Exit

ROOT = Path(llamatrio.__file__).parent
ROOMS = [
    "errors", "config", "outcomes", "requests", "calls", "wire", "child", "session", "lifecycle",
    "replay", "conveniences", "blocks", "provider", "ownership", "attached", "testing", "fixture",
    "affinity", "__main__",
]  # fmt: skip
IMPURE = {"trio", "os", "socket", "subprocess", "threading", "time", "signal"}
# Of other systems: they cannot be imported here.
OTHERS = {"child.windows", "child.kqueue", "child.rusage", "child.win32times", "child.win32job"}


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


MODULES = {name_of(path): ast.parse(path.read_bytes()) for path in sorted(ROOT.rglob("*.py"))}
PURE = {
    "errors",
    "config",
    "outcomes",
    "requests",
    "calls",
    "child.launch",
    "child.shelltext",
    "child.verdict",
    "child.wrappers",
    "child.isolation",
    "child.exits",
    "child.evidence",
    "fixture.facts",
    "fixture.judge",
    "fixture.procnet",
    "fixture.report",
    "lifecycle.phases",
    "lifecycle.queue",
    "lifecycle.policy",
    "lifecycle.journal",
    "lifecycle.blackbox",
    "session.native.sampling",
    "session.native.text",
    *(name for name in MODULES if name.split(".")[0] == "wire"),
}


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def imports_of(node: ast.AST, *, run_time_only: bool = False) -> Iterator[str]:
    """Every module that is imported anywhere in there, by its full name."""
    match node:
        case ast.Import(names=names):
            yield from (alias.name for alias in names)
        case ast.ImportFrom(module=str(module), names=names, level=0):
            for alias in names:
                full = f"{module}.{alias.name}"
                yield full if full.removeprefix("llamatrio.") in MODULES else module
        case ast.ImportFrom():
            raise AssertionError(f"a relative import in line {node.lineno}")
        case _:
            pass
    for child in ast.iter_child_nodes(node):
        if not (run_time_only and is_type_checking(node)):
            yield from imports_of(child, run_time_only=run_time_only)


def ours(module: str) -> str | None:
    """The name of one of our modules within the package; None for anybody else's."""
    if module == "llamatrio":
        return ""
    return module.removeprefix("llamatrio.") if module.startswith("llamatrio.") else None


def room(module: str) -> int:
    return ROOMS.index(module.split(".")[0])


# -- imports -----------------------------------------------------------------------------------


def test_every_module_stands_in_a_room() -> None:
    assert {name.split(".")[0] for name in MODULES} - {""} == set(ROOMS)


def test_a_pure_module_says_so_and_no_other_does() -> None:
    claiming = {
        name for name, tree in MODULES.items() if (ast.get_docstring(tree) or "").startswith("PURE")
    }
    assert claiming == PURE - {"errors"}


def test_a_pure_module_imports_nothing_that_does_anything() -> None:
    for name in PURE:
        for module in imports_of(MODULES[name], run_time_only=name == "errors"):
            assert module.split(".")[0] not in IMPURE, f"{name} imports {module}"
            if (local := ours(module)) is not None:
                assert local in PURE, f"{name} imports {module}"


def test_a_module_imports_only_from_its_own_room_and_those_above() -> None:
    for name in MODULES.keys() - {""}:
        for module in imports_of(MODULES[name], run_time_only=name == "errors"):
            if (local := ours(module)) is not None:
                assert local, f"{name} imports the package itself"
                assert room(local) <= room(name), f"{name} imports {module}"


def test_modules_of_one_room_do_not_import_one_another_in_a_circle() -> None:
    graph = {
        name: {local for module in imports_of(tree) if (local := ours(module))}
        for name, tree in MODULES.items()
        if name != "errors"
    }
    done: set[str] = set()
    while ready := {
        name for name in graph if name not in done and not graph[name] & set(graph) - done
    }:
        done |= ready
    assert set(graph) - done == set()


def test_the_host_imports_the_standard_library_and_the_wheel_alone() -> None:
    for module in imports_of(MODULES["child.host"]):
        top = module.split(".")[0]
        assert top == "xllamacpp" or top in sys.stdlib_module_names


def test_nobody_imports_the_host() -> None:
    for name, tree in MODULES.items():
        assert "llamatrio.child.host" not in set(imports_of(tree)), name


# -- docstrings --------------------------------------------------------------------------------

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def definitions(name: str) -> Iterator[tuple[str, Definition]]:
    """Every public class, function and method, also those in a branch for one system."""

    def walk(nodes: list[ast.stmt], prefix: str) -> Iterator[tuple[str, Definition]]:
        for node in nodes:
            match node:
                case ast.If():
                    yield from walk([*node.body, *node.orelse], prefix)
                case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                    if node.name.startswith("_"):
                        continue
                    yield f"{prefix}.{node.name}", node
                    if isinstance(node, ast.ClassDef):
                        yield from walk(node.body, f"{prefix}.{node.name}")
                case _:
                    pass

    yield from walk(MODULES[name].body, name)


def test_every_module_and_every_public_name_has_a_docstring() -> None:
    bare = [name for name, tree in MODULES.items() if not ast.get_docstring(tree)]
    bare += [
        full
        for name in MODULES
        for full, node in definitions(name)
        if not ast.get_docstring(node) and not is_overload(node)
    ]
    assert bare == []


def is_overload(node: Definition) -> bool:
    return any(ast.unparse(decorator) == "overload" for decorator in node.decorator_list)


def test_every_public_coroutine_says_what_a_cancellation_does() -> None:
    silent = [
        full
        for name in MODULES
        for full, node in definitions(name)
        if isinstance(node, ast.AsyncFunctionDef)
        # A docstring that points to another one need not say it again.
        and not re.search(r"ancel|[Ss]ee `", ast.get_docstring(node) or "")
        and not is_internal(full)
    ]
    assert silent == []


def is_internal(full: str) -> bool:
    """Whether this is a part of one child's machinery, whose caller is `run_child` alone."""
    return full.startswith(("child.posix", "child.windows", "child.pumps"))


# -- exceptions --------------------------------------------------------------------------------


def classes() -> dict[str, type[BaseException]]:
    found = {}
    for info in pkgutil.walk_packages([str(ROOT)], "llamatrio."):
        if info.name.removeprefix("llamatrio.") in OTHERS or info.name.endswith("__main__"):
            continue
        for item in vars(importlib.import_module(info.name)).values():
            ours = inspect.isclass(item) and item.__module__ == info.name
            if ours and issubclass(item, BaseException):
                found[item.__qualname__] = item
    return found


EXIT = Exit(7, -9, "SIGKILL", tail="E out of memory")
ARGUMENTS: dict[str, object] = {
    "path": "/m.gguf",
    "program": "/bin/llama-server",
    "reason": "no such file",
    "message": "it broke",
    "exit": EXIT,
    "stderr_tail": "the last line",
    "status": 400,
    "kind": "invalid_request_error",
    "evidence": ("stderr carries a record",),
    "suggestion": "llama-server",
    "details": {"n_ctx": 8},
    "text": "so far",
    "length": 7,
    "limit": 8,
}


def arguments_of(kind: type[BaseException]) -> list[object]:
    if kind is llamatrio.RequestCancelled:
        return [outcomes.Cancelled("stop", "prompt"), "so far"]
    if kind is llamatrio.RequestFailed:
        return [outcomes.Failed(llamatrio.ChildDied("it died", EXIT), "prompt"), "so far"]
    if kind.__init__ is Exception.__init__:
        return ["it broke"]
    return [ARGUMENTS[name] for name in list(inspect.signature(kind).parameters)]


def described(error: BaseException) -> list[str]:
    attributes = {name: repr(value) for name, value in vars(error).items()}
    return [type(error).__qualname__, str(error), repr(error), repr(attributes)]


def test_the_exceptions_are_found() -> None:
    assert {"ChildError", "SocketPathTooLong", "Undeliverable", "RequestFailed"} <= set(classes())


def test_every_exception_survives_pickling_and_copying() -> None:
    for kind in classes().values():
        error = kind(*arguments_of(kind))
        assert str(error)
        for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
            assert twin is not error
            assert described(twin) == described(error)


def test_every_exception_has_a_docstring_of_its_own() -> None:
    assert [name for name, kind in classes().items() if not vars(kind).get("__doc__")] == []


def test_every_exception_of_the_library_is_exported_and_has_the_one_base() -> None:
    for name, kind in classes().items():
        if kind.__module__ == "llamatrio.errors":
            assert getattr(llamatrio, name) is kind
            assert issubclass(kind, llamatrio.LlamatrioError)
