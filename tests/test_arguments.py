from pathlib import Path

import pytest

from longhaul.arguments import (
    LlamaArguments,
    count,
    names_model,
    only_asks,
    option,
    read_arguments,
    remote_models,
    workers,
)
from longhaul.budget import RunSizes
from longhaul.errors import ConfigError


def test_the_last_value_of_an_option_counts() -> None:
    args = ["-m", "a", "--model", "b", "-p", "x", "-m", "c"]
    assert option(args, ("-m", "--model"), {}) == "c"
    assert option(args, ("-c",), {}) is None


def test_underscores_are_taken_as_llama_cpp_takes_them() -> None:
    assert option(["--ubatch_size", "64"], ("-ub", "--ubatch-size"), {}) == "64"


def test_an_option_without_value_has_none() -> None:
    assert option(["-p", "x", "--model"], ("-m", "--model"), {}) is None


def test_the_environment_counts_where_no_option_is_given() -> None:
    env = {"LLAMA_ARG_MODEL": "env"}
    assert option([], ("-m",), env, "LLAMA_ARG_MODEL") == "env"
    assert option(["-m", "arg"], ("-m",), env, "LLAMA_ARG_MODEL") == "arg"
    assert option([], ("-m",), env) is None


def test_counts() -> None:
    names = ("-c", "--ctx-size")
    assert count(["-c", "4096"], names, {}, "N", 7) == 4096
    assert count([], names, {}, "N", 7) == 7
    assert count([], names, {"N": "3"}, "N", 7) == 3
    assert count(["-c", "-1"], names, {}, "N", 7) == 0
    with pytest.raises(ConfigError, match=r"--ctx-size 'many' is not a whole number"):
        count(["-c", "many"], names, {}, "N", 7)


def test_defaults_are_those_of_llama_cpp() -> None:
    expected = LlamaArguments(
        model=None,
        n_ctx=None,
        n_batch=2048,
        n_ubatch=512,
        n_seq=None,
        kv_element_bytes=2.0,
        flash_attention=True,
        other_files=(),
    )
    assert read_arguments([], {}) == expected


def test_all_that_costs_memory_is_read() -> None:
    line = (
        "-m m.gguf -c 8192 -b 1024 -ub 256 -np 3 -fa off -ctk q8_0 -ctv f32 -md d.gguf -mm p.gguf"
    )
    expected = LlamaArguments(
        model=Path("m.gguf"),
        n_ctx=8192,
        n_batch=1024,
        n_ubatch=256,
        n_seq=3,
        kv_element_bytes=4.0,
        flash_attention=False,
        other_files=(Path("d.gguf"), Path("p.gguf")),
    )
    assert read_arguments(line.split(), {}) == expected


def test_long_names_and_the_environment_say_the_same() -> None:
    line = (
        "--model m.gguf --ctx-size 8192 --batch-size 1024 --ubatch-size 256 --parallel 3"
        " --flash-attn off --cache-type-k q8_0 --cache-type-v f32 --model-draft d.gguf"
        " --mmproj p.gguf"
    )
    env = {
        "LLAMA_ARG_MODEL": "m.gguf",
        "LLAMA_ARG_CTX_SIZE": "8192",
        "LLAMA_ARG_BATCH": "1024",
        "LLAMA_ARG_UBATCH": "256",
        "LLAMA_ARG_N_PARALLEL": "3",
        "LLAMA_ARG_FLASH_ATTN": "off",
        "LLAMA_ARG_CACHE_TYPE_K": "q8_0",
        "LLAMA_ARG_CACHE_TYPE_V": "f32",
        "LLAMA_ARG_SPEC_DRAFT_MODEL": "d.gguf",
        "LLAMA_ARG_MMPROJ": "p.gguf",
    }
    assert read_arguments(line.split(), {}) == read_arguments([], env)
    assert read_arguments([], env).n_ctx == 8192


@pytest.mark.parametrize(
    ("line", "n_ubatch"),
    [
        ("-b 128", 128),
        ("-ub 1024", 1024),
        ("-ub 4096", 2048),
        ("-ub 0 -b 64", 64),
        ("-ub 0", 2048),
        ("-b 0 -ub 0", 512),
    ],
)
def test_a_ubatch_is_never_larger_than_a_batch(line: str, n_ubatch: int) -> None:
    assert read_arguments(line.split(), {}).n_ubatch == n_ubatch


@pytest.mark.parametrize("kind", ["f16", "bf16", "q8_0", "q4_0"])
def test_types_of_the_kv_cache_count_two_bytes_at_most(kind: str) -> None:
    assert read_arguments(["-ctk", kind, "-ctv", kind], {}).kv_element_bytes == 2.0


@pytest.mark.parametrize("value", ["off", "0", "false", "disabled"])
def test_flash_attention_can_be_off(value: str) -> None:
    assert not read_arguments(["-fa", value], {}).flash_attention
    assert read_arguments(["-fa", "auto"], {}).flash_attention


@pytest.mark.parametrize("n_seq", ["0", "-1"])
def test_there_is_at_least_one_sequence(n_seq: str) -> None:
    assert read_arguments(["-np", n_seq], {}).sizes().n_seq == 1


def test_other_files_are_counted_by_their_size(tmp_path: Path) -> None:
    (tmp_path / "d.gguf").write_bytes(b"x" * 100)
    (tmp_path / "p.gguf").write_bytes(b"x" * 20)
    args = ["-md", str(tmp_path / "d.gguf"), "--mmproj", str(tmp_path / "p.gguf")]
    assert read_arguments(args, {}).other_bytes == 120
    assert read_arguments(["-md", str(tmp_path / "none.gguf")], {}).other_bytes == 0


