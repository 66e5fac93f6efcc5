// sgd, adam, adamw and the step counters: one call renews all parameters of a training step.
//
// Comes in: lists of tensors, one list after another, then the learning rate. Goes out: the renewed
// lists, normally in the inputs' memory. What always holds: an element is read before it is
// written and no other is read, so in place and apart give the same; operations and roundings are
// those of torch's fused kernels (a product is contracted into a sum where torch's build does, and
// nowhere else), and the bias correction is computed in f64 from the counter in memory.
#include <vector>

#include "rows.h"

// `fma` says which products round once with their sum; no others do.
#ifdef __clang__
#pragma clang fp contract(off)
#else
#pragma GCC optimize("fp-contract=off")
#endif

namespace shardwright {
namespace {

using namespace rows;

// Lists of equal length: operand k of list l is `l * count + k`.
struct Lists : Call {
    int count;
    std::vector<int64_t> starts;  // elements in the parameters before one

    Lists(const CallSpec& given, int n) : count(n), starts(n + 1) {
        spec = given;
        for (int k = 0; k < n; k++) starts[k + 1] = starts[k] + in(k).numel();
    }

    // body(parameter, begin, end) over a thread's part of all elements: large parameters are cut,
    // small ones come together.
    template <class Body> void pieces(int thread, int threads, Body body) {
        constexpr int64_t LINE = 16;  // threads share no cache line
        Span part = share(starts[count], thread, threads);
        auto first = std::upper_bound(starts.begin(), starts.end(), part.begin) - starts.begin();
        for (int k = int(first) - 1; k < count && starts[k] < part.end; k++) {
            int64_t size = starts[k + 1] - starts[k];
            auto cut = [&](int64_t at) { return at < 0 ? 0 : at < size ? at / LINE * LINE : size; };
            int64_t begin = cut(part.begin - starts[k]), end = cut(part.end - starts[k]);
            if (begin < end) body(k, begin, end);
        }
    }

