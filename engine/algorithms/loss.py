"""The policy loss per token, and what a batch says about the distance of pi from mu. Pure tensor functions.

Per-token tensors are float32[T] over trainable tokens alone; pi is the policy under training, mu the behaviour policy,
whose log-probs the engine reported. One optimizer step per batch makes the policy that opens the step equal to pi, so
the ratios that carry information are those to mu, or to a proximal policy between the two.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
import torch

from engine.algorithms.presets import Kl, Loss

NEAR_ONE = (0.8, 1.2)
"""Ratios outside are what the breaker counts."""

_MAX_LOG_WEIGHT = 300.0
"""Sums of squares of e^300 stay finite in float64."""


class Statistics(msgspec.Struct, frozen=True, eq=False):
    """What a pass without gradients over the whole batch found, for the tokens at hand.

    sequence_log_ratio_T: mean of log r over the token's sequence. sequence_correction_T: mean of log(prox / mu) over
    it. budget: the largest (log r)^2 that the rule `budget` keeps.
    """

    sequence_log_ratio_T: torch.Tensor
    sequence_correction_T: torch.Tensor
    budget: float

    def part(self, tokens: slice) -> Statistics:
        return Statistics(self.sequence_log_ratio_T[tokens], self.sequence_correction_T[tokens], self.budget)


class Tokens(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The trainable tokens of one chunk.

    Gradients flow through `logprobs_T` (log pi), and through `entropy_T` when the loss has an entropy bonus.
    staleness_T (int64): version before the step minus the version that made the token. `reference_T` is required when
    `Loss.needs_reference`, `statistics` when `Loss.needs_statistics`.
    """

    logprobs_T: torch.Tensor
    behaviour_T: torch.Tensor
    advantages_T: torch.Tensor
    staleness_T: torch.Tensor
    entropy_T: torch.Tensor
    reference_T: torch.Tensor | None = None
    statistics: Statistics | None = None


def policy_loss(tokens: Tokens, loss: Loss) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss of each token, not normalised, and whether the rule bound it (bool[T]).

    A weight that a rule or correction replaces is selected before the exponential: neither an overflow nor the
    gradient of the branch not taken reaches the result. A NaN is never selected away: it ends in the loss.
    """
    log_ratio_T, log_correction_T = log_ratios(tokens, loss)
    if loss.level == "sequence":
        log_ratio_T = _statistics(tokens).sequence_log_ratio_T + log_ratio_T - log_ratio_T.detach()
    if loss.correction == "mis":
        log_correction_T = _statistics(tokens).sequence_correction_T
    touched_T, bound_T = _rule(log_ratio_T.detach(), tokens, loss)
    factor_T, dropped_T = _correction(log_correction_T, loss)
    fixed_T = touched_T | dropped_T
    free_T = log_ratio_T.masked_fill(fixed_T, 0.0).exp()
    weight_T = torch.where(fixed_T, bound_T, free_T) * factor_T
    if loss.gradient == "ratio":
        losses_T = -weight_T * tokens.advantages_T
    else:
        weight_T = weight_T.detach()
        scores_T = torch.where(weight_T == 0, 0.0, tokens.logprobs_T)
        losses_T = -weight_T * tokens.advantages_T * scores_T
    if loss.kl is not None:
        losses_T = losses_T + _kl(tokens, loss.kl)
    if loss.entropy_coef:
        losses_T = losses_T - loss.entropy_coef * tokens.entropy_T
    return losses_T, touched_T


def log_ratios(tokens: Tokens, loss: Loss) -> tuple[torch.Tensor, torch.Tensor]:
    """log r per token, through which gradients flow, and log(prox / mu) per token, constant.

    The proximal policy is interpolated, log prox = log mu + alpha (log pi - log mu) with alpha = (s - 1) / s at
    staleness s and 0 at s <= 1 (AReaL): the version before this one, without its forward pass. Its log-probs are
    constants of the step.
    """
    log_ratio_T = tokens.logprobs_T - tokens.behaviour_T
    match loss.ratio:
        case "behaviour":
            return log_ratio_T, torch.zeros_like(log_ratio_T)
        case "proximal":
            alpha_T = 1.0 - 1.0 / tokens.staleness_T.clamp(min=1).to(log_ratio_T.dtype)
            log_correction_T = alpha_T * log_ratio_T.detach()
            return log_ratio_T - log_correction_T, log_correction_T
        case "none":
            return torch.zeros_like(log_ratio_T), torch.zeros_like(log_ratio_T)


def _statistics(tokens: Tokens) -> Statistics:
    assert tokens.statistics is not None
    return tokens.statistics


def _rule(log_ratio_T: torch.Tensor, tokens: Tokens, loss: Loss) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the rule binds (bool[T]), and the constant weight that takes the ratio's place there."""
    up_T, down_T = tokens.advantages_T > 0, tokens.advantages_T < 0
    nothing_T = torch.zeros_like(log_ratio_T)
    match loss.rule:
        case "none":
            return torch.zeros_like(up_T), nothing_T
        case "clip":
            above_T = up_T & (log_ratio_T > math.log1p(loss.high))
            below_T = down_T & (log_ratio_T < math.log1p(-loss.low))
            return above_T | below_T, torch.where(above_T, 1 + loss.high, nothing_T + (1 - loss.low))
        case "cap":
            return log_ratio_T > math.log(loss.high), nothing_T + loss.high
        case "band":
            return (log_ratio_T < math.log(loss.low)) | (log_ratio_T > math.log(loss.high)), nothing_T
        case "prob_mask":
            log_pi_T = tokens.logprobs_T.detach()
            moved_T = log_pi_T.exp() - (log_pi_T - log_ratio_T).exp()
            return (up_T & (moved_T > loss.high)) | (down_T & (moved_T < -loss.low)), nothing_T
        case "budget":
            drifts_T = _drifts(log_ratio_T, tokens.advantages_T)
            return drifts_T & (log_ratio_T.double().square() > _statistics(tokens).budget), nothing_T


