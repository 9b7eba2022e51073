// Attention over a bfloat16 cache in AMX tiles: what attention.h computes, for up to 32 queries of one KV head.
//
//     C  16 queries × 16 floats                                                      registers 0 to 3
//     scores   A  16 queries × 32 dimensions (4)   B  32 dimensions × 16 positions (5), a part of a page of keys
//     results  A  16 queries × 16 weights (6)      B  16 positions × 16 dimensions (7), a part of a page of values
//
// An element of C grows by the sum of two sums that begin at 0, one of the products with A's even columns and one with its odd
// columns, fused, in ascending order. Other instruction sets add products one after the other: their last bits are others.
#pragma once
#include "activation_functions.h"
#include "prefetch.h"
#include "queries.h"
#include "tiles.h"

class TileAttention {
public:
    static constexpr int QUERIES = 2 * TILE_ROWS;

    // Floats of scratch: queries with a page of values, and scores, with a tile that begins at any row.
    static int64_t scratch_floats(int64_t positions, int dim) {
        return QUERIES * (positions + dim) + TILE_ROWS * PAGE;
    }

    TileAttention(const KVHead<BFloat16>& head, const Query* queries, int count, const Scoring& scoring, float* scratch)
        : head(head), queries(queries), count(count), rows(std::min(count, TILE_ROWS)),
          stride(count <= TILE_ROWS ? count : QUERIES), scoring(scoring), range(queries, count),
          query_tiles(reinterpret_cast<uint16_t*>(scratch)),
          page_copy(reinterpret_cast<BFloat16*>(query_tiles + QUERIES * head.dim)),
          scores(scratch + QUERIES * head.dim) {}

    void attend() {
        TileShapes shapes;
        for (int t = 0; t < 5; t++) shapes.set(t, rows, TILE_BYTES);
        shapes.set(5, TILE_ROWS, TILE_BYTES);
        shapes.set(6, rows, TILE_BYTES / 2);
        shapes.set(7, TILE_ROWS / 2, TILE_BYTES);
        TileRegisters::configure(shapes);
        store_queries();
        score();
        Lanes inverse[QUERIES];
        for (int q = 0; q < count; q += SOFTMAX_QUERIES)
            with_count<SOFTMAX_QUERIES>(std::min(count - q, SOFTMAX_QUERIES),
                                        [&](auto n) { softmax<decltype(n)::value>(q, inverse + q); });
        for (int q = 0; q < count; q += TILE_ROWS) {
            const int last = std::min(q + TILE_ROWS, count);
            if (add_weighted_values(q, last, inverse, [&](int64_t at) { return head.values(at); })) continue;
            // A weight of 0 times an infinite value or NaN is NaN, at positions that a query doesn't attend to, too. So each
            // query is taken alone, with zeros at these positions.
            for (int query = q; query < last; query++)
                add_weighted_values(query, query + 1, inverse,
                                    [&](int64_t at) { return attended_values(queries[query], at); });
        }
    }

private:
    static constexpr int SOFTMAX_QUERIES = 8;
    static constexpr int TILE_DIMS = 32;

    const KVHead<BFloat16>& head;
    const Query* queries;
    const int count, rows, stride;  // rows of a tile; rows of a page of scores
    const Scoring& scoring;
    const AttendedRange range;
    uint16_t* query_tiles;  // [query tiles][dim / 32][16][32] bfloat16; of the last 16 dimensions [16][16]
    BFloat16* page_copy;
    float* scores;  // [pages][stride][16]; then weights, [pages][stride][16] bfloat16 in the place of 32

    void store_queries() {
        for (int q = 0; q < count; q++)
            for (int i = 0; i < head.dim; i += LANES) {
                const int tile = i / TILE_DIMS * TILE_DIMS, width = std::min(head.dim - tile, TILE_DIMS);
                uint16_t* to = query_tiles + (q / TILE_ROWS * head.dim + tile) * TILE_ROWS + q % TILE_ROWS * width + i - tile;
                to_pairs(load(queries[q].query + i) * set(scoring.scaling), reinterpret_cast<FactorPair*>(to));
            }
        TileRegisters::stored();
    }

    void score() {
        const int dim = head.dim, whole = dim / TILE_DIMS * TILE_DIMS;
        for (int64_t at = range.begin; at < std::min<int64_t>(range.end, range.begin + PREFETCH_AHEAD); at += PAGE)
            prefetch<1>(head.keys(at), PAGE * dim);
        for (int64_t at = range.begin; at < range.end; at += PAGE) {
            const BFloat16* keys = head.keys(at);
            prefetch<1>(head.keys(std::min(at + PREFETCH_AHEAD, range.end - 1)), PAGE * dim);
            if (at < range.begin + PREFETCHED_WITH_KEYS) prefetch<2>(head.values(at), PAGE * dim);
            _tile_zero(0);
            _tile_zero(1);
            for (int i = 0; i < whole; i += TILE_DIMS) {
                _tile_loadd(5, keys + i * PAGE, TILE_BYTES);
                _tile_loadd(4, query_tiles + i * TILE_ROWS, TILE_BYTES);
                _tile_dpbf16ps(0, 4, 5);
                if (count > TILE_ROWS) {
                    _tile_loadd(4, query_tiles + (dim + i) * TILE_ROWS, TILE_BYTES);
                    _tile_dpbf16ps(1, 4, 5);
                }
            }
            if (whole < dim) {
                _tile_loadd(7, keys + whole * PAGE, TILE_BYTES);
                _tile_loadd(6, query_tiles + whole * TILE_ROWS, TILE_BYTES / 2);
                _tile_dpbf16ps(0, 6, 7);
                if (count > TILE_ROWS) {
                    _tile_loadd(6, query_tiles + (dim + whole) * TILE_ROWS, TILE_BYTES / 2);
                    _tile_dpbf16ps(1, 6, 7);
                }
            }
            _tile_stored(0, scores + at * stride, TILE_BYTES);
            if (count > TILE_ROWS) _tile_stored(1, scores + at * stride + TILE_ROWS * PAGE, TILE_BYTES);
        }
    }

