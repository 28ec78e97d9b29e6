// Interface between Python and the optimizer steps. Mirrored by ../optimizer.py; plain C types only.
#pragma once

#include "abi.h"

enum StateKind : int32_t {
    STATE_FLOAT = 0,   // float32, no scale
    STATE_TABLE = 1,   // codes of a table
    STATE_UFLOAT = 2   // codes are the upper bits of a float32, minus a constant
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
    int32_t kind;          // StateKind
    int32_t bits;          // 8 or 4
    int32_t stochastic;    // 1: stochastic rounding, STATE_UFLOAT only
    int32_t power;         // 1: scales are powers of two
    int32_t shift, base;   // STATE_UFLOAT: code = (bits of float32 >> shift) - base; at most `top`
    int32_t top;
    int32_t split, low;    // codes below `split`: (bits >> (shift + 1)) - low
    float hi;              // the largest number
};

// One step of one parameter. Its elements form slabs of `slab`, each with blocks of `block` (the last may be shorter).
// Codes are stored in rows of `row`, each on whole bytes; every block has codes for `block` elements, of which missing
// ones repeat the codes `inner` before.
struct OptimJob {
    void* p;
    const void* g;
    int64_t count, slab, block, inner, row;
    int32_t p_kind, g_kind;    // Kind: F32, BF16, F16
    int32_t rule, flags, states;
    uint32_t key[2], turn;     // of the random bits, and the step mask added to them
    float c[8];                // see the rules in optimizer.h
    OptimState state[3];
};
