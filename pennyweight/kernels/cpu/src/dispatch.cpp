// Selects the instruction set once and exports plain C functions. Compiled without instruction set flags.
#include <cstdlib>
#include <cstring>

#include "check_block.h"
#include "check_extents.h"
#include "cpu_features.h"
#include "vtable.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace {

using Part = void (*)(Table*);  // enters the functions of a part, see vtable.h

struct Isa {
    const char* name;
    int base;       // index of the instruction set whose functions it uses where it has none of its own; -1: none
    bool (*has)();  // whether this machine supports it
    Part parts[4];  // null where not compiled
    bool built() const { return parts[0] || parts[1] || parts[2] || parts[3]; }
    bool here() const { return built() && has(); }
};

// Weak: most parts are compiled for some instruction sets only, and a compiler may not support all of these.
#define PW_WEAK(name) extern "C" __attribute__((weak)) void name(Table*);
#define PW_DECLARE_PARTS(name)                \
    PW_WEAK(PW_PART_NAME(int_linear, name))   \
    PW_WEAK(PW_PART_NAME(float_linear, name)) \
    PW_WEAK(PW_PART_NAME(convolution, name))  \
    PW_WEAK(PW_PART_NAME(conversions, name))
#define PW_PARTS(name)                                                                                  \
    {PW_PART_NAME(int_linear, name), PW_PART_NAME(float_linear, name), PW_PART_NAME(convolution, name), \
     PW_PART_NAME(conversions, name)}

PW_DECLARE_PARTS(scalar)
#if defined(__x86_64__)
PW_DECLARE_PARTS(avx2)
PW_DECLARE_PARTS(avx_vnni)
PW_DECLARE_PARTS(avx512)
PW_DECLARE_PARTS(avx512_vnni)
PW_DECLARE_PARTS(avx512_bf16)
#elif defined(__aarch64__)
PW_DECLARE_PARTS(neon_dotprod)
PW_DECLARE_PARTS(neon_i8mm)
#endif

// Best last, after its base. setup.py has the same bases.
const Isa ISAS[] = {
    {"scalar", -1, has_scalar, PW_PARTS(scalar)},
#if defined(__x86_64__)
    {"avx2", 0, has_avx2, PW_PARTS(avx2)},
    {"avx_vnni", 1, has_avx_vnni, PW_PARTS(avx_vnni)},
    {"avx512", 0, has_avx512, PW_PARTS(avx512)},
    {"avx512_vnni", 3, has_avx512_vnni, PW_PARTS(avx512_vnni)},
    {"avx512_bf16", 4, has_avx512_bf16, PW_PARTS(avx512_bf16)},
#elif defined(__aarch64__)
    {"neon_dotprod", 0, has_neon_dotprod, PW_PARTS(neon_dotprod)},
    {"neon_i8mm", 1, has_neon_i8mm, PW_PARTS(neon_i8mm)},
#endif
};
constexpr int COUNT = sizeof(ISAS) / sizeof(ISAS[0]);

struct Tables {
    Table of[COUNT] = {};
    Tables() {
        for (int i = 0; i < COUNT; ++i) {
            const Isa& isa = ISAS[i];
            if (!isa.here()) continue;
            if (isa.base >= 0) of[i] = of[isa.base];
            for (const Part part : isa.parts)
                if (part) part(&of[i]);
        }
    }
};

int chosen = -1;

}  // namespace

// Every function checks its arguments first: see check.h. Functions without a status return 0 for invalid arguments.

PW_EXPORT int pw_abi() { return ABI; }
// Number of instruction sets that were built; name (null if out of range), and whether this machine supports it.
PW_EXPORT int pw_isa_count() { return COUNT; }
PW_EXPORT const char* pw_isa_name(int i) { return check::isa_at("pw_isa_name", i, COUNT) ? ISAS[i].name : nullptr; }
PW_EXPORT int pw_isa_here(int i) { return check::isa_at("pw_isa_here", i, COUNT) && ISAS[i].here(); }

// Uses the named instruction set; the best one for an empty name. Returns its index, or -1 if it is not available.
PW_EXPORT int pw_isa_use(const char* name) {
    if (!check::isa_named("pw_isa_use", name)) return -1;
    for (int i = COUNT; i-- > 0;)
        if (ISAS[i].here() && (!*name || !std::strcmp(name, ISAS[i].name))) {
#if PENNYWEIGHT_ASSERT
            check::isa = ISAS[i].name;
#endif
            return chosen = i;
        }
    return -1;
}

