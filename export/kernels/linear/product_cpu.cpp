#include "product_cpu.h"

#include <stdexcept>
#include <string>

namespace ostinato {
namespace {

// Rows of inputs that are multiplied at a time: the registers hold the sums of this number of rows.
#ifdef OSTINATO_AVX512
constexpr int TILE = 12, INT4_TILE = 12;
#else
// Five, not six: six would leave no register in which to take bfloat16 pairs apart (on two cores 67 GMAC/s, with five 95).
constexpr int TILE = 5, INT4_TILE = 8;
#endif
// Distance in bytes from what is multiplied to what is prefetched. The hardware's own prefetching ends at each page of 4 KB.
constexpr int64_t AHEAD = 2048;

// A group whose largest magnitude is not above this counts as zeros: 127 divided by a tiny number would overflow.
constexpr float MIN_PEAK = 1e-30f;

int32_t word(const void* p) {
  int32_t found;
  std::memcpy(&found, p, 4);
  return found;
}

void fetch(const void* p, int64_t ahead = AHEAD) { _mm_prefetch((const char*)p + ahead, _MM_HINT_T0); }

#ifdef OSTINATO_AMX
// The number of rows from which on tiles are faster. Four-bit weights use tiles of bytes, whose sums become floats after each
// group: the longer a group, the less that costs. In groups shorter than a tile's row, weights become bfloat16 first.
constexpr int64_t TILES_FROM = 8, WIDE_TILES_FROM = 24;

int64_t tiles_from(Format format, int64_t group) {
  if (format == Format::FLOAT32) return INT64_MAX;
  if (format == Format::BFLOAT16) return TILES_FROM;
  if (group < TILE_BYTES) return WIDE_TILES_FROM;
  return group == TILE_BYTES ? 32 : 8;
}

// Converts a panel of four-bit weights to a panel of bfloat16.
void widen_panel(const uint8_t* w, const bfloat16* scale, int64_t columns, int64_t group, bfloat16* out) {
  __m512 numbers = _mm512_set_ps(7, 6, 5, 4, 3, 2, 1, 0, -1, -2, -3, -4, -5, -6, -7, -8);
  for (int64_t begin = 0; begin < columns; begin += group, scale += LANES) {
    __m512 factor = load(scale).v;
    for (int64_t k = 0; k < group; k += 8, w += 64, out += 8 * LANES) {
      __m512i both = _mm512_loadu_si512(w);
      // No mask is needed after the shift: the permutation uses only the low four bits of a lane.
      auto number = [&](int shift) {
        return _mm512_mul_ps(_mm512_permutexvar_ps(_mm512_srlv_epi32(both, _mm512_set1_epi32(shift)), numbers), factor);
      };
      auto put = [&](int64_t at, int even, int odd) {
        __m512i halves = (__m512i)_mm512_cvtne2ps_pbh(number(odd), number(even));
        _mm512_storeu_si512(out + at * LANES, in_pairs(halves));
      };
      put(0, 0, 8);
      put(2, 16, 24);
      put(4, 4, 12);
      put(6, 20, 28);
    }
  }
}
#endif

Format format_of(const Tensor& values, std::string_view form) {
  if (form.empty()) return is_narrow(values.dtype) ? Format::BFLOAT16 : Format::FLOAT32;
  if (form == "int4") return Format::INT4;
  throw std::runtime_error("these kernels do not know the number format " + std::string(form));
}

}  // namespace

Weight::Weight(const Tensor& values_, const Tensor& scale_, [[maybe_unused]] const Tensor& minimum, std::string_view form)
    : format(format_of(values_, form)),
      values(values_.as<char>()),
      scale(scale_.as<bfloat16>()),
      rows(values_.size(-2)),
      columns(values_.size(-1) * (scale_ ? 2 : 1)),
      group(scale_ ? columns / scale_.size(-1) : 0),
      panel_rows(format == Format::BFLOAT16 && columns % 2 ? 0 : rows / LANES * LANES) {}

Weight Weight::expert(int64_t index) const {
  Weight one = *this;
  one.values += index * rows * row_bytes();
  if (scale) one.scale += index * rows * (columns / group);
  return one;
}

Inputs::Inputs(const Weight& weight, int64_t rows, [[maybe_unused]] int64_t more)
    : format_(weight.format),
      rows_(rows),
      columns_(weight.columns),
      // One cache line more than the columns take: rows whose size is a power of two would all begin in one set of the cache.
      stride_((weight.columns + 63) / 64 * 64 + 64),
      group_(weight.group) {
#ifdef OSTINATO_AMX
  // The last tile reads memory behind the last row; these results are not used.
  int64_t room = rows + TILE_ROWS;
  if (format_ == Format::INT4 && group_ < TILE_BYTES && std::max(rows, more) >= WIDE_TILES_FROM) halves_.reserve(room * stride_);
#else
  int64_t room = rows;
#endif
  if (format_ == Format::INT4) {
    bytes_.reserve(room * stride_);
    scales_.reserve(room * (columns_ / group_));
    offsets_.reserve(room * (columns_ / group_));
    // Zeros, since denormal numbers could be slow.
    std::memset(scales_ + rows * (columns_ / group_), 0, (room - rows) * (columns_ / group_) * sizeof(float));
#ifdef __AVX512BF16__
  } else if (format_ == Format::BFLOAT16) {
    halves_.reserve(room * stride_);
#endif
  } else {
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
      store_bytes(bytes_ + row * stride_ + at + i, whole);
      total = total + whole;
    }
    int64_t group = row * (columns_ / group_) + at / group_;
    scales_[group] = peak / 127;
    // Stored weights are n + 8. `multiply_block` subtracts this offset from its sums.
    offsets_[group] = peak == peak ? int32_t(8 * sum(total)) : 0;
  }
}

