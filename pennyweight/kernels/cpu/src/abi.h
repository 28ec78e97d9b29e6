// Interface between Python and the kernels: constants, the structures that exported functions read, and the exported
// functions. ../abi.py is made from this file (python -m tests.kernels.cpu.native.abi); plain C types only.
#pragma once

#include <cstdint>

#if defined(_WIN32)
#define PW_EXPORT __attribute__((dllexport))
#else
#define PW_EXPORT __attribute__((visibility("default")))
#endif

constexpr int ABI = 14;  // incremented with each change of a structure or of an exported function's arguments

// Status codes of exported functions; for pw_dequantize 1 means an index out of range.
enum Status : int32_t { DONE = 0, NO_MEMORY = 1, INVALID = 2 };  // INVALID: inconsistent arguments, see check.h

// Number kinds of parts and of inputs.
enum Kind : int32_t { NONE = 0, F32 = 1, BF16 = 2, F16 = 3, E8M0 = 4, I8 = 5, U8 = 6, E4M3 = 7 };

enum Activation : int32_t { FLOAT = 0, SYMMETRIC = 1, ASYMMETRIC = 2, STATIC = 3 };

// Activation functions, see elementwise.h.
enum Function : int32_t {
    IDENTITY = 0,
    RELU = 1,
    GELU = 2,
    GELU_TANH = 3,
    QUICK_GELU = 4,
    SILU = 5,
    RELU6 = 6,
    HARDSWISH = 7
};

// -- linear layers, integer codes -------------------------------------------------------------------------------------

// Static properties of a linear layer with integer codes: value = (u - center - zero_point) * scale + offset.
struct IntLinear {
    int64_t n, k;       // rows and columns of the weight
    int64_t kp;         // k in whole groups and whole blocks of 32
    int64_t act_group;  // columns per scale of a dynamic activation, a multiple of the block; 0: one scale per token
    int32_t bits;       // of a code, 1..8
    int32_t center;     // constant subtracted from the unsigned code
    int32_t group;      // columns per weight scale; 0: one scale per row; -1: one per tensor
    int32_t block;      // columns per integer sum, a multiple of 32 that divides both groups
    int32_t scale, zero_point, offset;  // Kind; I8 and U8: scales and offsets are codes with outer scales
    int32_t outer;                      // number of such codes per outer scale in a row; 0: none
    int32_t outer_kind;                 // Kind of the outer scales
    int32_t x;                          // Kind of input and output: F32, BF16, F16
    int32_t act;                        // Activation
    int32_t act_lo, act_hi;
    int32_t act_scale;  // Kind in which a dynamic activation scale is stored
    float act_floor;    // minimum dynamic scale
    float act_steps;    // divisor of the range for a dynamic scale
};

// Arguments of one call.
struct LinearArgs {
    const void* x;  // [m, k], rows ldx elements apart
    int64_t m, ldx;
    void* y;           // [m, n]
    const void* bias;  // [n] of kind bias_kind, or null
    const void *codes, *scale, *zero_point, *offset, *outer_scale, *outer_offset;
    const void* act_scale;   // float32 [1], static activations
    int32_t act_zero_point;  // static activations
    int32_t bias_kind, threads;
};

// -- linear layers, float and table codes -----------------------------------------------------------------------------

enum Decode : int32_t {
    TABLE16 = 0,      // up to 4 bits: an index into `values`
    SMALL_FLOAT = 1,  // 5 to 8 bits: sign, exponent, mantissa; subnormals, the bias of IEEE 754
    TABLE256 = 2,     // 5 to 8 bits: an index into `values`
    INTEGER = 3       // 5 or 6 bits: the code and values[0] together
};

