"""The longhaul-cli command: llama.cpp's llama-cli with routed experts streamed from disk."""

import sys

import click

from .config import Config
from .options import PASS_THROUGH, ToolCommand, streaming_tool


@click.command("longhaul-cli", cls=ToolCommand, context_settings=PASS_THROUGH)
@streaming_tool("longhaul-cli")
def main(args: tuple[str, ...], config: Config | None, help_llama: bool) -> None:
    """Chat with a model whose experts do not fit in memory, or complete one prompt.

    \b
    longhaul-cli --model M.gguf --longhaul-cache 2
    longhaul-cli --model M.gguf --longhaul-cache 2 -p "Hello" -n 64 --single-turn

    All options that are not listed here go to llama.cpp's llama-cli unchanged. Without --model the
    demo model is used.
    """
    from .tool import run_command  # here, so that --help works before anything is built

    sys.exit(run_command("cli", "longhaul-cli", config, args, help_llama=help_llama))
