"""longhaul-bench: llama-bench's manners, while experts stream."""

import csv
import io
import json
import os
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from commands import Running, environment, run

from longhaul import bench_run
from longhaul.bench import compare, sweep
from longhaul.bench_run import Point, best_point, sweep_budgets, sweep_table, token_order
from longhaul.budget import MIB, least_budget_bytes
from longhaul.cgroups import Cgroup
from longhaul.errors import ConfigError, NativeError
from longhaul.index import read_index

COLUMNS = {
    "budget_bytes",
    "n_slots",
    "hit_rate",
    "mib_per_token",
    "wait_share",
    "roofline_ratio",
    "peak_rss_bytes",
}
QUICK = ("-p", "32", "-n", "8", "-r", "1", "-t", "2")

pytestmark = pytest.mark.usefixtures("libraries")


def rows(model: Path, *args: str | Path) -> list[dict[str, Any]]:
    """Return the rows of a run."""
    result = run("longhaul-bench", "--model", model, *QUICK, *args, "-o", "jsonl")
    assert result.code == 0, result.err
    found = [json.loads(line) for line in result.out.splitlines()]
    assert found
    return found


# --- the table ------------------------------------------------------------------------------------


def test_a_row_for_each_size_and_mode(chat_model: Path) -> None:
    found = rows(chat_model, "--longhaul-cache", "1MiB,1", "--load-mode", "longhaul,mmap")
    shape = [(r["load_mode"], r["longhaul_cache"], r["n_prompt"], r["n_gen"]) for r in found]
    assert shape == [
        ("longhaul", "1MiB", 32, 0),
        ("longhaul", "1MiB", 0, 8),
        ("longhaul", "1", 32, 0),
        ("longhaul", "1", 0, 8),
        ("mmap", "", 32, 0),
        ("mmap", "", 0, 8),
    ]
    assert all(row.keys() >= COLUMNS for row in found)
    expert_bytes = read_index(chat_model).expert_bytes
    assert [row["n_slots"] for row in found] == ["4-5", "4-5", "8", "8", "0", "0"]
    assert 0 < found[0]["budget_bytes"] <= MIB
    assert found[2]["budget_bytes"] == expert_bytes
    assert 0 < found[1]["hit_rate"] < 1
    assert found[1]["mib_per_token"] > 0
    assert 0 < found[1]["wait_share"] < 1
    assert found[1]["roofline_ratio"] >= 1
    assert found[4]["mib_per_token"] == found[4]["budget_bytes"] == 0
    assert all(row["peak_rss_bytes"] > 20 * MIB and row["avg_ts"] > 0 for row in found)


def test_warm_up_is_reuse_and_without_it_nothing_is_there(chat_model: Path) -> None:
    warm = rows(chat_model, "--longhaul-cache", "1")
    assert warm[0]["hit_rate"] > 0.8  # the last layer had less to do in the warm-up
    cold = rows(chat_model, "--longhaul-cache", "1", "--no-warmup")
    assert cold[0]["hit_rate"] == 0.0  # all of the first ubatch
    assert 0 < cold[1]["hit_rate"] < 1  # it began anew
    per_token = cold[0]["mib_per_token"] * 32
    assert 0 < per_token <= read_index(chat_model).expert_bytes / MIB * 1.001


def test_a_depth_is_not_in_the_figures(chat_model: Path) -> None:
    """Of a prompt before the test only its context is left: neither its time nor its reads."""
    args = ("--model", chat_model, "-p", "0", "-n", "4", "-r", "1", "-t", "2", "-o", "jsonl")
    result = run("longhaul-bench", *args, "--longhaul-cache", "1MiB", "-d", "0,4000", "--no-warmup")
    assert result.code == 0, result.err
    flat, deep = [json.loads(line) for line in result.out.splitlines()]
    most = read_index(chat_model).token_cycle_bytes / MIB  # that a token can read
    assert 0 < flat["mib_per_token"] <= most
    assert 0 < deep["mib_per_token"] <= most
    (kv,) = {line for line in result.lines if "planned" in line and "KV cache" in line}
    assert "KV cache 2 " in kv  # for the deeper of both


def test_a_failed_read_ends_a_bench_in_order(chat_model: Path, tmp_path: Path) -> None:
    path, trace = tmp_path / "m.gguf", tmp_path / "t.trace"
    path.write_bytes(chat_model.read_bytes())
    args = ("--model", path, "-p", "0", "-n", "4000", "-r", "9", "-t", "2", "--no-warmup")
    small = ("--longhaul-cache", "1MiB", "--longhaul-trace", trace)
    with Running("longhaul-bench", *args, *small) as running:
        running.wait_for("planned", err=True)
        time.sleep(1)
        os.utime(path, ns=(1, 1))
        result = running.end()
    assert result.code == 1
    assert "has changed since it was opened" in result.line("error:")
    assert trace.exists()  # and it is whole


