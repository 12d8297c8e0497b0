"""Every policy keeps one contract; what is a policy's own follows it."""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longhaul import policy
from longhaul.policy import POLICIES, Lfu, Lru, MakePolicy, Pinned, Policy, Slru

every_policy = pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES)


@dataclass
class Table:
    """What a policy is asked about: stamps, counts, occupied slots in the order of filling."""

    last_use: list[int]
    n_uses: list[int]
    uses_since: list[int]  # of each slot since it was filled
    slots: list[int]
    protected: set[int]

    def filled(self, make: MakePolicy) -> Policy:
        """Return a policy that was told of the slots, whose experts have been used since."""
        n_uses = [n - since for n, since in zip(self.n_uses, self.uses_since, strict=True)]
        last_use = [0] * len(n_uses)
        made = make(last_use, n_uses)
        for slot in self.slots:
            made.add(slot, 100 + slot)
        last_use[:], n_uses[:] = self.last_use, self.n_uses
        return made


def filled(make: MakePolicy, last_use: Sequence[int], slots: Sequence[int]) -> Policy:
    made = make(last_use, [0] * len(last_use))
    for slot in slots:
        made.add(slot, 100 + slot)
    return made


@st.composite
def tables(draw: st.DrawFn) -> Table:
    n_slots = draw(st.integers(1, 16))
    numbers = st.lists(st.integers(0, 20), min_size=n_slots, max_size=n_slots)
    since = draw(st.lists(st.integers(0, 4), min_size=n_slots, max_size=n_slots))
    n_uses = [n + m for n, m in zip(draw(numbers), since, strict=True)]
    some_slots = st.lists(st.sampled_from(range(n_slots)), unique=True)
    return Table(draw(numbers), n_uses, since, draw(some_slots), set(draw(some_slots)))


# --- the contract ---------------------------------------------------------------------------------


@every_policy
@given(tables(), st.data())
def test_victims_are_n_distinct_occupied_slots_that_are_not_protected(
    make: MakePolicy, table: Table, data: st.DataObject
) -> None:
    can_go = set(table.slots) - table.protected
    n = data.draw(st.integers(0, len(can_go)))
    victims = table.filled(make).victims(n, table.protected)
    assert len(victims) == n
    assert len(set(victims)) == n
    assert set(victims) <= can_go


@every_policy
@given(tables())
def test_what_others_count_is_not_changed(make: MakePolicy, table: Table) -> None:
    last_use, n_uses = list(table.last_use), list(table.n_uses)
    made = make(last_use, n_uses)
    for slot in table.slots:
        made.add(slot, 100 + slot)
    made.victims(len(table.slots), ())
    for slot in table.slots:
        made.remove(slot)
    assert (last_use, n_uses) == (table.last_use, table.n_uses)


@every_policy
@given(tables(), st.integers(1, 5))
def test_too_few_slots_are_refused_and_nothing_is_forgotten(
    make: MakePolicy, table: Table, excess: int
) -> None:
    made = table.filled(make)
    can_go = set(table.slots) - table.protected
    with pytest.raises(ValueError, match="victims wanted"):
        made.victims(len(can_go) + excess, table.protected)
    assert set(made.victims(len(can_go), table.protected)) == can_go
    assert set(made.victims(len(table.slots), ())) == set(table.slots)


@every_policy
@given(tables(), st.data())
def test_same_input_same_answer(make: MakePolicy, table: Table, data: st.DataObject) -> None:
    protected = table.protected
    n = data.draw(st.integers(0, len(set(table.slots) - protected)))
    made, twin = table.filled(make), table.filled(make)
    first = made.victims(n, protected)
    assert made.victims(n, protected) == first
    assert twin.victims(n, protected) == first
    assert made.victims(n, list(protected)) == first


@every_policy
@given(st.data())
def test_a_policy_knows_its_slots_after_any_sequence(make: MakePolicy, data: st.DataObject) -> None:
    """Loads, evictions and uses as a layer has them, with counts halved now and then."""
    n_slots = data.draw(st.integers(1, 5))
    last_use, n_uses = [0] * n_slots, [0] * n_slots
    made = make(last_use, n_uses)
    occupied: dict[int, int] = {}
    numbers = st.integers(0, n_slots - 1)
    steps = data.draw(st.lists(st.tuples(st.sampled_from("uale"), numbers), max_size=60))
    for clock, (kind, number) in enumerate(steps, 1):
        if kind == "u" and number in occupied:
            last_use[number] = clock
            n_uses[number] += 1
        elif kind == "a" and number not in occupied:
            occupied[number] = clock % 7
            made.add(number, clock % 7)
        elif kind == "l" and number in occupied:
            made.remove(number)
            del occupied[number]
        elif kind == "e" and occupied:
            (victim,) = made.victims(1, ())
            made.remove(victim)
            made.add(victim, (clock + 3) % 7)
        assert sorted(made.victims(len(occupied), ())) == sorted(occupied)


