// Products with weights whose rows stand in panels (see linear/panels.py).
#pragma once

#include <algorithm>
#include <optional>
#include <string_view>

#include "../tensors_cpu.h"
#include "../threads_cpu.h"
#include "../tiles_cpu.h"
#include "../vectors_cpu.h"

namespace ostinato {

// The integers, which come last, stand in groups: formats/ says what they mean.
enum class Format { FLOAT32, BFLOAT16, INT4, INT4_MIN, INT8 };

// A matrix [rows, columns]. Its first `panel_rows` rows stand in panels of LANES rows, the others one after the other.
struct Weight {
  Format format;
  const char* values;
  const uint16_t *scale, *minimum;  // null if there are none
  bool half_scale;                  // these are float16, not bfloat16
  int64_t rows, columns, group, panel_rows;

  // The matrix in the last two dimensions of `values`; the first one, if there are several. `form`: the format's name.
  Weight(const Tensor& values, const Tensor& scale, const Tensor& minimum, std::string_view form);
  Weight expert(int64_t index) const;

  bool integers() const { return format >= Format::INT4; }
  // Whether inputs made for one of two weights serve the other, too.
  bool shares_inputs(const Weight& other) const {
    return columns == other.columns && group == other.group && (integers() ? other.integers() : format == other.format);
  }
  int64_t groups() const { return integers() ? columns / group : 0; }
  int64_t row_bytes() const {
    if (format == Format::FLOAT32) return 4 * columns;
    if (format == Format::BFLOAT16) return 2 * columns;
    return format == Format::INT8 ? columns : columns / 2;
  }
  // Blocks of LANES rows; the last one may have fewer.
  int64_t blocks() const { return (rows + LANES - 1) / LANES; }
  int64_t rows_of(int64_t block) const { return std::min(LANES, rows - block * LANES); }
  const char* values_of(int64_t block) const { return values + block * LANES * row_bytes(); }
  const uint16_t* scale_of(int64_t block) const { return scale ? scale + block * LANES * groups() : nullptr; }
  const uint16_t* minimum_of(int64_t block) const { return minimum ? minimum + block * LANES * groups() : nullptr; }
  // LANES scales or minima, and a single one.
  Floats load_scale(const uint16_t* p) const { return half_scale ? load((const float16*)p) : load((const bfloat16*)p); }
  float one_scale(uint16_t x) const { return half_scale ? from_float16({x}) : from_bfloat16(x); }
};

// A block of a weight.
struct Block {
  const Weight* weight;
  int64_t index;
};

// A number n of int4 stands as n + NIBBLE_OFFSET in its weight.
constexpr int32_t NIBBLE_OFFSET = 8;

// A group of an input's bytes: its scale; the sum of the bytes times -NIBBLE_OFFSET, and times the scale.
struct ByteGroup {
  float scale;
  int32_t offset;
  float moment;
};

// Rows of inputs, in the forms that products with a weight need: float32, bfloat16, or bytes with a scale per group.
class Inputs {
 public:
  // `more`: number of rows of another object that will `take` rows of this one. `together`: each block multiplies all rows,
  // with no other weight.
  Inputs(const Weight& weight, int64_t rows, int64_t more = 0, bool together = false);

  int64_t rows() const { return rows_; }
  // Write a row. It has one element for each column of the weight.
  void put(int64_t row, const float* x) { put(row, x, 0, columns_); }
  // Write `count` elements of a row from `begin` on, both multiples of the weight's groups.
  void put(int64_t row, const float* x, int64_t begin, int64_t count);
  // Copy a row from other inputs, which were made for the same weight.
  void take(int64_t row, const Inputs& from, int64_t from_row);

 private:
  friend struct BlockProduct;

  ByteGroup* groups_of(int64_t row) const { return (ByteGroup*)(bytes_ + row * byte_stride_ + columns_); }

