"""A finite list of questions as an environment, and what every question of such a list must satisfy."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from engine.config import TaskSection
from engine.errors import DataError
from engine.seeds import derive_seed
from engine.tasks.question import Question
from engine.types import Message

Line = TypeVar("Line", bound=msgspec.Struct)


class Listed:
    """`questions`, reshuffled each epoch by the entry's seed."""

    def __init__(self, questions: Sequence[Question], seed: int) -> None:
        self._seed = seed
        self._questions = questions
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


def read_lines(file: Path, kind: type[Line], shape: str) -> list[tuple[str, Line]]:
    """The place and the content of every line that is not blank; `shape` shows how one is written.

    Raises:
        DataError: there is none, or one is no UTF-8 or no JSON of that kind.
    """
    lines = enumerate(file.read_bytes().split(b"\n"), start=1)
    found = [(f"{file}:{number}", raw) for number, raw in lines if raw.strip()]
    if not found:
        raise DataError(f"{file}: holds no line", remedy=f"write one {shape} a line")
    return [(place, _decoded(raw, kind, place, shape)) for place, raw in found]


def _decoded(raw: bytes, kind: type[Line], place: str, shape: str) -> Line:
    try:
        return msgspec.json.decode(raw.decode("utf-8-sig"), type=kind)
    except UnicodeDecodeError as error:
        raise DataError(f"{place}: is not UTF-8 ({error.reason})", remedy="save the file as UTF-8") from error
    except msgspec.DecodeError as error:
        raise DataError(f"{place}: {error}", remedy=f"write {shape} on one line") from error


def require_roles(messages: tuple[Message, ...], place: str, section: TaskSection, *,
                  last: Literal["user", "assistant"]) -> None:
    """The order of roles that every question or chat of a file has.

    Raises:
        DataError: the messages do not end with `last`'s, or a system message is misplaced.
    """
    roles = [message.role for message in messages]
    if not roles or roles[-1] != last:
        raise DataError(f"{place}: the last message is not the {last}'s", remedy=f"end messages with the {last}'s")
    if "system" in roles[1:]:
        raise DataError(f"{place}: a system message is not the first", remedy="put it first")
    if section.system_prompt and roles[0] == "system":
        raise DataError(f"{place}: has a system message beside the entry's system_prompt", remedy="keep one of them")


def question(messages: tuple[Message, ...], gold: Any, place: str, section: TaskSection) -> Question:
    """The question at `place` of a file. Answers are {"answer": text}; where no scorer compares it,
    {"answer": whatever the file holds}.

    Raises:
        DataError: the messages do not end with the user's, a system message is misplaced, or there is no right answer.
    """
    require_roles(messages, place, section, last="user")
    return Question(messages, {"answer": gold if takes_any_answer(section) else _text(gold, place)})


def takes_any_answer(section: TaskSection) -> bool:
    """Whether no scorer compares text with the answer: all are the user's own, or a judge."""
    return not section.scores.keys() & {"exact", "math", "letters"}


def _text(gold: Any, place: str) -> str:
    if isinstance(gold, bool) or not isinstance(gold, str | int | float) or not str(gold).strip():
        raise DataError(f"{place}: answer {gold!r} is neither text nor a number", remedy="write the right answer")
    return str(gold)
