"""Whole asynchronous runs on real vLLM: what a rollout says of its versions is true, and what hangs is named."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import PreTrainedModel

from engine.observe.metrics import read_groups
from engine.train.model import materialise
from engine.types import Group, Rollout

pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("default")]

ROOT = Path(__file__).parents[2]
STEPS, BOUND = 10, 4
# Float32 on both sides: kernels differ by less, and versions by more.
SAME_NATS = 2e-4


def _start(folder: Path, *overrides: str) -> subprocess.Popen[str]:
    command = [sys.executable, "launch.py", "--config", "configs/smoke.toml", f"run.dir={folder.parent}",
               f"run.name={folder.name}", *overrides]
    return subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def _rows(folder: Path) -> list[dict[str, object]]:
    file = folder / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.fixture(
    scope="module",
    params=[
        ("schedule.placement=split",),
        ("schedule.placement=time_sliced", "generate.sleep_level=2"),
    ],
    ids=["split", "time_sliced"],
)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Long completions, a checkpoint of every version."""
    folder = tmp_path_factory.mktemp("asynchronous") / "run"
    process = _start(folder, *request.param, f"run.steps={STEPS}", f"schedule.max_staleness={BOUND}",
                     "generate.max_new_tokens=100", "generate.max_model_len=160", "checkpoint.every=1")
    output = process.communicate(timeout=240)[0]
    assert process.returncode == 0, output
    return folder


def _trained(folder: Path) -> Iterator[tuple[int, Group]]:
    """Every trained group with the version before its step."""
    versions = [0, *(int(str(row["version"])) for row in _rows(folder))]
    for step in range(1, STEPS + 1):
        for group in read_groups(folder / "rollouts" / f"step-{step:06d}.jsonl.zst"):
            if group.outcome == "trained":
                yield versions[step - 1], group


def _models(folder: Path) -> dict[int, PreTrainedModel]:
    """Version -> the model of its checkpoint, loaded as anyone would; 0 is what the run began with."""
    folders = {0: materialise("tiny-random")}
    folders |= {int(str(row["version"])): folder / f"checkpoints/step-{row['step']:06d}" for row in _rows(folder)}
    return {version: AutoModelForCausalLM.from_pretrained(path) for version, path in folders.items()}


@torch.no_grad()
def _logprobs(model: PreTrainedModel, rollout: Rollout) -> np.ndarray:
    """At every token its log-probability under `model`, at temperature 1."""
    token_ids = torch.from_numpy(rollout.token_ids.astype(np.int64))
    logprobs = torch.log_softmax(model(token_ids[None]).logits[0, :-1].float(), -1)
    return np.concatenate([[0.0], logprobs.gather(1, token_ids[1:, None])[:, 0].numpy()])


def _off_by(rollout: Rollout, models: Mapping[int, PreTrainedModel], later: int) -> list[float]:
    """For every span: the largest difference of its stored log-probs to those of the version `later` than its own."""
    starts = [start for start, _ in rollout.version_spans]
    found = []
    for (start, version), end in zip(rollout.version_spans, [*starts[1:], len(rollout.token_ids)], strict=True):
        if version + later in models:
            again = _logprobs(models[version + later], rollout)
            found.append(float(np.abs(again - rollout.logprobs)[start:end].max()))
    return found


def test_every_span_has_the_log_probs_of_its_version(run):
    models = _models(run)
    mixed = [rollout for _, group in _trained(run) for rollout in group.rollouts if len(rollout.version_spans) > 1]
    assert mixed, "no rollout was made by two versions"
    for rollout in mixed:
        versions = [version for _, version in rollout.version_spans]
        assert versions == sorted(set(versions))
        assert rollout.version_spans[0][0] == int(rollout.trainable.argmax())
        assert max(_off_by(rollout, models, 0)) < SAME_NATS
    # Not because every version would do.
    assert np.median([off for rollout in mixed for off in _off_by(rollout, models, 1)]) > 10 * SAME_NATS


def test_no_token_is_older_than_the_bound(run):
    ages = [version - group.oldest_version() for version, group in _trained(run)]
    assert max(ages) <= BOUND
    assert max(ages) == max(int(str(row["staleness/max"])) for row in _rows(run))
    # Tokens of one rollout are judged each by its own age: the batch had some of several.
    assert any(None not in (row["mismatch/k3_fresh"], row["mismatch/k3_stale"]) for row in _rows(run))


@pytest.mark.parametrize("placement", ["time_sliced", "split"])
def test_an_engine_that_hangs_is_named_and_ends_the_run(tmp_path, placement):
    folder = tmp_path / "hanging"
    process = _start(folder, f"schedule.placement={placement}", "schedule.max_staleness=2", "run.steps=100000",
                     "run.stage_timeout_s=5")
    for _ in range(1200):
        if len(_rows(folder)) >= 3:
            break
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.1)
    children = psutil.Process(process.pid).children(recursive=True)
    os.kill(next(child for child in children if "EngineCor" in child.name()).pid, signal.SIGSTOP)
    output = process.communicate(timeout=30)[0]
    assert process.returncode == 1
    assert "took more than 5.0 s" in output or "no group became ready within 5.0 s" in output
    assert not psutil.wait_procs(children, timeout=2)[1]
