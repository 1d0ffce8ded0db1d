"""Groups to micro-batches: every sequence once, cut by hand."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hand_made import group, packing, rollout
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from engine.train.pack import Aggregation, build_batch, supervised_batch
from engine.types import Batch, Group, MicroBatch, Rollout


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


def numbered(*lengths: int) -> Group:
    """One rollout of each length, all with a signal, its number + 10 at its first place: three untrained tokens."""
    return group(*(
        rollout(float(index % 2), prompt=[10 + index, 1, 1], sampled=[5] * length, index=index)
        for index, length in enumerate(lengths)
    ))  # fmt: skip


def weights(batch: Batch) -> dict[int, float]:
    """The weight of the tokens of each sequence, by its first token; all ranks together."""
    found: dict[int, float] = {}
    for micro in itertools.chain(*batch.micro_batches):
        for start, end in itertools.pairwise(micro.cu_seqlens.tolist()):
            (weight,) = {*micro.weights[start:end].tolist()}
            assert found.setdefault(int(micro.token_ids[start]), weight) == weight
    return found


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token_mean", [1 / 10] * 4),  # 10 tokens
        ("prompt_mean", [1 / 8, 1 / 8, 1 / 12, 1 / 12]),  # 2 groups, of 4 and of 6 tokens
        ("sequence_mean", [1 / 4, 1 / 12, 1 / 8, 1 / 16]),  # 4 rollouts, of 1, 3, 2 and 4 tokens
        ("constant", [1 / 70] * 4),  # 7 rollouts, what is left out counted too, of 10 tokens at most
    ],
)
def test_weights_by_hand(aggregation: Aggregation, expected: list[float]) -> None:
    one = group(
        rollout(1.0, prompt=[10], sampled=[5]),
        rollout(0.0, prompt=[11], sampled=[5] * 3, index=1),
        rollout(None, prompt=[20], sampled=[5] * 4, index=2),
    )
    flat = group(*(rollout(0.5, prompt=[21 + index], sampled=[5] * 5, index=index) for index in range(2)))
    two = group(rollout(1.0, prompt=[12], sampled=[5] * 2), rollout(0.0, prompt=[13], sampled=[5] * 4, index=1))
    batch, _ = build_batch([one, flat, two], packing(aggregation=aggregation), version=0)
    assert weights(batch) == pytest.approx(dict(zip([10, 11, 12, 13], expected, strict=True)))
    ((micro,),) = batch.micro_batches
    if aggregation != "constant":
        assert micro.weights[micro.trainable].sum() == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("lengths", "ranks", "expected"),
    [
        # Longest first, each to who has least: 8 5 3 2 and 7 6 4 1.
        ((8, 7, 6, 5, 4, 3, 2, 1), 2, [18, 18]),
        # 7 | 6 | 5, then 4 to 5, 3 to 6, 2 to 7, 1 to whoever is first.
        ((1, 2, 3, 4, 5, 6, 7), 3, [9, 9, 10]),
        # With attention, 4,096 tokens are as much work as six and a half times 1,024.
        ((4096, 1024, 1024, 1024, 1024, 1024, 1024), 2, [4096, 6144]),
    ],
)
def test_ranks_get_a_like_amount_of_work(lengths: tuple[int, ...], ranks: int, expected: list[int]) -> None:
    chats = [rollout(None, prompt=[], sampled=[5] * length) for length in lengths]
    batch = supervised_batch(chats, packing(ranks=ranks, micro_batch_tokens=10_000))
    assert sorted(sum(len(micro.token_ids) for micro in rank) for rank in batch.micro_batches) == expected


@given(lengths=st.lists(st.integers(1, 30), min_size=2, max_size=25), limit=st.integers(33, 80))
@settings(max_examples=50, deadline=None)
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_share_the_sequences(ranks: int, lengths: list[int], limit: int) -> None:
    """Every sequence is at one rank, once, with the weight that it has on one rank; all have as many micro-batches,
    and differ by no more than one sequence's work."""
    settled = packing(ranks=ranks, micro_batch_tokens=limit, aggregation="sequence_mean")
    batch, _ = build_batch([numbered(*lengths)], settled, version=0)
    alone, _ = build_batch([numbered(*lengths)], replace(settled, ranks=1), version=0)
    assert len(batch.micro_batches) == ranks
    assert len({len(rank) for rank in batch.micro_batches}) == 1
    assert (batch.num_tokens, alone.num_tokens) == (sum(lengths),) * 2
    first = [
        int(micro.token_ids[start])
        for micro in itertools.chain(*batch.micro_batches)
        for start in micro.cu_seqlens[:-1].tolist()
        if micro.trainable.any()
    ]
    assert sorted(first) == [10 + index for index in range(len(lengths))]
    assert {number: weight for number, weight in weights(batch).items() if number} == weights(alone)
    tokens = [sum(len(micro.token_ids) for micro in rank) for rank in batch.micro_batches]
    assert max(tokens) - min(tokens) <= max(lengths) + 3
    assert all(len(micro.token_ids) <= limit for rank in batch.micro_batches for micro in rank)


