"""Converts tokenizer files to GGUF metadata. All input is data: no tokenizer is built, no template rendered.

Sources: gguf.vocab of gguf 0.19, llama.cpp's converter (conversion/base.py, bert.py) and src/llama-vocab.cpp (2026)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..file import CheckpointError, checkpoint_errors
from ..strict_json import read_bytes, read_object, resolve_inside
from . import tokenizer_tables as tables
from .metadata import KV
from .tokenizer_tables import BYTE, CONTROL, MAX_TOKENS, NORMAL, SPACE, UNKNOWN, UNUSED, USER_DEFINED

MAX_TOKENIZER = 128 << 20  # Gemma's tokenizer.json takes 33 MB
MAX_SMALL = 8 << 20


@dataclass
class Source:
    """Validated contents of the tokenizer files."""

    tokenizer: dict[str, Any]
    settings: dict[str, Any]  # tokenizer_config.json
    special: dict[str, Any]  # special_tokens_map.json
    config: dict[str, Any]
    model: dict[str, Any] = field(default_factory=dict)
    tokens: list[str] = field(default_factory=list)
    types: list[int] = field(default_factory=list)
    ids: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def read_source(folder: str) -> Source:
    """The files of a folder (a real path). Raises CheckpointError for an invalid or missing tokenizer.json."""
    tokenizer = read_object(folder, "tokenizer.json", MAX_TOKENIZER, max_digits=40)
    if tokenizer is None:
        raise CheckpointError(
            os.path.join(folder, "tokenizer.json"), None,
            "is missing; load the tokenizer with transformers and call save_pretrained(), which writes it",
        )  # fmt: skip
    settings, special, config = (
        read_object(folder, name, MAX_SMALL, max_digits=40) or {}
        for name in ("tokenizer_config.json", "special_tokens_map.json", "config.json")
    )
    return Source(tokenizer, settings, special, config)


def find(node: Any, kind: str) -> dict[str, Any] | None:
    """The component of a given type in tokenizer.json, this node or a nested one."""
    if not isinstance(node, dict):
        return None
    if node.get("type") == kind:
        return node
    for key in ("pretokenizers", "normalizers", "decoders", "processors"):
        for inner in node.get(key) or () if isinstance(node.get(key), list) else ():
            found = find(inner, kind)
            if found is not None:
                return found
    return None


def content(s: Source, name: str) -> str | None:
    """The text of a special token such as "bos_token"."""
    for source in (s.settings, s.special):
        value: Any = source.get(name)
        if isinstance(value, Mapping):
            value = value.get("content")
        if isinstance(value, str):
            return value
    return None


KEY = "tokenizer.ggml."
NONE = "none"  # llama.cpp's name of a model without tokenizer, whose number of tokens is ARCH.vocab_size
# special token -> key of its id
IDS = {
    "bos": "bos_token_id",
    "eos": "eos_token_id",
    "unk": "unknown_token_id",
    "sep": "seperator_token_id",  # the spelling used in GGUF
    "pad": "padding_token_id",
    "mask": "mask_token_id",
}
CLS = "cls_token_id"


def tokenizer_kv(folder: str, vocab_size: int | None = None) -> tuple[KV, list[str]]:
    """(metadata ``tokenizer.*``, notes) of a folder with tokenizer.json and its optional companion files.

    vocab_size: rows of the embedding matrix; unused tokens are added up to it; from config.json if None. Notes list
    possible differences between llama.cpp and the tokenizer. Raises CheckpointError for an invalid file and for a
    tokenizer that llama.cpp does not support.
    """
    real = os.path.realpath(folder)
    s = read_source(real)
    with checkpoint_errors(os.path.join(real, "tokenizer.json")):
        kind = _kind(s)
        _vocabulary(s, kind, vocab_size)
        kv: KV = {KEY + "model": ("STRING", kind)}
        kv |= {"gpt2": _byte_level, "llama": _sentencepiece, "bert": _word_piece}[kind](s)
        kv |= _special_kv(s, kind)
    return kv | _templates(real, s), s.notes


def _kind(s: Source) -> str:
    model = s.tokenizer.get("model")
    if not isinstance(model, dict):
        raise ValueError('"model" must be an object')
    s.model = model
    kind = model.get("type")
    if kind is None and "merges" in model:  # missing in the first tokenizer.json files
        kind = "BPE"
    if kind == "WordPiece":
        if model.get("continuing_subword_prefix", "##") != "##":
            raise ValueError(f"WordPiece with the prefix {model['continuing_subword_prefix']!r}; llama.cpp needs '##'")
        return "bert"
    if kind == "BPE" and model.get("byte_fallback") is True:
        return "llama"
    if kind == "BPE" and any(find(s.tokenizer.get(k), "ByteLevel") is not None for k in ("pre_tokenizer", "decoder")):
        return "gpt2"
    raise ValueError(
        f"a tokenizer of type {str(kind)[:50]!r} is neither byte-level BPE, nor BPE with byte fallback, nor "
        "WordPiece, and GGUF has no equivalent"
    )


def _vocabulary(s: Source, kind: str, vocab_size: int | None) -> None:
    """Fill tokens, types and ids: those of the model, then the added ones, with unused tokens in the gaps."""
    vocab, added = s.model.get("vocab"), s.tokenizer.get("added_tokens", [])
    if not isinstance(vocab, dict) or not isinstance(added, list):
        raise ValueError('"vocab" must be an object and "added_tokens" a list')
    if not all(isinstance(t, dict) for t in added):
        raise ValueError('"added_tokens" must contain objects')
    extra: list[tuple[Any, Any, bool]] = [(t.get("content"), t.get("id"), t.get("special") is True) for t in added]
    for text, i in (*vocab.items(), *((text, i) for text, i, _ in extra)):
        if not isinstance(text, str) or type(i) is not int or not 0 <= i < MAX_TOKENS:
            raise ValueError(f"token {str(text)[:50]!r} needs an id from 0 to {MAX_TOKENS - 1}, got {str(i)[:50]!r}")
    size = s.config.get("vocab_size") if vocab_size is None else vocab_size
    used = 1 + max((*vocab.values(), *(i for _, i, _ in extra)), default=-1)
    n = used if type(size) is not int else size
    if not used <= n <= MAX_TOKENS:
        raise ValueError(f"{used} tokens, but the model has {n} (vocab_size); use the tokenizer of this model")
    s.tokens, s.types = [f"[PAD{i}]" for i in range(n)], [UNUSED] * n
    for text, i in vocab.items():
        if s.types[i] != UNUSED:
            raise ValueError(f"tokens {s.tokens[i][:50]!r} and {text[:50]!r} have the same id {i}")
        s.tokens[i], s.types[i] = text, NORMAL
    for text, i, special in extra:
        s.tokens[i], s.types[i] = text, CONTROL if special else USER_DEFINED
    s.ids = dict(vocab) | {text: i for text, i, _ in extra}


def _merges(s: Source) -> list[tuple[str, str]]:
    merges = s.model.get("merges")
    if not isinstance(merges, list):
        raise ValueError('"merges" must be a list')
    out = []
    for merge in merges:
        pair = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(p, str) and p for p in pair):
            raise ValueError(f"merge {str(merge)[:50]!r} is not two pieces")
        out.append((pair[0], pair[1]))
    return out


def _merge_kv(merges: list[tuple[str, str]]) -> KV:
    bad = next((pair for pair in merges if " " in pair[0] or " " in pair[1]), None)
    if bad:
        raise ValueError(f"merge {bad!r} has a space in a piece, which GGUF cannot distinguish from the separator")
    return {KEY + "merges": ("ARRAY[STRING]", [f"{a} {b}" for a, b in merges])} if merges else {}


def _list_kv(s: Source) -> KV:
    return {KEY + "tokens": ("ARRAY[STRING]", s.tokens), KEY + "token_type": ("ARRAY[INT32]", s.types)}


def _byte_level(s: Source) -> KV:
    pre_tokenizer, ignore_merges = s.tokenizer.get("pre_tokenizer"), s.model.get("ignore_merges") is True
    pre = tables.recognized(pre_tokenizer, ignore_merges)
    if pre is None:
        s.notes.append(
            'the pre-tokenizer has no llama.cpp name: written as "default", which splits some text into other words'
        )
    elif pre.ignore_merges != ignore_merges:
        s.notes.append(f"ignore_merges is {ignore_merges}, but llama.cpp's {pre.name!r} has the opposite")
    normalizer = s.tokenizer.get("normalizer")
    settings = normalizer if isinstance(normalizer, dict) else {}
    if normalizer is not None and settings.get("normalizers") != []:
        kind = settings.get("type")
        s.notes.append(f"llama.cpp does not normalize text for byte-level tokenizers, this one does ({str(kind)[:30]})")
    level = find(pre_tokenizer, "ByteLevel") or {}
    if level.get("add_prefix_space") is True:
        s.notes.append("a space is prepended to the text (add_prefix_space), which llama.cpp does not do")
    return {KEY + "pre": ("STRING", pre.name if pre else "default"), **_list_kv(s), **_merge_kv(_merges(s))}


def _sentencepiece(s: Source) -> KV:
    """Tokens with scores, by which llama.cpp merges: best score first, and any two pieces whose concatenation is a
    token.

    A score is minus the rank of the first merge that gives the token. If the scores do not reproduce the merge list,
    the merges are written too, although llama.cpp ignores them.
    """
    merges, unk = _merges(s), s.model.get("unk_token")
    rank = tables.ranks(merges)
    for i, text in enumerate(s.tokens):
        if text == unk:
            s.types[i] = UNKNOWN
        elif s.types[i] == NORMAL and tables.is_byte(text):
            s.types[i] = BYTE
    scores = [
        float(-rank.get(text, len(merges))) if kind in (NORMAL, USER_DEFINED, UNUSED) else 0.0
        for text, kind in zip(s.tokens, s.types, strict=True)
    ]
    kv: KV = {KEY + "pre": ("STRING", "default")}
    again = tables.joinable(s.tokens, s.types, scores)
    if again != merges:
        kv |= _merge_kv(merges)
        if set(again) != set(merges):
            s.notes.append(
                f"{len(set(again) ^ set(merges))} pairs of tokens can be joined but have no merge, or vice versa: "
                "llama.cpp, which uses the tokens, splits some text differently"
            )
    prefix = _space_prefix(s)
    # llama.cpp matches user-defined tokens in the unmodified text
    s.tokens = [t.replace(SPACE, " ") if kind == USER_DEFINED else t for t, kind in zip(s.tokens, s.types, strict=True)]
    return {
        **kv,
        **_list_kv(s),
        KEY + "scores": ("ARRAY[FLOAT32]", scores),
        KEY + "add_space_prefix": ("BOOL", prefix),
        KEY + "remove_extra_whitespaces": ("BOOL", False),
    }


def _space_prefix(s: Source) -> bool:
    normalizer, space = s.tokenizer.get("normalizer"), find(s.tokenizer.get("pre_tokenizer"), "Metaspace")
    prepend = find(normalizer, "Prepend")
    if space is None:
        return prepend is not None
    if space.get("split") is True:
        s.notes.append("words are split at spaces before merging, which llama.cpp does not do")
    scheme = space.get("prepend_scheme", "always" if space.get("add_prefix_space", True) else "never")
    if scheme != "never":
        s.notes.append("llama.cpp prepends a space to text that already begins with one; this tokenizer does not")
    return scheme != "never"


def _word_piece(s: Source) -> KV:
    """llama.cpp marks the first piece of a word, BERT the others, with ##."""
    bert = find(s.tokenizer.get("normalizer"), "BertNormalizer") or {}
    lowercase = bert.get("lowercase", True) is True
    accents = bert.get("strip_accents")
    if find(s.tokenizer.get("pre_tokenizer"), "BertPreTokenizer") is None:
        s.notes.append("llama.cpp splits words as BertPreTokenizer does; this tokenizer splits differently")
    marked = [tables.piece(t) if k not in (CONTROL, UNUSED) else t for t, k in zip(s.tokens, s.types, strict=True)]
    for old, new, kind in zip(s.tokens, marked, s.types, strict=True):
        if kind not in (CONTROL, UNUSED) and tables.word(new) != old:
            raise ValueError(f"token {old[:50]!r} would become {tables.word(new)[:50]!r} in GGUF")
    s.tokens = marked
    return {
        KEY + "pre": ("STRING", "default"),
        **_list_kv(s),
        KEY + "normalizer.lowercase": ("BOOL", lowercase),
        KEY + "normalizer.strip_accents": ("BOOL", lowercase if accents is None else accents is True),
    }


