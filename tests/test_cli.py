"""The commands, run as a user runs them: same text as without streaming, and what is said of it."""

import re
import signal
from pathlib import Path

import pytest
from commands import OURS, Result, Running, environment, run
from models import Type, split_gguf, truncate, write_tiny_moe

from longhaul.budget import MIB
from longhaul.config import parse_cache
from longhaul.experts import MoeModel
from longhaul.index import read_index

pytestmark = pytest.mark.usefixtures("libraries")

SMALL = ("--longhaul-cache", "1MiB")  # 4 to 5 of the chat model's 8 slots
PROMPT = "Write about the sea"
ONE_ANSWER = ("-p", PROMPT, "-n", "24", "--single-turn", "--temp", "0", "--seed", "1")
CHAT = ("-n", "12", "--temp", "0", "--seed", "1", "--ignore-eos", "--simple-io")
# Tells that a word does not come from the text of a prompt: a tiny model says anything but that.
WORDS = "the river of stone light water walk under over bright quiet morning bird tree".split()


def resident(program: str, *args: str | Path, n_ubatch: int, stdin: str = "") -> Result:
    """Run without streaming at the ubatch that streaming took."""
    first = (args[0],) if program == "longhaul" else ()
    rest = args[len(first) :]
    result = run(program, *first, "--no-longhaul", *rest, "-ub", str(n_ubatch), stdin=stdin)
    assert result.code == 0, result.err
    assert result.lines == []
    return result


@pytest.fixture(scope="module")
def index(chat_model: Path) -> MoeModel:
    return read_index(chat_model)


@pytest.fixture(scope="module")
def streamed(chat_model: Path, libraries: Path) -> Result:
    """One answer of longhaul-cli with a cache smaller than the experts."""
    return run("longhaul-cli", "--model", chat_model, *SMALL, *ONE_ANSWER)


@pytest.fixture(scope="module")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(" ".join(WORDS[i * i * 7 % 61 % len(WORDS)] for i in range(400)))
    return path


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
            rf" {number} MiB read per token, [0-9]+% of the time waiting",
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


def test_nothing_of_ours_is_on_stdout(streamed: Result) -> None:
    assert OURS not in streamed.out
    assert all(line.startswith(OURS) for line in streamed.err.splitlines())


def test_longhaul_is_accepted_and_the_last_word_on_it_counts(
    chat_model: Path, streamed: Result
) -> None:
    result = run("longhaul-cli", "--longhaul", "--model", chat_model, *SMALL, *ONE_ANSWER)
    assert (result.code, result.turns) == (0, streamed.turns)
    assert result.line("cache") == streamed.line("cache")
    both = run("longhaul-cli", "--longhaul", "--no-longhaul", "-m", chat_model, *SMALL, *ONE_ANSWER)
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


@pytest.mark.parametrize("n_slots", [2, 3])
def test_a_cache_of_hardly_one_token_answers_the_same(
    chat_model: Path, index: MoeModel, n_slots: int
) -> None:
    size = n_slots * sum(layer.expert_bytes for layer in index.layers)
    result = run("longhaul-cli", "-m", chat_model, "--longhaul-cache", f"{size}B", *ONE_ANSWER)
    assert result.code == 0, result.err
    assert f" {n_slots} slots per layer" in result.line("cache")
    wanted = resident("longhaul-cli", "-m", chat_model, *ONE_ANSWER, n_ubatch=result.n_ubatch)
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
        pytest.param(
            "cli",
            marks=pytest.mark.xfail(
                strict=True,
                reason="llama.cpp's server evaluates two tokens to see whether it can drop some",
            ),
        ),
        "completion",
    ],
)
def test_the_end_of_stdin_ends_a_chat_that_has_read_no_expert(chat_model: Path, tool: str) -> None:
    program = ("longhaul-cli",) if tool == "cli" else ("longhaul", tool)
    result = run(*program, "--model", chat_model, *SMALL, *CHAT, "-cnv")
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


def test_ctrl_c_ends_a_tool_that_does_not_listen_for_it(chat_model: Path, tmp_path: Path) -> None:
    text = tmp_path / "long.txt"
    text.write_text(" ".join(WORDS) * 4000)
    args = ("--model", chat_model, "--longhaul-cache", "2", "--file", text, "-c", "128")
    with Running("longhaul", "perplexity", *args) as running:
        running.wait_for(r"\[4\]")
        running.interrupt()
        result = running.end(20)
    assert result.code == -signal.SIGINT
    assert "Traceback" not in result.err


# --- what goes wrong while it runs ----------------------------------------------------------------


def first_expert_byte(path: Path) -> int:
    return min(tensor.offset for layer in read_index(path).layers for tensor in layer.tensors)


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
    offset = int(re.findall(r"offset ([0-9]+)", error)[0])
    assert str(path) in error
    assert first_expert_byte(chat_model) <= offset < chat_model.stat().st_size
    assert "Traceback" not in result.err
    first, second = result.turns
    assert len(first) > 20
    assert second.startswith("Error: ")  # and no word before or after it
    assert second.count("\n") == 0
    assert result.line("total").endswith(" 1 errors")


