// Kind attention: y = softmax(scale q k' + mask) v, and the logarithms of the sums of exponentials.
//
// A thread does whole heads, or some rows of one where heads are few: keys packed once, then for
// each block of queries the keys block by block, with the largest score so far taken off (online
// softmax), so that scores stay in the second cache. A row that sees no key gives zeros and lse 0,
// as torch's kernel does.
#include "attention.h"

#include <memory>

#include "parallel.h"

namespace shardwright {
namespace attention {

bool fits(const Operand& o, const Operand& q, int64_t rows, int64_t columns) {
    return o.ndim == 4 && o.dtype == q.dtype && o.sizes[0] == q.sizes[0] &&
           o.sizes[1] == q.sizes[1] && o.sizes[2] == rows && o.sizes[3] == columns &&
           (o.strides[3] == 1 || columns <= 1);
}

bool fits(const Operand& o, const Operand& q, int64_t rows) {
    return o.ndim == 3 && o.dtype == q.dtype && o.sizes[0] == q.sizes[0] &&
           o.sizes[1] == q.sizes[1] && o.sizes[2] == rows;
}

// The mask's strides over [batch, heads, queries, keys]; false where it does not broadcast there.
bool broadcast_mask(const Operand& mask, const Operand& q, Shape& s) {
    const int64_t sizes[4] = {s.batch, s.heads, s.queries, s.keys};
    int64_t strides[4] = {};
    if (mask.ndim > 4 || (mask.dtype != q.dtype && mask.dtype != BOOL)) return false;
    for (int i = 0, to = 4 - mask.ndim; i < mask.ndim; i++, to++) {
        if (mask.sizes[i] == 1) continue;
        if (mask.sizes[i] != sizes[to]) return false;
        strides[to] = mask.strides[i];
    }
    s.mask = {true, mask.dtype == BOOL, {strides[0], strides[1], strides[2], strides[3]}};
    return true;
}

bool shape_of(const Operand& q, const Operand& k, const Operand& v, const Operand& mask, Shape& s,
              std::string& why) {
    if (q.ndim != 4 || k.ndim != 4 || v.ndim != 4 || (q.dtype != F32 && q.dtype != F64)) {
        why = "q, k and v are not four-dimensional f32 or f64";
        return false;
    }
    s.batch = q.sizes[0], s.heads = q.sizes[1], s.queries = q.sizes[2], s.keys = k.sizes[2];
    s.depth = q.sizes[3], s.width = v.sizes[3];
    if (!fits(q, q, s.queries, s.depth) || !fits(k, q, s.keys, s.depth) ||
        !fits(v, q, s.keys, s.width)) {
        why = "q, k and v differ in batch, heads or depth, or their last dimension has gaps";
        return false;
    }
    if (mask.present() && !broadcast_mask(mask, q, s)) {
        why = "the mask is neither q's dtype nor bool, or does not broadcast to the scores";
        return false;
    }
    return true;
}

namespace {

constexpr int32_t ATTENTION = 28;
constexpr int64_t KEYS = 256;  // of a block, at most about
constexpr int64_t ROWS = 64, FEW_ROWS = 32;

// Of short or causal attention fewer, where larger blocks would compute more that is masked.
int64_t row_step(const Shape& s) { return s.causal || s.queries < 2 * ROWS ? FEW_ROWS : ROWS; }

// How a row stands: the largest score so far, and the sum of exponentials of what is below it.
template <class T> struct Row {
    T largest, sum;
};

// scores become exp(score - largest); y, the sum so far, is scaled to the new largest.
template <class T> void absorb(T* scores, int64_t keys, Row<T>& row, T* y, int64_t width) {
    using simd::Vec;
    constexpr int L = simd::LANES<T>;
    Vec<T> top = simd::set<Vec<T>>(row.largest);
    int64_t j = 0;
    for (; j + L <= keys; j += L) top = simd::maximum(top, simd::load(scores + j));
    T largest = simd::max_lanes(top);
    for (; j < keys; j++)
        if (scores[j] > largest || scores[j] != scores[j]) largest = scores[j];
    if (largest == -INFINITY) {  // no key is seen yet
        std::memset(scores, 0, keys * sizeof(T));
        return;
    }
    if (largest != row.largest) {
        T factor = std::exp(row.largest - largest);
        row.sum *= factor;
        if (y) simd::map(width, [&](Vec<T> v) { return v * factor; }, y, y);
        row.largest = largest;
    }
    Vec<T> sums{};
    for (j = 0; j + L <= keys; j += L) {
        Vec<T> e = exp_score(simd::load(scores + j) - largest);
        simd::store(scores + j, e);
        sums += e;
    }
    if (j < keys) {
        Vec<T> e = exp_score(simd::load_part(scores + j, keys - j) - largest);
        simd::store_part(scores + j, e, keys - j);
        for (int64_t i = 0; i < keys - j; i++) row.sum += e[i];
    }
    row.sum += simd::sum_lanes(sums);
}

template <class T> struct Head {
    const Shape& s;
    View<const T> q, k, v;
    View<T> y, lse;
    const char* mask;
    int64_t b, h;
};

template <class T> struct Room {
    T *keys, *scores, *workspace;
    Row<T>* rows;

    static size_t bytes(const Shape& s) {
        return packed_bytes<T>(s.depth, s.keys) + 64 + WORKSPACE<T> +
               Pieces::bytes<T>(ROWS * key_step<T>(s.keys, KEYS)) + Pieces::bytes<Row<T>>(ROWS);
    }
    Room(const Shape& s, char* at) {
        Pieces pieces{at};
        keys = pieces.take<T>(packed_bytes<T>(s.depth, s.keys) / sizeof(T));
        scores = pieces.take<T>(ROWS * key_step<T>(s.keys, KEYS));
        workspace = pieces.take<T>(WORKSPACE<T> / sizeof(T));
        rows = pieces.take<Row<T>>(ROWS);
    }
};

template <class T>
void finish_row(const Head<T>& head, int64_t i, const Row<T>& row) {
    bool blind = row.largest == -INFINITY;
    if (head.lse.at) head.lse.at[i * head.lse.row] = blind ? T(0) : row.largest + std::log(row.sum);
    T* y = head.y.at + i * head.y.row;
    if (blind) {  // not 0 * y: a value that is not seen may be NaN or inf
        std::memset(y, 0, head.s.width * sizeof(T));
        return;
    }
    T factor = T(1) / row.sum;
    simd::map(head.s.width, [&](simd::Vec<T> v) { return v * factor; }, y, y);
}

template <class T>
void some_rows(const Head<T>& head, int64_t row, int64_t rows, const Room<T>& room) {
    const Shape& s = head.s;
    int64_t seen = keys_seen(s, row + rows), step = key_step<T>(s.keys, KEYS);
    View<T> y{head.y.at + row * head.y.row, head.y.row};
    for (int64_t i = 0; i < rows; i++) {
        room.rows[i] = {T(-INFINITY), T(0)};
        if (!seen) std::memset(y.at + i * y.row, 0, s.width * sizeof(T));
    }
    for (int64_t key = 0; key < seen; key += step) {
        Block block{row, rows, key, std::min(step, seen - key)};
        score(s, block, head.q, room.keys, head.mask, head.b, head.h, room.scores, step);
        for (int64_t i = 0; i < rows; i++)
            absorb(room.scores + i * step, block.keys, room.rows[i],
                   key ? y.at + i * y.row : nullptr, s.width);
        View<const T> values{head.v.at + key * head.v.row, head.v.row};
        product<T>(rows, s.width, block.keys, room.scores, step, 1, values, y, key > 0,
                   room.workspace);
    }
    for (int64_t i = 0; i < rows; i++) finish_row(head, row + i, room.rows[i]);
}

template <class T> struct Attention : Call {
    Shape shape;
    Strides q, k, v, y, lse;

    // Rows [row, end) of a head.
    void part(char* const* data, int64_t item, int64_t row, int64_t end) const {
        const Shape& s = shape;
        int64_t b = item / s.heads, h = item % s.heads;
        Room<T> room(s, scratch(Room<T>::bytes(s)));
        View<T> sums = data[5] ? view<T>(data[5], lse, b, h) : View<T>{};
        Head<T> head{s, view<const T>(data[0], q, b, h), view<const T>(data[1], k, b, h),
                     view<const T>(data[2], v, b, h), view<T>(data[4], y, b, h), sums,
                     data[3], b, h};
        pack_keys(s, head.k, room.keys);
        for (int64_t step = row_step(s); row < end; row += step)
            some_rows(head, row, std::min(step, end - row), room);
    }

    void run(char* const* data, Context& context) override {
        const Shape& s = shape;
        int64_t items = s.batch * s.heads;
        int threads = threads_for(items * s.queries * s.keys * (s.depth + s.width), context);
        int64_t parts = items && items < threads ? threads / items : 1, all = items * parts;
        in_parallel(threads, [&](int t, int of) {
            for (int64_t i = all * t / of; i < all * (t + 1) / of; i++) {
                int64_t item = i / parts, part_of = i % parts;
                part(data, item, s.queries * part_of / parts, s.queries * (part_of + 1) / parts);
            }
        });
    }
};

template <class T> Call* make(const CallSpec& spec, const Shape& shape) {
    auto call = std::make_unique<Attention<T>>();
    const Operand* o = spec.operands;
    call->shape = shape;
    call->q = strides_of(o[0]), call->k = strides_of(o[1]), call->v = strides_of(o[2]);
    call->y = strides_of(o[4]);
    if (o[5].present()) call->lse = strides_of(o[5]);
    return call.release();
}

Call* bind(const CallSpec& spec, std::string& why) {
    Reader reader(spec);
    Shape shape{};
    shape.causal = reader.take<uint8_t>();
    shape.scale = reader.take<double>();
    const Operand* o = spec.operands;
    if (spec.n_in != 4 || spec.n_out != 2) {
        why = "attention has four inputs and two outputs";
        return nullptr;
    }
    if (!shape_of(o[0], o[1], o[2], o[3], shape, why)) return nullptr;
    if (!fits(o[4], o[0], shape.queries, shape.width) ||
        (o[5].present() && !fits(o[5], o[0], shape.queries))) {
        why = "the outputs do not fit q, or the first has gaps in its last dimension";
        return nullptr;
    }
    return o[0].dtype == F32 ? make<float>(spec, shape) : make<double>(spec, shape);
}

Register attention(ATTENTION, bind);

}  // namespace
}  // namespace attention
}  // namespace shardwright