def _special_kv(s: Source, kind: str) -> KV:
    """Ids of the special tokens, and whether they are added around a text."""
    first, last = _around(s)
    texts = {name: content(s, f"{name}_token") for name in (*IDS, "cls")}
    texts["unk"] = texts["unk"] or (s.model.get("unk_token") if isinstance(s.model.get("unk_token"), str) else None)
    if kind == "bert":
        texts["cls"], texts["sep"] = texts["cls"] or first, texts["sep"] or last
        texts["bos"], texts["eos"] = texts["bos"] or texts["cls"], texts["eos"] or texts["sep"]
    kv: KV = {}
    for name, key in (*IDS.items(), ("cls", CLS)):
        i = s.ids.get(texts[name] or "", s.config.get(f"{name}_token_id"))
        if type(i) is int and 0 <= i < len(s.tokens) and (name != "cls" or texts["cls"]):
            kv[KEY + key] = ("UINT32", i)
    for name, text in (("bos", first), ("eos", last)):
        said = s.settings.get(f"add_{name}_token")
        add = said if isinstance(said, bool) else text is not None
        if text is not None and s.ids.get(text) != kv.get(KEY + IDS[name], ("", -1))[1]:
            s.notes.append(f"{text!r} is added around a text but is not {name}_token: llama.cpp will not add it")
            add = False
        if add and KEY + IDS[name] not in kv:
            raise ValueError(f"add_{name}_token is true, but there is no {name}_token")
        kv[KEY + f"add_{name}_token"] = ("BOOL", add)
    return kv


