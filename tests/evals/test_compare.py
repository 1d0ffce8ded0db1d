"""Comparisons of results made by hand and of synthetic models with a known difference."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

import evals.compare
from engine.errors import DataError
from engine.observe.estimate import Estimate
from engine.types import Version
from evals.compare import compare, holm, interval, main_compare, render, sign_test
from evals.result import Question, SuiteResult, TaskResult

DRAWS = 1000


def task_result(values, *, higher=True, truncated=None, **settings):
    """`values`: metric -> one value per question."""
    count = len(next(iter(values.values())))
    means = {metric: float(np.mean(own)) for metric, own in values.items()}
    return TaskResult(
        metrics=dict(means),
        higher_is_better=dict.fromkeys(values, higher),
        estimates={metric: Estimate(mean, mean - 0.1, mean + 0.1, count) for metric, mean in means.items()},
        truncated=truncated,
        settings={"version": "1", "generation": {"temperature": 0.0}, "samples": 1, "num_fewshot": 0, "chat": True}
        | settings,
        questions=[
            Question(number, f"prompt {number}", f"data {number}",
                     {name: float(own[number]) for name, own in values.items()}, ["answer"])
            for number in range(count)
        ],
    )  # fmt: skip


def suite_result(digest="a", step=0, **tasks):
    return SuiteResult(
        suite="arithmetic", model="smollm2", step=step, version=Version(number=step, digest=digest), seconds=1.0,
        settings={"backend": "vllm", "dtype": "float32", "chat_template": "c0", "lm_eval": "0.4.13"}, tasks=tasks,
    )  # fmt: skip


def right(ones, of):
    return task_result({"exact_match": [1.0] * ones + [0.0] * (of - ones)})


def only(comparison):
    (task,) = comparison.tasks
    return task


# Intervals


def binary(rng, count):
    """Shares right both times .3, newly right .2, newly wrong .05: true difference .15."""
    kind = rng.choice(4, size=count, p=[0.3, 0.2, 0.05, 0.45])
    return (kind == 1).astype(float) - (kind == 2)


def nats(rng, count):
    """Nats per word, skewed; b's are a's times a log-normal factor of mean .95: true difference 3.5 * -.05."""
    return rng.gamma(7.0, 0.5, count) * (rng.lognormal(np.log(0.95) - 0.02, 0.2, count) - 1.0)


@pytest.mark.parametrize(
    ("draw", "count", "truth"), [(binary, 60, 0.15), (binary, 200, 0.15), (nats, 60, -0.175), (nats, 200, -0.175)]
)
def test_the_interval_covers_the_true_difference(draw, count, truth, monkeypatch):
    monkeypatch.setattr(evals.compare, "_RESAMPLES", 1000)
    rng = np.random.default_rng(1)
    intervals = np.asarray([interval(draw(rng, count)) for _ in range(DRAWS)])
    covered = float(((intervals[:, 0] <= truth) & (truth <= intervals[:, 1])).mean())
    assert covered == pytest.approx(0.95, abs=0.02)


def test_the_interval_of_equal_differences_is_their_value():
    assert interval(np.zeros(5)) == (0.0, 0.0)
    assert interval(np.full(5, 0.5)) == (0.5, 0.5)
    assert interval(np.asarray([1.0])) == (1.0, 1.0)


def test_the_interval_of_many_differences_is_the_normal_one():
    differences = np.random.default_rng(2).normal(0.3, 1.0, 4000)
    half = 1.96 * differences.std(ddof=1) / 4000**0.5
    assert interval(differences) == pytest.approx((differences.mean() - half, differences.mean() + half), abs=0.003)


# The sign test and the correction


@pytest.mark.parametrize(
    ("better", "worse", "p"),
    [
        (0, 0, 1.0),
        (4, 0, 2 / 2**4),
        (0, 6, 2 / 2**6),
        (9, 1, 2 * (1 + 10) / 2**10),
        (5, 5, 1.0),
        (8, 3, 2 * (1 + 11 + 55 + 165) / 2**11),
    ],
)
def test_the_sign_test_sums_both_tails(better, worse, p):
    assert sign_test(better, worse) == pytest.approx(p)


def test_holm_corrects_the_smallest_p_most_and_keeps_the_order():
    # Sorted .005, .01, .03, .04 times 4, 3, 2, 1 = .02, .03, .06, .04; the last is raised to .06.
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([]) == []


def test_a_verdict_is_corrected_for_the_number_of_tasks():
    """6 of 6 have p = 1/32: enough for one task, times 2 not; 10 of 10 have 1/512: enough beside another."""
    six, ten = (right(10, 40), right(16, 40)), (right(10, 40), right(20, 40))
    assert only(compare(suite_result(sums=six[0]), suite_result(sums=six[1]))).verdict == "better"
    both = compare(suite_result(sums=six[0], gcd=six[0]), suite_result(sums=six[1], gcd=six[1]))
    assert [(task.verdict, task.corrected_p) for task in both.tasks] == [("no difference shown", 1 / 16)] * 2
    stepwise = compare(suite_result(sums=six[0], gcd=ten[0]), suite_result(sums=six[1], gcd=ten[1]))
    assert [(task.verdict, task.corrected_p) for task in stepwise.tasks] == [("better", 1 / 32), ("better", 1 / 256)]


def test_equal_models_are_seldom_told_apart(monkeypatch):
    """Both answer each question right with the same chance, which differs from question to question."""
    # The intervals, which can only take verdicts away, are most of the time.
    monkeypatch.setattr(evals.compare, "_RESAMPLES", 100)
    rng, told = np.random.default_rng(3), 0
    for _ in range(DRAWS):
        chances = rng.uniform(size=(8, 40))
        a, b = (suite_result(**{f"task{index}": task_result({"acc": rng.uniform(size=40) < chance})
                                for index, chance in enumerate(chances)}) for _ in range(2))  # fmt: skip
        told += any(task.verdict != "no difference shown" for task in compare(a, b).tasks)
    assert told <= 0.05 * DRAWS


# What a comparison says


def test_the_same_result_twice_shows_no_difference():
    values = {"exact_match": [1.0, 0.0, 1.0, 1.0], "pass@1": [0.5, 0.125, 1.0, 0.75]}
    one = suite_result(sums=task_result(values), text=task_result({"word_perplexity": [3.1, 3.7]}, higher=False))
    comparison = compare(one, one)
    assert comparison.same_weights
    assert [task.verdict for task in comparison.tasks] == ["no difference shown"] * 2
    for paired in (paired for task in comparison.tasks for paired in task.metrics):
        assert (paired.difference, paired.low, paired.high, paired.p) == (0.0, 0.0, 0.0, 1.0)
        assert (paired.better, paired.worse) == (0, 0)
    assert "a and b are the same weights" in render(comparison)
    assert not compare(one, replace(one, version=Version(number=0, digest="b"))).same_weights


def test_differences_are_paired_by_question():
    a = suite_result(sums=task_result({"exact_match": [1, 0, 0, 0, 1]}))
    b = suite_result(step=20, sums=task_result({"exact_match": [0, 1, 1, 0, 1]}))
    (paired,) = only(compare(a, b)).metrics
    assert (paired.a, paired.b, paired.difference) == pytest.approx((0.4, 0.6, 0.2))
    assert (paired.better, paired.worse, paired.same) == (2, 1, 2)


def test_four_of_thirty_in_one_direction_show_nothing():
    task = only(compare(suite_result(sums=right(10, 30)), suite_result(sums=right(14, 30))))
    assert (task.corrected_p, task.verdict) == (0.125, "no difference shown")


@pytest.mark.parametrize(("higher", "verdict"), [(True, "better"), (False, "worse")])
def test_which_way_is_better(higher, verdict):
    low, high = (task_result({"loss": np.linspace(0.0, 1.0, 20) + by}, higher=higher) for by in (0.0, 0.5))
    task = only(compare(suite_result(text=low), suite_result(text=high)))
    assert task.verdict == verdict
    assert (task.metrics[0].better, task.metrics[0].worse) == ((20, 0) if higher else (0, 20))
    assert only(compare(suite_result(text=high), suite_result(text=low))).verdict != verdict


def test_many_small_gains_against_a_few_large_losses_are_not_better():
    """17 of 20 questions gain .01 (p = .003), three lose 1: the mean goes down."""
    a, b = np.full(20, 2.0), np.full(20, 2.01)
    b[:3] = 1.0
    task = only(compare(suite_result(text=task_result({"score": a})), suite_result(text=task_result({"score": b}))))
    assert task.corrected_p < 0.01
    assert task.verdict == "no difference shown"


def test_the_first_metric_alone_is_judged():
    a = task_result({"acc": [0.0] * 20, "acc_norm": [0.0] * 20})
    b = task_result({"acc": [0.0] * 20, "acc_norm": [1.0] * 20})
    task = only(compare(suite_result(choice=a), suite_result(choice=b)))
    assert (task.verdict, task.corrected_p) == ("no difference shown", 1.0)
    assert (task.metrics[1].difference, task.metrics[1].p) == (1.0, 2 / 2**20)


def test_a_task_without_a_value_for_each_question_is_named():
    lone = replace(right(1, 2), metrics={"corpus_score": 0.5})
    comparison = compare(suite_result(odd=lone, sums=right(10, 40)), suite_result(odd=lone, sums=right(16, 40)))
    assert [(task.verdict, task.corrected_p) for task in comparison.tasks] == [(None, None), ("better", 1 / 32)]
    assert "odd: not compared" in render(comparison)


# Refusals

LIKE = suite_result(sums=right(3, 6))


def changed(**fields):
    """LIKE with other fields in its task."""
    return replace(LIKE, tasks={"sums": replace(LIKE.tasks["sums"], **fields)})


def asked(**fields):
    """LIKE with another fifth question."""
    questions = list(LIKE.tasks["sums"].questions)
    questions[4] = replace(questions[4], **fields)
    return changed(questions=questions)


UNLIKE = [
    ("suite is 'arithmetic' in the first and 'reasoning' in the second", replace(LIKE, suite="reasoning")),
    *((f"settings.{key} is {value!r} in the first and 'other' in the second",
       replace(LIKE, settings=LIKE.settings | {key: "other"})) for key, value in LIKE.settings.items()),
    ("settings.quantization is None in the first and 'fp8' in the second",
     replace(LIKE, settings=LIKE.settings | {"quantization": "fp8"})),
    ("tasks is ['sums'] in the first and ['gcd', 'sums'] in the second",
     replace(LIKE, tasks=LIKE.tasks | {"gcd": right(3, 6)})),
    *((f"sums: settings.{key} is {value!r} in the first and 'other' in the second",
       changed(settings=LIKE.tasks["sums"].settings | {key: "other"}))
      for key, value in LIKE.tasks["sums"].settings.items()),
    ("sums: number of questions is 6 in the first and 5 in the second",
     changed(questions=LIKE.tasks["sums"].questions[:5])),
    ("sums, question 4: number is 4 in the first and 7 in the second", asked(number=7)),
    ("sums, question 4: data is 'data 4' in the first and 'moved' in the second", asked(data="moved")),
    ("sums, question 4: prompt is 'prompt 4' in the first and 'reworded' in the second", asked(prompt="reworded")),
    ("sums: metrics is ['exact_match'] in the first and [] in the second", asked(values={})),
    ("sums: higher_is_better is {'exact_match': True} in the first and {'exact_match': False} in the second",
     changed(higher_is_better={"exact_match": False})),
]  # fmt: skip


@pytest.mark.parametrize(("message", "other"), UNLIKE, ids=[message.split(" is ")[0] for message, _ in UNLIKE])
def test_unlike_results_are_refused_by_name(message, other):
    with pytest.raises(DataError) as refused:
        compare(LIKE, other)
    first, remedy = str(refused.value).split("\n  -> ")
    assert first == f"not comparable: {message}"
    assert remedy
    with pytest.raises(DataError):
        compare(other, LIKE)


def test_every_field_of_a_result_is_compared_or_free():
    """A new field has to be put on one side."""
    free = {"model", "step", "version", "seconds"}
    assert {field.name for field in msgspec.structs.fields(SuiteResult)} - free == {"suite", "settings", "tasks"}
    results = {"metrics", "estimates", "truncated"}
    assert {field.name for field in msgspec.structs.fields(TaskResult)} - results == {
        "settings", "questions", "higher_is_better"}  # fmt: skip
    answers = {"values", "answers", "truncated"}
    assert {field.name for field in msgspec.structs.fields(Question)} - answers == {"number", "data", "prompt"}


def test_other_weights_models_and_times_are_compared():
    other = replace(LIKE, model="petri", step=7, version=Version(number=7, digest="b"), seconds=9.0)
    assert compare(LIKE, other).b == "petri, step 7, version 7"
    assert compare(LIKE, replace(other, step=None)).b == "petri, version 7"


# For people


def test_the_table_is_narrow_and_ends_in_words(tmp_path, capsys):
    strict, flexible = "exact_match,strict-match", "exact_match,flexible-extract"
    a = suite_result(
        sums=task_result({strict: [0.0] * 20, flexible: [0.0] * 20}, truncated=0.02), gcd=right(3, 20),
        text=task_result({"bits_per_byte": np.linspace(2.0, 3.0, 20)}, higher=False),
    )  # fmt: skip
    b = suite_result(
        "b", 20, sums=task_result({strict: [1.0] * 20, flexible: [1.0] * 20}, truncated=0.15), gcd=right(3, 20),
        text=task_result({"bits_per_byte": np.linspace(2.0, 3.0, 20) + 0.25}, higher=False),
    )  # fmt: skip
    a.write(tmp_path / "a.json")
    b.write(tmp_path / "b.json")
    main_compare(tmp_path / "a.json", tmp_path / "b.json")
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) < 110
    assert lines[:3] == ["arithmetic", "  a: smollm2, step 0, version 0", "  b: smollm2, step 20, version 20"]
    assert "sums: better (corrected p <0.0001, cut at the limit 0.02 -> 0.15)" in lines
    assert sum("length alone may explain" in line for line in lines) == 1
    text = next(line.split() for line in lines if "bits_per_byte" in line)
    assert " ".join(text) == (
        "bits_per_byte (nats/byte) 2.500 2.750 +0.250 [+0.250, +0.250] 0/20/0 <0.0001"
    )
    assert lines[-1] == "b is better on 1 of 3 (sums), worse on 1 of 3 (text); no difference shown on 1"
