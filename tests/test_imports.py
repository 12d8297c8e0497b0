"""Who may import whom, and what importing the package must not load."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from longhaul.errors import PatchError
from longhaul.library import lib_dir

PACKAGE = Path(__file__).resolve().parent.parent / "longhaul"

ERRORS = {"errors"}
VALUES = {"errors", "config", "experts", "stats"}
PURE = {"policy", "residency", "planner", "budget", "tier"}
BOUNDARY = {"index", "native", "llama"}

# What of ours each module may import, at most.
OURS: dict[str, set[str]] = {
    # 0
    "errors": set(),
    # 1
    "config": ERRORS,
    "experts": ERRORS,
    "stats": ERRORS,
    "library": ERRORS,
    "closing": set(),
    "files": set(),
    "cgroups": set(),
    # 2, pure policy: each may import those before it
    "policy": VALUES,
    "residency": VALUES | {"policy"},
    "planner": VALUES | {"policy", "residency"},
    "budget": VALUES,
    "tier": VALUES | {"policy", "residency", "planner", "budget"},
    "pools": VALUES | {"budget"},
    "figures": {"stats", "files"},
    "arguments": VALUES | {"budget"},
    "report": VALUES | {"budget", "figures", "pools"},
    "server_arguments": ERRORS | {"arguments"},
    "launch": VALUES
    | {"planner", "budget", "arguments", "report", "server_arguments"}
    | {"pools", "slot_plan", "tier"},
    "page": set(),  # a process of its own
    "trace": VALUES,
    "trace_files": ERRORS | {"trace"},
    "workload": {"stats", "trace"},
    "replay": VALUES | PURE | {"trace", "workload"},
    "reuse": {"workload"},
    "slot_plan": ERRORS | {"budget", "files", "replay", "reuse", "trace", "workload"},
    "survey": VALUES | {"files", "report", "trace", "trace_files"},
    "replay_table": VALUES | PURE | {"replay", "report", "slot_plan", "trace_files", "workload"},
    "plots": ERRORS,
    "trace_plots": ERRORS
    | {"plots", "replay", "replay_table", "report", "reuse", "trace", "workload"},
    "forecast": VALUES,
    "shape": VALUES,
    "machine": {"config", "forecast"},
    # 2, boundary: never pure policy, never each other
    "gguf_header": VALUES,
    "index": VALUES | {"gguf_header"},
    "native": VALUES | {"closing", "library"},
    "llama": VALUES | {"closing", "library"},
    "demo": VALUES | {"gguf_header", "files"},
    # 3
    "engine": VALUES | PURE | BOUNDARY | {"closing", "files", "trace"},
    # 4
    "options": {"errors", "config", "policy"},
    "probe": VALUES
    | BOUNDARY
    | {"arguments", "budget", "engine", "launch", "library", "machine", "pools"},
    "live": {"engine", "launch", "server_arguments"},
    "warm": VALUES | {"demo", "engine", "files"},
    "watch": VALUES | {"budget", "engine", "launch", "report"},
    "tool": VALUES
    | PURE
    | BOUNDARY
    | {
        "engine",
        "arguments",
        "launch",
        "report",
        "demo",
        "figures",
        "live",
        "machine",
        "probe",
        "warm",
        "watch",
    }
    | {"server_arguments"},
    "advise": VALUES
    | PURE
    | {"index", "gguf_header", "arguments", "forecast", "launch", "machine", "report", "shape"}
    | {"pools", "probe", "server_arguments"},
    "doctor": VALUES
    | PURE
    | BOUNDARY
    | {"advise", "arguments", "demo", "launch", "library", "machine"},
    "bench_run": VALUES
    | PURE
    | BOUNDARY
    | {"advise", "arguments", "cgroups", "demo", "engine", "launch", "plots", "tool"}
    | {"pools", "probe"},
    "trace_commands": {"errors", "config", "policy", "options"}
    | {"replay_table", "slot_plan", "survey", "trace_plots"},
    # 5: never one another
    "cli": VALUES | PURE | BOUNDARY | {"engine", "options", "tool"},
    "server": VALUES | {"options", "tool", "server_arguments"},
    "bench": {"config", "options", "bench_run"},
    "main": VALUES
    | PURE
    | BOUNDARY
    | {"engine", "options", "tool", "advise", "doctor"}
    | {"trace_commands"},
    "__init__": {"errors", "config"},
}

# What of others' each module may import, at most.
THIRD: dict[str, set[str]] = {
    **{name: {"numpy"} for name in ("config", "experts", "stats", *PURE, "engine")},
    "gguf_header": {"gguf"},
    "native": {"cffi"},
    "llama": {"llama_cpp", "numpy"},
    "machine": {"numpy"},
    **{name: {"numpy"} for name in ("trace", "trace_files")},
    "plots": {"numpy", "matplotlib"},
    "trace_commands": {"click"},
    "demo": {"gguf", "numpy"},
    **{name: {"click"} for name in ("options", "cli", "main", "server")},
    **{name: {"click"} for name in ("bench", "bench_run")},
}

ONLY_IN_BODIES = {
    "cli": {"tool"},
    "main": {"tool", "advise", "doctor"},
    "bench": {"bench_run"},
    "bench_run": {"plots"},  # which only a plot needs
    "doctor": {"llama"},  # so that what is wrong with the libraries is a finding
    "server": {"tool", "server_arguments"},
    "trace_commands": {"replay_table", "slot_plan", "survey", "trace_plots"},
    "plots": {"matplotlib"},  # an extra
}  # so that --help needs no libraries
ONLY_FOR_TYPES = {"residency": {"planner"}, "plots": {"matplotlib"}}


@dataclass(frozen=True)
class Import:
    module: str  # of ours by its bare name, of others by the first part of theirs
    ours: bool
    place: str  # top, body or types
    line: int


def imports_of(name: str) -> list[Import]:
    tree = ast.parse((PACKAGE / f"{name}.py").read_text(encoding="utf-8"))
    return list(walk(tree, "top"))


def walk(node: ast.AST, place: str) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                root, _, rest = alias.name.partition(".")
                ours = root == "longhaul"
                yield Import(rest if ours else root, ours, place, child.lineno)
        elif isinstance(child, ast.ImportFrom):
            yield from from_import(child, place)
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from walk(child, "body")
        elif isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            yield from walk(child, "types")
        else:
            yield from walk(child, place)


def from_import(node: ast.ImportFrom, place: str) -> Iterator[Import]:
    assert [alias.name for alias in node.names] != ["*"], f"line {node.lineno}"
    if node.level == 0:
        assert node.module is not None
        yield Import(node.module.split(".")[0], False, place, node.lineno)
    elif node.module:
        yield Import(node.module, True, place, node.lineno)
    else:  # from . import native
        for alias in node.names:
            yield Import(alias.name, True, place, node.lineno)


MODULES = sorted(path.stem for path in PACKAGE.glob("*.py"))

every_module = pytest.mark.parametrize("name", MODULES)


def test_the_table_names_every_module() -> None:
    assert sorted(OURS) == MODULES
    assert set(THIRD) <= set(OURS)


@every_module
def test_modules_import_only_what_their_layer_may(name: str) -> None:
    for found in imports_of(name):
        if not found.ours or found.module in ONLY_FOR_TYPES.get(name, set()):
            continue
        assert found.module in OURS[name], f"{name}.py:{found.line} imports {found.module}"


@every_module
def test_modules_import_only_the_packages_that_are_theirs(name: str) -> None:
    for found in imports_of(name):
        if found.ours or found.module in sys.stdlib_module_names:
            continue
        assert found.module in THIRD.get(name, set()), f"{name}.py:{found.line}: {found.module}"


@every_module
def test_own_modules_are_imported_relatively(name: str) -> None:
    absolute = [found for found in imports_of(name) if found.module == "longhaul"]
    assert absolute == []


@every_module
def test_imports_stand_at_the_top_but_for_the_exceptions(name: str) -> None:
    bodies, types = ONLY_IN_BODIES.get(name, set()), ONLY_FOR_TYPES.get(name, set())
    for found in imports_of(name):
        expected = {"body"} if found.module in bodies else set()
        expected |= {"types"} if found.module in types else set()
        if found.module != "typing":
            assert found.place in (expected or {"top"}), f"{name}.py:{found.line}"


def test_there_are_no_cycles() -> None:
    waiting = {
        name: {found.module for found in imports_of(name) if found.ours and found.place != "types"}
        for name in MODULES
    }
    while waiting:
        ready = {name for name, needs in waiting.items() if not needs & set(waiting)}
        assert ready, f"these import one another: {sorted(waiting)}"
        waiting = {name: needs for name, needs in waiting.items() if name not in ready}


def test_the_checks_see_what_they_should() -> None:
    source = (
        "from typing import TYPE_CHECKING\n"
        "from . import native\n"
        "import gguf.constants\n"
        "import longhaul.tool\n"
        "if TYPE_CHECKING:\n    from .planner import Plan\n"
        "try:\n    import numpy\nexcept ImportError:\n    pass\n"
        "class A:\n    def f(self):\n        from .tool import run\n"
    )
    found = {(i.module, i.ours, i.place) for i in walk(ast.parse(source), "top")}
    assert found == {
        ("typing", False, "top"),
        ("native", True, "top"),
        ("gguf", False, "top"),
        ("tool", True, "top"),
        ("planner", True, "types"),
        ("numpy", False, "top"),
        ("tool", True, "body"),
    }


# --- what is loaded -------------------------------------------------------------------------------

LOADED = """
import sys
from pathlib import Path
import {module}
print(*sys.modules)
maps = Path("/proc/self/maps")
print(*{{line.split("/")[-1] for line in maps.read_text().splitlines() if "/" in line}})
"""


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc/self/maps")
@pytest.mark.parametrize("module", ["longhaul", "longhaul.cli", "longhaul.main"])
def test_importing_loads_no_library(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOADED.format(module=module)],
        capture_output=True,
        text=True,
        check=True,
    )
    modules, files = (set(line.split()) for line in done.stdout.splitlines())
    assert module in modules
    assert not modules & {"llama_cpp", "gguf", "longhaul.native", "longhaul.llama", "longhaul.tool"}
    assert not modules & {"numpy", "matplotlib", "longhaul.trace", "longhaul.replay"}
    assert any(name.startswith("libc") for name in files)
    assert not [name for name in files if name.startswith(("liblonghaul", "libllama", "libggml"))]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc/self/maps")
def test_the_library_would_be_seen_if_it_were_loaded() -> None:
    try:
        folder = lib_dir()
    except PatchError as e:
        pytest.skip(str(e))
    code = LOADED.format(module="longhaul.native").replace(
        "print(*sys.modules)", "longhaul.native._lib()\nprint(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "LONGHAUL_LIB_DIR": str(folder)},
        capture_output=True,
        text=True,
        check=True,
    )
    files = done.stdout.splitlines()[1].split()
    assert [name for name in files if name.startswith("liblonghaul")]
