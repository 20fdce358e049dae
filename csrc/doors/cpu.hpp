// What an x86-64 processor has, and its system saves. Asked by the instructions themselves: __builtin_cpu_supports needs a
// table that not every toolchain links (clang-cl's and Zig's do not), and older compilers do not know all names.
#pragma once

#include <cpuid.h>

namespace {

constexpr unsigned AVX2_STATE = 0x6, AVX512_STATE = 0xe6;  // registers that the system saves at a switch of tasks

bool has(unsigned state, unsigned seven) {
    constexpr unsigned first = bit_OSXSAVE | bit_AVX | bit_FMA | bit_F16C | bit_POPCNT;
    unsigned a, b, c, d, low, high;
    if (!__get_cpuid(1, &a, &b, &c, &d) || (c & first) != first) return false;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    if ((low & state) != state) return false;
    if (!__get_cpuid(0x80000001u, &a, &b, &c, &d) || !(c & bit_LZCNT)) return false;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & seven) == seven;
}

bool has_avx2() {
    static const bool found = has(AVX2_STATE, bit_AVX2 | bit_BMI | bit_BMI2);
    return found;
}

bool has_avx512() {
    constexpr unsigned wide = bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL | bit_AVX512CD;
    static const bool found = has(AVX512_STATE, bit_AVX2 | bit_BMI | bit_BMI2 | wide);
    return found;
}

}  // namespace
