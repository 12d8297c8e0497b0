"""Wraps the native library: handles, statuses to exceptions. The only importer of cffi.

Knows no policy. Arrays cross as cffi memory; every size is in bytes. Nothing here is loaded before
the first use.
"""

import errno
import mmap
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import cffi

from .closing import Closing
from .errors import ConfigError, LonghaulError, NativeError, PatchError, ReadError
from .library import build_id, exact_environment, header_text, lib_path, openmp_environment
from .stats import Counters, Record, Stats

OK = 0
_FILE_MODES = ("cached", "direct", "nocache", "dontneed")
CompleteFunction = Callable[[int, bool], None]
ResetFunction = Callable[[], None]
FailureFunction = Callable[[BaseException], None]


# Expert, slot, its place in the tier or -1, whether its bytes are there so that nothing is read,
# and the place in the tier with which they change places once they were copied, or -1.
Load = tuple[int, int, int, bool, int]
PlanFunction = Callable[[int, int, list[int], list[int]], None]
BegunFunction = Callable[[int, list[int], list[int], list[int] | None], None]
AheadFunction = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Describe a layer to the native side; `n_stages` (n_expert + 1,) is by experts selected."""

    layer: int
    n_expert: int
    n_expert_used: int
    n_slots: int
    n_stages: Sequence[int]
    n_stages_device: Sequence[int]  # where slots are on a device
    n_tier: int = 0  # experts that ordinary memory has room for behind the slots
    n_locked: int = 0  # of these, in page-locked memory where there is such


_SIZES = ("slot", "repacked", "device", "tier", "locked")  # of lh_live


class SlotBytes(NamedTuple):
    """Hold bytes of slots: of all, and of those repacked and on devices; and behind slots."""

    all: int
    repacked: int
    device: int
    tier: int
    locked: int  # of the tier, page-locked


@dataclass(frozen=True, slots=True)
class StreamFunctions:
    """Hold what the native side calls, on the thread that computes or loads; see longhaul.h.

    `on_plan` takes the layer's index, the stages of the graph, and the needed and of them the
    missing experts. `on_begun` takes the index, the needed, the missing, and the slots that these
    are read to if they are nominees.
    """

    on_plan: PlanFunction
    on_begun: BegunFunction
    on_ahead: AheadFunction
    on_complete: CompleteFunction
    on_reset: ResetFunction
    on_failure: FailureFunction


@cache
def _ffi() -> Any:
    ffi = cffi.FFI()
    parts = header_text().split("// cffi: ")
    declarations = [part.partition("\n")[2] for part in parts if part.startswith("begin")]
    ffi.cdef("\n".join(declarations).replace("LH_API ", ""))
    return ffi


@cache
def _lib() -> Any:
    os.environ.update(openmp_environment())
    try:
        lib = _ffi().dlopen(str(lib_path("longhaul")))
        found = _ffi().string(lib.lh_build_id()).decode()
    except (OSError, AttributeError) as e:
        raise PatchError(f"the native library cannot be loaded: {e}; run `make build`") from e
    wanted = build_id()
    if found != wanted:
        raise PatchError(
            f"the native library is of build {found}, this package needs {wanted}; run `make build`"
        )
    return lib


@cache
def _tools_lib() -> Any:
    _lib()
    try:
        return _ffi().dlopen(str(lib_path("longhaul-tools")))
    except OSError as e:
        raise PatchError(f"llama.cpp's tools cannot be loaded: {e}; run `make build`") from e


def require_libraries(*, reads: bool = False, exact: bool = False) -> None:
    """Load the libraries for a model of which something, or nothing, will be read while it runs.

    `exact` has devices compute the same whatever a graph is cut into. Raises PatchError if they are
    missing or of another build.
    """
    os.environ.update(openmp_environment(reads=reads) | (exact_environment() if exact else {}))
    _tools_lib()


def exception_for(status: int, message: str, code: int) -> LonghaulError:
    """Return the exception that stands for a failed status; `code` is errno or 0."""
    lib = _lib()
    classes: dict[int, Callable[[], LonghaulError]] = {
        lib.LH_STATUS_INVALID_ARGUMENT: lambda: ConfigError(message),
        lib.LH_STATUS_NO_MEMORY: lambda: NativeError(message),
        lib.LH_STATUS_IO: lambda: ReadError(code or errno.EIO, message),
        lib.LH_STATUS_CALLBACK: lambda: NativeError(message),
        lib.LH_STATUS_STATE: lambda: NativeError(message),
        lib.LH_STATUS_INTERNAL: lambda: NativeError(message),
    }
    return classes[status]()


def check(status: int) -> None:
    """Raise the exception of a failed status; the only place where statuses become exceptions."""
    if status != OK:
        lib = _lib()
        message = _ffi().string(lib.lh_last_error()).decode(errors="replace")
        raise exception_for(status, message, lib.lh_last_errno())


class _Handle(Closing):
    """Own one native object."""

    def __init__(self, pointer: Any) -> None:
        self._pointer = pointer

    @property
    def pointer(self) -> Any:
        """The native object; raises NativeError once closed."""
        if self._pointer is None:
            raise NativeError(f"{type(self).__name__} is closed")
        return self._pointer


class ReadPool(_Handle):
    """Read byte ranges of files concurrently, past the page cache where the system allows it."""

    def __init__(self, n_threads: int, chunk_bytes: int) -> None:
        out = _ffi().new("lh_read_pool **")
        check(_lib().lh_read_pool_init(n_threads, chunk_bytes, out))
        super().__init__(out[0])
        self.modes: list[str] = []

    def close(self) -> None:
        """Stop the workers and close the files."""
        if self._pointer is not None:
            _lib().lh_read_pool_free(self._pointer)
            self._pointer = None

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the workers' buffers."""
        return int(_lib().lh_read_pool_buffer_bytes(self.pointer))

    def open_file(self, path: Path, uncached: bool) -> int:
        """Return the number by which reads name the file; its mode is appended to `modes`."""
        file, mode = _ffi().new("int32_t *"), _ffi().new("lh_file_mode *")
        check(_lib().lh_read_pool_open_file(self.pointer, os.fsencode(path), uncached, file, mode))
        self.modes.append(_FILE_MODES[int(mode[0])])
        return int(file[0])

    def stamp(self, file: int) -> tuple[int, int, int, int]:
        """Return device, inode, size and mtime in ns of a file as it was opened.

        Reads fail once size or mtime are others.
        """
        out = _ffi().new("lh_file_stamp *")
        check(_lib().lh_read_pool_file_stamp(self.pointer, file, out))
        return out.device % 2**64, out.inode % 2**64, out.size, out.mtime_ns

    def read(self, reads: Sequence[tuple[int, int, int]]) -> list[bytes]:
        """Return the bytes of (file, offset, size) ranges; raises ReadError if one fails."""
        ffi = _ffi()
        buffers = [ffi.new("uint8_t[]", max(size, 1)) for _, _, size in reads]
        items = ffi.new("lh_read[]", len(reads))
        for item, (file, offset, size), buffer in zip(items, reads, buffers, strict=True):
            item.file, item.offset, item.size, item.dst = file, offset, size, buffer
        check(_lib().lh_read_pool_read(self.pointer, items, len(reads)))
        return [
            bytes(ffi.buffer(buffer, size))
            for buffer, (_, _, size) in zip(buffers, reads, strict=True)
        ]


