"""Loads a longhaul-server on this machine: what sharing gains, and whether it lasts.

    bench/serve.py share MODEL --longhaul-cache 0.4
    bench/serve.py soak MODEL --longhaul-cache 0.4 --minutes 20

`share` asks 1, 2, 4 and 8 questions at once and prints the rate of all together, and how many
experts were read per token. `soak` asks questions of varied length, one or several at a time, with
clients that leave in the middle and, of a copy of the model, reads that fail. Every whole reply has
to be the one that the same question had when the server was fresh and asked one thing at a time.
"""

import argparse
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from longhaul.budget import MIB
from longhaul.index import read_index

GREEDY = {"temperature": 0.0, "seed": 1, "ignore_eos": True}
SUBJECTS = ("the sea", "a bridge", "bread", "the moon", "a small dog", "winter", "glass", "a road")
QUESTIONS = [f"Write {n} lines about {subject}." for subject in SUBJECTS for n in (2, 5, 9)]
LENGTHS = (8, 16, 32)
TIMEOUT_S = 600
SPEED_WINDOW = 50


@dataclass
class Server:
    """A running server and its two addresses."""

    http: httpx.Client
    page: str
    process: subprocess.Popen[bytes]

    def ask(self, question: str, n: int, **more: object) -> httpx.Response:
        """Ask for n tokens."""
        body = {"prompt": question, "n_predict": n, **GREEDY, **more}
        return self.http.post("/completion", json=body)

    def state(self) -> dict[str, Any]:
        """Return what the page shows."""
        found: dict[str, Any] = httpx.get(self.page + "state").raise_for_status().json()
        return found


