// Work on several threads: one parallel region, or none at all where one thread is enough.
#pragma once

#include <algorithm>
#include <cstdint>
#include <exception>

#include "abi.h"
#ifdef _OPENMP
#include <omp.h>
#endif

namespace shardwright {

// Multiply-adds that pay for another thread.
constexpr int64_t A_THREAD = 100'000;

inline int threads_for(int64_t work, const Context& context) {
    return int(std::min<int64_t>(context.threads, std::max<int64_t>(1, work / A_THREAD)));
}

// work(t, all) in each of `all` threads; fewer than asked for, where the machine gives fewer. Threads
// may meet at barriers, so none may throw: the others would wait for it for ever.
template <class F> void in_step(int threads, F work) {
#ifdef _OPENMP
    if (threads > 1) {
#pragma omp parallel num_threads(threads)
        [&]() noexcept { work(omp_get_thread_num(), omp_get_num_threads()); }();
        return;
    }
#endif
    work(0, 1);
}

// The same without barriers: what a thread throws is thrown here when all are done.
template <class F> void in_parallel(int threads, F work) {
    std::exception_ptr failed;
    auto holding = [&](int t, int all) {
        try {
            work(t, all);
        } catch (...) {
#pragma omp critical(shardwright_failed)
            failed = std::current_exception();
        }
    };
    if (threads <= 1) return work(0, 1);
    in_step(threads, holding);
    if (failed) std::rethrow_exception(failed);
}

}  // namespace shardwright
