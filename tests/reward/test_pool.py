from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvloop

from engine.config import RewardSection, TaskSection
from engine.errors import ConfigError, ScoringError
from engine.protocols import Score
from engine.reward.pool import ScoringPool, truncated
from engine.types import Message, Rollout, StopReason, Task

# Enough for the worker's own imports; little enough to be filled in no time.
MEMORY_MIB = 256
MAX_NEW_TOKENS = 4


@pytest.fixture(autouse=True)
def _rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def task(label: str = "t", answer: Any = "12") -> Task:
    return Task(
        task_id=f"{label}/0", env=label, index=0, messages=(Message("user", "?"),), answer={"answer": answer}, seed=0
    )


def rollout(text: str, stop_reason: StopReason = "stop", num_tokens: int = 1) -> Rollout:
    """One prompt token, then `num_tokens` sampled ones."""
    return Rollout(
        token_ids=np.zeros(num_tokens + 1, np.int32),
        trainable=np.arange(num_tokens + 1) > 0,
        logprobs=np.zeros(num_tokens + 1, np.float32),
        version_spans=((0, 0),),
        stop_reason=stop_reason,
        env="t",
        lease_id="l",
        index_in_group=0,
        seed=0,
        text=text,
    )


@asynccontextmanager
async def pool_of(scorer: str, **reward: Any) -> AsyncIterator[Callable[[str], Coroutine[None, None, Score]]]:
    """A pool of one worker and one entry: completion -> score."""
    section = TaskSection(env="jsonl", name="t", params={"score": scorer})
    settings = {"timeout_s": 5.0, "memory_mib": MEMORY_MIB} | reward
    pool = ScoringPool([section], RewardSection(**settings), MAX_NEW_TOKENS)
    try:
        yield lambda text: pool.score(task(), rollout(text))
    finally:
        await pool.close()


def scores(scorer: str, *completions: str, **reward: Any) -> list[Score]:
    """Score one completion after the other."""

    async def main() -> list[Score]:
        async with pool_of(f"reward_functions:{scorer}", **reward) as score:
            return [await score(text) for text in completions]

    return asyncio.run(main())


