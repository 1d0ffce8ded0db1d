"""FakeGenerator: tokens are a pure function, time follows the step formula, requests end as the protocol says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

import numpy as np
import pytest

from engine.clock import now, run, run_virtual
from engine.errors import GenerationError
from engine.generate.fake import FakeGenerator, Length, geometric
from engine.protocols import Generator
from engine.types import Segment, SegmentRequest

T = TypeVar("T")

_conforms: Callable[[], Generator] = FakeGenerator


def request(*prompt: int, seed: int = 0, max_new_tokens: int = 100) -> SegmentRequest:
    return SegmentRequest(
        request_id=f"r{seed}",
        token_ids=np.array(prompt or (5, 6), dtype=np.int32),
        max_new_tokens=max_new_tokens,
        temperature=1.0,
        seed=seed,
    )


def lengths(*by_seed: int) -> Length:
    """The request with seed i stops after by_seed[i] tokens."""
    return lambda request: by_seed[request.seed]


async def timed(awaited: Coroutine[Any, Any, T]) -> tuple[float, T]:
    """The loop's time at which it ended, and its result."""
    result = await awaited
    return now(), result


async def later(at_s: float, awaited: Coroutine[Any, Any, T]) -> T:
    await asyncio.sleep(at_s)
    return await awaited


def generate_one(sent: SegmentRequest, version: int = 0, **settings: Any) -> Segment:
    return run_virtual(FakeGenerator(version=version, **settings).generate(sent))


def assert_same(left: Segment, right: Segment) -> None:
    assert left.token_ids.tolist() == right.token_ids.tolist()
    assert left.logprobs.tolist() == right.logprobs.tolist()
    assert (left.version_spans, left.ended) == (right.version_spans, right.ended)


def test_tokens_are_a_pure_function_of_prompt_seed_and_version() -> None:
    length = lengths(20, 20)
    first = generate_one(request(1, 2, 3), length=length)
    assert_same(first, generate_one(request(1, 2, 3), length=length, step_s=0.5, max_num_seqs=1))
    assert first.version_spans == ((0, 0),)
    for other in (
        generate_one(request(1, 2, 4), length=length),
        generate_one(request(1, 2, 3, seed=1), length=length),
        generate_one(request(1, 2, 3), version=1, length=length),
    ):
        assert other.token_ids.tolist() != first.token_ids.tolist()
        assert other.logprobs.tolist() != first.logprobs.tolist()


def test_tokens_do_not_depend_on_the_batch_or_on_what_follows() -> None:
    async def main() -> list[Segment]:
        fake = FakeGenerator(length=lengths(9, 4, 6), step_s=1.0)
        return await asyncio.gather(*[fake.generate(request(seed=seed)) for seed in range(3)])

    for seed, segment in enumerate(run_virtual(main())):
        assert_same(segment, generate_one(request(seed=seed), length=lengths(9, 4, 6)))
    short = generate_one(request(max_new_tokens=3), length=lengths(9))
    long = generate_one(request(), length=lengths(9))
    assert short.token_ids.tolist() == long.token_ids[:3].tolist()


def test_the_end_token_marks_a_natural_end_and_stands_nowhere_else() -> None:
    stopped = generate_one(request(), length=lengths(500), vocab_size=4, eos_token_id=2)
    assert stopped.ended == "length"
    assert set(stopped.token_ids.tolist()) == {0, 1, 3}
    stopped = generate_one(request(max_new_tokens=500), length=lengths(500), vocab_size=4, eos_token_id=2)
    assert stopped.ended == "stop"
    assert np.flatnonzero(stopped.token_ids == 2).tolist() == [499]


def test_arrays_have_the_dtypes_of_the_schema_and_logprobs_are_log_probabilities() -> None:
    segment = generate_one(request(max_new_tokens=5000), length=lengths(5000))
    assert segment.token_ids.dtype == np.int32
    assert segment.logprobs.dtype == np.float32
    assert np.isfinite(segment.logprobs).all()
    assert (segment.logprobs <= 0).all()
    # Minus a standard exponential: mean -1, standard error 1/sqrt(5000) = 0.014.
    assert segment.logprobs.mean() == pytest.approx(-1.0, abs=0.06)


