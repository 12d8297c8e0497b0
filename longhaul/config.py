"""Every knob of a run, with unit, default and check. Knows no command line and no model."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

from .errors import ConfigError

MAX_IO_THREADS = 256
# keep and auto compute a ubatch that selects more experts than there are slots in stages; shrink
# makes it smaller instead.
UBATCH_MODES = ("auto", "keep", "shrink")
BLOCK_BYTES = 4096  # what uncached reads are aligned to
MAX_CACHE_BYTES = 2**63 - 1  # sizes cross the C API as int64

_UNITS = {"B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = re.compile(r"([0-9]{1,20}(?:\.[0-9]{0,20})?|\.[0-9]{1,20}) *(?:(B)|([KMGT])(?:IB)?)?")
_ACCEPTED = "give auto, a number of GiB such as 2 or 0.5, or a size such as 512MiB or 1.5G"


@dataclass(frozen=True, slots=True)
class Config:
    """Hold the knobs of a run; raises ConfigError if one has a value that cannot be used."""

    cache_bytes: int | None = None  # bytes for slot tensors; None: as much as memory allows
    cache_by_device: Mapping[str, int] = field(default_factory=dict)  # instead, by device
    ram_bytes: int = 0  # for experts kept in memory behind the slots of devices
    pin_bytes: int = 0  # of that, page-locked
    ram_anyway: bool = False  # also where slots are in the same memory
    n_io_threads: int = 4  # threads that read experts
    uncached: bool = True  # read past the page cache
    policy: str = "lru"  # name of the eviction policy
    ubatch: str = "auto"  # one of UBATCH_MODES
    chunk_bytes: int = 512 * 1024  # one read: reaches a disk's full rate with 4 in flight
    json_path: Path | None = None  # where the figures of the run are written when it ends
    plan_path: Path | None = None  # slots of each layer, as longhaul trace plan proposes them
    warm_path: Path | None = None  # what was used most before: read at the start, kept at the end
    trace_path: Path | None = None  # where the routing of the run is recorded
    page_port: int | None = None  # where the server's page listens; None: nowhere

    def __post_init__(self) -> None:
        if self.cache_bytes is not None and not 0 < self.cache_bytes <= MAX_CACHE_BYTES:
            raise ConfigError(
                f"cache of {self.cache_bytes} bytes cannot be used; it must be more than 0"
                f" and at most {MAX_CACHE_BYTES}"
            )
        if self.cache_bytes is not None and self.cache_by_device:
            raise ConfigError("give the cache one size, or one for each device, not both")
        if self.pin_bytes > self.ram_bytes:
            raise ConfigError(
                "what is page-locked is a part of the memory behind the slots: --longhaul-pin must"
                " not be more than --longhaul-ram"
            )
        if not 1 <= self.n_io_threads <= MAX_IO_THREADS:
            raise ConfigError(
                f"{self.n_io_threads} read threads cannot be used; give 1 to {MAX_IO_THREADS}"
            )
        if self.ubatch not in UBATCH_MODES:
            raise ConfigError(f"ubatch {self.ubatch!r} is none of: {', '.join(UBATCH_MODES)}")
        if self.chunk_bytes < BLOCK_BYTES or self.chunk_bytes % BLOCK_BYTES:
            raise ConfigError(
                f"reads of {self.chunk_bytes} bytes cannot be used;"
                f" give a multiple of {BLOCK_BYTES}"
            )
        if not self.policy:
            raise ConfigError("policy has no name; give one such as lru")

    @property
    def read_buffer_bytes(self) -> int:
        """Bytes of the read threads' buffers: a chunk, and the blocks at its two ends."""
        return self.n_io_threads * (self.chunk_bytes + 2 * BLOCK_BYTES)


def parse_cache(text: str) -> int | None:
    """Turn a cache size as a user types it into bytes, None for auto; without a unit it is GiB."""
    return None if text.strip().upper() == "AUTO" else parse_size(text)


def parse_size(text: str) -> int:
    """Turn a size as a user types it into bytes; without a unit it is GiB."""
    word = text.strip().upper()
    match = _SIZE.fullmatch(word)
    if match is None:
        raise ConfigError(f"cache size {text!r} is not a size; {_ACCEPTED}")
    number, byte, prefix = match.groups()
    size_bytes = int(Fraction(number.rstrip(".")) * _UNITS[byte or prefix or "G"])
    if size_bytes == 0:
        raise ConfigError(f"cache size {text!r} is 0 bytes; it must be more; {_ACCEPTED}")
    if size_bytes > MAX_CACHE_BYTES:
        raise ConfigError(f"cache size {text!r} is more than {MAX_CACHE_BYTES} bytes; {_ACCEPTED}")
    return size_bytes


def parse_caches(text: str) -> tuple[int | None, dict[str, int]]:
    """Turn what a user types for the cache into bytes, or into bytes by device.

    Devices are named as in `CPU=2,Vulkan0=4`; between them may stand a `/` as well.
    """
    if "=" not in text:
        return parse_cache(text), {}
    sizes: dict[str, int] = {}
    for part in re.split("[,/]", text):
        name, _, size = (word.strip() for word in part.partition("="))
        size_bytes = parse_cache(size) if name and size else None
        if size_bytes is None:
            raise ConfigError(
                f"{part!r} is not a device and its size; give such as CPU=2,Vulkan0=4, and leave"
                " out what is to be auto"
            )
        if name.upper() in map(str.upper, sizes):
            raise ConfigError(f"{name} is given two sizes")
        sizes[name] = size_bytes
    return None, sizes
