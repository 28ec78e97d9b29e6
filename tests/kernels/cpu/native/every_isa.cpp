// Each function of the native library, under each instruction set of this machine, beside plain C++: a program without
// torch, for emulators and sanitizers. Every buffer is as long as it must be and no longer. Prints what it compared, and
// ends with 1 where something differs, with 2 where there is nothing to compare.
//
//     every_isa [rounds [instruction set ..]]
//
// Where both are asked for the same numbers (integer sums, conversions, packing) they must have the same bits. Sums of
// products of small floats may be added in another order: they must be as near as the kind of the input allows.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "../../../../pennyweight/kernels/cpu/src/abi.h"
#include "../../../../pennyweight/kernels/cpu/src/affine.h"
#include "../../../../pennyweight/kernels/cpu/src/float_abi.h"
#include "../../../../pennyweight/kernels/cpu/src/optim_abi.h"

extern "C" {
int pw_isa_count();
const char* pw_isa_name(int);
int pw_isa_here(int);
int pw_isa_use(const char*);
int pw_int_linear(const IntLinear*, const void*, int64_t, int64_t, void*, const void*, int, const void*, const void*,
                  const void*, const void*, const void*, const void*, const void*, int64_t, int);
int pw_float_linear(const FloatLinear*, const void*, int64_t, int64_t, void*, const void*, int, const void*, const void*,
                    const void*, const void*, const void*, const void*, int);
void pw_pack_codes(const uint8_t*, int64_t, int64_t, int64_t, int, int, uint8_t*, int);
void pw_unpack_codes(const uint8_t*, int64_t, int64_t, int64_t, int, int, uint8_t*, int);
int pw_dequantize(const Affine*, void*, void*, void*, void*, const int64_t*, int64_t, void*, int);
int pw_quantize(const Rounding*, const void*, int64_t, void*, void*, void*, void*, double*, int);
void pw_ranges(const Affine*, const void*, int64_t, void*, int);
int pw_finite(const void*, int, int64_t, int);
int pw_optim_steps(const OptimJob*, int64_t, int);
}

