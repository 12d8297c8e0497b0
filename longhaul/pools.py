"""Shares memory among slots where there are several kinds of it: RAM, and each device's own. Pure.

A pool is memory that is limited by itself. A device whose memory is the host's belongs to the pool
of RAM, so that nothing is counted twice.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from .budget import (
    PROCESS_BYTES,
    BudgetPlan,
    Least,
    MemoryLimit,
    RunSizes,
    gib_down,
    gib_up,
    plan_memory,
)
from .errors import BudgetError, ConfigError
from .experts import MoeLayer, MoeModel

CPU = "CPU"  # RAM, by ggml's name
_LATER = ("KV", "KV cache", "compute", "compute buffers", "other")
STAGE_IDS = 64  # ids and places of a row, in all stages that are there at once
DEVICE_FLOOR_SHARE = 0.05  # of a device's memory, or the tool's margin where that is more


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Say what a device has, and what a run takes of it beside experts; sizes in bytes."""

    name: str
    description: str
    is_host: bool  # its memory is the host's
    total_bytes: int  # 0 and 0: it does not say
    free_bytes: int
    model_bytes: int
    context_bytes: int
    compute_bytes: int
    other_bytes: int = 0  # a draft model, a projector
    margin_bytes: int = 0  # what llama.cpp is told to leave free

    @property
    def used_bytes(self) -> int:
        """All that the run takes of it beside experts."""
        return self.model_bytes + self.context_bytes + self.compute_bytes + self.other_bytes


@dataclass(frozen=True, slots=True)
class Placement:
    """Say where llama.cpp puts a model."""

    devices: tuple[DeviceMemory, ...]  # without the host
    host: DeviceMemory
    device_of: Mapping[str, str]  # by routed tensor: a device's name, CPU for the host
    n_ctx: int  # KV cells in all
    args: tuple[str, ...] = ()  # what makes the tool do just that
    n_ctx_cut: int = 0  # 0: as asked
    process_bytes: int = 0  # of RAM, that a process with these devices takes at least

    @property
    def is_host_only(self) -> bool:
        """Whether all of it lies in the host's memory, as if there were no devices."""
        return not any(device.used_bytes for device in self.devices) and set(
            self.device_of.values()
        ) <= {CPU}

    @property
    def shared(self) -> tuple[str, ...]:
        """The devices whose memory is RAM."""
        return tuple(device.name for device in self.devices if device.is_host)

    def pool_of(self, device: str) -> str:
        """Return the pool that a device's memory belongs to."""
        return CPU if device in self.shared else device

    @property
    def ram(self) -> DeviceMemory:
        """What the run takes of RAM, through devices that share it as well."""
        shared = [self.host, *(device for device in self.devices if device.is_host)]
        return replace(
            self.host,
            model_bytes=sum(device.model_bytes for device in shared),
            context_bytes=sum(device.context_bytes for device in shared),
            compute_bytes=sum(device.compute_bytes for device in shared),
            other_bytes=sum(device.other_bytes for device in shared),
        )

    def costs(self, layers: Sequence[MoeLayer]) -> tuple[dict[str, int], ...]:
        """Return what a slot of each layer takes of each pool, in bytes.

        Raises ConfigError if an expert would lie where none can be streamed to.
        """
        known = {CPU, *(device.name for device in self.devices)}
        found = []
        for layer in layers:
            cost: dict[str, int] = {}
            for tensor in layer.tensors:
                device = self.device_of.get(tensor.name, "")
                if not device:
                    continue  # the architecture does not use it
                if device not in known:
                    raise ConfigError(
                        f"{tensor.name} would lie in a buffer of type {device}, into which experts"
                        " cannot be streamed; leave --split-mode row or tensor, or"
                        " --override-tensor for it, out"
                    )
                pool = self.pool_of(device)
                cost[pool] = cost.get(pool, 0) + tensor.slice_bytes
            found.append(cost)
        return tuple(found)


