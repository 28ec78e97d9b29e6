"""pw.load(verify=True): what is beside the checkpoint is asked, and a wrong figure is told."""

import copy
import dataclasses
import inspect
from pathlib import Path

import pytest
import torch
from torch import nn

import pennyweight as pw
from pennyweight import io
from tests.report.small import llama, prompts, quantized
from tests.report.test_golden import shuffled


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    small = quantized(llama())
    pw.save(small, tmp_path)
    pw.report.golden(small, prompts()).save(tmp_path)
    return tmp_path


def broken(folder: Path) -> None:
    """The checkpoint, with one weight in the wrong order."""
    small = quantized(llama())
    layer = small.model.layers[1].mlp.down_proj
    layer.weight = nn.Parameter(shuffled(layer.weight.data), requires_grad=False)
    pw.save(small, folder)


def test_what_is_right_is_loaded(folder: Path) -> None:
    model = pw.load(folder, llama(), verify=True)
    batch = prompts()[0]
    assert torch.equal(model(**batch).logits, quantized(llama())(**batch).logits)
    assert pw.load(folder / "model.safetensors", llama(), verify=True) is not None


def test_what_is_wrong_is_told_with_the_figure(folder: Path) -> None:
    broken(folder)
    pw.load(folder, llama())
    with pytest.raises(pw.CheckpointError, match=r"mean KL [\d.e-]+ nats is [\d.e+]+ times the bound of 0.00025 over"):
        pw.load(folder, llama(), verify=True)


def test_another_dtype_of_the_same_weights_is_no_error(folder: Path) -> None:
    pw.load(folder, llama(), dtype=torch.bfloat16, verify=True)


def test_a_missing_file_costs_no_loading(tmp_path: Path) -> None:
    pw.save(quantized(llama()), tmp_path)
    model = llama()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(pw.CheckpointError, match=r"has no golden.safetensors .* pw.report.golden"):
        pw.load(tmp_path, model, verify=True)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


def test_outputs_of_another_shape(folder: Path) -> None:
    made = pw.report.Golden.load(folder)
    dataclasses.replace(made, width=made.width + 1).save(folder)
    with pytest.raises(pw.CheckpointError, match=r"rows of 128, the golden .* rows of 129.*another architecture"):
        pw.load(folder, llama(), verify=True)


def test_it_needs_a_model(folder: Path) -> None:
    with pytest.raises(ValueError, match="pass one"):
        pw.load(folder, verify=True)
    assert "lm_head.weight" in pw.load(folder)


def test_one_function_loads_and_verifies() -> None:
    assert pw.load is io.load
    assert "verify" in inspect.signature(pw.load).parameters
