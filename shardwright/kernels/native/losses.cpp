// Cross entropy and mean squared error, and their gradients.
//
// Comes in: rows of scores with the numbers of their classes; two tensors laid out alike. What
// always holds: a loss is summed in f64, a thread's rows first, then the threads in order; a class
// that does not exist is an error, found before its row is written or added; rows of the ignored
// class count nowhere, and their gradient is 0. dx may lie in the memory of log_probs: an element
// is read once, just before it is written.
#include <atomic>
#include <stdexcept>
#include <vector>

#include "softmax.h"

namespace shardwright {
namespace {

using namespace rows;

enum Reduction : uint8_t { EACH, MEAN, SUM };

// ------------------------------------------------------------------ the rows' classes

// The classes that the rows belong to.
struct Classes {
    const Operand& operand;
    const char* data;
    int64_t count, ignore;
    std::atomic<int64_t> wrong{-1};  // a row whose class does not exist

    int64_t read(int64_t row) const {
        int64_t at = row * operand.strides[0];
        return operand.dtype == I64 ? reinterpret_cast<const int64_t*>(data)[at]
                                    : reinterpret_cast<const int32_t*>(data)[at];
    }
    // The row's class; -1 where it does not count.
    int64_t of(int64_t row) {
        int64_t number = read(row);
        if (number == ignore) return -1;
        if (number >= 0 && number < count) return number;
        wrong = row;
        return -1;
    }
    void check() const {
        if (wrong < 0) return;
        throw std::out_of_range("row " + std::to_string(wrong) + " has the class " +
                                std::to_string(read(wrong)) + "; there are " +
                                std::to_string(count) + " classes");
    }
};

struct CrossEntropyRule {
    uint8_t reduction;
    int64_t ignore;
};

template <class T> struct CrossEntropy : Call {
    enum { X, TARGET, WEIGHT, LOSS, TOTAL, LOG_PROBS };
    CrossEntropyRule rule;
    struct Sums {
        double loss = 0, weight = 0;
        char apart[48];  // from what other threads write
    };
    std::vector<Sums> partial;

    CrossEntropy(const CallSpec& s, CrossEntropyRule r) : rule(r) { spec = s; }

    void run(char* const* data, Context& context) override {
        int64_t rows = in(X).sizes[0], columns = in(X).sizes[1];
        Classes classes{in(TARGET), data[TARGET], columns, rule.ignore};
        int most = threads_for(context, 2 * rows * columns);
        partial.assign(most, {});
        in_parallel(most, [&](int thread, int threads) {
            Span part = share(rows, thread, threads);
            for (int64_t r = part.begin; r < part.end; r++)
                row(data, r, classes.of(r), partial[thread]);
        });
        classes.check();
        Sums all;
        for (const Sums& s : partial) all.loss += s.loss, all.weight += s.weight;
        *as<T>(data[TOTAL]) = rule.reduction == EACH ? T(0) : T(all.weight);
        if (rule.reduction == MEAN) all.loss /= all.weight;
        if (rule.reduction != EACH) *as<T>(data[LOSS]) = T(all.loss);
    }

    void row(char* const* data, int64_t r, int64_t label, Sums& sums) {
        const T* x = as<T>(data[X]) + r * in(X).strides[0];
        T* log_probs = as<T>(data[LOG_PROBS]) + r * out(2).strides[0];
        log_softmax_row(x, log_probs, in(X).sizes[1]);
        double weight = label < 0 ? 0 : data[WEIGHT] ? as<T>(data[WEIGHT])[label] : 1;
        double loss = label < 0 ? 0 : -weight * log_probs[label];
        if (rule.reduction == EACH) as<T>(data[LOSS])[r * out(0).strides[0]] = T(loss);
        sums.loss += loss;
        sums.weight += weight;
    }
};

// dx = (exp(log_probs) - the class's one) * weight * dloss / total weight.
template <class T> struct CrossEntropyBwd : Call {
    enum { DLOSS, LOG_PROBS, TARGET, TOTAL, WEIGHT, DX };
    CrossEntropyRule rule;
    CrossEntropyBwd(const CallSpec& s, CrossEntropyRule r) : rule(r) { spec = s; }

    void run(char* const* data, Context& context) override {
        int64_t rows = out(0).sizes[0], columns = out(0).sizes[1];
        Classes classes{in(TARGET), data[TARGET], columns, rule.ignore};
        in_parallel(threads_for(context, 2 * rows * columns), [&](int thread, int threads) {
            Span part = share(rows, thread, threads);
            for (int64_t r = part.begin; r < part.end; r++) row(data, r, classes.of(r));
        });
        classes.check();
    }

    void row(char* const* data, int64_t r, int64_t label) {
        int64_t columns = out(0).sizes[1];
        const T* log_probs = as<T>(data[LOG_PROBS]) + r * in(LOG_PROBS).strides[0];
        T* dx = as<T>(data[DX]) + r * out(0).strides[0];
        if (label < 0) {
            std::fill(dx, dx + columns, T(0));
            return;
        }
        const T* dloss = as<T>(data[DLOSS]);
        T scale = rule.reduction == EACH ? dloss[r * in(DLOSS).strides[0]] : *dloss;
        if (rule.reduction == MEAN) scale /= *as<T>(data[TOTAL]);
        if (data[WEIGHT]) scale *= as<T>(data[WEIGHT])[label];
        T own = (std::exp(log_probs[label]) - 1) * scale;
        map(columns, [=](Vec<T> v) { return exp(v) * scale; }, dx, log_probs);
        dx[label] = own;
    }
};

// ------------------------------------------------------------------ mean squared error

template <class T> struct Mse : Call {
    uint8_t reduction;
    std::vector<double> partial;
    Mse(const CallSpec& s, uint8_t r) : reduction(r) { spec = s; }

    void run(char* const* data, Context& context) override {
        int64_t n = in(0).numel();
        int most = threads_for(context, n);
        partial.assign(most, 0);
        in_parallel(most, [&](int thread, int threads) {
            Span part = share(n, thread, threads, LANES<T>);
            const T *a = as<T>(data[0]) + part.begin, *b = as<T>(data[1]) + part.begin;
            int64_t count = part.end - part.begin;
            if (reduction == EACH) return each_square(as<T>(data[2]) + part.begin, a, b, count);
            partial[thread] = sum_of<T>(count, [=](int64_t i, auto read) {
                Vec<T> apart = read(a + i) - read(b + i);
                return apart * apart;
            });
        });
        if (reduction == EACH) return;
        double sum = 0;
        for (double part : partial) sum += part;
        *as<T>(data[2]) = T(reduction == MEAN ? sum / n : sum);
    }

    void each_square(T* loss, const T* a, const T* b, int64_t n) {
        map(n, [](Vec<T> v, Vec<T> w) { return (v - w) * (v - w); }, loss, a, b);
    }
};

template <class T> struct MseBwd : Call {
    uint8_t reduction;
    MseBwd(const CallSpec& s, uint8_t r) : reduction(r) { spec = s; }

    void run(char* const* data, Context& context) override {
        int64_t n = out(0).numel();
        T scale = reduction == MEAN ? T(2.0 / n) : T(2);
        in_parallel(threads_for(context, n), [&](int thread, int threads) {
            Span part = share(n, thread, threads, LANES<T>);
            const T *dloss = as<T>(data[0]), *a = as<T>(data[1]) + part.begin,
                    *b = as<T>(data[2]) + part.begin;
            T* da = as<T>(data[3]) + part.begin;
            int64_t count = part.end - part.begin;
            if (reduction == EACH) {
                auto f = [=](Vec<T> d, Vec<T> v, Vec<T> w) { return (v - w) * scale * d; };
                return map(count, f, da, dloss + part.begin, a, b);
            }
            T whole = *dloss;
            map(count, [=](Vec<T> v, Vec<T> w) { return (v - w) * scale * whole; }, da, a, b);
        });
    }
};

// ------------------------------------------------------------------ binding

// Whether the present operands of these numbers have the dtype of the first.
bool same_dtype(const CallSpec& spec, std::initializer_list<int> numbers) {
    const Operand* first = nullptr;
    for (int i : numbers) {
        const Operand& o = spec.operands[i];
        if (!o.present()) continue;
        if (!first) first = &o;
        if (o.dtype != first->dtype || !floating(o)) return false;
    }
    return true;
}

// A matrix whose rows lie one element after another.
bool row_matrix(const Operand& a, int64_t rows, int64_t columns) {
    return a.ndim == 2 && a.sizes[0] == rows && a.sizes[1] == columns && rows_contiguous(a, 1);
}

bool vector_of(const Operand& a, int64_t n) { return a.ndim == 1 && a.sizes[0] == n; }

std::string misfit(const CallSpec& spec, int scores, int target, int weight, int loss, int result,
                   uint8_t reduction) {
    const Operand *o = spec.operands, &x = o[scores];
    if (x.ndim != 2 || x.sizes[1] == 0) return "scores are [rows, classes]";
    int64_t rows = x.sizes[0], columns = x.sizes[1];
    if (!row_matrix(x, rows, columns) || !row_matrix(o[result], rows, columns))
        return "a row's elements lie apart";
    if (!vector_of(o[target], rows) || (o[target].dtype != I64 && o[target].dtype != I32))
        return "classes are i64 or i32, one a row";
    const Operand& w = o[weight];
    if (w.present() && !(vector_of(w, columns) && w.contiguous()))
        return "weights are contiguous, one a class";
    if (reduction > SUM) return "the reduction";
    if (reduction == EACH ? !vector_of(o[loss], rows) : o[loss].numel() != 1) return "the loss";
    return "";
}

CrossEntropyRule read_rule(const CallSpec& spec) {
    Reader read(spec);
    uint8_t reduction = read.take<uint8_t>();
    return {reduction, read.take<int64_t>()};
}

Call* bind_cross_entropy(const CallSpec& spec, std::string& why) {
    CrossEntropyRule rule = read_rule(spec);
    why = misfit(spec, 0, 1, 2, 3, 5, rule.reduction);
    if (why.empty() && !same_dtype(spec, {0, 2, 3, 4, 5})) why = "dtypes";
    if (why.empty() && spec.operands[4].numel() != 1) why = "the total weight";
    if (!why.empty()) return nullptr;
    if (spec.operands[0].dtype == F32) return new CrossEntropy<float>(spec, rule);
    return new CrossEntropy<double>(spec, rule);
}

Call* bind_cross_entropy_bwd(const CallSpec& spec, std::string& why) {
    CrossEntropyRule rule = read_rule(spec);
    why = misfit(spec, 1, 2, 4, 0, 5, rule.reduction);
    if (why.empty() && !same_dtype(spec, {0, 1, 3, 4, 5})) why = "dtypes";
    if (why.empty() && spec.operands[3].numel() != 1) why = "the total weight";
    if (!why.empty()) return nullptr;
    if (spec.operands[0].dtype == F32) return new CrossEntropyBwd<float>(spec, rule);
    return new CrossEntropyBwd<double>(spec, rule);
}

// a and b at two numbers, the whole of the loss at another, and what is laid out like them.
std::string mse_misfit(const CallSpec& spec, int a, int loss, uint8_t reduction, int numbers) {
    const Operand* o = spec.operands;
    if (reduction > SUM) return "the reduction";
    for (int i = 0; i < numbers; i++) {
        if (o[i].dtype != o[0].dtype || !floating(o[i])) return "dtypes";
        if (i == loss && reduction != EACH) {
            if (o[i].numel() != 1) return "the loss";
        } else if (!alike(o[i], o[a]) || !dense(o[i])) {
            return "strides";
        }
    }
    return "";
}

Call* bind_mse(const CallSpec& spec, std::string& why) {
    uint8_t reduction = Reader(spec).take<uint8_t>();
    why = mse_misfit(spec, 0, 2, reduction, 3);
    if (!why.empty()) return nullptr;
    if (spec.operands[0].dtype == F32) return new Mse<float>(spec, reduction);
    return new Mse<double>(spec, reduction);
}

Call* bind_mse_bwd(const CallSpec& spec, std::string& why) {
    uint8_t reduction = Reader(spec).take<uint8_t>();
    why = mse_misfit(spec, 1, 0, reduction, 4);
    if (!why.empty()) return nullptr;
    if (spec.operands[0].dtype == F32) return new MseBwd<float>(spec, reduction);
    return new MseBwd<double>(spec, reduction);
}

Register cross_entropy_kind(32, bind_cross_entropy);
Register cross_entropy_bwd_kind(33, bind_cross_entropy_bwd);
Register mse_kind(34, bind_mse);
Register mse_bwd_kind(35, bind_mse_bwd);

}  // namespace
}  // namespace shardwright
