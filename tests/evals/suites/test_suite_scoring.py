from __future__ import annotations

import itertools

import pytest

from evals.suites.scoring import every, numbers, pass_at_k, tagged


def test_pass_at_k_by_hand() -> None:
    # Of 5 samples 2 are right: of the 10 pairs, 3 have no right one.
    assert pass_at_k(5, 2, 2) == pytest.approx(0.7)
    assert pass_at_k(5, 2, 1) == pytest.approx(0.4)
    assert [pass_at_k(4, right, 4) for right in range(5)] == [0.0, 1.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(("count", "right"), [(6, 0), (6, 1), (6, 3), (6, 6)])
def test_pass_at_k_against_every_draw(count: int, right: int) -> None:
    for k in range(1, count + 1):
        draws = list(itertools.combinations([place < right for place in range(count)], k))
        assert pass_at_k(count, right, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_numbers_name_their_metrics_by_the_samples() -> None:
    document = {"question": "Calculate 47 + 8.", "answer": "55"}
    assert numbers(document, [["It is 55.", "54", "47 + 8 = 55", ""]]) == {"pass@1": 0.5, "pass@4": 1.0}
    assert numbers(document, [["no number"]]) == {"pass@1": 0.0}
    assert numbers(document, [["55"]]) == {"pass@1": 1.0}


KNIGHTS = "Mia is an angel, and Jack is a devil."


@pytest.mark.parametrize(
    ("text", "gold", "right"),
    [
        ("Let me see. <answer>Mia is an angel, and Jack is a devil</answer>", KNIGHTS, 1),
        ("<answer>mia is a Angel, and Jack is a devil.</answer>", KNIGHTS, 1),
        ("<answer>Mia is a devil, and Jack is an angel.</answer>", KNIGHTS, 0),
        ("<answer>1 2\n3 4</answer>", "1 2\n3 4", 1),
        ("<answer>1 2 4 3</answer>", "1 2\n3 4", 0),
        ("<answer>7.0</answer>", "7", 1),
        ("<answer>7</answer> no, <answer>8</answer>", "7", 0),
        ("The answer is 7.", "7", 0),
        ("<answer>7", "7", 0),
        ("<answer>7 or 8</answer>", "7", 0),
        ("", "7", 0),
    ],
)
def test_answers_stand_between_tags(text: str, gold: str, right: int) -> None:
    assert tagged({"answer": gold}, [[text]]) == {"acc": right}


def test_every_sample_passes_the_filter() -> None:
    samples = [["a", "b"], ["c", "d"]]
    assert every(samples, [{}, {}]) == samples
