from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from engine.config import TaskSection
from engine.errors import ConfigError, DataError
from engine.tasks.source import TaskSource
from engine.types import Message, Task

OWN = """
import itertools
from engine.tasks.question import Question
from engine.types import Message

class Sums:
    def __init__(self, section):
        self.first = section.params["first"]

    def train(self, index):
        return self.made(self.first, index)

    def candidates(self):
        return (self.made(0, index) for index in itertools.count())

    def made(self, a, b):
        return Question((Message("user", f"{a} + {b}?"),), {"answer": str(a + b)})
"""


def sums(tmp_path: Path, name: str, count: int) -> str:
    """A file of `count` distinct questions that are `name`'s alone."""
    file = tmp_path / f"{name}.jsonl"
    lines = [{"messages": [{"role": "user", "content": f"{name} {i} + 1?"}], "answer": i + 1} for i in range(count)]
    file.write_text("\n".join(json.dumps(line) for line in lines))
    return str(file)


def entry(tmp_path: Path, name: str, count: int = 10, **settings: object) -> TaskSection:
    return TaskSection(env="jsonl", name=name, params={"path": sums(tmp_path, name, count)}, **settings)  # type: ignore[arg-type]


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a module of the user's own, which can be imported."""
    (tmp_path / "own_environments.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_environments", raising=False)
    return tmp_path


def questions(tasks: list[Task]) -> set[str]:
    return {task.messages[-1].content for task in tasks}


def take(source: TaskSource, count: int) -> list[Task]:
    return [source.next() for _ in range(count)]


def test_shares_follow_the_weights_at_all_times(tmp_path: Path) -> None:
    sections = [entry(tmp_path, "a", weight=5), entry(tmp_path, "b", weight=1), entry(tmp_path, "c", weight=1)]
    labels = [task.env for task in take(TaskSource(sections, 0), 700)]

    # The sequence of smooth weighted round robin for 5:1:1, as nginx documents it.
    assert labels[:7] == ["a", "a", "b", "a", "c", "a", "a"]
    assert Counter(labels) == {"a": 500, "b": 100, "c": 100}
    for taken in range(1, 700):
        assert abs(labels[:taken].count("a") - taken * 5 / 7) < 1


def test_fractional_weights_do_not_drift(tmp_path: Path) -> None:
    sections = [entry(tmp_path, "a", weight=0.1), entry(tmp_path, "b", weight=0.2), entry(tmp_path, "c", weight=0.7)]
    counts = Counter(task.env for task in take(TaskSource(sections, 0), 10_000))
    assert counts == {"a": 1000, "b": 2000, "c": 7000}


def test_a_restored_source_goes_on_with_the_same_tasks(tmp_path: Path) -> None:
    sections = [entry(tmp_path, "a", weight=2, held_out=3), entry(tmp_path, "b", weight=1)]
    source = TaskSource(sections, 7)
    take(source, 25)
    cursor = json.loads(json.dumps(source.cursor()))
    following = take(source, 40)

    resumed = TaskSource(sections, 7)
    resumed.restore(cursor)
    assert take(resumed, 40) == following


def test_a_cursor_is_not_moved_by_what_comes_after(tmp_path: Path) -> None:
    source = TaskSource([entry(tmp_path, "a")], 0)
    cursor = source.cursor()
    first = source.next()
    source.restore(cursor)
    assert source.next() == first


def test_a_cursor_of_other_tasks_is_refused(tmp_path: Path) -> None:
    cursor = TaskSource([entry(tmp_path, "a")], 0).cursor()
    with pytest.raises(DataError, match="the checkpoint's tasks are a; the configuration's are b"):
        TaskSource([entry(tmp_path, "b")], 0).restore(cursor)


def test_the_same_task_for_ever(tmp_path: Path) -> None:
    task = TaskSource([entry(tmp_path, "a", seed=3)], 5).next()

    # Written down once: a change here is a change of every run's data. The seed is 62 bits
    # of the sha256 of the parts as msgpack, b'\x93\x05\xa1a\x00'.
    assert (task.task_id, task.env, task.index) == ("a/0", "a", 0)
    assert task.seed == 4026270134299464870
    assert task.messages == (Message("user", "a 6 + 1?"),)
    assert task.answer == {"answer": "7"}


