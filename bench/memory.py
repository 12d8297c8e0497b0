"""Holds runs to what was planned: peak memory, in a cgroup of exactly the planned size.

    bench/memory.py MODEL
    bench/memory.py MODEL --n-ctx 512 --n-ubatch 512 --share 0.25 --load-mode mmap

For each combination of context, ubatch, share of the experts that have slots (0: one slot a layer)
and load mode, plans a run as `longhaul plan` does, gives it a memory cgroup of that size (page
cache counts), evaluates a prompt of at least one ubatch and some tokens, and prints the kernel's
peak of resident memory beside the plan. MODEL needs words, such as the demo model.
"""

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from longhaul.budget import MIB, least_budget_bytes
from longhaul.cgroups import make_cgroup
from longhaul.index import read_index

PROMPT_TEXT = "The sea is wide and the night is long, so they sat down and told stories. "
N_GEN = 8
MAX_PROMPT = 4096
ALLOWED_BYTES = 64 * MIB  # above the plan


def command(*args: str) -> list[str]:
    """Return the command line of `longhaul`."""
    code = "import sys; sys.argv[0] = 'longhaul'; import longhaul.main as m; m.main()"
    return [sys.executable, "-c", code, *args]


def planned_bytes(args: list[str]) -> int:
    """Return what `longhaul plan` plans; raises RuntimeError if it does not fit."""
    done = subprocess.run(command("plan", *args, "--json"), capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(done.stdout + done.stderr)
    return int(json.loads(done.stdout)["planned_bytes"])


def measure(model: Path, n_ctx: int, n_ubatch: int, share: float, mode: str) -> tuple[str, bool]:
    """Run one combination; return its row, and whether the plan was kept."""
    layers = read_index(model).layers
    least = least_budget_bytes(layers)
    budget = max(least, int(share * sum(layer.total_bytes for layer in layers)))
    n_prompt = min(n_ctx - 2 * N_GEN, max(2 * n_ubatch, 64), MAX_PROMPT)
    args = ["--model", str(model), "--longhaul-cache", f"{budget}B", "--load-mode", mode]
    args += ["--ctx-size", str(n_ctx), "--ubatch-size", str(n_ubatch)]
    args += ["--batch-size", str(max(n_ubatch, 2048))]
    limit = planned_bytes(args)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as prompt, make_cgroup() as cgroup:
        cgroup.set_limit(limit)
        prompt.write(PROMPT_TEXT * (n_prompt // 18))  # tokens of the text
        prompt.flush()
        args += ["--file", prompt.name, "-n", str(N_GEN), "-no-cnv", "--temp", "0", "--ignore-eos"]
        words = cgroup.within(command("completion", *args))
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=dict(os.environ)
        )
        killed = cgroup.n_oom_kills
    found = re.findall(r"peak RSS (\d+) MiB", done.stderr)
    peak = int(found[0]) * MIB if found else 0
    tokens = re.findall(r"^longhaul: prompt  (\d+)", done.stderr, re.MULTILINE)
    kept = done.returncode == 0 and not killed and 0 < peak <= limit + ALLOWED_BYTES
    cells = [str(n_ctx), str(n_ubatch), f"{budget / MIB:.0f}", mode, tokens[0] if tokens else "-"]
    cells += [f"{limit / MIB:.0f}", f"{peak / MIB:.0f}", f"{(peak - limit) / MIB:+.0f}"]
    cells += [str(killed), "kept" if kept else f"NOT KEPT, exit code {done.returncode}"]
    if not kept:
        print(done.stderr[-2000:], file=sys.stderr)
    return "| " + " | ".join(cells) + " |", kept


def main() -> None:
    """Read the command line, measure, print a table; exit code 1 if a plan was not kept."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--n-ctx", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--n-ubatch", type=int, nargs="+", default=[1, 512, 2048])
    parser.add_argument("--share", type=float, nargs="+", default=[0.0, 0.25, 1.0])
    parser.add_argument("--load-mode", nargs="+", default=["mmap", "none"])
    args = parser.parse_args()
    print(
        "| context | ubatch | cache MiB | load mode | prompt | planned MiB | peak RSS MiB | over"
        " | OOM kills | |\n|---|---|---|---|---|---|---|---|---|---|"
    )
    all_kept = True
    for shape in itertools.product(args.n_ctx, args.n_ubatch, args.share, args.load_mode):
        row, kept = measure(args.model, *shape)
        all_kept &= kept
        print(row, flush=True)
    raise SystemExit(0 if all_kept else 1)


if __name__ == "__main__":
    main()
