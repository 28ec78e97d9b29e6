"""The recorder of golden cases, and the inputs that all cases share."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.quantization import PerAxis, PerGroup, PerRow, PerTensor
from torchao.quantization.quant_primitives import MappingType

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
MAPPINGS = {
    "sym": MappingType.SYMMETRIC,
    "asym": MappingType.ASYMMETRIC,
    "noclip": MappingType.SYMMETRIC_NO_CLIPPING_ERR,
}

# For the roles listed under "approx": max|got - stored| <= tolerance[dtype of stored] * max|stored|.
# About 16 units of float32, 2.5 of bfloat16 and 2 of float16: sums of 128 products in another order.
APPROX_TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-3}

DERIVED_INPUTS = {
    "v.*": "w.*[:8]",
    "nz.*": "torch.cat([w.*[:2], w.*[3:17]])",
    "nf4w.f32": "nf4w.bf16.float()",
    "bias": "bias.*[:out_features]",
}

# name of a config argument's type -> its plain JSON form
ENCODERS = {
    torch.dtype: lambda v: str(v).removeprefix("torch."),
    MappingType: lambda v: v.name,
    ScaleCalculationMode: lambda v: v.name,
    PerGroup: lambda v: ["PerGroup", v.group_size],
    PerAxis: lambda v: ["PerAxis", v.axis],
    PerRow: lambda v: ["PerRow"],
    PerTensor: lambda v: ["PerTensor"],
    list: lambda v: [encode(e) for e in v],
    dict: lambda v: {k: encode(e) for k, e in v.items()},
}


def encode(value):
    return ENCODERS.get(type(value), lambda v: v)(value)


class CheckFailed(RuntimeError):
    """The oracle's result is not the one that its definition gives: nothing must be written."""


def check(ok: bool, message: str) -> None:
    if not ok:
        raise CheckFailed(message)


class Golden:
    """Collects tensors and cases; equal tensors are stored once."""

    def __init__(self):
        self.tensors: dict[str, torch.Tensor] = {}
        self.cases: dict[str, dict] = {}
        self.skipped: dict[str, str] = {}
        self._seen: dict[tuple, str] = {}

    def put(self, key: str, tensor: torch.Tensor) -> str:
        """Store a tensor and return its key: that of an older one if it has the same bits."""
        t = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)  # usual strides
        raw = t.reshape(-1).view(torch.uint8).numpy().tobytes()
        older = self._seen.setdefault((t.dtype, t.shape, hashlib.sha256(raw).digest()), key)
        if older == key:
            self.tensors[key] = t
        return older

    def case(
        self,
        name: str,
        api: str,
        args: dict,
        inputs: dict[str, str],
        make: Callable[[], dict[str, torch.Tensor]],
        approx: tuple[str, ...] = (),
        note: str | None = None,
    ) -> None:
        """Record what `make()`, {role: tensor}, gives, or the reason why it gives nothing."""
        try:
            roles = make()
        except CheckFailed:
            raise
        except Exception as e:  # what torchao raises is the result
            self.skipped[name] = f"{type(e).__name__}: {' '.join(str(e).split())[:200]}"
            return
        bad = [r for r, t in roles.items() if t.is_floating_point() and not t.isfinite().all()]
        if bad == ["output"]:
            del roles["output"]
            self.skipped[f"{name}.output"] = "non-finite values"
        elif bad:
            self.skipped[name] = f"non-finite values in {', '.join(bad)}"
            return
        keys = {role: self.put(f"{name}.{role}", t) for role, t in roles.items()}
        same_as = {role: key for role, key in keys.items() if key != f"{name}.{role}"}
        entry = {
            "api": api,
            "args": encode(args),
            "inputs": inputs,
            "tensors": [role for role in keys if role not in same_as],
            "same_as": same_as,
            "approx": list(approx),
            "note": note,
        }
        self.cases[name] = {k: v for k, v in entry.items() if v or k in ("args", "inputs", "tensors")}

    def write(self, out: Path, stem: str, versions: dict[str, str]) -> None:
        out.mkdir(parents=True, exist_ok=True)
        (out / f"{stem}.safetensors").write_bytes(save(self.tensors))
        head = {
            "format": 1,
            **versions,
            "torch": torch.__version__.split("+")[0],
            "derived_inputs": DERIVED_INPUTS,
            "approx_tolerance": APPROX_TOLERANCE,
        }
        sections = [f" {json.dumps(k)}: {json.dumps(v)}" for k, v in head.items()]
        for title, entries in (("cases", self.cases), ("skipped", self.skipped)):
            lines = (f"  {json.dumps(k)}: {json.dumps(v, separators=(',', ':'))}" for k, v in entries.items())
            sections.append(f' "{title}": {{\n' + ",\n".join(lines) + "\n }")
        (out / f"{stem}.json").write_text("{\n" + ",\n".join(sections) + "\n}\n")
        print(f"{len(self.cases)} cases, {len(self.skipped)} skipped, {len(self.tensors)} tensors")


