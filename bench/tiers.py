"""Compares ways to keep a host tier behind a device's slots, by recorded traces.

    bench/tiers.py
    bench/tiers.py TRACE ... --device 0.25 --tier 0.5 --disk 6 --policy "kept + backed"

Slots in the device are the engine's own LRU. Behind them is a tier of packed experts in memory;
an expert that is in neither is read from disk. Printed, for each token of the decode phase after
the first half of the trace (`--skip`): experts read, copied from the tier, hit in the device, and
copied from the device to the tier; and the time that these take one after another at the rates
given, with no overlap: a bound, to compare with.

inclusive: what is read also goes to the tier, in the place of the one that was read or copied from
there longest ago. refreshed: hits in the device count as uses too. duplicates first: of those in
the tier, one that is in the device too leaves first, the most recently used of them, since it is
the last to be missed. exclusive: what leaves the device is copied to the tier, unless it still is
there; what is read is not. LFU: the one with the fewest loads leaves. kept: LFU, and what has no
more loads than any in the tier goes by without a place in it; loads are counted half after a while.
kept + backed: the same, and of the coldest in the device, those leave first that are in the tier;
it is what longhaul does. best behind LRU: knows the future loads, the least reads without copies
from the device or another order in it.
"""

import argparse
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from longhaul import residency
from longhaul.policy import Lru
from longhaul.replay import LayerCache
from longhaul.tier import HostTier, loaded_experts
from longhaul.trace import TraceLayer
from longhaul.trace_files import open_trace
from longhaul.workload import LayerTrace, Need, Workload, load_workload

TRACES = Path(__file__).resolve().parent / "traces"
DEFAULT_TRACES = [TRACES / "olmoe-1b-7b.jsonl", TRACES / "qwen3-30b-a3b.route.csv"]
MIB = 2**20
GIB = 2**30
NEVER = 2**62


@dataclass(slots=True)
class Served:
    """Count what one ubatch, or many, took."""

    n_read: int = 0
    n_host: int = 0
    n_locked: int = 0  # of `n_host`
    n_device: int = 0
    n_copied: int = 0  # from device to tier

    def __iadd__(self, other: "Served") -> "Served":
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        return self


class Tier:
    """Serve the loads of a layer: none of them, with no tier at all."""

    backed: Sequence[int] | None = None  # for the device's residency

    def used(self, experts: Sequence[int]) -> None:
        """Take note of what a ubatch needs, before it is loaded."""

    def load(self, experts: Sequence[int], device: Collection[int], served: Served) -> None:
        """Serve loads; `device` holds what is in the device's slots when they are done."""
        served.n_read += len(experts)

    def leave(self, experts: Sequence[int], device: Collection[int], served: Served) -> None:
        """Take note of what has left the device, or never stayed there."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Say how a tier chooses."""

    is_lfu: bool = False
    is_refreshed: bool = False
    duplicates_first: bool = False
    is_exclusive: bool = False


@dataclass
class Ranked(Tier):
    """Rank what is in the tier anew for each victim: slow, plain, for comparisons only."""

    n_expert: int
    n_slots: int
    choice: Choice
    held: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.loaded, self.last_use = [0] * self.n_expert, [0] * self.n_expert
        self.last_need = [0] * self.n_expert  # by the device too
        self.clock = 0

    def _stamp(self, stamps: list[int], expert: int) -> None:
        self.clock += 1
        stamps[expert] = self.clock

    def used(self, experts: Sequence[int]) -> None:
        for expert in experts:
            self._stamp(self.last_need, expert)
            if self.choice.is_refreshed:
                self._stamp(self.last_use, expert)

    def load(self, experts: Sequence[int], device: Collection[int], served: Served) -> None:
        busy = self.held & set(experts)
        for expert in experts:
            self.loaded[expert] += 1
            self._stamp(self.last_use, expert)
            if expert in self.held:
                served.n_host += 1
                continue
            served.n_read += 1
            if not self.choice.is_exclusive and self._enter(expert, device, busy):
                busy.add(expert)

    def leave(self, experts: Sequence[int], device: Collection[int], served: Served) -> None:
        if self.choice.is_exclusive:
            for expert in experts:
                self._stamp(self.last_use, expert)
                if expert not in self.held and self._enter(expert, device, ()):
                    served.n_copied += 1

    def _enter(self, expert: int, device: Collection[int], busy: Collection[int]) -> bool:
        if len(self.held) >= self.n_slots:
            others = [each for each in self.held if each not in busy]
            twice = [each for each in others if each in device]
            if not others:
                return False
            if twice and self.choice.is_exclusive:
                victim = min(twice, key=self._key)
            elif twice and self.choice.duplicates_first:
                victim = max(twice, key=self.last_need.__getitem__)
            else:
                victim = min(others, key=self._key)
            self.held.remove(victim)
        self.held.add(expert)
        return True

    def _key(self, expert: int) -> tuple[int, int]:
        return self.loaded[expert] if self.choice.is_lfu else 0, self.last_use[expert]


