"""What an evaluation leaves behind: one JSON file per suite, with everything that a comparison needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from engine.errors import DataError
from engine.observe.estimate import Estimate
from engine.types import Version

# What a question's value is where the metric's name says something else: of a log-likelihood nats, less being better.
UNITS = {"word_perplexity": "nats/word", "byte_perplexity": "nats/byte", "bits_per_byte": "nats/byte",
         "perplexity": "nats"}  # fmt: skip


class Question(msgspec.Struct, frozen=True):
    """One question: all samples, and the value of every metric that is a number for one question. `prompt` and `data`
    are digests of what the model was asked and of the question's record in the dataset."""

    number: int
    prompt: str
    data: str
    values: dict[str, float]
    answers: list[str]
    truncated: int = 0


class TaskResult(msgspec.Struct, frozen=True, kw_only=True):
    """One task of a suite. `metrics` are lm-eval's aggregates, `estimates` means over questions with 95 % intervals,
    `truncated` the share of answers cut at their limit, null where nothing is generated. `settings` is what a result
    depends on beside model and questions: the task's version, generation settings, samples, few-shot examples, chat."""

    metrics: dict[str, float | None]
    higher_is_better: dict[str, bool]
    estimates: dict[str, Estimate]
    truncated: float | None
    settings: dict[str, Any]
    questions: list[Question]


class SuiteResult(msgspec.Struct, frozen=True, kw_only=True):
    """`evals/step-000010/SUITE.json`. `version` is what the engine served; `settings` what holds for every task:
    backend, dtype, chat template, lm-eval's version. `step` is null outside a run."""

    suite: str
    model: str
    step: int | None
    version: Version
    settings: dict[str, str]
    seconds: float
    tasks: dict[str, TaskResult]

    def write(self, path: Path) -> None:
        """Whole or absent.

        Raises:
            OSError: it cannot be written.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f".{path.name}")
        aside.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1))
        aside.replace(path)

    @classmethod
    def read(cls, path: Path) -> SuiteResult:
        """Raises:
            DataError: it is no such file.
        """
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except (OSError, msgspec.DecodeError) as error:
            raise DataError(f"{path} is no evaluation's result: {error}",
                            remedy="name a SUITE.json that `python -m evals run` or a training run wrote") from error
