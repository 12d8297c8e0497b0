"""The native read pool on files with known bytes."""

import errno
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from longhaul import native
from longhaul.errors import ConfigError, NativeError, ReadError
from longhaul.native import ReadPool

pytestmark = pytest.mark.usefixtures("libraries")

SIZE = 3_000_001
CHUNK = 64 * 1024


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pool") / "known.bin"
    path.write_bytes(np.random.default_rng(1).bytes(SIZE))
    return path


def random_ranges(n: int, seed: int) -> list[tuple[int, int, int]]:
    rng = np.random.default_rng(seed)
    starts = rng.integers(0, SIZE, n)
    sizes = np.minimum(rng.integers(0, 10 * CHUNK, n), SIZE - starts)
    return [(0, int(start), int(size)) for start, size in zip(starts, sizes, strict=True)]


@pytest.mark.parametrize("n_threads", [1, 4, 16])
@pytest.mark.parametrize("uncached", [True, False])
def test_ranges_of_any_alignment_are_read(known: Path, n_threads: int, uncached: bool) -> None:
    content = known.read_bytes()
    ranges = [(0, 0, SIZE), (0, 1, 1), (0, SIZE - 1, 1), (0, 4096, 4096), (0, 5, 0)]
    ranges += random_ranges(60, n_threads)
    with ReadPool(n_threads, CHUNK) as pool:
        assert pool.open_file(known, uncached) == 0
        got = pool.read(ranges)
    assert got == [content[start : start + size] for _, start, size in ranges]


@pytest.mark.parametrize("distance", [0, 32, 512])
def test_reads_land_where_they_belong(known: Path, distance: int) -> None:
    """At addresses as far from a block as the offset, where direct reads need no copy, and others.

    What lies around the destination stays as it is.
    """
    ffi, lib = native._ffi(), native._lib()
    content = known.read_bytes()
    memory = ffi.new("uint8_t[]", 800_000)
    first = -int(ffi.cast("uintptr_t", memory)) % 4096  # index of the first block
    with ReadPool(2, CHUNK) as pool:
        pool.open_file(known, True)
        for offset, size in [
            (8192, 65536),
            (8192 + 96, 300_000),
            (4000, 97),
            (SIZE - 70_000, 70_000),
        ]:
            ffi.buffer(memory)[:] = b"\xaa" * 800_000
            start = first + 4096 + offset % 4096 + distance
            read = ffi.new("lh_read *", (0, offset, size, memory + start))
            native.check(lib.lh_read_pool_read(pool.pointer, read, 1))
            around = ffi.buffer(memory)[:start] + ffi.buffer(memory)[start + size :]
            assert ffi.buffer(memory)[start : start + size] == content[offset : offset + size]
            assert around == b"\xaa" * (800_000 - size)


def test_mode_is_told(known: Path) -> None:
    with ReadPool(1, CHUNK) as pool:
        pool.open_file(known, False)
        pool.open_file(known, True)
        assert pool.modes[0] == "cached"
        assert pool.modes[1] in ("direct", "nocache", "dontneed")


