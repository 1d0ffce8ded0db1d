"""The windowed FIFO by hand, and its bound under random interleavings in simulated time."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal

import pytest
from hand_made import group, rollout
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.admission import Admission
from engine.clock import run_virtual
from engine.types import Group, Outcome


def numbered(order: int) -> Group:
    return group(rollout(1.0), rollout(0.0, index=1), order=order)


def fixed(value: int) -> Callable[[], int]:
    return lambda: value


async def taken(admission: Admission, served: int = 0, lag: int = 0) -> list[int]:
    """Every number that is to be had without waiting."""
    return await _while_ready(lambda: admission.admit(fixed(served), fixed(lag)))


async def selected(admission: Admission, version: int = 0) -> list[int]:
    """The numbers of all groups that may be trained without waiting, in order."""
    await admission.drop_stale(version)
    return [one.lease.order for one in await _while_ready(admission.select)]


async def completed(admission: Admission, *numbers: int) -> list[bool]:
    return [await admission.complete(numbered(number)) for number in numbers]


def overdue(admission: Admission) -> list[tuple[int, str, str, bool]]:
    """Everything that was dropped for the time it took: number, outcome, reason, and whether it was completed."""
    gone = admission.take_overdue()
    return [(one.number, one.outcome, one.reason, one.group is not None) for one in gone]


async def _while_ready(call: Callable[[], Coroutine[Any, Any, Any]]) -> list[Any]:
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
        assert [(await admission.select()).lease.order for _ in range(2)] == [0, 1]
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
        assert [(await admission.select()).lease.order for _ in range(2)] == [0, 1]
        await admission.published()
        assert await taken(admission) == [4, 5]
        assert await selected(admission) == [2, 3]
        await admission.published()
        assert await taken(admission) == []

    by_hand(main())


def test_waiting_ends_when_there_is_something() -> None:
    async def main() -> None:
        admission = Admission(groups_per_step=1, max_staleness=0, total=2)
        await admission.admit(fixed(0))
        second, first = asyncio.ensure_future(admission.admit(fixed(0))), asyncio.ensure_future(admission.select())
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
        await admission.admit(fixed(0))
        for waiting in (asyncio.ensure_future(admission.admit(fixed(0))), asyncio.ensure_future(admission.select())):
            await asyncio.sleep(1.0)
            waiting.cancel()
        await admission.complete(numbered(0))
        assert await selected(admission) == [0]
        await admission.published()
        assert await taken(admission) == [1]

    by_hand(main())


def test_a_host_that_lags_leaves_slots_for_those_that_do_not() -> None:
    """d versions behind: a lease only while fewer than (S + 1 - d) P slots are taken."""

    async def main() -> None:
        admission = Admission(groups_per_step=2, max_staleness=3, total=100)
        assert admission.slots == 6
        assert await taken(admission, served=5, lag=3) == []
        assert await taken(admission, served=6, lag=2) == [0, 1]
        assert await taken(admission, served=6, lag=2) == []
        assert await taken(admission, served=7, lag=1) == [2, 3]
        assert await taken(admission, served=8) == [4, 5]

    by_hand(main())


def test_a_host_that_waits_is_asked_for_its_version_when_there_is_a_slot() -> None:
    async def main() -> None:
        admission = Admission(groups_per_step=1, max_staleness=0, total=9, overdue="drop")
        versions = {"served": 0, "lag": 0}
        await admission.admit(fixed(0))
        waiting = asyncio.ensure_future(admission.admit(lambda: versions["served"], lambda: versions["lag"]))
        await completed(admission, 0)
        assert await selected(admission) == [0]
        versions |= {"served": 0, "lag": 1}
        await admission.published()
        await asyncio.sleep(1.0)
        assert not waiting.done()  # it has fallen behind meanwhile
        versions |= {"served": 1, "lag": 0}
        await admission.drop()
        assert await waiting == 1
        await completed(admission, 1)
        assert await selected(admission, 1) == [1]  # admitted at version 1, so not stale

    by_hand(main())


def test_drop_takes_what_is_ready_and_drops_what_has_become_too_old() -> None:
    async def main() -> None:
        admission = Admission(groups_per_step=2, max_staleness=2, total=100, overdue="drop")
        assert await taken(admission) == [0, 1, 2, 3]
        await completed(admission, 3, 1)
        assert await selected(admission) == [1, 3]  # neither 0 nor 2 holds them back
        await admission.published()
        assert await taken(admission, served=1) == [4, 5]
        await completed(admission, 5, 4)
        assert await selected(admission, 1) == [4, 5]
        await admission.published()
        assert await taken(admission, served=2) == [6, 7]
        await completed(admission, 6, 7)
        assert await selected(admission, 2) == [6, 7]
        await admission.published()
        assert overdue(admission) == []  # at version 2 both 0 and 2 could be trained
        await completed(admission, 2)
        await admission.drop_stale(3)
        third = asyncio.ensure_future(admission.select())
        reason = "admitted 3 versions ago, schedule.max_staleness = 2"
        assert overdue(admission) == [(0, "stale", reason, False), (2, "stale", reason, True)]
        assert await taken(admission, served=3) == [8, 9, 10, 11]
        gone = admission.gone(0)
        assert gone is not None
        assert (gone.number, gone.outcome, gone.reason, gone.group) == (0, "stale", reason, None)
        assert admission.gone(0) is None  # told once
        assert admission.gone(2) is None  # it went with the group
        assert await completed(admission, 0, 9) == [False, True]
        assert (await third).lease.order == 9
        assert admission.blocked_s() == 0

    by_hand(main())


def test_a_group_that_holds_others_back_for_max_wait_s_is_dropped() -> None:
    """P = 2, M = 1. The limit counts from when something is ready, and anew for every oldest group."""

    async def main() -> None:
        started = asyncio.get_running_loop().time()
        admission = Admission(groups_per_step=2, max_staleness=1, total=20, max_wait_s=10.0)
        for _ in range(4):
            await admission.admit(fixed(0))
        ready = asyncio.ensure_future(admission.select())
        await asyncio.sleep(50.0)  # nothing is ready: nobody is to blame
        await completed(admission, 3)
        await asyncio.sleep(6.0)
        await completed(admission, 2)  # that others come meanwhile gives the oldest no more time
        assert await ready is None
        assert asyncio.get_running_loop().time() - started == pytest.approx(60.0)
        assert await admission.admit(fixed(0)) == 4
        (gone,) = admission.take_overdue()
        reason = "the trainer waited 10 s for it while others were ready"
        assert (gone.number, gone.outcome, gone.reason, gone.group) == (0, "timed_out", reason, None)
        assert admission.gone(0) == gone
        assert await admission.select() is None
        assert asyncio.get_running_loop().time() - started == pytest.approx(70.0)
        assert [gone.number for gone in admission.take_overdue()] == [1]
        assert await selected(admission) == [2, 3]
        assert admission.blocked_s() == pytest.approx(20.0)
        assert admission.blocked_s() == 0

    by_hand(main())


def test_an_oldest_that_is_completed_within_max_wait_s_stays_and_the_next_has_its_own_limit() -> None:
    async def main() -> None:
        admission = Admission(groups_per_step=3, max_staleness=0, total=20, max_wait_s=10.0)
        assert await taken(admission) == [0, 1, 2]
        await completed(admission, 2)
        ready = asyncio.ensure_future(admission.select())
        await asyncio.sleep(9.0)
        await completed(admission, 0)
        assert (await ready).lease.order == 0
        second = asyncio.ensure_future(admission.select())
        await asyncio.sleep(9.0)
        await admission.drop(1)
        assert (await second).lease.order == 2
        assert overdue(admission) == []
        assert admission.blocked_s() == pytest.approx(18.0)

    by_hand(main())


@pytest.mark.parametrize("fate", ["completed", "dropped"])
def test_an_oldest_that_ends_as_its_time_runs_out_is_not_dropped_again(fate: str) -> None:
    """Its slot would return twice."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        admission = Admission(groups_per_step=2, max_staleness=0, total=20, max_wait_s=10.0)
        assert await taken(admission) == [0, 1]
        await completed(admission, 1)
        ending = asyncio.Event()
        loop.call_later(10.0, ending.set)  # before the limit's own timer
        ready = asyncio.ensure_future(admission.select())
        await ending.wait()
        await (admission.complete(numbered(0)) if fate == "completed" else admission.drop(0))
        assert (await ready).lease.order == (0 if fate == "completed" else 1)
        assert overdue(admission) == []
        assert len(await taken(admission)) == (0 if fate == "completed" else 1)

    by_hand(main())


