"""Placement `time_sliced`: generator and trainer take turns on the same device."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator

from engine.clock import within
from engine.protocols import Generator


class TimeSlice:
    """Hands the device to the trainer and back. `switch_s` is what the last hand-over and return took.

    Raises:
        StalledError: the generator did not answer within `limit_s`.
    """

    def __init__(self, generator: Generator, limit_s: float) -> None:
        self._generator = generator
        self._limit_s = limit_s
        self.switch_s = 0.0

    @contextlib.asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """Inside, no token is generated: open rollouts keep what they have and continue afterwards."""
        started = time.monotonic()
        await within(self._limit_s, "interrupting generation", self._generator.interrupt())
        self.switch_s = time.monotonic() - started
        yield
        # Not in a `finally`: after a failure the run ends, and nothing more is to be generated.
        started = time.monotonic()
        await within(self._limit_s, "resuming generation", self._generator.resume())
        self.switch_s += time.monotonic() - started
