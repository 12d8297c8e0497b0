"""Runs longhaul's commands as a shell would."""

import os
import re
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from longhaul.cgroups import Cgroup
from longhaul.index import read_index

TIMEOUT_S = 60
OURS = "longhaul: "  # begins each of our lines on stderr
PROMPT = "Write about the sea"
SMALL = ("--longhaul-cache", "1MiB")  # 4 to 5 of the chat model's 8 slots
CHAT = ("-n", "12", "--temp", "0", "--seed", "1", "--ignore-eos", "--simple-io")
_MODULES = {
    "longhaul-cli": "longhaul.cli",
    "longhaul-server": "longhaul.server",
    "longhaul-bench": "longhaul.bench",
    "longhaul": "longhaul.main",
}
_TURN = re.compile(r"(?:^|\n)> (.*?)\n\n\[ Prompt: ", re.DOTALL)


def command(program: str, *args: str | Path) -> list[str]:
    """Return the command line of longhaul-cli, or of longhaul."""
    code = f"import sys; sys.argv[0] = {program!r}; import {_MODULES[program]} as m; m.main()"
    return [sys.executable, "-c", code, *map(str, args)]


def environment(**more: str) -> dict[str, str]:
    """Return an environment without options of ours or of llama.cpp."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name == "LONGHAUL_LIB_DIR" or not name.startswith(("LONGHAUL_", "LLAMA_"))
    }
    return kept | {"OMP_WAIT_POLICY": "passive"} | more


@dataclass(frozen=True)
class Result:
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        """Our lines on stderr, without their beginning."""
        lines = self.err.splitlines()
        return [line.removeprefix(OURS) for line in lines if line.startswith(OURS)]

    def line(self, first: str) -> str:
        """Return the first of our lines that begins with a word; raises if there is none."""
        return next(line for line in self.lines if line.split()[0] == first)

    @property
    def n_ubatch(self) -> int:
        """The effective ubatch."""
        return int(re.findall(r"[0-9]+", self.line("ubatch"))[0])

    @property
    def turns(self) -> list[str]:
        """What each turn of a chat printed, the echo of `-p` included."""
        return _TURN.findall(self.out)

    def counted(self, first: str) -> int:
        """Return the number after the first word of a line: tokens of a phase, or of all."""
        return int(self.line(first).split()[1])


def run(
    program: str,
    *args: str | Path,
    stdin: str = "",
    env: dict[str, str] | None = None,
    cgroup: Cgroup | None = None,
) -> Result:
    """Run a command to its end, with no terminal."""
    words = command(program, *args)
    done = subprocess.run(
        cgroup.within(words) if cgroup else words,
        input=stdin,
        env=env or environment(),
        capture_output=True,
        text=True,
        errors="replace",
        timeout=TIMEOUT_S,
        check=False,
        start_new_session=True,  # llama.cpp would write to the terminal, if there were one
    )
    return Result(done.returncode, done.stdout, done.stderr)


def resident(program: str, *args: str | Path, n_ubatch: int, stdin: str = "") -> Result:
    """Run without streaming at the ubatch that streaming took."""
    first = (args[0],) if program == "longhaul" else ()
    rest = args[len(first) :]
    result = run(program, *first, "--no-longhaul", *rest, "-ub", str(n_ubatch), stdin=stdin)
    assert result.code == 0, result.err
    assert result.lines == []
    return result


def first_expert_byte(path: Path) -> int:
    """Return where the experts of a model of one file begin."""
    return min(tensor.offset for layer in read_index(path).layers for tensor in layer.tensors)


class Running:
    """A command that one talks to while it runs; killed at the end of its `with`."""

    def __init__(self, program: str, *args: str | Path, cgroup: Cgroup | None = None) -> None:
        words = command(program, *args)
        self._process = subprocess.Popen(
            cgroup.within(words) if cgroup else words,
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._out, self._err = "", ""
        self._news = threading.Condition()
        self._readers = [threading.Thread(target=read) for read in (self._read_out, self._read_err)]
        for reader in self._readers:
            reader.start()

    def _read_out(self) -> None:
        assert self._process.stdout is not None
        while character := self._process.stdout.read(1):
            with self._news:
                self._out += character
                self._news.notify()

    def _read_err(self) -> None:
        assert self._process.stderr is not None
        while line := self._process.stderr.readline():
            with self._news:
                self._err += line
                self._news.notify()

    def say(self, line: str) -> None:
        """Write a line to its stdin."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def wait_for(self, pattern: str, *, err: bool = False) -> None:
        """Wait until stdout (or stderr) has a match; raises TimeoutError."""

        def has_match() -> bool:
            return re.search(pattern, self._err if err else self._out) is not None

        with self._news:
            if not self._news.wait_for(has_match, TIMEOUT_S):
                raise TimeoutError(f"no {pattern!r} in {self._out!r}; stderr: {self._err}")

    def is_alive(self) -> bool:
        """Say whether it still runs."""
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        """The number of its process."""
        return self._process.pid

    @property
    def err(self) -> str:
        """What it has written to stderr so far."""
        return self._err

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._process.terminate()

    def send(self, number: int) -> None:
        """Send a signal."""
        self._process.send_signal(number)

    def interrupt(self) -> None:
        """Press Ctrl-C."""
        self._process.send_signal(signal.SIGINT)

    def end(self, timeout_s: float = TIMEOUT_S) -> Result:
        """Close its stdin and wait for its end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        code = self._process.wait(timeout_s)
        for reader in self._readers:
            reader.join()
        return Result(code, self._out, self._err)

    def __enter__(self) -> "Running":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.wait()
        for reader in self._readers:
            reader.join()
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert stream is not None
            stream.close()
