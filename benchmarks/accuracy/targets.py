"""The accuracy targets as data: our row, the baseline row, and the target ratio."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.accuracy import statistics
from benchmarks.accuracy.results import Results
from benchmarks.accuracy.rivals import OURS, REFERENCE
from benchmarks.accuracy.subjects import KINDS, SUBJECTS

AO, LLMC = "torchao", "llm-compressor"
_SMOOTH8 = "int8-dynamic smooth rotate auto"
LOSS = {"kl": "KL", "1-cos": "1-cos", "error": "error"}
LM, OUT, SMALL, MORE = ("lm",), ("lm-out",), ("lm", "minilm"), ("minilm-2048",)
BOTH = (*SMALL, *MORE)
_UNIFORM = (  # our best where every weight has the same format
    ("int4 g128 zero point auto distill", SMALL), ("int4 g128 zero point auto reconstruct distill", MORE),
)  # fmt: skip


@dataclass(frozen=True)
class Target:
    """mean loss of our row <= most x that of ``against`` (family, name), on each subject, by each of its measures."""

    work: str
    ours: str
    against: tuple[str, str]
    most: float
    subjects: tuple[str, ...] = BOTH


TARGETS = (
    *(Target("uniform int4 g128, no run-time cost", row, REFERENCE, 0.20, on) for row, on in _UNIFORM),
    *(Target("the same vs. the best peer", row, (LLMC, "GPTQ W4A16 g128 asymmetric"), 0.60, on)
      for row, on in _UNIFORM),
    *(Target(work, f"mixed {bits} auto {step}", against, most, on)
      for work, bits, against, most in (
          ("mixed, 4.25 bits", "4.25", REFERENCE, 0.06), ("mixed, 3.15 bits", "3.15", REFERENCE, 0.50),
          ("mixed, 2.75 bits", "2.75", REFERENCE, 1.00),
          ("2.3 bits vs. torchao's int3", "2.3", (AO, "int3 g128"), 0.60),
      )
      for step, on in (("tune", SMALL), ("distill", MORE))),
    Target("MXFP4 vs. round-to-nearest", "mxfp4 auto", (OURS, "mxfp4"), 0.65),
    Target("NVFP4 vs. round-to-nearest", "nvfp4 auto", (OURS, "nvfp4"), 0.65),
    Target("W8A8 vs. W8A16", _SMOOTH8, (OURS, "int8"), 1.05, OUT),
    Target("W8A8 vs. torchao's SmoothQuant", "int8-dynamic smooth rotate", (AO, "W8A8 SmoothQuant"), 0.25, LM),
    Target("W4A4 vs. plain W4A4", "int4-dynamic-int4 g128 smooth rotate auto", (OURS, "int4-dynamic-int4 g128"),
           0.01, OUT),
    Target("W4A8 vs. W4A16", "int8-dynamic-int4 g128 smooth rotate auto", (OURS, "int4 g128 auto"), 1.05, LM),
)  # fmt: skip


def table(results: Results) -> list[list[str]]:
    """[work, subject, our row, baseline, target, measured with interval, verdict] for rows measured on both sides, by
    each of the subject's measures.

    A target counts as met only if the whole interval meets it."""
    rows = []
    for t in TARGETS:
        for subject in t.subjects:
            ours, other = results.find(subject, OURS, t.ours), results.find(subject, *t.against)
            if ours is None or other is None:
                continue
            measures = KINDS[SUBJECTS[subject][0]].measures
            for measure in measures:
                r = statistics.ratio(*(row["figures"]["per_sequence"][measure] for row in (ours, other)))
                verdict = "met" if r.high <= t.most else "within the interval" if r.low <= t.most else "not met"
                on = subject if len(measures) == 1 else f"{subject}, {LOSS[measure]}"
                told = f"{r.value:.3f} ({r.low:.3f} to {r.high:.3f})"
                row = f"{t.ours}, {ours['bits']:.3f} bits"
                rows.append([t.work, on, row, " ".join(t.against), f"{t.most:.2f}", told, verdict])
    return rows
