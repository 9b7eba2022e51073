// Attention of each token over its own positions, from a KV cache of floats, bfloat16 or int8.
//
// The cache is a pool of pages of 16 positions. A sequence's pages may lie anywhere: a row of the page table names them.
// Keys are cached transposed, so that 16 scores are one register:
//
//     keys    [KV head][page][head dim][16]
//     values  [KV head][page][16][head dim]
//     scales  [KV head][page][16], of int8 keys and of int8 values
//
// A head's pages are adjacent, because pages at a stride of several heads would share few sets of the caches.
//
// A token's result depends on its own positions alone, in their order: alone or in a batch, in a prefill of any cut or
// a decode step, it is the same bits.
#pragma once
#include <type_traits>

#include "elementwise.h"
#include "lanes.h"
#include "prefetch.h"

constexpr int PAGE = 16;  // positions

struct Cache {  // of a layer
    void *keys, *values;
    float *key_scales, *value_scales;  // null unless int8
};

// One KV head of one sequence.
template <class Element>
class Head {
public:
    static constexpr bool SCALED = std::is_same_v<Element, int8_t>;
    const int dim;

    // pages: the sequence's row of the page table. first: index of the head's first page.
    Head(const Cache& cache, const int32_t* pages, int64_t first, int dim)
        : dim(dim),
          first_keys(static_cast<Element*>(cache.keys) + first * PAGE * dim),
          first_values(static_cast<Element*>(cache.values) + first * PAGE * dim),
          first_key_scales(cache.key_scales + (SCALED ? first * PAGE : 0)),
          first_value_scales(cache.value_scales + (SCALED ? first * PAGE : 0)),
          pages(pages) {}

    // The start of the page that has a position.
    Element* keys(int64_t at) const { return first_keys + page(at) * PAGE * dim; }
    Element* values(int64_t at) const { return first_values + page(at) * PAGE * dim; }
    float* key_scales(int64_t at) const { return first_key_scales + page(at) * PAGE; }
    float* value_scales(int64_t at) const { return first_value_scales + page(at) * PAGE; }

    void write(int64_t position, const float* key, const float* value) const {
        const int64_t within = position % PAGE;
        Element *to_key = keys(position) + within, *to_value = values(position) + within * dim;
        if constexpr (SCALED) {
            key_scales(position)[within] = quantize(key, [&](int i, Lanes q) {
                int8_t lane[LANES];
                // GCC 12 has miscompiled such a copy: the kernels' self-test compares cached keys with a reference.
                store(lane, q);
                for (int j = 0; j < LANES; j++) to_key[(i + j) * PAGE] = lane[j];
            });
            value_scales(position)[within] = quantize(value, [&](int i, Lanes q) { store(to_value + i, q); });
        } else {
            for (int i = 0; i < dim; i++) {
                to_key[i * PAGE] = Element(key[i]);
                to_value[i] = Element(value[i]);
            }
        }
    }

private:
    Element *first_keys, *first_values;
    float *first_key_scales, *first_value_scales;
    const int32_t* pages;

    int64_t page(int64_t at) const { return pages[at / PAGE]; }

    // Quantize to put(i, 16 integers) and return the scale: NaN if an element isn't finite.
    template <class Put>
    float quantize(const float* x, const Put& put) const {
        const Range range(dim, 1.0f, [&](int i) { return load(x + i); });
        for (int i = 0; i < dim; i += LANES) put(i, round(range.scaled(load(x + i))));
        return range.finite ? range.largest / 127.0f : NAN;
    }
};

// Rotate the first 2 · half dimensions of a head by its position (RoPE). cosine, sine: [half].
inline void rotate(float* __restrict head, const float* __restrict cosine, const float* __restrict sine, int half) {
    for (int i = 0; i < half; i++) {
        const float a = head[i], b = head[half + i];
        head[i] = a * cosine[i] - b * sine[i];
        head[half + i] = b * cosine[i] + a * sine[i];
    }
}

#ifdef __AVX512F__
constexpr int MAX_QUERIES = 8;  // of one call of `attend`; bounded by the registers
constexpr int MAX_PARTS = 4;    // lanes of a value at a time
#else
constexpr int MAX_QUERIES = 2;
constexpr int MAX_PARTS = 2;
#endif

