"""Looks at libraries, backends, disk and memory, and says what is slow or broken."""

import os
import re
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from . import advise, demo, machine, native
from .arguments import read_arguments
from .budget import FLOOR_BYTES, GIB, MIB, memory_limits
from .config import Config
from .errors import ConfigError, LonghaulError, PatchError
from .index import read_index
from .launch import tool_sizes
from .library import build_id, lib_dir

SLOW_DISK_BYTES_PER_S = 500 * MIB
BUSY_SHARE = 0.5  # of the cores
PRESSURE_PERCENT = 10.0  # of the last 10 s, some process waiting


@dataclass(frozen=True, slots=True)
class Finding:
    """Say how one thing is: ok, slow or broken; and what to do unless it is ok."""

    subject: str
    state: str
    found: str
    advice: str = ""


def examine(model: Path | None = None) -> list[Finding]:
    """Look at everything; at the disk where the model is, else where the demo model is."""
    findings = [libraries(), bindings(), *backends(), *memory(), *address_space(), *pressure()]
    path = model or demo.default_path()
    if path.is_file():
        findings += disk(path)
    else:
        findings.append(Finding("disk", "ok", "not measured: give a model"))
    if model is not None:
        findings.append(model_fits(model))
    return findings


def libraries() -> Finding:
    """Load the native libraries."""
    try:
        native.require_libraries()
        return Finding("libraries", "ok", f"build {build_id()} in {lib_dir()}")
    except PatchError as e:
        return Finding("libraries", "broken", str(e), "make build")


def bindings() -> Finding:
    """Compare the version of the bindings with the one that the patches belong to."""
    wanted = next(
        (
            re.split("[=]+", line)[1].split(";")[0].strip()
            for line in metadata.requires("longhaul") or []
            if line.startswith("llama-cpp-python")
        ),
        "",
    )
    try:
        found = metadata.version("llama-cpp-python")
    except metadata.PackageNotFoundError:
        return Finding("bindings", "broken", "llama-cpp-python is missing", "make build")
    if found != wanted:
        advice = f"pip install llama-cpp-python=={wanted}"
        return Finding(
            "bindings", "broken", f"llama-cpp-python {found} instead of {wanted}", advice
        )
    return Finding("bindings", "ok", f"llama-cpp-python {found}")


def backends() -> Iterator[Finding]:
    """List what can compute."""
    try:
        from . import llama  # loads libraries

        found = llama.devices()
    except (ImportError, OSError, RuntimeError, LonghaulError) as e:
        yield Finding("backends", "broken", f"llama.cpp cannot be loaded: {e}", "make build")
        return
    for device in found:
        size = f", {device.free_bytes / GIB:.1f} GiB free" if device.free_bytes else ""
        yield Finding("backend", "ok", f"{device.name}: {device.description}{size}")


def memory() -> Iterator[Finding]:
    """List every limit of memory, and say if next to nothing is left."""
    try:
        limits = memory_limits()
    except ConfigError as e:
        yield Finding("memory", "slow", str(e), "give --longhaul-cache a size")
        return
    for limit in limits:
        found = (
            f"{limit.available_bytes / GIB:.1f} of {limit.bytes / GIB:.1f} GiB available"
            f" ({limit.source})"
        )
        if limit.available_bytes < 2 * FLOOR_BYTES:
            yield Finding("memory", "broken", found, "end other programs, or raise this limit")
        else:
            yield Finding("memory", "ok", found)


def address_space() -> Iterator[Finding]:
    """Warn of a limit on address space, which mapped files count against."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        yield Finding(
            "memory",
            "slow",
            f"address space is limited to {limit / GIB:.1f} GiB (ulimit -v)",
            "ulimit -v unlimited, or --load-mode none: a mapped model counts against it",
        )


def pressure(proc: Path = Path("/proc")) -> Iterator[Finding]:
    """Say whether other processes use the cores, the memory or the disk."""
    n_cores = os.cpu_count() or 1
    load = os.getloadavg()[0]
    found = f"load {load:.1f} on {n_cores} cores"
    if load > BUSY_SHARE * n_cores:
        advice = "other programs are busy: decoding waits for them"
        yield Finding("cores", "slow", found, advice)
    else:
        yield Finding("cores", "ok", found)
    for kind in ("memory", "io"):
        try:
            text = (proc / "pressure" / kind).read_text()
        except OSError:
            continue  # not every kernel tells
        share = float(re.findall(r"^some avg10=([0-9.]+)", text, re.MULTILINE)[0])
        found = f"{share:.0f} % of the last 10 s something waited for {kind}"
        if share > PRESSURE_PERCENT:
            advice = "other programs wait for the same"
            yield Finding(kind, "slow", found, advice)


def disk(path: Path) -> Iterator[Finding]:
    """Measure the disk, and see whether reads really pass by the page cache."""
    try:
        passes_by = machine.leaves_page_cache_alone(path)
    except OSError as e:
        yield Finding(
            "reads",
            "slow",
            f"{path}: no reads past the page cache here ({e.strerror})",
            "experts go through the page cache, which is told to drop them; another file system"
            " may do better",
        )
        return
    if passes_by is None:
        found = f"{path}: whether reads pass by the page cache cannot be told of this file"
        yield Finding("reads", "ok", found)
    elif passes_by:
        yield Finding("reads", "ok", f"{path}: reads pass by the page cache")
    else:
        yield Finding(
            "reads",
            "slow",
            f"{path}: this file system takes uncached reads, but caches what they read",
            "memory for the page cache is not in the plan; use another file system",
        )
    try:
        rate = machine.disk_rate(path)
    except OSError as e:
        yield Finding("disk", "broken", f"{path}: {e.strerror}", "read another file")
        return
    config = Config()
    found = (
        f"{rate / MIB:.0f} MiB/s, {config.n_io_threads} reads of {config.chunk_bytes // 1024} KiB"
        " at a time"
    )
    if rate < SLOW_DISK_BYTES_PER_S:
        yield Finding("disk", "slow", found, "put the model on a quicker disk, or cache more of it")
    else:
        yield Finding("disk", "ok", found)


def model_fits(path: Path) -> Finding:
    """Plan the model with what is free."""
    try:
        model = read_index(path)
        if not model.is_moe:
            return Finding("model", "ok", f"{path} has no routed experts: nothing is streamed")
        arguments = read_arguments(["--model", str(path)], {})
        advice = advise.advise(
            model,
            tool_sizes("cli", arguments, model),
            Config(),
            may_cut_context=True,
            may_cut_checkpoints=True,
        )
    except LonghaulError as e:
        return Finding("model", "broken", str(e), "give a model that can be read")
    state = "broken" if not advice.fits else "slow" if advice.slow_because else "ok"
    more = f"longhaul plan {path} says more" if state != "ok" else ""
    return Finding("model", state, advice.verdict, more)
