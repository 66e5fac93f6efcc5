// Sums over a channel of [n, c, ...]: its mean and variance, and what its gradients are made of.
//
// What always holds: a variance is joined in f64 from blocks, each of which takes its own mean off
// first; a channel is one thread's, so that the number of threads changes no bit.
//
// Memory is walked in one of two ways: PLANES, where a channel of a sample is one piece; PIXELS,
// where a pixel's channels are, so that a vector holds as many channels.
#pragma once

#include <type_traits>
#include <vector>

#include "sums.h"

namespace shardwright::rows {

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

template <class T>
Moments plane_moments(const Shape& s, const T* x, int64_t channel) {
    Moments m;
    for (int64_t sample = 0; sample < s.samples; sample++) {
        const T* plane = x + sample * s.sample_step + channel * s.channel_step;
        for (int64_t at = 0; at < s.plane; at += BLOCK) {
            int64_t n = std::min(BLOCK, s.plane - at);
            const T* block = plane + at;
            T mean = sum_of<T>(n, [=](int64_t i, auto read) { return read(block + i); }) / n;
            T squares = sum_of<T>(n, [=](int64_t i, auto read) {
                Vec<T> left = read(block + i) - mean;
                return left * left;
            });
            m.join(n, mean, squares);
        }
    }
    return m;
}

template <class T> T lane(const Vec<T>* vectors, int i) {
    return vectors[i / LANES<T>][i % LANES<T>];
}

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
template <class T, class Group>
void each_group(int64_t channels, int thread, int threads, Group group) {
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

// Of all channels, by pixels.
template <class T>
void pixel_moments(const Shape& s, const T* x, std::vector<Moments>& found, int threads) {
    std::fill(found.begin(), found.end(), Moments{});
    in_parallel(threads, [&](int thread, int of) {
        each_group<T>(s.channels, thread, of, [&](int64_t c, auto vectors, auto read) {
            pixel_moments<T, vectors()>(s, x + c, read, found.data() + c);
        });
    });
}

template <class T>
void pixel_products(const Shape& s, const T* dy, const T* x, const T* means,
                    std::vector<Products>& found, int threads) {
    std::fill(found.begin(), found.end(), Products{});
    in_parallel(threads, [&](int thread, int of) {
        each_group<T>(s.channels, thread, of, [&](int64_t c, auto vectors, auto read) {
            pixel_products<T, vectors()>(s, dy + c, x + c, means + c, read, found.data() + c);
        });
    });
}

}  // namespace shardwright::rows
