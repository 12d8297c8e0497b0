"""Asks llama.cpp, in a process of its own, where it would put a model, before anything is planned.

Of its own because its tools end the process over a bad option, and keep workers connected and
devices open. Nothing is asked where there is no device but the CPU.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from . import native
from .arguments import option
from .budget import one_slot
from .config import Config
from .engine import Engine
from .errors import ConfigError, PatchError
from .index import read_index
from .launch import cut_placed_context, known_limit
from .library import has_device_backend
from .machine import peak_rss_bytes
from .pools import CPU, DeviceMemory, Placement

# without the working folder, whose files would stand in for modules
SCRIPT = "import sys; sys.path[:] = filter(None, sys.path); from longhaul.probe import main; main()"
TIMEOUT_S = 60  # a worker that serves somebody else does not answer
_PACKAGES = Path(__file__).resolve().parent.parent


def may_have_devices(args: Sequence[str], env: Mapping[str, str] = os.environ) -> bool:
    """Say whether there may be something but the CPU: a backend that was built, or RPC workers."""
    if option(args, ("--rpc", "-rpc"), env, "LLAMA_ARG_RPC") is not None:
        return True
    try:
        return has_device_backend()
    except PatchError:  # told where the libraries are needed
        return False


def placed(
    tool: str,
    args: Sequence[str],
    model: Path,
    config: Config,
    tell: Callable[[str], None],
    *,
    may_cut_context: bool,
) -> Placement | None:
    """Return where a tool will put a model, None where that is RAM alone, or cannot be told.

    A context that nobody asked for may be cut.
    """
    if not may_have_devices(args):
        return None
    placement = probe(tool, args, model)
    limit = known_limit(config)
    if placement and not placement.is_host_only and may_cut_context and limit:
        n_ctx = cut_placed_context(placement, limit)
        if n_ctx:
            cut = probe(tool, [*args, "--ctx-size", str(n_ctx)], model)
            placement = replace(cut, n_ctx_cut=n_ctx) if cut else None
    if placement is None and (config.cache_by_device or config.ram_bytes):
        raise ConfigError(
            "llama.cpp does not say what it would put on devices, so that neither sizes by device"
            " nor --longhaul-ram can be planned; leave them out to see what it says"
        )
    if placement is None:
        tell("warning devices are not in this plan: llama.cpp does not say what it puts there")
    return placement if placement and not placement.is_host_only else None


def probe(tool: str, args: Sequence[str], model: Path) -> Placement | None:
    """Return where a tool would put a model, None where it does not come to that.

    Why not is left to the tool, which fails over the same thing in its own words.
    """
    question = json.dumps({"tool": tool, "args": list(args), "model": str(model)})
    try:
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT],
            input=question,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": _python_path()},
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return read_answer(done.stdout)


def read_answer(text: str) -> Placement | None:
    """Return the placement that a process found, None where it ended without one."""
    try:
        found = json.loads(text)
    except ValueError:
        return None
    *devices, host = (DeviceMemory(**device) for device in found["devices"])
    return Placement(
        tuple(devices),
        host,
        found["device_of"],
        found["n_ctx"],
        tuple(found["args"]),
        process_bytes=found["process_bytes"],
    )


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
        "process_bytes": peak_rss_bytes(),  # drivers take their share of RAM
    }


def main() -> None:
    """Answer the question on stdin; what llama.cpp prints goes nowhere."""
    answer_fd, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    question = json.load(sys.stdin)
    answer = place(question["tool"], question["args"], Path(question["model"]))
    with os.fdopen(answer_fd, "w", encoding="utf-8") as out:
        json.dump(answer, out)
