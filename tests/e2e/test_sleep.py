"""Pausing, draining, cancelling and sleeping on real vLLM: what was held goes on, under the right weights."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Engine
from e2e_requests import requests
from transformers import AutoModelForCausalLM

from engine.errors import GenerationError
from engine.train.model import build_tiny
from engine.train.thread import TrainingThread
from engine.train.trainer import TorchTrainer
from engine.types import Segment, SegmentRequest

# What vLLM and its libraries warn of when imported is not ours to mend.
pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("default")]

EXTENSION = "profiling.bench.switch_memory.WorkerExtension"
# A random model's logits are all alike; with matrices so much larger they differ by nats.
BOLD, BOLDER = 5.0, 7.0
CORES = os.sched_getaffinity(0)


def _start(work: Path, **options) -> Engine:
    folder = work / "model"
    folder.mkdir()
    build_tiny(folder, tied=True)
    return Engine(folder, work, **options)


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> Iterator[Engine]:
    work = tmp_path_factory.mktemp("engine")
    engine = _start(work, worker_extension=EXTENSION, cores=[min(CORES)], endless=True)
    yield engine
    engine.close()


@pytest.fixture(autouse=True)
def _bold(request) -> None:
    """Every test of the shared engine begins with the same weights, whatever the one before left."""
    if "engine" in request.fixturenames:
        engine = request.getfixturevalue("engine")
        engine.run(_update(engine, BOLD))


async def _publish(engine: Engine, scale: float) -> int:
    """The folder's weights, its matrices `scale` times as large; the generator is paused."""
    from engine.weights.local import LocalRoute

    trainer = TorchTrainer(engine.config, engine.folder)
    _scale(trainer.model, scale)
    number = engine.generator.served_version + 1
    await LocalRoute(engine.generator, trainer, torch.float32, TrainingThread().call).publish(number)
    return number


async def _update(engine: Engine, scale: float) -> None:
    await engine.generator.pause(clear_cache=True)
    await _publish(engine, scale)
    await engine.generator.resume()