namespace {

const Table& table() {
    if (chosen < 0) pw_isa_use("");  // plain C++ is always available
    static const Tables tables;
    return tables.of[chosen];
}

// Requests 2 MB pages for large outputs: page faults for 4 KB pages take several times as long as the writes. No effect
// on memory that is already mapped.
void huge_pages(void* p, int64_t bytes) {
#if defined(__linux__)
    constexpr int64_t PAGE = 1 << 21;
    const int64_t first = ((int64_t)p + PAGE - 1) / PAGE * PAGE, last = ((int64_t)p + bytes) / PAGE * PAGE;
    if (last > first) madvise((void*)first, (size_t)(last - first), MADV_HUGEPAGE);
#else
    (void)p, (void)bytes;
#endif
}

}  // namespace

PW_EXPORT int pw_int_linear(const IntLinear* w, const void* x, int64_t m, int64_t ldx, void* y, const void* bias,
                            int bias_kind, const void* codes, const void* scale, const void* zero_point,
                            const void* offset, const void* outer_scale, const void* outer_offset,
                            const void* act_scale, int64_t act_zero_point, int threads) {
    const LinearArgs a = {x,
                          m,
                          ldx,
                          y,
                          bias,
                          codes,
                          scale,
                          zero_point,
                          offset,
                          outer_scale,
                          outer_offset,
                          act_scale,
                          (int32_t)act_zero_point,
                          bias_kind,
                          threads};
    if (!check::int_linears("pw_int_linear", w, &a, 1)) return INVALID;
    return table().int_linear(w, &a, 1);
}
// Several weights with one input; see int_linear.cpp.
PW_EXPORT int pw_int_linears(const IntLinear* weights, const LinearArgs* args, int count) {
    if (!check::int_linears("pw_int_linears", weights, args, count)) return INVALID;
    return count ? table().int_linear(weights, args, count) : DONE;
}
// The steps of transformer blocks that run in turn; see block.h.
PW_EXPORT int pw_blocks(const Block* const* blocks, int count) {
    if (!check::blocks("pw_blocks", blocks, count)) return INVALID;
    return table().blocks(blocks, count);
}
PW_EXPORT int pw_float_linear(const FloatLinear* w, const void* x, int64_t m, int64_t ldx, void* y, const void* bias,
                              int bias_kind, const void* codes, const void* scale, const void* outer_scale,
                              const void* outer_offset, const void* offset, const void* offset_scale, int threads) {
    const FloatArgs a = {x,         m,      ldx, y, bias, codes, scale, outer_scale, outer_offset, offset, offset_scale,
                         bias_kind, threads};
    if (!check::float_linear("pw_float_linear", w, a)) return INVALID;
    return table().float_linear(w, &a);
}
PW_EXPORT int pw_convolution(const Conv* w, const ConvArgs* a) {
    if (!check::convolution("pw_convolution", w, a)) return INVALID;
    huge_pages(a->y, a->n * w->o * a->oh * a->ow * (w->x == F32 ? 4 : 2));
    return table().convolution(w, a);
}
// The steps of a convolution net; see conv_chain.h.
PW_EXPORT int pw_conv_chain(const Chain* chain) {
    if (!check::conv_chain("pw_conv_chain", chain)) return INVALID;
    return table().conv_chain(chain);
}

PW_EXPORT int pw_pack_codes(const uint8_t* codes, int64_t n, int64_t k, int64_t kp, int bits, int flip, uint8_t* out,
                            int threads) {
    if (!check::packing("pw_pack_codes", codes, n, k, kp, bits, out, threads)) return INVALID;
    huge_pages(out, (n + 15) / 16 * kp / 32 * 64 * bits);
    table().pack_codes(codes, n, k, kp, bits, flip, out, threads);
    return DONE;
}
PW_EXPORT int pw_pack_stream(const uint8_t* stream, int64_t n, int64_t k, int64_t kp, int bits, int pad, uint8_t* out,
                             int threads) {
    if (!check::streaming("pw_pack_stream", stream, n, k, kp, bits, pad, out, threads)) return INVALID;
    huge_pages(out, (n + 15) / 16 * kp / 32 * 64 * bits);
    table().pack_stream(stream, n, k, kp, bits, pad, out, threads);
    return DONE;
}
PW_EXPORT int pw_unpack_codes(const uint8_t* packed, int64_t n, int64_t k, int64_t kp, int bits, int flip,
                              uint8_t* codes, int threads) {
    if (!check::packing("pw_unpack_codes", codes, n, k, kp, bits, packed, threads)) return INVALID;
    huge_pages(codes, n * k);
    table().unpack_codes(packed, n, k, kp, bits, flip, codes, threads);
    return DONE;
}
// Peak rates of this machine, for benchmarks; see bandwidth_probe.h.
PW_EXPORT int64_t pw_probe(int what, const void* p, int64_t n, int threads) {
    return check::probe("pw_probe", what, p, n, threads) ? table().probe[what](p, n, threads) : 0;
}

