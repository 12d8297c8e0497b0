"""Replays: known answers, the bound, and that the quick ways do what the planner does."""

import itertools
import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import (
    OLMOE,
    QWEN3,
    MemoryTrace,
    decoded,
    header_of,
    record_of,
    workloads,
)

from longhaul.planner import ROWS_PER_EXPERT
from longhaul.policy import POLICIES
from longhaul.replay import BOUND, NAMES, LayerCache, Tally, replay, replay_layer
from longhaul.stats import Counters, Stats
from longhaul.trace_files import open_trace
from longhaul.workload import LayerTrace, Workload, load_workload, needed_experts

every_policy = pytest.mark.parametrize("policy", POLICIES)


@pytest.fixture(scope="module")
def olmoe() -> Workload:
    return load_workload(open_trace(OLMOE))


def step_by_step(layer: LayerTrace, n_slots: int, policy: str) -> dict[bool, Tally]:
    """Replay as the engine does it, with the planner at each step."""
    tallies = {True: Tally(), False: Tally()}
    cache = LayerCache(layer.shape, n_slots, POLICIES[policy])
    for need in layer.needs():
        cache.step(need, tallies[need.is_prefill])
    return tallies


# --- known answers --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "n_slots", "percent"),
    [("lru", 16, 59.7), ("lru", 32, 79.4), (BOUND, 16, 72.3), (BOUND, 32, 89.9)],
)
def test_the_recorded_routing_of_olmoe(
    policy: str, n_slots: int, percent: float, olmoe: Workload
) -> None:
    counters = replay(olmoe, [n_slots] * 16, policy).stats.decode
    assert round(100 * counters.hit_rate, 1) == percent
    assert counters.n_hits + counters.n_misses == 299 * 16 * 8
    assert counters.n_tokens == counters.n_ubatches == 299


def test_lfu_and_slru_find_more_than_lru_in_recorded_routing(olmoe: Workload) -> None:
    qwen3 = load_workload(open_trace(QWEN3))
    for workload, n_slots in ((olmoe, 32), (qwen3, 32)):
        rates = {
            name: replay(workload, [n_slots] * len(workload.layers), name).stats.decode.hit_rate
            for name in NAMES
        }
        assert 0.5 < rates["lru"] < rates["slru"] < rates["lfu"] < rates[BOUND]
        assert abs(rates["pinned"] - rates["lru"]) < 0.02


def test_every_slot_makes_each_expert_a_miss_once(olmoe: Workload) -> None:
    n_seen = sum(len(set(layer.experts)) for layer in olmoe.layers)
    for name in NAMES:
        counters = replay(olmoe, [64] * 16, name).stats.decode
        assert counters.n_misses == n_seen > 0
        assert counters.n_evictions == 0


def test_what_is_counted_of_a_few_tokens() -> None:
    workload = decoded(header_of(2, 8, 2), [[0, 1], [0, 2], [3, 1], [0, 2]])
    done = replay(workload, [3, 8], "lru")
    # layer 0, 3 slots: 0 1 | 0 hit, 2 | 1 hit, 3 for 0 | 2 hit, 0 for the 1 or 3 that came first
    assert done.stats.decode == Counters(
        n_ubatches=4, n_tokens=4, n_hits=3 + 4, n_misses=5 + 4, n_evictions=2, read_bytes=50 + 44
    )
    assert done.stats.prefill == Counters()
    assert (done.policy, done.n_slots) == ("lru", (3, 8))


@pytest.mark.parametrize("n_slots", [0, 9, -1])
def test_a_layer_has_a_slot_and_not_more_than_experts(n_slots: int) -> None:
    workload = decoded(header_of(1, 8, 2), [[0, 1]])
    with pytest.raises(ValueError, match=f"{n_slots} slots for 8 experts"):
        replay(workload, [n_slots], "lru")


# --- the quick ways -------------------------------------------------------------------------------


@every_policy
@given(workload=workloads(), data=st.data())
def test_a_replay_does_what_the_planner_does(
    policy: str, workload: Workload, data: st.DataObject
) -> None:
    for layer in workload.layers:
        n_slots = data.draw(st.integers(1, layer.shape.n_expert))
        wanted = step_by_step(layer, n_slots, policy)
        assert replay_layer(layer, n_slots, policy) == wanted
        n_found = sum(tally.n_hits + tally.n_misses for tally in wanted.values())
        assert n_found == len(layer.experts) > 0


@every_policy
def test_a_replay_does_what_the_planner_does_on_recorded_routing(
    policy: str, olmoe: Workload
) -> None:
    for layer in olmoe.layers[:3]:
        for n_slots in (6, 8, 20):
            wanted = step_by_step(layer, n_slots, policy)
            assert wanted[False].n_evictions > 0
            assert replay_layer(layer, n_slots, policy) == wanted


