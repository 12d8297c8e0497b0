"""How soon experts are wanted again, and what hit rate of LRU follows for every number of slots.

LRU keeps in n slots what it keeps in n - 1 and one more, so one pass over a trace tells the hits of
all sizes (Mattson and others, "Evaluation techniques for storage hierarchies", 1970). Pure.
"""

from collections.abc import Sequence

from .workload import LayerTrace

FIRST = -1  # the distance of a first use


def reuse_distances(layer: LayerTrace) -> list[int]:
    """Return of each expert wanted while decoding how many others were used since its last use.

    That is its place in the order of LRU before the ubatch: it is found with more slots than that.
    FIRST stands for experts that were not used before.
    """
    stack: list[int] = []  # the last used first
    found: list[int] = []
    for experts, is_prefill in layer.plain_needs():
        known = set(stack)
        if not is_prefill:
            found += [stack.index(expert) if expert in known else FIRST for expert in experts]
        for expert in experts:
            if expert in known:
                stack.remove(expert)
        stack[:0] = reversed(experts)
    return found


def hits_by_slots(layer: LayerTrace) -> list[int]:
    """Return the decoding hits of LRU from a cold cache with 0, 1, ... n_expert slots.

    True where each ubatch fits the slots.
    """
    return _cumulated(reuse_distances(layer), layer.shape.n_expert)


def _cumulated(distances: Sequence[int], n_expert: int) -> list[int]:
    counts = [0] * (n_expert + 1)
    for distance in distances:
        if distance != FIRST:
            counts[distance + 1] += 1
    for n_slots in range(n_expert):
        counts[n_slots + 1] += counts[n_slots]
    return counts
