"""Handing over the devices: the order of every call, what is measured on the way, and limits, in simulated time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Literal

import pytest
from msgspec.structs import replace

from engine.clock import now, run_virtual
from engine.errors import GenerationError, StalledError
from engine.generate.fake import FakeGenerator
from engine.protocols import SleepLevel
from engine.timeslice import InFlight, Offload, Placement, Split, TimeSlice, golden, require_golden, settle_level
from engine.types import Segment, SegmentRequest


class Calls:
    """A generator and a trainer that write down what is asked of them; each call takes a second, `hangs` for ever."""

    def __init__(self, hangs: str = "") -> None:
        self.log: list[str] = []
        self.hangs = hangs
        self.version = 0

    async def _call(self, call: str) -> None:
        self.log.append(call)
        await (asyncio.Event().wait() if call == self.hangs else asyncio.sleep(1.0))

    def __getattr__(self, name: str) -> Callable[..., Coroutine[Any, Any, None]]:
        def call(*args: object, **named: object) -> Coroutine[Any, Any, None]:
            return self._call(" ".join([name, *map(str, args), *(f"{key}={value}" for key, value in named.items())]))

        return call

    async def in_thread(self, function: Callable[..., Coroutine[Any, Any, None]], *args: object) -> None:
        """The trainer's methods are calls of `Calls` too."""
        await function(*args)


def time_slice(calls: Calls, *, level: Literal[0, 1, 2] = 1, in_flight: InFlight = "recompute",
               offload: Offload = "none", limit_s: float = 5.0) -> TimeSlice:
    made: Any = calls
    placement = TimeSlice(
        made, calls.in_thread, level=level, in_flight=in_flight, offload=offload, limit_s=limit_s,
        memory=lambda: len(calls.log),
    )
    placement.trainer = made
    return placement


def split(calls: Calls, *, in_flight: InFlight = "recompute") -> Split:
    made: Any = calls
    return Split(made, in_flight=in_flight, limit_s=5.0)


async def one_slice(placement: Placement, calls: Calls) -> None:
    async with placement.training():
        calls.log.append("- train")
        async with placement.publishing():
            calls.log.append("- publish")
        async with placement.quiet():
            calls.log.append("- evaluate")


def calls_of(make: Callable[[Calls], Placement]) -> list[str]:
    calls = Calls()
    run_virtual(one_slice(make(calls), calls))
    return calls.log


SLICES: dict[tuple[int, Offload], list[str]] = {
    (0, "none"): [
        "interrupt", "- train", "pause clear_cache=True", "- publish", "- evaluate", "resume",
    ],
    (0, "optimizer"): [
        "interrupt", "onload", "- train", "offload optimizer", "pause clear_cache=True", "- publish", "- evaluate",
        "resume",
    ],
    (1, "none"): [
        "interrupt", "sleep 1", "- train", "wake weights", "pause clear_cache=True", "- publish", "wake kv_cache",
        "- evaluate", "resume",
    ],
    (1, "optimizer"): [
        "interrupt", "sleep 1", "onload", "- train", "offload optimizer", "wake weights", "pause clear_cache=True",
        "- publish", "wake kv_cache", "- evaluate", "resume",
    ],
    (2, "all"): [
        "interrupt", "sleep 2", "onload", "- train", "offload optimizer", "wake weights", "pause clear_cache=True",
        "- publish", "offload all", "wake kv_cache", "- evaluate", "resume",
    ],
}  # fmt: skip


@pytest.mark.parametrize(("level", "offload"), SLICES)
def test_a_slice_hands_the_devices_over_and_back_in_this_order(level: Literal[0, 1, 2], offload: Offload) -> None:
    """The generator's weights come back when the optimizer's state has gone, its cache when the trainer's weights
    have been copied and gone too."""
    assert calls_of(lambda calls: time_slice(calls, level=level, offload=offload)) == SLICES[level, offload]


