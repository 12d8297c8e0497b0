"""Gives memory of slots back while the machine is short of it, or when a signal asks.

A thread that sleeps: it wakes once a second where the cache has no fixed size, and for a signal.
"""

import os
import select
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import compress

from .budget import MIB, MemoryLimit, memory_limit, plan_slots, slots_bytes, token_slots
from .engine import Engine
from .errors import ConfigError
from .experts import MoeLayer
from .launch import RunPlan
from .report import size_text

TICK_S = 1.0
SPARE_BYTES = 64 * MIB  # free beside the floor before some slots are taken again
GIVE_BACK, TAKE_AGAIN = signal.SIGUSR1, signal.SIGUSR2
_STOP = 0  # no signal has this number


def next_budget(
    limit: MemoryLimit, floor_bytes: int, budget_bytes: int, least_bytes: int, most_bytes: int
) -> int:
    """Return the bytes that slots may take from now on, given how much memory is available.

    What is missing below the floor is given back at once, and some more. All is taken again when
    what is spare above the floor suffices for it, until then half of what is spare: so the two do
    not chase each other.
    """
    spare_bytes = limit.available_bytes - floor_bytes
    if spare_bytes < 0:
        return max(budget_bytes + spare_bytes - SPARE_BYTES // 2, least_bytes)
    if spare_bytes >= most_bytes - budget_bytes + SPARE_BYTES // 8:
        return most_bytes
    if spare_bytes > SPARE_BYTES:
        return min(budget_bytes + spare_bytes // 2, most_bytes)
    return budget_bytes


def slot_limits(
    layers: Sequence[MoeLayer], n_slots: Sequence[int], budget_bytes: int
) -> tuple[int, ...]:
    """Return how many of its slots each layer may use within a budget.

    Never fewer than one token needs, where a layer has as many.
    """
    most = dict(zip([layer.layer for layer in layers], n_slots, strict=True))

    def least(layer: MoeLayer) -> int:
        return min(token_slots(layer), most[layer.layer])

    budget_bytes = max(budget_bytes, slots_bytes(layers, [least(layer) for layer in layers]))
    limits = plan_slots(layers, budget_bytes, least)
    return tuple(min(pair) for pair in zip(limits, n_slots, strict=True))


class Watcher:
    """Decide how many slots are in use, and have the engine keep to it."""

    def __init__(self, engine: Engine, plan: RunPlan, tell: Callable[[str], None]) -> None:
        self._engine = engine
        self._is_in_ram = plan.is_in_ram  # slots on devices stay as they are
        self._layers = list(compress(plan.model.layers, self._is_in_ram))
        self._n_slots = tuple(compress(engine.n_slots, self._is_in_ram))
        self._floor_bytes = plan.memory.floor_bytes
        self._tell = tell
        self._is_automatic = plan.automatic and plan.limit_known and bool(self._layers)
        self._most_bytes = slots_bytes(self._layers, self._n_slots)
        self._least_bytes = slots_bytes(self._layers, slot_limits(self._layers, self._n_slots, 0))
        self._wanted_bytes = self._most_bytes  # by whoever sends signals
        self._memory_bytes = self._most_bytes  # by what is available
        self.budget_bytes = self._most_bytes
        self._gives_back = True
        self._is_blind = False  # the system did not say how much is available

    @property
    def timeout_s(self) -> float | None:
        """How long to wait for a signal."""
        is_limited = self.budget_bytes < self._most_bytes
        return TICK_S if self._gives_back and (self._is_automatic or is_limited) else None

    def step(self, signals: Sequence[int]) -> None:
        """Do what signals ask and what memory demands."""
        for number in signals:
            if number == GIVE_BACK:
                self._wanted_bytes = max(self.budget_bytes // 2, self._least_bytes)
            elif number == TAKE_AGAIN:
                self._wanted_bytes = self._most_bytes
        if self._gives_back and signals and not self._layers:
            self._give_up()
        if not self._gives_back:
            return
        reason = "as the signal asked"
        if self._is_automatic:
            reason = self._look_at_memory(reason)
        before_bytes = self.budget_bytes
        self.budget_bytes = min(self._wanted_bytes, self._memory_bytes)
        limits = slot_limits(self._layers, self._n_slots, self.budget_bytes)
        if self.budget_bytes < self._most_bytes or before_bytes < self._most_bytes:
            n_bytes = self._engine.set_limits(self._with_devices(limits))
            if n_bytes == 0 and limits != self._n_slots:
                self._give_up()
                return
        if self.budget_bytes != before_bytes:
            used_bytes = slots_bytes(self._layers, limits)
            whole = size_text(self._most_bytes)
            self._tell(f"cache   {size_text(used_bytes)} of {whole} in use, {reason}")

    def _with_devices(self, limits: Sequence[int]) -> tuple[int, ...]:
        """Return the limits of all layers, given those of the layers in RAM."""
        of_ram = iter(limits)
        return tuple(
            next(of_ram) if is_in_ram else n_slots
            for n_slots, is_in_ram in zip(self._engine.n_slots, self._is_in_ram, strict=True)
        )

    def _give_up(self) -> None:
        """Use all slots again, since the system does not take any: locked, or on a device."""
        self._gives_back = False
        self.budget_bytes = self._most_bytes
        self._engine.set_limits(self._engine.n_slots)
        self._tell("warning no memory of slots can be given back: it is locked, or on a device")

    def _look_at_memory(self, reason: str) -> str:
        try:
            limit = memory_limit()
        except ConfigError as error:
            if not self._is_blind:
                self._tell(f"warning {error}; it stays as it is")
            self._is_blind = True
            return reason
        self._is_blind = False
        before_bytes = self._memory_bytes
        self._memory_bytes = next_budget(
            limit, self._floor_bytes, before_bytes, self._least_bytes, self._most_bytes
        )
        if self._memory_bytes == before_bytes:
            return reason
        return f"since {size_text(limit.available_bytes)} are available ({limit.source})"


@contextmanager
def watching(engine: Engine, plan: RunPlan, tell: Callable[[str], None]) -> Iterator[None]:
    """Watch meanwhile. Signals are heard in the main thread only, where Python allows it."""
    watcher = Watcher(engine, plan, tell)
    hears, ear = os.pipe()
    os.set_blocking(hears, False)
    os.set_blocking(ear, False)
    thread = threading.Thread(target=_watch, args=(watcher, hears), name="watch", daemon=True)
    is_main = threading.current_thread() is threading.main_thread()
    before = {}
    try:
        if is_main:  # Python writes the number as the signal comes, whatever the main thread does
            for number in (GIVE_BACK, TAKE_AGAIN):
                before[number] = signal.signal(number, lambda *_: None)
                signal.siginterrupt(number, False)  # who reads from a terminal goes on
            signal.set_wakeup_fd(ear, warn_on_full_buffer=False)
        thread.start()
        yield
    finally:
        if is_main:
            signal.set_wakeup_fd(-1)
            for number, handler in before.items():
                signal.signal(number, handler)
        if thread.ident is not None:
            os.write(ear, bytes([_STOP]))
            thread.join()
        os.close(ear)
        os.close(hears)


def ignore_signals() -> None:
    """Have signals that come before a model streams, or after, do no harm."""
    if threading.current_thread() is threading.main_thread():
        for number in (GIVE_BACK, TAKE_AGAIN):
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, signal.SIG_IGN)


def _watch(watcher: Watcher, hears: int) -> None:
    while True:
        ready, _, _ = select.select([hears], [], [], watcher.timeout_s)
        signals = os.read(hears, 64) if ready else b""
        if _STOP in signals:
            return
        try:
            watcher.step(signals)
        except OSError:  # nobody hears what is told any longer
            continue