// Static properties of a linear layer: value = values[code] * scale + offset, scale = scale code * outer scale + outer
// offset, offset = offset code * its own outer scale.
struct FloatLinear {
    int64_t n, k;               // rows and columns of the weight
    int64_t kp;                 // columns of the packed codes, a multiple of 32
    int64_t scale_groups;       // scales stored for each row (or row block)
    int64_t outer_groups;       // outer scales stored for each row
    const float* values;        // [256] the number of each code
    const uint8_t *low, *high;  // [256] their low and high bytes as bfloat16
    int32_t bits, decode;
    int32_t exponent, mantissa;  // bits of each, SMALL_FLOAT
    int32_t group;               // columns per scale, a multiple of 16; 0: one scale per row; -1: one per tensor
    int32_t block;               // columns per sum, a multiple of 16 that divides the group
    int32_t row_block;           // rows that share a scale, a multiple of 16; 0: one row
    int32_t scale;               // Kind; NONE: 1
    int32_t offset;              // Kind of offsets, stored like scales; NONE: none. Only if group > 0
    int32_t outer;               // scales per outer scale; 0: no outer scale; -1: one per tensor
    int32_t outer_kind;          // Kind of outer scales; the outer offset is F32
    int32_t x;                   // Kind of input and output: F32, BF16, F16
    float limit;                 // largest finite number of a SMALL_FLOAT
};

// Arguments of one call.
struct FloatArgs {
    const void* x;  // [m, k], rows ldx elements apart
    int64_t m, ldx;
    void* y;           // [m, n]
    const void* bias;  // [n] of kind bias_kind, or null
    const void *codes, *scale, *outer_scale, *outer_offset, *offset, *offset_scale;
    int32_t bias_kind, threads;
};

// -- convolutions -----------------------------------------------------------------------------------------------------

// Static properties of a convolution with integer codes; codes as in IntLinear. The columns of a row of tiles are
// [set][kh][kw][channels of a set in whole fours]; added channels have the code 0. With one input channel per group the
// codes are bytes, [kh * kw][o in whole 16].
struct Conv {
    int64_t o, c;      // output channels; input channels of a group
    int64_t kh, kw;    // kernel, kh 1 for one dimension
    int64_t channels;  // input channels that share a weight scale, a set; divides c, and is c or a multiple of 4
    int64_t kp;        // columns of the codes, in whole blocks of 32
    int32_t bits;      // of a code, 1..8
    int32_t center;    // constant subtracted from the unsigned code
    int32_t scale, zero_point;  // Kind; [o in whole 16][sets], 16 rows interleaved
    int32_t one_scale;          // 1: one scale for the whole weight
    int32_t x;                  // Kind of input and output: F32, BF16, F16
    int32_t act;                // Activation; FLOAT: for x F32 and c above 1
    int32_t act_lo, act_hi;
    int32_t act_scale;  // Kind in which a dynamic activation scale is stored
    float act_floor;    // minimum dynamic scale
    float act_steps;    // divisor of the range for a dynamic scale
};

// Arguments of one call. oh and ow follow from the others.
struct ConvArgs {
    const void* x;     // [n, groups * c, h, w], or with x_last [n, h, w, groups * c]; no gaps
    void* y;           // [n, o, oh, ow], or with y_last [n, oh, ow, o]
    const void* bias;  // [o] of kind bias_kind, or null
    const void *codes, *scale, *zero_point;
    const void* act_scale;  // float32 [1], static activations
    int64_t n, h, w, oh, ow, groups;
    int64_t stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
    int32_t act_zero_point, bias_kind, x_last, y_last, function, threads;
};

// -- chains of convolutions -------------------------------------------------------------------------------------------

// One tensor of a sample, as int8 codes with a margin, as float32, or as both; see kernels/conv_chain.py. Places are
// bytes from the start of a sample's scratch, multiples of 64; -1: not kept. Places of tensors that are needed at the
// same time do not overlap, but the numbers of y may be in the place of those of the residual. Max pooling runs
// together with the convolution before it, so its result is not in a place that this convolution reads.
struct ChainTensor {
    int64_t channels, h, w;
    int64_t margin_h, margin_w;  // pixels of the zero point around the codes
    int64_t codes;               // [h + 2 margin_h][w + 2 margin_w][channels in whole fours]
    int64_t numbers;             // [h][w][channels]
    const float* scale;          // of the codes; null if there are none
    int32_t zero_point, lo, hi;  // of the codes
    int32_t scale_kind;          // Kind to which the reciprocal of the scale is rounded
    int32_t output;              // index of the output that has the numbers, -1: none
};

