// The two 16-bit formats as floats, and floats rounded to them.
#pragma once

#include "core/vectors.hpp"

namespace ANYMAX_UNIT {

ANYMAX_INLINE float from_bf16(uint16_t h) { return bits_as<float>((uint32_t)h << 16); }
ANYMAX_INLINE uint16_t to_bf16(float f) {
    const uint32_t u = bits_as<uint32_t>(f);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((u >> 16) | 0x40);
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
}
ANYMAX_INLINE float from_f16(uint16_t h) {
#if defined(__F16C__)
    return _cvtsh_ss(h);
#else
    const uint32_t sign = (uint32_t)(h & 0x8000u) << 16, body = h & 0x7fffu;
    if (body >= 0x7c00u) return bits_as<float>(sign | 0x7f800000u | body << 13);
    return bits_as<float>(sign | bits_as<uint32_t>(bits_as<float>(body << 13) *
                                                   5.192296858534828e33f));  // 2^112: the difference of the exponents' biases
#endif
}
ANYMAX_INLINE uint16_t to_f16(float f) {
#if defined(__F16C__)
    return (uint16_t)_cvtss_sh(f, 0);
#else
    uint32_t u = bits_as<uint32_t>(f);
    const uint16_t sign = (uint16_t)((u >> 16) & 0x8000u);
    u &= 0x7fffffffu;
    if (u > 0x7f800000u) return (uint16_t)(sign | 0x7e00u);
    if (u >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u);
    if (u < 0x38800000u)
        return (uint16_t)(sign |
                          (bits_as<uint32_t>(bits_as<float>(u) + 0.5f) - 0x3f000000u));  // subnormal: the addition rounds
    u += 0xfffu + ((u >> 13) & 1);
    return (uint16_t)(sign | ((u - 0x38000000u) >> 13));
#endif
}

}  // namespace ANYMAX_UNIT
