"""Which experts of a layer are kept in ordinary memory, behind its slots in a device's. Pure.

The slots are the first cache, this is the second: a missing expert that it has costs a copy and no
read. It hears of loads only: what is used so often that it stays in its slot is of no use here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .budget import plan_slots
from .experts import MoeLayer
from .planner import Plan, StagedPlan
from .policy import Queue

HALVING_ROUNDS = 4  # loads for each expert, after which earlier loads count half
SWAP_MARGIN = 2  # loads that an expert has to be ahead of one in a locked slot to take its place
ALIGNMENT_BYTES = 4 * 4096  # for each tensor: two pieces of memory, each aligned to a block
NONE = -1


class TierLoad(NamedTuple):
    """Say in which tier slot a load's bytes are, or are to be read; -1 stands for none.

    Once they have been copied to the device, they change places with those in `swap_slot`.
    """

    tier_slot: int
    is_there: bool
    swap_slot: int = NONE


@dataclass(frozen=True, slots=True)
class TierPlan:
    """Say what loads do with the tier: `loads` are of `experts`, `victims` are tier slots.

    No tier slot is named twice in `loads`; victims have to leave before the reads begin. Experts
    that change places are among the victims, and `swapped` are those that lose a locked slot.
    """

    experts: tuple[int, ...]
    loads: tuple[TierLoad, ...]
    victims: tuple[int, ...]
    swapped: tuple[int, ...] = ()

    @property
    def n_hits(self) -> int:
        """How many loads need no read."""
        return sum(load.is_there for load in self.loads)


def loaded_experts(plan: Plan) -> list[int]:
    """Return the experts that a plan has loaded, in the order of `places` where it is staged."""
    if isinstance(plan, StagedPlan):
        return [place.expert for place in plan.places if place.is_load]
    return [expert for expert, _ in plan.loads]


class HostTier:
    """Keep the tier table of one layer; its first `n_locked` slots are page-locked.

    The experts with the most loads stay: one that is read takes a free slot, or that of an expert
    with fewer loads, else none. Earlier loads count half after a while, as in `policy.Lfu`, so that
    what was hot long ago can leave. Recency says little here, since what was loaded last is in the
    first cache (Zhou, Philbin and Li, "The multi-queue replacement algorithm for second level
    buffer caches", 2001). Give `slot_of` to the layer's residency as `backed`.

    `slot_of` (n_expert,) and `expert_of` (n_slots,) have -1 for none; they are changed in place.
    """

    def __init__(self, n_expert: int, n_slots: int, n_locked: int = 0) -> None:
        if not 0 <= n_locked <= n_slots <= n_expert:
            raise ValueError(f"{n_locked} locked of {n_slots} tier slots for {n_expert} experts")
        self.n_locked = n_locked
        self.slot_of = [NONE] * n_expert
        self.expert_of = [NONE] * n_slots
        self.n_loads = [0.0] * n_expert  # by expert, whether read or not
        self._last_load = [0] * n_expert
        self._n_counted = 0
        self.clear()

    def clear(self) -> None:
        """Forget which experts are there; how often each was loaded stays known."""
        self.slot_of[:] = [NONE] * len(self.slot_of)
        self.expert_of[:] = [NONE] * len(self.expert_of)
        # ordered; the last is taken first, so locked slots are before others
        self._free = dict.fromkeys(reversed(range(len(self.expert_of))))
        self._rank()

    def _rank(self) -> None:
        self._locked, self._pageable = Queue(self), Queue(self)
        for slot, expert in enumerate(self.expert_of):
            if expert >= 0:
                self._queue(slot).add(slot, expert)

    def _queue(self, slot: int) -> Queue[tuple[float, int]]:
        return self._locked if slot < self.n_locked else self._pageable

    def __getitem__(self, slot: int) -> tuple[float, int]:
        """Return the key by which an occupied slot is ranked, the smallest to go first."""
        expert = self.expert_of[slot]
        return self.n_loads[expert], self._last_load[expert]

    def plan(self, experts: Sequence[int]) -> TierPlan:
        """Give the loads of these experts, which are distinct, their tier slots. Changes nothing.

        One that is read and is hotter than the coldest in a locked slot is read into that. One that
        is there, but not locked, and is clearly hotter changes places with it.
        """
        slot_of = self.slot_of
        there = {slot_of[expert] for expert in experts} - {NONE}
        n_reads = len(experts) - len(there)
        free = _last(self._free, n_reads)
        n_wanted = n_reads - len(free)
        n_swaps = sum(slot >= self.n_locked for slot in there) if self.n_locked else 0
        locked = self._locked.first(n_wanted + n_swaps, there)[::-1]  # the coldest is last
        pageable = self._pageable.first(n_wanted, there)[::-1]
        loads: list[TierLoad] = []
        victims: list[int] = []
        swapped: list[int] = []
        for expert in experts:
            slot = slot_of[expert]
            is_there = slot >= 0
            heat = self.n_loads[expert] + 1  # with this load
            if is_there:
                if slot >= self.n_locked and locked:
                    other = self.expert_of[locked[-1]]
                    if self.n_loads[other] + SWAP_MARGIN < heat:
                        loads.append(TierLoad(slot, True, locked.pop()))
                        victims += [slot, loads[-1].swap_slot]
                        swapped.append(other)
                        continue
            elif free:
                slot = free.pop()
            else:
                for coldest in (locked, pageable):
                    if coldest and self.n_loads[self.expert_of[coldest[-1]]] < heat:
                        slot = coldest.pop()
                        victims.append(slot)
                        break
            loads.append(TierLoad(slot, is_there))
        return TierPlan(tuple(experts), tuple(loads), tuple(victims), tuple(swapped))

    def evict(self, plan: TierPlan) -> None:
        """Take the victims of a plan out of their slots, which become free."""
        for slot in plan.victims:
            self.slot_of[self.expert_of[slot]] = NONE
            self.expert_of[slot] = NONE
            self._queue(slot).remove(slot)
            self._free[slot] = None

    def apply(self, plan: TierPlan) -> None:
        """Enter what was read by a plan whose victims are out, and count all of its loads."""
        n_before = self._n_counted
        swapped = iter(plan.swapped)
        for expert, (slot, is_there, swap_slot) in zip(plan.experts, plan.loads, strict=True):
            self._n_counted += 1
            self.n_loads[expert] += 1
            self._last_load[expert] = self._n_counted
            if swap_slot >= 0:
                self._enter(swap_slot, expert)
                self._enter(slot, next(swapped))
            elif slot >= 0 and not is_there:
                self._enter(slot, expert)
        n_round = HALVING_ROUNDS * len(self.slot_of)
        if self._n_counted // n_round > n_before // n_round:
            self.n_loads[:] = [n / 2 for n in self.n_loads]
            self._rank()  # since keys have shrunk

    def _enter(self, slot: int, expert: int) -> None:
        del self._free[slot]
        self.slot_of[expert] = slot
        self.expert_of[slot] = expert
        self._queue(slot).add(slot, expert)


def _last(keys: dict[int, None], n: int) -> list[int]:
    """Return the last n keys, or as many as there are, in their order."""
    return [key for key, _ in zip(reversed(keys), range(n), strict=False)][::-1]


# --- sizes ----------------------------------------------------------------------------------------


def no_slot(layer: MoeLayer) -> int:
    """Return the least that a tier can do with."""
    return 0


class TierSizes(NamedTuple):
    """Say how many experts of each layer the tier has room for, and how many of these locked."""

    n_slots: tuple[int, ...]
    n_locked: tuple[int, ...]

    @classmethod
    def none(cls, n_layers: int) -> "TierSizes":
        """Return the sizes where there is no tier."""
        return cls((0,) * n_layers, (0,) * n_layers)


def plan_tier(layers: Sequence[MoeLayer], ram_bytes: int, pin_bytes: int = 0) -> TierSizes:
    """Return tier slots of each layer, and how many of them are locked, for so many bytes.

    The locked ones are a part of all. Each layer gets about the same fraction of its experts, and
    never more than all. Bytes are those of the experts; `tier_bytes` has what alignment adds.
    """
    n_slots = plan_slots(layers, ram_bytes, no_slot)
    return TierSizes(n_slots, plan_slots(layers, min(pin_bytes, ram_bytes), no_slot))


def tier_bytes(layers: Sequence[MoeLayer], sizes: TierSizes) -> int:
    """Return the memory that a tier takes, alignment included."""
    return sum(
        n * layer.expert_bytes + (ALIGNMENT_BYTES * len(layer.tensors) if n else 0)
        for layer, n in zip(layers, sizes.n_slots, strict=True)
    )