def test_groups_that_were_selected_can_still_be_dropped_and_replaced() -> None:
    """Those of a step without a signal, under `schedule.refill`: their slots do not wait for the publish."""

    async def main() -> None:
        admission = Admission(groups_per_step=2, max_staleness=0, total=2)
        assert await taken(admission) == [0, 1]
        await completed(admission, 0, 1)
        assert await selected(admission) == [0, 1]
        assert await taken(admission) == []
        await admission.drop(0, 1)
        assert await taken(admission) == [2, 3]
        await completed(admission, 2, 3)
        assert await selected(admission) == [2, 3]
        await admission.published()
        assert await taken(admission) == []  # two groups is all there was to be

    by_hand(main())


def test_waiting_counts_as_blocked_only_while_something_is_ready() -> None:
    async def main() -> None:
        admission = Admission(groups_per_step=2, max_staleness=2, total=20)
        assert await taken(admission) == [0, 1, 2, 3]
        ready = asyncio.ensure_future(admission.select())
        await asyncio.sleep(5.0)
        await completed(admission, 3)  # the window is 0 + 3
        await asyncio.sleep(7.0)
        await completed(admission, 1)
        assert (await ready).lease.order == 1
        assert admission.blocked_s() == pytest.approx(7.0)

    by_hand(main())


