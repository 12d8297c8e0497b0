"""What llama.cpp does beside prompts and tokens is the same with experts streamed."""

import ctypes
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from contexts import (
    ABORTED,
    OK,
    Floats,
    RawContext,
    assert_streams_exactly,
    copied,
    decode_greedily,
    open_engine,
    random_tokens,
    rows,
)
from lora import write_lora
from models import Type, write_tiny_moe
from streaming import Recipe, evaluate, largest_difference, stream
from test_engine import assert_consistent

from longhaul import llama
from longhaul.config import Config
from longhaul.engine import Engine
from longhaul.index import read_index
from longhaul.llama import llama_cpp

pytestmark = pytest.mark.usefixtures("libraries")

every_budget = pytest.mark.parametrize("n_slots", [1, 2, 4, 8])  # of 8 experts, top-2


def several_sequences(kv_unified: bool, n_ubatch: int, model: llama.Model) -> Floats:
    prompts = [random_tokens(n, seed=n) for n in (5, 17, 40)]
    settings = {"n_seq_max": 3, "kv_unified": kv_unified, "n_ubatch": n_ubatch}
    with RawContext(model, **settings) as context:
        batch = [row for seq, prompt in enumerate(prompts) for row in rows(prompt, 0, seq)]
        logits = [context.decode(batch)]
        ends = np.cumsum([len(prompt) for prompt in prompts]) - 1
        tokens = logits[0][ends].argmax(axis=1)
        for step in range(4):
            batch = [(int(tokens[i]), len(prompts[i]) + step, i) for i in range(3)]
            logits.append(context.decode(batch))
            tokens = logits[-1].argmax(axis=1)
        return np.concatenate(logits)


@every_budget
@pytest.mark.parametrize("kv_unified", [False, True], ids=["split", "unified"])
@pytest.mark.parametrize("n_ubatch", [1, 16, 512])
def test_several_sequences_in_a_batch(
    n_slots: int, kv_unified: bool, n_ubatch: int, tiny: Path
) -> None:
    assert_streams_exactly(tiny, n_slots, partial(several_sequences, kv_unified, n_ubatch))


def embeddings(pooling: int, model: llama.Model) -> Floats:
    with RawContext(model, embeddings=True, pooling_type=pooling, n_seq_max=2) as context:
        batch = rows(random_tokens(20), 0, 0) + rows(random_tokens(9, seed=9), 0, 1)
        assert context.try_decode(batch) == OK
        if pooling == llama_cpp.LLAMA_POOLING_TYPE_NONE:
            found = [llama_cpp.llama_get_embeddings_ith(context.handle, i) for i in range(29)]
        else:
            found = [llama_cpp.llama_get_embeddings_seq(context.handle, seq) for seq in range(2)]
        return np.stack([copied(pointer, context.n_embd) for pointer in found])


@every_budget
@pytest.mark.parametrize("pooling", ["NONE", "MEAN", "LAST"])
def test_embeddings(n_slots: int, pooling: str, tiny: Path) -> None:
    kind = getattr(llama_cpp, f"LLAMA_POOLING_TYPE_{pooling}")
    assert_streams_exactly(tiny, n_slots, partial(embeddings, kind))


def load_adapter(model: llama.Model, adapter: Path) -> Any:
    handle = llama_cpp.llama_adapter_lora_init(model.handle, str(adapter).encode())
    assert handle
    return handle


def set_adapter(context: RawContext, adapter: Any, scale: float) -> None:
    adapters = (llama_cpp.llama_adapter_lora_p_ctypes * 1)(adapter)
    scales = (ctypes.c_float * 1)(scale)
    assert llama_cpp.llama_set_adapters_lora(context.handle, adapters, 1, scales) == OK


def with_adapter(adapter: Path | None, scale: float, model: llama.Model) -> Floats:
    handle = load_adapter(model, adapter) if adapter else None
    with RawContext(model) as context:
        if handle:
            set_adapter(context, handle, scale)
        prompt = context.decode(rows(random_tokens(40)))
        return np.concatenate([prompt, decode_greedily(context, 8, 3, 40)])


