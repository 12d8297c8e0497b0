"""Options and manners that the commands share."""

import functools
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import click
from click.core import ParameterSource

from .config import Config, parse_caches, parse_size
from .errors import ConfigError, LonghaulError
from .policy import POLICIES

F = TypeVar("F", bound=Callable[..., object])

# Everything that is not ours goes to llama.cpp as it is, in its order.
# Click would find a one-letter option of ours inside llama.cpp's words (-h in -hf): there is none.
PASS_THROUGH = {"ignore_unknown_options": True, "help_option_names": ["--help"]}
ARGS = click.argument("args", nargs=-1, type=click.UNPROCESSED, metavar="[LLAMA.CPP OPTIONS]...")


INTERRUPTED = 130  # exit code of what Ctrl-C ended, as shells have it


class CommandError(click.ClickException):
    """One line on stderr; exit code 1."""

    exit_code = 1

    def show(self, file: object = None) -> None:
        """Write the line, whatever `file` is."""
        click.echo(f"longhaul: error: {' '.join(self.format_message().split())}", err=True)


class OptionError(CommandError):
    """A bad option; exit code 2."""

    exit_code = 2


def _with_long_help(args: list[str]) -> list[str]:
    """Write -h as --help, unless it follows an option, whose value it may be."""
    previous = ["", *args]
    return [
        "--help" if word == "-h" and not before.startswith("-") else word
        for before, word in zip(previous, args, strict=False)
    ]


class ToolCommand(click.Command):
    """Take our long options from among llama.cpp's, which stay as they are."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse a command line; -h is --help, a bad option one line."""
        try:
            rest = super().parse_args(ctx, _with_long_help(args))
        except click.UsageError as e:
            raise OptionError(e.format_message()) from e
        for word in ctx.params.get("args", ()):
            if re.fullmatch(r"--(no-)?longhaul[\w-]*(=.*)?", word):
                raise OptionError(f"no option {word}; --help lists those of longhaul")
        return rest


def one_line_errors(command: F) -> F:
    """Turn our errors into one line: exit code 2 for a bad option, 1 for anything else."""

    @functools.wraps(command)
    def wrapper(*args: object, **kwargs: object) -> object:
        try:
            return command(*args, **kwargs)
        except KeyboardInterrupt:
            raise SystemExit(INTERRUPTED) from None
        except LonghaulError as e:
            raise (OptionError if isinstance(e, ConfigError) else CommandError)(str(e)) from e

    return wrapper  # type: ignore[return-value]


def streaming_options(command: F) -> F:
    """Add the --longhaul options; their values arrive as one Config, None when streaming is off."""

    @functools.wraps(command)
    def wrapper(
        *args: object,
        longhaul: bool,
        longhaul_cache: str,
        longhaul_ram: str | None,
        longhaul_pin: str | None,
        longhaul_ram_anyway: bool,
        longhaul_io_threads: str,
        longhaul_policy: str,
        longhaul_ubatch: str,
        longhaul_json: Path | None,
        longhaul_trace: Path | None,
        longhaul_plan: Path | None,
        longhaul_warm: str | None,
        **kwargs: object,
    ) -> object:
        config = None
        if not longhaul:
            _refuse_ours_without_streaming()
        else:
            cache_bytes, cache_by_device = parse_caches(longhaul_cache)
            config = replace(
                _shared_config(longhaul_io_threads, longhaul_policy, longhaul_ubatch),
                cache_bytes=cache_bytes,
                cache_by_device=cache_by_device,
                ram_bytes=parse_size(longhaul_ram) if longhaul_ram else 0,
                pin_bytes=parse_size(longhaul_pin) if longhaul_pin else 0,
                ram_anyway=longhaul_ram_anyway,
                json_path=longhaul_json,
                trace_path=longhaul_trace,
                plan_path=longhaul_plan,
                warm_path=Path(longhaul_warm) if longhaul_warm else None,
            )
        return command(*args, config=config, **kwargs)

    return _with(_STREAMING, wrapper)  # type: ignore[return-value]


def shared_options(command: F) -> F:
    """Add those of our options that every way of streaming has; they arrive as one Config."""

    @functools.wraps(command)
    def wrapper(
        *args: object,
        longhaul_io_threads: str,
        longhaul_policy: str,
        longhaul_ubatch: str,
        **kwargs: object,
    ) -> object:
        config = _shared_config(longhaul_io_threads, longhaul_policy, longhaul_ubatch)
        return command(*args, config=config, **kwargs)

    return _with(_SHARED, wrapper)  # type: ignore[return-value]


def _with(options: "_Options", command: Callable[..., object]) -> Callable[..., object]:
    for option in reversed(options):
        command = option(command)
    return command


