"""The suites: folders of lm-eval task files, ours and the user's, and lm-eval's own tasks of the hub."""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from engine.errors import ConfigError, DataError
from evals.suites import standard

_HERE = Path(__file__).parent

_ABOUT = {
    "arithmetic": "sums and products at three difficulties, sampled: pass@1 and pass@4",
    "reasoning": "logic, graphs, algorithms, games and word problems of reasoning_gym, greedy",
    "safety-net": "did training break the language? perplexity of plain texts, simple multiple choice",
}
# Data that lm-eval reads from disk.
_LOCAL = ("json", "csv", "parquet", "text", "arrow")

# lm-eval 0.4.13 warns, whenever a data set is made by a function, of arguments that nobody gave.
logging.getLogger("lm_eval.api.task").addFilter(lambda record: "Custom kwargs can be passed" not in str(record.msg))


class Suite(msgspec.Struct, frozen=True):
    """`Suite("arithmetic", (Path("evals/suites/arithmetic"),))`. `tasks` are tasks, groups or tags of the files in
    `folders`; none: every task there."""

    name: str
    folders: tuple[Path, ...]
    tasks: tuple[str, ...] = ()

    @property
    def stem(self) -> str:
        """Of its result files. What is no safe name, or another file's, becomes one with a digest."""
        if re.fullmatch(r"[\w-]{1,100}", self.name, re.ASCII) and self.name != "held_out":
            return self.name
        digest = hashlib.sha256(self.name.encode()).hexdigest()[:8]
        return f"{re.sub(r'[^A-Za-z0-9_-]+', '_', self.name)[:50]}-{digest}"

    def load(self) -> dict[str, Any]:
        """Its lm-eval tasks by name, made anew.

        Raises:
            ConfigError: a task runs code that the model wrote, and that is not allowed.
            DataError: a file is unusable, or what it names cannot be imported or loaded.
            MissingError: the hub's data or a package that lm-eval's own task needs is not here.
        """
        standard.require(self.tasks)
        manager = _manager(self.folders)
        entries = {name: manager.task_index[name] for name in self.tasks or manager.all_subtasks}
        # Before any is made: making them may fetch data, and run code already.
        for name, entry in entries.items():
            _refuse_code(name, (entry.cfg or {}).get("unsafe_code", False))
        tasks: dict[str, Any] = {}
        for name, entry in entries.items():
            try:
                tasks |= manager.load([name])["tasks"]
            except Exception as error:
                raise DataError(f"{entry.yaml_path or self.folders[0]}: {type(error).__name__}: {error}",
                                remedy="mend the task file, or the module or data that it names") from error
        if not tasks:
            raise DataError(f"{self.folders[0]} holds no lm-eval task", remedy="see docs/suites.md")
        for name, task in tasks.items():
            _refuse_code(name, task.config.unsafe_code)
        return tasks


class Listed(msgspec.Struct, frozen=True):
    """A line of `python -m evals list`. `questions` is null where only the data can tell."""

    name: str
    about: str
    tasks: tuple[str, ...]
    questions: int | None
    offline: bool


def find(name: str, include_path: Path | None = None) -> Suite:
    """A task, group or tag of `include_path`, a suite that ships, a task of `standard`, or the folder `name`.

    Raises:
        ConfigError: there is none such.
        DataError: a task file in `include_path` is unusable.
    """
    if include_path is not None and name in _manager((include_path,)).task_index:
        return Suite(name, (include_path,), (name,))
    if name in _ABOUT:
        return Suite(name, (_HERE / name,))
    chosen = tuple(standard.TASKS) if name == "standard" else (name,)
    if chosen[0] in standard.TASKS:
        return Suite(name, standard.folders(chosen), chosen)
    if Path(name).is_dir():
        return Suite(Path(name).resolve().name, (Path(name),))
    known = ", ".join([*_ABOUT, "standard", *standard.TASKS])
    where = "" if include_path is None else f", or a task, group or tag in {include_path}"
    raise ConfigError("suite", value=name, limit="is no suite",
                      remedy=f"known: {known}; or the path to a folder of lm-eval task files{where}")


