"""The optimizer step: packed micro-batches in, updated float32 masters out. Synchronous, in the training thread.

Every rank runs the same step on its own micro-batches (`engine/train/rank.py`). What the ranks must agree on - the loss
and the mismatch sums, the gradient norm, whether the step counts - is summed over them once a step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import torch
import torch.distributed as dist
from msgspec.structs import replace
from transformers.modeling_utils import PreTrainedModel

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
from engine.algorithms.presets import resolve
from engine.config import Config, TrainSection
from engine.errors import MissingError, TrainingError
from engine.protocols import StepResult
from engine.train.checkpoint import save_checkpoint
from engine.train.head import chunks, token_logprobs
from engine.train.model import load_model
from engine.train.offload import Offload
from engine.train.policy import Policy, autocast, full_tensor
from engine.types import Batch, MicroBatch

MAX_BAD_STEPS = 5
NOT_FINITE = "loss or gradient not finite"


class Team(Protocol):
    """The other trainer ranks, told what to do just before this one does it."""

    def step(self, batch: Batch) -> None:
        """Run the same step, each rank on its own micro-batches."""
        ...

    def gather(self) -> None:
        """Run through `Policy.full_parameters`."""
        ...

    def offload(self, what: Literal["optimizer", "all"]) -> None:
        """Leave the device, each rank its own."""
        ...

    def onload(self) -> None:
        """Take it back."""
        ...


def learning_rate(train: TrainSection, update: int, total: int) -> float:
    """Rate of the `update`-th optimizer update, counted from 1; `total` updates planned. Never 0.

    Warm-up rises linearly over the first `warmup_steps` updates, the first already at lr / warmup_steps.
    """
    if update <= train.warmup_steps:
        return train.lr * update / train.warmup_steps
    remaining = (total - update + 1) / max(1, total - train.warmup_steps)
    match train.schedule:
        case "constant":
            return train.lr
        case "linear":
            return train.lr * remaining
        case "cosine":
            return train.lr * (1 - math.cos(math.pi * remaining)) / 2


class _Pass:
    """One micro-batch on the device, and what the step needs of its trainable tokens."""

    def __init__(self, micro_batch: MicroBatch, device: torch.device) -> None:
        def tensor(array: np.ndarray) -> torch.Tensor:
            # Arrays off the wire are read-only views; torch wants to own what it may write.
            owned = torch.from_numpy(np.array(array))
            return (owned.long() if owned.dtype == torch.int32 else owned).to(device)

        self.token_ids, self.position_ids = tensor(micro_batch.token_ids), tensor(micro_batch.position_ids)
        self.cu_seqlens = tensor(micro_batch.cu_seqlens)
        self.positions_T = tensor(micro_batch.trainable).nonzero().squeeze(-1)
        self.targets_T = self.token_ids[self.positions_T]
        self.behaviour_T = tensor(micro_batch.logprobs)[self.positions_T]
        self.advantages_T = tensor(micro_batch.advantages)[self.positions_T]
        self.weights_T = tensor(micro_batch.weights)[self.positions_T]
        self.staleness_T = tensor(micro_batch.staleness)[self.positions_T]
        self.sequence_T = torch.bucketize(self.positions_T, self.cu_seqlens[1:], right=True)
        self.reference_T: torch.Tensor | None = None
        self.statistics: Statistics | None = None

    def tokens(self, part: slice, logprobs_T: torch.Tensor, entropy_T: torch.Tensor) -> Tokens:
        """The loss's view of the tokens of `part`."""
        return Tokens(
            logprobs_T=logprobs_T,
            behaviour_T=self.behaviour_T[part],
            advantages_T=self.advantages_T[part],
            staleness_T=self.staleness_T[part],
            entropy_T=entropy_T,
            reference_T=None if self.reference_T is None else self.reference_T[part],
            statistics=None if self.statistics is None else self.statistics.part(part),
        )


