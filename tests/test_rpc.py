"""Workers that cannot be reached, and workers that die: what is computed fails, and nothing more.

tests/test_on_devices.py compares logits.
"""

import ctypes
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from commands import CHAT, OURS, PROMPT, SMALL, Result, Running, run
from devices import Line, forget_workers, worker
from servers import free_port, serve
from streaming import Placement, Recipe, evaluate, largest_difference, load

from longhaul import llama
from longhaul.config import Config
from longhaul.engine import Engine
from longhaul.errors import ConfigError, DecodeError, ModelError, NativeError
from longhaul.index import read_index
from longhaul.llama import llama_cpp

pytestmark = pytest.mark.usefixtures("libraries")

ALL_LAYERS = 99


@pytest.fixture(autouse=True)
def workers_are_forgotten() -> Iterator[None]:
    yield
    forget_workers()


GONE = "does not answer any longer"


# --- names ----------------------------------------------------------------------------------------


def test_unknown_names_are_errors(tiny: Path) -> None:
    with pytest.raises(ConfigError, match=r"no device 'RPC77'; there are .*CPU"):
        llama.Model(tiny, devices=["RPC77"])
    with pytest.raises(ConfigError, match="no buffer type 'RAM'; there are CPU"):
        llama.Model(tiny, tensor_overrides={"exps": "RAM"})


def test_a_workers_devices_are_known_once(libraries: Path) -> None:
    with worker() as endpoint:
        first, again = llama.add_rpc_server(endpoint), llama.add_rpc_server(endpoint)
        assert [device.name for device in first] == [device.name for device in again]
        assert len(first) == 1
        assert 0 < first[0].free_bytes <= first[0].total_bytes


def test_a_worker_that_is_not_there_is_an_error(libraries: Path) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    with pytest.raises(NativeError, match=f"^worker {endpoint} cannot be reached$"):
        llama.add_rpc_server(endpoint)
    with pytest.raises(NativeError, match=r"^worker nowhere is not of the form HOST:PORT$"):
        llama.add_rpc_server("nowhere")


def test_a_service_that_is_no_worker_is_an_error(libraries: Path) -> None:
    def hang_up(listener: socket.socket) -> None:
        listener.accept()[0].close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = f"127.0.0.1:{listener.getsockname()[1]}"
        thread = threading.Thread(target=hang_up, args=(listener,))
        thread.start()
        with pytest.raises(NativeError, match=f"^worker {endpoint} is no RPC server, or one of"):
            llama.add_rpc_server(endpoint)
        thread.join()


# --- a worker that dies ---------------------------------------------------------------------------


@pytest.mark.parametrize("n_bytes", [1, 3_000, 20_000, 60_000, 150_000])
def test_a_lost_worker_fails_the_evaluation_and_nothing_more(n_bytes: int, tiny: Path) -> None:
    """Cut at several places of a decode; what follows fails too, until the next load."""
    with ExitStack() as stack:
        line = stack.enter_context(Line(stack.enter_context(worker())))
        names = tuple(device.name for device in llama.add_rpc_server(line.endpoint))
        recipe = Recipe(n_prompt=24, n_greedy=2, placement=Placement(names, ALL_LAYERS))
        told: list[BaseException] = []
        model = read_index(tiny)
        slots = [4] * len(model.layers)
        engine = stack.enter_context(Engine(model, slots, Config(), on_error=told.append))
        with load(tiny, recipe) as loaded, llama.Context(loaded, n_ubatch=1) as context:
            assert context.decode([1, 2, 3]).any()
            line.cut_after(n_bytes)
            with pytest.raises(DecodeError, match="-3"):
                for token in range(100):  # each sends some thousand bytes
                    context.decode([token])
            assert [str(error) for error in told] == [f"worker {line.endpoint} {GONE}"]
            with pytest.raises(DecodeError, match="-3"):
                context.decode([4])
            assert len(told) == 2
            size = 1 << 20
            buffer = (ctypes.c_uint8 * size)()
            handle = context._context
            assert llama_cpp.llama_state_seq_get_data(handle, buffer, size, 0) == 0
            llama_cpp.llama_synchronize(handle)
            llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(handle), True)
        assert isinstance(engine.take_error(), NativeError)
        streamed = evaluate(tiny, recipe)  # a new connection
        engine.raise_kept()
        engine.close()
        assert largest_difference(streamed.logits, evaluate(tiny, recipe).logits) == 0.0


