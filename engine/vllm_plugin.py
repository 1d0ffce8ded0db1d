"""Runs inside every process that vLLM starts (a `vllm.general_plugins` entry point, see pyproject.toml)."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
from collections.abc import Iterator

from engine.environment import HOST_PID
from engine.errors import GenerationError

SHARED_MEMORY_BACKEND = "farfield_shm"
_PR_SET_PDEATHSIG = 1


def on_engine_start() -> None:
    """Register our weight-transfer engine; in a child of a Farfield host, end when the host ends.

    A no-op in any other use of vLLM. vLLM calls it in the host too.
    """
    host = os.environ.get(HOST_PID)
    if host is None:
        return
    register_weight_transfer()
    if os.getpid() != int(host):
        _end_with_parent(int(host))


@functools.cache
def register_weight_transfer() -> None:
    """Make our shared-memory pair known to vLLM in this process."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

    module = "engine.weights.local"
    WeightTransferEngineFactory.register_engine(SHARED_MEMORY_BACKEND, module, "SharedMemoryReceiver")
    WeightTransferTrainerFactory.register_engine(SHARED_MEMORY_BACKEND, module, "SharedMemorySender")


@contextlib.contextmanager
def calling_the_engine() -> Iterator[None]:
    """Around calls to vLLM.

    Raises:
        GenerationError: the engine has died.
    """
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        yield
    except EngineDeadError as error:
        remedy = "engine.log in the run folder says why"
        raise GenerationError(f"the vLLM engine died: {error}", remedy=remedy) from error


def _end_with_parent(host: int) -> None:
    # Its own process group: a ^C on the terminal reaches the host alone, which then ends its children in order.
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The signal fires only for deaths from now on. A worker's parent is the engine core, not the host.
    if not _alive(host):
        os._exit(1)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
