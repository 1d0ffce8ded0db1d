"""What a run writes down: one metrics row per step, events, and every group with its fate.

All logs take the run's folder. Files are flushed at every record, so that a run can be read while it goes on and
after it was killed.
"""

from __future__ import annotations

import io
import math
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, NamedTuple

import msgspec
import numpy as np
import zstandard

from engine.types import Group, Outcome, Rollout, decode_array, encode_array

Value = float | int | str | None
Row = Mapping[str, Value]


class Key(NamedTuple):
    """One column of metrics.jsonl."""

    name: str
    unit: str
    meaning: str


KEYS: tuple[Key, ...] = (
    Key("step", "count", "optimizer attempts so far, this one included"),
    Key("version", "count", "updates applied, after this step"),
    Key("skipped", "text", "why the step changed no weights; null when it did"),
    Key("time_s", "s", "wall time since the run began"),
    Key("reward/mean", "reward", "over every scored rollout that left the buffer, before selection"),
    Key("reward/trained", "reward", "over the scored rollouts of trained groups"),
    Key("reward/std", "reward", "population standard deviation over the rollouts of reward/mean"),
    Key("reward/timeouts", "rollouts", "without a reward because scoring took too long"),
    Key("groups/leased", "groups", "admitted since the previous row"),
    Key("groups/completed", "groups", "that left the buffer once generated: neither cut short nor refused before that"),
    Key("groups/trained", "groups", "trained on, zero-signal ones left out"),
    Key("groups/zero_signal", "groups", "selected, but with equal rewards: no gradient"),
    Key("groups/stale", "groups", "dropped: too old to train on"),
    Key("groups/rejected", "groups", "dropped: the prompt is too long, or a check or verdict refused the group"),
    Key("groups/timed_out", "groups", "dropped: not complete in time"),
    Key("tokens/generated", "tokens", "sampled tokens of all groups that left the buffer"),
    Key("tokens/trained", "tokens", "sampled tokens of the scored rollouts of trained groups"),
    Key("length/leased", "tokens", "mean sampled tokens per rollout, dropped groups included"),
    Key("length/trained", "tokens", "mean sampled tokens per scored rollout of trained groups"),
    Key("length/truncated", "share", "of the rollouts of length/leased, those cut at max_new_tokens"),
    Key("loss", "1", "the loss that was differentiated"),
    Key("grad_norm", "1", "global gradient norm before clipping"),
    Key("lr", "1", "learning rate of this step"),
    Key("entropy", "nats", "mean entropy of the policy at trained tokens"),
    Key("kl/ref", "nats", "policy to reference, per trained token"),
    Key("staleness/mean", "versions", "version before the step minus the oldest token's, over trained groups"),
    Key("staleness/max", "versions", "the largest of them"),
    Key("staleness/in_flight", "versions", "the part of staleness/mean that came while groups were generated"),
    Key("staleness/in_queue", "versions", "the part of staleness/mean that came after their newest token"),
    Key("mismatch/k1", "nats", "behaviour to policy KL, estimator k1"),
    Key("mismatch/k3", "nats", "behaviour to policy KL, estimator k3"),
    Key("mismatch/k3_fresh", "nats", "mismatch/k3 over the tokens of the version before the step"),
    Key("mismatch/k3_stale", "nats", "mismatch/k3 over the tokens of older versions"),
    Key("mismatch/ess", "share", "effective sample size of the importance ratios"),
    Key("mismatch/chi2", "1", "chi-squared divergence of the importance ratios"),
    Key("mismatch/prob_diff", "probability", "mean absolute difference of trainer's and engine's token probability"),
    Key("mismatch/ratio_mean", "1", "mean importance ratio"),
    Key("rule/fraction", "share", "trained tokens that the loss's rule touched"),
    Key("pack/efficiency", "share", "of the micro-batches' token budget, filled"),
    Key("time/step", "s", "wall time since the previous row, or since the first admission"),
    Key("time/wait_rollouts", "s", "trainer waited for groups to be generated"),
    Key("time/wait_stale", "s", "trainer waited for the staleness bound to let a group pass"),
    Key("time/train", "s", "forward, backward and update"),
    Key("time/publish", "s", "bringing the weights to the engines"),
    Key("time/switch", "s", "handing the device from generator to trainer and back"),
    Key("time/eval", "s", "evaluations since the previous row"),
    Key("busy/generator", "share", "of time/step with a request running"),
    Key("busy/trainer", "share", "of time/step inside a training step"),
    Key("loop/lag_p99_ms", "ms", "99th percentile of the event loop's lateness"),
)

