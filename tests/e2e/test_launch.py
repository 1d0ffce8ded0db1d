"""Whole runs as a user starts them: torchrun, real vLLM, the smoke configuration."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

# What vLLM and its libraries warn of when imported is not ours to mend.
pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("default")]

ROOT = Path(__file__).parents[2]
# Everything that may differ between two runs with the same seed.
TIMED = ("time", "busy/", "loop/", "memory/")


def _start(
    folder: Path, *overrides: str, torchrun: bool = False, environment: dict[str, str] | None = None
) -> subprocess.Popen[str]:
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "1"] if torchrun else []
    command = [sys.executable, *launcher, "launch.py", "--config", "configs/smoke.toml", f"run.dir={folder.parent}",
               f"run.name={folder.name}", *overrides]
    inherited = os.environ | {"PYTHONPATH": str(Path(__file__).parent)} | (environment or {})
    return subprocess.Popen(command, cwd=ROOT, env=inherited, text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, start_new_session=True)


def _rows(folder: Path) -> list[dict[str, object]]:
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line) for line in lines]


def _timeless(folder: Path) -> list[dict[str, object]]:
    return [{key: value for key, value in row.items() if not key.startswith(TIMED)} for row in _rows(folder)]


def _weights(folder: Path) -> bytes:
    return (folder / "checkpoints/step-000010/model.safetensors").read_bytes()


def _until_rows(folder: Path, count: int, process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Wait until the run has made `count` steps; returns its processes."""
    for _ in range(1200):
        if len(_rows(folder)) >= count:
            return psutil.Process(process.pid).children(recursive=True)
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.1)
    raise AssertionError(f"no {count} steps within two minutes: {process.communicate()[0]}")


def _ended(children: list[psutil.Process], within_s: float) -> bool:
    return not psutil.wait_procs(children, timeout=within_s)[1]


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, str]]:
    """Two runs with one seed, at the same time on the same machine, both through torchrun."""
    parent = tmp_path_factory.mktemp("twins")
    folders = [parent / "one", parent / "two"]
    processes = [_start(folder, torchrun=True) for folder in folders]
    outputs = [process.communicate(timeout=240)[0] for process in processes]
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output
    return list(zip(folders, outputs, strict=True))


def test_smoke_makes_every_step(twins):
    for folder, output in twins:
        rows = _rows(folder)
        assert [row["step"] for row in rows] == list(range(1, 11))
        assert [row["version"] for row in rows] == list(range(1, 11)), "a step was skipped"
        assert all(row["staleness/max"] == 0 for row in rows)
        assert all(abs(row["mismatch/ratio_mean"] - 1) < 1e-3 for row in rows)
        assert "step 10/10" in output
        assert sorted(path.name for path in (folder / "rollouts").iterdir())[-1] == "step-000010.jsonl.zst"


def test_same_seed_gives_the_same_run(twins):
    (one, _), (two, _) = twins
    assert _timeless(one) == _timeless(two)
    assert _weights(one) == _weights(two)


def test_recorded_rollouts_replay_the_run_without_an_engine(twins, tmp_path):
    recorded = twins[0][0]
    folder = tmp_path / "replayed"
    process = _start(folder, "generate.backend=replay", f"generate.replay_from={recorded}")
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 0, output
    assert not (folder / "engine.log").exists()
    assert _timeless(folder) == _timeless(recorded)
    assert _weights(folder) == _weights(recorded)


def test_checkpoint_loads_with_transformers(twins):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    latest = twins[0][0] / "checkpoints/latest"
    assert latest.resolve().name == "step-000010"
    assert AutoModelForCausalLM.from_pretrained(latest).config.vocab_size == len(AutoTokenizer.from_pretrained(latest))


@pytest.mark.parametrize("torchrun", [False, True])
def test_first_interrupt_saves_and_ends_well(tmp_path, torchrun):
    folder = tmp_path / "interrupted"
    process = _start(folder, "run.steps=100000", "schedule.max_staleness=1", torchrun=torchrun)
    children = _until_rows(folder, 3, process)
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=30)[0]
    # torchrun's own code after a signal is 1, whatever its worker's.
    assert process.returncode == (1 if torchrun else 0), output
    assert "stopped after" in output
    assert _ended(children, 2)
    rows = _rows(folder)
    assert (folder / "checkpoints/latest").resolve().name == f"step-{len(rows):06d}"
    assert max(row["staleness/max"] for row in rows) == 1


def test_second_interrupt_stops_at_once(tmp_path):
    folder = tmp_path / "stopped"
    process = _start(folder, "run.steps=100000", "train.micro_batch_tokens=128", "schedule.groups_per_step=256",
                     "generate.max_in_flight=1024")
    children = _until_rows(folder, 1, process)
    process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=10)[0]
    assert process.returncode == 1, output
    assert _ended(children, 2)


def test_kill_of_the_host_leaves_no_engine(tmp_path):
    folder = tmp_path / "killed"
    process = _start(folder, "run.steps=100000")
    children = _until_rows(folder, 2, process)
    assert len(children) >= 2
    process.kill()
    process.communicate()
    assert _ended(children, 2)


def test_interrupt_while_the_engine_starts(tmp_path):
    folder = tmp_path / "starting"
    process = _start(folder)
    for _ in range(600):
        if (folder / "engine.log").exists() and psutil.Process(process.pid).children():
            break
        time.sleep(0.1)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=30)[0]
    assert process.returncode == 0, output
    assert "nothing to save" in output
    assert _ended(children, 2)


def test_death_of_the_engine_ends_the_run(tmp_path):
    folder = tmp_path / "dead"
    process = _start(folder, "run.steps=100000")
    children = _until_rows(folder, 2, process)
    next(child for child in children if "EngineCor" in child.name()).kill()
    output = process.communicate(timeout=10)[0]
    assert process.returncode == 1
    assert "the vLLM engine died" in output
    assert "-> engine.log in the run folder says why" in output
    assert _ended(children, 2)


def test_failing_stage_ends_the_run_with_its_traceback(tmp_path):
    """The scorer works until a file appears."""
    folder, trigger = tmp_path / "failing", tmp_path / "now"
    process = _start(
        folder,
        "run.steps=100000",
        "tasks.0.params={path='configs/smoke_tasks.jsonl', score='scorers:fails_when_told'}",
        environment={"FAIL_WHEN_EXISTS": str(trigger)},
    )
    children = _until_rows(folder, 2, process)
    trigger.touch()
    output = process.communicate(timeout=15)[0]
    assert process.returncode == 1
    assert "ZeroDivisionError: this scorer is broken on purpose" in output
    assert "error: the scorer of task letters/" in output
    assert output.rstrip().endswith("-> mend the reward function at the place that its traceback names")
    assert _ended(children, 1)
