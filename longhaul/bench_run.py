"""Runs llama.cpp's llama-bench while its models stream, and measures sizes against each other."""

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click

from . import demo, native
from .advise import advise
from .arguments import option, spelled
from .budget import MIB, RunSizes, least_budget_bytes
from .cgroups import Cgroup, make_cgroup
from .config import Config, parse_cache
from .engine import Engine
from .errors import ConfigError, LonghaulError, ModelUnsupportedError, NativeError
from .experts import MoeModel
from .index import read_index
from .launch import RunPlan, plan_run
from .tool import run_tool, say

TRACE_MODEL = "trace-"  # begins the name of a model whose routing replays a trace
CLOSE_SHARE = 0.95  # of the quickest: the smallest size that reaches it is best
DROP_CACHES = Path("/proc/sys/vm/drop_caches")
_MODEL = ("-m", "--model")
_LOAD_MODE = ("-lm", "--load-mode", "-mmp", "--mmap", "-dio", "--direct-io")
_N_CTX_DEFAULT = 512  # of llama-bench: a prompt of 512, or 128 generated
_UBATCH = ("-ub", "--ubatch-size")


class Preparer:
    """Opens an engine for each model that the bench loads with streaming."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._engine: Engine | None = None
        self._n_loads = 0
        self.has_failed = False

    def prepare(self, path: Path, cache: str | None, n_ctx: int, n_ubatch: int) -> None:
        """Plan and open what the next load streams with; `cache` None: it is loaded whole.

        Raises LonghaulError if it cannot be streamed so.
        """
        self.close()
        if cache is None:
            return
        model = read_index(path)
        if not model.is_moe:
            raise ModelUnsupportedError(f"{path} has no routed experts")
        config = replace(self._config, cache_bytes=parse_cache(cache), trace_path=self._trace())
        plan = plan_run(model, RunSizes(n_ctx, n_ubatch, 0), config)
        for line in plan.lines():
            say(line)
        self._engine = Engine(model, plan.n_slots, config, on_error=self._note)

    def _trace(self) -> Path | None:
        """Return where to record: the file that was named, then that with .2, .3, ... behind it."""
        path = self._config.trace_path
        self._n_loads += 1
        if path is None or self._n_loads == 1:
            return path
        return path.with_name(f"{path.name}.{self._n_loads}")

    def _note(self, error: BaseException) -> None:
        self.has_failed = True
        say(f"error: {error}")

    def close(self) -> None:
        """Close what is open; its model has been freed."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None


def run_bench(args: Sequence[str], config: Config, caches: str, *, help_llama: bool) -> int:
    """Run llama-bench; return its exit code, or 1 after a failed read.

    Raises ConfigError for a cache that is no size, ModelError for a file that is no model.
    """
    if help_llama:
        native.require_libraries()
        return run_tool("bench", "longhaul-bench", ["--help"])
    for cache in caches.split(","):
        parse_cache(cache)
    if option(args, _MODEL, {}) is None and not _names_remote(args):
        args = ["--model", str(demo.ensure(progress=say)), *args]
    if not any(spelled(word) in _LOAD_MODE for word in args):
        args = ["--load-mode", "longhaul", *args]
    tokens, order = token_order(args)
    say(f"tokens  {tokens}")
    native.require_libraries(reads=True)
    preparer = Preparer(config)
    with native.preparing(preparer.prepare):
        words = ["--longhaul-cache", caches, *order, *args]
        code = run_tool("bench", "longhaul-bench", words)
        try:
            preparer.close()
        except NativeError:  # the bench gave up and left its model loaded
            code = code or 1
    return code or int(preparer.has_failed)


def _names_remote(args: Sequence[str]) -> bool:
    return any(spelled(word) in ("-hf", "-hfr", "--hf-repo") for word in args)


def token_order(args: Sequence[str]) -> tuple[str, list[str]]:
    """Say which tokens are evaluated, and by which option."""
    file = option(args, ("--prompt-file",), {})
    if file is not None:
        return f"of the text in {file}", []
    if "--tokens-in-order" in map(spelled, args):
        return "ids in their order", []
    path = option(args, _MODEL, {})
    try:
        is_trace = path is not None and read_index(Path(path)).name.startswith(TRACE_MODEL)
    except LonghaulError:  # the bench says it
        is_trace = False
    if is_trace:
        return "ids in their order, as the model replays a trace", ["--tokens-in-order"]
    return "random, which are routed unlike real ones: --prompt-file FILE takes a text", []


# --- several runs ---------------------------------------------------------------------------------


