from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.reward.answer import Kind, extract, same_answer, same_number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("5", "5"),
        ("2 + 3 = 5.", "5"),
        ("She sold 72 clips, altogether.", "72"),
        ("The total is $1,234.50.", "1234.50"),
        ("1,234,567", "1234567"),
        ("It is -5", "-5"),
        ("It is -5 degrees", "-5"),
        ("It is \u22125", "-5"),
        ("It is \u20135.", "-5"),
        ("x=-5", "-5"),
        ("(-5)", "-5"),
        ("-$5", "-5"),
        ("+5", "5"),
        ("10-5", "5"),
        ("10 - 5", "5"),
        ("from 2010\u20132015", "2015"),
        ("f(2)-7", "7"),
        ("- 5 apples", "5"),
        ("**42**", "42"),
        ("#### 42", "42"),
        ("\\boxed{42}", "42"),
        ("42%", "42"),
        ("so it's...42", "42"),
        ("about .5", ".5"),
        ("-.5", "-.5"),
        ("1.5e3.", "1.5e3"),
        ("1e-3", "1e-3"),
        ("1e5x", "5"),
        ("one of 1, 2, 3", "3"),
        ("1,2345", "2345"),
        ("a third, 1/3.", "1/3"),
        ("007", "007"),
        ("\u0663 or 4", "4"),
        ("It costs $1,000!", "1000"),
        ("about 50 %.", "50"),
        ("so 1e3", "1e3"),
        ("= 6.02 \u00d7 10^23.", "6.02e23"),
        (r"$1.5 \times 10^{-3}$", "1.5e-3"),
        (r"\( 42 \)", "42"),
        (r"\[ -42 \]", "-42"),
        (r"\boxed{42\text{ cm}}", "42"),
        (r"\text{42}", "42"),
        (r"$1{,}234.5$", "1234.5"),
        (r"$12\,345$", "12345"),
        (r"2\,\text{cm} by 7\,\text{cm}", "7"),
        ("1\u202f234\u00a0567", "1234567"),
        ("1\u2009234,5", "5"),
        ("rooms 12\u00a034", "34"),
        ("rooms 12\u00a03456", "3456"),
        ("one of 1 234", "234"),
        ("\uff0d\uff11\uff0c\uff12\uff13\uff14\uff0e\uff15", "-1234.5"),
        ("5\u00b2", "5"),
        (r"\frac{1}{2}", "1/2"),
        (r"$-\dfrac{ 3 }{4}$.", "-3/4"),
        (r"2\frac{1}{2}", "1/2"),
        ("it is 1 / 2", "1/2"),
        ("x = - 5", "-5"),
        ("x =- 5", "-5"),
        ("Of these:\n- 5 apples", "5"),
        ("none", None),
        ("", None),
        ("...", None),
    ],
)
def test_last_number(text: str, number: str | None) -> None:
    assert extract(text, "last_number") == number


def test_the_answer_may_be_far_from_the_end() -> None:
    assert extract("The answer is 5. " + "So it is, as was shown above. " * 1000, "last_number") == "5"
    assert extract("\\boxed{5}" + " and so on" * 1000, "boxed") == "5"
    assert extract("<answer>5</answer>" + " and so on" * 1000, "tag") == "5"


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{5}", "5"),
        (r"first \boxed{4}, no, \boxed{ 5 }.", "5"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed {5}", "5"),
        (r"\boxed{x = \boxed{5}}", "5"),
        (r"{ \boxed{5} } }", "5"),
        (r"{{ \boxed{5}", "5"),
        (r"\boxed{5} and then \boxed{6", "5"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\\boxed{5}", "5"),
        (r"\boxed{}", None),
        (r"\boxed{5", None),
        (r"\fbox{5}", None),
        ("5", None),
    ],
)
def test_boxed(text: str, content: str | None) -> None:
    assert extract(text, "boxed") == content


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("<answer>5</answer>", "5"),
        ("<answer>4</answer> no, <answer>\n5 </answer>!", "5"),
        ("<Answer>5</ANSWER>", "5"),
        ("<answer><answer>5</answer></answer>", "5"),
        ("</answer> <answer>5</answer> <answer>6", "5"),
        ("<answer> </answer>", None),
        ("<answer>5", None),
        ("5</answer>", None),
    ],
)
def test_tag(text: str, content: str | None) -> None:
    assert extract(text, "tag") == content


def test_exact_is_everything() -> None:
    assert extract("  The answer is 5.\n", "exact") == "The answer is 5."
    assert extract(" \n", "exact") is None


@pytest.mark.parametrize("kind", ["last_number", "boxed", "tag", "exact"])
def test_thinking_is_not_the_answer(kind: Kind) -> None:
    thought = r"<answer>4</answer> \boxed{4} 4"
    said = {"boxed": r"\boxed{5}", "tag": "<answer>5</answer>"}.get(kind, "5")
    assert extract(f"<think>{thought}</think>{said}", kind) == "5"
    assert extract(f"{thought}</think>{said}", kind) == "5"
    # Cut off while still thinking: no answer was given.
    assert extract(f"<think>{thought}", kind) is None


