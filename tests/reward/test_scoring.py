from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.errors import ConfigError
from engine.reward.scoring import Failure, Job, Judgement, Reply, Started, frame, prepare, require_scorer


@pytest.fixture(autouse=True)
def _rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def judge(scorer: str, completion: str, answer: dict[str, Any], **settings: Any) -> Judgement:
    job = Job(scorer=scorer, kind=settings.get("kind", "last_number"), completion=completion, answer=answer)
    return prepare(job)()


@pytest.mark.parametrize(
    ("completion", "kind", "expected"),
    [
        ("It is 12.", "last_number", Judgement(1.0, "12", {"exact": 1.0})),
        ("It is 13.", "last_number", Judgement(0.0, "13", {"exact": 0.0})),
        ("I do not know.", "last_number", Judgement(0.0, None, {"exact": 0.0})),
        (r"\boxed{12}, not 13", "boxed", Judgement(1.0, "12", {"exact": 1.0})),
        ("It is 12.", "tag", Judgement(0.0, None, {"exact": 0.0})),
    ],
)
def test_exact(completion: str, kind: str, expected: Judgement) -> None:
    assert judge("exact", completion, {"answer": "12"}, kind=kind) == expected


def test_a_family_has_the_last_word_where_answers_differ() -> None:
    entry = {"question": "", "answer": "7.48e+08", "metadata": {}}
    answer = {"answer": "748123456", "family": "power_function", "params": {}, "entry": entry}
    assert judge("exact", "7.48e8", answer).reward == 1.0
    assert judge("exact", "7.47e8", answer).reward == 0.0
    assert judge("exact", "748123456", answer).reward == 1.0


@pytest.mark.parametrize(
    ("completion", "share"),
    [("aab", 2 / 3), ("xyz", 0.0), ("abba cab", 3 / 8), ("", 0.0), ("aaaa", 1.0)],
)
def test_letters(completion: str, share: float) -> None:
    """By hand: the characters of the answer "aaa" are {a}."""
    judgement = judge("letters", completion, {"answer": "aaa"})
    assert judgement.reward == pytest.approx(share)
    assert judgement.parts == {"letters": judgement.reward}


def test_a_function_of_the_users_own() -> None:
    judgement = judge("reward_functions:length_share", "2 or 3", {"answer": {"longest": 12}})
    assert judgement == Judgement(0.5, "3", {"length_share": 0.5})


def test_a_reward_must_be_finite() -> None:
    with pytest.raises(ValueError, match="returned nan: a reward must be finite"):
        judge("reward_functions:is_no_number", "", {"answer": ""})


@pytest.mark.parametrize("name", ["exact", "letters", "reward_functions:length_share"])
def test_scorers_that_exist(name: str) -> None:
    require_scorer(name, "tasks.0.params.score")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("exakt", "did you mean exact"),
        ("length", "module:function of your own"),
        (":score", "is no scorer"),
        ("reward_functions:", "is no scorer"),
        (".reward_functions:score", "is no scorer"),
        (5, "tasks.0.params.score = 5: is no scorer"),
        ("no_such_module:score", "No module named 'no_such_module'"),
        ("reward_functions:length_shares", "has no attribute 'length_shares'"),
        ("reward_functions:not_a_function", "is no scorer"),
    ],
)
def test_scorers_that_do_not_exist_are_refused(name: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        require_scorer(name, "tasks.0.params.score")


@pytest.mark.parametrize("reply", [Started(), Judgement(0.5, None, {"exact": 0.5}), Failure("KeyError: 'x'")])
def test_replies_cross_as_length_and_msgpack(reply: Reply) -> None:
    data = frame(reply)
    assert int.from_bytes(data[:4], "little") == len(data) - 4
    assert msgspec.msgpack.decode(data[4:], type=Reply) == reply
