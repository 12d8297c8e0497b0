"""A whole trace in memory, layer by layer, in few bytes; replays and plans work on it. Pure."""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

from .stats import Counters, Stats
from .trace import Ids, TraceHeader, TraceLayer, TraceSource

NEVER_WIDE = 2**63


@dataclass(frozen=True, slots=True)
class Need:
    """Say what a layer is asked for by one ubatch."""

    experts: list[int]  # distinct, in the order of their last rows, as the engine sees them
    n_selected: int  # rows times experts of each
    n_ahead: int  # the same of the layer before, where that may load ahead; else 0
    is_prefill: bool


def _counts() -> "array[int]":
    return array("I")


@dataclass(frozen=True, slots=True)
class LayerTrace:
    """Hold all that a trace says of one layer; but for `experts`, an item a ubatch."""

    shape: TraceLayer
    experts: "array[int]" = field(default_factory=lambda: array("H"))
    n_experts: "array[int]" = field(default_factory=_counts)
    n_selected: "array[int]" = field(default_factory=_counts)
    n_ahead: "array[int]" = field(default_factory=_counts)
    is_prefill: "array[int]" = field(default_factory=lambda: array("B"))
    ubatch: "array[int]" = field(default_factory=_counts)  # place in the workload's

    def add(self, ubatch: int, need: Need) -> None:
        """Append what a ubatch asks for."""
        self.experts.extend(need.experts)
        self.n_experts.append(len(need.experts))
        self.n_selected.append(need.n_selected)
        self.n_ahead.append(need.n_ahead)
        self.is_prefill.append(need.is_prefill)
        self.ubatch.append(ubatch)

    def plain_needs(self) -> Iterator[tuple[list[int], bool]]:
        """Yield the experts of each ubatch, and whether it is of prefill."""
        experts = self.experts.tolist()
        start = 0
        for n, is_prefill in zip(self.n_experts, self.is_prefill, strict=True):
            yield experts[start : start + n], is_prefill == 1
            start += n

    def needs(self) -> Iterator[Need]:
        """Yield what each ubatch asks for."""
        for (experts, is_prefill), n_selected, n_ahead in zip(
            self.plain_needs(), self.n_selected, self.n_ahead, strict=True
        ):
            yield Need(experts, n_selected, n_ahead, is_prefill)

    def n_needed(self, is_prefill: bool) -> int:
        """Return hits and misses of a phase together, whatever the cache."""
        pairs = zip(self.n_experts, self.is_prefill, strict=True)
        return sum(n for n, phase in pairs if phase == is_prefill)

    def is_wide(self, n_slots: int) -> list[bool]:
        """Say of each ubatch whether it may not fit the slots, or something is loaded ahead."""
        n_expert = self.shape.n_expert
        limit = n_slots if n_slots < n_expert else NEVER_WIDE
        return [
            n_selected > limit or n_ahead > n_expert
            for n_selected, n_ahead in zip(self.n_selected, self.n_ahead, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class Workload:
    """Hold a trace; `n_tokens` and `is_prefill` have an item a ubatch."""

    header: TraceHeader
    layers: tuple[LayerTrace, ...]
    n_tokens: "array[int]"
    is_prefill: "array[int]"

    @property
    def n_events(self) -> int:
        """Expert ids that a replay looks up."""
        return sum(len(layer.experts) for layer in self.layers)

    @property
    def has_sizes(self) -> bool:
        """Say whether the bytes of every layer's experts are known."""
        return all(layer.expert_bytes for layer in self.header.layers)

    @property
    def n_ubatches(self) -> int:
        """Ubatches of both phases."""
        return len(self.n_tokens)

    @property
    def totals(self) -> Stats:
        """Return the counts of ubatches and tokens, the rest is 0."""
        sums = {True: Counters(), False: Counters()}
        for n_tokens, is_prefill in zip(self.n_tokens, self.is_prefill, strict=True):
            sums[bool(is_prefill)] += Counters(n_ubatches=1, n_tokens=n_tokens)
        return Stats(sums[True], sums[False])

    def between(self, first: int, last: int) -> "Workload":
        """Return the ubatches from `first` to before `last`, counted from 0."""
        layers = []
        for layer in self.layers:
            cut = LayerTrace(layer.shape)
            for ubatch, need in zip(layer.ubatch, layer.needs(), strict=True):
                if first <= ubatch < last:
                    cut.add(ubatch - first, need)
            layers.append(cut)
        return Workload(
            self.header, tuple(layers), self.n_tokens[first:last], self.is_prefill[first:last]
        )


def needed_experts(ids: Ids) -> list[int]:
    """Return the distinct ids of a ubatch in the order of their last rows, as the engine does."""
    backwards: list[int] = ids.reshape(-1)[::-1].tolist()
    return list(dict.fromkeys(backwards))[::-1]


def load_workload(source: TraceSource) -> Workload:
    """Read a whole trace; raises TraceError where it is malformed."""
    layers = tuple(LayerTrace(shape) for shape in source.header.layers)
    n_tokens, is_prefill = _counts(), array("B")
    ubatch = -1
    before = (-1, 0)  # layer index and rows times experts of the record before, in this ubatch
    for record in source.records():
        if record.ubatch != ubatch:
            ubatch = record.ubatch
            before = (-1, 0)
            n_tokens.append(0)
            is_prefill.append(record.is_prefill)
        index, n_selected = record.layer_index, record.ids.size
        n_tokens[-1] = max(n_tokens[-1], len(record.ids))  # the last layer may have fewer
        # nothing is loaded ahead for the last layer, whose rows are not known from the others
        is_next = index == before[0] + 1 and 0 < index < len(layers) - 1
        need = Need(
            needed_experts(record.ids),
            n_selected,
            before[1] if is_next else 0,
            record.is_prefill,
        )
        layers[index].add(len(n_tokens) - 1, need)
        before = (index, n_selected)
    return Workload(source.header, layers, n_tokens, is_prefill)
