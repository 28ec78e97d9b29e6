"""Calls of torch.distributed with ordinary functions: each has its own result there, and the usual one elsewhere."""

import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import pennyweight as pw
from pennyweight.core import call_site, distributed_hooks
from pennyweight.core.formats import INT8
from pennyweight.core.tensor import AffineQuantizedTensor as QT
from pennyweight.distributed import ddp
from pennyweight.distributed.dispatch import CALLS
from tests import forked

aten = torch.ops.aten
DTENSOR, FSDP, CHECKPOINT = "torch.distributed.tensor.x", "torch.distributed.fsdp.x", "torch.distributed.checkpoint.x"
DDP = "torch.distributed.utils"
SPEC = pw.QuantSpec(INT8, (16, 16), scale=torch.float32)


def weight() -> QT:
    return QT.from_float(torch.randn(32, 48, generator=torch.Generator().manual_seed(0)), SPEC)


def called_from(module: str, text: str) -> Any:
    """The value of an expression of a weight w, in a function of a module of that name."""
    names: dict[str, Any] = {"__name__": module, "torch": torch, "F": F, "bucket": bucket}
    exec(f"def run(w): return {text}", names)
    with torch._C.DisableTorchFunctionSubclass() if module == DDP else nullcontext():  # DDP calls from C++
        return names["run"](weight())


def bucket() -> Tensor:
    """Another weight as DDP sends it: the bytes of its parts in the space of its numbers."""
    other = QT.from_float(torch.full((32, 48), 3.0), SPEC)
    return ddp.pack_into_bucket(other).view(32, 48)


def _pieces(out: Any, ordinary: bool) -> None:
    """8 rows cut through blocks of 16: for torch.distributed the blocks become finer."""
    assert len(out) == 4
    if not ordinary:
        assert all(p.spec.block == (8, 16) for p in out)
    else:
        assert all(p.readonly and p.spec == SPEC for p in out)
    assert torch.equal(torch.cat([p.dequantize() for p in out]), weight().dequantize())


def _piece(out: Any, ordinary: bool) -> None:
    """Writable for torch.distributed: the rest of its block is padding, or gets the same scale."""
    assert (type(out), out.readonly) == (QT, ordinary)
    assert torch.equal(out.dequantize(), weight().dequantize()[:8])


def _zeros(out: Any, ordinary: bool) -> None:
    assert type(out) is (Tensor if ordinary else QT)
    assert torch.equal(out.dequantize() if isinstance(out, QT) else out, torch.zeros(16, 48))


def _padded(out: Any, ordinary: bool) -> None:
    assert type(out) is (Tensor if ordinary else QT)
    assert torch.equal(out.dequantize() if isinstance(out, QT) else out, F.pad(weight().dequantize(), [0, 0, 0, 16]))


def _shard(out: Any, ordinary: bool) -> None:
    assert type(out) is (Tensor if ordinary else QT)
    assert out.shape == (32 * 48,) if ordinary else torch.equal(out.codes, weight().codes)


def _bucket(out: Any, ordinary: bool) -> None:
    assert type(out) is Tensor
    assert torch.equal(out, weight().dequantize().view(-1)) == ordinary
    if not ordinary:
        assert torch.equal(ddp.unpack_from_bucket_(weight(), out).codes, weight().codes)


def _loaded(out: Any, ordinary: bool) -> None:
    assert ordinary
    torch.testing.assert_close(out.dequantize(), torch.full((32, 48), 3.0), atol=0.02, rtol=0)


def _received(out: Any, ordinary: bool) -> None:
    sent = QT.from_float(torch.full((32, 48), 3.0), SPEC)
    assert torch.equal(out.dequantize(), sent.dequantize()) != ordinary


