"""Joins policy and mechanism: a model's routed experts behind llama.cpp's graph.

The round trip of a miss:

1. llama.cpp computes a layer's router; the sync op (native/src/sync.cpp) sees the chosen experts.
   When all are in slots it writes their slot ids, and Python is not involved.
2. Otherwise the missing experts go where Python said before: each layer has nominees, slots that
   the planner would choose for what is missing next. The native side takes their victims out of
   the slot table, starts to read, and only then calls `Engine._on_begun` on the computing thread,
   which enters that on this side, and chooses new nominees for layers that have used theirs.
3. Where there are not enough nominees, and always for more than two stages, it calls
   `Engine._on_plan` before anything is read. The planner says which victims leave, which slots the
   missing experts get and, where the ubatch selects more experts than there are slots, in which
   stage each is computed. It changes nothing.
4. The victims leave the slot table, since their bytes are about to be overwritten.
5. `Stream.load`, or `Stream.set_stages` where experts take turns in the slots, hands the plan over.
   The native side reads one stage while another is computed, and `_on_complete` enters what is
   resident in the end into the slot table, while a later layer is being read.
6. While a layer of a long prompt is computed, `_on_ahead` may fill free slots of the next one.
7. If a read fails, its experts do not enter: their slots stay free and the table stays true. If
   anything is raised in a callback of ours, the layer forgets all of its experts. Either way the
   exception is kept, llama_decode returns an error, and the caller gets the exception from
   `Engine.raise_kept`.
"""

import errno
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from .budget import slots_bytes, ubatch_limit
from .closing import Closing
from .config import Config
from .errors import ConfigError, NativeError, ReadError
from .experts import MoeLayer, MoeModel
from .files import replacing
from .native import LayerShape, Load, ReadPool, SlotBytes, Stream, StreamFunctions
from .planner import Plan, nominees, plan, plan_ahead, plan_stages, stage_count
from .policy import POLICIES
from .residency import Residency
from .stats import Record, Stats
from .tier import HostTier, TierLoad, TierPlan, TierSizes, loaded_experts
from .trace import TraceHeader, TraceLayer, header_bytes

NO_UBATCH_LIMIT = 2**31 - 1
NOT_IN_TIER = TierLoad(-1, False)
NOMINATED_AT_ONCE = 4  # layers, in the time that one read takes
NOMINEES_PER_EXPERT = 2  # of those that a ubatch needs: some will be needed again, or be used
MOST_NOMINEES = 128  # of a layer: for a few sequences; prompts take their time anyway
SWITCH_INTERVAL_S = 5e-5  # of Python's threads, while experts stream

_switching_lock = threading.Lock()
_n_engines = 0
_switch_interval_s = 0.0


def _quick_switching(change: int) -> None:
    """Note that an engine was opened (1) or closed (-1): while there is one, Python switches soon.

    A callback of ours waits for the GIL as long as another thread's turn is, by default 5 ms: one
    busy Python thread would add that to every layer that misses something.
    """
    global _n_engines, _switch_interval_s
    with _switching_lock:
        if _n_engines == 0:
            _switch_interval_s = sys.getswitchinterval()
            sys.setswitchinterval(min(_switch_interval_s, SWITCH_INTERVAL_S))
        _n_engines += change
        if _n_engines == 0 and sys.getswitchinterval() <= SWITCH_INTERVAL_S:  # as we left it
            sys.setswitchinterval(_switch_interval_s)


@dataclass(frozen=True, slots=True)
class _Step:
    """Hold what is being read for a layer."""

    plan: Plan
    tier: TierPlan | None = None


