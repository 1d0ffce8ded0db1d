"""Sums of two small numbers, "12+34=": what the petri dish grows on. Also an example of an environment of one's own."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

from engine.config import TaskSection
from engine.errors import ConfigError
from engine.seeds import derive_seed
from engine.tasks.question import Question
from engine.types import Message


class Sums:
    """Numbers from 0 to `params.largest`, 40 unless it says otherwise."""

    def __init__(self, section: TaskSection) -> None:
        for key, value in section.params.items():
            if key not in ("largest", "score", "judge"):
                raise ConfigError(f"params.{key} of task {section.label}", value=value, limit="is no key of Sums",
                                  remedy="it takes largest, score and judge")
        self._seed = section.seed
        self._largest: int = section.params.get("largest", 40)
        if type(self._largest) is not int or self._largest < 0:
            raise ConfigError(f"params.largest of task {section.label}", value=self._largest,
                              limit="is no whole number of 0 or more", remedy="such as largest = 40")

    def train(self, index: int) -> Question:
        return self._sum("train", index)

    def candidates(self) -> Iterator[Question]:
        return (self._sum("held_out", index) for index in itertools.count())

    def _sum(self, use: str, index: int) -> Question:
        draws = random.Random(derive_seed(use, self._seed, index))
        left, right = draws.randint(0, self._largest), draws.randint(0, self._largest)
        return Question((Message("user", f"{left}+{right}="),), {"answer": str(left + right)})
