"""Log-probs and entropy from hidden states, in chunks of tokens: no [T, V] tensor outlives its chunk."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn.functional import linear

# Tokens per chunk: at a vocabulary of 49k one chunk's float32 logits take 100 MB.
CHUNK_TOKENS = 512


def token_logprobs(
    hidden_TD: torch.Tensor, head_weight_VD: torch.Tensor, targets_T: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """float32[T] log-probability of each target under softmax(logits / temperature), and float32[T] entropy in nats
    of that distribution (detached)."""
    logits_TV = linear(hidden_TD, head_weight_VD).float() / temperature
    normaliser_T = logits_TV.logsumexp(-1)
    logprobs_T = logits_TV.gather(-1, targets_T.unsqueeze(-1)).squeeze(-1) - normaliser_T
    with torch.no_grad():
        entropy_T = normaliser_T - (logits_TV - normaliser_T.unsqueeze(-1)).exp_().mul_(logits_TV).sum(-1)
    return logprobs_T, entropy_T


def chunks(length: int) -> Iterator[slice]:
    """Slices of at most CHUNK_TOKENS that cover `length`."""
    return (slice(start, min(start + CHUNK_TOKENS, length)) for start in range(0, length, CHUNK_TOKENS))
