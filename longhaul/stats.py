"""Counters of a run. Knows nothing of where they come from."""

from dataclasses import dataclass, field, fields


@dataclass(frozen=True, slots=True)
class Counters:
    """Count what one phase did; a hit or miss is a distinct (layer, expert) of a ubatch."""

    n_ubatches: int = 0
    n_tokens: int = 0
    n_hits: int = 0
    n_misses: int = 0
    n_tier_hits: int = 0  # of the misses, those that came from memory behind a device's slots
    n_evictions: int = 0
    read_bytes: int = 0
    compute_s: float = 0.0  # whole ubatches, waiting included
    wait_s: float = 0.0  # of that, from a miss until its layer can go on
    plan_s: float = 0.0  # of that, planning
    read_s: float = 0.0  # of that, waiting for reads
    repack_s: float = 0.0  # of that, repacking what has been read
    disk_s: float = 0.0  # of compute_s, in which something was being read
    n_errors: int = 0

    def __add__(self, other: "Counters") -> "Counters":
        return Counters(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __sub__(self, other: "Counters") -> "Counters":
        return Counters(*(getattr(self, f.name) - getattr(other, f.name) for f in fields(self)))

    @property
    def hit_rate(self) -> float:
        """Hits per distinct expert needed, 0 to 1; 0 when nothing was needed."""
        n_needed = self.n_hits + self.n_misses
        return self.n_hits / n_needed if n_needed else 0.0

    @property
    def tier_rate(self) -> float:
        """Part of the experts needed that came from memory behind a device's slots, 0 to 1."""
        n_needed = self.n_hits + self.n_misses
        return self.n_tier_hits / n_needed if n_needed else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of computation; 0 when nothing was computed."""
        return self.n_tokens / self.compute_s if self.compute_s else 0.0

    @property
    def roofline_ratio(self) -> float:
        """Time taken per time that cannot be avoided, 1 or more; 0 when nothing was computed.

        What cannot be avoided is computing or reading, whichever takes longer: reading at the rate
        that the disk has shown whenever it read.
        """
        roofline_s = max(self.compute_s - self.wait_s, self.disk_s)
        return self.compute_s / roofline_s if roofline_s else 0.0

    @property
    def read_bytes_per_token(self) -> float:
        """Bytes read per token; 0 without tokens."""
        return self.read_bytes / self.n_tokens if self.n_tokens else 0.0


@dataclass(frozen=True, slots=True)
class Record:
    """Hold the counters of one ubatch; `end_s` is by a clock that only goes forward."""

    end_s: float
    is_prefill: bool
    counters: Counters


@dataclass(frozen=True, slots=True)
class Stats:
    """Hold the counters of prefill (pp) and decode (tg)."""

    prefill: Counters = field(default_factory=Counters)
    decode: Counters = field(default_factory=Counters)

    def __add__(self, other: "Stats") -> "Stats":
        return Stats(self.prefill + other.prefill, self.decode + other.decode)

    def __sub__(self, other: "Stats") -> "Stats":
        return Stats(self.prefill - other.prefill, self.decode - other.decode)

    @property
    def total(self) -> Counters:
        """Both phases together."""
        return self.prefill + self.decode