def _memory_file() -> Any:
    """Return a file in memory where the system has such, else an unnamed one."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("longhaul"), "r+b")
    return tempfile.TemporaryFile()


# A model may call back into a stream that nobody in Python refers to: it lives until closed.
_open_streams: set["Stream"] = set()


class Stream(_Handle):
    """Stand behind the slot tensors of one model; see longhaul.h."""

    def __init__(
        self,
        path_model: Path,
        shapes: Sequence[LayerShape],
        n_ubatch: int,
        pool: ReadPool,
        functions: StreamFunctions,
    ) -> None:
        """Describe a model; `n_ubatch` are the most tokens of a ubatch."""
        ffi = _ffi()
        self._shapes = tuple(shapes)
        self._callbacks = (
            self._make_on_plan(functions.on_plan),
            self._make_on_begun(functions.on_begun),
            self._make_status("lh_status(void *, int32_t, int64_t)", functions.on_ahead),
            self._make_status("lh_status(void *, int32_t, bool)", functions.on_complete),
            self._guard("void(void *)", functions.on_reset),
            self._guard("void(void *, lh_status)", self._keep_failure),
        )
        self._on_failure = functions.on_failure
        self._pool = pool  # outlives the stream
        self.error: BaseException | None = None  # what a callback raised
        tables = [
            tuple(ffi.new("int32_t[]", list(n)) for n in (shape.n_stages, shape.n_stages_device))
            for shape in shapes
        ]
        c_shapes = ffi.new(
            "lh_layer_shape[]",
            [
                (s.layer, s.n_expert, s.n_expert_used, s.n_slots, s.n_tier, s.n_locked, *both)
                for s, both in zip(shapes, tables, strict=True)
            ],
        )
        params = ffi.new("lh_stream_params *")
        path = ffi.new("char[]", os.fsencode(path_model))
        params.path_model, params.shapes, params.n_layers = path, c_shapes, len(shapes)
        params.n_ubatch = n_ubatch
        params.pool = pool.pointer
        self._live_file = _memory_file()
        os.ftruncate(self._live_file.fileno(), _lib().lh_live_bytes(c_shapes, len(shapes)))
        self._live_mapping = mmap.mmap(self._live_file.fileno(), 0)
        self._live_memory = ffi.from_buffer(self._live_mapping)
        self._live = ffi.cast("lh_live *", self._live_memory)
        params.live = self._live
        callbacks = self._callbacks
        params.on_plan, params.on_begun, params.on_ahead, params.on_complete, *rest = callbacks
        params.on_reset, params.on_failure = rest
        out = ffi.new("lh_stream **")
        check(_lib().lh_stream_init(params, out))
        super().__init__(out[0])
        _open_streams.add(self)

    def _make_on_plan(self, on_plan: PlanFunction) -> Any:
        unpack = _ffi().unpack

        def plan(r: Any) -> None:
            needed = unpack(r.needed, r.n_needed)
            on_plan(r.layer_index, r.n_stages, needed, unpack(r.missing, r.n_missing))

        return self._make_status("lh_status(void *, const lh_request *)", plan, is_cause=True)

    def _make_on_begun(self, on_begun: BegunFunction) -> Any:
        ffi = _ffi()
        unpack, null = ffi.unpack, ffi.NULL

        def begun(r: Any, slots: Any) -> None:
            n_missing = r.n_missing
            on_begun(
                r.layer_index,
                unpack(r.needed, r.n_needed),
                unpack(r.missing, n_missing),
                None if slots == null else unpack(slots, n_missing),
            )

        signature = "lh_status(void *, const lh_request *, const int32_t *)"
        return self._make_status(signature, begun, is_cause=True)

    def _make_status(
        self, signature: str, function: Callable[..., None], *, is_cause: bool = False
    ) -> Any:
        """Return a callback; `is_cause` says that nothing can have failed in the ubatch before."""
        failed = int(_lib().LH_STATUS_CALLBACK)

        def call(user_data: Any, *args: Any) -> int:
            try:
                function(*args)
            except BaseException as e:  # kept: raised again where the outer call returns
                self.error = e if is_cause else self.error or e
                return failed
            return OK

        return _ffi().callback(signature, call, error=failed, onerror=self._keep_outside)

    def _keep_failure(self, status: int) -> None:
        """Keep why a ubatch fails: what a callback raised, or the native side's own reason."""
        if status != _lib().LH_STATUS_CALLBACK or self.error is None:
            message = _ffi().string(_lib().lh_last_error()).decode(errors="replace")
            self.error = exception_for(status, message, _lib().lh_last_errno())
        self._on_failure(self.error)

    def _guard(self, signature: str, function: Callable[..., None]) -> Any:
        def call(user_data: Any, *args: Any) -> None:
            try:
                function(*args)
            except BaseException as e:
                self.error = e

        return _ffi().callback(signature, call, onerror=self._keep_outside)

    def _keep_outside(self, kind: type[BaseException], error: BaseException, trace: Any) -> None:
        """Keep what was raised before a callback's own try: a Ctrl-C can come at any point."""
        self.error = self.error or error

    def close(self) -> None:
        """Free the stream; raises NativeError while a loaded model uses it."""
        if self._pointer is not None:
            check(_lib().lh_stream_free(self._pointer))
            self._pointer = None
            _ffi().release(self._live_memory)
            self._live_mapping.close()
            self._live_file.close()
            _open_streams.discard(self)

    @property
    def _open_live(self) -> Any:
        """The memory that is shared; raises NativeError once closed, when it is gone."""
        assert self.pointer
        return self._live

    def add_tensor(
        self, name: str, layer_index: int, file: int, offset: int, slice_bytes: int
    ) -> None:
        """Add a routed tensor: expert e lies at offset + e * slice_bytes of the file."""
        check(
            _lib().lh_stream_add_tensor(
                self.pointer, name.encode(), layer_index, file, offset, slice_bytes
            )
        )

    def plan_device(self, name: str, device: str, later_bytes: int) -> None:
        """Say where a routed tensor's slots are to be, and what that device is to hold beside."""
        check(
            _lib().lh_stream_plan_device(self.pointer, name.encode(), device.encode(), later_bytes)
        )

    def device(self, name: str) -> str:
        """Return the device that the last load put a routed tensor on, "" where there was none."""
        out = _ffi().new("const char **")
        check(_lib().lh_stream_device(self.pointer, name.encode(), out))
        return str(_ffi().string(out[0]).decode(errors="replace"))

    def set_active(self, active: bool) -> None:
        """Stream models that are loaded from now on, or load them whole."""
        check(_lib().lh_stream_set_active(self.pointer, active))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Have no ubatch run meanwhile, so that slot tables may change; waits for its end."""
        lib, pointer = _lib(), self.pointer
        lib.lh_stream_pause(pointer)
        try:
            yield
        finally:
            lib.lh_stream_resume(pointer)

    def give_back(self) -> int:
        """Give the memory of free slots back to the system, while paused; return its bytes."""
        n_bytes = _ffi().new("int64_t *")
        check(_lib().lh_stream_give_back(self.pointer, n_bytes))
        return int(n_bytes[0])

    def _table(self, layer_index: int) -> Any:
        table = _ffi().new("lh_slot_table *")
        check(_lib().lh_stream_slot_table(self.pointer, layer_index, table))
        return table

    def slot_table(self, layer_index: int) -> tuple[Any, Any, Any]:
        """Return slot_of (n_expert,), expert_of (n_slots,) and last_use (n_slots,).

        They are the native side's own memory, valid until `close`.
        """
        ffi = _ffi()
        table = self._table(layer_index)
        shape = self._shapes[layer_index]
        n_expert, n_slots = shape.n_expert, shape.n_slots
        return (
            ffi.cast(f"int32_t (*)[{n_expert}]", table.slot_of)[0],
            ffi.cast(f"int32_t (*)[{n_slots}]", table.expert_of)[0],
            ffi.cast(f"int64_t (*)[{n_slots}]", table.last_use)[0],
        )

    def n_uses(self, layer_index: int) -> Any:
        """Return how many ubatches have used each slot (n_slots,), the native side's own memory."""
        ffi = _ffi()
        table = self._table(layer_index)
        return ffi.cast(f"int64_t (*)[{self._shapes[layer_index].n_slots}]", table.n_uses)[0]

    def n_needed(self, layer_index: int) -> list[int]:
        """Return how many decoded ubatches have needed each expert (n_expert,)."""
        ffi = _ffi()
        table = self._table(layer_index)
        return ffi.unpack(table.n_needed, self._shapes[layer_index].n_expert)

    @property
    def is_ready(self) -> bool:
        """Whether a context of the loaded model has been made."""
        return bool(_lib().lh_stream_is_ready(self.pointer))

    @property
    def is_computing(self) -> bool:
        """Whether a ubatch is running."""
        return bool(_lib().lh_stream_phase(self.pointer) != _lib().LH_N_PHASES)

    def fill(self, layer_index: int, loads: Sequence[Load]) -> None:
        """Read experts into free slots, while paused; raises ReadError."""
        items = _ffi().new("lh_load[]", loads)
        check(_lib().lh_stream_fill(self.pointer, layer_index, items, len(loads)))

    def record(self, file: int | None) -> None:
        """Write what each layer of each ubatch needs to a file from now on; None: no longer.

        Raises ReadError if something could not be written since the last call.
        """
        check(_lib().lh_stream_record(self.pointer, -1 if file is None else file))

    def load(self, layer_index: int, loads: Sequence[Load]) -> None:
        """Have all that is missing read into slots. Only in on_plan."""
        items = _ffi().new("lh_load[]", loads)
        check(_lib().lh_stream_load(self.pointer, layer_index, items, len(loads)))

    def load_ahead(self, layer_index: int, loads: Sequence[Load]) -> None:
        """Start to read experts into free slots. Only in on_ahead."""
        items = _ffi().new("lh_load[]", loads)
        check(_lib().lh_stream_load_ahead(self.pointer, layer_index, items, len(loads)))

    def nominate(self, layer_index: int, slots: Sequence[int]) -> None:
        """Name the slots that the layer's next misses take, the first one first.

        Only in a callback, or while paused.
        """
        items = _ffi().new("int32_t[]", slots)
        check(_lib().lh_stream_nominate(self.pointer, layer_index, items, len(slots)))

    def set_stages(
        self, layer_index: int, places: Sequence[tuple[int, int, int, bool, int, bool, int]]
    ) -> None:
        """Say where every needed expert is computed. Only in on_plan.

        A place is stage, expert, slot, whether it is a load, and then the rest of a `Load`.
        """
        items = _ffi().new("lh_place[]", places)
        check(_lib().lh_stream_set_stages(self.pointer, layer_index, items, len(places)))

    def count_evictions(self, n: int) -> None:
        """Add to the evictions of the running phase."""
        self._open_live.counters[_lib().lh_stream_phase(self.pointer)].n_evictions += n

    def stats(self) -> Stats:
        """Return a copy of the counters."""
        return Stats(*(_counters(self._open_live.counters[phase]) for phase in range(2)))

    def records(self) -> list[Record]:
        """Return what each of the last ubatches did, as many as are kept, the last one last."""
        n_kept = _lib().LH_N_RECORDS
        n_written = self._open_live.n_records
        found = []
        for i in range(max(n_written - n_kept, 0), n_written):
            record = self._open_live.records[i % n_kept]
            is_prefill = record.phase == _lib().LH_PHASE_PREFILL
            found.append(Record(record.end_us / 1e6, is_prefill, _counters(record.counters)))
        return found

    @property
    def live_file(self) -> int:
        """The file behind lh_live, which another process may map, until `close`."""
        return self._live_file.fileno()

    def live_layout(self) -> dict[str, Any]:
        """Return offsets in lh_live, for a reader that has no header: names and numbers only."""
        ffi, lib = _ffi(), _lib()
        offset, size = ffi.offsetof, ffi.sizeof
        numbers = (*(f"{name}_bytes" for name in _SIZES), "n_records", "n_replies")

        def ring(name: str, item: str, n_kept: int) -> dict[str, int]:
            return {"offset": offset("lh_live", name), "item_bytes": size(item), "n_kept": n_kept}

        return {
            "n_bytes": len(self._live_memory),
            "numbers": {name: offset("lh_live", name) for name in numbers},
            "counters": offset("lh_live", "counters"),
            "counter_names": [name for name, _ in ffi.typeof("lh_counters").fields],
            "records": ring("records", "lh_record", lib.LH_N_RECORDS),
            "replies": ring("replies", "lh_reply", lib.LH_N_REPLIES),
            "reply_names": [name for name, _ in ffi.typeof("lh_reply").fields],
        }

    def table_offsets(self, layer_index: int) -> dict[str, int]:
        """Return where a layer's slot table lies in lh_live."""
        table = self._table(layer_index)
        base = int(_ffi().cast("uintptr_t", self._live))
        return {
            name: int(_ffi().cast("uintptr_t", getattr(table, name))) - base
            for name in ("slot_of", "expert_of", "last_use")
        }

    def slot_bytes(self) -> SlotBytes:
        """Return the bytes of the last model's slots and of what is behind them."""
        live = self._open_live
        return SlotBytes(*(int(getattr(live, f"{name}_bytes")) for name in _SIZES))