ADAPTED = {
    "attention": ["*attn_q.weight", "*attn_output.weight"],
    "experts": ["*_exps.weight"],
    "down": ["blk.1.ffn_down_exps.weight"],
    "both": ["*attn_v.weight", "*ffn_gate_exps.weight", "*ffn_gate_inp.weight"],
}


@every_budget
@pytest.mark.parametrize("adapted", ADAPTED)
def test_lora_adapters(n_slots: int, adapted: str, tiny: Path, tmp_path: Path) -> None:
    adapter = write_lora(tmp_path / "lora.gguf", tiny, ADAPTED[adapted])
    with llama.Model(tiny, repack=False) as model:
        plain = with_adapter(None, 0, model)
    changed = assert_streams_exactly(tiny, n_slots, partial(with_adapter, adapter, 0.7))
    assert largest_difference(changed[:40], plain[:40]) > 0.01


@every_budget
def test_lora_adapters_on_repacked_experts(n_slots: int, tmp_path: Path) -> None:
    wide = partial(write_tiny_moe, n_embd=256, n_ff=256)
    path = wide(tmp_path / "q4_0.gguf", types={"*_exps.*": Type.Q4_0})
    same_shape = wide(tmp_path / "f32.gguf")
    adapter = write_lora(tmp_path / "lora.gguf", same_shape, ["*_exps.weight"])
    use = partial(with_adapter, adapter, 0.5)
    assert_streams_exactly(path, n_slots, use, repack=True)


def test_lora_adapter_beside_the_most_stages(tmp_path: Path) -> None:
    path = write_tiny_moe(tmp_path / "m.gguf", n_expert=64, n_expert_used=6, n_ff=32)
    adapter = write_lora(tmp_path / "lora.gguf", path, ["*_exps.weight", "*attn_q.weight"])

    def use(model: llama.Model) -> Floats:
        with RawContext(model, n_ctx=2048, n_batch=2048, n_ubatch=2048) as context:
            set_adapter(context, load_adapter(model, adapter), 0.5)
            return context.decode(rows(random_tokens(2048)))

    assert_streams_exactly(path, 1, use)


def same_prompt_twice(model: llama.Model) -> Floats:
    logits = []
    with RawContext(model) as context:
        for _ in range(2):
            logits.append(context.decode(rows(random_tokens(60))))
            logits.append(decode_greedily(context, 6, 3, 60))
            llama_cpp.llama_memory_clear(context.memory, True)
    return np.concatenate(logits)


@every_budget
def test_same_prompt_twice(n_slots: int, tiny: Path) -> None:
    logits = assert_streams_exactly(tiny, n_slots, same_prompt_twice)
    first, second = np.split(logits, 2)
    assert largest_difference(first, second) == 0.0


def test_cache_sizes_in_any_order(tiny: Path) -> None:
    recipe = Recipe(n_prompt=60, n_greedy=8)
    resident = evaluate(tiny, recipe).logits
    for n_slots in (8, 1, 4, 2, 8, 3, 7):
        streamed = stream(tiny, n_slots, recipe).logits
        assert largest_difference(streamed, resident) == 0.0, f"{n_slots} slots"
    assert largest_difference(evaluate(tiny, recipe).logits, resident) == 0.0


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """Another tiny MoE, of another architecture and shape: 2 layers x 12 experts, top-3."""
    shape = {"n_layer": 2, "n_expert": 12, "n_expert_used": 3, "n_ff": 64}
    return write_tiny_moe(tmp_path / "other.gguf", arch="llama", seed=1, **shape)


def test_two_models_one_after_the_other(tiny: Path, other: Path) -> None:
    recipe = Recipe(n_prompt=60, n_greedy=8)
    resident = {path: evaluate(path, recipe).logits for path in (tiny, other)}
    for path in (tiny, other, tiny):
        assert largest_difference(stream(path, 3, recipe).logits, resident[path]) == 0.0


