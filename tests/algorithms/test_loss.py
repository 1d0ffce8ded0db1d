"""Losses against their papers' formulas: written again token by token in float64, gradients by central differences."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import astuple, replace
from numpy.typing import NDArray

from engine.algorithms.loss import (
    MismatchSums,
    Statistics,
    Tokens,
    breaker_reason,
    budget,
    log_ratios,
    lr_scale,
    policy_loss,
    sequence_means,
)
from engine.algorithms.presets import PRESETS, Kl, Loss

Float64 = NDArray[np.float64]


class Token(NamedTuple):
    """One token in float64: `pi` is log pi held constant; `correction` is the mean of log(prox / mu) over its sequence;
    `kept` says what M2PO's loop leaves in."""

    pi: float
    mu: float
    advantage: float
    staleness: int
    kept: bool
    correction: float


def clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def cispo(x: float, t: Token) -> float:
    """MiniMax-M1, eq. 4: sg(min(r, 5)) A log pi."""
    return -min(math.exp(t.pi - t.mu), 5.0) * t.advantage * x


def ppo_clip(x: float, t: Token) -> float:
    """PPO, eq. 7."""
    r = math.exp(x - t.mu)
    return -min(r * t.advantage, clip(r, 0.8, 1.2) * t.advantage)


def reinforce_is(x: float, t: Token) -> float:
    """LlamaRL: sg(min(pi / mu, 2)) A log pi."""
    return -min(math.exp(t.pi - t.mu), 2.0) * t.advantage * x


def dppo(x: float, t: Token) -> float:
    """DPPO's binary total variation mask, with 1e-3 (log r)^2 on every token."""
    moved = math.exp(t.pi) - math.exp(t.mu)
    masked = (t.advantage > 0 and moved > 0.2) or (t.advantage < 0 and moved < -0.2)
    return (0.0 if masked else -math.exp(x - t.mu) * t.advantage) + 1e-3 * (x - t.mu) ** 2


def m2po(x: float, t: Token) -> float:
    return -math.exp(x - t.mu) * t.advantage if t.kept else 0.0


def decoupled_ppo(x: float, t: Token) -> float:
    """AReaL, eq. 5, the proximal policy one version behind pi and interpolated between the versions."""
    alpha = 0.0 if t.staleness <= 1 else (-1 - -t.staleness) / (0 - -t.staleness)
    proximal = t.mu + alpha * (t.pi - t.mu)
    r, w = math.exp(x - proximal), math.exp(proximal - t.mu)
    return w * max(-r * t.advantage, -clip(r, 0.8, 1.2) * t.advantage)


def ce(x: float, t: Token) -> float:
    return -t.advantage * x


FORMULAS = {formula.__name__: formula for formula in (cispo, ppo_clip, reinforce_is, dppo, m2po, decoupled_ppo, ce)}


def kept_by_paper(log_ratios: Iterable[float], advantages: Iterable[float], limit: float) -> list[bool]:
    """M2PO, algorithm 1: while the mean of (log r)^2 over drifting tokens exceeds the limit, mask the largest."""
    pairs = list(zip(log_ratios, advantages, strict=True))
    left = [i for i, (ratio, a) in enumerate(pairs) if (a > 0 and ratio > 0) or (a < 0 and ratio < 0)]
    kept = [True] * len(pairs)
    while left and sum(pairs[i][0] ** 2 for i in left) / len(left) > limit:
        largest = max(pairs[i][0] ** 2 for i in left)
        for i in [i for i in left if pairs[i][0] ** 2 == largest]:
            kept[i] = False
            left.remove(i)
    return kept


class Case(NamedTuple):
    logprobs: torch.Tensor
    behaviour: torch.Tensor
    advantages: torch.Tensor
    staleness: torch.Tensor
    reference: torch.Tensor
    sequences: torch.Tensor

    def tokens(self, loss: Loss, logprobs: torch.Tensor | None = None) -> Tokens:
        tokens = Tokens(
            logprobs_T=self.logprobs if logprobs is None else logprobs,
            behaviour_T=self.behaviour,
            advantages_T=self.advantages,
            staleness_T=self.staleness,
            reference_T=self.reference,
            entropy_T=torch.zeros_like(self.logprobs),
        )
        with torch.no_grad():
            ratio_T, correction_T = log_ratios(tokens, loss)
            statistics = Statistics(
                sequence_means(ratio_T, self.sequences),
                sequence_means(correction_T, self.sequences),
                budget(ratio_T, self.advantages, 0.04),
            )
        return replace(tokens, statistics=statistics)

    def in_float64(self) -> list[Token]:
        pi, mu, a, s, _, ids = (tensor.tolist() for tensor in self)
        kept = kept_by_paper((self.logprobs - self.behaviour).double().tolist(), a, 0.04)
        members = {name: [j for j, other in enumerate(ids) if other == name] for name in set(ids)}
        rows: list[Token] = []
        for i, name in enumerate(ids):
            mine = members[name]
            corrected = sum((pi[j] - mu[j]) * (s[j] - 1) / s[j] for j in mine if s[j] > 1) / len(mine)
            rows.append(Token(pi[i], mu[i], a[i], s[i], kept[i], corrected))
        return rows


