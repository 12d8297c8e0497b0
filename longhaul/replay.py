"""Replays a trace through a cache policy without a model: hits, misses, evictions, bytes. Pure.

Layers do not share slots, so each is replayed by itself. What a layer does with a ubatch is what
the engine does, by the same planner, residency and policies; only reading is left out.
"""

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .planner import Plan, plan, plan_ahead, plan_stages, stage_count
from .policy import POLICIES, MakePolicy
from .residency import Residency
from .stats import Counters, Stats
from .trace import TraceLayer
from .workload import LayerTrace, Need, Workload

BOUND = "belady"  # knows the future; no policy of the engine
NAMES = (*POLICIES, BOUND)
NEVER = 2**62  # when an expert is wanted that is not wanted again


@dataclass(slots=True)
class Tally:
    """Count what one phase does to one layer."""

    n_hits: int = 0
    n_misses: int = 0
    n_evictions: int = 0
    n_loads: int = 0  # more than misses where something was loaded ahead


@dataclass(frozen=True, slots=True)
class Replayed:
    """Hold the outcome of a replay; times are 0."""

    policy: str
    n_slots: tuple[int, ...]
    stats: Stats


def replay(workload: Workload, n_slots: Sequence[int], policy: str) -> Replayed:
    """Replay a trace from a cold cache with so many slots of each layer.

    `policy` is one of NAMES. Raises ValueError if a layer has no slot, or more than experts.
    """
    totals = workload.totals
    prefill, decode = totals.prefill, totals.decode
    for layer, count in zip(workload.layers, n_slots, strict=True):
        if not 0 < count <= layer.shape.n_expert:
            raise ValueError(f"{count} slots for {layer.shape.n_expert} experts")
        tallies = replay_layer(layer, count, policy)
        prefill += _counters(tallies[True], layer.shape)
        decode += _counters(tallies[False], layer.shape)
    return Replayed(policy, tuple(n_slots), Stats(prefill, decode))


def _counters(tally: Tally, shape: TraceLayer) -> Counters:
    return Counters(
        n_hits=tally.n_hits,
        n_misses=tally.n_misses,
        n_evictions=tally.n_evictions,
        read_bytes=tally.n_loads * shape.expert_bytes,
    )


def replay_layer(layer: LayerTrace, n_slots: int, policy: str) -> dict[bool, Tally]:
    """Replay one layer; the answer is by whether the phase is prefill."""
    tallies = {True: Tally(), False: Tally()}
    if policy == BOUND:
        _replay_bound(layer, n_slots, tallies)
    elif policy == "lru" and not any(layer.is_wide(n_slots)):
        _replay_lru(layer, n_slots, tallies)
    else:
        _replay_policy(layer, LayerCache(layer.shape, n_slots, POLICIES[policy]), tallies)
    return tallies


class LayerCache:
    """Be to one layer what the engine is, and what native code does to its slot table."""

    def __init__(self, shape: TraceLayer, n_slots: int, make_policy: MakePolicy) -> None:
        n_expert = shape.n_expert
        self.last_use, self.n_uses = [0] * n_slots, [0] * n_slots
        self.slot_of, self.expert_of = [-1] * n_expert, [-1] * n_slots
        self.residency = Residency(
            self.slot_of, self.expert_of, self.last_use, make_policy, self.n_uses
        )
        self._n_stages = [stage_count(n, n_slots, n_expert) for n in range(n_expert + 1)]
        self.clock = 0

    def step(self, need: Need, tally: Tally) -> None:
        """Serve a ubatch; `Engine` has the same calls, and sync.cpp what lies between them."""
        residency, slot_of = self.residency, self.slot_of
        if need.n_ahead > len(slot_of) and -1 in self.expert_of:
            ahead = plan_ahead(residency, need.n_ahead)
            residency.apply(ahead)
            tally.n_loads += len(ahead.loads)
        missing = [expert for expert in need.experts if slot_of[expert] < 0]
        tally.n_hits += len(need.experts) - len(missing)
        tally.n_misses += len(missing)
        tally.n_loads += len(missing)
        if missing:
            made = self._plan(need, missing)
            residency.evict(made)
            residency.apply(made)
            tally.n_evictions += made.n_evictions
        self._stamp(need.experts)

    def _plan(self, need: Need, missing: list[int]) -> Plan:
        if self._n_stages[min(need.n_selected, len(self.slot_of))] <= 2:
            return plan(self.residency, need.experts, missing)
        return plan_stages(self.residency, need.experts, missing)

    def _stamp(self, experts: Sequence[int]) -> None:
        for expert in experts:
            slot = self.slot_of[expert]
            if slot >= 0:
                self.clock += 1
                self.last_use[slot] = self.clock
                self.n_uses[slot] += 1


def _replay_lru(layer: LayerTrace, n_slots: int, tallies: dict[bool, Tally]) -> None:
    """Do what `_replay_policy` does with `Lru`, with nothing but an ordered dict."""
    resident: OrderedDict[int, None] = OrderedDict()  # the least recently used first
    use_again, leave = resident.move_to_end, resident.popitem
    for experts, is_prefill in layer.plain_needs():
        n_before = len(resident)
        missing = [expert for expert in experts if expert not in resident]
        if missing:
            resident.update(dict.fromkeys(missing))
        for expert in experts:
            use_again(expert)
        if missing:
            n_victims = len(resident) - n_slots
            for _ in range(n_victims):
                leave(False)
            tally = tallies[is_prefill]
            tally.n_misses += len(missing)
            tally.n_evictions += n_before + len(missing) - len(resident)
    _fill_in(layer, tallies)


