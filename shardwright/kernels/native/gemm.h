// Products of matrices by kernels of our own, in one thread: what is too small for a BLAS call, has
// strides that BLAS does not take, or a weight that was packed ahead.
//
// c = act(alpha * a b + bias + residual), and + c before where `add` is set. a and b have any
// strides, c and the residual consecutive columns; the residual may be c's own memory. A panel is
// `panel_width` columns of b side by side, [k][width], the last one filled up with zeros.
#pragma once

#include <algorithm>

#include "vector_math.h"

namespace shardwright {

#ifdef SIMD_512
constexpr int PANEL_VECTORS = 3, TILE_ROWS = 8;  // 24 sums of the 32 registers
#else
constexpr int PANEL_VECTORS = 2, TILE_ROWS = 6;  // 12 of 16
#endif
template <class T> constexpr int WIDEST = PANEL_VECTORS * simd::LANES<T>;

// So many rows of b stay in the second cache as a panel, and a tile's rows of a in the first.
constexpr int64_t DEPTH = 384;

template <class T> struct Product {
    int64_t m, n, k;
    const T* a;
    int64_t a_row, a_column;
    const T* b;
    int64_t b_row, b_column;
    T* c;
    int64_t c_row;
    T alpha = 1;
    bool add = false;
    const T* bias = nullptr;
    const T* residual = nullptr;
    int64_t residual_row = 0;
    int activation = simd::NONE;
    const T* packed = nullptr;  // b by `pack`, where it was
    int64_t panel = 0;          // how wide panels are; 0: by n
};

// Part of a product: rows, and panels of columns.
struct Part {
    int64_t row, row_end, panel, panel_end;
};

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// As few panels as hold n columns, of equal width: whole vectors each.
template <class T> int64_t panel_width(int64_t n) {
    int64_t vectors = std::max<int64_t>(1, ceil_div(n, simd::LANES<T>));
    return ceil_div(vectors, ceil_div(vectors, PANEL_VECTORS)) * simd::LANES<T>;
}
template <class T> int64_t panel_width(const Product<T>& p) {
    return p.panel ? p.panel : panel_width<T>(p.n);
}
template <class T> Part whole(const Product<T>& p) {
    return {0, p.m, 0, ceil_div(p.n, panel_width(p))};
}
template <class T> size_t packed_bytes(int64_t k, int64_t n) {
    int64_t width = panel_width<T>(n);
    return std::max<int64_t>(1, ceil_div(n, width) * width * k) * sizeof(T);
}
// What `multiply` needs to work in, if b is not packed.
template <class T> constexpr size_t WORKSPACE = DEPTH * WIDEST<T> * sizeof(T);

// All panels of b [k, n] with these strides.
template <class T>
void pack(const T* b, int64_t row, int64_t column, int64_t k, int64_t n, T* packed);
template <class T> void multiply(const Product<T>& p, const Part& part, T* workspace);
// Activates rows of c in place.
template <class T>
void activate(int activation, T* c, int64_t c_row, int64_t rows, int64_t columns);

}  // namespace shardwright
