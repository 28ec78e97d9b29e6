"""Which places of an annotated graph have one observer.

Places are merged if a spec says so (:class:`SharedQuantizationSpec`), and if they see the same tensor with equal specs:
the edges from one producer, and its output. The groups are the classes of a union-find structure.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict
from functools import partial
from typing import Any

from torch import nn
from torch.fx import GraphModule, Node

from .fake_quantize import FixedQParamsFakeQuantize
from .observer_base import PartialWrapper
from .passive_observers import DerivedObserverOrFakeQuantize, FixedQParamsObserver
from .specs import (
    ANNOTATION,
    DerivedQuantizationSpec,
    EdgeOrNode,
    FixedQParamsQuantizationSpec,
    QuantizationSpec,
    QuantizationSpecBase,
    SharedQuantizationSpec,
)

Specs = dict[EdgeOrNode, QuantizationSpecBase | None]
_COMPARED = ("dtype", "is_dynamic", "quant_min", "quant_max", "qscheme", "ch_axis", "scale", "zero_point")


def annotated_places(model: GraphModule) -> Specs:
    """Place -> its spec, in the order of the graph: the inputs of a node, then its output."""
    specs: Specs = {}
    for node in model.graph.nodes:
        annotation = node.meta.get(ANNOTATION)
        if annotation is None:
            continue
        for source, spec in annotation.input_qspec_map.items():
            specs[(source, node)] = spec
        if annotation.output_qspec is not None:
            specs[node] = annotation.output_qspec
    return specs


class Groups:
    """place -> parent place; a root is its own parent."""

    def __init__(self, specs: Specs) -> None:
        self.specs, self.parent = specs, {place: place for place in specs}

    def root(self, place: EdgeOrNode) -> EdgeOrNode:
        """The root of a place. Raises ValueError for a place that no annotation names."""
        if place not in self.parent:
            raise ValueError(
                f"a SharedQuantizationSpec names {place}, which has no annotation; annotated are {list(self.parent)}"
            )
        while self.parent[place] != place:
            self.parent[place] = place = self.parent[self.parent[place]]
        return place

    def merge(self, child: EdgeOrNode, parent: EdgeOrNode) -> None:
        """Put the group of ``child`` below that of ``parent``."""
        up, down = self.root(parent), self.root(child)
        spec = self.specs[up]
        if isinstance(spec, SharedQuantizationSpec) and spec.edge_or_node == down:
            self.parent[up] = down  # ``up`` already refers to ``down``, whose own spec must stay the root
        else:
            self.parent[down] = up

    def root_spec(self, spec: QuantizationSpecBase | None) -> QuantizationSpecBase | None:
        """The spec that a chain of shared specs ends in."""
        seen: set[int] = set()
        while isinstance(spec, SharedQuantizationSpec):
            if id(spec) in seen:
                raise ValueError(f"SharedQuantizationSpec of {spec.edge_or_node} refers to itself through others")
            seen.add(id(spec))
            spec = self.specs[self.root(spec.edge_or_node)]
        return spec


def _same(a: QuantizationSpecBase | None, b: QuantizationSpecBase | None) -> bool:
    missing = object()
    return a is not None and all(getattr(a, name, missing) == getattr(b, name, missing) for name in _COMPARED)


def group_places(specs: Specs) -> Groups:
    """The groups of the places."""
    groups = Groups(specs)
    for place, spec in specs.items():
        if not isinstance(place, Node):
            source, user = place
            own = groups.root_spec(spec)
            if user.meta[ANNOTATION].allow_implicit_sharing:
                # other edges first: if this edge pointed to the output before, an edge could end below itself
                for other in (*((source, u) for u in source.users if u is not user), source):
                    if other in specs and _same(groups.root_spec(specs[other]), own):
                        groups.merge(place, other)
        if isinstance(spec, SharedQuantizationSpec):
            groups.merge(place, spec.edge_or_node)
    return groups


def make_observers(specs: Specs, groups: Groups, qat: bool) -> dict[EdgeOrNode, nn.Module | None]:
    """Place -> its observer; the places of a group have the same one. None: not quantized."""
    of_root: dict[EdgeOrNode, nn.Module | None] = {}
    made: dict[EdgeOrNode, nn.Module | None] = {}
    for place, spec in specs.items():
        root = groups.root(place)
        if root not in of_root:
            of_root[root] = make_observer(spec, made, qat)
        made[place] = of_root[root]
    return made


def make_observer(
    spec: QuantizationSpecBase | None, made: Mapping[EdgeOrNode, nn.Module | None], qat: bool
) -> nn.Module | None:
    """The observer that a spec asks for; ``made``: observers of earlier places, for shared and derived specs."""
    if spec is None:
        return None
    if isinstance(spec, SharedQuantizationSpec):
        assert spec.edge_or_node in made, (
            f"please make sure only refer to edge or node that has observer/fake_quant inserted: "
            f"'{spec.edge_or_node}' not in {made.keys()}"
        )
        return made[spec.edge_or_node]
    if isinstance(spec, DerivedQuantizationSpec):
        sources = [made[place] for place in spec.derived_from]
        return DerivedObserverOrFakeQuantize(
            spec.dtype, sources, spec.derive_qparams_fn, spec.quant_min, spec.quant_max, spec.qscheme, spec.ch_axis  # type: ignore[arg-type]
        )  # fmt: skip
    if isinstance(spec, FixedQParamsQuantizationSpec):
        make = FixedQParamsObserver.with_args(**asdict(spec))
        return FixedQParamsFakeQuantize(observer=make) if qat else make()
    assert isinstance(spec, QuantizationSpec), f"expected a QuantizationSpec, got {spec}"
    make = spec.observer_or_fake_quant_ctr
    arguments: dict[str, Any] = {name: getattr(spec, name) for name in _COMPARED[:6]}
    if not _per_channel(make):
        arguments.pop("ch_axis")
    return make.with_args(**deepcopy(arguments))()


def _per_channel(make: Any) -> bool:
    """Does a factory, or the observer of a fake quantizer, take ``ch_axis``?"""
    if isinstance(make, PartialWrapper):
        inner = make.p.keywords.get("observer") if isinstance(make.p, partial) else None
        return _per_channel(make.p.func if isinstance(make.p, partial) else make.p) or _per_channel(inner)
    return "PerChannel" in getattr(make, "__name__", "")
