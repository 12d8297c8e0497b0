"""Get the pinned llama.cpp: fetch the source package, verify it, unpack it and apply the patches.

CMake runs this at configure time and the Makefile for the download. Standard library only, since
it runs before anything is installed. It knows nothing of what the patches do.
"""

from __future__ import annotations

import argparse
import filecmp
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

PACKAGE = "llama-cpp-python"
VERSION = "0.3.36"
SDIST_NAME = f"llama_cpp_python-{VERSION}.tar.gz"
SDIST_SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"

# Large folders of the package that no target of ours compiles, and a link to a git repository that
# is not in the package.
SKIPPED = frozenset({".git", "benches", "docs", "media", "models"})


class SourceError(Exception):
    """The source cannot be had as pinned; the message names the file and what to do."""


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def verify(sdist: Path, expected: str = SDIST_SHA256) -> None:
    """Raise SourceError unless the file exists and has the pinned checksum."""
    if not sdist.is_file():
        raise SourceError(f"{sdist}: no such file; it should be {SDIST_NAME}")
    actual = sha256_of(sdist)
    if actual != expected:
        raise SourceError(
            f"{sdist}: wrong checksum, sha256 {actual} instead of {expected}; "
            f"delete it and run again, or pass the source package of {PACKAGE} {VERSION}"
        )


def fetch(cache: Path, expected: str = SDIST_SHA256) -> Path:
    """Return the verified source package in the cache folder, downloading it when missing."""
    sdist = cache / SDIST_NAME
    if not sdist.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix="download-") as folder:
            download(Path(folder))
            downloaded = Path(folder) / SDIST_NAME
            verify(downloaded, expected)
            downloaded.replace(sdist)
    verify(sdist, expected)
    return sdist


def download(folder: Path) -> None:
    """Let pip download the source package from the index it is set up for."""
    print(f"Downloading the source package of {PACKAGE} {VERSION} (73 MiB)", flush=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", PACKAGE]
    command += ["--disable-pip-version-check", "--dest", str(folder), f"{PACKAGE}=={VERSION}"]
    if subprocess.run(command, check=False).returncode != 0:
        raise SourceError(
            f"pip could not download {PACKAGE} {VERSION} (its own message stands above); "
            f"with {SDIST_NAME} at hand put it into build/downloads, or LONGHAUL_CACHE_DIR"
        )


def unpack(sdist: Path, patches: Sequence[Path], into: Path) -> bool:
    """Bring the patched llama.cpp into a folder; return whether anything had to be done.

    Files that do not change keep their time stamps, so that a changed patch rebuilds only what it
    touches. Nothing in the folder changes when a patch does not apply.
    """
    stamp = into.with_name(into.name + ".stamp")
    wanted = fingerprint(sdist, patches)
    if into.is_dir() and stamp.is_file() and stamp.read_text() == wanted:
        return False
    print(f"Unpacking llama.cpp and applying {len(patches)} patches", flush=True)
    into.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=into.parent, prefix="unpack-") as folder:
        fresh = Path(folder) / "llama.cpp"
        extract(sdist, fresh)
        for patch in patches:
            apply_patch(patch, fresh)
        stamp.unlink(missing_ok=True)
        sync(fresh, into)
    stamp.write_text(wanted)
    return True


def fingerprint(sdist: Path, patches: Sequence[Path]) -> str:
    """Identify the unpacked tree by all that it is made from."""
    inputs = [(path.name, sha256_of(path)) for path in (sdist, *patches, Path(__file__))]
    return "".join(f"{digest} {name}\n" for name, digest in inputs)


def extract(sdist: Path, into: Path) -> None:
    """Extract vendor/llama.cpp, without the folders that nothing here needs."""
    into.mkdir()
    with tarfile.open(sdist, "r:gz") as archive:
        for member in archive:
            parts = PurePosixPath(member.name).parts[1:]
            if parts[:2] != ("vendor", "llama.cpp") or not member.isfile():
                continue
            inside = parts[2:]
            if inside[0] in SKIPPED or ".." in inside:
                continue
            target = into.joinpath(*inside)
            target.parent.mkdir(parents=True, exist_ok=True)
            content = archive.extractfile(member)
            assert content is not None, "a regular member always has content"
            with content, target.open("wb") as file:
                shutil.copyfileobj(content, file)
            target.chmod(0o755 if member.mode & 0o100 else 0o644)
    if not any(into.iterdir()):
        raise SourceError(f"{sdist}: holds no vendor/llama.cpp")


def apply_patch(patch: Path, tree: Path) -> None:
    """Apply one patch exactly, without fuzz. Raises SourceError if it does not apply."""
    patch = patch.resolve()
    if shutil.which("git"):
        command = ["git", "-c", "core.autocrlf=false", "apply", "-p1", "--whitespace=nowarn"]
        command += [str(patch)]
    elif shutil.which("patch"):
        command = ["patch", "-p1", "-N", "-F", "0", "-s", "-i", str(patch)]
    else:
        raise SourceError("git or patch is needed to apply the patches: apt-get install patch")
    # Without the ceiling git would take the folder for a part of the repository around it, and
    # silently skip files that this repository ignores.
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(tree.resolve().parent)}
    done = subprocess.run(
        command, cwd=tree, env=environment, check=False, capture_output=True, text=True
    )
    if done.returncode != 0:
        details = (done.stdout + done.stderr).strip()
        raise SourceError(
            f"{patch.name} does not apply to the llama.cpp of {PACKAGE} {VERSION}:\n{details}"
        )
    for leftover in tree.rglob("*.orig"):
        leftover.unlink()


def sync(fresh: Path, into: Path) -> None:
    """Make one tree equal to the other, touching only files whose content differs."""
    wanted = files_below(fresh)
    for name in files_below(into) - wanted:
        (into / name).unlink()
    for name in wanted:
        source, target = fresh / name, into / name
        if target.is_file() and filecmp.cmp(source, target, shallow=False):
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
        shutil.copymode(source, target)


def files_below(folder: Path) -> set[Path]:
    return {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}


def build_id(root: Path) -> str:
    """Return the 12 hex digits that tie the libraries to this checkout's patches and C API."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from longhaul.library import PatchError, source_build_id  # imports nothing that is installed

    try:
        return source_build_id(root)
    except PatchError as e:
        raise SourceError(str(e)) from e


def patches_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.patch"), key=lambda path: path.name)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, purpose in (
        ("fetch", "download and verify the source package"),
        ("source", "fetch, unpack and patch"),
        ("build-id", "print what ties libraries to this checkout"),
    ):
        command = commands.add_parser(name, help=purpose)
        if name == "build-id":
            command.add_argument("--root", type=Path, required=True, help="the checkout")
            continue
        command.add_argument("--cache", type=Path, required=True, help="folder of the package")
        if name == "source":
            command.add_argument("--sdist", type=Path, help="package to use, never downloaded")
            command.add_argument("--patches", type=Path, required=True, help="folder of *.patch")
            command.add_argument("--into", type=Path, required=True, help="folder to unpack to")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    try:
        if options.command == "fetch":
            fetch(options.cache)
        elif options.command == "build-id":
            print(build_id(options.root))
        else:
            if options.sdist:
                verify(options.sdist)
            sdist = options.sdist or fetch(options.cache)
            unpack(sdist, patches_in(options.patches), options.into)
    except SourceError as error:
        print(f"longhaul: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
