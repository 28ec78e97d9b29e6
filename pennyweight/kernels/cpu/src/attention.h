// Attention of query heads over keys and values, for prompts and for single tokens:
//
//   out[s] = sum over j of p[j] * v[j] / sum over j of p[j],   p[j] = exp(x[j] - max x)
//   x[j] = cap(q[s] * scale . k[j]) + mask[s, j],   cap(x) = softcap * tanh(x / softcap), or x
//
// A row without a key that it may see is 0. Arithmetic is in float32, but for few tokens over codes of 8 and 4 bits,
// whose products are of 16 bits and exact (attention_quantized.h). It is in an order that depends only on the row, its
// keys and the number of tokens of the call: neither on the number of threads nor on other rows. Every instruction set
// gives the same bits. Keys that are not seen may be anything; their values must be finite, or rows may become NaN.
//
// A call has one or two phases of units; the units of a phase are independent, and a phase begins when the one before
// it is complete. Prompts (attention_prompt.h): a unit is a block of query tokens with all query heads that share their
// keys. Few tokens (attention_few.h): a unit is a chunk of keys, and the second phase combines the chunks.
#pragma once

#include "attention_few.h"
#include "attention_prompt.h"

namespace {

using attend::AttentionPlan;

inline int attention_phases(const AttentionArgs& a) {
    const AttentionPlan p(a);
    return p.few && p.split ? 2 : 1;
}
inline int64_t attention_units(const AttentionArgs& a, int phase) {
    const AttentionPlan p(a);
    if (!p.few) return a.batch * a.shared * p.token_blocks;
    return a.batch * a.shared * (p.split && phase == 0 ? p.chunks : 1);
}
// Bytes that each thread needs, and bytes that all threads share between the two phases.
inline int64_t attention_room(const AttentionArgs& a) {
    const AttentionPlan p(a);
    return p.few ? attend::FewRoom(a, p).bytes : attend::PromptRoom(a, p).bytes;
}
inline int64_t attention_shared(const AttentionArgs& a) {
    const AttentionPlan p(a);
    return p.few && p.split ? a.batch * a.shared * p.chunks * p.part_bytes() : 0;
}
// room, shared: of that size, and aligned to 64 bytes.
inline void attention_unit(const AttentionArgs& a, int phase, int64_t unit, char* room, char* shared) {
    const AttentionPlan p(a);
    if (!p.few) return attend::prompt_unit(a, p, unit, room);
    if (!p.split) return attend::few_unit(a, p, unit, room);
    if (phase == 0) return attend::few_chunk(a, p, unit, room, shared);
    attend::few_combine(a, p, unit, room, shared);
}

// One call with threads of its own.
inline int attention(const AttentionArgs* args, int most_threads) {
    const AttentionArgs& a = *args;
    if (a.batch == 0 || a.tokens == 0 || a.heads == 0) return DONE;
    const int phases = attention_phases(a);
    const int64_t before = phases > 1 ? attention_units(a, 0) : 0, units = attention_units(a, phases - 1);
    const double products = 2.0 * (double)(a.batch * a.heads * a.tokens) * (double)a.length * a.size;
    const int threads = (int)std::min<double>(std::min<int64_t>(most_threads, std::max(before, units)),
                                              1 + products / PRODUCTS_PER_THREAD);
    const int64_t room = attention_room(a), shared = attention_shared(a);
    char* space = inputs.get((size_t)(room * threads + shared));
    if (!space) return NO_MEMORY;
    char* const together = space + room * threads;
    run_units(
        threads, false, before, units, [&](int id, int64_t u) { attention_unit(a, 0, u, space + room * id, together); },
        [&](int id, int64_t u) { attention_unit(a, phases - 1, u, space + room * id, together); });
    return DONE;
}

}  // namespace
