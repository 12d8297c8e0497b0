"""Slots that are filled before anybody asks, with what runs before have used."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import SMALL, run
from models import truncate, write_tiny_moe
from servers import serve
from streaming import largest_difference
from test_engine import assert_consistent, evaluated_tokens, open_engine

from longhaul import llama, warm
from longhaul.config import Config
from longhaul.engine import Engine
from longhaul.errors import NativeError, ReadError
from longhaul.experts import MoeModel
from longhaul.index import read_index
from longhaul.warm import Uses, default_path, read_uses, steps, warming, write_uses

pytestmark = pytest.mark.usefixtures("libraries")

COUNTS = [[0, 5, 3, 0, 9, 0, 0, 1], [2] * 8, [0] * 8]


# --- what is kept ---------------------------------------------------------------------------------


@pytest.fixture
def model(tiny: Path) -> MoeModel:
    return read_index(tiny)


def test_uses_are_kept_and_those_before_count_half(model: MoeModel, tmp_path: Path) -> None:
    path = tmp_path / "folder" / "u.json"
    write_uses(path, model, COUNTS, None)
    found, reason = read_uses(path, model)
    assert reason == ""
    assert found is not None
    assert found.counts[0] == (0, 5, 3, 0, 9, 0, 0, 1)
    assert found.order(0) == [4, 1, 2, 7]
    assert found.order(2) == []
    write_uses(path, model, [[0] * 8, [1] * 8, [0] * 8], found)
    again, _ = read_uses(path, model)
    assert again is not None
    assert again.counts[0][4] == 4.5
    assert again.counts[1] == (2.0,) * 8


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"format": 2}',
        '{"format": 1}',
        '{"format": 1, "counts": 5}',
        '{"format": 1, "counts": [[1%s]], "fingerprint": ""}' % ("0" * 400),
        '{"format": 1, "counts": [[NaN]], "fingerprint": ""}',
        '{"format": 1, "counts": [[Infinity]], "fingerprint": ""}',
        '{"format": 1, "counts": [[-1]], "fingerprint": ""}',
    ],
)
def test_a_file_that_is_damaged_is_of_no_use(text: str, model: MoeModel, tmp_path: Path) -> None:
    path = tmp_path / "u.json"
    path.write_text(text)
    found, reason = read_uses(path, model)
    assert found is None
    assert "cannot be used" in reason


def test_uses_of_another_model_are_of_no_use(model: MoeModel, tmp_path: Path) -> None:
    path = tmp_path / "u.json"
    assert read_uses(path, model) == (None, f"{path} is not there yet")
    write_uses(path, model, COUNTS, None)
    other = read_index(write_tiny_moe(tmp_path / "o.gguf", n_ff=128))
    assert other.fingerprint != model.fingerprint
    assert read_uses(path, other) == (None, f"{path} is of another model")
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, "counts": [[1]]}))
    assert read_uses(path, model)[0] is None


def test_steps_take_layers_in_turn_the_most_needed_first(
    model: MoeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    uses = Uses("", tuple(tuple(map(float, layer)) for layer in COUNTS))
    monkeypatch.setattr(warm, "STEP_BYTES", 2 * model.layers[0].expert_bytes)
    assert list(steps(model, uses, (3, 5, 8))) == [
        (0, [4, 1]),
        (1, [0, 1]),
        (0, [2]),
        (1, [2, 3]),
        (1, [4]),
    ]


# --- slots ----------------------------------------------------------------------------------------


def test_slots_are_filled_between_ubatches_and_change_no_logit(tiny: Path) -> None:
    tokens = evaluated_tokens(128, 12)
    with llama.Model(tiny) as loaded, llama.Context(loaded) as context:
        wanted = context.decode(tokens)
    with open_engine(read_index(tiny), 4) as engine:
        assert not engine.is_ready
        with pytest.raises(NativeError, match="once the model is there"):
            engine.fill(0, [1], 4)
        with llama.Model(tiny) as loaded:
            assert not engine.is_ready
            with llama.Context(loaded) as context:
                assert engine.is_ready
                assert engine.fill(0, [7, 3, 5, 1, 2], 9) == 4
                assert engine.fill(1, [6], 1) == 1
                assert engine.fill(1, [6], 1) == 0  # it is there
                assert set(engine.resident(0)) == {7, 3, 5, 1}
                assert_consistent(engine)
                assert largest_difference(context.decode(tokens), wanted) == 0.0
                assert_consistent(engine)
        assert not engine.is_ready


def test_what_is_filled_is_a_hit(tiny: Path) -> None:
    with open_engine(read_index(tiny), 8) as engine:
        with llama.Model(tiny) as loaded, llama.Context(loaded) as context:
            for index in range(3):
                assert engine.fill(index, range(8), 8) == 8
            context.decode([1, 2, 3])
            assert engine.stats().total.n_misses == 0
            assert engine.stats().total.n_hits > 0
            assert engine.stats().total.read_bytes == 0


def test_a_failed_fill_leaves_the_slots_free(tmp_path: Path) -> None:
    path = write_tiny_moe(tmp_path / "m.gguf")
    with open_engine(read_index(path), 4) as engine:
        with llama.Model(path, use_mmap=False) as loaded, llama.Context(loaded):
            truncate(path, -1)
            with pytest.raises(ReadError, match="has changed"):
                engine.fill(0, [1, 2], 4)
            assert engine.resident(0) == {}
            assert_consistent(engine)


def test_needs_are_counted_while_decoding(tiny: Path) -> None:
    with open_engine(read_index(tiny), 4) as engine:
        with llama.Model(tiny) as loaded, llama.Context(loaded) as context:
            context.decode([1, 2, 3, 4])
            assert not any(map(any, engine.n_needed()))  # a prompt is no measure
            for token in (5, 6, 7):
                context.decode([token])
        assert [sum(layer) for layer in engine.n_needed()] == [6, 6, 6]  # top-2, after all is freed


# --- runs -----------------------------------------------------------------------------------------


def wait_until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_warming_fills_slots_while_nothing_is_computed(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "u.json"
    lines: list[str] = []
    model = read_index(tiny)
    write_uses(path, model, COUNTS, None)
    with Engine(model, [4] * 3, Config()) as engine, warming(engine, path, lines.append):
        with llama.Model(tiny) as loaded, llama.Context(loaded) as context:
            wait_until(lambda: len(lines) == 2)
            assert [set(engine.resident(i)) for i in range(3)] == [
                {4, 1, 2, 7},
                {0, 1, 2, 3},
                set(),
            ]
            for token in (1, 2, 3):
                context.decode([token])
    assert lines == [
        f"warm    the experts that were used most, by {path}",
        "warm    8 experts read",
    ]
    kept, _ = read_uses(path, model)
    assert kept is not None
    assert sum(map(sum, kept.counts)) == 3 * 3 * 2 + 0.5 * sum(map(sum, COUNTS))


def test_a_server_is_warm_before_the_first_question(chat_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "u.json"
    answers: list[str] = []
    hits: list[int] = []
    for _ in range(2):
        with serve(chat_model, "--longhaul-warm", path, "--parallel", "1") as server:
            server.running.wait_for("warm    ([0-9]+ experts read|.* is not there yet)", err=True)
            answers.append(server.complete("The sea is wide", 48).json()["content"])
            hits.append(server.state()["prefill"]["n_hits"])
            server.running.terminate()
            assert server.running.end().code == 0
    assert answers[0] == answers[1]
    assert len(answers[0]) > 40
    assert hits[0] == 0 < hits[1]


def test_auto_keeps_a_file_for_each_model(
    chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    args = ("-p", "Hello", "-n", "4", "--single-turn", "--temp", "0", "--ignore-eos")
    result = run("longhaul-cli", "--model", chat_model, *SMALL, *args, "--longhaul-warm", "auto")
    assert result.code == 0, result.err
    kept = default_path(read_index(chat_model))
    assert kept.parent == tmp_path / "longhaul"
    assert sum(map(sum, json.loads(kept.read_text())["counts"])) > 0
    assert result.line("warm") == f"warm    {kept} is not there yet"
