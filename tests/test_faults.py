"""Reads, files and memory that fail: what is said, what stays true, and that it goes on after."""

import errno
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np
import pytest
from commands import SMALL, TIMEOUT_S, Result, Running, command, environment, run
from contexts import random_tokens
from faults import Decoded, Failure, Faults, Worker, build_library, compiler
from gguf import GGUFReader, GGUFValueType, GGUFWriter
from models import (
    Array,
    Type,
    Types,
    copy_metadata,
    experts_in_two_shards,
    finish,
    split_gguf,
    write_tiny_moe,
)
from servers import SIZES, free_port, serve
from streaming import Logits, largest_difference

from longhaul import llama
from longhaul.config import BLOCK_BYTES
from longhaul.errors import ModelFormatError
from longhaul.index import read_index

pytestmark = [
    pytest.mark.usefixtures("libraries"),
    pytest.mark.skipif(sys.platform != "linux", reason="preloads a library as Linux does"),
]

MIB = 2**20
# The allocator keeps no address space in reserve, so that a limit is one.
FRUGAL = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "GGML_NO_BACKTRACE": "1",
}
PROMPT = random_tokens(12)
NEXT = random_tokens(9, seed=8)
N_SLOTS = 4  # of 8 experts: a prompt takes stages
FAILED_READ = re.compile(
    r"\[Errno [0-9]+\] (.+\.gguf): cannot read ([0-9]+) bytes at offset ([0-9]+): (.+)"
)


@dataclass(frozen=True)
class Kind:
    """A model whose experts come to their slots in a way of their own."""

    types: Types = field(default_factory=dict)
    repack: bool = False
    is_split: bool = False


KINDS = {
    "in place": Kind(),
    "by a buffer": Kind({"*_exps.weight": Type.Q8_0}),  # slices of no whole blocks
    "repacked": Kind({"*_exps.weight": Type.Q4_0}, repack=True),
    "two shards": Kind(is_split=True),
}


