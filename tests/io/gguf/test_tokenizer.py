"""Tokenizers to GGUF metadata and back, against `tokenizers`, transformers, sentencepiece and gguf's own reading."""

import json
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import gguf
import pytest
import sentencepiece
import transformers
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers.integrations.gguf import gguf_tokenizer_mapping as theirs

from pennyweight.io.file import CheckpointError
from pennyweight.io.gguf.tokenizer import tokenizer_kv
from pennyweight.io.gguf.tokenizer_files import tokenizer_files
from pennyweight.io.gguf.tokenizer_tables import BY_NAME, PRE_TOKENIZERS, joinable, ranks, recognized, to_json

CORPUS = [topics[name] for name in sorted(topics)[:30]]  # English text with code, of the standard library
TEXTS = (
    "Hello, world! It's 2023: naïve café 北京 the   end\n\tfoo😀 ÜBER's I'LL 12345",
    "<|user|>hi <tool> there<|eos|>",
    " lead  double   ",
    "x" * 70 + " def f(x):\n    return x**2\r\n\r\n",
    "ﬁ Å e\u0301 \u2581 ##ing [MASK] \u00a0",
    "",
)
SPECIAL = ["<|bos|>", "<|eos|>", "<|user|>"]


def byte_level(name: str, ignore_merges: bool = False, nfc: bool = False) -> Tokenizer:
    """A trained byte-level BPE with the pre-tokenizer of that name, a BOS, and a token that is no special one."""
    t = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    digits = [pre_tokenizers.Digits(individual_digits=True)] if BY_NAME[name].digits else []
    splits = [pre_tokenizers.Split(Regex(s), "isolated") for s in BY_NAME[name].splits]
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=BY_NAME[name].gpt2)
    t.pre_tokenizer = pre_tokenizers.Sequence([*digits, *splits, level]) if digits or splits else level
    if nfc:
        t.normalizer = normalizers.NFC()
    t.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    t.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(vocab_size=600, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False),
    )
    t.add_tokens([AddedToken("<tool>", normalized=False)])
    t.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", pair="<|bos|> $A $B", special_tokens=[("<|bos|>", 0)]
    )
    return t


def byte_fallback(prefix: bool) -> Tokenizer:
    """A trained BPE with byte fallback, as Llama 2 (prefix) and Gemma spell it."""
    t = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    steps: list[Any] = [normalizers.Prepend("\u2581")] if prefix else []
    t.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "\u2581")])
    t.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    special = ["<unk>", "<|bos|>", "<|eos|>", *(f"<0x{b:02X}>" for b in range(256)), "<|user|>"]
    words = [w for text in CORPUS for w in text.replace(" ", " \u2581").split(" ")]
    t.train_from_iterator(words, trainers.BpeTrainer(vocab_size=700, special_tokens=special, show_progress=False))
    data = json.loads(t.to_str())
    data["added_tokens"] = [a for a in data["added_tokens"] if not a["content"].startswith("<0x")]
    t = Tokenizer.from_str(json.dumps(data))
    t.add_tokens([AddedToken("<tool>", normalized=False)])
    t.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", pair="<|bos|> $A $B", special_tokens=[("<|bos|>", 1)]
    )
    return t


def word_piece(lowercase: bool, strip_accents: bool | None = None) -> Tokenizer:
    t = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    t.normalizer = normalizers.BertNormalizer(lowercase=lowercase, strip_accents=strip_accents)
    t.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    t.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    t.train_from_iterator(
        CORPUS, trainers.WordPieceTrainer(vocab_size=700, special_tokens=special, show_progress=False)
    )
    t.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return t


