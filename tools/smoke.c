/* Softmax, sparsemax and a refused call through the C ABI, under every instruction set of this machine; exits 0 where all is
 * well. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "anymax.h"

enum { ROWS = 300, N = 1000 };
static int wrong = 0;

static void expect(int holds, const char *isa, const char *what) {
    if (!holds) {
        printf("%s: %s\n", isa, what);
        wrong = 1;
    }
}

static int64_t code(int map, int dtype) { return ANYMAX_FORWARD | map << 8 | dtype << 16; }

static void check(const char *isa) {
    const double row[3] = {2.0, 1.0, 0.1}, third[3] = {0.6, 0.5, 0.4};
    double p[3], total = exp(2.0) + exp(1.0) + exp(0.1);
    float *x = malloc(ROWS * N * sizeof *x), *out = malloc(ROWS * N * sizeof *out);
    expect(anymax_rows(code(ANYMAX_SOFTMAX, ANYMAX_F64), row, p, 1, 3, 0.0) == 0, isa, "softmax is refused");
    for (int i = 0; i < 3; i++) expect(fabs(p[i] - exp(row[i]) / total) < 1e-15, isa, "softmax is wrong");
    expect(anymax_rows(code(ANYMAX_SPARSEMAX, ANYMAX_F64), third, p, 1, 3, 0.0) == 0, isa, "sparsemax is refused");
    for (int i = 0; i < 3; i++) expect(fabs(p[i] - (third[i] - 0.5 / 3.0)) < 1e-15, isa, "sparsemax is wrong");
    for (int i = 0; i < ROWS * N; i++) x[i] = (float)((i * 2654435761u) >> 8) * 1e-6f;
    for (int map = ANYMAX_SOFTMAX; map <= ANYMAX_SPARSEMAX; map++) { /* rows for all threads */
        expect(anymax_rows(code(map, ANYMAX_F32), x, out, ROWS, N, 0.0) == 0, isa, "a batch is refused");
        for (int r = 0; r < ROWS; r++) {
            double sum = 0.0;
            for (int i = 0; i < N; i++) sum += out[r * N + i];
            expect(fabs(sum - 1.0) < 1e-5, isa, "a row does not sum to 1");
        }
    }
    int refused = anymax_rows(code(ANYMAX_MAPS, ANYMAX_F64), row, p, 1, 3, 0.0);
    expect(refused != 0 && strcmp(anymax_error(refused), anymax_error(0)) != 0, isa, "a map that is not there is served");
    free(x);
    free(out);
}

int main(void) {
    char isas[128];
    expect(anymax_abi() == ANYMAX_ABI, "any", "the header is of another version");
    strncpy(isas, anymax_isas(), sizeof isas - 1);
    isas[sizeof isas - 1] = 0;
    for (const char *isa = strtok(isas, ","); isa; isa = strtok(NULL, ",")) {
        expect(anymax_set_isa(isa) == 0 && strcmp(anymax_isa(), isa) == 0, isa, "can't be chosen");
        check(isa);
    }
    printf("%s: %s, %d threads\n", wrong ? "wrong" : "right", anymax_isas(), anymax_get_num_threads());
    return wrong;
}
