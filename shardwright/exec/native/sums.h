// Sums over one row of memory, in vectors.
//
// What always holds: the order of additions depends on the length only. A long row is summed in
// blocks whose sums are joined in f64, so that its length costs no precision.
#pragma once

#include "rows.h"
#include "vector.h"

namespace shardwright::rows {

using namespace simd;

// Four vectors at a time, so that additions do not wait for one another.
template <class T> constexpr int64_t WIDE = 4 * LANES<T>;
constexpr int64_t BLOCK = 8192;

// The first `count` lanes; 0 in the others.
template <class T> SIMD Vec<T> only(Vec<T> v, int64_t count) {
    Vec<T> index;
    for (int i = 0; i < LANES<T>; i++) index[i] = T(i);
    return index < T(count) ? v : Vec<T>{};
}

// The sum of f(i, read) for the lanes from begin to end: `read` gives the vector at an address,
// the last one in part.
template <class T, class F> SIMD T sum_of_block(int64_t begin, int64_t end, F f) {
    Vec<T> sums[4] = {};
    auto whole = [](const T* from) { return load(from); };
    int64_t i = begin;
    for (; i + WIDE<T> <= end; i += WIDE<T>)
        for (int k = 0; k < 4; k++) sums[k] += f(i + k * LANES<T>, whole);
    for (; i + LANES<T> <= end; i += LANES<T>) sums[0] += f(i, whole);
    if (i < end) {
        auto part = [&](const T* from) { return load_part(from, end - i); };
        sums[1] += only<T>(f(i, part), end - i);
    }
    return sum_lanes((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

template <class T, class F> SIMD T sum_of(int64_t n, F f) {
    if (n <= BLOCK) return sum_of_block<T>(0, n, f);
    double total = 0;
    for (int64_t i = 0; i < n; i += BLOCK) total += sum_of_block<T>(i, std::min(n, i + BLOCK), f);
    return T(total);
}

}  // namespace shardwright::rows
