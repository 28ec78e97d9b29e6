"""Converts GGUF metadata to tokenizer files: tokenizer.json and tokenizer_config.json."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from . import tokenizer_tables as tables
from .metadata import text
from .tokenizer import CLS, IDS, KEY, NONE
from .tokenizer_tables import BY_NAME, BYTE, CONTROL, MAX_TOKENS, NORMAL, SPACE, UNUSED, USER_DEFINED

_Template = dict[str, Any]


def tokenizer_files(kv: Mapping[str, Any]) -> tuple[dict[str, bytes], list[str]]:
    """({file name: bytes}, notes) of a GGUF file's metadata, plain values by key.

    For an unsupported tokenizer no file is written; a note gives the reason. Raises ValueError if the metadata is
    inconsistent.
    """
    kind = text(kv, KEY + "model", "")
    if kind == NONE:
        return {}, ["the file has no tokenizer"]
    if kind not in _MODELS:
        return {}, [f"tokenizer {kind[:50]!r} is not supported (known: {', '.join(_MODELS)}): no tokenizer is written"]
    tokens, types = _tokens(kv)
    notes: list[str] = []
    made = _MODELS[kind](kv, tokens, types, notes)
    if made is None:
        return {}, notes
    ids = {name: _id(kv, key, tokens) for name, key in (*IDS.items(), ("cls", CLS))}
    special = {name: i for name, i in ids.items() if i is not None}
    flag = kind == "llama"  # llama.cpp's default
    add = {k: kind == "bert" or _flag(kv, f"add_{k}_token", flag and k == "bos") for k in ("bos", "eos")}
    first = special.get("bos" if kind != "bert" else "cls", special.get("bos")) if add["bos"] else None
    last = special.get("eos" if kind != "bert" else "sep", special.get("eos")) if add["eos"] else None
    added = [
        _added(i, t, k == CONTROL)
        for i, (t, k) in enumerate(zip(made["spelled"], types, strict=True))
        if k == CONTROL or (k == USER_DEFINED and i not in made["merged"])
    ]
    unknown = special.get("unk")
    if unknown is not None and all(a["id"] != unknown for a in added):
        added = sorted((*added, _added(unknown, tokens[unknown], True)), key=lambda a: a["id"])
    files = {
        "tokenizer.json": {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": added,
            "normalizer": made["normalizer"],
            "pre_tokenizer": made["pre_tokenizer"],
            "post_processor": _template(tokens, first, last) if first is not None or last is not None else made["post"],
            "decoder": made["decoder"],
            "model": made["model"],
        },
        "tokenizer_config.json": _settings(kv, kind, tokens, special, add, notes),
    }
    # without an indent, json uses its encoder in C: a vocabulary would have a hundred thousand lines
    indents = {"tokenizer.json": None, "tokenizer_config.json": 2}
    texts = {name: json.dumps(files[name], indent=n, ensure_ascii=False) + "\n" for name, n in indents.items()}
    return {name: text.encode() for name, text in texts.items()}, notes


def _tokens(kv: Mapping[str, Any]) -> tuple[list[str], list[int]]:
    """Tokens and their types, without the unused tokens at the end that only pad the embedding matrix."""
    tokens = kv.get(KEY + "tokens")
    if not isinstance(tokens, list) or not 0 < len(tokens) <= MAX_TOKENS or not all(isinstance(t, str) for t in tokens):
        raise ValueError(f"{KEY}tokens must be a list of 1 to {MAX_TOKENS} strings")
    types = kv.get(KEY + "token_type", [NORMAL] * len(tokens))
    if not isinstance(types, list) or len(types) != len(tokens) or not all(type(k) is int for k in types):
        raise ValueError(f"{KEY}token_type must be a list of integers, one for each of the {len(tokens)} tokens")
    n = len(tokens)
    while n > 1 and types[n - 1] == UNUSED:
        n -= 1
    return tokens[:n], types[:n]


def _vocab(tokens: list[str], notes: list[str]) -> dict[str, int]:
    vocab: dict[str, int] = {}
    twice = 0
    for i, t in enumerate(tokens):
        twice += t in vocab
        vocab.setdefault(t, i)
    if twice:
        notes.append(f"{twice} tokens appear twice; text maps to the first of each")
    return vocab


def _pairs(kv: Mapping[str, Any]) -> list[tuple[str, str]]:
    merges = kv.get(KEY + "merges", [])
    out = []
    for merge in merges if isinstance(merges, list) else [merges]:
        a, space, b = merge.partition(" ") if isinstance(merge, str) else ("", "", "")
        if not a or not space or not b or " " in b:
            raise ValueError(f"{KEY}merges: {str(merge)[:50]!r} is not two pieces separated by a space")
        out.append((a, b))
    return out


def _known(pairs: list[tuple[str, str]], vocab: Mapping[str, int]) -> list[list[str]]:
    """Merges in the form of tokenizer.json. Raises ValueError if a piece is not a token, which `tokenizers` rejects."""
    bad = next(((a, b) for a, b in pairs if not (a in vocab and b in vocab and a + b in vocab)), None)
    if bad:
        raise ValueError(f"{KEY}merges: {bad!r} or their concatenation is not a token")
    return [[a, b] for a, b in pairs]


def _bpe(vocab: Mapping[str, int], merges: list[list[str]], **options: Any) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        **options,
        "vocab": vocab,
        "merges": merges,
    }


def _byte_level(kv: Mapping[str, Any], tokens: list[str], types: list[int], notes: list[str]) -> _Template | None:
    name = text(kv, KEY + "pre", "default")
    pre = BY_NAME.get(name)
    if pre is None:
        notes.append(f"pre-tokenizer {name[:50]!r} is not supported: no tokenizer is written")
        return None
    if name == "default":
        notes.append("the file has no pre-tokenizer; llama.cpp's default is used")
    vocab = _vocab(tokens, notes)
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "model": _bpe(vocab, _known(_pairs(kv), vocab), ignore_merges=pre.ignore_merges),
        "normalizer": {"type": "NFC"} if pre.nfc else None,
        "pre_tokenizer": tables.to_json(pre),
        "decoder": level,
        "post": level,
        "spelled": tokens,
        "merged": (),
    }


def _sentencepiece(kv: Mapping[str, Any], tokens: list[str], types: list[int], notes: list[str]) -> _Template:
    # user-defined tokens match the unmodified text; if merges also give one, it is written as in the merges
    spelled = [
        t.replace(" ", SPACE) if k == USER_DEFINED and not t.strip(" ") else t
        for t, k in zip(tokens, types, strict=True)
    ]
    pairs = _pairs(kv)
    if not pairs:
        scores = kv.get(KEY + "scores")
        if (
            not isinstance(scores, list)
            or len(scores) < len(tokens)
            or not all(type(x) in (int, float) for x in scores)
        ):
            raise ValueError(f"{KEY}scores must be a list of numbers, one for each of the {len(tokens)} tokens")
        if any(math.isnan(x) for x in scores):
            raise ValueError(f"{KEY}scores contains NaN")
        pairs = tables.joinable(spelled, types, scores[: len(tokens)])
    vocab = _vocab(spelled, notes)
    joined = {a + b for a, b in pairs}
    merged = {i for i, (s, t) in enumerate(zip(spelled, tokens, strict=True)) if s != t and s in joined}
    prefix = _flag(kv, "add_space_prefix", True)
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    steps = ([{"type": "Prepend", "prepend": SPACE}] if prefix else []) + [replace]
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = _id(kv, IDS["unk"], tokens)
    return {
        "model": _bpe(
            vocab,
            _known(pairs, vocab),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=BYTE in types,
        ),
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "post": None,
        "spelled": [s if i in merged else t for i, (s, t) in enumerate(zip(spelled, tokens, strict=True))],
        "merged": merged,
    }


def _word_piece(kv: Mapping[str, Any], tokens: list[str], types: list[int], notes: list[str]) -> _Template:
    spelled = [t if k in (CONTROL, UNUSED) else tables.word(t) for t, k in zip(tokens, types, strict=True)]
    unknown = _id(kv, IDS["unk"], tokens)
    if unknown is None:
        raise ValueError(f"{KEY}{IDS['unk']} is required: WordPiece maps unknown words to it")
    lowercase = _flag(kv, "normalizer.lowercase", True)
    return {
        "model": {
            "type": "WordPiece",
            "unk_token": spelled[unknown],
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": _vocab(spelled, notes),
        },
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": _flag(kv, "normalizer.strip_accents", lowercase),
            "lowercase": lowercase,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "post": None,
        "spelled": spelled,
        "merged": (),
    }


_MODELS = {"gpt2": _byte_level, "llama": _sentencepiece, "bert": _word_piece}


def _flag(kv: Mapping[str, Any], key: str, default: bool) -> bool:
    value = kv.get(KEY + key, default)
    if type(value) is not bool:
        raise ValueError(f"{KEY}{key} must be true or false, got {str(value)[:50]!r}")
    return value


def _id(kv: Mapping[str, Any], key: str, tokens: list[str]) -> int | None:
    value = kv.get(KEY + key)
    if value is not None and (type(value) is not int or not 0 <= value < len(tokens)):
        raise ValueError(f"{KEY}{key} must be one of the {len(tokens)} tokens, got {str(value)[:50]!r}")
    return value


def _added(i: int, content: str, special: bool) -> dict[str, Any]:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": i, "content": content, **plain, "special": special}


def _template(tokens: list[str], first: int | None, last: int | None) -> dict[str, Any]:
    """Tokens around a text; a second text is followed by the last token again."""

    def special(i: int | None, kind: int) -> list[dict[str, Any]]:
        return [] if i is None else [{"SpecialToken": {"id": tokens[i], "type_id": kind}}]

    def sequence(name: str, kind: int) -> list[dict[str, Any]]:
        return [{"Sequence": {"id": name, "type_id": kind}}]

    single = special(first, 0) + sequence("A", 0) + special(last, 0)
    used = {tokens[i]: {"id": tokens[i], "ids": [i], "tokens": [tokens[i]]} for i in (first, last) if i is not None}
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": single + sequence("B", 1) + special(last, 1),
        "special_tokens": used,
    }


def _settings(
    kv: Mapping[str, Any],
    kind: str,
    tokens: list[str],
    special: Mapping[str, int],
    add: Mapping[str, bool],
    notes: list[str],
) -> dict[str, Any]:
    out: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": kind == "bert"}
    arch = kv.get("general.architecture")
    length = kv.get(f"{arch}.context_length") if isinstance(arch, str) else None
    if type(length) is int and length > 0:
        out["model_max_length"] = length
    out |= {f"{name}_token": tokens[i] for name, i in special.items()}
    if kind != "bert":
        out |= {f"add_{name}_token": value for name, value in add.items()}
    key = "tokenizer.chat_template"
    if isinstance(kv.get(key), str):
        out["chat_template"] = kv[key]
    named = {k[len(key) + 1 :]: v for k, v in kv.items() if k.startswith(key + ".") and isinstance(v, str)}
    if named:
        default = {"default": out["chat_template"]} if "chat_template" in out else {}
        out["chat_template"] = [{"name": n, "template": t} for n, t in (default | named).items()]
    return out
