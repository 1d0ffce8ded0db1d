"""The run, one stage per coroutine, under one TaskGroup.

    tasks                                                                       evals, checkpoints
      │                                                                                 ▲
      ▼                                                                                 │
    admit ──Lease──▶ generate ──Group──▶ score ──Verdict──▶ admission ──Group──▶ train ─┤
      ▲  waits for a    ▲  one request per   in worker      │ ready groups,        │      │
      │  free slot      │  rollout           processes      │ oldest first in      │   Batch ▼ in the training thread
      │                 │                                     the window           │   optimizer steps
      └──── slots ──────┴───────── switch or pause, publish, go on ◀───────────────┴──────┘

`admit` waits for a slot: slots return when a slice of steps is published. `generate` waits for leases; in `time_sliced`
also while a slice trains. `score` waits for groups. `train` waits for the groups of its next steps, which the window
must allow. A group whose prompt is too long, or whose verdict is a refusal, gives its slot back at once: another is
admitted in its place; so does one that is overdue when `train` selects. `train` is the finite clock: when it has made
its steps the other stages are cancelled. A stage that fails, or returns, ends the run.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from msgspec.structs import replace

from engine.admission import Admission
from engine.algorithms.health import verdicts
from engine.channel import Channel
from engine.clock import now, within
from engine.config import Config
from engine.errors import DataError, StalledError
from engine.observe.recorder import Recorder, Timings
from engine.protocols import Scorer, StepResult, Trainer, WeightRoute
from engine.rollout.drive import Driver
from engine.tasks.source import TaskSource
from engine.timeslice import Placement
from engine.train.pack import Packing, build_batch, has_signal, with_fate
from engine.train.thread import TrainingThread
from engine.types import Batch, Group, Lease, Rollout, Sampling, Task, Verdict, Version

# A task source that offers this many prompts in a row that do not fit has no others.
_MAX_REFUSED = 200
# With `schedule.refill`: how many times P groups a step may consume.
_MAX_REFILL = 3


@dataclass(kw_only=True)
class Run:
    """What the stages share. `save` and `evaluate` do what is due after a step: `evaluate` where a slice ends, on
    `served`, the version just published."""

    config: Config
    tasks: TaskSource
    admission: Admission
    driver: Driver
    scorer: Scorer
    trainer: Trainer
    thread: TrainingThread
    route: WeightRoute
    placement: Placement
    packing: Packing
    recorder: Recorder
    save: Callable[[int], Awaitable[None]]
    evaluate: Callable[[int, Version], Coroutine[Any, Any, None]]
    served: Version
    evaluation: asyncio.Task[None] | None = None
    """Under way, or the last one."""
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    dropped: list[Group] = field(default_factory=list[Group])
    """Since the last row."""
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
        order = await run.admission.admit(lambda: run.driver.served_version)
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
    run.dropped.append(replace(group, outcome="rejected", reason=reason))
    await run.admission.drop(group.lease.order)


async def generate(run: Run) -> None:
    """Leases become groups, one by one; at max_staleness 0 in waves."""
    if run.config.schedule.max_staleness == 0:
        await _generate_waves(run)

    async def one(lease: Lease) -> None:
        await _generated(run, await run.driver.group(lease))

    async with asyncio.TaskGroup() as open_groups:
        while True:
            open_groups.create_task(one(await run.leases.receive()))


async def _generate_waves(run: Run) -> None:
    """A step's worth as one repeatable wave; once it is scored, what replaces its dropped groups as the next."""
    wave: list[Lease] = []
    while True:
        size = await run.admission.next_wave([lease.order for lease in wave])
        wave = [await run.leases.receive() for _ in range(size)]
        for group in await run.driver.wave(wave):
            await _generated(run, group)


async def _generated(run: Run, group: Group) -> None:
    if not _has_gone(run, group):
        await run.groups.send(group)