def random_case() -> Case:
    """Ratios on both sides of every bound, some advantages exactly zero, sequences of one to seven tokens."""
    draws = np.random.default_rng(0)
    lengths = draws.integers(1, 8, 120)
    sequences = np.repeat(np.arange(len(lengths)), lengths)
    behaviour = -draws.exponential(2.0, len(sequences))
    logprobs = behaviour + draws.normal(0.0, 1.0, len(sequences))
    advantages = (draws.normal(0.0, 1.0, len(lengths)) * (draws.random(len(lengths)) > 0.1))[sequences]
    return make_case(logprobs, behaviour, advantages, draws.integers(0, 6, len(sequences)), sequences)


def extreme_case() -> Case:
    """Log ratios -20 ... 20 with advantages of either sign and any size, each token a sequence of its own."""
    grid = np.array([(log_ratio, a) for log_ratio in range(-20, 21) for a in (-7.0, -1.0, -1e-3, 0.0, 1e-3, 1.0, 7.0)])
    logprobs = np.where(grid[:, 0] > 0, -0.5, -0.5 + grid[:, 0])
    count = np.arange(len(grid))
    return make_case(logprobs, logprobs - grid[:, 0], grid[:, 1], count % 5, count)


def make_case(
    logprobs: Float64, behaviour: Float64, advantages: Float64, staleness: NDArray[np.int64],
    sequences: NDArray[np.int64],
) -> Case:  # fmt: skip
    reference = logprobs - np.random.default_rng(1).normal(0.0, 0.5, len(logprobs))
    return Case(
        *(torch.tensor(array, dtype=torch.float32) for array in (logprobs, behaviour, advantages)),
        torch.tensor(staleness),
        torch.tensor(reference, dtype=torch.float32),
        torch.tensor(sequences),
    )


def assert_is(formula: Callable[[float, Token], float], case: Case, loss: Loss) -> torch.Tensor:
    """Values and gradients are the formula's. Returns where the rule bound."""
    leaf = case.logprobs.clone().requires_grad_()
    losses, touched = policy_loss(case.tokens(loss, leaf), loss)
    losses.sum().backward()
    assert leaf.grad is not None
    assert losses.dtype == torch.float32
    rows, step = case.in_float64(), 1e-6
    value = [formula(t.pi, t) for t in rows]
    gradient = [(formula(t.pi + step, t) - formula(t.pi - step, t)) / (2 * step) for t in rows]
    np.testing.assert_allclose(losses.detach().numpy(), value, rtol=5e-5, atol=1e-6)
    np.testing.assert_allclose(leaf.grad.numpy(), gradient, rtol=5e-5, atol=1e-5)
    return touched


@pytest.mark.parametrize("case", [random_case(), extreme_case()], ids=["random", "extreme"])
@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_its_formula(preset: str, case: Case) -> None:
    touched = assert_is(FORMULAS[preset], case, PRESETS[preset])
    assert not touched.all()
    assert touched.any() == (preset != "ce")  # both branches are on trial


def proximal(t: Token) -> float:
    """log(prox / mu)."""
    return 0.0 if t.staleness <= 1 else (t.staleness - 1) / t.staleness * (t.pi - t.mu)


CORRECTIONS: dict[str, Callable[[Token], float]] = {
    "raw": lambda t: math.exp(proximal(t)),
    "tis": lambda t: min(math.exp(proximal(t)), 2.0),
    "icepop": lambda t: math.exp(proximal(t)) if 0.5 <= math.exp(proximal(t)) <= 5.0 else 0.0,
    "mis": lambda t: math.exp(t.correction) if 0.9 <= math.exp(t.correction) <= 1.1 else 0.0,
}
BOUNDS = {"raw": (0.0, math.inf), "tis": (0.0, 2.0), "icepop": (0.5, 5.0), "mis": (0.9, 1.1)}