def test_a_rank_without_a_sequence_gets_one_token_that_weighs_nothing() -> None:
    batch = supervised_batch([rollout(None, prompt=[1], sampled=[5, 5])], packing(ranks=3))
    (full,), (empty,), (other,) = batch.micro_batches
    assert full.token_ids.tolist() == [1, 5, 5]
    for micro in (empty, other):
        assert (micro.trainable.tolist(), micro.weights.tolist(), micro.cu_seqlens.tolist()) == ([False], [0.0], [0, 1])
        for name in MicroBatch.__struct_fields__:
            assert getattr(micro, name).dtype == getattr(full, name).dtype


def test_staleness_is_each_tokens_own() -> None:
    """Version 6 before the step; what stands before the first span has its version, but is not trained on."""
    spread = replace(rollout(1.0, sampled=[3, 4, 5]), version_spans=((2, 3), (4, 5)))
    other = rollout(0.0, sampled=[6], index=1, version=6)
    batch, _ = build_batch([group(spread, other)], packing(), version=6)
    ((micro,),) = batch.micro_batches
    assert micro.staleness[micro.trainable].tolist() == [3, 3, 1, 0]
    assert micro.staleness.dtype == np.int32


def chat(*trainable: int) -> Rollout:
    """Nobody sampled it: no log-probs, no versions."""
    plain = rollout(None, prompt=[], sampled=[5] * len(trainable), logprobs=[0.0] * len(trainable))
    return replace(plain, trainable=np.asarray(trainable, np.bool_), version_spans=())


@pytest.mark.parametrize(
    ("aggregation", "short", "long"),
    [
        ("token_mean", 1 / 4, 1 / 4),
        ("prompt_mean", 1 / 2, 1 / 6),
        ("sequence_mean", 1 / 2, 1 / 6),
        ("constant", 1 / 20, 1 / 20),
    ],
)
def test_chats_make_a_batch_too(aggregation: Aggregation, short: float, long: float) -> None:
    """A turn of one token, and two of one and two, whatever stands between; the temperature is not sampling's."""
    chats = [chat(0, 1), chat(0, 1, 0, 1, 1)]
    batch = supervised_batch(chats, packing(aggregation=aggregation, temperature=0.6))
    ((micro,),) = batch.micro_batches
    assert (batch.num_tokens, batch.temperature) == (4, 1.0)
    assert micro.cu_seqlens.tolist() == [0, 5, 7]
    assert micro.trainable.tolist() == [bool(flag) for flag in (0, 1, 0, 1, 1, 0, 1)]
    assert micro.advantages[micro.trainable].tolist() == [1.0] * 4
    assert micro.weights[micro.trainable].tolist() == pytest.approx([long, long, long, short])
    assert micro.staleness.tolist() == [0] * 7
