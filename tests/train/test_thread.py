"""The training thread beside a running loop, on uvloop as in a real run."""

from __future__ import annotations

import asyncio
import os
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.clock import run
from engine.config import ScheduleSection
from engine.train.thread import TrainingThread, training_cores


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


@pytest.fixture
def thread_count() -> Iterator[None]:
    """Torch computes with as many threads as before, afterwards."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def where_threads_may_run() -> dict[str, str]:
    """The kernel's word, by thread id."""
    lines = {task.name: (task / "status").read_text().splitlines() for task in Path("/proc/self/task").iterdir()}
    return {
        name: next(line for line in status if line.startswith("Cpus_allowed_list")).split()[1]
        for name, status in lines.items()
    }


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
@pytest.mark.usefixtures("thread_count")
def test_the_thread_and_all_that_compute_for_it_stay_on_its_cores() -> None:
    core, mine = max(os.sched_getaffinity(0)), os.sched_getaffinity(0)
    before = where_threads_may_run()

    def compute() -> None:
        torch.set_num_threads(3)  # more than there are cores, so that OpenMP must start some
        (torch.ones(512, 512) @ torch.ones(512, 512) + torch.ones(512, 512)).exp()

    async def main() -> int:
        thread = TrainingThread([core])
        count = await thread.call(torch.get_num_threads)
        await thread.call(compute)
        return count

    assert run(main()) == 1
    started = {name: allowed for name, allowed in where_threads_may_run().items() if name not in before}
    assert len(started) >= 3  # itself and two of OpenMP's
    assert set(started.values()) == {str(core)}
    assert os.sched_getaffinity(0) == mine


@pytest.mark.parametrize(
    ("available", "ranks", "expected"),
    [
        ({0, 1}, 1, [[1]]),
        ({0, 1, 2, 3}, 2, [[2], [3]]),
        ({3, 4, 5, 8, 9, 10}, 2, [[8], [9, 10]]),
        ({0, 1, 2, 3}, 3, [[2], [2], [3]]),  # two cores for three
    ],
    ids=str,
)
def test_ranks_share_the_trainers_half(
    monkeypatch: pytest.MonkeyPatch, available: set[int], ranks: int, expected: list[list[int]]
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: available)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    split = ScheduleSection(placement="split")
    assert [training_cores(split, rank, ranks) for rank in range(ranks)] == expected
    assert training_cores(ScheduleSection(placement="split", cores=str(min(available))), 0, 1) == sorted(available)[1:]
    assert training_cores(ScheduleSection(placement="time_sliced"), 0, ranks) is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert training_cores(split, 0, ranks) is None
