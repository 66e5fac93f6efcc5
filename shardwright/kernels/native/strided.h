// Walking several operands together, element by element, when the order does not matter.
//
// Comes in: operands that broadcast to one shape. Goes out: a `Space` with as few dimensions as do
// it: those of one element left out, the order that of the first operand's memory, neighbours
// joined where every operand allows it. What always holds: the first operand is walked with falling
// strides, so that the last dimension is the one that its memory follows most closely.
#pragma once

#include "abi.h"

#include <algorithm>
#include <array>
#include <vector>

namespace shardwright {

using Strides = std::array<int64_t, MAX_DIMS>;

struct Space {
    int dims = 0;
    int64_t sizes[MAX_DIMS];
    std::vector<Strides> strides;  // by operand, in elements; 0 where it is broadcast
    int64_t count = 1;

    int64_t inner() const { return dims ? sizes[dims - 1] : 1; }
    // Elements from each operand's beginning to the index-th place of the dimensions [0, end).
    void offsets(int64_t index, int end, int64_t* result) const {
        std::fill(result, result + strides.size(), 0);
        for (int d = end - 1; d >= 0; d--) {
            int64_t at = index % sizes[d];
            index /= sizes[d];
            for (size_t k = 0; k < strides.size(); k++) result[k] += at * strides[k][d];
        }
    }
};

// Whether `operand` can be read as one of shape `sizes`.
inline bool broadcasts(const Operand& operand, int ndim, const int64_t* sizes) {
    if (operand.ndim > ndim) return false;
    for (int i = 0; i < operand.ndim; i++) {
        int64_t full = sizes[ndim - operand.ndim + i];
        if (operand.sizes[i] != full && operand.sizes[i] != 1) return false;
    }
    return true;
}

// The dimensions that have more than one element, in the given order.
inline Space plain_space(const std::vector<const Operand*>& operands, int ndim,
                         const int64_t* sizes) {
    Space space;
    space.strides.resize(operands.size());
    for (int d = 0; d < ndim; d++) {
        space.count *= sizes[d];
        if (sizes[d] == 1) continue;
        for (size_t k = 0; k < operands.size(); k++) {
            int i = d - (ndim - operands[k]->ndim);
            bool moves = i >= 0 && operands[k]->sizes[i] != 1;
            space.strides[k][space.dims] = moves ? operands[k]->strides[i] : 0;
        }
        space.sizes[space.dims++] = sizes[d];
    }
    return space;
}

// Puts the dimensions in the order of falling strides of the first operand, then of the others.
inline void sort_dims(Space& space) {
    auto swap = [&](int a, int b) {
        std::swap(space.sizes[a], space.sizes[b]);
        for (Strides& s : space.strides) std::swap(s[a], s[b]);
    };
    auto outer = [&](int a, int b) {  // whether a is to stand before b
        for (const Strides& s : space.strides)
            if (s[a] != s[b]) return s[a] > s[b];
        return false;
    };
    for (int i = 1; i < space.dims; i++)
        for (int j = i; j > 0 && outer(j, j - 1); j--) swap(j, j - 1);
}

// Joins neighbours whose elements follow one another in every operand.
inline void join_dims(Space& space) {
    int last = 0;
    for (int d = 1; d < space.dims; d++) {
        bool follow = std::all_of(space.strides.begin(), space.strides.end(), [&](const Strides& s) {
            return s[last] == s[d] * space.sizes[d];
        });
        if (follow) space.sizes[last] *= space.sizes[d];
        else space.sizes[++last] = space.sizes[d];
        for (Strides& s : space.strides) s[last] = s[d];
    }
    if (space.dims) space.dims = last + 1;
}

// The space of `operands`, each of which broadcasts to the shape `sizes`.
inline Space make_space(const std::vector<const Operand*>& operands, int ndim,
                        const int64_t* sizes) {
    Space space = plain_space(operands, ndim, sizes);
    sort_dims(space);
    join_dims(space);
    return space;
}

// The places of a space's dimensions [0, end) one after another, from the first-th on; `offsets` are
// each operand's elements from its beginning.
class Places {
   public:
    Places(const Space& space, int end, int64_t first) : space_(space), end_(end) {
        for (int d = end - 1; d >= 0; d--) {
            at_[d] = first % space.sizes[d];
            first /= space.sizes[d];
            for (size_t k = 0; k < space.strides.size(); k++)
                offsets[k] += at_[d] * space.strides[k][d];
        }
    }

    void next() {
        for (int d = end_ - 1; d >= 0; d--) {
            bool over = ++at_[d] == space_.sizes[d];
            int64_t by = over ? 1 - space_.sizes[d] : 1;
            for (size_t k = 0; k < space_.strides.size(); k++)
                offsets[k] += by * space_.strides[k][d];
            if (!over) return;
            at_[d] = 0;
        }
    }

    int64_t offsets[MAX_DIMS] = {};  // for at most so many operands

   private:
    const Space& space_;
    int end_;
    int64_t at_[MAX_DIMS] = {};
};

}  // namespace shardwright
