"""Reads that fail: a library to preload, what it does to them, and a process that suffers it.

As a script it is that process: it streams a model as the lines on its stdin say, each an object,
and answers each with one.
"""

import base64
import json
import mmap
import resource
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from longhaul import llama
from longhaul.config import Config
from longhaul.engine import Engine
from longhaul.errors import LonghaulError
from longhaul.index import read_index

SOURCE = Path(__file__).with_name("faulty_reads.c")
KINDS = ("none", "error", "interrupt", "short", "end", "delay")  # enum fault
CONTROL = struct.Struct("=7i")  # struct control
ALL = 2**31 - 1

Logits = npt.NDArray[np.float32]


def compiler() -> str | None:
    """Return the system's C compiler, if there is one."""
    return next((c for c in ("cc", "gcc", "clang") if shutil.which(c)), None)


def build_library(folder: Path, compiler: str) -> Path:
    """Compile faulty_reads.c."""
    library = folder / "libfaulty-reads.so"
    flags = ["-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run([compiler, *flags, str(SOURCE), "-o", str(library)], check=True)
    return library


class Faults:
    """What happens to reads of the files whose path ends with `name`; nothing at first."""

    def __init__(self, library: Path, control: Path, name: str) -> None:
        control.write_bytes(bytes(CONTROL.size))
        self.environment = {
            "LD_PRELOAD": str(library),
            "FAULTY_READS_NAME": name,
            "FAULTY_READS_CONTROL": str(control),
        }
        with control.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), CONTROL.size)

    def set(
        self, kind: str, *, before: int = 0, n: int = ALL, code: int = 0, delay_s: float = 0
    ) -> None:
        """From now on disturb `n` reads after the first `before`; the counts begin anew.

        `code` is the errno of an error.
        """
        numbers = (before, n, code, round(1000 * delay_s), 0, 0)
        CONTROL.pack_into(self._memory, 0, 0, *numbers)
        CONTROL.pack_into(self._memory, 0, KINDS.index(kind), *numbers)

    def clear(self) -> None:
        """Let all reads through; the counts stay."""
        struct.pack_into("=i", self._memory, 0, 0)

    @property
    def n_reads(self) -> int:
        """The reads since `set`."""
        return int(CONTROL.unpack_from(self._memory)[5])

    @property
    def n_disturbed(self) -> int:
        """Those of them that were not let through."""
        return int(CONTROL.unpack_from(self._memory)[6])

    def close(self) -> None:
        """Let go of the control file."""
        self._memory.close()


@dataclass(frozen=True)
class Failure:
    """An exception in the other process."""

    kinds: tuple[str, ...]  # its class and the bases of it
    message: str
    errno: int | None

    @property
    def kind(self) -> str:
        """The name of its class."""
        return self.kinds[0]


@dataclass(frozen=True)
class Decoded:
    """What a decode left behind."""

    logits: Logits | None  # (n_tokens, n_vocab)
    raised: Failure | None
    kept: Failure | None  # what the engine kept
    n_past: int
    slot_of: tuple[tuple[int, ...], ...]  # of each layer, by expert
    expert_of: tuple[tuple[int, ...], ...]  # by slot
    free: tuple[tuple[int, ...], ...]
    n_errors: int

    def resident(self, layer_index: int) -> set[int]:
        """Return the experts of a layer that have slots."""
        return {e for e, slot in enumerate(self.slot_of[layer_index]) if slot >= 0}


