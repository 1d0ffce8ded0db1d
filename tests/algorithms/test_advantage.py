"""Advantages by hand and in exact fractions."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.algorithms.advantage import Estimator, group_advantages

ESTIMATORS: tuple[Estimator, ...] = ("leave_one_out", "centered")


@pytest.mark.parametrize(
    ("estimator", "rewards", "expected"),
    [
        # The best of four against the mean 0 of its peers; a peer against their mean 1/3.
        ("leave_one_out", [1.0, 0.0, 0.0, 0.0], [1.0, -1 / 3, -1 / 3, -1 / 3]),
        ("leave_one_out", [1.0, 0.0], [1.0, -1.0]),
        ("leave_one_out", [3.0, 1.0, 2.0], [1.5, -1.5, 0.0]),
        ("centered", [1.0, 0.0, 0.0, 0.0], [0.75, -0.25, -0.25, -0.25]),
        ("centered", [1.0, 0.0], [0.5, -0.5]),
        ("centered", [3.0, 1.0, 2.0], [1.0, -1.0, 0.0]),
        ("centered", [0.5, 0.5 + 2**-40], [-(2**-41), 2**-41]),  # nearly equal is not equal
    ],
)
def test_by_hand(estimator: Estimator, rewards: list[float], expected: list[float]) -> None:
    assert group_advantages(rewards, estimator) == pytest.approx(expected, rel=1e-12, abs=0.0)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize(
    "rewards", [[0.1] * 7, [1 / 3] * 8, [0.0] * 2, [-2.7] * 3, [1e-300] * 5, [None, 0.1, 0.1, 0.1]], ids=str
)
def test_equal_rewards_give_exactly_zero(estimator: Estimator, rewards: list[float | None]) -> None:
    # sum([0.1] * 7) / 7 is not 0.1: subtracting a mean would leave a residue.
    assert group_advantages(rewards, estimator) == [0.0] * len(rewards)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("rewards", [[], [1.0], [None], [None, 1.0], [None, None, 0.3, None]], ids=str)
def test_fewer_than_two_valid_members_give_zeros(estimator: Estimator, rewards: list[float | None]) -> None:
    assert group_advantages(rewards, estimator) == [0.0] * len(rewards)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("size", [8, 64])
def test_members_without_a_reward_count_nowhere(estimator: Estimator, size: int) -> None:
    alone = group_advantages([1.0, 0.0, 0.25], estimator)
    padded = group_advantages([1.0, None, 0.0, 0.25] + [None] * (size - 4), estimator)
    assert padded == [alone[0], 0.0, *alone[1:], *([0.0] * (size - 4))]


rewards_G = st.lists(st.none() | st.floats(-1e3, 1e3), min_size=1, max_size=12)


@given(rewards=rewards_G)
@settings(max_examples=100, deadline=None)
def test_both_are_their_definition_and_sum_to_zero(rewards: list[float | None]) -> None:
    valid = [Fraction(reward) for reward in rewards if reward is not None]
    for estimator in ESTIMATORS:
        advantages = group_advantages(rewards, estimator)
        assert sum(advantages) == pytest.approx(0.0, abs=1e-10)
        for reward, advantage in zip(rewards, advantages, strict=True):
            if reward is None or len(valid) < 2:
                assert advantage == 0.0
                continue
            others = (sum(valid) - Fraction(reward)) / (len(valid) - 1)
            baseline = others if estimator == "leave_one_out" else sum(valid) / len(valid)
            assert advantage == pytest.approx(float(Fraction(reward) - baseline), abs=1e-10)
