"""Torch's own writers, each with a quantized, a frozen and a fused model; each case in a process of its own.

As a program it prints {"model: writer": [signal, outcome]}; see test_torch_writers.py.
"""

from __future__ import annotations

import copy
import gc
import io
import json
import os
import pickle
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

import pennyweight as pw

X = torch.linspace(-1, 1, 3 * 64).view(3, 64)


def net(config: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)).eval()
    pw.quantize_(model, config)
    return model.requires_grad_(False)


def frozen() -> nn.Module:
    model = net("int8")
    pw.inference.freeze_(model)
    return model


def fused() -> nn.Module:
    """A Llama in fused blocks, from embeddings to logits."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    llama = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=64)).eval().requires_grad_(False)
    pw.quantize_(llama, "int8")
    assert pw.fuse_(llama)
    return Embedded(llama).eval()


class Embedded(nn.Module):
    def __init__(self, llama: nn.Module) -> None:
        super().__init__()
        self.llama = llama

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.llama(inputs_embeds=x[None], use_cache=False, return_dict=False)[0]


class InList(nn.Module):
    """A quantized tensor in an attribute that no method reads."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.tensors = model, [next(model.parameters()).detach()]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "int8": lambda: net("int8"), "int4": lambda: net("int4"), "frozen": frozen, "fused": fused,
}  # fmt: skip


def traced(model: nn.Module) -> Any:
    return torch.jit.trace(model, X, check_trace=False)


def through(write: Callable[[Any], Any], read: Callable[[Any], Any]) -> Any:
    buffer = io.BytesIO()
    write(buffer)
    buffer.seek(0)
    return read(buffer)


def jit(module: Any) -> Any:
    return through(lambda f: torch.jit.save(module, f), torch.jit.load)


def saved(value: Any, **how: Any) -> Any:
    return through(lambda f: torch.save(value, f, **how), lambda f: torch.load(f, weights_only=False))


def packaged(value: Any) -> Any:
    def write(f: Any) -> None:
        with torch.package.PackageExporter(f) as package:
            package.extern("**")
            package.save_pickle("model", "model.pkl", value)

    return through(write, lambda f: torch.package.PackageImporter(f).load_pickle("model", "model.pkl"))


def exported(model: nn.Module) -> Any:
    program = torch.export.export(model, (X,))
    return through(lambda f: torch.export.save(program, f), torch.export.load).module()


def checkpointed(model: nn.Module) -> Any:
    import torch.distributed.checkpoint as dcp

    with tempfile.TemporaryDirectory() as folder:
        dcp.save(model.state_dict(), checkpoint_id=folder)
        state = copy.deepcopy(model.state_dict())
        dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state)
    return model


def mobile(model: nn.Module) -> Any:
    from torch.utils.mobile_optimizer import optimize_for_mobile

    return optimize_for_mobile(traced(model))


def bundled(model: nn.Module) -> Any:
    from torch.utils.bundled_inputs import bundle_inputs, bundle_randn

    return jit(bundle_inputs(torch.jit.script(model), [(bundle_randn(3, 64),)]))


def remote(model: nn.Module) -> Any:
    from torch.distributed.rpc.internal import deserialize, serialize

    return deserialize(*serialize(model))


def temporary(write: Callable[[str], Any]) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        return write(os.path.join(folder, "file"))


def first(model: nn.Module) -> Any:
    return next(p for p in model.parameters() if isinstance(p, pw.AffineQuantizedTensor)).detach()


