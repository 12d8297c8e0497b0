import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from longhaul import launch
from longhaul.arguments import LlamaArguments
from longhaul.budget import (
    MIB,
    PROCESS_BYTES,
    MemoryLimit,
    RunSizes,
    checkpoint_bytes,
    kv_cache_bytes,
)
from longhaul.config import Config
from longhaul.errors import BudgetError, ConfigError
from longhaul.experts import ExpertTensor, MoeLayer, MoeModel
from longhaul.launch import LEAST_CONTEXT, RunPlan, cut_context, plan_run, tool_sizes

SIZES = RunSizes(n_ctx=512, n_ubatch=512, read_buffer_bytes=0)
TRAINED = replace(SIZES, n_ctx=0)
SetLimit = Callable[[int | None], None]


def layer(il: int) -> MoeLayer:
    tensor = ExpertTensor(f"blk.{il}.ffn_up_exps.weight", il, 0, 0, 16, MIB, "F32")
    return MoeLayer(il, 16, 4, (tensor,))


MODEL = MoeModel(
    path=Path("m.gguf"),
    shards=(Path("m.gguf"),),
    arch="qwen3moe",
    name="Tiny",
    layers=(layer(0), layer(1)),
    dense_bytes=100 * MIB,
    n_layer=2,
    n_ctx_train=32768,
    n_embd=64,
    n_vocab=1000,
    n_head_kv=(2, 2),
    n_embd_head_k=64,
    n_embd_head_v=64,
    n_head=4,
)
KV_OF_A_CELL = 2 * 2 * 128 * 2  # layers, heads, keys and values, float16


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> SetLimit:
    """Sets how many MiB are free; None: the kernel does not say."""

    def set_limit(n_mib: int | None) -> None:
        def limit() -> MemoryLimit:
            if n_mib is None:
                raise ConfigError("cannot tell how much memory there is; give the cache a size")
            return MemoryLimit(n_mib * MIB, n_mib * MIB, "the test")

        monkeypatch.setattr(launch, "memory_limit", limit)

    set_limit(8192)
    return set_limit


def warnings(plan: RunPlan) -> list[str]:
    return [line for line in plan.lines() if line.startswith("warning")]


# --- the budget -----------------------------------------------------------------------------------


def test_a_size_buys_slots(free: SetLimit) -> None:
    plan = plan_run(MODEL, SIZES, Config(cache_bytes=20 * MIB))
    assert plan.n_slots == (10, 10)
    assert (plan.budget_bytes, plan.automatic) == (20 * MIB, False)
    assert plan.model is MODEL
    assert warnings(plan) == []


def test_a_size_is_not_refused_because_other_memory_is_short(free: SetLimit) -> None:
    free(64)
    plan = plan_run(MODEL, SIZES, Config(cache_bytes=20 * MIB))
    assert plan.n_slots == (10, 10)
    (warning,) = warnings(plan)
    assert f"{plan.planned.total_bytes / MIB:.0f} MiB are planned" in warning
    assert "only 64 MiB are available (the test)" in warning
    assert plan.lines()[-1] == warning


