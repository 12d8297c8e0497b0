from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import OLMOE, QWEN3, workloads

from longhaul.errors import BudgetError
from longhaul.experts import ExpertTensor, MoeLayer
from longhaul.planner import Place, Plan, StagedPlan
from longhaul.policy import Lru
from longhaul.replay import LayerCache, Tally, replay_layer
from longhaul.tier import (
    HALVING_ROUNDS,
    SWAP_MARGIN,
    HostTier,
    TierLoad,
    TierPlan,
    loaded_experts,
    plan_tier,
)
from longhaul.trace import TraceLayer
from longhaul.trace_files import open_trace
from longhaul.workload import LayerTrace, Need, Workload, load_workload


def run(tier: HostTier, *ubatches: Sequence[int]) -> TierPlan:
    """Load experts as the engine does; return the last plan."""
    made = TierPlan((), (), ())
    for experts in ubatches:
        made = tier.plan(experts)
        tier.evict(made)
        tier.apply(made)
        check_consistent(tier)
    return made


def check_consistent(tier: HostTier) -> None:
    """Check that both tables, the free slots and the two ranks say the same."""
    held = {slot: expert for slot, expert in enumerate(tier.expert_of) if expert >= 0}
    assert {e: s for e, s in enumerate(tier.slot_of) if s >= 0} == {e: s for s, e in held.items()}
    assert set(tier._free) == set(range(len(tier.expert_of))) - set(held)
    assert set(tier._locked) == {slot for slot in held if slot < tier.n_locked}
    assert set(tier._pageable) == {slot for slot in held if slot >= tier.n_locked}


def state(tier: HostTier) -> tuple[list[int], list[int], list[float], list[int]]:
    return list(tier.slot_of), list(tier.expert_of), list(tier.n_loads), list(tier._free)


# --- what a plan says -----------------------------------------------------------------------------


def test_what_is_read_takes_free_slots_from_the_first_on() -> None:
    tier = HostTier(8, 3, n_locked=1)
    made = tier.plan([5, 2])
    assert made.loads == (TierLoad(0, False), TierLoad(1, False))
    assert made.victims == ()
    assert made.n_hits == 0


def test_what_is_there_is_not_read() -> None:
    tier = HostTier(8, 3)
    made = run(tier, [5, 2], [2, 7, 5])
    assert made.loads == (TierLoad(1, True), TierLoad(2, False), TierLoad(0, True))
    assert made.n_hits == 2


def test_what_has_no_more_loads_goes_by() -> None:
    tier = HostTier(8, 2)
    made = run(tier, [0, 1], [2])
    assert made.loads == (TierLoad(-1, False),)
    assert made.victims == ()
    assert tier.expert_of == [0, 1]


def test_what_has_more_loads_takes_the_place_of_the_least_loaded() -> None:
    tier = HostTier(8, 2)
    made = run(tier, [0, 1], [0], [2], [2])
    assert made.victims == (1,)
    assert made.loads == (TierLoad(1, False),)
    assert tier.expert_of == [0, 2]


def test_of_equally_loaded_ones_the_one_loaded_longest_ago_leaves() -> None:
    tier = HostTier(8, 3)
    run(tier, [0, 1, 2], [1], [0], [2], [3], [3], [3])
    assert tier.expert_of == [0, 3, 2]


def test_what_a_plan_takes_from_the_tier_is_no_victim_of_it() -> None:
    tier = HostTier(8, 1)
    made = run(tier, [0], [1], [1, 0])
    assert made.loads == (TierLoad(-1, False), TierLoad(0, True))


def test_hot_ones_are_read_into_locked_slots_even_if_others_are_colder() -> None:
    tier = HostTier(8, 2, n_locked=1)
    run(tier, [0, 1], [0], [2], [2])
    assert tier.expert_of == [0, 2]  # 0 is as hot as 2
    tier = HostTier(8, 2, n_locked=1)
    run(tier, [0, 1], [1], [2], [2])
    assert tier.expert_of == [2, 1]
    assert run(tier, [0], [0]).loads == (TierLoad(0, False),)  # 1 is as cold as 2


def test_experts_keep_their_loads_while_they_are_out() -> None:
    tier = HostTier(8, 1)
    run(tier, [0], [1], [1], [0])
    assert tier.expert_of == [1]
    run(tier, [0])
    assert tier.expert_of == [0]


