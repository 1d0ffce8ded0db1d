from __future__ import annotations

import json
from typing import Any

import pytest

from engine.config import TaskSection
from engine.reward.family import load
from engine.tasks.reasoning_gym import ReasoningGym


def answer_of(family: str, index: int = 0, **params: object) -> dict[str, Any]:
    """What a worker gets: once through JSON."""
    section = TaskSection(env="reasoning_gym", name=family, params=params)
    return json.loads(json.dumps(ReasoningGym(section, "tasks.0").train(index).answer))


def test_any_valid_solution_is_accepted() -> None:
    answers = (answer_of("graph_color", i, min_num_vertices=4, max_num_vertices=4) for i in range(50))
    answer = next(answer for answer in answers if answer["entry"]["metadata"]["puzzle"]["edges"])
    solution = answer["entry"]["metadata"]["possible_answer"]
    accepts = load(answer)
    assert accepts(json.dumps(solution))
    # Colours 1, 2, 3 renamed in a circle colour the graph as well; a single colour does not: it has an edge.
    assert accepts(json.dumps({vertex: colour % 3 + 1 for vertex, colour in solution.items()}))
    assert not accepts(json.dumps(dict.fromkeys(solution, 1)))


def test_partial_credit_is_no_credit() -> None:
    answer = answer_of("prime_factorization")
    accepts = load(answer)
    assert accepts(answer["answer"])
    # The product alone scores 0.5 there.
    assert not accepts(str(answer["entry"]["metadata"]["number"]))


def test_a_tolerance_is_the_familys_own() -> None:
    answer = answer_of("power_function")
    answer["entry"]["answer"] = "-527.9038"
    accepts = load(answer)
    # "Correct to 3 significant figures, in scientific notation."
    assert accepts("-5.28e+2")
    assert not accepts("-5.27e+2")


def test_params_reach_the_scorer() -> None:
    # 3.14 against 3.15: within the tolerance of 10^-places for 2 places, not for 4.
    for places, near_enough in ((2, True), (4, False)):
        answer = answer_of("decimal_arithmetic", min_num_decimal_places=places, max_num_decimal_places=places)
        answer["entry"]["answer"] = "3.14"
        assert load(answer)("3.15") is near_enough


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("prime_factorization", "zzz"),  # ValueError
        ("boxnet", "[1, 2]"),  # AttributeError
        ("game_of_life", '{"a": 1}'),  # KeyError
        ("boxnet", "[" * 100_000),  # RecursionError, swallowed by the package
    ],
)
def test_what_a_family_cannot_parse_is_wrong(family: str, text: str) -> None:
    assert not load(answer_of(family))(text)


def test_nan_is_no_complex_number() -> None:
    accepts = load(answer_of("complex_arithmetic"))
    # Both score 1.0 in reasoning_gym 0.1.25.
    assert not accepts("nan")
    assert not accepts("nan+nanj")


@pytest.mark.parametrize(
    "attack",
    [
        "__import__('os')._exit(3)",
        "exit()",
        "[exit][0]()",
        "(exit)()",
        "\uff45\uff58\uff49\uff54()",
        "S('\\145\\170\\151\\164()')",
        "open('x', 'w')",
        "entry",
        "().__class__",
        "lambda: 0",
        "max(1, 2)",
    ],
)
@pytest.mark.parametrize("family", ["countdown", "puzzle24", "n_queens", "polynomial_multiplication"])
def test_text_is_not_run(family: str, attack: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    answer = answer_of(family)
    accepts = load(answer)
    asked: list[str] = []
    monkeypatch.setattr(f"{type_of(family)}.score_answer", lambda self, text, entry: asked.append(text) or 0.0)
    assert not accepts(attack)
    assert asked == []
    accepts("(1 + 2) * 3")
    assert asked == ["(1 + 2) * 3"]


def type_of(family: str) -> str:
    from reasoning_gym.factory import DATASETS

    dataset = DATASETS[family][0]
    return f"{dataset.__module__}.{dataset.__qualname__}"


def test_formulas_are_judged() -> None:
    answer = answer_of("countdown")
    accepts = load(answer)
    expression = answer["entry"]["metadata"]["expression"]
    assert accepts(expression)
    assert accepts(f"({expression}) * 1") is False
    assert accepts(f"({expression})")
