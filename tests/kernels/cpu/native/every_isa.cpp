// Each function of the native library, under each instruction set of this machine, beside plain C++: a program without
// torch, for emulators and sanitizers. Every buffer is as long as it must be and no longer, and lies between two pages
// that nobody may touch. Prints what it compared, and ends with 1 where something differs, with 2 where there is
// nothing to compare.
//
//     every_isa [option ..] [rounds [instruction set ..]]
//
//     --seed N      of the random cases; 1
//     --from N      the first round; 0. A round depends on nothing but the seed and its number
//     --seconds N   ends after so long, at the latest
//     --wild        numbers that are NaN, infinite, subnormal or very large among the others
//     --short       each argument in turn is a byte too short, which must be noticed (address sanitizer and assertions)
//     --broken      descriptions that break a rule, which must be refused
//
// Where both are asked for the same numbers (integer sums, conversions, packing) they must have the same bits. Sums of
// products of small floats may be added in another order: they must be as near as the kind of the input allows.
#include <ctime>

#include "attention.h"
#include "blocks.h"
#include "conversions.h"
#include "convolutions.h"
#include "linears.h"
#include "steps.h"

namespace {

int64_t seed = 1;

void say_where() {
    fprintf(stderr, "every_isa: --seed %ld --from %ld%s%s, %s: %s\n", (long)seed, (long)round_now,
            wild ? " --wild" : "",
            mode == SHORT    ? " --short"
            : mode == BROKEN ? " --broken"
                             : "",
            place == AT_END ? "before a page" : "behind a page", now.c_str());
}
void on_signal(int number) {
    say_where();
    signal(number, SIG_DFL);
    raise(number);
}

void one_round() {
    static void (*const every[])() = {
        int_linear,       int_linears, block,      block_attention, float_linear, convolution, conv_chain,
        packing,          streaming,   dequantize, quantize,        gguf,         gguf_stream, gptq,
        errors_of_blocks, finite,      optimizers, attention,       rotary,       extents,     probe,
        choosing};
    for (const auto f : every)
        for (Place p : {AT_BEGIN, AT_END}) {
            place = p;
            state = (uint64_t)seed * 0x9e3779b97f4a7c15ull + (uint64_t)round_now * 0xd1342543de82ef95ull;
            for (int i = 0; i < 4; ++i) random_bits();
            f();
            if (mode != COMPARE) break;
        }
}

}  // namespace

int main(int count, char** words) {
    int64_t rounds = 200, seconds = 1 << 30, at = 1;
    for (; at < count && !strncmp(words[at], "--", 2); ++at) {
        const std::string option = words[at];
        if (option == "--wild") wild = true;
        else if (option == "--short") mode = SHORT;
        else if (option == "--broken") mode = BROKEN;
        else if (at + 1 < count && option == "--seed") seed = atoll(words[++at]);
        else if (at + 1 < count && option == "--from") round_now = atoll(words[++at]);
        else if (at + 1 < count && option == "--seconds") seconds = atoll(words[++at]);
        else return printf("no such option: %s\n", option.c_str()), 2;
    }
    if (at < count) rounds = atoll(words[at++]);
    for (int i = 0; i < pw_isa_count(); ++i) {
        const std::string name = pw_isa_name(i);
        bool wanted = at >= count && name != "scalar";
        for (int64_t j = at; j < count; ++j) wanted |= name == words[j];
        if (wanted && pw_isa_here(i)) isas.push_back(name);
    }
    if (isas.empty()) return printf("no instruction set here beside plain C++\n"), 2;
#if defined(__SANITIZE_ADDRESS__)
    __asan_set_death_callback(say_where);
#else
    for (int s : {SIGSEGV, SIGFPE, SIGILL}) signal(s, on_signal);
#if !defined(_WIN32)
    signal(SIGBUS, on_signal);
#endif
    if (mode == SHORT) return printf("--short needs the address sanitizer\n"), 2;
#endif
    if (mode == COMPARE) signal(SIGABRT, on_signal);
    const time_t begin = time(nullptr);
    int64_t done = 0;
    for (; done < rounds && time(nullptr) - begin < seconds; ++done, ++round_now) one_round();
    if (mode == COMPARE)
        printf("%ld rounds, %ld comparisons with plain C++, %ld wrong:", (long)done, (long)compared, (long)wrong);
    else printf("%ld rounds, %ld calls to be refused, %ld were not:", (long)done, (long)refused, (long)wrong);
    for (const auto& isa : isas) printf(" %s", isa.c_str());
    printf("\n");
    return wrong != 0;
}
