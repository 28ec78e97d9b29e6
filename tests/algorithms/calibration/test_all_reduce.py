"""Calibration on two ranks, each with its share of the data: one model, that of all the data on one rank."""

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

import pennyweight as pw
from tests.distributed.group import METHOD
from tests.integrations.mixtures import mixture

INT4 = pw.Int4WeightOnlyConfig(32)
SPEC = pw.SpecConfig(pw.QuantSpec(pw.get_format("int4"), (16,)))


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 16), nn.GELU(), nn.Linear(16, 16))


class Routed(nn.Module):
    """Two layers whose inputs are equal in some batches only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(32, 16), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + (self.b(x) if bool(x[0, 0] < 0) else self.b(x[::2]).mean(0))


def routed_data() -> list[Tensor]:
    """The first rank's batches have the same inputs for both layers, the second's have not."""
    found = data()
    for i, x in enumerate(found):
        x[0, 0] = -1.0 if i < 2 else 1.0
    return found


def data() -> list[Tensor]:
    g = torch.Generator().manual_seed(1)
    return [torch.randn(24, 32, generator=g) @ torch.randn(32, 32, generator=g) for _ in range(4)]


def texts() -> list[dict[str, Tensor]]:
    g = torch.Generator().manual_seed(1)
    return [{"input_ids": torch.randint(99, (1, 40), generator=g)} for _ in range(4)]


def stacks(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.dequantize() for n, p in model.named_parameters() if p.ndim == 3}  # type: ignore[operator]


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    try:
        q = model()
        pw.quantize_(q, SPEC, calibration=data()[2 * rank : 2 * rank + 2], algorithm="gptaq")
        torch.save([w.weight.dequantize() for w in (q[0], q[2])], f"{folder}/{rank}.pt")
        routed = Routed()
        pw.quantize_(routed, SPEC, calibration=routed_data()[2 * rank : 2 * rank + 2], algorithm="gptq")
        torch.save([w.weight.dequantize() for w in (routed.a, routed.b)], f"{folder}/routed-{rank}.pt")
        experts = mixture("Qwen3Moe")
        pw.quantize_(experts, INT4, calibration=texts()[2 * rank : 2 * rank + 2], algorithm="gptq", skip=["lm_head"])
        torch.save(stacks(experts), f"{folder}/experts-{rank}.pt")
        other = nn.Sequential(*model()) if rank else nn.Sequential(nn.Linear(32, 16))
        try:
            pw.quantize_(other, SPEC, calibration=data()[:1], algorithm="gptq")
        except ValueError as error:
            Path(folder, f"{rank}.txt").write_text(str(error))
    finally:
        dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch without gloo")
def test_two_ranks_end_with_the_model_of_all_the_data(tmp_path: Path) -> None:
    mp.start_processes(work, (str(tmp_path),), nprocs=2, start_method=METHOD)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    alone, half = model(), copy.deepcopy(model())
    pw.quantize_(alone, SPEC, calibration=data(), algorithm="gptaq")
    pw.quantize_(half, SPEC, calibration=data()[:2], algorithm="gptaq")
    for w, layer, part in zip(first, (alone[0], alone[2]), (half[0], half[2]), strict=True):
        same = (w - layer.weight.dequantize()).abs() < 1e-6
        assert same.float().mean() > 0.97  # sums are rounded in another order
        assert (w - part.weight.dequantize()).abs().max() > 1e-3
    first, second = (torch.load(tmp_path / f"routed-{rank}.pt") for rank in range(2))
    routed = Routed()
    pw.quantize_(routed, SPEC, calibration=routed_data(), algorithm="gptq")
    for a, b, layer in zip(first, second, (routed.a, routed.b), strict=True):
        assert torch.equal(a, b)
        assert ((a - layer.weight.dequantize()).abs() < 1e-6).float().mean() > 0.97
    first, second = (torch.load(tmp_path / f"experts-{rank}.pt") for rank in range(2))
    alone, half = mixture("Qwen3Moe"), mixture("Qwen3Moe")
    pw.quantize_(alone, INT4, calibration=texts(), algorithm="gptq", skip=["lm_head"])
    pw.quantize_(half, INT4, calibration=texts()[:2], algorithm="gptq", skip=["lm_head"])
    want, part = stacks(alone), stacks(half)
    for n, w in first.items():
        assert torch.equal(w, second[n])
        same, of_half = (((w - other[n]).abs() < 1e-6).float().mean() for other in (want, part))
        assert same > 0.98
        assert of_half < 0.95
    for rank in range(2):
        assert "ranks differ in which weights they use" in (tmp_path / f"{rank}.txt").read_text()
