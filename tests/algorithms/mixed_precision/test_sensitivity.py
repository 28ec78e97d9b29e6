"""Losses by weight: block by block or by whole runs the same bits, in memory or in files, from the start or resumed."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import pennyweight as pw
from pennyweight.algorithms.calibration import disk_offload
from pennyweight.algorithms.calibration.block_order import inference_mode
from pennyweight.algorithms.mixed_precision import sensitivity
from pennyweight.algorithms.mixed_precision.latency import CallTimer
from pennyweight.algorithms.mixed_precision.search import search
from pennyweight.algorithms.mixed_precision.sensitivity import Sensitivities, Trials
from pennyweight.algorithms.solvers.gptq import GPTQ
from pennyweight.algorithms.tuners import losses
from pennyweight.core.spec import QuantSpec
from pennyweight.planning.config_resolution import PlanError
from pennyweight.planning.plan import plan
from tests.algorithms.models import blocks_only, llama, padded_tokens, small_llama, t5, tokens

FEW = [pw.SpecConfig(QuantSpec(pw.get_format(f"int{b}"), (32,), torch.float16)) for b in (2, 4)]
LARGEST = (7 + 4 * GPTQ().copies) * 128 * 64 + 12 * 128**2  # of llama(): its widest layer while it is solved
MODULE = import_module("pennyweight.algorithms.mixed_precision.search")  # its name in the package is the function's


class Layer(nn.Module):
    """A block with a choice of how it is connected."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.up, self.down = kind, nn.Linear(32, 48), nn.Linear(48, 32)

    def forward(self, x: Tensor, scale: Any = None) -> Any:
        y = self.down(torch.tanh(self.up(x)))
        y = y if scale is None else y * scale
        if self.kind == "writes into its inputs":
            return x.add_(y)
        return (x + y, y.mean()) if self.kind == "returns two" else (x + y, "done") if self.kind == "says" else x + y


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.first = kind, nn.Linear(32, 32)
        self.layers, self.last = nn.ModuleList([Layer(kind) for _ in range(3)]), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        x, middle, scale = self.first(x), 0.0, None
        for i, layer in enumerate(self.layers):
            out = layer(x) if scale is None else layer(x, scale)
            x = out[0] if isinstance(out, tuple) else out
            if self.kind == "reads the middle" and i == 1:
                middle = x.square()
            if self.kind == "scales by the middle":
                scale = x.abs().mean()
        return self.last(x + middle)


KINDS = {
    "plain": True, "says": True, "writes into its inputs": True, "returns two": False, "reads the middle": False,
    "scales by the middle": False,
}  # fmt: skip


def gemma() -> Any:
    """Its blocks get two kinds of masks."""
    config = transformers.Gemma3TextConfig(
        vocab_size=40, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, sliding_window=8,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )  # fmt: skip
    return transformers.Gemma3ForCausalLM(config).eval()


def moe() -> Any:
    config = transformers.Qwen3MoeConfig(
        vocab_size=40, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    return transformers.Qwen3MoeForCausalLM(config).eval()


def net(kind: str) -> Callable[[], nn.Module]:
    return lambda: Net(kind).eval()


def pairs() -> list[Any]:
    return [{**batch, "decoder_input_ids": batch["input_ids"][:, :5]} for batch in padded_tokens()]


def vectors() -> list[Tensor]:
    torch.manual_seed(3)
    return [torch.randn(n, 32) for n in (5, 9, 2)]


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], list[Any]], bool]] = {
    **{kind: (net(kind), vectors, alone) for kind, alone in KINDS.items()},
    "llama": (small_llama, padded_tokens, True), "gemma": (gemma, padded_tokens, True),
    "moe": (moe, padded_tokens, True),
    "bfloat16": (lambda: small_llama().bfloat16(), padded_tokens, True), "t5": (t5, pairs, False),
}  # fmt: skip


@pytest.mark.parametrize("room", [None, 1.0, 40_000.0])
@pytest.mark.parametrize("kind", MODELS)
def test_blocks_have_the_bits_of_whole_runs(
    kind: str, room: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, data, alone = MODELS[kind]
    torch.manual_seed(0)
    model, batches = make(), data()
    rows = plan(model, FEW[0], lambda m, name: isinstance(m, nn.Linear) or name.endswith("experts")).active
    trials = {}
    with torch.no_grad():
        for row in rows:
            tensor: Any = row.tensor
            values = [tensor * 1.1, tensor.round(decimals=1)]
            trials[row.name] = Trials(row.places, [lambda v=v: v for v in values])
        before = {name: p.clone() for name, p in model.named_parameters()}
        with inference_mode(model):
            measure = losses.divergence(
                None, model(**batches[0]) if isinstance(batches[0], dict) else model(batches[0])
            )
        run = Sensitivities(model, batches, measure, None if room is None else tmp_path, room)
        whole = {name: [run.whole({name: places}, {name: v()}) for v in vs] for name, (places, vs) in trials.items()}
        runs: list[str] = []
        spied = run.whole
        monkeypatch.setattr(run, "whole", lambda places, w: (runs.extend(places), spied(places, w))[1])
        found = dict(run.each(trials))
    assert found == whole
    assert all(loss != 0 for some in found.values() for loss in some)
    blocks = {name for name in trials if ".layers." in f".{name}" or "block" in name}
    assert bool(blocks.isdisjoint(runs)) is alone
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert not list(tmp_path.iterdir())
    assert not any("forward" in m.__dict__ for m in model.modules())


def found(**more: Any) -> pw.algorithms.Search:
    return search(llama(3), tokens(4), "3.5 bpw", candidates=FEW, filter_fn=blocks_only, **more)


def same(a: Any, b: Any) -> bool:
    return a == b and a.table == b.table and a.chosen == b.chosen


@pytest.fixture(scope="module")
def in_memory() -> Any:
    return found()


def test_a_search_in_files_is_that_in_memory(in_memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_offload, "SMALL", 0)
    assert same(found(max_memory="1 GB"), in_memory)
    assert same(found(max_memory="1 GB", resume=tmp_path), in_memory)
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".search"}
    batches = tokens(4)
    dynamic = {"candidates": ["int8-dynamic", *FEW], "filter_fn": blocks_only}  # its weights are packed to run
    want = search(llama(), batches, "5 bpw", **dynamic)
    assert same(search(llama(), batches, "5 bpw", **dynamic, max_memory="1 GB"), want)


