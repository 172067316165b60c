"""Every row of the table of bad input that concerns Generate, and every field that is not built."""

from __future__ import annotations

import math
from typing import Any

import pytest

from router.validate import Limits, check_request, resolve
from tandem.config import RouterConfig
from tandem.errors import InvalidRequest, Unimplemented, UnknownModel
from tandem.model_info import ModelInfo
from tandem.v1 import generation_pb2 as pb

VOCAB, CONTEXT, EOS = 100, 64, 2
INFO = ModelInfo("m", "LlamaForCausalLM", CONTEXT, VOCAB, (EOS,), None, "float32")
LIMITS = Limits(INFO, RouterConfig(), has_tokenizer=True, has_chat_template=True)
BARE = Limits(INFO, RouterConfig(), has_tokenizer=False, has_chat_template=False)
IDS = pb.TokenIds(ids=[5, 6])


def ask(*, limits: Limits = LIMITS, sampling: dict[str, Any] | None = None, **fields: Any) -> Any:
    if not {"text", "token_ids", "chat", "nothing"} & fields.keys():
        fields["token_ids"] = IDS
    fields.pop("nothing", None)
    return check_request(pb.GenerateRequest(sampling=pb.SamplingParams(**(sampling or {})), **fields), limits)


def fit(num_prompt_tokens: int, max_tokens: int | None = None, pool: int | None = None) -> Any:
    checked = ask(sampling={"max_tokens": max_tokens})
    return resolve(checked, [5] * num_prompt_tokens, LIMITS, pool, arrival=0, arrived_at=0.0, deadline=1.0)


NOT_BUILT = {
    "logprobs": {"logprobs": 1},
    "prompt_logprobs": {"prompt_logprobs": 1},
    "resume": {"resume": pb.Resume(token_ids=[7], next_index=1)},
    "priority": {"priority": -1},
    "cache_salt": {"cache_salt": "tenant"},
    "grammar": {"grammar": pb.Grammar(regex="a+")},
    "sampling.n": {"sampling": {"n": 2}},
    "sampling.min_tokens": {"sampling": {"min_tokens": 1}},
    "sampling.frequency_penalty": {"sampling": {"frequency_penalty": 0.5}},
    "sampling.presence_penalty": {"sampling": {"presence_penalty": -0.5}},
    "sampling.repetition_penalty": {"sampling": {"repetition_penalty": 1.1}},
    "sampling.logit_bias": {"sampling": {"logit_bias": {3: 1.0}}},
}
BUILT = {"request_id", "model", "text", "token_ids", "chat", "sampling"} | {
    f"sampling.{name}"
    for name in (
        *("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos"),
    )
}


@pytest.mark.parametrize("field", NOT_BUILT)
def test_a_field_that_is_not_built_is_refused_and_named(field: str) -> None:
    with pytest.raises(Unimplemented) as refused:
        ask(**NOT_BUILT[field])
    assert refused.value.field == field


def test_every_field_of_the_request_is_either_built_or_refused() -> None:
    fields = {f.name for f in pb.GenerateRequest.DESCRIPTOR.fields}
    fields |= {f"sampling.{f.name}" for f in pb.SamplingParams.DESCRIPTOR.fields}
    assert fields == BUILT | NOT_BUILT.keys()


@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": 0},
        {"prompt_logprobs": 0},
        {"priority": 0},
        {"sampling": {"n": 1, "min_tokens": 0}},
        {"sampling": {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0}},
    ],
    ids=str,
)
def test_a_value_that_changes_nothing_passes(fields: dict[str, Any]) -> None:
    assert ask(**fields).prompt == (5, 6)


