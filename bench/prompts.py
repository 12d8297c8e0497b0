"""Times prompts at several budgets against the resident model, in one process.

    bench/make_trace_model.py bench/traces/olmoe-1b-7b.jsonl olmoe.gguf
    bench/prompts.py olmoe.gguf

Each repetition evaluates a prompt with the resident model and then with each number of slots, both
in a new context and with no expert read yet. Figures are medians; the logits have to be equal. Then
it shows what a long prompt does to the hit rate of the tokens that follow. Needs memory for the
whole model beside the slots.
"""

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import numpy as np

from longhaul import llama
from longhaul.config import Config
from longhaul.engine import Engine
from longhaul.experts import MoeModel
from longhaul.index import read_index
from longhaul.stats import Counters

SHARES = (0.06, 0.12, 0.25, 0.5, 1.0)
N_DECODED = 64


@dataclass(frozen=True)
class Run:
    """One prompt: its seconds, and what the engine counted."""

    seconds: float
    counters: Counters


def slots_of(moe: MoeModel, share: float) -> list[int]:
    """Return slots per layer for a share of the experts, at least one."""
    return [max(1, round(share * layer.n_expert)) for layer in moe.layers]


def evaluate(context: llama.Context, tokens: Sequence[int]) -> tuple[float, "np.ndarray"]:
    """Return seconds and logits (n_tokens, n_vocab)."""
    start = perf_counter()
    logits = context.decode(tokens)
    return perf_counter() - start, logits


def streamed(
    args: argparse.Namespace, moe: MoeModel, share: float, tokens: Sequence[int]
) -> tuple[Run, "np.ndarray"]:
    """Evaluate a prompt with nothing in the slots."""
    with (
        Engine(moe, slots_of(moe, share), Config()) as engine,
        llama.Model(args.model, repack=not args.no_repack) as model,
        llama.Context(model, n_ctx=args.n_ctx, n_threads=args.threads) as context,
    ):
        seconds, logits = evaluate(context, tokens)
        engine.raise_kept()
        return Run(seconds, engine.stats().prefill), logits


def print_prompts(args: argparse.Namespace, moe: MoeModel, trace: Sequence[int]) -> None:
    """Print a markdown table: a row for each length and share of slots."""
    print(
        "| prompt | slots | tok/s | of resident | compute | reads | repacking | planning | read |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    with llama.Model(args.model, repack=not args.no_repack, use_mmap=False) as model:
        for n_prompt in args.n_prompt:
            tokens = [trace[i % len(trace)] for i in range(n_prompt)]
            resident: list[float] = []
            runs: dict[float, list[Run]] = {share: [] for share in args.share}
            for _ in range(args.repetitions):
                with llama.Context(model, n_ctx=args.n_ctx, n_threads=args.threads) as context:
                    seconds, wanted = evaluate(context, tokens)
                resident.append(seconds)
                for share in args.share:
                    run, logits = streamed(args, moe, share, tokens)
                    if not np.array_equal(logits, wanted):
                        raise SystemExit(f"{n_prompt} tokens at {share:.0%}: the logits differ")
                    runs[share].append(run)
            base = statistics.median(resident)
            print(f"| {n_prompt} | resident | {n_prompt / base:.1f} | | | | | | |")
            for share in args.share:
                print_run(n_prompt, share, moe, base, runs[share])


def print_run(n_prompt: int, share: float, moe: MoeModel, base: float, runs: list[Run]) -> None:
    """Print a row: the median run, and how its time is made up."""
    run = sorted(runs, key=lambda r: r.seconds)[len(runs) // 2]
    c = run.counters
    parts = [run.seconds - c.wait_s, c.read_s, c.repack_s, c.plan_s]
    cells = [str(n_prompt), f"{share:.0%}", f"{n_prompt / run.seconds:.1f}"]
    cells += [f"{base / run.seconds:.2f}x", *(f"{part:.2f} s" for part in parts)]
    cells.append(f"{c.read_bytes / moe.expert_bytes:.2f} of the experts")
    print("| " + " | ".join(cells) + " |", flush=True)


def hit_rate_after(
    args: argparse.Namespace, moe: MoeModel, trace: Sequence[int], share: float, n_prompt: int
) -> float:
    """Decode some tokens, evaluate a prompt, and return the hit rate of the tokens after it."""
    before, after = trace[:N_DECODED], trace[N_DECODED : 2 * N_DECODED]
    rest = trace[2 * N_DECODED :]
    with (
        Engine(moe, slots_of(moe, share), Config()) as engine,
        llama.Model(args.model, repack=not args.no_repack) as model,
        llama.Context(model, n_ctx=args.n_ctx, n_threads=args.threads) as context,
    ):
        for token in before:
            context.decode([token])
        if n_prompt:
            context.decode([rest[i % len(rest)] for i in range(n_prompt)])
        start = engine.stats()
        for token in after:
            context.decode([token])
        engine.raise_kept()
        return (engine.stats() - start).decode.hit_rate


def main() -> None:
    """Read the command line, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--n-prompt", type=int, nargs="+", default=[64, 256, 512, 1024])
    parser.add_argument("--share", type=float, nargs="+", default=list(SHARES), help="of slots")
    parser.add_argument("--n-tokens", type=int, default=299, help="token ids of the trace")
    parser.add_argument("--n-ctx", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--no-repack", action="store_true")
    args = parser.parse_args()
    llama.route_log()
    moe = read_index(args.model)
    trace = range(args.n_tokens)
    print_prompts(args, moe, trace)
    for share in args.share:
        without, with_prompt = (hit_rate_after(args, moe, trace, share, n) for n in (0, 1000))
        print(
            f"{share:.0%} of the slots: hit rate of {N_DECODED} tokens {without:.1%},"
            f" after a prompt of 1000 tokens {with_prompt:.1%}"
        )


if __name__ == "__main__":
    main()
