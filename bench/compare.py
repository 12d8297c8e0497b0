"""Compares streaming with plain mmap of an unpatched build, under the same memory limit.

    make unpatched
    bench/make_trace_model.py bench/traces/olmoe-1b-7b.jsonl olmoe.gguf
    bench/compare.py olmoe.gguf --slots 16 --reference build/unpatched/build/bin

The limit is a memory cgroup (page cache counts) of what the streaming run was planned to take.
Runs alternate, each in a process of its own with a cold page cache; figures are medians. One more
streaming run without repacking has to give the same logits as the mmap run.

If fio is installed, it reads the same file with the same block size and depth right before and
after each streaming run: its rate is held against the run's, and is the disk's rate for a second
roofline. The first one, "own", is by the rate at which the run itself read, which is the higher bar
where that is more than fio's: the pieces of a slice lie one behind the other, fio's blocks are
anywhere.

Other programs take part with --other NAME=COMMAND, run under the same limit; {model}, {n_gen} and
{slots} are filled in, and the last line they print is a JSON object with their seconds as "tg_s".
"""

import argparse
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from longhaul.budget import MIB, MemoryLimit, RunSizes, plan_memory, slots_bytes
from longhaul.cgroups import make_cgroup
from longhaul.config import Config
from longhaul.index import read_index
from longhaul.launch import LEAST_CONTEXT
from longhaul.library import openmp_environment
from longhaul.report import planned_memory

Run = dict[str, Any]
GNU_OPENMP_SPINS = "300000"  # its default, which streaming runs change
WORKER = Path(__file__).with_name("worker.py")


def planned_bytes(model: Path, n_slots: int) -> int:
    """Return what the streaming run is planned to take."""
    moe = read_index(model)
    sizes = RunSizes(LEAST_CONTEXT, 512, Config().read_buffer_bytes)
    plan = plan_memory(moe, MemoryLimit(0, 0, "none"), sizes)
    bytes_used = slots_bytes(moe.layers, [min(n_slots, layer.n_expert) for layer in moe.layers])
    return planned_memory(plan, bytes_used).total_bytes


def fio_rate(model: Path, n_jobs: int) -> float:
    """Return bytes per second of uncached random reads of the sizes that a slice is read in."""
    chunk_bytes = Config().chunk_bytes
    sizes: list[int] = []
    for layer in read_index(model).layers:
        for tensor in layer.tensors:
            whole, rest = divmod(tensor.slice_bytes, chunk_bytes)
            sizes += [chunk_bytes] * whole + ([rest] if rest else [])
    block_bytes = round(statistics.mean(sizes) / 4096) * 4096
    command = (
        f"fio --name=r --filename={shlex.quote(str(model))} --readonly --rw=randread --direct=1"
    )
    command += f" --bs={block_bytes} --numjobs={n_jobs} --thread --runtime=5 --time_based"
    command += " --group_reporting --output-format=json"
    done = subprocess.run(shlex.split(command), check=True, capture_output=True, text=True)
    return float(json.loads(done.stdout)["jobs"][0]["read"]["bw_bytes"])


def roofline_ratio(found: Run, phase: str, disk_bytes_per_s: float) -> float:
    """Return time taken per time that cannot be avoided with a disk of that rate."""
    compute_s = found[f"{phase}_compute_s"]
    read_s = found[f"{phase}_read_bytes"] / disk_bytes_per_s
    return float(compute_s / max(compute_s - found[f"{phase}_wait_s"], read_s))


def run_other(args: argparse.Namespace, limit_bytes: int, command: str) -> Run:
    """Run another program under the limit."""
    words = shlex.split(command.format(model=args.model, n_gen=args.n_gen, slots=args.slots))
    return run_cold(words, limit_bytes, dict(os.environ))


