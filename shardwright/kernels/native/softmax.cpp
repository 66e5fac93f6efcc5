// softmax and log softmax over one dimension, and their gradients.
//
// Comes in: operands of one shape and any strides. What always holds: of a line (all elements along
// the dimension) everything is read before its place is written, so that the output may lie in an
// input's memory; the greatest element is taken off before exp, so that no finite line overflows.
//
// A line is walked in one of three ways: ROWS, where it lies one element after another; COLUMNS,
// where other dimensions do, so that a vector holds elements of as many lines; SCATTERED, through
// scratch memory, where neither holds.
#include "softmax.h"

namespace shardwright {
namespace {

using namespace rows;
using namespace simd;

constexpr int64_t WORK = 2;  // what an element costs, against one that is only added
constexpr int MOST = 3;      // operands

// ------------------------------------------------------------------ one line in a row

template <class T, bool log_of> struct Forward {
    static constexpr int OPERANDS = 2;

    static void row(const T* const* in, T* y, int64_t n) {
        const T* x = in[0];
        if (log_of) return log_softmax_row(x, y, n);
        T most = greatest(x, n, y);
        T sum = sum_of<T>(n, [&](int64_t i, auto read) {
            Vec<T> e = exp(read(x + i) - most);
            n - i < LANES<T> ? store_part(y + i, e, n - i) : store(y + i, e);
            return e;
        });
        T scale = 1 / sum;
        map(n, [=](Vec<T> v) { return v * scale; }, y, y);
    }

    // Lines side by side, in W vectors; `read` and `write` know how many lanes are there.
    template <int W, class Read, class Write>
    static void columns(const T* const* in, const int64_t* step, T* y, int64_t n, Read read,
                        Write write) {
        Vec<T> most[W], sum[W] = {};
        auto x = [&](int64_t i, int k) { return read(in[0] + i * step[0], k); };
        for (int k = 0; k < W; k++) most[k] = x(0, k);
        for (int64_t i = 1; i < n; i++)
            for (int k = 0; k < W; k++) most[k] = greater(x(i, k), most[k]);
        for (int64_t i = 0; i < n; i++)
            for (int k = 0; k < W; k++) {
                Vec<T> e = exp(x(i, k) - most[k]);
                if (!log_of) write(y + i * step[1], k, e);
                sum[k] += e;
            }
        for (int k = 0; k < W; k++) sum[k] = log_of ? log(sum[k]) : 1 / sum[k];
        for (int64_t i = 0; i < n; i++)
            for (int k = 0; k < W; k++) {
                T* to = y + i * step[1];
                write(to, k, log_of ? (x(i, k) - most[k]) - sum[k] : read(to, k) * sum[k]);
            }
    }
};

template <class T, bool log_of> struct Backward {
    static constexpr int OPERANDS = 3;

    template <class V> static V gradient(V dy, V y, V sum) {
        return log_of ? dy - exp(y) * sum : y * (dy - sum);
    }

    static void row(const T* const* in, T* dx, int64_t n) {
        const T *dy = in[0], *y = in[1];
        Vec<T> sum = set<Vec<T>>(sum_of<T>(n, [&](int64_t i, auto read) {
            will_write(dx + i);
            Vec<T> v = read(dy + i);
            return log_of ? v : v * read(y + i);
        }));
        map(n, [=](Vec<T> v, Vec<T> w) { return gradient(v, w, sum); }, dx, dy, y);
    }

    template <int W, class Read, class Write>
    static void columns(const T* const* in, const int64_t* step, T* dx, int64_t n, Read read,
                        Write write) {
        Vec<T> sum[W] = {};
        auto dy = [&](int64_t i, int k) { return read(in[0] + i * step[0], k); };
        auto y = [&](int64_t i, int k) { return read(in[1] + i * step[1], k); };
        for (int64_t i = 0; i < n; i++)
            for (int k = 0; k < W; k++) {
                will_write(dx + i * step[2] + k * LANES<T>);
                sum[k] += log_of ? dy(i, k) : dy(i, k) * y(i, k);
            }
        for (int64_t i = 0; i < n; i++)
            for (int k = 0; k < W; k++)
                write(dx + i * step[2], k, gradient(dy(i, k), y(i, k), sum[k]));
    }
};

// ------------------------------------------------------------------ all lines

enum Way { ROWS, COLUMNS, SCATTERED };

// How the lines of up to MOST operands of one shape are walked.
struct Lines {
    Way way;
    int64_t n, inner = 1, numel;
    int64_t step[MOST];
    Walk outer[MOST];

