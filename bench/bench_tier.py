"""Cost of a tier's plan in Python. Run with: pytest bench/bench_tier.py"""

import random

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from longhaul.planner import plan
from longhaul.policy import Lru
from longhaul.residency import Residency
from longhaul.tier import HostTier, loaded_experts

N_WARM = 20_000


def warm_tier(n_expert: int) -> tuple[HostTier, random.Random, list[float]]:
    """Return a tier of half of the experts after many loads, some of them more likely."""
    tier = HostTier(n_expert, n_expert // 2, n_expert // 8)
    rng = random.Random(1)
    weights = [1 / (1 + expert % 37) for expert in range(n_expert)]
    for _ in range(N_WARM // 8):
        experts = list(dict.fromkeys(rng.choices(range(n_expert), weights, k=8)))
        made = tier.plan(experts)
        tier.evict(made)
        tier.apply(made)
    return tier, rng, weights


@pytest.mark.parametrize("n_expert", [64, 128, 256, 512])
@pytest.mark.parametrize("n_loads", [1, 4, 8])
def test_loads(benchmark: BenchmarkFixture, n_expert: int, n_loads: int) -> None:
    """Plan, evict, apply for the misses of a layer."""
    tier, rng, weights = warm_tier(n_expert)

    def ask() -> tuple[tuple[list[int]], dict[str, object]]:
        found: dict[int, None] = {}
        while len(found) < n_loads:
            found[rng.choices(range(n_expert), weights)[0]] = None
        return (list(found),), {}

    def step(experts: list[int]) -> None:
        made = tier.plan(experts)
        tier.evict(made)
        tier.apply(made)

    benchmark.pedantic(step, setup=ask, rounds=5000)


@pytest.mark.parametrize("n_expert", [64, 512])
def test_prompt(benchmark: BenchmarkFixture, n_expert: int) -> None:
    """Plan for a ubatch that loads every expert."""
    tier, _, _ = warm_tier(n_expert)
    benchmark(tier.plan, list(range(n_expert)))


@pytest.mark.parametrize("is_backed", [False, True])
@pytest.mark.parametrize("n_missing", [1, 4, 8])
def test_device_and_tier(benchmark: BenchmarkFixture, n_missing: int, is_backed: bool) -> None:
    """All that a decode miss costs, with 128 of 512 experts in slots, without and with a tier."""
    n_expert, n_slots = 512, 128
    tier, rng, _ = warm_tier(n_expert)
    last_use = list(range(n_slots))
    rng.shuffle(last_use)
    residency = Residency([-1] * n_expert, [-1] * n_slots, last_use, Lru)
    residency.apply(plan(residency, list(range(n_slots)), list(range(n_slots))))
    residency.backed = tier.slot_of if is_backed else None
    clock = n_slots

    def ask() -> tuple[tuple[list[int], list[int]], dict[str, object]]:
        nonlocal clock
        absent = [e for e in range(n_expert) if residency.slot_of[e] < 0]
        missing = rng.sample(absent, n_missing)
        hits = rng.sample([e for e in residency.expert_of if e >= 0], 8 - n_missing)
        for expert in hits:
            clock += 1
            last_use[residency.slot_of[expert]] = clock
        return ([*hits, *missing], missing), {}

    def step(needed: list[int], missing: list[int]) -> None:
        nonlocal clock
        made = plan(residency, needed, missing)
        residency.evict(made)
        if is_backed:
            in_tier = tier.plan(loaded_experts(made))
            tier.evict(in_tier)
            tier.apply(in_tier)
        residency.apply(made)
        for _, slot in made.loads:
            clock += 1
            last_use[slot] = clock

    benchmark.pedantic(step, setup=ask, rounds=5000)
