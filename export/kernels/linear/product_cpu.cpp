#include "product_cpu.h"

#include <stdexcept>
#include <string>

#include "integers_cpu.h"

namespace ostinato {
namespace {

// Rows of inputs that are multiplied at a time: the registers hold the sums of this number of rows.
#ifdef OSTINATO_AVX512
constexpr int TILE = 12, INTEGER_TILE = 12;
#else
// Five, not six: six would leave no register in which to take bfloat16 pairs apart (on two cores 67 GMAC/s, with five 95).
constexpr int TILE = 5, INTEGER_TILE = 8;
#endif

// A group whose largest magnitude is not above this counts as zeros: 127 divided by a tiny number would overflow.
constexpr float MIN_PEAK = 1e-30f;

int32_t word(const void* p) {
  int32_t found;
  std::memcpy(&found, p, 4);
  return found;
}

#ifdef OSTINATO_AMX
// The number of rows from which on tiles are faster. Integers use tiles of bytes, whose sums become floats after each group:
// the longer a group, the less that costs. In groups shorter than a tile's row, weights become bfloat16 first; so do all
// weights with minima. The numbers were measured with int4.
constexpr int64_t TILES_FROM = 8, WIDE_TILES_FROM = 24;

int64_t tiles_from(Format format, int64_t group) {
  if (format == Format::FLOAT32) return INT64_MAX;
  if (format == Format::BFLOAT16) return TILES_FROM;
  if (group < TILE_BYTES) return WIDE_TILES_FROM;
  return group == TILE_BYTES ? 32 : 8;
}

bool tiles_take(const Weight& weight, int64_t rows) {
  return rows >= tiles_from(weight.format, weight.group) && weight.columns % TILE_COLUMNS == 0 && may_use_tiles();
}
#endif

Format format_of(const Tensor& values, std::string_view form) {
  if (form.empty()) return is_narrow(values.dtype) ? Format::BFLOAT16 : Format::FLOAT32;
  if (form == "int4") return Format::INT4;
  if (form == "int4_min") return Format::INT4_MIN;
  if (form == "int8") return Format::INT8;
  throw std::runtime_error("these kernels do not know the number format " + std::string(form));
}

// A multiple of 64 bytes, and one cache line more than needed: rows whose size is a power of two would all begin in one set
// of the cache.
int64_t padded(int64_t size) { return (size + 63) / 64 * 64 + 64; }

}  // namespace

Weight::Weight(const Tensor& values_, const Tensor& scale_, const Tensor& minimum_, std::string_view form)
    : format(format_of(values_, form)),
      values(values_.as<char>()),
      scale(scale_.as<uint16_t>()),
      minimum(minimum_.as<uint16_t>()),
      half_scale(scale_ && scale_.dtype == aoti_torch_dtype_float16()),
      rows(values_.size(-2)),
      columns(values_.size(-1) * (format == Format::INT4 || format == Format::INT4_MIN ? 2 : 1)),
      group(scale_ ? columns / scale_.size(-1) : 0),
      panel_rows(format == Format::BFLOAT16 && columns % 2 ? 0 : rows / LANES * LANES) {
  if (integers() != (scale != nullptr) || (format == Format::INT4_MIN) != (minimum != nullptr))
    throw std::invalid_argument("the scale or minimum of a weight is missing, or there is one too many");
  if (scale && !half_scale && !is_narrow(scale_.dtype))
    throw std::invalid_argument("these kernels take scales in bfloat16 and float16 only");
}

Weight Weight::expert(int64_t index) const {
  Weight one = *this;
  one.values += index * rows * row_bytes();
  if (scale) one.scale += index * rows * groups();
  if (minimum) one.minimum += index * rows * groups();
  return one;
}

Inputs::Inputs(const Weight& weight, int64_t rows, [[maybe_unused]] int64_t more, [[maybe_unused]] bool together)
    : format_(weight.format),
      rows_(rows),
      columns_(weight.columns),
      stride_(padded(weight.columns)),
      group_(weight.group),
      byte_stride_(padded(weight.columns + weight.groups() * sizeof(ByteGroup))) {
  bool bytes = weight.integers();
#ifdef OSTINATO_AMX
  // The last tile reads memory behind the last row; these results are not used.
  int64_t room = rows + TILE_ROWS;
  if (weight.integers() && group_ < TILE_BYTES && tiles_take(weight, std::max(rows, more))) {
    halves_.reserve(room * stride_);
    bytes = !together || weight.panel_rows < weight.rows;
  }
#else
  int64_t room = rows;
#endif
  if (bytes) {
    bytes_.reserve(room * byte_stride_);
    // Zeros, since denormal numbers could be slow.
    for (int64_t row = rows; row < room; ++row) std::memset(groups_of(row), 0, weight.groups() * sizeof(ByteGroup));
#ifdef __AVX512BF16__
  } else if (format_ == Format::BFLOAT16) {
    halves_.reserve(room * stride_);
#endif
  } else if (!weight.integers()) {
    floats_.reserve(rows * columns_);
  }
}

void Inputs::put(int64_t row, const float* x, int64_t begin, int64_t count) {
  if (floats_) std::memcpy(floats_ + row * columns_ + begin, x, count * sizeof(float));
  if (halves_) {
    Array to{halves_ + row * stride_ + begin, true};
    for (int64_t i = 0; i < count; i += LANES) to.store(i, Array{(void*)x, false}.load(i, count - i), count - i);
  }
  if (!bytes_) return;
  for (int64_t at = begin; at < begin + count; at += group_, x += group_) {
    // An infinite value or NaN minus itself is NaN.
    Floats peaks = zeros(), strange = zeros();
    for (int64_t i = 0; i < group_; i += LANES) {
      Floats value = load(x + i);
      peaks = maximum(magnitude(value), peaks);
      strange = strange + (value - value);
    }
    float peak = largest(peaks) + sum(strange), inverse = peak > MIN_PEAK ? 127 / peak : 0;
    Floats total = zeros();
    for (int64_t i = 0; i < group_; i += LANES) {
      Floats whole = rounded(load(x + i) * broadcast(inverse));
      store_bytes(bytes_ + row * byte_stride_ + at + i, whole);
      total = total + whole;
    }
    float whole = sum(total);
    groups_of(row)[at / group_] = {peak / 127, peak == peak ? -NIBBLE_OFFSET * int32_t(whole) : 0, whole * (peak / 127)};
  }
}

void Inputs::take(int64_t row, const Inputs& from, int64_t from_row) {
  auto copy = [&](const auto& to, const auto& of, int64_t count, int64_t stride) {
    if (to) std::memcpy(to + row * stride, of + from_row * stride, count * sizeof(*to));
  };
  copy(floats_, from.floats_, columns_, columns_);
  copy(halves_, from.halves_, columns_, stride_);
  copy(bytes_, from.bytes_, columns_ + (bytes_ ? columns_ / group_ * sizeof(ByteGroup) : 0), byte_stride_);
}

// `tile<M>` multiplies M rows of inputs with a block of LANES rows of the weight.
struct BlockProduct {
  const Weight& weight;
  const Inputs& x;
  int64_t block;
  Block next;

