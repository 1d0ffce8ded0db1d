"""Rollouts across interruptions, on the fake generator in simulated time and on one that follows a script."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hand_made import lease, task
from msgspec.structs import replace
from transformers import AutoTokenizer

from engine.clock import now, run_virtual
from engine.errors import DataError, GenerationError
from engine.generate.fake import FakeGenerator, geometric
from engine.rollout.chat import Chat
from engine.rollout.drive import Driver, sampling_digest
from engine.types import Group, Lease, Rollout, Sampling, Segment, SegmentRequest

Ended = Literal["stop", "length", "interrupted"]


@pytest.fixture
def chat(tiny_folder: Path) -> Chat:
    return Chat(tiny_folder, max_prompt_tokens=40)


class Recording(FakeGenerator):
    """Keeps every request and its answer."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(eos_token_id=256, **settings)
        self.requests: list[SegmentRequest] = []
        self.segments: list[Segment] = []

    async def generate(self, request: SegmentRequest) -> Segment:
        self.requests.append(request)
        segment = await super().generate(request)
        self.segments.append(segment)
        return segment

    async def wave(self, requests: Sequence[SegmentRequest]) -> list[Segment]:
        self.requests += requests
        self.segments += (segments := await super().wave(requests))
        return segments


class Scripted(Recording):
    """Answers requests one after the other with what it was given, all in one version each."""

    def __init__(self, folder: Path, *script: tuple[str, Ended]) -> None:
        super().__init__()
        tokenizer = AutoTokenizer.from_pretrained(folder)
        self.script = [
            Segment(
                token_ids=np.asarray(tokenizer.encode(text), np.int32),
                logprobs=np.arange(1, len(tokenizer.encode(text)) + 1, dtype=np.float32) * -0.5,
                version_spans=((0, version),) if text else (),
                ended=ended,
            )
            for version, (text, ended) in enumerate(script)
        ]

    async def generate(self, request: SegmentRequest) -> Segment:
        self.requests.append(request)
        return self.script.pop(0)

    async def wave(self, requests: Sequence[SegmentRequest]) -> list[Segment]:
        return [await self.generate(request) for request in requests]


def driver(generator: FakeGenerator, chat: Chat, run_seed: int = 1) -> Driver:
    return Driver(generator, chat, run_seed=run_seed, worker="here", engine_build="fake 1", max_in_flight=256)


def test_no_more_rollouts_are_under_way_than_may_be_oldest_first(chat: Chat) -> None:
    """Two of four at a time, three tokens each; the two keep their places over an interruption."""

    async def main() -> Recording:
        generator = Recording(length=lambda request: request.max_new_tokens - 97, step_s=1.0)
        working = asyncio.ensure_future(Driver(
            generator, chat, run_seed=1, worker="here", engine_build="", max_in_flight=2
        ).group(lease(group_size=4, max_new_tokens=100)))
        await asyncio.sleep(0.5)
        assert [request.request_id for request in generator.requests] == ["0000000/0/0", "0000000/1/0"]
        await generator.interrupt()
        await generator.resume()
        await working
        return generator

    asked = [request.request_id for request in run_virtual(main()).requests]
    assert asked[2:] == ["0000000/0/1", "0000000/1/1", "0000000/2/0", "0000000/3/0"]


def slices(generator: Recording, *at_s: tuple[float, int]) -> Callable[[], Coroutine[Any, Any, None]]:
    """At each of these times: interrupt for ten seconds, and serve that version from then on."""

    async def main() -> None:
        for time_s, version in at_s:
            await asyncio.sleep(time_s - now())
            await generator.interrupt()
            await asyncio.sleep(10.0)
            generator.set_version(version)
            await generator.resume()

    return main


