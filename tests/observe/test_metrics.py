"""Rows worked out by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from engine.observe.metrics import FAMILIES, KEYS, EventLog, MetricsLog, complete_row, group_metrics
from engine.types import Group, Lease, Message, Outcome, Rollout, Sampling, StopReason, Task

DESIGN_KEYS = [
    "step", "version", "skipped", "time_s", "reward/mean", "reward/trained", "reward/std", "reward/timeouts",
    "groups/leased", "groups/completed", "groups/trained", "groups/zero_signal", "groups/stale", "groups/rejected",
    "groups/timed_out", "tokens/generated", "tokens/trained", "length/leased", "length/trained", "length/truncated",
    "loss", "grad_norm", "lr", "entropy", "kl/ref", "staleness/mean", "staleness/max", "staleness/in_flight",
    "staleness/in_queue", "mismatch/k1", "mismatch/k3", "mismatch/k3_fresh", "mismatch/k3_stale", "mismatch/ess",
    "mismatch/chi2", "mismatch/prob_diff", "mismatch/ratio_mean", "rule/fraction", "pack/efficiency",
    "time/step", "time/wait_rollouts", "time/wait_stale", "time/train", "time/publish", "time/switch", "time/eval",
    "busy/generator", "busy/trainer", "loop/lag_p99_ms",
]  # fmt: skip


def rollout(
    reward: float | None,
    *,
    index: int = 0,
    sampled: int = 1,
    prompt: int = 2,
    stop_reason: StopReason = "stop",
    version: int = 0,
    branch: int = 0,
    timed_out: bool = False,
) -> Rollout:
    length = prompt + sampled
    return Rollout(
        token_ids=np.arange(length, dtype=np.int32),
        trainable=np.arange(length) >= prompt,
        logprobs=np.zeros(length, dtype=np.float32),
        version_spans=((prompt, version),),
        stop_reason=stop_reason,
        env="sums",
        lease_id="lease",
        index_in_group=index,
        seed=0,
        branch=branch,
        reward=reward,
        reward_parts={"timed_out": 1.0} if timed_out else {},
    )


def group(outcome: Outcome, *rollouts: Rollout, env: str = "sums") -> Group:
    task = Task(task_id=f"{env}/0", env=env, index=0, messages=(Message("user", "?"),), answer={}, seed=0)
    lease = Lease(
        lease_id="lease",
        order=0,
        task=task,
        group_size=len(rollouts),
        sampling=Sampling(temperature=1.0, max_new_tokens=8),
        served_version=0,
    )
    return Group(lease=lease, rollouts=rollouts, admitted_version=0, outcome=outcome)


def test_keys_are_the_designs_in_its_order() -> None:
    assert [key.name for key in KEYS] == DESIGN_KEYS
    assert [family.name for family in FAMILIES] == [
        "reward/<env>", "share/<env>", "ledger/<env>/<fate>", "ledger/<env>/length_<of>", "memory/...",
        "eval/<suite>/<task>",
    ]  # fmt: skip


def test_a_row_has_every_key_in_order_and_null_for_what_is_not_finite(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    log.write({"eval/b/t": 0.5, "loss": math.nan, "grad_norm": math.inf, "step": 1, "skipped": "loss", "memory/a": 2.0})
    line = (tmp_path / "metrics.jsonl").read_text()  # before close: flushed
    log.close()
    row = json.loads(line)
    assert list(row) == [*DESIGN_KEYS, "eval/b/t", "memory/a"]
    given = {"step": 1, "skipped": "loss", "eval/b/t": 0.5, "memory/a": 2.0}
    assert {name: value for name, value in row.items() if value is not None} == given


def test_a_log_opened_again_appends(tmp_path: Path) -> None:
    for step in (1, 2):
        log = MetricsLog(tmp_path)
        log.write({"step": step})
        log.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]


@pytest.mark.parametrize("name", ["losss", "time/stepp", "rewards/mean", "eval"])
def test_an_unknown_key_is_a_bug(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        complete_row({"step": 1, name: 1.0})


def test_events_carry_the_wall_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 12.5)
    log = EventLog(tmp_path)
    log.write("checkpoint", step=3, path="x")
    text = (tmp_path / "events.jsonl").read_text()
    log.close()
    assert json.loads(text) == {"unix_s": 12.5, "kind": "checkpoint", "step": 3, "path": "x"}


def test_one_rollout_one_vote() -> None:
    """Groups of 1 and 3: the mean over rollouts is 1/4, the mean of the groups' means would be 1/2."""
    left = [
        group("trained", rollout(1.0, sampled=9)),
        group("trained", *(rollout(0.0, index=index) for index in range(3))),
    ]
    row = group_metrics(left, version_before=0, envs=["sums"])
    assert row["reward/mean"] == 0.25
    assert row["reward/trained"] == 0.25
    assert row["reward/std"] == pytest.approx(math.sqrt(3) / 4)  # variance 1/4 * 3/4