@dataclass(frozen=True, slots=True)
class Pool:
    """Hold the plan of one pool; sizes in bytes."""

    name: str
    description: str
    free_bytes: int
    terms: tuple[tuple[str, int], ...]  # beside slots, the floor among them
    least_bytes: int  # of slots
    expert_bytes: int  # of all experts that belong there
    slot_bytes: int = 0
    n_layers: int = 0  # that have slots there
    asked_bytes: int | None = None  # for slots, by the user

    @property
    def left_bytes(self) -> int:
        """What the terms leave for slots; negative when they do not fit."""
        return self.free_bytes - sum(size for _, size in self.terms)

    @property
    def planned_bytes(self) -> int:
        """What the run is to take: slots and terms, without the floor."""
        return self.slot_bytes + sum(size for name, size in self.terms if name != "floor")

    @property
    def room_bytes(self) -> int:
        """What slots may take: as asked, else what is left; the least, if only the floor is short.

        Raises BudgetError if that is below the least.
        """
        if self.asked_bytes is not None:
            if self.asked_bytes < self.least_bytes:
                raise BudgetError(
                    f"{self.name}={gib_down(self.asked_bytes)} GiB is below the least for the"
                    f" experts there; give {self.name}={gib_up(self.least_bytes)} or more"
                )
            return self.asked_bytes
        if self.least_bytes == 0:
            return max(self.left_bytes, 0)
        floor_bytes = dict(self.terms).get("floor", 0) if self.name != CPU else 0
        missing_bytes = self.least_bytes - self.left_bytes - floor_bytes
        if missing_bytes > 0:
            terms = ", ".join(f"{name} {gib_up(size)}" for name, size in self.terms if size)
            raise BudgetError(
                f"{gib_up(missing_bytes)} GiB of memory are missing on {self.name}: of"
                f" {gib_down(self.free_bytes)} GiB free {terms} GiB are set aside, and experts need"
                f" at least {gib_up(self.least_bytes)}; put fewer layers there (--n-gpu-layers,"
                f" --n-cpu-moe), shorten the context, or give --longhaul-cache {self.name}=SIZE"
            )
        return max(self.left_bytes, self.least_bytes)

    def as_dict(self) -> dict[str, object]:
        """Return it with only strings, numbers and a dict."""
        return {
            "name": self.name,
            "description": self.description,
            "free_bytes": self.free_bytes,
            "slot_bytes": self.slot_bytes,
            "n_layers": self.n_layers,
            "expert_bytes": self.expert_bytes,
            "planned_bytes": self.planned_bytes,
            "terms": dict(self.terms),
        }


def ram_plan(
    model: MoeModel, limit: MemoryLimit, sizes: RunSizes, placement: Placement
) -> BudgetPlan:
    """Plan what a run takes of RAM, of which devices take over a part."""
    ram = placement.ram
    costs = placement.costs(model.layers)
    return replace(
        plan_memory(model, limit, sizes),
        dense_bytes=ram.model_bytes,
        kv_bytes=ram.context_bytes,
        compute_bytes=ram.compute_bytes,
        other_bytes=sizes.other_bytes + ram.other_bytes,
        process_bytes=max(PROCESS_BYTES, placement.process_bytes),
        expert_bytes=_expert_bytes(model.layers, costs).get(CPU, 0),
        least_bytes=_least_bytes(model.layers, costs, sizes.least).get(CPU, 0),
    )


def make_pools(
    model: MoeModel, ram: BudgetPlan, placement: Placement, least: Least, asked: Mapping[str, int]
) -> tuple[Pool, ...]:
    """Return the pools before anything is shared, RAM first; `asked` are sizes by device.

    Raises ConfigError for a size of a device that holds no experts.
    """
    costs = placement.costs(model.layers)
    least_bytes = _least_bytes(model.layers, costs, least)
    expert_bytes = _expert_bytes(model.layers, costs)
    sizes = asked_of(asked, placement, expert_bytes)
    pools = [
        Pool(
            name=CPU,
            description=", ".join(["RAM", *placement.shared]),
            free_bytes=ram.limit.available_bytes,
            terms=ram.terms,
            least_bytes=least_bytes.get(CPU, 0),
            expert_bytes=expert_bytes.get(CPU, 0),
            n_layers=_n_layers(costs, CPU),
            asked_bytes=sizes.get(CPU),
        )
    ]
    for device in placement.devices:
        if device.is_host or not (device.used_bytes or device.name in expert_bytes):
            continue
        is_unknown = not device.free_bytes and not device.total_bytes
        if is_unknown and device.name in expert_bytes and device.name not in sizes:
            raise ConfigError(
                f"{device.name} does not say how much memory it has;"
                f" give --longhaul-cache {device.name}=SIZE"
            )
        pools.append(
            Pool(
                name=device.name,
                description=device.description,
                free_bytes=device.free_bytes,
                terms=(
                    ("model", device.model_bytes),
                    ("KV", device.context_bytes),
                    ("compute", device.compute_bytes),
                    ("other", device.other_bytes),
                    ("floor", device_floor_bytes(device)),
                ),
                least_bytes=least_bytes.get(device.name, 0),
                expert_bytes=expert_bytes.get(device.name, 0),
                n_layers=_n_layers(costs, device.name),
                asked_bytes=sizes.get(device.name),
            )
        )
    return tuple(pools)


