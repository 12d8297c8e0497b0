"""Eviction policies: which slots of one layer give up their expert.

They decide nothing else and change no residency.
"""

import heapq
from collections.abc import Callable, Collection, Sequence
from typing import Protocol


class Policy(Protocol):
    """Rank the occupied slots of one layer."""

    def add(self, slot: int) -> None:
        """Take note that the slot received an expert; its stamp says when it was used last."""

    def remove(self, slot: int) -> None:
        """Take note that the slot lost its expert."""

    def victims(self, n: int, protected: Collection[int]) -> list[int]:
        """Return n distinct occupied slots outside of `protected`, the first to go first.

        Raises ValueError if there are not that many. The same call gives the same answer until a
        slot is used, added or removed.
        """


class Lru:
    """Evict the slot that was used longest ago.

    Stamps grow behind its back: slots are stamped in native code on each use. The heap therefore
    holds stamps that may be out of date, never ones from the future; an entry at the top is trusted
    only when its stamp is the current one. Each use costs at most one correction, whatever the
    number of slots.
    """

    def __init__(self, last_use: Sequence[int]) -> None:
        self._last_use = last_use
        self._heap: list[tuple[int, int, int]] = []  # stamp, slot, generation
        self._generation: dict[int, int] = {}  # of occupied slots
        self._n_added = 0

    def add(self, slot: int) -> None:
        self._n_added += 1
        self._generation[slot] = self._n_added
        heapq.heappush(self._heap, (self._last_use[slot], slot, self._n_added))

    def remove(self, slot: int) -> None:
        del self._generation[slot]

    def victims(self, n: int, protected: Collection[int]) -> list[int]:
        chosen: list[int] = []
        seen: list[tuple[int, int, int]] = []
        heap = self._heap
        while len(chosen) < n and heap:
            stamp, slot, generation = heap[0]
            if self._generation.get(slot) != generation:
                heapq.heappop(heap)
            elif stamp != self._last_use[slot]:
                heapq.heapreplace(heap, (self._last_use[slot], slot, generation))
            else:
                seen.append(heapq.heappop(heap))
                if slot not in protected:
                    chosen.append(slot)
        for entry in seen:
            heapq.heappush(heap, entry)
        if len(chosen) < n:
            raise ValueError(f"{n} victims wanted, {len(chosen)} slots can go")
        return chosen


POLICIES: dict[str, Callable[[Sequence[int]], Policy]] = {"lru": Lru}