    template <class T> T* input(char* const* data, int list, int k) {
        return as<T>(data[list * count + k]);
    }
    template <class T> T* output(char* const* data, int list, int k) {
        return as<T>(data[spec.n_in + list * count + k]);
    }
};

// Why the lists do not fit, or nothing: list l is absent where `needed[l]` is 0, as the rule would
// leave what renews it unwritten.
std::string misfit(const CallSpec& spec, int n, std::initializer_list<int> needed, bool lr) {
    int list = 0;
    for (int need : needed) {
        for (int k = 0; k < n; k++) {
            const Operand& parameter = spec.operands[k];
            const Operand& other = spec.operands[list * n + k];
            if (!need && !other.present()) continue;
            if (!need) return "a list that the attributes do not ask for is there";
            if (!other.present()) return "a list that the attributes ask for is absent";
            if (other.dtype != parameter.dtype || !floating(other)) return "dtypes";
            if (!dense(other) || !alike(parameter, other)) return "strides";
        }
        list++;
    }
    if (lr && !is_scalar(spec.operands[spec.n_in - 1])) return "the learning rate";
    return "";
}

// The same for the outputs, which renew the lists `written`.
std::string misfit_outputs(const CallSpec& spec, int n, std::initializer_list<int> written) {
    int list = 0;
    for (int source : written) {
        for (int k = 0; k < n; k++) {
            const Operand& out = spec.operands[spec.n_in + list * n + k];
            const Operand& old = spec.operands[source * n + k];
            if (!out.present() && !old.present()) continue;
            if (!out.present()) return "an output is absent";
            if (!old.present()) return "an output renews a list that is absent";
            if (out.dtype != old.dtype || !alike(out, old)) return "an output's strides";
        }
        list++;
    }
    return "";
}

// ------------------------------------------------------------------ adam, adamw

struct AdamRule {
    double beta1, beta2, eps, decay;
    bool amsgrad, maximize, decoupled;
};

template <class T> struct AdamPointers {
    const T *parameter, *gradient, *average, *square, *largest;
    T *new_parameter, *new_average, *new_square, *new_largest;
};

// One parameter's constants at its step.
template <class T> struct AdamConstants {
    T sign, keep, decay, weight, beta2, weight2, root, eps, step;
    bool small;

    AdamConstants(const AdamRule& r, double lr, double count)
        : sign(r.maximize ? -1 : 1), keep(T(1 - lr * r.decay)), decay(T(r.decay)),
          weight(T(1 - r.beta1)), beta2(T(r.beta2)), weight2(T(1 - r.beta2)),
          root(T(std::sqrt(1 - std::pow(r.beta2, count)))), eps(T(r.eps)),
          step(T(-(lr / (1 - std::pow(r.beta1, count))))), small(weight < T(0.5)) {
        if (!small) weight -= 1;  // the interpolation then starts from the gradient
    }
};

enum Decay { NONE, GRADIENT, PARAMETER };

template <class T, Decay decay, bool amsgrad>
void adam(const AdamConstants<T>& constants, AdamPointers<T> p, int64_t begin, int64_t end) {
    const AdamConstants<T> c = constants;
#pragma omp simd
    for (int64_t i = begin; i < end; i++) {
        T parameter = p.parameter[i], gradient = c.sign * p.gradient[i];
        if (decay == GRADIENT) gradient = std::fma(parameter, c.decay, gradient);
        if (decay == PARAMETER) parameter = parameter * c.keep;
        T average = p.average[i];
        average = std::fma(c.weight, gradient - average, c.small ? average : gradient);
        T square = std::fma(c.weight2 * gradient, gradient, p.square[i] * c.beta2);
        p.new_average[i] = average;
        p.new_square[i] = square;
        if (amsgrad) {
            T largest = p.largest[i];
            square = square > largest || square != square ? square : largest;
            p.new_largest[i] = square;
        }
        T under = std::sqrt(square) / c.root + c.eps;
        p.new_parameter[i] = parameter + c.step * average / under;
    }
}

template <class T>
using AdamLoop = void (*)(const AdamConstants<T>&, AdamPointers<T>, int64_t, int64_t);

template <class T> AdamLoop<T> adam_loop(const AdamRule& r) {
    static const AdamLoop<T> loops[3][2] = {
        {adam<T, NONE, false>, adam<T, NONE, true>},
        {adam<T, GRADIENT, false>, adam<T, GRADIENT, true>},
        {adam<T, PARAMETER, false>, adam<T, PARAMETER, true>},
    };
    return loops[r.decay == 0 ? NONE : r.decoupled ? PARAMETER : GRADIENT][r.amsgrad];
}

enum AdamList { PARAMETERS, GRADIENTS, AVERAGES, SQUARES, LARGEST, STEPS };

template <class T> struct Adam : Lists {
    AdamRule rule;
    Adam(const CallSpec& s, int n, const AdamRule& r) : Lists(s, n), rule(r) {}

    void run(char* const* data, Context& context) override {
        double lr = scalar(data[spec.n_in - 1], in(spec.n_in - 1).dtype);
        AdamLoop<T> loop = adam_loop<T>(rule);
        in_parallel(threads_for(context, starts[count]), [&](int thread, int threads) {
            double step = counter(data, 0);
            AdamConstants<T> constants(rule, lr, step);
            pieces(thread, threads, [&](int k, int64_t begin, int64_t end) {
                if (counter(data, k) != step) {
                    step = counter(data, k);
                    constants = AdamConstants<T>(rule, lr, step);
                }
                loop(constants, pointers(data, k), begin, end);
            });
        });
    }

    double counter(char* const* data, int k) {
        int operand = STEPS * count + k;
        return scalar(data[operand], in(operand).dtype);
    }

    AdamPointers<T> pointers(char* const* data, int k) {
        return {input<T>(data, PARAMETERS, k), input<T>(data, GRADIENTS, k),
                input<T>(data, AVERAGES, k),   input<T>(data, SQUARES, k),
                input<T>(data, LARGEST, k),    output<T>(data, 0, k),
                output<T>(data, 1, k),         output<T>(data, 2, k),
                output<T>(data, 3, k)};
    }
};

Call* bind_adam(const CallSpec& spec, std::string& why, bool decoupled) {
    why.clear();
    Reader read(spec);
    AdamRule r{};
    r.beta1 = read.take<double>();
    r.beta2 = read.take<double>();
    r.eps = read.take<double>();
    r.decay = read.take<double>();
    r.amsgrad = read.take<uint8_t>();
    r.maximize = read.take<uint8_t>();
    r.decoupled = decoupled;
    int n = (spec.n_in - 1) / 6;
    if (n < 1 || spec.n_in != 6 * n + 1 || spec.n_out != 4 * n) why = "the lists' lengths";
    if (why.empty()) why = misfit(spec, n, {1, 1, 1, 1, r.amsgrad}, true);
    if (why.empty()) why = misfit_outputs(spec, n, {PARAMETERS, AVERAGES, SQUARES, LARGEST});
    for (int k = 0; why.empty() && k < n; k++) {
        if (!is_scalar(spec.operands[STEPS * n + k])) why = "a step counter";
        if (spec.operands[k].dtype != spec.operands[0].dtype) why = "parameters of two dtypes";
    }
    if (!why.empty()) return nullptr;
    if (spec.operands[0].dtype == F32) return new Adam<float>(spec, n, r);
    return new Adam<double>(spec, n, r);
}

// ------------------------------------------------------------------ sgd

struct SgdRule {
    double decay, momentum, dampening;
    bool nesterov, maximize;
};

template <class T> struct SgdPointers {
    const T *parameter, *gradient, *momentum;
    T *new_parameter, *new_momentum;
};

template <class T> struct SgdConstants {
    T sign, decay, momentum, take, step;
    SgdConstants(const SgdRule& r, double lr)
        : sign(r.maximize ? -1 : 1), decay(T(r.decay)), momentum(T(r.momentum)),
          take(T(1 - r.dampening)), step(T(-lr)) {}
};

enum Momentum { PLAIN, HEAVY, NESTEROV };

template <class T, bool decays, Momentum kind>
void sgd(const SgdConstants<T>& constants, SgdPointers<T> p, int64_t begin, int64_t end) {
    const SgdConstants<T> c = constants;
#pragma omp simd
    for (int64_t i = begin; i < end; i++) {
        T parameter = p.parameter[i], gradient = c.sign * p.gradient[i];
        if (decays) gradient = std::fma(parameter, c.decay, gradient);
        if (kind != PLAIN) {
            T momentum = std::fma(gradient, c.take, p.momentum[i] * c.momentum);
            p.new_momentum[i] = momentum;
            gradient = kind == NESTEROV ? std::fma(momentum, c.momentum, gradient) : momentum;
        }
        p.new_parameter[i] = std::fma(gradient, c.step, parameter);
    }
}

template <class T>
using SgdLoop = void (*)(const SgdConstants<T>&, SgdPointers<T>, int64_t, int64_t);

template <class T> SgdLoop<T> sgd_loop(const SgdRule& r) {
    static const SgdLoop<T> loops[2][3] = {
        {sgd<T, false, PLAIN>, sgd<T, false, HEAVY>, sgd<T, false, NESTEROV>},
        {sgd<T, true, PLAIN>, sgd<T, true, HEAVY>, sgd<T, true, NESTEROV>},
    };
    return loops[r.decay != 0][r.momentum == 0 ? PLAIN : r.nesterov ? NESTEROV : HEAVY];
}

template <class T> struct Sgd : Lists {
    SgdRule rule;
    Sgd(const CallSpec& s, int n, const SgdRule& r) : Lists(s, n), rule(r) {}

    void run(char* const* data, Context& context) override {
        SgdConstants<T> constants(rule, scalar(data[spec.n_in - 1], in(spec.n_in - 1).dtype));
        SgdLoop<T> loop = sgd_loop<T>(rule);
        in_parallel(threads_for(context, starts[count]), [&](int thread, int threads) {
            pieces(thread, threads, [&](int k, int64_t begin, int64_t end) {
                SgdPointers<T> p{input<T>(data, 0, k), input<T>(data, 1, k), input<T>(data, 2, k),
                                 output<T>(data, 0, k), output<T>(data, 1, k)};
                loop(constants, p, begin, end);
            });
        });
    }
};

Call* bind_sgd(const CallSpec& spec, std::string& why) {
    why.clear();
    Reader read(spec);
    SgdRule r{};
    r.decay = read.take<double>();
    r.momentum = read.take<double>();
    r.dampening = read.take<double>();
    r.nesterov = read.take<uint8_t>();
    r.maximize = read.take<uint8_t>();
    int n = (spec.n_in - 1) / 3;
    if (n < 1 || spec.n_in != 3 * n + 1 || spec.n_out != 2 * n) why = "the lists' lengths";
    if (why.empty()) why = misfit(spec, n, {1, 1, r.momentum != 0}, true);
    if (why.empty()) why = misfit_outputs(spec, n, {0, 2});
    for (int k = 0; why.empty() && k < n; k++)
        if (spec.operands[k].dtype != spec.operands[0].dtype) why = "parameters of two dtypes";
    if (!why.empty()) return nullptr;
    if (spec.operands[0].dtype == F32) return new Sgd<float>(spec, n, r);
    return new Sgd<double>(spec, n, r);
}

// ------------------------------------------------------------------ step counters

struct StepInc : Call {
    double by;
    StepInc(const CallSpec& s, double b) : by(b) { spec = s; }

