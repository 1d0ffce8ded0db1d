"""The Slurm script with Slurm's commands replaced by small ones: what it starts, and what it does when stopped."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "docs/slurm/two_nodes.sbatch"

# Each notes its arguments; srun then works until it is signalled, or ends at once with $SRUN_CODE.
COMMANDS = {
    "srun": """
echo "srun $*" >> "$NOTES"
trap 'echo saved >> "$NOTES"; exit 1' TERM
[ -n "$SRUN_CODE" ] && exit "$SRUN_CODE"
echo ready > "$READY"
while :; do read -r -t 1 <> "$READY.never" || true; done
""",
    "scontrol": """
echo "scontrol $*" >> "$NOTES"
[ "$1" = show ] && printf 'n1\\nn2\\n'
true
""",
    "squeue": 'echo "$JOB_STATE"',
}


def start(folder: Path, *, srun_code: str = "", state: str = "RUNNING") -> subprocess.Popen[bytes]:
    """The script as Slurm runs it for job 7; returns once srun works, if it does."""
    tools = folder / "bin"
    tools.mkdir()
    for name, body in COMMANDS.items():
        (tools / name).write_text(f"#!/bin/bash\n{body}")
        (tools / name).chmod(0o755)
    os.mkfifo(folder / "ready")
    os.mkfifo(folder / "ready.never")
    slurm = {"SLURM_SUBMIT_DIR": str(folder), "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_ID": "7", "SLURM_NNODES": "2"}
    ours = {"NOTES": str(folder / "notes"), "READY": str(folder / "ready"), "SRUN_CODE": srun_code, "JOB_STATE": state}
    path = {"PATH": f"{tools}:{os.environ['PATH']}"}
    process = subprocess.Popen(["bash", SCRIPT, "run.steps=9"], env=os.environ | slurm | ours | path)
    if not srun_code:
        # Opening it waits for srun.
        assert (folder / "ready").read_text() == "ready\n"
    return process


def notes(folder: Path) -> list[str]:
    return (folder / "notes").read_text().splitlines()


def test_bash_accepts_the_script() -> None:
    assert subprocess.run(["bash", "-n", SCRIPT], capture_output=True).stderr == b""


@pytest.mark.parametrize("code", [0, 3])
def test_the_runs_code_is_the_jobs(tmp_path: Path, code: int) -> None:
    assert start(tmp_path, srun_code=str(code)).wait(timeout=20) == code
    shown, started = notes(tmp_path)
    assert shown == "scontrol show hostnames n[1-2]"
    assert "torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint n1:29500 --rdzv-id 7" in started
    assert "launch.py --config configs/eight_gpu.toml run.name=slurm-7 run.resume=auto" in started
    assert started.endswith(" run.steps=9")


def test_the_signal_before_the_time_limit_saves_and_requeues(tmp_path: Path) -> None:
    process = start(tmp_path)
    process.send_signal(signal.SIGTERM)
    process.wait(timeout=20)
    assert notes(tmp_path)[-2:] == ["saved", "scontrol requeue 7"]


def test_a_cancelled_job_saves_and_stays_down(tmp_path: Path) -> None:
    process = start(tmp_path, state="COMPLETING")
    process.send_signal(signal.SIGTERM)
    process.wait(timeout=20)
    assert notes(tmp_path)[-1] == "saved"
