"""A real engine on a tiny model beside the real trainer: they must agree, before and after an update, and leave nothing
behind."""

from __future__ import annotations

import asyncio
import gc
import shutil
import tempfile
from collections.abc import Iterator
from multiprocessing import resource_tracker
from pathlib import Path

import numpy as np
import psutil
import torch

from engine import clock
from engine.config import Config, GenerateSection, ModelSection, RunSection, TaskSection, TrainSection
from engine.doctor.report import REPORT_IT, Finding, judge
from engine.environment import engine_environment
from engine.host import build_generator
from engine.observe.terminal import SilentTerminal
from engine.protocols import Generator, WeightRoute
from engine.train.model import materialise
from engine.train.thread import TrainingThread
from engine.train.trainer import TorchTrainer
from engine.types import MicroBatch, Segment, SegmentRequest

CONFIG = Config(
    run=RunSection(steps=1),
    model=ModelSection(path="tiny-random", dtype="float32"),
    tasks=(TaskSection(env="jsonl"),),
    generate=GenerateSection(max_model_len=1024, max_in_flight=16, kv_cache_gib=0.25, sleep_level=2),
    train=TrainSection(dtype="float32"),
)
LARGEST_DIFFERENCE = 1e-4
_MIB = 1 << 20
# What may stay: allocators' caches, and modules imported on first use.
_MEMORY_KEPT_MIB = 256
_LIMIT_S = 120.0


def engine_checks() -> Iterator[Finding]:
    """Start, compare, interrupt, update, compare, sleep, compare, close, look what is left. Call on the main thread."""
    scratch, model_folder = Path(tempfile.mkdtemp(prefix="farfield-doctor-")), materialise(CONFIG.model.path)
    with engine_environment(scratch / "engine.log"):
        # What vLLM's modules take is theirs for good: imported before memory is looked at.
        import engine.generate.vllm  # noqa: F401  # pyright: ignore[reportUnusedImport]
    me = psutil.Process()
    # Python's own helper of multiprocessing lives as long as this process.
    resource_tracker.ensure_running()
    before, rss = set(me.children(recursive=True)), me.memory_info().rss
    generator = build_generator(CONFIG, model_folder, scratch, SilentTerminal())
    processes = list(set(me.children(recursive=True)) - before)
    findings = [Finding("engine", "ok", f"vLLM started, {len(processes)} processes")]
    try:
        clock.run(_session(generator, model_folder, findings))
    finally:
        yield from findings
    del generator
    gc.collect()
    alive, grown = psutil.wait_procs(processes, timeout=10)[1], (me.memory_info().rss - rss) / _MIB
    detail = f"{len(alive)} engine processes left, {grown:+.0f} MiB in this one"
    yield judge("memory returned", not alive and grown <= _MEMORY_KEPT_MIB, detail, REPORT_IT)
    shutil.rmtree(scratch)


async def _session(generator: Generator, model_folder: Path, findings: list[Finding]) -> None:
    """Adds to `findings` as it goes: what was found before something failed is told too."""
    try:
        async with asyncio.timeout(_LIMIT_S):
            await generator.open()
            # After the engine, as in a run: vLLM wants the device to itself while it measures what is free.
            trainer = TorchTrainer(CONFIG, model_folder)
            findings.append(await _agreement("golden log-probs", generator, trainer))
            findings.append(await _interruption(generator))
            with torch.no_grad():
                for parameter in trainer.model.parameters():
                    if parameter.dim() > 1:  # a random model's logits are all alike: these differ by nats
                        parameter.mul_(6.0)
            route = _route(generator, trainer)
            await generator.pause(clear_cache=True)
            await route.publish(1)
            await generator.resume()
            findings.append(await _agreement("after an update", generator, trainer))
            await _sleep(generator, route)
            findings.append(await _agreement("sleep/wake", generator, trainer))
    finally:
        await generator.close()


async def _agreement(name: str, generator: Generator, trainer: TorchTrainer) -> Finding:
    """Both on the same tokens. The prompts are the same at every call: from the second on they are in the cache."""
    sent = _requests(name, new_tokens=16)
    segments = await asyncio.gather(*map(generator.generate, sent))
    worst = max(_difference(trainer, *pair) for pair in zip(sent, segments, strict=True))
    detail = f"engine and trainer differ by at most {worst:.1e} nats, limit {LARGEST_DIFFERENCE:.0e}"
    return judge(name, worst < LARGEST_DIFFERENCE, detail, REPORT_IT)


async def _interruption(generator: Generator) -> Finding:
    """Long requests are cut and keep their tokens."""
    working = asyncio.gather(*map(generator.generate, _requests("long", new_tokens=900)))
    await asyncio.sleep(0.2)
    await generator.interrupt()
    await generator.resume()
    made = [len(segment.token_ids) for segment in await working if segment.ended == "interrupted"]
    detail = f"{len(made)} requests cut after {sum(made)} tokens in all"
    return judge("interrupt/resume", sum(made) > 0, detail, REPORT_IT)


async def _sleep(generator: Generator, route: WeightRoute) -> None:
    """Everything dropped, then the weights published again, as a time slice does it."""
    await generator.interrupt()
    await generator.sleep(2)
    await generator.wake("weights")
    await route.publish(2)
    await generator.wake("kv_cache")
    await generator.resume()


def _route(generator: Generator, trainer: TorchTrainer) -> WeightRoute:
    from engine.generate.vllm import VllmGenerator
    from engine.weights.local import LocalRoute

    assert isinstance(generator, VllmGenerator)
    return LocalRoute(generator, trainer, torch.float32, TrainingThread().call)


def _difference(trainer: TorchTrainer, request: SegmentRequest, segment: Segment) -> float:
    prompt, total = len(request.token_ids), len(request.token_ids) + len(segment.token_ids)
    trainable, zeros = np.arange(total) >= prompt, np.zeros(total, np.float32)
    token_ids = np.concatenate([request.token_ids, segment.token_ids])
    positions, bounds = np.arange(total, dtype=np.int32), np.asarray([0, total], np.int32)
    micro_batch = MicroBatch(token_ids=token_ids, position_ids=positions, cu_seqlens=bounds, trainable=trainable,
                             logprobs=zeros, advantages=zeros, weights=zeros, staleness=positions)
    return float(np.abs(trainer.logprobs(micro_batch, request.temperature)[trainable] - segment.logprobs).max())


def _requests(name: str, *, new_tokens: int) -> list[SegmentRequest]:
    """Sixteen prompts of 80 random bytes: more than a cache block, of 32 tokens on a CPU and 16 on a GPU."""
    prompts = np.random.default_rng(0).integers(0, 256, (16, 80)).astype(np.int32)
    return [SegmentRequest(request_id=f"{name} {index}", token_ids=prompt, max_new_tokens=new_tokens, temperature=1.0,
                           seed=index) for index, prompt in enumerate(prompts)]