FAMILIES: tuple[Key, ...] = (
    Key("reward/<env>", "reward", "reward/mean of one env"),
    Key("share/<env>", "share", "of the trained groups, those of one env"),
    Key("ledger/<env>/<fate>", "groups", "the bias ledger: leased, completed, trained, zero_signal, stale, rejected, "
                                         "timed_out, as groups/... counts them"),
    Key("ledger/<env>/length_<of>", "tokens", "length/leased and length/trained of one env"),
    Key("memory/...", "GiB", "host_peak: the most that the host process ever held; generated, asleep, onloaded, "
        "trained, weights_awake, offloaded, awake: in use of the shared devices at the last switch, after each part of "
        "it"),
    Key("eval/<suite>/<task>", "score",
        "an evaluation's result: the task's first metric, in the row in which it ended"),
)

LEFT_AS: tuple[Outcome, ...] = ("trained", "zero_signal", "stale", "rejected", "timed_out")
"""How a group can leave the buffer."""

_FIXED = tuple(key.name for key in KEYS)
_FAMILY_PREFIXES = tuple(family.name.partition("/")[0] + "/" for family in FAMILIES)


def number(value: Value) -> float | int | None:
    """The value if it is a finite number."""
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def complete_row(row: Row) -> dict[str, Value]:
    """Every fixed key in the order of `KEYS`, then the families' in alphabetical order; null where the row has
    nothing or a number that is not finite.

    Raises:
        ValueError: a key that is neither fixed nor of a family, which is a bug in the caller.
    """
    extra = sorted(row.keys() - set(_FIXED))
    if unknown := [name for name in extra if not name.startswith(_FAMILY_PREFIXES)]:
        raise ValueError(f"no such metric: {', '.join(unknown)}")
    values = {name: row.get(name) for name in (*_FIXED, *extra)}
    return {name: value if isinstance(value, str) else number(value) for name, value in values.items()}


