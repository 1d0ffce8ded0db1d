"""A folder with a suite of three small tasks, and an engine that answers without a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from engine.types import Int32, Scored, Segment, SegmentRequest
from evals.suites import Suite

_TASKS = {
    "group.yaml": "group: sums\ntask: [sums_free, sums_choice, sums_text]\nmetadata: {version: 1}\n",
    "free.yaml": """\
task: sums_free
custom_dataset: !function data.make
test_split: test
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
num_fewshot: SHOTS
fewshot_split: test
generation_kwargs: {until: ["\\n"], max_gen_toks: 6, do_sample: true, temperature: 1.0}
repeats: 3
filter_list: [{name: all, filter: [{function: custom, filter_fn: !function data.keep}]}]
process_results: !function data.judge
metric_list: [{metric: right, aggregation: mean, higher_is_better: true}]
metadata: {version: 1}
""",
    "choice.yaml": """\
task: sums_choice
custom_dataset: !function data.make
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
metadata: {version: 1, chat: false}
""",
    "text.yaml": """\
task: sums_text
custom_dataset: !function data.make
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list: [{metric: byte_perplexity, aggregation: weighted_perplexity, higher_is_better: false}]
metadata: {version: 1, chat: false}
""",
    "data.py": """\
import datasets


def make(**_):
    rows = [{"question": f"{n} + {n}?", "answer": str(2 * n), "choices": [str(2 * n), "1"]} for n in range(QUESTIONS)]
    return {"test": datasets.Dataset.from_list(rows)}


def keep(resps, docs):
    return resps


def judge(doc, results):
    return {"right": sum(answer == doc["answer"] for answer in results[0]) / len(results[0])}
""",
}


def sums_suite(folder: Path, questions: int = 4, examples: int = 0) -> Suite:
    """`examples` before each question of the task that is answered freely, drawn from the others."""
    for name, text in _TASKS.items():
        (folder / name).write_text(text.replace("QUESTIONS", str(questions)).replace("SHOTS", str(examples)))
    return Suite("sums", (folder,), ("sums",))


class Answering:
    """Answers a prompt with what `answer` makes of its text and the request. A given token t costs t / 100 nats, and is
    the likeliest if it is even."""

    def __init__(self, tokenizer: Any, answer: Callable[[str, SegmentRequest], str]) -> None:
        self._tokenizer = tokenizer
        self._answer = answer
        self.requests: list[SegmentRequest] = []
        self.scored: list[Int32] = []

    def generate(self, requests: Sequence[SegmentRequest]) -> list[Segment]:
        self.requests += requests
        return [self._segment(request) for request in requests]

    def score(self, prompts: Sequence[Int32]) -> list[Scored]:
        self.scored += prompts
        return [Scored((-prompt / 100).astype(np.float32), prompt % 2 == 0) for prompt in prompts]

    def stop(self) -> None:
        raise AssertionError("nobody stops it")

    def _segment(self, request: SegmentRequest) -> Segment:
        text = self._answer(self._tokenizer.decode(request.token_ids.tolist()), request)
        whole = [*self._tokenizer.encode(text, add_special_tokens=False), self._tokenizer.eos_token_id]
        made = np.asarray(whole[: request.max_new_tokens], np.int32)
        return Segment(token_ids=made, logprobs=np.zeros(len(made), np.float32), version_spans=((0, 0),),
                       ended="stop" if len(whole) == len(made) else "length")