enum ChainKind : int32_t { CHAIN_INPUT = 0, CHAIN_CONV = 1, CHAIN_MAX = 2, CHAIN_MEAN = 3, CHAIN_ADD = 4 };

// y = clip(function(conv(x)) + residual, lo, hi) and the like, see kernels/conv_chain.py. x, y, residual: indices of
// tensors, residual -1: none. x of an input: the index of the input.
struct ChainStep {
    const Conv* conv;           // CHAIN_CONV: static int8 inputs, 8 bits with center 128, one set, no zero points
    const void* bias;           // float32 [o], or null
    const void *codes, *scale;  // as in ConvArgs
    const int32_t* sums;        // [o in whole 16] of the codes of each output channel, less the center
    int64_t groups, kh, kw;     // groups 1 or the input channels; the window of CHAIN_MAX, too
    int64_t stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
    int32_t kind, x, y, residual;
    int32_t function;  // Function, before the residual
    float lo, hi;      // of the result
};

struct ChainInput {
    const void* data;  // float32 [n, channels, h, w], or with `last` [n, h, w, channels]
    int64_t last;
};

struct Chain {
    const ChainStep* steps;
    const ChainTensor* tensors;
    const ChainInput* inputs;
    void* const* outputs;  // float32 [n, h, w, channels]
    int64_t n, scratch;    // scratch: bytes of a sample
    int32_t step_count, tensor_count, input_count, output_count, threads;
};

// -- conversions ------------------------------------------------------------------------------------------------------

// Storage of codes: one per byte; bit streams per row; tiles (see pack.h).
enum Store : int32_t { PLAIN = 0, BITS = 1, TILES = 2 };

// Interpretation of a code: an integer, a small float with sign, an index into a table.
enum Meaning : int32_t { UNSIGNED = 0, SIGNED = 1, MINIFLOAT = 2, LOOKUP = 3 };

// A quantized matrix: value = (number(code) - center - zero_point) * scale + offset.
//
// Index of the scale, zero point and offset of row r, group g: r / row_block * groups + g; in TILES with row_block 1,
// (r / 16 * groups + g) * 16 + r % 16.
struct Affine {
    int64_t n, k;           // rows and columns
    int64_t width;          // columns with codes: k in whole groups; in TILES also in blocks of 32
    int64_t stride;         // bytes from one row of codes to the next; of 16 rows in TILES
    int64_t group, groups;  // columns that share a scale, and scales of a row
    int64_t row_block;      // rows that share a scale
    int32_t store, bits;
    int32_t numbers;  // Meaning
    int32_t center;
    int32_t mantissa, bias;                // MINIFLOAT: bits of the mantissa, bias of the exponent
    int32_t special;                       // and the smallest code magnitude that is inf or NaN
    int32_t scale, zero_point, offset, x;  // Kind
    int32_t zero_bits, zero_lo;  // zero points as a bit stream for each row of blocks, less zero_lo; 0: not packed
    const float* table;          // LOOKUP: 256 numbers
};

struct Parts {
    void *codes, *scale, *zero_point, *offset;
};

// GIVEN: the parameters are given. The others are rules of core/qparams.py.
enum Rule : int32_t { GIVEN = 0, RULE_SYMMETRIC = 1, NO_CLIP = 2, RULE_ASYMMETRIC = 3, MINMAX = 4 };

// Quantization of a float matrix to codes lo..hi of an integer format.
struct Rounding {
    Affine to;
    int32_t rule;
    float lo, hi, mid;
    float floor;       // minimum scale
    float large;       // larger scales are reduced by a factor of 4 (offsets only)
    float part, rest;  // (mid - lo) / (hi - lo), and 1 minus that
};

// -- blocks of GGUF files ---------------------------------------------------------------------------------------------

constexpr int GPTQ_COLUMNS = 128;
constexpr int TABLE_LEVELS = 63;

// Null for integers. Else a format of few numbers, to which (w - offset) / factor is rounded: its code is the count of
// the levels below it, or below its magnitude if sign is above 0; bit `sign` of the code is the sign then. With a table
// there is no zero point, least or divisor, and of shift, lo, hi and mid nothing is used.
struct NumberTable {
    const float* levels;   // ascending
    const float* numbers;  // of all codes
    int32_t count;         // of levels, 1 to TABLE_LEVELS
    int32_t sign;          // 0, or 2**sign is count + 1
};