def alternate(models: Sequence[llama.Model]) -> list[Floats]:
    """Evaluate with a context of each model in turn; return the logits of each."""
    contexts = [RawContext(model) for model in models]
    logits: list[list[Floats]] = [[] for _ in models]
    position = 0
    for n_tokens in (30, 1, 5, 1):
        for i, context in enumerate(contexts):
            batch = rows(random_tokens(n_tokens, seed=position + i), position)
            logits[i].append(context.decode(batch))
        position += n_tokens
    for context in contexts:
        context.close()
    return [np.concatenate(found) for found in logits]


@pytest.mark.parametrize("n_slots", [1, 3, 8])
def test_two_models_at_once(n_slots: int, tiny: Path, other: Path) -> None:
    with llama.Model(tiny, repack=False) as a, llama.Model(other, repack=False) as b:
        resident = alternate([a, b])
    with open_engine(tiny, n_slots) as first, open_engine(other, n_slots) as second:
        with llama.Model(tiny, repack=False) as a, llama.Model(other, repack=False) as b:
            streamed = alternate([a, b])
        for engine in (first, second):
            engine.raise_kept()
            assert engine.stats().total.read_bytes > 0
    for of_streamed, of_resident in zip(streamed, resident, strict=True):
        assert largest_difference(of_streamed, of_resident) == 0.0


@every_budget
def test_two_contexts_of_a_model(n_slots: int, tiny: Path) -> None:
    assert_streams_exactly(tiny, n_slots, lambda m: np.concatenate(alternate([m, m])))


def alternating_batches(model: llama.Model) -> Floats:
    logits, position = [], 0
    with RawContext(model) as context:
        for n_tokens in (1, 7, 1, 64, 3, 1, 1, 64, 2, 7):
            logits.append(context.decode(rows(random_tokens(n_tokens, seed=position), position)))
            position += n_tokens
    return np.concatenate(logits)


@every_budget
def test_batches_of_alternating_sizes(n_slots: int, tiny: Path) -> None:
    assert_streams_exactly(tiny, n_slots, alternating_batches)


def saved_and_restored(model: llama.Model) -> Floats:
    with RawContext(model, n_seq_max=2) as context:
        logits = [context.decode(rows(random_tokens(40)))]
        size = llama_cpp.llama_state_seq_get_size(context.handle, 0)
        data = (ctypes.c_uint8 * size)()
        assert llama_cpp.llama_state_seq_get_data(context.handle, data, size, 0) == size
        logits.append(decode_greedily(context, 6, 3, 40))
        context.decode(rows(random_tokens(30, seed=1), 46))  # other experts come in
        llama_cpp.llama_memory_clear(context.memory, True)
        assert llama_cpp.llama_state_seq_set_data(context.handle, data, size, 0) == size
        logits.append(decode_greedily(context, 6, 3, 40))
        return np.concatenate(logits)


@every_budget
def test_state_of_a_sequence_saved_and_restored(n_slots: int, tiny: Path) -> None:
    logits = assert_streams_exactly(tiny, n_slots, saved_and_restored)
    assert largest_difference(logits[40:46], logits[46:52]) == 0.0


def logits_of_the_last(model: llama.Model) -> Floats:
    """Ask for the last row only, as tools do: the last layer has fewer rows than the others."""
    logits, position = [], 0
    with RawContext(model) as context:
        for n_tokens in (300, 1, 1, 5):
            batch = rows(random_tokens(n_tokens, seed=position), position)
            assert context.try_decode(batch, n_outputs=1) == OK
            logits.append(context.logits(n_tokens - 1))
            position += n_tokens
    return np.stack(logits)


@every_budget
def test_logits_of_the_last_token_alone(n_slots: int, tiny: Path) -> None:
    assert_streams_exactly(tiny, n_slots, logits_of_the_last)


