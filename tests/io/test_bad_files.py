"""Every bad file is refused: for the right reason, in under a second, in little memory, with the model untouched."""

import copy
import sys
import time
from pathlib import Path

import pytest
import torch

from pennyweight.core.tensor import AffineQuantizedTensor
from pennyweight.io import CheckpointError, flatten, load, unflatten
from tests import forked
from tests.io.bad_files import CASES
from tests.io.samples import Model, sample_file, sample_model

# What the error must say -> the cases that it must say it of.
REASONS = {
    "a safetensors file has at least 8": ["empty", "seven bytes"],
    "header of": [
        "length zero", "length above the file", "length 2**63", "header cut", "pickle", "shard truncated",
    ],
    "header: JSON nested deeper than 8, or its brackets": [
        "length too short", "unclosed string", "3000 objects deep", "3000 arrays deep", "a million brackets",
    ],
    "truncated or padded": ["truncated", "longer than said"],
    "header: JSON is not UTF-8": ["not UTF-8"],
    'header does not start with "{"': ["not an object", "leading space"],
    "header: not JSON": ["trailing garbage", "no JSON"],
    "header: number of 1000000 digits": ["number of a million digits"],
    "appears twice in one JSON object": ["a key twice", "manifest with a key twice", "index with a key twice"],
    "more than 131072 tensors in one file": ["150 000 entries"],
    "not a JSON number: NaN": ["NaN as offset", "manifest with NaN"],
    "expected an integer, got a fraction: 0.0": ["fraction as offset"],
    "data_offsets must be two non-negative": ["bool as offset", "negative offset", "one offset", "text as offset"],
    "data_offsets give": ["offsets in reverse", "shape times dtype is not bytes"],
    "non-negative integers": [
        "negative shape", "bool in shape", "shape is no list",
        "shape with a fraction", "shape with a bool", "shape negative", "shape of 65 axes",
    ],
    "is too large": ["huge shape", "shape that wraps to zero", "huge sizes beside a zero", "shape huge"],
    "65 axes; the maximum is 64": ["65 axes"],
    "entry must have exactly dtype, shape and data_offsets": [
        "no dtype", "extra key in an entry", "no offsets", "entry is a list",
    ],
    "unknown dtype": [
        "unknown dtype", "dtype of torch", "stored dtype is a list", "sub-byte dtype", "dtype unknown", "dtype integer",
        "dtype is a list", "scale dtype unknown",
    ],
    "a hole or an overlap": ["past the end", "overlap"],
    "__metadata__ must map strings to strings": ["metadata is a list", "metadata holds a number"],
    "a bool that is neither 0 nor 1": ["bool of 2"],
    "1 to 1024 are allowed": ["name empty", "name of 1025 bytes"],
    "at most 64 are allowed": ["name of 65 parts"],
    "name holds control characters": ["name with NUL", "name with a line feed"],
    "name has an empty part between dots": [
        "name with dots", "name upward", "alias with a bad name", "tensor with a bad name",
    ],
    "is reserved": ["name reserved", "name reserved in the manifest"],
    "name is not valid Unicode": ["name with half a surrogate"],
    "not JSON: Expecting value": ["manifest is no JSON", "index is no JSON"],
    "manifest must be an object": ["manifest is a list"],
    "or its brackets do not match": ["manifest 3000 deep", "index 3000 deep"],
    "is missing": [
        "manifest a dozen deep", "act static without parameters", "quantized twice", "declared, not stored", "no codes",
        "no scale", "no zero point", "no offset", "no act_scale", "no codes of a scale", "part in another shard",
        "regex bomb", "perm not stored", "no perm", "no guard", "pre_scale not stored", "no pre_scale",
    ],
    "newer than this release supports (5); upgrade": ["newer version", "version 999"],
    "this release supports 1 to 5": ["version 0", "version true", "version text"],
    "missing ['version']": ["no version"],
    "unknown ['flat', 'guard']": ["version too low for what is there"],
    "declares format version 5, but its contents need version 4": ["pre_scale not announced"],
    "unexpected part reordered.weight.perm": ["perm not announced"],
    "unknown ['auto_map']": ["unknown key"],
    "tensors and aliases must be objects": ["tensors is a list"],
    "unknown ['trust_remote_code']": ["tensor unknown key"],
    "missing ['shape']": ["no shape"],
    "missing ['spec']": ["spec missing", "act without spec"],
    "must be an object, got": ["tensor is a text", "spec is a text", "scale number"],
    " needs torch.": [
        "flat, said to be in rows", "flat codes a byte short",
        "shape larger than stored", "shape smaller than stored", "shape of another rank", "axes swapped",
        "format of another width", "block other", "scale dtype other", "float for codes", "uint8 for int8 codes",
        "codes a row short", "codes flat", "scale of one row", "scale of no axes", "scale of float16", "scale of int64",
        "zero point of int64", "act_scale of two", "perm of int64", "perm of 63", "perm of a row each",
        "pre_scale of float64", "pre_scale of one",
    ],
    "axes must be a permutation of": [
        "axes are no permutation", "axes out of range", "axes too many", "axes with a bool",
    ],
    "axes must be omitted if they are in stored order": ["axes identity"],
    "signed_scale must be true or false": ["signed_scale is 1"],
    "perm must be true or false": ["perm is 1"],
    "perm needs an axis": ["perm of a number"],
    "pre_scale must be true or false": ["pre_scale is 1"],
    "pre_scale needs an axis": ["pre_scale of a number"],
    "not a permutation of 0 to 63": ["perm all zero", "perm with 64", "perm with -1"],
    "unknown ['bits']": ["spec unknown key"],
    "files store bit streams and declare no layout": ["spec with a layout", "spec with layout bits"],
    "unknown number format": ["format unknown", "format with dots"],
    "QuantSpec.format must be str": ["format is a list"],
    "each entry is a positive size or -1": ["block zero", "block -7", "block empty"],
    "QuantSpec.block must be null or a list of integers": ["block text", "block fraction", "block bool"],
    "has 3 axes but the tensor of shape (8, 64) has 2": ["block of more axes"],
    "unexpected part": [
        "scale null", "left-over zero point", "left-over nested part", "left-over table", "left-over perm",
        "left-over pre_scale",
    ],
    "QuantSpec.zero_point must be bool": ["zero_point is 1"],
    "zero_point is in code units and needs an integer format": ["zero_point of a float"],
    "QuantSpec.mid must be one of the codes": ["mid huge", "mid out of range", "mid of a float"],
    "ActivationSpec.mode must be": ["act unknown mode"],
    "act: unknown rule": ["act unknown rule"],
    "number of 401 digits": ["act eps huge"],
    "act: eps must be finite and not negative": ["act eps negative"],
    "which is not in this file": [
        "alias of nothing", "alias of a part", "alias of an alias", "alias of itself",
    ],
    "is stored, and is an alias of": ["alias that is stored"],
    "an alias must name a stored tensor": ["alias is a number"],
    "is both a plain tensor and a quantized one": [
        "float beside quantized", "guard with bytes", "guard not announced",
    ],
    "has parts, but the file does not describe it": ["stored, not declared"],
    "guard must be true or false": ["guard is 1"],
    "flat must be true or false": ["flat is 1"],
    "flat needs three axes or more": ["flat of two axes"],
    "values are NaN or inf": [
        "pre_scale NaN", "pre_scale inf",
        "scale NaN", "scale inf", "bf16 scale NaN", "bf16 scale inf", "offset NaN", "offset inf",
        "offset of a scale NaN", "scale of a scale inf", "act_scale NaN",
    ],
    "values are negative": [
        "scale negative", "bf16 scale negative", "scale of a scale negative", "nested scale negative",
        "act_scale negative",
    ],
    "is zero; an activation scale must be positive": ["act_scale zero"],
    "values 7..16 are outside uint4 (0 to 15)": ["zero point 16 of uint4"],
    "a code is not valid for ternary": ["ternary code 3", "ternary code 3 at the end"],
    "a code is not valid for e4m3": ["e4m3 NaN", "e4m3 negative NaN"],
    "a code is not valid for e8m0": ["e8m0 NaN"],
    "unused bits at the end of a row are not zero": ["unused bits"],
    "contains neither model.safetensors nor": ["no index", "folder empty"],
    "must be an object that maps tensors to files": [
        "index without weight_map", "weight_map is a list", "weight_map is empty",
    ],
    "is not the plain name of a .safetensors file": [
        "shard is a number", "shard is a list", "shard empty", "shard upward", "shard absolute", "shard in a folder",
        "shard with a backslash", "shard on a drive", "shard with NUL", "shard is an address", "shard is a pickle",
        "shard hidden",
    ],
    "cannot be opened": ["shard missing", "folder missing", "path with NUL"],
    "is a link that points outside the folder": ["shard is a link outward", "index is a link outward"],
    "is not a regular file": ["shard is a pipe"],
    "listed in the index, but missing from the file": ["shard lacks a tensor"],
    "not in the index": ["shard has one too many"],
    "is also in model-00001": ["tensor in two shards"],
}  # fmt: skip
REASON_OF = {case: reason for reason, cases in REASONS.items() for case in cases}


