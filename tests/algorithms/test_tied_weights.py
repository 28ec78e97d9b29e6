"""Weights that a model multiplies and looks rows up in, or multiplies in several layers."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pennyweight as pw
from pennyweight.algorithms import ALGORITHMS, Rewrite
from pennyweight.algorithms.calibration.input_hooks import InputHooks
from pennyweight.algorithms.calibration.loop import CalibrationLoop
from pennyweight.algorithms.tied_weights import lookup_ratio
from pennyweight.planning.config_resolution import PlanError
from tests.algorithms.tied_models import (
    VOCABULARY,
    WIDTH,
    HeadlessLM,
    both,
    error,
    text,
    tied_llama,
    tied_lm,
)

INT4 = pw.UIntXWeightOnlyConfig(torch.uint4, 32)
SLACK = 1.02  # the choice is made on held-out calibration data, and measured here on other text
FEW = text(4)  # fewer tokens than the table has inputs: what is solved for one reader alone is worst for the other
TEST = text(6, 16, 32, seed=7)


@cache
def model_of(kind: str) -> Any:
    return {"tied": tied_lm, "headless": lambda: tied_lm(HeadlessLM), "llama": tied_llama}[kind]()


def table(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Embedding)


def quantized(
    kind: str, algorithm: Any, batches: list[Tensor] | None = None, which: Any = both
) -> tuple[Any, Any]:  # fmt: skip
    model = copy.deepcopy(model_of(kind))
    return model, pw.quantize_(model, INT4, which, calibration=FEW if batches is None else batches, algorithm=algorithm)


@cache
def nearest(kind: str, which: Any = both) -> float:
    return error(quantized(kind, "nearest", which=which)[0], model_of(kind), TEST)


# What an algorithm needs to be tried on a tied model; {name: (recipe, why it is not the name alone)}
RECIPES: dict[str, tuple[Any, str]] = {
    "bias": (["gptq", "bias"], "alone it follows round-to-nearest, which solves nothing"),
    "tune": (["gptq", "tune"], "as bias"),
    "distill": (["gptq", {"distill": {"steps": 40}}], "as bias; and time"),
    "reconstruct": (["gptq", {"reconstruct": {"steps": 20}}], "as bias; and time"),
}

# What does not apply to a language model, by what it says
REFUSES = {"fold": "no batch norm"}


@pytest.mark.parametrize("where", ["in memory", "on disk"])
@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_no_algorithm_is_worse_than_nearest_on_a_tied_model(name: str, where: str, tmp_path: Path) -> None:
    if name in REFUSES:
        with pytest.raises(PlanError, match=REFUSES[name]):
            quantized("llama", name)
        return
    kind = "llama" if issubclass(ALGORITHMS[name], Rewrite) else "tied"
    # alone the table is not helped by what the others gain; a reconstruction needs weights in blocks
    for which in (both,) if kind == "llama" or name == "reconstruct" else (both, table):
        model, _ = quantized(kind, RECIPES.get(name, (name, ""))[0], which=which)
        if where == "on disk":
            pw.save(model, tmp_path / which.__name__)
            model = pw.load(tmp_path / which.__name__, copy.deepcopy(model_of(kind)))
        assert error(model, model_of(kind), TEST) <= nearest(kind, which) * SLACK


# -- the two readers of a table ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tied", "headless"])
@pytest.mark.parametrize("solver", ["gptq", "auto"])
def test_the_table_alone_is_better_than_nearest(kind: str, solver: str) -> None:
    """Also of a model that multiplies the table of its embedding in its own forward: one place, two readers."""

    def found(algorithm: str) -> tuple[float, Any]:
        model = copy.deepcopy(model_of(kind))
        report = pw.quantize_(
            model, INT4, lambda m, name: name == "embed", calibration=FEW, algorithm=algorithm
        )  # fmt: skip
        return error(model, model_of(kind), TEST), report.quantized[0]

    rounded, (solved, row) = found("nearest")[0], found(solver)
    assert solved < 0.99 * rounded
    assert "solved for its products and lookups; held-out divergence" in row.note  # the products alone lose here


class Readers(nn.Module):
    """Output: the looked-up rows beside the products, so that both errors are known by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 12)

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        return torch.cat([self.embed(ids), F.linear(x, self.embed.weight)], -1)