def interrupted_group(
    chat: Chat, made_of: Lease, *at_s: tuple[float, int], length: int = 100, run_seed: int = 1
) -> tuple[Group, Recording]:
    """A token a second, cut at the given times."""

    async def main() -> tuple[Group, Recording]:
        generator = Recording(length=lambda _: length, step_s=1.0)
        cutting = asyncio.ensure_future(slices(generator, *at_s)())
        group = await driver(generator, chat, run_seed).group(made_of)
        cutting.cancel()
        return group, generator

    return run_virtual(main())


def same(left: Rollout, right: Rollout) -> bool:
    return left.token_ids.tolist() == right.token_ids.tolist() and left.logprobs.tolist() == right.logprobs.tolist()


def test_an_uninterrupted_rollout_is_prompt_and_segment(chat: Chat) -> None:
    one = lease(3, group_size=1, max_new_tokens=5)
    group, generator = interrupted_group(chat, one)
    (request,), (segment,) = generator.requests, generator.segments
    prompt = chat.encode(one.task).tolist()
    assert request.token_ids.tolist() == prompt
    assert (request.max_new_tokens, request.temperature, request.stop) == (5, 1.0, ())
    (made,) = group.rollouts
    assert made.token_ids.tolist() == [*prompt, *segment.token_ids.tolist()]
    assert made.trainable.tolist() == [False] * len(prompt) + [True] * 5
    assert made.logprobs.tolist() == [0.0] * len(prompt) + segment.logprobs.tolist()
    assert (segment.logprobs < 0).all()
    assert (made.token_ids.dtype, made.trainable.dtype, made.logprobs.dtype) == (np.int32, np.bool_, np.float32)
    assert made.version_spans == ((len(prompt), 0),)
    assert (made.stop_reason, made.env, made.lease_id, made.index_in_group) == ("length", "sums", "0000003", 0)
    assert (made.worker, made.engine_build, made.seed) == ("here", "fake 1", request.seed)
    assert made.text == chat.decode(segment.token_ids)
    assert (group.lease, group.admitted_version, group.outcome) == (one, 0, "completed")


def test_a_continuation_is_prompt_and_tokens_so_far_with_what_is_left(chat: Chat) -> None:
    """Cut after 2 and, as the slices last ten seconds, after 3 more tokens: 2 + 3 + 4 of 9."""
    one = lease(group_size=1, max_new_tokens=9)
    group, generator = interrupted_group(chat, one, (2.5, 1), (15.6, 2))
    prompt = chat.encode(one.task)
    first, second, third = generator.segments
    assert [len(segment.token_ids) for segment in generator.segments] == [2, 3, 4]
    for request, before in zip(generator.requests, ([], [first], [first, second]), strict=True):
        made = [token for segment in before for token in segment.token_ids.tolist()]
        assert request.token_ids.tolist() == prompt.tolist() + made
        assert request.max_new_tokens == 9 - len(made)
    (rollout,) = group.rollouts
    start = len(prompt)
    assert rollout.token_ids[start:].tolist() == [t for s in (first, second, third) for t in s.token_ids.tolist()]
    assert rollout.logprobs[start:].tolist() == [p for s in (first, second, third) for p in s.logprobs.tolist()]
    assert rollout.version_spans == ((start, 0), (start + 2, 1), (start + 5, 2))
    assert (rollout.length, rollout.stop_reason) == (9, "length")
    assert rollout.timings["segments"] == 3
    assert len({request.request_id for request in generator.requests}) == 3


def test_spans_of_one_version_join(chat: Chat) -> None:
    one = lease(group_size=1, max_new_tokens=9)
    group, generator = interrupted_group(chat, one, (2.5, 0), (15.6, 4))
    start = len(chat.encode(one.task))
    assert len(generator.requests) == 3
    assert group.rollouts[0].version_spans == ((start, 0), (start + 5, 4))


