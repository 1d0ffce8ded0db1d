"""Placement `time_sliced`: generator and trainer take turns on the same device."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator

from engine.protocols import Generator


class TimeSlice:
    """Hands the device to the trainer and back. `switch_s` is what the last hand-over and return took."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self.switch_s = 0.0

    @contextlib.asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """Inside, no token is generated: open rollouts keep what they have and continue afterwards."""
        started = time.monotonic()
        await self._generator.interrupt()
        self.switch_s = time.monotonic() - started
        yield
        # Not in a `finally`: after a failure the run ends, and nothing more is to be generated.
        started = time.monotonic()
        await self._generator.resume()
        self.switch_s += time.monotonic() - started
