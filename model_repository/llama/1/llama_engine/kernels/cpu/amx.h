// The integer product in AMX tiles, from the packing of matrix.h as it is.
//
//     A  16 tokens × 64 inputs    from Quantized::terms, which is [tokens][inputs] here
//     B  16 × 64 bytes            one block of 16 outputs × 64 inputs: 1,024 contiguous bytes
//     C  16 tokens × 16 outputs   int32
//
//               B 6    B 7
//       A 4     C 0    C 1      Up to 32 tokens and two blocks at a time; the numbers are those of the tile registers.
//       A 5     C 2    C 3
#pragma once
#include "byte_terms.h"

struct Amx {
    static constexpr int TOKEN_BLOCK = 32;
    static constexpr int INTERLEAVED = OUTLIER_BLOCK;
    static constexpr int TILE_INPUTS = 64;

    // torch's own products may have configured this thread's tiles since the phase before.
    static void begin() { configured = -1; }

    static void store_term(const Quantized& to, int64_t token, int i, Lanes value) {
        store(to.terms + token * to.inputs + i, value);
    }

    static void sums(const Matrix& m, const uint8_t* weight, const Quantized& x, int64_t token, int count, Prefetch,
                     int32_t (*result)[2][OUTPUTS]) {
        const int64_t inputs = m.inputs, stride = inputs * OUTPUTS;
        const int8_t *upper = x.terms + token * inputs, *lower = upper + 16 * inputs;
        const bool both = count > 16;
        configure(both ? 16 : count, both ? count - 16 : 0);
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t k = 0; k < inputs; k += TILE_INPUTS) {
            _tile_loadd(6, weight + k * OUTPUTS, TILE_INPUTS);
            _tile_loadd(7, weight + stride + k * OUTPUTS, TILE_INPUTS);
            _tile_loadd(4, upper + k, inputs);
            _tile_dpbsud(0, 4, 6);
            _tile_dpbsud(1, 4, 7);
            if (both) {
                _tile_loadd(5, lower + k, inputs);
                _tile_dpbsud(2, 5, 6);
                _tile_dpbsud(3, 5, 7);
            }
        }
        constexpr int TOKEN_BYTES = 2 * OUTPUTS * sizeof(int32_t);
        _tile_stored(0, result[0][0], TOKEN_BYTES);
        _tile_stored(1, result[0][1], TOKEN_BYTES);
        if (both) {
            _tile_stored(2, result[16][0], TOKEN_BYTES);
            _tile_stored(3, result[16][1], TOKEN_BYTES);
        }
    }

private:
    struct alignas(64) Config {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t bytes[16] = {};  // per row of each tile
        uint8_t rows[16] = {};
    };

    // Configure the tiles for `first` tokens in A 4 and `second` in A 5.
    static void configure(int first, int second) {
        if (configured == first * 32 + second) return;
        Config config;
        const int rows[8] = {first, first, second, second, first, second, 16, 16};
        for (int t = 0; t < 8; t++) {
            config.rows[t] = static_cast<uint8_t>(rows[t] ? rows[t] : 1);
            config.bytes[t] = TILE_INPUTS;
        }
        asm volatile("" : : "r"(&config) : "memory");  // or GCC 12 drops the stores to a local config
        _tile_loadconfig(&config);
        configured = first * 32 + second;
    }

    static inline thread_local int configured;
};
