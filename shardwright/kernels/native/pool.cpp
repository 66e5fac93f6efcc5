// Kind pool: the largest or the mean of the window behind each output pixel.
//
// Comes in: x [b, c, h, w] and y alike, channels last or contiguous. What always holds: what lies
// outside of x never counts for the largest; for the mean it counts in the divisor where
// `count_padding` is set, as far as the padding reaches. A NaN in a window makes its result NaN.
#include <limits>

#include "abi.h"
#include "panels.h"
#include "rows.h"

namespace shardwright {

namespace {

using panels::LANES;
using panels::Vector;

struct Window {
    int64_t top, bottom, left, right;  // inside x
    int64_t count;                     // what a mean divides by
};

struct Shape {
    int64_t kh, kw, sh, sw, ph, pw;
    bool mean, count_padding;

    Window window(const Operand& x, int64_t oy, int64_t ox) const {
        const int64_t h = x.sizes[2], w = x.sizes[3];
        int64_t top = oy * sh - ph, left = ox * sw - pw;
        int64_t bottom = std::min(top + kh, h + ph), right = std::min(left + kw, w + pw);
        const int64_t reach = (bottom - top) * (right - left);
        top = std::max<int64_t>(top, 0), left = std::max<int64_t>(left, 0);
        bottom = std::min(bottom, h), right = std::min(right, w);
        return {top, bottom, left, right, count_padding ? reach : (bottom - top) * (right - left)};
    }
};

// The larger of two, NaN where one is NaN: `a` is kept where it is larger or no number.
template <class V> inline V larger(V a, V b) { return (a > b) | (a != a) ? a : b; }
template <class T> inline T larger_of(T a, T b) { return a > b || a != a ? a : b; }

template <class T> struct Pool : Call {
    Shape shape;
    bool last;  // channels

    Pool(const Shape& s, bool channels_last) : shape(s), last(channels_last) {}

    void run(char* const* data, Context& context) override {
        const T* x = rows::as<T>(data[0]);
        T* y = rows::as<T>(data[1]);
        const int64_t* sizes = out(0).sizes;
        const int64_t lines = sizes[0] * sizes[2] * (last ? 1 : sizes[1]);
        const int64_t work = out(0).numel() * shape.kh * shape.kw / (last ? LANES<T> : 1);
        in_parallel(rows::threads_for(context, work), [&](int thread, int threads) {
            const rows::Span mine = rows::share(lines, thread, threads);
            for (int64_t i = mine.begin; i < mine.end; i++)
                last ? line_of_pixels(x, y, i) : line_of_plane(x, y, i);
        });
    }

   private:
    // Row i of all (b, oy), channels side by side.
    void line_of_pixels(const T* x, T* y, int64_t i) const {
        const Operand &from = in(0), &to = out(0);
        const int64_t b = i / to.sizes[2], oy = i % to.sizes[2];
        for (int64_t ox = 0; ox < to.sizes[3]; ox++) {
            const Window window = shape.window(from, oy, ox);
            const T* image = x + b * from.strides[0];
            T* pixel = y + b * to.strides[0] + oy * to.strides[2] + ox * to.strides[3];
            int64_t c = 0;
            for (; c + LANES<T> <= to.sizes[1]; c += LANES<T>) vector(image, window, pixel, c);
            for (; c < to.sizes[1]; c++) pixel[c] = number(image + c, window);
        }
    }

    // Row i of all (b, c, oy).
    void line_of_plane(const T* x, T* y, int64_t i) const {
        const Operand &from = in(0), &to = out(0);
        const int64_t oy = i % to.sizes[2], c = i / to.sizes[2] % to.sizes[1];
        const int64_t b = i / to.sizes[2] / to.sizes[1];
        const T* image = x + b * from.strides[0] + c * from.strides[1];
        T* row = y + b * to.strides[0] + c * to.strides[1] + oy * to.strides[2];
        for (int64_t ox = 0; ox < to.sizes[3]; ox++)
            row[ox * to.strides[3]] = number(image, shape.window(from, oy, ox));
    }

    void vector(const T* image, const Window& window, T* pixel, int64_t c) const {
        const int64_t *steps = in(0).strides, width = window.right - window.left;
        Vector<T> found = Vector<T>{} + (shape.mean ? T(0) : -std::numeric_limits<T>::infinity());
        for (int64_t iy = window.top; iy < window.bottom; iy++) {
            const T* at = image + iy * steps[2] + window.left * steps[3] + c;
            for (int64_t ix = 0; ix < width; ix++, at += steps[3])
                found = shape.mean ? found + panels::load(at) : larger(panels::load(at), found);
        }
        if (shape.mean) found /= T(window.count);
        panels::store(pixel + c, found);
    }

    T number(const T* image, const Window& window) const {
        const int64_t* steps = in(0).strides;
        T found = shape.mean ? T(0) : -std::numeric_limits<T>::infinity();
        for (int64_t iy = window.top; iy < window.bottom; iy++)
            for (int64_t ix = window.left; ix < window.right; ix++) {
                const T value = image[iy * steps[2] + ix * steps[3]];
                found = shape.mean ? found + value : larger_of(value, found);
            }
        return shape.mean ? found / T(window.count) : found;
    }
};

// Whether windows along a dimension give `made` results: as many as fit, or one more that reaches
// over the end and begins before it.
bool gives(int64_t size, int64_t kernel, int64_t stride, int64_t padding, int64_t made) {
    const int64_t free = size + 2 * padding - kernel, more = free + stride - 1;
    const int64_t floor = free < 0 ? 0 : free / stride + 1;
    int64_t ceil = more < 0 ? 0 : more / stride + 1;
    if ((ceil - 1) * stride >= size + padding) ceil--;
    return made == floor || made == ceil;
}

// Empty, or why the sizes are not of one pool.
std::string misfit(const Operand& x, const Operand& y, const Shape& s) {
    constexpr int64_t MOST = int64_t(1) << 31;
    for (int64_t n : {s.kh, s.kw, s.sh, s.sw, s.ph + 1, s.pw + 1, x.sizes[2] + 1, x.sizes[3] + 1})
        if (n < 1 || n > MOST) return "a kernel's size, stride or padding is not sane";
    if (x.sizes[0] != y.sizes[0] || x.sizes[1] != y.sizes[1])
        return "the result is of another batch, or has other channels";
    if (!gives(x.sizes[2], s.kh, s.sh, s.ph, y.sizes[2]) ||
        !gives(x.sizes[3], s.kw, s.sw, s.pw, y.sizes[3]))
        return "the result's height or width does not follow from the kernel's";
    return "";
}

Call* bind_pool(const CallSpec& s, std::string& why) {
    if (s.n_in != 1 || s.n_out != 1) return why = "a pool has one input and one output", nullptr;
    const Operand &x = s.operands[0], &y = s.operands[1];
    if (!rows::floating(x) || x.dtype != y.dtype)
        return why = "pools here are of f32, or of f64", nullptr;
    if (x.ndim != 4 || y.ndim != 4)
        return why = "pools here are two-dimensional, with a batch", nullptr;
    Reader reader(s);
    auto kernel = reader.list<int64_t>(), stride = reader.list<int64_t>(),
         padding = reader.list<int64_t>();
    if (kernel.size() != 2 || stride.size() != 2 || padding.size() != 2)
        return why = "kernel, stride and padding have two numbers each", nullptr;
    const bool mean = reader.take<uint8_t>(), count_padding = reader.take<uint8_t>();
    const Shape shape{kernel[0],  kernel[1],  stride[0], stride[1],
                      padding[0], padding[1], mean,      count_padding};
    if (!(why = misfit(x, y, shape)).empty()) return nullptr;
    const bool last = x.strides[1] == 1 && y.strides[1] == 1;
    if (x.dtype == F32) return new Pool<float>(shape, last);
    return new Pool<double>(shape, last);
}

const Register registered(37, bind_pool);

}  // namespace

}  // namespace shardwright
