"""What is measured of a machine. Only that it is what it says, never how much."""

import os
import sys
from pathlib import Path

import pytest

from longhaul import machine
from longhaul.budget import MIB

ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="looks into the page cache")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "f.bin"
    path.write_bytes(os.urandom(4 * MIB))
    return path


def test_rates_are_measured(file: Path) -> None:
    found = machine.measure(file, seconds=0.1)
    assert found.disk_bytes_per_s > MIB
    assert found.memory_bytes_per_s > 100 * MIB


@ON_LINUX
def test_measuring_leaves_the_page_cache_as_it_was(file: Path) -> None:
    with file.open("rb") as whole:
        os.fsync(whole.fileno())
        os.posix_fadvise(whole.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if machine.cached_bytes(file, 0, 4 * MIB):
        pytest.skip("this file system keeps what was written in the page cache")
    machine.disk_rate(file, seconds=0.1)
    assert machine.cached_bytes(file, 0, 4 * MIB) == 0
    file.read_bytes()
    assert machine.cached_bytes(file, 0, 4 * MIB) == 4 * MIB
    assert machine.leaves_page_cache_alone(file)


@ON_LINUX
def test_reads_that_fill_the_page_cache_are_found_out(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "open_uncached", lambda path: os.open(path, os.O_RDONLY))
    assert machine.leaves_page_cache_alone(file) is False


@ON_LINUX
def test_a_file_of_somebody_else_cannot_be_told_of(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "cached_bytes", lambda path, offset, size: size)  # as for those
    assert machine.leaves_page_cache_alone(file) is None


def test_a_disk_that_refuses_is_not_measured(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> int:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(machine, "open_uncached", refuse)
    with pytest.raises(OSError, match="Invalid argument"):
        machine.measure(file, seconds=0.1)


def test_a_file_that_is_too_small_is_not_measured(tmp_path: Path) -> None:
    path = tmp_path / "small"
    path.write_bytes(b"x")
    with pytest.raises(OSError, match="too small"):
        machine.disk_rate(path)


def test_a_read_that_fails_is_an_error(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    descriptor = machine.open_uncached(file)
    os.close(descriptor)
    monkeypatch.setattr(machine, "open_uncached", lambda path: os.dup(descriptor_of_nothing()))
    with pytest.raises(OSError):
        machine.disk_rate(file, seconds=0.1)


def descriptor_of_nothing() -> int:
    """Return a descriptor that cannot be read."""
    reader, writer = os.pipe()
    os.close(reader)
    return writer