@pytest.mark.parametrize(
    ("extracted", "gold"),
    [
        ("5", "5"),
        ("5.", "5"),
        ("5.0", "5"),
        ("05", "5"),
        ("+5", "5"),
        ("1,234.50", "1234.5"),
        ("1234.5", "1,234.50"),
        ("$1,234.50.", "1234.5"),
        ("-5", "\u22125"),
        ("\u22125", "-5"),
        ("-0", "0"),
        ("1.5e3", "1500"),
        ("72 clips, altogether.", "72"),
        ("7%", "7"),
        ("100000000000000000000000000000000000001", "100000000000000000000000000000000000001"),
        ("0.1", ".1"),
        ("a  b\nc", " a b c "),
        ("1/2", "1/2"),
        ("12:30", "12:30"),
        ("0 1\n1 0", "0 1 1 0"),
        ("9" * 2000, "9" * 2000),
        ("**42**", "42"),
        ("**42.**", "42"),
        ("`42`", "42"),
        (r"\( 42 \)", "42"),
        (r"\[42\]", "42"),
        ("$42$", "42"),
        (r"42\text{ cm}", "42"),
        (r"\text{42}", "42"),
        (r"90^\circ", "90"),
        (r"90^{\circ}", "90"),
        (r"\$1{,}000", "1000"),
        (r"50\%", "50"),
        ("50 %", "50%"),
        ("- 3", "-3"),
        ("1\u202f234", "1,234"),
        ("1e3", "1000"),
        (r"1.5 \times 10^{3}", "1500"),
        ("\uff14\uff12", "42"),
        (r"\frac{1}{2}", "1/2"),
        ("\u22121/2", "-1/2"),
        (r"\text{Paris}", "Paris"),
    ],
)
def test_the_same(extracted: str, gold: str) -> None:
    assert same_answer(extracted, gold)


@pytest.mark.parametrize(
    ("extracted", "gold"),
    [
        ("5", "-5"),
        ("5", "6"),
        ("50", "5"),
        ("5", "five"),
        ("five", "5"),
        ("", "5"),
        ("I think it is 5", "5"),
        ("12 apples, not 13", "12"),
        ("11+1", "12"),
        ("12:30", "12"),
        ("3x", "3"),
        ("3 + y", "3"),
        ("5 oranges", "5 apples"),
        ("2/4", "1/2"),
        ("0.5", "1/2"),
        ("100000000000000000000000000000000000001", "100000000000000000000000000000000000000"),
        ("0.30000000000000004", "0.3"),
        ("Paris", "paris"),
        ("50%", "0.5"),
        ("42**2", "42"),
        (r"2\frac{1}{2}", "2"),
        (r"\frac{1}{2}", "-1/2"),
        ("1 234", "1234"),
        ("5\u00b2", "5"),
    ],
)
def test_not_the_same(extracted: str, gold: str) -> None:
    assert not same_answer(extracted, gold)


@pytest.mark.parametrize(
    ("extracted", "gold", "same"),
    [
        ("1,234.50", "1234.5", True),
        (r"$-3$", "-3.0", True),
        ("5", "6", False),
        ("0.1000001", "0.1", False),
        ("3 apples", "3", None),
        ("3 x", "3", None),
        ("1/2", "0.5", None),
        ("3", "x", None),
    ],
)
def test_the_same_number_and_nothing_else(extracted: str, gold: str, same: bool | None) -> None:
    assert same_number(extracted, gold) is same


HOSTILE: list[Callable[[int], str]] = [
    lambda n: "1" * n,
    lambda n: "1,234" * n,
    lambda n: ",234" * n,
    lambda n: "1/" * n,
    lambda n: "1e" * n,
    lambda n: "-" * n,
    lambda n: "." * n,
    lambda n: "1 " * n,
    lambda n: "\\boxed{" * n,
    lambda n: "\\boxed" + " " * n,
    lambda n: "\\boxed " * n,
    lambda n: "}" * n + "{" * n,
    lambda n: "<answer>" * n,
    lambda n: "<answer>" * n + "</answer>" * n,
    lambda n: "<think>" * n,
    lambda n: "</think>" * n,
    lambda n: "1" + " " * n + "!",
    lambda n: "1 " + "," * n + "1",
    lambda n: "\\text{" * n,
    lambda n: "\\text {" + "}" * n,
    lambda n: "\\frac{1}{" * n,
    lambda n: "\\frac{" + "1" * n,
    lambda n: "1\u00a0234" * n,
    lambda n: "1 \\times 10^{" * n,
    lambda n: "= - " * n,
    lambda n: "-" + " " * n + "1",
]


@pytest.mark.parametrize("hostile", HOSTILE)
@pytest.mark.parametrize("kind", ["last_number", "boxed", "tag", "exact"])
def test_hostile_text_takes_linear_time(hostile: Callable[[int], str], kind: Kind) -> None:
    text = hostile(200_000)
    start = time.process_time()
    same_answer(extract(text, kind) or "", "5")
    same_answer(text, text)
    # Quadratic time would be minutes.
    assert time.process_time() - start < 5


@given(st.integers(), st.text(alphabet=" abc.,;:!?\n*$#=", max_size=20), st.text(alphabet=" .,;:!?\n*", max_size=20))
def test_any_integer_is_found_in_any_prose(number: int, before: str, after: str) -> None:
    for written in (f"{number}", f"{number:,}", f"{number}.00"):
        found = extract(f"7 {before} {written} {after}", "last_number")
        assert found is not None
        assert same_answer(found, str(number))


@given(st.text())
def test_no_text_breaks_it(text: str) -> None:
    for kind in ("last_number", "boxed", "tag", "exact"):
        found = extract(text, kind)
        assert found is None or same_answer(found, found)
