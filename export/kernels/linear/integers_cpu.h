// Products of panels of integers (formats/) with inputs in bytes. Only product_cpu.cpp includes this file.
#pragma once

#include <cstring>

#include "../tensors_cpu.h"
#include "../tiles_cpu.h"
#include "../vectors_cpu.h"
#include "product_cpu.h"

namespace ostinato {

// Distance in bytes from what is multiplied to what is prefetched. The hardware's own prefetching ends at each page of 4 KB.
constexpr int64_t AHEAD = 6144;

inline void fetch(const void* p, int64_t ahead = AHEAD) { _mm_prefetch((const char*)p + ahead, _MM_HINT_T0); }

// A panel of integers, and the one that its thread reads afterwards.
struct Panel {
  const Weight& weight;
  const char *values, *end, *next;
  const uint16_t *scale, *minimum, *next_scale, *next_minimum;

  Panel(const Weight& weight, int64_t block, Block then)
      : weight(weight),
        values(weight.values_of(block)),
        end(weight.values_of(block + 1)),
        next(then.weight->values_of(then.index)),
        scale(weight.scale_of(block)),
        minimum(weight.minimum_of(block)),
        next_scale(then.weight->scale_of(then.index)),
        next_minimum(then.weight->minimum_of(then.index)) {}

  // Distance in bytes from `at`, which is multiplied now, to what is prefetched: at the end of this panel, the next one.
  int64_t ahead(const char* at) const { return at + AHEAD < end ? AHEAD : AHEAD + (next - end); }
  // Fetches what belongs to a group of the next panel. The processor ignores addresses where nothing is.
  void fetch_next(int64_t group) const {
    fetch(next_scale + group * LANES, 0);
    if (minimum) fetch(next_minimum + group * LANES, 0);
  }
  Floats scale_of(int64_t group) const { return weight.load_scale(scale + group * LANES); }
  Floats minimum_of(int64_t group) const { return weight.load_scale(minimum + group * LANES); }
};

// Rows of inputs in bytes, `stride` bytes apart. A row's groups stand behind its bytes.
struct ByteRows {
  const int8_t* bytes;
  int64_t stride, columns;

  const ByteGroup& group_of(int64_t row, int64_t group) const {
    return *(const ByteGroup*)(bytes + columns + group * sizeof(ByteGroup) + row * stride);
  }
};

// A place in each of M rows. Only every fourth address is in a register; x86 adds up to three strides to it. With an address
// for each row, which g++ 12 makes of plain code, most of them are in memory: 3 to 9 % slower (AVX-512, 512 rows).
template <int M>
struct RowAddresses {
  const int8_t* at[(M + 3) / 4];
  int64_t stride, thrice;

