"""Pipeline structs and configurations made by hand, for any test."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from engine.algorithms.advantage import Estimator
from engine.config import Config
from engine.train.pack import Aggregation, Packing
from engine.types import Group, Lease, Message, Outcome, Rollout, Sampling, StopReason, Task


def config(**sections: dict[str, Any]) -> Config:
    """Five float32 steps of one task, `sums`; each section given replaces some of its keys."""
    tables: dict[str, Any] = {
        "run": {"steps": 5},
        "model": {"path": "tiny-random", "dtype": "float32"},
        "train": {"dtype": "float32"},
        "observe": {"terminal": "off", "tensorboard": False},
    }
    for name, keys in sections.items():
        tables[name] = tables.get(name, {}) | keys
    return msgspec.convert(tables | {"tasks": [{"env": "jsonl", "name": "sums"}]}, Config)


def task(index: int = 0, *, content: str = "2 + 3?", env: str = "sums") -> Task:
    return Task(
        task_id=f"{env}/{index}",
        env=env,
        index=index,
        messages=(Message("user", content),),
        answer={"answer": "5"},
        seed=index,
    )


def lease(
    order: int = 0,
    *,
    of: Task | None = None,
    group_size: int = 2,
    max_new_tokens: int = 8,
    temperature: float = 1.0,
    stop: tuple[str, ...] = (),
    served_version: int = 0,
) -> Lease:
    return Lease(
        lease_id=f"{order:07d}",
        order=order,
        task=of or task(order),
        group_size=group_size,
        sampling=Sampling(temperature=temperature, max_new_tokens=max_new_tokens, stop=stop),
        served_version=served_version,
    )


def rollout(
    reward: float | None,
    *,
    prompt: Sequence[int] = (1, 2),
    sampled: Sequence[int] = (3,),
    logprobs: Sequence[float] | None = None,
    index: int = 0,
    version: int = 0,
    stop_reason: StopReason = "stop",
    text: str = "",
    reward_parts: dict[str, float] | None = None,
) -> Rollout:
    """`logprobs` are the sampled tokens'; -1 each when not given."""
    behaviour = [-1.0] * len(sampled) if logprobs is None else list(logprobs)
    return Rollout(
        token_ids=np.asarray([*prompt, *sampled], np.int32),
        trainable=np.asarray([False] * len(prompt) + [True] * len(sampled)),
        logprobs=np.asarray([0.0] * len(prompt) + behaviour, np.float32),
        version_spans=((len(prompt), version),) if sampled else (),
        stop_reason=stop_reason,
        env="sums",
        lease_id="0000000",
        index_in_group=index,
        seed=index,
        text=text,
        reward=reward,
        reward_parts=reward_parts or {},
    )


def group(*rollouts: Rollout, order: int = 0, outcome: Outcome = "completed", admitted_version: int = 0) -> Group:
    made_by = lease(order, group_size=len(rollouts), served_version=admitted_version)
    return Group(lease=made_by, rollouts=rollouts, admitted_version=admitted_version, outcome=outcome)


def packing(
    *, estimator: Estimator = "leave_one_out", aggregation: Aggregation = "token_mean", micro_batch_tokens: int = 1000,
    temperature: float = 1.0, ranks: int = 1, max_new_tokens: int = 10,
) -> Packing:
    return Packing(
        estimator=estimator, aggregation=aggregation, micro_batch_tokens=micro_batch_tokens, temperature=temperature,
        ranks=ranks, max_new_tokens=max_new_tokens,
    )
