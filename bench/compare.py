"""Compares streaming with plain mmap of an unpatched build, under the same memory limit.

    make unpatched
    bench/make_trace_model.py bench/traces/olmoe-1b-7b.jsonl olmoe.gguf
    bench/compare.py olmoe.gguf --slots 16 --reference build/unpatched/build/bin

The limit is a memory cgroup (page cache counts) of what the streaming run was planned to take.
Runs alternate, each in a process of its own with a cold page cache; figures are medians. One more
streaming run without repacking has to give the same logits as the mmap run.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from longhaul.budget import MIB, MemoryLimit, RunSizes, plan_memory, slots_bytes
from longhaul.config import Config
from longhaul.index import read_index
from longhaul.launch import LEAST_CONTEXT, PROCESS_BYTES
from longhaul.report import planned_memory

Run = dict[str, Any]
CGROUP_V1 = Path("/sys/fs/cgroup/memory")
GNU_OPENMP_SPINS = "300000"  # its default, which streaming runs change
WORKER = Path(__file__).with_name("worker.py")


@contextmanager
def memory_cgroup(limit_bytes: int) -> Iterator[Path]:
    """Make a cgroup with this limit, yield its list of processes; raises OSError if it cannot."""
    if CGROUP_V1.is_dir():
        folder, limit = CGROUP_V1 / f"longhaul-{uuid.uuid4().hex}", "memory.limit_in_bytes"
    else:
        folder, limit = Path("/sys/fs/cgroup") / f"longhaul-{uuid.uuid4().hex}", "memory.max"
    folder.mkdir()
    try:
        (folder / limit).write_text(str(limit_bytes))
        yield folder / "cgroup.procs"
    finally:
        folder.rmdir()


def planned_bytes(model: Path, n_slots: int) -> int:
    """Return what the streaming run is planned to take."""
    moe = read_index(model)
    sizes = RunSizes(LEAST_CONTEXT, 512, Config().read_buffer_bytes)
    plan = plan_memory(moe, MemoryLimit(0, 0, "none"), sizes)
    bytes_used = slots_bytes(moe.layers, [min(n_slots, layer.n_expert) for layer in moe.layers])
    return planned_memory(plan, bytes_used, PROCESS_BYTES).total_bytes


def run(
    args: argparse.Namespace, limit_bytes: int, options: list[str], lib_dir: Path | None
) -> Run:
    """Run the worker under the limit, or without one if it is 0; a cold page cache either way."""
    subprocess.run(["sync"], check=True)
    Path("/proc/sys/vm/drop_caches").write_text("3")
    env = dict(os.environ)
    if lib_dir:
        env["LONGHAUL_LIB_DIR"] = str(lib_dir.resolve())
        env["GOMP_SPINCOUNT"] = GNU_OPENMP_SPINS
    command = [sys.executable, str(WORKER), str(args.model), *options]
    command += ["--n-prompt", str(args.n_prompt), "--n-gen", str(args.n_gen)]
    command += ["--threads", str(args.threads)]
    if not limit_bytes:
        return parse(subprocess.run(command, env=env, capture_output=True, text=True))
    with memory_cgroup(limit_bytes) as procs:
        shell = ["sh", "-c", f'echo $$ > {procs} && exec "$@"', "sh", *command]
        return parse(subprocess.run(shell, env=env, capture_output=True, text=True))


def parse(finished: "subprocess.CompletedProcess[str]") -> Run:
    """Return what the worker printed; raises RuntimeError if it failed."""
    if finished.returncode != 0:
        raise RuntimeError(f"worker ended with {finished.returncode}: {finished.stderr[-2000:]}")
    found: Run = json.loads(finished.stdout.splitlines()[-1])
    return found


def rate(runs: list[Run], n_tokens: int, key: str) -> str:
    """Write the median rate and its spread, in tok/s."""
    if not n_tokens:
        return "-"
    rates = sorted(n_tokens / r[key] for r in runs)
    return f"{statistics.median(rates):.2f} ({rates[0]:.2f} to {rates[-1]:.2f})"


def print_table(args: argparse.Namespace, runs: dict[str, list[Run]]) -> None:
    """Print a markdown table of all variants; counters are of the decode if there is one."""
    phase = "tg" if args.n_gen else "pp"
    print(
        "| run | pp tok/s | tg tok/s | hit rate | MiB/token | waiting | x roofline | peak RSS MiB |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name, found in runs.items():
        cells = [name, rate(found, args.n_prompt, "pp_s"), rate(found, args.n_gen, "tg_s")]
        if f"{phase}_hit_rate" in found[0]:

            def median(key: str, found: list[Run] = found) -> float:
                return statistics.median(r[f"{phase}_{key}"] for r in found)

            cells.append(f"{median('hit_rate'):.1%}")
            cells.append(f"{median('read_bytes_per_token') / MIB:.1f}")
            cells.append(f"{median('wait_s') / median('compute_s'):.0%}")
            cells.append(f"{median('roofline_ratio'):.2f}")
        else:
            cells += ["-", "-", "-", "-"]
        cells.append(f"{statistics.median(r['peak_rss_bytes'] for r in found) / MIB:.0f}")
        print("| " + " | ".join(cells) + " |")


def main() -> None:
    """Read the command line, run, check equality, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--slots", type=int, default=16, help="per layer")
    parser.add_argument("--reference", type=Path, required=True, help="unpatched libraries")
    parser.add_argument("--n-prompt", type=int, default=0)
    parser.add_argument("--n-gen", type=int, default=48)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--resident", action="store_true", help="also all in memory, no limit")
    args = parser.parse_args()
    limit_bytes = planned_bytes(args.model, args.slots)
    print(f"limit {limit_bytes / MIB:.0f} MiB, {args.slots} slots, {args.threads} threads")
    slots = ["--slots", str(args.slots)]
    variants: dict[str, tuple[int, list[str], Path | None]] = {
        "longhaul": (limit_bytes, [*slots, "--repack"], None),
        "longhaul, raw": (limit_bytes, slots, None),
        "mmap, unpatched": (limit_bytes, [], args.reference),
    }
    if args.resident:
        variants["resident, defaults, unpatched"] = (0, ["--repack", "--no-mmap"], args.reference)
        variants["resident, repacked"] = (0, ["--repack", "--no-mmap"], None)
        variants["resident, raw"] = (0, ["--no-mmap"], None)
    runs: dict[str, list[Run]] = {name: [] for name in variants}
    for _ in range(args.repetitions):
        for name, (limit, options, lib_dir) in variants.items():
            runs[name].append(run(args, limit, options, lib_dir))
    exact = run(args, limit_bytes, slots, None)
    if exact["digest"] != runs["mmap, unpatched"][0]["digest"]:
        raise SystemExit("the logits of the streamed and of the mmap run differ")
    print_table(args, runs)
    print(f"logits of {args.n_prompt + args.n_gen} tokens equal the mmap run's, repacking off")


if __name__ == "__main__":
    main()
