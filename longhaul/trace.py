"""Routing traces: which experts each layer of a run asked for, ubatch by ubatch. Pure.

Format 1: the bytes `LHTRACE1` and a newline; a line of JSON, the header; then records, all numbers
little-endian:

    uint32   ubatch, from 0; never less than that of the record before
    uint16   layer index: place in the header's `layers`, at most once in a ubatch
    uint8    phase: 0 prefill, 1 decode
    uint8    flags: 1 weights follow, 2 hit bits follow
    uint32   n_tokens
    uint16[] expert ids, n_expert_used of each token
    uint8[]  if there are hit bits: one for each id, the least significant first; set where the
             expert was in a slot when the ubatch's plan of this layer was made
    float16[] if there are weights: one for each id

The header has `format` (1), `model`, `arch`, `fingerprint`, `n_slots` (by layer, or empty),
`policy` and `layers`, each of them with `layer`, `n_expert`, `n_expert_used` and `expert_bytes` (0
where that is not known). Keys that are not known here are passed over.
"""

import json
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO, NoReturn, Protocol

import numpy as np
import numpy.typing as npt

from .errors import TraceError
from .experts import ExpertTensor, MoeLayer

MAGIC = b"LHTRACE1\n"
FORMAT = 1
HAS_WEIGHTS = 1
HAS_HITS = 2
PHASES = ("prefill", "decode")
MAX_HEADER_BYTES = 2**24
MAX_IDS = 2**24  # of a record: more than any ubatch has

_HEAD = struct.Struct("<IHBBI")

Ids = npt.NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class TraceLayer:
    """Describe a layer with routed experts; `expert_bytes` is 0 where it is not known."""

    layer: int
    n_expert: int
    n_expert_used: int
    expert_bytes: int = 0

    def moe_layer(self) -> MoeLayer:
        """Return what a budget wants to know; where sizes are not known, experts count 1 byte."""
        size = self.expert_bytes or 1
        tensor = ExpertTensor(f"blk.{self.layer}", self.layer, 0, 0, self.n_expert, size, "")
        return MoeLayer(self.layer, self.n_expert, self.n_expert_used, (tensor,))


@dataclass(frozen=True, slots=True)
class TraceHeader:
    """Say of which run a trace is."""

    layers: tuple[TraceLayer, ...]
    model: str = ""
    arch: str = ""
    fingerprint: str = ""
    n_slots: tuple[int, ...] = ()  # by layer; empty: not recorded with a cache
    policy: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class TraceRecord:
    """Hold what one layer of one ubatch asked for, (n_tokens, n_expert_used) each."""

    ubatch: int
    layer_index: int
    is_prefill: bool
    ids: Ids
    hits: npt.NDArray[np.bool_] | None = None
    weights: npt.NDArray[np.float16] | None = None


class TraceSource(Protocol):
    """Read a trace as often as wanted, whatever its format."""

    @property
    def header(self) -> TraceHeader:
        """Of which run it is."""

    @property
    def notes(self) -> list[str]:
        """What the last reading left out, in words."""

    def records(self) -> Iterator[TraceRecord]:
        """Read from the start, in order; raises TraceError where the file is malformed."""


# --- writing --------------------------------------------------------------------------------------


def header_bytes(header: TraceHeader) -> bytes:
    """Return what a trace file begins with."""
    return MAGIC + json.dumps({"format": FORMAT, **asdict(header)}).encode() + b"\n"


def record_bytes(record: TraceRecord) -> bytes:
    """Return a record as it stands in a file."""
    flags = HAS_WEIGHTS * (record.weights is not None) | HAS_HITS * (record.hits is not None)
    phase = 0 if record.is_prefill else 1
    parts = [
        _HEAD.pack(record.ubatch, record.layer_index, phase, flags, len(record.ids)),
        record.ids.astype("<u2", copy=False).tobytes(),
    ]
    if record.hits is not None:
        parts.append(np.packbits(record.hits.reshape(-1), bitorder="little").tobytes())
    if record.weights is not None:
        parts.append(record.weights.astype("<f2", copy=False).tobytes())
    return b"".join(parts)


class TraceWriter:
    """Write a trace to an open file, record by record."""

    def __init__(self, file: BinaryIO, header: TraceHeader) -> None:
        self._file = file
        file.write(header_bytes(header))

    def write(self, record: TraceRecord) -> None:
        """Append a record."""
        self._file.write(record_bytes(record))


# --- reading --------------------------------------------------------------------------------------