class Worker:
    """A process of its own that streams a model; killed at the end of its `with`."""

    def __init__(self, environment: dict[str, str], prefix: Sequence[str] = ()) -> None:
        """Start it; `prefix` are words before its command."""
        self._process = subprocess.Popen(
            [*prefix, sys.executable, __file__],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def _ask(self, what: str, **how: object) -> Any:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps({"what": what, **how}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the worker ended with {self._process.wait()}"
        return json.loads(line)

    def open(self, path: Path, **how: object) -> dict[str, Any] | Failure:
        """Open engine, model and context, and return what is to know of them, or the failure."""
        found = self._ask("open", path=str(path), **how)
        return _failure(found) if "kinds" in found else dict(found)

    def decode(
        self, tokens: Sequence[int], *, anew: bool = True, spare_bytes: int | None = None
    ) -> Decoded:
        """Evaluate tokens after those before, or from an empty context."""
        found = self._ask("decode", tokens=list(tokens), anew=anew, spare_bytes=spare_bytes)
        logits = found.pop("logits")
        if logits is not None:
            flat = np.frombuffer(base64.b64decode(logits), np.float32)
            logits = flat.reshape(len(tokens), -1)
        failures = {name: _failure(found.pop(name)) for name in ("raised", "kept")}
        tables = {name: _tuples(found.pop(name)) for name in ("slot_of", "expert_of", "free")}
        return Decoded(logits=logits, **failures, **tables, **found)

    def close(self) -> None:
        """Close what is open."""
        self._ask("close")

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *error: object) -> None:
        assert self._process.stdin and self._process.stdout
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()


def _failure(found: Any) -> Any:
    if found is None:
        return None
    return Failure(tuple(found["kinds"]), found["message"], found["errno"])


def _tuples(found: list[list[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(numbers) for numbers in found)


# --- the process itself ---------------------------------------------------------------------------


def _told(error: BaseException | None) -> dict[str, object] | None:
    if error is None:
        return None
    kinds = [kind.__name__ for kind in type(error).__mro__]
    return {"kinds": kinds, "message": str(error), "errno": getattr(error, "errno", None)}


@contextmanager
def _memory_limit(spare_bytes: int | None) -> Iterator[None]:
    """Let this process have so much more address space than now, or as much as it likes."""
    if spare_bytes is None:
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_AS)
    n_pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (n_pages * mmap.PAGESIZE + spare_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


class _Session:
    """An engine, a model and a context, while they are open."""

    def __init__(self) -> None:
        self._close: Callable[[], None] = lambda: None

    def open(
        self,
        path: str,
        n_slots: int = 4,
        repack: bool = False,
        use_mmap: bool = True,
        uncached: bool = True,
        chunk_bytes: int = 512 * 1024,
        spare_bytes: int | None = None,
    ) -> dict[str, object] | None:
        try:
            with _memory_limit(spare_bytes), ExitStack() as stack:
                model = read_index(Path(path))
                config = Config(uncached=uncached, chunk_bytes=chunk_bytes)
                engine = Engine(model, [n_slots] * len(model.layers), config)
                self._engine = stack.enter_context(engine)
                loaded = llama.Model(model.path, repack=repack, use_mmap=use_mmap)
                stack.enter_context(loaded)
                context = llama.Context(loaded)
                self._context = stack.enter_context(context)
                self._close = stack.pop_all().close
        except LonghaulError as e:
            return _told(e)
        sizes = engine.slot_bytes()
        return {
            "modes": engine.pool.modes,
            "slot_bytes": sizes.all,
            "repacked_bytes": sizes.repacked,
        }

    def decode(
        self, tokens: list[int], anew: bool, spare_bytes: int | None = None
    ) -> dict[str, object]:
        context, engine = self._context, self._engine
        if anew:
            context.remove_from(0)
        logits, raised = None, None
        try:
            with _memory_limit(spare_bytes):
                logits = context.decode(tokens)
        except LonghaulError as e:
            raised = e
        encoded = None if logits is None else base64.b64encode(logits.tobytes()).decode()
        residencies = engine._residencies
        return {
            "logits": encoded,
            "raised": _told(raised),
            "kept": _told(engine.take_error()),
            "n_past": context.n_past,
            "slot_of": [list(residency.slot_of) for residency in residencies],
            "expert_of": [list(residency.expert_of) for residency in residencies],
            "free": [list(residency.free) for residency in residencies],
            "n_errors": engine.stats().total.n_errors,
        }

    def close(self) -> None:
        close, self._close = self._close, lambda: None
        close()


def main() -> None:
    """Do what each line says."""
    llama.route_log()
    session = _Session()
    for line in sys.stdin:
        how = json.loads(line)
        print(json.dumps(getattr(session, how.pop("what"))(**how)), flush=True)
    session.close()


if __name__ == "__main__":
    main()
