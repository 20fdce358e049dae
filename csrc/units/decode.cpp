// Truncations and draws, for one instruction set.
#if !defined(ANYMAX_MAPS_ALONE)
#include "core/families.hpp"

#include "decode/choice.hpp"
#include "decode/draw.hpp"

namespace ANYMAX_UNIT {

template <class C>
static int decode_rows(const anymax_decode_call &call, int64_t begin, int64_t end) {
    Scratch scratch;
    const Link link = link_of(call.map, call.param);
    for (int64_t r = begin; r < end && !scratch.failed; r++) decode_row<C>(call, r, link, scratch);
    return scratch.failed ? ANYMAX_NO_MEMORY : 0;
}

int decode(const anymax_decode_call *call, int64_t begin, int64_t end) {
    return call->dtype == ANYMAX_F64 ? decode_rows<double>(*call, begin, end) : decode_rows<float>(*call, begin, end);
}

template <class C>
static int choose_rows(const anymax_choice_call &call, int64_t begin, int64_t end) {
    Scratch scratch;
    for (int64_t r = begin; r < end && !scratch.failed; r++) choose_row<C>(call, r, scratch);
    return scratch.failed ? ANYMAX_NO_MEMORY : 0;
}

int choose(const anymax_choice_call *call, int64_t begin, int64_t end) {
    return call->dtype == ANYMAX_F64 ? choose_rows<double>(*call, begin, end) : choose_rows<float>(*call, begin, end);
}

}  // namespace ANYMAX_UNIT
#endif
