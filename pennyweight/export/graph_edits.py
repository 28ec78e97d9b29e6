"""Edits of exported graphs: names of new attributes, constants, observers as nodes, folding of constant nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.traceback import NodeSource, NodeSourceAction

FROM_NODE = "from_node"  # key of Node.meta: the nodes that a node was made from


def new_name(prefix: str) -> Callable[[nn.Module], str]:
    """A function of a module: the first of prefix0, prefix1, .. that it does not have as an attribute."""
    prefix = prefix.replace(".", "_")

    def get_new_attr_name(module: nn.Module) -> str:
        i = 0
        while hasattr(module, f"{prefix}{i}"):
            i += 1
        return f"{prefix}{i}"

    return get_new_attr_name


def the_device(module: nn.Module) -> torch.device | None:
    """The device of the parameters and buffers; None if there are none or "meta" beside others.

    Raises AssertionError if there are several.
    """
    devices = {t.device for t in (*module.parameters(), *module.buffers())} - {torch.device("meta")}
    assert len(devices) <= 1, f"graph mode needs a model on one device, got {sorted(map(str, devices))}"
    return next(iter(devices), None)


def add_constant(model: nn.Module, graph: Graph, prefix: str, value: Any, device: torch.device | None = None) -> Node:
    """Register ``value`` as a buffer under a new name and return a node that reads it."""
    name = new_name(prefix)(model)
    constant = (
        value.detach().clone() if isinstance(value, Tensor) else torch.tensor(value, device=device or the_device(model))
    )
    model.register_buffer(name, constant)
    return graph.create_node("get_attr", name)


def constant_of(model: nn.Module, node: Node | None) -> Any:
    """The tensor that a node reads; None for None. Raises ValueError if the node does not read an attribute."""
    if node is None:
        return None
    if node.op != "get_attr":
        hint = " If working with an ExportedProgram, use .module()" if node.op == "placeholder" else ""
        raise ValueError(f"expected a node that reads a parameter or buffer, got {node.op} {node.name}.{hint}")
    value: Any = model
    for atom in str(node.target).split("."):
        if not hasattr(value, atom):
            raise RuntimeError(f"node {node.name} reads {node.target}, which the model does not have")
        value = getattr(value, atom)
    return value


def set_parameter(model: nn.Module, path: str, value: Tensor, trains: bool) -> None:
    """Put a parameter at a path, in place of the parameter or buffer there; modules on the way are made."""
    *parents, name = path.split(".")
    owner = model
    for parent in parents:
        if not hasattr(owner, parent):
            owner.add_module(parent, nn.Module())
        owner = getattr(owner, parent)
    if name in owner._buffers:
        del owner._buffers[name]
    owner.register_parameter(name, nn.Parameter(value.detach(), requires_grad=trains))


def made_from(node: Node, how: str) -> list[NodeSource]:
    """The entry of ``from_node`` for a node made from this one."""
    return [NodeSource(node, how, [NodeSourceAction.CREATE])]


def producers(node: Node) -> list[Node] | None:
    """The node and all nodes that it depends on; None if one of them is an input of the graph."""
    found, frontier, seen = [node], [node], {node}
    while frontier:
        for source in frontier.pop().all_input_nodes:
            if source.op == "placeholder":
                return None
            if source not in seen:
                seen.add(source)
                found.append(source)
                frontier.append(source)
    return found


def evaluate(model: GraphModule, node: Node, known: dict[Node, Any]) -> Any:
    """The value of a node that depends on constants only. ``known`` keeps values between calls."""
    if node in known:
        return known[node]
    if node.op == "get_attr":
        known[node] = constant_of(model, node)
        return known[node]
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: evaluate(model, n, known))
    if node.op == "call_module":
        known[node] = model.get_submodule(str(node.target))(*args, **kwargs)
    elif node.op == "call_method":
        known[node] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
    else:
        known[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    return known[node]


def written(model: GraphModule) -> set[Node]:
    """Nodes of parameters and buffers that an operator of the graph writes to, and the views on the way."""
    found: set[Node] = set()
    for node in model.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if node.op != "call_function" or schema is None:
            continue
        for argument, value in zip(schema.arguments, node.args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, Node):
                found.update(producers(value) or ())
    return found


def fold_constants(model: GraphModule, wanted: Callable[[Node], bool]) -> None:
    """Replace the wanted nodes that depend on constants only by buffers ``_frozen_param0``, ..

    Buffers that the graph writes to are not constants. Attributes that no node reads afterwards are removed.
    """
    changing, known = written(model), {}  # type: ignore[var-annotated]
    for node in list(model.graph.nodes):
        if node.op != "call_function" or not wanted(node):
            continue
        sources = producers(node)
        if sources is None or changing.intersection(sources):
            continue
        with torch.no_grad():
            replace_by_constant(model, node, evaluate(model, node, known))
    erase_dead(model)
    model.graph.lint()
    model.recompile()


def replace_by_constant(model: GraphModule, node: Node, value: Tensor) -> None:
    """Replace a node by a buffer that holds its value, under the node's name."""
    attribute = new_name("_frozen_param")(model)
    model.register_buffer(attribute, value)
    with model.graph.inserting_before(node):
        reader = model.graph.create_node("get_attr", attribute, (), {})
    node.replace_all_uses_with(reader)
    reader.meta.update(node.meta)
    name = node.name
    model.graph.erase_node(node)
    reader.name = name


def erase_dead(model: GraphModule) -> None:
    """Erase nodes that nobody uses, and the parameters and buffers that only they read."""
    before = {str(node.target) for node in model.graph.find_nodes(op="get_attr")}
    model.graph.eliminate_dead_code()
    for path in before - {str(node.target) for node in model.graph.find_nodes(op="get_attr")}:
        _delete(model, path)


def _delete(model: nn.Module, path: str) -> None:
    *parents, name = path.split(".")
    owner: Any = model
    for parent in parents:
        owner = getattr(owner, parent, None)
        if owner is None:
            return
    if hasattr(owner, name):
        delattr(owner, name)


def insert_observer(model: GraphModule, node: Node, observer: nn.Module) -> Node:
    """A call of the observer after ``node``, as a submodule ``activation_post_process_N``."""
    device = the_device(model)
    if device is not None:
        observer.to(device)
    name = new_name("activation_post_process_")(model)
    setattr(model, name, observer)
    with model.graph.inserting_after(node):
        return model.graph.create_node("call_module", name, (node,), {})
