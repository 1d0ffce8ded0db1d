"""The stages together: fake generator, stubs for the rest, simulated time; at the end once in real time."""

from __future__ import annotations

import asyncio
import functools
import json
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hand_made import config, lease, packing, task
from msgspec.structs import replace

from engine import clock, loop
from engine.admission import Admission
from engine.clock import now, run_virtual
from engine.config import ScheduleSection
from engine.errors import DataError, StalledError
from engine.generate.fake import FakeGenerator, geometric
from engine.loop import Run, run_stages
from engine.observe.metrics import LEFT_AS, Row, read_groups
from engine.observe.recorder import Recorder, Timings
from engine.observe.terminal import SilentTerminal
from engine.protocols import Score, SleepLevel, StepResult
from engine.rollout.chat import Chat
from engine.rollout.drive import Driver
from engine.timeslice import Placement, Split, TimeSlice
from engine.train.thread import TrainingThread
from engine.types import Batch, Group, Rollout, Segment, SegmentRequest, Task, Verdict, Version

PER_STEP, GROUP_SIZE = 2, 2


class Tasks:
    """An endless list."""

    def __init__(self) -> None:
        self.given = 0

    def next(self) -> Task:
        self.given += 1
        return task(self.given)


class CountingTrainer:
    """Counts steps; changes no weights without a signal."""

    def __init__(self) -> None:
        self.version = 0
        self.batches: list[Batch] = []

    def step(self, batch: Batch) -> StepResult:
        self.batches.append(batch)
        if not batch.num_tokens:
            return StepResult(skipped="no group has a signal")
        self.version += 1
        return StepResult(metrics={"loss": 0.5})


class InlineThread:
    """Calls take `takes_s` of simulated time on the loop itself."""

    def __init__(self, takes_s: float = 0.0) -> None:
        self.takes_s = takes_s

    async def call(self, function: Callable[..., Any], *args: Any) -> Any:
        await asyncio.sleep(self.takes_s)
        return function(*args)


class Alternating:
    """Every second member of a group is right."""

    async def score(self, task: Task, rollout: Rollout) -> Score:
        await asyncio.sleep(0.1)
        return Score(float(rollout.index_in_group % 2))


class NoVerdict:
    """Nothing gets a reward."""

    async def score(self, task: Task, rollout: Rollout) -> Score:
        return Score(None, timed_out=True)


class LabelRoute:
    """The version is a label, which takes `takes_s` to be known."""

    def __init__(self, generator: FakeGenerator, takes_s: float = 0.5) -> None:
        self._generator = generator
        self._takes_s = takes_s
        self.published: list[int] = []

    async def publish(self, number: int) -> Version:
        await asyncio.sleep(self._takes_s)
        self._generator.set_version(number)
        self.published.append(number)
        return Version(number=number, digest="")


async def nothing_due(step: int, version: Version) -> None:
    """No evaluation."""


async def nothing_to_save(step: int) -> None:
    """No checkpoint."""


class Hanging(FakeGenerator):
    """From the third request on nothing comes back."""

    async def generate(self, request: SegmentRequest) -> Segment:
        if self.num_requests == 2:
            await asyncio.Event().wait()
        return await super().generate(request)

    async def wave(self, requests: Sequence[SegmentRequest]) -> list[Segment]:
        await asyncio.Event().wait()
        raise AssertionError


@functools.cache
def open_chat(model: Path) -> Chat:
    return Chat(model, max_prompt_tokens=64)


def generator(kind: type[FakeGenerator] = FakeGenerator) -> FakeGenerator:
    """A token a second, about eight a rollout."""
    return kind(eos_token_id=256, length=lambda request: geometric(request, 8.0), step_s=1.0)


@dataclass(kw_only=True)
class Parts:
    """What a run is put together from; a test changes some before `run`."""

    folder: Path
    model: Path
    max_staleness: int = 0
    steps: int = 5
    limit_s: float = 600.0
    generator: FakeGenerator = field(default_factory=generator)
    tasks: Any = field(default_factory=Tasks)
    trainer: Any = field(default_factory=CountingTrainer)
    thread: Any = field(default_factory=InlineThread)
    scorer: Any = field(default_factory=Alternating)
    save: Callable[[int], Awaitable[None]] = nothing_to_save
    evaluate: Callable[[int, Version], Coroutine[Any, Any, None]] = nothing_due
    route: Any = None
    schedule: dict[str, Any] = field(default_factory=dict[str, Any])
    evals_every: int = 0
    sleep_level: SleepLevel = 0

    def __post_init__(self) -> None:
        self.route = self.route or LabelRoute(self.generator)
        self.chat = open_chat(self.model)

    def run(self) -> Run:
        settings = config(
            run={"steps": self.steps, "stage_timeout_s": self.limit_s},
            generate={"group_size": GROUP_SIZE, "max_new_tokens": 20, "temperature": 0.6, "stop": ["no such"]},
            schedule={"groups_per_step": PER_STEP, "max_staleness": self.max_staleness} | self.schedule,
            evals={"every": self.evals_every},
        )
        schedule = settings.schedule
        self.made = Run(
            config=settings,
            tasks=self.tasks,
            admission=Admission(
                groups_per_step=PER_STEP, max_staleness=self.max_staleness, total=self.steps * PER_STEP,
                overdue=schedule.overdue, max_wait_s=schedule.max_wait_s,
            ),
            driver=Driver(self.generator, self.chat, run_seed=1, worker="here", engine_build="fake",
                          max_in_flight=256),
            scorer=self.scorer,
            trainer=self.trainer,
            thread=self.thread,
            route=self.route,
            placement=self.placement(schedule),
            packing=packing(micro_batch_tokens=4096, temperature=settings.generate.temperature),
            recorder=Recorder(
                self.folder, SilentTerminal(), envs=["sums"], samples=1, tensorboard=False, micro_batch_tokens=4096
            ),
            save=self.save,
            evaluate=self.evaluate,
            served=Version(number=0, digest=""),
        )
        return self.made

    def placement(self, schedule: ScheduleSection) -> Placement:
        if schedule.placement == "split":
            return Split(self.generator, in_flight=schedule.in_flight, limit_s=60.0)
        return TimeSlice(
            self.generator, self.thread.call, level=self.sleep_level, in_flight=schedule.in_flight, offload="none",
            limit_s=60.0,
        )

    async def stages(self) -> int:
        return await run_stages(self.run())

    @property
    def rows(self) -> list[Row]:
        return self.made.recorder.rows

    def groups(self, step: int) -> list[Group]:
        return list(read_groups(self.folder / "rollouts" / f"step-{step:06d}.jsonl.zst"))


@pytest.fixture
def parts(tmp_path: Path, tiny_folder: Path) -> Iterator[Callable[..., Parts]]:
    made: list[Parts] = []

    def make(**changed: Any) -> Parts:
        made.append(Parts(folder=tmp_path, model=tiny_folder, **changed))
        return made[-1]

    yield make
    for one in made:
        one.made.recorder.close()


def leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in leaves(inner)]
    return [error]


def staleness(groups: Sequence[Group], version_before: int) -> int:
    """From the spans alone: the version before the step less the oldest token's."""
    spans = [span for group in groups for one in group.rollouts for span in one.version_spans]
    return version_before - min(version for _, version in spans)


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_five_steps(parts: Callable[..., Parts], max_staleness: int) -> None:
    made = parts(max_staleness=max_staleness, thread=InlineThread(3.0))
    assert run_virtual(made.stages()) == 5
    assert [row["step"] for row in made.rows] == [row["version"] for row in made.rows] == [1, 2, 3, 4, 5]
    assert [row["skipped"] for row in made.rows] == [None] * 5
    assert made.route.published == [1, 2, 3, 4, 5]
    assert len(made.trainer.batches) == 5
    assert [group.lease.order for step in range(1, 6) for group in made.groups(step)] == list(range(10))
    assert made.tasks.given == 10

    ages = [staleness(made.groups(step), step - 1) for step in range(1, 6)]
    assert max(ages) == max_staleness
    assert min(ages) == 0
    assert [row["staleness/max"] for row in made.rows] == ages
    since_admission = [step - 1 - group.admitted_version for step in range(1, 6) for group in made.groups(step)]
    assert since_admission == [0] * PER_STEP + [max_staleness] * 4 * PER_STEP
    assert sum(row["groups/leased"] for row in made.rows) == 10  # pyright: ignore


def test_max_staleness_0_asks_for_waves_and_above_it_for_single_rollouts(parts: Callable[..., Parts]) -> None:
    asked: list[int] = []

    class Counting(FakeGenerator):
        async def generate(self, request: SegmentRequest) -> Segment:
            asked.append(1)
            return await super().generate(request)

        async def wave(self, requests: Sequence[SegmentRequest]) -> list[Segment]:
            asked.append(len(requests))
            return await super().wave(requests)

    run_virtual(parts(generator=generator(Counting)).stages())
    assert asked == [PER_STEP * GROUP_SIZE] * 5
    asked.clear()
    run_virtual(parts(generator=generator(Counting), max_staleness=1).stages())
    assert set(asked) == {1}


def test_every_token_of_a_group_is_trained(parts: Callable[..., Parts]) -> None:
    made = parts()
    run_virtual(made.stages())
    for step in range(1, 6):
        groups, batch = made.groups(step), made.trainer.batches[step - 1]
        assert {group.outcome for group in groups} == {"trained"}
        assert [one.reward for group in groups for one in group.rollouts] == [0.0, 1.0] * PER_STEP
        assert batch.num_tokens == sum(one.length for group in groups for one in group.rollouts)
        assert batch.temperature == 0.6
        for group in groups:
            sampling = group.lease.sampling
            assert (sampling.temperature, sampling.max_new_tokens, sampling.stop) == (0.6, 20, ("no such",))
            assert (group.lease.group_size, group.lease.served_version) == (GROUP_SIZE, step - 1)
            assert group.admitted_version == step - 1


def test_slices_cut_rollouts_which_go_on_under_the_next_version(parts: Callable[..., Parts]) -> None:
    made = parts(max_staleness=1)
    run_virtual(made.stages())
    rollouts = [one for step in range(1, 6) for group in made.groups(step) for one in group.rollouts]
    spans = [[version for _, version in one.version_spans] for one in rollouts]
    assert any(len(versions) > 1 for versions in spans)
    assert all(np.diff(versions).tolist() == [1] * (len(versions) - 1) for versions in spans)
    assert all(one.length <= 20 for one in rollouts)


def test_no_token_is_made_while_the_trainer_has_the_device(parts: Callable[..., Parts]) -> None:
    made: Parts
    tokens: list[tuple[int, int]] = []

    class Watched(InlineThread):
        async def call(self, function: Callable[..., Any], *args: Any) -> Any:
            before = made.generator.tokens_generated
            result = await super().call(function, *args)
            tokens.append((before, made.generator.tokens_generated))
            return result

    made = parts(max_staleness=1, thread=Watched(50.0))
    run_virtual(made.stages())
    assert len(tokens) == 5
    assert all(before == after for before, after in tokens)


@pytest.mark.parametrize("placement", ["time_sliced", "split"])
@pytest.mark.parametrize("max_staleness", [0, 1])
def test_evaluations_have_the_generator_to_themselves(
    parts: Callable[..., Parts], max_staleness: int, placement: str
) -> None:
    """A wave wants an idle engine: nothing of the next step may have begun."""
    seen: list[int] = []

    async def evaluate(step: int, version: Version) -> None:
        questions = [lease(order, of=task(order), group_size=1) for order in range(3)]
        async with made.made.placement.quiet():
            groups = await Driver(made.generator, made.chat, run_seed=9, worker="evals", engine_build="",
                                  max_in_flight=256).wave(questions)
        seen.extend({version for group in groups for one in group.rollouts for _, version in one.version_spans})

    made = parts(max_staleness=max_staleness, evaluate=evaluate, schedule={"placement": placement})
    assert run_virtual(made.stages()) == 5
    assert seen == [1, 2, 3, 4, 5]


def test_in_split_the_next_step_trains_during_an_evaluation_and_its_update_waits(parts: Callable[..., Parts]) -> None:
    """Training takes 3 s, an evaluation 20: the version that is asked is served from its beginning to its end."""
    asked: list[tuple[int, float, float, int]] = []

    async def evaluate(step: int, version: Version) -> None:
        async with made.made.placement.quiet():
            started = now()
            assert version.number == made.generator.served_version
            await asyncio.sleep(20.0)
            asked.append((step, started, now(), made.generator.served_version))

    made = parts(
        steps=3, max_staleness=3, thread=InlineThread(3.0), evaluate=evaluate, schedule={"placement": "split"},
    )
    assert run_virtual(made.stages()) == 3
    assert [(step, served) for step, _, _, served in asked] == [(1, 1), (2, 2), (3, 3)]
    # The second step was made by the time the first evaluation ended: its update and the next evaluation follow.
    (_, _, first_end, _), (_, second_start, _, _), _ = asked
    assert second_start - first_end == pytest.approx(0.5, abs=0.01)


def test_a_long_evaluation_in_split_is_no_stall(parts: Callable[..., Parts]) -> None:
    """It holds the generator for ten times the limit; the trainer has nothing left to train meanwhile."""

    async def evaluate(step: int, version: Version) -> None:
        async with made.made.placement.quiet():
            await asyncio.sleep(600.0)

    made = parts(steps=3, max_staleness=1, thread=InlineThread(3.0), evaluate=evaluate, limit_s=60.0,
                 schedule={"placement": "split"})
    assert run_virtual(made.stages()) == 3
    assert made.rows[-1]["time_s"] > 1800


