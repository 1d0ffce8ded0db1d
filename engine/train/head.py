"""Log-probs and entropy from logits, in chunks of tokens: no [T, V] tensor outlives its chunk."""

from __future__ import annotations

from collections.abc import Iterator

import torch

# Tokens per chunk: at a vocabulary of 49k one chunk's float32 logits take 100 MB.
CHUNK_TOKENS = 512


def token_logprobs(
    logits_TV: torch.Tensor, targets_T: torch.Tensor, temperature: float, *, entropy_gradient: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """float32[T] log-probability of each target under softmax(logits / temperature), and float32[T] entropy in nats of
    that distribution, detached unless `entropy_gradient`. `logits_TV` is float32."""
    scaled_TV = logits_TV / temperature
    normaliser_T = scaled_TV.logsumexp(-1)
    logprobs_T = scaled_TV.gather(-1, targets_T.unsqueeze(-1)).squeeze(-1) - normaliser_T
    if entropy_gradient:
        return logprobs_T, normaliser_T - ((scaled_TV - normaliser_T.unsqueeze(-1)).exp() * scaled_TV).sum(-1)
    with torch.no_grad():
        entropy_T = normaliser_T - (scaled_TV - normaliser_T.unsqueeze(-1)).exp_().mul_(scaled_TV).sum(-1)
    return logprobs_T, entropy_T


def chunks(length: int) -> Iterator[slice]:
    """Slices of at most CHUNK_TOKENS that cover `length`."""
    return (slice(start, min(start + CHUNK_TOKENS, length)) for start in range(0, length, CHUNK_TOKENS))
