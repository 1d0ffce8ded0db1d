"""The configuration: TOML read by msgspec, refused before anything heavy starts.

Every key is here from the start; a key whose feature is still to come is refused with "not built yet"
(`NOT_BUILT`). Imports no torch: a wrong key is reported in a fraction of a second.
"""

from __future__ import annotations

import difflib
import itertools
import math
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import msgspec

from engine.errors import ConfigError, MissingError

Positive = Annotated[int, msgspec.Meta(ge=1)]
NotNegative = Annotated[int, msgspec.Meta(ge=0)]
PositiveFloat = Annotated[float, msgspec.Meta(gt=0)]
NotNegativeFloat = Annotated[float, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(ge=0, lt=1)]
Dtype = Literal["float32", "bfloat16"]

MODEL_ALIASES = ("smollm2-135m-instruct", "tiny-random", "petri")


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the config file."""


class RunSection(Section, frozen=True, kw_only=True):
    name: str = ""
    """Folder below `dir`; empty: the config's file name and the time."""
    dir: str = "runs"
    seed: NotNegative = 0
    steps: Positive
    resume: str = "never"
    stage_timeout_s: PositiveFloat = 600.0
    """The longest that a stage may make no progress before the run ends with its name."""


class ModelSection(Section, frozen=True, kw_only=True):
    path: str
    dtype: Dtype = "bfloat16"
    """Of exported checkpoints, and of the engine unless `generate.dtype` says otherwise."""
    reference: str = ""
    chat_template: str = ""
    """A .jinja file; empty: the tokenizer's own template."""
    lm_head_dtype: Literal["auto", "float32"] = "auto"


class TaskSection(Section, frozen=True, kw_only=True):
    env: str
    name: str = ""
    params: dict[str, Any] = {}
    weight: PositiveFloat = 1.0
    seed: NotNegative = 0
    held_out: NotNegative = 0
    """Questions set aside by their text: evaluated, never trained on."""
    system_prompt: str = ""
    answer: Literal["last_number", "boxed", "tag", "exact"] = "last_number"

    @property
    def label(self) -> str:
        """The env's name in metrics."""
        return self.name or self.env

    @property
    def scores(self) -> dict[str, Any]:
        """Scorer -> weight, from `params.score`: a table, or one name with weight 1."""
        score = self.params.get("score", "exact")
        return score if isinstance(score, dict) else {str(score): 1.0}


class RewardSection(Section, frozen=True, kw_only=True):
    timeout_s: PositiveFloat = 5.0
    memory_mib: Positive = 2048
    workers: Positive = 1
    truncated: Literal["zero", "keep", "mask"] = "keep"


class GenerateSection(Section, frozen=True, kw_only=True):
    backend: Literal["vllm", "fake", "replay"] = "vllm"
    replay_from: str = ""
    """For `backend = "replay"`: the run folder whose recorded rollouts are served again."""
    tensor_parallel: Positive = 1
    data_parallel: Positive = 1
    group_size: Annotated[int, msgspec.Meta(ge=2)] = 8
    max_new_tokens: Positive = 256
    max_model_len: Positive = 1024
    temperature: PositiveFloat = 1.0
    stop: tuple[Annotated[str, msgspec.Meta(min_length=1)], ...] = ()
    max_in_flight: Positive = 256
    """Rollouts generated at once."""
    kv_cache_gib: PositiveFloat = 1.0
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    sleep_level: Literal[0, 1, 2] = 1
    """What the engine gives back while the trainer has the devices."""
    quantization: str = ""
    speculative: dict[str, Any] = {}
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"


class ScheduleSection(Section, frozen=True, kw_only=True):
    placement: Literal["time_sliced", "split", "remote"] = "time_sliced"
    cores: str = ""
    groups_per_step: Positive = 8
    steps_per_slice: Positive = 1
    max_staleness: NotNegative = 1
    overdue: Literal["wait", "drop"] = "wait"
    max_wait_s: NotNegativeFloat = 0.0
    in_flight: Literal["recompute", "stale_kv", "drain"] = "recompute"
    refill: bool = False