class TorchTrainer:
    """`protocols.Trainer` on one device, alone or as one rank of several that share the default process group.

    `reference_folder` holds the reference policy's weights, when the loss asks for one.
    """

    def __init__(
        self, config: Config, folder: Path, *, ranks: int = 1, team: Team | None = None,
        reference_folder: Path | None = None,
    ) -> None:
        self._config = config
        self._source_folder = folder
        self._team = team
        self.ranks = ranks
        self._loss = resolve(config.algorithm)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._policy = self._load(folder)
        self.model = self._policy.model
        if config.train.activation_checkpointing:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self._reference = None
        if self._loss.needs_reference:
            assert reference_folder is not None
            self._reference = self._load(reference_folder).requires_grad_(False)
        self._parameters = list(self._policy.parameters())
        self._optimizer = torch.optim.AdamW(
            self._parameters,
            lr=config.train.lr,
            betas=config.train.betas,
            weight_decay=config.train.weight_decay,
            fused=True,
        )
        self._offload = Offload(self.device)
        self._version = 0
        self._bad_steps = 0

    @property
    def version(self) -> int:
        return self._version

    def step(self, batch: Batch) -> StepResult:
        """See `protocols.Trainer.step`."""
        if batch.num_tokens == 0:
            return StepResult(skipped="no group has a signal")
        if self._team is not None:
            self._team.step(batch)
        result = self.step_on_rank(batch.micro_batches[0], batch.temperature)
        self._bad_steps = self._bad_steps + 1 if result.skipped == NOT_FINITE else 0
        if self._bad_steps == MAX_BAD_STEPS:
            raise TrainingError(
                f"{MAX_BAD_STEPS} steps in a row had a loss or gradient that is not finite",
                remedy="lower train.lr; look at mismatch/* and grad_norm in metrics.jsonl of the steps before",
            )
        return result

    def step_on_rank(self, micro_batches: Sequence[MicroBatch], temperature: float) -> StepResult:
        """This rank's part of a step; every rank comes to the same result."""
        assert not self._offload.away
        sums = self.backward(micro_batches, temperature)
        grad_norm = float(full_tensor(torch.nn.utils.clip_grad_norm_(self._parameters, self._config.train.grad_clip)))
        metrics = sums.metrics(self._loss.level) | {"grad_norm": grad_norm}
        refusal = self._refusal(sums, grad_norm)
        if refusal:
            self._optimizer.zero_grad(set_to_none=True)
            return StepResult(skipped=refusal, metrics=metrics | {"loss": None})
        rate = learning_rate(self._config.train, self._version + 1, self._config.run.steps)
        if self._config.algorithm.ess_scaling and sums.rho is not None:
            rate *= lr_scale(sums.rho)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._version += 1
        return StepResult(metrics=metrics | {"lr": rate})

    def backward(self, micro_batches: Sequence[MicroBatch], temperature: float) -> MismatchSums:
        """The step's whole gradient into the parameters, from this rank's micro-batches and the others'; the sums over
        all ranks."""
        passes = [_Pass(micro_batch, self.device) for micro_batch in micro_batches]
        self._look_ahead(passes, temperature)
        sums = MismatchSums()
        for number, one in enumerate(passes, start=1):
            self._policy.reduce_gradients(self._config.train.fsdp or number == len(passes))
            self._accumulate(one, temperature, sums)
        return MismatchSums.from_vector(self._over_ranks(sums.vector()))

    def logprobs(self, micro_batch: MicroBatch, temperature: float) -> np.ndarray:
        """float32[N] log-probability of every trainable token under the current weights, 0 elsewhere. One rank only."""
        one = _Pass(micro_batch, self.device)
        result_N = torch.zeros(len(micro_batch.token_ids))
        result_N[one.positions_T.cpu()] = self._logprobs(self._policy, one, temperature).cpu()
        return result_N.numpy()

    def offload(self, what: Literal["optimizer", "all"]) -> None:
        """See `protocols.Trainer.offload`. Returns once every rank's device is free. Steps need all of it back, whole
        parameters and checkpoints the parameters."""
        if self._team is not None:
            self._team.offload(what)
        self.offload_on_rank(what)

    def onload(self) -> None:
        """See `protocols.Trainer.onload`."""
        if self._team is not None:
            self._team.onload()
        self.onload_on_rank()

    def offload_on_rank(self, what: Literal["optimizer", "all"]) -> None:
        """This rank's part of `offload`: its shards alone."""
        leaving = [value for state in self._optimizer.state.values() for value in state.values()]
        if what == "all":
            leaving += self._parameters
            for policy in filter(None, (self._policy, self._reference)):
                policy.release()
            leaving += [] if self._reference is None else self._reference.parameters()
        self._offload.out(leaving)
        self._over_ranks([0.0])  # each has done it when all have come here

    def onload_on_rank(self) -> None:
        """This rank's part of `onload`."""
        self._offload.back()

    def save(self, folder: Path) -> None:
        """See `protocols.Trainer.save`. Weights are written in `model.dtype`."""
        chosen = self._config.model
        save_checkpoint(
            self.model, self.full_parameters(), folder, getattr(torch, chosen.dtype), self._source_folder,
            chosen.chat_template,
        )

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and whole tensors of the policy, gathered from all ranks one by one."""
        if self._team is not None:
            self._team.gather()
        return self._policy.full_parameters()

    def gather_on_rank(self) -> None:
        """This rank's part of another rank's `full_parameters`."""
        for _ in self._policy.full_parameters():
            pass

    def _load(self, folder: Path) -> Policy:
        model = load_model(folder, getattr(torch, self._config.train.param_dtype), self.device)
        _require_supported(model, self._config.generate.max_model_len)
        policy = Policy(model, head_in_float32=self._config.model.lm_head_dtype == "float32")
        if self.ranks > 1:
            policy.shard(self.device, self.ranks, shard=self._config.train.fsdp)
        return policy

    def _accumulate(self, one: _Pass, temperature: float, sums: MismatchSums) -> None:
        """Add this micro-batch's share of the step's gradient to the parameters'.

        The head's backward runs chunk by chunk on detached hidden states, whose gradient then enters the body.
        """
        seen: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        with autocast(self.device, getattr(torch, self._config.train.dtype)):
            body_TD = self._policy(one.token_ids, one.position_ids, one.cu_seqlens)[0][one.positions_T - 1]
            hidden_TD = body_TD.detach().requires_grad_()
            for part in chunks(len(one.positions_T)):
                logprobs_T, entropy_T = token_logprobs(
                    self._policy.logits(hidden_TD[part]), one.targets_T[part], temperature,
                    entropy_gradient=self._loss.entropy_coef != 0,
                )
                losses_T, touched_T = policy_loss(one.tokens(part, logprobs_T, entropy_T), self._loss)
                loss = (losses_T * one.weights_T[part]).sum()
                loss.backward()
                sums.loss += float(loss.detach())
                seen.append((logprobs_T.detach(), entropy_T.detach(), touched_T))
        # A micro-batch without a trainable token takes part in the collectives all the same.
        body_TD.backward(torch.zeros_like(body_TD) if hidden_TD.grad is None else hidden_TD.grad)
        if seen:
            logprobs_T, entropy_T, touched_T = (torch.cat(columns) for columns in zip(*seen, strict=True))
            sums.add(
                logprobs_T, one.behaviour_T, entropy_T, touched_T, one.sequence_T, one.staleness_T, one.reference_T
            )

    def _look_ahead(self, passes: Sequence[_Pass], temperature: float) -> None:
        """A pass without gradients over the whole batch, for losses that need the reference policy's log-probs or
        something of whole sequences or of the whole batch."""
        if self._reference is not None:
            for one in passes:
                one.reference_T = self._logprobs(self._reference, one, temperature)
        if not self._loss.needs_statistics:
            return
        ratios: list[torch.Tensor] = []
        for one in passes:
            logprobs_T = self._logprobs(self._policy, one, temperature)
            log_ratio_T, log_correction_T = log_ratios(one.tokens(slice(None), logprobs_T, logprobs_T), self._loss)
            ratios.append(log_ratio_T)
            one.statistics = Statistics(
                sequence_means(log_ratio_T, one.sequence_T), sequence_means(log_correction_T, one.sequence_T), math.inf
            )
        if self._loss.rule == "budget":
            log_ratio_T = self._from_ranks(torch.cat(ratios))
            advantages_T = self._from_ranks(torch.cat([one.advantages_T for one in passes]))
            bound = budget(log_ratio_T, advantages_T, self._loss.high)
            for one in passes:
                assert one.statistics is not None
                one.statistics = replace(one.statistics, budget=bound)

    @torch.no_grad()
    def _logprobs(self, policy: Policy, one: _Pass, temperature: float) -> torch.Tensor:
        result_T = torch.zeros(len(one.positions_T), device=self.device)
        with autocast(self.device, getattr(torch, self._config.train.dtype)):
            hidden_TD = policy(one.token_ids, one.position_ids, one.cu_seqlens)[0][one.positions_T - 1]
            for part in chunks(len(one.positions_T)):
                result_T[part], _ = token_logprobs(policy.logits(hidden_TD[part]), one.targets_T[part], temperature)
        return result_T

    def _over_ranks(self, values: list[float]) -> list[float]:
        """Sums over all ranks, in float64."""
        if self.ranks == 1:
            return values
        sums = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(sums)
        return sums.tolist()

    def _from_ranks(self, values_T: torch.Tensor) -> torch.Tensor:
        """All ranks' values, end to end."""
        if self.ranks == 1:
            return values_T
        counts = [torch.zeros(1, dtype=torch.int64, device=self.device) for _ in range(self.ranks)]
        dist.all_gather(counts, torch.tensor([len(values_T)], device=self.device))
        longest = int(max(counts))
        rows = [values_T.new_zeros(longest) for _ in counts]
        dist.all_gather(rows, torch.nn.functional.pad(values_T, (0, longest - len(values_T))))
        return torch.cat([row[: int(count)] for row, count in zip(rows, counts, strict=True)])

    def _refusal(self, sums: MismatchSums, grad_norm: float) -> str:
        """Why the weights must not change, or empty."""
        if not (math.isfinite(grad_norm) and math.isfinite(sums.loss)):
            return NOT_FINITE
        return breaker_reason(self._config.algorithm.breaker, sums.outside_share, grad_norm)


def _require_supported(model: PreTrainedModel, longest: int) -> None:
    """The step computes softmax(hidden @ weight.T) with full causal attention and no dropout. A model that does more
    would train on log-probs that are silently wrong.

    Raises:
        MissingError: naming what the model does.
    """
    settings = vars(model.config)
    found = [name for name in ("final_logit_softcapping", "logits_scaling", "logit_scale")
             if settings.get(name) not in (None, 1.0)]
    found += [name for name, value in settings.items() if name.endswith(("dropout", "_pdrop")) and value]
    window = settings.get("sliding_window")
    if window is not None and settings.get("use_sliding_window", True) and window < longest:
        found.append("sliding_window")
    head = model.get_output_embeddings()
    if not isinstance(head, torch.nn.Linear) or "bias" in dict(head.named_parameters()):
        found.append("lm_head.bias")
    if found:
        raise MissingError(
            f"the model has {', '.join(found)}, which the training step does not compute yet",
            remedy="use a model such as Llama, Qwen2.5, Qwen3 or SmolLM",
        )
