"""Writes tiny GGUF models with random weights, whole or split; knows no code of longhaul.

Weights are symmetric about zero, so that routing differs from token to token. The vocabulary is
`no_vocab`: tests feed token ids.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatch
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import quantize

Type = GGMLQuantizationType
Types = Mapping[str, Type]  # tensor name pattern -> type; the last that matches counts
Groups = Sequence[Sequence[str]]  # tensor names of each shard
Array = npt.NDArray[Any]
Tensor = tuple[str, tuple[int, ...], float]  # name, shape in numpy order, standard deviation

K_BLOCK = 256  # values in one block of a K type


@dataclass(frozen=True)
class _Shape:
    arch: str
    n_layer: int
    n_embd: int
    n_ff: int
    n_vocab: int
    n_expert: int = 0
    n_expert_used: int = 0
    types: Types = field(default_factory=dict)
    seed: int = 0

    n_head = 2

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head


def write_tiny_moe(
    path: Path,
    *,
    arch: str = "qwen3moe",
    n_layer: int = 3,
    n_expert: int = 8,
    n_expert_used: int = 2,
    n_embd: int = 64,
    n_ff: int = 96,
    n_vocab: int = 128,
    types: Types | None = None,
    seed: int = 0,
    split: int | Groups | None = None,
) -> Path:
    """Write a tiny MoE and return the file to load: `path`, or its first shard if `split` is given.

    `arch` is qwen3moe or llama. K types need `n_embd` and `n_ff` to be multiples of 256, the
    other quantised types of 32.
    """
    shape = _Shape(arch, n_layer, n_embd, n_ff, n_vocab, n_expert, n_expert_used, types or {}, seed)
    _write(path, shape)
    if split is None:
        return path
    shards = split_gguf(path, split)
    path.unlink()
    return shards[0]


def write_tiny_dense(
    path: Path,
    *,
    arch: str = "llama",
    n_layer: int = 2,
    n_embd: int = 64,
    n_ff: int = 128,
    n_vocab: int = 128,
    types: Types | None = None,
    seed: int = 0,
) -> Path:
    """Write a tiny model without routed experts to `path`; `arch` is qwen3 or llama."""
    _write(path, _Shape(arch, n_layer, n_embd, n_ff, n_vocab, types=types or {}, seed=seed))
    return path


def split_gguf(path: Path, shards: int | Groups) -> list[Path]:
    """Write the model at `path` as shards beside it, which it stays beside, and return their paths.

    A number asks for shards of as many tensors each; a first group may be empty.
    """
    reader = GGUFReader(path)
    names = [tensor.name for tensor in reader.tensors]
    if isinstance(shards, int):
        cuts = [round(i * len(names) / shards) for i in range(shards + 1)]
        shards = [names[start:end] for start, end in pairwise(cuts)]
    if sorted(names) != sorted(name for group in shards for name in group):
        raise ValueError(f"the groups do not hold each tensor of {path} once")
    return [_write_shard(reader, path, number, shards) for number in range(len(shards))]


def experts_in_two_shards(path: Path, layer: int) -> list[list[str]]:
    """Return groups for split_gguf: the second has the down experts of `layer` and what follows."""
    names = [tensor.name for tensor in GGUFReader(path).tensors]
    cut = names.index(f"blk.{layer}.ffn_down_exps.weight")
    return [names[:cut], names[cut:]]


def truncate(path: Path, n_bytes: int) -> None:
    """Cut the file to its first `n_bytes` bytes, or by `-n_bytes` if negative."""
    with path.open("rb+") as file:
        file.truncate(n_bytes if n_bytes >= 0 else path.stat().st_size + n_bytes)


@contextmanager
def truncated(path: Path, n_bytes: int) -> Iterator[None]:
    """Have the file cut meanwhile, and be what it was afterwards, as far as anybody can tell."""
    content, mtime_ns = path.read_bytes(), path.stat().st_mtime_ns
    truncate(path, n_bytes)
    yield
    path.write_bytes(content)
    os.utime(path, ns=(mtime_ns, mtime_ns))


def copy_metadata(reader: GGUFReader, writer: GGUFWriter) -> None:
    """Copy every key but the architecture, which the writer has from its constructor."""
    for key in reader.fields.values():
        is_empty_array = key.types[0] is GGUFValueType.ARRAY and len(key.types) == 1
        if not key.name.startswith("GGUF.") and key.name != "general.architecture":
            if not is_empty_array:
                writer.add_key_value(key.name, key.contents(), key.types[0], key.types[-1])


def finish(writer: GGUFWriter) -> None:
    """Write header, keys and tensors that were added, and close the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def random_weights(
    rng: np.random.Generator, shape: tuple[int, ...], std: float, kind: Type
) -> Array:
    """Return random weights of mean zero as GGUFWriter.add_tensor takes them: (..., row_bytes)."""
    if kind in K_BLOCKS:
        n_blocks, rest = divmod(shape[-1], K_BLOCK)
        if rest:
            raise ValueError(f"rows of {shape[-1]} values cannot be {kind.name}")
        n_rows = int(np.prod(shape[:-1]))
        return K_BLOCKS[kind](rng, n_rows * n_blocks, std).reshape(*shape[:-1], -1)
    values = (rng.standard_normal(shape) * std).astype(np.float32)
    return quantize(values, kind)


