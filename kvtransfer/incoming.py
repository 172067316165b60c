"""What the receiver knows of one attempt, and the pure checks of what the peer says about it (⑦)."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from kvtransfer.link import Link
from tandem.layout import KVLayout
from tandem.types import AttemptKey, PeerEndpoint
from tandem.v1 import worker_pb2 as pb


@dataclass(slots=True)
class Incoming:
    """One attempt's state here. Times are monotonic seconds of this process."""

    attempt: AttemptKey
    peer: PeerEndpoint
    capability: bytes
    block_ids: tuple[int, ...]
    first_token_wanted: int
    link: Link
    next_token: int  # tokens below are copied or being copied
    copies: set[asyncio.Task[None]] = field(default_factory=set)
    num_copied_tokens: int = 0
    num_chunks: int = 0
    nbytes: int = 0
    first_offer_at: float | None = None
    last_offer_at: float | None = None
    saw_last: bool = False
    over: bool = False  # failed or committed: later messages are dropped


def problem_with_offer(incoming: Incoming, offer: pb.Offer, layout: KVLayout) -> str | None:
    """Why an offer does not fit what is reserved and what came before, or None."""
    size = layout.block_size
    if incoming.saw_last:
        return f"chunk {offer.chunk} came after the last one"
    if offer.first_token != incoming.next_token or offer.first_token % size:
        return f"chunk {offer.chunk} begins at token {offer.first_token}, {incoming.next_token} was due"
    if offer.num_tokens == 0 or (offer.num_tokens % size and not offer.last):
        return f"chunk {offer.chunk} has {offer.num_tokens} tokens and is not the last"
    num_blocks = layout.num_blocks_for(offer.num_tokens)
    if len(offer.block_ids) != num_blocks or len(offer.generations) != num_blocks:
        return f"chunk {offer.chunk} has {len(offer.block_ids)} blocks for {offer.num_tokens} tokens"
    if offer.first_token // size + num_blocks > len(incoming.block_ids):
        return f"chunk {offer.chunk} is larger than the reservation"
    return None


def problem_with_commit(incoming: Incoming, commit: pb.Commit) -> str | None:
    """Why a commit record does not speak of exactly what was copied, or None."""
    copied = incoming.first_token_wanted + incoming.num_copied_tokens
    if incoming.copies:
        return "the commit came while a copy is in flight"
    if copied != commit.num_tokens:
        return f"commit of {commit.num_tokens} tokens, {copied} are here"
    if incoming.num_copied_tokens and not incoming.saw_last:
        return "the commit came before the last chunk"
    return None