@pytest.mark.parametrize(
    "line",
    [
        *("-hf a/b", "-hfr a/b", "--hf-repo a/b", "--hf_repo a/b", "-mu http://x", "--model-url x"),
        *("-dr x", "--docker-repo x", "--models-dir x"),
        *("--check-tensors", "--check_tensors", "-m m.gguf --check-tensors"),
        *("-lm mmap+mlock", "--load-mode mmap+mlock", "--load_mode mmap+mlock"),
    ],
)
def test_what_cannot_stream_is_refused_by_name(line: str) -> None:
    words = [word.replace("_", "-") for word in line.split()]
    with pytest.raises(ConfigError) as caught:
        read_arguments(line.split(), {})
    named = [word for word in words if word.startswith("-") and word != "-m"]
    long_names = {"-lm": "--load-mode"}
    said = str(caught.value).replace("_", "-")
    assert long_names.get(named[-1], named[-1]) in said
    assert "\n" not in said


@pytest.mark.parametrize("mode", ["auto", "none", "mmap", "mlock", "dio"])
def test_other_load_modes_are_allowed(mode: str) -> None:
    assert read_arguments(["-m", "m.gguf", "--load-mode", mode], {}).model == Path("m.gguf")


@pytest.mark.parametrize("name", ["-hf", "--model-url", "-dr"])
def test_what_llama_cpp_would_load_instead_of_the_file_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is not supported while streaming"):
        read_arguments(["-m", "m.gguf", name, "a/b"], {})


@pytest.mark.parametrize(
    "variable", ["LLAMA_ARG_HF_REPO", "LLAMA_ARG_MODEL_URL", "LLAMA_ARG_DOCKER_REPO"]
)
def test_the_environment_can_name_a_remote_model_too(variable: str) -> None:
    assert remote_models([], {variable: "a/b"}) == [variable]
    assert remote_models([], {variable: ""}) == []
    with pytest.raises(ConfigError, match=variable):
        read_arguments(["-m", "m.gguf"], {variable: "a/b"})


def test_a_model_is_named_by_option_environment_or_repository() -> None:
    for args in (["-m", "m.gguf"], ["--model", "m.gguf"], ["-hf", "a/b"], ["-p", "x", "-m"]):
        assert names_model(args, {})
    assert names_model([], {"LLAMA_ARG_MODEL": "m.gguf"})
    assert names_model([], {"LLAMA_ARG_HF_REPO": "a/b"})
    for args in ([], ["-p", "x"], ["-md", "draft.gguf"]):
        assert not names_model(args, {})


def test_a_model_option_without_a_file_is_refused() -> None:
    with pytest.raises(ConfigError, match="-m has no value"):
        read_arguments(["-p", "x", "-m"], {})


@pytest.mark.parametrize(
    ("line", "asks"),
    [
        *(("--version", True), ("--list-devices", True), ("--list_devices", True), ("-cl", True)),
        *(("", False), ("-p --version", False), ("--version -m m.gguf", False), ("-v", False)),
    ],
)
def test_what_needs_no_model(line: str, asks: bool) -> None:
    assert only_asks(line.split()) == asks


@pytest.mark.parametrize(
    ("line", "env", "wanted"),
    [
        ("-m m.gguf", {}, []),
        ("--rpc a:1", {}, ["a:1"]),
        ("-rpc a:1,b:2", {}, ["a:1", "b:2"]),
        ("--rpc a:1 --rpc b:2", {}, ["b:2"]),  # the last one counts, as for llama.cpp
        ("", {"LLAMA_ARG_RPC": "a:1"}, ["a:1"]),
        ("--rpc b:2", {"LLAMA_ARG_RPC": "a:1"}, ["b:2"]),
        ("--rpc", {}, []),
    ],
)
def test_workers_are_those_of_the_options(
    line: str, env: dict[str, str], wanted: list[str]
) -> None:
    assert workers(line.split(), env) == wanted


def test_sizes_are_those_of_the_options(tmp_path: Path) -> None:
    draft = tmp_path / "d.gguf"
    draft.write_bytes(b"x" * 100)
    line = f"-c 8192 -ub 256 -np 3 -fa off -ctk f32 -md {draft}"
    assert read_arguments(line.split(), {}).sizes() == RunSizes(
        n_ctx=8192,
        n_ubatch=256,
        read_buffer_bytes=0,
        n_seq=3,
        kv_element_bytes=4.0,
        flash_attention=False,
        other_bytes=100,
    )
    assert read_arguments([], {}).sizes() == RunSizes(n_ctx=0, n_ubatch=512, read_buffer_bytes=0)


@pytest.mark.parametrize("name", ["-c", "-b", "-ub", "-np"])
def test_counts_that_are_no_numbers_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="'x' is not a whole number"):
        read_arguments([name, "x"], {})


def test_what_chats_keep_is_read() -> None:
    arguments = read_arguments(["--cache_ram", "-1", "--swa-checkpoints", "3"], {})
    assert (arguments.cache_ram_mib, arguments.n_checkpoints) == (-1, 3)
    variables = {"LLAMA_ARG_CACHE_RAM": "100", "LLAMA_ARG_CTX_CHECKPOINTS": "0"}
    arguments = read_arguments([], variables)
    assert (arguments.cache_ram_mib, arguments.n_checkpoints) == (100, 0)
    arguments = read_arguments([], {})
    assert (arguments.cache_ram_mib, arguments.n_checkpoints) == (None, None)
    with pytest.raises(ConfigError, match="--ctx-checkpoints 'x' is not a whole number"):
        read_arguments(["-ctxcp", "x"], {})
