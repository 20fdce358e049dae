// Sinkhorn for one instruction set.
#if !defined(ANYMAX_MAPS_ALONE)
#include "core/families.hpp"
#include "transport/lanes.hpp"
#include "transport/matrix.hpp"
#include "transport/near.hpp"

namespace ANYMAX_UNIT {

// The matrices of one call, from `begin` on.
template <class C>
class Transport {
    const anymax_sinkhorn_call &call;
    const int64_t size;
    const C temperature;  // above 0 as a number of this dtype
    const Team team;      // of a single matrix
    Room history, memory;

    static C at_least(C temperature) {
        const C least = C(sizeof(C) == 4 ? 1e-37 : 1e-300);
        return temperature > least ? temperature : least;
    }
    const C *scores(int64_t k) const { return (const C *)call.x + k * size; }
    const C *gradient(int64_t k) const { return (const C *)call.g + k * size; }
    C *result(int64_t k) const { return (C *)call.out + k * size; }
    const C *rows(int64_t k) const { return call.rows ? (const C *)call.rows + k * call.rows_step : nullptr; }
    const C *columns(int64_t k) const { return call.columns ? (const C *)call.columns + k * call.columns_step : nullptr; }

    int one(int64_t k) {
        OneMatrix<C> matrix(call.n, call.m, team);
        const int64_t remembered = call.g ? call.iterations : 0;
        char *const base = memory.take<char>(matrix.lay_out(nullptr, remembered));
        if (!base) return ANYMAX_NO_MEMORY;
        matrix.lay_out(base, remembered);
        C *const out = result(k);
        if (!matrix.read(scores(k), temperature, rows(k), columns(k))) {
            for (int64_t e = 0; e < size; e++) out[e] = not_a_number<C>;
            if (call.tolerance > 0.0) call.left[k] = 0.0;
        } else if (call.g) {
            matrix.backward(call.iterations, temperature, gradient(k), out);
        } else {
            const double left = matrix.forward(call.iterations, out, (C)call.tolerance);
            if (call.tolerance > 0.0) call.left[k] = left;
        }
        return ANYMAX_OK;
    }

    // The same of a matrix that is near: else by `one`.
    int near(int64_t k) {
        NearMatrix<C> matrix(call.n, call.m);
        const int64_t remembered = call.g ? call.iterations : 0;
        char *const base = memory.take<char>(matrix.lay_out(nullptr, remembered));
        if (!base) return ANYMAX_NO_MEMORY;
        matrix.lay_out(base, remembered);
        if (!matrix.read(scores(k), temperature, rows(k), columns(k))) return one(k);
        if (call.g)
            matrix.backward(gradient(k), call.iterations, temperature, result(k));
        else if (call.tolerance > 0.0)
            call.left[k] = matrix.converge(call.iterations, (C)call.tolerance, result(k));
        else
            matrix.forward(call.iterations, result(k));
        return ANYMAX_OK;
    }

    template <int SIDE>
    int some(int64_t k, int64_t count) {
        typedef vec<C> V;
        C *const room = memory.take<C>(SmallMatrices<C, SIDE>::room(call.n, call.m));
        if (!room) return ANYMAX_NO_MEMORY;
        SmallMatrices<C, SIDE> matrices(call.n, call.m, room);
        V *const past = call.g ? (V *)history.take<C>(call.iterations * (call.n + call.m) * width<C>) : nullptr;
        if (call.g && !past) return ANYMAX_NO_MEMORY;
        uint32_t others = matrices.read_sums(rows(k), call.rows_step, columns(k), call.columns_step, count);
        others |= matrices.read(scores(k), count, temperature);
        if (others != (uint32_t)((1ull << count) - 1)) {
            if (call.g)
                matrices.backward(gradient(k), count, call.iterations, temperature, past);
            else if (call.tolerance > 0.0)
                matrices.converge(call.iterations, (C)call.tolerance, call.left + k, count);
            else
                matrices.forward(call.iterations);
            matrices.write(result(k), count);
        }
        int code = ANYMAX_OK;
        for (; others && !code; others &= others - 1) code = one(k + __builtin_ctz(others));
        return code;
    }

  public:
    Transport(const anymax_sinkhorn_call &call, const Team &team)
        : call(call), size(call.n * call.m), temperature(at_least((C)call.temperature)), team(team) {}

    int run(int64_t begin, int64_t end) {
        constexpr int64_t THIN = width<C> / 2;  // of the vectors along such a side most lanes are idle
        const int64_t longer = call.n > call.m ? call.n : call.m, most = call.g ? SMALL_ENTRIES_BACKWARD : SMALL_THIN_ENTRIES;
        const bool small = longer <= SMALL_SIDE || (longer <= SMALL_LONGEST && size <= most),
                   near_ones = small || (call.n >= THIN && call.m >= THIN && size < SHARED_MATRIX),
                   remembers = !call.g || call.iterations <= SMALL_ITERATIONS;
        // of which the others are idle lanes
        const int64_t fewest = size <= 64 ? width<C> / 8 + 1 : size <= SMALL_ENTRIES / 2 ? 3 * width<C> / 8 : 3 * width<C> / 4;
        // in range as the numbers of this dtype, of which some small ones are subnormal or 0
        const bool usual = call.temperature >= 1e-30 && call.temperature <= 1e30;
        int code = ANYMAX_OK;
        for (int64_t k = begin; k < end && !code;) {
            const int64_t left = end - k, count = left < width<C> ? left : width<C>;
            if (!usual || !remembers || !near_ones) {
                code = one(k++);
                continue;
            }
            if (!small || left < fewest) {
                code = near(k++);
                continue;
            }
            code = call.n == 4 && call.m == 4 ? some<4>(k, count) : some<0>(k, count);
            k += count;
        }
        return code;
    }
};

int transport(const anymax_sinkhorn_call *call, int64_t begin, int64_t end, anymax_parallel run) {
    const Team team{run};
    return call->dtype == ANYMAX_F64 ? Transport<double>(*call, team).run(begin, end)
                                     : Transport<float>(*call, team).run(begin, end);
}

}  // namespace ANYMAX_UNIT
#endif
