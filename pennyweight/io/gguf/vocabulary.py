"""Helpers for tokens and merges, shared by both directions of the tokenizer conversion."""

from __future__ import annotations

from collections.abc import Sequence

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # enum llama_token_type
SPACE = "\u2581"  # SentencePiece's space character
MAX_TOKENS = 1 << 21
MAX_JOINED = 512  # maximum length of a token whose splits are searched


def is_byte(token: str) -> bool:
    """Whether a token is SentencePiece's notation for one byte: <0x0A>."""
    return len(token) == 6 and token.startswith("<0x") and token[5] == ">" and all(c in _HEX for c in token[3:5])


_HEX = frozenset("0123456789ABCDEF")


def ranks(merges: Sequence[tuple[str, str]]) -> dict[str, int]:
    """Token -> rank of the first merge that gives it."""
    out: dict[str, int] = {}
    for rank, (a, b) in enumerate(merges):
        out.setdefault(a + b, rank)
    return out


def joinable(tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """All pairs of tokens whose concatenation is a token, best score first; ties by the ids of the halves.

    These are the merges that llama.cpp applies.
    """
    ids = {t: i for i, (t, k) in enumerate(zip(tokens, types, strict=True)) if k in (NORMAL, USER_DEFINED)}
    pairs = []
    for token, i in ids.items():
        if len(token) > MAX_JOINED:
            continue
        for cut in range(1, len(token)):
            a, b = ids.get(token[:cut]), ids.get(token[cut:])
            if a is not None and b is not None:
                pairs.append((-scores[i], a, b))
    pairs.sort()
    return [(tokens[a], tokens[b]) for _, a, b in pairs]


def piece(token: str) -> str:
    """A WordPiece token in llama.cpp's form: the first piece of a word is marked, not the others."""
    return token[2:] if token.startswith("##") else SPACE + token


def word(token: str) -> str:
    """The inverse of :func:`piece`."""
    return token[1:] if token.startswith(SPACE) else "##" + token
