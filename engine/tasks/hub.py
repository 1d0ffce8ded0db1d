"""Questions from a dataset of the Hugging Face hub, or from a folder with one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from engine.config import TaskSection
from engine.errors import ConfigError, DataError, MissingError
from engine.reward.answer import Kind, extract
from engine.tasks.listed import Listed, question, takes_any_answer
from engine.tasks.question import Question
from engine.types import Message


class _Params(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`question` and `answer` name columns; `gold` says how the right answer is found in the answer's text."""

    path: str
    config: str | None = None
    split: str = "train"
    question: str = "question"
    answer: str = "answer"
    gold: Kind = "exact"
    score: Any = None
    judge: Any = None


class Hub(Listed):
    """The rows of `params.path`: a hub id, a folder that `save_to_disk` made, or one of parquet, JSON or CSV files.
    All are checked up front."""

    def __init__(self, section: TaskSection, path: str) -> None:
        try:
            params = msgspec.convert(section.params, _Params)
        except msgspec.ValidationError as error:
            raise ConfigError(
                f"{path}.params", value=section.params, limit=str(error),
                remedy=f"it takes {', '.join(_Params.__struct_fields__)}",
            ) from error
        rows = _load(params, path)
        for key, column in (("question", params.question), ("answer", params.answer)):
            if column not in rows.column_names:
                raise ConfigError(
                    f"{path}.params.{key}", value=column, limit="is no column of the dataset",
                    remedy=f"its columns: {', '.join(rows.column_names)}",
                )
        questions = [
            _question(row, f"{params.path}, row {number}", params, section)
            for number, row in enumerate(rows.select_columns([params.question, params.answer]))
        ]
        if not questions:
            raise DataError(f"{params.path}, split {params.split!r}: holds no row", remedy="name another split")
        super().__init__(questions, section.seed)


# Any: `datasets` is heavy, and imported only where it is used.
def _load(params: _Params, path: str) -> Any:
    import datasets
    from datasets.exceptions import DatasetGenerationError

    folder = Path(params.path).expanduser()
    try:
        if not any((folder / name).is_file() for name in ("state.json", "dataset_dict.json")):
            source = str(folder) if folder.is_dir() else params.path
            return datasets.load_dataset(source, params.config, split=params.split)
        saved = datasets.load_from_disk(folder)
        splits = saved if isinstance(saved, datasets.DatasetDict) else {str(saved.split or "train"): saved}
        if params.config is not None or params.split not in splits:
            raise ValueError(f"it has no config, and the splits {', '.join(map(str, splits))}")
        return splits[params.split]
    except ValueError as error:
        raise ConfigError(
            f"{path}.params.split", value=params.split, limit=f"(config {params.config!r}) {error}",
            remedy="set params.config and params.split to what the dataset has",
        ) from error
    except DatasetGenerationError as error:
        raise DataError(f"{path}.params.path = {params.path!r}: {error.__cause__}", remedy="mend that file") from error
    except OSError as error:
        raise MissingError(
            f"{path}.params.path = {params.path!r}: no folder, and not to be had from the hub: {error}",
            remedy="check the id and the network (HF_HUB_OFFLINE=1 forbids it), or name a folder",
        ) from error


def _question(row: Mapping[str, Any], place: str, params: _Params, section: TaskSection) -> Question:
    asked, gold = row[params.question], row[params.answer]
    try:
        messages = (Message("user", asked),) if isinstance(asked, str) else msgspec.convert(asked, tuple[Message, ...])
    except msgspec.ValidationError as error:
        raise DataError(
            f"{place}: column {params.question!r} is neither text nor chat messages ({error})",
            remedy="name another column with params.question",
        ) from error
    if params.gold != "exact" and not takes_any_answer(section):
        found = extract(str(gold), params.gold)
        if found is None:
            raise DataError(
                f"{place}: no {params.gold} answer in {gold!r}", remedy="say with params.gold how it is found"
            )
        gold = found
    return question(messages, gold, place, section)
