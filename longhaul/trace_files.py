"""Opens any trace: our own, and the two public formats that bench/traces/README.md describes. Pure.

- JSON lines: `{"tok": 1, "layers": [[6, 8, ...], ...]}`, a token a line. Each is taken as a ubatch
  of decoding; the experts of a layer are the next power of two above all ids.
- `# route_trace v1`: comments with shapes and sizes, then rows of CSV. The prompt of a turn comes
  layer by layer and is taken as one ubatch, each later step as one of decoding.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from .errors import TraceError
from .trace import (
    MAGIC,
    TraceFile,
    TraceHeader,
    TraceLayer,
    TraceRecord,
    TraceSource,
    as_dict,
    as_list,
    as_whole,
)

ROUTE_TRACE = b"# route_trace v1"
MAX_EXPERTS = 2**16
MAX_WEIGHT = 65504  # of a float16
COLUMNS = ("turn", "phase", "step", "layer", "expert", "weight")


def open_trace(path: Path, expert_bytes: int = 0) -> TraceSource:
    """Open a trace of any format; `expert_bytes` is the size of an expert where none is given.

    Raises TraceError if it is none, or if what is read at once is malformed.
    """
    try:
        with path.open("rb") as file:
            start = file.read(64)
        source: TraceSource
        if start.startswith(ROUTE_TRACE):
            source = RouteTrace(path)
        elif start.lstrip().startswith(b"{"):
            source = JsonLines(path)
        elif MAGIC.startswith(start[: len(MAGIC)]):
            source = TraceFile(path)
        else:
            raise TraceError(f"{path}: byte 0: no trace of a known format")
    except OSError as e:
        raise TraceError(f"{path} cannot be read: {e.strerror}") from e
    return Sized(source, expert_bytes) if expert_bytes else source


class Sized:
    """Give the experts of a trace a size where it says none."""

    def __init__(self, source: TraceSource, expert_bytes: int) -> None:
        self._source = source
        layers = source.header.layers
        sized = [replace(each, expert_bytes=each.expert_bytes or expert_bytes) for each in layers]
        self.header = replace(source.header, layers=tuple(sized))

    @property
    def notes(self) -> list[str]:
        """What the last reading left out."""
        return self._source.notes

    def records(self) -> Iterator[TraceRecord]:
        """Read from the start."""
        return self._source.records()


# --- JSON lines -----------------------------------------------------------------------------------


class JsonLines:
    """Read a trace of JSON lines, one token at a time."""

    def __init__(self, path: Path) -> None:
        """Read it once for the number of experts; raises TraceError if a line is malformed."""
        self.path = path
        self.notes: list[str] = []
        n_used: list[int] = []
        top = 0
        for number, layers in self._lines():
            shape = [len(ids) for ids in layers]
            if n_used and shape != n_used:
                raise TraceError(f"{path}: line {number}: other layers than in the lines before")
            n_used = shape
            top = max(top, *(max(ids) for ids in layers))
        if not n_used:
            raise TraceError(f"{path}: there are no tokens")
        n_expert = 1 << top.bit_length()
        layers_used = [TraceLayer(il, n_expert, n) for il, n in enumerate(n_used)]
        self.header = TraceHeader(tuple(layers_used), model=path.stem)

    def _lines(self) -> Iterator[tuple[int, list[list[int]]]]:
        with self.path.open(encoding="utf-8", errors="replace") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    try:
                        yield number, _parse_line(line)
                    except (ValueError, RecursionError) as e:
                        raise TraceError(f"{self.path}: line {number}: {e}") from e

    def records(self) -> Iterator[TraceRecord]:
        """Read from the start."""
        for ubatch, (_, layers) in enumerate(self._lines()):
            for index, ids in enumerate(layers):
                yield TraceRecord(ubatch, index, False, np.array([ids], np.uint16))


def _parse_line(line: str) -> list[list[int]]:
    layers = [
        [as_whole(expert, "expert", 0) for expert in as_list(ids, "a layer")]
        for ids in as_list(as_dict(json.loads(line), "it").get("layers"), "layers")
    ]
    if not layers or not all(layers):
        raise ValueError("a layer without experts")
    if max(map(max, layers)) >= MAX_EXPERTS:
        raise ValueError(f"an expert of {MAX_EXPERTS} or more")
    return layers


# --- route_trace v1 -------------------------------------------------------------------------------


class RouteTrace:
    """Read a route_trace of version 1, one layer of one ubatch at a time."""

    def __init__(self, path: Path) -> None:
        """Read the comments; raises TraceError if they do not give every layer's shape."""
        self.path = path
        self.notes: list[str] = []
        shape: dict[str, str] = {}
        sizes: dict[int, int] = {}
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                if not line.startswith("#"):
                    break
                found = dict(word.split("=", 1) for word in line.split() if "=" in word)
                if "layer" in found:
                    sizes[self._whole(found, "layer")] = self._whole(found, "expert_bytes")
                shape.update(found)
        n_expert, n_used, n_layer = (
            self._whole(shape, key) for key in ("n_expert", "n_expert_used", "n_layer")
        )
        if not 0 < n_used <= n_expert <= MAX_EXPERTS or sorted(sizes) != list(range(n_layer)):
            raise TraceError(f"{path}: line 2: {n_layer} layers, {n_used} of {n_expert} experts")
        layers = [TraceLayer(il, n_expert, n_used, sizes[il]) for il in range(n_layer)]
        self.header = TraceHeader(tuple(layers), shape.get("model", ""), shape.get("arch", ""))

    def _whole(self, found: dict[str, str], key: str) -> int:
        try:
            return as_whole(int(found[key]), key, 0)
        except (KeyError, ValueError) as e:
            raise TraceError(f"{self.path}: in the comments: no number for {key}") from e

    def records(self) -> Iterator[TraceRecord]:
        """Read from the start; raises TraceError where a row is malformed."""
        ubatch = -1
        before: tuple[int, ...] = ()
        for place, rows in self._groups():
            turn, phase, step, layer = place
            if (turn, phase, step) != before[:3] or layer <= before[3]:
                ubatch += 1
            before = place
            n_used = self.header.layers[layer].n_expert_used
            ids = np.array([expert for expert, _ in rows], np.uint16)
            weights = np.array([weight for _, weight in rows], np.float16)
            shape = (-1, n_used)
            yield TraceRecord(
                ubatch, layer, phase == 0, ids.reshape(shape), None, weights.reshape(shape)
            )

    def _groups(self) -> Iterator[tuple[tuple[int, ...], list[tuple[int, float]]]]:
        """Yield the rows of one layer of one ubatch: (turn, phase, step or 0, layer)."""
        place: tuple[int, ...] = ()
        rows: list[tuple[int, float]] = []
        for number, row in self._rows():
            at, value = self._parse(number, row)
            if rows and at != place:
                yield place, self._whole_tokens(number, place, rows)
                rows = []
            place = at
            rows.append(value)
        if rows:
            yield place, self._whole_tokens(number, place, rows)

    def _rows(self) -> Iterator[tuple[int, Sequence[str]]]:
        columns: list[int] = []
        with self.path.open(encoding="utf-8", errors="replace") as file:
            for number, line in enumerate(file, 1):
                row = line.strip().split(",")
                if line.startswith("#") or row == [""]:
                    continue
                if not columns:
                    if not set(COLUMNS) <= set(row):
                        raise TraceError(f"{self.path}: line {number}: unknown columns")
                    columns = [row.index(name) for name in COLUMNS]
                elif len(row) <= max(columns):
                    raise TraceError(f"{self.path}: line {number}: too few columns")
                else:
                    yield number, [row[column] for column in columns]

    def _parse(self, number: int, row: Sequence[str]) -> tuple[tuple[int, ...], tuple[int, float]]:
        try:
            turn, phase, step, layer, expert = (as_whole(int(word), "it", 0) for word in row[:5])
            weight = float(row[5])
            if not 0 <= weight < MAX_WEIGHT:
                raise ValueError(weight)
        except ValueError as e:
            raise TraceError(f"{self.path}: line {number}: {','.join(row)}") from e
        layers = self.header.layers
        if phase > 1 or layer >= len(layers) or expert >= layers[layer].n_expert:
            raise TraceError(f"{self.path}: line {number}: {','.join(row)}")
        return (turn, phase, step if phase else 0, layer), (expert, weight)

    def _whole_tokens(
        self, number: int, place: tuple[int, ...], rows: list[tuple[int, float]]
    ) -> list[tuple[int, float]]:
        if len(rows) % self.header.layers[place[3]].n_expert_used:
            raise TraceError(f"{self.path}: line {number}: {len(rows)} experts before it")
        return rows