def _correction(log_correction_T: torch.Tensor, loss: Loss) -> tuple[torch.Tensor, torch.Tensor]:
    """The constant factor, and where it is 0 because the token is dropped (bool[T])."""
    dropped_T = torch.zeros_like(log_correction_T, dtype=torch.bool)
    if loss.correction == "tis":
        log_correction_T = log_correction_T.clamp(max=math.log(loss.correction_high))
    elif loss.correction in ("icepop", "mis"):
        low, high = math.log(loss.correction_low), math.log(loss.correction_high)
        dropped_T = (log_correction_T < low) | (log_correction_T > high)
    factor_T = log_correction_T.masked_fill(dropped_T, 0.0).exp()
    return torch.where(dropped_T, 0.0, factor_T), dropped_T


def _kl(tokens: Tokens, kl: Kl) -> torch.Tensor:
    """k2, or the value of k3 with the gradient of k2.

    To the reference: KL(pi || reference); the factor pi / mu makes mu's samples pi's, on which k2's gradient is
    unbiased. To the behaviour policy, on mu's own samples: KL(mu || pi), with a gradient right to first order in log r.
    """
    other_T = tokens.behaviour_T if kl.to == "behaviour" else tokens.reference_T
    assert other_T is not None
    difference_T = tokens.logprobs_T - other_T
    estimate_T = difference_T.square() / 2
    if kl.kind == "k3":
        log_T = difference_T.detach() if kl.to == "behaviour" else -difference_T.detach()
        estimate_T = estimate_T + (torch.expm1(log_T) - log_T - estimate_T.detach())
    if kl.to == "reference":
        estimate_T = estimate_T * (tokens.logprobs_T.detach() - tokens.behaviour_T).exp()
    return kl.coef * estimate_T


def sequence_means(values_T: torch.Tensor, sequence_T: torch.Tensor) -> torch.Tensor:
    """At each token the mean of `values_T` over its sequence; `sequence_T` int64[T] names the sequence."""
    sums_S, counts_S, index_T = _sequence_sums(values_T, sequence_T)
    return (sums_S / counts_S)[index_T].to(values_T.dtype)


