// RMSNorm.
#pragma once
#include "lanes.h"

// What an RMSNorm multiplies a token by, before its gain. count: number of elements without padding.
inline float norm_factor(const float* values, int64_t width, int64_t count, float epsilon) {
    Lanes squares = set(0.0f);
    for (int64_t i = 0; i < width; i += LANES) squares = fma(load(values + i), load(values + i), squares);
    return 1.0f / std::sqrt(sum(squares) / static_cast<float>(count) + epsilon);
}