class Watched(Admission):
    """Tells at once what it drops by itself."""

    def __init__(self, lost: Callable[[int, Outcome, bool], None], **settings: Any) -> None:
        super().__init__(**settings)
        self._told = lost

    def _lose(self, number: int, outcome: Outcome, reason: str) -> None:
        self._told(number, outcome, number in self._completed)
        super()._lose(number, outcome, reason)


@dataclass(kw_only=True)
class Interleaving:
    """A run on Admission, checked at every move by books of its own.

    Groups take any time, `slow_by` times more if their number is a multiple of 5; a share `refused` of them is dropped
    while open or completed; a share `silent` has no signal and is replaced by `refill`, as `loop` does it. Host i
    serves the version before the i-th last one that was published. Steps take any time, some change no weights;
    `ahead`: the groups of a whole slice are selected before its first step, as on shared devices.
    """

    random: Random
    max_staleness: int
    per_step: int
    steps: int = 12
    steps_per_slice: int = 1
    ahead: bool = True
    hosts: int = 1
    refill: bool = False
    overdue: Literal["wait", "drop"] = "wait"
    max_wait_s: float = 0.0
    slow_by: float = 1.0
    refused: float = 0.25
    silent: float = 0.2
    longest_s: float = 30.0
    state: dict[int, str] = field(default_factory=dict[int, str])
    """By number: open, completed, selected; then trained, dropped, or what `overdue` made of it."""
    served_at: dict[int, int] = field(default_factory=dict[int, int])
    worst: int = 0
    skipped: int = 0

    def __post_init__(self) -> None:
        # More than the steps consume: what is left over fills every slot at the end.
        self.admission = Watched(
            self.lost, groups_per_step=self.per_step, max_staleness=self.max_staleness,
            total=(self.steps + self.max_staleness + 1) * self.per_step, overdue=self.overdue,
            max_wait_s=self.max_wait_s,
        )
        self.published, self.version = [0], 0
        self.expired: dict[int, bool] = {}  # number -> was it completed
        self.told: dict[int, bool] = {}
        self.never_completed: set[int] = set()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as generating:
            others = [asyncio.ensure_future(self.admit(lag, generating)) for lag in range(self.hosts)]
            await self.train()
            self.refused = 0.0
            await asyncio.sleep(100.0 * self.longest_s * self.slow_by)
            for one in others:
                one.cancel()
        fates = Counter(self.state.values())
        # Everything that is not under way has one fate, and every slot is taken again: none was lost or made.
        assert fates["completed"] == self.admission.slots
        assert fates["trained"] == self.steps * self.per_step
        assert not fates["open"]
        assert not fates["selected"]
        assert self.told == self.expired
        assert {number for number, done in self.expired.items() if not done} == self.never_completed

    def lag(self, host: int) -> int:
        """Of host number `host`, behind the newest published version."""
        return self.published[-1] - self.serves(host)

    def serves(self, host: int) -> int:
        return self.published[max(0, len(self.published) - 1 - host)]

    def pause(self) -> Coroutine[Any, Any, None]:
        return asyncio.sleep(self.random.choice([0.0, 0.1, 0.5, 1.0, 4.0, self.longest_s]) * self.random.random())

    async def admit(self, host: int, generating: asyncio.TaskGroup) -> None:
        while True:
            if self.hosts > 1:
                await asyncio.sleep(self.random.random())  # leave some slots to the others
            number = await self.admission.admit(lambda: self.serves(host), lambda: self.lag(host))
            assert number == len(self.state)
            self.state[number] = "open"
            self.served_at[number] = self.serves(host)
            taken = sum(state in ("open", "completed", "selected") for state in self.state.values())
            assert taken <= self.admission.slots - self.lag(host) * self.per_step
            generating.create_task(self.generate(number))

    async def generate(self, number: int) -> None:
        for _ in range(1 if number % 5 else int(self.slow_by)):
            await self.pause()
        fate = self.random.random()
        if fate >= self.refused / 2:
            gone = self.admission.gone(number)
            assert await self.admission.complete(numbered(number)) == (gone is None)
            if gone is not None:
                self.never_completed.add(number)
                return
            self.move(number, "open", "completed")
            if fate >= self.refused:
                return
            await self.pause()
        if self.state[number] in ("open", "completed"):
            self.move(number, self.state[number], "dropped")
            await self.admission.drop(number)
        elif self.admission.gone(number) is not None:
            self.never_completed.add(number)

    def lost(self, number: int, outcome: Outcome, was_completed: bool) -> None:
        assert outcome == ("stale" if self.overdue == "drop" else "timed_out")
        if outcome == "timed_out":
            assert number == min(one for one, state in self.state.items() if state in ("open", "completed"))
        self.move(number, "completed" if was_completed else "open", outcome)
        self.expired[number] = was_completed

    def move(self, number: int, before: str, after: str) -> None:
        assert self.state[number] == before
        self.state[number] = after

    async def train(self) -> None:
        for begun in range(0, self.steps, self.steps_per_slice):
            length = min(self.steps_per_slice, self.steps - begun)
            ready = [await self.select(self.version + after) for after in range(length if self.ahead else 0)]
            for _ in range(length):
                chosen = ready.pop(0) if ready else await self.select(self.version)
                await self.step(chosen)
            self.published.append(self.version)
            await self.pause()  # served, but the slots have not returned
            for number in [number for number, state in self.state.items() if state == "selected"]:
                self.move(number, "selected", "trained")
            await self.admission.published()

    async def select(self, version: int) -> list[int]:
        chosen: list[int] = []
        others = 2 * self.per_step if self.refill else 0
        while len(chosen) < self.per_step:
            fresh = [await self.next(version) for _ in range(self.per_step - len(chosen))]
            silent = [number for number in fresh if self.random.random() < self.silent][:others]
            others -= len(silent)
            for number in silent:
                self.move(number, "selected", "dropped")
            await self.admission.drop(*silent)
            chosen += [number for number in fresh if number not in silent]
        return chosen

    async def next(self, version: int) -> int:
        await self.admission.drop_stale(version)
        group = None
        while group is None:
            group = await self.admission.select()
            for gone in self.admission.take_overdue():
                assert gone.number not in self.told
                self.told[gone.number] = gone.group is not None
        number = group.lease.order
        oldest = min(one for one, state in self.state.items() if state in ("open", "completed"))
        assert number == min(one for one, state in self.state.items() if state == "completed")
        if self.overdue == "wait":
            assert number < oldest + (1 if self.max_staleness <= 1 else self.per_step + 1)
        self.move(number, "completed", "selected")
        if self.random.random() < 0.3:
            await self.pause()
        return number

    async def step(self, chosen: list[int]) -> None:
        staleness = [self.version - self.served_at[number] for number in chosen]
        assert max(staleness) <= self.max_staleness
        self.worst = max(self.worst, *staleness)
        await self.pause()
        if self.random.random() < 0.1 or (self.refill and self.silent == 1):
            self.skipped += 1
        else:
            self.version += 1


