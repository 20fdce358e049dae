// What the package for JavaScript (packaging/npm) asks of the kernels: one operation on rows of scores in C order.
#include <stdint.h>
#include <string.h>

#include "anymax.h"
#include "wasm/door.hpp"

// `out` is what the operation writes: n numbers a row, or one for ANYMAX_LOSS and ANYMAX_THRESHOLD. What an operation does not
// read may be NULL.
EXPORT int rows_run(int32_t op, int32_t map, int32_t dtype, int32_t noise, double param, int32_t rows, int32_t n, const void *x,
                    const void *p, const void *g, const int64_t *index, const void *scale, void *out) {
    const auto view = [n](const void *data) { return anymax_view{(void *)data, n, 0, 1}; };
    anymax_call c;
    memset(&c, 0, sizeof c);
    c.op = op, c.map = map, c.dtype = dtype, c.noise = noise;
    c.outer = rows, c.inner = 1, c.n = n, c.param = param, c.pool = -1;
    c.nodes = dtype == ANYMAX_F64 ? ANYMAX_NODES_F64 : ANYMAX_NODES;
    c.x = view(x), c.p = view(p), c.g = view(g), c.out = view(out);
    c.index = index, c.scale = scale, c.value = out, c.tau = op == ANYMAX_THRESHOLD ? out : nullptr;
    return anymax_run(&c);
}

EXPORT const char *rows_error(int code) { return anymax_error(code); }
