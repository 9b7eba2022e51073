// The queries of attention, and the positions that they attend to.
#pragma once
#include "paged_cache.h"

// A query head of a token: attends positions start … length - 1.
struct Query {
    const float* query;  // [dim]
    float* result;       // [dim]
    int64_t start, length;
};

// Scores are products times `scaling`. softcap: their bound; 0 is none.
struct Scoring {
    float scaling, softcap;
};

// The number of the 16 positions from `at` on that lie below `length`.
inline int count_below(int64_t length, int64_t at) {
    return static_cast<int>(std::clamp<int64_t>(length - at, 0, PAGE));
}

// For the 16 positions from `at` on: `values` where a query attends to the position, else `other`.
// OPTIONS: whether queries may start after position 0.
template <bool OPTIONS>
inline Lanes attended(const Query& query, int64_t at, Lanes values, float other) {
    values = first(count_below(query.length, at), values, set(other));
    return OPTIONS ? first(count_below(query.start, at), set(other), values) : values;
}

// Positions from a prefetch to the use of its page. The hardware's prefetcher stops at the end of each page, and a read from memory
// takes longer than a page's products.
constexpr int PREFETCH_AHEAD = 4 * PAGE;
// Positions whose values are prefetched with the keys. Those of longer sequences are prefetched by the softmax, which reads nothing
// else from memory.
constexpr int PREFETCHED_WITH_KEYS = 32 * PAGE;

// The positions that some queries attend to.
struct AttendedRange {
    int64_t begin = INT64_MAX, end = 0;                // from the first page that a query attends to up to the last position
    int64_t shared_begin = 0, shared_end = INT64_MAX;  // that all attend to

    AttendedRange(const Query* queries, int count) {
        for (const Query* q = queries; q < queries + count; q++) {
            begin = std::min(begin, q->start / PAGE * PAGE);
            end = std::max(end, q->length);
            shared_begin = std::max(shared_begin, q->start);
            shared_end = std::min(shared_end, q->length);
        }
    }

    // Whether all attend to the 16 positions from `at` on.
    bool all_share(int64_t at) const { return shared_begin <= at && at + PAGE <= shared_end; }
};
