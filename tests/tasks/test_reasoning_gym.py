from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys

import pytest

from engine.config import TaskSection
from engine.errors import ConfigError, DataError
from engine.tasks.reasoning_gym import ReasoningGym
from engine.tasks.source import TaskSource

ONE_DIGIT = {"family": "products", "min_digits": 1, "max_digits": 1}


def gym(family: str, entry_seed: int = 0, /, **params: object) -> ReasoningGym:
    return ReasoningGym(TaskSection(env="reasoning_gym", name=family, params=params, seed=entry_seed), "tasks.0")


def test_a_question_and_its_answer() -> None:
    question = gym("products", min_digits=1, max_digits=1).train(0)
    a, b = (int(digit) for digit in question.text.split(":")[1].split(".")[0].split("*"))
    assert question.answer == {"answer": str(a * b)}
    assert [message.role for message in question.messages] == ["user"]


def test_the_family_may_be_a_param() -> None:
    section = TaskSection(env="reasoning_gym", name="easy", params=ONE_DIGIT)
    task = TaskSource([section], 0).next()
    assert task.task_id == "easy/0"
    assert "multiplication" in task.messages[0].content


def test_a_hundred_questions_are_split_by_their_text() -> None:
    source = TaskSource([TaskSection(env="reasoning_gym", name="p", params=ONE_DIGIT, held_out=40)], 0)
    held = {task.messages[0].content for task in source.held_out()}
    trained = [source.next() for _ in range(1500)]
    seen = {task.messages[0].content for task in trained}

    assert len(held) == 40
    assert held.isdisjoint(seen)
    # Every ordered pair of digits is asked, 0 * 0 too.
    assert len(seen) == 100 - 40
    # The index counts what was skipped too, so that an index names its question whatever is held out.
    assert trained[-1].index > 2000


def test_too_many_held_out_of_a_hundred() -> None:
    with pytest.raises(DataError, match=r"tasks\.0\.held_out = 51: the environment has only 100 distinct questions"):
        TaskSource([TaskSection(env="reasoning_gym", name="p", params=ONE_DIGIT, held_out=51)], 0)


def test_neighbouring_seeds_and_candidates_are_no_shifted_copies() -> None:
    first, second = (gym("products", seed, min_digits=6, max_digits=8) for seed in (0, 1))
    lists = [[environment.train(i).text for i in range(200)] for environment in (first, second)]
    lists.append([question.text for question in itertools.islice(first.candidates(), 200)])
    for one, other in itertools.combinations(lists, 2):
        assert set(one).isdisjoint(other)


def test_the_list_goes_on_past_the_packages_datasets() -> None:
    environment = gym("products")
    texts = [environment.train(i).text for i in range(498, 503)]
    assert len(set(texts)) == 5
    assert [environment.train(i).text for i in (0, 1_000_000, 498)][2] == texts[0]
    # These two refuse, or draw up front, what is larger than a plain dataset.
    assert gym("gsm_symbolic").train(1_000_000).text
    assert gym("list_functions").train(1_000_000).text


def test_what_is_said_about_scoring_is_no_param_of_the_family() -> None:
    said = {"score": {"exact": 1.0, "judge": 0.5}, "judge": {"url": "http://h/v1", "model": "m"}}
    assert gym("chain_sum", **said).train(0) == gym("chain_sum").train(0)


def test_what_the_own_scorer_needs_travels_as_plain_data() -> None:
    answer = gym("graph_color", min_num_vertices=4, max_num_vertices=4).train(0).answer
    assert answer.keys() == {"answer", "family", "params", "entry"}
    assert answer["answer"] is None
    assert answer["params"] == {"min_num_vertices": 4, "max_num_vertices": 4}
    assert json.loads(json.dumps(answer)) == answer
    # Strings of numpy's and tuples are made plain.
    assert json.loads(json.dumps(gym("knights_knaves").train(0).answer)) == gym("knights_knaves").train(0).answer


@pytest.mark.parametrize(
    ("family", "params", "path", "remedy"),
    [
        ("prodcts", {}, "tasks.0.params.family = 'prodcts'", "did you mean products"),
        ("zzz", {}, "tasks.0.params.family = 'zzz'", "families: ab, acre"),
        ("", {}, "tasks.0.params.family = ''", "families: ab, acre"),
        ("products", {"min_digit": 1}, "tasks.0.params.min_digit = 1", "did you mean min_digits"),
        ("products", {"qqq": 1}, "tasks.0.params.qqq = 1", "allow_negation"),
        ("products", {"seed": 1}, "tasks.0.params.seed = 1", "set tasks.0.seed"),
        ("products", {"size": 10}, "tasks.0.params.size = 10", "endless"),
        ("products", {"min_digits": 9}, "max_digits must be >= min_digits", "ranges"),
        ("products", {"min_digits": "one"}, "refused by reasoning_gym's products", "ranges"),
    ],
)
def test_a_wrong_family_or_param_is_named(family: str, params: dict[str, object], path: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        gym(family, **params)
    assert path in str(caught.value)
    assert remedy in str(caught.value)


def test_families_that_depend_on_string_hashing_need_it_fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(ConfigError, match="PYTHONHASHSEED=0"):
        gym("word_ladder")
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert gym("word_ladder").train(0).text


def test_questions_are_alike_in_every_process() -> None:
    program = (
        "from engine.config import TaskSection; from engine.tasks.source import TaskSource\n"
        "names = 'products', 'family_relationships'\n"
        "source = TaskSource([TaskSection(env='reasoning_gym', name=name, held_out=2) for name in names], 3)\n"
        "print([source.next() for _ in range(6)], source.held_out())"
    )
    printed = {
        subprocess.check_output([sys.executable, "-c", program], env=os.environ | {"PYTHONHASHSEED": seed})
        for seed in ("1", "2")
    }
    assert len(printed) == 1
