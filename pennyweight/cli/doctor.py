"""``pennyweight doctor``: checks this installation; runs each kernel on a small weight, and with --bench times some."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..planning.configs.aliases import CONFIGS, by_name
from .output import Traceback, report_errors, table

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ..core.tensor import AffineQuantizedTensor
    from ..kernels import Kernel

EXTRAS = ("transformers", "accelerate", "peft", "diffusers", "triton")
UNHEALTHY = 1


@dataclass
class Health:
    """The results of doctor; empty ``problems`` means healthy."""

    versions: dict[str, str]
    cpu: dict[str, Any]
    accelerators: list[str]
    native_kernels: str
    fused_blocks: str
    extras: dict[str, str | None]
    kernels: list[CheckedKernel]
    bench: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return {"version": 1, "healthy": not self.problems, **asdict(self)}


@report_errors
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
    with_bench: Annotated[
        bool,
        typer.Option("--bench", help="Also time int8 and int4 against float here: products, convolutions, a block."),
    ] = False,
    traceback: Traceback = False,
) -> None:
    """Check this installation.

    Prints versions and CPU features, and compares every kernel with the reference. Exit code 0 if healthy, else 1.
    """
    health = examine()
    if with_bench:
        health.bench = [asdict(line) for line in measure()]
    typer.echo(json.dumps(health.to_dict(), indent=2) if as_json else text(health))
    if health.problems:
        raise typer.Exit(UNHEALTHY)


def examine() -> Health:
    """Run all checks, without timing."""
    import platform

    import torch

    from .. import __version__
    from ..kernels.torch_int8 import int_mm_saturates

    versions = {"pennyweight": __version__, "torch": torch.__version__, "python": platform.python_version()}
    cpu = {
        "machine": platform.machine(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "onednn": torch.backends.mkldnn.is_available(),
        "int_mm_saturates": int_mm_saturates(),
    }
    found = torch.accelerator.current_accelerator(check_available=True)
    accelerators = [] if found is None else [found.type]
    checked = check_kernels({"cpu", *accelerators})
    problems = [f"kernel {k.op}/{k.name}: {k.note}" for k in checked if k.broken]
    if not any(k.usable for k in checked):
        problems.append("no kernel is usable")
    blocks, broken = check_blocks()
    if broken:
        problems.append(f"fused blocks: {blocks}")
    return Health(versions, cpu, accelerators, _native_kernels(), blocks, _extras(), checked, problems=problems)


def text(health: Health) -> str:
    """The results as text."""
    cpu = health.cpu
    products = "saturates: int8 sums can be wrong" if cpu["int_mm_saturates"] else "is exact"
    facts = [
        *health.versions.items(),
        ("cpu", f"{cpu['machine']}, {cpu['capability']}, {cpu['threads']} threads"),
        ("oneDNN", "yes" if cpu["onednn"] else "no"),
        ("int8 products", f"torch._int_mm {products} here"),
        ("accelerator", ", ".join(health.accelerators) or "none"),
        ("native kernels", health.native_kernels),
        ("fused blocks", health.fused_blocks),
        *((name, version or "not installed") for name, version in health.extras.items()),
    ]
    lines = [f"{name:<15} {value}" for name, value in facts]
    rows = [(k.op, k.name, "BROKEN" if k.broken else "usable" if k.usable else "no", k.note) for k in health.kernels]
    lines += ["", table(("op", "kernel", "here", ""), rows)]
    heading = ""
    for line in health.bench:
        timing = Timing(**line)
        lines += ["", f"{timing.what}:"] if timing.what != heading else []
        lines.append(str(timing))
        heading = timing.what
    lines += ["", *(f"problem: {p}" for p in health.problems)] if health.problems else ["", "healthy"]
    return "\n".join(lines)


def _native_kernels() -> str:
    from ..kernels.cpu.library import REMEDY, available, isas, switched_off

    verdict = available()
    if verdict is True:
        return ", ".join(isas())
    return f"none, torch's kernels run instead: {verdict}" + ("" if switched_off() else f". {REMEDY}")


def check_blocks() -> tuple[str, bool]:
    """(Whether a small transformer block runs as one native call here, whether it should but does not)."""
    from ..kernels.cpu.library import available

    verdict = available()
    if verdict is not True:
        return f"no, blocks run layer by layer: {verdict}", False
    try:
        reason = _fused_encoder(64, "int8")[1]
    except Exception as error:  # a broken build may raise anything; doctor must report it
        reason = f"{type(error).__name__}: {error}"
    return (f"BROKEN, {reason}", True) if reason else ("yes, within tolerance of their own forward", False)


def _fused_encoder(width: int, name: str) -> tuple[nn.Module, str]:
    """(nn.TransformerEncoder of one block, quantized and fused; why the block is not fused, or "")."""
    import torch

    from ..inference import fuse_
    from ..quantize import quantize_

    model = _encoder(width)
    quantize_(model, by_name(name))
    row = fuse_(model, torch.zeros(1, 2, width, dtype=torch.float32, device="cpu")).rows[0]
    return model, "" if row.kernel == "block" else row.note or "the block is not fused"


def _encoder(width: int) -> nn.Module:
    import torch
    from torch import nn

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(
            width, max(1, width // 64), 4 * width, 0.0, batch_first=True, norm_first=True, dtype=torch.float32,
            device="cpu",
        )  # fmt: skip
        return nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval().requires_grad_(False)


def _extras() -> dict[str, str | None]:
    from importlib.metadata import PackageNotFoundError, version

    out: dict[str, str | None] = {}
    for name in EXTRAS:
        try:
            out[name] = version(name)
        except PackageNotFoundError:
            out[name] = None
    return out


# -- each kernel once against the reference ----------------------------------------------------------------------------

# Maximum distance of a kernel from the reference, as a ratio of norms: the error of its declared arithmetic with a
# margin for its sums, and for outputs rounded to bfloat16 (2**-9 per element).
_LIMITS = {"exact": 1e-6, "float32": 1e-4, "fixed22": 1e-4, "bfloat16": 2e-2}
_SHAPES = {
    "linear": (1024, 1024), "embedding": (64, 128), "bmm": (2, 64, 128), "convolution": (16, 8, 3, 3),
    "transposed_convolution": (64, 16, 4, 4),
}  # fmt: skip


@dataclass(frozen=True)
class CheckedKernel:
    """One row of the kernel table on this machine."""

    op: str
    name: str
    usable: bool
    note: str
    broken: bool = False  # it accepts a case and then fails or returns wrong values


def check_kernels(devices: set[str]) -> list[CheckedKernel]:
    """Run every kernel with the first config that it accepts, on one of the devices."""
    from ..kernels import kernels

    return [CheckedKernel(kernel.op, kernel.name, *_check(kernel, devices)) for kernel in kernels()]


def _check(kernel: Kernel, devices: set[str]) -> tuple[bool, str, bool]:
    """(usable, note, broken)."""
    import torch

    from ..kernels.table import case_of

    here = [d for d in kernel.devices or ("cpu",) if d in devices]
    if not here:
        return False, f"runs on {', '.join(kernel.devices or ())} only", False
    if kernel.op not in _SHAPES:
        return True, "not tested: doctor has no inputs for this op", False
    reasons: list[str] = []
    for name in CONFIGS:
        for dtype in (torch.float32, torch.bfloat16):
            try:
                weight = _weight(name, kernel.op, dtype, here[0])
                refused = kernel.refuses(case_of(weight, dtype), any_layout=True)
            except ValueError as error:  # a config may not fit an op at all
                refused = str(error)
            if refused is None:
                return _try(kernel, weight, f"with {name} weights and {str(dtype).removeprefix('torch.')} inputs")
            reasons.append(refused)
    return False, f"no config uses it: {'; '.join(dict.fromkeys(reasons))}", False


def _try(kernel: Kernel, weight: AffineQuantizedTensor, how: str) -> tuple[bool, str, bool]:
    import torch

    from ..kernels import get_kernel

    if kernel.rank < 0:
        return True, "the reference: dequantizes any weight at each call", False
    try:
        far = _distance(kernel, get_kernel(kernel.op, "dequantize"), weight)
    except Exception as error:  # a broken build may raise anything; doctor must report it
        return False, f"{type(error).__name__}: {error}", True
    limit = max(_LIMITS[kernel.tolerance], _LIMITS["bfloat16"] if weight.dtype is torch.bfloat16 else 0.0)
    if not far <= limit:  # also true for NaN
        return False, f"differs by {far:.1e} from the reference {how}; the limit is {limit:.0e}", True
    return True, f"{f'within {far:.0e} of' if far else 'equal to'} the reference {how}", False


def _weight(name: str, op: str, dtype: torch.dtype, device: str) -> AffineQuantizedTensor:
    import torch

    from ..algorithms.solvers.rtn import quantize_weight
    from ..planning.parameters import Site

    shape = _SHAPES[op]
    site = Site("weight", "", "weight", op, shape, dtype, device, "Linear")
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    return quantize_weight(values, by_name(name).scheme(site))[0]


def _distance(kernel: Kernel, reference: Kernel, weight: AffineQuantizedTensor) -> float:
    """|y - y_reference| / |y_reference|."""
    import torch

    random = torch.Generator().manual_seed(1)
    packed = weight if kernel.layout is None else weight.to_layout(kernel.layout)
    rest: tuple[Any, ...] = (None,)
    if kernel.op == "embedding":
        x = torch.arange(0, 64, 7, device=weight.device)
    elif kernel.op == "convolution":
        x = torch.randn(2, 8, 9, 9, generator=random).to(weight.device, weight.dtype)
        rest = (None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    elif kernel.op == "transposed_convolution":
        x = torch.randn(2, 64, 5, 5, generator=random).to(weight.device, weight.dtype)
        rest = (None, [2, 2], [1, 1], [1, 1], True, [0, 0], 1)
    else:
        x = torch.randn(*weight.shape[:-2], 5, weight.shape[-1], generator=random).to(weight.device, weight.dtype)
    with torch.no_grad():
        y, expected = kernel.run(x, packed, *rest).double(), reference.run(x, weight, *rest).double()
    return float((y - expected).norm() / expected.norm())


# -- --bench, quantized products, convolutions and blocks against float ------------------------------------------------

SIZE = 1024  # of matrices
CHANNELS, IMAGE = 64, 56  # of a convolution 3×3; a transposed one 4×4 of stride 2 has four times and a quarter as many
WIDTH, TOKENS = 512, (1, 64)  # of a transformer block
ROWS = (1, 128)
NAMES = ("int8-dynamic", "int8", "int4")
_ROUNDS = 9  # alternating, so that a busy moment affects both sides
_SECONDS = 0.005  # per sample: long relative to the clock's resolution
_NOISE = 2.0  # slowest over fastest sample of one side; near 1.1 on an idle machine


@dataclass(frozen=True)
class Timing:
    """Microseconds quantized and float, medians of alternating samples.

    rows    rows of the input of a product, positions of that of a convolution, tokens of that of a block
    kernel  the kernel; "block" for one native call of a fused block, else why it is not fused
    what    what is timed: a product, a convolution or a block
    """

    config: str
    dtype: str
    rows: int
    kernel: str
    microseconds: float
    float_microseconds: float
    noisy: bool  # the samples disagree: the machine was busy and the ratio is unreliable
    what: str = "products"

    def __str__(self) -> str:
        ratio = self.float_microseconds / self.microseconds
        times = f"{max(ratio, 1 / ratio):.2f}"
        verdict = "same speed" if times == "1.00" else f"{times}x faster" if ratio > 1 else f"{times}x slower"
        verdict += ", but the machine is busy: measure again" if self.noisy else ""
        return (
            f"{self.config:<13}{self.rows:>4} {self._unit:<{len(self._unit) + (self.rows == 1)}} {self.dtype:<9}"
            f"{self.microseconds:>9.1f} us, float {self.float_microseconds:>9.1f} us: {verdict} ({self.kernel})"
        )

    @property
    def _unit(self) -> str:
        unit = "position" if "convolution" in self.what else "token" if "block" in self.what else "row"
        return unit + "s" * (self.rows > 1)


def measure() -> list[Timing]:
    """Time each config against float: products of each dtype, convolutions and a fused transformer block in float32."""
    return [*_products(), *_convolutions(), *_blocks()]


def _convolutions() -> Iterator[Timing]:
    import torch
    from torch import nn

    from ..quantize import quantize_

    wide, small = 4 * CHANNELS, max(1, IMAGE // 4)
    layers: list[tuple[str, nn.Module, tuple[int, ...]]] = [
        (
            f"convolution {CHANNELS} to {CHANNELS} channels, 3×3, {IMAGE}×{IMAGE}",
            nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, dtype=torch.float32, device="cpu"),
            (1, CHANNELS, IMAGE, IMAGE),
        ),
        (
            f"transposed convolution {wide} to {wide // 2} channels, 4×4, stride 2, {small}×{small}",
            nn.ConvTranspose2d(wide, wide // 2, 4, 2, 1, dtype=torch.float32, device="cpu"),
            (1, wide, small, small),
        ),
    ]
    for what, layer, shape in layers:
        x = torch.randn(shape, dtype=torch.float32, device="cpu")
        for name in NAMES:
            quantized = copy.deepcopy(layer)
            (row,) = quantize_(quantized, by_name(name), lambda module, fqn: True).quantized
            with torch.no_grad():
                ours, theirs, noisy = _alternate(partial(quantized, x), partial(layer, x))
            rows = x.numel() // shape[1]
            yield Timing(name, "float32", rows, row.kernel, ours * 1e6, theirs * 1e6, noisy, what)


def _blocks() -> Iterator[Timing]:
    import torch

    layer = _encoder(WIDTH)
    for name in NAMES:
        fused, reason = _fused_encoder(WIDTH, name)
        for tokens in TOKENS:
            x = torch.randn(1, tokens, WIDTH, dtype=torch.float32, device="cpu")
            with torch.inference_mode():
                ours, theirs, noisy = _alternate(partial(fused, x), partial(layer, x))
            kernel = f"not fused: {reason}" if reason else "block"
            what = f"transformer block of width {WIDTH}"
            yield Timing(name, "float32", tokens, kernel, ours * 1e6, theirs * 1e6, noisy, what)


def _products() -> Iterator[Timing]:
    import torch
    from torch import nn

    from ..kernels import select
    from ..kernels.table import case_of
    from ..quantize import quantize_

    what = f"products [rows, {SIZE}] @ [{SIZE}, {SIZE}]"
    for dtype in (torch.float32, torch.bfloat16):
        layer = nn.Linear(SIZE, SIZE, bias=False, dtype=dtype).requires_grad_(False)
        for name in NAMES:
            quantized = nn.Linear(SIZE, SIZE, bias=False, dtype=dtype)
            quantized.weight.data.copy_(layer.weight)
            quantize_(quantized, by_name(name))
            weight: Any = quantized.weight
            for rows in ROWS:
                x = torch.randn(rows, SIZE, dtype=dtype)
                with torch.no_grad():
                    ours, theirs, noisy = _alternate(partial(quantized, x), partial(layer, x))
                kernel = select("linear", case_of(weight, dtype)).name
                short = str(dtype).removeprefix("torch.")
                yield Timing(name, short, rows, kernel, ours * 1e6, theirs * 1e6, noisy, what)


def _alternate(a: Callable[[], Any], b: Callable[[], Any]) -> tuple[float, float, bool]:
    """Median seconds per call of each, and whether the samples of either disagree."""
    counts = [max(1, int(_SECONDS / max(_time(f, 3), 1e-9))) for f in (a, b)]
    samples = [(_time(a, counts[0]), _time(b, counts[1])) for _ in range(_ROUNDS)]
    ours, theirs = (sorted(side) for side in zip(*samples, strict=True))
    return median(ours), median(theirs), any(side[-1] > _NOISE * side[0] for side in (ours, theirs))


def _time(f: Callable[[], Any], count: int) -> float:
    f()
    start = perf_counter()
    for _ in range(count):
        f()
    return (perf_counter() - start) / count
