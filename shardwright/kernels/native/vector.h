// Vectors as wide as the machine's, by the vector extensions of GCC and Clang: arithmetic,
// comparisons (a mask: -1 or 0 a lane) and `mask ? a : b` are the language's own. What the language
// lacks is here: loads and stores, fma, rounding, roots, sums over lanes.
//
// What always holds: a partial load or store touches the first `count` elements and no other;
// lanes that a partial load did not read are 0. Nothing here needs alignment.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define SIMD [[gnu::always_inline]] inline

namespace shardwright::simd {

#if defined(__AVX512F__) && defined(__AVX512DQ__)
#define SIMD_512 1
constexpr int BYTES = 64;
#elif defined(__AVX2__) && defined(__FMA__)
#define SIMD_256 1
constexpr int BYTES = 32;
#else
constexpr int BYTES = 16;
#endif

typedef float F32v __attribute__((vector_size(BYTES)));
typedef double F64v __attribute__((vector_size(BYTES)));
typedef int32_t I32v __attribute__((vector_size(BYTES)));
typedef int64_t I64v __attribute__((vector_size(BYTES)));
typedef uint32_t U32v __attribute__((vector_size(BYTES)));
typedef uint64_t U64v __attribute__((vector_size(BYTES)));

template <class T> struct Of;
template <> struct Of<float> { using Vector = F32v; using Bits = I32v; };
template <> struct Of<double> { using Vector = F64v; using Bits = I64v; };
template <> struct Of<int64_t> { using Vector = I64v; using Bits = I64v; };

// The vector of a type, the integers as wide as its lanes, how many lanes; and back to the type.
template <class T> using Vec = typename Of<T>::Vector;
template <class T> constexpr int LANES = BYTES / sizeof(T);
template <class V> struct Lane;
template <> struct Lane<F32v> { using Type = float; using Bits = I32v; };
template <> struct Lane<F64v> { using Type = double; using Bits = I64v; };
template <> struct Lane<I64v> { using Type = int64_t; using Bits = I64v; };
template <class V> using Element = typename Lane<V>::Type;
template <class V> using Bits = typename Lane<V>::Bits;

template <class T> SIMD Vec<T> load(const T* from) {
    Vec<T> v;
    std::memcpy(&v, from, sizeof(v));
    return v;
}
template <class V> SIMD void store(Element<V>* to, V v) { std::memcpy(to, &v, sizeof(v)); }
template <class V> SIMD V set(Element<V> x) { return V{} + x; }

// Lanes of two vectors: numbers below LANES are the first's, the others the second's.
template <int... N, class V> SIMD V pick(V a, V b) {
#if defined(__clang__) || __GNUC__ >= 12
    return __builtin_shufflevector(a, b, N...);
#else
    using Number = std::conditional_t<sizeof(a[0]) == 8, I64v, I32v>;
    return __builtin_shuffle(a, b, Number{N...});
#endif
}

// Exchanges, in two rows at distance S of a square, the blocks of S lanes off the diagonal.
template <int S, class V, size_t... J>
SIMD void exchange(V& above, V& below, std::index_sequence<J...>) {
    constexpr int L = sizeof...(J);
    V high = pick<(J & S ? int(L + J - S) : int(J))...>(above, below);
    below = pick<(J & S ? int(L + J) : int(J + S))...>(above, below);
    above = high;
}

// Turns over a square of vectors: lane j of rows[i] and lane i of rows[j] change places.
template <class T, int S = 1> SIMD void turn(Vec<T>* rows) {
    if constexpr (S < LANES<T>) {
#pragma GCC unroll 16
        for (int i = 0; i < LANES<T>; i++)
            if (!(i & S)) exchange<S>(rows[i], rows[i + S], std::make_index_sequence<LANES<T>>{});
        turn<T, 2 * S>(rows);
    }
}

#ifdef SIMD_512
SIMD F32v load_part(const float* from, int64_t count) {
    return (F32v)_mm512_maskz_loadu_ps(__mmask16((1u << count) - 1), from);
}
SIMD F64v load_part(const double* from, int64_t count) {
    return (F64v)_mm512_maskz_loadu_pd(__mmask8((1u << count) - 1), from);
}
SIMD void store_part(float* to, F32v v, int64_t count) {
    _mm512_mask_storeu_ps(to, __mmask16((1u << count) - 1), (__m512)v);
}
SIMD void store_part(double* to, F64v v, int64_t count) {
    _mm512_mask_storeu_pd(to, __mmask8((1u << count) - 1), (__m512d)v);
}
SIMD I64v load_part(const int64_t* from, int64_t count) {
    return (I64v)_mm512_maskz_loadu_epi64(__mmask8((1u << count) - 1), from);
}
SIMD void store_part(int64_t* to, I64v v, int64_t count) {
    _mm512_mask_storeu_epi64(to, __mmask8((1u << count) - 1), (__m512i)v);
}
#else
template <class T> SIMD Vec<T> load_part(const T* from, int64_t count) {
    T lanes[LANES<T>] = {};
    std::memcpy(lanes, from, count * sizeof(T));
    return load(lanes);
}
template <class V> SIMD void store_part(Element<V>* to, V v, int64_t count) {
    std::memcpy(to, &v, count * sizeof(Element<V>));
}
#endif

// f of each lane by itself: what has no vector form.
template <class V, class F> SIMD V each(V v, F f) {
    V result;
    for (int i = 0; i < LANES<Element<V>>; i++) result[i] = f(v[i]);
    return result;
}

#if defined(SIMD_512)
SIMD F32v fma(F32v a, F32v b, F32v c) {
    return (F32v)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}
SIMD F64v fma(F64v a, F64v b, F64v c) {
    return (F64v)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
}
SIMD F32v sqrt(F32v x) { return (F32v)_mm512_sqrt_ps((__m512)x); }
SIMD F64v sqrt(F64v x) { return (F64v)_mm512_sqrt_pd((__m512d)x); }
#define SIMD_ROUND(name, mode, scalar)                                                             \
    SIMD F32v name(F32v x) { return (F32v)_mm512_roundscale_ps((__m512)x, mode); }                 \
    SIMD F64v name(F64v x) { return (F64v)_mm512_roundscale_pd((__m512d)x, mode); }
#elif defined(SIMD_256)
SIMD F32v fma(F32v a, F32v b, F32v c) {
    return (F32v)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}
SIMD F64v fma(F64v a, F64v b, F64v c) {
    return (F64v)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
}
SIMD F32v sqrt(F32v x) { return (F32v)_mm256_sqrt_ps((__m256)x); }
SIMD F64v sqrt(F64v x) { return (F64v)_mm256_sqrt_pd((__m256d)x); }
#define SIMD_ROUND(name, mode, scalar)                                                             \
    SIMD F32v name(F32v x) { return (F32v)_mm256_round_ps((__m256)x, mode); }                      \
    SIMD F64v name(F64v x) { return (F64v)_mm256_round_pd((__m256d)x, mode); }
#else
template <class V> SIMD V fma(V a, V b, V c) {
    V result;
    for (int i = 0; i < LANES<Element<V>>; i++) result[i] = std::fma(a[i], b[i], c[i]);
    return result;
}
template <class V> SIMD V sqrt(V x) { return each(x, [](auto v) { return std::sqrt(v); }); }
#define SIMD_ROUND(name, mode, scalar)                                                             \
    template <class V> SIMD V name(V x) { return each(x, [](auto v) { return scalar(v); }); }
#endif
// 8: without raising "inexact". Halves go to the even neighbour in `rint`.
SIMD_ROUND(rint, 8 | 0, std::nearbyint)
SIMD_ROUND(floor, 8 | 1, std::floor)
SIMD_ROUND(ceil, 8 | 2, std::ceil)
SIMD_ROUND(trunc, 8 | 3, std::trunc)
#undef SIMD_ROUND

template <class V> SIMD Bits<V> bits(V x) { return (Bits<V>)x; }
template <class V> SIMD Bits<V> sign_bit() { return bits(-V{}); }
template <class V> SIMD V abs(V x) { return (V)(bits(x) & ~sign_bit<V>()); }
template <class V> SIMD V copysign(V size, V sign) {
    return (V)((bits(size) & ~sign_bit<V>()) | (bits(sign) & sign_bit<V>()));
}

// The greater and the smaller one; NaN where one is NaN.
template <class V> SIMD V maximum(V a, V b) { return ((a > b) | (a != a)) ? a : b; }
template <class V> SIMD V minimum(V a, V b) { return ((a < b) | (a != a)) ? a : b; }

// x, or the limit that it is beyond; NaN stays NaN.
#if defined(SIMD_512)
SIMD F32v at_most(F32v x, float limit) {
    return (F32v)_mm512_min_ps(_mm512_set1_ps(limit), (__m512)x);
}
SIMD F32v at_least(F32v x, float limit) {
    return (F32v)_mm512_max_ps(_mm512_set1_ps(limit), (__m512)x);
}
#elif defined(SIMD_256)
SIMD F32v at_most(F32v x, float limit) {
    return (F32v)_mm256_min_ps(_mm256_set1_ps(limit), (__m256)x);
}
SIMD F32v at_least(F32v x, float limit) {
    return (F32v)_mm256_max_ps(_mm256_set1_ps(limit), (__m256)x);
}
#else
SIMD F32v at_most(F32v x, float limit) { return x > limit ? set<F32v>(limit) : x; }
SIMD F32v at_least(F32v x, float limit) { return x < limit ? set<F32v>(limit) : x; }
#endif

// Over the lanes, by halves.
template <class V> SIMD Element<V> sum_lanes(V v) {
    Element<V> lanes[LANES<Element<V>>];
    store(lanes, v);
    for (int half = LANES<Element<V>> / 2; half; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
}
template <class V> SIMD Element<V> max_lanes(V v) {
    Element<V> lanes[LANES<Element<V>>];
    store(lanes, v);
    for (int half = LANES<Element<V>> / 2; half; half /= 2)
        for (int i = 0; i < half; i++) {
            Element<V> a = lanes[i], b = lanes[i + half];
            lanes[i] = a > b || a != a ? a : b;
        }
    return lanes[0];
}
template <class V> SIMD bool any(V mask) {
    uint64_t parts[BYTES / 8], found = 0;
    std::memcpy(parts, &mask, BYTES);
    for (uint64_t part : parts) found |= part;
    return found != 0;
}

// y[i] = f(x[i]…) for i below count; y may be one of the x.
template <class T, class F, class... X> SIMD void map(int64_t count, F f, T* y, const X*... x) {
    int64_t i = 0;
    for (; i + LANES<T> <= count; i += LANES<T>) store(y + i, f(load(x + i)...));
    if (i < count) store_part(y + i, f(load_part(x + i, count - i)...), count - i);
}

}  // namespace shardwright::simd
