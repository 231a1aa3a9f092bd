// The scores of a task's queries with one block of the cache, and the block's values weighted by them. In float32, or in
// bfloat16 by tiles (AMX).
#pragma once

#include <algorithm>
#include <array>
#include <type_traits>

#include "../tensors_cpu.h"
#include "../tiles_cpu.h"

namespace ostinato {

// Positions that stand together in a page. The size of a page is a power of two, and at least this.
constexpr int64_t TOGETHER = 16;

// The places of this block and of the next one in the cache: the number of elements ahead of each TOGETHER positions.
template <int64_t BLOCK>
struct Places {
  std::array<int64_t, BLOCK / TOGETHER> here, next;
};

// FloatBlock and TileBlock have the same members:
//   BLOCK                                       positions of the cache at a time
//   MAX_QUERIES                                 the most queries of a task
//   put(i, query)                               sets query i: [padded] floats, already multiplied by the scale of scores
//   score(keys, at, first, length, scores)      writes scores [count, BLOCK] of the keys from `first` to `length`; the other
//                                               columns are undefined
//   add(values, at, first, length, scores, out) out [count, padded] += the values at the same places, weighted by `scores`
// `add` takes scores that have been made weights; they are zero outside these places. scores and out have room for `room()`
// rows.
class FloatBlock {
 public:
  static constexpr int64_t BLOCK = 32, MAX_QUERIES = 32;

  FloatBlock(int64_t count, int64_t size, int64_t padded)
      : count_(count), size_(size), padded_(padded), queries_(count * padded), block_(BLOCK * padded) {}

  int64_t room() const { return count_; }

  void put(int64_t i, const float* query) { std::memcpy(queries_ + i * padded_, query, padded_ * sizeof(float)); }

  void score(const Array& keys, const Places<BLOCK>& at, int64_t first, int64_t length, float* scores) {
    widen(keys, at, first, length);
    for (int64_t c = 0; c < length; c += 2) {
      int64_t r = 0;
      for (; r + 2 <= count_; r += 2) dots<2, 2>(r, c, scores);
      if (r < count_) dots<1, 2>(r, c, scores);
    }
  }

  void add(const Array& values, const Places<BLOCK>& at, int64_t first, int64_t length, const float* scores, float* out) {
    widen(values, at, first, length);
    auto add_all = [&](auto length) {
      int64_t i = 0;
      for (; i + 4 <= count_; i += 4) add_weighted<4>(length, scores + i * BLOCK, out + i * padded_);
      for (; i < count_; ++i) add_weighted<1>(length, scores + i * BLOCK, out + i * padded_);
    };
    if (length == BLOCK)
      add_all(std::integral_constant<int64_t, BLOCK>{});
    else
      add_all(length);
  }

 private:
  // Converts a block of the cache to floats, with zeros before `first` and behind an odd number of positions. Meanwhile it
  // prefetches the next block: with pages in no order, a row at depth 4,000 takes 1.6 ms, and 2.3 without this (16 heads of
  // 256, two key heads, one core of an AMD EPYC).
  void widen(const Array& cache, const Places<BLOCK>& at, int64_t first, int64_t length) {
    int64_t bytes = size_ * (cache.narrow ? 2 : 4);
    std::memset(block_, 0, first * padded_ * sizeof(float));
    for (int64_t c = first; c < length; ++c) {
      int64_t inside = c % TOGETHER * size_;
      Array from = cache.from(at.here[c / TOGETHER] + inside);
      const char* next = (const char*)cache.from(at.next[c / TOGETHER] + inside).data;
      for (int64_t i = 0; i < bytes; i += 64) _mm_prefetch(next + i, _MM_HINT_T1);
      for (int64_t i = 0; i < padded_; i += LANES) store(block_ + c * padded_ + i, from.load(i, size_ - i));
    }
    if (length % 2) std::memset(block_ + length * padded_, 0, padded_ * sizeof(float));
  }

  // Computes the scores of ROWS queries from `row` on with COLUMNS keys from `column` on.
  template <int ROWS, int COLUMNS>
  void dots(int64_t row, int64_t column, float* scores) const {
    const float *queries = queries_ + row * padded_, *keys = block_ + column * padded_;
    Floats acc[ROWS][COLUMNS];
    for (int r = 0; r < ROWS; ++r)
      for (int c = 0; c < COLUMNS; ++c) acc[r][c] = zeros();
    for (int64_t i = 0; i < padded_; i += LANES) {
      Floats key[COLUMNS];
      for (int c = 0; c < COLUMNS; ++c) key[c] = load(keys + c * padded_ + i);
      for (int r = 0; r < ROWS; ++r) {
        Floats query = load(queries + r * padded_ + i);
        for (int c = 0; c < COLUMNS; ++c) acc[r][c] = fma(query, key[c], acc[r][c]);
      }
    }
    for (int r = 0; r < ROWS; ++r)
      for (int c = 0; c < COLUMNS; ++c) scores[(row + r) * BLOCK + column + c] = sum(acc[r][c]);
  }

