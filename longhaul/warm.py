"""Reads the experts that were used most before, as soon as there is time. Policy and one thread."""

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .demo import cache_folder
from .engine import Engine
from .errors import LonghaulError
from .experts import MoeModel
from .files import write_text

FORMAT = 1
AUTO = Path("auto")
KEPT_SHARE = 0.5  # of what runs before have counted
STEP_BYTES = 8 * 2**20  # read at a time: what a request that comes just then may have to wait for
IDLE_S = 0.1  # without a ubatch
POLL_S = 0.02
MAX_COUNT = 2.0**63


@dataclass(frozen=True, slots=True)
class Uses:
    """Hold how often each expert of each layer was needed while decoding, by layer."""

    fingerprint: str
    counts: tuple[tuple[float, ...], ...]

    def order(self, layer_index: int) -> list[int]:
        """Return the experts of a layer that were needed at all, the most needed first."""
        counts = self.counts[layer_index]
        used = [expert for expert, n in enumerate(counts) if n > 0]
        return sorted(used, key=lambda expert: (-counts[expert], expert))


def default_path(model: MoeModel) -> Path:
    """Return where the uses of a model are kept."""
    return cache_folder() / f"uses-{model.fingerprint}.json"


def read_uses(path: Path, model: MoeModel) -> tuple[Uses | None, str]:
    """Read what runs before have used; None and the reason if that is of no use."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values["format"] != FORMAT:
            raise ValueError(f"format {values['format']}")
        counts = tuple(tuple(float(n) for n in layer) for layer in values["counts"])
        if not all(0 <= n < MAX_COUNT for layer in counts for n in layer):
            raise ValueError("a count is none")
        found = Uses(str(values["fingerprint"]), counts)
    except FileNotFoundError:
        return None, f"{path} is not there yet"
    except (OSError, ValueError, KeyError, TypeError, ArithmeticError, RecursionError) as e:
        return None, f"{path} cannot be used: {e}"
    shape = [layer.n_expert for layer in model.layers]
    if found.fingerprint != model.fingerprint or [len(layer) for layer in found.counts] != shape:
        return None, f"{path} is of another model"
    return found, ""


def write_uses(
    path: Path, model: MoeModel, counts: Sequence[Sequence[int]], before: Uses | None
) -> None:
    """Keep what a run has used, and half of what was kept before; raises OSError."""
    kept = [
        [
            n + KEPT_SHARE * (before.counts[index][expert] if before else 0.0)
            for expert, n in enumerate(layer)
        ]
        for index, layer in enumerate(counts)
    ]
    values = {"format": FORMAT, "model": model.name, "fingerprint": model.fingerprint}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps({**values, "counts": kept}) + "\n")


def steps(model: MoeModel, uses: Uses, n_slots: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
    """Return what to read, layer by layer in turn, the most needed first: no more than slots."""
    orders = [uses.order(index)[:n] for index, n in enumerate(n_slots)]
    while any(orders):
        for index, order in enumerate(orders):
            n_at_once = max(STEP_BYTES // model.layers[index].expert_bytes, 1)
            if order:
                yield index, order[:n_at_once]
                orders[index] = order[n_at_once:]


@contextmanager
def warming(engine: Engine, path: Path | None, tell: Callable[[str], None]) -> Iterator[None]:
    """Fill free slots while nothing is computed, and keep what was used at the end.

    A request that comes goes on before the next step; the one that is being read, a few MiB, it
    waits for. Nobody's expert leaves for this.
    """
    if path is None:
        yield
        return
    if path == AUTO:
        path = default_path(engine.model)
    uses, reason = read_uses(path, engine.model)
    tell(f"warm    {reason or f'the experts that were used most, by {path}'}")
    is_over = threading.Event()
    thread = None
    if uses is not None:
        thread = threading.Thread(target=_fill, args=(engine, uses, is_over, tell), daemon=True)
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        if thread is not None:
            thread.join()
        counts = engine.n_needed()
        if any(map(any, counts)):
            try:
                write_uses(path, engine.model, counts, uses)
            except OSError as e:
                tell(f"warning what was used is not in {path}: {e.strerror}")


def _fill(
    engine: Engine, uses: Uses, is_over: threading.Event, tell: Callable[[str], None]
) -> None:
    while not engine.is_ready:
        if is_over.wait(POLL_S):
            return
    n_read = 0
    try:
        for index, experts in steps(engine.model, uses, engine.n_slots):
            while not _is_idle(engine, is_over):
                if is_over.is_set():
                    return
            n_read += engine.fill(index, experts, len(experts))
        tell(f"warm    {n_read} experts read")
    except (LonghaulError, OSError) as e:
        if is_over.is_set() or not engine.is_ready:  # the model has been freed
            return
        tell(f"warning warming up has ended: {e}")


def _is_idle(engine: Engine, is_over: threading.Event) -> bool:
    """Say whether nothing was computed for a while; waits for it where something was just now."""
    total = engine.stats().total
    if total.n_ubatches == 0 and not engine.is_computing:
        return True
    before = total.n_ubatches
    is_over.wait(IDLE_S)
    return engine.stats().total.n_ubatches == before and not engine.is_computing
