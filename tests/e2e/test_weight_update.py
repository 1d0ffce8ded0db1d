"""After each update the running engine says what a fresh engine says that loads that step's checkpoint."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from e2e_requests import requests

from engine.train.thread import TrainingThread
from engine.train.trainer import TorchTrainer
from engine.types import Batch, MicroBatch

# What vLLM and its libraries warn of when imported is not ours to mend.
pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("default")]

UPDATES = 3
FRESH_ENGINE = Path(__file__).with_name("fresh_engine.py")


def _batch(seed: int) -> Batch:
    """Anything that moves every weight: 8 sequences of random tokens."""
    random = np.random.default_rng(seed)
    length = 30
    micro_batch = MicroBatch(
        token_ids=random.integers(0, 256, 8 * length).astype(np.int32),
        position_ids=np.tile(np.arange(length, dtype=np.int32), 8),
        cu_seqlens=np.arange(0, 9 * length, length, dtype=np.int32),
        trainable=np.tile(np.arange(length) >= 10, 8),
        logprobs=np.full(8 * length, -5.5, np.float32),
        advantages=np.repeat(random.normal(size=8), length).astype(np.float32),
        weights=np.full(8 * length, 1 / 160, np.float32),
        staleness=np.zeros(8 * length, np.int32),
    )
    return Batch(micro_batches=((micro_batch,),), num_tokens=160, temperature=1.0)


async def _greedy(engine, prompts, tag):
    """Twice: the second pass is served from the prefix cache, and must say the same."""
    from vllm import SamplingParams, TokensPrompt
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(temperature=0.0, max_tokens=24, logprobs=0, ignore_eos=True, detokenize=False,
                            output_kind=RequestOutputKind.FINAL_ONLY)
    passes = []
    for number in range(2):
        outputs = []
        for index, prompt in enumerate(prompts):
            stream = engine.generator.llm.generate(
                TokensPrompt(prompt_token_ids=prompt), params, request_id=f"{tag}-{number}-{index}"
            )
            outputs += [output async for output in stream]
        passes.append(outputs)
    assert all(output.num_cached_tokens > 0 for output in passes[1])
    return passes


def _route(engine, trainer):
    """Imported late: vLLM must be imported inside the engine's environment."""
    from engine.weights.local import LocalRoute

    return LocalRoute(engine.generator, trainer, torch.float32, TrainingThread().call)


async def _restore(engine):
    """Other tests share the engine: leave it with the weights that it started with."""
    original = TorchTrainer(engine.config, engine.folder)
    route = _route(engine, original)
    await engine.generator.pause(clear_cache=True)
    await route.publish(UPDATES + 1)
    await engine.generator.resume()


def _check(engine, tmp_path: Path) -> None:
    prompts = [request.token_ids.tolist() for request in
               requests("p", count=6, prompt_tokens=70, new_tokens=24, temperature=0.0, seed=5)]
    trainer = TorchTrainer(engine.config, engine.folder)
    folders: list[Path] = []

    async def update_and_ask():
        route = _route(engine, trainer)
        said = [await _greedy(engine, prompts, "v0")]
        for number in range(1, UPDATES + 1):
            assert not trainer.step(_batch(number)).skipped
            folders.append(tmp_path / f"step-{number}")
            trainer.save(folders[-1])
            await engine.generator.pause(clear_cache=True)
            version = await route.publish(number)
            await engine.generator.resume()
            assert (version.number, engine.generator.served_version) == (number, number)
            said.append(await _greedy(engine, prompts, f"v{number}"))
        await _restore(engine)
        return said

    said = engine.run(update_and_ask())
    for older, newer in pairwise(said):
        moved = np.abs(np.subtract(_logprobs(older[0]), _logprobs(newer[0]))).max()
        assert moved > 0.1, "an update that moves nothing proves nothing"
    for passes, expected in zip(said[1:], _fresh(prompts, folders, tmp_path), strict=True):
        for outputs in passes:
            for output, answer in zip(outputs, expected, strict=True):
                assert list(output.outputs[0].token_ids) == answer["tokens"]
                np.testing.assert_allclose(_logprobs([output])[0], answer["logprobs"], atol=2e-5)


def _logprobs(outputs):
    return [
        [entry[token].logprob for token, entry in zip(each.token_ids, each.logprobs, strict=True)]
        for each in (output.outputs[0] for output in outputs)
    ]


def _fresh(prompts, folders, tmp_path):
    (tmp_path / "prompts.json").write_text(json.dumps(prompts))
    environment = os.environ | {"VLLM_LOGGING_LEVEL": "ERROR"}
    subprocess.run(
        [sys.executable, FRESH_ENGINE, tmp_path / "prompts.json", tmp_path / "said.json", *folders],
        check=True, timeout=300, env=environment,
    )
    return json.loads((tmp_path / "said.json").read_text())


def test_updates_of_a_tied_model(tied, tmp_path):
    _check(tied, tmp_path)


def test_updates_of_an_untied_model(untied, tmp_path):
    _check(untied, tmp_path)


def test_labels_of_new_tokens_follow_the_update(tied):
    """Segments carry the engine's own label."""
    served = tied.generator.served_version
    segment = tied.run(
        tied.generator.wave(requests("label", count=1, prompt_tokens=8, new_tokens=4, temperature=1.0))
    )[0]
    assert segment.version_spans == ((0, served),)


