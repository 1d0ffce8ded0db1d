"""Findings, how they come about, and the report that they make."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from engine.errors import FarfieldError

REPORT_IT = "paste this report into an issue"


class Finding(msgspec.Struct, frozen=True):
    """What one check found: `Finding("/dev/shm", "problem", "64 MiB free", "docker run --shm-size=2g")`.

    `remedy` says what to do about a problem, and is empty otherwise.
    """

    name: str
    verdict: Literal["ok", "problem", "not applicable"]
    detail: str
    remedy: str = ""


Check = Callable[[], Iterable[Finding]]


def judge(name: str, fine: bool, detail: str, remedy: str) -> Finding:
    """A finding that is `ok`, or a problem with its remedy."""
    return Finding(name, "ok", detail) if fine else Finding(name, "problem", detail, remedy)


def examine(checks: Sequence[tuple[str, Check]]) -> list[Finding]:
    """The findings of all (title, check) pairs, in order, with progress on stderr."""
    findings: list[Finding] = []
    for title, check in checks:
        print(f".. {title}", file=sys.stderr, flush=True)
        try:
            for finding in check():
                findings.append(finding)
        except FarfieldError as error:
            findings.append(Finding(title, "problem", str(error.args[0]), error.remedy or REPORT_IT))
        except Exception as error:
            # Wrong in a run, right here: a check that crashes says something about this machine too, and the reader
            # needs what the others have to say.
            findings.append(Finding(title, "problem", f"{type(error).__name__}: {error}", REPORT_IT))
    return findings


def render(findings: Sequence[Finding], home: Path) -> str:
    """Plain text, one finding per line and its remedy below. Neither the home folder nor its owner's name is in it."""
    width = max(len(finding.name) for finding in findings)
    lines: list[str] = []
    for finding in findings:
        lines.append(f"{finding.name:{width}}  {finding.verdict:14}  {' '.join(finding.detail.split())}")
        if finding.remedy:
            lines.append(f"{'':{width + 18}}-> {finding.remedy}")
    text = "\n".join([*lines, f"problems found: {sum(finding.verdict == 'problem' for finding in findings)}"])
    # A user without a home has the root folder.
    return re.sub(rf"/{re.escape(home.name)}\b", "/USER", text.replace(str(home), "~")) if home.name else text
