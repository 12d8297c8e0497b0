"""Shows a running server: a process of its own that reads counters from shared memory.

Started by the server with a description of the memory on standard input, and gone when that ends.
It loads none of our libraries, and nothing that it does can wait for the engine or be waited for.
"""

import hmac
import json
import mmap
import os
import re
import socket
import socketserver
import struct
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from typing import Any

RECENT_UBATCHES = 64  # of which rates are shown
COUNTER_BYTES = 8
MAX_CLIENTS = 32  # at once; who comes then is turned away
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
CSP = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self';"
    " frame-ancestors 'none'; base-uri 'none'"
)


class Memory:
    """Read what the engine counts; see lh_live in longhaul.h for what the fields mean."""

    def __init__(self, memory: mmap.mmap, layout: dict[str, Any]) -> None:
        self._memory = memory
        self._layout = layout

    def number(self, name: str) -> int:
        """Return one whole number by its name."""
        return self._numbers(self._layout["numbers"][name], 1)[0]

    def _numbers(self, offset: int, n: int) -> tuple[int, ...]:
        return struct.unpack_from(f"={n}q", self._memory, offset)

    def counters(self, phase: int) -> dict[str, int]:
        """Return the counters of a phase: 0 prefill, 1 decode."""
        names = self._layout["counter_names"]
        offset = self._layout["counters"] + phase * len(names) * COUNTER_BYTES
        return dict(zip(names, self._numbers(offset, len(names)), strict=True))

    def records(self, n: int) -> list[dict[str, int]]:
        """Return the last n ubatches, or as many as there were, the last one last."""
        names = self._layout["counter_names"]
        found = []
        for offset in self._ring("records", n):
            end_us, phase = self._numbers(offset, 2)
            counters = self._numbers(offset + 2 * COUNTER_BYTES, len(names))
            found.append({"end_us": end_us, "phase": phase & 0xFFFFFFFF})
            found[-1].update(zip(names, counters, strict=True))
        return found

    def replies(self) -> list[dict[str, int]]:
        """Return the last replies, the last one last."""
        names = self._layout["reply_names"]
        n_kept = self._layout["replies"]["n_kept"]
        return [
            dict(zip(names, self._numbers(offset, len(names)), strict=True))
            for offset in self._ring("replies", n_kept - 1)  # the next one may be half written
        ]

    def _ring(self, name: str, n: int) -> list[int]:
        ring = self._layout[name]
        n_written = self.number(f"n_{name}")
        n = min(n, n_written, ring["n_kept"] - 1)
        indices = range(n_written - n, n_written)
        return [ring["offset"] + i % ring["n_kept"] * ring["item_bytes"] for i in indices]

    def residency(self, layer: dict[str, int]) -> list[int]:
        """Return for each expert how many of its layer were used after it, -1: not in a slot."""
        n_expert, n_slots = layer["n_expert"], layer["n_slots"]
        expert_of = struct.unpack_from(f"={n_slots}i", self._memory, layer["expert_of"])
        last_use = self._numbers(layer["last_use"], n_slots)
        ranks = [-1] * n_expert
        order = sorted(range(n_slots), key=last_use.__getitem__, reverse=True)
        for rank, slot in enumerate(slot for slot in order if expert_of[slot] >= 0):
            ranks[expert_of[slot] % n_expert] = rank
        return ranks


def resident_bytes(pid: int) -> tuple[int, int]:
    """Return a process's resident memory, now and at most; 0 where the system does not tell."""
    try:
        with open(f"/proc/{pid}/status") as file:
            text = file.read()
    except OSError:
        done = subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, text=True)
        now = int(done.stdout) * 1024 if done.stdout.strip() else 0
        return now, 0
    found = dict(re.findall(r"^(VmRSS|VmHWM):\s*(\d+) kB$", text, re.MULTILINE))
    return int(found.get("VmRSS", 0)) * 1024, int(found.get("VmHWM", 0)) * 1024


def hit_rate(counters: dict[str, int]) -> float:
    """Return hits per expert needed, 0 where none was."""
    n_needed = counters["n_hits"] + counters["n_misses"]
    return counters["n_hits"] / n_needed if n_needed else 0.0


def recent(records: list[dict[str, int]], phase: int) -> dict[str, float]:
    """Return rates of the last ubatches of a phase, by the time in which they were computed."""
    names = (
        *("n_tokens", "n_hits", "n_misses", "n_tier_hits", "read_bytes"),
        *("compute_us", "wait_us", "disk_us"),
    )
    same = [record for record in records if record["phase"] == phase]
    total = {name: sum(record[name] for record in same) for name in names}
    seconds = total["compute_us"] / 1e6
    return {
        "tokens_per_s": total["n_tokens"] / seconds if seconds else 0.0,
        "hit_rate": hit_rate(total),
        "tier_rate": total["n_tier_hits"] / max(total["n_hits"] + total["n_misses"], 1),
        "read_bytes_per_s": total["read_bytes"] / seconds if seconds else 0.0,
        "read_bytes_per_token": total["read_bytes"] / max(total["n_tokens"], 1),
        "wait_share": total["wait_us"] / total["compute_us"] if total["compute_us"] else 0.0,
    }


