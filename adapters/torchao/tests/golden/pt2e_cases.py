"""Models quantized in graph mode, through a library's names; torchao's results are recorded, ours are compared."""

import copy
import importlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule, Node

PT2E = "torchao.quantization.pt2e"


class Residual(nn.Module):
    """Convolutions with and without bias and groups, batch norm, a residual sum, pooling, linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.na = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.b, self.nb = nn.Conv2d(8, 8, 3, padding=1, bias=False, groups=2), nn.BatchNorm2d(8)
        self.c, self.pool = nn.Conv2d(8, 8, 1), nn.MaxPool2d(2)
        self.l1, self.l2, self.l3 = nn.Linear(128, 10), nn.Linear(10, 10, bias=False), nn.Linear(10, 10)
        for norm in (self.na, self.nb):
            norm.running_mean.normal_(0, 0.3)
            norm.running_var.uniform_(0.5, 2)
            nn.init.uniform_(norm.weight, 0.5, 1.5)
            nn.init.normal_(norm.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.na(self.a(x)))
        x = F.relu(self.nb(self.b(x)) + x)
        x = torch.flatten(self.pool(self.c(x)), 1)
        x = F.relu(self.l1(x))
        return self.l3(self.l2(x)) + x


class Joined(nn.Module):
    """cat, adaptive pooling, numbers in add and mul."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 5, 1), nn.Conv2d(9, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.adaptive_avg_pool2d(torch.cat([self.a(x), self.b(x)], 1), 2)
        return F.hardtanh(self.c(y)) * 2 + 1


class Attention(nn.Module):
    """Products of activations."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        a = torch.softmax(torch.matmul(self.q(x), self.k(x).transpose(-1, -2)), -1)
        return F.gelu(self.o(torch.matmul(a, self.v(x)))) * x


SHAPES: dict[type[nn.Module], tuple[int, ...]] = {Residual: (2, 3, 8, 8), Joined: (2, 3, 8, 8), Attention: (2, 5, 8)}
X86 = [{}, {"is_dynamic": True}, {"reduce_range": True}, {"is_qat": True}, {"is_qat": True, "is_dynamic": True}]
ARM = [{}, {"is_dynamic": True}, {"is_qat": True}]
XNNPACK = [
    {}, {"is_per_channel": True}, {"is_dynamic": True, "is_per_channel": True}, {"is_qat": True},
    {"is_qat": True, "is_per_channel": True},
]  # fmt: skip


def _name(names: str) -> Any:
    module, _, name = names.rpartition(".")
    return getattr(importlib.import_module(module), name)


def _quantizers() -> Iterator[tuple[str, dict[str, Any], Any]]:
    """(name, arguments of the config, function that makes the quantizer)."""
    rows = (
        ("x86", X86, f"{PT2E}.quantizer.x86_inductor_quantizer.X86InductorQuantizer",
         f"{PT2E}.quantizer.x86_inductor_quantizer.get_default_x86_inductor_quantization_config"),
        ("arm", ARM, f"{PT2E}.quantizer.arm_inductor_quantizer.ArmInductorQuantizer",
         f"{PT2E}.quantizer.arm_inductor_quantizer.get_default_arm_inductor_quantization_config"),
        ("xpu", [{}], f"{PT2E}.quantizer.xpu_inductor_quantizer.XPUInductorQuantizer",
         f"{PT2E}.quantizer.xpu_inductor_quantizer.get_default_xpu_inductor_quantization_config"),
        ("xnnpack", XNNPACK, "torchao.testing.pt2e._xnnpack_quantizer.XNNPACKQuantizer",
         "torchao.testing.pt2e._xnnpack_quantizer.get_symmetric_quantization_config"),
    )  # fmt: skip
    for name, configs, kind, config in rows:
        for arguments in configs:
            yield name, arguments, lambda k=kind, c=config, a=arguments: _name(k)().set_global(_name(c)(**a))


def cases() -> Iterator[tuple[str, type[nn.Module], bool, Any]]:
    """(name, model, train?, function that makes the quantizer)."""
    for model in SHAPES:
        for name, arguments, make in _quantizers():
            flags = "".join(f"-{key.removeprefix('is_')}" for key in arguments)
            yield f"{name}-{model.__name__}{flags}", model, arguments.get("is_qat", False), make


def run(kind: type[nn.Module], qat: bool, quantizer: Any) -> tuple[GraphModule, Tensor]:
    """Export, prepare, two batches, with one step of training for ``qat``, convert: the graph and its output."""
    torch.manual_seed(3)
    model, shape = kind(), SHAPES[kind]
    model = copy.deepcopy(model).train(qat)
    data = [torch.randn(shape, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    graph = torch.export.export(model, (data[0],), strict=True).module()
    prepare = _name(f"{PT2E}.quantize_pt2e.{'prepare_qat_pt2e' if qat else 'prepare_pt2e'}")
    prepared = prepare(graph, quantizer)
    for i, x in enumerate(data[1:3]):
        y = prepared(x)
        if qat and i == 0:
            y.square().mean().backward()
            with torch.no_grad():
                for p in prepared.parameters():
                    if p.grad is not None:
                        p -= 0.1 * p.grad
    converted = _name(f"{PT2E}.quantize_pt2e.convert_pt2e")(prepared)
    with torch.no_grad():
        return converted, converted(data[3])


def lines(graph: GraphModule) -> list[str]:
    """Calls of operators in order: target and arguments; other nodes by number, parameters and buffers as "attr"."""
    number: dict[Node, str] = {}
    found = []

    def text(value: Any) -> str:
        if isinstance(value, Node):
            return number.get(value, value.name if value.op == "placeholder" else "attr")
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(map(text, value))}]"
        return str(value)

    for node in graph.graph.nodes:
        if node.op == "call_function":
            number[node] = f"%{len(number)}"
            arguments = [*map(text, node.args), *(f"{k}={text(v)}" for k, v in node.kwargs.items())]
            found.append(f"{node.target}({', '.join(arguments)})".replace("<built-in function getitem>", "getitem"))
    return found


def results() -> Iterator[tuple[str, list[str], Tensor]]:
    """(name, lines of the graph, output) of every case."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, model, qat, make in cases():
            graph, output = run(model, qat, make())
            yield name, lines(graph), output
