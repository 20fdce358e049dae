// How many non-zeros of each row are worth saving for the gradient; 0: none.
#ifndef ANYMAX_PYTHON_SAVES_HPP
#define ANYMAX_PYTHON_SAVES_HPP

#include "anymax.h"

static inline int64_t anymax_saves(int32_t op, int32_t map, double param, int64_t rows, int64_t n) {
    const bool sparse = map >= ANYMAX_SPARSEMAX && map <= ANYMAX_TOPP;
    if (op == ANYMAX_LOSS) {
        const bool few = n <= 128 && (map == ANYMAX_SOFTMAX || map == ANYMAX_SPARSEMAX || (map == ANYMAX_ENTMAX && (param == 1.0 || param == 1.5 || param == 2.0)));
        const int64_t size = n / 32 > 128 ? n / 32 : 128;
        return few ? 0 : map == ANYMAX_SOFTMAX ? 1 : sparse ? (size < n ? size : n) : 0;
    }
    if (!sparse || rows * n < 16384 || (map == ANYMAX_ENTMAX && param < 1.22)) return 0;
    const bool wide = map == ANYMAX_ENTMAX && param < 1.45, wider = map == ANYMAX_ENTMAX && param < 1.3;
    if (n < (wider ? 4096 : wide ? 768 : 256)) return 0;
    const int64_t most = n / 8 < (wider ? 1024 : 256) ? n / 8 : wider ? 1024 : 256, least = n / (wider ? 24 : 32);
    const int64_t size = most > least ? most : least;
    return (map == ANYMAX_TOPK && param * 16 > (double)n) || (map == ANYMAX_BUDGET && param * 2.4 > (double)size) ? 0 : size;
}

#endif
