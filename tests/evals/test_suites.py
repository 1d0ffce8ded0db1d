from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from engine.errors import ConfigError, DataError
from engine.train.model import materialise
from engine.types import Scored, Segment
from evals.answers import AnswerFile
from evals.model import EngineLM
from evals.result import TaskResult
from evals.run import run_suite
from evals.suites import Suite, find, listing, named
from evals.suites.questions import PARTS, questions

CAPITALS = """
task: capitals
tag: geography
custom_dataset: !function questions.make
test_split: test
doc_to_text: "What is the capital of {{country}}?"
doc_to_target: capital
generation_kwargs: {until: [], max_gen_toks: 16}
process_results: !function questions.score
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
QUESTIONS = """
from datasets import Dataset

CAPITALS = [{"country": "France", "capital": "Paris"}, {"country": "Peru", "capital": "Lima"}]

def make(**_):
    return {"test": Dataset.from_list(CAPITALS)}

def score(document, results):
    return {"acc": float(document["capital"] in results[0])}
"""


class _Engine:
    """Says what `speak` makes of the prompt and of which copy of it this is. Every token of a given text has
    probability 1/2, a letter "e" 1."""

    def __init__(self, tokenizer: Any, speak: Callable[[str, int], str]) -> None:
        self._tokenizer = tokenizer
        self._speak = speak
        self.prompts: list[str] = []
        self.temperatures: set[float] = set()

    def generate(self, requests: Sequence[Any]) -> list[Segment]:
        return [self._segment(request) for request in requests]

    def score(self, prompts: Sequence[Any]) -> list[Scored]:
        letter = self._tokenizer.encode("e", add_special_tokens=False)
        scored: list[Scored] = []
        for prompt in prompts:
            self.prompts.append(self._tokenizer.decode(prompt.tolist()))
            logprobs = np.where(np.isin(prompt, letter), 0.0, np.log(0.5)).astype(np.float32)
            scored.append(Scored(logprobs, np.ones(len(prompt), bool)))
        return scored

    def _segment(self, request: Any) -> Segment:
        prompt = self._tokenizer.decode(request.token_ids.tolist())
        self.prompts.append(prompt)
        self.temperatures.add(request.temperature)
        text = self._speak(prompt, int(request.request_id.rpartition("/")[2]))
        spoken = self._tokenizer.encode(text, add_special_tokens=False)[: request.max_new_tokens]
        ended = "length" if len(spoken) == request.max_new_tokens else "stop"
        return Segment(token_ids=np.asarray(spoken, np.int32), logprobs=np.zeros(len(spoken), np.float32),
                       version_spans=((0, 1),), ended=ended)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(materialise("tiny-random"))


@pytest.fixture
def asked(tmp_path: Path, tokenizer: Any) -> Callable[..., tuple[dict[str, TaskResult], _Engine]]:
    def run(suite: Suite, speak: Callable[[str, int], str], **settings: Any) -> tuple[dict[str, TaskResult], _Engine]:
        engine = _Engine(tokenizer, speak)
        with contextlib.closing(AnswerFile(tmp_path / "partial.jsonl", "weights")) as answers:
            model = EngineLM(engine, tokenizer, answers, max_length=2048, progress=lambda done, of: None)
            return run_suite(suite, model, **{"limit": 0, "temperature": 1.0, **settings}), engine

    return run


@pytest.fixture
def capitals(tmp_path: Path) -> Path:
    folder = tmp_path / "my capitals"
    folder.mkdir()
    (folder / "capitals.yaml").write_text(CAPITALS)
    (folder / "questions.py").write_text(QUESTIONS)
    return folder


def test_arithmetic(asked) -> None:
    def speak(prompt: str, copy: int) -> str:
        """Right once in four; products never."""
        expression = prompt.split("Calculate ")[1].split(".")[0]
        return str(eval(expression) + ("*" in expression) + (copy > 0))

    results, engine = asked(find("arithmetic"), speak)
    assert results.keys() == {"arithmetic_easy", "arithmetic_medium", "arithmetic_hard"}
    assert results["arithmetic_easy"].metrics == {"pass@1": 0.25, "pass@4": 1.0}
    assert results["arithmetic_medium"].metrics == {"pass@1": 0.25, "pass@4": 1.0}
    sums = sum("*" not in question.text for question in questions("arithmetic_hard")) / 64
    assert results["arithmetic_hard"].metrics == {"pass@1": sums / 4, "pass@4": sums}
    assert 0.2 < sums < 0.5
    for result in results.values():
        assert len(result.questions) == 64
        assert {len(question.answers) for question in result.questions} == {4}
        assert result.higher_is_better == {"pass@1": True, "pass@4": True}
    assert engine.temperatures == {1.0}
    assert all(prompt.count("Answer with just the number.") == 1 for prompt in engine.prompts)


def test_arithmetic_without_sampling(asked) -> None:
    results, engine = asked(find("arithmetic"), lambda prompt, copy: "1" * 40, temperature=0.0, limit=5)
    assert {tuple(result.metrics.items()) for result in results.values()} == {(("pass@1", 0.0),)}
    assert {result.truncated for result in results.values()} == {1.0}
    assert len(engine.prompts) == 15
    assert engine.temperatures == {0.0}


def test_the_arithmetic_prompt_is_the_quickstarts(asked, tokenizer) -> None:
    _, engine = asked(find("arithmetic"), lambda prompt, copy: "1", limit=1)
    chat = [{"role": "system", "content": "Answer with just the number."},
            {"role": "user", "content": questions("arithmetic_easy")[0].text}]
    assert engine.prompts[0] == tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)


def test_reasoning(asked) -> None:
    gold = {q.text: q.answer["answer"] for task in PARTS for q in questions(task) if task.startswith("reasoning")}

    def speak(prompt: str, copy: int) -> str:
        """The right answer, without the tags in half of two tasks."""
        text = " ".join(prompt.split())
        (answer,) = {gold[question] for question in gold if question in text}
        untagged = "Navigate" in text or "maximum area of an island" in text
        return answer if untagged else f"I think so. <answer>{answer}</answer>"

    results, engine = asked(find("reasoning"), speak)
    assert {task: len(result.questions) for task, result in results.items()} == {
        "reasoning_logic": 48, "reasoning_graphs": 48, "reasoning_algorithmic": 72, "reasoning_games": 48,
        "reasoning_gsm_symbolic": 24,
    }
    assert {task: result.metrics for task, result in results.items()} == {
        "reasoning_logic": {"acc": 1.0}, "reasoning_graphs": {"acc": 0.5}, "reasoning_algorithmic": {"acc": 1.0},
        "reasoning_games": {"acc": 0.5}, "reasoning_gsm_symbolic": {"acc": 1.0},
    }
    assert engine.temperatures == {0.0}
    assert all("between <answer> and </answer>" in prompt for prompt in engine.prompts)


def test_safety_net(asked) -> None:
    results, engine = asked(find("safety-net"), lambda prompt, copy: "")
    perplexity, choice = results["safety_perplexity"], results["safety_choice"]
    texts = [row["text"] for row in find("safety-net").load()["safety_perplexity"].dataset["test"]]
    halves = sum(len(text.encode()) - text.count("e") for text in texts)
    words = sum(len(text.split()) for text in texts)
    assert perplexity.metrics["word_perplexity"] == pytest.approx(2 ** (halves / words))
    assert perplexity.metrics["byte_perplexity"] == pytest.approx(2 ** (halves / sum(map(len, texts))))
    assert perplexity.higher_is_better == {"word_perplexity": False, "byte_perplexity": False}
    assert choice.metrics.keys() == {"acc", "acc_norm"}
    assert (len(perplexity.questions), len(choice.questions)) == (24, 64)
    plain = [prompt for prompt in engine.prompts if "Question:" in prompt]
    assert len(plain) == 256
    assert all(prompt.startswith("Question: ") and "\nAnswer: " in prompt for prompt in plain)


def test_prompts_are_short_enough() -> None:
    for task in PARTS:
        assert max(len(question.messages[0].content.encode()) for question in questions(task)) < 1200


def test_a_folder_of_the_users_own(capitals, asked) -> None:
    suite = find(str(capitals))
    results, engine = asked(suite, lambda prompt, copy: "Paris")
    assert suite.name == "my capitals"
    assert results["capitals"].metrics == {"acc": 0.5}
    assert "What is the capital of Peru?" in engine.prompts[1]
    for name in ("capitals", "geography"):
        assert find(name, capitals).load().keys() == {"capitals"}


@pytest.mark.parametrize(
    ("name", "stem"),
    [
        ("arithmetic", "arithmetic"),
        ("safety-net", "safety-net"),
        ("my capitals", "my_capitals-f706b5f1"),
        ("../x/é", ""),
        ("held_out", ""),
        ("a" * 255, ""),
        ("", ""),
    ],
)
def test_result_files_have_safe_names(name: str, stem: str) -> None:
    made = Suite(name, (Path(),)).stem
    assert set(made) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-")
    assert len(made) < 110
    assert made != "held_out"
    if stem:
        assert made == stem


def test_names_that_look_alike_have_files_of_their_own() -> None:
    names = ["a b", "a_b", "a?b", "a/b", "held_out", "held out"]
    assert len({Suite(name, (Path(),)).stem for name in names}) == len(names)


def test_an_unknown_suite() -> None:
    with pytest.raises(ConfigError) as caught:
        find("aritmetic")
    known = "arithmetic, reasoning, safety-net, standard, gsm8k, hendrycks_math500, ifeval, mmlu_pro, humaneval_inst"
    assert str(caught.value).startswith(f"suite = 'aritmetic': is no suite\n  -> known: {known}")


def test_an_unknown_task_of_the_users_folder(capitals, tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"a task, group or tag in .*my capitals"):
        find("rivers", capitals)
    with pytest.raises(ConfigError, match="is no folder"):
        find("rivers", tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("broken.yaml", "task: [unclosed", r"broken\.yaml is no task file"),
        ("list.yaml", "- a\n- b\n", r"list\.yaml is no task file: Expected YAML dict"),
        ("lost.yaml", "include: nowhere.yaml\ntask: lost\n", r"lost\.yaml is no task file: .*nowhere\.yaml"),
        ("questions.py", "import no_such_module\n", r"capitals\.yaml: ModuleNotFoundError: .* 'no_such_module'"),
        ("questions.py", "make = print", r"capitals\.yaml: AttributeError: .*no function 'score'"),
        ("capitals.yaml", "task: capitals\ncustom_dataset: !function nowhere.make\n", r"capitals\.yaml: ImportError"),
        ("capitals.yaml", "nothing: here\n", "holds no lm-eval task"),
    ],
)
def test_what_is_broken_is_named(capitals, file: str, content: str, message: str) -> None:
    (capitals / file).write_text(content)
    with pytest.raises(DataError, match=message):
        find(str(capitals)).load()


def test_code_of_the_models_is_not_run_by_default(capitals, monkeypatch) -> None:
    monkeypatch.delenv("HF_ALLOW_CODE_EVAL", raising=False)
    # Refused before the module, which is broken, is imported.
    (capitals / "questions.py").write_text("import no_such_module\n")
    with (capitals / "capitals.yaml").open("a") as file:
        file.write("unsafe_code: true\n")
    with pytest.raises(ConfigError, match="HF_ALLOW_CODE_EVAL = None: capitals runs code that the model wrote"):
        find(str(capitals)).load()
    (capitals / "questions.py").write_text(QUESTIONS)
    monkeypatch.setenv("HF_ALLOW_CODE_EVAL", "1")
    assert find(str(capitals)).load()


def test_code_inside_a_group_is_not_run_either(capitals, monkeypatch) -> None:
    monkeypatch.delenv("HF_ALLOW_CODE_EVAL", raising=False)
    (capitals / "group.yaml").write_text("group: world\ntask:\n- task: capitals\n  unsafe_code: true\n")
    with pytest.raises(ConfigError, match="capitals runs code"):
        find("world", capitals).load()


def test_the_list(capitals) -> None:
    shipped = {line.name: line for line in listing()}
    assert {name: (len(line.tasks), line.questions, line.offline) for name, line in shipped.items()} == {
        "arithmetic": (3, 192, True), "reasoning": (5, 240, True), "safety-net": (2, 88, True),
        "standard": (5, None, False),
    }
    (capitals / "hub.yaml").write_text("task: hub\ntag: geography\ndataset_path: a/b\n")
    (capitals / "group.yaml").write_text("group: world\ntask:\n- capitals\n")
    users = {line.name: (line.tasks, line.questions, line.offline) for line in listing(capitals)[4:]}
    assert users == {
        "capitals": (("capitals",), None, True), "hub": (("hub",), None, False),
        "geography": (("capitals", "hub"), None, False), "world": (("capitals",), None, True),
    }


def test_the_list_of_what_ships_imports_nothing_heavy() -> None:
    program = ("import sys; from evals.suites import listing; listing()\n"
               "assert not {'lm_eval', 'datasets', 'reasoning_gym', 'torch', 'transformers'} & set(sys.modules)")
    subprocess.run([sys.executable, "-c", program], check=True)


def test_tables_and_files_name_the_same_tasks() -> None:
    files = {task for name in ("arithmetic", "reasoning") for task in find(name).load()}
    assert files == PARTS.keys()


def test_two_suites_that_would_write_one_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "arithmetic").mkdir()
    assert [suite.name for suite in named(["held_out", "arithmetic", "safety-net"])] == ["arithmetic", "safety-net"]
    with pytest.raises(ConfigError, match=r"both write arithmetic\.json"):
        named(["arithmetic", str(tmp_path / "arithmetic")])