def test_every_case_has_a_reason() -> None:
    assert REASON_OF.keys() == CASES.keys()


@pytest.mark.parametrize("case", CASES)
def test_bad_file_is_refused_and_the_model_untouched(case: str, tmp_path: Path) -> None:
    path = CASES[case](tmp_path)
    model = Model()
    places = {name: id(tensor) for name, tensor in model.state_dict(keep_vars=True).items()}
    before = copy.deepcopy(model.state_dict())
    for target in (model, None):
        start = time.process_time()
        with pytest.raises(CheckpointError) as caught:
            load(path, target)
        assert time.process_time() - start < 1
        assert REASON_OF[case] in caught.value.reason
        assert str(caught.value.path).startswith(str(tmp_path))
        assert caught.value.reason in str(caught.value)
    assert {name: id(tensor) for name, tensor in model.state_dict(keep_vars=True).items()} == places
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), before.values(), strict=True))


def test_the_sample_itself_is_good(tmp_path: Path) -> None:
    model = load(sample_file(tmp_path), Model())
    for name, tensor in sample_model().state_dict().items():
        mine = model.get_parameter(name) if "." in name else model.get_buffer(name)
        if isinstance(tensor, AffineQuantizedTensor):
            mine, tensor = mine.dequantize(), tensor.dequantize()
        assert torch.equal(mine, tensor), name


