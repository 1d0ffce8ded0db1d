"""The optimizer step against a straightforward one: transformers, sequence by sequence, autograd of the formula."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hand_made import config, group, packing, rollout
from msgspec.structs import replace
from transformers import AutoModelForCausalLM

from engine.algorithms.advantage import group_advantages
from engine.algorithms.loss import (
    MismatchSums,
    Statistics,
    Tokens,
    budget,
    log_ratios,
    policy_loss,
    sequence_means,
)
from engine.algorithms.presets import PRESETS, resolve
from engine.config import AlgorithmSection, TrainSection
from engine.errors import MissingError, TrainingError
from engine.train import head
from engine.train.model import load_model
from engine.train.pack import build_batch, supervised_batch
from engine.train.trainer import TorchTrainer, _require_supported, learning_rate
from engine.types import Batch, Group, Rollout

pytestmark = pytest.mark.usefixtures("one_cpu")

Gradient = dict[str, torch.Tensor]


def trainer(folder: Path, *, preset: str = "cispo", steps: int = 5, **train: Any) -> TorchTrainer:
    return TorchTrainer(config(run={"steps": steps}, train=train, algorithm={"preset": preset}), folder)


def groups(temperature: float = 1.0, *, members: int = 7, sampled: int = 8) -> list[Group]:
    """One group of random rollouts of equal length. Behaviour log-probs around -4.5 put ratios on both sides of the
    presets' bounds: a random model gives each of the 261 tokens about -5.6, give or take 1."""
    draws = np.random.default_rng(3)
    return [
        group(
            *(
                rollout(
                    float(draws.integers(0, 3)),
                    prompt=draws.integers(0, 261, 4).tolist(),
                    sampled=draws.integers(0, 261, sampled).tolist(),
                    logprobs=draws.normal(-5.6 / temperature, 1.5, sampled).tolist(),
                    index=index,
                )
                for index in range(members)
            )
        )
    ]


def batch_of(groups: Sequence[Group], *, micro_batch_tokens: int = 1000, temperature: float = 1.0) -> Batch:
    batch, _ = build_batch(groups, packing(micro_batch_tokens=micro_batch_tokens, temperature=temperature), version=0)
    return batch


def gradient(of: TorchTrainer, batch: Batch) -> tuple[Gradient, MismatchSums]:
    """What `step` would clip and apply."""
    of.model.zero_grad()
    sums = of.backward(batch.micro_batches[0], batch.temperature)
    grads = {name: parameter.grad for name, parameter in of.model.named_parameters()}
    return grads, sums  # pyright: ignore[reportReturnType]


def weights(of: TorchTrainer) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in of.model.named_parameters()}


def unchanged(of: TorchTrainer, before: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(before[name], parameter) for name, parameter in of.model.named_parameters())


def relative_distance(left: Gradient, right: Gradient) -> float:
    """Largest over parameters of |left - right| / |right|."""
    assert left.keys() == right.keys()
    return max(float((left[name] - right[name]).norm() / right[name].norm()) for name in left)


def by_hand(
    folder: Path, groups: Sequence[Group], preset: str, temperature: float
) -> tuple[Gradient, float, list[list[float]]]:
    """Gradient, loss and log-probs: one plain forward per rollout in float64, loss summed and divided at the end."""
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    total, tokens, logprobs = torch.zeros((), dtype=torch.float64), 0, []
    for one in groups:
        rewards = [member.reward or 0.0 for member in one.rollouts]
        for index, member in enumerate(one.rollouts):
            others = [reward for other, reward in enumerate(rewards) if other != index]
            advantage = rewards[index] - sum(others) / len(others)
            ids, sampled = torch.tensor(member.token_ids.tolist()), torch.tensor(member.trainable.tolist())
            logits = plain(input_ids=ids.unsqueeze(0)).logits[0]
            log_pi = torch.log_softmax(logits[:-1] / temperature, -1)[range(len(ids) - 1), ids[1:]][sampled[1:]]
            log_mu = torch.tensor(member.logprobs.tolist(), dtype=torch.float64)[sampled]
            ratio = (log_pi - log_mu).exp()
            if preset == "cispo":
                total = total - (ratio.detach().clamp(max=5.0) * advantage * log_pi).sum()
            else:
                total = total - torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).sum()
            tokens += len(log_pi)
            logprobs.append(log_pi.tolist())
    (total / tokens).backward()
    grads = {name: parameter.grad for name, parameter in plain.named_parameters()}
    return grads, float(total.detach()) / tokens, logprobs  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("preset", ["cispo", "ppo_clip"])
