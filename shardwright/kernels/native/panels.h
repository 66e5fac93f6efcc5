// The product that convolutions are made of: a few rows of numbers times a panel of packed weights,
// kept in registers until it is whole.
//
// Comes in: rows at equal distances, each read in segments (a kernel's rows and columns) of `length`
// numbers; a panel of weights [segments * length][WIDTH], padded with zeros to its width. Goes out:
// the product plus bias and residual, activated. What always holds: only the columns that exist are
// written, and a residual's element is read before the result at its place is written.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "gemm.h"

namespace shardwright::panels {

// Rows at a time, so that their sums stay in registers.
#if defined(SIMD_512)
constexpr int MAX_ROWS = 14;
#elif defined(__aarch64__)
constexpr int MAX_ROWS = 12;
#else
constexpr int MAX_ROWS = 6;
#endif

constexpr int VECTORS = 2;  // of a panel's width
// How far ahead of the product weights are asked for, in bytes. They are read once for each group
// of rows, mostly from beyond the second cache, and cross a page before the hardware sees where to.
constexpr int AHEAD = 4096;

using simd::LANES;
using simd::load;
using simd::store;
template <class T> using Vector = simd::Vec<T>;
template <class T> constexpr int WIDTH = VECTORS * LANES<T>;

// What happens to a product on its way to memory. `bias` holds whole panels.
template <class T> struct Epilogue {
    const T* bias = nullptr;
    const T* residual = nullptr;
    int64_t residual_step = 0;  // from row to row
    int activation = simd::NONE;

    Epilogue at(int64_t row, int64_t column) const {
        Epilogue e = *this;
        if (bias) e.bias += column;
        if (residual) e.residual += row * residual_step + column;
        return e;
    }
    bool plain() const { return !bias && !residual && activation == simd::NONE; }
    Vector<T> apply(Vector<T> v, int lane, const T* from) const {
        if (bias) v += load(bias + lane);
        if (residual) v += load(from + lane);
        return activation == simd::RELU ? simd::relu(v) : v;
    }
    // Other activations, of rows that are written: a call before would cost sums their registers.
    void activate_rows(T* y, int64_t y_step, int64_t rows, int64_t columns) const {
        if (activation > simd::RELU) activate(activation, y, y_step, rows, columns);
    }
};

// Rows of input: row r begins at `at + r * step`, segment s `offsets[s]` behind that.
template <class T> struct Rows {
    const T* at;
    int64_t step;
    const int64_t* offsets;
    int segments;
    int64_t length;
};

// Writes one row's vectors; `columns` may be fewer than the panel has.
template <class T>
inline void finish(Vector<T>* v, const Epilogue<T>& epilogue, int64_t row, T* y, int columns) {
    const T* residual = epilogue.residual + (epilogue.residual ? row * epilogue.residual_step : 0);
    if (columns == WIDTH<T>) {
        for (int j = 0; j < VECTORS; j++)
            store(y + j * LANES<T>, epilogue.apply(v[j], j * LANES<T>, residual));
        return;
    }
    T padded[WIDTH<T>] = {}, made[WIDTH<T>];
    if (epilogue.residual) std::memcpy(padded, residual, columns * sizeof(T));
    for (int j = 0; j < VECTORS; j++)
        store(made + j * LANES<T>, epilogue.apply(v[j], j * LANES<T>, padded));
    std::memcpy(y, made, columns * sizeof(T));
}

template <class T, int R>
void tile(const Rows<T>& rows, const T* panel, const Epilogue<T>& epilogue, T* y, int64_t y_step,
          int columns) {
    constexpr int L = LANES<T>;
    Vector<T> sum[R][VECTORS] = {};
    const int64_t step = rows.step;
    for (int s = 0; s < rows.segments; s++) {
        const T* a = rows.at + rows.offsets[s];
        for (int64_t k = 0; k < rows.length; k++, a++, panel += WIDTH<T>) {
            Vector<T> w[VECTORS];
#pragma GCC unroll 4
            for (int j = 0; j < VECTORS; j++) {
                w[j] = load(panel + j * L);
                __builtin_prefetch(reinterpret_cast<const char*>(panel + j * L) + AHEAD);
            }
#pragma GCC unroll 16
            for (int r = 0; r < R; r++)
#pragma GCC unroll 4
                for (int j = 0; j < VECTORS; j++) sum[r][j] += a[r * step] * w[j];
        }
    }
    if (epilogue.plain() && columns == WIDTH<T>) {
#pragma GCC unroll 16
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
            for (int j = 0; j < VECTORS; j++) store(y + r * y_step + j * L, sum[r][j]);
        return;
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) finish<T>(sum[r], epilogue, r, y + r * y_step, columns);
    epilogue.activate_rows(y, y_step, R, columns);
}

template <class T>
using Tile = void (*)(const Rows<T>&, const T*, const Epilogue<T>&, T*, int64_t, int);

template <class T, int R> struct Tiles {
    static Tile<T> of(int rows) { return rows == R ? tile<T, R> : Tiles<T, R - 1>::of(rows); }
};
template <class T> struct Tiles<T, 0> {
    static Tile<T> of(int) { return nullptr; }
};

// `count` rows times a panel, in tiles of nearly equal height.
template <class T>
void product(Rows<T> rows, int64_t count, const T* panel, const Epilogue<T>& epilogue, T* y,
             int64_t y_step, int columns) {
    int64_t tiles = (count + MAX_ROWS - 1) / MAX_ROWS;
    const T* begin = rows.at;
    for (int64_t t = 0; t < tiles; t++) {
        int64_t first = count * t / tiles, last = count * (t + 1) / tiles;
        rows.at = begin + first * rows.step;
        Tiles<T, MAX_ROWS>::of(int(last - first))(rows, panel, epilogue.at(first, 0),
                                                 y + first * y_step, y_step, columns);
    }
}

inline int64_t up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

}  // namespace shardwright::panels
