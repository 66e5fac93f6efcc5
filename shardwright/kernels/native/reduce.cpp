// Sums over any dimensions, times a number.
//
// Two ways, by where the memory of x runs: along a summed dimension (rows: each result is the sum
// of runs of memory) or along a kept one (columns: a row of results grows by rows of memory). What
// always holds: the order of additions depends on shapes and strides, never on the number of
// threads; sums of floats go on in f64 after at most `BLOCK` elements or `BAND` rows.
#include "convert.h"
#include "rows.h"
#include "strided.h"
#include "vector.h"

namespace shardwright {

namespace {

using namespace simd;

constexpr int64_t BLOCK = 2048;   // elements of a row that are summed in the type of addition
constexpr int64_t GROUP = 8;      // rows that are added at once
constexpr int64_t BAND = 128;     // rows that are summed in the type of addition
constexpr int64_t CHUNK = 512;    // columns at a time
constexpr int64_t PARTS = 64;     // into how many parts a sum of everything is cut, at most
constexpr int64_t PART = 32768;   // elements in a part, at least

// What sums go on in.
template <class T> struct Total { using Type = double; };
template <> struct Total<int64_t> { using Type = int64_t; };
template <class T> using TotalOf = typename Total<T>::Type;

template <class T> T sum_block(const T* x, int64_t count) {
    constexpr int64_t N = LANES<T>;
    Vec<T> a{}, b{}, c{}, d{};
    int64_t i = 0;
    for (; i + 4 * N <= count; i += 4 * N) {
        a += load(x + i);
        b += load(x + i + N);
        c += load(x + i + 2 * N);
        d += load(x + i + 3 * N);
    }
    for (; i + N <= count; i += N) a += load(x + i);
    if (i < count) b += load_part(x + i, count - i);
    return sum_lanes((a + b) + (c + d));
}

template <class T> TotalOf<T> sum_run(const T* x, int64_t count) {
    TotalOf<T> total = 0;
    for (int64_t i = 0; i < count; i += BLOCK) total += sum_block(x + i, std::min(BLOCK, count - i));
    return total;
}

// to[i] += the sum of GROUP rows at i.
template <class T> void add_group(T* to, const T* const* x, int64_t count) {
    auto add = [](Vec<T> t, Vec<T> a, Vec<T> b, Vec<T> c, Vec<T> d, Vec<T> e, Vec<T> f, Vec<T> g,
                  Vec<T> h) { return t + (((a + b) + (c + d)) + ((e + f) + (g + h))); };
    map(count, add, to, to, x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7]);
}

template <class T> void add_row(T* to, const T* x, int64_t count) {
    map(count, [](Vec<T> t, Vec<T> a) { return t + a; }, to, static_cast<const T*>(to), x);
}

// x's strides and sizes of some dimensions, with y's where it has them.
struct Dims {
    Operand x{}, y{};
    void append(int64_t size, int64_t stride_x, int64_t stride_y) {
        x.sizes[x.ndim] = y.sizes[y.ndim] = size;
        x.strides[x.ndim++] = stride_x;
        y.strides[y.ndim++] = stride_y;
    }
};

template <class T> class ReduceCall : public Call {
    using Sum = TotalOf<T>;

   public:
    ReduceCall(const Operand& x, const Operand& y, const Dims& kept, const Dims& summed,
               double scale)
        : kept_(make_space({&kept.x, &kept.y}, kept.x.ndim, kept.x.sizes)),
          summed_(make_space({&summed.x}, summed.x.ndim, summed.x.sizes)), scale_(scale),
          direct_(x.dtype == OWN), load_(runner(OWN, x.dtype)), store_(runner(y.dtype, OWN)),
          x_size_(element_size(x.dtype)), y_size_(element_size(y.dtype)) {
        bool along_sum = summed_.dims && summed_.strides[0][summed_.dims - 1] == 1;
        columns_ = !along_sum && kept_.dims && kept_.strides[0][kept_.dims - 1] == 1;
    }

    void run(char* const* data, Context& context) override {
        int threads = rows::threads_for(context, kept_.count * summed_.count);
        if (columns_) run_columns(data[0], data[1], threads);
        else if (kept_.count == 1 && summed_.dims == 1) run_whole(data[0], data[1], threads);
        else run_rows(data[0], data[1], threads);
    }

   private:
    static constexpr int32_t OWN = std::is_same_v<T, int64_t> ? I64 : sizeof(T) == 4 ? F32 : F64;

    Space kept_, summed_;
    double scale_;
    bool direct_, columns_;
    Run load_, store_;
    int64_t x_size_, y_size_;

    void put(char* y, int64_t offset, Sum total) const {
        T value;
        if constexpr (std::is_same_v<T, int64_t>) value = total;
        else value = T(total * scale_);
        store_(y + offset * y_size_, 1, reinterpret_cast<const char*>(&value), 1, 1);
    }

    // The sum of `count` elements of x with equal distances.
    Sum sum_strided(const char* x, int64_t count, int64_t stride) const {
        if (direct_ && stride == 1) return sum_run(reinterpret_cast<const T*>(x), count);
        alignas(64) T block[BLOCK];
        Sum total = 0;
        for (int64_t i = 0; i < count; i += BLOCK) {
            int64_t n = std::min(BLOCK, count - i);
            load_(reinterpret_cast<char*>(block), 1, x + i * stride * x_size_, stride, n);
            total += sum_block(block, n);
        }
        return total;
    }

    void run_rows(const char* x, char* y, int threads) const {
        int64_t inner = summed_.inner(), runs = summed_.count / inner;
        int64_t stride = summed_.dims ? summed_.strides[0][summed_.dims - 1] : 1;
        in_parallel(threads, [&](int thread, int all) {
            rows::Span span = rows::share(kept_.count, thread, all);
            Places place(kept_, kept_.dims, span.begin);
            for (int64_t i = span.begin; i < span.end; i++, place.next()) {
                Sum total = 0;
                Places run(summed_, summed_.dims - 1, 0);
                for (int64_t k = 0; k < runs; k++, run.next())
                    total += sum_strided(x + (place.offsets[0] + run.offsets[0]) * x_size_, inner,
                                         stride);
                put(y, place.offsets[1], total);
            }
        });
    }

    // One result: parts whose bounds depend on the length only, joined in order.
    void run_whole(const char* x, char* y, int threads) const {
        int64_t count = summed_.count, stride = summed_.strides[0][0];
        int64_t part = std::max(PART, (count + PARTS - 1) / PARTS);
        int64_t parts = (count + part - 1) / part;
        Sum sums[PARTS], total = 0;
        in_parallel(threads, [&](int thread, int all) {
            rows::Span span = rows::share(parts, thread, all);
            for (int64_t i = span.begin; i < span.end; i++)
                sums[i] = sum_strided(x + i * part * stride * x_size_,
                                      std::min(part, count - i * part), stride);
        });
        for (int64_t i = 0; i < parts; i++) total += sums[i];
        put(y, 0, total);
    }

    void run_columns(const char* x, char* y, int threads) const {
        int last = kept_.dims - 1;
        int64_t columns = kept_.sizes[last], outer = kept_.count / columns;
        int64_t chunk = std::min(CHUNK, (columns / threads + 63) & ~int64_t(63));
        chunk = std::max<int64_t>(chunk, 64);
        int64_t chunks = (columns + chunk - 1) / chunk;
        in_parallel(threads, [&](int thread, int all) {
            rows::Span span = rows::share(outer * chunks, thread, all);
            for (int64_t i = span.begin; i < span.end; i++) {
                int64_t at[2], first = i % chunks * chunk;
                kept_.offsets(i / chunks, last, at);
                sum_columns(x + (at[0] + first) * x_size_,
                            y + (at[1] + first * kept_.strides[1][last]) * y_size_,
                            std::min(chunk, columns - first));
            }
        });
    }

    void sum_columns(const char* x, char* y, int64_t columns) const {
        alignas(64) T band[CHUNK], copies[GROUP][CHUNK];
        Sum totals[CHUNK] = {};
        Places place(summed_, summed_.dims, 0);
        auto next_row = [&](int64_t k) {
            const char* row = x + place.offsets[0] * x_size_;
            place.next();
            if (direct_) return reinterpret_cast<const T*>(row);
            load_(reinterpret_cast<char*>(copies[k]), 1, row, 1, columns);
            return static_cast<const T*>(copies[k]);
        };
        for (int64_t row = 0; row < summed_.count; row += BAND) {
            int64_t end = std::min(summed_.count, row + BAND), r = row;
            std::fill(band, band + columns, T(0));
            for (; r + GROUP <= end; r += GROUP) {
                const T* group[GROUP];
                for (int64_t k = 0; k < GROUP; k++) group[k] = next_row(k);
                add_group(band, group, columns);
            }
            for (; r < end; r++) add_row(band, next_row(0), columns);
            for (int64_t i = 0; i < columns; i++) totals[i] += band[i];
        }
        int64_t stride = kept_.strides[1][kept_.dims - 1];
        for (int64_t i = 0; i < columns; i++)
            if constexpr (std::is_same_v<T, int64_t>) band[i] = totals[i];
            else band[i] = T(totals[i] * scale_);
        store_(y, stride, reinterpret_cast<const char*>(band), 1, columns);
    }
};

// Splits x's dimensions; false where y's do not fit.
bool split_dims(const Operand& x, const Operand& y, const std::vector<int64_t>& dims, Dims& kept,
                Dims& summed) {
    bool over[MAX_DIMS] = {};
    for (int64_t d : dims) {
        if (d < -x.ndim || d >= std::max(1, x.ndim)) return false;
        over[d < 0 ? d + x.ndim : d] = true;
    }
    int at = 0;
    for (int d = 0; d < x.ndim; d++) {
        bool is_summed = over[d] || dims.empty();
        if (is_summed) summed.append(x.sizes[d], x.strides[d], 0);
        if (is_summed && y.ndim != x.ndim) continue;
        if (at >= y.ndim || y.sizes[at] != (is_summed ? 1 : x.sizes[d])) return false;
        if (!is_summed) kept.append(x.sizes[d], x.strides[d], y.strides[at]);
        at++;
    }
    return at == y.ndim;
}

Call* bind_reduce_sum(const CallSpec& spec, std::string& why) {
    const Operand &x = spec.operands[0], &y = spec.operands[1];
    Reader reader(spec);
    auto dims = reader.list<int64_t>();
    auto scale = reader.take<double>();
    Dims kept, summed;
    if (!split_dims(x, y, dims, kept, summed))
        return why = "the output's shape is not the input's without the summed dimensions", nullptr;
    if (!runner(F64, x.dtype)) return why = "no numbers of the input's dtype", nullptr;
    switch (y.dtype) {
        case F64: return new ReduceCall<double>(x, y, kept, summed, scale);
        case F32:
        case F16:
        case BF16: return new ReduceCall<float>(x, y, kept, summed, scale);
        case I64:
            if (scale == 1) return new ReduceCall<int64_t>(x, y, kept, summed, scale);
            [[fallthrough]];
        default: return why = "no sums of this dtype", nullptr;
    }
}

Register reduce_sum(16, bind_reduce_sum);

}  // namespace

}  // namespace shardwright