def test_gradient_is_the_straightforward_one(tiny_folder: Path, preset: str, temperature: float) -> None:
    given = groups(temperature)
    expected, loss, _ = by_hand(tiny_folder, given, preset, temperature)
    batch = batch_of(given, micro_batch_tokens=40, temperature=temperature)
    grads, sums = gradient(trainer(tiny_folder, preset=preset), batch)
    assert 0.02 < sums.touched / sums.tokens < 0.98  # the rule is on trial
    assert sums.loss == pytest.approx(loss, rel=1e-5)
    assert relative_distance({name: grad.double() for name, grad in grads.items()}, expected) < 2e-5


def test_gradient_of_an_untied_head_too(untied_folder: Path) -> None:
    given = groups()
    expected, _, _ = by_hand(untied_folder, given, "cispo", 1.0)
    grads, _ = gradient(trainer(untied_folder), batch_of(given))
    assert "lm_head.weight" in grads
    assert relative_distance({name: grad.double() for name, grad in grads.items()}, expected) < 2e-5


def test_a_supervised_loss_is_the_mean_cross_entropy(tiny_folder: Path) -> None:
    """Of the trained tokens, whatever behaviour log-probs and rewards say; its gradient too."""
    chats = groups()[0].rollouts
    plain = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float64, attn_implementation="eager")
    losses: list[torch.Tensor] = []
    for chat in chats:
        ids = torch.tensor(chat.token_ids.tolist())
        labels = ids.where(torch.tensor(chat.trainable.tolist()), torch.tensor(-100))
        logits = plain(input_ids=ids.unsqueeze(0)).logits[0]
        losses.append(torch.nn.functional.cross_entropy(logits[:-1], labels[1:]))
    expected = torch.stack(losses).mean()  # all are of one length
    expected.backward()
    batch = supervised_batch(chats, packing(micro_batch_tokens=40, temperature=0.6))
    grads, sums = gradient(trainer(tiny_folder, preset="ce"), batch)
    assert sums.loss == pytest.approx(float(expected.detach()), rel=1e-6)
    by_torch = {name: parameter.grad for name, parameter in plain.named_parameters()}
    assert relative_distance({name: grad.double() for name, grad in grads.items()}, by_torch) < 2e-5


def test_one_step_cut_into_1_2_or_7_micro_batches_has_one_gradient(tiny_folder: Path) -> None:
    """Seven rollouts of 12 tokens: one micro-batch holds all, four or one of them."""
    by_count: dict[int, Gradient] = {}
    for limit in (84, 48, 12):
        batch = batch_of(groups(), micro_batch_tokens=limit)
        by_count[len(batch.micro_batches[0])], _ = gradient(trainer(tiny_folder), batch)
    assert list(by_count) == [1, 2, 7]
    assert relative_distance(by_count[2], by_count[1]) < 1e-6
    assert relative_distance(by_count[7], by_count[1]) < 1e-6


