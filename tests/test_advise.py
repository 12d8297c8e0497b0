"""longhaul plan, as its users see it."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import run
from models import split_gguf, write_tiny_moe
from test_launch import MODEL, SIZES, SetLimit, free  # noqa: F401

from longhaul import advise as subject
from longhaul.advise import Advice, Measured, advise, with_model_option
from longhaul.budget import GIB, MIB, MemoryLimit, gib_up
from longhaul.config import Config
from longhaul.errors import ModelError, ModelUnsupportedError
from longhaul.forecast import Machine
from longhaul.index import read_first_shard, read_index

QUICK = Machine(disk_bytes_per_s=2000 * MIB, memory_bytes_per_s=20 * GIB)


def advice(cache_bytes: int | None, machine: Machine | None = QUICK) -> Advice:
    measured = Measured(machine, "" if machine else "not now")
    return advise(MODEL, SIZES, Config(cache_bytes=cache_bytes), measured)


# --- the verdict ----------------------------------------------------------------------------------


def test_what_is_there_fits(free: SetLimit) -> None:  # noqa: F811
    found = advice(20 * MIB)
    assert found.fits
    assert found.verdict == "fits"
    assert found.slot_bytes == 20 * MIB


def test_what_is_more_than_there_is_does_not_fit(free: SetLimit) -> None:  # noqa: F811
    free(64)
    found = advice(20 * MIB)
    assert not found.fits
    assert found.plan is not None
    planned = found.plan.planned.total_bytes / MIB
    assert found.verdict == (
        f"does not fit: {planned:.0f} MiB are planned, 64 MiB are available (the test)"
    )


def test_a_budget_below_the_least_does_not_fit_and_the_least_is_said(
    free: SetLimit,  # noqa: F811
) -> None:
    found = advice(MIB)
    assert not found.fits
    assert "give 0.002 GiB or more" in found.verdict
    assert found.memory.least_bytes == 2 * MIB
    assert "least   0.002 GiB of cache: --longhaul-cache 0.002" in found.lines()
    assert found.forecast is None


def test_an_automatic_budget_that_leaves_nothing_does_not_fit(
    free: SetLimit,  # noqa: F811
) -> None:
    free(300)
    found = advice(None)
    assert not found.fits
    assert "GiB of memory are missing" in found.verdict
    assert any(line.startswith("takes   dense weights") for line in found.lines())


def test_less_than_one_tokens_experts_is_slow(free: SetLimit) -> None:  # noqa: F811
    found = advice(4 * MIB)
    assert found.fits
    assert found.verdict.startswith("fits, but slow: the cache is below the 8.0 MiB of experts")


def test_a_slow_disk_is_slow(free: SetLimit) -> None:  # noqa: F811
    slow = replace(QUICK, disk_bytes_per_s=MIB)
    found = advice(20 * MIB, slow)
    assert found.verdict.startswith("fits, but slow: a token may have to read ")


def test_every_limit_and_term_is_shown(
    free: SetLimit,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    others = [MemoryLimit(9 * GIB, n, name) for n, name in ((9 * GIB, "RAM"), (5, "the test"))]
    monkeypatch.setattr(subject, "memory_limits", lambda: others)
    lines = advice(20 * MIB).lines()
    limits = [line for line in lines if line.startswith("limit")]
    assert len(limits) == 2
    assert limits[0].endswith("available: RAM")
    assert limits[1].endswith("available: the test <- counts")
    takes = [line.split("  ")[1].strip() for line in lines if line.startswith("takes")]
    assert takes == [
        "slots",
        "dense weights",
        "KV cache",
        "compute buffers",
        "read buffers",
        "process",
        "floor",
        "all together",
    ]
    assert "slots   10 in each of 2 layers, 10.0 to 10.0 MiB in a layer" in lines
    assert "token   uses 8.0 MiB of experts" in lines
    assert any(line.startswith("expect  ") and " hits while decoding" in line for line in lines)
    assert lines[-1] == "verdict fits"
    lines = advice(20 * MIB, None).lines()
    assert "speed   not estimated: not now" in lines


def test_json_has_the_same(free: SetLimit) -> None:  # noqa: F811
    found = advice(20 * MIB)
    data = json.loads(json.dumps(found.as_json()))
    assert (data["fits"], data["verdict"]) == (True, "fits")
    assert data["planned_bytes"] == 20 * MIB + sum(
        size for name, size in data["terms"].items() if name != "floor"
    )
    assert [layer["slot_bytes"] for layer in data["layers"]] == [10 * MIB, 10 * MIB]
    assert data["tokens_per_s"][0] < data["tokens_per_s"][1]
    refused = advice(MIB).as_json()
    assert (refused["fits"], refused["budget_bytes"], refused["layers"]) == (False, None, [])


def test_what_does_not_fit_is_told_as_it_would_be_planned(
    free: SetLimit,  # noqa: F811
) -> None:
    free(300)
    shrunk = Config(cache_bytes=MIB, ubatch="shrink")
    found = advise(MODEL, SIZES, shrunk, may_cut_context=True)
    assert found.plan is None
    assert f"give {gib_up(found.memory.least_bytes)} GiB or more" in found.refusal
    assert found.memory.least_bytes == 8 * MIB  # a token at a time
    assert found.memory.read_buffer_bytes == shrunk.read_buffer_bytes > 0


# --- the first shard alone ------------------------------------------------------------------------


def test_the_first_shard_is_enough(tmp_path: Path) -> None:
    whole = read_index(write_tiny_moe(tmp_path / "whole.gguf", n_layer=6))
    shards = split_gguf(tmp_path / "whole.gguf", groups_of(tmp_path / "whole.gguf", 3))
    for shard in shards[1:]:
        shard.unlink()
    found = read_first_shard(shards[0])
    assert len(found.layers) == len(whole.layers) == 6
    assert found.expert_bytes == whole.expert_bytes > 0
    assert found.token_cycle_bytes == whole.token_cycle_bytes
    assert found.dense_bytes == pytest.approx(whole.dense_bytes, rel=0.05)
    assert found.n_head_kv == whole.n_head_kv
    result = run("longhaul", "plan", shards[0], "--longhaul-cache", "1MiB", "-c", "512", "--json")
    assert result.code == 0, result.err
    data = json.loads(result.out)
    assert data["expert_bytes"] == whole.expert_bytes
    assert len(data["layers"]) == 6


def groups_of(path: Path, n: int) -> list[list[str]]:
    """Return the names of all tensors in n groups, in their order."""
    from gguf import GGUFReader

    names = [tensor.name for tensor in GGUFReader(path).tensors]
    size = -(-len(names) // n)
    return [names[i : i + size] for i in range(0, len(names), size)]


def test_a_shard_without_a_whole_layer_is_not(tmp_path: Path) -> None:
    path = write_tiny_moe(tmp_path / "whole.gguf")
    (first, *_) = split_gguf(path, groups_of(path, 6))
    with pytest.raises(ModelUnsupportedError, match="no whole layer"):
        read_first_shard(first)
    with pytest.raises(ModelError, match="not the first shard"):
        read_first_shard(path)


# --- the command ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "wanted"),
    [
        (["m.gguf"], ["--model", "m.gguf"]),
        (["m", "-c", "5"], ["--model", "m", "-c", "5"]),
        (["-c", "5", "m.gguf"], ["-c", "5", "--model", "m.gguf"]),
        (["-m", "m.gguf", "-c", "5"], ["-m", "m.gguf", "-c", "5"]),
        (["--mmproj", "x.gguf", "m.gguf"], ["--mmproj", "x.gguf", "--model", "m.gguf"]),
        (["-c", "5"], ["-c", "5"]),
        ([], []),
    ],
)
def test_a_model_may_stand_alone(args: list[str], wanted: list[str]) -> None:
    assert with_model_option(args) == wanted


def plan(*args: str | Path) -> dict[str, Any]:
    result = run("longhaul", "plan", *args, "--json")
    assert result.err == ""
    assert "Traceback" not in result.out
    found: dict[str, Any] = json.loads(result.out)
    assert result.code == (0 if found["fits"] else 1)
    return found


def test_the_plan_of_a_file(tiny: Path) -> None:
    result = run("longhaul", "plan", tiny, "--longhaul-cache", "1MiB", "--ctx-size", "512")
    assert result.code == 0, result.err
    lines = result.out.splitlines()
    assert lines[0].startswith("model   tiny qwen3moe (qwen3moe), 3 layers of 8 experts")
    assert lines[-1].startswith("verdict fits")
    assert any(" uncached from the disk, " in line for line in lines) or any(
        line.startswith("speed   not estimated: the disk") for line in lines
    )


def test_parallel_and_context_cost_memory(tiny: Path) -> None:
    size = ("--longhaul-cache", "1MiB")
    one = plan(tiny, *size, "--ctx-size", "512")["terms"]["KV cache"]
    assert plan(tiny, *size, "--ctx-size", "4096")["terms"]["KV cache"] == 8 * one
    assert plan(tiny, *size, "--ctx-size", "512", "--parallel", "4")["terms"]["KV cache"] == 2 * one


def test_a_shape_is_planned_without_a_file() -> None:
    shape = "--n-layer 4 --n-expert 16 --n-expert-used 2 --n-embd 64 --n-ff-exp 128 --type F16"
    found = plan(*shape.split(), "--longhaul-cache", "1MiB", "-c", "256")
    assert found["expert_bytes"] == 4 * 16 * 3 * 64 * 128 * 2
    assert found["tokens_per_s"] is None


Cases = Sequence[tuple[list[str], int, str]]
HUGE = "--n-layer 100000000 --n-expert 8 --n-expert-used 1 --n-embd 8 --n-ff-exp 8"
BAD: Cases = [
    (["--longhaul-cache", "0", "M"], 2, "is 0 bytes"),
    (["--longhaul-cache", "-1", "M"], 2, "is not a size"),
    (["--longhaul-cache", "lots", "M"], 2, "is not a size"),
    ([], 2, "give a model, or the shape of one"),
    (["--n-layer", "4"], 2, "needs --n-expert"),
    (["M", "--n-layer", "4"], 2, "not both"),
    (["M", "--n-head", "4"], 2, "not both"),
    (["M", "N", "-c", "64"], 2, "one model at a time"),
    (HUGE.split(), 2, "n_layer is 100000000; it is 1 to 512"),
    (["--n-layer", "four"], 2, "--n-layer"),
    (["none.gguf"], 1, "no such file"),
    (["M", "--no-longhaul"], 2, "cannot be planned"),
]


@pytest.mark.parametrize(("args", "code", "said"), BAD)
def test_what_cannot_be_planned(args: list[str], code: int, said: str, tiny: Path) -> None:
    result = run("longhaul", "plan", *(str(tiny) if word == "M" else word for word in args))
    assert result.code == code
    assert said in result.err
    assert result.err.count("\n") == 1
    assert result.out == ""


def test_a_tiny_and_a_huge_cache(tiny: Path) -> None:
    result = run("longhaul", "plan", tiny, "--longhaul-cache", "1B", "-c", "256")
    assert result.code == 1
    assert "below the least" in result.out.splitlines()[-1]
    found = plan(tiny, "--longhaul-cache", "1T", "-c", "256")
    assert [layer["n_slots"] for layer in found["layers"]] == [8, 8, 8]
    assert found["hit_rate"] in ([1.0, 1.0], None)


def test_a_dense_model_has_nothing_to_plan(smollm2: Path) -> None:
    result = run("longhaul", "plan", smollm2)
    assert (result.code, result.err) == (0, "")
    assert "has no routed experts: nothing to stream" in result.out


def test_nothing_is_loaded(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGHAUL_LIB_DIR", "/nowhere")
    lines, fits = subject.plan_command(
        [str(tiny), "-c", "256"],
        Config(cache_bytes=MIB),
        {name: None for name in subject.NEEDED},
        "Q4_0",
        as_json=False,
    )
    assert fits
    assert len(lines) > 10