# name of torch's function -> a use of it. A result that is a module must compute what the model computed
WRITERS: dict[str, Callable[[nn.Module], Any]] = {
    "torch.jit._serialization.save": lambda m: jit(traced(m)),
    "torch.jit._serialization.save of a script": lambda m: jit(torch.jit.script(m)),
    "torch.jit._serialization.save of a frozen trace": lambda m: jit(torch.jit.freeze(traced(m))),
    "torch.jit._serialization.save of a frozen script": lambda m: jit(torch.jit.freeze(torch.jit.script(m))),
    "torch.jit._serialization.save of a list": lambda m: jit(traced(InList(m))),
    "torch.jit._serialization.save of a scripted list": lambda m: jit(torch.jit.script(InList(m))),
    "torch.jit._serialization.save of a function": lambda m: jit(
        torch.jit.trace(lambda x: m(x) + 0, X, check_trace=False)
    ),
    "torch.jit._serialization.save of an operand": lambda m: jit(
        torch.jit.trace(lambda x: x.sum() + first(m).sum(), X, check_trace=False)
    ),
    "torch.jit._serialization.save_jit_module_to_flatbuffer": lambda m: temporary(
        lambda path: torch.jit._serialization.save_jit_module_to_flatbuffer(traced(m), path)
    ),
    "torch.jit._script.ScriptModule.save": lambda m: temporary(lambda path: traced(m).save(path)),
    "torch.jit._script.ScriptModule.save_to_buffer": lambda m: traced(m).save_to_buffer(),
    "torch.jit._script.ScriptModule._save_for_lite_interpreter": lambda m: temporary(
        lambda path: traced(m)._save_for_lite_interpreter(path)
    ),
    "torch.jit._script.ScriptModule._save_to_buffer_for_lite_interpreter": lambda m: traced(
        m
    )._save_to_buffer_for_lite_interpreter(),
    "torch.jit._script.ScriptModule.share_memory": lambda m: traced(m).share_memory(),
    "torch.jit._script.ScriptModule.__reduce_package__": lambda m: packaged(traced(m)),
    "torch.jit._script.ScriptModule.__reduce__": lambda m: pickle.dumps(traced(m)),
    "torch.jit._freeze.optimize_for_inference": lambda m: torch.jit.optimize_for_inference(traced(m)),
    "copy.deepcopy of a trace": lambda m: copy.deepcopy(traced(m)),
    "torch._C.ScriptModule._replicate_for_data_parallel": lambda m: traced(m)._replicate_for_data_parallel(),
    "torch._C.ScriptModule.dump": lambda m: traced(m)._c.dump(True, True, True),
    "torch._C.ScriptModule.dump_to_str": lambda m: traced(m)._c.dump_to_str(True, True, True),
    "torch._C._pickle_save": lambda m: torch._C._pickle_save({"a": [first(m)]}),
    "torch._C._save_parameters": lambda m: torch._C._save_parameters({"a": first(m)}, io.BytesIO()),
    "torch.package.package_exporter.PackageExporter.save_pickle": packaged,
    "torch.serialization.save": saved,
    "torch.serialization._legacy_save": lambda m: saved(m, _use_new_zipfile_serialization=False),
    "torch.serialization.save of a trace": lambda m: saved(traced(m)),
    "torch.onnx.export": lambda m: torch.onnx.export(m, (X,), io.BytesIO(), dynamo=False),
    "torch.export.save": exported,
    "torch.distributed.checkpoint.state_dict_saver.save": checkpointed,
    "torch.distributed.rpc.internal.serialize": remote,
    "torch.utils.mobile_optimizer.optimize_for_mobile": mobile,
    "torch.utils.bundled_inputs.bundle_inputs": bundled,
    "torch.nn.modules.module.Module.share_memory": lambda m: m.share_memory(),
    "torch.Tensor.share_memory_": lambda m: (first(m).share_memory_(), m)[1],
    "torch._C.to_dlpack": lambda m: torch._C._to_dlpack(first(m)),
}


ONCE = (
    "export",
    "onnx",
    "checkpoint",
    "rpc",
    "legacy",
    "bundle",
    "dlpack",
)  # the model makes no difference, and some are slow


def of(model: str) -> list[str]:
    """The writers that are run on a model."""
    return [w for w in WRITERS if model == "int8" or not any(word in w for word in ONCE)]


@torch.no_grad()
def outcome(writer: str, model: nn.Module, expected: torch.Tensor) -> str:
    """ "right", "wrong", "done" (nothing to compare), or the error."""
    try:
        out = WRITERS[writer](model)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if not isinstance(out, nn.Module):
        return "done"
    return "right" if torch.allclose(out(X), expected, rtol=1e-5, atol=1e-6) else "wrong"


def in_child(run: Callable[[], str]) -> tuple[int, str]:
    """(signal that ended a forked process, 0 if none; what it returned)."""
    gc.freeze()  # a child that collected garbage would copy all that was imported
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1), os.dup2(null, 2)
        os.write(write, run()[:2000].encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        said = pipe.read().decode()
    status = os.waitpid(pid, 0)[1]
    return (os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0), said


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    result = {}
    for name, make in MODELS.items():
        model = make()
        with torch.no_grad():
            expected = model(X)
        for writer in of(name):
            result[f"{name}: {writer}"] = in_child(partial(outcome, writer, model, expected))
    print(json.dumps(result))
