// Kinds that are chains of one or two operators: add, bias_add, relu and its gradient. Whole numbers
// are added by a loop of their own.
#include "chain.h"
#include "convert.h"
#include "rows.h"
#include "strided.h"

namespace shardwright {

namespace {

using chain::bind_program;
using chain::input;
using chain::literal;
using chain::result;

bool whole(const Operand& operand) { return operand.dtype == I64 || operand.dtype == I32; }

// y = a + alpha * b of whole numbers of one dtype.
template <class T> class WholeAdd : public Call {
   public:
    WholeAdd(Space space, T alpha) : space_(std::move(space)), alpha_(alpha) {}

    void run(char* const* data, Context& context) override {
        int64_t inner = space_.inner(), outer = space_.count / inner;
        in_parallel(rows::threads_for(context, space_.count), [&](int thread, int threads) {
            rows::Span span = rows::share(outer, thread, threads);
            for (int64_t i = span.begin; i < span.end; i++) add_row(data, i, inner);
        });
    }

   private:
    Space space_;
    T alpha_;

    void add_row(char* const* data, int64_t index, int64_t inner) const {
        int64_t at[3], step[3];
        space_.offsets(index, space_.dims - 1, at);
        for (int k = 0; k < 3; k++)
            step[k] = space_.dims ? space_.strides[k][space_.dims - 1] : 0;
        T* y = rows::as<T>(data[2]) + at[0];
        const T *a = rows::as<T>(data[0]) + at[1], *b = rows::as<T>(data[1]) + at[2];
        for (int64_t i = 0; i < inner; i++)
            y[i * step[0]] = a[i * step[1]] + alpha_ * b[i * step[2]];
    }
};

Call* bind_whole_add(const CallSpec& spec, double alpha, std::string& why) {
    const Operand &a = spec.operands[0], &b = spec.operands[1], &y = spec.operands[2];
    if (a.dtype != b.dtype || a.dtype != y.dtype || alpha != std::trunc(alpha))
        return why = "whole numbers of several dtypes, or an alpha that is none", nullptr;
    if (!broadcasts(a, y.ndim, y.sizes) || !broadcasts(b, y.ndim, y.sizes))
        return why = "operands that do not broadcast to the output's shape", nullptr;
    Space space = make_space({&y, &a, &b}, y.ndim, y.sizes);
    if (a.dtype == I64) return new WholeAdd<int64_t>(space, int64_t(alpha));
    return new WholeAdd<int32_t>(space, int32_t(alpha));
}

Call* bind_add(const CallSpec& spec, std::string& why) {
    auto alpha = Reader(spec).take<double>();
    if (spec.n_in != 2 || spec.n_out != 1) return why = "other than two inputs, one output", nullptr;
    if (whole(spec.operands[0]) || whole(spec.operands[1]) || whole(spec.operands[2]))
        return bind_whole_add(spec, alpha, why);
    if (alpha == 1) return bind_program(spec, {{{"add", {input(0), input(1)}}}, {0}}, why);
    return bind_program(
        spec, {{{"mul", {input(1), literal(alpha)}}, {"add", {input(0), result(0)}}}, {1}}, why);
}

Call* bind_bias_add(const CallSpec& spec, std::string& why) {
    return bind_program(spec, {{{"add", {input(0), input(1)}}}, {0}}, why);
}

Call* bind_relu(const CallSpec& spec, std::string& why) {
    return bind_program(spec, {{{"relu", {input(0)}}}, {0}}, why);
}

// dy where x is above the threshold, and where it is NaN.
Call* bind_relu_bwd(const CallSpec& spec, std::string& why) {
    auto threshold = Reader(spec).take<double>();
    if (threshold == 0) return bind_program(spec, {{{"relu_bwd", {input(0), input(1)}}}, {0}}, why);
    return bind_program(spec,
                        {{{"le", {input(1), literal(threshold)}},
                          {"where", {result(0), literal(0), input(0)}}},
                         {1}},
                        why);
}

Register add(8, bind_add), bias_add(9, bind_bias_add), relu(10, bind_relu),
    relu_bwd(11, bind_relu_bwd);

}  // namespace

}  // namespace shardwright
