"""A generator that serves the rollouts of a recorded run again: the rest of the pipeline, without an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Literal, Self

from engine.errors import GenerationError
from engine.observe.metrics import read_groups
from engine.protocols import SleepLevel
from engine.types import Group, Int32, Rollout, Scored, Segment, SegmentRequest


class ReplayGenerator:
    """A `Generator` over recorded groups: a request is known by its seed and prompt, and answered at once.

    What was asked several times (tasks that started over) is answered in the recorded order, then with the last
    answer again. Spans name the recorded versions, whatever `served_version` is. Members without a sampled token, or
    that failed, have no answer. No request is ever open, so `interrupt`, `drain` and `pause` only hold new ones back.
    There are no weights to lose.
    """

    def __init__(self, groups: Iterable[Group], *, version: int = 0) -> None:
        self._version = version
        self._answers: dict[tuple[int, bytes], list[Segment]] = {}
        for group in groups:
            for rollout in group.rollouts:
                self._record(rollout)
        self._going = asyncio.Event()
        self._going.set()

    @classmethod
    def from_run(cls, folder: Path) -> Self:
        """Serve what `folder` (runs/NAME) holds below rollouts/."""
        files = sorted((folder / "rollouts").glob("*.jsonl.zst"))
        return cls(group for file in files for group in read_groups(file))

    @property
    def served_version(self) -> int:
        return self._version

    def set_version(self, number: int) -> None:
        """Be at version `number`. For weight routes."""
        self._version = number

    async def open(self) -> None:
        pass

    async def watch(self) -> None:
        await asyncio.Event().wait()

    async def generate(self, request: SegmentRequest) -> Segment:
        while not self._going.is_set():  # another interrupt may come before this wakes
            await self._going.wait()
        return self._answer(request)

    async def wave(self, requests: Sequence[SegmentRequest]) -> list[Segment]:
        return [self._answer(request) for request in requests]

    async def score(self, prompts: Sequence[Int32]) -> list[Scored]:
        raise GenerationError("a recorded run scores nothing", remedy="set evals.every = 0")

    async def interrupt(self) -> None:
        self._going.clear()

    async def drain(self) -> None:
        self._going.clear()

    async def pause(self, *, clear_cache: bool) -> None:
        self._going.clear()

    async def resume(self) -> None:
        self._going.set()

    async def cancel(self, request_ids: Collection[str]) -> None:
        pass

    async def sleep(self, level: SleepLevel) -> None:
        pass

    async def wake(self, what: Literal["weights", "kv_cache"]) -> None:
        pass

    async def close(self) -> None:
        pass

    def _record(self, rollout: Rollout) -> None:
        if rollout.stop_reason not in ("stop", "length") or not rollout.length:
            return
        first = int(rollout.trainable.argmax())
        if not rollout.trainable[first:].all():
            raise GenerationError(
                f"rollout {rollout.index_in_group} of lease {rollout.lease_id!r} was not made by one request",
                remedy="replay only runs whose rollouts are one prompt and one completion",
            )
        segment = Segment(
            token_ids=rollout.token_ids[first:],
            logprobs=rollout.logprobs[first:],
            version_spans=tuple((start - first, version) for start, version in rollout.version_spans),
            ended=rollout.stop_reason,
        )
        self._answers.setdefault(_key(rollout.seed, rollout.token_ids[:first]), []).append(segment)

    def _answer(self, request: SegmentRequest) -> Segment:
        asked = f"request {request.request_id!r} (seed {request.seed}, {len(request.token_ids)} tokens)"
        answers = self._answers.get(_key(request.seed, request.token_ids))
        if answers is None:
            raise GenerationError(
                f"{asked} is not in the recorded run",
                remedy="set run.seed, tasks and model as the recorded run had them",
            )
        segment = answers.pop(0) if len(answers) > 1 else answers[0]
        made = len(segment.token_ids)
        if made > request.max_new_tokens:
            raise GenerationError(
                f"{asked} has room for {request.max_new_tokens} new tokens, the recorded run made {made}",
                remedy="set generate.max_new_tokens as the recorded run had it",
            )
        return segment


def _key(seed: int, prompt: Int32) -> tuple[int, bytes]:
    return seed, prompt.tobytes()
