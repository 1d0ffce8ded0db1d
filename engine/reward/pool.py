"""Scoring off the event loop: worker processes that may hang, crash or eat memory without harm to the run."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence

import msgspec

from engine.config import RewardSection, TaskSection
from engine.errors import ConfigError, ScoringError
from engine.protocols import Score
from engine.reward import judge
from engine.reward.scoring import HEADER_BYTES, Failure, Job, Judgement, Reply, Started, frame, require_scorers
from engine.types import Rollout, StopReason, Task

# Imports before a scorer's time begins to run. Far above what reasoning_gym takes on a busy machine.
_LOAD_LIMIT_S = 120.0
# A loop that was held up may see a reply and the end of its time at once: it looks again before it kills.
_GRACE_S = 0.1
# Characters of a completion or answer in a message.
_SHOWN = 200

_decoder = msgspec.msgpack.Decoder(Reply)


class ScoringPool:
    """A `Scorer` over `reward.workers` processes, each started when first needed and replaced when it dies.

    A scorer past `reward.timeout_s` is killed: `timed_out`. One that takes its process with it (a segfault, more than
    `reward.memory_mib`) gives a null reward with the part `worker_died`.

    One that gives no verdict (a judge without a number) gives a null reward with the part `unjudged`.

    Raises:
        ConfigError: a section's params.score or params.judge is wrong.
    """

    def __init__(self, sections: Sequence[TaskSection], reward: RewardSection, max_new_tokens: int) -> None:
        for index, section in enumerate(sections):
            require_scorers(section.scores, f"tasks.{index}.params.score")
        self._judges = {
            section.label: _judge(section, f"tasks.{index}.params.judge") for index, section in enumerate(sections)
        }
        self._sections = {section.label: section for section in sections}
        self._reward = reward
        self._max_new_tokens = max_new_tokens
        self._workers = [_Worker(reward.memory_mib) for _ in range(reward.workers)]
        # Last in, first out: a started worker is used before another is started.
        self._idle: asyncio.LifoQueue[_Worker] = asyncio.LifoQueue()
        for worker in self._workers:
            self._idle.put_nowait(worker)

    async def score(self, task: Task, rollout: Rollout) -> Score:
        section = self._sections[task.env]
        job = Job(
            weights=section.scores,
            kind=section.answer,
            question=task.messages[-1].content,
            completion=rollout.text,
            answer=task.answer,
            num_tokens=rollout.length,
            max_new_tokens=self._max_new_tokens,
            judge=self._judges[task.env],
        )
        worker = await self._idle.get()
        try:
            reply = await worker.judge(job, self._reward.timeout_s)
        except TimeoutError:
            return Score(None, timed_out=True)
        except EOFError:
            return Score(None, parts={"worker_died": 1.0})
        finally:
            self._idle.put_nowait(worker)
        if isinstance(reply, Failure):
            raise ScoringError(
                f"the scorer of task {task.task_id} raised on completion {rollout.text[:_SHOWN]!r}, answer "
                f"{str(task.answer.get('answer'))[:_SHOWN]!r}:\n{reply.traceback.rstrip()}",
                remedy=reply.remedy,
            )
        return truncated(Score(reply.reward, reply.extracted, reply.parts), rollout.stop_reason, self._reward.truncated)

    async def close(self) -> None:
        for worker in self._workers:
            await worker.close()


def truncated(score: Score, stop_reason: StopReason, policy: str) -> Score:
    """What `reward.truncated` makes of a completion that was cut off: nothing (keep), 0 (zero), no reward (mask).

    A null reward stays null.
    """
    if score.reward is None or stop_reason != "length" or policy == "keep":
        return score
    return msgspec.structs.replace(score, reward=0.0 if policy == "zero" else None)


def _judge(section: TaskSection, path: str) -> judge.Settings | None:
    given = section.params.get("judge")
    if ("judge" in section.scores) == (given is None):
        raise ConfigError(path, value=given, limit="goes with the scorer 'judge'", remedy="set both or neither")
    return None if given is None else judge.settings(given, path)


class _Worker:
    """One process at a time, started by the first job and again after it was killed."""

    def __init__(self, memory_mib: int) -> None:
        self._memory_mib = memory_mib
        self._process: Process | None = None
        self._closed = False

    async def judge(self, job: Job, timeout_s: float) -> Judgement | Failure:
        """The process's word on `job`. It is killed unless it gives one, and whoever waits may be cancelled.

        Raises:
            TimeoutError: the scorer took longer than `timeout_s`.
            EOFError: the process died while scoring.
            ScoringError: it died before, or the pool is closed.
        """
        answered = False
        try:
            if self._process is None or self._process.returncode is not None:
                self._process = await _start(self._memory_mib)
            if self._closed:
                raise ScoringError("the scoring pool is closed")
            reply = await self._load(self._process, job)
            if isinstance(reply, Started):
                reply = await _reply(self._process, timeout_s)
            assert not isinstance(reply, Started)
            answered = True
            return reply
        finally:
            if not answered:
                await self._kill()

    async def _load(self, process: Process, job: Job) -> Reply:
        assert process.stdin is not None
        try:
            process.stdin.write(frame(job))
            await process.stdin.drain()
            return await _reply(process, _LOAD_LIMIT_S)
        except (EOFError, ConnectionError, TimeoutError) as error:
            raise ScoringError(
                f"a scoring worker ended, or took {_LOAD_LIMIT_S:.0f} s, before {', '.join(job.weights)} was loaded",
                remedy=f"see its output; reward.memory_mib = {self._memory_mib} may be too little for its imports",
            ) from error

    async def close(self) -> None:
        self._closed = True
        await self._kill()

    async def _kill(self) -> None:
        """The whole process group: a scorer's children too."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def _start(memory_mib: int) -> Process:
    # In a session of its own: a ^C on the terminal is the parent's to answer. numpy would reserve memory per thread.
    environment = {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "engine.reward.worker", str(memory_mib), str(os.getpid()),
        stdin=PIPE, stdout=PIPE, start_new_session=True, env=os.environ | environment,
    )  # fmt: skip


async def _reply(process: Process, limit_s: float) -> Reply:
    """The next reply. Raises TimeoutError, or EOFError if the process ended first."""
    reading = asyncio.ensure_future(_read(process))
    try:
        done, _ = await asyncio.wait({reading}, timeout=limit_s)
        if not done:
            done, _ = await asyncio.wait({reading}, timeout=_GRACE_S)
        if not done:
            raise TimeoutError
        return await reading
    finally:
        reading.cancel()


async def _read(process: Process) -> Reply:
    assert process.stdout is not None
    header = await process.stdout.readexactly(HEADER_BYTES)
    return _decoder.decode(await process.stdout.readexactly(int.from_bytes(header, "little")))
