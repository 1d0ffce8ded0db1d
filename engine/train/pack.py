"""Selected groups to packed micro-batches: whole sequences end to end, no padding, a like amount of work per rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np
from msgspec.structs import replace

from engine.algorithms.advantage import Estimator, batch_advantages
from engine.types import Batch, Group, MicroBatch, Rollout

Aggregation = Literal["token_mean", "prompt_mean", "sequence_mean", "constant"]

# Attention's share of a token's work grows with its place: at this many tokens it equals the linear layers' (6 times
# the width of a small model; a rough figure is enough to divide work).
_ATTENTION_TOKENS = 4096


class Packing(msgspec.Struct, frozen=True, kw_only=True):
    """How a step's groups become a batch. `max_new_tokens` is the divisor of aggregation `constant`."""

    estimator: Estimator
    aggregation: Aggregation
    micro_batch_tokens: int
    max_new_tokens: int
    temperature: float
    ranks: int = 1


class Judged(msgspec.Struct, frozen=True):
    """One rollout to train on: every token's advantage and share of the loss."""

    rollout: Rollout
    advantage: float
    weight: float


def build_batch(groups: Sequence[Group], packing: Packing, *, version: int) -> tuple[Batch, list[Group]]:
    """One optimizer step from whole groups, and the groups with their fate: `trained` or `zero_signal`.

    Groups whose advantages are all zero are not computed and leave the denominators, except of `constant`. A batch may
    be empty. Members without a reward are left out of the baseline and of the batch. `version` is the one before the
    step, from which the tokens' staleness counts.
    """
    advantages = batch_advantages(
        [[rollout.reward for rollout in group.rollouts] for group in groups], packing.estimator
    )
    fates = [with_fate(group, signal=any(row)) for group, row in zip(groups, advantages, strict=True)]
    with_signal = (
        [pair for pair in zip(group.rollouts, row, strict=True) if pair[0].reward is not None and pair[0].length]
        for group, row in zip(groups, advantages, strict=True)
        if any(row)
    )
    members = [group for group in with_signal if group]
    all_rollouts = sum(len(group.rollouts) for group in groups)
    judged = [
        Judged(rollout, advantage, weight)
        for group, weights in zip(members, _weights(members, packing, all_rollouts), strict=True)
        for (rollout, advantage), weight in zip(group, weights, strict=True)
    ]
    return pack(judged, packing, version=version), fates


def supervised_batch(chats: Sequence[Rollout], packing: Packing) -> Batch:
    """One step on what somebody else has said, at temperature 1: every advantage is 1, and a chat is a prompt of its
    own."""
    weights = _weights([[(chat, 1.0)] for chat in chats], packing, len(chats))
    judged = [Judged(chat, 1.0, weight) for chat, (weight,) in zip(chats, weights, strict=True)]
    return pack(judged, replace(packing, temperature=1.0), version=0)


def pack(sequences: Sequence[Judged], packing: Packing, *, version: int) -> Batch:
    """Sequences divided over ranks by their estimated work, then cut into micro-batches, as many for each rank."""
    ranks = [_split(part, packing.micro_batch_tokens) for part in _divide(sequences, packing.ranks)]
    rounds = max(len(micro_batches) for micro_batches in ranks)
    return Batch(
        micro_batches=tuple(
            (*(_pack(members, version) for members in micro_batches), *[_EMPTY] * (rounds - len(micro_batches)))
            for micro_batches in ranks
        ),
        num_tokens=sum(sequence.rollout.length for sequence in sequences),
        temperature=packing.temperature,
    )


def has_signal(group: Group) -> bool:
    """Whether training on the group would move anything: two members with unlike rewards."""
    return any(batch_advantages([[rollout.reward for rollout in group.rollouts]], "centered")[0])


def with_fate(group: Group, *, signal: bool) -> Group:
    """The group as it leaves the buffer: `trained`, or `zero_signal`."""
    if signal:
        return replace(group, outcome="trained")
    return replace(group, outcome="zero_signal", reason="all rewards equal, or fewer than two")


def _weights(
    members: Sequence[Sequence[tuple[Rollout, float]]], packing: Packing, all_rollouts: int
) -> list[list[float]]:
    """Each token's share of the loss, by group and member. Over all tokens they sum to 1, except of `constant`."""
    lengths = [[rollout.length for rollout, _ in group] for group in members]
    match packing.aggregation:
        case "token_mean":
            total = sum(map(sum, lengths))
            return [[1 / total] * len(group) for group in lengths]
        case "prompt_mean":
            return [[1 / (len(lengths) * sum(group))] * len(group) for group in lengths]
        case "sequence_mean":
            count = sum(map(len, lengths))
            return [[1 / (count * length) for length in group] for group in lengths]
        case "constant":
            return [[1 / (all_rollouts * packing.max_new_tokens)] * len(group) for group in lengths]


def _divide(sequences: Sequence[Judged], ranks: int) -> list[list[Judged]]:
    """Longest first, each to the rank that has least to do so far."""
    parts: list[list[Judged]] = [[] for _ in range(ranks)]
    work = [0.0] * ranks
    for sequence in sorted(sequences, key=lambda sequence: -len(sequence.rollout.token_ids)):
        rank = work.index(min(work))
        length = len(sequence.rollout.token_ids)
        parts[rank].append(sequence)
        work[rank] += length * (1 + length / _ATTENTION_TOKENS)
    return parts


def _split(sequences: Sequence[Judged], limit: int) -> list[list[Judged]]:
    """Longest first, so that sequences of like length share a micro-batch (attention pads to its longest)."""
    batches: list[list[Judged]] = []
    room = 0
    for sequence in sequences:
        size = len(sequence.rollout.token_ids)
        if not batches or size > room:
            batches.append([])
            room = limit
        batches[-1].append(sequence)
        room -= size
    return batches


def _pack(members: Sequence[Judged], version: int) -> MicroBatch:
    rollouts = [member.rollout for member in members]
    lengths = [len(rollout.token_ids) for rollout in rollouts]

    def repeated(values: list[float]) -> np.ndarray:
        return np.repeat(np.asarray(values, np.float32), lengths)

    return MicroBatch(
        token_ids=np.concatenate([rollout.token_ids for rollout in rollouts]),
        position_ids=np.concatenate([np.arange(length, dtype=np.int32) for length in lengths]),
        cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        trainable=np.concatenate([rollout.trainable for rollout in rollouts]),
        logprobs=np.concatenate([rollout.logprobs for rollout in rollouts]),
        advantages=repeated([member.advantage for member in members]),
        weights=repeated([member.weight for member in members]),
        staleness=version - np.concatenate([rollout.token_versions() for rollout in rollouts]),
    )


# One token that is not trained: for a rank that has nothing left to do in a round of collectives.
_EMPTY = MicroBatch(
    token_ids=np.zeros(1, np.int32), position_ids=np.zeros(1, np.int32), cu_seqlens=np.asarray([0, 1], np.int32),
    trainable=np.zeros(1, np.bool_), logprobs=np.zeros(1, np.float32), advantages=np.zeros(1, np.float32),
    weights=np.zeros(1, np.float32), staleness=np.zeros(1, np.int32),
)
