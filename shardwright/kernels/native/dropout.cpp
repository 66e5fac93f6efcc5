// Dropout by counters: exactly what shardwright/ir/dropout.py computes.
//
// Philox4x32-10 (Salmon et al., 2011) gives four words for a counter (block of four columns, row,
// step, high word of the seed) and a key (low word of the seed, site). Eight counters, or as many
// as a vector has lanes of 64 bits, are mixed at once; a lane holds a word of 32 bits, and what is
// above it is not looked at.
#include "rows.h"
#include "strided.h"
#include "vector.h"

namespace shardwright {

namespace {

using namespace simd;

constexpr uint64_t WORD = 0xffffffff;
constexpr int64_t COUNTERS = LANES<int64_t>;
constexpr int64_t WORDS = 4 * COUNTERS;  // of one mixing

// The whole products of the low words.
SIMD U64v multiply(U64v a, uint32_t by) {
    U64v factor = U64v{} + by;
#if defined(SIMD_512)
    return (U64v)_mm512_mul_epu32((__m512i)a, (__m512i)factor);
#elif defined(SIMD_256)
    return (U64v)_mm256_mul_epu32((__m256i)a, (__m256i)factor);
#else
    return (a & WORD) * factor;
#endif
}

using Lanes = std::make_integer_sequence<int, COUNTERS>;

// Lanes of two vectors in turn, half of them: from lane Begin / 2 on.
template <int Begin, int... I> SIMD U64v by_turns(U64v a, U64v b, std::integer_sequence<int, I...>) {
    return pick<((I & 1 ? COUNTERS : 0) + (Begin + I) / 2)...>(a, b);
}

// What all counters of a run have in common.
struct Key {
    uint32_t low, site, step, high;
};

// The WORDS words of the counters `block` to `block + COUNTERS - 1` of a row, in the order of the
// columns.
SIMD void mix(const Key& key, uint64_t block, uint64_t row, uint32_t* words) {
    U64v c0, c1 = U64v{} + row, c2 = U64v{} + key.step, c3 = U64v{} + key.high;
    for (int i = 0; i < COUNTERS; i++) c0[i] = i;
    c0 += block;
    uint32_t k0 = key.low, k1 = key.site;
#pragma GCC unroll 10
    for (int round = 0; round < 10; round++) {
        U64v a = multiply(c0, 0xd2511f53), b = multiply(c2, 0xcd9e8d57);
        c0 = (b >> 32) ^ c1 ^ (U64v{} + k0);
        c2 = (a >> 32) ^ c3 ^ (U64v{} + k1);
        c1 = b;
        c3 = a;
        k0 += 0x9e3779b9;
        k1 += 0xbb67ae85;
    }
    // Two words a lane, then the lanes of both pairs in turn.
    U64v first = (c0 & WORD) | c1 << 32, second = (c2 & WORD) | c3 << 32;
    U64v ordered[2] = {by_turns<0>(first, second, Lanes{}), by_turns<COUNTERS>(first, second, Lanes{})};
    std::memcpy(words, ordered, sizeof(ordered));
}

template <class T> class DropoutCall : public Call {
   public:
    DropoutCall(const Operand& x, const Operand& y, double p, int64_t seed, int64_t site,
                const std::vector<int64_t>& offsets, const std::vector<int64_t>& whole)
        : limit_(uint64_t(std::nearbyint(p * 0x1p32))), scale_(p < 1 ? T(1 / (1 - p)) : T(0)),
          all_(Bits<Vec<T>>{} - (limit_ > WORD)), seed_(uint64_t(seed)), site_(uint32_t(site)) {
        // Rows are all dimensions but the last; the third operand is the row's number.
        int ndim = x.ndim;
        Operand rows_x = x, rows_y = y, number = x;
        rows_x.ndim = rows_y.ndim = number.ndim = std::max(0, ndim - 1);
        int64_t step = 1;
        for (int d = ndim - 2; d >= 0; d--) {
            number.strides[d] = step;
            first_row_ += offsets[d] * step;
            step *= whole[d];
        }
        space_ = plain_space({&rows_x, &rows_y, &number}, number.ndim, x.sizes);
        join_dims(space_);
        columns_ = ndim ? x.sizes[ndim - 1] : 1;
        first_ = ndim ? offsets[ndim - 1] : 0;
        step_x_ = ndim ? x.strides[ndim - 1] : 1;
        step_y_ = ndim ? y.strides[ndim - 1] : 1;
    }

    void run(char* const* data, Context& context) override {
        int64_t rows = space_.count;
        int64_t step;
        std::memcpy(&step, data[1], sizeof(step));
        Key key{uint32_t(seed_), site_, uint32_t(step), uint32_t(seed_ >> 32)};
        int threads = rows::threads_for(context, rows * columns_ * 2);
        in_parallel(threads, [&](int thread, int all) {
            rows::Span span = rows::share(rows, thread, all);
            if (span.begin >= span.end) return;
            Places place(space_, space_.dims, span.begin);
            for (int64_t i = span.begin; i < span.end; i++, place.next())
                one_row(key, uint64_t(first_row_ + place.offsets[2]),
                        rows::as<T>(data[0]) + place.offsets[0],
                        rows::as<T>(data[2]) + place.offsets[1]);
        });
    }

   private:
    uint64_t limit_;
    T scale_;
    Bits<Vec<T>> all_;  // a mask: whether every word is below the limit
    uint64_t seed_;
    uint32_t site_;
    Space space_;  // of the rows
    int64_t first_row_ = 0, columns_, first_, step_x_, step_y_;

    void one_row(const Key& key, uint64_t row, const T* x, T* y) const {
        bool dense = step_x_ == 1 && step_y_ == 1;
        // `skip` words of the first counter belong to columns before this slice.
        int64_t skip = first_ % 4, block = first_ / 4;
        for (int64_t column = -skip; column < columns_; column += WORDS, block += COUNTERS) {
            uint32_t words[WORDS + LANES<T>] = {};  // the last vector may reach beyond
            mix(key, uint64_t(block), row, words);
            int64_t from = std::max<int64_t>(column, 0);
            int64_t count = std::min(column + WORDS, columns_) - from;
            const uint32_t* word = words + (from - column);
            if (dense) keep_vectors(word, x + from, y + from, count);
            else keep(word, x + from * step_x_, y + from * step_y_, count);
        }
    }

    void keep_vectors(const uint32_t* words, const T* x, T* y, int64_t count) const {
        constexpr int64_t N = LANES<T>;
        int64_t i = 0;
        for (; i + N <= count; i += N)
            store(y + i, dropped(words + i) ? Vec<T>{} : load(x + i) * scale_);
        if (i < count)
            store_part(y + i, dropped(words + i) ? Vec<T>{} : load_part(x + i, count - i) * scale_,
                       count - i);
    }

    // A mask. Words are compared as integers as wide as the elements.
    auto dropped(const uint32_t* words) const {
        if constexpr (sizeof(T) == 4) {
            U32v wide;
            std::memcpy(&wide, words, sizeof(wide));
            return all_ | (wide < uint32_t(limit_));
        } else {
            I64v wide;
            for (int k = 0; k < LANES<T>; k++) wide[k] = words[k];
            return wide < int64_t(limit_);
        }
    }

    void keep(const uint32_t* words, const T* x, T* y, int64_t count) const {
        for (int64_t i = 0; i < count; i++)
            y[i * step_y_] = words[i] < limit_ ? T(0) : x[i * step_x_] * scale_;
    }
};

Call* bind_dropout(const CallSpec& spec, std::string& why) {
    const Operand &x = spec.operands[0], &step = spec.operands[1], &y = spec.operands[2];
    Reader reader(spec);
    auto p = reader.take<double>();
    auto seed = reader.take<int64_t>(), site = reader.take<int64_t>();
    auto offsets = reader.list<int64_t>(), whole = reader.list<int64_t>();
    if (x.dtype != y.dtype || !rows::floating(x) || step.dtype != I64 || step.numel() != 1)
        return why = "dropout of other than f32 and f64, or a step that is not one i64", nullptr;
    if (x.ndim != y.ndim || !std::equal(x.sizes, x.sizes + x.ndim, y.sizes) ||
        int(offsets.size()) != x.ndim || int(whole.size()) != x.ndim || !(p >= 0 && p <= 1))
        return why = "shapes, offsets or p that do not fit", nullptr;
    if (x.dtype == F64) return new DropoutCall<double>(x, y, p, seed, site, offsets, whole);
    return new DropoutCall<float>(x, y, p, seed, site, offsets, whole);
}

Register dropouts(13, bind_dropout);

}  // namespace

}  // namespace shardwright
