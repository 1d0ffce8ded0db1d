from __future__ import annotations

import hashlib
import itertools
import tomllib
from pathlib import Path

import msgspec
import pytest

from engine.config import TaskSection
from engine.tasks.reasoning_gym import ReasoningGym
from engine.tasks.source import TaskSource
from evals.suites.questions import PARTS, dataset, questions, reserved

ROOT = Path(__file__).parents[3]
QUICKSTART = msgspec.convert(tomllib.loads((ROOT / "configs/quickstart.toml").read_text())["tasks"], list[TaskSection])


# Written down once: a change here makes every earlier result incomparable, and wants a new version in the task's file.
@pytest.mark.parametrize(
    ("task", "count", "digest"),
    [
        ("arithmetic_easy", 64, "25d2f27d21dc0eaf"),
        ("arithmetic_medium", 64, "51b18552c1c87ccf"),
        ("arithmetic_hard", 64, "f23c481d47df3598"),
        ("reasoning_logic", 48, "08409171ede38da6"),
        ("reasoning_graphs", 48, "59ad092a47a928d7"),
        ("reasoning_algorithmic", 72, "e74233411d711630"),
        ("reasoning_games", 48, "e1ef60f972d36e55"),
        ("reasoning_gsm_symbolic", 24, "e8be4e8eeb514112"),
    ],
)
def test_the_questions_are_the_same_on_every_machine(task: str, count: int, digest: str) -> None:
    asked = questions(task)
    assert len({question.text for question in asked}) == len(asked) == count
    whole = "\n".join(f"{question.messages[0].content}\t{question.answer['answer']}" for question in asked)
    assert hashlib.sha256(whole.encode()).hexdigest()[:16] == digest


def test_every_task_is_pinned_above() -> None:
    (mark,) = test_the_questions_are_the_same_on_every_machine.pytestmark  # type: ignore[attr-defined]
    assert {task for task, _, _ in mark.args[1]} == PARTS.keys()


def test_the_columns_that_lm_eval_sees() -> None:
    rows = dataset("arithmetic_easy", version=1, config_source="here")["test"]
    assert rows.features.keys() == {"question", "answer"}
    assert [row["question"] for row in rows] == [question.text for question in questions("arithmetic_easy")]


def test_sums_are_what_python_says() -> None:
    for task in ("arithmetic_easy", "arithmetic_medium", "arithmetic_hard"):
        for question in questions(task):
            expression = question.text.removeprefix("Calculate ").removesuffix(".")
            assert set(expression) <= set("0123456789+-*() ")
            assert str(eval(expression)) == question.answer["answer"]


def test_easy_sums_are_the_quickstarts() -> None:
    """Two terms of up to two digits (100 counts as such), as training asks them."""
    trained = ReasoningGym(QUICKSTART[0], "tasks.0")
    for question in [*questions("arithmetic_easy"), *(trained.train(index) for index in range(200))]:
        left, plus, right = question.text.removeprefix("Calculate ").removesuffix(".").split()
        assert plus == "+"
        assert 0 <= int(left) <= 100
        assert 0 <= int(right) <= 100


def test_syllogisms_follow_from_sets() -> None:
    """In every world: each of the eight sorts of things, by which of three kinds they belong to, exists or does not."""
    sorts = list(itertools.product((False, True), repeat=3))
    worlds = [[s for s, there in zip(sorts, chosen, strict=True) if there]
              for chosen in itertools.product((False, True), repeat=8)]
    for question in questions("reasoning_logic")[1::2]:
        lines = question.messages[0].content.replace("?", "").splitlines()
        said = [line.split(". ")[-1].split() for line in (lines[1], lines[2], lines[5])]
        kinds = list(dict.fromkeys(word for words in said for word in (words[1], words[3])))
        assert len(kinds) == 3

        def holds(words: list[str], world: list[tuple[bool, ...]], kinds: list[str] = kinds) -> bool:
            first, second = kinds.index(words[1]), kinds.index(words[3])
            wanted = {"All": True, "No": False}[words[0]]
            return all(thing[second] is wanted for thing in world if thing[first])

        follows = all(holds(said[2], world) for world in worlds if holds(said[0], world) and holds(said[1], world))
        assert question.answer["answer"] == ("Yes" if follows else "No")


def test_little_sudokus_have_one_solution() -> None:
    lines = list(itertools.permutations("1234"))
    for question in questions("reasoning_games")[1::2]:
        rows = [line.split() for line in question.messages[0].content.splitlines() if line[:1] in "1234_" and line]
        fitting = [[line for line in lines if all(a in (b, "_") for a, b in zip(row, line, strict=True))]
                   for row in rows]
        solved = [
            grid for grid in itertools.product(*fitting)
            if all(len(set(column)) == 4 for column in zip(*grid, strict=True))
            and all(len({grid[r][c], grid[r][c + 1], grid[r + 1][c], grid[r + 1][c + 1]}) == 4
                    for r in (0, 2) for c in (0, 2))
        ]
        assert ["\n".join(" ".join(line) for line in grid) for grid in solved] == [question.answer["answer"]]


def test_no_suite_asks_what_the_quickstart_trains_on_or_holds_out() -> None:
    asked = {question.text for task in PARTS for question in questions(task)}
    free, kept = TaskSource(QUICKSTART, 0), TaskSource(QUICKSTART, 0, reserved(QUICKSTART))
    # Without the exclusion they meet: 48 of 10,201 two-digit sums and 16 of 121 one-digit ones.
    assert not asked.isdisjoint(free.next().messages[-1].content for _ in range(3000))
    assert asked.isdisjoint(kept.next().messages[-1].content for _ in range(3000))
    held_out = [task.messages[-1].content for task in kept.held_out()]
    assert len(held_out) == 128
    assert asked.isdisjoint(held_out)


@pytest.mark.parametrize("task", PARTS)
def test_suite_seeds_are_far_from_all_others(task: str) -> None:
    """The seed-shift trap: by seed alone, no suite's list is a piece of the lists that are trained on or held out."""
    part = PARTS[task][-1]
    for seed in range(3):
        section = TaskSection(env="reasoning_gym", name="x", params={"family": part.family, **part.params}, seed=seed)
        environment = ReasoningGym(section, "tasks.0")
        assert next(environment.reserved(f"{task}/{len(PARTS[task]) - 1}")).text
        starts = [environment._train_seed, environment._held_out_seed, environment._chunk_seed]
        assert min(b - a for a, b in itertools.pairwise(starts)) >= 2**29
        # numpy's generators take no more.
        assert environment._chunk_seed + 2**28 < 2**32


def test_what_is_reserved_depends_on_the_families_of_the_run() -> None:
    def of(**settings: object) -> frozenset[str]:
        return reserved([TaskSection(**{"env": "reasoning_gym", **settings})])  # type: ignore[arg-type]

    assert len(of(name="basic_arithmetic")) == 3 * 64
    assert of(name="mine", params={"family": "basic_arithmetic"}) == of(name="basic_arithmetic")
    assert of(name="maze") == {question.text for question in questions("reasoning_games")}
    assert of(name="products") == of(env="jsonl", name="basic_arithmetic") == frozenset()
