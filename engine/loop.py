"""The run, one stage per coroutine, under one TaskGroup.

    tasks                                                                       evals, checkpoints
      │                                                                                 ▲
      ▼                                                                                 │
    admit ──Lease──▶ generate ──Group──▶ score ──Verdict──▶ admission ──Group──▶ train ─┤
      ▲  waits for a    │  one request per   in worker         ready groups,     │      │
      │  free slot      │  rollout, cut by   processes         oldest first      │   Batch ▼ in the training thread
      │                 │  every slice                                           │   optimizer step
      └──── slots ──────┴───────────── interrupt, publish, resume ◀──────────────┴──────┘

`admit` waits for a slot: slots return when a step is published. `generate` waits for leases, and while a slice trains.
`score` waits for groups. `train` waits for P groups that the window allows. A group whose prompt is too long, or whose
verdict is a refusal, gives its slot back at once: another is admitted in its place. `train` is the finite clock: when
it has made its steps the other stages are cancelled. A stage that fails, or returns, ends the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from engine.admission import Admission
from engine.algorithms.health import verdicts
from engine.channel import Channel
from engine.clock import within
from engine.config import Config
from engine.errors import DataError, StalledError
from engine.observe.recorder import Recorder, Timings
from engine.protocols import Scorer, Trainer, WeightRoute
from engine.rollout.drive import Driver
from engine.tasks.source import TaskSource
from engine.timeslice import TimeSlice
from engine.train.pack import Packing, build_batch
from engine.train.thread import TrainingThread
from engine.types import Group, Lease, Rollout, Sampling, Task, Verdict

# A task source that offers this many prompts in a row that do not fit has no others.
_MAX_REFUSED = 200


@dataclass(kw_only=True)
class Run:
    """What the stages share. `after_step` evaluates and saves what is due; it runs while no token is generated."""

    config: Config
    tasks: TaskSource
    admission: Admission
    driver: Driver
    scorer: Scorer
    trainer: Trainer
    thread: TrainingThread
    route: WeightRoute
    slice: TimeSlice
    packing: Packing
    recorder: Recorder
    after_step: Callable[[int, Timings], Awaitable[None]]
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    rejected: list[Group] = field(default_factory=list[Group])
    """Dropped since the last row."""
    leases: Channel[Lease] = field(init=False)
    groups: Channel[Group] = field(init=False)

    def __post_init__(self) -> None:
        self.leases = Channel(self.admission.slots)
        self.groups = Channel(self.admission.slots)


async def run_stages(run: Run) -> int:
    """Train until the steps are made or `run.stop` is set; returns the number of steps made."""
    async with asyncio.TaskGroup() as stages:
        others = [
            stages.create_task(_endless(stage), name=stage.__name__)
            for stage in (admit(run), generate(run), score(run), run.recorder.watch_lag())
        ]
        # A task like the others: the first failure is then the first in the group, whoever's it is.
        steps = await stages.create_task(train(run), name="train")
        for task in others:
            task.cancel()
    return steps


async def admit(run: Run) -> None:
    """Tasks become leases as slots come free."""
    generate = run.config.generate
    sampling = Sampling.of(generate)
    refused_in_a_row = 0
    while True:
        order = await run.admission.admit()
        lease = Lease(
            lease_id=f"{order:07d}",
            order=order,
            task=run.tasks.next(),
            group_size=generate.group_size,
            sampling=sampling,
            served_version=run.driver.served_version,
        )
        run.recorder.leased(lease.task.env)
        reason = run.driver.refusal(lease.task)
        if not reason:
            refused_in_a_row = 0
            await run.leases.send(lease)
            continue
        await reject(run, Group(lease=lease, rollouts=(), admitted_version=lease.served_version), reason)
        refused_in_a_row += 1
        if refused_in_a_row == _MAX_REFUSED:
            raise DataError(
                f"the prompts of {_MAX_REFUSED} tasks in a row do not fit; task {lease.task.task_id}: {reason}",
                remedy="raise generate.max_model_len, or lower generate.max_new_tokens",
            )


async def reject(run: Run, group: Group, reason: str) -> None:
    """The group leaves the pipeline untrained, for the next row's books."""
    run.rejected.append(replace(group, outcome="rejected", reason=reason))
    await run.admission.drop(group.lease.order)


