"""Advantages by hand and in exact fractions."""

from __future__ import annotations

from fractions import Fraction
from statistics import stdev

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.algorithms.advantage import Estimator, GroupEstimator, batch_advantages, group_advantages

ESTIMATORS: tuple[GroupEstimator, ...] = ("leave_one_out", "centered", "group_norm")
BATCH_ESTIMATORS: tuple[Estimator, ...] = (*ESTIMATORS, "batch_norm")


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
        ("group_norm", [1.0, 0.0, 0.0, 0.0], [1.5, -0.5, -0.5, -0.5]),  # deviation 1/2
        ("group_norm", [3.0, 1.0, 2.0], [1.0, -1.0, 0.0]),
        ("group_norm", [5.0, 5.0 + 2**-40], [-(0.5**0.5), 0.5**0.5]),  # no epsilon
        ("group_norm", [0.0, 1e-200], [-(0.5**0.5), 0.5**0.5]),  # whose square is 0 in float64
        ("centered", [0.5, 0.5 + 2**-40], [-(2**-41), 2**-41]),  # nearly equal is not equal
    ],
)
def test_by_hand(estimator: GroupEstimator, rewards: list[float], expected: list[float]) -> None:
    assert group_advantages(rewards, estimator) == pytest.approx(expected, rel=1e-12, abs=0.0)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize(
    "rewards", [[0.1] * 7, [1 / 3] * 8, [0.0] * 2, [-2.7] * 3, [1e-300] * 5, [None, 0.1, 0.1, 0.1]], ids=str
)
def test_equal_rewards_give_exactly_zero(estimator: GroupEstimator, rewards: list[float | None]) -> None:
    # sum([0.1] * 7) / 7 is not 0.1: subtracting a mean would leave a residue.
    assert group_advantages(rewards, estimator) == [0.0] * len(rewards)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("rewards", [[], [1.0], [None], [None, 1.0], [None, None, 0.3, None]], ids=str)
def test_fewer_than_two_valid_members_give_zeros(estimator: GroupEstimator, rewards: list[float | None]) -> None:
    assert group_advantages(rewards, estimator) == [0.0] * len(rewards)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("size", [8, 64])
def test_members_without_a_reward_count_nowhere(estimator: GroupEstimator, size: int) -> None:
    alone = group_advantages([1.0, 0.0, 0.25], estimator)
    padded = group_advantages([1.0, None, 0.0, 0.25] + [None] * (size - 4), estimator)
    assert padded == [alone[0], 0.0, *alone[1:], *([0.0] * (size - 4))]


# Half precision: apart by more than the rounding of a mean, which a division by their spread would magnify.
rewards_G = st.lists(st.none() | st.floats(-1e3, 1e3, width=16), min_size=1, max_size=12)


@given(rewards=rewards_G)
@settings(max_examples=100, deadline=None)
def test_they_are_their_definition_and_sum_to_zero(rewards: list[float | None]) -> None:
    valid = [Fraction(reward) for reward in rewards if reward is not None]
    for estimator in ESTIMATORS:
        advantages = group_advantages(rewards, estimator)
        assert sum(advantages) == pytest.approx(0.0, abs=1e-10)
        if len(valid) < 2 or len(set(valid)) == 1:
            assert advantages == [0.0] * len(rewards)
            continue
        mean = sum(valid) / len(valid)
        deviation = stdev(valid)
        for reward, advantage in zip(rewards, advantages, strict=True):
            if reward is None:
                assert advantage == 0.0
                continue
            others = (sum(valid) - Fraction(reward)) / (len(valid) - 1)
            expected = {
                "leave_one_out": float(Fraction(reward) - others),
                "centered": float(Fraction(reward) - mean),
                "group_norm": float(Fraction(reward) - mean) / float(deviation),
            }[estimator]
            assert advantage == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_a_batch_by_hand() -> None:
    """Centred 1, -1 and .5, -.5, 0; the deviation of these five is sqrt(2.5 / 4)."""
    groups = [[3.0, 1.0], [0.2, 0.2, 0.2], [1.0, None, 0.0, 0.5]]
    scale = (2.5 / 4) ** -0.5
    expected = [[scale, -scale], [0.0] * 3, [0.5 * scale, 0.0, -0.5 * scale, 0.0]]
    advantages = batch_advantages(groups, "batch_norm")
    assert advantages == [pytest.approx(group, rel=1e-12, abs=0.0) for group in expected]
    assert batch_advantages(groups, "centered") == [group_advantages(group, "centered") for group in groups]


def test_one_groups_batch_norm_is_its_group_norm() -> None:
    group = [1.0, 0.0, None, 0.25, 7.0]
    assert batch_advantages([group], "batch_norm") == [group_advantages(group, "group_norm")]


@pytest.mark.parametrize("estimator", BATCH_ESTIMATORS)
def test_a_batch_of_constant_rewards_is_exactly_zero(estimator: Estimator) -> None:
    groups = [[0.1] * 7, [1 / 3] * 8, [None, 0.7], [None]]
    assert batch_advantages(groups, estimator) == [[0.0] * len(group) for group in groups]
    assert batch_advantages([], estimator) == []


@pytest.mark.parametrize("size", [8, 64])
def test_padding_and_groups_without_a_signal_do_not_change_a_batchs_deviation(size: int) -> None:
    alone = batch_advantages([[1.0, 0.0, 0.25], [2.0, 0.0]], "batch_norm")
    padded = batch_advantages([[1.0, 0.0, 0.25, *[None] * size], [4.0] * size, [2.0, 0.0]], "batch_norm")
    assert [padded[0][:3], padded[2]] == alone
    assert padded[0][3:] == [0.0] * size
    assert padded[1] == [0.0] * size
