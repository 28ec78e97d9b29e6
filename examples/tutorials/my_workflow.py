"""Custom configs: one that returns a scheme for each layer, one with a handler that may transform a module.

python examples/tutorials/my_workflow.py
"""

import copy
import math
import tempfile
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import pennyweight as pw
from pennyweight.core.formats import INT4, INT8
from pennyweight.planning.parameters import Site


@dataclass(frozen=True)
class BitsBySizeConfig(pw.AOBaseConfig):
    """int4 in groups for weights with at least ``large`` elements, int8 per row for smaller ones."""

    large: int = 1 << 16
    group_size: int = 32

    def __post_init__(self) -> None:
        if self.large < 0:
            raise ValueError(f"BitsBySizeConfig: large must be a number of elements, got {self.large}")

    def scheme(self, site: Site, on_indivisible: str = "pad") -> pw.Scheme:
        if math.prod(site.shape) < self.large:
            return pw.Scheme(pw.QuantSpec(INT8, site.block(pw.PerRow(), on_indivisible)))
        return pw.Scheme(pw.QuantSpec(INT4, site.block(pw.PerGroup(self.group_size), on_indivisible)))


@dataclass(frozen=True)
class OutlierColumnsConfig(pw.AOBaseConfig):
    """The ``columns`` inputs with the largest weights stay float, the rest is quantized with ``base``.

    A few large columns would otherwise determine the scale of every row.
    """

    base: pw.AOBaseConfig
    columns: int = 4


class SplitLinear(nn.Module):
    """y = base(x) + x[.., columns] @ outliers.T"""

    def __init__(self, base: nn.Linear, columns: Tensor, outliers: Tensor) -> None:
        super().__init__()
        self.base = base
        self.register_buffer("columns", columns)
        self.outliers = nn.Parameter(outliers, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x[..., self.columns] @ self.outliers.t()


@pw.register_quantize_module_handler(OutlierColumnsConfig)
def split_outliers(module: nn.Linear, config: OutlierColumnsConfig) -> nn.Module:
    weight = module.weight.detach()
    columns = weight.abs().amax(0).topk(config.columns).indices.sort().values
    outliers = weight[:, columns].clone()
    rest = weight.clone()
    rest[:, columns] = 0
    module.weight = nn.Parameter(rest)
    pw.quantize_(module, config.base)
    return SplitLinear(module, columns, outliers)


def network() -> nn.Sequential:
    """Three layers; four columns of the middle one are outliers, as in large language models."""
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 16)).eval()
    with torch.no_grad():
        model[2].weight[:, [3, 50, 51, 200]] *= 30
    return model


def error(model: nn.Module, reference: nn.Module, x: Tensor) -> float:
    """Relative error of the outputs against the reference."""
    return float((model(x) - reference(x)).norm() / reference(x).norm())


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    reference, x = network(), torch.randn(100, 64)

    mixed = copy.deepcopy(reference)
    print(pw.quantize_(mixed, BitsBySizeConfig(large=20_000)))
    formats = [str(mixed[i].weight.spec.format) for i in (0, 2, 4)]
    assert formats == ["int8", "int4", "int8"]

    # It works like any other config: in FqnToConfig, and in a plan without changes to the model.
    planned = pw.plan(copy.deepcopy(reference), pw.FqnToConfig({"4": None, "_default": BitsBySizeConfig(0)})).report()
    assert [row.name for row in planned.quantized] == ["0.weight", "2.weight"]

    base = pw.IntxWeightOnlyConfig(torch.int4, pw.PerAxis(0))
    plain, split = copy.deepcopy(reference), copy.deepcopy(reference)
    pw.quantize_(plain, base)
    report = pw.quantize_(split, OutlierColumnsConfig(base))
    print(report)
    assert [type(split[i]) for i in (0, 2, 4)] == [SplitLinear] * 3
    assert report.bytes_after == sum(p.nbytes for p in split.parameters())
    before, after = error(plain, reference, x), error(split, reference, x)
    print(f"error of the outputs with int4 rows: {before:.3f}; with four columns kept in float: {after:.3f}")
    assert after < before / 2

    # Modules of a handler are saved and loaded like others: build the modules again, then fill them.
    again = network()
    pw.quantize_(again, OutlierColumnsConfig(base))
    with tempfile.TemporaryDirectory() as folder:
        pw.save(split, folder)
        pw.load(folder, again)
        assert torch.equal(again(x), split(x))
    print("saved, loaded into a model prepared the same way: the same outputs")


if __name__ == "__main__":
    main()
