// Products of cached keys and values with queries and attention weights: one element of a float or int8 cache at a
// time, two of a bfloat16 cache.
//
// AVX512-BF16 multiplies pairs: a lane adds the second element's product, then the first one's. Both are exact, because
// a product of two bfloat16 fits a float. So two fused additions in that order give the same bits on other processors,
// but for denormals (below 1.2e-38), which AVX512-BF16 takes for 0.
#pragma once
#include "lanes.h"

template <class Element>
struct CachedProducts {
    static constexpr int STEP = 1;  // elements
    using Factor = float;           // what a step's elements are multiplied by
    using Values = Lanes;           // a step of 16 dimensions, or of 16 positions

    static Values values(const Element* from) { return load(from); }
    static Lanes add(Lanes sums, Values x, const Factor& factor) { return fma(set(factor), x, sums); }
    // A step whose elements are 0 where their bit isn't set.
    static Values keep(Values x, int) { return x; }
    // Convert 16 factors, and return the values that they are rounded to.
    static Lanes convert(Lanes factors, Factor* to) {
        store(to, factors);
        return factors;
    }
};

#ifdef __AVX512F__
struct Pairs {
    __m512i v;
};
inline Pairs load_pairs(const BFloat16* from) { return {_mm512_loadu_si512(from)}; }
inline Pairs operator&(Pairs x, uint32_t mask) { return {_mm512_and_si512(x.v, _mm512_set1_epi32(mask))}; }
#else
struct Pairs {
    __m256i a, b;
};
inline Pairs load_pairs(const BFloat16* from) {
    auto halves = reinterpret_cast<const __m256i*>(from);
    return {_mm256_loadu_si256(halves), _mm256_loadu_si256(halves + 1)};
}
inline Pairs operator&(Pairs x, uint32_t mask) {
    const __m256i each = _mm256_set1_epi32(mask);
    return {_mm256_and_si256(x.a, each), _mm256_and_si256(x.b, each)};
}
#endif

#ifdef __AVX512BF16__
using FactorPair = uint32_t;

inline Lanes add_products(Lanes sums, Pairs x, const FactorPair& factors) {
    return {_mm512_dpbf16_ps(sums.v, (__m512bh)x.v, (__m512bh)_mm512_set1_epi32(factors))};
}
inline Lanes to_pairs(Lanes x, FactorPair* to) {
    // x - x is 0. Of what isn't finite it is NaN: a soft cap makes a finite score of an infinite one.
    const __m256i rounded = (__m256i)_mm512_cvtneps_pbh((x + (x - x)).v);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), rounded);
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(rounded), 16))};
}
#else
struct FactorPair {
    float first, second;
};

#ifdef __AVX512F__
inline Lanes second_of(Pairs x) { return {_mm512_castsi512_ps((x & 0xffff0000).v)}; }
inline Lanes first_of(Pairs x) { return {_mm512_castsi512_ps(_mm512_slli_epi32(x.v, 16))}; }
#else
inline Lanes second_of(Pairs x) {
    const Pairs high = x & 0xffff0000;
    return {_mm256_castsi256_ps(high.a), _mm256_castsi256_ps(high.b)};
}
inline Lanes first_of(Pairs x) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(x.a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(x.b, 16))};
}
#endif

inline Lanes add_products(Lanes sums, Pairs x, const FactorPair& factors) {
    return fma(set(factors.first), first_of(x), fma(set(factors.second), second_of(x), sums));
}
inline Lanes to_pairs(Lanes x, FactorPair* to) {
    uint32_t lane[LANES];
    store(reinterpret_cast<float*>(lane), x);
    // The nearest bfloat16, of two equally near ones the even one.
    for (uint32_t& bits : lane) bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000;
    // As above; a rounded NaN may be none.
    const Lanes rounded = load(reinterpret_cast<const float*>(lane)) + (x - x);
    store(&to->first, rounded);
    return rounded;
}
#endif

template <>
struct CachedProducts<BFloat16> {
    static constexpr int STEP = 2;
    using Factor = FactorPair;
    using Values = Pairs;

    static Values values(const BFloat16* from) { return load_pairs(from); }
    static Lanes add(Lanes sums, Values x, const Factor& factors) { return add_products(sums, x, factors); }
    static Values keep(Values x, int bits) { return x & ((bits & 1 ? 0xffffu : 0) | (bits & 2 ? 0xffff0000u : 0)); }
    static Lanes convert(Lanes factors, Factor* to) { return to_pairs(factors, to); }
};
