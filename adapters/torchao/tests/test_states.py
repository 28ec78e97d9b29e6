"""torchao's safetensors form: what torchao 0.18 wrote is read, and what we write is the same, names and bytes."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import pennyweight as pw
from pennyweight.core.tensor import AffineQuantizedTensor as QT
from pennyweight.io.codecs.torchao import flattened_safetensors as state
from pennyweight_torchao.prototype.safetensors.safetensors_support import (
    flatten_tensor_state_dict,
    unflatten_tensor_state_dict,
)

FILE = Path(__file__).parents[3] / "tests" / "golden" / "torchao_0.18_states.safetensors"


def stored() -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    with safe_open(FILE, framework="pt") as f:
        return {k: f.get_tensor(k) for k in f.keys()}, dict(f.metadata())  # noqa: SIM118 - it is no mapping


TENSORS, METADATA = stored()
NAMES = [n.removesuffix(".weight") for n in json.loads(METADATA["tensor_names"]) if n.endswith(".weight")]


def test_the_file_is_one_of_torchaos() -> None:
    assert state.is_metadata_torchao(METADATA)
    assert len(NAMES) >= 18
    for broken in ({}, {"tensor_names": "[]"}, {"tensor_names": "[1"}, {"tensor_names": '["a"]'},
                   {"tensor_names": '["a"]', "a": '{"_type": "Mystery"}'}):  # fmt: skip
        assert not state.is_metadata_torchao(broken)


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_read(name: str) -> None:
    found, left = unflatten_tensor_state_dict(TENSORS, METADATA)
    assert left == {}
    w = found[f"{name}.weight"]
    assert type(w) is QT
    assert torch.equal(w.dequantize(), found[f"{name}.value"])


@pytest.mark.parametrize("name", NAMES)
def test_what_is_read_is_written_as_it_was(name: str) -> None:
    """Names, metadata and bytes; scales that were swizzled for a GPU come out plain."""
    found, _ = unflatten_tensor_state_dict(TENSORS, METADATA)
    tensors, metadata = flatten_tensor_state_dict({f"{name}.weight": found[f"{name}.weight"]})
    mine, theirs = json.loads(metadata[f"{name}.weight"]), json.loads(METADATA[f"{name}.weight"])
    if "swizzled" in name or name.startswith("nvfp4"):
        mine["_data"].pop("is_swizzled_scales"), theirs["_data"].pop("is_swizzled_scales")
    assert mine["_type"] == theirs["_type"]
    assert sorted(mine["_tensor_data_names"]) == sorted(theirs["_tensor_data_names"])
    for key, value in theirs["_data"].items():
        assert mine["_data"][key] == value, key
    for key, tensor in tensors.items():
        if "scale" in key and ("swizzled" in name or name.startswith("nvfp4")):
            continue
        assert tensor.dtype == TENSORS[key].dtype, key
        assert tensor.shape == TENSORS[key].shape, key
        assert torch.equal(tensor.view(torch.uint8), TENSORS[key].view(torch.uint8)), key


def test_tensors_that_come_one_by_one() -> None:
    """What is not whole yet is left over, to be given again with the rest."""
    keys = [k for k in TENSORS if k.startswith("int8_row.")]
    part = {k: TENSORS[k] for k in keys if "scale" not in k}
    found, left = unflatten_tensor_state_dict(part, METADATA)
    assert "int8_row.weight" not in found
    assert "int8_row._weight_qdata" in left
    found, left = unflatten_tensor_state_dict({k: TENSORS[k] for k in keys}, METADATA)
    assert "int8_row.weight" in found
    assert left == {}


def test_numbers_that_torchao_has_not_are_refused_by_name() -> None:
    w = QT.from_float(torch.randn(4, 64), pw.QuantSpec(pw.get_format("nf4"), (64,)))
    with pytest.raises(ValueError, match=r"a\.weight: torchao has no tensor class for nf4\[64\].*pennyweight.save"):
        flatten_tensor_state_dict({"a.weight": w})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"_type": "os.system"}, "Unsupported tensor type: os.system"),
        ({"dtype": {"_type": "torch.dtype", "_data": "load"}}, "unknown dtype 'load'"),
        ({"act_quant_kwargs": {"_type": "Popen", "_data": {}}}, "Failed to find class Popen"),
        ({"block_size": [1, 7]}, r"int8_row\.weight: .*does not divide"),
        ({"block_size": [1, 32]}, r"int8_row\.weight: scale is \[32, 1\]; blocks"),
    ],
)
def test_a_file_names_nothing_but_what_is_known(change: dict[str, object], says: str) -> None:
    described = json.loads(METADATA["int8_row.weight"])
    (key,) = change
    (described if key == "_type" else described["_data"])[key] = change[key]
    metadata = {"tensor_names": '["int8_row.weight"]', "int8_row.weight": json.dumps(described)}
    with pytest.raises(ValueError, match=says):
        unflatten_tensor_state_dict(TENSORS, metadata)


@pytest.mark.parametrize(
    "text", ["[]", "{}", "{", '{"_type": "Int8Tensor"}', '{"_type": "Int8Tensor", "_tensor_data_names": 3}']
)
def test_metadata_that_say_nothing_are_an_error_that_names_the_tensor(text: str) -> None:
    with pytest.raises(ValueError, match=r"a\.weight: the metadata does not describe it"):
        unflatten_tensor_state_dict({}, {"tensor_names": '["a.weight"]', "a.weight": text})
