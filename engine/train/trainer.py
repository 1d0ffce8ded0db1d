"""The optimizer step: packed micro-batches in, updated float32 masters out. Synchronous, in the training thread."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import torch
from transformers.modeling_utils import PreTrainedModel

from engine.algorithms.loss import PRESETS, MismatchSums, policy_loss
from engine.config import Config, TrainSection
from engine.errors import MissingError, TrainingError
from engine.protocols import StepResult
from engine.train.attention import pack_layout
from engine.train.checkpoint import save_checkpoint
from engine.train.head import chunks, token_logprobs
from engine.train.model import load_model
from engine.types import Batch, MicroBatch

MAX_BAD_STEPS = 5


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


class TorchTrainer:
    """`protocols.Trainer` on one device."""

    def __init__(self, config: Config, folder: Path) -> None:
        self._config = config
        self._source_folder = folder
        self._loss = PRESETS[config.algorithm.preset]
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = load_model(folder, getattr(torch, config.train.param_dtype), self.device)
        _require_supported(self.model, config.generate.max_model_len)
        self._parameters = list(self.model.parameters())
        self._optimizer = torch.optim.AdamW(
            self._parameters,
            lr=config.train.lr,
            betas=config.train.betas,
            weight_decay=config.train.weight_decay,
            fused=True,
        )
        self._version = 0
        self._bad_steps = 0

    @property
    def version(self) -> int:
        return self._version

    def step(self, batch: Batch) -> StepResult:
        """See `protocols.Trainer.step`."""
        if batch.num_tokens == 0:
            return StepResult(skipped="no group has a signal")
        sums = MismatchSums()
        for micro_batch in batch.micro_batches[0]:
            self.accumulate(micro_batch, batch, sums)
        grad_norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, self._config.train.grad_clip))
        metrics = sums.metrics() | {"grad_norm": grad_norm}
        if not (math.isfinite(grad_norm) and math.isfinite(sums.loss)):
            self._optimizer.zero_grad(set_to_none=True)
            return self._bad_step(metrics)
        rate = learning_rate(self._config.train, self._version + 1, self._config.run.steps)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._version += 1
        self._bad_steps = 0
        return StepResult(metrics=metrics | {"lr": rate})

    def accumulate(self, micro_batch: MicroBatch, batch: Batch, sums: MismatchSums) -> None:
        """Add this micro-batch's share of the step's gradient to the parameters'.

        The head's backward runs chunk by chunk on detached hidden states, whose gradient then enters the body.
        """
        tensors = _to_device(micro_batch, self.device)
        positions = tensors["trainable"].nonzero().squeeze(-1)
        targets_T = tensors["token_ids"][positions]
        behaviour_T, advantages_T = tensors["logprobs"][positions], tensors["advantages"][positions]
        with self._autocast():
            body_TD = self._hidden(tensors)[positions - 1]
            hidden_TD = body_TD.detach().requires_grad_()
            for part in chunks(len(positions)):
                logprobs, entropy = token_logprobs(
                    hidden_TD[part], self._head_weight, targets_T[part], batch.temperature
                )
                losses, touched = policy_loss(logprobs, behaviour_T[part], advantages_T[part], self._loss)
                loss = losses.sum() / batch.num_tokens
                loss.backward()
                sums.loss += float(loss.detach())
                sums.add(logprobs.detach(), behaviour_T[part], entropy, touched)
        body_TD.backward(hidden_TD.grad)

    @torch.no_grad()
    def logprobs(self, micro_batch: MicroBatch, temperature: float) -> np.ndarray:
        """float32[N] log-probability of every trainable token under the current weights, 0 elsewhere."""
        tensors = _to_device(micro_batch, self.device)
        positions = tensors["trainable"].nonzero().squeeze(-1)
        result_N = torch.zeros(len(micro_batch.token_ids))
        with self._autocast():
            hidden_TD = self._hidden(tensors)[positions - 1]
            for part in chunks(len(positions)):
                target = tensors["token_ids"][positions[part]]
                values, _ = token_logprobs(hidden_TD[part], self._head_weight, target, temperature)
                result_N[positions[part].cpu()] = values.cpu()
        return result_N.numpy()

    def save(self, folder: Path) -> None:
        """See `protocols.Trainer.save`. Weights are written in `model.dtype`."""
        save_checkpoint(self.model, folder, getattr(torch, self._config.model.dtype), self._source_folder)

    @property
    def _head_weight(self) -> torch.Tensor:
        head = self.model.get_output_embeddings()
        assert isinstance(head, torch.nn.Linear)
        return head.weight

    def _hidden(self, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        index, shape = pack_layout(tensors["cu_seqlens"])
        output = self.model.base_model(
            input_ids=tensors["token_ids"].unsqueeze(0),
            position_ids=tensors["position_ids"].unsqueeze(0),
            use_cache=False,
            pack_index=index,
            pack_shape=shape,
        )
        return output.last_hidden_state[0]

    def _autocast(self) -> AbstractContextManager[object]:
        dtype = getattr(torch, self._config.train.dtype)
        return torch.autocast(self.device.type, dtype=dtype, enabled=dtype != torch.float32)

    def _bad_step(self, metrics: dict[str, float | None]) -> StepResult:
        self._bad_steps += 1
        if self._bad_steps == MAX_BAD_STEPS:
            raise TrainingError(
                f"{MAX_BAD_STEPS} steps in a row had a loss or gradient that is not finite",
                remedy="lower train.lr; look at mismatch/* and grad_norm in metrics.jsonl of the steps before",
            )
        return StepResult(skipped="loss or gradient not finite", metrics=metrics | {"loss": None})


def _to_device(micro_batch: MicroBatch, device: torch.device) -> dict[str, torch.Tensor]:
    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name in micro_batch.__struct_fields__:
            # Arrays off the wire are read-only views; torch wants to own what it may write.
            tensor = torch.from_numpy(np.array(getattr(micro_batch, name)))
            yield name, (tensor.long() if tensor.dtype == torch.int32 else tensor).to(device)

    return dict(tensors())


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
