// Element types, and runs of elements converted from one to another as torch converts them.
#pragma once

#include "abi.h"

namespace shardwright {

// Types without a C++ type of their own; f16 and bf16 go by way of float, as in torch.
struct Bool { uint8_t byte; };
struct BFloat { uint16_t bits; };
#ifdef __FLT16_MAX__
struct Half { _Float16 value; };
#endif

template <class T> struct Tag { using Type = T; };

// f(Tag<T>{}) of the dtype's type; false where it has none here.
template <class F> bool with_type(int32_t dtype, F f) {
    switch (dtype) {
        case F64: f(Tag<double>{}); return true;
        case F32: f(Tag<float>{}); return true;
#ifdef __FLT16_MAX__
        case F16: f(Tag<Half>{}); return true;
#endif
        case BF16: f(Tag<BFloat>{}); return true;
        case BOOL: f(Tag<Bool>{}); return true;
        case I64: f(Tag<int64_t>{}); return true;
        case I32: f(Tag<int32_t>{}); return true;
        case I16: f(Tag<int16_t>{}); return true;
        case I8: f(Tag<int8_t>{}); return true;
        case U8: f(Tag<uint8_t>{}); return true;
        default: return false;
    }
}

// Bytes of an element of any dtype.
inline int64_t element_size(int32_t dtype) {
    constexpr int64_t SIZES[] = {8, 4, 2, 2, 1, 1, 8, 4, 2, 1, 1, 8, 16, 2, 4, 8};
    return SIZES[dtype];
}

// to[i * to_stride] = from[i * from_stride] for i below count; strides in elements. The runs may be
// the same memory where the dtypes and strides are.
using Run = void (*)(char* to, int64_t to_stride, const char* from, int64_t from_stride,
                     int64_t count);

// The conversion between two dtypes, or null. Equal dtypes: any, moved as they are.
Run runner(int32_t to, int32_t from);

}  // namespace shardwright
