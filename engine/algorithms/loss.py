"""The policy loss: ratio x rule x gradient, per token. Pure tensor functions.

r = pi_theta / mu, with mu the engine's log-probs: one optimizer step per batch makes the policy that opens the step
equal to pi_theta, so the ratio that carries information is the one to the behaviour policy.
"""

from __future__ import annotations

from typing import Literal

import msgspec
import torch


class Loss(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the preset table.

    rule `clip`: pessimistic minimum of r A and clip(r, 1 - low, 1 + high) A. rule `cap`: r capped at `high`.
    gradient `ratio` goes through r; `score` treats the weight as constant and goes through log pi.
    """

    rule: Literal["clip", "cap"]
    gradient: Literal["ratio", "score"]
    low: float = 0.0
    high: float


PRESETS = {
    # MiniMax-M1 (arXiv 2506.13585), constant from ScaleRL (arXiv 2510.13786): -sg(min(r, 5)) A log pi
    "cispo": Loss(rule="cap", gradient="score", high=5.0),
    # PPO (arXiv 1707.06347): -min(r A, clip(r, .8, 1.2) A)
    "ppo_clip": Loss(rule="clip", gradient="ratio", low=0.2, high=0.2),
}


def policy_loss(
    logprobs_T: torch.Tensor, behaviour_T: torch.Tensor, advantages_T: torch.Tensor, loss: Loss
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss of each token, not yet normalised, and whether the rule changed it (bool[T]).

    All inputs float32[T], trainable tokens only; gradients flow through `logprobs_T` alone.
    """
    ratio_T = (logprobs_T - behaviour_T).exp()
    if loss.rule == "clip":
        clipped_T = ratio_T.clamp(1 - loss.low, 1 + loss.high)
        plain_T = ratio_T * advantages_T
        bound_T = clipped_T * advantages_T
        return -torch.minimum(plain_T, bound_T), bound_T < plain_T
    weight_T = ratio_T.detach().clamp(max=loss.high)
    return -weight_T * advantages_T * logprobs_T, ratio_T.detach() > loss.high


class MismatchSums(msgspec.Struct):
    """Running sums over trainable tokens of log r = log pi_theta - log mu, for the mismatch metrics."""

    tokens: int = 0
    log_ratio: float = 0.0
    ratio: float = 0.0
    ratio_squared: float = 0.0
    prob_diff: float = 0.0
    entropy: float = 0.0
    touched: int = 0
    loss: float = 0.0

    def add(
        self,
        logprobs_T: torch.Tensor,
        behaviour_T: torch.Tensor,
        entropy_T: torch.Tensor,
        touched_T: torch.Tensor,
    ) -> None:
        """Count one chunk of tokens, in float64."""
        log_ratio_T = (logprobs_T - behaviour_T).double()
        ratio_T = log_ratio_T.exp()
        self.tokens += log_ratio_T.numel()
        self.log_ratio += float(log_ratio_T.sum())
        self.ratio += float(ratio_T.sum())
        self.ratio_squared += float(ratio_T.square().sum())
        self.prob_diff += float((logprobs_T.double().exp() - behaviour_T.double().exp()).abs().sum())
        self.entropy += float(entropy_T.double().sum())
        self.touched += int(touched_T.sum())

    def metrics(self) -> dict[str, float | None]:
        """The `mismatch/*`, `rule/fraction`, `entropy` and `loss` keys.

        k1 = E[-log r] and k3 = E[r - 1 - log r] estimate KL(mu || pi_theta) on tokens sampled from mu
        (joschu.net/blog/kl-approx.html); ess = (sum r)^2 / (n sum r^2) over tokens; chi2 = E[r^2] - 1.
        """
        n = self.tokens
        if n == 0:
            return {}
        mean_log, mean = self.log_ratio / n, self.ratio / n
        return {
            "loss": self.loss,
            "entropy": self.entropy / n,
            "mismatch/k1": -mean_log,
            "mismatch/k3": mean - 1 - mean_log,
            "mismatch/ess": self.ratio**2 / (n * self.ratio_squared) if self.ratio_squared > 0 else None,
            "mismatch/chi2": self.ratio_squared / n - 1,
            "mismatch/prob_diff": self.prob_diff / n,
            "mismatch/ratio_mean": mean,
            "rule/fraction": self.touched / n,
        }
