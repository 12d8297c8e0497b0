"""How much memory routed experts may take, and how many slots of each layer that buys.

Pure: reads no model and loads nothing; the only files it looks at are the kernel's own on memory.
"""

import heapq
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from .errors import BudgetError, ConfigError
from .experts import MoeLayer, MoeModel

MIB = 2**20
GIB = 2**30
FLOOR_BYTES = 256 * MIB  # left to the process itself and to the rest of the machine
FLOOR_SHARE = 0.05  # or this part of the limit, where it is more
PHYSICAL_SHARE = 0.75  # counted as available where the kernel does not say how much is
NO_LIMIT_BYTES = 2**62  # version 1 writes a number of about 2^63 where there is no limit
COMPUTE_MARGIN = 1.1
COMPUTE_BASE_BYTES = 32 * MIB
KV_CELLS_STEP = 256  # llama_context pads n_ctx to this
PROCESS_BYTES = 96 * MIB  # Python, numpy and the libraries, as measured on x86-64 Linux


# --- slots ----------------------------------------------------------------------------------------


Least = Callable[[MoeLayer], int]  # the fewest slots that a layer can do with


def one_slot(layer: MoeLayer) -> int:
    """Return the least with stages: experts then take turns in a single slot."""
    return 1


def token_slots(layer: MoeLayer) -> int:
    """Return the least without stages: not even a ubatch of one token fits in fewer."""
    return layer.n_expert_used


def slots_bytes(layers: Sequence[MoeLayer], n_slots: Sequence[int]) -> int:
    """Return the bytes of all slot tensors; `n_slots` is in the order of `layers`."""
    return sum(layer.expert_bytes * count for layer, count in zip(layers, n_slots, strict=True))


def least_budget_bytes(layers: Sequence[MoeLayer], least: Least = one_slot) -> int:
    """Return the smallest budget that the layers can run with."""
    return slots_bytes(layers, [least(layer) for layer in layers])


def plan_slots(
    layers: Sequence[MoeLayer],
    budget_bytes: int,
    least: Least = one_slot,
) -> tuple[int, ...]:
    """Share a budget among layers so that each holds about the same fraction of its experts.

    From the least on, slots go one by one to the layer with the smallest fraction, until the next
    does not fit. So more budget never takes a slot from any layer. Raises BudgetError below the
    least.
    """
    costs = [{"": layer.expert_bytes} for layer in layers]
    return share_slots(layers, costs, {"": budget_bytes}, least, budget_bytes)


def share_slots(
    layers: Sequence[MoeLayer],
    costs: Sequence[Mapping[str, int]],
    rooms: Mapping[str, int],
    least: Least,
    total_bytes: int | None = None,
) -> tuple[int, ...]:
    """Share rooms among the layers that have experts there: about the same fraction for each.

    `costs` are the bytes that a slot of each layer takes of each pool, `rooms` those of the pools.

    From the least on, slots go one by one to the layer with the smallest fraction. Once the next
    one does not fit in a pool, the layers there stay as they are. With a total, all pools together
    take no more than that. Raises BudgetError if a total is below the least.
    """
    n_slots = [least(layer) for layer in layers]
    left = dict(rooms)
    for cost, count in zip(costs, n_slots, strict=True):
        for pool, slice_bytes in cost.items():
            left[pool] -= count * slice_bytes
    taken_bytes = sum(
        count * sum(cost.values()) for cost, count in zip(costs, n_slots, strict=True)
    )
    total_left = None if total_bytes is None else total_bytes - taken_bytes
    if total_left is not None and total_left < 0:
        raise BudgetError(
            f"a cache of {gib_down(taken_bytes + total_left)} GiB is below the least that this"
            f" model can run with; give {gib_up(taken_bytes)} GiB or more"
        )
    queue = [
        (n_slots[i] / layer.n_expert, i)
        for i, layer in enumerate(layers)
        if n_slots[i] < layer.n_expert
    ]
    heapq.heapify(queue)
    full: set[str] = set()
    while queue:
        _, i = heapq.heappop(queue)
        short = {pool for pool, slice_bytes in costs[i].items() if slice_bytes > left[pool]}
        if short or full.intersection(costs[i]):
            full |= short
            continue
        if total_left is not None:
            total_left -= sum(costs[i].values())
            if total_left < 0:
                break
        for pool, slice_bytes in costs[i].items():
            left[pool] -= slice_bytes
        n_slots[i] += 1
        if n_slots[i] < layers[i].n_expert:
            heapq.heappush(queue, (n_slots[i] / layers[i].n_expert, i))
    return tuple(n_slots)