  Format format_;
  int64_t rows_, columns_, stride_, group_, byte_stride_;
  Scratch<float> floats_;
  Scratch<bfloat16> halves_;
  Scratch<int8_t> bytes_;  // of each row, and behind them its groups
};

// Multiplies rows `begin` to `end` of x by the rows of one block of the weight: out [end - begin, LANES], with room for
// MAX_ROWS rows. The room behind the last row may be overwritten. Lanes that the last block does not have stay uninitialised.
// `next`: the block that this thread will read afterwards, which is fetched from memory meanwhile; by default the block
// behind this one.
void multiply_block(const Weight& weight, const Inputs& x, int64_t block, int64_t begin, int64_t end, float* out,
                    std::optional<Block> next = {});

// `multiply_block` for two blocks; `next` is read after them. Tiles multiply both at the same time.
void multiply_blocks(const Weight& weight, const Inputs& x, int64_t first, int64_t second, int64_t begin, int64_t end,
                     float* out, float* out_second, Block next);

// The number of neighbouring blocks, one or two, that a task should multiply with so many rows.
int64_t blocks_together(const Weight& weight, int64_t rows);

// While an object of this class lives, its thread keeps the configuration of AMX tiles. Without it, products of several rows
// would set the tiles up again for each block.
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

// Fills inputs from load(row, float*), rows in parallel, and calls `besides` at the same time.
template <typename Load, typename Besides>
void fill(Inputs& inputs, int64_t columns, const Load& load, const Besides& besides) {
  // A task is work for a few microseconds, since handing it to a thread costs one microsecond.
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

// Rows that are multiplied with a block at a time. More with AMX: integers may be made bfloat16 again each time.
#ifdef OSTINATO_AMX
constexpr int64_t MAX_ROWS = 256;
#else
constexpr int64_t MAX_ROWS = 64;
#endif

// Calls work(block, begin, end) for all blocks, on all threads. Each block gets all rows, at most MAX_ROWS at a time. `wide`:
// the number of a weight's blocks that the caller counts as one.
template <typename Work>
void for_blocks(int64_t blocks, int64_t rows, int64_t wide, const Work& work) {
  int64_t pieces = (rows + MAX_ROWS - 1) / MAX_ROWS;
  if (pieces == 1) return parallel(blocks, [&](int64_t block) { work(block, 0, rows); }, rows == 1 ? 3 : 8);
  // A task has a few blocks. The next task has the same blocks and other rows, so the blocks stay in a core's cache.
  const int64_t together = 4 / wide;
  parallel(
      (blocks + together - 1) / together * pieces,
      [&](int64_t task) {
        int64_t begin = task % pieces * MAX_ROWS, end = std::min(rows, begin + MAX_ROWS);
        int64_t first = task / pieces * together;
        for (int64_t block = first; block < std::min(blocks, first + together); ++block) work(block, begin, end);
      },
      16);
}

// x @ weight.T. Calls emit(row, column, values, count) for each stretch of a row of the result; `count` is at most LANES.
template <typename Emit>
void multiply(const Weight& weight, const Inputs& x, const Emit& emit) {
  int64_t blocks = weight.blocks(), wide = blocks_together(weight, x.rows());
  for_blocks((blocks + wide - 1) / wide, x.rows(), wide, [&](int64_t index, int64_t begin, int64_t end) {
    alignas(64) float out[2][MAX_ROWS * LANES];
    int64_t first = index * wide, last = std::min(blocks, first + wide);
    if (last - first == 2)
      multiply_blocks(weight, x, first, first + 1, begin, end, out[0], out[1], Block{&weight, last});
    else
      multiply_block(weight, x, first, begin, end, out[0]);
    for (int64_t row = begin; row < end; ++row)
      for (int64_t block = first; block < last; ++block)
        emit(row, block * LANES, load(out[block - first] + (row - begin) * LANES), weight.rows_of(block));
  });
}

// `multiply` for a weight whose rows are gates (first half) and ups: calls emit(row, column, gate, up, count).
template <typename Emit>
void multiply_pairs(const Weight& weight, const Inputs& x, const Emit& emit) {
  int64_t half = weight.rows / 2;
  if (half % LANES == 0) {
    int64_t blocks = half / LANES;
    for_blocks(blocks, x.rows(), 1, [&](int64_t block, int64_t begin, int64_t end) {
      alignas(64) float gate[MAX_ROWS * LANES], up[MAX_ROWS * LANES];
      multiply_blocks(weight, x, block, block + blocks, begin, end, gate, up, Block{&weight, block + 1});
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
