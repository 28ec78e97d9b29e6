"""Calibration of experts in one parameter: each gets the statistics of its own tokens, and is solved with them."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pennyweight as pw
from pennyweight.algorithms.base import ALGORITHMS
from pennyweight.algorithms.calibration.block_order import CalibrationSegment, inference_mode
from pennyweight.algorithms.calibration.collect_statistics import CollectedStatistics
from pennyweight.algorithms.calibration.input_hooks import Expert, InputHooks, expert_modules, without_padding
from pennyweight.algorithms.calibration.loop import BlockStatistics, CalibrationLoop
from pennyweight.algorithms.calibration.statistics import STATISTICS
from pennyweight.algorithms.solve import solve_weight
from pennyweight.planning.run_batch import run_batch
from tests.integrations.mixtures import MIXTURES, mixture

QT = pw.AffineQuantizedTensor
INT4 = pw.Int4WeightOnlyConfig(32)
each = pytest.mark.parametrize("name", MIXTURES)


def tokens(rows: int = 2, length: int = 24, batches: int = 3) -> list[dict[str, Tensor]]:
    g = torch.Generator().manual_seed(1)
    return [{"input_ids": torch.randint(99, (rows, length), generator=g)} for _ in range(batches)]


def stacks(model: nn.Module) -> dict[str, Any]:
    return {n: p for n, p in model.named_parameters() if p.ndim == 3}


def routed(model: nn.Module, name: str, batches: list[dict[str, Tensor]]) -> list[Tensor]:
    """The inputs of each expert of the parameter NAME.gate_up_proj, by the arguments of its module."""
    module, found = model.get_submodule(name), [[] for _ in range(4)]  # type: ignore[var-annotated]

    def before(module: nn.Module, args: Any) -> None:
        x, chosen = args[0], args[1]
        for e, some in enumerate(found):
            some.append(x[(chosen == e).any(-1)])

    with inference_mode(model), module.register_forward_pre_hook(before):
        for batch in batches:
            run_batch(model, batch)
    return [torch.cat(some) for some in found]


def tokens_of(model: nn.Module, name: str, batches: list[dict[str, Tensor]]) -> Tensor:
    """The inputs of a module of experts."""
    found: list[Tensor] = []
    module = model.get_submodule(name)
    with inference_mode(model), module.register_forward_pre_hook(lambda module, args: found.append(args[0])):
        for batch in batches:
            run_batch(model, batch)
    return torch.cat(found)


def statistics(model: nn.Module, batches: Any, needs: Any = ("hessian",), **how: Any) -> dict[str, CollectedStatistics]:
    """Of all experts, without quantizing anything."""
    weights = {id(p): name for name, p in stacks(model).items()}
    found = {}
    for _, seen in CalibrationLoop(model, weights, batches, needs, **how).stages():
        for name in seen:
            it = seen[name]
            found[name] = CollectedStatistics(experts=[it.experts[e] for e in range(len(it.experts))])
    return found


@each
def test_an_expert_has_the_statistics_of_its_own_tokens(name: str) -> None:
    model, batches = mixture(name), tokens()
    found = statistics(model, batches, ("hessian", "absmax"))
    assert found.keys() == stacks(model).keys()
    for parameter, seen in found.items():
        module, _, kind = parameter.rpartition(".")
        inputs = routed(model, module, batches)
        more = 64 if kind == "gate_up_proj" else 0  # as many tokens of all experts as there are inputs
        assert [one.tokens for one in seen.experts] == [len(x) + more for x in inputs]
        if kind == "gate_up_proj":
            every = tokens_of(model, module, batches)
            for one, x in zip(seen.experts, inputs, strict=True):
                assert torch.equal(one.stats["absmax"][0], x.abs().amax(0))
                want = (x.T @ x + 64 * every.T @ every / len(every)) / (len(x) + 64)
                torch.testing.assert_close(one.stats["hessian"][0], want, rtol=1e-4, atol=1e-6)


@each
def test_padding_does_not_count(name: str) -> None:
    model, (batch, *_) = mixture(name), tokens()
    ids = batch["input_ids"]
    padded = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    padded["attention_mask"][1, 15:] = 0
    apart = [{"input_ids": ids[:1]}, {"input_ids": ids[1:, :15]}]
    for parameter, seen in statistics(model, [padded]).items():
        for one, other in zip(seen.experts, statistics(model, apart)[parameter].experts, strict=True):
            assert one.tokens == other.tokens
            if one.tokens:
                torch.testing.assert_close(one.stats["hessian"], other.stats["hessian"], rtol=1e-3, atol=1e-5)


def test_outputs_of_tokens_that_count_are_unchanged_without_padding() -> None:
    model, (batch, *_) = mixture("Qwen3Moe"), tokens()
    mask = torch.ones_like(batch["input_ids"], dtype=torch.bool)
    mask[1, 15:] = False
    padded = batch | {"attention_mask": mask.long()}
    with inference_mode(model):
        want = model(**padded).logits
        with without_padding(expert_modules(model).values(), mask):
            got = model(**padded).logits
        assert torch.equal(model(**padded).logits, want)
    torch.testing.assert_close(got[mask], want[mask], rtol=1e-4, atol=1e-5)
    assert not torch.equal(got[~mask], want[~mask])


def test_hooks_see_single_matrices_only() -> None:
    w, x, seen = nn.Parameter(torch.randn(3, 8, 8)), torch.randn(4, 8), []  # type: ignore[var-annotated]
    hooks = InputHooks({id(w): "w"}, lambda name, x: None, see_expert=lambda e, x: seen.append((e, x)))
    with torch.no_grad(), hooks:
        x @ w[1]
        nn.functional.linear(x, w[torch.tensor(2)])
        x @ w[-1]
        x @ w[0:1][0]
        x @ w[torch.tensor([0, 1])].sum(0)
        x @ w[0, :, :]
        w[True]
    assert [e for e, _ in seen] == [Expert("w", 1, 3), Expert("w", 2, 3), Expert("w", 2, 3)]
    assert all(torch.equal(got[0], x) for _, got in seen)


@pytest.mark.parametrize("algorithm", ["gptq", "auto", "imatrix", "hqq", "mse"])
@each
def test_each_is_solved_as_a_matrix_of_its_own(name: str, algorithm: str) -> None:
    model, batches = mixture(name), tokens()
    solver: Any = ALGORITHMS[algorithm]()
    first = next(iter(stacks(model)))
    flip = name == "GptOss"
    seen = statistics(model, batches, ("hessian", "second_moment"))[first]
    config = pw.FqnToConfig({first: INT4})
    small = copy.deepcopy(model)
    (row,) = pw.quantize_(small, config, calibration=batches, algorithm=algorithm).quantized
    assert (row.error is not None) == (algorithm in ("gptq", "auto"))
    got = small.get_parameter(first).dequantize()
    scheme = next(r.scheme for r in pw.plan(model, config).active)
    assert scheme is not None
    for e, matrix in enumerate(stacks(model)[first].detach()):
        x = matrix.t().contiguous() if flip else matrix
        one = solve_weight(x, scheme, "one", solver=solver, seen=seen.experts[e])
        want = one.weight.dequantize()
        assert torch.equal(got[e], want.t() if flip else want)


@pytest.mark.parametrize("way", ["grouped_mm", "batched_mm", "eager"])
def test_the_implementation_of_experts_does_not_matter(way: str) -> None:
    model, batches = mixture("Qwen3Moe"), tokens()
    want = copy.deepcopy(model)
    want.set_experts_implementation("eager")
    model.set_experts_implementation(way)
    for one in (model, want):
        pw.quantize_(one, INT4, calibration=batches, algorithm="gptq", skip=["lm_head"])
    assert model.config._experts_implementation == way
    for n, w in stacks(model).items():
        assert torch.equal(w.dequantize(), want.get_parameter(n).dequantize())


def test_experts_without_tokens() -> None:
    model = mixture("Qwen3Moe")
    small, nearest = copy.deepcopy(model), copy.deepcopy(model)
    one = [{"input_ids": torch.tensor([[7]])}]  # one token goes to two of four experts
    report = pw.quantize_(small, INT4, calibration=one, algorithm="gptq", skip=["lm_head"])
    pw.quantize_(nearest, INT4, skip=["lm_head"])
    for row in report.quantized:
        if ".experts." in row.name:
            first = row.name.endswith("gate_up_proj")
            how = "solved with the tokens of all experts" if first else "rounded to nearest: no calibration data"
            assert f"2 of 4 experts: {how}" in row.note
            a, b = (m.get_parameter(row.name).dequantize() for m in (small, nearest))
            same = [False] * 4 if first else [False, False, True, True]
            assert sorted(torch.equal(x, y) for x, y in zip(a, b, strict=True)) == same


def test_the_error_on_the_data_is_smaller_than_that_of_nearest() -> None:
    model, batches = mixture("Mixtral"), tokens(4, 48)
    kl = {}
    for algorithm in ("nearest", "gptq", "auto"):
        small = copy.deepcopy(model)
        report = pw.quantize_(small, INT4, calibration=batches, algorithm=algorithm, skip=["lm_head"])
        if algorithm != "nearest":
            assert all(row.error is not None and row.error < 0.8 for row in report.quantized if ".experts." in row.name)
        kl[algorithm] = pw.compare(model, small, batches).kl.mean
    assert kl["auto"] < kl["gptq"] < 0.7 * kl["nearest"]


@pytest.mark.parametrize("algorithm", ["gptq", "gptaq", "auto"])
@pytest.mark.parametrize("limit", ["100 kB", "70 kB", "34 kB"])  # 2 blocks x (attention 36, experts 65 and 16 kB)
def test_statistics_that_exceed_the_limit_take_several_passes(
    algorithm: str, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[int] = []
    made = BlockStatistics.__init__

    def init(self: Any, some: Any, *rest: Any) -> None:
        passes.append(len(some))
        made(self, some, *rest)

    model, batches = mixture("Qwen3Moe"), tokens()
    want, got = copy.deepcopy(model), copy.deepcopy(model)
    pw.quantize_(want, INT4, calibration=batches, algorithm=algorithm, skip=["lm_head"])
    monkeypatch.setattr(BlockStatistics, "__init__", init)
    pw.quantize_(got, INT4, calibration=batches, algorithm=algorithm, skip=["lm_head"], max_ram=limit)
    assert max(passes) > 1
    for (n, a), b in zip(got.named_parameters(), want.parameters(), strict=True):
        assert torch.equal(*(w.dequantize() if isinstance(w, QT) else w for w in (a, b))), n


def test_what_one_expert_needs_must_fit() -> None:
    table, text = (
        pw.FqnToConfig({"*.experts.*": INT4}),
        r"gate_up_proj: the statistics of the inputs of an expert take 32\.8 kB,",
    )
    with pytest.raises(pw.PlanError, match=text):
        pw.quantize_(mixture("Qwen3Moe"), table, calibration=tokens(), algorithm="gptq", max_ram="30 kB")


def test_passes_hold_as_many_as_fit() -> None:
    model = mixture("Qwen3Moe")
    weights = {id(p): n for n, p in model.named_parameters() if p.ndim > 1 and "layers.0" in n and "norm" not in n}
    one = int(STATISTICS["hessian"].init(1, 64)[0].nbytes)  # of 64 inputs; an expert's second matrix has 32
    loop = CalibrationLoop(model, weights, tokens(), ("hessian",), max_ram=3 * one)
    short = {name: name.removeprefix("model.layers.0.") for name in weights.values()}
    names = [n for n in short if "gate.weight" not in n]
    again = {n for n in names if "k_proj" in n or "v_proj" in n}
    passes = loop._passes(names, CalibrationSegment([names], repeated=again, experts=set(stacks(model))))
    assert [{short[n]: part for n, part in some.items()} for some in passes] == [
        {f"self_attn.{x}_proj.weight": None for x in "qkvo"},
        {"mlp.experts.gate_up_proj": range(2)},  # beside the statistics of all tokens
        {"mlp.experts.gate_up_proj": range(2, 4)},
        {"mlp.experts.down_proj": None},
    ]  # fmt: skip


@pytest.mark.parametrize("method", ["wanda", "sparsegpt"])
def test_each_is_pruned_by_its_own_inputs(method: str) -> None:
    model, batches = mixture("Qwen3Moe"), tokens()
    by_data, by_magnitude = copy.deepcopy(model), copy.deepcopy(model)
    report = pw.sparsify_(by_data, method, calibration=batches)
    pw.sparsify_(by_magnitude, "magnitude")
    assert all(row.note == "" for row in report.rows if ".experts." in row.name)
    for n, w in stacks(by_data).items():
        assert (w == 0).float().mean() >= 0.5
        assert not torch.equal(w, by_magnitude.get_parameter(n))
    loss = [pw.compare(model, m, batches).kl.mean for m in (by_data, by_magnitude)]
    assert loss[0] < loss[1]


class Stack(nn.Module):
    """Multiplies a whole stack of matrices at once."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, 64, 64) / 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(torch.bmm(x, self.up))


