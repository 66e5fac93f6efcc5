// What every way to convolve shares: sizes, packed weights, and where pixels begin.
//
// What always holds: channels lie last in what is read and written, or the input is copied so that
// they do; pixels of a result lie at equal distances.
#pragma once

#include <cstdlib>
#include <new>

#include <sys/mman.h>

#include "abi.h"
#include "panels.h"
#include "rows.h"

namespace shardwright::conv {

using panels::Epilogue;
using panels::LANES;
using panels::up;
using panels::WIDTH;

struct Geometry {
    int64_t b, c, h, w, oc, oh, ow, kh, kw, sh, sw, ph, pw, dh, dw, groups;
    int activation;

    int64_t in_group() const { return c / groups; }
    int64_t out_group() const { return oc / groups; }
    int64_t depth() const { return kh * kw * in_group(); }  // numbers summed for one of a result
    int64_t pixels() const { return b * oh * ow; }
    int64_t macs() const { return pixels() * oc * depth(); }
    bool padded() const { return ph > 0 || pw > 0; }
    template <class T> int64_t panels_a_group() const {
        return up(out_group(), WIDTH<T>) / WIDTH<T>;
    }
};

// Memory for packed weights, in large pages where the system gives them: they are read from end to
// end at each run.
template <class T> struct Packed {
    T* at = nullptr;

    Packed() = default;
    Packed(const Packed&) = delete;
    ~Packed() { std::free(at); }

    void allocate(int64_t count) {
        constexpr size_t PAGE = size_t(1) << 21;
        size_t bytes = count * sizeof(T);
        bool large = bytes >= PAGE / 2;
        bytes = up(std::max<size_t>(bytes, 1), large ? PAGE : 64);
        std::free(at);
        at = static_cast<T*>(std::aligned_alloc(large ? PAGE : 64, bytes));
        if (!at) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
        if (large) madvise(at, bytes, MADV_HUGEPAGE);
#endif
    }
};

// Distances of an input's dimensions, in elements.
struct Steps {
    int64_t b, c, h, w;
};

inline Steps steps_of(const Operand& x) {
    return {x.strides[0], x.strides[1], x.strides[2], x.strides[3]};
}

// The distance from pixel to pixel in the order (b, h, w); -1 where there is none, or where
// channels do not lie one after another.
inline int64_t pixel_step(const Operand& y) {
    if (y.sizes[1] > 1 && y.strides[1] != 1) return -1;
    rows::Walk walk;
    for (int i : {0, 2, 3}) walk.append(y.sizes[i], y.strides[i]);
    if (walk.dims > 1) return -1;
    return walk.dims == 1 ? walk.strides[0] : y.sizes[1];
}

// A copy with zeros around it and channels last: [b][h + 2 ph][w + 2 pw][channels].
struct Frame {
    int64_t h, w, channels;
    int64_t numel(int64_t b) const { return b * h * w * channels; }
    Steps steps() const { return {h * w * channels, 1, w * channels, channels}; }
};

template <class T>
void copy_row(const T* x, const Steps& from, const Geometry& g, const Frame& frame, T* row) {
    T* inside = row + g.pw * frame.channels;
    std::memset(row, 0, g.pw * frame.channels * sizeof(T));
    std::memset(inside + g.w * frame.channels, 0, g.pw * frame.channels * sizeof(T));
    if (from.c == 1 && from.w == g.c && frame.channels == g.c) {
        std::memcpy(inside, x, g.w * g.c * sizeof(T));
        return;
    }
    if (from.c == 1) {
        for (int64_t w = 0; w < g.w; w++, inside += frame.channels) {
            for (int64_t c = 0; c < g.c; c++) inside[c] = x[w * from.w + c];
            for (int64_t c = g.c; c < frame.channels; c++) inside[c] = T(0);
        }
        return;
    }
    for (int64_t c = 0; c < frame.channels; c++)
        for (int64_t w = 0; w < g.w; w++)
            inside[w * frame.channels + c] = c < g.c ? x[w * from.w + c * from.c] : T(0);
}

// One thread's share of the copy.
template <class T>
void copy_into(const T* x, const Steps& from, const Geometry& g, const Frame& frame, T* to,
               int thread, int threads) {
    rows::Span span = rows::share(g.b * frame.h, thread, threads);
    for (int64_t i = span.begin; i < span.end; i++) {
        int64_t b = i / frame.h, h = i % frame.h - g.ph;
        T* row = to + i * frame.w * frame.channels;
        if (h < 0 || h >= g.h)
            std::memset(row, 0, frame.w * frame.channels * sizeof(T));
        else
            copy_row(x + b * from.b + h * from.h, from, g, frame, row);
    }
}

// Weights [group][panel][kh][kw][in][WIDTH], zeros where a panel is wider than its group.
template <class T> void pack(const T* w, const Operand& from, const Geometry& g, T* to) {
    const int64_t panel_count = g.panels_a_group<T>(), og = g.out_group();
    for (int64_t group = 0; group < g.groups; group++)
        for (int64_t p = 0; p < panel_count; p++)
            for (int64_t y = 0; y < g.kh; y++)
                for (int64_t x = 0; x < g.kw; x++)
                    for (int64_t c = 0; c < g.in_group(); c++)
                        for (int64_t j = 0; j < WIDTH<T>; j++) {
                            int64_t o = p * WIDTH<T> + j;
                            *to++ = o >= og ? T(0)
                                            : w[(group * og + o) * from.strides[0] +
                                                c * from.strides[1] + y * from.strides[2] +
                                                x * from.strides[3]];
                        }
}

// A convolution of one dtype; ways derive from it.
template <class T> struct Convolution : Call {
    Geometry g;
    Packed<T> stored;         // packed weights, where they are static
    const T* given = nullptr;  // weights as they lie, while it runs

    explicit Convolution(const Geometry& geometry) : g(geometry) {}

    bool is_static() const { return in(1).flags & STATIC; }
    virtual int64_t packed_count() const = 0;
    virtual void pack_weights(const T* w, T* to) const = 0;
    virtual int64_t room() const = 0;  // bytes to work in, but for bias and weights
    virtual void convolve(const T* x, const T* weights, const Epilogue<T>& epilogue, T* y,
                          Pieces pieces, int thread, int threads) const = 0;

    int64_t bias_width() const { return g.panels_a_group<T>() * WIDTH<T>; }
    int64_t work_bytes() const override {
        return Pieces::bytes<T>(g.groups * bias_width()) + (is_static() ? 0 : Pieces::bytes<T>(packed_count())) +
               room();
    }

    void prepare(char* const* data, Context&) override {
        if (!data[1]) return;
        stored.allocate(packed_count());
        pack_weights(rows::as<T>(data[1]), stored.at);
    }

    void run(char* const* data, Context& context) override {
        const bool fixed = stored.at != nullptr;
        Pieces pieces{context.work ? context.work : scratch(work_bytes())};
        given = rows::as<T>(data[1]);
        Epilogue<T> epilogue;
        epilogue.activation = g.activation;
        epilogue.bias = spread_bias(data[2], pieces.take<T>(g.groups * bias_width()));
        epilogue.residual = rows::as<T>(data[3]);
        epilogue.residual_step = data[3] ? pixel_step(in(3)) : 0;
        T* weights = stored.at;
        if (!fixed) pack_weights(rows::as<T>(data[1]), weights = pieces.take<T>(packed_count()));
        in_step(rows::threads_for(context, g.macs() / 16), [&](int thread, int threads) {
            convolve(rows::as<T>(data[0]), weights, epilogue, rows::as<T>(data[4]), pieces, thread,
                     threads);
        });
    }

   private:
    // Each group's bias in whole panels.
    const T* spread_bias(const char* data, T* to) const {
        if (!data) return nullptr;
        const T* bias = reinterpret_cast<const T*>(data);
        std::memset(to, 0, g.groups * bias_width() * sizeof(T));
        for (int64_t o = 0; o < g.oc; o++)
            to[o / g.out_group() * bias_width() + o % g.out_group()] = bias[o * in(2).strides[0]];
        return to;
    }
};

}  // namespace shardwright::conv
