"""Writes files that are whole, or as they were, whenever the process that writes them is killed.

Knows nothing of what is written.
"""

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yield a path that becomes `target` at the end, unless nothing was written there.

    That path, `.NAME.part` beside the target, is one for all writers: each waits for the one
    before, and takes over what a killed one left. Raises OSError if it cannot be written.
    """
    part = target.with_name(f".{target.name}.part")
    handle = _take(part)
    try:
        mode = stat.S_IMODE((target if target.exists() else part).stat().st_mode)
        os.fchmod(handle, mode | stat.S_IWUSR)  # a killed writer's can be opened by the next one
        yield part
        if os.fstat(handle).st_size > 0:
            os.fsync(handle)
            part.replace(target)
            os.fchmod(handle, mode)
        else:
            part.unlink()
    except BaseException:
        if _is_still(part, handle):
            part.unlink()
        raise
    finally:
        os.close(handle)  # unlocks it


def write_text(path: Path, text: str) -> None:
    """Write a text file, whole or not at all; a device, a pipe and our own output are appended to.

    Raises OSError if it cannot be written.
    """
    if _can_be_replaced(path):
        with replacing(path.resolve()) as part:
            part.write_text(text, encoding="utf-8")
    else:
        with path.open("a", encoding="utf-8") as file:
            file.write(text)


def _take(part: Path) -> int:
    """Open a file, wait until no other process has it locked, and empty it."""
    while True:
        handle = os.open(part, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            with suppress(OSError):  # some network file systems have no locks
                fcntl.flock(handle, fcntl.LOCK_EX)
            if _is_still(part, handle):  # whoever had it may have renamed or removed it
                os.ftruncate(handle, 0)
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _is_still(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(path.lstat(), os.fstat(handle))
    except FileNotFoundError:
        return False


def _can_be_replaced(path: Path) -> bool:
    """Say whether a path is free or a regular file, and not where stdout or stderr goes."""
    try:
        found = path.stat()  # not of what resolve() says, which is no path for a pipe in /dev/fd
    except FileNotFoundError:
        return True
    for output in (1, 2):
        with suppress(OSError):  # closed
            if os.path.samestat(found, os.fstat(output)):
                return False
    return stat.S_ISREG(found.st_mode)
