"""What surrounds a run of one of llama.cpp's tools, with nothing native behind it."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from models import write_tiny_dense

from longhaul import native, tool
from longhaul.config import Config
from longhaul.errors import ConfigError, ReadError
from longhaul.stats import Counters, Record, Stats

CONFIG = Config(cache_bytes=2**20)


class FakeEngine:
    """Stands in for the engine, open for as long as the tool runs."""

    def __init__(
        self,
        model: object,
        n_slots: Sequence[int],
        config: Config,
        on_error: Callable[[BaseException], None],
        tier: object = None,
    ) -> None:
        self.pool = SimpleNamespace(modes=["direct"])
        self.n_slots = tuple(n_slots)
        self.is_open = True
        self.on_error = on_error
        self.error: BaseException | None = None
        self.counters = Counters(n_tokens=3, compute_s=1.0)
        made.append(self)

    def stats(self) -> Stats:
        return Stats(decode=self.counters)

    def records(self) -> list[Record]:
        return [Record(1.0, False, self.counters)]

    def slot_bytes(self) -> native.SlotBytes:
        return native.SlotBytes(2**20, 0, 0, 0, 0)

    def take_error(self) -> BaseException | None:
        return self.error

    def __enter__(self) -> "FakeEngine":
        return self

    def __exit__(self, *exception: object) -> None:
        self.is_open = False


class FakeTools:
    """Stands in for llama.cpp's tools."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, list[str]]] = []
        self.code = 0
        self.during: Callable[[], object] = lambda: None

    def __call__(self, name: str, program: str, args: Sequence[str]) -> int:
        self.calls.append((name, program, list(args)))
        self.during()
        return self.code


made: list[FakeEngine] = []
asked: list[bool] = []  # whether the libraries are for a model that reads


@pytest.fixture(autouse=True)
def tools(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTools]:
    fake = FakeTools()
    monkeypatch.setattr(native, "run_tool", fake)
    monkeypatch.setattr(
        native, "require_libraries", lambda *, reads=False, exact=False: asked.append(reads)
    )
    monkeypatch.setattr(tool, "Engine", FakeEngine)
    for name in ("LLAMA_ARG_MODEL", "LLAMA_ARG_HF_REPO", "LONGHAUL_DEMO_MODEL"):
        monkeypatch.delenv(name, raising=False)
    made.clear()
    asked.clear()
    yield fake


def run(*args: str | Path, config: Config | None = CONFIG, name: str = "cli") -> int:
    return tool.run_command(name, "program", config, [*map(str, args)], help_llama=False)