@pytest.mark.parametrize("gradient", ["ratio", "score"])
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_a_correction_is_its_formula(correction: str, gradient: str) -> None:
    low, high = BOUNDS[correction]
    loss = Loss(
        ratio="proximal", correction=correction, correction_low=low, correction_high=high, gradient=gradient
    )  # type: ignore[arg-type]  # fmt: skip

    def formula(x: float, t: Token) -> float:
        w = CORRECTIONS[correction](t)
        if gradient == "ratio":
            return -w * math.exp(x - t.mu - proximal(t)) * t.advantage
        return -w * math.exp(t.pi - t.mu - proximal(t)) * t.advantage * x

    for case in (random_case(), extreme_case()):
        assert_is(formula, case, loss)
    weights = {CORRECTIONS[correction](t) for t in random_case().in_float64()}
    assert {"raw": 1.0, "tis": 2.0, "icepop": 0.0, "mis": 0.0}[correction] in weights  # the bound is on trial


def test_a_probability_mask_measures_from_the_ratios_denominator() -> None:
    """At staleness 4 the proximal policy stands at 3/4 of the way from mu to pi, in logs."""
    loss = Loss(ratio="proximal", rule="prob_mask", low=0.2, high=0.2, gradient="ratio", correction="raw")
    logprobs, behaviour = torch.tensor([0.8, 0.9]).log(), torch.tensor([0.4, 0.1]).log()
    tokens = replace(tokens_of(logprobs, behaviour, torch.ones(2)), staleness_T=torch.tensor([4, 4]))
    losses, touched = policy_loss(tokens, loss)
    # prox = .8^.75 .4^.25 = .673, .127 below pi; .9^.75 .1^.25 = .520, .380 below.
    assert touched.tolist() == [False, True]
    assert losses.tolist() == pytest.approx([-2.0, 0.0])


def test_a_correction_drops_what_the_rule_bounds_too() -> None:
    """At staleness 2 and pi = 36 mu, pi / prox = prox / mu = 6: over the cap of 2 and out of the band."""
    loss = Loss(ratio="proximal", rule="cap", high=2.0, gradient="score", correction="icepop", correction_low=0.5,
                correction_high=5.0)  # fmt: skip
    tokens = tokens_of(torch.tensor([-1.0, -1.0]), torch.tensor([-1.0 - math.log(36), -2.8]), torch.ones(2))
    losses, touched = policy_loss(replace(tokens, staleness_T=torch.tensor([2, 2])), loss)
    # The other token: pi / prox = prox / mu = e^.9 = 2.46, over the cap, inside the band.
    assert losses.tolist() == pytest.approx([0.0, 2 * math.exp(0.9)])
    assert touched.tolist() == [True, True]


def test_what_a_correction_drops_may_be_infinite() -> None:
    """At staleness 2 and log(pi / mu) = 400, both pi / prox and prox / mu are e^200."""
    loss = Loss(ratio="proximal", gradient="ratio", correction="icepop", correction_low=0.5, correction_high=5.0)
    leaf = torch.tensor([-0.1], requires_grad=True)
    tokens = replace(tokens_of(leaf, torch.tensor([-400.1]), torch.ones(1)), staleness_T=torch.tensor([2]))
    losses, touched = policy_loss(tokens, loss)
    losses.sum().backward()
    assert (losses.tolist(), touched.tolist()) == ([0.0], [False])
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [0.0]


def test_a_proximal_ratio_times_its_raw_correction_is_the_behaviour_ratio() -> None:
    case = random_case()
    raw, _ = policy_loss(case.tokens(PRESETS["m2po"]), Loss(ratio="proximal", correction="raw", gradient="ratio"))
    plain, _ = policy_loss(case.tokens(PRESETS["m2po"]), Loss(gradient="ratio"))
    np.testing.assert_allclose(raw.numpy(), plain.numpy(), rtol=1e-5)


def test_at_staleness_one_the_proximal_policy_is_the_behaviour_policy() -> None:
    case = random_case()._replace(staleness=torch.ones(len(random_case().logprobs), dtype=torch.int64))
    decoupled = policy_loss(case.tokens(PRESETS["decoupled_ppo"]), PRESETS["decoupled_ppo"])
    plain = policy_loss(case.tokens(PRESETS["ppo_clip"]), PRESETS["ppo_clip"])
    assert torch.equal(decoupled[0], plain[0])
    assert torch.equal(decoupled[1], plain[1])