def test_every_format_has_the_columns(chat_model: Path) -> None:
    args = ("--model", chat_model, *QUICK, "--longhaul-cache", "1MiB")
    text = run("longhaul-bench", *args, "-o", "md").out
    head = [cell.strip() for cell in text.splitlines()[0].split("|")]
    for name in ("lm", "budget", "slots", "hits", "MiB/t", "waiting", "x roofline", "peak RSS"):
        assert name in head
    assert "| longhaul |" in " ".join(text.split())
    table = list(csv.DictReader(io.StringIO(run("longhaul-bench", *args, "-o", "csv").out)))
    assert len(table) == 2
    assert table[0].keys() >= COLUMNS
    assert table[0]["load_mode"] == "longhaul"
    data = json.loads(run("longhaul-bench", *args, "-o", "json").out)
    assert len(data) == 2
    assert data[0].keys() >= COLUMNS
    with sqlite3.connect(":memory:") as database:
        database.executescript(run("longhaul-bench", *args, "-o", "sql").out)
        found = database.execute("SELECT load_mode, hit_rate, budget_bytes FROM llama_bench")
        kept = found.fetchall()
    assert len(kept) == 2
    assert kept[0][0] == "longhaul"
    assert kept[0][2] > 0


def test_other_modes_are_llama_benchs_own(chat_model: Path) -> None:
    found = rows(chat_model, "--load-mode", "none,dio")
    assert [row["load_mode"] for row in found] == ["none", "none", "dio", "dio"]
    assert [row["n_gen"] for row in found] == [0, 8, 0, 8]


# --- which tokens ---------------------------------------------------------------------------------


def test_the_tokens_of_a_text(chat_model: Path, tmp_path: Path) -> None:
    text = tmp_path / "t.txt"
    text.write_text("The sea is wide and the night is long. " * 10)
    args = ("--model", chat_model, *QUICK, "--longhaul-cache", "1MiB", "-o", "jsonl")
    result = run("longhaul-bench", *args, "--prompt-file", text, "--no-warmup")
    assert result.code == 0, result.err
    assert result.line("tokens") == f"tokens  of the text in {text}"
    again = run("longhaul-bench", *args, "--prompt-file", text, "--no-warmup")
    reads = [[json.loads(x)["mib_per_token"] for x in r.out.splitlines()] for r in (result, again)]
    assert reads[0] == reads[1] != []
    random = run("longhaul-bench", *args, "--no-warmup")
    assert random.line("tokens").startswith("tokens  random, which are routed unlike real ones")
    missing = run("longhaul-bench", *args, "--prompt-file", tmp_path / "none")
    assert missing.code == 1
    assert "cannot be read, or is empty" in missing.err


def test_models_that_replay_a_trace_take_ids_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = {"trace.gguf": "trace-olmoe", "other.gguf": "Some model"}

    class Found:
        def __init__(self, path: Path) -> None:
            self.name = named[path.name]

    monkeypatch.setattr(bench_run, "read_index", Found)
    assert token_order(["-m", "trace.gguf"])[1] == ["--tokens-in-order"]
    assert token_order(["-m", "other.gguf"])[1] == []
    assert token_order(["-m", "trace.gguf", "--prompt-file", "t"]) == ("of the text in t", [])
    assert token_order(["-m", "trace.gguf", "--tokens_in-order"])[1] == []


# --- what goes wrong ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (["--longhaul-cache", "0"], 2, "is 0 bytes"),
        (["--longhaul-cache", "1,lots"], 2, "'lots' is not a size"),
        (["--longhaul-policy", "none"], 2, "is none of"),
        (["--longhaul-cache", "1KiB"], 1, "below the least"),
        (["--longhaul-json", "x"], 2, "no option --longhaul-json"),
    ],
)
def test_bad_options(args: list[str], code: int, said: str, chat_model: Path) -> None:
    result = run("longhaul-bench", "--model", chat_model, *QUICK, *args)
    assert result.code == code
    assert said in result.err
    assert "Traceback" not in result.err