def _has_gone(run: Run, group: Group) -> bool:
    """Whether the group was dropped for the time it took; it is then in the books."""
    gone = run.admission.gone(group.lease.order)
    if gone is not None:
        run.dropped.append(replace(group, outcome=gone.outcome, reason=gone.reason))
    return gone is not None


async def score(run: Run) -> None:
    """Groups get their rewards and wait in admission to be selected."""

    async def one(group: Group) -> None:
        verdict = await judge(run.scorer, group)
        if verdict.accepted and await run.admission.complete(verdict.group):
            return
        if not _has_gone(run, verdict.group):
            await reject(run, verdict.group, verdict.reason)

    async with asyncio.TaskGroup() as open_verdicts:
        while True:
            open_verdicts.create_task(one(await run.groups.receive()))


async def train(run: Run) -> int:
    """Groups become optimizer steps, and every slice of steps becomes the version that the generator serves."""
    async with asyncio.TaskGroup() as evaluations:
        return await _train(run, evaluations)


async def _train(run: Run, evaluations: asyncio.TaskGroup) -> int:
    step = 0
    while step < run.config.run.steps:
        timings, last = Timings(), _slice_end(run.config, step)
        # On shared devices the trainer takes over once a whole slice is ready; on its own ones it works as groups come.
        ready = await select(run, last - step if run.placement.exclusive else 1, timings)
        if not ready:
            break
        async with run.placement.training():
            generator_busy_s, served = run.driver.busy_s(), run.trainer.version
            while True:
                step += 1
                made = await _train_step(run, step, ready.pop(0), timings)
                await run.save(step)
                if step == last or run.stop.is_set():
                    break
                _book(run, made, timings, generator_busy_s)
                timings, generator_busy_s = Timings(), 0.0
                ready = ready or await select(run, 1, timings)
                if not ready:
                    return step
            if run.evaluation is not None:  # the generator serves the version that it is of until it has ended
                await run.evaluation
            if run.placement.exclusive or run.trainer.version != served:
                async with run.placement.publishing():
                    if run.trainer.version != served or run.placement.must_publish:
                        await _publish(run, timings)
            run.evaluation = evaluations.create_task(run.evaluate(step, run.served))
            if _evaluates_alone(run, step):
                await run.evaluation
        # Outside the slice: nothing holds back a wave, which begins as soon as its groups are admitted.
        await run.admission.published()
        timings.add("switch", run.placement.take_switch_s())
        _book(run, made, timings, generator_busy_s)
    return step


def _evaluates_alone(run: Run, step: int) -> bool:
    """Whether an evaluation holds everything. On devices of its own the trainer goes on meanwhile, but not after the
    last step, whose row tells the result, nor at staleness 0, whose waves want an idle generator."""
    schedule = run.config.schedule
    return run.placement.exclusive or schedule.max_staleness == 0 or step == run.config.run.steps


