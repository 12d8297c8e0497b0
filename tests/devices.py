"""Workers on this machine, and connections to them that break when a test says so."""

import ctypes
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
from commands import TIMEOUT_S, Running
from servers import free_port

from longhaul import llama
from longhaul.library import lib_path

DEVICE_VARIABLE = "LONGHAUL_TEST_DEVICE"  # tests run on this one, Vulkan0 say, instead of workers


@contextmanager
def worker(port: int = 0) -> Iterator[str]:
    """Have a worker run; yield HOST:PORT."""
    port = port or free_port()
    words = ("rpc-server", "--host", "127.0.0.1", "--port", str(port), "--threads", "1")
    with Running("longhaul", *words) as running:
        _wait_for(port, running)
        yield f"127.0.0.1:{port}"


def _wait_for(port: int, running: Running) -> None:
    end = time.monotonic() + TIMEOUT_S
    while time.monotonic() < end:
        assert running.is_alive(), running.end().err
        with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.05)
    raise TimeoutError("the worker does not listen")


@contextmanager
def devices(count: int) -> Iterator[tuple[str, ...]]:
    """Yield the names of devices to compute on; skips where there are not so many."""
    chosen = os.environ.get(DEVICE_VARIABLE)
    if chosen is not None:
        names = tuple(chosen.split(","))
        there = [device.name for device in llama.devices()]
        missing = [name for name in names if name not in there]
        if missing or len(names) < count:
            pytest.skip(f"{DEVICE_VARIABLE}={chosen}: {count} wanted, there are {there}")
        yield names[:count]
        return
    with worker() as first, worker() as second:
        found = [llama.add_rpc_server(endpoint) for endpoint in (first, second)[:count]]
        try:
            yield tuple(of_one[0].name for of_one in found)
        finally:
            forget_workers()


def skips_rows(device: str) -> bool:
    """Ask ggml whether the worker of a device passes over rows of other stages."""
    base, registry = (ctypes.CDLL(str(lib_path(name))) for name in ("ggml-base", "ggml"))
    handle = ctypes.c_void_p
    registry.ggml_backend_dev_by_name.restype = handle
    registry.ggml_backend_dev_by_name.argtypes = [ctypes.c_char_p]
    base.ggml_backend_dev_backend_reg.restype = handle
    base.ggml_backend_dev_backend_reg.argtypes = [handle]
    base.ggml_backend_reg_get_proc_address.restype = handle
    base.ggml_backend_reg_get_proc_address.argtypes = [handle, ctypes.c_char_p]
    found = registry.ggml_backend_dev_by_name(device.encode())
    name = b"ggml_backend_rpc_dev_skips_rows"
    function = base.ggml_backend_reg_get_proc_address(
        base.ggml_backend_dev_backend_reg(found), name
    )
    return bool(ctypes.CFUNCTYPE(ctypes.c_bool, handle)(function)(found))


def forget_workers() -> None:
    """Have ggml know of no workers any longer: models of other tests would be loaded with them."""
    libraries = (ctypes.CDLL(str(lib_path(name))) for name in ("ggml-base", "ggml", "ggml-rpc"))
    base, registry, rpc = libraries
    handle = ctypes.c_void_p
    registry.ggml_backend_reg_count.restype = ctypes.c_size_t
    registry.ggml_backend_reg_get.restype = handle
    registry.ggml_backend_reg_get.argtypes = [ctypes.c_size_t]
    registry.ggml_backend_unload.argtypes = [handle]
    base.ggml_backend_reg_name.restype = ctypes.c_char_p
    base.ggml_backend_reg_name.argtypes = [handle]
    found = [registry.ggml_backend_reg_get(i) for i in range(registry.ggml_backend_reg_count())]
    for backend in found:
        if base.ggml_backend_reg_name(backend).startswith(b"RPC"):
            registry.ggml_backend_unload(backend)  # and the devices of all workers with it
    rpc.ggml_backend_rpc_reg.restype = handle
    registry.ggml_backend_register.argtypes = [handle]
    registry.ggml_backend_register(rpc.ggml_backend_rpc_reg())


def _shut(*sockets: socket.socket) -> None:
    for one in sockets:
        with suppress(OSError):  # it is shut already
            one.shutdown(socket.SHUT_RDWR)


def _without_skipping(source: socket.socket) -> bytes:
    """Receive the worker's greeting: eight bytes of size, three of version, and what it skips."""
    greeting = bytearray()
    while len(greeting) < 12:
        data = source.recv(12 - len(greeting))
        if not data:
            break
        greeting += data
    greeting[11:12] = b"\0"
    return bytes(greeting)


class Line:
    """A connection to a worker, which can be cut, at once or after so many bytes towards it."""

    def __init__(
        self, endpoint: str, n_connections: int = 1_000_000, *, hides_skipping: bool = False
    ) -> None:
        """Listen; after `n_connections` nobody is let through any longer.

        With `hides_skipping` the worker seems to be one that computes all rows.
        """
        self._hides_skipping = hides_skipping
        host, port = endpoint.split(":")
        self._worker = (host, int(port))
        self._n_left = n_connections
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._limit: int | None = None
        self.n_sent = 0  # bytes towards the worker
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._start(self._accept)

    def _start(self, target: Callable[..., None], *args: object) -> None:
        self._threads.append(threading.Thread(target=target, args=args, daemon=True))
        self._threads[-1].start()

    def _accept(self) -> None:
        with suppress(OSError):
            while self._n_left > 0:
                near, _ = self._listener.accept()
                self._n_left -= 1
                far = socket.create_connection(self._worker)
                for one in (near, far):
                    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                with self._lock:
                    self._sockets += [near, far]
                self._start(self._pass_on, near, far, True)
                self._start(self._pass_on, far, near, False)
        self._listener.close()

    def _pass_on(self, source: socket.socket, target: socket.socket, counts: bool) -> None:
        with suppress(OSError):
            if self._hides_skipping and not counts:
                target.sendall(_without_skipping(source))
            while data := source.recv(1 << 16):
                if counts:
                    self.n_sent += len(data)
                    if self._limit is not None and self.n_sent >= self._limit:
                        self.cut()
                        return
                target.sendall(data)
        _shut(source, target)

    def cut_after(self, n_bytes: int) -> None:
        """Cut once so many more bytes have been sent towards the worker."""
        self._limit = self.n_sent + n_bytes

    def cut(self) -> None:
        """Break what is connected."""
        self._limit = None
        with self._lock:
            _shut(*self._sockets)

    def close(self) -> None:
        """Let nobody through any longer; twice is harmless."""
        self._n_left = 0
        _shut(self._listener)
        self.cut()
        for thread in self._threads:
            thread.join()
        for one in self._sockets:
            one.close()

    def __enter__(self) -> "Line":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
