"""Reinforcement learning on the petri dish: real vLLM, the shipped configuration, a reward that rises."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]


def test_the_dish_learns(tmp_path: Path) -> None:
    """From about .3 to .6; the first run on a machine makes the model."""
    command = [sys.executable, "launch.py", "--config", "configs/petri.toml", "run.steps=40", "evals.every=0",
               f"run.dir={tmp_path}", "run.name=run", "observe.terminal=off"]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=880)
    assert done.returncode == 0, done.stderr + done.stdout
    rewards = [json.loads(line)["reward/mean"] for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert len(rewards) == 40
    assert sum(rewards[-5:]) / 5 >= sum(rewards[:5]) / 5 + 0.15, rewards
