// The kernels of AVX512-VNNI, with -DPAIRS those of AVX512-BF16, and with -DTILES, too, those of AMX, for a processor that
// has AVX2 and FMA alone: each instruction is a loop over its lanes, after the operation in Intel's intrinsics guide.
#include <immintrin.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#undef NDEBUG
#include <cassert>

// Macros in some compilers.
#undef _mm512_cmp_ps_mask
#undef _mm512_extracti64x4_epi64
#undef _mm512_insertf32x8
#undef _mm512_roundscale_ps
#undef _mm512_slli_epi32
#undef _mm512_srli_epi16
#undef _mm512_srli_epi32
#undef _tile_dpbf16ps
#undef _tile_dpbsud
#undef _tile_loadconfig
#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero

// Names that the kernels find here hide those of immintrin.h.
namespace emulated {

template <class Lane, class Vector>
inline Lane at(const Vector& vector, int i) {
    Lane lane;
    std::memcpy(&lane, reinterpret_cast<const char*>(&vector) + i * sizeof(Lane), sizeof(Lane));
    return lane;
}

// lane(0), lane(1) …
template <class Vector, class Lane, class Body>
inline Vector each(const Body& lane) {
    Lane lanes[sizeof(Vector) / sizeof(Lane)];
    int i = 0;
    for (Lane& one : lanes) one = lane(i++);
    Vector vector;
    std::memcpy(&vector, lanes, sizeof(vector));
    return vector;
}
template <class Body>
inline __m512 floats(const Body& lane) {
    return each<__m512, float>(lane);
}
template <class Body>
inline __m512i integers(const Body& lane) {
    return each<__m512i, int32_t>(lane);
}
template <class Body>
inline __m512d doubles(const Body& lane) {
    return each<__m512d, double>(lane);
}

inline __m512 _mm512_loadu_ps(const void* p) {
    __m512 x;
    std::memcpy(&x, p, sizeof(x));
    return x;
}
inline void _mm512_storeu_ps(float* p, __m512 x) { std::memcpy(p, &x, sizeof(x)); }
inline __m512 _mm512_set1_ps(float x) { return floats([&](int) { return x; }); }
inline __m512 _mm512_add_ps(__m512 x, __m512 y) { return x + y; }
inline __m512 _mm512_sub_ps(__m512 x, __m512 y) { return x - y; }
inline __m512 _mm512_mul_ps(__m512 x, __m512 y) { return x * y; }
inline __m512 _mm512_div_ps(__m512 x, __m512 y) { return x / y; }
inline __m512 _mm512_fmadd_ps(__m512 x, __m512 y, __m512 z) {
    return floats([&](int i) { return std::fma(x[i], y[i], z[i]); });
}
inline __m512 _mm512_max_ps(__m512 x, __m512 y) {
    return floats([&](int i) { return x[i] > y[i] ? x[i] : y[i]; });
}
inline __m512 _mm512_min_ps(__m512 x, __m512 y) {
    return floats([&](int i) { return x[i] < y[i] ? x[i] : y[i]; });
}
inline __m512 _mm512_abs_ps(__m512 x) {
    return floats([&](int i) { return std::fabs(x[i]); });
}
inline __m512 _mm512_roundscale_ps(__m512 x, int mode) {
    assert(mode == (_MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    return floats([&](int i) { return std::nearbyint(x[i]); });
}
inline __m512 _mm512_scalef_ps(__m512 x, __m512 n) {
    return floats([&](int i) { return std::scalbn(x[i], static_cast<int>(std::floor(n[i]))); });
}
inline __m512 _mm512_mask_blend_ps(__mmask16 mask, __m512 x, __m512 y) {
    return floats([&](int i) { return mask >> i & 1 ? y[i] : x[i]; });
}

inline __mmask16 _mm512_cmp_ps_mask(__m512 x, __m512 y, int predicate) {
    assert(predicate == _CMP_LE_OQ || predicate == _CMP_GT_OQ);
    unsigned mask = 0;
    for (int i = 0; i < 16; i++) mask |= static_cast<unsigned>(predicate == _CMP_LE_OQ ? x[i] <= y[i] : x[i] > y[i]) << i;
    return static_cast<__mmask16>(mask);
}
inline __m512 _mm512_maskz_mov_ps(__mmask16 mask, __m512 x) {
    return floats([&](int i) { return mask >> i & 1 ? x[i] : 0.0f; });
}

inline __m512 _mm512_castsi512_ps(__m512i x) { return reinterpret_cast<__m512>(x); }
inline __m512i _mm512_cvtepu16_epi32(__m256i x) {
    return integers([&](int i) { return at<uint16_t>(x, i); });
}
inline __m512i _mm512_cvtepi8_epi32(__m128i x) {
    return integers([&](int i) { return at<int8_t>(x, i); });
}
inline __m512 _mm512_cvtepi32_ps(__m512i x) {
    return floats([&](int i) { return static_cast<float>(at<int32_t>(x, i)); });
}
inline __m512i _mm512_cvtps_epi32(__m512 x) {
    return integers([&](int i) { return _mm_cvtss_si32(_mm_set_ss(x[i])); });
}
inline __m128i _mm512_cvtepi32_epi8(__m512i x) {
    return each<__m128i, int8_t>([&](int i) { return static_cast<int8_t>(at<int32_t>(x, i)); });
}
inline __m512i _mm512_slli_epi32(__m512i x, unsigned bits) {
    return integers([&](int i) { return at<uint32_t>(x, i) << bits; });
}
inline __m512i _mm512_srli_epi32(__m512i x, unsigned bits) {
    return integers([&](int i) { return at<uint32_t>(x, i) >> bits; });
}
inline __m512i _mm512_srli_epi16(__m512i x, unsigned bits) {
    return each<__m512i, uint16_t>([&](int i) { return static_cast<uint16_t>(at<uint16_t>(x, i) >> bits); });
}
inline __m512i _mm512_and_si512(__m512i x, __m512i y) {
    return integers([&](int i) { return at<int32_t>(x, i) & at<int32_t>(y, i); });
}
inline __m512i _mm512_set1_epi32(int32_t x) {
    return integers([&](int) { return x; });
}
inline __m512i _mm512_loadu_si512(const void* p) {
    __m512i x;
    std::memcpy(&x, p, sizeof(x));
    return x;
}
inline __m512i _mm512_load_si512(const void* p) {
    assert(reinterpret_cast<uintptr_t>(p) % 64 == 0);
    return _mm512_loadu_si512(p);
}
inline __m512i _mm512_dpbusd_epi32(__m512i sums, __m512i weights, __m512i terms) {
    return integers([&](int i) {
        uint32_t sum = at<uint32_t>(sums, i);
        for (int j = 4 * i; j < 4 * i + 4; j++) sum += at<uint8_t>(weights, j) * at<int8_t>(terms, j);
        return sum;
    });
}

inline float widened(uint16_t bfloat16) { return reinterpret_cast<__v4sf>(_mm_set1_epi32(bfloat16 << 16))[0]; }
inline __m256bh _mm512_cvtneps_pbh(__m512 x) {
    return each<__m256bh, uint16_t>([&](int i) {
        const uint32_t bits = at<uint32_t>(x, i), rounded = bits + 0x7fff + (bits >> 16 & 1);
        return static_cast<uint16_t>((std::isnan(x[i]) ? bits | 0x400000 : rounded) >> 16);
    });
}
// The second product of a pair is added first. Denormals, which are 0 there, are kept.
inline __m512 _mm512_dpbf16_ps(__m512 sums, __m512bh x, __m512bh y) {
    return floats([&](int i) {
        float sum = sums[i];
        for (int j = 2 * i + 1; j >= 2 * i; j--) sum += widened(at<uint16_t>(x, j)) * widened(at<uint16_t>(y, j));
        return sum;
    });
}

inline __m512d _mm512_set1_pd(double x) {
    return doubles([&](int) { return x; });
}
inline __m512d _mm512_cvtepi32_pd(__m256i x) {
    return doubles([&](int i) { return at<int32_t>(x, i); });
}
inline __m512d _mm512_fmadd_pd(__m512d x, __m512d y, __m512d z) {
    return doubles([&](int i) { return std::fma(x[i], y[i], z[i]); });
}
inline __m256 _mm512_cvtpd_ps(__m512d x) {
    return each<__m256, float>([&](int i) { return static_cast<float>(x[i]); });
}
inline __m256i _mm512_castsi512_si256(__m512i x) { return at<__m256i>(x, 0); }
inline __m256i _mm512_extracti64x4_epi64(__m512i x, int half) { return at<__m256i>(x, half); }
inline __m512 _mm512_castps256_ps512(__m256 x) {
    return floats([&](int i) { return i < 8 ? x[i] : NAN; });  // undefined
}
inline __m512 _mm512_insertf32x8(__m512 x, __m256 y, int half) {
    return floats([&](int i) { return i / 8 == half ? y[i % 8] : x[i]; });
}

// The tile registers of a thread. rows, bytes: of the configuration, 0 before there is one; what is read beyond them is 0.
// Where the processor faults an assertion fails.
struct Tiles {
    int rows[8], bytes[8];
    uint8_t content[8][16][64];
};
static thread_local Tiles tiles;

inline void _tile_loadconfig(const void* config) {
    auto* from = static_cast<const uint8_t*>(config);
    assert(from[0] == 1 && from[1] == 0);  // palette, start_row
    for (int i = 2; i < 64; i++) assert((i >= 16 && i < 32) || (i >= 48 && i < 56) || from[i] == 0);
    for (int t = 0; t < 8; t++) {
        tiles.bytes[t] = from[16 + 2 * t] + 256 * from[17 + 2 * t];
        tiles.rows[t] = from[48 + t];
        assert(tiles.bytes[t] <= 64 && tiles.rows[t] <= 16 && !tiles.bytes[t] == !tiles.rows[t]);
    }
    std::memset(tiles.content, 0, sizeof(tiles.content));
}
inline void _tile_zero(int tile) {
    assert(tiles.rows[tile] > 0);
    std::memset(tiles.content[tile], 0, sizeof(tiles.content[tile]));
}
inline void _tile_loadd(int tile, const void* from, int64_t stride) {
    _tile_zero(tile);
    for (int r = 0; r < tiles.rows[tile]; r++)
        std::memcpy(tiles.content[tile][r], static_cast<const char*>(from) + r * stride, tiles.bytes[tile]);
}
inline void _tile_stored(int tile, void* to, int64_t stride) {
    assert(tiles.rows[tile] > 0);
    for (int r = 0; r < tiles.rows[tile]; r++)
        std::memcpy(static_cast<char*>(to) + r * stride, tiles.content[tile][r], tiles.bytes[tile]);
}
// c[m][n] = sum(c[m][n], m, n, number of a's columns of four bytes).
template <class Element, class Sum>
inline void add_tile_products(int c, int a, int b, const Sum& sum) {
    assert(tiles.rows[c] == tiles.rows[a] && tiles.bytes[c] == tiles.bytes[b]);
    assert(tiles.rows[c] > 0 && tiles.bytes[a] / 4 == tiles.rows[b]);
    for (int m = 0; m < tiles.rows[c]; m++)
        for (int n = 0; n < tiles.bytes[c] / 4; n++) {
            const Element result = sum(at<Element>(tiles.content[c][m], n), m, n, tiles.bytes[a] / 4);
            std::memcpy(tiles.content[c][m] + 4 * n, &result, 4);
        }
}
// c += a · b: signed bytes of a, unsigned bytes of b.
inline void _tile_dpbsud(int c, int a, int b) {
    add_tile_products<uint32_t>(c, a, b, [&](uint32_t sum, int m, int n, int count) {
        for (int k = 0; k < count; k++)
            for (int j = 0; j < 4; j++) sum += at<int8_t>(tiles.content[a][m], 4 * k + j) * tiles.content[b][k][4 * n + j];
        return sum;
    });
}
// c += a · b: bfloat16, the products of even columns and those of odd ones summed apart. Denormals, which are 0 there, are kept.
inline void _tile_dpbf16ps(int c, int a, int b) {
    add_tile_products<float>(c, a, b, [&](float sum, int m, int n, int count) {
        float sums[2] = {};
        for (int k = 0; k < count; k++)
            for (int j = 0; j < 2; j++)
                sums[j] += widened(at<uint16_t>(tiles.content[a][m], 2 * k + j)) *
                           widened(at<uint16_t>(tiles.content[b][k], 2 * n + j));
        return sum + (sums[0] + sums[1]);
    });
}

#define __AVX512F__ 1
#define __AVX512VNNI__ 1
#ifdef PAIRS
#define __AVX512BF16__ 1
#endif
#ifdef TILES
#define __AMX_BF16__ 1
#define __AMX_INT8__ 1
#endif
#include "forward.cpp"

}  // namespace emulated