void Inputs::take(int64_t row, const Inputs& from, int64_t from_row) {
  auto copy = [&](const auto& to, const auto& of, int64_t count, int64_t stride) {
    if (to) std::memcpy(to + row * stride, of + from_row * stride, count * sizeof(*to));
  };
  int64_t groups = bytes_ ? columns_ / group_ : 0;
  copy(floats_, from.floats_, columns_, columns_);
  copy(halves_, from.halves_, columns_, stride_);
  copy(bytes_, from.bytes_, columns_, stride_);
  copy(scales_, from.scales_, groups, groups);
  copy(offsets_, from.offsets_, groups, groups);
}

// `tile<M>` multiplies M rows of inputs with a block of LANES rows of the weight.
struct BlockProduct {
  const Weight& weight;
  const Inputs& x;
  int64_t block;
  Block next;

  // Distance in bytes from `at`, which is multiplied now, to what is prefetched: at the end of a block, the next block.
  int64_t ahead(const void* at) const {
    const char* end = weight.values_of(block + 1);
    return (const char*)at + AHEAD < end ? AHEAD : AHEAD + (next.weight->values_of(next.index) - end);
  }

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

  template <int M>
  void bfloat16s(int64_t row, float* out) const {
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
  void int4(int64_t row, float* out) const {
    int64_t columns = weight.columns, groups = columns / weight.group;
    const uint8_t* w = (const uint8_t*)weight.values_of(block);
    const bfloat16* scale = weight.scale_of(block);
    const int8_t* in = x.bytes_ + row * x.stride_;
    const float* in_scale = x.scales_ + row * groups;
    const int32_t* in_offset = x.offsets_ + row * groups;
    std::memset(out, 0, M * LANES * sizeof(float));
    const bfloat16* next_scale = next.weight->scale_of(next.index);
    for (int64_t group = 0; group < groups; ++group, scale += LANES) {
      fetch(next_scale + group * LANES, 0);
      int64_t distance = ahead(w + group * weight.group * (LANES / 2));
      // One register of lanes after the other, so that only the sums of M rows fill the registers.
      for (int64_t lane = 0; lane < LANES; lane += REGISTER_LANES) {
        const uint8_t* from = w + group * weight.group * (LANES / 2) + lane * 4;
        const int8_t* bytes = in + group * weight.group;
        Register total[M];
        for (int m = 0; m < M; ++m) total[m] = all_words(-in_offset[m * groups + group]);
        for (int64_t part = 0; part < weight.group; part += 32) {
          Register sums[M];
          for (int m = 0; m < M; ++m) sums[m] = all_words(0);
#pragma GCC unroll 4
          for (int64_t k = 0; k < 32; k += 8, from += 64, bytes += 8) {
            fetch(from, distance);
            Register both = load_register(from), nibbles = low_nibbles(both);
#pragma GCC unroll 16
            for (int m = 0; m < M; ++m) sums[m] = add_dot(sums[m], nibbles, all_words(word(bytes + m * x.stride_)));
            nibbles = high_nibbles(both);
#pragma GCC unroll 16
            for (int m = 0; m < M; ++m) sums[m] = add_dot(sums[m], nibbles, all_words(word(bytes + m * x.stride_ + 4)));
          }
#pragma GCC unroll 16
          for (int m = 0; m < M; ++m) total[m] = add_words(total[m], wide(sums[m]));
        }
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m)
          add_scaled(out + m * LANES + lane, total[m], scale + lane, in_scale[m * groups + group]);
      }
    }
  }

