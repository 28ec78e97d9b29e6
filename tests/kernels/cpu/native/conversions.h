// Cases of conversions: packing, codes to floats, floats to codes, ends of groups, what is finite.
#pragma once

#include "compare.h"

namespace {

void packing() {
    const int bits = (int)(1 + below(8)), flip = one_of<int>({0, 1 << (bits - 1)});
    const int64_t n = rows_of(), k = 1 + below(300), kp = up(k, 32) + (chance(10) ? 32 : 0);
    Bytes plain = any_bytes(n * k);
    for (auto& c : plain) c = (uint8_t)((c & ((1 << bits) - 1)) - flip);
    Room tiles((size_t)((n + 15) / 16 * kp / 32 * 64 * bits));
    char what[120];
    snprintf(what, sizeof what, "n %ld k %ld kp %ld bits %d flip %d", (long)n, (long)k, (long)kp, bits, flip);
    {
        const Room codes(plain);
        const auto call = [&](int64_t n, int64_t k, int64_t kp, int bits, int threads) {
            return pw_pack_codes(codes.data(), n, k, kp, bits, flip, tiles.data(), threads);
        };
        compare(std::string("pw_pack_codes ") + what, {{tiles}},
                [&](int threads) { return call(n, k, kp, bits, threads); });
        refuse("pw_pack_codes",
               {
                   {"n", [&] { return (int64_t)call(-1, k, kp, bits, 1); }},
                   {"k", [&] { return (int64_t)call(n, -1, kp, bits, 1); }},
                   {"kp", [&] { return (int64_t)call(n, k, kp + 1, bits, 1); }},
                   {"k above kp", [&] { return (int64_t)call(n, kp + 1, kp, bits, 1); }},
                   {"bits", [&] { return (int64_t)call(n, k, kp, 9, 1); }},
                   {"threads", [&] { return (int64_t)call(n, k, kp, bits, 0); }},
                   {"no codes", [&] { return (int64_t)pw_pack_codes(nullptr, n, k, kp, bits, flip, tiles.data(), 1); }},
                   {"no tiles", [&] { return (int64_t)pw_pack_codes(codes.data(), n, k, kp, bits, flip, nullptr, 1); }},
               });
        if (mode != COMPARE) tiles.fill(0);
    }
    Room back((size_t)(n * k));
    compare(std::string("pw_unpack_codes ") + what, {{back}},
            [&](int threads) { return pw_unpack_codes(tiles.data(), n, k, kp, bits, flip, back.data(), threads); });
    if (mode == COMPARE && back.copy() != plain) ++wrong, printf("unpack of pack is not what was packed: %s\n", what);
    refuse("pw_unpack_codes",
           {
               {"n", [&] { return (int64_t)pw_unpack_codes(tiles.data(), -1, k, kp, bits, flip, back.data(), 1); }},
               {"kp", [&] { return (int64_t)pw_unpack_codes(tiles.data(), n, k, kp - 8, bits, flip, back.data(), 1); }},
               {"bits", [&] { return (int64_t)pw_unpack_codes(tiles.data(), n, k, kp, 0, flip, back.data(), 1); }},
               {"no codes", [&] { return (int64_t)pw_unpack_codes(tiles.data(), n, k, kp, bits, flip, nullptr, 1); }},
               {"no tiles", [&] { return (int64_t)pw_unpack_codes(nullptr, n, k, kp, bits, flip, back.data(), 1); }},
           });
}

// The same tiles from bit streams.
void streaming() {
    const int bits = (int)(1 + below(8)), pad = one_of<int>({0, 1 << (bits - 1), (1 << bits) - 1});
    const int64_t n = rows_of(), k = 1 + below(300), kp = up(k, 32) + (chance(10) ? 32 : 0), width = (k * bits + 7) / 8;
    const size_t size = (size_t)((n + 15) / 16 * kp / 32 * 64 * bits);
    Bytes plain = any_bytes(n * k), packed((size_t)(n * width), 0), expected;
    for (int64_t i = 0; i < n * k * bits; ++i) {
        const int64_t r = i / (k * bits), at = i % (k * bits);
        packed[(size_t)(r * width + at / 8)] |=
            (uint8_t)((plain[(size_t)(r * k + at / bits)] >> at % bits & 1) << at % 8);
    }
    if (mode == COMPARE) {
        for (auto& c : plain) c = (uint8_t)((c & ((1 << bits) - 1)) - pad);
        const Room codes(plain), tiles(size);
        if (pw_pack_codes(codes.data(), n, k, kp, bits, pad, tiles.data(), 1))
            ++wrong, printf("pw_pack_codes refused\n");
        expected = tiles.copy();
    }
    char what[120];
    snprintf(what, sizeof what, "n %ld k %ld kp %ld bits %d pad %d", (long)n, (long)k, (long)kp, bits, pad);
    const Room stream(packed), tiles(size);
    const auto call = [&](int64_t n, int64_t k, int64_t kp, int bits, int pad, int threads) {
        return pw_pack_stream(stream.data(), n, k, kp, bits, pad, tiles.data(), threads);
    };
    compare(std::string("pw_pack_stream ") + what, {{tiles}},
            [&](int threads) { return call(n, k, kp, bits, pad, threads); });
    if (mode == COMPARE && tiles.copy() != expected) ++wrong, printf("a stream is packed into other tiles: %s\n", what);
    refuse("pw_pack_stream",
           {
               {"n", [&] { return (int64_t)call(-1, k, kp, bits, pad, 1); }},
               {"k", [&] { return (int64_t)call(n, -1, kp, bits, pad, 1); }},
               {"kp", [&] { return (int64_t)call(n, k, kp + 1, bits, pad, 1); }},
               {"k above kp", [&] { return (int64_t)call(n, kp + 1, kp, bits, pad, 1); }},
               {"bits", [&] { return (int64_t)call(n, k, kp, 0, 0, 1); }},
               {"threads", [&] { return (int64_t)call(n, k, kp, bits, pad, 0); }},
               {"negative padding", [&] { return (int64_t)call(n, k, kp, bits, -1, 1); }},
               {"padding of more bits", [&] { return (int64_t)call(n, k, kp, bits, 1 << bits, 1); }},
               {"no stream", [&] { return (int64_t)pw_pack_stream(nullptr, n, k, kp, bits, pad, tiles.data(), 1); }},
               {"no tiles", [&] { return (int64_t)pw_pack_stream(stream.data(), n, k, kp, bits, pad, nullptr, 1); }},
           });
}

// Rows, columns, groups and where codes lie.
Affine matrix() {
    Affine a = {};
    a.n = rows_of(),
    a.k = chance(2) ? one_of<int64_t>({1, 15, 16, 17, 32, 100, 300, 1023, 1024, 1025, 2050}) : 1 + below(500);
    a.row_block = 1, a.bits = (int)(1 + below(8));
    a.store = one_of<int32_t>({PLAIN, BITS, TILES}), a.x = one_of<int32_t>({F32, BF16, F16});
    a.group = chance(2) ? one_of<int64_t>({32, 64, 128, a.k}) : 1 + below(a.k);
    if (a.store == TILES) a.group = up(a.group, 32);
    a.group = std::min(a.group, a.k);
    a.groups = (a.k + a.group - 1) / a.group;
    a.width = a.groups * a.group;
    a.stride = a.store == TILES  ? up(a.width, 32) / 32 * 64 * a.bits
               : a.store == BITS ? (a.width * a.bits + 7) / 8
                                 : a.width + (chance(8) ? 3 : 0);
    return a;
}
int64_t code_bytes(const Affine& a) {
    return a.store == PLAIN ? (a.n - 1) * a.stride + a.width : (a.store == TILES ? (a.n + 15) / 16 : a.n) * a.stride;
}
int64_t part_count(const Affine& a, bool tiled) {
    return tiled ? (a.n + 15) / 16 * a.groups * 16 - 15 + (a.n - 1) % 16
                 : (a.n + a.row_block - 1) / a.row_block * a.groups;
}
std::string name_of(const char* function, const Affine& a) {
    char what[240];
    snprintf(what, sizeof what,
             "%s n %ld k %ld bits %d store %d stride %ld group %ld x %d scale %d zero %d of %d offset %d numbers %d "
             "rows %ld",
             function, (long)a.n, (long)a.k, a.bits, a.store, (long)a.stride, (long)a.group, a.x, a.scale, a.zero_point,
             a.zero_bits, a.offset, a.numbers, (long)a.row_block);
    return what;
}

// Codes to floats, of every meaning.
void dequantize() {
    Affine a = matrix();
    a.numbers = one_of<int32_t>({UNSIGNED, SIGNED, MINIFLOAT, LOOKUP});
    if (a.numbers == SIGNED) a.store == PLAIN ? void() : void(a.numbers = UNSIGNED);
    a.center = a.numbers <= SIGNED ? (int32_t)below(1 << a.bits) : 0;
    if (a.numbers == MINIFLOAT) {
        static const int small[4][4] = {{8, 3, 7, 0x7f}, {8, 2, 15, 0x7c}, {6, 2, 3, 256}, {6, 3, 1, 256}};
        const int* f = small[below(4)];
        a.stride = a.store == TILES ? a.stride / a.bits * f[0] : a.store == BITS ? (a.width * f[0] + 7) / 8 : a.stride;
        a.bits = f[0], a.mantissa = f[1], a.bias = f[2], a.special = f[3];
    }
    a.row_block = chance(3) ? 1 + below(a.n) : 1;
    a.scale = one_of<int32_t>({NONE, F32, BF16, F16, E8M0});
    if (a.numbers <= SIGNED) a.zero_point = one_of<int32_t>({NONE, I8, U8});
    if (a.zero_point && chance(3)) a.zero_bits = (int32_t)(1 + below(8)), a.zero_lo = -(int32_t)below(128);
    a.offset = one_of<int32_t>({NONE, NONE, F32, BF16, F16});
    const bool tiled = a.store == TILES && a.row_block == 1;
    const int64_t count = part_count(a, tiled), blocks = (a.n + a.row_block - 1) / a.row_block;
    const Room codes(any_bytes(code_bytes(a))), scale(numbers(a.scale, count, 0.02f, true)),
        offset(numbers(a.offset, count, 0.02f));
    const Room zero(a.zero_bits ? any_bytes(blocks * ((a.groups * a.zero_bits + 7) / 8))
                                : numbers(a.zero_point, count));
    const Room table(numbers(a.numbers == LOOKUP ? F32 : NONE, 256));
    a.table = (const float*)table.pointer();
    const auto call = [&](const Affine& v, const int64_t* index, int64_t m, const Room& out, int threads) {
        return pw_dequantize(&v, codes.data(), scale.pointer(), zero.pointer(), offset.pointer(), index, m, out.data(),
                             threads);
    };
    {
        Room y((size_t)(a.n * a.k * size_of(a.x)));
        compare(name_of("pw_dequantize", a), {{y, a.x}},
                [&](int threads) { return call(a, nullptr, a.n, y, threads); });
        told(MATRIX, a, {&codes, &scale, &zero, &offset});
        const auto with = [&](auto change) {
            return [&, change] {
                Affine v = a;
                change(v);
                return (int64_t)call(v, nullptr, a.n, y, 1);
            };
        };
        using W = Affine;
        refuse("pw_dequantize", {
                                    {"n", with([](W& v) { v.n = -1; })},
                                    {"other rows", with([](W& v) { v.n += 1; })},
                                    {"k", with([](W& v) { v.k = v.width + 1; })},
                                    {"group", with([](W& v) { v.group = 0; })},
                                    {"groups", with([](W& v) { v.groups += 1; })},
                                    {"row_block", with([](W& v) { v.row_block = 0; })},
                                    {"store", with([](W& v) { v.store = 3; })},
                                    {"bits", with([](W& v) { v.bits = 9; })},
                                    {"numbers", with([](W& v) { v.numbers = -1; })},
                                    {"stride", with([](W& v) {
                                         v.stride = v.width > 1 ? 1 : 0;
                                         v.store = PLAIN;
                                     })},
                                    {"kind of scales", with([](W& v) { v.scale = E4M3; })},
                                    {"kind of x", with([](W& v) { v.x = NONE; })},
                                    {"kind of zero points", with([](W& v) { v.zero_point = F16; })},
                                    {"kind of offsets", with([](W& v) { v.offset = I8; })},
                                    {"no table", with([](W& v) { v.numbers = LOOKUP, v.table = nullptr; })},
                                    {"threads", [&] { return (int64_t)call(a, nullptr, a.n, y, 0); }},
                                    {"m", [&] { return (int64_t)call(a, nullptr, a.n + 1, y, 1); }},
                                    {"no codes",
                                     [&] {
                                         return (int64_t)pw_dequantize(&a, nullptr, scale.pointer(), zero.pointer(),
                                                                       offset.pointer(), nullptr, a.n, y.data(), 1);
                                     }},
                                    {"no matrix",
                                     [&] {
                                         return (int64_t)pw_dequantize(nullptr, codes.data(), nullptr, nullptr, nullptr,
                                                                       nullptr, a.n, y.data(), 1);
                                     }},
                                });
    }
    std::vector<int64_t> rows((size_t)below(9));
    for (auto& i : rows) i = below(a.n);
    if (!rows.empty() && chance(6))
        rows[(size_t)below((int64_t)rows.size())] = one_of<int64_t>({-1, a.n, INT64_MIN, INT64_MAX});
    Bytes raw(rows.size() * 8);
    if (!rows.empty()) memcpy(raw.data(), rows.data(), raw.size());
    const Room index(raw);
    Room y(rows.size() * (size_t)(a.k * size_of(a.x)));
    compare(name_of("pw_dequantize", a) + " by index", {{y, a.x}},
            [&](int threads) { return call(a, (const int64_t*)index.data(), (int64_t)rows.size(), y, threads); });
}

// Floats to codes of every rule, and the ends of groups.
void quantize() {
    Rounding q = {};
    Affine& a = q.to;
    a = matrix();
    const bool is_signed = chance(2);
    const int lo = is_signed ? -(1 << (a.bits - 1)) : 0;
    a.numbers = a.store == PLAIN && is_signed ? SIGNED : UNSIGNED;
    q.rule = one_of<int32_t>({GIVEN, RULE_SYMMETRIC, NO_CLIP, RULE_ASYMMETRIC, MINMAX});
    const bool offsets = q.rule == MINMAX || (q.rule == GIVEN && chance(3)),
               zeros = q.rule == RULE_ASYMMETRIC || (q.rule == GIVEN && !offsets && chance(2));
    const int mid = is_signed || zeros ? 0 : 1 << (a.bits - 1);
    a.center = a.store == PLAIN ? mid : mid - lo;
    a.scale = one_of<int32_t>({F32, BF16, F16});
    a.zero_point = zeros ? (is_signed ? I8 : U8) : NONE;
    a.offset = offsets ? chance(2) ? a.scale : one_of<int32_t>({F32, BF16, F16}) : NONE;
    if (q.rule == GIVEN && chance(3)) a.row_block = 1 + below(a.n);
    q.lo = (float)lo, q.hi = (float)(lo + (1 << a.bits) - 1), q.mid = (float)mid;
    if (is_signed && a.bits > 1 && chance(2)) q.lo += 1;  // a symmetric range
    q.floor = a.x == F16 ? 6e-5f : 1e-20f, q.large = a.x == F16 ? 16.0f : 1e30f;
    q.part = (q.mid - q.lo) / (q.hi - q.lo), q.rest = 1 - q.part;
    const int64_t ldx = a.k + one_of<int64_t>({0, 5}), count = part_count(a, q.rule != GIVEN && a.store == TILES);
    const Bytes raw = numbers(a.x, (a.n - 1) * ldx + a.k, chance(8) ? 1e4f : 1);
    const Room x(raw);
    const bool plain = all_finite(a.x, raw);
    {
        Room codes((size_t)code_bytes(a)), scale((size_t)(count * size_of(a.scale))),
            zero((size_t)(count * size_of(a.zero_point)));
        Room offset((size_t)(count * size_of(a.offset))), sums((size_t)(2 + 2 * a.n) * 8);
        const bool given = q.rule == GIVEN;
        const std::vector<Output> outputs = {
            {codes, NONE, 0, Bytes(codes.size())},
            {scale, a.scale, 0, given ? numbers(a.scale, count, 0.02f, true) : Bytes(scale.size())},
            {zero, NONE, 0, given ? numbers(a.zero_point, count) : Bytes(zero.size())},
            {offset, a.offset, 0, given ? numbers(a.offset, count, 0.02f) : Bytes(offset.size())},
            {sums, NONE, 0, Bytes(sums.size())}};
        const auto call = [&](const Rounding& v, int64_t step, const Room& to, int threads) {
            return pw_quantize(&v, x.data(), step, to.pointer(), scale.pointer(), zero.pointer(), offset.pointer(),
                               (double*)sums.data(), threads);
        };
        // the order in which the ends of a group meet a NaN is left open: the sums tell of it
        compare(
            name_of("pw_quantize", a) + " rule " + std::to_string(q.rule), outputs,
            [&](int threads) { return call(q, ldx, codes, threads); }, plain);
        const auto with = [&](auto change) {
            return [&, change] {
                Rounding v = q;
                change(v);
                return (int64_t)call(v, ldx, codes, 1);
            };
        };
        using W = Rounding;
        refuse("pw_quantize",
               {
                   {"n", with([](W& v) { v.to.n = -1; })},
                   {"k", with([](W& v) { v.to.k = 0; })},
                   {"bits", with([](W& v) { v.to.bits = 0; })},
                   {"groups", with([](W& v) { v.to.groups += 1; })},
                   {"rule", with([](W& v) { v.rule = 5; })},
                   {"store", with([](W& v) { v.to.store = -1; })},
                   {"numbers", with([](W& v) { v.to.numbers = LOOKUP; })},
                   {"no scale", with([](W& v) { v.to.scale = NONE; })},
                   {"packed zero points", with([](W& v) { v.to.zero_point = U8, v.to.zero_bits = 4; })},
                   {"a long range", with([](W& v) { v.hi = v.lo + 300; })},
                   {"an empty range", with([](W& v) { v.hi = v.lo; })},
                   {"rows that share", with([](W& v) { v.rule = RULE_SYMMETRIC, v.to.row_block = 2; })},
                   {"no zero points", with([](W& v) { v.rule = RULE_ASYMMETRIC, v.to.zero_point = NONE; })},
                   {"no offsets", with([](W& v) { v.rule = MINMAX, v.to.offset = NONE; })},
                   {"kind of x", with([](W& v) { v.to.x = E8M0; })},
                   {"ldx",
                    [&] {
                        Rounding v = q;
                        v.to.n = std::max<int64_t>(a.n, 2);
                        return (int64_t)call(v, -1, codes, 1);
                    }},
                   {"threads", [&] { return (int64_t)call(q, ldx, codes, 0); }},
                   {"no codes",
                    [&] {
                        return (int64_t)pw_quantize(&q, x.data(), ldx, nullptr, scale.pointer(), zero.pointer(),
                                                    offset.pointer(), (double*)sums.data(), 1);
                    }},
                   {"no rounding",
                    [&] {
                        return (int64_t)pw_quantize(nullptr, x.data(), ldx, codes.data(), nullptr, nullptr, nullptr,
                                                    (double*)sums.data(), 1);
                    }},
                   {"no x",
                    [&] {
                        return (int64_t)pw_quantize(&q, nullptr, ldx, codes.data(), scale.pointer(), zero.pointer(),
                                                    offset.pointer(), (double*)sums.data(), 1);
                    }},
               });
    }
    Room ends((size_t)(a.n * a.groups * 2 * size_of(a.x)));
    const auto ends_of = [&](const Affine& v, int64_t step, int threads) {
        return pw_ranges(&v, x.data(), step, ends.data(), threads);
    };
    compare(name_of("pw_ranges", a), {{ends, a.x}}, [&](int threads) { return ends_of(a, ldx, threads); }, plain);
    refuse("pw_ranges",
           {
               {"n", [&] { return (int64_t)ends_of([](Affine v) { return v.n = -1, v; }(a), ldx, 1); }},
               {"group", [&] { return (int64_t)ends_of([](Affine v) { return v.group = -1, v; }(a), ldx, 1); }},
               {"groups", [&] { return (int64_t)ends_of([](Affine v) { return v.groups += 1, v; }(a), ldx, 1); }},
               {"threads", [&] { return (int64_t)ends_of(a, ldx, 0); }},
               {"no matrix", [&] { return (int64_t)pw_ranges(nullptr, x.data(), ldx, ends.data(), 1); }},
               {"no x", [&] { return (int64_t)pw_ranges(&a, nullptr, ldx, ends.data(), 1); }},
               {"no out", [&] { return (int64_t)pw_ranges(&a, x.data(), ldx, nullptr, 1); }},
           });
}

// Blocks of GGUF files: the same bytes under every instruction set, for any number of threads.
void gguf() {
    const int type = one_of<int>({GGUF_Q4_0, GGUF_Q4_1, GGUF_Q5_0, GGUF_Q5_1, GGUF_Q8_0, GGUF_Q2_K, GGUF_Q3_K,
                                  GGUF_Q4_K, GGUF_Q5_K, GGUF_Q6_K, GGUF_IQ4_NL, GGUF_IQ4_XS});
    const int kind = one_of<int>({F32, BF16, F16}), block = gguf_block(type).elements;
    const int64_t k = (1 + below(4)) * block, rows = below(chance(10) ? 40 : 6), count = rows * k;
    const bool weighted = chance(2);
    const Room x(numbers(kind, count)), importance(numbers(F32, weighted ? k : 0));
    const float* by = weighted ? (const float*)importance.data() : nullptr;
    Room out((size_t)(count / block * gguf_block(type).bytes)),
        sums((size_t)((count + GGUF_PIECE - 1) / GGUF_PIECE * 16));
    const auto run = [&](int t, int x_kind, int64_t n, int64_t columns, int threads) {
        return (int64_t)pw_gguf_quantize(t, x.data(), x_kind, n, columns, by, (uint8_t*)out.data(),
                                         (double*)sums.data(), threads);
    };
    compare("pw_gguf_quantize", {out, sums}, [&](int threads) { return run(type, kind, count, k, threads); }, !wild);
    refuse("pw_gguf_quantize", {
                                   {"type", [&] { return run(4, kind, count, k, 1); }},
                                   {"kind", [&] { return run(type, U8, count, k, 1); }},
                                   {"count", [&] { return run(type, kind, k + 1, k, 1); }},
                                   {"negative count", [&] { return run(type, kind, -k, k, 1); }},
                                   {"columns", [&] { return run(type, kind, 2, 2, 1); }},
                                   {"threads", [&] { return run(type, kind, count, k, 0); }},
                                   {"no x",
                                    [&] {
                                        return (int64_t)pw_gguf_quantize(type, nullptr, kind, k, k, by,
                                                                         (uint8_t*)out.data(), (double*)sums.data(), 1);
                                    }},
                                   {"no out",
                                    [&] {
                                        return (int64_t)pw_gguf_quantize(type, x.data(), kind, count + k, k, by,
                                                                         nullptr, (double*)sums.data(), 1);
                                    }},
                               });
}

// Codes of such blocks, of any bytes.
void gguf_stream() {
    const int type = GGUF_BLOCKS[below((int)(sizeof GGUF_BLOCKS / sizeof *GGUF_BLOCKS))].type;
    const GgufBlock block = gguf_block(type);
    const int64_t count = chance(10) ? 256 + below(3000) : below(40);
    const Room blocks(any_bytes(count * block.bytes));
    Room out((size_t)(count * block.elements / 8 * block.bits));
    const auto run = [&](int t, int64_t n, int threads) {
        return (int64_t)pw_gguf_codes(t, blocks.data(), n, (uint8_t*)out.data(), threads);
    };
    compare("pw_gguf_codes", {out}, [&](int threads) { return run(type, count, threads); });
    refuse("pw_gguf_codes",
           {
               {"type", [&] { return run(4, count, 1); }},
               {"count", [&] { return run(type, -1, 1); }},
               {"threads", [&] { return run(type, count, 0); }},
               {"no blocks", [&] { return (int64_t)pw_gguf_codes(type, nullptr, 1, (uint8_t*)out.data(), 1); }},
               {"no stream", [&] { return (int64_t)pw_gguf_codes(type, blocks.data(), count + 1, nullptr, 1); }},
           });
}

// A block of columns of GPTQ.
void gptq() {
    const int64_t n = rows_of(), columns = chance(4) ? one_of<int64_t>({1, 64, 127, 128}) : 1 + below(40);
    const int64_t count = n * columns;
    const bool table = chance(2), is_signed = chance(2), zeros = chance(2) && !table, offsets = chance(3),
               some = chance(3);
    const int sign = table && is_signed ? 1 + (int)below(5) : 0;
    const int64_t levels = !table ? 0 : sign ? (1 << sign) - 1 : 1 + below(TABLE_LEVELS);
    Bytes factor = numbers(F32, columns * columns, 0.1f);
    for (int64_t i = 0; i < columns; ++i) memcpy(&factor[(size_t)(i * columns + i) * 4], "\0\0\x80\x3f", 4);  // 1
    Bytes kept((size_t)(some ? count * 4 : 0));
    for (size_t i = 0; i < kept.size(); i += 4) memcpy(&kept[i], chance(2) ? "\0\0\x80\x3f" : "\0\0\0\0", 4);
    const auto of = [&](bool there, float size) { return numbers(F32, there ? count : 0, size, true); };
    const Room w(numbers(F32, count)), lower(factor), keep(kept), times(of(true, 4)), scale(of(true, 0.2f));
    const Room zero(of(zeros, 3)), least(of(offsets && !table, 1)), divisor(of(offsets && !table, 1));
    const Room offset(of(offsets, 1)), level(numbers(F32, levels, 1, true));
    const Room number(numbers(F32, sign ? 2 * levels + 2 : table ? levels + 1 : 0));
    const Room codes((size_t)count), values((size_t)count * 4), errors((size_t)count * 4);
    const auto at = [](const Room& room) { return (float*)room.pointer(); };
    const GptqBlock block = {n,
                             columns,
                             at(w),
                             at(lower),
                             at(keep),
                             at(times),
                             at(scale),
                             at(zero),
                             at(least),
                             at(divisor),
                             at(offset),
                             codes.data(),
                             at(values),
                             at(errors),
                             is_signed ? 0.0f : 8.0f,
                             is_signed ? -8.0f : 0.0f,
                             is_signed ? 7.0f : 15.0f,
                             is_signed ? 0.0f : 8.0f,
                             {at(level), at(number), (int32_t)levels, sign},
                             1,
                             chance(3)};
    const auto with = [&](auto change) {
        return [&, change] {
            GptqBlock b = block;
            change(b);
            return (int64_t)pw_gptq_block(&b);
        };
    };
    compare(
        "pw_gptq_block", {codes, values, errors},
        [&](int threads) { return with([&](GptqBlock& b) { b.threads = threads; })(); }, !wild);
    using G = GptqBlock;
    refuse("pw_gptq_block", {
                                {"n", with([](G& b) { b.n = -1; })},
                                {"no columns", with([](G& b) { b.columns = 0; })},
                                {"columns", with([](G& b) { b.columns = GPTQ_COLUMNS + 1; })},
                                {"offsets", with([](G& b) { b.least = b.least ? nullptr : b.w; })},
                                {"levels", with([](G& b) { b.table = {b.w, b.w, TABLE_LEVELS + 1, 0}; })},
                                {"sign", with([](G& b) { b.table = {b.w, b.w, 4, 2}; })},
                                {"no numbers", with([](G& b) { b.table = {b.w, nullptr, 1, 0}; })},
                                {"an empty range", with([](G& b) { b.hi = b.lo; })},
                                {"a long range", with([](G& b) { b.lo = -128, b.hi = 200; })},
                                {"threads", with([](G& b) { b.threads = 0; })},
                                {"descent", with([](G& b) { b.descent = 2; })},
                                {"no w", with([](G& b) { b.w = nullptr; })},
                                {"no factor", with([](G& b) { b.lower = nullptr; })},
                                {"no scale", with([](G& b) { b.scale = nullptr; })},
                                {"no codes", with([](G& b) { b.codes = nullptr; })},
                                {"no errors", with([](G& b) { b.errors = nullptr; })},
                                {"no block", [&] { return (int64_t)pw_gptq_block(nullptr); }},
                            });
}

// Errors of blocks under given parameters.
void errors_of_blocks() {
    const int64_t blocks = rows_of(), size = chance(4) ? one_of<int64_t>({1, 15, 16, 128, 1000}) : 1 + below(70);
    const int64_t weights = chance(2) ? 1 + below(6) : blocks + 1;
    const bool table = chance(2), is_signed = chance(2), zeros = chance(2) && !table, offsets = chance(3);
    const bool weighted = chance(2);
    const int sign = table && is_signed ? 1 + (int)below(5) : 0;
    const int64_t levels = !table ? 0 : sign ? (1 << sign) - 1 : 1 + below(TABLE_LEVELS);
    const Room level(numbers(F32, levels, 1, true));
    const Room number(numbers(F32, sign ? 2 * levels + 2 : table ? levels + 1 : 0));
    const auto of = [&](bool there, float large) { return numbers(F32, there ? blocks : 0, large, true); };
    const Room x(numbers(F32, blocks * size)), weight(numbers(F32, weighted ? weights * size : 0, 1, true));
    const Room factor(of(true, 4)), scale(of(true, 0.2f)), zero(of(zeros, 3));
    const Room least(of(offsets && !table, 1)), divisor(of(offsets && !table, 1)), offset(of(offsets, 1));
    const Room out((size_t)blocks * 4);
    const auto at = [](const Room& room) { return (float*)room.pointer(); };
    const BlockErrors job = {blocks,
                             size,
                             at(x),
                             at(weight),
                             weights,
                             at(factor),
                             at(scale),
                             at(zero),
                             at(least),
                             at(divisor),
                             at(offset),
                             at(out),
                             is_signed ? 0.0f : 8.0f,
                             is_signed ? -8.0f : 0.0f,
                             is_signed ? 7.0f : 15.0f,
                             is_signed ? 0.0f : 8.0f,
                             {at(level), at(number), (int32_t)levels, sign},
                             1};
    const auto with = [&](auto change) {
        return [&, change] {
            BlockErrors b = job;
            change(b);
            return (int64_t)pw_squared_errors(&b);
        };
    };
    compare(
        "pw_squared_errors", {out}, [&](int threads) { return with([&](BlockErrors& b) { b.threads = threads; })(); },
        !wild);
    using E = BlockErrors;
    refuse("pw_squared_errors", {
                                    {"blocks", with([](E& b) { b.blocks = -1; })},
                                    {"no elements", with([](E& b) { b.size = 0; })},
                                    {"rows of weights", with([](E& b) { b.weight = b.x, b.weights = 0; })},
                                    {"offsets", with([](E& b) { b.least = b.least ? nullptr : b.x; })},
                                    {"levels", with([](E& b) { b.table = {b.x, b.x, TABLE_LEVELS + 1, 0}; })},
                                    {"sign", with([](E& b) { b.table = {b.x, b.x, 4, 2}; })},
                                    {"no numbers", with([](E& b) { b.table = {b.x, nullptr, 1, 0}; })},
                                    {"an empty range", with([](E& b) { b.hi = b.lo; })},
                                    {"threads", with([](E& b) { b.threads = 0; })},
                                    {"no x", with([](E& b) { b.x = nullptr; })},
                                    {"no factor", with([](E& b) { b.factor = nullptr; })},
                                    {"no scale", with([](E& b) { b.scale = nullptr; })},
                                    {"no result", with([](E& b) { b.errors = nullptr; })},
                                    {"no job", [&] { return (int64_t)pw_squared_errors(nullptr); }},
                                });
}

void finite() {
    const int kind = one_of<int>({F32, BF16, F16});
    const int64_t count = chance(10) ? (1 << 15) + below(70000) : below(300);
    Bytes raw = numbers(kind, count);
    if (count && chance(2)) {  // an infinity somewhere
        const uint32_t top = kind == F32 ? 0x7f800000u : kind == BF16 ? 0x7f80u : 0x7c00u;
        memcpy(raw.data() + below(count) * size_of(kind), &top, (size_t)size_of(kind));
    }
    const Room x(raw);
    int verdict = -1;
    compare("pw_finite", {}, [&](int threads) { return verdict = pw_finite(x.data(), kind, count, threads); });
    if (mode == COMPARE && verdict != all_finite(kind, raw))
        ++wrong, printf("finite is wrong about kind %d, %ld numbers\n", kind, (long)count);
    refuse("pw_finite",
           {
               {"kind", [&] { return (int64_t)pw_finite(x.data(), U8, count, 1); }},
               {"count", [&] { return (int64_t)pw_finite(x.data(), kind, -1, 1); }},
               {"threads", [&] { return (int64_t)pw_finite(x.data(), kind, count, 0); }},
               {"no x", [&] { return (int64_t)pw_finite(nullptr, kind, 1, 1); }},
           },
           0);
}

}  // namespace
