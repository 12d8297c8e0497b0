"""Runs llama.cpp's llama-bench while its models stream, and measures sizes against each other."""

import json
import re
import signal
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import click

from . import demo, native
from .advise import advise
from .arguments import option, spelled
from .budget import MIB, RunSizes, least_budget_bytes
from .cgroups import Cgroup, make_cgroup
from .config import Config, parse_cache, parse_caches
from .engine import Engine
from .errors import ConfigError, LonghaulError, ModelUnsupportedError, NativeError
from .experts import MoeModel
from .index import read_index
from .launch import RunPlan, plan_run
from .pools import CPU
from .probe import may_have_devices
from .tool import run_tool, say

TRACE_MODEL = "trace-"  # begins the name of a model whose routing replays a trace
CLOSE_SHARE = 0.95  # of the quickest: the smallest size that reaches it is best
DROP_CACHES = Path("/proc/sys/vm/drop_caches")
_MODEL = ("-m", "--model")
_LOAD_MODE = ("-lm", "--load-mode", "-mmp", "--mmap", "-dio", "--direct-io")
N_PROMPT, N_GEN = 512, 128  # of llama-bench
_UBATCH = ("-ub", "--ubatch-size")
_TYPE_V = ("-ctv", "--cache-type-v")
_N_PROMPT, _N_GEN, _N_DEPTH = ("-p", "--n-prompt"), ("-n", "--n-gen"), ("-d", "--n-depth")
# Of these there may be one value each where runs are measured against each other.
_SINGLE = (
    *(_N_PROMPT, _N_GEN, _N_DEPTH, _UBATCH, _TYPE_V, _MODEL),
    *(("-b", "--batch-size"), ("-t", "--threads"), ("-ctk", "--cache-type-k")),
    *(("-ngl", "--n-gpu-layers"), ("-fa", "--flash-attn")),
)


class Preparer:
    """Opens an engine for each model that the bench loads with streaming."""

    def __init__(self, config: Config, kv_element_bytes: float) -> None:
        self._config = config
        self._kv_element_bytes = kv_element_bytes
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
        cache_bytes, by_device = parse_caches(cache)
        config = replace(
            self._config,
            cache_bytes=cache_bytes,
            cache_by_device=by_device,
            trace_path=self._trace(),
        )
        sizes = RunSizes(n_ctx, n_ubatch, 0, kv_element_bytes=self._kv_element_bytes)
        plan = plan_run(model, sizes, config)
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
        if any(name.upper() != CPU for name in parse_caches(cache)[1]):
            raise ConfigError(
                f"{cache!r}: a bench does not count devices; give one size for all memory together"
            )
    if option(args, _MODEL, {}) is None and not _names_remote(args):
        args = ["--model", str(demo.ensure(progress=say)), *args]
    if not any(spelled(word) in _LOAD_MODE for word in args):
        args = ["--load-mode", "longhaul", *args]
    tokens, order = token_order(args)
    say(f"tokens  {tokens}")
    if may_have_devices(args, {}):
        say("warning devices are not counted: sizes are for all memory together, terms as in RAM")
    reads = any("longhaul" in word.split(",") for word in args)
    native.require_libraries(reads=reads, exact=True)
    kv_types = [option(args, names, {}) or "" for names in (("-ctk", "--cache-type-k"), _TYPE_V)]
    has_floats = any("f32" in text for text in kv_types)
    preparer = Preparer(config, 4.0 if has_floats else 2.0)
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
        first = Path(path.split(",")[0]) if path else None
        is_trace = first is not None and read_index(first).name.startswith(TRACE_MODEL)
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
    _check_single(args)
    path = option(args, _MODEL, {})
    words = list(args) if path else ["--model", str(demo.ensure(progress=say)), *args]
    model = read_index(Path(path or words[1]))
    if not model.is_moe:
        raise ModelUnsupportedError(f"{model.path} has no routed experts: nothing is streamed")
    return model, words