async def generate(run: Run) -> None:
    """Leases become groups, one by one; at max_staleness 0 in waves."""
    if run.config.schedule.max_staleness == 0:
        await _generate_waves(run)

    async def one(lease: Lease) -> None:
        await run.groups.send(await run.driver.group(lease))

    async with asyncio.TaskGroup() as open_groups:
        while True:
            open_groups.create_task(one(await run.leases.receive()))


async def _generate_waves(run: Run) -> None:
    """A step's worth as one repeatable wave; once it is scored, what replaces its rejected groups as the next."""
    wave: list[Lease] = []
    while True:
        size = await run.admission.next_wave([lease.order for lease in wave])
        wave = [await run.leases.receive() for _ in range(size)]
        for group in await run.driver.wave(wave):
            await run.groups.send(group)


async def score(run: Run) -> None:
    """Groups get their rewards and wait in admission to be selected."""

    async def one(group: Group) -> None:
        verdict = await judge(run.scorer, group)
        if verdict.accepted:
            await run.admission.complete(verdict.group)
        else:
            await reject(run, verdict.group, verdict.reason)

    async with asyncio.TaskGroup() as open_verdicts:
        while True:
            open_verdicts.create_task(one(await run.groups.receive()))


async def train(run: Run) -> int:
    """Groups become optimizer steps, and steps become the version that the generator serves."""
    limit_s = run.config.run.stage_timeout_s
    for step in range(1, run.config.run.steps + 1):
        timings = Timings()
        with timings.measure("wait_rollouts"):
            groups = await select(run)
        if groups is None:
            return step - 1
        async with run.slice.training():
            generator_busy_s = run.driver.busy_s()
            version_before = run.trainer.version
            batch, fates = build_batch(groups, run.packing, version=version_before)
            with timings.measure("train"):
                result = await within(limit_s, "the training step", run.thread.call(run.trainer.step, batch))
            if not result.skipped:
                with timings.measure("publish"):
                    version = await within(limit_s, "the weight update", run.route.publish(run.trainer.version))
                run.recorder.published(version)
            await run.after_step(step, timings)
            run.driver.busy_s()  # not counted: what was open was held back
        timings.add("switch", run.slice.switch_s)
        # Outside the slice: nothing holds back a wave, which begins as soon as its groups are admitted.
        await run.admission.published()
        left = sorted([*fates, *run.rejected], key=lambda group: group.lease.order)
        run.rejected.clear()
        run.recorder.step(
            step, version_before, run.trainer.version, left, batch, result, timings, generator_busy_s
        )
        run.recorder.judged(step, verdicts(result.metrics), result.metrics)
    return run.config.run.steps


async def select(run: Run) -> list[Group] | None:
    """The next step's groups, lowest numbers first; None when the run was asked to stop meanwhile.

    Raises:
        StalledError: no group became ready within `run.stage_timeout_s`.
    """
    groups: list[Group] = []
    limit_s = run.config.run.stage_timeout_s
    stopping = asyncio.ensure_future(run.stop.wait())
    try:
        while len(groups) < run.config.schedule.groups_per_step:
            ready = asyncio.ensure_future(run.admission.select())
            try:
                await asyncio.wait({ready, stopping}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
                if stopping.done():
                    return None
                if not ready.done():
                    raise StalledError(
                        f"generation or scoring: no group became ready within {limit_s} s, "
                        f"{run.admission.open_groups} are open",
                        remedy="look at engine.log in the run folder, or raise run.stage_timeout_s",
                    )
                groups.append(await ready)
            finally:
                ready.cancel()
        return groups
    finally:
        stopping.cancel()


async def judge(scorer: Scorer, group: Group) -> Verdict:
    """Score every member; a member without a verdict keeps a null reward and is left out of the baseline."""
    async with asyncio.TaskGroup() as judging:
        members = [judging.create_task(_judged(scorer, group.lease.task, rollout)) for rollout in group.rollouts]
    return Verdict(group=replace(group, rollouts=tuple(member.result() for member in members)))


async def _judged(scorer: Scorer, task: Task, rollout: Rollout) -> Rollout:
    score = await scorer.score(task, rollout)
    parts = score.parts | ({"timed_out": 1.0} if score.timed_out else {})
    return replace(rollout, reward=score.reward, extracted=score.extracted, reward_parts=parts)


async def _endless(stage: Coroutine[Any, Any, None]) -> None:
    """A stage ends by being cancelled; one that returns has lost its work."""
    await stage
    raise RuntimeError(f"stage {stage.__name__} returned")