def test_drain_waits_for_open_requests_instead_of_cutting_them() -> None:
    interrupted = SLICES[1, "none"]
    assert calls_of(lambda calls: time_slice(calls, in_flight="drain")) == ["drain", *interrupted[1:]]


def test_in_the_first_slice_there_is_no_trainer_to_bring_back() -> None:
    """It is made in it, and is there to go when the slice ends."""
    calls = Calls()
    placement = time_slice(calls, offload="all")
    trainer, placement.trainer = placement.trainer, None

    async def main() -> None:
        async with placement.training():
            placement.trainer = trainer
            async with placement.publishing():
                pass

    run_virtual(main())
    assert calls.log == [
        "interrupt", "sleep 1", "offload optimizer", "wake weights", "pause clear_cache=True", "offload all",
        "wake kv_cache", "resume",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("make", "calls_made"), [(time_slice, ["interrupt", "sleep 1"]), (split, [])], ids=["time_sliced", "split"]
)
def test_the_trainer_may_get_the_devices_for_good(make: Callable[[Calls], Placement], calls_made: list[str]) -> None:
    calls = Calls()
    run_virtual(make(calls).stop_generating())
    assert calls.log == calls_made


def test_memory_is_read_after_every_transition() -> None:
    """`memory` counts the calls before it."""
    calls = Calls()
    placement = time_slice(calls, level=2, offload="all")
    run_virtual(one_slice(placement, calls))
    assert placement.measured == {
        "generated": 1, "asleep": 2, "onloaded": 3, "trained": 4, "weights_awake": 6, "offloaded": 9, "awake": 10,
    }  # fmt: skip
    assert calls.log[8:10] == ["offload all", "wake kv_cache"]


def test_the_time_it_takes_is_told_once() -> None:
    async def main() -> None:
        calls = Calls()
        placement = time_slice(calls)
        await one_slice(placement, calls)
        # interrupt, sleep, wake, pause, wake, resume
        assert placement.take_switch_s() == pytest.approx(6.0)
        assert placement.take_switch_s() == 0

    run_virtual(main())


HANGS = [
    ("interrupt", "interrupting generation"),
    ("sleep 1", "the generator's sleep"),
    ("onload", "onloading the trainer"),
    ("offload optimizer", "offloading the trainer"),
    ("wake weights", "waking the generator's weights"),
    ("pause clear_cache=True", "pausing the generator"),
    ("offload all", "offloading the trainer"),
    ("wake kv_cache", "waking the generator's cache"),
    ("resume", "resuming generation"),
]


async def failing_slice(placement: Placement, calls: Calls) -> float:
    with pytest.raises(StalledError) as stalled:
        await one_slice(placement, calls)
    calls.log.append(str(stalled.value).partition("\n")[0])
    return now()


@pytest.mark.parametrize(("call", "what"), HANGS)
def test_what_hangs_is_named_within_the_limit_and_nothing_goes_on(call: str, what: str) -> None:
    calls = Calls(hangs=call)
    placement = time_slice(calls, offload="all", limit_s=5.0)
    ended_s = run_virtual(failing_slice(placement, calls))
    assert calls.log[-2:] == [call, f"{what} took more than 5.0 s"]
    before = [one for one in calls.log[:-2] if not one.startswith("-")]
    assert ended_s == pytest.approx(len(before) + 5.0)


@pytest.mark.parametrize("make", [time_slice, split])
def test_a_drain_that_hangs_is_named_too(make: Callable[..., Placement]) -> None:
    calls = Calls(hangs="drain")
    run_virtual(failing_slice(make(calls, in_flight="drain"), calls))
    assert calls.log[-2:] == ["drain", "draining the generator took more than 5.0 s"]


@pytest.mark.parametrize(
    ("in_flight", "before_publish"),
    [
        ("recompute", ["pause clear_cache=True"]),
        ("stale_kv", ["pause clear_cache=False"]),
        ("drain", ["drain", "pause clear_cache=True"]),
    ],
)
def test_in_splitonly_update_and_evaluation_hold_the_generator(in_flight: InFlight, before_publish: list[str]) -> None:
    assert calls_of(lambda calls: split(calls, in_flight=in_flight)) == [
        "- train", *before_publish, "- publish", "resume", "interrupt", "- evaluate", "resume",
    ]  # fmt: skip


