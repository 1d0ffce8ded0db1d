"""Generation on vLLM's AsyncLLM: token ids in and out, processed log-probs, engine-reported version spans."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from vllm import SamplingParams
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs import TokensPrompt
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import RequestOutputCollector

from engine.config import Dtype, GenerateSection
from engine.errors import GenerationError, MissingError
from engine.protocols import SleepLevel
from engine.types import Int32, Scored, Segment, SegmentRequest
from engine.vllm_plugin import SHARED_MEMORY_BACKEND, calling_the_engine, register_weight_transfer

_GIB = 1 << 30
_CPU_SLEEP = "engine.generate.cpu_sleep.CpuSleep"
# Then the engine is killed; its worker follows by the parent-death signal.
_SHUTDOWN_S = 1.0
_WATCH_PERIOD_S = 0.5
_Sent = tuple[str, Int32, SamplingParams]
_ENDED: dict[str, Literal["stop", "length", "interrupted"]] = {
    "stop": "stop",
    "length": "length",
    "abort": "interrupted",
}


def engine_args(
    folder: Path, generate: GenerateSection, dtype: Dtype, seed: int, *, head_in_float32: bool = False,
    worker_extension: str = "", split: bool = False,
) -> AsyncEngineArgs:
    """Every setting that shapes sampling is explicit; nothing comes from the model's generation_config.json."""
    return AsyncEngineArgs(
        model=str(folder),
        dtype=dtype,
        seed=seed,
        max_model_len=generate.max_model_len,
        max_num_seqs=generate.max_in_flight,
        generation_config="vllm",
        logprobs_mode="processed_logprobs",
        enable_prefix_caching=True,
        kv_cache_memory_bytes=int(generate.kv_cache_gib * _GIB),
        weight_transfer_config=WeightTransferConfig(backend=transfer_backend(split=split)),
        disable_log_stats=True,
        hf_overrides={"head_dtype": "float32"} if head_in_float32 else {},
        worker_extension_cls=worker_extension or ("" if torch.cuda.is_available() else _CPU_SLEEP),
        **(_gpu_args(generate, split) if torch.cuda.is_available() else _cpu_args(generate)),
    )


def transfer_backend(*, split: bool) -> str:
    """How weights reach the engine, which with `split` has devices of its own: `ipc` cannot reach those."""
    if not torch.cuda.is_available():
        return SHARED_MEMORY_BACKEND
    return "nccl" if split else "ipc"


def _gpu_args(generate: GenerateSection, split: bool) -> dict[str, Any]:
    # It puts weights and cache into pools of their own: only for those that sleep.
    return {"enable_sleep_mode": generate.sleep_level > 0 and not split}


def _cpu_args(generate: GenerateSection) -> dict[str, Any]:
    return {
        # Only full blocks are cached: vLLM's CPU default of 128 tokens would never hit on short prompts.
        "block_size": 32,
        # Seeded sampling kills the engine when a prefill is chunked (the CPU generator knows no offset).
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(8192, generate.max_model_len),
        "enforce_eager": True,
    }