def alive(pid: int) -> bool:
    """Running, not merely unreaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def written(file: Path) -> bool:
    return file.exists() and file.read_text().endswith("\n")


def wait_for(condition: Callable[[], bool], limit_s: float = 10.0) -> bool:
    end = time.monotonic() + limit_s
    while not (met := condition()) and time.monotonic() < end:
        time.sleep(0.01)
    return met


@pytest.mark.parametrize("loop_factory", [None, uvloop.new_event_loop])
def test_entries_are_scored_as_they_say(loop_factory: Callable[[], asyncio.AbstractEventLoop] | None) -> None:
    sections = [
        TaskSection(env="jsonl", name="number"),
        TaskSection(env="jsonl", name="tagged", answer="tag"),
        TaskSection(env="jsonl", name="dense", params={"score": "letters"}),
    ]

    async def main() -> list[Score]:
        pool = ScoringPool(sections, RewardSection(workers=2), MAX_NEW_TOKENS)
        text = rollout("It is 12. <answer>13</answer>")
        try:
            return await asyncio.gather(*(pool.score(task(label), text) for label in ("number", "tagged", "dense")))
        finally:
            await pool.close()

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        number, tagged, dense = runner.run(main())
    assert number == Score(0.0, "13", {"exact": 0.0})
    assert tagged == Score(0.0, "13", {"exact": 0.0})
    # "1" and "2" of the answer are 3 of the 29 characters.
    assert dense == Score(pytest.approx(3 / 29), "13", {"letters": pytest.approx(3 / 29)})


def test_reasoning_gym_is_scored_by_its_own_rule() -> None:
    entry = {"question": "", "answer": "2 \u00d7 3", "metadata": {}}
    answer = {"answer": "2 \u00d7 3", "family": "prime_factorization", "params": {}, "entry": entry}
    section = TaskSection(env="reasoning_gym", name="t", params={"family": "prime_factorization"}, answer="exact")
    primes = Task(task_id="t/0", env="t", index=0, messages=(Message("user", "?"),), answer=answer, seed=0)

    async def main() -> list[Score]:
        # The package takes longer to import than the scorer may take: that is not on the scorer's time.
        pool = ScoringPool([section], RewardSection(timeout_s=0.4), MAX_NEW_TOKENS)
        try:
            return [await pool.score(primes, rollout(text)) for text in ("2 \u00d7 3", "3 \u00d7 2", "6", "zzz")]
        finally:
            await pool.close()

    assert [score.reward for score in asyncio.run(main())] == [1.0, 1.0, 0.0, 0.0]


def test_a_worker_imports_nothing_heavy() -> None:
    assert [score.reward for score in scores("has_heavy_imports", "")] == [0.0]


def test_the_time_limit_runs_from_the_scorers_start_not_while_queued() -> None:
    async def main() -> list[Score]:
        async with pool_of("reward_functions:sleeps", timeout_s=0.6) as score:
            return await asyncio.gather(*(score("0.25") for _ in range(4)))

    assert [score.reward for score in asyncio.run(main())] == [1.0] * 4


def test_a_loop_that_was_held_up_kills_nobody() -> None:
    async def main() -> Score:
        async with pool_of("reward_functions:sleeps", timeout_s=0.4) as score:
            await score("0")
            scoring = asyncio.create_task(score("0.1"))
            await asyncio.sleep(0.05)
            time.sleep(0.8)  # noqa: ASYNC251 - the reply and the end of its time are both there afterwards
            return await scoring

    assert asyncio.run(main()).reward == 1.0


def test_a_worker_that_died_while_idle_is_replaced() -> None:
    async def main() -> tuple[Score, Score]:
        async with pool_of("reward_functions:own_pid") as score:
            first = await score("")
            assert first.reward is not None
            os.kill(int(first.reward), signal.SIGKILL)
            await asyncio.sleep(0.2)
            return first, await score("")

    first, second = asyncio.run(main())
    assert second.reward not in (None, first.reward)


def test_a_scorer_that_raises_is_a_bug_with_its_traceback() -> None:
    async def main() -> Score:
        async with pool_of("reward_functions:raises") as score:
            with pytest.raises(ScoringError) as caught:
                await score("")
            assert "the scorer of task t/0 raised" in str(caught.value)
            assert "reward_functions.py" in str(caught.value)
            assert "KeyError: 'no such key in my table'" in str(caught.value)
            return await score("fine")

    assert asyncio.run(main()).reward == 1.0


def test_a_worker_that_cannot_start_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ScoringError, match=r"reward\.memory_mib = 256 may be too little"):
        scores("own_pid", "")


def test_a_scorer_may_use_its_streams_and_its_children_end_with_it() -> None:
    assert [score.reward for score in scores("chatters", "", "")] == [1.0, 1.0]
    assert wait_for(lambda: not children_named("sleep"))


def children_named(name: str) -> list[str]:
    """Commands of processes whose environment says that this test started them."""
    found: list[str] = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().split(b"\0")
            environment = (folder / "environ").read_bytes()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        if command[0] == name.encode() and os.environ["PYTEST_CURRENT_TEST"].encode() in environment:
            found.append(name)
    return found


TIMED_OUT = Score(None, timed_out=True)
DIED = Score(None, parts={"worker_died": 1.0})


@pytest.mark.parametrize(
    ("scorer", "completion", "expected", "harmless"),
    [
        ("reward_functions:sleeps", "2", Score(1.0, "2", {"reward_functions:sleeps": 1.0}), "0"),
        ("reward_functions:sleeps", "60", TIMED_OUT, "0"),
        ("reward_functions:spins", "", TIMED_OUT, "fine"),
        ("reward_functions:towers", "four", TIMED_OUT, ""),
        ("reward_functions:segfaults", "", DIED, "fine"),
        ("reward_functions:leaves", "", DIED, "fine"),
        ("reward_functions:eats_memory", "slowly", DIED, "fine"),
        ("reward_functions:eats_2_gib", "", DIED, "fine"),
        ("math", "5^{5^{5^{5^5}}}", TIMED_OUT, r"\sqrt{12}"),
    ],
)
def test_whatever_a_scorer_does_the_loop_goes_on_and_so_does_scoring(
    scorer: str, completion: str, expected: Score, harmless: str
) -> None:
    async def main() -> tuple[int, Score, Score]:
        section = TaskSection(env="jsonl", name="t", params={"score": scorer}, answer="exact")
        reward = RewardSection(timeout_s=2.0 if expected is TIMED_OUT else 20.0, memory_mib=MEMORY_MIB)
        pool = ScoringPool([section], reward, MAX_NEW_TOKENS)
        root = task(answer=r"2\sqrt{3}")
        try:
            scoring = asyncio.create_task(pool.score(root, rollout(completion)))
            beats = 0
            while not scoring.done():
                await asyncio.sleep(0.001)
                beats += 1
            return beats, await scoring, await pool.score(root, rollout(harmless))
        finally:
            await pool.close()

    beats, score, after = asyncio.run(main())
    # A loop that waits for the scorer makes one.
    assert beats > 10
    assert score == expected
    assert after.reward == 1.0


def test_parts_are_weighted() -> None:
    weights = {"exact": 1.0, "length": 0.5, "overlong": 2, "reward_functions:length_share": -0.1}

    async def main() -> Score:
        section = TaskSection(env="jsonl", name="t", params={"score": weights})
        pool = ScoringPool([section], RewardSection(), MAX_NEW_TOKENS)
        try:
            return await pool.score(task(), rollout("is 12", num_tokens=3))
        finally:
            await pool.close()

    # 3 of 4 tokens are below 80 % of the limit; 5 characters against the 2 of "12".
    parts = {"exact": 1.0, "length": -0.75, "overlong": 0.0, "reward_functions:length_share": 2.5}
    assert asyncio.run(main()) == Score(pytest.approx(1 - 0.375 - 0.25), "12", parts)


def test_workers_score_at_once() -> None:
    async def main() -> float:
        async with pool_of("reward_functions:sleeps", workers=4) as score:
            await asyncio.gather(*(score("0.1") for _ in range(4)))
            start = time.monotonic()
            await asyncio.gather(*(score("0.5") for _ in range(4)))
            return time.monotonic() - start

    assert 0.5 <= asyncio.run(main()) < 1.5


def test_workers_start_only_when_needed() -> None:
    async def main() -> set[float | None]:
        async with pool_of("reward_functions:own_pid", workers=8) as score:
            return {(await score("")).reward for _ in range(5)}

    assert len(asyncio.run(main())) == 1


def test_close_leaves_no_process_even_in_the_middle(tmp_path: Path) -> None:
    async def main() -> None:
        async with pool_of("reward_functions:pid_then_hangs") as score:
            scoring = asyncio.create_task(score(str(tmp_path / "pid")))
            await asyncio.to_thread(wait_for, lambda: written(tmp_path / "pid"))
        assert await scoring == Score(None, parts={"worker_died": 1.0})
        with pytest.raises(ScoringError, match="the scoring pool is closed"):
            await score("")

    asyncio.run(main())
    pid, group, session = map(int, (tmp_path / "pid").read_text().split())
    assert not alive(pid)
    # Away from the terminal's group, which gets ^C.
    assert pid == group == session != os.getsid(0)


def test_a_cancelled_score_takes_its_worker_along(tmp_path: Path) -> None:
    async def main() -> int:
        async with pool_of("reward_functions:pid_then_hangs") as score:
            scoring = asyncio.create_task(score(str(tmp_path / "pid")))
            await asyncio.to_thread(wait_for, lambda: written(tmp_path / "pid"))
            scoring.cancel()
            with pytest.raises(asyncio.CancelledError):
                await scoring
            pid = int((tmp_path / "pid").read_text().split()[0])
            assert not alive(pid)
            return pid

    asyncio.run(main())


@pytest.mark.parametrize("scorer", ["own_pid", "pid_then_hangs"])
def test_workers_die_with_a_killed_parent(scorer: str, tmp_path: Path) -> None:
    """An idle worker sees the end of its input; a hung one gets the parent-death signal."""
    program = tmp_path / "run.py"
    program.write_text(f"""
