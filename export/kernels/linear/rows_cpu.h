// What products have before them: the runs of a call's rows, and activations as floats, normed if there is a norm.
#pragma once

#include <stdexcept>
#include <string>
#include <vector>

#include "../tensors_cpu.h"
#include "../threads_cpu.h"

namespace ostinato {

// Neighbouring rows of one slot: tokens of one session, at consecutive positions (`RowIndex` in operands.py).
struct Run {
  int64_t slot, begin, end;
  bool fresh;  // the run begins a sequence: the slot's state counts as zeros

  int64_t rows() const { return end - begin; }
};

inline void check_slot(int64_t slot, int64_t count) {
  if (slot >= count) throw std::out_of_range("slot " + std::to_string(slot) + ": there are " + std::to_string(count));
}

// The runs of a call's rows; padding is in no run. `count`: the number of slots of the state.
inline std::vector<Run> runs_of(const Tensor& slots, const Tensor& positions, int64_t count) {
  const int64_t *slot = slots.as<int64_t>(), *position = positions.as<int64_t>(), rows = slots.size(0);
  std::vector<Run> runs;
  for (int64_t begin = 0, end; begin < rows; begin = end) {
    for (end = begin + 1; end < rows && slot[end] == slot[begin];) ++end;
    check_slot(slot[begin], count);
    if (slot[begin] >= 0) runs.push_back({slot[begin], begin, end, position[begin] == 0});
  }
  if (runs.size() < 2) return runs;
  // If a slot had two runs, two threads would write its state.
  std::vector<bool> found(count);
  for (const Run& run : runs) {
    if (found[run.slot]) throw std::invalid_argument("slot " + std::to_string(run.slot) + " has two runs");
    found[run.slot] = true;
  }
  return runs;
}

// Calls work(begin, end) for each stretch of padding, the rows between runs.
template <typename Work>
void for_padding(const std::vector<Run>& runs, int64_t rows, const Work& work) {
  int64_t begin = 0;
  for (const Run& run : runs) {
    if (begin < run.begin) work(begin, run.begin);
    begin = run.end;
  }
  if (begin < rows) work(begin, rows);
}

// Calls work(row) for the rows that are not padding, on all threads.
template <typename Work>
void for_tokens(const Tensor& slots, const Work& work) {
  const int64_t *slot = slots.as<int64_t>(), rows = slots.size(0);
  auto of_row = [&](int64_t row) {
    if (slot[row] >= 0) work(row);
  };
  if (rows == 1) return of_row(0);
  parallel(rows, of_row);
}

inline void to_floats(const Array& from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; i += LANES) Array{to, false}.store(i, from.load(i, count - i), count - i);
}

// x / rms(x) * weight.
inline void apply_norm(float* x, int64_t count, const float* weight, double eps) {
  Array values{x, false};
  float scale = 1 / std::sqrt(dot(values, values, count) / count + float(eps));
  for (int64_t i = 0; i < count; ++i) x[i] *= scale * weight[i];
}

}  // namespace ostinato
