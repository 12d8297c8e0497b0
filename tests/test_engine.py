"""The join with llama.cpp: what is read and when, what fails and how."""

import errno
import gc
import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from models import Type, truncated, write_tiny_moe
from streaming import Recipe, evaluate, largest_difference, stream

from longhaul import llama
from longhaul.budget import plan_slots, slots_bytes
from longhaul.config import Config
from longhaul.engine import SWITCH_INTERVAL_S, Engine
from longhaul.errors import ConfigError, DecodeError, ModelError, NativeError, ReadError
from longhaul.experts import MoeModel
from longhaul.index import read_index
from longhaul.native import Stream
from longhaul.planner import StagedPlan, plan_stages
from longhaul.residency import Residency
from longhaul.stats import Counters
from longhaul.trace import TraceFile

SHRINK = Config(ubatch="shrink")

pytestmark = pytest.mark.usefixtures("libraries")


F32_EXPERTS = {"*_exps.weight": Type.F32}


def open_engine(model: MoeModel, n_slots: int, config: Config | None = None) -> Engine:
    return Engine(model, [n_slots] * len(model.layers), config or Config())


def assert_consistent(engine: Engine) -> None:
    for index, residency in enumerate(engine._residencies):
        resident = engine.resident(index)
        assert {e: s for e, s in enumerate(residency.slot_of) if s >= 0} == resident
        free = set(residency.free)
        assert len(free) == len(residency.free)
        assert free.isdisjoint(resident.values())
        assert free | set(resident.values()) == set(range(len(residency.expert_of)))


