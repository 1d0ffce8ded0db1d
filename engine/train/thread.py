"""The training thread: synchronous work beside the event loop, one call at a time."""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

import torch

from engine.config import ScheduleSection
from engine.environment import divide_cores

P = ParamSpec("P")
T = TypeVar("T")


def training_cores(schedule: ScheduleSection, rank: int, ranks: int) -> Sequence[int] | None:
    """The cores that this one of the host's `ranks` trains on: its share of the trainer's, one that it shares where
    there are too few. None where nothing is divided: on GPUs, and where generator and trainer take turns.

    Raises:
        ConfigError: see `environment.divide_cores`.
    """
    if schedule.placement != "split" or torch.cuda.is_available():
        return None
    _, cores = divide_cores(os.sched_getaffinity(0), schedule.cores)
    first, end = (len(cores) * number // ranks for number in (rank, rank + 1))
    return cores[first : max(end, first + 1)]


def stay_on(cores: Sequence[int]) -> None:
    """Keep the calling thread to these cores, and what it starts: OpenMP's threads inherit where their first caller may
    run."""
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(len(cores))


class TrainingThread:
    """A daemon thread, so that a hung step never keeps the process alive. Calls run in the order they were made, on
    `cores` if they are given."""

    def __init__(self, cores: Sequence[int] | None = None) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        if cores is not None:
            self._calls.put(lambda: stay_on(cores))
        threading.Thread(target=self._work, name="training", daemon=True).start()

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `function` in the thread; its exception is raised here. Cancelling stops the waiting, not the call."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def settle(result: T | None, error: BaseException | None) -> None:
            if future.cancelled():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)  # pyright: ignore[reportArgumentType]

        def work() -> None:
            result, error = None, None
            try:
                result = function(*args, **kwargs)
            except BaseException as raised:  # carried to the caller, whatever it is
                error = raised
            if not loop.is_closed():
                loop.call_soon_threadsafe(settle, result, error)

        self._calls.put(work)
        return await future

    def _work(self) -> None:
        while True:
            self._calls.get()()
