// Sixteen float lanes: one AVX512 register, or two of AVX2.
//
// Every kernel but tile_attention.h computes in these sixteen lanes and sums them in one order, so that all instruction
// sets give the same bits. Compile with -ffp-contract=off: only `fma` fuses. In `max` and `min` a NaN in the second
// operand wins.
#pragma once
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

constexpr int LANES = 16;

// body(0) … body(COUNT - 1) as constants: GCC keeps arrays with constant indices alone in registers.
template <int COUNT, class Body>
__attribute__((always_inline)) inline void unrolled(const Body& body) {
    if constexpr (COUNT > 0) {
        unrolled<COUNT - 1>(body);
        body(std::integral_constant<int, COUNT - 1>());
    }
}

// body(COUNT) for a count of 1 … MAX, as a constant.
template <int MAX, class Body>
inline void with_count(int count, const Body& body) {
    if constexpr (MAX > 1)
        if (count < MAX) return with_count<MAX - 1>(count, body);
    body(std::integral_constant<int, MAX>());
}

struct BFloat16 {
    BFloat16() = default;
    explicit BFloat16(float value) {
        uint32_t word;
        std::memcpy(&word, &value, 4);
        const bool nan = (word & 0x7fffffff) > 0x7f800000;
        bits = static_cast<uint16_t>(nan ? word >> 16 | 0x40 : (word + 0x7fff + (word >> 16 & 1)) >> 16);
    }
    uint16_t bits;
};