class TraceFile:
    """Read a trace of format 1; one record at a time is in memory."""

    def __init__(self, path: Path) -> None:
        """Read the header; raises TraceError if it is malformed, OSError if there is no file."""
        self.path = path
        self.notes: list[str] = []
        with path.open("rb") as file:
            self.header, self._first = self._read_header(file)

    def _read_header(self, file: BinaryIO) -> tuple[TraceHeader, int]:
        if file.read(len(MAGIC)) != MAGIC:
            self._fail(0, f"the file does not begin with {MAGIC.decode().strip()}")
        line = file.readline(MAX_HEADER_BYTES)
        if not line.endswith(b"\n"):
            self._fail(len(MAGIC), "the header has no end")
        try:
            return parse_header(json.loads(line)), file.tell()
        except (ValueError, RecursionError) as e:
            raise TraceError(f"{self.path}: byte {len(MAGIC)}: the header: {e}") from e

    def _fail(self, offset: int, what: str) -> NoReturn:
        raise TraceError(f"{self.path}: byte {offset}: {what}")

    def records(self) -> Iterator[TraceRecord]:
        """Read from the start; a last record that is cut short is dropped with a note."""
        self.notes.clear()
        with self.path.open("rb") as file:
            file.seek(self._first)
            yield from self._records(file)

    def _records(self, file: BinaryIO) -> Iterator[TraceRecord]:
        offset, ubatch, seen = self._first, 0, set[int]()
        while head := file.read(_HEAD.size):
            body = b""
            n_bytes = 0
            if len(head) == _HEAD.size:
                fields = _HEAD.unpack(head)
                n_bytes = self._body_bytes(offset, fields)
                body = file.read(n_bytes)
            if len(head) < _HEAD.size or len(body) < n_bytes:
                n_left = len(head) + len(body)
                self.notes.append(f"the last {n_left} bytes are a part of a record: dropped")
                return
            if fields[0] < ubatch:
                self._fail(offset, f"ubatch {fields[0]} after {ubatch}")
            if fields[0] > ubatch:
                ubatch, seen = fields[0], set()
            if fields[1] in seen:
                self._fail(offset, f"layer index {fields[1]} is twice in ubatch {ubatch}")
            seen.add(fields[1])
            yield self._record(offset, fields, body)
            offset += len(head) + n_bytes

    def _body_bytes(self, offset: int, fields: tuple[int, ...]) -> int:
        _, layer_index, phase, flags, n_tokens = fields
        layers = self.header.layers
        if layer_index >= len(layers):
            self._fail(offset + 4, f"layer index {layer_index}; there are {len(layers)} layers")
        if phase >= len(PHASES):
            self._fail(offset + 6, f"phase {phase} is none")
        if flags & ~(HAS_WEIGHTS | HAS_HITS):
            self._fail(offset + 7, f"flags {flags} are not known")
        n_ids = n_tokens * layers[layer_index].n_expert_used
        if n_ids > MAX_IDS:
            self._fail(offset + 8, f"{n_tokens} tokens are more than a ubatch can have")
        return 2 * n_ids * (1 + (flags & HAS_WEIGHTS)) + (-(-n_ids // 8) if flags & HAS_HITS else 0)

    def _record(self, offset: int, fields: tuple[int, ...], body: bytes) -> TraceRecord:
        ubatch, layer_index, phase, flags, n_tokens = fields
        layer = self.header.layers[layer_index]
        shape = (n_tokens, layer.n_expert_used)
        n_ids = n_tokens * layer.n_expert_used
        ids: Ids = np.frombuffer(body, "<u2", n_ids)
        if n_ids and ids.max() >= layer.n_expert:
            at = int(np.argmax(ids >= layer.n_expert))
            self._fail(
                offset + _HEAD.size + 2 * at,
                f"expert {ids[at]} of layer {layer.layer}, which has {layer.n_expert}",
            )
        hits = weights = None
        end = 2 * n_ids
        if flags & HAS_HITS:
            bits = np.frombuffer(body, np.uint8, -(-n_ids // 8), end)
            hits = np.unpackbits(bits, count=n_ids, bitorder="little").view(np.bool_).reshape(shape)
            end += len(bits)
        if flags & HAS_WEIGHTS:
            weights = np.frombuffer(body, "<f2", n_ids, end).reshape(shape)
        return TraceRecord(ubatch, layer_index, phase == 0, ids.reshape(shape), hits, weights)


def parse_header(found: object) -> TraceHeader:
    """Check a header that was read as JSON; raises ValueError that names the key."""
    values = as_dict(found, "it")
    if values.get("format") != FORMAT:
        raise ValueError(f"format {values.get('format')!r}; only {FORMAT} can be read")
    layers = tuple(_parse_layer(each) for each in as_list(values.get("layers"), "layers"))
    if not layers:
        raise ValueError("layers is empty")
    n_slots = tuple(
        as_whole(n, "n_slots", 1) for n in as_list(values.get("n_slots", []), "n_slots")
    )
    if n_slots and len(n_slots) != len(layers):
        raise ValueError(f"n_slots has {len(n_slots)} numbers for {len(layers)} layers")
    keys = ("model", "arch", "fingerprint", "policy")
    texts = {key: as_text(values.get(key, ""), key) for key in keys}
    return TraceHeader(layers, n_slots=n_slots, **texts)


def _parse_layer(found: object) -> TraceLayer:
    values = as_dict(found, "a layer")
    least = {"layer": 0, "n_expert": 1, "n_expert_used": 1, "expert_bytes": 0}
    layer = TraceLayer(*(as_whole(values.get(key), key, n) for key, n in least.items()))
    if layer.n_expert > 2**16 or layer.n_expert_used > layer.n_expert:
        raise ValueError(f"layer {layer.layer} uses {layer.n_expert_used} of {layer.n_expert}")
    return layer


# --- JSON that others may have written ------------------------------------------------------------


def as_dict(found: object, what: str) -> dict[str, object]:
    """Return an object of JSON; raises ValueError if it is something else."""
    if not isinstance(found, dict):
        raise ValueError(f"{what} is no object")
    return found


def as_list(found: object, what: str) -> list[object]:
    """Return an array of JSON; raises ValueError if it is something else."""
    if not isinstance(found, list):
        raise ValueError(f"{what} is no array")
    return found


def as_text(found: object, what: str) -> str:
    """Return a string of JSON; raises ValueError if it is something else."""
    if not isinstance(found, str):
        raise ValueError(f"{what} is no string")
    return found


def as_whole(found: object, what: str, least: int) -> int:
    """Return a number of JSON; raises ValueError if it is not a whole one, or less than `least`."""
    if not isinstance(found, int) or isinstance(found, bool) or not least <= found < 2**63:
        raise ValueError(f"{what} {found!r} is not a whole number from {least} on")
    return found
