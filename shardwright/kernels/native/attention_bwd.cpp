// Kind attention_bwd: gradients of q, k and v from y and the logarithms that attention kept.
//
// Of a block of scores: p = exp(score - lse), dv += p' dy, ds = p (dy v' - sum(dy y)) scale,
// dq += ds k, dk += ds' q. A thread does whole heads, with keys and values packed once; gradients
// are summed in their own memory, in one order, so that threads do not change a result.
#include "attention.h"
#include "parallel.h"

#include <memory>

namespace shardwright {
namespace attention {
namespace {

constexpr int32_t ATTENTION_BWD = 29;
constexpr int64_t KEYS = 192, ROWS = 64, FEW_ROWS = 32;  // of a block

template <class T> struct Head {
    const Shape& s;
    View<const T> dy, q, k, v, y, lse;
    View<T> dq, dk, dv;
    const char* mask;
    int64_t b, h;
};

template <class T> struct Room {
    T *keys, *values, *scores, *slopes, *lines, *workspace;
    int64_t step;  // from row to row of scores and slopes

    static size_t bytes(const Shape& s) {
        return packed_bytes<T>(s.depth, s.keys) + packed_bytes<T>(s.width, s.keys) + 128 +
               2 * Pieces::bytes<T>(ROWS * key_step<T>(s.keys, KEYS)) + Pieces::bytes<T>(ROWS) +
               WORKSPACE<T>;
    }
    Room(const Shape& s, char* at) : step(key_step<T>(s.keys, KEYS)) {
        Pieces pieces{at};
        keys = pieces.take<T>(packed_bytes<T>(s.depth, s.keys) / sizeof(T));
        values = pieces.take<T>(packed_bytes<T>(s.width, s.keys) / sizeof(T));
        scores = pieces.take<T>(ROWS * step);
        slopes = pieces.take<T>(ROWS * step);
        lines = pieces.take<T>(ROWS);
        workspace = pieces.take<T>(WORKSPACE<T> / sizeof(T));
    }
};

template <class T> T dot(const T* a, const T* b, int64_t n) {
    simd::Vec<T> sums{};
    int64_t i = 0;
    for (; i + simd::LANES<T> <= n; i += simd::LANES<T>)
        sums += simd::load(a + i) * simd::load(b + i);
    T sum = simd::sum_lanes(sums);
    for (; i < n; i++) sum += a[i] * b[i];
    return sum;
}

// scores become p; slopes, dy v', become ds.
template <class T>
void slope(const Head<T>& head, const Block& block, const Room<T>& room) {
    T scale = T(head.s.scale);
    using simd::Vec;
    for (int64_t i = 0; i < block.rows; i++) {
        T *p = room.scores + i * room.step, *ds = room.slopes + i * room.step;
        T lse = head.lse.at[(block.row + i) * head.lse.row], line = room.lines[i];
        simd::map(block.keys, [&](Vec<T> x) { return exp_score(x - lse); }, p, p);
        auto slope_of = [&](Vec<T> x, Vec<T> d) { return x * (d - line) * scale; };
        simd::map(block.keys, slope_of, ds, p, ds);
    }
}

template <class T> View<T> from_row(const View<T>& v, int64_t row) {
    return {v.at + row * v.row, v.row};
}

template <class T>
void some_rows(const Head<T>& head, int64_t row, int64_t rows, const Room<T>& room) {
    const Shape& s = head.s;
    View<const T> dy = from_row(head.dy, row), y = from_row(head.y, row), q = from_row(head.q, row);
    View<T> dq = from_row(head.dq, row);
    for (int64_t i = 0; i < rows; i++) {
        room.lines[i] = dot(dy.at + i * dy.row, y.at + i * y.row, s.width);
        std::memset(dq.at + i * dq.row, 0, s.depth * sizeof(T));
    }
    int64_t seen = keys_seen(s, row + rows), step = room.step;
    for (int64_t key = 0; key < seen; key += step) {
        int64_t keys = std::min(step, seen - key);
        Block block{row, rows, key, keys};
        score(s, block, head.q, room.keys, head.mask, head.b, head.h, room.scores, step);
        packed_product<T>(rows, keys, s.width, dy.at, dy.row, room.values, s.keys, key, room.slopes,
                          step);
        slope(head, block, room);
        T* w = room.workspace;
        product<T>(keys, s.width, rows, room.scores, 1, step, dy, from_row(head.dv, key), true, w);
        product<T>(rows, s.depth, keys, room.slopes, step, 1, from_row(head.k, key), dq, true, w);
        product<T>(keys, s.depth, rows, room.slopes, 1, step, q, from_row(head.dk, key), true, w);
    }
}

template <class T> void whole_head(const Head<T>& head, const Room<T>& room) {
    const Shape& s = head.s;
    pack_keys(s, head.k, room.keys);
    pack(head.v.at, 1, head.v.row, s.width, s.keys, room.values);
    for (int64_t j = 0; j < s.keys; j++) {
        std::memset(head.dk.at + j * head.dk.row, 0, s.depth * sizeof(T));
        std::memset(head.dv.at + j * head.dv.row, 0, s.width * sizeof(T));
    }
    int64_t step = s.causal || s.queries < 2 * ROWS ? FEW_ROWS : ROWS;
    for (int64_t row = 0; row < s.queries; row += step)
        some_rows(head, row, std::min(step, s.queries - row), room);
}

constexpr int INPUTS = 6;  // dy, q, k, v, y, lse; then the mask, then dq, dk, dv

template <class T> struct AttentionBwd : Call {
    Shape shape;
    Strides strides[INPUTS + 4];

    template <class U> View<U> at(char* const* data, int i, int64_t b, int64_t h) const {
        return view<U>(data[i], strides[i], b, h);
    }

    void run(char* const* data, Context& context) override {
        const Shape& s = shape;
        int64_t items = s.batch * s.heads;
        int64_t work = items * s.queries * s.keys * (s.depth + s.width) * 2;
        int threads = std::max(1, int(std::min<int64_t>(threads_for(work, context), items)));
        in_parallel(threads, [&](int t, int all) {
            Room<T> room(s, scratch(Room<T>::bytes(s)));
            for (int64_t i = items * t / all; i < items * (t + 1) / all; i++) {
                int64_t b = i / s.heads, h = i % s.heads;
                whole_head(Head<T>{s, at<const T>(data, 0, b, h), at<const T>(data, 1, b, h),
                                   at<const T>(data, 2, b, h), at<const T>(data, 3, b, h),
                                   at<const T>(data, 4, b, h), at<const T>(data, 5, b, h),
                                   at<T>(data, 7, b, h), at<T>(data, 8, b, h),
                                   at<T>(data, 9, b, h), data[6], b, h},
                           room);
            }
        });
    }
};

template <class T> Call* make(const CallSpec& spec, const Shape& shape) {
    auto call = std::make_unique<AttentionBwd<T>>();
    call->shape = shape;
    for (int i = 0; i < INPUTS + 4; i++)
        if (i != INPUTS) call->strides[i] = strides_of(spec.operands[i]);
    return call.release();
}

Call* bind(const CallSpec& spec, std::string& why) {
    Reader reader(spec);
    Shape shape{};
    shape.causal = reader.take<uint8_t>();
    shape.scale = reader.take<double>();
    const Operand* o = spec.operands;
    if (spec.n_in != INPUTS + 1 || spec.n_out != 3) {
        why = "attention_bwd has seven inputs and three outputs";
        return nullptr;
    }
    const Operand& q = o[1];
    if (!shape_of(q, o[2], o[3], o[6], shape, why)) return nullptr;
    if (!fits(o[0], q, shape.queries, shape.width) || !fits(o[4], q, shape.queries, shape.width) ||
        !fits(o[5], q, shape.queries)) {
        why = "dy, y or lse does not fit q, or has gaps in its last dimension";
        return nullptr;
    }
    if (!fits(o[7], q, shape.queries, shape.depth) || !fits(o[8], q, shape.keys, shape.depth) ||
        !fits(o[9], q, shape.keys, shape.width)) {
        why = "the gradients do not fit q, k and v, or have gaps in their last dimension";
        return nullptr;
    }
    return q.dtype == F32 ? make<float>(spec, shape) : make<double>(spec, shape);
}

Register attention_bwd(ATTENTION_BWD, bind);

}  // namespace
}  // namespace attention
}  // namespace shardwright
