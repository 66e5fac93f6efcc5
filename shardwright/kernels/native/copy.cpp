// Copies between any strides and dtypes, fills, and concatenations.
//
// What always holds: the output's memory is written in its own order, line after line; where the
// input's runs across that, both are walked in square blocks, turned over in registers.
#include "convert.h"
#include "rows.h"
#include "strided.h"
#include "vector.h"

#include <memory>

namespace shardwright {

namespace {

constexpr int64_t PIECE = 16384;  // elements of a long row that a thread takes at a time
constexpr int64_t SHORT = 8;      // a row so short is not worth a call of its own

// y[i * step_y + j] = x[j * step_x + i] for i below m and j below n.
template <class T>
void turn_over(char* y_bytes, int64_t step_y, const char* x_bytes, int64_t step_x, int64_t m,
               int64_t n) {
    constexpr int N = simd::LANES<T>;
    T* y = reinterpret_cast<T*>(y_bytes);
    auto* x = reinterpret_cast<const T*>(x_bytes);
    int64_t whole_m = m / N * N, whole_n = n / N * N;
    for (int64_t i = 0; i < whole_m; i += N)
        for (int64_t j = 0; j < whole_n; j += N) {
            simd::Vec<T> v[N];
#pragma GCC unroll 16
            for (int k = 0; k < N; k++) v[k] = simd::load(x + (j + k) * step_x + i);
            simd::turn<T>(v);
#pragma GCC unroll 16
            for (int k = 0; k < N; k++) simd::store(y + (i + k) * step_y + j, v[k]);
        }
    auto rest = [&](int64_t from_i, int64_t from_j, int64_t to_i) {
        for (int64_t i = from_i; i < to_i; i++)
            for (int64_t j = from_j; j < n; j++)
                std::memcpy(y + i * step_y + j, x + j * step_x + i, sizeof(T));
    };
    rest(0, whole_n, whole_m);
    rest(whole_m, 0, m);
}

using Turn = void (*)(char*, int64_t, const char*, int64_t, int64_t, int64_t);

// One copy: from x, which broadcasts, to y.
class Copy {
   public:
    Copy(const Operand& y, const Operand& x)
        : space_(make_space({&y, &x}, y.ndim, y.sizes)), run_(runner(y.dtype, x.dtype)),
          y_size_(element_size(y.dtype)), x_size_(element_size(x.dtype)) {
        if (y.dtype == x.dtype) find_turn();
        if (!turn_) avoid_short_rows();
    }

    bool known() const { return run_; }

    void run(char* y, const char* x, int threads) const {
        in_parallel(threads, [&](int thread, int all) {
            if (turn_) turn_part(y, x, thread, all);
            else copy_part(y, x, thread, all);
        });
    }
    int64_t count() const { return space_.count; }

   private:
    Space space_;
    Run run_;
    Turn turn_ = nullptr;
    int64_t y_size_, x_size_;

    int64_t inner(int operand) const {
        return space_.dims ? space_.strides[operand][space_.dims - 1] : 1;
    }

    void swap_dims(int a, int b) {
        std::swap(space_.sizes[a], space_.sizes[b]);
        for (Strides& s : space_.strides) std::swap(s[a], s[b]);
    }

    // Puts the dimension along which x's memory runs before the last, along which y's does.
    void find_turn() {
        int last = space_.dims - 1, lanes = int(simd::BYTES / std::max<int64_t>(1, y_size_));
        if (y_size_ != 4 && y_size_ != 8) return;
        if (last < 1 || inner(0) != 1 || inner(1) == 1 || space_.sizes[last] < lanes) return;
        for (int d = 0; d < last; d++)
            if (space_.strides[1][d] == 1 && space_.sizes[d] >= lanes) {
                std::rotate(space_.sizes + d, space_.sizes + d + 1, space_.sizes + last);
                for (Strides& s : space_.strides)
                    std::rotate(s.begin() + d, s.begin() + d + 1, s.begin() + last);
                turn_ = y_size_ == 4 ? turn_over<float> : turn_over<double>;
                return;
            }
    }

    void avoid_short_rows() {
        int last = space_.dims - 1;
        if (last < 1 || space_.sizes[last] >= SHORT) return;
        int longest = int(std::max_element(space_.sizes, space_.sizes + last) - space_.sizes);
        if (space_.sizes[longest] >= 4 * space_.sizes[last]) swap_dims(longest, last);
    }

