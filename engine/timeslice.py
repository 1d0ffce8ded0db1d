"""Who has the devices when: `time_sliced`, generator and trainer in turns on the same ones; `split`, each on its own.

    TimeSlice   generate | interrupt  sleep  onload | train ... train | offload  wake weights  publish
                         | offload  wake cache | evaluate | resume | generate
    Split       generate ............................................ | pause  publish  resume | generate
                                                                       | interrupt  evaluate  resume |

Both have the same three contexts, which `loop.train` and `host` enter in this order: `training` around a slice, and in
it `publishing` around the weight update and `quiet` around an evaluation. In `split` the next slice is trained during
an evaluation; its update waits.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Literal, Protocol

import numpy as np

from engine.clock import now, within
from engine.errors import GenerationError
from engine.protocols import Generator, InThread, SleepLevel, Trainer
from engine.types import Segment, SegmentRequest

InFlight = Literal["recompute", "stale_kv", "drain"]
Offload = Literal["none", "optimizer", "all"]

# The same weights on the same engine give the same log-probs; what stands between is room for another batch's rounding.
_GOLDEN_NATS = 0.02
_GOLDEN_TOKENS = 4


class Placement(Protocol):
    """`exclusive`: nothing is generated in a slice. `must_publish`: the engine needs weights after every slice, also
    when no step changed them. `take_switch_s`: seconds that handing over took, since the last call. `measured`: memory
    in use, in bytes, at the last transition of each kind."""

    measured: dict[str, int]

    @property
    def exclusive(self) -> bool: ...
    @property
    def must_publish(self) -> bool: ...
    def take_switch_s(self) -> float: ...
    def training(self) -> contextlib.AbstractAsyncContextManager[None]: ...
    def publishing(self) -> contextlib.AbstractAsyncContextManager[None]: ...
    def quiet(self) -> contextlib.AbstractAsyncContextManager[None]: ...
    async def stop_generating(self) -> None: ...


class _Switches:
    """Times the calls that hand devices over, and limits each of them."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._switch_s = 0.0
        self.measured: dict[str, int] = {}

    def take_switch_s(self) -> float:
        """Seconds in `_switch` since the last call."""
        switch_s, self._switch_s = self._switch_s, 0.0
        return switch_s

    async def _switch(self, what: str, work: Awaitable[Any]) -> None:
        started = now()
        await within(self._limit_s, what, work)
        self._switch_s += now() - started


class TimeSlice(_Switches):
    """Hands the devices to the trainer and back. `level` is how deep the generator sleeps meanwhile, `offload` what of
    the trainer leaves the device while it does not train. `memory` reads what is in use, in bytes.

    Raises:
        StalledError: the generator or the trainer did not answer within `limit_s`.
    """

    exclusive = True

    def __init__(
        self, generator: Generator, in_thread: InThread, *, level: SleepLevel, in_flight: InFlight, offload: Offload,
        limit_s: float, memory: Callable[[], int] = lambda: 0,
    ) -> None:
        super().__init__(limit_s)
        self._generator = generator
        self._in_thread = in_thread
        self.level: SleepLevel = level
        self._in_flight = in_flight
        self._offload: Offload = offload
        self._memory = memory
        self.trainer: Trainer | None = None
        """Made in the first slice, where the generator leaves it room."""

    @property
    def must_publish(self) -> bool:
        """A generator that has dropped its weights needs them back."""
        return self.level == 2

    @contextlib.asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """Inside, no token is generated: open rollouts keep what they have and continue afterwards. `publishing` comes
        once before the end."""
        if self._in_flight == "drain":
            await self._switch("draining the generator", self._generator.drain())
        else:
            await self._switch("interrupting generation", self._generator.interrupt())
        await self._hand_over()
        yield
        # Not in a `finally`: after a failure the run ends, and nothing more is to be generated.
        await self._switch("resuming generation", self._generator.resume())

    async def stop_generating(self) -> None:
        """The trainer gets the devices for good."""
        await self._switch("interrupting generation", self._generator.interrupt())
        await self._hand_over()

    async def _hand_over(self) -> None:
        self._measure("generated")
        if self.level:
            await self._switch("the generator's sleep", self._generator.sleep(self.level))
            self._measure("asleep")
        if self._offload != "none" and self.trainer is not None:
            await self._switch("onloading the trainer", self._in_thread(self.trainer.onload))
            self._measure("onloaded")

    @contextlib.asynccontextmanager
    async def publishing(self) -> AsyncIterator[None]:
        """The trainer is done and the generator takes its memory back: weights before the update, which comes inside,
        and the cache after it."""
        self._measure("trained")
        if self._offload != "none":
            await self._offloading("optimizer")
        if self.level:
            await self._switch("waking the generator's weights", self._generator.wake("weights"))
            self._measure("weights_awake")
        await self._switch("pausing the generator", self._generator.pause(clear_cache=True))
        yield
        if self._offload == "all":
            await self._offloading("all")
        if self.level:
            await self._switch("waking the generator's cache", self._generator.wake("kv_cache"))
            self._measure("awake")

    @contextlib.asynccontextmanager
    async def quiet(self) -> AsyncIterator[None]:
        """After `publishing` nothing is in flight, and the generator is awake."""
        yield

    async def _offloading(self, what: Literal["optimizer", "all"]) -> None:
        assert self.trainer is not None
        await self._switch("offloading the trainer", self._in_thread(self.trainer.offload, what))
        self._measure("offloaded")

    def _measure(self, transition: str) -> None:
        self.measured[transition] = self._memory()


