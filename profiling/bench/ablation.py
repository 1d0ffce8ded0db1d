"""Ablations: one configuration, several variants of it, several seeds each, on one engine.

Every run starts from the same weights. A finished run is one line of OUT/rows.jsonl; a run that has one is not made
again, so that the script can be stopped and started at any time. Printed at the end: reward of the last 10 steps and
held-out accuracy of every variant, its paired difference to the first one, and the curves, with 95 % intervals over the
seeds.

Run: python -m profiling.bench.ablation estimators|staleness [--seeds 10] [--out runs/ablation] [section.key=value ...]
"""

from __future__ import annotations

import argparse
import itertools
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from engine import clock, environment
from engine.admission import Admission
from engine.config import Config, load
from engine.types import Group

CONFIG = Path("configs/petri.toml")



class Variant(NamedTuple):
    """Overrides of the configuration, and of `--seeds` where it is smaller. `held`: every token is trained exactly that
    many versions after the one that made it, once as many have been made."""

    overrides: tuple[str, ...]
    held: int = 0
    seeds: int = 10_000


def _steps(count: int) -> tuple[str, str]:
    return f"run.steps={count}", f"evals.every={count}"


_LOSSES = {
    **{f"{preset}": (f"algorithm.preset={preset}",) for preset in ("cispo", "ppo_clip", "m2po", "decoupled_ppo")},
    "uncorrected": ("algorithm.ratio=none", "algorithm.rule=none"),
}

STUDIES: dict[str, dict[str, Variant]] = {
    "estimators": {
        f"{advantage} {aggregation}": Variant(
            (f"algorithm.advantage={advantage}", f"algorithm.aggregation={aggregation}")
        )
        for advantage, aggregation in itertools.product(
            ("leave_one_out", "group_norm"), ("token_mean", "prompt_mean")
        )
    },
    "staleness": {
        "0 cispo": Variant(_steps(100)),
        **{f"{held} {name}": Variant((*loss, *_steps(100)), held)
           for held in (4, 16) for name, loss in _LOSSES.items()},
        **{f"64 {name}": Variant((*_LOSSES[name], *_steps(200)), 64, seeds=3) for name in ("cispo", "uncorrected")},
    },
}

# Two-sided 95 % points of Student's t by degrees of freedom, from a published table; between two the lower one's holds.
_T95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 14: 2.145, 19: 2.093,
        29: 2.045, 59: 2.001}
_LAST_STEPS = 10
_CURVE_STEPS = 20


class Outcome(msgspec.Struct, frozen=True):
    """One finished run. `rewards` is the mean reward of every step, `before` and `after` the sampled accuracy on the
    held-out questions, `steps_to_80` the first step at which the mean of 5 steps reached .8. `staleness` is the largest
    of any step, `k3` and `ess` are means over the steps that had it."""

    variant: str
    seed: int
    overrides: tuple[str, ...]
    rewards: list[float]
    before: float
    after: float
    steps_to_80: int | None
    time_s: float
    staleness: int = 0
    k3: float = 0.0
    ess: float = 0.0

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

    async def run(self, name: str, variant: Variant, seed: int) -> Outcome:
        """One run from the first weights on, and the held-out accuracy before and after it."""
        from engine.host import Host
        from engine.observe.terminal import SilentTerminal
        from engine.reward.pool import ScoringPool
        from engine.rollout.chat import open_chat
        from engine.tasks.source import TaskSource
        from evals.during import evaluate

        folder = self._out / f"{name.replace(' ', '-')}-{seed}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        held = [f"schedule.max_staleness={variant.held + 1}"] if variant.held else []
        config = load(CONFIG, [*self._overrides, *variant.overrides, *held, f"run.seed={seed}"])
        scorer = ScoringPool(config.tasks, config.reward, config.generate.max_new_tokens)
        chat = open_chat(config, self._model_folder)
        host = Host(config, folder, self._model_folder, self.generator, chat, TaskSource(config.tasks, seed), scorer,
                    SilentTerminal(), evaluate, admission=HeldAdmission if variant.held else Admission)
        started = clock.now()
        try:
            await host.train()
        finally:
            await scorer.close()
        return _outcome(folder, config, name, seed, tuple(self._overrides), clock.now() - started)