def test_a_dense_model_is_not_streamed(smollm2: Path) -> None:
    result = run("longhaul-bench", "--model", smollm2, *QUICK)
    assert result.code == 1
    assert "has no routed experts" in result.err
    assert rows(smollm2, "--load-mode", "mmap")[0]["load_mode"] == "mmap"


def test_help_needs_no_libraries(tmp_path: Path) -> None:
    env = environment(LONGHAUL_LIB_DIR=str(tmp_path))
    for words in (["--help"], ["sweep", "--help"], ["compare", "--help"]):
        result = run("longhaul-bench", *words, env=env)
        assert result.code == 0
        assert "longhaul-bench" in result.out
    assert "--longhaul-cache <size>" in run("longhaul-bench", "--help-llama").out


# --- sweep ----------------------------------------------------------------------------------------


def point(slot_mib: int, tokens_per_s: float) -> Point:
    return Point(slot_mib * MIB, slot_mib * MIB, slot_mib / 100, 0.5, MIB, 10.0, tokens_per_s)


def test_the_best_size_is_the_smallest_that_is_nearly_the_quickest() -> None:
    points = [point(10, 1.0), point(20, 9.0), point(40, 9.6), point(100, 10.0)]
    assert best_point(points) is points[2]
    lines = sweep_table(points, points[2])
    assert lines[4] == "| 40 | 40% | 50.0% | 1.0 | 10.0 | 9.60 | best |"
    assert lines[-1].startswith(f"best: --longhaul-cache {40 * MIB}B; 40 MiB come within 5 %")


def test_sizes_go_from_the_least_to_all(tiny: Path) -> None:
    model = read_index(tiny)
    sizes = sweep_budgets(model, 4)
    assert sizes == sorted(set(sizes))
    assert (len(sizes), sizes[0]) == (4, least_budget_bytes(model.layers))
    assert sizes[-1] == model.expert_bytes
    with pytest.raises(ConfigError, match="1 steps make no sweep"):
        sweep_budgets(model, 1)


def test_a_sweep(chat_model: Path) -> None:
    args = ("sweep", "--model", chat_model, "-n", "8", "-r", "1", "-t", "2", "--steps", "3")
    result = run("longhaul-bench", *args, "--json")
    assert result.code == 0, result.err
    found = json.loads(result.out)
    assert [round(p["resident_share"], 2) for p in found["points"]][::2] == [0.12, 1.0]
    reads = [p["read_bytes_per_token"] for p in found["points"]]
    assert reads[0] > 2 * reads[-1]
    assert found["best"] in found["points"]


Rows = list[dict[str, Any]]


def fake_rows(monkeypatch: pytest.MonkeyPatch, answer: Callable[[int], Rows]) -> list[list[str]]:
    calls: list[list[str]] = []

    def bench_rows(args: list[str], cgroup: Cgroup | None = None) -> Rows:
        calls.append(list(args))
        return answer(len(calls))

    monkeypatch.setattr(bench_run, "bench_rows", bench_rows)
    return calls


def row(tokens_per_s: float, n_prompt: int = 0) -> dict[str, Any]:
    return {
        "n_prompt": n_prompt,
        "n_gen": 0 if n_prompt else 8,
        "n_depth": 0,
        "avg_ts": tokens_per_s,
        "budget_bytes": 5,
        "hit_rate": 0.5,
        "mib_per_token": 1.0,
        "wait_share": 0.25,
    }


def invoke(command: click.Command, *args: str | Path) -> Any:
    return CliRunner().invoke(command, [str(arg) for arg in args])