class _JsonLines:
    """One JSON object per line, each written and flushed as a whole."""

    file_name: ClassVar[str]

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / self.file_name).open("ab")

    def _append(self, record: Mapping[str, object]) -> None:
        self._file.write(msgspec.json.encode(record) + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class MetricsLog(_JsonLines):
    """metrics.jsonl: `{"step": 1, "version": 1, "skipped": null, "reward/mean": 0.25, ...}`."""

    file_name = "metrics.jsonl"

    def write(self, row: Row) -> None:
        """Append the row, completed by `complete_row`."""
        self._append(complete_row(row))


class EventLog(_JsonLines):
    """events.jsonl: `{"unix_s": 1767225600.0, "kind": "checkpoint", "step": 10}`."""

    file_name = "events.jsonl"

    def write(self, kind: str, **fields: object) -> None:
        """Append one event, stamped with the wall clock."""
        self._append({"unix_s": time.time(), "kind": kind, **fields})


class RolloutLog:
    """rollouts/step-000001.jsonl.zst: one `Group` per line, arrays as base64 of little-endian bytes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "rollouts"
        self._folder.mkdir(parents=True, exist_ok=True)

    def write(self, step: int, groups: Sequence[Group]) -> Path:
        """Write the step's file, whole or not at all; a file of the same step is replaced."""
        path = self._folder / f"step-{step:06d}.jsonl.zst"
        aside = path.with_name(path.name + ".part")
        with aside.open("wb") as file, zstandard.ZstdCompressor().stream_writer(file, closefd=False) as lines:
            for group in groups:
                lines.write(msgspec.json.encode(group, enc_hook=encode_array) + b"\n")
        os.replace(aside, path)
        return path


def read_groups(path: Path) -> Iterator[Group]:
    """The groups that `RolloutLog.write` put into the file, in order; their arrays are read-only."""
    decoder = msgspec.json.Decoder(Group, dec_hook=decode_array)
    with path.open("rb") as file, zstandard.ZstdDecompressor().stream_reader(file) as plain:
        for line in io.BufferedReader(plain):
            yield decoder.decode(line)


class _Member(NamedTuple):
    """One index of a group: its branches share one reward and have one vote."""

    reward: float | None
    timed_out: bool
    length: int
    truncated: bool


def _members(group: Group) -> list[_Member]:
    branches: dict[int, list[Rollout]] = {}
    for rollout in group.rollouts:
        branches.setdefault(rollout.index_in_group, []).append(rollout)
    return [_member(rollouts) for rollouts in branches.values()]


def _member(branches: Sequence[Rollout]) -> _Member:
    reward = next((rollout.reward for rollout in branches if rollout.reward is not None), None)
    return _Member(
        reward=reward,
        timed_out=reward is None and any("timed_out" in rollout.reward_parts for rollout in branches),
        length=sum(rollout.length for rollout in branches),
        truncated=any(rollout.stop_reason == "length" for rollout in branches),
    )


def _rewards(members: Sequence[_Member]) -> list[float]:
    return [member.reward for member in members if member.reward is not None]


def group_metrics(left: Sequence[Group], *, version_before: int, envs: Sequence[str]) -> dict[str, Value]:
    """The row's share that the groups decide, from those that left the buffer (selected or dropped) since the
    previous row. `version_before` is the version before the step; every env of `envs` gets its keys in every row.

    Counts and sums over nothing are 0; means, maxima and shares over nothing are null.

    Raises:
        ValueError: a group is still `completed`, so it has not left; or an env is called like a fixed key.
    """
    fates = Counter(group.outcome for group in left)
    if fates["completed"]:
        raise ValueError("a group without a fate has not left the buffer")
    if taken := [env for env in envs if f"reward/{env}" in _FIXED]:
        raise ValueError(f"env {taken[0]!r} would hide the metric reward/{taken[0]}")
    everyone = [member for group in left for member in _members(group)]
    scored = _rewards(everyone)
    learned_from = _learned_from(left)
    trained = [group for group in left if group.outcome == "trained"]
    staleness = [version_before - group.oldest_version() for group in trained]
    by_env = {env: [group for group in left if group.lease.task.env == env] for env in envs}
    return {
        "reward/mean": _mean(scored),
        "reward/trained": _mean(_rewards(learned_from)),
        "reward/std": float(np.std(scored)) if scored else None,
        "reward/timeouts": sum(member.timed_out for member in everyone),
        "groups/completed": _completed(left),
        **{f"groups/{fate}": fates[fate] for fate in LEFT_AS},
        "tokens/generated": sum(member.length for member in everyone),
        "tokens/trained": sum(member.length for member in learned_from),
        "length/leased": _mean([member.length for member in everyone]),
        "length/trained": _mean([member.length for member in learned_from]),
        "length/truncated": _mean([member.truncated for member in everyone]),
        "staleness/mean": _mean(staleness),
        "staleness/max": max(staleness, default=None),
        "staleness/in_flight": _mean([group.newest_version() - group.oldest_version() for group in trained]),
        "staleness/in_queue": _mean([version_before - group.newest_version() for group in trained]),
        **{
            key: value
            for env, groups in by_env.items()
            for key, value in _env_metrics(groups, fates["trained"], env).items()
        },
    }


def _env_metrics(left: Sequence[Group], num_trained: int, env: str) -> dict[str, Value]:
    """One env's reward, share and line of the bias ledger, from its groups; but for how many were leased."""
    fates = Counter(group.outcome for group in left)
    everyone = [member for group in left for member in _members(group)]
    learned_from = _learned_from(left)
    return {
        f"reward/{env}": _mean(_rewards(everyone)),
        f"share/{env}": fates["trained"] / num_trained if num_trained else None,
        f"ledger/{env}/completed": _completed(left),
        **{f"ledger/{env}/{fate}": fates[fate] for fate in LEFT_AS},
        f"ledger/{env}/length_leased": _mean([member.length for member in everyone]),
        f"ledger/{env}/length_trained": _mean([member.length for member in learned_from]),
    }


def _completed(left: Sequence[Group]) -> int:
    whole = (group for group in left if all(rollout.stop_reason != "error" for rollout in group.rollouts))
    return sum(bool(group.rollouts) and group.outcome != "timed_out" for group in whole)


def _learned_from(left: Sequence[Group]) -> list[_Member]:
    trained = (group for group in left if group.outcome == "trained")
    return [member for group in trained for member in _members(group) if member.reward is not None]


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None