class Split(_Switches):
    """Generator and trainer have devices of their own and work at once; an update holds the generator for its own time.

    Raises:
        StalledError: the generator did not answer within `limit_s`.
    """

    exclusive = False
    must_publish = False

    def __init__(self, generator: Generator, *, in_flight: InFlight, limit_s: float) -> None:
        super().__init__(limit_s)
        self._generator = generator
        self._in_flight = in_flight

    @contextlib.asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """Nothing changes hands."""
        yield

    @contextlib.asynccontextmanager
    async def publishing(self) -> AsyncIterator[None]:
        """Inside, every open request stands where it is, or has ended, if they are drained."""
        if self._in_flight == "drain":
            await self._switch("draining the generator", self._generator.drain())
        clear_cache = self._in_flight != "stale_kv"
        await self._switch("pausing the generator", self._generator.pause(clear_cache=clear_cache))
        yield
        await self._switch("resuming generation", self._generator.resume())

    @contextlib.asynccontextmanager
    async def quiet(self) -> AsyncIterator[None]:
        """Inside, nothing is in flight: an evaluation has the generator to itself."""
        await self._switch("interrupting generation", self._generator.interrupt())
        yield
        await self._switch("resuming generation", self._generator.resume())

    async def stop_generating(self) -> None:
        """Nothing that the trainer needs."""


async def settle_level(time_slice: TimeSlice, generator: Generator, before: Segment,
                       publish: Callable[[], Awaitable[object]], warn: Callable[[str], None], limit_s: float) -> None:
    """Start-up self-test, after a first slice: one level less deep when the generator did not wake up as it was.

    Raises:
        GenerationError: level 1 does not leave it as it was either.
        StalledError: it took more than `limit_s`.
    """
    try:
        await require_golden(before, generator, time_slice.level, limit_s)
    except GenerationError:
        if time_slice.level == 1:
            raise
        warn("generate.sleep_level = 2 changes log-probs on this engine: going on with 1")
        time_slice.level = 1
        async with time_slice.training(), time_slice.publishing():
            await publish()
        await require_golden(before, generator, 1, limit_s)


async def require_golden(before: Segment, generator: Generator, level: int, limit_s: float) -> None:
    """After one whole switch with unchanged weights the generator must answer as it did before.

    Raises:
        GenerationError: it does not.
        StalledError: it took more than `limit_s`.
    """
    after = await golden(generator, limit_s)
    if np.array_equal(before.token_ids, after.token_ids):
        worst = float(np.abs(before.logprobs - after.logprobs).max())
        if worst < _GOLDEN_NATS:
            return
    raise GenerationError(f"the generator's log-probs are not what they were before its sleep of level {level}",
                          remedy=f"set generate.sleep_level = {level - 1}")


async def golden(generator: Generator, limit_s: float) -> Segment:
    """A few greedy tokens and their log-probs, for `require_golden`.

    Raises:
        StalledError: they took more than `limit_s`.
    """
    prompt = np.arange(1, 9, dtype=np.int32)
    request = SegmentRequest(
        request_id="golden", token_ids=prompt, max_new_tokens=_GOLDEN_TOKENS, temperature=0.0, seed=0
    )
    return await within(limit_s, "the engine's first tokens", generator.generate(request))