def test_what_is_loaded_ahead_is_counted_as_the_engine_does() -> None:
    """The middle one of three layers loads ahead while the first computes many rows."""
    n_rows = 4 * ROWS_PER_EXPERT
    header = header_of(3, 4, 1)
    records = [record_of(0, il, [[0], [1]] * (n_rows // 2), True) for il in range(2)]
    workload = load_workload(MemoryTrace(header, [*records, record_of(0, 2, [[0]], True)]))
    assert [list(layer.n_ahead) for layer in workload.layers] == [[0], [n_rows], [0]]
    tallies = [replay_layer(layer, 4, "lru")[True] for layer in workload.layers]
    assert [(t.n_hits, t.n_misses, t.n_loads) for t in tallies] == [(0, 2, 2), (2, 0, 4), (0, 1, 1)]
    assert replay(workload, [4, 4, 4], "lru").stats.prefill.read_bytes == 2 * 10 + 4 * 11 + 12


# --- the bound ------------------------------------------------------------------------------------


@every_policy
@given(workload=workloads(widest=8), data=st.data())
def test_no_policy_reads_less_than_the_bound(
    policy: str, workload: Workload, data: st.DataObject
) -> None:
    for layer in workload.layers:
        n_slots = data.draw(st.integers(1, layer.shape.n_expert))
        bound, found = (replay_layer(layer, n_slots, name) for name in (BOUND, policy))
        n_bound, n_found = (
            sum(tally.n_loads for tally in tallies.values()) for tallies in (bound, found)
        )
        assert 0 < n_bound <= n_found


def fewest_misses(needs: list[frozenset[int]], n_slots: int) -> int:
    """Try every choice of what stays."""
    best = {frozenset[int](): 0}
    for need in needs:
        following: dict[frozenset[int], int] = {}
        for resident, n_misses in best.items():
            total = n_misses + len(need - resident)
            for kept in subsets(sorted(resident - need), max(n_slots - len(need), 0)):
                state = frozenset(kept) | need
                following[state] = min(total, following.get(state, total))
        best = following
    return min(best.values())


def subsets(items: list[int], most: int) -> list[tuple[int, ...]]:
    return list(itertools.combinations(items, min(most, len(items))))


@settings(max_examples=60)
@given(data=st.data())
def test_the_bound_is_what_the_best_of_all_choices_misses(data: st.DataObject) -> None:
    n_slots = data.draw(st.integers(2, 4))
    token = st.lists(st.integers(0, 5), min_size=2, max_size=2, unique=True)
    tokens = data.draw(st.lists(token, min_size=1, max_size=10))
    workload = decoded(header_of(1, 6, 2), tokens)
    tally = replay_layer(workload.layers[0], n_slots, BOUND)[False]
    assert tally.n_misses == fewest_misses([frozenset(token) for token in tokens], n_slots) > 0


# --- workloads ------------------------------------------------------------------------------------


def test_needed_experts_are_in_the_order_of_their_last_rows() -> None:
    ids = record_of(0, 0, [[1, 2, 3], [3, 4, 1], [5, 4, 2]]).ids
    assert needed_experts(ids) == [3, 1, 5, 4, 2]


def test_halves_of_a_workload_are_what_was_cut(olmoe: Workload) -> None:
    halves = [olmoe.between(0, 100), olmoe.between(100, 299)]
    assert [half.n_ubatches for half in halves] == [100, 199]
    assert [half.totals for half in halves] == [
        Stats(decode=Counters(n_ubatches=n, n_tokens=n)) for n in (100, 199)
    ]
    for i, layer in enumerate(olmoe.layers):
        parts = [list(half.layers[i].needs()) for half in halves]
        assert [*parts[0], *parts[1]] == list(layer.needs())
        assert list(halves[1].layers[i].ubatch) == list(range(199))


def test_tokens_of_a_ubatch_are_those_of_the_layer_with_the_most_rows() -> None:
    workload = load_workload(open_trace(QWEN3))
    assert workload.totals == Stats(
        prefill=Counters(n_ubatches=1, n_tokens=28), decode=Counters(n_ubatches=128, n_tokens=128)
    )
    assert workload.n_events > 128 * 48 * 6


def test_lines_of_the_file_are_tokens(olmoe: Workload) -> None:
    lines = [json.loads(line) for line in OLMOE.read_text().splitlines()]
    needs = list(olmoe.layers[5].needs())
    assert [need.experts for need in needs] == [line["layers"][5] for line in lines]
    assert replace(needs[0], experts=[]) == replace(needs[-1], experts=[])
