// Chains: programs over one element (the text of shardwright/kernels/chains.py), parsed, and bound
// to a call: also for kinds that are short chains themselves.
//
//     mul x0 x1; add %0 0.5; tanh %1 -> %2 %0
#pragma once

#include <string>
#include <vector>

#include "abi.h"

namespace shardwright::chain {

struct Argument {
    enum Source { INPUT, RESULT, LITERAL } source;
    int index;
    double value;

    bool is(Source s, int i) const { return source == s && index == i; }
};

inline Argument input(int index) { return {Argument::INPUT, index, 0}; }
inline Argument result(int index) { return {Argument::RESULT, index, 0}; }
inline Argument literal(double value) { return {Argument::LITERAL, -1, value}; }

struct Instruction {
    std::string op;
    std::vector<Argument> arguments;
};

struct Program {
    std::vector<Instruction> instructions;
    std::vector<int> outputs;  // numbers of instructions
};

// Throws std::runtime_error, which says what is wrong with the text.
Program parse(const std::string& text);

// The same with fewer steps: products that are added or subtracted once become one instruction,
// powers by literals become products and roots.
Program simplified(Program program);

// --- instructions over a tile of elements

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

// --- calls

// A call that computes `program` of the inputs, which broadcast to the outputs' shape; or null and
// the reason. Throws std::runtime_error where the program has no such operators.
Call* bind_program(const CallSpec& spec, const Program& program, std::string& why);

}  // namespace shardwright::chain
