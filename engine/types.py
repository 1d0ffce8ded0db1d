"""The structs that travel through the pipeline, one per arrow of the drawing in `engine/loop.py`.

    Task -> Lease -> Segment -> Rollout -> Group -> Verdict -> Batch -> Version

Suffixes name shapes: T tokens of one rollout, N tokens of one packed micro-batch, S sequences in it. Arrays are
numpy with the dtype fixed by the field's type; on the wire and in files they are little-endian bytes (`encode_array`,
`decode_array`), never lists.
"""

from __future__ import annotations

import base64
from typing import Any, Literal, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.config import GenerateSection

Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]
Bool = NDArray[np.bool_]

StopReason = Literal["stop", "length", "env", "error"]
Outcome = Literal["completed", "trained", "zero_signal", "stale", "rejected", "timed_out"]


class Message(msgspec.Struct, frozen=True):
    """One chat message: `Message("user", "What is 2 + 3?")`."""

    role: Literal["system", "user", "assistant"]
    content: str


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One question. The same (env, index, seed) is the same Task for ever.

    `Task(task_id="sums/7", env="sums", index=7, messages=(Message("user", "What is 2 + 3?"),),
    answer={"answer": "5"}, seed=1)`
    """

    task_id: str
    env: str
    index: int
    messages: tuple[Message, ...]
    answer: dict[str, Any]
    seed: int


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that shapes the sampling distribution, explicit: nothing is read from a model's
    generation_config.json. Training needs the full distribution, so there is no top-p, top-k or min-p."""

    temperature: float
    max_new_tokens: int
    stop: tuple[str, ...] = ()

    @classmethod
    def of(cls, generate: GenerateSection) -> Sampling:
        """As the configuration says."""
        return cls(temperature=generate.temperature, max_new_tokens=generate.max_new_tokens, stop=generate.stop)


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """Leave to generate one whole group of `group_size` rollouts of one task, on one host.

    `order` is the group's number, given at admission; `served_version` the version served then.
    """

    lease_id: str
    order: int
    task: Task
    group_size: int
    sampling: Sampling
    served_version: int
    deadline_s: float | None = None


class SegmentRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request to the generator: continue `token_ids` (int32[T], prompt and all made so far).

    `temperature` 0 means greedy. Stop strings, if given, end the request once the new text holds one.
    """

    request_id: str
    token_ids: Int32
    max_new_tokens: int
    temperature: float
    seed: int
    stop: tuple[str, ...] = ()


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """What one request made: new tokens only. `version_spans` is [(start, version)], start counted from the first
    new token. `ended` is the engine's own word: `interrupted` segments are continued by a new request."""

    token_ids: Int32
    logprobs: Float32
    version_spans: tuple[tuple[int, int], ...]
    ended: Literal["stop", "length", "interrupted"]

    @classmethod
    def empty(cls) -> Segment:
        """Of a request that was ended before its first token."""
        nothing, no_logprobs = np.zeros(0, np.int32), np.zeros(0, np.float32)
        return cls(token_ids=nothing, logprobs=no_logprobs, version_spans=(), ended="interrupted")


