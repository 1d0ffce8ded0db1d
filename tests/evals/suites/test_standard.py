from __future__ import annotations

import os
import subprocess
import sys

import pytest

import evals.suites
from engine.errors import ConfigError, MissingError
from evals.suites import standard
from evals.suites.standard import TASKS, require

OFFLINE = """
import sys
from engine.errors import MissingError
from evals.suites import find
try:
    find("standard").load()
except MissingError as error:
    print(error)
"""


def test_offline_it_says_what_is_missing_before_anything_is_tried(tmp_path) -> None:
    offline = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    told = subprocess.check_output([sys.executable, "-c", OFFLINE], env=offline, text=True)
    assert told.startswith("HF_HUB_OFFLINE is set, and the cache lacks openai/gsm8k (")
    assert all(task.dataset in told for task in TASKS.values())
    assert "--limit 1" in told
    assert "HF_HOME" in told


def test_a_hub_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch, free_port: int) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{free_port}")
    with pytest.raises(MissingError) as caught:
        require(["gsm8k", "mmlu_pro"])
    told = f"openai/gsm8k, TIGER-Lab/MMLU-Pro must come from http://127.0.0.1:{free_port}, which cannot be reached: "
    assert str(caught.value).startswith(told)
    require(["capitals"])


def test_packages_that_lm_eval_does_not_bring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standard, "_require_data", lambda wanted: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingError, match="ifeval needs the packages langdetect, immutabledict, nltk"):
        require(["ifeval"])
    require(["gsm8k"])


def test_lm_eval_has_all_of_them() -> None:
    assert evals.suites._manager(standard.folders(tuple(TASKS))).task_index.keys() >= TASKS.keys()


def test_code_of_the_models_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standard, "_require_data", lambda wanted: None)
    monkeypatch.delenv("HF_ALLOW_CODE_EVAL", raising=False)
    with pytest.raises(ConfigError, match="humaneval_instruct runs code that the model wrote"):
        evals.suites.find("humaneval_instruct").load()


def test_a_task_with_its_data(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"question": f"{n} + 1?", "answer": f"One more than {n}. #### {n + 1}"} for n in range(8)]
    monkeypatch.setattr(standard, "_require_data", lambda wanted: None)
    monkeypatch.setattr("datasets.load_dataset", lambda **named: {"train": _rows(rows), "test": _rows(rows[:2])})
    (task,) = evals.suites.find("gsm8k").load().values()
    assert task.doc_to_text(task.eval_docs[1]) == "Question: 1 + 1?\nAnswer:"


def _rows(rows: list[dict[str, str]]) -> object:
    from datasets import Dataset

    return Dataset.from_list(rows)