// A block of columns in the loop of GPTQ, see gptq.h. A column is a row here: each array is [columns, n] without gaps.
struct GptqBlock {
    int64_t n;        // rows of the weight
    int64_t columns;  // 1 to GPTQ_COLUMNS
    const float* w;
    const float* lower;  // [columns, columns]: the block of the factor, transposed
    const float* keep;   // null, or 0 for elements that become the number nearest to 0 and 1 for others
    const float *factor, *scale;
    const float* zero_point;                // or null
    const float *least, *divisor, *offset;  // null without offsets
    uint8_t* codes;                         // of 8 bits, signed if lo is below 0
    float *values, *errors;
    float shift, lo, hi, mid;  // code: steps + zero point + shift, from lo to hi; its number: code - mid - zero point
    NumberTable table;
    int32_t threads;
    // Coordinate descent instead: w is the pull on each element, lower the block of the Hessian, codes and values are
    // read and replaced, and errors become the changes of values.
    int32_t descent;
};

// Blocks of `size` numbers without gaps under parameters of each block, see squared_errors.h.
struct BlockErrors {
    int64_t blocks, size;
    const float* x;
    const float* weight;  // null, or [weights, size]: block i has row i % weights
    int64_t weights;
    const float *factor, *scale;
    const float* zero_point;                // or null
    const float *least, *divisor, *offset;  // null without offsets
    float* errors;                          // [blocks]
    float shift, lo, hi, mid;               // as in GptqBlock
    NumberTable table;
    int32_t threads;
};

// Types of blocks of GGUF files, with ggml's numbers; see gguf_quantize.h and gguf_codes.h.
enum GgufType : int32_t {
    GGUF_Q4_0 = 2,
    GGUF_Q4_1 = 3,
    GGUF_Q5_0 = 6,
    GGUF_Q5_1 = 7,
    GGUF_Q8_0 = 8,
    GGUF_Q2_K = 10,
    GGUF_Q3_K = 11,
    GGUF_Q4_K = 12,
    GGUF_Q5_K = 13,
    GGUF_Q6_K = 14,
    GGUF_IQ4_NL = 20,
    GGUF_IQ4_XS = 23,
    GGUF_MXFP4 = 39
};
constexpr int64_t GGUF_PIECE = 4096;  // elements with sums of squares of their own

// Elements and bytes of a block, bits of a code, and whether pw_gguf_quantize makes blocks of the type (else 0).
struct GgufBlock {
    int32_t type, elements, bytes, bits, made;
};
constexpr GgufBlock GGUF_BLOCKS[] = {
    {GGUF_Q4_0, 32, 18, 4, 1},   {GGUF_Q4_1, 32, 20, 4, 1},   {GGUF_Q5_0, 32, 22, 5, 1},
    {GGUF_Q5_1, 32, 24, 5, 1},   {GGUF_Q8_0, 32, 34, 8, 1},   {GGUF_Q2_K, 256, 84, 2, 1},
    {GGUF_Q3_K, 256, 110, 3, 1}, {GGUF_Q4_K, 256, 144, 4, 1}, {GGUF_Q5_K, 256, 176, 5, 1},
    {GGUF_Q6_K, 256, 210, 6, 1}, {GGUF_IQ4_NL, 32, 18, 4, 1}, {GGUF_IQ4_XS, 256, 136, 4, 1},
    {GGUF_MXFP4, 32, 17, 4, 0},
};
constexpr GgufBlock gguf_block(int type) {  // without elements if it is not one of these types
    for (const GgufBlock& block : GGUF_BLOCKS)
        if (block.type == type) return block;
    return {};
}

// -- norms ------------------------------------------------------------------------------------------------------------

enum NormKind : int32_t { NO_NORM = 0, LAYER_NORM = 1, RMS_NORM = 2 };

// Normalization of rows, see elementwise.h. weight, bias: one number per column, or null for 1 and 0.
struct RowNorm {
    const void *weight, *bias;
    int32_t kind, weight_kind, bias_kind;  // NormKind; Kind
    float eps, offset;                     // offset: added to the weight, 0 without one
};

