"""Which loss a run trains on: the preset table, and how single keys of `[algorithm]` change a row of it.

Imports no torch: a contradiction is refused in a fraction of a second.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import msgspec
from msgspec.structs import replace

from engine.config import AlgorithmSection
from engine.errors import ConfigError

Rule = Literal["none", "clip", "cap", "prob_mask", "band", "budget"]
Correction = Literal["", "raw", "tis", "icepop", "mis"]


class Kl(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A KL term of the loss: `coef` times the estimate `kind` of the divergence from `to`."""

    to: Literal["reference", "behaviour"]
    kind: Literal["k2", "k3"]
    coef: Annotated[float, msgspec.Meta(gt=0)]


class Loss(msgspec.Struct, frozen=True, kw_only=True):
    """One composed loss; the formulas are in docs/algorithms.md.

    ratio: denominator of r. level: r per token, or its geometric mean per sequence. rule: what bounds r, with
    `low` and `high`: `clip` to 1 - low ... 1 + high against the advantage; `cap` at high; `band` drops what leaves
    low ... high; `prob_mask` drops what moves a probability by more than low or high; `budget` drops the largest
    (log r)^2 until their mean is at most high. gradient: through r (`ratio`), or through log pi with r held constant
    (`score`). correction: factor for a proximal ratio, with its cap or band.
    """

    ratio: Literal["behaviour", "proximal", "none"] = "behaviour"
    level: Literal["token", "sequence"] = "token"
    rule: Rule = "none"
    low: float = 0.0
    high: float = math.inf
    gradient: Literal["ratio", "score"]
    correction: Correction = ""
    correction_low: float = 0.0
    correction_high: float = math.inf
    kl: Kl | None = None
    entropy_coef: float = 0.0

    @property
    def needs_statistics(self) -> bool:
        """Whether a pass without gradients over the whole batch must come first."""
        return self.level == "sequence" or self.rule == "budget" or self.correction == "mis"

    @property
    def needs_reference(self) -> bool:
        return self.kl is not None and self.kl.to == "reference"


PRESETS: dict[str, Loss] = {
    # MiniMax-M1 (arXiv 2506.13585), cap from ScaleRL (arXiv 2510.13786).
    "cispo": Loss(rule="cap", high=5.0, gradient="score"),
    # PPO (arXiv 1707.06347).
    "ppo_clip": Loss(rule="clip", low=0.2, high=0.2, gradient="ratio"),
    # LlamaRL's AIPO (arXiv 2505.24034).
    "reinforce_is": Loss(rule="cap", high=2.0, gradient="score"),
    # DPPO-Binary-TV (arXiv 2602.04879) with prime-rl's 1e-3 (log r)^2, which is k2 with twice the coefficient.
    "dppo": Loss(rule="prob_mask", low=0.2, high=0.2, gradient="ratio", kl=Kl("behaviour", "k2", 2e-3)),
    # M2PO (arXiv 2510.01161).
    "m2po": Loss(rule="budget", high=0.04, gradient="ratio"),
    # AReaL's decoupled PPO (arXiv 2505.24298).
    "decoupled_ppo": Loss(ratio="proximal", rule="clip", low=0.2, high=0.2, gradient="ratio", correction="raw"),
    # Supervised: with advantage 1 the loss of a token is -log pi.
    "ce": Loss(ratio="none", gradient="score"),
}

# (low, high) of a rule or correction that is not the preset's own.
RULE_BOUNDS: dict[Rule, tuple[float, float]] = {
    "none": (0.0, math.inf), "clip": (0.2, 0.2), "cap": (0.0, 5.0), "prob_mask": (0.2, 0.2), "band": (0.5, 5.0),
    "budget": (0.0, 0.04),
}
CORRECTION_BOUNDS: dict[Correction, tuple[float, float]] = {
    "raw": (0.0, math.inf), "tis": (0.0, 2.0), "icepop": (0.5, 5.0), "mis": (0.99, 1.01),
}

_RL_ONLY = ("ratio", "level", "rule", "gradient", "advantage", "correction", "kl", "entropy_coef", "ess_scaling",
            "breaker")


