// The kernels of gemm.h: packing, tiles of sums in registers, and the order in which they go.
#include "gemm.h"

namespace shardwright {
namespace {

using simd::LANES;
using simd::load;
using simd::load_part;
using simd::store;
using simd::store_part;
using simd::Vec;

// ---- packing ----

// A square of as many rows as a vector has lanes: to[j][i] = from[i][j].
template <class T> SIMD void transpose_square(const T* from, int64_t step, T* to, int64_t to_step) {
    Vec<T> rows[LANES<T>];
#pragma GCC unroll 16
    for (int i = 0; i < LANES<T>; i++) rows[i] = load(from + i * step);
    simd::turn<T>(rows);
#pragma GCC unroll 16
    for (int i = 0; i < LANES<T>; i++) store(to + i * to_step, rows[i]);
}

// LANES columns of b, each of consecutive numbers, as rows of a panel.
template <class T>
void pack_columns(const T* b, int64_t column, int64_t k, T* panel, int64_t step) {
    constexpr int L = LANES<T>;
    int64_t p = 0;
    for (; p + L <= k; p += L) transpose_square(b + p, column, panel + p * step, step);
    for (; p < k; p++)
        for (int j = 0; j < L; j++) panel[p * step + j] = b[p + j * column];
}

template <class T>
void pack_any(const T* b, int64_t row, int64_t column, int64_t k, int64_t width, T* panel,
              int64_t step) {
    for (int64_t p = 0; p < k; p++, b += row, panel += step) {
        for (int64_t j = 0; j < width; j++) panel[j] = b[j * column];
        for (int64_t j = width; j < LANES<T>; j++) panel[j] = 0;
    }
}

// `width` columns of b as one panel, whose rows lie `step` apart; there is no
// vector that holds no column, but in the last panel, where none is read.
template <class T>
void pack_panel(const T* b, int64_t row, int64_t column, int64_t k, int64_t width, T* panel,
                int64_t step) {
    constexpr int L = LANES<T>;
    for (int64_t j = 0; j < width; j += L, b += L * column, panel += L) {
        if (width - j < L)
            pack_any(b, row, column, k, width - j, panel, step);
        else if (column == 1)
            for (int64_t p = 0; p < k; p++) store(panel + p * step, load(b + p * row));
        else if (row == 1)
            pack_columns(b, column, k, panel, step);
        else
            pack_any(b, row, column, k, L, panel, step);
    }
}

// ---- tiles ----

template <class T> struct Finish {
    T alpha;
    bool add;
    const T* bias;
    const T* residual;
    int64_t residual_row;
    bool plain;  // the sums, or what they are added to, are the result
};

// The panel that comes next, read ahead into the second cache while this one is computed with.
struct Ahead {
    const char* at;
    int64_t step;
};

template <class T>
[[gnu::noinline]] void finish(const T* sums, int64_t rows, int64_t step, T* c, int64_t c_row,
                              int64_t width, const Finish<T>& f) {
    for (int64_t i = 0; i < rows; i++, sums += step, c += c_row) {
        const T* residual = f.residual ? f.residual + i * f.residual_row : nullptr;
        for (int64_t j = 0; j < width; j += LANES<T>) {
            int64_t count = std::min<int64_t>(LANES<T>, width - j);
            bool all = count == LANES<T>;
            auto read = [&](const T* from) {
                return all ? load(from + j) : load_part(from + j, count);
            };
            Vec<T> sum = load(sums + j) * f.alpha;
            if (f.add) sum += read(c);
            if (f.bias) sum += read(f.bias);
            if (residual) sum += read(residual);
            all ? store(c + j, sum) : store_part(c + j, sum, count);
        }
    }
}

template <class T, int ROWS, int VECTORS>
void tile(int64_t k, const T* a, int64_t a_row, int64_t a_column, const T* b, int64_t b_row, T* c,
          int64_t c_row, int width, const Finish<T>& f, Ahead ahead) {
    Vec<T> sums[ROWS][VECTORS];
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) sums[i][j] = Vec<T>{};
    for (int64_t p = 0; p < k; p++, a += a_column, b += b_row, ahead.at += ahead.step) {
        __builtin_prefetch(ahead.at, 0, 2);
        Vec<T> row[VECTORS];
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) row[j] = load(b + j * LANES<T>);
#pragma GCC unroll 16
        for (int i = 0; i < ROWS; i++) {
            T factor = a[i * a_row];
#pragma GCC unroll 4
            for (int j = 0; j < VECTORS; j++) sums[i][j] += row[j] * factor;
        }
    }
    constexpr int64_t WIDTH = VECTORS * LANES<T>;
    alignas(64) T kept[ROWS * WIDTH];
    bool plain = f.plain && width == WIDTH;
    T* to = plain ? c : kept;
    int64_t step = plain ? c_row : WIDTH;
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) {
            T* at = to + i * step + j * LANES<T>;
            store(at, plain && f.add ? load(at) + sums[i][j] : sums[i][j]);
        }
    if (!plain) finish(kept, ROWS, WIDTH, c, c_row, width, f);
}

