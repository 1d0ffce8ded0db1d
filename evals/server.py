"""An engine that runs elsewhere: vLLM's OpenAI-compatible server, or any that takes and returns token ids as it does.

Tokens go in and out as on the loaded engine, and the server's own sampling defaults shape nothing. Which weights it
serves cannot be seen from here: it is taken at its word, see `ServerEngine.version`.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import http.client
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np

from engine.errors import ConfigError, GenerationError, MissingError, StalledError
from engine.types import Int32, Scored, Segment, SegmentRequest, Version

# What a request leaves out the server fills from the model's generation_config.json.
_FULL_DISTRIBUTION = {
    "n": 1, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
_ENDED: dict[str, Literal["stop", "length"]] = {"stop": "stop", "length": "length"}

Told = TypeVar("Told")


class _Model(msgspec.Struct):
    id: str
    root: str | None = None
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class _Sampled(msgspec.Struct):
    token_logprobs: list[float]


class _Given(msgspec.Struct):
    logprob: float
    rank: int | None = None


class _Choice(msgspec.Struct):
    finish_reason: str
    token_ids: list[int]
    logprobs: _Sampled | None = None
    prompt_logprobs: list[dict[int, _Given] | None] | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice]


class ServerEngine:
    """`evals.model.Engine` over `base_url`, such as "http://HOST:8000/v1", which serves one model. Requests end at
    `end_token_ids` alone; `at_once` are under way at a time.

    Raises, when it is made and by every call:
        MissingError: nothing answers at the URL.
        GenerationError: the server refuses, with its own words, or answers as vLLM's does not.
        StalledError: a request had no answer within `limit_s`.
    And when it is made:
        ConfigError: the URL is none, or the server has several models.
    """

    def __init__(
        self, base_url: str, *, end_token_ids: Sequence[int], limit_s: float, at_once: int = 64,
    ) -> None:
        if not base_url.startswith(("http://", "https://")):
            raise ConfigError("--base-url", value=base_url, limit="is no http or https URL",
                              remedy="such as http://HOST:8000/v1")
        self._url = base_url.rstrip("/")
        self._end_token_ids = list(end_token_ids)
        self._limit_s = limit_s
        self._at_once = at_once
        self._stopped = False
        self._model = self._served()

    @property
    def model_name(self) -> str:
        """As the server calls it."""
        return self._model.id

    @property
    def max_length(self) -> int | None:
        """Of prompt and completion, in tokens; None if the server does not say. It cuts what is longer, silently."""
        return self._model.max_model_len

    @property
    def version(self) -> Version:
        """The digest is of the name and path that the server gives: weights that changed under both look the same."""
        told = hashlib.sha256(msgspec.json.encode((self._model.id, self._model.root))).hexdigest()
        return Version(number=0, digest=f"server:{told[:32]}")

    def generate(self, requests: Sequence[SegmentRequest]) -> list[Segment]:
        """A completion for each, in order. Log-probs are of the server's kind (vLLM: at temperature 1 unless it was
        started with other `--logprobs-mode`); the version is always 0."""
        bodies = [
            self._body(request.token_ids, max_tokens=request.max_new_tokens, temperature=request.temperature,
                       seed=request.seed, stop=list(request.stop), logprobs=0)
            for request in requests
        ]
        return [self._segment(choice) for choice in self._wave(bodies)]

    def score(self, prompts: Sequence[Int32]) -> list[Scored]:
        """See `engine.protocols.Generator.score`."""
        bodies = [self._body(prompt, max_tokens=1, temperature=0.0, prompt_logprobs=1) for prompt in prompts]
        return [self._scored(prompt, choice) for prompt, choice in zip(prompts, self._wave(bodies), strict=True)]

    def stop(self) -> None:
        """From any thread: nothing more is asked. The wave under way ends with `concurrent.futures.CancelledError` once
        its open requests have ended, every later one at once."""
        self._stopped = True

    def _served(self) -> _Model:
        models = self._ask("/models", None, _Models).data
        if len(models) != 1:
            names = ", ".join(model.id for model in models)
            raise ConfigError("--base-url", value=self._url, limit=f"serves {names or 'nothing'}, not just one model",
                              remedy="ask a server that serves the checkpoint alone")
        return models[0]

    def _body(self, prompt: Int32, **settings: Any) -> dict[str, Any]:
        return {
            "model": self._model.id, "prompt": prompt.tolist(), "return_token_ids": True, "ignore_eos": True,
            "stop_token_ids": self._end_token_ids, **_FULL_DISTRIBUTION, **settings,
        }

    def _wave(self, bodies: Sequence[dict[str, Any]]) -> list[_Choice]:
        with concurrent.futures.ThreadPoolExecutor(self._at_once) as pool:
            return list(pool.map(self._complete, bodies))

    def _complete(self, body: dict[str, Any]) -> _Choice:
        if self._stopped:
            raise concurrent.futures.CancelledError
        choices = self._ask("/completions", body, _Completion).choices
        if len(choices) != 1:
            raise self._broken(f"{len(choices)} completions where one was asked for")
        return choices[0]

    def _ask(self, path: str, body: dict[str, Any] | None, kind: type[Told]) -> Told:
        url = self._url + path
        data = None if body is None else msgspec.json.encode(body)
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=self._limit_s) as response:
                return msgspec.json.decode(response.read(), type=kind)
        except urllib.error.HTTPError as error:
            with error:
                said = error.read(1000).decode(errors="replace")
                remedy = "mend it and run the same again: what was answered before is kept"
                raise GenerationError(f"the server at {url} answered {error.code}: {said}", remedy=remedy) from error
        except msgspec.DecodeError as error:
            raise self._broken(f"what cannot be read: {error}") from error
        except TimeoutError as error:
            raise StalledError(f"the server at {url} gave no answer within {self._limit_s} s",
                               remedy="look at its log, or ask for fewer at once") from error
        except (OSError, http.client.HTTPException) as error:
            raise MissingError(f"no server answers at {url}: {error}",
                               remedy="start it and run the same again (docs/evals.md)") from error

    def _broken(self, what: str) -> GenerationError:
        return GenerationError(f"the server at {self._url} answered with {what}",
                               remedy="it must return token ids and prompt log-probs as vLLM's does (docs/evals.md)")

    def _segment(self, choice: _Choice) -> Segment:
        tokens, logprobs = choice.token_ids, choice.logprobs.token_logprobs if choice.logprobs else []
        ended = _ENDED.get(choice.finish_reason)
        if ended is None or len(tokens) != len(logprobs):
            raise self._broken(f"{len(tokens)} tokens, {len(logprobs)} log-probs and the end {choice.finish_reason!r}")
        return Segment(
            token_ids=np.asarray(tokens, np.int32), logprobs=np.asarray(logprobs, np.float32),
            version_spans=((0, 0),) if tokens else (), ended=ended,
        )

    def _scored(self, prompt: Int32, choice: _Choice) -> Scored:
        told = choice.prompt_logprobs or []
        if len(told) != len(prompt):
            raise self._broken(f"{len(told)} log-probs for a prompt of {len(prompt)} tokens")
        of_prompt = [(entry or {}).get(int(token)) for token, entry in zip(prompt, told, strict=True)]
        if None in of_prompt[1:]:
            raise self._broken("log-probs that leave out the prompt's own tokens")
        return Scored(
            np.asarray([of.logprob if of else 0.0 for of in of_prompt], np.float32),
            np.asarray([of is not None and of.rank == 1 for of in of_prompt], np.bool_),
        )