@st.composite
def interleavings(draw: st.DrawFn) -> Interleaving:
    max_staleness = draw(st.integers(0, 8))
    overdue: Literal["wait", "drop"] = draw(st.sampled_from(("wait", "drop")))
    return Interleaving(
        random=Random(draw(st.integers(0, 2**32))),
        max_staleness=max_staleness,
        per_step=draw(st.integers(1, 4)),
        steps_per_slice=draw(st.integers(1, most_steps(max_staleness))),
        ahead=draw(st.booleans()),
        hosts=draw(st.integers(1, 3)),
        refill=draw(st.booleans()),
        overdue=overdue,
        max_wait_s=0.0 if overdue == "drop" else draw(st.sampled_from([0.0, 0.5, 5.0])),
        slow_by=draw(st.sampled_from([1.0, 50.0])),
        silent=draw(st.sampled_from([0.0, 0.2, 0.8])),
    )


def most_steps(max_staleness: int) -> int:
    """S + 1, the most that a slice may have: all slots' groups."""
    return max_staleness + 1 if max_staleness <= 1 else max_staleness


@given(one=interleavings())
@settings(max_examples=300, deadline=None)
def test_staleness_never_exceeds_the_bound_and_nothing_deadlocks(one: Interleaving) -> None:
    run_virtual(one.run())


