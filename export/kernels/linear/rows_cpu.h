// What stands before a product: rows of activations as floats, normed on the way; and how many of the rows are tokens.
#pragma once

#include <algorithm>

#include "../tensors_cpu.h"

namespace ostinato {

// The others are padding and repeat the last token's position (`length_of` in operands.py).
inline int64_t length_of(const Tensor& positions) {
  const int64_t *at = positions.as<int64_t>(), rows = positions.size(0);
  return std::max<int64_t>(1, std::min(rows, at[rows - 1] - at[0] + 1));
}

inline void to_floats(const Array& from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; i += LANES) Array{to, false}.store(i, from.load(i, count - i), count - i);
}

// x / rms(x) * (1 + weight).
inline void apply_norm(float* x, int64_t count, const float* weight, double eps) {
  Array values{x, false};
  float scale = 1 / std::sqrt(dot(values, values, count) / count + float(eps));
  for (int64_t i = 0; i < count; ++i) x[i] *= scale * (1 + weight[i]);
}

}  // namespace ostinato