def _slice_end(config: Config, step: int) -> int:
    """The last step of the slice that begins after `step`. An evaluation ends one: it is of its own step's version."""
    ends = [step + config.schedule.steps_per_slice, config.run.steps]
    if config.evals.every:
        ends.append((step // config.evals.every + 1) * config.evals.every)
    return min(ends)


class _Made(NamedTuple):
    """A step that was made: everything for its row but the times."""

    step: int
    version_before: int
    version: int
    fates: list[Group]
    batch: Batch
    result: StepResult


async def _train_step(run: Run, step: int, groups: Sequence[Group], timings: Timings) -> _Made:
    version = run.trainer.version
    batch, fates = build_batch(groups, run.packing, version=version)
    with timings.measure("train"):
        training = run.thread.call(run.trainer.step, batch)
        result = await within(run.config.run.stage_timeout_s, "the training step", training)
    return _Made(step, version, run.trainer.version, fates, batch, result)


async def _publish(run: Run, timings: Timings) -> None:
    with timings.measure("publish"):
        publishing = run.route.publish(run.trainer.version)
        run.served = await within(run.config.run.stage_timeout_s, "the weight update", publishing)
    run.recorder.published(run.served)


def _book(run: Run, made: _Made, timings: Timings, generator_busy_s: float) -> None:
    """The row of a step. Requests that were open while the trainer had the generator's devices were held back."""
    open_s = run.driver.busy_s()
    left = sorted([*made.fates, *run.dropped], key=lambda group: group.lease.order)
    run.dropped.clear()
    run.recorder.step(
        made.step, made.version_before, made.version, left, made.batch, made.result, timings,
        generator_busy_s + (0.0 if run.placement.exclusive else open_s), run.placement.measured,
    )
    run.recorder.judged(made.step, verdicts(made.result.metrics), made.result.metrics)


async def select(run: Run, steps: int, timings: Timings) -> list[list[Group]]:
    """The groups of the next `steps` steps, lowest numbers first; nothing when the run was asked to stop meanwhile."""
    started, batches = now(), list[list[Group]]()
    while len(batches) < steps:
        groups = await _select_step(run, run.trainer.version + len(batches))
        if groups is None:
            return []
        batches.append(groups)
    blocked_s = run.admission.blocked_s()
    timings.add("wait_stale", blocked_s)
    timings.add("wait_rollouts", now() - started - blocked_s)
    return batches


async def _select_step(run: Run, version: int) -> list[Group] | None:
    """One step's groups. With `schedule.refill` those without a signal are dropped for others, up to a limit: the rest
    stays, so that every step holds as many slots until it is published, which the staleness bound relies on."""
    wanted, chosen = run.config.schedule.groups_per_step, list[Group]()
    others = wanted * (_MAX_REFILL - 1) if run.config.schedule.refill else 0
    while len(chosen) < wanted:
        fresh: list[Group] = []
        for _ in range(wanted - len(chosen)):
            group = await _next_ready(run, version)
            if group is None:
                return None
            fresh.append(group)
        silent = {group.lease.order: group for group in fresh if others and not has_signal(group)}
        replaced = dict(itertools.islice(silent.items(), others))
        others -= len(replaced)
        # All at once: what replaces them at max_staleness 0 is one wave.
        await run.admission.drop(*replaced)
        run.dropped += [with_fate(group, signal=False) for group in replaced.values()]
        chosen += [group for group in fresh if group.lease.order not in replaced]
    return chosen


async def _next_ready(run: Run, version: int) -> Group | None:
    """None when the run was asked to stop meanwhile.

    Raises:
        StalledError: no group became ready within `run.stage_timeout_s`.
    """
    limit_s = run.config.run.stage_timeout_s
    await run.admission.drop_stale(version)
    while True:
        # An evaluation holds the generator, within limits of its own.
        held = run.evaluation is not None and not run.evaluation.done()
        if not held:
            await _let_go(run)
        ready = asyncio.ensure_future(run.admission.select())
        stopping = asyncio.ensure_future(run.stop.wait())
        try:
            await asyncio.wait({ready, stopping}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            if stopping.done():
                return None
            if not ready.done() and held:
                continue
            if not ready.done():
                raise StalledError(
                    f"generation or scoring: no group became ready within {limit_s} s, "
                    f"{run.admission.open_groups} are open",
                    remedy="look at engine.log in the run folder, or raise run.stage_timeout_s",
                )
            if group := await ready:
                return group
        finally:
            ready.cancel()
            stopping.cancel()


async def _let_go(run: Run) -> None:
    """Groups that took too long leave: from the buffer at once, from generation with what they have. Before the trainer
    begins: in a slice requests are held back, and such a one could not be ended."""
    for gone in run.admission.take_overdue():
        if gone.group is not None:
            run.dropped.append(replace(gone.group, outcome=gone.outcome, reason=gone.reason))
        else:
            await run.driver.cancel(gone.number)


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
