// Functions of vectors of float, by polynomials, within a few units in the last place over the
// whole range: 0 and denormals, inf and NaN give what <cmath> gives. Of vectors of double: <cmath>
// itself, lane by lane.
//
// Polynomials are minimax fits to the functions on the intervals that the comments name, with the
// highest coefficient first. There is no table and no branch but in sin and cos of large numbers.
#pragma once

#include "vector.h"

#include <limits>

namespace shardwright::simd {

template <class V, class... C> SIMD V polynomial(V x, float highest, C... others) {
    V result = set<V>(highest);
    ((result = fma(result, x, set<V>(others))), ...);
    return result;
}

// p * 2^n of a whole number n, for any n: the result may be a denormal, 0 or inf. Where it is 0 it
// is not computed: an underflow takes a hundred cycles, and masked scores are full of them.
SIMD F32v scale(F32v p, F32v n) {
    constexpr float LEAST = -150.5f;
#ifdef SIMD_512
    __mmask16 some = _mm512_cmp_ps_mask((__m512)n, _mm512_set1_ps(LEAST), _CMP_NLT_UQ);
    return (F32v)_mm512_maskz_scalef_ps(some, (__m512)p, (__m512)n);
#else
    p = n < LEAST ? F32v{} : p;
    I32v whole = __builtin_convertvector(n, I32v), half = whole >> 1;
    F32v first = (F32v)((half + 127) << 23), second = (F32v)((whole - half + 127) << 23);
    return p * first * second;
#endif
}

// x = n log 2 + r, |r| <= log(2) / 2; e^r = 1 + less.
struct Exponent {
    F32v n, less;
};
SIMD Exponent exponent(F32v x, F32v correction = F32v{}) {
    F32v n = rint(x * 1.44269504f);
    F32v r = fma(n, set<F32v>(-0.693359375f), x) + fma(n, set<F32v>(2.1219444e-4f), correction);
    F32v tail = polynomial(r, 1.3947599e-03f, 8.367247e-03f, 4.1666266e-02f, 1.6666538e-01f, .5f);
    return {n, fma(r * r, tail, r)};
}
constexpr float EXP_INF = 89.0f, EXP_ZERO = -105.0f;  // from where on e^x is inf, or 0

SIMD F32v exp(F32v x) {
    Exponent e = exponent(at_least(at_most(x, EXP_INF), EXP_ZERO));
    return scale(1.0f + e.less, e.n);
}

// Of x <= 0.
SIMD F32v exp_below(F32v x) {
    Exponent e = exponent(at_least(x, EXP_ZERO));
    return scale(1.0f + e.less, e.n);
}
SIMD F32v expm1_below(F32v x) {
    Exponent e = exponent(at_least(x, EXP_ZERO));
    F32v power = scale(set<F32v>(1.0f), e.n);
    return fma(power, e.less, power - 1.0f);
}

SIMD F32v expm1(F32v x) {
    Exponent e = exponent(at_least(at_most(x, EXP_INF), EXP_ZERO));
    // Half of it, so that 2^n does not overflow before the result does.
    F32v power = scale(set<F32v>(1.0f), e.n - 1.0f);
    F32v result = 2.0f * fma(power, e.less, power - 0.5f);
    return x == 0.0f ? x : result;
}

// log x = e log 2 + mantissa; the mantissa is of [sqrt 1/2, sqrt 2).
struct Logarithm {
    F32v e, whole, rest;  // mantissa = whole + rest, the rest small
};
SIMD Logarithm logarithm(F32v x) {
    auto tiny = x < std::numeric_limits<float>::min();
    F32v normal = tiny ? x * 0x1p24f : x;
    I32v from_root = bits(normal) - 0x3f3504f3;
    F32v e = __builtin_convertvector(from_root >> 23, F32v) - (tiny ? set<F32v>(24.0f) : F32v{});
    F32v f = (F32v)(bits(normal) - (from_root & int32_t(0xff800000))) - 1.0f;
    F32v p = polynomial(f, -7.872924e-02f, 1.2900169e-01f, -1.3132218e-01f, 1.4178823e-01f,
                        -1.6623999e-01f, 2.0002374e-01f, -2.5000826e-01f, 3.3333316e-01f);
    F32v square = f * f;
    return {e, f, fma(square * f, p, -0.5f * square)};
}
SIMD F32v logarithm_edges(F32v x, F32v result) {
    result = x == 0.0f ? set<F32v>(-INFINITY) : result;
    result = x < 0.0f ? set<F32v>(NAN) : result;
    return (x == INFINITY) | (x != x) ? x : result;
}

SIMD F32v log(F32v x) {
    Logarithm l = logarithm(x);
    F32v low = fma(l.e, set<F32v>(-2.1219444e-4f), l.rest);
    return logarithm_edges(x, fma(l.e, set<F32v>(0.693359375f), l.whole + low));
}

SIMD F32v log2(F32v x) {
    Logarithm l = logarithm(x);
    // 1 / log 2 is 1.4375 and a little, so that the first product is exact enough.
    F32v low = fma(l.whole, set<F32v>(0.00519504089f), l.rest * 1.44269504f);
    return logarithm_edges(x, l.e + fma(l.whole, set<F32v>(1.4375f), low));
}

SIMD F32v log1p(F32v x) {
    F32v more = 1.0f + x, step = more - 1.0f;  // step is what x became by rounding
    F32v result = log(more) * (x / step);
    return (step == 0.0f) | (x == INFINITY) ? x : result;
}

SIMD F32v tanh(F32v x) {
    F32v less = expm1_below(-2.0f * abs(x));
    return copysign(less / (2.0f + less), x);
}

// Of the standard normal distribution: the probability of values below x; exp(-x^2 / 2).
template <class V> struct Normal {
    V below, bell;
};
SIMD Normal<F32v> normal(F32v x) {
    F32v size = at_most(abs(x), 15.0f);  // bell and tail are 0 from there on
    F32v half = -0.5f * size, power = half * size;
    Exponent e = exponent(power, fma(half, size, -power));
    F32v bell = scale(1.0f + e.less, e.n);
    // tail / bell is y times a polynomial in y, for |x| up to 16.
    F32v y = 1.0f / fma(size, set<F32v>(0.35f), set<F32v>(1.0f));
    F32v tail = bell * y *
                polynomial(y, -2.916525e-02f, 1.4406738e-01f, -2.5591576e-01f, 1.594092e-01f,
                           -2.3275344e-02f, 1.05579816e-01f, 1.1981419e-01f, 1.3986452e-01f,
                           1.3962124e-01f);
    return {x < 0.0f ? tail : 1.0f - tail, bell};
}

SIMD F32v erf(F32v x) {
    F32v square = x * x;
    F32v near = polynomial(square, 7.889123e-05f, -8.020842e-04f, 5.1895357e-03f, -2.6854444e-02f,
                           1.12836e-01f, -3.7612626e-01f, 1.2837917e-01f);  // |x| <= 1
    F32v size = abs(x);
    F32v far = 2.0f * normal(1.41421356f * size).below - 1.0f;
    return size < 1.0f ? fma(near, x, x) : copysign(far, x);
}

// x = n pi / 2 + r for |x| up to LARGE; sine and cosine of r, |r| <= pi / 4.
struct Angle {
    I32v quarter;
    F32v sine, cosine;
};
constexpr float LARGE_ANGLE = 8192.0f;
SIMD Angle angle(F32v x) {
    F32v n = rint(x * 0.636619772f);
    F32v r = fma(n, set<F32v>(-1.5707964f), x);
    r = fma(n, set<F32v>(4.371139e-08f), r);
    r = fma(n, set<F32v>(1.7151245e-15f), r);
    F32v square = r * r;
    F32v s = polynomial(square, -1.9504318e-04f, 8.332083e-03f, -1.6666654e-01f);
    F32v c = polynomial(square, 2.4418128e-05f, -1.3887185e-03f, 4.166664e-02f);
    return {__builtin_convertvector(n, I32v), fma(square * r, s, r),
            fma(square * square, c, fma(square, set<F32v>(-0.5f), set<F32v>(1.0f)))};
}
SIMD F32v sine_of(Angle a) {
    F32v size = (a.quarter & 1) != 0 ? a.cosine : a.sine;
    return (a.quarter & 2) != 0 ? -size : size;
}

SIMD F32v sin(F32v x) {
    if (any(abs(x) > LARGE_ANGLE)) return each(x, [](float v) { return std::sin(v); });
    return x == 0.0f ? x : sine_of(angle(x));
}
SIMD F32v cos(F32v x) {
    if (any(abs(x) > LARGE_ANGLE)) return each(x, [](float v) { return std::cos(v); });
    Angle a = angle(x);
    return sine_of({a.quarter + 1, a.sine, a.cosine});
}

#define SIMD_BY_LANES(name)                                                                        \
    SIMD F64v name(F64v x) { return each(x, [](double v) { return std::name(v); }); }
SIMD_BY_LANES(exp)
SIMD_BY_LANES(expm1)
SIMD_BY_LANES(log)
SIMD_BY_LANES(log1p)
SIMD_BY_LANES(log2)
SIMD_BY_LANES(tanh)
SIMD_BY_LANES(erf)
SIMD_BY_LANES(sin)
SIMD_BY_LANES(cos)
#undef SIMD_BY_LANES
SIMD F64v exp_below(F64v x) { return exp(x); }
SIMD Normal<F64v> normal(F64v x) {
    return {each(x, [](double v) { return 0.5 * std::erfc(-M_SQRT1_2 * v); }), exp(-0.5 * x * x)};
}

template <class V> SIMD V pow(V x, V y) {
    V result;
    for (int i = 0; i < LANES<Element<V>>; i++) result[i] = std::pow(x[i], y[i]);
    return result;
}

template <class V> SIMD V relu(V x) { return x < 0 ? V{} : x; }

// The sigmoid, and its derivative without the cancellation of 1 - value.
template <class V> struct Logistic {
    V value, slope;
};
template <class V> SIMD Logistic<V> logistic(V x) {
    V e = exp_below(-abs(x)), larger = 1 / (1 + e), smaller = e * larger;
    return {x < 0 ? smaller : larger, smaller * larger};
}

template <class V> SIMD V sigmoid(V x) {
    V e = exp_below(-abs(x));
    return (x < 0 ? e : set<V>(1)) / (1 + e);
}

template <class V> SIMD V silu(V x) { return x * sigmoid(x); }

// By the error function.
template <class V> SIMD V gelu(V x) { return x * normal(x).below; }

// x (1 + tanh u) / 2 = x sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3).
template <class V> SIMD V gelu_tanh(V x) {
    using T = Element<V>;
    constexpr T A = T(1.5957691216057308), B = T(1.5957691216057308 * 0.044715);
    return x * sigmoid(x * (A + B * (x * x)));
}

// Gradients: dy times the derivative, by the function's value y or argument x.
template <class V> SIMD V relu_bwd(V dy, V x) { return x <= 0 ? V{} : dy; }
template <class V> SIMD V tanh_bwd(V dy, V y) { return dy * (1 - y * y); }
template <class V> SIMD V sigmoid_bwd(V dy, V y) { return dy * ((1 - y) * y); }
template <class V> SIMD V silu_bwd(V dy, V x) {
    Logistic<V> s = logistic(x);
    return dy * (s.value + x * s.slope);
}
template <class V> SIMD V gelu_bwd(V dy, V x) {
    Normal<V> n = normal(x);
    return dy * (n.below + x * (Element<V>(0.3989422804014327) * n.bell));
}
template <class V> SIMD V gelu_tanh_bwd(V dy, V x) {
    using T = Element<V>;
    constexpr T A = T(1.5957691216057308), B = T(1.5957691216057308 * 0.044715);
    V square = x * x;
    Logistic<V> s = logistic(x * (A + B * square));
    return dy * (s.value + x * (s.slope * (A + 3 * B * square)));
}

// What a product's `activation` means: the numbers of ACTIVATIONS in shardwright/kernels/row.py.
enum Activation : int { NONE, RELU, GELU, GELU_TANH, SILU, TANH, SIGMOID, ACTIVATIONS };

// f(the function of vectors of this number); nothing where it is NONE.
template <class F> SIMD void with_activation(int activation, F f) {
    switch (activation) {
        case RELU: return f([](auto x) { return relu(x); });
        case GELU: return f([](auto x) { return gelu(x); });
        case GELU_TANH: return f([](auto x) { return gelu_tanh(x); });
        case SILU: return f([](auto x) { return silu(x); });
        case TANH: return f([](auto x) { return simd::tanh(x); });
        case SIGMOID: return f([](auto x) { return sigmoid(x); });
    }
}

}  // namespace shardwright::simd