  RowAddresses(const int8_t* first, int64_t stride) : stride(stride), thrice(3 * stride) {
    for (int i = 0; i < (M + 3) / 4; ++i) at[i] = first + 4 * i * stride;
    asm("" : "+r"(thrice));
  }
  const int8_t* operator[](int m) const { return at[m / 4] + (m % 4 == 3 ? thrice : m % 4 * stride); }
  // The asm hides from g++ how addresses depend on the first one.
  void operator+=(int64_t bytes) {
#pragma GCC unroll 4
    for (const int8_t*& one : at) {
      one += bytes;
      asm("" : "+r"(one));
    }
  }
};

// Multiplies M rows of inputs by the rows of a panel: out [M, LANES].
template <Format FORMAT, int M>
void multiply_integers(const Panel& panel, const ByteRows& x, float* out) {
  constexpr bool BYTES = FORMAT == Format::INT8;
  constexpr int PARTS = LANES / REGISTER_LANES;
  static_assert(BYTE_OFFSET == 0 || BYTE_OFFSET == 16 * NIBBLE_OFFSET);
  const int64_t group_size = panel.weight.group, groups = panel.weight.groups();
  const char* values = panel.values;
  RowAddresses<M> bytes(x.bytes, x.stride), of_group(x.bytes + x.columns, x.stride);
  FloatRegister sums[PARTS][M];
  for (int part = 0; part < PARTS; ++part)
    for (int m = 0; m < M; ++m) sums[part][m] = zero_floats();
  for (int64_t group = 0; group < groups; ++group) {
    panel.fetch_next(group);
    int64_t distance = panel.ahead(values);
    Floats scale = panel.scale_of(group), minimum;
    if constexpr (FORMAT == Format::INT4_MIN) minimum = panel.minimum_of(group);
    const char* from;
    // One register of lanes after the other, so that only the sums of M rows fill the registers.
#pragma GCC unroll 2
    for (int part = 0; part < PARTS; ++part) {
      from = values + part * REGISTER_LANES * 4;
      Register words[M];
      for (int m = 0; m < M; ++m) words[m] = all_words(0);
      for (int64_t k = 0; k < group_size; k += 32) {
        if constexpr (BYTES) {
#pragma GCC unroll 8
          for (int i = 0; i < 32; i += 4, from += 64) {
            if (part == 0) fetch(from, distance);
            Register weights = unsigned_bytes(load_register(from));
#pragma GCC unroll 16
            for (int m = 0; m < M; ++m) words[m] = add_byte_dot(words[m], weights, bytes[m] + i);
          }
        } else {
#ifdef OSTINATO_NARROW_SUMS
          Register pairs[M];
          for (int m = 0; m < M; ++m) pairs[m] = all_words(0);
#else
          Register(&pairs)[M] = words;
#endif
#pragma GCC unroll 4
          for (int i = 0; i < 32; i += 8, from += 64) {
            if (part == 0) fetch(from, distance);
            Register both = load_register(from), nibbles = low_nibbles(both);
#pragma GCC unroll 16
            for (int m = 0; m < M; ++m) pairs[m] = add_dot(pairs[m], nibbles, bytes[m] + i);
            nibbles = high_nibbles(both);
#pragma GCC unroll 16
            for (int m = 0; m < M; ++m) pairs[m] = add_dot(pairs[m], nibbles, bytes[m] + i + 4);
          }
#ifdef OSTINATO_NARROW_SUMS
#pragma GCC unroll 16
          for (int m = 0; m < M; ++m) words[m] = add_words(words[m], wide(pairs[m]));
#endif
        }
        bytes += 32;
      }
      if (part + 1 < PARTS) bytes += -group_size;
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) {
        FloatRegister& sum = sums[part][m];
        const ByteGroup& of_row = *(const ByteGroup*)of_group[m];
        if constexpr (FORMAT == Format::INT4) words[m] = add_words(words[m], all_words(of_row.offset));
        if constexpr (BYTES && BYTE_OFFSET) words[m] = add_words(words[m], times_power(all_words(of_row.offset), 4));
        sum = add_scaled(sum, words[m], part_of(scale, part), of_row.scale);
        if constexpr (FORMAT == Format::INT4_MIN) sum = add_scaled(sum, part_of(minimum, part), of_row.moment);
      }
    }
    values = from - (PARTS - 1) * REGISTER_LANES * 4;
    of_group += sizeof(ByteGroup);
  }
  for (int m = 0; m < M; ++m)
    for (int part = 0; part < PARTS; ++part) store_floats(out + m * LANES + part * REGISTER_LANES, sums[part][m]);
}

// The product of one row of inputs with row `n` of a weight, which stands outside of panels.
inline float multiply_integers_outside(const Weight& weight, int64_t n, const ByteRows& x) {
  const char* values = weight.values + n * weight.row_bytes();
  const bool bytes = weight.format == Format::INT8;
  const int offset = weight.format == Format::INT4 ? NIBBLE_OFFSET : 0;
  float total = 0;
  for (int64_t group = 0; group < weight.groups(); ++group) {
    int32_t dot = 0;
    for (int64_t k = group * weight.group; k < (group + 1) * weight.group; ++k) {
      uint8_t both = uint8_t(bytes ? 0 : values[k / 64 * 32 + k % 32]);
      dot += (bytes ? int8_t(values[k]) : (k % 64 < 32 ? both & 15 : both >> 4) - offset) * x.bytes[k];
    }
    int64_t at = n * weight.groups() + group;
    total += float(dot) * weight.one_scale(weight.scale[at]) * x.group_of(0, group).scale;
    if (weight.minimum) total += weight.one_scale(weight.minimum[at]) * x.group_of(0, group).moment;
  }
  return total;
}