    Lines(const Operand* operands, int count, int dim)
        : n(operands[0].sizes[dim]), numel(operands[0].numel()) {
        auto all = [&](int d, int64_t stride) {
            for (int k = 0; k < count; k++)
                if (operands[k].strides[d] != stride) return false;
            return true;
        };
        int beside = -1;
        way = n == 1 || all(dim, 1) ? ROWS : SCATTERED;
        for (int d = 0; d < operands[0].ndim && way == SCATTERED; d++)
            if (d != dim && operands[0].sizes[d] > 1 && all(d, 1)) way = COLUMNS, beside = d;
        for (int k = 0; k < count; k++) {
            step[k] = operands[k].strides[dim];
            for (int d = 0; d < operands[k].ndim; d++)
                if (d != dim && d != beside)
                    outer[k].append(operands[k].sizes[d], operands[k].strides[d]);
        }
        if (beside >= 0) inner = operands[0].sizes[beside];
    }
};

template <class T, class Math> struct Softmax : Call {
    static constexpr int INPUTS = Math::OPERANDS - 1;
    Lines lines;
    Softmax(const CallSpec& s, int dim) : lines(s.operands, Math::OPERANDS, dim) { spec = s; }

    void run(char* const* data, Context& context) override {
        if (lines.numel == 0) return;
        int64_t blocks = (lines.inner + WIDE<T> - 1) / WIDE<T>;
        int64_t count = lines.outer[0].count * blocks;
        in_parallel(threads_for(context, lines.numel * WORK), [&](int thread, int threads) {
            Span part = share(count, thread, threads);
            for (int64_t r = part.begin; r < part.end; r++) line(data, r / blocks, r % blocks);
        });
    }

    void line(char* const* data, int64_t r, int64_t block) {
        const T* in[INPUTS];
        int64_t column = block * WIDE<T>;
        for (int k = 0; k < INPUTS; k++) in[k] = as<T>(data[k]) + lines.outer[k].offset(r) + column;
        T* out = as<T>(data[INPUTS]) + lines.outer[INPUTS].offset(r) + column;
        if (lines.way == ROWS) return Math::row(in, out, lines.n);
        if (lines.way == SCATTERED) return scattered(in, out);
        columns(in, out, std::min(WIDE<T>, lines.inner - column));
    }

    void columns(const T** in, T* out, int64_t count) {
        if (count == WIDE<T>) {
            auto read = [](const T* from, int k) { return load(from + k * LANES<T>); };
            auto write = [](T* to, int k, Vec<T> v) { store(to + k * LANES<T>, v); };
            return Math::template columns<4>(in, lines.step, out, lines.n, read, write);
        }
        while (count > 0) {
            int64_t lanes = std::min<int64_t>(count, LANES<T>);
            auto read = [=](const T* from, int) { return load_part(from, lanes); };
            auto write = [=](T* to, int, Vec<T> v) { store_part(to, v, lanes); };
            Math::template columns<1>(in, lines.step, out, lines.n, read, write);
            for (int k = 0; k < INPUTS; k++) in[k] += LANES<T>;
            out += LANES<T>;
            count -= LANES<T>;
        }
    }

    void scattered(const T** in, T* out) {
        T* row = as<T>(scratch(Math::OPERANDS * lines.n * sizeof(T)));
        for (int k = 0; k < INPUTS; k++, row += lines.n) {
            for (int64_t i = 0; i < lines.n; i++) row[i] = in[k][i * lines.step[k]];
            in[k] = row;
        }
        Math::row(in, row, lines.n);
        for (int64_t i = 0; i < lines.n; i++) out[i * lines.step[INPUTS]] = row[i];
    }
};

template <template <class, bool> class Math> Call* bind(const CallSpec& spec, std::string& why) {
    Reader read(spec);
    int dim = read.take<int32_t>(), ndim = spec.operands[0].ndim;
    bool log_of = read.take<uint8_t>();
    if (dim < 0) dim += ndim;
    if (dim < 0 || dim >= ndim) return why = "the dimension", nullptr;
    for (int k = 0; k < spec.n_in + spec.n_out; k++) {
        const Operand& o = spec.operands[k];
        if (!floating(o) || o.dtype != spec.operands[0].dtype) return why = "dtypes", nullptr;
        if (!same_sizes(o, spec.operands[0])) return why = "shapes", nullptr;
    }
    if (spec.operands[0].dtype == F32)
        return log_of ? (Call*)new Softmax<float, Math<float, true>>(spec, dim)
                      : new Softmax<float, Math<float, false>>(spec, dim);
    return log_of ? (Call*)new Softmax<double, Math<double, true>>(spec, dim)
                  : new Softmax<double, Math<double, false>>(spec, dim);
}

Register softmax_kind(22, bind<Forward>);
Register softmax_bwd_kind(23, bind<Backward>);

}  // namespace
}  // namespace shardwright
