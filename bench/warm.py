"""What a warm start gains: time to the first token, and hits of the first 64.

    bench/warm.py MODEL --share 0.25

Decodes `--n-learn` tokens once and keeps what was needed. Then, in turn, with and without it: opens
the model, waits until the slots are filled (as a server does before its first question), evaluates
a prompt that the first run has not seen, and decodes. MODEL replays a trace: token ids in order.
"""

import argparse
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from longhaul import llama
from longhaul.budget import plan_slots
from longhaul.config import Config
from longhaul.engine import Engine
from longhaul.index import read_index
from longhaul.warm import read_uses, warming


def run(
    args: argparse.Namespace, warm: Path | None, first: int, n_prompt: int, n: int
) -> list[float]:
    """Return seconds of filling, seconds to the first token, and hits of the tokens after it."""
    subprocess.run(["sync"], check=True)
    Path("/proc/sys/vm/drop_caches").write_text("3")
    model = read_index(args.model)
    n_slots = plan_slots(model.layers, int(args.share * model.expert_bytes))
    told: list[str] = []
    with (
        Engine(model, n_slots, Config()) as engine,
        warming(engine, warm, told.append),
        llama.Model(args.model) as loaded,
        llama.Context(loaded, n_ctx=4096, n_threads=2) as context,
    ):
        start = time.perf_counter()
        if warm is not None and read_uses(warm, model)[0] is not None:
            while not any("experts read" in line for line in told):
                time.sleep(0.01)
        filled_s = time.perf_counter() - start
        start = time.perf_counter()
        context.decode([(first + i) % loaded.n_vocab for i in range(n_prompt)], last_only=True)
        first_s = time.perf_counter() - start
        for i in range(n_prompt, n_prompt + n):
            context.decode([(first + i) % loaded.n_vocab])
        return [filled_s, first_s, engine.stats().decode.hit_rate]


def main() -> None:
    """Read the command line, measure in turn, print a table of medians."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--share", type=float, default=0.25)
    parser.add_argument("--n-learn", type=int, default=150)
    parser.add_argument("--n-prompt", type=int, default=8)
    parser.add_argument("--n-gen", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    llama.route_log()
    found: dict[str, list[list[float]]] = {"without": [], "with": []}
    with tempfile.TemporaryDirectory() as folder:
        uses = Path(folder) / "uses.json"
        run(args, uses, 0, 1, args.n_learn)
        for _ in range(args.rounds):
            for name, warm in (("without", None), ("with", uses)):
                kept = uses.read_bytes()
                found[name].append(run(args, warm, args.n_learn, args.n_prompt, args.n_gen))
                uses.write_bytes(kept)  # as it was: each round starts alike
    print("| warm start | filling s | first token s | hits of the tokens after it |")
    print("|---|---:|---:|---:|")
    for name, rows in found.items():
        filled, first, hits = (statistics.median(column) for column in zip(*rows, strict=True))
        print(f"| {name} | {filled:.2f} | {first:.2f} | {hits:.1%} |")


if __name__ == "__main__":
    main()
