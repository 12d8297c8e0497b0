"""The lines that a run shows: what is planned before it, what happened after it. Pure text."""

from collections.abc import Sequence
from dataclasses import dataclass

from .budget import GIB, MIB, BudgetPlan, MemoryLimit, gib_down, slots_bytes
from .experts import MoeLayer, MoeModel
from .figures import RunFigures
from .pools import CPU, Pool
from .stats import Counters

DEFAULT_CHECKPOINTS = 32  # of llama.cpp, for each sequence


def span(values: Sequence[int]) -> str:
    """Write numbers as one, or as the least and the most."""
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}"


def size_text(size_bytes: int) -> str:
    """Write bytes as GiB, or as MiB where that would show no digits; never more than there is."""
    if size_bytes < 0.1 * GIB:
        return f"{size_bytes * 10 // MIB / 10:.1f} MiB"
    return f"{gib_down(size_bytes)} GiB"


def model_line(model: MoeModel) -> str:
    """Describe the model: layers with experts, experts and how many a token uses, sizes."""
    n_expert = span([layer.n_expert for layer in model.layers])
    n_used = span([layer.n_expert_used for layer in model.layers])
    return (
        f"model   {model.name or model.path.name} ({model.arch}), {len(model.layers)} layers of"
        f" {n_expert} experts, top-{n_used}, experts {size_text(model.expert_bytes)},"
        f" rest {size_text(model.dense_bytes)}"
    )


def budget_lines(
    model: MoeModel, n_slots: Sequence[int], budget_bytes: int, *, automatic: bool
) -> list[str]:
    """Describe the budget and what it buys, with a warning when it is below one token's experts."""
    bytes_used = slots_bytes(model.layers, n_slots)
    share = bytes_used / model.expert_bytes
    lines = [
        f"cache   {size_text(budget_bytes)}{' (auto)' if automatic else ''}:"
        f" {span(n_slots)} slots per layer, {bytes_used / MIB:.1f} MiB, {share:.1%} of the experts"
    ]
    if bytes_used < model.token_cycle_bytes:
        lines.append(
            f"warning the cache is below the {model.token_cycle_bytes / MIB:.1f} MiB of experts"
            " that one token uses; every token reads most of them again"
        )
    return lines


def ubatch_line(n_ubatch: int, n_ubatch_asked: int, n_stages: int) -> str:
    """Describe the effective ubatch: why it is smaller than asked, or how many stages it takes."""
    if n_ubatch < n_ubatch_asked:
        return (
            f"ubatch  {n_ubatch} instead of {n_ubatch_asked},"
            " so that it cannot select more experts than there are slots"
        )
    return f"ubatch  {n_ubatch_asked}" + (
        f", in up to {n_stages} stages per layer" if n_stages > 1 else ""
    )


def context_line(n_ctx: int, n_ctx_train: int) -> str:
    """Say that a context which nobody asked for was cut."""
    return (
        f"context {n_ctx} instead of {n_ctx_train}, so that the KV cache leaves room;"
        " --ctx-size chooses"
    )


def checkpoints_line(n_checkpoints: int, each_bytes: int) -> str:
    """Say that fewer states are kept than llama.cpp keeps by default."""
    return (
        f"states  {n_checkpoints} of {size_text(each_bytes)} kept per sequence instead of"
        f" {DEFAULT_CHECKPOINTS}, so that they stay small; --ctx-checkpoints chooses"
    )


def overcommit_line(planned_bytes: int, limit: MemoryLimit) -> str:
    """Warn that less memory is free than the run is planned to take."""
    return (
        f"warning {planned_bytes / MIB:.0f} MiB are planned, but only"
        f" {limit.available_bytes / MIB:.0f} MiB are available ({limit.source})"
    )


def read_line(modes: Sequence[str], n_io_threads: int) -> str:
    """Describe how shards are read; a fallback is named."""
    names = {
        "direct": "uncached (O_DIRECT)",
        "nocache": "uncached (F_NOCACHE)",
        "dontneed": "through the page cache, dropped after use: this file system refuses uncached"
        " reads",
        "cached": "through the page cache",
    }
    shown = "; ".join(names[mode] for mode in sorted(set(modes)))
    return f"reads   {shown}, {n_io_threads} threads"


def device_line(pool: Pool) -> str:
    """Say what a device, or RAM beside devices, is to hold."""
    slots = (
        f"{pool.slot_bytes / MIB:.1f} MiB of slots for {pool.n_layers} layers"
        if pool.n_layers
        else "no experts"
    )
    line = f"device  {pool.name} ({pool.description}): {slots}"
    if pool.name == CPU:
        return f"{line}; the rest of it is under memory"
    parts = " + ".join(f"{name} {size / MIB:.0f}" for name, size in pool.terms if size)
    return (
        f"{line}; planned {pool.planned_bytes / MIB:.0f} of {pool.free_bytes / MIB:.0f} MiB free:"
        f" slots {pool.slot_bytes / MIB:.0f} + {parts}"
    )


def fusion_line() -> str:
    """Say what devices do otherwise than with the whole model."""
    return (
        "exact   devices fuse no operations, so that the whole model gives the same where they are"
        " told so too (GGML_VK_DISABLE_FUSION=1 and its like)"
    )


