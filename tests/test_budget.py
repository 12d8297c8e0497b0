from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longhaul.budget import (
    FLOOR_BYTES,
    GIB,
    MIB,
    PROCESS_BYTES,
    MemoryLimit,
    RunSizes,
    auto_budget,
    compute_bytes,
    effective_ubatch,
    gib_up,
    kv_cache_bytes,
    least_budget_bytes,
    plan_slots,
    slots_bytes,
    token_slots,
    ubatch_limit,
)
from longhaul.config import parse_cache
from longhaul.errors import BudgetError
from longhaul.experts import ExpertTensor, MoeLayer, MoeModel


def layer(il: int, n_expert: int, n_expert_used: int, expert_bytes: int) -> MoeLayer:
    name = f"blk.{il}.ffn_up_exps.weight"
    tensor = ExpertTensor(name, il, 0, 0, n_expert, expert_bytes, "F32")
    return MoeLayer(il, n_expert, n_expert_used, (tensor,))


def model(*layers: MoeLayer, dense_bytes: int = 100 * MIB) -> MoeModel:
    return MoeModel(
        path=Path("m.gguf"),
        shards=(Path("m.gguf"),),
        arch="qwen3moe",
        name="m",
        layers=layers,
        dense_bytes=dense_bytes,
        n_layer=4,
        n_ctx_train=1000,
        n_embd=64,
        n_vocab=32000,
        n_head_kv=(2, 2, 0, 4),
        n_embd_head_k=16,
        n_embd_head_v=8,
        n_head=4,
    )


@st.composite
def some_layers(draw: st.DrawFn) -> tuple[MoeLayer, ...]:
    layers = []
    for il in range(draw(st.integers(1, 6))):
        n_expert = draw(st.integers(1, 16))
        used = draw(st.integers(1, n_expert))
        layers.append(layer(il, n_expert, used, draw(st.integers(1, 1000))))
    return tuple(layers)


# --- slots ----------------------------------------------------------------------------------------


@given(some_layers(), st.integers(0, 20_000))
def test_slots_never_pass_the_budget_nor_fall_below_the_least(
    layers: tuple[MoeLayer, ...], more_bytes: int
) -> None:
    budget_bytes = least_budget_bytes(layers, token_slots) + more_bytes
    n_slots = plan_slots(layers, budget_bytes, token_slots)
    assert slots_bytes(layers, n_slots) <= budget_bytes
    for one, count in zip(layers, n_slots, strict=True):
        assert one.n_expert_used <= count <= one.n_expert
    assert plan_slots(layers, budget_bytes, token_slots) == n_slots


@given(some_layers(), st.integers(0, 20_000), st.integers(0, 5_000))
def test_more_budget_takes_no_slot_from_any_layer(
    layers: tuple[MoeLayer, ...], more_bytes: int, still_more_bytes: int
) -> None:
    budget_bytes = least_budget_bytes(layers, token_slots) + more_bytes
    fewer = plan_slots(layers, budget_bytes, token_slots)
    more = plan_slots(layers, budget_bytes + still_more_bytes, token_slots)
    assert all(a <= b for a, b in zip(fewer, more, strict=True))


@given(some_layers(), st.integers(0, 20_000))
def test_what_is_left_over_is_less_than_one_expert(
    layers: tuple[MoeLayer, ...], more_bytes: int
) -> None:
    budget_bytes = least_budget_bytes(layers, token_slots) + more_bytes
    n_slots = plan_slots(layers, budget_bytes, token_slots)
    left_bytes = budget_bytes - slots_bytes(layers, n_slots)
    if any(count < one.n_expert for one, count in zip(layers, n_slots, strict=True)):
        assert left_bytes < max(one.expert_bytes for one in layers)


@given(some_layers(), st.integers(0, 10**9))
def test_budget_of_the_whole_model_or_more_holds_every_expert(
    layers: tuple[MoeLayer, ...], more_bytes: int
) -> None:
    total_bytes = sum(one.total_bytes for one in layers)
    n_slots = plan_slots(layers, total_bytes + more_bytes)
    assert n_slots == tuple(one.n_expert for one in layers)


@given(some_layers(), st.integers(1, 10**6))
def test_budget_below_the_least_is_refused(layers: tuple[MoeLayer, ...], less: int) -> None:
    with pytest.raises(BudgetError):
        plan_slots(layers, least_budget_bytes(layers, token_slots) - less, token_slots)


