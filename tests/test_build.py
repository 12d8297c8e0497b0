"""The build: what happens when the source, a patch or a tool is not as it should be."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "native" / "get_source.py"

HELLO = "one\ntwo\nthree\nfour\nfive\n"
PATCH = """\
diff --git a/src/hello.cpp b/src/hello.cpp
--- a/src/hello.cpp
+++ b/src/hello.cpp
@@ -1,5 +1,5 @@
 one
 two
-three
+THREE
 four
 five
"""


PATCH_TOOLS = [
    pytest.param(
        tool, marks=pytest.mark.skipif(not shutil.which(tool), reason=f"{tool} is not installed")
    )
    for tool in ("git", "patch")
]


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("get_source", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


get_source = load_script()


def make_sdist(path: Path, files: dict[str, str]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(f"llama_cpp_python-0.3.36/{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    return path


@pytest.fixture
def sdist(tmp_path: Path) -> Path:
    return make_sdist(
        tmp_path / "package.tar.gz",
        {
            "CMakeLists.txt": "not ours\n",
            "vendor/llama.cpp/src/hello.cpp": HELLO,
            "vendor/llama.cpp/src/other.cpp": "other\n",
            "vendor/llama.cpp/models/big.gguf": "big\n",
        },
    )


@pytest.fixture
def patches(tmp_path: Path) -> Path:
    folder = tmp_path / "patches"
    folder.mkdir()
    (folder / "0001-hello.patch").write_text(PATCH)
    return folder


def unpack(sdist: Path, patches: Path, into: Path) -> bool:
    return bool(get_source.unpack(sdist, get_source.patches_in(patches), into))


def test_unpack_takes_only_what_is_compiled_and_patches_it(
    sdist: Path, patches: Path, tmp_path: Path
) -> None:
    into = tmp_path / "llama.cpp"
    assert unpack(sdist, patches, into)
    assert get_source.files_below(into) == {Path("src/hello.cpp"), Path("src/other.cpp")}
    assert (into / "src/hello.cpp").read_text() == HELLO.replace("three", "THREE")


def test_unpack_does_nothing_when_nothing_changed(
    sdist: Path, patches: Path, tmp_path: Path
) -> None:
    into = tmp_path / "llama.cpp"
    assert unpack(sdist, patches, into)
    assert not unpack(sdist, patches, into)


def test_changed_patch_touches_only_its_own_files(
    sdist: Path, patches: Path, tmp_path: Path
) -> None:
    into = tmp_path / "llama.cpp"
    unpack(sdist, patches, into)
    for name in ("src/hello.cpp", "src/other.cpp"):
        os.utime(into / name, (1000, 1000))
    (patches / "0001-hello.patch").write_text(PATCH.replace("THREE", "3"))
    assert unpack(sdist, patches, into)
    assert (into / "src/hello.cpp").stat().st_mtime > 1000
    assert (into / "src/other.cpp").stat().st_mtime == 1000


def test_file_of_a_removed_patch_disappears(sdist: Path, patches: Path, tmp_path: Path) -> None:
    into = tmp_path / "llama.cpp"
    added = "--- /dev/null\n+++ b/src/new.cpp\n@@ -0,0 +1 @@\n+new\n"
    (patches / "0002-new.patch").write_text(added)
    unpack(sdist, patches, into)
    assert (into / "src/new.cpp").read_text() == "new\n"
    (patches / "0002-new.patch").unlink()
    unpack(sdist, patches, into)
    assert not (into / "src/new.cpp").exists()


@pytest.mark.parametrize("tool", PATCH_TOOLS)
def test_patch_that_does_not_apply_is_named_and_changes_nothing(
    tool: str, sdist: Path, patches: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_only(monkeypatch, tmp_path, [tool])
    into = tmp_path / "llama.cpp"
    unpack(sdist, patches, into)
    before = (into / "src/hello.cpp").read_text()
    (patches / "0002-stale.patch").write_text(PATCH)
    with pytest.raises(get_source.SourceError, match=r"0002-stale\.patch does not apply"):
        unpack(sdist, patches, into)
    assert (into / "src/hello.cpp").read_text() == before


@pytest.mark.parametrize("tool", PATCH_TOOLS)
def test_patch_applies_inside_a_repository_that_ignores_the_folder(
    tool: str, sdist: Path, patches: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("objects", "refs"):
        (tmp_path / ".git" / name).mkdir(parents=True)
    (tmp_path / ".git" / "HEAD").write_text("ref: refs/heads/main\n")
    (tmp_path / ".gitignore").write_text("/build/\n")
    keep_only(monkeypatch, tmp_path, [tool])
    into = tmp_path / "build" / "native" / "llama.cpp"
    unpack(sdist, patches, into)
    assert "THREE" in (into / "src/hello.cpp").read_text()


def test_without_git_and_patch_says_what_to_install(
    sdist: Path, patches: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_only(monkeypatch, tmp_path, [])
    with pytest.raises(get_source.SourceError, match="apt-get install patch"):
        unpack(sdist, patches, tmp_path / "llama.cpp")


def test_wrong_checksum_is_refused(sdist: Path, patches: Path, tmp_path: Path) -> None:
    into = tmp_path / "llama.cpp"
    arguments = [f"--cache={tmp_path}", f"--sdist={sdist}", f"--patches={patches}"]
    done = subprocess.run(
        [sys.executable, SCRIPT, "source", *arguments, f"--into={into}"],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert f"{sdist}: wrong checksum" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not into.exists()


def test_damaged_download_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(folder: Path) -> None:
        (folder / get_source.SDIST_NAME).write_bytes(b"damaged")

    monkeypatch.setattr(get_source, "download", download)
    with pytest.raises(get_source.SourceError, match="wrong checksum"):
        get_source.fetch(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_package_in_the_cache_is_not_downloaded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / get_source.SDIST_NAME).write_bytes(b"package")
    monkeypatch.setattr(get_source, "download", lambda folder: pytest.fail("downloaded"))
    expected = hashlib.sha256(b"package").hexdigest()
    assert get_source.fetch(tmp_path, expected) == tmp_path / get_source.SDIST_NAME


def test_the_pin_is_the_same_everywhere() -> None:
    pin = f"llama-cpp-python=={get_source.VERSION}"
    assert f'"{pin}"' in (ROOT / "pyproject.toml").read_text()
    assert get_source.SDIST_NAME in (ROOT / "Makefile").read_text()


def test_build_id_follows_patches_header_and_version(tmp_path: Path) -> None:
    for name in ("patches", "native/include"):
        (tmp_path / name).mkdir(parents=True)
    inputs = {
        "patches/0001-a.patch": "a",
        "native/include/longhaul.h": "h",
        "pyproject.toml": 'version = "1"\n',
    }
    for name, text in inputs.items():
        (tmp_path / name).write_text(text)
    seen = {get_source.build_id(tmp_path)}
    for name, text in inputs.items():
        (tmp_path / name).write_text(text.replace("1", "2").upper().replace("VERSION", "version"))
        seen.add(get_source.build_id(tmp_path))
    assert len(seen) == 4
    assert all(re.fullmatch("[0-9a-f]{12}", name) for name in seen)


# --- make check: each missing tool ends the run with one line that says what to install


def keep_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tools: list[str]) -> None:
    monkeypatch.setenv("PATH", str(link_tools(tmp_path / "only", tools)))


def link_tools(folder: Path, tools: list[str]) -> Path:
    folder.mkdir()
    for tool in tools:
        found = shutil.which(tool)
        assert found is not None, f"{tool} is needed by this test"
        (folder / tool).symlink_to(found)
    return folder


def check_with(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    make = shutil.which("make")
    assert make is not None
    return subprocess.run(
        [make, "-C", str(ROOT), "check", f"PYTHON={variables.pop('python', sys.executable)}"],
        check=False,
        capture_output=True,
        text=True,
        env={"PATH": str(folder), "HOME": str(folder), **variables},
    )


TOOLS = ["awk", "bash", "c++", "cc", "cmake", "getconf", "patch", "sh"]


def write_tool(folder: Path, name: str, script: str) -> None:
    (folder / name).unlink(missing_ok=True)
    (folder / name).write_text(f"#!{shutil.which('bash')}\n{script}\n")
    (folder / name).chmod(0o755)


def test_check_passes_with_all_tools(tmp_path: Path) -> None:
    done = check_with(link_tools(tmp_path / "tools", TOOLS))
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("tool", "message"),
    [
        ("cmake", "cmake is missing: apt-get install cmake"),
        ("c++", r"no C++ compiler found: apt-get install g++"),
        ("cc", "no C compiler found: apt-get install gcc"),
        ("patch", "git or patch is missing: apt-get install patch"),
    ],
)
def test_missing_tool_is_named(tool: str, message: str, tmp_path: Path) -> None:
    done = check_with(link_tools(tmp_path / "tools", [name for name in TOOLS if name != tool]))
    assert done.returncode != 0
    assert len(done.stderr.splitlines()) == 1
    assert message in done.stderr


@pytest.mark.parametrize(
    ("tool", "script", "message"),
    [
        ("cmake", "echo cmake version 3.18.4", "cmake is too old: 3.21 or newer is needed"),
        ("c++", "exit 1", "c++ cannot compile C++17"),
    ],
)
def test_tool_that_is_too_old_is_named(
    tool: str, script: str, message: str, tmp_path: Path
) -> None:
    folder = link_tools(tmp_path / "tools", TOOLS)
    write_tool(folder, tool, script)
    done = check_with(folder)
    assert done.returncode != 0
    assert len(done.stderr.splitlines()) == 1
    assert message in done.stderr


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ('[[ "$*" != *version_info* ]]', "Python 3.10 or newer is needed"),
        ('[[ "$*" != *ensurepip* ]]', "apt-get install python3-venv"),
    ],
)
def test_unfit_python_is_named(script: str, message: str, tmp_path: Path) -> None:
    folder = link_tools(tmp_path / "tools", TOOLS)
    write_tool(folder, "python-x", script)
    done = check_with(folder, python="python-x")
    assert done.returncode != 0
    assert len(done.stderr.splitlines()) == 1
    assert message in done.stderr


def test_package_is_verified_before_pip_runs_its_code() -> None:
    command = ["make", "-n", "-W", ".venv/.created", "-C", str(ROOT), ".venv/.bindings"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    steps = [line for line in done.stdout.splitlines() if "python" in line]
    fetch = next(i for i, line in enumerate(steps) if "get_source.py fetch" in line)
    install = next(i for i, line in enumerate(steps) if "llama_cpp_python" in line)
    assert fetch < install