#ifdef __AVX512F__
struct Lanes {
    __m512 v;
};
inline Lanes load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline Lanes load(const BFloat16* p) {
    __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16))};
}
inline Lanes load(const int8_t* p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
inline void store(float* p, Lanes x) { _mm512_storeu_ps(p, x.v); }
inline void store(int8_t* p, Lanes x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x.v)));
}
inline Lanes set(float x) { return {_mm512_set1_ps(x)}; }
inline Lanes operator+(Lanes x, Lanes y) { return {_mm512_add_ps(x.v, y.v)}; }
inline Lanes operator-(Lanes x, Lanes y) { return {_mm512_sub_ps(x.v, y.v)}; }
inline Lanes operator*(Lanes x, Lanes y) { return {_mm512_mul_ps(x.v, y.v)}; }
inline Lanes operator/(Lanes x, Lanes y) { return {_mm512_div_ps(x.v, y.v)}; }
inline Lanes fma(Lanes x, Lanes y, Lanes z) { return {_mm512_fmadd_ps(x.v, y.v, z.v)}; }
inline Lanes max(Lanes x, Lanes y) { return {_mm512_max_ps(x.v, y.v)}; }
inline Lanes min(Lanes x, Lanes y) { return {_mm512_min_ps(x.v, y.v)}; }
inline Lanes abs(Lanes x) { return {_mm512_abs_ps(x.v)}; }
inline Lanes round(Lanes x) { return {_mm512_roundscale_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
// Whether a lane is greater than `limit`.
inline bool any_above(Lanes x, Lanes limit) { return _mm512_cmp_ps_mask(x.v, limit.v, _CMP_GT_OQ) != 0; }
// x in the lanes where y is at most `limit`, else 0.
inline Lanes where_at_most(Lanes y, Lanes limit, Lanes x) {
    return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(y.v, limit.v, _CMP_LE_OQ), x.v)};
}
// x · 2ⁿ for whole n from -126 to 127.
inline Lanes scale_by_power(Lanes x, Lanes n) { return {_mm512_scalef_ps(x.v, n.v)}; }
// The first `count` lanes of x (0 to 16), the others from y.
inline Lanes first(int count, Lanes x, Lanes y) {
    return {_mm512_mask_blend_ps(static_cast<__mmask16>((1u << count) - 1), y.v, x.v)};
}
#else
struct Lanes {
    __m256 a, b;
};
inline __m256i widen(const int8_t* p) {
    return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
inline __m256 widen(const BFloat16* p) {
    __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
inline Lanes load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline Lanes load(const BFloat16* p) { return {widen(p), widen(p + 8)}; }
inline Lanes load(const int8_t* p) { return {_mm256_cvtepi32_ps(widen(p)), _mm256_cvtepi32_ps(widen(p + 8))}; }
inline void store(float* p, Lanes x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
inline __m256i to_int16(Lanes x) {
    __m256i mixed = _mm256_packs_epi32(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b));
    return _mm256_permute4x64_epi64(mixed, 0b11011000);
}
inline void store(int16_t* p, Lanes x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_int16(x)); }
inline void store(int8_t* p, Lanes x) {
    __m256i q = to_int16(x);
    __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(q), _mm256_extracti128_si256(q, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}
inline Lanes set(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Lanes operator+(Lanes x, Lanes y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline Lanes operator-(Lanes x, Lanes y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline Lanes operator*(Lanes x, Lanes y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline Lanes operator/(Lanes x, Lanes y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline Lanes fma(Lanes x, Lanes y, Lanes z) {
    return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
inline Lanes max(Lanes x, Lanes y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline Lanes min(Lanes x, Lanes y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline Lanes abs(Lanes x) {
    __m256 mask = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    return {_mm256_and_ps(x.a, mask), _mm256_and_ps(x.b, mask)};
}
inline Lanes round(Lanes x) {
    constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(x.a, mode), _mm256_round_ps(x.b, mode)};
}
inline bool any_above(Lanes x, Lanes limit) {
    return _mm256_movemask_ps(_mm256_or_ps(_mm256_cmp_ps(x.a, limit.a, _CMP_GT_OQ),
                                           _mm256_cmp_ps(x.b, limit.b, _CMP_GT_OQ))) != 0;
}
inline Lanes where_at_most(Lanes y, Lanes limit, Lanes x) {
    return {_mm256_and_ps(_mm256_cmp_ps(y.a, limit.a, _CMP_LE_OQ), x.a),
            _mm256_and_ps(_mm256_cmp_ps(y.b, limit.b, _CMP_LE_OQ), x.b)};
}
inline __m256 power_of_two(__m256 n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
inline Lanes scale_by_power(Lanes x, Lanes n) {
    return {_mm256_mul_ps(x.a, power_of_two(n.a)), _mm256_mul_ps(x.b, power_of_two(n.b))};
}
inline Lanes first(int count, Lanes x, Lanes y) {
    __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    __m256 a = _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(count), lane));
    __m256 b = _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(count - 8), lane));
    return {_mm256_blendv_ps(y.a, x.a, a), _mm256_blendv_ps(y.b, x.b, b)};
}
#endif

inline Lanes gather(const float* from, const int32_t* index) {
    float lane[LANES];
    for (int i = 0; i < LANES; i++) lane[i] = from[index[i]];
    return load(lane);
}

// The sum of the lanes, in one order.
inline float sum(Lanes x) {
    float lane[LANES];
    store(lane, x);
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) lane[i] += lane[i + width];
    return lane[0];
}

// What an RMSNorm multiplies a token by, before its gain. count: number of elements without padding.
inline float norm_factor(const float* values, int64_t width, int64_t count, float epsilon) {
    Lanes squares = set(0.0f);
    for (int64_t i = 0; i < width; i += LANES) squares = fma(load(values + i), load(values + i), squares);
    return 1.0f / std::sqrt(sum(squares) / static_cast<float>(count) + epsilon);
}

inline float largest_lane(Lanes x) {
    float lane[LANES];
    store(lane, x);
    float result = lane[0];
    for (float value : lane) result = value > result ? value : result;
    return result;
}

// eˣ with an error of 2 units in the last place, for x bounded to -87 … 88; NaN for NaN.
inline Lanes exp(Lanes x) {
    Lanes bounded = min(set(88.0f), max(set(-87.0f), x));
    Lanes n = round(bounded * set(1.44269504f));
    Lanes r = fma(n, set(-0.693359375f), bounded);
    r = fma(n, set(2.12194440e-4f), r);
    Lanes p = set(1.9875691500e-4f);
    p = fma(p, r, set(1.3981999507e-3f));
    p = fma(p, r, set(8.3334519073e-3f));
    p = fma(p, r, set(4.1665795894e-2f));
    p = fma(p, r, set(1.6666665459e-1f));
    p = fma(p, r, set(5.0000001201e-1f));
    p = fma(p, r * r, r) + set(1.0f);
    return scale_by_power(p, n);
}

// How `factor` times a token's values is quantized to -127 … 127. values(i): the 16 lanes from i on.
struct Range {
    float largest;  // absolute value
    bool finite;    // whether factor and values are
    Lanes inverse;  // 127 / largest

    template <class Values>
    Range(int n, float factor, const Values& values) {
        constexpr int CHAINS = 4;  // that don't wait for each other
        Lanes top[CHAINS], poison[CHAINS];  // poison: Σ 0 · x, NaN if factor or one x isn't finite
        for (int c = 0; c < CHAINS; c++) top[c] = set(0.0f), poison[c] = set(0.0f * factor);
        auto add = [&](int i, int c) {
            Lanes v = values(i);
            top[c] = max(top[c], abs(v));
            poison[c] = fma(v, set(0.0f), poison[c]);
        };
        int i = 0;
        for (; i + CHAINS * LANES <= n; i += CHAINS * LANES) unrolled<CHAINS>([&](auto c) { add(i + c * LANES, c); });
        for (; i < n; i += LANES) add(i, 0);
        for (int c = 1; c < CHAINS; c++) top[0] = max(top[0], top[c]), poison[0] = poison[0] + poison[c];
        *this = Range(sum(poison[0]) == 0.0f ? largest_lane(top[0]) : NAN);
    }

    // largest: NaN if a value isn't finite.
    explicit Range(float largest) : largest(largest), finite(!std::isnan(largest)) {
        // Above the smallest normal number's inverse, so that 127 / largest is finite.
        inverse = set(largest > 1e-30f ? 127.0f / largest : 0.0f);
    }

    // Values scaled to -127 … 127; 0 unless all are finite.
    Lanes scaled(Lanes v) const { return finite ? v * inverse : set(0.0f); }
};
