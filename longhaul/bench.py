"""The longhaul-bench command: llama.cpp's llama-bench with routed experts streamed from disk."""

import sys
from dataclasses import replace
from pathlib import Path

import click

from .config import Config
from .options import (
    ARGS,
    PASS_THROUGH,
    ToolCommand,
    help_llama_option,
    one_line_errors,
    shared_options,
)

SUBCOMMANDS = ("sweep", "compare")


@click.command("longhaul-bench", cls=ToolCommand, context_settings=PASS_THROUGH)
@click.option(
    "--longhaul-cache",
    envvar="LONGHAUL_CACHE",
    show_envvar=True,
    metavar="SIZE[,SIZE...]",
    default="auto",
    show_default=True,
    help="memory for routed experts, one or several sizes: each is a row of the table",
)
@click.option(
    "--longhaul-trace",
    envvar="LONGHAUL_TRACE",
    show_envvar=True,
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    show_default="none",
    help="record which experts each layer asks for; of the second load in FILE.2, and so on",
)
@ARGS
@one_line_errors
@shared_options
@help_llama_option("longhaul-bench")
def bench(
    args: tuple[str, ...],
    config: Config,
    help_llama: bool,
    longhaul_cache: str,
    longhaul_trace: Path | None,
) -> None:
    """Measure how quick a model is whose experts do not fit in memory, as llama-bench does.

    \b
    longhaul-bench --model M.gguf --longhaul-cache 1,2,4 --n-prompt 512 --n-gen 64
    longhaul-bench --model M.gguf --load-mode longhaul,mmap --no-warmup --repetitions 1
    longhaul-bench sweep --model M.gguf          which size of the cache is best
    longhaul-bench compare --model M.gguf        against plain mmap under the same limit

    --load-mode longhaul, the default here, streams; the others load as llama.cpp does, in the same
    table. With --no-warmup each test begins with nothing in memory. --prompt-file FILE takes the
    tokens of a text, since random ones are routed unlike real ones; models that replay a trace take
    their ids in order. All other options go to llama.cpp's llama-bench unchanged.
    """
    from .bench_run import run_bench  # here, so that --help works before anything is built

    config = replace(config, trace_path=longhaul_trace)
    sys.exit(run_bench(args, config, longhaul_cache, help_llama=help_llama))


@click.command("longhaul-bench sweep", cls=ToolCommand, context_settings=PASS_THROUGH)
@click.option("--steps", type=int, default=8, show_default=True, help="sizes from least to all")
@click.option(
    "--png",
    type=click.Path(dir_okay=False, path_type=Path),
    show_default="none",
    help="draw tok/s by size into this file",
)
@click.option("--json", "as_json", is_flag=True, help="print JSON")
@ARGS
@one_line_errors
def sweep(args: tuple[str, ...], steps: int, png: Path | None, as_json: bool) -> None:
    """Measure decoding with caches from the least to all of the experts; say which is best.

    \b
    longhaul-bench sweep --model M.gguf --n-gen 64 --png sweep.png

    Takes the options of llama-bench. The best size is the smallest that comes within 5 % of the
    quickest. Sizes that do not fit in what is available are left out. Ctrl-C keeps what was
    measured.
    """
    from .bench_run import run_sweep

    sys.exit(run_sweep(args, steps, png, as_json=as_json))


@click.command("longhaul-bench compare", cls=ToolCommand, context_settings=PASS_THROUGH)
@click.option(
    "--longhaul-cache",
    envvar="LONGHAUL_CACHE",
    show_envvar=True,
    metavar="SIZE",
    default="auto",
    show_default=True,
    help="memory for routed experts",
)
@click.option("--rounds", type=int, default=3, show_default=True, help="times that each is run")
@click.option("--json", "as_json", is_flag=True, help="print JSON")
@ARGS
@one_line_errors
def compare(args: tuple[str, ...], longhaul_cache: str, rounds: int, as_json: bool) -> None:
    """Measure against plain mmap of the same build under the same memory limit, taking turns.

    \b
    longhaul-bench compare --model M.gguf --longhaul-cache 2 --n-gen 24

    Takes llama-bench's options. The limit is a memory cgroup of what streaming is planned to take,
    which needs to be allowed (root); without it both run unlimited, and that is said.
    """
    from .bench_run import run_compare

    sys.exit(run_compare(args, longhaul_cache, rounds, as_json=as_json))


def main() -> None:
    """Run the command, or the one that the first word names."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name in SUBCOMMANDS:
        command = {"sweep": sweep, "compare": compare}[name]
        command(args=sys.argv[2:], prog_name=f"longhaul-bench {name}")
    else:
        bench(prog_name="longhaul-bench")