class VllmGenerator:
    """`protocols.Generator` on one AsyncLLM. Build it on the main thread before the loop runs, inside
    `environment.engine_environment(log_file)`, then `open` it. `split`: the trainer has other devices.

    Requests are added one at a time under a lock, which whatever stops or ends them takes too: then no request is
    half-way in. New ones are held back here, not in the engine, which resumes by itself once it is awake.
    """

    def __init__(
        self, folder: Path, generate: GenerateSection, *, dtype: Dtype, seed: int, end_token_ids: Sequence[int],
        log_file: Path, head_in_float32: bool = False, worker_extension: str = "", split: bool = False,
    ) -> None:
        self._end_token_ids = list(end_token_ids)
        self._open = 0
        self._held: set[str] = set()
        self._served_version = 0
        self._weights_dropped = False
        self.transfer_backend = transfer_backend(split=split)
        register_weight_transfer()
        try:
            self.llm = AsyncLLM.from_engine_args(
                engine_args(
                    folder, generate, dtype, seed, head_in_float32=head_in_float32, worker_extension=worker_extension,
                    split=split,
                )
            )
        except (RuntimeError, ValueError) as error:
            raise MissingError(f"vLLM did not start: {error}", remedy=f"the engine's own log is {log_file}") from error

    async def open(self) -> None:
        """Call once on the running loop: from here on tokens are labelled version 0."""
        self._adding = asyncio.Lock()
        self._running = asyncio.Event()
        self._running.set()
        self._ended = asyncio.Condition()
        with calling_the_engine():
            await self.llm.update_weight_version("0")

    @property
    def served_version(self) -> int:
        return self._served_version

    def serves(self, number: int) -> None:
        """A weight route has updated the engine to this version; the engine labels tokens with it itself."""
        self._served_version = number
        self._weights_dropped = False

    async def generate(self, request: SegmentRequest) -> Segment:
        """See `protocols.Generator.generate`."""
        self._held.add(request.request_id)
        try:
            while True:
                await self._running.wait()
                async with self._adding:
                    if request.request_id not in self._held:  # cancelled meanwhile
                        return Segment.empty()
                    if self._running.is_set():
                        collector = await self._add(request.request_id, request.token_ids, self._params(request))
                        break
        finally:
            self._held.discard(request.request_id)
        return _segment((await self._collect(collector)).outputs[0])

    async def wave(self, requests: Sequence[SegmentRequest]) -> list[Segment]:
        """See `protocols.Generator.wave`."""
        outputs = await self._wave([
            (request.request_id, request.token_ids, self._params(request)) for request in requests
        ])
        return [_segment(output.outputs[0]) for output in outputs]

    async def score(self, prompts: Sequence[Int32]) -> list[Scored]:
        """See `protocols.Generator.score`."""
        # It makes one token too many: the engine has no request without one.
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1, detokenize=False,
                                output_kind=RequestOutputKind.FINAL_ONLY)
        outputs = await self._wave([(f"score/{place}", prompt, params) for place, prompt in enumerate(prompts)])
        return [_scored(prompt, output) for prompt, output in zip(prompts, outputs, strict=True)]

    async def _wave(self, requests: Sequence[_Sent]) -> list[RequestOutput]:
        self._require_weights()
        async with self._adding:
            if self._open:
                raise GenerationError(f"a wave needs an idle engine, {self._open} requests are open")
            with calling_the_engine():
                await self.llm.pause_generation(mode="keep", clear_cache=True)
                collectors = await self._add_all(requests)
                # Also while interrupted: requests of `generate` are held back here, not by the engine.
                await self.llm.resume_generation()
        return list(await asyncio.gather(*(self._collect(collector) for collector in collectors)))

    async def watch(self) -> None:
        """See `protocols.Generator.watch`. Calls to a dead engine may never be answered: this is what ends them."""
        while not self.llm.errored:  # noqa: ASYNC110  # vLLM has no event to wait for
            await asyncio.sleep(_WATCH_PERIOD_S)
        with calling_the_engine():
            raise self.llm.dead_error

    async def interrupt(self) -> None:
        """See `protocols.Generator.interrupt`."""
        await self._pause("abort", clear_cache=False)
        await self._all_ended()

    async def drain(self) -> None:
        """See `protocols.Generator.drain`."""
        self._running.clear()
        async with self._adding:  # one that is half-way in counts as open from here on
            pass
        await self._all_ended()

    async def pause(self, *, clear_cache: bool) -> None:
        """See `protocols.Generator.pause`."""
        await self._pause("keep", clear_cache=clear_cache)

    async def resume(self) -> None:
        """See `protocols.Generator.resume`."""
        self._require_weights()
        with calling_the_engine():
            await self.llm.resume_generation()
        self._running.set()

    async def cancel(self, request_ids: Collection[str]) -> None:
        """See `protocols.Generator.cancel`. What the engine has made but not yet told is lost."""
        async with self._adding:
            self._held.difference_update(request_ids)
            with calling_the_engine():
                await self.llm.abort(request_ids, internal=False)

    async def sleep(self, level: SleepLevel) -> None:
        """See `protocols.Generator.sleep`."""
        if level == 0:
            return
        # A lighter sleep afterwards brings nothing back.
        self._weights_dropped |= level == 2
        with calling_the_engine():
            await self.llm.sleep(level, mode="keep")
            if not torch.cuda.is_available():
                await self.llm.collective_rpc("give_pages_back", kwargs={"weights": level == 2})

    async def wake(self, what: Literal["weights", "kv_cache"]) -> None:
        """See `protocols.Generator.wake`."""
        with calling_the_engine():
            await self.llm.wake_up(tags=[what])

    async def close(self) -> None:
        """See `protocols.Generator.close`."""
        self.llm.shutdown(timeout=_SHUTDOWN_S)
        # Its finaliser shuts down once more and must not run when the interpreter is half gone.
        del self.llm

    async def _pause(self, mode: Literal["abort", "keep"], *, clear_cache: bool) -> None:
        self._running.clear()
        async with self._adding:
            with calling_the_engine():
                await self.llm.pause_generation(mode=mode, clear_cache=clear_cache)

    async def _all_ended(self) -> None:
        async with self._ended:
            await self._ended.wait_for(lambda: self._open == 0)

    def _require_weights(self) -> None:
        if self._weights_dropped:
            raise GenerationError("sleep dropped the engine's weights, and none were published since",
                                  remedy="publish between wake('weights') and resume, or set generate.sleep_level = 1")

    async def _add(self, request_id: str, token_ids: Int32, params: SamplingParams) -> RequestOutputCollector:
        prompt = TokensPrompt(prompt_token_ids=token_ids.tolist())
        with calling_the_engine():
            collector = await self.llm.add_request(request_id, prompt, params)
        self._open += 1
        return collector

    async def _add_all(self, requests: Sequence[_Sent]) -> list[RequestOutputCollector]:
        """All of them or none: a cancellation half-way takes back those that are in."""
        collectors: list[RequestOutputCollector] = []
        try:
            for request in requests:
                collectors.append(await self._add(*request))
        except BaseException:
            for collector in collectors:
                await self._release(collector, abort=True)
            await self.llm.resume_generation()
            raise
        return collectors

    def _params(self, request: SegmentRequest) -> SamplingParams:
        return SamplingParams(
            n=1,
            temperature=request.temperature,
            top_p=1.0,
            top_k=0,
            min_p=0.0,
            seed=request.seed,
            max_tokens=request.max_new_tokens,
            stop=list(request.stop) or None,
            stop_token_ids=self._end_token_ids,
            ignore_eos=True,
            logprobs=0,
            detokenize=bool(request.stop),
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    async def _collect(self, collector: RequestOutputCollector) -> RequestOutput:
        try:
            with calling_the_engine():
                output = await collector.get()
        except BaseException:
            await self._release(collector, abort=not self.llm.errored)
            raise
        await self._release(collector, abort=False)
        if not isinstance(output, RequestOutput):
            raise GenerationError(f"the engine answered with {type(output).__name__} where a completion was asked for")
        return output

    async def _release(self, collector: RequestOutputCollector, *, abort: bool) -> None:
        if abort:
            await self.llm.abort(collector.request_id, internal=True)
        collector.close()
        async with self._ended:
            self._open -= 1
            self._ended.notify_all()


def _scored(prompt: Int32, output: RequestOutput) -> Scored:
    told = output.prompt_logprobs or []
    if len(told) != len(prompt):
        raise GenerationError(f"the engine returned {len(told)} log-probs for a prompt of {len(prompt)} tokens")
    of_prompt = [(entry or {}).get(int(token)) for token, entry in zip(prompt, told, strict=True)]
    return Scored(
        np.asarray([of.logprob if of else 0.0 for of in of_prompt], np.float32),
        np.asarray([of is not None and of.rank == 1 for of in of_prompt], np.bool_),
    )


def _segment(output: CompletionOutput) -> Segment:
    tokens = np.asarray(output.token_ids, np.int32)
    pairs = zip(output.token_ids, output.logprobs or (), strict=False)
    logprobs = [entry[token].logprob for token, entry in pairs if entry is not None]
    spans = output.weight_versions or []
    ended = _ENDED.get(output.finish_reason or "")
    if ended is None:
        raise GenerationError(f"the engine ended a request with {output.finish_reason!r}")
    if len(logprobs) != len(tokens) or (len(tokens) > 0 and (not spans or spans[0].start != 0)):
        raise GenerationError(
            f"the engine returned {len(tokens)} tokens, {len(logprobs)} log-probs and version spans {spans}"
        )
    return Segment(
        token_ids=tokens,
        logprobs=np.asarray(logprobs, np.float32),
        version_spans=tuple((span.start, int(span.version)) for span in spans),
        ended=ended,
    )
