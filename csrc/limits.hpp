// Lengths of rows and calls at which a way gives way to another, in classes unless it says otherwise. Of the other files only
// plan.hpp compares a length with numbers of its own: those that are counted in vectors, and those that a parameter decides;
// tests/kernels/test_plan.py looks for more. Without vectors, so that the doors can include it; all of it is internal to each
// file, as maps.hpp is.
#pragma once

#include <stdint.h>

// -- the rules of plan.hpp --------------------------------------------------------------------------

constexpr int64_t TILE_MOST = 128;        // one row a lane,
constexpr int64_t TILE_SQUARE = 32;       // with k largest that are found in n^2 steps, and budgets: no more than this
constexpr int64_t BATCH_MOST = 4096;      // many rows at once, the candidates of each solved one row a lane,
constexpr int64_t BATCH_LONGEST = 16384;  // with budgets and normmax, whose rows take longer by themselves,
constexpr int64_t BATCH_AHEAD = 512;      // of which the next rows are prefetched meanwhile; longer ones come by themselves
constexpr int64_t SWEEP_MOST =
    2048;  // all of a row at each step, whatever its support; beyond, where most of the row is a candidate
constexpr int64_t DENSE_MOST = 320;  // a gradient from all of p; beyond, the zeros of a sparse map are worth looking for
constexpr int64_t BESIDE_MOST = 32;  // a gradient of rows side by side, one a lane

// Candidates of a row in a batch; a row with more is served by itself.
constexpr int64_t BATCH_CANDIDATES = 1024;
constexpr int64_t BATCH_CANDIDATES_SWEPT = 512;  // of entmax 4/3 and 5/4, which a sweep serves as well
constexpr int64_t BATCH_CANDIDATES_FEW = 256;    // of sparsemax, entmax 3/2 and the k largest

// -- what is worth saving for the gradient ----------------------------------------------------------

// Where none is saved the gradient finds it in p, so that a row becomes the same in a small call and in a large one.

constexpr int64_t SAVED_CALL_FROM = 16384;      // scores of a call: smaller ones gain nothing
constexpr int64_t SAVED_FROM = DENSE_MOST + 1;  // classes; of 1,000 normal scores entmax 3/2 leaves 18,
constexpr int64_t SAVED_FROM_WIDE = 1024;       // 4/3 75
constexpr int64_t SAVED_FROM_WIDER = 4096;      // and 5/4 230
constexpr int64_t SAVED_SHARE = 16;             // a row whose support was too large to be saved is more than this part of it

// -- inside of the ways -----------------------------------------------------------------------------

constexpr int64_t PIECE = 65536;    // a longer row is computed in pieces of so many, by several threads if there are
constexpr int64_t CELLS_FROM = 33;  // a tile begins at a level that the maxima of its cells give
constexpr int64_t STEEP_CELLS_FROM =
    13;                                // cells above its first bound: a better bound of entmax above 2 is worth its bisection
constexpr int64_t WORTH_SEEKING = 17;  // the zeros of p in one row,
constexpr int64_t WORTH_SEEKING_WIDE = SAVED_FROM_WIDE;            // of entmax below 3/2, which leaves more,
constexpr int64_t many_nonzeros(int64_t n) { return n / 32 + 8; }  // unless there are more non-zeros than this
constexpr int64_t BACKWARD_TOGETHER = 2560;  // classes of rows in turn: their p, g and results stay in the first cache
constexpr int64_t BACKWARD_FAR_FROM =
    1 << 20;  // classes of a call whose p and g come from memory: fewer rows are in turn, so that
constexpr int64_t BACKWARD_TOGETHER_FAR = 640;  // reading and writing alternate soon,
constexpr int64_t BACKWARD_AHEAD_FROM = 96;     // and wide vectors ask ahead for longer rows; shorter ones come by themselves
constexpr int64_t SLOPES_TOGETHER =
    1024;  // non-zeros of a row whose slope is found with others': all that is made of 8 of them stays in the second cache
constexpr int64_t CLEARED_TOGETHER = 16384;    // bytes of rows that are set to 0 in one go
constexpr int64_t EXPONENTIALS_KEPT = 262144;  // bytes of a row's exponentials that are kept rather than computed twice
constexpr int64_t WEIGHED_AT_ONCE = 32;        // scores from which several levels are weighed at once for the end of a nucleus,
constexpr int64_t GUESSED_FROM = 256;          // the first ones around a guess,
constexpr int64_t SAMPLED = 512;               // from so many scores
constexpr int64_t SORTED_MOST = 16;            // scores at the edge of a nucleus that are sorted

// -- truncations and draws --------------------------------------------------------------------------

constexpr int64_t EDGE_MOST =
    1024;  // in a longer row the class at the edge of a share may have less than its sum was rounded by
constexpr int64_t DRAW_BLOCK = 512;  // weights whose sum is kept

