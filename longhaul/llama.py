"""Wraps llama_cpp: models and contexts, loaded from our libraries. The only importer of llama_cpp.

Arrays are numpy, tokens first: logits (n_tokens, n_vocab).
"""

import ctypes
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .closing import Closing
from .errors import ConfigError, DecodeError, ModelError, NativeError
from .library import exact_environment, lib_dir, lib_path, openmp_environment

os.environ.update(openmp_environment() | exact_environment())
os.environ["LLAMA_CPP_LIB_PATH"] = str(lib_dir())  # before the import: the bindings load from there

import llama_cpp

CPU_DEVICE = 0  # GGML_BACKEND_DEVICE_TYPE_CPU

logger = logging.getLogger(__name__)
_LEVELS = {1: logging.DEBUG, 2: logging.INFO, 3: logging.WARNING, 4: logging.ERROR}


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def _log(level: int, text: bytes, user_data: Any) -> None:
    message = text.decode(errors="replace").rstrip("\n")
    if message:
        logger.log(_LEVELS.get(level, logging.DEBUG), "%s", message)


def route_log() -> None:
    """Send llama.cpp's log to this module's logger from now on."""
    llama_cpp.llama_log_set(_log, ctypes.c_void_p(0))


@dataclass(frozen=True, slots=True)
class Device:
    """Name something that computes, and its memory where it has some of its own."""

    name: str
    description: str  # of another machine's: its address
    free_bytes: int  # 0 for a CPU, whose memory the system knows better
    total_bytes: int


def devices() -> list[Device]:
    """Return what ggml can compute on; raises PatchError if its libraries are not built."""
    base, registry = (ctypes.CDLL(str(lib_path(name))) for name in ("ggml-base", "ggml"))
    registry.ggml_backend_dev_count.restype = ctypes.c_size_t
    registry.ggml_backend_dev_get.restype = ctypes.c_void_p
    registry.ggml_backend_dev_get.argtypes = [ctypes.c_size_t]
    for name in ("ggml_backend_dev_name", "ggml_backend_dev_description"):
        getattr(base, name).restype = ctypes.c_char_p
        getattr(base, name).argtypes = [ctypes.c_void_p]
    size = ctypes.POINTER(ctypes.c_size_t)
    base.ggml_backend_dev_memory.argtypes = [ctypes.c_void_p, size, size]
    base.ggml_backend_dev_type.argtypes = [ctypes.c_void_p]
    found = []
    for index in range(registry.ggml_backend_dev_count()):
        device = registry.ggml_backend_dev_get(index)
        free, total = ctypes.c_size_t(0), ctypes.c_size_t(0)
        if base.ggml_backend_dev_type(device) != CPU_DEVICE:
            base.ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
        texts = [
            getattr(base, name)(device).decode(errors="replace")
            for name in ("ggml_backend_dev_name", "ggml_backend_dev_description")
        ]
        found.append(Device(texts[0], texts[1], free.value, total.value))
    return found


def add_rpc_server(endpoint: str) -> list[Device]:
    """Make the devices of a worker (`longhaul rpc-server`), HOST:PORT, known, and return them.

    Raises NativeError if it cannot be reached.
    """
    native = ctypes.CDLL(str(lib_path("longhaul")))
    native.lh_last_error.restype = ctypes.c_char_p
    if native.lh_add_worker(endpoint.encode()) != 0:
        raise NativeError(native.lh_last_error().decode(errors="replace"))
    return [device for device in devices() if device.description == endpoint]


def _device_handles(names: Sequence[str]) -> Any:
    """Return an array of ggml devices that ends with a null; raises ConfigError without one."""
    registry = ctypes.CDLL(str(lib_path("ggml")))
    registry.ggml_backend_dev_by_name.restype = ctypes.c_void_p
    registry.ggml_backend_dev_by_name.argtypes = [ctypes.c_char_p]
    handles = [registry.ggml_backend_dev_by_name(name.encode()) for name in names]
    for name, handle in zip(names, handles, strict=True):
        if not handle:
            known = ", ".join(device.name for device in devices())
            raise ConfigError(f"no device {name!r}; there are {known}")
    return (ctypes.c_void_p * (len(names) + 1))(*handles, None)


