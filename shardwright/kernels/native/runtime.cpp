// The part that knows no kernel: the table of binders, and the C interface that library.py calls.
//
// Comes in: calls with their operands, then base addresses. What always holds: a call's operands
// and blob live as long as the call; a program owns no call and no memory of tensors; nothing
// throws through the C interface.
#include "abi.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <mutex>

namespace shardwright {

Blas blas{};

namespace {

constexpr int KINDS = 256;

Binder* binders() {
    static Binder table[KINDS] = {};
    return table;
}

// A call with the memory that its spec points to. Programs may share it, so that the lock is the
// call's own: it keeps figures and packed weights of its own while it runs or is prepared.
struct Bound {
    std::vector<Operand> operands;
    std::vector<uint8_t> blob;
    CallSpec spec;
    int32_t number;  // in the plan that it was bound for
    std::unique_ptr<Call> call;
    std::mutex busy;

    Bound(const CallSpec& given, int32_t n)
        : operands(given.operands, given.operands + given.n_in + given.n_out),
          blob(given.blob, given.blob + given.blob_size), spec(given), number(n) {
        spec.operands = operands.data();
        spec.blob = blob.data();
    }
};

struct Program {
    std::vector<Bound*> calls;
    size_t most_operands = 0;
    int64_t work_at = -1;  // from the first base; -1 where no memory to work in is given
    std::mutex running;
};

void place(const Bound& bound, char* const* bases, char** data) {
    for (const Operand& operand : bound.operands)
        *data++ = operand.present() ? bases[operand.buffer] + operand.offset : nullptr;
}

// MKL keeps to the run's threads while this lives.
struct BlasThreads {
    int before = 0;
    explicit BlasThreads(int threads) { if (blas.set_threads) before = blas.set_threads(threads); }
    ~BlasThreads() { if (blas.set_threads) blas.set_threads(before); }
};

void tell(const std::string& what, char* text, int64_t size) {
    if (size <= 0) return;
    size_t n = std::min<size_t>(what.size(), size - 1);
    std::memcpy(text, what.data(), n);
    text[n] = 0;
}

Call* bind_call(const CallSpec& spec, std::string& why) {
    Binder binder = spec.kind >= 0 && spec.kind < KINDS ? binders()[spec.kind] : nullptr;
    if (!binder) {
        why = "no native kernel of this kind";
        return nullptr;
    }
    return binder(spec, why);
}

// One call that was made, as library.py reads it (`_Logged`).
struct Logged {
    int32_t number;
    int32_t kind;
    double seconds;
};

// Room for as many calls as the program has, and how many of them returned.
struct Log {
    Logged* calls;
    int64_t count;
};

using Clock = std::chrono::steady_clock;

struct Memory {
    char* at = nullptr;
    size_t size = 0;
    ~Memory() { std::free(at); }
};

}  // namespace

Register::Register(int32_t kind, Binder binder) { binders()[kind] = binder; }

char* scratch(size_t bytes) {
    thread_local Memory memory;
    if (bytes > memory.size) {
        std::free(memory.at);
        memory.size = (bytes + 4095) & ~size_t(4095);
        memory.at = static_cast<char*>(std::aligned_alloc(64, memory.size));
        if (!memory.at) {
            memory.size = 0;
            throw std::bad_alloc();
        }
    }
    return memory.at;
}

}  // namespace shardwright

using namespace shardwright;

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void sw_set_blas(const void* const* symbols, int64_t count) {
    std::memcpy(&blas, symbols, std::min(sizeof(Blas), count * sizeof(void*)));
}

// A handle, or null with the reason in `why`.
EXPORT void* sw_bind(const CallSpec* spec, int32_t number, char* why, int64_t why_size) {
    std::string reason = "the binder gave no reason";
    try {
        auto bound = std::make_unique<Bound>(*spec, number);
        bound->call.reset(bind_call(bound->spec, reason));
        if (bound->call) {
            bound->call->spec = bound->spec;
            return bound.release();
        }
    } catch (const std::exception& error) {
        reason = error.what();
    }
    tell(reason, why, why_size);
    return nullptr;
}

EXPORT void sw_release(void* bound) { delete static_cast<Bound*>(bound); }

// Gives a call its static operands; 0, or 1 where memory ran out.
EXPORT int sw_prepare(void* handle, char* const* bases, int threads) {
    auto* bound = static_cast<Bound*>(handle);
    try {
        std::vector<char*> data(bound->operands.size());
        for (size_t i = 0; i < data.size(); i++) {
            const Operand& operand = bound->operands[i];
            bool given = operand.present() && (operand.flags & STATIC);
            data[i] = given ? bases[operand.buffer] + operand.offset : nullptr;
        }
        Context context{threads};
        BlasThreads limit(threads);
        std::lock_guard<std::mutex> lock(bound->busy);
        bound->call->prepare(data.data(), context);
        return 0;
    } catch (const std::exception&) {
        return 1;
    }
}

// `work_at` says where behind the first base there are `sw_work_bytes` to work in, or is -1.
EXPORT void* sw_program(void* const* bounds, int64_t count, int64_t work_at) {
    try {
        auto program = std::make_unique<Program>();
        program->work_at = work_at;
        for (int64_t i = 0; i < count; i++) {
            program->calls.push_back(static_cast<Bound*>(bounds[i]));
            program->most_operands =
                std::max(program->most_operands, program->calls.back()->operands.size());
        }
        return program.release();
    } catch (const std::exception&) {
        return nullptr;
    }
}

EXPORT int64_t sw_work_bytes(void* program) {
    int64_t most = 0;
    for (Bound* bound : static_cast<Program*>(program)->calls)
        most = std::max(most, bound->call->work_bytes());
    return most;
}

EXPORT void sw_release_program(void* program) { delete static_cast<Program*>(program); }

// What the last call that threw in this thread said: a kernel throws, outside of parallel regions,
// where the data makes no sense to it (an index out of range) or memory runs out.
thread_local std::string failure;

EXPORT const char* sw_failure() { return failure.c_str(); }

// Runs the calls in order; 0, or 1 + the index of the call that threw.
template <bool LOGGED>
static int64_t run_calls(Program* program, char* const* bases, int threads, Log* log) {
    std::lock_guard<std::mutex> lock(program->running);
    int64_t done = 0;
    try {
        thread_local std::vector<char*> data;
        if (data.size() < program->most_operands) data.resize(program->most_operands);
        Context context{threads, program->work_at < 0 ? nullptr : bases[0] + program->work_at};
        BlasThreads limit(threads);
        for (Bound* bound : program->calls) {
            Clock::time_point begin;
            if constexpr (LOGGED) begin = Clock::now();
            place(*bound, bases, data.data());
            std::lock_guard<std::mutex> alone(bound->busy);
            bound->call->run(data.data(), context);
            if constexpr (LOGGED) {
                std::chrono::duration<double> took = Clock::now() - begin;
                log->calls[log->count++] = {bound->number, bound->call->spec.kind, took.count()};
            }
            done++;
        }
        return 0;
    } catch (const std::exception& error) {
        failure = error.what();
        return done + 1;
    }
}

EXPORT int64_t sw_run(void* program, char* const* bases, int threads) {
    return run_calls<false>(static_cast<Program*>(program), bases, threads, nullptr);
}

// As `sw_run`; writes each call that returned into the log.
EXPORT int64_t sw_run_logged(void* program, char* const* bases, int threads, Log* log) {
    return run_calls<true>(static_cast<Program*>(program), bases, threads, log);
}
