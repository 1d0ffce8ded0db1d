"""`--preview N`: what the model makes of N training prompts, before anything is trained."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from engine import clock
from engine.config import Config, TaskSection
from engine.errors import DataError
from engine.host import build_generator
from engine.loop import judge
from engine.observe.estimate import Estimate, estimate
from engine.observe.terminal import open_terminal, printable
from engine.protocols import Scorer
from engine.rollout.chat import Chat, open_chat
from engine.rollout.drive import Driver
from engine.tasks.source import TaskSource
from engine.train.model import materialise
from engine.types import Group, Lease, Rollout, Sampling, Task

_SHOWN = 2
_ENOUGH_MIXED = 0.2
_MANY_CUT = 0.5
_MANY_UNANSWERED = 0.2


class Outlook(msgspec.Struct, frozen=True):
    """What the groups of one env promise. `passed`: the share of right completions, one prompt one vote; `mixed`: of
    groups in which some are right and some wrong, or whose rewards differ where none is; the others: of completions."""

    passed: Estimate
    mean_reward: float
    mixed: float
    cut: float
    unanswered: float


def run_preview(config: Config, tasks: TaskSource, scorer: Scorer, count: int) -> None:
    """Print N prompts as the model sees them, samples with extracted answers and rewards, and what they promise."""
    folder = materialise(config.model.path)
    chat = open_chat(config, folder)
    fitting = _fitting([tasks.next() for _ in range(count)], chat)
    terminal = open_terminal("plain", steps=count, title="preview")
    # Kept if anything fails: the engine's log is in it.
    scratch = Path(tempfile.mkdtemp(prefix="farfield-preview-"))
    generator = build_generator(config, folder, scratch, terminal)

    async def preview() -> list[Group]:
        generate = config.generate
        driver = Driver(generator, chat, run_seed=config.run.seed, worker="preview", engine_build="",
                        max_in_flight=generate.max_in_flight)
        sampling = Sampling.of(generate)
        try:
            await generator.open()
            leases = [
                Lease(lease_id=f"{order}", order=order, task=task, group_size=generate.group_size, sampling=sampling,
                      served_version=0)
                for order, task in enumerate(fitting)
            ]
            async with asyncio.TaskGroup() as engine:
                watching = engine.create_task(generator.watch())
                groups = [(await judge(scorer, group)).group for group in await driver.wave(leases)]
                watching.cancel()
            for group in groups:
                _show(group, chat)
            return groups
        finally:
            await scorer.close()
            await generator.close()

    groups = clock.run(preview())
    for section in config.tasks:
        if own := [group for group in groups if group.lease.task.env == section.label]:
            print("", *_summary(section, own), sep="\n")
    shutil.rmtree(scratch)


def _fitting(drawn: Sequence[Task], chat: Chat) -> list[Task]:
    """Those whose prompts fit; the others are named.

    Raises:
        DataError: none fits.
    """
    fitting: list[Task] = []
    for task in drawn:
        if reason := chat.refusal(task):
            print(f"task {task.task_id} would be rejected: {reason}")
        else:
            fitting.append(task)
    if not fitting:
        raise DataError(
            f"none of {len(drawn)} prompts fits",
            remedy="raise generate.max_model_len, or lower generate.max_new_tokens",
        )
    return fitting


def _show(group: Group, chat: Chat) -> None:
    first = group.rollouts[0]
    prompt = chat.decode_all(first.token_ids[~first.trainable])
    print(f"\n{group.lease.task.task_id}  gold {group.lease.task.answer.get('answer')!r}\n{prompt}")
    for rollout in group.rollouts[:_SHOWN]:
        print(f"  | {printable(rollout.text)}\n  = extracted {rollout.extracted!r}, reward {_reward(rollout)}, "
              f"{rollout.length} tokens, {rollout.stop_reason}")


def _reward(rollout: Rollout) -> str:
    """With why there is none."""
    if rollout.reward is not None:
        return str(rollout.reward)
    return f"none ({', '.join(rollout.reward_parts) or 'truncated'})"


def _summary(section: TaskSection, groups: Sequence[Group]) -> list[str]:
    """What the groups of one env promise, line by line."""
    found = outlook(groups)
    if found is None:
        return [f"{section.label}: no completion got a reward: look at the samples and the scorer"]
    passed = found.passed
    lines = [
        f"{section.label}: pass rate {passed.mean:.3f} [{passed.low:.3f}, {passed.high:.3f}] over {passed.count} "
        f"prompts, mean reward {found.mean_reward:.3f}; {found.mixed:.0%} of groups are mixed; "
        f"{found.cut:.0%} of completions are cut at generate.max_new_tokens"
    ]
    if found.cut > _MANY_CUT:
        lines.append("raise generate.max_new_tokens: more than half of the completions are cut")
    # Other scorers do not look at the extracted answer.
    if "exact" in section.scores and found.unanswered > _MANY_UNANSWERED:
        lines.append(f"the answer was not found in {found.unanswered:.0%}: check tasks.answer or the prompt")
    return [*lines, f"verdict: {_verdict(found.mean_reward, found.mixed)}"]


def outlook(groups: Sequence[Group]) -> Outlook | None:
    """None when no completion got a reward."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = [[rollout.reward for rollout in group.rollouts if rollout.reward is not None] for group in groups]
    flat = [reward for group in rewards for reward in group]
    if not flat:
        return None
    right = [[rollout.right for rollout in group.rollouts] for group in groups]
    # Penalties alone mix every group; a reward that is never a right answer's is all that there is to go by.
    scored = [[rollout.right for rollout in group.rollouts if rollout.reward is not None] for group in groups]
    told_apart = scored if any(map(any, right)) else rewards
    return Outlook(
        passed=estimate([sum(members) / len(members) for members in right]),
        mean_reward=sum(flat) / len(flat),
        mixed=sum(len(members) > 1 and max(members) != min(members) for members in told_apart) / len(groups),
        cut=sum(rollout.stop_reason == "length" for rollout in rollouts) / len(rollouts),
        unanswered=sum(rollout.extracted is None for rollout in rollouts) / len(rollouts),
    )


def _verdict(mean: float, mixed: float) -> str:
    if mixed >= _ENOUGH_MIXED:
        return "learnable: enough groups are mixed, and only those teach"
    if mean > 0.5:
        return "solved: too few groups are mixed; choose a harder task"
    return "too hard: too few groups are mixed; choose an easier task or a larger generate.group_size"