@dataclass(frozen=True)
class Subject:
    """A model of a kind, and what it has to say when nothing fails."""

    path: Path
    repack: bool
    wanted: Logits  # of PROMPT


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library that makes reads fail."""
    found = compiler()
    if found is None:
        pytest.skip("no C compiler to make reads fail with")
    return build_library(tmp_path_factory.mktemp("faults"), found)


@pytest.fixture(scope="module")
def control(library: Path) -> Iterator[Faults]:
    faults = Faults(library, library.with_name("control"), ".gguf")
    yield faults
    faults.close()


@pytest.fixture
def faults(control: Faults) -> Iterator[Faults]:
    """What happens to the reads of any model; nothing until a test says so."""
    control.set("none")
    yield control
    control.clear()


@pytest.fixture(scope="module")
def only_worker(control: Faults) -> Iterator[Worker]:
    with Worker(environment(**control.environment)) as worker:
        yield worker


@pytest.fixture
def worker(only_worker: Worker, faults: Faults) -> Iterator[Worker]:
    """A process whose reads `faults` is about; it is the same one in all tests."""
    yield only_worker
    faults.clear()
    only_worker.close()


@pytest.fixture
def commands_suffer(faults: Faults, monkeypatch: pytest.MonkeyPatch) -> Faults:
    """Have `faults` be about the reads of commands."""
    for name, value in faults.environment.items():
        monkeypatch.setenv(name, value)
    return faults


@pytest.fixture(scope="module")
def subjects(libraries: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Subject]:
    """Returns a model by the name of its kind."""
    made: dict[str, Subject] = {}

    def get(name: str) -> Subject:
        if name not in made:
            kind = KINDS[name]
            path = write_tiny_moe(tmp_path_factory.mktemp("kinds") / "m.gguf", types=kind.types)
            if kind.is_split:
                path = split_gguf(path, experts_in_two_shards(path, 1))[0]
            (wanted,) = resident(path, PROMPT, repack=kind.repack)
            made[name] = Subject(path, kind.repack, wanted)
        return made[name]

    return get


@pytest.fixture(params=KINDS)
def subject(request: pytest.FixtureRequest, subjects: Callable[[str], Subject]) -> Subject:
    return subjects(request.param)


@pytest.fixture
def in_place(subjects: Callable[[str], Subject]) -> Subject:
    return subjects("in place")


@pytest.fixture
def copy(in_place: Subject, tmp_path: Path) -> Path:
    """A model whose file a test may do anything to."""
    return Path(shutil.copy(in_place.path, tmp_path / "copy.gguf"))


def resident(path: Path, *batches: Sequence[int], repack: bool = False) -> list[Logits]:
    """Evaluate batches one after the other with the whole model in memory."""
    with llama.Model(path, repack=repack) as model, llama.Context(model) as context:
        return [context.decode(tokens) for tokens in batches]


def opened(worker: Worker, path: Path, **how: object) -> dict[str, object]:
    """Open a model that can be opened."""
    found = worker.open(path, **({"n_slots": N_SLOTS} | how))
    assert not isinstance(found, Failure), found
    return found


def reopened(worker: Worker, subject: Subject, **how: object) -> dict[str, object]:
    """Open a model anew, with nothing in its slots and nothing failing."""
    worker.close()
    return opened(worker, subject.path, repack=subject.repack, **how)


def has_whole_blocks(subject: Subject) -> bool:
    """Say whether experts can be read past the page cache straight to their places."""
    tensors = [tensor for layer in read_index(subject.path).layers for tensor in layer.tensors]
    is_whole = {tensor.slice_bytes % BLOCK_BYTES == 0 for tensor in tensors}
    assert len(is_whole) == 1
    return is_whole.pop()


def assert_consistent(decoded: Decoded) -> None:
    """Check that slots and experts agree, and that what is free is what has no expert."""
    assert decoded.slot_of
    for slot_of, expert_of, free in zip(
        decoded.slot_of, decoded.expert_of, decoded.free, strict=True
    ):
        expert_in = {slot: expert for expert, slot in enumerate(slot_of) if slot >= 0}
        assert len(expert_in) == sum(slot >= 0 for slot in slot_of)
        assert expert_in == {slot: e for slot, e in enumerate(expert_of) if e >= 0}
        assert sorted(free) == [slot for slot, e in enumerate(expert_of) if e < 0]


def assert_exact(decoded: Decoded, wanted: Logits) -> None:
    assert (decoded.raised, decoded.kept) == (None, None)
    assert decoded.logits is not None
    assert_consistent(decoded)
    assert largest_difference(decoded.logits, wanted) == 0.0


def assert_read_failed(decoded: Decoded, path: Path, code: int, reason: str) -> Path:
    """Check that a decode failed by a read of an expert, and return the shard that was named."""
    assert decoded.logits is None
    assert decoded.raised is not None
    assert decoded.raised.kind == "DecodeError"
    assert decoded.kept is not None
    assert decoded.kept.kinds[:2] == ("ReadError", "OSError")
    assert decoded.kept.errno == code
    said = FAILED_READ.fullmatch(decoded.kept.message)
    assert said, decoded.kept
    shard, size, offset = Path(said[1]), int(said[2]), int(said[3])
    assert said[4] == reason
    model = read_index(path)
    spans = [
        (tensor.offset, tensor.offset + tensor.n_expert * tensor.slice_bytes)
        for layer in model.layers
        for tensor in layer.tensors
        if model.shards[tensor.shard] == shard
    ]
    assert any(first <= offset and offset + size <= last for first, last in spans)
    assert_consistent(decoded)
    return shard


# --- reads that fail ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "code", "reason", "step"),
    [
        ("error", errno.EIO, os.strerror(errno.EIO), 1),
        ("error", errno.ENOMEM, os.strerror(errno.ENOMEM), 9),
        ("end", errno.EIO, "the file ends before them", 9),
    ],
    ids=["EIO", "ENOMEM", "end"],
)
def test_reads_that_fail_from_any_on_fail_the_decode_and_nothing_else(
    how: str,
    code: int,
    reason: str,
    step: int,
    subject: Subject,
    worker: Worker,
    faults: Faults,
) -> None:
    named = set()
    for n_before in range(0, 10_000, step):
        reopened(worker, subject)
        faults.set(how, before=n_before, code=code)
        decoded = worker.decode(PROMPT)
        faults.clear()
        if faults.n_disturbed == 0:
            break
        named.add(assert_read_failed(decoded, subject.path, code, reason))
        assert (decoded.n_past, decoded.n_errors) == (0, 1)
        if n_before == 0:
            assert not any(decoded.resident(i) for i in range(3))
        assert_exact(worker.decode(PROMPT), subject.wanted)
    assert_exact(decoded, subject.wanted)
    assert n_before > 3 * 4 * 3  # layers, experts and tensors
    assert named == set(read_index(subject.path).shards)


def test_layers_before_the_one_that_failed_keep_what_they_have_read(
    in_place: Subject, worker: Worker, faults: Faults
) -> None:
    (wanted,) = resident(in_place.path, [1])
    n_reads = 2 * 3  # of a layer: experts, tensors
    for n_before in range(3 * n_reads):
        reopened(worker, in_place)
        faults.set("error", before=n_before, code=errno.EIO)
        failed = worker.decode([1])
        faults.clear()
        assert_read_failed(failed, in_place.path, errno.EIO, os.strerror(errno.EIO))
        n_whole = n_before // n_reads
        assert [len(failed.resident(i)) for i in range(3)] == [2] * n_whole + [0] * (3 - n_whole)
        assert_exact(worker.decode([1]), wanted)


def test_one_error_alone_fails_the_decode(subject: Subject, worker: Worker, faults: Faults) -> None:
    for n_before in (0, 5, 20):
        reopened(worker, subject)
        faults.set("error", before=n_before, n=1, code=errno.EIO)
        decoded = worker.decode(PROMPT)
        assert faults.n_disturbed == 1
        assert_read_failed(decoded, subject.path, errno.EIO, os.strerror(errno.EIO))
        assert_exact(worker.decode(PROMPT), subject.wanted)


def test_a_conversation_goes_on_after_a_failed_read(
    subject: Subject, worker: Worker, faults: Faults
) -> None:
    batches = [PROMPT, NEXT, [5]]
    wanted = resident(subject.path, *batches, repack=subject.repack)
    reopened(worker, subject)
    n_past = 0
    for tokens, logits in zip(batches, wanted, strict=True):
        faults.set("error", code=errno.EIO)
        failed = worker.decode(tokens, anew=False)
        faults.clear()
        assert_read_failed(failed, subject.path, errno.EIO, os.strerror(errno.EIO))
        assert failed.n_past == n_past
        decoded = worker.decode(tokens, anew=False)
        assert_exact(decoded, logits)
        n_past += len(tokens)
        assert decoded.n_past == n_past


# --- reads that only look as if -------------------------------------------------------------------

# How a file may be opened: past the page cache, past it without direct reads, and through it.
MODES = {"uncached": {"direct", "dontneed"}, "refused": {"dontneed"}, "cached": {"cached"}}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", ["interrupt", "short", "delay"])
def test_interrupted_short_and_slow_reads_change_nothing(
    how: str, mode: str, subject: Subject, worker: Worker, faults: Faults
) -> None:
    faults.set("none")
    modes = reopened(worker, subject, uncached=mode != "cached")["modes"]
    assert isinstance(modes, list)
    if mode == "refused":
        n_shards = len(modes)
        faults.set("error", before=faults.n_reads - n_shards, n=n_shards, code=errno.EINVAL)
        worker.close()
        modes = opened(worker, subject.path, repack=subject.repack)["modes"]
        assert faults.n_disturbed == n_shards
    assert modes
    assert set(modes) <= MODES[mode]
    faults.set(how, delay_s=0.002)
    decoded = worker.decode(PROMPT)
    assert faults.n_disturbed > 3 * 4 * 3
    assert_exact(decoded, subject.wanted)
    assert decoded.n_errors == 0


def test_a_read_that_takes_2_s_is_waited_for(
    in_place: Subject, worker: Worker, faults: Faults
) -> None:
    reopened(worker, in_place)
    faults.set("delay", n=1, delay_s=2)
    start = time.monotonic()
    decoded = worker.decode(PROMPT)
    assert time.monotonic() - start >= 2
    assert faults.n_disturbed == 1
    assert_exact(decoded, in_place.wanted)


def test_memory_that_takes_no_direct_reads_gets_its_bytes_by_way_of_a_buffer(
    in_place: Subject, worker: Worker, faults: Faults
) -> None:
    """A driver may have mapped it, and the kernel then says EFAULT."""
    reopened(worker, in_place)
    faults.set("error", before=1, n=1, code=errno.EFAULT)
    decoded = worker.decode(PROMPT)
    assert faults.n_disturbed == 1
    assert_exact(decoded, in_place.wanted)


def test_the_kinds_are_what_they_claim(subjects: Callable[[str], Subject], worker: Worker) -> None:
    repacked = {}
    for name in KINDS:
        subject = subjects(name)
        found = reopened(worker, subject)
        assert found["modes"] in (["direct"], ["dontneed"], ["direct"] * 2, ["dontneed"] * 2)
        repacked[name] = found["repacked_bytes"]
        assert has_whole_blocks(subject) == (not KINDS[name].types)
        assert len(read_index(subject.path).shards) == 1 + KINDS[name].is_split
    if not repacked.pop("repacked"):
        pytest.skip("this processor's kernels repack nothing")
    assert set(repacked.values()) == {0}


# --- commands -------------------------------------------------------------------------------------


def test_the_server_tells_each_failure_and_serves_on(
    chat_model: Path, commands_suffer: Faults
) -> None:
    causes = [
        ("error", errno.EIO, os.strerror(errno.EIO)),
        ("error", errno.ENOMEM, os.strerror(errno.ENOMEM)),
        ("end", 0, "the file ends too early"),
    ]
    with serve(chat_model) as server:
        wanted = server.complete("And now", 12).json()["content"]
        assert len(wanted) > 10
        for n_errors, (how, code, reason) in enumerate(causes, 1):
            commands_suffer.set(how, code=code)
            answer = server.complete("Something completely different", 24)
            commands_suffer.clear()
            assert commands_suffer.n_disturbed > 0
            assert answer.status_code == 500
            assert f"Experts could not be read: {reason}." in answer.json()["error"]["message"]
            assert "content" not in answer.json()
            assert server.metrics()["longhaul_errors_total"] == n_errors
            assert server.complete("And now", 12).json()["content"] == wanted
        commands_suffer.set("interrupt")
        assert server.complete("And now", 12, cache_prompt=False).json()["content"] == wanted
        assert commands_suffer.n_disturbed > 0
        server.running.terminate()
        result = server.running.end()
    assert result.code == 0
    assert result.err.count("longhaul: error: ") == 3
    assert "Traceback" not in result.err


@pytest.mark.parametrize("how", ["terminate", "interrupt"])
def test_a_server_that_waits_for_slow_reads_ends_within_5_s(
    how: str, chat_model: Path, commands_suffer: Faults
) -> None:
    with serve(chat_model) as server, ThreadPoolExecutor(1) as pool:
        commands_suffer.set("delay", delay_s=1)
        answer = pool.submit(server.complete, "Something completely different", 24)
        wait_until(lambda: commands_suffer.n_disturbed > 0)
        start = time.monotonic()
        getattr(server.running, how)()
        result = server.running.end(20)
        took_s = time.monotonic() - start
        try:
            assert answer.result().status_code >= 500
        except httpx.TransportError:
            pass
        assert_gone(server.page)
    assert result.code == 0, result.err
    assert took_s < 5
    assert "Traceback" not in result.err


@pytest.mark.parametrize("how", ["terminate", "interrupt"])
def test_a_server_that_still_loads_ends_within_5_s(
    how: str, chat_model: Path, commands_suffer: Faults
) -> None:
    port = free_port()
    page = f"http://127.0.0.1:{port + 1}/"
    words = ("--model", chat_model, "--port", str(port), *SMALL, *SIZES, "--load-mode", "dio")
    commands_suffer.set("delay", delay_s=0.3)
    with Running("longhaul-server", *words) as running:
        running.wait_for("longhaul: page ", err=True)
        n_before = commands_suffer.n_disturbed
        wait_until(lambda: commands_suffer.n_disturbed > n_before + 1)
        assert httpx.get(f"http://127.0.0.1:{port}/health").status_code == 503  # it loads
        assert httpx.get(page).status_code == 200
        assert_ends_soon(running, how)
        assert_gone(page)


@pytest.mark.parametrize("how", ["terminate", "interrupt"])
def test_a_chat_that_still_loads_ends_within_5_s(
    how: str, chat_model: Path, commands_suffer: Faults
) -> None:
    commands_suffer.set("delay", delay_s=0.3)
    with Running("longhaul-cli", "--model", chat_model, *SMALL, "--load-mode", "dio") as running:
        running.wait_for("longhaul: reads ", err=True)
        n_before = commands_suffer.n_disturbed
        wait_until(lambda: commands_suffer.n_disturbed > n_before + 1)
        assert_ends_soon(running, how)


def assert_ends_soon(running: Running, how: str) -> None:
    """Send a signal to what still loads; it ends by it, or as if it had been asked to."""
    start = time.monotonic()
    getattr(running, how)()
    result = running.end(20)
    assert time.monotonic() - start < 5
    assert result.code in (0, -15 if how == "terminate" else -2, 130)
    assert "Traceback" not in result.err


def assert_gone(page: str) -> None:
    """Wait until nobody serves a page."""
    end = time.monotonic() + 5
    with pytest.raises(httpx.ConnectError):
        while time.monotonic() < end:
            httpx.get(page)
            time.sleep(0.05)


def wait_until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + TIMEOUT_S
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("n_before", [0, 6], ids=["header", "weights"])
def test_a_read_that_fails_while_it_loads_ends_with_1(
    n_before: int, chat_model: Path, commands_suffer: Faults
) -> None:
    commands_suffer.set("error", before=n_before, code=errno.EIO)
    result = run("longhaul-cli", "--model", chat_model, *SMALL, "--load-mode", "dio", "-p", "x")
    assert commands_suffer.n_disturbed > 0
    assert result.code == 1
    assert os.strerror(errno.EIO) in result.err
    assert "Traceback" not in result.err
    if n_before == 0:
        assert result.err == (
            f"longhaul: error: '{chat_model}' cannot be read: {os.strerror(errno.EIO)}\n"
        )


# --- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_mmap", [True, False], ids=["mmap", "read"])
@pytest.mark.parametrize("what", ["deleted", "replaced"])
def test_a_file_that_is_gone_from_its_folder_goes_on_exactly(
    what: str, use_mmap: bool, copy: Path, worker: Worker, tmp_path: Path
) -> None:
    other = write_tiny_moe(tmp_path / "other.gguf", seed=3)
    before, after = resident(copy, PROMPT, NEXT)
    (other_wanted,) = resident(other, PROMPT)
    opened(worker, copy, use_mmap=use_mmap)
    assert_exact(worker.decode(PROMPT), before)
    if what == "deleted":
        copy.unlink()
    else:
        os.replace(other, copy)
    decoded = worker.decode(NEXT, anew=False)
    assert_exact(decoded, after)
    worker.close()
    if what == "deleted":
        found = worker.open(copy)
        assert isinstance(found, Failure)
        assert (found.kind, found.message) == (
            "ModelError",
            f"'{copy}': no such file; check the path",
        )
    else:
        opened(worker, copy)
        assert_exact(worker.decode(PROMPT), other_wanted)


def test_a_model_on_tmpfs_streams_exactly(in_place: Subject, worker: Worker) -> None:
    memory = Path("/dev/shm")
    kind = subprocess.run(["stat", "-f", "-c", "%T", memory], capture_output=True, text=True)
    if kind.stdout.strip() != "tmpfs" or not os.access(memory, os.W_OK):
        pytest.skip("/dev/shm is no tmpfs that can be written to")
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        path = Path(shutil.copy(in_place.path, folder))
        found = opened(worker, path)
        assert found["modes"] in (["direct"], ["dontneed"])  # Linux 6.6 took up O_DIRECT
        assert_exact(worker.decode(PROMPT), in_place.wanted)
        worker.close()


def test_a_model_on_a_read_only_mount_streams_exactly(copy: Path, in_place: Subject) -> None:
    script = (
        'mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" && ! touch "$1/x" 2>/dev/null'
        ' && shift && exec "$@"'
    )
    prefix = ["unshare", "--mount", "sh", "-c", script, "sh", str(copy.parent)]
    if not shutil.which("unshare"):
        pytest.skip("there is no unshare to mount with")
    tried = subprocess.run([*prefix, "true"], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"nothing can be mounted: {tried.stderr.strip()}")
    with Worker(environment(), prefix) as worker:
        opened(worker, copy)
        assert_exact(worker.decode(PROMPT), in_place.wanted)


# --- shards and headers that are wrong ------------------------------------------------------------


def test_shards_in_the_wrong_order_are_refused(copy: Path) -> None:
    shards = split_gguf(copy, 3)
    swap(shards[1], shards[2])
    with pytest.raises(ModelFormatError) as caught:
        read_index(shards[0])
    assert f"'{shards[1]}' does not belong to '{shards[0]}'" in str(caught.value)
    assert "its split.no is 2, not 1" in str(caught.value)
    swap(shards[1], shards[2])
    assert read_index(shards[0]).is_moe
    swap(shards[0], shards[1])
    with pytest.raises(ModelFormatError, match=r"is shard 2 of 3; rename it so that it ends in"):
        read_index(shards[0])


def swap(a: Path, b: Path) -> None:
    between = a.with_suffix(".between")
    a.rename(between)
    b.rename(a)
    between.rename(b)


@pytest.mark.parametrize(
    ("sizes", "kind"),
    [({"n_ff": 128}, "ModelError"), ({"n_expert": 16}, "ModelFormatError")],
    ids=["rows", "experts"],
)
def test_a_shard_of_a_model_of_other_sizes_is_refused(
    sizes: dict[str, int], kind: str, worker: Worker, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    first, second = split_in_two(write_tiny_moe(tmp_path / "m.gguf"))
    _, other = split_in_two(write_tiny_moe(tmp_path / "other" / "m.gguf", **sizes))
    opened(worker, first)
    worker.close()
    shutil.copy(other, second)
    found = worker.open(first)
    assert isinstance(found, Failure)
    assert found.kind == kind
    assert first.name in found.message


def split_in_two(path: Path) -> list[Path]:
    return split_gguf(path, experts_in_two_shards(path, 1))


@pytest.mark.parametrize("n_expert", [0, 1, 4, 16])
def test_a_number_of_experts_that_is_not_that_of_the_tensors_is_refused(
    n_expert: int, copy: Path, worker: Worker, tmp_path: Path
) -> None:
    path = tmp_path / "lies.gguf"
    reader = GGUFReader(copy)
    writer = GGUFWriter(path, "qwen3moe")
    copy_metadata(reader, writer)
    counted = writer.kv_data[0]["qwen3moe.expert_count"]
    assert (counted.value, counted.type) == (8, GGUFValueType.UINT32)
    counted.value = n_expert
    add_tensors(reader, writer, lambda _, data: data)
    found = worker.open(path)
    assert isinstance(found, Failure)
    assert found.kind in ("ModelError", "ModelFormatError")
    assert path.name in found.message


def test_fewer_experts_than_the_router_chooses_among_are_refused(
    worker: Worker, tmp_path: Path
) -> None:
    reader = GGUFReader(write_tiny_moe(tmp_path / "m.gguf", n_expert=16))
    path = tmp_path / "lies.gguf"
    writer = GGUFWriter(path, "qwen3moe")
    copy_metadata(reader, writer)
    add_tensors(reader, writer, lambda name, data: data[:8] if "_exps" in name else data)
    assert read_index(path).layers[0].n_expert == 8
    found = worker.open(path)
    assert isinstance(found, Failure)
    assert found.kind in ("ModelError", "ModelFormatError")
    assert path.name in found.message


def add_tensors(
    reader: GGUFReader, writer: GGUFWriter, change: Callable[[str, Array], Array]
) -> None:
    """Write the tensors of another model as `change` makes them, and close the file."""
    for tensor in reader.tensors:
        data = np.ascontiguousarray(change(tensor.name, tensor.data)).view(np.uint8)
        writer.add_tensor(tensor.name, data, raw_dtype=tensor.tensor_type)
    finish(writer)


# --- memory that is not there ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit_mib", "said"),
    [(1500, "cannot be read: Cannot allocate memory"), (4000, "unable to allocate CPU buffer")],
    ids=["header", "slots"],
)
def test_too_little_address_space_to_load_ends_with_1(
    limit_mib: int, said: str, tmp_path: Path
) -> None:
    path = write_hollow_moe(tmp_path / "hollow.gguf")
    n_bytes = path.stat().st_size
    assert 3000 * MIB < n_bytes < 3100 * MIB
    result = run_within(limit_mib * MIB, "longhaul-cli", "--model", path, "-p", "x", "-n", "1")
    assert result.code == 1, result
    assert said in result.err
    assert "Traceback" not in result.err
    assert "terminate" not in result.err
    if "read" in said:
        assert result.err == f"longhaul: error: '{path}' {said}\n"


def write_hollow_moe(path: Path) -> Path:
    """Write a model whose experts are a hole of 3 GiB in the file."""
    small = GGUFReader(write_tiny_moe(path.with_suffix(".small"), n_layer=2, n_ff=4096, n_expert=2))
    n_expert = 512
    writer = GGUFWriter(path, "qwen3moe")
    copy_metadata(small, writer)
    writer.kv_data[0]["qwen3moe.expert_count"].value = n_expert
    end = 0
    for tensor in small.tensors:
        shape = list(tensor.data.shape)
        if "_exps" in tensor.name or tensor.name.endswith("ffn_gate_inp.weight"):
            shape[0] = n_expert
        n_bytes = 4 * int(np.prod(shape))
        writer.add_tensor_info(tensor.name, shape, np.dtype(np.float32), n_bytes)
        end += -(-n_bytes // 32) * 32
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    os.truncate(path, -(-path.stat().st_size // 32) * 32 + end)
    return path


def run_within(limit_bytes: int, program: str, *args: str | Path) -> Result:
    """Run a command that may have so much address space; its model's experts all have slots."""
    words = command(program, *args, "--longhaul-cache", "1TiB", "--ctx-size", "512")
    limit = f"import resource as r; r.setrlimit(r.RLIMIT_AS, ({limit_bytes}, {limit_bytes})); "
    assert words[1] == "-c"
    words[2] = limit + words[2]
    done = subprocess.run(
        words,
        env=environment(**FRUGAL),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=TIMEOUT_S,
        start_new_session=True,
    )
    return Result(done.returncode, done.stdout, done.stderr)


