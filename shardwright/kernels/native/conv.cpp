// Kind conv: two-dimensional convolution with bias, residual and activation, channels last.
//
// Ways, one a class; `choose` says which one a call takes, by counting multiplications and
// the bytes of weights that must come from memory:
//   Direct      rows of output pixels times panels of weights, read from a copy with zeros around
//   Gathered    the same on a copied row a pixel, where rows of pixels are too short for tiles
//   Winograd<M> fewer multiplications for 3x3 kernels of stride 1; needs static weights
//   Depthwise   one channel a group
//
// Weights are packed once where they are static, else at each run.
#include "conv.h"
#include "depthwise.h"
#include "winograd.h"

namespace shardwright::conv {

namespace {

// Where the panel work of `thread` lies: outer cut over panels or over rows of pixels.
struct Cut {
    rows::Span panels, lines;
};

Cut cut(int64_t panel_count, int64_t line_count, bool by_panels, int thread, int threads) {
    if (by_panels) return {rows::share(panel_count, thread, threads), {0, line_count}};
    return {{0, panel_count}, rows::share(line_count, thread, threads)};
}

template <class T>
Epilogue<T> of_panel(const Convolution<T>& conv, Epilogue<T> epilogue, int64_t panel) {
    const int64_t a_group = conv.g.template panels_a_group<T>();
    const int64_t group = panel / a_group, column = panel % a_group * WIDTH<T>;
    if (epilogue.bias) epilogue.bias += panel * WIDTH<T>;
    if (epilogue.residual) epilogue.residual += group * conv.g.out_group() + column;
    return epilogue;
}

// --- direct ------------------------------------------------------------------------------------

template <class T> struct Direct : Convolution<T> {
    using Convolution<T>::g;
    using Convolution<T>::Convolution;

    Frame frame() const { return {g.h + 2 * g.ph, g.w + 2 * g.pw, g.c}; }
    bool copies() const { return g.padded() || (g.c > 1 && this->in(0).strides[1] != 1); }
    int64_t packed_count() const override {
        return g.groups * g.template panels_a_group<T>() * g.depth() * WIDTH<T>;
    }
    void pack_weights(const T* w, T* to) const override { pack(w, this->in(1), g, to); }
    int64_t room() const override {
        return (copies() ? Pieces::bytes<T>(frame().numel(g.b)) : 0) + Pieces::bytes<int64_t>(g.kh * g.kw);
    }

    void convolve(const T* x, const T* weights, const Epilogue<T>& epilogue, T* y, Pieces pieces,
                  int thread, int threads) const override {
        Steps steps = steps_of(this->in(0));
        int64_t* offsets = pieces.take<int64_t>(g.kh * g.kw);
        if (copies()) {
            T* copy = pieces.take<T>(frame().numel(g.b));
            copy_into(x, steps, g, frame(), copy, thread, threads);
            x = copy;
            steps = frame().steps();
        }
        const bool joined = g.groups == 1 && g.dw == 1 && steps.w == g.c;
        if (thread == 0) fill_offsets(offsets, steps, joined);
#pragma omp barrier
        panels::Rows<T> rows{x, g.sw * steps.w, offsets, int(joined ? g.kh : g.kh * g.kw),
                             joined ? g.kw * g.c : g.in_group()};
        multiply(rows, steps, weights, epilogue, y, thread, threads);
    }

   private:
    // A kernel's row is one segment where its pixels' channels lie one after another.
    void fill_offsets(int64_t* offsets, const Steps& steps, bool joined) const {
        for (int64_t i = 0; i < g.kh; i++)
            for (int64_t j = 0; j < (joined ? 1 : g.kw); j++)
                *offsets++ = i * g.dh * steps.h + j * g.dw * steps.w;
    }

    void multiply(panels::Rows<T> rows, const Steps& steps, const T* weights,
                  const Epilogue<T>& epilogue, T* y, int thread, int threads) const {
        const int64_t a_group = g.template panels_a_group<T>(), y_step = pixel_step(this->out(0));
        const int64_t panel_count = g.groups * a_group, lines = g.b * g.oh;
        const bool by_panels = packed_count() > g.b * g.h * g.w * g.c && panel_count >= threads;
        const Cut mine = cut(panel_count, lines, by_panels, thread, threads);
        const T* x = rows.at;
        for (int64_t p = mine.panels.begin; p < mine.panels.end; p++) {
            const int64_t group = p / a_group, column = p % a_group * WIDTH<T>;
            const int columns = int(std::min<int64_t>(WIDTH<T>, g.out_group() - column));
            const Epilogue<T> here = of_panel(*this, epilogue, p);
            for (int64_t line = mine.lines.begin; line < mine.lines.end; line++) {
                rows.at = x + line / g.oh * steps.b + line % g.oh * g.sh * steps.h +
                          group * g.in_group();
                panels::product(rows, g.ow, weights + p * g.depth() * WIDTH<T>,
                                here.at(line * g.ow, 0),
                                y + line * g.ow * y_step + group * g.out_group() + column, y_step,
                                columns);
            }
        }
    }
};

// --- gathered ----------------------------------------------------------------------------------

// Pixels' inputs side by side, a block of pixels at a time; a 1x1 kernel of stride 1 needs no copy.
template <class T> struct Gathered : Direct<T> {
    using Convolution<T>::g;
    using Direct<T>::Direct;

    static constexpr int64_t BLOCK_BYTES = 1 << 20;

    bool in_place() const {
        return g.kh * g.kw == 1 && g.sh == 1 && g.sw == 1 && !g.padded() &&
               pixel_step(this->in(0)) >= 0;
    }
    int64_t block() const {
        if (in_place()) return g.pixels();
        int64_t most = std::max<int64_t>(panels::MAX_ROWS, BLOCK_BYTES / (g.depth() * sizeof(T)));
        int64_t blocks = (g.pixels() + most - 1) / most;
        return (g.pixels() + blocks - 1) / blocks;
    }
    int64_t room() const override {
        return in_place() ? 0 : Pieces::bytes<T>(block() * g.depth());
    }

    void convolve(const T* x, const T* weights, const Epilogue<T>& epilogue, T* y, Pieces pieces,
                  int thread, int threads) const override {
        T* copy = in_place() ? nullptr : pieces.take<T>(block() * g.depth());
        const int64_t start = 0, step = copy ? g.depth() : pixel_step(this->in(0));
        panels::Rows<T> rows{copy ? copy : x, step, &start, 1, g.depth()};
        for (int64_t first = 0; first < g.pixels(); first += block()) {
            const int64_t count = std::min(block(), g.pixels() - first);
            if (copy) {
#pragma omp barrier
                rows::Span mine = rows::share(count, thread, threads);
                for (int64_t i = mine.begin; i < mine.end; i++)
                    gather(x, first + i, copy + i * g.depth());
#pragma omp barrier
            }
            multiply(rows, first, count, weights, epilogue, y, thread, threads);
        }
    }

   private:
    void gather(const T* x, int64_t pixel, T* to) const {
        const Steps steps = steps_of(this->in(0));
        const int64_t b = pixel / (g.oh * g.ow), oy = pixel / g.ow % g.oh, ox = pixel % g.ow;
        for (int64_t i = 0; i < g.kh; i++)
            for (int64_t j = 0; j < g.kw; j++, to += g.c) {
                int64_t row = oy * g.sh - g.ph + i * g.dh, column = ox * g.sw - g.pw + j * g.dw;
                if (row < 0 || row >= g.h || column < 0 || column >= g.w) {
                    std::memset(to, 0, g.c * sizeof(T));
                    continue;
                }
                const T* from = x + b * steps.b + row * steps.h + column * steps.w;
                if (steps.c == 1)
                    std::memcpy(to, from, g.c * sizeof(T));
                else
                    for (int64_t c = 0; c < g.c; c++) to[c] = from[c * steps.c];
            }
    }

    void multiply(panels::Rows<T> rows, int64_t first, int64_t count, const T* weights,
                  const Epilogue<T>& epilogue, T* y, int thread, int threads) const {
        const int64_t panel_count = g.template panels_a_group<T>(),
                      y_step = pixel_step(this->out(0));
        const bool by_panels = panel_count * WIDTH<T> > count && panel_count >= threads;
        const Cut mine = cut(panel_count, count, by_panels, thread, threads);
        rows.at += mine.lines.begin * rows.step;
        first += mine.lines.begin;
        for (int64_t p = mine.panels.begin; p < mine.panels.end; p++) {
            const int columns = int(std::min<int64_t>(WIDTH<T>, g.oc - p * WIDTH<T>));
            panels::product(rows, mine.lines.end - mine.lines.begin,
                            weights + p * g.depth() * WIDTH<T>,
                            of_panel(*this, epilogue, p).at(first, 0),
                            y + first * y_step + p * WIDTH<T>, y_step, columns);
        }
    }
};

// --- Winograd ----------------------------------------------------------------------------------

template <class T, int M> struct Winograd : Convolution<T> {
    using Convolution<T>::g;
    using Convolution<T>::Convolution;

    static constexpr int N = M + 2, PLACES = N * N;
    static constexpr int64_t BLOCK_BYTES = 1 << 20, CACHED_WEIGHTS = 1 << 20;

    int64_t down() const { return (g.oh + M - 1) / M; }
    int64_t across() const { return (g.ow + M - 1) / M; }
    int64_t tiles() const { return g.b * down() * across(); }
    int64_t width() const { return up(g.oc, WIDTH<T>); }
    // Tiles at a time: as many as fit a cache, or all where the weights do not fit.
    int64_t block() const {
        const int64_t a_tile = PLACES * (g.c + width()) * sizeof(T);
        int64_t most = std::max<int64_t>(2 * panels::MAX_ROWS, BLOCK_BYTES / a_tile);
        if (packed_count() * int64_t(sizeof(T)) > CACHED_WEIGHTS) most *= 4;
        const int64_t blocks = (tiles() + most - 1) / most;
        return (tiles() + blocks - 1) / blocks;
    }
    // From place to place; one line more, so that places do not fall on the same lines of a cache.
    int64_t v_step() const { return block() * g.c + 64 / sizeof(T); }
    int64_t m_step() const { return block() * width() + 64 / sizeof(T); }

    int64_t packed_count() const override { return PLACES * width() * g.c; }
    int64_t room() const override {
        return Pieces::bytes<T>(g.c) + Pieces::bytes<T>(PLACES * v_step()) + Pieces::bytes<T>(PLACES * m_step());
    }

    // [place][panel][in][WIDTH]
    void pack_weights(const T* w, T* to) const override {
        const int64_t* steps = this->in(1).strides;
        std::memset(to, 0, packed_count() * sizeof(T));
        for (int64_t o = 0; o < g.oc; o++)
            for (int64_t c = 0; c < g.c; c++) {
                double u[N][N];
                winograd::filter<M>(w + o * steps[0] + c * steps[1], steps[2], steps[3], u);
                T* here = to + (o / WIDTH<T> * g.c + c) * WIDTH<T> + o % WIDTH<T>;
                for (int i = 0; i < PLACES; i++) here[i * width() * g.c] = T(u[i / N][i % N]);
            }
    }

    void convolve(const T* x, const T* weights, const Epilogue<T>& epilogue, T* y, Pieces pieces,
                  int thread, int threads) const override {
        T* zeros = pieces.take<T>(g.c);
        T* v = pieces.take<T>(PLACES * v_step());
        T* m = pieces.take<T>(PLACES * m_step());
        if (thread == 0) std::memset(zeros, 0, g.c * sizeof(T));
#pragma omp barrier
        for (int64_t first = 0; first < tiles(); first += block()) {
            const int64_t count = std::min(block(), tiles() - first);
            const rows::Span mine = rows::share(count, thread, threads);
            for (int64_t i = mine.begin; i < mine.end; i++)
                transform(x, zeros, first + i, v + i * g.c);
#pragma omp barrier
            multiply(v, weights, m, count, thread, threads);
#pragma omp barrier
            for (int64_t i = mine.begin; i < mine.end; i++)
                untransform(x, m + i * width(), first + i, epilogue, y);
        }
    }

   private:
    void transform(const T* x, const T* zeros, int64_t tile, T* v) const {
        const Steps steps = steps_of(this->in(0));
        const int64_t b = tile / (down() * across()), row = tile / across() % down();
        winograd::Patch<M, T>(x + b * steps.b, g.h, g.w, steps.h, steps.w, row * M - g.ph,
                              tile % across() * M - g.pw, zeros)
            .transform(g.c, v, v_step());
    }

    void multiply(const T* v, const T* weights, T* m, int64_t count, int thread,
                  int threads) const {
        const int64_t panel_count = width() / WIDTH<T>, start = 0;
        const rows::Span mine = rows::share(PLACES * panel_count, thread, threads);
        for (int64_t i = mine.begin; i < mine.end; i++) {
            const int64_t place = i / panel_count, p = i % panel_count;
            panels::product<T>({v + place * v_step(), g.c, &start, 1, g.c}, count,
                               weights + i * g.c * WIDTH<T>, {},
                               m + place * m_step() + p * WIDTH<T>, width(), WIDTH<T>);
        }
    }

    // A tile that an infinity or a NaN has spoilt is made again, a sum at a time.
    void untransform(const T* x, const T* m, int64_t tile, const Epilogue<T>& epilogue,
                     T* y) const {
        const int64_t b = tile / (down() * across()), row = tile / across() % down() * M;
        const int64_t column = tile % across() * M, y_step = pixel_step(this->out(0));
        const int64_t pixel = (b * g.oh + row) * g.ow + column;
        const int rows = int(std::min<int64_t>(M, g.oh - row));
        const int columns = int(std::min<int64_t>(M, g.ow - column));
        const int64_t done = winograd::gather<M, T>(m, m_step(), g.oc, epilogue, pixel, g.ow, rows,
                                                    columns, y, y_step);
        for (int i = 0; done < g.oc && i < rows; i++)
            for (int j = 0; j < columns; j++) {
                const int64_t at = pixel + i * g.ow + j;
                plainly(x + b * steps_of(this->in(0)).b, row + i, column + j, done,
                        epilogue.at(at, 0), y + at * y_step);
            }
    }

    // One pixel of the result, from channel o on.
    void plainly(const T* x, int64_t row, int64_t column, int64_t o, const Epilogue<T>& epilogue,
                 T* y) const {
        constexpr int L = LANES<T>;
        const Steps steps = steps_of(this->in(0));
        const int64_t* w_steps = this->in(1).strides;
        for (; o < g.oc; o += L) {
            panels::Vector<T> sum{};
            for (int64_t k = 0; k < 9; k++) {
                const int64_t h = row - g.ph + k / 3, w = column - g.pw + k % 3;
                if (h < 0 || h >= g.h || w < 0 || w >= g.w) continue;
                const T* from = x + h * steps.h + w * steps.w;
                const T* weights = this->given + o * w_steps[0] + k / 3 * w_steps[2] +
                                   k % 3 * w_steps[3];
                for (int64_t c = 0; c < g.c; c++, weights += w_steps[1])
                    for (int l = 0; l < L; l++) sum[l] += from[c] * weights[l * w_steps[0]];
            }
            const Epilogue<T> here = epilogue.at(0, o);
            panels::store(y + o, here.apply(sum, 0, here.residual));
            here.activate_rows(y + o, 0, 1, L);
        }
    }
};

// --- the choice --------------------------------------------------------------------------------

enum class Way { DIRECT, GATHERED, WINOGRAD2, WINOGRAD4, DEPTHWISE };

// Time in multiplications of a core: those that a way takes, and what reading its weights from
// beyond the second cache takes.
template <class T, int M> double winograd_time(const Geometry& g, double a_byte) {
    Winograd<T, M> way(g);
    const double places = (M + 2) * (M + 2), tiles = double(way.tiles());
    const double rows = std::max(tiles, 6.0);  // tiles of fewer rows wait for their sums
    return places * rows * g.c * g.oc + (M == 4 ? 250. : 80.) * tiles * (g.c + g.oc) +
           a_byte * double(way.packed_count() * sizeof(T));
}

template <class T> Way choose(const Geometry& g, bool fixed, bool last) {
    if (g.groups == g.c && g.c == g.oc && g.c > 1) return Way::DEPTHWISE;
    constexpr double A_BYTE = 4;
    const bool short_rows = g.ow < 7 || g.kh * g.kw == 1;
    const Way plain = g.groups == 1 && short_rows ? Way::GATHERED : Way::DIRECT;
    const bool fits = fixed && last && g.groups == 1 && g.kh == 3 && g.kw == 3 && g.sh == 1 &&
                      g.sw == 1 && g.dh == 1 && g.dw == 1 && g.c % LANES<T> == 0 &&
                      g.oc % LANES<T> == 0;
    if (!fits) return plain;
    const double direct = double(g.macs()) + A_BYTE * double(g.depth() * g.oc * sizeof(T));
    const double two = winograd_time<T, 2>(g, A_BYTE), four = winograd_time<T, 4>(g, A_BYTE);
    if (direct <= std::min(two, four)) return plain;
    return two <= four ? Way::WINOGRAD2 : Way::WINOGRAD4;
}

template <class T> Call* make(Way way, const Geometry& g) {
    switch (way) {
        case Way::DIRECT: return new Direct<T>(g);
        case Way::GATHERED: return new Gathered<T>(g);
        case Way::WINOGRAD2: return new Winograd<T, 2>(g);
        case Way::WINOGRAD4: return new Winograd<T, 4>(g);
        default: return new Depthwise<T>(g);
    }
}

// Empty, or why the call is not done here.
std::string refusal(const CallSpec& s) {
    const Operand &x = s.operands[0], &y = s.operands[4];
    for (int i : {0, 1, 2, 3, 4}) {
        const Operand& operand = s.operands[i];
        if (operand.present() && (operand.dtype != x.dtype || !rows::floating(operand)))
            return "convolutions here are of f32, or of f64";
    }
    if (x.ndim != 4 || s.operands[1].ndim != 4 || y.ndim != 4)
        return "convolutions here are two-dimensional, with a batch";
    if (pixel_step(y) < 0) return "the channels of the result do not lie last";
    const Operand& residual = s.operands[3];
    if (residual.present() && (!rows::same_sizes(residual, y) || pixel_step(residual) < 0))
        return "the residual's channels do not lie last, or it is of another shape";
    return "";
}

Geometry geometry(const CallSpec& s) {
    const Operand &x = s.operands[0], &w = s.operands[1], &y = s.operands[4];
    Reader reader(s);
    auto stride = reader.list<int64_t>(), padding = reader.list<int64_t>(),
         dilation = reader.list<int64_t>();
    const int64_t groups = reader.take<int64_t>();
    const int activation = reader.take<uint8_t>();
    if (stride.size() != 2 || padding.size() != 2 || dilation.size() != 2)
        throw std::runtime_error("stride, padding and dilation have two numbers each");
    return {x.sizes[0], x.sizes[1], x.sizes[2], x.sizes[3], y.sizes[1], y.sizes[2],
            y.sizes[3], w.sizes[2], w.sizes[3], stride[0],  stride[1],  padding[0],
            padding[1], dilation[0], dilation[1], groups,   activation};
}

// How many places a kernel takes along a dimension; 0 where it does not fit in.
int64_t places(int64_t size, int64_t kernel, int64_t stride, int64_t padding, int64_t dilation) {
    const int64_t free = size + 2 * padding - dilation * (kernel - 1) - 1;
    return free < 0 ? 0 : free / stride + 1;
}

// Empty, or why the sizes are not of one convolution: what the ways read and write follows from
// them alone.
std::string misfit(const CallSpec& s, const Geometry& g) {
    constexpr int64_t MOST = int64_t(1) << 31;
    constexpr double MOST_COPIED = double(int64_t(1) << 48);  // elements, with zeros around
    for (int64_t n : {g.b, g.c, g.h, g.w, g.oc, g.oh, g.ow, g.kh, g.kw, g.sh, g.sw, g.dh, g.dw,
                      g.groups, g.ph + 1, g.pw + 1})
        if (n < 1 || n > MOST) return "a size, stride, padding, dilation or group count is not sane";
    if (g.c % g.groups || g.oc % g.groups) return "the channels do not divide into the groups";
    const Operand &x = s.operands[0], &w = s.operands[1], &bias = s.operands[2], &y = s.operands[4];
    if (y.sizes[0] != x.sizes[0]) return "the result is of another batch";
    if (w.sizes[0] != g.oc || w.sizes[1] != g.in_group())
        return "the weight's channels are not those of x and of the result";
    if (places(g.h, g.kh, g.sh, g.ph, g.dh) != g.oh || places(g.w, g.kw, g.sw, g.pw, g.dw) != g.ow)
        return "the result's height or width does not follow from the kernel's";
    if (double(g.b) * double(up(g.c, LANES<float>)) * double(g.h + 2 * g.ph) *
            double(g.w + 2 * g.pw) > MOST_COPIED)
        return "the padded input is too large";
    if (bias.present() && (bias.ndim != 1 || bias.sizes[0] != g.oc))
        return "the bias is not one number an output channel";
    if (g.activation >= simd::ACTIVATIONS) return "there is no activation of this number";
    return "";
}

Call* bind_conv(const CallSpec& s, std::string& why) {
    if (s.n_in != 4 || s.n_out != 1) return why = "a convolution has 4 inputs, 1 output", nullptr;
    if (!(why = refusal(s)).empty()) return nullptr;
    const Geometry g = geometry(s);
    if (!(why = misfit(s, g)).empty()) return nullptr;
    const bool fixed = s.operands[1].flags & STATIC, last = s.operands[0].strides[1] == 1;
    return s.operands[0].dtype == F32 ? make<float>(choose<float>(g, fixed, last), g)
                                      : make<double>(choose<double>(g, fixed, last), g);
}

const Register registered(36, bind_conv);

}  // namespace

}  // namespace shardwright::conv
