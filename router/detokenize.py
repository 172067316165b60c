"""⑨ Token ids to text as they come: whole characters, stop strings, ids travelling with the text they complete.

Neighbours: lifecycle (one Detokenizer per choice, kept over re-runs), tandem.text_stream (bytes to characters).

    ids -> TextStream        an id is *unsettled* until every character it takes part in is complete; ids that share
                             characters are settled together and stay together
        -> StopMatcher       settled ids are *held* while their text could be the beginning of a stop string
        -> Piece             released in order; at any time the text delivered is the decode of the ids delivered

An answer ends at the first token after which the text holds a stop string. The text is cut before the stop string (of
several, the one that was complete first; of those the longest); the ids up to and including that token are delivered
and counted, later ones are neither. A stop token (EOS, stop_token_ids) is delivered and counted, with empty text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from tandem.text_stream import TextStream
from tandem.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Piece:
    """Ids and the text that they complete."""

    token_ids: tuple[int, ...] = ()
    text: str = ""

    def __bool__(self) -> bool:
        return bool(self.token_ids or self.text)


class Detokenizer:
    """One choice's ids to pieces of text. Without a tokenizer every id passes at once, with empty text."""

    def __init__(
        self, tokenizer: Tokenizer | None, stop: Sequence[str] = (), stop_token_ids: Collection[int] = ()
    ) -> None:
        assert tokenizer is not None or not stop, "stop strings need a tokenizer; the validator refuses them"
        self._stream: TextStream | None = tokenizer.text_stream() if tokenizer is not None else None
        self._matcher = StopMatcher(stop)
        self._stop_token_ids = frozenset(stop_token_ids)
        self._unsettled: deque[int] = deque()
        self._held: deque[Piece] = deque()
        self._ready: list[Piece] = []
        self._num_tokens = 0
        self._finished = False
        self.stop_string = ""
        self.stop_token_id: int | None = None

    @property
    def stopped(self) -> bool:
        """Whether a stop string or stop token has ended the answer: further ids are ignored."""
        return bool(self.stop_string) or self.stop_token_id is not None

    @property
    def num_tokens(self) -> int:
        """Ids of the answer so far, released or not: what usage counts. Ids after the end are not in it."""
        return self._num_tokens

    def push(self, token_ids: Iterable[int]) -> list[Piece]:
        """Take the next ids; return what may be delivered now: nothing or one piece."""
        assert not self._finished, "push after finish"
        for token_id in token_ids:
            if self.stopped:
                break
            self._take(token_id)
        piece = self._take_ready()
        return [piece] if piece else []

    def finish(self) -> Piece:
        """Return what was held back; the answer ends here. Calling it again returns an empty piece."""
        if not self._finished and not self.stopped:
            self._settle_all()
            self._release_all()
        self._finished = True
        return self._take_ready()

    def _take(self, token_id: int) -> None:
        if token_id in self._stop_token_ids:
            self._settle_all()
            if not self.stopped:
                self._release_all()
                self._ready.append(Piece((token_id,), ""))
                self._num_tokens += 1
                self.stop_token_id = token_id
            return
        self._unsettled.append(token_id)
        self._num_tokens += 1
        self._settle(self._stream.push(token_id) if self._stream is not None else [""])
        if self._unsettled and self._matcher.has_stops and not self.stopped:
            self._look_ahead()

    def _settle(self, texts: list[str]) -> None:
        """Move the oldest unsettled ids, which completed these texts, through the matcher."""
        for count, text in enumerate(texts, start=1):
            if match := self._matcher.feed(text):
                self._hold(texts[:count])
                self._stop_at(match)
                return
        self._hold(texts)
        num_held_chars = sum(len(piece.text) for piece in self._held)
        while self._held and num_held_chars - len(self._held[0].text) >= self._matcher.num_held:
            num_held_chars -= len(self._held[0].text)
            self._ready.append(self._held.popleft())

    def _settle_all(self) -> None:
        if self._stream is not None:
            self._settle(self._stream.finish())

    def _look_ahead(self) -> None:
        """End at once if the unsettled ids have completed a stop string: nothing later can undo that."""
        assert self._stream is not None
        texts = self._stream.tentative()
        if self._matcher.would_match("".join(texts)):
            self._settle(texts)

    def _hold(self, texts: list[str]) -> None:
        if texts:
            self._held.append(Piece(tuple(self._unsettled.popleft() for _ in texts), "".join(texts)))

    def _stop_at(self, match: StopMatch) -> None:
        """End the answer: the ids held go out, their text is cut before the stop string; later ids never were."""
        whole = _joined(self._held)
        num_kept_chars = len(whole.text) - match.num_chars_after - len(match.stop)
        self._ready.append(Piece(whole.token_ids, whole.text[:num_kept_chars]))
        self._num_tokens -= len(self._unsettled)
        self._held.clear()
        self._unsettled.clear()
        self.stop_string = match.stop

    def _release_all(self) -> None:
        self._ready.extend(self._held)
        self._held.clear()

    def _take_ready(self) -> Piece:
        piece = _joined(self._ready)
        self._ready.clear()
        return piece


def _joined(pieces: Iterable[Piece]) -> Piece:
    pieces = list(pieces)
    ids = tuple(token_id for piece in pieces for token_id in piece.token_ids)
    return Piece(ids, "".join(piece.text for piece in pieces))


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string that has come, and how many characters came after it in the same text."""

    stop: str
    num_chars_after: int


class StopMatcher:
    """Finds the first of several stop strings in a text that comes in pieces (Knuth, Morris, Pratt, side by side).

    `_states[i]` is the length of the longest beginning of stop string i that the text so far ends with, so that the
    cost of a character does not depend on how long the stop strings are.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string"
        # longest first: of those that end at one character, the one that began first wins
        self._stops = sorted(dict.fromkeys(stops), key=len, reverse=True)
        self._fallbacks = [_fallbacks(stop) for stop in self._stops]
        self._states = [0] * len(self._stops)

    @property
    def has_stops(self) -> bool:
        """Whether there is anything to look for."""
        return bool(self._stops)

    @property
    def num_held(self) -> int:
        """Characters at the end of the text that could be the beginning of a stop string."""
        return max(self._states, default=0)

    def feed(self, text: str) -> StopMatch | None:
        """Take the next text; return the stop string that is complete first, if one is."""
        return self._advance(self._states, text)

    def would_match(self, text: str) -> bool:
        """Whether `feed(text)` would find a stop string; changes nothing."""
        return self._advance(self._states.copy(), text) is not None

    def _advance(self, states: list[int], text: str) -> StopMatch | None:
        if not states:
            return None
        for position, char in enumerate(text):
            for i, stop in enumerate(self._stops):
                state = states[i]
                while state and stop[state] != char:
                    state = self._fallbacks[i][state]
                state += stop[state] == char
                if state == len(stop):
                    return StopMatch(stop, len(text) - position - 1)
                states[i] = state
        return None


def _fallbacks(stop: str) -> list[int]:
    """For each length k < len(stop): the longest proper beginning of stop[:k] that stop[:k] also ends with."""
    fallbacks = [0] * len(stop)
    for k in range(2, len(stop)):
        state = fallbacks[k - 1]
        while state and stop[state] != stop[k - 1]:
            state = fallbacks[state]
        fallbacks[k] = state + (stop[state] == stop[k - 1])
    return fallbacks