    void run(char* const* data, Context&) override {
        for (int k = 0; k < spec.n_in; k++) {
            switch (in(k).dtype) {
                case F64: advance<double>(data, k); break;
                case F32: advance<float>(data, k); break;
                case I64: advance<int64_t>(data, k); break;
                default: advance<int32_t>(data, k);
            }
        }
    }

    template <class T> void advance(char* const* data, int k) {
        *as<T>(data[spec.n_in + k]) = *as<T>(data[k]) + T(by);
    }
};

Call* bind_step_inc(const CallSpec& spec, std::string& why) {
    why.clear();
    double by = Reader(spec).take<double>();
    bool whole = by == std::floor(by);
    if (spec.n_in != spec.n_out) why = "as many counters come in as go out";
    for (int k = 0; why.empty() && k < spec.n_in; k++) {
        const Operand &old = spec.operands[k], &made = spec.operands[spec.n_in + k];
        if (!is_scalar(old) || !is_scalar(made)) why = "a counter is one number";
        else if (old.dtype != made.dtype) why = "dtypes";
        else if (!floating(old) && !whole) why = "a fraction on a whole counter";
    }
    return why.empty() ? new StepInc(spec, by) : nullptr;
}

Call* bind_coupled(const CallSpec& spec, std::string& why) { return bind_adam(spec, why, false); }
Call* bind_decoupled(const CallSpec& spec, std::string& why) { return bind_adam(spec, why, true); }

Register sgd_kind(40, bind_sgd);
Register adam_kind(41, bind_coupled);
Register adamw_kind(42, bind_decoupled);
Register step_kind(43, bind_step_inc);

}  // namespace
}  // namespace shardwright