  Panel panel() const { return {weight, block, next}; }
  ByteRows bytes(int64_t row) const { return {x.bytes_ + row * x.byte_stride_, x.byte_stride_, weight.columns}; }

  template <int M>
  void float32(int64_t row, float* out) const {
    const float* w = (const float*)weight.values_of(block);
    const float* in = x.floats_ + row * weight.columns;
    Floats acc[M];
    for (int m = 0; m < M; ++m) acc[m] = zeros();
    for (int64_t k = 0; k < weight.columns; ++k, w += LANES) {
      fetch(w);
      Floats column = load(w);
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) acc[m] = fma(column, broadcast(in[m * weight.columns + k]), acc[m]);
    }
    for (int m = 0; m < M; ++m) store(out + m * LANES, acc[m]);
  }

  // Inlined into `tile`, it would be 2 % slower for many rows.
  template <int M>
  __attribute__((noinline)) void bfloat16s(int64_t row, float* out) const {
    const bfloat16* w = (const bfloat16*)weight.values_of(block);
    Floats acc[M];
    for (int m = 0; m < M; ++m) acc[m] = zeros();
#ifdef __AVX512BF16__
    const bfloat16* in = x.halves_ + row * x.stride_;
    for (int64_t k = 0; k < weight.columns; k += 2, w += 2 * LANES) {
      fetch(w);
      __m512bh pairs = (__m512bh)_mm512_loadu_si512(w);
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) {
        __m512i pair = _mm512_set1_epi32(word(in + m * x.stride_ + k));
        acc[m].v = _mm512_dpbf16_ps(acc[m].v, pairs, (__m512bh)pair);
      }
    }
#else
    const float* in = x.floats_ + row * weight.columns;
    for (int64_t k = 0; k < weight.columns; k += 2, w += 2 * LANES) {
      fetch(w);
      Floats even, odd;
      load_pairs(w, even, odd);
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) {
        acc[m] = fma(even, broadcast(in[m * weight.columns + k]), acc[m]);
        acc[m] = fma(odd, broadcast(in[m * weight.columns + k + 1]), acc[m]);
      }
    }
#endif
    for (int m = 0; m < M; ++m) store(out + m * LANES, acc[m]);
  }

  template <int M>
  void tile(int64_t row, float* out) const {
    switch (weight.format) {
      case Format::INT4: return multiply_integers<Format::INT4, M>(panel(), bytes(row), out);
      case Format::INT4_MIN: return multiply_integers<Format::INT4_MIN, M>(panel(), bytes(row), out);
      case Format::INT8: return multiply_integers<Format::INT8, M>(panel(), bytes(row), out);
      default: if constexpr (M <= TILE) weight.format == Format::BFLOAT16 ? bfloat16s<M>(row, out) : float32<M>(row, out);
    }
  }

  template <int M>
  void up_to(int64_t rows, int64_t row, float* out) const {
    if (rows == M)
      tile<M>(row, out);
    else if constexpr (M > 1)
      up_to<M - 1>(rows, row, out);
  }

