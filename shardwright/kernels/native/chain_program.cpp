// Reads the text of a chain and rewrites what the machine has a shorter way for.
#include "chain.h"

#include <charconv>
#include <sstream>
#include <stdexcept>

namespace shardwright::chain {

namespace {

[[noreturn]] void fail(const std::string& text, const std::string& why) {
    throw std::runtime_error("chain '" + text + "': " + why);
}

double number(const std::string& token, const std::string& text) {
    double value;
    auto [end, error] = std::from_chars(token.data(), token.data() + token.size(), value);
    if (error != std::errc() || end != token.data() + token.size())
        fail(text, "'" + token + "' is none of xN, %N and a number");
    return value;
}

Argument argument(const std::string& token, const std::string& text) {
    if (token[0] != 'x' && token[0] != '%') return literal(number(token, text));
    int index = -1;
    auto [end, error] = std::from_chars(token.data() + 1, token.data() + token.size(), index);
    if (error != std::errc() || end != token.data() + token.size() || index < 0)
        fail(text, "'" + token + "' is none of xN, %N and a number");
    return token[0] == 'x' ? input(index) : result(index);
}

Instruction instruction(const std::string& part, const std::string& text) {
    std::istringstream words(part);
    Instruction made;
    words >> made.op;
    for (std::string word; words >> word;) made.arguments.push_back(argument(word, text));
    return made;
}

// Operators with as many operands as they take, which are earlier results: rewriting relies on it.
void check(const Program& program, const std::string& text) {
    int count = int(program.instructions.size());
    for (int i = 0; i < count; i++) {
        const Instruction& made = program.instructions[i];
        const Kernel* kernel = find_kernel(made.op);
        if (!kernel) fail(text, "there is no operator '" + made.op + "'");
        if (kernel->arity != int(made.arguments.size()))
            fail(text, "wrong number of operands of '" + made.op + "'");
        for (const Argument& a : made.arguments)
            if (a.source == Argument::RESULT && a.index >= i)
                fail(text, "instruction %" + std::to_string(i) + " reads a later result");
    }
    for (int output : program.outputs)
        if (output >= count) fail(text, "an output that no instruction computes");
    if (program.outputs.empty()) fail(text, "there are no outputs");
}

// How often each result is read, by instructions and as an output.
std::vector<int> uses(const Program& program) {
    std::vector<int> counts(program.instructions.size());
    for (const Instruction& i : program.instructions)
        for (const Argument& a : i.arguments)
            if (a.source == Argument::RESULT) counts[a.index]++;
    for (int output : program.outputs) counts[output]++;
    return counts;
}

// x^2, x^3, x^0.5, x^-0.5 and x^-1. As in torch, other powers go by `pow`.
void rewrite_power(Instruction& i) {
    if (i.op != "pow" || i.arguments[1].source != Argument::LITERAL) return;
    static const struct { double power; const char* op; } ROWS[] = {
        {2, "square"}, {3, "cube"}, {0.5, "sqrt"}, {-0.5, "rsqrt"}, {-1, "reciprocal"}};
    for (const auto& row : ROWS)
        if (i.arguments[1].value == row.power) i = {row.op, {i.arguments[0]}};
}

// Takes the product that is operand `at` of instruction `i` into it.
bool absorb(Program& program, const std::vector<int>& counts, Instruction& i, int at,
            const char* op) {
    const Argument& a = i.arguments[at];
    if (a.source != Argument::RESULT || counts[a.index] != 1) return false;
    const Instruction& product = program.instructions[a.index];
    if (product.op != "mul") return false;
    i = {op, {product.arguments[0], product.arguments[1], i.arguments[1 - at]}};
    return true;
}

// The program without what no output needs.
Program without_dead(const Program& program) {
    int count = int(program.instructions.size());
    std::vector<char> needed(count);
    for (int output : program.outputs) needed[output] = 1;
    for (int i = count - 1; i >= 0; i--)
        for (const Argument& a : program.instructions[i].arguments)
            if (needed[i] && a.source == Argument::RESULT) needed[a.index] = 1;
    Program kept;
    std::vector<int> place(count);
    for (int i = 0; i < count; i++) {
        if (!needed[i]) continue;
        place[i] = int(kept.instructions.size());
        Instruction moved = program.instructions[i];
        for (Argument& a : moved.arguments)
            if (a.source == Argument::RESULT) a.index = place[a.index];
        kept.instructions.push_back(moved);
    }
    for (int output : program.outputs) kept.outputs.push_back(place[output]);
    return kept;
}

}  // namespace

Program parse(const std::string& text) {
    size_t arrow = text.rfind("->");
    if (arrow == std::string::npos) fail(text, "there is no '->'");
    Program program;
    std::istringstream body(text.substr(0, arrow)), ends(text.substr(arrow + 2));
    for (std::string part; std::getline(body, part, ';');)
        program.instructions.push_back(instruction(part, text));
    for (std::string word; ends >> word;) {
        Argument output = argument(word, text);
        if (output.source != Argument::RESULT) fail(text, "an output is a result, as %0");
        program.outputs.push_back(output.index);
    }
    check(program, text);
    return program;
}

Program simplified(Program program) {
    std::vector<int> counts = uses(program);
    for (Instruction& i : program.instructions) {
        rewrite_power(i);
        if (i.op == "add")
            absorb(program, counts, i, 0, "mul_add") || absorb(program, counts, i, 1, "mul_add");
        else if (i.op == "sub")
            absorb(program, counts, i, 0, "mul_sub") || absorb(program, counts, i, 1, "sub_mul");
    }
    return without_dead(program);
}

}  // namespace shardwright::chain