def run(
    args: argparse.Namespace, limit_bytes: int, options: list[str], lib_dir: Path | None
) -> Run:
    """Run the worker under the limit, or without one if it is 0; a cold page cache either way."""
    env = dict(os.environ)
    if lib_dir:
        env["LONGHAUL_LIB_DIR"] = str(lib_dir.resolve())
        env["GOMP_SPINCOUNT"] = GNU_OPENMP_SPINS
    else:
        is_resident = "--slots" not in options or args.slots >= args.n_expert
        env |= openmp_environment(reads=not is_resident)
    command = [sys.executable, str(WORKER), str(args.model), *options]
    command += ["--n-prompt", str(args.n_prompt), "--n-gen", str(args.n_gen)]
    command += ["--threads", str(args.threads)]
    return run_cold(command, limit_bytes, env)


def run_cold(command: list[str], limit_bytes: int, env: dict[str, str]) -> Run:
    """Run a command with a cold page cache and return the JSON object of its last line."""
    subprocess.run(["sync"], check=True)
    Path("/proc/sys/vm/drop_caches").write_text("3")
    if not limit_bytes:
        return parse(subprocess.run(command, env=env, capture_output=True, text=True))
    with make_cgroup() as cgroup:
        cgroup.set_limit(limit_bytes)
        shell = cgroup.within(command)
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
        "| run | pp tok/s | tg tok/s | hit rate | MiB/token | waiting | x roofline, own | by fio"
        " | MiB/s read | fio | page cache + MiB | peak RSS MiB |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|---|")
    for name, found in runs.items():
        pp = rate(found, args.n_prompt, "pp_s") if "pp_s" in found[0] else "-"
        cells = [name, pp, rate(found, args.n_gen, "tg_s")]

        def median(key: str, form: str, unit: float = 1, found: list[Run] = found) -> str:
            if key not in found[0]:
                return "-"
            return format(statistics.median(r[key] for r in found) / unit, form)

        cells.append(median(f"{phase}_hit_rate", ".1%"))
        cells.append(median(f"{phase}_read_bytes_per_token", ".1f", MIB))
        cells.append(median(f"{phase}_wait_share", ".0%"))
        cells.append(median(f"{phase}_roofline_ratio", ".2f"))
        cells.append(median("fio_roofline_ratio", ".2f"))
        cells.append(median(f"{phase}_read_bytes_per_s", ".0f", MIB))
        cells.append(median("fio_bytes_per_s", ".0f", MIB))
        cells.append(median("page_cache_growth_bytes", ".0f", MIB))
        cells.append(median("peak_rss_bytes", ".0f", MIB))
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
    parser.add_argument("--other", action="append", default=[], metavar="NAME=COMMAND")
    parser.add_argument("--resident", action="store_true", help="also all in memory, no limit")
    args = parser.parse_args()
    limit_bytes = planned_bytes(args.model, args.slots)
    args.n_expert = max(layer.n_expert for layer in read_index(args.model).layers)
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
    others = dict(other.split("=", 1) for other in args.other)
    runs: dict[str, list[Run]] = {name: [] for name in [*variants, *others]}
    has_fio = shutil.which("fio") is not None
    phase = "tg" if args.n_gen else "pp"
    for _ in range(args.repetitions):
        for name, (limit, options, lib_dir) in variants.items():
            is_streaming = has_fio and "--slots" in options
            fio = [fio_rate(args.model, Config().n_io_threads)] if is_streaming else []
            runs[name].append(run(args, limit, options, lib_dir))
            if fio:
                fio.append(fio_rate(args.model, Config().n_io_threads))
                found = runs[name][-1]
                found["fio_bytes_per_s"] = statistics.mean(fio)
                found["fio_roofline_ratio"] = roofline_ratio(found, phase, statistics.mean(fio))
        for name, command in list(others.items()):
            try:
                runs[name].append(run_other(args, limit_bytes, command))
            except RuntimeError as e:
                print(f"{name} is left out: {e}")
                del others[name], runs[name]
    exact = run(args, limit_bytes, slots, None)
    if exact["digest"] != runs["mmap, unpatched"][0]["digest"]:
        raise SystemExit("the logits of the streamed and of the mmap run differ")
    print_table(args, runs)
    print(f"logits of {args.n_prompt + args.n_gen} tokens equal the mmap run's, repacking off")


if __name__ == "__main__":
    main()
