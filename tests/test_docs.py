import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import longhaul
from longhaul import bench, cli, main, server

CHECKOUT = Path(__file__).resolve().parent.parent


def all_commands() -> Iterator[tuple[str, click.Command]]:
    yield "longhaul-cli", cli.main
    yield "longhaul-server", server.main
    yield "longhaul-bench", bench.bench
    yield "longhaul-bench sweep", bench.sweep
    yield "longhaul-bench compare", bench.compare
    yield "longhaul", main.main
    for name, command in main.main.commands.items():
        yield f"longhaul {name}", command


def all_options() -> list[tuple[str, click.Option]]:
    return [
        (name, parameter)
        for name, command in all_commands()
        for parameter in command.params
        if isinstance(parameter, click.Option)
    ]


COMMANDS = list(all_commands())
OPTIONS = all_options()

every_command = pytest.mark.parametrize(("name", "command"), COMMANDS, ids=[n for n, _ in COMMANDS])
every_option = pytest.mark.parametrize(
    ("name", "option"), OPTIONS, ids=[f"{name} {option.opts[0]}" for name, option in OPTIONS]
)


@pytest.fixture(scope="module")
def readme() -> str:
    return (CHECKOUT / "README.md").read_text(encoding="utf-8")


def stands_in(word: str, text: str) -> bool:
    """Say whether a word stands in a text by itself, not only within a longer one."""
    return re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", text) is not None


def test_the_commands_are_found() -> None:
    names = [name for name, _ in COMMANDS]
    assert {"longhaul-cli", "longhaul", "longhaul completion"} <= set(names)
    assert len(OPTIONS) > len(COMMANDS)


def test_a_word_within_another_does_not_count() -> None:
    assert not stands_in("--longhaul", "use --longhaul-cache or --no-longhaul")
    assert stands_in("--longhaul", "use `--longhaul`, or not")


@every_command
def test_every_command_has_help_and_stands_in_the_readme(
    name: str, command: click.Command, readme: str
) -> None:
    assert command.help
    assert command.help.strip()
    assert stands_in(name, readme)


@every_option
def test_every_option_has_help_and_stands_in_the_readme(
    name: str, option: click.Option, readme: str
) -> None:
    assert option.help
    assert not option.help.endswith(".") or option.opts[0] in ("--help", "--version")
    if option.opts[0] == "--version":
        return  # click's own
    for word in (*option.opts, *option.secondary_opts):
        assert stands_in(word, readme), f"{word} is not in README.md"
    if option.envvar is not None:
        assert stands_in(str(option.envvar), readme), f"{option.envvar} is not in README.md"


def test_defaults_are_shown_in_help() -> None:
    for name, option in OPTIONS:
        if not option.is_flag or option.secondary_opts:
            assert option.show_default, f"{name} {option.opts[0]}"


def test_the_version_is_that_of_the_package() -> None:
    project = (CHECKOUT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'\nversion = "{longhaul.__version__}"\n' in project
