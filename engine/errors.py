"""One error type per boundary. Each knows its exit code and what the reader should do about it."""

from __future__ import annotations

import sys
import traceback


class FarfieldError(Exception):
    """An error whose last line tells the user what to do. `exit_code` is the process's exit code."""

    exit_code = 1

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message)
        self.remedy = remedy

    def __str__(self) -> str:
        message = super().__str__()
        return f"{message}\n  -> {self.remedy}" if self.remedy else message


class ConfigError(FarfieldError):
    """A key of the configuration or an argument is wrong. Names path, value, limit and remedy."""

    exit_code = 2

    def __init__(self, path: str, *, value: object, limit: str, remedy: str) -> None:
        super().__init__(f"{path} = {value!r}: {limit}", remedy=remedy)
        self.path = path


class DataError(FarfieldError):
    """A task file or dataset holds something that cannot be used; names the place."""

    exit_code = 2


class MissingError(FarfieldError):
    """The environment lacks something: a device, a model, a package, a port."""

    exit_code = 3


class GenerationError(FarfieldError):
    """The generator died or answered with something that breaks its contract."""


class TrainingError(FarfieldError):
    """The trainer cannot go on (for instance five non-finite steps in a row)."""


class StalledError(FarfieldError):
    """A stage made no progress within `run.stage_timeout_s`; names the stage."""


class ScoringError(FarfieldError):
    """A reward function raised, or a judge cannot be used. That is not a verdict on the rollout."""


def report(error: BaseException) -> int:
    """The first failure alone: the cancellations that followed it say nothing. One that is no bug says all in its
    message."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    known = isinstance(error, FarfieldError)
    if not known:
        traceback.print_exception(error)
    print(f"error: {error}" if known else f"error: {type(error).__name__}: {error}", file=sys.stderr)
    if not known or not error.remedy:
        print("  -> the traceback above names the place; the engine's log was named when it started", file=sys.stderr)
    return error.exit_code if known else 1
