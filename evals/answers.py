"""What the engine has answered so far: an evaluation that was interrupted goes on where it stood.

Every answer is kept under a key that names the weights, the settings and the whole request, so none is ever taken for
another's.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from engine.errors import DataError
from engine.types import Int32, SegmentRequest


class Answer(msgspec.Struct, frozen=True):
    """One request's: `text` as far as it counts, or log-prob and greediness of a continuation."""

    key: str
    text: str = ""
    truncated: bool = False
    logprob: float = 0.0
    greedy: bool = False


class AnswerFile:
    """`SUITE.partial.jsonl`, appended to and synced as answers come. `context` is part of every key: the digest of the
    weights and what else an answer depends on.

    Raises:
        DataError: the file is damaged before its last line.
    """

    def __init__(self, path: Path, context: str) -> None:
        self._context = context
        path.parent.mkdir(parents=True, exist_ok=True)
        self._answers = {answer.key: answer for answer in _whole_lines(path)}
        self._file = path.open("ab")

    def generation(self, request: SegmentRequest, stops: Sequence[str]) -> str:
        """The key of a completion that is cut at `stops`."""
        return self._key("generate", request.token_ids, request.max_new_tokens, request.temperature, request.seed,
                         list(stops))

    def continuation(self, context: Int32, continuation: Int32) -> str:
        """The key of a given continuation's log-prob."""
        return self._key("score", context, continuation.tobytes().hex())

    def get(self, key: str) -> Answer | None:
        """What was answered, in this process or an earlier one."""
        return self._answers.get(key)

    def add(self, answers: Sequence[Answer]) -> None:
        """Raises:
            OSError: they cannot be written.
        """
        self._answers |= {answer.key: answer for answer in answers}
        self._file.write(b"".join(msgspec.json.encode(answer) + b"\n" for answer in answers))
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Nothing is buffered: every `add` was written."""
        self._file.close()

    def _key(self, kind: str, token_ids: Int32, *rest: object) -> str:
        whole = msgspec.json.encode([self._context, kind, token_ids.tobytes().hex(), *rest])
        return hashlib.sha256(whole).hexdigest()[:32]


def _whole_lines(path: Path) -> list[Answer]:
    """A line that a crash cut short is cut off: what follows must begin on a line of its own."""
    if not path.exists():
        return []
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        os.truncate(path, len(whole))
    try:
        return [msgspec.json.decode(line, type=Answer) for line in whole.splitlines()]
    except msgspec.DecodeError as error:
        raise DataError(f"{path} is damaged: {error}", remedy="remove it: the evaluation begins anew") from error
