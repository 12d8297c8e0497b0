"""From the experts that a layer needs to a plan of loads, victims and stages. Changes nothing."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .residency import Residency


@dataclass(frozen=True, slots=True)
class Plan:
    """Say what has to happen before a layer can be computed; `loads` are (expert, slot) pairs."""

    loads: tuple[tuple[int, int], ...]
    victims: tuple[int, ...]

    @property
    def n_evictions(self) -> int:
        """How often a slot loses an expert."""
        return len(self.victims)


def plan(residency: Residency, needed: Sequence[int], missing: Sequence[int]) -> Plan:
    """Give every missing expert a slot: free ones first, then those of victims.

    Needed experts are never victims. Where a limit on the slots in use stands against what is
    needed at once, what is needed wins. Both sequences hold distinct experts; `missing` are those
    of `needed` that no slot holds. Raises ValueError if they do not, or if the slots cannot hold
    all needed experts at once.
    """
    n_slots = len(residency.expert_of)
    if len(set(needed)) < len(needed) or len(set(missing)) < len(missing):
        raise ValueError(f"an expert is named twice: {list(needed)}, missing {list(missing)}")
    if len(needed) > n_slots:
        raise ValueError(
            f"{len(needed)} experts are needed at once, but the layer has {n_slots} slots"
        )
    free = residency.free
    n_others = n_slots - len(free) - len(needed) + len(missing)  # occupied, not needed
    n_victims = min(max(len(missing) - residency.n_room, 0), n_others)
    victims: list[int] = []
    if n_victims:
        slot_of = residency.slot_of
        protected = {slot_of[expert] for expert in needed}
        victims = residency.victims(n_victims, protected)
    slots = free[: n_victims - len(missing) - 1 : -1] + victims
    return Plan(tuple(zip(missing, slots, strict=True)), tuple(victims))


def nominees(residency: Residency, n: int) -> list[int]:
    """Return n slots, or as many as can be, that `plan` gives to the next misses, in its order.

    It would leave out those of what is needed then. The order holds until a slot of it is used.
    """
    free = residency.free[: -min(residency.n_room, n) - 1 : -1]
    n_occupied = len(residency.expert_of) - len(residency.free)
    return free + residency.victims(min(n - len(free), n_occupied), ())


# --- stages ---------------------------------------------------------------------------------------


# With so many rows for an expert on average, the recorded router of OLMoE wants 95 % of the
# experts; with 8 it wants 85 %, and that of Qwen3 with 6 only half. A fair one would need but 3.
ROWS_PER_EXPERT = 32
N_SPLIT = 4  # stages of loads that fit at once; a staged graph has at least one more


class Place(NamedTuple):
    """Say in which stage an expert is computed and from which slot; a load is read first."""

    stage: int
    expert: int
    slot: int
    is_load: bool


@dataclass(frozen=True, slots=True)
class StagedPlan(Plan):
    """Say how a layer is computed in stages; `loads` are those that are resident in the end."""

    places: tuple[Place, ...]

    @property
    def n_evictions(self) -> int:
        """How often a slot loses an expert, also one that the same plan had loaded."""
        return len(self.victims) + sum(place.is_load for place in self.places) - len(self.loads)


def kept_slots(n_slots: int) -> int:
    """Return how many slots at most keep their expert while the others take turns."""
    return n_slots // 4


def stage_count(n_selected: int, n_slots: int, n_expert: int, *, on_device: bool = False) -> int:
    """Return the stages that always suffice for a ubatch that selects up to `n_selected` experts.

    One where the slots hold every expert, so that misses are few. Two where they hold all of the
    selected: those that are missing are read while the others are computed; but one on a device,
    where each stage costs a round trip to the CPU. Else two for what is resident, and two for each
    round of the slots that take turns, whose halves are loaded and computed in turn.
    """
    if n_slots >= n_expert:
        return 1
    if n_selected <= n_slots:
        return 1 if on_device else 2
    n_turning = n_slots - kept_slots(n_slots)
    if n_turning == 1:
        return 1 + n_selected
    return 2 + 2 * -(-n_selected // n_turning)


def plan_stages(residency: Residency, needed: Sequence[int], missing: Sequence[int]) -> StagedPlan:
    """Place every needed expert in one stage, and in a slot.

    `needed`, and of them `missing`, are in the order of their last rows, so those that come last
    are what decoding will most likely want next. Resident experts are computed first. Slots that
    nothing needs are loaded before slots of resident experts, of which the last needed keep theirs.
    Where the first slots to be loaded hold needed experts, these have a stage of their own before
    the other resident ones, so that the slots are loaded while the others are computed. Missing
    experts follow in their order, so that the last needed are resident in the end.
    """
    slot_of = residency.slot_of
    hits = [expert for expert in needed if slot_of[expert] >= 0]
    queue = list(missing)
    hit_slots = [slot_of[expert] for expert in hits]
    idle = _idle_slots(residency, set(hit_slots), len(queue))
    turning = idle
    if len(queue) > len(idle):
        n_kept = min(kept_slots(len(residency.expert_of)), len(hits))
        turning = idle + hit_slots[: len(hits) - n_kept]
    turns = list(_turns(turning, len(idle), len(queue)))
    first_slots = set(turns[0]) if turns else set()
    early = [expert for expert in hits if slot_of[expert] in first_slots]
    late = [expert for expert in hits if slot_of[expert] not in first_slots]
    groups = [group for group in (early, late) if group]
    places = [
        Place(stage, expert, slot_of[expert], False)
        for stage, group in enumerate(groups)
        for expert in group
    ]
    for stage, slots in enumerate(turns, len(groups)):
        batch, queue = queue[: len(slots)], queue[len(slots) :]
        places += [Place(stage, e, slot, True) for e, slot in zip(batch, slots, strict=True)]
    last = {place.slot: place.expert for place in places if place.is_load}
    return StagedPlan(
        loads=tuple((expert, slot) for slot, expert in last.items()),
        victims=tuple(slot for slot in last if residency.expert_of[slot] >= 0),
        places=tuple(places),
    )


def plan_ahead(residency: Residency, n_selected: int) -> Plan:
    """Fill free slots of a layer before its router has spoken, where it will want nearly all.

    `n_selected` counts the rows that the layer's ubatch will route. No expert leaves for this.
    """
    n_expert = len(residency.slot_of)
    if n_selected < ROWS_PER_EXPERT * n_expert:
        return Plan((), ())
    missing = (expert for expert in range(n_expert) if residency.slot_of[expert] < 0)
    free = residency.free[: -residency.n_room - 1 : -1]
    return Plan(tuple(zip(missing, free, strict=False)), ())


def _idle_slots(residency: Residency, needed_slots: set[int], n_wanted: int) -> list[int]:
    """Return slots that nothing needs now, free ones first, as many as wanted if there are."""
    free = residency.free
    idle = free[: -n_wanted - 1 : -1]
    n_occupied = len(residency.expert_of) - len(free) - len(needed_slots)
    n_victims = min(n_wanted - len(idle), n_occupied)
    return idle + (residency.victims(n_victims, needed_slots) if n_victims else [])


def _turns(slots: Sequence[int], n_idle: int, n_loads: int) -> Iterator[Sequence[int]]:
    """Split loads among slots that take turns: two halves, the first of idle slots if it can be.

    Slots of the first half are then loaded while resident experts are computed. Where the idle
    slots hold all loads, they are split all the same, so that reading and computing overlap.
    """
    if n_loads <= n_idle:
        n_each = max(-(-n_loads // N_SPLIT), 1)
        yield from (slots[i : min(i + n_each, n_loads)] for i in range(0, n_loads, n_each))
        return
    n_first = max(len(slots) // 2, 1)
    if max(len(slots) // 4, 1) <= n_idle < n_first:
        n_first = n_idle
    halves = [slots[:n_first], slots[n_first:] or slots[:n_first]]
    turn = 0
    while n_loads > 0:
        half = halves[turn % 2][:n_loads]
        yield half
        n_loads -= len(half)
        turn += 1
