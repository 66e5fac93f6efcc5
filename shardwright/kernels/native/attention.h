// What attention and its gradient share: how operands lie, and a block of scores.
//
// Queries, keys and values are [batch, heads, length, depth] with any strides but consecutive
// depth, so that views of one fused projection need no copy. A block of scores is some queries by
// some keys; masked ones are -inf in it.
#pragma once

#include <cmath>
#include <string>

#include "abi.h"
#include "gemm.h"
#include "vector_math.h"

namespace shardwright::attention {

struct Strides {
    int64_t batch = 0, head = 0, row = 0, column = 0;
};
inline Strides strides_of(const Operand& o) {
    const int64_t* s = o.strides;
    return {s[0], s[1], s[2], o.ndim > 3 ? s[3] : 0};
}

// e^x of a score less the largest, 0 where that is no normal number: computing denormals is slow,
// and among masked scores there are many.
template <class V> SIMD V exp_score(V x) {
    constexpr auto LEAST = sizeof(simd::Element<V>) == 4 ? simd::Element<V>(-87) : -708;
    auto gone = x < LEAST;
    V e = simd::exp(gone ? V{} : x);
    return gone ? V{} : e;
}

// A head's matrix or vector.
template <class T> struct View {
    T* at = nullptr;
    int64_t row = 0;
};
template <class T> View<T> view(char* data, const Strides& s, int64_t b, int64_t h) {
    return {reinterpret_cast<T*>(data) + b * s.batch + h * s.head, s.row};
}

// What is added to scores, or says which of them count; sizes of 1 have stride 0.
struct Mask {
    bool there = false, boolean = false;
    Strides strides;
};

struct Shape {
    int64_t batch, heads, queries, keys, depth, width;  // width: of a value
    bool causal;
    double scale;
    Mask mask;
};

// Queries [row, row + rows), keys [key, key + keys).
struct Block {
    int64_t row, rows, key, keys;
};

// Keys that a block of queries can see at all.
inline int64_t keys_seen(const Shape& s, int64_t row_end) {
    return s.causal ? std::min(s.keys, row_end) : s.keys;
}

// How many keys are in a block: whole panels of the packed keys, in blocks of nearly equal size.
template <class T> int64_t key_step(int64_t keys, int64_t most) {
    int64_t width = panel_width<T>(keys);
    return std::max(width, ceil_div(ceil_div(keys, ceil_div(keys, most)), width) * width);
}

// scores[i][j] = mask's value at the block's row i, key j; added, or -inf where false.
template <class T>
void apply_mask(const Mask& m, const char* mask, int64_t b, int64_t h, const Block& block,
                T* scores, int64_t step) {
    const Strides& s = m.strides;
    int64_t begin = b * s.batch + h * s.head + block.row * s.row + block.key * s.column;
    for (int64_t i = 0; i < block.rows; i++, begin += s.row, scores += step) {
        if (m.boolean) {
            auto* keep = reinterpret_cast<const uint8_t*>(mask) + begin;
            for (int64_t j = 0; j < block.keys; j++)
                scores[j] = keep[j * s.column] ? scores[j] : T(-INFINITY);
        } else {
            auto* added = reinterpret_cast<const T*>(mask) + begin;
            for (int64_t j = 0; j < block.keys; j++) scores[j] += added[j * s.column];
        }
    }
}

template <class T> void apply_causal(const Block& block, T* scores, int64_t step) {
    for (int64_t i = 0; i < block.rows; i++) {
        int64_t first = std::max<int64_t>(0, block.row + i + 1 - block.key);
        for (int64_t j = first; j < block.keys; j++) scores[i * step + j] = T(-INFINITY);
    }
}

// A product of a block with operands of which `packed` has `columns` columns in all.
template <class T>
void packed_product(int64_t m, int64_t n, int64_t k, const T* a, int64_t a_row, const T* packed,
                    int64_t columns, int64_t from, T* c, int64_t c_row) {
    Product<T> p{};
    p.m = m, p.n = n, p.k = k, p.a = a, p.a_row = a_row, p.a_column = 1;
    p.panel = panel_width<T>(columns), p.packed = packed + from * k;
    p.c = c, p.c_row = c_row;
    multiply<T>(p, whole(p), nullptr);
}

// c (+)= a b, with a [m, k] of any strides, b [k, n] and c by rows.
template <class T>
void product(int64_t m, int64_t n, int64_t k, const T* a, int64_t a_row, int64_t a_column,
             View<const T> b, View<T> c, bool add, T* workspace) {
    Product<T> p{};
    p.m = m, p.n = n, p.k = k, p.a = a, p.a_row = a_row, p.a_column = a_column;
    p.b = b.at, p.b_row = b.row, p.b_column = 1, p.c = c.at, p.c_row = c.row, p.add = add;
    multiply(p, whole(p), workspace);
}

// The keys, times the scale, as products with queries take them.
template <class T> void pack_keys(const Shape& s, View<const T> k, T* packed) {
    pack(k.at, 1, k.row, s.depth, s.keys, packed);
    T scale = T(s.scale);
    simd::map(packed_bytes<T>(s.depth, s.keys) / sizeof(T),
              [&](simd::Vec<T> v) { return v * scale; }, packed, packed);
}

// A block's scores, masked.
template <class T>
void score(const Shape& s, const Block& block, View<const T> q, const T* packed_keys,
           const char* mask, int64_t b, int64_t h, T* scores, int64_t step) {
    packed_product<T>(block.rows, block.keys, s.depth, q.at + block.row * q.row, q.row, packed_keys,
                      s.keys, block.key, scores, step);
    if (s.mask.there) apply_mask(s.mask, mask, b, h, block, scores, step);
    if (s.causal) apply_causal(block, scores, step);
}

// The shape that q [b, h, l, d], k and v [b, h, s, d] and a mask have; false with the reason.
bool shape_of(const Operand& q, const Operand& k, const Operand& v, const Operand& mask, Shape& s,
              std::string& why);
// Whether an operand is [batch, heads, rows, columns] of q's dtype with consecutive columns.
bool fits(const Operand& o, const Operand& q, int64_t rows, int64_t columns);
// Whether an operand is [batch, heads, rows] of q's dtype.
bool fits(const Operand& o, const Operand& q, int64_t rows);

}  // namespace shardwright::attention
