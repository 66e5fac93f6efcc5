// Chains run: a program over one element, on tiles of some hundred elements that stay in the
// nearest cache between one instruction and the next.
//
// Bound once: the program is parsed, the operands' common dimensions joined (`Space`), a tile's
// shape chosen, and for each operand how a tile of it is had. In a run there is neither parsing nor
// allocation. What always holds: within a tile, everything that is read from memory is read before
// any output is written, but for the last instruction, which may write its output as it goes; so an
// output may lie in an input's memory where both have the same strides.
#include "chain.h"

#include "convert.h"
#include "rows.h"
#include "strided.h"
#include "vector.h"

namespace shardwright::chain {

namespace {

constexpr int64_t NEAR_BYTES = 24 * 1024;  // what the tiles of a thread may fill
constexpr int64_t LONGEST_TILE = 1024, SHORTEST_TILE = 64;
// Rows as long as this are tiles of their own: what is broadcast along them is a single number, and
// what is broadcast to them lies there as it is.
constexpr int64_t LONG_ROW = 256;

// The last dimensions from `first` on are a tile's; of dimension `first` it has `rows` at a time.
struct Tiling {
    int first = 0;
    int64_t rows = 1;    // of dimension `first` in a tile
    int64_t row = 1;     // elements in one of them
    int64_t chunks = 1;  // tiles that dimension `first` gives
    int64_t tiles = 1;
    int64_t size() const { return rows * row; }
};

Tiling tiling_of(const Space& space, int64_t longest) {
    Tiling t;
    t.first = space.dims - 1;
    while (t.first > 0 && t.row * space.sizes[t.first] <= std::min(longest, LONG_ROW))
        t.row *= space.sizes[t.first--];
    if (space.dims == 0) return t;
    int64_t size = space.sizes[t.first];
    t.chunks = std::max<int64_t>(1, (size * t.row + longest - 1) / longest);
    t.rows = (size + t.chunks - 1) / t.chunks;
    if (t.row == 1 && t.chunks > 1) t.rows = (t.rows + 63) & ~int64_t(63);  // whole vectors
    t.chunks = (size + t.rows - 1) / t.rows;
    t.tiles = t.chunks;
    for (int d = 0; d < t.first; d++) t.tiles *= space.sizes[d];
    return t;
}

// How an operand's part of a tile is had.
enum class Way {
    DIRECT,  // it lies in memory as the tile does, in the dtype of computation
    SINGLE,  // one number for the whole tile
    MOVED,   // converted or gathered into a tile of our own; outputs: out of it
};

// Whether the dimensions from `first` on lie one element after another.
bool dense(const Space& space, const Strides& strides, int first) {
    int64_t step = 1;
    for (int d = space.dims - 1; d >= first; step *= space.sizes[d--])
        if (strides[d] != step) return false;
    return true;
}

Way way_of(const Space& space, const Tiling& tiling, const Strides& strides, bool same_dtype) {
    bool single = true;
    for (int d = std::max(tiling.first, 0); d < space.dims; d++) single &= strides[d] == 0;
    if (single) return Way::SINGLE;
    // A tile of one row does not go along the first dimension.
    bool one = tiling.rows == 1;
    bool direct = same_dtype && dense(space, strides, std::max(0, tiling.first + one));
    return direct ? Way::DIRECT : Way::MOVED;
}

// An instruction with its operands as numbers of values: inputs, then literals, then results.
template <class T> struct Bound {
    Step<T> step;
    int result;
    int arguments[MAX_ARGUMENTS];
};

// Moves one tile between memory of any dtype and strides and a tile of our own.
struct Mover {
    Run run = nullptr;
    int64_t size = 0;  // bytes of an element in memory
    Strides strides;
};

// Calls visit(place in the tile, place in memory, count) for each run of a tile's elements.
template <class Visit>
void each_run(const Space& space, const Tiling& tiling, const Strides& strides, int64_t rows,
              Visit visit) {
    int last = space.dims - 1;
    if (last <= tiling.first) return visit(0, 0, rows);
    int64_t count = space.sizes[last], at[MAX_DIMS] = {}, memory = 0, total = rows * tiling.row;
    for (int64_t place = 0; place < total; place += count) {
        visit(place, memory, count);
        for (int d = last - 1; d >= tiling.first; d--) {
            memory += strides[d];
            if (++at[d] < space.sizes[d]) break;
            memory -= at[d] * strides[d];
            at[d] = 0;
        }
    }
}

template <class T> class ChainCall : public Call {
   public:
    ChainCall(const CallSpec& spec, const Program& program, const Space& space)
        : space_(space), n_in_(spec.n_in), n_out_(spec.n_out) {
        read(program);
        assign_tiles(spec, program);
        // A tile a value that is had by moving, and one a result that is alive.
        int64_t room = NEAR_BYTES / int64_t(sizeof(T)) / std::max(1, tiles_);
        room = std::min(LONGEST_TILE, std::max(SHORTEST_TILE, room & ~int64_t(63)));
        tiling_ = tiling_of(space_, room);
        tile_ = (tiling_.size() + 63) & ~int64_t(63);
        for (int k = 0; k < n_in_ + n_out_; k++) place_operand(spec.operands[k], k);
        keep_last_result(program);
    }

    void run(char* const* data, Context& context) override {
        int threads = rows::threads_for(context, space_.count * cost_ / 2);
        in_parallel(threads, [&](int thread, int all) {
            rows::Span span = rows::share(tiling_.tiles, thread, all);
            run_tiles(data, span.begin, span.end);
        });
    }

   private:
    static constexpr int32_t OWN = sizeof(T) == sizeof(float) ? F32 : F64;

    Space space_;
    Tiling tiling_;
    int n_in_, n_out_;
    int tiles_ = 0;      // of our own
    int64_t tile_ = 0;   // elements from one to the next
    int64_t cost_ = 1;
    std::vector<T> literals_;
    std::vector<Bound<T>> steps_;
    std::vector<Way> ways_;        // by operand
    std::vector<Mover> movers_;    // by operand
    std::vector<int> homes_;       // by value: its tile, where it has one
    std::vector<int> results_;     // by output: the value
    int direct_ = -1;              // the output that the last instruction writes itself

    int values() const { return n_in_ + int(literals_.size()) + int(steps_.size()); }
    int first_result() const { return n_in_ + int(literals_.size()); }

    void read(const Program& program) {
        for (const Instruction& i : program.instructions)
            for (const Argument& a : i.arguments)
                if (a.source == Argument::LITERAL) literals_.push_back(T(a.value));
        int literal = n_in_;
        int base = first_result();
        for (const Instruction& i : program.instructions) {
            const Kernel* kernel = find_kernel(i.op);
            if (!kernel) throw std::runtime_error("chain: there is no operator '" + i.op + "'");
            if (kernel->arity != int(i.arguments.size()))
                throw std::runtime_error("chain: wrong number of operands of '" + i.op + "'");
            Bound<T> bound{kernel->template step<T>(), base + int(steps_.size()), {}};
            for (int k = 0; k < kernel->arity; k++) {
                const Argument& a = i.arguments[k];
                if (a.source == Argument::INPUT && a.index >= n_in_)
                    throw std::runtime_error("chain: it reads more inputs than there are");
                bound.arguments[k] = a.source == Argument::INPUT     ? a.index
                                     : a.source == Argument::LITERAL ? literal++
                                                                     : base + a.index;
            }
            for (int k = kernel->arity; k < MAX_ARGUMENTS; k++)
                bound.arguments[k] = bound.arguments[0];
            steps_.push_back(bound);
            cost_ += kernel->cost;
        }
        for (int output : program.outputs) results_.push_back(base + output);
    }

    // Results share tiles: one is free again after the last instruction that reads it. Inputs that
    // may have to be moved have a tile each, since what is in it may serve the next tile too.
    void assign_tiles(const CallSpec& spec, const Program& program) {
        homes_.assign(values(), -1);
        for (int k = 0; k < n_in_; k++)
            if (spec.operands[k].dtype != OWN || !dense(space_, space_.strides[n_out_ + k], 0))
                homes_[k] = tiles_++;
        int count = int(steps_.size()), base = first_result();
        std::vector<int> last(count), free;
        for (int i = 0; i < count; i++)
            for (int argument : steps_[i].arguments)
                if (argument >= base) last[argument - base] = i;
        for (int output : program.outputs) last[output] = count;
        for (int i = 0; i < count; i++) {
            // An operand's tile may take the result: elements are read before they are written.
            for (int k = 0; k < i; k++)
                if (last[k] == i) free.push_back(homes_[base + k]);
            if (free.empty()) free.push_back(tiles_++);
            homes_[base + i] = free.back();
            free.pop_back();
        }
    }

    void place_operand(const Operand& operand, int k) {
        bool output = k >= n_in_;
        // The first operand of the space is the first output.
        const Strides& strides = space_.strides[output ? k - n_in_ : n_out_ + k];
        Way way = way_of(space_, tiling_, strides, operand.dtype == OWN);
        if (output && way == Way::SINGLE) way = Way::MOVED;
        Mover mover{nullptr, element_size(operand.dtype), strides};
        mover.run = output ? runner(operand.dtype, OWN) : runner(OWN, operand.dtype);
        if (!mover.run) throw std::runtime_error("chain: an operand's dtype");
        ways_.push_back(way);
        movers_.push_back(mover);
    }

    void keep_last_result(const Program& program) {
        for (int k = 0; k < n_out_; k++)
            if (program.outputs[k] == int(steps_.size()) - 1 && ways_[n_in_ + k] == Way::DIRECT)
                direct_ = k;
    }

    // What one thread needs: where each value is, and what its own tiles hold.
    struct Frame {
        const T** at;        // by value
        int64_t* step;       // by value: 0 for a single number
        const char** held;   // by input: where what its tile holds came from
        int64_t* held_rows;  // by input: how many rows of it
        int64_t* offsets;    // by operand of the space
        T* singles;          // by input and literal: a vector
        T* tiles;
    };

    Frame frame() const {
        int64_t inputs = first_result(), vectors = inputs * simd::LANES<T>;
        int64_t words = 2 * values() + 2 * n_in_ + int64_t(space_.strides.size());
        int64_t head = (words * 8 + 63) & ~int64_t(63);
        char* base = scratch(head + (vectors + tiles_ * tile_) * sizeof(T));
        Frame f;
        f.at = reinterpret_cast<const T**>(base);
        f.step = reinterpret_cast<int64_t*>(f.at + values());
        f.held = reinterpret_cast<const char**>(f.step + values());
        f.held_rows = reinterpret_cast<int64_t*>(f.held + n_in_);
        f.offsets = f.held_rows + n_in_;
        f.singles = reinterpret_cast<T*>(base + head);
        f.tiles = f.singles + vectors;
        return f;
    }

    Frame begin() const {
        Frame f = frame();
        for (int v = 0; v < values(); v++) {
            f.at[v] = homes_[v] < 0 ? nullptr : f.tiles + homes_[v] * tile_;
            f.step[v] = simd::LANES<T>;
        }
        for (int k = 0; k < first_result(); k++) {
            T* single = f.singles + k * simd::LANES<T>;
            if (k < n_in_ && ways_[k] != Way::SINGLE) continue;
            f.at[k] = single;
            f.step[k] = 0;
            if (k >= n_in_) std::fill(single, single + simd::LANES<T>, literals_[k - n_in_]);
        }
        std::fill(f.held, f.held + n_in_, nullptr);
        return f;
    }

    void run_tiles(char* const* data, int64_t begin_tile, int64_t end_tile) {
        if (begin_tile >= end_tile) return;
        Frame f = begin();
        for (int64_t tile = begin_tile; tile < end_tile; tile++) {
            int64_t chunk = tile % tiling_.chunks, first = chunk * tiling_.rows;
            space_.offsets(tile / tiling_.chunks, tiling_.first, f.offsets);
            int64_t rows = space_.dims ? space_.sizes[tiling_.first] : 1;
            rows = std::min(tiling_.rows, rows - first);
            load_tile(f, data, first, rows);
            compute(f, data, first, rows * tiling_.row);
            store_tile(f, data, first, rows);
        }
    }

    char* address(const Frame& f, char* const* data, int k, int64_t first) const {
        int place = k >= n_in_ ? k - n_in_ : n_out_ + k;
        int64_t offset = f.offsets[place];
        if (space_.dims) offset += first * movers_[k].strides[tiling_.first];
        return data[k] + offset * movers_[k].size;
    }

    void load_tile(Frame& f, char* const* data, int64_t first, int64_t rows) const {
        for (int k = 0; k < n_in_; k++) {
            const char* from = address(f, data, k, first);
            if (ways_[k] == Way::DIRECT) {
                f.at[k] = reinterpret_cast<const T*>(from);
                continue;
            }
            if (f.held[k] == from && (ways_[k] == Way::SINGLE || f.held_rows[k] >= rows)) continue;
            f.held[k] = from;
            f.held_rows[k] = rows;
            char* to = reinterpret_cast<char*>(const_cast<T*>(f.at[k]));
            const Mover& mover = movers_[k];
            if (ways_[k] == Way::SINGLE) {
                mover.run(to, 1, from, 0, simd::LANES<T>);
                continue;
            }
            int64_t inner = space_.dims ? mover.strides[space_.dims - 1] : 0;
            each_run(space_, tiling_, mover.strides, rows,
                     [&](int64_t place, int64_t memory, int64_t count) {
                         mover.run(to + place * sizeof(T), 1, from + memory * mover.size, inner,
                                   count);
                     });
        }
    }

    void compute(Frame& f, char* const* data, int64_t first, int64_t count) const {
        if (direct_ >= 0)
            f.at[steps_.back().result] =
                reinterpret_cast<const T*>(address(f, data, n_in_ + direct_, first));
        for (const Bound<T>& s : steps_) {
            const T* x[MAX_ARGUMENTS];
            int64_t steps[MAX_ARGUMENTS];
            for (int k = 0; k < MAX_ARGUMENTS; k++) {
                x[k] = f.at[s.arguments[k]];
                steps[k] = f.step[s.arguments[k]];
            }
            s.step(const_cast<T*>(f.at[s.result]), x, steps, count);
        }
    }

    void store_tile(const Frame& f, char* const* data, int64_t first, int64_t rows) const {
        for (int k = 0; k < n_out_; k++) {
            if (k == direct_) continue;
            const Mover& mover = movers_[n_in_ + k];
            char* to = address(f, data, n_in_ + k, first);
            auto* from = reinterpret_cast<const char*>(f.at[results_[k]]);
            int64_t inner = space_.dims ? mover.strides[space_.dims - 1] : 1;
            each_run(space_, tiling_, mover.strides, rows,
                     [&](int64_t place, int64_t memory, int64_t count) {
                         mover.run(to + memory * mover.size, inner, from + place * sizeof(T), 1,
                                   count);
                     });
        }
    }
};

Call* bind_chain(const CallSpec& spec, std::string& why) {
    return bind_program(spec, parse(Reader(spec).text()), why);
}

Register chains(12, bind_chain);

}  // namespace

Call* bind_program(const CallSpec& spec, const Program& program, std::string& why) {
    std::vector<const Operand*> operands;
    bool wide = false;
    for (int k = 0; k < spec.n_in + spec.n_out; k++) {
        const Operand& operand = spec.operands[(spec.n_in + k) % (spec.n_in + spec.n_out)];
        if (!operand.present() || !runner(F32, operand.dtype))
            return why = "an operand is absent, or of a dtype that chains do not read", nullptr;
        wide |= operand.dtype == F64;
        operands.push_back(&operand);
    }
    if (spec.n_out != int(program.outputs.size()))
        return why = "the program has another number of outputs", nullptr;
    const Operand& result = spec.operands[spec.n_in];
    for (int k = 0; k < spec.n_in + spec.n_out; k++)
        if (!broadcasts(*operands[k], result.ndim, result.sizes) ||
            (k < spec.n_out && operands[k]->numel() != result.numel()))
            return why = "operands that do not broadcast to the outputs' shape", nullptr;
    Space space = make_space(operands, result.ndim, result.sizes);
    Program shorter = simplified(program);
    if (wide) return new ChainCall<double>(spec, shorter, space);
    return new ChainCall<float>(spec, shorter, space);
}

}  // namespace shardwright::chain
