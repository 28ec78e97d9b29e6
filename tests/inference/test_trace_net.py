"""Tracing changes nothing that another thread can see, neither in the process nor in the model; what it follows."""

import ast
import math
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.fx._symbolic_trace as symbolic
import torch.nn.functional as F
from torch import Tensor, fx, nn

import pennyweight as pw
from pennyweight.inference.fuse_conv_net import FusedConvNet
from pennyweight.inference.trace_block import record
from pennyweight.inference.trace_net import trace
from pennyweight.kernels.cpu import library
from pennyweight.support.errors import Refusal

PACKAGE = Path(pw.__file__).parent


@fx.wrap
def wrapped(x: Tensor) -> Tensor:
    """torch.fx replaces it in the globals of this file while it traces."""
    return x * 2


def seen_by_all() -> dict[str, Any]:
    """What torch.fx changes for the whole process while it traces."""
    places = {"Module": nn.Module, "math": math, "functional": F, "here": None}
    found = {name: dict(globals() if place is None else vars(place)) for name, place in places.items()}
    return {**found, "flag": symbolic.is_fx_tracing()}


def in_thread(do: Callable[[], Any]) -> Any:
    found: list[Any] = []

    def run() -> None:
        try:
            with torch.no_grad():
                found.append(do())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


class Meeting(nn.Module):
    """Calls a function in the middle of a forward that is traced."""

    during: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(x, fx.Proxy) and Meeting.during is not None:
            Meeting.during()
        return x


def quantized(net: nn.Module) -> nn.Module:
    data = [torch.randn(2, 3, 12, 11)]
    layers = lambda module, name: isinstance(module, nn.Conv2d)  # noqa: E731
    config = pw.calibrate(net.eval(), data, pw.Int8StaticActivationInt8WeightConfig, filter_fn=layers)
    pw.quantize_(net, config)
    return net


NATIVE = pytest.mark.skipif(library.available() is not True, reason=str(library.available()))


@NATIVE
def test_other_threads_call_modules_while_fuse_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net = quantized(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), Meeting(), nn.Conv2d(8, 8, 3)))
    other = nn.Sequential(nn.Linear(5, 4), nn.Sequential(nn.ReLU(), nn.LayerNorm(4))).eval()
    x, z = torch.randn(2, 3, 12, 11), torch.randn(3, 5)
    with torch.no_grad():
        wanted = net(x), other(z), wrapped(z), math.sqrt(2.0)
    before, met = seen_by_all(), []

    def during() -> None:
        met.append(seen_by_all())
        results = in_thread(lambda: (net(x), other(z), wrapped(z), math.sqrt(2.0)))
        met.append(results)

    monkeypatch.setattr(Meeting, "during", during)
    pw.fuse_(net, x)
    assert isinstance(net, FusedConvNet)
    assert len(met) == 2
    assert met[0] == before
    assert not isinstance(met[1], Exception), met[1]
    assert all(torch.equal(a, b) if isinstance(b, Tensor) else a == b for a, b in zip(met[1], wanted, strict=True))
    assert seen_by_all() == before


@NATIVE
def test_threads_get_right_results_while_another_fuses_their_model() -> None:
    torch.manual_seed(0)
    net = quantized(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)))
    other = nn.Sequential(nn.Linear(5, 4), nn.Sequential(nn.ReLU(), nn.LayerNorm(4))).eval()
    x, z = torch.randn(2, 3, 12, 11), torch.randn(3, 5)
    stop, wrong, calls = threading.Event(), [], []
    with torch.no_grad():
        wanted = net(x), other(z)

    def call() -> None:
        with torch.no_grad():
            while not stop.is_set():
                try:
                    wrong.extend(m for m, y in zip("no", wanted, strict=True) if not torch.equal(use[m](), y))
                except Exception as error:
                    wrong.append(repr(error))
                calls.append(1)

    use = {"n": lambda: net(x), "o": lambda: other(z)}
    threads = [threading.Thread(target=call) for _ in range(2)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for _ in range(10):
            pw.fuse_(net, x)
            assert isinstance(net, FusedConvNet)
            pw.inference.thaw_(net)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)
    assert wrong == []
    assert calls


@NATIVE
def test_a_traced_model_keeps_its_attributes() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x) * torch.full((8, 1, 1), 0.5))

    net: Any = quantized(Net())
    before, x = dict(vars(net)), torch.randn(1, 3, 12, 11)
    with torch.no_grad():
        want = net(x)
    pw.fuse_(net, x)
    assert isinstance(net, FusedConvNet)
    assert vars(net) == before  # torch.fx stores the factor as an attribute
    with torch.no_grad():
        assert torch.equal(net(x), want)


# -- what it follows ---------------------------------------------------------------------------------------------------


