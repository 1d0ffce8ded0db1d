"""The generator on real vLLM: log-probs, sampling, interruption, waves."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from e2e_requests import requests

from engine.train.trainer import TorchTrainer
from engine.types import MicroBatch, Segment, SegmentRequest

# What vLLM and its libraries warn of when imported is not ours to mend.
pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("default")]


def _micro_batch(request: SegmentRequest, segment: Segment) -> MicroBatch:
    prompt, made = len(request.token_ids), len(segment.token_ids)
    return MicroBatch(
        token_ids=np.concatenate([request.token_ids, segment.token_ids]),
        position_ids=np.arange(prompt + made, dtype=np.int32),
        cu_seqlens=np.asarray([0, prompt + made], np.int32),
        trainable=np.arange(prompt + made) >= prompt,
        logprobs=np.concatenate([np.zeros(prompt, np.float32), segment.logprobs]),
        advantages=np.ones(prompt + made, np.float32),
        weights=np.ones(prompt + made, np.float32),
        staleness=np.zeros(prompt + made, np.int32),
    )


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_engine_and_trainer_agree_on_sampled_tokens(tied, temperature):
    sent = requests("agree", count=16, prompt_tokens=40, new_tokens=32, temperature=temperature)
    segments = tied.run(tied.generator.wave(sent))
    trainer = TorchTrainer(tied.config, tied.folder)
    ratios = []
    for request, segment in zip(sent, segments, strict=True):
        micro_batch = _micro_batch(request, segment)
        ours = trainer.logprobs(micro_batch, temperature)[micro_batch.trainable]
        ratios.append(np.exp(ours - segment.logprobs))
        np.testing.assert_allclose(ours, segment.logprobs, atol=2e-4)
    assert np.concatenate(ratios).mean() == pytest.approx(1.0, abs=1e-3)


def test_generation_config_of_the_model_is_ignored(tied):
    """It asks for top_k = 3: a random model's first tokens would then take three values at most."""
    prompt = requests("one", count=1, prompt_tokens=8, new_tokens=1, temperature=1.0)[0].token_ids
    sent = [
        SegmentRequest(request_id=f"k-{seed}", token_ids=prompt, max_new_tokens=1, temperature=1.0, seed=seed)
        for seed in range(64)
    ]
    first = {int(segment.token_ids[0]) for segment in tied.run(tied.generator.wave(sent))}
    assert len(first) > 20


def test_a_wave_is_repeatable_and_its_members_differ(tied):
    one = tied.run(
        tied.generator.wave(requests("a", count=32, prompt_tokens=20, new_tokens=24, temperature=1.0))
    )
    two = tied.run(
        tied.generator.wave(requests("b", count=32, prompt_tokens=20, new_tokens=24, temperature=1.0))
    )
    for first, second in zip(one, two, strict=True):
        assert first.token_ids.tobytes() == second.token_ids.tobytes()
        assert first.logprobs.tobytes() == second.logprobs.tobytes()
    assert len({segment.token_ids.tobytes() for segment in one}) == 32


def test_interruption_returns_tokens_logprobs_and_spans(tied):
    sent = requests("long", count=8, prompt_tokens=16, new_tokens=1024, temperature=1.0)

    async def interrupted() -> list[Segment]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(tied.generator.generate(request)) for request in sent]
            await asyncio.sleep(0.3)
            await tied.generator.interrupt()
            assert all(task.done() for task in tasks)
            late = group.create_task(tied.generator.generate(sent[0].__class__(**_fields(sent[0], "late", 4))))
            await asyncio.sleep(0.1)
            assert not late.done()
            await tied.generator.resume()
        assert len(late.result().token_ids) <= 4
        return [task.result() for task in tasks]

    segments = tied.run(interrupted())
    cut = [segment for segment in segments if segment.ended == "interrupted"]
    assert cut
    for segment in cut:
        assert 0 < len(segment.token_ids) < 1024
        assert len(segment.logprobs) == len(segment.token_ids)
        assert (segment.logprobs < 0).all()
        assert segment.version_spans == ((0, tied.generator.served_version),)


def test_a_cancelled_request_leaves_the_engine_idle(tied):
    async def cancelled() -> None:
        task = asyncio.ensure_future(
            tied.generator.generate(requests("gone", count=1, prompt_tokens=8, new_tokens=1024, temperature=1.0)[0])
        )
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        # A wave needs an idle engine.
        await tied.generator.wave(requests("next", count=2, prompt_tokens=8, new_tokens=2, temperature=1.0))

    tied.run(cancelled())


def test_the_engine_ends_at_end_tokens_and_says_so(tied):
    sent = requests("ends", count=64, prompt_tokens=8, new_tokens=200, temperature=1.0)
    segments = tied.run(tied.generator.wave(sent))
    assert {segment.ended for segment in segments} == {"stop", "length"}
    for segment in segments:
        # 256 is the tiny tokenizer's end of turn: sampled, with its own log-prob, and never in the middle.
        assert 256 not in segment.token_ids[:-1]
        assert (segment.token_ids[-1] == 256) == (segment.ended == "stop")


def _fields(request: SegmentRequest, request_id: str, new_tokens: int) -> dict[str, object]:
    fields = {name: getattr(request, name) for name in request.__struct_fields__}
    return fields | {"request_id": request_id, "max_new_tokens": new_tokens}