template <class T>
using Tile = void (*)(int64_t, const T*, int64_t, int64_t, const T*, int64_t, T*, int64_t, int,
                      const Finish<T>&, Ahead);

template <class T, int VECTORS, size_t... R>
Tile<T> tile_of(int64_t rows, std::index_sequence<R...>) {
    static constexpr Tile<T> TILES[] = {tile<T, R + 1, VECTORS>...};
    return TILES[rows - 1];
}

template <class T> Tile<T> tile_of(int64_t rows, int64_t width) {
    using Rows = std::make_index_sequence<TILE_ROWS>;
    int64_t vectors = ceil_div(width, LANES<T>);
    if (vectors == 1) return tile_of<T, 1>(rows, Rows{});
    if (vectors == 2) return tile_of<T, 2>(rows, Rows{});
    return tile_of<T, PANEL_VECTORS>(rows, Rows{});
}

// ---- the order ----

// A panel's rows p to p + depth, as tiles read them.
template <class T> struct Sliver {
    const T* at;
    int64_t row;
    Ahead ahead;
};

template <class T>
Sliver<T> sliver_of(const Product<T>& p, int64_t column, int64_t width, int64_t from, int64_t depth,
                    int64_t rows, T* workspace) {
    int64_t step = panel_width(p);
    if (p.packed) {
        const T* at = p.packed + column * p.k + from * step;
        bool last = column + step >= p.n;
        const T* next = last ? at : at + step * p.k;
        return {at, step, {reinterpret_cast<const char*>(next), last ? 0 : 64}};
    }
    const T* at = p.b + from * p.b_row + column * p.b_column;
    // Few rows do not pay for a copy; a part of a vector cannot be read beyond its end.
    if (p.b_column == 1 && width % LANES<T> == 0 && rows <= 8 * TILE_ROWS)
        return {at, p.b_row, {reinterpret_cast<const char*>(at), 0}};
    pack_panel(at, p.b_row, p.b_column, depth, width, workspace, step);
    return {workspace, step, {reinterpret_cast<const char*>(workspace), 0}};
}

template <class T>
void column_of_tiles(const Product<T>& p, const Part& part, int64_t column, int64_t from,
                     T* workspace) {
    int64_t depth = std::min(DEPTH, p.k - from), width = std::min(panel_width(p), p.n - column);
    int64_t rows = part.row_end - part.row, tiles = ceil_div(rows, TILE_ROWS);
    Sliver<T> b = sliver_of(p, column, width, from, depth, rows, workspace);
    bool first = from == 0, last = from + depth >= p.k;
    for (int64_t t = 0; t < tiles; t++) {
        int64_t row = part.row + rows * t / tiles, end = part.row + rows * (t + 1) / tiles;
        T* c = p.c + row * p.c_row + column;
        // Bias and residual come in first, so that a residual in c's own memory is read in time.
        Finish<T> finish{p.alpha, p.add || !first, first && p.bias ? p.bias + column : nullptr,
                         first && p.residual ? p.residual + row * p.residual_row + column : nullptr,
                         p.residual_row, false};
        finish.plain = p.alpha == 1 && !finish.bias && !finish.residual;
        Ahead ahead{b.ahead.at + t * depth * b.ahead.step, b.ahead.step};
        const T* a = p.a + row * p.a_row + from * p.a_column;
        tile_of<T>(end - row, width)(depth, a, p.a_row, p.a_column, b.at, b.row, c, p.c_row,
                                     int(width), finish, ahead);
        if (last && p.activation) activate(p.activation, c, p.c_row, end - row, width);
    }
}

}  // namespace

template <class T>
void pack(const T* b, int64_t row, int64_t column, int64_t k, int64_t n, T* packed) {
    int64_t width = panel_width<T>(n);
    for (int64_t j = 0; j < n; j += width)
        pack_panel(b + j * column, row, column, k, std::min(width, n - j), packed + j * k, width);
}

template <class T> void multiply(const Product<T>& p, const Part& part, T* workspace) {
    for (int64_t from = 0; from < p.k; from += DEPTH)
        for (int64_t panel = part.panel; panel < part.panel_end; panel++)
            column_of_tiles(p, part, panel * panel_width(p), from, workspace);
}

template <class T>
void activate(int activation, T* c, int64_t c_row, int64_t rows, int64_t columns) {
    simd::with_activation(activation, [&](auto f) {
        for (int64_t i = 0; i < rows; i++) simd::map(columns, f, c + i * c_row, c + i * c_row);
    });
}

#define INSTANCES(T)                                                                               \
    template void pack<T>(const T*, int64_t, int64_t, int64_t, int64_t, T*);                       \
    template void multiply<T>(const Product<T>&, const Part&, T*);                                 \
    template void activate<T>(int, T*, int64_t, int64_t, int64_t);
INSTANCES(float)
INSTANCES(double)

}  // namespace shardwright
