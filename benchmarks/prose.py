"""The text of docs/benchmarks.md."""

METHOD = """\
Method: {rounds} rounds. Each round runs every competitor and every limit once for {visit_ms:g} ms, one process
at a time. The figure of a run is the median of its calls; the second best run counts, so that one fast or several
disturbed runs have no effect. (A competitor that needs more than {cell_seconds:g} s for a cell gets fewer
rounds; if other processes used more than 5 % of the processor, there are up to {extra_rounds} more rounds.)
Weights N(0, 0.02) rotate over copies of {rotated} MB in total (graphs of onnxruntime, OpenVINO and llama.cpp above 64
rows over two copies); inputs are N(0, 1). torch, torchao and
pennyweight are called once per product in eager mode, with bfloat16 in and out (torch's `quantize_dynamic` with
float32); onnxruntime, OpenVINO, llama.cpp and compiled torchao run all copies as one graph, which saves the call
overhead, the first three with float32 in and out.

Fraction of the limit: the time to read the weight with its scales once at the measured bandwidth, or to compute at
the measured peak of the instruction used (int8 if activations are int8, else bf16), whichever is longer, divided by the
measured time. The bandwidth is shared with other machines and changes within a run, and caches hold a part of the
copies, so values above 1 are possible. Every result passed an error check: relative error (Frobenius) against a float64
product of the weight before quantizing. Limits measured in the rounds: {limits}."""

SUMMARY = """\
Speeds are relative; above 1 pennyweight is faster. Each entry is the geometric mean over all cells, then the smallest
cell. The fastest peer is chosen among those with the same bits per code, with any activations, scales and dtypes. The
next column counts only peers with the same input quantization (int8 or none). Formats without a peer are compared with
bf16 only."""

PICTURE = """\
Geometric mean over the shapes; the band is minimum to maximum. Dashed: the fastest peer of each cell."""

COMPETITORS = """\
Microseconds (fraction of the limit), and the largest error. Missing entries were rejected, failed or exceeded their
error bound; see below."""

HELD = """\
All libraries are limited to the older instruction set by their own switches; fbgemm has no working one and runs
on the newest. oneDNN's int8 products without VNNI (`_int_mm`, `quantize_dynamic onednn`) saturate: with all codes 127
and K = 256, `torch._int_mm` returned 32 640 for 4 129 024. They pass the error check because random codes rarely
saturate. pennyweight's are exact, and slower than these from 64 rows on; they are faster than every exact operator of
torch.
float8 at one row is slower than bfloat16: decoding 8 numbers takes eleven instructions there."""

SHORT = """\
Reasons:

- Weight-only at many rows: inputs have 15 bits, so their products cost as much as bfloat16's, and `F.linear` itself
  reaches 0.93 of that peak. With groups of 32 columns, combining a group costs five operations per 32 products. For
  such batches use a config with int8 inputs, or `on_slower="skip"`.
- Peers counted at 4 bits for a weight-only config quantize the input to int8 (llama.cpp, OpenVINO,
  onnxruntime at level 4): half the work, and an input error that a weight-only config does not have.
- At one row memory is the limit, and the fastest peers reach it too; the remaining gains are the bytes of the scales
  and pages of 2 MB. Reading a weight of 1536 x 1536 takes 30 to 60 µs, of which the call takes 7.
- From 64 rows int8-dynamic reaches 0.85 to 0.93 of the processor's int8 peak, and so do fbgemm and oneDNN: no
  library can be much faster there."""
