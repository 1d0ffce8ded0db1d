"""Datasets that the test writes to disk in every form; the hub itself is never asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from engine.config import TaskSection
from engine.errors import ConfigError, DataError, FarfieldError, MissingError
from engine.tasks.hub import Hub
from engine.tasks.jsonl import JsonLines
from engine.tasks.source import TaskSource
from engine.types import Message

ROWS = [{"question": f"{i} + 1?", "answer": f"One more than {i}.\n#### {i + 1}", "level": i} for i in range(12)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Converted files stay in the test's folder; the hub is switched off as HF_HUB_OFFLINE=1 does it."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def hub(folder: Path | str, **settings: Any) -> Hub:
    params = {"path": str(folder), "gold": "last_number"} | settings.pop("params", {})
    return Hub(TaskSection(env="hub", params=params, **settings), "tasks.0")


def write(folder: Path, form: str, rows: list[dict[str, Any]] = ROWS) -> Path:
    dataset, path = datasets.Dataset.from_list(rows), folder / "data"
    path.mkdir()
    match form:
        case "saved":
            dataset.save_to_disk(path)
        case "saved splits":
            datasets.DatasetDict({"train": dataset, "test": dataset.select([3])}).save_to_disk(path)
        case "parquet":
            dataset.to_parquet(path / "train-00000.parquet")
            dataset.select([3]).to_parquet(path / "test-00000.parquet")
        case "json":
            (path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        case "csv":
            dataset.to_csv(path / "rows.csv")
        case _:
            raise AssertionError(form)
    return path


@pytest.mark.parametrize("form", ["saved", "saved splits", "parquet", "json", "csv"])
def test_every_form_gives_the_same_questions(tmp_path: Path, form: str) -> None:
    environment = hub(write(tmp_path, form))
    found = {(q.messages, q.answer["answer"]) for q in environment.candidates()}
    assert found == {((Message("user", f"{i} + 1?"),), str(i + 1)) for i in range(12)}


@pytest.mark.parametrize("form", ["saved splits", "parquet"])
def test_a_split_is_chosen(tmp_path: Path, form: str) -> None:
    (only,) = hub(write(tmp_path, form), params={"split": "test"}).candidates()
    assert (only.text, only.answer) == ("3 + 1?", {"answer": "4"})


def test_the_order_is_that_of_a_jsonl_file_with_the_same_rows(tmp_path: Path) -> None:
    lines = [{"messages": [{"role": "user", "content": row["question"]}], "answer": "0"} for row in ROWS]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    listed = JsonLines(TaskSection(env="jsonl", params={"path": str(file)}, seed=3), "tasks.0")
    environment = hub(write(tmp_path, "parquet"), seed=3)
    assert [environment.train(i).text for i in range(30)] == [listed.train(i).text for i in range(30)]
    assert [q.text for q in environment.candidates()] == [q.text for q in listed.candidates()]


@pytest.mark.parametrize(
    ("gold", "text", "found"),
    [
        ("last_number", "He ate 3 of 75.\n#### 1,072", "1072"),
        ("boxed", r"So $x = \boxed{\frac{1}{2}}$.", r"\frac{1}{2}"),
        ("tag", "Well. <answer> blue </answer>", "blue"),
        ("exact", "twelve apples", "twelve apples"),
        ("exact", 7, "7"),
    ],
)
def test_the_gold_answer_is_found_as_params_say(tmp_path: Path, gold: str, text: object, found: str) -> None:
    path = write(tmp_path, "saved", [{"q": "?", "a": text}])
    names = {"question": "q", "answer": "a", "gold": gold}
    assert hub(path, params=names).train(0).answer == {"answer": found}


def test_a_question_may_be_chat_messages(tmp_path: Path) -> None:
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]
    path = write(tmp_path, "saved", [{"turns": turns, "answer": "2"}])
    question = hub(path, params={"question": "turns"}).train(0)
    assert question.messages == (Message("system", "Be brief."), Message("user", "1 + 1?"))


def test_a_scorer_of_the_users_own_gets_the_column_as_it_is(tmp_path: Path) -> None:
    path = write(tmp_path, "saved", [{"question": "?", "answer": ["f(1) == 2", "f(2) == 3"]}])
    question = hub(path, params={"score": "my_rewards:passes", "gold": "exact"}).train(0)
    assert question.answer == {"answer": ["f(1) == 2", "f(2) == 3"]}


@pytest.mark.parametrize(
    ("params", "kind", "message"),
    [
        ({"gold": "hash"}, ConfigError, r"tasks\.0\.params = .*Invalid enum value 'hash'.*\n  -> it takes path, co"),
        ({"columns": 3}, ConfigError, r"unknown field `columns`"),
        ({"answer": "gold"}, ConfigError, r"params\.answer = 'gold': is no column.*\n  -> .*question, answer, level"),
        ({"question": "level"}, DataError, r"data, row 0: column 'level' is neither text nor chat messages"),
        ({"gold": "boxed"}, DataError, r"data, row 0: no boxed answer in 'One more .*\n  -> say with params\.gold"),
        ({"split": "nope"}, ConfigError, r"params\.split = 'nope': .*\['train', 'test'\]"),
        ({"config": "main"}, ConfigError, r"params\.split = 'train': \(config 'main'\) .*\['default'\]"),
    ],
)
def test_what_the_dataset_does_not_have_is_named(
    tmp_path: Path, params: dict[str, Any], kind: type[FarfieldError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        hub(write(tmp_path, "parquet"), params=params)


@pytest.mark.parametrize("params", [{"split": "test"}, {"config": "main"}])
def test_a_saved_dataset_without_splits_has_only_its_own(tmp_path: Path, params: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"it has no config, and the splits train\n  -> set params\.config and"):
        hub(write(tmp_path, "saved"), params=params)


@pytest.mark.parametrize("path", ["org/no-such-dataset", "no-such-dataset", "./no/folder"])
def test_a_dataset_that_is_not_to_be_had_says_what_to_do(path: str) -> None:
    with pytest.raises(MissingError, match=r"tasks\.0\.params\.path = .*\n  -> .*HF_HUB_OFFLINE=1.*a folder"):
        hub(path)


def test_an_empty_folder_is_missing_data(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match="doesn't contain any data files"):
        hub(tmp_path)


def test_a_dataset_without_rows_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("question,answer\n")
    with pytest.raises(ConfigError, match=r"params\.split = 'train': .* corresponds to no data"):
        hub(tmp_path)


def test_a_broken_file_is_the_datas_fault(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"question": "?", ')
    with pytest.raises(DataError, match=r"params\.path = "):
        hub(tmp_path)


def test_the_environment_is_known_by_its_name(tmp_path: Path) -> None:
    params = {"path": str(write(tmp_path, "saved")), "gold": "last_number"}
    source = TaskSource([TaskSection(env="hub", name="more", params=params, held_out=4)], 0)
    held = {task.answer["answer"] for task in source.held_out()}
    trained = {source.next().answer["answer"] for _ in range(16)}
    assert len(held) == 4
    assert held | trained == {str(i + 1) for i in range(12)}
    assert not held & trained
