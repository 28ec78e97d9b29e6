// What Python and the optimizer steps agree on. Mirrored by ../optimizer.py; plain C types only.
#pragma once

#include "abi.h"

enum StateKind : int32_t {
    STATE_FLOAT = 0,   // float32, no scale
    STATE_TABLE = 1,   // codes of a table
    STATE_UFLOAT = 2   // codes are the upper bits of a float32, less a constant
};
enum OptimRule : int32_t { RULE_ADAM = 0, RULE_LION = 1, RULE_SGD = 2 };
enum OptimFlags : int32_t { MAXIMIZE = 1, NESTEROV = 2, STOCHASTIC = 4 };

// The numbers of a table format and how the nearest is found: the upper bits of |x| give a cell, which holds the code at
// its lower end and the lower bits of the one decision level that may lie within: code | level << 8.
struct CodeTable {
    const int32_t* cells;  // [count], then those of negative numbers where they have their own
    const float* values;   // [256]
    int32_t shift;         // |x| >> shift, less `first`, is the cell
    int32_t first, last;   // last: of each half
    int32_t negative;      // where the cells of negative numbers begin; 0: there are none
    int32_t mirror;        // 1: a negative number has the code of |x|, and bit 7
};

// A state in blocks of OptimJob's: value = number(code) * scale.
struct OptimState {
    void* codes;
    float* scale;
    const CodeTable* table;
    int32_t kind;          // StateKind
    int32_t bits;          // 8 or 4
    int32_t stochastic;    // 1: to one of the two neighbours by chance, STATE_UFLOAT only
    int32_t power;         // 1: scales are powers of two
    int32_t shift, base;   // STATE_UFLOAT: code = bits of float32 >> shift, less base; at most `top`
    int32_t top;
    int32_t split, low;    // of smaller codes than `split`: bits >> shift + 1, less low
    float hi;              // the greatest number
};

// One step of one parameter. Its elements are slabs of `slab`, each of them blocks of `block` (the last may be shorter).
// Codes lie in rows of `row`, each on whole bytes; every block has codes for `block` elements, those that are not there
// repeat the codes `inner` before.
struct OptimJob {
    void* p;
    const void* g;
    int64_t count, slab, block, inner, row;
    int32_t p_kind, g_kind;    // Kind: F32, BF16, F16
    int32_t rule, flags, states;
    uint32_t key[2], turn;     // of the random numbers, and how far they have been turned
    float c[8];                // see the rules in optimizer.h
    OptimState state[3];
};
