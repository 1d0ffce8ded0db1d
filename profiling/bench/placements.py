"""P2, P3 and P10 for real: the quickstart's engine, trainer and tasks, on this machine's cores.

Throughput is groups trained per second in a run at `--max-staleness`, whose learning rate is too small to change the
completions; its first and last four steps, in which the slots fill and empty, are left out. Its bound is what the
stages can do alone on the cores that they have in the run: g, generation with as many completions in flight and nobody
training, and t, the very batches of the run trained with nobody generating. `split` is bound by the slower,
`time_sliced` by 1 / (1/g + 1/t), which is also a lower bound of the trace (P3). Beside it: the same run at
`max_staleness` 0, and P10, the seconds from a slice's last token until every open completion has made its next, less
training and publishing, over all seconds.

Run: python -m profiling.bench.placements time_sliced|split [--steps 18] [--max-staleness 4] [section.key=value ...]
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from engine import clock, environment
from engine.clock import now
from engine.config import Config, load
from engine.types import Group, Lease, Sampling

_EDGE = 4
_WHOLE_WAVES = 128
_LOOK_S = 0.002
# Longer than the engine takes for a step, shorter than the trainer.
_SILENCE_S = 1.0


class Tokens:
    """Looks into the engine's output processor for when tokens come: completions tell nothing before they end."""

    def __init__(self, generator: Any) -> None:
        self._states = generator.llm.output_processor.request_states
        self._silences: list[tuple[float, float]] = []

    async def watch(self) -> None:
        """Never returns."""
        before, last_s, since_s, pending = dict[str, int](), now(), 0.0, set[str]()
        while True:
            await asyncio.sleep(_LOOK_S)
            made = {name: state.detokenizer.num_output_tokens() for name, state in self._states.items()}
            if any(made.get(name, -1) != count for name, count in before.items()) or any(
                count for name, count in made.items() if name not in before
            ):
                if now() - last_s > _SILENCE_S:
                    since_s, pending = last_s, {name for name, count in made.items() if not count}
                last_s = now()
            if pending and not (pending := {name for name in pending if made.get(name) == 0}):
                self._silences.append((since_s, now()))
            before = made

    def silences(self, first_s: float, last_s: float) -> list[float]:
        """Seconds from a last token in that time until every request that was open when the next one came had made
        one: the cache has been computed again."""
        return [after_s - at_s for at_s, after_s in self._silences if first_s <= at_s < last_s]