def _sequence_sums(
    values_T: torch.Tensor, sequence_T: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """float64[S] sums, int64[S] token counts, and each token's place in them."""
    _, index_T, counts_S = sequence_T.unique(return_inverse=True, return_counts=True)
    sums_S = torch.zeros(len(counts_S), dtype=torch.float64, device=values_T.device)
    return sums_S.index_add_(0, index_T, values_T.double()), counts_S, index_T


def budget(log_ratio_T: torch.Tensor, advantages_T: torch.Tensor, limit: float) -> float:
    """M2PO's bound (arXiv 2510.01161): the largest (log r)^2 for which the mean over all tokens up to it is within
    `limit`, counting only tokens that already moved the way their advantage pulls. 0 when even the smallest is beyond.
    """
    drifts_T = _drifts(log_ratio_T, advantages_T)
    squares_U, counts_U = log_ratio_T[drifts_T].double().square().unique(return_counts=True)
    means_U = (squares_U * counts_U).cumsum(0) / counts_U.cumsum(0)
    kept_U = squares_U[means_U <= limit]
    return float(kept_U[-1]) if len(kept_U) else 0.0


def _drifts(log_ratio_T: torch.Tensor, advantages_T: torch.Tensor) -> torch.Tensor:
    return ((advantages_T > 0) & (log_ratio_T > 0)) | ((advantages_T < 0) & (log_ratio_T < 0))


class MismatchSums(msgspec.Struct):
    """Sums over a batch's trainable tokens and sequences, r = pi / mu. Sums of several ranks add up field by field.

    sequence_weight: exp(sum of log r) of a sequence; sequence_mean_weight: exp(mean of log r). Their exponents are
    held within 300 of 0, far beyond where one sequence alone makes the effective sample size.
    """

    loss: float = 0.0
    tokens: float = 0.0
    log_ratio: float = 0.0
    ratio: float = 0.0
    ratio_squared: float = 0.0
    prob_diff: float = 0.0
    entropy: float = 0.0
    touched: float = 0.0
    outside: float = 0.0
    sequences: float = 0.0
    sequence_weight: float = 0.0
    sequence_weight_squared: float = 0.0
    sequence_mean_weight: float = 0.0
    sequence_mean_weight_squared: float = 0.0
    reference_tokens: float = 0.0
    reference_k3: float = 0.0
    fresh_k3: float = 0.0
    stale_tokens: float = 0.0
    stale_k3: float = 0.0

    @classmethod
    def from_vector(cls, values: Sequence[float]) -> MismatchSums:
        return cls(*values)

    def vector(self) -> list[float]:
        """All sums, for a float64 all-reduce."""
        return list(msgspec.structs.astuple(self))

    def add(
        self,
        logprobs_T: torch.Tensor,
        behaviour_T: torch.Tensor,
        entropy_T: torch.Tensor,
        touched_T: torch.Tensor,
        sequence_T: torch.Tensor,
        staleness_T: torch.Tensor,
        reference_T: torch.Tensor | None = None,
    ) -> None:
        """Count whole sequences, in float64: all trainable tokens of one micro-batch."""
        log_pi_T, log_mu_T = logprobs_T.detach().double(), behaviour_T.double()
        log_ratio_T = log_pi_T - log_mu_T
        ratio_T = log_ratio_T.exp()
        self.tokens += log_ratio_T.numel()
        self.log_ratio += float(log_ratio_T.sum())
        self.ratio += float(ratio_T.sum())
        self.ratio_squared += float(ratio_T.square().sum())
        self.prob_diff += float((log_pi_T.exp() - log_mu_T.exp()).abs().sum())
        self.entropy += float(entropy_T.detach().double().sum())
        self.touched += float(touched_T.sum())
        self.outside += float(((ratio_T < NEAR_ONE[0]) | (ratio_T > NEAR_ONE[1])).sum())
        k3_T, stale_T = torch.expm1(log_ratio_T) - log_ratio_T, staleness_T > 0
        self.fresh_k3 += float(k3_T[~stale_T].sum())
        self.stale_tokens += float(stale_T.sum())
        self.stale_k3 += float(k3_T[stale_T].sum())
        sums_S, counts_S, _ = _sequence_sums(log_ratio_T, sequence_T)
        weight_S = sums_S.clamp(-_MAX_LOG_WEIGHT, _MAX_LOG_WEIGHT).exp()
        mean_weight_S = (sums_S / counts_S).clamp(-_MAX_LOG_WEIGHT, _MAX_LOG_WEIGHT).exp()
        self.sequences += len(counts_S)
        self.sequence_weight += float(weight_S.sum())
        self.sequence_weight_squared += float(weight_S.square().sum())
        self.sequence_mean_weight += float(mean_weight_S.sum())
        self.sequence_mean_weight_squared += float(mean_weight_S.square().sum())
        if reference_T is not None:
            log_T = reference_T.double() - log_pi_T
            self.reference_tokens += log_T.numel()
            self.reference_k3 += float((ratio_T * (torch.expm1(log_T) - log_T)).sum())

    def metrics(self, level: Literal["token", "sequence"]) -> dict[str, float | None]:
        """The `mismatch/*`, `rule/fraction`, `entropy`, `kl/ref` and `loss` keys; ess at the loss's level.

        k1 = E[-log r] and k3 = E[r - 1 - log r] estimate KL(mu || pi) on tokens sampled from mu
        (joschu.net/blog/kl-approx.html); ess = (sum w)^2 / (n sum w^2); chi2 = E[r^2] - 1. kl/ref is
        E[r k3(reference / pi)], KL(pi || reference) on mu's samples; null without a reference.
        """
        n = self.tokens
        if n == 0:
            return {}
        mean_log, mean = self.log_ratio / n, self.ratio / n
        by_sequence = (self.sequence_mean_weight, self.sequence_mean_weight_squared, self.sequences)
        by_token = (self.ratio, self.ratio_squared, n)
        return {
            "loss": self.loss,
            "entropy": self.entropy / n,
            "kl/ref": self.reference_k3 / self.reference_tokens if self.reference_tokens else None,
            "mismatch/k1": -mean_log,
            "mismatch/k3": mean - 1 - mean_log,
            "mismatch/k3_fresh": self.fresh_k3 / (n - self.stale_tokens) if n > self.stale_tokens else None,
            "mismatch/k3_stale": self.stale_k3 / self.stale_tokens if self.stale_tokens else None,
            "mismatch/ess": _ess(*(by_sequence if level == "sequence" else by_token)),
            "mismatch/chi2": self.ratio_squared / n - 1,
            "mismatch/prob_diff": self.prob_diff / n,
            "mismatch/ratio_mean": mean,
            "rule/fraction": self.touched / n,
        }

    @property
    def rho(self) -> float | None:
        """Effective share of the batch's sequences under their full weights exp(sum of log r), for `lr_scale`."""
        return _ess(self.sequence_weight, self.sequence_weight_squared, self.sequences)

    @property
    def outside_share(self) -> float:
        """Share of tokens whose ratio left NEAR_ONE, for `breaker_reason`."""
        return self.outside / self.tokens if self.tokens else 0.0


def _ess(total: float, squared: float, count: float) -> float | None:
    return total**2 / (count * squared) if squared > 0 else None


def lr_scale(rho: float, base: float = 1.0) -> float:
    """VCPO's factor for the learning rate (arXiv 2602.17616). base: the rho of full speed; its authors' runs use 1."""
    return math.sqrt(min(1.0, rho / base))


def breaker_reason(breaker: Mapping[str, float], share: float, grad_norm: float) -> str:
    """Why `algorithm.breaker` refuses a step, or empty: more than `share` of the tokens left NEAR_ONE, or the gradient
    norm is over `grad_norm`."""
    low, high = NEAR_ONE
    if share > breaker.get("share", math.inf):
        return f"breaker: {share:.3g} of the tokens left {low} ... {high}, more than {breaker['share']:g}"
    if grad_norm > breaker.get("grad_norm", math.inf):
        return f"breaker: gradient norm {grad_norm:.3g} is over {breaker['grad_norm']:g}"
    return ""
