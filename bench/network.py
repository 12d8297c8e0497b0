"""What a network costs: experts in the memory of a worker behind a link of limited rate.

    sudo .venv/bin/python bench/network.py MODEL --rate 1gbit --rate 10gbit

A worker runs in a network namespace of its own, behind a pair of virtual cards whose rate `tc`
limits in both directions, and, where the kernel has netem, with a delay. Each network, loopback
first, decodes the same tokens twice: with a slot for every expert, when all of them are there
(hits only), and with few slots (misses). Logits have to be equal everywhere. Prints tok/s, and
bytes by the card's own counters, with what the link carried and how long a round trip took. A token
waits for one round trip per layer, and one for its logits.
"""

import argparse
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from longhaul import llama
from longhaul.budget import MIB
from longhaul.config import Config
from longhaul.engine import Engine
from longhaul.index import read_index

NAMESPACE = f"longhaul-{os.getpid()}"
NEAR_CARD = f"lh{os.getpid() % 100000}a"  # at most 15 characters
FAR_CARD = f"lh{os.getpid() % 100000}b"
NEAR, FAR = "10.213.7.1", "10.213.7.2"
BURST = "128kb"  # less than an expert, so that one is limited as well
PROBE_BYTES = 256 * MIB
ALL_LAYERS = 999
WORKER = "import sys; sys.argv[0] = 'longhaul'; import longhaul.main as m; m.main()"
ECHO = """
import socket, sys
with socket.create_server((sys.argv[1], int(sys.argv[2]))) as listener:
    peer = listener.accept()[0]
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while byte := peer.recv(1):
        if byte == b"#":
            break
        peer.sendall(byte)
    while peer.recv(1 << 20):
        pass
"""


@dataclass(frozen=True)
class Network:
    """A way to a worker: its address, the card that counts, and how commands run at its end."""

    name: str
    host: str
    card: str
    prefix: tuple[str, ...] = ()


@dataclass(frozen=True)
class Row:
    """What decoding took."""

    tok_s: float
    hit_rate: float
    sent_bytes: float  # per token, towards the worker
    received_bytes: float
    logits: "np.ndarray"


def ip(*words: str) -> None:
    """Run ip; raises CalledProcessError."""
    subprocess.run(("ip", *words), check=True)


@contextmanager
def link() -> Iterator[None]:
    """Have a namespace with a link to it; it goes with all that is in it."""
    try:
        ip("netns", "add", NAMESPACE)
        ip("link", "add", NEAR_CARD, "type", "veth", "peer", "name", FAR_CARD)
        ip("link", "set", FAR_CARD, "netns", NAMESPACE)
        ip("addr", "add", f"{NEAR}/24", "dev", NEAR_CARD)
        ip("link", "set", NEAR_CARD, "up")
        ip("-n", NAMESPACE, "addr", "add", f"{FAR}/24", "dev", FAR_CARD)
        ip("-n", NAMESPACE, "link", "set", FAR_CARD, "up")
        yield
    finally:
        for words in (("link", "del", NEAR_CARD), ("netns", "del", NAMESPACE)):
            subprocess.run(("ip", *words), check=False, stderr=subprocess.DEVNULL)


def limit(rate: str, delay_ms: float) -> bool:
    """Limit the link in both directions; say whether the delay could be made as well."""
    in_namespace = ("ip", "netns", "exec", NAMESPACE)
    has_delay = delay_ms > 0
    for prefix, card in (((), NEAR_CARD), (in_namespace, FAR_CARD)):
        root = (*prefix, "tc", "qdisc", "replace", "dev", card, "root", "handle", "1:")
        tbf = ("tbf", "rate", rate, "burst", BURST, "latency", "100ms")
        subprocess.run((*root, *tbf), check=True)
        if has_delay:
            below = (*prefix, "tc", "qdisc", "replace", "dev", card, "parent", "1:1")
            netem = ("netem", "delay", f"{delay_ms / 2}ms", "limit", "100000")
            done = subprocess.run((*below, *netem), check=False, stderr=subprocess.DEVNULL)
            has_delay = done.returncode == 0
    return has_delay


def free_port() -> int:
    """Return a port that nobody listens on here."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextmanager
def process(network: Network, *words: str) -> Iterator[None]:
    """Have Python run at the other end."""
    command = [*network.prefix, sys.executable, "-c", *words]
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        yield
    finally:
        running.kill()
        running.wait()


def connected(host: str, port: int) -> socket.socket:
    """Return a connection to what has just been started."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        with suppress(OSError):
            return socket.create_connection((host, port))
        time.sleep(0.05)
    raise TimeoutError(f"nobody listens at {host}:{port}")