def drop_from_page_cache(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cached_pages(path: Path, offset: int, size: int) -> int:
    """Count pages of a range that are in the page cache and lie in it as a whole."""
    page = mmap.PAGESIZE
    first, last = -(-offset // page), (offset + size) // page
    code = (
        "import ctypes, mmap, sys\n"
        "path, first, last = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "libc.mmap.restype = ctypes.c_void_p\n"
        "kinds = [ctypes.c_int] * 3 + [ctypes.c_long]\n"
        "libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *kinds]\n"
        "libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]\n"
        "file = open(path, 'rb')\n"
        "size = (last - first) * mmap.PAGESIZE\n"
        "address = libc.mmap(None, size, 1, 1, file.fileno(), first * mmap.PAGESIZE)\n"
        "pages = (ctypes.c_ubyte * (last - first))()\n"
        "assert libc.mincore(address, size, pages) == 0\n"
        "print(sum(p & 1 for p in pages))\n"
    )
    command = [sys.executable, "-c", code, str(path), str(first), str(last)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def cached_expert_pages(model: MoeModel) -> int:
    return sum(
        cached_pages(model.path, tensor.offset, tensor.n_expert * tensor.slice_bytes)
        for layer in model.layers
        for tensor in layer.tensors
    )


def test_no_expert_byte_is_read_before_the_first_decode(tmp_path: Path) -> None:
    path = write_tiny_moe(tmp_path / "m.gguf", n_embd=128, n_ff=512)
    model = read_index(path)
    drop_from_page_cache(path)
    if cached_expert_pages(model):
        pytest.skip("this file system does not let go of cached pages")
    with open_engine(model, 4) as engine:
        with llama.Model(path, use_mmap=True) as loaded, llama.Context(loaded) as context:
            context.warm_up()
            assert engine.stats().total.read_bytes == 0
            assert engine.stats().total.n_ubatches == 0
            assert cached_expert_pages(model) == 0
            context.decode([1])
            assert engine.stats().total.read_bytes > 0


def test_reads_leave_the_page_cache_alone(tmp_path: Path) -> None:
    path = write_tiny_moe(tmp_path / "m.gguf", n_embd=128, n_ff=512)
    model = read_index(path)
    drop_from_page_cache(path)
    with open_engine(model, 2) as engine:
        if engine.pool.modes != ["direct"]:
            pytest.skip(f"this file system reads in mode {engine.pool.modes[0]}")
        with llama.Model(path) as loaded, llama.Context(loaded) as context:
            loading = cached_expert_pages(model)
            context.decode(list(range(60)))
        assert engine.stats().total.read_bytes > model.layers[0].total_bytes
        assert cached_expert_pages(model) == loading


@pytest.mark.parametrize("budget", [150_000, 777_777, 1_234_567, 10**9])
def test_slot_tensors_never_exceed_the_budget(budget: int, tiny: Path) -> None:
    model = read_index(tiny)
    budget = max(budget, slots_bytes(model.layers, [2] * 3))
    n_slots = plan_slots(model.layers, budget)
    with Engine(model, n_slots, Config()) as engine, llama.Model(tiny):
        total = engine.slot_bytes().all
    assert 0 < total <= budget
    assert total == slots_bytes(model.layers, n_slots)


def test_ubatch_keeps_its_size_by_default(tiny: Path) -> None:
    model = read_index(tiny)
    for n_slots in (1, 5, 8):
        with open_engine(model, n_slots), llama.Model(tiny) as loaded:
            with llama.Context(loaded, n_ubatch=64) as context:
                assert context.n_ubatch == 64


def test_ubatch_is_shrunk_when_asked(tiny: Path) -> None:
    model = read_index(tiny)
    for n_slots, n_ubatch in ((2, 1), (3, 1), (5, 2), (7, 3), (8, 64)):
        with open_engine(model, n_slots, SHRINK), llama.Model(tiny) as loaded:
            with llama.Context(loaded, n_ubatch=64) as context:
                assert context.n_ubatch == n_ubatch


def test_effective_ubatch_is_logged(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    llama.route_log()
    with caplog.at_level("INFO", logger="longhaul.llama"), open_engine(read_index(tiny), 5, SHRINK):
        with llama.Model(tiny) as loaded, llama.Context(loaded, n_ubatch=64):
            pass
    lines = [text for text in caplog.messages if "n_ubatch" in text]
    assert lines[0] == (
        "longhaul: n_ubatch = 2 of 64 asked for, 5 to 5 slots per layer, up to 1 stages per layer,"
        " 0 % of the slots' bytes repacked"
    )
    assert lines[1].split()[-2:] == ["=", "2"]  # llama.cpp's own


def test_stages_are_logged(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    llama.route_log()
    with caplog.at_level("INFO", logger="longhaul.llama"), open_engine(read_index(tiny), 5):
        with llama.Model(tiny) as loaded, llama.Context(loaded, n_ubatch=64):
            pass
    expected = "longhaul: n_ubatch = 64 of 64 asked for, 5 to 5 slots per layer, up to 6 stages"
    assert any(text.startswith(expected) for text in caplog.messages)


def test_counters_tell_prefill_from_decode(tiny: Path) -> None:
    stats = stream(tiny, 4, Recipe(n_prompt=10, n_greedy=3)).stats
    assert stats is not None
    assert (stats.prefill.n_tokens, stats.decode.n_tokens) == (10, 3)
    assert (stats.prefill.n_ubatches, stats.decode.n_ubatches) == (1, 3)
    needed = stats.decode.n_hits + stats.decode.n_misses
    assert needed == 3 * 3 * 2  # tokens x layers x experts, distinct in a ubatch of one
    assert stats.total.n_misses - stats.total.n_evictions <= 3 * 4


def test_every_expert_is_read_at_most_once_when_all_have_slots(tiny: Path) -> None:
    model = read_index(tiny)
    stats = stream(tiny, 8, Recipe(n_prompt=100, n_greedy=20)).stats
    assert stats is not None
    assert stats.total.n_evictions == 0
    assert 0 < stats.total.read_bytes <= model.expert_bytes
    assert stats.decode.read_bytes == stats.decode.n_misses * model.layers[0].expert_bytes


@pytest.mark.parametrize("n_slots", [2, 3, 5, 7])
def test_a_prompt_reads_no_more_than_one_copy_of_the_experts(n_slots: int, tiny: Path) -> None:
    model = read_index(tiny)
    stats = stream(tiny, n_slots, Recipe(n_prompt=200, n_greedy=0)).stats
    assert stats is not None
    assert 0 < stats.prefill.read_bytes <= model.expert_bytes


@pytest.mark.parametrize("config", [Config(), SHRINK], ids=["staged", "shrunk"])
def test_failed_read_fails_the_decode_and_nothing_else(config: Config, tmp_path: Path) -> None:
    path = write_tiny_moe(tmp_path / "m.gguf")
    model = read_index(path)
    last = max(t.offset for layer in model.layers for t in layer.tensors)
    n_ubatch = 2 if config.ubatch == "shrink" else 12
    wanted = evaluate(path, Recipe(n_prompt=12, n_greedy=0, n_ubatch=n_ubatch)).logits
    with open_engine(model, 4, config) as engine:
        with llama.Model(path, use_mmap=False) as loaded, llama.Context(loaded) as context:
            tokens = evaluated_tokens(loaded.n_vocab, 12)
            with truncated(path, last + 5):
                with pytest.raises(DecodeError):
                    context.decode(tokens)
            with pytest.raises(ReadError, match=r"m\.gguf has changed since it was opened"):
                engine.raise_kept()
            engine.raise_kept()  # raised once
            assert engine.stats().total.n_errors == 1
            assert_consistent(engine)
            again = context.decode(tokens)
            assert_consistent(engine)
            assert largest_difference(again, wanted) == 0.0


def evaluated_tokens(n_vocab: int, n: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(7).integers(0, n_vocab, n)]


@pytest.mark.parametrize(("name", "tokens"), [("plan", [1]), ("plan_stages", [1, 2, 3, 4])])
def test_exception_in_the_planner_fails_the_decode(
    name: str, tokens: list[int], tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object) -> None:
        raise KeyError("planner")

    with open_engine(read_index(tiny), 4) as engine:
        with llama.Model(tiny) as loaded, llama.Context(loaded) as context:
            monkeypatch.setattr(f"longhaul.engine.{name}", broken)
            with pytest.raises(DecodeError):
                context.decode(tokens)
            with pytest.raises(KeyError, match="planner"):
                engine.raise_kept()
            monkeypatch.undo()
            assert context.decode(tokens).shape == (len(tokens), loaded.n_vocab)
            engine.raise_kept()


@pytest.mark.parametrize("damage", ["missing", "twice", "stage", "slot"])
def test_wrong_plan_is_refused_before_anything_is_computed(
    damage: str, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(*args: object) -> StagedPlan:
        staged = plan_stages(*args)  # type: ignore[arg-type]
        first, *rest = staged.places
        places = {
            "missing": tuple(rest),
            "twice": (*staged.places, first),
            "stage": (first._replace(stage=99), *rest),
            "slot": (first._replace(slot=99), *rest),
        }[damage]
        return replace(staged, places=places)

    with open_engine(read_index(tiny), 4) as engine:
        with llama.Model(tiny) as loaded, llama.Context(loaded) as context:
            monkeypatch.setattr("longhaul.engine.plan_stages", damaged)
            with pytest.raises(DecodeError):
                context.decode([1, 2, 3, 4])
            with pytest.raises(NativeError, match="layer 0"):
                engine.raise_kept()
            assert_consistent(engine)


def test_where_all_is_resident_no_python_runs(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    for name in ("_on_plan", "_on_begun", "_on_ahead", "_on_complete"):
        original = getattr(Engine, name)

        def note(*args: object, original: Callable[..., None] = original, name: str = name) -> None:
            called.append(name)
            original(*args)

        monkeypatch.setattr(Engine, name, note)
    with (
        open_engine(read_index(tiny), 8) as engine,
        llama.Model(tiny) as loaded,
        llama.Context(loaded) as context,
    ):
        context.decode(list(range(60)))
        assert [len(engine.resident(i)) for i in range(3)] == [8, 8, 8]
        assert {"_on_plan", "_on_begun", "_on_complete"} <= set(called)
        called.clear()
        for token in range(20):
            context.decode([token])
        context.decode(list(range(20)))
        assert called == []
        assert engine.stats().decode.n_hits > 20
        assert engine.stats().decode.n_misses == 0


def test_a_model_that_is_loaded_again_starts_empty(tiny: Path) -> None:
    with open_engine(read_index(tiny), 4) as engine:
        for _ in range(2):
            with llama.Model(tiny) as loaded, llama.Context(loaded) as context:
                assert all(engine.resident(i) == {} for i in range(3))
                context.decode([1, 2])
                assert all(engine.resident(i) for i in range(3))


def test_two_contexts_share_the_slots(tiny: Path) -> None:
    recipe = Recipe(n_prompt=10, n_greedy=0, n_ubatch=2)
    tokens = evaluated_tokens(128, 10)
    wanted = evaluate(tiny, recipe).logits
    with open_engine(read_index(tiny), 4), llama.Model(tiny) as loaded:
        with llama.Context(loaded) as a, llama.Context(loaded) as b:
            got = [a.decode(tokens), b.decode(tokens)]
    for logits in got:
        assert largest_difference(logits, wanted) == 0.0


def test_second_load_of_a_streamed_model_is_refused(tiny: Path) -> None:
    from longhaul.errors import ModelError

    with open_engine(read_index(tiny), 4), llama.Model(tiny):
        with pytest.raises(ModelError):
            llama.Model(tiny)


def test_engine_does_not_close_under_a_loaded_model(tiny: Path) -> None:
    engine = open_engine(read_index(tiny), 4)
    with llama.Model(tiny):
        with pytest.raises(NativeError, match="loaded model"):
            engine.close()
    engine.close()
    engine.close()


def test_another_model_is_loaded_whole(tiny: Path, tmp_path: Path) -> None:
    other = write_tiny_moe(tmp_path / "other.gguf", seed=3)
    recipe = Recipe(n_prompt=6, n_greedy=0)
    wanted = evaluate(other, recipe)
    with open_engine(read_index(tiny), 2) as engine:
        got = evaluate(other, recipe)
        assert engine.stats().total.n_ubatches == 0
    assert got.n_ubatch == wanted.n_ubatch > 1
    assert largest_difference(got.logits, wanted.logits) == 0.0


def test_unknown_policy_is_refused(tiny: Path) -> None:
    with pytest.raises(ConfigError, match="no policy 'best'; there are lfu, lru, pinned, slru"):
        open_engine(read_index(tiny), 4, Config(policy="best"))


def test_closed_engine_leaves_no_file_open(tiny: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with open_engine(read_index(tiny), 4):
        assert len(os.listdir("/proc/self/fd")) > before
    assert len(os.listdir("/proc/self/fd")) == before


def interrupt(monkeypatch: pytest.MonkeyPatch, name: str, when: str) -> None:
    """Raise as a signal may, before or after every fifth call of a method."""
    real = getattr(Residency, name)
    calls = 0

    def interrupted(self: Residency, *args: object) -> object:
        nonlocal calls
        calls += 1
        if calls % 5 == 0 and when == "before":
            raise KeyboardInterrupt
        done = real(self, *args)
        if calls % 5 == 0:
            raise KeyboardInterrupt
        return done

    monkeypatch.setattr(Residency, name, interrupted)


@pytest.mark.parametrize("name", ["evict", "apply"])
@pytest.mark.parametrize("n_slots", [3, 8])
@pytest.mark.parametrize("when", ["before", "after"])
def test_interrupt_at_any_point_never_changes_a_later_result(
    name: str, n_slots: int, when: str, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal's exception may strike between any two statements of ours."""
    tokens = evaluated_tokens(128, 12)
    wanted = evaluate(tiny, Recipe(n_prompt=12, n_greedy=0)).logits
    n_failed = 0
    with open_engine(read_index(tiny), n_slots) as engine:
        with llama.Model(tiny) as loaded, llama.Context(loaded) as context:
            interrupt(monkeypatch, name, when)
            for _ in range(30):
                try:
                    got = context.decode(tokens)
                except DecodeError:
                    n_failed += 1
                    assert isinstance(engine.take_error(), KeyboardInterrupt)
                else:
                    assert largest_difference(got, wanted) == 0.0
                assert_consistent(engine)
                context.remove_from(0)
            monkeypatch.undo()
            assert largest_difference(context.decode(tokens), wanted) == 0.0
    assert n_failed > 0 or n_slots == 8


def decoded_one_by_one(path: Path, tokens: list[int]) -> list[np.ndarray]:
    """Return the logits of each token, with the whole model in memory."""
    with llama.Model(path) as loaded, llama.Context(loaded) as context:
        return [context.decode([token]) for token in tokens]


def decode_if_it_can(context: llama.Context, token: int) -> np.ndarray | None:
    """Return the logits of one more token, None if that fails: the context is as before then."""
    n_past = context.n_past
    try:
        return context.decode([token])
    except DecodeError:
        context.remove_from(n_past)
        return None


@pytest.mark.parametrize("name", ["evict", "apply", "give_way", "victims"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_interrupt_while_tokens_are_decoded_never_changes_a_later_result(
    name: str, when: str, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = evaluated_tokens(128, 60)
    wanted = decoded_one_by_one(tiny, tokens)
    n_failed = 0
    with open_engine(read_index(tiny), 3) as engine:
        with llama.Model(tiny) as loaded, llama.Context(loaded) as context:
            interrupt(monkeypatch, name, when)
            for i, token in enumerate(tokens):
                while (got := decode_if_it_can(context, token)) is None:
                    n_failed += 1
                    assert isinstance(engine.take_error(), KeyboardInterrupt)
                    assert_consistent(engine)
                    assert n_failed < 1000
                assert largest_difference(got, wanted[i]) == 0.0
                assert_consistent(engine)
    assert n_failed > (0 if name == "evict" else 5)


@pytest.mark.parametrize(
    "names", [("_on_begun",), ("_on_complete",), ("_on_begun", "_on_complete")]
)
def test_an_interrupt_between_native_code_and_ours_never_changes_a_later_result(
    names: tuple[str, ...], tiny: Path
) -> None:
    """Where none of our own code is there to catch it, so that nothing is told."""
    tokens = evaluated_tokens(128, 60)
    wanted = decoded_one_by_one(tiny, tokens)
    n_failed = calls = 0
    real = Engine._changing

    def changing(self: Engine, change: Callable[..., None]) -> Callable[..., None]:
        call = real(self, change)

        def interrupted(*args: object) -> None:
            nonlocal calls
            calls += 1
            if calls % 7 in (0, 1):  # twice in a row
                raise KeyboardInterrupt
            call(*args)

        return interrupted if change.__name__ in names else call

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Engine, "_changing", changing)
        engine = open_engine(read_index(tiny), 3)
    with engine, llama.Model(tiny) as loaded, llama.Context(loaded) as context:
        for i, token in enumerate(tokens):
            while (got := decode_if_it_can(context, token)) is None:
                n_failed += 1
                engine.take_error()
                assert n_failed < 1000
            assert largest_difference(got, wanted[i]) == 0.0
            if i % 5 == 0:
                engine.set_limits([3 - i % 2] * 3)
    assert n_failed > 5


def note_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that grows with each miss: whether its slots were nominees, or planned."""
    called: list[str] = []
    on_plan, on_begun = Engine._on_plan, Engine._on_begun

    def plan(self: Engine, *args: object) -> None:
        called.append("planned")
        on_plan(self, *args)  # type: ignore[arg-type]

    def begun(self: Engine, *args: object) -> None:
        if args[-1] is not None:
            called.append("nominated")
        on_begun(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Engine, "_on_plan", plan)
    monkeypatch.setattr(Engine, "_on_begun", begun)
    return called


@pytest.mark.parametrize("n_slots", [2, 3, 5])
def test_while_tokens_are_decoded_reading_begins_before_planning(
    n_slots: int, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = note_calls(monkeypatch)
    tokens = evaluated_tokens(128, 80)
    with open_engine(read_index(tiny), n_slots) as engine:
        with llama.Model(tiny) as loaded, llama.Context(loaded) as context:
            for token in tokens[:10]:
                context.decode([token])
            called.clear()
            for token in tokens[10:]:
                context.decode([token])
        engine.raise_kept()
        assert_consistent(engine)
    assert called.count("nominated") > called.count("planned") > 0


def run_of_prompts_and_tokens(path: Path, policy: str) -> tuple[list[object], list[dict[int, int]]]:
    """Return counts of hits, misses and evictions, and which experts are where in the end."""
    tokens = evaluated_tokens(128, 90)
    with open_engine(read_index(path), 4, Config(policy=policy)) as engine:
        with llama.Model(path) as loaded, llama.Context(loaded) as context:
            for token in tokens[:30]:
                context.decode([token])
            engine.set_limits([3, 2, 4])
            for token in tokens[30:50]:
                context.decode([token])
            context.decode(tokens[50:60])
            engine.set_limits([4, 4, 4])
            for token in tokens[60:]:
                context.decode([token])
            engine.raise_kept()
            assert_consistent(engine)
            decode = engine.stats().decode
            counts = [decode.n_hits, decode.n_misses, decode.n_evictions, decode.read_bytes]
            return [*counts, engine.n_needed()], [engine.resident(i) for i in range(3)]


@pytest.mark.parametrize("policy", ["lru", "lfu", "pinned"])
def test_nominees_are_what_a_plan_would_have_chosen(
    policy: str, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = note_calls(monkeypatch)
    found = run_of_prompts_and_tokens(tiny, policy)
    assert called.count("nominated") > called.count("planned")
    monkeypatch.setattr(Engine, "_nominate", lambda self, layer_index: None)
    called.clear()
    assert run_of_prompts_and_tokens(tiny, policy) == found
    assert "nominated" not in called
    assert found[0][1] > 50  # type: ignore[operator]


def test_a_policy_that_looks_at_uses_late_has_no_nominees(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = note_calls(monkeypatch)
    run_of_prompts_and_tokens(tiny, "slru")
    assert called.count("planned") > 50
    assert "nominated" not in called


def test_a_failed_read_into_nominees_leaves_their_slots_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tiny_moe(tmp_path / "m.gguf")
    tokens = evaluated_tokens(128, 40)
    wanted = decoded_one_by_one(path, tokens)
    called = note_calls(monkeypatch)
    model = read_index(path)
    with open_engine(model, 3) as engine:
        with llama.Model(path, use_mmap=False) as loaded, llama.Context(loaded) as context:
            for i, token in enumerate(tokens):
                called.clear()
                with truncated(path, model.layers[0].tensors[0].offset + 1):
                    with pytest.raises(DecodeError):
                        context.decode([token])
                assert_consistent(engine)
                assert isinstance(engine.take_error(), ReadError)
                context.remove_from(i)
                got = context.decode([token])
                assert largest_difference(got, wanted[i]) == 0.0
                assert_consistent(engine)
            assert called.count("nominated") >= called.count("planned")


@pytest.mark.parametrize("slots", [[0, 0], [4], [-1], [1, 2, 1]])
def test_slots_that_are_none_or_named_twice_are_no_nominees(slots: list[int], tiny: Path) -> None:
    with open_engine(read_index(tiny), 4) as engine:
        with pytest.raises(ConfigError, match=r"layer 1: no slot -?\d+, or it is nomina"):
            engine._stream.nominate(1, slots)
        engine._stream.nominate(1, [3, 0])


def test_a_slot_that_has_changed_hands_is_no_nominee_any_longer(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a warm start, or where slots were given back."""
    called = note_calls(monkeypatch)
    token = 5
    with llama.Model(tiny) as loaded, llama.Context(loaded) as context:
        wanted = context.decode([token])
    with open_engine(read_index(tiny), 4) as engine:
        with llama.Model(tiny) as loaded, llama.Context(loaded) as context:
            context.decode([1])
            for index in range(3):
                engine._stream.nominate(index, engine._residencies[index].free)
                assert engine.fill(index, range(8), 2) == 2
            context.remove_from(0)
            engine._to_nominate.clear()
            called.clear()
            got = context.decode([token])
        engine.raise_kept()
        assert_consistent(engine)
    assert "nominated" not in called
    assert "planned" in called
    assert largest_difference(got, wanted) == 0.0


def test_more_sequences_than_tokens_in_a_ubatch_have_room_in_the_graph(tmp_path: Path) -> None:
    path = write_tiny_moe(tmp_path / "m.gguf", n_expert=64, n_ff=32)
    with open_engine(read_index(path), 1), llama.Model(path) as loaded:
        with llama.Context(loaded, n_ctx=16384, n_ubatch=4, n_seq_max=64) as context:
            assert context.decode([1, 2, 3]).shape == (3, loaded.n_vocab)


def test_needed_experts_come_in_the_order_of_their_last_rows(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[int]] = []  # of layer 0
    on_plan, on_begun = Engine._on_plan, Engine._on_begun

    def plan(
        self: Engine, layer: int, n_stages: int, needed: list[int], missing: list[int]
    ) -> None:
        if layer == 0:
            asked.append(needed)
        on_plan(self, layer, n_stages, needed, missing)

    def begun(
        self: Engine, layer: int, needed: list[int], missing: list[int], slots: list[int] | None
    ) -> None:
        if layer == 0 and slots is not None:
            asked.append(needed)
        on_begun(self, layer, needed, missing, slots)

    monkeypatch.setattr(Engine, "_on_plan", plan)
    monkeypatch.setattr(Engine, "_on_begun", begun)
    tokens = evaluated_tokens(128, 6)
    with open_engine(read_index(tiny), 2), llama.Model(tiny) as loaded:
        with llama.Context(loaded) as context:
            for token in tokens:
                context.decode([token])
        one_by_one, asked = asked, []
        with llama.Context(loaded) as context:
            context.decode(tokens)
    assert len(one_by_one) == len(tokens)  # each missed something
    order = [expert for needed in one_by_one for expert in needed]
    last = {expert: i for i, expert in enumerate(order)}
    assert asked == [sorted(last, key=lambda expert: last[expert])]
    assert len(last) > 2


def test_a_prompt_of_many_ubatches_reads_no_layer_in_vain(tmp_path: Path) -> None:
    path = write_tiny_moe(tmp_path / "m.gguf", n_expert=16)
    model = read_index(path)
    with open_engine(model, 15), llama.Model(path) as loaded:
        pass
    with open_engine(model, 15) as engine:
        with llama.Model(path) as loaded, llama.Context(loaded, n_ubatch=64) as context:
            context.decode([t % loaded.n_vocab for t in range(250)], last_only=True)
        stats = engine.stats().total
    # what is never resident in 15 of 16 slots comes again in each of the 4 ubatches, and no more
    assert 0 < stats.read_bytes <= model.expert_bytes + 4 * 3 * 2 * model.layers[0].expert_bytes


def test_python_switches_threads_soon_while_an_engine_is_open(tiny: Path) -> None:
    before = sys.getswitchinterval()
    assert before > SWITCH_INTERVAL_S
    with open_engine(read_index(tiny), 4):
        with pytest.raises(NativeError, match="another stream"):
            open_engine(read_index(tiny), 4)
        assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL_S)
    assert sys.getswitchinterval() == before


def test_a_busy_python_thread_does_not_change_the_result(tiny: Path) -> None:
    recipe = Recipe(n_prompt=24, n_greedy=8)
    wanted = evaluate(tiny, recipe).logits
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            sum(range(100))

    thread = threading.Thread(target=spin)
    thread.start()
    try:
        assert largest_difference(stream(tiny, 3, recipe).logits, wanted) == 0.0
    finally:
        stop.set()
        thread.join()


def test_two_engines_of_one_model_are_refused(tiny: Path) -> None:
    with open_engine(read_index(tiny), 4):
        with pytest.raises(NativeError, match="another stream"):
            open_engine(read_index(tiny), 4)


def test_an_engine_that_nobody_holds_still_serves_its_model(tiny: Path) -> None:
    recipe = Recipe(n_prompt=8, n_greedy=0)
    wanted = evaluate(tiny, recipe).logits
    kept = [open_engine(read_index(tiny), 4)]
    with llama.Model(tiny) as loaded, llama.Context(loaded) as context:
        stream_of_it = kept[0]._stream
        kept.clear()
        gc.collect()
        assert largest_difference(context.decode(evaluated_tokens(128, 8)), wanted) == 0.0
    stream_of_it.close()


def test_closed_engine_says_so(tiny: Path) -> None:
    engine = open_engine(read_index(tiny), 4)
    engine.close()
    with pytest.raises(NativeError, match="closed"):
        engine.resident(0)


def test_each_failure_has_its_own_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_tiny_moe(tmp_path / "m.gguf")

    def broken(*args: object) -> None:
        raise KeyError("planner")

    model = read_index(path)
    seen = []
    with open_engine(model, 4) as engine:
        with llama.Model(path, use_mmap=False) as loaded, llama.Context(loaded) as context:
            with truncated(path, model.layers[2].tensors[0].offset + 1):
                with pytest.raises(DecodeError):
                    context.decode([1, 2, 3, 4])
            seen.append(type(engine._stream.error))  # not taken
            monkeypatch.setattr("longhaul.engine.plan_stages", broken)
            with pytest.raises(DecodeError):
                context.decode([1, 2, 3, 4])
            seen.append(type(engine._stream.error))
    assert seen == [ReadError, KeyError]


def test_recurrent_model_says_that_a_failure_cleared_its_context(
    arch_model: Callable[[str], Path],
) -> None:
    path = arch_model("qwen35moe")
    model = read_index(path)
    wanted = evaluate(path, Recipe(n_prompt=8, n_greedy=0)).logits
    with open_engine(model, 4) as engine:
        with llama.Model(path, use_mmap=False) as loaded, llama.Context(loaded) as context:
            tokens = evaluated_tokens(loaded.n_vocab, 8)
            context.decode(tokens)
            with truncated(path, model.layers[0].tensors[0].offset + 1):
                with pytest.raises(DecodeError, match="had to be cleared"):
                    context.decode(list(range(40, 80)))
            engine.take_error()
            assert context.n_past == 0
            assert largest_difference(context.decode(tokens), wanted) == 0.0


def test_records_are_of_single_ubatches_and_only_the_last_are_kept(tiny: Path) -> None:
    model = read_index(tiny)
    with (
        Engine(model, [4] * 3, Config()) as engine,
        llama.Model(tiny) as loaded,
        llama.Context(loaded) as context,
    ):
        assert engine.records() == []
        context.decode(list(range(6)))
        for _ in range(3):
            context.decode([1])
        records = engine.records()
        assert [record.is_prefill for record in records] == [True, False, False, False]
        assert [record.counters.n_tokens for record in records] == [6, 1, 1, 1]
        decoded = sum((record.counters for record in records[1:]), Counters())
        stats = engine.stats()
        assert replace(decoded, **seconds(stats.decode)) == stats.decode
        assert decoded.compute_s == pytest.approx(stats.decode.compute_s)
        assert 0 < records[-1].counters.compute_s < stats.decode.compute_s
        assert [r.end_s for r in records] == sorted({r.end_s for r in records})
        for _ in range(4100):
            context.remove_from(9)
            context.decode([2])
        records = engine.records()
        assert len(records) == 4096
        assert {record.is_prefill for record in records} == {False}


def seconds(counters: Counters) -> dict[str, float]:
    """Return the fields that count seconds."""
    names = [field.name for field in fields(Counters) if field.name.endswith("_s")]
    assert names
    return {name: getattr(counters, name) for name in names}


# --- files that change ----------------------------------------------------------------------------


def test_file_that_changed_since_its_header_was_read_is_refused(tmp_path: Path) -> None:
    path = write_tiny_moe(tmp_path / "m.gguf")
    model = read_index(path)
    os.utime(path, ns=(0, 0))
    with pytest.raises(ReadError, match=r"m\.gguf has changed since its header was read") as caught:
        open_engine(model, 4)
    assert caught.value.errno == errno.ESTALE


def test_file_that_is_replaced_before_it_is_loaded_is_refused(tmp_path: Path) -> None:
    path, other = write_tiny_moe(tmp_path / "m.gguf"), write_tiny_moe(tmp_path / "n.gguf", seed=5)
    status = path.stat()
    with open_engine(read_index(path), 4):
        other.replace(path)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        assert path.stat().st_size == status.st_size
        with pytest.raises(ModelError):
            llama.Model(path)


def test_file_that_is_written_to_is_noticed_even_if_nothing_is_missing(tmp_path: Path) -> None:
    path = write_tiny_moe(tmp_path / "m.gguf")
    with open_engine(read_index(path), 8) as engine:
        with llama.Model(path) as loaded, llama.Context(loaded) as context:
            wanted = context.decode([1, 2, 3, 4])
            context.remove_from(0)
            with truncated(path, -1):
                with pytest.raises(DecodeError):
                    context.decode([1, 2, 3, 4])
            with pytest.raises(ReadError, match="has changed since it was opened"):
                engine.raise_kept()
            assert largest_difference(context.decode([1, 2, 3, 4]), wanted) == 0.0


# --- slots that are given back --------------------------------------------------------------------


def test_a_limit_changes_no_logit(tiny: Path) -> None:
    model = read_index(tiny)
    tokens = evaluated_tokens(128, 24)
    with llama.Model(tiny) as loaded, llama.Context(loaded) as context:
        prompt = context.decode(tokens)
        singles = [context.decode([token]) for token in tokens[:6]]
    with open_engine(model, 6) as engine:
        with llama.Model(tiny) as loaded, llama.Context(loaded) as context:
            for limits in ([6, 6, 6], [2, 2, 2], [1, 1, 1], [3, 6, 2], [6, 6, 6]):
                context.remove_from(0)
                assert largest_difference(context.decode(tokens), prompt) == 0.0
                assert [len(engine.resident(i)) for i in range(3)] == [6, 6, 6]
                engine.set_limits(limits)
                assert_consistent(engine)
                assert [len(engine.resident(i)) for i in range(3)] == limits
                for token, wanted in zip(tokens[:6], singles, strict=True):
                    assert largest_difference(context.decode([token]), wanted) == 0.0
                    most = [max(limit, 2) for limit in limits]  # which one token needs
                    assert [len(engine.resident(i)) for i in range(3)] == most


def test_a_limit_gives_memory_back_until_it_is_needed(tmp_path: Path) -> None:
    path = write_tiny_moe(tmp_path / "m.gguf", n_embd=256, n_ff=2048, types=F32_EXPERTS)
    model = read_index(path)
    expert_bytes = model.layers[0].expert_bytes
    with open_engine(model, 6) as engine:
        with llama.Model(path, use_mmap=False) as loaded, llama.Context(loaded) as context:
            context.decode(evaluated_tokens(128, 24))
            before = resident_bytes()
            returned = engine.set_limits([2, 2, 2])
            page_bytes = 3 * 3 * 6 * mmap.PAGESIZE  # at the ends of slots
            assert 12 * expert_bytes - page_bytes <= returned <= 12 * expert_bytes
            assert before - resident_bytes() > 0.9 * returned
            engine.set_limits([6, 6, 6])
            context.decode(evaluated_tokens(128, 24))
            assert resident_bytes() > before - 0.1 * returned


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * mmap.PAGESIZE


def test_limits_may_change_while_a_model_is_loaded_computed_and_freed(tmp_path: Path) -> None:
    path = write_tiny_moe(tmp_path / "m.gguf", n_embd=256, n_ff=512, types=F32_EXPERTS)
    tokens = evaluated_tokens(128, 24)
    with llama.Model(path) as loaded, llama.Context(loaded) as context:
        wanted = context.decode(tokens)
    is_over = threading.Event()
    n_changes = 0

    def change(engine: Engine) -> None:
        nonlocal n_changes
        while not is_over.is_set():
            engine.set_limits([[6, 2, 4][(n_changes + i) % 3] for i in range(3)])
            n_changes += 1

    with open_engine(read_index(path), 6) as engine:
        thread = threading.Thread(target=change, args=(engine,))
        thread.start()
        try:
            for _ in range(20):
                with llama.Model(path) as loaded, llama.Context(loaded, n_ubatch=8) as context:
                    context.decode(tokens)
                    context.remove_from(0)
                    context.decode(tokens[:1])
                with llama.Model(path) as loaded, llama.Context(loaded) as context:
                    assert largest_difference(context.decode(tokens), wanted) == 0.0
        finally:
            is_over.set()
            thread.join()
    assert n_changes > 20


def test_who_changes_limits_waits_for_one_ubatch_only(tiny: Path) -> None:
    with open_engine(read_index(tiny), 6) as engine:
        with llama.Model(tiny) as loaded, llama.Context(loaded, n_ubatch=2) as context:
            tokens = evaluated_tokens(128, 400)
            waited: list[int] = []
            is_over = threading.Event()

            def change() -> None:
                while not is_over.is_set():
                    before = engine.stats().prefill.n_ubatches
                    engine.set_limits([4, 4, 4])
                    waited.append(engine.stats().prefill.n_ubatches - before)

            thread = threading.Thread(target=change)
            thread.start()
            context.decode(tokens)
            is_over.set()
            thread.join()
    assert len(waited) > 10
    assert max(waited) <= 3  # one that runs, and what passes before and after it is counted


def test_file_that_changes_in_the_last_ubatch_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tiny_moe(tmp_path / "m.gguf")
    complete = Engine._on_complete

    def touch(engine: Engine, layer_index: int, is_read: bool) -> None:
        os.utime(path, ns=(1, 1))  # after the last read
        complete(engine, layer_index, is_read)

    monkeypatch.setattr(Engine, "_on_complete", touch)
    with open_engine(read_index(path), 8) as engine:
        with llama.Model(path) as loaded, llama.Context(loaded) as context:
            with pytest.raises(DecodeError):
                context.decode([1, 2, 3, 4])
            with pytest.raises(ReadError, match="has changed since it was opened"):
                engine.raise_kept()


def test_a_mapped_file_that_is_cut_short_ends_the_process_with_a_reason(tmp_path: Path) -> None:
    path = write_tiny_moe(tmp_path / "m.gguf", n_vocab=60_000)
    code = (
        "import os, sys, mmap\n"
        "from longhaul.engine import Engine\n"
        "from longhaul.config import Config\n"
        "from longhaul.index import read_index\n"
        "from pathlib import Path\n"
        "path = Path(sys.argv[1])\n"
        "with Engine(read_index(path), [4] * 3, Config()):\n"
        "    with path.open('rb') as file:\n"
        "        view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)\n"
        "    os.truncate(path, 4096)\n"
        "    print(view[-1])\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert "longhaul: error: a mapped file was cut short" in done.stderr


# --- traces ---------------------------------------------------------------------------------------


def test_a_trace_holds_what_the_run_needed(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "t.trace"
    model = read_index(tiny)
    with Engine(model, [4] * 3, Config(trace_path=path)) as engine:
        with llama.Model(tiny) as loaded, llama.Context(loaded) as context:
            context.decode(evaluated_tokens(128, 12))
            for token in (5, 6, 7):
                context.decode([token])
        stats = engine.stats()
        assert not path.exists()  # it is whole or not there
    found = TraceFile(path)
    assert found.header.fingerprint == model.fingerprint
    assert found.header.n_slots == (4, 4, 4)
    assert [layer.expert_bytes for layer in found.header.layers] == [
        layer.expert_bytes for layer in model.layers
    ]
    records = list(found.records())
    assert [(r.ubatch, r.layer_index, len(r.ids)) for r in records] == [
        (ubatch, layer, 1 if ubatch else 12) for ubatch in range(4) for layer in range(3)
    ]
    for phase, counters in ((True, stats.prefill), (False, stats.decode)):
        n_hits = n_misses = 0
        for record in records:
            if record.is_prefill == phase:
                assert record.hits is not None
                ids, hits = record.ids.ravel().tolist(), record.hits.ravel().tolist()
                pairs = set(zip(ids, hits, strict=True))
                assert len({expert for expert, _ in pairs}) == len(pairs)
                n_hits += sum(is_hit for _, is_hit in pairs)
                n_misses += sum(not is_hit for _, is_hit in pairs)
        assert (n_hits, n_misses) == (counters.n_hits, counters.n_misses)
        assert n_hits + n_misses > 0


def test_a_trace_that_cannot_be_written_is_refused(tiny: Path, tmp_path: Path) -> None:
    model = read_index(tiny)
    for path in (tmp_path / "none" / "t", Path("/dev/null"), tmp_path):
        with pytest.raises(ConfigError, match="trace"):
            Engine(model, [4] * 3, Config(trace_path=path))
    assert Path("/dev/null").is_char_device()


def test_a_trace_on_a_full_disk_fails_no_run(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[BaseException] = []
    full = os.open("/dev/full", os.O_WRONLY)
    record = Stream.record
    monkeypatch.setattr(Stream, "record", lambda self, file: record(self, file and full))
    try:
        config = Config(trace_path=tmp_path / "t.trace")
        with Engine(read_index(tiny), [4] * 3, config, on_error=told.append) as engine:
            with llama.Model(tiny) as loaded, llama.Context(loaded) as context:
                assert len(context.decode([1, 2, 3])) == 3
            engine.raise_kept()
    finally:
        os.close(full)
    (error,) = told
    assert "the trace cannot be written: No space left on device" in str(error)
