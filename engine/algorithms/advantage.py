"""Advantages of rollouts from their rewards. Pure functions on whole groups."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

GroupEstimator = Literal["leave_one_out", "centered", "group_norm"]
Estimator = GroupEstimator | Literal["batch_norm"]


def group_advantages(rewards_G: Sequence[float | None], estimator: GroupEstimator) -> list[float]:
    """Advantage of each member; `None` marks a member without a reward, which counts nowhere and gets 0.

    leave_one_out: r_i - mean of the others (RLOO, arXiv 2402.14740). centered: r_i - mean of all (Dr. GRPO,
    arXiv 2503.20783). group_norm: that divided by the sample standard deviation (GRPO, arXiv 2402.03300). Exactly zero
    when all rewards are equal or fewer than two members count.
    """
    valid = [reward for reward in rewards_G if reward is not None]
    # Compared, not derived from a spread: a mean's rounding would leave a residue that is not zero.
    if len(valid) < 2 or max(valid) == min(valid):
        return [0.0] * len(rewards_G)
    mean = sum(valid) / len(valid)
    match estimator:
        case "leave_one_out":
            divisor = (len(valid) - 1) / len(valid)
        case "centered":
            divisor = 1.0
        case "group_norm":
            divisor = _deviation([reward - mean for reward in valid])
    return [0.0 if reward is None else (reward - mean) / divisor for reward in rewards_G]


def batch_advantages(groups: Sequence[Sequence[float | None]], estimator: Estimator) -> list[list[float]]:
    """Advantages of all groups of one step.

    batch_norm: r_i - mean of its group, divided by the sample standard deviation of that over the valid members of
    all groups with a signal (ScaleRL, arXiv 2510.13786). The others are `group_advantages` of each group.
    """
    if estimator != "batch_norm":
        return [group_advantages(rewards_G, estimator) for rewards_G in groups]
    centered = [group_advantages(rewards_G, "centered") for rewards_G in groups]
    counted = [
        advantage
        for rewards_G, advantages_G in zip(groups, centered, strict=True)
        if any(advantages_G)
        for reward, advantage in zip(rewards_G, advantages_G, strict=True)
        if reward is not None
    ]
    if not counted:
        return centered
    divisor = _deviation(counted)
    return [[advantage / divisor for advantage in advantages_G] for advantages_G in centered]


def _deviation(centered: Sequence[float]) -> float:
    """Sample standard deviation of at least two values whose mean is 0."""
    return math.hypot(*centered) / math.sqrt(len(centered) - 1)