#ifdef OSTINATO_AMX
// Converts a group of a panel of integers, TILE_COLUMNS columns, to bfloat16.
template <Format FORMAT>
void widen(const Panel& panel, int64_t group, bfloat16* out) {
  constexpr bool BYTES = FORMAT == Format::INT8;
  constexpr int64_t SIZE = TILE_COLUMNS * LANES / (BYTES ? 1 : 2);
  const char* from = panel.values + group * SIZE;
  const int64_t distance = panel.ahead(from);
  panel.fetch_next(group);
  Floats scale = panel.scale_of(group), least = zeros();
  if constexpr (FORMAT == Format::INT4_MIN) least = panel.minimum_of(group);
  __m512 numbers = _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  if constexpr (FORMAT == Format::INT4) numbers = _mm512_sub_ps(numbers, _mm512_set1_ps(NIBBLE_OFFSET));
  auto number = [&](__m512i words, int from_bit) {
    if constexpr (BYTES) {
      words = _mm512_srai_epi32(_mm512_slli_epi32(words, 24 - from_bit), 24);
      return Floats{_mm512_cvtepi32_ps(words)} * scale;
    }
    // No mask is needed after the shift: the permutation uses only the low four bits of a lane.
    return fma(Floats{_mm512_permutexvar_ps(_mm512_srli_epi32(words, from_bit), numbers)}, scale, least);
  };
  auto put = [&](__m512i words, int even, int odd) {
    _mm512_storeu_si512(out, in_pairs((__m512i)_mm512_cvtne2ps_pbh(number(words, odd).v, number(words, even).v)));
    out += 2 * LANES;
  };
#pragma GCC unroll 8
  for (int64_t i = 0; i < SIZE; i += 64) {
    fetch(from + i, distance);
    __m512i words = _mm512_loadu_si512(from + i);
    put(words, 0, 8);
    put(words, 16, 24);
    if constexpr (BYTES) continue;
    put(words, 4, 12);
    put(words, 20, 28);
  }
}

// Multiplies rows of bfloat16 by PANELS panels of integers, one or two, which become bfloat16 a group ahead of their tiles.
template <Format FORMAT, int PANELS>
void multiply_wide_tiles(const Panel* panels, const bfloat16* x, int64_t stride, int64_t tiles, float* const (&out)[2]) {
  const int64_t columns = panels->weight.columns, groups = panels->weight.groups();
  Scratch<bfloat16> memory(PANELS * columns * LANES);
  bfloat16* const wide[2] = {memory, memory + (PANELS - 1) * columns * LANES};
  auto widen_group = [&](int64_t group) {
    for (int panel = 0; panel < PANELS; ++panel)
      widen<FORMAT>(panels[panel], group, wide[panel] + group * TILE_COLUMNS * LANES);
  };
  auto before = [&](int64_t k) {
    if (int64_t next = k / TILE_COLUMNS + 1; next < groups) widen_group(next);
  };
  widen_group(0);
  if constexpr (PANELS == 2)
    multiply_all_tiles_by_two(tiles, x, stride, {wide[0], wide[1]}, columns, out, before);
  else
    multiply_all_tiles(tiles, x, stride, wide[0], columns, out[0], LANES, false, before);
}

