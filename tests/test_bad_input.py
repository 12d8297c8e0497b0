"""What a user can get wrong: one line that says what and what to do, and nothing else."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from commands import OURS, Result, environment, run
from gguf_files import DENSE, experts, split
from models import split_gguf, truncate, write_tiny_moe

from longhaul.index import read_index
from longhaul.library import build_id, lib_dir

CLI = ("longhaul-cli",)
COMMANDS = [CLI, ("longhaul", "completion"), ("longhaul", "perplexity")]
SUFFIX = ".dylib" if sys.platform == "darwin" else ".so"

every_command = pytest.mark.parametrize("command", COMMANDS, ids=lambda words: words[-1])


def refused(result: Result, code: int, *parts: str) -> str:
    """Check that a command refused as it should, and return what it said."""
    assert result.err.startswith(f"{OURS}error: "), result.err
    assert result.err.count("\n") == 1
    assert result.err.endswith("\n")
    assert (result.code, result.out) == (code, "")
    for part in parts:
        assert part in result.err
    return result.err.removeprefix(f"{OURS}error: ")


@pytest.fixture
def copy(tiny: Path, tmp_path: Path) -> Path:
    """A model that a test may damage."""
    return Path(shutil.copy(tiny, tmp_path / "model.gguf"))


# --- the model ------------------------------------------------------------------------------------


@every_command
def test_no_such_file(command: tuple[str, ...], libraries: Path, tmp_path: Path) -> None:
    path = tmp_path / "none.gguf"
    result = run(*command, "--model", path, "-p", "x")
    assert refused(result, 1, str(path)) == f"'{path}': no such file; check the path\n"


@every_command
def test_a_folder(command: tuple[str, ...], libraries: Path, tmp_path: Path) -> None:
    refused(run(*command, "--model", tmp_path, "-p", "x"), 1, str(tmp_path), "is a directory")


@pytest.mark.parametrize(
    "content",
    [b"", b"GG", b"GGUF", b"%PDF-1.7 " * 1000, b"FUGG" + bytes(1000)],
    ids=["empty", "two bytes", "magic alone", "another format", "big endian"],
)
def test_what_is_not_a_gguf(libraries: Path, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    message = refused(run(*CLI, "--model", path, "-p", "x"), 1, str(path))
    assert "GGUF" in message or "truncated" in message


@every_command
def test_tensor_data_past_the_end_of_the_file(
    command: tuple[str, ...], libraries: Path, copy: Path
) -> None:
    truncate(copy, -1)
    message = refused(run(*command, "--model", copy, "-p", "x"), 1, str(copy), "is truncated")
    assert f"the file has {copy.stat().st_size}; get it again" in message


@pytest.mark.parametrize("size", [10, 100, 1000])
def test_a_header_past_the_end_of_the_file(libraries: Path, copy: Path, size: int) -> None:
    truncate(copy, size)
    refused(run(*CLI, "--model", copy, "-p", "x"), 1, str(copy))


def test_a_missing_shard(libraries: Path, copy: Path) -> None:
    shards = split_gguf(copy, 3)
    shards[1].unlink()
    result = run(*CLI, "--model", shards[0], "-p", "x")
    refused(result, 1, str(shards[1]), "is missing, shard 2 of 3; put it beside", str(shards[0]))


def test_a_truncated_shard(libraries: Path, copy: Path) -> None:
    shards = split_gguf(copy, 2)
    truncate(shards[1], -100)
    refused(run(*CLI, "--model", shards[0], "-p", "x"), 1, str(shards[1]), "is truncated")


def test_a_later_shard(libraries: Path, copy: Path) -> None:
    shards = split_gguf(copy, 2)
    result = run(*CLI, "--model", shards[1], "-p", "x")
    refused(result, 1, str(shards[1]), "is shard 2 of 2; give the first", str(shards[0]))


def test_shards_of_different_models(libraries: Path, tmp_path: Path) -> None:
    first = split(tmp_path, [DENSE, experts(0)])
    second = first.with_name("m-00002-of-00002.gguf")
    (tmp_path / "other").mkdir()
    other = split(tmp_path / "other", [[], [*experts(0), *experts(1)]])
    shutil.copy(other.with_name(second.name), second)
    refused(run(*CLI, "--model", first, "-p", "x"), 1, str(second), "does not belong to")


def test_a_model_option_without_a_file(libraries: Path) -> None:
    refused(run(*CLI, "-p", "x", "--model"), 2, "--model has no value")


# --- the budget -----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", ["0", "-1", "abc", "nan", ""])
def test_a_size_that_is_none(size: str) -> None:
    result = run(*CLI, "--longhaul-cache", size, "-p", "x")
    refused(result, 2, f"cache size {size!r}", "give auto")


def test_a_size_in_the_environment_that_is_none() -> None:
    result = run(*CLI, "-p", "x", env=environment(LONGHAUL_CACHE="lots"))
    refused(result, 2, "cache size 'lots'")


@every_command
def test_a_budget_that_is_too_small(command: tuple[str, ...], libraries: Path, copy: Path) -> None:
    result = run(*command, "--model", copy, "--longhaul-cache", "1KiB", "-p", "x")
    refused(result, 2, "a cache of 0.000 GiB is below the least", "GiB or more")


def test_the_least_that_is_named_works_and_one_byte_less_than_it_does_not(
    chat_model: Path, libraries: Path
) -> None:
    args = ("--model", chat_model, "-p", "Hello", "-n", "4", "--single-turn", "--longhaul-cache")
    said = refused(run(*CLI, *args, "1KiB"), 2)
    (least,) = re.findall(r"give ([0-9.]+) GiB or more", said)
    works = run(*CLI, *args, least)
    assert works.code == 0, works.err
    assert len(works.turns) == 1
    model = read_index(chat_model)
    (n_slots,) = re.findall(r"cache .* ([0-9]+) slots per layer", works.err)
    assert int(n_slots) < 8
    for n_slot in range(1, 8):
        size_bytes = n_slot * sum(layer.expert_bytes for layer in model.layers)
        if run(*CLI, *args, f"{size_bytes}B").code == 0:
            refused(run(*CLI, *args, f"{size_bytes - 1}B"), 2, least)
            return
    pytest.fail("no number of slots worked")


# --- other options --------------------------------------------------------------------------------


@pytest.mark.parametrize("number", ["0", "-1", "abc", "257", "1.5"])
def test_a_number_of_read_threads_that_is_none(number: str) -> None:
    result = run(*CLI, "--longhaul-io-threads", number, "-p", "x")
    refused(result, 2, "threads", number)


def test_an_unknown_policy() -> None:
    result = run(*CLI, "--longhaul-policy", "mru", "-p", "x")
    refused(result, 2, "--longhaul-policy 'mru' is none of: ", "lru")


def test_an_unknown_ubatch_mode() -> None:
    result = run(*CLI, "--longhaul-ubatch", "maybe", "-p", "x")
    refused(result, 2, "ubatch 'maybe' is none of: auto, keep, shrink")


@pytest.mark.parametrize("word", ["--longhaul-cahce", "--longhaul-", "--longhaul-cache-size=2"])
def test_an_option_of_ours_that_is_none(word: str) -> None:
    refused(run(*CLI, word, "2", "-p", "x"), 2, f"no option {word}")


def test_an_option_without_its_value() -> None:
    refused(run(*CLI, "-p", "x", "--longhaul-cache"), 2, "--longhaul-cache")


@every_command
@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--check-tensors"], "--check-tensors cannot be used while streaming"),
        (["--load-mode", "mmap+mlock"], "--load-mode mmap+mlock would lock all experts"),
        (["-hf", "someone/something"], "-hf is not supported while streaming"),
        (["--ctx-size", "many"], "--ctx-size 'many' is not a whole number"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_an_option_of_llama_cpp_with_which_nothing_can_stream(
    command: tuple[str, ...], words: list[str], part: str, libraries: Path, tiny: Path
) -> None:
    refused(run(*command, "--model", tiny, *words, "-p", "x"), 2, part)


def test_a_remote_model_alone(libraries: Path) -> None:
    refused(run(*CLI, "-hf", "someone/something", "-p", "x"), 2, "give a file by --model")


def test_a_remote_model_in_the_environment(libraries: Path, tiny: Path) -> None:
    env = environment(LLAMA_ARG_HF_REPO="someone/something")
    refused(run(*CLI, "--model", tiny, "-p", "x", env=env), 2, "LLAMA_ARG_HF_REPO")


# --- the libraries --------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [*COMMANDS, ("longhaul", "quantize")], ids=lambda w: w[-1])
def test_libraries_that_are_not_built(command: tuple[str, ...], tiny: Path, tmp_path: Path) -> None:
    env = environment(LONGHAUL_LIB_DIR=str(tmp_path))
    result = run(*command, "--model", tiny, "-p", "x", env=env)
    refused(result, 1, f"native libraries not found in {tmp_path}", "make build")


def compile_library(folder: Path, code: str) -> None:
    """Write a liblonghaul of the given C source; skips where there is no compiler."""
    compiler = next((c for c in ("cc", "gcc", "clang") if shutil.which(c)), None)
    if compiler is None:
        pytest.skip("no C compiler to make another library with")
    target = folder / f"liblonghaul{SUFFIX}"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-x", "c", "-", "-o", str(target)],
        input=code,
        text=True,
        check=True,
    )


def test_libraries_of_another_version(libraries: Path, tiny: Path, tmp_path: Path) -> None:
    compile_library(tmp_path, 'const char * lh_build_id(void) { return "000000000000"; }\n')
    env = environment(LONGHAUL_LIB_DIR=str(tmp_path))
    result = run(*CLI, "--model", tiny, "-p", "x", env=env)
    refused(result, 1, "is of build 000000000000", f"needs {build_id()}", "make build")


def test_a_library_that_is_older_than_versions(tiny: Path, tmp_path: Path) -> None:
    compile_library(tmp_path, "int something_else(void) { return 0; }\n")
    env = environment(LONGHAUL_LIB_DIR=str(tmp_path))
    result = run(*CLI, "--model", tiny, "-p", "x", env=env)
    refused(result, 1, "cannot be loaded", "make build")


def test_a_library_that_is_none(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / f"liblonghaul{SUFFIX}").write_text("not a library")
    env = environment(LONGHAUL_LIB_DIR=str(tmp_path))
    result = run(*CLI, "--model", tiny, "-p", "x", env=env)
    refused(result, 1, "cannot be loaded", "make build")


def test_tools_that_are_not_built(libraries: Path, tiny: Path, tmp_path: Path) -> None:
    for library in lib_dir().iterdir():
        if "longhaul-tools" not in library.name:
            os.symlink(library.resolve(), tmp_path / library.name)
    env = environment(LONGHAUL_LIB_DIR=str(tmp_path))
    result = run(*CLI, "--model", tiny, "-p", "x", env=env)
    refused(result, 1, "longhaul-tools", "make build")


# --- the checks -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "result",
    [
        Result(0, "", "longhaul: error: bad\n"),
        Result(1, "text", "longhaul: error: bad\n"),
        Result(1, "", "longhaul: error: bad\nmore\n"),
        Result(1, "", "Traceback (most recent call last):\n"),
        Result(1, "", ""),
    ],
)
def test_the_check_sees_what_it_should(result: Result) -> None:
    with pytest.raises(AssertionError):
        refused(result, 1)
    assert refused(Result(1, "", "longhaul: error: bad\n"), 1, "bad") == "bad\n"


def test_the_models_are_sound_before_they_are_damaged(tmp_path: Path) -> None:
    assert read_index(write_tiny_moe(tmp_path / "m.gguf")).is_moe
