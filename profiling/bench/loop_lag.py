"""P9: how late the event loop answers a timer while it feeds vLLM and the training thread trains beside it.

Both work at once here, which is harder than a time slice. Printed: p99 over its goal of 10 ms.

Run: python -m profiling.bench.loop_lag
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np

from engine import environment

STEPS = 6
GOAL_MS = 10.0
_PERIOD_S = 0.01


async def measure(generator: Any, config: Any, folder: Path) -> None:
    """Train STEPS steps while ROLLOUTS requests are always open."""
    from engine.train.thread import TrainingThread
    from engine.train.trainer import TorchTrainer
    from profiling.bench.setup import ROLLOUTS, batch, request

    await generator.open()
    trainer = TorchTrainer(config, folder)
    thread = TrainingThread()
    await thread.call(trainer.step, batch())
    await generator.wave([request(number) for number in range(ROLLOUTS)])
    lags_ms: list[float] = []
    tokens = 0

    async def watch() -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _PERIOD_S
            await asyncio.sleep(_PERIOD_S)
            lags_ms.append(1000 * (loop.time() - due))

    async def ask(first: int) -> None:
        nonlocal tokens
        number = first
        while True:
            number += ROLLOUTS
            tokens += len((await generator.generate(request(number))).token_ids)

    started = asyncio.get_running_loop().time()
    async with asyncio.TaskGroup() as group:
        others = [group.create_task(watch()), *(group.create_task(ask(number)) for number in range(ROLLOUTS))]
        for _ in range(STEPS):
            await thread.call(trainer.step, batch())
        elapsed = asyncio.get_running_loop().time() - started
        for task in others:
            task.cancel()
    await generator.close()
    p50, p99, most = np.percentile(lags_ms, [50, 99, 100])
    print(f"{len(lags_ms)} timers in {elapsed:.1f} s: lag p50 {p50:.2f} ms, p99 {p99:.2f} ms, max {most:.1f} ms; "
          f"{tokens / elapsed:.0f} generated tokens/s beside {STEPS} training steps of {elapsed / STEPS:.1f} s")
    print(f"P9 p99 / goal {p99 / GOAL_MS:.2f} (goal <= 1, {GOAL_MS:.0f} ms)")


def main() -> None:
    environment.prepare()
    from profiling.bench.setup import on_engine

    on_engine(measure)


if __name__ == "__main__":
    main()
