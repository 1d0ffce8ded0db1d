"""Ablations: one configuration, several variants of it, several seeds each, on one engine.

Every run starts from the same weights. A finished run is one line of OUT/rows.jsonl; a run that has one is not made
again, so that the script can be stopped and started at any time. Printed at the end: reward of the last 10 steps and
held-out accuracy of every variant, and its paired difference to the first one, with 95 % intervals over the seeds.

Run: python -m profiling.bench.ablation estimators [--seeds 10] [--out runs/ablation] [section.key=value ...]
"""

from __future__ import annotations

import argparse
import itertools
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from engine import clock, environment
from engine.config import Config, load

CONFIG = Path("configs/petri.toml")

STUDIES: dict[str, dict[str, list[str]]] = {
    "estimators": {
        f"{advantage} {aggregation}": [f"algorithm.advantage={advantage}", f"algorithm.aggregation={aggregation}"]
        for advantage, aggregation in itertools.product(
            ("leave_one_out", "group_norm"), ("token_mean", "prompt_mean")
        )
    },
}

# Two-sided 95 % points of Student's t by degrees of freedom, from a published table; between two the lower one's holds.
_T95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 14: 2.145, 19: 2.093,
        29: 2.045, 59: 2.001}
_LAST_STEPS = 10


class Outcome(msgspec.Struct, frozen=True):
    """One finished run. `rewards` is the mean reward of every step, `before` and `after` the sampled accuracy on the
    held-out questions, `steps_to_80` the first step at which the mean of 5 steps reached .8."""

    variant: str
    seed: int
    overrides: tuple[str, ...]
    rewards: list[float]
    before: float
    after: float
    steps_to_80: int | None
    time_s: float

    @property
    def last(self) -> float:
        """Mean reward of the last steps."""
        tail = self.rewards[-_LAST_STEPS:]
        return sum(tail) / len(tail)


class Bench:
    """The engine and what every run shares."""

    def __init__(self, out: Path, overrides: Sequence[str]) -> None:
        from engine.host import build_generator
        from engine.observe.terminal import SilentTerminal
        from engine.train.model import materialise

        self._out, self._overrides = out, overrides
        config = load(CONFIG, overrides)
        self._model_folder = materialise(config.model.path)
        self.generator = build_generator(config, self._model_folder, out, SilentTerminal())

    async def run(self, variant: str, changes: Sequence[str], seed: int) -> Outcome:
        """One run from the first weights on, and the held-out accuracy before and after it."""
        from engine.host import Host
        from engine.observe.terminal import SilentTerminal
        from engine.reward.pool import ScoringPool
        from engine.rollout.chat import open_chat
        from engine.tasks.source import TaskSource
        from evals.held_out import evaluate

        folder = self._out / f"{variant.replace(' ', '-')}-{seed}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        config = load(CONFIG, [*self._overrides, *changes, f"run.seed={seed}"])
        scorer = ScoringPool(config.tasks, config.reward, config.generate.max_new_tokens)
        chat = open_chat(config, self._model_folder)
        host = Host(config, folder, self._model_folder, self.generator, chat, TaskSource(config.tasks, seed), scorer,
                    SilentTerminal(), evaluate)
        started = clock.now()
        try:
            await host.train()
        finally:
            await scorer.close()
        return _outcome(folder, config, variant, seed, tuple(self._overrides), clock.now() - started)


def _outcome(
    folder: Path, config: Config, variant: str, seed: int, overrides: tuple[str, ...], time_s: float
) -> Outcome:
    rows: list[Any] = [msgspec.json.decode(line) for line in (folder / "metrics.jsonl").read_bytes().splitlines()]
    rewards = [row["reward/mean"] for row in rows]
    label = config.tasks[0].label

    def accuracy(step: int) -> float:
        results = msgspec.json.decode((folder / "evals" / f"step-{step:06d}" / "held_out.json").read_bytes())
        return results[label]["sampled"]["mean"]

    reached = (step for step in range(5, len(rewards) + 1) if sum(rewards[step - 5 : step]) / 5 >= 0.8)
    before, after = accuracy(0), accuracy(config.run.steps)
    return Outcome(variant, seed, overrides, rewards, before, after, next(reached, None), time_s)


async def _make(bench: Bench, variants: dict[str, list[str]], seeds: int, rows: Path, made: list[Outcome]) -> None:
    await bench.generator.open()
    try:
        # Seed by seed, so that a half-finished study compares its variants on the same seeds.
        for seed, (variant, changes) in itertools.product(range(seeds), variants.items()):
            if any(row.variant == variant and row.seed == seed for row in made):
                continue
            outcome = await bench.run(variant, changes, seed)
            made.append(outcome)
            with rows.open("ab") as file:
                file.write(msgspec.json.encode(outcome) + b"\n")
            print(f"{variant}, seed {seed}: reward {outcome.last:.3f}, held out {outcome.before:.3f} -> "
                  f"{outcome.after:.3f}, .8 at step {outcome.steps_to_80}, {outcome.time_s:.0f} s", flush=True)
    finally:
        await bench.generator.close()


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half of the 95 % interval by Student's t; nan for less than two values."""
    count = len(values)
    mean = sum(values) / count
    if count < 2:
        return mean, math.nan
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / (count - 1))
    point = _T95[max(degrees for degrees in _T95 if degrees < count)]
    return mean, point * deviation / math.sqrt(count)


def table(variants: Sequence[str], made: Sequence[Outcome]) -> str:
    """Markdown: a row per variant, differences to the first on the seeds that both have."""
    lines = ["| variant | seeds | reward, last 10 steps | held out, after | difference to the first | steps to .8 |",
             "|---|---|---|---|---|---|"]
    first = {row.seed: row for row in made if row.variant == variants[0]}
    for variant in variants:
        rows = [row for row in made if row.variant == variant]
        if not rows:
            continue
        shared = [row.after - first[row.seed].after for row in rows if row.seed in first]
        reached = sorted(row.steps_to_80 for row in rows if row.steps_to_80 is not None)
        median = f"{reached[len(reached) // 2]} ({len(reached)} of {len(rows)} runs)" if reached else "never"
        cells = [_cell(*interval([row.last for row in rows])), _cell(*interval([row.after for row in rows])),
                 "" if variant == variants[0] else _cell(*interval(shared)), median]
        lines.append(f"| {variant} | {len(rows)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(mean: float, half: float) -> str:
    return f"{mean:+.3f} ± {half:.3f}" if mean < 0 else f"{mean:.3f} ± {half:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("runs/ablation"))
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    arguments = parser.parse_intermixed_args()
    environment.prepare()
    out = arguments.out / arguments.study
    out.mkdir(parents=True, exist_ok=True)
    rows = out / "rows.jsonl"
    made = [msgspec.json.decode(line, type=Outcome) for line in rows.read_bytes().splitlines()] if rows.exists() else []
    variants = STUDIES[arguments.study]
    made = [row for row in made if row.overrides == tuple(arguments.overrides) and row.variant in variants]
    wanted = set(itertools.product(variants, range(arguments.seeds)))
    if wanted - {(row.variant, row.seed) for row in made}:
        bench = Bench(out, arguments.overrides)
        clock.run(_make(bench, variants, arguments.seeds, rows, made))
    print(table(list(variants), made))


if __name__ == "__main__":
    main()