def resolve(section: AlgorithmSection) -> Loss:
    """The preset's row with the section's own keys in place of the preset's.

    Raises:
        ConfigError: the keys contradict each other.
    """
    if section.preset == "ce":
        _refuse_rl_keys(section)
    loss = PRESETS[section.preset]
    if section.ratio == "none":
        # What the preset does to a ratio has nothing to work on; a key that asks for it all the same is refused below.
        loss = Loss(ratio="none", gradient="score", kl=loss.kl)
    if section.rule and section.rule != loss.rule:
        low, high = RULE_BOUNDS[section.rule]
        loss = replace(loss, rule=section.rule, low=low, high=high)
    if section.correction and section.correction != loss.correction:
        low, high = CORRECTION_BOUNDS[section.correction]
        loss = replace(loss, correction=section.correction, correction_low=low, correction_high=high)
    loss = replace(
        loss,
        ratio=section.ratio or loss.ratio,
        level=section.level or loss.level,
        gradient=section.gradient or loss.gradient,
        kl=_kl(section.kl) if section.kl else loss.kl,
        entropy_coef=section.entropy_coef,
    )
    _refuse_contradictions(loss)
    return loss


def _kl(table: dict[str, Any]) -> Kl:
    remedy = "write { to = 'reference' or 'behaviour', kind = 'k2' or 'k3', coef = a number above 0 }"
    if table.get("kind") == "k1":
        raise ConfigError("algorithm.kl", value=table, limit="the gradient of k1 is zero in expectation", remedy=remedy)
    try:
        return msgspec.convert(table, Kl)
    except msgspec.ValidationError as error:
        raise ConfigError("algorithm.kl", value=table, limit=str(error), remedy=remedy) from error


def _refuse_rl_keys(section: AlgorithmSection) -> None:
    values, defaults = msgspec.structs.asdict(section), msgspec.structs.asdict(AlgorithmSection())
    for key in _RL_ONLY:
        if values[key] != defaults[key]:
            raise ConfigError(f"algorithm.{key}", value=values[key], limit="means nothing with algorithm.preset = 'ce'",
                              remedy="remove it, or choose another preset")


def _refuse_contradictions(loss: Loss) -> None:
    uncorrected = loss.ratio == "none"
    contradictions = (
        (loss.ratio == "behaviour" and loss.correction != "", "correction",
         "algorithm.ratio = 'behaviour' already divides by the behaviour policy, which would count twice",
         "set algorithm.ratio = 'proximal', or a preset without a correction"),
        (loss.ratio == "proximal" and loss.correction == "", "correction",
         "algorithm.ratio = 'proximal' leaves the behaviour policy out",
         "set algorithm.correction to raw, tis, icepop or mis"),
        (uncorrected and loss.rule != "none", "rule", "algorithm.ratio = 'none' has no ratio to bound",
         "set algorithm.rule = 'none'"),
        (uncorrected and loss.correction != "", "correction", "algorithm.ratio = 'none' is uncorrected",
         "choose a preset without a correction"),
        (uncorrected and loss.level != "token", "level", "algorithm.ratio = 'none' has no ratio to average",
         "set algorithm.level = 'token'"),
        (uncorrected and loss.gradient != "score", "gradient", "algorithm.ratio = 'none' has no ratio to go through",
         "set algorithm.gradient = 'score'"),
        (loss.rule == "clip" and loss.gradient != "ratio", "gradient",
         "algorithm.rule = 'clip' works by ending the gradient through the ratio",
         "set algorithm.gradient = 'ratio', or algorithm.rule = 'cap'"),
        (loss.rule in ("prob_mask", "budget") and loss.level != "token", "level",
         f"algorithm.rule = '{loss.rule}' judges single tokens",
         "set algorithm.level = 'token', or another rule"),
    )
    for wrong, key, limit, remedy in contradictions:
        if wrong:
            raise ConfigError(f"algorithm.{key}", value=getattr(loss, key), limit=limit, remedy=remedy)
