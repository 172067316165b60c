"""② The one validator: a GenerateRequest as it came to what the inside works on. Every entrance goes through here.

`check_request` needs no tokenizer; `resolve` comes after tokenization, when the prompt's length is known. Both raise
before any chunk, with the field, the value and the limit; a field that this build does not implement is refused, never
ignored. Neighbours: service (calls both), PROMISES section 4 (the table).
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from router.request import ResolvedRequest
from tandem.config import RouterConfig
from tandem.errors import InvalidRequest, Unimplemented, UnknownModel
from tandem.model_info import ModelInfo
from tandem.types import Sampling
from tandem.v1 import generation_pb2 as pb

MAX_REQUEST_ID_CHARS = 128
MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 300
CHAT_ROLES = ("system", "user", "assistant")

Message = dict[str, str]
Prompt = str | list[Message] | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Limits:
    """What requests are checked against."""

    model: ModelInfo
    router: RouterConfig
    has_tokenizer: bool
    has_chat_template: bool


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """A request that is well formed; `max_tokens` None: what fits."""

    request_id: str
    prompt: Prompt
    max_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]


def check_request(request: pb.GenerateRequest, limits: Limits) -> CheckedRequest:
    """Check everything that does not depend on the prompt's length; draw a request_id and a seed where there is none.

    Raises InvalidRequest, UnknownModel, Unimplemented.
    """
    check_model(request.model, limits)
    request_id = _request_id(request.request_id)
    sampling = request.sampling
    prompt = check_prompt(request, limits)
    checked = CheckedRequest(
        request_id=request_id,
        prompt=prompt,
        max_tokens=_max_tokens(sampling, limits),
        temperature=_temperature(sampling),
        top_p=_top_p(sampling),
        top_k=_top_k(sampling),
        min_p=_min_p(sampling),
        seed=sampling.seed if sampling.HasField("seed") else secrets.randbits(63),
        stop=_stop(sampling, limits),
        stop_token_ids=_stop_token_ids(sampling, limits),
    )
    _refuse_unbuilt_sampling(sampling, limits)
    _refuse_unbuilt(request)
    return checked


def resolve(
    checked: CheckedRequest,
    prompt_token_ids: Sequence[int],
    limits: Limits,
    max_request_tokens: int | None,
    arrival: int,
    arrived_at: float,
    deadline: float,
) -> ResolvedRequest:
    """Check the prompt's length and fill in what depends on it.

    max_request_tokens: what the largest decode worker can hold, prompt and answer together; None: not known yet.
    Raises InvalidRequest.
    """
    num_prompt = len(prompt_token_ids)
    context = limits.model.max_model_len
    field = "token_ids" if isinstance(checked.prompt, tuple) else "text" if isinstance(checked.prompt, str) else "chat"
    if num_prompt == 0:
        raise InvalidRequest(field, "the prompt is empty: it has no tokens")
    if num_prompt >= context:
        raise InvalidRequest(
            field, f"the prompt has {num_prompt} tokens and the context {context}: no room for an answer"
        )
    room = min(context, max_request_tokens) if max_request_tokens is not None else context
    if num_prompt >= room:
        raise InvalidRequest(
            field, f"the prompt has {num_prompt} tokens, the KV pool of the largest decode worker holds {room}"
        )
    max_tokens = checked.max_tokens
    if max_tokens is None:
        max_tokens = min(room - num_prompt, limits.router.max_tokens_cap)
    total = num_prompt + max_tokens
    if total > context:
        raise InvalidRequest(
            "sampling.max_tokens",
            f"prompt ({num_prompt} tokens) + max_tokens ({max_tokens}) = {total} exceed the context of {context}",
        )
    if total > room:
        raise InvalidRequest(
            "sampling.max_tokens",
            f"prompt ({num_prompt} tokens) + max_tokens ({max_tokens}) = {total} exceed the KV pool of the largest "
            f"decode worker, which holds {room}",
        )
    return ResolvedRequest(
        request_id=checked.request_id,
        arrival=arrival,
        prompt_token_ids=tuple(prompt_token_ids),
        sampling=Sampling(
            max_tokens=max_tokens,
            temperature=checked.temperature,
            top_p=checked.top_p,
            top_k=checked.top_k,
            min_p=checked.min_p,
            seed=checked.seed,
            stop_token_ids=checked.stop_token_ids,
        ),
        stop=checked.stop,
        arrived_at=arrived_at,
        deadline=deadline,
    )


def check_model(name: str, limits: Limits) -> None:
    """Raise UnknownModel for a name that is not served; empty means the served model."""
    if name and name != limits.model.name:
        raise UnknownModel("model", f"{name[:MAX_REQUEST_ID_CHARS]!r} is not served here, {limits.model.name!r} is")


def check_prompt(request: pb.GenerateRequest | pb.TokenizeRequest, limits: Limits) -> Prompt:
    """The prompt as text, messages or ids. Raises InvalidRequest."""
    match request.WhichOneof("input"):
        case "text":
            if not limits.has_tokenizer:
                raise InvalidRequest("text", f"{limits.model.name!r} has no tokenizer, send token_ids")
            if not request.text:
                raise InvalidRequest("text", "the prompt is empty")
            return request.text
        case "chat":
            return _chat(request.chat, limits)
        case "token_ids":
            assert isinstance(request, pb.GenerateRequest)
            ids = tuple(request.token_ids.ids)
            if not ids:
                raise InvalidRequest("token_ids", "the prompt is empty")
            check_token_ids("token_ids", ids, limits)
            return ids
        case _:
            raise InvalidRequest("input", "there is no prompt: send text, token_ids or chat")


def check_token_ids(field: str, ids: Sequence[int], limits: Limits) -> None:
    """Raise InvalidRequest for an id outside the vocabulary."""
    if ids and (largest := max(ids)) >= limits.model.vocab_size:
        raise InvalidRequest(field, f"id {largest} is outside the vocabulary of {limits.model.vocab_size}")


def _chat(chat: pb.Chat, limits: Limits) -> list[Message]:
    if not limits.has_tokenizer:
        raise InvalidRequest("chat", f"{limits.model.name!r} has no tokenizer, send token_ids")
    if not limits.has_chat_template:
        raise InvalidRequest("chat", f"{limits.model.name!r} has no chat template, send text")
    if not chat.messages:
        raise InvalidRequest("chat.messages", "there are no messages")
    for number, message in enumerate(chat.messages):
        if message.role not in CHAT_ROLES:
            raise InvalidRequest(
                f"chat.messages[{number}].role", f"{message.role[:32]!r} is none of {', '.join(CHAT_ROLES)}"
            )
    return [{"role": message.role, "content": message.content} for message in chat.messages]


def _request_id(request_id: str) -> str:
    if not request_id:
        return secrets.token_hex(12)
    if len(request_id) > MAX_REQUEST_ID_CHARS:
        raise InvalidRequest("request_id", f"{len(request_id)} characters, the limit is {MAX_REQUEST_ID_CHARS}")
    if not request_id.isprintable():
        raise InvalidRequest("request_id", f"{request_id!r} has characters that are not printable")
    return request_id


def _max_tokens(sampling: pb.SamplingParams, limits: Limits) -> int | None:
    cap = limits.router.max_tokens_cap
    max_tokens = sampling.max_tokens if sampling.HasField("max_tokens") else None
    if max_tokens is not None and not 1 <= max_tokens <= cap:
        raise InvalidRequest("sampling.max_tokens", f"{max_tokens} is not within 1 and {cap}")
    most = cap if max_tokens is None else max_tokens
    if sampling.min_tokens > most:
        raise InvalidRequest("sampling.min_tokens", f"{sampling.min_tokens} exceeds max_tokens, {most}")
    return max_tokens


def _temperature(sampling: pb.SamplingParams) -> float:
    value = sampling.temperature if sampling.HasField("temperature") else 1.0
    if not (math.isfinite(value) and value >= 0):
        raise InvalidRequest("sampling.temperature", f"{value} is not a finite number of at least 0")
    return value


def _top_p(sampling: pb.SamplingParams) -> float:
    value = sampling.top_p if sampling.HasField("top_p") else 1.0
    if not 0 < value <= 1:
        raise InvalidRequest("sampling.top_p", f"{value} is not above 0 and at most 1")
    return value


def _top_k(sampling: pb.SamplingParams) -> int:
    if sampling.top_k < -1:
        raise InvalidRequest("sampling.top_k", f"{sampling.top_k} is not at least 1, nor 0 or -1 (off)")
    return max(sampling.top_k, 0)


def _min_p(sampling: pb.SamplingParams) -> float:
    if not 0 <= sampling.min_p <= 1:
        raise InvalidRequest("sampling.min_p", f"{sampling.min_p} is not within 0 and 1")
    return sampling.min_p


def _stop(sampling: pb.SamplingParams, limits: Limits) -> tuple[str, ...]:
    config = limits.router
    if len(sampling.stop) > config.max_stop_strings:
        raise InvalidRequest(
            "sampling.stop", f"{len(sampling.stop)} stop strings, the limit is {config.max_stop_strings}"
        )
    for number, stop in enumerate(sampling.stop):
        if not stop:
            raise InvalidRequest(f"sampling.stop[{number}]", "an empty stop string")
        if len(stop) > config.max_stop_length:
            raise InvalidRequest(
                f"sampling.stop[{number}]", f"{len(stop)} characters, the limit is {config.max_stop_length}"
            )
    if sampling.stop and not limits.has_tokenizer:
        raise InvalidRequest("sampling.stop", f"{limits.model.name!r} has no tokenizer, use stop_token_ids")
    return tuple(sampling.stop)


def _stop_token_ids(sampling: pb.SamplingParams, limits: Limits) -> tuple[int, ...]:
    """The client's, and EOS unless it is ignored."""
    ids = sampling.stop_token_ids
    if len(ids) > limits.router.max_stop_token_ids:
        raise InvalidRequest(
            "sampling.stop_token_ids", f"{len(ids)} stop ids, the limit is {limits.router.max_stop_token_ids}"
        )
    check_token_ids("sampling.stop_token_ids", ids, limits)
    eos = () if sampling.ignore_eos else limits.model.eos_token_ids
    return tuple(dict.fromkeys((*eos, *ids)))