def _counters(c: Any) -> Counters:
    return Counters(
        n_ubatches=c.n_ubatches,
        n_tokens=c.n_tokens,
        n_hits=c.n_hits,
        n_misses=c.n_misses,
        n_tier_hits=c.n_tier_hits,
        n_evictions=c.n_evictions,
        read_bytes=c.read_bytes,
        compute_s=c.compute_us / 1e6,
        wait_s=c.wait_us / 1e6,
        plan_s=c.plan_us / 1e6,
        read_s=c.read_us / 1e6,
        repack_s=c.repack_us / 1e6,
        disk_s=c.disk_us / 1e6,
        n_errors=c.n_errors,
    )


PrepareFunction = Callable[[Path, str | None, int, int], None]


@contextmanager
def preparing(prepare: PrepareFunction) -> Iterator[None]:
    """Have a tool tell before it loads a model: path, cache or None for whole, n_ctx, n_ubatch.

    Whatever the function raises is why the tool cannot.
    """
    ffi, lib = _ffi(), _lib()
    kept: list[Any] = []  # the text has to live on

    def call(user_data: Any, path: Any, cache: Any, n_ctx: int, n_ubatch: int, error: Any) -> int:
        try:
            text = ffi.string(cache).decode() if cache else None
            prepare(Path(os.fsdecode(ffi.string(path))), text, n_ctx, n_ubatch)
        except Exception as e:  # whatever it is, the tool says it
            kept[:] = [ffi.new("char[]", str(e).encode())]
            error[0] = kept[0]
            return int(lib.LH_STATUS_CALLBACK)
        return OK

    signature = "lh_status(void *, const char *, const char *, uint32_t, uint32_t, const char **)"
    callback = ffi.callback(signature, call, error=int(lib.LH_STATUS_CALLBACK))
    lib.lh_set_prepare(callback, ffi.NULL)
    try:
        yield
    finally:
        lib.lh_set_prepare(ffi.NULL, ffi.NULL)


