"""What a client gets: chunks that join while it does not read, one terminal event, last."""

from __future__ import annotations

import asyncio

import pytest

from router.client_stream import ClientStream
from router.detokenize import Piece
from tandem.errors import Overloaded, WorkerLost
from tandem.stream_checker import StreamChecker
from tandem.v1 import generation_pb2 as pb

SEED = 42


def finish(num_tokens: int) -> pb.Finish:
    usage = pb.Usage(prompt_tokens=1, completion_tokens=num_tokens)
    return pb.Finish(reason=pb.FINISH_REASON_STOP, usage=usage)


async def read(stream: ClientStream) -> StreamChecker:
    checker = StreamChecker()
    async with asyncio.timeout(10):
        async for response in stream.responses():
            checker.accept(response)
    checker.close()
    return checker


async def test_what_waits_joins_into_one_chunk() -> None:
    stream = ClientStream(1, SEED, 100)
    for token in range(5):
        stream.put(0, Piece((token,), str(token)))
    stream.finish(0, finish(6), Piece((5,), "5"))
    responses = [response async for response in stream.responses()]
    assert [r.WhichOneof("event") for r in responses] == ["chunk", "finish"]
    chunk, end = responses[0].chunk, responses[1].finish
    assert (list(chunk.token_ids), chunk.text, chunk.index, chunk.seed) == ([0, 1, 2, 3, 4], "01234", 0, SEED)
    assert (list(end.token_ids), end.text, end.index) == ([5], "5", 5)


async def test_the_seed_is_in_the_first_chunk_only_and_an_answer_held_to_its_end_has_one_too() -> None:
    stream = ClientStream(1, SEED, 100)
    stream.finish(0, finish(2), Piece((1, 2), "ab"))
    checker = await read(stream)
    assert checker.choices[0].seed == SEED
    assert checker.token_ids == [1, 2] and checker.text == "ab"


async def test_responses_wait_for_more_and_lose_nothing() -> None:
    stream = ClientStream(1, SEED, 100)
    reading = asyncio.create_task(read(stream))
    for token in range(20):
        stream.put(0, Piece((token,), "x"))
        await asyncio.sleep(0)
    stream.put(0, Piece((), "only text"))
    await asyncio.sleep(0)
    stream.finish(0, finish(20), Piece())
    checker = await reading
    assert checker.token_ids == list(range(20))
    assert checker.text == "x" * 20 + "only text"


async def test_several_choices_end_one_by_one() -> None:
    stream = ClientStream(2, SEED, 100)
    stream.put(0, Piece((1,), ""))
    stream.put(1, Piece((2,), ""))
    stream.finish(1, finish(1), Piece())
    assert not stream.over
    stream.finish(0, finish(1), Piece())
    assert stream.over
    checker = StreamChecker(num_choices=2)
    async for response in stream.responses():
        checker.accept(response)
    checker.close()


async def test_an_error_comes_after_what_was_delivered_and_nothing_after_it() -> None:
    stream = ClientStream(1, SEED, 100)
    stream.put(0, Piece((1,), "a"))
    stream.fail(WorkerLost("decode-0", "gone"))
    stream.fail(WorkerLost("decode-1", "gone too"))
    stream.put(0, Piece((2,), "b"))
    stream.finish(0, finish(2), Piece())
    seen = []
    with pytest.raises(WorkerLost, match="decode-0"):
        async for response in stream.responses():
            seen.append(list(response.chunk.token_ids))
    assert seen == [[1]]


async def test_an_error_after_the_end_is_no_news() -> None:
    stream = ClientStream(1, SEED, 100)
    stream.finish(0, finish(1), Piece((1,), ""))
    stream.fail(WorkerLost("decode-0", "gone"))
    assert stream.error is None
    await read(stream)


async def test_too_much_undelivered_is_an_overload_and_the_writer_hears_of_it() -> None:
    stalled = []
    stream = ClientStream(1, SEED, max_undelivered=3)
    stream.on_stalled = lambda: stalled.append(True)
    stream.put(0, Piece((1, 2, 3), ""))
    with pytest.raises(Overloaded, match="4 tokens wait for it, the limit is 3") as overload:
        stream.put(0, Piece((4,), ""))
    stream.fail(overload.value)
    assert stalled


async def test_one_large_piece_for_a_client_that_reads_is_no_overload() -> None:
    stream = ClientStream(1, SEED, max_undelivered=3)
    stream.put(0, Piece(tuple(range(10)), ""))
    stream.finish(0, finish(10), Piece())
    assert (await read(stream)).token_ids == list(range(10))
