// Binds a call to a chain's program, for kinds that are short chains themselves.
#pragma once

#include "abi.h"
#include "chain_program.h"

namespace shardwright::chain {

// A call that computes `program` of the inputs, which broadcast to the outputs' shape; or null and
// the reason. Throws std::runtime_error where the program has no such operators.
Call* bind_program(const CallSpec& spec, const Program& program, std::string& why);

}  // namespace shardwright::chain