class Scored(msgspec.Struct, frozen=True):
    """Given tokens as the served model sees them, at temperature 1. logprobs float32[T], 0 for the first, which nothing
    stands before; greedy bool[T], whether the token is the likeliest there."""

    logprobs: Float32
    greedy: Bool


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """One token sequence; nothing marks where a prompt ends but `trainable`.

    token_ids int32[T]; trainable bool[T], true on sampled tokens only; logprobs float32[T], the behaviour policy's
    log-probability under the sampling distribution, 0 where not trainable; version_spans [(start, version)] over
    token positions; reward null until scored, or when no reward could be given.
    """

    token_ids: Int32
    trainable: Bool
    logprobs: Float32
    version_spans: tuple[tuple[int, int], ...]
    stop_reason: StopReason
    env: str
    lease_id: str
    index_in_group: int
    seed: int
    branch: int = 0
    text: str = ""
    reward: float | None = None
    reward_parts: dict[str, float] = {}
    extracted: str | None = None
    worker: str = ""
    engine_build: str = ""
    sampling_digest: str = ""
    evidence: bytes = b""
    timings: dict[str, float] = {}

    @property
    def length(self) -> int:
        """Sampled tokens."""
        return int(self.trainable.sum())

    @property
    def right(self) -> bool:
        """Whether it counts as a right answer: by its part `exact` or `math` if a scorer gave one, whatever else is in
        the reward, and otherwise by a reward of 1. Never without a reward."""
        judged = [value for name, value in self.reward_parts.items() if name in ("exact", "math")]
        return self.reward is not None and max(judged, default=self.reward) >= 1.0

    def token_versions(self) -> Int32:
        """int32[T]: the version that each token came from; the first span's for what stands before it."""
        if not self.version_spans:
            return np.zeros(len(self.token_ids), np.int32)
        starts = np.asarray([start for start, _ in self.version_spans])
        spans = np.searchsorted(starts, np.arange(len(self.token_ids)), side="right") - 1
        return np.asarray([version for _, version in self.version_spans], np.int32)[spans.clip(min=0)]


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """All rollouts of one lease. Shape is kept: a failed member stays, marked by a null reward."""

    lease: Lease
    rollouts: tuple[Rollout, ...]
    admitted_version: int
    outcome: Outcome = "completed"
    reason: str = ""

    def oldest_version(self) -> int:
        """Smallest version of any trainable token; the admitted version when there is none."""
        return min(self._versions(), default=self.admitted_version)

    def newest_version(self) -> int:
        """Largest version of any trainable token; the admitted version when there is none."""
        return max(self._versions(), default=self.admitted_version)

    def _versions(self) -> list[int]:
        return [version for rollout in self.rollouts for _, version in rollout.version_spans]


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What scoring made of a group: the group with rewards, or a refusal (`accepted` false) with its reason."""

    group: Group
    accepted: bool = True
    reason: str = ""


class MicroBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Whole sequences packed end to end, no padding.

    token_ids, position_ids int32[N]; cu_seqlens int32[S+1], sequence starts and the end; trainable bool[N]. At the
    position of the token that they judge: logprobs float32[N] (behaviour); advantages float32[N]; weights float32[N],
    the token's share of the whole step's loss; staleness int32[N], version before the step minus the token's own.
    """

    token_ids: Int32
    position_ids: Int32
    cu_seqlens: Int32
    trainable: Bool
    logprobs: Float32
    advantages: Float32
    weights: Float32
    staleness: Int32


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """One optimizer step: micro-batches by rank, as many for each rank, and the count of trainable tokens in all. What
    normalises the loss is in the micro-batches' weights, so neither the cut nor the ranks change the gradient."""

    micro_batches: tuple[tuple[MicroBatch, ...], ...]
    num_tokens: int
    temperature: float


class Version(msgspec.Struct, frozen=True, kw_only=True):
    """Number of updates applied and the digest of the weights as they are sent to engines."""

    number: int
    digest: str


def encode_array(value: object) -> object:
    """msgspec enc_hook: numpy arrays become little-endian bytes."""
    if isinstance(value, np.ndarray):
        return value.astype(value.dtype.newbyteorder("<"), copy=False).tobytes()
    raise NotImplementedError(f"cannot encode {type(value)}")


def decode_array(kind: type, value: object) -> object:
    """msgspec dec_hook: bytes (base64 text in JSON) become a read-only array of the field's dtype."""
    dtype = get_args(get_args(kind)[1])[0]
    data = base64.b64decode(value, validate=True) if isinstance(value, str) else value
    if not isinstance(data, bytes | memoryview):
        raise ValueError(f"expected array bytes, got {type(value).__name__}")
    return np.frombuffer(data, dtype=np.dtype(dtype).newbyteorder("<"))
