"""Golden outputs: what they keep, what they detect, and that a bad file is refused."""

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import pennyweight as pw
from pennyweight.report import metrics
from tests.report.small import bert, llama, mlp, prompts, quantized


def test_the_same_weights_pass_anywhere() -> None:
    model = llama()
    made = pw.report.golden(model, prompts())
    assert sum(map(len, made.rows)) <= 64
    assert made.values[0].shape[1] == 16
    found = pw.report.verify(copy.deepcopy(model), made).check()
    assert found.kl.max < 1e-6
    assert found.top1 == 1
    assert found.ok
    small = quantized(model)
    exact = pw.report.golden(small, prompts())
    pw.inference.freeze_(small)
    assert pw.report.verify(small, exact).ok


@torch.no_grad()
def test_the_kl_is_that_of_the_top_classes_and_the_rest() -> None:
    model = llama()
    small = quantized(model)
    batch = prompts(1)
    found = pw.report.verify(small, pw.report.golden(model, batch, k=128))
    p, q = (m(**batch[0]).logits[batch[0]["attention_mask"].bool()] for m in (model, small))
    whole = metrics.kl_divergence(p, q)
    assert found.rows == len(whole) == 31
    assert found.kl.mean == pytest.approx(whole.mean().item(), rel=1e-3)
    few = pw.report.verify(small, pw.report.golden(model, batch, k=16))
    assert 0 < few.kl.mean <= found.kl.mean


def test_a_few_kilobytes_and_back(tmp_path: Path) -> None:
    model = llama()
    made = pw.report.golden(model, prompts(), quantized=quantized(model))
    path = made.save(tmp_path)
    assert path == str(tmp_path / "golden.safetensors")
    assert Path(path).stat().st_size < 12_000
    again = pw.report.Golden.load(tmp_path)
    for a, b in ((made.rows, again.rows), (made.values, again.values), (made.indices, again.indices)):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert [d.keys() for d in again.inputs] == [d.keys() for d in made.inputs]
    assert (again.kind, again.width, again.bound) == (made.kind, made.width, made.bound)
    assert pw.report.verify(quantized(model), tmp_path).ok


def test_a_checkpoint_beside_it_loads(tmp_path: Path) -> None:
    model = llama()
    pw.save(quantized(model), tmp_path)
    pw.report.golden(quantized(model), prompts()).save(tmp_path)
    loaded = pw.load(tmp_path, llama())
    assert pw.report.verify(loaded, tmp_path).check().kl.mean < 1e-6
    pw.save(quantized(model), tmp_path)  # a new checkpoint does not take it away
    assert (tmp_path / "golden.safetensors").exists()


def shuffled(w: pw.AffineQuantizedTensor) -> pw.AffineQuantizedTensor:
    """Its codes in the wrong order, as a wrong packing reads them."""
    plain = w.to_layout("plain")
    return plain.with_(codes=plain.codes.reshape(-1, 2).flip(1).reshape(plain.codes.shape).contiguous())