def _shared_config(n_io_threads: str, policy: str, ubatch: str) -> Config:
    if policy not in POLICIES:
        known = ", ".join(sorted(POLICIES))
        raise ConfigError(f"--longhaul-policy {policy!r} is none of: {known}")
    return Config(
        n_io_threads=_whole_number("--longhaul-io-threads", n_io_threads),
        policy=policy,
        ubatch=ubatch,
    )


def _refuse_ours_without_streaming() -> None:
    context = click.get_current_context()
    for name in context.params:
        source = context.get_parameter_source(name)
        if name.startswith("longhaul_") and source is ParameterSource.COMMANDLINE:
            option = "--" + name.replace("_", "-")
            raise ConfigError(f"{option} cannot be used with --no-longhaul")


def _whole_number(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError as e:
        raise ConfigError(f"{name} {text!r} is not a whole number") from e


def help_llama_option(name: str) -> Callable[[F], F]:
    """Add --help-llama, which shows what llama.cpp's own tool takes."""
    return click.option(
        "--help-llama",
        is_flag=True,
        help=f"show llama.cpp's own options, all of which {name} takes",
    )


def streaming_tool(name: str) -> Callable[[F], F]:
    """Make a command's body out of a function of args, config and help_llama; `name` is shown."""

    def add(command: F) -> F:
        return ARGS(one_line_errors(streaming_options(help_llama_option(name)(command))))

    return add


_Options = list[Callable[[Callable[..., object]], Callable[..., object]]]

_SHARED: _Options = [
    click.option(
        "--longhaul-io-threads",
        envvar="LONGHAUL_IO_THREADS",
        show_envvar=True,
        metavar="N",
        default="4",
        show_default=True,
        help="threads that read experts",
    ),
    click.option(
        "--longhaul-policy",
        envvar="LONGHAUL_POLICY",
        show_envvar=True,
        metavar="NAME",
        default="lru",
        show_default=True,
        help=f"which expert leaves the cache: {', '.join(sorted(POLICIES))}",
    ),
    click.option(
        "--longhaul-ubatch",
        envvar="LONGHAUL_UBATCH",
        show_envvar=True,
        metavar="MODE",
        default="auto",
        show_default=True,
        help="what a ubatch does that selects more experts than there are slots: auto and keep"
        " compute it in stages, shrink makes it smaller",
    ),
]
_STREAMING: _Options = [
    click.option(
        "--longhaul/--no-longhaul",
        default=True,
        show_default=True,
        help="stream routed experts, or load the whole model as llama.cpp does",
    ),
    click.option(
        "--longhaul-cache",
        envvar="LONGHAUL_CACHE",
        show_envvar=True,
        metavar="SIZE",
        default="auto",
        show_default=True,
        help="memory for routed experts in GiB, or with a unit such as 512MiB;"
        " auto takes what is left; CPU=2,Vulkan0=4 gives each device its own",
    ),
    click.option(
        "--longhaul-ram",
        envvar="LONGHAUL_RAM",
        show_envvar=True,
        metavar="SIZE",
        show_default="none",
        help="memory that keeps more experts behind the slots of devices, so that they need no"
        " read",
    ),
    click.option(
        "--longhaul-pin",
        envvar="LONGHAUL_PIN",
        show_envvar=True,
        metavar="SIZE",
        show_default="none",
        help="how much of --longhaul-ram is page-locked: the hottest experts are copied from there"
        " without the CPU",
    ),
    click.option(
        "--longhaul-ram-anyway",
        is_flag=True,
        help="allow --longhaul-ram where slots are in the same memory, which then holds experts"
        " twice",
    ),
    *_SHARED,
    click.option(
        "--longhaul-json",
        envvar="LONGHAUL_JSON",
        show_envvar=True,
        metavar="FILE",
        type=click.Path(dir_okay=False, path_type=Path),
        show_default="none",
        help="write the figures of the run, and of each ubatch, to this file when it ends",
    ),
    click.option(
        "--longhaul-plan",
        envvar="LONGHAUL_PLAN",
        show_envvar=True,
        metavar="FILE",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        show_default="none",
        help="slots of each layer, as longhaul trace plan proposes them",
    ),
    click.option(
        "--longhaul-warm",
        envvar="LONGHAUL_WARM",
        show_envvar=True,
        metavar="FILE",
        show_default="none",
        help="read the experts that were used most before as soon as there is time, and keep what"
        " this run used; auto keeps a file for each model",
    ),
    click.option(
        "--longhaul-trace",
        envvar="LONGHAUL_TRACE",
        show_envvar=True,
        metavar="FILE",
        type=click.Path(dir_okay=False, path_type=Path),
        show_default="none",
        help="record which experts each layer asks for; longhaul trace reads it",
    ),
]