def test_the_ratio_by_hand() -> None:
    torch.manual_seed(0)
    model = Readers()
    w = model.embed.weight.detach()
    rounded = w + 0.01 * torch.randn_like(w)
    ids, x = torch.randint(20, (50,)), torch.randn(50, 12) @ torch.randn(12, 12)
    d = (rounded - w).double()
    hessian = (x.T @ x / 50).unsqueeze(0)
    ratio = lookup_ratio(model, model.embed.weight, rounded, {"hessian": hessian}, [(ids, x)])
    # the squared error of the lookups is ratio |D|^2, when that of the products is tr(D H D^T)
    assert ratio * float(d.square().sum()) == pytest.approx(float(d[ids].square().sum()) / 50, rel=1e-4)
    assert torch.equal(model.embed.weight, w)


def test_one_sample_leaves_nothing_to_compare_with() -> None:
    model, report = quantized("tied", "gptq", [FEW[0][:1]])
    row = next(row for row in report.rows if row.name == "embed.weight")
    assert "rounded to nearest: looked up too, and one sample" in row.note
    plain = quantized("tied", "nearest")[0]
    assert torch.equal(model.embed.weight.dequantize(), plain.embed.weight.dequantize())


def test_a_table_that_gets_worse_on_held_out_data_is_rounded_to_nearest() -> None:
    """ "mse" needs no data. With data its table is compared, and clipping does not help this model."""
    model, report = quantized("llama", "mse")
    plain = quantized("llama", "nearest")[0]
    assert "rounded to nearest: looked up too, held-out divergence" in report.rows[0].note
    assert torch.equal(*(m.model.embed_tokens.weight.dequantize() for m in (model, plain)))
    assert not torch.equal(*(m.model.layers[0].mlp.up_proj.weight.dequantize() for m in (model, plain)))


def test_a_frozen_table_is_solved_too_and_stays_tied() -> None:
    model = copy.deepcopy(model_of("tied"))
    model.embed.weight.requires_grad_(False)
    pw.quantize_(model, INT4, both, calibration=FEW, algorithm="gptq")
    assert model.embed.weight is model.head.weight
    assert torch.equal(model.embed.weight.dequantize(), quantized("tied", "gptq")[0].embed.weight.dequantize())


def test_a_table_of_two_embeddings_is_rounded_to_nearest() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.out = nn.Embedding(20, 32), nn.Embedding(20, 32), nn.Linear(32, 8)
            self.b.weight = self.a.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.out(self.a(ids) + self.b(ids.flip(-1)))

    model = Pair()
    was = model.a.weight.detach().clone()
    report = pw.quantize_(
        model, INT4, both, calibration=[torch.randint(20, (4, 6)) for _ in range(4)], algorithm="gptq"
    )  # fmt: skip
    assert "no calibration data" in report.rows[0].note
    plain = nn.Sequential(nn.Embedding(20, 32, _weight=was))
    pw.quantize_(plain, INT4, both)
    assert torch.equal(model.a.weight.dequantize(), plain[0].weight.dequantize())


def test_search_measures_tables_that_are_solved_for_both() -> None:
    model = model_of("tied")
    candidates = [pw.UIntXWeightOnlyConfig(bits, 32) for bits in (torch.uint3, torch.uint4, torch.uint5)]
    bits = 8 * quantized("tied", "nearest")[0].embed.weight.nbytes / (VOCABULARY * WIDTH)
    found = pw.search(model, FEW, f"{bits} bpw", candidates=candidates, filter_fn=both)
    mixed = copy.deepcopy(model)
    pw.quantize_(mixed, found.config, calibration=FEW, algorithm="gptq")
    assert error(mixed, model, TEST) <= nearest("tied") * SLACK


