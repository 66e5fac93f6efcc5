// Winograd's minimal filtering: a 3x3 convolution of stride 1 as products on transformed tiles.
//
// Comes in: input with its channels last. Goes out: tiles of M x M outputs, each from the
// (M + 2)^2 numbers around it: a linear map of the tile (B), one product over channels for each of
// its (M + 2)^2 places, and a linear map back (A). With M = 2 that takes 4/9 of the
// multiplications, with M = 4 a quarter; but the transformed weights are 16/9 and 4 times as large,
// which matters where they come from memory. After Lavin and Gray, "Fast Algorithms for
// Convolutional Neural Networks".
//
// The points of M = 4 are 0, +-sqrt(1/2), +-sqrt(2) and infinity: with them rounding errors are a
// few times those of the plain sum (1 to 3e-6 of the largest output, for 64 to 256 channels),
// with the customary 0, +-1, +-2 and infinity four times that. A NaN or an infinity among the inputs
// makes NaN of every output of its tiles, also of those it does not touch: `gather` says so, and
// such tiles are made again without a transform.
#pragma once

#include "panels.h"

namespace shardwright::winograd {

using panels::Vector;

constexpr double R2 = 1.41421356237309504880;

// Rows of G: weights g0, g1, g2 of one dimension to its N transformed ones.
template <int M> struct Filter;
template <> struct Filter<2> {
    static constexpr double G[4][3] = {{1, 0, 0}, {.5, .5, .5}, {.5, -.5, .5}, {0, 0, 1}};
};
template <> struct Filter<4> {
    static constexpr double G[6][3] = {
        {1, 0, 0},
        {-2. / 3, -R2 / 3, -1. / 3},
        {-2. / 3, R2 / 3, -1. / 3},
        {1. / 6, R2 / 6, 1. / 3},
        {1. / 6, -R2 / 6, 1. / 3},
        {0, 0, 1},
    };
};

// One dimension of the input's map: d[0 .. N) at distance `step`, in place.
template <int M, class T> inline void forward(Vector<T>* d, int step) {
    auto at = [&](int i) -> Vector<T>& { return d[i * step]; };
    if constexpr (M == 2) {
        Vector<T> sum = at(1) + at(2), difference = at(2) - at(1);
        at(0) = at(0) - at(2);
        at(3) = at(3) - at(1);
        at(1) = sum;
        at(2) = difference;
    } else {
        const T r = T(R2), h = T(R2 / 2);
        Vector<T> e = at(4) - T(2) * at(2), f = h * at(3) - r * at(1);
        Vector<T> u = at(4) - T(0.5) * at(2), v = r * at(3) - h * at(1);
        at(0) = at(0) - T(2.5) * at(2) + at(4);
        at(5) = at(1) - T(2.5) * at(3) + at(5);
        at(1) = e + f;
        at(2) = e - f;
        at(3) = u + v;
        at(4) = u - v;
    }
}

// One dimension of the map back: N values to M, in place.
template <int M, class T> inline void backward(Vector<T>* d, int step) {
    auto at = [&](int i) -> Vector<T>& { return d[i * step]; };
    if constexpr (M == 2) {
        Vector<T> second = at(1) - at(2) + at(3);
        at(0) = at(0) + at(1) + at(2);
        at(1) = second;
    } else {
        const T r = T(R2), h = T(R2 / 2);
        Vector<T> s = at(1) + at(2), t = at(1) - at(2), p = at(3) + at(4), q = at(3) - at(4);
        at(0) = at(0) + s + p;
        at(1) = h * t + r * q;
        at(2) = T(0.5) * s + T(2) * p;
        at(3) = T(0.5) * h * t + T(2) * r * q + at(5);
    }
}

// The transformed weights of one input and one output channel: N x N from 3 x 3 at strides.
template <int M, class T>
void filter(const T* w, int64_t row, int64_t column, double (&u)[M + 2][M + 2]) {
    constexpr int N = M + 2;
    double half[N][3];
    for (int i = 0; i < N; i++)
        for (int j = 0; j < 3; j++) {
            half[i][j] = 0;
            for (int k = 0; k < 3; k++)
                half[i][j] += Filter<M>::G[i][k] * double(w[k * row + j * column]);
        }
    for (int i = 0; i < N; i++)
        for (int j = 0; j < N; j++) {
            u[i][j] = 0;
            for (int k = 0; k < 3; k++) u[i][j] += half[i][k] * Filter<M>::G[j][k];
        }
}

// A tile's place among N x N pixels: their addresses, where one outside is `zeros`.
template <int M, class T> struct Patch {
    static constexpr int N = M + 2;
    const T* pixels[N][N];

    Patch(const T* image, int64_t h, int64_t w, int64_t h_step, int64_t w_step, int64_t top,
          int64_t left, const T* zeros) {
        for (int i = 0; i < N; i++)
            for (int j = 0; j < N; j++) {
                int64_t y = top + i, x = left + j;
                bool inside = y >= 0 && y < h && x >= 0 && x < w;
                pixels[i][j] = inside ? image + y * h_step + x * w_step : zeros;
            }
    }

    // Transforms all channels; place (i, j) goes to v + (i * N + j) * v_step.
    void transform(int64_t channels, T* v, int64_t v_step) const {
        for (int64_t c = 0; c < channels; c += panels::LANES<T>) {
            Vector<T> d[N * N];
            for (int j = 0; j < N; j++) {
#pragma GCC unroll 6
                for (int i = 0; i < N; i++) d[i * N + j] = panels::load(pixels[i][j] + c);
                forward<M, T>(d + j, N);
            }
            for (int i = 0; i < N; i++) {
                forward<M, T>(d + i * N, 1);
#pragma GCC unroll 6
                for (int j = 0; j < N; j++)
                    panels::store(v + (i * N + j) * v_step + c, d[i * N + j]);
            }
        }
    }
};

// A tile's outputs: as many of M x M as lie inside, from products at distance m_step. Gives the
// channel up to which they were written: none of a vector of which one is not finite.
template <int M, class T>
int64_t gather(const T* m, int64_t m_step, int64_t channels, const panels::Epilogue<T>& epilogue,
            int64_t pixel, int64_t pixels_a_row, int rows, int columns, T* y, int64_t y_step) {
    constexpr int N = M + 2, L = panels::LANES<T>;
    for (int64_t c = 0; c < channels; c += L) {
        Vector<T> d[N * N];
        for (int j = 0; j < N; j++) {
#pragma GCC unroll 6
            for (int i = 0; i < N; i++) d[i * N + j] = panels::load(m + (i * N + j) * m_step + c);
            backward<M, T>(d + j, N);
        }
        Vector<T> zero{};  // NaN where a sum is not finite
        for (int i = 0; i < rows; i++) {
            backward<M, T>(d + i * N, 1);
            for (int j = 0; j < columns; j++) zero += T(0) * d[i * N + j];
        }
        for (int l = 0; l < L; l++)
            if (zero[l] != T(0)) return c;
        for (int i = 0; i < rows; i++)
            for (int j = 0; j < columns; j++) {
                int64_t at = pixel + i * pixels_a_row + j;
                panels::Epilogue<T> here = epilogue.at(at, c);
                panels::store(y + at * y_step + c, here.apply(d[i * N + j], 0, here.residual));
            }
        for (int i = 0; i < rows; i++)
            epilogue.activate_rows(y + (pixel + i * pixels_a_row) * y_step + c, y_step, columns, L);
    }
    return channels;
}

}  // namespace shardwright::winograd