// -- attention --------------------------------------------------------------------------------------------------------

constexpr int MOST_CHANNELS = 1024;  // of a head; a row of it is on the stack in rotary.h

enum Rotation : int32_t { UNROTATED = 0, HALVES = 1, INTERLEAVED = 2 };

// Normalization and rotation of the heads of q and k, and the new tokens of a cache; see rotary.h. Strides are in
// elements.
struct RotaryArgs {
    float* q;            // row batch * tokens + token, q_stride apart; head h from column h * size on; changed in place
    const float *k, *v;  // the same with `shared` heads, only read
    int64_t q_stride, k_stride, v_stride;
    void *keys, *values;  // [batch, shared, past + tokens, size] of kind cache_kind: written from `past` on
    int64_t key_strides[3], value_strides[3];  // of batch, head, token; channels are contiguous
    const void *cos, *sin;                     // [batch, tokens, rotated] of kind angle_kind; null if UNROTATED
    int64_t cos_strides[2], sin_strides[2];    // of batch (0: the same for all), token; channels are contiguous
    RowNorm q_norm, k_norm;                    // of each head
    int64_t batch, tokens, past;
    int32_t heads, shared, size;
    int32_t rotation, rotated;  // Rotation, and how many channels of a head are rotated, an even number
    int32_t cache_kind, angle_kind;
};

// Keys or values as codes: value = code * scale + offset. Strides are in elements of the part.
struct CacheCodes {
    const uint8_t* codes;        // [batch, shared, past, row]: a stream of bits for each token
    const void *scale, *offset;  // [batch, shared, past / tokens, size / channels], rounded up, of kind `kind`
    int64_t code_strides[3], scale_strides[3], offset_strides[3];  // of batch, head, token or group of tokens
    int64_t row;                                                   // bytes of codes of a token
    int32_t bits, kind;
    int32_t tokens, channels;  // that share a scale and an offset
    int32_t hadamard;          // channels of the blocks that were rotated before rounding, see hadamard.h; 0: none
};

// out = softmax(cap(q @ keys.T * scale) + mask) @ values for each head; see attention.h. Strides are in elements.
struct AttentionArgs {
    const void* q;              // [batch, tokens, heads, size] of kind q_kind
    void* out;                  // the same, of kind out_kind
    const void *keys, *values;  // [batch, shared, length - past, size] of kind `kind`
    const void* mask;  // [batch, heads, tokens, length]: U8 (not 0: allowed) or of a float kind (added); null: none
    int64_t q_strides[3], out_strides[3];      // of batch, token, head; channels are contiguous
    int64_t key_strides[3], value_strides[3];  // of batch, head, token; channels are contiguous
    int64_t mask_strides[4];                   // of batch, head, token, key; 0: the same for all
    int64_t batch, tokens, length;
    int64_t window;  // 0: none
    int32_t heads, shared, size;
    int32_t q_kind, out_kind, kind, mask_kind;
    int32_t causal;
    float scale, softcap;                       // softcap 0: none
    int64_t past;                               // keys and values that are codes, before the others
    const CacheCodes *past_keys, *past_values;  // null if there are none
};

// -- blocks of a transformer ------------------------------------------------------------------------------------------

// A matrix [batch * tokens, width] with contiguous rows.
struct Buffer {
    void* data;  // null: scratch of the call, float32
    int64_t width;
    int64_t offset;  // scratch: position, in floats per row of the call; a multiple of 16
    int32_t kind;    // Kind: F32, BF16, F16
};

// out[i] = function(h @ weights[i].T + bias) + residual, h = norm(x); see kernels/block.py.
//
// Buffers are given by their index; -1: none. `x` of a weight is the kind that determines the limbs of its input: F32
// or, for act FLOAT, also BF16 and F16. Of a LinearArgs only the parts of the weight and the bias are read.
struct BlockLinear {
    RowNorm norm;
    const IntLinear* weights;  // [count], which differ in their rows only
    const LinearArgs* args;    // [count]
    const int32_t* out;        // [count]; [1] if gated
    int32_t count, x;
    int32_t normed;  // buffer that keeps h
    int32_t residual;
    int32_t function;  // Function
    int32_t gated;     // out[0] = function(gate) * up + residual; weights: gate and up, or one with both halves
};