def state(memory: Memory, about: dict[str, Any]) -> dict[str, Any]:
    """Return all that is shown; bytes, seconds, shares of 0 to 1."""
    records = memory.records(RECENT_UBATCHES)
    now_us = time.monotonic_ns() // 1000
    rss_bytes, peak_bytes = resident_bytes(about["pid"])
    return {
        "model": about["model"],
        "pid": about["pid"],
        "idle_s": (now_us - records[-1]["end_us"]) / 1e6 if records else None,
        "prefill": {**memory.counters(0), "recent": recent(records, 0)},
        "decode": {**memory.counters(1), "recent": recent(records, 1)},
        "memory": {
            "rss_bytes": rss_bytes,
            "peak_rss_bytes": peak_bytes,
            "planned_bytes": about["planned_bytes"],
            "budget_bytes": about["budget_bytes"],
            "slot_bytes": memory.number("slot_bytes"),
            "repacked_bytes": memory.number("repacked_bytes"),
            "device_bytes": memory.number("device_bytes"),
            "tier_bytes": memory.number("tier_bytes"),
        },
        "layers": [
            {
                "layer": layer["layer"],
                "n_slots": layer["n_slots"],
                "used_since": memory.residency(layer),
            }
            for layer in about["layers"]
        ],
        "replies": [
            {**reply, "hit_rate": hit_rate(reply), "age_s": (now_us - reply["end_us"]) / 1e6}
            for reply in memory.replies()
        ],
    }


class Handler(BaseHTTPRequestHandler):
    """Serve the page and the state."""

    memory: Memory
    about: dict[str, Any]
    page: bytes
    timeout = 10  # seconds for a slow client
    server_version = "longhaul"
    sys_version = ""

    def do_GET(self) -> None:
        """Answer: / is the page, /state JSON."""
        path = self.path.partition("?")[0]
        if not self._is_for_us():
            self._send(403, b'{"error": "unknown host"}')
        elif path == "/":
            self._send(200, self.page, "text/html; charset=utf-8")
        elif path != "/state":
            self._send(404, b'{"error": "not found"}')
        elif not self._has_key():
            self._send(401, b'{"error": "invalid API key"}')
        else:
            self._send(200, json.dumps(state(self.memory, self.about)).encode())

    def _is_for_us(self) -> bool:
        """Refuse names that are not ours: a foreign page could have its name point to us."""
        name = re.sub(r":\d+$", "", self.headers.get("Host", "")).strip("[]")
        if not is_loopback(self.about["host"]):
            return True
        return name in (*LOCAL_NAMES, self.about["host"])

    def _has_key(self) -> bool:
        keys = self.about["api_keys"]
        given = self.headers.get("Authorization") or self.headers.get("X-Api-Key") or ""
        given = given.removeprefix("Bearer ")
        raw = given.encode("latin-1")
        return not keys or any(hmac.compare_digest(raw, key.encode()) for key in keys)

    def _send(self, code: int, body: bytes, kind: str = "application/json") -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Security-Policy", CSP)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: the terminal is the server's."""


def is_loopback(host: str) -> bool:
    """Say whether an address is reached from this machine only."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Server(ThreadingHTTPServer):
    """Listen on one address."""

    daemon_threads = True

    def __init__(self, host: str, port: int) -> None:
        self._free = threading.BoundedSemaphore(MAX_CLIENTS)
        if ":" in host:
            self.address_family = socket.AF_INET6
        super().__init__((host, port), Handler)

    def server_bind(self) -> None:
        """Bind without asking a name server who we are."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread, unless there are too many."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, and be free for the next."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing: a client that went away is no matter."""


def main() -> None:
    """Serve until standard input ends; the first line of it says what there is to show."""
    about = json.loads(sys.stdin.readline())
    Handler.about = about
    Handler.memory = Memory(
        mmap.mmap(about["fd"], about["layout"]["n_bytes"], prot=mmap.PROT_READ), about["layout"]
    )
    Handler.page = Path(__file__).with_name("page.html").read_bytes()
    try:
        server = Server(about["host"], about["port"])
    except OSError as e:
        print(json.dumps({"error": e.strerror or str(e)}), flush=True)
        return
    print(json.dumps({"port": server.server_address[1]}), flush=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    while sys.stdin.read(1):
        pass
    os._exit(0)


if __name__ == "__main__":
    main()
