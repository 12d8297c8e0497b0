"""The real engine and a replay of the same run count the same; policies change no logit."""

import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from streaming import Recipe, evaluate, largest_difference, stream
from traces import OLMOE, MemoryTrace

from longhaul import llama
from longhaul.config import Config
from longhaul.engine import Engine
from longhaul.index import read_index
from longhaul.policy import POLICIES
from longhaul.replay import replay
from longhaul.stats import Counters, Stats
from longhaul.trace import TraceHeader, TraceLayer, TraceRecord
from longhaul.trace_files import open_trace
from longhaul.workload import Workload, load_workload

CHECKOUT = Path(__file__).resolve().parent.parent
N_LAYER = 3

pytestmark = pytest.mark.usefixtures("libraries")

every_policy = pytest.mark.parametrize("policy", POLICIES)


@pytest.fixture(scope="module")
def trace_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """OLMoE's routing in a model of 3 layers of 64 small experts: token t chooses as line t."""
    path = tmp_path_factory.mktemp("trace") / "olmoe.gguf"
    maker = CHECKOUT / "bench" / "make_trace_model.py"
    words = ["--n-embd", "512", "--n-ff", "32", "--n-layer", str(N_LAYER)]
    subprocess.run([sys.executable, maker, OLMOE, path, *words], check=True, capture_output=True)
    return path


@pytest.fixture(scope="module")
def olmoe_ids() -> np.ndarray:
    """(n_tokens, n_layer, n_expert_used), as recorded."""
    records = list(open_trace(OLMOE).records())
    ids = np.array([record.ids for record in records]).reshape(-1, 16, 8)
    return ids[:, :N_LAYER]


@dataclass(frozen=True)
class Run:
    """What an engine counted, and what it wrote down."""

    stats: Stats
    trace: list[TraceRecord]
    workload: Workload


def run(
    path: Path,
    out: Path,
    n_slots: list[int],
    calls: list[list[int]],
    policy: str = "lru",
    last_only: bool = False,
) -> Run:
    """Evaluate tokens, a call after another, in ubatches of 256."""
    config = Config(policy=policy, trace_path=out)
    with Engine(read_index(path), n_slots, config) as engine:
        with llama.Model(path) as model:
            with llama.Context(model, n_ctx=1024, n_ubatch=256) as context:
                for tokens in calls:
                    context.decode(tokens, last_only=last_only)
        engine.raise_kept()
        stats = engine.stats()
    source = open_trace(out)
    records = list(source.records())
    assert source.notes == []
    assert source.header.n_slots == tuple(n_slots)
    assert source.header.policy == policy
    return Run(stats, records, load_workload(source))


def counts(stats: Stats) -> Stats:
    """Leave out times, and errors, of which there are none."""
    assert stats.total.n_errors == 0

    def plain(c: Counters) -> Counters:
        return replace(
            Counters(),
            n_ubatches=c.n_ubatches,
            n_tokens=c.n_tokens,
            n_hits=c.n_hits,
            n_misses=c.n_misses,
            n_evictions=c.n_evictions,
            read_bytes=c.read_bytes,
        )

    return Stats(plain(stats.prefill), plain(stats.decode))


# --- the routing of the trace model ---------------------------------------------------------------


def test_the_router_of_the_trace_model_gives_the_recorded_ids(
    trace_model: Path, olmoe_ids: np.ndarray, tmp_path: Path
) -> None:
    singles = [[token] for token in range(len(olmoe_ids))]
    done = run(trace_model, tmp_path / "t.lht", [16] * N_LAYER, singles)
    found = np.array([record.ids for record in done.trace]).reshape(olmoe_ids.shape)
    assert found.size == 299 * N_LAYER * 8
    assert np.array_equal(np.sort(found), np.sort(olmoe_ids))
    assert [record.ubatch for record in done.trace[::N_LAYER]] == list(range(299))


def test_in_a_prompt_it_gives_the_same(
    trace_model: Path, olmoe_ids: np.ndarray, tmp_path: Path
) -> None:
    done = run(trace_model, tmp_path / "t.lht", [16] * N_LAYER, [list(range(299))])
    by_layer: list[list[np.ndarray]] = [[] for _ in range(N_LAYER)]
    for record in done.trace:
        assert record.is_prefill
        by_layer[record.layer_index].append(record.ids)
    for il, parts in enumerate(by_layer):
        assert [len(part) for part in parts] == [256, 43]
        assert np.array_equal(np.sort(np.concatenate(parts)), np.sort(olmoe_ids[:, il]))


