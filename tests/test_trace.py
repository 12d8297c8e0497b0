"""Our trace format: what is written is read, what is malformed is refused by its place."""

import json
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from traces import file_bytes, header_of, record_of

from longhaul.errors import TraceError
from longhaul.trace import (
    MAGIC,
    TraceFile,
    TraceHeader,
    TraceLayer,
    TraceRecord,
    parse_header,
    record_bytes,
)

HEADER = TraceHeader(
    (TraceLayer(0, 8, 2, 100), TraceLayer(2, 300, 3, 50)), "m", "qwen3moe", "sha", (4, 5), "lru"
)
Change = Callable[[dict[str, object]], object]


def write(path: Path, records: list[TraceRecord], header: TraceHeader = HEADER) -> Path:
    path.write_bytes(file_bytes(header, records))
    return path


def equal(a: TraceRecord, b: TraceRecord) -> bool:
    plain = (a.ubatch, a.layer_index, a.is_prefill) == (b.ubatch, b.layer_index, b.is_prefill)
    arrays = [(a.ids, b.ids), (a.hits, b.hits), (a.weights, b.weights)]
    return plain and all(
        (x is None) == (y is None)
        and (x is None or y is None or (x.shape == y.shape and x.dtype == y.dtype))
        and np.array_equal(x, y)  # type: ignore[arg-type]
        for x, y in arrays
    )


@st.composite
def records(draw: st.DrawFn) -> list[TraceRecord]:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    found = []
    for ubatch, n_tokens in enumerate(draw(st.lists(st.integers(0, 20), max_size=8))):
        for il, layer in enumerate(HEADER.layers):
            shape = (n_tokens, layer.n_expert_used)
            ids = rng.integers(0, layer.n_expert, shape, dtype=np.uint16)
            hits = rng.integers(0, 2, shape).astype(bool) if draw(st.booleans()) else None
            weights = rng.random(shape).astype(np.float16) if draw(st.booleans()) else None
            found.append(TraceRecord(ubatch, il, n_tokens > 1, ids, hits, weights))
    return found


@given(written=records())
def test_what_is_written_is_read_as_often_as_wanted(
    tmp_path_factory: pytest.TempPathFactory, written: list[TraceRecord]
) -> None:
    path = write(tmp_path_factory.mktemp("trace") / "t.lht", written)
    trace = TraceFile(path)
    assert trace.header == HEADER
    for _ in range(2):
        read = list(trace.records())
        assert len(read) == len(written)
        assert all(equal(a, b) for a, b in zip(read, written, strict=True))
        assert trace.notes == []


def test_a_file_has_the_bytes_that_are_documented(tmp_path: Path) -> None:
    hits = np.array([[True, False], [True, True], [False, False], [False, True], [True, False]])
    weights = np.full((5, 2), 0.5, np.float16)
    ids = np.array([[1, 7], [0, 2], [3, 4], [5, 6], [1, 2]], np.uint16)
    found = file_bytes(HEADER, [TraceRecord(70000, 0, False, ids, hits, weights)])
    magic, header, body = found.split(b"\n", 2)
    assert magic == b"LHTRACE1"
    assert json.loads(header) == {
        "format": 1,
        "model": "m",
        "arch": "qwen3moe",
        "fingerprint": "sha",
        "n_slots": [4, 5],
        "policy": "lru",
        "layers": [
            {"layer": 0, "n_expert": 8, "n_expert_used": 2, "expert_bytes": 100},
            {"layer": 2, "n_expert": 300, "n_expert_used": 3, "expert_bytes": 50},
        ],
    }
    assert body == (
        struct.pack("<IHBBI", 70000, 0, 1, 3, 5)
        + struct.pack("<10H", 1, 7, 0, 2, 3, 4, 5, 6, 1, 2)
        + bytes([0b10001101, 0b01])
        + struct.pack("<10e", *[0.5] * 10)
    )


def test_a_record_that_is_cut_short_is_dropped_with_a_note(tmp_path: Path) -> None:
    whole = [record_of(0, 0, [[1, 2]]), record_of(0, 1, [[1, 2, 3]])]
    last = record_bytes(TraceRecord(1, 0, True, np.array([[3, 4]], np.uint16)))
    path = tmp_path / "t.lht"
    start = file_bytes(HEADER, whole)
    for n_bytes in range(1, len(last)):
        path.write_bytes(start + last[:n_bytes])
        trace = TraceFile(path)
        assert len(list(trace.records())) == 2
        assert trace.notes == [f"the last {n_bytes} bytes are a part of a record: dropped"]
    path.write_bytes(start + last)
    assert len(list(trace.records())) == 3
    assert trace.notes == []


def head(ubatch: int, layer: int, phase: int, flags: int, n_tokens: int) -> bytes:
    return struct.pack("<IHBBI", ubatch, layer, phase, flags, n_tokens)


