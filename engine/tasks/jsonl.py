"""Questions from a file of JSON lines: {"messages": [{"role": "user", "content": "2 + 3?"}], "answer": "5"}."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from engine.config import TaskSection
from engine.errors import ConfigError, DataError
from engine.seeds import derive_seed
from engine.tasks.question import Question
from engine.types import Message


class _Line(msgspec.Struct, frozen=True):
    messages: tuple[Message, ...]
    answer: Any


class JsonLines:
    """The lines of `params.path`, reshuffled each epoch by the entry's seed. All are checked up front.

    Answers are {"answer": text}; unless a scorer compares it, {"answer": whatever the line holds}.
    """

    def __init__(self, section: TaskSection, path: str) -> None:
        for key, value in section.params.items():
            if key not in ("path", "score", "judge"):
                raise ConfigError(
                    f"{path}.params.{key}", value=value, limit="is no key of jsonl",
                    remedy="it takes path, score and judge",
                )  # fmt: skip
        self._seed = section.seed
        self._questions = _read(Path(section.params["path"]).expanduser(), section)
        self._epoch = -1
        self._order: list[int] = []

    def train(self, index: int) -> Question:
        epoch, place = divmod(index, len(self._questions))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._shuffled("epoch", epoch)
        return self._questions[self._order[place]]

    def candidates(self) -> Iterator[Question]:
        return (self._questions[place] for place in self._shuffled("held_out", 0))

    def _shuffled(self, use: str, round_: int) -> list[int]:
        order = list(range(len(self._questions)))
        random.Random(derive_seed(use, self._seed, round_)).shuffle(order)
        return order


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
    roles = [message.role for message in line.messages]
    if not roles or roles[-1] != "user":
        raise DataError(f"{place}: the last message is not the user's", remedy="end messages with the question")
    if "system" in roles[1:]:
        raise DataError(f"{place}: a system message is not the first", remedy="put it first")
    if section.system_prompt and roles[0] == "system":
        raise DataError(f"{place}: has a system message beside the entry's system_prompt", remedy="keep one of them")
    return Question(line.messages, {"answer": _gold(line.answer, place, section)})


def _gold(answer: Any, place: str, section: TaskSection) -> Any:
    if not section.scores.keys() & {"exact", "math", "letters"}:
        return answer
    if isinstance(answer, bool) or not isinstance(answer, str | int | float) or not str(answer).strip():
        raise DataError(f"{place}: answer {answer!r} is neither text nor a number", remedy="write the right answer")
    return str(answer)
