"""What to expect of a cache before anything runs: hit rates, and tokens per second. Pure.

Hit rates are those of recorded routing, OLMoE-1B-7B (64 experts, top-8) and Qwen3-30B-A3B (128,
top-6), decoding with an LRU cache. Models route differently, so they are ranges.
"""

from bisect import bisect_right
from dataclasses import dataclass

from .experts import MoeModel

# Share of the experts that have slots: least and most of the hits.
_HITS = (
    (0.0, 0.0, 0.0),
    (0.12, 0.43, 0.66),
    (0.25, 0.60, 0.82),
    (0.50, 0.79, 0.96),
    (1.0, 1.0, 1.0),
)


@dataclass(frozen=True, slots=True)
class Machine:
    """Hold what a machine can do, in bytes per second."""

    disk_bytes_per_s: float  # uncached reads of the sizes that experts are read in
    memory_bytes_per_s: float  # reading, with all cores


@dataclass(frozen=True, slots=True)
class Forecast:
    """Hold what decoding one token may cost; pairs are the worse and the better case."""

    hit_rate: tuple[float, float]
    read_bytes: tuple[float, float]
    tokens_per_s: tuple[float, float]


def hit_rate_range(share: float) -> tuple[float, float]:
    """Return the least and the most hits to expect while decoding, by the share with slots."""
    share = min(max(share, 0.0), 1.0)
    after = min(bisect_right([point[0] for point in _HITS], share), len(_HITS) - 1)
    (x0, low0, high0), (x1, low1, high1) = _HITS[after - 1], _HITS[after]
    part = (share - x0) / (x1 - x0)
    return low0 + part * (low1 - low0), high0 + part * (high1 - high0)


def forecast(model: MoeModel, slot_bytes: int, machine: Machine) -> Forecast:
    """Return what a token costs while decoding with so many bytes of slots.

    Below the experts of one token nothing is found again. Computing takes as long as it takes to
    read the weights of a token from memory. In the worse case it waits for every read, in the
    better one it goes on meanwhile.
    """
    hits = hit_rate_range(slot_bytes / model.expert_bytes)
    if slot_bytes < model.token_cycle_bytes:
        hits = (0.0, hits[1])
    compute_s = (model.dense_bytes + model.token_cycle_bytes) / machine.memory_bytes_per_s
    read_bytes = ((1 - hits[0]) * model.token_cycle_bytes, (1 - hits[1]) * model.token_cycle_bytes)
    slow_s = compute_s + read_bytes[0] / machine.disk_bytes_per_s
    quick_s = max(compute_s, read_bytes[1] / machine.disk_bytes_per_s)
    return Forecast(hits, read_bytes, (1 / slow_s, 1 / quick_s))