def test_a_failed_read_of_a_completion_makes_the_exit_code_1(
    chat_model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(chat_model.read_bytes())
    # Conversation mode waits for a line, so the file can be cut before the first evaluation.
    args = ("--model", path, *SMALL, "-n", "8", "--load-mode", "none", "--simple-io", "-cnv")
    with Running("longhaul", "completion", *args) as running:
        running.wait_for("sampler chain", err=True)
        truncate(path, first_expert_byte(path))
        running.say("Hello")
        running.wait_for("error: ", err=True)
        result = running.end()
    assert result.code == 1
    assert "offset" in result.line("error:")
    assert "Traceback" not in result.err


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


@pytest.mark.parametrize("tool", ["completion", "perplexity", "quantize"])
def test_help_llama_of_the_other_tools(tool: str) -> None:
    result = run("longhaul", tool, "--help-llama")
    assert result.code == (1 if tool == "quantize" else 0)
    wanted = {
        "completion": "--no-conversation",
        "perplexity": "--kl-divergence",
        "quantize": "--imatrix",
    }
    assert wanted[tool] in result.out + result.err
    assert "Traceback" not in result.err


@pytest.mark.parametrize("word", ["--version", "--list-devices", "--usage"])
def test_what_needs_no_model_makes_none(word: str, tmp_path: Path) -> None:
    env = environment(LONGHAUL_DEMO_MODEL=str(tmp_path / "demo.gguf"))
    result = run("longhaul-cli", word, env=env)
    assert result.code == 0, result.err
    assert result.out + result.err
    assert result.lines == []
    assert list(tmp_path.iterdir()) == []


# --- the other tools ------------------------------------------------------------------------------


def test_a_completion_is_the_resident_models(chat_model: Path) -> None:
    args = ("--model", chat_model, "-p", PROMPT, "-n", "24", "--temp", "0", "-no-cnv")
    result = run("longhaul", "completion", *SMALL, *args)
    assert result.code == 0, result.err
    assert result.out.startswith(PROMPT)
    assert len(result.out) > len(PROMPT) + 40
    assert result.counted("tokens") == 23
    wanted = resident("longhaul", "completion", *args, n_ubatch=result.n_ubatch)
    assert result.out == wanted.out
    assert OURS not in result.out


def perplexities(result: Result) -> str:
    """Return all figures; the time beside them differs."""
    return "".join(re.findall(r"\[[0-9]+\][0-9.]+,", result.out))


@pytest.mark.parametrize("batch", ["64", "32"])  # a window at once, or in two batches
def test_perplexity_is_the_resident_models(chat_model: Path, text_file: Path, batch: str) -> None:
    args = ("--model", chat_model, "--file", text_file, "-c", "64", "-b", batch)
    result = run("longhaul", "perplexity", *SMALL, *args)
    assert result.code == 0, result.err
    figures = perplexities(result)
    assert figures.count("[") >= 6
    wanted = resident("longhaul", "perplexity", *args, n_ubatch=result.n_ubatch)
    assert figures == perplexities(wanted)
    assert result.line("total").endswith(", 0 errors")
    peak, planned = re.findall(r"[0-9]+", result.lines[-1])
    assert int(peak) <= int(planned) + 64


def test_perplexity_of_more_windows_at_once_than_a_ubatch_has_tokens(
    chat_model: Path, text_file: Path
) -> None:
    args = ("--model", chat_model, "--file", text_file, "-c", "32", "-b", "256")  # 8 windows
    result = run("longhaul", "perplexity", *SMALL, *args)
    assert result.code == 0, result.err
    wanted = resident("longhaul", "perplexity", *args, n_ubatch=result.n_ubatch)
    assert perplexities(result) == perplexities(wanted)


def test_perplexity_stays_within_its_plan(chat_model: Path, tmp_path: Path) -> None:
    text = tmp_path / "long.txt"
    text.write_text(" ".join(WORDS * 300))
    args = ("--model", chat_model, "--longhaul-cache", "2", "--file", text, "--chunks", "4")
    result = run("longhaul", "perplexity", *args)
    assert result.code == 0, result.err
    peak, planned = re.findall(r"[0-9]+", result.lines[-1])
    assert int(peak) <= int(planned) + 64


def test_quantize_writes_a_model_that_can_stream(tmp_path: Path) -> None:
    types = {"*": Type.F16}
    source = write_tiny_moe(tmp_path / "f16.gguf", types=types)
    target = tmp_path / "q4_0.gguf"
    result = run("longhaul", "quantize", source, target, "Q4_0")
    assert result.code == 0, result.err
    assert result.lines == []
    before, after = read_index(source), read_index(target)
    assert {tensor.type_name for tensor in before.layers[0].tensors} == {"F16"}
    assert {tensor.type_name for tensor in after.layers[0].tensors} == {"Q4_0"}
    assert [layer.n_expert for layer in after.layers] == [8, 8, 8]
    assert after.expert_bytes == before.expert_bytes * 18 // 64


def test_quantize_fails_as_llama_cpp_does(tmp_path: Path) -> None:
    result = run("longhaul", "quantize", tmp_path / "none.gguf", tmp_path / "q.gguf", "Q4_0")
    assert result.code == 1
    assert "Traceback" not in result.err


def test_sizes_in_the_tests_are_what_they_claim(index: MoeModel) -> None:
    size_bytes = parse_cache(SMALL[1])
    assert size_bytes is not None
    assert index.token_cycle_bytes < size_bytes < index.expert_bytes