// Multiplies COUNT tiles of rows by a panel of int4 or int8, in groups that fill a tile's row. The tiles' sums are integers,
// which become floats after each group.
//
// A tile is loaded from memory. The load waits until earlier stores to this memory have left the processor's queue of
// stores. So the nibbles of a weight are unpacked one part before they are loaded (two parts before made no difference), and
// a group's sums become floats while the next group is multiplied. Bytes are loaded as they stand in the panel.
template <Format FORMAT, int COUNT>
void multiply_byte_tiles(const Panel& panel, const ByteRows& x, float* out) {
  constexpr bool BYTES = FORMAT == Format::INT8;
  constexpr int64_t PART = TILE_BYTES * LANES, PART_BYTES = BYTES ? PART : PART / 2;
  const int64_t groups = panel.weight.groups(), tile_bytes = TILE_ROWS * x.stride;
  const int64_t parts = panel.weight.columns / TILE_BYTES, together = panel.weight.group / TILE_BYTES;
  const int8_t* in = x.bytes;
  alignas(64) uint8_t bytes[2][BYTES ? 1 : PART];
  alignas(64) int32_t words[2][COUNT][TILE_ROWS * LANES];
  Floats sums[COUNT][TILE_ROWS];
  for (int tile = 0; tile < COUNT; ++tile)
    for (int m = 0; m < TILE_ROWS; ++m) sums[tile][m] = zeros();
  // A number n, stored as n + 8 in four bits, becomes 16 n in eight bits.
  auto signed_bytes = [](__m512i nibbles) {
    return _mm512_ternarylogic_epi32(nibbles, _mm512_set1_epi8(-16), _mm512_set1_epi8(-128), 0x6A);
  };
  // Makes a part of the panel ready for a tile, and returns where it is.
  auto prepared = [&](int64_t part) -> const void* {
    const char* from = panel.values + part * PART_BYTES;
    uint8_t* to = bytes[part % 2];
    int64_t distance = panel.ahead(from);
#pragma GCC unroll 16
    for (int64_t i = 0; i < PART_BYTES; i += 64) {
      fetch(from + i, distance);
      if constexpr (BYTES) continue;
      __m512i both = _mm512_loadu_si512(from + i);
      _mm512_store_si512(to + 2 * i, signed_bytes(_mm512_slli_epi16(both, 4)));
      _mm512_store_si512(to + 2 * i + 64, signed_bytes(both));
    }
    return BYTES ? (const void*)from : to;
  };
  auto add = [&](int64_t group) {
    Floats factor = panel.scale_of(group) * broadcast(BYTES ? 1 : 1 / 16.f);
#pragma GCC unroll 4
    for (int tile = 0; tile < COUNT; ++tile)
#pragma GCC unroll 16
      for (int m = 0; m < TILE_ROWS; ++m) {
        Floats whole = {_mm512_cvtepi32_ps(_mm512_load_si512(words[group % 2][tile] + m * LANES))};
        sums[tile][m] = fma(whole, factor * broadcast(x.group_of(tile * TILE_ROWS + m, group).scale), sums[tile][m]);
      }
  };
  const void* weights = prepared(0);
  for (int64_t group = 0, part = 0; group < groups; ++group) {
    panel.fetch_next(group);
    _tile_zero(0);
    if constexpr (COUNT > 1) _tile_zero(1);
    if constexpr (COUNT > 2) _tile_zero(2);
    if constexpr (COUNT > 3) _tile_zero(3);
    for (int64_t end = part + together; part < end; ++part, in += TILE_BYTES) {
      asm volatile("" ::: "memory");
      _tile_loadd(4, weights, TILE_BYTES);
      _tile_loadd(5, in, x.stride);
      _tile_dpbssd(0, 5, 4);
      if constexpr (COUNT > 1) {
        _tile_loadd(6, in + tile_bytes, x.stride);
        _tile_dpbssd(1, 6, 4);
      }
      if constexpr (COUNT > 2) {
        _tile_loadd(7, in + 2 * tile_bytes, x.stride);
        _tile_dpbssd(2, 7, 4);
      }
      if constexpr (COUNT > 3) {
        _tile_loadd(5, in + 3 * tile_bytes, x.stride);
        _tile_dpbssd(3, 5, 4);
      }
      if (part + 1 < parts) weights = prepared(part + 1);
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

// `multiply_byte_tiles` for up to four tiles of rows.
template <Format FORMAT>
void multiply_byte_tiles(const Panel& panel, const ByteRows& x, int64_t rows, float* out) {
  if (rows > 3 * TILE_ROWS)
    multiply_byte_tiles<FORMAT, 4>(panel, x, out);
  else if (rows > 2 * TILE_ROWS)
    multiply_byte_tiles<FORMAT, 3>(panel, x, out);
  else if (rows > TILE_ROWS)
    multiply_byte_tiles<FORMAT, 2>(panel, x, out);
  else
    multiply_byte_tiles<FORMAT, 1>(panel, x, out);
}
#endif

}  // namespace ostinato
