"""save_pretrained of transformers models that were quantized in place."""

import copy
import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, BertConfig, BertModel

import pennyweight as pw
from pennyweight.integrations.transformers import attach_quantizer
from pennyweight.integrations.transformers.saving import InPlaceQuantizer
from pennyweight.quantize import save_pretrained
from tests import forked
from tests.integrations.small import IDS, llama
from tests.integrations.writers import CONFIGS, Writer, check


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(IDS)[0]


def read(folder: Path, other: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder)


def again(model: Any, folder: Path) -> Any:
    model.save_pretrained(folder / "again")
    return read(folder / "again", model)


def in_training(model: Any, folder: Path) -> None:
    """The way of training scripts, which hand the state dict over."""
    model.save_pretrained(folder, state_dict=model.state_dict())


WRITERS = {
    "save_pretrained": Writer(lambda m, d: m.save_pretrained(d), read),
    "save_pretrained, shards": Writer(lambda m, d: m.save_pretrained(d, max_shard_size="50KB"), read),
    "save_pretrained, pw.load": Writer(lambda m, d: m.save_pretrained(d), pw.load),
    "save_pretrained twice": Writer(lambda m, d: m.save_pretrained(d), lambda d, m: again(read(d, m), d)),
    "save_pretrained(state_dict=)": Writer(in_training, read),
    "of a deepcopy": Writer(lambda m, d: copy.deepcopy(m).save_pretrained(d), read),
    "attach_quantizer, save_pretrained": Writer(lambda m, d: attach_quantizer(m).save_pretrained(d), read),
    "torch.save of the model": Writer(
        lambda m, d: torch.save(m, d / "m.pt"), lambda d, m: again(torch.load(d / "m.pt", weights_only=False), d)
    ),
}


def whole(ties: bool, config: pw.AOBaseConfig) -> Any:
    model = llama(tie_word_embeddings=ties)
    pw.quantize_(model, config)
    return model


def embeddings_too(ties: bool, config: pw.AOBaseConfig) -> Any:
    model = llama(tie_word_embeddings=ties)
    pw.quantize_(model, config, lambda m, name: isinstance(m, (nn.Linear, nn.Embedding)))
    return model


def frozen(ties: bool, config: pw.AOBaseConfig) -> Any:
    model = whole(ties, config)
    pw.inference.freeze_(model)
    return model


def filled(ties: bool, config: pw.AOBaseConfig, folder: Path) -> Any:
    """A float model that pw.load filled."""
    model = llama(tie_word_embeddings=ties)
    pw.save(whole(ties, config), folder / "ours")
    return pw.load(folder / "ours", model)


