"""Whatever torch writes with, a process with quantized weights gets a right result or one error, and never dies."""

import importlib
import inspect
import json
import re
from collections.abc import Iterator

import pytest
import torch

from pennyweight.core.torchscript import WRITERS as GUARDED
from tests import forked
from tests.core import writer_cases

REFUSED = "TorchScript cannot write the quantized tensor"
# Torch's own sentence, where torch refuses any module or reads no memory
TORCH = {
    "torch.jit._script.ScriptModule.share_memory": "Couldn't swap",
    "torch.jit._script.ScriptModule.__reduce__": "Tried to serialize object",
    "torch.serialization.save of a trace": "Tried to serialize object",
    "torch._C.ScriptModule.dump": "data is not allocated yet",
    "torch._C.ScriptModule.dump_to_str": "data is not allocated yet",
    "torch._C.to_dlpack": "Cannot access data pointer",
    "torch.utils.mobile_optimizer.optimize_for_mobile": f"XNNPACK is not enabled|{REFUSED}",
    "torch.onnx.export": "pennyweight",
    "torch.serialization._legacy_save": "_use_new_zipfile_serialization",
}
RIGHT = (
    "torch.jit._serialization.save of a frozen trace", "torch.jit._serialization.save of a function",
    "torch.jit._freeze.optimize_for_inference",
    "copy.deepcopy of a trace", "torch.package.package_exporter.PackageExporter.save_pickle", "torch.export.save",
    "torch.serialization.save", "torch.distributed.checkpoint.state_dict_saver.save",
    "torch.distributed.rpc.internal.serialize", "torch.nn.modules.module.Module.share_memory",
    "torch.Tensor.share_memory_", "torch._C.ScriptModule._replicate_for_data_parallel",
)  # fmt: skip
NO_SCRIPT = "Failed to get source"  # transformers' models cannot be scripted

MODULES = (
    "torch", "torch.jit", "torch.jit._serialization", "torch.jit._freeze", "torch.jit.mobile", "torch.package",
    "torch.export", "torch.onnx", "torch.serialization", "torch.storage", "torch.utils.mobile_optimizer",
    "torch.utils.bundled_inputs",
    "torch.utils.dlpack", "torch.distributed.checkpoint", "torch.distributed.rpc.internal",
)  # fmt: skip
CLASSES = (
    torch.jit.ScriptModule, torch.package.PackageExporter, torch._C.ScriptModule, torch._C.ScriptFunction,
    torch._C.ScriptModuleSerializer, torch._C.LiteScriptModule, torch.nn.Module,
)  # fmt: skip
WRITES = re.compile(
    "save|export|serialize|dump|pickle|to_buffer|to_bytes|share_memory|flatbuffer|to_dlpack|for_mobile|bundle_inputs|"
    "optimize_for"
)
# why it needs no case -> functions
_EXEMPT = {
    "takes what was read from a file": """
        torch._C._backport_for_mobile
        torch._C._backport_for_mobile_from_buffer
        torch._C._backport_for_mobile_from_buffer_to_buffer
        torch._C._backport_for_mobile_to_buffer
        torch._C._export_operator_list
        torch._C._save_mobile_module
        torch._C._save_mobile_module_to_bytes
        torch.jit.mobile._backport_for_mobile
        torch.jit.mobile._backport_for_mobile_to_buffer
        torch.jit.mobile._export_operator_list
    """,
    "refuses storages and addresses": """
        torch._C._gds_save_storage
        torch._C._to_dlpack
        torch._C._to_dlpack_versioned
    """,
    "called by a case": """
        torch._C._jit_pass_metal_optimize_for_mobile
        torch._C._jit_pass_optimize_for_inference
        torch._C._jit_pass_optimize_for_mobile
        torch._C._jit_pass_vulkan_optimize_for_mobile
    """,
    "writes no tensors": """
        torch._C._dispatch_dump
        torch._C._dispatch_dump_table
        torch._C._dump_local_tls_set
        torch._C._dump_upgraders_map
        torch._C._enable_mobile_interface_call_export
        torch._C._export_opnames
        torch._C._get_module_info_from_flatbuffer
        torch._C._pickle_load_obj
        torch._C._valgrind_toggle_and_dump_stats
        torch._jit_internal.export
        torch.jit._script.ScriptModule._save_to_state_dict
        torch.jit._script.ScriptModule.dump_patches
        torch.jit._serialization.get_flatbuffer_module_info
        torch.jit._serialization.jit_module_from_flatbuffer
        torch.jit.export_opnames
        torch.nn.modules.module.Module._save_to_state_dict
        torch.nn.modules.module.Module.dump_patches
        torch.onnx._internal.torchscript_exporter.utils.select_model_mode_for_export
        torch.onnx.is_in_onnx_export
        torch.serialization._check_save_filelike
        torch.storage._get_dtype_from_pickle_storage_type
        torch.storage._share_memory_lock_protected
    """,
    "takes bytes or text": """
        torch.package.package_exporter.PackageExporter.save_binary
        torch.package.package_exporter.PackageExporter.save_module
        torch.package.package_exporter.PackageExporter.save_source_file
        torch.package.package_exporter.PackageExporter.save_source_string
        torch.package.package_exporter.PackageExporter.save_text
    """,
    "half of a case": """
        torch.distributed.rpc.internal.deserialize
        torch.serialization._cpu_deserialize
        torch.serialization._deserialize
        torch.serialization._meta_deserialize
        torch.serialization._mps_deserialize
        torch.serialization._save
    """,
    "tests/export": """
        torch.export.draft_export
        torch.export.export
    """,
    "tests/integrations/test_dcp.py": """
        torch.distributed.checkpoint.state_dict_saver.async_save
        torch.distributed.checkpoint.state_dict_saver.save_state_dict
    """,
    "guarded; a case calls it through torch's Python function": """
        torch._C.ScriptModule._save_for_mobile
        torch._C.ScriptModule._save_to_buffer_for_mobile
        torch._C.ScriptModule.save
        torch._C.ScriptModule.save_to_buffer
        torch._C.ScriptModuleSerializer.serialize
        torch._C._save_jit_module
        torch._C._save_jit_module_to_bytes
        torch.jit.ScriptFunction.save
        torch.jit.ScriptFunction.save_to_buffer
    """,
}
EXEMPT = {name for names in _EXEMPT.values() for name in names.split()}


