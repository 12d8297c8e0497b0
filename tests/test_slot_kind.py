"""How buffers of devices are classified: native/tests/slot-kind-test.cpp, with made-up devices."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from longhaul.errors import PatchError
from longhaul.library import lib_dir

ROOT = Path(__file__).resolve().parent.parent
NATIVE = ROOT / "native"
GGML = ROOT / "build/native/llama.cpp/ggml"


def test_buffers_of_every_kind_are_known_by_their_types(tmp_path: Path) -> None:
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    if not GGML.is_dir():
        pytest.skip("llama.cpp's sources are not there: make build")
    try:
        libraries = lib_dir()
    except PatchError as e:
        pytest.skip(str(e))
    program = tmp_path / "slot-kind-test"
    sources = [NATIVE / "tests/slot-kind-test.cpp"]
    sources += [NATIVE / "src" / name for name in ("slot-kind.cpp", "status.cpp")]
    includes = [NATIVE / "src", NATIVE / "include", GGML / "include", GGML / "src"]
    command = [compiler, "-std=c++17", "-Wall", "-Wextra", '-DLONGHAUL_BUILD_ID="test"']
    command += [f"-I{path}" for path in includes] + [str(path) for path in sources]
    command += [f"-L{libraries}", "-lggml-base", f"-Wl,-rpath,{libraries}", "-o", str(program)]
    subprocess.run(command, check=True)
    ran = subprocess.run([program], check=True, stdout=subprocess.PIPE, text=True)
    assert int(ran.stdout.removesuffix(" checks\n")) > 10_000