def _count(args: Sequence[str], names: Sequence[str], default: int) -> int:
    """Return the only value of an option; raises ConfigError for a list, a range or no number."""
    text = option(args, names, {})
    if text is None:
        return default
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise ConfigError(f"{names[-1]} {text!r} is not one number, as is needed here")
    return int(text)


def _sizes(args: Sequence[str]) -> RunSizes:
    n_prompt, n_gen = _count(args, _N_PROMPT, N_PROMPT), _count(args, _N_GEN, N_GEN)
    n_ctx = max(n_prompt, n_gen) + _count(args, _N_DEPTH, 0)
    return RunSizes(max(n_ctx, 256), _count(args, _UBATCH, N_PROMPT), 0)


def _check_single(args: Sequence[str]) -> None:
    """Refuse what would give several rows: they could not be told apart. Raises ConfigError."""
    for names in _SINGLE:
        given = [value for word, value in pairwise(args) if spelled(word) in names]
        if len(given) > 1 or any("," in value for value in given):
            raise ConfigError(f"{names[-1]} has several values; give one here")
    if any(word == "-pg" for word in args):
        raise ConfigError("-pg cannot be used here; give --n-prompt and --n-gen")


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
    n_gen = _count(words, _N_GEN, N_GEN)
    if n_gen == 0 or _count(words, _N_PROMPT, 0) > 0:
        raise ConfigError("a sweep decodes: give --n-gen, and no --n-prompt")
    if option(words, _N_PROMPT, {}) is None:
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
    code = 0
    try:
        with click.progressbar(fitting, label="sweep", file=sys.stderr, show_pos=True) as bar:
            for budget in bar:
                more = ["--load-mode", "longhaul", "--longhaul-cache", f"{budget}B"]
                rows = bench_rows([*words, *more])
                points += [_point(row, budget, model) for row in rows if row["n_gen"]]
    except LonghaulError as e:  # what was measured is worth something
        say(f"error: {e}")
        code = 1
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
    return code


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
    n_prompt, n_gen = _count(words, _N_PROMPT, N_PROMPT), _count(words, _N_GEN, N_GEN)
    tests = [(n_prompt, 0)] * (n_prompt > 0) + [(0, n_gen)] * (n_gen > 0)
    if not tests:
        raise ConfigError("--n-prompt and --n-gen are 0: there is nothing to compare")
    rest = _without(words, (*_N_PROMPT, *_N_GEN))
    with _ended_by_signals(), _limit(plan) as (cgroup, said):
        say(said)
        for _, test, (mode, more) in product(range(rounds), tests, modes.items()):
            sizes = ["--n-prompt", str(test[0]), "--n-gen", str(test[1])]
            _drop_page_cache()  # each test in a process of its own: all of them begin cold
            for row in bench_rows([*rest, *sizes, *more, "--no-warmup", "-r", "1"], cgroup):
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


def _without(args: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return options without some that have a value."""
    kept, skips = [], False
    for word in args:
        if skips or spelled(word) in names:
            skips = not skips
        else:
            kept.append(word)
    return kept


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Have signals that end a process unwind it first: a cgroup is not to stay behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = {n: signal.signal(n, end) for n in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _limit(plan: RunPlan) -> Iterator[tuple[Cgroup | None, str]]:
    """Yield a cgroup of what is planned, or None, and the line that says which."""
    limit_bytes = plan.planned.total_bytes
    with ExitStack() as stack:
        try:
            cgroup = stack.enter_context(make_cgroup())
            cgroup.set_limit(limit_bytes)
        except OSError as e:
            yield None, f"limit   none: no memory cgroup can be made here ({e.strerror or e})"
            return
        yield cgroup, f"limit   {limit_bytes / MIB:.0f} MiB for both, page cache included"


def _drop_page_cache() -> None:
    subprocess.run(["sync"], check=False)
    try:
        DROP_CACHES.write_text("3")
    except OSError:
        say("warning the page cache cannot be emptied here: the first reads may be too quick")