@pytest.mark.parametrize("kind", ["tied", "headless"])
def test_improve_is_not_worse_than_before(kind: str) -> None:
    model = quantized(kind, "nearest")[0]
    report = pw.algorithms.improve(model, model_of(kind), FEW)
    assert error(model, model_of(kind), TEST) < nearest(kind)
    row = next(row for row in report.rows if row.name == "embed.weight")
    assert "products and lookups; held-out divergence" in row.note


def test_a_file_is_rounded_as_the_model_is(tmp_path: Path) -> None:
    """Without data there is one rule for both readers; on disk the table is stored once."""
    pw.save(model_of("tied"), tmp_path / "float")
    pw.quantize_checkpoint(tmp_path / "float", tmp_path / "int4", pw.FqnToConfig({"embed": INT4, "blocks.*": INT4}))
    model = pw.load(tmp_path / "int4", copy.deepcopy(model_of("tied")))
    assert model.head.weight is model.embed.weight
    assert torch.equal(model.embed.weight.dequantize(), quantized("tied", "nearest")[0].embed.weight.dequantize())


def test_rotate_measures_both_tables_that_it_unties() -> None:
    """Its held-out check is of the model that follows: with the head quantized, which has a name of its own then."""
    model, report = quantized("llama", {"rotate": {"held_out": 0.5}})
    untied = model.lm_head.weight is not model.model.embed_tokens.weight
    assert untied == any(note.startswith("rotated") for note in report.notes)
    assert error(model, model_of("llama"), TEST) <= nearest("llama") * SLACK


# -- several layers with one weight ------------------------------------------------------------------------------------


class SharedBlocks(nn.Module):
    """Two blocks and an output layer that multiply one weight, on inputs of different directions."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.Tanh()) for _ in range(2))
        self.out = nn.Linear(32, 32)
        self.blocks[1][1].weight = self.out.weight = self.blocks[0][1].weight

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def test_a_weight_of_several_layers_is_solved_for_the_inputs_of_all() -> None:
    torch.manual_seed(0)
    model, batches = SharedBlocks().eval(), [torch.randn(16, 32) * torch.logspace(0, -2, 32) for _ in range(4)]
    weight = model.out.weight
    seen: list[Tensor] = []
    with torch.no_grad(), InputHooks({id(weight): "w"}, lambda name, x: seen.append(x[0])):
        for batch in batches:
            model(batch)
    x = torch.cat(seen)
    stages = list(CalibrationLoop(model, {id(weight): "blocks.0.1.weight"}, batches, ("hessian",)).stages())
    ((names, found),) = stages
    assert names == ["blocks.0.1.weight"]
    assert found[names[0]].tokens == len(x) == 3 * 64
    torch.testing.assert_close(found[names[0]].stats["hessian"][0], x.T @ x / len(x))


def test_a_weight_of_two_layers_of_one_block_stays_with_its_block() -> None:
    torch.manual_seed(0)

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)
            self.b.weight = self.a.weight

        def forward(self, x: Tensor) -> Tensor:
            return x + self.b(torch.tanh(self.a(x)))

    model, batches = nn.Sequential(Twice(), Twice()).eval(), [torch.randn(16, 32) for _ in range(4)]
    weights = {id(model[i].a.weight): f"{i}.a.weight" for i in range(2)}
    stages = list(CalibrationLoop(model, weights, batches, ("hessian", "drift")).stages())
    assert [names for names, _ in stages] == [["0.a.weight"], ["1.a.weight"]]
    assert [found[names[0]].tokens for names, found in stages] == [128, 128]
    assert all("drift" in found[names[0]].stats for names, found in stages)