class _Stopped(Exception):
    pass


@pytest.mark.parametrize("stop", [1, 9, 21, 22, 30, 42])
def test_a_stopped_search_goes_on(in_memory: Any, stop: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """21 weights are solved, then measured; those of a block together."""

    def advance(done: int, total: int, name: str) -> None:
        seen.append(name)
        if len(seen) == stop:
            raise _Stopped

    seen: list[str] = []
    with pytest.raises(_Stopped):
        found(max_memory="1 GB", resume=tmp_path, progress=advance)
    solved: list[str] = []
    whole = MODULE.solve_in_model
    monkeypatch.setattr(
        MODULE, "solve_in_model", lambda model, row, *a: (solved.append(row.name), whole(model, row, *a))[1]
    )
    assert same(found(max_memory="1 GB", resume=tmp_path), in_memory)
    assert len(solved) == 2 * (21 - min(stop, 21))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MODULE, "solve_in_model", None)
        patch.setattr(sensitivity, "run_block", None)
        other = search(llama(3), tokens(4), "3 bpw", candidates=FEW, filter_fn=blocks_only, resume=tmp_path)
    assert other.config == in_memory.within("3 bpw").config
    with pytest.raises(PlanError, match="of another run: recipe differ"):
        found(resume=tmp_path, algorithm="imatrix")


def test_what_a_killed_search_left_is_removed(in_memory: Any, tmp_path: Path) -> None:
    (tmp_path / "states-killed").mkdir()
    (tmp_path / "states-killed" / "float-0.pt").write_bytes(b"half")
    for name in ("solved-00003.search.part", "mapped-killed", "mine.txt"):
        (tmp_path / name).write_bytes(b"half")
    assert same(found(resume=tmp_path), in_memory)
    assert {path.name for path in tmp_path.iterdir() if path.suffix != ".search"} == {"search.json", "mine.txt"}


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
@pytest.mark.parametrize("keep", [False, True])
def test_solved_weights_are_in_files(keep: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_offload, "SMALL", 0)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    there: list[bool] = []
    each = Sensitivities.each

    def look(self: Any, trials: Any) -> Any:
        ranges = []
        for line in Path("/proc/self/maps").read_text().splitlines():
            where, _, rest = line.partition(" ")
            ranges.append((*(int(end, 16) for end in where.split("-")), str(tmp_path) in rest))
        for some in trials.values():
            for make in some.values:
                at = make.__self__._codes.data_ptr()
                there.append(next(inside for low, high, inside in ranges if low <= at < high))
        return each(self, trials)

    monkeypatch.setattr(Sensitivities, "each", look)
    found(max_memory="1 GB", resume=tmp_path / "kept" if keep else None)
    assert len(there) == 2 * 21
    assert all(there)
    assert len(list(tmp_path.iterdir())) == keep


def test_statistics_in_several_passes_find_the_same(in_memory: Any) -> None:
    assert same(found(max_memory=LARGEST + 80_000), in_memory)  # those of a block take 115 kB


def test_what_does_not_fit_is_said(tmp_path: Path) -> None:
    with pytest.raises(
        PlanError, match="max_memory is 614 kB, but while the largest weight is solved it takes up to 622 kB"
    ):
        found(max_memory=LARGEST)
    with pytest.raises(
        PlanError, match=r"q_proj\.weight: the statistics of its inputs take 16.4 kB, the memory limit leaves 12.8"
    ):
        found(max_memory=LARGEST + 20_000)
    assert found(max_memory=LARGEST + 20_000, algorithm="imatrix").bits <= 3.5
    with pytest.raises(PlanError, match="give a budget of bits or bytes, or a clock"):
        search(llama(), tokens(4), "1.2x latency", candidates=FEW, max_memory="1 GB")
    with pytest.raises(PlanError, match="max_memory: a memory limit is a size"):
        found(max_memory="much")
    with pytest.raises(PlanError, match="the candidates need"):
        search(llama(), tokens(4), "1 bpw", candidates=FEW, resume=tmp_path / "none")
    with pytest.raises(PlanError, match="resume needs a metric with a name"):
        found(resume=tmp_path, metric=lambda a, b, batch: torch.zeros(()))
    clock = CallTimer(lambda run, device: 1.0, lambda row, w, rows, limit: ())
    assert search(llama(), tokens(4), ["1x latency", "5 bpw"], candidates=FEW, clock=clock, max_memory="1 GB").bits
