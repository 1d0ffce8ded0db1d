"""Supervised steps as a user takes them: a file of chats, one command, a checkpoint; and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.train.model import materialise

ROOT = Path(__file__).parents[1]
STEPS, CHATS = 30, 4
LIMIT = 40

CONFIG = f"""
[run]
steps = {STEPS}
[model]
path = "tiny-random"
dtype = "float32"
[[tasks]]
env = "chats"
name = "greetings"
params = {{ path = "PATH" }}
[algorithm]
preset = "ce"
[generate]
max_new_tokens = 8
max_model_len = {LIMIT}
temperature = 0.5
[schedule]
groups_per_step = {CHATS}
[train]
lr = 1e-2
dtype = "float32"
[observe]
terminal = "off"
"""


def chat(asked: str, answer: str) -> str:
    messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    return json.dumps({"messages": messages})


FITTING = [(f"{word}?", "yes") for word in ("ah", "oh", "eh", "uh")]


def launch(folder: Path, *arguments: str, lines: list[str]) -> subprocess.CompletedProcess[str]:
    chats, config = folder / "chats.jsonl", folder / "mine.toml"
    chats.write_text("\n".join(lines))
    config.write_text(CONFIG.replace("PATH", str(chats)))
    command = [sys.executable, "launch.py", "--config", str(config), f"run.dir={folder}", "run.name=run", *arguments]
    return subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=240)


def records(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four chats that fit, and one that does not."""
    folder = tmp_path_factory.mktemp("supervised")
    done = launch(folder, lines=[*(chat(*turns) for turns in FITTING), chat("x" * LIMIT, "y")])
    assert done.returncode == 0, done.stderr
    return folder / "run"


def test_the_answers_are_learned_by_heart(finished: Path) -> None:
    """Random at first: ln 261 = 5.56 nats a token."""
    rows = records(finished / "metrics.jsonl")
    assert [row["version"] for row in rows] == list(range(1, STEPS + 1))
    assert rows[0]["loss"] == pytest.approx(5.56, abs=0.3)
    assert rows[-1]["loss"] < 0.25


def test_a_row_says_what_was_learned_and_nothing_of_rollouts(finished: Path) -> None:
    """Three letters and the token that ends the turn, in each of four chats."""
    for row in records(finished / "metrics.jsonl"):
        assert row["tokens/trained"] == 4 * CHATS
        assert row["groups/leased"] == row["tokens/generated"] == 0
        assert row["reward/mean"] is None
        assert {row[key] for key in row if key.startswith("mismatch/")} == {None}
        assert None not in (row["entropy"], row["grad_norm"], row["lr"])


def test_the_checkpoint_answers_with_transformers(finished: Path) -> None:
    latest = finished / "checkpoints/latest"
    assert latest.resolve().name == f"step-{STEPS:06d}"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(latest), AutoTokenizer.from_pretrained(latest)
    for asked, answer in FITTING:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": asked}], add_generation_prompt=True, return_tensors="pt"
        )["input_ids"]
        said = model.generate(prompt, max_new_tokens=8, do_sample=False)[0, prompt.shape[1] :]
        assert tokenizer.decode(said) == f"{answer}<|end|>"


def test_it_is_not_the_model_that_it_began_with(finished: Path) -> None:
    before = AutoModelForCausalLM.from_pretrained(materialise("tiny-random"))
    after = AutoModelForCausalLM.from_pretrained(finished / "checkpoints/latest")
    for (name, old), new in zip(before.named_parameters(), after.parameters(), strict=True):
        assert not torch.equal(old, new), name


def test_a_chat_that_is_too_long_is_left_out_and_noted(finished: Path) -> None:
    """Once an epoch: five chats, of which four make a step."""
    left_out = [event for event in records(finished / "events.jsonl") if event["kind"] == "chat_left_out"]
    assert len(left_out) in (STEPS - 1, STEPS)
    # What is asked and said, and the four tokens that the template adds.
    assert {(event["tokens"], event["fit"]) for event in left_out} == {(LIMIT + 1 + 4, LIMIT)}
    assert not (finished / "engine.log").exists()


def test_only_chats_that_are_too_long_end_the_run(tmp_path: Path) -> None:
    done = launch(tmp_path, lines=[chat("x" * LIMIT, "y")])
    assert done.returncode == 2
    assert "200 chats in a row have more than 40 tokens\n  -> raise generate.max_model_len" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["algorithm.preset=cispo"], "tasks.0.env = 'chats': does not go with algorithm.preset = 'cispo'"),
        (["tasks.0.env=jsonl"], "tasks.0.env = 'jsonl': does not go with algorithm.preset = 'ce'"),
        (["tasks.1={env='engine.tasks.sums:Sums'}"], "tasks.1"),
        (["tasks.0.held_out=1"], "tasks.0.held_out = 1: supervised steps evaluate nothing"),
        (["evals.every=5"], "evals.every = 5: supervised steps evaluate nothing"),
        (["algorithm.rule=cap"], "algorithm.rule = 'cap': means nothing with algorithm.preset = 'ce'"),
        (["--preview", "2"], "--preview = 2: supervised steps sample nothing to show"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_what_does_not_go_together_is_refused(tmp_path: Path, arguments: list[str], said: str) -> None:
    done = launch(tmp_path, *arguments, lines=[chat("a", "b")])
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {said}")
    assert "\n  -> " in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_broken_chat_is_named(tmp_path: Path) -> None:
    done = launch(tmp_path, lines=[chat("a", "b"), '{"messages": []}'])
    assert done.returncode == 2
    assert f"{tmp_path}/chats.jsonl:2: the last message is not the assistant's" in done.stderr


def test_a_missing_file_of_chats_is_named(tmp_path: Path) -> None:
    done = launch(tmp_path, "tasks.0.params.path=no/such.jsonl", lines=[])
    assert done.returncode == 3
    assert "tasks.0.params.path = 'no/such.jsonl': no such file" in done.stderr