  // out [ROWS, padded] += the block's first `length` positions, weighted by weights [ROWS, BLOCK].
  template <int ROWS, typename Length>
  void add_weighted(Length length, const float* weights, float* out) const {
    for (int64_t i = 0; i < padded_; i += LANES) {
      Floats acc[ROWS];
      for (int r = 0; r < ROWS; ++r) acc[r] = load(out + r * padded_ + i);
      for (int64_t c = 0; c < length; ++c) {
        Floats value = load(block_ + c * padded_ + i);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) acc[r] = fma(value, broadcast(weights[r * BLOCK + c]), acc[r]);
      }
      for (int r = 0; r < ROWS; ++r) store(out + r * padded_ + i, acc[r]);
    }
  }

  int64_t count_, size_, padded_;
  Scratch<float> queries_, block_;
};

#ifdef OSTINATO_AMX
// The form for caches in bfloat16 whose head size is a multiple of TILE_COLUMNS. Queries and weights are rounded to bfloat16
// as well; sums are in float32.
class TileBlock {
 public:
  static constexpr int64_t BLOCK = 64, MAX_QUERIES = 128;

  // Whether a TileBlock can be used, and is faster.
  static bool fits(const Array& cache, int64_t size, int64_t queries) {
    return cache.narrow && size % TILE_COLUMNS == 0 && queries >= TILE_ROWS && may_use_tiles();
  }

  TileBlock(int64_t count, int64_t size, int64_t)
      : size_(size), tiles_((count + TILE_ROWS - 1) / TILE_ROWS), queries_(room() * size), weights_(room() * BLOCK),
        panel_(BLOCK * std::max(size, LANES)) {
    std::memset(queries_, 0, room() * size * sizeof(bfloat16));
  }

  int64_t room() const { return tiles_ * TILE_ROWS; }

  void put(int64_t i, const float* query) {
    for (int64_t at = 0; at < size_; at += LANES) store(queries_ + i * size_ + at, load(query + at));
  }

  void score(const Array& keys, const Places<BLOCK>& at, int64_t first, int64_t length, float* scores) {
    for (int64_t c = 0; c < BLOCK; c += LANES) {
      turn(keys, at, c, first, length);
      multiply_all_tiles(tiles_, queries_, size_, panel_, size_, scores + c, BLOCK, false);
    }
  }

  void add(const Array& values, const Places<BLOCK>& places, int64_t first, int64_t length, const float* scores, float* out) {
    for (int64_t i = 0; i < room() * BLOCK; i += 2 * LANES)
      _mm512_storeu_si512(weights_ + i, (__m512i)_mm512_cvtne2ps_pbh(load(scores + i + LANES).v, load(scores + i).v));
    for (int64_t at = 0; at < size_; at += LANES) {
      pair(values, places, at, first, length);
      multiply_all_tiles(tiles_, weights_, BLOCK, panel_, BLOCK, out + at, size_, true);
    }
  }

 private:
  const bfloat16* row(const Array& cache, const Places<BLOCK>& places, int64_t index) const {
    return (const bfloat16*)cache.data + places.here[index / TOGETHER] + index % TOGETHER * size_;
  }

  // Builds the panel whose columns are the LANES keys from `column` on, with zeros before `first` and behind `length`.
  void turn(const Array& keys, const Places<BLOCK>& places, int64_t column, int64_t first, int64_t length) {
    static_assert(LANES == TOGETHER);
    const bfloat16* from = row(keys, places, column);
    for (int64_t at = 0; at < size_; at += TILE_COLUMNS) {
      __m512i words[LANES];
      for (int64_t lane = 0; lane < LANES; ++lane) {
        bool seen = column + lane >= first && column + lane < length;
        words[lane] = seen ? _mm512_loadu_si512(from + lane * size_ + at) : _mm512_setzero_si512();
      }
      transpose(words);
      for (int64_t k = 0; k < LANES; ++k) _mm512_storeu_si512(panel_ + at * LANES + k * 2 * LANES, words[k]);
    }
  }

  // Builds the panel whose columns are the LANES elements of the values from `at` on, with zeros before `first` and behind
  // `length`.
  void pair(const Array& values, const Places<BLOCK>& places, int64_t at, int64_t first, int64_t length) {
    auto part = [&](int64_t index) {
      bool seen = index >= first && index < length;
      return seen ? _mm256_loadu_si256((const __m256i*)(row(values, places, index) + at)) : _mm256_setzero_si256();
    };
    for (int64_t index = 0; index < BLOCK; index += 2) {
      __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(part(index)), part(index + 1), 1);
      _mm512_storeu_si512(panel_ + index * LANES, in_pairs(both));
    }
  }

  int64_t size_, tiles_;
  TileConfiguration configuration_;
  Scratch<bfloat16> queries_, weights_, panel_;
};
#endif

}  // namespace ostinato