#ifdef OSTINATO_AMX
  // Multiplies rows `begin` to `end` of x in tiles by COUNT blocks, one or two. Returns false, and does nothing, where tiles do
  // not fit or are slower.
  template <int COUNT>
  static bool in_tiles(const BlockProduct* blocks, int64_t begin, int64_t end, float* const (&out)[2]) {
    const Weight& weight = blocks->weight;
    const Inputs& x = blocks->x;
    // Rows without bytes have tiles, however few they are.
    bool alone = weight.integers() && !x.bytes_;
    if (!alone && !tiles_take(weight, end - begin)) return false;
    for (int i = 0; i < COUNT; ++i)
      if (blocks[i].block * LANES >= weight.panel_rows) return false;
    TileConfiguration configuration;
    const Panel panels[] = {blocks[0].panel(), blocks[COUNT - 1].panel()};
    int64_t tiles = (end - begin + TILE_ROWS - 1) / TILE_ROWS, columns = weight.columns;
    if (weight.integers() && !x.halves_) {
      auto multiply = weight.format == Format::INT8 ? multiply_byte_tiles<Format::INT8> : multiply_byte_tiles<Format::INT4>;
      for (int i = 0; i < COUNT; ++i)
        for (int64_t row = begin; row < end; row += 4 * TILE_ROWS)
          multiply(panels[i], blocks[i].bytes(row), end - row, out[i] + (row - begin) * LANES);
      return true;
    }
    const bfloat16* in = x.halves_ + begin * x.stride_;
    switch (weight.format) {
      case Format::INT4: multiply_wide_tiles<Format::INT4, COUNT>(panels, in, x.stride_, tiles, out); break;
      case Format::INT4_MIN: multiply_wide_tiles<Format::INT4_MIN, COUNT>(panels, in, x.stride_, tiles, out); break;
      case Format::INT8: multiply_wide_tiles<Format::INT8, COUNT>(panels, in, x.stride_, tiles, out); break;
      default:
        auto* first = (const bfloat16*)panels[0].values;
        if constexpr (COUNT == 2)
          multiply_all_tiles_by_two(tiles, in, x.stride_, {first, (const bfloat16*)panels[1].values}, columns, out, [](int64_t) {});
        else
          multiply_all_tiles(tiles, in, x.stride_, first, columns, out[0], LANES, false);
    }
    return true;
  }
#endif

  // The product of row `row` of the inputs with row `n` of the weight, which stands outside of panels.
  float row_outside_panels(int64_t row, int64_t n) const {
    if (weight.integers()) return multiply_integers_outside(weight, n, bytes(row));
    int64_t columns = weight.columns;
    Array values{(void*)(weight.values + n * weight.row_bytes()), weight.format == Format::BFLOAT16};
    Array in = x.floats_ ? Array{x.floats_ + row * columns, false} : Array{x.halves_ + row * x.stride_, true};
    return dot(values, in, columns);
  }
};

void multiply_block(const Weight& weight, const Inputs& x, int64_t block, int64_t begin, int64_t end, float* out,
                    std::optional<Block> next) {
  BlockProduct product{weight, x, block, next.value_or(Block{&weight, block + 1})};
  if (block * LANES >= weight.panel_rows) {
    for (int64_t row = begin; row < end; ++row)
      for (int64_t lane = 0; lane < weight.rows_of(block); ++lane)
        out[(row - begin) * LANES + lane] = product.row_outside_panels(row, block * LANES + lane);
    return;
  }
#ifdef OSTINATO_AMX
  if (BlockProduct::in_tiles<1>(&product, begin, end, {out, nullptr})) return;
#endif
  // Divides rows evenly: 16 rows are twice eight, not twelve and four.
  int64_t max_rows = weight.integers() ? INTEGER_TILE : TILE, times = (end - begin + max_rows - 1) / max_rows;
  for (int64_t time = 0, row = begin; time < times; ++time) {
    int64_t rows = (end - row + times - time - 1) / (times - time);
    product.up_to<INTEGER_TILE>(rows, row, out + (row - begin) * LANES);
    row += rows;
  }
}

void multiply_blocks(const Weight& weight, const Inputs& x, int64_t first, int64_t second, int64_t begin, int64_t end,
                     float* out, float* out_second, Block next) {
#ifdef OSTINATO_AMX
  const BlockProduct products[] = {{weight, x, first, next},
                                   {weight, x, second, {next.weight, next.index + second - first}}};
  if (BlockProduct::in_tiles<2>(products, begin, end, {out, out_second})) return;
#endif
  multiply_block(weight, x, first, begin, end, out, Block{&weight, second});
  multiply_block(weight, x, second, begin, end, out_second, next);
}

int64_t blocks_together([[maybe_unused]] const Weight& weight, [[maybe_unused]] int64_t rows) {
#ifdef OSTINATO_AMX
  if (tiles_take(weight, rows) && weight.blocks() >= 4 * thread_count()) return 2;
#endif
  return 1;
}

}  // namespace ostinato
