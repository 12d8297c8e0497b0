"""Memory cgroups of our own, version 1 or 2, for runs that are to be limited."""

import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Cgroup:
    """A memory cgroup. Page cache counts."""

    folder: Path
    limit_name: str
    usage_name: str
    peak_name: str

    def set_limit(self, limit_bytes: int) -> None:
        """Let the processes in it take so much, all together; swapping does not help them."""
        (self.folder / self.limit_name).write_text(str(limit_bytes))
        for name in ("memory.memsw.limit_in_bytes", "memory.swap.max"):
            if (self.folder / name).exists():
                (self.folder / name).write_text(str(limit_bytes if "memsw" in name else 0))

    def within(self, command: Sequence[str]) -> list[str]:
        """Return the command so that it runs in here from its first instruction on."""
        procs = str(self.folder / "cgroup.procs")
        return ["sh", "-c", 'echo 0 >"$0" && exec "$@"', procs, *command]

    @property
    def usage_bytes(self) -> int:
        """What is taken now, page cache included."""
        return int((self.folder / self.usage_name).read_text())

    @property
    def peak_bytes(self) -> int:
        """The most that was ever taken, page cache included."""
        return int((self.folder / self.peak_name).read_text())

    @property
    def n_oom_kills(self) -> int:
        """How many processes the kernel has killed for want of memory."""
        name = "memory.oom_control" if self.limit_name.endswith("_bytes") else "memory.events"
        lines = (self.folder / name).read_text().splitlines()
        return int(dict(line.split() for line in lines)["oom_kill"])


@contextmanager
def make_cgroup() -> Iterator[Cgroup]:
    """Make a cgroup, and remove it when its processes have ended; raises OSError if it cannot."""
    name = f"longhaul-{uuid.uuid4().hex}"
    if (ROOT / "memory" / "memory.limit_in_bytes").exists():
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.max_usage_in_bytes")
        made = Cgroup(ROOT / "memory" / name, *names)
    else:
        made = Cgroup(ROOT / name, "memory.max", "memory.current", "memory.peak")
    made.folder.mkdir()
    try:
        if not (made.folder / made.limit_name).exists():
            raise OSError("cgroups do not limit memory here")
        yield made
    finally:
        for _ in range(100):
            try:
                made.folder.rmdir()
                break
            except OSError:  # a process is still ending
                time.sleep(0.05)
