"""The longhaul command: llama.cpp's other tools with routed experts streamed from disk."""

import sys

import click

from .config import Config
from .options import (
    ARGS,
    PASS_THROUGH,
    ToolCommand,
    help_llama_option,
    one_line_errors,
    streaming_tool,
)


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