@contextmanager
def serve(model: Path, cache: str, n_parallel: int) -> Iterator[Server]:
    """Start a server and wait until it is ready."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    code = "import sys; sys.argv[0] = 'longhaul-server'; import longhaul.server as s; s.main()"
    command = [sys.executable, "-c", code, "--model", str(model), "--port", str(port)]
    command += ["--longhaul-cache", cache, "--parallel", str(n_parallel), "--ctx-size", "8192"]
    command += ["--longhaul-page-port", str(port + 1), "--load-mode", "none", "--kv-unified"]
    with (
        subprocess.Popen(command, stderr=subprocess.DEVNULL) as process,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=TIMEOUT_S) as http,
    ):
        try:
            while True:
                try:
                    if http.get("/health").status_code == 200:
                        break
                except httpx.TransportError:
                    if process.poll() is not None:
                        raise SystemExit("the server did not start") from None
                time.sleep(0.2)
            yield Server(http, f"http://127.0.0.1:{port + 1}/", process)
        finally:
            process.terminate()


def share(args: argparse.Namespace) -> None:
    """Print the rate of decoding and the experts read per token by the number of questions."""
    print("| at once | tok/s, all together | tokens per ubatch | experts read per token | MiB |")
    print("|---|---|---|---|---|")
    with serve(args.model, args.longhaul_cache, 8) as server:
        for n_at_once in (1, 2, 4, 8):
            rates, reads, sizes, tokens = [], [], [], []
            for repetition in range(args.repetitions):
                first = repetition * n_at_once
                questions = [QUESTIONS[(first + i) % len(QUESTIONS)] for i in range(n_at_once)]
                before = server.state()["decode"]
                with ThreadPoolExecutor(n_at_once) as pool:
                    for answer in pool.map(lambda q: server.ask(q, args.n_gen), questions):
                        answer.raise_for_status()
                after = server.state()["decode"]
                change = {name: after[name] - before[name] for name in before if name != "recent"}
                rates.append(change["n_tokens"] / (change["compute_us"] / 1e6))
                sizes.append(change["n_tokens"] / change["n_ubatches"])
                tokens.append(change["n_misses"] / change["n_tokens"])
                reads.append(change["read_bytes"] / change["n_tokens"] / MIB)
            cells = [f"{statistics.median(rates):.2f}", f"{statistics.median(sizes):.1f}"]
            cells += [f"{statistics.median(tokens):.1f}", f"{statistics.median(reads):.1f}"]
            print(f"| {n_at_once} | " + " | ".join(cells) + " |", flush=True)


@dataclass
class Soak:
    """What happened in a soak."""

    n_whole: int = 0
    n_left: int = 0
    n_failed: int = 0
    n_wrong: int = 0
    speeds: list[float] = field(default_factory=list)  # tok/s of replies that ran alone
    rss_bytes: list[int] = field(default_factory=list)


def leave(server: Server, question: str) -> None:
    """Ask for much and go away."""
    body = {"prompt": question, "n_predict": 4000, **GREEDY}
    try:
        url = str(server.http.base_url).rstrip("/") + "/completion"
        httpx.post(url, json=body, timeout=0.7)
    except httpx.TimeoutException:
        pass
    while (server.state()["idle_s"] or 0) < 0.5:  # tokens computed beside others round differently
        time.sleep(0.1)


def fail(server: Server, path: Path, whole: Path, found: Soak) -> None:
    """Have a request meet a file that is too short; mend it."""
    first = min(tensor.offset for layer in read_index(whole).layers for tensor in layer.tensors)
    status = path.stat()
    try:
        with path.open("r+b") as file:
            file.truncate(first)
        answer = server.ask(f"Something else {found.n_failed}: {random.random()}", 16)
    finally:
        with path.open("r+b") as file, whole.open("rb") as source:
            file.truncate(status.st_size)
            file.seek(first)
            source.seek(first)
            shutil.copyfileobj(source, file, 16 * MIB)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    if answer.status_code == 500 and "could not be read" in answer.text:
        found.n_failed += 1
    else:
        found.n_wrong += 1


def soak(args: argparse.Namespace) -> None:
    """Ask until the time is over, and print what came of it."""
    rng = random.Random(1)
    copy = args.model.with_suffix(".soak")
    shutil.copyfile(args.model, copy)
    found = Soak()
    try:
        with serve(copy, args.longhaul_cache, 2) as server:
            wanted = {
                (q, n): server.ask(q, n, cache_prompt=False).json()["content"]
                for q in QUESTIONS
                for n in LENGTHS[-1:]
            }
            assert all(len(text) > 8 for text in wanted.values())
            end = time.monotonic() + 60 * args.minutes
            while time.monotonic() < end:
                one_round(server, copy, args, rng, found, wanted)
            question = QUESTIONS[0]
            last = server.ask(question, LENGTHS[-1], cache_prompt=False).json()["content"]
            found.n_wrong += last != wanted[question, LENGTHS[-1]]
    finally:
        copy.unlink()
    tell(found)


def one_round(
    server: Server,
    path: Path,
    args: argparse.Namespace,
    rng: random.Random,
    found: Soak,
    wanted: dict[tuple[str, int], str],
) -> None:
    """Ask one question alone, now and then beside one that is left, or after a failed read."""
    question, n = rng.choice(QUESTIONS), rng.choice(LENGTHS)
    trouble = rng.random()
    if trouble < 0.1:
        leave(server, question)
        found.n_left += 1
    elif trouble < 0.13:
        fail(server, path, args.model, found)
    reply = server.ask(question, n, cache_prompt=False).raise_for_status().json()
    found.n_whole += 1
    found.n_wrong += not wanted[question, LENGTHS[-1]].startswith(reply["content"])
    found.n_wrong += not reply["content"]
    if n == LENGTHS[-1]:
        found.speeds.append(reply["timings"]["predicted_per_second"])
    found.rss_bytes.append(server.state()["memory"]["rss_bytes"])


def tell(found: Soak) -> None:
    """Print the table; exit with 1 if a reply was wrong."""
    first, last = found.speeds[:SPEED_WINDOW], found.speeds[-SPEED_WINDOW:]
    rss = found.rss_bytes[20:] or found.rss_bytes
    print("| | |\n|---|---|")
    print(f"| whole replies | {found.n_whole} |")
    print(f"| clients that left | {found.n_left} |")
    print(f"| failed reads, answered with 500 | {found.n_failed} |")
    print(f"| wrong replies | {found.n_wrong} |")
    print(f"| tok/s of the first {len(first)} | {statistics.median(first):.2f} |")
    print(f"| tok/s of the last {len(last)} | {statistics.median(last):.2f} |")
    print(
        f"| RSS after the 20th, least to most | {min(rss) / MIB:.0f} to {max(rss) / MIB:.0f} MiB |"
    )
    if found.n_wrong:
        raise SystemExit(1)


def main() -> None:
    """Read the command line and do what it says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["share", "soak"])
    parser.add_argument("model", type=Path)
    parser.add_argument("--longhaul-cache", default="0.4")
    parser.add_argument("--n-gen", type=int, default=32)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=20)
    args = parser.parse_args()
    share(args) if args.what == "share" else soak(args)


if __name__ == "__main__":
    main()
