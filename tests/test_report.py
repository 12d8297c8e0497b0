from dataclasses import replace
from pathlib import Path

import pytest

from longhaul.budget import MIB, PROCESS_BYTES, MemoryLimit, RunSizes, auto_budget
from longhaul.experts import ExpertTensor, MoeLayer, MoeModel
from longhaul.figures import RunFigures
from longhaul.report import (
    PlannedMemory,
    budget_lines,
    context_line,
    model_line,
    overcommit_line,
    planned_memory,
    read_line,
    span,
    summary_lines,
    ubatch_line,
)
from longhaul.stats import Counters, Stats


def layer(il: int, n_expert: int, n_expert_used: int) -> MoeLayer:
    tensor = ExpertTensor(f"blk.{il}.ffn_up_exps.weight", il, 0, 0, n_expert, MIB, "F32")
    return MoeLayer(il, n_expert, n_expert_used, (tensor,))


def model(*layers: MoeLayer) -> MoeModel:
    return MoeModel(
        path=Path("models/m.gguf"),
        shards=(Path("models/m.gguf"),),
        arch="qwen3moe",
        name="Tiny",
        layers=layers,
        dense_bytes=512 * MIB,
        n_layer=2,
        n_ctx_train=1024,
        n_embd=64,
        n_vocab=1000,
        n_head_kv=(2, 2),
        n_embd_head_k=16,
        n_embd_head_v=16,
        n_head=4,
    )


EVEN = model(layer(0, 64, 8), layer(1, 64, 8))


def test_span() -> None:
    assert span([8, 8, 8]) == "8"
    assert span([9, 8, 11]) == "8 to 11"


def test_model_line() -> None:
    assert model_line(EVEN) == (
        "model   Tiny (qwen3moe), 2 layers of 64 experts, top-8, experts 0.125 GiB, rest 0.500 GiB"
    )
    uneven = replace(model(layer(0, 16, 2), layer(3, 32, 4)), name="")
    assert model_line(uneven).startswith(
        "model   m.gguf (qwen3moe), 2 layers of 16 to 32 experts, top-2 to 4,"
    )


def test_budget_line_says_what_the_budget_buys() -> None:
    lines = budget_lines(EVEN, [16, 17], 40 * MIB, automatic=False)
    assert lines == ["cache   40.0 MiB: 16 to 17 slots per layer, 33.0 MiB, 25.8% of the experts"]
    (line,) = budget_lines(EVEN, [64, 64], 128 * MIB, automatic=True)
    assert line == "cache   0.125 GiB (auto): 64 slots per layer, 128.0 MiB, 100.0% of the experts"


@pytest.mark.parametrize(("n_slots", "warns"), [([7, 8], True), ([8, 8], False), ([8, 9], False)])
def test_a_cache_below_the_token_cycle_is_warned_about(n_slots: list[int], warns: bool) -> None:
    assert EVEN.token_cycle_bytes == 16 * MIB
    lines = budget_lines(EVEN, n_slots, 20 * MIB, automatic=False)
    assert len(lines) == 1 + warns
    if warns:
        assert lines[1] == (
            "warning the cache is below the 16.0 MiB of experts that one token uses;"
            " every token reads most of them again"
        )


@pytest.mark.parametrize("n_ubatch", [512, 513])
def test_ubatch_line_says_the_size_and_the_stages_if_there_are_more_than_one(n_ubatch: int) -> None:
    assert ubatch_line(n_ubatch, 512, 1) == "ubatch  512"
    assert ubatch_line(n_ubatch, 512, 5) == "ubatch  512, in up to 5 stages per layer"


@pytest.mark.parametrize("n_ubatch", [1, 511])
def test_ubatch_line_says_when_it_is_shrunk(n_ubatch: int) -> None:
    assert ubatch_line(n_ubatch, 512, 1) == (
        f"ubatch  {n_ubatch} instead of 512,"
        " so that it cannot select more experts than there are slots"
    )


def test_context_line_says_what_was_cut_and_what_chooses() -> None:
    line = context_line(4096, 131072)
    assert line.startswith("context 4096 instead of 131072,")
    assert "--ctx-size" in line


def test_overcommit_line_says_what_is_planned_available_and_who_says_so() -> None:
    limit = MemoryLimit(2048 * MIB, 1000 * MIB, "RAM")
    assert overcommit_line(1500 * MIB, limit) == (
        "warning 1500 MiB are planned, but only 1000 MiB are available (RAM)"
    )


@pytest.mark.parametrize(
    ("modes", "line"),
    [
        (["direct"], "reads   uncached (O_DIRECT), 4 threads"),
        (["direct", "direct"], "reads   uncached (O_DIRECT), 4 threads"),
        (["nocache"], "reads   uncached (F_NOCACHE), 4 threads"),
        (["cached"], "reads   through the page cache, 4 threads"),
        (
            ["direct", "dontneed"],
            "reads   uncached (O_DIRECT); through the page cache, dropped after use: this file"
            " system refuses uncached reads, 4 threads",
        ),
    ],
)
def test_read_line_names_the_fallback(modes: list[str], line: str) -> None:
    assert read_line(modes, 4) == line


