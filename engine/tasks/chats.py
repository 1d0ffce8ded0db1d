"""Whole conversations to learn from, from a file of JSON lines: {"messages": [..., {"role": "assistant", ...}]}."""

from __future__ import annotations

from pathlib import Path

import msgspec

from engine.config import TaskSection
from engine.errors import ConfigError, DataError
from engine.tasks.listed import Listed
from engine.tasks.question import Question
from engine.types import Message


class _Line(msgspec.Struct, frozen=True):
    messages: tuple[Message, ...]


class Chats(Listed):
    """The lines of `params.path`, for `algorithm.preset = "ce"`. All are checked up front."""

    def __init__(self, section: TaskSection, path: str) -> None:
        if section.params.keys() != {"path"}:
            raise ConfigError(f"{path}.params", value=section.params, limit="chats takes path, and nothing else",
                              remedy="remove the other keys")
        super().__init__(_read(Path(section.params["path"]).expanduser(), section), section.seed)


def _read(file: Path, section: TaskSection) -> list[Question]:
    lines = enumerate(file.read_bytes().split(b"\n"), start=1)
    chats = [_chat(line, f"{file}:{number}", section) for number, line in lines if line.strip()]
    if not chats:
        raise DataError(f"{file}: holds no chat", remedy="write one {messages} object per line")
    return chats


def _chat(raw: bytes, place: str, section: TaskSection) -> Question:
    try:
        messages = msgspec.json.decode(raw, type=_Line).messages
    except msgspec.DecodeError as error:
        raise DataError(
            f"{place}: {error}", remedy='write {"messages": [{"role": ..., "content": ...}, ...]} on one line'
        ) from error
    roles = [message.role for message in messages]
    if not roles or roles[-1] != "assistant":
        raise DataError(f"{place}: the last message is not the assistant's", remedy="end messages with its answer")
    if section.system_prompt and roles[0] == "system":
        raise DataError(f"{place}: has a system message beside the entry's system_prompt", remedy="keep one of them")
    return Question(messages, {})