def ubatch_limit(layers: Sequence[MoeLayer], n_slots: Sequence[int]) -> int | None:
    """Return the most tokens that can never select more experts of a layer than it has slots.

    None means that there is no bound: every layer holds all of its experts.
    """
    limits = [
        count // layer.n_expert_used
        for layer, count in zip(layers, n_slots, strict=True)
        if count < layer.n_expert
    ]
    return min(limits, default=None)


def effective_ubatch(layers: Sequence[MoeLayer], n_slots: Sequence[int], n_ubatch: int) -> int:
    """Return the largest ubatch up to `n_ubatch` that the slots can always serve.

    Raises BudgetError if some layer cannot hold the experts of a single token.
    """
    limit = ubatch_limit(layers, n_slots)
    if limit is None:
        return n_ubatch
    if limit == 0:
        raise BudgetError(
            "some layer has fewer slots than one token needs experts; give"
            f" {gib_up(least_budget_bytes(layers, token_slots))} GiB or more"
        )
    return min(limit, n_ubatch)


def gib_up(size_bytes: int) -> str:
    """Write bytes as GiB, rounded up, so that the printed number is enough."""
    return f"{math.ceil(size_bytes * 1000 / GIB) / 1000:.3f}"


def gib_down(size_bytes: int) -> str:
    """Write bytes as GiB, rounded down, so that the printed number is really there."""
    return f"{math.floor(size_bytes * 1000 / GIB) / 1000:.3f}"


# --- what memory there is -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """Say how much memory this process may use in all, how much of it is free, and what says so."""

    bytes: int
    available_bytes: int
    source: str


@dataclass(frozen=True, slots=True)
class _CgroupFiles:
    limits: tuple[str, ...]
    usage: str
    reclaimable: tuple[str, ...]  # keys of memory.stat: page cache, which gives way


_V1 = _CgroupFiles(
    ("memory.limit_in_bytes",),
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
)
_V2 = _CgroupFiles(
    ("memory.max", "memory.high"), "memory.current", ("inactive_file", "active_file")
)


def memory_limits(
    proc: Path = Path("/proc"), cgroup_root: Path = Path("/sys/fs/cgroup")
) -> list[MemoryLimit]:
    """Return every limit on this process: RAM, then each cgroup above it that has one.

    Raises ConfigError if the kernel's figures cannot be read.
    """
    try:
        return [_machine_limit(proc), *_cgroup_limits(proc, cgroup_root)]
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"cannot tell how much memory there is ({error}); give the cache a size"
        ) from error


def memory_limit(
    proc: Path = Path("/proc"), cgroup_root: Path = Path("/sys/fs/cgroup")
) -> MemoryLimit:
    """Return the tightest limit on this process.

    Raises ConfigError if the kernel's figures cannot be read.
    """
    limits = memory_limits(proc, cgroup_root)
    tightest = min(limits, key=lambda limit: limit.available_bytes)
    return MemoryLimit(
        min(limit.bytes for limit in limits), tightest.available_bytes, tightest.source
    )


def _machine_limit(proc: Path) -> MemoryLimit:
    if not (proc / "meminfo").exists():
        physical_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return MemoryLimit(
            physical_bytes,
            int(physical_bytes * PHYSICAL_SHARE),
            f"{PHYSICAL_SHARE:.0%} of physical memory",
        )
    lines = (proc / "meminfo").read_text().splitlines()
    kib = {key: int(rest.split()[0]) for key, rest in (line.split(":", 1) for line in lines)}
    return MemoryLimit(
        kib["MemTotal"] * 1024, kib["MemAvailable"] * 1024, "MemAvailable in /proc/meminfo"
    )


def _cgroup_limits(proc: Path, root: Path) -> Iterator[MemoryLimit]:
    memberships = proc / "self" / "cgroup"
    if not memberships.exists():
        return
    for line in memberships.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            hybrid = not (root / "cgroup.controllers").exists()
            mount, files = (root / "unified" if hybrid else root), _V2
        elif "memory" in controllers.split(","):
            mount, files = root / "memory", _V1
        else:
            continue
        for folder in _folders_up(mount, path):
            yield from _folder_limits(folder, files)