def tier_lines(
    layers: Sequence[MoeLayer], n_tier: Sequence[int], n_locked: Sequence[int]
) -> list[str]:
    """Say what is kept in memory behind slots, and warn where that is not one expert a layer."""
    behind = [n for n in n_tier if n]
    bytes_used = slots_bytes(layers, n_tier)
    locked_bytes = slots_bytes(layers, n_locked)
    has_tier = [layer for layer, n in zip(layers, n_tier, strict=True) if n]
    if not behind:
        return ["warning --longhaul-ram is less than one expert of a layer, and is of no use"]
    share = bytes_used / sum(layer.n_expert * layer.expert_bytes for layer in has_tier)
    return [
        f"tier    {bytes_used / MIB:.1f} MiB of memory behind the slots of {len(behind)} layers:"
        f" {span(behind)} experts each, {share:.1%} of them; {locked_bytes / MIB:.1f} MiB of it"
        " page-locked where the device offers that"
    ]


def device_warnings(pools: Sequence[Pool]) -> list[str]:
    """Warn of devices that are planned to hold more than is free; RAM has a line of its own."""
    return [
        f"warning {pool.planned_bytes / MIB:.0f} MiB are planned on {pool.name}, but only"
        f" {pool.free_bytes / MIB:.0f} MiB are free there"
        for pool in pools
        if pool.name != CPU and pool.planned_bytes > pool.free_bytes
    ]


@dataclass(frozen=True, slots=True)
class PlannedMemory:
    """Sum what a run is planned to take, in bytes."""

    terms: tuple[tuple[str, int], ...]

    @property
    def total_bytes(self) -> int:
        """All terms together."""
        return sum(size for _, size in self.terms)

    def line(self) -> str:
        """Write every term and the sum."""
        parts = " + ".join(f"{name} {size / MIB:.0f}" for name, size in self.terms if size)
        return f"memory  {self.total_bytes / MIB:.0f} MiB planned: {parts}"


def planned_memory(plan: BudgetPlan, slot_bytes: int) -> PlannedMemory:
    """Return a plan's terms with the slots really taken, and without the floor."""
    terms = tuple(term for term in plan.terms if term[0] != "floor")
    return PlannedMemory((("slots", slot_bytes), *terms))


def time_split(counters: Counters) -> str:
    """Say how much of the time went into waiting, and for what."""
    whole_s = counters.compute_s or 1.0
    parts = (
        ("reads", counters.read_s),
        ("repacking", counters.repack_s),
        ("planning", counters.plan_s),
    )
    shown = ", ".join(f"{name} {part_s / whole_s:.0%}" for name, part_s in parts)
    return (
        f"{counters.wait_s / whole_s:.0%} of the time waiting ({shown}),"
        f" {counters.roofline_ratio:.2f} x the roofline"
    )


def hit_text(counters: Counters, *, has_tier: bool) -> str:
    """Say where the experts that were needed came from."""
    text = f"hit rate {counters.hit_rate:.1%}"
    if has_tier:
        disk_rate = 1 - counters.hit_rate - counters.tier_rate
        text += f" + {counters.tier_rate:.1%} from memory + {disk_rate:.1%} from disk"
    return text


def slots_line(run: RunFigures) -> str:
    """Say how large the slots were, where, and in which layout."""
    parts = []
    for size_bytes, layout in (
        (run.slot_bytes - run.device_bytes - run.repacked_bytes, "as in the file"),
        (run.repacked_bytes, "repacked"),
        (run.device_bytes, "on devices"),
    ):
        if size_bytes:
            share = size_bytes / run.slot_bytes
            parts.append(layout if share == 1 else f"{share:.0%} {layout}")
    text = f"slots   {run.slot_bytes / MIB:.1f} MiB, {', '.join(parts)}"
    if run.tier_bytes:
        text += (
            f", and {run.tier_bytes / MIB:.1f} MiB of memory behind them,"
            f" {run.locked_bytes / MIB:.1f} MiB of it page-locked"
        )
    return text


def summary_lines(run: RunFigures) -> list[str]:
    """Say what happened: hit rates, bytes per token, rates, share of waiting, memory."""
    lines = []
    for name, counters in (("prompt ", run.stats.prefill), ("tokens ", run.stats.decode)):
        if counters.n_tokens:
            lines.append(
                f"{name} {counters.n_tokens} at {counters.tokens_per_s:.2f} tok/s,"
                f" {hit_text(counters, has_tier=run.tier_bytes > 0)},"
                f" {counters.read_bytes_per_token / MIB:.2f} MiB read per token,"
                f" {time_split(counters)}"
            )
    total = run.stats.total
    lines.append(
        f"total   {total.n_tokens} tokens, {hit_text(total, has_tier=run.tier_bytes > 0)},"
        f" {total.read_bytes_per_token / MIB:.2f} MiB read per token,"
        f" {total.n_evictions} evictions, {total.n_errors} errors"
    )
    lines.append(slots_line(run))
    lines.append(
        f"memory  peak RSS {run.peak_rss_bytes / MIB:.0f} MiB,"
        f" planned {run.planned_bytes / MIB:.0f} MiB"
    )
    return lines