GPT = {"bos_token": "<|bos|>", "eos_token": {"content": "<|eos|>", "special": True}, "chat_template": "{{ x }}"}
BERT = {f"{n.lower()}_token": f"[{n}]" for n in ("PAD", "UNK", "CLS", "SEP", "MASK")}
MADE: dict[str, tuple[Callable[[], Tokenizer], dict[str, Any]]] = {
    "gpt-2": (lambda: byte_level("gpt-2"), GPT),
    "llama-bpe": (lambda: byte_level("llama-bpe", ignore_merges=True), GPT),
    "smaug-bpe": (lambda: byte_level("smaug-bpe"), GPT),
    "qwen2": (lambda: byte_level("qwen2", nfc=True), GPT),
    "qwen35": (lambda: byte_level("qwen35", nfc=True), GPT),
    "tekken": (lambda: byte_level("tekken", ignore_merges=True), GPT),
    "gpt-4o": (lambda: byte_level("gpt-4o"), GPT),
    "smollm": (lambda: byte_level("smollm"), GPT),
    "llama 2": (lambda: byte_fallback(True), GPT | {"unk_token": "<unk>"}),
    "gemma": (lambda: byte_fallback(False), GPT | {"unk_token": "<unk>"}),
    "bert uncased": (lambda: word_piece(True), BERT),
    "bert cased": (lambda: word_piece(False), BERT),
    "bert with accents": (lambda: word_piece(True, strip_accents=False), BERT),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each tokenizer as a folder of files."""
    out = {}
    for name, (make, settings) in MADE.items():
        out[name] = folder(tmp_path_factory.mktemp("tokenizer"), make(), settings)
    return out


def folder(path: Path, t: Tokenizer, settings: dict[str, Any]) -> Path:
    t.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


def values(kv: dict[str, tuple[str, Any]]) -> dict[str, Any]:
    return {k: v for k, (_, v) in kv.items()}


def written(path: Path, files: dict[str, bytes]) -> Tokenizer:
    for name, data in files.items():
        (path / name).write_bytes(data)
    return Tokenizer.from_file(str(path / "tokenizer.json"))


@pytest.mark.parametrize("name", MADE)
def test_a_tokenizer_comes_back(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    t = Tokenizer.from_file(str(folders[name] / "tokenizer.json"))
    kv, _ = tokenizer_kv(str(folders[name]), t.get_vocab_size() + 7)
    assert len(kv["tokenizer.ggml.tokens"][1]) == len(kv["tokenizer.ggml.token_type"][1]) == t.get_vocab_size() + 7
    files, _ = tokenizer_files(values(kv) | {"general.architecture": "x", "x.context_length": 77})
    back = written(tmp_path, files)
    fast = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        want = t.encode(text)
        assert back.encode(text).ids == fast(text).input_ids == want.ids, text
        if name.startswith("bert"):  # GGUF has no word for pairs; these are written as BERT has them
            pair = t.encode(text, TEXTS[0])
            assert back.encode(text, TEXTS[0]).ids == pair.ids
            assert back.encode(text, TEXTS[0]).type_ids == pair.type_ids
        plain = t.encode(text, add_special_tokens=False).ids
        assert back.encode(text, add_special_tokens=False).ids == plain
        if not name.startswith("bert"):
            assert back.decode(plain).strip() == t.decode(plain).strip()
    assert fast.model_max_length == 77
    settings = MADE[name][1]
    assert fast.chat_template == settings.get("chat_template")
    for key in ("bos_token", "eos_token", "cls_token", "sep_token", "pad_token", "unk_token", "mask_token"):
        if isinstance(settings.get(key), str):
            assert getattr(fast, key) == settings[key]


@pytest.mark.parametrize("name", MADE)
def test_ids_and_flags_are_those_that_gguf_reads(name: str, folders: dict[str, Path]) -> None:
    """gguf.SpecialVocab reads the same files; its writer's keys and ours must agree."""
    kv, _ = tokenizer_kv(str(folders[name]))
    special = gguf.SpecialVocab(folders[name], load_merges=True)
    keys = {
        "bos": gguf.Keys.Tokenizer.BOS_ID, "eos": gguf.Keys.Tokenizer.EOS_ID, "unk": gguf.Keys.Tokenizer.UNK_ID,
        "sep": gguf.Keys.Tokenizer.SEP_ID, "pad": gguf.Keys.Tokenizer.PAD_ID, "mask": gguf.Keys.Tokenizer.MASK_ID,
    }  # fmt: skip
    for typ, i in special.special_token_ids.items():
        if typ in keys:
            assert kv[keys[typ]] == ("UINT32", i), typ
    assert kv[gguf.Keys.Tokenizer.ADD_BOS] == ("BOOL", special.add_special_token.get("bos", False))
    assert kv[gguf.Keys.Tokenizer.ADD_EOS] == ("BOOL", special.add_special_token.get("eos", False))
    if gguf.Keys.Tokenizer.MERGES in kv:
        assert kv[gguf.Keys.Tokenizer.MERGES][1] == special.merges
    assert kv.get(gguf.Keys.Tokenizer.CHAT_TEMPLATE, (None, None))[1] == special.chat_template


@pytest.mark.parametrize("name", MADE)
def test_the_kind_and_the_types_of_tokens(name: str, folders: dict[str, Path]) -> None:
    kv = values(tokenizer_kv(str(folders[name]), 900)[0])
    kind = "bert" if name.startswith("bert") else "llama" if name in ("llama 2", "gemma") else "gpt2"
    assert kv["tokenizer.ggml.model"] == kind
    assert kv["tokenizer.ggml.pre"] == (name if kind == "gpt2" else "default")
    types = {
        t: gguf.TokenType(k).name
        for t, k in zip(kv["tokenizer.ggml.tokens"], kv["tokenizer.ggml.token_type"], strict=True)
    }
    assert types["[PAD899]"] == "UNUSED"
    if kind == "bert":
        assert {types[t] for t in BERT.values()} == {"CONTROL"}
        assert types["\u2581the"] == "NORMAL"
        assert kv["tokenizer.ggml.normalizer.lowercase"] is (name != "bert cased")
        assert kv["tokenizer.ggml.normalizer.strip_accents"] is (name == "bert uncased")
        return
    assert (types["<|bos|>"], types["<tool>"]) == ("CONTROL", "USER_DEFINED")
    if kind == "llama":
        assert (types["<unk>"], types["<0x0A>"]) == ("UNKNOWN", "BYTE")
        assert kv["tokenizer.ggml.add_space_prefix"] is (name == "llama 2")


# -- SentencePiece -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> sentencepiece.SentencePieceProcessor:
    """A BPE vocabulary with byte fallback that SentencePiece itself has trained, as those of Llama and Mistral are."""
    path = tmp_path_factory.mktemp("sp")
    (path / "corpus.txt").write_text("\n".join(CORPUS), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(path / "corpus.txt"), model_prefix=str(path / "m"), vocab_size=700, model_type="bpe",
        byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
        character_coverage=1.0, minloglevel=2,
    )  # fmt: skip
    return sentencepiece.SentencePieceProcessor(str(path / "m.model"))


def sentencepiece_kv(sp: sentencepiece.SentencePieceProcessor) -> dict[str, Any]:
    """What llama.cpp's converter writes for a tokenizer.model."""
    n = range(sp.vocab_size())
    kind = lambda i: 2 if sp.is_unknown(i) else 3 if sp.is_control(i) else 6 if sp.is_byte(i) else 1  # noqa: E731
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [sp.id_to_piece(i) for i in n],
        "tokenizer.ggml.scores": [sp.get_score(i) for i in n],
        "tokenizer.ggml.token_type": [kind(i) for i in n],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def test_a_file_of_scores_alone_splits_as_sentencepiece(
    processor: sentencepiece.SentencePieceProcessor, tmp_path: Path
) -> None:
    files, notes = tokenizer_files(sentencepiece_kv(processor))
    assert notes == []
    t = written(tmp_path, files)
    for text in (*CORPUS[:5], *TEXTS[:1], *TEXTS[2:5]):
        assert t.encode(text).ids == [1, *processor.encode(text)]
    # and on to GGUF: the same tokens and types, scores of the same order, so no merges are needed
    kv, notes = tokenizer_kv(str(tmp_path))
    again, raw = values(kv), sentencepiece_kv(processor)
    assert notes == []
    assert "tokenizer.ggml.merges" not in again
    for key in ("tokens", "token_type"):
        assert again[f"tokenizer.ggml.{key}"] == raw[f"tokenizer.ggml.{key}"]
    lists = (again["tokenizer.ggml.tokens"], again["tokenizer.ggml.token_type"])
    assert joinable(*lists, again["tokenizer.ggml.scores"]) == joinable(*lists, raw["tokenizer.ggml.scores"])


def test_merges_that_scores_do_not_tell_are_written(folders: dict[str, Path]) -> None:
    """`tokenizers` trains fewer merges than there are pairs of tokens that join to one."""
    kv, notes = tokenizer_kv(str(folders["llama 2"]))
    merges = json.loads((folders["llama 2"] / "tokenizer.json").read_text())["model"]["merges"]
    assert kv["tokenizer.ggml.merges"] == ("ARRAY[STRING]", [" ".join(m) for m in merges])
    assert any("splits some text differently" in n for n in notes)
    rank = ranks([(a, b) for a, b in merges])
    scores = dict(zip(kv["tokenizer.ggml.tokens"][1], kv["tokenizer.ggml.scores"][1], strict=True))
    assert all(scores[token] == -r for token, r in rank.items() if token in scores)


def test_metaspace_is_told_as_a_prefix(folders: dict[str, Path], tmp_path: Path) -> None:
    t = Tokenizer.from_file(str(folders["llama 2"] / "tokenizer.json"))
    t.normalizer = normalizers.Sequence([])
    for scheme, prefix in (("first", True), ("always", True), ("never", False)):
        t.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
        kv, notes = tokenizer_kv(str(folder(tmp_path, t, GPT)))
        assert kv["tokenizer.ggml.add_space_prefix"] == ("BOOL", prefix)
        assert any("already begins with one" in n for n in notes) is prefix
        back = Tokenizer.from_str(tokenizer_files(values(kv))[0]["tokenizer.json"].decode())
        text = TEXTS[0].replace("\n", " ")
        assert back.encode(text).ids == t.encode(text).ids


def test_runs_of_spaces_that_are_tokens(processor: sentencepiece.SentencePieceProcessor) -> None:
    """Gemma's: user-defined in the file, spelled with real spaces, and yet made by merges."""
    kv = sentencepiece_kv(processor)
    n = len(kv["tokenizer.ggml.tokens"])
    for extra, kind in (("  ", 4), ("    ", 4), ("<a b>", 4)):
        kv["tokenizer.ggml.tokens"].append(extra)
        kv["tokenizer.ggml.token_type"].append(kind)
        kv["tokenizer.ggml.scores"].append(-1.0)
    t = Tokenizer.from_str(tokenizer_files(kv)[0]["tokenizer.json"].decode())
    assert n in t.encode("a  b", add_special_tokens=False).ids
    assert n + 1 in t.encode("a    b", add_special_tokens=False).ids
    assert t.encode("a<a b>", add_special_tokens=False).ids[-1] == n + 2


# -- what cannot be said -----------------------------------------------------------------------------------------------


def test_patterns_are_those_of_transformers() -> None:
    for name, split in theirs.GGUF_PRE_TOKENIZER_SPLITS.items():
        if name in BY_NAME:
            assert BY_NAME[name].splits == (split,)
    for p in PRE_TOKENIZERS:
        assert recognized(to_json(p), p.ignore_merges) == (None if p.name == "default" else p)


@pytest.mark.parametrize(
    "node",
    [None, 3, {}, {"type": "Whitespace"}, {"type": "Sequence"}, {"type": "Sequence", "pretokenizers": []},
     {"type": "Split", "pattern": {"Regex": "x"}, "behavior": "Isolated", "invert": False},
     {"type": "Sequence", "pretokenizers": [{"type": "Split", "pattern": {"String": " "}}, {"type": "ByteLevel"}]},
     {"type": "Sequence", "pretokenizers": [{"type": "ByteLevel"}, {"type": "Digits", "individual_digits": True}]}],
)  # fmt: skip
def test_a_pre_tokenizer_without_a_name(node: Any) -> None:
    assert recognized(node, False) is None


def test_an_unknown_pre_tokenizer_is_noted(tmp_path: Path) -> None:
    t = byte_level("gpt-2")
    t.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex("[aeiou]"), "isolated"), pre_tokenizers.ByteLevel(use_regex=False)]
    )
    kv, notes = tokenizer_kv(str(folder(tmp_path, t, GPT)))
    assert kv["tokenizer.ggml.pre"] == ("STRING", "default")
    assert any("pre-tokenizer has no llama.cpp name" in n for n in notes)
    files, notes = tokenizer_files(values(kv))
    assert files.keys() == {"tokenizer.json", "tokenizer_config.json"}
    assert any("default is used" in n for n in notes)


