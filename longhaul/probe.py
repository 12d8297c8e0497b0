"""Asks llama.cpp, in a process of its own, where it would put a model, before anything is planned.

Of its own because its tools end the process over a bad option, and keep workers connected and
devices open. Nothing is asked where there is no device but the CPU.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from . import native
from .arguments import option
from .budget import one_slot
from .config import Config
from .engine import Engine
from .errors import PatchError
from .index import read_index
from .launch import cut_placed_context, known_limit
from .library import has_device_backend
from .pools import CPU, DeviceMemory, Placement

SCRIPT = "from longhaul.probe import main; main()"
TIMEOUT_S = 300  # of a model's header over a slow network
_PACKAGES = Path(__file__).resolve().parent.parent


def may_have_devices(args: Sequence[str], env: Mapping[str, str] = os.environ) -> bool:
    """Say whether there may be something but the CPU: a backend that was built, or RPC workers."""
    if option(args, ("--rpc",), env, "LLAMA_ARG_RPC") is not None:
        return True
    try:
        return has_device_backend()
    except PatchError:  # told where the libraries are needed
        return False


def placed(
    tool: str, args: Sequence[str], model: Path, config: Config, *, may_cut_context: bool
) -> Placement | None:
    """Return where a tool will put a model, None where that is RAM alone, or cannot be told.

    A context that nobody asked for may be cut.
    """
    if not may_have_devices(args):
        return None
    placement = probe(tool, args, model)
    limit = known_limit(config)
    if placement is None or not may_cut_context or limit is None:
        return placement
    n_ctx = cut_placed_context(placement, limit)
    if not n_ctx:
        return placement
    cut = probe(tool, [*args, "--ctx-size", str(n_ctx)], model)
    return replace(cut, n_ctx_cut=n_ctx) if cut else None


def probe(tool: str, args: Sequence[str], model: Path) -> Placement | None:
    """Return where a tool would put a model, None where it cannot or where that is RAM alone.

    Why it cannot is left to the tool, which fails over the same thing in its own words.
    """
    reading, writing = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[writing],
            env=os.environ | {"PYTHONPATH": _python_path()},
            text=True,
        )
    except OSError:
        os.close(reading)
        os.close(writing)
        return None
    os.close(writing)
    question = {"tool": tool, "args": list(args), "model": str(model), "fd": writing}
    try:
        assert process.stdin
        with suppress(OSError):
            process.stdin.write(json.dumps(question))
            process.stdin.close()
        with os.fdopen(reading, encoding="utf-8") as answer:
            text = answer.read()
        process.wait(TIMEOUT_S)
    except BaseException:
        process.kill()
        process.wait()
        raise
    return read_answer(text)


def read_answer(text: str) -> Placement | None:
    """Return the placement that a process found; None without one, or where it is RAM alone."""
    try:
        found = json.loads(text)
    except ValueError:
        return None
    *devices, host = (DeviceMemory(**device) for device in found["devices"])
    placement = Placement(
        tuple(devices), host, found["device_of"], found["n_ctx"], tuple(found["args"])
    )
    return None if placement.is_host_only else placement


def _python_path() -> str:
    before = os.environ.get("PYTHONPATH")
    return os.pathsep.join([str(_PACKAGES), *([before] if before else [])])


def place(tool: str, args: Sequence[str], path: Path) -> dict[str, object]:
    """Find out where a tool would put a model: devices with the host last, and each tensor's.

    In a process that may end over it. Raises LonghaulError.
    """
    model = read_index(path)
    with Engine(model, [one_slot(layer) for layer in model.layers], Config()) as engine:
        found, n_ctx, words = native.place_tool(tool, args)
        device_of = engine.devices()
    devices = {
        name: DeviceMemory(name, description, is_host, *sizes)
        for name, description, is_host, *sizes in found
    }
    host = next(reversed(devices))
    for layer in model.layers:
        for tensor in layer.tensors:
            name = host if device_of[tensor.name] == CPU else device_of[tensor.name]
            if name in devices:
                device = devices[name]
                left_bytes = max(device.model_bytes - tensor.slice_bytes, 0)
                devices[name] = replace(device, model_bytes=left_bytes)
    return {
        "devices": [asdict(device) for device in devices.values()],
        "device_of": device_of,
        "n_ctx": n_ctx,
        "args": words,
    }


def main() -> None:
    """Answer the question on stdin."""
    question = json.load(sys.stdin)
    answer = place(question["tool"], question["args"], Path(question["model"]))
    with os.fdopen(question["fd"], "w", encoding="utf-8") as out:
        json.dump(answer, out)