BAD: list[tuple[str, dict[str, Any]]] = [
    ("input", {"nothing": True}),
    ("text", {"text": ""}),
    ("text", {"text": "x", "limits": BARE}),
    ("chat", {"chat": pb.Chat(messages=[pb.ChatMessage(role="user", content="x")]), "limits": BARE}),
    ("chat.messages", {"chat": pb.Chat()}),
    ("chat.messages[0].role", {"chat": pb.Chat(messages=[pb.ChatMessage(role="robot", content="x")])}),
    ("token_ids", {"token_ids": pb.TokenIds()}),
    ("token_ids", {"token_ids": pb.TokenIds(ids=[VOCAB])}),
    ("request_id", {"request_id": "a\nb"}),
    ("request_id", {"request_id": "x" * 129}),
    ("logprobs", {"logprobs": 21}),
    ("prompt_logprobs", {"prompt_logprobs": 21}),
    ("resume.next_index", {"resume": pb.Resume(token_ids=[7], next_index=2)}),
    ("sampling.max_tokens", {"sampling": {"max_tokens": 0}}),
    ("sampling.max_tokens", {"sampling": {"max_tokens": 1_000_001}}),
    ("sampling.min_tokens", {"sampling": {"max_tokens": 3, "min_tokens": 4}}),
    ("sampling.min_tokens", {"sampling": {"min_tokens": RouterConfig().max_tokens_cap + 1}}),
    *[("sampling.temperature", {"sampling": {"temperature": t}}) for t in (-0.1, math.nan, math.inf)],
    *[("sampling.top_p", {"sampling": {"top_p": p}}) for p in (0.0, 1.1, math.nan)],
    ("sampling.top_k", {"sampling": {"top_k": -2}}),
    *[("sampling.min_p", {"sampling": {"min_p": p}}) for p in (-0.1, 1.1, math.nan)],
    *[("sampling.frequency_penalty", {"sampling": {"frequency_penalty": p}}) for p in (-2.1, 2.1, math.nan)],
    *[("sampling.presence_penalty", {"sampling": {"presence_penalty": p}}) for p in (-2.1, 2.1, math.nan)],
    *[("sampling.repetition_penalty", {"sampling": {"repetition_penalty": p}}) for p in (0.0, 11.0, math.nan)],
    *[("sampling.n", {"sampling": {"n": n}}) for n in (0, 129)],
    ("sampling.stop", {"sampling": {"stop": ["x"] * 17}}),
    ("sampling.stop", {"sampling": {"stop": ["x"]}, "limits": BARE}),
    ("sampling.stop[1]", {"sampling": {"stop": ["x", ""]}}),
    ("sampling.stop[0]", {"sampling": {"stop": ["x" * 257]}}),
    ("sampling.stop_token_ids", {"sampling": {"stop_token_ids": [VOCAB]}}),
    ("sampling.stop_token_ids", {"sampling": {"stop_token_ids": [1] * 65}}),
    ("sampling.logit_bias", {"sampling": {"logit_bias": {VOCAB: 1.0}}}),
    ("sampling.logit_bias", {"sampling": {"logit_bias": dict.fromkeys(range(301), 1.0)}}),
    ("sampling.logit_bias", {"sampling": {"logit_bias": {3: math.nan}}}),
    ("sampling.logit_bias", {"sampling": {"logit_bias": {3: -math.inf}}}),
]


@pytest.mark.parametrize(("field", "fields"), BAD)
def test_bad_input_is_refused_with_the_fields_name(field: str, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        ask(**fields)
    assert refused.value.field == field


@pytest.mark.parametrize("model", ["other", "../m"])
def test_another_model_is_not_found(model: str) -> None:
    with pytest.raises(UnknownModel, match="not served here"):
        ask(model=model)
    assert ask(model="m").prompt == (5, 6)


def test_an_unseeded_request_gets_a_seed_and_a_seeded_one_keeps_its_own() -> None:
    assert ask().seed != ask().seed
    assert ask(sampling={"seed": 0}).seed == 0


def test_eos_ends_an_answer_unless_it_is_ignored() -> None:
    assert ask(sampling={"stop_token_ids": [9]}).stop_token_ids == (EOS, 9)
    assert ask(sampling={"stop_token_ids": [9], "ignore_eos": True}).stop_token_ids == (9,)


def test_without_a_limit_an_answer_may_fill_what_is_left() -> None:
    assert fit(10).sampling.max_tokens == CONTEXT - 10
    assert fit(10, pool=32).sampling.max_tokens == 22


@pytest.mark.parametrize(
    ("size", "numbers"),
    [
        ({"num_prompt_tokens": CONTEXT}, ("64 tokens", "context 64")),
        ({"num_prompt_tokens": 60, "max_tokens": 5}, ("60", "5", "65", "context of 64")),
        ({"num_prompt_tokens": 32, "pool": 32}, ("32 tokens", "holds 32")),
        ({"num_prompt_tokens": 30, "max_tokens": 3, "pool": 32}, ("30", "3", "33", "holds 32")),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_with_the_numbers(size: dict[str, int], numbers: tuple[str, ...]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        fit(**size)
    for number in numbers:
        assert number in str(refused.value)
