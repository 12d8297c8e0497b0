"""Damaged headers of any kind are read as a whole model or refused, in bounded memory and time.

LONGHAUL_FUZZ=N tries N of them; `make fuzz` takes 100,000.
"""

import os
import resource
import signal
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType

import gguf
import numpy as np
import pytest
from gguf_files import (
    DENSE,
    F32,
    Raw,
    experts,
    moe,
    moe_fields,
    split,
    write,
)
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from longhaul.errors import ModelError
from longhaul.experts import MoeModel
from longhaul.index import MAX_EXPERTS, MAX_LAYERS, read_first_shard, read_index

N_HEADERS = int(os.environ.get("LONGHAUL_FUZZ", "3000"))
PART = 1000  # headers of one test: hypothesis remembers all that it has tried
MAX_S = 10.0  # of one header
MAX_BYTES = 2**20  # of memory for one; the files here have headers of up to 14 kB

BOUNDARIES = sorted(
    {2**n + d for n in (0, 5, 6, 7, 8, 12, 15, 16, 20, 31, 32, 48, 60, 63, 64) for d in (-1, 0, 1)}
    | {2, 3, 4, 9, 10, 12, 513, 1025, 2**62, 2**63 + 2**62}
)
ROOMS = [0] * 12 + [1, 31, 4096, 2**20, 2**36]  # bytes behind the data


Step = tuple[Callable[[bytearray, int, int, int], None], int, int, int]


class Hang(BaseException):
    """A header took too long; not an Exception, so that nothing takes it for one of the file's."""


@dataclass(frozen=True)
class Base:
    """The whole, valid files of a model; `heads` are their bytes up to the data."""

    first: Path
    heads: dict[Path, bytes]
    sizes: dict[Path, int]


@dataclass
class Tally:
    n_read: int = 0
    n_refused: int = 0
    most_s: float = 0
    most_bytes: int = 0


# --- valid files ----------------------------------------------------------------------------------