def test_a_model_that_did_not_fit_can_be_loaded_when_it_does(tmp_path: Path) -> None:
    path = write_tiny_moe(tmp_path / "m.gguf", n_layer=1, n_embd=256, n_ff=512, n_expert=32)
    n_bytes = path.stat().st_size
    assert n_bytes > 48 * MIB
    (wanted,) = resident(path, PROMPT)
    with Worker(environment(**FRUGAL)) as worker:
        found = worker.open(path, n_slots=32, spare_bytes=n_bytes * 3 // 2)  # the file, half of it
        assert isinstance(found, Failure)
        assert (found.kind, found.message) == (
            "ModelError",
            f"llama.cpp cannot load {path}; its log says why",
        )
        opened(worker, path, n_slots=32)
        assert_exact(worker.decode(PROMPT), wanted)


def test_outputs_that_do_not_fit_fail_the_decode_alone(tmp_path: Path) -> None:
    path = write_tiny_moe(tmp_path / "m.gguf", n_vocab=8192)
    (wanted,) = resident(path, PROMPT)
    with Worker(environment(**FRUGAL)) as worker:
        opened(worker, path)
        failed = worker.decode(random_tokens(400), spare_bytes=4 * MIB)  # of 12
        assert failed.logits is None
        assert failed.raised is not None
        assert failed.raised.kind == "DecodeError"
        assert failed.n_past == 0
        assert_consistent(failed)
        assert_exact(worker.decode(PROMPT), wanted)
