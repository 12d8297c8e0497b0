"""What else llama.cpp loads, and how, beside a streamed model."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from contexts import Floats, LoadedModel, RawContext, open_engine, random_tokens, rows
from streaming import Recipe, evaluate, largest_difference

from longhaul import llama
from longhaul.engine import Engine
from longhaul.llama import llama_cpp

pytestmark = pytest.mark.usefixtures("libraries")


def load(path: Path, **settings: object) -> Any:
    """Load a model with llama_model_params as given; return its handle or None."""
    params = llama_cpp.llama_model_default_params()
    params.use_extra_bufts = False
    for name, value in settings.items():
        setattr(params, name, value)
    return llama_cpp.llama_model_load_from_file(str(path).encode(), params)


def assert_still_streams(engine: Engine, path: Path) -> None:
    recipe = Recipe(n_prompt=30, n_greedy=4)
    before = engine.stats().total.read_bytes
    streamed = evaluate(path, recipe).logits
    engine.raise_kept()
    assert engine.stats().total.read_bytes > before
    engine.close()
    assert largest_difference(streamed, evaluate(path, recipe).logits) == 0.0


def test_vocabulary_alone_loads_beside_a_streamed_model(tiny: Path) -> None:
    with open_engine(tiny, 2) as engine:
        with llama.Model(tiny):
            model = load(tiny, vocab_only=True)
            assert model
            vocab = llama_cpp.llama_model_get_vocab(model)
            assert llama_cpp.llama_vocab_n_tokens(vocab) == 128
            llama_cpp.llama_model_free(model)
        assert engine.stats().total.read_bytes == 0
        assert_still_streams(engine, tiny)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"check_tensors": True}, "cannot be validated"),
        ({"load_mode": llama_cpp.LLAMA_LOAD_MODE_MMAP_MLOCK}, "would lock every expert"),
    ],
    ids=["check-tensors", "mmap+mlock"],
)
def test_load_modes_that_read_every_expert_are_refused(
    settings: dict[str, object], reason: str, tiny: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open_engine(tiny, 2) as engine:
        assert not load(tiny, **settings)
        assert reason in caplog.text
        assert_still_streams(engine, tiny)


@pytest.mark.parametrize("mode", ["NONE", "MMAP", "MLOCK", "DIRECT_IO"])
def test_other_load_modes_stream(mode: str, tiny: Path) -> None:
    def use() -> Floats:
        handle = load(tiny, load_mode=getattr(llama_cpp, f"LLAMA_LOAD_MODE_{mode}"))
        assert handle
        model = LoadedModel(handle)
        with RawContext(model) as context:
            found = context.decode(rows(random_tokens(40)))
        llama_cpp.llama_model_free(handle)
        return found

    resident = use()
    with open_engine(tiny, 2) as engine:
        streamed = use()
        engine.raise_kept()
        assert engine.stats().total.read_bytes > 0
    assert largest_difference(streamed, resident) == 0.0


def test_shapes_alone_load_beside_a_streamed_model(tiny: Path) -> None:
    settings = {"no_alloc": True, "load_mode": llama_cpp.LLAMA_LOAD_MODE_NONE}
    with open_engine(tiny, 2) as engine:
        with llama.Model(tiny, repack=False) as model, RawContext(model) as context:
            logits = [context.decode(rows(random_tokens(30)))]
            shapes = load(tiny, **settings)
            assert shapes
            with RawContext(LoadedModel(shapes)):
                logits.append(context.decode(rows(random_tokens(30, seed=1), 30)))
            llama_cpp.llama_model_free(shapes)
            logits.append(context.decode(rows(random_tokens(30, seed=2), 60)))
            llama_cpp.llama_memory_clear(context.memory, True)
        assert_still_streams(engine, tiny)
    with llama.Model(tiny, repack=False) as model, RawContext(model) as context:
        tokens = [token for seed in (7, 1, 2) for token in random_tokens(30, seed=seed)]
        parts = [context.decode(rows(tokens[i : i + 30], i)) for i in (0, 30, 60)]
    assert largest_difference(np.concatenate(logits), np.concatenate(parts)) == 0.0
