"""Runs one of llama.cpp's tools in this process while its model streams."""

import os
import resource
import sys
from collections.abc import Sequence
from pathlib import Path

from . import demo, native, report
from .arguments import LlamaArguments, read_arguments
from .budget import BudgetPlan, RunSizes, auto_budget, memory_limit, plan_slots
from .config import Config
from .engine import CHUNK_BYTES, Engine
from .experts import MoeModel
from .index import read_index

READ_SLACK_BYTES = 8192  # of each worker's buffer, for the blocks that a range starts and ends in


def run_command(
    tool: str, program: str, config: Config | None, args: Sequence[str], *, help_llama: bool
) -> int:
    """Run a tool as a command does: for its help, whole (`config` is None), or streaming."""
    if help_llama:
        return native.run_tool(tool, program, ["--help"])
    if config is None:
        return native.run_tool(tool, program, args)
    return run(tool, program, config, args)


def run(tool: str, program: str, config: Config, args: Sequence[str]) -> int:
    """Run a tool with streaming where the model has routed experts; return its exit code.

    Raises ConfigError or ModelError before anything is loaded, and what a failed read raised after
    the tool has returned.
    """
    arguments = read_arguments(args)
    path = arguments.model
    if path is None:
        path = demo.ensure(progress=say)
        args = ["--model", str(path), *args]
    model = read_index(path)
    if not model.is_moe:
        say(
            f"model   {model.name or path.name} ({model.arch}) has no routed experts:"
            " nothing is streamed"
        )
        return native.run_tool(tool, program, args)
    return _run_streaming(tool, program, config, args, arguments, model)


def _run_streaming(
    tool: str,
    program: str,
    config: Config,
    args: Sequence[str],
    arguments: LlamaArguments,
    model: MoeModel,
) -> int:
    plan, budget_bytes = _plan_budget(config, arguments, model)
    n_slots = plan_slots(model.layers, budget_bytes)
    base_bytes = rss_bytes()
    with Engine(model, n_slots, config, on_error=lambda error: say(f"error   {error}")) as engine:
        planned = report.planned_memory(plan, engine.budget_bytes, base_bytes)
        automatic = config.cache_bytes is None
        say(report.model_line(model))
        for line in report.budget_lines(model, n_slots, budget_bytes, automatic=automatic):
            say(line)
        say(report.ubatch_line(engine.n_ubatch_limit, arguments.n_ubatch))
        say(report.read_line(engine.pool.modes, config.n_io_threads))
        say(planned.line())
        code = native.run_tool(tool, program, args)
        sys.stdout.flush()
        for line in report.summary_lines(engine.stats(), peak_rss_bytes(), planned.total_bytes):
            say(line)
        engine.raise_kept()
        return code


def _plan_budget(
    config: Config, arguments: LlamaArguments, model: MoeModel
) -> tuple[BudgetPlan, int]:
    sizes = RunSizes(
        n_ctx=arguments.n_ctx,
        n_ubatch=arguments.n_ubatch,
        read_buffer_bytes=config.n_io_threads * (CHUNK_BYTES + READ_SLACK_BYTES),
        n_seq=arguments.n_seq,
        kv_element_bytes=arguments.kv_element_bytes,
        flash_attention=arguments.flash_attention,
        other_bytes=arguments.other_bytes,
    )
    limit = memory_limit()
    plan = auto_budget(model, limit, sizes)
    return plan, plan.budget_bytes if config.cache_bytes is None else config.cache_bytes


def say(line: str) -> None:
    """Write one line of ours to stderr."""
    print(f"longhaul: {line}", file=sys.stderr, flush=True)


def peak_rss_bytes() -> int:
    """Return the most memory that this process ever had resident, by the kernel's figure."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def rss_bytes() -> int:
    """Return the memory that this process has resident now; the peak where the kernel is silent."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return peak_rss_bytes()
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
