"""Which figures of traces and runs are drawn; `plots` draws them."""

import json
from pathlib import Path

from . import plots
from .errors import ConfigError
from .replay import NAMES
from .replay_table import Cache, Rates, load_trace, replay_rows
from .report import span
from .reuse import hits_by_slots
from .trace import TraceHeader, as_dict, as_list, as_text
from .workload import Workload

PART_KEYS = ("read_s", "repack_s", "plan_s")
PARTS = ("computing", "waiting for reads", "repacking", "planning", "other waiting")
MOST_BARS = 256
SHARES = (0.0, 0.06, 0.09, 0.125, 0.18, 0.25, 0.375, 0.5, 0.75, 1.0)


def plot_kind(kind: str, path: Path, out: Path) -> list[str]:
    """Draw one of budget, use, reuse and time; return what was left out of a trace.

    Raises TraceError or ConfigError if there is nothing to draw.
    """
    if kind == "time":
        plot_run(path, out)
        return []
    workload, notes = load_trace(path, 0)
    {"budget": plot_budgets, "use": plot_use, "reuse": plot_reuse}[kind](workload, out)
    return notes


def plot_budgets(workload: Workload, path: Path) -> None:
    """Draw hit rate against budget, a curve a policy, from the experts of one token on."""
    layers = workload.header.layers
    caches = []
    for share in SHARES:
        counts = [max(round(share * each.n_expert), each.n_expert_used) for each in layers]
        caches.append(Cache(f"{share:.1%}", tuple(counts)))
    rows = replay_rows(workload, caches, NAMES, Rates(1.0, 0.0))
    curves = []
    for name in NAMES:
        points = {row.share: row.hit_rate for row in rows if row.policy == name}
        curves.append((name, sorted(points.items())))
    plots.plot_hit_rates(curves, title_of(workload), path)


def plot_use(workload: Workload, path: Path) -> None:
    """Draw in what share of the decoding ubatches each expert was used."""
    shares = []
    for layer in workload.layers:
        counts = [0] * layer.shape.n_expert
        n_ubatches = 0
        for experts, is_prefill in layer.plain_needs():
            if not is_prefill:
                n_ubatches += 1
                for expert in experts:
                    counts[expert] += 1
        shares.append([count / max(n_ubatches, 1) for count in counts])
    layers = [layer.layer for layer in workload.header.layers]
    plots.plot_use(shares, layers, title_of(workload), path)


def plot_reuse(workload: Workload, path: Path) -> None:
    """Draw how soon experts are used again while decoding."""
    curves = []
    for layer in workload.layers:
        hits = hits_by_slots(layer)[1:]
        curves.append([n / max(layer.n_needed(False), 1) for n in hits])
    plots.plot_reuse(curves, title_of(workload), path)


def plot_run(figures: Path, path: Path) -> None:
    """Draw what the time of each decoded token went into, from a file of --longhaul-json.

    Raises ConfigError if it is none, or has no decoded tokens.
    """
    try:
        values = as_dict(json.loads(figures.read_text(encoding="utf-8")), "it")
        rows = [as_dict(row, "a ubatch") for row in as_list(values.get("ubatches"), "ubatches")]
        seconds = [_parts_of(row) for row in rows if row.get("phase") == "decode"]
        model = as_text(values.get("model"), "model")
    except OSError as e:
        raise ConfigError(f"{figures} cannot be read: {e.strerror}") from e
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"{figures} is no file of --longhaul-json: {e}") from e
    if not seconds:
        raise ConfigError(f"{figures} has no decoded tokens")
    n_each = -(-len(seconds) // MOST_BARS)
    groups = [seconds[i : i + n_each] for i in range(0, len(seconds), n_each)]
    means = [[sum(column) / len(group) for column in zip(*group, strict=True)] for group in groups]
    parts = list(zip(PARTS, zip(*means, strict=True), strict=True))
    plots.plot_time(parts, n_each, f"{model}, last {len(seconds)} ubatches of decoding", path)


def _parts_of(row: dict[str, object]) -> list[float]:
    """Return the seconds of a token by PARTS."""
    found = {key: row.get(key) for key in ("compute_s", "wait_s", *PART_KEYS, "n_tokens")}
    values = {}
    for key, value in found.items():
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1e9:
            raise ValueError(f"{key} of a ubatch is {value!r}")
        values[key] = float(value)
    waits = [values[key] for key in PART_KEYS]
    other = max(values["wait_s"] - sum(waits), 0.0)
    computing = max(values["compute_s"] - values["wait_s"], 0.0)
    return [part / max(values["n_tokens"], 1.0) for part in (computing, *waits, other)]


def title_of(workload: Workload) -> str:
    """Say in a line what a plot is of."""
    header: TraceHeader = workload.header
    n_tokens = workload.totals.decode.n_tokens
    experts = span([layer.n_expert for layer in header.layers])
    used = span([layer.n_expert_used for layer in header.layers])
    return (
        f"{header.model or 'no name'}: {len(header.layers)} layers of {experts} experts,"
        f" top-{used}, {n_tokens} decoded tokens"
    )