def test_a_version_that_changes_within_a_segment_shifts_too(chat: Chat) -> None:
    async def main() -> Rollout:
        generator = Recording(length=lambda _: 100, step_s=1.0)
        cutting = asyncio.ensure_future(slices(generator, (2.5, 1))())
        asyncio.get_running_loop().call_later(14.6, generator.set_version, 7)  # two tokens into the second segment
        group = await driver(generator, chat).group(lease(group_size=1, max_new_tokens=6))
        await cutting
        return group.rollouts[0]

    start = len(chat.encode(task()))
    assert run_virtual(main()).version_spans == ((start, 0), (start + 2, 1), (start + 4, 7))


def test_a_cut_before_the_first_token_changes_nothing_but_the_version(chat: Chat) -> None:
    one = lease(group_size=1, max_new_tokens=3)
    group, generator = interrupted_group(chat, one, (0.5, 2))
    assert [len(segment.token_ids) for segment in generator.segments] == [0, 3]
    assert generator.requests[0].seed == generator.requests[1].seed
    assert group.rollouts[0].version_spans == ((len(chat.encode(one.task)), 2),)


def test_many_cuts_never_exceed_the_budget(chat: Chat) -> None:
    """A cut every 2.3 seconds between slices, so each member makes two tokens a segment."""
    one = lease(group_size=3, max_new_tokens=11)
    group, generator = interrupted_group(chat, one, *((2.3 + 12.3 * n, n + 1) for n in range(5)))
    assert [rollout.length for rollout in group.rollouts] == [11] * 3
    assert len(generator.requests) == 3 * 6
    assert all(1 <= request.max_new_tokens <= 11 for request in generator.requests)
    assert {rollout.stop_reason for rollout in group.rollouts} == {"length"}


def test_a_cut_just_when_the_budget_is_used_asks_for_nothing_more(chat: Chat, tiny_folder: Path) -> None:
    generator = Scripted(tiny_folder, ("abc", "interrupted"), ("de", "interrupted"))
    group = run_virtual(driver(generator, chat).group(lease(group_size=1, max_new_tokens=5)))
    assert len(generator.requests) == 2
    assert (group.rollouts[0].text, group.rollouts[0].stop_reason) == ("abcde", "length")


def test_a_continuations_seed_is_its_own_and_reproducible(chat: Chat) -> None:
    one = lease(group_size=2, max_new_tokens=9)
    seeds, again, later, elsewhere = (
        [request.seed for request in interrupted_group(chat, one, (at_s, 1), run_seed=seed)[1].requests]
        for at_s, seed in ((2.5, 1), (2.5, 1), (3.5, 1), (2.5, 2))
    )
    assert seeds == again
    assert len(set(seeds)) == 4
    assert later[:2] == seeds[:2]
    assert not set(later[2:]) & set(seeds)  # other tokens so far, another seed
    assert not set(elsewhere) & set(seeds)


def test_the_same_cut_gives_the_same_rollouts(chat: Chat) -> None:
    one = lease(group_size=3, max_new_tokens=30)
    first, again = (interrupted_group(chat, one, (2.5, 1), (15.1, 2))[0] for _ in range(2))
    assert all(same(left, right) for left, right in zip(first.rollouts, again.rollouts, strict=True))


def test_seeds_differ_across_members_tasks_orders_and_runs(chat: Chat) -> None:
    async def seeds(run_seed: int) -> list[int]:
        generator = Recording(length=geometric)
        leases = [lease(order, of=task(index), group_size=4) for order, index in ((0, 0), (0, 1), (1, 0), (2, 1))]
        await driver(generator, chat, run_seed).wave(leases)
        return [request.seed for request in generator.requests]

    first, again, other = (run_virtual(seeds(run_seed)) for run_seed in (1, 1, 2))
    assert first == again
    assert len(set(first + other)) == 2 * 16
    assert all(0 <= seed < 2**62 for seed in first)