namespace {

using Bytes = std::vector<uint8_t>;

// -- random things ----------------------------------------------------------------------------------------------------

uint64_t state = 1;
uint32_t random_bits() { return (uint32_t)((state = state * 6364136223846793005ull + 1442695040888963407ull) >> 33); }
int64_t below(int64_t n) { return (int64_t)(random_bits() % (uint64_t)n); }
template <class T> T one_of(std::initializer_list<T> items) { return items.begin()[below((int64_t)items.size())]; }
int64_t up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

float number() {  // of one sign or the other, about 1
    float sum = 0;
    for (int i = 0; i < 4; ++i) sum += (float)random_bits() / 2147483648.0f - 0.5f;
    return sum * 1.7f;
}
uint32_t bits_of(float f) { uint32_t b; memcpy(&b, &f, 4); return b; }
float float_of(uint32_t b) { float f; memcpy(&f, &b, 4); return f; }
uint16_t half_of(float f) {  // toward zero: any half will do
    const uint32_t b = bits_of(f);
    const int e = (int)(b >> 23 & 255) - 112;
    if (e <= 0) return (uint16_t)(b >> 16 & 0x8000);
    return (uint16_t)((b >> 16 & 0x8000) | (e > 30 ? 0x7bff : (uint32_t)e << 10 | (b >> 13 & 1023)));
}
int64_t size_of(int kind) { return kind == F32 ? 4 : kind == BF16 || kind == F16 ? 2 : kind == NONE ? 0 : 1; }

// `count` numbers of a kind, times `scale`; scales (positive) where `positive`.
Bytes numbers(int kind, int64_t count, float scale = 1, bool positive = false) {
    Bytes out((size_t)(count * size_of(kind)));
    if (kind == NONE) return out;
    for (int64_t i = 0; i < count; ++i) {
        float f = number() * scale;
        if (positive) f = (std::fabs(f) + 0.1f * scale);
        uint8_t* p = out.data() + i * size_of(kind);
        if (kind == F32) memcpy(p, &f, 4);
        else if (kind == BF16) { const uint16_t b = (uint16_t)(bits_of(f) >> 16); memcpy(p, &b, 2); }
        else if (kind == F16) { const uint16_t b = half_of(f); memcpy(p, &b, 2); }
        else if (kind == E8M0) *p = (uint8_t)(118 + below(8));
        else if (kind == E4M3) *p = (uint8_t)(40 + below(40));
        else *p = (uint8_t)random_bits();
    }
    return out;
}
Bytes any_bytes(int64_t count) {
    Bytes out((size_t)count);
    for (auto& b : out) b = (uint8_t)random_bits();
    return out;
}
const void* pointer(const Bytes& b) { return b.empty() ? nullptr : b.data(); }
float value(int kind, const uint8_t* p) {
    if (kind == F32) { float f; memcpy(&f, p, 4); return f; }
    uint16_t b;
    memcpy(&b, p, 2);
    if (kind == BF16) return float_of((uint32_t)b << 16);
    const int e = b >> 10 & 31;
    const float m = std::ldexp((float)(b & 1023) / 1024 + (e ? 1.0f : 0.0f), (e ? e : 1) - 15);
    return b & 0x8000 ? -m : m;
}

// -- comparing --------------------------------------------------------------------------------------------------------

std::vector<std::string> isas;  // beside plain C++
int64_t compared = 0, wrong = 0;

// Runs `call`, which writes `out`, under every instruction set. kind: NONE for the same bits, else that of `out`, whose
// elements may differ by `near` of the greatest.
void compare(const std::string& what, Bytes& out, const std::function<void(int threads)>& call, int kind = NONE, double near = 0) {
    std::fill(out.begin(), out.end(), (uint8_t)0xff);
    pw_isa_use("scalar");
    call(1);
    const Bytes expected = out;
    for (const std::string& isa : isas)
        for (int threads = 1; threads <= 3; threads += 2) {
            std::fill(out.begin(), out.end(), (uint8_t)0xff);
            pw_isa_use(isa.c_str());
            call(threads);
            ++compared;
            double most = 0, off = 0;
            if (kind != NONE)
                for (size_t i = 0; i < out.size(); i += (size_t)size_of(kind)) {
                    const double e = value(kind, &expected[i]), y = value(kind, &out[i]);
                    most = std::max(most, std::fabs(e));
                    off = std::max(off, std::isfinite(y) ? std::fabs(y - e) : INFINITY);
                }
            if (kind == NONE ? out == expected : off <= near * most) continue;
            ++wrong;
            printf("%s, %d threads: %s", isa.c_str(), threads, what.c_str());
            for (size_t i = 0, shown = 0; i < out.size() && shown < 4; ++i)
                if (out[i] != expected[i]) printf(" [%zu] %02x not %02x", i, out[i], expected[i]), ++shown;
            printf(kind == NONE ? "\n" : " off by %g of %g\n", off, most);
        }
}

// The input of a linear layer, its rows `ldx` elements apart, the last with nothing behind it.
struct Input {
    int kind;
    int64_t m, k, ldx;
    Bytes x, bias;
    int bias_kind;
    Input(int64_t n, int64_t k_) : kind(one_of<int>({F32, BF16, F16})), m(one_of<int64_t>({0, 1, 2, 3, 5, 9, 17, 33, 70})), k(k_),
          ldx(k + one_of<int64_t>({0, 0, 7})), x(numbers(kind, m ? (m - 1) * ldx + k : 0)),
          bias_kind(one_of<int>({NONE, F32, BF16, F16})) {
        bias = numbers(bias_kind, n);
    }
};

void int_linear() {
    const int bits = (int)(1 + below(8));
    const int64_t n = one_of<int64_t>({1, 5, 16, 33, 70}), k = one_of<int64_t>({1, 31, 64, 100, 257, 640, 2100});
    const int64_t tiles = (n + 15) / 16;
    IntLinear w = {};
    w.n = n, w.k = k, w.bits = bits;
    w.center = one_of<int32_t>({0, 1 << (bits - 1)});
    w.scale = one_of<int32_t>({F32, BF16, F16, E8M0});
    w.zero_point = one_of<int32_t>({NONE, NONE, I8, U8});
    w.offset = w.zero_point ? NONE : one_of<int32_t>({NONE, NONE, F32, BF16, F16});
    int64_t group = one_of<int64_t>({0, -1, 32, 64, 96, 128, 256});
    if (group < 0 && (w.zero_point || w.offset || w.scale == E8M0)) group = 0;
    if (group >= k) group = 0;
    if (group == 0 && w.offset) group = up(k, 32);
    w.group = (int32_t)group;
    w.kp = group > 0 ? up(up(k, group), 32) : up(k, 32);
    if (group > 0 && !w.zero_point && below(2)) {  // codes under outer numbers
        w.outer = (int32_t)(1 + below(4)), w.outer_kind = one_of<int32_t>({F32, BF16, F16});
        w.scale = one_of<int32_t>({I8, U8});
        if (w.offset) w.offset = one_of<int32_t>({I8, U8});
    }
    const Input in(n, k);
    w.x = in.kind;
    w.act = one_of<int32_t>({FLOAT, FLOAT, SYMMETRIC, ASYMMETRIC, STATIC});
    const int64_t most = w.act == FLOAT ? 128 : w.act == SYMMETRIC ? 2048 : 512;
    w.block = (int32_t)most;
    if (group > 0)
        for (w.block = (int32_t)(std::min(most, group) / 32 * 32); group % w.block;) w.block -= 32;
    w.act_lo = one_of<int32_t>({-128, -127}), w.act_hi = 127;
    w.act_scale = one_of<int32_t>({F32, BF16});
    w.act_floor = 1e-30f, w.act_steps = w.act == ASYMMETRIC ? 255.0f : 127.5f;
    const int64_t groups = group > 0 ? w.kp / group : 1, outers = w.outer ? tiles * (up(groups, w.outer) / w.outer) * 16 : 0;
    const int64_t parts = group < 0 ? 1 : w.outer ? outers * w.outer : tiles * groups * 16;
    const Bytes outer_scale = numbers(w.outer ? w.outer_kind : NONE, outers, 0.02f, true);
    const Bytes outer_offset = numbers(w.outer && w.offset ? w.outer_kind : NONE, outers, 0.02f);
    const Bytes codes = any_bytes(tiles * w.kp / 32 * 64 * bits), scale = numbers(w.scale, parts, 0.02f, true);
    const Bytes zero = numbers(w.zero_point, parts), offset = numbers(w.offset, parts, 0.02f);
    const Bytes act_scale = numbers(F32, 1, 0.02f, true);
    const int64_t act_zero = w.act == STATIC ? below(20) - 10 : 0;
    Bytes y((size_t)(in.m * n * size_of(in.kind)));
    char what[240];
    snprintf(what, sizeof what, "int_linear n %ld k %ld m %ld bits %d center %d group %d block %d scale %d zero %d offset %d outer %d x %d act %d bias %d",
             (long)n, (long)k, (long)in.m, bits, w.center, w.group, w.block, w.scale, w.zero_point, w.offset, w.outer, w.x, w.act, in.bias_kind);
    compare(what, y, [&](int threads) {
        pw_int_linear(&w, in.x.data(), in.m, in.ldx, y.data(), pointer(in.bias), in.bias_kind, codes.data(), scale.data(),
                      pointer(zero), pointer(offset), pointer(outer_scale), pointer(outer_offset), w.act == STATIC ? act_scale.data() : nullptr, act_zero, threads);
    });
}

void float_linear() {
    static const int small[4][3] = {{8, 4, 3}, {8, 5, 2}, {6, 3, 2}, {6, 2, 3}};
    const int* shape = small[below(4)];
    FloatLinear w = {};
    w.decode = one_of<int32_t>({TABLE16, SMALL_FLOAT, TABLE256, INTEGER});
    w.bits = w.decode == TABLE16 ? (int)(1 + below(4)) : w.decode == SMALL_FLOAT ? shape[0] : (int)(5 + below(w.decode == INTEGER ? 2 : 4));
    w.exponent = shape[1], w.mantissa = shape[2];
    w.limit = w.exponent == 4 ? 448.0f : w.exponent == 5 ? 57344.0f : w.exponent == 3 ? 28.0f : 7.5f;
    const int64_t n = one_of<int64_t>({1, 5, 16, 33, 70}), k = one_of<int64_t>({1, 31, 64, 100, 257, 640}), tiles = (n + 15) / 16;
    Bytes codes, values(1024), low(256), high(256);
    for (int i = 0; i < 256; ++i) {  // numbers that bfloat16 holds
        float f = float_of(bits_of(number()) & 0xffff0000u);
        if (w.decode == SMALL_FLOAT) {
            const int bias = (1 << (w.exponent - 1)) - 1, e = i >> w.mantissa & ((1 << w.exponent) - 1);
            const float m = (float)(i & ((1 << w.mantissa) - 1)) / (float)(1 << w.mantissa);
            f = std::ldexp(e ? 1 + m : m, (e ? e : 1) - bias) * (i >> (w.bits - 1) & 1 ? -1.0f : 1.0f);
        }
        if (w.decode == INTEGER) f = (float)(i - 16);
        memcpy(&values[4 * i], &f, 4);
        low[i] = (uint8_t)(bits_of(f) >> 16), high[i] = (uint8_t)(bits_of(f) >> 24);
    }
    w.values = (const float*)values.data(), w.low = low.data(), w.high = high.data();
    int64_t group = one_of<int64_t>({0, -1, 16, 32, 48, 64, 256});
    if (group >= k) group = 0;
    w.scale = group < 0 ? one_of<int32_t>({NONE, F32, BF16}) : one_of<int32_t>({F32, BF16, F16, E8M0, E4M3, I8, U8});
    w.row_block = group > 0 && size_of(w.scale) > 1 ? one_of<int32_t>({0, 16, 32}) : 0;
    w.group = (int32_t)group, w.n = n, w.k = k;
    w.kp = group > 0 ? up(up(k, group), 32) : up(k, 32);
    w.block = 256;
    if (group > 0)
        for (w.block = (int32_t)std::min<int64_t>(256, group) / 16 * 16; group % w.block;) w.block -= 16;
    const int64_t groups = group > 0 ? (k + group - 1) / group : 1;
    w.scale_groups = groups;
    const bool nested = w.scale == E4M3 || w.scale == I8 || w.scale == U8;
    w.outer = nested ? one_of<int32_t>({0, -1, 1, 2}) : 0;
    w.outer_kind = w.outer ? one_of<int32_t>({F32, BF16, F16}) : NONE;
    if (group > 0 && !w.row_block && below(2)) w.offset = w.outer > 0 ? one_of<int32_t>({I8, U8}) : nested ? NONE : one_of<int32_t>({F32, BF16, F16});
    if (w.outer > 0) w.scale_groups = up(groups, w.outer), w.outer_groups = w.scale_groups / w.outer;
    const int64_t parts = group < 0 ? 1 : w.row_block ? (n + w.row_block - 1) / w.row_block * groups : tiles * w.scale_groups * 16;
    const int64_t outers = w.outer < 0 ? 1 : w.outer ? tiles * w.outer_groups * 16 : 0;
    codes = any_bytes(tiles * w.kp / 32 * 64 * w.bits);
    if (w.decode == SMALL_FLOAT && w.bits == 8)
        for (auto& c : codes) c &= 0xbb;  // neither inf nor NaN
    const Bytes scale = numbers(w.scale, parts, 0.02f, true), outer = numbers(w.outer_kind, outers, 0.02f, true);
    const Bytes offset = numbers(w.offset, parts, 0.02f), offset_scale = numbers(w.offset ? w.outer_kind : NONE, outers, 0.02f);
    const Bytes outer_offset = w.outer && w.scale == I8 && below(2) ? numbers(F32, outers, 0.02f) : Bytes();
    const Input in(n, k);
    w.x = in.kind;
    Bytes y((size_t)(in.m * n * size_of(in.kind)));
    char what[240];
    snprintf(what, sizeof what, "float_linear n %ld k %ld m %ld bits %d decode %d group %d block %d scale %d rows %d outer %d offset %d x %d bias %d",
             (long)n, (long)k, (long)in.m, w.bits, w.decode, w.group, w.block, w.scale, w.row_block, w.outer, w.offset, w.x, in.bias_kind);
    compare(what, y, [&](int threads) {
        pw_float_linear(&w, in.x.data(), in.m, in.ldx, y.data(), pointer(in.bias), in.bias_kind, codes.data(), pointer(scale),
                        pointer(outer), pointer(outer_offset), pointer(offset), pointer(offset_scale), threads);
    }, in.kind, in.kind == F32 ? 1e-5 : 0x1p-7);
}

void packing() {
    const int bits = (int)(1 + below(8)), flip = one_of<int>({0, 1 << (bits - 1)});
    const int64_t n = 1 + below(40), k = 1 + below(200), kp = up(k, 32);
    Bytes codes = any_bytes(n * k), packed((size_t)((n + 15) / 16 * kp / 32 * 64 * bits)), back((size_t)(n * k));
    for (auto& c : codes) c = (uint8_t)((c & ((1 << bits) - 1)) - flip);
    compare("pack", packed, [&](int threads) { pw_pack_codes(codes.data(), n, k, kp, bits, flip, packed.data(), threads); });
    compare("unpack", back, [&](int threads) { pw_unpack_codes(packed.data(), n, k, kp, bits, flip, back.data(), threads); });
    if (back != codes) ++wrong, printf("unpack of pack is not what was packed: %d bits, n %ld, k %ld\n", bits, (long)n, (long)k);
}

void conversions() {
    Rounding q = {};
    Affine& a = q.to;
    a.n = 1 + below(40), a.k = one_of<int64_t>({1, 15, 32, 100, 300}), a.row_block = 1, a.bits = (int)(1 + below(8));
    a.store = one_of<int32_t>({PLAIN, BITS, TILES}), a.x = one_of<int32_t>({F32, BF16, F16});
    a.group = one_of<int64_t>({32, 64, 128, a.k});
    if (a.store == TILES) a.group = up(a.group, 32);
    a.group = std::min(a.group, a.k);
    a.width = up(a.k, a.group);
    a.groups = a.width / a.group;
    a.stride = a.store == TILES ? up(a.width, 32) / 32 * 64 * a.bits : a.store == BITS ? (a.width * a.bits + 7) / 8 : a.width;
    const bool is_signed = below(2);
    const int lo = is_signed ? -(1 << (a.bits - 1)) : 0;
    a.numbers = a.store == PLAIN && is_signed ? SIGNED : UNSIGNED;
    q.rule = one_of<int32_t>({RULE_SYMMETRIC, RULE_ASYMMETRIC, MINMAX});
    const int mid = is_signed ? 0 : q.rule == RULE_ASYMMETRIC ? 0 : 1 << (a.bits - 1);
    a.center = a.store == PLAIN ? mid : mid - lo;
    a.scale = one_of<int32_t>({F32, BF16});
    a.zero_point = q.rule == RULE_ASYMMETRIC ? (is_signed ? I8 : U8) : NONE;
    a.offset = q.rule == MINMAX ? a.scale : NONE;
    q.lo = (float)lo, q.hi = (float)(lo + (1 << a.bits) - 1), q.mid = (float)mid;
    q.floor = 1e-20f, q.large = a.x == F16 ? 16.0f : 1e30f;
    if (a.x == F16) q.floor = 6e-5f;
    q.part = (q.mid - q.lo) / (q.hi - q.lo), q.rest = 1 - q.part;
    const int64_t ldx = a.k + one_of<int64_t>({0, 5}), tiles = (a.n + 15) / 16;
    const Bytes x = numbers(a.x, (a.n - 1) * ldx + a.k);
    const int64_t code_bytes = (a.store == TILES ? tiles : a.n) * a.stride, parts = (a.store == TILES ? tiles * 16 : a.n) * a.groups;
    const int64_t sizes[5] = {code_bytes, parts * size_of(a.scale), parts * size_of(a.zero_point), parts * size_of(a.offset), (2 + 2 * a.n) * 8};
    Bytes out;
    std::vector<Bytes> room;
    for (int64_t s : sizes) room.emplace_back((size_t)s), out.resize(out.size() + (size_t)s);
    char what[200];
    snprintf(what, sizeof what, "n %ld k %ld bits %d store %d group %ld x %d scale %d rule %d signed %d", (long)a.n, (long)a.k, a.bits, a.store,
             (long)a.group, a.x, a.scale, q.rule, is_signed);
    const auto at = [&](int i) { return room[(size_t)i].empty() ? nullptr : (void*)room[(size_t)i].data(); };
    compare(std::string("quantize ") + what, out, [&](int threads) {
        for (auto& r : room) std::fill(r.begin(), r.end(), (uint8_t)0);
        pw_quantize(&q, x.data(), ldx, at(0), at(1), at(2), at(3), (double*)at(4), threads);
        out.clear();
        for (auto& r : room) out.insert(out.end(), r.begin(), r.end());
    });
    Bytes y((size_t)(a.n * a.k * size_of(a.x)));
    compare(std::string("dequantize ") + what, y, [&](int threads) {
        pw_dequantize(&a, at(0), at(1), at(2), at(3), nullptr, a.n, y.data(), threads);
    });
    std::vector<int64_t> index((size_t)(1 + below(9)));
    for (auto& i : index) i = below(a.n);
    Bytes rows(index.size() * (size_t)(a.k * size_of(a.x)));
    compare(std::string("rows ") + what, rows, [&](int threads) {
        pw_dequantize(&a, at(0), at(1), at(2), at(3), index.data(), (int64_t)index.size(), rows.data(), threads);
    });
    Bytes ends((size_t)(a.n * a.groups * 2 * size_of(a.x)));
    compare(std::string("ranges ") + what, ends, [&](int threads) { pw_ranges(&a, x.data(), ldx, ends.data(), threads); });
    Bytes with = x, verdict(1);
    if (below(2)) {  // an infinity somewhere
        const uint32_t top = a.x == F32 ? 0x7f800000u : a.x == BF16 ? 0x7f80u : 0x7c00u;
        memcpy(with.data() + below((int64_t)with.size() / size_of(a.x)) * size_of(a.x), &top, (size_t)size_of(a.x));
    }
    compare("finite", verdict, [&](int threads) { verdict[0] = (uint8_t)pw_finite(with.data(), a.x, (int64_t)with.size() / size_of(a.x), threads); });
    if ((with == x) != (verdict[0] == 1)) ++wrong, printf("finite is wrong about an infinity\n");
}

// A table of `count` random numbers in [-1, 1], with cells of 12 bits in which no two decision levels lie.
struct RandomTable {
    std::vector<float> values = std::vector<float>(256);
    std::vector<int32_t> cells;
    CodeTable t = {};
    RandomTable(int count, bool mirror) {
        for (int i = 0; i < count; ++i)  // half of each sign; neighbours an eighth of an octave apart
            values[(size_t)i] = (mirror || i >= count / 2 ? 1.0f : -1.0f) *
                                std::exp2(-0.125f * (float)(mirror || i >= count / 2 ? count - 1 - i : i) - 0.0625f * (float)below(2) * 0.5f);
        t.shift = 23 - 5, t.first = (int32_t)(bits_of(0x1p-40f) >> t.shift), t.last = (int32_t)(bits_of(2.0f) >> t.shift) - t.first;
        t.mirror = mirror, t.negative = mirror ? 0 : t.last + 1;
        for (int half = 0; half < (mirror ? 1 : 2); ++half) {
            const int middle = mirror ? 0 : count / 2;
            int code = middle;  // of 0: above all negative levels
            for (int32_t c = t.first; c <= t.first + t.last; ++c) {
                int32_t level = (1 << t.shift) - 1, before = code;
                for (int i = 1; i < count; ++i) {
                    const float l = (values[(size_t)i - 1] + values[(size_t)i]) / 2;
                    if ((l < 0) != (half == 1) || (int32_t)(bits_of(std::fabs(l)) >> t.shift) != c) continue;
                    level = (int32_t)bits_of(std::fabs(l)) & ((1 << t.shift) - 1);
                    code += half ? -1 : 1;
                }
                cells.push_back(before | level << 8);
            }
        }
        t.cells = cells.data(), t.values = values.data();
    }
};

void optimizers() {
    OptimJob j = {};
    const int64_t slabs = 1 + below(4), entries = 1 + below(9), blocks = 1 + below(3);
    j.inner = one_of<int64_t>({1, 1, 7, 27});
    j.row = j.inner == 1 ? 0 : one_of<int64_t>({j.inner, j.inner == 27 ? 3 : 7});
    j.block = j.inner == 1 ? one_of<int64_t>({16, 64, 150, 256}) : entries * j.inner;
    if (!j.row) j.row = j.block;
    j.slab = j.block * (blocks - 1) + (j.inner == 1 ? 1 + below(j.block) : (1 + below(entries)) * j.inner);
    j.count = slabs * j.slab;
    j.p_kind = one_of<int32_t>({F32, BF16, F16}), j.g_kind = one_of<int32_t>({F32, BF16, F16});
    j.rule = one_of<int32_t>({RULE_ADAM, RULE_LION, RULE_SGD});
    j.states = j.rule == RULE_ADAM ? 2 + (int)below(2) : 1;
    j.flags = (int32_t)below(8);
    j.key[0] = random_bits(), j.key[1] = random_bits() * 2, j.turn = random_bits();
    const float adam[8] = {0.99f, 0.01f * (float)below(2), 0.1f, 0.999f, 0.001f, 0.3f, 1e-8f, 0.01f};
    const float lion[8] = {0.99f, 0, 0.1f, 0.01f, 0.01f}, sgd[8] = {1, 0.01f, 0.9f, 1, 0.01f};
    memcpy(j.c, j.rule == RULE_ADAM ? adam : j.rule == RULE_LION ? lion : sgd, sizeof j.c);
    const int bits = one_of<int>({4, 8});
    const RandomTable table(1 << bits, false), mirrored(127, true);
    const Bytes p = numbers(j.p_kind, j.count), g = numbers(j.g_kind, j.count);
    std::vector<Bytes> room = {p};
    for (int k = 0; k < j.states; ++k) {
        OptimState& s = j.state[k];
        s.kind = below(5) == 0 ? STATE_FLOAT : k ? STATE_UFLOAT : STATE_TABLE;
        s.bits = bits, s.stochastic = k == 1 && below(2), s.power = (int)below(2), s.hi = k ? 15.5f : 1;
        s.table = bits == 8 && below(2) ? &mirrored.t : &table.t;
        s.top = (1 << bits) - 1, s.shift = bits == 8 ? 19 : 22, s.split = bits == 8 ? 128 : 0;
        s.base = bits == 8 ? 1840 : 246, s.low = bits == 8 ? 856 : 124;
        if (s.kind == STATE_FLOAT) {
            Bytes x = numbers(F32, j.count, 1, true);
            room.push_back(x), room.emplace_back();
            continue;
        }
        const int64_t rows = slabs * blocks * (j.block / j.row);
        Bytes codes = any_bytes(rows * (bits == 8 ? j.row : (j.row + 1) / 2));
        if (s.table == &mirrored.t && s.kind == STATE_TABLE)
            for (auto& c : codes) c = (uint8_t)((c & 0x80) | (c & 127) % 127);
        room.push_back(codes), room.push_back(numbers(F32, slabs * blocks, 0.1f, true));
    }
    Bytes out;
    for (const auto& r : room) out.resize(out.size() + r.size());
    char what[200];
    snprintf(what, sizeof what, "step: rule %d states %d bits %d kinds %d %d count %ld slab %ld block %ld inner %ld row %ld flags %d", j.rule, j.states, bits,
             j.p_kind, j.g_kind, (long)j.count, (long)j.slab, (long)j.block, (long)j.inner, (long)j.row, j.flags);
    compare(what, out, [&](int threads) {
        std::vector<Bytes> now = room;
        OptimJob job = j;
        job.p = now[0].data(), job.g = g.data();
        for (int k = 0; k < j.states; ++k)
            job.state[k].codes = now[(size_t)(1 + 2 * k)].data(), job.state[k].scale = (float*)now[(size_t)(2 + 2 * k)].data();
        pw_optim_steps(&job, 1, threads);
        out.clear();
        for (const auto& r : now) out.insert(out.end(), r.begin(), r.end());
    });
}

}  // namespace

int main(int count, char** words) {
    const int rounds = count > 1 ? atoi(words[1]) : 200;
    for (int i = 0; i < pw_isa_count(); ++i) {
        const std::string name = pw_isa_name(i);
        bool wanted = count < 3;
        for (int j = 2; j < count; ++j) wanted |= name == words[j];
        if (name != "scalar" && wanted && pw_isa_here(i)) isas.push_back(name);
    }
    if (isas.empty()) return printf("no instruction set here beside plain C++\n"), 2;
    for (int i = 0; i < rounds; ++i) int_linear(), float_linear(), packing(), conversions(), optimizers();
    printf("%ld comparisons with plain C++, %ld differ:", (long)compared, (long)wrong);
    for (const auto& isa : isas) printf(" %s", isa.c_str());
    printf("\n");
    return wrong != 0;
}
