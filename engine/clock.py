"""Time as the event loop sees it, real or simulated.

Everything in the engine that waits does so through asyncio, so the loop is the one clock: `run` puts the same code on
uvloop, `run_virtual` on a loop whose time jumps to the next timer. Simulated runs are exact, take no time, and a
deadlock (nothing ready, no timer) raises instead of hanging. No threads may take part in a simulated run.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar

import uvloop

from engine.errors import StalledError

T = TypeVar("T")


def now() -> float:
    """Seconds on the running loop's clock."""
    return asyncio.get_running_loop().time()


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run on uvloop, in real time."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run in simulated time.

    Raises:
        DeadlockError: every coroutine waits for something that nothing will bring.
    """
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


async def within(limit_s: float, what: str, work: Awaitable[T]) -> T:
    """Await `work` for at most `limit_s`.

    Raises:
        StalledError: naming `what`.
    """
    limit = asyncio.timeout(limit_s)
    try:
        async with limit:
            return await work
    except TimeoutError as error:
        if not limit.expired():
            raise
        remedy = "raise run.stage_timeout_s if that is normal"
        raise StalledError(f"{what} took more than {limit_s} s", remedy=remedy) from error


class DeadlockError(RuntimeError):
    """A simulated run has nothing left to do and has not ended."""


class _NoWaiting(selectors.SelectSelector):
    """Never blocks: tells the loop how long it would have waited instead."""

    def __init__(self) -> None:
        super().__init__()
        self.skipped_s = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise DeadlockError("nothing is ready and no timer is set")
        self.skipped_s += max(0.0, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An asyncio loop whose clock moves only by jumping to the next timer."""

    def __init__(self) -> None:
        self._no_waiting = _NoWaiting()
        super().__init__(self._no_waiting)

    def time(self) -> float:
        return self._no_waiting.skipped_s
