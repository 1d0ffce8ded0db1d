"""Rewards that misbehave, named in configs as `scorers:function`."""

from __future__ import annotations


def fails(completion: str, answer: dict[str, object]) -> float:
    raise ZeroDivisionError("this scorer is broken on purpose")