Row = dict[str, Any]


def bench_rows(args: Sequence[str], cgroup: Cgroup | None = None) -> list[Row]:
    """Run longhaul-bench in a process of its own and return its rows; raises NativeError."""
    code = "import sys; import longhaul.bench as m; m.main()"
    command = [sys.executable, "-c", code, *args, "--output", "jsonl"]
    done = subprocess.run(
        cgroup.within(command) if cgroup else command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
    )
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode != 0 or not rows:
        lines = [line for line in done.stderr.splitlines() if "error" in line.lower()]
        reason = lines[-1] if lines else f"exit code {done.returncode}"
        raise NativeError(f"the bench failed: {reason.removeprefix('longhaul: error: ')}")
    return rows


def _model_of(args: Sequence[str]) -> tuple[MoeModel, list[str]]:
    """Return the model, and the options with it."""
    for word in args:
        if spelled(word) in _LOAD_MODE:
            raise ConfigError(f"{word} is chosen here; leave it out")
    path = option(args, _MODEL, {})
    words = list(args) if path else ["--model", str(demo.ensure(progress=say)), *args]
    model = read_index(Path(path or words[1]))
    if not model.is_moe:
        raise ModelUnsupportedError(f"{model.path} has no routed experts: nothing is streamed")
    return model, words


def _sizes(args: Sequence[str]) -> RunSizes:
    counts = [
        int(option(args, names, {}) or default)
        for names, default in (
            (("-p", "--n-prompt"), _N_CTX_DEFAULT),
            (("-n", "--n-gen"), _N_CTX_DEFAULT),
            (("-d", "--n-depth"), 0),
            (_UBATCH, _N_CTX_DEFAULT),
        )
    ]
    return RunSizes(max(sum(counts[:3]), 256), counts[3], 0)


@dataclass(frozen=True, slots=True)
class Point:
    """Hold what one size of the cache gave while decoding."""

    budget_bytes: int
    slot_bytes: int
    resident_share: float
    hit_rate: float
    read_bytes_per_token: float
    compute_ms_per_token: float  # without waiting
    tokens_per_s: float


def sweep_budgets(model: MoeModel, steps: int) -> list[int]:
    """Return sizes from the least to all, each about as much larger than the one before."""
    least, most = least_budget_bytes(model.layers), model.expert_bytes
    if steps < 2:
        raise ConfigError(f"{steps} steps make no sweep; give 2 or more")
    growth = (most / least) ** (1 / (steps - 1))
    return [*(int(least * growth**i) for i in range(steps - 1)), most]


def run_sweep(args: Sequence[str], steps: int, png: Path | None, *, as_json: bool) -> int:
    """Measure sizes upwards, and print the table, the best of them, and a plot if asked for.

    Ctrl-C ends it and keeps what was measured. Raises ConfigError if no size fits.
    """
    model, words = _model_of(args)
    if option(words, ("-p", "--n-prompt"), {}) is None:
        words += ["--n-prompt", "0"]
    budgets = sweep_budgets(model, steps)
    fitting = [
        budget
        for budget in budgets
        if advise(model, _sizes(words), Config(cache_bytes=budget)).fits
    ]
    if not fitting:
        raise ConfigError("not even the least cache fits in the memory that is available")
    if len(fitting) < len(budgets):
        say(f"sizes   from {budgets[len(fitting)] / MIB:.0f} MiB on do not fit and are left out")
    points: list[Point] = []
    try:
        with click.progressbar(fitting, label="sweep", file=sys.stderr, show_pos=True) as bar:
            for budget in bar:
                more = ["--load-mode", "longhaul", "--longhaul-cache", f"{budget}B"]
                rows = bench_rows([*words, *more])
                points += [_point(row, budget, model) for row in rows if row["n_gen"]]
    except KeyboardInterrupt:
        say(f"stopped after {len(points)} of {len(fitting)} sizes")
    if not points:
        return 1
    best = best_point(points)
    if as_json:
        shown = {"points": [asdict(point) for point in points], "best": asdict(best)}
        click.echo(json.dumps(shown, indent=1))
    else:
        click.echo("\n".join(sweep_table(points, best)))
    if png is not None:
        from .plots import plot_sweep

        plot_sweep(
            [(point.slot_bytes, point.tokens_per_s) for point in points], model.expert_bytes, png
        )
    return 0


