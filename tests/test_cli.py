"""longhaul-cli as a user runs it: same text as without streaming, and what is said of it."""

import json
import re
from pathlib import Path

import pytest
from commands import (
    CHAT,
    OURS,
    PROMPT,
    SMALL,
    Result,
    Running,
    environment,
    first_expert_byte,
    resident,
    run,
)
from models import split_gguf, truncate

from longhaul.budget import MIB
from longhaul.config import parse_cache
from longhaul.experts import MoeModel
from longhaul.index import read_index

pytestmark = pytest.mark.usefixtures("libraries")

ONE_ANSWER = ("-p", PROMPT, "-n", "24", "--single-turn", "--temp", "0", "--seed", "1")


@pytest.fixture(scope="module")
def index(chat_model: Path) -> MoeModel:
    return read_index(chat_model)


@pytest.fixture(scope="module")
def streamed(chat_model: Path, libraries: Path) -> Result:
    """One answer of longhaul-cli with a cache smaller than the experts."""
    return run("longhaul-cli", "--model", chat_model, *SMALL, *ONE_ANSWER)


# --- one answer -----------------------------------------------------------------------------------


def test_an_answer_is_the_resident_models(chat_model: Path, streamed: Result) -> None:
    assert streamed.code == 0, streamed.err
    (turn,) = streamed.turns
    assert turn.startswith(f"{PROMPT}\n")
    assert len(turn) > len(PROMPT) + 40
    wanted = resident(
        "longhaul-cli", "--model", chat_model, *ONE_ANSWER, n_ubatch=streamed.n_ubatch
    )
    assert streamed.turns == wanted.turns


def test_the_plan_is_said_before(streamed: Result, index: MoeModel) -> None:
    assert streamed.lines[0].startswith("model   tiny llama (llama), 3 layers of 8 experts, top-2,")
    cache = streamed.line("cache")
    assert "4 to 5 slots per layer" in cache
    assert f"{14 * index.layers[0].expert_bytes / MIB:.1f} MiB" in cache
    assert re.search(r"^reads   (uncached|through the page cache)", streamed.line("reads"))
    memory = streamed.line("memory")
    assert " MiB planned: slots 1 + dense weights " in memory
    assert streamed.n_ubatch > 0


def test_the_summary_is_said_after(streamed: Result) -> None:
    number = r"[0-9.]+"
    for first, n_tokens in (("prompt", streamed.counted("prompt")), ("tokens", 23)):
        assert re.fullmatch(
            rf"{first} +{n_tokens} at {number} tok/s, hit rate {number}%,"
            rf" {number} MiB read per token, [0-9]+% of the time waiting"
            r" \(reads [0-9]+%, repacking [0-9]+%, planning [0-9]+%\),"
            rf" {number} x the roofline",
            streamed.line(first),
        )
    assert streamed.counted("prompt") > 10
    assert streamed.counted("total") == streamed.counted("prompt") + 23
    assert streamed.line("total").endswith(", 0 errors")
    assert not streamed.line("total").startswith("total   0 tokens")
    peak, planned = re.findall(r"[0-9]+", streamed.lines[-1])
    assert streamed.lines[-1] == f"memory  peak RSS {peak} MiB, planned {planned} MiB"
    assert streamed.line("memory").startswith(f"memory  {planned} MiB planned")
    assert int(peak) <= int(planned) + 64


