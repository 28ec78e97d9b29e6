// y = x @ w.T + bias with integer codes: divides a call into units of work for threads; see int_matmul.h.
#include <algorithm>

#include "attention.h"
#include "bandwidth_probe.h"
#include "block.h"
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
    Work k = plan(w, a.m);
    const double products = (double)a.m * (double)(16 * tiles) * (double)w.kp;
    const int threads = (int)std::min<double>(a.threads, 1 + products / PRODUCTS_PER_THREAD);

    const Units units(k, tiles, threads);
    const InputRoom in(k);

    // For one or two tokens each thread makes its own copy of the inputs, which is cheaper than waiting for another.
    const int copies = a.m <= 2 ? threads : 1;
    const int64_t per_thread = in.row + units.room(k);
    char* space = inputs.get((size_t)(in.bytes * copies + per_thread * threads + whole_lines(w.kp)));
    if (!space) return 1;
    if (has_zero_points(w, a)) k.ones = fill_ones(w, space + in.bytes * copies + per_thread * threads);
    const auto base_of = [&](int id) { return space + (copies > 1 ? in.bytes * id : 0); };
    const auto room_of = [&](int id) { return space + in.bytes * copies + per_thread * id; };
    const auto prepare = [&](int id, int64_t mb) {
        Tokens& tok = in.begin(base_of(id), mb);
        char* room = room_of(id);
        const int t = k.tokens_in(mb);
        for (int i = 0; i < t; ++i)
            take_row(w, a, k.first_token(mb) + i, tok, t, i, k.words, (float*)room, (int8_t*)(room + in.wide));
    };
    const auto run = [&](int id, int64_t u) {
        units.each(k, u, [&](int64_t tile, int64_t end, int64_t mb0, int64_t mb1) {
            const Place at(weights, tile, end);
            return run_tiles(k, weights[at.weight], args[at.weight], (Tokens*)base_of(id), at.tile, at.end, mb0, mb1,
                             (float*)(room_of(id) + in.row), WriteRows{weights[at.weight], args[at.weight]});
        });
    };
    run_units(threads, copies > 1, k.token_blocks, units.count, prepare, run);
    return 0;
}

}  // namespace

PW_PART(int_linear) {
    table->int_linear = int_linear;
    table->blocks = blocks;
    table->attention = attention;
    table->rotary = rotary;
    table->probe[PROBE_INT8] = probe_threads<probe_int8>;
}
