"""prepare and convert: which observers are shared, what graphs contain, what they compute."""

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule, Node

import pennyweight as pw
from pennyweight_torchao import graph_mode as gm
from pennyweight_torchao.graph_mode.observer_base import ObserverBase
from pennyweight_torchao.graph_mode.specs import ANNOTATION

from .graphs import converted, exported, targets, x86, xnnpack


class Cat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.a(x), self.b(x)], 1)


def quantized_by_hand(x: Tensor, observer: Any) -> Tensor:
    scale, zero_point = observer.calculate_qparams()
    low, high = observer.quant_min, observer.quant_max
    return ((x * (1 / float(scale))).round() + int(zero_point)).clamp(low, high).sub(int(zero_point)) * float(scale)


def test_a_linear_layer_by_hand() -> None:
    """The converted graph is the formula of its docstrings."""
    model, x = nn.Sequential(nn.Linear(6, 5)), torch.randn(7, 6)
    prepared = gm.prepare(exported(model.eval(), x), x86())
    prepared(x)
    seen: dict[str, Any] = {n: m for n, m in prepared.named_modules() if isinstance(m, ObserverBase)}
    assert sorted(seen) == ["activation_post_process_0", "activation_post_process_1"]
    act, weight = (seen[name] for name in sorted(seen))
    graph = gm.convert(prepared)
    w = model[0].weight
    scale = (w.abs().amax(1) / 127.5).reshape(-1, 1)
    torch.testing.assert_close(weight.calculate_qparams()[0], scale.flatten())
    codes = (w * (1 / scale)).round().clamp(-128, 127)
    torch.testing.assert_close(graph(x), F.linear(quantized_by_hand(x, act), codes * scale, model[0].bias))
    assert graph._frozen_param0.dtype is torch.int8  # type: ignore[union-attr]
    assert sorted(targets(graph)) == [
        "aten.linear.default",
        "quantized_decomposed.dequantize_per_channel.default",
        "quantized_decomposed.dequantize_per_tensor.default",
        "quantized_decomposed.quantize_per_tensor.default",
    ]


def test_without_folding_the_weight_stays_float() -> None:
    model, x = nn.Sequential(nn.Linear(6, 5)), torch.randn(7, 6)
    folded, plain = (converted(model, x86(), x, fold_quantize=fold) for fold in (True, False))
    assert "quantized_decomposed.quantize_per_channel.default" in targets(plain)
    assert torch.equal(folded(x), plain(x))


def test_weights_need_no_calibration() -> None:
    model, x = nn.Sequential(nn.Linear(6, 5)), torch.randn(7, 6)
    bare = gm.convert(gm.prepare(exported(model.eval(), x), x86(is_dynamic=True)))
    assert torch.equal(bare(x), converted(model, x86(is_dynamic=True), x)(x))


def test_all_inputs_of_cat_have_one_observer() -> None:
    x = torch.randn(3, 4)
    prepared: Any = gm.prepare(exported(Cat().eval(), x), xnnpack())
    cat = next(n for n in prepared.graph.nodes if n.target is torch.ops.aten.cat.default)
    observers = {id(prepared.get_submodule(n.target)) for n in (*cat.args[0], *cat.users)}
    assert len(observers) == 1


class Annotate(gm.Quantizer):
    """Annotates by a function of the graph."""

    def __init__(self, note: Any) -> None:
        self.note = note

    def annotate(self, model: GraphModule) -> GraphModule:
        self.note({str(n.name): n for n in model.graph.nodes})
        return model

    def validate(self, model: GraphModule) -> None:
        pass


def spec(**more: Any) -> gm.QuantizationSpec:
    make = gm.MinMaxObserver.with_args(eps=2**-12)
    return gm.QuantizationSpec(torch.uint8, make, 0, 255, torch.per_tensor_affine, **more)


