"""Held-out questions, answered greedily and by sampling, through the generator that trains.

Sampled accuracy is the mean over questions of the share of right samples, pass@k the share of questions with at least
one right among k = SAMPLES. Intervals are over questions, which are the independent units.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from engine.clock import within
from engine.config import Config
from engine.loop import judge
from engine.observe.estimate import Estimate, estimate
from engine.observe.metrics import Value
from engine.observe.terminal import Terminal
from engine.protocols import Generator, Scorer
from engine.rollout.chat import Chat
from engine.rollout.drive import Driver
from engine.tasks.source import TaskSource
from engine.types import Group, Lease, Sampling, Task

SAMPLES = 8
# Questions asked at once: progress shows, and a stop need not wait for the whole evaluation.
_WAVE = 32
# The engine's seeds depend on it alone, so that every version meets the same randomness.
_SEED = 20_000


class Answer(msgspec.Struct, frozen=True):
    """One question with all completions: greedy first."""

    task_id: str
    question: str
    completions: list[str]
    extracted: list[str | None]
    rewards: list[float | None]


class Result(msgspec.Struct, frozen=True):
    """One env's part of held_out.json. `entropy` is in nats per sampled token: the mean of -log p."""

    version: int
    sampled: Estimate
    greedy: Estimate
    pass_at_8: Estimate
    entropy: float
    truncated: float
    answers: list[Answer]


async def evaluate(
    *, generator: Generator, chat: Chat, tasks: TaskSource, scorer: Scorer, config: Config, folder: Path,
    terminal: Terminal,
) -> dict[str, Value]:
    """Evaluate the served version on every held-out question; see `engine.host.Evaluation`.

    Raises:
        DataError: a question's prompt is too long. Said before the first wave, and so before training: without that
            question another thing would be measured.
    """
    driver = Driver(generator, chat, run_seed=_SEED, worker="evals", engine_build="",
                    max_in_flight=config.generate.max_in_flight)
    questions = tasks.held_out(config.evals.limit)
    for question in questions:
        chat.encode(question)
    sampling = msgspec.structs.replace(Sampling.of(config.generate), temperature=config.evals.temperature)
    version = generator.served_version
    groups: list[Group] = []
    for start in range(0, len(questions), _WAVE):
        terminal.status(f"evaluating version {version}: {start}/{len(questions)} questions")
        leases = _leases(questions[start : start + _WAVE], sampling, version)
        wave = await within(config.run.stage_timeout_s, "an evaluation wave", driver.wave(leases))
        groups += [(await judge(scorer, group)).group for group in wave]
    greedy, sampled = groups[0::2], groups[1::2]
    results = {
        label: summarise(
            version,
            [group for group in greedy if group.lease.task.env == label],
            [group for group in sampled if group.lease.task.env == label],
        )
        for label in dict.fromkeys(task.env for task in questions)
    }
    _write(folder, results)
    for label, result in results.items():
        terminal.note(describe(label, result))
    return {f"eval/held_out/{label}": result.sampled.mean for label, result in results.items()}


def _write(folder: Path, results: dict[str, Result]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "held_out.json").write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1))


def _leases(questions: Sequence[Task], sampling: Sampling, version: int) -> list[Lease]:
    """Two for each question in turn: one greedy completion, and SAMPLES sampled ones."""
    kinds = ((1, msgspec.structs.replace(sampling, temperature=0.0)), (SAMPLES, sampling))
    return [
        Lease(lease_id=f"held-out/{size}/{task.task_id}", order=0, task=task, group_size=size, sampling=chosen,
              served_version=version)
        for task in questions
        for size, chosen in kinds
    ]


def summarise(version: int, greedy: Sequence[Group], sampled: Sequence[Group]) -> Result:
    """Estimates over questions; see `Rollout.right`."""
    rollouts = [rollout for group in sampled for rollout in group.rollouts]
    logprobs = np.concatenate([rollout.logprobs[rollout.trainable] for rollout in rollouts])
    return Result(
        version=version,
        sampled=estimate([float(np.mean(_right(group))) for group in sampled]),
        greedy=estimate([float(np.mean(_right(group))) for group in greedy]),
        pass_at_8=estimate([float(any(_right(group))) for group in sampled]),
        entropy=float(-logprobs.mean()),
        truncated=float(np.mean([rollout.stop_reason == "length" for rollout in rollouts])),
        answers=[_answer(one, many) for one, many in zip(greedy, sampled, strict=True)],
    )


def describe(label: str, result: Result) -> str:
    """One line for people."""

    def part(name: str, value: Estimate) -> str:
        return f"{name} {value.mean:.3f} [{value.low:.3f}, {value.high:.3f}]"

    return (
        f"held-out {label}, version {result.version}, {result.sampled.count} questions: "
        f"{part('sampled', result.sampled)}, {part('greedy', result.greedy)}, {part('pass@8', result.pass_at_8)}, "
        f"entropy {result.entropy:.3f}"
    )


def _right(group: Group) -> list[bool]:
    return [rollout.right for rollout in group.rollouts]


def _answer(greedy: Group, sampled: Group) -> Answer:
    rollouts = (*greedy.rollouts, *sampled.rollouts)
    return Answer(
        task_id=greedy.lease.task.task_id,
        question=greedy.lease.task.messages[-1].content,
        completions=[rollout.text for rollout in rollouts],
        extracted=[rollout.extracted for rollout in rollouts],
        rewards=[rollout.reward for rollout in rollouts],
    )
