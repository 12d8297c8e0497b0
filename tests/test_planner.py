from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longhaul.planner import Plan, nominees, plan
from longhaul.policy import POLICIES
from longhaul.residency import Residency

every_policy = pytest.mark.parametrize("policy", sorted(POLICIES))


@dataclass(frozen=True)
class Case:
    n_expert: int
    n_slots: int
    resident: dict[int, int]  # slot by expert
    last_use: list[int]
    needed: list[int]
    backed: list[int] | None = None  # tier slot of each expert, where there is a tier

    @property
    def missing(self) -> list[int]:
        return [expert for expert in self.needed if expert not in self.resident]

    def residency(self, policy: str) -> Residency:
        slot_of, expert_of = [-1] * self.n_expert, [-1] * self.n_slots
        made = Residency(slot_of, expert_of, self.last_use, POLICIES[policy])
        made.apply(Plan(loads=tuple(self.resident.items()), victims=()))
        made.backed = self.backed
        return made


@st.composite
def cases(draw: st.DrawFn) -> Case:
    n_expert = draw(st.integers(1, 24))
    n_slots = draw(st.integers(1, n_expert))
    experts = draw(st.permutations(range(n_expert)))
    slots = draw(st.permutations(range(n_slots)))
    n_resident = draw(st.integers(0, n_slots))
    last_use = draw(st.lists(st.integers(0, 99), min_size=n_slots, max_size=n_slots))
    needed = draw(st.permutations(range(n_expert)))[: draw(st.integers(0, n_slots))]
    resident = dict(zip(experts[:n_resident], slots, strict=False))
    tier = st.lists(st.sampled_from([-1, 3]), min_size=n_expert, max_size=n_expert)
    return Case(n_expert, n_slots, resident, last_use, needed, draw(st.none() | tier))


def check_consistent(residency: Residency) -> None:
    """Check that both tables, the free slots and the policy say the same."""
    occupied = {slot for slot, expert in enumerate(residency.expert_of) if expert >= 0}
    for slot in occupied:
        assert residency.slot_of[residency.expert_of[slot]] == slot
    for expert, slot in enumerate(residency.slot_of):
        assert slot == -1 or residency.expert_of[slot] == expert
    assert sorted(residency.free) == sorted(set(range(len(residency.expert_of))) - occupied)
    assert set(residency.policy.victims(len(occupied), ())) == occupied


def state(residency: Residency) -> tuple[list[int], list[int], list[int]]:
    return list(residency.slot_of), list(residency.expert_of), list(residency.free)


@every_policy
@given(cases())
def test_every_missing_expert_gets_one_slot_of_its_own(policy: str, case: Case) -> None:
    step = plan(case.residency(policy), case.needed, case.missing)
    assert [expert for expert, _ in step.loads] == case.missing
    slots = [slot for _, slot in step.loads]
    assert len(set(slots)) == len(slots)
    assert set(slots) <= set(range(case.n_slots))
    kept = {case.resident[expert] for expert in case.needed if expert in case.resident}
    assert not kept & set(slots)


@every_policy
@given(cases())
def test_victims_are_as_few_as_possible_and_never_needed(policy: str, case: Case) -> None:
    residency = case.residency(policy)
    n_free = case.n_slots - len(case.resident)
    step = plan(residency, case.needed, case.missing)
    assert len(step.victims) == max(len(case.missing) - n_free, 0)
    assert len(set(step.victims)) == len(step.victims)
    evicted = {residency.expert_of[slot] for slot in step.victims}
    assert evicted <= set(case.resident)
    assert not evicted & set(case.needed)


@every_policy
@given(cases())
def test_free_slots_are_taken_before_those_of_victims(policy: str, case: Case) -> None:
    residency = case.residency(policy)
    slots = [slot for _, slot in plan(residency, case.needed, case.missing).loads]
    from_free = [slot for slot in slots if residency.expert_of[slot] == -1]
    n_free = case.n_slots - len(case.resident)
    assert slots[: len(from_free)] == from_free
    assert len(from_free) == min(n_free, len(case.missing))


@every_policy
@given(cases())
def test_planning_changes_nothing(policy: str, case: Case) -> None:
    residency = case.residency(policy)
    before, stamps = state(residency), list(case.last_use)
    first = plan(residency, case.needed, case.missing)
    assert state(residency) == before
    assert case.last_use == stamps
    assert plan(residency, case.needed, case.missing) == first
    check_consistent(residency)


