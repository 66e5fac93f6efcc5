// What kernels over rows share: how work is cut for threads, where a row begins in memory, which
// operands lie alike.
//
// What always holds: a cut depends on sizes and the number of threads only, so that sums joined in
// the threads' order come out the same at every run.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "abi.h"
#include "parallel.h"

namespace shardwright::rows {

// Elements, weighed by what one costs, below which a second thread costs more than it saves.
constexpr int64_t WORTH_A_THREAD = 20000;

inline int threads_for(const Context& context, int64_t work) {
    return int(std::max<int64_t>(1, std::min<int64_t>(context.threads, work / WORTH_A_THREAD)));
}

struct Span {
    int64_t begin, end;
};

// A thread's part of n items, cut at multiples of `grain`.
inline Span share(int64_t n, int thread, int threads, int64_t grain = 1) {
    int64_t grains = (n + grain - 1) / grain;
    auto cut = [&](int64_t t) { return std::min(n, grains * t / threads * grain); };
    return {cut(thread), cut(thread + 1)};
}

inline bool same_sizes(const Operand& a, const Operand& b) {
    return a.ndim == b.ndim && std::equal(a.sizes, a.sizes + a.ndim, b.sizes);
}

// Whether the elements lie at equal distances from the operands' beginnings.
inline bool alike(const Operand& a, const Operand& b) {
    if (!same_sizes(a, b)) return false;
    for (int i = 0; i < a.ndim; i++)
        if (a.sizes[i] > 1 && a.strides[i] != b.strides[i]) return false;
    return true;
}

// Whether the elements fill a piece of memory without gap or overlap, in whatever order.
inline bool dense(const Operand& a) {
    bool used[MAX_DIMS] = {};
    int64_t step = 1;
    for (int found = 0; found < a.ndim; found++) {
        int next = -1;
        for (int i = 0; i < a.ndim; i++)
            if (!used[i] && (a.sizes[i] == 1 || a.strides[i] == step)) next = i;
        if (next < 0) return false;
        used[next] = true;
        step *= a.sizes[next];
    }
    return true;
}

// The dimensions of one operand that are walked, in order, neighbours joined where they can be.
struct Walk {
    int dims = 0;
    int64_t count = 1;
    int64_t sizes[MAX_DIMS], strides[MAX_DIMS];

    void append(int64_t size, int64_t stride) {
        count *= size;
        if (size == 1) return;
        if (dims > 0 && strides[dims - 1] == size * stride) {
            sizes[dims - 1] *= size;
            strides[dims - 1] = stride;
            return;
        }
        sizes[dims] = size;
        strides[dims++] = stride;
    }

    // Elements from the operand's beginning to the n-th place.
    int64_t offset(int64_t n) const {
        if (dims == 0) return 0;
        int64_t at = 0;
        for (int i = dims - 1; i > 0; i--) {
            at += n % sizes[i] * strides[i];
            n /= sizes[i];
        }
        return at + n * strides[0];
    }
};

// A walk over the dimensions [begin, end).
inline Walk walk(const Operand& a, int begin, int end) {
    Walk w;
    for (int i = begin; i < end; i++) w.append(a.sizes[i], a.strides[i]);
    return w;
}

// Whether the last `dims` dimensions lie one element after another.
inline bool rows_contiguous(const Operand& a, int dims) {
    Walk w = walk(a, a.ndim - dims, a.ndim);
    return w.count <= 1 || (w.dims == 1 && w.strides[0] == 1);
}

inline bool floating(const Operand& a) { return a.dtype == F32 || a.dtype == F64; }

// A single number of whatever dtype.
inline double scalar(const char* at, int32_t dtype) {
    switch (dtype) {
        case F64: return *reinterpret_cast<const double*>(at);
        case F32: return *reinterpret_cast<const float*>(at);
        case I64: return double(*reinterpret_cast<const int64_t*>(at));
        default: return *reinterpret_cast<const int32_t*>(at);
    }
}

inline bool is_scalar(const Operand& a) {
    bool known = floating(a) || a.dtype == I64 || a.dtype == I32;
    return a.present() && known && a.numel() == 1;
}

template <class T> T* as(char* at) { return reinterpret_cast<T*>(at); }

}  // namespace shardwright::rows
