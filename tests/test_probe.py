"""Whether llama.cpp is asked where it puts a model, and what is made of its answer."""

import dataclasses
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from models import write_tiny_moe

from longhaul import native, probe
from longhaul.budget import MemoryLimit
from longhaul.config import Config
from longhaul.errors import ConfigError
from longhaul.library import lib_dir
from longhaul.pools import CPU, DeviceMemory, Placement

MIB = 2**20
HOST = DeviceMemory(CPU, "a CPU", True, 0, 0, 30 * MIB, 10 * MIB, 5 * MIB)
CARD = DeviceMemory("CUDA0", "a card", False, 900 * MIB, 800 * MIB, 70 * MIB, 20 * MIB, 15 * MIB)
PLACEMENT = Placement((CARD,), HOST, {"blk.0.ffn_up_exps.weight": "CUDA0"}, 4096, ("--fit", "off"))


def answer(placement: Placement) -> str:
    return json.dumps(
        {
            "devices": [dataclasses.asdict(d) for d in (*placement.devices, placement.host)],
            "device_of": placement.device_of,
            "n_ctx": placement.n_ctx,
            "args": placement.args,
            "process_bytes": placement.process_bytes,
        }
    )


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Answers without llama.cpp; holds the options of each question."""
    questions: list[list[str]] = []

    def fake(words: Any, *, input: str, **kwargs: Any) -> subprocess.CompletedProcess[str]:
        questions.append(json.loads(input)["args"])
        return subprocess.CompletedProcess(words, 0, answer(PLACEMENT))

    monkeypatch.setattr(subprocess, "run", fake)
    monkeypatch.setattr(probe, "has_device_backend", lambda: True)
    monkeypatch.setattr(
        probe, "known_limit", lambda config: MemoryLimit(900 * MIB, 800 * MIB, "the test")
    )
    return questions


def placed(tell: Callable[[str], None] = print, **more: bool) -> Placement | None:
    cut = {"may_cut_context": False} | more
    return probe.placed("cli", ["-ngl", "1"], Path("m.gguf"), Config(), tell, **cut)


def test_a_run_on_the_cpu_asks_nothing(
    asked: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "has_device_backend", lambda: False)
    assert placed() is None
    assert asked == []


@pytest.mark.parametrize("name", ["base", "cpu", "cpu-haswell", "rpc", "blas"])
def test_libraries_of_no_device_are_none(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suffix = next(path.suffix for path in lib_dir().glob("libllama.*"))
    monkeypatch.setenv("LONGHAUL_LIB_DIR", str(tmp_path))
    for library in ("llama", f"ggml-{name}"):
        (tmp_path / f"lib{library}{suffix}").touch()
    assert not probe.may_have_devices([], {})
    assert probe.may_have_devices(["--rpc", "127.0.0.1:50052"], {})
    assert probe.may_have_devices([], {"LLAMA_ARG_RPC": "127.0.0.1:50052"})
    (tmp_path / f"libggml-vulkan{suffix}").touch()
    assert probe.may_have_devices([], {})


def test_the_answer_comes_as_it_was_given(asked: list[list[str]]) -> None:
    assert placed() == PLACEMENT
    assert asked == [["-ngl", "1"]]


def test_a_context_too_large_is_asked_about_again(
    asked: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    large = dataclasses.replace(CARD, context_bytes=700 * MIB)
    monkeypatch.setattr(
        probe,
        "read_answer",
        lambda text: dataclasses.replace(PLACEMENT, devices=(large,), n_ctx=32768),
    )
    found = placed(may_cut_context=True)
    assert found is not None
    assert found.n_ctx_cut == 8192  # 175 MiB, of the 730 that the model leaves
    assert asked == [["-ngl", "1"], ["-ngl", "1", "--ctx-size", "8192"]]


@pytest.mark.parametrize("text", ["", "error: invalid argument", "{"])
def test_where_nothing_is_answered_devices_are_said_not_to_count(
    text: str, asked: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: subprocess.CompletedProcess(a, 1, text))
    said: list[str] = []
    assert placed(said.append) is None
    assert said == [
        "warning devices are not in this plan: llama.cpp does not say what it puts there"
    ]


def test_a_question_that_takes_too_long_is_given_up(
    asked: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(*args: Any, timeout: float, **kwargs: Any) -> None:
        raise subprocess.TimeoutExpired("x", timeout)

    monkeypatch.setattr(subprocess, "run", late)
    said: list[str] = []
    assert placed(said.append) is None
    assert len(said) == 1


def test_what_lies_in_ram_alone_is_no_placement(
    asked: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = dataclasses.replace(PLACEMENT, devices=(), device_of={"blk.0.ffn_up_exps.weight": CPU})
    monkeypatch.setattr(probe, "read_answer", lambda text: alone)
    said: list[str] = []
    assert placed(said.append) is None
    assert said == []


# --- with llama.cpp -------------------------------------------------------------------------------


def test_llama_cpp_says_what_it_puts_where(libraries: Path, tmp_path: Path) -> None:
    path = write_tiny_moe(tmp_path / "tiny.gguf")
    found = probe.probe("completion", ["-m", str(path), "-c", "256", "-p", "x"], path)
    assert found is not None
    assert found.is_host_only
    assert set(found.device_of.values()) == {CPU}
    assert len(found.device_of) == 9
    assert found.n_ctx == 256
    assert found.host.name == CPU
    # embeddings and output of 128 words, attention, norms and routers: not one expert of 1.7 MiB
    assert 0.1 * MIB < found.host.model_bytes < 0.7 * MIB
    assert (
        found.host.context_bytes == 3 * 2 * 256 * 32 * 2
    )  # layers, keys and values, cells, 1 head
    assert found.host.compute_bytes > 0
    assert "--fit" in found.args
    assert 20 * MIB < found.process_bytes < 300 * MIB


def test_files_where_one_works_do_not_stand_in_for_modules(
    libraries: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tiny_moe(tmp_path / "tiny.gguf")
    for name in ("json", "numpy", "longhaul"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    assert probe.probe("cli", ["-m", str(path), "-c", "256"], path) is not None


@pytest.mark.parametrize(
    "args", [["--no-such-option"], ["--help"], ["--override-tensor", "x=nowhere"], ["-c", "x"]]
)
def test_options_that_end_the_tool_do_not_end_us(
    args: list[str], libraries: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write_tiny_moe(tmp_path / "tiny.gguf")
    assert probe.probe("cli", ["-m", str(path), *args], path) is None
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("tool", "message"), [("bench", "bench has options of its own"), ("chess", "no tool chess")]
)
def test_only_tools_with_common_options_can_be_asked(
    tool: str, message: str, libraries: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        native.place_tool(tool, ["-m", "m.gguf"])
