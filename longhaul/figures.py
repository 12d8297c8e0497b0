"""The figures of a run, for programs."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from .files import write_text
from .stats import Counters, Record, Stats

FORMAT = 1  # grows when a key changes its meaning or goes


@dataclass(frozen=True, slots=True)
class RunFigures:
    """Hold what a run was planned to be and what it was; sizes are in bytes."""

    model: str
    arch: str
    n_slots: tuple[int, ...]  # by layer
    n_ubatch: int
    n_stages: int  # the most that a layer takes in a whole ubatch
    policy: str
    budget_bytes: int
    slot_bytes: int
    repacked_bytes: int  # of the slots, in the CPU's repacked layout
    planned_bytes: int
    peak_rss_bytes: int
    stats: Stats
    records: tuple[Record, ...]  # of the last ubatches
    device_bytes: int = 0  # of the slots, on devices
    tier_bytes: int = 0  # of the memory behind those
    locked_bytes: int = 0  # of that memory, page-locked
    devices: tuple[dict[str, object], ...] = ()  # RAM and devices, where there are any


def counters_dict(counters: Counters) -> dict[str, float]:
    """Return the counters and what follows from them; seconds, bytes, rates of 0 to 1."""
    return {
        **asdict(counters),
        "hit_rate": counters.hit_rate,
        "tier_rate": counters.tier_rate,
        "tokens_per_s": counters.tokens_per_s,
        "read_bytes_per_token": counters.read_bytes_per_token,
        "roofline_ratio": counters.roofline_ratio,
    }


def figures_dict(run: RunFigures) -> dict[str, object]:
    """Return a run's figures with only dicts, lists, strings and numbers.

    `ubatches` are the last of the run, in their order; one of decoding is a token of each sequence.
    """
    found: dict[str, object] = {"format": FORMAT}
    for name in RunFigures.__slots__:
        if name not in ("stats", "records"):
            found[name] = getattr(run, name)
    for name in ("prefill", "decode", "total"):
        found[name] = counters_dict(getattr(run.stats, name))
    found["ubatches"] = [
        {
            "phase": "prefill" if record.is_prefill else "decode",
            "end_s": record.end_s,
            **counters_dict(record.counters),
        }
        for record in run.records
    ]
    return found


def write_json(run: RunFigures, path: Path) -> None:
    """Write the figures; a file is whole or as it was. Raises OSError if it cannot be written."""
    write_text(path, json.dumps(figures_dict(run), indent=1) + "\n")
