// One instruction of a chain over a tile of elements.
#pragma once

#include <cstdint>
#include <string>

namespace shardwright::chain {

constexpr int MAX_ARGUMENTS = 3;

// y[i] = op(x[0][i], …) for i below count. An argument whose step is 0 is one vector, all lanes of
// which hold the same number; other steps are `LANES`. y may be one of the x.
template <class T>
using Step = void (*)(T* y, const T* const* x, const int64_t* steps, int64_t count);

struct Kernel {
    const char* name;
    int arity;
    int cost;  // about how many additions it takes as long as
    Step<float> f32;
    Step<double> f64;

    template <class T> Step<T> step() const {
        if constexpr (sizeof(T) == sizeof(float)) return f32;
        else return f64;
    }
};

// The row of an operator, or null.
const Kernel* find_kernel(const std::string& name);

}  // namespace shardwright::chain
