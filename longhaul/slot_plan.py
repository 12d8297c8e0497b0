"""Slots of each layer for a budget, by a trace: more where they save more reads. Pure.

A plan is a file of JSON: `format` (1), `model`, `fingerprint`, `budget_bytes`, and `layers` with
`layer` and `n_slots` each. `budget_bytes` is 0 where the trace does not say how large experts are.
"""

import heapq
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .budget import gib_down, gib_up, plan_slots, slots_bytes
from .errors import BudgetError, ConfigError
from .files import write_text
from .replay import replay
from .reuse import hits_by_slots
from .trace import as_dict, as_list, as_text, as_whole
from .workload import Workload

FORMAT = 1
PRIOR_TOKENS = 100


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """Say how many slots each layer gets."""

    model: str
    fingerprint: str
    budget_bytes: int
    layers: tuple[int, ...]  # of the model
    n_slots: tuple[int, ...]  # in the order of `layers`


# --- proposing ------------------------------------------------------------------------------------


def uniform_slots(workload: Workload, budget_bytes: int) -> tuple[int, ...]:
    """Return what each layer gets without a trace."""
    return plan_slots([each.shape.moe_layer() for each in workload.layers], budget_bytes)


def propose_slots(workload: Workload, budget_bytes: int) -> tuple[int, ...]:
    """Return slots by layer that save the most bytes while decoding with LRU, as the trace shows.

    Every layer gets at least what one token needs; then each slot goes where it saves the most
    misses, and of equal ones to the layer with the smallest share. Gains are those of the least
    concave curve above the hits, so that a slot which helps only with the next ones is not passed
    over (Qureshi and Patt, "Utility-based cache partitioning", 2006). Raises BudgetError if the
    budget is below the least.
    """
    shapes = [each.shape.moe_layer() for each in workload.layers]
    n_slots = [each.n_expert_used for each in shapes]
    left_bytes = budget_bytes - slots_bytes(shapes, n_slots)
    if left_bytes < 0:
        raise _below_a_token(budget_bytes, budget_bytes - left_bytes, workload.has_sizes)
    gains = [_gains(hits) for hits in _hit_curves(workload)]
    queue = [
        (-gains[i][count], count / shape.n_expert, i)
        for i, (count, shape) in enumerate(zip(n_slots, shapes, strict=True))
        if count < shape.n_expert
    ]
    heapq.heapify(queue)
    while queue:
        _, _, i = heapq.heappop(queue)
        if shapes[i].expert_bytes > left_bytes:
            continue
        left_bytes -= shapes[i].expert_bytes
        n_slots[i] += 1
        if n_slots[i] < shapes[i].n_expert:
            share = n_slots[i] / shapes[i].n_expert
            heapq.heappush(queue, (-gains[i][n_slots[i]], share, i))
    return tuple(n_slots)


def _below_a_token(budget_bytes: int, least_bytes: int, has_sizes: bool) -> BudgetError:
    given, least = f"{budget_bytes} slots", f"{least_bytes} slots"
    if has_sizes:
        given, least = f"{gib_down(budget_bytes)} GiB", f"{gib_up(least_bytes)} GiB"
    return BudgetError(
        f"a cache of {given} is below the experts of one token, {least}: nothing to share"
    )


def _hit_curves(workload: Workload) -> list[list[float]]:
    """Return by layer the hits with 0, 1, ... n_expert slots.

    What few tokens say of a layer is weighed against the mean of the layers of its size, which
    counts as much as PRIOR_TOKENS of its own.
    """
    n_tokens = workload.totals.decode.n_tokens
    own = [hits_by_slots(layer) for layer in workload.layers]
    curves = []
    for hits in own:
        alike = [other for other in own if len(other) == len(hits)]
        mean = [sum(column) / len(alike) for column in zip(*alike, strict=True)]
        weight = n_tokens / (n_tokens + PRIOR_TOKENS)
        curves.append([weight * h + (1 - weight) * m for h, m in zip(hits, mean, strict=True)])
    return curves