@pytest.mark.parametrize("change", [{"tokenizer.ggml.model": "rwkv"}, {"tokenizer.ggml.pre": "odd"}])
def test_nothing_is_written_for_an_unknown_tokenizer(change: dict[str, str], folders: dict[str, Path]) -> None:
    kv = values(tokenizer_kv(str(folders["gpt-2"]))[0])
    files, notes = tokenizer_files(kv | change)
    assert files == {}
    assert any("no tokenizer is written" in n for n in notes)
    assert tokenizer_files({})[0] == {}


def test_chat_templates_are_copied(folders: dict[str, Path], tmp_path: Path) -> None:
    named = [{"name": "default", "template": "{{ 1 }}"}, {"name": "tool_use", "template": "{% x %}"}]
    t = Tokenizer.from_file(str(folders["gpt-2"] / "tokenizer.json"))
    kv, _ = tokenizer_kv(str(folder(tmp_path, t, GPT | {"chat_template": named})))
    assert kv["tokenizer.chat_template"] == ("STRING", "{{ 1 }}")
    assert kv["tokenizer.chat_template.tool_use"] == ("STRING", "{% x %}")
    assert kv["tokenizer.chat_templates"] == ("ARRAY[STRING]", ["tool_use"])
    files, _ = tokenizer_files(values(kv))
    assert json.loads(files["tokenizer_config.json"])["chat_template"] == named
    folder(tmp_path, t, {"bos_token": "<|bos|>"})
    (tmp_path / "chat_template.jinja").write_text("{{ é }}", encoding="utf-8")
    assert tokenizer_kv(str(tmp_path))[0]["tokenizer.chat_template"] == ("STRING", "{{ é }}")


