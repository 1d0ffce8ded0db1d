"""Which groups may be generated, and which may be trained: a windowed FIFO that bounds staleness.

Groups are numbered at admission. There are (S + 1) P slots, P groups a step; a slot is taken at admission and returns
when its group is dropped, or when the step that consumed it has been published. With o the smallest number neither
selected nor dropped, a completed group may be selected if its number is below o + W, lowest first. The version before
the step is then at most S + ceil((W - 1) / P) above the version served at admission (MiniMax, arXiv 2605.26494;
docs/staleness.md has the proof).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection
from typing import Literal, NamedTuple

from engine.clock import now
from engine.types import Group, Outcome


class Gone(NamedTuple):
    """A group that was dropped for the time it took, and why. `group` once it is completed."""

    number: int
    outcome: Outcome
    reason: str
    group: Group | None


class Admission:
    """`max_staleness` M <= 1 takes S = M, W = 1; above that S = M - 1, W = P + 1. Either way the bound is M.

    `overdue` says what happens to a group that is slower than the others. "wait": whatever is completed is trained, in
    the window's order; if the trainer has waited for the oldest open group for `max_wait_s` (0: no limit) while others
    were ready, that group is dropped. "drop": no window; the trainer takes what is ready, and a group that is not
    when the bound forbids to train it is dropped.

    `total` groups are consumed in the whole run; no more are admitted than can still be.
    """

    def __init__(
        self, *, groups_per_step: int, max_staleness: int, total: int, overdue: Literal["wait", "drop"] = "wait",
        max_wait_s: float = 0.0,
    ) -> None:
        lead, window = (max_staleness, 1) if max_staleness <= 1 else (max_staleness - 1, groups_per_step + 1)
        self.slots = (lead + 1) * groups_per_step
        self._groups_per_step = groups_per_step
        self._max_staleness = max_staleness
        self._window = window if overdue == "wait" else math.inf
        self._max_wait_s = max_wait_s if overdue == "wait" and max_wait_s else math.inf
        self._free = self.slots
        self._left_to_admit = total
        self._next = 0
        self._admitted_at: dict[int, int] = {}
        """Version served at admission, of the open and the completed ones."""
        self._open: set[int] = set()
        self._completed: dict[int, Group] = {}
        self._selected: set[int] = set()
        self._gone: dict[int, Gone] = {}
        self._overdue: list[Gone] = []
        self._blocked_s = 0.0
        self._changed = asyncio.Condition()

    @property
    def open_groups(self) -> int:
        """Admitted and neither completed, selected nor dropped."""
        return len(self._open)

    async def admit(self, served: Callable[[], int], lag: Callable[[], int] = lambda: 0) -> int:
        """Wait for a slot and take it: the number of the group that may now be generated. `served` tells the version
        that its host serves, `lag` how far that is behind the published one; both may change while this waits."""
        async with self._changed:
            await self._changed.wait_for(
                lambda: self._free > lag() * self._groups_per_step and self._left_to_admit > 0
            )
            self._free -= 1
            self._left_to_admit -= 1
            number = self._next
            self._next += 1
            self._admitted_at[number] = served()
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

    async def complete(self, group: Group) -> bool:
        """The group is scored and may be selected once the window reaches it. False: it is `gone`."""
        async with self._changed:
            if group.lease.order not in self._open:
                return False
            self._open.remove(group.lease.order)
            self._completed[group.lease.order] = group
            self._changed.notify_all()
            return True

    async def drop(self, *numbers: int) -> None:
        """These groups, open, completed or selected, will not be trained: their slots return, and others may be
        admitted in their place."""
        async with self._changed:
            self._drop(numbers)

    async def drop_stale(self, version: int) -> None:
        """With `overdue` "drop": the groups that a step on `version` may not be trained on leave."""
        async with self._changed:
            for number, served in list(self._admitted_at.items()):
                if self._window == math.inf and version - served > self._max_staleness:
                    limit = f"schedule.max_staleness = {self._max_staleness}"
                    self._lose(number, "stale", f"admitted {version - served} versions ago, {limit}")

    async def select(self) -> Group | None:
        """Wait for the next group that may be trained, and take it; None when one was dropped for `max_wait_s` instead,
        which may let another pass."""
        async with self._changed:
            while (number := self._selectable()) is None:
                await self._wait_for_change()
                if self._overdue:
                    return None
            self._selected.add(number)
            del self._admitted_at[number]
            return self._completed.pop(number)

    async def published(self) -> None:
        """The groups selected so far have been trained and the resulting version is served: their slots return."""
        async with self._changed:
            self._free += len(self._selected)
            self._selected.clear()
            self._changed.notify_all()

    def take_overdue(self) -> list[Gone]:
        """The groups that were dropped here since the last call, as stale or timed out; their slots have returned."""
        overdue, self._overdue = self._overdue, []
        return overdue

    def gone(self, number: int) -> Gone | None:
        """Told once for each group that was dropped here before it was completed."""
        return self._gone.pop(number, None)

    def blocked_s(self) -> float:
        """Seconds in which `select` waited while groups were ready that the window did not admit; since the last
        call."""
        blocked_s, self._blocked_s = self._blocked_s, 0.0
        return blocked_s

    async def _wait_for_change(self) -> None:
        """One change, or the end of `max_wait_s` for the group that blocks those that are ready."""
        if not self._completed:
            await self._changed.wait()
            return
        oldest, since = min(self._open), now()
        try:
            async with asyncio.timeout(None if self._max_wait_s == math.inf else self._max_wait_s):
                while self._selectable() is None and self._completed and oldest == min(self._open):
                    await self._changed.wait()
        except TimeoutError:
            # It may have been completed or dropped just as its time ran out.
            if oldest in self._open:
                self._lose(
                    oldest, "timed_out", f"the trainer waited {self._max_wait_s:g} s for it while others were ready"
                )
        finally:
            self._blocked_s += now() - since

    def _lose(self, number: int, outcome: Outcome, reason: str) -> None:
        gone = Gone(number, outcome, reason, self._completed.get(number))
        if gone.group is None:
            self._gone[number] = gone
        self._drop((number,))
        self._overdue.append(gone)

    def _drop(self, numbers: Collection[int]) -> None:
        for number in numbers:
            self._open.discard(number)
            self._selected.discard(number)
            self._completed.pop(number, None)
            self._admitted_at.pop(number, None)
        self._free += len(numbers)
        self._left_to_admit += len(numbers)
        self._changed.notify_all()

    def _to_generate(self) -> int:
        """Groups admitted and not completed, and those that can be admitted now."""
        return len(self._open) + min(self._free, self._left_to_admit)

    def _selectable(self) -> int | None:
        oldest = min(min(self._open, default=self._next), min(self._completed, default=self._next))
        candidate = min(self._completed, default=None)
        return candidate if candidate is not None and candidate < oldest + self._window else None
