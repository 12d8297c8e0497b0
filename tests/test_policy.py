"""Every policy keeps one contract; what is a policy's own follows it."""

import heapq
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longhaul import policy
from longhaul.policy import POLICIES, Lru, Policy

Make = Callable[[Sequence[int]], Policy]

every_policy = pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES)


def filled(make: Make, last_use: Sequence[int], slots: Sequence[int]) -> Policy:
    made = make(last_use)
    for slot in slots:
        made.add(slot)
    return made


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[int], list[int], set[int]]:
    """Draw stamps, occupied slots in the order they were filled, and protected slots."""
    n_slots = draw(st.integers(1, 16))
    last_use = draw(st.lists(st.integers(0, 20), min_size=n_slots, max_size=n_slots))
    some_slots = st.lists(st.sampled_from(range(n_slots)), unique=True)
    return last_use, draw(some_slots), set(draw(some_slots))


# --- the contract ---------------------------------------------------------------------------------


@every_policy
@given(tables(), st.data())
def test_victims_are_n_distinct_occupied_slots_that_are_not_protected(
    make: Make, table: tuple[list[int], list[int], set[int]], data: st.DataObject
) -> None:
    last_use, slots, protected = table
    stamps = list(last_use)
    can_go = set(slots) - protected
    n = data.draw(st.integers(0, len(can_go)))
    victims = filled(make, last_use, slots).victims(n, protected)
    assert len(victims) == n
    assert len(set(victims)) == n
    assert set(victims) <= can_go
    assert last_use == stamps


@every_policy
@given(tables(), st.integers(1, 5))
def test_too_few_slots_are_refused_and_nothing_is_forgotten(
    make: Make, table: tuple[list[int], list[int], set[int]], excess: int
) -> None:
    last_use, slots, protected = table
    made = filled(make, last_use, slots)
    can_go = set(slots) - protected
    with pytest.raises(ValueError, match="victims wanted"):
        made.victims(len(can_go) + excess, protected)
    assert set(made.victims(len(can_go), protected)) == can_go
    assert set(made.victims(len(slots), ())) == set(slots)


@every_policy
@given(tables(), st.data())
def test_same_input_same_answer(
    make: Make, table: tuple[list[int], list[int], set[int]], data: st.DataObject
) -> None:
    last_use, slots, protected = table
    n = data.draw(st.integers(0, len(set(slots) - protected)))
    made, twin = filled(make, last_use, slots), filled(make, list(last_use), slots)
    first = made.victims(n, protected)
    assert made.victims(n, protected) == first
    assert twin.victims(n, protected) == first
    assert made.victims(n, list(protected)) == first


@every_policy
def test_a_removed_slot_goes_no_more_until_it_is_added_again(make: Make) -> None:
    made = filled(make, [1, 2, 3, 4], range(4))
    (first,) = made.victims(1, ())
    made.remove(first)
    assert set(made.victims(3, ())) == set(range(4)) - {first}
    with pytest.raises(ValueError, match="4 victims wanted, 3"):
        made.victims(4, ())
    made.add(first)
    assert set(made.victims(4, ())) == set(range(4))


@every_policy
def test_a_slot_that_is_filled_again_at_once_goes_only_once(make: Make) -> None:
    made = filled(make, [1, 2, 3, 4], range(4))
    for slot in (2, 0, 2):
        made.remove(slot)
        made.add(slot)
    assert sorted(made.victims(4, ())) == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="5 victims wanted, 4"):
        made.victims(5, ())


@every_policy
def test_an_empty_layer_has_no_victims(make: Make) -> None:
    made = make([0, 0])
    assert made.victims(0, ()) == []
    with pytest.raises(ValueError, match="1 victims wanted, 0"):
        made.victims(1, ())


# --- Lru ------------------------------------------------------------------------------------------


def test_lru_evicts_what_was_used_longest_ago() -> None:
    last_use = [30, 10, 40, 20]
    lru = filled(Lru, last_use, range(4))
    assert lru.victims(4, ()) == [1, 3, 0, 2]
    last_use[1] = 50  # native code stamps behind its back
    assert lru.victims(4, ()) == [3, 0, 2, 1]
    assert lru.victims(2, {3, 2}) == [0, 1]