def every_value_type(path: Path) -> Path:
    """Write a model whose header has keys, and arrays, of every type, by the gguf package."""
    writer = gguf.GGUFWriter(path, "qwen3moe")
    for key, value in moe_fields().items():
        if isinstance(value, int):
            writer.add_uint32(key, value)
    writer.add_uint64("qwen3moe.expert_feed_forward_length", 32)
    writer.add_int32("general.file_type", -1)
    writer.add_float32("qwen3moe.rope.freq_base", 1e6)
    writer.add_float64("x.float64", 0.5)
    writer.add_bool("tokenizer.ggml.add_bos_token", True)
    writer.add_string("tokenizer.chat_template", "{{ messages }}" * 400)
    for kind, add in (
        ("u8", writer.add_uint8),
        ("i8", writer.add_int8),
        ("u16", writer.add_uint16),
    ):
        add(f"x.{kind}", 7)
    writer.add_int16("x.i16", -7)
    writer.add_int64("x.i64", -7)
    writer.add_array("tokenizer.ggml.tokens", [f"token {i}" for i in range(50)])
    writer.add_array("tokenizer.ggml.scores", [0.5] * 50)
    writer.add_array("tokenizer.ggml.token_type", [1] * 50)
    writer.add_array("x.bools", [True, False])
    for part in ("gate", "down", "up"):
        writer.add_tensor(f"blk.0.ffn_{part}_exps.weight", np.zeros((8, 4, 32), np.float16))
    writer.add_tensor("blk.1.attn_q.weight", np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def recurrent(path: Path) -> Path:
    fields = moe_fields(
        qwen3moe__ssm__inner_size=64,
        qwen3moe__ssm__state_size=16,
        qwen3moe__ssm__group_count=2,
        qwen3moe__ssm__conv_kernel=4,
        qwen3moe__attention__head_count_kv=[0, 2],
        qwen3moe__nextn_predict_layers=1,
        general__alignment=32,
    )
    return write(path, fields, [Raw("blk.0.ssm_out.weight", (64, 64)), *experts(0)])


def fused(path: Path) -> Path:
    tensors = [Raw("blk.1.ffn_gate_up_exps.weight", (64, 64, 8)), experts(1)[1]]
    fields = moe_fields(
        qwen3moe__expert_used_count=[3, 1],
        qwen3moe__attention__key_length=32,
        qwen3moe__attention__key_length_swa=64,
        tokenizer__ggml__merges=["a b"] * 40,
    )
    return write(path, fields, [*DENSE, *tensors])


MODELS: dict[str, Callable[[Path], Path]] = {
    "moe": lambda folder: moe(folder / "m.gguf"),
    "fused": lambda folder: fused(folder / "m.gguf"),
    "recurrent": lambda folder: recurrent(folder / "m.gguf"),
    "types": lambda folder: every_value_type(folder / "m.gguf"),
    "dense": lambda folder: write(
        folder / "m.gguf", {"general.architecture": "llama", "llama.block_count": 1}, DENSE
    ),
    "clip": lambda folder: write(folder / "m.gguf", {"general.architecture": "clip"}, []),
    "old version": lambda folder: write(folder / "m.gguf", moe_fields(), experts(1), version=2),
    "split": lambda folder: split(folder, [DENSE, experts(0), experts(1, down=F32)]),
    "split within": lambda folder: split(
        folder, [[*DENSE, *experts(0), *experts(1)], experts(2)], qwen3moe__block_count=3
    ),
    "split, empty first": lambda folder: split(folder, [[], [*DENSE, *experts(0)]]),
}


@pytest.fixture(scope="module")
def bases() -> Iterator[list[Base]]:
    """Valid models, in memory where there is such a file system."""
    memory = Path("/dev/shm")
    with TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as top:
        found = []
        for i, (name, make) in enumerate(MODELS.items()):
            folder = Path(top, str(i))
            folder.mkdir()
            first = make(folder)
            files = {path: path.read_bytes() for path in sorted(folder.iterdir())}
            heads = {path: data.rstrip(b"\0") for path, data in files.items()}
            base = Base(first, heads, {path: len(data) for path, data in files.items()})
            check_model(read_index(first), base.sizes)
            if name == "split within":
                check_figures(read_first_shard(first))
            found.append(base)
        yield found


# --- damage ---------------------------------------------------------------------------------------


def numbers_in(data: bytes) -> list[int]:
    """Return where lengths, counts, types and the like seem to be."""
    return [at for at in range(4, len(data) - 4) if data[at] and data[at + 2 : at + 4] == b"\0\0"]


def overwrite(data: bytearray, at: int, n: int, value: int) -> None:
    """Put a boundary value of 1, 2, 4 or 8 bytes anywhere."""
    size = (1, 2, 4, 8)[n % 4]
    data[at : at + size] = (value % 2 ** (8 * size)).to_bytes(size, "little")


def overwrite_number(data: bytearray, at: int, n: int, value: int) -> None:
    """Put a boundary value of 4 or 8 bytes where a number is."""
    places = numbers_in(data) or [0]
    overwrite(data, places[at % len(places)], 2 + n % 2, value)


def nudge_number(data: bytearray, at: int, n: int, value: int) -> None:
    """Make a number a little larger or smaller."""
    places = numbers_in(data) or [0]
    place = places[at % len(places)]
    data[place] = (data[place] + (1, -1, 2, -2, 8, 32)[n % 6]) % 256


def set_value(data: bytearray, at: int, n: int, value: int) -> None:
    """Give a key of a 32-bit number another value, or another type of that size."""
    types = [i for i in range(4, len(data) - 8) if data[i : i + 4] == b"\x04\0\0\0"] or [0]
    place = types[at % len(types)]
    if n % 4:
        overwrite(data, place + 4, 2, value if n % 2 else n % 20)
    else:
        data[place] = (5, 6, 7)[n // 4 % 3]


def rename(data: bytearray, at: int, n: int, value: int) -> None:
    """Change a character of a text, such as the number of a layer."""
    characters = [i for i in range(4, len(data)) if chr(data[i]).isalnum()] or [0]
    data[characters[at % len(characters)]] = b"0012379._xaguA"[n % 14]


def flip(data: bytearray, at: int, n: int, value: int) -> None:
    data[at] ^= 1 << n % 8


def insert(data: bytearray, at: int, n: int, value: int) -> None:
    data[at:at] = (value % 2**64).to_bytes(8, "little")[: 1 + n % 8]


def delete(data: bytearray, at: int, n: int, value: int) -> None:
    del data[at : at + 1 + n % 40]


def double(data: bytearray, at: int, n: int, value: int) -> None:
    data[at:at] = data[at : at + 1 + n % 200]


def swap(data: bytearray, at: int, n: int, value: int) -> None:
    """Copy a range to another place."""
    source, size = n % len(data), 1 + n % 16
    data[at : at + size] = data[source : source + size]


def into_text(data: bytearray, at: int, n: int, value: int) -> None:
    """Put a character that ends lines, begins escapes or is no character into a text."""
    letters = [i for i in range(4, len(data)) if chr(data[i]).isalpha()] or [0]
    data[letters[at % len(letters)]] = b"\n\r\0\x1b\x85\xff"[n % 6]


DAMAGES = [
    overwrite,
    overwrite_number,
    overwrite_number,
    nudge_number,
    nudge_number,
    set_value,
    set_value,
    set_value,
    rename,
    rename,
    rename,
    into_text,
    flip,
    insert,
    delete,
    double,
    swap,
]
places = st.integers(0, 2**16 - 1)
damages = st.lists(
    st.tuples(st.sampled_from(DAMAGES), places, places, st.sampled_from(BOUNDARIES)),
    min_size=1,
    max_size=3,
)


def damaged(head: bytes, steps: list[Step]) -> bytearray:
    data = bytearray(head)
    for step, at, n, value in steps:
        if data:
            step(data, at % len(data), n, value)
    return data


# --- what is checked ------------------------------------------------------------------------------


@contextmanager
def time_limit() -> Iterator[None]:
    def stop(signum: int, frame: FrameType | None) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, MAX_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def check_figures(model: MoeModel) -> None:
    """Check that numbers are what they may be."""
    assert 0 <= model.n_layer <= MAX_LAYERS
    assert len(model.n_head_kv) == model.n_layer
    figures = [model.n_ctx_train, model.n_embd, model.n_vocab, *model.n_head_kv, model.n_head]
    figures += [model.n_embd_head_k, model.n_embd_head_v, model.n_ff]
    assert all(type(figure) is int and 0 <= figure < 2**32 for figure in figures)
    assert type(model.state_bytes) is int
    assert model.arch.isprintable()
    for layer in model.layers:
        assert 0 <= layer.layer < model.n_layer
        assert 1 <= layer.n_expert_used <= layer.n_expert <= MAX_EXPERTS
        assert layer.tensors


def check_model(model: MoeModel, sizes: dict[Path, int]) -> None:
    """Check that everything lies within the files, once."""
    check_figures(model)
    assert [layer.layer for layer in model.layers] == sorted(
        {layer.layer for layer in model.layers}
    )
    spans = []
    for layer in model.layers:
        for tensor in layer.tensors:
            assert (tensor.layer, tensor.n_expert) == (layer.layer, layer.n_expert)
            assert tensor.slice_bytes > 0
            first, last = tensor.span(0), tensor.span(tensor.n_expert - 1)
            assert first.offset > 24
            assert last.offset + last.size_bytes <= sizes[model.shards[tensor.shard]]
            spans.append((tensor.shard, first.offset, last.offset + last.size_bytes))
    spans.sort()
    for (shard, _, end), (next_shard, begin, _) in pairwise(spans):
        assert shard < next_shard or end <= begin
    assert model.expert_bytes + model.dense_bytes + model.mtp_bytes <= sum(sizes.values())


def check(base: Base, sizes: dict[Path, int], tally: Tally) -> None:
    """Read a model that may be damaged; whatever is raised but a refusal leaves this function."""
    begin = time.perf_counter()
    for read, check_what_is_read in (
        (read_index, partial(check_model, sizes=sizes)),
        (read_first_shard, check_figures),
    ):
        if read is read_first_shard and len(sizes) == 1:
            continue
        try:
            with time_limit():
                check_what_is_read(read(base.first))
        except ModelError as error:
            assert len(str(error).splitlines()) == 1
            assert str(base.first.parent) in str(error)
            tally.n_refused += read is read_index
        else:
            tally.n_read += read is read_index
    tally.most_s = max(tally.most_s, time.perf_counter() - begin)


def peak_bytes(base: Base) -> int:
    """Return the most memory that reading a model took at once."""
    tracemalloc.start()
    try:
        with time_limit(), suppress(ModelError):
            read_index(base.first)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def check_memory(base: Base, tally: Tally) -> None:
    n_bytes = peak_bytes(base)
    if n_bytes >= MAX_BYTES:  # once more: what else the interpreter did counts as well
        n_bytes = peak_bytes(base)
    tally.most_bytes = max(tally.most_bytes, n_bytes)
    assert n_bytes < MAX_BYTES


def try_one(
    bases: list[Base], tally: Tally, which: int, steps: list[Step], room: int, cut: int
) -> None:
    base = bases[which % len(bases)]
    paths = sorted(base.heads)
    path = paths[which // len(bases) % len(paths)]
    head, size = base.heads[path], base.sizes[path]
    data = damaged(head, steps)
    with path.open("r+b") as file:
        try:
            file.truncate(0)
            file.write(data)
            n_bytes = cut % (len(data) + 1) if cut else max(size - len(head), 0) + len(data) + room
            file.truncate(n_bytes)
            file.flush()
            check(base, base.sizes | {path: n_bytes}, tally)
            check_memory(base, tally)
        finally:
            file.truncate(0)
            file.seek(0)
            file.write(head)
            file.truncate(size)


@pytest.mark.parametrize("part", range(max(-(-N_HEADERS // PART), 1)))
def test_a_damaged_header_is_read_whole_or_refused(bases: list[Base], part: int) -> None:
    n_headers = min(PART, N_HEADERS - part * PART)
    tally, begin = Tally(), time.perf_counter()

    @seed(part)
    @settings(
        max_examples=n_headers,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(
        which=st.integers(0, 6 * len(bases) - 1),
        steps=damages,
        room=st.sampled_from(ROOMS),
        cut=st.one_of(st.just(0), st.just(0), st.just(0), places),
    )
    def run(which: int, steps: list[Step], room: int, cut: int) -> None:
        try_one(bases, tally, which, steps, room, cut)

    run()
    print(
        f"{tally.n_read} read, {tally.n_refused} refused in {time.perf_counter() - begin:.1f} s;"
        f" at most {tally.most_s:.3f} s and {tally.most_bytes / 1024:.0f} KiB for one,"
        f" peak RSS {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB"
    )
    assert tally.n_read + tally.n_refused >= n_headers
    assert min(tally.n_read, tally.n_refused) > n_headers // 50