def test_refused_direct_reads_fall_back(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path("/proc/self")  # a file system without O_DIRECT
    try:
        os.close(os.open(folder / "status", os.O_RDONLY | os.O_DIRECT))
    except (OSError, AttributeError):
        pass
    else:
        pytest.skip("this kernel opens /proc files with O_DIRECT")
    with ReadPool(1, CHUNK) as pool:
        pool.open_file(folder / "status", True)
        assert pool.modes == ["dontneed"]
        (text,) = pool.read([(0, 0, 5)])
    assert text == b"Name:"


def test_range_past_the_end_names_file_offset_and_size(known: Path) -> None:
    with ReadPool(2, CHUNK) as pool:
        pool.open_file(known, True)
        with pytest.raises(ReadError) as caught:
            pool.read([(0, 0, 100), (0, SIZE - 10, 11)])
        assert "known.bin: cannot read" in str(caught.value)
        assert f"offset {SIZE - 10}" in str(caught.value)
        assert "ends before" in str(caught.value)
        assert pool.read([(0, SIZE - 10, 10)]) == [known.read_bytes()[-10:]]


def test_file_that_shrinks_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "shrinks.bin"
    path.write_bytes(bytes(1_000_000))
    with ReadPool(4, CHUNK) as pool:
        pool.open_file(path, True)
        os.truncate(path, 500_000)
        with pytest.raises(ReadError, match=r"shrinks\.bin"):
            pool.read([(0, 0, 1_000_000)])
        with pytest.raises(ReadError, match=r"shrinks\.bin has changed since it was opened"):
            pool.read([(0, 0, 500_000)])


@pytest.mark.parametrize("uncached", [True, False])
def test_file_that_is_written_to_is_noticed(tmp_path: Path, uncached: bool) -> None:
    path = tmp_path / "written.bin"
    path.write_bytes(bytes(100_000))
    os.utime(path, ns=(10**18, 10**18))
    with ReadPool(2, CHUNK) as pool:
        file = pool.open_file(path, uncached)
        status = path.stat()
        assert pool.stamp(file) == (status.st_dev, status.st_ino, 100_000, 10**18)
        assert pool.read([(file, 0, 100)]) == [bytes(100)]
        with path.open("r+b") as other:
            other.write(b"x")
        with pytest.raises(ReadError, match=r"written\.bin has changed") as caught:
            pool.read([(file, 90_000, 100)])
        assert caught.value.errno == errno.ESTALE
        with path.open("r+b") as other:
            other.write(b"\0")
        os.utime(path, ns=(10**18, 10**18))
        assert pool.read([(file, 0, 100_000)]) == [bytes(100_000)]


def test_file_that_is_replaced_stays_the_one_that_was_opened(tmp_path: Path) -> None:
    path, other = tmp_path / "old.bin", tmp_path / "new.bin"
    path.write_bytes(b"old" * 5000)
    other.write_bytes(b"new" * 5000)
    with ReadPool(2, CHUNK) as pool:
        file = pool.open_file(path, True)
        other.replace(path)
        assert pool.read([(file, 0, 15_000)]) == [b"old" * 5000]


def test_missing_file_has_errno(tmp_path: Path) -> None:
    with ReadPool(1, CHUNK) as pool:
        with pytest.raises(ReadError) as caught:
            pool.open_file(tmp_path / "none.bin", True)
    assert caught.value.errno == 2
    assert "none.bin" in str(caught.value)


def test_calls_from_many_threads_do_not_mix(known: Path) -> None:
    content = known.read_bytes()
    failures: list[object] = []

    def read(seed: int) -> None:
        for ranges in (random_ranges(20, seed * 100 + i) for i in range(5)):
            if pool.read(ranges) != [content[start : start + size] for _, start, size in ranges]:
                failures.append(seed)

    with ReadPool(4, CHUNK) as pool:
        pool.open_file(known, True)
        threads = [threading.Thread(target=read, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []


def test_buffers_are_counted() -> None:
    with ReadPool(3, CHUNK) as pool:
        assert pool.buffer_bytes == 3 * (CHUNK + 8192)


@pytest.mark.parametrize(("n_threads", "chunk"), [(0, CHUNK), (1, 0), (1, 5000), (-1, CHUNK)])
def test_bad_sizes_are_refused(n_threads: int, chunk: int) -> None:
    with pytest.raises(ConfigError):
        ReadPool(n_threads, chunk)


def test_closed_pool_says_so(known: Path) -> None:
    pool = ReadPool(1, CHUNK)
    pool.close()
    pool.close()
    with pytest.raises(NativeError, match="closed"):
        pool.open_file(known, True)


def test_unknown_file_number_is_refused(known: Path) -> None:
    with ReadPool(1, CHUNK) as pool:
        pool.open_file(known, True)
        with pytest.raises(ConfigError, match="no file 1"):
            pool.read([(1, 0, 1)])
