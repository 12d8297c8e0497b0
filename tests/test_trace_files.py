"""Traces of other formats."""

import json
from pathlib import Path

import numpy as np
import pytest
from traces import OLMOE, QWEN3, file_bytes, header_of, record_of

from longhaul.errors import TraceError
from longhaul.trace import TraceFile, TraceLayer
from longhaul.trace_files import open_trace

ROUTE = """\
# route_trace v1
# model=M.gguf arch=qwen3moe n_layer=2 n_expert=8 n_expert_used=2
# layer=0 expert_bytes=100 dense_bytes=5
# layer=1 expert_bytes=90 dense_bytes=5
turn,phase,step,layer,slot,expert,weight,residency,expert_bytes
0,0,0,0,0,1,0.5,0,100
0,0,0,0,1,2,0.25,0,100
0,0,1,0,0,3,0.5,0,100
0,0,1,0,1,1,0.25,0,0
0,0,1,1,0,7,0.5,0,90
0,0,1,1,1,6,0.25,0,90
0,1,2,0,0,4,0.5,0,100
0,1,2,0,1,5,0.25,0,100
0,1,2,1,0,7,0.5,1,0
0,1,2,1,1,0,0.25,0,90
0,1,3,0,0,4,0.5,1,0
0,1,3,0,1,5,0.25,1,0
1,0,0,0,0,4,0.5,1,0
1,0,0,0,1,5,0.25,1,0
"""


def test_the_recorded_olmoe_trace() -> None:
    trace = open_trace(OLMOE)
    assert trace.header.layers == tuple(TraceLayer(il, 64, 8) for il in range(16))
    assert trace.header.model == "olmoe-1b-7b"
    lines = OLMOE.read_text().splitlines()
    wanted = np.array([json.loads(line)["layers"] for line in lines])
    records = list(trace.records())
    assert np.array_equal(np.array([r.ids for r in records]).reshape(299, 16, 8), wanted)
    assert [(r.ubatch, r.layer_index) for r in records[:17]] == [
        *((0, il) for il in range(16)),
        (1, 0),
    ]
    assert not any(record.is_prefill for record in records)


def test_the_recorded_qwen3_trace() -> None:
    trace = open_trace(QWEN3)
    assert trace.header.model == "Qwen3-30B-A3B-Q4_K_M.gguf"
    assert trace.header.arch == "qwen3moe"
    assert len(trace.header.layers) == 48
    assert trace.header.layers[6] == TraceLayer(6, 128, 6, 2654208)
    records = list(trace.records())
    assert len(records) == 48 * 129
    assert [r.ids.shape for r in records[:48]] == [(28, 6)] * 47 + [(1, 6)]
    assert all(r.is_prefill == (r.ubatch == 0) for r in records)
    assert all(r.ids.shape == (1, 6) for r in records[48:])
    assert sum(r.ids.size for r in records) == 44817 - 51  # rows of the file
    assert all(r.weights is not None and 0 < r.weights.min() for r in records)