def named(names: Sequence[str]) -> list[Suite]:
    """Those of `evals.suites` but `held_out`, which is none.

    Raises:
        ConfigError: there is none such, or two would write the same files.
    """
    suites = [find(name) for name in names if name != "held_out"]
    stems = [suite.stem for suite in suites]
    if twice := [stem for stem in stems if stems.count(stem) > 1]:
        raise ConfigError("evals.suites", value=list(names), limit=f"two suites would both write {twice[0]}.json",
                          remedy="give one of the folders another name, or name it once")
    return suites


def listing(include_path: Path | None = None) -> list[Listed]:
    """What `find` knows. lm-eval is imported for `include_path` alone; no data is loaded.

    Raises:
        DataError: a task file in `include_path` is unusable.
    """
    shipped = [_shipped(name) for name in _ABOUT]
    hub = Listed("standard", "lm-eval's own tasks, also by name; humaneval_instruct runs code that the model wrote",
                 tuple(standard.TASKS), None, False)
    return [*shipped, hub, *(_users(include_path) if include_path is not None else [])]


def _shipped(name: str) -> Listed:
    from evals.suites.questions import PARTS

    tasks = tuple(file.stem for file in sorted((_HERE / name).glob("*.yaml")) if not file.stem.startswith("_"))
    made = sum(part.count for task in tasks for part in PARTS.get(task, ()))
    written = sum(len(file.read_bytes().splitlines()) for file in (_HERE / name).glob("*.jsonl"))
    return Listed(name, _ABOUT[name], tasks, made + written, True)


def _users(folder: Path) -> list[Listed]:
    index = _manager((folder,)).task_index
    found: list[Listed] = []
    for name, entry in index.items():
        config = entry.cfg or {}
        kind = entry.kind.name.lower().removeprefix("py_")
        members = sorted(entry.tags) if kind == "tag" else _members(config) if kind == "group" else [name]
        offline = all(_is_local(index[member].cfg or {}) for member in members if member in index)
        about = f"{kind} in {entry.yaml_path or folder}"
        found.append(Listed(name, about, tuple(members), None, offline))
    return found


def _members(group: dict[str, Any]) -> list[str]:
    return [member if isinstance(member, str) else member.get("task", member.get("group")) for member in group["task"]]


def _is_local(config: dict[str, Any]) -> bool:
    path = str(config.get("dataset_path"))
    return "custom_dataset" in config or path in _LOCAL or Path(path).is_dir()


def _manager(folders: tuple[Path, ...]) -> Any:
    """lm-eval's, of these folders alone. It would leave out what it cannot read, without a word."""
    from lm_eval.tasks import TaskManager
    from lm_eval.tasks._yaml_loader import load_yaml

    for folder in folders:
        if not folder.is_dir():
            raise ConfigError("--include-path", value=str(folder), limit="is no folder",
                              remedy="name a folder of lm-eval task files")
        for file in sorted(folder.rglob("*.yaml")):
            try:
                load_yaml(file, resolve_func=False)
            except Exception as error:
                raise DataError(f"{file} is no task file: {error}", remedy="mend or remove it") from error
    return TaskManager(include_path=list(folders), include_defaults=False)


def _refuse_code(task: str, unsafe: bool) -> None:
    if unsafe and os.environ.get("HF_ALLOW_CODE_EVAL") != "1":
        raise ConfigError("HF_ALLOW_CODE_EVAL", value=os.environ.get("HF_ALLOW_CODE_EVAL"),
                          limit=f"{task} runs code that the model wrote",
                          remedy="set HF_ALLOW_CODE_EVAL=1 where nothing can be harmed, or leave the task out")
