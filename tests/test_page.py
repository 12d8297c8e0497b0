"""What the page's process makes of the memory that it reads."""

import mmap
import struct

import pytest

from longhaul.page import Memory, hit_rate, is_loopback, recent

NAMES = ["n_tokens", "n_hits", "n_misses", "n_tier_hits", "read_bytes"]
NAMES += ["compute_us", "wait_us", "disk_us"]
N_KEPT = 4


def layout() -> dict[str, object]:
    """Return two numbers, two rings of 4 and a slot table, one after the other."""
    item = (2 + len(NAMES)) * 8
    records = 16 + 2 * len(NAMES) * 8
    replies = records + N_KEPT * item
    return {
        "n_bytes": 4096,
        "numbers": {"n_records": 0, "n_replies": 8},
        "counters": 16,
        "counter_names": NAMES,
        "records": {"offset": records, "item_bytes": item, "n_kept": N_KEPT},
        "replies": {"offset": replies, "item_bytes": 24, "n_kept": N_KEPT},
        "reply_names": ["end_us", "n_hits", "n_misses"],
    }


@pytest.fixture
def raw() -> mmap.mmap:
    return mmap.mmap(-1, 4096)


def put(raw: mmap.mmap, offset: int, *numbers: int, kind: str = "q") -> None:
    struct.pack_into(f"={len(numbers)}{kind}", raw, offset, *numbers)


def test_nothing_yet(raw: mmap.mmap) -> None:
    memory = Memory(raw, layout())
    assert memory.records(10) == []
    assert memory.replies() == []
    assert memory.counters(1)["n_tokens"] == 0


def test_counters_by_phase(raw: mmap.mmap) -> None:
    put(raw, 16, *range(16))
    memory = Memory(raw, layout())
    assert memory.counters(0)["n_tokens"] == 0
    assert memory.counters(1) == dict(zip(NAMES, range(8, 16), strict=True))


def test_records_are_the_last_ones_without_the_one_being_written(raw: mmap.mmap) -> None:
    memory = Memory(raw, layout())
    for i in range(6):
        offset = 16 + 2 * len(NAMES) * 8 + i % N_KEPT * (2 + len(NAMES)) * 8
        put(raw, offset, 100 + i, i % 2, *[i] * len(NAMES))
        put(raw, 0, i + 1)
    assert [record["end_us"] for record in memory.records(10)] == [103, 104, 105]
    assert [record["phase"] for record in memory.records(2)] == [0, 1]
    assert memory.records(1)[0]["read_bytes"] == 5


def test_residency_ranks_by_last_use(raw: mmap.mmap) -> None:
    put(raw, 1000, 5, -1, 2, kind="i")
    put(raw, 2000, 10, 99, 30)
    layer = {"n_expert": 6, "n_slots": 3, "expert_of": 1000, "last_use": 2000}
    assert Memory(raw, layout()).residency(layer) == [-1, -1, 0, -1, -1, 1]


def test_recent_rates_are_of_one_phase() -> None:
    def record(phase: int, *numbers: int) -> dict[str, int]:
        return {"phase": phase, **dict(zip(NAMES, numbers, strict=True))}

    records = [
        record(0, 100, 1, 1, 1, 1, 1, 1, 1),
        record(1, 1, 3, 1, 1, 1000, 400_000, 100_000, 0),
        record(1, 1, 3, 1, 0, 3000, 600_000, 400_000, 0),
    ]
    rates = recent(records, 1)
    assert rates == {
        "tokens_per_s": 2.0,
        "hit_rate": 0.75,
        "tier_rate": 0.125,
        "read_bytes_per_s": 4000.0,
        "read_bytes_per_token": 2000.0,
        "wait_share": 0.5,
    }
    assert recent([], 1)["tokens_per_s"] == 0.0
    assert hit_rate({"n_hits": 0, "n_misses": 0}) == 0.0


@pytest.mark.parametrize(
    ("host", "wanted"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("a.b", False)],
)
def test_loopback(host: str, wanted: bool) -> None:
    assert is_loopback(host) is wanted