def _scale(model: torch.nn.Module, scale: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(scale)


def _expected(engine: Engine, scale: float, request: SegmentRequest, segment: Segment) -> np.ndarray:
    """Log-probs of the segment's tokens by transformers alone."""
    model = AutoModelForCausalLM.from_pretrained(engine.folder, dtype=torch.float32)
    _scale(model, scale)
    tokens = torch.from_numpy(np.concatenate([request.token_ids, segment.token_ids]).astype(np.int64))
    with torch.no_grad():
        logprobs = model(tokens[None]).logits[0].log_softmax(-1)
    start = len(request.token_ids)
    return logprobs[start - 1 : -1].gather(1, tokens[start:, None])[:, 0].numpy()


def _golden(tag: str) -> list[SegmentRequest]:
    return requests(tag, count=8, prompt_tokens=70, new_tokens=24, temperature=1.0)


def _made(engine: Engine) -> dict[str, int]:
    """Tokens that the engine has told of, by open request."""
    states = engine.generator.llm.output_processor.request_states.values()
    return {each.external_req_id: each.detokenizer.num_output_tokens() for each in states}


async def _progress(engine: Engine, sent: list[SegmentRequest], tokens: int) -> None:
    """Until all of them are open and have made so many tokens."""
    async with asyncio.timeout(60):
        while min(_made(engine).get(request.request_id, -1) for request in sent) < tokens:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def test_the_engine_keeps_to_its_cores(engine):
    workers = [process for process in engine.processes if "resource_tracker" not in " ".join(process.cmdline())]
    assert len(workers) >= 2
    for process in workers:
        for thread in Path(f"/proc/{process.pid}/task").iterdir():
            assert os.sched_getaffinity(int(thread.name)) == {min(CORES)}
    # The suite's own thread has all of its cores back.
    assert os.sched_getaffinity(0) == CORES


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_changes_nothing_that_is_said(engine, level):
    async def around() -> tuple[list[Segment], list[Segment]]:
        generator = engine.generator
        before = await generator.wave(_golden(f"before-{level}"))
        await generator.interrupt()
        await generator.sleep(level)
        await generator.wake("weights")
        if level == 2:
            await _publish(engine, BOLD)
        await generator.wake("kv_cache")
        await generator.resume()
        # Not as a wave, which would clear the cache itself.
        return before, list(await asyncio.gather(*map(generator.generate, _golden(f"after-{level}"))))

    before, after = engine.run(around())
    for request, one, two in zip(_golden(""), before, after, strict=True):
        assert one.token_ids.tobytes() == two.token_ids.tobytes()
        np.testing.assert_allclose(one.logprobs, two.logprobs, atol=1e-5)
        np.testing.assert_allclose(two.logprobs, _expected(engine, BOLD, request, two), atol=2e-4)


def test_waking_from_level_2_without_weights_is_refused(engine):
    generator = engine.generator

    async def refused() -> list[Segment]:
        await generator.interrupt()
        await generator.sleep(2)
        await generator.wake("weights")
        await generator.wake("kv_cache")
        with pytest.raises(GenerationError, match="dropped") as error:
            await generator.resume()
        assert "publish" in error.value.remedy
        await generator.sleep(1)
        await generator.wake("weights")
        await generator.wake("kv_cache")
        with pytest.raises(GenerationError, match="dropped"):
            await generator.wave(_golden("refused"))
        generator.serves(generator.served_version)  # a lie, to see what the check is for
        return await generator.wave(_golden("garbage"))

    garbage = engine.run(refused())
    differences = [
        np.abs(segment.logprobs - _expected(engine, BOLD, request, segment)).max()
        for request, segment in zip(_golden(""), garbage, strict=True)
    ]
    assert min(differences) > 0.5


def test_sleep_returns_the_memory_of_a_full_cache(engine):
    async def filled_then_asleep() -> tuple[int, int, int]:
        generator = engine.generator
        await generator.interrupt()
        [size] = await generator.llm.collective_rpc("fill_kv_cache")
        [before] = await generator.llm.collective_rpc("resident")
        await generator.sleep(1)
        [after] = await generator.llm.collective_rpc("resident")
        return size, before, after

    size, before, after = engine.run(filled_then_asleep())
    assert size > 0.9 * 2**28
    assert before - after >= 0.95 * size


def test_requests_interrupted_for_sleep_go_on_after_it(engine):
    sent = requests("cut", count=8, prompt_tokens=40, new_tokens=1500, temperature=1.0)

    def rest(request: SegmentRequest, made: Segment) -> SegmentRequest:
        return SegmentRequest(
            request_id=f"{request.request_id}+", token_ids=np.concatenate([request.token_ids, made.token_ids]),
            max_new_tokens=16, temperature=1.0, seed=5,
        )

    async def cut_and_continued() -> tuple[list[Segment], list[SegmentRequest], list[Segment]]:
        generator = engine.generator
        working = asyncio.gather(*map(generator.generate, sent))
        await _progress(engine, sent, 4)
        await generator.interrupt()
        await generator.sleep(1)
        cut = [(request, made) for request, made in zip(sent, await working, strict=True)
               if made.ended == "interrupted"]
        continued = [rest(*pair) for pair in cut]
        held = asyncio.gather(*map(generator.generate, continued))
        # Awake, vLLM's scheduler runs: only we hold these back.
        await generator.wake("weights")
        await generator.wake("kv_cache")
        await asyncio.sleep(0.2)
        assert not _made(engine)
        await generator.resume()
        return [made for _, made in cut], continued, await held

    cut, continued, ended = engine.run(cut_and_continued())
    assert cut
    assert all(made.ended != "interrupted" for made in ended)
    for request, made in zip(continued, ended, strict=True):
        np.testing.assert_allclose(made.logprobs, _expected(engine, BOLD, request, made), atol=2e-4)


def _seeded(tag: str) -> list[SegmentRequest]:
    """64 requests whose prompts alone, 8,960 tokens, are more than the 8,192 of one batch."""
    return requests(tag, count=64, prompt_tokens=140, new_tokens=200, temperature=1.0)


async def _updated_in_flight(engine: Engine, sent: list[SegmentRequest], *, clear_cache: bool) -> list[Segment]:
    """An update under way, and one request cancelled after it."""
    generator = engine.generator
    working = asyncio.gather(*map(generator.generate, sent))
    await _progress(engine, sent, 1)
    await generator.pause(clear_cache=clear_cache)
    held = _made(engine)
    assert len(held) == len(sent)
    await _publish(engine, BOLDER)
    assert _made(engine) == held
    await generator.resume()
    await _progress(engine, sent[-1:], held[sent[-1].request_id] + 4)
    await generator.cancel([sent[-1].request_id])
    return list(await working)


def test_an_update_in_flight_recomputes_what_was_made(engine):
    sent = _seeded("flight")
    old = engine.generator.served_version
    segments = engine.run(_updated_in_flight(engine, sent, clear_cache=True))
    both = [(request, segment) for request, segment in zip(sent, segments, strict=True)
            if len(segment.version_spans) == 2]
    assert len(both) == 64
    assert [segment.ended for segment in segments] == ["length"] * 63 + ["interrupted"]
    for request, segment in both[:8] + both[-8:]:
        (start, first), (cut, second) = segment.version_spans
        assert (start, first, second) == (0, old, old + 1)
        under_old = _expected(engine, BOLD, request, segment)
        under_new = _expected(engine, BOLDER, request, segment)
        np.testing.assert_allclose(segment.logprobs[:cut], under_old[:cut], atol=2e-4)
        np.testing.assert_allclose(segment.logprobs[cut:], under_new[cut:], atol=2e-4)
        assert np.abs(under_old - under_new)[cut:].max() > 0.1


def test_a_cache_kept_over_an_update_matches_no_weights(engine):
    sent = _seeded("stale")
    segments = engine.run(_updated_in_flight(engine, sent, clear_cache=False))
    both = [(request, segment) for request, segment in zip(sent, segments, strict=True)
            if len(segment.version_spans) == 2]
    assert len(both) == 64
    request, segment = both[0]
    cut = segment.version_spans[1][0]
    assert np.abs(segment.logprobs - _expected(engine, BOLDER, request, segment))[cut:].max() > 1e-2


def test_cancelled_requests_keep_what_they_have_and_others_go_on(engine):
    sent = requests("whole", count=6, prompt_tokens=40, new_tokens=300, temperature=1.0)
    again = requests("cancel", count=6, prompt_tokens=40, new_tokens=300, temperature=1.0)

    async def both() -> tuple[list[Segment], list[Segment]]:
        generator = engine.generator
        whole = await generator.wave(sent)
        working = asyncio.gather(*map(generator.generate, again))
        await _progress(engine, again, 6)
        await generator.cancel(["cancel-1", "cancel-4", "nobody"])
        return whole, list(await working)

    whole, segments = engine.run(both())
    for index, (full, segment) in enumerate(zip(whole, segments, strict=True)):
        made = len(segment.token_ids)
        if index in (1, 4):
            assert segment.ended == "interrupted"
            assert 6 <= made < len(full.token_ids)
        else:
            assert (segment.ended, made) == (full.ended, len(full.token_ids))
        np.testing.assert_array_equal(segment.token_ids, full.token_ids[:made])
        np.testing.assert_allclose(segment.logprobs, full.logprobs[:made], atol=1e-5)
        assert segment.version_spans == ((0, engine.generator.served_version),)


def test_draining_lets_open_requests_end_and_holds_new_ones(engine):
    sent = requests("drain", count=4, prompt_tokens=16, new_tokens=100, temperature=1.0)
    late = requests("late", count=1, prompt_tokens=16, new_tokens=2, temperature=1.0)[0]

    async def drained() -> list[Segment]:
        generator = engine.generator
        working = [asyncio.ensure_future(generator.generate(request)) for request in sent]
        await _progress(engine, sent, 1)
        draining = asyncio.ensure_future(generator.drain())
        await asyncio.sleep(0)
        held = asyncio.ensure_future(generator.generate(late))
        await draining
        assert not _made(engine)
        assert not held.done()
        await generator.resume()
        return [*[await each for each in working], await held]

    assert all(segment.ended in ("stop", "length") for segment in engine.run(drained()))


@pytest.mark.parametrize("state", ["asleep", "paused"])
def test_a_death_is_noticed(tmp_path, state):
    engine = _start(tmp_path)

    async def killed() -> None:
        generator = engine.generator
        if state == "asleep":
            await generator.interrupt()
            await generator.sleep(2)
        else:
            await generator.pause(clear_cache=True)
        [core] = generator.llm.engine_core.resources.engine_manager.processes
        os.kill(core.pid, signal.SIGKILL)
        async with asyncio.timeout(5):
            with pytest.raises(GenerationError, match="died"):
                await generator.watch()

    try:
        engine.run(killed())
    finally:
        engine.close()
