"""A generator without a model: the batch engine's behaviour, tokens from a random stream, time from a formula.

The CPU suite and the simulator run on it. Timers drive it, no task does: a step begins when a request comes to an
idle engine, and each step's end begins the next, until nothing is left to run.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from engine.errors import GenerationError
from engine.protocols import SleepLevel
from engine.types import Int32, Scored, Segment, SegmentRequest

Length = Callable[[SegmentRequest], int]


def geometric(request: SegmentRequest, mean: float = 64.0) -> int:
    """Natural length of a request, told from its tokens and seed alone.

    Memoryless: rollouts that were interrupted and continued have the lengths of those that ran through.
    """
    return int(_stream(request, "length").geometric(1 / mean))


class FakeGenerator:
    """A `Generator` whose tokens are a pure function of (the request's token ids, its seed, served version, position).

    `length` says after how many tokens, the end token included, a request stops by itself; at least one is made. A
    continuation is a request of its own: who needs to know how far its rollout is takes the rollout's budget less
    `max_new_tokens`. `eos_token_id` ends what stopped and stands nowhere else. Log-probabilities are no model's: minus
    a standard exponential. Stop strings are not looked for, since these tokens have no text.

    A step makes one token for every running request and takes `step_s + step_s_per_sequence * running +
    prefill_s_per_token * (tokens of the requests that join, or whose cache was cleared)` seconds on the loop's clock;
    at 0 it still yields to the loop. `max_num_seqs` run at once, the others wait, first in first out. `interrupt`,
    `pause` and cancellation lose the step under way. `sleep` above level 0 takes `sleep_s`, waking included.
    """

    def __init__(
        self,
        *,
        vocab_size: int = 256,
        eos_token_id: int = 0,
        length: Length = geometric,
        step_s: float = 0.0,
        step_s_per_sequence: float = 0.0,
        prefill_s_per_token: float = 0.0,
        sleep_s: float = 0.0,
        max_num_seqs: int = 256,
        version: int = 0,
    ) -> None:
        self._vocab_size = vocab_size
        self._eos_token_id = eos_token_id
        self._length = length
        self._step_s = step_s
        self._step_s_per_sequence = step_s_per_sequence
        self._prefill_s_per_token = prefill_s_per_token
        self._sleep_s = sleep_s
        self._max_num_seqs = max_num_seqs
        self._version = version
        self._open: list[_Request] = []
        self._held: set[str] = set()
        self._timer: asyncio.Handle | None = None
        self._going = asyncio.Event()
        self._going.set()
        self._paused = False
        self._weights_dropped = False
        self._closed = False
        self.num_requests = 0
        self.tokens_generated = 0
        self.tokens_prefilled = 0

    @property
    def served_version(self) -> int:
        return self._version

    def set_version(self, number: int) -> None:
        """Serve version `number` from the next token on, in open requests too. For weight routes."""
        self._version = number
        self._weights_dropped = False

    async def open(self) -> None:
        pass

    async def watch(self) -> None:
        await asyncio.Event().wait()

    async def generate(self, request: SegmentRequest) -> Segment:
        self._held.add(request.request_id)
        await self._admission()
        if request.request_id not in self._held:  # cancelled meanwhile
            return Segment.empty()
        self._held.remove(request.request_id)
        return await self._submit(request)

    async def wave(self, requests: Sequence[SegmentRequest]) -> list[Segment]:
        if self._closed:
            raise GenerationError("the generator is closed")
        self._require_idle("a wave was asked for")
        self._require_weights()
        self._paused = False  # holding back concerns `generate` alone
        return await asyncio.gather(*[self._submit(request) for request in requests])

    async def score(self, prompts: Sequence[Int32]) -> list[Scored]:
        """As in a completion: what a token's log-prob is depends on all before it, and on the version."""
        self._require_idle("a score was asked for")
        self._require_weights()
        return [self._scored(prompt) for prompt in prompts]

    async def interrupt(self) -> None:
        self._going.clear()
        await self._end_early(self._stop())

    async def drain(self) -> None:
        self._going.clear()
        while running := self._in_flight():
            await asyncio.wait([request.ended for request in running])
        await asyncio.sleep(0)  # every open `generate` returns before this does

    async def pause(self, *, clear_cache: bool) -> None:
        self._paused = True
        self._stop_clock()
        if clear_cache:
            for request in self._open:
                request.cached = False

    async def resume(self) -> None:
        self._require_weights()
        self._paused = False
        self._going.set()
        self._start_clock()

    async def cancel(self, request_ids: Collection[str]) -> None:
        self._held.difference_update(request_ids)
        await self._end_early([request for request in self._in_flight() if request.sent.request_id in request_ids])

    async def sleep(self, level: SleepLevel) -> None:
        self._require_idle("sleep was asked for")
        self._weights_dropped |= level == 2
        await asyncio.sleep(self._sleep_s if level else 0)

    async def wake(self, what: Literal["weights", "kv_cache"]) -> None:
        pass

    async def close(self) -> None:
        """Open requests and later ones raise GenerationError."""
        self._closed = True
        self._going.set()
        for request in self._stop():
            request.ended.set_exception(GenerationError("the generator was closed during this request"))

    async def _admission(self) -> None:
        while not self._going.is_set():  # another interrupt may come before this wakes
            await self._going.wait()
        if self._closed:
            raise GenerationError("the generator is closed")

    def _submit(self, sent: SegmentRequest) -> asyncio.Future[Segment]:
        if sent.max_new_tokens < 1:
            raise GenerationError(f"request {sent.request_id!r} has room for {sent.max_new_tokens} new tokens")
        ended: asyncio.Future[Segment] = asyncio.get_running_loop().create_future()
        request = _Request(sent, max(1, self._length(sent)), ended)
        self._open.append(request)
        self.num_requests += 1
        self._start_clock()
        return request.ended

    def _scored(self, prompt: Int32) -> Scored:
        uniform_T = [
            _stream(_given(prompt[: end + 1]), f"version {self._version}").random() for end in range(1, len(prompt))
        ]
        logprobs = np.log1p(-np.asarray([0.0, *uniform_T])).astype(np.float32)
        return Scored(logprobs, np.asarray([False, *(value < 0.5 for value in uniform_T)], np.bool_))

    def _require_weights(self) -> None:
        if self._weights_dropped:
            raise GenerationError("sleep dropped the generator's weights, and none were published since")

    def _require_idle(self, what: str) -> None:
        if self._in_flight():
            raise GenerationError(f"{what} while other requests are in flight")

    def _start_clock(self) -> None:
        if self._timer is None and not self._paused:
            # At the loop's next turn, so that all requests of this one share the step.
            self._timer = asyncio.get_running_loop().call_soon(self._begin_step)

    def _stop_clock(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _begin_step(self) -> None:
        self._open = self._in_flight()
        running = self._open[: self._max_num_seqs]
        if not running:
            self._timer = None
            return
        prefilled = sum(len(request.sent.token_ids) + request.made for request in running if not request.cached)
        self.tokens_prefilled += prefilled
        step_s = self._step_s + self._step_s_per_sequence * len(running) + self._prefill_s_per_token * prefilled
        self._timer = asyncio.get_running_loop().call_later(step_s, self._end_step, running)

    def _end_step(self, running: list[_Request]) -> None:
        for request in running:
            if request.ended.done():
                continue
            request.add_token(self._version)
            self.tokens_generated += 1
            if request.made == request.natural_length:
                request.ended.set_result(self._segment(request, "stop"))
            elif request.made == request.sent.max_new_tokens:
                request.ended.set_result(self._segment(request, "length"))
        self._begin_step()

    def _in_flight(self) -> list[_Request]:
        # Whoever awaits a request and is cancelled cancels its future: that is how it leaves the batch.
        return [request for request in self._open if not request.ended.done()]

    def _stop(self) -> list[_Request]:
        """Idle the engine; the requests that were open."""
        self._stop_clock()
        stopped, self._open = self._in_flight(), []
        return stopped

    async def _end_early(self, requests: Sequence[_Request]) -> None:
        for request in requests:
            request.ended.set_result(self._segment(request, "interrupted"))
        await asyncio.sleep(0)  # their `generate` returns before this does

    def _segment(self, request: _Request, ended: Literal["stop", "length", "interrupted"]) -> Segment:
        uniform_T2 = np.empty((request.made, 2))
        bounds = [start for start, _ in request.spans] + [request.made]
        for (start, version), end in zip(request.spans, bounds[1:], strict=True):
            # Rows are drawn in order, so that a token does not depend on how many follow.
            uniform_T2[start:end] = _stream(request.sent, f"version {version}").random((end, 2))[start:]
        token_ids = (uniform_T2[:, 0] * (self._vocab_size - 1)).astype(np.int32)
        token_ids[token_ids >= self._eos_token_id] += 1
        if ended == "stop":
            token_ids[-1] = self._eos_token_id
        logprobs = np.log1p(-uniform_T2[:, 1]).astype(np.float32)
        return Segment(token_ids=token_ids, logprobs=logprobs, version_spans=tuple(request.spans), ended=ended)


@dataclass(slots=True)
class _Request:
    """A request in the engine. Only tokens are counted while it runs; it draws them when it ends."""

    sent: SegmentRequest
    natural_length: int
    ended: asyncio.Future[Segment]
    made: int = 0
    cached: bool = False
    spans: list[tuple[int, int]] = field(default_factory=list)

    def add_token(self, version: int) -> None:
        if not self.spans or self.spans[-1][1] != version:
            self.spans.append((self.made, version))
        self.made += 1
        self.cached = True


def _given(token_ids: Int32) -> SegmentRequest:
    return SegmentRequest(request_id="", token_ids=token_ids, max_new_tokens=1, temperature=0.0, seed=0)


def _stream(request: SegmentRequest, purpose: str) -> np.random.Generator:
    key = f"{purpose}/{request.seed}/".encode() + request.token_ids.tobytes()
    return np.random.Generator(np.random.PCG64(int.from_bytes(hashlib.sha256(key).digest())))
