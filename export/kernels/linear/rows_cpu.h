// What stands before a product: rows of activations as floats, normed on the way.
#pragma once

#include "../tensors_cpu.h"

namespace ostinato {

inline void to_floats(const Array& from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; i += LANES) Array{to, false}.store(i, from.load(i, count - i), count - i);
}

// One over the root of the mean square of x and eps.
inline float inverse_rms(const float* x, int64_t count, float eps) {
  Floats squares = zeros();
  for (int64_t i = 0; i < count; i += LANES) {
    Floats value = Array{(void*)x, false}.load(i, count - i);
    squares = fma(value, value, squares);
  }
  return 1 / std::sqrt(sum(squares) / count + eps);
}

// x / rms(x) * (1 + weight); without a weight nothing is done.
inline void apply_norm(float* x, int64_t count, const float* weight, double eps) {
  if (weight == nullptr) return;
  float scale = inverse_rms(x, count, float(eps));
  for (int64_t i = 0; i < count; ++i) x[i] *= scale * (1 + weight[i]);
}

}  // namespace ostinato