class Engine(Closing):
    """Stream the routed experts of one model, for as long as it is open.

    A model that llama.cpp loads from `model.path` while the engine is open streams; it has to be
    freed before `close`.
    """

    def __init__(
        self,
        model: MoeModel,
        n_slots: Sequence[int],
        config: Config,
        on_error: Callable[[BaseException], None] | None = None,
        tier: TierSizes | None = None,
    ) -> None:
        """Open the shards; raises ReadError if one cannot be opened.

        `on_error` is told of a failed load at once. `tier` says how many experts of each layer are
        kept in ordinary memory behind the slots.
        """
        if config.policy not in POLICIES:
            raise ConfigError(
                f"no policy {config.policy!r}; there are {', '.join(sorted(POLICIES))}"
            )
        self.model = model
        self.n_slots = tuple(n_slots)
        self._ubatch = config.ubatch
        self._on_error = on_error
        self.tier = tier or TierSizes.none(len(self.n_slots))
        self._tiers = [
            HostTier(layer.n_expert, n, n_locked) if n else None
            for layer, n, n_locked in zip(model.layers, *self.tier, strict=True)
        ]
        self._loading: dict[int, _Step] = {}  # by index of layer: being read
        self._to_nominate: dict[int, None] = {}  # layers without nominees, ordered
        self._n_needed = [layer.n_expert_used for layer in model.layers]  # by the last that missed
        with ExitStack() as undo:
            self.pool = undo.enter_context(ReadPool(config.n_io_threads, config.chunk_bytes))
            files = [self._open(index, config.uncached) for index in range(len(model.shards))]
            self._stream = undo.enter_context(self._open_stream(files))
            self._residencies = [
                Residency(
                    *self._stream.slot_table(i), POLICIES[config.policy], self._stream.n_uses(i)
                )
                for i in range(len(self.n_slots))
            ]
            for residency, layer_tier in zip(self._residencies, self._tiers, strict=True):
                if layer_tier:
                    residency.backed = layer_tier.slot_of
            self._recording = undo.enter_context(ExitStack())
            if config.trace_path is not None:
                self._record(config.trace_path, config.policy)
            self._stream.set_active(True)
            undo.pop_all()
        self._has_switching = True
        _quick_switching(1)

    def _open(self, index: int, uncached: bool) -> int:
        path = self.model.shards[index]
        file = self.pool.open_file(path, uncached)
        if self.model.stamps and self.pool.stamp(file) != self.model.stamps[index]:
            raise ReadError(
                errno.ESTALE, f"{path} has changed since its header was read; start again"
            )
        return file

    def _record(self, path: Path, policy: str) -> None:
        """Record the routing from now on, into a file that is there once the engine is closed."""
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path} is no file to write a trace to")
        try:
            part = self._recording.enter_context(replacing(path))
            file = self._recording.enter_context(part.open("wb"))
        except OSError as e:
            raise ConfigError(f"the trace cannot be written to {path}: {e.strerror}") from e
        layers = tuple(
            TraceLayer(layer.layer, layer.n_expert, layer.n_expert_used, layer.expert_bytes)
            for layer in self.model.layers
        )
        header = TraceHeader(
            layers=layers,
            model=self.model.name,
            arch=self.model.arch,
            fingerprint=self.model.fingerprint,
            n_slots=self.n_slots,
            policy=policy,
        )
        file.write(header_bytes(header))
        file.flush()
        self._stream.record(file.fileno())
        self._recording.callback(self._stop_recording)

    def _stop_recording(self) -> None:
        try:
            with self._stream.paused():
                self._stream.record(None)
        except ReadError as e:  # what was read is right all the same
            self._on_failure(e)

    def _open_stream(self, files: Sequence[int]) -> Stream:
        limit = None
        if self._ubatch == "shrink":
            limit = ubatch_limit(self.model.layers, self.n_slots)
        stream = Stream(
            self.model.path,
            [
                self._shape(layer, *sizes)
                for layer, *sizes in zip(self.model.layers, self.n_slots, *self.tier, strict=True)
            ],
            NO_UBATCH_LIMIT if limit is None else limit,
            self.pool,
            self._functions(),
        )
        for index, layer in enumerate(self.model.layers):
            for tensor in layer.tensors:
                file = files[tensor.shard]
                stream.add_tensor(tensor.name, index, file, tensor.offset, tensor.slice_bytes)
        return stream

    def plan_devices(self, device_of: Mapping[str, str], later_bytes: Mapping[str, int]) -> None:
        """Have a load fail that puts a routed tensor on another device than planned.

        `later_bytes` are what each device is to hold beside slots once they are there.
        """
        for name, device in device_of.items():
            if device:
                self._stream.plan_device(name, device, later_bytes.get(device, 0))

    def devices(self) -> dict[str, str]:
        """Return the device that the last load put each routed tensor on, "" for none."""
        return {
            tensor.name: self._stream.device(tensor.name)
            for layer in self.model.layers
            for tensor in layer.tensors
        }

    def _shape(self, layer: MoeLayer, n_slots: int, n_tier: int, n_locked: int) -> LayerShape:
        selected = range(layer.n_expert + 1)
        stages, stages_device = (
            [1] * (layer.n_expert + 1)
            if self._ubatch == "shrink"
            else [stage_count(n, n_slots, layer.n_expert, on_device=on_device) for n in selected]
            for on_device in (False, True)
        )
        return LayerShape(
            layer=layer.layer,
            n_expert=layer.n_expert,
            n_expert_used=layer.n_expert_used,
            n_slots=n_slots,
            n_stages=stages,
            n_stages_device=stages_device,
            n_tier=n_tier,
            n_locked=n_locked,
        )

    def _functions(self) -> StreamFunctions:
        return StreamFunctions(
            on_plan=self._changing(self._on_plan),
            on_begun=self._changing(self._on_begun),
            on_ahead=self._changing(self._on_ahead),
            on_complete=self._changing(self._on_complete),
            on_reset=self._on_reset,
            on_failure=self._on_failure,
        )

    def _on_reset(self) -> None:
        for layer_index in range(len(self._residencies)):
            self._forget(layer_index)
        self._loading.clear()

    def _forget(self, layer_index: int) -> None:
        self._residencies[layer_index].clear()
        tier = self._tiers[layer_index]
        if tier:
            tier.clear()

    def _begin(self, layer_index: int, plan: Plan) -> list[TierLoad]:
        """Let the victims of a plan leave; return where each of its loads is in the tier."""
        residency, tier = self._residencies[layer_index], self._tiers[layer_index]
        residency.evict(plan)
        if tier is None:
            self._loading[layer_index] = _Step(plan)
            return [NOT_IN_TIER] * len(plan.loads)
        tier_plan = tier.plan(loaded_experts(plan))
        tier.evict(tier_plan)
        self._loading[layer_index] = _Step(plan, tier_plan)
        return list(tier_plan.loads)

    def _begin_loads(self, layer_index: int, plan: Plan) -> list[Load]:
        """Let the victims of a plan leave; return its loads for the native side."""
        in_tier = self._begin(layer_index, plan)
        return [(*load, *where) for load, where in zip(plan.loads, in_tier, strict=True)]

    def _end(self, layer_index: int, step: "_Step") -> None:
        """Enter what a plan has loaded."""
        self._residencies[layer_index].apply(step.plan)
        tier = self._tiers[layer_index]
        if tier and step.tier:
            tier.apply(step.tier)

    def _changing(self, change: Callable[..., None]) -> Callable[..., None]:
        """Have a layer forget its experts if anything is raised in a change, even by a signal."""

        def call(layer_index: int, *args: object) -> None:
            try:
                change(layer_index, *args)
            except BaseException:
                self._forget(layer_index)
                raise

        return call

    def _on_plan(
        self, layer_index: int, n_stages: int, needed: list[int], missing: list[int]
    ) -> None:
        residency = self._residencies[layer_index]
        self._loading.pop(layer_index, None)
        step: Plan
        if n_stages <= 2:
            step = plan(residency, needed, missing)
            self._stream.load(layer_index, self._begin_loads(layer_index, step))
        else:
            step = staged = plan_stages(residency, needed, missing)
            by_load = iter(self._begin(layer_index, step))
            self._stream.set_stages(
                layer_index,
                [
                    (*place, *(next(by_load, NOT_IN_TIER) if place.is_load else NOT_IN_TIER))
                    for place in staged.places
                ],
            )
        self._stream.count_evictions(step.n_evictions)

    def _on_begun(
        self, layer_index: int, needed: list[int], missing: list[int], slots: list[int] | None
    ) -> None:
        if slots is not None:
            victims = self._residencies[layer_index].give_way(slots)
            loads = tuple(zip(missing, slots, strict=True))
            self._loading[layer_index] = _Step(Plan(loads, victims))
        self._n_needed[layer_index] = len(needed)
        self._to_nominate.pop(layer_index, None)  # once it is complete
        for index in self._next_to_nominate(layer_index):
            del self._to_nominate[index]
            self._changing(self._nominate)(index)

    def _has_nominees(self, layer_index: int) -> bool:
        """Whether a layer's loads can be known before they are asked for; a tier takes a plan."""
        return self._residencies[layer_index].policy.keeps_order and not self._tiers[layer_index]

    def _next_to_nominate(self, layer_index: int) -> list[int]:
        n_layers = len(self.n_slots)
        waiting = sorted(self._to_nominate, key=lambda i: (i - layer_index) % n_layers)
        return waiting[:NOMINATED_AT_ONCE]

    def _nominate(self, layer_index: int) -> None:
        n = min(NOMINEES_PER_EXPERT * self._n_needed[layer_index], MOST_NOMINEES)
        self._stream.nominate(layer_index, nominees(self._residencies[layer_index], n))

    def _forget_nominees(self, layer_index: int) -> None:
        """Choose nominees anew, since slots have changed while nothing was computed."""
        if self._has_nominees(layer_index):
            self._stream.nominate(layer_index, ())
            self._to_nominate[layer_index] = None

    def _on_ahead(self, layer_index: int, n_selected: int) -> None:
        step = plan_ahead(self._residencies[layer_index], n_selected)
        if step.loads:
            self._stream.load_ahead(layer_index, self._begin_loads(layer_index, step))

    def _on_complete(self, layer_index: int, is_read: bool) -> None:
        """Enter what has been loaded; what fails is never entered, so its slots stay free."""
        step = self._loading.pop(layer_index, None)
        if step is not None and is_read:
            self._end(layer_index, step)
            if self._has_nominees(layer_index):
                self._to_nominate[layer_index] = None
        elif step is None and not is_read:  # the native side has changed what we were not told of
            self._forget(layer_index)

    def _on_failure(self, error: BaseException) -> None:
        if self._on_error:
            self._on_error(error)

    def take_error(self) -> BaseException | None:
        """Return what a callback raised since the last call, if anything."""
        error, self._stream.error = self._stream.error, None
        return error

    def raise_kept(self) -> None:
        """Raise what a callback raised since the last call, if anything."""
        error = self.take_error()
        if error is not None:
            raise error

    @property
    def budget_bytes(self) -> int:
        """Bytes of all slots."""
        return slots_bytes(self.model.layers, self.n_slots)

    @property
    def live_file(self) -> int:
        """The file of the memory that a process which watches may map, until `close`."""
        return self._stream.live_file

    def live_layout(self) -> dict[str, object]:
        """Return where in that memory counters and slot tables lie, as numbers only."""
        layers = [
            {
                "layer": layer.layer,
                "n_expert": layer.n_expert,
                "n_slots": n_slots,
                **self._stream.table_offsets(index),
            }
            for index, (layer, n_slots) in enumerate(
                zip(self.model.layers, self.n_slots, strict=True)
            )
        ]
        return {"layout": self._stream.live_layout(), "layers": layers}

    def set_limits(self, limits: Sequence[int]) -> int:
        """Have so many slots of each layer at most hold an expert; return the bytes given back.

        The memory of the others goes back to the system. A ubatch that needs more takes them again
        until this is called again. May be called from any thread; waits for the end of the running
        ubatch.
        """
        with self._stream.paused():
            pairs = zip(self._residencies, limits, strict=True)
            for index, (residency, limit) in enumerate(pairs):
                if residency.set_limit(limit):
                    self._forget_nominees(index)
            return self._stream.give_back()

    @property
    def is_ready(self) -> bool:
        """Whether a context of a loaded model has been made, so that slots can be filled."""
        return self._stream.is_ready

    @property
    def is_computing(self) -> bool:
        """Whether a ubatch is running."""
        return self._stream.is_computing

    def fill(self, layer_index: int, experts: Sequence[int], n_most: int) -> int:
        """Read some of these experts into free slots, in their order; return how many.

        Those that are in slots already are passed over. Between ubatches: waits for the end of one,
        and the next one waits meanwhile. From any thread; raises ReadError if a read fails.
        """
        with self._stream.paused():
            residency = self._residencies[layer_index]
            wanted = [expert for expert in experts if residency.slot_of[expert] < 0]
            slots = residency.free[: -min(residency.n_room, n_most) - 1 : -1]
            loads = tuple(zip(wanted, slots, strict=False))
            if loads:
                items = self._begin_loads(layer_index, Plan(loads, ()))
                step = self._loading.pop(layer_index)
                self._stream.fill(layer_index, items)
                self._end(layer_index, step)
            return len(loads)

    def n_needed(self) -> list[list[int]]:
        """Return how many decoded ubatches have needed each expert, by layer."""
        return [self._stream.n_needed(index) for index in range(len(self.n_slots))]

    def slot_bytes(self) -> SlotBytes:
        """Return the bytes of the slot tensors that llama.cpp allocated last."""
        return self._stream.slot_bytes()

    def resident(self, layer_index: int) -> dict[int, int]:
        """Return slot by expert of one layer's resident experts."""
        if not self._residencies:
            raise NativeError("the engine is closed")
        expert_of = self._residencies[layer_index].expert_of
        return {expert: slot for slot, expert in enumerate(expert_of) if expert >= 0}

    def stats(self) -> Stats:
        """Return the counters since the engine was opened."""
        return self._stream.stats()

    def records(self) -> list[Record]:
        """Return the counters of each of the last ubatches, 4096 at most, the last one last."""
        return self._stream.records()

    def close(self) -> None:
        """Let later loads run whole; raises NativeError while a loaded model still streams.

        Twice is harmless.
        """
        self._recording.close()
        self._stream.close()
        if self._has_switching:
            self._has_switching = False
            _quick_switching(-1)
        self._residencies.clear()  # their memory was the stream's
        self.pool.close()