@pytest.mark.parametrize(
    ("max_staleness", "waits_s", "busy_s"),
    [(0, [6.1] * 4, [6.0] * 4), (1, [6.1, 0.0, 6.1, 1.1], [6.0, 0.0, 6.1, 1.0])],
)
def test_times_by_hand(
    parts: Callable[..., Parts], max_staleness: int, waits_s: list[float], busy_s: list[float]
) -> None:
    """Rollouts take 6 s, scoring .1 s, training 3 s, publishing .5 s, evaluation 2 s.

    At staleness 1 the groups of the first two steps are generated together. The second step begins before those
    admitted meanwhile have a token; they go on after it, and the fourth step's join them a token later, which is
    what the fourth step waits for. Requests that a slice holds back are open, but not running."""

    async def evaluate(step: int, version: Version) -> None:
        await asyncio.sleep(2.0)
        made.made.recorder.evaluated({}, 2.0)

    made = parts(
        max_staleness=max_staleness,
        generator=FakeGenerator(eos_token_id=256, length=lambda request: request.max_new_tokens - 14, step_s=1.0),
        thread=InlineThread(3.0),
        evaluate=evaluate,
        steps=4,
    )
    run_virtual(made.stages())
    for row, wait_s, running_s in zip(made.rows, waits_s, busy_s, strict=True):
        total_s = wait_s + 5.5
        expected = {
            "time/wait_rollouts": wait_s,
            "time/train": 3.0,
            "time/publish": 0.5,
            "time/eval": 2.0,
            "time/switch": 0.0,
            "time/step": total_s,
            "busy/trainer": 3.0 / total_s,
            "busy/generator": running_s / total_s,
        }
        assert {name: row[name] for name in expected} == pytest.approx(expected, abs=1e-6)


def test_a_step_without_any_verdict_is_skipped_and_the_run_goes_on(parts: Callable[..., Parts]) -> None:
    made = parts(scorer=NoVerdict())
    assert run_virtual(made.stages()) == 5
    assert [row["skipped"] for row in made.rows] == ["no group has a signal"] * 5
    assert [(row["version"], row["loss"], row["reward/mean"]) for row in made.rows] == [(0, None, None)] * 5
    assert [(row["groups/zero_signal"], row["reward/timeouts"]) for row in made.rows] == [(2, 4)] * 5
    assert made.route.published == []
    assert {group.outcome for step in range(1, 6) for group in made.groups(step)} == {"zero_signal"}
    events = [json.loads(line) for line in (made.folder / "events.jsonl").read_text().splitlines()]
    assert [(event["kind"], event["step"]) for event in events] == [("skipped", step) for step in range(1, 6)]


@pytest.mark.parametrize(("level", "published"), [(0, []), (1, []), (2, [0, 0, 0])])
def test_a_generator_that_dropped_its_weights_gets_them_back_though_no_step_changed_them(
    parts: Callable[..., Parts], level: SleepLevel, published: list[int]
) -> None:
    made = parts(scorer=NoVerdict(), steps=3, sleep_level=level)
    assert run_virtual(made.stages()) == 3
    assert made.route.published == published


def test_one_skipped_step_moves_no_version(parts: Callable[..., Parts]) -> None:
    class Sometimes(Alternating):
        async def score(self, task: Task, rollout: Rollout) -> Score:
            score = await super().score(task, rollout)
            return score if task.index not in (3, 4) else Score(0.0)  # the second step's

    made = parts(scorer=Sometimes(), max_staleness=1)
    assert run_virtual(made.stages()) == 5
    assert [row["version"] for row in made.rows] == [1, 1, 2, 3, 4]
    assert made.route.published == [1, 2, 3, 4]


@pytest.mark.parametrize("period", [100, 3])
def test_two_runs_are_the_same(parts: Callable[..., Parts], tmp_path: Path, period: int) -> None:
    def rollouts(folder: Path) -> list[tuple[list[int], list[float]]]:
        made = parts(tasks=SomeTooLong(period))
        made.folder = folder
        run_virtual(made.stages())
        groups = [group for step in range(1, 6) for group in made.groups(step)]
        return [(one.token_ids.tolist(), one.logprobs.tolist()) for group in groups for one in group.rollouts]

    assert rollouts(tmp_path / "first") == rollouts(tmp_path / "second")


class SomeTooLong(Tasks):
    """Every `period`-th prompt has 103 tokens, where 64 fit."""

    def __init__(self, period: int) -> None:
        super().__init__()
        self.period = period

    def next(self) -> Task:
        one = super().next()
        return one if one.index % self.period else task(one.index, content="x" * 100)


def refusing(monkeypatch: pytest.MonkeyPatch, refused: Callable[[Group], bool]) -> None:
    """A check behind the scorer, as later screens will be."""
    scored = loop.judge

    async def judge(scorer: Any, group: Group) -> Verdict:
        verdict = await scored(scorer, group)
        return replace(verdict, accepted=False, reason="looks odd") if refused(group) else verdict

    monkeypatch.setattr(loop, "judge", judge)


def fates(made: Parts) -> list[list[tuple[int, str]]]:
    """By step: the numbers of the groups in its rollouts file, with their fates."""
    steps = range(1, made.steps + 1)
    return [[(group.lease.order, group.outcome) for group in made.groups(step)] for step in steps]


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_a_prompt_that_is_too_long_is_rejected_and_replaced(parts: Callable[..., Parts], max_staleness: int) -> None:
    """Tasks count from 1, so of the numbers 0, 1, 2, ... the group 2, 5, 8, ... is the one."""
    made = parts(max_staleness=max_staleness, tasks=SomeTooLong(3), thread=InlineThread(3.0))
    assert run_virtual(made.stages()) == 5
    assert len(made.trainer.batches) == 5
    everyone = [one for step in fates(made) for one in step]
    # At max_staleness 0 group 14 is admitted after the last step's tasks are: never. Both ways, 10 are trained.
    assert sorted(everyone) == [(order, "trained" if order % 3 != 2 else "rejected") for order in range(14)]
    assert [sum(fate == "trained" for _, fate in step) for step in fates(made)] == [PER_STEP] * 5
    if max_staleness == 0:
        assert [[order for order, _ in step] for step in fates(made)] == [
            [0, 1], [2, 3, 4], [5, 6, 7], [8, 9, 10], [11, 12, 13],
        ]  # fmt: skip
    for step, row in enumerate(made.rows, start=1):
        rejected = [group for group in made.groups(step) if group.outcome == "rejected"]
        assert (row["groups/rejected"], row["groups/completed"], row["groups/trained"]) == (len(rejected), 2, 2)
        assert {(group.reason, group.rollouts) for group in rejected} <= {("prompt has 103 tokens, 64 fit", ())}
        assert staleness([group for group in made.groups(step) if group.rollouts], step - 1) <= max_staleness
    assert sum(row["groups/leased"] for row in made.rows) == 14  # pyright: ignore
    assert made.tasks.given == 14


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_a_group_whose_verdict_is_a_refusal_is_rejected_and_replaced(
    parts: Callable[..., Parts], monkeypatch: pytest.MonkeyPatch, max_staleness: int
) -> None:
    refusing(monkeypatch, lambda group: group.lease.order % 3 == 1)
    made = parts(max_staleness=max_staleness, thread=InlineThread(3.0))
    assert run_virtual(made.stages()) == 5
    left = [group for step in range(1, 6) for group in made.groups(step)]
    assert [group.lease.order for group in left if group.outcome == "trained"] == [0, 2, 3, 5, 6, 8, 9, 11, 12, 14]
    rejected = [group for group in left if group.outcome == "rejected"]
    assert {group.lease.order for group in rejected} == {1, 4, 7, 10, 13}
    assert {group.reason for group in rejected} == {"looks odd"}
    assert {len(group.rollouts) for group in rejected} == {GROUP_SIZE}
    assert [row["groups/rejected"] for row in made.rows] == [
        sum(group.outcome == "rejected" for group in made.groups(step)) for step in range(1, 6)
    ]
    ages = [staleness(made.groups(step), step - 1) for step in range(1, 6)]
    assert max(ages) == max_staleness


