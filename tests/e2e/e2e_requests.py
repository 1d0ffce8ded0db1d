"""Requests for engine tests."""

from __future__ import annotations

import numpy as np

from engine.types import SegmentRequest


def requests(
    tag: str, *, count: int, prompt_tokens: int, new_tokens: int, temperature: float, seed: int = 0
) -> list[SegmentRequest]:
    """Requests on random prompts; the same arguments but for `tag` give the same tokens to be sampled."""
    random = np.random.default_rng(seed)
    return [
        SegmentRequest(
            request_id=f"{tag}-{index}",
            token_ids=random.integers(0, 256, prompt_tokens).astype(np.int32),
            max_new_tokens=new_tokens,
            temperature=temperature,
            seed=1000 + index,
        )
        for index in range(count)
    ]