MODEL: dict[str, Any] = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}
FILE: dict[str, Any] = {"model": MODEL, "added_tokens": [], "pre_tokenizer": {"type": "ByteLevel"}}


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"[" * 100, "nested"),
        (b"[]", "must hold an object"),
        ({}, '"model" must be an object'),
        ({"model": []}, '"model" must be an object'),
        ({"model": {"type": "Unigram", "vocab": []}}, "'Unigram'"),
        (FILE | {"pre_tokenizer": None}, "neither byte-level"),
        (FILE | {"model": MODEL | {"vocab": []}}, '"vocab" must be'),
        (FILE | {"model": MODEL | {"vocab": {"a": "0"}}}, "needs an id"),
        (FILE | {"model": MODEL | {"vocab": {"a": -1}}}, "needs an id"),
        (FILE | {"model": MODEL | {"vocab": {"a": 1 << 30}}}, "needs an id"),
        (FILE | {"model": MODEL | {"vocab": {"a": 0, "b": 0}}}, "same id 0"),
        (FILE | {"model": MODEL | {"merges": 3}}, '"merges" must be'),
        (FILE | {"model": MODEL | {"merges": ["a"]}}, "not two pieces"),
        (FILE | {"model": MODEL | {"merges": [["a", "b", "c"]]}}, "not two pieces"),
        (FILE | {"model": MODEL | {"merges": [["a b", "c"]]}}, "has a space"),
        (FILE | {"added_tokens": {}}, '"added_tokens" a list'),
        (FILE | {"added_tokens": [3]}, "must contain objects"),
        (FILE | {"added_tokens": [{"id": 2}]}, "needs an id"),
        ({"model": {"type": "WordPiece", "vocab": {"a": 0}, "continuing_subword_prefix": "@"}}, "prefix '@'"),
        ({"model": {"type": "WordPiece", "vocab": {"##\u2581a": 0}}}, "would become 'a' in GGUF"),
    ],
)
def test_a_bad_tokenizer_json_is_refused(tmp_path: Path, data: Any, reason: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(data if isinstance(data, bytes) else json.dumps(data).encode())
    with pytest.raises(CheckpointError, match=reason) as e:
        tokenizer_kv(str(tmp_path))
    assert str(path) in str(e.value)


def test_other_bad_folders(tmp_path: Path, folders: dict[str, Path]) -> None:
    with pytest.raises(CheckpointError, match="save_pretrained"):
        tokenizer_kv(str(tmp_path))
    with pytest.raises(CheckpointError, match="but the model has 5"):
        tokenizer_kv(str(folders["gpt-2"]), 5)
    t = Tokenizer.from_file(str(folders["gpt-2"] / "tokenizer.json"))
    folder(tmp_path, t, {"add_eos_token": True})
    with pytest.raises(CheckpointError, match="no eos_token"):
        tokenizer_kv(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text('{"a": NaN}')
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
        tokenizer_kv(str(tmp_path))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tokens": []}, "tokens must be"), ({"tokens": "abc"}, "tokens must be"), ({"tokens": [1]}, "tokens must be"),
        ({"token_type": [1]}, "token_type must be"), ({"token_type": 3}, "token_type must be"),
        ({"scores": [1.0]}, "scores must be"), ({"scores": None}, "scores must be"),
        ({"scores": [float("nan")] * 1000}, "NaN"), ({"merges": ["ab"]}, "not two"), ({"merges": [3]}, "not two"),
        ({"merges": "a b"}, "not two|not a token"), ({"merges": ["zzz yyy"]}, "not a token"),
        ({"bos_token_id": -1}, "bos_token_id must be one"), ({"eos_token_id": 10**6}, "eos_token_id must be one"),
        ({"unknown_token_id": "0"}, "unknown_token_id must be"), ({"add_bos_token": 1}, "add_bos_token must be"),
        ({"add_space_prefix": "no"}, "add_space_prefix must be"), ({"model": 3}, "model must be a string"),
    ],
)  # fmt: skip
def test_metadata_that_contradict_themselves(
    change: dict[str, Any], reason: str, processor: sentencepiece.SentencePieceProcessor
) -> None:
    with pytest.raises(ValueError, match=reason):
        tokenizer_files(sentencepiece_kv(processor) | {f"tokenizer.ggml.{k}": v for k, v in change.items()})


def test_word_piece_needs_an_unknown_token(folders: dict[str, Path]) -> None:
    kv = values(tokenizer_kv(str(folders["bert cased"]))[0])
    del kv["tokenizer.ggml.unknown_token_id"]
    with pytest.raises(ValueError, match="unknown_token_id is required"):
        tokenizer_files(kv)
