// AMX's tile registers of a thread: eight, each of up to 16 rows of 64 bytes.
#pragma once
#include <immintrin.h>

#include <cstdint>

constexpr int TILE_ROWS = 16, TILE_BYTES = 64;

struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {};  // per row of each tile
    uint8_t rows[16] = {};

    void set(int tile, int rows, int bytes) {
        this->rows[tile] = static_cast<uint8_t>(rows);
        this->bytes[tile] = static_cast<uint16_t>(bytes);
    }
};

class TileRegisters {
public:
    // torch's own products may have configured this thread's tiles since the phase before.
    static void begin() { configured = 0; }

    // Give the tiles the shapes that set_shapes(TileShapes&) sets. key: a number above 0 for these shapes.
    template <class SetShapes>
    static void configure(int key, const SetShapes& set_shapes) {
        if (configured == key) return;
        TileShapes shapes;
        set_shapes(shapes);
        asm volatile("" : : "r"(&shapes) : "memory");  // or GCC 12 drops the stores to a local variable
        _tile_loadconfig(&shapes);
        configured = key;
    }

private:
    static inline thread_local int configured = 0;
};
