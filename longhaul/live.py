"""Starts the process that shows a running server; see page.py."""

import json
import os
import selectors
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .engine import Engine
from .launch import RunPlan
from .server_arguments import ServerArguments

SCRIPT = Path(__file__).with_name("page.py")
START_S = 20  # until it says where it listens
END_S = 2


@contextmanager
def page(
    plan: RunPlan, engine: Engine, server: ServerArguments, port: int
) -> Iterator[tuple[str, bool]]:
    """Have the page served meanwhile; yield its address, or what went wrong, and whether it is up.

    The process ends when this one does, however it ends: it waits for the other end of a pipe.
    """
    host = f"[{server.page_host}]" if ":" in server.page_host else server.page_host
    memory = _for_reading(engine.live_file)
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", str(SCRIPT)],  # alone: nothing of ours, nor of the user's
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=[memory],
            start_new_session=True,  # Ctrl-C is the server's
            text=True,
        )
    except OSError as e:
        yield f"{e.strerror}", False
        return
    finally:
        os.close(memory)
    about = {
        "model": plan.model.name or plan.model.path.name,
        "pid": os.getpid(),
        "fd": memory,
        "host": server.page_host,
        "port": port,
        "api_keys": server.api_keys,
        "planned_bytes": plan.planned.total_bytes,
        "budget_bytes": plan.budget_bytes,
        **engine.live_layout(),
    }
    try:
        answer = _ask(process, about)
        if "port" in answer:
            yield f"http://{host}:{answer['port']}/", True
        else:
            yield f"port {port}: {answer['error']}", False
    finally:
        _end(process)


def _for_reading(file: int) -> int:
    """Return the file anew, for reading only where the system can: the tables are the engine's."""
    with suppress(OSError):
        return os.open(f"/proc/self/fd/{file}", os.O_RDONLY)
    return os.dup(file)


def _ask(process: "subprocess.Popen[str]", about: dict[str, object]) -> dict[str, object]:
    """Tell the process what there is to show; return its answer, or what went wrong."""
    assert process.stdin and process.stdout
    try:
        process.stdin.write(json.dumps(about) + "\n")
        process.stdin.flush()
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            if not selector.select(START_S):
                return {"error": f"it did not start within {START_S} s"}
        answer: dict[str, object] = json.loads(process.stdout.readline())
    except (OSError, ValueError):
        return {"error": "it did not start"}
    return answer


def _end(process: "subprocess.Popen[str]") -> None:
    """Let the process end, or make it."""
    assert process.stdin and process.stdout
    with suppress(OSError):
        process.stdin.close()
    process.stdout.close()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