CHILD = """
import resource, sys
from pennyweight.io import CheckpointError, load
from tests.io.samples import Model
good, *bad = sys.argv[1:]
load(good, Model())
in_use = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
limit = in_use + (128 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
for path in bad:
    for model in (Model(), None):
        try:
            load(path, model)
        except CheckpointError:
            continue
        sys.exit(f"accepted {path}")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the limit on address space is Linux's")
def test_refusing_takes_little_memory(tmp_path: Path) -> None:
    """All bad files, one after the other, under a limit of 128 MiB over what the process has after a good one."""
    paths = [sample_file(tmp_path)]
    for i, case in enumerate(sorted(CASES.keys() - {"path with NUL"})):
        folder = tmp_path / str(i)
        folder.mkdir()
        paths.append(CASES[case](folder))
    run = forked.run(["-c", CHILD, *map(str, paths)])
    assert (run.returncode, run.stderr) == (0, "")


@pytest.mark.parametrize(
    ("name", "wrong", "reason"),
    [
        ("int4.weight.scale", lambda t: t.float(), "needs torch.bfloat16"),
        ("int4.weight.scale", lambda t: t[:1], "needs torch.bfloat16 [8, 2]"),
        ("int4.weight.scale", lambda t: -t, "are negative"),
        ("int4.weight.codes", lambda t: t.float(), "needs torch.uint8"),
        ("e4m3.weight.codes", lambda t: t.float().fill_(float("nan")).to(t.dtype), "not valid for e4m3"),
    ],
)
def test_unflatten_checks_as_load_does(name: str, wrong: object, reason: str) -> None:
    tensors, metadata = flatten(sample_model().state_dict())
    tensors[name] = wrong(tensors[name])  # type: ignore[operator]
    with pytest.raises(CheckpointError, match="weight") as caught:
        unflatten(tensors, metadata)
    assert reason in caught.value.reason
    assert caught.value.path is None


def test_error_shows_hostile_names_safely() -> None:
    text = str(CheckpointError("f", "a\x1b[31m" + "x" * 5000, "reason"))
    assert "\x1b" not in text
    assert len(text) < 300
