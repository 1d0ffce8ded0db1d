"""What a preview concludes, from groups made by hand, and a whole one on the fake generator."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hand_made import config, group, rollout, task
from msgspec.structs import replace

from engine import preview
from engine.config import TaskSection
from engine.errors import DataError
from engine.preview import outlook, run_preview
from engine.protocols import Score
from engine.types import Group, Rollout, Task

LEARNABLE = "learnable: enough groups are mixed, and only those teach"
SOLVED = "solved: too few groups are mixed; choose a harder task"
TOO_HARD = "too hard: too few groups are mixed; choose an easier task or a larger generate.group_size"


@pytest.mark.parametrize(
    ("mean", "mixed", "verdict"),
    [
        (0.0, 0.2, LEARNABLE), (1.0, 0.2, LEARNABLE), (0.5, 1.0, LEARNABLE),
        (0.51, 0.19, SOLVED), (1.0, 0.0, SOLVED),
        (0.5, 0.19, TOO_HARD), (0.0, 0.0, TOO_HARD),
    ],
)  # fmt: skip
def test_the_verdict(mean: float, mixed: float, verdict: str) -> None:
    assert preview._verdict(mean, mixed) == verdict  # pyright: ignore[reportPrivateUsage]


def made(*rewards: float | None, cut: int = 0, found: int = 9) -> Group:
    """A group with these rewards; the first `cut` members are truncated, the first `found` have an answer."""
    members = [
        replace(
            rollout(reward, index=index, stop_reason="length" if index < cut else "stop"),
            extracted="5" if index < found else None,
        )
        for index, reward in enumerate(rewards)
    ]
    return group(*members)


def summary(*groups: Group, score: str = "exact") -> list[str]:
    section = TaskSection(env="jsonl", name="sums", params={"path": "x", "score": score})
    return preview._summary(section, groups)  # pyright: ignore[reportPrivateUsage]


def test_shares_by_hand() -> None:
    found = outlook([made(1.0, 0.0, 0.0, 0.0, cut=3, found=2), made(1.0, 1.0, 0.5, None), made(0.0, 0.0, 0.0, 0.0)])
    assert found is not None
    assert found.passed.mean == pytest.approx((0.25 + 0.5 + 0.0) / 3)  # one without a reward did not pass
    assert found.passed.count == 3
    assert found.passed.low < found.passed.mean < found.passed.high
    assert found.mean_reward == pytest.approx(3.5 / 11)
    assert found.mixed == pytest.approx(2 / 3)
    assert found.cut == pytest.approx(3 / 12)
    assert found.unanswered == pytest.approx(2 / 12)


def test_a_group_with_one_reward_is_not_mixed() -> None:
    found = outlook([made(1.0, None), made(1.0, 0.0)])
    assert found is not None
    assert found.mixed == 0.5


def test_without_a_reward_there_is_nothing_to_say() -> None:
    assert outlook([made(None, None)]) is None
    assert summary(made(None, None)) == ["sums: no completion got a reward: look at the samples and the scorer"]


CUT = "raise generate.max_new_tokens: more than half of the completions are cut"


@pytest.mark.parametrize(
    ("cut", "found", "score", "advice"),
    [
        (5, 8, "exact", []),
        (6, 8, "exact", [CUT]),
        (0, 7, "exact", ["the answer was not found in 30%: check tasks.answer or the prompt"]),
        (0, 7, "letters", []),
        (0, 7, "mine:score", []),
        (10, 0, "exact", [CUT, "the answer was not found in 100%: check tasks.answer or the prompt"]),
    ],
)
def test_advice(cut: int, found: int, score: str, advice: list[str]) -> None:
    """Ten completions: at most five may be cut, at most two without an answer."""
    first, *rest, last = summary(made(*[1.0] * 5, *[0.0] * 5, cut=cut, found=found), score=score)
    # (0.5 + 1.9208) / 4.8416 -+ 1.96 * sqrt(0.25 + 0.9604) / 4.8416
    assert first == (
        "sums: pass rate 0.500 [0.055, 0.945] over 1 prompts, mean reward 0.500; 100% of groups are mixed; "
        f"{cut * 10}% of completions are cut at generate.max_new_tokens"
    )
    assert rest == advice
    assert last == f"verdict: {LEARNABLE}"


class Drawn:
    """These tasks, one after the other."""

    def __init__(self, *tasks: Task) -> None:
        self.tasks = list(tasks)

    def next(self) -> Task:
        return self.tasks.pop(0)


class FirstIsRight:
    async def score(self, task: Task, rollout: Rollout) -> Score:
        return Score(float(rollout.index_in_group == 0 and task.env == "sums"), extracted="5")

    async def close(self) -> None:
        pass


def shown(capsys: pytest.CaptureFixture[str], model: Path, tasks: Sequence[Task]) -> str:
    settings = config(
        model={"path": str(model)},
        generate={"backend": "fake", "group_size": 2, "max_new_tokens": 20, "max_model_len": 84},
    )
    more = (*settings.tasks, TaskSection(env="jsonl", name="words"))
    source: Any = Drawn(*tasks)
    run_preview(replace(settings, tasks=more), source, FirstIsRight(), len(tasks))
    return capsys.readouterr().out


def test_every_env_has_its_verdict_and_what_does_not_fit_is_said(
    capsys: pytest.CaptureFixture[str], tiny_folder: Path
) -> None:
    tasks = [task(1), task(2, content="x" * 100), task(3, env="words"), task(4)]
    out = shown(capsys, tiny_folder, tasks)
    assert "task sums/2 would be rejected: prompt has 103 tokens, 64 fit" in out
    assert out.count("<|user|>2 + 3?<|end|><|assistant|>") == 3
    first, second = (out[out.index(f"{label}: pass rate ") :].splitlines() for label in ("sums", "words"))
    assert first[0].startswith("sums: pass rate 0.500 [0.095, 0.905] over 2 prompts, mean reward 0.500; 100% of groups")
    assert f"verdict: {LEARNABLE}" in first[1:3]
    assert second[0].startswith("words: pass rate 0.000 ")
    assert f"verdict: {TOO_HARD}" in second[1:3]


def test_when_no_prompt_fits_nothing_is_started(capsys: pytest.CaptureFixture[str], tiny_folder: Path) -> None:
    with pytest.raises(DataError, match=r"none of 2 prompts fits\n  -> raise generate\.max_model_len"):
        shown(capsys, tiny_folder, [task(1, content="x" * 100)] * 2)


def test_penalties_mix_no_group() -> None:
    """Right and wrong by the part `exact`; a length penalty makes every reward differ, and none is 1."""

    def penalised(*exact: float) -> Group:
        lengths = [-0.1 * (index + 1) for index in range(len(exact))]
        members = (
            rollout(value + 0.1 * length, index=index, reward_parts={"exact": value, "length": length})
            for index, (value, length) in enumerate(zip(exact, lengths, strict=True))
        )
        return group(*members)

    found = outlook([penalised(1.0, 1.0), penalised(1.0, 0.0), penalised(0.0, 0.0), penalised(0.0, 0.0)])
    assert found is not None
    assert (found.passed.mean, found.mixed) == (0.375, 0.25)


def test_a_dense_reward_mixes_by_itself() -> None:
    found = outlook([made(0.2, 0.3), made(0.2, 0.2)])
    assert found is not None
    assert (found.passed.mean, found.mixed) == (0.0, 0.5)
