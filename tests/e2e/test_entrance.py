"""The front door over real gRPC: health, reflection, statuses with their details, text in and out."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status

from tandem.client import Finish, TandemClient
from tandem.errors import DuplicateRequest, InvalidRequest, UnknownModel
from tandem.types import FinishReason
from tests.support.byte_tokenizer import ByteTokenizer
from tests.support.fake_cluster import cluster, prompt_of
from tests.support.fake_model import fake_files, fake_runner_factory
from tests.support.inprocess import InProcessCluster, test_config

SERVICE = "tandem.v1.GenerationService"


class BytesOnly(ByteTokenizer):
    """Without BOS, which the fake model has no room for."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return super().encode(text, add_special_tokens=False)


async def test_health_and_reflection_are_on(tmp_path: Path) -> None:
    async with cluster(tmp_path) as split, grpc.aio.insecure_channel(split.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", SERVICE):
            answer = await health.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        call = reflection.ServerReflectionInfo(iter([request]), timeout=10)
        services = {s.name async for r in call for s in r.list_services_response.service}
        assert {SERVICE, "grpc.health.v1.Health"} <= services


async def test_what_is_not_built_is_refused_as_unimplemented_with_the_field(tmp_path: Path) -> None:
    async with cluster(tmp_path) as split:
        request = split.request([1, 2, 3], max_tokens=4, n=2)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            async for _ in split.call(request):
                raise AssertionError("an answer to a request that is not understood")
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
        status = rpc_status.from_call(refused.value)
        bad_request = error_details_pb2.BadRequest()
        assert status is not None and status.details[0].Unpack(bad_request)
        assert bad_request.field_violations[0].field == "sampling.n"


async def test_the_client_gets_typed_errors_with_fields(tmp_path: Path) -> None:
    async with cluster(tmp_path, step_s=0.02) as split, TandemClient(split.address) as client:
        with pytest.raises(UnknownModel) as unknown:
            await anext(client.generate(token_ids=[1], model="../other"))
        assert unknown.value.field == "model"
        with pytest.raises(InvalidRequest) as refused:
            await anext(client.generate(token_ids=[1], temperature=-1.0))
        assert refused.value.field == "sampling.temperature"
        with pytest.raises(InvalidRequest) as refused:
            await anext(client.generate("text", max_tokens=2))
        assert refused.value.field == "text" and "send token_ids" in str(refused.value)
        async with aclosing(
            client.generate(token_ids=prompt_of(9), max_tokens=200, ignore_eos=True, request_id="twin")
        ) as first:
            await anext(first)
            with pytest.raises(DuplicateRequest):
                await anext(client.generate(token_ids=[1], request_id="twin"))
        (model,) = await client.models()
        assert not model.has_tokenizer


async def test_the_first_chunk_names_the_seed_that_repeats_the_answer(tmp_path: Path) -> None:
    async with cluster(tmp_path) as split, TandemClient(split.address) as client:
        events = [e async for e in client.generate(token_ids=prompt_of(9), max_tokens=12, ignore_eos=True)]
        seeds = [getattr(event, "seed", None) for event in events]
        assert seeds[0] is not None and set(seeds[1:]) <= {None}
        again = [
            e async for e in client.generate(token_ids=prompt_of(9), max_tokens=12, ignore_eos=True, seed=seeds[0])
        ]
        assert [i for e in again for i in e.token_ids] == [i for e in events for i in e.token_ids]


async def test_text_goes_in_and_out_and_a_stop_string_ends_it(tmp_path: Path) -> None:
    with_text = InProcessCluster(
        test_config(), fake_files(tmp_path), runner_factory=fake_runner_factory(), tokenizer=BytesOnly()
    )
    async with with_text, TandemClient(with_text.address) as client:
        ids = await client.tokenize("Grüße")
        assert await client.detokenize(ids) == "Grüße"
        whole = [e async for e in client.generate("Grüße", max_tokens=40, temperature=0.0, ignore_eos=True)]
        text = "".join(e.text for e in whole)
        assert text == await client.detokenize([i for e in whole for i in e.token_ids])
        pairs = [text[i : i + 2] for i in range(4, len(text) - 2)]
        stop = next(pair for pair in pairs if "\ufffd" not in pair)
        at = text.index(stop)
        cut = [e async for e in client.generate("Grüße", max_tokens=40, temperature=0.0, ignore_eos=True, stop=[stop])]
        assert "".join(e.text for e in cut) == text[:at]
        finish = cut[-1]
        assert isinstance(finish, Finish)
        assert (finish.reason, finish.stop_string) == (FinishReason.STOP, stop)
        assert finish.usage.completion_tokens == sum(len(e.token_ids) for e in cut)


async def test_more_live_requests_than_allowed_are_told_when_to_come_back(tmp_path: Path) -> None:
    async with cluster(tmp_path, step_s=0.02, router__max_streams=1) as split:
        first = split.call(split.request(prompt_of(9), max_tokens=200, ignore_eos=True))
        assert (await first.read()).WhichOneof("event") == "chunk"
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await split.generate(prompt_of(9), max_tokens=2)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert dict(refused.value.trailing_metadata())["grpc-retry-pushback-ms"] == "1000"
        first.cancel()
        async with asyncio.timeout(20):
            while True:
                try:
                    await split.generate(prompt_of(9), max_tokens=2, ignore_eos=True)
                    break
                except grpc.aio.AioRpcError as exc:
                    assert exc.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                    await asyncio.sleep(0.05)


@pytest.mark.parametrize("method", ["Generate", "Tokenize", "Detokenize"])
@pytest.mark.parametrize("data", [b"\xff" * 40, b"\x0a\x7f", b"\x0a\x02\xff\xfe"], ids=["tag", "truncated", "utf-8"])
async def test_bytes_that_are_no_message_are_bad_input(tmp_path: Path, method: str, data: bytes) -> None:
    async with cluster(tmp_path) as split, grpc.aio.insecure_channel(split.address) as channel:
        path = f"/{SERVICE}/{method}"
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            if method == "Generate":
                await channel.unary_stream(path)(data, timeout=10).read()
            else:
                await channel.unary_unary(path)(data, timeout=10)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "malformed" in (refused.value.details() or "")
        await split.generate([1, 2, 3], max_tokens=2, ignore_eos=True)
