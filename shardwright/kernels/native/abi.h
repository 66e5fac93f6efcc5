// What the executor and the kernels say to each other. No header of torch is needed: tensors come
// as descriptors, BLAS as function pointers that the executor found in torch's own libraries.
//
// A program is an array of calls. Memory comes as an array of base addresses at each run (the
// arena, then one a feed or a stored tensor), so that a program is bound once and runs on any
// addresses; runs of one program from several threads wait for one another.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

namespace shardwright {

constexpr int MAX_DIMS = 8;

// The order of `DTYPES` in shardwright/ir/tensor_meta.py.
enum Dtype : int32_t {
    F64, F32, F16, BF16, F8, BOOL, I64, I32, I16, I8, U8, C64, C128, U16, U32, U64
};

enum Flags : int32_t {
    STATIC = 1,  // contents never change between runs: a weight in inference. May be packed once.
};

// One operand of a call, laid out as the executor writes it (`_CallOperand` in library.py). None has a
// dimension of size 0: calls on such are refused there, for all kinds.
struct Operand {
    int64_t offset;  // bytes from its buffer's base
    int32_t buffer;  // index into the bases; -1: absent
    int32_t dtype;
    int32_t flags;
    int32_t ndim;
    int64_t sizes[MAX_DIMS];
    int64_t strides[MAX_DIMS];  // in elements

    bool present() const { return buffer >= 0; }
    int64_t numel() const {
        int64_t n = 1;
        for (int i = 0; i < ndim; i++) n *= sizes[i];
        return n;
    }
    bool contiguous() const {
        int64_t step = 1;
        for (int i = ndim - 1; i >= 0; i--) {
            if (sizes[i] != 1 && strides[i] != step) return false;
            step *= sizes[i];
        }
        return true;
    }
};

// One call as the executor describes it; inputs first, then outputs.
struct CallSpec {
    int32_t kind;
    int32_t schema;
    int32_t n_in;
    int32_t n_out;
    const Operand* operands;
    const uint8_t* blob;
    int64_t blob_size;
};

struct Context {
    int threads;           // how many threads this run may use
    char* work = nullptr;  // as many bytes as the largest call of the program works in, or null
};

// Memory of the calling thread, 64-byte aligned, for the time of one `run`: what is in it is lost
// at the next call of `scratch` in the same thread. For little: what grows with the operands is
// asked for by `work_bytes`, and part of the plan. It grows at the first run that needs more, so
// that later runs allocate nothing; in a parallel region each thread asks for its own.
char* scratch(size_t bytes);

// Memory to work in, one piece after another, each on cache lines of its own.
struct Pieces {
    char* at;
    template <class T> static int64_t bytes(int64_t count) {
        return (count * int64_t(sizeof(T)) + 63) & ~int64_t(63);
    }
    template <class T> T* take(int64_t count) {
        T* piece = reinterpret_cast<T*>(at);
        at += bytes<T>(count);
        return piece;
    }
};

// A bound call. Kernels derive from it; what a kernel parses, packs or allocates once lives in it.
// Runs of one program wait for one another, so memory of a call is its own while it runs.
struct Call {
    CallSpec spec;  // its operands and blob live as long as the call
    virtual ~Call() = default;
    // data[i] is operand i's address, nullptr where absent.
    virtual void run(char* const* data, Context& context) = 0;
    // Once after binding, before the first run, and again when static contents were replaced;
    // data[i] is given for static operands, nullptr for others.
    virtual void prepare(char* const* /*data*/, Context& /*context*/) {}
    // Bytes of `Context::work` that a run needs.
    virtual int64_t work_bytes() const { return 0; }

    const Operand& in(int i) const { return spec.operands[i]; }
    const Operand& out(int i) const { return spec.operands[spec.n_in + i]; }
};

// A kind's binder: a new Call, or nullptr with the reason in `why`, where the kernel does not do
// these dtypes, strides or attributes. The executor then calls the kind's torch kernel instead.
// `spec` is kept by the runtime as long as the call lives, which sets the call's own copy.
using Binder = Call* (*)(const CallSpec& spec, std::string& why);

// Registers a binder when the library is loaded: `static Register r(8, bind_add);`
struct Register {
    Register(int32_t kind, Binder binder);
};

// BLAS of the process, by its Fortran interface; null where it is not had.
// The order is `SYMBOLS` in library.py.
struct Blas {
    void (*sgemm)(const char*, const char*, const int*, const int*, const int*, const float*,
                  const float*, const int*, const float*, const int*, const float*, float*,
                  const int*);
    void (*dgemm)(const char*, const char*, const int*, const int*, const int*, const double*,
                  const double*, const int*, const double*, const int*, const double*, double*,
                  const int*);
    // How many threads MKL uses for calls from this thread, 0 for its default; gives the former.
    int (*set_threads)(int threads);
};
extern Blas blas;

// Reads a blob field by field, in the layout's order (see shardwright/kernels/attributes.py).
struct Reader {
    const uint8_t* at;
    const uint8_t* end;
    explicit Reader(const CallSpec& s) : at(s.blob), end(s.blob + s.blob_size) {}
    template <class T> T take() {
        T value{};
        need(sizeof(T));
        std::memcpy(&value, at, sizeof(T));
        at += sizeof(T);
        return value;
    }
    std::string text() {
        uint32_t n = take<uint32_t>();
        need(n);
        std::string s(reinterpret_cast<const char*>(at), n);
        at += n;
        return s;
    }
    template <class T> std::vector<T> list() {
        std::vector<T> values(take<uint32_t>());
        for (T& value : values) value = take<T>();
        return values;
    }

   private:
    void need(size_t bytes) const {
        if (static_cast<size_t>(end - at) < bytes)
            throw std::runtime_error("the blob is too short");
    }
};

}  // namespace shardwright
