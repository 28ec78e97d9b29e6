"""safetensors and huggingface_hub: what writes tensors from their memory refuses quantized ones."""

import re
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from huggingface_hub import load_torch_model, save_torch_model, save_torch_state_dict
from huggingface_hub.serialization._torch import get_torch_storage_id

import pennyweight as pw
from pennyweight.core.storage import REFUSAL
from tests.integrations.writers import CONFIGS, MODELS, Writer, X, check_on_models, forward, pair, quantized, tied


def flat(model: Any, folder: Path) -> None:
    tensors, metadata = pw.io.flatten(model.state_dict())
    safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata)


def by_hub(folder: Path, model: Any) -> Any:
    load_torch_model(model, folder, safe=False, weights_only=True)
    return model


WRITERS = {
    "safetensors.save": Writer(lambda m, d: (d / "a.safetensors").write_bytes(safetensors.torch.save(m.state_dict()))),
    "safetensors.save_file": Writer(lambda m, d: safetensors.torch.save_file(m.state_dict(), d / "a.safetensors")),
    "safetensors.save_model": Writer(lambda m, d: safetensors.torch.save_model(m, d / "a.safetensors")),
    "huggingface_hub.save_torch_state_dict": Writer(lambda m, d: save_torch_state_dict(m.state_dict(), d)),
    "huggingface_hub.save_torch_model": Writer(save_torch_model),
    "huggingface_hub.save_torch_model, pickle": Writer(
        lambda m, d: save_torch_model(m, d, safe_serialization=False), by_hub
    ),
    "pw.io.flatten, safetensors.save_file": Writer(flat, lambda d, m: pw.load(d / "model.safetensors", m)),
    "pw.save": Writer(pw.save, pw.load),
    "torch.save": Writer(
        lambda m, d: torch.save(m.state_dict(), d / "a.pt"),
        lambda d, m: (m.load_state_dict(torch.load(d / "a.pt", weights_only=True), assign=True), m)[1],
    ),
}


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS)
@pytest.mark.filterwarnings("ignore::pennyweight.FallbackWarning")  # safetensors asks for the last element of tied ones
def test_writers(writer: Writer, make: Any, config: str, tmp_path: Path) -> None:
    check_on_models(writer, make, config, tmp_path)


@pytest.mark.parametrize("config", CONFIGS)
def test_distinct_weights_are_not_shared_and_tied_ones_are(config: str) -> None:
    from accelerate.utils.modeling import id_tensor_storage as of_accelerate
    from transformers.pytorch_utils import id_tensor_storage as of_transformers

    two, one = quantized(pair, config).state_dict(), quantized(tied, config).state_dict()
    for identify in (of_accelerate, of_transformers, get_torch_storage_id, lambda t: t.data_ptr()):
        assert len({identify(t) for t in two.values()}) == 4
        assert identify(one["0.weight"]) == identify(one["1.weight"]) != identify(one["2.weight"])
    assert sorted(map(sorted, safetensors.torch._find_shared_tensors(two))) == [[name] for name in sorted(two)]


def test_reading_into_quantized_weights_without_their_addresses(tmp_path: Path) -> None:
    """load_model compares addresses with those of storages; load_state_dict does not."""
    torch.manual_seed(7)
    exact = pair()
    safetensors.torch.save_model(exact, tmp_path / "float.safetensors")
    model = quantized(pair, "int8")
    with pytest.raises(RuntimeError, match=re.escape(REFUSAL)):
        safetensors.torch.load_model(model, tmp_path / "float.safetensors")
    assert torch.equal(pw.load(tmp_path / "float.safetensors", model)(X), exact(X))
    model = quantized(pair, "int8")
    model.load_state_dict(safetensors.torch.load_file(tmp_path / "float.safetensors"))
    assert torch.equal(forward(model), forward(quantized(pair, "int8")))
