"""Plans a run: slots, context and memory, and the lines that say so."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from . import report
from .arguments import LlamaArguments
from .budget import (
    BudgetPlan,
    Least,
    MemoryLimit,
    RunSizes,
    auto_budget,
    checkpoint_bytes,
    effective_ubatch,
    gib_down,
    gib_up,
    kv_cache_bytes,
    memory_limit,
    one_slot,
    plan_memory,
    plan_slots,
    share_slots,
    slots_bytes,
    token_slots,
)
from .config import Config
from .errors import BudgetError, ConfigError
from .experts import MoeLayer, MoeModel
from .planner import stage_count
from .pools import (
    CPU,
    Placement,
    Pool,
    later_bytes,
    make_pools,
    ram_plan,
    with_slots,
    with_stage_buffers,
)
from .server_arguments import DEFAULT_PARALLEL, ServerArguments
from .slot_plan import read_slot_plan
from .tier import TierSizes, plan_tier, tier_bytes

KV_SHARE = 0.25  # of free memory that a context which nobody asked for may take
LEAST_CONTEXT = 4096  # which such a context is not cut below, as with llama.cpp's --fit
PERPLEXITY_CONTEXT = 512
CHECKPOINT_SHARE = 0.05  # of free memory that kept states which nobody asked for may take
CHATS = ("cli", "server")  # tools that keep states, and prompts of the past


@dataclass(frozen=True, slots=True)
class RunPlan:
    """Hold what a run was planned to be."""

    model: MoeModel
    n_slots: tuple[int, ...]
    budget_bytes: int
    automatic: bool
    n_ubatch: int
    n_ubatch_asked: int
    n_stages: int  # the most that a layer takes in a whole ubatch
    n_ctx_cut: int  # 0: as asked
    n_checkpoints_cut: int  # 0: as asked
    n_seq: int
    memory: BudgetPlan  # of RAM
    limit_known: bool
    pools: tuple[Pool, ...] = ()  # RAM and devices, where there are any
    placement: Placement | None = None
    tier: TierSizes | None = None  # experts in memory behind the slots

    @property
    def has_all_slots(self) -> bool:
        """Whether every expert has a slot, so that nothing is read twice."""
        layers = self.model.layers
        return all(n == layer.n_expert for n, layer in zip(self.n_slots, layers, strict=True))

    @property
    def extra_args(self) -> list[str]:
        """What the tool has to be told."""
        words = ["--ctx-size", str(self.n_ctx_cut)] if self.n_ctx_cut else []
        if self.n_checkpoints_cut:
            words += ["--ctx-checkpoints", str(self.n_checkpoints_cut)]
        return words

    @property
    def planned(self) -> report.PlannedMemory:
        """The memory that the run should take."""
        bytes_used = slots_bytes(self.model.layers, self.n_slots)
        for pool in self.pools:
            if pool.name == CPU:
                bytes_used = pool.slot_bytes
        return report.planned_memory(self.memory, bytes_used)

    @property
    def is_in_ram(self) -> tuple[bool, ...]:
        """Whether experts of each layer lie in RAM."""
        if self.placement is None:
            return (True,) * len(self.n_slots)
        return tuple(CPU in cost for cost in self.placement.costs(self.model.layers))

    @property
    def later_bytes(self) -> dict[str, int]:
        """What the memory of each device is to hold beside slots once they are there."""
        found = {pool.name: later_bytes(pool) for pool in self.pools}
        if self.placement:
            for name in self.placement.device_of.values():
                found.setdefault(name, found.get(self.placement.pool_of(name), 0))
        return found

    @property
    def final_args(self) -> list[str]:
        """What the tool has to be told after the user's options: to do what was planned."""
        return list(self.placement.args) if self.placement else []

    def lines(self) -> list[str]:
        """Write the plan, a line for each subject."""
        lines = [report.model_line(self.model)]
        lines += report.budget_lines(
            self.model, self.n_slots, self.budget_bytes, automatic=self.automatic
        )
        lines.append(report.ubatch_line(self.n_ubatch, self.n_ubatch_asked, self.n_stages))
        if self.n_ctx_cut:
            lines.append(report.context_line(self.n_ctx_cut, self.model.n_ctx_train))
        if self.n_checkpoints_cut:
            each_bytes = self.memory.checkpoint_bytes // (self.n_seq * self.n_checkpoints_cut)
            lines.append(report.checkpoints_line(self.n_checkpoints_cut, each_bytes))
        lines += [report.device_line(pool) for pool in self.pools]
        if self.pools:
            lines.append(report.fusion_line())
        if self.tier:
            lines += report.tier_lines(self.model.layers, *self.tier)
        lines.append(self.planned.line())
        lines += report.device_warnings(self.pools)
        available_bytes = self.memory.limit.available_bytes
        if self.limit_known and self.planned.total_bytes > available_bytes:
            lines.append(report.overcommit_line(self.planned.total_bytes, self.memory.limit))
        return lines