RULES: dict[str, Callable[[float, float], float]] = {
    "none": lambda r, a: r * a,
    "clip": lambda r, a: min(r * a, clip(r, 0.8, 1.2) * a),
    "cap": lambda r, a: min(r, 1.5) * a,
    "band": lambda r, a: r * a if 0.5 <= r <= 1.5 else 0.0,
}
RULE_LIMITS = {"none": (0.0, math.inf), "clip": (0.2, 0.2), "cap": (0.0, 1.5), "band": (0.5, 1.5)}


@pytest.mark.parametrize(
    ("rule", "gradient"), [*((rule, "ratio") for rule in RULES), *((rule, "score") for rule in RULES if rule != "clip")]
)
def test_a_sequences_tokens_sum_to_the_sequences_loss(rule: str, gradient: str) -> None:
    """|y| f(exp(mean log r)) A, and its derivative by each of the sequence's log-probs; one token included."""
    low, high = RULE_LIMITS[rule]
    loss = Loss(level="sequence", rule=rule, low=low, high=high, gradient=gradient)  # type: ignore[arg-type]
    case = random_case()
    leaf = case.logprobs.clone().requires_grad_()
    losses, touched = policy_loss(case.tokens(loss, leaf), loss)
    losses.sum().backward()
    assert leaf.grad is not None
    assert bool(touched.any()) == (rule != "none")
    log_pi, log_mu, advantages = (tensor.double().numpy() for tensor in case[:3])
    ids = case.sequences.numpy()
    for sequence in range(ids[-1] + 1):
        mine = ids == sequence
        a, mu, frozen = advantages[mine][0], log_mu[mine], log_pi[mine]

        def whole(x: Float64, a: float = a, mu: Float64 = mu, frozen: Float64 = frozen) -> float:
            if gradient == "ratio":
                return -len(x) * RULES[rule](math.exp((x - mu).mean()), a)
            return -len(x) * RULES[rule](math.exp((frozen - mu).mean()), a) * x.mean()

        assert losses[torch.from_numpy(mine)].sum().item() == pytest.approx(whole(frozen), rel=5e-5, abs=1e-6)
        for place, got in enumerate(leaf.grad[torch.from_numpy(mine)].tolist()):
            step = np.eye(len(frozen))[place] * 1e-6
            derivative = (whole(frozen + step) - whole(frozen - step)) / 2e-6
            assert got == pytest.approx(derivative, rel=5e-5, abs=1e-6)