def test_a_worker_that_goes_before_the_load_is_an_error(tiny: Path) -> None:
    with worker() as endpoint:
        names = tuple(device.name for device in llama.add_rpc_server(endpoint))
    with pytest.raises(ModelError, match="cannot load"):
        llama.Model(tiny, devices=names, n_gpu_layers=ALL_LAYERS)


def assert_told_once(result: Result, text: str) -> None:
    assert result.code == 1, result.err
    # llama.cpp's log may write in the middle of a line
    assert result.err.count(f"{OURS}error: ") == 1, result.err
    assert f"{OURS}error: {text}\n" in result.err
    assert "Traceback" not in result.err
    assert "usage" not in result.err


def test_the_cli_says_that_a_worker_cannot_be_reached(chat_model: Path) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    args = ("--model", chat_model, *SMALL, "--rpc", endpoint, "-p", PROMPT, "--single-turn")
    assert_told_once(run("longhaul-cli", *args), f"worker {endpoint} cannot be reached")


def test_the_bench_says_that_a_worker_cannot_be_reached(chat_model: Path) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    result = run("longhaul-bench", "--model", chat_model, *SMALL, "--rpc", endpoint)
    assert_told_once(result, f"worker {endpoint} cannot be reached")


def test_the_cli_says_that_a_worker_goes_before_the_load(chat_model: Path) -> None:
    with worker() as endpoint, Line(endpoint, n_connections=1) as line:
        where = ("--rpc", line.endpoint, "--n-gpu-layers", "99")
        args = ("--model", chat_model, *SMALL, *where, "-p", PROMPT, "--single-turn")
        result = run("longhaul-cli", *args)
        assert result.code == 1
        assert f"worker {line.endpoint} cannot be reached" in result.err
        assert "Traceback" not in result.err


@pytest.mark.parametrize("streaming", [SMALL, ("--no-longhaul",)], ids=["streamed", "whole"])
def test_the_cli_ends_when_a_worker_dies(streaming: tuple[str, ...], chat_model: Path) -> None:
    with worker() as endpoint, Line(endpoint) as line:
        where = ("--rpc", line.endpoint, "--n-gpu-layers", "99")
        args = ("--model", chat_model, *streaming, *where, "-p", PROMPT, "--single-turn", *CHAT)
        with Running("longhaul-cli", *args, "-n", "100000", "--ctx-size", "512") as running:
            running.wait_for(rf"> {PROMPT}[^>]{{40}}")
            line.cut()
            result = running.end()
        if streaming == SMALL:
            assert_told_once(result, f"worker {line.endpoint} {GONE}")
        else:  # llama.cpp's own exit code, or ours where nobody caught it: no abort
            assert result.code in (0, 1)
            assert f"worker {line.endpoint} {GONE}" in result.err
            assert "Traceback" not in result.err


def test_the_server_answers_that_a_worker_has_died(chat_model: Path) -> None:
    with worker() as endpoint, Line(endpoint) as line:
        where = ("--rpc", line.endpoint, "--n-gpu-layers", "99")
        with serve(chat_model, *where, "--cache-ram", "64") as server:
            assert server.chat("Hello")["choices"]
            line.cut()
            for _ in range(3):
                with pytest.raises(httpx.HTTPStatusError) as failure:
                    server.chat("Hello again")
                answer = failure.value.response
                assert answer.status_code == 500
                assert f"worker {line.endpoint} {GONE}" in answer.json()["error"]["message"]
            assert server.http.get("/health").status_code == 200
            assert server.metrics()["longhaul_errors_total"] >= 1
            server.running.terminate()
            result = server.running.end()
            assert result.code == 0, result.err
            assert "Traceback" not in result.err
