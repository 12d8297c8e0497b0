"""Measures what a machine can do: reads past the page cache, and reads of memory.

Needs none of the native libraries.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import random
import re
import resource
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from .config import BLOCK_BYTES, Config
from .forecast import Machine

SECONDS = 0.5
MEMORY_BYTES = 64 * 2**20  # read by each core at a time, more than its caches hold
MAX_THREADS = 16
FOLIO_BYTES = 2 * 2**20  # the largest piece that the page cache keeps or drops as one


def measure(path: Path, seconds: float = SECONDS) -> Machine:
    """Measure the disk that a file is on, and memory; takes twice the seconds.

    Raises OSError if the file cannot be read past the page cache.
    """
    return Machine(disk_rate(path, seconds), memory_rate(seconds))


def open_uncached(path: Path) -> int:
    """Open a file for reads past the page cache; raises OSError if the file system refuses."""
    if sys.platform == "darwin":
        file = os.open(path, os.O_RDONLY)
        fcntl.fcntl(file, fcntl.F_NOCACHE, 1)
        return file
    file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        with mmap.mmap(-1, BLOCK_BYTES) as buffer:
            os.preadv(file, [buffer], 0)
    except OSError:
        os.close(file)
        raise
    return file


def disk_rate(path: Path, seconds: float = SECONDS) -> float:
    """Return bytes per second of uncached reads from all over a file, as experts are read.

    Raises OSError if there is no way past the page cache, whose rate would mean nothing.
    """
    config = Config()
    size = path.stat().st_size
    if size < BLOCK_BYTES:
        raise OSError(errno.EINVAL, "the file is too small to measure")
    chunk_bytes = min(config.chunk_bytes, size // BLOCK_BYTES * BLOCK_BYTES)
    n_places = max((size - chunk_bytes) // BLOCK_BYTES, 1)
    file = open_uncached(path)
    try:
        return _rate(config.n_io_threads, seconds, lambda: _reader(file, chunk_bytes, n_places))
    finally:
        os.close(file)


def memory_rate(seconds: float = SECONDS) -> float:
    """Return bytes per second of all cores reading memory."""
    n_threads = min(os.cpu_count() or 1, MAX_THREADS)
    numbers = np.ones(MEMORY_BYTES // 8, np.int64)

    def reader() -> Callable[[], int]:
        return lambda: int(numbers.sum() > 0) * numbers.nbytes

    return _rate(n_threads, seconds, reader)


def cached_bytes(path: Path, offset: int, size: int) -> int:
    """Return how much of a range, which begins at a page, the page cache holds.

    Raises OSError where the system does not tell.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    n_pages = -(-size // mmap.PAGESIZE)
    found = (ctypes.c_ubyte * n_pages)()
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY, offset=offset) as view,
    ):
        first = ctypes.c_char.from_buffer(view)
        code = libc.mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(size), found)
        del first  # it holds the mapping
    if code != 0:
        raise OSError(ctypes.get_errno(), "the page cache cannot be looked into")
    return sum(page & 1 for page in found) * mmap.PAGESIZE


def leaves_page_cache_alone(path: Path) -> bool | None:
    """Read a block past the page cache and say whether it is not in there afterwards.

    Some file systems take O_DIRECT and go through the page cache all the same. None: it cannot be
    told, as of a file of somebody else, which the system says is cached in full. Raises OSError if
    the file system refuses such reads.
    """
    window = path.stat().st_size // 2 // FOLIO_BYTES * FOLIO_BYTES
    offset = window + min(FOLIO_BYTES, (path.stat().st_size - window) // 2) // 2
    offset = offset // mmap.PAGESIZE * mmap.PAGESIZE
    size = min(16 * mmap.PAGESIZE, path.stat().st_size - offset)
    before = cached_bytes(path, offset, size)
    if before and hasattr(os, "posix_fadvise"):
        with path.open("rb") as whole:
            os.fsync(whole.fileno())  # what is not written yet cannot leave
            os.posix_fadvise(whole.fileno(), window, 2 * FOLIO_BYTES, os.POSIX_FADV_DONTNEED)
        before = cached_bytes(path, offset, size)
    if before:
        return None
    file = open_uncached(path)
    try:
        with mmap.mmap(-1, -(-size // BLOCK_BYTES) * BLOCK_BYTES) as buffer:
            os.preadv(file, [buffer], offset)
    finally:
        os.close(file)
    return cached_bytes(path, offset, size) == 0


def _reader(file: int, chunk_bytes: int, n_places: int) -> Callable[[], int]:
    buffer = mmap.mmap(-1, chunk_bytes)
    places = random.Random(threading.get_ident())
    return lambda: os.preadv(file, [buffer], places.randrange(n_places) * BLOCK_BYTES)


def _rate(n_threads: int, seconds: float, make: Callable[[], Callable[[], int]]) -> float:
    """Return bytes per second of what threads read together; raises what one of them raises."""
    end = time.perf_counter() + seconds
    totals: list[int] = []
    errors: list[OSError] = []

    def work() -> None:
        total = 0
        try:
            read = make()
            while time.perf_counter() < end:
                total += read()
        except OSError as e:
            errors.append(e)
        totals.append(total)

    start = time.perf_counter()
    threads = [threading.Thread(target=work) for _ in range(n_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return sum(totals) / (time.perf_counter() - start)


def peak_rss_bytes() -> int:
    """Return the most memory that this process ever had resident, by the kernel's figure.

    Linux's getrusage counts what ran in the process before it became Python.
    """
    status = Path("/proc/self/status")
    if status.exists():
        peak = re.search(r"^VmHWM:\s*(\d+) kB$", status.read_text(), re.MULTILINE)
        if peak:
            return int(peak[1]) * 1024
    maxrss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return maxrss if sys.platform == "darwin" else maxrss * 1024
