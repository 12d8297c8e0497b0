"""Layers that predict further tokens (MTP): loaded whole beside streamed layers, and exact."""

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from contexts import Floats, LoadedModel, RawContext, copied, open_engine, random_tokens, rows
from gguf import GGUFReader, GGUFValueType, GGUFWriter
from models import copy_metadata, finish
from streaming import largest_difference

from longhaul.index import read_index
from longhaul.llama import llama_cpp

pytestmark = pytest.mark.usefixtures("libraries")

N_LAYER = 2  # of the tiny model, before it gets a layer more
PER_LAYER = ["attention.recurrent_layers", "swiglu_clamp_exp", "swiglu_clamp_shexp"]


def add_mtp_layer(path: Path, out: Path) -> Path:
    """Give a tiny qwen35moe a layer that predicts the token after the next, like its last one."""
    reader = GGUFReader(path)
    arch = reader.fields["general.architecture"].contents()
    writer = GGUFWriter(out, arch)
    copy_metadata(reader, writer)
    for key, count in (("block_count", N_LAYER + 1), ("nextn_predict_layers", 1)):
        del writer.kv_data[0][f"{arch}.{key}"]
        writer.add_uint32(f"{arch}.{key}", count)
    for key in PER_LAYER:
        field = reader.fields[f"{arch}.{key}"]
        del writer.kv_data[0][f"{arch}.{key}"]
        longer = [*field.contents(), 0]
        writer.add_key_value(f"{arch}.{key}", longer, GGUFValueType.ARRAY, field.types[-1])
    rng = np.random.default_rng(11)
    for tensor in reader.tensors:
        data = np.array(tensor.data)
        writer.add_tensor(tensor.name, data, raw_dtype=tensor.tensor_type)
        last = f"blk.{N_LAYER - 1}."
        # llama.cpp counts scales of a layer that it leaves out as missing
        if tensor.name.startswith(last) and not tensor.name.endswith("scale"):
            name = tensor.name.replace(last, f"blk.{N_LAYER}.")
            writer.add_tensor(name, rng.permutation(data, axis=-1), raw_dtype=tensor.tensor_type)
    n_embd = reader.fields[f"{arch}.embedding_length"].contents()
    nextn = f"blk.{N_LAYER}.nextn."
    projection = rng.standard_normal((n_embd, 2 * n_embd)) * (2 * n_embd) ** -0.5
    writer.add_tensor(nextn + "eh_proj.weight", projection.astype(np.float32))
    for norm in ("enorm", "hnorm"):
        writer.add_tensor(f"{nextn}{norm}.weight", np.ones(n_embd, np.float32))
    finish(writer)
    return out


def nextn_function(name: str, result: Any, *arguments: Any) -> Any:
    """Return a function of llama.cpp's staging API, which has C++ names."""
    function = getattr(llama_cpp.llama_cpp._lib, name)
    function.restype, function.argtypes = result, arguments
    return function


def output_hidden_states(context: RawContext) -> None:
    name = "_Z26llama_set_embeddings_nextnP13llama_contextbb"
    arguments = (ctypes.c_void_p, ctypes.c_bool, ctypes.c_bool)
    nextn_function(name, None, *arguments)(context.handle, True, False)


def hidden_states(context: RawContext, n_rows: int) -> Floats:
    name = "_Z26llama_get_embeddings_nextnP13llama_context"
    pointer = nextn_function(name, ctypes.POINTER(ctypes.c_float), ctypes.c_void_p)(context.handle)
    return copied(pointer, n_rows * context.n_embd).reshape(n_rows, context.n_embd)


def decode_pairs(context: RawContext, tokens: list[int], hidden: Floats) -> Floats:
    """Evaluate tokens, each with the hidden state of the token before it; return the logits."""
    n_rows = len(tokens)
    batch = llama_cpp.llama_batch_init(n_rows, 0, 1)
    values = np.ascontiguousarray(hidden, np.float32)
    batch.embd = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    for i, token in enumerate(tokens):
        batch.token[i], batch.pos[i] = token, i
        batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, 0, 1
    batch.n_tokens = n_rows
    code = llama_cpp.llama_decode(context.handle, batch)
    batch.embd = None  # numpy's own
    llama_cpp.llama_batch_free(batch)
    assert code == 0
    return np.stack([context.logits(i) for i in range(n_rows)])


def predict_two_tokens(path: Path) -> tuple[Floats, Floats]:
    """Return logits of the next token, and of the one after it."""
    params = llama_cpp.llama_model_default_params()
    params.load_mtp, params.use_extra_bufts = True, False
    handle = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
    assert handle
    model = LoadedModel(handle)
    tokens = random_tokens(40)
    settings = {"ctx_type": llama_cpp.LLAMA_CONTEXT_TYPE_MTP}
    with RawContext(model) as target, RawContext(model, **settings) as draft:
        output_hidden_states(target)
        following = target.decode(rows(tokens))
        second = decode_pairs(draft, tokens[1:], hidden_states(target, 40)[:-1])
    llama_cpp.llama_model_free(handle)
    return following, second


@pytest.fixture
def mtp_model(widened: Callable[[str, int, int], Path], tmp_path: Path) -> Path:
    """A tiny MoE of 2 layers and 1 MTP layer x 8 experts, top-3."""
    return add_mtp_layer(widened("qwen35moe", 8, 3), tmp_path / "mtp.gguf")


@pytest.mark.parametrize("n_slots", [1, 3, 8])
def test_mtp_layer_is_loaded_whole_and_exact(n_slots: int, mtp_model: Path) -> None:
    index = read_index(mtp_model)
    assert [layer.layer for layer in index.layers] == [0, 1]
    assert index.mtp_bytes > 0
    resident = predict_two_tokens(mtp_model)
    with open_engine(mtp_model, n_slots) as engine:
        streamed = predict_two_tokens(mtp_model)
        engine.raise_kept()
        assert engine.stats().total.read_bytes > 0
    assert largest_difference(resident[0][1:], resident[1]) > 0
    for of_streamed, of_resident in zip(streamed, resident, strict=True):
        assert largest_difference(of_streamed, of_resident) == 0.0


def test_mtp_layer_is_left_out_unless_asked_for(mtp_model: Path) -> None:
    with open_engine(mtp_model, 3) as engine:
        params = llama_cpp.llama_model_default_params()
        handle = llama_cpp.llama_model_load_from_file(str(mtp_model).encode(), params)
        assert handle
        with RawContext(LoadedModel(handle)) as context:
            logits = context.decode(rows(random_tokens(40)))
        llama_cpp.llama_model_free(handle)
        engine.raise_kept()
    with_layer = predict_two_tokens(mtp_model)[0]
    assert largest_difference(logits, with_layer) == 0.0
