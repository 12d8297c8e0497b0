"""Evaluates token ids 0, 1, 2, ... of a trace model and prints one JSON object.

Started by compare.py. Streams with the slots it is told, or, with 0, takes the model as plain
llama.cpp does. Which build of llama.cpp is decided by LONGHAUL_LIB_DIR.
"""

import argparse
import hashlib
import json
import resource
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path

from longhaul import llama
from longhaul.config import Config
from longhaul.index import read_index
from longhaul.launch import LEAST_CONTEXT
from longhaul.stats import Stats


def cached_bytes(path: Path) -> int:
    """Return how much of a file the page cache holds, as util-linux's fincore sees it."""
    command = ["fincore", "--raw", "--noheadings", "--bytes", "--output", "RES", str(path)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def evaluate(args: argparse.Namespace) -> dict[str, object]:
    """Return seconds of prompt and decode, and a digest of all logits."""
    digest = hashlib.sha256()
    with (
        llama.Model(args.model, repack=args.repack, use_mmap=not args.no_mmap) as model,
        llama.Context(model, n_ctx=LEAST_CONTEXT, n_threads=args.threads) as context,
    ):
        for _ in range(args.warm):
            context.decode([i % model.n_vocab for i in range(args.n_prompt or 64)])
            context.remove_from(0)
        cached_before = cached_bytes(args.model)
        start = time.perf_counter()
        if args.n_prompt:
            tokens = [i % model.n_vocab for i in range(args.n_prompt)]
            digest.update(context.decode(tokens).tobytes())
        middle = time.perf_counter()
        for i in range(args.n_gen):
            logits = context.decode([(args.n_prompt + i) % model.n_vocab])
            digest.update(logits.tobytes())
        end = time.perf_counter()
        cached_after = cached_bytes(args.model)
    return {
        "pp_s": middle - start,
        "tg_s": end - middle,
        "digest": digest.hexdigest(),
        "page_cache_growth_bytes": cached_after - cached_before,
    }


def counters(stats: Stats) -> dict[str, object]:
    """Return hit rate, bytes per token and shares of time of the decode, and of the prompt."""
    found: dict[str, object] = {}
    for name, c in (("pp", stats.prefill), ("tg", stats.decode)):
        found[f"{name}_read_bytes"] = c.read_bytes
        found[f"{name}_hit_rate"] = c.hit_rate
        found[f"{name}_read_bytes_per_token"] = c.read_bytes_per_token
        found[f"{name}_compute_s"] = c.compute_s
        found[f"{name}_wait_s"] = c.wait_s
        found[f"{name}_read_s"] = c.read_s
        found[f"{name}_plan_s"] = c.plan_s
        found[f"{name}_repack_s"] = c.repack_s
        found[f"{name}_disk_s"] = c.disk_s
        found[f"{name}_wait_share"] = c.wait_s / c.compute_s if c.compute_s else 0.0
        found[f"{name}_read_bytes_per_s"] = c.read_bytes / c.disk_s if c.disk_s else 0.0
        found[f"{name}_roofline_ratio"] = c.roofline_ratio
    return found


def main() -> None:
    """Read the command line, evaluate, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--slots", type=int, default=0)
    parser.add_argument("--n-prompt", type=int, default=0)
    parser.add_argument("--n-gen", type=int, default=48)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--warm", type=int, default=0)
    parser.add_argument("--repack", action="store_true")
    parser.add_argument("--no-mmap", action="store_true")
    args = parser.parse_args()
    llama.route_log()
    with ExitStack() as stack:
        result: dict[str, object] = {}
        if args.slots:
            from longhaul.engine import Engine

            moe = read_index(args.model)
            n_slots = [min(args.slots, layer.n_expert) for layer in moe.layers]
            engine = stack.enter_context(Engine(moe, n_slots, Config()))
            result = evaluate(args)
            engine.raise_kept()
            result |= counters(engine.stats())
        else:
            result = evaluate(args)
    result["peak_rss_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps(result))


if __name__ == "__main__":
    main()
