"""Kernels compiled for six targets without a device: what the compilers made of them.

Triton's cache folder keeps what was compiled, by the sources of kernels and of Triton: a second run takes seconds.
"""

import re
from typing import Any

import pytest
import torch

from benchmarks.gpu import aot_compile
from benchmarks.gpu.aot_compile import FORMATS, TARGETS, Job, Report
from pennyweight.kernels.triton import tiles

pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed")

# Instructions per weight in the loop on sm_90 of the shipped tiles of 8 and 16 rows; triton 3.6.0 and 3.7.1 differ by
# 6 %. At 3 TB/s, 132 multiprocessors can spend 4.8 for codes of 4 bits, 9.6 for 8 and 2.4 for 2: beyond that,
# instructions decide instead of memory.
PER_WEIGHT = {
    "int4 g64": (2.1, 2.6), "uint4 g64 offset": (2.6, 3.4), "int8 row": (3.2, 3.3), "int2 g128": (1.8, 2.1),
    "uint3 g64 zero point": (4.4, 4.8), "e4m3 row": (3.3, 3.8), "mxfp4": (4.3, 5.0), "nvfp4": (4.5, 5.9),
    "nf4 g64": (5.7, 6.1),
}  # fmt: skip
MARGIN = 1.1
# Where registers do not suffice, for tiles that were not measured: (target, format, rows of the tile) -> instructions
SPILLED = {
    ("cuda:sm_80", "mxfp4", 128): 64, ("cuda:sm_120", "mxfp4", 64): 12, ("cuda:sm_100", "int4 g64", 8): 4,
    ("cuda:sm_120", "int4 g64", 8): 4, ("cuda:sm_120", "int8 row", 128): 4, ("cuda:sm_80", "nf4 g64", 128): 150,
}  # fmt: skip
SOME = 64  # spilled instructions that are accepted where nothing was measured
EVERYWHERE = ("int4 g64", "int8 row", "mxfp4", "nf4 g64")  # formats that are compiled for each target at each run
REGISTERS = {"cuda": 255, "hip": 512}


def compiled(target: str, job: Job) -> tuple[Report, Any]:
    kernel = job.compile(target)
    return aot_compile.report(job, kernel), kernel


def check_limits(target: str, job: Job, found: Report, spills: int = 0) -> None:
    assert found.spills <= spills, job.name
    assert found.stack <= 4 * spills, job.name
    assert found.registers <= REGISTERS[target.partition(":")[0]], job.name
    assert found.shared <= tiles.shared_memory(target), job.name


def check_tile(target: str, job: Job, found: Report) -> None:
    assert job.tile is not None
    assert found.wide_loads, f"{job.name}: codes are not loaded by 16 bytes"
    # fewer than 16 rows, or two warps, are products of single warps
    grouped = {"cuda:sm_90": {"HGMMA"}, "cuda:sm_100": {"UTCHMMA"}}.get(target, {"HMMA"})
    if target.startswith("hip"):
        assert all(name.startswith("v_mfma") for name in found.matrix), job.name
        assert found.matrix, job.name
        return
    assert found.matrix == (grouped if job.tile.bm >= 16 and job.tile.warps >= 4 else {"HMMA"}), job.name
    # sm_100 has no product with weights in registers; inputs of odd sizes are not loaded by 16 bytes but stored by 8
    if found.matrix != {"UTCHMMA"} and " part " not in job.name:
        assert found.weight_stores == 0, f"{job.name}: decoded weights go through shared memory"


SHIPPED = [
    pytest.param(
        target,
        name,
        marks=() if target == "cuda:sm_90" or name in EVERYWHERE else pytest.mark.exhaustive,
        id=f"{target}-{name}",
    )
    for target in TARGETS
    for name in FORMATS
]


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(("target", "name"), SHIPPED)
def test_shipped_tiles(target: str, name: str, dtype: str) -> None:
    jobs = [job for job in aot_compile.kernels(target, (name,)) if f" {dtype} " in job.name]
    assert len(jobs) > (3 if dtype == "bfloat16" else 0)
    for job in jobs:
        found, _ = compiled(target, job)
        if job.tile is None:
            check_limits(target, job, found)
            continue
        if target != "cuda:sm_90" and name not in EVERYWHERE:  # not measured there, and not what most models have
            check_limits(target, job, found, SOME)
            assert found.matrix, job.name
            continue
        check_limits(target, job, found, SPILLED.get((target, name, job.tile.bm), 0))
        check_tile(target, job, found)
        if target == "cuda:sm_90" and job.tile.bm <= 16:
            assert found.registers * job.tile.warps * 32 * 2 <= 65536, f"{job.name}: two programs do not fit"
        if target == "cuda:sm_90" and job.tile.bm <= 16 and " bfloat16 " in job.name and " whole " in job.name:
            limit = PER_WEIGHT[name][job.tile.bm == 16] * MARGIN
            assert 0 < found.per_weight <= limit, f"{job.name}: {found.per_weight:.2f} instructions per weight"