// A query head of a token: attends positions start … length - 1.
struct Query {
    const float* query;  // [dim]
    float* result;       // [dim]
    int64_t start, length;
};

// Scores are products times `scaling`. softcap: their bound; 0 is none.
struct Scores {
    float scaling, softcap;
};

// Floats of scratch that `attend` needs: the queries, interleaved, and the scores of whole pages.
inline int64_t scratch_floats(int64_t positions, int dim) { return MAX_QUERIES * (positions + dim); }

// OPTIONS: a soft cap, and queries that start after position 0. Without, the code has neither.
template <class Element, int QUERIES, bool OPTIONS>
class Attention {
public:
    // scratch: see `scratch_floats`.
    static void attend(const Head<Element>& head, const Query* queries, const Scores& how, float* scratch) {
        int64_t longest = 0;
        float* interleaved = scratch;
        float* scores = scratch + QUERIES * head.dim;
        for (int q = 0; q < QUERIES; q++) {
            for (int i = 0; i < head.dim; i++) interleaved[i * QUERIES + q] = queries[q].query[i] * how.scaling;
            longest = std::max(longest, queries[q].length);
        }
        const int64_t begin = first_page(queries);
        score(head, queries, interleaved, how.softcap, begin, longest, scores);
        Lanes inverse[QUERIES];
        for (int q = 0; q < QUERIES; q++)
            inverse[q] = set(1.0f / softmax(head, q, queries[q], begin, scores + q * PAGE));
        int i = 0;
        for (; i + PARTS * LANES <= head.dim; i += PARTS * LANES)
            mix<PARTS>(head, queries, scores, inverse, begin, longest, i);
        for (; i < head.dim; i += LANES) mix<1>(head, queries, scores, inverse, begin, longest, i);
    }

private:
    // Positions from a prefetch to the use of its page. The hardware's prefetcher stops at the end of each page, and a
    // read from memory takes longer than a page's products.
    static constexpr int AHEAD = 4 * PAGE;
    // Positions whose values are prefetched with the keys. Those of longer sequences are prefetched by `softmax`, which
    // reads nothing else from memory.
    static constexpr int WITH_KEYS = 32 * PAGE;
    static constexpr int PARTS = QUERIES > 4 ? MAX_PARTS / 2 : MAX_PARTS;

    // The first position of the first page that a query attends to.
    static int64_t first_page(const Query* queries) {
        if (!OPTIONS) return 0;
        int64_t start = queries[0].start;
        for (int q = 1; q < QUERIES; q++) start = std::min(start, queries[q].start);
        return start / PAGE * PAGE;
    }

    // scores [pages][QUERIES][16]; of positions that a query doesn't attend to, -inf.
    static void score(const Head<Element>& head, const Query* queries, const float* interleaved, float softcap,
                      int64_t begin, int64_t longest, float* scores) {
        const int dim = head.dim;
        for (int64_t at = begin; at < std::min<int64_t>(longest, begin + AHEAD); at += PAGE)
            prefetch<1>(head.keys(at), PAGE * dim);
        for (int64_t at = begin; at < longest; at += PAGE) {
            const Element *keys = head.keys(at), *values = head.values(at);
            const Element* later = head.keys(std::min(at + AHEAD, longest - 1));
            Lanes sums[QUERIES][2];
            for (auto& s : sums) s[0] = s[1] = set(0.0f);
            for (int i = 0; i < dim; i += 2) {
                prefetch<1>(later + i * PAGE, 2 * PAGE);
                if (at < begin + WITH_KEYS) prefetch<2>(values + i * PAGE, 2 * PAGE);  // for `mix`
                Lanes even = load(keys + i * PAGE), odd = load(keys + (i + 1) * PAGE);
                for (int q = 0; q < QUERIES; q++) {
                    sums[q][0] = fma(set(interleaved[i * QUERIES + q]), even, sums[q][0]);
                    sums[q][1] = fma(set(interleaved[(i + 1) * QUERIES + q]), odd, sums[q][1]);
                }
            }
            for (int q = 0; q < QUERIES; q++) {
                Lanes s = sums[q][0] + sums[q][1];
                if constexpr (Head<Element>::SCALED) s = s * load(head.key_scales(at));
                if (OPTIONS && softcap > 0) s = soft_cap(s, softcap);
                store(scores + at * QUERIES + q * PAGE, attended(queries[q], at, s, -INFINITY));
            }
        }
    }