def test_planned_memory_is_the_sum_of_its_terms() -> None:
    planned = PlannedMemory((("slots", 100 * MIB), ("KV cache", 0), ("process", 50 * MIB)))
    assert planned.total_bytes == 150 * MIB
    assert planned.line() == "memory  150 MiB planned: slots 100 + process 50"


def test_planned_memory_takes_a_plan_without_its_floor() -> None:
    limit = MemoryLimit(4096 * MIB, 4096 * MIB, "RAM")
    sizes = RunSizes(n_ctx=256, n_ubatch=8, read_buffer_bytes=2 * MIB, other_bytes=7 * MIB)
    plan = auto_budget(EVEN, limit, sizes)
    planned = planned_memory(plan, 33 * MIB)
    names = [name for name, _ in planned.terms]
    assert names[0] == "slots"
    assert names[-1] == "process"
    assert "floor" not in names
    terms = sum(size for name, size in plan.terms if name != "floor")
    assert planned.total_bytes == 33 * MIB + terms
    parts = plan.dense_bytes + plan.kv_bytes + plan.compute_bytes
    assert terms == parts + 9 * MIB + PROCESS_BYTES


def figures(stats: Stats, repacked_bytes: int = 0) -> RunFigures:
    return RunFigures(
        model="Tiny",
        arch="qwen3moe",
        n_slots=(8, 8),
        n_ubatch=512,
        n_stages=1,
        policy="lru",
        budget_bytes=17 * MIB,
        slot_bytes=16 * MIB,
        repacked_bytes=repacked_bytes,
        planned_bytes=710 * MIB,
        peak_rss_bytes=700 * MIB,
        stats=stats,
        records=(),
    )


def test_summary() -> None:
    prefill = Counters(
        n_tokens=20,
        n_hits=30,
        n_misses=10,
        read_bytes=40 * MIB,
        compute_s=2.0,
        wait_s=0.5,
        plan_s=0.04,
        read_s=0.4,
        repack_s=0.06,
    )
    decode = Counters(
        n_tokens=64,
        n_hits=90,
        n_misses=10,
        n_evictions=9,
        read_bytes=64 * MIB,
        compute_s=8.0,
        wait_s=6.0,
        disk_s=7.0,
    )
    assert summary_lines(figures(Stats(prefill, decode))) == [
        "prompt  20 at 10.00 tok/s, hit rate 75.0%,"
        " 2.00 MiB read per token, 25% of the time waiting"
        " (reads 20%, repacking 3%, planning 2%), 1.33 x the roofline",
        "tokens  64 at 8.00 tok/s, hit rate 90.0%,"
        " 1.00 MiB read per token, 75% of the time waiting"
        " (reads 0%, repacking 0%, planning 0%), 1.14 x the roofline",
        "total   84 tokens, hit rate 85.7%, 1.24 MiB read per token, 9 evictions, 0 errors",
        "slots   16.0 MiB, as in the file",
        "memory  peak RSS 700 MiB, planned 710 MiB",
    ]


def test_summary_of_a_run_that_evaluated_nothing() -> None:
    lines = summary_lines(figures(Stats()))
    assert [line.split()[0] for line in lines] == ["total", "slots", "memory"]
    assert "0 tokens" in lines[0]


def test_summary_counts_errors() -> None:
    lines = summary_lines(figures(Stats(decode=Counters(n_tokens=1, n_errors=3))))
    assert lines[0].startswith("tokens  1 at 0.00 tok/s")
    assert lines[1].endswith(", 3 errors")


@pytest.mark.parametrize(
    ("repacked_bytes", "layout"),
    [
        (0, "as in the file"),
        (16 * MIB, "repacked"),
        (4 * MIB, "75% as in the file, 25% repacked"),
    ],
)
def test_summary_says_how_slots_are_laid_out(repacked_bytes: int, layout: str) -> None:
    assert f"slots   16.0 MiB, {layout}" in summary_lines(figures(Stats(), repacked_bytes))


def test_summary_says_what_was_on_devices_and_in_memory_behind_them() -> None:
    decode = Counters(n_tokens=1, n_hits=60, n_misses=40, n_tier_hits=30, compute_s=1.0)
    run = replace(
        figures(Stats(decode=decode)),
        device_bytes=12 * MIB,
        tier_bytes=32 * MIB,
        locked_bytes=8 * MIB,
    )
    tokens, total, slots, _ = summary_lines(run)
    assert ", hit rate 60.0% + 30.0% from memory + 10.0% from disk," in tokens
    assert ", hit rate 60.0% + 30.0% from memory + 10.0% from disk," in total
    assert slots == (
        "slots   16.0 MiB, 25% as in the file, 75% on devices,"
        " and 32.0 MiB of memory behind them, 8.0 MiB of it page-locked"
    )
