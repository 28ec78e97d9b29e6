"""accelerate's hooks move and hold quantized weights like any others."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, cpu_offload, dispatch_model, init_empty_weights, load_checkpoint_and_dispatch
from accelerate.utils import set_module_tensor_to_device
from transformers import LlamaForCausalLM

import pennyweight as pw
from tests.integrations.small import IDS, assert_same_weights, float_folder, llama, shape

CONFIGS = {"int8": pw.Int8WeightOnlyConfig(), "int4": pw.Int4WeightOnlyConfig(32), "nf4": pw.NF4WeightOnlyConfig()}


@pytest.fixture(params=CONFIGS)
def model(request: pytest.FixtureRequest) -> Any:
    model = llama()
    pw.quantize_(model.model, CONFIGS[request.param])
    return model


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(IDS).logits


def test_cpu_offload(model: Any) -> None:
    """The weights wait on the meta device, and come for each layer's turn."""
    expected = logits(model)
    moved = cpu_offload(copy.deepcopy(model), execution_device=torch.device("cpu"))
    assert all(p.is_meta for p in moved.parameters())
    assert torch.equal(logits(moved), expected)
    assert all(p.is_meta for p in moved.parameters())


def test_dispatch_model(model: Any) -> None:
    places = dict.fromkeys(["model.embed_tokens", "model.layers", "model.norm", "model.rotary_emb", "lm_head"], "cpu")
    moved = dispatch_model(copy.deepcopy(model), places, main_device="cpu", force_hooks=True)
    assert torch.equal(logits(moved), logits(model))


def test_a_tensor_is_put_where_another_was(model: Any) -> None:
    moved = copy.deepcopy(model)
    name = "model.layers.0.mlp.up_proj.weight"
    set_module_tensor_to_device(moved, name, "cpu", value=model.get_parameter(name))
    assert isinstance(moved.get_parameter(name), pw.AffineQuantizedTensor)
    assert_same_weights(moved, model)


def test_models_made_without_weights_are_filled(model: Any, tmp_path: Path) -> None:
    pw.save(model, tmp_path / "ours")
    with init_empty_weights():
        empty = LlamaForCausalLM(shape())
    assert_same_weights(pw.load(tmp_path / "ours", empty), model)
    assert torch.equal(logits(empty.eval()), logits(model))

    with init_empty_weights():
        empty = LlamaForCausalLM(shape())
    loaded = load_checkpoint_and_dispatch(empty, str(float_folder(tmp_path / "float")), device_map={"": "cpu"})
    pw.quantize_(loaded.model, pw.Int8WeightOnlyConfig())
    assert torch.isfinite(logits(loaded)).all()


def test_accelerator_prepares(model: Any) -> None:
    prepared = Accelerator(cpu=True).prepare(copy.deepcopy(model))
    assert torch.equal(logits(prepared), logits(model))