    // Scores to weights in place, and return their sum. The weights of int8 values include the values' scales.
    static float softmax(const Head<Element>& head, int q, const Query& query, int64_t begin, float* scores) {
        const int64_t length = query.length;
        const int share = PAGE * head.dim / QUERIES;  // of a page's values, that this query prefetches
        Lanes top = set(-INFINITY), total = set(0.0f);
        for (int64_t at = begin; at < length; at += PAGE) top = max(top, load(scores + at * QUERIES));
        const Lanes highest = set(largest_lane(top));
        for (int64_t at = begin; at < length; at += PAGE) {
            Lanes weights = attended(query, at, exp(load(scores + at * QUERIES) - highest), 0.0f);
            total = total + weights;
            if (at >= begin + WITH_KEYS) prefetch<2>(head.values(at) + q * share, share);
            if constexpr (Head<Element>::SCALED) weights = weights * load(head.value_scales(at));
            store(scores + at * QUERIES, weights);
        }
        return sum(total);
    }

    // The dimensions from i on, COUNT · 16 of them.
    template <int COUNT>
    static void mix(const Head<Element>& head, const Query* queries, const float* weights, const Lanes* inverse,
                    int64_t begin, int64_t longest, int i) {
        Lanes mixed[QUERIES][COUNT];
        for (auto& m : mixed)
            for (auto& part : m) part = set(0.0f);
        int64_t shared_start = 0, shared = longest;  // the positions that all queries attend to
        for (int q = 0; q < QUERIES; q++) {
            shared = std::min(shared, queries[q].length);
            if (OPTIONS) shared_start = std::max(shared_start, queries[q].start);
        }
        auto add = [&](const Element* value, const float* weight, auto includes) {
            Lanes v[COUNT];
            for (int j = 0; j < COUNT; j++) v[j] = load(value + j * LANES);
            for (int q = 0; q < QUERIES; q++)
                if (includes(q))
                    for (int j = 0; j < COUNT; j++) mixed[q][j] = fma(set(weight[q * PAGE]), v[j], mixed[q][j]);
        };
        for (int64_t at = begin; at < longest; at += PAGE) {
            const Element* value = head.values(at) + i;
            const Element* later = head.values(std::min(at + AHEAD, longest - 1)) + i;
            const float* weight = weights + at * QUERIES;
            const int some = count_below(longest, at), none = OPTIONS ? std::min(count_below(shared_start, at), some) : 0;
            const int all = std::max(count_below(shared, at), none);
            auto add_to_some = [&](int p) {
                add(value + p * head.dim, weight + p, [&](int q) {
                    return at + p < queries[q].length && (!OPTIONS || at + p >= queries[q].start);
                });
            };
            for (int p = 0; p < none; p++) add_to_some(p);
            for (int p = none; p < all; p++) {
                prefetch<1>(later + p * head.dim, COUNT * LANES);
                add(value + p * head.dim, weight + p, [](int) { return true; });
            }
            for (int p = all; p < some; p++) add_to_some(p);
        }
        for (int q = 0; q < QUERIES; q++)
            for (int j = 0; j < COUNT; j++) store(queries[q].result + i + j * LANES, mixed[q][j] * inverse[q]);
    }

    // Of the 16 positions from `at` on, values of those that a query attends to, `other` of the others.
    static Lanes attended(const Query& query, int64_t at, Lanes values, float other) {
        values = first(count_below(query.length, at), values, set(other));
        return OPTIONS ? first(count_below(query.start, at), set(other), values) : values;
    }

    // The number of the 16 positions from `at` on that lie below `length`.
    static int count_below(int64_t length, int64_t at) {
        return static_cast<int>(std::clamp<int64_t>(length - at, 0, PAGE));
    }
};

template <class Element, bool OPTIONS>
inline void attend(const Head<Element>& head, const Query* queries, int count, const Scores& how, float* scratch) {
    with_count<MAX_QUERIES>(
        count, [&](auto n) { Attention<Element, decltype(n)::value, OPTIONS>::attend(head, queries, how, scratch); });
}