def _replay_policy(layer: LayerTrace, cache: LayerCache, tallies: dict[bool, Tally]) -> None:
    """Do what `LayerCache.step` does; ubatches that surely fit, twice as quick."""
    first = 0
    needs = layer.plain_needs()
    for is_wide, group in itertools.groupby(layer.is_wide(len(cache.expert_of))):
        end = first + sum(1 for _ in group)
        run = itertools.islice(needs, end - first)
        if is_wide:
            selected, ahead = layer.n_selected[first:end], layer.n_ahead[first:end]
            for (experts, is_prefill), n_selected, n_ahead in zip(
                run, selected, ahead, strict=True
            ):
                cache.step(Need(experts, n_selected, n_ahead, is_prefill), tallies[is_prefill])
        else:
            _replay_fitting(run, cache, tallies)
        first = end


def _replay_fitting(
    needs: Iterator[tuple[list[int], bool]], cache: LayerCache, tallies: dict[bool, Tally]
) -> None:
    """Write out `plan`, `evict`, `apply` and the stamps, for ubatches whose experts fit."""
    slot_of, expert_of, free = cache.slot_of, cache.expert_of, cache.residency.free
    last_use, n_uses, policy = cache.last_use, cache.n_uses, cache.residency.policy
    add, remove, victims = policy.add, policy.remove, policy.victims
    clock = cache.clock
    for experts, is_prefill in needs:
        tally = tallies[is_prefill]
        missing = [expert for expert in experts if slot_of[expert] < 0]
        tally.n_hits += len(experts) - len(missing)
        if missing:
            n_missing = len(missing)
            slots = free[: -n_missing - 1 : -1]
            if slots:
                del free[-n_missing:]
            n_victims = n_missing - len(slots)
            if n_victims:
                leaving = victims(n_victims, {slot_of[expert] for expert in experts})
                for slot in leaving:
                    slot_of[expert_of[slot]] = -1
                    remove(slot)
                slots += leaving
            for expert, slot in zip(missing, slots, strict=True):
                slot_of[expert] = slot
                expert_of[slot] = expert
                add(slot, expert)
            tally.n_misses += n_missing
            tally.n_loads += n_missing
            tally.n_evictions += n_victims
        for expert in experts:
            slot = slot_of[expert]
            clock += 1
            last_use[slot] = clock
            n_uses[slot] += 1
    cache.clock = clock


def _fill_in(layer: LayerTrace, tallies: dict[bool, Tally]) -> None:
    """Add what follows from the misses."""
    for is_prefill, tally in tallies.items():
        tally.n_loads = tally.n_misses
        tally.n_hits = layer.n_needed(is_prefill) - tally.n_misses


def _replay_bound(layer: LayerTrace, n_slots: int, tallies: dict[bool, Tally]) -> None:
    """Have those experts stay that are wanted again soonest: no cache has fewer misses.

    Belady, "A study of replacement algorithms for a virtual-storage computer", 1966, with all of a
    ubatch's experts wanted at once. Where they do not fit, any of them may be those that stay.
    """
    n_needed = layer.n_experts
    next_use = _next_uses(layer)
    resident: dict[int, int] = {}  # when each expert is wanted again
    heap: list[tuple[int, int]] = []  # the negative of that, expert; may be out of date
    start = 0
    for n, (experts, is_prefill) in zip(n_needed, layer.plain_needs(), strict=True):
        n_before = len(resident)
        n_missing = n - sum(expert in resident for expert in experts)
        for expert, when in zip(experts, next_use[start : start + n], strict=True):
            resident[expert] = when
            heapq.heappush(heap, (-when, expert))
        start += n
        kept: list[tuple[int, int]] = []
        must_stay = set(experts) if n <= n_slots else set()
        while len(resident) > n_slots:
            entry = heapq.heappop(heap)
            if resident.get(entry[1]) == -entry[0]:
                if entry[1] in must_stay:
                    kept.append(entry)
                else:
                    del resident[entry[1]]
        for entry in kept:
            heapq.heappush(heap, entry)
        tally = tallies[is_prefill]
        tally.n_misses += n_missing
        tally.n_evictions += n_before + n_missing - len(resident)
    _fill_in(layer, tallies)


def _next_uses(layer: LayerTrace) -> list[int]:
    """Return when each expert that is asked for is asked for again, in the order of `experts`."""
    found = [NEVER] * len(layer.experts)
    upcoming: dict[int, int] = {}
    end = len(found)
    for ubatch in range(len(layer.n_experts) - 1, -1, -1):
        start = end - layer.n_experts[ubatch]
        for i in range(start, end):
            found[i] = upcoming.get(layer.experts[i], NEVER)
        for expert in layer.experts[start:end]:
            upcoming[expert] = ubatch
        end = start
    return found
