"""Tells before a run whether it fits, what it takes, and how quick it may be.

Loads no library here; where there may be devices, another process does.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from . import machine as machines
from . import report
from .arguments import read_arguments
from .budget import (
    GIB,
    MIB,
    BudgetPlan,
    MemoryLimit,
    RunSizes,
    gib_up,
    memory_limit,
    memory_limits,
    plan_memory,
    slots_bytes,
)
from .config import Config
from .errors import BudgetError, ConfigError, MissingShardError
from .experts import MoeModel
from .forecast import Forecast, Machine, forecast
from .gguf_header import bytes_per_weight
from .index import read_first_shard, read_index
from .launch import RunPlan, plan_run, settle_sizes, tool_sizes
from .pools import CPU, Placement, ram_plan
from .probe import placed
from .server_arguments import read_server_arguments
from .shape import Shape, model_of

SLOW_TOKENS_PER_S = 1.0
NEEDED = ("n_layer", "n_expert", "n_expert_used", "n_embd", "n_ff_exp")  # to know a shape


@dataclass(frozen=True, slots=True)
class Measured:
    """Hold what a machine can do, or why that is not known."""

    machine: Machine | None = None
    why_not: str = ""


NOT_MEASURED = Measured()


@dataclass(frozen=True, slots=True)
class Advice:
    """Hold what is known of a run before it begins."""

    model: MoeModel
    limits: tuple[MemoryLimit, ...]  # all there are; the tightest one counts
    memory: BudgetPlan
    plan: RunPlan | None  # None: there is none
    refusal: str  # why there is none
    measured: "Measured"

    @property
    def machine(self) -> Machine | None:
        """What the machine can do, None where it was not measured."""
        return self.measured.machine

    @property
    def forecast(self) -> Forecast | None:
        """What decoding may cost, where there is a plan and the machine was measured."""
        if self.plan is None or self.machine is None:
            return None
        return forecast(self.model, self.slot_bytes, self.machine)

    @property
    def slot_bytes(self) -> int:
        """Bytes of all slots, 0 without a plan."""
        return slots_bytes(self.model.layers, self.plan.n_slots) if self.plan else 0

    @property
    def least_bytes(self) -> int:
        """The least cache that works, over all devices where there are any."""
        pools = self.plan.pools if self.plan else ()
        return sum(pool.least_bytes for pool in pools) or self.memory.least_bytes

    @property
    def fits(self) -> bool:
        """Whether what is planned is available."""
        if self.plan is None or self.short_devices:
            return False
        return self.plan.planned.total_bytes <= self.memory.limit.available_bytes

    @property
    def short_devices(self) -> list[str]:
        """Say which devices are planned to hold more than is free there."""
        return [
            f"{pool.planned_bytes / MIB:.0f} MiB are planned on {pool.name},"
            f" {pool.free_bytes / MIB:.0f} MiB are free there"
            for pool in (self.plan.pools if self.plan else ())
            if pool.name != CPU and pool.planned_bytes > pool.free_bytes
        ]

    @property
    def slow_because(self) -> list[str]:
        """What makes a run that fits slow; empty if nothing does."""
        if self.plan is None:
            return []
        found = []
        if self.slot_bytes < self.model.token_cycle_bytes:
            found.append(
                f"the cache is below the {report.size_text(self.model.token_cycle_bytes)} of"
                " experts that one token uses, so every token reads most of them again"
            )
        expected = self.forecast
        if expected and expected.tokens_per_s[0] < SLOW_TOKENS_PER_S:
            found.append(
                f"a token may have to read {report.size_text(round(expected.read_bytes[0]))}"
            )
        return found

    @property
    def verdict(self) -> str:
        """Say in one line whether it fits."""
        if self.plan is None:
            return f"does not fit: {self.refusal}"
        planned_bytes, limit = self.plan.planned.total_bytes, self.memory.limit
        if self.short_devices:
            return f"does not fit: {'; '.join(self.short_devices)}"
        if not self.fits:
            return (
                f"does not fit: {planned_bytes / MIB:.0f} MiB are planned,"
                f" {limit.available_bytes / MIB:.0f} MiB are available ({limit.source})"
            )
        slow = self.slow_because
        return f"fits, but slow: {'; '.join(slow)}" if slow else "fits"

    def lines(self) -> list[str]:
        """Write all of it for a terminal."""
        model, plan = self.model, self.plan
        lines = [report.model_line(model)]
        for limit in self.limits:
            is_it = limit.source == self.memory.limit.source and len(self.limits) > 1
            counts = " <- counts" if is_it else ""
            lines.append(
                f"limit   {_mib(limit.available_bytes)} of {_mib(limit.bytes)} available:"
                f" {limit.source}{counts}"
            )
        pools = plan.pools if plan else ()
        lines += [
            f"limit   {_mib(pool.free_bytes)} free: {pool.name} ({pool.description}), for itself"
            for pool in pools
            if pool.name != CPU
        ]
        ram_bytes = next((pool.slot_bytes for pool in pools), self.slot_bytes)
        terms: list[tuple[str, int]] = [("slots", ram_bytes)] if plan else []
        terms += self.memory.terms
        width = max(len(name) for name, _ in terms)
        lines += [f"takes   {name:<{width}} {_mib(size)}" for name, size in terms if size]
        total_bytes = sum(size for _, size in terms)
        lines.append(
            f"takes   {'all together':<{width}} {_mib(total_bytes)}, of which the floor stays free"
        )
        lines += [report.device_line(pool) for pool in pools]
        if plan:
            each = [
                n * layer.expert_bytes for n, layer in zip(plan.n_slots, model.layers, strict=True)
            ]
            lines += report.budget_lines(
                model, plan.n_slots, plan.budget_bytes, automatic=plan.automatic
            )[:1]
            lines.append(
                f"slots   {report.span(plan.n_slots)} in each of {len(each)} layers,"
                f" {min(each) / MIB:.1f} to {max(each) / MIB:.1f} MiB in a layer"
            )
            lines.append(report.ubatch_line(plan.n_ubatch, plan.n_ubatch_asked, plan.n_stages))
            if plan.n_ctx_cut:
                lines.append(report.context_line(plan.n_ctx_cut, model.n_ctx_train))
        lines.append(f"token   uses {report.size_text(model.token_cycle_bytes)} of experts")
        lines += self._forecast_lines()
        lines.append(
            f"least   {gib_up(self.least_bytes)} GiB of cache: --longhaul-cache"
            f" {gib_up(self.least_bytes)}"
        )
        lines.append(f"verdict {self.verdict}")
        return lines

    def _forecast_lines(self) -> list[str]:
        if self.machine is None:
            why_not = self.measured.why_not
            return [f"speed   not estimated: {why_not}"] if why_not else []
        lines = [
            f"machine reads {self.machine.disk_bytes_per_s / MIB:.0f} MiB/s uncached from the disk,"
            f" {self.machine.memory_bytes_per_s / GIB:.1f} GiB/s from memory, as measured now"
        ]
        expected = self.forecast
        if expected:
            (low, high), (slow, quick) = expected.hit_rate, expected.tokens_per_s
            lines.append(
                f"expect  {low:.0%} to {high:.0%} hits while decoding,"
                f" {expected.read_bytes[1] / MIB:.0f} to {expected.read_bytes[0] / MIB:.0f} MiB"
                f" read per token, {slow:.2g} to {quick:.2g} tok/s (as other models route)"
            )
        return lines

    def as_json(self) -> dict[str, object]:
        """Return all of it, sizes in bytes."""
        plan, expected = self.plan, self.forecast
        return {
            "model": self.model.name or self.model.path.name,
            "arch": self.model.arch,
            "fits": self.fits,
            "verdict": self.verdict,
            "limits": [
                {"source": x.source, "bytes": x.bytes, "available_bytes": x.available_bytes}
                for x in self.limits
            ],
            "limit": self.memory.limit.source,
            "terms": {name: size for name, size in self.memory.terms},
            "expert_bytes": self.model.expert_bytes,
            "token_cycle_bytes": self.model.token_cycle_bytes,
            "devices": [pool.as_dict() for pool in plan.pools] if plan else [],
            "least_budget_bytes": self.least_bytes,
            "budget_bytes": plan.budget_bytes if plan else None,
            "planned_bytes": plan.planned.total_bytes if plan else None,
            "n_ubatch": plan.n_ubatch if plan else None,
            "n_stages": plan.n_stages if plan else None,
            "layers": [
                {
                    "layer": layer.layer,
                    "n_expert": layer.n_expert,
                    "n_slots": n_slots,
                    "slot_bytes": n_slots * layer.expert_bytes,
                }
                for layer, n_slots in zip(self.model.layers, plan.n_slots, strict=True)
            ]
            if plan
            else [],
            "disk_bytes_per_s": self.machine.disk_bytes_per_s if self.machine else None,
            "memory_bytes_per_s": self.machine.memory_bytes_per_s if self.machine else None,
            "hit_rate": list(expected.hit_rate) if expected else None,
            "read_bytes_per_token": list(expected.read_bytes) if expected else None,
            "tokens_per_s": list(expected.tokens_per_s) if expected else None,
        }


def advise(
    model: MoeModel,
    sizes: RunSizes,
    config: Config,
    measured: Measured = NOT_MEASURED,
    *,
    may_cut_context: bool = False,
    may_cut_checkpoints: bool = False,
    placement: Placement | None = None,
) -> Advice:
    """Plan a run as it would be planned, and say what comes of it even if it cannot be.

    Raises ConfigError if the system does not say how much memory there is.
    """
    limits = tuple(memory_limits())
    may_cut = {"may_cut_context": may_cut_context, "may_cut_checkpoints": may_cut_checkpoints}
    try:
        plan = plan_run(
            model,
            sizes,
            config,
            may_cut_context=may_cut_context,
            may_cut_checkpoints=may_cut_checkpoints,
            placement=placement,
        )
    except BudgetError as e:
        limit = memory_limit()
        if placement:
            sizes = replace(sizes, n_ctx=placement.n_ctx)
            may_cut["may_cut_context"] = False
        settled = settle_sizes(model, sizes, config, limit, **may_cut)
        memory = (
            ram_plan(model, limit, settled, placement)
            if placement
            else plan_memory(model, limit, settled)
        )
        return Advice(model, limits, memory, None, str(e), measured)
    return Advice(model, limits, plan.memory, plan, "", measured)


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / MIB:>10.1f} MiB"


def plan_command(
    args: Sequence[str],
    config: Config | None,
    shape: Mapping[str, int | None],
    type_name: str,
    *,
    as_json: bool,
) -> tuple[list[str], bool]:
    """Return the lines that `longhaul plan` prints, and whether the model fits.

    `args` are those of llama.cpp, and the model by its name alone; `shape` describes one that is
    not there. Raises ConfigError for a bad option, ModelError for a file that is no model.
    """
    if config is None:
        raise ConfigError("--no-longhaul cannot be planned: nothing is streamed then")
    args = with_model_option(args)
    arguments = read_arguments(args)
    model, measured = _model_to_plan(arguments.model, shape, type_name)
    if not model.is_moe:
        name = model.name or model.path.name
        if as_json:
            return [json.dumps({"model": name, "fits": None})], True
        return [f"model   {name} has no routed experts: nothing to stream"], True
    tool = "server" if arguments.n_seq else "cli"
    server = read_server_arguments(args)
    sizes = tool_sizes(tool, arguments, model, server)
    may_cut_context = arguments.n_ctx is None and not server.n_ctx_per_sequence
    placement = None
    warnings: list[str] = []
    if model.path.exists():  # not the shape of one
        placement = placed(
            tool, args, model.path, config, warnings.append, may_cut_context=may_cut_context
        )
    if placement:
        sizes = replace(sizes, other_bytes=sizes.other_bytes - arguments.other_bytes)
    advice = advise(
        model,
        sizes,
        config,
        measured,
        may_cut_context=may_cut_context,
        may_cut_checkpoints=arguments.n_checkpoints is None,
        placement=placement,
    )
    lines = [json.dumps(advice.as_json(), indent=2)] if as_json else [*warnings, *advice.lines()]
    return lines, advice.fits


def with_model_option(args: Sequence[str]) -> list[str]:
    """Put --model before a model that stands alone: the first word, or one that follows none."""
    words = list(args)
    if words and not words[0].startswith("-"):
        if len(words) > 1 and not words[1].startswith("-"):
            raise ConfigError(f"one model at a time: {words[0]}, and not {words[1]} as well")
        return ["--model", *words]
    for index, (before, word) in enumerate(pairwise(words), 1):
        if word.endswith(".gguf") and not before.startswith("-"):
            return [*words[:index], "--model", *words[index:]]
    return words


def _model_to_plan(
    path: Path | None, shape: Mapping[str, int | None], type_name: str
) -> tuple[MoeModel, Measured]:
    if any(value is not None for value in shape.values()):
        if path is not None:
            raise ConfigError("give a model, or the shape of one, not both")
        return _shaped(shape, type_name), Measured(None, "no file to measure the disk by")
    if path is None:
        raise ConfigError("give a model, or the shape of one by --n-layer, --n-expert and so on")
    return _described(path), _measured(path)


def _shaped(shape: Mapping[str, int | None], type_name: str) -> MoeModel:
    for name in NEEDED:
        if shape[name] is None:
            raise ConfigError(f"the shape of a model needs --{name.replace('_', '-')}")
    given = {name: value for name, value in shape.items() if value is not None}
    return model_of(Shape(**given, bytes_per_weight=bytes_per_weight(type_name)))


def _described(path: Path) -> MoeModel:
    try:
        return read_index(path)
    except MissingShardError:
        return read_first_shard(path)


def _measured(path: Path) -> Measured:
    try:
        return Measured(machines.measure(path))
    except OSError as e:
        return Measured(None, f"the disk cannot be read past the page cache ({e.strerror})")
