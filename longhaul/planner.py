"""From the experts that a layer needs to a plan of loads and victims. Changes nothing."""

from collections.abc import Sequence
from dataclasses import dataclass

from .residency import Residency


@dataclass(frozen=True, slots=True)
class Plan:
    """Say what has to happen before a layer can be computed; `loads` are (expert, slot) pairs."""

    loads: tuple[tuple[int, int], ...]
    victims: tuple[int, ...]


def plan(residency: Residency, needed: Sequence[int], missing: Sequence[int]) -> Plan:
    """Give every missing expert a slot: free ones first, then those of victims.

    Needed experts are never victims. Both sequences hold distinct experts; `missing` are those of
    `needed` that no slot holds. Raises ValueError if they do not, or if the slots cannot hold all
    needed experts at once.
    """
    n_slots = len(residency.expert_of)
    if len(set(needed)) < len(needed) or len(set(missing)) < len(missing):
        raise ValueError(f"an expert is named twice: {list(needed)}, missing {list(missing)}")
    if len(needed) > n_slots:
        raise ValueError(
            f"{len(needed)} experts are needed at once, but the layer has {n_slots} slots"
        )
    free = residency.free
    n_victims = max(len(missing) - len(free), 0)
    victims: list[int] = []
    if n_victims:
        slot_of = residency.slot_of
        protected = {slot_of[expert] for expert in needed}
        victims = residency.policy.victims(n_victims, protected)
    slots = free[: -len(missing) - 1 : -1] + victims
    return Plan(tuple(zip(missing, slots, strict=True)), tuple(victims))