@every_policy
def test_a_removed_slot_goes_no_more_until_it_is_added_again(make: MakePolicy) -> None:
    made = filled(make, [1, 2, 3, 4], range(4))
    (first,) = made.victims(1, ())
    made.remove(first)
    assert set(made.victims(3, ())) == set(range(4)) - {first}
    with pytest.raises(ValueError, match="4 victims wanted, 3"):
        made.victims(4, ())
    made.add(first, 9)
    assert set(made.victims(4, ())) == set(range(4))


@every_policy
def test_a_slot_that_is_filled_again_at_once_goes_only_once(make: MakePolicy) -> None:
    made = filled(make, [1, 2, 3, 4], range(4))
    for slot in (2, 0, 2):
        made.remove(slot)
        made.add(slot, 7)
    assert sorted(made.victims(4, ())) == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="5 victims wanted, 4"):
        made.victims(5, ())


@every_policy
def test_an_empty_layer_has_no_victims(make: MakePolicy) -> None:
    made = make([0, 0], [0, 0])
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
    lru.add(0, 9)
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
    lru, naive = Lru(last_use, []), NaiveLru(last_use)
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
            lru.add(slot, 7)
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
            lru.add(slot, 7)
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
    lru = Lru(last_use, [])
    for slot in range(8):
        lru.add(slot, 7)
    for clock in range(8, 1000):
        (slot,) = lru.victims(1, ())
        lru.remove(slot)
        lru.add(slot, 7)
        last_use[slot] = clock
    assert len(lru._heap) <= 16


# --- Lfu ------------------------------------------------------------------------------------------


class Layer:
    """Slots as a layer uses them: an expert a slot, stamps and counts."""

    def __init__(self, make: MakePolicy, n_slots: int) -> None:
        self.last_use, self.n_uses = [0] * n_slots, [0] * n_slots
        self.policy = make(self.last_use, self.n_uses)
        self.slot_of: dict[int, int] = {}
        self.clock = 0

    def use(self, *experts: int) -> None:
        """Have experts used by one ubatch, in their order; those that are missing are loaded."""
        missing = [expert for expert in experts if expert not in self.slot_of]
        free = [s for s in range(len(self.n_uses)) if s not in self.slot_of.values()]
        protected = {self.slot_of[e] for e in experts if e in self.slot_of}
        for slot in self.policy.victims(max(len(missing) - len(free), 0), protected):
            self.policy.remove(slot)
            self.slot_of = {e: s for e, s in self.slot_of.items() if s != slot}
            free.append(slot)
        for expert, slot in zip(missing, free, strict=False):
            self.slot_of[expert] = slot
            self.policy.add(slot, expert)
        for expert in experts:
            self.clock += 1
            self.last_use[self.slot_of[expert]] = self.clock
            self.n_uses[self.slot_of[expert]] += 1

    def order(self) -> list[int]:
        """Return the resident experts, the first to go first."""
        expert_of = {slot: expert for expert, slot in self.slot_of.items()}
        return [expert_of[slot] for slot in self.policy.victims(len(expert_of), ())]


def test_lfu_evicts_what_was_used_least_and_of_these_what_was_used_longest_ago() -> None:
    layer = Layer(Lfu, 4)
    layer.use(0, 1, 2, 3)
    layer.use(0, 1)
    layer.use(0)
    assert layer.order() == [2, 3, 1, 0]
    layer.use(2)
    assert layer.order() == [3, 1, 2, 0]


def test_lfu_remembers_what_an_expert_was_used_for_before_it_left() -> None:
    layer = Layer(Lfu, 4)
    for _ in range(3):
        layer.use(0, 1, 2, 3)
    layer.use(0)
    layer.use(4)
    assert 1 not in layer.slot_of
    assert layer.order() == [4, 2, 3, 0]
    layer.use(1)
    assert 4 not in layer.slot_of
    assert layer.order() == [2, 3, 0, 1]  # 1 has been used 4 times in all, 2 and 3 but 3 times


def test_lfu_lets_go_of_what_was_hot_long_ago() -> None:
    layer = Layer(Lfu, 2)
    for _ in range(16):
        layer.use(0)
    for expert in range(1, 200):
        layer.use(1 + expert % 3)
        layer.use(1 + expert % 3)
    assert 0 not in layer.slot_of


