// Batch norm and its gradients.
//
// Comes in: x [n, c, ...], and what is laid out like it. Goes out: y, each channel's mean and
// 1 / deviation, and the new running statistics, which may lie in the old ones' memory. What always
// holds: a variance is joined from blocks, each of which takes its own mean off first; a channel is
// one thread's, so that the number of threads changes no bit.
//
// Memory is walked in one of two ways: PLANES, where a channel of a sample is one piece; PIXELS,
// where a pixel's channels are, so that a vector holds as many channels.
#include <vector>

#include "sums.h"

namespace shardwright {
namespace {

using namespace rows;

constexpr int64_t PIXELS_TOGETHER = 64;  // of four vectors of channels: 16 KiB

enum Way { PLANES, PIXELS, OTHER };

struct Shape {
    Way way = OTHER;
    int64_t channels, samples, plane, count;  // count: elements of a channel
    int64_t channel_step, sample_step;
    Walk pixels;

    explicit Shape(const Operand& x) {
        channels = x.sizes[1], samples = x.sizes[0];
        channel_step = x.strides[1], sample_step = x.strides[0];
        Walk inner = walk(x, 2, x.ndim);
        plane = inner.count;
        count = samples * plane;
        pixels.append(samples, sample_step);
        for (int i = 2; i < x.ndim; i++) pixels.append(x.sizes[i], x.strides[i]);
        bool flat = inner.dims == 0 || (inner.dims == 1 && inner.strides[0] == 1);
        if (channels > 1 && channel_step == 1) way = PIXELS;
        else if (flat) way = PLANES;
        else if (channels == 1) way = PIXELS;
    }