// 1: an index is out of range.
PW_EXPORT int pw_dequantize(const Affine* w, void* codes, void* scale, void* zero_point, void* offset,
                            const int64_t* index, int64_t m, void* out, int threads) {
    const Parts parts = {codes, scale, zero_point, offset};
    if (!check::dequantize("pw_dequantize", w, parts, index, m, out, threads)) return INVALID;
    if (index)
        for (int64_t i = 0; i < m; ++i)
            if (index[i] < 0 || index[i] >= w->n) return 1;
    huge_pages(out, m * w->k * (w->x == F32 ? 4 : 2));
    table().dequantize(w, &parts, index, m, (char*)out, threads);
    return DONE;
}
PW_EXPORT int pw_quantize(const Rounding* q, const void* x, int64_t ldx, void* codes, void* scale, void* zero_point,
                          void* offset, double* sums, int threads) {
    const Parts parts = {codes, scale, zero_point, offset};
    if (!check::quantize("pw_quantize", q, x, ldx, parts, sums, threads)) return INVALID;
    huge_pages(codes, (q->to.store == TILES ? (q->to.n + 15) / 16 : q->to.n) * q->to.stride);
    return table().quantize(q, (const char*)x, ldx, &parts, sums, threads);
}
PW_EXPORT int pw_ranges(const Affine* w, const void* x, int64_t ldx, void* out, int threads) {
    if (!check::ranges("pw_ranges", w, x, ldx, out, threads)) return INVALID;
    table().ranges(w, (const char*)x, ldx, (char*)out, threads);
    return DONE;
}
// 1: all of them are finite.
PW_EXPORT int pw_finite(const void* x, int kind, int64_t count, int threads) {
    return check::finite("pw_finite", x, kind, count, threads) && table().finite(x, kind, count, threads);
}
// 1: a scale is beyond float16.
PW_EXPORT int pw_gguf_quantize(int type, const void* x, int kind, int64_t count, int64_t k, const float* importance,
                               uint8_t* out, double* sums, int threads) {
    if (!check::gguf_quantize("pw_gguf_quantize", type, x, kind, count, k, importance, out, sums, threads))
        return INVALID;
    return table().gguf_quantize(type, x, kind, count, k, importance, out, sums, threads);
}
PW_EXPORT int pw_gguf_codes(int type, const uint8_t* blocks, int64_t count, uint8_t* stream, int threads) {
    if (!check::gguf_codes("pw_gguf_codes", type, blocks, count, stream, threads)) return INVALID;
    table().gguf_codes(type, blocks, count, stream, threads);
    return DONE;
}
PW_EXPORT int pw_gptq_block(const GptqBlock* block) {
    if (!check::gptq_block("pw_gptq_block", block)) return INVALID;
    table().gptq_block(block);
    return DONE;
}
PW_EXPORT int pw_squared_errors(const BlockErrors* errors) {
    if (!check::squared_errors("pw_squared_errors", errors)) return INVALID;
    table().squared_errors(errors);
    return DONE;
}
PW_EXPORT int pw_attention(const AttentionArgs* args, int threads) {
    return check::attention("pw_attention", args, threads) ? table().attention(args, threads) : (int)INVALID;
}
PW_EXPORT int pw_rotary(const RotaryArgs* args, int threads) {
    return check::rotary("pw_rotary", args, threads) ? table().rotary(args, threads) : (int)INVALID;
}
PW_EXPORT int pw_optim_steps(const OptimJob* jobs, int64_t count, int threads) {
    if (!check::optim_steps("pw_optim_steps", jobs, count, threads)) return INVALID;
    return table().optim_steps(jobs, count, threads);
}
// Enters the extents of a structure's parts (Described), as the functions above check them. Returns how many there are;
// -1: a rule is broken.
PW_EXPORT int pw_extents(int what, const void* structure, Extent* out, int room) {
    int count = 0;
    return check::extents("pw_extents", what, structure, out, room, &count) ? count : -1;
}