def names() -> Iterator[str]:
    """Every function of torch whose name says that it writes."""
    for module in map(importlib.import_module, MODULES):
        for value in vars(module).values():
            home = getattr(value, "__module__", None) or ""
            if inspect.isroutine(value) and home.startswith("torch") and WRITES.search(value.__name__):
                yield f"{home}.{value.__name__}"
    for kind in CLASSES:
        where = "torch._C" if kind.__module__ == "torch" else kind.__module__
        yield from (f"{where}.{kind.__name__}.{n}" for n in dir(kind) if WRITES.search(n))
    yield from (f"torch._C.{n}" for n, v in vars(torch._C).items() if inspect.isroutine(v) and WRITES.search(n))


@pytest.fixture(scope="module")
def outcomes() -> dict[str, tuple[int, str]]:
    command = ["-W", "ignore", "-m", writer_cases.__name__]
    done = forked.run(command, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_every_writer_of_torch_has_a_case() -> None:
    covered = {name.partition(" of ")[0] for name in writer_cases.WRITERS} | EXEMPT
    assert sorted(set(names()) - covered) == []
    assert sorted(EXEMPT - set(names())) == []


def test_every_door_into_torchscript_is_guarded() -> None:
    for owner, functions in GUARDED:
        where = torch._C if owner is None else getattr(torch._C, owner)
        assert all(hasattr(getattr(where, f), "__wrapped__") for f in functions)


@pytest.mark.parametrize("model", writer_cases.MODELS)
def test_no_writer_ends_the_process(model: str, outcomes: dict[str, tuple[int, str]]) -> None:
    """Right, or one error."""
    for writer in writer_cases.of(model):
        signal, said = outcomes[f"{model}: {writer}"]
        assert signal == 0, f"{writer} ended the process with signal {signal}"
        if writer in RIGHT:
            assert said == "right", (writer, said)
        elif model == "fused" and NO_SCRIPT in said:
            assert "script" in writer
        else:
            assert re.search(TORCH.get(writer, REFUSED), said), (writer, said)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.freeze` is deprecated:DeprecationWarning")
def test_a_quantized_tensor_is_found_in_a_branch_and_in_containers() -> None:
    class Branches(torch.nn.Module):
        def __init__(self, w: torch.Tensor) -> None:
            super().__init__()
            self.by_name = {"a": [w]}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.sum() > 0:
                x = x @ self.by_name["a"][0].t()
            return x

    w = writer_cases.first(writer_cases.net("int8"))
    scripted = torch.jit.script(Branches(w)).eval()
    for module in (scripted, torch.jit.freeze(scripted)):
        with pytest.raises(RuntimeError, match=REFUSED):
            module.save_to_buffer()
    assert torch.jit.script(torch.nn.Linear(3, 3)).save_to_buffer()  # float modules are written