def make_inputs(g: Golden) -> dict[str, torch.Tensor]:
    gen = torch.Generator().manual_seed(20260821)

    def randn(*shape):
        # About N(0, 1), from a sum of integers and one multiplication: torch.randn itself gives other last bits on
        # other CPUs.
        total = torch.randint(0, 1 << 14, (12, *shape), generator=gen).sum(0) - 6 * (1 << 14)
        return total.float() * (1.0037 / (1 << 14))

    w = randn(48, 128) * 0.05
    w[1, 7] = 1.5  # one outlier
    w[2] = 0.0  # one all-zero row
    w[3] = 0.0371  # one constant row
    w[4] = w[4].abs() + 0.01  # one row that does not reach zero

    x = randn(5, 128)
    x[1] = x[1].abs() + 0.25  # all positive
    x[2] = 0.0  # all-zero token
    x[3, 5] = 23.0  # outlier
    xint = torch.randint(-8, 9, (5, 128), generator=gen).float()
    bias = randn(48) * 0.1

    p = randn(4, 64)
    p[1] = p[1].abs() * 0.1 + 3.0  # does not reach zero
    p[2, :32] = 0.0  # all-zero group
    p[2, 32:] = -0.75  # constant group
    p[3] *= 20.0
    p[3, 0] = 300.0

    # bfloat16 values, so that the float32 and bfloat16 cases start from equal numbers, and so few bits that the mean
    # of the block maxima is exact in any order
    n = (randn(128, 128) * 0.05).bfloat16()
    n[0, 3] = 0.3

    m = randn(8, 64)
    m[1, :32] = 0.0  # zero block
    m[1, 32:] *= 1e-3
    m[2, :32] *= 1e-39  # subnormal in float32
    m[2, 32:] *= 3e-38  # smallest normal numbers
    m[3, :32] = torch.linspace(-448.0, 448.0, 32)
    m[3, 32:] = torch.tensor([2.0 ** (i % 9 - 4) * (-1) ** i for i in range(32)])
    m[4, :32] *= 1e30
    m[4, 32:] = randn(32).clamp(-0.9, 0.9) * 1e38
    m[5, :32] = torch.linspace(-1.0, 1.9375, 32)  # the mantissa of the maximum rounds up
    m[5, 32:] = torch.linspace(-1.0, 1.625, 32)
    m[6, :32] = torch.tensor([i * 0.25 - 4.0 for i in range(32)])  # many ties
    m[6, 32:] = -torch.tensor([i * 0.1 for i in range(32)])  # starts with -0.0
    m[7] *= 0.05

    f = randn(8, 64)
    f[1, :16] = 0.0  # zero block
    f[1, 16:32] *= 1e-6
    f[1, 32:48] = 1e-40  # subnormal in float32
    f[2, :16] = torch.tensor([i * 0.5 - 4.0 for i in range(16)])  # many ties
    f[2, 16:32] = torch.linspace(-6.0, 6.0, 16)
    f[3] *= 40.0
    f[4, 0] = 2000.0  # outlier
    f[5] *= 0.02

    t = {}
    for tag, dtype in DTYPES.items():
        for name, value in (("w", w), ("x", x), ("xint", xint), ("bias", bias), ("p", p)):
            t[f"{name}.{tag}"] = value.to(dtype)
    for tag in ("f32", "bf16"):
        t[f"m.{tag}"], t[f"f.{tag}"] = m.to(DTYPES[tag]), f.to(DTYPES[tag])
    t["nf4w.bf16"] = n
    t["vec.f32"] = torch.tensor([-3.5, 0.0, 1.0, 10.2])
    for key, value in t.items():
        check(g.put(key, value) == key, "equal inputs")
    for tag in DTYPES:
        t[f"v.{tag}"] = t[f"w.{tag}"][:8].clone()
        t[f"nz.{tag}"] = torch.cat([t[f"w.{tag}"][:2], t[f"w.{tag}"][3:17]])
    t["nf4w.f32"] = n.float()
    return t
