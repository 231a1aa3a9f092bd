// Products of matrices in tiles (AMX). In bfloat16, 16 rows of 32 elements times 32 rows of 16, which stand as a panel; in
// bytes, 16 rows of 64 times 64 rows of 16.
#pragma once

#include <type_traits>

#include "vectors_cpu.h"

#ifdef OSTINATO_AMX
#include <sys/syscall.h>
#include <unistd.h>

namespace ostinato {

// Rows of a tile; bfloat16 elements of a row; bytes of a row.
constexpr int64_t TILE_ROWS = 16, TILE_COLUMNS = 32, TILE_BYTES = 64;

// Linux lets a process use the tile registers only after a request: ARCH_REQ_XCOMP_PERM for XTILEDATA.
inline bool may_use_tiles() {
  static const bool may = syscall(SYS_arch_prctl, 0x1023, 18) == 0;
  return may;
}

// Gives all eight tiles of a thread 16 rows of 64 bytes while an object lives. Making the first object takes a sixth of a
// microsecond; making another one while it lives takes nothing.
struct TileConfiguration {
  TileConfiguration() {
    if (alive()++) return;
    alignas(64) uint8_t bytes[64] = {};
    bytes[0] = 1;
    for (int tile = 0; tile < 8; ++tile) {
      bytes[16 + 2 * tile] = 64;
      bytes[48 + tile] = TILE_ROWS;
    }
    // g++ 12 does not know that tile instructions read memory.
    asm volatile("" ::: "memory");
    _tile_loadconfig(bytes);
  }
  ~TileConfiguration() {
    if (--alive() == 0) _tile_release();
  }

 private:
  static int& alive() {
    static thread_local int count = 0;
    return count;
  }
};

// Multiplies COUNT tiles of rows of x, with `columns` elements in a row, by one panel [columns / 2, LANES, 2], which has
// pairs of neighbours side by side. The product goes to out [COUNT * TILE_ROWS, LANES]: added to it if `add`, else in its
// place. Strides are in elements.
template <int COUNT, typename Before>
void multiply_tiles(const bfloat16* x, int64_t stride, const bfloat16* panel, int64_t columns, float* out, int64_t out_stride,
                    bool add, const Before& before) {
  int64_t bytes = stride * sizeof(bfloat16), out_bytes = out_stride * sizeof(float), next = TILE_ROWS * out_stride;
  const bfloat16 *second = x + TILE_ROWS * stride, *third = second + TILE_ROWS * stride, *fourth = third + TILE_ROWS * stride;
  asm volatile("" ::: "memory");
  if (add) {
    _tile_loadd(0, out, out_bytes);
    if constexpr (COUNT > 1) _tile_loadd(1, out + next, out_bytes);
    if constexpr (COUNT > 2) _tile_loadd(2, out + 2 * next, out_bytes);
    if constexpr (COUNT > 3) _tile_loadd(3, out + 3 * next, out_bytes);
  } else {
    _tile_zero(0);
    if constexpr (COUNT > 1) _tile_zero(1);
    if constexpr (COUNT > 2) _tile_zero(2);
    if constexpr (COUNT > 3) _tile_zero(3);
  }
  for (int64_t k = 0; k < columns; k += TILE_COLUMNS, panel += TILE_COLUMNS * LANES) {
    before(k);
    asm volatile("" ::: "memory");
    _tile_loadd(4, panel, 64);
    _tile_loadd(5, x + k, bytes);
    _tile_dpbf16ps(0, 5, 4);
    if constexpr (COUNT > 1) {
      _tile_loadd(6, second + k, bytes);
      _tile_dpbf16ps(1, 6, 4);
    }
    if constexpr (COUNT > 2) {
      _tile_loadd(7, third + k, bytes);
      _tile_dpbf16ps(2, 7, 4);
    }
    if constexpr (COUNT > 3) {
      _tile_loadd(5, fourth + k, bytes);
      _tile_dpbf16ps(3, 5, 4);
    }
  }
  _tile_stored(0, out, out_bytes);
  if constexpr (COUNT > 1) _tile_stored(1, out + next, out_bytes);
  if constexpr (COUNT > 2) _tile_stored(2, out + 2 * next, out_bytes);
  if constexpr (COUNT > 3) _tile_stored(3, out + 3 * next, out_bytes);
}

// `multiply_tiles` for any number of tiles, four at a time. Calls before(k) for the first of them, before it multiplies columns
// k to k + TILE_COLUMNS.
template <typename Before>
void multiply_all_tiles(int64_t tiles, const bfloat16* x, int64_t stride, const bfloat16* panel, int64_t columns, float* out,
                        int64_t out_stride, bool add, const Before& before) {
  auto multiply = [&](int64_t count, const auto& before) {
    auto some = [&](auto multiply) { multiply(x, stride, panel, columns, out, out_stride, add, before); };
    using Other = std::decay_t<decltype(before)>;
    if (count >= 4)
      some(multiply_tiles<4, Other>);
    else if (count == 3)
      some(multiply_tiles<3, Other>);
    else if (count == 2)
      some(multiply_tiles<2, Other>);
    else
      some(multiply_tiles<1, Other>);
  };
  multiply(tiles, before);
  while ((tiles -= 4) > 0) {
    x += 4 * TILE_ROWS * stride;
    out += 4 * TILE_ROWS * out_stride;
    multiply(tiles, [](int64_t) {});
  }
}

inline void multiply_all_tiles(int64_t tiles, const bfloat16* x, int64_t stride, const bfloat16* panel, int64_t columns,
                               float* out, int64_t out_stride, bool add) {
  multiply_all_tiles(tiles, x, stride, panel, columns, out, out_stride, add, [](int64_t) {});
}

// Multiplies COUNT tiles of rows of x, at most two, by two panels: `multiply_tiles` for panels[0] to out[0], and for panels[1]
// to out[1]. A tile of x, which seldom is in the first-level cache, is loaded once for both.
template <int COUNT, typename Before>
void multiply_tiles_by_two(const bfloat16* x, int64_t stride, const bfloat16* const (&panels)[2], int64_t columns,
                           float* const (&out)[2], const Before& before) {
  int64_t bytes = stride * sizeof(bfloat16);
  const bfloat16 *first = panels[0], *second = panels[1];
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (COUNT > 1) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t k = 0; k < columns; k += TILE_COLUMNS, first += TILE_COLUMNS * LANES, second += TILE_COLUMNS * LANES) {
    before(k);
    asm volatile("" ::: "memory");
    _tile_loadd(4, first, 64);
    _tile_loadd(5, second, 64);
    _tile_loadd(6, x + k, bytes);
    _tile_dpbf16ps(0, 6, 4);
    _tile_dpbf16ps(1, 6, 5);
    if constexpr (COUNT > 1) {
      _tile_loadd(7, x + TILE_ROWS * stride + k, bytes);
      _tile_dpbf16ps(2, 7, 4);
      _tile_dpbf16ps(3, 7, 5);
    }
  }
  constexpr int64_t OUT_BYTES = LANES * sizeof(float), NEXT = TILE_ROWS * LANES;
  _tile_stored(0, out[0], OUT_BYTES);
  _tile_stored(1, out[1], OUT_BYTES);
  if constexpr (COUNT > 1) {
    _tile_stored(2, out[0] + NEXT, OUT_BYTES);
    _tile_stored(3, out[1] + NEXT, OUT_BYTES);
  }
}

