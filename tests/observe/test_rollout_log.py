"""Rollout files: what is read is what was written, bit for bit."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from engine.observe.metrics import RolloutLog, read_groups
from engine.types import Group, Lease, Message, Rollout, Sampling, Task, encode_array

ARRAYS = {"token_ids": np.int32, "trainable": np.bool_, "logprobs": np.float32}


def group(order: int, text: str = "") -> Group:
    task = Task(
        task_id="sums/7", env="sums", index=7, messages=(Message("user", "2 + 3?"),), answer={"answer": "5"}, seed=1
    )
    sampling = Sampling(temperature=0.7, max_new_tokens=8, stop=("\n",))
    lease = Lease(lease_id=f"l{order}", order=order, task=task, group_size=1, sampling=sampling, served_version=2)
    rollout = Rollout(
        token_ids=np.array([1, 2**31 - 1, -5], dtype=np.int32),
        trainable=np.array([False, True, True]),
        logprobs=np.array([0.0, -0.1, np.nan], dtype=np.float32),
        version_spans=((1, 2), (2, 3)),
        stop_reason="length",
        env="sums",
        lease_id=f"l{order}",
        index_in_group=0,
        seed=2**64 - 1,
        text=text,
        reward=0.1,
        reward_parts={"format": 0.1},
        evidence=b"\x00\xff",
        timings={"generate_s": 0.25},
    )
    return Group(lease=lease, rollouts=(rollout,), admitted_version=2, outcome="stale", reason="too old")


def test_read_inverts_write(tmp_path: Path) -> None:
    written = [group(0, text="line\nend\u2028 \U0001f600 \x00"), group(1)]
    path = RolloutLog(tmp_path).write(12, written)
    assert path == tmp_path / "rollouts" / "step-000012.jsonl.zst"
    read = list(read_groups(path))
    assert len(read) == 2
    for before, after in zip(written, read, strict=True):
        assert msgspec.msgpack.encode(after, enc_hook=encode_array) == msgspec.msgpack.encode(
            before, enc_hook=encode_array
        )
        assert (after.lease, after.outcome, after.reason) == (before.lease, before.outcome, before.reason)
        for name, dtype in ARRAYS.items():
            array = msgspec.structs.asdict(after.rollouts[0])[name]
            assert array.dtype == dtype
            np.testing.assert_array_equal(array, msgspec.structs.asdict(before.rollouts[0])[name])


def test_a_step_without_groups_is_an_empty_file(tmp_path: Path) -> None:
    assert list(read_groups(RolloutLog(tmp_path).write(1, []))) == []


def test_writing_a_step_again_replaces_it_and_leaves_nothing_aside(tmp_path: Path) -> None:
    log = RolloutLog(tmp_path)
    log.write(1, [group(0), group(1)])
    path = log.write(1, [group(2)])
    assert [read.lease.order for read in read_groups(path)] == [2]
    assert list(path.parent.iterdir()) == [path]


def test_a_failed_write_leaves_the_old_file_whole(tmp_path: Path) -> None:
    log = RolloutLog(tmp_path)
    path = log.write(1, [group(0)])
    with pytest.raises(UnicodeEncodeError):
        log.write(1, [group(1), group(2, text="\ud800")])
    assert [read.lease.order for read in read_groups(path)] == [0]
    with pytest.raises(UnicodeEncodeError):
        log.write(2, [group(2, text="\ud800")])
    assert list(path.parent.glob("*.jsonl.zst")) == [path]