@pytest.mark.parametrize(
    ("body", "offset", "message"),
    [
        (head(1, 2, 0, 0, 1), 4, "layer index 2; there are 2 layers"),
        (head(1, 0, 2, 0, 1), 6, "phase 2 is none"),
        (head(1, 0, 0, 4, 1), 7, "flags 4 are not known"),
        (head(1, 0, 0, 0, 2**32 - 1), 8, "4294967295 tokens are more than"),
        (head(0, 0, 0, 0, 0), 0, "ubatch 0 after 1"),
        (head(1, 1, 0, 0, 0), 0, "layer index 1 is twice in ubatch 1"),
        (head(1, 0, 0, 0, 2) + struct.pack("<4H", 0, 7, 8, 1), 16, "expert 8 of layer 0"),
        (head(1, 0, 0, 0, 1) + struct.pack("<2H", 65535, 0), 12, "expert 65535 of layer 0"),
    ],
)
def test_a_malformed_record_is_refused_by_its_byte(
    body: bytes, offset: int, message: str, tmp_path: Path
) -> None:
    start = file_bytes(HEADER, [record_of(1, 1, [[1, 2, 3]])])
    path = tmp_path / "t.lht"
    path.write_bytes(start + body)
    with pytest.raises(TraceError, match=rf"t\.lht: byte {len(start) + offset}: {message}"):
        list(TraceFile(path).records())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h: h.update(format=2), "format 2; only 1"),
        (lambda h: h.pop("format"), "format None"),
        (lambda h: h.pop("layers"), "layers is no array"),
        (lambda h: h.update(layers=[]), "layers is empty"),
        (lambda h: h.update(layers=[3]), "a layer is no object"),
        (lambda h: h["layers"][0].pop("n_expert"), "n_expert None"),
        (lambda h: h["layers"][0].update(n_expert=0), "n_expert 0"),
        (lambda h: h["layers"][0].update(n_expert=True), "n_expert True"),
        (lambda h: h["layers"][0].update(n_expert=2**17), "uses 2 of 131072"),
        (lambda h: h["layers"][0].update(n_expert_used=9), "uses 9 of 8"),
        (lambda h: h["layers"][0].update(expert_bytes=-1), "expert_bytes -1"),
        (lambda h: h["layers"][0].update(layer=2**63), "layer 9223372036854775808"),
        (lambda h: h.update(n_slots=[1]), "1 numbers for 2 layers"),
        (lambda h: h.update(n_slots=["4", "5"]), "n_slots '4'"),
        (lambda h: h.update(n_slots=4), "n_slots is no array"),
        (lambda h: h.update(model=5), "model is no string"),
    ],
)
def test_a_malformed_header_is_refused_by_its_key(
    change: Change, message: str, tmp_path: Path
) -> None:
    _, line, _ = file_bytes(HEADER, []).split(b"\n", 2)
    values = json.loads(line)
    assert parse_header(values) == HEADER
    change(values)
    path = tmp_path / "t.lht"
    path.write_bytes(MAGIC + json.dumps(values).encode() + b"\n")
    with pytest.raises(TraceError, match=rf"byte 9: the header: .*{message}"):
        TraceFile(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "byte 0: the file does not begin with LHTRACE1"),
        (b"LHTRACE2\n{}\n", "byte 0: the file does not begin with LHTRACE1"),
        (MAGIC, "byte 9: the header has no end"),
        (MAGIC + b"{", "byte 9: the header has no end"),
        (MAGIC + b"{\n", "byte 9: the header: "),
        (MAGIC + b"\xff\n", "byte 9: the header: "),
        (MAGIC + b"[]\n", "byte 9: the header: it is no object"),
        (MAGIC + b"[" * 100000 + b"\n", "byte 9: the header: "),
        (MAGIC + b"1" * 10000 + b"\n", "byte 9: the header: "),
    ],
)
def test_what_is_no_trace_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "t.lht"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=message):
        TraceFile(path)


def test_keys_that_are_not_known_are_passed_over() -> None:
    layer = {"layer": 1, "n_expert": 4, "n_expert_used": 1, "expert_bytes": 0, "colour": "red"}
    found = parse_header({"format": 1, "layers": [layer], "when": "now"})
    assert found == TraceHeader((TraceLayer(1, 4, 1),))


@given(st.data())
def test_a_damaged_file_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    content = bytearray(
        file_bytes(HEADER, [record_of(u, il, [[1] * (2 + il)]) for u in (0, 1) for il in (0, 1)])
    )
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("trace") / "t.lht"
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    try:
        trace = TraceFile(path)
        for record in trace.records():
            assert record.ids.max(initial=0) < trace.header.layers[record.layer_index].n_expert
    except TraceError as e:
        assert "byte" in str(e)


def test_reading_takes_no_more_memory_for_a_longer_trace(tmp_path: Path) -> None:
    header = header_of(2, 16, 4)

    def peak(n_ubatches: int) -> int:
        records = [
            record_of(u, il, [[1, 2, 3, 4]] * 64) for u in range(n_ubatches) for il in (0, 1)
        ]
        path = write(tmp_path / "t.lht", records, header)
        del records
        tracemalloc.start()
        try:
            assert sum(1 for _ in TraceFile(path).records()) == 2 * n_ubatches
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    few, many = peak(10), peak(1000)
    assert 0 < many < 2 * few + 2**16