// `multiply_tiles_by_two` for any number of tiles, two at a time. `before`: see `multiply_all_tiles`.
template <typename Before>
void multiply_all_tiles_by_two(int64_t tiles, const bfloat16* x, int64_t stride, const bfloat16* const (&panels)[2],
                               int64_t columns, float* const (&out)[2], const Before& before) {
  for (int64_t tile = 0; tile < tiles; tile += 2) {
    const bfloat16* rows = x + tile * TILE_ROWS * stride;
    float* const to[2] = {out[0] + tile * TILE_ROWS * LANES, out[1] + tile * TILE_ROWS * LANES};
    auto multiply = [&](const auto& before) {
      if (tile + 1 < tiles)
        multiply_tiles_by_two<2>(rows, stride, panels, columns, to, before);
      else
        multiply_tiles_by_two<1>(rows, stride, panels, columns, to, before);
    };
    tile ? multiply([](int64_t) {}) : multiply(before);
  }
}

// Interleaves 32 numbers of 16 bits: the first 16 with the other 16.
inline __m512i in_pairs(__m512i halves) {
  alignas(64) static constexpr uint16_t ORDER[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                     8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return _mm512_permutexvar_epi16(_mm512_load_si512(ORDER), halves);
}

// Transposes the matrix of 16 registers with 16 words each.
inline void transpose(__m512i (&x)[16]) {
  __m512i y[16];
  for (int i = 0; i < 16; i += 2) {
    y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
    y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; ++j) {
      x[i + 2 * j] = _mm512_unpacklo_epi64(y[i + j], y[i + j + 2]);
      x[i + 2 * j + 1] = _mm512_unpackhi_epi64(y[i + j], y[i + j + 2]);
    }
  for (int i = 0; i < 16; i += 8)
    for (int j = 0; j < 4; ++j) {
      y[i + j] = _mm512_shuffle_i32x4(x[i + j], x[i + j + 4], 0x88);
      y[i + j + 4] = _mm512_shuffle_i32x4(x[i + j], x[i + j + 4], 0xdd);
    }
  for (int j = 0; j < 8; ++j) {
    x[j] = _mm512_shuffle_i32x4(y[j], y[j + 8], 0x88);
    x[j + 8] = _mm512_shuffle_i32x4(y[j], y[j + 8], 0xdd);
  }
}

}  // namespace ostinato
#endif