class Kept(Tier):
    """Be longhaul's own tier."""

    def __init__(self, tier: HostTier, is_backed: bool) -> None:
        self.tier = tier
        self.backed = tier.slot_of if is_backed else None

    def load(self, experts: Sequence[int], device: Collection[int], served: Served) -> None:
        plan = self.tier.plan(experts)
        self.tier.evict(plan)
        self.tier.apply(plan)
        served.n_host += plan.n_hits
        served.n_read += len(experts) - plan.n_hits
        served.n_locked += sum(
            each.is_there and each.tier_slot < self.tier.n_locked for each in plan.loads
        )


class Recorder(Tier):
    """Write down the loads."""

    def __init__(self) -> None:
        self.loads: list[int] = []

    def load(self, experts: Sequence[int], device: Collection[int], served: Served) -> None:
        self.loads += experts


class Foreseeing(Tier):
    """Keep those that are loaded again soonest."""

    def __init__(self, loads: Sequence[int], n_slots: int) -> None:
        self.next_load = [NEVER] * len(loads)
        upcoming: dict[int, int] = {}
        for i in reversed(range(len(loads))):
            self.next_load[i] = upcoming.get(loads[i], NEVER)
            upcoming[loads[i]] = i
        self.held: dict[int, int] = {}  # when each is loaded again
        self.n_slots = n_slots
        self.n_done = 0

    def load(self, experts: Sequence[int], device: Collection[int], served: Served) -> None:
        for expert in experts:
            served.n_host += expert in self.held
            served.n_read += expert not in self.held
            self.held[expert] = self.next_load[self.n_done]
            self.n_done += 1
            if len(self.held) > self.n_slots:
                del self.held[max(self.held, key=self.held.__getitem__)]


MakeTier = Callable[[TraceLayer, int, int], Tier]  # of so many slots, of which so many are locked
RANKED: dict[str, Choice] = {
    "inclusive LRU": Choice(),
    "inclusive LRU, refreshed": Choice(is_refreshed=True),
    "inclusive LFU": Choice(is_lfu=True),
    "duplicates first, LRU": Choice(duplicates_first=True),
    "duplicates first, LFU": Choice(duplicates_first=True, is_lfu=True),
    "exclusive LRU": Choice(is_exclusive=True),
    "exclusive LFU": Choice(is_exclusive=True, is_lfu=True),
}


def ranked(choice: Choice) -> MakeTier:
    """Return what makes a tier that chooses so."""
    return lambda shape, n_slots, n_locked: Ranked(shape.n_expert, n_slots, choice)


def kept(is_backed: bool) -> MakeTier:
    """Return what makes longhaul's own tier, with or without the device's order changed for it."""
    return lambda shape, n_slots, n_locked: Kept(
        HostTier(shape.n_expert, n_slots, n_locked), is_backed
    )


TIERS: dict[str, MakeTier] = {
    "no tier": lambda shape, n_slots, n_locked: Tier(),
    **{name: ranked(choice) for name, choice in RANKED.items()},
    "kept": kept(False),
    "kept + backed": kept(True),
}
BOUND = "best behind LRU"


class TieredCache(LayerCache):
    """Be to one layer what the engine is, with a tier."""

    def __init__(self, shape: TraceLayer, n_slots: int, tier: Tier) -> None:
        super().__init__(shape, n_slots, Lru)
        self.residency.backed = tier.backed
        self.tier = tier

    def serve(self, need: Need) -> Served:
        """Serve a ubatch. Nothing is loaded ahead of the router."""
        missing = [expert for expert in need.experts if self.slot_of[expert] < 0]
        served = Served(n_device=len(need.experts) - len(missing))
        self.tier.used(need.experts)
        if missing:
            before = {expert for expert in self.expert_of if expert >= 0}
            made = self._plan(need, missing)
            experts = loaded_experts(made)
            self.residency.evict(made)
            self.residency.apply(made)
            after = {expert for expert in self.expert_of if expert >= 0}
            self.tier.load(experts, after, served)
            self.tier.leave(sorted((before | set(experts)) - after), after, served)
        self._stamp(need.experts)
        return served


