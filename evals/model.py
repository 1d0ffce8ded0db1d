"""lm-eval's view of the engine: a `TemplateLM` over the generate backend that is loaded already.

lm-eval is synchronous and runs in a thread of its own; what it asks for goes to the event loop in waves of fixed size
and order, so that the same requests under the same weights give the same answers, also after an interruption.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from engine.clock import within
from engine.errors import ConfigError, DataError, GenerationError
from engine.protocols import Generator
from engine.reward.answer import after_thinking
from engine.seeds import derive_seed
from engine.types import Int32, Scored, Segment, SegmentRequest
from evals.answers import Answer, AnswerFile

# Large enough that tails are few, small enough that an interruption loses little.
_WAVE = 128
_SEED = 30_000
_DEFAULT_NEW_TOKENS = 256
# Settings that a task may give when they change nothing: sampling is from the full distribution.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "top_p": (1, 1.0), "top_k": (0, -1, None), "min_p": (0, 0.0), "num_beams": (1,), "repetition_penalty": (1, 1.0),
}

Made = TypeVar("Made")
Progress = Callable[[int, int], None]


class Engine(Protocol):
    """Answers whole waves, synchronously."""

    def generate(self, requests: Sequence[SegmentRequest]) -> list[Segment]:
        """See `engine.protocols.Generator.wave`."""
        ...

    def score(self, prompts: Sequence[Int32]) -> list[Scored]:
        """See `engine.protocols.Generator.score`."""
        ...

    def stop(self) -> None:
        """From another thread: the wave under way and every later one end with `CancelledError`."""
        ...


class OnLoop:
    """The `Engine` that this host's generator is, called from another thread. Nothing else may be in flight, and the
    served version stays what it is.

    Raises:
        GenerationError: tokens came from another version, by the engine's own word.
        StalledError: a wave took more than `limit_s`.
    """

    def __init__(self, generator: Generator, loop: asyncio.AbstractEventLoop, limit_s: float) -> None:
        self._generator = generator
        self._loop = loop
        self._limit_s = limit_s
        self._version = generator.served_version
        self._wave: asyncio.Task[Any] | None = None
        self._stopped = False

    def generate(self, requests: Sequence[SegmentRequest]) -> list[Segment]:
        segments = self._ask(self._generator.wave(requests))
        if others := {version for made in segments for _, version in made.version_spans} - {self._version}:
            raise GenerationError(f"an evaluation of version {self._version} got tokens of {sorted(others)}")
        return segments

    def score(self, prompts: Sequence[Int32]) -> list[Scored]:
        return self._ask(self._generator.score(prompts))

    def stop(self) -> None:
        """On the loop."""
        self._stopped = True
        if self._wave is not None:
            self._wave.cancel()

    def _ask(self, wave: Coroutine[Any, Any, Made]) -> Made:
        return asyncio.run_coroutine_threadsafe(self._limited(wave), self._loop).result()

    async def _limited(self, wave: Coroutine[Any, Any, Made]) -> Made:
        if self._stopped:
            wave.close()
            raise asyncio.CancelledError
        self._wave = asyncio.current_task()
        return await within(self._limit_s, "an evaluation wave", wave)


class EngineLM(TemplateLM):
    """One evaluation's model. `max_length` is the engine's in tokens; `truncated` counts the completions that were cut
    at their limit, by task and question.

    Raises:
        ConfigError: a prompt and what is to follow it are longer than the engine takes: shortened it would measure
            another thing.
        DataError: a task wants a sampling setting that the engine does not offer.
    """

    def __init__(
        self, engine: Engine, tokenizer: Any, answers: AnswerFile, *, max_length: int, progress: Progress,
    ) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.truncated: Counter[tuple[str, int]] = Counter()
        self._engine = engine
        self._answers = answers
        self.max_length = max_length
        self._progress = progress

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """As lm-eval's own hf model: what a text's first token is conditioned on."""
        first = self.tokenizer.bos_token_id
        return self.eot_token_id if first is None else first

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.name_or_path

    def get_model_info(self) -> dict[str, Any]:
        """Nothing: what an answer depends on is in the result's own settings."""
        return {}

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return self.tokenizer.apply_chat_template(
            chat_history, tokenize=False, add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """A BOS token, where the tokenizer sets one, unless the text brings it already, as a chat template's does."""
        if add_special_tokens is None:
            bos = self.tokenizer.bos_token
            add_special_tokens = not (bos and string.startswith(bos))
        return self.tokenizer.encode(string, add_special_tokens=add_special_tokens)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """A completion for each, without what thinking came before it, cut at the first of the task's stop strings."""
        questions, copies = [_Question.of(instance) for instance in requests], Counter[int]()
        asked: list[SegmentRequest] = []
        for instance, question in zip(requests, questions, strict=True):
            asked.append(self._request(question, copies[id(instance)]))
            copies[id(instance)] += 1
        keys = [
            self._answers.generation(request, question.stops)
            for request, question in zip(asked, questions, strict=True)
        ]
        for missing in self._waves(keys):
            made = self._engine.generate([asked[place] for place in missing])
            self._answers.add([
                self._completion(keys[place], questions[place], segment)
                for place, segment in zip(missing, made, strict=True)
            ])
        answers = [self._answer(key) for key in keys]
        for question, answer in zip(questions, answers, strict=True):
            self.truncated[question.task, question.number] += answer.truncated
        return [answer.text for answer in answers]

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """See `lm_eval.api.model.TemplateLM.loglikelihood`; its progress would count encoding."""
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm)

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        pairs = [(np.asarray(context, np.int32), np.asarray(after, np.int32)) for _, context, after in requests]
        keys = [self._answers.continuation(*pair) for pair in pairs]
        for missing in self._waves(keys):
            for place in missing:
                self._require_room(requests[place][0][0], sum(map(len, pairs[place])) + 1)
            scored = self._engine.score([np.concatenate(pairs[place]) for place in missing])
            self._answers.add([
                _continuation(keys[place], len(pairs[place][1]), one)
                for place, one in zip(missing, scored, strict=True)
            ])
        answers = [self._answer(key) for key in keys]
        return [(answer.logprob, answer.greedy) for answer in answers]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Of whole texts, in windows of the engine's length if they are longer."""
        windows: list[tuple[tuple[str, str], list[int], list[int]]] = []
        owners: list[int] = []
        for owner, instance in enumerate(requests):
            arguments: Any = instance.args
            text = arguments[0]
            # One less than the length: the engine makes a token after what it scores.
            for window in get_rolling_token_windows(self.tok_encode(text, False), self.prefix_token_id,
                                                    max_seq_len=self.max_length - 2, context_len=1):
                windows.append(((text, ""), *make_disjoint_window(window)))
                owners.append(owner)
        totals = [0.0] * len(requests)
        for owner, (logprob, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            totals[owner] += logprob
        return totals

    def _request(self, question: _Question, copy: int) -> SegmentRequest:
        token_ids = np.asarray(self.tok_encode(question.prompt), np.int32)
        self._require_room(question.prompt, len(token_ids) + question.max_new_tokens)
        return SegmentRequest(
            request_id=f"{question.task}/{question.number}/{copy}", token_ids=token_ids,
            max_new_tokens=question.max_new_tokens, temperature=question.temperature,
            seed=derive_seed(_SEED, question.task, question.number, question.choice, copy),
        )

    def _completion(self, key: str, question: _Question, segment: Segment) -> Answer:
        text = self.tokenizer.decode(segment.token_ids.tolist(), skip_special_tokens=True)
        # A template may have opened the thinking itself: then it counts as open until it is closed.
        opened = question.prompt.rstrip().endswith("<think>") and "</think>" not in text
        spoken = "" if opened else after_thinking(text)
        cut = min([place for stop in question.stops if (place := spoken.find(stop)) >= 0], default=len(spoken))
        # What a stop string ends is whole, however long the rest became.
        truncated = segment.ended == "length" and cut == len(spoken)
        return Answer(key, text=spoken[:cut], truncated=truncated)

    def _waves(self, keys: Sequence[str]) -> Iterator[list[int]]:
        """Places that have no answer yet, wave by wave. Always cut at the same places: an evaluation that goes on
        batches what is left as the unbroken one would have."""
        for start in range(0, len(keys), _WAVE):
            wave = range(start, min(start + _WAVE, len(keys)))
            if missing := [place for place in wave if self._answers.get(keys[place]) is None]:
                yield missing
            self._progress(wave.stop, len(keys))

    def _answer(self, key: str) -> Answer:
        answer = self._answers.get(key)
        assert answer is not None
        return answer

    def _require_room(self, prompt: str, needed: int) -> None:
        if needed > self.max_length:
            raise ConfigError(
                "generate.max_model_len", value=self.max_length,
                limit=f"an evaluation's prompt and answer need {needed} tokens: {prompt[:80]!r}",
                remedy=f"set generate.max_model_len = {needed} or more, or leave the suite out",
            )


class _Question(NamedTuple):
    """What lm-eval asks for a completion of."""

    task: str
    number: int
    choice: int
    prompt: str
    temperature: float
    max_new_tokens: int
    stops: list[str]

    @classmethod
    def of(cls, instance: Instance) -> _Question:
        arguments: Any = instance.args
        prompt, left = arguments[0], dict(arguments[1])
        until = left.pop("until", None) or []
        given = [left.pop(name) for name in ("max_gen_toks", "max_new_tokens", "max_tokens") if name in left]
        temperature = float(left.pop("temperature", 0.0) or 0.0)
        if not left.pop("do_sample", temperature > 0):
            temperature = 0.0
        for name, value in left.items():
            if name not in _NEUTRAL or value not in _NEUTRAL[name]:
                raise DataError(f"task {instance.task_name} sets {name} = {value!r}, which evaluations do not offer",
                                remedy="remove it from the task's generation_kwargs: sampling is temperature alone")
        stops = [until] if isinstance(until, str) else list(until)
        return cls(
            task=str(instance.task_name), number=int(instance.doc_id or 0), choice=instance.idx, prompt=prompt,
            temperature=temperature, max_new_tokens=int(given[0]) if given else _DEFAULT_NEW_TOKENS,
            stops=[stop for stop in stops if stop],
        )


def _continuation(key: str, length: int, scored: Scored) -> Answer:
    return Answer(key, logprob=float(scored.logprobs[-length:].sum(dtype=np.float64)),
                  greedy=bool(scored.greedy[-length:].all()))