def tool_sizes(
    tool: str, arguments: LlamaArguments, model: MoeModel, server: ServerArguments | None = None
) -> RunSizes:
    """Return what one of llama.cpp's tools takes with these options."""
    sizes = arguments.sizes()
    if tool in CHATS:
        n_checkpoints = arguments.n_checkpoints
        sizes = replace(
            sizes,
            n_checkpoints=report.DEFAULT_CHECKPOINTS
            if n_checkpoints is None
            else max(n_checkpoints, 0),
            other_bytes=sizes.other_bytes + max(arguments.cache_ram_mib or 0, 0) * 2**20,
        )
    if tool == "server":
        server = server or ServerArguments()
        n_seq = arguments.n_seq or DEFAULT_PARALLEL
        return replace(
            sizes,
            n_ctx=sizes.n_ctx if arguments.n_ctx else n_seq * server.n_ctx_per_sequence,
            n_seq=n_seq,
        )
    if tool != "perplexity":
        return sizes
    # It evaluates as many windows of n_ctx tokens as fit into a batch, and keeps the logits.
    n_window = arguments.n_ctx or PERPLEXITY_CONTEXT
    n_seq = max(1, arguments.n_batch // n_window)
    n_outputs = min(arguments.n_batch, n_seq * n_window)
    if n_window > arguments.n_batch:  # collected over batches, from the middle of the window
        n_outputs += n_window - n_window // 2
    return replace(
        sizes,
        n_ctx=n_seq * n_window,
        n_seq=n_seq,
        other_bytes=sizes.other_bytes + 4 * n_outputs * model.n_vocab,
    )


def plan_run(
    model: MoeModel,
    sizes: RunSizes,
    config: Config,
    *,
    may_cut_context: bool = False,
    may_cut_checkpoints: bool = False,
    placement: Placement | None = None,
) -> RunPlan:
    """Plan slots and context; `sizes` are those asked for, read buffers aside.

    A context that nobody asked for may be cut so that its KV cache leaves room, and so may the
    number of kept states. With devices the context is settled with the placement, and each pool has
    its own budget. Raises BudgetError if a budget, or what is left for one, is too small.
    """
    limit = known_limit(config)
    if placement:
        placement = with_stage_buffers(placement, model, sizes.n_ubatch)
        sizes, may_cut_context = replace(sizes, n_ctx=placement.n_ctx), False
    elif config.cache_by_device:
        config = _without_devices(config)
    costs = placement.costs(model.layers) if placement else ({CPU: 0},) * len(model.layers)
    on_device = {
        layer.layer
        for layer, cost in zip(model.layers, costs, strict=True)
        if any(pool != CPU for pool in cost)
    }
    tier = _plan_tier(model, config, costs)
    if tier:
        sizes = replace(sizes, tier_bytes=tier_bytes(model.layers, tier))
    asked = sizes
    sizes = settle_sizes(
        model,
        sizes,
        config,
        limit,
        may_cut_context=may_cut_context,
        may_cut_checkpoints=may_cut_checkpoints,
    )
    if on_device:
        sizes = replace(sizes, least=_least_with_devices(sizes.least, on_device))
    n_ctx_cut = sizes.n_ctx if sizes.n_ctx != asked.n_ctx else 0
    if placement:
        n_ctx_cut = placement.n_ctx_cut
    n_checkpoints_cut = sizes.n_checkpoints if sizes.n_checkpoints != asked.n_checkpoints else 0
    known = limit or MemoryLimit(0, 0, "unknown")
    pools: tuple[Pool, ...] = ()
    if limit and tier:
        _check_tier_fits(
            ram_plan(model, limit, sizes, placement)
            if placement
            else plan_memory(model, limit, sizes)
        )
    if placement:
        # devices get what is read by way of page-locked buffers, as many again
        sizes = replace(sizes, read_buffer_bytes=2 * sizes.read_buffer_bytes)
        memory = ram_plan(model, known, sizes, placement)
        pools, n_slots, budget_bytes = _plan_pools(model, memory, sizes, config, placement)
    else:
        n_slots, budget_bytes = _plan_ram(model, known, sizes, config)
    n_ubatch, n_stages = sizes.n_ubatch, 1
    if config.ubatch == "shrink":
        n_ubatch = effective_ubatch(model.layers, n_slots, n_ubatch)
    else:
        is_on_device = [layer.layer in on_device for layer in model.layers]
        n_stages = most_stages(model.layers, n_slots, n_ubatch, is_on_device)
    return RunPlan(
        model=model,
        n_slots=n_slots,
        budget_bytes=budget_bytes,
        automatic=config.cache_bytes is None and not config.cache_by_device,
        n_ubatch=n_ubatch,
        n_ubatch_asked=sizes.n_ubatch,
        n_stages=n_stages,
        n_ctx_cut=n_ctx_cut,
        n_checkpoints_cut=n_checkpoints_cut,
        n_seq=sizes.n_seq,
        memory=memory
        if placement
        else plan_memory(model, known, replace(sizes, n_ubatch=n_ubatch)),
        limit_known=limit is not None,
        pools=pools,
        placement=placement,
        tier=tier,
    )


def _least_with_devices(least: Least, on_device: Collection[int]) -> Least:
    """Return the fewest slots where some layers are on devices: there, those of a token.

    Kernels of devices may rely on the slots of a token being distinct, in every stage.
    """
    return lambda layer: token_slots(layer) if layer.layer in on_device else least(layer)


def _plan_tier(
    model: MoeModel, config: Config, costs: Sequence[Mapping[str, int]]
) -> TierSizes | None:
    """Return how many experts of each layer are kept in memory behind its slots; None: none are.

    Only where the slots are in another memory, unless the user insists; raises ConfigError.
    """
    if not config.ram_bytes:
        return None
    has_tier = [config.ram_anyway or CPU not in cost for cost in costs]
    if not any(has_tier):
        raise ConfigError(
            "--longhaul-ram would hold every expert twice, since the slots are in the same memory;"
            " give --longhaul-cache more instead (--longhaul-ram-anyway insists)"
        )
    layers = [layer for layer, has in zip(model.layers, has_tier, strict=True) if has]
    sizes = iter(zip(*plan_tier(layers, config.ram_bytes, config.pin_bytes), strict=True))
    by_layer = [next(sizes) if has else (0, 0) for has in has_tier]
    return TierSizes(tuple(n for n, _ in by_layer), tuple(n for _, n in by_layer))


def _check_tier_fits(memory: BudgetPlan) -> None:
    """Raise BudgetError if what is kept behind slots leaves less memory than everything else."""
    missing_bytes = memory.least_bytes - memory.left_bytes
    if memory.tier_bytes and missing_bytes > 0:
        fitting_bytes = memory.tier_bytes - missing_bytes
        advice = f"give {gib_down(fitting_bytes)} or less" if fitting_bytes > 0 else "leave it out"
        raise BudgetError(
            f"--longhaul-ram takes {gib_up(memory.tier_bytes)} GiB, but beside all else only"
            f" {gib_down(max(fitting_bytes, 0))} GiB of {gib_down(memory.limit.available_bytes)}"
            f" GiB ({memory.limit.source}) are left for it; {advice}"
        )


def _plan_ram(
    model: MoeModel, limit: MemoryLimit, sizes: RunSizes, config: Config
) -> tuple[tuple[int, ...], int]:
    """Return the slots of each layer where all is in RAM, and the budget."""
    if config.cache_bytes is None:
        budget_bytes = auto_budget(model, limit, sizes).budget_bytes
    else:
        budget_bytes = config.cache_bytes
    if config.plan_path is None:
        return plan_slots(model.layers, budget_bytes, sizes.least), budget_bytes
    n_slots = slots_of_plan(model, config.plan_path)
    _check_plan_fits(config.plan_path, slots_bytes(model.layers, n_slots), budget_bytes)
    return n_slots, budget_bytes


def _plan_pools(
    model: MoeModel, ram: BudgetPlan, sizes: RunSizes, config: Config, placement: Placement
) -> tuple[tuple[Pool, ...], tuple[int, ...], int]:
    """Return pools and slots of each layer where there are devices, and the budget in all."""
    pools = make_pools(model, ram, placement, sizes.least, config.cache_by_device)
    costs = placement.costs(model.layers)
    # a total does not ask whether RAM is short, as without devices
    rooms = {
        pool.name: pool.expert_bytes
        if pool.name == CPU and config.cache_bytes is not None
        else pool.room_bytes
        for pool in pools
    }
    if config.plan_path is None:
        n_slots = share_slots(model.layers, costs, rooms, sizes.least, config.cache_bytes)
        pools = with_slots(pools, costs, n_slots)
    else:
        n_slots = slots_of_plan(model, config.plan_path)
        pools = with_slots(pools, costs, n_slots)
        for pool in pools:
            _check_plan_fits(config.plan_path, pool.slot_bytes, rooms[pool.name], pool.name)
        if config.cache_bytes is not None:
            taken_bytes = sum(pool.slot_bytes for pool in pools)
            _check_plan_fits(config.plan_path, taken_bytes, config.cache_bytes)
    room_bytes = sum(min(rooms[pool.name], pool.expert_bytes) for pool in pools)
    return pools, n_slots, config.cache_bytes or room_bytes


def _check_plan_fits(path: Path, planned_bytes: int, budget_bytes: int, device: str = "") -> None:
    if planned_bytes > budget_bytes:
        where = f" on {device}" if device else ""
        raise BudgetError(
            f"{path} takes {gib_up(planned_bytes)} GiB{where}, the cache has"
            f" {gib_down(budget_bytes)}; give the cache more, or make a plan for it"
        )


def _without_devices(config: Config) -> Config:
    """Return a configuration by device for a run in RAM alone; raises ConfigError for others."""
    for name in config.cache_by_device:
        if name.upper() != CPU:
            raise ConfigError(f"no experts lie on a device {name}; they lie on: {CPU}")
    (size_bytes,) = config.cache_by_device.values()
    return replace(config, cache_bytes=size_bytes, cache_by_device={})


def slots_of_plan(model: MoeModel, path: Path) -> tuple[int, ...]:
    """Return the slots of each layer by a file; raises ConfigError if it is of another model."""
    found = read_slot_plan(path)
    if found.fingerprint and found.fingerprint != model.fingerprint:
        raise ConfigError(f"{path} is a plan for another model: {found.model}")
    if found.layers != tuple(layer.layer for layer in model.layers):
        raise ConfigError(f"{path} is a plan for other layers than those of this model")
    for n, layer in zip(found.n_slots, model.layers, strict=True):
        if n > layer.n_expert:
            raise ConfigError(f"{path} gives layer {layer.layer} more slots than it has experts")
    return found.n_slots


def settle_sizes(
    model: MoeModel,
    sizes: RunSizes,
    config: Config,
    limit: MemoryLimit | None,
    *,
    may_cut_context: bool = False,
    may_cut_checkpoints: bool = False,
) -> RunSizes:
    """Return the sizes that a run is planned with: what was asked for, or cut where it may be."""
    least = token_slots if config.ubatch == "shrink" else one_slot
    sizes = replace(sizes, read_buffer_bytes=config.read_buffer_bytes, least=least)
    if may_cut_context and limit:
        sizes = replace(sizes, n_ctx=cut_context(model, sizes, limit) or sizes.n_ctx)
    if may_cut_checkpoints and limit:
        n_checkpoints = cut_checkpoints(model, sizes, limit) or sizes.n_checkpoints
        sizes = replace(sizes, n_checkpoints=n_checkpoints)
    return sizes


def most_stages(
    layers: Sequence[MoeLayer],
    n_slots: Sequence[int],
    n_ubatch: int,
    is_on_device: Sequence[bool] = (),
) -> int:
    """Return the most stages that a layer takes in a ubatch of so many tokens; 1 without layers."""
    return max(
        (
            stage_count(
                min(n_ubatch * layer.n_expert_used, layer.n_expert),
                count,
                layer.n_expert,
                on_device=on_device,
            )
            for layer, count, on_device in zip(
                layers, n_slots, is_on_device or [False] * len(layers), strict=True
            )
        ),
        default=1,
    )


def known_limit(config: Config) -> MemoryLimit | None:
    """Return the limit; None if it cannot be known and the user gave a size."""
    try:
        return memory_limit()
    except ConfigError:
        if config.cache_bytes is None and not config.cache_by_device:
            raise
        return None


def cut_context(model: MoeModel, sizes: RunSizes, limit: MemoryLimit) -> int:
    """Return the context to take when none was asked for; 0 if the trained one does.

    It is halved until its KV cache takes at most a quarter of what dense weights leave.
    """
    room_bytes = KV_SHARE * max(limit.available_bytes - model.dense_bytes, 0)
    n_ctx = model.n_ctx_train
    while (
        n_ctx > LEAST_CONTEXT
        and kv_cache_bytes(model, n_ctx, sizes.n_seq, sizes.kv_element_bytes) > room_bytes
    ):
        n_ctx = max(n_ctx // 2, LEAST_CONTEXT)
    return n_ctx if n_ctx < model.n_ctx_train else 0


def cut_placed_context(placement: Placement, limit: MemoryLimit) -> int:
    """Return the context to take when none was asked for, 0 if what llama.cpp would take does.

    As in RAM alone: halved until no pool's KV cache takes more than a quarter of what the model
    leaves there.
    """
    ram = replace(placement.ram, free_bytes=limit.available_bytes)
    pools = [ram, *(device for device in placement.devices if not device.is_host)]
    n_ctx = placement.n_ctx
    while n_ctx > LEAST_CONTEXT and any(
        pool.context_bytes * n_ctx / placement.n_ctx
        > KV_SHARE * max(pool.free_bytes - pool.model_bytes, 0)
        for pool in pools
    ):
        n_ctx = max(n_ctx // 2, LEAST_CONTEXT)
    return n_ctx if n_ctx < placement.n_ctx else 0


def cut_checkpoints(model: MoeModel, sizes: RunSizes, limit: MemoryLimit) -> int:
    """Return how many states to keep of each sequence; 0 if as many as asked for do."""
    each_bytes = checkpoint_bytes(model, sizes.n_ctx, sizes.n_ubatch, sizes.kv_element_bytes)
    if not each_bytes:
        return 0
    n_fitting = int(CHECKPOINT_SHARE * limit.available_bytes) // (each_bytes * sizes.n_seq)
    return max(n_fitting, 1) if n_fitting < sizes.n_checkpoints else 0