class Grouped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(64, 64, 1, groups=2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.conv(x.mT)).mT


@pytest.mark.parametrize("kind", [Stack, Grouped])
def test_matrices_that_are_not_called_one_by_one_are_collected_whole(kind: type[nn.Module]) -> None:
    """Their statistics, [G, K, K], fit or are refused: parts of them would be those of no data."""
    torch.manual_seed(0)
    model, batches = nn.Sequential(kind(), kind()), [torch.randn(3, 40, 64) for _ in range(2)]
    name = "up" if kind is Stack else "conv"
    config = pw.FqnToConfig({f"*.{name}": pw.ContractedAxis(INT4) if kind is Stack else INT4})
    whole = 3 * 64**2 * 4 if kind is Stack else 2 * 32**2 * 4
    run = partial(pw.quantize_, config=config, calibration=batches, algorithm="gptq")
    with pytest.raises(pw.PlanError, match=rf"0\.{name}.*: the statistics of its inputs take"):
        run(copy.deepcopy(model), max_ram=whole - 1)
    report = run(copy.deepcopy(model), max_ram=whole)
    assert all(row.error is not None and row.error < 1 for row in report.quantized)


def test_scales_that_span_experts_are_said() -> None:
    model = mixture("Qwen3Moe")
    name = next(iter(stacks(model)))
    report = pw.quantize_(model, pw.FqnToConfig({name: "nvfp4"}), calibration=tokens(), algorithm="gptq")
    assert "rounded to nearest: its scales or its table span experts" in report.quantized[0].note
