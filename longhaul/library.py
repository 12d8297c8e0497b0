"""Where the native libraries are, and whether they belong to these sources. Loads nothing."""

import hashlib
import os
import re
import sys
from pathlib import Path

from .errors import PatchError

_PACKAGE = Path(__file__).resolve().parent
_CHECKOUT = _PACKAGE.parent
_SUFFIX = ".dylib" if sys.platform == "darwin" else ".so"
_NO_DEVICES = tuple(f"libggml-{name}" for name in ("base", "cpu", "blas", "rpc"))
STREAMING_SPINS = 2_000  # some 20 microseconds
RESIDENT_SPINS = 10_000
FUSION_SWITCHES = (
    "GGML_VK_DISABLE_FUSION",
    "GGML_CUDA_DISABLE_FUSION",
    "GGML_METAL_FUSION_DISABLE",
    "GGML_OPENCL_DISABLE_FUSION",
)
_HOW_TO_BUILD = "build them with `make build` in a checkout, or install the package with pip"


def lib_dir() -> Path:
    """Return the folder of the built libraries; raises PatchError if there is none."""
    chosen = os.environ.get("LONGHAUL_LIB_DIR")
    candidates = [Path(chosen)] if chosen else [_PACKAGE / "lib", _CHECKOUT / "build" / "lib"]
    for candidate in candidates:
        if any((candidate / f"lib{name}{_SUFFIX}").exists() for name in ("longhaul", "llama")):
            return candidate
    raise PatchError(f"native libraries not found in {candidates[-1]}; {_HOW_TO_BUILD}")


def lib_path(name: str) -> Path:
    """Return the file of a library, `name` without prefix or suffix; raises PatchError if none."""
    path = lib_dir() / f"lib{name}{_SUFFIX}"
    if not path.exists():
        raise PatchError(f"native library {path} not found; {_HOW_TO_BUILD}")
    return path


def has_device_backend() -> bool:
    """Say whether a backend was built that may find devices here, beside the CPU's and RPC's."""
    names = (path.name for path in lib_dir().glob(f"libggml-*{_SUFFIX}"))
    return any(not name.startswith(_NO_DEVICES) for name in names)


def openmp_environment(*, reads: bool = True) -> dict[str, str]:
    """Return variables that have waiting OpenMP threads sleep soon, none if the user has set any.

    To be set before the first library is loaded. By default GNU OpenMP spins for milliseconds at a
    barrier, and another process on one of two cores takes two thirds of the speed of decoding. With
    fewer spins a model of which nothing has to be read decodes slower on a quiet machine; one that
    `reads` does not, and keeps more of its speed on a busy one.
    """
    if "OMP_WAIT_POLICY" in os.environ or "GOMP_SPINCOUNT" in os.environ:
        return {}
    return {"GOMP_SPINCOUNT": str(STREAMING_SPINS if reads else RESIDENT_SPINS)}


def exact_environment() -> dict[str, str]:
    """Return variables that have devices compute each operation by itself, none the user has set.

    To be set before the first library is loaded. Backends fuse operations that are neighbours in a
    part of a graph that runs on one device, and a fused one may round otherwise: streaming cuts
    graphs into other parts than they have where all experts are resident.
    """
    return {name: "1" for name in FUSION_SWITCHES if name not in os.environ}


def header_text() -> str:
    """Return the C API as the library's header declares it."""
    for path in (_PACKAGE / "lib" / "longhaul.h", _CHECKOUT / "native" / "include" / "longhaul.h"):
        if path.exists():
            return path.read_text(encoding="utf-8")
    raise PatchError(f"longhaul.h not found; {_HOW_TO_BUILD}")


def build_id() -> str:
    """Return the id that the libraries of these sources carry; raises PatchError if unknown."""
    installed = _PACKAGE / "lib" / "build-id"
    if installed.exists():
        return installed.read_text(encoding="ascii").strip()
    return source_build_id(_CHECKOUT)


def source_build_id(checkout: Path) -> str:
    """Return 12 hex digits over what ties the libraries to Python: patches, C API and version."""
    digest = hashlib.sha256()
    try:
        for patch in sorted((checkout / "patches").glob("*.patch"), key=lambda path: path.name):
            digest.update(patch.read_bytes())
        digest.update((checkout / "native" / "include" / "longhaul.h").read_bytes())
        project = (checkout / "pyproject.toml").read_text(encoding="utf-8")
    except OSError as e:
        raise PatchError(f"{e.filename} cannot be read: {e.strerror}; {_HOW_TO_BUILD}") from e
    version = re.search(r'^version = "([^"]+)"$', project, re.MULTILINE)
    if version is None:
        raise PatchError(f"{checkout / 'pyproject.toml'} has no version")
    digest.update(version[1].encode())
    return digest.hexdigest()[:12]
