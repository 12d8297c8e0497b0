"""The longhaul command: llama.cpp's other tools with routed experts streamed from disk."""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

import click

from .config import Config
from .options import (
    ARGS,
    PASS_THROUGH,
    ToolCommand,
    help_llama_option,
    one_line_errors,
    streaming_options,
    streaming_tool,
)
from .trace_commands import trace


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="longhaul")
def main() -> None:
    """Run Mixture-of-Experts models that are larger than memory."""


@main.command("completion", cls=ToolCommand, context_settings=PASS_THROUGH)
@streaming_tool("longhaul completion")
def completion(args: tuple[str, ...], config: Config | None, help_llama: bool) -> None:
    """Complete a text, as llama-completion does.

    \b
    longhaul completion --model M.gguf --longhaul-cache 2 -p "Once upon a time" -n 64
    """
    from .tool import run_command

    sys.exit(run_command("completion", "longhaul completion", config, args, help_llama=help_llama))


@main.command("perplexity", cls=ToolCommand, context_settings=PASS_THROUGH)
@streaming_tool("longhaul perplexity")
def perplexity(args: tuple[str, ...], config: Config | None, help_llama: bool) -> None:
    """Measure a model on a text, as llama-perplexity does.

    \b
    longhaul perplexity --model M.gguf --longhaul-cache 2 --file text.txt
    """
    from .tool import run_command

    sys.exit(run_command("perplexity", "longhaul perplexity", config, args, help_llama=help_llama))


@main.command("quantize", cls=ToolCommand, context_settings=PASS_THROUGH)
@ARGS
@one_line_errors
@help_llama_option("longhaul quantize")
def quantize(args: tuple[str, ...], help_llama: bool) -> None:
    """Convert a GGUF to another type, as llama-quantize does; nothing is streamed.

    \b
    longhaul quantize F16.gguf Q4_0.gguf Q4_0
    """
    from .tool import run_command

    sys.exit(run_command("quantize", "longhaul quantize", None, args, help_llama=help_llama))


@main.command("rpc-server", cls=ToolCommand, context_settings=PASS_THROUGH)
@ARGS
@one_line_errors
@help_llama_option("longhaul rpc-server")
def rpc_server(args: tuple[str, ...], help_llama: bool) -> None:
    """Lend this machine's memory and devices to others, as ggml-rpc-server does.

    \b
    longhaul rpc-server --host 192.168.0.2 --port 50052
    longhaul-cli --model M.gguf --rpc 192.168.0.2:50052 --n-gpu-layers 99     # on another machine

    Whoever reaches the port can use it, and read what is in its memory: only for networks of your
    own. It needs no model, and serves one client after the other.
    """
    from .tool import run_command

    sys.exit(run_command("rpc-server", "longhaul rpc-server", None, args, help_llama=help_llama))


F = TypeVar("F", bound=Callable[..., object])


def _shape_option(name: str, what: str, default: str = "none") -> Callable[[F], F]:
    return click.option(name, type=int, show_default=default, help=what)


@main.command("plan", cls=ToolCommand, context_settings=PASS_THROUGH)
@click.option("--json", "as_json", is_flag=True, help="print JSON")
@_shape_option("--n-layer", "layers of a model that is not there: it is planned by its shape")
@_shape_option("--n-expert", "routed experts of a layer")
@_shape_option("--n-expert-used", "of which a token uses")
@_shape_option("--n-embd", "width of the model")
@_shape_option("--n-ff-exp", "width of an expert")
@_shape_option("--n-head", "attention heads", "32")
@_shape_option("--n-head-kv", "of keys and values", "8")
@_shape_option("--head-size", "width of a head", "128")
@_shape_option("--n-vocab", "words", "151936")
@_shape_option("--n-layer-dense", "leading layers without experts", "0")
@_shape_option("--n-ff", "width of their feed-forward", "0")
@_shape_option("--n-ff-shared", "width of a layer's shared experts", "0")
@click.option("--type", "type_name", default="Q4_0", show_default=True, help="type of weights")
@ARGS
@one_line_errors
@streaming_options
def plan(
    args: tuple[str, ...],
    config: Config | None,
    as_json: bool,
    type_name: str,
    **shape: int | None,
) -> None:
    """Say whether a model fits, what it takes, and how quick it may be; load nothing.

    \b
    longhaul plan M.gguf --longhaul-cache 2 --ctx-size 8192
    longhaul plan M-00001-of-00009.gguf --parallel 4     # the other shards need not be there
    longhaul plan --n-layer 48 --n-expert 128 --n-expert-used 8 --n-embd 2048 --n-ff-exp 768

    Takes the options of longhaul-cli, or with --parallel those of longhaul-server. Exit code 1: it
    does not fit.
    """
    from .advise import plan_command

    lines, fits = plan_command(args, config, shape, type_name, as_json=as_json)
    click.echo("\n".join(lines))
    sys.exit(0 if fits else 1)


@main.command("doctor", cls=ToolCommand)
@click.option("--json", "as_json", is_flag=True, help="print JSON")
@click.argument("model", required=False, type=click.Path(path_type=Path))
@one_line_errors
def doctor(model: Path | None, as_json: bool) -> None:
    """Look at libraries, disk and memory, and say what is slow or broken and what to do about it.

    \b
    longhaul doctor
    longhaul doctor M.gguf

    Exit code 1: something is broken.
    """
    from .doctor import examine

    findings = examine(model)
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        for finding in findings:
            colour = {"ok": "green", "slow": "yellow", "broken": "red"}[finding.state]
            state = click.style(f"{finding.state:<6}", fg=colour, bold=True)
            click.echo(f"{state}  {finding.subject:<10} {finding.found}")
            if finding.advice:
                click.echo(f"{'':<19}{finding.advice}")
    sys.exit(1 if any(finding.state == "broken" for finding in findings) else 0)


main.add_command(trace)
