"""The commands of `longhaul trace`: look at, replay, draw and convert routing traces.

What does it is imported in the bodies, so that --help needs neither numpy nor matplotlib.
"""

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

import click

from .config import parse_cache
from .errors import ConfigError
from .options import ToolCommand, one_line_errors
from .policy import POLICIES

SHARES = ("6%", "12.5%", "25%", "50%", "75%", "100%")

TRACE = click.argument("path", metavar="TRACE", type=click.Path(path_type=Path))
EXPERT_BYTES = click.option(
    "--expert-bytes",
    metavar="SIZE",
    show_default="none",
    help="size of an expert such as 3.5MiB, for traces that do not say",
)
AS_JSON = click.option("--json", "as_json", is_flag=True, help="print JSON")


def _size(name: str, text: str | None) -> int:
    """Return bytes, 0 where nothing was asked for."""
    size_bytes = parse_cache(text) if text is not None else 0
    if size_bytes is None:
        raise ConfigError(f"{name} {text!r} is no size")
    return size_bytes


@click.group()
def trace() -> None:
    """Look at recorded routing, and replay it through caches without a model.

    A trace is what --longhaul-trace writes, or one of the formats in bench/traces.
    """


@trace.command("info", cls=ToolCommand)
@TRACE
@AS_JSON
@one_line_errors
def info(path: Path, as_json: bool) -> None:
    """Say what a trace holds.

    \b
    longhaul trace info run.lht
    """
    from .survey import survey, survey_lines

    found = survey(path)
    click.echo(json.dumps(asdict(found), indent=1) if as_json else "\n".join(survey_lines(found)))


@trace.command("replay", cls=ToolCommand)
@TRACE
@click.option(
    "--policy",
    "policies",
    metavar="NAME",
    multiple=True,
    show_default="all",
    help=f"{', '.join(POLICIES)}, or belady, the bound; may be given several times",
)
@click.option(
    "--cache",
    "sizes",
    metavar="SIZE",
    multiple=True,
    show_default=", ".join(SHARES),
    help="a share of the experts such as 25%, GiB, or a size such as 512MiB; several times",
)
@click.option(
    "--slots",
    "counts",
    metavar="N",
    type=int,
    multiple=True,
    show_default="none",
    help="so many slots in each layer; several times",
)
@click.option(
    "--plan",
    "plans",
    metavar="FILE",
    type=click.Path(path_type=Path),
    multiple=True,
    show_default="none",
    help="the slots of a plan that `longhaul trace plan` wrote; several times",
)
@click.option(
    "--disk-rate",
    metavar="SIZE",
    default="1GiB",
    show_default=True,
    help="what the disk reads in a second",
)
@click.option(
    "--compute-ms",
    metavar="MS",
    type=float,
    default=0.0,
    show_default=True,
    help="what a token takes with every expert in memory",
)
@EXPERT_BYTES
@AS_JSON
@one_line_errors
def replay(
    path: Path,
    policies: tuple[str, ...],
    sizes: tuple[str, ...],
    counts: tuple[int, ...],
    plans: tuple[Path, ...],
    disk_rate: str,
    compute_ms: float,
    expert_bytes: str | None,
    as_json: bool,
) -> None:
    """Replay a trace through policies at many budgets.

    \b
    longhaul trace replay run.lht
    longhaul trace replay run.lht --policy lru --cache 25% --cache 4 --disk-rate 2.4GiB

    Hit rates are those of decoding from a cold cache, or after the trace's own prompts. tok/s is
    the best that the disk allows: reading and computing at once.
    """
    from .replay_table import (
        Rates,
        caches_of,
        default_caches,
        load_trace,
        replay_lines,
        replay_rows,
    )

    if not 0 <= compute_ms < 1e9:
        raise ConfigError(f"--compute-ms {compute_ms} is not a time")
    rates = Rates(_size("--disk-rate", disk_rate), compute_ms / 1000)
    workload, notes = load_trace(path, _size("--expert-bytes", expert_bytes))
    caches = caches_of(workload, sizes, counts, plans) or default_caches(workload, SHARES)
    start_s = time.perf_counter()
    rows = replay_rows(workload, caches, policies or (*POLICIES, "belady"), rates)
    rate = len(rows) * workload.n_events / (time.perf_counter() - start_s)
    _say(notes)
    if as_json:
        click.echo(json.dumps([asdict(row) for row in rows], indent=1))
    else:
        click.echo("\n".join(replay_lines(rows)))
    _say([f"replayed {workload.n_events} expert ids {len(rows)} times, {rate / 1e6:.1f} M/s"])