def test_the_heads_chunks_have_one_gradient(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = gradient(trainer(tiny_folder), batch_of(groups()))
    monkeypatch.setattr(head, "CHUNK_TOKENS", 5)
    chunked, _ = gradient(trainer(tiny_folder), batch_of(groups()))
    assert relative_distance(chunked, whole) < 1e-6


def test_shifted_behaviour_changes_the_default_gradient(tiny_folder: Path) -> None:
    """By e, where every ratio is below the cap: behaviour log-probs are far above what the model gives."""

    def with_behaviour(logprob: float) -> Gradient:
        one = group(
            rollout(1.0, sampled=[5, 6], logprobs=[logprob] * 2),
            rollout(0.0, sampled=[7, 8], logprobs=[logprob] * 2, index=1),
        )
        return gradient(trainer(tiny_folder), batch_of([one]))[0]

    plain, shifted = with_behaviour(-1.0), with_behaviour(-2.0)
    assert relative_distance(shifted, {name: math.e * grad for name, grad in plain.items()}) < 1e-5


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_are_the_straightforward_ones(tiny_folder: Path, temperature: float) -> None:
    given = groups(temperature)
    _, _, expected = by_hand(tiny_folder, given, "cispo", temperature)
    (micro,) = batch_of(given, temperature=temperature).micro_batches[0]
    logprobs = trainer(tiny_folder).logprobs(micro, temperature)
    assert logprobs[micro.trainable] == pytest.approx(np.concatenate(expected), abs=2e-5)
    assert not logprobs[~micro.trainable].any()


def test_a_step_says_what_it_did(tiny_folder: Path) -> None:
    given = groups()
    expected, loss, logprobs = by_hand(tiny_folder, given, "cispo", 1.0)
    behaviour = np.concatenate([member.logprobs[member.trainable] for member in given[0].rollouts]).astype(np.float64)
    log_ratio = np.concatenate(logprobs) - behaviour
    trained = trainer(tiny_folder, lr=1e-3)
    result = trained.step(batch_of(given, micro_batch_tokens=40))
    assert (result.skipped, trained.version) == ("", 1)
    assert result.metrics["loss"] == pytest.approx(loss, rel=1e-5)
    assert result.metrics["lr"] == 1e-3
    norm = math.sqrt(sum(float(grad.square().sum()) for grad in expected.values()))
    assert result.metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert result.metrics["mismatch/k1"] == pytest.approx(-log_ratio.mean(), rel=1e-5)
    assert result.metrics["mismatch/k3"] == pytest.approx((np.exp(log_ratio) - 1 - log_ratio).mean(), rel=1e-5)


def test_a_step_is_clipped_adam_at_the_scheduled_rate(tiny_folder: Path) -> None:
    """Adam's first update is lr g / (|g| + eps), whatever the size of g, after decay by lr times weight_decay."""
    given, rate, decay = groups(), 1e-3, 0.1
    grads, _ = gradient(trainer(tiny_folder), batch_of(given))
    trained = trainer(tiny_folder, lr=2 * rate, warmup_steps=2, weight_decay=decay, grad_clip=1e-3)
    before = weights(trained)
    result = trained.step(batch_of(given))
    assert result.metrics["lr"] == rate
    norm = math.sqrt(sum(float(grad.double().square().sum()) for grad in grads.values()))
    assert norm > 1e-2  # clipping is on trial
    for name, parameter in trained.model.named_parameters():
        grad = grads[name] * 1e-3 / norm
        expected = before[name] * (1 - rate * decay) - rate * grad / (grad.abs() + 1e-8)
        torch.testing.assert_close(parameter.detach(), expected, rtol=0, atol=2e-6)


def test_a_batch_without_signal_changes_nothing(tiny_folder: Path) -> None:
    trained = trainer(tiny_folder)
    before = weights(trained)
    flat = [group(*(rollout(0.1, index=index) for index in range(7)))]
    result = trained.step(batch_of(flat))
    assert result.skipped == "no group has a signal"
    assert result.metrics == {}
    assert trained.version == 0
    assert unchanged(trained, before)


def poisoned() -> list[Group]:
    """The engine's log-prob of one token is NaN."""
    (one,) = groups()
    one.rollouts[2].logprobs[6] = math.nan
    return [one]


def test_a_step_that_is_not_finite_is_skipped_and_leaves_no_trace(tiny_folder: Path) -> None:
    trained, untouched = trainer(tiny_folder, lr=1e-3), trainer(tiny_folder, lr=1e-3)
    before = weights(trained)
    result = trained.step(batch_of(poisoned()))
    assert result.skipped == "loss or gradient not finite"
    assert result.metrics["loss"] is None
    assert trained.version == 0
    assert unchanged(trained, before)
    for one in (trained, untouched):
        one.step(batch_of(groups()))
    assert trained.version == 1
    assert unchanged(trained, weights(untouched))


def test_five_in_a_row_end_the_run_and_four_do_not(tiny_folder: Path) -> None:
    trained = trainer(tiny_folder)
    for _ in range(4):
        assert trained.step(batch_of(poisoned())).skipped
    assert not trained.step(batch_of(groups())).skipped
    for _ in range(4):
        assert trained.step(batch_of(poisoned())).skipped
    with pytest.raises(TrainingError, match=r"5 steps in a row.*not finite"):
        trained.step(batch_of(poisoned()))
    assert trained.version == 1


def test_small_steps_do_change_the_weights_under_bf16_autocast(tiny_folder: Path) -> None:
    """lr 1e-6 for 20 steps: far below bf16's spacing at these weights (.12 / 256), so only float32 masters move."""
    trained = trainer(tiny_folder, steps=20, lr=1e-6, dtype="bfloat16")
    before = weights(trained)
    for _ in range(20):
        assert not trained.step(batch_of(groups())).skipped
    assert trained.version == 20
    for name, parameter in trained.model.named_parameters():
        assert parameter.dtype == torch.float32
        moved = (parameter.detach() - before[name]).abs()
        assert float(moved.median()) > 1e-6, name
        assert float(moved.max()) < 3e-5, name


def test_bf16_autocast_is_near_float32(tiny_folder: Path) -> None:
    precise, _ = gradient(trainer(tiny_folder), batch_of(groups()))
    coarse, _ = gradient(trainer(tiny_folder, dtype="bfloat16"), batch_of(groups()))
    assert 1e-4 < relative_distance(coarse, precise) < 0.1
    assert all(grad.dtype == torch.float32 for grad in coarse.values())


@pytest.mark.parametrize(
    ("settings", "total", "expected"),
    [
        ({}, 3, [1.0, 1.0, 1.0]),
        ({"warmup_steps": 2}, 4, [0.5, 1.0, 1.0, 1.0]),
        ({"warmup_steps": 4}, 4, [0.25, 0.5, 0.75, 1.0]),
        ({"schedule": "linear"}, 4, [1.0, 0.75, 0.5, 0.25]),
        ({"schedule": "linear", "warmup_steps": 2}, 6, [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]),
        ({"schedule": "linear", "warmup_steps": 3}, 3, [1 / 3, 2 / 3, 1.0]),
        # (1 + cos(pi done)) / 2 at done = 0, 1/3, 2/3.
        ({"schedule": "cosine"}, 3, [1.0, 0.75, 0.25]),
        # (1 + cos(pi / 4)) / 2 = .8536 and (1 - cos(pi / 4)) / 2 = .1464.
        ({"schedule": "cosine", "warmup_steps": 1}, 5, [1.0, 1.0, 0.8535533906, 0.5, 0.1464466094]),
        ({"schedule": "cosine", "warmup_steps": 2}, 2, [0.5, 1.0]),
    ],
    ids=str,
)  # fmt: skip
def test_learning_rates_by_hand(settings: dict[str, Any], total: int, expected: list[float]) -> None:
    train = TrainSection(lr=1.0, **settings)
    rates = [learning_rate(train, update, total) for update in range(1, total + 1)]
    assert rates == pytest.approx(expected, abs=1e-9)
    assert min(rates) > 0


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("final_logit_softcapping", 8.0),
        ("logits_scaling", 8.0),
        ("logit_scale", 0.5),
        ("attention_dropout", 0.1),
        ("sliding_window", 16),
        ("lm_head.bias", None),
    ],
)
def test_a_model_that_does_more_than_the_step_is_refused(setting: str, value: Any, untied_folder: Path) -> None:
    model = load_model(untied_folder, torch.float32, torch.device("cpu"))
    _require_supported(model, 64)
    if setting == "lm_head.bias":
        model.lm_head.bias = torch.nn.Parameter(torch.zeros(model.config.vocab_size))
    else:
        setattr(model.config, setting, value)
    with pytest.raises(MissingError, match=setting):
        _require_supported(model, 64)


