"""ReplayGenerator: recorded rollouts come back token by token, anything else is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest

from engine.clock import run_virtual
from engine.errors import GenerationError
from engine.generate.replay import ReplayGenerator
from engine.observe.metrics import RolloutLog
from engine.protocols import Generator
from engine.types import Group, Lease, Message, Rollout, Sampling, Segment, SegmentRequest, StopReason, Task

PROMPT = (7, 8, 9)

_conforms: Callable[[list[Group]], Generator] = ReplayGenerator


def rollout(*completion: int, seed: int, stop_reason: StopReason = "stop", prompt: tuple[int, ...] = PROMPT) -> Rollout:
    """Its first new token came from version 2, the others from 3; the log-prob of the i-th is -i - 1."""
    made = len(completion)
    return Rollout(
        token_ids=np.array([*prompt, *completion], dtype=np.int32),
        trainable=np.array([False] * len(prompt) + [True] * made),
        logprobs=np.array([0.0] * len(prompt) + [-1.0 - i for i in range(made)], dtype=np.float32),
        version_spans=((len(prompt), 2), (len(prompt) + 1, 3)),
        stop_reason=stop_reason,
        env="sums",
        lease_id="l0",
        index_in_group=0,
        seed=seed,
    )


def group(*rollouts: Rollout) -> Group:
    task = Task(task_id="sums/0", env="sums", index=0, messages=(Message("user", "?"),), answer={}, seed=0)
    lease = Lease(
        lease_id="l0",
        order=0,
        task=task,
        group_size=2,
        sampling=Sampling(temperature=1.0, max_new_tokens=8),
        served_version=2,
    )
    return Group(lease=lease, rollouts=rollouts, admitted_version=2, outcome="trained")


def request(seed: int, prompt: tuple[int, ...] = PROMPT, max_new_tokens: int = 8) -> SegmentRequest:
    return SegmentRequest(
        request_id=f"sums/0#{seed}",
        token_ids=np.array(prompt, dtype=np.int32),
        max_new_tokens=max_new_tokens,
        temperature=1.0,
        seed=seed,
    )


def ask(replay: ReplayGenerator, sent: SegmentRequest) -> Segment:
    return run_virtual(replay.generate(sent))


def test_a_request_gets_the_recorded_completion_from_the_run_folder(tmp_path: Path) -> None:
    log = RolloutLog(tmp_path)
    log.write(1, [group(rollout(1, 2, 3, seed=10), rollout(4, 5, seed=11, stop_reason="length"))])
    log.write(2, [group(rollout(6, 0, seed=12))])
    replay = ReplayGenerator.from_run(tmp_path)

    first = ask(replay, request(10))
    assert first.token_ids.dtype == np.int32
    assert first.token_ids.tolist() == [1, 2, 3]
    assert first.logprobs.tolist() == [-1.0, -2.0, -3.0]
    assert first.version_spans == ((0, 2), (1, 3))
    assert first.ended == "stop"
    assert ask(replay, request(11)).ended == "length"
    assert ask(replay, request(12)).token_ids.tolist() == [6, 0]


@pytest.mark.parametrize("sent", [request(99), request(10, prompt=(7, 8))])
def test_what_was_not_recorded_is_refused_with_a_remedy(sent: SegmentRequest) -> None:
    replay = ReplayGenerator([group(rollout(1, seed=10))])
    with pytest.raises(GenerationError, match=r"(?s)'sums/0#\d+' \(seed \d+, \d tokens\).*run\.seed, tasks and model"):
        ask(replay, sent)


def test_a_smaller_budget_than_recorded_is_refused() -> None:
    replay = ReplayGenerator([group(rollout(1, 2, 3, seed=10))])
    with pytest.raises(GenerationError, match=r"(?s)room for 2 new tokens.* made 3\n.*generate\.max_new_tokens"):
        ask(replay, request(10, max_new_tokens=2))


def test_a_question_asked_again_is_answered_in_the_recorded_order() -> None:
    replay = ReplayGenerator([group(rollout(1, seed=10)), group(rollout(2, seed=10))])
    assert [ask(replay, request(10)).token_ids.tolist() for _ in range(3)] == [[1], [2], [2]]


def test_failed_and_empty_members_have_no_answer() -> None:
    replay = ReplayGenerator([group(rollout(1, seed=10, stop_reason="error"), rollout(seed=11))])
    for seed in (10, 11):
        with pytest.raises(GenerationError, match="not in the recorded run"):
            ask(replay, request(seed))


def test_rollouts_of_several_stretches_are_refused() -> None:
    # A prompt token (not trainable) follows the first sampled one.
    trainable = np.array([False, True, False, True])
    two_turns = Rollout(
        token_ids=np.arange(4, dtype=np.int32),
        trainable=trainable,
        logprobs=np.zeros(4, dtype=np.float32),
        version_spans=((1, 0),),
        stop_reason="stop",
        env="sums",
        lease_id="l7",
        index_in_group=3,
        seed=0,
    )
    with pytest.raises(GenerationError, match="rollout 3 of lease 'l7'"):
        ReplayGenerator([group(two_turns)])


def test_a_wave_answers_in_order_and_versions_are_settable() -> None:
    replay = ReplayGenerator([group(rollout(1, seed=10), rollout(2, seed=11))], version=4)
    segments = run_virtual(replay.wave([request(11), request(10)]))
    assert [segment.token_ids.tolist() for segment in segments] == [[2], [1]]
    assert replay.served_version == 4
    replay.set_version(5)
    assert replay.served_version == 5


@pytest.mark.parametrize(
    "hold",
    [
        ReplayGenerator.interrupt,
        ReplayGenerator.drain,
        lambda replay: ReplayGenerator.pause(replay, clear_cache=True),
    ],
    ids=["interrupt", "drain", "pause"],
)
def test_requests_wait_until_resume(hold: Callable[[ReplayGenerator], Awaitable[None]]) -> None:
    async def main() -> Segment:
        replay = ReplayGenerator([group(rollout(1, seed=10))])
        await hold(replay)
        held = asyncio.ensure_future(replay.generate(request(10)))
        await asyncio.sleep(1.0)
        assert not held.done()
        await replay.resume()
        return await held

    assert run_virtual(main()).token_ids.tolist() == [1]
