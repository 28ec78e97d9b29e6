"""What both directions of the tokenizer conversion share: pre-tokenizers, kinds of tokens, merges.

GGUF names the pre-tokenizer (``tokenizer.ggml.pre``); tokenizer.json contains a regular expression. Expressions are
compared as text and written from this table; none is executed. Source: src/llama-vocab.cpp of llama.cpp (2026), which
quotes the expression of each tokenizer.json it supports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}|{_REST}"
_SHORTENED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SHORTENED}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SHORTENED}"
    rf"|\p{{N}}{{1,3}}|{_REST}"
)
# llama.cpp's default; the second one is GPT-2's
_DEFAULT = (
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
)


@dataclass(frozen=True)
class PreTokenizer:
    """A pre-tokenizer.

    name           ``tokenizer.ggml.pre``
    splits         expressions, each splitting the pieces of the previous one
    digits         first splits off every digit as its own piece
    gpt2           GPT-2's own expression is applied last, built into the ByteLevel of `tokenizers`
    nfc            whether its tokenizer.json normalizes to NFC, which llama.cpp does not
    ignore_merges  a word that is a token is not split, regardless of the merges
    aliases        equivalent names in llama.cpp
    """

    name: str
    splits: tuple[str, ...] = ()
    digits: bool = False
    gpt2: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    aliases: tuple[str, ...] = ()


PRE_TOKENIZERS = (
    PreTokenizer("gpt-2", gpt2=True, aliases=("phi-2", "mpt", "olmo", "jais", "trillion")),
    PreTokenizer(
        "llama-bpe",
        (_LLAMA3,),
        ignore_merges=True,
        aliases=("llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
    ),
    PreTokenizer("smaug-bpe", (_LLAMA3,), aliases=("dbrx",)),
    PreTokenizer("qwen2", (_QWEN2,), nfc=True, aliases=("deepseek-r1-qwen", "kormo", "f2llmv2", "megrez")),
    PreTokenizer("qwen35", (_QWEN35,), nfc=True),
    PreTokenizer("tekken", (_TEKKEN,), ignore_merges=True),
    PreTokenizer("gpt-4o", (_GPT4O,), aliases=("llama4", "kanana2")),
    PreTokenizer(
        "smollm", digits=True, gpt2=True, aliases=("starcoder", "refact", "command-r", "codeshell", "minerva-7b")
    ),
    PreTokenizer("default", _DEFAULT),
)
BY_NAME = {name: p for p in PRE_TOKENIZERS for name in (p.name, *p.aliases)}


def recognized(pre_tokenizer: Any, ignore_merges: bool) -> PreTokenizer | None:
    """The PreTokenizer that matches the "pre_tokenizer" of a tokenizer.json, or None."""
    steps = _steps(pre_tokenizer)
    if steps is None or not steps or steps[-1][0] != "bytes":
        return None
    splits = tuple(value for kind, value in steps if kind == "split")
    digits = [kind for kind, _ in steps[:-1]].count("digits")
    if digits > 1 or (digits and steps[0][0] != "digits"):
        return None
    same = [
        p
        for p in PRE_TOKENIZERS
        if (p.splits, p.digits, p.gpt2) == (splits, bool(digits), steps[-1][1] == "gpt2") and p.name != "default"
    ]
    return next((p for p in same if p.ignore_merges == ignore_merges), same[0] if same else None)


def _steps(node: Any) -> list[tuple[str, str]] | None:
    """[(kind, value)] of a pre-tokenizer and its nested ones; None if one has another kind."""
    if not isinstance(node, dict):
        return None
    kind = node.get("type")
    if kind == "Sequence":
        inner = node.get("pretokenizers")
        parts = [_steps(p) for p in inner] if isinstance(inner, list) else [None]
        return None if any(p is None for p in parts) else [step for p in parts for step in p or ()]
    if kind == "ByteLevel":
        return [("bytes", "gpt2" if node.get("use_regex", True) else "")]
    if kind == "Digits" and node.get("individual_digits") is True:
        return [("digits", "")]
    pattern = node.get("pattern")
    # for an expression that matches everything, keeping the matches or splitting at them is the same
    ways = (("Isolated", False), ("Removed", True), ("Isolated", True))
    if kind == "Split" and isinstance(pattern, dict) and (node.get("behavior"), bool(node.get("invert"))) in ways:
        return [("split", pattern["Regex"])] if isinstance(pattern.get("Regex"), str) else None
    return None


def to_json(p: PreTokenizer) -> Mapping[str, Any]:
    """The "pre_tokenizer" of a tokenizer.json."""
    steps: list[dict[str, Any]] = []
    if p.digits:
        steps.append({"type": "Digits", "individual_digits": True})
    steps += [{"type": "Split", "pattern": {"Regex": s}, "behavior": "Isolated", "invert": False} for s in p.splits]
    steps.append({"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": p.gpt2})
    return steps[0] if len(steps) == 1 else {"type": "Sequence", "pretokenizers": steps}


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