@given(st.data())
def test_lfu_agrees_with_a_naive_model(data: st.DataObject) -> None:
    n_slots = data.draw(st.integers(1, 4))
    layer = Layer(Lfu, n_slots)
    counts = dict.fromkeys(range(6), 0.0)
    n_loads = 0
    some = st.lists(st.integers(0, 5), min_size=1, max_size=n_slots, unique=True)
    for experts in data.draw(st.lists(some, max_size=40)):
        before = set(layer.slot_of)
        layer.use(*experts)
        for _ in set(experts) - before:
            n_loads += 1
            if n_loads % (policy.HALVING_LOADS * n_slots) == 0:
                counts = {expert: count / 2 for expert, count in counts.items()}
        for expert in experts:
            counts[expert] += 1

        def key(expert: int, counts: dict[int, float] = counts) -> tuple[float, int]:
            return counts[expert], layer.last_use[layer.slot_of[expert]]

        assert layer.order() == sorted(layer.slot_of, key=key)


# --- Slru -----------------------------------------------------------------------------------------


def test_slru_evicts_what_was_not_used_again_in_the_order_of_coming() -> None:
    layer = Layer(Slru, 5)
    layer.use(0, 1, 2, 3, 4)
    layer.use(3)
    layer.use(0)
    assert layer.order() == [1, 2, 4, 3, 0]
    layer.use(5)
    assert 1 not in layer.slot_of
    assert layer.order() == [2, 4, 5, 3, 0]


def test_slru_is_not_washed_out_by_what_is_used_once() -> None:
    layer = Layer(Slru, 5)
    layer.use(0, 1, 2)
    layer.use(0, 1, 2)
    for expert in range(10, 40):
        layer.use(expert)
    assert {0, 1, 2} <= set(layer.slot_of)
    lru = Layer(Lru, 5)
    lru.use(0, 1, 2)
    lru.use(0, 1, 2)
    for expert in range(10, 40):
        lru.use(expert)
    assert not {0, 1, 2} & set(lru.slot_of)


def test_slru_gives_what_falls_out_of_a_full_segment_another_turn() -> None:
    layer = Layer(Slru, 5)  # of which 4 are for what was used again
    layer.use(0, 1, 2, 3, 4)
    layer.use(0, 1, 2, 3, 4)
    assert layer.order() == [0, 1, 2, 3, 4]  # 0 fell out, and is the only one that may go
    layer.use(5)
    assert set(layer.slot_of) == {1, 2, 3, 4, 5}
    assert layer.order() == [5, 1, 2, 3, 4]


# --- Pinned ---------------------------------------------------------------------------------------


def test_pinned_keeps_the_hottest_half_and_is_lru_with_the_rest() -> None:
    layer = Layer(Pinned, 4)
    for _ in range(5):
        layer.use(0, 1)
    for expert in range(10, 30):
        layer.use(expert)
        if expert < 18:
            layer.use(0, 1)
    assert {0, 1} <= set(layer.slot_of)
    assert layer.order() == [28, 29, 0, 1]


def test_pinned_is_lru_before_anything_is_known() -> None:
    layer, lru = Layer(Pinned, 4), Layer(Lru, 4)
    for made in (layer, lru):
        made.use(0, 1, 2, 3)
        made.use(2)
        made.use(0)
    assert layer.order() == lru.order() == [1, 3, 2, 0]


# --- cost -----------------------------------------------------------------------------------------


@every_policy
def test_cost_of_a_policy_does_not_grow_with_the_slots(make: MakePolicy) -> None:
    """Looks at stamps and counts, per round of 4 uses and 2 evictions."""

    def looks(n_slots: int) -> float:
        last_use, n_uses = CountedStamps(range(n_slots)), CountedStamps([0] * n_slots)
        made = make(last_use, n_uses)
        for slot in range(n_slots):
            made.add(slot, slot)
        last_use.n_looks = n_uses.n_looks = 0
        n_rounds = 4 * n_slots
        for number in range(n_rounds):
            used = {(number * 7 + i * 3) % n_slots for i in range(4)}
            victims = made.victims(2, used)
            for slot in victims:
                made.remove(slot)
                made.add(slot, n_slots + number % 64)
            for slot in sorted(used.union(victims)):
                last_use[slot] = n_slots + number
                list.__setitem__(n_uses, slot, list.__getitem__(n_uses, slot) + 1)
        return (last_use.n_looks + n_uses.n_looks) / n_rounds

    few, many = looks(32), looks(1024)
    assert 0 < many < 2 * few
    assert many < 128