def device_floor_bytes(device: DeviceMemory) -> int:
    """Return what stays free on a device: llama.cpp's margin, or 5 % where that is more."""
    return max(device.margin_bytes, int(DEVICE_FLOOR_SHARE * device.total_bytes))


def asked_of(
    asked: Mapping[str, int], placement: Placement, expert_bytes: Mapping[str, int]
) -> dict[str, int]:
    """Return sizes by pool, names as ggml writes them; raises ConfigError for a wrong name."""
    there = ", ".join(sorted(expert_bytes))
    names = {device.name.upper(): device.name for device in (*placement.devices, placement.host)}
    found: dict[str, int] = {}
    for text, size_bytes in asked.items():
        name = names.get(text.upper())
        if name is None:
            raise ConfigError(f"no device {text} for --longhaul-cache; experts lie on: {there}")
        pool = placement.pool_of(name)
        if pool not in expert_bytes:
            raise ConfigError(f"no experts lie on {name}; they lie on: {there}")
        if pool in found:
            raise ConfigError(f"the memory of {name} is RAM, which has a size already")
        found[pool] = size_bytes
    return found


def with_stage_buffers(placement: Placement, model: MoeModel, n_ubatch: int) -> Placement:
    """Return a placement with what stages take of devices: outputs of products, to copy from.

    llama.cpp was asked without slots, so that it counted none. Upper: as if all were in stages.
    """
    n_used = max((layer.n_expert_used for layer in model.layers), default=0)
    n_rows = n_used * min(n_ubatch, placement.n_ctx or n_ubatch)
    stage_bytes = 4 * n_rows * (model.n_embd + 2 * model.n_ff_exp + STAGE_IDS)
    holding = set(placement.device_of.values())
    devices = tuple(
        replace(device, compute_bytes=device.compute_bytes + stage_bytes)
        if device.name in holding
        else device
        for device in placement.devices
    )
    return replace(placement, devices=devices)


def with_slots(
    pools: Iterable[Pool], costs: Sequence[Mapping[str, int]], n_slots: Sequence[int]
) -> tuple[Pool, ...]:
    """Return the pools with the bytes of these slots."""
    return tuple(
        replace(
            pool,
            slot_bytes=sum(
                count * cost.get(pool.name, 0) for cost, count in zip(costs, n_slots, strict=True)
            ),
        )
        for pool in pools
    )


def later_bytes(pool: Pool) -> int:
    """Return what a pool is to hold once its slots are there: llama.cpp makes contexts last."""
    return sum(size for name, size in pool.terms if name in _LATER)


def _expert_bytes(layers: Sequence[MoeLayer], costs: Sequence[Mapping[str, int]]) -> dict[str, int]:
    return _by_pool(costs, [layer.n_expert for layer in layers])


def _least_bytes(
    layers: Sequence[MoeLayer], costs: Sequence[Mapping[str, int]], least: Least
) -> dict[str, int]:
    return _by_pool(costs, [least(layer) for layer in layers])


def _by_pool(costs: Sequence[Mapping[str, int]], counts: Sequence[int]) -> dict[str, int]:
    found: dict[str, int] = {}
    for cost, count in zip(costs, counts, strict=True):
        for pool, slice_bytes in cost.items():
            found[pool] = found.get(pool, 0) + count * slice_bytes
    return found


def _n_layers(costs: Sequence[Mapping[str, int]], pool: str) -> int:
    return sum(pool in cost for cost in costs)