# --- counters -------------------------------------------------------------------------------------


def test_recorded_routing_replayed_counts_what_the_engine_counts(
    trace_model: Path, olmoe_ids: np.ndarray, tmp_path: Path
) -> None:
    """A run of the trace model does what a replay of bench/traces says."""
    singles = [[token] for token in range(160)]
    expert_bytes = read_index(trace_model).layers[0].expert_bytes
    header = TraceHeader((TraceLayer(0, 64, 8, expert_bytes),) * N_LAYER)
    for n_slots in ([8, 16, 32], [64] * N_LAYER):
        done = run(trace_model, tmp_path / "t.lht", n_slots, singles)
        records = []
        for record in done.trace:  # nearly equal logits may change places within a token
            wanted = olmoe_ids[record.ubatch, record.layer_index].tolist()
            place_of = {expert: i for i, expert in enumerate(record.ids[0].tolist())}
            ids = np.array([sorted(wanted, key=place_of.__getitem__)], np.uint16)
            records.append(TraceRecord(record.ubatch, record.layer_index, False, ids))
        workload = load_workload(MemoryTrace(header, records))
        assert done.stats.decode.n_misses > 0
        assert counts(done.stats) == replay(workload, n_slots, "lru").stats


@every_policy
def test_a_replayed_run_counts_what_the_engine_counted(
    policy: str, trace_model: Path, tmp_path: Path
) -> None:
    """Prompts in stages and with loads ahead, then decoding, then the same again."""
    n_slots = [1, 40, 16]
    rng = np.random.default_rng(11)
    prompt = rng.integers(0, 299, 300).tolist()
    singles = [[int(token)] for token in rng.integers(0, 299, 40)]
    calls = [prompt, *singles, prompt[:40], *singles[:10]]
    done = run(trace_model, tmp_path / "t.lht", n_slots, calls, policy)
    assert done.stats.prefill.n_tokens == 340
    assert done.stats.decode.n_tokens == 50
    assert done.stats.total.n_hits > 0
    assert max(max(layer.n_ahead) for layer in done.workload.layers) == 256 * 8
    assert counts(done.stats) == replay(done.workload, n_slots, policy).stats


def test_where_only_the_last_row_is_wanted_too(trace_model: Path, tmp_path: Path) -> None:
    n_slots = [16] * N_LAYER
    calls = [list(range(299)), *([token] for token in range(0, 299, 7))]
    done = run(trace_model, tmp_path / "t.lht", n_slots, calls, last_only=True)
    assert done.stats.prefill.n_ubatches == 2
    assert sum(layer.is_prefill.count(1) for layer in done.workload.layers) == 2 * N_LAYER - 1
    assert counts(done.stats) == replay(done.workload, n_slots, "lru").stats


def test_recorded_hits_are_those_that_were_counted(trace_model: Path, tmp_path: Path) -> None:
    singles = [[token] for token in range(100)]
    done = run(trace_model, tmp_path / "t.lht", [16] * N_LAYER, singles)
    hits = [record.hits for record in done.trace if record.hits is not None]
    assert len(hits) == 100 * N_LAYER
    assert sum(int(each.sum()) for each in hits) == done.stats.decode.n_hits > 0


# --- results --------------------------------------------------------------------------------------


@every_policy
@pytest.mark.parametrize("n_slots", [1, 3, 6])
def test_no_policy_changes_a_logit(policy: str, n_slots: int, tiny: Path) -> None:
    recipe = Recipe(n_prompt=40, n_greedy=24)
    wanted = evaluate(tiny, recipe)
    got = stream(tiny, n_slots, recipe, Config(policy=policy))
    assert got.stats is not None
    assert got.stats.total.n_evictions > 0
    assert largest_difference(got.logits, wanted.logits) == 0.0


def test_policies_differ_in_what_they_evict(trace_model: Path, tmp_path: Path) -> None:
    """Native code counts uses: without that, lfu would find no more than lru."""
    singles = [[token] for token in range(100)]
    found = {
        policy: run(trace_model, tmp_path / "t.lht", [24] * N_LAYER, singles, policy).stats.decode
        for policy in POLICIES
    }
    assert found["lru"].n_hits < found["lfu"].n_hits
    assert len({counters.n_hits for counters in found.values()}) == len(POLICIES)
