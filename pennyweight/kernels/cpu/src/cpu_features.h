// Whether this machine supports an instruction set: the processor has it, and the operating system saves its registers.
//
// On x86 read by CPUID and XGETBV, as in Intel's manual (volume 1, 14.3 and 15.2). Not __builtin_cpu_supports: in
// libraries that Zig's clang builds for Windows it returns 0 for everything.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace {

bool has_scalar() { return true; }

#if defined(__x86_64__)

struct CpuFeatures {
    bool avx2 = false, avx_vnni = false, avx512 = false, avx512_vnni = false, avx512_bf16 = false;

    CpuFeatures() {
        unsigned a, b, c, d;
        if (!__get_cpuid(1, &a, &b, &c, &d)) return;
        const bool fma = bit(c, 12), xsave_enabled = bit(c, 27), avx = bit(c, 28);
        if (!xsave_enabled || !avx) return;
        unsigned low, high;
        __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
        const bool ymm_saved = (low & 0x06) == 0x06, zmm_saved = (low & 0xe6) == 0xe6;
        if (!ymm_saved || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return;
        const unsigned subleaves = a;
        avx2 = bit(b, 5) && fma;
        avx512 = zmm_saved && bit(b, 16) && bit(b, 17) && bit(b, 30) && bit(b, 31);  // F, DQ, BW, VL
        avx512_vnni = avx512 && bit(c, 11);
        const bool vbmi = bit(c, 1);
        if (subleaves < 1 || !__get_cpuid_count(7, 1, &a, &b, &c, &d)) return;
        avx_vnni = avx2 && bit(a, 4);
        avx512_bf16 = avx512_vnni && vbmi && bit(a, 5);
    }

    static bool bit(unsigned word, int i) { return word >> i & 1; }
};

const CpuFeatures& cpu_features() {
    static const CpuFeatures features;
    return features;
}

bool has_avx2() { return cpu_features().avx2; }
bool has_avx_vnni() { return cpu_features().avx_vnni; }
bool has_avx512() { return cpu_features().avx512; }
bool has_avx512_vnni() { return cpu_features().avx512_vnni; }
bool has_avx512_bf16() { return cpu_features().avx512_bf16; }

#elif defined(__aarch64__) && defined(__APPLE__)

bool cpu_feature(const char* name) {
    int has = 0;
    size_t size = sizeof has;
    return !sysctlbyname(name, &has, &size, nullptr, 0) && has;
}

bool has_neon_dotprod() {
    return cpu_feature("hw.optional.arm.FEAT_DotProd") && cpu_feature("hw.optional.arm.FEAT_FP16");
}
bool has_neon_i8mm() { return has_neon_dotprod() && cpu_feature("hw.optional.arm.FEAT_I8MM"); }

#elif defined(__aarch64__) && defined(__linux__)

bool has_neon_dotprod() { return getauxval(AT_HWCAP) >> 20 & 1; }                        // HWCAP_ASIMDDP
bool has_neon_i8mm() { return has_neon_dotprod() && (getauxval(AT_HWCAP2) >> 13 & 1); }  // HWCAP2_I8MM

#endif

}  // namespace
