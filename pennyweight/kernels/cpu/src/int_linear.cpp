// y = x @ w.T + bias with integer codes: divides a call into units of work for threads; see int_matmul.h.
#include <algorithm>

#include "attention.h"
#include "bandwidth_probe.h"
#include "int_matmul.h"
#include "rotary.h"
#include "schedule.h"
#include "vtable.h"

namespace {

// Several weights that differ only in their number of rows, with the same input (x, m, ldx, threads and activation
// parameters are those of the first): the input is split into limbs once, and threads synchronize once.
int int_linear(const IntLinear* weights, const LinearArgs* args, int count) {
    const IntLinear& w = *weights;
    const LinearArgs& a = *args;
    int64_t tiles = 0;
    for (int i = 0; i < count; ++i) tiles += (weights[i].n + 15) / 16;
    if (a.m == 0 || tiles == 0) return 0;
    Work k = plan(w, a);
    const double products = (double)a.m * (double)(16 * tiles) * (double)w.kp;
    const int threads = (int)std::min<double>(a.threads, 1 + products / PRODUCTS_PER_THREAD);

    // Units of work: tiles x ranges of token blocks, scheduled dynamically.
    const int64_t grain = std::max<int64_t>(1, std::min<int64_t>(8, tiles / (threads * 8)));
    const int64_t together = std::max<int64_t>(8, INPUT_BYTES / (k.row_bytes(k.most) * w.kp));
    const int64_t step = std::min(k.token_blocks, together);
    const int64_t row_units = (k.token_blocks + step - 1) / step;
    const int64_t units = (tiles + grain - 1) / grain * row_units;

    // Memory: per copy of the input, a table of token blocks and their buffers; per thread, scratch for one row and for
    // sums. For one or two tokens each thread makes its own copy, which is cheaper than waiting for another thread.
    const auto up = whole_lines;
    const int copies = a.m <= 2 ? threads : 1;
    const int64_t digits = up(w.kp * k.row_bytes(k.most)), sums = up(k.blocks * k.rows(k.most) * 4);
    const int64_t numbers = up(k.blocks * k.most * 4), per_block = digits + sums + 2 * numbers;
    const int64_t table = up((int64_t)sizeof(Tokens) * k.token_blocks), one_copy = table + per_block * k.token_blocks;
    const int64_t row_room = up(w.kp * 4) + up(w.kp * 3), per_thread = row_room + (step * k.most + k.chunk + (w.outer ? 2 * (k.chunk + 1) : 0)) * 64;
    char* space = inputs.get((size_t)(one_copy * copies + per_thread * threads + up(w.kp)));
    if (!space) return 1;
    if (w.act == ASYMMETRIC || (w.act == STATIC && a.act_zero_point)) {
        int8_t* ones = (int8_t*)(space + one_copy * copies + per_thread * threads);
        memset(ones, 0, (size_t)w.kp);
        memset(ones, 1, (size_t)w.k);
        k.ones = ones;
    }
    const auto base_of = [&](int id) { return space + (copies > 1 ? one_copy * id : 0); };
    const auto room_of = [&](int id) { return space + one_copy * copies + per_thread * id; };
    const auto prepare = [&](int id, int64_t mb) {
        Tokens& tok = ((Tokens*)base_of(id))[mb];
        char *p = base_of(id) + table + per_block * mb, *room = room_of(id);
        tok.digits = (int8_t*)p;
        tok.sums = (int32_t*)(p += digits);
        tok.scale = (float*)(p += sums);
        tok.value = (float*)(p += numbers);
        const int t = k.tokens_in(mb);
        for (int i = 0; i < t; ++i)
            take_row(w, a, k.first_token(mb) + i, tok, t, i, k.words, (float*)room, (int8_t*)(room + up(w.kp * 4)));
    };
    const auto run = [&](int id, int64_t u) {
        const int64_t tile0 = u / row_units * grain, mb0 = u % row_units * step;
        for (int64_t at = tile0; at < std::min(tiles, tile0 + grain); ++at) {
            int64_t tile = at, i = 0;
            for (int64_t own; tile >= (own = (weights[i].n + 15) / 16); ++i) tile -= own;
            run_tile(k, weights[i], args[i], (Tokens*)base_of(id), tile, mb0, std::min(k.token_blocks, mb0 + step),
                     (float*)(room_of(id) + row_room));
        }
    };
    run_units(threads, copies > 1, k.token_blocks, units, prepare, run);
    return 0;
}

}  // namespace

PW_PART(int_linear) {
    table->int_linear = int_linear;
    table->attention = attention;
    table->rotary = rotary;
    table->probe[PROBE_INT8] = probe_threads<probe_int8>;
}
