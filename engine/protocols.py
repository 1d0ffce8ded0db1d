"""What stages depend on, where something is really swapped: generator, trainer, scorer, weight route."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec

from engine.types import Batch, Int32, Rollout, Scored, Segment, SegmentRequest, Task, Version

SleepLevel = Literal[0, 1, 2]
InThread = Callable[..., Awaitable[Any]]
"""Runs a synchronous function in the training thread: `TrainingThread.call`."""


class Generator(Protocol):
    """Tokens in, tokens out. All methods run on the event loop."""

    async def open(self) -> None:
        """Call once, on the running loop, before anything else: tokens are labelled version 0 from here on."""
        ...

    async def generate(self, request: SegmentRequest) -> Segment:
        """Run one request to its end, or until `interrupt`: then it returns what it has, `ended="interrupted"`.

        A request made while interrupted waits for `resume`.

        Raises:
            GenerationError: the engine died or broke its contract.
        """
        ...

    async def wave(self, requests: Sequence[SegmentRequest]) -> list[Segment]:
        """Run all requests as one wave on an empty cache, admitted in the given order before the first token.

        Nothing else may be in flight; it also runs while interrupted or paused, which then hold back `generate` alone.
        The same requests under the same weights give the same tokens.
        """
        ...

    async def score(self, prompts: Sequence[Int32]) -> list[Scored]:
        """Log-probs of given tokens, each prompt int32[T] shorter than `generate.max_model_len`; as one wave."""
        ...

    async def interrupt(self) -> None:
        """End every open request with what it has; hold new ones back. Returns once all have ended."""
        ...

    async def drain(self) -> None:
        """Hold new requests back; returns once all open ones have ended by themselves."""
        ...

    async def pause(self, *, clear_cache: bool) -> None:
        """Hold every request where it is, and new ones with them: a weight route may now replace the weights. With
        `clear_cache` whatever is remembered of earlier tokens is computed anew afterwards, under the new weights."""
        ...

    async def resume(self) -> None:
        """Undo `interrupt`, `drain` and `pause`: what was held goes on.

        Raises:
            GenerationError: the weights were dropped by `sleep(2)` and nothing has replaced them.
        """
        ...

    async def cancel(self, request_ids: Collection[str]) -> None:
        """End these requests, each of a `generate` that has not returned, with what they have, `ended="interrupted"`;
        the others go on. One that is held back ends without a token, once it is not."""
        ...

    async def sleep(self, level: SleepLevel) -> None:
        """Give memory back, after `interrupt` or `drain`: 1 the KV cache, and the weights to the host's memory; 2 both
        dropped; 0 nothing."""
        ...

    async def wake(self, what: Literal["weights", "kv_cache"]) -> None:
        """Take back the memory that `sleep` gave, weights first. After `sleep(2)` the weights must be published before
        `resume`."""
        ...

    async def watch(self) -> None:
        """Never returns.

        Raises:
            GenerationError: the generator has died, whether or not anyone waits for it just then.
        """
        ...

    @property
    def served_version(self) -> int:
        """The version whose weights new tokens come from."""
        ...

    async def close(self) -> None:
        """Stop, leaving no process behind."""
        ...


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one optimizer attempt did. `skipped` is the reason why weights did not change, or empty.

    `metrics` holds the trainer's share of the metrics row, null where it could not be computed.
    """

    skipped: str = ""
    metrics: dict[str, float | None] = {}


class Trainer(Protocol):
    """Synchronous; always called from the training thread."""

    @property
    def version(self) -> int:
        """Updates applied so far."""
        ...

    def step(self, batch: Batch) -> StepResult:
        """One forward, backward and update.

        Raises:
            TrainingError: five steps in a row were not finite.
        """
        ...

    def offload(self, what: Literal["optimizer", "all"]) -> None:
        """Move the optimizer's state, or the parameters too, off the device."""
        ...

    def onload(self) -> None:
        """Take back onto the device whatever `offload` moved off it."""
        ...

    def save(self, folder: Path) -> None:
        """Write an HF folder that `transformers` and vLLM load as it is; atomic: whole or absent."""
        ...


class Score(msgspec.Struct, frozen=True):
    """Reward of one rollout and how it came about. `reward` null: no reward could be given (`timed_out`)."""

    reward: float | None
    extracted: str | None = None
    parts: dict[str, float] = {}
    timed_out: bool = False


class Scorer(Protocol):
    """Never blocks the loop."""

    async def score(self, task: Task, rollout: Rollout) -> Score:
        """Judge one finished rollout by its `text`.

        Raises:
            ScoringError: the reward function itself failed.
        """
        ...

    async def close(self) -> None:
        """Stop the workers."""
        ...


class WeightRoute(Protocol):
    """Brings the trainer's current weights to the engines it serves."""

    async def publish(self, number: int) -> Version:
        """Make the trainer's weights, as version `number`, what the engines serve. Their generators are paused."""
        ...
