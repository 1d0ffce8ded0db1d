"""Which groups may be generated, and which may be trained: a windowed FIFO that bounds staleness.

Groups are numbered at admission. There are (S + 1) P slots, P groups a step; a slot is taken at admission and returns
when its group is dropped, or when the step that consumed it has been published. With o the smallest number neither
selected nor dropped, a completed group may be selected if its number is below o + W, lowest first. The version before
the step is then at most S + ceil((W - 1) / P) above the version served at admission (MiniMax, arXiv 2605.26494).
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from engine.types import Group


class Admission:
    """`max_staleness` M <= 1 takes S = M, W = 1; above that S = M - 1, W = P + 1. Either way the bound is M.

    `total` groups are consumed in the whole run; no more are admitted than can still be.
    """

    def __init__(self, *, groups_per_step: int, max_staleness: int, total: int) -> None:
        lead, self._window = (max_staleness, 1) if max_staleness <= 1 else (max_staleness - 1, groups_per_step + 1)
        self.slots = (lead + 1) * groups_per_step
        self._free = self.slots
        self._left_to_admit = total
        self._next = 0
        self._open: set[int] = set()
        self._completed: dict[int, Group] = {}
        self._consumed = 0
        self._changed = asyncio.Condition()

    @property
    def open_groups(self) -> int:
        """Admitted and neither completed, selected nor dropped."""
        return len(self._open)

    async def admit(self) -> int:
        """Wait for a slot and take it: the number of the group that may now be generated."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._free > 0 and self._left_to_admit > 0)
            self._free -= 1
            self._left_to_admit -= 1
            number = self._next
            self._next += 1
            self._open.add(number)
            return number

    async def next_wave(self, generated: Collection[int]) -> int:
        """Wait until all of the numbers `generated` are scored or dropped, and more groups are to be: how many.

        Whatever has been admitted or dropped unseen by then: the replacements of those that were dropped, or the
        whole of the next step.
        """
        async with self._changed:
            await self._changed.wait_for(lambda: self._open.isdisjoint(generated) and self._to_generate())
            return self._to_generate()

    async def complete(self, group: Group) -> None:
        """The group is scored and may be selected once the window reaches it."""
        async with self._changed:
            self._open.remove(group.lease.order)
            self._completed[group.lease.order] = group
            self._changed.notify_all()

    async def drop(self, number: int) -> None:
        """The group will not be trained: its slot returns, and another may be admitted in its place."""
        async with self._changed:
            self._open.discard(number)
            self._completed.pop(number, None)
            self._free += 1
            self._left_to_admit += 1
            self._changed.notify_all()

    async def select(self) -> Group:
        """Wait for the next group that may be trained, and take it."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._selectable() is not None)
            number = self._selectable()
            assert number is not None
            self._consumed += 1
            return self._completed.pop(number)

    async def published(self) -> None:
        """The step that consumed the groups selected so far is over and its version served: their slots return."""
        async with self._changed:
            self._free += self._consumed
            self._consumed = 0
            self._changed.notify_all()

    def _to_generate(self) -> int:
        """Groups admitted and not completed, and those that can be admitted now."""
        return len(self._open) + min(self._free, self._left_to_admit)

    def _selectable(self) -> int | None:
        oldest = min(min(self._open, default=self._next), min(self._completed, default=self._next))
        candidate = min(self._completed, default=None)
        return candidate if candidate is not None and candidate < oldest + self._window else None
