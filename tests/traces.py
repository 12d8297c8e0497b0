"""Traces for tests, and those in bench/traces."""

import io
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from longhaul.trace import TraceHeader, TraceLayer, TraceRecord, TraceWriter
from longhaul.workload import Workload, load_workload

TRACES = Path(__file__).resolve().parent.parent / "bench" / "traces"
OLMOE = TRACES / "olmoe-1b-7b.jsonl"
QWEN3 = TRACES / "qwen3-30b-a3b.route.csv"


class MemoryTrace:
    """A trace that is in no file."""

    def __init__(self, header: TraceHeader, records: Iterable[TraceRecord]) -> None:
        self.header = header
        self.notes: list[str] = []
        self._records = list(records)

    def records(self) -> Iterator[TraceRecord]:
        return iter(self._records)


def header_of(n_layers: int, n_expert: int, n_expert_used: int, size: int = 10) -> TraceHeader:
    layers = [TraceLayer(il, n_expert, n_expert_used, size + il) for il in range(n_layers)]
    return TraceHeader(tuple(layers), "a model", "an arch")


def record_of(
    ubatch: int, layer_index: int, ids: Sequence[Sequence[int]], is_prefill: bool = False
) -> TraceRecord:
    return TraceRecord(ubatch, layer_index, is_prefill, np.array(ids, np.uint16))


def decoded(header: TraceHeader, tokens: Sequence[Sequence[int]]) -> Workload:
    """Return a workload that decodes tokens, each with the same experts in every layer."""
    return load_workload(
        MemoryTrace(
            header,
            [
                record_of(ubatch, il, [experts])
                for ubatch, experts in enumerate(tokens)
                for il in range(len(header.layers))
            ],
        )
    )


def file_bytes(header: TraceHeader, records: Iterable[TraceRecord]) -> bytes:
    """Return a trace file of our format."""
    file = io.BytesIO()
    writer = TraceWriter(file, header)
    for record in records:
        writer.write(record)
    return file.getvalue()


def ids_of(rng: np.random.Generator, n_tokens: int, layer: TraceLayer) -> list[list[int]]:
    """Return skewed choices, (n_tokens, n_expert_used), no expert twice in a token."""
    weights = 1 / (1 + np.arange(layer.n_expert))
    weights /= weights.sum()
    return [
        rng.choice(layer.n_expert, layer.n_expert_used, replace=False, p=weights).tolist()
        for _ in range(n_tokens)
    ]


@st.composite
def workloads(draw: st.DrawFn, widest: int = 24) -> Workload:
    """Draw prompts and decoded tokens of a small model, whose last layer sees fewer rows."""
    n_layers = draw(st.integers(1, 3))
    n_expert = draw(st.integers(2, 12))
    header = header_of(n_layers, n_expert, draw(st.integers(1, min(3, n_expert))))
    sizes = draw(st.lists(st.sampled_from([1, 1, 1, 1, 3, widest]), min_size=1, max_size=25))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    records = [
        record_of(
            ubatch,
            il,
            ids_of(rng, n if il + 1 < n_layers else min(n, 2), header.layers[il]),
            is_prefill=n > 1,
        )
        for ubatch, n in enumerate(sizes)
        for il in range(n_layers)
    ]
    return load_workload(MemoryTrace(header, records))