CORRUPTIONS = {
    "nibbles swapped": shuffled,
    "scales doubled": lambda w: w.to_layout("plain").with_(scale=2 * w.scale),
    "an eighth of the rows has no scale": lambda w: w.to_layout("plain").with_(
        scale=torch.cat([torch.zeros_like(w.scale[: len(w) // 8]), w.scale[len(w) // 8 :]])
    ),
    "NaN": lambda w: w.to_layout("plain").with_(scale=w.scale * torch.nan),
}


@pytest.mark.parametrize("how", CORRUPTIONS)
def test_a_corrupted_weight_is_detected(how: str) -> None:
    model = quantized(llama())
    made = pw.report.golden(model, prompts())
    layer = model.model.layers[1].mlp.down_proj
    layer.weight = nn.Parameter(CORRUPTIONS[how](layer.weight.data), requires_grad=False)
    found = pw.report.verify(model, made)
    assert not found.ok
    assert str(found).startswith("NOT as expected: mean KL")
    with pytest.raises(ValueError, match=r"NOT as expected.*a kernel .see pennyweight doctor. or a dtype"):
        found.check()


def test_the_quantized_model_of_a_float_golden() -> None:
    model = llama()
    small = quantized(model)
    sharp = pw.report.golden(model, prompts())
    assert not pw.report.verify(small, sharp).ok
    assert pw.report.verify(small, sharp, bound=10).ok
    made = pw.report.golden(model, prompts(), quantized=small)
    assert pw.report.verify(small, made).ok
    assert made.bound == pytest.approx(2 * pw.report.verify(small, made).kl.mean + 2.5e-4)
    layer = small.model.layers[0].self_attn.o_proj
    layer.weight = nn.Parameter(shuffled(layer.weight.data), requires_grad=False)
    assert not pw.report.verify(small, made).ok


def test_tensors() -> None:
    for model, batches in ((bert(), prompts()), (mlp(), [torch.randn(5, 32)]), (mlp(), [(torch.randn(5, 32),)])):
        made = pw.report.golden(model, batches)
        assert made.kind == "tensor"
        assert pw.report.verify(model, made).error < 1e-5
        broken = copy.deepcopy(model)
        with torch.no_grad():
            next(p for p in reversed(list(broken.parameters())) if p.ndim > 1 and p.shape[0] != 64).mul_(1.1)
            broken.get_submodule("" if isinstance(broken, nn.Sequential) else "encoder.layer.1").apply(
                lambda m: m.weight.mul_(1.1) if isinstance(m, nn.Linear) else None
            )
        assert not pw.report.verify(broken, made).ok


@pytest.mark.parametrize(
    ("batches", "how", "message"),
    [
        ([], {}, "at least one batch"),
        ([{"input_ids": torch.zeros(1, 2, dtype=torch.long), "use_cache": False}], {}, "input 'use_cache' is bool"),
        ([torch.zeros(1, 1 << 18)], {}, "1,048,576 bytes; golden|allow a few prompts"),
        ([torch.zeros(1, 32)], {"k": 0}, "k must be a positive integer, got 0"),
        ([torch.zeros(1, 32)], {"kind": "embeddings"}, "kind must be one of logits, tensor"),
    ],
)
def test_golden_refuses(batches: Any, how: dict, message: str) -> None:
    if how == {} and batches and isinstance(batches[0], torch.Tensor):
        batches = [torch.zeros(1, (1 << 18) + 1)]
    with pytest.raises(ValueError, match=message):
        pw.report.golden(mlp(), batches, **how)


def test_another_architecture_is_told() -> None:
    made = pw.report.golden(mlp(), [torch.ones(4, 32)], kind="logits")
    other = nn.Sequential(nn.Linear(32, 7))
    with pytest.raises(ValueError, match="rows of 7, the golden outputs need rows of 10"):
        pw.report.verify(other, made)


def test_masks_of_zeros() -> None:
    batch = prompts(1)[0]
    batch["attention_mask"].zero_()
    with pytest.raises(ValueError, match="there are no rows to store"):
        pw.report.golden(llama(), [batch])


# -- bad files -------------------------------------------------------------------------------------------------------


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return Path(pw.report.golden(mlp(), [torch.ones(4, 32)], kind="logits").save(tmp_path / "golden.safetensors"))


def rewritten(path: Path, change: Any) -> None:
    from safetensors import safe_open

    with safe_open(path, "pt") as f:
        metadata = f.metadata()
    tensors = load_file(path)
    facts = json.loads(metadata["pennyweight_golden"])
    change(tensors, facts, metadata)
    if "pennyweight_golden" in metadata:
        metadata["pennyweight_golden"] = json.dumps(facts)
    save_file(tensors, path, metadata)


def put(name: str, value: torch.Tensor) -> Any:
    return lambda tensors, facts, metadata: tensors.__setitem__(name, value)


def fact(**values: Any) -> Any:
    return lambda tensors, facts, metadata: facts.update(values)


BAD = [
    (lambda t, f, m: m.pop("pennyweight_golden"), "contains no golden outputs"),
    (fact(version=2), "this release reads version 1"),
    (fact(more=1), "must have exactly"),
    (fact(kind="pickle"), "kind must be one of logits, tensor"),
    (fact(bound=0), "bound a positive number"),
    (fact(bound=True), "bound a positive number"),
    (fact(width=-1), "width must be a whole number from 1"),
    (fact(batches=1 << 40), "batches must be a whole number from 1 to 1024"),
    (fact(batches=2), "rows.1: is missing"),
    (lambda t, f, m: t.pop("input.0.0"), "input.0: is missing"),
    (put("input.0.2", torch.ones(1)), "arguments must be numbered 0 to 1, or be named"),
    (put("input.1.0", torch.ones(1)), "is not an input of one of the 1 batches"),
    (put("input.0.a b", torch.ones(1)), "is not an input of one of the 1 batches"),
    (put("other", torch.ones(1)), "is not an input of one of the 1 batches"),
    (put("rows.0", torch.tensor([-1, 0, 0, 0], dtype=torch.int32)), "must be within the output"),
    (put("rows.0", torch.zeros(3, dtype=torch.int32)), "do not match"),
    (put("rows.0", torch.zeros(4)), "must be torch.int32 of 1 axes"),
    (put("indices.0", torch.full((4, 10), 10, dtype=torch.int32)), "must be within the output"),
    (put("values.0", torch.full((4, 10), torch.nan)), "contains NaN or inf"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_bad_files_are_refused(good: Path, change: Any, message: str) -> None:
    rewritten(good, change)
    with pytest.raises(pw.CheckpointError, match=message):
        pw.report.Golden.load(good)


def test_what_is_no_safetensors_file(tmp_path: Path) -> None:
    with pytest.raises(pw.CheckpointError, match=r"golden.safetensors: cannot be opened"):
        pw.report.Golden.load(tmp_path)
    (tmp_path / "golden.safetensors").write_bytes(b"0123456789abcdef")
    with pytest.raises(pw.CheckpointError, match="not a safetensors file"):
        pw.report.verify(mlp(), tmp_path)


def test_rows_beyond_the_output(good: Path) -> None:
    made = pw.report.Golden.load(good)
    wrong = dataclasses.replace(made, rows=(made.rows[0] + 1,))
    with pytest.raises(ValueError, match="the model returns 4 rows of 10"):
        pw.report.verify(mlp(), wrong)
