"""The run's book: one row per step into every log and onto the terminal."""

from __future__ import annotations

import asyncio
import contextlib
import resource
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from engine.clock import now
from engine.observe.metrics import EventLog, MetricsLog, RolloutLog, Row, Value, complete_row, group_metrics
from engine.observe.tensorboard import TensorBoardLog
from engine.observe.terminal import Sample, Terminal
from engine.protocols import StepResult
from engine.types import Batch, Group, Version

_LAG_PERIOD_S = 0.01
_TIMES = ("wait_rollouts", "wait_stale", "train", "publish", "switch")


class Timings:
    """Seconds of one step, by name."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def measure(self, name: str) -> Iterator[None]:
        started = now()
        yield
        self.add(name, now() - started)

    def add(self, name: str, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def get(self, name: str) -> float:
        """0 for what did not happen in this step."""
        return self._seconds.get(name, 0.0)


class Recorder:
    """Collects what stages report between two rows, and writes the rows."""

    def __init__(
        self, folder: Path, terminal: Terminal, *, envs: Sequence[str], samples: int, tensorboard: bool,
        micro_batch_tokens: int,
    ) -> None:
        self.events = EventLog(folder)
        self.rows: list[Row] = []
        self._terminal = terminal
        self._metrics = MetricsLog(folder)
        self._rollouts = RolloutLog(folder)
        self._tensorboard = TensorBoardLog(folder) if tensorboard else None
        self._envs = envs
        self._num_samples = samples
        self._micro_batch_tokens = micro_batch_tokens
        self._started = self._last_row = now()
        self._leased: Counter[str] = Counter()
        self._verdicts: Mapping[str, str] = {}
        self._lags_ms: list[float] = []
        self._evaluation: dict[str, Value] = {}
        self._evaluation_s = 0.0

    def start(self) -> None:
        """The first admission is about to happen: step times count from here."""
        self._last_row = now()

    def leased(self, env: str) -> None:
        """A group was admitted."""
        self._leased[env] += 1

    def judged(self, step: int, verdicts: Mapping[str, str], metrics: Row) -> None:
        """What the step's mismatch metrics mean: an event when that changes, and a line when one turns bad."""
        self._terminal.judged(verdicts)
        changed = {name: word for name, word in verdicts.items() if self._verdicts.get(name, "healthy") != word}
        if changed:
            self.events.write("health", step=step, **changed)
        for name in (name for name, word in changed.items() if word == "bad"):
            self._terminal.note(f"step {step}: {name} = {metrics[name]:.3g} is bad (docs/algorithms.md, Health)")
        self._verdicts = {**self._verdicts, **verdicts}

    def published(self, version: Version) -> None:
        """The engines serve this version."""
        self.events.write("published", number=version.number, digest=version.digest)

    def evaluated(self, metrics: dict[str, Value], seconds: float) -> None:
        """`eval/<suite>/<task>` values, and the time that they took, for the next row."""
        self._evaluation |= metrics
        self._evaluation_s += seconds

    async def watch_lag(self) -> None:
        """A stage: how late the loop answers a timer."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _LAG_PERIOD_S
            await asyncio.sleep(_LAG_PERIOD_S)
            self._lags_ms.append(1000 * (loop.time() - due))

    def step(
        self,
        step: int,
        version_before: int,
        version: int,
        groups: Sequence[Group],
        batch: Batch,
        result: StepResult,
        timings: Timings,
        generator_busy_s: float,
        memory: Mapping[str, int],
    ) -> None:
        """Write the row of a step whose consumed groups, with their fates, are `groups`. `memory` is in bytes, by
        transition of the devices."""
        at = now()
        elapsed, self._last_row = at - self._last_row, at
        row = complete_row(
            group_metrics(groups, version_before=version_before, envs=self._envs)
            | result.metrics
            | self._evaluation
            | {
                "step": step,
                "version": version,
                "skipped": result.skipped or None,
                "time_s": at - self._started,
                "groups/leased": self._leased.total(),
                "pack/efficiency": self._pack_efficiency(batch),
                "time/step": elapsed,
                # Within a slice a step that is skipped may end before the loop's clock moves.
                "busy/generator": min(1.0, generator_busy_s / elapsed) if elapsed else None,
                "busy/trainer": timings.get("train") / elapsed if elapsed else None,
                "loop/lag_p99_ms": float(np.percentile(self._lags_ms, 99)) if self._lags_ms else None,
                "memory/host_peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
            }
            | {f"memory/{transition}": used / 2**30 for transition, used in memory.items()}
            | {f"ledger/{env}/leased": self._leased[env] for env in self._envs}
            | {f"time/{name}": timings.get(name) for name in _TIMES}
            | {"time/eval": self._evaluation_s}
        )
        self._leased.clear()
        self._lags_ms.clear()
        self._evaluation.clear()
        self._evaluation_s = 0.0
        self.rows.append(row)
        self._metrics.write(row)
        self._rollouts.write(step, groups)
        if self._tensorboard is not None:
            self._tensorboard.write(row)
        if result.skipped:
            self.events.write("skipped", step=step, reason=result.skipped)
            self._terminal.note(f"step {step} changed no weights: {result.skipped}")
        self._terminal.step(row, samples(groups, self._num_samples))

    def close(self) -> None:
        """Flush and close every log."""
        self._metrics.close()
        self.events.close()
        if self._tensorboard is not None:
            self._tensorboard.close()

    def _pack_efficiency(self, batch: Batch) -> float | None:
        micro_batches = [micro for rank in batch.micro_batches for micro in rank]
        if not micro_batches:
            return None
        return sum(len(micro.token_ids) for micro in micro_batches) / (len(micro_batches) * self._micro_batch_tokens)


def samples(groups: Sequence[Group], count: int) -> list[Sample]:
    """One completion from each of the first `count` groups that have any, the best one, so that successes show."""
    shown = []
    for group in [group for group in groups if group.rollouts][:count]:
        best = max(group.rollouts, key=lambda rollout: -1.0 if rollout.reward is None else rollout.reward)
        shown.append(
            Sample(
                prompt=group.lease.task.messages[-1].content,
                completion=best.text,
                extracted=best.extracted,
                reward=best.reward,
            )
        )
    return shown