// out = norm(x) + residual
struct BlockNorm {
    RowNorm norm;
    int32_t x, out, residual;
};

// Heads side by side in a buffer, from column `start` on.
struct Columns {
    int32_t buffer, start;
};

// RotaryArgs with q, k and v in buffers (float32), and the keys, values and angles of the call.
struct BlockRotary {
    RowNorm q_norm, k_norm;
    Columns q, k, v;
    int32_t heads, shared, size, rotation, rotated;
};

// AttentionArgs with q and out in buffers. k, v: the tokens of the call; buffer -1: the keys and values of the call.
struct BlockAttention {
    Columns q, k, v;
    int32_t out, heads, shared, size;
    float scale, softcap;
};

enum StepKind : int32_t { STEP_LINEAR = 0, STEP_NORM = 1, STEP_ROTARY = 2, STEP_ATTENTION = 3 };
struct BlockStep {
    const BlockLinear* linear;
    const BlockNorm* norm;
    const BlockRotary* rotary;
    const BlockAttention* attention;
    int32_t kind;  // StepKind: which of them
};

// A call. What rotary steps and attention steps read is as in their arguments; null if no step reads it.
struct Block {
    const BlockStep* steps;
    const Buffer* buffers;
    int64_t scratch;  // floats per row of all scratch buffers
    int32_t step_count, buffer_count;
    void *keys, *values;
    const void *cos, *sin, *mask;  // from here on equal for most blocks that run in turn
    int64_t key_strides[3], value_strides[3], cos_strides[2], sin_strides[2], mask_strides[4];
    int64_t batch, tokens, past, length, window;
    int64_t coded;  // keys and values that are codes, before the others; `past` and `length` do not count them
    const CacheCodes *past_keys, *past_values;  // null if there are none
    int32_t cache_kind, angle_kind, mask_kind, causal, threads;
};

// -- optimizer steps --------------------------------------------------------------------------------------------------

enum StateKind : int32_t {
    STATE_FLOAT = 0,  // float32, no scale
    STATE_TABLE = 1,  // codes of a table
    STATE_UFLOAT = 2  // codes are the upper bits of a float32, minus a constant
};
enum OptimRule : int32_t { RULE_ADAM = 0, RULE_LION = 1, RULE_SGD = 2 };
enum OptimFlags : int32_t { MAXIMIZE = 1, NESTEROV = 2, STOCHASTIC = 4 };

// The numbers of a table format and a lookup of the nearest: the upper bits of |x| select a cell. A cell contains the
// code at its lower end and the lower bits of the only decision level that may be within it: code | level << 8.
struct CodeTable {
    const int32_t* cells;  // [count], then those of negative numbers if they have their own
    const float* values;   // [256]
    int32_t shift;         // the cell is (|x| >> shift) - first
    int32_t first, last;   // last: of each half
    int32_t negative;      // start of the cells of negative numbers; 0: there are none
    int32_t mirror;        // 1: a negative number has the code of |x|, and bit 7
};

// A state, in blocks as given by OptimJob: value = number(code) * scale.
struct OptimState {
    void* codes;
    float* scale;
    const CodeTable* table;
    int32_t kind;         // StateKind
    int32_t bits;         // 8 or 4
    int32_t stochastic;   // 1: stochastic rounding, STATE_UFLOAT only
    int32_t power;        // 1: scales are powers of two
    int32_t shift, base;  // STATE_UFLOAT: code = (bits of float32 >> shift) - base; at most `top`
    int32_t top;
    int32_t split, low;  // codes below `split`: (bits >> (shift + 1)) - low
    float hi;            // the largest number
};

// One step of one parameter. Its elements form slabs of `slab`, each with blocks of `block` (the last may be shorter).
// Codes are stored in rows of `row`, each on whole bytes; every block has codes for `block` elements, of which missing
// ones repeat the codes `inner` before.
struct OptimJob {
    void* p;
    const void* g;
    int64_t count, slab, block, inner, row;
    int32_t p_kind, g_kind;  // Kind: F32, BF16, F16
    int32_t rule, flags, states;
    uint32_t key[2], turn;  // of the random bits, and the step mask added to them
    float c[8];             // see the rules in optimizer.h
    OptimState state[3];
};

