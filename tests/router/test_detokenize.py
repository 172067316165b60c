"""Pieces of text as they come, against decoding everything at once."""

from __future__ import annotations

import functools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.detokenize import Detokenizer, Piece
from tandem.tokenizer import TextTokenizer
from tests.support.byte_tokenizer import EOS_ID, ByteTokenizer
from tests.support.small_tokenizers import byte_fallback_tokenizer, byte_level_tokenizer

MAKERS = {
    "byte-level": byte_level_tokenizer,
    "byte-fallback": byte_fallback_tokenizer,
    "byte-fallback without strip": functools.partial(byte_fallback_tokenizer, strip=False),
}
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@functools.cache
def tokenizer_of(kind: str) -> TextTokenizer:
    return MAKERS[kind]()


@functools.cache
def interesting_ids(kind: str) -> list[int]:
    """Ids whose text is short of a character, a space, or long; ids of no text; ids outside the vocabulary."""
    size = tokenizer_of(kind).vocab_size
    return [*range(size - 40, size + 2), 0x0A + 3, 0x20 + 3, 0xE2 + 3, 0x82 + 3, 0xAC + 3, 0xFF, 0xC3, 0xA9, 0x20]


@st.composite
def sequences(draw: st.DrawFn) -> tuple[str, list[int]]:
    kind = draw(st.sampled_from(sorted(MAKERS)))
    any_id = st.integers(0, tokenizer_of(kind).vocab_size + 3)
    return kind, draw(st.lists(st.one_of(st.sampled_from(interesting_ids(kind)), any_id), max_size=24))


stop_strings = st.lists(
    st.one_of(
        st.sampled_from(["STOP", "O", "OP", "\n", "\n\n", "é", "€", " ", "  ", "lloS", "TOPy", "😀", "Py", "yx"]),
        st.text("STOPhelo xy\né", min_size=1, max_size=4),
    ),
    max_size=4,
)