class Bench:
    """One engine, several runs and measurements on it."""

    def __init__(self, placement: str, steps: int, max_staleness: int, overrides: Sequence[str], out: Path) -> None:
        from engine.host import build_generator
        from engine.observe.terminal import SilentTerminal
        from engine.rollout.chat import open_chat
        from engine.train.model import materialise

        self._placement, self._steps, self._out = placement, steps, out
        self._max_staleness, self._overrides = max_staleness, overrides
        self.config = self._configured(max_staleness)
        self._model_folder = materialise(self.config.model.path)
        self._chat = open_chat(self.config, self._model_folder)
        # For the run at 0 whole waves must fit.
        self._generator: Any = build_generator(self._configured(0), self._model_folder, out, SilentTerminal())

    def _configured(self, max_staleness: int) -> Config:
        plain = [] if max_staleness else [f"generate.max_in_flight={_WHOLE_WAVES}", "schedule.steps_per_slice=1"]
        return load(Path("configs/quickstart.toml"), [
            f"schedule.placement={self._placement}", f"schedule.max_staleness={max_staleness}",
            f"run.steps={self._steps}", "train.lr=1e-12", "evals.every=0", "observe.tensorboard=false",
            *self._overrides, *plain,
        ])

    async def measure(self) -> None:
        """Everything, printed."""
        await self._generator.open()
        tokens = Tokens(self._generator)
        watching = asyncio.ensure_future(tokens.watch())
        await self._generation_alone(2)  # the first tokens pay for the kernels
        apart, begun_s = self._placement == "split", now()
        rows = await self._run(self._max_staleness)
        watching.cancel()
        # In turns alone: a device that waits for the other by design says nothing.
        plain = 0.0 if apart else self._throughput(await self._run(0))
        generation = await self._generation_alone(self._steps)
        training = await self._training_alone()
        await self._generator.close()
        asynchronous = self._throughput(rows)
        bound = min(generation, training) if apart else 1 / (1 / generation + 1 / training)
        goal = ".9" if apart else ".95"
        stale = max(row["staleness/max"] or 0 for row in rows)
        counted = rows[_EDGE:-_EDGE]
        for name in ("step", "wait_rollouts", "wait_stale", "train", "publish", "switch"):
            print(f"time/{name} {sum(row[f'time/{name}'] or 0.0 for row in counted) / len(counted):.2f} s", end="  ")
        print()
        print(f"groups/s: generation alone {generation:.3f}, training alone {training:.3f}, "
              f"max_staleness {self._max_staleness} {asynchronous:.3f} (largest staleness {stale})")
        print(f"P2 {self._placement} / {'slower stage' if apart else 'its limit'} {asynchronous / bound:.3f} "
              f"(goal >= {goal})")
        if not apart:
            print(f"P3 over max_staleness 0: {asynchronous / plain:.3f}")
            ends_s = [begun_s + row["time_s"] for row in rows]
            silences_s = tokens.silences(ends_s[_EDGE - 1], ends_s[-_EDGE - 1])
            switch_s, slice_s = self._switches(rows[_EDGE:-_EDGE], silences_s)
            print(f"P10 switch / slice {switch_s / slice_s:.3f} (goal <= .05): {switch_s:.2f} s of {slice_s:.2f} s")

    async def _run(self, max_staleness: int) -> list[dict[str, Any]]:
        from engine.host import Host
        from engine.observe.terminal import SilentTerminal
        from engine.reward.pool import ScoringPool
        from engine.tasks.source import TaskSource
        from evals.during import evaluate

        config = self._configured(max_staleness)
        folder = self._out / f"staleness-{max_staleness}"
        folder.mkdir()
        scorer = ScoringPool(config.tasks, config.reward, config.generate.max_new_tokens)
        host = Host(config, folder, self._model_folder, self._generator, self._chat, TaskSource(config.tasks, 0),
                    scorer, SilentTerminal(), evaluate)
        try:
            await host.train()
        finally:
            await scorer.close()
        return [msgspec.json.decode(line) for line in (folder / "metrics.jsonl").read_bytes().splitlines()]

    def _throughput(self, rows: Sequence[dict[str, Any]]) -> float:
        rows = rows[_EDGE:-_EDGE]
        return len(rows) * self.config.schedule.groups_per_step / sum(row["time/step"] for row in rows)

    def _switches(self, rows: Sequence[dict[str, Any]], silences_s: Sequence[float]) -> tuple[float, float]:
        """Seconds of switching and in all per step, means: no token comes while the trainer has the cores."""
        busy_s = sum(row["time/train"] + row["time/publish"] for row in rows)
        return (sum(silences_s) - busy_s) / len(rows), sum(row["time/step"] for row in rows) / len(rows)

    async def _generation_alone(self, steps: int) -> float:
        """Groups per second with every slot generating, from the first step's worth of groups to the last."""
        from engine.rollout.drive import Driver
        from engine.tasks.source import TaskSource

        config, per_step = self.config, self.config.schedule.groups_per_step
        driver = Driver(self._generator, self._chat, run_seed=1, worker="bench", engine_build="",
                        max_in_flight=config.generate.max_in_flight)
        tasks, ended_s = TaskSource(config.tasks, 1), list[float]()
        orders = iter(range(1_000_000))

        async def slot() -> None:
            for order in orders:
                await driver.group(Lease(
                    lease_id=f"alone-{steps}-{order}", order=order, task=tasks.next(),
                    group_size=config.generate.group_size, sampling=Sampling.of(config.generate), served_version=0,
                ))
                ended_s.append(now())
                if len(ended_s) > steps * per_step:
                    return

        # As many slots as the run has, so that as many are in flight.
        async with asyncio.TaskGroup() as slots:
            working = [slots.create_task(slot()) for _ in range(max(2, self._max_staleness) * per_step)]
            await asyncio.wait(working, return_when=asyncio.FIRST_COMPLETED)
            for one in working:
                one.cancel()
        steady = ended_s[per_step : steps * per_step]
        return (len(steady) - 1) / (steady[-1] - steady[0]) if len(steady) > 1 else 0.0

    async def _training_alone(self) -> float:
        """Groups per second of the run's own batches."""
        from engine.train.pack import Packing, build_batch
        from engine.train.thread import TrainingThread, training_cores
        from engine.train.trainer import TorchTrainer

        config = self.config
        packing = Packing(estimator=config.algorithm.advantage, aggregation=config.algorithm.aggregation,
                          micro_batch_tokens=config.train.micro_batch_tokens,
                          max_new_tokens=config.generate.max_new_tokens, temperature=config.generate.temperature)
        await self._generator.interrupt()
        thread = TrainingThread(training_cores(config.schedule, 0, 1))
        trainer = await thread.call(TorchTrainer, config, self._model_folder)
        spent_s: list[float] = []
        for number, groups in enumerate(self._batches()):
            batch, _ = build_batch(groups, packing, version=number)
            started = now()
            await thread.call(trainer.step, batch)
            spent_s.append(now() - started)
        await self._generator.resume()
        spent_s = spent_s[_EDGE:-_EDGE]
        return len(spent_s) * config.schedule.groups_per_step / sum(spent_s)

    def _batches(self) -> Iterator[list[Group]]:
        from engine.observe.metrics import read_groups

        for path in sorted((self._out / f"staleness-{self._max_staleness}" / "rollouts").iterdir()):
            yield [group for group in read_groups(path) if group.outcome in ("trained", "zero_signal")]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("placement", choices=["time_sliced", "split"])
    parser.add_argument("--steps", type=int, default=18)
    parser.add_argument("--max-staleness", type=int, default=4)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    arguments = parser.parse_intermixed_args()
    environment.prepare()
    with tempfile.TemporaryDirectory() as out:
        clock.run(Bench(arguments.placement, arguments.steps, arguments.max_staleness, arguments.overrides,
                        Path(out)).measure())


if __name__ == "__main__":
    main()