class HeldAdmission(Admission):
    """Holds staleness at `max_staleness` - 1: a step begins when every slot holds a completed group, so that each group
    waits for as many versions as there are steps' worth of groups before it."""

    async def select(self) -> Group | None:
        async with self._changed:
            if not self._selected:
                await self._changed.wait_for(lambda: not self._open and (not self._free or not self._left_to_admit))
        return await super().select()


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
    staleness = max(row["staleness/max"] or 0 for row in rows)
    full = [row for row in rows if row["staleness/max"] == staleness and row["mismatch/k3"] is not None]
    k3, ess = (sum(row[f"mismatch/{name}"] for row in full) / len(full) for name in ("k3", "ess"))
    return Outcome(variant, seed, overrides, rewards, before, after, next(reached, None), time_s, staleness, k3, ess)


async def _make(
    bench: Bench, variants: dict[str, Variant], wanted: Sequence[tuple[int, str]], rows: Path, made: list[Outcome]
) -> None:
    await bench.generator.open()
    try:
        for seed, name in wanted:
            outcome = await bench.run(name, variants[name], seed)
            made.append(outcome)
            with rows.open("ab") as file:
                file.write(msgspec.json.encode(outcome) + b"\n")
            print(f"{name}, seed {seed}: reward {outcome.last:.3f}, held out {outcome.before:.3f} -> "
                  f"{outcome.after:.3f}, .8 at step {outcome.steps_to_80}, staleness {outcome.staleness}, "
                  f"{outcome.time_s:.0f} s", flush=True)
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
    lines = ["| variant | seeds | reward, last 10 steps | held out, after | difference to the first | steps to .8 | "
             "largest staleness | k3 | ess |", "|---|---|---|---|---|---|---|---|---|"]
    first = {row.seed: row for row in made if row.variant == variants[0]}
    for variant in variants:
        rows = [row for row in made if row.variant == variant]
        if not rows:
            continue
        shared = [row.after - first[row.seed].after for row in rows if row.seed in first]
        reached = sorted(row.steps_to_80 for row in rows if row.steps_to_80 is not None)
        median = f"{reached[len(reached) // 2]} ({len(reached)} of {len(rows)} runs)" if reached else "never"
        cells = [_cell(*interval([row.last for row in rows])), _cell(*interval([row.after for row in rows])),
                 "" if variant == variants[0] else _cell(*interval(shared)), median,
                 str(max(row.staleness for row in rows)), f"{interval([row.k3 for row in rows])[0]:.2g}",
                 f"{interval([row.ess for row in rows])[0]:.2g}"]
        lines.append(f"| {variant} | {len(rows)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def curves(variants: Sequence[str], made: Sequence[Outcome]) -> str:
    """Markdown: a row per variant, mean reward over its seeds of every 20 steps, with intervals."""
    longest = max(len(row.rewards) for row in made)
    starts = range(0, longest, _CURVE_STEPS)
    lines = ["| variant | " + " | ".join(f"{start + 1}-{start + _CURVE_STEPS}" for start in starts) + " |",
             "|---|" + "---|" * len(starts)]
    for variant in variants:
        rows = [row.rewards for row in made if row.variant == variant]
        cut = [[rewards[start : start + _CURVE_STEPS] for rewards in rows if start < len(rewards)] for start in starts]
        cells = [_cell(*interval([sum(block) / len(block) for block in blocks])) if blocks else "" for blocks in cut]
        if rows:
            lines.append(f"| {variant} | {' | '.join(cells)} |")
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
    known = {(row.seed, row.variant) for row in made}
    # Seed by seed, so that a half-finished study compares its variants on the same seeds.
    wanted = [(seed, name) for seed, (name, variant) in itertools.product(range(arguments.seeds), variants.items())
              if seed < variant.seeds and (seed, name) not in known]
    if wanted:
        clock.run(_make(Bench(out, arguments.overrides), variants, wanted, rows, made))
    print(table(list(variants), made), curves(list(variants), made), sep="\n\n")


if __name__ == "__main__":
    main()
