"""llama.cpp's other tools as subcommands of `longhaul`: same results as without streaming."""

import re
import signal
import socket
from pathlib import Path

import pytest
from commands import OURS, PROMPT, SMALL, Result, Running, first_expert_byte, resident, run
from models import Type, truncate, write_tiny_moe
from servers import free_port

from longhaul.index import read_index

pytestmark = pytest.mark.usefixtures("libraries")

WORDS = "the river of stone light water walk under over bright quiet morning bird tree".split()


@pytest.fixture(scope="module")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(" ".join(WORDS[i * i * 7 % 61 % len(WORDS)] for i in range(400)))
    return path


# --- the same results -----------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    "ubatch",
    [
        "keep",
        "shrink",
    ],
)
def test_perplexity_of_more_windows_at_once_than_a_ubatch_has_tokens(
    chat_model: Path, text_file: Path, ubatch: str
) -> None:
    args = ("--model", chat_model, "--file", text_file, "-c", "32", "-b", "256")  # 8 windows
    result = run("longhaul", "perplexity", *SMALL, "--longhaul-ubatch", ubatch, *args)
    assert result.code == 0, result.err
    assert perplexities(result).count("[") == 12
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


def test_the_rpc_server_takes_the_options_of_llama_cpps(tmp_path: Path) -> None:
    port = free_port()
    words = ("-H", "127.0.0.1", "-p", str(port), "-t", "1", "-d", "CPU")
    with Running("longhaul", "rpc-server", *words) as running:
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                assert running.is_alive(), running.end().err
        running.wait_for("Client connection closed")
        running.interrupt()
        result = running.end(20)
    assert result.code == -signal.SIGINT
    assert f"endpoint       : 127.0.0.1:{port}" in result.out
    assert "CPU: " in result.out
    assert result.lines == []


def test_an_rpc_server_that_cannot_listen_fails() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        result = run("longhaul", "rpc-server", "--port", str(port))
    assert result.code == 1
    assert "Failed to create server socket" in result.err


def test_an_rpc_server_does_not_know_every_device() -> None:
    result = run("longhaul", "rpc-server", "--device", "GPU77")
    assert result.code == 1
    assert "unknown device: GPU77" in result.err
    assert "Traceback" not in result.err


# --- interrupted, or failed -----------------------------------------------------------------------


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
    assert f"{path} has changed since it was opened" in result.line("error:")
    assert "Traceback" not in result.err


# --- help -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("tool", ["completion", "perplexity", "quantize", "rpc-server"])
def test_help_llama_of_the_other_tools(tool: str) -> None:
    result = run("longhaul", tool, "--help-llama")
    assert result.code == (1 if tool == "quantize" else 0)
    wanted = {
        "completion": "--no-conversation",
        "perplexity": "--kl-divergence",
        "quantize": "--imatrix",
        "rpc-server": "--cache",
    }
    assert wanted[tool] in result.out + result.err
    assert "Traceback" not in result.err
