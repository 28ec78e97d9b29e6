"""Codebooks by k-means, Core ML's lookup tables, GGUF's class: values, layers, state dicts, errors."""

import copy
import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pennyweight.compat.torchao.algorithms import codebook, codebook_coreml
from pennyweight.compat.torchao.algorithms import codebook_groupwise as groupwise
from pennyweight.compat.torchao.algorithms.codebook import (
    CodebookQuantizedTensor,
    choose_qparams_codebook,
    codebook_weight_only,
    dequantize_codebook,
    fit_kmeans,
    implements_torch_function,
    quantize_codebook,
)
from pennyweight.compat.torchao.algorithms.gguf import GGUFQuantizedTensor, GGUFWeightOnlyConfig
from pennyweight.compat.torchao.format_primitives import _choose_qparams_gguf, dequantize_gguf, quantize_gguf
from pennyweight.compat.torchao.groupwise import compute_error
from pennyweight.compat.torchao.quant_api import quantize_
from pennyweight.core.tensor import AffineQuantizedTensor

COREML = codebook_coreml.CodebookWeightOnlyConfig


@pytest.fixture
def w() -> Tensor:
    return torch.randn(32, 128, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("block", "dtype", "columns", "least"),
    [
        ((1, 1), torch.uint4, 64, 19.0), ((1, 1), torch.uint8, 128, 40.0), ((1, 4), torch.uint8, 32, 9.0),
        ((2, 4), torch.uint8, 64, 9.0), ((4, 1), torch.uint2, 128, 1.0),
    ],
)  # fmt: skip
def test_quality_and_shapes(w: Tensor, block: tuple[int, int], dtype: Any, columns: int, least: float) -> None:
    table, scales = choose_qparams_codebook(w, block, columns, dtype)
    entries = 2 ** int(str(dtype).removeprefix("torch.uint"))
    assert (table.shape, scales.shape) == ((entries, *block), (32, 128 // columns, 1))
    codes = quantize_codebook(w, table, scales, code_dtype=dtype)
    assert (codes.dtype, codes.shape) == (torch.uint8, (32 // block[0], 128 // block[1]))
    back = dequantize_codebook(codes, table, scales)
    assert compute_error(w, back) > least
    scaled = (w.reshape(32, -1, columns) / scales).reshape(32, 128)
    first = scaled[: block[0], : block[1]]
    apart = (table - first).square().flatten(1).sum(1)
    assert int(codes[0, 0]) == int(apart.argmin())


def test_scales(w: Tensor) -> None:
    _, scales = choose_qparams_codebook(w, (1, 1), 64, torch.uint4)
    assert torch.equal(scales[3, 1, 0], w[3, 64:].max())
    _, scales = choose_qparams_codebook(w, (1, 2), 64, torch.uint4)
    torch.testing.assert_close(scales[3, 1, 0], w[3, 64:].norm())
    _, scales = choose_qparams_codebook(torch.zeros(4, 8), (1, 2), 8, torch.uint1)
    assert torch.equal(scales, torch.full((4, 1, 1), 1e-9))


def test_kmeans_and_wide_codes() -> None:
    data = torch.tensor([[0.0], [0.1], [5.0], [5.2]])
    clusters, index, back = fit_kmeans(data, 2)
    assert sorted(clusters.flatten().tolist()) == pytest.approx([0.05, 5.1])
    assert index.dtype is torch.int64
    assert torch.equal(back, clusters[index])
    table = torch.arange(600.0).reshape(600, 1, 1)
    codes = quantize_codebook(torch.tensor([[599.0, 3.2]]), table, torch.ones(1, 1, 1), code_dtype=torch.int32)
    assert (codes.dtype, codes.tolist()) == (torch.int32, [[599, 3]])
    pairs = torch.arange(1200.0).reshape(600, 1, 2)
    wide = quantize_codebook(torch.tensor([[1198.0, 1199.0]]), pairs, torch.ones(1, 1, 1), code_dtype=torch.int32)
    assert wide.tolist() == [[599]]


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (codebook_weight_only(torch.uint4, (1, 1), 32), CodebookQuantizedTensor),
        (codebook_weight_only(torch.uint8, (2, 2)), CodebookQuantizedTensor),
        (COREML(torch.uint4, [-1, 16]), codebook_coreml.CodebookQuantizedTensor),
        (COREML(torch.uint3, [8, -1]), codebook_coreml.CodebookQuantizedTensor),
    ],
)
def test_layers(w: Tensor, config: Any, kind: type) -> None:
    layer = nn.Linear(128, 32)
    layer.weight.data = w
    model = nn.Sequential(copy.deepcopy(layer))
    quantize_(model, config)
    q: Any = model[0].weight
    assert type(q) is kind
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(4), requires_grad=True)
    y = model(x)
    torch.testing.assert_close(y, F.linear(x, q.dequantize(), layer.bias))
    assert compute_error(layer(x), y) > 8
    y.sum().backward()
    torch.testing.assert_close(x.grad, q.dequantize().sum(0).expand(3, 128))
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    loaded = nn.Sequential(nn.Linear(128, 32))
    loaded.load_state_dict(torch.load(file, weights_only=True), assign=True)
    assert torch.equal(loaded(x), y)
    assert torch.equal(copy.deepcopy(model)(x), y)
    assert torch.equal(torch.compile(model, backend="aot_eager", fullgraph=True)(x), y)
    model.bfloat16()
    assert model(x.detach().bfloat16()).dtype is torch.bfloat16
    assert "block_size=" in repr(q)


def test_other_operations_use_the_values(w: Tensor) -> None:
    q: Any = CodebookQuantizedTensor.from_float(w, (1, 1), torch.uint4, 128)
    x = torch.ones(2, 128)
    assert torch.equal(x @ q.t(), x @ q.dequantize().t())
    assert torch.equal(F.embedding(torch.tensor([3]), q)[0], q.dequantize()[3])
    assert q.dequantize(torch.float16).dtype is torch.float16
    seen = []
    saved = CodebookQuantizedTensor._TORCH_FN_TABLE[CodebookQuantizedTensor].copy()  # type: ignore[attr-defined]

    @implements_torch_function(torch.relu)
    def relu(tensor: Any) -> Tensor:
        seen.append(tensor)
        return torch.relu(tensor.dequantize())

    assert bool((torch.relu(q) >= 0).all())
    assert len(seen) == 1
    CodebookQuantizedTensor._TORCH_FN_TABLE[CodebookQuantizedTensor] = saved  # type: ignore[attr-defined]
    assert codebook.function_detach(q).codes.shape == q.codes.shape
    assert codebook.function_requires_grad_(q, False) is q


def test_coreml_tables(w: Tensor) -> None:
    tables, codes = codebook_coreml.choose_qparams_and_quantize_codebook_coreml(w, torch.uint3, [-1, 32])
    assert (tables.shape, codes.shape, codes.dtype) == ((1, 4, 8, 1), (32, 128), torch.uint8)
    assert bool((tables.diff(dim=2) >= 0).all())
    back = codebook_coreml.dequantize_codebook(codes, tables, 3, [-1, 32])
    for j in range(4):
        levels = tables[0, j, :, 0]
        wanted = (w[:, 32 * j : 32 * j + 32, None] - levels).abs().amin(-1)
        torch.testing.assert_close((w - back)[:, 32 * j : 32 * j + 32].abs(), wanted)
    rows, _ = codebook_coreml.choose_qparams_and_quantize_codebook_coreml(w, torch.uint1, [8, 128])
    assert rows.shape == (4, 1, 2, 1)
    vectors = torch.arange(8.0).reshape(1, 1, 2, 4)
    found = codebook_coreml.dequantize_codebook(torch.tensor([[0, 1]]), vectors, 1, [-1, -1], torch.float16)
    assert (found.shape, found.dtype) == ((1, 2, 4), torch.float16)


def test_errors(w: Tensor) -> None:
    table, scales = choose_qparams_codebook(w, (1, 2), 64, torch.uint4)
    for call, text in (
        (lambda: quantize_codebook(w.double(), table, scales), "Unsupported input dtype"),
        (lambda: quantize_codebook(w, table[0], scales), r"codebook dim \(2\) must be input dim"),
        (lambda: choose_qparams_codebook(w, (1, 3), 64, torch.uint4), "dimension 1 of input"),
        (lambda: choose_qparams_codebook(w, (1, 1), 60, torch.uint4), r"input_features \(128\)"),
        (lambda: choose_qparams_codebook(w, (1, 1), 64, torch.float32), "code_dtype must be one of"),
        (lambda: dequantize_codebook(torch.zeros(1), table, scales, torch.int8), "Unsupported output dtype"),
    ):
        with pytest.raises(AssertionError, match=text):
            call()
    choose = codebook_coreml.choose_qparams_and_quantize_codebook_coreml
    for call, text in (
        (lambda: choose(w, torch.uint4, [16, 16]), "all rows or all columns"),
        (lambda: choose(w, torch.int8, [-1, -1]), "torch.uint1 to torch.uint8"),
        (lambda: choose(w, torch.uint4, [-1, 30]), "must divide"),
        (lambda: choose(w, torch.uint4, [-1, -1], cluster_dim=2), "cluster_dim == 1"),
        (lambda: choose(w[0], torch.uint4, [-1]), "rank 2"),
        (lambda: codebook_coreml.dequantize_codebook(w, table, 4, [-1, -1]), "must have 4 axes"),
    ):
        with pytest.raises(AssertionError, match=text):
            call()


# -- GGUF --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [256, 768])
@pytest.mark.parametrize("blocks", [8, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gguf_is_our_tensor_with_the_same_numbers(columns: int, blocks: int, dtype: torch.dtype) -> None:
    w = torch.randn(8, columns, generator=torch.Generator().manual_seed(1)).to(dtype)
    q: Any = GGUFQuantizedTensor.from_float(w, blocks, torch.uint4)
    assert type(q) is AffineQuantizedTensor
    assert isinstance(q, GGUFQuantizedTensor)
    block = (1, 256 // blocks)
    params = _choose_qparams_gguf(w, block, torch.uint4)
    taken = GGUFQuantizedTensor.take(q)
    for name, wanted in zip(GGUFQuantizedTensor.tensor_data_names, params, strict=False):
        assert torch.equal(taken[name].to(dtype), wanted), name
    codes = quantize_gguf(w, block, torch.uint4, *params)
    assert torch.equal(taken["int_data"], codes)
    wanted = dequantize_gguf(codes, block, torch.uint4, *(p.float() for p in params))
    torch.testing.assert_close(q.dequantize(torch.float32), wanted, rtol=1e-5, atol=1e-5)
    again = GGUFQuantizedTensor(**taken)
    assert torch.equal(again.dequantize(), q.dequantize())


def test_gguf_layers() -> None:
    model = nn.Sequential(nn.Linear(256, 16))
    x = torch.randn(4, 256, generator=torch.Generator().manual_seed(1))
    y = model(x)
    quantize_(model, GGUFWeightOnlyConfig(torch.uint4, 8))
    assert 18 < compute_error(y, model(x)) < 40
    with pytest.raises(AssertionError, match="only uint4"):
        quantize_(nn.Sequential(nn.Linear(256, 16)), GGUFWeightOnlyConfig(torch.uint8))
    with pytest.raises(ValueError, match="must divide 256"):
        GGUFWeightOnlyConfig(n_blocks_per_superblock=9)
    with pytest.raises(ValueError, match="multiple of 256"):
        GGUFQuantizedTensor(
            8, torch.ones(1, 1), torch.ones(1, 1), torch.ones(1, 1, 8), torch.ones(1, 1, 8), x, (4, 100)
        )


# -- groups ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("block", "scale_block", "tables", "least"),
    [([4, -1], None, 8, 15.0), ([-1, 32], None, 4, 15.0), ([8, -1], [1, 32], 4, 15.0), ([32, -1], None, 1, 15.0)],
)
def test_groups_of_rows_and_columns(w: Tensor, block: Any, scale_block: Any, tables: int, least: float) -> None:
    codes, luts, scales = groupwise.quantize_dispatch(w, block, torch.uint4, scale_block)
    assert (codes.shape, luts.shape) == ((32, 128), (tables, 16))
    assert scales is None if scale_block is None else scales.shape == (32 * 4,)  # type: ignore[union-attr]
    back = groupwise.dequantize_dispatch(codes, luts, scales, block, scale_block, code_dtype=torch.uint4)
    assert compute_error(w, back) > least
    if scale_block is None:
        same = groupwise.dequantize_with_flexible_grouping(codes, luts, block, torch.uint4)
        assert torch.equal(same, back)
        first = (
            slice(0, block[0]) if block[0] != -1 else slice(None),
            slice(0, block[1]) if block[1] != -1 else slice(None),
        )
        assert torch.equal(back[first], luts[0][codes[first].long()])


def test_group_sizes_and_files(w: Tensor, tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert groupwise.block_shape_to_group_size([4, -1], w.shape) == 512
    assert groupwise.group_size_to_block_shapes(512, w.shape) == [4, -1]
    file = tmp_path / "new" / "q.pt"
    assert groupwise.load_quantized_data(file) is None
    groupwise.save_quantized_data({"w": w}, file)
    data = groupwise.load_quantized_data(file)
    assert data is not None
    assert torch.equal(data["w"], w)
    assert str(file) in capsys.readouterr().out


def test_group_errors(w: Tensor) -> None:
    for call, text in (
        (lambda: groupwise.group_size_to_block_shapes(100, w.shape), "divisible by the number of columns"),
        (lambda: groupwise.quantize_dispatch(w, [4, -1], torch.uint4, backend="scale"), "requires a `scale_block"),
        (lambda: groupwise.quantize_dispatch(w, [-1, 4], torch.uint4, [1, 32]), "tables for rows"),
        (lambda: groupwise.quantize_dispatch(w, [4, -1], torch.uint4, [2, 32]), r"scales \[1, K\]"),
        (lambda: groupwise.quantize_dispatch(w, [4, -1], torch.uint4, backend="x"), "Unknown backend"),
        (lambda: groupwise.quantize_dispatch(w, [4, 4], torch.uint4), "not supported"),
        (lambda: groupwise.quantize_dispatch(w, [5, -1], torch.uint4), r"rows \(32\) must be divisible"),
    ):
        with pytest.raises((ValueError, NotImplementedError, AssertionError), match=text):
            call()
    config = groupwise.GroupwiseLutWeightConfig
    for given, text in (
        ({"backend": "x"}, "Invalid backend"), ({"lut_block_shape": [1]}, "length 2"),
        ({"lut_block_shape": [1, 2]}, "exactly one"), ({"has_scale": True}, "without scale"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=text):
            config(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize("reference", [False, True])
def test_layers_with_groups(w: Tensor, reference: bool) -> None:
    model = nn.Sequential(nn.Linear(128, 32))
    model[0].weight.data = w.clone()
    config = groupwise.GroupwiseLutWeightConfig(torch.int4, lut_block_shape=[4, -1], use_qdq_reference=reference)
    quantize_(model, config)
    q: Any = model[0].weight
    codes, luts, _ = groupwise.quantize_flexible_grouping(w, [4, -1], torch.uint4)
    wanted = groupwise.dequantize_with_flexible_grouping(codes, luts, [4, -1], torch.uint4)
    assert type(q) is (nn.Parameter if reference else codebook_coreml.CodebookQuantizedTensor)
    assert torch.equal(q if reference else q.dequantize(), wanted)
    assert compute_error(w, wanted) > 15