def _gains(hits: Sequence[float]) -> list[float]:
    """Return what each slot adds on the least concave curve above the hits."""
    corners = [0]
    for n_slots in range(1, len(hits)):
        while len(corners) > 1 and _slope(hits, corners[-2], corners[-1]) <= _slope(
            hits, corners[-1], n_slots
        ):
            corners.pop()
        corners.append(n_slots)
    gains: list[float] = []
    for first, last in itertools.pairwise(corners):
        gains += [_slope(hits, first, last)] * (last - first)
    return gains


def _slope(hits: Sequence[float], first: int, last: int) -> float:
    return (hits[last] - hits[first]) / (last - first)


# --- what it is worth -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Compare a proposal with the uniform split on ubatches that it was not made from."""

    fitted_on: str
    n_tokens: int  # decoded
    uniform_hit_rate: float
    proposed_hit_rate: float
    uniform_read_bytes: int  # experts where sizes are not known
    proposed_read_bytes: int

    @property
    def saved(self) -> float:
        """The share of the uniform split's reads that the proposal saves; negative: costs."""
        fewer_bytes = self.uniform_read_bytes - self.proposed_read_bytes
        return fewer_bytes / max(self.uniform_read_bytes, 1)


def held_out(workload: Workload, budget_bytes: int) -> list[HeldOut]:
    """Fit each half of a trace and replay the other one, from a cold cache.

    Raises ConfigError if a half decodes nothing.
    """
    middle = workload.n_ubatches // 2
    halves = [workload.between(0, middle), workload.between(middle, workload.n_ubatches)]
    if not all(half.totals.decode.n_tokens for half in halves):
        raise ConfigError("the trace is too short: half of it decodes no token")
    names = ("first half", "second half")
    found = []
    for fitted, tested, name in zip(halves, reversed(halves), names, strict=True):
        splits = [uniform_slots(tested, budget_bytes), propose_slots(fitted, budget_bytes)]
        uniform, proposed = (replay(tested, split, "lru").stats.decode for split in splits)
        found.append(
            HeldOut(
                name,
                uniform.n_tokens,
                uniform.hit_rate,
                proposed.hit_rate,
                uniform.read_bytes or uniform.n_misses,
                proposed.read_bytes or proposed.n_misses,
            )
        )
    return found


# --- files ----------------------------------------------------------------------------------------


def plan_of(workload: Workload, budget_bytes: int) -> SlotPlan:
    """Propose slots from a whole trace; raises BudgetError if the budget is below the least."""
    header = workload.header
    return SlotPlan(
        model=header.model,
        fingerprint=header.fingerprint,
        budget_bytes=budget_bytes if workload.has_sizes else 0,
        layers=tuple(each.layer for each in header.layers),
        n_slots=propose_slots(workload, budget_bytes),
    )


def write_slot_plan(plan: SlotPlan, path: Path) -> None:
    """Write a plan; a file is whole or as it was. Raises OSError if it cannot be written."""
    pairs = zip(plan.layers, plan.n_slots, strict=True)
    found = {
        "format": FORMAT,
        "model": plan.model,
        "fingerprint": plan.fingerprint,
        "budget_bytes": plan.budget_bytes,
        "layers": [{"layer": layer, "n_slots": n_slots} for layer, n_slots in pairs],
    }
    write_text(path, json.dumps(found, indent=1) + "\n")


def read_slot_plan(path: Path) -> SlotPlan:
    """Read a plan; raises ConfigError if there is none, or if it is malformed."""
    try:
        values = as_dict(json.loads(path.read_text(encoding="utf-8")), "it")
        if values.get("format") != FORMAT:
            raise ValueError(f"format {values.get('format')!r}; only {FORMAT} can be read")
        rows = [as_dict(each, "a layer") for each in as_list(values.get("layers"), "layers")]
        plan = SlotPlan(
            as_text(values.get("model", ""), "model"),
            as_text(values.get("fingerprint", ""), "fingerprint"),
            as_whole(values.get("budget_bytes"), "budget_bytes", 0),
            tuple(as_whole(row.get("layer"), "layer", 0) for row in rows),
            tuple(as_whole(row.get("n_slots"), "n_slots", 1) for row in rows),
        )
    except OSError as e:
        raise ConfigError(f"{path} cannot be read: {e.strerror}") from e
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"{path} is no plan of slots: {e}") from e
    if not plan.layers or len(set(plan.layers)) < len(plan.layers):
        raise ConfigError(f"{path} is no plan of slots: layers are missing or named twice")
    return plan
