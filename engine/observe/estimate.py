"""A mean and how sure it is."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np

_Z = 1.96


class Estimate(msgspec.Struct, frozen=True):
    """A mean over `count` questions and its 95 % interval."""

    mean: float
    low: float
    high: float
    count: int


def estimate(values: Sequence[float]) -> Estimate:
    """Mean of independent values in [0, 1] with a 95 % interval: Wilson's score interval where all are 0 or 1, or
    all are equal (a normal one would be certain of 0 out of 128), else a normal one, cut to [0, 1]."""
    mean, count = float(np.mean(values)), len(values)
    if len(set(values)) == 1 or set(values) <= {0.0, 1.0}:
        z2 = _Z**2
        centre, spread = mean + z2 / (2 * count), _Z * math.sqrt(mean * (1 - mean) / count + z2 / (4 * count**2))
        low, high = (centre - spread) / (1 + z2 / count), (centre + spread) / (1 + z2 / count)
    else:
        half = _Z * float(np.std(values, ddof=1)) / math.sqrt(count)
        low, high = mean - half, mean + half
    return Estimate(mean, max(0.0, low), min(1.0, high), count)