class _Override(ctypes.Structure):
    """llama_model_tensor_buft_override."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p))


def _override_table(overrides: Mapping[str, str]) -> Any:
    """Return an array of buffer types by pattern that ends with a null; raises ConfigError."""
    base, registry = (ctypes.CDLL(str(lib_path(name))) for name in ("ggml-base", "ggml"))
    registry.ggml_backend_dev_get.restype = ctypes.c_void_p
    registry.ggml_backend_dev_get.argtypes = [ctypes.c_size_t]
    base.ggml_backend_dev_buffer_type.restype = ctypes.c_void_p
    base.ggml_backend_dev_buffer_type.argtypes = [ctypes.c_void_p]
    base.ggml_backend_buft_name.restype = ctypes.c_char_p
    base.ggml_backend_buft_name.argtypes = [ctypes.c_void_p]
    found: dict[str, int] = {}
    for index in range(registry.ggml_backend_dev_count()):
        buffer_type = base.ggml_backend_dev_buffer_type(registry.ggml_backend_dev_get(index))
        found[base.ggml_backend_buft_name(buffer_type).decode()] = buffer_type
    table = (_Override * (len(overrides) + 1))()
    for entry, (pattern, name) in zip(table, overrides.items(), strict=False):
        if name not in found:
            raise ConfigError(f"no buffer type {name!r}; there are {', '.join(found)}")
        entry.pattern, entry.buffer_type = pattern.encode(), found[name]
    return table


class Model(Closing):
    """Hold a loaded model; close it to free the memory."""

    def __init__(
        self,
        path: Path,
        *,
        n_gpu_layers: int = 0,
        use_mmap: bool = True,
        repack: bool = True,
        devices: Sequence[str] = (),
        tensor_split: Sequence[float] = (),
        tensor_overrides: Mapping[str, str] | None = None,
    ) -> None:
        """Load a GGUF; raises ModelError if llama.cpp refuses it.

        `devices` are the names of those that get layers, all that there are if it is empty;
        `tensor_split` says in which proportion, by free memory if it is empty. `tensor_overrides`
        are buffer types by a pattern of tensor names, as --override-tensor has them.
        """
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = n_gpu_layers
        params.load_mode = (
            llama_cpp.LLAMA_LOAD_MODE_MMAP if use_mmap else llama_cpp.LLAMA_LOAD_MODE_NONE
        )
        params.use_extra_bufts = repack
        if devices:
            handles = _device_handles(devices)
            params.devices = ctypes.cast(handles, ctypes.c_void_p)
        if tensor_split:
            shares = (ctypes.c_float * llama_cpp.llama_max_devices())(*tensor_split)
            params.tensor_split = ctypes.cast(shares, ctypes.POINTER(ctypes.c_float))
        if tensor_overrides:
            overrides = _override_table(tensor_overrides)
            params.tensor_buft_overrides = ctypes.cast(overrides, ctypes.c_void_p)
        self._model = llama_cpp.llama_model_load_from_file(os.fsencode(path), params)
        if not self._model:
            raise ModelError(f"llama.cpp cannot load {path}; its log says why")
        self.n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))

    @property
    def handle(self) -> Any:
        """The llama_model pointer."""
        return self._model

    def close(self) -> None:
        """Free the model; twice is harmless."""
        if self._model:
            llama_cpp.llama_model_free(self._model)
            self._model = None


class Context(Closing):
    """Hold a context of a model: KV cache and compute buffers."""

    def __init__(
        self,
        model: Model,
        *,
        n_ctx: int = 512,
        n_ubatch: int = 512,
        n_threads: int = 2,
        n_seq_max: int = 1,
        op_offload: bool = True,
    ) -> None:
        """Create a context; raises ModelError if llama.cpp refuses.

        With `op_offload` large batches are computed on a device also where the weights are not;
        never those of streamed experts, nor anything else of a model that has them.
        """
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = n_ctx
        params.n_batch = n_ctx
        params.n_ubatch = n_ubatch
        params.n_seq_max = n_seq_max
        params.n_threads = n_threads
        params.n_threads_batch = n_threads
        params.op_offload = op_offload
        self._model = model
        self._context = llama_cpp.llama_init_from_model(model.handle, params)
        if not self._context:
            raise ModelError("llama.cpp cannot create a context; its log says why")
        self.n_past = 0

    @property
    def n_ubatch(self) -> int:
        """The effective ubatch size."""
        return int(llama_cpp.llama_n_ubatch(self._context))

    def warm_up(self) -> None:
        """Do what llama.cpp's tools do before the first prompt: a decode that uses every expert."""
        llama_cpp.llama_set_warmup(self._context, True)
        batch = llama_cpp.llama_batch_get_one((ctypes.c_int32 * 1)(0), 1)
        code = llama_cpp.llama_decode(self._context, batch)
        llama_cpp.llama_set_warmup(self._context, False)
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        if code != 0:
            raise DecodeError(f"llama_decode returned {code} while warming up")

    def decode(self, tokens: Sequence[int], *, last_only: bool = False) -> np.ndarray:
        """Evaluate tokens after those before and return their logits, float32 (n_tokens, n_vocab).

        Of the last one alone if asked: (1, n_vocab).

        Raises DecodeError if llama.cpp reports a failure; the tokens then count as not evaluated,
        and where the memory is recurrent, those before them are forgotten as well.
        """
        batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
        try:
            for i, token in enumerate(tokens):
                batch.token[i] = token
                batch.pos[i] = self.n_past + i
                batch.n_seq_id[i] = 1
                batch.seq_id[i][0] = 0
                batch.logits[i] = not last_only or i == len(tokens) - 1
            batch.n_tokens = len(tokens)
            code = llama_cpp.llama_decode(self._context, batch)
        finally:
            llama_cpp.llama_batch_free(batch)
        if code != 0:
            position = self.n_past
            kept = "" if self.remove_from(position) else "; the context had to be cleared"
            raise DecodeError(f"llama_decode returned {code} at position {position}{kept}")
        logits = llama_cpp.llama_get_logits(self._context)
        shape = (1 if last_only else len(tokens), self._model.n_vocab)
        self.n_past += len(tokens)
        return np.ctypeslib.as_array(logits, shape=shape).copy()

    def remove_from(self, position: int) -> bool:
        """Forget the tokens from a position on.

        A recurrent memory cannot: it then forgets everything, and the answer is False.
        """
        memory = llama_cpp.llama_get_memory(self._context)
        if llama_cpp.llama_memory_seq_rm(memory, 0, position, -1):
            self.n_past = position
            return True
        llama_cpp.llama_memory_clear(memory, True)
        self.n_past = 0
        return False

    def close(self) -> None:
        """Free the context; twice is harmless."""
        if self._context:
            llama_cpp.llama_free(self._context)
            self._context = None
