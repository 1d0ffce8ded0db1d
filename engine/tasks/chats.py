"""Whole conversations to learn from, from a file of JSON lines: {"messages": [..., {"role": "assistant", ...}]}."""

from __future__ import annotations

from pathlib import Path

import msgspec

from engine.config import TaskSection
from engine.errors import ConfigError
from engine.tasks.listed import Listed, read_lines, require_roles
from engine.tasks.question import Question
from engine.types import Message

_SHAPE = '{"messages": [{"role": ..., "content": ...}, ...]}'


class _Line(msgspec.Struct, frozen=True):
    messages: tuple[Message, ...]


class Chats(Listed):
    """The lines of `params.path`, for `algorithm.preset = "ce"`. All are checked up front."""

    def __init__(self, section: TaskSection, path: str) -> None:
        for key, value in section.params.items():
            if key != "path":
                raise ConfigError(f"{path}.params.{key}", value=value, limit="is no key of chats",
                                  remedy="it takes path alone")
        lines = read_lines(Path(section.params["path"]).expanduser(), _Line, _SHAPE)
        for place, line in lines:
            require_roles(line.messages, place, section, last="assistant")
        super().__init__([Question(line.messages, {}) for _, line in lines], section.seed)
