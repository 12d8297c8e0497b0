"""Eviction policies: which slots of one layer give up their expert.

They decide nothing else and change no residency. Uses are noted in native code, behind their backs,
so a policy looks at a slot again when its turn to go seems to have come.
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import ClassVar, Generic, Protocol, TypeVar

PROTECTED_SHARE = 0.8  # of the slots: for experts that were used again
PINNED_SHARE = 0.5  # of the slots: for the hottest experts
HALVING_LOADS = 2  # loads for each slot, after which earlier uses count half


class Policy(Protocol):
    """Rank the occupied slots of one layer.

    `keeps_order` says that victims which are asked for now are those that would be chosen later, up
    to the first that is used until then.
    """

    keeps_order: ClassVar[bool]

    def add(self, slot: int, expert: int) -> None:
        """Take note that the slot received an expert; whatever it is used for is stamped later."""

    def remove(self, slot: int) -> None:
        """Take note that the slot lost its expert."""

    def victims(self, n: int, protected: Collection[int]) -> list[int]:
        """Return n distinct occupied slots outside of `protected`, the first to go first.

        Raises ValueError if there are not that many. The same call gives the same answer until a
        slot is used, added or removed.
        """


# Made of two sequences (n_slots,) that grow behind the policy's back: the stamp of each slot's last
# use, where larger is later, and how many ubatches have used the slot, whatever expert was in it.
MakePolicy = Callable[[Sequence[int], Sequence[int]], Policy]

Key = TypeVar("Key", int, tuple[float, int])
Key_co = TypeVar("Key_co", covariant=True)


class _Keys(Protocol[Key_co]):
    def __getitem__(self, slot: int, /) -> Key_co: ...


class Queue(Generic[Key]):
    """Keep slots in the order of keys that only grow.

    The heap may hold keys that are out of date, never ones from the future; an entry at the top is
    trusted only when its key is the current one. Each use costs at most one correction, whatever
    the number of slots.
    """

    keeps_order: ClassVar[bool] = True

    def __init__(self, keys: _Keys[Key]) -> None:
        self._keys: _Keys[Key] = keys
        self._heap: list[tuple[Key, int, int]] = []  # key, slot, generation
        self._generation: dict[int, int] = {}  # of the slots that are in
        self._n_added = 0

    def __len__(self) -> int:
        return len(self._generation)

    def __contains__(self, slot: int) -> bool:
        return slot in self._generation

    def __iter__(self) -> Iterator[int]:
        return iter(self._generation)

    def add(self, slot: int, expert: int) -> None:
        self._n_added += 1
        self._generation[slot] = self._n_added
        heapq.heappush(self._heap, (self._keys[slot], slot, self._n_added))

    def remove(self, slot: int) -> None:
        del self._generation[slot]

    def first(self, n: int, protected: Collection[int]) -> list[int]:
        """Return n slots outside of `protected`, or as many as there are."""
        chosen: list[int] = []
        seen: list[tuple[Key, int, int]] = []
        heap, keys, generation_of = self._heap, self._keys, self._generation.get
        while len(chosen) < n and heap:
            key, slot, generation = heap[0]
            if generation_of(slot) != generation:
                heapq.heappop(heap)
            elif key != (current := keys[slot]):
                heapq.heapreplace(heap, (current, slot, generation))
            else:
                seen.append(heapq.heappop(heap))
                if slot not in protected:
                    chosen.append(slot)
        for entry in seen:
            heapq.heappush(heap, entry)
        return chosen

    def victims(self, n: int, protected: Collection[int]) -> list[int]:
        return _enough(self.first(n, protected), n)


def _enough(chosen: list[int], n: int) -> list[int]:
    if len(chosen) < n:
        raise ValueError(f"{n} victims wanted, {len(chosen)} slots can go")
    return chosen


class Lru(Queue[int]):
    """Evict the slot that was used longest ago."""

    def __init__(self, last_use: Sequence[int], n_uses: Sequence[int]) -> None:
        super().__init__(last_use)


# --- use counts -----------------------------------------------------------------------------------


class _Counts:
    """Count the uses of each expert, by the slot it is in; experts that left are remembered.

    Uses count half as much after every `halve`, which the caller asks for when `add` says so.
    """

    def __init__(self, n_uses: Sequence[int]) -> None:
        self._n_uses = n_uses
        self.before: dict[int, float] = {}  # by slot: what to add to its n_uses
        self.expert_of: dict[int, int] = {}  # by slot
        self._past: dict[int, float] = {}  # by expert that is in no slot
        self._n_added = 0

    def __getitem__(self, slot: int) -> float:
        return self.before[slot] + self._n_uses[slot]

    def add(self, slot: int, expert: int) -> bool:
        """Note a load; the answer is whether so many were made that it is time to halve."""
        self.before[slot] = self._past.pop(expert, 0.0) - self._n_uses[slot]
        self.expert_of[slot] = expert
        self._n_added += 1
        return self._n_added % (HALVING_LOADS * len(self._n_uses)) == 0

    def remove(self, slot: int) -> None:
        self._past[self.expert_of.pop(slot)] = self.before.pop(slot) + self._n_uses[slot]

    def halve(self) -> None:
        for slot in self.before:
            self.before[slot] = self[slot] / 2 - self._n_uses[slot]
        for expert in self._past:
            self._past[expert] /= 2

    def hottest(self, n: int) -> set[int]:
        """Return the n most used experts, in slots or not."""
        counts = {**self._past, **{e: self[slot] for slot, e in self.expert_of.items()}}
        return set(heapq.nlargest(n, counts, key=lambda expert: (counts[expert], -expert)))


class _CountsThenStamps:
    def __init__(self, counts: _Counts, last_use: Sequence[int], n_uses: Sequence[int]) -> None:
        self._before = counts.before
        self._last_use = last_use
        self._n_uses = n_uses

    def __getitem__(self, slot: int) -> tuple[float, int]:
        return self._before[slot] + self._n_uses[slot], self._last_use[slot]


class Lfu:
    """Evict the expert with the fewest uses, of those the one that was used longest ago.

    LFU with aging: counts are halved now and then, so that what was hot long ago can leave
    (Robinson and Devarakonda, "Data cache management using frequency-based replacement", 1990).
    Experts keep their counts while they are out, as in Einziger, Friedman and Manes, "TinyLFU",
    2017; there are few enough of them. The time between halvings is counted in loads.
    """

    keeps_order: ClassVar[bool] = True

    def __init__(self, last_use: Sequence[int], n_uses: Sequence[int]) -> None:
        self._counts = _Counts(n_uses)
        self._keys = _CountsThenStamps(self._counts, last_use, n_uses)
        self._queue = Queue(self._keys)

    def add(self, slot: int, expert: int) -> None:
        is_time = self._counts.add(slot, expert)
        self._queue.add(slot, expert)
        if is_time:
            self._counts.halve()
            slots = list(self._queue)
            self._queue = Queue(self._keys)  # since keys have shrunk
            for each in slots:
                self._queue.add(each, expert)

    def remove(self, slot: int) -> None:
        self._counts.remove(slot)
        self._queue.remove(slot)

    def victims(self, n: int, protected: Collection[int]) -> list[int]:
        return self._queue.victims(n, protected)


# --- two segments ---------------------------------------------------------------------------------


class Slru:
    """Evict first what was not used again since it came, in the order of coming.

    Segmented LRU (Karedla, Love and Wherry, "Caching strategies to improve disk system
    performance", 1994): used again, an expert moves from the probationary segment to the protected
    one; when that is full, its least recently used one goes to the end of the probationary one. The
    move is made when an expert's turn to go has come (lazy promotion: Yang and others, "FIFO can be
    better than LRU", 2023), since nobody hears of uses.
    """

    keeps_order: ClassVar[bool] = False  # what moves earlier moves other experts back

    def __init__(self, last_use: Sequence[int], n_uses: Sequence[int]) -> None:
        self._n_uses = n_uses
        self._n_protected = int(PROTECTED_SHARE * len(n_uses))
        self._probation: OrderedDict[int, int] = OrderedDict()  # by slot: n_uses if used once
        self._again = Lru(last_use, n_uses)

    def add(self, slot: int, expert: int) -> None:
        self._probation[slot] = self._n_uses[slot] + 1

    def remove(self, slot: int) -> None:
        if self._probation.pop(slot, None) is None:
            self._again.remove(slot)

    def victims(self, n: int, protected: Collection[int]) -> list[int]:
        chosen: list[int] = []
        passed: list[tuple[int, int]] = []
        while len(chosen) < n and self._probation:
            slot, n_once = self._probation.popitem(last=False)
            if self._n_uses[slot] > n_once:
                self._promote(slot)
                continue
            passed.append((slot, n_once))
            if slot not in protected:
                chosen.append(slot)
        for slot, n_once in reversed(passed):
            self._probation[slot] = n_once
            self._probation.move_to_end(slot, last=False)
        return _enough(chosen + self._again.first(n - len(chosen), protected), n)

    def _promote(self, slot: int) -> None:
        self._again.add(slot, -1)
        if len(self._again) > self._n_protected:
            (oldest,) = self._again.first(1, ())
            self._again.remove(oldest)
            self._probation[oldest] = self._n_uses[oldest]


class Pinned:
    """Evict the least recently used expert, but none of the hottest while there are others.

    The hottest are those with the most uses, counted as in `Lfu` and chosen anew whenever counts
    are halved; half of the slots are theirs. Popular experts stay in memory like this in Kamahori
    and others, "Fiddler", 2024, there by a profile that was taken before.
    """

    keeps_order: ClassVar[bool] = True

    def __init__(self, last_use: Sequence[int], n_uses: Sequence[int]) -> None:
        self._n_pinned = int(PINNED_SHARE * len(n_uses))
        self._counts = _Counts(n_uses)
        self._hot: set[int] = set()  # experts
        self._sequences = last_use, n_uses
        self._others, self._pinned = Lru(last_use, n_uses), Lru(last_use, n_uses)

    def add(self, slot: int, expert: int) -> None:
        is_time = self._counts.add(slot, expert)
        self._enter(slot, expert)
        if is_time:
            self._hot = self._counts.hottest(self._n_pinned)
            self._counts.halve()
            self._others, self._pinned = Lru(*self._sequences), Lru(*self._sequences)
            for each, its_expert in self._counts.expert_of.items():
                self._enter(each, its_expert)

    def _enter(self, slot: int, expert: int) -> None:
        (self._pinned if expert in self._hot else self._others).add(slot, expert)

    def remove(self, slot: int) -> None:
        self._counts.remove(slot)
        (self._pinned if slot in self._pinned else self._others).remove(slot)

    def victims(self, n: int, protected: Collection[int]) -> list[int]:
        chosen = self._others.first(n, protected)
        return _enough(chosen + self._pinned.first(n - len(chosen), protected), n)


POLICIES: dict[str, MakePolicy] = {"lru": Lru, "lfu": Lfu, "slru": Slru, "pinned": Pinned}
