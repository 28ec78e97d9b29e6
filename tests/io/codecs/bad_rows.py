"""Bad folders one by one: name -> (kind of good folder, what is done to it, what the error must say)."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from tests.io.codecs.good_folders import Folder, good

Write = Callable[[Folder, Path], Path]


def put(name: str, change: Callable[[Tensor], Tensor] | None) -> Write:
    """One stored tensor changed, or taken out."""
    return lambda f, to: f.put(name, None if change is None else change(f.tensors[name])).write(to)


def add(name: str, tensor: Tensor) -> Write:
    return lambda f, to: f.put(name, tensor).write(to)


def say(**changes: Any) -> Write:
    """Keys of quantization_config changed."""
    return lambda f, to: f.say(**changes).write(to)


def text(make: Callable[[dict[str, Any]], bytes]) -> Write:
    """config.json as bytes, from the good one."""
    return lambda f, to: replace(f, text=make({**f.config, "quantization_config": f.method})).write(to)


def edit(**changes: Any) -> Write:
    """Fields of bitsandbytes' JSON beside a weight changed; ... takes one out."""
    return state(
        lambda old: json.dumps({k: v for k, v in {**json.loads(old), **changes}.items() if v is not ...}).encode()
    )


def state(make: Callable[[bytes], bytes]) -> Write:
    def write(f: Folder, to: Path) -> Path:
        name = next(n for n in f.tensors if "quant_state" in n)
        new = make(bytes(f.tensors[name].tolist()))
        return f.put(name, torch.tensor(list(new), dtype=torch.uint8)).write(to)

    return write


def described(make: Callable[[dict[str, Any]], str], name: str = "m.weight") -> Write:
    """torchao's description of one tensor."""

    def write(f: Folder, to: Path) -> Path:
        old = json.loads(f.metadata.get(name, f.metadata["m.weight"]))
        return replace(f, metadata={**f.metadata, name: make(old)}).write(to)

    return write


def group(**changes: Any) -> Write:
    """compressed-tensors' one group changed."""

    def write(f: Folder, to: Path) -> Path:
        ((name, old),) = f.method["config_groups"].items()
        return f.say(config_groups={name: {**old, **changes}}).write(to)

    return write


def weights(**changes: Any) -> Write:
    def write(f: Folder, to: Path) -> Path:
        ((name, old),) = f.method["config_groups"].items()
        return f.say(config_groups={name: {**old, "weights": {**old["weights"], **changes}}}).write(to)

    return write


def targets(first: list[str], layers: int = 1) -> Write:
    """Two groups, the first of these targets; names of layers that are long and alike."""

    def write(f: Folder, to: Path) -> Path:
        ((_, old),) = f.method["config_groups"].items()
        groups = {"a": {**old, "targets": first}, "b": {**old, "targets": ["re:zzz"]}}
        names = ["m", *(f"{'ab' * 200}{i}" for i in range(layers - 1))]
        copies = {f"{n}.{k[2:]}": t.clone() for n in names for k, t in f.tensors.items() if k.startswith("m.")}
        return replace(f, tensors={**f.tensors, **copies}).say(config_groups=groups).write(to)

    return write


def link(name: str, make: Callable[[Path], None]) -> Write:
    """Something else in the place of a file."""

    def write(f: Folder, to: Path) -> Path:
        (f.write(to) / name).unlink()
        make(to / name)
        return to

    return write


def beside(kind: str) -> Write:
    """The tensors of another good folder as well, under other names."""

    def write(f: Folder, to: Path) -> Path:
        more = {f"x.{n}": t for n, t in good(kind).tensors.items()}
        return replace(f, tensors={**f.tensors, **more}).write(to)

    return write


def split(f: Folder, to: Path) -> Path:
    """The tensors in two shards, each layer's parts in both."""
    path = f.write(to)
    (path / "model.safetensors").unlink()
    names = sorted(f.tensors)
    where = {n: f"model-0000{i % 2 + 1}-of-00002.safetensors" for i, n in enumerate(names)}
    for shard in sorted(set(where.values())):
        held = {n: f.tensors[n] for n in names if where[n] == shard}
        (path / shard).write_bytes(save(held, f.metadata or None))
    index = {"metadata": {"total_size": 1.0e3}, "weight_map": where}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def _deep(opening: bytes, closing: bytes, times: int) -> Write:
    return text(lambda config: b'{"quantization_config":' + opening * times + b"1" + closing * times + b"}")