  template <int M>
  void tile(int64_t row, float* out) const {
    if (weight.format == Format::INT4) {
      int4<M>(row, out);
    } else if constexpr (M <= TILE) {
      weight.format == Format::BFLOAT16 ? bfloat16s<M>(row, out) : float32<M>(row, out);
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
  // Multiplies rows `begin` to `end` in tiles. Returns false, and does nothing, where tiles do not fit or are slower.
  bool tiles(int64_t begin, int64_t end, float* out) const {
    bool int4 = weight.format == Format::INT4;
    if (end - begin < tiles_from(weight.format, weight.group) || weight.columns % TILE_COLUMNS || !may_use_tiles()) return false;
    TileConfiguration configuration;
    if (int4 && !x.halves_) {
      for (int64_t row = begin; row < end; row += 4 * TILE_ROWS)
        byte_tiles(end - row, row, out + (row - begin) * LANES);
      return true;
    }
    int64_t columns = weight.columns;
    Scratch<bfloat16> wide(int4 ? columns * LANES : 0);
    const bfloat16* panel = (const bfloat16*)weight.values_of(block);
    if (int4) {
      widen_panel((const uint8_t*)panel, weight.scale_of(block), columns, weight.group, wide);
      panel = wide;
    }
    int64_t tiles = (end - begin + TILE_ROWS - 1) / TILE_ROWS;
    multiply_all_tiles(tiles, x.halves_ + begin * x.stride_, x.stride_, panel, columns, out, LANES, false);
    return true;
  }

  void byte_tiles(int64_t rows, int64_t row, float* out) const {
    if (rows > 3 * TILE_ROWS)
      byte_tiles<4>(row, out);
    else if (rows > 2 * TILE_ROWS)
      byte_tiles<3>(row, out);
    else if (rows > TILE_ROWS)
      byte_tiles<2>(row, out);
    else
      byte_tiles<1>(row, out);
  }

  // Multiplies COUNT tiles of rows. The tiles' sums are integers, which become floats after each group.
  //
  // A tile is loaded from memory. The load waits until earlier stores to this memory have left the processor's queue of
  // stores. So the bytes of a weight are unpacked one part before they are loaded (two parts before made no difference), and
  // a group's sums become floats while the next group is multiplied.
  template <int COUNT>
  void byte_tiles(int64_t row, float* out) const {
    constexpr int64_t PART = TILE_BYTES * LANES;
    int64_t columns = weight.columns, groups = columns / weight.group, tile_bytes = TILE_ROWS * x.stride_;
    int64_t parts = columns / TILE_BYTES, together = weight.group / TILE_BYTES;
    const uint8_t* w = (const uint8_t*)weight.values_of(block);
    const bfloat16* scale = weight.scale_of(block);
    const int8_t* in = x.bytes_ + row * x.stride_;
    const float* in_scale = x.scales_ + row * groups;
    alignas(64) uint8_t bytes[2][PART];
    alignas(64) int32_t words[2][COUNT][TILE_ROWS * LANES];
    Floats sums[COUNT][TILE_ROWS];
    for (int tile = 0; tile < COUNT; ++tile)
      for (int m = 0; m < TILE_ROWS; ++m) sums[tile][m] = zeros();
    // A number n, stored as n + 8 in four bits, becomes 16 n in eight bits.
    auto signed_bytes = [](__m512i nibbles) {
      return _mm512_ternarylogic_epi32(nibbles, _mm512_set1_epi8(-16), _mm512_set1_epi8(-128), 0x6A);
    };
    auto unpack = [&](int64_t part) {
      const uint8_t* from = w + part * (PART / 2);
      uint8_t* to = bytes[part % 2];
      int64_t distance = ahead(from);
#pragma GCC unroll 8
      for (int64_t i = 0; i < PART / 2; i += 64) {
        fetch(from + i, distance);
        __m512i both = _mm512_loadu_si512(from + i);
        _mm512_store_si512(to + 2 * i, signed_bytes(_mm512_slli_epi16(both, 4)));
        _mm512_store_si512(to + 2 * i + 64, signed_bytes(both));
      }
    };
    auto add = [&](int64_t group) {
      Floats factor = load(scale + group * LANES) * broadcast(1 / 16.f);
#pragma GCC unroll 4
      for (int tile = 0; tile < COUNT; ++tile)
#pragma GCC unroll 16
        for (int m = 0; m < TILE_ROWS; ++m) {
          Floats whole = {_mm512_cvtepi32_ps(_mm512_load_si512(words[group % 2][tile] + m * LANES))};
          sums[tile][m] = fma(whole, factor * broadcast(in_scale[(tile * TILE_ROWS + m) * groups + group]), sums[tile][m]);
        }
    };
    unpack(0);
    const bfloat16* next_scale = next.weight->scale_of(next.index);
    for (int64_t group = 0, part = 0; group < groups; ++group) {
      fetch(next_scale + group * LANES, 0);
      _tile_zero(0);
      if constexpr (COUNT > 1) _tile_zero(1);
      if constexpr (COUNT > 2) _tile_zero(2);
      if constexpr (COUNT > 3) _tile_zero(3);
      for (int64_t end = part + together; part < end; ++part, in += TILE_BYTES) {
        asm volatile("" ::: "memory");
        _tile_loadd(4, bytes[part % 2], TILE_BYTES);
        _tile_loadd(5, in, x.stride_);
        _tile_dpbssd(0, 5, 4);
        if constexpr (COUNT > 1) {
          _tile_loadd(6, in + tile_bytes, x.stride_);
          _tile_dpbssd(1, 6, 4);
        }
        if constexpr (COUNT > 2) {
          _tile_loadd(7, in + 2 * tile_bytes, x.stride_);
          _tile_dpbssd(2, 7, 4);
        }
        if constexpr (COUNT > 3) {
          _tile_loadd(5, in + 3 * tile_bytes, x.stride_);
          _tile_dpbssd(3, 5, 4);
        }
        if (part + 1 < parts) unpack(part + 1);
      }
      if (group) add(group - 1);
      _tile_stored(0, words[group % 2][0], TILE_BYTES);
      if constexpr (COUNT > 1) _tile_stored(1, words[group % 2][1], TILE_BYTES);
      if constexpr (COUNT > 2) _tile_stored(2, words[group % 2][2], TILE_BYTES);
      if constexpr (COUNT > 3) _tile_stored(3, words[group % 2][3], TILE_BYTES);
    }
    add(groups - 1);
    for (int tile = 0; tile < COUNT; ++tile)
      for (int m = 0; m < TILE_ROWS; ++m) store(out + (tile * TILE_ROWS + m) * LANES, sums[tile][m]);
  }
#endif

  // The product of row `row` of the inputs with row `n` of the weight, which stands outside of panels.
  float row_outside_panels(int64_t row, int64_t n) const {
    const char* w = weight.values + n * weight.row_bytes();
    int64_t columns = weight.columns;
    if (weight.format != Format::INT4) {
      Array values{(void*)w, weight.format == Format::BFLOAT16};
      Array in = x.floats_ ? Array{x.floats_ + row * columns, false} : Array{x.halves_ + row * x.stride_, true};
      return dot(values, in, columns);
    }
    int64_t groups = columns / weight.group;
    const int8_t* in = x.bytes_ + row * x.stride_;
    float total = 0;
    for (int64_t group = 0; group < groups; ++group) {
      int32_t dot = -x.offsets_[row * groups + group];
      for (int64_t k = group * weight.group; k < (group + 1) * weight.group; ++k) {
        uint8_t both = uint8_t(w[k / 64 * 32 + k % 32]);
        dot += (k % 64 < 32 ? both & 15 : both >> 4) * in[k];
      }
      total += float(dot) * from_bfloat16(weight.scale[n * groups + group]) * x.scales_[row * groups + group];
    }
    return total;
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
  if (product.tiles(begin, end, out)) return;
#endif
  // Divides rows evenly: 16 rows are twice eight, not twelve and four.
  int64_t max_rows = weight.format == Format::INT4 ? INT4_TILE : TILE, times = (end - begin + max_rows - 1) / max_rows;
  for (int64_t time = 0, row = begin; time < times; ++time) {
    int64_t rows = (end - row + times - time - 1) / (times - time);
    product.up_to<INT4_TILE>(rows, row, out + (row - begin) * LANES);
    row += rows;
  }
}

}  // namespace ostinato
