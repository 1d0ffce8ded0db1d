"""Questions from the reasoning_gym package: about a hundred families, each an endless generator."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import json
import os
from collections.abc import Iterator
from typing import Any

from engine.config import TaskSection
from engine.errors import ConfigError, DataError
from engine.gym import import_reasoning_gym
from engine.seeds import derive_seed
from engine.tasks.question import Question
from engine.types import Message

# Some families draw a dataset's whole plan when it is built, and one refuses large sizes: the endless list is cut
# into datasets of the package's own default size.
_CHUNK = 500

# Families whose own scorer is not asked: it accepts what is wrong (coin_flip: any prefix of the answer;
# game_of_life_halting: any text), or evaluates the model's text as Python next to the answer (the second row), or
# accepts no more than a comparison of numbers or text does (the third).
_COMPARED_PLAINLY = frozenset(
    {
        "coin_flip", "game_of_life_halting",
        "binary_matrix", "spiral_matrix", "string_insertion",
        "arc_agi", "chain_sum", "decimal_chain_sum", "gsm_symbolic", "products", "rearc",
    }
)  # fmt: skip

# Families whose questions depend on Python's string hashing, which differs from process to process.
_HASH_DEPENDENT = frozenset(
    {"isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder"}
)


class ReasoningGym:
    """One family, `params.family` or the entry's name; the other params configure it.

    Item i of a dataset is seeded with its seed + i, so seeds s and s + 1 are one list shifted by one: training,
    candidates and reserved lists start at hashed places, 2^29 or more apart, and all below the 2^32 that numpy's
    generators take.

    Answers are {"answer": text or None}, and where the family's own scorer has a say also "family", "params" and
    "entry": all that it needs.
    """

    def __init__(self, section: TaskSection, path: str) -> None:
        params = {key: value for key, value in section.params.items() if key not in ("family", "score", "judge")}
        self._family = section.params.get("family", section.name)
        self._params = params
        self._package = import_reasoning_gym()
        self._train_seed = derive_seed("train", section.seed) % 2**30
        self._held_out_seed = 2**31 + derive_seed("held_out", section.seed) % 2**30
        _check(self._package.factory.DATASETS, self._family, params, path)
        self._chunk_seed, self._chunk = -1, None
        dataset = self._first_dataset(path)
        own_scorer = type(dataset).score_answer is not self._package.dataset.ProceduralDataset.score_answer
        self._judged = own_scorer and self._family not in _COMPARED_PLAINLY

    def train(self, index: int) -> Question:
        return self._question(self._train_seed, index)

    def candidates(self) -> Iterator[Question]:
        return (self._question(self._held_out_seed, index) for index in itertools.count())

    def reserved(self, name: str) -> Iterator[Question]:
        """The list `name` for evaluation suites: neither training nor candidates come near its seeds."""
        seed = 2**32 - 2**29 + derive_seed("reserved", name) % 2**28
        return (self._question(seed, index) for index in itertools.count())

    def _question(self, seed: int, index: int) -> Question:
        chunk, offset = divmod(index, _CHUNK)
        entry = self._dataset(seed + chunk * _CHUNK)[offset]
        answer: dict[str, Any] = {"answer": entry["answer"]}
        if self._judged:
            answer |= {"family": self._family, "params": self._params, "entry": self._plain(entry)}
        return Question((Message("user", entry["question"]),), answer)

    def _dataset(self, seed: int) -> Any:
        if seed != self._chunk_seed:
            self._chunk = self._package.create_dataset(self._family, seed=seed, size=_CHUNK, **self._params)
            self._chunk_seed = seed
        return self._chunk

    def _first_dataset(self, path: str) -> Any:
        """Built, and its first item made, so that params of the wrong kind are refused now."""
        try:
            self._dataset(self._train_seed)[0]
        except (AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{path}.params",
                value=self._params,
                limit=f"is refused by reasoning_gym's {self._family}: {error or 'out of range'}",
                remedy="see the family's config class for ranges",
            ) from error
        return self._chunk

    def _plain(self, entry: dict[str, Any]) -> dict[str, Any]:
        try:
            return json.loads(json.dumps(entry))
        except TypeError as error:
            raise DataError(f"reasoning_gym's {self._family} made an item that is no plain data: {error}") from error


def _check(families: dict[str, Any], family: Any, params: dict[str, Any], path: str) -> None:
    if family not in families:
        near = difflib.get_close_matches(str(family), families)
        remedy = f"did you mean {' or '.join(near)}?" if near else f"families: {', '.join(sorted(families))}"
        raise ConfigError(f"{path}.params.family", value=family, limit="is no reasoning_gym family", remedy=remedy)
    known = {field.name for field in dataclasses.fields(families[family][1])} - {"seed", "size"}
    for key, value in params.items():
        if key in ("seed", "size"):
            remedy = f"set {path}.seed" if key == "seed" else "remove it: the list of questions is endless"
            raise ConfigError(f"{path}.params.{key}", value=value, limit="is not set here", remedy=remedy)
        if key not in known:
            near = difflib.get_close_matches(key, known)
            remedy = f"did you mean {' or '.join(near)}?" if near else f"it takes {', '.join(sorted(known))}"
            raise ConfigError(f"{path}.params.{key}", value=value, limit=f"{family} has no such key", remedy=remedy)
    if family in _HASH_DEPENDENT and not os.environ.get("PYTHONHASHSEED", "random").isdigit():
        raise ConfigError(
            f"{path}.params.family",
            value=family,
            limit="makes other questions in every process unless Python's string hashing is fixed",
            remedy="set PYTHONHASHSEED=0 in the environment",
        )