def test_shared_derived_and_fixed_specs() -> None:
    def bias_parameters(seen: list[Any]) -> tuple[Tensor, Tensor]:
        (s, _), (w, _) = (m.calculate_qparams() for m in seen)
        return s * w, torch.zeros(1, dtype=torch.int64)

    def note(nodes: dict[str, Node]) -> None:
        linear, sigmoid = nodes["linear"], nodes["sigmoid"]
        x, weight, bias = linear.args
        make = gm.MinMaxObserver.with_args(eps=2**-12)
        of_weight = gm.QuantizationSpec(torch.int8, make, -128, 127, torch.per_tensor_symmetric)
        places: Any = [(x, linear), (weight, linear)]
        of_bias = gm.DerivedQuantizationSpec(
            places, bias_parameters, torch.int32, -(2**31), 2**31 - 1, torch.per_tensor_symmetric
        )
        inputs: Any = {x: spec(), weight: of_weight, bias: of_bias}
        linear.meta[ANNOTATION] = gm.QuantizationAnnotation(inputs, _annotated=True)
        fixed = gm.FixedQParamsQuantizationSpec(torch.uint8, 1 / 256, 0, 0, 255, torch.per_tensor_affine)
        sigmoid.meta[ANNOTATION] = gm.QuantizationAnnotation({}, fixed, _annotated=True)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return torch.sigmoid(self.l(x))

    model, x = Model(), torch.randn(5, 4)
    graph = converted(model, Annotate(note), x)
    y = graph(x)
    torch.testing.assert_close(y * 256, (y * 256).round())  # codes of the fixed scale
    dtypes = {n.args[5] for n in graph.graph.nodes if str(n.target).startswith("quantized_decomposed.dequantize")}
    assert dtypes == {torch.uint8, torch.int8, torch.int32}
    torch.testing.assert_close(y, model(x), atol=0.02, rtol=0)


def test_a_shared_spec_of_a_place_without_annotation_names_it() -> None:
    def note(nodes: dict[str, Node]) -> None:
        shared: Any = gm.SharedQuantizationSpec(nodes["linear"])
        nodes["linear"].meta[ANNOTATION] = gm.QuantizationAnnotation({nodes["linear"].args[0]: shared})  # type: ignore[dict-item]

    with pytest.raises(ValueError, match="names linear, which has no annotation"):
        gm.prepare(exported(nn.Sequential(nn.Linear(2, 2)).eval(), torch.ones(1, 2)), Annotate(note))


def test_the_callback_can_change_observers() -> None:
    class Fixed(gm.X86InductorQuantizer):
        def prepare_obs_or_fq_callback(self, model: GraphModule, edge_or_node_to_obs_or_fq: Any) -> None:
            for place, observer in edge_or_node_to_obs_or_fq.items():
                if isinstance(observer, gm.HistogramObserver):
                    edge_or_node_to_obs_or_fq[place] = gm.FixedQParamsObserver(0.5, 7, torch.uint8)

    quantizer = Fixed().set_global(gm.get_default_x86_inductor_quantization_config())
    graph = converted(nn.Sequential(nn.Linear(4, 3)), quantizer, torch.randn(2, 4))
    found = [
        n.args[1:3] for n in graph.graph.nodes if n.target is torch.ops.quantized_decomposed.quantize_per_tensor.default
    ]
    assert found == [(0.5, 7)]


def test_two_quantizers() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.e, self.l = nn.Embedding(9, 6), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.l(self.e(x))

    model, x = Model(), torch.arange(5)
    both = gm.ComposableQuantizer([gm.EmbeddingQuantizer(), x86(is_dynamic=True)])
    prepared = gm.prepare(exported(model.eval(), x), both)
    graph = gm.convert(prepared)
    assert graph._frozen_param0.dtype is torch.uint8  # type: ignore[union-attr]
    torch.testing.assert_close(graph(x), model(x), atol=0.05, rtol=0)

    class Rude(gm.EmbeddingQuantizer):
        pass

    with pytest.raises(RuntimeError, match="Rude has changed annotations on node embedding"):
        gm.prepare(exported(model.eval(), x), gm.ComposableQuantizer([gm.EmbeddingQuantizer(), Rude()]))


def test_configs_of_modules_and_functions() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Conv1d(1, 1, 1))
    x = torch.randn(2, 1, 4)
    quantizer = x86().set_module_name_qconfig("0", None)
    graph = converted(model, quantizer, x)
    assert targets(graph).count("aten.linear.default") == 2
    assert targets(graph).count("quantized_decomposed.dequantize_per_channel.default") == 1
    with pytest.warns(UserWarning, match="Mixed dynamic and static"), pytest.warns(UserWarning, match="Skip the"):
        quantizer.set_module_name_qconfig("1", gm.get_default_x86_inductor_quantization_config(is_dynamic=True))
    with pytest.warns(UserWarning, match="Unable to customize"):
        quantizer.set_function_type_qconfig(torch.sin, None)
    by_type = gm.XNNPACKQuantizer().set_module_type(nn.Linear, gm.get_symmetric_quantization_config())
    assert "quantized_decomposed.dequantize_per_tensor.default" in targets(converted(model, by_type, x))


