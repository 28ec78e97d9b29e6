"""transformers loads the files of cases.py without Pennyweight's help, and computes with the weights that they mean."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.engines.cases import BFLOAT16, CASES, HIGH, LOW, write_case
from tests.engines.decode import decode

pytest.importorskip("compressed_tensors", "0.20", reason="docs/serving.md is about compressed-tensors 0.20")
ENGINE = LOW if transformers.__version__.startswith("5.10.") else HIGH
# Largest error of a layer's output, relative to its largest element, where inputs are rounded
ROUNDED = {"ct-w8a8-static": 0.2, "ct-fp8": 0.05, "ct-float8-dynamic": 0.05, "ct-float8-int4": 0.05}


@pytest.mark.filterwarnings("ignore")  # theirs
@pytest.mark.parametrize("name", CASES)
def test_it_loads_and_computes_with_the_stored_weights(name: str, tmp_path: Path) -> None:
    folder = write_case(tmp_path, name)
    dtype = torch.bfloat16 if name in BFLOAT16 or name == "fp8-block" else torch.float32

    def load() -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()

    refused = CASES[name].refused.get(ENGINE)
    if refused is not None:
        with pytest.raises((ImportError, RuntimeError, AttributeError), match=refused):
            load()(torch.arange(8)[None])
        return
    model, weights = load(), decode(folder)
    model(torch.arange(8)[None])  # compressed-tensors decompresses at the first call
    checked = 0
    for layer, module in model.named_modules():
        weight = weights.get(f"{layer}.weight")
        if weight is None or weight.ndim != 2 or "embed" in layer:
            continue
        x = torch.randn(4, weight.shape[1]).to(dtype)
        with torch.no_grad():
            y, expected = module(x).float(), x.float() @ weight.T
        loose = dtype is torch.bfloat16 or any(word in name for word in ("w8a8", "8da4w", "two-", "first-", "float-a"))
        limit = ROUNDED.get(name, 0.03 if loose else 1e-5)
        assert float((y - expected).abs().max()) <= limit * float(expected.abs().max()), layer
        checked += 1
    assert checked == 15
