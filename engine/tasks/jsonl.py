"""Questions from a file of JSON lines: {"messages": [{"role": "user", "content": "2 + 3?"}], "answer": "5"}."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from engine.config import TaskSection
from engine.errors import ConfigError
from engine.tasks.listed import Listed, question, read_lines
from engine.types import Message

_SHAPE = '{"messages": [{"role": ..., "content": ...}], "answer": ...}'


class _Line(msgspec.Struct, frozen=True):
    messages: tuple[Message, ...]
    answer: Any = None


class JsonLines(Listed):
    """The lines of `params.path`. All are checked up front."""

    def __init__(self, section: TaskSection, path: str) -> None:
        for key, value in section.params.items():
            if key not in ("path", "score", "judge"):
                raise ConfigError(
                    f"{path}.params.{key}", value=value, limit="is no key of jsonl",
                    remedy="it takes path, score and judge",
                )  # fmt: skip
        lines = read_lines(Path(section.params["path"]).expanduser(), _Line, _SHAPE)
        super().__init__([question(line.messages, line.answer, place, section) for place, line in lines], section.seed)
