"""Simulated time is exact and free; a simulated deadlock raises; real runs are on uvloop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

from engine.clock import DeadlockError, now, run, run_virtual


def test_virtual_time_jumps_to_the_next_timer() -> None:
    async def main() -> list[tuple[float, str]]:
        seen: list[tuple[float, str]] = []

        async def wake(after_s: float, name: str) -> None:
            await asyncio.sleep(after_s)
            seen.append((now(), name))

        await asyncio.gather(wake(86_400.0 * 30, "month"), wake(0.25, "soon"), wake(3600.0, "hour"))
        return seen

    begun_s = time.monotonic()
    assert run_virtual(main()) == [(0.25, "soon"), (3600.0, "hour"), (2_592_000.0, "month")]
    assert time.monotonic() - begun_s < 5.0


def test_virtual_time_stands_still_while_something_is_ready() -> None:
    async def main() -> float:
        for _ in range(100):
            await asyncio.sleep(0)
        return now()

    assert run_virtual(main()) == 0.0


def test_virtual_timeouts_come_at_their_time() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(7.5):
                await asyncio.Event().wait()
        return now()

    assert run_virtual(main()) == 7.5


def test_a_virtual_deadlock_raises_instead_of_hanging() -> None:
    async def main() -> None:
        await asyncio.sleep(3.0)
        await asyncio.Event().wait()

    with pytest.raises(DeadlockError, match="no timer is set"):
        run_virtual(main())


def test_a_virtual_deadlock_unwinds_the_stages() -> None:
    unwound: list[str] = []

    async def stage(name: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            unwound.append(name)

    async def main() -> None:
        async with asyncio.TaskGroup() as stages:
            stages.create_task(stage("left"))
            stages.create_task(stage("right"))

    with pytest.raises(DeadlockError):
        run_virtual(main())
    assert sorted(unwound) == ["left", "right"]


@pytest.mark.parametrize("runner", [run, run_virtual])
def test_errors_of_the_main_coroutine_come_out(runner: Callable[[Coroutine[Any, Any, None]], None]) -> None:
    async def main() -> None:
        raise LookupError("here")

    with pytest.raises(LookupError, match="here"):
        runner(main())


def test_real_runs_are_on_uvloop_and_its_clock() -> None:
    async def main() -> float:
        assert isinstance(asyncio.get_running_loop(), uvloop.Loop)
        begun_s = now()
        await asyncio.sleep(0.02)
        return now() - begun_s

    assert 0.015 <= run(main()) < 5.0
