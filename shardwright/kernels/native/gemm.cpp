// Kinds gemm and bmm: y = act(alpha * op(a) op(b) + bias + residual), of matrices or a batch.
//
// Small products, and those with a packed weight, are made by the kernels of gemm.h, bias, residual
// and activation while a tile is in the first cache; large ones by BLAS, then one pass over blocks
// of rows. A weight that is static is packed when it is prepared. What always holds: y may lie in
// the residual's memory; y's and the residual's columns are consecutive; rows of several leading
// dimensions lie at one distance.
#include <cstdlib>
#include <memory>

#include "abi.h"
#include "gemm.h"
#include "gemm_blas.h"
#include "parallel.h"

namespace shardwright {
namespace {

constexpr int32_t GEMM = 20, BMM = 21;

// Multiply-adds up to which tiles with what comes after them beat BLAS and a second pass.
constexpr int64_t SMALL = 1 << 21;
// Rows for which packing a transposed b at each run beats BLAS, however large b is.
constexpr int64_t FEW_ROWS = 16, SOME_ROWS = 64;
// Rows up to which a weight that was packed ahead beats BLAS: 2 times at 8 rows, 1.05 at 192.
constexpr int64_t PACKED_ROWS = 192;

// What thread t of several does: a share of the panels or of the rows, whichever comes out more
// even; panels where equal, since then none is packed twice.
template <class T> Part share(const Product<T>& p, int t, int threads) {
    Part part = whole(p);
    int64_t columns = part.panel_end, tiles = ceil_div(p.m, TILE_ROWS);
    if (ceil_div(columns, threads) * tiles <= ceil_div(tiles, threads) * columns) {
        part.panel = columns * t / threads;
        part.panel_end = columns * (t + 1) / threads;
    } else {
        part.row = p.m * t / threads;
        part.row_end = p.m * (t + 1) / threads;
    }
    return part;
}

// Whether BLAS is the faster way, where nothing is packed ahead.
template <class T> bool for_blas(const Product<T>& p) {
    if (!blas_takes(p)) return false;
    if (p.n < simd::LANES<T>) return true;
    if (p.b_column != 1 && p.m <= SOME_ROWS) return p.m < FEW_ROWS;
    return p.m * p.n * p.k > SMALL;
}

template <class T> void by_tiles(const Product<T>& p, int threads) {
    in_parallel(threads, [&](int t, int all) {
        T* workspace = p.packed ? nullptr : reinterpret_cast<T*>(scratch(WORKSPACE<T>));
        multiply(p, share(p, t, all), workspace);
    });
}

// What BLAS leaves to do, a few rows at a time.
template <class T> void after_blas(const Product<T>& p, bool residual, int64_t row, int64_t end) {
    for (; row < end; row++) {
        T* c = p.c + row * p.c_row;
        auto plus = [](auto x, auto y) { return x + y; };
        if (p.bias) simd::map(p.n, plus, c, c, p.bias);
        if (residual) simd::map(p.n, plus, c, c, p.residual + row * p.residual_row);
        if (p.activation) activate(p.activation, c, p.c_row, 1, p.n);
    }
}

template <class T> void by_blas(const Product<T>& p, int threads) {
    bool in_place = p.residual == p.c;
    blas_multiply<T>(p, in_place || p.add ? 1 : 0);
    bool residual = p.residual && !in_place;
    if (!p.bias && !residual && !p.activation) return;
    in_parallel(threads, [&](int t, int all) {
        after_blas(p, residual, p.m * t / all, p.m * (t + 1) / all);
    });
}

// ---- gemm ----

template <class T> struct Gemm : Call {
    Product<T> product{};
    int64_t residual_row = 0;
    bool packs = false, blas = false;
    std::unique_ptr<char, void (*)(void*)> packed{nullptr, std::free};

    void prepare(char* const* data, Context&) override {
        if (!packs || !data[1]) return;
        const Product<T>& p = product;
        size_t bytes = (packed_bytes<T>(p.k, p.n) + 63) & ~size_t(63);
        if (!packed) packed.reset(static_cast<char*>(std::aligned_alloc(64, bytes)));
        if (!packed) throw std::bad_alloc();
        pack(reinterpret_cast<const T*>(data[1]), p.b_row, p.b_column, p.k, p.n,
             reinterpret_cast<T*>(packed.get()));
    }

    void run(char* const* data, Context& context) override {
        Product<T> p = product;
        p.a = reinterpret_cast<const T*>(data[0]);
        p.b = reinterpret_cast<const T*>(data[1]);
        p.bias = reinterpret_cast<const T*>(data[2]);
        p.residual = reinterpret_cast<const T*>(data[3]);
        p.c = reinterpret_cast<T*>(data[4]);
        p.packed = reinterpret_cast<const T*>(packed.get());
        int threads = threads_for(p.m * p.n * p.k, context);
        if (!p.packed && blas)
            by_blas(p, threads);
        else
            by_tiles(p, threads);
    }
};

// A matrix: its last dimension is the columns, all before it the rows.
struct Rows {
    int64_t rows = 1, columns = 1, row = 0, column = 1;
};

// Several leading dimensions are rows at one distance; false where they are not.
bool rows_of(const Operand& o, Rows& r) {
    if (o.ndim < 1) return false;
    r.columns = o.sizes[o.ndim - 1];
    r.column = r.columns > 1 ? o.strides[o.ndim - 1] : 1;
    for (int i = o.ndim - 2; i >= 0; i--) {
        if (o.sizes[i] == 1) continue;
        if (r.rows == 1)
            r.row = o.strides[i];
        else if (o.strides[i] != r.row * r.rows)
            return false;
        r.rows *= o.sizes[i];
    }
    if (r.rows <= 1) r.row = r.columns;
    return true;
}

void transpose(Rows& r) {
    std::swap(r.rows, r.columns);
    std::swap(r.row, r.column);
}

bool real(const Operand& o) { return o.dtype == F32 || o.dtype == F64; }

// What is wrong with the operands of a gemm; empty where nothing is.
std::string complaint(const CallSpec& spec, const Rows& a, const Rows& b, const Rows& y,
                      const Rows& residual) {
    const Operand* o = spec.operands;
    for (int i = 0; i < 5; i++)
        if (o[i].present() && (o[i].dtype != o[0].dtype || !real(o[i])))
            return "operands are not all f32 or all f64";
    if (a.columns != b.rows || a.rows != y.rows || b.columns != y.columns)
        return "the shapes do not fit one another";
    if (y.column != 1) return "the output's columns are not consecutive";
    if (o[2].present() && (o[2].ndim != 1 || o[2].sizes[0] != y.columns ||
                           (o[2].strides[0] != 1 && y.columns > 1)))
        return "the bias is not one row of consecutive numbers";
    if (o[3].present() &&
        (residual.column != 1 || residual.rows != y.rows || residual.columns != y.columns))
        return "the residual's columns are not the output's, consecutive";
    return "";
}

template <class T>
Call* make_gemm(const CallSpec& spec, const Rows& a, const Rows& b, const Rows& y,
                const Rows& residual, int activation, double alpha) {
    auto call = std::make_unique<Gemm<T>>();
    Product<T>& p = call->product;
    p.m = a.rows, p.k = a.columns, p.n = b.columns;
    p.a_row = a.row, p.a_column = a.column, p.b_row = b.row, p.b_column = b.column;
    p.c_row = y.row, p.residual_row = residual.row;
    p.alpha = T(alpha), p.activation = activation;
    call->packs = (spec.operands[1].flags & STATIC) && p.m <= PACKED_ROWS;
    call->blas = for_blas(p);
    return call.release();
}

Call* bind_gemm(const CallSpec& spec, std::string& why) {
    if (spec.n_in != 4 || spec.n_out != 1) {
        why = "gemm has four inputs and one output";
        return nullptr;
    }
    Reader reader(spec);
    bool transpose_a = reader.take<uint8_t>(), transpose_b = reader.take<uint8_t>();
    int activation = reader.take<uint8_t>();
    double alpha = reader.take<double>();
    Rows a, b, y, residual;
    const Operand* o = spec.operands;
    if (!rows_of(o[0], a) || !rows_of(o[4], y) || (o[3].present() && !rows_of(o[3], residual))) {
        why = "the rows of an operand do not lie at one distance";
        return nullptr;
    }
    if (o[1].ndim != 2 || !rows_of(o[1], b) || (transpose_a && o[0].ndim != 2)) {
        why = "b, or a transposed, is not a matrix";
        return nullptr;
    }
    if (transpose_a) transpose(a);
    if (transpose_b) transpose(b);
    why = activation < simd::ACTIVATIONS ? complaint(spec, a, b, y, residual) : "unknown activation";
    if (!why.empty()) return nullptr;
    return o[0].dtype == F32 ? make_gemm<float>(spec, a, b, y, residual, activation, alpha)
                             : make_gemm<double>(spec, a, b, y, residual, activation, alpha);
}

// ---- bmm ----

template <class T> struct Bmm : Call {
    Product<T> product{};
    int64_t batch = 0, a_step = 0, b_step = 0, c_step = 0;
    bool blas = false;

    Product<T> element(char* const* data, int64_t i) const {
        Product<T> p = product;
        p.a = reinterpret_cast<const T*>(data[0]) + i * a_step;
        p.b = reinterpret_cast<const T*>(data[1]) + i * b_step;
        p.c = reinterpret_cast<T*>(data[2]) + i * c_step;
        return p;
    }

    void run(char* const* data, Context& context) override {
        int64_t each = product.m * product.n * product.k;
        if (blas || batch < context.threads) {
            for (int64_t i = 0; i < batch; i++) {
                Product<T> p = element(data, i);
                blas ? by_blas(p, 1) : by_tiles(p, threads_for(each, context));
            }
            return;
        }
        in_parallel(threads_for(batch * each, context), [&](int t, int all) {
            T* workspace = reinterpret_cast<T*>(scratch(WORKSPACE<T>));
            for (int64_t i = batch * t / all; i < batch * (t + 1) / all; i++) {
                Product<T> p = element(data, i);
                multiply(p, whole(p), workspace);
            }
        });
    }
};

template <class T> Call* make_bmm(const CallSpec& spec, double alpha) {
    const Operand &a = spec.operands[0], &b = spec.operands[1], &y = spec.operands[2];
    auto call = std::make_unique<Bmm<T>>();
    Product<T>& p = call->product;
    call->batch = y.sizes[0];
    call->a_step = a.strides[0], call->b_step = b.strides[0], call->c_step = y.strides[0];
    p.m = y.sizes[1], p.n = y.sizes[2], p.k = a.sizes[2];
    p.a_row = a.strides[1], p.a_column = a.strides[2];
    p.b_row = b.strides[1], p.b_column = b.strides[2];
    p.c_row = y.strides[1], p.alpha = T(alpha);
    call->blas = for_blas(p);
    return call.release();
}

Call* bind_bmm(const CallSpec& spec, std::string& why) {
    const Operand* o = spec.operands;
    for (int i = 0; i < 3; i++)
        if (o[i].ndim != 3 || o[i].dtype != o[0].dtype || !real(o[i])) {
            why = "operands are not all three-dimensional f32 or f64";
            return nullptr;
        }
    const int64_t *a = o[0].sizes, *b = o[1].sizes, *y = o[2].sizes;
    if (a[0] != y[0] || b[0] != y[0] || a[1] != y[1] || b[2] != y[2] || a[2] != b[1])
        why = "the shapes do not fit one another";
    else if (y[2] > 1 && o[2].strides[2] != 1)
        why = "the output's columns are not consecutive";
    else {
        double alpha = Reader(spec).take<double>();
        return o[0].dtype == F32 ? make_bmm<float>(spec, alpha) : make_bmm<double>(spec, alpha);
    }
    return nullptr;
}

Register gemm(GEMM, bind_gemm), bmm(BMM, bind_bmm);

}  // namespace
}  // namespace shardwright
