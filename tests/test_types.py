"""The structs survive the wire and the files with the dtypes of their fields, refuse bad payloads, and are frozen."""

from __future__ import annotations

import base64
from typing import Any

import msgspec
import numpy as np
import pytest

from engine import types
from engine.types import (
    Group,
    Lease,
    Message,
    MicroBatch,
    Rollout,
    Sampling,
    Segment,
    SegmentRequest,
    Task,
    decode_array,
    encode_array,
)

TASK = Task(
    task_id="sums/7",
    env="sums",
    index=7,
    messages=(Message("system", "Answer."), Message("user", "What is 2 + 3?")),
    answer={"answer": "5", "bounds": [1, 2.5, None]},
    seed=1,
)
LEASE = Lease(
    lease_id="l1",
    order=3,
    task=TASK,
    group_size=2,
    sampling=Sampling(temperature=1.0, max_new_tokens=8, stop=("\n",)),
    served_version=4,
)
ROLLOUT = Rollout(
    token_ids=np.array([5, 70_000, 1], dtype=np.int32),
    trainable=np.array([False, True, True]),
    logprobs=np.array([0.0, -0.25, -1e-8], dtype=np.float32),
    version_spans=((1, 4), (2, 5)),
    stop_reason="stop",
    env="sums",
    lease_id="l1",
    index_in_group=0,
    seed=11,
    evidence=b"\x00\xff",
)


def arrays(struct: msgspec.Struct) -> dict[str, np.ndarray]:
    fields = ((name, getattr(struct, name)) for name in struct.__struct_fields__)
    return {name: value for name, value in fields if isinstance(value, np.ndarray)}


def round_trip(struct: Any, form: str) -> Any:
    codec = msgspec.msgpack if form == "msgpack" else msgspec.json
    return codec.decode(codec.encode(struct, enc_hook=encode_array), type=type(struct), dec_hook=decode_array)


@pytest.mark.parametrize("form", ["msgpack", "json"])
@pytest.mark.parametrize(
    "struct",
    [
        ROLLOUT,
        SegmentRequest(
            request_id="r", token_ids=np.array([3, 4], dtype=np.int32), max_new_tokens=2, temperature=1.0, seed=2**63
        ),
        Segment(
            token_ids=np.array([], dtype=np.int32),
            logprobs=np.array([], dtype=np.float32),
            version_spans=(),
            ended="interrupted",
        ),
        MicroBatch(
            token_ids=np.array([1, 2, 3], dtype=np.int32),
            position_ids=np.array([0, 1, 0], dtype=np.int32),
            cu_seqlens=np.array([0, 2, 3], dtype=np.int32),
            trainable=np.array([True, False, True]),
            logprobs=np.array([-1, 0, -2], dtype=np.float32),
            advantages=np.array([0.5, 0, -0.5], dtype=np.float32),
            weights=np.array([0.5, 0, 0.5], dtype=np.float32),
            staleness=np.array([1, 1, 0], dtype=np.int32),
        ),
    ],
    ids=lambda struct: type(struct).__name__,
)
def test_arrays_come_back_with_their_values_and_dtypes(struct: msgspec.Struct, form: str) -> None:
    back = round_trip(struct, form)
    assert arrays(back).keys() == arrays(struct).keys()
    for name, sent in arrays(struct).items():
        received = arrays(back)[name]
        assert received.dtype == sent.dtype
        assert received.tolist() == sent.tolist()
        assert not received.flags.writeable
    for name in set(struct.__struct_fields__) - arrays(struct).keys():
        assert getattr(back, name) == getattr(struct, name)


@pytest.mark.parametrize("form", ["msgpack", "json"])
def test_nested_structs_come_back_whole(form: str) -> None:
    group = Group(lease=LEASE, rollouts=(ROLLOUT, ROLLOUT), admitted_version=4, outcome="stale", reason="too old")
    back = round_trip(group, form)
    assert back.lease == LEASE
    assert (back.admitted_version, back.outcome, back.reason) == (4, "stale", "too old")
    assert [rollout.token_ids.tolist() for rollout in back.rollouts] == [[5, 70_000, 1]] * 2