def _q4_k(rng: np.random.Generator, n_blocks: int, std: float) -> Array:
    # value = d * scale * nibble - dmin * minimum, with minimum = scale and dmin = 7.5 d: mean zero
    scale = rng.integers(8, 16, (n_blocks, 8), dtype=np.uint8)
    low, high = scale[:, :4], scale[:, 4:]
    d = np.full((n_blocks, 1), std / 54, np.float16)  # 54: deviation of scale * (nibble - 7.5)
    quants = rng.integers(0, 256, (n_blocks, 128), dtype=np.uint8)
    halves = [d.view(np.uint8), (d * np.float16(7.5)).view(np.uint8)]
    return np.concatenate([*halves, low, low, high | high << 4, quants], axis=1)


def _q6_k(rng: np.random.Generator, n_blocks: int, std: float) -> Array:
    # value = d * scale * (quant - 32), with scales of either sign: mean zero
    quants = rng.integers(0, 256, (n_blocks, 192), dtype=np.uint8)
    scale = rng.integers(8, 16, (n_blocks, 16), dtype=np.int8)
    scale *= rng.choice(np.array([-1, 1], np.int8), scale.shape)
    d = np.full((n_blocks, 1), std / 217, np.float16)  # 217: deviation of scale * (quant - 32)
    return np.concatenate([quants, scale.view(np.uint8), d.view(np.uint8)], axis=1)


K_BLOCKS: dict[Type, Callable[[np.random.Generator, int, float], Array]] = {
    Type.Q4_K: _q4_k,
    Type.Q6_K: _q6_k,
}


def _write(path: Path, shape: _Shape) -> None:
    writer = GGUFWriter(path, shape.arch)
    _add_metadata(writer, shape)
    rng = np.random.default_rng(shape.seed)
    for name, dims, std in _tensors(shape):
        if std == 0:  # norms
            writer.add_tensor(name, np.ones(dims, np.float32))
            continue
        kind = Type.F32
        if not name.endswith("ffn_gate_inp.weight"):
            found = [kind for pattern, kind in shape.types.items() if fnmatch(name, pattern)]
            kind = found[-1] if found else Type.F32
        writer.add_tensor(name, random_weights(rng, dims, std, kind), raw_dtype=kind)
    finish(writer)


def _add_metadata(writer: GGUFWriter, shape: _Shape) -> None:
    writer.add_name(f"tiny {shape.arch}")
    writer.add_block_count(shape.n_layer)
    writer.add_context_length(2048)
    writer.add_embedding_length(shape.n_embd)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_head_count(shape.n_head)
    writer.add_head_count_kv(1)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(shape.n_vocab)
    writer.add_tokenizer_model("no_vocab")
    if shape.n_expert:
        writer.add_expert_count(shape.n_expert)
        writer.add_expert_used_count(shape.n_expert_used)
        if shape.arch != "llama":
            writer.add_expert_feed_forward_length(shape.n_ff)


def _tensors(shape: _Shape) -> Iterator[Tensor]:
    d, f, head = shape.n_embd, shape.n_ff, shape.head_dim
    unit = d**-0.5
    yield "token_embd.weight", (shape.n_vocab, d), 1
    yield "output_norm.weight", (d,), 0
    yield "output.weight", (shape.n_vocab, d), unit
    for layer in range(shape.n_layer):
        blk = f"blk.{layer}."
        yield blk + "attn_norm.weight", (d,), 0
        yield blk + "ffn_norm.weight", (d,), 0
        if shape.arch.startswith("qwen3"):
            yield blk + "attn_q_norm.weight", (head,), 0
            yield blk + "attn_k_norm.weight", (head,), 0
        yield blk + "attn_q.weight", (d, d), unit
        yield blk + "attn_k.weight", (head, d), unit
        yield blk + "attn_v.weight", (head, d), unit
        yield blk + "attn_output.weight", (d, d), unit
        experts, suffix = ((shape.n_expert,), "_exps") if shape.n_expert else ((), "")
        if shape.n_expert:
            yield blk + "ffn_gate_inp.weight", (shape.n_expert, d), unit
        yield f"{blk}ffn_gate{suffix}.weight", (*experts, f, d), unit
        yield f"{blk}ffn_up{suffix}.weight", (*experts, f, d), unit
        yield f"{blk}ffn_down{suffix}.weight", (*experts, d, f), f**-0.5


def _write_shard(reader: GGUFReader, path: Path, number: int, groups: Groups) -> Path:
    shard = path.with_name(f"{path.stem}-{number + 1:05d}-of-{len(groups):05d}.gguf")
    architecture = reader.fields["general.architecture"].contents()
    writer = GGUFWriter(shard, architecture)
    if number == 0:
        copy_metadata(reader, writer)
    else:
        del writer.kv_data[0]["general.architecture"]  # as llama.cpp's own tool writes them
    writer.add_uint16("split.no", number)
    writer.add_uint16("split.count", len(groups))
    writer.add_int32("split.tensors.count", len(reader.tensors))
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    for name in groups[number]:
        data = np.ascontiguousarray(tensors[name].data).view(np.uint8)
        writer.add_tensor(name, data, raw_dtype=tensors[name].tensor_type)
    finish(writer)
    return shard