def test_loads_of_long_ago_count_less() -> None:
    n_expert = 4
    tier = HostTier(n_expert, 1)
    n_round = HALVING_ROUNDS * n_expert
    run(tier, *[[0]] * n_round)
    assert tier.n_loads[0] == n_round / 2
    run(tier, *[[1]] * n_round)
    assert tier.expert_of == [1]
    assert tier.n_loads[:2] == [n_round / 4, n_round / 2]


def test_a_tier_without_slots_serves_nothing() -> None:
    tier = HostTier(4, 0)
    assert run(tier, [1, 2], [1, 2]).loads == (TierLoad(-1, False),) * 2


def test_a_tier_for_all_experts_reads_each_once() -> None:
    tier = HostTier(4, 4, n_locked=4)
    assert run(tier, [3, 1], [0, 2]).n_hits == 0
    assert run(tier, [0, 1, 2, 3]).n_hits == 4


@pytest.mark.parametrize(("n_slots", "n_locked"), [(5, 0), (2, 3), (-1, 0), (2, -1)])
def test_sizes_that_cannot_be_are_refused(n_slots: int, n_locked: int) -> None:
    with pytest.raises(ValueError, match="tier slots for 4 experts"):
        HostTier(4, n_slots, n_locked)


def test_clear_forgets_all_but_how_often_they_were_loaded() -> None:
    tier = HostTier(8, 3, n_locked=1)
    run(tier, [4, 5], [5])
    tables = tier.slot_of, tier.expert_of
    tier.clear()
    check_consistent(tier)
    assert tier.slot_of == [-1] * 8
    assert tier.expert_of == [-1] * 3
    assert (tier.slot_of, tier.expert_of) == tables
    assert tier.slot_of is tables[0]
    assert tier.expert_of is tables[1]
    assert tier.n_loads[5] == 2
    assert run(tier, [5]).loads == (TierLoad(0, False),)


def test_loads_of_both_kinds_of_plans_are_found() -> None:
    assert loaded_experts(Plan(loads=((4, 0), (1, 2)), victims=())) == [4, 1]
    places = (Place(0, 7, 1, False), Place(1, 4, 0, True), Place(2, 1, 0, True))
    assert loaded_experts(StagedPlan(loads=((1, 0),), victims=(), places=places)) == [4, 1]


# --- whatever is loaded ---------------------------------------------------------------------------


def test_a_hot_expert_changes_places_with_a_cold_one_that_is_locked() -> None:
    tier = HostTier(8, 2, n_locked=1)
    run(tier, [5], [2])  # 5 is locked
    for _ in range(SWAP_MARGIN):
        assert run(tier, [2]).swapped == ()
    made = run(tier, [2])
    assert made.loads == (TierLoad(1, True, swap_slot=0),)
    assert made.swapped == (5,)
    assert tier.expert_of == [2, 5]
    assert tier.plan([2, 5]).loads == (TierLoad(0, True), TierLoad(1, True))


@st.composite
def runs(draw: st.DrawFn) -> tuple[HostTier, list[list[int]]]:
    n_expert = draw(st.integers(1, 12))
    n_slots = draw(st.integers(0, n_expert))
    tier = HostTier(n_expert, n_slots, draw(st.integers(0, n_slots)))
    ubatch = st.lists(st.integers(0, n_expert - 1), min_size=1, unique=True)
    return tier, draw(st.lists(ubatch, min_size=1, max_size=40))


@given(runs())
def test_a_plan_names_no_slot_twice_and_changes_nothing(
    case: tuple[HostTier, list[list[int]]],
) -> None:
    tier, ubatches = case
    for experts in ubatches:
        before = state(tier)
        made = tier.plan(experts)
        assert tier.plan(experts) == made
        assert state(tier) == before
        assert made.experts == tuple(experts)
        assert len(made.loads) == len(experts)
        slots = [s for load in made.loads for s in (load.tier_slot, load.swap_slot) if s >= 0]
        assert len(set(slots)) == len(slots)
        assert set(slots) <= set(range(len(tier.expert_of)))
        targets = {s for s, is_there, _ in made.loads if s >= 0 and not is_there}
        pairs = [load for load in made.loads if load.swap_slot >= 0]
        swapped = {slot for load in pairs for slot in (load.tier_slot, load.swap_slot)}
        assert set(made.victims) - swapped <= targets
        assert swapped <= set(made.victims)
        assert len(set(made.victims)) == len(made.victims)
        assert targets - set(made.victims) <= set(tier._free)
        assert made.swapped == tuple(tier.expert_of[load.swap_slot] for load in pairs)
        assert all(load.swap_slot < tier.n_locked <= load.tier_slot for load in pairs)
        for expert, load in zip(experts, made.loads, strict=True):
            assert load.is_there == (tier.slot_of[expert] >= 0)
            assert not load.is_there or load.tier_slot == tier.slot_of[expert]
        run(tier, experts)