def first_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    """Where the text is cut: before the stop string that is complete first; of those, the longest."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return end - len(longest), longest
    return None


def expected_answer(
    tokenizer: TextTokenizer, ids: list[int], stops: list[str], stop_ids: set[int]
) -> tuple[list[int], str, str, int | None]:
    """ids, text, stop string and stop token of the answer, by decoding every beginning of `ids` as a whole."""
    for count, token_id in enumerate(ids, start=1):
        if token_id in stop_ids:
            return ids[:count], tokenizer.decode(ids[: count - 1]), "", token_id
        text = tokenizer.decode(ids[:count])
        if cut := first_stop(text, stops):
            return ids[:count], text[: cut[0]], cut[1], None
    return ids, tokenizer.decode(ids), "", None


@given(sequences(), stop_strings, st.data())
def test_pieces_add_up_to_the_decode_of_all_ids_cut_at_the_first_stop(
    sequence: tuple[str, list[int]], stops: list[str], data: st.DataObject
) -> None:
    kind, ids = sequence
    tokenizer = tokenizer_of(kind)
    stop_ids = data.draw(st.sets(st.sampled_from(ids), max_size=1)) if ids else set()
    detokenizer = Detokenizer(tokenizer, stops, stop_ids)
    pieces: list[Piece] = []
    rest = ids
    while rest:
        count = data.draw(st.integers(1, len(rest)))
        pieces += detokenizer.push(rest[:count])
        rest = rest[count:]
    assert all(pieces), "an empty piece"
    pieces.append(detokenizer.finish())
    delivered = [token_id for piece in pieces for token_id in piece.token_ids]
    text = "".join(piece.text for piece in pieces)
    answer = (delivered, text, detokenizer.stop_string, detokenizer.stop_token_id)
    assert answer == expected_answer(tokenizer, ids, stops, stop_ids)
    assert detokenizer.num_tokens == len(delivered)
    assert detokenizer.stopped == (bool(detokenizer.stop_string) or detokenizer.stop_token_id is not None)
    assert not detokenizer.finish()


@given(sequences(), stop_strings)
def test_at_any_time_the_text_delivered_is_the_decode_of_the_ids_delivered(
    sequence: tuple[str, list[int]], stops: list[str]
) -> None:
    kind, ids = sequence
    tokenizer = tokenizer_of(kind)
    detokenizer = Detokenizer(tokenizer, stops)
    delivered: list[int] = []
    text = ""
    for token_id in ids:
        for piece in detokenizer.push([token_id]):
            delivered += piece.token_ids
            text += piece.text
        if detokenizer.stopped:
            return
        assert delivered == ids[: len(delivered)]
        assert text == tokenizer.decode(delivered)


@given(st.text(max_size=30), sequences())
def test_no_piece_of_valid_text_ever_holds_a_replacement_character(text: str, sequence: tuple[str, list[int]]) -> None:
    tokenizer = tokenizer_of(sequence[0])
    ids = tokenizer.encode(text.replace(REPLACEMENT, ""), add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer)
    pieces = [piece for token_id in ids for piece in detokenizer.push([token_id])] + [detokenizer.finish()]
    assert not any(REPLACEMENT in piece.text for piece in pieces)


def run(detokenizer: Detokenizer, ids: list[int]) -> list[tuple[list[int], str]]:
    pieces = [piece for token_id in ids for piece in detokenizer.push([token_id])]
    return [(list(piece.token_ids), piece.text) for piece in [*pieces, detokenizer.finish()] if piece]


def test_a_character_of_several_tokens_comes_whole_with_all_its_ids() -> None:
    ids = list("a€b".encode())
    assert run(Detokenizer(ByteTokenizer()), ids) == [([97], "a"), (ids[1:4], "€"), ([98], "b")]


def test_a_character_that_never_completes_comes_with_finish() -> None:
    detokenizer = Detokenizer(ByteTokenizer())
    assert detokenizer.push([97, 0xE2]) == [Piece((97,), "a")]
    assert detokenizer.num_tokens == 2
    assert detokenizer.finish() == Piece((0xE2,), REPLACEMENT)


def test_text_that_could_begin_a_stop_string_is_held_and_delivered_if_it_was_none() -> None:
    detokenizer = Detokenizer(ByteTokenizer(), ["STOP"])
    assert detokenizer.push(b"aSTO") == [Piece((97,), "a")]
    assert detokenizer.push(b"R") == [Piece(tuple(b"STOR"), "STOR")]
    assert not detokenizer.stopped


def test_held_text_comes_with_finish_when_the_answer_ends() -> None:
    detokenizer = Detokenizer(ByteTokenizer(), ["STOP"])
    assert detokenizer.push(b"STO") == []
    assert detokenizer.finish() == Piece(tuple(b"STO"), "STO")
    assert not detokenizer.stopped


def test_text_is_cut_before_a_stop_string_that_ends_in_mid_token() -> None:
    tokenizer = byte_level_tokenizer()
    he, whole = tokenizer.token_id("he"), tokenizer.token_id("xSTOPy")
    detokenizer = Detokenizer(tokenizer, ["STOP"])
    assert detokenizer.push([he, whole, he, he]) == [Piece((he, whole), "hex")]
    assert detokenizer.stop_string == "STOP"
    assert detokenizer.num_tokens == 2
    assert detokenizer.push([he]) == []
    assert not detokenizer.finish()


def test_ids_held_before_a_stop_string_are_delivered_and_counted_with_it() -> None:
    detokenizer = Detokenizer(ByteTokenizer(), ["STOP"])
    pieces = detokenizer.push(b"abST") + detokenizer.push(b"OPcd")
    assert pieces == [Piece(tuple(b"ab"), "ab"), Piece(tuple(b"STOP"), "")]
    assert detokenizer.num_tokens == 6


def test_of_two_stop_strings_the_one_that_is_complete_first_ends_the_answer() -> None:
    detokenizer = Detokenizer(ByteTokenizer(), ["bcd", "c"])
    assert detokenizer.push(b"abcd") == [Piece(tuple(b"abc"), "ab")]
    assert detokenizer.stop_string == "c"


def test_of_stop_strings_that_end_together_the_longest_ends_the_answer() -> None:
    detokenizer = Detokenizer(ByteTokenizer(), ["c", "bc"])
    assert detokenizer.push(b"abc") == [Piece(tuple(b"abc"), "a")]
    assert detokenizer.stop_string == "bc"


def test_a_stop_token_is_delivered_and_counted_with_empty_text_and_frees_what_was_held() -> None:
    detokenizer = Detokenizer(ByteTokenizer(), ["STOP"], [EOS_ID])
    assert detokenizer.push([*b"STO", EOS_ID, 97]) == [Piece((*b"STO", EOS_ID), "STO")]
    assert detokenizer.stop_token_id == EOS_ID
    assert detokenizer.num_tokens == 4


def test_a_stop_token_ends_a_character_that_was_not_complete() -> None:
    detokenizer = Detokenizer(ByteTokenizer(), [], [EOS_ID])
    assert detokenizer.push([0xE2, 0x82, EOS_ID]) == [Piece((0xE2, 0x82, EOS_ID), REPLACEMENT)]


def test_a_stop_token_that_has_text_adds_none() -> None:
    detokenizer = Detokenizer(ByteTokenizer(), [], [ord("!")])
    assert detokenizer.push(b"hi!") == [Piece(tuple(b"hi!"), "hi")]


def test_eos_that_is_ignored_is_a_token_without_text() -> None:
    assert run(Detokenizer(ByteTokenizer()), [97, EOS_ID, 98]) == [([97], "a"), ([EOS_ID], ""), ([98], "b")]


def test_a_stop_string_of_byte_tokens_ends_the_answer_without_waiting_for_the_run_to_end() -> None:
    tokenizer = byte_fallback_tokenizer()
    newline = tokenizer.token_id("<0x0A>")
    detokenizer = Detokenizer(tokenizer, ["\n\n"])
    assert detokenizer.push([newline]) == []
    assert detokenizer.push([newline]) == [Piece((newline, newline), "")]
    assert detokenizer.stopped


def test_looking_ahead_at_byte_tokens_changes_nothing() -> None:
    tokenizer = byte_fallback_tokenizer()
    space, letter = tokenizer.token_id("<0x20>"), tokenizer.token_id("y")
    assert run(Detokenizer(tokenizer, ["STOP"]), [space, letter]) == [([space, letter], "y")]


def test_ids_after_bytes_that_turn_out_to_be_the_stop_string_are_neither_delivered_nor_counted() -> None:
    tokenizer = byte_fallback_tokenizer()
    invalid, letter = tokenizer.token_id("<0xFF>"), tokenizer.token_id("y")
    detokenizer = Detokenizer(tokenizer, [REPLACEMENT])
    assert detokenizer.push([invalid, letter, letter]) == [Piece((invalid,), "")]
    assert detokenizer.num_tokens == 1


@pytest.mark.parametrize(
    ("stop", "text"), [("aab", "aaab"), ("aabaaa", "aabaabaaa"), ("abcabd", "abcabcabd"), ("\n\nUser", "\n\n\nUser")]
)
def test_a_stop_string_that_overlaps_its_own_beginning_is_found(stop: str, text: str) -> None:
    detokenizer = Detokenizer(ByteTokenizer(), [stop])
    pieces = run(detokenizer, list(text.encode()))
    assert "".join(piece_text for _, piece_text in pieces) == text.removesuffix(stop)
    assert [token_id for ids, _ in pieces for token_id in ids] == list(text.encode())
    assert detokenizer.stop_string == stop


def test_without_a_tokenizer_ids_pass_at_once_until_a_stop_token() -> None:
    detokenizer = Detokenizer(None, [], [7])
    assert detokenizer.push([1, 2]) == [Piece((1, 2), "")]
    assert detokenizer.push([3, 7, 8]) == [Piece((3, 7), "")]
    assert detokenizer.num_tokens == 4


def test_stop_strings_without_a_tokenizer_are_a_bug_of_the_caller() -> None:
    with pytest.raises(AssertionError, match="validator"):
        Detokenizer(None, ["x"])