SCHEDULES = [
    {"max_staleness": max_staleness, "overdue": overdue, "ahead": ahead, "steps_per_slice": steps}
    for max_staleness in (0, 1, 4)
    for overdue in ("wait", "drop")
    for ahead in (True, False)
    for steps in {1, most_steps(max_staleness)}
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: "-".join(map(str, schedule.values())))
@pytest.mark.parametrize(
    "case",
    [
        {"refused": 0.95},
        {"refill": True, "silent": 1.0},
        {"refill": False, "silent": 1.0},
        {"slow_by": 50.0},
        {"longest_s": 3000.0},
        {"hosts": 3, "refill": True, "silent": 0.8},
    ],
    ids=["nearly-all-refused", "constant-reward-refilled", "constant-reward", "one-in-five-50-times-slower",
         "far-apart", "hosts-lag-and-refill"],
)
def test_the_bound_holds_where_runs_go_wrong(case: dict[str, Any], schedule: dict[str, Any]) -> None:
    for seed in range(5):
        one = Interleaving(random=Random(seed), per_step=3, **schedule, **case)
        run_virtual(one.run())
        assert one.skipped == (12 if case == {"refill": True, "silent": 1.0} else one.skipped)


def test_when_everything_is_stale_everything_is_replaced() -> None:
    """Also at the end of a run, when all groups had been admitted that were to be."""

    async def main() -> None:
        admission = Admission(groups_per_step=2, max_staleness=2, total=4, overdue="drop")
        assert await taken(admission) == [0, 1, 2, 3]
        await completed(admission, 1, 2)
        await admission.drop_stale(3)
        ready = asyncio.ensure_future(admission.select())
        assert [(number, done) for number, _, _, done in overdue(admission)] == [
            (0, False), (1, True), (2, True), (3, False),
        ]  # fmt: skip
        assert await taken(admission, served=3) == [4, 5, 6, 7]
        await completed(admission, 7, 4)
        assert (await ready).lease.order in (4, 7)
        assert len(await selected(admission, 3)) == 1

    by_hand(main())


@pytest.mark.parametrize("max_staleness", range(9))
@pytest.mark.parametrize("per_step", [1, 2, 4])
@pytest.mark.parametrize("overdue", ["wait", "drop"])
def test_the_bound_is_reached(max_staleness: int, per_step: int, overdue: Literal["wait", "drop"]) -> None:
    """Not merely safe by being idle: some interleaving is as stale as allowed."""
    worst = 0
    for seed in range(200):
        one = Interleaving(
            random=Random(seed), max_staleness=max_staleness, per_step=per_step, steps=24, overdue=overdue,
            steps_per_slice=1, silent=0.0,
        )
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


async def trained_share(overdue: Literal["wait", "drop"], max_wait_s: float = 0.0) -> float:
    """Of an env that half of the tasks come from and that takes 10 times longer than the other, over 400 steps."""
    random, per_step, steps = Random(5), 4, 400
    admission = Admission(
        groups_per_step=per_step, max_staleness=4, total=steps * per_step, overdue=overdue, max_wait_s=max_wait_s
    )
    version, slow = 0, set[int]()

    async def generate(number: int) -> None:
        await asyncio.sleep((10.0 if number in slow else 1.0) * random.uniform(0.5, 1.5))
        await admission.complete(numbered(number))

    async def admit() -> None:
        async with asyncio.TaskGroup() as groups:
            while True:
                number = await admission.admit(lambda: version)
                if random.random() < 0.5:
                    slow.add(number)
                groups.create_task(generate(number))

    admitting = asyncio.ensure_future(admit())
    trained: list[int] = []
    for _ in range(steps):
        await admission.drop_stale(version)
        while len(trained) < (version + 1) * per_step:
            group = await admission.select()
            admission.take_overdue()
            trained += [] if group is None else [group.lease.order]
        await asyncio.sleep(0.5)
        version += 1
        await admission.published()
    admitting.cancel()
    return sum(number in slow for number in trained) / len(trained)


@pytest.mark.parametrize(
    ("overdue", "max_wait_s", "low", "high"),
    [("wait", 0.0, 0.45, 0.55), ("wait", 1.0, 0.2, 0.4), ("drop", 0.0, 0.2, 0.4)],
)
def test_only_wait_trains_a_slow_env_as_often_as_it_is_admitted(
    overdue: Literal["wait", "drop"], max_wait_s: float, low: float, high: float
) -> None:
    assert low < run_virtual(trained_share(overdue, max_wait_s)) < high
