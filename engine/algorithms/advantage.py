"""Advantages of one group of rollouts from their rewards. Pure functions on whole groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

Estimator = Literal["leave_one_out", "centered", "group_norm", "batch_norm"]
"""The last two are refused by the configuration until they are built."""


def group_advantages(rewards_G: Sequence[float | None], estimator: Estimator) -> list[float]:
    """Advantage of each member; `None` marks a member without a reward, which counts nowhere and gets 0.

    leave_one_out: r_i - mean of the others (RLOO, arXiv 2402.14740). centered: r_i - mean of all (Dr. GRPO,
    arXiv 2503.20783). Exactly zero when all rewards are equal or fewer than two members count.
    """
    valid = [reward for reward in rewards_G if reward is not None]
    # Compared, not derived from a spread: a mean's rounding would leave a residue that is not zero.
    if len(valid) < 2 or max(valid) == min(valid):
        return [0.0] * len(rewards_G)
    mean = sum(valid) / len(valid)
    scale = len(valid) / (len(valid) - 1) if estimator == "leave_one_out" else 1.0
    return [0.0 if reward is None else scale * (reward - mean) for reward in rewards_G]
