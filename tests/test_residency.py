from collections.abc import Callable, Collection, MutableSequence, Sequence
from typing import Any

import cffi
import pytest

from longhaul.planner import Plan
from longhaul.policy import Lru
from longhaul.residency import LOOK_AHEAD, Residency

Table = Callable[[int], MutableSequence[int]]


def garbage(n: int) -> list[int]:
    return [77] * n


def native_garbage(n: int) -> MutableSequence[int]:
    memory: Any = cffi.FFI().new(f"int32_t[{n}]", garbage(n))
    made: MutableSequence[int] = memory
    return made


every_table = pytest.mark.parametrize("table", [garbage, native_garbage])


class Recorder:
    """A policy that writes down what it is told."""

    keeps_order = True

    def __init__(self, last_use: Sequence[int], n_uses: Sequence[int]) -> None:
        self.last_use, self.n_uses = last_use, n_uses
        self.told: list[tuple[str, int, int]] = []

    def add(self, slot: int, expert: int) -> None:
        self.told.append(("add", slot, expert))

    def remove(self, slot: int) -> None:
        self.told.append(("remove", slot, -1))

    def victims(self, n: int, protected: Collection[int]) -> list[int]:
        raise AssertionError("a residency asks for no victims")


def residency(table: Table, n_expert: int = 6, n_slots: int = 3) -> Residency:
    return Residency(table(n_expert), table(n_slots), [0] * n_slots, Lru)


@every_table
def test_starts_empty_whatever_the_memory_held(table: Table) -> None:
    made = residency(table)
    assert list(made.slot_of) == [-1] * 6
    assert list(made.expert_of) == [-1] * 3
    assert made.free[::-1] == [0, 1, 2]


@every_table
def test_apply_enters_loads_in_both_tables(table: Table) -> None:
    made = residency(table)
    made.apply(Plan(loads=((4, 0), (1, 2)), victims=()))
    assert list(made.slot_of) == [-1, 2, -1, -1, 0, -1]
    assert list(made.expert_of) == [4, -1, 1]
    assert made.free == [1]


@every_table
def test_evict_takes_victims_out_of_both_tables(table: Table) -> None:
    made = residency(table)
    made.apply(Plan(loads=((4, 0), (1, 2), (5, 1)), victims=()))
    plan = Plan(loads=((0, 2),), victims=(2,))
    made.evict(plan)
    assert list(made.slot_of) == [-1, -1, -1, -1, 0, 1]
    assert list(made.expert_of) == [4, 5, -1]
    assert made.free == [2]
    made.apply(plan)
    assert list(made.slot_of) == [2, -1, -1, -1, 0, 1]
    assert list(made.expert_of) == [4, 5, 0]
    assert made.free == []


@every_table
def test_slots_that_native_code_has_emptied_are_free_and_leave_the_policy(table: Table) -> None:
    made = residency(table)
    made.apply(Plan(loads=((4, 0), (1, 2)), victims=()))
    made.slot_of[1] = made.expert_of[2] = -1
    assert made.give_way([2, 1]) == (2,)
    assert made.free == [1, 2]
    assert made.policy.victims(1, ()) == [0]
    made.apply(Plan(loads=((0, 2), (5, 1)), victims=(2,)))
    assert list(made.slot_of) == [2, -1, -1, -1, 0, 1]
    assert made.free == []


@every_table
def test_clear_forgets_every_expert(table: Table) -> None:
    made = residency(table)
    made.apply(Plan(loads=((4, 0), (1, 2)), victims=()))
    made.clear()
    assert list(made.slot_of) == [-1] * 6
    assert list(made.expert_of) == [-1] * 3
    assert made.free[::-1] == [0, 1, 2]
    with pytest.raises(ValueError, match="victims wanted"):
        made.policy.victims(1, ())


def test_policy_is_told_of_every_change_and_replaced_by_clear() -> None:
    last_use, n_uses = [0, 0], [5, 6]
    made_policies: list[Recorder] = []

    def make(stamps: Sequence[int], counts: Sequence[int]) -> Recorder:
        made_policies.append(Recorder(stamps, counts))
        return made_policies[-1]

    made = Residency(garbage(4), garbage(2), last_use, make, n_uses)
    plan = Plan(loads=((3, 1),), victims=())
    made.apply(plan)
    made.evict(Plan(loads=(), victims=(1,)))
    assert made_policies[0].last_use is last_use  # not a copy: native code stamps it
    assert made_policies[0].n_uses is n_uses
    assert made_policies[0].told == [("add", 1, 3), ("remove", 1, -1)]
    made.clear()
    assert made.policy is made_policies[1]
    assert made_policies[1].told == []


def test_without_counts_nothing_was_used_more_than_anything_else() -> None:
    made: list[Recorder] = []

    def make(stamps: Sequence[int], counts: Sequence[int]) -> Recorder:
        made.append(Recorder(stamps, counts))
        return made[-1]

    Residency(garbage(4), garbage(3), [1, 2, 3], make)
    assert list(made[0].n_uses) == [0, 0, 0]


def full(n_slots: int) -> Residency:
    """Return slots that hold the experts of their own numbers, 0 the coldest."""
    made = Residency([-1] * n_slots, [-1] * n_slots, list(range(n_slots)), Lru)
    made.apply(Plan(loads=tuple((slot, slot) for slot in range(n_slots)), victims=()))
    return made


def backed(n_slots: int, *experts: int) -> list[int]:
    return [0 if expert in experts else -1 for expert in range(n_slots)]


def test_without_a_tier_the_coldest_leave_first() -> None:
    assert full(5).victims(2, {1}) == [0, 2]


def test_experts_that_are_in_memory_too_leave_before_colder_ones() -> None:
    made = full(6)
    made.backed = backed(6, 2, 3, 5)
    assert made.victims(2, ()) == [2, 3]
    assert made.victims(2, {-1, 2}) == [3, 5]
    assert made.victims(4, ()) == [2, 3, 5, 0]
    assert made.victims(6, ()) == [2, 3, 5, 0, 1, 4]


@pytest.mark.parametrize("n_slots", [2 * LOOK_AHEAD, 3 * LOOK_AHEAD, 8])
def test_those_that_are_much_hotter_stay_even_so(n_slots: int) -> None:
    made = full(n_slots)
    hot = min(LOOK_AHEAD, n_slots // 2) + 1
    made.backed = backed(n_slots, hot)
    assert made.victims(1, ()) == [0]
    assert made.victims(2, ()) == [hot, 0]


def test_more_victims_than_there_are_slots_are_refused() -> None:
    made = full(3)
    made.backed = backed(3, 1)
    with pytest.raises(ValueError, match="3 victims wanted, 2 slots can go"):
        made.victims(3, {0})
