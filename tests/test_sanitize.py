"""The read pool under ThreadSanitizer, AddressSanitizer and UBSan: native/tests/read-pool-test.cpp.

Skipped where the compiler or the system lacks a sanitizer, unless LONGHAUL_SANITIZE=required, which
`make sanitize` sets.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import NoReturn

import pytest

NATIVE = Path(__file__).resolve().parent.parent / "native"
SOURCES = [
    NATIVE / "tests/read-pool-test.cpp",
    NATIVE / "src/read-pool.cpp",
    NATIVE / "src/status.cpp",
]
SANITIZERS = ["thread", "address,undefined"]
FLAGS = ["-std=c++17", "-O1", "-g", "-fno-omit-frame-pointer", "-Wall", "-Wextra", "-pthread"]
REQUIRED = os.environ.get("LONGHAUL_SANITIZE") == "required"
OPTIONS = {
    "TSAN_OPTIONS": "halt_on_error=1",
    "ASAN_OPTIONS": "detect_stack_use_after_return=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}
PROBE = "#include <thread>\nint main() { std::thread([] {}).join(); }\n"

every_sanitizer = pytest.mark.parametrize("sanitizer", SANITIZERS)


def compiler() -> str:
    chosen = os.environ.get("CXX")
    found = [name for name in ([chosen] if chosen else ["c++", "g++", "clang++"]) if which(name)]
    if not found:
        unavailable(f"there is no C++ compiler: {chosen or 'c++'}")
    return found[0]


def which(command: str) -> str | None:
    return shutil.which(command.split()[0])


def unavailable(reason: str) -> NoReturn:
    if REQUIRED:
        pytest.fail(reason)
    pytest.skip(reason)


def compiled(
    sanitizer: str, sources: list[Path], program: Path
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            *compiler().split(),
            *FLAGS,
            f"-fsanitize={sanitizer}",
            "-fno-sanitize-recover=all",
            *(f"-I{NATIVE / folder}" for folder in ("include", "src")),
            *map(str, sources),
            "-o",
            str(program),
        ],
        capture_output=True,
        text=True,
    )


def run(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(program), *arguments],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=180,
        env={**os.environ, **OPTIONS},
    )


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The compiled test by sanitizer, as far as it has been asked for."""
    return {"folder": tmp_path_factory.mktemp("sanitize")}


def program_for(sanitizer: str, programs: dict[str, Path]) -> Path:
    """Compile the test once; skips if an empty program already fails with this sanitizer."""
    if sanitizer not in programs:
        folder = programs["folder"]
        probe, source = folder / "probe", folder / "probe.cpp"
        source.write_text(PROBE)
        done = compiled(sanitizer, [source], probe)
        if done.returncode == 0:
            done = run(probe)
        if done.returncode != 0:
            unavailable(f"-fsanitize={sanitizer} does not work here: {done.stderr.strip()[-300:]}")
        program = folder / re.sub(r"\W", "-", sanitizer)
        done = compiled(sanitizer, SOURCES, program)
        assert done.returncode == 0, done.stderr
        assert done.stderr == "", "warnings"
        programs[sanitizer] = program
    return programs[sanitizer]


@every_sanitizer
def test_the_read_pool_is_clean(sanitizer: str, programs: dict[str, Path], tmp_path: Path) -> None:
    done = run(program_for(sanitizer, programs), str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    found = re.fullmatch(r"(\d+) bytes checked, file mode \d\n", done.stdout)
    assert found
    assert int(found[1]) > 50_000_000


@pytest.mark.parametrize(
    ("sanitizer", "fault", "report"),
    [
        ("thread", "race", "ThreadSanitizer: data race"),
        ("address,undefined", "overflow", "AddressSanitizer: heap-buffer-overflow"),
    ],
)
def test_a_fault_is_reported(
    sanitizer: str, fault: str, report: str, programs: dict[str, Path], tmp_path: Path
) -> None:
    done = run(program_for(sanitizer, programs), str(tmp_path), fault)
    assert done.returncode not in (0, 2)
    assert report in done.stderr
