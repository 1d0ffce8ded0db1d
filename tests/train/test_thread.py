"""The training thread beside a running loop, on uvloop as in a real run."""

from __future__ import annotations

import asyncio
import threading
import time
import traceback

import pytest

from engine.clock import run
from engine.train.thread import TrainingThread


def test_calls_run_in_their_order_in_one_daemon_thread() -> None:
    seen: list[tuple[int, str, bool]] = []

    def work(number: int, *, pause_s: float) -> int:
        time.sleep(pause_s)
        me = threading.current_thread()
        seen.append((number, me.name, me.daemon))
        return number * number

    async def main() -> list[int]:
        thread = TrainingThread()
        return await asyncio.gather(*(thread.call(work, number, pause_s=0.02 - 0.005 * number) for number in range(4)))

    assert run(main()) == [0, 1, 4, 9]
    assert seen == [(number, "training", True) for number in range(4)]


def test_an_exception_arrives_with_its_traceback_and_the_thread_goes_on() -> None:
    def deep() -> None:
        raise LookupError("weights")

    def step() -> None:
        deep()

    async def main() -> int:
        thread = TrainingThread()
        with pytest.raises(LookupError, match="weights") as raised:
            await thread.call(step)
        names = [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)]
        assert names[0] == "main"
        assert names[-2:] == ["step", "deep"]
        return await thread.call(lambda: 5)

    assert run(main()) == 5


def test_the_loop_goes_on_meanwhile() -> None:
    async def main() -> None:
        working = asyncio.ensure_future(TrainingThread().call(time.sleep, 0.2))
        turns = 0
        while not working.done():
            turns += 1
            await asyncio.sleep(0.005)
        assert turns > 10

    run(main())


def test_cancelling_stops_the_waiting_and_not_the_call() -> None:
    problems: list[object] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
        thread = TrainingThread()
        go, ended = threading.Event(), threading.Event()

        def step() -> str:
            go.wait(10)
            ended.set()
            return "late"

        waiting = asyncio.ensure_future(thread.call(step))
        await asyncio.sleep(0.02)
        waiting.cancel()
        begun_s = time.monotonic()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert time.monotonic() - begun_s < 1
        assert not ended.is_set()
        go.set()
        assert await thread.call(lambda: "next") == "next"  # after the first call's end
        assert ended.is_set()

    run(main())
    assert problems == []  # the late result, which nobody waited for, came before the next call's and did no harm


def test_a_result_after_the_loop_has_closed_harms_nothing(recwarn: pytest.WarningsRecorder) -> None:
    go, ended = threading.Event(), threading.Event()
    threads: list[TrainingThread] = []

    async def main() -> None:
        threads.append(TrainingThread())
        asyncio.ensure_future(threads[0].call(go.wait, 10))  # noqa: RUF006
        await asyncio.sleep(0.02)

    run(main())
    go.set()

    async def later() -> None:
        await asyncio.wait_for(threads[0].call(ended.set), 5)  # the thread has survived

    run(later())
    assert ended.is_set()
    assert not recwarn