@given(st.integers(1, 300), st.integers(1, 60), st.integers(1, 8), st.integers(1, 10**8))
def test_the_least_that_a_refusal_prints_is_enough(
    n_expert: int, n_layer: int, used: int, expert_bytes: int
) -> None:
    layers = [layer(il, max(n_expert, used), used, expert_bytes) for il in range(n_layer)]
    with pytest.raises(BudgetError) as caught:
        plan_slots(layers, 0, token_slots)
    number = str(caught.value).split("give ")[1].split(" or more")[0]
    budget_bytes = parse_cache(number.replace(" ", ""))
    assert budget_bytes is not None
    assert budget_bytes - least_budget_bytes(layers, token_slots) <= GIB / 1000
    assert all(count >= used for count in plan_slots(layers, budget_bytes, token_slots))


def test_layers_of_one_size_differ_by_one_slot_at_most() -> None:
    layers = [layer(il, 64, 8, 10) for il in range(3)]
    assert plan_slots(layers, 10 * (20 * 3 + 2)) == (21, 21, 20)


def test_layers_of_different_size_hold_the_same_fraction() -> None:
    layers = [layer(0, 8, 2, 100), layer(1, 16, 2, 1), layer(2, 32, 2, 10)]
    assert plan_slots(layers, 4 * 100 + 8 * 1 + 16 * 10) == (4, 8, 16)


def test_a_layer_that_needs_more_than_its_fraction_keeps_it() -> None:
    layers = [layer(0, 8, 8, 10), layer(1, 8, 1, 10)]
    assert plan_slots(layers, 10 * 11, token_slots) == (8, 3)


def test_the_least_slots_may_come_from_outside() -> None:
    layers = [layer(0, 8, 4, 10), layer(1, 8, 4, 10)]
    assert least_budget_bytes(layers, lambda _: 1) == 20
    assert plan_slots(layers, 30, lambda _: 1) == (2, 1)
    with pytest.raises(BudgetError):
        plan_slots(layers, 30, token_slots)


def test_a_dense_model_needs_no_slots() -> None:
    assert plan_slots((), 0) == ()
    assert ubatch_limit((), ()) is None


def test_slots_of_another_number_of_layers_are_refused() -> None:
    with pytest.raises(ValueError):
        slots_bytes([layer(0, 8, 2, 1)], [2, 2])


# --- ubatch ---------------------------------------------------------------------------------------


@given(some_layers(), st.integers(0, 20_000), st.integers(1, 600))
def test_a_ubatch_never_selects_more_experts_than_there_are_slots(
    layers: tuple[MoeLayer, ...], more_bytes: int, n_ubatch: int
) -> None:
    n_slots = plan_slots(layers, least_budget_bytes(layers, token_slots) + more_bytes, token_slots)
    n_tokens = effective_ubatch(layers, n_slots, n_ubatch)
    assert 1 <= n_tokens <= n_ubatch
    for one, count in zip(layers, n_slots, strict=True):
        assert min(n_tokens * one.n_expert_used, one.n_expert) <= count
    if n_tokens < n_ubatch:  # and no larger one would do
        assert any(
            min((n_tokens + 1) * one.n_expert_used, one.n_expert) > count
            for one, count in zip(layers, n_slots, strict=True)
            if count < one.n_expert
        )


def test_layers_that_hold_all_experts_put_no_bound_on_the_ubatch() -> None:
    layers = [layer(0, 64, 8, 1), layer(1, 64, 8, 1)]
    assert ubatch_limit(layers, [64, 64]) is None
    assert effective_ubatch(layers, [64, 64], 512) == 512
    assert ubatch_limit(layers, [64, 16]) == 2
    assert effective_ubatch(layers, [64, 23], 512) == 2
    assert effective_ubatch(layers, [63, 64], 4) == 4


def test_slots_that_cannot_hold_one_token_are_refused() -> None:
    layers = [layer(0, 64, 8, MIB)]
    with pytest.raises(BudgetError, match=r"give 0\.008 GiB or more"):
        effective_ubatch(layers, [7], 512)


# --- what a run needs -----------------------------------------------------------------------------

RUN = RunSizes(n_ctx=1024, n_ubatch=512, read_buffer_bytes=16 * MIB)


def test_kv_cache_counts_each_layer_with_its_own_heads() -> None:
    per_cell = (2 + 2 + 0 + 4) * (16 + 8) * 2
    assert kv_cache_bytes(model(), 1024) == 1024 * per_cell
    assert kv_cache_bytes(model(), 1024, bytes_per_element=1.0) == 512 * per_cell
    assert kv_cache_bytes(model(), 0) == 1024 * per_cell  # 1000 in training, padded to 256
    assert kv_cache_bytes(model(), 1000, n_seq=3) == 1536 * per_cell
    assert kv_cache_bytes(replace(model(), state_bytes=7), 1024, n_seq=2) == 1024 * per_cell + 14