def firsts(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the first word of each line on stderr, after checking that all are ours."""
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert all(line.startswith("longhaul: ") for line in lines)
    return [line.split()[1] for line in lines]


def test_the_plan_comes_before_the_run_and_the_summary_after(
    tiny: Path, tools: FakeTools, capsys: pytest.CaptureFixture[str]
) -> None:
    before: list[str] = []
    tools.during = lambda: before.extend(firsts(capsys))
    assert run("-m", tiny, "-c", "64") == 0
    assert before[0] == "model"
    assert {"cache", "ubatch", "memory", "reads"} <= set(before)
    assert firsts(capsys) == ["tokens", "total", "slots", "memory"]


def test_figures_are_written_where_they_are_wanted(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    config = replace(CONFIG, json_path=path)
    assert run("-m", tiny, "-c", "64", config=config) == 0
    figures = json.loads(path.read_text())
    assert figures["decode"]["n_tokens"] == 3
    assert figures["n_slots"] == [5, 5, 4]
    assert len(figures["ubatches"]) == 1


def test_figures_that_cannot_be_written_do_not_lose_the_answer(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = replace(CONFIG, json_path=tmp_path / "missing" / "figures.json")
    assert run("-m", tiny, "-c", "64", config=config) == 0
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("longhaul: warning the figures are not in ")
    assert last.endswith("No such file or directory")


def test_a_configuration_file_of_llama_cpps_is_named(
    tiny: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    run("-m", tiny, "-c", "64")
    assert "config.ini" not in capsys.readouterr().err
    (tmp_path / "llama.cpp").mkdir()
    (tmp_path / "llama.cpp" / "config.ini").write_text("[*]\n")
    run("-m", tiny, "-c", "64")
    said = capsys.readouterr().err
    assert f"warning what {tmp_path}/llama.cpp/config.ini says is not in this plan" in said


@pytest.mark.parametrize("word", ["--log-disable", "--log_disable"])
def test_log_disable_silences_us_too(
    tiny: Path, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run("-m", tiny, "-c", "64", word)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("cache", "reads"), [(2**20, True), (2**30, False)])
def test_threads_spin_longer_where_nothing_is_read(tiny: Path, cache: int, reads: bool) -> None:
    run("-m", tiny, "-c", "64", config=Config(cache_bytes=cache))
    assert asked == [reads]
    run("-m", tiny, config=None)
    assert asked == [reads, False]


def test_options_follow_in_their_order_and_warm_up_is_off(tiny: Path, tools: FakeTools) -> None:
    words = ["-m", str(tiny), "-p", "x", "-c", "64"]
    run(*words)
    assert tools.calls == [("cli", "program", ["--no-warmup", "--cache-ram", "0", *words])]
    run(*words, "--cache-ram", "5")
    assert tools.calls[1][2] == ["--no-warmup", *words, "--cache-ram", "5"]


def test_prompts_of_the_past_without_a_limit_are_warned_about(
    tiny: Path, tools: FakeTools, capsys: pytest.CaptureFixture[str]
) -> None:
    run("-m", tiny, "-c", "64", "--cache-ram", "-1")
    assert tools.calls[0][2][:1] == ["--no-warmup"]
    assert "longhaul: warning prompts of the past have no limit" in capsys.readouterr().err


def test_the_engine_is_open_while_the_tool_runs(tiny: Path, tools: FakeTools) -> None:
    states: list[bool] = []
    tools.during = lambda: states.append(made[0].is_open)
    run("-m", tiny, "-c", "64")
    assert (states, made[0].is_open) == ([True], False)


@pytest.mark.parametrize("code", [0, 1, 3])
def test_the_exit_code_is_the_tools(tiny: Path, tools: FakeTools, code: int) -> None:
    tools.code = code
    assert run("-m", tiny, "-c", "64") == code


@pytest.mark.parametrize("code", [0, 3])
def test_a_failed_read_makes_the_exit_code_1(
    tiny: Path, tools: FakeTools, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        capsys.readouterr()
        made[0].error = ReadError(5, "shard m.gguf: cannot read")
        made[0].on_error(made[0].error)
        assert "longhaul: error: " in (said := capsys.readouterr().err)
        assert "shard m.gguf: cannot read" in said

    tools.during, tools.code = fail, code
    assert run("-m", tiny, "-c", "64") == 1


def test_nothing_is_summed_up_where_nothing_was_evaluated(
    tiny: Path, tools: FakeTools, capsys: pytest.CaptureFixture[str]
) -> None:
    def evaluate_nothing() -> None:
        capsys.readouterr()
        made[0].counters = Counters()

    tools.during = evaluate_nothing
    run("-m", tiny, "-c", "64")
    assert firsts(capsys) == []


def test_a_first_ubatch_that_failed_is_summed_up(
    tiny: Path, tools: FakeTools, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        capsys.readouterr()
        made[0].counters = Counters(n_errors=1)

    tools.during = fail
    run("-m", tiny, "-c", "64")
    assert "total" in firsts(capsys)


def test_a_dense_model_runs_as_it_is(
    tools: FakeTools, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_tiny_dense(tmp_path / "dense.gguf")
    assert run("-m", path, "-p", "x") == 0
    assert tools.calls == [("cli", "program", ["-m", str(path), "-p", "x"])]
    assert firsts(capsys) == ["model"]
    assert made == []


def test_without_streaming_the_tool_gets_what_it_was_given(
    tools: FakeTools, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("-m", "any.gguf", "-hf", "a/b", config=None) == 0
    assert tools.calls == [("cli", "program", ["-m", "any.gguf", "-hf", "a/b"])]
    assert firsts(capsys) == []


@pytest.mark.parametrize("config", [CONFIG, None], ids=["streaming", "whole"])
def test_without_a_model_the_demo_model_runs(
    tiny: Path, tools: FakeTools, config: Config | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LONGHAUL_DEMO_MODEL", str(tiny))
    run("-c", "64", config=config)
    ((_, _, args),) = tools.calls
    assert args[-4:] == ["--model", str(tiny), "-c", "64"]
    run("a.gguf", "b.gguf", "Q4_0", config=None, name="quantize")
    assert tools.calls[-1] == ("quantize", "program", ["a.gguf", "b.gguf", "Q4_0"])


@pytest.mark.parametrize("config", [CONFIG, None], ids=["streaming", "whole"])
def test_questions_go_to_the_tool_without_a_model(tools: FakeTools, config: Config | None) -> None:
    run("--version", config=config)
    tool.run_command("cli", "program", config, ["-p", "x"], help_llama=True)
    assert [args for _, _, args in tools.calls] == [["--version"], ["--help"]]


def test_what_cannot_stream_is_refused_before_anything_opens(tiny: Path, tools: FakeTools) -> None:
    with pytest.raises(ConfigError):
        run("-m", tiny, "--check-tensors")
    assert (made, tools.calls) == ([], [])


# --- Ctrl-C ---------------------------------------------------------------------------------------


@pytest.fixture
def handlers(tools: FakeTools) -> Iterator[list[Any]]:
    """What Ctrl-C does while a tool runs; as it was before and after the test."""
    found: list[Any] = []
    tools.during = lambda: found.append(signal.getsignal(signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield found
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_is_the_tools_while_it_runs(handlers: list[Any]) -> None:
    tool.run_tool("cli", "program", [])
    assert handlers == [signal.SIG_DFL]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_stays_ignored_where_it_is(handlers: list[Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    tool.run_tool("cli", "program", [])
    assert handlers == [signal.SIG_IGN]
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


# --- memory ---------------------------------------------------------------------------------------

PEAK = """
from longhaul import tool
before = tool.peak_rss_bytes()
block = b"x" * (64 << 20)
print(before, tool.peak_rss_bytes())
"""


def test_peak_rss_is_that_of_the_program_and_not_of_what_started_it() -> None:
    n_bytes = 512 << 20
    block = b"x" * n_bytes  # resident in this process, which starts the other
    done = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True)
    before, after = map(int, done.stdout.split())
    assert 8 << 20 < before < n_bytes == len(block)
    assert 60 << 20 <= after - before <= 80 << 20


def test_uncached_reads_that_are_cached_are_warned_about(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for is_uncached in (True, False):
        monkeypatch.setattr(tool.machine, "leaves_page_cache_alone", lambda path: is_uncached)  # noqa: B023
        run("-m", tiny, "-c", "64")
        err = capsys.readouterr().err
        warning = f"longhaul: warning {tiny}: this file system takes uncached reads, but caches"
        assert (warning in err) == (not is_uncached)