def test_figures_are_those_of_the_summary(chat_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    result = run(
        "longhaul-cli", "--model", chat_model, *SMALL, *ONE_ANSWER, "--longhaul-json", path
    )
    assert result.code == 0, result.err
    figures = json.loads(path.read_text())
    assert figures["total"]["n_tokens"] == result.counted("total") > 30
    assert f"hit rate {figures['decode']['hit_rate']:.1%}" in result.line("tokens")
    ubatches = figures["ubatches"]
    assert [u["n_tokens"] for u in ubatches if u["phase"] == "decode"] == [1] * 23
    for name in ("n_tokens", "n_hits", "n_misses", "n_evictions", "read_bytes"):
        assert sum(u[name] for u in ubatches) == figures["total"][name] > 0


def test_nothing_of_ours_is_on_stdout(streamed: Result) -> None:
    assert OURS not in streamed.out
    assert all(line.startswith(OURS) for line in streamed.err.splitlines())


def test_longhaul_is_accepted_and_the_last_word_on_it_counts(
    chat_model: Path, streamed: Result
) -> None:
    result = run("longhaul-cli", "--longhaul", "--model", chat_model, *SMALL, *ONE_ANSWER)
    assert (result.code, result.turns) == (0, streamed.turns)
    assert result.line("cache") == streamed.line("cache")
    both = run("longhaul-cli", "--longhaul", "--no-longhaul", "-m", chat_model, *ONE_ANSWER)
    assert (both.code, both.lines) == (0, [])


def test_the_environment_sizes_the_cache(chat_model: Path, streamed: Result) -> None:
    env = environment(LONGHAUL_CACHE=SMALL[1])
    result = run("longhaul-cli", "--model", chat_model, *ONE_ANSWER, env=env)
    assert result.line("cache") == streamed.line("cache")
    assert result.turns == streamed.turns


def test_the_environment_names_the_model(chat_model: Path, streamed: Result) -> None:
    env = environment(LLAMA_ARG_MODEL=str(chat_model))
    result = run("longhaul-cli", *SMALL, *ONE_ANSWER, env=env)
    assert result.line("cache") == streamed.line("cache")
    assert result.turns == streamed.turns


@pytest.mark.parametrize("switch", ["--longhaul", "--no-longhaul"])
def test_without_a_model_the_demo_model_runs(chat_model: Path, switch: str) -> None:
    env = environment(LONGHAUL_DEMO_MODEL=str(chat_model))
    result = run("longhaul-cli", switch, *ONE_ANSWER, env=env)
    assert result.code == 0, result.err
    assert len(result.turns) == 1
    assert ("model" in [line.split()[0] for line in result.lines]) == (switch == "--longhaul")


def test_more_than_the_model_is_the_whole_model(chat_model: Path, index: MoeModel) -> None:
    result = run("longhaul-cli", "--model", chat_model, "--longhaul-cache", "2", *ONE_ANSWER)
    assert result.code == 0, result.err
    cache = result.line("cache")
    assert "8 slots per layer" in cache
    assert cache.endswith("100.0% of the experts")
    assert result.n_ubatch == 512
    assert ", 0 evictions, 0 errors" in result.line("total")
    wanted = resident("longhaul-cli", "--model", chat_model, *ONE_ANSWER, n_ubatch=512)
    assert result.turns == wanted.turns
    read_mib = float(re.findall(r"([0-9.]+) MiB read per token", result.line("prompt"))[0])
    n_read = read_mib * MIB * result.counted("prompt")
    assert 0 < n_read <= index.expert_bytes * 1.2  # printed with two digits; each expert once


def test_auto_is_the_default(chat_model: Path) -> None:
    result = run("longhaul-cli", "--model", chat_model, *ONE_ANSWER)
    assert " (auto): 8 slots per layer" in result.line("cache")


def test_the_least_budget_answers_the_same(chat_model: Path) -> None:
    refused = run("longhaul-cli", "--model", chat_model, "--longhaul-cache", "1KiB", *ONE_ANSWER)
    (least,) = re.findall(r"give ([0-9.]+) GiB or more", refused.err)
    result = run("longhaul-cli", "--model", chat_model, "--longhaul-cache", least, *ONE_ANSWER)
    assert result.code == 0, result.err
    wanted = resident("longhaul-cli", "--model", chat_model, *ONE_ANSWER, n_ubatch=result.n_ubatch)
    assert result.turns == wanted.turns


@pytest.mark.parametrize("n_slots", [1, 2, 3])
def test_a_cache_of_hardly_one_token_answers_the_same(
    chat_model: Path, index: MoeModel, n_slots: int
) -> None:
    size = n_slots * sum(layer.expert_bytes for layer in index.layers)
    result = run("longhaul-cli", "-m", chat_model, "--longhaul-cache", f"{size}B", *ONE_ANSWER)
    assert result.code == 0, result.err
    assert f" {n_slots} slots per layer" in result.line("cache")
    assert any("below" in line for line in result.lines if "warning" in line) == (n_slots < 2)
    wanted = resident("longhaul-cli", "-m", chat_model, *ONE_ANSWER, n_ubatch=result.n_ubatch)
    assert result.turns == wanted.turns


def test_a_ubatch_is_shrunk_when_asked(chat_model: Path) -> None:
    args = ("--model", chat_model, *SMALL, "--longhaul-ubatch", "shrink", *ONE_ANSWER)
    result = run("longhaul-cli", *args)
    assert result.code == 0, result.err
    assert result.n_ubatch == 2
    assert "instead of 512" in result.line("ubatch")
    wanted = resident("longhaul-cli", "--model", chat_model, *ONE_ANSWER, n_ubatch=2)
    assert result.turns == wanted.turns


def test_a_split_model_answers_the_same(chat_model: Path, streamed: Result, tmp_path: Path) -> None:
    whole = tmp_path / "chat.gguf"
    whole.symlink_to(chat_model)
    shards = split_gguf(whole, 3)
    result = run("longhaul-cli", "--model", shards[0], *SMALL, *ONE_ANSWER)
    assert result.code == 0, result.err
    assert result.turns == streamed.turns
    assert result.line("cache") == streamed.line("cache")


def test_a_name_with_spaces_and_letters_beyond_ascii(
    chat_model: Path, streamed: Result, tmp_path: Path
) -> None:
    path = tmp_path / "ein großes Modell.gguf"
    path.symlink_to(chat_model)
    result = run("longhaul-cli", "--model", path, *SMALL, *ONE_ANSWER)
    assert (result.code, result.turns) == (0, streamed.turns)
    assert result.counted("total") == streamed.counted("total")


def test_a_dense_model_runs_and_one_line_says_that_nothing_streams(smollm2: Path) -> None:
    result = run("longhaul-cli", "--model", smollm2, *SMALL, *ONE_ANSWER)
    assert result.code == 0, result.err
    (line,) = result.lines
    assert re.fullmatch(r"model .* \(llama\) has no routed experts: nothing is streamed", line)
    wanted = resident("longhaul-cli", "--model", smollm2, *ONE_ANSWER, n_ubatch=512)
    assert result.turns == wanted.turns
    assert len(result.turns[0]) > len(PROMPT) + 10


# --- a conversation -------------------------------------------------------------------------------


def test_a_conversation_is_the_resident_models(chat_model: Path) -> None:
    stdin = "Hello\nWhat else?\n/exit\n"
    result = run("longhaul-cli", "--model", chat_model, *SMALL, *CHAT, stdin=stdin)
    assert result.code == 0, result.err
    assert len(result.turns) == 2
    assert all(len(turn) > 20 for turn in result.turns)
    assert result.counted("tokens") == 2 * 11
    wanted = resident(
        "longhaul-cli", "--model", chat_model, *CHAT, n_ubatch=result.n_ubatch, stdin=stdin
    )
    assert result.turns == wanted.turns


@pytest.mark.parametrize(
    "tool",
    [
        "cli",
        "completion",
    ],
)
def test_the_end_of_stdin_ends_a_chat_that_has_read_no_expert(chat_model: Path, tool: str) -> None:
    program = ("longhaul-cli",) if tool == "cli" else ("longhaul", tool)
    chat = () if tool == "cli" else ("-cnv",)  # llama-cli does nothing but chat
    result = run(*program, "--model", chat_model, *SMALL, *CHAT, *chat)
    assert (result.code, result.turns) == (0, [])
    assert [line.split()[0] for line in result.lines][-1] == "reads"  # nothing was evaluated


@pytest.mark.parametrize("cache", ["1MiB", "2GiB"])
def test_ctrl_c_ends_an_answer_cleanly(chat_model: Path, cache: str) -> None:
    args = ("-p", "Hello", "-n", "1900", "--single-turn", "--temp", "0", "--ignore-eos")
    size = ("--longhaul-cache", cache)
    with Running("longhaul-cli", "--model", chat_model, *size, *args, "--simple-io") as running:
        running.wait_for(r"\n> Hello\n.{20}")
        running.interrupt()
        result = running.end(20)
    assert result.code == 0, result.err
    assert "Traceback" not in result.err
    assert "KeyboardInterrupt" not in result.err
    assert len(result.turns) == 1
    assert 0 < result.counted("tokens") < 1899
    assert result.line("total").endswith(", 0 errors")


# --- what goes wrong while it runs ----------------------------------------------------------------


def test_a_failed_read_ends_the_answer_and_says_where(chat_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(chat_model.read_bytes())
    args = ("--model", path, *SMALL, *CHAT, "--load-mode", "none")
    with Running("longhaul-cli", *args) as running:
        running.say("Hello")
        running.wait_for(r"Generation: .*\n[^>]*> ")
        truncate(path, first_expert_byte(path))
        running.say("And now something completely different")
        running.wait_for(r"Error: .*\n(.*\n)*> ")
        result = running.end()
    assert result.code == 1
    error = result.line("error:")
    assert f"{path} has changed since it was opened" in error
    assert "Traceback" not in result.err
    first, second = result.turns
    assert len(first) > 20
    assert second.startswith("Error: ")  # and no word before or after it
    assert second.count("\n") == 0
    assert result.line("total").endswith(" 1 errors")


# --- llama.cpp's own options ----------------------------------------------------------------------


def test_an_unknown_option_is_llama_cpps_own_error(chat_model: Path) -> None:
    result = run("longhaul-cli", "--model", chat_model, *SMALL, "--nonsense", "-p", "x")
    assert result.code == 1
    assert result.out == ""
    assert "error: invalid argument: --nonsense" in result.err
    assert "Traceback" not in result.err
    assert not [line for line in result.lines if line.startswith(("total", "memory  peak"))]


def test_a_misspelt_option_of_ours_is_not_passed_on(chat_model: Path) -> None:
    result = run("longhaul-cli", "--model", chat_model, "--longhaul-cahce", "2")
    assert (result.code, result.out) == (2, "")
    assert result.err == (
        "longhaul: error: no option --longhaul-cahce; --help lists those of longhaul\n"
    )


def test_llama_cpps_options_take_effect(chat_model: Path, streamed: Result) -> None:
    args = ("-c", "512", "-b", "64", "-ub", "1", "-t", "1")
    result = run("longhaul-cli", "--model", chat_model, *SMALL, *ONE_ANSWER, *args)
    assert result.code == 0, result.err
    assert result.n_ubatch == 1
    wanted = resident("longhaul-cli", "--model", chat_model, *ONE_ANSWER, *args, n_ubatch=1)
    assert result.turns == wanted.turns


def test_help_shows_ours_and_help_llama_the_rest() -> None:
    ours = run("longhaul-cli", "--help")
    assert ours.code == 0
    assert ours.out.startswith("Usage: longhaul-cli [OPTIONS] [LLAMA.CPP OPTIONS]...")
    assert "--longhaul-cache" in ours.out
    assert "--help-llama" in ours.out
    assert "--ctx-size" not in ours.out
    llamas = run("longhaul-cli", "--help-llama")
    assert llamas.code == 0
    assert "--ctx-size" in llamas.out
    assert "--longhaul" not in llamas.out


@pytest.mark.parametrize("word", ["--version", "--list-devices", "--usage"])
def test_what_needs_no_model_makes_none(word: str, tmp_path: Path) -> None:
    env = environment(LONGHAUL_DEMO_MODEL=str(tmp_path / "demo.gguf"))
    result = run("longhaul-cli", word, env=env)
    assert result.code == 0, result.err
    assert result.out + result.err
    assert result.lines == []
    assert list(tmp_path.iterdir()) == []


def test_sizes_in_the_tests_are_what_they_claim(index: MoeModel) -> None:
    size_bytes = parse_cache(SMALL[1])
    assert size_bytes is not None
    assert index.token_cycle_bytes < size_bytes < index.expert_bytes
