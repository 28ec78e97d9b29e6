// Convolutions with integer codes: memory of a call and its distribution over threads; see conv.h.
#include <algorithm>

#include "conv.h"
#include "conv_chain.h"
#include "schedule.h"
#include "vtable.h"

namespace {

constexpr int64_t RANGE_PART = 1 << 14;  // numbers of a unit of work that finds the range of a sample
constexpr int64_t CODES_PART = 1 << 14;  // numbers of a unit of work that quantizes rows
constexpr int64_t MOST_PARTS = 256;

// Hands out parts of memory.
struct Carver {
    char* at;
    template <class T> T* take(int64_t count) {
        T* p = (T*)at;
        at += whole_lines(count * (int64_t)sizeof(T));
        return p;
    }
};

inline int64_t take_next(int64_t* counter) { return __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED); }

Range range_of(const Conv& w, const char* x, int64_t n) {
    if (w.act == ASYMMETRIC)
        return w.x == BF16  ? range_of<BF16, true>(x, n)
               : w.x == F16 ? range_of<F16, true>(x, n)
                            : range_of<F32, true>(x, n);
    return w.x == BF16  ? range_of<BF16, false>(x, n)
           : w.x == F16 ? range_of<F16, false>(x, n)
                        : range_of<F32, false>(x, n);
}

struct Phases {  // of one sample
    Phase range, rows, units;
    int32_t odd = 0;  // whether static inputs are not finite
};

class ConvCall {
    const Conv& w;
    const ConvArgs& a;
    ConvWork k;
    int threads;
    bool own;  // each thread has its own samples
    int64_t buffer_codes, buffer_sums, row_sums, room_bytes, sample_numbers, parts, part, row_step, row_units;
    // memory
    char *buffers, *rooms;
    Range* ranges;
    Phases* phases;
    Phase* tiles;  // whose codes are decoded
    int64_t* samples_done;

    int8_t* room_of(int id) const { return (int8_t*)rooms + id * room_bytes; }
    Sample buffer_of(int id) const {
        char* p = buffers + (own ? id * limbs_of(w) * (buffer_codes + buffer_sums) : 0);
        const int limbs = limbs_of(w);
        return {(int8_t*)p, (int32_t*)(p + limbs * buffer_codes), 0, 0, {0, 0}, buffer_codes, buffer_sums / 4};
    }
    const char* x_of(int64_t sample) const { return (const char*)a.x + sample * sample_numbers * size_of(w.x); }
    char* y_of(int64_t sample) const { return (char*)a.y + sample * w.o * k.pixels * size_of(w.x); }
    static void widen(Range& all, const Range& r) {
        all.lo = std::min(all.lo, r.lo), all.hi = std::max(all.hi, r.hi), all.top = std::max(all.top, r.top);
    }

    void one_sample(int64_t sample, ConvRoom& room, int id, int team) const {
        Sample s = buffer_of(id);
        const char* x = x_of(sample);
        Range all = {0, 0, 0};
        Phases alone, *next = own ? &alone : phases + sample;
        if (w.act != STATIC) {
            next->range.take(parts, [&](int64_t i) {
                const int64_t from = i * part;
                const Range r = range_of(w, x + from * size_of(w.x), std::min(part, sample_numbers - from));
                if (own) widen(all, r);
                else ranges[i] = r;
            });
            next->range.wait();
        }
        if (!own && sample) phases[sample - 1].units.wait();  // they read the buffers
        for (int64_t i = 0; i < parts && !own && w.act != STATIC; ++i) widen(all, ranges[i]);
        choose_sample_scale(w, a, all, s);
        {
            InputRows rows[3] = {{w, a, k.s, s, 0, x, (int32_t*)room_of(id)},
                                 {w, a, k.s, s, 1, x, (int32_t*)room_of(id)},
                                 {w, a, k.s, s, 2, x, (int32_t*)room_of(id)}};
            next->rows.take(row_units, [&](int64_t i) {
                for (int limb = 0; limb < limbs_of(w); ++limb)
                    rows[limb].run(i * row_step, std::min(k.s.rows, (i + 1) * row_step), room_of(id) + row_sums);
                if (w.act == STATIC && !rows[0].finite()) __atomic_store_n(&next->odd, 1, __ATOMIC_RELAXED);
            });
        }
        next->rows.wait();
        if (__atomic_load_n(&next->odd, __ATOMIC_RELAXED)) s.scale = float_of(0x7fc00000);
        const ConvUnits units(k, s, y_of(sample));
        const int64_t blocks = (k.pixels + CONV_BLOCK - 1) / CONV_BLOCK, small = k.pixels / blocks,
                      larger = k.pixels % blocks;
        const int64_t groups = (k.tiles + CONV_TILES - 1) / CONV_TILES;
        const int64_t splits = team == 1 ? 1 : std::min(groups, (4 * team + blocks - 1) / blocks),
                      step = (groups + splits - 1) / splits * CONV_TILES;
        next->units.take(blocks * splits, [&](int64_t i) {
            const int64_t b = i % blocks, t0 = i / blocks * step, t1 = std::min(k.tiles, t0 + step);
            if (t0 < t1) units.run(b * small + std::min(b, larger), small + (b < larger), t0, t1, room);
        });
    }

