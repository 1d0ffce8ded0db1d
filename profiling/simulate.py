"""The engine's own loop on the virtual clock: what a schedule costs on a machine that is described by a few constants.

Admission, driver, recorder and the placements are the engine's; generator, trainer, scorer and weights take the time
that a `Shape` says and compute nothing. Lengths are drawn for each rollout by its number, so that every schedule of one
seed trains the same completions.
"""

from __future__ import annotations

import asyncio
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from engine.admission import Admission
from engine.clock import now, run_virtual
from engine.config import Config
from engine.generate.fake import FakeGenerator
from engine.loop import Run, run_stages
from engine.observe.metrics import Row
from engine.observe.recorder import Recorder
from engine.observe.terminal import SilentTerminal
from engine.protocols import Score, StepResult
from engine.rollout.chat import Chat
from engine.rollout.drive import Driver
from engine.seeds import derive_seed
from engine.timeslice import Placement, Split, TimeSlice
from engine.train.pack import Packing
from engine.train.thread import TrainingThread
from engine.types import Batch, Int32, Message, Rollout, SegmentRequest, Task, Version

InFlight = Literal["recompute", "stale_kv", "drain"]
_NO_LIMIT_S = 1e9


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """A workload on a machine: `Shape(mean_tokens=128, sigma=1.0, train_s_per_token=0.002)`.

    Completions are log-normal with mean `mean_tokens` before they are cut at `max_new_tokens`; `sigma` 0 makes all
    alike. A decode step of n sequences takes `step_s + n step_s_per_sequence` seconds, a prefill `prefill_s_per_token`.
    A training step takes `train_s`, `train_s_per_token` for every token, prompts too, and every `stall_every`th one
    `stall_s` more. `publish_s` is a weight update, `sleep_s` handing the device over and back.

    The decode constants are this repository's 2-core machine with the 135M model (docs/results.md): 330 tokens/s at
    batch 64 are .19 s a step, of which .03 s is reading 270 MB of weights at 10 GB/s, the rest grows with the batch.
    Prefill is the forward third of a training token at 550 tokens/s.
    """

    group_size: int = 8
    groups_per_step: int = 32
    max_in_flight: int = 64
    prompt_tokens: int = 64
    mean_tokens: int = 128
    sigma: float = 0.0
    max_new_tokens: int = 1024
    step_s: float = 0.03
    step_s_per_sequence: float = 0.0025
    prefill_s_per_token: float = 0.0006
    train_s: float = 0.5
    train_s_per_token: float = 0.0018
    stall_s: float = 0.0
    stall_every: int = 1
    publish_s: float = 0.6
    sleep_s: float = 0.0

    def length(self, seed: int, order: int, index: int) -> int:
        """Tokens of member `index` of group `order`: the same for every schedule."""
        normal = np.random.default_rng(derive_seed(seed, order, index)).standard_normal()
        drawn = self.mean_tokens * math.exp(self.sigma * normal - self.sigma**2 / 2)
        return min(max(1, round(drawn)), self.max_new_tokens)


class Schedule(msgspec.Struct, frozen=True, kw_only=True):
    """Keys of the configuration's section `schedule`: `Schedule(placement="split", max_staleness=4)`."""

    placement: Literal["time_sliced", "split"] = "time_sliced"
    max_staleness: int = 4
    steps_per_slice: int = 1
    in_flight: InFlight = "recompute"


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """A simulated run: its rows as in metrics.jsonl, and the seconds from the first admission to the last step."""

    schedule: Schedule
    rows: tuple[Row, ...]
    makespan_s: float
    tokens_beside_training: int
    """Generated while a training step ran."""

    @property
    def steady(self) -> tuple[Row, ...]:
        """Rows without the steps that fill the pipeline and those that empty it."""
        edge = self.schedule.max_staleness + 2
        return self.rows[edge : len(self.rows) - edge]

    @property
    def tokens_per_s(self) -> float:
        """Trained tokens per second in the steady rows."""
        return self.total("tokens/trained") / self.total("time/step")

    def total(self, key: str) -> float:
        """Sum of one key over the steady rows."""
        return sum(float(row[key] or 0.0) for row in self.steady)


