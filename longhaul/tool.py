"""Runs one of llama.cpp's tools in this process while its model streams."""

import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from . import demo, live, machine, native, report
from .arguments import config_files, names_model, only_asks, read_arguments, spelled, workers
from .config import Config
from .engine import Engine
from .figures import RunFigures, write_json
from .index import read_index
from .launch import CHATS, RunPlan, plan_run, tool_sizes
from .machine import peak_rss_bytes
from .probe import placed
from .server_arguments import ServerArguments, read_server_arguments
from .warm import warming
from .watch import ignore_signals, watching

NO_WARMUP = ["--no-warmup"]  # which would read experts before anybody asked for a word
NO_PAST_PROMPTS = ["--cache-ram", "0"]  # by default 8 GiB, which nobody would have planned

WITHOUT_MODEL = ("quantize", "rpc-server")


def run_command(
    tool: str, program: str, config: Config | None, args: Sequence[str], *, help_llama: bool
) -> int:
    """Run a tool as a command does: for its help, whole (`config` is None), or streaming."""
    ignore_signals()
    if config is not None and not help_llama and not only_asks(args):
        return run(tool, program, config, args)
    native.require_libraries(exact=tool == "rpc-server")  # which computes for those who stream
    if help_llama:
        return run_tool(tool, program, ["--help"])
    if tool not in WITHOUT_MODEL and not only_asks(args) and not names_model(args):
        args = ["--model", str(demo.ensure(progress=say)), *args]
    return run_tool(tool, program, args)


def run_tool(tool: str, program: str, args: Sequence[str]) -> int:
    """Run a tool; Ctrl-C is its own matter, where Python would note it and wait for the end.

    Raises NativeError if another machine that it is to use cannot be reached.
    """
    for endpoint in workers(args):
        native.add_worker(endpoint)
    is_pythons = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_pythons:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        return native.run_tool(tool, program, args)
    finally:
        if is_pythons:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def run(tool: str, program: str, config: Config, args: Sequence[str]) -> int:
    """Run a tool with streaming where the model has routed experts; return its exit code.

    Raises ConfigError, ModelError or ReadError before anything is loaded. A read that fails later
    is told at once and makes the exit code 1.
    """
    arguments = read_arguments(args)
    path = arguments.model
    if path is None:
        path = demo.ensure(progress=say)
        args = ["--model", str(path), *args]
    tell = _silence if "--log-disable" in map(spelled, args) else say
    model = read_index(path)
    if not model.is_moe:
        tell(
            f"model   {model.name or path.name} ({model.arch}) has no routed experts:"
            " nothing is streamed"
        )
        native.require_libraries()
        return run_tool(tool, program, args)
    server = read_server_arguments(args) if tool == "server" else None
    sizes = tool_sizes(tool, arguments, model, server)
    may_cut_context = (
        arguments.n_ctx is None
        and tool != "perplexity"
        and not (server and server.n_ctx_per_sequence)
    )
    placement = placed(tool, args, path, config, tell, may_cut_context=may_cut_context)
    if placement:  # which knows of the other files where they go
        sizes = replace(sizes, other_bytes=sizes.other_bytes - arguments.other_bytes)
    plan = plan_run(
        model,
        sizes,
        config,
        may_cut_context=may_cut_context,
        may_cut_checkpoints=arguments.n_checkpoints is None,
        placement=placement,
    )
    native.require_libraries(reads=not plan.has_all_slots, exact=True)
    with (
        Engine(model, plan.n_slots, config, on_error=_say_error, tier=plan.tier) as engine,
        ExitStack() as stack,
    ):
        if placement:
            engine.plan_devices(placement.device_of, plan.later_bytes)
        for line in [*plan.lines(), report.read_line(engine.pool.modes, config.n_io_threads)]:
            tell(line)
        stack.enter_context(warming(engine, config.warm_path, tell))
        stack.enter_context(watching(engine, plan, tell))
        for path in _cached_all_the_same(model.shards, engine.pool.modes):
            tell(
                f"warning {path}: this file system takes uncached reads, but caches what they read"
            )
        for path in config_files():
            tell(f"warning what {path} says is not in this plan")
        extra_args = [*NO_WARMUP, *plan.extra_args]
        cache_ram_mib = arguments.cache_ram_mib
        if tool in CHATS and cache_ram_mib is None:
            extra_args += NO_PAST_PROMPTS
        elif tool in CHATS and cache_ram_mib is not None and cache_ram_mib < 0:
            tell("warning prompts of the past have no limit (--cache-ram), so they are not planned")
        if server:
            extra_args += server.extra_args(plan.n_ubatch_asked)
            if config.page_port is not None:
                page = _page(plan, engine, server, config.page_port)
                tell(stack.enter_context(page))
        code = run_tool(tool, program, [*extra_args, *args, *plan.final_args])
        _tell_figures(run_figures(plan, engine, config), config, tell)
        # a server has told whoever asked, and has gone on since
        has_failed = engine.take_error() is not None and not server
        return 1 if has_failed else code


def _cached_all_the_same(shards: Sequence[Path], modes: Sequence[str]) -> list[Path]:
    """Return shards that are read past the page cache, by what the system said, and are not."""
    found = []
    for path, mode in zip(shards, modes, strict=False):
        with suppress(OSError):  # it cannot be told
            if mode == "direct" and machine.leaves_page_cache_alone(path) is False:
                found.append(path)
    return found


@contextmanager
def _page(plan: RunPlan, engine: Engine, server: ServerArguments, port: int) -> Iterator[str]:
    """Have the page served meanwhile where it can be; yield the line that says so."""
    if config_files():  # an API key may be in one
        yield "warning no page: there is a configuration file of llama.cpp's"
        return
    with live.page(plan, engine, server, port) as (address, is_up):
        yield f"page    {address}" if is_up else f"warning no page: {address}"


def run_figures(plan: RunPlan, engine: Engine, config: Config) -> RunFigures:
    """Return the figures of a run up to now."""
    sizes = engine.slot_bytes()
    return RunFigures(
        model=plan.model.name or plan.model.path.name,
        arch=plan.model.arch,
        n_slots=plan.n_slots,
        n_ubatch=plan.n_ubatch,
        n_stages=plan.n_stages,
        policy=config.policy,
        budget_bytes=plan.budget_bytes,
        slot_bytes=sizes.all,
        repacked_bytes=sizes.repacked,
        device_bytes=sizes.device,
        tier_bytes=sizes.tier,
        locked_bytes=sizes.locked,
        planned_bytes=plan.planned.total_bytes,
        peak_rss_bytes=peak_rss_bytes(),
        stats=engine.stats(),
        records=tuple(engine.records()),
        devices=tuple(pool.as_dict() for pool in plan.pools),
    )


def _tell_figures(run: RunFigures, config: Config, tell: Callable[[str], None]) -> None:
    if run.stats.total.n_tokens or run.stats.total.n_errors:
        for line in report.summary_lines(run):
            tell(line)
    if config.json_path:
        try:
            write_json(run, config.json_path)
        except OSError as e:
            say(f"warning the figures are not in {config.json_path}: {e.strerror}")


def _say_error(error: BaseException) -> None:
    say(f"error: {error}")


def _silence(line: str) -> None:
    """Say nothing, as llama.cpp does with --log-disable."""


def say(line: str) -> None:
    """Write one line of ours to stderr."""
    print(f"longhaul: {line}", file=sys.stderr, flush=True)