def test_arrays_are_little_endian_bytes() -> None:
    assert encode_array(np.array([1, 256], dtype=np.int32)) == b"\x01\x00\x00\x00\x00\x01\x00\x00"
    assert encode_array(np.array([1, 256], dtype=">i4")) == b"\x01\x00\x00\x00\x00\x01\x00\x00"
    assert encode_array(np.array([True, False])) == b"\x01\x00"
    # 1.0 is 0x3f800000.
    assert encode_array(np.array([1.0], dtype=np.float32)) == b"\x00\x00\x80\x3f"
    with pytest.raises(NotImplementedError, match="object"):
        encode_array(object())


GOOD = {"token_ids": b"\x01\x00\x00\x00", "logprobs": b"\x00\x00\x00\x00", "version_spans": [[0, 0]], "ended": "stop"}


@pytest.mark.parametrize(
    "wrong",
    [
        {"token_ids": b"\x01\x00\x00"},
        {"token_ids": [1, 2]},
        {"token_ids": 1},
        {"token_ids": None},
        {"token_ids": "not base64!"},
        {"logprobs": b"\x00\x00\x00\x00\x00"},
        {"version_spans": [[0]]},
        {"version_spans": [["0", 0]]},
        {"ended": "paused"},
    ],
    ids=str,
)
def test_wrong_payloads_are_validation_errors(wrong: dict[str, Any]) -> None:
    def as_json(value: object) -> object:
        return base64.b64encode(value).decode() if isinstance(value, bytes) else value

    payload = GOOD | wrong
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(payload), type=Segment, dec_hook=decode_array)
    text = msgspec.json.encode({name: as_json(value) for name, value in payload.items()})
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(text, type=Segment, dec_hook=decode_array)


def test_every_struct_is_frozen() -> None:
    structs = [value for value in vars(types).values() if isinstance(value, type) and issubclass(value, msgspec.Struct)]
    assert {"Task", "Lease", "Rollout", "Group", "Verdict", "Batch", "Version"} <= {kind.__name__ for kind in structs}
    for kind in structs:
        assert kind.__struct_config__.frozen, kind
    with pytest.raises(AttributeError):
        TASK.seed = 2  # type: ignore[misc]


def test_length_counts_sampled_tokens_and_versions_are_the_smallest_and_the_largest() -> None:
    group = Group(lease=LEASE, rollouts=(ROLLOUT,), admitted_version=3)
    assert ROLLOUT.length == 2
    assert (group.oldest_version(), group.newest_version()) == (4, 5)
    empty = Group(lease=LEASE, rollouts=(), admitted_version=3)
    assert (empty.oldest_version(), empty.newest_version()) == (3, 3)


@pytest.mark.parametrize(
    ("reward", "parts", "right"),
    [
        (1.0, {}, True), (0.99, {}, False), (None, {}, False),
        (0.9, {"exact": 1.0, "length": -0.1}, True),
        (1.2, {"exact": 0.0, "letters": 1.0}, False),
        (0.5, {"exact": 0.0, "math": 1.0}, True),
        (None, {"exact": 1.0}, False),
    ],
)  # fmt: skip
def test_right_goes_by_the_answer_and_not_by_what_else_is_rewarded(
    reward: float | None, parts: dict[str, float], right: bool
) -> None:
    assert msgspec.structs.replace(ROLLOUT, reward=reward, reward_parts=parts).right == right


def test_every_token_has_its_spans_version() -> None:
    """Five tokens, two of the prompt; version 3 from place 2, version 4 from place 4."""
    made = msgspec.structs.replace(ROLLOUT, token_ids=np.arange(5, dtype=np.int32), version_spans=((2, 3), (4, 4)))
    assert made.token_versions().tolist() == [3, 3, 3, 3, 4]
