"""The windowed FIFO by hand, and its bound under random interleavings in simulated time."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine
from random import Random
from typing import Any

import pytest
from hand_made import group, rollout
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.admission import Admission
from engine.clock import run_virtual
from engine.types import Group


def numbered(order: int) -> Group:
    return group(rollout(1.0), rollout(0.0, index=1), order=order)


async def taken(admission: Admission) -> list[int]:
    """Every number that is to be had without waiting."""
    return await _while_ready(lambda: admission.admit(0))


async def selected(admission: Admission) -> list[int]:
    """The numbers of all groups that may be trained without waiting, in order."""
    return [one.lease.order for one in await _while_ready(lambda: admission.select(0))]


async def _while_ready(call: Any) -> list[Any]:
    ready: list[Any] = []
    while True:
        waiting = asyncio.ensure_future(call())
        await asyncio.sleep(1.0)
        if not waiting.done():
            waiting.cancel()
            return ready
        ready.append(waiting.result())


def by_hand(main: Coroutine[Any, Any, None]) -> None:
    run_virtual(main)


def test_max_staleness_0_is_one_step_at_a_time() -> None:
    async def main() -> None:
        admission = Admission(groups_per_step=2, max_staleness=0, total=6)
        assert admission.slots == 2
        assert await taken(admission) == [0, 1]
        await admission.complete(numbered(1))
        assert await selected(admission) == []  # 0 is older
        await admission.complete(numbered(0))
        assert await selected(admission) == [0, 1]
        assert await taken(admission) == []  # not before the step is published
        await admission.published()
        assert await taken(admission) == [2, 3]

    by_hand(main())


def test_max_staleness_1_generates_the_next_step_meanwhile() -> None:
    async def main() -> None:
        admission = Admission(groups_per_step=2, max_staleness=1, total=8)
        assert admission.slots == 4
        assert await taken(admission) == [0, 1, 2, 3]
        for order in (3, 2, 1):
            await admission.complete(numbered(order))
        assert await selected(admission) == []
        assert admission.open_groups == 1
        await admission.complete(numbered(0))
        assert [(await admission.select(0)).lease.order for _ in range(2)] == [0, 1]
        await admission.published()
        # At the second step groups 2 and 3 are one version old; 4 and 5 begin with it.
        assert await taken(admission) == [4, 5]
        assert await selected(admission) == [2, 3]
        assert await taken(admission) == []

    by_hand(main())


def test_max_staleness_2_may_pass_over_slow_groups_within_the_window() -> None:
    async def main() -> None:
        admission = Admission(groups_per_step=2, max_staleness=2, total=20)
        assert admission.slots == 4  # (S + 1) P with S = 1
        assert await taken(admission) == [0, 1, 2, 3]
        await admission.complete(numbered(3))
        assert await selected(admission) == []  # the window is 0 + 3
        await admission.complete(numbered(2))
        assert await selected(admission) == [2]
        await admission.drop(0)
        assert await selected(admission) == [3]  # 1 is the oldest now, so 3 < 1 + 3
        assert await taken(admission) == [4]  # in the place of the dropped one
        await admission.published()
        assert await taken(admission) == [5, 6]
        for order in (4, 5):
            await admission.complete(numbered(order))
        assert await selected(admission) == []  # 1 is still open: numbers count, not positions

    by_hand(main())


@pytest.mark.parametrize("completed", [False, True])
def test_a_dropped_group_gives_its_slot_back_at_once_and_is_replaced(completed: bool) -> None:
    async def main() -> None:
        admission = Admission(groups_per_step=2, max_staleness=0, total=2)
        assert await taken(admission) == [0, 1]
        if completed:
            await admission.complete(numbered(0))
        await admission.drop(0)
        assert await taken(admission) == [2]
        for order in (1, 2):
            await admission.complete(numbered(order))
        assert await selected(admission) == [1, 2]
        await admission.published()
        assert await taken(admission) == []  # two groups is all there was to be

    by_hand(main())


def test_the_next_wave_is_what_replaces_the_dropped_or_the_next_step() -> None:
    async def main() -> None:
        admission = Admission(groups_per_step=3, max_staleness=0, total=6)
        assert await admission.next_wave([]) == 3
        assert await taken(admission) == [0, 1, 2]
        await admission.drop(0)  # before it was generated
        assert await admission.next_wave([]) == 3
        assert await taken(admission) == [3]
        second = asyncio.ensure_future(admission.next_wave([1, 2, 3]))
        await admission.drop(2)
        await admission.complete(numbered(1))
        assert await taken(admission) == [4]
        assert not second.done()  # 3 is not scored yet
        await admission.drop(3)
        assert await second == 2  # whether 5 has been admitted by now or not
        assert await taken(admission) == [5]
        for order in (4, 5):
            await admission.complete(numbered(order))
        third = asyncio.ensure_future(admission.next_wave([4, 5]))
        assert await selected(admission) == [1, 4, 5]
        assert not third.done()
        await admission.published()
        assert await third == 3
        assert await taken(admission) == [6, 7, 8]
        for order in (6, 7, 8):
            await admission.complete(numbered(order))
        assert len(await selected(admission)) == 3
        await admission.published()
        last = asyncio.ensure_future(admission.next_wave([6, 7, 8]))
        await asyncio.sleep(1.0)
        assert not last.done()  # six groups is all there was to be
        last.cancel()

    by_hand(main())


def test_no_more_are_admitted_than_can_be_consumed() -> None:
    async def main() -> None:
        admission = Admission(groups_per_step=2, max_staleness=1, total=6)
        assert await taken(admission) == [0, 1, 2, 3]
        for order in range(4):
            await admission.complete(numbered(order))
        assert [(await admission.select(0)).lease.order for _ in range(2)] == [0, 1]
        await admission.published()
        assert await taken(admission) == [4, 5]
        assert await selected(admission) == [2, 3]
        await admission.published()
        assert await taken(admission) == []

    by_hand(main())


def test_waiting_ends_when_there_is_something() -> None:
    async def main() -> None:
        admission = Admission(groups_per_step=1, max_staleness=0, total=2)
        await admission.admit(0)
        second, first = asyncio.ensure_future(admission.admit(0)), asyncio.ensure_future(admission.select(0))
        await asyncio.sleep(1.0)
        await admission.complete(numbered(0))
        assert (await first).lease.order == 0
        assert not second.done()
        await admission.published()
        assert await second == 1

    by_hand(main())


def test_a_cancelled_wait_takes_nothing() -> None:
    async def main() -> None:
        admission = Admission(groups_per_step=1, max_staleness=0, total=2)
        await admission.admit(0)
        for waiting in (asyncio.ensure_future(admission.admit(0)), asyncio.ensure_future(admission.select(0))):
            await asyncio.sleep(1.0)
            waiting.cancel()
        await admission.complete(numbered(0))
        assert await selected(admission) == [0]
        await admission.published()
        assert await taken(admission) == [1]

    by_hand(main())


class Interleaving:
    """A run on Admission, checked at every move by books of its own: groups take any time, some are dropped while
    open or completed, steps take any time and some are skipped."""

    def __init__(self, random: Random, *, max_staleness: int, per_step: int, steps: int) -> None:
        self.random, self.max_staleness, self.per_step, self.steps = random, max_staleness, per_step, steps
        self.admission = Admission(groups_per_step=per_step, max_staleness=max_staleness, total=steps * per_step)
        self.version = 0
        self.served_at: dict[int, int] = {}  # by number: the version at admission
        self.waiting: set[int] = set()  # completed
        self.settled: set[int] = set()  # selected or dropped
        self.returned = 0  # slots
        self.consumed = 0
        self.worst = 0

    async def run(self) -> None:
        admitting = asyncio.ensure_future(self.admit())
        await self.train()
        await asyncio.sleep(100.0)
        admitting.cancel()
        # All that was admitted has been consumed or dropped, and no more came.
        assert self.settled == self.served_at.keys()

    def pause(self) -> Coroutine[Any, Any, None]:
        return asyncio.sleep(self.random.choice([0.0, 0.1, 0.5, 1.0, 4.0, 30.0]) * self.random.random())

    async def admit(self) -> None:
        async with asyncio.TaskGroup() as groups:
            while True:
                number = await self.admission.admit(self.version)
                assert number == len(self.served_at)
                self.served_at[number] = self.version
                assert len(self.served_at) - self.returned <= self.admission.slots
                groups.create_task(self.generate(number))

    async def generate(self, number: int) -> None:
        await self.pause()
        fate = self.random.random()
        if fate >= 0.15:
            self.waiting.add(number)
            await self.admission.complete(numbered(number))
            await self.pause()
            if fate >= 0.25 or number in self.settled:
                return
        self.waiting.discard(number)
        self.settled.add(number)
        self.returned += 1
        await self.admission.drop(number)

    async def train(self) -> None:
        for _ in range(self.steps):
            for _ in range(self.per_step):
                self.consume((await self.admission.select(self.version)).lease.order)
                if self.random.random() < 0.3:
                    await self.pause()
            await self.pause()
            if self.random.random() >= 0.1:
                self.version += 1
            self.returned += self.per_step
            await self.admission.published()

    def consume(self, number: int) -> None:
        window = 1 if self.max_staleness <= 1 else self.per_step + 1
        oldest = min(set(range(len(self.served_at))) - self.settled)
        assert number == min(self.waiting)
        assert number < oldest + window
        staleness = self.version - self.served_at[number]
        assert staleness <= self.max_staleness
        self.worst = max(self.worst, staleness)
        self.waiting.remove(number)
        self.settled.add(number)


@given(seed=st.integers(0, 2**32), max_staleness=st.integers(0, 6), per_step=st.integers(1, 4))
@settings(max_examples=200, deadline=None)
def test_staleness_never_exceeds_the_bound_and_nothing_deadlocks(
    seed: int, max_staleness: int, per_step: int
) -> None:
    run_virtual(Interleaving(Random(seed), max_staleness=max_staleness, per_step=per_step, steps=12).run())


@pytest.mark.parametrize("max_staleness", range(7))
@pytest.mark.parametrize("per_step", [1, 2, 4])
def test_the_bound_is_reached(max_staleness: int, per_step: int) -> None:
    """Not merely safe by being idle: some interleaving is as stale as allowed."""
    worst = 0
    for seed in range(40):
        one = Interleaving(Random(seed), max_staleness=max_staleness, per_step=per_step, steps=12)
        run_virtual(one.run())
        worst = max(worst, one.worst)
        if worst == max_staleness:
            break
    assert worst == max_staleness


@pytest.mark.parametrize(("max_staleness", "per_step"), [(0, 3), (1, 3), (2, 3), (5, 4)])
def test_slots_and_window_keep_the_formula(max_staleness: int, per_step: int) -> None:
    """S + ceil((W - 1) / P) is max_staleness, with S = slots / P - 1."""
    admission = Admission(groups_per_step=per_step, max_staleness=max_staleness, total=1)
    lead = admission.slots // per_step - 1
    window = 1 if max_staleness <= 1 else per_step + 1
    assert lead + math.ceil((window - 1) / per_step) == max_staleness