    // Scores to weights of COUNT queries from `first_query` on, in place. inverse: 1 / the sum of what they are rounded to.
    template <int COUNT>
    void softmax(int first_query, Lanes* inverse) {
        const Query* query = queries + first_query;
        Lanes top[COUNT], total[COUNT];
        for (int q = 0; q < COUNT; q++) top[q] = set(-INFINITY), total[q] = set(0.0f);
        // body(page, q, score, mask): mask(values, other) are `values` at the positions that q attends to, else `other`.
        auto each_score = [&](const auto& body) {
            for (int64_t at = range.begin; at < range.end; at += PAGE) {
                float* score = scores + at * stride + first_query * PAGE;
                if (range.all_share(at))
                    for (int q = 0; q < COUNT; q++) body(q, score + q * PAGE, [](Lanes values, float) { return values; });
                else
                    for (int q = 0; q < COUNT; q++)
                        body(q, score + q * PAGE,
                             [&](Lanes values, float other) { return attended<true>(query[q], at, values, other); });
                if (first_query == 0 && at >= range.begin + PREFETCHED_WITH_KEYS) prefetch<2>(head.values(at), PAGE * head.dim);
            }
        };
        each_score([&](int q, float* score, const auto& mask) {
            Lanes s = load(score);
            if (scoring.softcap > 0) store(score, s = soft_cap(s, scoring.softcap));
            top[q] = max(top[q], mask(s, -INFINITY));
        });
        for (int q = 0; q < COUNT; q++) top[q] = set(largest_lane(top[q]));
        each_score([&](int q, float* score, const auto& mask) {
            const Lanes weights = mask(exp(load(score) - top[q]), 0.0f);
            total[q] = total[q] + to_pairs(weights, reinterpret_cast<FactorPair*>(score));
        });
        for (int q = 0; q < COUNT; q++) inverse[q] = set(1.0f / sum(total[q]));
        TileRegisters::stored();
    }

    // Store the results of the queries from `first` to `last`, which are of one tile, and return whether they are finite.
    // values_of(position): a page of values.
    template <class Values>
    bool add_weighted_values(int first, int last, const Lanes* inverse, const Values& values_of) {
        alignas(64) float sums[4][TILE_ROWS][LANES];
        Lanes poison = set(0.0f);
        for (int i = 0; i < head.dim; i += 4 * LANES) {
            const int parts = std::min((head.dim - i) / LANES, 4);
            with_count<4>(parts, [&](auto n) { add_values<decltype(n)::value>(first, i, values_of, sums); });
            for (int q = first; q < last; q++)
                for (int j = 0; j < parts; j++) {
                    // The addition makes 0 of -0, as do the positions that a query's neighbours alone attend to.
                    const Lanes value = fma(load(sums[j][q - first]), inverse[q], set(0.0f));
                    poison = fma(value, set(0.0f), poison);
                    store(queries[q].result + i + j * LANES, value);
                }
        }
        return sum(poison) == 0.0f;
    }

    // sums: of the PARTS · 16 dimensions from i on, for the queries of the tile that begins at row `first`.
    template <int PARTS, class Values>
    void add_values(int first, int i, const Values& values_of, float (*sums)[TILE_ROWS][LANES]) {
        const int row = 2 * head.dim * static_cast<int>(sizeof(BFloat16));  // bytes
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t at = range.begin; at < range.end; at += PAGE) {
            const BFloat16* values = values_of(at) + 2 * i;
            _tile_loadd(6, scores + at * stride + first * PAGE, TILE_BYTES);
            _tile_loadd(7, values, row);
            _tile_dpbf16ps(0, 6, 7);
            if (PARTS > 1) {
                _tile_loadd(7, values + 2 * LANES, row);
                _tile_dpbf16ps(1, 6, 7);
            }
            if (PARTS > 2) {
                _tile_loadd(7, values + 4 * LANES, row);
                _tile_dpbf16ps(2, 6, 7);
            }
            if (PARTS > 3) {
                _tile_loadd(7, values + 6 * LANES, row);
                _tile_dpbf16ps(3, 6, 7);
            }
        }
        _tile_stored(0, sums[0], TILE_BYTES);
        _tile_stored(1, sums[1], TILE_BYTES);
        _tile_stored(2, sums[2], TILE_BYTES);
        _tile_stored(3, sums[3], TILE_BYTES);
    }

    // The page of values from `at` on, with zeros where the query doesn't attend to the position.
    const BFloat16* attended_values(const Query& query, int64_t at) {
        const BFloat16* values = head.values(at);
        if (query.start <= at && at + PAGE <= query.length) return values;
        for (int p = 0; p < PAGE; p++) {
            const bool attends = query.start <= at + p && at + p < query.length;
            for (int i = 0; i < head.dim; i++) {
                const int place = p / 2 * 2 * head.dim + 2 * i + p % 2;
                page_copy[place] = attends ? values[place] : BFloat16(0.0f);
            }
        }
        TileRegisters::stored();
        return page_copy;
    }
};
