"""Evaluations on real engines: the loaded one against lm-eval's own hf backend, and against vLLM's server."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from e2e_requests import requests
from transformers import AutoTokenizer

from engine.environment import engine_environment
from engine.errors import MissingError
from evals.answers import AnswerFile
from evals.model import EngineLM, OnLoop
from evals.result import TaskResult
from evals.run import run_suite
from evals.server import ServerEngine
from evals.suites import Suite, find

pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("default")]

# Completions of chats and of plain texts, choices, whole texts.
SUITE = {
    "parity.yaml": "group: parity\ntask: [saying, continuing, choosing, reading]\n",
    "saying.yaml": """\
task: saying
custom_dataset: !function questions.make
test_split: test
output_type: generate_until
doc_to_text: "What is a {{word}}?"
doc_to_target: "a {{word}}"
generation_kwargs: {until: ["q"], max_gen_toks: 40, do_sample: false}
metric_list: [{metric: exact_match}]
""",
    "continuing.yaml": """\
include: saying.yaml
task: continuing
doc_to_text: "A {{word}}"
metadata: {chat: false}
""",
    "choosing.yaml": """\
task: choosing
custom_dataset: !function questions.make
test_split: test
output_type: multiple_choice
doc_to_text: "A {{word}} is a"
doc_to_target: 0
doc_to_choice: ["thing", "kind of tool", "place", "t"]
metric_list: [{metric: acc}, {metric: acc_norm}]
metadata: {chat: false}
""",
    "reading.yaml": """\
task: reading
custom_dataset: !function questions.make
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "There was once a {{word}}, and nobody knew whose {{word}} it was."
metric_list: [{metric: byte_perplexity}]
metadata: {chat: false}
""",
    "questions.py": """\
from datasets import Dataset

def make(**_):
    words = ("hammer", "lake", "lantern", "ox", "zebra crossing")
    return {"test": Dataset.from_list([{"word": word} for word in words])}
""",
}


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Suite:
    folder = tmp_path_factory.mktemp("suite")
    for name, text in SUITE.items():
        (folder / name).write_text(text)
    return find("parity", folder)


def on_engine(engine, suite: Suite, folder: Path) -> dict[str, TaskResult]:
    """Through the loaded generator."""

    async def evaluated() -> dict[str, TaskResult]:
        with contextlib.closing(AnswerFile(folder / "parity.partial.jsonl", "")) as answers:
            asked = OnLoop(engine.generator, asyncio.get_running_loop(), 120.0)
            model = EngineLM(asked, AutoTokenizer.from_pretrained(engine.folder), answers, max_length=2048,
                             progress=lambda done, of: None)
            return await asyncio.to_thread(run_suite, suite, model, limit=0, temperature=1.0)

    return engine.run(evaluated())


def logprobs(result: TaskResult) -> np.ndarray:
    """Of "-12.345678" or "-12.345678 greedy"."""
    return np.asarray([float(answer.split()[0]) for question in result.questions for answer in question.answers])


def test_the_engine_answers_as_lm_evals_own_hf_backend_does(untied, suite, tmp_path):
    from profiling.bench.evals import hf_model

    ours = on_engine(untied, suite, tmp_path)
    hf = hf_model(untied.folder, "float32", 4)
    # The fixture's generation_config.json has none, and transformers looks nowhere else.
    hf.model.generation_config.eos_token_id = hf.tokenizer.eos_token_id
    theirs = run_suite(suite, hf, limit=0, temperature=1.0)
    assert ours.keys() == theirs.keys() == {"saying", "continuing", "choosing", "reading"}
    for name in ours:
        pairs = list(zip(ours[name].questions, theirs[name].questions, strict=True))
        assert len(pairs) == 5
        assert all((one.prompt, one.data) == (other.prompt, other.data) for one, other in pairs)
    said, expected = ([answer for name in ("saying", "continuing") for question in results[name].questions
                       for answer in question.answers] for results in (ours, theirs))
    assert said == expected
    assert len(set(said)) > 5
    for name, of in (("choosing", 20), ("reading", 5)):
        assert len(logprobs(ours[name])) == of
        np.testing.assert_allclose(logprobs(ours[name]), logprobs(theirs[name]), atol=1e-3, rtol=0)
        assert ours[name].metrics == pytest.approx(theirs[name].metrics, rel=1e-4)
    greedy = [answer.endswith("greedy") for question in ours["choosing"].questions for answer in question.answers]
    assert greedy == [a.endswith("greedy") for question in theirs["choosing"].questions for a in question.answers]


@pytest.fixture
def server(untied, tmp_path, free_port: int) -> Iterator[ServerEngine]:
    """vLLM's own, with every default that it takes from the model's generation_config.json."""
    log_file = tmp_path / "server.log"
    with engine_environment(log_file):
        process = subprocess.Popen([
            sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(untied.folder),
            "--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(free_port), "--dtype", "float32",
            "--max-model-len", "2048", "--kv-cache-memory-bytes", str(1 << 28), "--enforce-eager", "--block-size", "32",
            "--no-enable-chunked-prefill", "--max-num-batched-tokens", "8192",
        ])  # fmt: skip
    try:
        yield _once_up(process, f"http://127.0.0.1:{free_port}/v1", log_file)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(20)
        finally:
            process.kill()


def _once_up(process: subprocess.Popen[bytes], url: str, log_file: Path) -> ServerEngine:
    for _ in range(600):
        assert process.poll() is None, log_file.read_text()[-3000:]
        with contextlib.suppress(MissingError):
            return ServerEngine(url, end_token_ids=(256,), limit_s=60.0)
        time.sleep(0.2)
    raise AssertionError(log_file.read_text()[-3000:])


def test_vllms_server_answers_as_the_loaded_engine_does(untied, server):
    """generation_config.json asks for top_k = 3 at temperature .1: it shapes neither."""
    for temperature in (0.0, 1.0):
        sent = requests("both", count=24, prompt_tokens=20, new_tokens=60, temperature=temperature)
        theirs = server.generate(sent)
        if temperature:
            assert {segment.ended for segment in theirs} == {"stop", "length"}
        for one, other in zip(untied.run(untied.generator.wave(sent)), theirs, strict=True):
            assert one.token_ids.tolist() == other.token_ids.tolist()
            assert one.ended == other.ended
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)
    prompts = [request.token_ids for request in requests("s", count=8, prompt_tokens=50, new_tokens=1, temperature=0.0)]
    for one, other in zip(untied.run(untied.generator.score(prompts)), server.score(prompts), strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)
        assert one.greedy.tolist() == other.greedy.tolist()
    assert (server.model_name, server.max_length) == ("tiny", 2048)