# name -> (lowest, highest, the value that changes nothing)
_PENALTIES = {
    "frequency_penalty": (-2.0, 2.0, 0.0),
    "presence_penalty": (-2.0, 2.0, 0.0),
    "repetition_penalty": (0.01, 10.0, 1.0),
}


def _refuse_unbuilt_sampling(sampling: pb.SamplingParams, limits: Limits) -> None:
    """Out of range is INVALID_ARGUMENT, in range but not built UNIMPLEMENTED; a value that changes nothing passes."""
    for name, (low, high, neutral) in _PENALTIES.items():
        value = getattr(sampling, name) if sampling.HasField(name) else neutral
        if not low <= value <= high:
            raise InvalidRequest(f"sampling.{name}", f"{value} is not within {low:g} and {high:g}")
        if value != neutral:
            raise Unimplemented(f"sampling.{name}", "penalties are not built yet")
    num_choices = sampling.n if sampling.HasField("n") else 1
    if not 1 <= num_choices <= MAX_CHOICES:
        raise InvalidRequest("sampling.n", f"{num_choices} is not within 1 and {MAX_CHOICES}")
    if num_choices > 1:
        raise Unimplemented("sampling.n", "more than one choice is not built yet")
    if sampling.min_tokens:
        raise Unimplemented("sampling.min_tokens", "not built yet")
    if sampling.logit_bias:
        if len(sampling.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidRequest(
                "sampling.logit_bias", f"{len(sampling.logit_bias)} entries, the limit is {MAX_LOGIT_BIAS}"
            )
        check_token_ids("sampling.logit_bias", list(sampling.logit_bias), limits)
        for token_id, bias in sampling.logit_bias.items():
            if not math.isfinite(bias):
                raise InvalidRequest("sampling.logit_bias", f"{bias} for id {token_id} is not a finite number")
        raise Unimplemented("sampling.logit_bias", "not built yet")


def _refuse_unbuilt(request: pb.GenerateRequest) -> None:
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(request, name)
        if value > MAX_LOGPROBS:
            raise InvalidRequest(name, f"{value} exceeds the limit of {MAX_LOGPROBS}")
        if value:
            raise Unimplemented(name, "log probabilities are not built yet")
    if request.HasField("resume"):
        num_ids, next_index = len(request.resume.token_ids), request.resume.next_index
        if num_ids != next_index:
            raise InvalidRequest("resume.next_index", f"{next_index} is not the number of token_ids, {num_ids}")
        raise Unimplemented("resume", "continuing a broken stream is not built yet")
    if request.priority:
        raise Unimplemented("priority", "not built yet")
    if request.cache_salt:
        raise Unimplemented("cache_salt", "prefix caches are not built yet")
    if request.HasField("grammar"):
        raise Unimplemented("grammar", "structured output is not built yet")
