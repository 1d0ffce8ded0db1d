from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.errors import ConfigError
from engine.reward.scoring import Failure, Job, Judgement, Reply, Started, frame, prepare, require_scorers


@pytest.fixture(autouse=True)
def _rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def judge(scorer: str | dict[str, float], completion: str, answer: dict[str, Any], **settings: Any) -> Judgement:
    weights = {scorer: 1.0} if isinstance(scorer, str) else scorer
    given = {"kind": "last_number", "question": "?", "num_tokens": 5, "max_new_tokens": 20} | settings
    return prepare(Job(weights=weights, completion=completion, answer=answer, **given))()


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
    assert judgement == Judgement(0.5, "3", {"reward_functions:length_share": 0.5})


@pytest.mark.parametrize(
    ("completion", "kind", "reward"),
    [
        (r"\boxed{\frac{2}{4}}", "boxed", 1.0),
        (r"<think>\boxed{\frac{2}{4}}</think>\boxed{\frac{2}{3}}", "boxed", 0.0),
        ("It is 2/4.", "last_number", 1.0),
        (r"<answer>\(0.5\)</answer>", "tag", 1.0),
        ("none", "last_number", 0.0),
    ],
)
def test_math(completion: str, kind: str, reward: float) -> None:
    judgement = judge("math", completion, {"answer": r"\frac{1}{2}"}, kind=kind)
    assert (judgement.reward, judgement.parts) == (reward, {"math": reward})


@pytest.mark.parametrize(("num_tokens", "value"), [(0, 0.0), (5, -0.25), (20, -1.0)])
def test_length(num_tokens: int, value: float) -> None:
    assert judge("length", "", {"answer": ""}, num_tokens=num_tokens).reward == value


@pytest.mark.parametrize(
    ("num_tokens", "value"), [(0, 0.0), (16384, 0.0), (16385, -1 / 4096), (18432, -0.5), (20480, -1.0), (30000, -1.0)]
)
def test_overlong(num_tokens: int, value: float) -> None:
    """DAPO's own setting: L_max 20,480, L_cache 4,096; ((L_max - L_cache) - length) / L_cache in between."""
    judgement = judge("overlong", "", {"answer": ""}, num_tokens=num_tokens, max_new_tokens=20480)
    assert judgement.reward == pytest.approx(value, rel=1e-9, abs=1e-9)


def test_a_reward_is_the_weighted_sum_of_its_parts() -> None:
    weights = {"exact": 2.0, "length": 0.2, "reward_functions:length_share": -0.5}
    judgement = judge(weights, "It is 12", {"answer": "12"}, num_tokens=10)
    assert judgement == Judgement(
        pytest.approx(2 * 1 + 0.2 * -0.5 - 0.5 * 4),
        "12",
        {"exact": 1.0, "length": -0.5, "reward_functions:length_share": 4.0},
    )


@pytest.mark.parametrize(("name", "said"), [("is_no_number", "nan"), ("forgets_to_return", "None")])
def test_a_reward_is_a_finite_number(name: str, said: str) -> None:
    with pytest.raises(ValueError, match=f"reward_functions:{name} returned {said}: a reward is a finite number"):
        judge(f"reward_functions:{name}", "", {"answer": ""})


@pytest.mark.parametrize(
    "name", ["exact", "math", "letters", "length", "overlong", "judge", "reward_functions:length_share"]
)
def test_scorers_that_exist(name: str) -> None:
    require_scorers({name: -1}, "tasks.0.params.score")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("exakt", "did you mean exact"),
        ("brevity", "module:function of your own"),
        ("overlength", "did you mean overlong"),
        (":score", "is no scorer"),
        ("reward_functions:", "is no scorer"),
        (".reward_functions:score", "is no scorer"),
        ("5", "tasks.0.params.score = '5': is no scorer"),
        ("no_such_module:score", "No module named 'no_such_module'"),
        ("reward_functions:length_shares", "has no attribute 'length_shares'"),
        ("reward_functions:not_a_function", "is no scorer"),
    ],
)
def test_scorers_that_do_not_exist_are_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        require_scorers({"exact": 1.0, name: 1.0}, "tasks.0.params.score")


@pytest.mark.parametrize("weight", ["1", True, None, float("nan"), float("inf"), [1.0]])
def test_weights_that_are_none_are_refused(weight: object) -> None:
    with pytest.raises(ConfigError, match=r"tasks\.0\.params\.score\.length = .*: is no weight"):
        require_scorers({"exact": 1.0, "length": weight}, "tasks.0.params.score")


def test_an_empty_table_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"tasks\.0\.params\.score = {}: names no scorer"):
        require_scorers({}, "tasks.0.params.score")


@pytest.mark.parametrize("reply", [Started(), Judgement(0.5, None, {"exact": 0.5}), Failure("KeyError: 'x'")])
def test_replies_cross_as_length_and_msgpack(reply: Reply) -> None:
    data = frame(reply)
    assert int.from_bytes(data[:4], "little") == len(data) - 4
    assert msgspec.msgpack.decode(data[4:], type=Reply) == reply