def test_dropped_groups_count_before_selection_only() -> None:
    left = [
        group("trained", rollout(1.0, sampled=4), rollout(0.0, index=1, sampled=2)),
        group("stale", rollout(1.0, sampled=6), rollout(1.0, index=1, sampled=8, stop_reason="length")),
        group("zero_signal", rollout(0.0, sampled=1), rollout(0.0, index=1, sampled=1)),
        group("rejected", rollout(None, sampled=3)),
        group("rejected"),  # before it was generated
        group("timed_out", rollout(None, sampled=5)),
    ]
    row = group_metrics(left, version_before=0, envs=["sums"])
    assert row == {
        "reward/mean": 0.5,  # 1 0 1 1 0 0
        "reward/trained": 0.5,  # 1 0
        "reward/std": 0.5,
        "reward/timeouts": 0,
        "groups/completed": 4,
        "groups/trained": 1,
        "groups/zero_signal": 1,
        "groups/stale": 1,
        "groups/rejected": 2,
        "groups/timed_out": 1,
        "tokens/generated": 30,
        "tokens/trained": 6,
        "length/leased": 3.75,  # 30 over 8
        "length/trained": 3.0,
        "length/truncated": 0.125,
        "staleness/mean": 0.0,
        "staleness/max": 0,
        "staleness/in_flight": 0.0,
        "staleness/in_queue": 0.0,
        "reward/sums": 0.5,
        "share/sums": 1.0,
        "ledger/sums/completed": 4,
        "ledger/sums/trained": 1,
        "ledger/sums/zero_signal": 1,
        "ledger/sums/stale": 1,
        "ledger/sums/rejected": 2,
        "ledger/sums/timed_out": 1,
        "ledger/sums/length_leased": 3.75,
        "ledger/sums/length_trained": 3.0,
    }


def test_a_rollout_without_a_reward_is_no_zero() -> None:
    left = [group("trained", rollout(1.0, sampled=2), rollout(None, index=1, sampled=10, timed_out=True),
                  rollout(None, index=2, sampled=6, stop_reason="error"))]  # fmt: skip
    row = group_metrics(left, version_before=0, envs=["sums"])
    assert row["reward/mean"] == row["reward/trained"] == 1.0
    assert row["reward/timeouts"] == 1
    assert (row["tokens/generated"], row["tokens/trained"]) == (18, 2)
    assert (row["length/leased"], row["length/trained"]) == (6.0, 2.0)


def test_branches_of_one_member_have_one_vote() -> None:
    branches = (rollout(1.0, sampled=3), rollout(1.0, branch=1, sampled=5))
    row = group_metrics([group("trained", *branches, rollout(0.0, index=1))], version_before=0, envs=["sums"])
    assert row["reward/mean"] == 0.5
    assert row["length/leased"] == 4.5  # 3 + 5 and 1


def test_envs_and_staleness() -> None:
    left = [
        group("trained", rollout(1.0, version=3), rollout(0.0, index=1, version=5)),
        group("trained", rollout(0.5, version=4), env="words"),
        group("trained", rollout(0.5, version=5), env="words"),
        group("stale", rollout(0.0, version=0), env="words"),
    ]
    row = group_metrics(left, version_before=5, envs=["sums", "words", "logic"])
    assert row["reward/sums"] == 0.5
    assert row["reward/words"] == pytest.approx(1 / 3)
    assert row["reward/logic"] is None
    assert (row["share/sums"], row["share/words"], row["share/logic"]) == (1 / 3, 2 / 3, 0.0)
    assert (row["staleness/mean"], row["staleness/max"]) == (1.0, 2)  # 2, 1 and 0; the dropped group's 5 is not in it
    # The first group was made by versions 3 to 5, the second waited through one.
    assert (row["staleness/in_flight"], row["staleness/in_queue"]) == (pytest.approx(2 / 3), pytest.approx(1 / 3))


def test_nothing_left_is_null_where_there_is_no_mean() -> None:
    row = group_metrics([], version_before=3, envs=["sums"])
    counts = {name for name, value in row.items() if value == 0}
    nulls = {name for name, value in row.items() if value is None}
    assert counts == {"reward/timeouts", "tokens/generated", "tokens/trained"} | {
        f"{place}/{fate}"
        for place in ("groups", "ledger/sums")
        for fate in ("completed", "trained", "zero_signal", "stale", "rejected", "timed_out")
    }
    assert nulls == set(row) - counts
    complete_row(row)


def test_a_group_without_a_fate_has_not_left() -> None:
    with pytest.raises(ValueError, match="fate"):
        group_metrics([group("completed", rollout(1.0))], version_before=0, envs=["sums"])


def test_an_env_cannot_hide_a_fixed_metric() -> None:
    with pytest.raises(ValueError, match="reward/mean"):
        group_metrics([], version_before=0, envs=["mean"])
