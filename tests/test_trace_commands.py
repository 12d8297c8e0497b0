"""The commands of `longhaul trace`, as a user types them."""

import json
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result
from traces import OLMOE, QWEN3, file_bytes, header_of, record_of

from longhaul.main import main
from longhaul.slot_plan import read_slot_plan
from longhaul.trace import TraceFile
from longhaul.trace_commands import trace
from longhaul.trace_files import open_trace


def run(*words: str | Path) -> Result:
    result = CliRunner().invoke(main, ["trace", *map(str, words)])
    if result.exit_code == 0:
        assert result.stdout
    return result


def refused(result: Result, exit_code: int, *words: str) -> None:
    assert result.exit_code == exit_code
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("longhaul: error: ")
    for word in words:
        assert word in line


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A trace of 4 tokens, 2 layers of 8 experts, top-2, that was cut short."""
    records = [
        record_of(t, il, [ids])
        for t, ids in enumerate([[0, 1], [0, 2], [3, 1], [0, 2]])
        for il in (0, 1)
    ]
    path = tmp_path / "small.lht"
    path.write_bytes(file_bytes(header_of(2, 8, 2, 2**20), records) + b"cut")
    return path


def test_info_says_what_a_trace_holds(small: Path) -> None:
    result = run("info", QWEN3)
    assert result.stdout.splitlines() == [
        "model     Qwen3-30B-A3B-Q4_K_M.gguf (qwen3moe)",
        "layers    48 of 128 experts, top-6, 2654208 to 3059712 bytes each",
        "prompts   28 tokens, ubatches: 1",
        "decoded   128 tokens, ubatches: 128",
        "used      3733 of 6144 experts",
        "file      6192 records, 1.26 MiB, weights",
    ]
    result = run("info", small)
    assert "note      the last 3 bytes are a part of a record: dropped" in result.stdout
    assert "decoded   4 tokens, ubatches: 4\nused      8 of 16 experts" in result.stdout


def test_info_as_json(small: Path) -> None:
    found = json.loads(run("info", small, "--json").stdout)
    assert found["n_records"] == 8
    assert found["n_decode_tokens"] == 4
    assert found["n_expert"] == [8, 8]
    assert found["hit_rate"] is None
    assert found["notes"] == ["the last 3 bytes are a part of a record: dropped"]


def test_replay_prints_the_known_answers() -> None:
    result = run("replay", OLMOE, "--policy", "lru", "--policy", "belady", "--cache", "25%")
    assert result.stdout.splitlines() == [
        "cache  slots  share  policy   hits  misses/token",
        "25%       16  25.0%  lru     59.7%          51.6",
        "                     belady  72.3%          35.5",
    ]
    assert "longhaul: replayed 38272 expert ids 2 times, " in result.stderr


def test_replay_takes_every_policy_and_many_budgets_by_default(small: Path) -> None:
    rows = json.loads(run("replay", small, "--json").stdout)
    assert [row["policy"] for row in rows[:5]] == ["lru", "lfu", "slru", "pinned", "belady"]
    assert [row["cache"] for row in rows[::5]] == ["12.5%", "25%", "50%", "75%", "100%"]


def test_replay_says_what_the_disk_allows(small: Path) -> None:
    words = ["replay", small, "--slots", "3", "--policy", "lru", "--json", "--disk-rate", "1MiB"]
    (row,) = json.loads(run(*words).stdout)
    assert row["n_slots"] == [3, 3]
    assert row["slot_bytes"] == 3 * (2**20 + 2**20 + 1)
    assert row["misses_per_token"] == 10 / 4
    assert row["read_bytes_per_token"] == (5 * 2**20 + 5 * (2**20 + 1)) / 4
    assert row["tokens_per_s"] == pytest.approx(4 / 10, rel=1e-5)
    (slow,) = json.loads(run(*words, "--compute-ms", "5000").stdout)
    assert slow["tokens_per_s"] == pytest.approx(0.2)


def test_replay_shows_sizes_where_they_are_known(small: Path) -> None:
    shown = run("replay", small, "--slots", "3", "--policy", "lru").stdout.splitlines()
    assert (
        shown[0].split() == "cache slots share GiB policy hits misses/token MiB/token tok/s".split()
    )
    assert shown[1].split() == "3 slots 3 37.5% 0.01 lru 37.5% 2.5 2.5 409.60".split()
    shown = run("replay", OLMOE, "--slots", "3", "--expert-bytes", "1MiB").stdout.splitlines()
    assert shown[0].split()[-2:] == ["MiB/token", "tok/s"]


def test_plan_writes_what_replay_takes(tmp_path: Path) -> None:
    path = tmp_path / "slots.json"
    result = run("plan", QWEN3, "--cache", "25%", "--out", path)
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["layer", "uniform", "proposed"]
    assert lines[1].split()[:2] == ["0", "32"]
    assert len(lines) >= 1 + 48 + 2
    assert lines[49].startswith("from the first half, on the other: 65 tokens, hits ")
    plan = read_slot_plan(path)
    assert [int(line.split()[2]) for line in lines[1:49]] == list(plan.n_slots)
    words = ["replay", QWEN3, "--plan", path, "--cache", "25%", "--policy", "lru", "--json"]
    uniform, planned = json.loads(run(*words).stdout)
    assert planned["n_slots"] == list(plan.n_slots)
    assert planned["cache"] == "slots.json"
    assert planned["slot_bytes"] <= plan.budget_bytes
    assert planned["hit_rate"] > uniform["hit_rate"] > 0.5
    refused(run("replay", OLMOE, "--plan", path), 2, "slots.json", "other layers or experts")


def test_convert_writes_the_same_trace(tmp_path: Path) -> None:
    out = tmp_path / "olmoe.lht"
    result = run("convert", OLMOE, out, "--expert-bytes", "3.375MiB")
    assert result.stdout == f"{out}: 4784 records, {out.stat().st_size} bytes\n"
    found, wanted = TraceFile(out), open_trace(OLMOE)
    assert {layer.expert_bytes for layer in found.header.layers} == {3538944}
    pairs = zip(found.records(), wanted.records(), strict=True)
    assert sum((a.ids == b.ids).all() and a.ubatch == b.ubatch for a, b in pairs) == 4784


def test_a_trace_that_cannot_be_read_leaves_no_file(tmp_path: Path) -> None:
    bad, out = tmp_path / "bad.jsonl", tmp_path / "out.lht"
    bad.write_text("{\n")
    refused(run("convert", bad, out), 1, "bad.jsonl: line 1")
    assert sorted(tmp_path.iterdir()) == [bad]


@pytest.mark.parametrize(
    ("words", "exit_code", "named"),
    [
        (["info", "none.lht"], 1, ["none.lht", "No such file"]),
        (["replay", "none.lht"], 1, ["none.lht"]),
        (["replay", OLMOE, "--policy", "mru"], 2, ["--policy 'mru'", "lru"]),
        (["replay", OLMOE, "--cache", "1GiB"], 2, ["--cache '1GiB'", "--expert-bytes"]),
        (["replay", OLMOE, "--cache", "auto"], 2, ["--cache 'auto'"]),
        (["replay", OLMOE, "--cache", "x%"], 2, ["--cache 'x%'"]),
        (["replay", OLMOE, "--cache", "nan%"], 2, ["--cache 'nan%'"]),
        (["replay", OLMOE, "--cache", "101%"], 2, ["--cache '101%'"]),
        (["replay", OLMOE, "--cache", "0.01%"], 2, ["least"]),
        (["replay", OLMOE, "--slots", "0"], 2, ["--slots 0"]),
        (["replay", OLMOE, "--slots", "x"], 2, ["--slots"]),
        (["replay", OLMOE, "--compute-ms", "-1"], 2, ["--compute-ms"]),
        (["replay", OLMOE, "--disk-rate", "auto"], 2, ["--disk-rate"]),
        (["replay", OLMOE, "--expert-bytes", "?"], 2, ["?"]),
        (["replay", OLMOE, "--plan", "none.json"], 2, ["none.json"]),
        (["plan", OLMOE], 2, ["--cache"]),
        (["plan", OLMOE, "--cache", "5%"], 2, ["below the experts of one token"]),
        (["plan", OLMOE, "--cache", "25%", "--out", "/proc/x"], 2, ["/proc/x cannot be written"]),
        (["convert", OLMOE, "/proc/x"], 2, ["/proc/x cannot be written"]),
        (["plot", "use", OLMOE, "/proc/x.png"], 2, ["/proc/x.png cannot be written"]),
        (["plot", "pie", OLMOE, "x.png"], 2, ["pie"]),
        (["plot", "time", OLMOE, "x.png"], 2, ["no file of --longhaul-json"]),
        (["plot", "time", "none.json", "x.png"], 2, ["none.json cannot be read"]),
    ],
)
def test_what_cannot_be_done_is_one_line(
    words: list[str | Path],
    exit_code: int,
    named: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    refused(run(*words), exit_code, *named)


def test_an_empty_trace_has_nothing_to_replay(tmp_path: Path) -> None:
    path = tmp_path / "empty.lht"
    path.write_bytes(file_bytes(header_of(2, 8, 2), []))
    assert "decoded   0 tokens, ubatches: 0" in run("info", path).stdout
    refused(run("replay", path), 1, "empty.lht: there is nothing in it")
    refused(run("plot", "use", path, tmp_path / "x.png"), 1, "there is nothing in it")


def test_plots_want_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = run("plot", "use", OLMOE, tmp_path / "x.png")
    refused(result, 2, "plots need matplotlib: pip install longhaul[plot]")


def test_every_command_and_option_has_help() -> None:
    assert sorted(trace.commands) == ["convert", "info", "plan", "plot", "replay"]
    for name, command in trace.commands.items():
        assert command.help, name
        options = [each for each in command.params if isinstance(each, click.Option)]
        for option in options:
            assert option.help, f"{name} {option.opts[0]}"
            assert not option.help.endswith(".")
            assert option.is_flag or option.show_default, f"{name} {option.opts[0]}"
        result = run(name, "--help")
        assert result.exit_code == 0
        assert all(option.opts[0] in result.stdout for option in options)
