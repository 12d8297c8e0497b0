"""Writes the header of a GGUF byte by byte.

So it can be wrong in any way. The data is a hole in the file.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from longhaul.errors import ModelError
from longhaul.index import read_index

Value = int | str | list[int] | list[str]
F32, Q4_0, Q8_0 = 0, 2, 8
BLOCK = {F32: (1, 4), Q4_0: (32, 18), Q8_0: (32, 34), 42: (64, 18)}


@dataclass(frozen=True)
class Raw:
    """A tensor as the file describes it, true or not."""

    name: str
    shape: tuple[int, ...]
    kind: int = F32

    @property
    def size_bytes(self) -> int:
        block, size = BLOCK.get(self.kind, (1, 1))
        n = size
        for count in self.shape:
            n *= count
        return n // block


def text(word: str | bytes) -> bytes:
    data = word.encode() if isinstance(word, str) else word
    return struct.pack("<Q", len(data)) + data


def packed(value: Value) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if value and isinstance(value[0], str):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(text(str(v)) for v in value)
    return struct.pack("<IIQ", 9, 4, len(value)) + struct.pack(f"<{len(value)}I", *value)


def header(fields: dict[str, Value], tensors: Sequence[Raw], version: int = 3) -> bytes:
    out = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(fields))
    out += b"".join(text(key) + packed(value) for key, value in fields.items())
    offset = 0
    for tensor in tensors:
        out += text(tensor.name) + struct.pack("<I", len(tensor.shape))
        out += struct.pack(f"<{len(tensor.shape)}QIQ", *tensor.shape, tensor.kind, offset)
        offset += -(-tensor.size_bytes // 32) * 32
    return out + bytes(-len(out) % 32)


def write(path: Path, fields: dict[str, Value], tensors: Sequence[Raw], version: int = 3) -> Path:
    """Write a GGUF whose data is a hole in the file."""
    head = header(fields, tensors, version)
    with path.open("wb") as file:
        file.write(head)
        file.truncate(len(head) + sum(-(-tensor.size_bytes // 32) * 32 for tensor in tensors))
    return path


def moe_fields(**more: Value) -> dict[str, Value]:
    fields: dict[str, Value] = {
        "general.architecture": "qwen3moe",
        "general.name": "tiny",
        "qwen3moe.block_count": 2,
        "qwen3moe.context_length": 256,
        "qwen3moe.embedding_length": 64,
        "qwen3moe.feed_forward_length": 96,
        "qwen3moe.attention.head_count": 4,
        "qwen3moe.attention.head_count_kv": 2,
        "qwen3moe.expert_count": 8,
        "qwen3moe.expert_used_count": 2,
        "tokenizer.ggml.tokens": ["a", "b", ""],
    }
    return fields | {key.replace("__", "."): value for key, value in more.items()}


def experts(il: int, n_expert: int = 8, down: int = Q8_0) -> list[Raw]:
    return [
        Raw(f"blk.{il}.ffn_gate_exps.weight", (64, 32, n_expert), Q4_0),
        Raw(f"blk.{il}.ffn_down_exps.weight", (32, 64, n_expert), down),
        Raw(f"blk.{il}.ffn_up_exps.weight", (64, 32, n_expert), Q4_0),
    ]


DENSE = [Raw("token_embd.weight", (64, 3)), Raw("blk.0.attn_q.weight", (64, 64))]


def moe(path: Path, **more: Value) -> Path:
    return write(path, moe_fields(**more), [*DENSE, *experts(0), *experts(1, down=F32)])


def shard_path(folder: Path, number: int, count: int) -> Path:
    return folder / f"m-{number:05d}-of-{count:05d}.gguf"


def split(folder: Path, parts: Sequence[Sequence[Raw]], **more: Value) -> Path:
    """Write one shard for each list of tensors; keys of the model stand in the first alone."""
    for no, tensors in enumerate(parts):
        fields: dict[str, Value] = moe_fields() if no == 0 else {}
        fields |= {
            "split.no": no,
            "split.count": len(parts),
            "split.tensors.count": sum(map(len, parts)),
        }
        write(
            shard_path(folder, no + 1, len(parts)),
            fields | {key.replace("__", "."): value for key, value in more.items()},
            tensors,
        )
    return shard_path(folder, 1, len(parts))


def refusal(path: Path, kind: type[ModelError]) -> str:
    with pytest.raises(ModelError) as caught:
        read_index(path)
    assert type(caught.value) is kind
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert path.name in message
    return message
