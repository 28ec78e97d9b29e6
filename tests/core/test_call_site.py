"""Results that depend on the calling code are decided in one file, and only for the libraries that need it."""

import copy
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import pennyweight as pw
from pennyweight.core import call_site
from pennyweight.distributed import dispatch
from pennyweight.integrations import callers
from tests import forked

PACKAGE = Path(pw.__file__).parent
# Others that read frames, and what for: not to decide what a tensor does
READERS = {
    "core/call_site.py": "",
    "planning/run_batch.py": "the line that a warning points to",
    "inference/trace_net.py": "whether a module that is no part of the net makes a call that is traced",
}


def test_one_file_decides_by_the_caller() -> None:
    words = ("_getframe", "currentframe", "inspect.stack", "extract_stack", "walk_stack")
    found = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if any(word in path.read_text(encoding="utf-8") for word in words)
    }
    assert found == READERS.keys()


def run_in(module: str, text: str, **names: Any) -> Any:
    """The value of an expression in a function of a module of that name."""
    scope = {"__name__": module, "torch": torch, "copy": copy, **names}
    exec(f"def run(self, w): return {text}", scope)
    return scope["run"]


@pytest.fixture
def weight() -> nn.Parameter:
    layer = nn.Sequential(nn.Linear(32, 32))
    pw.quantize_(layer, pw.Int8WeightOnlyConfig())
    return layer[0].weight


@pytest.mark.parametrize(
    "text",
    [
        "w.view(torch.int16)",
        "torch.Tensor.view(w, -1)",
        "w.numpy()",
        "w.tolist()",
        "w.__array__()",
        "w.__dlpack__()",
    ],
)
def test_accelerate_cannot_offload_codes_to_disk(text: str, weight: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_site, "OFFLOADS", {})
    callers.register_accelerate()
    with pytest.raises(TypeError, match="accelerate's offload to disk"):
        run_in("accelerate.utils.offload", text)(None, weight.detach())


def test_peft_trains_a_float_copy(weight: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_site, "TRAINING_COPIES", {})
    callers.register_peft()
    copied = run_in("peft.utils.other", "copy.deepcopy(w)")
    assert type(copied(SimpleNamespace(modules_to_save={}), weight)) is nn.Parameter
    assert isinstance(copied(SimpleNamespace(), weight), pw.AffineQuantizedTensor)
    assert isinstance(copy.deepcopy(weight), pw.AffineQuantizedTensor)


def test_a_library_that_is_not_loaded_is_not_looked_for(weight: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_site, "OFFLOADS", {})
    monkeypatch.setattr(call_site, "TRAINING_COPIES", {})
    monkeypatch.setattr(call_site, "_frames", lambda: pytest.fail("read the stack"))
    copy.deepcopy(weight)
    pw.reset_fallbacks()
    with pytest.warns(pw.FallbackWarning):
        weight.detach().numpy()


LOADED = """
import sys
from pennyweight.core import call_site
import pennyweight
assert not {"accelerate", "peft", "pennyweight.integrations.callers"} & sys.modules.keys()
assert not call_site.OFFLOADS and not call_site.TRAINING_COPIES
import accelerate, peft
assert [*call_site.OFFLOADS] == ["accelerate.utils.offload"] and [*call_site.TRAINING_COPIES] == ["peft.utils.other"]
"""


def test_a_library_is_registered_when_it_is_imported() -> None:
    run = forked.run(["-c", LOADED])
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("module", ["user", "torch.distributed.tensor.x", "torch.nn.parallel.distributed"])
def test_caller(module: str) -> None:
    asked = run_in(module, "w()")(None, partial(call_site.caller, dispatch._CALLERS))
    assert asked == (module if module.startswith("torch") else "")


def test_load_state_dict_frames(weight: Any) -> None:
    """``assign`` of torch.nn.Module.load_state_dict: is_meta, requires_grad_ and copy_ find the call, and only that."""
    assert call_site.load_state_dict_frames() is None
    seen = []

    class Spy(nn.Linear):
        def _load_from_state_dict(self, *args: Any) -> None:
            seen.append(call_site.load_state_dict_frames())
            super()._load_from_state_dict(*args)

    model, names = Spy(32, 32, bias=False), {"weight": weight}
    with pytest.warns(UserWarning, match="writes the values of quantized tensors"):  # by copy_
        model.load_state_dict(names)
    assert type(model.weight) is nn.Parameter
    model.load_state_dict(names, assign=True)  # by requires_grad_
    assert isinstance(model.weight, pw.AffineQuantizedTensor)
    model.load_state_dict({"weight": torch.ones(32, 32)})  # by is_meta
    assert isinstance(model.weight, pw.AffineQuantizedTensor)
    assert seen == [None] * 3  # Module._load_from_state_dict itself has not been entered
    with torch.no_grad():
        nn.Linear(32, 32, bias=False).weight.copy_(weight)  # no warning


def test_conversions_of_a_module() -> None:
    seen = []

    class Seen(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in (torch.Tensor.to, torch.Tensor.bfloat16):
                seen.append(call_site.converts_module())
            return super().__torch_function__(func, types, args, kwargs or {})

    layer = nn.Linear(2, 2, bias=False)
    layer.weight = nn.Parameter(torch.zeros(2, 2).as_subclass(Seen))
    layer.to(torch.float64)
    layer.bfloat16()
    layer.weight.to(torch.float64)
    assert seen == [True, True, False]
