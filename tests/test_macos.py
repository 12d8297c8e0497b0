"""The native sources compile for macOS, where no machine of ours runs them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ziglang", reason="ziglang (a dev dependency) is not installed")

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "native" / "src").glob("*.cpp"))
LLAMA = ROOT / "build" / "native" / "llama.cpp"


def compile_for_macos(source: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the macOS compiler on one source of ours; keep its cache below build."""
    assert LLAMA.is_dir(), f"{LLAMA} is not there: run make build"
    cache = str(ROOT / "build" / "zig-cache")
    folders = [ROOT / "native/include", LLAMA / "include", LLAMA / "ggml/include"]
    folders += [LLAMA / "common", LLAMA / "vendor"]
    return subprocess.run(
        [sys.executable, "-m", "ziglang", "c++", "-target", "aarch64-macos", "-std=c++17"]
        + ["-Wall", "-Wextra", '-DLONGHAUL_BUILD_ID="test"', *options, str(source)]
        + [f"-I{folder}" for folder in folders],
        check=False,
        capture_output=True,
        text=True,
        env=os.environ | {"ZIG_GLOBAL_CACHE_DIR": cache, "ZIG_LOCAL_CACHE_DIR": cache},
    )


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
def test_source_compiles_for_macos(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "source.o"
    done = compile_for_macos(source, "-c", "-o", str(target))
    assert done.returncode == 0, done.stderr
    assert target.stat().st_size > 0


def test_uncached_reads_are_compiled_for_macos() -> None:
    """On macOS F_NOCACHE is fcntl command 48, and O_DIRECT does not exist."""
    users = [source for source in SOURCES if "F_NOCACHE" in source.read_text()]
    assert users
    for source in users:
        done = compile_for_macos(source, "-E", "-P")
        assert done.returncode == 0, done.stderr
        assert re.search(r"\bfcntl\s*\([^;]*\b48\b", done.stdout), source
