// The integer product with AVX2 alone: sums of pairs of 16-bit products. Included by linear.h.
//
// AVX2's product of bytes saturates; that of 16-bit integers is exact, and takes q itself in place of two terms.
// Quantized::terms holds q in groups of 6 rows, so that the products of a group read it from beginning to end:
//
//     group of 6 rows            24 bytes: 6 rows × 2 inputs of 16 bits
//       inputs 0…1      r0: k0 k1 | r1: k0 k1 | … | r5: k0 k1
//       inputs 2…3      r0: k2 k3 | …
#pragma once

constexpr int ZERO = 0;
constexpr int INPUTS = 2;
constexpr int GROUP = 6;           // rows: two registers each, two for weights, one for a pair, one for products
constexpr int EXACT_INPUTS = 512;  // whose sums fit int32: 512 · 128 · 32,385 < 2³¹

inline void store_terms(const Quantized& to, int64_t row, int i, Lanes high, Lanes low) {
    int16_t q[LANES], *target = reinterpret_cast<int16_t*>(to.terms) + row / GROUP * GROUP * to.inputs;
    store(q, to.count == 2 ? fma(high, set(SPLIT), low) : high);
    for (int k = 0; k < LANES; k += INPUTS)
        std::memcpy(target + (i + k) * GROUP + row % GROUP * INPUTS, q + k, INPUTS * sizeof(int16_t));
}

// Add the products of ROWS rows of a group with a block of outputs, of inputs whose sums fit int32.
template <int ROWS>
inline void add_products(const uint8_t* weight, const int16_t* group, int inputs, double (*total)[OUTPUTS]) {
    __m256i sums[ROWS][2];
    unrolled<ROWS>([&](auto r) { sums[r][0] = sums[r][1] = _mm256_setzero_si256(); });
    for (int k = 0; k < inputs; k += INPUTS, weight += INPUTS * OUTPUTS, group += INPUTS * GROUP) {
        auto packed = reinterpret_cast<const __m128i*>(weight);
        __m256i w0 = _mm256_cvtepi8_epi16(_mm_loadu_si128(packed)), w1 = _mm256_cvtepi8_epi16(_mm_loadu_si128(packed + 1));
        unrolled<ROWS>([&](auto r) {
            int32_t two;
            std::memcpy(&two, group + r * INPUTS, 4);
            __m256i q = _mm256_set1_epi32(two);
            sums[r][0] = _mm256_add_epi32(sums[r][0], _mm256_madd_epi16(w0, q));
            sums[r][1] = _mm256_add_epi32(sums[r][1], _mm256_madd_epi16(w1, q));
        });
    }
    int32_t lane[ROWS][OUTPUTS];
    unrolled<ROWS>([&](auto r) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(lane[r]), sums[r][0]);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(lane[r] + 8), sums[r][1]);
    });
    for (int r = 0; r < ROWS; r++)
        for (int o = 0; o < OUTPUTS; o++) total[r][o] += lane[r][o];
}

// The sums of `rows` rows of a group with a block of outputs.
template <int ROWS = GROUP>
inline void sum_products(const uint8_t* weight, const int16_t* group, int inputs, int rows, double (*total)[OUTPUTS]) {
    if constexpr (ROWS > 1)
        if (rows < ROWS) return sum_products<ROWS - 1>(weight, group, inputs, rows, total);
    for (int64_t k = 0; k < inputs; k += EXACT_INPUTS) {
        const int count = inputs - k < EXACT_INPUTS ? static_cast<int>(inputs - k) : EXACT_INPUTS;
        add_products<ROWS>(weight + k * OUTPUTS, group + k * GROUP, count, total);
    }
}

inline int rows_at_once(int) { return GROUP; }
inline void begin_products() {}

inline void products(const Matrix& m, int64_t block, const Quantized& x, int64_t row, int rows, Lanes (*result)[2]) {
    const int16_t* group = reinterpret_cast<const int16_t*>(x.terms) + row * x.inputs;
    for (int b = 0; b < 2; b++) {
        double total[GROUP][OUTPUTS] = {};
        sum_products(m.weight + (block + b) * OUTPUTS * m.inputs, group, m.inputs, rows, total);
        for (int r = 0; r < rows; r++) {
            float whole[OUTPUTS];
            for (int o = 0; o < OUTPUTS; o++) whole[o] = static_cast<float>(total[r][o]);
            result[r][b] = load(whole);
        }
    }
}
