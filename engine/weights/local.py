"""Weights to the engine on this host, through vLLM's weight-transfer API.

On a GPU vLLM's own backends do it: `ipc` hands over CUDA memory, `nccl` sends to an engine on other devices. On CPU the
pair below does the same through anonymous shared memory, which vanishes with the host. All are driven by vLLM's
trainer-side engine in the training thread; `LoopClient` carries its four calls to the AsyncLLM on the event loop and
adds the version, which vLLM's leave out.
"""

from __future__ import annotations

import asyncio
import base64
import mmap
import os
import pickle
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self

import torch
from vllm.distributed.weight_transfer.base import (
    ParamMeta,
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferInitRequest,
    WeightTransferUpdateInfo,
    WeightTransferUpdatePayload,
    WeightTransferUpdateRequest,
)
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo, IPCTrainerWeightTransferEngine
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.utils.network_utils import get_open_port

from engine.protocols import InThread
from engine.types import Version
from engine.vllm_plugin import SHARED_MEMORY_BACKEND, calling_the_engine, register_weight_transfer
from engine.weights.digest import WeightsDigest

register_weight_transfer()


class TrainedPolicy(Protocol):
    """A trainer, as far as its weights are concerned."""

    @property
    def model(self) -> torch.nn.Module: ...
    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]: ...


class MasterWeights(WeightSource):
    """The trainer's parameters in the dtype that the engine holds; one manifest says what iteration yields."""

    def __init__(self, policy: TrainedPolicy, wire_dtype: torch.dtype) -> None:
        self._policy = policy
        self._wire_dtype = wire_dtype
        self.digest = ""
        """Of the last complete iteration."""

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, self._wire_dtype, tuple(p.shape)) for name, p in self._policy.model.named_parameters()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        whole = WeightsDigest()
        for name, parameter in self._policy.full_parameters():
            tensor = parameter.to(self._wire_dtype)
            whole.add(name, tensor)
            yield name, tensor
        self.digest = whole.hexdigest()


class UncastWeights(MasterWeights):
    """For memory that casts whatever is copied to it and is digested where it lies."""

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._policy.full_parameters())


@dataclass
class SharedMemoryInit(WeightTransferInitInfo):
    """Nothing to agree on beforehand: every update names its memory."""


@dataclass
class SharedMemoryUpdate(WeightTransferUpdateInfo):
    """Where the tensors lie: `path` of the shared memory, and name, dtype and shape of each, back to back."""

    path: str
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]

    def metas(self) -> list[ParamMeta]:
        """The tensors in their order."""
        return [
            ParamMeta(name, getattr(torch, dtype), tuple(shape))
            for name, dtype, shape in zip(self.names, self.dtype_names, self.shapes, strict=True)
        ]


class SharedMemoryReceiver(WeightTransferEngine[SharedMemoryInit, SharedMemoryUpdate]):
    """The engine's side, in vLLM's worker process."""

    init_info_cls = SharedMemoryInit
    update_info_cls = SharedMemoryUpdate

    def init_transfer_engine(self, init_info: SharedMemoryInit) -> None:
        """Nothing to set up."""

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: SharedMemoryUpdate) -> None:
        with open(update_info.path, "rb") as file:
            memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ | mmap.PROT_WRITE, flags=mmap.MAP_PRIVATE)
        load: Any = self.model.load_weights
        load(views(memory, update_info.metas()))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        # A tied lm_head keeps its packed copy of the old embedding otherwise: log-probs off by nats, without an error.
        for module in self.model.modules():
            if isinstance(module, ParallelLMHead):
                method: Any = module.quant_method
                method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        """Holds nothing between updates."""


@dataclass
class SharedMemoryTrainerInit(TrainerInitInfo):
    """Trainer side; rank 0 of the host sends."""

    backend: ClassVar[str] = SHARED_MEMORY_BACKEND


class SharedMemorySender(TrainerWeightTransferEngine[SharedMemoryTrainerInit]):
    """The trainer's side: writes all weights to one block of anonymous shared memory, then drives the update. `digest`
    is that of what was sent last, as `MasterWeights` has it; it is taken while the engine loads."""

    init_info_cls = SharedMemoryTrainerInit
    digest: str
    _metas: list[ParamMeta]
    _file: int
    _memory: mmap.mmap
    _digesting: ThreadPoolExecutor

    @classmethod
    def trainer_init(
        cls, init_info: SharedMemoryTrainerInit, *, client: VLLMWeightSyncClient, source: WeightSource | None = None
    ) -> Self:
        if source is None:
            raise ValueError("shared-memory transfer sends whole models: it needs a WeightSource")
        sender = cls(client=client, source=source, is_sender=init_info.is_sender)
        sender._metas = source.metadata()
        size = sum(_nbytes(meta) for meta in sender._metas)
        sender._file = os.memfd_create("farfield-weights")
        os.ftruncate(sender._file, size)
        sender._memory = mmap.mmap(sender._file, size)
        sender._digesting = ThreadPoolExecutor(1, "weights-digest")
        if sender.is_sender:
            client.init_weight_transfer_engine({})
        return sender

    def send_weights(self) -> None:
        assert self.source is not None
        targets = views(self._memory, self._metas)
        for (name, target), (source_name, tensor) in zip(targets, self.source, strict=True):
            if name != source_name:
                raise RuntimeError(f"the model yields {source_name} where its manifest says {name}")
            target.copy_(tensor)
        if not self.is_sender:
            return
        digest = self._digesting.submit(_digest, self._memory, self._metas)
        self.client.start_weight_update()
        self.client.update_weights(
            {
                "path": f"/proc/{os.getpid()}/fd/{self._file}",
                "names": [meta.name for meta in self._metas],
                "dtype_names": [str(meta.dtype).removeprefix("torch.") for meta in self._metas],
                "shapes": [list(meta.shape) for meta in self._metas],
            }
        )
        self.client.finish_weight_update()
        self.digest = digest.result()

    def shutdown(self) -> None:
        self._digesting.shutdown()
        self._memory.close()
        os.close(self._file)