@given(runs())
def test_who_comes_is_hotter_than_who_leaves_and_who_goes_by_is_not(
    case: tuple[HostTier, list[list[int]]],
) -> None:
    tier, ubatches = case
    for experts in ubatches:
        made = tier.plan(experts)
        there = {slot for slot, is_there, _ in made.loads if is_there}
        kept = set(range(len(tier.expert_of))) - there - set(made.victims) - set(tier._free)
        for expert, (slot, is_there, swap_slot) in zip(experts, made.loads, strict=True):
            heat = tier.n_loads[expert] + 1
            if swap_slot >= 0:
                assert tier.n_loads[tier.expert_of[swap_slot]] + SWAP_MARGIN < heat
                assert all(tier[s] > tier[swap_slot] for s in kept if s < tier.n_locked)
            elif is_there:
                assert slot not in made.victims
                if slot >= tier.n_locked:  # no locked one is much colder
                    assert all(tier[s][0] + SWAP_MARGIN >= heat for s in kept if s < tier.n_locked)
            elif slot in made.victims:
                assert tier.n_loads[tier.expert_of[slot]] < heat
                if slot >= tier.n_locked:  # no locked one is colder
                    assert all(tier[s][0] >= heat for s in kept if s < tier.n_locked)
                assert all(
                    tier[s] > tier[slot]
                    for s in kept
                    if (s < tier.n_locked) == (slot < tier.n_locked)
                )
            elif slot < 0 and not is_there:
                assert all(tier[s][0] >= heat for s in kept)
        run(tier, experts)


@given(runs(), st.data())
def test_nothing_is_entered_or_counted_when_reads_fail(
    case: tuple[HostTier, list[list[int]]], data: st.DataObject
) -> None:
    tier, ubatches = case
    for experts in ubatches:
        made = tier.plan(experts)
        before, loads = set(tier.expert_of) - {-1}, list(tier.n_loads)
        left = {tier.expert_of[slot] for slot in made.victims}
        tier.evict(made)
        check_consistent(tier)
        assert set(tier.expert_of) - {-1} == before - left
        if data.draw(st.booleans()):
            tier.apply(made)
            check_consistent(tier)
            for expert, (slot, _, swap_slot) in zip(experts, made.loads, strict=True):
                assert tier.slot_of[expert] == (slot if swap_slot < 0 else swap_slot)
        else:
            assert tier.n_loads == loads
            read = [e for e, load in zip(experts, made.loads, strict=True) if not load.is_there]
            assert all(tier.slot_of[expert] == -1 for expert in read)
            assert tier.plan(experts).n_hits == made.n_hits - len(made.swapped)


# --- behind the slots of a device -----------------------------------------------------------------


class TieredCache(LayerCache):
    """Be to one layer what the engine is, with a tier."""

    def __init__(self, shape: TraceLayer, n_slots: int, tier: HostTier, is_backed: bool) -> None:
        super().__init__(shape, n_slots, Lru)
        self.tier = tier
        self.residency.backed = tier.slot_of if is_backed else None
        self.n_reads = self.n_loads = 0

    def serve(self, need: Need) -> None:
        missing = [expert for expert in need.experts if self.slot_of[expert] < 0]
        if missing:
            made = self._plan(need, missing)
            in_tier = self.tier.plan(loaded_experts(made))
            assert sorted(in_tier.experts) == sorted(missing)
            self.residency.evict(made)
            self.tier.evict(in_tier)
            self.residency.apply(made)
            self.tier.apply(in_tier)
            self.n_loads += len(missing)
            self.n_reads += len(missing) - in_tier.n_hits
        self._stamp(need.experts)


