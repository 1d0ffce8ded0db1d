"""What an environment offers: questions, without end and always in the same order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import msgspec

from engine.types import Message


class Question(msgspec.Struct, frozen=True):
    """One item of an environment: `Question((Message("user", "2 + 3?"),), {"answer": "5"})`."""

    messages: tuple[Message, ...]
    answer: dict[str, Any]

    @property
    def text(self) -> str:
        """What makes it the same question as another: all that is said, whatever the system prompt and the spacing."""
        return " ".join(" ".join(m.content for m in self.messages if m.role != "system").split())


class Environment(Protocol):
    """Where the questions of one [[tasks]] entry come from."""

    def train(self, index: int) -> Question:
        """Question `index` of an endless list, the same for ever. Held-out ones are still in it."""
        ...

    def candidates(self) -> Iterator[Question]:
        """Questions to hold out, in a fixed order that has nothing to do with the training list's. May repeat some,
        may be endless."""
        ...
