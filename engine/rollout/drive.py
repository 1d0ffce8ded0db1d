"""From a lease to a group: one request per rollout, continued across interruptions.

A segment that was interrupted is continued by a new request: prompt plus tokens so far, what is left of the budget, a
seed derived from both. Its version spans are shifted to their place in the whole sequence. At most `max_in_flight`
rollouts are under way, oldest first; one keeps its place while it is interrupted.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence

import msgspec
import numpy as np

from engine.clock import now
from engine.protocols import Generator
from engine.rollout.chat import Chat
from engine.seeds import derive_seed
from engine.types import Group, Int32, Lease, Rollout, Sampling, Segment, SegmentRequest, StopReason, Task


class _Open:
    """A rollout under way: the prompt and the segments made so far."""

    def __init__(self, lease: Lease, index: int, prompt: Int32, seed: int) -> None:
        self.lease = lease
        self.index = index
        self.prompt = prompt
        self.seed = seed
        self.segments: list[Segment] = []
        self.started = now()
        self.asked = False
        self.cancelled = False

    @property
    def made(self) -> Int32:
        return np.concatenate([np.zeros(0, np.int32), *(segment.token_ids for segment in self.segments)])

    @property
    def request_id(self) -> str:
        return f"{self.lease.lease_id}/{self.index}/{len(self.segments)}"

    def request(self, stop: tuple[str, ...]) -> SegmentRequest:
        """The request that begins or continues this rollout."""
        made, sampling = self.made, self.lease.sampling
        seed = derive_seed(self.seed, hashlib.sha256(made.tobytes()).digest()) if len(made) else self.seed
        return SegmentRequest(
            request_id=self.request_id,
            token_ids=np.concatenate([self.prompt, made]),
            max_new_tokens=sampling.max_new_tokens - len(made),
            temperature=sampling.temperature,
            seed=seed,
            stop=stop,
        )


class Driver:
    """Turns leases into groups with a generator."""

    def __init__(
        self, generator: Generator, chat: Chat, *, run_seed: int, worker: str, engine_build: str, max_in_flight: int
    ) -> None:
        self._generator = generator
        self._in_flight = asyncio.Semaphore(max_in_flight)
        self._open: dict[int, list[_Open]] = {}
        self._chat = chat
        self._run_seed = run_seed
        self._worker = worker
        self._engine_build = engine_build
        self._open_requests = 0
        self._busy_since = 0.0
        self._busy_s = 0.0

    async def group(self, lease: Lease) -> Group:
        """Generate a group whose rollouts may be interrupted and continued. After `cancel` its rollouts are what they
        were by then, those that were under way with stop reason "error"."""
        members = self._open[lease.order] = self._members(lease)
        async with asyncio.TaskGroup() as rolling:
            rollouts = [rolling.create_task(self._rollout(member)) for member in members]
        del self._open[lease.order]
        return Group(
            lease=lease,
            rollouts=tuple(rollout.result() for rollout in rollouts),
            admitted_version=lease.served_version,
        )

    async def wave(self, leases: Sequence[Lease]) -> list[Group]:
        """Generate all groups as one repeatable wave. Only token stops reach the engine; stop strings are cut after.

        An interruption ends rollouts where they are: nothing continues a wave.
        """
        members = [member for lease in leases for member in self._members(lease)]
        self._begin(len(members))
        try:
            segments = await self._generator.wave([member.request(()) for member in members])
        finally:
            self._end(len(members))
        for member, segment in zip(members, segments, strict=True):
            member.segments.append(segment)
        finished = iter([self._finish(member) for member in members])
        return [
            Group(
                lease=lease,
                rollouts=tuple(next(finished) for _ in range(lease.group_size)),
                admitted_version=lease.served_version,
            )
            for lease in leases
        ]

    async def cancel(self, order: int) -> None:
        """End the group of this number, if it is under way, with what it has."""
        members = self._open.get(order, [])
        for member in members:
            member.cancelled = True
        await self._generator.cancel([member.request_id for member in members if member.asked])

    def refusal(self, task: Task) -> str:
        """Why no group of this task can be generated, or empty."""
        return self._chat.refusal(task)

    @property
    def served_version(self) -> int:
        """The version that new tokens come from."""
        return self._generator.served_version

    def busy_s(self) -> float:
        """Seconds with a request open, since the last call."""
        at = now()
        if self._open_requests:
            self._busy_s += at - self._busy_since
            self._busy_since = at
        busy, self._busy_s = self._busy_s, 0.0
        return busy

    def _members(self, lease: Lease) -> list[_Open]:
        prompt = self._chat.encode(lease.task)
        return [
            _Open(lease, index, prompt, derive_seed(self._run_seed, lease.task.task_id, lease.order, index))
            for index in range(lease.group_size)
        ]

    async def _rollout(self, member: _Open) -> Rollout:
        async with self._in_flight:
            while not member.cancelled:
                self._begin(1)
                member.asked = True
                try:
                    segment = await self._generator.generate(member.request(member.lease.sampling.stop))
                finally:
                    self._end(1)
                member.asked = False
                member.segments.append(segment)
                if segment.ended != "interrupted" or self._complete(member):
                    break
        return self._finish(member)

    def _complete(self, member: _Open) -> bool:
        """An interruption can hit just when a rollout has used its budget, or with a stop string across segments."""
        sampling = member.lease.sampling
        made = member.made
        return len(made) >= sampling.max_new_tokens or self._chat.cut_at_stop(made, sampling.stop) is not None

    def _finish(self, member: _Open) -> Rollout:
        lease, made = member.lease, member.made
        cut = self._chat.cut_at_stop(made, lease.sampling.stop)
        count = len(made) if cut is None else cut
        prompt_length = len(member.prompt)
        logprobs = np.concatenate([np.zeros(0, np.float32), *(segment.logprobs for segment in member.segments)])[:count]
        return Rollout(
            token_ids=np.concatenate([member.prompt, made[:count]]),
            trainable=np.concatenate([np.zeros(prompt_length, np.bool_), np.ones(count, np.bool_)]),
            logprobs=np.concatenate([np.zeros(prompt_length, np.float32), logprobs]),
            version_spans=_joined_spans(member.segments, prompt_length, count),
            stop_reason=_stop_reason(member, cut),
            env=lease.task.env,
            lease_id=lease.lease_id,
            index_in_group=member.index,
            seed=member.seed,
            text=self._chat.decode(made[:count]),
            worker=self._worker,
            engine_build=self._engine_build,
            sampling_digest=sampling_digest(lease.sampling),
            timings={"generate_s": now() - member.started, "segments": float(len(member.segments))},
        )

    def _begin(self, count: int) -> None:
        if not self._open_requests:
            self._busy_since = now()
        self._open_requests += count

    def _end(self, count: int) -> None:
        self._open_requests -= count
        if not self._open_requests:
            self._busy_s += now() - self._busy_since


def _stop_reason(member: _Open, cut: int | None) -> StopReason:
    if cut is not None or (member.segments and member.segments[-1].ended == "stop"):
        return "stop"
    return "length" if len(member.made) >= member.lease.sampling.max_new_tokens else "error"


def _joined_spans(segments: Sequence[Segment], offset: int, count: int) -> tuple[tuple[int, int], ...]:
    """Spans over the whole sequence: starts shifted past the prompt and earlier segments, equal neighbours joined."""
    joined: list[tuple[int, int]] = []
    end = offset + count
    for segment in segments:
        for start, version in segment.version_spans:
            if offset + start < end and (not joined or joined[-1][1] != version):
                joined.append((offset + start, version))
        offset += len(segment.token_ids)
    return tuple(joined)


def sampling_digest(sampling: Sampling) -> str:
    """Names the sampling distribution that a rollout's log-probs belong to."""
    return hashlib.sha256(msgspec.json.encode(sampling)).hexdigest()[:16]
