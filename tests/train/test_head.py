"""The head's log-probs, entropy and gradient against log_softmax in float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear

from engine.train.head import CHUNK_TOKENS, chunks, token_logprobs

pytestmark = pytest.mark.usefixtures("one_cpu")

TOKENS, WIDTH, VOCABULARY = 40, 16, 50


def inputs(scale: float = 0.25) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draws = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=draws) * scale
    weight = torch.randn(VOCABULARY, WIDTH, generator=draws)
    return hidden, weight, torch.randint(0, VOCABULARY, (TOKENS,), generator=draws)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_and_entropy_are_log_softmaxs(temperature: float) -> None:
    hidden, weight, targets = inputs()
    logprobs, entropy = token_logprobs(linear(hidden, weight), targets, temperature)
    expected = torch.log_softmax(hidden.double() @ weight.double().T / temperature, -1)
    assert logprobs.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logprobs.double(), expected[range(TOKENS), targets], rtol=0, atol=1e-5)
    torch.testing.assert_close(entropy.double(), -(expected.exp() * expected).sum(-1), rtol=0, atol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_gradient_is_log_softmaxs_and_entropy_has_none(temperature: float) -> None:
    hidden, weight, targets = inputs()
    leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    logprobs, entropy = token_logprobs(linear(*leaves), targets, temperature)
    logprobs.sum().backward()
    doubles = hidden.double().requires_grad_(), weight.double().requires_grad_()
    torch.log_softmax(doubles[0] @ doubles[1].T / temperature, -1)[range(TOKENS), targets].sum().backward()
    assert not entropy.requires_grad
    for leaf, double in zip(leaves, doubles, strict=True):
        assert leaf.grad is not None
        assert double.grad is not None
        torch.testing.assert_close(leaf.grad.double(), double.grad, rtol=0, atol=2e-5)


def test_large_logits_stay_finite() -> None:
    hidden, weight, targets = inputs(scale=1000.0)
    logprobs, entropy = token_logprobs(linear(hidden, weight), targets, 0.6)
    assert logprobs.isfinite().all()
    assert entropy.isfinite().all()


@pytest.mark.parametrize("size", [1, 7, 39])
def test_chunking_changes_nothing(size: int) -> None:
    hidden, weight, targets = inputs(scale=0.1)
    whole = token_logprobs(linear(hidden, weight), targets, 0.6)
    parts = [slice(start, start + size) for start in range(0, TOKENS, size)]
    pieces = [token_logprobs(linear(hidden[part], weight), targets[part], 0.6) for part in parts]
    for value, piece in zip(whole, zip(*pieces, strict=True), strict=True):
        torch.testing.assert_close(torch.cat(piece), value, rtol=0, atol=1e-6)


@pytest.mark.parametrize("length", [0, 1, CHUNK_TOKENS - 1, CHUNK_TOKENS, CHUNK_TOKENS + 1, 3 * CHUNK_TOKENS])
def test_chunks_cover_the_length_once(length: int) -> None:
    covered = [list(range(length))[part] for part in chunks(length)]
    assert [index for part in covered for index in part] == list(range(length))
    assert all(1 <= len(part) <= CHUNK_TOKENS for part in covered)