def test_lru_ranks_a_slot_by_its_new_expert_after_it_was_filled_again() -> None:
    last_use = [1, 2, 3]
    lru = filled(Lru, last_use, range(3))
    lru.remove(0)
    last_use[0] = 4
    lru.add(0)
    assert lru.victims(3, ()) == [1, 2, 0]


class NaiveLru:
    """Sorts everything at each call."""

    def __init__(self, last_use: Sequence[int]) -> None:
        self.last_use = last_use
        self.slots: set[int] = set()

    def victims(self, n: int, protected: set[int]) -> list[int]:
        return sorted(self.slots - protected, key=lambda slot: (self.last_use[slot], slot))[:n]


@given(st.data())
def test_lru_agrees_with_a_naive_model_after_any_sequence(data: st.DataObject) -> None:
    n_slots = data.draw(st.integers(1, 5))
    last_use = [0] * n_slots
    lru, naive = Lru(last_use), NaiveLru(last_use)
    all_slots = st.sampled_from(range(n_slots))
    steps = data.draw(
        st.lists(st.tuples(st.sampled_from("ttaarv"), all_slots, st.sets(all_slots)), max_size=25)
    )
    clock = 0
    for kind, slot, others in [*steps, ("v", 0, set()), ("v", n_slots - 1, set())]:
        if kind == "t":  # one ubatch stamps some slots, some of them alike
            clock += 1
            for used in {slot, *others} & naive.slots:
                last_use[used] = clock
        elif kind == "a" and slot not in naive.slots:
            lru.add(slot)
            naive.slots.add(slot)
        elif kind == "r" and slot in naive.slots:
            lru.remove(slot)
            naive.slots.remove(slot)
        elif kind == "v":
            n = min(slot + 1, len(naive.slots - others))
            assert lru.victims(n, others) == naive.victims(n, others)


class CountedStamps(list[int]):
    """Counts how often a stamp is looked at."""

    n_looks = 0

    def __getitem__(self, index: Any) -> Any:
        self.n_looks += 1
        return super().__getitem__(index)

    def __iter__(self) -> Any:
        self.n_looks += len(self)
        return super().__iter__()


def steps_per_eviction(monkeypatch: pytest.MonkeyPatch, n_slots: int, n_rounds: int) -> float:
    """Return heap operations and looks at stamps per round of 4 uses and 2 evictions."""
    n_heap = 0

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            nonlocal n_heap
            n_heap += 1
            return function(*args)

        return call

    names = ("heappush", "heappop", "heapreplace")
    counting = {name: counted(getattr(heapq, name)) for name in names}
    monkeypatch.setattr(policy, "heapq", SimpleNamespace(**counting))
    last_use = CountedStamps(range(n_slots))
    lru = filled(Lru, last_use, range(n_slots))
    last_use.n_looks = n_heap = 0
    clock = n_slots
    for number in range(n_rounds):
        used = {(number * 7 + i * 3) % n_slots for i in range(4)}
        victims = lru.victims(2, used)
        for slot in victims:
            lru.remove(slot)
            lru.add(slot)
        for slot in sorted(used.union(victims)):
            clock += 1
            last_use[slot] = clock
    return (n_heap + last_use.n_looks) / n_rounds


def test_cost_of_lru_does_not_grow_with_the_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    few = steps_per_eviction(monkeypatch, 32, 500)
    many = steps_per_eviction(monkeypatch, 4096, 500)
    assert 0 < many < 1.5 * few
    assert many < 64


def test_lru_keeps_few_stale_entries() -> None:
    last_use = list(range(8))
    lru = Lru(last_use)
    for slot in range(8):
        lru.add(slot)
    for clock in range(8, 1000):
        (slot,) = lru.victims(1, ())
        lru.remove(slot)
        lru.add(slot)
        last_use[slot] = clock
    assert len(lru._heap) <= 16