@pytest.mark.parametrize("what", ["optimizer", "all"])
def test_what_went_off_the_device_and_back_trains_on_as_if_it_had_stayed(
    tiny_folder: Path, untied_folder: Path, what: Any
) -> None:
    settings = config(
        algorithm={"kl": {"to": "reference", "kind": "k2", "coef": 0.1}}, model={"path": "tiny", "reference": "untied"}
    )
    stayed, moved = (TorchTrainer(settings, tiny_folder, reference_folder=untied_folder) for _ in range(2))
    assert moved._reference is not None
    for parameter in (*moved._parameters, *moved._reference.parameters()):
        parameter.data = parameter.data.clone()  # off the file that it is mapped from: that has no memory to give back
    for _ in range(2):
        for of in (stayed, moved):
            assert not of.step(batch_of(groups())).skipped
        moved.offload(what)
        states = [value for state in moved._optimizer.state.values() for value in state.values()]
        sizes = [tensor.untyped_storage().nbytes() for tensor in states]
        assert sizes == [0] * 3 * len(moved._parameters)  # the step's count, and two moments
        kept = sum(parameter.untyped_storage().nbytes() for parameter in moved._parameters)
        kept += sum(parameter.untyped_storage().nbytes() for parameter in moved._reference.parameters())
        assert (kept == 0) == (what == "all")
        with pytest.raises(AssertionError):
            moved.step(batch_of(groups()))
        moved.onload()
    for of in (stayed, moved):
        of.step(batch_of(groups()))
    for name, tensor in weights(stayed).items():
        assert torch.equal(weights(moved)[name], tensor)
    assert moved.model.get_output_embeddings().weight is moved.model.get_input_embeddings().weight