def test_ctrl_c_keeps_what_was_measured(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(n: int) -> Rows:
        if n == 3:
            raise KeyboardInterrupt
        return [row(float(n))]

    fake_rows(monkeypatch, answer)
    result = invoke(sweep, "-m", tiny)
    assert result.exit_code == 0
    assert "stopped after 2 of 8 sizes" in result.stderr
    assert result.stdout.count("| 2.00 |") == 1
    assert "best: " in result.stdout


def test_sizes_that_do_not_fit_are_left_out(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_rows(monkeypatch, lambda n: [row(float(n))])

    class Advice:
        def __init__(self, *args: Any) -> None:
            self.fits = args[2].cache_bytes < 400_000

    monkeypatch.setattr(bench_run, "advise", Advice)
    result = invoke(sweep, "-m", tiny)
    assert result.exit_code == 0
    assert "do not fit and are left out" in result.stderr
    assert 0 < len(calls) < 8
    monkeypatch.setattr(Advice, "__init__", lambda self, *args: setattr(self, "fits", False))
    assert invoke(sweep, "-m", tiny).exit_code == 2


# --- compare --------------------------------------------------------------------------------------


def our_cgroups() -> set[Path]:
    """Those of this test, and of whatever else may run or has been killed."""
    return set(Path("/sys/fs/cgroup").glob("**/longhaul-*"))


def test_both_run_in_turn_under_the_same_limit(chat_model: Path, own_cgroup: Cgroup) -> None:
    before = our_cgroups()
    assert own_cgroup.folder in before
    args = ("--model", chat_model, "--longhaul-cache", "1MiB", "-p", "32", "-n", "8", "-t", "2")
    result = run("longhaul-bench", "compare", *args, "--rounds", "1", "--json")
    assert result.code == 0, result.err
    assert "MiB for both, page cache included" in result.line("limit")
    found = json.loads(result.out)
    assert [entry["test"] for entry in found] == ["pp32", "tg8"]
    assert our_cgroups() <= before
    assert all(entry["longhaul"] > 0 and entry["mmap"] > 0 for entry in found)
    assert all(entry["limit_bytes"] > 50 * MIB for entry in found)


def test_medians_and_ratio(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> Any:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(bench_run, "make_cgroup", refuse)
    monkeypatch.setattr(bench_run, "_drop_page_cache", lambda: None)
    speeds = [4.0, 1.0, 6.0, 2.0, 9.0, 30.0]  # in turn
    calls = fake_rows(monkeypatch, lambda n: [row(speeds[n - 1])])
    result = invoke(compare, "-m", tiny, "--longhaul-cache", "1MiB", "-p", "0", "-n", "8")
    assert result.exit_code == 0
    assert "limit   none: no memory cgroup can be made here (Operation not perm" in result.stderr
    assert "| tg8 | 6.00 | 2.00 | 3.00x |" in result.stdout
    modes = [call[call.index("--load-mode") + 1] for call in calls]
    assert modes == ["longhaul", "mmap"] * 3
    calls.clear()
    invoke(compare, "-m", tiny, "--longhaul-cache", "1MiB", "-p", "4", "-n", "8", "--rounds", "1")
    sizes = [call[call.index("--n-prompt") : call.index("--n-prompt") + 4] for call in calls]
    prompt, words = ["--n-prompt", "4", "--n-gen", "0"], ["--n-prompt", "0", "--n-gen", "8"]
    assert sizes == [prompt, prompt, words, words]  # each cold
    assert all("-p" not in call and "-n" not in call for call in calls)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["-n", "8,16"], "--n-gen has several values"),
        (["-n", "8", "-n", "16"], "--n-gen has several values"),
        (["-n", "8-32*2"], "'8-32*2' is not one number"),
        (["-t", "1,2"], "--threads has several values"),
        (["-pg", "16,4"], "-pg cannot be used here"),
    ],
)
@pytest.mark.parametrize("command", [sweep, compare])
def test_lists_are_refused_where_runs_are_compared(
    command: click.Command, args: list[str], said: str, tiny: Path
) -> None:
    result = invoke(command, "-m", tiny, *args)
    assert result.exit_code == 2
    assert said in result.stderr


def test_a_size_that_fails_keeps_what_was_measured(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(n: int) -> Rows:
        if n == 3:
            raise NativeError("the bench failed: killed")
        return [row(float(n))]

    fake_rows(monkeypatch, answer)
    result = invoke(sweep, "-m", tiny)
    assert result.exit_code == 1
    assert "the bench failed: killed" in result.stderr
    assert result.stdout.count("| 2.00 |") == 1


def test_a_run_that_is_ended_leaves_no_cgroup_behind(chat_model: Path, own_cgroup: Cgroup) -> None:
    args = ("compare", "--model", chat_model, "--longhaul-cache", "1MiB", "-n", "20000", "-p", "0")
    before = our_cgroups()
    with Running("longhaul-bench", *args) as running:
        running.wait_for("limit   .* MiB for both", err=True)
        running.terminate()
        assert running.end().code == 143
    assert our_cgroups() <= before


def test_a_run_that_fails_is_told(tiny: Path) -> None:
    with pytest.raises(NativeError, match=r"the bench failed: .*is 0 bytes"):
        bench_run.bench_rows(["-m", str(tiny), "--longhaul-cache", "0"])


@pytest.mark.parametrize("command", [sweep, compare])
def test_the_mode_is_not_the_users(command: click.Command, tiny: Path) -> None:
    result = invoke(command, "-m", tiny, "-lm", "mmap")
    assert result.exit_code == 2
    assert "-lm is chosen here" in result.stderr
