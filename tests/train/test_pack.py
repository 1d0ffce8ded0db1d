"""Groups to micro-batches: every sequence once, cut by hand."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hand_made import group, packing, rollout
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.train.pack import build_batch
from engine.types import Batch, Group, MicroBatch


def build(groups: Sequence[Group], micro_batch_tokens: int = 100) -> tuple[Batch, list[Group]]:
    return build_batch(groups, packing(micro_batch_tokens=micro_batch_tokens, temperature=0.6), version=0)


def sequences(batch: Batch) -> list[tuple[MicroBatch, slice]]:
    """Each packed sequence: its micro-batch and its place there."""
    found: list[tuple[MicroBatch, slice]] = []
    for micro in batch.micro_batches[0]:
        found += [(micro, slice(start, end)) for start, end in itertools.pairwise(micro.cu_seqlens.tolist())]
    return found


def test_one_group_by_hand() -> None:
    """Rewards 1, 0 and 0.5, so advantages 0.75, -0.75 and 0; longest first."""
    batch, fates = build(
        [
            group(
                rollout(1.0, prompt=[1, 2], sampled=[3, 4], logprobs=[-0.5, -0.25]),
                rollout(0.0, prompt=[1, 2], sampled=[5, 6, 7], logprobs=[-1.0, -2.0, -3.0], index=1),
                rollout(0.5, prompt=[1, 2], sampled=[8], logprobs=[-4.0], index=2),
            )
        ]
    )
    ((micro,),) = batch.micro_batches
    assert micro.token_ids.tolist() == [1, 2, 5, 6, 7, 1, 2, 3, 4, 1, 2, 8]
    assert micro.position_ids.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2]
    assert micro.cu_seqlens.tolist() == [0, 5, 9, 12]
    assert micro.trainable.tolist() == [bool(flag) for flag in (0, 0, 1, 1, 1, 0, 0, 1, 1, 0, 0, 1)]
    assert micro.logprobs.tolist() == [0, 0, -1, -2, -3, 0, 0, -0.5, -0.25, 0, 0, -4]
    assert micro.advantages[micro.trainable].tolist() == [-0.75, -0.75, -0.75, 0.75, 0.75, 0]
    assert (batch.num_tokens, batch.temperature) == (6, 0.6)
    assert [(fate.outcome, fate.reason) for fate in fates] == [("trained", "")]
    assert (micro.token_ids.dtype, micro.position_ids.dtype, micro.cu_seqlens.dtype) == (np.int32,) * 3
    assert (micro.logprobs.dtype, micro.advantages.dtype) == (np.float32,) * 2


def test_groups_without_signal_leave_batch_and_denominator() -> None:
    flat = group(*(rollout(0.1, sampled=[9] * 5, index=index) for index in range(7)), order=1)
    alone = group(rollout(1.0), rollout(None, index=1), order=2)
    mixed = group(rollout(1.0, sampled=[3, 4]), rollout(0.0, sampled=[5], index=1), order=3)
    batch, fates = build([flat, alone, mixed])
    assert batch.num_tokens == 3
    assert [micro.token_ids.tolist() for micro in batch.micro_batches[0]] == [[1, 2, 3, 4, 1, 2, 5]]
    assert [fate.lease.order for fate in fates] == [1, 2, 3]
    assert [fate.outcome for fate in fates] == ["zero_signal", "zero_signal", "trained"]
    assert [fate.reason for fate in fates] == ["all rewards equal, or fewer than two"] * 2 + [""]
    assert [fate.rollouts for fate in fates] == [flat.rollouts, alone.rollouts, mixed.rollouts]


def test_only_groups_without_signal_make_an_empty_batch() -> None:
    batch, fates = build([group(rollout(0.5), rollout(0.5, index=1))])
    assert (batch.micro_batches, batch.num_tokens) == (((),), 0)
    assert fates[0].outcome == "zero_signal"


def test_members_without_a_reward_or_a_token_are_left_out() -> None:
    """The one without a token still counts in the baseline: 1 against the mean of 0 and 0."""
    batch, fates = build(
        [
            group(
                rollout(1.0, sampled=[3]),
                rollout(None, sampled=[7, 7], index=1),
                rollout(0.0, sampled=[], index=2),
                rollout(0.0, sampled=[4], index=3),
            )
        ]
    )
    ((micro,),) = batch.micro_batches
    assert micro.token_ids.tolist() == [1, 2, 3, 1, 2, 4]
    assert micro.advantages[micro.trainable].tolist() == [1.0, -0.5]
    assert batch.num_tokens == 2
    assert len(fates[0].rollouts) == 4  # the group keeps its shape


@pytest.mark.parametrize(("limit", "sizes"), [(100, [12]), (7, [5, 7]), (5, [5, 4, 3]), (9, [9, 3]), (3, [5, 4, 3])])
def test_the_limit_cuts_between_sequences(limit: int, sizes: list[int]) -> None:
    """Sequences of 5, 4 and 3 tokens. One that is longer than the limit stands alone."""
    mixed = group(*(rollout(float(n == 1), sampled=[5] * n, index=n) for n in (1, 3, 2)))
    batch, _ = build([mixed], limit)
    assert [len(micro.token_ids) for micro in batch.micro_batches[0]] == sizes


members = st.tuples(st.integers(0, 9), st.sampled_from([None, 0.0, 0.5, 1.0]))


@given(
    shape=st.lists(st.lists(members, min_size=1, max_size=6), max_size=5),
    limit=st.integers(13, 60),
)
@settings(max_examples=80, deadline=None)
def test_nothing_is_lost_or_doubled(shape: list[list[tuple[int, float | None]]], limit: int) -> None:
    """Every sequence carries its own number in its prompt and at its tokens."""
    groups: list[Group] = []
    for order, drawn in enumerate(shape):
        numbers = [100 * order + index for index in range(len(drawn))]
        groups.append(
            group(
                *(
                    rollout(
                        reward, prompt=[number] * 3, sampled=[number + 50] * length, index=index,
                        logprobs=[-float(number)] * length,
                    )
                    for index, ((length, reward), number) in enumerate(zip(drawn, numbers, strict=True))
                ),
                order=order,
            )
        )  # fmt: skip
    batch, fates = build(groups, limit)
    expected = {
        int(member.token_ids[0]): member
        for fate in fates
        if fate.outcome == "trained"
        for member in fate.rollouts
        if member.reward is not None and member.length
    }
    seen = sequences(batch)
    assert sorted(int(micro.token_ids[place.start]) for micro, place in seen) == sorted(expected)
    for micro, place in seen:
        member = expected[int(micro.token_ids[place.start])]
        assert micro.token_ids[place].tolist() == member.token_ids.tolist()
        assert micro.position_ids[place].tolist() == list(range(len(member.token_ids)))
        assert micro.trainable[place].tolist() == member.trainable.tolist()
        assert micro.logprobs[place].tolist() == member.logprobs.tolist()
    assert all(0 < len(micro.token_ids) <= limit for micro in batch.micro_batches[0])
    assert batch.num_tokens == sum(member.length for member in expected.values())
