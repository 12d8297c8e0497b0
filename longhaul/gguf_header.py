"""Reads the header of one GGUF file: its keys, and where each tensor lies.

Only importer of gguf, which supplies the tables of types; knows nothing of experts. gguf's own
reader keeps an object for each token of the vocabulary (3.3 s for 49,152 tokens, 34 s for 262,144;
here 0.05 s and 0.2 s) and trusts the lengths it finds. Nothing past the header is touched.
"""

import mmap
import os
import stat
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeGuard

from gguf.constants import (
    GGML_QUANT_SIZES,
    GGUF_DEFAULT_ALIGNMENT,
    GGUF_VERSION,
    GGMLQuantizationType,
    GGUFValueType,
)

from .errors import ConfigError, ModelError, ModelFormatError, ModelUnsupportedError

MAX_DIMS = 4  # GGML_MAX_DIMS
MAX_COUNT = 2**32 - 1  # llama.cpp reads all counts as uint32
MAX_STRINGS = 2**24  # in one array; the largest vocabularies have 2**18
MAX_KEPT_ITEMS = (
    4096  # longer arrays and strings belong to the tokenizer: only their length is kept
)

_SCALARS: dict[int, str] = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}
# ggml type -> (name, elements per block, bytes per block); llama.cpp has types that gguf may lack
_TYPES = {
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
    42: ("Q2_0", 64, 18),
} | {int(kind): (kind.name, block, size) for kind, (block, size) in GGML_QUANT_SIZES.items()}


@dataclass(frozen=True, slots=True)
class GgufArray:
    """An array, or a long string, of which only the length may have been kept."""

    length: int
    items: tuple[int | float, ...] = ()


_Value = int | float | str | GgufArray


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Describe one tensor; `offset` counts from the start of the file."""

    name: str
    shape: tuple[int, ...]  # [ne0, ne1, ...], fastest dimension first
    type_name: str
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Hold the keys and the tensors of one file."""

    path: Path
    stamp: tuple[int, int, int, int]  # device, inode, size in bytes, mtime in ns
    fields: dict[str, _Value] = field(default_factory=dict)
    tensors: list[GgufTensor] = field(default_factory=list)

    def count(self, key: str) -> int | None:
        """Return a header value that must be a uint32, or None where the key is missing."""
        value = self.fields.get(key)
        if value is None:
            return None
        if not _is_count(value):
            raise ModelFormatError(
                f"{quoted(self.path)}: key {key} is not a number from 0 to {MAX_COUNT}"
            )
        return value

    def per_layer(self, key: str, n_layer: int) -> tuple[int, ...] | None:
        """Return a header value for each layer, given as one number or as an array."""
        value = self.fields.get(key)
        if not isinstance(value, GgufArray):
            number = self.count(key)
            return None if number is None else (number,) * n_layer
        items = tuple(item for item in value.items if _is_count(item))
        if len(items) != n_layer:
            raise ModelFormatError(
                f"{quoted(self.path)}: key {key} is not an array of {n_layer} numbers from 0"
            )
        return items


def _is_count(value: _Value) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_COUNT


def quoted(path: Path) -> str:
    """Write a path so that it stays on one line whatever it holds."""
    return repr(str(path))


def read_header(path: Path) -> GgufHeader:
    """Read the header of one GGUF.

    Raises ModelError if it cannot be read, ModelFormatError if it is not whole and well-formed,
    ModelUnsupportedError for a version, byte order or tensor type that is not known.
    """
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise ModelError(f"{quoted(path)} is a directory; give the .gguf file in it")
        if not stat.S_ISREG(mode):
            raise ModelError(
                f"{quoted(path)} is not a regular file; experts are read from all over it"
            )
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ModelFormatError(f"{quoted(path)} is not a GGUF file: it does not begin so")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
                status = os.fstat(file.fileno())
                stamp = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
                return _Parser(path, stamp, view).parse()
    except ModelError:
        raise
    except FileNotFoundError as error:
        raise ModelError(f"{quoted(path)}: no such file; check the path") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ModelError(f"{quoted(path)} cannot be read: {reason}") from error