    int64_t pieces() const { return way == PLANES ? samples * channels : count; }
};

// Mean and squares around it, of elements that came block by block.
struct Moments {
    double count = 0, mean = 0, squares = 0;
    void join(double n, double block_mean, double block_squares) {
        double all = count + n, apart = block_mean - mean;
        mean += apart * n / all;
        squares += block_squares + apart * apart * count * n / all;
        count = all;
    }
};

template <class T> Moments plane_moments(const Shape& s, const T* x, int64_t channel) {
    Moments m;
    for (int64_t sample = 0; sample < s.samples; sample++) {
        const T* plane = x + sample * s.sample_step + channel * s.channel_step;
        for (int64_t at = 0; at < s.plane; at += BLOCK) {
            int64_t n = std::min(BLOCK, s.plane - at);
            const T* block = plane + at;
            T mean = sum_of<T>(n, [=](int64_t i, auto read) { return read(block + i); }) / n;
            m.join(n, mean, sum_of<T>(n, [=](int64_t i, auto read) {
                Vec<T> left = read(block + i) - mean;
                return left * left;
            }));
        }
    }
    return m;
}

template <class T> T lane(const Vec<T>* vectors, int i) { return vectors[i / LANES<T>][i % LANES<T>]; }

// Of W vectors of channels, by pixels; `read` knows how many lanes are there.
template <class T, int W, class Read>
void pixel_moments(const Shape& s, const T* x, Read read, Moments* moments) {
    for (int64_t first = 0; first < s.count; first += PIXELS_TOGETHER) {
        int64_t n = std::min(PIXELS_TOGETHER, s.count - first);
        const T* places[PIXELS_TOGETHER];
        Vec<T> mean[W] = {}, squares[W] = {};
        for (int64_t p = 0; p < n; p++) {
            places[p] = x + s.pixels.offset(first + p);
            for (int k = 0; k < W; k++) mean[k] += read(places[p], k);
        }
        for (int k = 0; k < W; k++) mean[k] /= T(n);
        for (int64_t p = 0; p < n; p++)
            for (int k = 0; k < W; k++) {
                Vec<T> left = read(places[p], k) - mean[k];
                squares[k] += left * left;
            }
        for (int i = 0; i < W * LANES<T>; i++)
            moments[i].join(n, lane<T>(mean, i), lane<T>(squares, i));
    }
}

// What the gradients are made of: the sums of dy and of dy times x's distance from the mean.
struct Products {
    double flat = 0, along = 0;
};

template <class T>
Products plane_products(const Shape& s, const T* dy, const T* x, int64_t channel, T mean) {
    Products all;
    for (int64_t sample = 0; sample < s.samples; sample++) {
        int64_t at = sample * s.sample_step + channel * s.channel_step;
        auto both = sums_of<T, 2>(s.plane, [=](int64_t i, auto read, Vec<T>* terms) {
            terms[0] = read(dy + at + i);
            terms[1] = terms[0] * (read(x + at + i) - mean);
        });
        all.flat += both.sum[0];
        all.along += both.sum[1];
    }
    return all;
}

template <class T, int W, class Read>
void pixel_products(const Shape& s, const T* dy, const T* x, const T* means, Read read,
                    Products* products) {
    Vec<T> mean[W];
    for (int k = 0; k < W; k++) mean[k] = read(means, k);
    for (int64_t first = 0; first < s.count; first += PIXELS_TOGETHER) {
        Vec<T> flat[W] = {}, along[W] = {};
        for (int64_t p = first; p < std::min(s.count, first + PIXELS_TOGETHER); p++) {
            int64_t at = s.pixels.offset(p);
            for (int k = 0; k < W; k++) {
                Vec<T> gradient = read(dy + at, k);
                flat[k] += gradient;
                along[k] += gradient * (read(x + at, k) - mean[k]);
            }
        }
        for (int i = 0; i < W * LANES<T>; i++) {
            products[i].flat += lane<T>(flat, i);
            products[i].along += lane<T>(along, i);
        }
    }
}

// group(first channel, vectors, read) for all channels of a thread, four vectors at a time where
// every thread gets some. The last vector may reach beyond the channels: what is kept a channel is
// kept for LANES more.
template <class T, class Group> void each_group(int64_t channels, int thread, int threads, Group group) {
    int64_t grain = channels >= threads * WIDE<T> ? WIDE<T> : LANES<T>;
    Span part = share(channels, thread, threads, grain);
    int64_t c = part.begin;
    for (; c + WIDE<T> <= part.end; c += WIDE<T>)
        group(c, std::integral_constant<int, 4>{},
              [](const T* from, int k) { return load(from + k * LANES<T>); });
    for (; c < part.end; c += LANES<T>) {
        int64_t left = std::min<int64_t>(LANES<T>, part.end - c);
        group(c, std::integral_constant<int, 1>{},
              [=](const T* from, int) { return load_part(from, left); });
    }
}

template <class T> void moments_of(const Shape& s, const T* x, std::vector<Moments>& found, int threads) {
    std::fill(found.begin(), found.end(), Moments{});
    in_parallel(threads, [&](int thread, int of) {
        if (s.way == PIXELS)
            return each_group<T>(s.channels, thread, of, [&](int64_t c, auto vectors, auto read) {
                pixel_moments<T, vectors()>(s, x + c, read, found.data() + c);
            });
        Span part = share(s.channels, thread, of);
        for (int64_t c = part.begin; c < part.end; c++) found[c] = plane_moments(s, x, c);
    });
}

template <class T>
void products_of(const Shape& s, const T* dy, const T* x, const T* means,
                 std::vector<Products>& found, int threads) {
    std::fill(found.begin(), found.end(), Products{});
    in_parallel(threads, [&](int thread, int of) {
        if (s.way == PIXELS)
            return each_group<T>(s.channels, thread, of, [&](int64_t c, auto vectors, auto read) {
                pixel_products<T, vectors()>(s, dy + c, x + c, means + c, read, found.data() + c);
            });
        Span part = share(s.channels, thread, of);
        for (int64_t c = part.begin; c < part.end; c++)
            found[c] = plane_products(s, dy, x, c, means[c]);
    });
}

// y = f(inputs…, the channel's figures…) everywhere; FIGURES arrays have one number a channel.
template <class T, int FIGURES, class F, class... In>
void everywhere(const Shape& s, int threads, F f, const T* const (&figures)[FIGURES], T* y,
                const In*... in) {
    in_parallel(threads, [&](int thread, int of) {
        Span part = share(s.pieces(), thread, of);
        for (int64_t p = part.begin; p < part.end; p++) {
            if (s.way == PIXELS) {
                int64_t at = s.pixels.offset(p);
                f.by_channel(s.channels, y + at, figures, (in + at)...);
            } else {
                int64_t c = p % s.channels, at = p / s.channels * s.sample_step + c * s.channel_step;
                f.in_channel(s.plane, y + at, figures, c, (in + at)...);
            }
        }
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
    static void in_channel(int64_t n, T* dx, const T* const (&c)[4], int64_t i, const T* dy, const T* x) {
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
        : shape(s.operands[0]), training(train), momentum(m), eps(e), moments(shape.channels + LANES<T>),
          means(shape.channels), scales(shape.channels), biases(shape.channels) {
        spec = s;
    }

    void run(char* const* data, Context& context) override {
        int threads = threads_for(context, shape.count * shape.channels);
        const T* x = as<T>(data[X]);
        if (training) moments_of(shape, x, moments, threads);
        for (int64_t c = 0; c < shape.channels; c++) channel(data, c);
        const T* const figures[3] = {means.data(), scales.data(), biases.data()};
        everywhere(shape, threads, Normalize<T>{}, figures, as<T>(data[Y]), x);
    }

    void channel(char* const* data, int64_t c) {
        auto old = [&](int i) { return given(data, i) ? double(as<T>(data[i])[c]) : 0; };
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
        if (given(data, i)) as<T>(data[i])[c] = T(value);
    }

    bool given(char* const* data, int i) { return data[i] && spec.operands[i].numel(); }
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
        for (int64_t c = 0; c < shape.channels; c++) {
            means[c] = as<T>(data[training ? MEAN : RUNNING_MEAN])[c];
            invstds[c] = training ? as<T>(data[INVSTD])[c]
                                  : T(1 / std::sqrt(as<T>(data[RUNNING_VAR])[c] + eps));
        }
        if (training || data[DW] || data[DB])
            products_of(shape, dy, x, means.data(), products, threads);
        for (int64_t c = 0; c < shape.channels; c++) channel(data, c);
        if (!data[DX]) return;
        const T* const figures[4] = {means.data(), scales.data(), flats.data(), alongs.data()};
        everywhere(shape, threads, Gradient<T>{}, figures, as<T>(data[DX]), dy, x);
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

// The operands `large` lie like x, the others are one number a channel, or nothing.
std::string misfit(const CallSpec& spec, int x_number, std::initializer_list<int> large,
                   std::initializer_list<int> needed) {
    const Operand *o = spec.operands, &x = o[x_number];
    if (x.ndim < 2 || x.numel() == 0) return "x is [n, c, ...], and not empty";
    for (int i = 0; i < spec.n_in + spec.n_out; i++) {
        if (!o[i].present()) continue;
        if (o[i].dtype != x.dtype || !floating(x)) return "dtypes";
        if (std::find(large.begin(), large.end(), i) != large.end()) {
            if (!alike(o[i], x)) return "strides";
        } else if (o[i].numel() != 0 && (o[i].numel() != x.sizes[1] || !o[i].contiguous())) {
            return "a channel's figures";
        }
    }
    for (int i : needed)
        if (!o[i].present() || o[i].numel() == 0) return "statistics that are needed are absent";
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
