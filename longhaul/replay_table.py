"""A trace through policies at many budgets: what is asked for, and the table that answers. Pure."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from .budget import GIB, MIB, plan_slots, slots_bytes
from .config import parse_cache
from .errors import BudgetError, ConfigError, TraceError
from .replay import NAMES, Replayed, replay
from .report import span
from .slot_plan import HeldOut, SlotPlan, read_slot_plan
from .trace_files import open_trace
from .workload import Workload, load_workload


@dataclass(frozen=True, slots=True)
class Rates:
    """Say what a token costs beside its misses."""

    disk_bytes_per_s: float
    compute_s: float  # of a token with everything resident

    def tokens_per_s(self, read_bytes: float) -> float | None:
        """Return what can be had at best, reading while computing; None where nothing is known."""
        token_s = max(self.compute_s, read_bytes / self.disk_bytes_per_s)
        return 1 / token_s if token_s else None


@dataclass(frozen=True, slots=True)
class Row:
    """Hold the outcome of one policy at one budget, while decoding but for `prompt_hit_rate`."""

    policy: str
    cache: str  # as it was asked for
    n_slots: tuple[int, ...]
    share: float  # of the experts' bytes, 0 to 1
    slot_bytes: int | None  # None: sizes are not known
    hit_rate: float
    prompt_hit_rate: float | None  # None: there are no prompts
    misses_per_token: float
    read_bytes_per_token: float | None
    tokens_per_s: float | None


@dataclass(frozen=True, slots=True)
class Cache:
    """Name a split of slots."""

    name: str
    n_slots: tuple[int, ...]


def load_trace(path: Path, expert_bytes: int) -> tuple[Workload, list[str]]:
    """Read a whole trace and what was left out; raises TraceError if there is nothing in it."""
    source = open_trace(path, expert_bytes)
    workload = load_workload(source)
    if not workload.n_events:
        raise TraceError(f"{path}: there is nothing in it")
    return workload, source.notes


def budget_of(workload: Workload, text: str) -> int:
    """Turn a cache size, or a share such as 25%, into bytes; raises ConfigError if it is none."""
    if text.endswith("%"):
        try:
            share = float(text[:-1]) / 100
        except ValueError as e:
            raise ConfigError(f"--cache {text!r} is no share; give one such as 25%") from e
        if not 0 < share <= 1:
            raise ConfigError(f"--cache {text!r} is not above 0% and up to 100%")
        shapes = [layer.moe_layer() for layer in workload.header.layers]
        return int(share * sum(shape.total_bytes for shape in shapes))
    size_bytes = parse_cache(text)
    if size_bytes is None or not workload.has_sizes:
        raise ConfigError(
            f"--cache {text!r} is no share such as 25%, and the trace does not say how large an"
            " expert is: --expert-bytes does"
            if size_bytes
            else f"--cache {text!r} is no size"
        )
    return size_bytes


def caches_of(
    workload: Workload, sizes: Sequence[str], counts: Sequence[int], plans: Sequence[Path]
) -> list[Cache]:
    """Return the splits to replay; raises ConfigError if one does not suit the trace."""
    shapes = [layer.moe_layer() for layer in workload.header.layers]
    caches = [Cache(text, plan_slots(shapes, budget_of(workload, text))) for text in sizes]
    for count in counts:
        if count < 1:
            raise ConfigError(f"--slots {count} are none")
        n_slots = tuple(min(count, shape.n_expert) for shape in shapes)
        caches.append(Cache(f"{count} slots", n_slots))
    return caches + [Cache(path.name, _planned(workload, path)) for path in plans]


def default_caches(workload: Workload, shares: Sequence[str]) -> list[Cache]:
    """Return those of some shares that the model can run with."""
    caches = []
    for share in shares:
        with suppress(BudgetError):
            caches += caches_of(workload, [share], (), ())
    return caches


def _planned(workload: Workload, path: Path) -> tuple[int, ...]:
    plan: SlotPlan = read_slot_plan(path)
    layers = workload.header.layers
    if plan.layers != tuple(layer.layer for layer in layers) or any(
        n > layer.n_expert for n, layer in zip(plan.n_slots, layers, strict=False)
    ):
        raise ConfigError(f"{path} is for a model with other layers or experts")
    return plan.n_slots


def replay_rows(
    workload: Workload, caches: Iterable[Cache], policies: Sequence[str], rates: Rates
) -> list[Row]:
    """Replay a trace through each policy at each budget; raises ConfigError for unknown names."""
    for name in policies:
        if name not in NAMES:
            raise ConfigError(f"--policy {name!r} is none of: {', '.join(NAMES)}")
    return [
        _row(workload, cache, replay(workload, cache.n_slots, name), rates)
        for cache, name in product(caches, policies)
    ]


def _row(workload: Workload, cache: Cache, done: Replayed, rates: Rates) -> Row:
    shapes = [layer.moe_layer() for layer in workload.header.layers]
    slot_bytes = slots_bytes(shapes, cache.n_slots)
    counters = done.stats.decode if done.stats.decode.n_tokens else done.stats.prefill
    prompts = done.stats.prefill
    is_sized = workload.has_sizes
    read_bytes = counters.read_bytes_per_token if is_sized else None
    return Row(
        policy=done.policy,
        cache=cache.name,
        n_slots=cache.n_slots,
        share=slot_bytes / sum(shape.total_bytes for shape in shapes),
        slot_bytes=slot_bytes if is_sized else None,
        hit_rate=counters.hit_rate,
        prompt_hit_rate=prompts.hit_rate if prompts.n_tokens else None,
        misses_per_token=counters.n_misses / counters.n_tokens,
        read_bytes_per_token=read_bytes,
        tokens_per_s=None if read_bytes is None else rates.tokens_per_s(read_bytes),
    )


def replay_lines(rows: Sequence[Row]) -> list[str]:
    """Write rows as a table, a block for each budget."""
    is_sized = rows[0].slot_bytes is not None
    has_prompts = rows[0].prompt_hit_rate is not None
    names = ["cache", "slots", "share", "GiB", "policy", "hits", "prompt hits", "misses/token"]
    names += ["MiB/token", "tok/s"]
    table = [names]
    before = ""
    for row in rows:
        is_new, before = row.cache != before, row.cache
        table.append(
            [
                row.cache if is_new else "",
                span(row.n_slots) if is_new else "",
                f"{row.share:.1%}" if is_new else "",
                f"{(row.slot_bytes or 0) / GIB:.2f}" if is_new else "",
                row.policy,
                f"{row.hit_rate:.1%}",
                f"{row.prompt_hit_rate or 0:.1%}",
                f"{row.misses_per_token:.1f}",
                f"{(row.read_bytes_per_token or 0) / MIB:.1f}",
                f"{row.tokens_per_s:.2f}" if row.tokens_per_s else "-",
            ]
        )
    left_out = set() if is_sized else {"GiB", "MiB/token", "tok/s"}
    left_out |= set() if has_prompts else {"prompt hits"}
    kept = [i for i, name in enumerate(names) if name not in left_out]
    return _aligned([[cells[i] for i in kept] for cells in table], {"cache", "policy"})


def _aligned(table: Sequence[Sequence[str]], to_the_left: set[str]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for cells in table:
        parts = [
            f"{cell:<{width}}" if name in to_the_left else f"{cell:>{width}}"
            for cell, width, name in zip(cells, widths, table[0], strict=True)
        ]
        lines.append("  ".join(parts).rstrip())
    return lines


def plan_lines(plan: SlotPlan, uniform: Sequence[int], halves: Sequence[HeldOut]) -> list[str]:
    """Write a proposal, and what it would have been worth on what it was not made from."""
    table = [["layer", "uniform", "proposed"]]
    for layer, before, now in zip(plan.layers, uniform, plan.n_slots, strict=True):
        table.append([str(layer), str(before), str(now)])
    lines = _aligned(table, set())
    for half in halves:
        lines.append(
            f"from the {half.fitted_on}, on the other: {half.n_tokens} tokens, hits"
            f" {half.uniform_hit_rate:.1%} uniform, {half.proposed_hit_rate:.1%} proposed,"
            f" {half.saved:+.1%} of the reads saved"
        )
    if any(half.saved <= 0 for half in halves):
        lines.append("that is no gain on both: the uniform split is as good")
    return lines
