"""How fast two processes on this host exchange tensors: gloo on CPU, NCCL with two GPUs or more."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from datetime import timedelta

import torch
import torch.distributed as dist

from engine.doctor.report import Finding

_MIB = 1 << 20
_SIZE = 64 * _MIB
_REPEATS = 5
_LIMIT_S = 120.0


def collective_checks() -> Iterator[Finding]:
    """Bytes of the tensor over the time of one call. Raises what a process raised, or TimeoutError; none is left."""
    backend = "nccl" if torch.cuda.device_count() >= 2 else "gloo"
    with tempfile.TemporaryDirectory(prefix="farfield-doctor-") as folder:
        pool = ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn"))
        try:
            ranks = [pool.submit(_exchange, rank, backend, folder) for rank in range(2)]
            done, waiting = wait(ranks, timeout=_LIMIT_S, return_when=FIRST_EXCEPTION)
            speeds = [each.result() for each in done]
            if waiting:
                raise TimeoutError(f"two processes did not finish within {_LIMIT_S:.0f} s")
        finally:
            for process in multiprocessing.active_children():
                process.kill()
            pool.shutdown()
    for name, speed in speeds[0].items():
        yield Finding(name, "ok", f"{speed:.2f} GB/s ({backend}, 2 processes, {_SIZE // _MIB} MiB)")


def _exchange(rank: int, backend: str, folder: str) -> dict[str, float]:
    """GB/s of each collective, in a process of its own."""
    limit = timedelta(seconds=_LIMIT_S / 2)
    dist.init_process_group(backend, f"file://{folder}/store", rank=rank, world_size=2, timeout=limit)
    tensor = torch.ones(_SIZE // 4, device=f"cuda:{rank}" if backend == "nccl" else "cpu")
    return {"broadcast": _speed(dist.broadcast, tensor, 0), "all-reduce": _speed(dist.all_reduce, tensor)}


def _speed(collective: Callable[..., object], *arguments: object) -> float:
    """Of the fastest call; the first one, which sets connections up, is not counted."""
    collective(*arguments)
    times: list[float] = []
    for _ in range(_REPEATS):
        dist.barrier()
        started = time.perf_counter()
        collective(*arguments)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return _SIZE / min(times) / 1e9
