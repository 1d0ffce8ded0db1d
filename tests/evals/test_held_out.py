"""Held-out evaluation: a whole one on the fake generator."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hand_made import config, task

from engine import clock
from engine.errors import DataError
from engine.generate.fake import FakeGenerator
from engine.observe.terminal import SilentTerminal
from engine.protocols import Score
from evals.held_out import SAMPLES, evaluate


class _EvenIsRight:
    """Right where the greedy or sampled completion has an even number of tokens."""

    async def score(self, task, rollout):
        return Score(float(rollout.length % 2 == 0), extracted=str(rollout.length))

    async def close(self):
        pass


class _Tasks:
    def held_out(self, limit=0):
        return [task(index) for index in range(limit or 40)]


class _Chat:
    def encode(self, task):
        return np.asarray([1, 2, task.index], np.int32)

    def decode(self, tokens):
        return " ".join(map(str, tokens))

    def cut_at_stop(self, tokens, stops):
        return None


def _evaluate(tmp_path, tag):
    async def run():
        generator = FakeGenerator(version=3)
        # Inside a time slice, as during training.
        await generator.interrupt()
        return await evaluate(
            generator=generator, chat=_Chat(), tasks=_Tasks(), scorer=_EvenIsRight(), config=config(),
            folder=tmp_path / tag, terminal=SilentTerminal(),
        )

    metrics = clock.run_virtual(run())
    return metrics, json.loads((tmp_path / tag / "held_out.json").read_text())


def test_every_question_is_answered_greedily_and_by_sampling(tmp_path):
    metrics, written = _evaluate(tmp_path, "one")
    (label, result), = written.items()
    assert metrics == {f"eval/held_out/{label}": result["sampled"]["mean"]}
    assert result["version"] == 3
    assert len(result["answers"]) == 40
    rewards = [answer["rewards"] for answer in result["answers"]]
    assert all(len(each) == 1 + SAMPLES for each in rewards)
    assert result["greedy"]["mean"] == pytest.approx(np.mean([each[0] for each in rewards]))
    assert result["sampled"]["mean"] == pytest.approx(np.mean([each[1:] for each in rewards]))
    assert result["pass_at_8"]["mean"] == pytest.approx(np.mean([max(each[1:]) for each in rewards]))


def test_a_question_that_is_too_long_is_refused_before_the_first_wave(tmp_path, monkeypatch):
    def encode(self, task):
        if task.index == 39:
            raise DataError("task sums/39: its prompt has 21 tokens, 20 fit")
        return np.asarray([1, 2, task.index], np.int32)

    monkeypatch.setattr(_Chat, "encode", encode)
    monkeypatch.setattr(FakeGenerator, "wave", None)
    with pytest.raises(DataError, match="sums/39"):
        _evaluate(tmp_path, "one")


def test_every_version_meets_the_same_randomness(tmp_path):
    assert _evaluate(tmp_path, "one") == _evaluate(tmp_path, "two")
