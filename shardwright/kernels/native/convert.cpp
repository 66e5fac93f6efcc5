// Runs of elements from one dtype to another: one loop for each pair of types, three ways each
// (dense, one element repeated, strides).
#include "convert.h"

namespace shardwright {

namespace {

template <class T> auto value_of(T x) { return x; }
float value_of(BFloat x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
int32_t value_of(Bool x) { return x.byte != 0; }

// To the even one of two neighbours; NaN stays one.
BFloat bfloat(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    uint32_t rounded = bits + 0x7fff + (bits >> 16 & 1);
    return {value != value ? uint16_t(0x7fc0) : uint16_t(rounded >> 16)};
}

#ifdef __FLT16_MAX__
float value_of(Half x) { return float(x.value); }
#endif

template <class To> struct Made {
    template <class V> static To from(V value) {
        // From a float to a narrow integer by way of a wide one: the low bytes count.
        if constexpr (std::is_floating_point_v<V> && sizeof(To) < 4) return To(int64_t(value));
        else return To(value);
    }
};
template <> struct Made<Bool> {
    template <class V> static Bool from(V value) { return {uint8_t(value != 0)}; }
};
template <> struct Made<BFloat> {
    template <class V> static BFloat from(V value) { return bfloat(float(value)); }
};
#ifdef __FLT16_MAX__
template <> struct Made<Half> {
    template <class V> static Half from(V value) { return {_Float16(float(value))}; }
};
#endif

template <class To, class From> To convert(From x) {
    if constexpr (std::is_same_v<To, From>) return x;
    else return Made<To>::from(value_of(x));
}

template <class To, class From>
void convert_run(char* to_bytes, int64_t to_stride, const char* from_bytes, int64_t from_stride,
                 int64_t count) {
    auto* to = reinterpret_cast<To*>(to_bytes);
    auto* from = reinterpret_cast<const From*>(from_bytes);
    if (to_stride == 1 && from_stride == 1) {
        if constexpr (std::is_same_v<To, From>) std::memmove(to, from, count * sizeof(To));
        else for (int64_t i = 0; i < count; i++) to[i] = convert<To>(from[i]);
    } else if (to_stride == 1 && from_stride == 0) {
        To value = count ? convert<To>(from[0]) : To{};
        for (int64_t i = 0; i < count; i++) to[i] = value;
    } else {
        for (int64_t i = 0; i < count; i++) to[i * to_stride] = convert<To>(from[i * from_stride]);
    }
}

struct Pair { uint64_t low, high; };

// Between equal dtypes only the size counts.
Run mover(int64_t size) {
    switch (size) {
        case 1: return convert_run<uint8_t, uint8_t>;
        case 2: return convert_run<uint16_t, uint16_t>;
        case 4: return convert_run<uint32_t, uint32_t>;
        case 8: return convert_run<uint64_t, uint64_t>;
        default: return convert_run<Pair, Pair>;
    }
}

}  // namespace

Run runner(int32_t to, int32_t from) {
    if (to == from) return mover(element_size(to));
    Run found = nullptr;
    with_type(to, [&](auto to_tag) {
        with_type(from, [&](auto from_tag) {
            using To = typename decltype(to_tag)::Type;
            found = convert_run<To, typename decltype(from_tag)::Type>;
        });
    });
    return found;
}

}  // namespace shardwright
