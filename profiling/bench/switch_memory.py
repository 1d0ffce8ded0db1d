"""P10 on CPU: the share of a full KV cache's memory that sleep gives back to the system, and what a switch costs.

Goal >= .95 of the KV cache's bytes. The seconds of sleeping and waking are printed beside it; pages come back when they
are touched, which is not in them.

Run: python -m profiling.bench.switch_memory
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from engine import environment
from engine.generate.cpu_sleep import CpuSleep

if TYPE_CHECKING:
    from engine.config import Config
    from engine.generate.vllm import VllmGenerator

ROUNDS = 5


class WorkerExtension(CpuSleep):
    """Mixed into vLLM's worker: fills the cache, and looks at its own memory."""

    def fill_kv_cache(self) -> int:
        """Write every byte of the KV cache, so that all of it is resident; returns how many."""
        worker: Any = self
        storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in worker.model_runner.kv_caches}
        for storage in storages.values():
            storage.fill_(1)
        return sum(storage.nbytes() for storage in storages.values())

    def resident(self) -> int:
        """Bytes of this process in memory."""
        return psutil.Process().memory_info().rss


async def measure(generator: VllmGenerator, config: Config, folder: Path) -> None:
    """Sleep and wake several times with a full cache; level 2 last, since no weights follow."""
    await generator.open()
    await generator.interrupt()
    shares, asleep, awake = zip(*[await _round(generator) for _ in range(ROUNDS)], strict=True)
    [before] = await generator.llm.collective_rpc("resident")
    await generator.sleep(2)
    [after] = await generator.llm.collective_rpc("resident")
    await generator.close()
    print(f"sleep {statistics.median(asleep):.3f} s, wake {statistics.median(awake):.3f} s, medians of {ROUNDS}; "
          f"level 2 gives back {(before - after) / 2**20:.0f} MiB more")
    print(f"P10 given back / KV cache: {min(shares):.3f} at least (goal >= .95), 135M model")


async def _round(generator: VllmGenerator) -> tuple[float, float, float]:
    """Share given back, seconds to sleep, seconds to wake."""
    [size] = await generator.llm.collective_rpc("fill_kv_cache")
    [before] = await generator.llm.collective_rpc("resident")
    started = time.perf_counter()
    await generator.sleep(1)
    asleep = time.perf_counter() - started
    [after] = await generator.llm.collective_rpc("resident")
    started = time.perf_counter()
    await generator.wake("weights")
    await generator.wake("kv_cache")
    return (before - after) / size, asleep, time.perf_counter() - started


def main() -> None:
    environment.prepare()
    from profiling.bench.setup import on_engine

    on_engine(measure, "profiling.bench.switch_memory.WorkerExtension")


if __name__ == "__main__":
    main()