def test_default_length_is_geometric_and_settled_by_the_request() -> None:
    drawn = [geometric(request(seed=seed)) for seed in range(2000)]
    # Mean 64 and standard deviation 63.5, so a standard error of 1.42.
    assert np.mean(drawn) == pytest.approx(64.0, abs=6.0)
    assert min(drawn) == 1
    sent = request(seed=3, max_new_tokens=10_000)
    assert len(generate_one(sent).token_ids) == geometric(sent)
    assert len(generate_one(sent, length=partial(geometric, mean=400.0)).token_ids) == geometric(sent, mean=400.0)


def test_a_step_takes_what_the_formula_says() -> None:
    async def main() -> list[tuple[float, Segment]]:
        fake = FakeGenerator(length=lengths(1, 3), step_s=1.0, step_s_per_sequence=0.5, prefill_s_per_token=0.25)
        sent = (request(1, 2, 3, 4, seed=0), request(1, 2, seed=1))
        ended = await asyncio.gather(*[timed(fake.generate(one)) for one in sent])
        assert (fake.num_requests, fake.tokens_generated, fake.tokens_prefilled) == (2, 4, 6)
        return ended

    # First step: 1 + 0.5 * 2 + 0.25 * 6 = 3.5; then two steps of 1 + 0.5.
    assert [time_s for time_s, _ in run_virtual(main())] == [3.5, 6.5]


def test_a_late_request_joins_at_the_next_step() -> None:
    async def main() -> list[tuple[float, Segment]]:
        fake = FakeGenerator(length=lengths(3, 2), step_s=2.0)
        late = later(3.0, timed(fake.generate(request(seed=1))))
        return list(await asyncio.gather(timed(fake.generate(request(seed=0))), late))

    # The second comes during the step from 2 to 4, and makes its tokens at 6 and 8.
    assert [time_s for time_s, _ in run_virtual(main())] == [6.0, 8.0]


def test_an_idle_engine_starts_again_at_once() -> None:
    async def main() -> tuple[float, Segment]:
        fake = FakeGenerator(length=lengths(1, 1), step_s=2.0)
        await fake.generate(request(seed=0))
        return await later(5.0, timed(fake.generate(request(seed=1))))

    assert run_virtual(main())[0] == 9.0


def test_waiting_is_first_in_first_out_below_the_limit() -> None:
    async def main() -> list[tuple[float, Segment]]:
        fake = FakeGenerator(length=lengths(2, 4, 1, 1), step_s=1.0, max_num_seqs=2)
        return await asyncio.gather(*[timed(fake.generate(request(seed=seed))) for seed in range(4)])

    assert [time_s for time_s, _ in run_virtual(main())] == [2.0, 4.0, 3.0, 4.0]


def test_interrupt_ends_open_requests_with_what_they_have_and_holds_new_ones() -> None:
    whole = generate_one(request(seed=0), length=lengths(9))

    async def main() -> None:
        fake = FakeGenerator(length=lengths(9, 9, 1), step_s=1.0, max_num_seqs=1)
        running = asyncio.ensure_future(fake.generate(request(seed=0)))
        waiting = asyncio.ensure_future(fake.generate(request(seed=1)))
        await asyncio.sleep(2.5)
        await fake.interrupt()
        assert running.done()
        assert waiting.done()
        assert running.result().token_ids.tolist() == whole.token_ids[:2].tolist()
        assert running.result().version_spans == ((0, 0),)
        assert (len(waiting.result().token_ids), waiting.result().version_spans) == (0, ())
        assert {running.result().ended, waiting.result().ended} == {"interrupted"}

        held = asyncio.ensure_future(timed(fake.generate(request(seed=2))))
        await asyncio.sleep(10.0)
        assert not held.done()
        await fake.resume()
        time_s, segment = await held
        assert (time_s, segment.ended) == (13.5, "stop")

    run_virtual(main())


