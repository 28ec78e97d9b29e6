"""Every option of the commands, each defined once: a command lists those that it takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from . import completion
from .command import GENERATION, INPUT, MEASURING, OUTPUT, QUANTIZATION, RUN


def option(
    heading: str, help: str, *names: str, metavar: str | None = None, complete: Callable[..., Any] | None = None
) -> Any:
    """An option under a heading of the help. names: default: that of the parameter. complete: its completion."""
    return typer.Option(*names, metavar=metavar, help=help, rich_help_panel=heading, autocompletion=complete)


# -- what to quantize to -----------------------------------------------------------------------------------------------

GroupSize = Annotated[
    int | None, option(QUANTIZATION, "Weights that share a scale, for configs with groups.", metavar="N")
]
Requantize = Annotated[
    bool, option(QUANTIZATION, "Round weights again even if an algorithm such as GPTQ chose them.", "--requantize")
]
GgufType = Annotated[
    str,
    option(
        QUANTIZATION,
        "Mix of llama.cpp or type for a GGUF file: q4_k_m, q8_0.",
        "--type",
        metavar="TYPE",
        complete=completion.gguf_type,
    ),
]
Imatrix = Annotated[
    str, option(QUANTIZATION, "Importance matrix of llama.cpp for the --type of a GGUF file.", metavar="FILE")
]
FloatConfig = Annotated[
    str,
    option(
        QUANTIZATION,
        "Quantize a float checkpoint first; names as for quantize.",
        metavar="NAME",
        complete=completion.config,
    ),
]
Config = Annotated[
    str,
    option(
        QUANTIZATION,
        "Of all linear layers: one of the names listed below, or a .yaml or .json file that maps patterns of names to "
        "configs. Required without --layer, --embeddings or --budget.",
        metavar="NAME|FILE",
        complete=completion.config,
    ),
]
LayerConfig = Annotated[
    list[str] | None,
    option(
        QUANTIZATION,
        "The config of some layers: a name or glob such as '*.down_proj=int8', 'lm_head=int4:32' (groups of 32) or "
        "'*.k_proj=none'. The first match applies, before --config. Repeatable.",
        metavar="PATTERN=CONFIG",
    ),
]
EmbeddingConfig = Annotated[
    str,
    option(
        QUANTIZATION,
        "The config of embeddings, and of output layers tied to them.",
        metavar="CONFIG",
        complete=completion.config,
    ),
]
ReadBy = Annotated[
    str,
    option(
        QUANTIZATION,
        "Check first that an engine reads every weight: vllm, vllm-gpu, llama.cpp, transformers, onnxruntime or "
        "openvino.",
        "--for",
        metavar="ENGINE",
        complete=completion.one_of(completion.ENGINES),
    ),
]
Skip = Annotated[
    list[str] | None,
    option(
        QUANTIZATION,
        "Do not quantize: a module or parameter, the end of its name, or a glob. Repeatable.",
        metavar="NAME",
    ),
]
OnIndivisible = Annotated[
    str,
    option(
        QUANTIZATION,
        "If the group size does not divide a row: pad, largest_divisor, skip or error.",
        metavar="POLICY",
        complete=completion.one_of(completion.ON_INDIVISIBLE),
    ),
]
Algorithm = Annotated[
    str,
    option(
        QUANTIZATION,
        "Quantization algorithm: gptq, auto, smooth+gptq, or a recipe.yaml. With --calibration: auto.",
        metavar="NAME",
        complete=completion.algorithm,
    ),
]
Budget = Annotated[
    list[str] | None,
    option(
        QUANTIZATION,
        'Instead of --config: the best mixed-precision config within "4.25 bpw", "600 MB", "1.3x latency" or "20 ms". '
        "Repeatable. Without --max-memory such a run starts again after an interruption.",
        metavar="AMOUNT",
    ),
]
LatencyTokens = Annotated[
    int | None,
    option(
        QUANTIZATION,
        "Sequence length of the call that a --budget of time refers to; default 1 for generative models, a whole "
        "sequence for others.",
        metavar="N",
    ),
]

# -- input -------------------------------------------------------------------------------------------------------------

AllowPickle = Annotated[bool, option(INPUT, "Read torch.save files; only from sources you trust.", "--allow-pickle")]
TensorNames = Annotated[
    str, option(INPUT, "TOML file with tensor names for an unknown GGUF architecture.", metavar="FILE")
]
InputDtype = Annotated[
    str,
    option(
        INPUT,
        f"Input dtype: {', '.join(completion.INPUT_DTYPES)}. Default: the first two.",
        metavar="DTYPE",
        complete=completion.one_of(completion.INPUT_DTYPES),
    ),
]
Op = Annotated[str, option(INPUT, "The op that reads the weight; default by its axes and blocks.", metavar="OP")]
Calibration = Annotated[
    list[str] | None,
    option(INPUT, "UTF-8 calibration text for --algorithm and --budget. Repeatable.", "--calibration", metavar="FILE"),
]
FloatFolder = Annotated[
    str, option(INPUT, "The float model's folder, to measure errors against.", "--float", metavar="FLOAT_DIR")
]
Pareto = Annotated[
    str, option(INPUT, "JSON with other models to compare: a list of name, bits_per_weight, kl.", metavar="FILE")
]
Like = Annotated[
    str, option(INPUT, "A folder with the architecture, if DIR has no config.json.", "--like", metavar="FLOAT_DIR")
]

# -- measuring ---------------------------------------------------------------------------------------------------------

Texts = Annotated[
    list[str] | None, option(MEASURING, "UTF-8 text to run the models on. Repeatable.", "--text", metavar="FILE")
]
Batch = Annotated[int, option(MEASURING, "Sequences per call of a model.", metavar="N")]
Length = Annotated[int, option(MEASURING, "Maximum tokens per sequence.", metavar="N")]
Limit = Annotated[int, option(MEASURING, "Total sequences, spread evenly over the text; 0 for all.", metavar="N")]
MaxKL = Annotated[
    float | None,
    option(MEASURING, "Fail and list the worst layers if the mean KL is above this.", "--max-kl", metavar="NATS"),
]
Bench = Annotated[
    bool, option(MEASURING, "Also time int8 and int4 against float here: products, convolutions, a block.", "--bench")
]
Gpu = Annotated[
    str, option(MEASURING, "Check the kernels of a GPU instead: cuda, or cuda:1 for the second one.", metavar="DEVICE")
]
Tune = Annotated[
    bool,
    option(
        MEASURING,
        "With --device: also choose the tiles of the kernels by timing them, and keep them for this GPU.",
        "--tune",
    ),
]
Inputs = Annotated[
    str,
    option(
        MEASURING,
        "Instead of --text: a safetensors file of the model's arguments (pixel_values, input_features), one sample "
        "per row.",
        metavar="FILE",
    ),
]
MeasureLayers = Annotated[
    bool, option(MEASURING, "Time linear layers against float on this machine, at 1 and 64 rows.", "--measure")
]
Speed = Annotated[
    bool | None,
    option(
        MEASURING,
        "Time the whole models in turn on this machine; default: with several, if there are inputs.",
        "--speed/--no-speed",
    ),
]
Rounds = Annotated[int, option(MEASURING, "Rounds of --speed.", metavar="N")]
Trials = Annotated[
    int | None,
    option(
        MEASURING,
        "Changes to try for the next steps, each a run of both models; 0 for none. Default: 8, 1 each for several "
        "models, and no more after a minute or twice the time of the comparison.",
        metavar="N",
    ),
]
Bound = Annotated[
    float | None,
    option(
        MEASURING,
        "Limit of the mean KL in nats (relative error for tensors); default: from the file.",
        "--bound",
        metavar="X",
    ),
]
Make = Annotated[bool, option(MEASURING, "Write golden.safetensors: this checkpoint's outputs for --text.", "--make")]
Fused = Annotated[
    bool,
    option(
        MEASURING,
        "Fuse the model (pw.fuse_), and compare each call of a fused block or net with its own forward.",
        "--fused",
    ),
]

# -- generating text ---------------------------------------------------------------------------------------------------

LanguageModel = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="A language model in any format that inspect reads: a folder, a GGUF file, a Hub id."
    ),
]
Prompt = Annotated[
    str, option(INPUT, "The prompt; without it, or with -, it is read from stdin.", "-p", "--prompt", metavar="TEXT")
]
Raw = Annotated[bool, option(INPUT, "Continue the prompt as it is, without the model's chat template.", "--raw")]
System = Annotated[str, option(INPUT, "The system message; default: that of the chat template.", metavar="TEXT")]
MaxNewTokens = Annotated[int, option(GENERATION, "Maximum tokens of an answer.", metavar="N")]
Temperature = Annotated[
    float | None,
    option(GENERATION, "0 always takes the most likely token. Default: as the model's files say, else 0.", metavar="T"),
]
TopP = Annotated[
    float | None,
    option(GENERATION, "Choose among the most likely tokens whose probabilities add up to this.", metavar="P"),
]
Seed = Annotated[int | None, option(GENERATION, "Of the random choices: equal seeds give equal answers.", metavar="N")]
KvBits = Annotated[
    str,
    option(
        GENERATION,
        "Bits of the keys and values of the KV cache, except the newest 128 tokens: 8, or 4, or 8,4 for keys in 8 and "
        "values in 4. Default: float.",
        "--kv-bits",
        metavar="BITS",
    ),
]
Int8Cache = Annotated[bool, option(GENERATION, "The same as --kv-bits 8.", "--int8-cache")]
ComputeDtype = Annotated[
    str,
    option(
        GENERATION,
        "Of the computation: float32, bfloat16, float16; default: that of the files.",
        "--dtype",
        metavar="DTYPE",
        complete=completion.one_of(completion.DTYPES),
    ),
]
Fuse = Annotated[
    bool,
    option(GENERATION, "Run blocks as one native call each (pw.fuse_); fusing takes some seconds.", "--fuse/--no-fuse"),
]

# -- output ------------------------------------------------------------------------------------------------------------

Json = Annotated[
    str,
    option(
        OUTPUT,
        "Write the results as JSON to a file; without FILE, or with -, to stdout in place of the text.",
        "--json",
        metavar="[FILE]",
    ),
]
DryRun = Annotated[
    bool,
    option(OUTPUT, "Print the plan, and what --algorithm and --budget will take, and write nothing.", "--dry-run"),
]
MaxShardSize = Annotated[str, option(OUTPUT, "Maximum size of a file, such as 500MB or 2GiB.", metavar="SIZE")]
Format = Annotated[
    str,
    option(
        OUTPUT,
        "One of the formats listed below. Required without --for.",
        metavar="FORMAT",
        complete=completion.one_of(completion.FORMATS),
    ),
]
ConvertedFor = Annotated[
    str,
    option(
        OUTPUT,
        "The format that vllm, vllm-gpu, llama.cpp or transformers reads best.",
        "--for",
        metavar="ENGINE",
        complete=completion.one_of(completion.CONVERTED_FOR),
    ),
]
FloatDtype = Annotated[
    str,
    option(
        OUTPUT,
        "For --to float: float32, float16, bfloat16.",
        metavar="DTYPE",
        complete=completion.one_of(completion.DTYPES),
    ),
]
Force = Annotated[bool, option(OUTPUT, "Write even if the target exists; replaces a checkpoint there.", "--force")]
AllLayers = Annotated[bool, option(OUTPUT, "List every layer instead of only the worst.", "--full")]
OnnxStyle = Annotated[
    str,
    option(
        OUTPUT,
        "auto, matmulnbits or qdq; see docs/export_onnx.md.",
        metavar="STYLE",
        complete=completion.one_of(completion.ONNX_STYLES),
    ),
]
Opset = Annotated[int, option(OUTPUT, "Version of the standard operators; 21 or later.", metavar="N")]
AccuracyLevel = Annotated[
    int, option(OUTPUT, "Of MatMulNBits: 1 computes in float32, 4 lets onnxruntime round inputs to int8.", metavar="N")
]
AllowFloat = Annotated[
    bool, option(OUTPUT, "Write weights without an ONNX form as float32 instead of failing.", "--allow-float")
]
AllTensors = Annotated[bool, option(OUTPUT, "List every tensor instead of groups of equal ones.", "--all")]
Private = Annotated[bool, option(OUTPUT, "Create a private repository.", "--private")]
Revision = Annotated[
    str, option(OUTPUT, "Commit to this branch, created if missing; default: the main one.", metavar="BRANCH")
]
Message = Annotated[str, option(OUTPUT, "Message of the commit.", metavar="TEXT")]
UploadCard = Annotated[bool, option(OUTPUT, "Add a model card (README.md) if there is none.", "--card/--no-card")]
SaveConfig = Annotated[
    str, option(OUTPUT, "Write the config, or that found by --budget, to a .yaml or .json file.", metavar="FILE")
]
Card = Annotated[bool, option(OUTPUT, "Write a model card (README.md) for models of transformers.", "--card/--no-card")]
Page = Annotated[str, option(OUTPUT, "The HTML file.", "-o", "--out", metavar="FILE")]

# -- the run -----------------------------------------------------------------------------------------------------------

MaxMemory = Annotated[
    str,
    option(
        RUN,
        "Memory of --algorithm and --budget, such as 6GB; weights stay in files. Default: all are loaded.",
        metavar="SIZE",
    ),
]
Resume = Annotated[bool, option(RUN, "Continue an interrupted run, or start again.", "--resume/--no-resume")]
Traceback = Annotated[bool, option(RUN, "Show the traceback of an error.", "--traceback")]