class AlgorithmSection(Section, frozen=True, kw_only=True):
    preset: Literal["cispo", "ppo_clip", "reinforce_is", "dppo", "m2po", "decoupled_ppo", "ce"] = "cispo"
    ratio: Literal["", "behaviour", "proximal", "none"] = ""
    level: Literal["", "token", "sequence"] = ""
    rule: Literal["", "none", "clip", "cap", "prob_mask", "band", "budget"] = ""
    gradient: Literal["", "ratio", "score"] = ""
    advantage: Literal["leave_one_out", "centered", "group_norm", "batch_norm"] = "leave_one_out"
    correction: Literal["", "raw", "tis", "icepop", "mis"] = ""
    aggregation: Literal["token_mean", "prompt_mean", "sequence_mean", "constant"] = "token_mean"
    kl: dict[str, Any] = {}
    entropy_coef: float = 0.0
    ess_scaling: bool = False
    breaker: dict[str, float] = {}


class TrainSection(Section, frozen=True, kw_only=True):
    lr: PositiveFloat = 1e-5
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: NotNegative = 0
    weight_decay: NotNegativeFloat = 0.0
    betas: tuple[Share, Share] = (0.9, 0.95)
    grad_clip: PositiveFloat = 1.0
    micro_batch_tokens: Positive = 4096
    dtype: Dtype = "bfloat16"
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    optimizer: Literal["adamw"] = "adamw"
    fsdp: bool = False
    ranks: NotNegative = 0
    activation_checkpointing: bool = False
    offload: Literal["none", "optimizer", "all"] = "none"
    shared_prompt: bool = False
    lora: dict[str, Any] = {}


class WeightsSection(Section, frozen=True, kw_only=True):
    hosts: Literal["broadcast", "pull"] = "broadcast"
    keep: Positive = 2


class NetSection(Section, frozen=True, kw_only=True):
    bind: str = ""
    join: str = ""
    identity: str = ""
    learner_key: str = ""
    allow: str = ""
    lease_s: PositiveFloat = 120.0
    heartbeat_s: PositiveFloat = 5.0
    max_lag: Positive = 2
    max_frame_mib: Positive = 64


class EvalsSection(Section, frozen=True, kw_only=True):
    every: NotNegative = 0
    """Steps between evaluations; the first and the last version are evaluated too. 0: none."""
    suites: tuple[str, ...] = ("held_out",)
    """`held_out`, those of `python -m evals list`, and folders of lm-eval task files."""
    limit: NotNegative = 0
    """Questions per task; 0: all."""
    temperature: NotNegativeFloat = 1.0
    """Of what is sampled."""


class CheckpointSection(Section, frozen=True, kw_only=True):
    every: NotNegative = 0
    """Steps between checkpoints; one is always written at the end. 0: only that one."""
    keep: NotNegative = 0
    keep_every: NotNegative = 0
    hf_every: NotNegative = 0


class ProfileSection(Section, frozen=True, kw_only=True):
    nvml_hz: NotNegativeFloat = 0.0
    torch_steps: tuple[NotNegative, ...] = ()
    ranks: tuple[NotNegative, ...] = ()
    memory: bool = False
    prometheus_port: NotNegative = 0


class ObserveSection(Section, frozen=True, kw_only=True):
    terminal: Literal["auto", "rich", "plain", "off"] = "auto"
    tensorboard: bool = True
    wandb: bool = False
    samples: NotNegative = 3
    """Completions shown on the terminal after each step."""