class _Parser:
    """Parses one file from the front; each length is checked against the file before its use."""

    def __init__(self, path: Path, stamp: tuple[int, int, int, int], view: mmap.mmap) -> None:
        self.path = path
        self.stamp = stamp
        self.view = view
        self.at = 4

    def parse(self) -> GgufHeader:
        version = self.number("I")
        if version & 0xFFFF == 0:
            raise ModelUnsupportedError(
                f"{quoted(self.path)} is in the other byte order, not {sys.byteorder}-endian;"
                " convert it with gguf-convert-endian"
            )
        if not 2 <= version <= GGUF_VERSION:
            raise ModelUnsupportedError(
                f"{quoted(self.path)} has GGUF version {version}; 2 to {GGUF_VERSION} can be read"
            )
        n_tensors, n_fields = self.number("Q"), self.number("Q")
        shard = GgufHeader(self.path, self.stamp)
        for _ in range(n_fields):
            key = self.name("a key")
            if key in shard.fields:
                raise self.damaged(f"key {key!r} occurs twice")
            shard.fields[key] = self.value(key)
        align = self.alignment(shard)
        infos: list[GgufTensor] = []
        end = 0
        for _ in range(n_tensors):  # each is checked at once: the number may be wrong
            infos.append(self.tensor_info(end))
            end += -(-infos[-1].size_bytes // align) * align
        self.place(shard, infos, align)
        return shard

    def damaged(self, what: str) -> ModelFormatError:
        return ModelFormatError(
            f"{quoted(self.path)} is damaged or truncated: {what}, byte {self.at} of"
            f" {len(self.view)}; get it again"
        )

    def take(self, size_bytes: int, what: str) -> int:
        """Step over some bytes and return where they begin."""
        if size_bytes > len(self.view) - self.at:
            raise self.damaged(f"{what} ends past the end of file")
        self.at += size_bytes
        return self.at - size_bytes

    def number(self, code: str) -> int:
        begin = self.take(struct.calcsize("=" + code), "the header")
        return int(struct.unpack_from("=" + code, self.view, begin)[0])

    def name(self, what: str) -> str:
        length = self.number("Q")
        begin = self.take(length, what)
        if length > MAX_KEPT_ITEMS:
            raise self.damaged(f"{what} is {length} bytes long")
        try:
            return self.view[begin : begin + length].decode()
        except UnicodeDecodeError as error:
            raise self.damaged(f"{what} is not UTF-8") from error

    def value(self, key: str) -> _Value:
        what = f"the value of key {key!r}"
        kind = self.number("I")
        if kind == GGUFValueType.STRING:
            length = self.number("Q")
            begin = self.take(length, what)
            if length > MAX_KEPT_ITEMS:
                return GgufArray(length)
            return self.view[begin : begin + length].decode(errors="replace")
        if kind != GGUFValueType.ARRAY:
            return self.numbers(kind, 1, what)[0]
        kind, length = self.number("I"), self.number("Q")
        if kind == GGUFValueType.STRING:
            self.skip_strings(length, what)
            return GgufArray(length)
        return GgufArray(length, self.numbers(kind, length, what))

    def numbers(self, kind: int, length: int, what: str) -> tuple[int | float, ...]:
        """Read an array of numbers, or only step over one that is too long to be kept."""
        if kind not in _SCALARS:
            raise self.damaged(f"{what} has the unknown type {kind}")
        begin = self.take(struct.calcsize("=" + _SCALARS[kind]) * length, what)
        if length > MAX_KEPT_ITEMS:
            return ()
        return struct.unpack_from(f"={length}{_SCALARS[kind]}", self.view, begin)

    def skip_strings(self, n_strings: int, what: str) -> None:
        if n_strings > MAX_STRINGS:
            raise self.damaged(f"{what} has {n_strings} strings")
        at, view, unpack_from = self.at, self.view, struct.Struct("=Q").unpack_from
        try:
            for _ in range(n_strings):
                at += 8 + unpack_from(view, at)[0]
        except (struct.error, OverflowError) as error:
            raise self.damaged(f"{what} ends past the end of file") from error
        self.take(at - self.at, what)

    def alignment(self, shard: GgufHeader) -> int:
        align = shard.count("general.alignment")
        align = GGUF_DEFAULT_ALIGNMENT if align is None else align
        if align == 0 or align & (align - 1):
            raise self.damaged(f"the alignment is {align}, not a power of 2")
        return align

    def tensor_info(self, expected: int) -> GgufTensor:
        """Read what is said of one tensor, which must lie at the expected offset in the data."""
        name = self.name("a tensor's name")
        n_dims = self.number("I")
        if n_dims > MAX_DIMS:
            raise self.damaged(f"tensor {name!r} has {n_dims} dimensions")
        shape = tuple(self.number("Q") for _ in range(n_dims))
        kind, offset = self.number("I"), self.number("Q")
        if offset != expected:
            raise self.damaged(f"tensor {name!r} has offset {offset}, not {expected}")
        type_name, size_bytes = self.measure(name, shape, kind)
        return GgufTensor(name, shape, type_name, offset, size_bytes)

    def place(self, shard: GgufHeader, infos: Sequence[GgufTensor], align: int) -> None:
        """Turn offsets within the data into offsets within the file; refuse a truncated file."""
        data = -(-self.at // align) * align
        for tensor in infos:
            end = data + tensor.offset + tensor.size_bytes
            if end > len(self.view):
                raise ModelFormatError(
                    f"{quoted(self.path)} is truncated: tensor {tensor.name!r} needs bytes up to"
                    f" {end}, the file has {len(self.view)}; get it again"
                )
            shard.tensors.append(replace(tensor, offset=data + tensor.offset))

    def measure(self, name: str, shape: tuple[int, ...], kind: int) -> tuple[str, int]:
        """Return a tensor's type name and size in bytes."""
        if kind not in _TYPES:
            raise ModelUnsupportedError(
                f"{quoted(self.path)}: tensor {name!r} has the unknown type {kind};"
                " get the model in another quantization"
            )
        type_name, block, block_bytes = _TYPES[kind]
        row, *rest = shape or (1,)
        if row % block:
            raise self.damaged(f"tensor {name!r} has rows of {row}, but {type_name} packs {block}")
        size_bytes = row // block * block_bytes
        for n in rest:
            size_bytes *= n
        return type_name, size_bytes


def bytes_per_weight(type_name: str) -> float:
    """Return what a weight takes in a type such as Q4_0; raises ConfigError for an unknown one."""
    try:
        n_weights, n_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[type_name.upper()]]
    except KeyError as e:
        raise ConfigError(f"{type_name!r} is no type of weights; give one such as Q4_0") from e
    return float(n_bytes / n_weights)