def test_an_interrupt_right_after_resume_still_holds() -> None:
    async def main() -> None:
        fake = FakeGenerator(length=lengths(1))
        await fake.interrupt()
        held = asyncio.ensure_future(fake.generate(request()))
        await asyncio.sleep(1.0)
        await fake.resume()
        await fake.interrupt()
        await asyncio.sleep(1.0)
        assert not held.done()
        await fake.resume()
        assert (await held).ended == "stop"

    run_virtual(main())


def test_a_version_switch_in_flight_shows_in_spans_and_tokens() -> None:
    async def main() -> Segment:
        fake = FakeGenerator(length=lengths(5), step_s=1.0)
        ended = asyncio.ensure_future(fake.generate(request()))
        await asyncio.sleep(2.5)
        fake.set_version(3)
        assert fake.served_version == 3
        return await ended

    switched = run_virtual(main())
    before = generate_one(request(), version=0, length=lengths(5))
    after = generate_one(request(), version=3, length=lengths(5))
    assert switched.version_spans == ((0, 0), (2, 3))
    assert switched.token_ids.tolist() == [*before.token_ids[:2].tolist(), *after.token_ids[2:].tolist()]
    assert switched.logprobs.tolist() == [*before.logprobs[:2].tolist(), *after.logprobs[2:].tolist()]


def test_a_drain_holds_new_requests_until_the_open_ones_have_ended() -> None:
    async def main() -> None:
        fake = FakeGenerator(length=lengths(3, 5, 1), step_s=1.0, max_num_seqs=1)
        is_open = [asyncio.ensure_future(fake.generate(request(seed=seed))) for seed in range(2)]
        await asyncio.sleep(0.5)
        drained = asyncio.ensure_future(timed(fake.drain()))
        await asyncio.sleep(0.5)
        held = asyncio.ensure_future(timed(fake.generate(request(seed=2))))
        assert (await drained)[0] == 8.0
        assert [one.result().ended for one in is_open] == ["stop", "stop"]
        await asyncio.sleep(2.0)
        await fake.resume()
        assert (await held)[0] == 11.0

    run_virtual(main())


@pytest.mark.parametrize(("clear_cache", "step_s", "prefilled"), [(False, 1.25, 7), (True, 2.75, 13)])
def test_a_pause_holds_requests_in_place_and_a_cleared_cache_is_computed_again(
    clear_cache: bool, step_s: float, prefilled: int
) -> None:
    """Prefill of 4 + 2 tokens makes the first step 2.5 s long, the second ends at 3.5; the pause at 4 loses the third.
    The step after it computes the held request's one token, and all 6 of the open one whose cache was cleared."""

    async def main() -> tuple[float, Segment]:
        fake = FakeGenerator(length=lengths(4, 2, 1), step_s=1.0, prefill_s_per_token=0.25)
        first, second = [
            asyncio.ensure_future(timed(fake.generate(sent))) for sent in (request(1, 2, 3, 4), request(1, 2, seed=1))
        ]
        await asyncio.sleep(4.0)
        assert second.done()
        await fake.pause(clear_cache=clear_cache)
        held = asyncio.ensure_future(timed(fake.generate(request(1, seed=2))))
        await asyncio.sleep(10.0)
        assert fake.tokens_generated == 4
        assert not held.done()
        fake.set_version(1)
        await fake.resume()
        assert (await held)[0] == 14.0 + step_s
        assert fake.tokens_prefilled == prefilled
        return await first

    ended, segment = run_virtual(main())
    assert ended == 14.0 + step_s + 1.0
    assert segment.version_spans == ((0, 0), (2, 1))


def test_cancelled_ids_end_with_what_they_have_and_the_others_go_on() -> None:
    async def main() -> None:
        fake = FakeGenerator(length=lengths(9, 4), step_s=1.0)
        cut, kept = [asyncio.ensure_future(timed(fake.generate(request(seed=seed)))) for seed in range(2)]
        await asyncio.sleep(2.5)
        await fake.cancel({"r0", "unknown"})
        assert cut.done()
        assert (len(cut.result()[1].token_ids), cut.result()[1].ended) == (2, "interrupted")
        assert (await kept)[0] == 4.0

    run_virtual(main())


