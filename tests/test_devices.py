"""Where experts lie, and how much of each device they take: with workers on this machine.

ggml-rpc-server puts the memory and the cores of this machine behind a device that llama.cpp takes
for a GPU.
"""

import json
import os
import re
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from commands import CHAT, PROMPT, SMALL, Result, environment, resident, run
from models import write_tiny_moe
from servers import free_port

from longhaul import llama
from longhaul.config import Config
from longhaul.engine import Engine
from longhaul.errors import ConfigError, ModelError
from longhaul.index import read_index
from longhaul.library import lib_dir

pytestmark = pytest.mark.usefixtures("libraries")

CHECKOUT = Path(__file__).resolve().parent.parent
START_S = 20
ONCE = ("-c", "512", "--single-turn", "-p", PROMPT, *CHAT)
ALL = ("--n-gpu-layers", "99")


@contextmanager
def worker(limit_kib: int | None = None) -> Iterator[str]:
    """Have a worker run; yield HOST:PORT. With a limit it can take no more address space."""
    binary = Path(
        os.environ.get("LONGHAUL_TEST_RPC_SERVER", CHECKOUT / "build/native/bin/ggml-rpc-server")
    )
    if not binary.exists():
        pytest.skip(f"{binary} is not built; `make test` builds it")
    port = free_port()
    words = [str(binary), "-H", "127.0.0.1", "-p", str(port), "-t", "1"]
    limit = f"ulimit -v {limit_kib}; " if limit_kib else ""
    process = subprocess.Popen(
        ["sh", "-c", f'{limit}exec "$@"', "sh", *words],
        env=os.environ | {"LD_LIBRARY_PATH": str(lib_dir()), "OMP_WAIT_POLICY": "passive"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        end = time.monotonic() + START_S
        while True:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.05)
        yield f"127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def two() -> Iterator[tuple[str, str]]:
    """Two workers; experts can be in the memory of RPC0 and RPC1."""
    with worker() as first, worker() as second:
        yield first, second


def stream(model: Path, workers: tuple[str, ...], *args: str) -> Result:
    result = run("longhaul-cli", "-m", model, "--rpc", ",".join(workers), *ONCE, *args)
    assert result.code == 0, result.err
    return result


def slots(result: Result) -> dict[str, tuple[float, int]]:
    """Return MiB of slots and number of layers by device, as the lines say; only with experts."""
    line = re.compile(r"device  (\S+) \(.*\): ([0-9.]+) MiB of slots for ([0-9]+) layers")
    found = [line.match(text) for text in result.lines]
    return {match[1]: (float(match[2]), int(match[3])) for match in found if match}


def layers(result: Result) -> dict[str, int]:
    return {name: n_layers for name, (_, n_layers) in slots(result).items()}


@pytest.mark.parametrize(
    ("args", "placed"),
    [
        (("--n-gpu-layers", "0"), {}),
        (("--n-gpu-layers", "1"), {"CPU": 3}),  # the output layer
        (("--n-gpu-layers", "2"), {"CPU": 2, "RPC0": 1}),
        (ALL, {"RPC0": 2, "RPC1": 1}),
        ((*ALL, "--tensor-split", "1,3"), {"RPC0": 1, "RPC1": 2}),
        ((*ALL, "--device", "RPC1"), {"RPC1": 3}),
        ((*ALL, "--device", "none"), {}),
        ((*ALL, "--split-mode", "none"), {"RPC0": 3}),
        ((*ALL, "--cpu-moe"), {"CPU": 3}),
        ((*ALL, "--n-cpu-moe", "2"), {"CPU": 2, "RPC1": 1}),
        ((*ALL, "--override-tensor", r"blk.0.ffn_(up|gate)_exps=CPU"),
         {"CPU": 1, "RPC0": 2, "RPC1": 1}),
        ((*ALL, "--override-tensor", "exps=RPC0[{second}]"), {"RPC1": 3}),
        (("--fit-target", "100000000"), {}),  # fitted: nothing is to be on devices
    ],
)  # fmt: skip
def test_options_put_experts_where_they_say_and_change_no_word(
    args: tuple[str, ...], placed: dict[str, int], chat_model: Path, two: tuple[str, str]
) -> None:
    words = tuple(word.format(second=two[1]) for word in args)
    streamed = stream(chat_model, two, *SMALL, *words)
    assert layers(streamed) == placed
    assert streamed.counted("tokens") == 11
    whole = resident(
        "longhaul-cli", "-m", chat_model, "--rpc", ",".join(two), *ONCE, *words, n_ubatch=64
    )
    assert len(streamed.turns) == 1
    assert len(streamed.turns[0]) > 40
    assert streamed.turns == whole.turns


def test_each_device_gets_the_size_that_it_is_given(
    chat_model: Path, two: tuple[str, str], tmp_path: Path
) -> None:
    path = tmp_path / "run.json"
    sizes = ("--longhaul-cache", "CPU=300KiB/rpc0=150KiB", "--longhaul-json", str(path))
    result = stream(chat_model, two, *ALL, "--n-cpu-moe", "1", *sizes)
    figures = json.loads(path.read_text())
    # 72 KiB an expert; the last layer's device has no size of its own, and room for all
    assert figures["n_slots"] == [4, 2, 8]
    by_name = {device["name"]: device for device in figures["devices"]}
    assert {name: device["slot_bytes"] for name, device in by_name.items()} == {
        "CPU": 4 * 73728,
        "RPC0": 2 * 73728,
        "RPC1": 8 * 73728,
    }
    assert figures["slot_bytes"] == 14 * 73728
    assert by_name["RPC1"]["terms"]["compute"] > 0
    assert by_name["RPC1"]["free_bytes"] > by_name["RPC1"]["planned_bytes"]
    assert set(slots(result)) == {"CPU", "RPC0", "RPC1"}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--longhaul-cache", "CUDA0=1"), "no device CUDA0 for --longhaul-cache; experts lie on:"),
        (("--longhaul-cache", "CPU=1"), "no experts lie on CPU; they lie on: RPC0"),
        (("--split-mode", "tensor"), "--split-mode tensor cannot be used while streaming"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(
    args: tuple[str, ...], message: str, chat_model: Path, two: tuple[str, str]
) -> None:
    result = run("longhaul-cli", "-m", chat_model, "--rpc", two[0], *ONCE, *ALL, *args)
    assert result.code == 2
    assert message in result.line("error:")
    assert result.turns == []


def test_where_llama_cpp_refuses_it_says_so_itself(chat_model: Path, two: tuple[str, str]) -> None:
    result = run("longhaul-cli", "-m", chat_model, "--rpc", two[0], *ONCE, "--split-mode", "row")
    assert result.code == 1
    assert "does not support split buffers" in result.err
    assert "devices are not in this plan" in result.line("warning")
    assert result.turns == []


@pytest.mark.parametrize(
    ("tool", "args"),
    [
        ("completion", ("-p", PROMPT, "-n", "4", "-no-cnv", "-c", "256")),
        ("perplexity", ("--file", "{text}", "-c", "64", "-b", "128")),
    ],
)
def test_other_tools_are_planned_as_well(
    tool: str, args: tuple[str, ...], chat_model: Path, two: tuple[str, str], tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The sea is wide and the wind is cold. " * 60)
    words = [word.format(text=text) for word in args]
    result = run("longhaul", tool, "-m", chat_model, "--rpc", ",".join(two), *SMALL, *words)
    assert result.code == 0, result.err
    assert layers(result) == {"RPC0": 2, "RPC1": 1}
    assert result.counted("total") > 0


def test_plan_names_devices_among_the_limits(chat_model: Path, two: tuple[str, str]) -> None:
    args = ("plan", chat_model, "--rpc", ",".join(two), *SMALL, "-c", "512")
    result = run("longhaul", *args)
    assert result.code == 0, result.err
    assert re.search(r"^limit .* free: RPC0 \(127.0.0.1:[0-9]+\), for itself$", result.out, re.M)
    assert re.search(r"^device  RPC1 .*: 0\.[0-9] MiB of slots for 1 layers", result.out, re.M)
    assert "verdict fits" in result.out
    found = json.loads(run("longhaul", *args, "--json").out)
    assert [device["name"] for device in found["devices"]] == ["CPU", "RPC0", "RPC1"]
    assert found["least_budget_bytes"] == 3 * 2 * 73728  # as many as a token uses, on devices


def test_a_placement_that_was_not_planned_fails_the_load(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_tiny_moe(tmp_path / "tiny.gguf")
    model = read_index(path)
    names = [tensor.name for layer in model.layers for tensor in layer.tensors]
    llama.route_log()
    with Engine(model, [2] * len(model.layers), Config()) as engine:
        engine.plan_devices(dict.fromkeys(names, "CPU"), {})
        llama.Model(path).close()
        assert set(engine.devices().values()) == {"CPU"}
        engine.plan_devices({names[4]: "Vulkan7"}, {})
        with pytest.raises(ModelError):
            llama.Model(path)
        with pytest.raises(ConfigError, match=r"blk\.9\.x: unknown tensor"):
            engine.plan_devices({"blk.9.x": "CPU"}, {})
    (line,) = (text for text in caplog.messages if "Vulkan7" in text)
    assert f"{names[4]}: planned on Vulkan7, but llama.cpp puts it on CPU" in line


def test_a_device_without_memory_says_what_would_fit_and_that_fits(small_demo: Path) -> None:
    experts_kib = read_index(small_demo).expert_bytes // 1024
    with worker(limit_kib=experts_kib + 50_000) as address:
        args = ("--rpc", address, "-m", small_demo, "-c", "512", "--single-turn", "-n", "2")
        short = run("longhaul-cli", *args, "-p", PROMPT)
        assert short.code == 1
        message = short.line("error:")
        found = re.fullmatch(
            r"error: RPC0: no memory for ([0-9]+) MiB of slots, [0-9]+ MiB are reported free;"
            r" give --longhaul-cache RPC0=([0-9]+)MiB or less",
            message,
        )
        assert found, short.err
        assert int(found[2]) < int(found[1]) == experts_kib // 1024
        assert short.turns == []
        fitting = run(
            "longhaul-cli", *args, "-p", PROMPT, "--longhaul-cache", f"RPC0={found[2]}MiB"
        )
        assert fitting.code == 0, fitting.err
        assert fitting.counted("total") > 2


def test_a_bench_says_that_it_does_not_count_devices(
    chat_model: Path, two: tuple[str, str]
) -> None:
    few = ("--n-prompt", "4", "--n-gen", "2", "--repetitions", "1", "--no-warmup")
    args = ("-m", chat_model, "--rpc", ",".join(two), *few)
    result = run("longhaul-bench", *args, *SMALL)
    assert result.code == 0, result.err
    assert "devices are not counted" in result.line("warning")
    assert "tg2" in result.out
    refused = run("longhaul-bench", *args, "--longhaul-cache", "RPC0=1")
    assert refused.code == 2
    assert "a bench does not count devices" in refused.line("error:")


def test_a_device_whose_memory_is_ram_is_counted_as_ram(chat_model: Path) -> None:
    """Runs where the libraries have Vulkan, and Mesa's lavapipe is its device."""
    env = environment(GGML_VK_VISIBLE_DEVICES="0")
    args = ("-m", chat_model, *ONCE, *ALL, *SMALL)
    listed = run("longhaul-cli", "--list-devices", env=env).out
    if "llvmpipe" not in listed:
        pytest.skip(f"no llvmpipe among the devices: {listed.split()}")
    result = run("longhaul-cli", *args, env=env)
    assert result.code == 0, result.err
    assert layers(result) == {"CPU": 3}
    whole = run("longhaul-cli", "--no-longhaul", *args[:-2], "-ub", "64", env=env)
    assert len(result.turns[0]) > 40
    assert result.turns == whole.turns


# --- experts in memory behind the slots -----------------------------------------------------------


def test_experts_kept_in_memory_need_no_read_and_change_no_word(
    chat_model: Path, two: tuple[str, str], tmp_path: Path
) -> None:
    path = tmp_path / "run.json"
    few = ("--longhaul-cache", "450KiB", "--longhaul-json", str(path))
    without = stream(chat_model, two, *ALL, *few)
    read_bytes = json.loads(path.read_text())["total"]["read_bytes"]
    kept = stream(chat_model, two, *ALL, *few, "--longhaul-ram", "1", "--longhaul-pin", "100KiB")
    found = json.loads(path.read_text())
    assert "24 " not in kept.line("tier")
    assert "behind the slots of 3 layers: 8 experts each, 100.0% of them" in kept.line("tier")
    total = found["total"]
    assert 0 < total["n_tier_hits"] < total["n_misses"]
    assert 0 < total["read_bytes"] == 24 * 73728 < read_bytes  # each expert once
    assert found["tier_bytes"] == 24 * 73728
    assert re.search(
        r"hit rate [0-9.]+% \+ [0-9.]+% from memory \+ [0-9.]+% from disk", kept.line("total")
    )
    assert len(kept.turns[0]) > 40
    assert kept.turns == without.turns


def test_memory_behind_slots_in_the_same_memory_is_refused(chat_model: Path) -> None:
    refused = run("longhaul-cli", "-m", chat_model, *ONCE, *SMALL, "--longhaul-ram", "1")
    assert refused.code == 2
    assert "would hold every expert twice" in refused.line("error:")
    args = ("-m", chat_model, *ONCE, *SMALL, "--longhaul-ram", "1", "--longhaul-ram-anyway")
    assert run("longhaul-cli", *args).code == 0