class Config(Section, frozen=True, kw_only=True):
    """A whole run."""

    run: RunSection
    model: ModelSection
    tasks: Annotated[tuple[TaskSection, ...], msgspec.Meta(min_length=1)]
    reward: RewardSection = RewardSection()
    generate: GenerateSection = GenerateSection()
    schedule: ScheduleSection = ScheduleSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    train: TrainSection = TrainSection()
    weights: WeightsSection = WeightsSection()
    net: NetSection = NetSection()
    evals: EvalsSection = EvalsSection()
    checkpoint: CheckpointSection = CheckpointSection()
    profile: ProfileSection = ProfileSection()
    observe: ObserveSection = ObserveSection()

    @property
    def engine_dtype(self) -> Dtype:
        """Dtype of the weights that the engine holds, and of weights on their way to it."""
        return self.model.dtype if self.generate.dtype == "auto" else self.generate.dtype

    @property
    def sleep_level(self) -> Literal[0, 1, 2]:
        """How deep the engine sleeps in a slice: it gives back only what it shares with the trainer."""
        return self.generate.sleep_level if self.schedule.placement == "time_sliced" else 0


# Key -> the values that work today. Everything else the schema allows is refused as not built yet.
NOT_BUILT: dict[str, tuple[object, ...]] = {
    "run.resume": ("never",),
    "generate.tensor_parallel": (1,),
    "generate.data_parallel": (1,),
    "generate.kv_cache_dtype": ("auto",),
    "generate.quantization": ("",),
    "generate.speculative": ({},),
    "schedule.placement": ("time_sliced", "split"),
    "train.param_dtype": ("float32",),
    "train.shared_prompt": (False,),
    "train.lora": ({},),
    "weights.hosts": ("broadcast",),
    "weights.keep": (2,),
    "net.bind": ("",),
    "net.join": ("",),
    "net.identity": ("",),
    "net.learner_key": ("",),
    "net.allow": ("",),
    "net.lease_s": (120.0,),
    "net.heartbeat_s": (5.0,),
    "net.max_lag": (2,),
    "net.max_frame_mib": (64,),
    "checkpoint.keep": (0,),
    "checkpoint.keep_every": (0,),
    "checkpoint.hf_every": (0,),
    "profile.nvml_hz": (0.0,),
    "profile.torch_steps": ((),),
    "profile.ranks": ((),),
    "profile.memory": (False,),
    "profile.prometheus_port": (0,),
    "observe.wandb": (False,),
}

_RESERVED_LABELS = ("mean", "trained", "std", "timeouts")
_NARROWED_SAMPLING = ("top_p", "top_k", "min_p")


