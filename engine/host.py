"""One host: builds what a run needs in the right order, runs it, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Protocol

import torch

from engine import clock
from engine.admission import Admission
from engine.config import Config
from engine.environment import divide_cores, end_children, engine_environment
from engine.errors import ConfigError
from engine.generate.fake import FakeGenerator
from engine.generate.replay import ReplayGenerator
from engine.loop import Run, run_stages
from engine.observe.folder import create_run_folder
from engine.observe.memory import used_memory
from engine.observe.metrics import Value
from engine.observe.recorder import Recorder
from engine.observe.terminal import Terminal, open_terminal
from engine.protocols import Generator, Scorer, WeightRoute
from engine.rollout.chat import Chat, open_chat
from engine.rollout.drive import Driver
from engine.supervised import supervise
from engine.tasks.source import TaskSource
from engine.timeslice import Placement, Split, TimeSlice, golden, settle_level
from engine.train.model import end_token_ids, materialise
from engine.train.pack import Packing
from engine.train.rank import Learner, World
from engine.train.thread import TrainingThread, training_cores
from engine.train.trainer import TorchTrainer
from engine.types import Segment, Version
from engine.weights.digest import folder_digest

# torchrun kills its workers 30 s after a signal; what is saved must be saved before that.
STOP_LIMIT_S = 25.0


class Evaluation(Protocol):
    """An evaluation of the version that the generator serves; `launch.py` brings one from `evals/`."""

    async def __call__(
        self, *, generator: Generator, chat: Chat, tasks: TaskSource, scorer: Scorer, config: Config, folder: Path,
        step: int, version: Version, terminal: Terminal,
    ) -> dict[str, Value]:
        """Write result files into `folder`; return `eval/...` metrics. What was answered before a cancellation is kept
        there, and not asked again."""
        ...


def run_host(config: Config, config_name: str, tasks: TaskSource, scorer: Scorer, evaluate: Evaluation,
             world: World) -> None:
    """A whole training run on this host, from an empty folder to the last checkpoint. Call on the main thread."""
    generator_share(config)  # refused before anything is made
    folder = create_run_folder(config, config_name)
    terminal = open_terminal(config.observe.terminal, steps=config.run.steps, title=folder.name)
    learner = None
    try:
        terminal.note(f"run folder: {folder}")
        if world.size > 1:
            learner = Learner(world, config.train.ranks or world.size, config.run.stage_timeout_s)
        model_folder = materialise(config.model.path)
        chat = open_chat(config, model_folder)
        generator = build_generator(config, model_folder, folder, terminal)
        host = Host(config, folder, model_folder, generator, chat, tasks, scorer, terminal, evaluate, learner)
        clock.run(host.serve())
    finally:
        if learner is not None:
            learner.close()
        terminal.close()


def build_generator(config: Config, model_folder: Path, folder: Path, terminal: Terminal) -> Generator:
    """The generator of `generate.backend`, not opened yet; supervised steps need none, and get the fake."""
    match "fake" if config.algorithm.preset == "ce" else config.generate.backend:
        case "vllm":
            log_file = folder / "engine.log"
            terminal.status(f"starting vLLM (its log: {log_file})")
            cores, first_device = generator_share(config)
            with engine_environment(log_file, cores=cores, first_device=first_device):
                from engine.generate.vllm import VllmGenerator

                return VllmGenerator(
                    model_folder,
                    config.generate,
                    dtype=config.engine_dtype,
                    seed=config.run.seed,
                    end_token_ids=end_token_ids(model_folder),
                    log_file=log_file,
                    head_in_float32=config.model.lm_head_dtype == "float32",
                    split=config.schedule.placement == "split",
                )
        case "fake":
            return FakeGenerator(vocab_size=256, eos_token_id=end_token_ids(model_folder)[0])
        case "replay":
            return ReplayGenerator.from_run(Path(config.generate.replay_from))


def generator_share(config: Config) -> tuple[Sequence[int], int]:
    """What placement `split` leaves the generator: its cores, or on GPUs the number of the first device that is not a
    trainer's. Elsewhere it has everything.

    Raises:
        ConfigError: nothing is left for one of the two.
    """
    if config.schedule.placement != "split":
        return (), 0
    if not torch.cuda.is_available():
        return divide_cores(os.sched_getaffinity(0), config.schedule.cores)[0], 0
    devices, ranks = torch.cuda.device_count(), config.train.ranks
    if not 0 < ranks < devices:
        raise ConfigError("train.ranks", value=ranks,
                          limit=f"leaves one side none of this host's {devices} GPUs under placement = 'split'",
                          remedy="give the trainer some of the GPUs; the others are the generator's")
    return (), ranks


class LabelRoute:
    """For generators without weights: the version is only a label."""

    def __init__(self, set_version: Callable[[int], None]) -> None:
        self._set_version = set_version

    async def publish(self, number: int) -> Version:
        """See `protocols.WeightRoute.publish`."""
        self._set_version(number)
        return Version(number=number, digest="")


class Host:
    """The parts of a running host, built on its event loop."""

    def __init__(self, config: Config, folder: Path, model_folder: Path, generator: Generator, chat: Chat,
                 tasks: TaskSource, scorer: Scorer, terminal: Terminal, evaluate: Evaluation,
                 learner: Learner | None = None, admission: type[Admission] = Admission) -> None:
        self._config = config
        self._folder = folder
        self._model_folder = model_folder
        self._generator = generator
        self._tasks = tasks
        self._scorer = scorer
        self._terminal = terminal
        self._evaluate_version = evaluate
        self._chat = chat
        self._learner = learner
        self._admission = admission
        self._saved_step = 0

    async def serve(self) -> None:
        """A whole run: open what was brought, train, and close everything in reverse order, whatever happens."""
        async with AsyncExitStack() as closing:
            closing.push_async_callback(self._generator.close)
            closing.push_async_callback(self._scorer.close)
            await self._generator.open()
            await self.train()

    async def train(self) -> None:
        """Build the trainer and train, with a generator that is open and stays open, while someone watches it and the
        other ranks. An engine that has served another run gets this one's first version before anything is generated.
        """
        async with AsyncExitStack() as closing, asyncio.TaskGroup() as group:
            watching = [group.create_task(self._generator.watch())]
            if self._learner is not None:
                watching.append(group.create_task(self._learner.watch()))
            ranks = 1 if self._learner is None else self._learner.ranks
            self._thread = TrainingThread(training_cores(self._config.schedule, 0, ranks))
            self._recorder = self._open_recorder()
            closing.callback(self._recorder.close)
            run = await self._begin()
            self._answer_signals(run)
            self._stop = run.stop
            steps = await self._run_steps(run)
            if run.stop.is_set() and steps > self._saved_step:
                await run.placement.stop_generating()
                await self._save(steps)
            self._terminal.note(f"{'stopped after' if run.stop.is_set() else 'done:'} {steps} steps in {self._folder}")
            if steps and not self._trainer.version:
                self._terminal.note("no step changed the weights: --preview shows what the rewards are like")
            for task in watching:
                task.cancel()

    async def _begin(self) -> Run:
        """Everything before the first step. The trainer takes its memory while the generator sleeps as it will in every
        slice; whether it wakes up as it was decides how deep it may sleep."""
        placement = self._placement = self._place()
        # An engine that has served another run has its weights still.
        limit_s, fresh = self._config.run.stage_timeout_s, not self._generator.served_version
        before = await golden(self._generator, limit_s) if self._sleeps and fresh else None
        served = Version(number=0, digest=folder_digest(self._model_folder, getattr(torch, self._config.engine_dtype)))
        self._terminal.status("loading the trainer")
        async with placement.training():
            self._trainer = await self._thread.call(self._build_trainer)
            run = self._assemble(placement, self._route(self._trainer, self._thread), served)
            if isinstance(placement, TimeSlice):
                placement.trainer = self._trainer
            async with placement.publishing():
                if self._generator.served_version or placement.must_publish:
                    run.served = await self._publish_first(run.route)
        if before is not None:
            assert isinstance(placement, TimeSlice)
            await self._test_sleep(placement, before, run.route)
        placement.take_switch_s()  # no step's
        return run

    async def _publish_first(self, route: WeightRoute) -> Version:
        return await clock.within(self._config.run.stage_timeout_s, "the weight update", route.publish(0))

    async def _test_sleep(self, time_slice: TimeSlice, before: Segment, route: WeightRoute) -> None:
        await settle_level(time_slice, self._generator, before, lambda: self._publish_first(route), self._terminal.note,
                           self._config.run.stage_timeout_s)
        freed = time_slice.measured["generated"] - time_slice.measured["asleep"]
        # On a CPU a cache that nothing has been written to takes no memory yet.
        if torch.cuda.is_available() and freed < self._config.generate.kv_cache_gib * 2**29:
            self._terminal.note(f"the engine's sleep freed {freed / 2**30:.1f} GiB, less than half of its KV cache: is "
                                "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True set?")
        self._recorder.events.write("sleep", level=time_slice.level, **time_slice.measured)

    async def _run_steps(self, run: Run) -> int:
        """From the first evaluation to the last step; the steps made."""
        if self._config.evals.every:
            await self._evaluate(0, run.served)
        self._recorder.start()
        if self._config.algorithm.preset == "ce":
            return await supervise(run, self._chat)
        return 0 if run.stop.is_set() else await run_stages(run)

    def _build_trainer(self) -> TorchTrainer:
        reference = self._config.model.reference
        reference_folder = materialise(reference) if reference else None
        if self._learner is not None:
            return self._learner.trainer(self._config, self._model_folder, reference_folder)
        return TorchTrainer(self._config, self._model_folder, reference_folder=reference_folder)

    def _route(self, trainer: TorchTrainer, thread: TrainingThread) -> WeightRoute:
        if isinstance(self._generator, FakeGenerator | ReplayGenerator):
            return LabelRoute(self._generator.set_version)
        from engine.generate.vllm import VllmGenerator
        from engine.weights.local import LocalRoute

        assert isinstance(self._generator, VllmGenerator)
        wire_dtype = getattr(torch, self._config.engine_dtype)
        return LocalRoute(self._generator, trainer, wire_dtype, thread.call)

    def _open_recorder(self) -> Recorder:
        observe = self._config.observe
        return Recorder(
            self._folder, self._terminal, envs=[task.label for task in self._config.tasks], samples=observe.samples,
            tensorboard=observe.tensorboard, micro_batch_tokens=self._config.train.micro_batch_tokens,
        )

    @property
    def _sleeps(self) -> bool:
        chosen = self._config.generate
        return chosen.backend == "vllm" and self._config.sleep_level > 0

    def _place(self) -> Placement:
        schedule, limit_s = self._config.schedule, self._config.run.stage_timeout_s
        if schedule.placement == "split":
            return Split(self._generator, in_flight=schedule.in_flight, limit_s=limit_s)
        return TimeSlice(
            self._generator, self._thread.call, level=self._config.sleep_level, in_flight=schedule.in_flight,
            offload=self._config.train.offload, limit_s=limit_s, memory=used_memory(),
        )

    def _assemble(self, placement: Placement, route: WeightRoute, served: Version) -> Run:
        config = self._config
        builds = f"{config.generate.backend} farfield-{importlib.metadata.version('farfield')}"
        return Run(
            config=config,
            tasks=self._tasks,
            admission=self._admission(
                groups_per_step=config.schedule.groups_per_step,
                max_staleness=config.schedule.max_staleness,
                total=config.run.steps * config.schedule.groups_per_step,
                overdue=config.schedule.overdue,
                max_wait_s=config.schedule.max_wait_s,
            ),
            driver=Driver(
                self._generator, self._chat, run_seed=config.run.seed, worker="learner", engine_build=builds,
                max_in_flight=config.generate.max_in_flight,
            ),
            scorer=self._scorer,
            trainer=self._trainer,
            thread=self._thread,
            route=route,
            placement=placement,
            packing=Packing(
                estimator=config.algorithm.advantage,
                aggregation=config.algorithm.aggregation,
                micro_batch_tokens=config.train.micro_batch_tokens,
                max_new_tokens=config.generate.max_new_tokens,
                temperature=config.generate.temperature,
                ranks=self._trainer.ranks,
            ),
            recorder=self._recorder,
            save=self._save_if_due,
            evaluate=self._evaluate_if_due,
            served=served,
        )

    async def _save_if_due(self, step: int) -> None:
        every = self._config.checkpoint.every
        # Asked to stop: saved at once, before the generator gets anything back.
        if step == self._config.run.steps or self._stop.is_set() or (every and step % every == 0):
            await self._save(step)

    async def _evaluate_if_due(self, step: int, version: Version) -> None:
        every = self._config.evals.every
        if every and (step == self._config.run.steps or step % every == 0):
            async with self._placement.quiet():
                await self._evaluate(step, version)

    async def _save(self, step: int) -> None:
        folder = self._folder / "checkpoints" / f"step-{step:06d}"
        self._terminal.status(f"saving {folder.name}")
        saving = self._thread.call(self._trainer.save, folder)
        await clock.within(self._config.run.stage_timeout_s, "saving a checkpoint", saving)
        link = folder.with_name(".latest")
        link.unlink(missing_ok=True)
        link.symlink_to(folder.name)
        link.replace(folder.with_name("latest"))
        self._saved_step = step
        self._recorder.events.write("checkpoint", step=step, version=self._trainer.version)
        self._terminal.note(f"checkpoint: {folder}")

    async def _evaluate(self, step: int, version: Version) -> None:
        """Evaluate the served version. A signal cuts it short."""
        started = clock.now()
        work = self._evaluate_version(
            generator=self._generator,
            chat=self._chat,
            tasks=self._tasks,
            scorer=self._scorer,
            config=self._config,
            folder=self._folder / "evals" / f"step-{step:06d}",
            step=step,
            version=version,
            terminal=self._terminal,
        )
        working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                self._terminal.note(f"evaluation of step {step} cut short")
                return
            metrics = await working
        finally:
            stopping.cancel()
            working.cancel()
            await asyncio.wait({working})
        if step:
            self._recorder.evaluated(metrics, clock.now() - started)
        self._recorder.events.write("evaluation", step=step, version=version.number, digest=version.digest, **metrics)

    def _answer_signals(self, run: Run) -> None:
        loop = asyncio.get_running_loop()

        def give_up(why: str) -> None:
            self._terminal.close()
            print(f"stopped at once, {why}; the last checkpoint is that of step {self._saved_step}", file=sys.stderr)
            end_children()
            os._exit(1)

        def answer() -> None:
            if run.stop.is_set():
                give_up("at the second signal")
            run.stop.set()
            self._terminal.note("stopping after this step, then saving; once more stops at once")
            loop.call_later(STOP_LIMIT_S, give_up, f"the step took more than {STOP_LIMIT_S:.0f} s")

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, answer)
