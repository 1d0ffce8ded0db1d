"""P6: a weight update over what the engine itself needs to load and repack tensors that it already holds in memory.

Numerator: from `start_weight_update` to the end of `finish_weight_update`, as a run's `LocalRoute` drives them; the
whole publish, with writing the shared memory and the digest, is printed beside it. Denominator: in the engine's
worker, the same layerwise reload from clones in its own memory. Goal <= 1.3.

Run: python -m profiling.bench.weight_update
"""

from __future__ import annotations

import mmap
import statistics
import time
from pathlib import Path
from typing import Any

from engine import environment
from engine.generate.cpu_sleep import CpuSleep

ROUNDS = 9


class WorkerExtension(CpuSleep):
    """Mixed into vLLM's worker: the denominator."""

    def own_reload(self, path: str, names: list[str], dtype_names: list[str], shapes: list[list[int]]) -> float:
        """Seconds for start, load and finish with clones of the tensors at `path`."""
        from engine.weights.local import SharedMemoryUpdate, views

        receiver = self.weight_transfer_engine  # pyright: ignore[reportAttributeAccessIssue]
        with open(path, "rb") as file:
            memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ | mmap.PROT_WRITE, flags=mmap.MAP_PRIVATE)
        update = SharedMemoryUpdate(path=path, names=names, dtype_names=dtype_names, shapes=shapes)
        held = [(name, tensor.clone()) for name, tensor in views(memory, update.metas())]
        started = time.perf_counter()
        receiver.start_weight_update()
        receiver.model.load_weights(iter(held))
        receiver.finish_weight_update()
        return time.perf_counter() - started


class TimedEngine:
    """The AsyncLLM with the four update calls timed; remembers the last payload."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self.payload: dict[str, Any] = {}
        self.seconds = 0.0
        self.started = 0.0

    async def init_weight_transfer_engine(self, request: Any) -> None:
        await self._llm.init_weight_transfer_engine(request)

    async def start_weight_update(self) -> None:
        self.started = time.perf_counter()
        await self._llm.start_weight_update()

    async def update_weights(self, request: Any) -> None:
        self.payload = request.update_info
        await self._llm.update_weights(request)

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        await self._llm.finish_weight_update(weight_version)
        self.seconds = time.perf_counter() - self.started


class Served:
    """What `LocalRoute` updates."""

    def __init__(self, llm: TimedEngine, transfer_backend: str) -> None:
        self.llm = llm
        self.transfer_backend = transfer_backend

    def serves(self, number: int) -> None:
        """Nothing to keep."""


async def measure(generator: Any, config: Any, folder: Path) -> None:
    """Alternate both sides, so that whatever else the machine does hits them alike."""
    import torch

    from engine.train.thread import TrainingThread
    from engine.train.trainer import TorchTrainer
    from engine.weights.local import LocalRoute

    await generator.open()
    trainer = TorchTrainer(config, folder)
    engine = TimedEngine(generator.llm)
    served = Served(engine, generator.transfer_backend)
    route = LocalRoute(served, trainer, getattr(torch, config.engine_dtype), TrainingThread().call)
    await generator.pause(clear_cache=True)
    updates, publishes, own = [], [], []
    for number in range(ROUNDS):
        started = time.perf_counter()
        await route.publish(number)
        publishes.append(time.perf_counter() - started)
        updates.append(engine.seconds)
        own += await generator.llm.collective_rpc("own_reload", kwargs=engine.payload)
    await generator.close()
    update, reload, publish = (statistics.median(values[1:]) for values in (updates, own, publishes))
    print(f"update {update:.3f} s, engine's own load and repack {reload:.3f} s, whole publish {publish:.3f} s")
    print(f"P6 ratio {update / reload:.2f} (goal <= 1.3), medians of {ROUNDS - 1} rounds, 135M model")


def main() -> None:
    environment.prepare()
    from profiling.bench.setup import on_engine

    on_engine(measure, "profiling.bench.weight_update.WorkerExtension")


if __name__ == "__main__":
    main()