@pytest.mark.parametrize(
    "target", [t if t == "cuda:sm_90" else pytest.param(t, marks=pytest.mark.exhaustive) for t in TARGETS]
)
def test_kernels_of_quantized_inputs(target: str) -> None:
    jobs = aot_compile.input_kernels(target)
    assert len({job.name for job in jobs}) == len(jobs)
    unit = "v_mfma_i32" if target.startswith("hip") else "IGMMA" if target == "cuda:sm_90" else "IMMA"
    float8 = {"cuda:sm_89": "QMMA", "cuda:sm_90": "QGMMA", "cuda:sm_100": "UTCQMMA"}.get(target, "QMMA")
    for job in jobs:
        found, kernel = compiled(target, job)
        check_limits(target, job, found)
        assert ".ftz" not in kernel.asm.get("ptx", ""), "subnormal numbers would become zero"
        if " product" in job.name:
            assert found.matrix, job.name
            wanted = unit if job.name.startswith("int8") else float8
            assert all(name.startswith(wanted) for name in found.matrix), job.name


PARTS = 12


@pytest.mark.sweep
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("target", TARGETS)
def test_every_format_and_candidate(target: str, part: int) -> None:
    """All compile within the shared memory. A candidate that spills is slow, and so not chosen."""
    for job in aot_compile.kernels(target, (), full=True)[part::PARTS]:
        found, _ = compiled(target, job)
        assert found.shared <= tiles.shared_memory(target), job.name


def offsets(ttir: str, pointer: str) -> list[str]:
    """Types of the offsets that are first added to a pointer argument: to itself, or to a tensor of it."""
    names = [f"%{pointer}", *re.findall(rf"(%\S+) = tt\.splat %{pointer}\b", ttir)]
    added = (re.findall(rf"tt\.addptr {re.escape(name)}, \S+ : \S+, (?:tensor<\S*?x)?(i\d+)", ttir) for name in names)
    return [kind for found in added for kind in found]


@pytest.mark.parametrize("name", ["int4 g64", "int8 row"])
def test_offsets_of_large_tensors_have_64_bits(name: str) -> None:
    """More than 2**31 elements pass as ``wide``: of codes, scales of groups, inputs, outputs and sums."""
    job = aot_compile.kernels("cuda:sm_90", (name,))[0]
    ttir = job.compile("cuda:sm_90").asm["ttir"]
    pointers = ["w_ptr", "x_ptr", "y_ptr", "part_ptr"] + (["s_ptr"] if name == "int4 g64" else [])
    for pointer in pointers:
        found = offsets(ttir, pointer)
        assert found, f"{pointer} is not used"
        assert set(found) == {"i64"}, pointer
    dequantize = next(job for job in aot_compile.kernels("cuda:sm_90", (name,)) if job.tile is None)
    ttir = dequantize.compile("cuda:sm_90").asm["ttir"]
    for pointer in ("w_ptr", "y_ptr"):
        assert set(offsets(ttir, pointer)) == {"i64"}, pointer


def test_a_job_has_one_name_for_one_compilation() -> None:
    names = [
        aot_compile.job("cuda:sm_90", aot_compile.product(FORMATS["int4 g64"], torch.bfloat16, m, 4096, 4096)).name
        for m in (1, 5, 8, 9)
    ]
    assert names[0] == names[1] == names[2] != names[3]


def test_the_driver_is_as_before() -> None:
    from triton.runtime import driver

    before = driver._active
    aot_compile.kernels("cuda:sm_80", ("int8 row",))[0].compile("cuda:sm_80")
    assert driver._active is before
