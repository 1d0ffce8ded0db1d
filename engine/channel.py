"""The link between two stages: a bounded FIFO that makes its sender wait when full."""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

T = TypeVar("T")


class Channel(Generic[T]):
    """Single-loop FIFO. `depth` is what waits in it now, `peak` the most that ever did."""

    def __init__(self, capacity: int) -> None:
        self._queue: asyncio.Queue[T] = asyncio.Queue(capacity)
        self.peak = 0

    @property
    def depth(self) -> int:
        return self._queue.qsize()

    async def send(self, item: T) -> None:
        """Wait for room, then append."""
        await self._queue.put(item)
        self.peak = max(self.peak, self.depth)

    async def receive(self) -> T:
        """Wait for the next item."""
        return await self._queue.get()