def _around(s: Source) -> tuple[str | None, str | None]:
    """The tokens that the post-processor adds before and after a single text."""
    post = s.tokenizer.get("post_processor")
    template = find(post, "TemplateProcessing")
    if template is not None:
        single = template.get("single")
        steps = single if isinstance(single, list) and all(isinstance(x, dict) for x in single) else []
        texts = [x["SpecialToken"].get("id") if isinstance(x.get("SpecialToken"), dict) else None for x in steps]
        if len(texts) > 1:
            first, last = texts[0], texts[-1]
            return first if isinstance(first, str) else None, last if isinstance(last, str) else None
    for kind in ("BertProcessing", "RobertaProcessing"):
        around = find(post, kind)
        if around is not None:
            pair = [p[0] for p in (around.get("cls"), around.get("sep")) if isinstance(p, list) and p]
            if len(pair) == 2 and all(isinstance(p, str) for p in pair):
                return pair[0], pair[1]
    return None, None


def _templates(folder: str, s: Source) -> KV:
    """Chat templates, copied as text."""
    value: Any = s.settings.get("chat_template")
    if value is None and os.path.lexists(os.path.join(folder, "chat_template.jinja")):
        path = resolve_inside(folder, "chat_template.jinja")
        try:
            value = read_bytes(path, MAX_SMALL).decode("utf-8")
        except UnicodeDecodeError as e:
            raise CheckpointError(path, None, f"is not UTF-8 (byte {e.start})") from e
    if value is None:
        return {}
    named = {"default": value} if isinstance(value, str) else {}
    for t in value if isinstance(value, list) else ():
        if isinstance(t, dict) and isinstance(t.get("name"), str) and isinstance(t.get("template"), str):
            named[t["name"]] = t["template"]
    if not named:
        s.notes.append("chat_template is neither text nor a list of named texts: left out")
    key = "tokenizer.chat_template"
    kv: KV = {key if name == "default" else f"{key}.{name}": ("STRING", text) for name, text in named.items()}
    others = [name for name in named if name != "default"]
    return kv | ({"tokenizer.chat_templates": ("ARRAY[STRING]", others)} if others else {})