def add_worker(endpoint: str) -> None:
    """Make the devices of another machine, HOST:PORT, known; raises NativeError if none answers."""
    check(_lib().lh_add_worker(endpoint.encode()))


def run_tool(name: str, program: str, args: Sequence[str]) -> int:
    """Run one of llama.cpp's tools in this process and return its exit code."""
    ffi, lib = _ffi(), _tools_lib()
    words = [ffi.new("char[]", os.fsencode(word)) for word in (program, *args)]
    argv = ffi.new("char *[]", [*words, ffi.NULL])
    code = ffi.new("int32_t *")
    check(lib.lh_tool_run(name.encode(), len(words), argv, code))
    return int(code[0])


MOST_DEVICES = 64
Found = tuple[str, str, bool, int, int, int, int, int, int, int]


def place_tool(name: str, args: Sequence[str]) -> tuple[list[Found], int, list[str]]:
    """Return what a tool would put where, the KV cells, and the words that make it do just that.

    The devices, the host last, are as lh_device_memory has them, in its order. A bad option may end
    the process. Raises ConfigError or NativeError.
    """
    ffi, lib = _ffi(), _tools_lib()
    words = [ffi.new("char[]", os.fsencode(word)) for word in (name, *args)]
    argv = ffi.new("char *[]", [*words, ffi.NULL])
    devices = ffi.new("lh_device_memory[]", MOST_DEVICES)
    n_devices, n_ctx = ffi.new("int32_t *"), ffi.new("uint32_t *")
    text = ffi.new("const char **")
    check(
        lib.lh_tool_place(
            name.encode(), len(words), argv, devices, MOST_DEVICES, n_devices, n_ctx, text
        )
    )
    found = [
        (
            ffi.string(device.name).decode(errors="replace"),
            ffi.string(device.description).decode(errors="replace"),
            bool(device.is_host),
            int(device.total_bytes),
            int(device.free_bytes),
            int(device.model_bytes),
            int(device.context_bytes),
            int(device.compute_bytes),
            int(device.other_bytes),
            int(device.margin_bytes),
        )
        for device in devices[0 : n_devices[0]]
    ]
    return found, int(n_ctx[0]), os.fsdecode(ffi.string(text[0])).splitlines()