Case = tuple[str, str, Callable[[Any, bool], None]]
CASES: dict[Any, Case] = {
    torch.chunk: (DTENSOR, "torch.chunk(w, 4)", _pieces),
    torch.Tensor.chunk: (FSDP, "w.chunk(4, dim=0)", _pieces),
    torch.narrow: (DTENSOR, "torch.narrow(w, 0, 0, 8)", _piece),
    torch.Tensor.narrow: (FSDP, "w.narrow(0, 0, 8)", _piece),
    torch.Tensor.new_zeros: (FSDP, "w.new_zeros(16, 48)", _zeros),
    F.pad: (DTENSOR, "F.pad(w, [0, 0, 0, 16])", _padded),
    torch.Tensor.view: (FSDP, "w.view(-1)", _shard),
    torch.Tensor.copy_: (CHECKPOINT, "w.copy_(torch.full((32, 48), 3.0))", _loaded),
    aten.view.default: (DDP, "w.view(-1)", _bucket),
    aten.copy_.default: (DDP, "w.copy_(bucket())", _received),
}


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_every_call_has_a_case() -> None:
    assert CASES.keys() == CALLS.keys()
    rest = {"c10d", "_c10d_functional", "fsdp_pre_all_gather", "fsdp_post_all_gather"}
    assert distributed_hooks.HANDLERS.keys() == CALLS.keys() | rest


@pytest.mark.filterwarnings("ignore::pennyweight.FallbackWarning")
@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("func", CASES, ids=lambda func: str(func).partition(" at 0x")[0])
def test_the_caller_decides(func: Any) -> None:
    module, text, check = CASES[func]
    check(called_from("user.model", text), True)
    if check is _loaded:
        with pytest.raises(ValueError, match="cannot load a tensor"):
            called_from(module, text)
    else:
        check(called_from(module, text), False)


@pytest.mark.filterwarnings("ignore::pennyweight.FallbackWarning")
@pytest.mark.parametrize("func", CASES, ids=lambda func: str(func).partition(" at 0x")[0])
def test_without_a_process_group_nobody_is_asked(func: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch.distributed.checkpoint", raising=False)
    monkeypatch.setattr(call_site, "caller", lambda *_: pytest.fail("read the stack"))
    monkeypatch.setattr("pennyweight.distributed.dispatch.caller", lambda *_: pytest.fail("read the stack"))
    module, text, check = CASES[func]
    check(called_from(module, text), True)


ALONE = """
import copy, sys, warnings, torch
import torch.nn.functional as F
import pennyweight as pw
from pennyweight.core import call_site
warnings.simplefilter("ignore")
def no(*args):
    raise AssertionError("read the stack")
model = torch.nn.Sequential(torch.nn.Linear(64, 64))
pw.quantize_(model, pw.Int8WeightOnlyConfig())
call_site._frames = no
w = model[0].weight.detach()
w.chunk(2), w.narrow(0, 0, 8), w.new_zeros(2), F.pad(w, [0, 1]), w.view(-1), w.numpy(), w.tolist()
copy.deepcopy(model)
model(torch.randn(2, 64))
torch.compile(model, backend="eager")(torch.randn(2, 64))
print("pennyweight.distributed.dispatch" in sys.modules)
"""


def test_a_program_without_torch_distributed_reads_no_stack_and_loads_no_handler() -> None:
    run = forked.run(["-c", ALONE])
    assert (run.returncode, run.stdout) == (0, "False\n"), run.stderr


FRESH = """
import pickle, sys, torch, torch.distributed as dist
w = pickle.loads(bytes.fromhex(sys.stdin.read()))
assert "pennyweight.distributed" not in sys.modules
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
exec("def run(w): return w.new_zeros(4, 48)", names := {"__name__": "torch.distributed.fsdp.x"})
print(type(names["run"](w)).__name__)
other = w.clone()
dist.broadcast(w, 0)
assert torch.equal(w.codes, other.codes)
dist.destroy_process_group()
"""


def test_handlers_answer_for_a_tensor_unpickled_in_a_fresh_process() -> None:
    import pickle

    run = forked.run(["-c", FRESH], input=pickle.dumps(weight()).hex())
    assert (run.returncode, run.stdout) == (0, "AffineQuantizedTensor\n"), run.stderr
