"""Presets and single keys to one loss; contradictions are refused before anything heavy starts."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from engine.algorithms.presets import CORRECTION_BOUNDS, PRESETS, RULE_BOUNDS, Correction, Kl, Loss, Rule, resolve
from engine.config import AlgorithmSection
from engine.errors import ConfigError


def section(**keys: Any) -> AlgorithmSection:
    return msgspec.convert(keys, AlgorithmSection)


def test_every_preset_of_the_configuration_has_its_row() -> None:
    fields = {field.name: field for field in msgspec.structs.fields(AlgorithmSection)}
    assert set(PRESETS) == set(get_args(fields["preset"].type))
    for preset, row in PRESETS.items():
        assert resolve(section(preset=preset)) == row


def test_every_rule_and_correction_has_its_bounds() -> None:
    assert set(RULE_BOUNDS) == set(get_args(Rule))
    assert {"", *CORRECTION_BOUNDS} == set(get_args(Correction))


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"rule": "band"}, Loss(rule="band", low=0.5, high=5.0, gradient="score")),
        ({"preset": "reinforce_is", "rule": "cap"}, Loss(rule="cap", high=2.0, gradient="score")),
        ({"preset": "ppo_clip", "rule": "cap"}, Loss(rule="cap", high=5.0, gradient="ratio")),
        (
            {"level": "sequence", "gradient": "ratio", "entropy_coef": 0.01},
            Loss(level="sequence", rule="cap", high=5.0, gradient="ratio", entropy_coef=0.01),
        ),
        (
            {"ratio": "proximal", "correction": "icepop"},
            Loss(ratio="proximal", rule="cap", high=5.0, gradient="score", correction="icepop", correction_low=0.5,
                 correction_high=5.0),
        ),
        ({"ratio": "none"}, Loss(ratio="none", gradient="score")),
        ({"preset": "decoupled_ppo", "ratio": "none"}, Loss(ratio="none", gradient="score")),
        (
            {"preset": "dppo", "ratio": "none"},
            Loss(ratio="none", gradient="score", kl=Kl("behaviour", "k2", 2e-3)),
        ),
        (
            {"preset": "dppo", "kl": {"to": "reference", "kind": "k3", "coef": 1}},
            Loss(rule="prob_mask", low=0.2, high=0.2, gradient="ratio", kl=Kl("reference", "k3", 1.0)),
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)  # fmt: skip
def test_a_key_replaces_the_presets_own(keys: dict[str, Any], expected: Loss) -> None:
    assert resolve(section(**keys)) == expected


REFERENCE = {"to": "reference", "kind": "k3", "coef": 0.1}


@pytest.mark.parametrize(
    ("keys", "path", "value", "limit"),
    [
        ({"correction": "tis"}, "correction", "'tis'", "would count twice"),
        ({"preset": "decoupled_ppo", "ratio": "behaviour"}, "correction", "'raw'", "would count twice"),
        ({"ratio": "proximal"}, "correction", "''", "leaves the behaviour policy out"),
        ({"ratio": "none", "rule": "cap"}, "rule", "'cap'", "no ratio to bound"),
        ({"ratio": "none", "correction": "tis"}, "correction", "'tis'", "is uncorrected"),
        ({"ratio": "none", "level": "sequence"}, "level", "'sequence'", "no ratio to average"),
        ({"ratio": "none", "gradient": "ratio"}, "gradient", "'ratio'", "no ratio to go through"),
        ({"preset": "ppo_clip", "gradient": "score"}, "gradient", "'score'", "through the ratio"),
        ({"preset": "dppo", "level": "sequence"}, "level", "'sequence'", "judges single tokens"),
        ({"preset": "m2po", "level": "sequence"}, "level", "'sequence'", "judges single tokens"),
        ({"kl": REFERENCE | {"kind": "k1"}}, "kl", "'k1'", "zero in expectation"),
        ({"kl": REFERENCE | {"kind": "k4"}}, "kl", "'k4'", "$.kind"),
        ({"kl": REFERENCE | {"coef": 0}}, "kl", "'coef': 0", "> 0.0"),
        ({"kl": REFERENCE | {"to": "teacher"}}, "kl", "'teacher'", "$.to"),
        ({"kl": REFERENCE | {"target": 1}}, "kl", "'target': 1", "unknown field `target`"),
        ({"kl": {"kind": "k2"}}, "kl", "'k2'", "missing required field"),
        ({"preset": "ce", "gradient": "score"}, "gradient", "'score'", "preset = 'ce'"),
        ({"preset": "ce", "rule": "cap"}, "rule", "'cap'", "preset = 'ce'"),
        ({"preset": "ce", "advantage": "centered"}, "advantage", "'centered'", "preset = 'ce'"),
        ({"preset": "ce", "kl": REFERENCE}, "kl", "'reference'", "preset = 'ce'"),
        ({"preset": "ce", "ess_scaling": True}, "ess_scaling", "True", "preset = 'ce'"),
        ({"preset": "ce", "entropy_coef": 0.1}, "entropy_coef", "0.1", "preset = 'ce'"),
    ],
    ids=str,
)
def test_a_contradiction_is_refused(keys: dict[str, Any], path: str, value: str, limit: str) -> None:
    with pytest.raises(ConfigError) as refused:
        resolve(section(**keys))
    assert refused.value.path == f"algorithm.{path}"
    assert value in str(refused.value)
    assert limit in str(refused.value)
    assert refused.value.remedy


def test_supervised_training_may_aggregate_as_it_likes() -> None:
    assert resolve(section(preset="ce", aggregation="sequence_mean")) == PRESETS["ce"]


def test_what_a_loss_needs() -> None:
    needing = {preset for preset, row in PRESETS.items() if row.needs_statistics}
    assert needing == {"m2po"}
    assert Loss(level="sequence", gradient="ratio").needs_statistics
    assert Loss(ratio="proximal", correction="mis", gradient="ratio").needs_statistics
    assert [preset for preset, row in PRESETS.items() if row.needs_reference] == []
    assert Loss(gradient="ratio", kl=Kl("reference", "k2", 1.0)).needs_reference


def test_a_band_around_one_is_a_band_in_logs() -> None:
    for low, high in (RULE_BOUNDS["band"], CORRECTION_BOUNDS["icepop"], CORRECTION_BOUNDS["mis"]):
        assert math.log(low) < 0 < math.log(high)


def test_the_presets_import_no_torch() -> None:
    script = "import sys, engine.algorithms.presets; print('torch' in sys.modules)"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