@pytest.mark.parametrize("as_wave", [False, True])
def test_the_stop_reason_is_the_engines_word(chat: Chat, tiny_folder: Path, as_wave: bool) -> None:
    """The end token last and cut at the budget: still `length`. Another token last and stopped: still `stop`."""
    generator = Scripted(tiny_folder, ("abcd<|end|>", "length"), ("abcd", "stop"))
    assert generator.script[0].token_ids[-1] == 256
    made_of = lease(group_size=2, max_new_tokens=5)
    driven = driver(generator, chat)

    async def main() -> Group:
        return (await driven.wave([made_of]))[0] if as_wave else await driven.group(made_of)

    assert [rollout.stop_reason for rollout in run_virtual(main()).rollouts] == ["length", "stop"]


def test_a_stop_string_across_the_cut_is_found(chat: Chat, tiny_folder: Path) -> None:
    """The engine saw ` ST` and `OP cd` apart and went on to the budget."""
    generator = Scripted(tiny_folder, ("ab ST", "interrupted"), ("OP cd", "length"))
    one = lease(group_size=1, max_new_tokens=10, stop=("STOP",))
    (rollout,) = run_virtual(driver(generator, chat).group(one)).rollouts
    start = len(chat.encode(one.task))
    assert [request.stop for request in generator.requests] == [("STOP",)] * 2
    assert (rollout.text, rollout.stop_reason, rollout.length) == ("ab STOP", "stop", 7)
    assert len(rollout.token_ids) == len(rollout.trainable) == len(rollout.logprobs) == start + 7
    assert rollout.logprobs[start:].tolist() == [-0.5, -1.0, -1.5, -2.0, -2.5, -0.5, -1.0]
    assert rollout.version_spans == ((start, 0), (start + 5, 1))


def test_a_stop_string_that_ends_at_the_cut_asks_for_nothing_more(chat: Chat, tiny_folder: Path) -> None:
    generator = Scripted(tiny_folder, ("ab ST", "interrupted"), ("OP", "interrupted"))
    one = lease(group_size=1, max_new_tokens=10, stop=("STOP",))
    (rollout,) = run_virtual(driver(generator, chat).group(one)).rollouts
    assert (rollout.text, rollout.stop_reason) == ("ab STOP", "stop")


@pytest.mark.parametrize(("change", "kept"), [(8, False), (7, False), (6, True)])
def test_versions_of_tokens_that_were_cut_off_are_no_spans(
    chat: Chat, tiny_folder: Path, change: int, kept: bool
) -> None:
    """Seven tokens stay; the engine changed from version 0 to 3 at token `change`."""
    generator = Scripted(tiny_folder, ("ab STOP cd", "length"))
    generator.script[0] = replace(generator.script[0], version_spans=((0, 0), (change, 3)))
    one = lease(group_size=1, max_new_tokens=10, stop=("STOP",))
    (rollout,) = run_virtual(driver(generator, chat).group(one)).rollouts
    start = len(chat.encode(one.task))
    assert rollout.version_spans == (((start, 0), (start + change, 3)) if kept else ((start, 0),))


def test_a_wave_sends_no_stop_strings_and_cuts_afterwards(chat: Chat, tiny_folder: Path) -> None:
    generator = Scripted(tiny_folder, ("ab STOP cd", "length"), ("no such", "stop"))
    one = lease(group_size=2, max_new_tokens=10, stop=("STOP",))
    (group,) = run_virtual(driver(generator, chat).wave([one]))
    assert [request.stop for request in generator.requests] == [(), ()]
    assert [rollout.text for rollout in group.rollouts] == ["ab STOP", "no such"]
    assert [rollout.stop_reason for rollout in group.rollouts] == ["stop", "stop"]
    assert [rollout.length for rollout in group.rollouts] == [7, 7]


