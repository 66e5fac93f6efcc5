// Convolution with one channel a group: each channel's window with its own kernel, in vectors of
// channels.
//
// What always holds: channels are read in whole vectors, so the input is copied where they do not
// fill them; only those that exist are written.
#pragma once

#include "conv.h"

namespace shardwright::conv {

template <class T> struct Depthwise : Convolution<T> {
    using Convolution<T>::g;
    using Convolution<T>::Convolution;

    static constexpr int PIXELS = 6;

    int64_t channels() const { return up(g.c, LANES<T>); }
    Frame frame() const { return {g.h + 2 * g.ph, g.w + 2 * g.pw, channels()}; }
    bool copies() const {
        return g.padded() || channels() != g.c || this->in(0).strides[1] != 1;
    }
    int64_t packed_count() const override { return g.kh * g.kw * channels(); }
    int64_t room() const override {
        return Pieces::bytes<T>(channels()) + (copies() ? Pieces::bytes<T>(frame().numel(g.b)) : 0);
    }

    // [kh][kw][channel]
    void pack_weights(const T* w, T* to) const override {
        const int64_t* steps = this->in(1).strides;
        for (int64_t i = 0; i < g.kh * g.kw; i++)
            for (int64_t c = 0; c < channels(); c++)
                *to++ = c >= g.c ? T(0)
                                 : w[c * steps[0] + i / g.kw * steps[2] + i % g.kw * steps[3]];
    }

    void convolve(const T* x, const T* weights, const Epilogue<T>& epilogue, T* y, Pieces pieces,
                  int thread, int threads) const override {
        Steps steps = steps_of(this->in(0));
        T* bias = pieces.take<T>(channels());
        if (epilogue.bias && thread == 0)
            for (int64_t c = 0; c < g.c; c++) bias[c] = epilogue.bias[c * WIDTH<T>];
        if (copies()) {
            T* copy = pieces.take<T>(frame().numel(g.b));
            copy_into(x, steps, g, frame(), copy, thread, threads);
            x = copy;
            steps = frame().steps();
        }
#pragma omp barrier
        Epilogue<T> plain = epilogue;
        if (plain.bias) plain.bias = bias;
        const rows::Span mine = rows::share(g.b * g.oh, thread, threads);
        for (int64_t line = mine.begin; line < mine.end; line++)
            row(x + line / g.oh * steps.b + line % g.oh * g.sh * steps.h, steps, weights,
                plain.at(line * g.ow, 0), y + line * g.ow * pixel_step(this->out(0)));
    }

   private:
    void row(const T* x, const Steps& steps, const T* weights, const Epilogue<T>& epilogue,
             T* y) const {
        for (int64_t c = 0; c < g.c; c += LANES<T>) {
            int64_t ox = 0;
            for (; ox + PIXELS <= g.ow; ox += PIXELS)
                pixels<PIXELS>(x, steps, weights, epilogue, y, ox, c);
            for (; ox < g.ow; ox++) pixels<1>(x, steps, weights, epilogue, y, ox, c);
        }
    }

    template <int P>
    void pixels(const T* x, const Steps& steps, const T* weights, const Epilogue<T>& epilogue, T* y,
                int64_t ox, int64_t c) const {
        panels::Vector<T> sum[P] = {};
        const int64_t step = g.sw * steps.w;
        x += ox * step + c;
        weights += c;
        for (int64_t i = 0; i < g.kh; i++)
            for (int64_t j = 0; j < g.kw; j++, weights += channels()) {
                const T* a = x + i * g.dh * steps.h + j * g.dw * steps.w;
                const panels::Vector<T> w = panels::load(weights);
#pragma GCC unroll 8
                for (int p = 0; p < P; p++) sum[p] += panels::load(a + p * step) * w;
            }
        const int64_t y_step = pixel_step(this->out(0));
        const int here = int(std::min<int64_t>(LANES<T>, g.c - c));
#pragma GCC unroll 8
        for (int p = 0; p < P; p++)
            put(sum[p], epilogue.at(ox + p, c), y + (ox + p) * y_step + c, here);
        epilogue.activate_rows(y + ox * y_step + c, y_step, P, here);
    }

    static void put(panels::Vector<T> v, const Epilogue<T>& epilogue, T* y, int count) {
        if (count == LANES<T>) return panels::store(y, epilogue.apply(v, 0, epilogue.residual));
        T padded[LANES<T>] = {}, made[LANES<T>];
        if (epilogue.residual) std::memcpy(padded, epilogue.residual, count * sizeof(T));
        panels::store(made, epilogue.apply(v, 0, padded));
        std::memcpy(y, made, count * sizeof(T));
    }
};

}  // namespace shardwright::conv
