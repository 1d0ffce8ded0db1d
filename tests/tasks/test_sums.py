from __future__ import annotations

import itertools
import re
from typing import Any

import pytest

from engine.config import TaskSection
from engine.errors import ConfigError
from engine.tasks.question import Question
from engine.tasks.source import TaskSource
from engine.tasks.sums import Sums


def sums(seed: int = 0, **params: Any) -> Sums:
    return Sums(TaskSection(env="engine.tasks.sums:Sums", seed=seed, params=params))


def terms(question: Question) -> tuple[int, int]:
    (message,) = question.messages
    found = re.fullmatch(r"(\d+)\+(\d+)=", message.content)
    assert message.role == "user"
    assert found
    return int(found[1]), int(found[2])


@pytest.mark.parametrize(("params", "largest"), [({}, 40), ({"largest": 3}, 3)])
def test_all_numbers_up_to_the_largest_are_added(params: dict[str, int], largest: int) -> None:
    """1,000 draws miss a given number out of 41 with a chance of 2e-11."""
    questions = [sums(**params).train(index) for index in range(1000)]
    pairs = [terms(question) for question in questions]
    for numbers in zip(*pairs, strict=True):
        assert set(numbers) == set(range(largest + 1))
    assert [question.answer for question in questions] == [{"answer": str(left + right)} for left, right in pairs]


def test_a_question_is_the_same_for_ever_and_another_seed_asks_others() -> None:
    first = [sums(3).train(index) for index in range(50)]
    again = sums(3)
    assert [again.train(index) for index in reversed(range(50))] == first[::-1]
    assert [sums(4).train(index) for index in range(50)] != first


def test_questions_to_hold_out_come_in_an_order_of_their_own() -> None:
    held = list(itertools.islice(sums(3).candidates(), 50))
    assert held == list(itertools.islice(sums(3).candidates(), 50))
    assert held != [sums(3).train(index) for index in range(50)]


def test_a_run_trains_on_none_that_it_holds_out() -> None:
    source = TaskSource([TaskSection(env="engine.tasks.sums:Sums", name="sums", params={"largest": 3}, held_out=8)], 0)
    held = {task.messages for task in source.held_out()}
    trained = {source.next().messages for _ in range(200)}
    assert (len(held), len(trained)) == (8, 8)  # 16 sums of two numbers from 0 to 3
    assert not held & trained


def test_a_misspelt_param_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"params\.largets of task \S+ = 9: is no key"):
        sums(largets=9)
    for largest in ("9", -1, 2.5, True):
        with pytest.raises(ConfigError, match="is no whole number of 0 or more"):
            sums(largest=largest)
    sums(largest=9, score="exact")
