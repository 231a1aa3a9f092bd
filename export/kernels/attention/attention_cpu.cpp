// The operator of attention/attention_cpu.py: gated attention over a cache.
//
// A task has the queries of a few tokens for the heads that share keys, and goes through a stretch of the cache by blocks, with
// the softmax's sums kept on the way (FlashAttention, arXiv:2205.14135). Where there are fewer such tasks than threads want,
// the cache is cut into several stretches, whose parts are put together at the end.
#include <limits>
#include <stdexcept>

#include "../linear/rows_cpu.h"
#include "../threads_cpu.h"
#include "block_cpu.h"

namespace ostinato {
namespace {

constexpr int64_t LEAST_STRETCH = 128;

// The largest score so far, the sum of exponentials relative to it, and the values weighted by them.
struct Partial {
  float most, total;
};

// A head of `size` elements, normed, its first `rotated` elements turned by their angles.
void place(const Array& x, int64_t size, const float* norm, double eps, const float* cos, const float* sin, int64_t rotated,
           float* to) {
  to_floats(x, size, to);
  apply_norm(to, size, norm, eps);
  for (int64_t i = 0; i < rotated / 2; ++i) {
    float first = to[i], second = to[i + rotated / 2];
    to[i] = first * cos[i] - second * sin[i];
    to[i + rotated / 2] = second * cos[i + rotated / 2] + first * sin[i + rotated / 2];
  }
}

struct Attention {
  int64_t rows, heads, kv_heads, size, slots, padded, sharing, most_queries, stretches, stretch;
  Array keys, values;
  const int64_t* positions;
  const float* queries;  // [rows, heads, padded], times the scale of scores
  float* parts;          // [rows, heads, stretches, padded]
  Partial* sums;         // [rows, heads, stretches]

  // Heads that share keys, of which a task has all or `most_queries`, and the tokens that it has.
  int64_t heads_together() const { return std::min(sharing, most_queries); }
  int64_t tokens_together() const { return most_queries / heads_together(); }
  int64_t head_pieces() const { return (sharing + heads_together() - 1) / heads_together(); }
  int64_t token_pieces() const { return (rows + tokens_together() - 1) / tokens_together(); }
  int64_t tasks() const { return kv_heads * head_pieces() * token_pieces() * stretches; }

  // Task (kv_head, heads, tokens, stretch), by a FloatBlock or a TileBlock.
  template <typename Block>
  void run(int64_t task) const {
    constexpr int64_t BLOCK = Block::BLOCK;
    int64_t part = task % stretches, piece = task / stretches % token_pieces(), group = task / stretches / token_pieces();
    int64_t kv_head = group / head_pieces(), first_head = group % head_pieces() * heads_together();
    int64_t mine = std::min(heads_together(), sharing - first_head), first = piece * tokens_together();
    int64_t tokens = std::min(tokens_together(), rows - first), count = tokens * mine;
    auto row_head = [&](int64_t i) { return (first + i / mine) * heads + kv_head * sharing + first_head + i % mine; };
    Block block(count, size, padded);
    Scratch<float> out(block.room() * padded), scores(block.room() * BLOCK);
    Partial sum[Block::MOST_QUERIES];
    for (int64_t i = 0; i < count; ++i) {
      block.put(i, queries + row_head(i) * padded);
      sum[i] = {-std::numeric_limits<float>::infinity(), 0};
    }
    std::memset(out, 0, block.room() * padded * sizeof(float));
    int64_t last = positions[first + tokens - 1];
    int64_t begin = part * stretch, end = std::min(last + 1, stretches == 1 ? last + 1 : begin + stretch);
    for (int64_t at = begin; at < end; at += BLOCK) {
      int64_t length = std::min(BLOCK, end - at), from = (kv_head * slots + at) * size;
      block.score(keys.from(from), length, scores);
      for (int64_t i = 0; i < count; ++i)
        weigh<BLOCK>(scores + i * BLOCK, std::min(length, positions[first + i / mine] + 1 - at), sum[i], out + i * padded);
      block.add(values.from(from), length, scores, out);
    }
    for (int64_t i = 0; i < count; ++i) {
      int64_t to = row_head(i) * stretches + part;
      sums[to] = sum[i];
      std::memcpy(parts + to * padded, out + i * padded, padded * sizeof(float));
    }
  }

  // Scores -> weights of a block, of which `seen` count; what was summed before is made relative to the new largest score.
  template <int64_t BLOCK>
  void weigh(float* scores, int64_t seen, Partial& sum, float* out) const {
    if (seen <= 0) {
      std::memset(scores, 0, BLOCK * sizeof(float));
      return;
    }
    for (int64_t c = seen; c < BLOCK; ++c) scores[c] = -std::numeric_limits<float>::infinity();
    // NaN does not count here, and makes NaN below.
    Floats largest_so_far = broadcast(sum.most);
    for (int64_t c = 0; c < BLOCK; c += LANES) largest_so_far = maximum(load(scores + c), largest_so_far);
    float most = largest(largest_so_far);
    if (most > sum.most) {
      float factor = sum.total == 0 ? 0 : std::exp(sum.most - most);
      sum.total *= factor;
      for (int64_t i = 0; i < padded; i += LANES) store(out + i, load(out + i) * broadcast(factor));
      sum.most = most;
    }
    Floats total = zeros();
    for (int64_t c = 0; c < BLOCK; c += LANES) {
      Floats weight = exponential(load(scores + c) - broadcast(most));
      store(scores + c, weight);
    }
    for (int64_t c = seen; c < BLOCK; ++c) scores[c] = 0;
    for (int64_t c = 0; c < BLOCK; c += LANES) total = total + load(scores + c);
    sum.total += ostinato::sum(total);
  }

