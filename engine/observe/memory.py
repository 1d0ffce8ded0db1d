"""How much memory of the shared devices is in use."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import psutil
import torch


def used_memory() -> Callable[[], int]:
    """A reading in bytes: on a GPU of everything on the current device, whoever's it is; on a CPU what is resident of
    this process and of those below it, the engine's among them, as they are now."""
    if torch.cuda.is_available():
        return _on_gpu
    this = psutil.Process()
    processes = [this, *this.children(recursive=True)]
    return lambda: sum(map(_resident, processes))


def _on_gpu() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free


def _resident(process: psutil.Process) -> int:
    with contextlib.suppress(psutil.NoSuchProcess):  # one that has ended uses nothing
        return process.memory_info().rss
    return 0