constexpr int64_t STEPS_MOST = 64;  // truncations of a call

// -- linear attention: what is remembered of the keys are 4 d^2 dv bytes in floats ------------------

constexpr int64_t HEAD_MOST = 4096;     // d
constexpr int64_t VALUES_MOST = 65536;  // dv

// -- Sinkhorn: matrices that are computed one a lane ------------------------------------------------

constexpr int64_t SMALL_SIDE = 32, SMALL_ENTRIES = SMALL_SIDE * SMALL_SIDE;
constexpr int64_t SMALL_LONGEST = 64;                // or a longer side, of no more entries
constexpr int64_t SMALL_THIN_ENTRIES = 640;          // than this,
constexpr int64_t SMALL_ENTRIES_BACKWARD = 56 * 56;  // and with a gradient than this
constexpr int64_t SMALL_ITERATIONS = 256;            // whose factors fit into the second cache
constexpr int64_t SHARED_MATRIX = 65536;             // entries of a single matrix that is worth more than one thread,
constexpr int64_t MATRIX_PART = 16384;               // and of what a thread takes at once

// -- soft ranks -------------------------------------------------------------------------------------

constexpr int64_t INSERTED_MOST = 47;     // scores of a row that are sorted by insertion, not by digits
constexpr int64_t SORTED_MANY = 1 << 19;  // of so many some are alike in their upper digits, which more digits tell apart

// -- a link as a table ------------------------------------------------------------------------------

constexpr int64_t TABLED_CLASSES = 1 << 20;  // of a longer row an even share is less than what a table is checked for
constexpr int64_t TABLED_FEW = 64;           // classes of a row that are looked up rather than told apart again
constexpr int64_t TABLED_COST = 8;           // work of a class (maps.hpp)

// -- perturb max ------------------------------------------------------------------------------------

constexpr int64_t SUMMED_FROM = 48;  // a shorter row is never summed up in cells,
constexpr int64_t NARROWER_CELLS_FROM = 8192,
                  NARROWEST_CELLS_FROM = 131072;  // which in floats are narrower in longer rows of normal noise
constexpr int64_t NODES_MOST = 4096;              // that a call may ask for
constexpr int64_t NODES_LEAST = 8;                // those of one panel
constexpr int64_t NODES_FINE = 64;                // from so many on, in doubles, less mass is left outside of the nodes

// -- threads ----------------------------------------------------------------------------------------

constexpr int64_t ALONE_MOST = 32768;        // work (maps.hpp) that is not worth a second thread
constexpr int64_t SHARED_ALONE = 3 * 32768;  // classes of a single row that is worth more than one thread,
constexpr int64_t SHARED_ROW = 4 * 65536;    // and of one among fewer than
constexpr int64_t ROWS_FEW = 8;
constexpr int64_t ROWS_AT_ONCE = 16;        // that the widest vector serves
constexpr int64_t INTERPRETER_KEPT = 4096;  // work of a call that is over before another thread would have had the interpreter

// Bytes of a row whose results are written around the caches; a gradient of a loss writes the target's own once more, which
// costs a line.
constexpr int64_t BYPASS_FROM = 256, BYPASS_GRADIENT_FROM = 16384;
constexpr int64_t ZEROS_BYPASS_FROM = 1024;  // bytes of zeros, too

// -- memory, in bytes -------------------------------------------------------------------------------

constexpr int64_t ROOM_KEPT = 4 << 20;  // of a task, until the next one
constexpr int64_t EXPONENTIALS_CHUNK =
    16384;                              // of a row whose maximum and sum are found in one reading: they stay in the first cache
constexpr int64_t SPREAD_CHUNK = 8192;  // of a sparse row that is made before it is written around the caches
constexpr int64_t NEWLY_MAPPED_FROM = 32 << 20;  // malloc gives as much as this from new pages
constexpr int64_t SAVED_AHEAD = 12;              // rows whose saved support is prefetched

// -- ragged rows ------------------------------------------------------------------------------------

constexpr int64_t SEGMENTS_CHUNK =
    65536;  // numbers of segments that are sorted by length together: those of all operands fit into the second cache,
constexpr int64_t SEGMENTS_CHUNK_LEAST = 1024;  // entries of it at least
constexpr int64_t SEGMENT_SHORT_MOST =
    2048;  // entries of a segment up to which others are served with it: no way gains by longer rows together
constexpr int64_t SEGMENTS_STAGED = 8192;  // numbers that are staged at once
constexpr int64_t BOUNDS_PART = 65536;     // segments whose bounds a thread reads at once
constexpr int64_t SORT_FROM = 2 * 65536;   // entries that are worth more than one thread to sort, with so many or more
constexpr int64_t SORT_COUNTS = 8;         // for each count of a part,
constexpr int64_t SORT_PARTS = 8;          // in so many parts at most
constexpr int64_t ENTRIES_AHEAD = 24;      // entries of an order that are prefetched meanwhile
