from __future__ import annotations

import hashlib
from collections import Counter
from pathlib import Path

import pytest

from evals.suites.written import choices, passages

FOLDER = Path(__file__).parents[3] / "evals/suites/safety-net"


@pytest.mark.parametrize(
    ("name", "digest"), [("choices.jsonl", "4cc568a7fc611a29"), ("passages.jsonl", "2a21e594d4784cd7")]
)
def test_the_texts_are_as_they_were(name: str, digest: str) -> None:
    """A change wants a new version in the task's file."""
    assert hashlib.sha256((FOLDER / name).read_bytes()).hexdigest()[:16] == digest


def test_no_place_and_no_length_gives_the_answer_away() -> None:
    rows = list(choices(version=1)["test"])
    assert len({row["question"] + row["choices"][row["answer"]] for row in rows}) == len(rows) == 64
    for subject in ("common sense", "word meaning", "grammar", "facts"):
        places = Counter(row["answer"] for row in rows if row["subject"] == subject)
        assert places == dict.fromkeys(range(4), 4)
    for row in rows:
        assert len(row["choices"]) == len(set(row["choices"])) == 4
    for pick in (max, min):
        by_length = sum(pick(row["choices"], key=len) == row["choices"][row["answer"]] for row in rows)
        assert by_length <= 32


def test_passages_are_plain_and_of_a_length() -> None:
    rows = list(passages(version=1)["test"])
    assert len({row["kind"] for row in rows}) == len(rows) == 24
    assert all(60 <= len(row["text"].split()) <= 90 and row["text"].isascii() for row in rows)