def _folders_up(mount: Path, path: str) -> Iterator[Path]:
    """Walk from a process's cgroup up to the mount.

    A container sees only a lower part of the tree: leading names that are not there are left out.
    """
    names = [name for name in PurePosixPath(path).parts if name not in ("/", "..")]
    while names and not mount.joinpath(*names).is_dir():
        names.pop(0)
    for depth in range(len(names), -1, -1):
        yield mount.joinpath(*names[:depth])


def _folder_limits(folder: Path, files: _CgroupFiles) -> Iterator[MemoryLimit]:
    for name in files.limits:
        if not (folder / name).exists():
            continue  # the root of the tree, or no memory controller here
        text = (folder / name).read_text().strip()
        if text == "max" or int(text) >= NO_LIMIT_BYTES:
            continue
        used_bytes = int((folder / files.usage).read_text())
        for line in (folder / "memory.stat").read_text().splitlines():
            key, value = line.split()
            if key in files.reclaimable:
                used_bytes -= int(value)
        limit_bytes = int(text)
        available_bytes = max(0, limit_bytes - max(0, used_bytes))
        yield MemoryLimit(limit_bytes, available_bytes, str(folder / name))


# --- what a run needs -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RunSizes:
    """Name the sizes of a run that cost memory beside experts."""

    n_ctx: int  # KV cells in all; 0: as many as the model was trained with
    n_ubatch: int
    read_buffer_bytes: int
    n_seq: int = 1
    kv_element_bytes: float = 2.0
    flash_attention: bool = True
    other_bytes: int = 0  # whatever else is loaded: a draft model, MTP layers, a projector
    tier_bytes: int = 0  # experts kept in memory behind the slots of devices
    n_checkpoints: int = 0  # kept states of each sequence that cannot be rolled back
    least: Least = one_slot


