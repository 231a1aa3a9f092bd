// What stands before a product: rows of activations as floats, normed on the way.
#pragma once

#include "../tensors_cpu.h"

namespace ostinato {

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