def load(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read a TOML file, apply `section.key=value` overrides, and check everything that needs no heavy import.

    Raises:
        ConfigError: naming the key, its value, the limit and the remedy.
        MissingError: the model folder or a task file does not exist.
    """
    try:
        raw = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(
            "--config", value=str(path), limit=f"cannot be read ({error.strerror})", remedy="see configs/ for files"
        ) from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            "--config", value=str(path), limit=f"is not TOML: {error}", remedy="mend that line"
        ) from error
    for override in overrides:
        _apply(raw, override)
    config = _convert(raw)
    _refuse_unbuilt(config)
    _refuse_contradictions(config)
    _require_files(config)
    return config


def _apply(raw: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    parts = key.split(".")
    if not equals or len(parts) < 2:
        raise ConfigError(
            override, value=text, limit="is no override", remedy="write section.key=value, or tasks.0.key=value"
        )
    try:
        value = tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        value = text
    here: Any = raw
    for part, following in itertools.pairwise(parts):
        if isinstance(here, list):
            if not part.isdigit() or int(part) >= len(here):
                raise ConfigError(key, value=value, limit=f"there are {len(here)} entries, counted from 0",
                                  remedy="name an entry that the file has")
            here = here[int(part)]
        else:
            here = here.setdefault(part, [] if following.isdigit() else {})
        if not isinstance(here, dict | list):
            raise ConfigError(key, value=value, limit=f"{part} is no table", remedy="check the key's spelling")
    if isinstance(here, list):
        raise ConfigError(key, value=value, limit="names an entry, not a key", remedy="write tasks.0.key=value")
    here[parts[-1]] = value


def _convert(raw: dict[str, Any]) -> Config:
    try:
        return msgspec.convert(raw, Config, strict=True)
    except msgspec.ValidationError as error:
        message = str(error)
    limit, _, where = message.partition(" - at `$")
    path = re.sub(r"\[(\d+)\]", r".\1", where.rstrip("`").lstrip(".")).removesuffix("[...]")
    missing = re.search(r"missing required field `(.*)`", limit)
    if missing:
        full = ".".join(filter(None, (path, missing[1])))
        raise ConfigError(full, value=None, limit="is required", remedy=f"set {full} in the file or as an override")
    unknown = re.search(r"unknown field `(.*)`", limit)
    if unknown:
        raise _unknown_key(raw, path, unknown[1])
    raise ConfigError(path, value=_lookup(raw, path), limit=limit, remedy=_accepted(path, limit))


_TOML_WORDS = {"int": "a whole number", "float": "a number", "str": "text in quotes", "bool": "true or false",
               "array": "a list", "object": "a table"}


def _accepted(path: str, limit: str) -> str:
    """What the key takes, in the words of a TOML file, told from msgspec's message and the schema."""
    if limit.startswith("Invalid enum value"):
        section, key = re.sub(r"\.\d+", "", path).split(".")
        field = next(field for field in msgspec.structs.fields(_section_type(section)) if field.name == key)
        return f"write {' or '.join(repr(choice) for choice in get_args(field.type))}"
    expected = limit.removeprefix("Expected ").partition(", got")[0]
    return "write " + re.sub(r"`(\w+)`", lambda kind: _TOML_WORDS[kind[1]], expected)


def _unknown_key(raw: dict[str, Any], path: str, key: str) -> ConfigError:
    full = ".".join(filter(None, (path, key)))
    value = _lookup(raw, path)[key]
    if path == "generate" and key in _NARROWED_SAMPLING:
        return ConfigError(full, value=value, limit="training needs the full sampling distribution",
                           remedy="remove it; generate.temperature is corrected for in training")
    section = re.sub(r"\.\d+", "", path)
    known = [field.name for field in msgspec.structs.fields(_section_type(section))]
    near = difflib.get_close_matches(key, known, n=1)
    remedy = f"did you mean {'.'.join(filter(None, (path, near[0])))}?" if near else f"known keys: {', '.join(known)}"
    return ConfigError(full, value=value, limit="is not a key", remedy=remedy)


def _section_type(name: str) -> type[Section]:
    return {"": Config, "run": RunSection, "model": ModelSection, "tasks": TaskSection, "reward": RewardSection,
            "generate": GenerateSection, "schedule": ScheduleSection, "algorithm": AlgorithmSection,
            "train": TrainSection, "weights": WeightsSection, "net": NetSection, "evals": EvalsSection,
            "checkpoint": CheckpointSection, "profile": ProfileSection, "observe": ObserveSection}[name]


def _lookup(raw: Any, path: str) -> Any:
    for part in filter(None, path.split(".")):
        raw = raw[int(part)] if isinstance(raw, list) else raw[part]
    return raw


def _refuse_unbuilt(config: Config) -> None:
    for key, built in NOT_BUILT.items():
        section, name = key.split(".")
        value = msgspec.structs.asdict(getattr(config, section))[name]
        if value not in built:
            works = " or ".join(repr(choice) for choice in built)
            raise ConfigError(key, value=value, limit="not built yet", remedy=f"what works today: {works}")


def _refuse_contradictions(config: Config) -> None:
    generate, schedule = config.generate, config.schedule
    if generate.max_new_tokens >= generate.max_model_len:
        raise ConfigError("generate.max_new_tokens", value=generate.max_new_tokens,
                          limit=f"leaves no room for a prompt in generate.max_model_len = {generate.max_model_len}",
                          remedy="lower it, or raise generate.max_model_len")
    if config.train.micro_batch_tokens < generate.max_model_len:
        raise ConfigError("train.micro_batch_tokens", value=config.train.micro_batch_tokens,
                          limit=f"one rollout may have generate.max_model_len = {generate.max_model_len} tokens",
                          remedy="raise it to at least that, or lower generate.max_model_len")
    _refuse_schedules(config)
    wave = schedule.groups_per_step * generate.group_size
    if schedule.max_staleness == 0 and generate.max_in_flight < wave:
        raise ConfigError("generate.max_in_flight", value=generate.max_in_flight,
                          limit=f"max_staleness = 0 generates a whole step at once: {wave} rollouts",
                          remedy=f"set it to at least {wave}")
    if (generate.backend == "replay") != bool(generate.replay_from):
        raise ConfigError("generate.replay_from", value=generate.replay_from,
                          limit=f"goes with generate.backend = 'replay', not with {generate.backend!r}",
                          remedy="set both or neither")
    _refuse_chats_elsewhere(config)
    asked = config.evals.suites if config.evals.every else ()
    if "held_out" in asked and not any(task.held_out for task in config.tasks):
        raise ConfigError("evals.every", value=config.evals.every, limit="no task holds questions out",
                          remedy="set tasks.0.held_out, or evals.every = 0, or leave held_out out of evals.suites")
    if "held_out" in asked and not config.evals.temperature:
        raise ConfigError("evals.temperature", value=0.0, limit="held_out samples each question 8 times",
                          remedy="set it above 0: a greedy answer is taken beside them")
    if asked and generate.backend == "replay":
        raise ConfigError("evals.every", value=config.evals.every, limit="a recorded run answers nothing else",
                          remedy="set evals.every = 0 with generate.backend = 'replay'")
    if config.train.warmup_steps > config.run.steps:
        raise ConfigError("train.warmup_steps", value=config.train.warmup_steps,
                          limit=f"is more than run.steps = {config.run.steps}", remedy="lower it")
    _refuse_breaker(config.algorithm.breaker)
    if (config.algorithm.kl.get("to") == "reference") != bool(config.model.reference):
        raise ConfigError("model.reference", value=config.model.reference,
                          limit="goes with algorithm.kl = { to = 'reference', ... }", remedy="set both or neither")
    labels = [task.label for task in config.tasks]
    for index, label in enumerate(labels):
        if label in _RESERVED_LABELS:
            raise ConfigError(f"tasks.{index}.name", value=label, limit=f"would hide the metric reward/{label}",
                              remedy="choose another name; for reasoning_gym, put the family in params.family")
        if label in labels[:index]:
            raise ConfigError(f"tasks.{index}.name", value=label, limit="another task has that name",
                              remedy="give each [[tasks]] entry its own name; for reasoning_gym, put the family in "
                                     "params.family")


def _refuse_schedules(config: Config) -> None:
    """Keys of `schedule` that do not go together, or not with others."""
    schedule = config.schedule
    most = 2 if schedule.max_staleness == 1 else max(1, schedule.max_staleness)
    if schedule.steps_per_slice > most:
        raise ConfigError("schedule.steps_per_slice", value=schedule.steps_per_slice,
                          limit=f"schedule.max_staleness = {schedule.max_staleness} has groups for {most} at most",
                          remedy="lower it, or raise schedule.max_staleness")
    if schedule.in_flight == "stale_kv" and schedule.placement != "split":
        raise ConfigError("schedule.in_flight", value="stale_kv",
                          limit=f"requests do not stay open under placement = {schedule.placement!r}",
                          remedy="set schedule.placement = 'split', or in_flight = 'recompute'")
    if schedule.max_wait_s >= config.run.stage_timeout_s:
        raise ConfigError("schedule.max_wait_s", value=schedule.max_wait_s,
                          limit=f"is not below run.stage_timeout_s = {config.run.stage_timeout_s:g}, the run's end",
                          remedy="lower it, or raise run.stage_timeout_s")
    if schedule.max_wait_s and schedule.overdue == "drop":
        raise ConfigError("schedule.max_wait_s", value=schedule.max_wait_s,
                          limit="goes with schedule.overdue = 'wait': 'drop' does not wait",
                          remedy="set one of the two")
    if config.train.offload != "none" and schedule.placement != "time_sliced":
        raise ConfigError("train.offload", value=config.train.offload,
                          limit=f"nobody needs the trainer's device under placement = {schedule.placement!r}",
                          remedy="remove it, or set schedule.placement = 'time_sliced'")
    if schedule.cores and schedule.placement != "split":
        raise ConfigError("schedule.cores", value=schedule.cores,
                          limit=f"cores are not divided under placement = {schedule.placement!r}",
                          remedy="set schedule.placement = 'split', or leave it empty")


def _refuse_chats_elsewhere(config: Config) -> None:
    """Chats are for supervised steps, and supervised steps for chats alone."""
    supervised = config.algorithm.preset == "ce"
    for index, task in enumerate(config.tasks):
        if (task.env == "chats") != supervised:
            raise ConfigError(f"tasks.{index}.env", value=task.env,
                              limit=f"does not go with algorithm.preset = {config.algorithm.preset!r}",
                              remedy="env = 'chats' and preset = 'ce' belong together; rewards need another env, such "
                                     "as 'jsonl'")
        if supervised and task.held_out:
            raise ConfigError(f"tasks.{index}.held_out", value=task.held_out, limit="supervised steps evaluate nothing",
                              remedy="remove it; hold questions out in the run that follows")
    if supervised and config.evals.every:
        raise ConfigError("evals.every", value=config.evals.every, limit="supervised steps evaluate nothing",
                          remedy="set it to 0; evaluate in the run that follows")


def _refuse_breaker(breaker: dict[str, float]) -> None:
    """Unknown limits of `algorithm.breaker`, and limits out of range."""
    for key, value in breaker.items():
        if key not in ("share", "grad_norm"):
            raise ConfigError(f"algorithm.breaker.{key}", value=value, limit="is not a key",
                              remedy="known keys: share, grad_norm")
        if not 0 < value <= (1 if key == "share" else math.inf):
            raise ConfigError(f"algorithm.breaker.{key}", value=value,
                              limit="is not in 0 ... 1" if key == "share" else "is not above 0",
                              remedy="such as share = 0.5 and grad_norm = 100")


def _require_files(config: Config) -> None:
    path = config.model.path
    if path not in MODEL_ALIASES and not is_hub_id(path):
        folder = Path(path).expanduser()
        if not (folder / "config.json").is_file():
            raise MissingError(
                f"model.path = {path!r}: no model folder there (looked for {folder / 'config.json'})",
                remedy=_model_remedy(path, folder),
            )
    template = config.model.chat_template
    if template and not Path(template).expanduser().is_file():
        raise MissingError(f"model.chat_template = {template!r}: no such file",
                           remedy="name a .jinja file, or leave it empty for the tokenizer's own template")
    for index, task in enumerate(config.tasks):
        if task.env not in ("jsonl", "chats"):
            continue
        file = task.params.get("path")
        if not isinstance(file, str):
            raise ConfigError(f"tasks.{index}.params.path", value=file, limit=f"is required for env = {task.env!r}",
                              remedy="name a file of JSON lines: docs/tasks-and-rewards.md shows one")
        if not Path(file).expanduser().is_file():
            raise MissingError(f"tasks.{index}.params.path = {file!r}: no such file", remedy="check the path")
    if config.generate.replay_from and not (Path(config.generate.replay_from) / "rollouts").is_dir():
        raise MissingError(f"generate.replay_from = {config.generate.replay_from!r}: holds no rollouts folder",
                           remedy="name the folder of a finished run, runs/NAME")


def _model_remedy(path: str, folder: Path) -> str:
    if (folder / "checkpoints" / "latest" / "config.json").is_file():
        return f"did you mean {path}/checkpoints/latest?"
    near = difflib.get_close_matches(path, MODEL_ALIASES, n=1)
    known = f"name a Hugging Face folder, a hub id such as org/model, or one of {', '.join(MODEL_ALIASES)}"
    return f"did you mean {near[0]}?" if near else known


def is_hub_id(path: str) -> bool:
    """`org/name`, unless something of that name lies on disk."""
    return bool(re.fullmatch(r"[\w.-]+/[\w.-]+", path)) and not path.startswith(".") and not Path(path).exists()