def simulate(shape: Shape, schedule: Schedule, *, steps: int, seed: int = 0) -> Outcome:
    """Run `steps` steps of the engine's loop in simulated time."""
    with tempfile.TemporaryDirectory() as folder:
        return run_virtual(_simulate(shape, schedule, steps, seed, Path(folder)))


def lower_bound_s(shape: Shape, schedule: Schedule, *, steps: int, seed: int = 0) -> float:
    """No schedule of this placement trains the trace in less time, whatever its order, told from the lengths alone.

    Every token is decoded in some step of n sequences, and n is at most N, the smaller of `max_in_flight` and the
    rollouts that the admission's slots hold: its share of that step is `step_s / n + step_s_per_sequence`, at least
    `step_s / N + step_s_per_sequence`. Every prompt is computed once. That is g in all; t are the training steps, p the
    weight updates. One trainer makes t and p one after the other, and no token is made during p: so `split` needs
    p + max(g, t). `time_sliced` makes none during t either, and needs p + g + t. What a schedule does twice (prefill
    after a cut), the handing over, waiting and batches below N are its own cost and not in the bound.
    """
    rollouts = steps * shape.groups_per_step * shape.group_size
    tokens = sum(
        shape.length(seed, order, index)
        for order in range(steps * shape.groups_per_step)
        for index in range(shape.group_size)
    )
    at_once = min(shape.max_in_flight, _admission(shape, schedule, 0).slots * shape.group_size)
    prompts = rollouts * shape.prompt_tokens
    generate_s = tokens * (shape.step_s / at_once + shape.step_s_per_sequence) + prompts * shape.prefill_s_per_token
    stalls = steps // shape.stall_every * shape.stall_s
    train_s = steps * shape.train_s + (tokens + prompts) * shape.train_s_per_token + stalls
    publish_s = math.ceil(steps / schedule.steps_per_slice) * shape.publish_s
    return publish_s + (max(generate_s, train_s) if schedule.placement == "split" else generate_s + train_s)


class _Tasks:
    """One task for ever."""

    def next(self) -> Task:
        return Task(task_id="same/0", env="same", index=0, messages=(Message("user", ""),), answer={}, seed=0)


class _Prompts(Chat):
    """All prompts are equally long, and tokens have no text."""

    def __init__(self, tokens: int) -> None:
        self._prompt_T = np.zeros(tokens, np.int32)

    def encode(self, task: Task) -> Int32:
        return self._prompt_T

    def refusal(self, task: Task) -> str:
        return ""

    def decode(self, token_ids: Int32) -> str:
        return ""


class _Signal:
    """A scorer that costs nothing; no group is without a signal."""

    async def score(self, task: Task, rollout: Rollout) -> Score:
        return Score(float(rollout.index_in_group % 2))

    async def close(self) -> None:
        pass


class _Trainer:
    """Counts its steps; they take time when `_Thread` calls them."""

    version = 0

    def step(self, batch: Batch) -> StepResult:
        self.version += 1
        return StepResult()

    def offload(self, what: Literal["optimizer", "all"]) -> None:
        pass

    def onload(self) -> None:
        pass

    def save(self, folder: Path) -> None:
        pass


class _Thread(TrainingThread):
    """Calls run on the loop itself, in no thread; a training step takes its time first."""

    def __init__(self, shape: Shape, generator: FakeGenerator) -> None:
        self._shape = shape
        self._generator = generator
        self.steps = 0
        self.tokens_beside = 0

    async def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        match args:
            case (Batch() as batch,):
                before = self._generator.tokens_generated
                await asyncio.sleep(self._step_s(batch))
                self.tokens_beside += self._generator.tokens_generated - before
            case _:
                pass
        return function(*args, **kwargs)

    def _step_s(self, batch: Batch) -> float:
        self.steps += 1
        tokens = sum(len(micro.token_ids) for rank in batch.micro_batches for micro in rank)
        stall_s = 0.0 if self.steps % self._shape.stall_every else self._shape.stall_s
        return self._shape.train_s + tokens * self._shape.train_s_per_token + stall_s