def test_compute_buffers_exceed_what_llama_cpp_was_measured_to_take() -> None:
    shape = dict(n_embd=2048, n_vocab=151936, n_head=32, n_embd_head_k=128, n_embd_head_v=128)
    qwen = replace(model(layer(0, 128, 8, 1)), **shape, n_ff=6144, n_ff_exp=768)  # type: ignore[arg-type]
    assert 305 * MIB < compute_bytes(qwen, 512, 512) < 2 * 305 * MIB
    assert 328 * MIB < compute_bytes(qwen, 512, 4608, flash_attention=False) < 2 * 328 * MIB
    shape = dict(n_embd=4096, n_vocab=32000, n_head=32, n_embd_head_k=128, n_embd_head_v=128)
    mixtral = replace(model(layer(0, 8, 2, 1)), **shape, n_ff=28672, n_ff_exp=14336)  # type: ignore[arg-type]
    assert 201 * MIB < compute_bytes(mixtral, 512, 512) < 2 * 201 * MIB


def test_every_term_of_the_plan_is_set_aside_and_shown() -> None:
    moe = model(layer(0, 64, 8, 100 * MIB))
    limit = MemoryLimit(16 * GIB, 4 * GIB, "RAM")
    plan = auto_budget(moe, limit, replace(RUN, other_bytes=5 * MIB))
    terms = dict(plan.terms)
    assert terms["dense weights"] == 100 * MIB
    assert terms["KV cache"] == kv_cache_bytes(moe, 1024)
    assert terms["compute buffers"] == compute_bytes(moe, 512, 1024)
    assert (terms["read buffers"], terms["other"]) == (16 * MIB, 5 * MIB)
    assert terms["floor"] == int(0.05 * 16 * GIB)
    assert plan.budget_bytes == 4 * GIB - sum(terms.values())
    lines = plan.lines()
    assert lines[0] == "available             4096.0 MiB (RAM)"
    assert len(lines) == 1 + len(terms) + 2
    for line, size in zip(lines[1:], terms.values(), strict=False):
        assert f"{size / MIB:.1f} MiB" in line


def test_plan_never_exceeds_the_whole_model() -> None:
    plan = auto_budget(model(layer(0, 8, 2, MIB)), MemoryLimit(GIB * 64, GIB * 64, "RAM"), RUN)
    assert plan.budget_bytes == 8 * MIB


def test_floor_of_a_small_machine_is_a_fixed_size() -> None:
    plan = auto_budget(model(layer(0, 8, 2, MIB)), MemoryLimit(2 * GIB, 2 * GIB, "RAM"), RUN)
    assert plan.floor_bytes == FLOOR_BYTES


def test_a_dense_model_gets_no_budget_and_no_refusal() -> None:
    plan = auto_budget(model(), MemoryLimit(MIB, MIB, "RAM"), RUN)
    assert plan.budget_bytes == 0


def test_too_little_memory_names_what_is_missing() -> None:
    moe = model(layer(0, 64, 8, 100 * MIB))
    limit = MemoryLimit(2 * GIB, GIB, "/sys/fs/cgroup/memory.max")
    with pytest.raises(BudgetError) as caught:
        auto_budget(moe, limit, replace(RUN, least=token_slots))
    message = str(caught.value)
    assert "\n" not in message
    needed = 800 * MIB + sum(
        (100 * MIB, kv_cache_bytes(moe, 1024), compute_bytes(moe, 512, 1024), 16 * MIB)
    )
    needed += PROCESS_BYTES + FLOOR_BYTES
    assert message.startswith(f"{gib_up(needed - GIB)} GiB of memory are missing")
    assert "1.000 GiB (/sys/fs/cgroup/memory.max)" in message
    assert f"at least {gib_up(800 * MIB)}" in message


def test_exactly_the_least_is_enough() -> None:
    moe = model(layer(0, 64, 8, 100 * MIB))
    run = replace(RUN, least=token_slots)
    spare = auto_budget(moe, MemoryLimit(4 * GIB, 4 * GIB, "RAM"), run).left_bytes - 800 * MIB
    plan = auto_budget(moe, MemoryLimit(4 * GIB, 4 * GIB - spare, "RAM"), run)
    assert plan_slots(moe.layers, plan.budget_bytes, token_slots) == (8,)
    with pytest.raises(BudgetError):
        auto_budget(moe, MemoryLimit(4 * GIB, 4 * GIB - spare - 1, "RAM"), run)


def test_one_slot_per_layer_is_the_least_with_stages() -> None:
    layers = [layer(0, 64, 8, 10), layer(1, 32, 4, 7)]
    assert least_budget_bytes(layers) == 17
    assert plan_slots(layers, 17) == (1, 1)
    with pytest.raises(BudgetError):
        plan_slots(layers, 16)
