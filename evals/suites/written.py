"""The safety net's questions and passages, written for it: plain English that no training set here contains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

_HERE = Path(__file__).parent / "safety-net"


def choices(**_: object) -> dict[str, Any]:
    """lm-eval's `custom_dataset`: question, four choices, and the place of the right one."""
    return _dataset("choices.jsonl")


def passages(**_: object) -> dict[str, Any]:
    """lm-eval's `custom_dataset`: kind and text."""
    return _dataset("passages.jsonl")


def _dataset(name: str) -> dict[str, Any]:
    from datasets import Dataset

    return {"test": Dataset.from_list(msgspec.json.Decoder().decode_lines((_HERE / name).read_bytes()))}