def test_a_wave_goes_out_in_order_and_comes_back_the_same_again(chat: Chat) -> None:
    async def main(run_seed: int) -> tuple[list[Group], list[str]]:
        generator = Recording(length=geometric)
        leases = [lease(order, of=task(order), group_size=3, max_new_tokens=40) for order in range(4)]
        return await driver(generator, chat, run_seed).wave(leases), [one.request_id for one in generator.requests]

    (first, order), (again, _), (other, _) = (run_virtual(main(run_seed)) for run_seed in (1, 1, 2))
    assert order == [f"{lease:07d}/{member}/0" for lease in range(4) for member in range(3)]
    assert [group.lease.order for group in first] == [0, 1, 2, 3]
    rollouts, repeated, others = (
        [one for group in groups for one in group.rollouts] for groups in (first, again, other)
    )
    assert [one.index_in_group for one in rollouts] == [0, 1, 2] * 4
    assert all(same(left, right) for left, right in zip(rollouts, repeated, strict=True))
    assert not any(same(left, right) for left, right in zip(rollouts, others, strict=True))
    assert len({one.text for one in rollouts}) == 12


def test_a_prompt_that_is_too_long_is_refused_before_anything_is_asked(chat: Chat) -> None:
    generator = Recording()
    long = lease(of=task(content="x" * 60))
    for work in (driver(generator, chat).group(long), driver(generator, chat).wave([lease(), long])):
        with pytest.raises(DataError, match="63 tokens, 40 fit"):
            run_virtual(work)
    assert generator.requests == []


def test_an_engine_error_comes_out(chat: Chat) -> None:
    async def main() -> None:
        generator = Recording(length=lambda _: 9, step_s=1.0)
        asyncio.get_running_loop().call_later(2.5, lambda: asyncio.ensure_future(generator.close()))
        await driver(generator, chat).group(lease())

    with pytest.raises(ExceptionGroup) as caught:
        run_virtual(main())
    assert [type(error) for error in caught.value.exceptions] == [GenerationError] * 2


def test_when_a_member_fails_its_siblings_stop(chat: Chat) -> None:
    class Failing(Recording):
        async def generate(self, request: SegmentRequest) -> Segment:
            if request.request_id.endswith("/1/0"):
                await asyncio.sleep(2.5)
                raise GenerationError("broken")
            return await super().generate(request)

    async def main() -> tuple[Failing, int]:
        generator = Failing(length=lambda _: 9, step_s=1.0)
        with pytest.raises(ExceptionGroup):
            await driver(generator, chat).group(lease(group_size=3))
        made = generator.tokens_generated
        await asyncio.sleep(20.0)
        return generator, made

    generator, made = run_virtual(main())
    assert (made, generator.tokens_generated, generator.segments) == (4, 4, [])


def test_busy_time_is_that_with_a_request_open(chat: Chat) -> None:

    async def main() -> list[float]:
        generator = Recording(length=lambda request: 3 if request.request_id.startswith("0000000") else 5, step_s=1.0)
        driven = driver(generator, chat)
        readings = [driven.busy_s()]
        first = asyncio.ensure_future(driven.group(lease(0, group_size=3)))  # from 0 to 3 s
        await asyncio.sleep(0.5)
        await driven.group(lease(1, group_size=2))  # from .5 to 6 s: it joins at the next token
        await first
        await asyncio.sleep(2.0)
        readings.append(driven.busy_s())
        open_group = asyncio.ensure_future(driven.group(lease(0, group_size=1)))
        await asyncio.sleep(1.25)
        readings.append(driven.busy_s())  # in the middle of a request
        await open_group
        readings.append(driven.busy_s())
        await driven.wave([lease(1, group_size=2)])
        readings.append(driven.busy_s())
        return [*readings, driven.busy_s()]

    assert run_virtual(main()) == [0.0, 6.0, 1.25, 1.75, 5.0, 0.0]


def test_the_sampling_digest_names_the_distribution() -> None:
    base = Sampling(temperature=1.0, max_new_tokens=8)
    others = [
        Sampling(temperature=0.6, max_new_tokens=8),
        Sampling(temperature=1.0, max_new_tokens=9),
        Sampling(temperature=1.0, max_new_tokens=8, stop=("x",)),
    ]
    assert sampling_digest(base) == sampling_digest(Sampling(temperature=1.0, max_new_tokens=8))
    assert len({sampling_digest(one) for one in (base, *others)}) == 4