def served(layer: LayerTrace, n_slots: int, n_tier: int, is_backed: bool) -> TieredCache:
    shape = layer.shape
    cache = TieredCache(shape, n_slots, HostTier(shape.n_expert, n_tier, n_tier // 4), is_backed)
    for need in layer.needs():
        cache.serve(need)
    check_consistent(cache.tier)
    return cache


def n_loads_without(layer: LayerTrace, n_slots: int) -> int:
    cache, tally = LayerCache(layer.shape, n_slots, Lru), Tally()
    for need in layer.needs():
        cache.step(Need(need.experts, need.n_selected, 0, need.is_prefill), tally)
    return tally.n_loads


@given(workloads(), st.floats(0, 1), st.floats(0, 1))
def test_a_tier_changes_no_load_and_saves_reads(
    workload: Workload, device: float, share: float
) -> None:
    for layer in workload.layers:
        n_slots = max(int(device * layer.shape.n_expert), 1)
        n_tier = int(share * layer.shape.n_expert)
        cache = served(layer, n_slots, n_tier, is_backed=False)
        assert cache.n_loads == n_loads_without(layer, n_slots)
        assert cache.n_reads <= cache.n_loads


@settings(max_examples=30)
@given(workloads(), st.floats(0, 1))
def test_a_tier_for_all_experts_has_each_read_once(workload: Workload, device: float) -> None:
    for layer in workload.layers:
        n_slots = max(int(device * layer.shape.n_expert), 1)
        cache = served(layer, n_slots, layer.shape.n_expert, is_backed=True)
        assert cache.n_reads == len(set(layer.experts))


@pytest.fixture(scope="module", params=[OLMOE, QWEN3], ids=lambda path: path.stem)
def recorded(request: pytest.FixtureRequest) -> Workload:
    return load_workload(open_trace(request.param))


@pytest.mark.parametrize("device", [8, 4, 2])
@pytest.mark.parametrize("tier", [8, 4, 2, 1])
def test_recorded_routers_read_less_with_a_tier_smaller_ones_too(
    recorded: Workload, device: int, tier: int
) -> None:
    n_with = n_without = 0
    for layer in recorded.layers[::4]:
        n_expert = layer.shape.n_expert
        n_without += n_loads_without(layer, n_expert // device)
        reads = served(layer, n_expert // device, n_expert // tier, is_backed=True).n_reads
        assert reads <= n_loads_without(layer, n_expert // device)
        n_with += reads
    assert 0 < n_with < 0.95 * n_without


def test_backed_experts_leave_first_and_save_reads(recorded: Workload) -> None:
    n_backed = n_plain = 0
    for layer in recorded.layers[::4]:
        quarter, half = layer.shape.n_expert // 4, layer.shape.n_expert // 2
        n_backed += served(layer, quarter, half, is_backed=True).n_reads
        n_plain += served(layer, quarter, half, is_backed=False).n_reads
    assert n_backed < 0.9 * n_plain
    assert n_plain < 0.5 * sum(
        sum(t.n_misses for t in replay_layer(layer, layer.shape.n_expert // 4, "lru").values())
        for layer in recorded.layers[::4]
    )


# --- sizes ----------------------------------------------------------------------------------------


def moe_layer(il: int, n_expert: int, expert_bytes: int) -> MoeLayer:
    tensor = ExpertTensor(f"blk.{il}.ffn_up_exps.weight", il, 0, 0, n_expert, expert_bytes, "F32")
    return MoeLayer(il, n_expert, 1, (tensor,))


@given(
    st.lists(st.tuples(st.integers(1, 16), st.integers(1, 1000)), min_size=1, max_size=6),
    st.integers(0, 20_000),
    st.integers(0, 20_000),
)
def test_bytes_are_shared_among_layers(
    sizes: list[tuple[int, int]], ram_bytes: int, pin_bytes: int
) -> None:
    layers = [moe_layer(il, *size) for il, size in enumerate(sizes)]
    n_slots, n_locked = plan_tier(layers, ram_bytes, pin_bytes)
    for layer, count, locked in zip(layers, n_slots, n_locked, strict=True):
        assert 0 <= locked <= count <= layer.n_expert
    for counts, limit in ((n_slots, ram_bytes), (n_locked, min(ram_bytes, pin_bytes))):
        used = sum(layer.expert_bytes * n for layer, n in zip(layers, counts, strict=True))
        assert used <= limit
        if counts != tuple(layer.n_expert for layer in layers):
            assert limit - used < max(layer.expert_bytes for layer in layers)


def test_each_layer_gets_the_same_fraction() -> None:
    layers = [moe_layer(0, 8, 10), moe_layer(1, 16, 10)]
    assert plan_tier(layers, 120) == ((4, 8), (0, 0))
    assert plan_tier(layers, 120, 60) == ((4, 8), (2, 4))
    assert plan_tier(layers, 10**6, 10**7) == ((8, 16), (8, 16))
    assert plan_tier(layers, 9, 9) == ((0, 0), (0, 0))
    assert plan_tier([], 9, 9) == ((), ())


def test_fewer_bytes_than_none_are_refused() -> None:
    with pytest.raises(BudgetError):
        plan_tier([moe_layer(0, 8, 10)], -1)
