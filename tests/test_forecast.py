"""What decoding may cost, by arithmetic."""

import pytest
from test_launch import MODEL

from longhaul.budget import MIB
from longhaul.forecast import Machine, forecast, hit_rate_range

MACHINE = Machine(disk_bytes_per_s=100 * MIB, memory_bytes_per_s=1000 * MIB)


@pytest.mark.parametrize(
    ("share", "low", "high"),
    [(0, 0, 0), (0.12, 0.43, 0.66), (0.25, 0.6, 0.82), (0.5, 0.79, 0.96), (1, 1, 1), (7, 1, 1)],
)
def test_hits_of_recorded_routing(share: float, low: float, high: float) -> None:
    assert hit_rate_range(share) == pytest.approx((low, high))


def test_hits_grow_with_the_cache() -> None:
    ranges = [hit_rate_range(i / 100) for i in range(101)]
    assert ranges == sorted(ranges)
    assert all(low <= high for low, high in ranges)
    assert hit_rate_range(0.185) == pytest.approx((0.515, 0.74))  # half way


def test_a_token_waits_for_the_disk_or_for_memory() -> None:
    # 2 layers of 16 experts of 1 MiB, top-4; 100 MiB of other weights
    found = forecast(MODEL, 16 * MIB, MACHINE)
    assert found.hit_rate == pytest.approx((0.79, 0.96))
    assert found.read_bytes == pytest.approx((0.21 * 8 * MIB, 0.04 * 8 * MIB))
    compute_s = 108 / 1000
    assert found.tokens_per_s[0] == pytest.approx(1 / (compute_s + 0.21 * 8 / 100))
    assert found.tokens_per_s[1] == pytest.approx(1 / compute_s)  # reads are done meanwhile


def test_below_the_experts_of_a_token_nothing_may_be_found_again() -> None:
    found = forecast(MODEL, 7 * MIB, MACHINE)
    assert found.hit_rate[0] == 0
    assert found.hit_rate[1] > 0.5
    assert found.read_bytes[0] == 8 * MIB


def test_all_slots_read_nothing() -> None:
    found = forecast(MODEL, MODEL.expert_bytes, MACHINE)
    assert found.read_bytes == (0, 0)
    assert found.tokens_per_s[0] == found.tokens_per_s[1]
