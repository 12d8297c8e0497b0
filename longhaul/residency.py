"""Which expert of a layer sits in which slot: the only mutable state of caching."""

from collections.abc import Collection, MutableSequence, Sequence
from typing import TYPE_CHECKING

from .policy import MakePolicy

if TYPE_CHECKING:
    from .planner import Plan

# Slots beyond the victims that are looked at for experts in memory too, but never more than half.
# More of them save reads and cost hits. Of 4, 8 and 16 this took the least time by bench/tiers.py,
# in all but one of its cases; with a disk three times as fast it gains as much as it costs.
LOOK_AHEAD = 16


class Residency:
    """Keep the slot table of one layer.

    `slot_of` (n_expert,) and `expert_of` (n_slots,) may be memory that native code reads, and in
    which it empties nominated slots; -1 stands for none. `last_use` (n_slots,) is stamped by who
    uses the slots, and `n_uses` (n_slots,) counts how often; without it nothing is known to have
    been used more than anything else.

    `backed` (n_expert,) may be set: of experts that are about as cold, those go first for which it
    is not negative. They are in memory too, so that loading them again takes no read.
    """

    def __init__(
        self,
        slot_of: MutableSequence[int],
        expert_of: MutableSequence[int],
        last_use: Sequence[int],
        make_policy: MakePolicy,
        n_uses: Sequence[int] | None = None,
    ) -> None:
        self.slot_of = slot_of
        self.expert_of = expert_of
        self._last_use = last_use
        self._n_uses = [0] * len(expert_of) if n_uses is None else n_uses
        self._make_policy = make_policy
        self.backed: Sequence[int] | None = None
        self.limit = len(expert_of)  # slots that may hold an expert, unless a ubatch needs more
        self.clear()

    def clear(self) -> None:
        """Forget every expert."""
        for expert in range(len(self.slot_of)):
            self.slot_of[expert] = -1
        for slot in range(len(self.expert_of)):
            self.expert_of[slot] = -1
        self.free = list(reversed(range(len(self.expert_of))))  # slot 0 is taken first
        self.policy = self._make_policy(self._last_use, self._n_uses)

    @property
    def n_room(self) -> int:
        """Free slots that the limit leaves open."""
        return max(self.limit - len(self.expert_of) + len(self.free), 0)

    def set_limit(self, limit: int) -> bool:
        """Have so many slots at most hold an expert: the policy says who leaves.

        Return whether that changes anything.
        """
        is_another = limit != self.limit
        self.limit = limit
        n_occupied = len(self.expert_of) - len(self.free)
        if n_occupied > limit:
            self._empty(self.policy.victims(n_occupied - limit, ()))
        return is_another or n_occupied > limit

    def victims(self, n: int, protected: Collection[int]) -> list[int]:
        """Return n occupied slots outside of `protected`, which holds no other free slots than -1.

        Raises ValueError if there are not that many.
        """
        if self.backed is None:
            return self.policy.victims(n, protected)
        n_more = min(LOOK_AHEAD, len(self.expert_of) // 2)
        n_others = len(self.expert_of) - len(self.free) - len(protected) + (-1 in protected)
        coldest = self.policy.victims(max(min(n + n_more, n_others), n), protected)
        backed = [slot for slot in coldest if self.backed[self.expert_of[slot]] >= 0]
        chosen = set(backed[:n])
        return backed[:n] + [slot for slot in coldest if slot not in chosen][: n - len(chosen)]

    def evict(self, plan: "Plan") -> None:
        """Take the victims of a plan out of their slots, which become free."""
        self._empty(plan.victims)

    def _empty(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.slot_of[self.expert_of[slot]] = -1
            self.expert_of[slot] = -1
        self._release(slots)

    def _release(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.policy.remove(slot)
            self.free.append(slot)

    def give_way(self, slots: Sequence[int]) -> tuple[int, ...]:
        """Take note that these slots, nominees, were taken out of the table; return the victims."""
        free = set(self.free)
        victims = tuple(slot for slot in slots if slot not in free)
        self._release(victims)
        return victims

    def apply(self, plan: "Plan") -> None:
        """Enter the loads of a plan whose victims are out and whose bytes have been read."""
        taken = {slot for _, slot in plan.loads}
        self.free = [slot for slot in self.free if slot not in taken]
        for expert, slot in plan.loads:
            self.slot_of[expert] = slot
            self.expert_of[slot] = expert
            self.policy.add(slot, expert)