def test_seeds_differ_by_run_entry_index_and_use(tmp_path: Path) -> None:
    sections = [entry(tmp_path, "a", held_out=2), entry(tmp_path, "b")]
    seeds = [
        task.seed
        for run_seed in (0, 1)
        for source in [TaskSource(sections, run_seed)]
        for task in [*take(source, 20), *source.held_out()]
    ]
    assert len(set(seeds)) == 44
    assert all(0 <= seed < 2**62 for seed in seeds)


def test_held_out_questions_are_never_trained_on(tmp_path: Path) -> None:
    source = TaskSource([entry(tmp_path, "a", count=10, held_out=4)], 0)
    held = source.held_out()
    trained = take(source, 60)

    assert [task.task_id for task in held] == ["a/held_out/0", "a/held_out/1", "a/held_out/2", "a/held_out/3"]
    assert len(questions(held)) == 4
    # Ten epochs of the other six, each once an epoch.
    assert questions(trained) == {f"a {i} + 1?" for i in range(10)} - questions(held)
    assert set(Counter(task.messages[-1].content for task in trained).values()) == {10}
    assert len({task.index for task in trained}) == 60


def test_held_out_questions_do_not_depend_on_the_run(tmp_path: Path) -> None:
    sections = [entry(tmp_path, "a", held_out=4, seed=1)]
    assert questions(TaskSource(sections, 0).held_out()) == questions(TaskSource(sections, 99).held_out())
    others = TaskSource([entry(tmp_path, "a", held_out=4, seed=2)], 0).held_out()
    assert questions(TaskSource(sections, 0).held_out()) != questions(others)


def test_the_limit_counts_per_entry(tmp_path: Path) -> None:
    source = TaskSource([entry(tmp_path, "a", held_out=4), entry(tmp_path, "b", held_out=3), entry(tmp_path, "c")], 0)
    assert [task.env for task in source.held_out()] == ["a"] * 4 + ["b"] * 3
    assert [task.env for task in source.held_out(2)] == ["a", "a", "b", "b"]
    assert source.held_out(2) == [task for task in source.held_out() if task.index < 2]


