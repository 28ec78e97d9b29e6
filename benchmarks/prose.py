"""The words of docs/benchmarks.md."""

METHOD = """\
Method: {rounds} rounds; in each, every competitor and every limit is visited once for {visit_ms:g} ms, one process
at a time. A visit's figure is the median of its calls, and the second best visit counts: one lucky visit, or
several disturbed ones, do not move it. (A competitor that needs more than {cell_seconds:g} s of a cell gets fewer
rounds; where other processes took more than 5 % of the processor, there are up to {extra_rounds} rounds more.)
Weights N(0, 0.02) rotate over copies of {rotated} MB together (graphs of onnxruntime, OpenVINO and llama.cpp above 64
rows over two copies); inputs are N(0, 1). torch, torchao and
pennyweight are called once a product in eager mode, with bfloat16 in and out (torch's `quantize_dynamic` with
float32); onnxruntime, OpenVINO, llama.cpp and compiled torchao run all copies as one graph, which spares them the
calls, the first three with float32 in and out.

Fraction of the limit: the time to read the weight with its scales once at the measured bandwidth, or to compute at
the measured peak of the instruction used (int8 where activations are int8, else bf16), the longer of both, over the
time taken. The bandwidth is shared with other machines and changes within a run, and caches keep a part of the
copies, so above 1 is possible. Every figure passed the gate: relative error (Frobenius) against a float64 product of
the weight before quantizing. Limits measured in the rounds: {limits}."""

SUMMARY = """\
Speeds are relative; above 1 pennyweight is faster. First the geometric mean over all cells, then the least cell. A
peer counts at the same bits of the weight's code, whatever its activations, scales and dtypes are; in the next column
only where it treats its input alike: rounds it to int8, or does not. Formats that no peer has stand beside bf16 only.
In brackets what is aimed at."""

PICTURE = """\
Geometric mean over the shapes; the band is the least and the greatest. Dashed: in each cell the fastest peer."""

COMPETITORS = """\
Microseconds (fraction of the limit), and the greatest error. What is missing was refused, failed or was over its
bound; see below."""

LLM = """\
0.85 B parameters (hidden 2048, 16 layers, ffn 5632, 32 heads, 8 of keys and values, vocabulary 32000), random
weights, bf16. A prompt of 128 tokens, then 16 tokens one by one; transformers in eager mode (pennyweight after
`freeze_`), llama.cpp through llama-cpp-python. {rounds} rounds in turn, one process at a time; the second best
visit counts. In brackets the fraction of the limit: reading the linear weights once for a token; computing at the
measured peak for a prompt ({limits}). The head is computed for the last token only. Logits error: relative to
bf16's, on random weights, which amplify it. Disk to disk: from the bf16 file to the quantized one; beside it the
time to read the one and write as many bytes as the other, plainly (files in the page cache)."""

HELD = """\
All libraries are held to the older instruction set by their own switches; fbgemm has none that works here, and runs
on the newest. oneDNN's int8 products without VNNI (`_int_mm`, `quantize_dynamic onednn`) saturate: with all codes 127
and K = 256, `torch._int_mm` returned 32 640 for 4 129 024. They pass the gate because random codes rarely do that.
pennyweight's are exact, and slower than these from 64 rows on; they are faster than every exact operator of torch.
float8 at one row is slower than bfloat16: decoding 8 numbers takes eleven instructions there."""

SHORT = """\
Why:

- Weight-only at many rows: inputs have 15 bits, so their products cost what bfloat16's do, and `F.linear` is itself at
  0.93 of that peak. With 32 columns to a group, joining a group costs five operations beside 32 products. For such
  batches an int8-input config is the way out, or `on_slower="skip"`.
- Peers that count at 4 bits for a weight-only config quantize the input to int8 themselves (llama.cpp, OpenVINO,
  onnxruntime at level 4): half the work, and an error of the input that a weight-only config does not have.
- At one row memory is the limit, and the fastest peers sit at it too; what can be won is the bytes of the scales and
  the use of pages of 2 MB. A weight of 1536 x 1536 is read in 30 to 60 µs, of which the call takes 7.
- From 64 rows int8-dynamic is at 0.85 to 0.93 of the processor's int8 peak, and so are fbgemm and oneDNN: a quarter
  more than the fastest peer is more than the processor has."""

LLM_SHORT = """\
A token costs the linear layers what their bytes cost, and transformers as much again by its own thousand operators a
token: norms, rotary embedding, cache. llama.cpp has no such part, so 1.2 times its speed is out of reach in eager mode:
at the measured bandwidth the weights alone take five sixths of its time for a token."""
