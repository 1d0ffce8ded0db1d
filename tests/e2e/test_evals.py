"""Evaluations on real vLLM: of the version that they name, the same when repeated, and unharmed by a kill."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from suite_of_sums import sums_suite

from engine.train.model import materialise
from engine.weights.digest import folder_digest
from evals.compare import main_compare
from evals.result import SuiteResult

pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("default")]

ROOT = Path(__file__).parents[2]


def _start(*command: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, *command], cwd=ROOT, text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT)


def _finish(process: subprocess.Popen[str]) -> str:
    output = process.communicate(timeout=240)[0]
    assert process.returncode == 0, output
    return output


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("suites") / "sums"
    folder.mkdir()
    sums_suite(folder, questions=100)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, suite: Path) -> Path:
    """Four steps in split, where training goes on during the evaluation of step 2."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    _finish(_start("launch.py", "--config", "configs/smoke.toml", f"run.dir={folder.parent}", f"run.name={folder.name}",
                   "run.steps=4", "evals.every=2", f'evals.suites=["{suite}"]', "schedule.placement=split",
                   "schedule.max_staleness=2"))
    return folder


def _result(run: Path, step: int) -> SuiteResult:
    return SuiteResult.read(run / "evals" / f"step-{step:06d}" / "sums.json")


def test_first_last_and_every_second_version_are_evaluated_as_published(run):
    results = {step: _result(run, step) for step in (0, 2, 4)}
    assert sorted(path.name for path in (run / "evals").glob("step-*")) == [f"step-{step:06d}" for step in results]
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    published = {event["number"]: event["digest"] for event in events if event["kind"] == "published"}
    assert {step: (result.version.number, result.version.digest) for step, result in results.items()} == {
        0: (0, folder_digest(materialise("tiny-random"), torch.float32)), 2: (2, published[2]), 4: (4, published[4])}
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert rows[3]["eval/sums/sums_free"] == results[4].tasks["sums_free"].metrics["right"]
    assert sum("eval/sums/sums_choice" in row for row in rows) >= 1
    assert sum(row["time/eval"] for row in rows) > 0
    # A random model's log-probs of given texts change with every update.
    assert len({results[step].tasks["sums_text"].metrics["byte_perplexity"] for step in results}) == 3


def test_the_saved_checkpoint_answers_as_in_training_whatever_interrupts_it(run, suite, tmp_path, capsys):
    """Float32, the same waves and as many threads: every answer and log-prob is the same. No answer is lost by a kill
    or by ^C, and none is asked for twice."""
    out, partial, kept, output = tmp_path / "again.json", tmp_path / "again.partial.jsonl", [0], ""
    command = ("-m", "evals", "run", "--suite", str(suite), "--checkpoint", str(run), "--out", str(out),
               "schedule.placement=split")
    for number, code in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 1)):
        stopped = _start(*command)
        while not (partial.exists() and len(partial.read_bytes().splitlines()) > kept[-1]):
            assert stopped.poll() is None, stopped.communicate()[0]
            time.sleep(0.01)
        stopped.send_signal(number)
        output = stopped.communicate()[0]
        assert stopped.returncode == code, output
        keys = [json.loads(line)["key"] for line in partial.read_bytes().splitlines()]
        assert len(set(keys)) == len(keys)
        kept.append(len(keys))
    assert "the same command goes on" in output
    assert 0 < kept[1] < kept[2] < 600
    _finish(_start(*command))
    again, during = SuiteResult.read(out), _result(run, 4)
    assert (again.tasks, again.settings, again.version) == (during.tasks, during.settings, during.version)
    main_compare(out, run / "evals/step-000004/sums.json")
    told = capsys.readouterr().out
    assert "the same weights" in told
    assert "no difference shown on 3" in told
