// Chains as values: the text of shardwright/kernels/chains.py, parsed.
//
//     mul x0 x1; add %0 0.5; tanh %1 -> %2 %0
#pragma once

#include <string>
#include <vector>

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

}  // namespace shardwright::chain
