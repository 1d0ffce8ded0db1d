"""Selected groups to packed micro-batches: whole sequences end to end, no padding."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from engine.algorithms.advantage import Estimator, group_advantages
from engine.types import Batch, Group, MicroBatch, Rollout


def build_batch(
    groups: Sequence[Group], *, estimator: Estimator, micro_batch_tokens: int, temperature: float
) -> tuple[Batch, list[Group]]:
    """One optimizer step from whole groups, and the groups with their fate: `trained` or `zero_signal`.

    Groups whose advantages are all zero are not computed and leave the denominator `num_tokens`. A batch may be
    empty. Members without a reward are left out of the baseline and of the batch.
    """
    judged: list[tuple[Rollout, float]] = []
    fates: list[Group] = []
    for group in groups:
        advantages = group_advantages([rollout.reward for rollout in group.rollouts], estimator)
        has_signal = any(advantages)
        fates.append(_with_fate(group, has_signal))
        if has_signal:
            judged += [
                pair
                for pair in zip(group.rollouts, advantages, strict=True)
                if pair[0].reward is not None and pair[0].length
            ]
    num_tokens = sum(rollout.length for rollout, _ in judged)
    micro_batches = tuple(_pack(members) for members in _split(judged, micro_batch_tokens))
    return Batch(micro_batches=(micro_batches,), num_tokens=num_tokens, temperature=temperature), fates


def _with_fate(group: Group, has_signal: bool) -> Group:
    if has_signal:
        return replace(group, outcome="trained")
    return replace(group, outcome="zero_signal", reason="all rewards equal, or fewer than two")


def _split(judged: list[tuple[Rollout, float]], limit: int) -> list[list[tuple[Rollout, float]]]:
    """Longest first, so that sequences of like length share a micro-batch (attention pads to its longest)."""
    members = sorted(judged, key=lambda pair: -len(pair[0].token_ids))
    batches: list[list[tuple[Rollout, float]]] = []
    room = 0
    for pair in members:
        size = len(pair[0].token_ids)
        if not batches or size > room:
            batches.append([])
            room = limit
        batches[-1].append(pair)
        room -= size
    return batches


def _pack(members: list[tuple[Rollout, float]]) -> MicroBatch:
    lengths = [len(rollout.token_ids) for rollout, _ in members]
    return MicroBatch(
        token_ids=np.concatenate([rollout.token_ids for rollout, _ in members]),
        position_ids=np.concatenate([np.arange(length, dtype=np.int32) for length in lengths]),
        cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        trainable=np.concatenate([rollout.trainable for rollout, _ in members]),
        logprobs=np.concatenate([rollout.logprobs for rollout, _ in members]),
        advantages=np.repeat(np.asarray([advantage for _, advantage in members], np.float32), lengths),
    )
