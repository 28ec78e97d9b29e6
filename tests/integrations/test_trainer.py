"""transformers.Trainer: its save_model, on a module of anyone and on a transformers model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import pennyweight as pw
from tests.integrations.small import IDS, llama
from tests.integrations.writers import CONFIGS, MODELS, Writer, check, quantized


def trainer(model: nn.Module, folder: Path, **arguments: Any) -> Trainer:
    arguments = {"output_dir": str(folder / "work"), "use_cpu": True, "report_to": [], **arguments}
    return Trainer(model, TrainingArguments(**arguments))


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(IDS).logits


PLAIN = {"save_model": Writer(lambda m, d: trainer(m, d).save_model(str(d / "out")))}
OURS = {
    "save_model": Writer(PLAIN["save_model"].write, lambda d, m: AutoModelForCausalLM.from_pretrained(d / "out")),
    "save_model, pw.load": Writer(PLAIN["save_model"].write, lambda d, m: pw.load(d / "out", m)),
}


@pytest.mark.parametrize("config", ["int8", "int4"])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("writer", PLAIN.values(), ids=PLAIN)
@pytest.mark.filterwarnings("ignore::pennyweight.FallbackWarning")  # safetensors asks for the last element of tied ones
def test_modules_of_anyone(writer: Writer, make: Any, config: str, tmp_path: Path) -> None:
    check(writer, quantized(make, config), quantized(make, config), tmp_path)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("ties", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("writer", OURS.values(), ids=OURS)
def test_transformers_models(writer: Writer, ties: bool, config: str, tmp_path: Path) -> None:
    model = llama(tie_word_embeddings=ties)
    pw.quantize_(model, CONFIGS[config])
    check(writer, model, llama(tie_word_embeddings=ties), tmp_path, logits)


def test_a_model_quantized_in_place_still_trains_what_is_float(tmp_path: Path) -> None:
    """The quantizer that it gets for saving changes nothing about training."""
    model = llama()
    pw.quantize_(model, CONFIGS["int8"])
    before = model.model.norm.weight.detach().clone()
    rows = [{"input_ids": ids, "labels": ids} for ids in IDS]
    work = Trainer(
        model,
        TrainingArguments(
            output_dir=str(tmp_path), use_cpu=True, report_to=[], max_steps=1, learning_rate=0.1, save_strategy="steps",
            save_steps=1, disable_tqdm=True,
        ),
        train_dataset=rows,
    )  # fmt: skip
    work.train()
    assert not torch.equal(model.model.norm.weight, before)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-1")
    assert torch.equal(logits(again), logits(model.eval()))