def _digest(memory: mmap.mmap, metas: list[ParamMeta]) -> str:
    whole = WeightsDigest()
    for name, tensor in views(memory, metas):
        whole.add(name, tensor)
    return whole.hexdigest()


def _nbytes(meta: ParamMeta) -> int:
    return torch.Size(meta.shape).numel() * meta.dtype.itemsize


def views(memory: mmap.mmap, metas: list[ParamMeta]) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors that lie back to back in `memory`."""
    offset = 0
    for meta in metas:
        flat = torch.frombuffer(memory, dtype=meta.dtype, count=torch.Size(meta.shape).numel(), offset=offset)
        yield meta.name, flat.view(meta.shape)
        offset += _nbytes(meta)


class SoleIPCSender(IPCTrainerWeightTransferEngine):
    """vLLM's own gathers handles from every rank for an engine with a worker beside each. Ours has one worker, beside
    this rank; the others have no handles, and wait for commands, not in a collective."""

    def _all_gather_and_merge_handles(self, handles: list[dict[str, tuple[Any, ...]]]) -> list[dict[str, Any]]:
        return handles

    @staticmethod
    def _post_send_sync() -> None:
        torch.cuda.ipc_collect()


class UpdatableEngine(Protocol):
    """The weight-transfer part of vLLM's AsyncLLM."""

    async def init_weight_transfer_engine(self, request: WeightTransferInitRequest) -> None: ...
    async def start_weight_update(self) -> None: ...
    async def update_weights(self, request: WeightTransferUpdateRequest) -> None: ...
    async def finish_weight_update(self, weight_version: str | None = None) -> None: ...


class UpdatableGenerator(Protocol):
    """A generator on an engine whose weights this route may replace."""

    @property
    def llm(self) -> UpdatableEngine: ...
    @property
    def transfer_backend(self) -> str: ...
    def serves(self, number: int) -> None: ...


class LoopClient:
    """vLLM's synchronous client protocol, called in the training thread, answered on the event loop."""

    def __init__(self, engine: UpdatableEngine, loop: asyncio.AbstractEventLoop) -> None:
        self._engine = engine
        self._loop = loop
        self.number = 0

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._call(self._engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info=init_info)))

    def start_weight_update(self) -> None:
        self._call(self._engine.start_weight_update())

    def update_weights(self, update_info: WeightTransferUpdatePayload) -> None:
        if isinstance(update_info, dict) and "ipc_handles" in update_info:
            # vLLM's encoder takes no CUDA handles; its worker takes them pickled, which environment.py allows.
            pickled = base64.b64encode(pickle.dumps(update_info.pop("ipc_handles"))).decode()
            update_info |= {"ipc_handles_pickled": pickled}
        self._call(self._engine.update_weights(WeightTransferUpdateRequest(update_info=update_info)))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._call(self._engine.finish_weight_update(weight_version or str(self.number)))

    def _call(self, call: Coroutine[Any, Any, None]) -> None:
        with calling_the_engine():
            asyncio.run_coroutine_threadsafe(call, self._loop).result()


class LocalRoute:
    """`protocols.WeightRoute` to this host's engine."""

    def __init__(self, generator: UpdatableGenerator, policy: TrainedPolicy, wire_dtype: torch.dtype,
                 in_thread: InThread) -> None:
        self._generator = generator
        self._in_thread = in_thread
        in_memory = generator.transfer_backend == SHARED_MEMORY_BACKEND
        self._source = (UncastWeights if in_memory else MasterWeights)(policy, wire_dtype)
        self._client = LoopClient(generator.llm, asyncio.get_running_loop())
        self._sender: TrainerWeightTransferEngine[Any] | None = None

    async def publish(self, number: int) -> Version:
        """See `protocols.WeightRoute.publish`."""
        digest = await self._in_thread(self._send, number)
        self._generator.serves(number)
        return Version(number=number, digest=digest)

    def _send(self, number: int) -> str:
        if self._sender is None:
            self._sender = self._connect(self._generator.transfer_backend)
        self._client.number = number
        self._sender.send_weights()
        return self._sender.digest if isinstance(self._sender, SharedMemorySender) else self._source.digest

    def _connect(self, backend: str) -> TrainerWeightTransferEngine[Any]:
        make: Any = WeightTransferTrainerFactory.trainer_init
        info: TrainerInitInfo = SharedMemoryTrainerInit(rank=0)
        if backend == "ipc":
            make, info = SoleIPCSender.trainer_init, IPCTrainerInitInfo(rank=0)
        elif backend == "nccl":
            # Two members: this rank, and the engine's one worker.
            port = get_open_port()
            info = NCCLTrainerInitInfo(rank=0, master_address="127.0.0.1", master_port=port, world_size=2)
        return make(info, client=self._client, source=self._source)
