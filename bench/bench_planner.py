"""Cost of a plan in Python. Run with: pytest bench/bench_planner.py"""

import random

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from longhaul.planner import plan, plan_stages
from longhaul.policy import Lru
from longhaul.residency import Residency


def full_residency(n_expert: int, n_slots: int) -> tuple[Residency, list[int]]:
    """Return a layer whose slots are all taken, and their stamps."""
    last_use = list(range(n_slots))
    random.Random(1).shuffle(last_use)
    residency = Residency([-1] * n_expert, [-1] * n_slots, last_use, Lru)
    residency.apply(plan(residency, list(range(n_slots)), list(range(n_slots))))
    return residency, last_use


@pytest.mark.parametrize("n_expert", [64, 128, 256, 512])
@pytest.mark.parametrize("n_missing", [1, 4, 8])
def test_decode_miss(benchmark: BenchmarkFixture, n_expert: int, n_missing: int) -> None:
    """Top-8 of a layer with a quarter of its experts in slots: plan, evict, apply."""
    n_slots = n_expert // 4
    residency, last_use = full_residency(n_expert, n_slots)
    rng = random.Random(2)
    clock = n_slots

    def ask() -> tuple[tuple[list[int], list[int]], dict[str, object]]:
        nonlocal clock
        resident = [e for e in residency.expert_of if e >= 0]
        absent = [e for e in range(n_expert) if residency.slot_of[e] < 0]
        missing = rng.sample(absent, n_missing)
        hits = rng.sample(resident, 8 - n_missing)
        for expert in hits:
            clock += 1
            last_use[residency.slot_of[expert]] = clock
        return ([*hits, *missing], missing), {}

    def step(needed: list[int], missing: list[int]) -> None:
        made = plan(residency, needed, missing)
        residency.evict(made)
        residency.apply(made)

    benchmark.pedantic(step, setup=ask, rounds=2000)


@pytest.mark.parametrize(("n_expert", "n_slots"), [(64, 16), (512, 128)])
def test_staged_prompt(benchmark: BenchmarkFixture, n_expert: int, n_slots: int) -> None:
    """A ubatch that needs every expert."""
    residency, _ = full_residency(n_expert, n_slots)
    needed = list(range(n_expert))
    benchmark(plan_stages, residency, needed, needed[n_slots:])