import asyncio, sys, time
sys.path[:0] = [{str(Path(__file__).parent)!r}]
from test_pool import pool_of
async def main():
    async with pool_of("reward_functions:{scorer}", timeout_s=60) as score:
        print(int((await score({str(tmp_path / "pid")!r})).reward), flush=True)
        time.sleep(60)
asyncio.run(main())
""")
    parent = subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    if scorer == "own_pid":
        pid = int(parent.stdout.readline())
    else:
        assert wait_for(lambda: written(tmp_path / "pid"))
        pid = int((tmp_path / "pid").read_text().split()[0])
    assert alive(pid)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert wait_for(lambda: not alive(pid))


def test_an_unknown_scorer_is_refused_at_once() -> None:
    section = TaskSection(env="jsonl", name="t", params={"score": "exakt"})
    with pytest.raises(ConfigError, match=r"tasks\.0\.params\.score = 'exakt'.*\n.*did you mean exact"):
        ScoringPool([section], RewardSection(), MAX_NEW_TOKENS)


@pytest.mark.parametrize(
    ("policy", "stop_reason", "reward"),
    [
        ("keep", "length", 0.7),
        ("zero", "length", 0.0),
        ("mask", "length", None),
        ("zero", "stop", 0.7),
        ("mask", "stop", 0.7),
        ("mask", "env", 0.7),
    ],
)
def test_truncation(policy: str, stop_reason: StopReason, reward: float | None) -> None:
    assert truncated(Score(0.7, "7", {"exact": 0.7}), stop_reason, policy) == Score(reward, "7", {"exact": 0.7})
    unjudged = Score(None, "7", {"unjudged": 1.0})
    assert truncated(unjudged, stop_reason, policy) == unjudged


@pytest.mark.parametrize(("policy", "reward"), [("keep", 1.0), ("zero", 0.0), ("mask", None)])
def test_the_pool_applies_the_truncation_policy(policy: str, reward: float | None) -> None:
    async def main() -> Score:
        reward = RewardSection(truncated=policy)  # type: ignore[arg-type]
        pool = ScoringPool([TaskSection(env="jsonl", name="t")], reward, MAX_NEW_TOKENS)
        try:
            return await pool.score(task(), rollout("12", "length"))
        finally:
            await pool.close()

    assert asyncio.run(main()) == Score(reward, "12", {"exact": 1.0})
