// What the kernels ask of a compiler: C++17, GNU vector extensions, and a choice between vectors by a comparison.
#include <stdint.h>

#if defined(__FAST_MATH__)
#error "-ffast-math breaks the kernels: infinities and NaN have meanings here"
#endif

typedef float vf __attribute__((vector_size(16)));
typedef float vh __attribute__((vector_size(8)));
typedef double vd __attribute__((vector_size(16)));
typedef int32_t vi __attribute__((vector_size(16)));

template <class V>
inline __attribute__((always_inline)) V larger(V a, V b) {
    if constexpr (sizeof(V) == 16) return a > b ? a : b;
    return a;
}

int main(int argc, char **) {
    vf x = float(argc) - vf{};
    x[1] = 2.0f;
    x = larger(x, 1.0f - x);
    vd wide = __builtin_convertvector(vh{1, 2}, vd);
    return int(((vi)x << 1)[0]) + int(wide[1]);
}
