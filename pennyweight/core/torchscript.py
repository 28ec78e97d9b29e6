"""TorchScript's writers refuse quantized tensors.

They are C++ and read the storage of each tensor of a module. A wrapper subclass has a storage of its shape and dtype
without memory, so torch 2.13 reads a null pointer and the process ends. No Python code of the tensor runs on the way,
so every C++ function that Python can call to write TorchScript is replaced by one that looks for quantized tensors
first. tests/core/test_torchscript.py compares the list with what torch has.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

# (owner in torch._C, None: the module itself; functions that write what they are given)
WRITERS: tuple[tuple[str | None, tuple[str, ...]], ...] = (
    ("ScriptModule", ("save", "save_to_buffer", "_save_for_mobile", "_save_to_buffer_for_mobile")),
    ("ScriptFunction", ("save", "save_to_buffer")),
    ("ScriptModuleSerializer", ("serialize",)),  # torch.package
    (None, ("_save_jit_module", "_save_jit_module_to_bytes", "_save_parameters", "_pickle_save")),
)


def guard(kind: type) -> None:
    """Make TorchScript's writers raise a RuntimeError if they would write a tensor of class ``kind``."""
    for name, functions in WRITERS:
        owner = torch._C if name is None else getattr(torch._C, name, None)
        for function in functions:
            write = getattr(owner, function, None)  # not every build of torch has all of them
            if write is not None and not hasattr(write, "__wrapped__"):
                setattr(owner, function, _checked(write, kind))


def _checked(write: Callable[..., Any], kind: type) -> Callable[..., Any]:
    @functools.wraps(write)
    def checked(*args: Any, **kwargs: Any) -> Any:
        for value in (*args, *kwargs.values()):
            name, found = next(((n, t) for n, t in _tensors(value, "") if isinstance(t, kind)), ("", None))
            if found is not None:
                raise RuntimeError(
                    f"TorchScript cannot write the quantized tensor {name or 'it was given'}, {tuple(found.shape)}: "
                    "its writer reads the memory of float tensors. A frozen trace holds codes and scales as plain "
                    "tensors: torch.jit.save(torch.jit.freeze(torch.jit.trace(model.eval(), example)), path), loaded "
                    "after `import pennyweight`. Or save with pennyweight.save(model, folder), or torch.export.save"
                )
        return write(*args, **kwargs)

    return checked


def _tensors(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of all tensors that a writer finds in a module, a function or plain Python containers."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, torch._C.ScriptModule):
        yield from _of_module(value, name)
    elif isinstance(value, torch._C.ScriptFunction):
        yield from _constants(value.inlined_graph)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _tensors(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item, name)


def _of_module(module: Any, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    kind: Any = torch._C.ConcreteModuleType.from_jit_type(
        module._type()
    )  # knows the attributes that no method reads, too
    attributes = {name: module.getattr(name) for name in kind.get_attributes()}
    for name, value in (attributes | dict(torch._C.ModuleDict(module).items())).items():
        yield from _tensors(value, f"{prefix}.{name}" if prefix else name)
    for method in module._method_names():
        yield from _constants(module._get_method(method).graph)


def _constants(graph: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors among the constants of a graph, with those of its loops and branches."""
    for node in graph.findAllNodes("prim::Constant"):
        if node.output().type().kind() in ("TensorType", "ListType", "TupleType", "DictType", "OptionalType"):
            yield from _tensors(node.output().toIValue(), "of a constant")
