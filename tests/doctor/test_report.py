"""Findings become a report that stands alone and names nobody."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.doctor.report import Finding, examine, judge, render
from engine.errors import MissingError


def broken() -> Iterator[Finding]:
    yield Finding("first half", "ok", "")
    raise RuntimeError("no such thing")


def refused() -> Iterator[Finding]:
    raise MissingError("vLLM did not start", remedy="read the log")


def test_a_check_that_crashes_is_a_problem_and_the_others_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    findings = examine([("one", broken), ("two", refused), ("three", lambda: [Finding("last", "ok", "fine")])])
    assert findings == [
        Finding("first half", "ok", ""),
        Finding("one", "problem", "RuntimeError: no such thing", "paste this report into an issue"),
        Finding("two", "problem", "vLLM did not start", "read the log"),
        Finding("last", "ok", "fine"),
    ]
    assert capsys.readouterr().err == ".. one\n.. two\n.. three\n"


def test_a_remedy_goes_with_a_problem_only() -> None:
    assert judge("a", True, "fine", "buy another") == Finding("a", "ok", "fine")
    assert judge("a", False, "broken", "buy another") == Finding("a", "problem", "broken", "buy another")


def test_the_report_is_aligned_and_counts_problems() -> None:
    findings = [Finding("gpu", "not applicable", "no GPU"), Finding("/dev/shm", "problem", "too\n small", "grow it")]
    assert render(findings, Path("/home/ada")).splitlines() == [
        "gpu       not applicable  no GPU",
        "/dev/shm  problem         too small",
        "                          -> grow it",
        "problems found: 1",
    ]


def test_the_report_names_no_home_and_no_user() -> None:
    findings = [Finding("runs", "problem", "/home/ada/runs: full", "empty /scratch/ada/old, not /scratch/adam")]
    text = render(findings, Path("/home/ada"))
    assert "~/runs: full" in text
    assert "empty /scratch/USER/old, not /scratch/adam" in text


def test_a_user_without_a_home_changes_nothing() -> None:
    assert "/a/b" in render([Finding("x", "ok", "/a/b")], Path("/"))