MODELS: dict[str, Callable[[bool, pw.AOBaseConfig], Any]] = {
    "linear layers": whole, "embeddings too": embeddings_too, "frozen": frozen,
}  # fmt: skip


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("ties", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_models(make: Any, ties: bool, config: str, tmp_path: Path) -> None:
    check(WRITERS["save_pretrained"], make(ties, CONFIGS[config]), llama(tie_word_embeddings=ties), tmp_path, logits)


@pytest.mark.parametrize("ties", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS)
def test_writers(writer: Writer, ties: bool, tmp_path: Path) -> None:
    check(writer, whole(ties, CONFIGS["int4"]), llama(tie_word_embeddings=ties), tmp_path, logits)


def test_a_model_that_pw_load_filled(tmp_path: Path) -> None:
    model = filled(False, CONFIGS["nf4"], tmp_path)
    check(WRITERS["save_pretrained"], model, llama(), tmp_path / "saved", logits)


PARTS: dict[str, Callable[[Any], nn.Module]] = {
    "inner model": lambda model: model.model, "layer": lambda model: model.model.layers[1].mlp,
}  # fmt: skip


@pytest.mark.parametrize("ties", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
def test_a_model_of_which_quantize_saw_a_part(part: Callable[[Any], nn.Module], ties: bool, tmp_path: Path) -> None:
    """The model around the part cannot be found from there, so it is prepared when it is saved."""
    model = llama(tie_word_embeddings=ties)
    pw.quantize_(part(model), CONFIGS["int8"])
    with torch.no_grad():
        exact = model.model(IDS)[0]
    check(WRITERS["save_pretrained"], model, None, tmp_path / "whole", logits)
    assert isinstance(model.hf_quantizer, InPlaceQuantizer)
    model.model.save_pretrained(tmp_path / "part")
    with torch.no_grad():
        assert torch.equal(AutoModel.from_pretrained(tmp_path / "part")(IDS)[0], exact)
    pw.dequantize_(part(model))
    model.save_pretrained(tmp_path / "float")
    assert "quantization_config" not in json.loads((tmp_path / "float" / "config.json").read_text())


def test_weights_assigned_by_hand_are_saved(tmp_path: Path) -> None:
    model, other = llama(), llama()
    pw.quantize_(other, CONFIGS["nf4"])
    model.model.layers[0].mlp.up_proj.weight = other.model.layers[0].mlp.up_proj.weight
    check(WRITERS["save_pretrained"], model, None, tmp_path, logits)


def test_the_quantizer_changes_nothing_but_saving(tmp_path: Path) -> None:
    model = whole(False, CONFIGS["int8"])
    assert isinstance(model.hf_quantizer, InPlaceQuantizer)
    assert not getattr(model, "is_quantized", False)
    assert not hasattr(model.config, "quantization_config")
    half = model.half()
    assert half.dtype == torch.float16
    model.float().save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert written["config"] == {"type": "Int8WeightOnlyConfig"}
    pw.quantize_(model, CONFIGS["nf4"], lambda m, name: name == "lm_head")
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["quantization_config"]["config"] is None  # by two


@pytest.mark.parametrize("way", ["dequantize_", "model.dequantize", "assigned"])
@pytest.mark.parametrize("loaded", [False, True], ids=["in place", "loaded"])
def test_what_is_float_again_is_saved_as_float(loaded: bool, way: str, tmp_path: Path) -> None:
    model = whole(False, CONFIGS["int8"])
    model.save_pretrained(tmp_path / "quantized")
    model = read(tmp_path / "quantized", model) if loaded else model
    if way == "dequantize_":
        pw.dequantize_(model)
    elif way == "model.dequantize":
        model.dequantize()
    else:
        model.load_state_dict(llama().state_dict(), assign=True)
    model.save_pretrained(tmp_path / "float")
    assert getattr(model, "hf_quantizer", None) is None
    assert "quantization_config" not in json.loads((tmp_path / "float" / "config.json").read_text())
    assert torch.equal(logits(read(tmp_path / "float", None)), logits(model))


def test_models_within_other_modules(tmp_path: Path) -> None:
    """Each outermost model gets a quantizer of its own, and only where it holds quantized weights."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 64}
            self.a, self.b = (BertModel(BertConfig(hidden_size=32, **sizes)).eval() for _ in range(2))

    two = Two()
    pw.quantize_(two, CONFIGS["int8"], lambda m, name: isinstance(m, nn.Linear) and name.startswith("a."))
    assert isinstance(two.a.hf_quantizer, InPlaceQuantizer)
    assert not hasattr(two.b, "hf_quantizer")
    ids = torch.arange(6).view(1, 6)
    for part, name in ((two.a, "a"), (two.b, "b")):
        part.save_pretrained(tmp_path / name)
        with torch.no_grad():
            assert torch.equal(AutoModel.from_pretrained(tmp_path / name)(ids)[0], part(ids)[0])


def test_a_release_that_the_adapter_does_not_fit_is_told_and_quantizes(monkeypatch: pytest.MonkeyPatch) -> None:
    def adapter() -> Any:
        raise ImportError("no such name")

    library = save_pretrained.Library("transformers.modeling_utils", "PreTrainedModel", adapter)
    monkeypatch.setattr(save_pretrained, "LIBRARIES", [library])
    with pytest.warns(UserWarning, match=re.escape("pennyweight.save(model, folder)")):
        model = whole(False, CONFIGS["int8"])
    assert isinstance(model.lm_head.weight, pw.AffineQuantizedTensor)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pw.quantize_(nn.Linear(32, 32), CONFIGS["int8"])


def test_a_plain_module_imports_no_library() -> None:
    code = (
        "import sys, torch, pennyweight as pw; pw.quantize_(torch.nn.Linear(64, 64), pw.Int8WeightOnlyConfig()); "
        "assert not {'transformers', 'diffusers', 'accelerate'} & sys.modules.keys()"
    )
    forked.run(["-c", code], check=True)
