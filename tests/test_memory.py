"""The budget is a promise: peak memory is what was planned, in a cgroup of exactly that size."""

import json
import re
from pathlib import Path

import pytest
from commands import run
from models import write_tiny_moe
from servers import SIZES, serve

from longhaul.budget import MIB, least_budget_bytes
from longhaul.cgroups import Cgroup
from longhaul.index import read_index

ALLOWED_BYTES = 64 * MIB
TEXT = "The sea is wide and the night is long, so they sat down and told stories. "

pytestmark = pytest.mark.usefixtures("libraries")


def planned_bytes(*args: str | Path) -> int:
    """Return what a run is planned to take."""
    result = run("longhaul", "plan", *args, "--json")
    assert result.code == 0, result.out + result.err
    return int(json.loads(result.out)["planned_bytes"])


@pytest.mark.parametrize(
    ("n_ctx", "n_ubatch", "is_whole", "mode"),
    [(512, 1, False, "mmap"), (512, 512, True, "none"), (2048, 512, False, "none")],
)
def test_a_run_takes_what_was_planned(
    n_ctx: int, n_ubatch: int, is_whole: bool, mode: str, small_demo: Path, own_cgroup: Cgroup
) -> None:
    model = read_index(small_demo)
    budget = model.expert_bytes if is_whole else least_budget_bytes(model.layers)
    args = ["--model", small_demo, "--longhaul-cache", f"{budget}B", "--load-mode", mode]
    args += ["--ctx-size", str(n_ctx), "--ubatch-size", str(n_ubatch)]
    planned = planned_bytes(*args)
    own_cgroup.set_limit(planned)
    text = TEXT * (20 if n_ubatch > 1 else 2)
    result = run(
        "longhaul", "completion", *args, "-p", text, "-n", "8", "-no-cnv", "-t", "2",
        "--temp", "0", "--ignore-eos", cgroup=own_cgroup,
    )  # fmt: skip
    assert result.code == 0, result.err
    assert len(result.out) > len(text)
    assert own_cgroup.n_oom_kills == 0
    memory = [line for line in result.lines if line.startswith("memory")]
    assert f"memory  {planned / MIB:.0f} MiB planned" in memory[0]
    peak = int(re.findall(r"peak RSS (\d+) MiB", memory[-1])[0]) * MIB
    assert budget < peak <= planned + ALLOWED_BYTES


def test_a_server_takes_what_was_planned(small_demo: Path, own_cgroup: Cgroup) -> None:
    args = ["--model", small_demo, "--longhaul-cache", "100MiB", *SIZES]
    planned = planned_bytes(*args)
    own_cgroup.set_limit(planned + ALLOWED_BYTES)  # its page is a process of its own
    cache = ("--longhaul-cache", "100MiB")
    with serve(small_demo, cache=cache, cgroup=own_cgroup) as server:
        for i in range(2):
            assert server.complete(f"{i} " + TEXT * 8, 8).status_code == 200
        peak = server.state()["memory"]["peak_rss_bytes"]
    assert own_cgroup.n_oom_kills == 0
    assert 100 * MIB < peak <= planned + ALLOWED_BYTES


def test_a_budget_is_honoured_to_the_byte(tmp_path: Path) -> None:
    path = write_tiny_moe(tmp_path / "m.gguf")
    (each,) = {layer.expert_bytes for layer in read_index(path).layers}
    for n_bytes, n_slots in ((12 * each, 12), (12 * each - 1, 11)):
        args = (path, "--longhaul-cache", f"{n_bytes}B", "-c", "256", "--json")
        found = json.loads(run("longhaul", "plan", *args).out)
        assert sum(layer["n_slots"] for layer in found["layers"]) == n_slots
        assert sum(layer["slot_bytes"] for layer in found["layers"]) == n_slots * each
    result = run("longhaul", "plan", path, "--longhaul-cache", f"{3 * each - 1}B", "-c", "256")
    assert result.code == 1


def test_too_little_memory_for_the_slots_is_an_error_at_once(
    small_demo: Path, own_cgroup: Cgroup
) -> None:
    """With a cache of automatic size, in a cgroup that leaves none."""
    own_cgroup.set_limit(400 * MIB)
    args = ("--model", small_demo, "-c", "512", "-p", "x", "-n", "1", "-no-cnv")
    result = run("longhaul", "completion", *args, cgroup=own_cgroup)
    assert result.code == 2
    assert "GiB of memory are missing" in result.err
    assert str(own_cgroup.folder) in result.err
    assert own_cgroup.n_oom_kills == 0
