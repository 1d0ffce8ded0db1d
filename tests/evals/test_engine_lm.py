"""lm-eval's questions, answered by an engine without a model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from lm_eval.api.instance import Instance
from suite_of_sums import Answering
from transformers import AutoTokenizer

from engine.errors import ConfigError, DataError
from evals.answers import AnswerFile
from evals.model import EngineLM


@pytest.fixture(scope="module")
def tokenizer(tiny_folder: Path):
    return AutoTokenizer.from_pretrained(tiny_folder)


@pytest.fixture
def model(tokenizer, tmp_path):
    opened = []

    def make(answer=lambda text, request: "four", max_length=64, file="x.partial.jsonl", context="weights"):
        engine = Answering(tokenizer, answer)
        answers = AnswerFile(tmp_path / file, context)
        opened.append(answers)
        seen = []
        made = EngineLM(engine, tokenizer, answers, max_length=max_length, progress=lambda *done: seen.append(done))
        return made, engine, seen

    yield make
    for answers in opened:
        answers.close()


def question(text: str, doc_id: int = 0, kind: str = "generate_until", **settings) -> Instance:
    return Instance(kind, {}, (text, {"until": [], "max_gen_toks": 8} | settings), 0, ("sums", doc_id, 1))


def test_each_copy_of_a_question_has_a_seed_of_its_own_and_every_run_the_same(model):
    asked = [question("2 + 2?", 0, do_sample=True, temperature=0.7), question("3 + 3?", 1)]
    first, engine, seen = model()
    assert first.generate_until([asked[0], asked[0], asked[1]]) == ["four"] * 3
    again, other, _ = model(file="y.partial.jsonl")
    again.generate_until([asked[0], asked[0], asked[1]])
    seeds = [request.seed for request in engine.requests]
    assert len(set(seeds)) == 3
    assert seeds == [request.seed for request in other.requests]
    assert [request.temperature for request in engine.requests] == [0.7, 0.7, 0.0]
    assert seen == [(3, 3)]


@pytest.mark.parametrize(
    ("said", "until", "text", "truncated"),
    [
        ("4", [], "4", 0),
        ("4\n5\n", ["\n"], "4", 0),
        ("5; 6\n", ["\n", ";"], "5", 0),
        ("forty-four", [], "forty-fo", 1),
        ("4\nforty-four", ["\n"], "4", 0),  # cut at its limit, but the answer was whole before
        ("<think>4", [], "", 1),
        ("a</think>b", [], "b", 1),
    ],
)
def test_an_answer_is_cut_at_stops_and_thinking_is_none_of_it(model, said, until, text, truncated):
    made, _, _ = model(lambda *_: said)
    room = 10 if said.startswith("a<") else 8
    answers = made.generate_until([question("?", until=until, max_gen_toks=room)])
    assert answers == [text]
    assert made.truncated["sums", 0] == truncated


def test_thinking_that_the_prompt_opens_and_the_answer_never_closes_is_no_answer(model):
    made, _, _ = model(lambda *_: "it is 4")
    assert made.generate_until([question("2 + 2? <think>\n"), question("2 + 2?")]) == ["", "it is 4"]


def test_a_continuation_is_scored_behind_its_context_alone(model, tokenizer):
    made, engine, _ = model()
    scores = made.loglikelihood([Instance("loglikelihood", {}, ("ab", " b"), 0, ("sums", 0, 1)),
                                 Instance("loglikelihood", {}, ("ab", "b!"), 0, ("sums", 1, 1))])
    ids = [tokenizer.encode(text) for text in (" b", "b!")]
    assert [score for score, _ in scores] == pytest.approx([-sum(one) / 100 for one in ids])
    assert [greedy for _, greedy in scores] == [all(number % 2 == 0 for number in one) for one in ids]
    assert [prompt.tolist() for prompt in engine.scored] == [tokenizer.encode("ab b"), tokenizer.encode("abb!")]


@pytest.mark.parametrize("max_length", [8, 16, 64])
def test_a_rolling_text_counts_each_token_once_whatever_the_window(model, tokenizer, max_length):
    text = "to be or not to be, that is the question"
    made, engine, _ = model(max_length=max_length)
    (score,) = made.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, (text,), 0, ("sums", 0, 1))])
    assert score == pytest.approx(-sum(tokenizer.encode(text)) / 100, rel=1e-5)
    assert max(len(prompt) for prompt in engine.scored) < max_length
    assert engine.scored[0][0] == tokenizer.eos_token_id


def test_what_was_answered_is_not_asked_again_under_the_same_weights(model):
    asked = [question(f"{number}?", number) for number in range(3)]
    first, _, _ = model(lambda text, _: text[0])
    assert first.generate_until(asked) == ["0", "1", "2"]
    again, engine, seen = model(lambda *_: "never")
    assert again.generate_until(asked) == ["0", "1", "2"]
    assert engine.requests == []
    assert seen == [(3, 3)]
    other, engine, _ = model(lambda *_: "new", context="other weights")
    assert other.generate_until(asked) == ["new"] * 3
    longer, engine, _ = model(lambda *_: "new")
    assert longer.generate_until([question("0?", 0, max_gen_toks=9), question("0?", 0, until=["n"])]) == ["new", ""]
    assert len(engine.requests) == 2


def test_an_interrupted_evaluation_goes_on_after_the_last_whole_wave(model, monkeypatch):
    monkeypatch.setattr("evals.model._WAVE", 2)
    asked = [question(f"{number}?", number) for number in range(5)]

    def dying(text, request):
        if text[0] == "3":
            raise KeyboardInterrupt
        return text[0]

    first, _, _ = model(dying)
    with pytest.raises(KeyboardInterrupt):
        first.generate_until(asked)
    again, rest, seen = model(lambda text, _: text[0])
    assert again.generate_until(asked) == ["0", "1", "2", "3", "4"]
    assert [request.request_id for request in rest.requests] == ["sums/2/0", "sums/3/0", "sums/4/0"]
    assert seen == [(2, 5), (4, 5), (5, 5)]


def test_a_torn_line_is_asked_again_and_the_next_one_stands_alone(model, tmp_path):
    first, _, _ = model(lambda text, _: text[0])
    first.generate_until([question("0?", 0), question("1?", 1)])
    path = tmp_path / "x.partial.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    again, engine, _ = model(lambda text, _: text[0])
    assert again.generate_until([question("0?", 0), question("1?", 1)]) == ["0", "1"]
    assert len(engine.requests) == 1
    last, engine, _ = model(lambda *_: "never")
    assert last.generate_until([question("0?", 0), question("1?", 1)]) == ["0", "1"]
    assert engine.requests == []


def test_a_prompt_that_does_not_fit_is_refused_not_shortened(model):
    made, engine, _ = model(max_length=16)
    made.generate_until([question("x" * 8)])
    with pytest.raises(ConfigError, match=r"(?s)max_model_len = 16: .*need 17 tokens.*= 17 or more"):
        made.generate_until([question("x" * 9)])
    with pytest.raises(ConfigError, match="need 17 tokens"):
        made.loglikelihood([Instance("loglikelihood", {}, ("x" * 9, "y" * 7), 0, ("sums", 0, 1))])
    assert len(engine.requests) == 1


def test_sampling_that_the_engine_does_not_offer_is_refused_by_name(model):
    made, _, _ = model()
    assert made.generate_until([question("?", top_p=1.0, num_beams=1)]) == ["four"]
    with pytest.raises(DataError, match=r"task sums sets top_p = 0.9"):
        made.generate_until([question("?", top_p=0.9)])


def test_a_chat_is_rendered_by_the_models_template(model, tokenizer):
    made, _, _ = model()
    history = [{"role": "user", "content": "2 + 2?"}]
    text = made.apply_chat_template(history)
    assert text == "<|user|>2 + 2?<|end|><|assistant|>"
    assert made.tok_encode(text) == tokenizer.encode(text, add_special_tokens=False)
    assert np.array_equal(made.tok_encode("é"), tokenizer.encode("é"))