def test_the_warning_comes_with_the_first_byte_too_much(free: SetLimit) -> None:
    config = Config(cache_bytes=20 * MIB)
    planned_mib = -(-plan_run(MODEL, SIZES, config).planned.total_bytes // MIB)
    free(planned_mib)
    assert warnings(plan_run(MODEL, SIZES, config)) == []
    free(planned_mib - 1)
    assert len(warnings(plan_run(MODEL, SIZES, config))) == 1


def test_a_size_below_the_least_is_refused_with_the_least(free: SetLimit) -> None:
    for ubatch, n_slots in (("auto", 1), ("keep", 1), ("shrink", 4)):
        least = Config(cache_bytes=2 * n_slots * MIB, ubatch=ubatch)
        assert plan_run(MODEL, SIZES, least).n_slots == (n_slots, n_slots)
        with pytest.raises(BudgetError, match=rf"give 0\.00{2 * n_slots} GiB or more"):
            plan_run(MODEL, SIZES, replace(least, cache_bytes=2 * n_slots * MIB - 1))


def test_more_than_the_model_is_the_whole_model(free: SetLimit) -> None:
    plan = plan_run(MODEL, SIZES, Config(cache_bytes=1000 * MIB))
    assert plan.n_slots == (16, 16)
    assert plan.n_ubatch == 512
    assert ("slots", 32 * MIB) in plan.planned.terms


def test_auto_is_never_more_than_the_model(free: SetLimit) -> None:
    plan = plan_run(MODEL, SIZES, Config())
    assert plan.automatic
    assert (plan.n_slots, plan.budget_bytes) == ((16, 16), 32 * MIB)


@pytest.mark.parametrize("left_mib", [8, 9, 20, 31])
def test_auto_takes_exactly_what_is_left(free: SetLimit, left_mib: int) -> None:
    free(512)  # so small that the floor does not grow with the limit
    free(512 + left_mib - plan_left_mib(Config(cache_bytes=32 * MIB)))
    plan = plan_run(MODEL, SIZES, Config())
    assert 0 <= plan.budget_bytes - left_mib * MIB < MIB
    assert sum(plan.n_slots) == left_mib
    assert plan.planned.total_bytes < plan.memory.limit.available_bytes


def plan_left_mib(config: Config) -> int:
    return plan_run(MODEL, SIZES, config).memory.left_bytes // MIB


@pytest.mark.parametrize(("ubatch", "least"), [("auto", "0.002"), ("shrink", "0.008")])
def test_auto_is_refused_where_the_least_does_not_fit(
    free: SetLimit, ubatch: str, least: str
) -> None:
    free(300)
    with pytest.raises(BudgetError) as caught:
        plan_run(MODEL, SIZES, Config(ubatch=ubatch))
    message = str(caught.value)
    assert f"experts need at least {least}" in message
    assert "(the test)" in message
    assert "\n" not in message


def test_auto_is_refused_where_the_kernel_does_not_say(free: SetLimit) -> None:
    free(None)
    with pytest.raises(ConfigError, match="give the cache a size"):
        plan_run(MODEL, SIZES, Config())


def test_a_size_needs_no_kernel(free: SetLimit) -> None:
    free(None)
    plan = plan_run(MODEL, TRAINED, Config(cache_bytes=20 * MIB), may_cut_context=True)
    assert plan.n_slots == (10, 10)
    assert not plan.limit_known
    assert plan.n_ctx_cut == 0
    assert warnings(plan) == []


# --- the ubatch -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("cache_mib", "n_ubatch"), [(8, 1), (15, 1), (16, 2), (31, 3), (32, 512)])
def test_a_ubatch_is_shrunk_to_what_the_slots_can_serve_when_asked(
    free: SetLimit, cache_mib: int, n_ubatch: int
) -> None:
    plan = plan_run(MODEL, SIZES, Config(cache_bytes=cache_mib * MIB, ubatch="shrink"))
    assert (plan.n_ubatch, plan.n_ubatch_asked, plan.n_stages) == (n_ubatch, 512, 1)
    (line,) = [line for line in plan.lines() if line.startswith("ubatch")]
    assert line.startswith(f"ubatch  {n_ubatch}")
    assert ("instead of 512" in line) == (n_ubatch != 512)


@pytest.mark.parametrize("ubatch", ["auto", "keep"])
@pytest.mark.parametrize("cache_mib", [2, 8, 31])
def test_a_ubatch_is_computed_in_stages_by_default(
    free: SetLimit, cache_mib: int, ubatch: str
) -> None:
    plan = plan_run(MODEL, SIZES, Config(cache_bytes=cache_mib * MIB, ubatch=ubatch))
    assert (plan.n_ubatch, plan.n_ubatch_asked) == (512, 512)
    assert plan.n_stages > 1
    assert f"ubatch  512, in up to {plan.n_stages} stages per layer" in plan.lines()


def test_there_are_more_stages_the_fewer_slots_there_are_and_one_where_all_fit(
    free: SetLimit,
) -> None:
    stages = [
        plan_run(MODEL, SIZES, Config(cache_bytes=size * MIB)).n_stages for size in (2, 8, 20, 32)
    ]
    assert stages == sorted(stages, reverse=True)
    assert stages[-1] == 1
    one = plan_run(MODEL, replace(SIZES, n_ubatch=1), Config(cache_bytes=8 * MIB))
    assert one.n_stages == 2  # the 4 experts of a token: those in slots, and those missing


def test_a_smaller_ubatch_stays_as_asked(free: SetLimit) -> None:
    plan = plan_run(MODEL, replace(SIZES, n_ubatch=2), Config(cache_bytes=20 * MIB))
    assert plan.n_ubatch == 2
    assert "ubatch  2, in up to 2 stages per layer" in plan.lines()


def test_compute_buffers_are_those_of_the_ubatch_that_runs(free: SetLimit) -> None:
    small = plan_run(MODEL, SIZES, Config(cache_bytes=20 * MIB, ubatch="shrink"))
    large = plan_run(MODEL, SIZES, Config(cache_bytes=20 * MIB))
    assert small.memory.compute_bytes < large.memory.compute_bytes


def test_read_buffers_are_those_of_the_config(free: SetLimit) -> None:
    config = Config(cache_bytes=20 * MIB, n_io_threads=7)
    assert plan_run(MODEL, SIZES, config).memory.read_buffer_bytes == config.read_buffer_bytes


# --- the context ----------------------------------------------------------------------------------


def room_mib(n_ctx: int) -> int:
    """Return the free MiB of which a quarter, after dense weights, is the KV cache of n_ctx."""
    return 4 * n_ctx * KV_OF_A_CELL // MIB + MODEL.dense_bytes // MIB


@pytest.mark.parametrize(
    ("free_mib", "n_ctx"),
    [
        (room_mib(32768), 0),
        (room_mib(32768) - 1, 16384),
        (room_mib(16384), 16384),
        (room_mib(16384) - 1, 8192),
        (room_mib(8192) - 1, 4096),
        (room_mib(4096) - 1, 4096),
        (0, 4096),
    ],
)
def test_a_context_is_halved_until_it_leaves_room(free_mib: int, n_ctx: int) -> None:
    assert kv_cache_bytes(MODEL, 4096) == 4096 * KV_OF_A_CELL
    limit = MemoryLimit(free_mib * MIB, free_mib * MIB, "the test")
    assert cut_context(MODEL, TRAINED, limit) == n_ctx


@pytest.mark.parametrize("n_ctx_train", [0, 512, 4096])
def test_a_short_context_is_never_cut(n_ctx_train: int) -> None:
    model = replace(MODEL, n_ctx_train=n_ctx_train)
    assert cut_context(model, TRAINED, MemoryLimit(0, 0, "the test")) == 0


def test_no_context_is_cut_below_the_least() -> None:
    model = replace(MODEL, n_ctx_train=5000)
    assert cut_context(model, TRAINED, MemoryLimit(0, 0, "the test")) == LEAST_CONTEXT


def test_a_larger_kv_type_cuts_earlier() -> None:
    limit = MemoryLimit(room_mib(32768) * MIB, room_mib(32768) * MIB, "the test")
    assert cut_context(MODEL, TRAINED, limit) == 0
    assert cut_context(MODEL, replace(TRAINED, kv_element_bytes=4.0), limit) == 16384


def test_a_context_that_nobody_asked_for_is_cut_and_said(free: SetLimit) -> None:
    free(room_mib(8192))
    plan = plan_run(MODEL, TRAINED, Config(cache_bytes=20 * MIB), may_cut_context=True)
    assert plan.n_ctx_cut == 8192
    assert plan.extra_args == ["--ctx-size", "8192"]
    assert plan.memory.kv_bytes == 8192 * KV_OF_A_CELL
    (line,) = [line for line in plan.lines() if line.startswith("context")]
    assert "8192 instead of 32768" in line
    assert "--ctx-size" in line


def test_a_context_that_was_asked_for_is_not_cut(free: SetLimit) -> None:
    free(room_mib(8192))
    for sizes in (TRAINED, replace(SIZES, n_ctx=32768)):  # 0 is asked for too: the trained one
        plan = plan_run(MODEL, sizes, Config(cache_bytes=20 * MIB))
        assert plan.n_ctx_cut == 0
        assert plan.extra_args == []
        assert plan.memory.kv_bytes == 32768 * KV_OF_A_CELL
        assert not [line for line in plan.lines() if line.startswith("context")]


def test_an_automatic_budget_counts_the_context_as_cut(free: SetLimit) -> None:
    free(800)
    model, sizes = replace(MODEL, n_ctx_train=2**20), replace(TRAINED, n_ubatch=8)
    with pytest.raises(BudgetError):  # a KV cache of 1 GiB
        plan_run(model, sizes, Config())
    plan = plan_run(model, sizes, Config(), may_cut_context=True)
    assert plan.n_ctx_cut == 131072
    assert plan.n_slots == (16, 16)


# --- lines ----------------------------------------------------------------------------------------


def test_lines_say_all_of_the_plan(free: SetLimit) -> None:
    lines = plan_run(MODEL, SIZES, Config(cache_bytes=20 * MIB)).lines()
    assert [line.split()[0] for line in lines] == ["model", "cache", "ubatch", "memory"]
    assert "Tiny (qwen3moe), 2 layers of 16 experts, top-4" in lines[0]
    assert "10 slots per layer, 20.0 MiB" in lines[1]
    assert "slots 20 + dense weights 100 + " in lines[3]
    assert all("\n" not in line for line in lines)


def test_planned_memory_counts_slots_and_process_but_no_floor(free: SetLimit) -> None:
    plan = plan_run(MODEL, SIZES, Config(cache_bytes=21 * MIB))
    terms = dict(plan.planned.terms)
    assert terms["slots"] == 21 * MIB
    assert terms["process"] == PROCESS_BYTES
    assert "floor" not in terms


# --- states that are kept -------------------------------------------------------------------------

RECURRENT = replace(MODEL, state_bytes=10 * MIB)


def test_kept_states_are_planned(free: SetLimit) -> None:
    sizes = tool_sizes("server", LlamaArguments(None, n_ctx=512, n_seq=2), RECURRENT)
    plan = plan_run(RECURRENT, sizes, Config(cache_bytes=20 * MIB))
    assert dict(plan.planned.terms)["checkpoints"] == 2 * 32 * 10 * MIB
    assert plan.extra_args == []
    few = tool_sizes("server", LlamaArguments(None, n_ctx=512, n_seq=2, n_checkpoints=3), RECURRENT)
    plan = plan_run(RECURRENT, few, Config(cache_bytes=20 * MIB))
    assert dict(plan.planned.terms)["checkpoints"] == 2 * 3 * 10 * MIB
    assert (
        dict(plan_run(MODEL, sizes, Config(cache_bytes=20 * MIB)).planned.terms)["checkpoints"] == 0
    )


def test_kept_states_that_nobody_asked_for_stay_small(free: SetLimit) -> None:
    sizes = tool_sizes("server", LlamaArguments(None, n_ctx=512, n_seq=2), RECURRENT)
    config = Config(cache_bytes=20 * MIB)
    plan = plan_run(RECURRENT, sizes, config, may_cut_checkpoints=True)
    assert plan.n_checkpoints_cut == 20  # 5 % of 8192 MiB
    assert plan.extra_args == ["--ctx-checkpoints", "20"]
    assert dict(plan.planned.terms)["checkpoints"] == 2 * 20 * 10 * MIB
    (line,) = [line for line in plan.lines() if line.startswith("states")]
    assert line.startswith("states  20 of 10.0 MiB kept per sequence instead of 32")
    free(100)
    assert plan_run(RECURRENT, sizes, config, may_cut_checkpoints=True).n_checkpoints_cut == 1
    free(100_000)
    assert plan_run(RECURRENT, sizes, config, may_cut_checkpoints=True).extra_args == []
    free(None)
    assert plan_run(RECURRENT, sizes, config, may_cut_checkpoints=True).n_checkpoints_cut == 0


def test_a_window_is_kept_with_the_tokens_of_a_ubatch() -> None:
    windowed = replace(MODEL, n_swa=100)
    kept_bytes = KV_OF_A_CELL * 768  # 100 + 512 in steps of 256
    assert checkpoint_bytes(windowed, 4096, 512) == kept_bytes
    assert checkpoint_bytes(windowed, 256, 512) == KV_OF_A_CELL * 256  # no longer than the context
    assert checkpoint_bytes(MODEL, 4096, 512) == 0


# --- what the tools take --------------------------------------------------------------------------


@pytest.mark.parametrize("tool", ["cli", "completion"])
def test_tools_take_what_the_options_say(tool: str) -> None:
    arguments = LlamaArguments(None, n_ctx=4096, n_ubatch=64, n_seq=2)
    sizes = tool_sizes(tool, arguments, MODEL)
    n_checkpoints = 32 if tool == "cli" else 0  # a chat goes back to them
    assert sizes == replace(arguments.sizes(), n_checkpoints=n_checkpoints)
    assert (sizes.n_ctx, sizes.n_ubatch, sizes.n_seq, sizes.other_bytes) == (4096, 64, 2, 0)
    assert tool_sizes(tool, LlamaArguments(None), MODEL).n_ctx == 0


@pytest.mark.parametrize(
    ("n_ctx", "n_batch", "n_ctx_total", "n_seq", "n_outputs"),
    [
        (None, 2048, 2048, 4, 2048),
        (0, 2048, 2048, 4, 2048),
        (128, 2048, 2048, 16, 2048),
        (512, 512, 512, 1, 512),
        (700, 2048, 1400, 2, 1400),
        (2048, 512, 2048, 1, 512 + 1024),
    ],
)
def test_perplexity_evaluates_windows_together_and_keeps_their_logits(
    n_ctx: int | None, n_batch: int, n_ctx_total: int, n_seq: int, n_outputs: int
) -> None:
    arguments = LlamaArguments(None, n_ctx=n_ctx, n_batch=n_batch)
    sizes = tool_sizes("perplexity", arguments, MODEL)
    assert (sizes.n_ctx, sizes.n_seq) == (n_ctx_total, n_seq)
    assert sizes.other_bytes == 4 * n_outputs * MODEL.n_vocab


# --- slots by a file ------------------------------------------------------------------------------


def slot_plan(tmp_path: Path, *n_slots: int, **more: object) -> Path:
    layers = [{"layer": il, "n_slots": n} for il, n in enumerate(n_slots)]
    path = tmp_path / "plan.json"
    values = {"format": 1, "model": "Tiny", "budget_bytes": 5, "layers": layers, **more}
    path.write_text(json.dumps(values))
    return path


def test_slots_are_those_of_a_plan(free: SetLimit, tmp_path: Path) -> None:
    path = slot_plan(tmp_path, 3, 12)
    plan = plan_run(MODEL, SIZES, Config(plan_path=path))
    assert plan.n_slots == (3, 12)
    assert dict(plan.planned.terms)["slots"] == 15 * MIB
    fitting = slot_plan(tmp_path, 3, 12, fingerprint=MODEL.fingerprint)
    config = Config(cache_bytes=15 * MIB, plan_path=fitting)
    assert plan_run(MODEL, SIZES, config).n_slots == (3, 12)
    with pytest.raises(BudgetError, match=r"takes 0.015 GiB, the cache has 0.014"):
        plan_run(MODEL, SIZES, Config(cache_bytes=15 * MIB - 1, plan_path=path))


@pytest.mark.parametrize(
    ("n_slots", "more", "said"),
    [
        ((3, 12), {"fingerprint": "0123"}, "a plan for another model: Tiny"),
        ((3,), {}, "other layers"),
        ((3, 17), {}, "gives layer 1 more slots than it has experts"),
        ((3, 12), {"format": 2}, "no plan of slots"),
    ],
)
def test_plans_that_do_not_fit_are_refused(
    n_slots: tuple[int, ...], more: dict[str, object], said: str, free: SetLimit, tmp_path: Path
) -> None:
    path = slot_plan(tmp_path, *n_slots, **more)
    with pytest.raises(ConfigError, match=said):
        plan_run(MODEL, SIZES, Config(plan_path=path))
