"""Starts the process that shows a running server; see page.py."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .engine import Engine
from .launch import RunPlan
from .server_arguments import ServerArguments

SCRIPT = Path(__file__).with_name("page.py")
START_S = 20  # at most, until it listens


@contextmanager
def page(
    plan: RunPlan, engine: Engine, server: ServerArguments, port: int
) -> Iterator[tuple[str, bool]]:
    """Have the page served meanwhile; yield its address, or what went wrong, and whether it is up.

    The process ends when this one does, however it ends: it waits for the other end of a pipe.
    """
    about = {
        "model": plan.model.name or plan.model.path.name,
        "pid": os.getpid(),
        "fd": engine.live_file,
        "host": server.host,
        "port": port,
        "api_keys": server.api_keys,
        "planned_bytes": plan.planned.total_bytes,
        "budget_bytes": plan.budget_bytes,
        **engine.live_layout(),
    }
    process = subprocess.Popen(
        [sys.executable, "-I", str(SCRIPT)],  # alone: nothing of ours, nor of the user's
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        pass_fds=[engine.live_file],
        start_new_session=True,  # Ctrl-C is the server's
        text=True,
    )
    assert process.stdin and process.stdout
    try:
        process.stdin.write(json.dumps(about) + "\n")
        process.stdin.flush()
        answer = json.loads(process.stdout.readline() or '{"error": "it did not start"}')
        if "port" in answer:
            host = f"[{server.host}]" if ":" in server.host else server.host
            yield f"http://{host}:{answer['port']}/", True
        else:
            yield f"port {port}: {answer['error']}", False
    finally:
        process.stdin.close()
        process.stdout.close()
        process.wait(START_S)