@pytest.mark.parametrize("kind", ["k2", "k3"])
def test_the_kl_to_the_reference_has_its_divergences_gradient(kind: str) -> None:
    """mu uniform over five tokens, each drawn once: the mean is the exact expectation."""
    logits = torch.tensor([0.3, -1.0, 0.5, 2.0, 0.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([1.0, 0.2, -0.3, 0.1, 0.4], dtype=torch.float64).log_softmax(0)
    loss = Loss(gradient="ratio", kl=Kl("reference", kind, 0.5))  # type: ignore[arg-type]
    log_pi = logits.log_softmax(0)
    tokens = tokens_of(log_pi, torch.full((5,), -math.log(5), dtype=torch.float64), torch.zeros(5), reference)
    estimate = policy_loss(tokens, loss)[0].mean()
    divergence = 0.5 * (log_pi.exp() * (log_pi - reference)).sum()
    (got,) = torch.autograd.grad(estimate, logits, retain_graph=True)
    (expected,) = torch.autograd.grad(divergence, logits)
    torch.testing.assert_close(got, expected)
    if kind == "k3":
        torch.testing.assert_close(estimate, divergence)


@pytest.mark.parametrize("gradient", ["ratio", "score"])
def test_without_a_rule_the_gradient_is_the_policy_gradient(gradient: str) -> None:
    logits = torch.tensor([0.3, -1.0, 0.5, 2.0, 0.0], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([1.0, -2.0, 0.0, 0.5, 3.0], dtype=torch.float64)
    log_pi = logits.log_softmax(0)
    tokens = tokens_of(log_pi, torch.full((5,), -math.log(5), dtype=torch.float64), advantages)
    (got,) = torch.autograd.grad(
        policy_loss(tokens, Loss(gradient=gradient))[0].mean(), logits, retain_graph=True  # type: ignore[arg-type]
    )  # fmt: skip
    (expected,) = torch.autograd.grad(-(log_pi.exp() * advantages).sum(), logits)
    torch.testing.assert_close(got, expected)


def test_the_kl_to_the_behaviour_by_hand() -> None:
    """log r = 1 and -2: k2 is 1/2 and 2; k3 is e - 2 and e^-2 + 1; both have the gradient log r."""
    behaviour = torch.tensor([-3.0, -1.0])
    for kind, expected in (("k2", [0.5, 2.0]), ("k3", [math.e - 2, math.exp(-2) + 1])):
        leaf = torch.tensor([-2.0, -3.0], requires_grad=True)
        loss = Loss(gradient="ratio", kl=Kl("behaviour", kind, 10.0))  # type: ignore[arg-type]
        losses, _ = policy_loss(tokens_of(leaf, behaviour, torch.zeros(2)), loss)
        losses.sum().backward()
        assert losses.tolist() == pytest.approx([10 * value for value in expected], rel=1e-5)
        assert leaf.grad is not None
        assert leaf.grad.tolist() == pytest.approx([10.0, -20.0], rel=1e-5)


def test_an_entropy_bonus_is_subtracted() -> None:
    entropy = torch.tensor([1.0, 3.0], requires_grad=True)
    tokens = replace(tokens_of(torch.zeros(2), torch.zeros(2), torch.zeros(2)), entropy_T=entropy)
    losses, _ = policy_loss(tokens, Loss(gradient="ratio", entropy_coef=0.5))
    losses.sum().backward()
    assert losses.tolist() == [-0.5, -1.5]
    assert entropy.grad is not None
    assert entropy.grad.tolist() == [-0.5, -0.5]


def tokens_of(
    logprobs: torch.Tensor, behaviour: torch.Tensor, advantages: torch.Tensor, reference: torch.Tensor | None = None
) -> Tokens:
    """Fresh tokens, whose statistics keep nothing that the budget judges."""
    nothing = torch.zeros_like(behaviour)
    return Tokens(
        logprobs_T=logprobs, behaviour_T=behaviour, advantages_T=advantages, reference_T=reference,
        staleness_T=torch.zeros(len(behaviour), dtype=torch.int64), entropy_T=nothing,
        statistics=Statistics(nothing, nothing, 0.0),
    )  # fmt: skip


@pytest.mark.parametrize("gradient", ["ratio", "score"])
@pytest.mark.parametrize("rule", ["clip", "cap", "band", "prob_mask", "budget"])
def test_what_a_rule_takes_out_may_be_infinite(rule: str, gradient: str) -> None:
    """e^400 overflows: 0 * inf would be NaN, in the value or in the gradient of the branch not taken."""
    loss = Loss(rule=rule, low=0.2, high=2.0 if rule == "cap" else 0.2, gradient=gradient)  # type: ignore[arg-type]
    leaf = torch.tensor([-0.1, -0.1], requires_grad=True)
    losses, touched = policy_loss(tokens_of(leaf, torch.tensor([-400.1, -math.inf]), torch.ones(2)), loss)
    losses.sum().backward()
    assert touched.all()
    assert losses.isfinite().all()
    assert leaf.grad is not None
    held = {"clip": 1.2, "cap": 2.0}.get(rule, 0.0)
    assert leaf.grad.tolist() == pytest.approx([-held if gradient == "score" else 0.0] * 2)


def test_a_dropped_token_adds_nothing_however_small_its_probability() -> None:
    """mu certain of a token that pi finds impossible, and a proximal policy far from both."""
    leaf = torch.tensor([-math.inf], requires_grad=True)
    loss = Loss(rule="band", low=0.5, high=5.0, gradient="score")
    losses, touched = policy_loss(tokens_of(leaf, torch.zeros(1), -torch.ones(1)), loss)
    losses.sum().backward()
    assert (losses.tolist(), touched.tolist()) == ([0.0], [True])
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [0.0]


@pytest.mark.parametrize("preset", [name for name in PRESETS if name != "ce"])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_nan_of_the_engine_reaches_the_loss(preset: str, advantage: float) -> None:
    tokens = tokens_of(torch.tensor([-1.0]), torch.tensor([math.nan]), torch.tensor([advantage]))
    assert policy_loss(tokens, PRESETS[preset])[0].isnan().all()


def test_all_masked_is_zero_and_no_nan() -> None:
    leaf = torch.tensor([-0.1, -0.2, -3.0], requires_grad=True)
    tokens = tokens_of(leaf, torch.tensor([-3.0, -3.0, -0.1]), torch.tensor([1.0, 1.0, -1.0]))
    for preset in ("dppo", "m2po"):
        losses, touched = policy_loss(tokens, replace(PRESETS[preset], kl=None))
        assert (losses.tolist(), touched.tolist()) == ([0.0] * 3, [True] * 3)
        losses.sum().backward()
        assert leaf.grad is not None
        assert leaf.grad.tolist() == [0.0] * 3


def test_touched_by_hand() -> None:
    """Ratios 1/2, 1, 2, 6 with A = 1, -1 and 0."""
    ratios = torch.tensor([0.5, 1.0, 2.0, 6.0]).repeat(3)
    advantages = torch.tensor([1.0, -1.0, 0.0]).repeat_interleave(4)
    logprobs = torch.full((12,), -1.0)
    tokens = tokens_of(logprobs, logprobs - ratios.log(), advantages)
    expected = {
        "ppo_clip": [0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0],
        "cispo": [0, 0, 0, 1] * 3,
        "reinforce_is": [0, 0, 0, 1] * 3,
        # e^-1 = .368 against .736, .368, .184, .061
        "dppo": [0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0],
        "m2po": [0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0],
    }
    for preset, touched in expected.items():
        assert policy_loss(tokens, PRESETS[preset])[1].int().tolist() == touched


def test_behaviour_one_nat_lower_makes_every_ratio_e_times_as_large() -> None:
    logprobs = torch.tensor([-0.3, -1.0, -2.0, -4.0])
    behaviour = torch.tensor([-0.5, -1.0, -1.5, -4.5])
    advantages = torch.tensor([1.0, -1.0, 0.5, 2.0])

    def measure(behaviour: torch.Tensor) -> tuple[torch.Tensor, float, float]:
        leaf = logprobs.clone().requires_grad_()
        losses, touched = policy_loss(tokens_of(leaf, behaviour, advantages), PRESETS["cispo"])
        losses.sum().backward()
        assert leaf.grad is not None
        sums = MismatchSums()
        sums.add(logprobs, behaviour, torch.zeros(4), touched, torch.arange(4), torch.zeros(4))
        return leaf.grad, sums.ratio, sums.log_ratio

    gradient, ratio, log_ratio = measure(behaviour)
    shifted_gradient, shifted_ratio, shifted_log_ratio = measure(behaviour - 1.0)
    # All ratios times e stay below the cap of 5 (the largest is e^1.5 = 4.48).
    assert torch.allclose(shifted_gradient, math.e * gradient, rtol=1e-5)
    assert shifted_ratio == pytest.approx(math.e * ratio, rel=1e-6)
    assert shifted_log_ratio == pytest.approx(log_ratio + 4.0, abs=1e-6)  # one nat for each of four tokens


def test_a_chunk_has_its_own_part_of_the_statistics() -> None:
    whole = Statistics(torch.arange(5.0), torch.arange(5.0, 10.0), 0.25)
    part = whole.part(slice(1, 3))
    assert (part.sequence_log_ratio_T.tolist(), part.sequence_correction_T.tolist()) == ([1.0, 2.0], [6.0, 7.0])
    assert part.budget == 0.25


def test_sequence_means_by_hand() -> None:
    means = sequence_means(torch.tensor([1.0, 5.0, 3.0, -2.0]), torch.tensor([7, 3, 7, 9]))
    assert means.tolist() == [2.0, 5.0, 2.0, -2.0]
    assert means.dtype == torch.float32


@pytest.mark.parametrize(
    ("log_ratios", "advantages", "expected"),
    [
        ([0.1, 0.2, 0.3], [1.0, 1.0, 1.0], 0.3**2),  # mean .14 / 3 is within .05
        ([0.1, 0.2, 0.4], [1.0, 1.0, 1.0], 0.2**2),  # .21 / 3 = .07 is not, .05 / 2 is
        ([0.1, 0.2, -0.4], [1.0, 1.0, 1.0], 0.2**2),  # the last moved against its advantage: not counted
        ([-0.1, -0.2, 9.0], [-1.0, -1.0, -1.0], 0.2**2),
        ([0.1, 0.25, 0.25], [1.0, 1.0, 1.0], 0.25**2),  # .135 / 3 = .045
        ([0.1, 0.3, 0.3], [1.0, 1.0, 1.0], 0.1**2),  # one .3 would fit, both do not, and none is above the other
        ([3.0, 4.0], [1.0, 2.0], 0.0),
        ([3.0, 4.0], [0.0, -2.0], 0.0),
        ([], [], 0.0),
    ],
)
def test_the_budget_by_hand(log_ratios: list[float], advantages: list[float], expected: float) -> None:
    assert budget(torch.tensor(log_ratios), torch.tensor(advantages), 0.05) == pytest.approx(expected, rel=1e-6)


tokens_T = st.lists(st.tuples(st.sampled_from([-1, 1, 2, 4, -8]), st.sampled_from([-1.0, 0.0, 2.0])), max_size=20)


@given(tokens=tokens_T)
@settings(max_examples=100, deadline=None)
def test_the_budget_masks_what_the_papers_loop_masks(tokens: list[tuple[int, float]]) -> None:
    """Log ratios in sixteenths, exact in every format, with many ties."""
    log_ratio_T = torch.tensor([count / 16 for count, _ in tokens])
    advantages_T = torch.tensor([advantage for _, advantage in tokens])
    bound = budget(log_ratio_T, advantages_T, 0.04)
    drifts = ((advantages_T > 0) & (log_ratio_T > 0)) | ((advantages_T < 0) & (log_ratio_T < 0))
    kept = ~(drifts & (log_ratio_T.double().square() > bound))
    assert kept.tolist() == kept_by_paper(log_ratio_T.tolist(), advantages_T.tolist(), 0.04)


def test_mismatch_by_hand() -> None:
    """Ratios 2 and 1/2 in one sequence, 2 in another: probabilities .5, .1, .5 against .25, .2, .25."""
    sums = MismatchSums(loss=0.125)
    logprobs, behaviour = torch.tensor([0.5, 0.1, 0.5]).log(), torch.tensor([0.25, 0.2, 0.25]).log()
    sums.add(logprobs, behaviour, torch.tensor([1.0, 2.0, 3.0]), torch.tensor([True, False, False]),
             torch.tensor([4, 4, 2]), torch.tensor([0, 2, 1]))  # fmt: skip
    expected = {
        "loss": 0.125,
        "entropy": 2.0,
        "kl/ref": None,
        "mismatch/k1": -math.log(2) / 3,
        "mismatch/k3": 1.5 - 1 - math.log(2) / 3,
        "mismatch/k3_fresh": 2 - 1 - math.log(2),
        "mismatch/k3_stale": (0.5 - 1 + math.log(2) + 2 - 1 - math.log(2)) / 2,
        "mismatch/ess": 4.5**2 / (3 * 8.25),
        "mismatch/chi2": 1.75,  # 8.25 / 3 - 1
        "mismatch/prob_diff": 0.2,  # (.25 + .1 + .25) / 3
        "mismatch/ratio_mean": 1.5,
        "rule/fraction": 1 / 3,
    }
    assert sums.metrics("token") == pytest.approx(expected, abs=1e-6)
    # One weight per sequence: sqrt(2 * 1/2) = 1 and 2.
    assert sums.metrics("sequence")["mismatch/ess"] == pytest.approx(9 / (2 * 5), abs=1e-6)
    assert sums.rho == pytest.approx(9 / (2 * 5), abs=1e-6)
    assert sums.outside_share == 1.0


def test_full_and_length_normalised_weights_differ() -> None:
    """Sequences with log r = (ln 2, ln 2) and (0): full weights 4 and 1, normalised ones 2 and 1."""
    sums = MismatchSums()
    log_ratio = torch.tensor([math.log(2), math.log(2), 0.0])
    sums.add(log_ratio - 3, torch.full((3,), -3.0), torch.zeros(3), torch.zeros(3), torch.tensor([0, 0, 1]),
             torch.zeros(3))  # fmt: skip
    assert sums.rho == pytest.approx(25 / (2 * 17), rel=1e-6)
    assert sums.metrics("sequence")["mismatch/ess"] == pytest.approx(9 / (2 * 5), rel=1e-6)
    assert sums.outside_share == pytest.approx(2 / 3)


def test_one_sequence_beyond_all_others_leaves_an_effective_one() -> None:
    sums = MismatchSums()
    length = torch.arange(4).repeat_interleave(500)
    log_ratio = torch.where(length == 2, 2.0, 0.0)  # e^1000 and one, three times
    sums.add(log_ratio - 5, torch.full((2000,), -5.0), torch.zeros(2000), torch.zeros(2000), length, length)
    assert sums.rho == pytest.approx(1 / 4)


def test_the_metrics_kl_to_the_reference_is_the_divergence() -> None:
    """mu uniform over four tokens, each drawn once: the mean is the exact expectation."""
    pi, reference = np.array([0.1, 0.2, 0.3, 0.4]), np.array([0.4, 0.1, 0.25, 0.25])
    sums = MismatchSums()
    sums.add(torch.tensor(pi).log(), torch.full((4,), 0.25).log(), torch.zeros(4), torch.zeros(4), torch.arange(4),
             torch.ones(4), torch.tensor(reference).log())  # fmt: skip
    metrics = sums.metrics("token")
    assert metrics["kl/ref"] == pytest.approx((pi * np.log(pi / reference)).sum(), rel=1e-6)
    assert (metrics["mismatch/k3_fresh"], metrics["mismatch/k3_stale"]) == (None, pytest.approx(metrics["mismatch/k3"]))


def test_sums_of_two_ranks_are_the_sums_of_the_whole() -> None:
    """The metrics are numpy's over all tokens, however the sequences were dealt out."""
    case = random_case()
    _, touched = policy_loss(case.tokens(PRESETS["ppo_clip"]), PRESETS["ppo_clip"])
    entropy = torch.rand(len(touched), generator=torch.Generator().manual_seed(0))
    staleness = torch.arange(len(touched)) % 3
    vectors: list[list[float]] = []
    for remainder in (0, 1):
        sums = MismatchSums(loss=0.25)
        for third in range(3):
            part = (case.sequences % 2 == remainder) & (case.sequences // 2 % 3 == third)
            sums.add(case.logprobs[part], case.behaviour[part], entropy[part], touched[part], case.sequences[part],
                     staleness[part], case.reference[part])  # fmt: skip
        assert astuple(MismatchSums.from_vector(sums.vector())) == astuple(sums)
        vectors.append(sums.vector())
    whole = MismatchSums.from_vector(np.sum(vectors, axis=0).tolist())
    log_pi, log_mu, log_ref = (tensor.double().numpy() for tensor in (case.logprobs, case.behaviour, case.reference))
    ratio = np.exp(log_pi - log_mu)
    means = [(log_pi - log_mu)[case.sequences.numpy() == i].mean() for i in range(120)]
    weights = np.exp(means)
    expected = {
        "loss": 0.5,
        "entropy": entropy.double().numpy().mean(),
        "kl/ref": (ratio * (np.exp(log_ref - log_pi) - 1 - log_ref + log_pi)).mean(),
        "mismatch/k1": (log_mu - log_pi).mean(),
        "mismatch/k3": (ratio - 1 - np.log(ratio)).mean(),
        "mismatch/k3_fresh": (ratio - 1 - np.log(ratio))[::3].mean(),
        "mismatch/k3_stale": np.delete(ratio - 1 - np.log(ratio), np.s_[::3]).mean(),
        "mismatch/ess": weights.sum() ** 2 / (120 * (weights**2).sum()),
        "mismatch/chi2": (ratio**2).mean() - 1,
        "mismatch/prob_diff": np.abs(np.exp(log_pi) - np.exp(log_mu)).mean(),
        "mismatch/ratio_mean": ratio.mean(),
        "rule/fraction": touched.numpy().mean(),
    }
    assert whole.metrics("sequence") == pytest.approx(expected, rel=1e-9)
    assert whole.outside_share == ((ratio < 0.8) | (ratio > 1.2)).mean()


def test_nothing_counted_is_nothing_said() -> None:
    assert MismatchSums().metrics("token") == {}
    assert MismatchSums().rho is None
    assert MismatchSums().outside_share == 0.0


def test_the_learning_rate_follows_the_root_of_the_effective_share() -> None:
    assert lr_scale(0.25) == 0.5
    assert lr_scale(0.18, base=0.5) == pytest.approx(0.6)
    assert lr_scale(0.9, base=0.5) == 1.0


def test_a_breaker_names_its_limit() -> None:
    both = {"share": 0.5, "grad_norm": 100.0}
    assert breaker_reason(both, 0.5, 100.0) == ""
    assert breaker_reason({}, 1.0, 1e9) == ""
    assert breaker_reason(both, 0.75, 1.0) == "breaker: 0.75 of the tokens left 0.8 ... 1.2, more than 0.5"
    assert breaker_reason({"grad_norm": 100.0}, 0.75, 123.0) == "breaker: gradient norm 123 is over 100"