@every_policy
@given(cases())
def test_evict_and_apply_make_the_needed_experts_resident(policy: str, case: Case) -> None:
    residency = case.residency(policy)
    step = plan(residency, case.needed, case.missing)
    evicted = {residency.expert_of[slot] for slot in step.victims}
    residency.evict(step)
    check_consistent(residency)
    residency.apply(step)
    check_consistent(residency)
    for expert, slot in step.loads:
        assert residency.slot_of[expert] == slot
    for expert, slot in case.resident.items():
        assert residency.slot_of[expert] == (-1 if expert in evicted else slot)


@every_policy
@given(cases())
def test_after_a_failed_read_the_slots_are_free_and_the_same_need_can_be_served(
    policy: str, case: Case
) -> None:
    residency = case.residency(policy)
    step = plan(residency, case.needed, case.missing)
    residency.evict(step)  # and the read failed: no apply
    check_consistent(residency)
    assert {slot for _, slot in step.loads} <= set(residency.free)
    assert all(residency.slot_of[expert] == -1 for expert in case.missing)
    again = plan(residency, case.needed, case.missing)
    assert again.victims == ()
    residency.evict(again)
    residency.apply(again)
    check_consistent(residency)
    assert all(residency.slot_of[expert] >= 0 for expert in case.needed)


@every_policy
@given(st.lists(st.sets(st.integers(0, 11), min_size=1, max_size=4), max_size=30))
def test_tables_stay_consistent_over_a_run(policy: str, ubatches: list[set[int]]) -> None:
    last_use, n_uses = [0] * 4, [0] * 4
    residency = Residency([-1] * 12, [-1] * 4, last_use, POLICIES[policy], n_uses)
    for clock, experts in enumerate(ubatches, 1):
        needed = sorted(experts)
        step = plan(residency, needed, [e for e in needed if residency.slot_of[e] < 0])
        residency.evict(step)
        residency.apply(step)
        for expert in needed:
            last_use[residency.slot_of[expert]] = clock
            n_uses[residency.slot_of[expert]] += 1
        check_consistent(residency)


@pytest.mark.parametrize(
    "policy", [name for name in sorted(POLICIES) if POLICIES[name]([0], [0]).keeps_order]
)
@given(cases(), st.lists(st.integers(0, 11), max_size=4), st.integers(0, 12))
def test_nominees_are_what_is_planned_as_long_as_none_was_used(
    policy: str, case: Case, used: list[int], n: int
) -> None:
    last_use, n_uses = list(case.last_use), [0] * case.n_slots
    residency = Residency(
        [-1] * case.n_expert, [-1] * case.n_slots, last_use, POLICIES[policy], n_uses
    )
    residency.apply(Plan(tuple(case.resident.items()), ()))
    before = state(residency)
    named = nominees(residency, n)
    assert state(residency) == before
    assert len(set(named)) == len(named) <= n
    for clock, slot in enumerate(used, max(last_use, default=0) + 1):
        if slot < case.n_slots and residency.expert_of[slot] >= 0:
            last_use[slot] = clock
            n_uses[slot] += 1
            if slot in named:
                del named[named.index(slot) :]
    protected = {case.resident[expert] for expert in case.needed if expert in case.resident}
    chosen = [slot for slot in named if slot not in protected][: len(case.missing)]
    if len(chosen) == len(case.missing):
        step = plan(residency, case.needed, case.missing)
        assert chosen == [slot for _, slot in step.loads]


def test_enough_are_nominated_for_what_a_token_may_miss() -> None:
    residency = Residency([-1] * 12, [-1] * 6, [0] * 6, POLICIES["lru"])
    residency.apply(Plan(((0, 0), (1, 1), (2, 2), (3, 3)), ()))
    assert nominees(residency, 4) == [4, 5, 0, 1]
    assert nominees(residency, 99) == [4, 5, 0, 1, 2, 3]
    residency.set_limit(5)
    assert nominees(residency, 4) == [4, 0, 1, 2]  # as `plan` does, within the limit


def test_more_experts_than_slots_are_refused() -> None:
    residency = Residency([-1] * 4, [-1] * 2, [0] * 2, POLICIES["lru"])
    before = state(residency)
    with pytest.raises(ValueError, match="3 experts are needed at once, but the layer has 2"):
        plan(residency, [0, 1, 2], [0, 1, 2])
    assert state(residency) == before


@pytest.mark.parametrize(("needed", "missing"), [([1, 1], [1]), ([1, 2], [2, 2])])
def test_an_expert_named_twice_is_refused(needed: list[int], missing: list[int]) -> None:
    residency = Residency([-1] * 4, [-1] * 3, [0] * 3, POLICIES["lru"])
    before = state(residency)
    with pytest.raises(ValueError, match="twice"):
        plan(residency, needed, missing)
    assert state(residency) == before
