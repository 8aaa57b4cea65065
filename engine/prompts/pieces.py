"""The text of each token of a prompt, so that the pieces join to the text that was tokenized."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

_WINDOW = 8
"""Tokens decoded together at most: the longest characters take four, and a decoder may look one piece back."""


def pieces_at(text: str, ends: Iterable[int]) -> tuple[str, ...]:
    """`text` cut at the characters where its tokens end, one piece a token.

    A character that takes several tokens belongs to the first of them, what a tokenizer skips (spaces before a word)
    to the token that follows, and what it drops at the end to the last one. Tokens that are not in the text, such as
    an added start of text, have the empty piece.
    """
    pieces: list[str] = []
    cursor = 0
    for end in ends:
        end = max(cursor, min(end, len(text)))
        pieces.append(text[cursor:end])
        cursor = end
    if pieces:
        pieces[-1] += text[cursor:]
    return tuple(pieces)


def ends_by_decoding(decode: Callable[[Sequence[int]], str], ids: Sequence[int], text: str) -> list[int]:
    """Where each token ends in `text` [characters], for tokenizers that give no offsets.

    From the differences of decodes of a few tokens with and without the newest one, so that the work is linear in
    their number; each new piece is looked for in the text a little after the one before.
    """
    ends: list[int] = []
    first, read, cursor = 0, 0, 0
    for at in range(len(ids)):
        before, now = decode(ids[first:read]), decode(ids[first : at + 1])
        whole = not now.endswith("\ufffd") or at + 1 - read >= _WINDOW
        if whole:
            piece = now[len(before) :]
            place = text.find(piece, cursor, cursor + len(piece) + _WINDOW) if piece else cursor
            cursor = min(len(text), (cursor if place < 0 else place) + len(piece))
            first, read = read, at + 1
        ends.append(cursor)
    return ends