  // The parts of one head of a token, put together in the first of them, and the sum that they are to be divided by.
  float merge(int64_t row_head) const {
    const Partial* of = sums + row_head * stretches;
    float* out = parts + row_head * stretches * padded;
    float most = of[0].most, total = 0;
    for (int64_t part = 1; part < stretches; ++part) most = of[part].most > most ? of[part].most : most;
    for (int64_t part = 0; part < stretches; ++part) {
      // A stretch behind the token's position has none.
      float factor = of[part].total == 0 ? 0 : std::exp(of[part].most - most);
      total += of[part].total * factor;
      for (int64_t i = 0; i < padded; i += LANES) {
        Floats value = load(out + part * padded + i) * broadcast(factor);
        store(out + i, part == 0 ? value : load(out + i) + value);
      }
    }
    return total;
  }
};

}  // namespace

extern "C" AOTITorchError aoti_torch_cpu_attend_step(AtenTensorHandle qkv_, AtenTensorHandle q_norm_, AtenTensorHandle k_norm_,
                                                     double eps, AtenTensorHandle positions_, AtenTensorHandle cos_,
                                                     AtenTensorHandle sin_, AtenTensorHandle keys_, AtenTensorHandle values_,
                                                     int64_t heads, AtenTensorHandle* result) {
  return guarded("attend_step", [&] {
    Tensor qkv(qkv_), cos(cos_), sin(sin_), keys(keys_), values(values_);
    const float *q_norm = Tensor(q_norm_).as<float>(), *k_norm = Tensor(k_norm_).as<float>();
    const int64_t* positions = Tensor(positions_).as<int64_t>();
    int64_t rows = length_of(Tensor(positions_)), width = qkv.size(1), rotated = cos.size(1);
    int64_t kv_heads = keys.size(0), slots = keys.size(1), size = keys.size(2);
    int64_t padded = (size + LANES - 1) / LANES * LANES, sharing = heads / kv_heads;
    Result made({qkv.size(0), heads * size}, keys.dtype);
    Array out = made.array(), in = qkv.array();
    out.clear(rows * heads * size, (qkv.size(0) - rows) * heads * size);
    if (positions[0] < 0 || positions[rows - 1] >= slots) throw std::out_of_range("a position is not in the cache");

    Scratch<float> queries(rows * heads * padded);
    float scale = 1 / std::sqrt(float(size));
    auto prepare = [&](int64_t row) {
      Scratch<float> key(padded);
      const float *c = cos.as<float>() + row * rotated, *s = sin.as<float>() + row * rotated;
      for (int64_t head = 0; head < heads; ++head) {
        float* query = queries + (row * heads + head) * padded;
        place(in.from(row * width + head * 2 * size), size, q_norm, eps, c, s, rotated, query);
        for (int64_t i = 0; i < size; ++i) query[i] *= scale;
        for (int64_t i = size; i < padded; ++i) query[i] = 0;
      }
      for (int64_t head = 0; head < kv_heads; ++head) {
        int64_t from = row * width + 2 * heads * size + head * size, to = (head * slots + positions[row]) * size;
        place(in.from(from), size, k_norm, eps, c, s, rotated, key);
        for (int64_t i = 0; i < size; i += LANES) {
          keys.array().store(to + i, Array{key, false}.load(i, size - i), size - i);
          values.array().store(to + i, in.load(from + kv_heads * size + i, size - i), size - i);
        }
      }
    };
    if (rows == 1)
      prepare(0);
    else
      parallel(rows, prepare);

    bool tiles = false;
    int64_t most_queries = FloatBlock::MOST_QUERIES;
#ifdef OSTINATO_AMX
    tiles = TileBlock::fits(keys.array(), size, rows * sharing);
    if (tiles) most_queries = TileBlock::MOST_QUERIES;
#endif
    Attention attention{rows, heads, kv_heads, size, slots, padded, sharing, most_queries, 1, 0, keys.array(), values.array(),
                        positions, queries, nullptr, nullptr};
    int64_t length = positions[rows - 1] + 1, tasks = attention.tasks();
    int64_t wanted = (4 * thread_count() + tasks - 1) / tasks;
    int64_t stretches = std::max<int64_t>(1, std::min(wanted, length / LEAST_STRETCH));
    Scratch<float> parts(rows * heads * stretches * padded);
    Scratch<Partial> sums(rows * heads * stretches);
    attention.stretches = stretches;
    attention.stretch = (length + stretches - 1) / stretches;
    attention.parts = parts;
    attention.sums = sums;
    parallel(attention.tasks(), [&](int64_t task) {
#ifdef OSTINATO_AMX
      if (tiles) return attention.run<TileBlock>(task);
#endif
      attention.run<FloatBlock>(task);
    });
    auto finish = [&](int64_t row_head) {
      float inverse = 1 / attention.merge(row_head);
      int64_t row = row_head / heads, head = row_head % heads;
      const float* of = parts + row_head * stretches * padded;
      for (int64_t i = 0; i < size; i += LANES) {
        Floats gate = in.load(row * width + (2 * head + 1) * size + i, size - i);
        out.store(row_head * size + i, load(of + i) * broadcast(inverse) * sigmoid(gate), size - i);
      }
    };
    if (rows == 1)
      for (int64_t head = 0; head < heads; ++head) finish(head);
    else
      parallel(rows * heads, finish);
    made.give(result);
  });
}

}  // namespace ostinato
