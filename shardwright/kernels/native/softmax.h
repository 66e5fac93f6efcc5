// What softmax and cross entropy share: the greatest of a row, a row's log softmax.
//
// What always holds: all of x is read before its place in y is written, so y may be x; a row with a
// NaN or an inf comes out as torch's does.
#pragma once

#include <limits>

#include "sums.h"
#include "vector_math.h"

namespace shardwright::rows {

template <class V> SIMD V greater(V a, V b) { return a > b ? a : b; }  // a NaN shows in the sum

// The greatest of x's row; y's will be written.
template <class T> T greatest(const T* x, int64_t n, T* y) {
    constexpr T LOWEST = -std::numeric_limits<T>::infinity();
    if (n < LANES<T>) {
        T most = LOWEST;
        for (int64_t i = 0; i < n; i++) most = x[i] > most ? x[i] : most;
        return most;
    }
    Vec<T> most[4];
    for (auto& m : most) m = set<Vec<T>>(LOWEST);
    int64_t i = 0;
    for (; i + WIDE<T> <= n; i += WIDE<T>)
        for (int k = 0; k < 4; k++) {
            will_write(y + i + k * LANES<T>);
            most[k] = greater(load(x + i + k * LANES<T>), most[k]);
        }
    for (; i + LANES<T> <= n; i += LANES<T>) most[0] = greater(load(x + i), most[0]);
    most[1] = greater(load(x + n - LANES<T>), most[1]);  // the last ones, some for the second time
    return max_lanes(greater(greater(most[0], most[1]), greater(most[2], most[3])));
}

template <class T> void log_softmax_row(const T* x, T* y, int64_t n) {
    T most = greatest(x, n, y);
    T sum = sum_of<T>(n, [&](int64_t i, auto read) { return exp(read(x + i) - most); });
    T shift = std::log(sum);
    map(n, [=](Vec<T> v) { return (v - most) - shift; }, y, x);
}

}  // namespace shardwright::rows
