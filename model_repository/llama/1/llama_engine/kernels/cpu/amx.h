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
#include "tiles.h"

struct Amx {
    static constexpr int TOKEN_BLOCK = 32;
    static constexpr int INTERLEAVED = OUTLIER_BLOCK;

    static void begin() { TileRegisters::begin(); }

    static void store_term(const Quantized& to, int64_t token, int i, Lanes value) {
        store(to.terms + token * to.inputs + i, value);
    }

    static void sums(const Matrix& m, const uint8_t* weight, const Quantized& x, int64_t token, int count, Prefetch,
                     int32_t (*result)[2][OUTPUTS]) {
        const int64_t inputs = m.inputs, stride = inputs * OUTPUTS;
        const int8_t *upper = x.terms + token * inputs, *lower = upper + TILE_ROWS * inputs;
        const bool both = count > TILE_ROWS;
        TileShapes shapes;
        for (int t : {0, 1, 4}) shapes.set(t, std::min(count, TILE_ROWS), TILE_BYTES);
        for (int t : {2, 3, 5}) shapes.set(t, std::max(count - TILE_ROWS, 1), TILE_BYTES);
        for (int t : {6, 7}) shapes.set(t, TILE_ROWS, TILE_BYTES);
        TileRegisters::configure(shapes);
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t k = 0; k < inputs; k += TILE_BYTES) {
            _tile_loadd(6, weight + k * OUTPUTS, TILE_BYTES);
            _tile_loadd(7, weight + stride + k * OUTPUTS, TILE_BYTES);
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
            _tile_stored(2, result[TILE_ROWS][0], TOKEN_BYTES);
            _tile_stored(3, result[TILE_ROWS][1], TOKEN_BYTES);
        }
    }
};
