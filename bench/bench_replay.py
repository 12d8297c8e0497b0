"""Expert ids a second through a cache without a model. Run with: pytest bench/bench_replay.py

The recorded routing of OLMoE over and over, in 16 layers of 64 experts, top-8.
"""

from pathlib import Path

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from longhaul.replay import NAMES, replay
from longhaul.survey import convert_file
from longhaul.trace_files import open_trace
from longhaul.workload import LayerTrace, Workload, load_workload

TRACE = Path(__file__).resolve().parent / "traces" / "olmoe-1b-7b.jsonl"
N_TIMES = 10


@pytest.fixture(scope="module")
def workload() -> Workload:
    """Return ten times the trace: 383 thousand expert ids."""
    once = load_workload(open_trace(TRACE))
    layers = []
    for layer in once.layers:
        longer = LayerTrace(layer.shape)
        for time in range(N_TIMES):
            for ubatch, need in enumerate(layer.needs()):
                longer.add(time * once.n_ubatches + ubatch, need)
        layers.append(longer)
    return Workload(once.header, tuple(layers), once.n_tokens * N_TIMES, once.is_prefill * N_TIMES)


@pytest.mark.parametrize("n_slots", [16, 32])
@pytest.mark.parametrize("policy", NAMES)
def test_replay(benchmark: BenchmarkFixture, workload: Workload, policy: str, n_slots: int) -> None:
    """One policy at one budget."""
    benchmark.pedantic(replay, (workload, [n_slots] * 16, policy), rounds=5)
    rate = workload.n_events / benchmark.stats.stats.min
    benchmark.extra_info["M_ids_per_s"] = round(rate / 1e6, 2)
    print(f"\n{policy} with {n_slots} of 64 slots: {rate / 1e6:.2f} M expert ids a second")


def test_load(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    """Read a trace of our format."""
    path = tmp_path / "olmoe.lht"
    convert_file(TRACE, path)
    found = benchmark.pedantic(lambda: load_workload(open_trace(path)), rounds=5)
    rate = found.n_events / benchmark.stats.stats.min
    print(f"\nread at {rate / 1e6:.2f} M expert ids a second")
