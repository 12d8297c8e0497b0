"""Files that are whole or as they were: failures, kills at every line, many writers, devices."""

import fcntl
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from longhaul import files
from longhaul.files import replacing, write_text

ROOT = Path(files.__file__).parents[1]

# Writes once and again in children that are killed at the first line of files.py, the second, ...
EVERY_LINE = """
import os, signal, sys
from itertools import count
from pathlib import Path
from longhaul import files

target, is_there = Path(sys.argv[1]), sys.argv[2] == "there"
part = target.with_name(f".{target.name}.part")

def kill_at(n):
    lines = count(1)
    def trace(frame, event, arg):
        if frame.f_code.co_filename != files.__file__:
            return None
        if event == "line" and next(lines) == n:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace
    sys.settrace(trace)

def child(n):
    pid = os.fork()
    if pid == 0:
        kill_at(n)
        files.write_text(target, "new" * 10000)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

found = set()
for n in count(1):
    target.unlink(missing_ok=True)
    if is_there:
        target.write_text("old")
    code = child(n)
    text = target.read_text() if target.exists() else None
    assert text == "new" * 10000 or (code and text == ("old" if is_there else None)), (n, text)
    assert set(os.listdir(target.parent)) <= {target.name, part.name}
    found.add((text or "no file")[:3] + (" and a part" if part.exists() else ""))
    if code == 0:
        break
    assert code == -signal.SIGKILL, code
assert not part.exists()
print(n, *sorted(found), sep=",")
"""


@pytest.mark.parametrize("before", ["there", "absent"])
def test_a_writer_killed_at_any_line_leaves_the_old_file_or_the_new_one(
    tmp_path: Path, before: str
) -> None:
    target = tmp_path / "f.txt"
    done = subprocess.run(
        [sys.executable, "-c", EVERY_LINE, str(target), before],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    n_lines, *states = done.stdout.strip().split(",")
    old = "old" if before == "there" else "no "
    assert int(n_lines) > 20
    assert states == sorted(["new", old, f"{old} and a part"])


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "f.txt"
    target.write_text("old")
    with pytest.raises(OSError, match="No space"), replacing(target) as part:
        part.write_text("half of")
        assert target.read_text() == "old"
        raise OSError(28, "No space left on device")
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["f.txt"]


def test_a_disk_that_fails_at_the_end_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "f.txt"
    target.write_text("old")

    def fail(_: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output"):
        write_text(target, "new")
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["f.txt"]


@pytest.mark.parametrize("before", ["old", None])
def test_what_is_not_written_replaces_nothing(tmp_path: Path, before: str | None) -> None:
    target = tmp_path / "f.txt"
    if before:
        target.write_text(before)
    with replacing(target):
        pass
    assert os.listdir(tmp_path) == (["f.txt"] if before else [])
    assert not before or target.read_text() == before


def test_what_a_killed_writer_left_does_not_show(tmp_path: Path) -> None:
    (tmp_path / ".f.txt.part").write_text("a long text that was never finished")
    write_text(tmp_path / "f.txt", "new")
    assert (tmp_path / "f.txt").read_text() == "new"
    assert os.listdir(tmp_path) == ["f.txt"]


def test_a_link_in_the_place_of_the_part_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious")
    (tmp_path / ".f.txt.part").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError):
        write_text(tmp_path / "f.txt", "new")
    assert (tmp_path / "victim").read_text() == "precious"


def test_many_writers_at_once_never_mix(tmp_path: Path) -> None:
    """Threads here: each opens the part for itself, so the lock holds between them as well."""
    target = tmp_path / "f.txt"
    texts = [str(i) * (10_000 + 1000 * i) for i in range(6)]
    write_text(target, texts[0])
    seen: set[str] = set()

    def write(text: str) -> None:
        for _ in range(20):
            write_text(target, text)

    threads = [threading.Thread(target=write, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        seen.add(target.read_text())
    for thread in threads:
        thread.join()
    assert seen
    assert seen | {target.read_text()} <= set(texts)
    assert os.listdir(tmp_path) == ["f.txt"]


def test_a_file_system_without_locks_is_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", fail)
    write_text(tmp_path / "f.txt", "new")
    assert (tmp_path / "f.txt").read_text() == "new"


@pytest.mark.parametrize("mode", [0o600, 0o444, 0o664])
def test_mode_and_link_stay(tmp_path: Path, mode: int) -> None:
    path, link = tmp_path / "f.txt", tmp_path / "link"
    path.write_text("old")
    path.chmod(mode)
    link.symlink_to(path)
    write_text(link, "new")
    assert link.is_symlink()
    assert path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == mode


def test_a_new_file_has_the_mode_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    write_text(tmp_path / "f.txt", "new")
    assert (tmp_path / "f.txt").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_dangling_link_is_filled(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "f.txt")
    write_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "f.txt").read_text() == "new"


def test_a_device_a_pipe_and_a_folder_stay_what_they_are(tmp_path: Path) -> None:
    write_text(Path("/dev/null"), "new")
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_text(pipe, "new")
    assert os.read(reader, 100) == b"new"
    os.close(reader)
    with pytest.raises(IsADirectoryError):
        write_text(tmp_path, "new")
    assert os.listdir(tmp_path) == ["pipe"]


SAY = """
import sys
from pathlib import Path
from longhaul.files import write_text
print("before", flush=True)
write_text(Path(sys.argv[1]), "figures\\n")
"""


@pytest.mark.skipif(not Path("/dev/stdout").exists(), reason="needs /dev/stdout")
def test_our_own_output_is_added_to(tmp_path: Path) -> None:
    path = tmp_path / "out.txt"
    command = [sys.executable, "-c", SAY, "/dev/stdout"]
    piped = subprocess.run(command, stdout=subprocess.PIPE, cwd=ROOT)
    assert (piped.returncode, piped.stdout) == (0, b"before\nfigures\n")
    for name in ("/dev/stdout", str(path)):
        with path.open("wb") as file:
            assert subprocess.run([*command[:-1], name], stdout=file, cwd=ROOT).returncode == 0
        assert path.read_text() == "before\nfigures\n"
    assert os.listdir(tmp_path) == ["out.txt"]