def test_batch_norms_are_folded() -> None:
    class Twice(nn.Module):
        """One convolution, called before two batch norms, and twice before one of them."""

        def __init__(self) -> None:
            super().__init__()
            self.c, self.n, self.m = nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2), nn.BatchNorm2d(2)
            self.l, self.k = nn.Linear(2, 3), nn.BatchNorm1d(3)
            for norm in (self.n, self.m, self.k):
                norm.running_mean.normal_()  # type: ignore[union-attr]
                norm.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]

        def forward(self, x: Tensor) -> Tensor:
            x = self.n(self.c(self.n(self.c(x))))
            return self.k(self.l(self.m(self.c(x)).mean((2, 3))))

    model, x = Twice().eval(), torch.randn(4, 2, 3, 3)
    prepared = gm.prepare(exported(model, x), Annotate(lambda nodes: None))
    assert not [t for t in targets(prepared) if "batch_norm" in t]
    torch.testing.assert_close(prepared(x), model(x), rtol=1e-4, atol=1e-5)


def test_a_layer_whose_output_has_other_readers_keeps_its_batch_norm() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.c, self.n = nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2)

        def forward(self, x: Tensor) -> Tensor:
            y = self.c(x)
            return self.n(y) + y

    model, x = Both().eval(), torch.randn(4, 2, 3, 3)
    prepared = gm.prepare(exported(model, x), Annotate(lambda nodes: None))
    torch.testing.assert_close(prepared(x), model(x))


def test_bfloat16_graphs_stay_bfloat16() -> None:
    model, x = nn.Sequential(nn.Linear(8, 4)).bfloat16(), torch.randn(3, 8, dtype=torch.bfloat16)
    graph = converted(model, x86(), x)
    assert graph(x).dtype is torch.bfloat16
    torch.testing.assert_close(graph(x), model(x), atol=0.05, rtol=0.05)


def test_graphs_can_be_exported_again_and_copied() -> None:
    model, x = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 4)), torch.randn(3, 8)
    graph = converted(model, x86(), x, free=True)
    again: Any = torch.export.export(graph, (x,)).module()
    assert torch.equal(again(x), graph(x))
    assert torch.equal(graph(x[:2]), graph(x)[:2])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's own, about the tree of inputs
        copied = copy.deepcopy(graph)
    assert torch.equal(copied(x), graph(x))
    assert graph.state_dict().keys() == copied.state_dict().keys()
    assert pickle.loads(pickle.dumps(gm.MinMaxObserver(dtype=torch.int8))).dtype is torch.int8


def test_errors_name_the_remedy() -> None:
    with pytest.raises(pw.ArgumentError, match=r"call torch.export.export\(model, example_inputs\).module\(\) first"):
        gm.prepare(nn.Linear(2, 2), x86())  # type: ignore[arg-type]
    graph = converted(nn.Sequential(nn.Linear(2, 2)), x86(), torch.ones(1, 2))
    with pytest.raises(NotImplementedError, match="move_exported_model_to_eval"):
        graph.eval()
    with pytest.raises(ValueError, match="quant_min must be <= quant_max"):
        gm.QuantizationSpec(torch.int8, gm.MinMaxObserver, 5, 3)


def test_loops_are_quantized_inside() -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            def body(i: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
                return i + 1, F.linear(y, w)

            start = (torch.zeros((), dtype=torch.int64), x)
            loop: Any = torch.ops.higher_order.while_loop
            return loop(lambda i, y, w: i < 2, body, start, (self.l.weight,))[1]  # type: ignore[no-any-return]

    x = torch.randn(2, 3)
    model: Any = Loop().eval().requires_grad_(False)
    prepared = gm.prepare(exported(model, x), x86())
    prepared(x)
    done = gm.convert(prepared)
    inner = [t for m in done.modules() if isinstance(m, GraphModule) for t in targets(m)]
    assert "quantized_decomposed.dequantize_per_channel.default" in inner
    torch.testing.assert_close(done(x), model(x), atol=0.05, rtol=0)
