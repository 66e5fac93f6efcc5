// Rows of a table by their numbers, and the table's gradient.
//
// Comes in: a table, or the gradients of the rows that were taken, and the rows' numbers in any
// shape. What always holds: a number that is no row is an error, and nothing outside of the table
// is read or written; the gradients of one row are added in the order in which it was taken,
// whatever the number of threads.
#include <atomic>
#include <stdexcept>

#include "sums.h"

namespace shardwright {
namespace {

using namespace rows;

// The rows' numbers, in order.
struct Numbers {
    const Operand& operand;
    const char* data;
    Walk places;
    int64_t rows;                    // of the table
    std::atomic<int64_t> wrong{-1};  // a place whose number is no row

    Numbers(const Operand& o, const char* at, int64_t table_rows)
        : operand(o), data(at), places(walk(o, 0, o.ndim)), rows(table_rows) {}

    int64_t read(int64_t place) const {
        int64_t at = places.offset(place);
        return operand.dtype == I64 ? reinterpret_cast<const int64_t*>(data)[at]
                                    : reinterpret_cast<const int32_t*>(data)[at];
    }
    // The number at a place; -1 where it is no row.
    int64_t of(int64_t place) {
        int64_t number = read(place);
        if (number >= 0 && number < rows) return number;
        wrong = place;
        return -1;
    }
    void check() const {
        if (wrong < 0) return;
        throw std::out_of_range("index " + std::to_string(read(wrong)) + " at place " +
                                std::to_string(wrong) + " is no row of a table of " +
                                std::to_string(rows));
    }
};

template <class T> struct Embedding : Call {
    Walk places;  // of y's rows
    explicit Embedding(const CallSpec& s) {
        spec = s;
        places = walk(out(0), 0, out(0).ndim - 1);
    }

    void run(char* const* data, Context& context) override {
        int64_t columns = in(0).sizes[1], stride = in(0).strides[0];
        Numbers numbers(in(1), data[1], in(0).sizes[0]);
        in_parallel(threads_for(context, out(0).numel()), [&](int thread, int threads) {
            Span part = share(places.count, thread, threads);
            for (int64_t i = part.begin; i < part.end; i++) {
                int64_t row = numbers.of(i);
                if (row < 0) continue;
                const T* from = as<T>(data[0]) + row * stride;
                std::memcpy(as<T>(data[2]) + places.offset(i), from, columns * sizeof(T));
            }
        });
        numbers.check();
    }
};

template <class T> struct EmbeddingBwd : Call {
    int64_t padding;
    Walk places;  // of dy's rows
    EmbeddingBwd(const CallSpec& s, int64_t p) : padding(p) {
        spec = s;
        places = walk(in(0), 0, in(0).ndim - 1);
    }

    // A thread has some columns of all rows.
    void run(char* const* data, Context& context) override {
        int64_t rows = out(0).sizes[0], columns = out(0).sizes[1];
        Numbers numbers(in(1), data[1], rows);
        int most = threads_for(context, in(0).numel() + out(0).numel());
        in_parallel(most, [&](int thread, int threads) {
            Span part = share(columns, thread, threads, LANES<T>);
            if (part.begin < part.end) add(data, numbers, part);
        });
        numbers.check();
    }

    void add(char* const* data, Numbers& numbers, Span part) {
        int64_t count = part.end - part.begin, stride = out(0).strides[0];
        const T* dy = as<T>(data[0]) + part.begin;
        T* dw = as<T>(data[2]) + part.begin;
        for (int64_t r = 0; r < numbers.rows; r++)
            std::memset(dw + r * stride, 0, count * sizeof(T));
        for (int64_t i = 0; i < places.count; i++) {
            int64_t row = numbers.of(i);
            if (row < 0 || row == padding) continue;
            T* to = dw + row * stride;
            map(count, [](Vec<T> a, Vec<T> b) { return a + b; }, to, to, dy + places.offset(i));
        }
    }
};

// A table and what is taken from it, row by row.
std::string misfit(const Operand& table, const Operand& index, const Operand& taken) {
    if (table.dtype != taken.dtype || !floating(table)) return "dtypes";
    if (index.dtype != I64 && index.dtype != I32) return "indices are i64 or i32";
    if (table.ndim != 2 || taken.ndim != index.ndim + 1) return "the table is [rows, columns]";
    if (taken.sizes[index.ndim] != table.sizes[1]) return "the table's columns";
    if (!std::equal(index.sizes, index.sizes + index.ndim, taken.sizes)) return "shapes";
    bool whole = rows_contiguous(table, 1) && rows_contiguous(taken, 1);
    if (!whole) return "a row's elements lie apart";
    return "";
}

Call* bind_embedding(const CallSpec& spec, std::string& why) {
    why = misfit(spec.operands[0], spec.operands[1], spec.operands[2]);
    if (!why.empty()) return nullptr;
    if (spec.operands[0].dtype == F32) return new Embedding<float>(spec);
    return new Embedding<double>(spec);
}

Call* bind_embedding_bwd(const CallSpec& spec, std::string& why) {
    int64_t padding = Reader(spec).take<int64_t>();
    why = misfit(spec.operands[2], spec.operands[1], spec.operands[0]);
    if (!why.empty()) return nullptr;
    if (spec.operands[0].dtype == F32) return new EmbeddingBwd<float>(spec, padding);
    return new EmbeddingBwd<double>(spec, padding);
}

Register embedding_kind(30, bind_embedding);
Register embedding_bwd_kind(31, bind_embedding_bwd);

}  // namespace
}  // namespace shardwright
