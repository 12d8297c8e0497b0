"""Sharing memory among RAM and devices: arithmetic without a device."""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longhaul import advise, launch
from longhaul.budget import (
    GIB,
    MIB,
    PROCESS_BYTES,
    MemoryLimit,
    RunSizes,
    one_slot,
    plan_slots,
    share_slots,
)
from longhaul.config import Config
from longhaul.errors import BudgetError, ConfigError
from longhaul.experts import ExpertTensor, MoeLayer, MoeModel
from longhaul.launch import LEAST_CONTEXT, RunPlan, cut_placed_context, plan_run
from longhaul.pools import CPU, DeviceMemory, Placement

GPU = "Vulkan0"
SIZES = RunSizes(n_ctx=512, n_ubatch=512, read_buffer_bytes=0)
FREE_MIB = 8192


def layer(il: int, n_mib: int = 1) -> MoeLayer:
    tensors = tuple(
        ExpertTensor(f"blk.{il}.ffn_{kind}_exps.weight", il, 0, 0, 16, n_mib * MIB, "F32")
        for kind in ("up", "down")
    )
    return MoeLayer(il, 16, 4, tensors)


MODEL = MoeModel(
    path=Path("m.gguf"),
    shards=(Path("m.gguf"),),
    arch="qwen3moe",
    name="Tiny",
    layers=(layer(0), layer(1), layer(2), layer(3)),
    dense_bytes=100 * MIB,
    n_layer=4,
    n_ctx_train=32768,
    n_embd=64,
    n_vocab=1000,
    n_head_kv=(2, 2, 2, 2),
    n_embd_head_k=64,
    n_embd_head_v=64,
    n_head=4,
)
HOST = DeviceMemory(CPU, "a CPU", True, 0, 0, 30 * MIB, 10 * MIB, 5 * MIB)
# 15 MiB of compute buffers with what stages take
CARD = DeviceMemory(GPU, "a card", False, 1000 * MIB, 800 * MIB, 70 * MIB, 20 * MIB, 14 * MIB)


