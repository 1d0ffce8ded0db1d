"""Supervised steps: what an assistant has said in given chats is learned by the same trainer, without a generator.

    tasks ──chat──▶ supervise ──Batch──▶ trainer
"""

from __future__ import annotations

from msgspec.structs import replace

from engine.clock import within
from engine.errors import DataError
from engine.loop import Run
from engine.observe.recorder import Timings
from engine.rollout.chat import Chat
from engine.train.pack import supervised_batch
from engine.types import Rollout

# Then the limit is wrong, not the chats.
_MAX_REFUSED = 200


async def supervise(run: Run, chat: Chat) -> int:
    """One optimizer step after the other on the next `schedule.groups_per_step` chats; returns the number of steps made
    when they all are, or when the run was asked to stop."""
    limit_s = run.config.run.stage_timeout_s
    await run.placement.stop_generating()
    for step in range(1, run.config.run.steps + 1):
        if run.stop.is_set():
            return step - 1
        timings = Timings()
        chats = [_next(run, chat) for _ in range(run.config.schedule.groups_per_step)]
        batch = supervised_batch(chats, run.packing)
        version_before = run.trainer.version
        with timings.measure("train"):
            result = await within(limit_s, "the training step", run.thread.call(run.trainer.step, batch))
        # Nobody sampled the tokens, so there is no policy to differ from.
        metrics = {key: value for key, value in result.metrics.items() if not key.startswith("mismatch/")}
        result = replace(result, metrics=metrics | {"tokens/trained": batch.num_tokens})
        await run.save(step)
        run.recorder.step(step, version_before, run.trainer.version, (), batch, result, timings, 0.0, {})
    return run.config.run.steps


def _next(run: Run, chat: Chat) -> Rollout:
    """The next chat that fits into `generate.max_model_len`; longer ones are left out.

    Raises:
        DataError: none of many does.
    """
    limit = run.config.generate.max_model_len
    for _ in range(_MAX_REFUSED):
        task = run.tasks.next()
        rollout = chat.conversation(task)
        if len(rollout.token_ids) <= limit:
            return rollout
        run.recorder.events.write("chat_left_out", task=task.task_id, tokens=len(rollout.token_ids), fit=limit)
    raise DataError(
        f"{_MAX_REFUSED} chats in a row have more than {limit} tokens", remedy="raise generate.max_model_len"
    )