def test_a_request_that_is_cancelled_while_held_back_ends_without_a_token() -> None:
    async def main() -> None:
        fake = FakeGenerator(length=lengths(9, 4), step_s=1.0)
        await fake.interrupt()
        cut, kept = [asyncio.ensure_future(fake.generate(request(seed=seed))) for seed in range(2)]
        await asyncio.sleep(1.0)
        await fake.cancel(["r0"])
        await fake.resume()
        assert (len((await cut).token_ids), (await cut).ended) == (0, "interrupted")
        assert len((await kept).token_ids) == 4
        assert fake.num_requests == 1

    run_virtual(main())


def test_level_2_drops_the_weights_which_must_be_published_before_resume() -> None:
    async def main() -> None:
        fake = FakeGenerator(length=lengths(3), step_s=1.0, sleep_s=5.0)
        is_open = asyncio.ensure_future(fake.generate(request()))
        await asyncio.sleep(0.5)
        with pytest.raises(GenerationError, match="in flight"):
            await fake.sleep(1)
        for level, slept_s in ((0, 0.0), (1, 5.0), (2, 5.0)):
            await fake.interrupt()
            assert is_open.done()
            begun_s = now()
            await fake.sleep(level)
            assert now() - begun_s == slept_s
            await fake.wake("weights")
            if level == 2:
                with pytest.raises(GenerationError, match="none were published"):
                    await fake.resume()
                fake.set_version(1)
            await fake.wake("kv_cache")
            await fake.resume()
        assert (await fake.generate(request())).version_spans == ((0, 1),)

    run_virtual(main())


def test_a_cancelled_request_leaves_the_batch() -> None:
    async def main() -> tuple[float, Segment]:
        fake = FakeGenerator(length=lengths(3, 9, 9), step_s_per_sequence=1.0, max_num_seqs=2)
        kept, running, waiting = [
            asyncio.ensure_future(timed(fake.generate(request(seed=seed)))) for seed in range(3)
        ]
        await asyncio.sleep(0.5)
        waiting.cancel()
        running.cancel()
        ended = await kept
        assert fake.tokens_generated == 3
        return ended

    # The step under way keeps its 2 seconds for two; the next two take 1 each.
    assert run_virtual(main())[0] == 4.0


def test_a_wave_is_what_single_requests_make_and_wants_an_idle_engine() -> None:
    async def main() -> list[Segment]:
        fake = FakeGenerator(length=lengths(3, 7), step_s=1.0)
        sent = [request(seed=0), request(seed=1)]
        other = asyncio.ensure_future(fake.generate(request(seed=0)))
        await asyncio.sleep(0.5)
        with pytest.raises(GenerationError, match="in flight"):
            await fake.wave(sent)
        await other
        first = await fake.wave(sent)
        for left, right in zip(first, await fake.wave(sent), strict=True):
            assert_same(left, right)
        return first

    for seed, segment in enumerate(run_virtual(main())):
        assert_same(segment, generate_one(request(seed=seed), length=lengths(3, 7)))


def test_close_ends_open_and_later_requests_with_an_error() -> None:
    async def main() -> None:
        fake = FakeGenerator(length=lengths(9), step_s=1.0)
        is_open = asyncio.ensure_future(fake.generate(request()))
        await asyncio.sleep(1.5)
        await fake.close()
        with pytest.raises(GenerationError, match="closed during"):
            await is_open
        with pytest.raises(GenerationError, match="is closed"):
            await fake.generate(request())

    run_virtual(main())


def test_a_request_without_room_is_refused() -> None:
    with pytest.raises(GenerationError, match="'r0' has room for 0 new tokens"):
        generate_one(request(max_new_tokens=0))


def test_a_failing_length_function_fails_its_request() -> None:
    def broken(request: SegmentRequest) -> int:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        generate_one(request(), length=broken)


def test_in_real_time_it_waits_and_at_full_speed_it_still_yields() -> None:
    async def main() -> None:
        begun_s = now()
        await FakeGenerator(length=lengths(5), step_s=0.01).generate(request())
        assert now() - begun_s >= 0.04

        ended = asyncio.ensure_future(FakeGenerator(length=lengths(50)).generate(request()))
        turns = 0
        while not ended.done():
            turns += 1
            await asyncio.sleep(0)
        assert turns >= 50

    run(main())