def placement(card: DeviceMemory = CARD, on_cpu: int = 2, **changes: object) -> Placement:
    """Put the first layers in RAM, and the others on the card."""
    device_of = {
        tensor.name: CPU if layer.layer < on_cpu else card.name
        for layer in MODEL.layers
        for tensor in layer.tensors
    }
    return dataclasses.replace(Placement((card,), HOST, device_of, 512), **changes)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def free(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = MemoryLimit(FREE_MIB * MIB, FREE_MIB * MIB, "the test")
    monkeypatch.setattr(launch, "memory_limit", lambda: limit)


def plan(config: Config | None = None, **changes: object) -> RunPlan:
    return plan_run(MODEL, SIZES, config or Config(), placement=placement(**changes))  # type: ignore[arg-type]


def by_device(**sizes: int) -> Config:
    return Config(cache_by_device={name: n * MIB for name, n in sizes.items()})


# --- sharing --------------------------------------------------------------------------------------


def test_one_room_limits_as_a_total_does() -> None:
    costs = [{CPU: layer.expert_bytes} for layer in MODEL.layers]
    for budget_mib in (8, 9, 23, 64, 127, 128, 500):
        shared = share_slots(MODEL.layers, costs, {CPU: budget_mib * MIB}, one_slot)
        assert shared == plan_slots(MODEL.layers, budget_mib * MIB)


def test_a_full_pool_does_not_hold_up_the_others() -> None:
    costs = [{CPU: 2 * MIB}, {CPU: 2 * MIB}, {GPU: 2 * MIB}, {GPU: 2 * MIB}]
    rooms = {CPU: 9 * MIB, GPU: 41 * MIB}
    assert share_slots(MODEL.layers, costs, rooms, one_slot) == (2, 2, 10, 10)


def test_a_layer_in_two_pools_stops_with_the_smaller_one() -> None:
    costs = [{CPU: MIB, GPU: MIB}, {CPU: 2 * MIB}, {GPU: 2 * MIB}, {GPU: 2 * MIB}]
    rooms = {CPU: 500 * MIB, GPU: 15 * MIB}
    n_slots = share_slots(MODEL.layers, costs, rooms, one_slot)
    assert n_slots == (3, 16, 3, 3)
    taken = sum(n * cost.get(GPU, 0) for n, cost in zip(n_slots, costs, strict=True))
    assert taken <= rooms[GPU]


def test_a_total_is_shared_by_the_experts_of_each_pool() -> None:
    costs = [{CPU: 2 * MIB}, {GPU: 2 * MIB}, {GPU: 2 * MIB}, {GPU: 2 * MIB}]
    rooms = {CPU: 500 * MIB, GPU: 500 * MIB}
    assert share_slots(MODEL.layers, costs, rooms, one_slot, 40 * MIB) == (5, 5, 5, 5)
    rooms[GPU] = 12 * MIB  # the rest of the total goes where there is room
    assert share_slots(MODEL.layers, costs, rooms, one_slot, 40 * MIB) == (14, 2, 2, 2)


def test_a_total_below_the_least_is_refused_with_the_least() -> None:
    costs = [{CPU: 2 * MIB}, {GPU: 2 * MIB}, {GPU: 2 * MIB}, {GPU: 2 * MIB}]
    rooms = {CPU: 500 * MIB, GPU: 500 * MIB}
    assert share_slots(MODEL.layers, costs, rooms, one_slot, 8 * MIB) == (1, 1, 1, 1)
    with pytest.raises(BudgetError, match=r"give 0\.008 GiB or more"):
        share_slots(MODEL.layers, costs, rooms, one_slot, 8 * MIB - 1)


def test_more_room_never_takes_a_slot_from_a_layer() -> None:
    costs = [{CPU: 2 * MIB}, {CPU: 2 * MIB}, {GPU: 2 * MIB}, {GPU: 2 * MIB}]
    before = (1, 1, 1, 1)
    for n_mib in range(4, 70):
        now = share_slots(MODEL.layers, costs, {CPU: 20 * MIB, GPU: n_mib * MIB}, one_slot)
        assert all(b <= n for b, n in zip(before, now, strict=True))
        before = now
    assert before == (5, 5, 16, 16)


@given(
    st.lists(st.tuples(*[st.sampled_from([0, MIB, 3 * MIB])] * 2), min_size=4, max_size=4),
    st.integers(12, 200),
    st.integers(12, 200),
    st.integers(24, 300) | st.none(),
)
def test_no_pool_and_no_total_is_ever_exceeded(
    slices: list[tuple[int, int]], cpu_mib: int, gpu_mib: int, total_mib: int | None
) -> None:
    costs = [
        {pool: size for pool, size in zip((CPU, GPU), both, strict=True) if size} for both in slices
    ]
    rooms = {CPU: cpu_mib * MIB, GPU: gpu_mib * MIB}
    total_bytes = None if total_mib is None else total_mib * MIB
    n_slots = share_slots(MODEL.layers, costs, rooms, one_slot, total_bytes)
    taken = {
        pool: sum(n * cost.get(pool, 0) for n, cost in zip(n_slots, costs, strict=True))
        for pool in rooms
    }
    assert all(taken[pool] <= rooms[pool] for pool in rooms)
    assert total_bytes is None or sum(taken.values()) <= total_bytes
    assert all(1 <= n <= 16 for n in n_slots)


# --- auto -----------------------------------------------------------------------------------------


def test_auto_gives_each_pool_what_its_terms_leave() -> None:
    # 70 + 20 + 15 are taken, and the floor is 5 % of 1000
    card = dataclasses.replace(CARD, free_bytes=200 * MIB)
    found = plan(card=card)
    cpu, gpu = found.pools
    assert found.n_slots == (16, 16, 11, 11)  # 200 - 70 - 20 - 15 - 50 = 45 MiB: 22 of 2 MiB
    assert (cpu.slot_bytes, gpu.slot_bytes) == (64 * MIB, 44 * MIB)
    assert dict(gpu.terms)["floor"] == 50 * MIB
    assert gpu.planned_bytes == (44 + 70 + 20 + 15) * MIB
    assert found.automatic
    assert found.budget_bytes == (64 + 45) * MIB


def test_the_margin_of_llama_cpp_is_the_floor_where_it_is_more() -> None:
    card = dataclasses.replace(CARD, free_bytes=200 * MIB, margin_bytes=76 * MIB)
    assert plan(card=card).n_slots == (16, 16, 5, 4)  # 19 MiB are left


def test_where_only_the_floor_is_short_the_least_is_planned() -> None:
    card = dataclasses.replace(CARD, free_bytes=122 * MIB)  # 17 MiB beside what is taken
    assert plan(card=card).n_slots == (16, 16, 4, 4)  # as many as a token uses
    card = dataclasses.replace(CARD, free_bytes=(105 + 16) * MIB - 1)
    with pytest.raises(BudgetError, match=r"GiB of memory are missing on Vulkan0") as refusal:
        plan(card=card)
    assert "--n-gpu-layers" in str(refusal.value)


def test_ram_is_planned_by_what_the_host_takes() -> None:
    found = plan()
    terms = dict(found.planned.terms)
    assert terms["dense weights"] == 30 * MIB
    assert terms["KV cache"] == 10 * MIB
    assert terms["compute buffers"] == 5 * MIB
    assert terms["slots"] == 64 * MIB
    assert terms["process"] == PROCESS_BYTES
    with_drivers = plan(process_bytes=PROCESS_BYTES + 50 * MIB)
    assert dict(with_drivers.planned.terms)["process"] == PROCESS_BYTES + 50 * MIB


def test_a_device_in_the_hosts_memory_is_counted_once_and_as_ram() -> None:
    shared = dataclasses.replace(CARD, is_host=True)
    found = plan(card=shared)
    (cpu,) = found.pools
    assert (cpu.name, cpu.description) == (CPU, "RAM, Vulkan0")
    assert cpu.slot_bytes == 128 * MIB
    terms = dict(found.planned.terms)
    assert terms["dense weights"] == 100 * MIB
    assert terms["KV cache"] == 30 * MIB
    assert terms["compute buffers"] == 20 * MIB


def test_a_device_that_reports_no_memory_needs_a_size() -> None:
    card = dataclasses.replace(CARD, total_bytes=0, free_bytes=0)
    with pytest.raises(ConfigError, match="give --longhaul-cache Vulkan0=SIZE"):
        plan(card=card)
    assert plan(by_device(Vulkan0=16), card=card).n_slots == (16, 16, 4, 4)


# --- sizes by hand --------------------------------------------------------------------------------


def test_each_device_may_have_a_size_of_its_own() -> None:
    found = plan(by_device(CPU=20, vulkan0=16))  # as ggml names it, whatever the case
    assert found.n_slots == (5, 5, 4, 4)
    assert not found.automatic
    assert found.budget_bytes == 36 * MIB


def test_a_device_without_a_size_is_auto() -> None:
    assert plan(by_device(CPU=20)).n_slots == (5, 5, 16, 16)
    assert plan(by_device(Vulkan0=20)).n_slots == (16, 16, 5, 5)


def test_a_total_never_takes_more_of_a_device_than_it_has() -> None:
    card = dataclasses.replace(CARD, free_bytes=200 * MIB)
    assert plan(Config(cache_bytes=80 * MIB), card=card).n_slots == (10, 10, 10, 10)
    assert plan(Config(cache_bytes=500 * MIB), card=card).n_slots == (16, 16, 11, 11)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"CUDA3": 1}, "no device CUDA3 for --longhaul-cache; experts lie on: CPU, Vulkan0"),
        ({"CPU": 3}, r"CPU=0\.002 GiB is below the least .* give CPU=0\.004 or more"),
    ],
)
def test_a_size_that_cannot_be_is_refused(sizes: Mapping[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(by_device(**sizes))


def test_a_size_for_a_device_without_experts_is_refused() -> None:
    with pytest.raises(ConfigError, match="no experts lie on Vulkan0; they lie on: CPU"):
        plan(by_device(Vulkan0=1), on_cpu=4)


def test_a_device_that_is_ram_shares_its_size() -> None:
    shared = dataclasses.replace(CARD, is_host=True)
    assert plan(by_device(Vulkan0=40), card=shared).n_slots == (5, 5, 5, 5)
    with pytest.raises(ConfigError, match="the memory of Vulkan0 is RAM, which has a size already"):
        plan(by_device(CPU=40, Vulkan0=40), card=shared)


def test_what_comes_after_the_slots_is_known_by_device() -> None:
    ram_bytes = (10 + 5) * MIB
    assert plan().later_bytes == {CPU: ram_bytes, GPU: (20 + 15) * MIB}
    shared = plan(card=dataclasses.replace(CARD, is_host=True)).later_bytes
    assert shared == {CPU: ram_bytes + 35 * MIB, GPU: ram_bytes + 35 * MIB}


def test_without_devices_cpu_is_all_there_is() -> None:
    assert plan_run(MODEL, SIZES, by_device(cpu=40)).n_slots == (5, 5, 5, 5)
    with pytest.raises(ConfigError, match="no experts lie on a device Vulkan0; they lie on: CPU"):
        plan_run(MODEL, SIZES, by_device(Vulkan0=40))
    with pytest.raises(ConfigError, match="no experts lie on a device Vulkan0; they lie on: CPU"):
        plan_run(MODEL, SIZES, by_device(CPU=40, Vulkan0=40))


def test_a_size_beyond_what_is_free_is_warned_about() -> None:
    card = dataclasses.replace(CARD, free_bytes=120 * MIB)
    lines = plan(by_device(Vulkan0=30), card=card).lines()
    (warning,) = (line for line in lines if line.startswith("warning"))
    assert warning == "warning 135 MiB are planned on Vulkan0, but only 120 MiB are free there"


def test_a_plan_for_each_layer_has_to_fit_on_each_device(monkeypatch: pytest.MonkeyPatch) -> None:
    card = dataclasses.replace(CARD, free_bytes=200 * MIB)  # 45 MiB for slots
    by_file = Config(plan_path=Path("slots.json"))
    monkeypatch.setattr(launch, "slots_of_plan", lambda model, path: (16, 5, 11, 11))
    assert plan(by_file, card=card).n_slots == (16, 5, 11, 11)
    small = dataclasses.replace(by_file, cache_bytes=85 * MIB)
    with pytest.raises(BudgetError, match=r"slots\.json takes 0\.084 GiB, the cache has 0\.083"):
        plan(small, card=card)
    monkeypatch.setattr(launch, "slots_of_plan", lambda model, path: (1, 1, 12, 11))
    with pytest.raises(BudgetError, match=r"takes 0\.045 GiB on Vulkan0, the cache has 0\.043"):
        plan(by_file, card=card)


# --- where experts lie ----------------------------------------------------------------------------


def test_the_tensors_of_a_layer_may_lie_on_several_devices() -> None:
    found = placement()
    split = dict(found.device_of) | {"blk.2.ffn_up_exps.weight": CPU}
    found = dataclasses.replace(found, device_of=split)
    assert found.costs(MODEL.layers)[2] == {CPU: MIB, GPU: MIB}
    cpu, gpu = plan_run(MODEL, SIZES, Config(), placement=found).pools
    assert (cpu.n_layers, gpu.n_layers) == (3, 2)
    assert (cpu.slot_bytes, gpu.slot_bytes) == ((32 + 32 + 16) * MIB, (16 + 32) * MIB)


def test_experts_in_a_buffer_that_cannot_stream_are_refused_by_name() -> None:
    split = {name: "CUDA_Split" for name in placement().device_of}
    with pytest.raises(ConfigError, match=r"buffer of type CUDA_Split.*--split-mode row"):
        plan_run(MODEL, SIZES, Config(), placement=placement(device_of=split))


def test_what_lies_in_ram_alone_needs_no_pools() -> None:
    idle = dataclasses.replace(CARD, model_bytes=0, context_bytes=0, compute_bytes=0)
    assert placement(card=idle, on_cpu=4).is_host_only
    assert not placement(card=idle, on_cpu=3).is_host_only
    assert not placement(on_cpu=4).is_host_only


# --- context --------------------------------------------------------------------------------------


def test_a_context_is_cut_where_a_device_is_too_small_for_it() -> None:
    limit = MemoryLimit(FREE_MIB * MIB, FREE_MIB * MIB, "the test")
    card = dataclasses.replace(CARD, context_bytes=400 * MIB)  # of 730: at most 182
    assert cut_placed_context(placement(card=card, n_ctx=32768), limit) == 8192
    assert cut_placed_context(placement(n_ctx=32768), limit) == 0
    huge = dataclasses.replace(CARD, context_bytes=40000 * MIB)
    assert cut_placed_context(placement(card=huge, n_ctx=32768), limit) == LEAST_CONTEXT


def test_a_cut_context_is_told_to_the_tool_and_to_the_user() -> None:
    found = plan(n_ctx=4096, n_ctx_cut=4096, args=("--fit", "off"))
    assert found.extra_args == ["--ctx-size", "4096"]
    assert found.final_args == ["--fit", "off"]
    assert any(line.startswith("context 4096 instead of 32768") for line in found.lines())


# --- what is said ---------------------------------------------------------------------------------


def test_each_device_has_a_line_with_every_term() -> None:
    card = dataclasses.replace(CARD, free_bytes=200 * MIB, other_bytes=3 * MIB)
    lines = [line for line in plan(card=card).lines() if line.startswith("device")]
    assert lines == [
        "device  CPU (RAM): 64.0 MiB of slots for 2 layers; the rest of it is under memory",
        "device  Vulkan0 (a card): 42.0 MiB of slots for 2 layers; planned 150 of 200 MiB free:"
        " slots 42 + model 70 + KV 20 + compute 15 + other 3 + floor 50",
    ]


def test_without_devices_no_line_names_one() -> None:
    lines = plan_run(MODEL, SIZES, Config()).lines()
    assert len(lines) >= 4
    assert not any(line.startswith("device") for line in lines)


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = MemoryLimit(FREE_MIB * MIB, FREE_MIB * MIB, "the test")
    monkeypatch.setattr(advise, "memory_limits", lambda: [limit])
    monkeypatch.setattr(advise, "memory_limit", lambda: limit)


@pytest.mark.usefixtures("limits")
def test_plan_says_which_device_is_short() -> None:
    card = dataclasses.replace(CARD, free_bytes=124 * MIB)
    config = by_device(Vulkan0=30)
    found = advise.advise(MODEL, SIZES, config, placement=placement(card=card))
    assert not found.fits
    assert found.verdict == ("does not fit: 135 MiB are planned on Vulkan0, 124 MiB are free there")
    assert found.least_bytes == (2 * 2 + 2 * 8) * MIB
    assert "limit        124.0 MiB free: Vulkan0 (a card), for itself" in found.lines()
    fitting = advise.advise(MODEL, SIZES, by_device(Vulkan0=18), placement=placement(card=card))
    assert fitting.fits


@pytest.mark.usefixtures("limits")
def test_plan_says_on_which_device_the_least_does_not_fit() -> None:
    card = dataclasses.replace(CARD, free_bytes=100 * MIB)
    found = advise.advise(MODEL, SIZES, Config(), placement=placement(card=card))
    assert found.plan is None
    assert "GiB of memory are missing on Vulkan0" in found.verdict
    assert found.memory.dense_bytes == 30 * MIB


# --- experts in memory behind the slots -----------------------------------------------------------


def test_memory_behind_slots_serves_layers_on_devices_alone() -> None:
    found = plan(Config(ram_bytes=12 * MIB, pin_bytes=4 * MIB))
    assert found.tier is not None
    assert found.tier.n_slots[:2] == (0, 0)  # whose slots are in RAM
    assert sum(found.tier.n_slots) == 6  # of 2 MiB each
    assert sum(found.tier.n_locked) == 2
    terms = dict(found.planned.terms)
    assert 12 * MIB < terms["tier"] < 13 * MIB
    assert any("12.0 MiB of memory behind the slots of 2 layers" in x for x in found.lines())
    assert any("4.0 MiB of it page-locked" in line for line in found.lines())


def test_more_memory_behind_slots_than_experts_is_all_of_them() -> None:
    found = plan(Config(ram_bytes=500 * MIB))
    assert found.tier is not None
    assert found.tier.n_slots == (0, 0, *(layer.n_expert for layer in MODEL.layers[2:]))


def test_memory_behind_slots_is_taken_from_those_in_ram() -> None:
    without, with_tier = plan(), plan(Config(ram_bytes=12 * MIB))
    ram = [next(pool for pool in each.pools if pool.name == "CPU") for each in (without, with_tier)]
    taken_bytes = ram[0].left_bytes - ram[1].left_bytes
    assert 12 * MIB < taken_bytes < 13 * MIB


def test_memory_behind_slots_that_is_not_there_is_refused_with_what_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spare_bytes = plan(Config(ram_bytes=60 * MIB)).memory.left_bytes
    short = MemoryLimit(FREE_MIB * MIB, FREE_MIB * MIB - spare_bytes - 40 * MIB, "a test")
    monkeypatch.setattr(launch, "memory_limit", lambda: short)
    with pytest.raises(BudgetError, match=r"^--longhaul-ram takes .*\(a test\)") as refusal:
        plan(Config(ram_bytes=60 * MIB))
    named = re.search(r"give ([0-9.]+) or less$", str(refusal.value))
    assert named
    assert plan(Config(ram_bytes=int(float(named[1]) * GIB))).tier is not None
    none = MemoryLimit(FREE_MIB * MIB, 100 * MIB, "a test")
    monkeypatch.setattr(launch, "memory_limit", lambda: none)
    with pytest.raises(BudgetError, match=r"only 0\.000 GiB of .*; leave it out$"):
        plan(Config(ram_bytes=60 * MIB))


def test_memory_behind_slots_in_ram_is_refused_unless_the_user_insists() -> None:
    with pytest.raises(ConfigError, match="would hold every expert twice"):
        plan_run(MODEL, SIZES, Config(ram_bytes=12 * MIB))
    with pytest.raises(ConfigError, match="would hold every expert twice"):
        plan(Config(ram_bytes=12 * MIB), on_cpu=4)
    found = plan_run(MODEL, SIZES, Config(ram_bytes=12 * MIB, ram_anyway=True))
    assert found.tier is not None
    assert sum(found.tier.n_slots) == 6
    assert plan_run(MODEL, SIZES, Config(ram_anyway=True)).tier is None


def test_too_little_memory_for_an_expert_is_warned_about() -> None:
    found = plan(Config(ram_bytes=1))
    assert any("less than one expert of a layer" in line for line in found.lines())


def test_page_locked_memory_is_a_part() -> None:
    with pytest.raises(ConfigError, match="--longhaul-pin must not be more than --longhaul-ram"):
        Config(ram_bytes=1, pin_bytes=2)


def test_what_stages_take_of_a_device_is_planned() -> None:
    there = dict(next(pool for pool in plan().pools if pool.name == GPU).terms)
    assert there["compute"] == CARD.compute_bytes + 4 * (4 * 512) * (64 + 64)
    short = plan_run(
        MODEL, dataclasses.replace(SIZES, n_ubatch=64), Config(), placement=placement()
    )
    less = dict(next(pool for pool in short.pools if pool.name == GPU).terms)
    assert less["compute"] == CARD.compute_bytes + 4 * (4 * 64) * (64 + 64)
