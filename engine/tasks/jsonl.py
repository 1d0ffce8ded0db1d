"""Questions from a file of JSON lines: {"messages": [{"role": "user", "content": "2 + 3?"}], "answer": "5"}."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from engine.config import TaskSection
from engine.errors import ConfigError, DataError
from engine.tasks.listed import Listed, question
from engine.tasks.question import Question
from engine.types import Message


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
        super().__init__(_read(Path(section.params["path"]).expanduser(), section), section.seed)


def _read(file: Path, section: TaskSection) -> list[Question]:
    questions = [
        _question(line, f"{file}:{number}", section)
        for number, line in enumerate(file.read_bytes().split(b"\n"), start=1)
        if line.strip()
    ]
    if not questions:
        raise DataError(f"{file}: holds no question", remedy="write one {messages, answer} object per line")
    return questions


def _question(raw: bytes, place: str, section: TaskSection) -> Question:
    try:
        line = msgspec.json.decode(raw.decode("utf-8-sig"), type=_Line)
    except UnicodeDecodeError as error:
        raise DataError(f"{place}: is not UTF-8 ({error.reason})", remedy="save the file as UTF-8") from error
    except msgspec.DecodeError as error:
        raise DataError(
            f"{place}: {error}", remedy='write {"messages": [{"role": ..., "content": ...}], "answer": ...} on one line'
        ) from error
    return question(line.messages, line.answer, place, section)
