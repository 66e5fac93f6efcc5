// Batch norm and its gradients.
//
// Comes in: x [n, c, ...], and what is laid out like it. Goes out: y, each channel's mean and
// 1 / deviation, and the new running statistics, which may lie in the old ones' memory. What always
// holds: the number of threads changes no bit. Where a channel lies in planes, its statistics and
// its result are made in one go, while it is in the cache.
#include <vector>

#include "channel_sums.h"

namespace shardwright {
namespace {

using namespace rows;

// y = f(inputs…, the channel's figures…) over one plane; `figures` are arrays with one number a
// channel.
template <class T, int FIGURES, class F, class... In>
SIMD void over_plane(const Shape& s, int64_t sample, int64_t c, F f,
                     const T* const (&figures)[FIGURES], T* y, const In*... in) {
    int64_t at = sample * s.sample_step + c * s.channel_step;
    f.in_channel(s.plane, y + at, figures, c, (in + at)...);
}

// The same over all planes, as they lie, and over all pixels.
template <class T, int FIGURES, class F, class... In>
void over_planes(const Shape& s, int threads, F f, const T* const (&figures)[FIGURES], T* y,
                 const In*... in) {
    in_parallel(threads, [&](int thread, int of) {
        Span part = share(s.samples * s.channels, thread, of);
        for (int64_t p = part.begin; p < part.end; p++)
            over_plane(s, p / s.channels, p % s.channels, f, figures, y, in...);
    });
}

template <class T, int FIGURES, class F, class... In>
void over_pixels(const Shape& s, int threads, F f, const T* const (&figures)[FIGURES], T* y,
                 const In*... in) {
    in_parallel(threads, [&](int thread, int of) {
        Span part = share(s.count, thread, of);
        for (int64_t p = part.begin; p < part.end; p++) {
            int64_t at = s.pixels.offset(p);
            f.by_channel(s.channels, y + at, figures, (in + at)...);
        }
    });
}

// each(channel) for a thread's channels, while a channel's planes are in the cache.
template <class Each> void by_planes(const Shape& s, int threads, Each each) {
    in_parallel(threads, [&](int thread, int of) {
        Span part = share(s.channels, thread, of);
        for (int64_t c = part.begin; c < part.end; c++) each(c);
    });
}

// y = (x - mean) * scale + bias.
template <class T> struct Normalize {
    static Vec<T> at(Vec<T> x, Vec<T> mean, Vec<T> scale, Vec<T> bias) {
        return fma(x - mean, scale, bias);
    }
    static void by_channel(int64_t n, T* y, const T* const (&c)[3], const T* x) {
        map(n, at, y, x, c[0], c[1], c[2]);
    }
    static void in_channel(int64_t n, T* y, const T* const (&c)[3], int64_t i, const T* x) {
        auto mean = set<Vec<T>>(c[0][i]), scale = set<Vec<T>>(c[1][i]), bias = set<Vec<T>>(c[2][i]);
        map(n, [=](Vec<T> v) { return at(v, mean, scale, bias); }, y, x);
    }
};

// dx = (dy - flat) * scale - (x - mean) * along.
template <class T> struct Gradient {
    static Vec<T> at(Vec<T> dy, Vec<T> x, Vec<T> mean, Vec<T> scale, Vec<T> flat, Vec<T> along) {
        return (dy - flat) * scale - (x - mean) * along;
    }
    static void by_channel(int64_t n, T* dx, const T* const (&c)[4], const T* dy, const T* x) {
        map(n, at, dx, dy, x, c[0], c[1], c[2], c[3]);
    }
    static void in_channel(int64_t n, T* dx, const T* const (&c)[4], int64_t i, const T* dy,
                           const T* x) {
        auto mean = set<Vec<T>>(c[0][i]), scale = set<Vec<T>>(c[1][i]);
        auto flat = set<Vec<T>>(c[2][i]), along = set<Vec<T>>(c[3][i]);
        map(n, [=](Vec<T> v, Vec<T> w) { return at(v, w, mean, scale, flat, along); }, dx, dy, x);
    }
};

// ------------------------------------------------------------------ the calls

template <class T> struct BatchNorm : Call {
    enum { X, WEIGHT, BIAS, OLD_MEAN, OLD_VAR, Y, MEAN, INVSTD, NEW_MEAN, NEW_VAR };
    Shape shape;
    bool training;
    double momentum, eps;
    std::vector<Moments> moments;
    std::vector<T> means, scales, biases;

    BatchNorm(const CallSpec& s, bool train, double m, double e)
        : shape(s.operands[0]), training(train), momentum(m), eps(e),
          moments(shape.channels + LANES<T>), means(shape.channels), scales(shape.channels),
          biases(shape.channels) {
        spec = s;
    }

    void run(char* const* data, Context& context) override {
        int threads = threads_for(context, shape.count * shape.channels);
        const T* x = as<T>(data[X]);
        T* y = as<T>(data[Y]);
        const T* const figures[3] = {means.data(), scales.data(), biases.data()};
        if (shape.way == PLANES && training) {
            return by_planes(shape, threads, [&](int64_t c) {
                moments[c] = plane_moments(shape, x, c);
                channel(data, c);
                for (int64_t sample = 0; sample < shape.samples; sample++)
                    over_plane(shape, sample, c, Normalize<T>{}, figures, y, x);
            });
        }
        if (training) pixel_moments(shape, x, moments, threads);
        for (int64_t c = 0; c < shape.channels; c++) channel(data, c);
        if (shape.way == PLANES) over_planes(shape, threads, Normalize<T>{}, figures, y, x);
        else over_pixels(shape, threads, Normalize<T>{}, figures, y, x);
    }

    void channel(char* const* data, int64_t c) {
        auto old = [&](int i) { return data[i] ? double(as<T>(data[i])[c]) : 0; };
        double mean = old(OLD_MEAN), variance = old(OLD_VAR);
        if (training) {
            const Moments& m = moments[c];
            put(data, NEW_MEAN, c, (1 - momentum) * mean + momentum * m.mean);
            put(data, NEW_VAR, c, (1 - momentum) * variance + momentum * m.squares / (m.count - 1));
            mean = m.mean, variance = m.squares / m.count;
        }
        double invstd = 1 / std::sqrt(variance + eps);
        if (training) put(data, MEAN, c, mean), put(data, INVSTD, c, invstd);
        means[c] = T(mean);
        scales[c] = T(data[WEIGHT] ? invstd * as<T>(data[WEIGHT])[c] : invstd);
        biases[c] = data[BIAS] ? as<T>(data[BIAS])[c] : T(0);
    }

    void put(char* const* data, int i, int64_t c, double value) {
        if (data[i]) as<T>(data[i])[c] = T(value);
    }
};

template <class T> struct BatchNormBwd : Call {
    enum { DY, X, WEIGHT, RUNNING_MEAN, RUNNING_VAR, MEAN, INVSTD, DX, DW, DB };
    Shape shape;
    bool training;
    double eps;
    std::vector<Products> products;
    std::vector<T> means, invstds, scales, flats, alongs;

    BatchNormBwd(const CallSpec& s, bool train, double e)
        : shape(s.operands[X]), training(train), eps(e), products(shape.channels + LANES<T>),
          means(shape.channels), invstds(shape.channels), scales(shape.channels),
          flats(shape.channels), alongs(shape.channels) {
        spec = s;
    }

    void run(char* const* data, Context& context) override {
        int threads = threads_for(context, shape.count * shape.channels);
        const T *dy = as<T>(data[DY]), *x = as<T>(data[X]);
        T* dx = as<T>(data[DX]);
        bool sums = training || data[DW] || data[DB];
        const T* const figures[4] = {means.data(), scales.data(), flats.data(), alongs.data()};
        for (int64_t c = 0; c < shape.channels; c++) statistics(data, c);
        if (shape.way == PLANES) {
            return by_planes(shape, threads, [&](int64_t c) {
                if (sums) products[c] = plane_products(shape, dy, x, c, means[c]);
                channel(data, c);
                for (int64_t sample = 0; dx && sample < shape.samples; sample++)
                    over_plane(shape, sample, c, Gradient<T>{}, figures, dx, dy, x);
            });
        }
        if (sums) pixel_products(shape, dy, x, means.data(), products, threads);
        for (int64_t c = 0; c < shape.channels; c++) channel(data, c);
        if (dx) over_pixels(shape, threads, Gradient<T>{}, figures, dx, dy, x);
    }

    void statistics(char* const* data, int64_t c) {
        means[c] = as<T>(data[training ? MEAN : RUNNING_MEAN])[c];
        invstds[c] = training ? as<T>(data[INVSTD])[c]
                              : T(1 / std::sqrt(as<T>(data[RUNNING_VAR])[c] + eps));
    }

    void channel(char* const* data, int64_t c) {
        const Products& p = products[c];
        double invstd = invstds[c], scale = data[WEIGHT] ? invstd * as<T>(data[WEIGHT])[c] : invstd;
        scales[c] = T(scale);
        flats[c] = training ? T(p.flat / shape.count) : T(0);
        alongs[c] = training ? T(p.along / shape.count * invstd * invstd * scale) : T(0);
        if (data[DW]) as<T>(data[DW])[c] = T(p.along * invstd);
        if (data[DB]) as<T>(data[DB])[c] = T(p.flat);
    }
};

// ------------------------------------------------------------------ binding

// The operands `large` lie like x, the others are one number a channel.
std::string misfit(const CallSpec& spec, int x_number, std::initializer_list<int> large,
                   std::initializer_list<int> needed) {
    const Operand *o = spec.operands, &x = o[x_number];
    if (x.ndim < 2) return "x is [n, c, ...]";
    for (int i = 0; i < spec.n_in + spec.n_out; i++) {
        if (!o[i].present()) continue;
        if (o[i].dtype != x.dtype || !floating(x)) return "dtypes";
        if (std::find(large.begin(), large.end(), i) != large.end()) {
            if (!alike(o[i], x)) return "strides";
        } else if (o[i].numel() != x.sizes[1] || !o[i].contiguous()) {
            return "a channel's figures";
        }
    }
    for (int i : needed)
        if (!o[i].present()) return "statistics that are needed are absent";
    if (Shape(x).way == OTHER) return "neither a plane nor a pixel is one piece of memory";
    return "";
}

Call* bind_batch_norm(const CallSpec& spec, std::string& why) {
    Reader read(spec);
    bool training = read.take<uint8_t>();
    double momentum = read.take<double>(), eps = read.take<double>();
    why = training ? misfit(spec, 0, {0, 5}, {}) : misfit(spec, 0, {0, 5}, {3, 4});
    if (!why.empty()) return nullptr;
    if (spec.operands[0].dtype == F32) return new BatchNorm<float>(spec, training, momentum, eps);
    return new BatchNorm<double>(spec, training, momentum, eps);
}

Call* bind_batch_norm_bwd(const CallSpec& spec, std::string& why) {
    Reader read(spec);
    bool training = read.take<uint8_t>();
    double eps = read.take<double>();
    why = training ? misfit(spec, 1, {0, 1, 7}, {5, 6}) : misfit(spec, 1, {0, 1, 7}, {3, 4});
    if (!why.empty()) return nullptr;
    if (spec.operands[0].dtype == F32) return new BatchNormBwd<float>(spec, training, eps);
    return new BatchNormBwd<double>(spec, training, eps);
}

Register batch_norm_kind(26, bind_batch_norm);
Register batch_norm_bwd_kind(27, bind_batch_norm_bwd);

}  // namespace
}  // namespace shardwright
