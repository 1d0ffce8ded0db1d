"""Environment variables, set before torch or vLLM is imported, and the children that must not outlive the host."""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging.config
import os
import platform
import re
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

import psutil

from engine.errors import ConfigError

HOST_PID = "FARFIELD_HOST_PID"

# Parameters of glibc's mallopt (malloc.h).
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8

# Spinning OpenMP threads starve the other process on a shared CPU: generation beside a busy trainer falls 30-fold.
_QUIET_OPENMP = {"GOMP_SPINCOUNT": "0", "OMP_WAIT_POLICY": "passive"}

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
             "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")


def prepare() -> None:
    """Call before anything imports torch. What the user has set stays, but for torchrun's OMP_NUM_THREADS."""
    for name, value in _QUIET_OPENMP.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    # Counters sent home by vLLM have no place in a training run.
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    ranks = os.environ.get("LOCAL_WORLD_SIZE")
    if os.environ.get("OMP_NUM_THREADS") == "1" and ranks is not None:
        # torchrun gives every rank one thread, however many cores there are.
        os.environ["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // int(ranks)))
    _keep_freed_memory()


def _keep_freed_memory() -> None:
    """Tell glibc to hold on to freed blocks. A CPU training step frees and asks again for gigabytes of activations,
    and giving them back in between is paid for in page faults."""
    if platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    for option, value in ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, 2**31 - 1), (_M_ARENA_MAX, 1)):
        libc.mallopt(option, value)


def divide_cores(available: Collection[int], cores: str) -> tuple[list[int], list[int]]:
    """The generator's cores and the trainer's, for placement `split`. `cores` names the generator's, such as "0-3,6";
    empty: the first half of those `available`.

    Raises:
        ConfigError: it is no list of cores, names one that is not there, or leaves one side without any.
    """
    there = sorted(available)
    generator = _named_cores(cores, there) if cores else there[: len(there) // 2]
    trainer = [core for core in there if core not in generator]
    if not generator or not trainer:
        raise ConfigError("schedule.cores", value=cores, limit=f"leaves one side none of {len(there)} cores",
                          remedy="give each side at least one, or use schedule.placement = 'time_sliced'")
    return generator, trainer


def _named_cores(cores: str, there: list[int]) -> list[int]:
    if not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", cores):
        raise ConfigError("schedule.cores", value=cores, limit="is no list of cores", remedy="such as '0-3' or '0,2'")
    ends = [[int(end) for end in part.split("-")] for part in cores.split(",")]
    # The ends first: a range of billions is refused before it is counted out.
    if all(end in there for pair in ends for end in pair):
        named = {core for pair in ends for core in range(pair[0], pair[-1] + 1)}
        if named <= set(there):
            return sorted(named)
    raise ConfigError("schedule.cores", value=cores, limit="names cores that are not there",
                      remedy=f"this process may use {', '.join(map(str, there))}")


def engine_devices(visible: str | None, count: int, first: int) -> str:
    """CUDA_VISIBLE_DEVICES of an engine that leaves the first devices to the trainer: of those that are `visible`
    already, if that is set, else of all `count`."""
    devices = visible.split(",") if visible else [str(device) for device in range(count)]
    return ",".join(devices[first:])


@contextlib.contextmanager
def engine_environment(log_file: Path, *, cores: Collection[int] = (), first_device: int = 0) -> Iterator[None]:
    """Import vLLM and start its processes inside: they inherit none of torchrun's variables, write to `log_file`
    instead of the terminal, and know this process's id, by which they end when it ends (`engine/vllm_plugin.py`).

    With `cores` they run on these alone, as do threads that this process starts inside. On a GPU they see the devices
    from `first_device` on.
    """
    import torch

    # Before the variables change: asking fixes for good which devices this process itself sees.
    on_gpu = torch.cuda.is_available()
    before, cores_before = dict(os.environ), os.sched_getaffinity(0)
    for name in list(os.environ):
        if name in _TORCHRUN or name.startswith(("TORCHELASTIC_", "TORCH_NCCL_")):
            del os.environ[name]
    os.environ[HOST_PID] = str(os.getpid())
    os.environ["VLLM_LOGGING_CONFIG_PATH"] = str(_logging_config(log_file))
    # vLLM's own sockets on this host need no address that others can reach.
    os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")
    if on_gpu:
        # A process that has asked for its devices must not be forked.
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        # The worker unpickles the CUDA handles of weights, which this process alone can send it.
        os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
        if first_device:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            os.environ["CUDA_VISIBLE_DEVICES"] = engine_devices(visible, torch.cuda.device_count(), first_device)
    else:
        _cpu_variables(cores)
    try:
        os.sched_setaffinity(0, cores or cores_before)
        with _descriptors_to(log_file):
            yield
    finally:
        os.sched_setaffinity(0, cores_before)
        os.environ.clear()
        os.environ.update(before)


def _cpu_variables(cores: Collection[int]) -> None:
    # vLLM compiles one small function at its first token: it takes seconds, and a C++ compiler that may be missing.
    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    # Its worker may use every core: they are shared well with the trainer once nothing spins.
    os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")
    if cores:
        # Left to itself it takes one of each pair of hyper-threads.
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, sorted(cores)))


@contextlib.contextmanager
def _descriptors_to(log_file: Path) -> Iterator[None]:
    """Descriptors 1 and 2 lead to the file, for children and native code; Python's own streams stay where they are."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (os.fdopen(os.dup(number), "w", buffering=1) for number in saved)
    log = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    try:
        yield
    finally:
        ours = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = streams
        for stream in ours:
            stream.close()
        for number, target in zip(saved, (1, 2), strict=True):
            os.dup2(number, target)
            os.close(number)


def _logging_config(log_file: Path) -> Path:
    handler = {"class": "logging.FileHandler", "filename": str(log_file.resolve()), "formatter": "line"}
    config = {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": {"format": "%(asctime)s %(process)d %(levelname)s %(name)s %(message)s"}},
        "handlers": {"file": handler},
        "loggers": {"vllm": {"handlers": ["file"], "level": "INFO", "propagate": False}},
    }
    # This process too: vLLM logs while it is imported, before it reads the file.
    logging.config.dictConfig(config)
    path = log_file.with_suffix(".logging.json")
    path.write_text(json.dumps(config))
    return path


def end_children() -> None:
    """Kill every process below this one."""
    children = psutil.Process().children(recursive=True)
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(children, timeout=2)
