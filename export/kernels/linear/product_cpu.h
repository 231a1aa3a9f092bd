// Products with weights whose rows stand in panels: linear/panels.py says how.
#pragma once

#include <algorithm>
#include <optional>

#include "../tensors_cpu.h"
#include "../threads_cpu.h"
#include "../tiles_cpu.h"
#include "../vectors_cpu.h"

namespace ostinato {

enum class Format { FLOAT32, BFLOAT16, INT4 };

// [rows, columns]; of it `panel_rows` stand in panels of LANES rows, the others one after the other.
struct Weight {
  Format format;
  const char* values;
  const bfloat16* scale;
  int64_t rows, columns, group, panel_rows;

  // The matrix that is the last two dimensions of `values`, or the first of them.
  Weight(const Tensor& values, const Tensor& scale);
  Weight expert(int64_t index) const;

  int64_t row_bytes() const { return format == Format::INT4 ? columns / 2 : columns * (format == Format::BFLOAT16 ? 2 : 4); }
  // Blocks of LANES rows; the last one may have fewer.
  int64_t blocks() const { return (rows + LANES - 1) / LANES; }
  int64_t rows_of(int64_t block) const { return std::min(LANES, rows - block * LANES); }
  const char* values_of(int64_t block) const { return values + block * LANES * row_bytes(); }
  const bfloat16* scale_of(int64_t block) const { return scale ? scale + block * LANES * (columns / group) : nullptr; }
};

// A block of a weight.
struct Block {
  const Weight* weight;
  int64_t index;
};

// Rows of inputs, in the forms in which they meet a weight: float32, bfloat16, or bytes with a scale per group.
class Inputs {
 public:
  // `more`: rows of others that will take rows of these.
  Inputs(const Weight& weight, int64_t rows, int64_t more = 0);

  int64_t rows() const { return rows_; }
  // Write a row, of as many elements as the weight has columns.
  void put(int64_t row, const float* x) { put(row, x, 0, columns_); }
  // Write `count` elements of a row from `begin` on, both multiples of the weight's groups.
  void put(int64_t row, const float* x, int64_t begin, int64_t count);
  // Copy a row of others that were made for the same weight.
  void take(int64_t row, const Inputs& from, int64_t from_row);

 private:
  friend void multiply_block(const Weight&, const Inputs&, int64_t, int64_t, int64_t, float*, std::optional<Block>);
  friend struct BlockProduct;

