"""The plot over a run's checkpoints, from files made by hand."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from engine.errors import DataError
from engine.observe.estimate import Estimate
from engine.types import Version
from evals.plot import main_plot, plot, read_run
from evals.result import Question, SuiteResult, TaskResult

ODD = "models/$x_1$ & <co>"


def task_result(metric, mean, *, higher=True, estimated=True):
    return TaskResult(
        metrics={"corpus_score": 1.0, metric: mean}, higher_is_better={metric: higher},
        estimates={metric: Estimate(mean, mean - 0.1, mean + 0.1, 2)} if estimated else {}, truncated=None, settings={},
        questions=[Question(index, "p", "d", {metric: mean}, []) for index in range(2)],
    )  # fmt: skip


def suite_result(step, **tasks):
    return SuiteResult(suite="safety-net", model=ODD, step=step, version=Version(number=step, digest=str(step)),
                       settings={}, seconds=1.0, tasks=tasks)


def results():
    return [
        suite_result(step, choice=task_result("acc", 0.5 + step / 100),
                     prose=task_result("word_perplexity", 3.5 - step / 100, higher=False))
        for step in (0, 9, 20)
    ]  # fmt: skip


def texts(path):
    return ["".join(node.itertext()) for node in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")]


def test_the_plot_names_model_tasks_and_units(tmp_path):
    plot(results(), tmp_path / "plot.svg")
    shown = texts(tmp_path / "plot.svg")
    assert {f"safety-net, {ODD}", "choice", "prose", "acc", "word_perplexity, nats/word"} <= set(shown)
    assert shown.count("step") == 2


def test_the_same_results_give_the_same_bytes(tmp_path):
    for name in ("one.svg", "two.svg"):
        plot(results(), tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    plot(results()[:2], tmp_path / "two.svg")
    assert (tmp_path / "one.svg").read_bytes() != (tmp_path / "two.svg").read_bytes()


def test_a_task_may_come_later_or_have_no_interval(tmp_path):
    late = suite_result(30, late=task_result("acc", 0.5), lone=task_result("nats", 2.0, estimated=False))
    plot([*results(), late], tmp_path / "plot.svg")
    assert {"choice", "prose", "late", "lone"} <= set(texts(tmp_path / "plot.svg"))


def test_a_run_is_read_in_order_of_steps(tmp_path, capsys):
    evals = tmp_path / "evals"
    for result in (results()[2], results()[0], results()[1]):
        result.write(evals / f"step-{result.step:06d}" / "safety-net.json")
    (evals / "step-000000/held_out.json").write_text('{"another": "schema"}')
    (evals / "step-000020/.safety-net.json").write_text("cut sh")
    (evals / "step-000020/other.partial.jsonl").write_text("{}\n")
    steps = {name: [result.step for result in own] for name, own in read_run(tmp_path).items()}
    assert steps == {"safety-net": [0, 9, 20]}
    main_plot(tmp_path)
    assert capsys.readouterr().out == f"wrote {evals}/safety-net.svg\n"
    assert "prose" in texts(evals / "safety-net.svg")


def test_a_folder_without_results_is_refused(tmp_path):
    with pytest.raises(DataError, match="holds no suite's results"):
        read_run(tmp_path)