class Held(nn.Module):
    """Layers that its forward does not reach as attributes of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)
        self.again = self.a
        self.part = nn.Module()  # nn.Module itself, never called
        self.part.d = nn.Conv2d(3, 3, 1)
        self.scale = nn.Parameter(torch.ones(3, 1, 1))
        self.register_buffer("shift", torch.ones(3, 1, 1))
        self.plain = torch.ones(3, 1, 1)
        self.listed = [{"layer": (self.b,)}]
        self.listed.append(self.listed)  # type: ignore[arg-type]
        self.bound, self.call = self.inner, partial(self.c)

    def inner(self, x: Tensor) -> Tensor:
        return self.again(x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.call(self.listed[0]["layer"][0](self.bound(self.a(x))))
        self.last = x
        return self.part.d(x) * self.scale + self.shift - self.plain


def test_layers_are_followed_wherever_a_module_holds_them() -> None:
    net = Held()
    graph = trace(net)
    found = [(n.op, str(n.target)) for n in graph.nodes if n.op in ("call_module", "get_attr")]
    called = [name for op, name in found if op == "call_module"]
    assert called == ["a", "a", "b", "c", "part.d"]
    assert [name for op, name in found if op == "get_attr"] == ["scale", "shift", "plain"]
    assert "last" not in vars(net)
    with torch.no_grad():
        x = torch.randn(2, 3, 4, 4)
        assert torch.equal(fx.Interpreter(net, graph=graph).run(x), net(x))


def test_a_function_that_holds_a_layer_is_followed() -> None:
    net: Any = nn.Sequential(nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU()))
    own = net[0]
    own.forward = lambda x: own[0](x) + own[1](x)
    graph = trace(net)
    with torch.no_grad():
        x = torch.randn(2, 3, 4, 4)
        assert torch.equal(fx.Interpreter(net, graph=graph).run(x), net(x))


def test_hooks_of_accelerate_are_followed() -> None:
    hooks = pytest.importorskip("accelerate.hooks")

    class Doubled(hooks.ModelHook):
        def post_forward(self, module: nn.Module, output: Any) -> Any:
            return output * 2

    net = nn.Sequential(nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU()))
    hooks.add_hook_to_module(net[0], Doubled())
    assert [n.op for n in trace(net).nodes] == ["placeholder", "call_module", "call_module", "call_function", "output"]


def test_classes_of_users_are_respected() -> None:
    announced = []

    class Base(nn.Module):
        def __init_subclass__(cls, **kwargs: Any) -> None:
            announced.append(cls.__name__)

        def __call__(self, x: Tensor) -> Tensor:
            return super().__call__(x) + self.one

        def __getattr__(self, name: str) -> Any:
            return 1 if name == "one" else super().__getattr__(name)

    class Own(Base):
        def forward(self, x: Tensor) -> Tensor:
            return F.relu(x)

    graph = trace(nn.Sequential(Own()))
    assert [n.name for n in graph.nodes] == ["input_1", "relu", "add", "output"]
    assert announced == ["Own"]


class Outside(nn.Module):
    """A layer that is not registered: nothing would notice its changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.LeakyReLU()]

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](x)


ACTIVATION = nn.LeakyReLU()


class Global(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return ACTIVATION(x)


class Fresh(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.LeakyReLU(0.2).forward(x)


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if float(x.sum()) > 0 else -x


class Rooted(nn.Module):
    """torch.fx records functions of math by replacing them for the process."""

    def forward(self, x: Tensor) -> Tensor:
        return x / math.sqrt(x.shape[1])


@pytest.mark.parametrize("kind", [Outside, Global, Fresh, Branching, Rooted])
def test_what_cannot_be_traced_is_refused(kind: type[nn.Module]) -> None:
    with pytest.raises(Refusal, match=r"torch\.fx cannot trace it"):
        trace(nn.Sequential(kind()))


# -- blocks ------------------------------------------------------------------------------------------------------------


def test_calls_of_other_threads_are_not_recorded() -> None:
    class Block(nn.Module):
        def __init__(self, meets: bool) -> None:
            super().__init__()
            self.up, self.down, self.meets = nn.Linear(4, 6), nn.Linear(6, 4), meets

        def forward(self, x: Tensor) -> Tensor:
            y = self.up(x)
            if self.meets:
                in_thread(lambda: self.down(self.up(x)))
            return self.down(F.gelu(y))

    x = torch.randn(2, 4)
    alone, met = ([op.name for op in record(Block(meets), {"x": x}).ops] for meets in (False, True))
    assert met == alone


# -- the package -------------------------------------------------------------------------------------------------------

TRACERS = {"Tracer", "symbolic_trace", "_symbolic_trace", "_Patcher"}


def names(file: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Name):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            module = getattr(node, "module", "") or ""
            for part in (*module.split("."), *(p for alias in node.names for p in alias.name.split("."))):
                yield node.lineno, part


def test_one_file_of_the_package_traces_with_fx() -> None:
    files = sorted(PACKAGE.rglob("*.py"))
    found = {str(f.relative_to(PACKAGE)) for f in files for _, name in names(f) if name in TRACERS}
    assert found == {str(Path("inference") / "trace_net.py")}
    mine = PACKAGE / "inference" / "trace_net.py"
    assert [line for line, name in names(mine) if name == "trace"] == []  # fx.Tracer.trace replaces nn.Module.__call__


def test_no_file_of_the_package_assigns_to_a_class_of_torch() -> None:
    wrong = []
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            targets = node.targets if isinstance(node, ast.Assign) else []
            held = [t.value for t in targets if isinstance(t, ast.Attribute)]
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setattr":
                held.append(node.args[0])
            wrong += [f"{file}:{node.lineno}" for h in held if ast.unparse(h) in ("nn.Module", "torch.nn.Module", "F")]
    assert wrong == []
