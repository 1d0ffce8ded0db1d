"""What `--checkpoint` names, and where its result goes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import msgspec
import pytest
from suite_of_sums import sums_suite

from engine.config import load
from engine.errors import DataError, MissingError
from evals.__main__ import Checkpoint


@pytest.fixture
def run(tmp_path: Path, tiny_folder: Path) -> Path:
    """Five steps of which one changed no weights; the last was saved twice."""
    folder = tmp_path / "run"
    shutil.copytree(tiny_folder, folder / "checkpoints" / "step-000005")
    (folder / "checkpoints" / "latest").symlink_to("step-000005")
    (folder / "metrics.jsonl").touch()
    (folder / "config.toml").write_text(
        '[run]\nsteps = 5\n[model]\npath = "tiny-random"\ndtype = "float32"\nlm_head_dtype = "float32"\n'
        '[[tasks]]\nenv = "reasoning_gym"\nname = "chain_sum"\n[generate]\nmax_model_len = 96\nmax_new_tokens = 8\n'
        "[evals]\nlimit = 7\n"
    )
    events = [{"kind": "checkpoint", "step": 5, "version": 3}, {"kind": "published", "number": 4},
              {"kind": "checkpoint", "step": 5, "version": 4}, {"kind": "checkpoint", "step": 6, "version": 5}]
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return folder


@pytest.mark.parametrize("named", [".", "checkpoints/latest", "checkpoints/step-000005"])
def test_a_run_and_its_checkpoints_are_asked_with_the_runs_settings(run, tmp_path, named):
    checkpoint = Checkpoint.of(str(run / named))
    assert (checkpoint.run, checkpoint.step, checkpoint.number()) == (run, 5, 4)
    assert checkpoint.out(sums_suite(tmp_path)) == run / "evals" / "step-000005" / "sums.json"
    config = checkpoint.config(["generate.max_in_flight=7"])
    assert config.model.path == str(run / "checkpoints" / "step-000005")
    assert (config.engine_dtype, config.model.lm_head_dtype) == ("float32", "float32")
    assert (config.generate.max_model_len, config.generate.max_in_flight, config.evals.limit) == (96, 7, 7)


@pytest.mark.parametrize("file", sorted(Path("configs").glob("*.toml")), ids=lambda file: file.stem)
def test_what_only_training_needs_stands_in_no_ones_way(run, file):
    """Whatever a run was made with, and however long or few the requests are to be."""
    overrides = [] if file.stem == "sft" else [
        "schedule.placement=split", "schedule.max_staleness=4", "schedule.steps_per_slice=4",
        "generate.max_in_flight=999",
    ]
    made = msgspec.toml.encode(load(file, overrides))
    (run / "config.toml").write_bytes(made)
    config = Checkpoint.of(str(run)).config(["generate.max_model_len=8192", "generate.max_in_flight=2"])
    assert (config.generate.backend, config.schedule.placement) == ("vllm", "time_sliced")
    assert config.algorithm.preset != "ce"
    assert config.generate.max_model_len == 8192


def test_a_model_elsewhere_has_the_defaults_and_a_file_in_the_current_folder(tiny_folder, tmp_path):
    suite = sums_suite(tmp_path)
    checkpoint = Checkpoint.of(str(tiny_folder))
    assert (checkpoint.run, checkpoint.step, checkpoint.number()) == (None, None, 0)
    assert checkpoint.out(suite) == Path(f"sums-{tiny_folder.name}.json")
    assert Checkpoint.of("org/a model").out(suite) == Path("sums-a-model.json")
    assert Checkpoint.of("smollm2-135m-instruct").config([]).generate.max_model_len == 2048


def test_what_is_no_checkpoint_is_refused_by_name(run, tmp_path):
    (run / "checkpoints" / "latest").unlink()
    with pytest.raises(DataError, match="run has no checkpoint"):
        Checkpoint.of(str(run))
    with pytest.raises(MissingError, match=r"model.path = .*no model folder"):
        Checkpoint.of(str(tmp_path / "nothing" / "here")).config([])