def test_rows_become_records(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(ROUTE)
    records = list(open_trace(path).records())
    assert [(r.ubatch, r.layer_index, r.is_prefill, r.ids.tolist()) for r in records] == [
        (0, 0, True, [[1, 2], [3, 1]]),
        (0, 1, True, [[7, 6]]),
        (1, 0, False, [[4, 5]]),
        (1, 1, False, [[7, 0]]),
        (2, 0, False, [[4, 5]]),
        (3, 0, True, [[4, 5]]),
    ]
    assert records[0].weights is not None
    assert records[0].weights.tolist() == [[0.5, 0.25], [0.5, 0.25]]


def test_a_prompt_of_several_ubatches_begins_again_at_the_first_layer(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    again = "".join(line for line in ROUTE.splitlines(keepends=True)[5:] if line.startswith("0,0,"))
    path.write_text("".join(ROUTE.splitlines(keepends=True)[:5]) + again + again)
    found = [(r.ubatch, r.layer_index) for r in open_trace(path).records()]
    assert found == [(0, 0), (0, 1), (1, 0), (1, 1)]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("1,0,0,0,1,5,", "1,0,0,0,1,8,", "line 19: 1,0,0,0,8,0.25"),
        ("1,0,0,0,1,5,", "1,0,0,2,1,5,", "line 19: "),
        ("1,0,0,0,1,5,", "1,2,0,0,1,5,", "line 19: "),
        ("1,0,0,0,1,5,", "1,0,0,0,1,x,", "line 19: "),
        ("0,1,3,0,1,5,0.25", "0,1,3,0,1,5,nan", "line 17: "),
        ("0,1,3,0,1,5,0.25", "0,1,3,0,1,5,1e9", "line 17: "),
        ("0,1,3,0,1,5,0.25,1,0\n", "", "line 17: 1 experts before it"),
        ("1,0,0,0,1,5,0.25,1,0\n", "1,0\n", "line 19: too few columns"),
        ("turn,phase", "turn,faze", "line 5: unknown columns"),
        ("n_expert=8", "n_expert=1", "2 of 1 experts"),
        ("n_expert=8", "n_expert=x", "no number for n_expert"),
        ("# layer=1 ", "# layer=2 ", "2 layers"),
        ("expert_bytes=90", "expert_bytes=", "no number for expert_bytes"),
    ],
)
def test_malformed_rows_are_refused_by_their_line(
    old: str, new: str, message: str, tmp_path: Path
) -> None:
    assert old in ROUTE
    path = tmp_path / "t.csv"
    path.write_text(ROUTE.replace(old, new))
    with pytest.raises(TraceError, match=message):
        list(open_trace(path).records())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"layers": [[1, 2], [3, "4"]]}', "line 2: expert '4'"),
        ('{"layers": [[1, 2], [3, -4]]}', "line 2: expert -4"),
        ('{"layers": [[1, 2], [3, 65536]]}', "line 2: an expert of 65536 or more"),
        ('{"layers": [[1, 2], []]}', "line 2: a layer without experts"),
        ('{"layers": []}', "line 2: a layer without experts"),
        ('{"layers": [[1, 2]]}', "line 2: other layers"),
        ('{"layers": [[1, 2], [3, 4, 5]]}', "line 2: other layers"),
        ('{"layers": 3}', "line 2: layers is no array"),
        ('{"layers"', "line 2: "),
        ("\xff\xfe", "line 2: "),
        ("[" * 100000, "line 2: "),
    ],
)
def test_malformed_lines_are_refused(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"layers": [[1, 2], [3, 4]]}\n' + line + "\n", encoding="latin-1")
    with pytest.raises(TraceError, match=message):
        open_trace(path)


@pytest.mark.parametrize("content", [b"", b"hello", b"GGUF\x03\x00", b"LHTRACE2\n{}\n"])
def test_other_files_are_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_bytes(content)
    with pytest.raises(TraceError, match="byte 0: "):
        open_trace(path)


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be read: No such file"):
        open_trace(tmp_path / "none")
    with pytest.raises(TraceError, match="cannot be read: Is a directory"):
        open_trace(tmp_path)


def test_our_own_format_is_known_by_its_first_bytes(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_bytes(file_bytes(header_of(1, 4, 1), [record_of(0, 0, [[2]])]))
    trace = open_trace(path)
    assert isinstance(trace, TraceFile)
    assert [record.ids.tolist() for record in trace.records()] == [[[2]]]


def test_a_size_is_given_only_where_there_is_none(tmp_path: Path) -> None:
    assert {layer.expert_bytes for layer in open_trace(OLMOE, 777).header.layers} == {777}
    sizes = {layer.expert_bytes for layer in open_trace(QWEN3, 777).header.layers}
    assert sizes == {2654208, 3059712}
    path = tmp_path / "t"
    content = file_bytes(header_of(1, 4, 1, 0), [record_of(0, 0, [[2]])])
    path.write_bytes(content + b"x")
    trace = open_trace(path, 5)
    assert len(list(trace.records())) == 1
    assert trace.notes == ["the last 1 bytes are a part of a record: dropped"]