def one_pass(folder: Path, reference: Path | None, algorithm: dict[str, Any], given: Sequence[Group]) -> Gradient:
    """The loss on all tokens at once in float64: no chunks, no micro-batches, plain forwards. What `policy_loss` makes
    of its tokens is tested beside it; here it is what reaches it."""
    loss = resolve(msgspec.convert(algorithm, AlgorithmSection))
    plain, other = (
        AutoModelForCausalLM.from_pretrained(source, dtype=torch.float64, attn_implementation="eager")
        for source in (folder, reference or folder)
    )
    members = [member for one in given for member in one.rollouts]

    def of_tokens(array: str) -> torch.Tensor:
        return torch.cat([torch.tensor(getattr(member, array)[member.trainable].tolist()) for member in members])

    def log_softmax(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
        chosen, entropies = [], []
        for member in members:
            ids, sampled = torch.tensor(member.token_ids.tolist()), torch.tensor(member.trainable.tolist())
            all_TV = torch.log_softmax(model(input_ids=ids.unsqueeze(0)).logits[0, :-1], -1)[sampled[1:]]
            chosen.append(all_TV[range(len(all_TV)), ids[sampled]])
            entropies.append(-(all_TV.exp() * all_TV).sum(-1))
        return torch.cat(chosen), torch.cat(entropies)

    logprobs_T, entropy_T = log_softmax(plain)
    lengths = torch.tensor([member.length for member in members])
    advantages = [value for one in given for value in group_advantages([m.reward for m in one.rollouts], "centered")]
    tokens = Tokens(
        logprobs_T=logprobs_T,
        behaviour_T=of_tokens("logprobs").double(),
        advantages_T=torch.tensor(advantages, dtype=torch.float64).repeat_interleave(lengths),
        staleness_T=torch.tensor(STALENESS).repeat(len(members)),
        entropy_T=entropy_T,
        reference_T=log_softmax(other)[0].detach() if reference else None,
    )
    if loss.needs_statistics:
        ratio_T, correction_T = (values.detach() for values in log_ratios(tokens, loss))
        sequence_T = torch.arange(len(lengths)).repeat_interleave(lengths)
        bound = budget(ratio_T, tokens.advantages_T, loss.high) if loss.rule == "budget" else math.inf
        means = sequence_means(ratio_T, sequence_T), sequence_means(correction_T, sequence_T)
        tokens = msgspec.structs.replace(tokens, statistics=Statistics(*means, bound))
    (policy_loss(tokens, loss)[0].sum() / len(logprobs_T)).backward()
    return {name: parameter.grad for name, parameter in plain.named_parameters()}  # pyright: ignore[reportReturnType]


def near(folder: Path, spread: float) -> list[Group]:
    """`groups` with behaviour log-probs `spread` around the policy's own: some sequences stay in the band of `mis`."""
    draws = np.random.default_rng(0)
    policy = trainer(folder)

    def moved(member: Rollout) -> Rollout:
        (micro,) = batch_of([group(member, replace(member, reward=99.0))]).micro_batches[0]
        own = policy.logprobs(micro, 1.0)[: len(member.token_ids)]
        noise = draws.normal(0, spread, len(own)).astype(np.float32)
        return replace(member, logprobs=np.where(member.trainable, own + noise, np.float32(0)))

    return [replace(one, rollouts=tuple(map(moved, one.rollouts))) for one in groups()]


# The version before the step, and how old the 8 tokens of a hand-made rollout are that was begun under version 0 and
# saw version 2 after four of them.
VERSION, SPANS, STALENESS = 3, ((4, 0), (8, 2)), [3, 3, 3, 3, 1, 1, 1, 1]


@pytest.mark.parametrize(
    "algorithm",
    [
        *({"preset": preset} for preset in PRESETS if preset != "ce"),
        {"level": "sequence"},
        {"preset": "decoupled_ppo", "correction": "mis"},
        {"kl": {"to": "reference", "kind": "k3", "coef": 0.5}},
        {"entropy_coef": 0.1},
    ],
    ids=lambda algorithm: "-".join(str(value) for value in algorithm.values()).partition("{")[0] or "kl",
)
def test_all_that_a_loss_asks_for_reaches_it(
    tiny_folder: Path, untied_folder: Path, monkeypatch: pytest.MonkeyPatch, algorithm: dict[str, Any]
) -> None:
    monkeypatch.setattr(head, "CHUNK_TOKENS", 5)  # rollouts have 8
    reference = untied_folder if "kl" in algorithm else None
    given = near(tiny_folder, 0.05) if "correction" in algorithm else groups()
    given = [replace(one, rollouts=tuple(replace(member, version_spans=SPANS) for member in one.rollouts))
             for one in given]  # fmt: skip
    settings = config(algorithm=algorithm | {"advantage": "centered"}, model={"path": "tiny-random"})
    of = TorchTrainer(settings, tiny_folder, reference_folder=reference)
    batch, _ = build_batch(given, packing(estimator="centered", micro_batch_tokens=40), version=VERSION)
    grads, sums = gradient(of, batch)
    expected = one_pass(tiny_folder, reference, algorithm, given)
    assert relative_distance({name: grad.double() for name, grad in grads.items()}, expected) < 1e-4
    assert (sums.metrics("token")["kl/ref"] is None) == (reference is None)


def test_a_float32_head_is_exact_under_autocast(tiny_folder: Path) -> None:
    """The rest of the model computes in bfloat16 all the same: what the head adds to the error is gone."""
    hidden = torch.randn(6, 64, generator=torch.Generator().manual_seed(0), dtype=torch.bfloat16)
    logits = {}
    for dtype in ("auto", "float32"):
        of = TorchTrainer(config(model={"path": "tiny-random", "lm_head_dtype": dtype}), tiny_folder)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits[dtype] = of._policy.logits(hidden).detach()
    weight = of.model.get_output_embeddings().weight.detach().double()
    exact = hidden.double() @ weight.T
    assert float((logits["float32"].double() - exact).abs().max()) < 1e-5
    assert float((logits["auto"].double() - exact).abs().max()) > 1e-3


def test_the_breaker_refuses_a_step(tiny_folder: Path) -> None:
    of = TorchTrainer(config(algorithm={"breaker": {"grad_norm": 1e-3}}), tiny_folder)
    before = weights(of)
    result = of.step(batch_of(groups()))
    assert result.skipped.startswith("breaker: gradient norm")
    assert unchanged(of, before)
    assert (of.version, result.metrics["loss"]) == (0, None)


def test_ess_scaling_lowers_the_rate_by_the_root_of_rho(tiny_folder: Path) -> None:
    of = TorchTrainer(config(algorithm={"ess_scaling": True}, train={"lr": 1e-3}), tiny_folder)
    _, sums = gradient(of, batch_of(groups()))
    assert sums.rho is not None
    assert sums.rho < 0.9
    assert of.step(batch_of(groups())).metrics["lr"] == pytest.approx(1e-3 * sums.rho**0.5)


def test_each_token_of_a_rollout_is_corrected_by_its_own_age(tiny_folder: Path) -> None:
    """Version 4 before the step: two tokens of version 0 have alpha 3/4, one of version 2 has 1/2, one of version 3 0.
    With pi / mu = e, prox / mu is e^alpha and pi / prox e^(1 - alpha)."""
    spans = ((2, 0), (4, 2), (5, 3))
    plain = trainer(tiny_folder, preset="decoupled_ppo")
    asked = [rollout(reward, sampled=[3, 4, 5, 6], index=index) for index, reward in enumerate((1.0, 0.0))]
    (micro,) = batch_of([group(*asked)]).micro_batches[0]
    own = plain.logprobs(micro, 1.0)[micro.trainable].reshape(2, 4)
    members = [
        replace(member, logprobs=np.float32([0, 0, *(own[index] - 1)]), version_spans=spans)
        for index, member in enumerate(asked)
    ]
    batch, _ = build_batch([group(*members)], packing(), version=4)
    assert batch.micro_batches[0][0].staleness[batch.micro_batches[0][0].trainable].tolist() == [4, 4, 2, 1] * 2
    result = plain.step(batch)
    # pi / prox is 1.28, 1.28, 1.65, 2.72: with A = 1 clipped to 1.2, with A = -1 not, since that clip is from below.
    up = [1.2 * math.exp(alpha) for alpha in (0.75, 0.75, 0.5, 0.0)]
    down = [math.e] * 4
    assert result.metrics["loss"] == pytest.approx((sum(down) - sum(up)) / 8, rel=1e-5)
    assert result.metrics["rule/fraction"] == 0.5
    k3 = math.e - 2
    assert [result.metrics[f"mismatch/{key}"] for key in ("k3", "k3_stale")] == pytest.approx([k3, k3], rel=1e-5)
    assert result.metrics["mismatch/k3_fresh"] is None
