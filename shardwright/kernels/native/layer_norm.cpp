// Layer norm and its gradients.
//
// Comes in: x as rows, each of the normalized dimensions one element after another; the rows may
// lie anywhere. Goes out: y, and each row's mean and 1 / deviation, which the gradient reads. What
// always holds: a row's variance is the mean square of what is left when the mean is taken off; the
// gradients of weight and bias are summed a thread and joined in the threads' order.
#include <vector>

#include "sums.h"

namespace shardwright {
namespace {

using namespace rows;

constexpr int TOGETHER = 4;  // rows whose share of the weight's gradient is added up in registers

template <class T> struct LayerNorm : Call {
    int64_t n;
    double eps;
    Walk x_rows, y_rows;
    std::vector<T> ones, zeros;  // in place of an absent weight and bias

    LayerNorm(const CallSpec& s, int dims, double e) : eps(e) {
        spec = s;
        int leading = in(0).ndim - dims;
        n = walk(in(0), leading, in(0).ndim).count;
        x_rows = walk(in(0), 0, leading);
        y_rows = walk(out(0), 0, leading);
        if (!in(1).present()) ones.assign(n, T(1));
        if (!in(2).present()) zeros.assign(n, T(0));
    }

    void run(char* const* data, Context& context) override {
        const T* weight = ones.empty() ? as<T>(data[1]) : ones.data();
        const T* bias = zeros.empty() ? as<T>(data[2]) : zeros.data();
        T *means = as<T>(data[4]), *scales = as<T>(data[5]);
        in_parallel(threads_for(context, n * x_rows.count), [&](int thread, int threads) {
            Span part = share(x_rows.count, thread, threads);
            for (int64_t r = part.begin; r < part.end; r++) {
                const T* x = as<T>(data[0]) + x_rows.offset(r);
                T* y = as<T>(data[3]) + y_rows.offset(r);
                T mean = sum_of<T>(n, [&](int64_t i, auto read) {
                    will_write(y + i);
                    return read(x + i);
                }) / n;
                T squares = sum_of<T>(n, [&](int64_t i, auto read) {
                    Vec<T> left = read(x + i) - mean;
                    return left * left;
                });
                T scale = T(1 / std::sqrt(double(squares) / n + eps));
                map(n, [=](Vec<T> v, Vec<T> w, Vec<T> b) { return fma((v - mean) * scale, w, b); },
                    y, x, weight, bias);
                if (means) means[r] = mean;
                if (scales) scales[r] = scale;
            }
        });
    }
};

// ------------------------------------------------------------------ gradients

// What a row's gradient needs: dx = scale * (dy * w - along * (x - mean) - flat).
template <class T> struct Row {
    const T *dy, *x;
    T* dx;
    T mean, scale, along, flat;
};

template <class T> struct LayerNormBwd : Call {
    enum { DY, X, MEAN, SCALE, WEIGHT, BIAS, DX, DW, DB };
    int64_t n;
    Walk dy_rows, x_rows, dx_rows;
    std::vector<T> ones;

    LayerNormBwd(const CallSpec& s, int dims) {
        spec = s;
        int leading = in(X).ndim - dims;
        n = walk(in(X), leading, in(X).ndim).count;
        dy_rows = walk(in(DY), 0, leading);
        x_rows = walk(in(X), 0, leading);
        if (out(0).present()) dx_rows = walk(out(0), 0, leading);
        if (!in(WEIGHT).present()) ones.assign(n, T(1));
    }

    void run(char* const* data, Context& context) override {
        int most = threads_for(context, 2 * n * x_rows.count), used = 1;
        bool sums = data[DW] || data[DB];
        if (!sums && !data[DX]) return;
        T* partial = sums ? as<T>(scratch(most * 2 * n * sizeof(T))) : nullptr;
        in_parallel(most, [&](int thread, int threads) {
            if (thread == 0) used = threads;
            Span part = share(x_rows.count, thread, threads, TOGETHER);
            T* own = partial + thread * 2 * n;
            if (sums) std::fill(own, own + 2 * n, T(0));
            for (int64_t r = part.begin; r < part.end; r += TOGETHER)
                group(data, r, std::min<int64_t>(TOGETHER, part.end - r), sums ? own : nullptr);
        });
        join(as<T>(data[DW]), partial, used);
        join(as<T>(data[DB]), partial + n, used);
    }

    void join(T* to, const T* partial, int threads) {
        if (!to) return;
        std::copy(partial, partial + n, to);
        for (int t = 1; t < threads; t++)
            map(n, [](Vec<T> a, Vec<T> b) { return a + b; }, to, to, partial + t * 2 * n);
    }

    void group(char* const* data, int64_t first, int64_t count, T* sums) {
        const T* weight = ones.empty() ? as<T>(data[WEIGHT]) : ones.data();
        Row<T> rows[TOGETHER];
        for (int k = 0; k < count; k++) rows[k] = row(data, first + k, weight);
        if (count == TOGETHER) {
            if (data[DX] && sums) return sweep<TOGETHER, true, true>(rows, weight, sums);
            if (data[DX]) return sweep<TOGETHER, true, false>(rows, weight, sums);
            return sweep<TOGETHER, false, true>(rows, weight, sums);
        }
        for (int k = 0; k < count; k++) {
            if (data[DX] && sums) sweep<1, true, true>(rows + k, weight, sums);
            else if (data[DX]) sweep<1, true, false>(rows + k, weight, sums);
            else sweep<1, false, true>(rows + k, weight, sums);
        }
    }

    Row<T> row(char* const* data, int64_t r, const T* weight) {
        const T *dy = as<T>(data[DY]) + dy_rows.offset(r), *x = as<T>(data[X]) + x_rows.offset(r);
        T mean = as<T>(data[MEAN])[r], scale = as<T>(data[SCALE])[r];
        if (!data[DX]) return {dy, x, nullptr, mean, scale, 0, 0};
        T* dx = as<T>(data[DX]) + dx_rows.offset(r);
        auto [along, flat] = sums_of<T, 2>(n, [&](int64_t i, auto read, Vec<T>* terms) {
            will_write(dx + i);
            terms[1] = read(dy + i) * read(weight + i);
            terms[0] = terms[1] * (read(x + i) - mean);
        }).sum;
        return {dy, x, dx, mean, scale, along * scale * scale / n, flat / n};
    }

    template <int COUNT, bool DX_TOO, bool SUMS_TOO>
    void sweep(const Row<T>* rows, const T* weight, T* sums) {
        for (int64_t i = 0; i < n; i += LANES<T>) {
            if (i + LANES<T> <= n) {
                columns<COUNT, DX_TOO, SUMS_TOO>(
                    rows, weight, sums, i, [](const T* from) { return load(from); },
                    [](T* to, Vec<T> v) { store(to, v); });
            } else {
                int64_t left = n - i;
                columns<COUNT, DX_TOO, SUMS_TOO>(
                    rows, weight, sums, i, [=](const T* from) { return load_part(from, left); },
                    [=](T* to, Vec<T> v) { store_part(to, v, left); });
            }
        }
    }

    template <int COUNT, bool DX_TOO, bool SUMS_TOO, class Read, class Write>
    SIMD void columns(const Row<T>* rows, const T* weight, T* sums, int64_t i, Read read,
                      Write write) {
        Vec<T> w = read(weight + i), dw{}, db{};
        for (int k = 0; k < COUNT; k++) {
            const Row<T>& row = rows[k];
            Vec<T> dy = read(row.dy + i), left = read(row.x + i) - row.mean;
            if (DX_TOO) write(row.dx + i, row.scale * (dy * w - row.along * left - row.flat));
            dw += dy * (left * row.scale);
            db += dy;
        }
        if (!SUMS_TOO) return;
        write(sums + i, read(sums + i) + dw);
        write(sums + n + i, read(sums + n + i) + db);
    }
};

// ------------------------------------------------------------------ binding

bool same_dtype(const CallSpec& spec) {
    for (int i = 0; i < spec.n_in + spec.n_out; i++)
        if (spec.operands[i].present() && spec.operands[i].dtype != spec.operands[0].dtype)
            return false;
    return floating(spec.operands[0]);
}

// Whether an operand, where it is there, is one contiguous piece of so many elements.
bool flat(const Operand& a, int64_t numel) {
    return !a.present() || (a.numel() == numel && a.contiguous());
}

bool rows_like(const Operand& a, const Operand& x, int dims) {
    return !a.present() || (same_sizes(a, x) && rows_contiguous(a, dims));
}

using Places = std::initializer_list<int>;

// Why the operands at these places do not fit, or nothing.
std::string misfit(const CallSpec& spec, const Operand& x, int dims, Places rows, Places per_row,
                   Places per_column) {
    if (!same_dtype(spec)) return "dtypes";
    if (dims < 1 || dims > x.ndim) return "the normalized dimensions";
    int64_t n = walk(x, x.ndim - dims, x.ndim).count, count = walk(x, 0, x.ndim - dims).count;
    for (int i : rows)
        if (!rows_like(spec.operands[i], x, dims)) return "a row's elements lie apart";
    for (int i : per_row)
        if (!flat(spec.operands[i], count)) return "the shape of a row's figures";
    for (int i : per_column)
        if (!flat(spec.operands[i], n)) return "the shape of weight or bias";
    return "";
}

Call* bind_layer_norm(const CallSpec& spec, std::string& why) {
    Reader read(spec);
    int dims = read.take<int32_t>();
    double eps = read.take<double>();
    why = misfit(spec, spec.operands[0], dims, {0, 3}, {4, 5}, {1, 2});
    if (!why.empty()) return nullptr;
    if (spec.operands[0].dtype == F32) return new LayerNorm<float>(spec, dims, eps);
    return new LayerNorm<double>(spec, dims, eps);
}

Call* bind_layer_norm_bwd(const CallSpec& spec, std::string& why) {
    int dims = Reader(spec).take<int32_t>();
    why = misfit(spec, spec.operands[1], dims, {0, 1, 6}, {2, 3}, {4, 7, 8});
    if (!why.empty()) return nullptr;
    if (spec.operands[0].dtype == F32) return new LayerNormBwd<float>(spec, dims);
    return new LayerNormBwd<double>(spec, dims);
}

Register layer_norm_kind(24, bind_layer_norm);
Register layer_norm_bwd_kind(25, bind_layer_norm_bwd);

}  // namespace
}  // namespace shardwright
