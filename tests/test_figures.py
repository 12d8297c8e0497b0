import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import pytest

from longhaul import figures
from longhaul.figures import RunFigures, figures_dict, write_json
from longhaul.stats import Counters, Record, Stats

ROOT = Path(figures.__file__).parents[1]
DECODE = Counters(n_ubatches=2, n_tokens=2, n_hits=3, n_misses=1, compute_s=0.5, wait_s=0.2)
RUN = RunFigures(
    model="Tiny",
    arch="qwen3moe",
    n_slots=(8, 9),
    n_ubatch=512,
    n_stages=4,
    policy="lru",
    budget_bytes=1000,
    slot_bytes=900,
    repacked_bytes=900,
    planned_bytes=5000,
    peak_rss_bytes=4000,
    stats=Stats(Counters(n_ubatches=1, n_tokens=7, compute_s=1.0), DECODE),
    records=(
        Record(1.5, True, Counters(n_ubatches=1, n_tokens=7, compute_s=1.0)),
        Record(2.5, False, Counters(n_tokens=1, n_hits=1, n_misses=1, compute_s=0.4)),
    ),
)


def test_figures_survive_json() -> None:
    found = json.loads(json.dumps(figures_dict(RUN)))
    assert found["format"] == figures.FORMAT
    assert found["model"] == "Tiny"
    assert found["n_slots"] == [8, 9]
    assert found["decode"]["tokens_per_s"] == 4.0
    assert found["decode"]["hit_rate"] == 0.75
    assert found["total"]["n_tokens"] == 9
    assert [ubatch["phase"] for ubatch in found["ubatches"]] == ["prefill", "decode"]
    assert [ubatch["end_s"] for ubatch in found["ubatches"]] == [1.5, 2.5]
    assert found["ubatches"][1]["hit_rate"] == 0.5


def test_every_counter_is_among_the_figures() -> None:
    found = figures_dict(RUN)
    assert isinstance(found["prefill"], dict)
    assert {field.name for field in fields(Counters)} <= set(found["prefill"])
    assert {field.name for field in fields(RunFigures)} - {"stats", "records"} <= set(found)


def test_the_file_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "figures.json"
    path.write_text("before")

    def fail(_: int) -> None:
        assert path.read_text() == "before"
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space"):
        patched.setattr(os, "fsync", fail)
        write_json(RUN, path)
    assert path.read_text() == "before"
    write_json(RUN, path)
    assert json.loads(path.read_text())["model"] == "Tiny"
    assert os.listdir(tmp_path) == ["figures.json"]


def test_modes_links_and_devices_stay(tmp_path: Path) -> None:
    path, link = tmp_path / "figures.json", tmp_path / "link"
    path.write_text("before")
    path.chmod(0o600)
    link.symlink_to(path)
    write_json(RUN, link)
    assert link.is_symlink()
    assert json.loads(path.read_text())["model"] == "Tiny"
    assert path.stat().st_mode & 0o777 == 0o600
    write_json(RUN, Path("/dev/null"))
    assert not Path("/dev/null").is_file()


WRITES = """
import os
import sys
import time
from itertools import count
from pathlib import Path
from longhaul.figures import RunFigures, write_json
from longhaul.stats import Counters, Record, Stats

stats = Stats(Counters(), Counters())
records = (Record(1.0, False, Counters(n_tokens=1)),) * 300
written = os.fsync
os.fsync = lambda file: (time.sleep(0.01), written(file))  # so that most kills come meanwhile
print("begin", flush=True)
for i in count():
    run = RunFigures("m", "a", (1,), 1, i, "lru", 1, 1, 0, 1, 1, stats, records)
    write_json(run, Path(sys.argv[1]))
"""


def test_a_writer_killed_at_any_time_leaves_a_whole_file_or_none(tmp_path: Path) -> None:
    """Killed some 20 times in the first 60 ms of writing a file of 170 kB again and again."""
    path, part = tmp_path / "figures.json", tmp_path / ".figures.json.part"
    rng = random.Random(0)
    n_interrupted = 0
    for is_there in [True, False] * 10:
        path.unlink(missing_ok=True)
        if is_there:
            write_json(RUN, path)
        command = [sys.executable, "-c", WRITES, str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"begin\n"
            time.sleep(rng.uniform(0, 0.06))
            writer.kill()
        assert writer.returncode == -signal.SIGKILL
        assert set(os.listdir(tmp_path)) <= {path.name, part.name}
        n_interrupted += part.exists()
        if is_there or path.exists():
            found = json.loads(path.read_text())
            assert found["format"] == figures.FORMAT
            assert len(found["ubatches"]) == (2 if found["model"] == "Tiny" else 300)
    assert n_interrupted > 0
    write_json(RUN, path)
    assert os.listdir(tmp_path) == ["figures.json"]