@pytest.mark.parametrize("make", [time_slice, split])
def test_after_a_failure_nothing_more_is_generated(make: Callable[[Calls], Placement]) -> None:
    calls = Calls()

    async def main() -> None:
        with pytest.raises(ZeroDivisionError):
            async with make(calls).training(), make(calls).publishing():
                raise ZeroDivisionError

    run_virtual(main())
    assert "resume" not in calls.log


@pytest.mark.parametrize(("level", "always"), [(0, False), (1, False), (2, True)])
def test_weights_that_were_dropped_must_be_published(level: Literal[0, 1, 2], always: bool) -> None:
    assert time_slice(Calls(), level=level).must_publish is always
    assert split(Calls()).must_publish is False


def test_the_golden_answer_is_the_same_for_the_same_weights() -> None:
    async def main() -> None:
        generator = FakeGenerator(length=lambda request: request.max_new_tokens)
        before = await golden(generator, 60.0)
        assert len(before.token_ids) == 4
        await require_golden(before, generator, 2, 60.0)
        for off in (0.01, -0.01):
            await require_golden(replace(before, logprobs=before.logprobs + off), generator, 2, 60.0)
        generator.set_version(1)
        with pytest.raises(GenerationError) as changed:
            await require_golden(before, generator, 2, 60.0)
        message, _, remedy = str(changed.value).partition("\n  -> ")
        assert message == "the generator's log-probs are not what they were before its sleep of level 2"
        assert remedy == "set generate.sleep_level = 1"

    run_virtual(main())


class Forgetful(FakeGenerator):
    """After a sleep as deep as `from_level` its log-probs are off, until weights come after a lighter one."""

    from_level = 2

    async def sleep(self, level: SleepLevel) -> None:
        await super().sleep(level)
        self.off = 0.5 if level >= self.from_level else 0.0

    async def generate(self, request: SegmentRequest) -> Segment:
        segment = await super().generate(request)
        return replace(segment, logprobs=segment.logprobs + self.off)


@pytest.mark.parametrize(("from_level", "settled", "warnings"), [(3, 2, 0), (2, 1, 1), (1, 0, 1)])
def test_the_start_settles_for_the_level_that_leaves_log_probs_alone(
    from_level: int, settled: int, warnings: int
) -> None:
    async def main() -> None:
        generator = Forgetful(length=lambda request: request.max_new_tokens)
        generator.from_level, generator.off = from_level, 0.0
        before = await golden(generator, 60.0)
        one = TimeSlice(generator, Calls().in_thread, level=2, in_flight="recompute", offload="none", limit_s=60.0)
        warned: list[str] = []

        async def publish() -> None:
            generator.set_version(0)

        async with one.training(), one.publishing():
            await publish()
        settling = settle_level(one, generator, before, publish, warned.append, 60.0)
        if settled:
            await settling
            assert one.level == settled
        else:
            with pytest.raises(GenerationError, match="level 1"):
                await settling
        assert len(warned) == warnings
        assert (await golden(generator, 60.0)).token_ids.tolist() == before.token_ids.tolist()

    run_virtual(main())


@pytest.mark.parametrize("off", [0.03, -0.03, float("nan")])
def test_log_probs_that_moved_are_told_by_one_token(off: float) -> None:
    async def main() -> None:
        generator = FakeGenerator(length=lambda request: request.max_new_tokens)
        before = await golden(generator, 60.0)
        logprobs = before.logprobs.copy()
        logprobs[2] += off
        with pytest.raises(GenerationError, match=r"level 1\n  -> set generate\.sleep_level = 0"):
            await require_golden(replace(before, logprobs=logprobs), generator, 1, 60.0)

    run_virtual(main())
