// The operators of chains, a row each, for tiles of floats and of doubles.
#include "chain.h"

#include "vector_math.h"

namespace shardwright::chain {

namespace {

using namespace simd;

#define OPERATOR(NAME, ARGUMENTS, RESULT)                                                          \
    struct NAME {                                                                                  \
        template <class V> SIMD static V of ARGUMENTS { return RESULT; }                           \
    };
#define MASK(mask) ((mask) ? set<V>(1) : V{})

OPERATOR(Add, (V a, V b), a + b)
OPERATOR(Sub, (V a, V b), a - b)
OPERATOR(Mul, (V a, V b), a * b)
OPERATOR(Div, (V a, V b), a / b)
OPERATOR(MulAdd, (V a, V b, V c), fma(a, b, c))
OPERATOR(MulSub, (V a, V b, V c), fma(a, b, -c))
OPERATOR(SubMul, (V a, V b, V c), fma(-a, b, c))
OPERATOR(Neg, (V a), -a)
OPERATOR(Abs, (V a), simd::abs(a))
OPERATOR(Sign, (V a), MASK(a > 0) - MASK(a < 0))
OPERATOR(Exp, (V a), simd::exp(a))
OPERATOR(Expm1, (V a), simd::expm1(a))
OPERATOR(Log, (V a), simd::log(a))
OPERATOR(Log1p, (V a), simd::log1p(a))
OPERATOR(Log2, (V a), simd::log2(a))
OPERATOR(Sqrt, (V a), simd::sqrt(a))
OPERATOR(Rsqrt, (V a), 1 / simd::sqrt(a))
OPERATOR(Reciprocal, (V a), 1 / a)
OPERATOR(Square, (V a), a * a)
OPERATOR(Cube, (V a), a * a * a)
OPERATOR(Pow, (V a, V b), simd::pow(a, b))
OPERATOR(Sin, (V a), simd::sin(a))
OPERATOR(Cos, (V a), simd::cos(a))
OPERATOR(Tanh, (V a), simd::tanh(a))
OPERATOR(Sigmoid, (V a), sigmoid(a))
OPERATOR(Erf, (V a), simd::erf(a))
OPERATOR(Relu, (V a), relu(a))
OPERATOR(Silu, (V a), silu(a))
OPERATOR(Gelu, (V a), gelu(a))
OPERATOR(GeluTanh, (V a), gelu_tanh(a))
OPERATOR(Floor, (V a), simd::floor(a))
OPERATOR(Ceil, (V a), simd::ceil(a))
OPERATOR(Round, (V a), simd::rint(a))
OPERATOR(Trunc, (V a), simd::trunc(a))
OPERATOR(Max, (V a, V b), maximum(a, b))
OPERATOR(Min, (V a, V b), minimum(a, b))
OPERATOR(Gt, (V a, V b), MASK(a > b))
OPERATOR(Ge, (V a, V b), MASK(a >= b))
OPERATOR(Lt, (V a, V b), MASK(a < b))
OPERATOR(Le, (V a, V b), MASK(a <= b))
OPERATOR(Eq, (V a, V b), MASK(a == b))
OPERATOR(Ne, (V a, V b), MASK(a != b))
OPERATOR(Where, (V c, V a, V b), c != 0 ? a : b)
OPERATOR(And, (V a, V b), MASK((a != 0) & (b != 0)))
OPERATOR(Or, (V a, V b), MASK((a != 0) | (b != 0)))
OPERATOR(Not, (V a), MASK(a == 0))
OPERATOR(IsNan, (V a), MASK(a != a))
OPERATOR(TanhBwd, (V dy, V y), tanh_bwd(dy, y))
OPERATOR(SigmoidBwd, (V dy, V y), sigmoid_bwd(dy, y))
OPERATOR(ReluBwd, (V dy, V x), relu_bwd(dy, x))
OPERATOR(SiluBwd, (V dy, V x), silu_bwd(dy, x))
OPERATOR(GeluBwd, (V dy, V x), gelu_bwd(dy, x))
OPERATOR(GeluTanhBwd, (V dy, V x), gelu_tanh_bwd(dy, x))

template <class T, class F>
void unary(T* y, const T* const* x, const int64_t* steps, int64_t count) {
    const T* a = x[0];
    int64_t i = 0;
    for (; i + LANES<T> <= count; i += LANES<T>, a += steps[0]) store(y + i, F::of(load(a)));
    if (i < count) store_part(y + i, F::of(steps[0] ? load_part(a, count - i) : load(a)), count - i);
}

template <class T, class F>
void binary(T* y, const T* const* x, const int64_t* steps, int64_t count) {
    const T *a = x[0], *b = x[1];
    int64_t i = 0, left, s = steps[0], t = steps[1];
    for (; i + LANES<T> <= count; i += LANES<T>, a += s, b += t)
        store(y + i, F::of(load(a), load(b)));
    if ((left = count - i))
        store_part(y + i,
                   F::of(s ? load_part(a, left) : load(a), t ? load_part(b, left) : load(b)), left);
}

template <class T, class F>
void ternary(T* y, const T* const* x, const int64_t* steps, int64_t count) {
    const T *a = x[0], *b = x[1], *c = x[2];
    int64_t i = 0, left, s = steps[0], t = steps[1], u = steps[2];
    for (; i + LANES<T> <= count; i += LANES<T>, a += s, b += t, c += u)
        store(y + i, F::of(load(a), load(b), load(c)));
    if ((left = count - i))
        store_part(y + i,
                   F::of(s ? load_part(a, left) : load(a), t ? load_part(b, left) : load(b),
                         u ? load_part(c, left) : load(c)),
                   left);
}

template <class F> constexpr Kernel row1(const char* name, int cost = 1) {
    return {name, 1, cost, unary<float, F>, unary<double, F>};
}
template <class F> constexpr Kernel row2(const char* name, int cost = 1) {
    return {name, 2, cost, binary<float, F>, binary<double, F>};
}
template <class F> constexpr Kernel row3(const char* name, int cost = 1) {
    return {name, 3, cost, ternary<float, F>, ternary<double, F>};
}

constexpr Kernel KERNELS[] = {
    row2<Add>("add"), row2<Sub>("sub"), row2<Mul>("mul"), row2<Div>("div", 2),
    row3<MulAdd>("mul_add"), row3<MulSub>("mul_sub"), row3<SubMul>("sub_mul"),
    row1<Neg>("neg"), row1<Abs>("abs"), row1<Sign>("sign"),
    row1<Exp>("exp", 4), row1<Expm1>("expm1", 4), row1<Log>("log", 5), row1<Log1p>("log1p", 6),
    row1<Log2>("log2", 5), row1<Sqrt>("sqrt", 2), row1<Rsqrt>("rsqrt", 3),
    row1<Reciprocal>("reciprocal", 2), row1<Square>("square"), row1<Cube>("cube"),
    row2<Pow>("pow", 50), row1<Sin>("sin", 6), row1<Cos>("cos", 6),
    row1<Tanh>("tanh", 6), row1<Sigmoid>("sigmoid", 5), row1<Erf>("erf", 8),
    row1<Relu>("relu"), row1<Silu>("silu", 5), row1<Gelu>("gelu", 7),
    row1<GeluTanh>("gelu_tanh", 6),
    row1<Floor>("floor"), row1<Ceil>("ceil"), row1<Round>("round"), row1<Trunc>("trunc"),
    row2<Max>("max"), row2<Min>("min"), row2<Gt>("gt"), row2<Ge>("ge"), row2<Lt>("lt"),
    row2<Le>("le"), row2<Eq>("eq"), row2<Ne>("ne"), row3<Where>("where"),
    row2<And>("and"), row2<Or>("or"), row1<Not>("not"), row1<IsNan>("isnan"),
    row2<TanhBwd>("tanh_bwd"), row2<SigmoidBwd>("sigmoid_bwd"), row2<ReluBwd>("relu_bwd"),
    row2<SiluBwd>("silu_bwd", 6), row2<GeluBwd>("gelu_bwd", 8),
    row2<GeluTanhBwd>("gelu_tanh_bwd", 7),
};

}  // namespace

const Kernel* find_kernel(const std::string& name) {
    for (const Kernel& kernel : KERNELS)
        if (name == kernel.name) return &kernel;
    return nullptr;
}

}  // namespace shardwright::chain
