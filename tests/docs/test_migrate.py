"""Every line in the middle column of docs/migrate.md runs, on a model with the names that the page speaks of."""

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pennyweight as pw
import pennyweight_torchao
from pennyweight_torchao import graph_mode as gm

from .pages import dead, parse

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*already imported",  # transformers, by other tests
    "ignore:The tensor attributes self.rnn._flat_weights",  # torch.export of an nn.LSTM, float or not
)

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "migrate.md"
NOT_OFFERED = "–"


class Row(NamedTuple):
    section: str
    before: str
    now: str
    mind: str


def rows() -> list[Row]:
    """Rows of all tables, with the heading above each."""
    found, section = [], ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            section = line.lstrip("# ")
        elif line.startswith("|") and not line.startswith(("| before |", "|---")):
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            assert len(cells) == 3, line
            found.append(Row(section, *cells))
    return found


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 128)
        self.up, self.down, self.lm_head = nn.Linear(128, 256), nn.Linear(256, 128), nn.Linear(128, 100)
        self.rnn = nn.LSTM(128, 128)

    def forward(self, x: Tensor) -> Tensor:
        return self.lm_head(self.rnn(self.down(torch.relu(self.up(x))))[0])


def prepared() -> Any:
    """A calibrated graph."""
    graph: Any = torch.export.export(nn.Sequential(nn.Linear(8, 4)).eval(), (torch.randn(2, 8),)).module()
    quantizer = gm.X86InductorQuantizer().set_global(gm.get_default_x86_inductor_quantization_config())
    graph = gm.prepare(graph, quantizer)
    graph(torch.randn(2, 8))
    return graph


@pytest.fixture
def names(tmp_path: Path) -> dict[str, Any]:
    model = Model().eval()
    reference = torch.randn(256, 128)
    w = pw.AffineQuantizedTensor.from_float(reference, pw.QuantSpec(pw.get_format("int8"), (-1,)))
    return {
        "torch": torch, "nn": nn, "F": F, "pw": pw, "model": model, "x": torch.randn(4, 128), "w": w,
        "reference": reference, "folder": tmp_path / "saved", "gm": gm, "prepared": prepared(),
        "batches": [torch.randn(16, 128) for _ in range(2)],
    }  # fmt: skip


MAY_BE_NONE = {"w.zero_point", "w.act", "w.act_scale"}  # of a symmetric weight that leaves inputs alone
RETURN_NONE = ("pennyweight_torchao.install(", "print(", "pw.save(", "swap_conv2d_1x1_to_linear(")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """What is measured here is small, and threads that wait for a busy core would take most of the time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def uninstalled() -> Iterator[None]:
    """What a line installs is gone after it."""
    yield
    pennyweight_torchao.uninstall()


@pytest.mark.parametrize("row", rows(), ids=lambda r: r.before.replace("`", ""))
def test_the_new_line_runs(row: Row, names: dict[str, Any], uninstalled: None) -> None:
    lines = re.findall(r"`([^`]+)`", row.now)
    if row.now == NOT_OFFERED:
        assert row.mind == "not offered"
        return
    assert lines
    assert re.sub(r"`[^`]+`", "", row.now).strip() == ""  # nothing but code, so that nothing goes unrun
    value: Any = None
    for line in lines:
        if line.startswith("pennyweight "):
            parse(shlex.split(line)[1:])
        elif isinstance(ast.parse(line).body[0], ast.Expr):
            value = eval(line, names)
            assert value is not None or line in MAY_BE_NONE or line.startswith(RETURN_NONE)
        else:
            exec(line, names)
    model, x = names["model"], names["x"].to(names["model"].up.bias.dtype)
    quantized = {n for n, p in model.named_parameters() if isinstance(p, pw.AffineQuantizedTensor)}
    if "TrainingConfig" in row.now:  # weights stay float, their products do not
        assert type(model.up).__name__ == "LowPrecisionLinear"
    elif "pw.quantize_(model" in row.now:
        assert quantized
        assert bool(model(x).isfinite().all())
        assert ("lm_head.weight" in quantized) == (not re.search(r"lm_head|name ==|Embedding|FqnToConfig", row.now))
        assert ("embed.weight" in quantized) == ("nn.Embedding" in row.now)
    if "from_float" in row.now:
        assert value.error(names["x"]) > 12  # dB: two bits and a little
    if "install(" in row.now:
        assert names["torchao"].quantization.Int4WeightOnlyConfig(group_size=32).group_size == 32


def test_the_values_behind_the_attributes(names: dict[str, Any]) -> None:
    """Where the new line says codes, scale or spec, it is those of the weight."""
    w, reference = names["w"], names["reference"]
    assert torch.equal(w.tensor_impl.int_data, w.codes)
    assert torch.equal(w.tensor_impl.get_plain()[1], w.scale)
    assert torch.equal(w.codes.float() * w.scale, w.dequantize())
    assert torch.equal(w.scale, reference.abs().amax(1, keepdim=True) / 127.5)
    assert w.spec.block == (-1,)
    assert (w.spec.format.lo, w.spec.format.hi) == (-128, 127)


def test_every_library_has_a_table() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for name in (
        "torchao", "torch.ao.quantization", "bitsandbytes", "quanto", "AutoGPTQ, GPTQModel, AutoAWQ", "llm-compressor",
        "HQQ, AutoRound", "llama.cpp", "onnxruntime",
    ):  # fmt: skip
        assert f"\n## {name}\n" in text
    assert len(rows()) > 120


def test_links_lead_somewhere() -> None:
    assert not dead(PAGE)