@trace.command("plan", cls=ToolCommand)
@TRACE
@click.option(
    "--cache",
    "size",
    metavar="SIZE",
    required=True,
    show_default="none",
    help="a share of the experts such as 25%, GiB, or a size such as 512MiB",
)
@click.option(
    "--out",
    "out",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    show_default="none",
    help="write the plan to this file",
)
@EXPERT_BYTES
@one_line_errors
def plan(path: Path, size: str, out: Path | None, expert_bytes: str | None) -> None:
    """Propose slots for each layer, more where they save more reads.

    \b
    longhaul trace plan run.lht --cache 25% --out slots.json

    Each half of the trace is also fitted by itself and tried on the other one, against the same
    number of slots in every layer.
    """
    from .replay_table import budget_of, load_trace, plan_lines
    from .slot_plan import held_out, plan_of, uniform_slots, write_slot_plan

    workload, notes = load_trace(path, _size("--expert-bytes", expert_bytes))
    budget_bytes = budget_of(workload, size)
    made = plan_of(workload, budget_bytes)
    halves = held_out(workload, budget_bytes)
    if out is not None:
        try:
            write_slot_plan(made, out)
        except OSError as e:
            raise ConfigError(f"{out} cannot be written: {e.strerror}") from e
    _say(notes)
    click.echo("\n".join(plan_lines(made, uniform_slots(workload, budget_bytes), halves)))


@trace.command("plot", cls=ToolCommand)
@click.argument("kind", type=click.Choice(["budget", "use", "reuse", "time"]))
@click.argument("path", metavar="FILE", type=click.Path(path_type=Path))
@click.argument("out", metavar="OUT.png", type=click.Path(dir_okay=False, path_type=Path))
@one_line_errors
def plot(kind: str, path: Path, out: Path) -> None:
    """Draw a trace, or the time of a run.

    \b
    longhaul trace plot budget run.lht out.png   # hit rate against budget, by policy
    longhaul trace plot use run.lht out.png      # how often each expert of each layer is used
    longhaul trace plot reuse run.lht out.png    # how soon experts are used again
    longhaul trace plot time run.json out.png    # time per token, from a file of --longhaul-json

    Needs matplotlib: pip install longhaul[plot].
    """
    from .trace_plots import plot_kind

    _say(plot_kind(kind, path, out))


@trace.command("convert", cls=ToolCommand)
@TRACE
@click.argument("out", metavar="OUT", type=click.Path(dir_okay=False, path_type=Path))
@EXPERT_BYTES
@one_line_errors
def convert(path: Path, out: Path, expert_bytes: str | None) -> None:
    """Write a trace of any format as one of ours.

    \b
    longhaul trace convert bench/traces/olmoe-1b-7b.jsonl olmoe.lht --expert-bytes 3.375MiB
    """
    from .survey import convert_file

    n_records, notes = convert_file(path, out, _size("--expert-bytes", expert_bytes))
    _say(notes)
    click.echo(f"{out}: {n_records} records, {out.stat().st_size} bytes")


def _say(lines: list[str]) -> None:
    for line in lines:
        click.echo(f"longhaul: {line}", err=True)
    sys.stderr.flush()