def serve_layer(layer: LayerTrace, n_slots: int, tier: Tier, first: int) -> Served:
    """Return what the decoded ubatches from `first` on took."""
    cache = TieredCache(layer.shape, n_slots, tier)
    sums = Served()
    for need, ubatch in zip(layer.needs(), layer.ubatch, strict=True):
        served = cache.serve(need)
        if ubatch >= first and not need.is_prefill:
            sums += served
    return sums


def make_tier(name: str, layer: LayerTrace, n_slots: int, n_tier: int, locked: float) -> Tier:
    """Return a tier of that name for a layer."""
    if name != BOUND:
        return TIERS[name](layer.shape, n_tier, int(n_tier * locked))
    recorder = Recorder()
    serve_layer(layer, n_slots, recorder, 0)
    return Foreseeing(recorder.loads, n_tier)


def row(
    name: str, workload: Workload, shares: tuple[float, float], args: argparse.Namespace
) -> str:
    """Return a line of the table."""
    first = int(workload.n_ubatches * args.skip)
    sums, seconds = Served(), 0.0
    for layer in workload.layers:
        n_slots, n_tier = (max(int(layer.shape.n_expert * share), 1) for share in shares)
        tier = make_tier(name, layer, n_slots, n_tier, args.locked)
        served = serve_layer(layer, n_slots, tier, first)
        size_gib = (layer.shape.expert_bytes or args.expert_mib * MIB) / GIB
        n_moved = served.n_read + served.n_host + served.n_copied
        seconds += size_gib * (served.n_read / args.disk + n_moved / args.pcie)
        sums += served
    phases = zip(workload.n_tokens, workload.is_prefill, strict=True)
    n_tokens = sum(n for n, is_prefill in list(phases)[first:] if not is_prefill)
    figures = (sums.n_read, sums.n_host, sums.n_locked, sums.n_device, sums.n_copied)
    cells = " | ".join(f"{n / n_tokens:.1f}" for n in figures)
    return (
        f"| {shares[0]:.1%} | {shares[1]:.1%} | {name} | {cells} | {seconds / n_tokens * 1e3:.1f} |"
    )


def positive(text: str) -> float:
    """Parse a rate or a size."""
    value = float(text)
    if not 0 < value < math.inf:
        raise ValueError(text)
    return value


def main() -> None:
    """Print a table for each trace."""
    parser = argparse.ArgumentParser(description="Compare ways to keep a host tier.")
    parser.add_argument("traces", nargs="*", type=Path, default=DEFAULT_TRACES)
    parser.add_argument("--device", nargs="+", type=positive, default=[0.125, 0.25, 0.5])
    parser.add_argument("--tier", nargs="+", type=positive, default=[0.25, 0.5, 0.75])
    parser.add_argument("--policy", action="append", choices=[*TIERS, BOUND])
    parser.add_argument("--look-ahead", type=int, default=residency.LOOK_AHEAD, help="slots")
    parser.add_argument("--locked", type=float, default=0.25, help="share of the tier")
    parser.add_argument("--disk", type=positive, default=2.0, help="GiB/s")
    parser.add_argument("--pcie", type=positive, default=12.0, help="GiB/s")
    parser.add_argument("--expert-mib", type=positive, default=3.5, help="where a trace says none")
    parser.add_argument("--skip", type=float, default=0.5, help="share of ubatches not counted")
    args = parser.parse_args()
    residency.LOOK_AHEAD = args.look_ahead
    for path in args.traces:
        workload = load_workload(open_trace(path))
        print(f"\n{path.name}, experts of all layers per token\n")
        print(
            "| device | tier | policy | read | from tier | of these locked | device hits"
            " | copied back | ms |\n|---|---|---|---|---|---|---|---|---|"
        )
        for device in args.device:
            for tier in args.tier:
                for name in args.policy or [*TIERS, BOUND]:
                    print(row(name, workload, (device, tier), args), flush=True)


if __name__ == "__main__":
    main()