    void copy_part(char* y, const char* x, int thread, int threads) const {
        int64_t inner_size = space_.inner(), pieces = (inner_size + PIECE - 1) / PIECE;
        int64_t step_y = inner(0), step_x = inner(1);
        rows::Span span = rows::share(space_.count / inner_size * pieces, thread, threads);
        if (span.begin >= span.end) return;
        Places row(space_, space_.dims - 1, span.begin / pieces);
        int64_t piece = span.begin % pieces;
        for (int64_t item = span.begin; item < span.end; item++) {
            int64_t from = piece * PIECE;
            run_(y + (row.offsets[0] + from * step_y) * y_size_, step_y,
                 x + (row.offsets[1] + from * step_x) * x_size_, step_x,
                 std::min(PIECE, inner_size - from));
            if (++piece == pieces) {
                piece = 0;
                row.next();
            }
        }
    }

    void turn_part(char* y, const char* x, int thread, int threads) const {
        int last = space_.dims - 1, lanes = int(simd::BYTES / y_size_);
        int64_t m = space_.sizes[last - 1], n = space_.sizes[last];
        int64_t step_y = space_.strides[0][last - 1], step_x = space_.strides[1][last];
        int64_t bands = (m + lanes - 1) / lanes;
        rows::Span span = rows::share(space_.count / (m * n) * bands, thread, threads);
        for (int64_t item = span.begin; item < span.end; item++) {
            int64_t at[2], i = item % bands * lanes;
            space_.offsets(item / bands, last - 1, at);
            turn_(y + (at[0] + i * step_y) * y_size_, step_y, x + (at[1] + i) * x_size_, step_x,
                  std::min<int64_t>(lanes, m - i), n);
        }
    }
};

struct CopyCall : Call {
    Copy copy;
    CopyCall(const Operand& y, const Operand& x) : copy(y, x) {}

    void run(char* const* data, Context& context) override {
        copy.run(data[1], data[0], rows::threads_for(context, copy.count()));
    }
};

Call* bind_copy(const CallSpec& spec, std::string& why) {
    const Operand &x = spec.operands[0], &y = spec.operands[1];
    if (!runner(y.dtype, x.dtype)) return why = "no conversion between these dtypes", nullptr;
    if (!broadcasts(x, y.ndim, y.sizes))
        return why = "the input does not broadcast to the output's shape", nullptr;
    return new CopyCall(y, x);
}

// A number as an operand without dimensions.
Operand number_operand(int32_t dtype) {
    Operand operand{};
    operand.dtype = dtype;
    return operand;
}

struct FillCall : Call {
    Copy copy;
    char element[16] = {};
    FillCall(const Operand& y, double value) : copy(y, number_operand(y.dtype)) {
        runner(y.dtype, F64)(element, 1, reinterpret_cast<const char*>(&value), 1, 1);
    }

    void run(char* const* data, Context& context) override {
        copy.run(data[0], element, rows::threads_for(context, copy.count()));
    }
};

Call* bind_fill(const CallSpec& spec, std::string& why) {
    if (!runner(spec.operands[0].dtype, F64)) return why = "no numbers of this dtype", nullptr;
    return new FillCall(spec.operands[0], Reader(spec).take<double>());
}

struct ConcatCall : Call {
    struct Part {
        Copy copy;
        int input;
        int64_t offset;  // in bytes of the output
    };
    std::vector<Part> parts;
    int64_t count = 0;
    int output;

    void run(char* const* data, Context& context) override {
        int threads = rows::threads_for(context, count);
        for (const Part& part : parts)
            part.copy.run(data[output] + part.offset, data[part.input], threads);
    }
};

Call* bind_concat(const CallSpec& spec, std::string& why) {
    const Operand& y = spec.operands[spec.n_in];
    int dim = Reader(spec).take<int32_t>();
    if (dim < 0) dim += y.ndim;
    if (dim < 0 || dim >= y.ndim) return why = "no such dimension", nullptr;
    auto call = std::make_unique<ConcatCall>();
    call->output = spec.n_in;
    call->count = y.numel();
    int64_t begin = 0;
    for (int k = 0; k < spec.n_in; k++) {
        const Operand& x = spec.operands[k];
        Operand part = y;
        if (x.ndim != y.ndim) return why = "an input with other dimensions", nullptr;
        part.sizes[dim] = x.sizes[dim];
        if (!std::equal(x.sizes, x.sizes + x.ndim, part.sizes) || !runner(y.dtype, x.dtype))
            return why = "an input whose shape or dtype does not fit", nullptr;
        call->parts.push_back({Copy(part, x), k, begin * y.strides[dim] * element_size(y.dtype)});
        begin += x.sizes[dim];
    }
    if (begin != y.sizes[dim]) return why = "inputs of another length", nullptr;
    return call.release();
}

Register copies(1, bind_copy), fills(2, bind_fill), concats(4, bind_concat);

}  // namespace

}  // namespace shardwright