def warmed_up_between(model: llama.Model) -> Floats:
    logits = []
    with RawContext(model) as context:
        for _ in range(2):
            logits.append(context.decode(rows(random_tokens(30))))
            llama_cpp.llama_set_warmup(context.handle, True)
            assert context.try_decode(rows([5], 30)) == OK
            llama_cpp.llama_set_warmup(context.handle, False)
            llama_cpp.llama_memory_clear(context.memory, True)
    return np.concatenate(logits)


@every_budget
def test_warming_up_leaves_nothing_behind(n_slots: int, tiny: Path) -> None:
    assert_streams_exactly(tiny, n_slots, warmed_up_between)


@pytest.mark.parametrize("n_slots", [(1, 8, 3), (8, 1, 8), (2, 5, 1), (8, 8, 1)])
def test_layers_of_different_budgets(n_slots: tuple[int, ...], tiny: Path) -> None:
    recipe = Recipe(n_prompt=100, n_greedy=10)
    resident = evaluate(tiny, recipe).logits
    with Engine(read_index(tiny), n_slots, Config()) as engine:
        streamed = evaluate(tiny, recipe).logits
        engine.raise_kept()
        assert engine.stats().total.read_bytes > 0
    assert largest_difference(streamed, resident) == 0.0


def in_threads(model: llama.Model) -> Floats:
    """Evaluate with three contexts of a model at the same time."""

    def evaluate_one(seed: int) -> Floats:
        logits, position = [], 0
        with RawContext(model) as context:
            for n_tokens in (40, 1, 1, 7, 1, 30, 1):
                tokens = random_tokens(n_tokens, seed=seed + position)
                logits.append(context.decode(rows(tokens, position)))
                position += n_tokens
        return np.concatenate(logits)

    with ThreadPoolExecutor(3) as threads:
        return np.concatenate(list(threads.map(evaluate_one, (1, 1000, 2000))))


@every_budget
def test_contexts_in_threads(n_slots: int, tiny: Path) -> None:
    assert_streams_exactly(tiny, n_slots, in_threads)


class Abort:
    """An abort callback that says yes from its nth call on."""

    def __init__(self, context: RawContext, after: int) -> None:
        self.n_calls = 0
        self.after = after
        self._context = context
        self._callback = llama_cpp.ggml_abort_callback(self._call)
        llama_cpp.llama_set_abort_callback(context.handle, self._callback, None)

    def _call(self, data: object) -> bool:
        self.n_calls += 1
        return self.n_calls > self.after

    def remove(self) -> None:
        none = llama_cpp.ggml_abort_callback()
        llama_cpp.llama_set_abort_callback(self._context.handle, none, None)


def short_batches(context: RawContext) -> Floats:
    """Evaluate one token, many equal ones, which need few experts, and a prompt."""
    logits = []
    for tokens in ([9], [9, 9, 9, 9, 9], [4], random_tokens(60), [4]):
        llama_cpp.llama_memory_clear(context.memory, True)
        logits.append(context.decode(rows(tokens)))
    return np.concatenate(logits)


def count_abort_calls(context: RawContext) -> int:
    """Return how often a prompt asks whether to go on."""
    abort = Abort(context, sys.maxsize)
    context.decode(rows(random_tokens(60)))
    abort.remove()
    return abort.n_calls


@every_budget
def test_aborted_prompts_leave_nothing_behind(n_slots: int, tiny: Path) -> None:
    with llama.Model(tiny, repack=False) as model, RawContext(model) as context:
        resident = short_batches(context)
    with open_engine(tiny, n_slots) as engine, llama.Model(tiny, repack=False) as model:
        with RawContext(model) as context:
            n_calls = count_abort_calls(context)
            for after in np.linspace(0, n_calls - 1, 30).astype(int).tolist():
                llama_cpp.llama_memory_clear(context.memory, True)
                abort = Abort(context, after)
                assert context.try_decode(rows(random_tokens(60, seed=after))) == ABORTED
                abort.remove()
                assert_consistent(engine)
                streamed = short_batches(context)
                assert largest_difference(streamed, resident) == 0.0, f"after {after} nodes"
        engine.raise_kept()
        assert engine.stats().total.n_errors == 0
        assert engine.stats().total.read_bytes > 0
