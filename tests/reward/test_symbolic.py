from __future__ import annotations

import pytest

from engine.reward.symbolic import SameMeaning, load


@pytest.fixture(scope="module")
def same() -> SameMeaning:
    return load()


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("12", "12"),
        ("1,234.50", "1234.5"),
        ("- 3", "-3"),
        (r"1.5 \times 10^3", "1500"),
        ("7%", "7"),
        (r"7\%", "7"),
        ("x = 5", "5"),
        ("5", "x = 5"),
        (r"12\text{ cm}", "12"),
        (r"\frac{2}{4}", r"\frac{1}{2}"),
        ("1/2", r"\frac{1}{2}"),
        ("0.5", r"\frac{1}{2}"),
        (r"-\frac12", "-0.5"),
        ("0.333333", "1/3"),
        ("3.14159265", r"\pi"),
        (r"2\frac{1}{2}", "5/2"),
        ("(x+1)^2", "x^2 + 2x + 1"),
        (r"$\sqrt{12}$", r"2\sqrt{3}"),
        (r"\(2\sqrt3\)", r"2\sqrt{3}"),
        (r"\[2\sqrt3\]", r"2\sqrt{3}"),
        (r"\frac{x}{2}\%", "x/2"),
        (r"5 \le x", r"x \ge 5"),
        (r"\{2, 1\}", "1,2"),
        ("(1,2)", "(1, 2)"),
        (r"\text{Paris}", "Paris"),
        ("1024", "2^{10}"),
        ("}{", "}{"),
        ("1+" * 600 + "x", "1+" * 600 + "x"),
    ],
)
def test_the_same_meaning(same: SameMeaning, answer: str, gold: str) -> None:
    assert same(answer, gold)


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("13", "12"),
        ("3", "-3"),
        ("0.1000001", "0.1"),
        ("7%", "0.07"),
        ("11+1", "12"),
        (r"37 \cdot 43", "1591"),
        (r"\sqrt{4}", "2"),
        (r"11 + 1 = 13", "12"),
        ("1,2", "1.2"),
        ("12 apples, not 13", "12"),
        ("3 x", "3"),
        (r"\frac{1}{2}", r"\frac{1}{3}"),
        ("0.33", "1/3"),
        ("(2,1)", "(1,2)"),
        ("[1,2]", "(1,2)"),
        ("y+1", "x+1"),
        ("silent", "listen"),
        ("5", r"x \ge 5"),
        ("nonsense", "12"),
        ("", "12"),
        ("}{", r"\frac{1}{2}"),
        ("1+" * 600 + "1", r"601x"),
        ("x+" * 600 + "0", r"600x"),
        (r"$3\sqrt{2}$ or $2\sqrt{3}$", r"2\sqrt{3}"),
        (r"3\sqrt{2}$ $2\sqrt{3}", r"2\sqrt{3}"),
        (r"\frac{1}{2}", r"50\%"),
        ("9^{9^{9^9}}", "12"),
        ("9^{9^{9^9}}", r"\frac{1}{2}"),
    ],
)
def test_another_meaning(same: SameMeaning, answer: str, gold: str) -> None:
    assert not same(answer, gold)


def test_no_alarm_is_set(same: SameMeaning, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would fail outside a main thread, and a worker's scorer may have one of its own."""
    monkeypatch.setattr("signal.alarm", lambda seconds: pytest.fail("an alarm"))
    assert same(r"\frac{2}{4}", r"\frac{1}{2}")