// -- extents ----------------------------------------------------------------------------------------------------------

// What pw_extents describes: parts of a weight, of a matrix (Affine) whose scales are as its codes or row by row, and
// of the states of an optimizer step.
enum Described : int32_t {
    INT_WEIGHT = 0,
    FLOAT_WEIGHT = 1,
    CONV_WEIGHT = 2,
    MATRIX = 3,
    MATRIX_BY_ROW = 4,
    OPTIM_STATES = 5
};

// A part that a function reads or writes: its least number of elements of a kind.
struct Extent {
    const char* name;
    int64_t count;
    int32_t kind;  // Kind; NONE: there is none
};

// -- exported functions, see dispatch.cpp -----------------------------------------------------------------------------

extern "C" {
PW_EXPORT int pw_abi();
PW_EXPORT int pw_isa_count();
PW_EXPORT const char* pw_isa_name(int i);
PW_EXPORT int pw_isa_here(int i);
PW_EXPORT int pw_isa_use(const char* name);
PW_EXPORT int pw_int_linear(const IntLinear* w, const void* x, int64_t m, int64_t ldx, void* y, const void* bias,
                            int bias_kind, const void* codes, const void* scale, const void* zero_point,
                            const void* offset, const void* outer_scale, const void* outer_offset,
                            const void* act_scale, int64_t act_zero_point, int threads);
PW_EXPORT int pw_int_linears(const IntLinear* weights, const LinearArgs* args, int count);
PW_EXPORT int pw_blocks(const Block* const* blocks, int count);
PW_EXPORT int pw_float_linear(const FloatLinear* w, const void* x, int64_t m, int64_t ldx, void* y, const void* bias,
                              int bias_kind, const void* codes, const void* scale, const void* outer_scale,
                              const void* outer_offset, const void* offset, const void* offset_scale, int threads);
PW_EXPORT int pw_convolution(const Conv* w, const ConvArgs* a);
PW_EXPORT int pw_conv_chain(const Chain* chain);
PW_EXPORT int pw_pack_codes(const uint8_t* codes, int64_t n, int64_t k, int64_t kp, int bits, int flip, uint8_t* out,
                            int threads);
PW_EXPORT int pw_pack_stream(const uint8_t* stream, int64_t n, int64_t k, int64_t kp, int bits, int pad, uint8_t* out,
                             int threads);
PW_EXPORT int pw_unpack_codes(const uint8_t* packed, int64_t n, int64_t k, int64_t kp, int bits, int flip,
                              uint8_t* codes, int threads);
PW_EXPORT int64_t pw_probe(int what, const void* p, int64_t n, int threads);
PW_EXPORT int pw_dequantize(const Affine* w, void* codes, void* scale, void* zero_point, void* offset,
                            const int64_t* index, int64_t m, void* out, int threads);
PW_EXPORT int pw_quantize(const Rounding* q, const void* x, int64_t ldx, void* codes, void* scale, void* zero_point,
                          void* offset, double* sums, int threads);
PW_EXPORT int pw_ranges(const Affine* w, const void* x, int64_t ldx, void* out, int threads);
PW_EXPORT int pw_finite(const void* x, int kind, int64_t count, int threads);
PW_EXPORT int pw_gguf_quantize(int type, const void* x, int kind, int64_t count, int64_t k, const float* importance,
                               uint8_t* out, double* sums, int threads);
PW_EXPORT int pw_gguf_codes(int type, const uint8_t* blocks, int64_t count, uint8_t* stream, int threads);
PW_EXPORT int pw_gptq_block(const GptqBlock* block);
PW_EXPORT int pw_squared_errors(const BlockErrors* errors);
PW_EXPORT int pw_attention(const AttentionArgs* args, int threads);
PW_EXPORT int pw_rotary(const RotaryArgs* args, int threads);
PW_EXPORT int pw_optim_steps(const OptimJob* jobs, int64_t count, int threads);
PW_EXPORT int pw_extents(int what, const void* structure, Extent* out, int room);
}