def kv_cache_bytes(
    model: MoeModel, n_ctx: int, n_seq: int = 1, bytes_per_element: float = 2.0
) -> int:
    """Return an upper estimate of the KV cache and of recurrent state.

    Upper: layers with a sliding window count in full, and values also where a model stores none
    (MLA).
    """
    n_cells = -(-(n_ctx or model.n_ctx_train) // (KV_CELLS_STEP * n_seq)) * KV_CELLS_STEP * n_seq
    n_elements = sum(model.n_head_kv) * (model.n_embd_head_k + model.n_embd_head_v) * n_cells
    return math.ceil(n_elements * bytes_per_element) + n_seq * model.state_bytes


def checkpoint_bytes(
    model: MoeModel, n_ctx: int, n_ubatch: int, bytes_per_element: float = 2.0
) -> int:
    """Return an upper estimate of one kept state of a sequence; 0 where it can be rolled back.

    That is recurrent state, and the window of layers that attend to one only, which may be all.
    """
    if not model.n_swa:
        return model.state_bytes
    n_window = min(n_ctx or model.n_ctx_train, model.n_swa + n_ubatch)
    return kv_cache_bytes(model, n_window, 1, bytes_per_element)


def compute_bytes(
    model: MoeModel, n_ubatch: int, n_ctx: int = 0, flash_attention: bool = True
) -> int:
    """Return an upper estimate of the compute buffers.

    In float32 and with no reuse within a layer: the larger of the logits and of one layer's
    tensors, which are queries, keys, values and attention's output; gate, up and product of the
    selected experts, or of the dense feed-forward, and the experts' output twice; masks; without
    flash attention the scores of each head. Beside them residual, norms and projections.
    Measured at 512 tokens: 305 MiB where this says 394 (151,936 words, 8 experts of 768), 201 where
    it says 396 (32,000 words, 2 experts of 14,336).
    """
    n_kv = n_ctx or model.n_ctx_train
    n_ubatch = min(n_ubatch, n_kv or n_ubatch)
    n_used = max((layer.n_expert_used for layer in model.layers), default=0)
    feed_forward = max(3 * model.n_ff, n_used * (2 * model.n_embd + 3 * model.n_ff_exp))
    attention = 4 * model.n_head * (model.n_embd_head_k + model.n_embd_head_v)
    scores = 3 * n_kv + (0 if flash_attention else model.n_head * n_kv)
    floats = 8 * model.n_embd + max(model.n_vocab, feed_forward + attention + scores)
    margin_bytes = COMPUTE_BASE_BYTES + 2 * model.state_bytes
    return margin_bytes + math.ceil(4 * floats * n_ubatch * COMPUTE_MARGIN)


@dataclass(frozen=True, slots=True)
class BudgetPlan:
    """Hold every term of an automatic budget, in bytes."""

    limit: MemoryLimit
    dense_bytes: int
    kv_bytes: int
    compute_bytes: int
    read_buffer_bytes: int
    checkpoint_bytes: int
    other_bytes: int
    process_bytes: int
    floor_bytes: int
    expert_bytes: int  # of the whole model
    least_bytes: int
    tier_bytes: int = 0

    @property
    def left_bytes(self) -> int:
        """What memory remains for experts; negative when the rest does not fit."""
        return self.limit.available_bytes - sum(size for _, size in self.terms)

    @property
    def budget_bytes(self) -> int:
        """Bytes for slot tensors: what remains, but never more than the whole model."""
        return max(0, min(self.left_bytes, self.expert_bytes))

    @property
    def terms(self) -> tuple[tuple[str, int], ...]:
        """What is set aside before experts, by name."""
        return (
            ("dense weights", self.dense_bytes),
            ("KV cache", self.kv_bytes),
            ("compute buffers", self.compute_bytes),
            ("read buffers", self.read_buffer_bytes),
            ("tier", self.tier_bytes),
            ("checkpoints", self.checkpoint_bytes),
            ("other", self.other_bytes),
            ("process", self.process_bytes),
            ("floor", self.floor_bytes),
        )

    def lines(self) -> list[str]:
        """Write the plan as a list of lines, one for each term."""
        rows = [("available", self.limit.available_bytes), *self.terms]
        rows += [("experts", self.budget_bytes), ("all experts", self.expert_bytes)]
        width = max(len(name) for name, _ in rows)
        lines = [f"{name:<{width}} {size / MIB:>12.1f} MiB" for name, size in rows]
        lines[0] += f" ({self.limit.source})"
        return lines


def plan_memory(model: MoeModel, limit: MemoryLimit, run: RunSizes) -> BudgetPlan:
    """Plan what a run takes, whether or not that leaves enough for experts."""
    return BudgetPlan(
        limit=limit,
        dense_bytes=model.dense_bytes,
        kv_bytes=kv_cache_bytes(model, run.n_ctx, run.n_seq, run.kv_element_bytes),
        compute_bytes=compute_bytes(model, run.n_ubatch, run.n_ctx, run.flash_attention),
        read_buffer_bytes=run.read_buffer_bytes,
        checkpoint_bytes=run.n_seq
        * run.n_checkpoints
        * checkpoint_bytes(model, run.n_ctx, run.n_ubatch, run.kv_element_bytes),
        other_bytes=run.other_bytes,
        process_bytes=PROCESS_BYTES,
        floor_bytes=max(FLOOR_BYTES, int(FLOOR_SHARE * limit.bytes)),
        expert_bytes=model.expert_bytes,
        least_bytes=least_budget_bytes(model.layers, run.least),
        tier_bytes=run.tier_bytes,
    )


def auto_budget(model: MoeModel, limit: MemoryLimit, run: RunSizes) -> BudgetPlan:
    """Plan how many bytes routed experts get when the user names no size.

    Raises BudgetError if what remains is below the least that the model can run with.
    """
    plan = plan_memory(model, limit, run)
    if model.is_moe and plan.left_bytes < plan.least_bytes:
        wanted = ", ".join(f"{name} {gib_up(size)}" for name, size in plan.terms if size)
        raise BudgetError(
            f"{gib_up(plan.least_bytes - plan.left_bytes)} GiB of memory are missing: of"
            f" {gib_down(limit.available_bytes)} GiB ({limit.source}) {wanted} GiB are set aside,"
            f" and experts need at least {gib_up(plan.least_bytes)}; free memory, shorten the"
            " context, or give the cache a size"
        )
    return plan