def _point(row: Row, budget: int, model: MoeModel) -> Point:
    ms_per_token = 1000 / row["avg_ts"]
    return Point(
        budget_bytes=budget,
        slot_bytes=row["budget_bytes"],
        resident_share=row["budget_bytes"] / model.expert_bytes,
        hit_rate=row["hit_rate"],
        read_bytes_per_token=row["mib_per_token"] * MIB,
        compute_ms_per_token=ms_per_token * (1 - row["wait_share"]),
        tokens_per_s=row["avg_ts"],
    )


def best_point(points: Sequence[Point]) -> Point:
    """Return the smallest size that comes close to the quickest, since memory has other uses."""
    most = max(point.tokens_per_s for point in points)
    close = [point for point in points if point.tokens_per_s >= CLOSE_SHARE * most]
    return min(close, key=lambda point: point.slot_bytes)


def sweep_table(points: Sequence[Point], best: Point) -> list[str]:
    """Write the sizes as a markdown table, and which is best."""
    lines = [
        "| cache MiB | resident | hits | read per token MiB | compute per token ms | tok/s | |",
        "|---:|---:|---:|---:|---:|---:|---|",
    ]
    lines += [
        f"| {p.slot_bytes / MIB:.0f} | {p.resident_share:.0%} | {p.hit_rate:.1%}"
        f" | {p.read_bytes_per_token / MIB:.1f} | {p.compute_ms_per_token:.1f}"
        f" | {p.tokens_per_s:.2f} | {'best' if p is best else ''} |"
        for p in points
    ]
    text = f"{best.slot_bytes / MIB:.0f} MiB come within 5 % of the quickest"
    return [*lines, "", f"best: --longhaul-cache {best.budget_bytes}B; {text}"]


# --- against mmap ---------------------------------------------------------------------------------


def run_compare(args: Sequence[str], cache: str, rounds: int, *, as_json: bool) -> int:
    """Run streaming and mmap in turn under the same limit; print medians and their ratio."""
    model, words = _model_of(args)
    if rounds < 1:
        raise ConfigError(f"{rounds} rounds compare nothing; give 1 or more")
    plan = plan_run(model, _sizes(words), Config(cache_bytes=parse_cache(cache)))
    modes = {
        "longhaul": ["--load-mode", "longhaul", "--longhaul-cache", f"{plan.budget_bytes}B"],
        "mmap": ["--load-mode", "mmap"],
    }
    rates: dict[str, dict[str, list[float]]] = {mode: {} for mode in modes}
    with _limit(plan) as (cgroup, said):
        say(said)
        for _ in range(rounds):
            for mode, more in modes.items():
                _drop_page_cache()
                for row in bench_rows([*words, *more, "--no-warmup", "-r", "1"], cgroup):
                    rates[mode].setdefault(_test_name(row), []).append(row["avg_ts"])
    found = [
        {
            "test": test,
            "longhaul": statistics.median(rates["longhaul"][test]),
            "mmap": statistics.median(rates["mmap"][test]),
            "rounds": rounds,
            "limit_bytes": plan.planned.total_bytes if cgroup else None,
        }
        for test in rates["longhaul"]
    ]
    if as_json:
        click.echo(json.dumps(found, indent=1))
        return 0
    click.echo("| test | longhaul tok/s | mmap tok/s | ratio |\n|---|---:|---:|---:|")
    for row in found:
        ratio = row["longhaul"] / row["mmap"]  # type: ignore[operator]
        click.echo(f"| {row['test']} | {row['longhaul']:.2f} | {row['mmap']:.2f} | {ratio:.2f}x |")
    return 0


def _test_name(row: Row) -> str:
    parts = [f"{name}{row[key]}" for name, key in (("pp", "n_prompt"), ("tg", "n_gen")) if row[key]]
    return "+".join(parts) + (f" @ d{row['n_depth']}" if row["n_depth"] else "")


@contextmanager
def _limit(plan: RunPlan) -> Iterator[tuple[Cgroup | None, str]]:
    """Yield a cgroup of what is planned, or None, and the line that says which."""
    limit_bytes = plan.planned.total_bytes
    try:
        made = make_cgroup()
        cgroup = made.__enter__()
    except OSError as e:
        yield None, f"limit   none: no memory cgroup can be made here ({e.strerror or e})"
        return
    try:
        cgroup.set_limit(limit_bytes)
        yield cgroup, f"limit   {limit_bytes / MIB:.0f} MiB for both, page cache included"
    finally:
        made.__exit__(None, None, None)


def _drop_page_cache() -> None:
    subprocess.run(["sync"], check=False)
    try:
        DROP_CACHES.write_text("3")
    except OSError:
        say("warning the page cache cannot be emptied here: the first reads may be too quick")
