import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from longhaul import cli, main, server, tool
from longhaul.config import Config
from longhaul.errors import BudgetError, ConfigError, LonghaulError, ModelFormatError, ReadError
from longhaul.options import one_line_errors

STREAMING = [
    (cli.main, []),
    (main.main, ["completion"]),
    (main.main, ["perplexity"]),
]
ALL = [*STREAMING, (main.main, ["quantize"])]

streaming_commands = pytest.mark.parametrize(
    ("command", "prefix"), STREAMING, ids=["cli", "completion", "perplexity"]
)
all_commands = pytest.mark.parametrize(
    ("command", "prefix"), ALL, ids=["cli", "completion", "perplexity", "quantize"]
)


class FakeTool:
    """Stands in for running one of llama.cpp's tools."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, Config | None, list[str], bool]] = []
        self.code = 0
        self.error: Exception | None = None

    def __call__(
        self,
        name: str,
        program: str,
        config: Config | None,
        args: Sequence[str],
        *,
        help_llama: bool,
    ) -> int:
        self.calls.append((name, program, config, list(args), help_llama))
        if self.error is not None:
            raise self.error
        return self.code


@pytest.fixture(autouse=True)
def fake_tool(monkeypatch: pytest.MonkeyPatch) -> FakeTool:
    fake = FakeTool()
    monkeypatch.setattr(tool, "run_command", fake)
    for name in [name for name in os.environ if name.startswith("LONGHAUL")]:
        monkeypatch.delenv(name)
    return fake


def invoke(command: click.Command, args: Sequence[str]) -> Result:
    result = CliRunner().invoke(command, args)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def check_one_line(result: Result, exit_code: int, *parts: str) -> None:
    assert result.exit_code == exit_code
    assert result.stdout == ""
    assert result.stderr.startswith("longhaul: error: ")
    assert result.stderr.count("\n") == 1
    assert result.stderr.endswith("\n")
    for part in parts:
        assert part in result.stderr


# --- bad options ----------------------------------------------------------------------------------


@streaming_commands
@pytest.mark.parametrize("size", ["0", "-1", "abc", "nan", "inf", "", "0.0GiB", "99999999T"])
def test_a_bad_cache_size_is_one_line(
    command: click.Command, prefix: list[str], size: str, fake_tool: FakeTool
) -> None:
    result = invoke(command, [*prefix, "--longhaul-cache", size, "-p", "x"])
    check_one_line(result, 2, "cache size", repr(size))
    assert fake_tool.calls == []


@streaming_commands
@pytest.mark.parametrize("number", ["0", "-1", "257", "two", "1.5", ""])
def test_a_bad_number_of_threads_is_one_line(
    command: click.Command, prefix: list[str], number: str, fake_tool: FakeTool
) -> None:
    result = invoke(command, [*prefix, "--longhaul-io-threads", number])
    check_one_line(result, 2, "threads", number)
    assert fake_tool.calls == []


@streaming_commands
@pytest.mark.parametrize("name", ["--longhaul-cache", "--longhaul-io-threads", "--longhaul-policy"])
def test_an_option_without_its_value_is_one_line(
    command: click.Command, prefix: list[str], name: str, fake_tool: FakeTool
) -> None:
    check_one_line(invoke(command, [*prefix, name]), 2, name)
    assert fake_tool.calls == []


@streaming_commands
@pytest.mark.parametrize("policy", ["mru", ""])
def test_an_unknown_policy_is_one_line(
    command: click.Command, prefix: list[str], policy: str, fake_tool: FakeTool
) -> None:
    result = invoke(command, [*prefix, "--longhaul-policy", policy])
    check_one_line(result, 2, "policy", policy, "lru")
    assert fake_tool.calls == []


@all_commands
@pytest.mark.parametrize(
    ("error", "exit_code"),
    [
        (ConfigError("bad\n  thing"), 2),
        (BudgetError("bad thing"), 2),
        (ModelFormatError("bad thing"), 1),
        (ReadError(5, "bad thing"), 1),
        (LonghaulError("bad thing"), 1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_our_errors_become_one_line_and_an_exit_code(
    command: click.Command,
    prefix: list[str],
    error: LonghaulError,
    exit_code: int,
    fake_tool: FakeTool,
) -> None:
    fake_tool.error = error
    check_one_line(invoke(command, prefix), exit_code, "bad thing")


def test_other_exceptions_are_not_hidden(fake_tool: FakeTool) -> None:
    fake_tool.error = ZeroDivisionError("a bug")
    with pytest.raises(ZeroDivisionError):
        invoke(cli.main, [])


def test_one_line_errors_passes_results_on() -> None:
    @click.command()
    @click.argument("word")
    @one_line_errors
    def command(word: str) -> None:
        click.echo(word)

    result = invoke(command, ["fine"])
    assert (result.exit_code, result.stdout, result.stderr) == (0, "fine\n", "")


# --- what reaches the tool ------------------------------------------------------------------------


@all_commands
@pytest.mark.parametrize("code", [0, 1, 3])
def test_the_exit_code_is_the_tools(
    command: click.Command, prefix: list[str], code: int, fake_tool: FakeTool
) -> None:
    fake_tool.code = code
    result = invoke(command, prefix)
    assert (result.exit_code, result.stdout, result.stderr) == (code, "", "")
    program = "longhaul-cli" if not prefix else f"longhaul {prefix[0]}"
    ((name, called, _, args, help_llama),) = fake_tool.calls
    assert (name, called, args, help_llama) == ((prefix or ["cli"])[0], program, [], False)


@streaming_commands
def test_streaming_is_the_default(
    command: click.Command, prefix: list[str], fake_tool: FakeTool
) -> None:
    for args in ([], ["--longhaul"], ["--longhaul-cache", "auto"]):
        invoke(command, [*prefix, *args])
    assert [config for _, _, config, _, _ in fake_tool.calls] == [Config()] * 3


@streaming_commands
def test_our_options_become_a_config_wherever_they_stand(
    command: click.Command, prefix: list[str], fake_tool: FakeTool
) -> None:
    ours = ["--longhaul-cache", "0.5", "--longhaul-io-threads=8", "--longhaul-policy", "lru"]
    invoke(command, [*prefix, "-p", "x", *ours, "-n", "4"])
    invoke(command, [*prefix, *ours, "-p", "x", "-n", "4"])
    config = Config(cache_bytes=2**29, n_io_threads=8, policy="lru")
    assert [call[2:4] for call in fake_tool.calls] == [(config, ["-p", "x", "-n", "4"])] * 2


@streaming_commands
def test_streaming_can_be_off(
    command: click.Command, prefix: list[str], fake_tool: FakeTool
) -> None:
    invoke(command, [*prefix, "--no-longhaul", "-m", "m.gguf"])
    assert fake_tool.calls[0][2:4] == (None, ["-m", "m.gguf"])


def test_the_environment_sets_our_options(
    fake_tool: FakeTool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LONGHAUL_CACHE", "2")
    monkeypatch.setenv("LONGHAUL_IO_THREADS", "8")
    monkeypatch.setenv("LONGHAUL_POLICY", "lru")
    invoke(cli.main, [])
    invoke(cli.main, ["--longhaul-cache", "1"])
    first, second = (config for _, _, config, _, _ in fake_tool.calls)
    assert first == Config(cache_bytes=2**31, n_io_threads=8)
    assert second == Config(cache_bytes=2**30, n_io_threads=8)
    monkeypatch.setenv("LONGHAUL_CACHE", "nan")
    check_one_line(invoke(cli.main, []), 2, "'nan'")


@all_commands
@pytest.mark.parametrize(
    "args",
    [
        ["-ngl", "99", "--temp", "0.5", "-st", "--no-mmap"],
        ["--temp=0.5", "--seed", "-1", "-n", "-2"],
        ["-hff", "file", "-hft", "token", "-epochs", "2"],
        ["-p", "- hello\n- there", "--system-prompt", "--- be brief ---"],
        ["F16.gguf", "Q4_0.gguf", "Q4_0", "2"],
        ["-p", "", "-p", "-", "-p", "\u00fc\u4e16"],
    ],
)
def test_llama_cpps_words_pass_unchanged(
    command: click.Command, prefix: list[str], args: list[str], fake_tool: FakeTool
) -> None:
    assert invoke(command, [*prefix, *args]).exit_code == 0
    assert fake_tool.calls[0][3] == args


def test_quantize_streams_nothing(fake_tool: FakeTool) -> None:
    invoke(main.main, ["quantize", "a", "b", "Q4_0"])
    assert fake_tool.calls == [("quantize", "longhaul quantize", None, ["a", "b", "Q4_0"], False)]


@all_commands
def test_help_llama_asks_the_tool(
    command: click.Command, prefix: list[str], fake_tool: FakeTool
) -> None:
    invoke(command, [*prefix, "--help-llama"])
    assert fake_tool.calls[0][4] is True


# --- help -----------------------------------------------------------------------------------------


@streaming_commands
@pytest.mark.parametrize("word", ["--help", "-h"])
def test_help_lists_ours_and_says_how_to_see_the_rest(
    command: click.Command, prefix: list[str], word: str, fake_tool: FakeTool
) -> None:
    result = invoke(command, [*prefix, word])
    assert result.exit_code == 0
    assert result.stderr == ""
    names = ["--longhaul ", "--longhaul-cache", "--longhaul-io-threads", "--help-llama", "--help "]
    options = result.stdout.split("Options:\n")[1]
    places = [options.index(name) for name in names]
    assert places == sorted(places)
    assert fake_tool.calls == []


@pytest.mark.parametrize(
    "line", ["cli --help", "cli -h", "main --help", "main -h", "main quantize --help"]
)
def test_help_works_before_anything_is_built(line: str, tmp_path: Path) -> None:
    module, *args = line.split()
    code = f"import sys; from longhaul.{module} import main; sys.exit(main({args!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "LONGHAUL_LIB_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Usage: ")


def test_libraries_that_are_not_built_are_one_line(tmp_path: Path) -> None:
    code = "from longhaul.cli import main; main(['--no-longhaul', '-m', 'm.gguf'])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "LONGHAUL_LIB_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"longhaul: error: native libraries not found in {tmp_path}; ")
    assert "make build" in done.stderr
    assert done.stderr.count("\n") == 1


@streaming_commands
def test_what_follows_an_option_is_its_value_and_not_ours(
    command: click.Command, prefix: list[str], fake_tool: FakeTool
) -> None:
    args = ["-p", "-h", "--system-prompt", "--longhaul rocks"]
    assert invoke(command, [*prefix, *args]).exit_code == 0
    assert fake_tool.calls[0][3] == args


@streaming_commands
def test_our_options_without_streaming_are_one_line(
    command: click.Command, prefix: list[str]
) -> None:
    result = invoke(command, [*prefix, "--no-longhaul", "--longhaul-cache", "2"])
    check_one_line(result, 2, "--longhaul-cache", "--no-longhaul")


def test_the_page_is_of_streaming_servers_only() -> None:
    result = invoke(server.main, ["--no-longhaul", "--longhaul-page-port", "9000"])
    check_one_line(result, 2, "--longhaul-page-port", "--no-longhaul")


@pytest.mark.parametrize("port", ["banana", "65536", "8080"])
def test_a_page_port_that_cannot_be_is_one_line(port: str, fake_tool: FakeTool) -> None:
    result = invoke(server.main, ["--longhaul-page-port", port])
    check_one_line(result, 2, "--longhaul-page-port", port)


@streaming_commands
def test_a_mistyped_option_of_ours_is_one_line(command: click.Command, prefix: list[str]) -> None:
    check_one_line(invoke(command, [*prefix, "--longhaul-cahce", "2"]), 2, "--longhaul-cahce")


@pytest.mark.parametrize("mode", ["auto", "keep", "shrink"])
def test_ubatch_modes_reach_the_config(mode: str, fake_tool: FakeTool) -> None:
    assert invoke(cli.main, ["--longhaul-ubatch", mode]).exit_code == 0
    config = fake_tool.calls[0][2]
    assert config is not None
    assert config.ubatch == mode


def test_an_unknown_ubatch_mode_is_one_line() -> None:
    check_one_line(invoke(cli.main, ["--longhaul-ubatch", "tiny"]), 2, "'tiny'", "shrink")
