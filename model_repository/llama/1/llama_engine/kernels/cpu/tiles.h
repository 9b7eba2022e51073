// AMX's tile registers of a thread: eight, each of up to 16 rows of 64 bytes.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

constexpr int TILE_ROWS = 16, TILE_BYTES = 64;

struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {};  // per row of each tile
    uint8_t rows[16] = {};

    void set(int tile, int tile_rows, int row_bytes) {
        rows[tile] = static_cast<uint8_t>(tile_rows);
        bytes[tile] = static_cast<uint16_t>(row_bytes);
    }
};

class TileRegisters {
public:
    // torch's own products may have configured this thread's tiles since the phase before.
    static void begin() { configured = TileShapes(); }

    static void configure(const TileShapes& shapes) {
        if (std::memcmp(&configured, &shapes, sizeof(shapes)) == 0) return;
        configured = shapes;
        stored();
        _tile_loadconfig(&configured);
    }

    // Called between ordinary stores and the tile loads that read them: GCC 12 knows of no memory that a tile load reads.
    static void stored() { asm volatile("" : : : "memory"); }

private:
    static inline thread_local TileShapes configured;
};