  public:
    ConvCall(const Conv& w_, const ConvArgs& a_)
        : w(w_),
          a(a_),
          k{w_, a_, {}, 0, 0, 0, 0, 0, 0, false, false, false, nullptr, nullptr, nullptr, nullptr, nullptr} {}

    int run() {
        k.s = conv_shape(w, a);
        k.tiles = (w.o + 15) / 16, k.pixels = a.oh * a.ow, k.rows_of_group = w.o / a.groups;
        k.direct = w.c == 1, k.decoded = !k.direct && w.bits < 8;
        k.zeros = w.act == ASYMMETRIC || (w.act == STATIC && a.act_zero_point);
        k.tile_bytes = w.kp * 16, k.columns = w.kh * w.kw * fours(w.channels) / 4;
        sample_numbers = k.s.channels * a.h * a.w;
        const double products = (double)a.n * (double)k.pixels * (double)(16 * k.tiles) * (double)(w.c * w.kh * w.kw);
        threads = (int)std::min<double>(a.threads, 1 + products / PRODUCTS_PER_THREAD);
        own = threads == 1 || a.n >= 4 * threads || a.n % threads == 0;
        if (own) threads = (int)std::min<int64_t>(threads, a.n);

        part = std::max(RANGE_PART, (sample_numbers / MOST_PARTS + 16) / 16 * 16);
        parts = (sample_numbers + part - 1) / part;
        row_step = std::max<int64_t>(
            1, std::min(CODES_PART / std::max<int64_t>(1, a.w * k.s.channels), k.s.rows / (2 * threads)));
        row_units = (k.s.rows + row_step - 1) / row_step;
        bool merged;
        const int64_t pixels = k.s.rows * k.s.columns, pieces = k.sets() * conv_pieces(w, a, &merged),
                      taps = w.kh * w.kw;
        const auto up = whole_lines;
        buffer_codes = up(pixels * k.s.pixel + 64), buffer_sums = k.s.sums ? up(k.s.rows * a.ow * k.s.sets * 4) : 0;
        row_sums = k.s.sums ? up(row_step * k.s.columns * k.s.sets * 4) : 0;
        room_bytes = row_sums + up(std::max<int64_t>(a.w, 16) * k.s.channels + 4);
        const int64_t counts = own ? 0 : a.n;
        const int64_t decoded = k.decoded ? k.tiles * k.tile_bytes : 0,
                      sums = k.zeros && !k.direct ? k.tiles * k.sets() * 16 : 0;
        const int64_t numbers = k.direct ? taps * 16 * k.tiles : 0;
        const int64_t shared = up(decoded) + up(sums * 4) + up(numbers * 4) + up(taps * 8) +
                               up(pieces * (int64_t)sizeof(Piece)) + up(MOST_PARTS * 2 * (int64_t)sizeof(Range)) +
                               counts * (int64_t)sizeof(Phases) + (int64_t)sizeof(Phase) + up(8);
        const int buffers_needed = own ? threads : 1;
        char* space = inputs.get(
            (size_t)(shared + buffers_needed * limbs_of(w) * (buffer_codes + buffer_sums) + threads * room_bytes));
        if (!space) return NO_MEMORY;
        Carver carve{space};
        uint8_t* bytes = carve.take<uint8_t>(decoded);
        k.codes = k.decoded ? bytes : (const uint8_t*)a.codes;
        k.sums = carve.take<int32_t>(sums);
        k.direct_codes = carve.take<float>(numbers);
        k.taps = carve.take<int64_t>(taps);
        k.pieces = carve.take<Piece>(pieces);
        ranges = carve.take<Range>(MOST_PARTS * 2);
        phases = carve.take<Phases>(counts);
        for (int64_t i = 0; i < counts; ++i) new (phases + i) Phases;
        tiles = new (carve.take<Phase>(1)) Phase;
        samples_done = carve.take<int64_t>(1);
        *samples_done = 0;
        rooms = carve.take<char>(threads * room_bytes);
        buffers = carve.at;
        for (int64_t i = 0; i < taps; ++i)
            k.taps[i] = (i / w.kw * a.dilation_h * k.s.columns + i % w.kw * a.dilation_w) * k.s.pixel;
        if (!k.direct) make_pieces(k);

        const auto body = [&](int id, int team) {
            if (k.direct || k.decoded || k.zeros) {
                tiles->take(k.tiles, [&](int64_t t) { decode_conv(k, t); });
                tiles->wait();
            }
            ConvRoom* room = (ConvRoom*)scratch.get(sizeof(ConvRoom));
            if (own) {
                for (int64_t i; (i = take_next(samples_done)) < a.n;) one_sample(i, *room, id, 1);
            } else {
                for (int64_t i = 0; i < a.n; ++i) one_sample(i, *room, id, team);
            }
        };
#if defined(_OPENMP)
        if (threads > 1) {
#pragma omp parallel num_threads(threads)
            body(omp_get_thread_num(), omp_get_num_threads());
        } else
#endif
            body(0, 1);
        inputs.trim();
        return DONE;
    }
};

int convolution(const Conv* w, const ConvArgs* a) { return a->n == 0 || w->o == 0 ? DONE : ConvCall(*w, *a).run(); }

int conv_chain(const Chain* chain) { return chain->n == 0 || chain->step_count == 0 ? DONE : ChainCall(*chain).run(); }

}  // namespace

PW_PART(convolution) {
    table->convolution = convolution;
    table->conv_chain = conv_chain;
}