def _number(value: float) -> Callable[[Tensor], Tensor]:
    return lambda t: torch.full_like(t, value)


def _at(index: int, value: int) -> Callable[[Tensor], Tensor]:
    def change(t: Tensor) -> Tensor:
        out = t.clone()
        out[index] = value
        return out

    return change


def opaque(f: Folder, to: Path) -> Path:
    """A weight packed for one kernel, of a few bytes, that claims to be large."""
    both = {"m._weight_qdata": torch.zeros(8, 32, dtype=torch.int8), "m._weight_scale_and_zero": torch.zeros(2, 8, 2)}
    data = {"block_size": [1, 32], "shape": [2**20, 2**20]}
    said = {"_type": "Int4OpaqueTensor", "_tensor_data_names": ["qdata", "scale_and_zero"], "_data": data}
    return Folder(
        {**both, "m.bias": f.tensors["m.bias"]}, f.method, {**f.metadata, "m.weight": json.dumps(said)}
    ).write(to)


SHARDS = split
NAN = float("nan")
CT, FP4 = "compressed-tensors W4-asym", "bitsandbytes nf4"
ROWS: dict[str, tuple[str, Write, str]] = {
    # config.json
    "config 3000 deep": (CT, _deep(b"[", b"]", 3000), "nested deeper"),
    "config 3000 objects deep": (CT, _deep(b'{"a":', b"}", 3000), "nested deeper"),
    "config of 5 MB": (CT, text(lambda c: json.dumps({**c, "a": "x" * 5_000_000}).encode()), "is larger than"),
    "config twice": (CT, text(lambda c: b'{"quantization_config":{},"quantization_config":{}}'), "appears twice"),
    "config cut": (CT, text(lambda c: json.dumps(c).encode()[:-9]), "or its brackets do not match"),
    "config with 1e400": ("gptq", text(lambda c: b'{"quantization_config":{"quant_method":"gptq","bits":1e400}}'),
                          "out of range"),
    "config with NaN": ("gptq", text(lambda c: b'{"quantization_config":{"quant_method":"gptq","bits":NaN}}'),
                        "not a JSON number"),
    "config is a list": (CT, text(lambda c: b"[1]"), "must hold an object"),
    "config is no UTF-8": (CT, text(lambda c: b'{"a":"\xff"}'), "not UTF-8"),
    "config is a pipe": (CT, link("config.json", os.mkfifo), "regular file"),
    "config is a folder": (CT, link("config.json", Path.mkdir), "directory"),
    "config is a link outward": (CT, link("config.json", lambda p: p.symlink_to("/etc/passwd")), "points outside"),
    "method is a list": ("gptq", text(lambda c: b'{"quantization_config":["gptq"]}'), "must be an object"),
    "method is a name": ("awq", text(lambda c: b'{"quantization_config":"awq"}'), "must be an object"),
    "method unknown": (CT, say(quant_method="torch.load"), "quant_method 'torch.load'"),
    "method of another type": (CT, say(quant_method=True), "quant_method 'True'"),
    "method is another": (CT, say(quant_method="gptq"), "packed for one kernel"),
    "method of torchao, without its tensors": ("gptq", say(quant_method="torchao"), "quant_method 'torchao'"),
    # numbers of settings
    "gptq bits as text": ("gptq", say(bits="4"), "bits must be int"),
    "gptq bits true": ("gptq", say(bits=True), "bits must be int"),
    "gptq bits 5": ("gptq", say(bits=5), "the config says 5"),
    "gptq group -7": ("gptq", say(group_size=-7), "positive or -1"),
    "gptq group 0": ("gptq", say(group_size=0), "positive or -1"),
    "gptq group 2**40": ("gptq", say(group_size=2**40), "the config says group_size"),
    "gptq group as text": ("gptq", say(group_size="32"), "group_size must be int"),
    "gptq version 3": ("gptq", say(checkpoint_format="gptq_v3"), "gptq_v3"),
    "gptq two versions": ("gptq", say(checkpoint_format="gptq", format="gptq_v2"), "several formats"),
    "gptq marlin": ("gptq", say(checkpoint_format="marlin"), "packed for one kernel"),
    "gptq desc_act without g_idx": ("gptq", say(desc_act=True), "g_idx (the channel order) is missing"),
    "gptq sym, and it is not": ("gptq", say(sym=True), "zero points are not"),
    "awq bits true": ("awq", say(bits=True), "bits must be int"),
    "awq group 2**40": ("awq", say(group_size=2**40), "does not divide"),
    "awq group 0": ("awq", say(group_size=0), "does not divide"),
    "awq gemv": ("awq", say(version="gemv"), "uses another packing order"),
    "bitsandbytes of 8 bits": (FP4, say(load_in_4bit=False, load_in_8bit=True), "stored as 4-bit"),
    "bitsandbytes of fp4": (FP4, say(bnb_4bit_quant_type="fp4"), "is stored as nf4"),
    "fp8 block 0": ("fp8", say(weight_block_size=[0, 16]), "two positive sizes"),
    "fp8 block huge": ("fp8", say(weight_block_size=[2**40, 2**40]), "two positive sizes"),
    "fp8 block null": ("fp8", say(weight_block_size=None), "one scale"),
    "fp8 block as text": ("fp8", say(weight_block_size="16x16"), "must be list"),
    "fp8 of another format": ("fp8", say(fmt="e5m2"), "only e4m3"),
    "fp8 static without scale": ("fp8", say(activation_scheme="static"), "activation_scale is missing"),
    "hqq settings of another layer": ("hqq 4 bits", say(quant_config={"weight_quant_params": {"nbits": 8}}), "says 8"),
    "ct group 2**40": (CT, weights(group_size=2**40), "group_size"),
    "ct group -7": (CT, weights(group_size=-7), "group_size"),
    "ct bits 32": (CT, weights(num_bits=32), "32 bits"),
    "ct bits as text": (CT, weights(num_bits="4"), "num_bits must be int"),
    "ct strategy unknown": (CT, weights(strategy="torch.load"), "strategy 'torch.load'"),
    "ct format unknown": (CT, group(format="pack-quantized-v9"), "pack-quantized-v9"),
    "ct symmetric, and it is not": (CT, weights(symmetric=True), "symmetric"),
    "ct group is a list": (CT, say(config_groups={"a": []}), "preset"),
    "ct no groups": (CT, say(config_groups={}), "no config group"),
    "ct ignored": (CT, say(ignore=["m"]), "listed in"),
    "ct rotated": (CT, say(transform_config={"a": 1}), "rotated"),
    "ct pattern of a look-behind": (CT, targets(["re:(?<=a)b"]), "simple patterns"),
    "ct pattern that backtracks": (CT, targets(["re:(a+)+$", "re:(((a|b)*)*)*c"], 40), "no target"),
    "ct patterns that take long": (CT, targets([f"re:.*a{'.' * n}c" for n in range(100, 190)], 40), "too long"),
    "ct patterns by the thousand": (CT, targets([f"re:(x|{i})*" for i in range(30_000)]), "total length"),
    "ct pattern of 5000 signs": (CT, targets([f"re:{'a' * 5000}"]), "at most 1000"),
    # names
    "weight twice, gptq": ("gptq", add("m.weight", torch.ones(32, 64)), "must have one weight"),
    "weight twice, awq": ("awq", add("m.weight", torch.ones(16, 64)), "must have one weight"),
    "weight twice, mxfp4": ("mxfp4", add("mlp.experts.gate_up_proj", torch.ones(2, 64, 8)), "must have one weight"),
    "weight twice, hqq": ("hqq 4 bits", add("a.m.weight", torch.ones(8, 32)), "must have one weight"),
    "weight twice, ct": (CT, add("m.weight", torch.ones(16, 64)), "is unexpected"),
    "left over, ct": (CT, add("x.weight_scale", torch.ones(16, 2).half()), "is missing"),
    "left over, gptq": ("gptq", add("x.scales", torch.ones(4, 32).half()), "qweight is missing"),
    "left over, awq": ("awq", add("x.qzeros", torch.ones(2, 2, dtype=torch.int32)), "is unexpected"),
    "left over, bitsandbytes": (FP4, add("x.weight.absmax", torch.ones(4)), "is unexpected"),
    "left over, fp8": ("fp8", add("x.weight_scale_inv", torch.ones(1, 1)), "is unexpected"),
    "left over, mxfp4": ("mxfp4", add("x_scales", torch.ones(1, 1, 1, dtype=torch.uint8)), "x_blocks is missing"),
    "left over, hqq": ("hqq 4 bits", add("x.zero_scale", torch.ones(4)), "is unexpected"),
    "left over, torchao": ("torchao int8", add("x.weight", torch.ones(4)), "no tensor described in the metadata"),
    "name reserved": ("gptq", add("__class__.weight", torch.ones(4)), "reserved"),
    "name upward": ("gptq", add("../m.weight", torch.ones(4)), "empty part"),
    "two formats, gptq": ("gptq", beside(FP4), "two formats"),
    "two formats, awq": ("awq", beside("hqq 4 bits"), "two formats"),
    "two formats, ct": (CT, beside(FP4), "two formats"),
    "two formats, fp8": ("fp8", beside("gptq"), "two formats"),
    "torchao and gptq": ("torchao int8", say(quant_method="gptq"), "tensors of torchao"),
    # numbers that do not fit each other
    "g_idx past the groups": ("gptq g_idx", put("m.g_idx", _at(0, 4)), "there are 4 groups"),
    "g_idx negative": ("gptq g_idx", put("m.g_idx", _at(0, -1)), "g_idx ranges from -1"),
    "g_idx huge": ("gptq g_idx", put("m.g_idx", _at(0, 2**31 - 1)), "there are 4 groups"),
    "g_idx unequal": ("gptq g_idx", put("m.g_idx", _number(2)), "unequal"),
    "zero point that version 1 lacks": ("gptq", put("m.qzeros", _number(-1)), "stored as 15"),
    "zero point of static inputs": ("compressed-tensors W8A8-static", put("m.input_scale", _number(0)), "zero"),
    "fp8 NaN": ("fp8", put("m.weight", lambda t: torch.full_like(t, NAN)), "not valid for e4m3"),
    "exponent 255": ("mxfp4", put("mlp.experts.gate_up_proj_scales", _number(255)), "not valid for e8m0"),
    "exponent 255 of ct": ("compressed-tensors MXFP4", put("m.weight_scale", _number(255)), "not valid for e8m0"),
    "nvfp4 scale NaN": ("compressed-tensors NVFP4A16", put("m.weight_scale", _number(NAN)), "not valid for e4m3"),
    "tiled for a GPU": ("bitsandbytes int8", put("m.weight_format", _number(1)), "weight_format is not 0"),
    "table of other numbers": (FP4, put("m.weight.quant_map", lambda t: t * 1.01), "does not contain the values"),
    "table NaN": (FP4, put("m.weight.quant_map", lambda t: t * NAN), "does not contain the values"),
    # a tiny file that claims much
    "ct shape huge": (CT, put("m.weight_shape", lambda t: torch.tensor([16, 2**62])), "words"),
    "ct shape negative": (CT, put("m.weight_shape", lambda t: torch.tensor([16, -64])), "is [16"),
    "hqq shape huge": ("hqq 4 bits", put("a.m.shape", lambda t: torch.tensor([2**31, 2**31])), "too large"),
    "hqq shape large": ("hqq 4 bits", put("a.m.shape", lambda t: torch.tensor([2**20, 2**20])), "need"),
    "hqq group huge": ("hqq 4 bits", put("a.m.group_size", _number(2**31 - 1)), "do not divide"),
    "bitsandbytes shape huge": (FP4, edit(shape=[2**31, 2**31]), "too large"),
    "bitsandbytes shape large": (FP4, edit(shape=[2**20, 2**20]), "takes at 4 bits"),
    "bitsandbytes shape of 65 axes": (FP4, edit(shape=[1] * 65), "1 to 64 sizes"),
    "torchao block 2**40": ("torchao int8", described(lambda d: json.dumps(
        {**d, "_data": {**d["_data"], "block_size": [1, 2**40]}})), "block_size"),
    "torchao mx block 2**30": ("torchao mxfp4", described(lambda d: json.dumps(
        {**d, "_data": {**d["_data"], "block_size": 2**30}})), "blocks of"),
    "torchao swizzled": ("torchao mxfp4", described(lambda d: json.dumps(
        {**d, "_data": {**d["_data"], "is_swizzled_scales": True}})), "swizzled"),
    "torchao packed for CPUs": ("torchao int4", opaque, "is not a weight of"),
    # texts within files
    "bitsandbytes state cut": (FP4, state(lambda old: old[:-9]), "brackets"),
    "bitsandbytes state twice": (FP4, state(lambda old: old[:-1] + b',"blocksize":64}'), "appears twice"),
    "bitsandbytes state deep": (FP4, state(lambda old: b"[" * 2000 + b"]" * 2000), "nested deeper"),
    "bitsandbytes state too long": (FP4, state(lambda old: old + b" " * 5000), "at most 4096"),
    "bitsandbytes state is a list": (FP4, state(lambda old: b"[]"), "must be an object"),
    "bitsandbytes state of more": (FP4, edit(auto_map="x"), "auto_map"),
    "bitsandbytes state of less": (FP4, edit(blocksize=...), "blocksize"),
    "bitsandbytes blocksize true": (FP4, edit(blocksize=True), "blocksize True"),
    "bitsandbytes blocksize 0": (FP4, edit(blocksize=0), "blocksize 0"),
    "bitsandbytes blocksize 1e300": (FP4, edit(blocksize=1e300), "blocksize 1e+300"),
    "bitsandbytes dtype of torch": (FP4, edit(dtype="torch.load"), "dtype 'torch.load'"),
    "bitsandbytes shape as text": (FP4, edit(shape="8x128"), "list of 1 to 64 sizes"),
    "bitsandbytes shape of 0": (FP4, edit(shape=[0, 128]), "positive"),
    "bitsandbytes offset NaN": ("bitsandbytes nf4 nested", state(
        lambda old: json.dumps({**json.loads(old), "nested_offset": float("nan")}).encode()), "not a JSON number"),
    "bitsandbytes offset 1e300": ("bitsandbytes nf4 nested", edit(nested_offset=1e300), "in the range of float32"),
    "torchao description cut": ("torchao int8", described(lambda d: json.dumps(d)[:-3]), "does not describe"),
    "torchao description deep": ("torchao int8", described(lambda d: "[" * 20_000 + "]" * 20_000), "nested deeper"),
    "torchao description twice": ("torchao int8", described(lambda d: json.dumps(d)[:-1] + ',"_type":"x"}'), "twice"),
    "torchao class unknown": ("torchao int8", described(lambda d: json.dumps({**d, "_type": "os.exit"})), "os.exit"),
    "torchao class a list": ("torchao int8", described(lambda d: json.dumps({**d, "_type": ["x"]})), "_type"),
    "torchao parts missing": ("torchao int8", described(
        lambda d: json.dumps({**d, "_tensor_data_names": ["qdata"]})), "missing 1 required"),
    "torchao part twice": ("torchao int8", described(
        lambda d: json.dumps({**d, "_tensor_data_names": [*d["_tensor_data_names"], "qdata"]})), "also belongs to"),
    "torchao part of two": ("torchao int8", described(lambda d: json.dumps({"_type": "Tensor"}), "m._weight_qdata"),
                            "also belongs to"),
    "torchao tensor not stored": ("torchao int8", described(lambda d: json.dumps({"_type": "Tensor"}), "ghost"),
                                  "part ghost is missing"),
}  # fmt: skip

