"""Plans in stages: what must hold for every layer, whatever is resident and needed."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_planner import Case as WholeCase
from test_planner import check_consistent, state

from longhaul.planner import (
    Plan,
    StagedPlan,
    kept_slots,
    plan_ahead,
    plan_stages,
    stage_count,
)
from longhaul.policy import POLICIES
from longhaul.residency import Residency

every_policy = pytest.mark.parametrize("policy", sorted(POLICIES))


class Case(WholeCase):
    def plan(self, residency: Residency) -> StagedPlan:
        return plan_stages(residency, self.needed, self.missing)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    n_expert = draw(st.integers(1, 40))
    n_slots = draw(st.integers(1, n_expert))
    experts = draw(st.permutations(range(n_expert)))
    slots = draw(st.permutations(range(n_slots)))
    n_resident = draw(st.integers(0, n_slots))
    last_use = draw(st.lists(st.integers(0, 99), min_size=n_slots, max_size=n_slots))
    needed = draw(st.permutations(range(n_expert)))[: draw(st.integers(1, n_expert))]
    resident = dict(zip(experts[:n_resident], slots, strict=False))
    tier = st.lists(st.sampled_from([-1, 3]), min_size=n_expert, max_size=n_expert)
    return Case(n_expert, n_slots, resident, last_use, needed, draw(st.none() | tier))


@given(cases())
def test_every_needed_expert_is_in_exactly_one_stage(case: Case) -> None:
    places = case.plan(case.residency("lru")).places
    assert sorted(place.expert for place in places) == sorted(case.needed)


@given(cases())
def test_missing_experts_are_loaded_once_and_resident_ones_not_at_all(case: Case) -> None:
    places = case.plan(case.residency("lru")).places
    assert sorted(place.expert for place in places if place.is_load) == sorted(case.missing)
    for place in places:
        if not place.is_load:
            assert place.slot == case.resident[place.expert]
            assert place.stage <= 1


@given(cases())
def test_a_slot_serves_one_expert_a_stage_and_its_own_first(case: Case) -> None:
    places = sorted(case.plan(case.residency("lru")).places, key=lambda p: (p.slot, p.stage))
    assert all(0 <= place.slot < case.n_slots for place in places)
    for before, place in itertools.pairwise(places):
        if before.slot == place.slot:
            assert before.stage < place.stage
            assert place.is_load


@given(cases())
def test_stages_are_as_many_as_the_graph_has(case: Case) -> None:
    places = case.plan(case.residency("lru")).places
    used = {place.stage for place in places}
    assert used == set(range(len(used)))
    if len(case.needed) > case.n_slots:
        assert len(used) <= stage_count(len(case.needed), case.n_slots, case.n_expert)


@given(cases())
def test_few_experts_fit_the_stages_of_a_graph_made_for_more(case: Case) -> None:
    """A graph is made for what a ubatch could select; what it does select may be less."""
    if case.n_slots < case.n_expert:
        used = {place.stage for place in case.plan(case.residency("lru")).places}
        n_selected = max(len(case.needed), case.n_slots + 1)
        assert len(used) <= stage_count(n_selected, case.n_slots, case.n_expert)


@given(cases())
def test_consecutive_loading_stages_use_different_slots_where_there_are_two(case: Case) -> None:
    places = case.plan(case.residency("lru")).places
    loaded: dict[int, set[int]] = {}
    for place in places:
        if place.is_load:
            loaded.setdefault(place.stage, set()).add(place.slot)
    n_turning = case.n_slots - min(kept_slots(case.n_slots), case.n_slots - 1)
    for stage, slots in loaded.items():
        if n_turning > 1:
            assert not slots & loaded.get(stage + 1, set())


@every_policy
@given(cases())
def test_planning_changes_nothing(policy: str, case: Case) -> None:
    residency = case.residency(policy)
    before = state(residency)
    first = case.plan(residency)
    assert state(residency) == before
    assert case.plan(residency) == first


@every_policy
@given(cases())
def test_what_is_entered_in_the_end_is_what_the_slots_hold(policy: str, case: Case) -> None:
    residency = case.residency(policy)
    step = case.plan(residency)
    residency.evict(step)
    check_consistent(residency)  # also the state after a failed read
    residency.apply(step)
    check_consistent(residency)
    content = {slot: expert for expert, slot in case.resident.items()}
    for place in sorted(step.places):
        content[place.slot] = place.expert
    assert {s: e for s, e in enumerate(residency.expert_of) if e >= 0} == content


@given(cases())
def test_slots_that_nothing_needs_are_overwritten_first(case: Case) -> None:
    places = case.plan(case.residency("lru")).places
    overwritten = {place.slot for place in places if place.is_load}
    needed = {case.resident[e] for e in case.needed if e in case.resident}
    idle = set(range(case.n_slots)) - needed
    if overwritten & needed:
        assert idle <= overwritten


def test_the_last_needed_experts_are_resident_in_the_end() -> None:
    case = Case(
        n_expert=12,
        n_slots=4,
        resident={0: 0, 1: 1, 2: 2, 3: 3},
        last_use=[1, 2, 3, 4],
        needed=[1, 2, 3, 4, 5, 7, 8, 9, 11, 6, 10, 0],
    )
    residency = case.residency("lru")
    step = case.plan(residency)
    residency.evict(step)
    residency.apply(step)
    assert sorted(residency.expert_of) == [0, 6, 10, 11]


@pytest.mark.parametrize(
    ("n_selected", "n_slots", "n_expert", "n_stages"),
    [
        (8, 8, 8, 1),
        (1, 1, 1, 1),
        (8, 8, 9, 2),
        (0, 1, 2, 2),
        (9, 8, 64, 6),
        (64, 16, 64, 14),
        (64, 1, 64, 65),
        (2, 1, 8, 3),
        (64, 2, 64, 66),
        (3, 2, 8, 6),
    ],
)
def test_stage_count(n_selected: int, n_slots: int, n_expert: int, n_stages: int) -> None:
    assert stage_count(n_selected, n_slots, n_expert) == n_stages


@given(cases())
def test_a_stage_is_loaded_while_another_is_computed(case: Case) -> None:
    """From two slots that take turns on, no stage of loads waits for the one before it."""
    places = case.plan(case.residency("lru")).places
    if case.n_slots - kept_slots(case.n_slots) < 2:
        return
    by_stage: dict[int, set[int]] = {}
    for place in places:
        by_stage.setdefault(place.stage, set()).add(place.slot)
    for place in places:
        if place.is_load and place.stage > 0 and len(by_stage[place.stage - 1]) < case.n_slots:
            assert place.slot not in by_stage[place.stage - 1]


@given(cases())
def test_reading_ahead_fills_free_slots_and_nothing_else(case: Case) -> None:
    residency = case.residency("lru")
    before = state(residency)
    step = plan_ahead(residency, 32 * case.n_expert)
    assert state(residency) == before
    assert step.victims == ()
    n_missing = case.n_expert - len(case.resident)
    assert len(step.loads) == min(n_missing, case.n_slots - len(case.resident))
    assert not {expert for expert, _ in step.loads} & set(case.resident)
    residency.apply(step)
    check_consistent(residency)


def test_nothing_is_read_ahead_where_few_rows_are_routed() -> None:
    residency = Residency([-1] * 8, [-1] * 4, [0] * 4, POLICIES["lru"])
    assert plan_ahead(residency, 255) == Plan((), ())
    assert len(plan_ahead(residency, 256).loads) == 4