def probe(network: Network) -> tuple[float, float]:
    """Return bytes per second that a connection carries, and seconds of a round trip."""
    port = free_port()
    with process(network, ECHO, network.host, str(port)), connected(network.host, port) as peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        trips = []
        for _ in range(500):
            start = time.perf_counter()
            peer.sendall(b".")
            peer.recv(1)
            trips.append(time.perf_counter() - start)
        peer.sendall(b"#")
        block = bytes(MIB)
        start = time.perf_counter()
        for _ in range(PROBE_BYTES // MIB):
            peer.sendall(block)
        peer.shutdown(socket.SHUT_WR)
        peer.recv(1)
        return PROBE_BYTES / (time.perf_counter() - start), statistics.median(trips)


def card_bytes(card: str) -> tuple[int, int]:
    """Return bytes that a card has sent and received."""
    folder = Path("/sys/class/net") / card / "statistics"
    sent, received = (int((folder / f"{way}_bytes").read_text()) for way in ("tx", "rx"))
    return sent, received


def measure(args: argparse.Namespace, network: Network, device: str, share: float) -> Row:
    """Decode the tokens with slots for a share of the experts, the second time measured."""
    moe = read_index(args.model)
    slots = [max(1, round(share * layer.n_expert)) for layer in moe.layers]
    with (
        Engine(moe, slots, Config()) as engine,
        llama.Model(args.model, n_gpu_layers=ALL_LAYERS, devices=[device]) as model,
        llama.Context(model, n_ctx=512, n_threads=args.threads) as context,
    ):
        tokens = np.random.default_rng(7).integers(0, model.n_vocab, args.n_gen).tolist()
        for token in tokens:
            context.decode([token])
        context.remove_from(0)
        before, bytes_before = engine.stats().total, card_bytes(network.card)
        start = time.perf_counter()
        logits = np.concatenate([context.decode([token]) for token in tokens])
        seconds = time.perf_counter() - start
        after, bytes_after = engine.stats().total, card_bytes(network.card)
        engine.raise_kept()
    n_hits, n_misses = after.n_hits - before.n_hits, after.n_misses - before.n_misses
    sent, received = (
        (now - then) / len(tokens) for now, then in zip(bytes_after, bytes_before, strict=True)
    )
    return Row(len(tokens) / seconds, n_hits / (n_hits + n_misses), sent, received, logits)


def run(args: argparse.Namespace, network: Network, wanted: dict[float, "np.ndarray"]) -> None:
    """Print the rows of one network."""
    rate, trip = probe(network)
    port = free_port()
    words = ("rpc-server", "--host", network.host, "--port", str(port))
    with process(network, WORKER, *words, "--threads", str(args.threads)):
        connected(network.host, port).close()
        device = llama.add_rpc_server(f"{network.host}:{port}")[0].name
        for share in (1.0, args.share):
            rows = [measure(args, network, device, share) for _ in range(args.rounds)]
            for row in rows:
                assert np.ptp(row.logits) > 0
                assert np.array_equal(row.logits, wanted.setdefault(share, row.logits))
            row = sorted(rows, key=lambda row: row.tok_s)[len(rows) // 2]
            print(
                f"| {network.name} | {rate / MIB:.0f} MiB/s, {1e6 * trip:.0f} us | {share:.0%} |"
                f" {row.hit_rate:.1%} | {row.tok_s:.2f} | {row.sent_bytes / MIB:.2f} |"
                f" {row.received_bytes / MIB:.2f} |",
                flush=True,
            )


def main() -> None:
    """Measure loopback, the link as it is, and the link at each rate."""
    parser = argparse.ArgumentParser(description="What a network costs.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--rate", action="append", help="of the link, as tc has it")
    parser.add_argument("--delay-ms", type=float, default=0.2, help="of a round trip, with netem")
    parser.add_argument("--share", type=float, default=0.25, help="of the experts that have slots")
    parser.add_argument("--n-gen", type=int, default=32, help="tokens to decode")
    parser.add_argument("--threads", type=int, default=1, help="of the worker, and here")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    wanted: dict[float, np.ndarray] = {}
    print(f"load {os.getloadavg()[0]:.2f}")
    print("| network | carries, round trip | slots | hits | tok/s | MiB to it | MiB from it |")
    print("|---|---|---|---|---|---|---|")
    run(args, Network("loopback", "127.0.0.1", "lo"), wanted)
    with link():
        prefix = ("ip", "netns", "exec", NAMESPACE)
        for rate in (None, *(args.rate or ["10gbit", "1gbit"])):
            name = rate or "link"
            if rate and limit(rate, args.delay_ms):
                name += f", {args.delay_ms} ms"
            run(args, Network(name, FAR, NEAR_CARD, prefix), wanted)


if __name__ == "__main__":
    main()