def test_at_max_staleness_0_replacements_are_a_wave_of_their_own_in_fixed_order(
    parts: Callable[..., Parts], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the first wave both groups are refused; of its replacements, 2 and 4 (3 does not fit), the first; then 5
    stays. Scoring takes its time, and the second member's longer than the first's."""
    waves: list[list[str]] = []

    class Waves(FakeGenerator):
        async def wave(self, requests: Sequence[SegmentRequest]) -> list[Segment]:
            waves.append([request.request_id for request in requests])
            return await super().wave(requests)

    class Uneven(Alternating):
        async def score(self, task: Task, rollout: Rollout) -> Score:
            await asyncio.sleep(10.0 / task.index)  # later numbers first
            return await super().score(task, rollout)

    refusing(monkeypatch, lambda group: group.lease.order in (0, 1, 2))
    made = parts(generator=generator(Waves), scorer=Uneven(), tasks=SomeTooLong(4), steps=2)
    assert run_virtual(made.stages()) == 2
    assert waves == [
        [f"{order:07d}/{member}/0" for order in wave for member in range(GROUP_SIZE)]
        for wave in ([0, 1], [2, 4], [5], [6, 8])
    ]
    gone = "rejected"
    assert fates(made) == [
        [(0, gone), (1, gone), (2, gone), (3, gone), (4, "trained"), (5, "trained")],
        [(6, "trained"), (7, gone), (8, "trained")],
    ]


def of_order(request: SegmentRequest) -> int:
    return int(request.request_id.partition("/")[0])


def slow(*orders: int) -> FakeGenerator:
    """A token a second: 20 tokens in the groups of these numbers, 2 in all others."""

    def length(request: SegmentRequest) -> int:
        return 20 if of_order(request) in orders else max(1, request.max_new_tokens - 18)

    return FakeGenerator(eos_token_id=256, length=length, step_s=1.0)


@dataclass
class Silent(Alternating):
    """No signal in the groups of these tasks, which count from 1."""

    tasks: Callable[[int], bool]

    async def score(self, task: Task, rollout: Rollout) -> Score:
        score = await super().score(task, rollout)
        return Score(1.0) if self.tasks(task.index) else score


@pytest.mark.parametrize("placement", ["time_sliced", "split"])
@pytest.mark.parametrize(
    ("max_staleness", "steps_per_slice", "published", "ages"),
    [
        (1, 2, [2, 4, 6, 7], [0, 1, 0, 1, 0, 1, 0]),
        (3, 3, [3, 6, 7], [0, 1, 2, 0, 1, 2, 0]),
    ],
)
def test_a_slice_of_several_steps_is_published_once(
    parts: Callable[..., Parts], placement: str, max_staleness: int, steps_per_slice: int, published: list[int],
    ages: list[int],
) -> None:
    """A slice takes the groups of all slots; the next ones are admitted when it is published."""
    made = parts(
        steps=7, max_staleness=max_staleness, generator=slow(), thread=InlineThread(3.0),
        schedule={"placement": placement, "steps_per_slice": steps_per_slice},
    )
    assert run_virtual(made.stages()) == 7
    assert made.route.published == published
    assert [row["version"] for row in made.rows] == [1, 2, 3, 4, 5, 6, 7]
    assert [{step - 1 - group.admitted_version for group in made.groups(step)} for step in range(1, 8)] == [
        {age} for age in ages
    ]
    assert [row["staleness/max"] for row in made.rows] == ages
    ends = [step in published for step in range(1, 8)]
    assert [row["time/publish"] for row in made.rows] == pytest.approx([0.5 * end for end in ends])
    # 2 tokens and a verdict, at the beginning of every slice.
    begins = [True, *ends[:-1]]
    assert [row["time/wait_rollouts"] for row in made.rows] == pytest.approx([2.1 * begin for begin in begins])
    assert [row["time/step"] for row in made.rows] == pytest.approx(
        [3.0 + 2.1 * begin + 0.5 * end for begin, end in zip(begins, ends, strict=True)]
    )


@pytest.mark.parametrize(
    ("every", "steps", "published"), [(2, 6, [2, 4, 6]), (4, 7, [3, 4, 7]), (7, 7, [3, 6, 7]), (0, 5, [3, 5])]
)
@pytest.mark.parametrize("placement", ["time_sliced", "split"])
def test_an_evaluation_ends_a_slice_early(
    parts: Callable[..., Parts], placement: str, every: int, steps: int, published: list[int]
) -> None:
    """The version that is evaluated is the step's own. What is saved is every step's, before it is published."""
    saved: list[tuple[int, int, int]] = []
    served: dict[int, int] = {}

    async def save(step: int) -> None:
        saved.append((step, made.trainer.version, made.generator.served_version))

    async def evaluate(step: int, version: Version) -> None:
        served[step] = made.generator.served_version

    made = parts(
        steps=steps, max_staleness=3, save=save, evaluate=evaluate, evals_every=every,
        schedule={"placement": placement, "steps_per_slice": 3},
    )
    assert run_virtual(made.stages()) == steps
    assert made.route.published == published
    assert served == {step: step for step in published}
    assert [(step, version) for step, version, _ in saved] == [(step, step) for step in range(1, steps + 1)]
    assert all(served_then < version for _, version, served_then in saved)


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_groups_without_a_signal_are_replaced_in_the_same_step(parts: Callable[..., Parts], max_staleness: int) -> None:
    made = parts(
        steps=3, max_staleness=max_staleness, scorer=Silent(lambda task: task in (1, 4, 5)), thread=InlineThread(3.0),
        schedule={"refill": True},
    )
    assert run_virtual(made.stages()) == 3
    silent = "zero_signal"
    assert fates(made) == [
        [(0, silent), (1, "trained"), (2, "trained")],
        [(3, silent), (4, silent), (5, "trained"), (6, "trained")],
        [(7, "trained"), (8, "trained")],
    ]
    assert [(row["groups/trained"], row["groups/zero_signal"]) for row in made.rows] == [(2, 1), (2, 2), (2, 0)]
    assert [row["version"] for row in made.rows] == [1, 2, 3]
    assert {group.reason for group in made.groups(1) if group.outcome == silent} == {
        "all rewards equal, or fewer than two"
    }
    assert [staleness(made.groups(step), step - 1) <= max_staleness for step in (1, 2, 3)] == [True] * 3


@pytest.mark.parametrize("placement", ["time_sliced", "split"])
@pytest.mark.parametrize("max_staleness", [0, 1, 2])
def test_a_step_consumes_three_times_its_groups_at_most(
    parts: Callable[..., Parts], max_staleness: int, placement: str
) -> None:
    """P = 2. Of the first six groups only the sixth has a signal, of the next six none; then all have."""
    made = parts(
        steps=4, max_staleness=max_staleness, scorer=Silent(lambda task: task < 13 and task != 6),
        generator=slow(), thread=InlineThread(3.0), schedule={"refill": True, "placement": placement},
    )
    assert run_virtual(made.stages()) == 4
    silent = "zero_signal"
    assert fates(made) == [
        [*((order, silent) for order in range(5)), (5, "trained")],
        [(order, silent) for order in range(6, 12)],
        [(12, "trained"), (13, "trained")],
        [(14, "trained"), (15, "trained")],
    ]
    assert [row["skipped"] for row in made.rows] == [None, "no group has a signal", None, None]
    assert [row["version"] for row in made.rows] == [1, 1, 2, 3]
    assert made.route.published == [1, 2, 3]
    assert [batch.num_tokens for batch in made.trainer.batches] == [2 * 2, 0, 4 * 2, 4 * 2]
    before = [0, 1, 1, 2]
    ages = [before[step - 1] - group.admitted_version for step in range(1, 5) for group in made.groups(step)]
    assert max(ages) == min(1, max_staleness)
    assert sum(row["groups/leased"] for row in made.rows) == 16  # pyright: ignore


def test_split_does_not_hold_the_generator_for_steps_that_change_nothing(parts: Callable[..., Parts]) -> None:
    class Pausing(FakeGenerator):
        paused = 0

        async def pause(self, *, clear_cache: bool) -> None:
            self.paused += 1
            await super().pause(clear_cache=clear_cache)

    silent = generator(Pausing)
    run_virtual(parts(steps=3, generator=silent, scorer=Silent(lambda _: True), max_staleness=1,
                      schedule={"placement": "split"}).stages())
    assert silent.paused == 0  # pyright: ignore


def test_a_constant_reward_skips_every_step(parts: Callable[..., Parts]) -> None:
    made = parts(steps=3, scorer=Silent(lambda _: True), max_staleness=1, schedule={"refill": True})
    assert run_virtual(made.stages()) == 3
    assert [(row["version"], row["groups/zero_signal"], row["groups/trained"]) for row in made.rows] == [(0, 6, 0)] * 3
    assert made.route.published == []


def test_a_group_that_is_overdue_is_dropped_with_what_it_has(parts: Callable[..., Parts]) -> None:
    """M = 1, four slots. Group 0 makes 2 tokens before the first slice and 3 before the second, for which it waits for
    group 4, admitted when the first one is published; at the third step it would be two versions old."""
    ended: list[tuple[str, str, int]] = []

    class Watched(FakeGenerator):
        async def generate(self, request: SegmentRequest) -> Segment:
            segment = await super().generate(request)
            if of_order(request) == 0:
                ended.append((request.request_id, segment.ended, len(segment.token_ids)))
            return segment

    fake = slow(0)
    fake.__class__ = Watched
    made = parts(steps=3, max_staleness=1, generator=fake, thread=InlineThread(3.0), schedule={"overdue": "drop"})
    assert run_virtual(made.stages()) == 3
    assert fates(made) == [
        [(1, "trained"), (2, "trained")],
        [(3, "trained"), (4, "trained")],
        [(0, "stale"), (5, "trained"), (6, "trained")],
    ]
    assert ended == [
        (f"0000000/{member}/{segment}", "interrupted", tokens)
        for segment, tokens in enumerate([2, 3, 0])
        for member in range(GROUP_SIZE)
    ]
    (gone,) = [group for group in made.groups(3) if group.outcome == "stale"]
    assert gone.reason == "admitted 2 versions ago, schedule.max_staleness = 1"
    for one in gone.rollouts:
        assert (one.length, one.stop_reason, one.reward) == (5, "error", None)
        assert [version for _, version in one.version_spans] == [0, 1]
    row = made.rows[2]
    assert (row["groups/stale"], row["groups/trained"], row["tokens/generated"]) == (1, 2, 2 * 5 + 4 * 2)
    assert (row["length/leased"], row["length/trained"]) == ((2 * 5 + 4 * 2) / 6, 2.0)
    assert (row["ledger/sums/stale"], row["time/wait_stale"]) == (1, 0.0)


def test_a_group_that_holds_the_trainer_up_for_max_wait_s_is_dropped(parts: Callable[..., Parts]) -> None:
    """Groups 1 to 3 are ready after 2.1 s; group 0 gets 5 s more, in which it makes its 7th token."""
    made = parts(
        steps=2, max_staleness=1, generator=slow(0), thread=InlineThread(3.0), schedule={"max_wait_s": 5.0}
    )
    assert run_virtual(made.stages()) == 2
    assert fates(made) == [[(0, "timed_out"), (1, "trained"), (2, "trained")], [(3, "trained"), (4, "trained")]]
    (gone,) = [group for group in made.groups(1) if group.outcome == "timed_out"]
    assert gone.reason == "the trainer waited 5 s for it while others were ready"
    assert [(one.length, one.stop_reason) for one in gone.rollouts] == [(7, "error")] * GROUP_SIZE
    row = made.rows[0]
    assert (row["time/wait_rollouts"], row["time/wait_stale"]) == (pytest.approx(2.1), pytest.approx(5.0))
    assert (row["groups/timed_out"], row["groups/completed"], row["groups/leased"]) == (1, 2, 5)


def test_the_wait_for_a_slow_group_that_the_window_holds_up_is_shown(parts: Callable[..., Parts]) -> None:
    """M = 2: the window is 3 numbers. Group 0 has 2 tokens when the first step passes over it, 18 to go when the
    second may not."""
    made = parts(steps=2, max_staleness=2, generator=slow(0), thread=InlineThread(3.0))
    assert run_virtual(made.stages()) == 2
    assert [[order for order, _ in step] for step in fates(made)] == [[1, 2], [0, 3]]
    waits = [(row["time/wait_rollouts"], row["time/wait_stale"]) for row in made.rows]
    assert waits == [(pytest.approx(2.1), 0.0), (pytest.approx(0.0), pytest.approx(18.1))]


BROKEN_UP = [
    {"placement": placement, "max_staleness": max_staleness, "steps_per_slice": steps, "overdue": overdue,
     "refill": (index + max_staleness) % 2 == 0, "max_wait_s": max_wait_s}
    for placement in ("time_sliced", "split")
    for max_staleness, steps in ((0, 1), (1, 2), (2, 2), (4, 1), (4, 4))
    for index, (overdue, max_wait_s) in enumerate((("wait", 0.0), ("drop", 0.0), ("wait", 1.0)))
]


@pytest.mark.parametrize("schedule", BROKEN_UP, ids=lambda schedule: "-".join(map(str, schedule.values())))
def test_books_add_up_and_every_token_is_within_the_bound(
    parts: Callable[..., Parts], monkeypatch: pytest.MonkeyPatch, schedule: dict[str, Any]
) -> None:
    """Some prompts are too long, some verdicts refuse, some groups have no signal, some take ten times longer."""

    def length(request: SegmentRequest) -> int:
        return geometric(request, 2.0) if of_order(request) % 4 else 20

    refusing(monkeypatch, lambda group: group.lease.order % 7 == 3)
    made = parts(
        steps=9, max_staleness=schedule["max_staleness"], tasks=SomeTooLong(11), thread=InlineThread(3.0),
        generator=FakeGenerator(eos_token_id=256, length=length, step_s=1.0),
        scorer=Silent(lambda task: task % 3 == 0), schedule=schedule,
    )
    assert run_virtual(made.stages()) == 9
    leased, left, orders, consumed, before = 0, 0, list[int](), list[int](), 0
    for step, row in enumerate(made.rows, start=1):
        groups = made.groups(step)
        orders += [group.lease.order for group in groups]
        leased += row["groups/leased"]  # pyright: ignore
        left += sum(row[f"groups/{fate}"] for fate in LEFT_AS)  # pyright: ignore
        assert 0 <= leased - left <= made.made.admission.slots
        trained = [group for group in groups if group.outcome == "trained"]
        if trained:
            assert staleness(trained, before) <= schedule["max_staleness"]
            assert before - min(group.admitted_version for group in trained) <= schedule["max_staleness"]
        assert len(trained) <= PER_STEP
        consumed.append(sum(group.outcome in ("trained", "zero_signal") for group in groups))
        before = int(str(row["version"]))
    assert left == len(orders) == len(set(orders))
    assert min(consumed) >= PER_STEP
    assert sum(consumed) <= 9 * PER_STEP * (3 if schedule["refill"] else 1)
    assert leased == made.tasks.given
    if schedule["overdue"] == "drop":
        assert not any(row["groups/timed_out"] for row in made.rows)
    elif not schedule["max_wait_s"]:
        assert not any(row["groups/stale"] or row["groups/timed_out"] for row in made.rows)


def test_in_split_tokens_are_made_while_the_trainer_steps(parts: Callable[..., Parts]) -> None:
    made: Parts
    tokens: list[int] = []

    class Watched(InlineThread):
        async def call(self, function: Callable[..., Any], *args: Any) -> Any:
            before = made.generator.tokens_generated
            result = await super().call(function, *args)
            tokens.append(made.generator.tokens_generated - before)
            return result

    # Groups 2 and on have 20 tokens: from the second step on some are open while the trainer works.
    made = parts(max_staleness=1, generator=slow(*range(2, 99)), thread=Watched(5.5),
                 schedule={"placement": "split"})
    assert run_virtual(made.stages()) == 5
    # First step: 2 groups of 2 rollouts, 5 tokens each in 5.5 s. It ends with 3 + 5 of their 20 tokens made.
    assert tokens[0] == 2 * GROUP_SIZE * 5
    assert all(tokens[:4])


@pytest.mark.parametrize(
    ("in_flight", "clears", "open_at_update", "segments", "versions"),
    [("recompute", True, 4, 1, [0, 1]), ("stale_kv", False, 4, 1, [0, 1]), ("drain", True, 0, 1, [0])],
)
def test_what_is_open_at_an_update(
    parts: Callable[..., Parts], in_flight: str, clears: bool, open_at_update: int, segments: int, versions: list[int]
) -> None:
    """Groups 0 and 1 are the first step's; 2 and 3, of 20 tokens, are open when it is published."""
    cleared: list[bool] = []
    open_now: set[str] = set()

    class Watched(FakeGenerator):
        async def generate(self, request: SegmentRequest) -> Segment:
            await self._admission()
            open_now.add(request.request_id)
            segment = await super().generate(request)
            open_now.remove(request.request_id)
            return segment

        async def pause(self, *, clear_cache: bool) -> None:
            cleared.append(clear_cache)
            await super().pause(clear_cache=clear_cache)

    class WatchedRoute(LabelRoute):
        async def publish(self, number: int) -> Version:
            counts.append(len(open_now))
            return await super().publish(number)

    counts: list[int] = []
    fake = slow(2, 3)
    fake.__class__ = Watched
    made = parts(
        steps=2, max_staleness=1, generator=fake, route=WatchedRoute(fake), thread=InlineThread(3.0),
        schedule={"placement": "split", "in_flight": in_flight},
    )
    assert run_virtual(made.stages()) == 2
    assert counts[0] == open_at_update
    assert cleared == [clears] * 2
    for group in made.groups(2):
        for one in group.rollouts:
            assert one.timings["segments"] == segments
            assert [version for _, version in one.version_spans] == versions
            assert one.length == 20


@pytest.mark.parametrize("placement", ["time_sliced", "split"])
def test_drain_lets_open_rollouts_end_before_an_update(parts: Callable[..., Parts], placement: str) -> None:
    made = parts(max_staleness=1, thread=InlineThread(3.0), schedule={"placement": placement, "in_flight": "drain"})
    assert run_virtual(made.stages()) == 5
    for group in (group for step in range(1, 6) for group in made.groups(step)):
        for one in group.rollouts:
            assert len(one.version_spans) == one.timings["segments"] == 1


def test_times_in_split_by_hand(parts: Callable[..., Parts]) -> None:
    """Rollouts take 6 s, scoring .1 s, training 10 s, publishing .5 s, evaluation 2 s: from the second step on the
    groups of the next step are made while this one trains, and the trainer never waits. Evaluations too run while the
    next step trains, and are in its row; the last one holds its own."""

    async def evaluate(step: int, version: Version) -> None:
        await asyncio.sleep(2.0)
        made.made.recorder.evaluated({}, 2.0)

    made = parts(
        steps=4, max_staleness=1, thread=InlineThread(10.0), evaluate=evaluate, schedule={"placement": "split"},
        generator=FakeGenerator(eos_token_id=256, length=lambda request: request.max_new_tokens - 14, step_s=1.0),
    )
    run_virtual(made.stages())
    waits_s, evals_s = [6.1, 0.0, 0.0, 0.0], [0.0, 2.0, 2.0, 4.0]
    for row, wait_s, eval_s, busy_s in zip(made.rows, waits_s, evals_s, [6.0, 6.0, 6.0, 0.0], strict=True):
        total_s = wait_s + (12.5 if row["step"] == 4 else 10.5)
        expected = {
            "time/wait_rollouts": wait_s,
            "time/wait_stale": 0.0,
            "time/train": 10.0,
            "time/publish": 0.5,
            "time/eval": eval_s,
            "time/switch": 0.0,
            "time/step": total_s,
            "busy/trainer": 10.0 / total_s,
            "busy/generator": busy_s / total_s,
        }
        assert {name: row[name] for name in expected} == pytest.approx(expected, abs=1e-6)


def rollouts_of(made: Parts) -> list[tuple[int, str, list[int], list[float]]]:
    groups = [group for step in range(1, made.steps + 1) for group in made.groups(step)]
    return [
        (group.lease.order, group.outcome, one.token_ids.tolist(), one.logprobs.tolist())
        for group in groups
        for one in group.rollouts
    ]


def test_at_max_staleness_0_both_placements_make_the_same_rollouts_and_again(
    parts: Callable[..., Parts], tmp_path: Path
) -> None:
    """With refill, too: what replaces the groups without a signal is a wave of its own."""

    def outcome(folder: str, placement: str) -> list[tuple[int, str, list[int], list[float]]]:
        made = parts(
            tasks=SomeTooLong(5), scorer=Silent(lambda task: task % 3 == 0),
            schedule={"refill": True, "placement": placement},
        )
        made.folder = tmp_path / folder
        assert run_virtual(made.stages()) == 5
        assert made.route.published == [1, 2, 3, 4, 5]
        return rollouts_of(made)

    first = outcome("first", "time_sliced")
    assert {fate for _, fate, _, _ in first} == {"trained", "zero_signal"}
    assert outcome("second", "time_sliced") == first
    assert outcome("third", "split") == first


@pytest.mark.parametrize("placement", ["time_sliced", "split"])
def test_a_stop_in_a_slice_publishes_what_was_trained(parts: Callable[..., Parts], placement: str) -> None:
    """Both steps' groups are ready after 2.1 s; the stop comes in the first of the slice's two steps."""

    async def main() -> int:
        made.run()
        asyncio.get_running_loop().call_later(5.0, made.made.stop.set)
        return await run_stages(made.made)

    made = parts(
        max_staleness=1, generator=slow(), thread=InlineThread(10.0),
        schedule={"placement": placement, "steps_per_slice": 2},
    )
    assert run_virtual(main()) == 1
    assert [row["step"] for row in made.rows] == made.route.published == [1]


def test_a_stop_between_the_steps_of_a_slice_ends_the_run_at_once(parts: Callable[..., Parts]) -> None:
    """In split the second step of the slice waits for groups 2 and 3 from 5.1 s on."""

    async def main() -> tuple[int, float]:
        made.run()
        asyncio.get_running_loop().call_later(10.0, made.made.stop.set)
        return await run_stages(made.made), now()

    made = parts(
        max_staleness=1, generator=slow(2, 3), thread=InlineThread(3.0),
        schedule={"placement": "split", "steps_per_slice": 2},
    )
    assert run_virtual(main()) == (1, pytest.approx(10.0))
    assert [row["version"] for row in made.rows] == [1]
    assert made.route.published == []


def test_200_prompts_in_a_row_that_do_not_fit_end_the_run(parts: Callable[..., Parts]) -> None:
    made = parts(tasks=SomeTooLong(1))
    error, ended_s = run_virtual(failing(made))
    (leaf,) = leaves(error)
    assert isinstance(leaf, DataError)
    assert str(leaf) == (
        "the prompts of 200 tasks in a row do not fit; task sums/200: prompt has 103 tokens, 64 fit\n"
        "  -> raise generate.max_model_len, or lower generate.max_new_tokens"
    )
    assert (made.tasks.given, ended_s) == (200, 0)


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_199_in_a_row_do_not(parts: Callable[..., Parts], max_staleness: int) -> None:
    class Rare(SomeTooLong):
        def next(self) -> Task:
            one = super().next()
            return one if one.index % 200 else task(one.index)

    made = parts(max_staleness=max_staleness, tasks=Rare(1), steps=2)
    assert run_virtual(made.stages()) == 2
    assert sum(row["groups/rejected"] for row in made.rows) == 4 * 199  # pyright: ignore


class Broken(Exception):
    """What a part raises; knows when."""

    def __init__(self) -> None:
        super().__init__("broken")
        self.at_s = now()


class BrokenTasks(Tasks):
    def next(self) -> Task:
        if self.given == 5:
            raise Broken
        return super().next()


class BrokenGenerator(FakeGenerator):
    async def generate(self, request: SegmentRequest) -> Segment:
        if self.num_requests == 7:
            raise Broken
        return await super().generate(request)

    async def wave(self, requests: Sequence[SegmentRequest]) -> list[Segment]:
        if self.num_requests:
            raise Broken
        return await super().wave(requests)


class BrokenScorer(Alternating):
    async def score(self, task: Task, rollout: Rollout) -> Score:
        if task.index == 4:
            raise Broken
        return await super().score(task, rollout)


class BrokenTrainer(CountingTrainer):
    def step(self, batch: Batch) -> StepResult:
        if self.version == 1:
            raise Broken
        return super().step(batch)


class BrokenRoute(LabelRoute):
    async def publish(self, number: int) -> Version:
        if number == 2:
            raise Broken
        return await super().publish(number)


async def broken_evaluation(step: int, timings: Timings) -> None:
    if step == 2:
        raise Broken


def broken_parts(where: str) -> dict[str, Any]:
    broken_generator = generator(BrokenGenerator)
    return {
        "admit": {"tasks": BrokenTasks()},
        "generate": {"generator": broken_generator},
        "score": {"scorer": BrokenScorer()},
        "train": {"trainer": BrokenTrainer()},
        "publish": {"generator": (fake := generator()), "route": BrokenRoute(fake)},
        "evaluate": {"evaluate": broken_evaluation},
    }[where]


async def failing(made: Parts) -> tuple[BaseException, float]:
    """How the run fails, and when; no stage is left."""
    try:
        await made.stages()
    except BaseException as error:
        stages = {"admit", "generate", "score", "watch_lag"}
        assert not [one for one in asyncio.all_tasks() if one.get_name() in stages]
        return error, now()
    raise AssertionError("the run went through")


@pytest.mark.parametrize("max_staleness", [0, 1])
@pytest.mark.parametrize("where", ["admit", "generate", "score", "train", "publish", "evaluate"])
def test_an_exception_in_any_stage_ends_the_run_as_itself(
    parts: Callable[..., Parts], where: str, max_staleness: int
) -> None:
    made = parts(max_staleness=max_staleness, thread=InlineThread(3.0), **broken_parts(where))
    error, ended_s = run_virtual(failing(made))
    for leaf in leaves(error):  # of a group that is scored every member may fail
        assert isinstance(leaf, Broken)
        assert 0 <= ended_s - leaf.at_s < 1.0


@pytest.mark.parametrize("stage", ["admit", "generate", "score"])
def test_a_stage_that_returns_has_lost_its_work(
    parts: Callable[..., Parts], monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    async def idle(run: Run) -> None:
        await asyncio.sleep(2.0)

    idle.__name__ = stage
    monkeypatch.setattr(loop, stage, idle)
    error, ended_s = run_virtual(failing(parts()))
    (leaf,) = leaves(error)
    assert str(leaf) == f"stage {stage} returned"
    assert ended_s == pytest.approx(2.0)


def test_a_stop_ends_the_run_after_the_current_step(parts: Callable[..., Parts]) -> None:
    async def main() -> int:
        made.run()
        # In the middle of the second training step, which takes from about 50 s to 150 s.
        asyncio.get_running_loop().call_later(200.0, made.made.stop.set)
        return await run_stages(made.made)

    made = parts(max_staleness=1, thread=InlineThread(100.0))
    assert run_virtual(main()) == 2
    assert [row["step"] for row in made.rows] == [1, 2]
    assert made.route.published == [1, 2]


def test_a_stop_while_waiting_for_rollouts_ends_the_run_at_once(parts: Callable[..., Parts]) -> None:
    async def main() -> tuple[int, float]:
        made.run()
        asyncio.get_running_loop().call_later(5.0, made.made.stop.set)
        return await run_stages(made.made), now()

    made = parts(generator=generator(Hanging))
    assert run_virtual(main()) == (0, pytest.approx(5.0))
    assert made.rows == []


class NeverThread(InlineThread):
    async def call(self, function: Callable[..., Any], *args: Any) -> Any:
        await asyncio.Event().wait()


class NeverRoute(LabelRoute):
    async def publish(self, number: int) -> Version:
        await asyncio.Event().wait()
        raise AssertionError


@pytest.mark.parametrize("max_staleness", [0, 1])
@pytest.mark.parametrize(
    ("part", "name"),
    [
        ({"generator": Hanging}, "generation or scoring: no group became ready within 50.0 s, [23] are open"),
        ({"thread": NeverThread}, "the training step took more than 50.0 s"),
        ({"route": NeverRoute}, "the weight update took more than 50.0 s"),
    ],
    ids=["generator", "thread", "route"],
)
def test_a_stage_that_hangs_is_named_within_the_limit(
    parts: Callable[..., Parts], part: dict[str, Any], name: str, max_staleness: int
) -> None:
    fake = generator(part.get("generator", FakeGenerator))
    changed = {
        "generator": fake,
        "thread": part.get("thread", InlineThread)(),
        "route": part.get("route", LabelRoute)(fake),
    }
    error, ended_s = run_virtual(failing(parts(max_staleness=max_staleness, limit_s=50.0, **changed)))
    (leaf,) = leaves(error)
    assert isinstance(leaf, StalledError)
    with pytest.raises(StalledError, match=name):
        raise leaf
    assert 49.9 < ended_s < 50.0 + 30.0  # what went before took less than that


def test_a_limit_that_is_kept_ends_nothing(parts: Callable[..., Parts]) -> None:
    """Every wait is just below the limit, all together far above it."""
    made = parts(
        limit_s=7.0,
        generator=FakeGenerator(eos_token_id=256, length=lambda _: 6, step_s=1.0),
        thread=InlineThread(6.5),
    )
    assert run_virtual(made.stages()) == 5


def test_a_timeout_of_the_trainers_own_is_not_the_runs(parts: Callable[..., Parts]) -> None:
    class Late(CountingTrainer):
        def step(self, batch: Batch) -> StepResult:
            raise TimeoutError("a peer did not answer")

    error, _ = run_virtual(failing(parts(trainer=Late())))
    (leaf,) = leaves(error)
    assert (type(leaf), str(leaf)) == (TimeoutError, "a peer did not answer")


def in_real_time(work: Coroutine[Any, Any, Any]) -> tuple[Any, float]:
    begun_s = time.monotonic()
    return clock.run(work), time.monotonic() - begun_s


def at_full_speed() -> dict[str, Any]:
    fake = FakeGenerator(eos_token_id=256, length=lambda request: geometric(request, 8.0), step_s=0.001)
    return {"generator": fake, "route": LabelRoute(fake, 0.0), "thread": TrainingThread()}


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_real_time_and_the_real_thread(parts: Callable[..., Parts], max_staleness: int) -> None:
    class Slow(CountingTrainer):
        def step(self, batch: Batch) -> StepResult:
            time.sleep(0.02)
            return super().step(batch)

    made = parts(**at_full_speed(), max_staleness=max_staleness, trainer=Slow())
    assert in_real_time(made.stages())[0] == 5
    assert max(staleness(made.groups(step), step - 1) for step in range(1, 6)) <= max_staleness
    assert all(row["loop/lag_p99_ms"] is not None for row in made.rows)


def test_a_failure_does_not_wait_for_a_step_in_the_thread(parts: Callable[..., Parts]) -> None:
    """Scoring of the next step's groups fails while the first step is in the thread for 5 s."""

    class Slow(CountingTrainer):
        def step(self, batch: Batch) -> StepResult:
            time.sleep(5.0)
            return super().step(batch)

    class FailsLater(Alternating):
        async def score(self, task: Task, rollout: Rollout) -> Score:
            if task.index == 3:
                await asyncio.sleep(0.3)
                raise Broken
            return await super().score(task, rollout)

    made = parts(**at_full_speed(), max_staleness=1, trainer=Slow(), scorer=FailsLater())
    (error, _), took_s = in_real_time(failing(made))
    assert isinstance(leaves(error)[0], Broken)
    assert took_s < 2.0


def test_a_failure_in_the_thread_keeps_its_traceback(parts: Callable[..., Parts]) -> None:
    made = parts(**at_full_speed())
    made.trainer.step = lambda batch: {}[batch.num_tokens]
    (error, _), took_s = in_real_time(failing(made))
    (leaf,) = leaves(error)
    assert isinstance(leaf, KeyError)
    assert "{}[batch.num_tokens]" in "".join(traceback.format_exception(leaf))
    assert took_s < 2.0