class _Route:
    """A version is a label that takes `publish_s` to be known."""

    def __init__(self, generator: FakeGenerator, publish_s: float) -> None:
        self._generator = generator
        self._publish_s = publish_s

    async def publish(self, number: int) -> Version:
        await asyncio.sleep(self._publish_s)
        self._generator.set_version(number)
        return Version(number=number, digest="")


class _Recorder(Recorder):
    async def watch_lag(self) -> None:
        """A simulated loop is never late."""
        await asyncio.Event().wait()


async def _simulate(shape: Shape, schedule: Schedule, steps: int, seed: int, folder: Path) -> Outcome:
    generator = _generator(shape, seed)
    run = _run(shape, schedule, steps, generator, folder)
    run.recorder.start()
    await run_stages(run)
    makespan_s = now()
    run.recorder.close()
    assert isinstance(run.thread, _Thread)
    return Outcome(
        schedule=schedule, rows=tuple(run.recorder.rows), makespan_s=makespan_s,
        tokens_beside_training=run.thread.tokens_beside,
    )


def _generator(shape: Shape, seed: int) -> FakeGenerator:
    def left(request: SegmentRequest) -> int:
        order, index, _ = request.request_id.split("/")
        made = shape.max_new_tokens - request.max_new_tokens
        return shape.length(seed, int(order), int(index)) - made

    return FakeGenerator(
        length=left, step_s=shape.step_s, step_s_per_sequence=shape.step_s_per_sequence,
        prefill_s_per_token=shape.prefill_s_per_token, sleep_s=shape.sleep_s, max_num_seqs=shape.max_in_flight,
    )


def _run(shape: Shape, schedule: Schedule, steps: int, generator: FakeGenerator, folder: Path) -> Run:
    config = _config(shape, schedule, steps)
    micro_batch_tokens = config.train.micro_batch_tokens

    async def nothing_due(step: int, version: Version | None = None) -> None:
        pass

    thread = _Thread(shape, generator)
    return Run(
        config=config,
        tasks=_Tasks(),  # pyright: ignore[reportArgumentType]
        admission=_admission(shape, schedule, steps * shape.groups_per_step),
        driver=Driver(
            generator, _Prompts(shape.prompt_tokens), run_seed=0, worker="simulated", engine_build="fake",
            max_in_flight=shape.max_in_flight,
        ),
        scorer=_Signal(),
        trainer=_Trainer(),
        thread=thread,
        route=_Route(generator, shape.publish_s),
        placement=_placement(schedule, generator, thread),
        packing=Packing(
            estimator="leave_one_out", aggregation="token_mean", micro_batch_tokens=micro_batch_tokens,
            max_new_tokens=shape.max_new_tokens, temperature=1.0,
        ),
        recorder=_Recorder(
            folder, SilentTerminal(), envs=["same"], samples=0, tensorboard=False,
            micro_batch_tokens=micro_batch_tokens,
        ),
        save=nothing_due,
        evaluate=nothing_due,
        served=Version(number=0, digest=""),
    )


def _placement(schedule: Schedule, generator: FakeGenerator, thread: _Thread) -> Placement:
    if schedule.placement == "split":
        return Split(generator, in_flight=schedule.in_flight, limit_s=_NO_LIMIT_S)
    return TimeSlice(
        generator, thread.call, level=1, in_flight=schedule.in_flight, offload="none", limit_s=_NO_LIMIT_S
    )


def _admission(shape: Shape, schedule: Schedule, total: int) -> Admission:
    return Admission(groups_per_step=shape.groups_per_step, max_staleness=schedule.max_staleness, total=total)


def _config(shape: Shape, schedule: Schedule, steps: int) -> Config:
    sections: dict[str, dict[str, Any]] = {
        "run": {"steps": steps, "stage_timeout_s": _NO_LIMIT_S},
        "model": {"path": "tiny-random"},
        "generate": {
            "backend": "fake", "group_size": shape.group_size, "max_new_tokens": shape.max_new_tokens,
            "max_in_flight": shape.max_in_flight,
        },
        "schedule": msgspec.to_builtins(schedule) | {"groups_per_step": shape.groups_per_step},
        "train": {"micro_batch_tokens": shape.prompt_tokens + shape.max_new_tokens},
    }
    return msgspec.convert(sections | {"tasks": [{"env": "jsonl", "name": "same"}]}, Config)
