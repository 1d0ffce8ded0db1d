"""Channel: first in first out, and a full one holds its sender back."""

from __future__ import annotations

import asyncio

from engine.channel import Channel
from engine.clock import now, run_virtual


def test_a_full_channel_holds_its_sender_until_there_is_room() -> None:
    async def main() -> None:
        channel: Channel[int] = Channel(2)
        sent_at_s: list[float] = []
        received: list[int] = []

        async def sender() -> None:
            for item in range(4):
                await channel.send(item)
                sent_at_s.append(now())

        async def receiver() -> None:
            for _ in range(4):
                await asyncio.sleep(10.0)
                received.append(await channel.receive())

        await asyncio.gather(sender(), receiver())
        assert sent_at_s == [0.0, 0.0, 10.0, 20.0]
        assert received == [0, 1, 2, 3]

    run_virtual(main())


def test_an_empty_channel_holds_its_receiver() -> None:
    async def main() -> None:
        channel: Channel[str] = Channel(1)
        waiting = asyncio.ensure_future(channel.receive())
        await asyncio.sleep(5.0)
        assert not waiting.done()
        await channel.send("item")
        assert await waiting == "item"

    run_virtual(main())


def test_depth_is_what_waits_and_peak_the_most_that_did() -> None:
    async def main() -> None:
        channel: Channel[int] = Channel(3)
        assert (channel.depth, channel.peak) == (0, 0)
        for item in range(3):
            await channel.send(item)
        await channel.receive()
        await channel.receive()
        await channel.send(3)
        assert (channel.depth, channel.peak) == (2, 3)

    run_virtual(main())


def test_a_cancelled_receiver_takes_no_item_along() -> None:
    async def main() -> None:
        channel: Channel[int] = Channel(1)
        waiting = asyncio.ensure_future(channel.receive())
        await asyncio.sleep(0)
        await channel.send(7)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert await channel.receive() == 7

    run_virtual(main())
