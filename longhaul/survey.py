"""What a trace holds, found in one reading; and the same trace in our format. Pure."""

from dataclasses import dataclass
from pathlib import Path

from .errors import ConfigError
from .files import replacing
from .report import span
from .stats import Counters, Stats
from .trace import TraceWriter
from .trace_files import open_trace

MIB = 2**20


@dataclass(frozen=True, slots=True)
class Survey:
    """Say what a trace holds; sizes are in bytes, what was not recorded is None."""

    model: str
    arch: str
    fingerprint: str
    policy: str
    n_slots: tuple[int, ...]
    n_layers: int
    n_expert: tuple[int, ...]
    n_expert_used: tuple[int, ...]
    expert_bytes: tuple[int, ...]
    n_records: int
    n_prefill_tokens: int
    n_decode_tokens: int
    n_prefill_ubatches: int
    n_decode_ubatches: int
    n_experts_seen: int  # of all layers
    hit_rate: float | None  # per id, as recorded
    has_weights: bool
    file_bytes: int
    notes: tuple[str, ...]


def survey(path: Path) -> Survey:
    """Read a trace once; raises TraceError where it is malformed."""
    source = open_trace(path)
    layers = source.header.layers
    n_records = n_hits = n_known = 0
    has_weights = False
    seen: list[set[int]] = [set() for _ in layers]
    totals = Stats()
    ubatch, is_prefill, n_tokens = -1, False, 0
    for record in source.records():
        if record.ubatch != ubatch:
            totals += _ubatch(is_prefill, n_tokens) if ubatch >= 0 else Stats()
            ubatch, is_prefill, n_tokens = record.ubatch, record.is_prefill, 0
        n_tokens = max(n_tokens, len(record.ids))
        n_records += 1
        seen[record.layer_index].update(record.ids.reshape(-1).tolist())
        has_weights |= record.weights is not None
        if record.hits is not None:
            n_hits += int(record.hits.sum())
            n_known += record.hits.size
    totals += _ubatch(is_prefill, n_tokens) if ubatch >= 0 else Stats()
    header = source.header
    return Survey(
        header.model,
        header.arch,
        header.fingerprint,
        header.policy,
        header.n_slots,
        len(layers),
        tuple(each.n_expert for each in layers),
        tuple(each.n_expert_used for each in layers),
        tuple(each.expert_bytes for each in layers),
        n_records,
        totals.prefill.n_tokens,
        totals.decode.n_tokens,
        totals.prefill.n_ubatches,
        totals.decode.n_ubatches,
        sum(map(len, seen)),
        n_hits / n_known if n_known else None,
        has_weights,
        path.stat().st_size,
        tuple(source.notes),
    )


def _ubatch(is_prefill: bool, n_tokens: int) -> Stats:
    counters = Counters(n_ubatches=1, n_tokens=n_tokens)
    return Stats(prefill=counters) if is_prefill else Stats(decode=counters)


def survey_lines(found: Survey) -> list[str]:
    """Write what a trace holds."""
    sizes = span(found.expert_bytes)
    lines = [
        f"model     {found.model or 'no name'}" + (f" ({found.arch})" if found.arch else ""),
        f"layers    {found.n_layers} of {span(found.n_expert)} experts,"
        f" top-{span(found.n_expert_used)}, "
        + ("of unknown size" if sizes == "0" else f"{sizes} bytes each"),
        f"prompts   {found.n_prefill_tokens} tokens, ubatches: {found.n_prefill_ubatches}",
        f"decoded   {found.n_decode_tokens} tokens, ubatches: {found.n_decode_ubatches}",
        f"used      {found.n_experts_seen} of {sum(found.n_expert)} experts",
    ]
    if found.n_slots:
        lines.append(f"recorded  with {span(found.n_slots)} slots per layer, {found.policy}")
    if found.hit_rate is not None:
        lines.append(f"hits      {found.hit_rate:.1%} of the ids were in a slot")
    extras = ["weights"] if found.has_weights else []
    shown = f"{found.n_records} records, {found.file_bytes / MIB:.2f} MiB"
    return [
        *lines,
        f"file      {', '.join([shown, *extras])}",
        *(f"note      {note}" for note in found.notes),
    ]


def convert_file(path: Path, out: Path, expert_bytes: int = 0) -> tuple[int, list[str]]:
    """Write any trace in our format; return the records and what was left out.

    The file is whole or as it was. Raises TraceError where the trace is malformed, ConfigError if
    the file cannot be written.
    """
    source = open_trace(path, expert_bytes)
    n_records = 0
    try:
        with replacing(out.resolve()) as part, part.open("wb") as file:
            writer = TraceWriter(file, source.header)
            for record in source.records():
                writer.write(record)
                n_records += 1
    except OSError as e:
        raise ConfigError(f"{out} cannot be written: {e.strerror}") from e
    return n_records, source.notes
