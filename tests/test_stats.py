from dataclasses import fields

import pytest

from longhaul.stats import Counters, Stats


def numbered(first: int) -> Counters:
    """Return counters of which no two are alike."""
    return Counters(*range(first, first + len(fields(Counters))))


def test_counters_add_and_subtract_field_by_field() -> None:
    a, b = numbered(100), numbered(1)
    total = a + b
    for field in fields(Counters):
        name = field.name
        assert getattr(total, name) == getattr(a, name) + getattr(b, name)
    assert total - b == a
    assert a - a == Counters()
    assert a == numbered(100)  # operands stay


def test_stats_keep_the_phases_apart() -> None:
    a, b = Stats(numbered(10), numbered(200)), Stats(numbered(1), numbered(3))
    assert a + b == Stats(numbered(10) + numbered(1), numbered(200) + numbered(3))
    assert (a + b) - b == a
    assert a.total == numbered(10) + numbered(200)
    assert Stats().total == Counters()


def test_rates() -> None:
    counters = Counters(n_tokens=8, n_hits=3, n_misses=1, read_bytes=4096, compute_s=2.0)
    assert counters.hit_rate == 0.75
    assert counters.tokens_per_s == 4.0
    assert counters.read_bytes_per_token == 512.0


@pytest.mark.parametrize(
    ("compute_s", "wait_s", "disk_s", "ratio"),
    [(4.0, 3.0, 3.2, 1.25), (4.0, 0.5, 3.2, 4 / 3.5), (2.0, 0.0, 0.0, 1.0)],
)
def test_roofline_is_computing_or_reading(
    compute_s: float, wait_s: float, disk_s: float, ratio: float
) -> None:
    counters = Counters(compute_s=compute_s, wait_s=wait_s, disk_s=disk_s)
    assert counters.roofline_ratio == pytest.approx(ratio)


@pytest.mark.parametrize(
    "name", ["hit_rate", "tokens_per_s", "read_bytes_per_token", "roofline_ratio"]
)
def test_rates_of_nothing_are_zero(name: str) -> None:
    assert getattr(Counters(), name) == 0.0


def test_total_rate_weighs_phases_by_what_they_needed() -> None:
    stats = Stats(Counters(n_hits=0, n_misses=30), Counters(n_hits=10, n_misses=0))
    assert stats.total.hit_rate == 0.25
