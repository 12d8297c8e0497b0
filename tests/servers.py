"""Runs longhaul-server as a shell would, on a free port of this machine."""

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from commands import SMALL, TIMEOUT_S, Running

from longhaul.cgroups import Cgroup

ANSWER = {"temperature": 0.0, "seed": 1, "ignore_eos": True}
LONG_CONTEXT = ("--override-kv", "llama.context_length=int:65536", "--ctx-size", "65536")
SIZES = ("--ctx-size", "2048", "--parallel", "2", "--threads", "2")


def free_port() -> int:
    """Return a port that nobody listens on, and the next one neither."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return int(port)


@dataclass
class Server:
    """A running server."""

    running: Running
    url: str
    page: str
    http: httpx.Client

    def chat(self, text: str, n: int = 16, **more: object) -> dict[str, Any]:
        """Ask one question; raises httpx.HTTPStatusError unless it is answered."""
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": n, **ANSWER, **more}
        answer = self.http.post("/v1/chat/completions", json=body)
        answer.raise_for_status()
        found: dict[str, Any] = answer.json()
        return found

    def complete(self, prompt: str, n: int = 16, **more: object) -> httpx.Response:
        """Complete a text."""
        body = {"prompt": prompt, "n_predict": n, **ANSWER, **more}
        return self.http.post("/completion", json=body)

    def state(self) -> dict[str, Any]:
        """Return what the page shows."""
        found: dict[str, Any] = httpx.get(self.page + "state").raise_for_status().json()
        return found

    def metrics(self) -> dict[str, float]:
        """Return all metrics without labels by name."""
        text = self.http.get("/metrics").raise_for_status().text
        lines = [line.split() for line in text.splitlines() if line and not line.startswith("#")]
        return {name: float(value) for name, value in lines if "{" not in name}


@contextmanager
def serve(
    model: Path,
    *args: str | Path,
    cache: tuple[str, ...] = SMALL,
    cgroup: Cgroup | None = None,
) -> Iterator[Server]:
    """Start a server, wait until it is ready, and kill it at the end if it still runs."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    words = ("--model", model, "--port", str(port), *cache, *SIZES, *args)
    with (
        Running("longhaul-server", *words, cgroup=cgroup) as running,
        httpx.Client(base_url=url, timeout=TIMEOUT_S) as http,
    ):
        wait_until_ready(http, running)
        yield Server(running, url, f"http://127.0.0.1:{port + 1}/", http)


def wait_until_ready(http: httpx.Client, running: Running) -> None:
    """Wait for /health; raises AssertionError if the server ends before."""
    end = time.monotonic() + TIMEOUT_S
    while time.monotonic() < end:
        assert running.is_alive(), running.end().err
        try:
            if http.get("/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    raise TimeoutError("the server is not ready")
