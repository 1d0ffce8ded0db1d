"""Rewards that misbehave, named in configs as `scorers:function`."""

from __future__ import annotations

import os
from pathlib import Path


def fails_when_told(completion: str, answer: dict[str, object]) -> float:
    """Any reward, different for each completion, until a file of the test appears."""
    if Path(os.environ["FAIL_WHEN_EXISTS"]).exists():
        raise ZeroDivisionError("this scorer is broken on purpose")
    return (len(completion.encode()) % 7) / 7
