"""Where the time of a decoded token goes. Run with: pytest bench/bench_decode.py

The model replays a recorded routing of OLMoE at a quarter of its experts' size, made once in
build/bench; LONGHAUL_BENCH_MODEL names another one, such as what make_trace_model.py writes. A
round is a token, with the page cache passed by; the split of its time is in `extra_info`, and
printed with pytest's -s.
"""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from longhaul import llama
from longhaul.budget import MIB
from longhaul.config import Config
from longhaul.engine import Engine
from longhaul.figures import counters_dict
from longhaul.index import read_index
from longhaul.report import time_split

BENCH = Path(__file__).resolve().parent
MADE = BENCH.parent / "build" / "bench"
N_WARM, N_TOKENS, N_THREADS = 16, 64, 2


def trace_model(n_expert: int) -> Path:
    """Return the model, of whose experts only the 64 of the trace are ever selected."""
    if n_expert == 64 and "LONGHAUL_BENCH_MODEL" in os.environ:
        return Path(os.environ["LONGHAUL_BENCH_MODEL"])
    path = MADE / f"olmoe-{n_expert}.gguf"
    if not path.exists():
        MADE.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        options = ["--n-ff", "256", "--n-expert", str(n_expert)]
        command: list[str | Path] = [sys.executable, BENCH / "make_trace_model.py"]
        trace = BENCH / "traces" / "olmoe-1b-7b.jsonl"
        subprocess.run([*command, trace, part, *options], check=True)
        part.rename(path)
    return path


def measure(benchmark: BenchmarkFixture, path: Path, n_slots: int) -> None:
    """Decode tokens one by one; the counters of all of them go into `extra_info`."""
    model = read_index(path)
    slots = [min(n_slots, layer.n_expert) for layer in model.layers]
    llama.route_log()
    with (
        Engine(model, slots, Config()) as engine,
        llama.Model(path) as loaded,
        llama.Context(loaded, n_ctx=512, n_threads=N_THREADS) as context,
    ):
        tokens = iter(range(10**6))

        def step() -> None:
            context.decode([next(tokens) % loaded.n_vocab])

        for _ in range(N_WARM):
            step()
        before = engine.stats()
        benchmark.pedantic(step, rounds=N_TOKENS)  # type: ignore[no-untyped-call]
        counters = (engine.stats() - before).decode
        engine.raise_kept()
    assert counters.n_tokens == N_TOKENS
    benchmark.extra_info.update(counters_dict(counters))
    print(
        f"\n{counters.tokens_per_s:.2f} tok/s, hit rate {counters.hit_rate:.1%},"
        f" {counters.read_bytes_per_token / MIB:.1f} MiB per token, {time_split(counters)}"
    )


@contextmanager
def busy_process() -> Iterator[None]:
    """Keep one core busy with another process."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        try:
            yield
        finally:
            process.kill()


@contextmanager
def busy_thread() -> Iterator[None]:
    """Run Python in another thread of this process all the time."""
    is_over = threading.Event()

    def spin() -> None:
        while not is_over.is_set():
            pass

    thread = threading.Thread(target=spin)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@pytest.mark.parametrize("n_slots", [8, 16, 32, 64])
def test_slots(benchmark: BenchmarkFixture, n_slots: int) -> None:
    """12, 25, 50 and 100 % of the slots."""
    measure(benchmark, trace_model(64), n_slots)


@pytest.mark.parametrize("n_slots", [16, 64])
def test_beside_a_busy_process(benchmark: BenchmarkFixture, n_slots: int) -> None:
    """To be held against the same slots in `test_slots`."""
    with busy_process():
        measure(benchmark, trace_model(64), n_slots)


def test_beside_a_busy_thread(benchmark: BenchmarkFixture) -> None:
    """To be held against `test_beside_a_busy_process`: a thread takes a core as well."""
    with busy_thread():
        measure(benchmark, trace_model(64), 16)


@pytest.mark.parametrize("n_slots", [16, 64])
def test_twice_the_experts(benchmark: BenchmarkFixture, n_slots: int) -> None:
    """The same experts are selected as in `test_slots`, of twice as many."""
    measure(benchmark, trace_model(128), n_slots)