def test_spacing_and_system_prompt_make_no_new_question(tmp_path: Path) -> None:
    file = tmp_path / "spaced.jsonl"
    lines = [
        {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 +  1?"}], "answer": 2},
        {"messages": [{"role": "user", "content": " 1 + 1?\n"}], "answer": 2},
        {"messages": [{"role": "user", "content": "2 + 2?"}], "answer": 4},
    ]
    file.write_text("\n".join(json.dumps(line) for line in lines))
    section = TaskSection(env="jsonl", params={"path": str(file)}, held_out=1)
    source = TaskSource([section], 0)
    assert len({task.answer["answer"] for task in [*take(source, 9), *source.held_out()]}) == 2
    assert {t.answer["answer"] for t in take(source, 9)}.isdisjoint(t.answer["answer"] for t in source.held_out())


def test_what_one_entry_holds_out_no_other_trains_on(tmp_path: Path) -> None:
    path = {"path": sums(tmp_path, "shared", 10)}
    sections = [
        TaskSection(env="jsonl", name="a", params=path, held_out=5),
        TaskSection(env="jsonl", name="b", params=path, seed=1, system_prompt="Be brief."),
    ]
    source = TaskSource(sections, 0)
    held = questions(source.held_out())
    assert len(held) == 5
    assert held.isdisjoint(questions(take(source, 60)))


def test_entries_that_hold_out_all_of_another_are_refused(tmp_path: Path) -> None:
    path = {"path": sums(tmp_path, "shared", 2)}
    sections = [TaskSection(env="jsonl", name=f"e{i}", params=path, seed=i, held_out=1) for i in range(8)]
    source = TaskSource(sections, 0)
    with pytest.raises(DataError, match="in a row are held out"):
        source.next()


@pytest.mark.parametrize(("held_out", "most"), [(6, 5), (100, 5)])
def test_too_few_questions_to_hold_out(tmp_path: Path, held_out: int, most: int) -> None:
    with pytest.raises(DataError) as caught:
        TaskSource([entry(tmp_path, "a"), entry(tmp_path, "b", count=10, held_out=held_out)], 0)
    assert f"tasks.1.held_out = {held_out}: the environment has only 10 distinct questions" in str(caught.value)
    assert f"set it to at most {most}" in str(caught.value)


def test_half_of_the_questions_may_be_held_out(tmp_path: Path) -> None:
    assert len(TaskSource([entry(tmp_path, "a", count=10, held_out=5)], 0).held_out()) == 5


def test_the_system_prompt_comes_first(tmp_path: Path) -> None:
    source = TaskSource([entry(tmp_path, "a", system_prompt="Answer with a number.", held_out=1)], 0)
    for task in [source.next(), *source.held_out()]:
        assert task.messages[0] == Message("system", "Answer with a number.")
        assert [message.role for message in task.messages] == ["system", "user"]


@pytest.mark.parametrize(
    ("env", "limit"),
    [
        ("hubb", "is no environment"),
        ("own_environments:", "is no environment"),
        ("no_such_module:Sums", "cannot be imported: No module named 'no_such_module'"),
        ("own_environments:Sum", "cannot be imported: module 'own_environments' has no attribute 'Sum'"),
    ],
)
def test_an_unknown_environment_is_refused(own: Path, env: str, limit: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TaskSource([TaskSection(env="jsonl", params={"path": sums(own, "a", 1)}), TaskSection(env=env)], 0)
    expected = f"tasks.1.env = {env!r}: {limit}\n  -> use reasoning_gym, jsonl, hub, chats, or module:Class of your own"
    assert str(caught.value).startswith(expected)


def test_an_environment_of_the_users_own(own: Path) -> None:
    section = TaskSection(env="own_environments:Sums", name="mine", params={"first": 40}, held_out=2)
    source = TaskSource([section], 0)
    assert [task.answer["answer"] for task in source.held_out()] == ["0", "1"]
    task = source.next()
    assert (task.task_id, task.messages, task.answer) == ("mine/0", (Message("user", "40 + 0?"),), {"answer": "40"})


def test_what_an_environment_of_the_users_own_raises_is_its_bug(own: Path) -> None:
    with pytest.raises(KeyError, match="first"):
        TaskSource([TaskSection(env="own_environments:Sums")], 0)


def test_files_need_no_reasoning_gym(tmp_path: Path) -> None:
    program = (
        "import sys; from engine.config import TaskSection; from engine.tasks.source import TaskSource\n"
        f"TaskSource([TaskSection(env='jsonl', params={{'path': {sums(tmp_path, 'a', 1)!r}}})], 0).next()\n"
        "assert not {'reasoning_gym', 'torch', 'datasets'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_reserved_questions_are_neither_trained_on_nor_held_out(tmp_path: Path) -> None:
    reserved = {"a 3 + 1?", "a 7 + 1?"}
    source = TaskSource([entry(tmp_path, "a", count=10, held_out=4)], 0, reserved)
    held, trained = questions(source.held_out()), questions(take(source, 60))
    assert len(held) == 4
    assert len(trained) == 4
    assert (held | trained) == {f"a {i} + 1?" for i in range(10)} - reserved


def test_too_few_questions_beside_the_reserved_ones(tmp_path: Path) -> None:
    reserved = {"a 3 + 1?", "a 7 + 1?"}
    with pytest.raises(DataError) as caught:
        TaskSource([entry(tmp_path, "a", count=10, held_out=5)], 0, reserved)
    told = "tasks.0.held_out = 5: the environment has only 8 distinct questions outside the evaluation suites, and"
    assert str(caught.value).startswith(told)
    assert "set it to at most 4" in str(caught.value)


def test_a_task_of_reserved_questions_alone(tmp_path: Path) -> None:
    source = TaskSource([entry(tmp_path, "a", count=3)], 0, {f"a {i} + 1?" for i in range(3)})
    with pytest.raises(DataError, match="in a row are held out or an evaluation suite's"):
        source.next()