# name -> (kind, what is done to it): what is odd and has a meaning all the same, the same numbers as before
WORKING: dict[str, tuple[str, Write]] = {
    "unknown keys, ct": (CT, say(auto_map={"AutoConfig": "evil.Config"}, trust_remote_code=True, note=1)),
    "unknown keys, gptq": ("gptq", say(auto_map={"AutoConfig": "evil.Config"}, damp_percent=0.1, dataset=["x"])),
    "unknown keys, awq": ("awq", say(tokenizer="https://example.org", trust_remote_code=True)),
    "unknown keys, bitsandbytes": (FP4, say(llm_int8_threshold=6.0, auto_map={})),
    "unknown keys, fp8": ("fp8", say(auto_map="evil.Config")),
    "unknown keys, mxfp4": ("mxfp4", say(auto_map="evil.Config")),
    "unknown keys, hqq": ("hqq 4 bits", say(auto_map="evil.Config")),
    "no config, gptq": ("gptq sym", say(quant_method=None)),
    "no config, bitsandbytes": (FP4, text(lambda c: b"{}")),
    "pad bits, gptq": ("gptq 3 bits", put("m.qzeros", lambda t: t | torch.tensor([0, 0, -256], dtype=torch.int32))),
    "pattern that backtracks, and matches": (CT, targets(["re:(a*)*m", "re:((((m+)+)+)+)+"])),
}
