"""What the configuration accepts, and how it refuses: path, value, limit and remedy, before anything heavy starts."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from engine.config import NOT_BUILT, Config, is_hub_id, load
from engine.errors import ConfigError, MissingError

BASE = """
[run]
steps = 30
[model]
path = "tiny-random"
[[tasks]]
env = "reasoning_gym"
params = {family = "chain_sum"}
"""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "base.toml"
    path.write_text(BASE)
    return path


def test_a_short_file_is_a_whole_run(base: Path) -> None:
    config = load(base)
    assert config.run.steps == 30
    assert config.tasks[0].label == "reasoning_gym"
    assert config.schedule.max_staleness == 1
    assert (config.algorithm.preset, config.algorithm.advantage) == ("cispo", "leave_one_out")


def test_overrides_are_toml_values_or_bare_text(base: Path) -> None:
    config = load(
        base,
        [
            "run.steps=7",
            "run.name=first",
            "run.dir='my runs'",
            "train.lr=1e-3",
            "train.betas=[0.5, 0.25]",
            "observe.tensorboard=false",
            "tasks.0.name=sums",
            "tasks.0.params.min_terms=3",
        ],
    )
    assert (config.run.steps, config.run.name, config.run.dir) == (7, "first", "my runs")
    assert (config.train.lr, config.train.betas) == (1e-3, (0.5, 0.25))
    assert config.observe.tensorboard is False
    assert config.tasks[0].label == "sums"
    assert config.tasks[0].params == {"family": "chain_sum", "min_terms": 3}


@pytest.mark.parametrize(
    ("override", "path", "limit", "remedy"),
    [
        # Unknown keys and sections, with the near match where there is one.
        ("schedule.max_stalenes=1", "schedule.max_stalenes", "is not a key", "did you mean schedule.max_staleness?"),
        ("schedule.max-staleness=1", "schedule.max-staleness", "is not a key", "did you mean schedule.max_staleness?"),
        ("tasks.0.wieght=2.0", "tasks.0.wieght", "is not a key", "did you mean tasks.0.weight?"),
        ("run.color='red'", "run.color", "is not a key", "known keys: name, dir, seed, steps"),
        ("shedule.max_staleness=1", "shedule", "is not a key", "did you mean schedule?"),
        ("generate.top_p=0.9", "generate.top_p", "full sampling distribution", "generate.temperature"),
        # Ranges.
        ("run.steps=0", "run.steps", ">= 1", "write a whole number >= 1"),
        ("generate.group_size=1", "generate.group_size", ">= 2", "write a whole number >= 2"),
        ("generate.temperature=0.0", "generate.temperature", "> 0", "write a number > 0.0"),
        ("train.betas=[0.9, 1.5]", "train.betas.1", "< 1", "write a number < 1.0"),
        ("tasks.0.weight=-1", "tasks.0.weight", "> 0", "write a number > 0.0"),
        # Types and choices.
        ("run.steps=many", "run.steps", "got `str`", "write a whole number"),
        ("run.steps=2.5", "run.steps", "got `float`", "write a whole number"),
        ("run.seed=true", "run.seed", "got `bool`", "write a whole number"),
        ("run.name=3", "run.name", "got `int`", "write text in quotes"),
        ("observe.tensorboard=1", "observe.tensorboard", "got `int`", "write true or false"),
        ("train.betas=[0.9]", "train.betas", "got 1", "write a list of length 2"),
        ("algorithm.breaker={ess = 'low'}", "algorithm.breaker", "got `str`", "write a number"),
        ("schedule.overdue=later", "schedule.overdue", "'later'", "write 'wait' or 'drop'"),
        ("tasks.0.answer=last", "tasks.0.answer", "'last'", "write 'last_number' or 'boxed' or 'tag' or 'exact'"),
        # Overrides that cannot be applied.
        ("steps=3", "steps=3", "is no override", "write section.key=value"),
        ("run.steps", "run.steps", "is no override", "write section.key=value"),
        ("run.steps.more=1", "run.steps.more", "steps is no table", "spelling"),
        ("tasks.1.env=jsonl", "tasks.1.env", "there are 1 entries", "name an entry"),
        ("tasks.first.env=jsonl", "tasks.first.env", "there are 1 entries", "name an entry"),
        ("tasks.0=jsonl", "tasks.0", "names an entry, not a key", "write tasks.0.key=value"),
        # Contradictions.
        ("generate.max_new_tokens=1024", "generate.max_new_tokens", "generate.max_model_len = 1024", "lower it"),
        ("train.micro_batch_tokens=1023", "train.micro_batch_tokens", "max_model_len = 1024", "raise it"),
        ("generate.backend=replay", "generate.replay_from", "generate.backend = 'replay'", "set both"),
        ("generate.replay_from=runs/a", "generate.replay_from", "not with 'vllm'", "set both or neither"),
        ("evals.every=5", "evals.every", "no task holds questions out", "set tasks.0.held_out"),
        ("train.warmup_steps=31", "train.warmup_steps", "run.steps = 30", "lower it"),
        ("algorithm.breaker={ess = 0.3}", "algorithm.breaker.ess", "is not a key", "share, grad_norm"),
        ("algorithm.breaker={share = 1.5}", "algorithm.breaker.share", "not in 0 ... 1", "share = 0.5"),
        ("algorithm.breaker={share = 0.0}", "algorithm.breaker.share", "not in 0 ... 1", "share = 0.5"),
        ("algorithm.breaker={grad_norm = 0.0}", "algorithm.breaker.grad_norm", "not above 0", "grad_norm = 100"),
        ("tasks.0.env=jsonl", "tasks.0.params.path", "is required", "name a file of JSON lines"),
        ("schedule.steps_per_slice=3", "schedule.steps_per_slice", "has groups for 2 at most", "raise schedule.max_st"),
        ("schedule.in_flight=stale_kv", "schedule.in_flight", "do not stay open", "schedule.placement = 'split'"),
        ("schedule.cores='0-1'", "schedule.cores", "not divided under placement", "schedule.placement = 'split'"),
    ],
)
def test_a_refusal_names_path_value_limit_and_remedy(
    base: Path, override: str, path: str, limit: str, remedy: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        load(base, [override])
    message, arrow, advice = str(refused.value).partition("\n  -> ")
    assert (refused.value.exit_code, refused.value.path) == (2, path)
    assert message.startswith(f"{path} = ")
    assert limit in message
    assert arrow
    assert remedy in advice


def test_a_refusal_shows_the_value(base: Path) -> None:
    for override, shown in (("tasks.0.weight=-1", "= -1:"), ("shedule.a=1", "= {'a': 1}:"), ("run.name=3", "= 3:")):
        with pytest.raises(ConfigError, match=shown):
            load(base, [override])


def test_a_synchronous_run_needs_room_for_a_whole_step(base: Path) -> None:
    with pytest.raises(ConfigError, match=r"(?s)max_in_flight = 63.* 64 rollouts.*at least 64"):
        load(base, ["schedule.max_staleness=0", "generate.max_in_flight=63"])
    load(base, ["schedule.max_staleness=0", "generate.max_in_flight=64"])


def test_held_out_questions_are_sampled_and_other_suites_need_not_be(base: Path) -> None:
    greedy = ["tasks.0.held_out=4", "evals.every=5", "evals.temperature=0"]
    with pytest.raises(ConfigError, match=r"(?s)evals.temperature = 0.0: .*8 times.*above 0"):
        load(base, greedy)
    assert load(base, [*greedy, 'evals.suites=["arithmetic"]']).evals.temperature == 0


@pytest.mark.parametrize(("max_staleness", "most"), [(0, 1), (1, 2), (2, 2), (3, 3), (8, 8)])
def test_a_slice_has_at_most_the_groups_of_all_slots(base: Path, max_staleness: int, most: int) -> None:
    """S + 1 steps; the bound M is S up to 1, S + 1 above."""
    staleness = f"schedule.max_staleness={max_staleness}"
    load(base, [staleness, f"schedule.steps_per_slice={most}"])
    limit = rf"steps_per_slice = {most + 1}: schedule.max_staleness = {max_staleness} has groups for {most} at most"
    with pytest.raises(ConfigError, match=limit):
        load(base, [staleness, f"schedule.steps_per_slice={most + 1}"])


def test_schedules_that_contradict_themselves_are_refused_and_others_are_not(base: Path) -> None:
    split = "schedule.placement=split"
    with pytest.raises(ConfigError, match=r"(?s)max_wait_s = 5\.0: goes with .*'wait'.*one of the two"):
        load(base, ["schedule.max_wait_s=5.0", "schedule.overdue=drop"])
    load(base, ["schedule.max_wait_s=5.0"])
    with pytest.raises(ConfigError, match=r"(?s)max_wait_s = 5\.0: is not below run.stage_timeout_s = 5.*lower it"):
        load(base, ["schedule.max_wait_s=5.0", "run.stage_timeout_s=5"])
    with pytest.raises(ConfigError, match=r"(?s)offload = 'all': nobody needs .*'split'.*remove it"):
        load(base, ["train.offload=all", "schedule.placement=split"])
    load(base, ["schedule.overdue=drop"])
    for in_flight in ("recompute", "stale_kv", "drain"):
        load(base, [split, f"schedule.in_flight={in_flight}"])
    load(base, ["schedule.in_flight=drain"])
    load(base, [split, "schedule.cores=0-1"])


def test_an_engine_sleeps_only_where_it_shares_the_device(base: Path) -> None:
    assert [load(base, [f"generate.sleep_level={level}"]).sleep_level for level in (0, 1, 2)] == [0, 1, 2]
    assert load(base, ["generate.sleep_level=2", "schedule.placement=split"]).sleep_level == 0


SHIPPED = sorted((Path(__file__).parents[1] / "configs").glob("*.toml"))


@pytest.mark.parametrize("config", SHIPPED, ids=lambda path: path.stem)
@pytest.mark.parametrize("placement", ["time_sliced", "split"])
@pytest.mark.parametrize("max_staleness", [0, 1, 4])
def test_every_shipped_config_takes_every_placement_and_bound(
    config: Path, placement: str, max_staleness: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(config.parents[1])
    loaded = load(config, [f"schedule.placement={placement}", f"schedule.max_staleness={max_staleness}"])
    assert (loaded.schedule.placement, loaded.schedule.max_staleness) == (placement, max_staleness)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BASE.replace("steps = 30", ""), r"run\.steps = None: is required\n  -> set run\.steps"),
        (BASE.replace("[run]", "[runs]"), r"runs = {'steps': 30}: is not a key\n  -> did you mean run\?"),
        ('"model.path" = 3' + BASE, r"model\.path = 3: is not a key"),
        (BASE.replace("[[tasks]]", "[tasks]"), r"tasks = .*: Expected `array`, got `object`\n  -> write a list"),
        (BASE + '[[tasks]]\nenv = "reasoning_gym"', r"tasks\.1\.name = 'reasoning_gym': another task has that name"),
        (BASE + "[train\n", r"--config = .*is not TOML: .*line 9.*\n  -> mend that line"),
        ('tasks = []\n[run]\nsteps = 1\n[model]\npath = "petri"', r"tasks = \[\]: .*length >= 1\n  -> write a list"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load(path)


def test_a_missing_file_is_an_argument_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--config = .*no\.toml': cannot be read \(No such file or directory\)"):
        load(tmp_path / "no.toml")


def test_what_the_environment_lacks_is_another_error(base: Path, tmp_path: Path) -> None:
    for overrides, message in (
        (["model.path=/no/such/model"], r"model\.path = '/no/such/model'.*\n  -> .*smollm2-135m-instruct"),
        (["tasks.0.env=jsonl", "tasks.0.params.path=/no/tasks.jsonl"], r"tasks\.0\.params\.path = '/no/tasks\.jsonl'"),
        (["model.chat_template=/no/x.jinja"], r"model\.chat_template = '/no/x\.jinja': no such file\n  -> .*\.jinja"),
        (["generate.backend=replay", f"generate.replay_from={tmp_path}"], r"holds no rollouts folder\n  -> .*NAME"),
    ):
        with pytest.raises(MissingError, match=message) as missing:
            load(base, overrides)
        assert missing.value.exit_code == 3


def test_files_that_exist_are_accepted(base: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    (tmp_path / "tasks.jsonl").touch()
    (tmp_path / "rollouts").mkdir()
    load(base, [f"model.path={tmp_path}"])
    load(base, ["tasks.0.env=jsonl", f"tasks.0.params.path={tmp_path}/tasks.jsonl"])
    load(base, ["generate.backend=replay", f"generate.replay_from={tmp_path}"])


def test_a_hub_id_is_two_names_unless_it_lies_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_hub_id("org/some-model_1.5")
    assert not any(is_hub_id(path) for path in ("model", "./model", "../model", "/a/b", "a/b/c"))
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "model").mkdir()
    assert not is_hub_id("org/model")


def test_the_engine_takes_the_models_dtype_unless_it_has_its_own(base: Path) -> None:
    assert load(base).engine_dtype == "bfloat16"
    assert load(base, ["model.dtype=float32"]).engine_dtype == "float32"
    assert load(base, ["generate.dtype=float32"]).engine_dtype == "float32"


@pytest.mark.parametrize(
    ("overrides", "scores"),
    [
        ([], {"exact": 1.0}),
        (["tasks.0.params.score=math"], {"math": 1.0}),
        (["tasks.0.params.score={ exact = 1, 'my:score' = -0.5 }"], {"exact": 1, "my:score": -0.5}),
        (["tasks.0.params.score={}"], {}),
        (["tasks.0.params.score=5"], {"5": 1.0}),
    ],
)
def test_a_scorer_or_a_table_of_weights(base: Path, overrides: list[str], scores: dict[str, float]) -> None:
    assert load(base, overrides).tasks[0].scores == scores


def unbuilt_value(key: str) -> str:
    """A TOML value of `key` that the schema allows and that NOT_BUILT does not list as working."""
    section, name = key.split(".")
    sections = {field.name: field.type for field in msgspec.structs.fields(Config)}
    kind = next(field.type for field in msgspec.structs.fields(sections[section]) if field.name == name)
    choices = [f"'{choice}'" for choice in get_args(kind) if isinstance(choice, str)]
    for text in (*choices, "'petri'", "true", "1", "2", "{ a = 0.5 }", "[3]", "['arc_easy']"):
        try:
            value: Any = msgspec.convert(tomllib.loads(f"v = {text}")["v"], kind)
        except msgspec.ValidationError:
            continue
        if value not in NOT_BUILT[key]:
            return text
    raise AssertionError(f"all values of {key} seem built: take it out of NOT_BUILT")


@pytest.mark.parametrize("key", NOT_BUILT)
def test_what_is_not_built_is_refused(base: Path, key: str) -> None:
    with pytest.raises(ConfigError, match="not built yet") as refused:
        load(base, [f"{key}={unbuilt_value(key)}"])
    assert refused.value.path == key
    assert refused.value.remedy


def test_reading_a_config_imports_nothing_heavy() -> None:
    script = "import sys, engine.config; print(*{name.partition('.')[0] for name in sys.modules})"
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=True)
    imported = set(done.stdout.split())
    assert "msgspec" in imported
    assert not imported & {"torch", "vllm", "transformers", "numpy"}
