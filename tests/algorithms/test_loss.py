"""The loss presets against their papers' formulas, written again in numpy float64, values and gradients."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from engine.algorithms.loss import PRESETS, MismatchSums, policy_loss

Float64 = NDArray[np.float64]
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def cispo(logprobs: Float64, behaviour: Float64, advantages: Float64) -> tuple[Float64, Float64, NDArray[np.bool_]]:
    """-sg(min(r, 5)) A log pi: value, derivative by log pi, and where the cap holds (MiniMax-M1, eq. 4)."""
    ratio = np.exp(logprobs - behaviour)
    weight = np.where(ratio > 5, 5.0, ratio)
    return -weight * advantages * logprobs, -weight * advantages, ratio > 5


def ppo_clip(logprobs: Float64, behaviour: Float64, advantages: Float64) -> tuple[Float64, Float64, NDArray[np.bool_]]:
    """-min(r A, clip(r, .8, 1.2) A), by cases: outside the clip in the direction of the advantage it is constant."""
    ratio = np.exp(logprobs - behaviour)
    above, below = (advantages > 0) & (ratio > 1.2), (advantages < 0) & (ratio < 0.8)
    plain = -ratio * advantages
    value = np.where(above, -1.2 * advantages, np.where(below, -0.8 * advantages, plain))
    return value, np.where(above | below, 0.0, plain), above | below


FORMULAS = {"cispo": cispo, "ppo_clip": ppo_clip}


def random_inputs() -> Inputs:
    """Ratios on both sides of every bound; some advantages exactly zero."""
    draws = np.random.default_rng(0)
    behaviour = -draws.exponential(2.0, 2000)
    logprobs = behaviour + draws.normal(0.0, 1.0, 2000)
    advantages = draws.normal(0.0, 1.0, 2000) * (draws.random(2000) > 0.1)
    return _float32(logprobs, behaviour, advantages)


def extreme_inputs() -> Inputs:
    """Log ratios -20 ... 20 with advantages of either sign and any size."""
    grid = np.array([(log_ratio, a) for log_ratio in range(-20, 21) for a in (-7.0, -1.0, -1e-3, 0.0, 1e-3, 1.0, 7.0)])
    logprobs = np.where(grid[:, 0] > 0, -0.5, -0.5 + grid[:, 0])
    return _float32(logprobs, logprobs - grid[:, 0], grid[:, 1])


def _float32(*arrays: Float64) -> Inputs:
    logprobs, behaviour, advantages = (torch.tensor(array, dtype=torch.float32) for array in arrays)
    return logprobs, behaviour, advantages


@pytest.mark.parametrize("inputs", [random_inputs(), extreme_inputs()], ids=["random", "extreme"])
@pytest.mark.parametrize("preset", FORMULAS)
def test_a_preset_is_its_formula(preset: str, inputs: Inputs) -> None:
    logprobs, behaviour, advantages = inputs
    value, gradient, touched = FORMULAS[preset](*(tensor.double().numpy() for tensor in inputs))
    leaf = logprobs.clone().requires_grad_()
    losses, is_touched = policy_loss(leaf, behaviour, advantages, PRESETS[preset])
    losses.sum().backward()
    assert leaf.grad is not None
    assert losses.dtype == torch.float32
    assert 0 < touched.sum() < len(touched)  # both branches are on trial
    np.testing.assert_allclose(losses.detach().numpy(), value, rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(leaf.grad.numpy(), gradient, rtol=2e-5, atol=1e-6)
    np.testing.assert_array_equal(is_touched.numpy(), touched)


def test_touched_by_hand() -> None:
    """Ratios 1/2, 1, 2, 6 with A = 1, -1 and 0."""
    ratios = torch.tensor([0.5, 1.0, 2.0, 6.0]).repeat(3)
    advantages = torch.tensor([1.0, -1.0, 0.0]).repeat_interleave(4)
    logprobs = torch.full((12,), -1.0)
    behaviour = logprobs - ratios.log()
    _, by_clip = policy_loss(logprobs, behaviour, advantages, PRESETS["ppo_clip"])
    _, by_cap = policy_loss(logprobs, behaviour, advantages, PRESETS["cispo"])
    assert by_clip.int().tolist() == [0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0]
    assert by_cap.int().tolist() == [0, 0, 0, 1] * 3


def test_behaviour_one_nat_lower_makes_every_ratio_e_times_as_large() -> None:
    logprobs = torch.tensor([-0.3, -1.0, -2.0, -4.0])
    behaviour = torch.tensor([-0.5, -1.0, -1.5, -4.5])
    advantages = torch.tensor([1.0, -1.0, 0.5, 2.0])

    def measure(behaviour: torch.Tensor) -> tuple[torch.Tensor, float, float]:
        leaf = logprobs.clone().requires_grad_()
        losses, touched = policy_loss(leaf, behaviour, advantages, PRESETS["cispo"])
        losses.sum().backward()
        assert leaf.grad is not None
        sums = MismatchSums()
        sums.add(logprobs, behaviour, torch.zeros(4), touched)
        return leaf.grad, sums.ratio, sums.log_ratio

    gradient, ratio, log_ratio = measure(behaviour)
    shifted_gradient, shifted_ratio, shifted_log_ratio = measure(behaviour - 1.0)
    # All ratios times e stay below the cap of 5 (the largest is e^1.5 = 4.48).
    assert torch.allclose(shifted_gradient, math.e * gradient, rtol=1e-5)
    assert shifted_ratio == pytest.approx(math.e * ratio, rel=1e-6)
    assert shifted_log_ratio == pytest.approx(log_ratio + 4.0, abs=1e-6)  # one nat for each of four tokens


def test_mismatch_by_hand() -> None:
    """Ratios 2 and 1/2: probabilities .5 against .25, and .1 against .2."""
    sums = MismatchSums(loss=0.125)
    logprobs, behaviour = torch.tensor([0.5, 0.1]).log(), torch.tensor([0.25, 0.2]).log()
    sums.add(logprobs, behaviour, torch.tensor([1.0, 2.0]), torch.tensor([True, False]))
    assert sums.metrics() == pytest.approx(
        {
            "loss": 0.125,
            "entropy": 1.5,
            "mismatch/k1": 0.0,
            "mismatch/k3": 0.25,  # 1.25 - 1 - 0
            "mismatch/ess": 6.25 / (2 * 4.25),
            "mismatch/chi2": 1.125,  # 4.25 / 2 - 1
            "mismatch/prob_diff": 0.175,  # (.25 + .1) / 2
            "mismatch/ratio_mean": 1.25,
            "rule/fraction": 0.5,
        },
        abs=1e-6,
    )


def test_mismatch_added_in_chunks_is_numpys_over_all() -> None:
    logprobs, behaviour, advantages = random_inputs()
    _, touched = policy_loss(logprobs, behaviour, advantages, PRESETS["ppo_clip"])
    entropy = torch.rand(len(logprobs), generator=torch.Generator().manual_seed(0))
    sums = MismatchSums()
    for part in (slice(0, 7), slice(7, 1500), slice(1500, None)):
        sums.add(logprobs[part], behaviour[part], entropy[part], touched[part])
    log_pi, log_mu = logprobs.double().numpy(), behaviour.double().numpy()
    ratio = np.exp(log_pi - log_mu)
    expected = {
        "loss": 0.0,
        "entropy": entropy.double().numpy().mean(),
        "mismatch/k1": (log_mu - log_pi).mean(),
        "mismatch/k3": (ratio - 1 - np.log(ratio)).mean(),
        "mismatch/ess": ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum()),
        "mismatch/chi2": (ratio**2).mean() - 1,
        "mismatch/prob_diff": np.abs(np.exp(log_pi) - np.exp(log_mu)).mean(),
        "mismatch/ratio_mean": ratio.mean(),
        "rule/fraction": touched.numpy().mean(),
    }
    assert sums.metrics() == pytest.approx(expected, rel=1e-5)


def test_nothing_counted_is_nothing_said() -> None:
    assert MismatchSums().metrics() == {}
