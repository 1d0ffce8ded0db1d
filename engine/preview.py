"""`--preview N`: what the model makes of N training prompts, before anything is trained."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from engine import clock
from engine.config import Config
from engine.host import build_generator
from engine.loop import judge
from engine.observe.terminal import open_terminal, printable
from engine.protocols import Scorer
from engine.rollout.chat import Chat, open_chat
from engine.rollout.drive import Driver
from engine.tasks.source import TaskSource
from engine.train.model import materialise
from engine.types import Group, Lease, Sampling

_SHOWN = 2
_ENOUGH_MIXED = 0.2


def run_preview(config: Config, tasks: TaskSource, scorer: Scorer, count: int) -> None:
    """Print N prompts as the model sees them, samples with extracted answers and rewards, and what they promise."""
    folder = materialise(config.model.path)
    terminal = open_terminal("plain", steps=count, title="preview")
    # Kept if anything fails: the engine's log is in it.
    scratch = Path(tempfile.mkdtemp(prefix="farfield-preview-"))
    generator = build_generator(config, folder, scratch, terminal)

    async def preview() -> list[Group]:
        generate = config.generate
        chat = open_chat(config, folder)
        driver = Driver(generator, chat, run_seed=config.run.seed, worker="preview", engine_build="")
        sampling = Sampling(
            temperature=generate.temperature, max_new_tokens=generate.max_new_tokens, stop=generate.stop
        )
        try:
            await generator.open()
            leases = [
                Lease(lease_id=f"{order}", order=order, task=tasks.next(), group_size=generate.group_size,
                      sampling=sampling, served_version=0)
                for order in range(count)
            ]
            groups = [(await judge(scorer, group)).group for group in await driver.wave(leases)]
            for group in groups:
                _show(group, chat)
            return groups
        finally:
            await scorer.close()
            await generator.close()

    _summarise(clock.run(preview()))
    shutil.rmtree(scratch)


def _show(group: Group, chat: Chat) -> None:
    first = group.rollouts[0]
    prompt = chat.decode_all(first.token_ids[~first.trainable])
    print(f"\n{group.lease.task.task_id}  gold {group.lease.task.answer['answer']!r}\n{prompt}")
    for rollout in group.rollouts[:_SHOWN]:
        print(f"  | {printable(rollout.text)}\n  = extracted {rollout.extracted!r}, reward {rollout.reward}, "
              f"{rollout.length} tokens, {rollout.stop_reason}")


def _summarise(groups: list[Group]) -> None:
    rewards = [[rollout.reward for rollout in group.rollouts if rollout.reward is not None] for group in groups]
    flat = [reward for group in rewards for reward in group]
    if not flat:
        print("\nno completion got a reward: look at the samples and the scorer")
        return
    mixed = sum(len(group) > 1 and max(group) != min(group) for group in rewards) / len(groups)
    mean = sum(flat) / len(flat)
    cut = sum(rollout.stop_reason == "length" for group in groups for rollout in group.rollouts)
    print(f"\nmean reward {mean:.3f} over {len(flat)} completions; {mixed:.0%} of groups are mixed; "
          f"{cut / sum(len(group.rollouts) for group in groups):.0%} of completions hit generate.max_new_tokens")
    print(f"verdict: {_verdict(mean, mixed)}")


def _verdict(mean: float, mixed: float) -> str:
    if mixed >= _ENOUGH_MIXED:
        return "learnable: enough groups are mixed, and only those teach"
    if mean > 0.5:
        return "solved: too few groups are mixed; choose a harder task"
    return "too hard: too few groups are mixed; choose an easier task or a larger generate.group_size"