  Format format_;
  int64_t rows_, columns_, stride_, group_;
  Scratch<float> floats_;
  Scratch<bfloat16> halves_;
  Scratch<int8_t> bytes_;
  Scratch<float> scales_;
  Scratch<int32_t> offsets_;
};

// Rows `begin` to `end` of x times the rows of one block of the weight: out [end - begin, LANES], with room for MAX_ROWS. What is
// behind the last row is overwritten; lanes that the last block does not have stay uninitialised. `next`: the block that this thread
// will read then, which is fetched from memory meanwhile; else the one behind.
void multiply_block(const Weight& weight, const Inputs& x, int64_t block, int64_t begin, int64_t end, float* out,
                    std::optional<Block> next = {});

// While it lives, products of several rows keep on this thread what they set up for each block.
class ManyProducts {
 public:
  explicit ManyProducts(int64_t rows) {
#ifdef OSTINATO_AMX
    if (rows > 1 && may_use_tiles()) tiles_.emplace();
#endif
  }

#ifdef OSTINATO_AMX
 private:
  std::optional<TileConfiguration> tiles_;
#endif
};

// Fills inputs from load(row, float*), rows side by side, and meanwhile calls `besides`.
template <typename Load, typename Besides>
void fill(Inputs& inputs, int64_t columns, const Load& load, const Besides& besides) {
  // A few microseconds' work for a task: handing it over costs one.
  int64_t together = std::max<int64_t>(1, 8192 / columns), rows = inputs.rows(), tasks = (rows + together - 1) / together;
  auto fill_rows = [&](int64_t task) {
    Scratch<float> x(columns);
    for (int64_t row = task * together; row < std::min(rows, (task + 1) * together); ++row) {
      load(row, x);
      inputs.put(row, x);
    }
  };
  if (tasks > 1) return parallel(1 + tasks, [&](int64_t task) { task ? fill_rows(task - 1) : besides(); }, 64);
  besides();
  if (tasks) fill_rows(0);
}

template <typename Load>
void fill(Inputs& inputs, int64_t columns, const Load& load) {
  fill(inputs, columns, load, [] {});
}

// Rows that meet a block at a time: with AMX more, since four-bit weights are made bfloat16 for them each time.
#ifdef OSTINATO_AMX
constexpr int64_t MAX_ROWS = 256;
#else
constexpr int64_t MAX_ROWS = 64;
#endif

// Calls work(block, begin, end) for all blocks and, of each, for all rows in pieces of at most MAX_ROWS, on all threads.
template <typename Work>
void for_blocks(int64_t blocks, int64_t rows, const Work& work) {
  int64_t pieces = (rows + MAX_ROWS - 1) / MAX_ROWS;
  if (pieces == 1) return parallel(blocks, [&](int64_t block) { work(block, 0, rows); }, rows == 1 ? 3 : 8);
  // A few blocks stay in a core's cache while the pieces of the rows pass.
  constexpr int64_t TOGETHER = 4;
  parallel(
      (blocks + TOGETHER - 1) / TOGETHER * pieces,
      [&](int64_t task) {
        int64_t begin = task % pieces * MAX_ROWS, end = std::min(rows, begin + MAX_ROWS);
        int64_t first = task / pieces * TOGETHER;
        for (int64_t block = first; block < std::min(blocks, first + TOGETHER); ++block) work(block, begin, end);
      },
      16);
}

// x @ weight.T, of which each piece of a row goes to emit(row, column, values, count), count being at most LANES.
template <typename Emit>
void multiply(const Weight& weight, const Inputs& x, const Emit& emit) {
  for_blocks(weight.blocks(), x.rows(), [&](int64_t block, int64_t begin, int64_t end) {
    alignas(64) float out[MAX_ROWS * LANES];
    multiply_block(weight, x, block, begin, end, out);
    for (int64_t row = begin; row < end; ++row)
      emit(row, block * LANES, load(out + (row - begin) * LANES), weight.rows_of(block));
  });
}

// The same of a weight whose two halves of rows are a gate and what it is for: emit(row, column, gate, up, count).
template <typename Emit>
void multiply_pairs(const Weight& weight, const Inputs& x, const Emit& emit) {
  int64_t half = weight.rows / 2;
  if (half % LANES == 0) {
    int64_t blocks = half / LANES;
    for_blocks(blocks, x.rows(), [&](int64_t block, int64_t begin, int64_t end) {
      alignas(64) float gate[MAX_ROWS * LANES], up[MAX_ROWS * LANES];
      multiply_block(weight, x, block, begin, end, gate, Block{&weight, block + blocks});
      multiply_block(weight, x, block + blocks, begin, end, up, Block{&weight, block + 1});
      for (int64_t row = begin; row < end; ++row) {
        int64_t at = (row - begin) * LANES;
        emit(row, block * LANES, load(gate + at), load(up + at), LANES);
      }
    });
    return;
  }
  Scratch<float> both(x.rows() * weight.rows);
  multiply(weight, x, [&](int64_t row, int64_t column, Floats y, int64_t count) {
    Array{both, false}.store(row * weight.rows + column, y, count);
  });
  parallel(x.rows(), [&](int64_t row) {
    Array gate{both + row * weight.rows, false}, up{both + row * weight.rows + half, false};
    for (int64_t i = 0; i < half; i += LANES) {
      int64_t count = std::min(LANES, half - i);
      emit(row, i, gate.load(i, count), up.load(i, count), count);
    }
  });
}

}  // namespace ostinato
