"""The questions of the suites that reasoning_gym makes: the same for everyone, and never trained on.

Only families whose one right answer a comparison of texts settles: no family's own scorer is run, since some evaluate
what the model wrote. Left out for other reasons: families with several right answers (shortest_path, n_queens), with
wrong ones (family_relationships names the wrong one of two in-laws; aiw asks about a stranger's siblings), and with
questions that hang on Python's string hashing.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import msgspec

from engine.config import TaskSection
from engine.tasks.question import Question


class Part(msgspec.Struct, frozen=True):
    """So many distinct questions of one family."""

    family: str
    count: int
    params: dict[str, Any]


def _sums(count: int, digits: tuple[int, int], terms: tuple[int, int], operators: str) -> Part:
    """Parentheses where there is a product: without them basic_arithmetic ignores precedence."""
    return Part("basic_arithmetic", count, {
        "min_digits": digits[0], "max_digits": digits[1], "min_terms": terms[0], "max_terms": terms[1],
        "operators": list(operators), "allow_parentheses": "*" in operators,
    })


# By task. A part's place in its task is part of its seed: add at the end.
PARTS: dict[str, tuple[Part, ...]] = {
    # Few with terms up to 10: there are 121 of these, and what is asked here is not trained on.
    "arithmetic_easy": (_sums(16, (1, 1), (2, 2), "+"), _sums(48, (2, 2), (2, 2), "+")),
    "arithmetic_medium": (_sums(64, (1, 2), (3, 3), "+-"),),
    "arithmetic_hard": (_sums(64, (2, 3), (3, 4), "+-*"),),
    "reasoning_logic": (
        Part("knights_knaves", 24, {"n_people": 2}),
        # "All" and "no" alone: whether "some are" follows from "all are" depends on whom one asks.
        Part("syllogism", 24, {"allow_some": False, "allow_some_not": False, "inversion_probability": 0.0}),
    ),
    "reasoning_graphs": (
        Part("largest_island", 24, {"max_rows": 6, "max_cols": 6, "min_num_islands": 2}),
        Part("path_star", 24, {"node_range": 100}),
    ),
    "reasoning_algorithmic": (
        Part("spiral_matrix", 24, {"min_n": 3, "max_n": 4}),
        Part("letter_counting", 24, {"max_words": 10}),
        # Up to base 10: "1e2" is a number to whoever compares answers.
        Part("base_conversion", 24, {"max_base": 10, "min_value": 10, "max_value": 300}),
    ),
    "reasoning_games": (
        Part("maze", 24, {"max_grid_size": 7}),
        Part("mini_sudoku", 24, {"min_empty": 4, "max_empty": 8}),
    ),
    "reasoning_gsm_symbolic": (Part("gsm_symbolic", 24, {}),),
}


def dataset(task: str, **_: object) -> dict[str, Any]:
    """What lm-eval's `custom_dataset` returns: the split "test" with the columns question and answer."""
    from datasets import Dataset

    rows = [{"question": asked.messages[-1].content, "answer": asked.answer["answer"]} for asked in questions(task)]
    return {"test": Dataset.from_list(rows)}


@functools.cache
def questions(task: str) -> tuple[Question, ...]:
    """All questions of a task of PARTS, distinct by text; its parts mixed, so that the first few are like them all."""
    parts = [_made(task, place, part) for place, part in enumerate(PARTS[task])]
    spread = sorted(
        ((index + 0.5) / len(part), place, index) for place, part in enumerate(parts) for index in range(len(part))
    )
    return tuple(parts[place][index] for _, place, index in spread)


def reserved(sections: Sequence[TaskSection]) -> frozenset[str]:
    """The texts of all questions here whose families a run with these [[tasks]] trains on, as `Question.text`."""
    trained = {section.params.get("family", section.name) for section in sections if section.env == "reasoning_gym"}
    return frozenset(
        question.text
        for task, parts in PARTS.items()
        if not trained.isdisjoint(part.family for part in parts)
        for question in questions(task)
    )


def _made(task: str, place: int, part: Part) -> list[Question]:
    from engine.tasks.reasoning_gym import ReasoningGym

    section = TaskSection(env="reasoning_gym", name=f"{task}_{place}", params={"family": part.family, **part.params})
    environment = ReasoningGym(section, f"suite {task}")
    found: dict[str, Question] = {}
    for question in environment.reserved(f"{task}/{place}"):
        found.setdefault(question.text, question)
        if len(found) == part.count:
            break
    return list(found.values())
