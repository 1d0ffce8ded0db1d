"""The command as a user runs it."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from engine.doctor.collectives import collective_checks

ROOT = Path(__file__).parents[2]


def doctor(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "engine.doctor", *arguments],
        cwd=ROOT,
        env=os.environ | (environment or {}),
        capture_output=True,
        text=True,
        timeout=280,
    )


def verdicts(report: str) -> dict[str, str]:
    """Names and verdicts of a report's lines."""
    return dict(re.findall(r"^(\S.*?) {2,}(ok|problem|not applicable) ", report, re.MULTILINE))


def spawned() -> list[list[str]]:
    """Command lines of this process's children that multiprocessing has started to work."""
    commands = [child.cmdline() for child in psutil.Process().children()]
    return [command for command in commands if "spawn_main" in " ".join(command)]


def test_a_busy_port_is_found_and_the_exit_code_says_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        done = doctor("--quick", environment={"MASTER_PORT": str(server.getsockname()[1])})
    assert done.returncode == 3, done.stderr
    found = verdicts(done.stdout)
    assert found["torchrun's port"] == "problem"
    assert "--rdzv-endpoint" in done.stdout
    assert found.keys() >= {"python", "torch", "vllm", "machine", "gpu", "/dev/shm", "run folder"}
    assert not found.keys() & {"engine", "broadcast"}
    assert str(Path.home()) not in done.stdout
    assert ".. versions\n" in done.stderr


def test_the_run_folder_is_the_configs(tmp_path: Path) -> None:
    config = tmp_path / "mine.toml"
    config.write_text((ROOT / "configs/smoke.toml").read_text().replace("[run]", '[run]\ndir = "/proc/runs"'))
    done = doctor("--quick", "--config", str(config))
    assert verdicts(done.stdout)["run folder"] == "problem"
    assert "/proc/runs: cannot be written" in done.stdout
    assert done.returncode == 3


def test_a_wrong_config_is_refused_before_anything_is_looked_at() -> None:
    done = doctor("--quick", "--config", "no/such.toml")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: --config = 'no/such.toml'")


def test_two_processes_exchange_tensors_and_end() -> None:
    findings = list(collective_checks())
    assert [finding.name for finding in findings] == ["broadcast", "all-reduce"]
    assert all(float(finding.detail.split()[0]) > 0 for finding in findings)
    assert spawned() == []


def test_a_collective_that_fails_is_raised_and_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    # Nothing resolves to it, so gloo cannot listen.
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-device")
    with pytest.raises(RuntimeError, match="no-such-device"):
        list(collective_checks())
    assert spawned() == []


@pytest.mark.e2e
def test_a_whole_run_finds_this_machine_well() -> None:
    done = doctor()
    found = verdicts(done.stdout)
    slow = {"broadcast", "all-reduce", "engine", "golden log-probs", "interrupt/resume", "after an update",
            "sleep/wake", "memory returned"}
    assert {name: found.get(name) for name in slow} == dict.fromkeys(slow, "ok"), done.stdout + done.stderr
    assert done.returncode == (3 if "problem" in found.values() else 0)
