"""Contexts with any of llama.cpp's settings, and batches of several sequences, for tests.

Uses llama_cpp through longhaul.llama, so that it is loaded from our libraries.
"""

import ctypes
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from streaming import largest_difference

from longhaul import llama
from longhaul.config import Config
from longhaul.engine import Engine
from longhaul.index import read_index
from longhaul.llama import llama_cpp

Floats = npt.NDArray[np.float32]
Row = tuple[int, int, int]  # token, position, sequence
OK, ABORTED = 0, 2  # of llama_decode


def random_tokens(n_tokens: int, seed: int = 7, n_vocab: int = 128) -> list[int]:
    """Return random tokens."""
    drawn: list[int] = np.random.default_rng(seed).integers(0, n_vocab, n_tokens).tolist()
    return drawn


def rows(tokens: Sequence[int], position: int = 0, sequence: int = 0) -> list[Row]:
    """Return consecutive tokens of one sequence."""
    return [(token, position + i, sequence) for i, token in enumerate(tokens)]


class LoadedModel:
    """A model that llama_cpp itself has loaded."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        vocab = llama_cpp.llama_model_get_vocab(handle)
        self.n_vocab = int(llama_cpp.llama_vocab_n_tokens(vocab))


class RawContext:
    """A context whose settings are llama_context_params by name."""

    def __init__(self, model: llama.Model | LoadedModel, **settings: Any) -> None:
        """Create a context; raises AssertionError if llama.cpp refuses."""
        params = llama_cpp.llama_context_default_params()
        defaults = {"n_ctx": 512, "n_batch": 512, "n_threads": 1, "n_threads_batch": 1}
        for name, value in (defaults | settings).items():
            setattr(params, name, value)
        self.n_vocab = model.n_vocab
        self.n_embd = int(llama_cpp.llama_model_n_embd(model.handle))
        self.handle = llama_cpp.llama_init_from_model(model.handle, params)
        assert self.handle

    @property
    def memory(self) -> Any:
        """What llama.cpp remembers of the sequences."""
        return llama_cpp.llama_get_memory(self.handle)

    def try_decode(self, batch_rows: Sequence[Row], n_outputs: int | None = None) -> int:
        """Evaluate rows, with the outputs of all or of the last ones, and return a code."""
        first_output = 0 if n_outputs is None else len(batch_rows) - n_outputs
        batch = llama_cpp.llama_batch_init(len(batch_rows), 0, 1)
        for i, (token, position, sequence) in enumerate(batch_rows):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            batch.logits[i] = int(i >= first_output)
        batch.n_tokens = len(batch_rows)
        code = int(llama_cpp.llama_decode(self.handle, batch))
        llama_cpp.llama_batch_free(batch)
        return code

    def decode(self, batch_rows: Sequence[Row]) -> Floats:
        """Evaluate rows and return their logits, (n_rows, n_vocab)."""
        assert self.try_decode(batch_rows) == OK
        return np.stack([self.logits(i) for i in range(len(batch_rows))])

    def logits(self, row: int) -> Floats:
        """Return the logits of a row, (n_vocab,)."""
        return copied(llama_cpp.llama_get_logits_ith(self.handle, row), self.n_vocab)

    def close(self) -> None:
        """Free the context; twice is harmless."""
        if self.handle:
            llama_cpp.llama_free(self.handle)
            self.handle = None

    def __enter__(self) -> "RawContext":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def copied(pointer: Any, size: int) -> Floats:
    """Return a copy of what llama.cpp points at, (size,)."""
    assert pointer
    address = ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float))
    return np.ctypeslib.as_array(address, shape=(size,)).copy()


def decode_greedily(context: RawContext, n_tokens: int, first: int, position: int) -> Floats:
    """Evaluate `first` and the tokens that follow greedily in sequence 0; return their logits."""
    logits = []
    token = first
    for i in range(n_tokens):
        logits.append(context.decode([(token, position + i, 0)]))
        token = int(logits[-1][-1].argmax())
    return np.concatenate(logits)


def open_engine(path: Path, n_slots: int, config: Config | None = None) -> Engine:
    """Open an engine with as many slots in every layer."""
    model = read_index(path)
    return Engine(model, [n_slots] * len(model.layers), config or Config())


def assert_streams_exactly(
    path: Path, n_slots: int, use: Callable[[llama.Model], Floats], repack: bool = False
) -> Floats:
    """Compare what `use` makes of the resident and of the streamed model, and return it."""
    with llama.Model(path, repack=repack) as model:
        resident = use(model)
    with ExitStack() as stack:
        engine = stack.enter_context(open_engine(path, n_slots))
        streamed = use(stack.enter_context(llama.Model(path, repack=repack)))
        engine.raise_kept()
        assert engine.stats().total.read_bytes > 0
    assert largest_difference(streamed, resident) == 0.0, f"{n_slots} slots"
    return streamed
