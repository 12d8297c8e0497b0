import os
import struct
import sys
import time
from itertools import product
from pathlib import Path

import gguf
import pytest
from gguf_files import (
    DENSE,
    Raw,
    experts,
    header,
    moe,
    moe_fields,
    packed,
    refusal,
    text,
    write,
)

from longhaul.errors import ModelError, ModelFormatError, ModelUnsupportedError
from longhaul.experts import MoeModel
from longhaul.index import read_index

# --- what is not touched --------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="lists open files by /proc")
def test_nothing_is_left_open_or_mapped(tmp_path: Path) -> None:
    good, bad = moe(tmp_path / "m.gguf"), tmp_path / "bad.gguf"
    bad.write_bytes(good.read_bytes()[:300])
    n_open = len(os.listdir("/proc/self/fd"))
    read_index(good)
    refusal(bad, ModelFormatError)
    assert len(os.listdir("/proc/self/fd")) == n_open
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_expert_bytes_are_not_read(tmp_path: Path) -> None:
    tensors = [Raw(f"blk.0.ffn_{part}_exps.weight", (4096, 2**20, 8)) for part in ("up", "down")]
    path = write(tmp_path / "m.gguf", moe_fields(), tensors)
    assert path.stat().st_size > 2**37
    begin = time.perf_counter()
    model = read_index(path)
    assert time.perf_counter() - begin < 1
    assert model.expert_bytes == 2**38


def test_a_large_vocabulary_takes_well_under_a_second(tmp_path: Path) -> None:
    words: list[str] = [f"token{i}" for i in range(150_000)]
    path = moe(tmp_path / "m.gguf", tokenizer__ggml__tokens=words, tokenizer__ggml__merges=words)
    begin = time.perf_counter()
    assert read_index(path).n_vocab == 150_000
    assert time.perf_counter() - begin < 1


def test_no_such_file(tmp_path: Path) -> None:
    assert "no such file" in refusal(tmp_path / "nothing.gguf", ModelError)


def test_a_directory(tmp_path: Path) -> None:
    assert "is a directory" in refusal(tmp_path, ModelError)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "not a regular file" in refusal(tmp_path / "pipe", ModelError)


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = moe(tmp_path / "m.gguf")

    def deny(self: Path, *_: object) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", deny)
    assert refusal(path, ModelError).endswith("cannot be read: Permission denied")


def test_a_path_over_two_lines_is_said_in_one(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        read_index(tmp_path / "a\nb.gguf")
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("data", [b"", b"GG", b"PK\x03\x04" * 100])
def test_what_is_not_a_gguf(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "m.gguf").write_bytes(data)
    assert "is not a GGUF" in refusal(tmp_path / "m.gguf", ModelFormatError)


@pytest.mark.parametrize("version", [1, 4])
def test_unknown_version(tmp_path: Path, version: int) -> None:
    path = write(tmp_path / "m.gguf", moe_fields(), DENSE, version)
    assert f"GGUF version {version}" in refusal(path, ModelUnsupportedError)


@pytest.mark.skipif(sys.byteorder != "little", reason="the file is written big-endian")
def test_the_other_byte_order(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen3moe", endianess=gguf.GGUFEndian.BIG)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert "other byte order" in refusal(tmp_path / "m.gguf", ModelUnsupportedError)


def test_truncated_data_names_the_tensor_and_the_bytes(tmp_path: Path) -> None:
    path = moe(tmp_path / "m.gguf")
    full = path.stat().st_size
    os.truncate(path, full - 100)
    message = refusal(path, ModelFormatError)
    assert "'blk.1.ffn_up_exps.weight'" in message
    assert f"needs bytes up to {full}, the file has {full - 100}" in message


def test_every_truncated_header_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", moe_fields(), [*DENSE, *experts(0)])
    for n_bytes in range(len(header(moe_fields(), [*DENSE, *experts(0)])) - 1, 3, -1):
        os.truncate(path, n_bytes)
        refusal(path, ModelFormatError)


def test_a_header_with_any_damaged_byte_is_read_or_refused(tmp_path: Path) -> None:
    fields = moe_fields(qwen3moe__expert_used_count=[2, 2])
    head = header(fields, experts(0))
    path = write(tmp_path / "m.gguf", fields, experts(0))
    n_read = 0
    with path.open("r+b", buffering=0) as file:
        for at, value in product(range(len(head)), (0, 255)):
            os.pwrite(file.fileno(), bytes([value]), at)
            try:
                assert isinstance(read_index(path), MoeModel)
                n_read += 1
            except ModelError as error:
                assert len(str(error).splitlines()) == 1
            os.pwrite(file.fileno(), head[at : at + 1], at)
    assert 0 < n_read < 2 * len(head)


@pytest.mark.parametrize(
    ("at", "what"),
    [(8, "tensor '' has offset 0, not"), (16, "key"), (24, "key")],
    ids=["tensors", "keys", "length"],
)
def test_absurd_counts_are_refused_at_once(tmp_path: Path, at: int, what: str) -> None:
    path = moe(tmp_path / "m.gguf")
    data = bytearray(path.read_bytes())
    data[at : at + 8] = struct.pack("<Q", 2**63)
    path.write_bytes(data)
    assert what in refusal(path, ModelFormatError)


@pytest.mark.parametrize(
    ("at", "count", "what"),
    [(8, 2**62, "tensor '' has offset 0, not"), (-8, 2**60, f"has {2**60} strings")],
    ids=["tensors", "strings"],
)
def test_a_count_that_zeros_could_go_on_for_is_refused_at_once(
    tmp_path: Path, at: int, count: int, what: str
) -> None:
    """As in a file that was never written to its end, but has its full size."""
    path = tmp_path / "m.gguf"
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k") + struct.pack("<IIQ", 9, 8, 0)
    data = bytearray(head)
    data[at % len(head) : at % len(head) + 8] = struct.pack("<Q", count)
    path.write_bytes(data)
    os.truncate(path, 2**36)
    begin = time.perf_counter()
    assert what in refusal(path, ModelFormatError)
    assert time.perf_counter() - begin < 5


def test_an_absurd_array_is_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    for kind in (4, 8, 9, 77):
        array = text("k") + struct.pack("<IIQ", 9, kind, 2**62)
        path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + array + bytes(64))
        assert "the value of key 'k'" in refusal(path, ModelFormatError)


def test_a_key_that_is_not_text_or_occurs_twice(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    for keys, what in ((b"\xff\xfe", "not UTF-8"), (b"k", "'k' occurs twice")):
        entry = text(keys) + packed(1)
        path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + entry * 2)
        assert what in refusal(path, ModelFormatError)


def test_unknown_tensor_type_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", moe_fields(), [Raw("blk.0.ffn_up_exps.weight", (32, 1), 99)])
    message = refusal(path, ModelUnsupportedError)
    assert "'blk.0.ffn_up_exps.weight' has the unknown type 99" in message


@pytest.mark.parametrize("align", [0, 24])
def test_an_alignment_that_is_no_power_of_two_is_refused(tmp_path: Path, align: int) -> None:
    path = moe(tmp_path / "m.gguf", general__alignment=align)
    assert f"the alignment is {align}" in refusal(path, ModelFormatError)


def test_data_that_overlaps_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", moe_fields(), experts(0))
    data = bytearray(path.read_bytes())
    at = data.index(b"blk.0.ffn_down_exps.weight") + 26 + 4 + 24 + 4
    data[at : at + 8] = struct.pack("<Q", 0)
    path.write_bytes(data)
    assert "'blk.0.ffn_down_exps.weight' has offset 0, not" in refusal(path, ModelFormatError)
