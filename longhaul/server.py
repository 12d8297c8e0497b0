"""The longhaul-server command: llama.cpp's llama-server with routed experts streamed from disk."""

import sys
from dataclasses import replace

import click

from .config import Config
from .options import PASS_THROUGH, ToolCommand, streaming_tool


@click.command("longhaul-server", cls=ToolCommand, context_settings=PASS_THROUGH)
@click.option(
    "--longhaul-page-port",
    envvar="LONGHAUL_PAGE_PORT",
    show_envvar=True,
    metavar="PORT",
    default="",
    show_default="the server's + 1",
    help="where the page that shows the running server listens, on the server's own address;"
    " off for nowhere",
)
@streaming_tool("longhaul-server")
def main(
    args: tuple[str, ...], config: Config | None, help_llama: bool, longhaul_page_port: str
) -> None:
    """Serve a model whose experts do not fit in memory, as llama-server does.

    \b
    longhaul-server --model M.gguf --longhaul-cache 2 --port 8080
    curl http://127.0.0.1:8080/v1/chat/completions -d '{"messages": [...]}'

    All options that are not listed here go to llama.cpp's llama-server unchanged. Without --model
    the demo model is used.
    """
    from .server_arguments import page_port_of, read_server_arguments
    from .tool import run_command  # here, so that --help works before anything is built

    if config is not None:
        port = page_port_of(longhaul_page_port, read_server_arguments(args))
        config = replace(config, page_port=port)
    sys.exit(run_command("server", "longhaul-server", config, args, help_llama=help_llama))
