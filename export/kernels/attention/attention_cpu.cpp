// The operator of attention/attention_cpu.py: attention over a cache in pages.
//
// A task has the queries of a few tokens of one run, for the heads that share keys. It goes through a stretch of the
// session's positions block by block, and keeps the sums of the softmax on the way (FlashAttention, arXiv:2205.14135). If
// there are too few tasks for the threads, the positions are cut into several stretches, whose sums are merged at the end.
#include <bit>
#include <limits>

#include "../linear/rows_cpu.h"
#include "../threads_cpu.h"
#include "block_cpu.h"

namespace ostinato {
namespace {

constexpr int64_t MIN_STRETCH = 128;
// The cost of reading the key and value of a position and converting them to floats, in units of one query's work.
constexpr int64_t READING = 8;

int64_t divided_up(int64_t x, int64_t by) { return (x + by - 1) / by; }

// The largest score of a query so far, and the sum of exponentials relative to it. The sum of weighted values is kept
// elsewhere.
struct Partial {
  float peak, total;
};

// Norms a head of `size` elements (if `norm` is not null), rotates its first `rotated` elements by their angles, and writes it to `to`.
void place(const Array& x, int64_t size, const float* norm, double eps, const float* cos, const float* sin, int64_t rotated,
           float* to) {
  to_floats(x, size, to);
  if (norm) apply_norm(to, size, norm, eps);
  for (int64_t i = 0; i < rotated / 2; ++i) {
    float first = to[i], second = to[i + rotated / 2];
    to[i] = first * cos[i] - second * sin[i];
    to[i + rotated / 2] = second * cos[i + rotated / 2] + first * sin[i + rotated / 2];
  }
}

// Keys and values of all sessions, [pages, kv_heads, positions of a page, size], and the table of pages, [slots, max_pages].
// A token sees `window` positions, its own included; 0: all before it.
struct Cache {
  Array keys, values;
  const int32_t* table;
  int64_t slots, max_pages, pages, kv_heads, page_size, size, window;
  int shift;

  Cache(const Tensor& keys_, const Tensor& values_, const Tensor& table_, int64_t window_)
      : keys(keys_.array()), values(values_.array()), table(table_.as<int32_t>()), slots(table_.size(0)),
        max_pages(table_.size(1)), pages(keys_.size(0)), kv_heads(keys_.size(1)), page_size(keys_.size(2)), size(keys_.size(3)),
        window(window_), shift(std::countr_zero(uint64_t(page_size))) {
    if (page_size < TOGETHER || !std::has_single_bit(uint64_t(page_size)))
      throw std::invalid_argument("pages of " + std::to_string(page_size) + " positions: not a power of two from 16 on");
  }

  // Number of elements ahead of a position's key or value.
  int64_t at(int64_t slot, int64_t kv_head, int64_t position) const {
    int64_t page = table[slot * max_pages + (position >> shift)];
    return ((page * kv_heads + kv_head) * page_size + (position & (page_size - 1))) * size;
  }

  // The first position that a token at `position` sees.
  int64_t first_seen(int64_t position) const { return window ? std::max<int64_t>(0, position - window + 1) : 0; }

  // Throws unless a run's positions, and all earlier ones that it sees, are in the cache.
  void check(const Run& run, const int64_t* positions) const {
    int64_t first = positions[run.begin], last = positions[run.end - 1];
    for (int64_t row = run.begin; row < run.end; ++row)
      if (positions[row] != first + row - run.begin) throw std::invalid_argument("a run's positions are not consecutive");
    if (first < 0 || last >> shift >= max_pages)
      throw std::out_of_range("position " + std::to_string(first < 0 ? first : last) + " is not in the cache");
    for (int64_t index = first_seen(first) >> shift; index <= last >> shift; ++index) {
      int32_t page = table[run.slot * max_pages + index];
      if (page < 0 || page >= pages)
        throw std::out_of_range("page " + std::to_string(page) + ": the cache has " + std::to_string(pages));
    }
  }
};

// A run, and how it is cut into tasks.
struct Cut {
  Run run;
  int64_t length;  // the most positions that a task goes through
  bool tiles;
  int64_t heads, tokens;               // the most heads and tokens of a task
  int64_t stretches = 1, stretch = 0;  // number of stretches, and positions of one
  int64_t first_part = 0;              // index of its first part, if there are several stretches

  int64_t weight() const { return length * (heads * tokens + READING); }
};

// The work of one task: `heads` heads, `tokens` tokens, one stretch of positions.
struct Piece {
  const Cut* cut;
  int64_t kv_head, first_head, heads, first, tokens;
  int64_t part, begin, end;  // number of the stretch, and its positions: `begin` is a multiple of TOGETHER

  int64_t weight() const { return (end - begin) * (heads * tokens + READING); }
};

struct Attention {
  Cache cache;
  int64_t heads, sharing, padded, width;
  int64_t query_width;  // elements from one query to the next: a head, and its gate if there is one
  const int64_t* positions;
  Array in, out;
  Scratch<float> queries{};  // [rows, heads, padded], already multiplied by the scale of scores
  std::vector<Cut> cuts{};
  std::vector<Piece> pieces{};
  Scratch<float> parts{};    // [parts, padded]: one part per token, head and stretch
  Scratch<Partial> sums{};   // [parts]

  // Cuts runs into tasks, and orders them: the largest ones first.
  void divide(const std::vector<Run>& runs) {
    int64_t all = 0, count = 0;
    for (const Run& run : runs) {
      bool tiles = false;
      int64_t max_queries = FloatBlock::MAX_QUERIES;
#ifdef OSTINATO_AMX
      tiles = TileBlock::fits(cache.keys, cache.size, run.rows() * sharing);
      if (tiles) max_queries = TileBlock::MAX_QUERIES;
#endif
      int64_t together = std::min(sharing, max_queries), tokens = std::min(run.rows(), max_queries / together);
      int64_t length = positions[run.end - 1] + 1;
      if (cache.window) length = std::min(length, cache.window + tokens + TOGETHER - 2);
      cuts.push_back({run, length, tiles, together, tokens});
      all += cuts.back().weight() * pieces_of(cuts.back());
    }
    for (Cut& cut : cuts) {
      int64_t wanted = divided_up(4 * thread_count() * cut.weight(), all);
      cut.stretches = std::max<int64_t>(1, std::min(wanted, cut.length / MIN_STRETCH));
      cut.stretch = divided_up(divided_up(cut.length, cut.stretches), TOGETHER) * TOGETHER;
      cut.stretches = divided_up(cut.length, cut.stretch);
      cut.first_part = count;
      if (cut.stretches > 1) count += cut.run.rows() * heads * cut.stretches;
      add_pieces(cut);
    }
    std::stable_sort(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) { return a.weight() > b.weight(); });
    parts.reserve(count * padded);
    sums.reserve(count);
  }

  int64_t pieces_of(const Cut& cut) const {
    return cache.kv_heads * divided_up(sharing, cut.heads) * divided_up(cut.run.rows(), cut.tokens);
  }

  void add_pieces(const Cut& cut) {
    for (int64_t kv_head = 0; kv_head < cache.kv_heads; ++kv_head)
      for (int64_t head = 0; head < sharing; head += cut.heads)
        for (int64_t first = cut.run.begin; first < cut.run.end; first += cut.tokens)
          for (int64_t part = 0; part < cut.stretches; ++part) {
            int64_t mine = std::min(cut.heads, sharing - head), tokens = std::min(cut.tokens, cut.run.end - first);
            int64_t from = cache.first_seen(positions[first]) / TOGETHER * TOGETHER, begin = from + part * cut.stretch;
            int64_t end = std::min(begin + cut.stretch, positions[first + tokens - 1] + 1);
            if (end <= begin) begin = end = from;
            pieces.push_back({&cut, kv_head, kv_head * sharing + head, mine, first, tokens, part, begin, end});
          }
  }

  // Runs a task. Block is FloatBlock or TileBlock.
  template <typename Block>
  void run(const Piece& piece) const {
    constexpr int64_t BLOCK = Block::BLOCK;
    const Cut& cut = *piece.cut;
    int64_t count = piece.tokens * piece.heads;
    auto row_of = [&](int64_t i) { return piece.first + i / piece.heads; };
    auto head_of = [&](int64_t i) { return piece.first_head + i % piece.heads; };
    Block block(count, cache.size, padded);
    Scratch<float> sum_of_values(block.room() * padded), scores(block.room() * BLOCK);
    Partial sum[Block::MAX_QUERIES];
    for (int64_t i = 0; i < count; ++i) {
      block.put(i, queries + (row_of(i) * heads + head_of(i)) * padded);
      sum[i] = {-std::numeric_limits<float>::infinity(), 0};
    }
    std::memset(sum_of_values, 0, block.room() * padded * sizeof(float));
    // The places of a block's positions. Positions behind the end get the place of the last TOGETHER positions.
    auto places_from = [&](int64_t position) {
      std::array<int64_t, BLOCK / TOGETHER> at;
      for (int64_t i = 0; i < BLOCK; i += TOGETHER)
        at[i / TOGETHER] = cache.at(cut.run.slot, piece.kv_head, std::min(position + i, (piece.end - 1) / TOGETHER * TOGETHER));
      return at;
    };
    Places<BLOCK> at{{}, places_from(piece.begin)};
    for (int64_t position = piece.begin; position < piece.end; position += BLOCK) {
      // The block's positions from `first` to `length` are seen by some token.
      int64_t first = std::max<int64_t>(0, cache.first_seen(positions[piece.first]) - position);
      int64_t length = std::min(BLOCK, piece.end - position);
      at = {at.next, places_from(position + BLOCK)};
      block.score(cache.keys, at, first, length, scores);
      for (int64_t i = 0; i < count; ++i) {
        int64_t own = positions[row_of(i)], unseen = std::max<int64_t>(0, cache.first_seen(own) - position);
        weigh<BLOCK>(scores + i * BLOCK, unseen, std::min(length, own + 1 - position), sum[i], sum_of_values + i * padded);
      }
      block.add(cache.values, at, first, length, scores, sum_of_values);
    }
    for (int64_t i = 0; i < count; ++i) {
      if (cut.stretches == 1) {
        finish(row_of(i), head_of(i), sum_of_values + i * padded, sum[i].total);
        continue;
      }
      int64_t to = first_part(cut, row_of(i), head_of(i)) + piece.part;
      sums[to] = sum[i];
      std::memcpy(parts + to * padded, sum_of_values + i * padded, padded * sizeof(float));
    }
  }

  // Turns the scores of a block into weights; only the positions from `unseen` to `seen` count. Earlier sums are made
  // relative to the new largest score.
  template <int64_t BLOCK>
  void weigh(float* scores, int64_t unseen, int64_t seen, Partial& sum, float* out) const {
    if (seen <= unseen) {
      std::memset(scores, 0, BLOCK * sizeof(float));
      return;
    }
    for (int64_t c = 0; c < unseen; ++c) scores[c] = -std::numeric_limits<float>::infinity();
    for (int64_t c = seen; c < BLOCK; ++c) scores[c] = -std::numeric_limits<float>::infinity();
    // A NaN score does not count here; it makes the sums below NaN.
    Floats largest_so_far = broadcast(sum.peak);
    for (int64_t c = 0; c < BLOCK; c += LANES) largest_so_far = maximum(load(scores + c), largest_so_far);
    float peak = largest(largest_so_far);
    if (peak > sum.peak) {
      float factor = sum.total == 0 ? 0 : std::exp(sum.peak - peak);
      sum.total *= factor;
      for (int64_t i = 0; i < padded; i += LANES) store(out + i, load(out + i) * broadcast(factor));
      sum.peak = peak;
    }
    Floats total = zeros();
    for (int64_t c = 0; c < BLOCK; c += LANES) {
      Floats weight = exponential(load(scores + c) - broadcast(peak));
      store(scores + c, weight);
    }
    for (int64_t c = 0; c < unseen; ++c) scores[c] = 0;
    for (int64_t c = seen; c < BLOCK; ++c) scores[c] = 0;
    for (int64_t c = 0; c < BLOCK; c += LANES) total = total + load(scores + c);
    sum.total += ostinato::sum(total);
  }

  int64_t first_part(const Cut& cut, int64_t row, int64_t head) const {
    return cut.first_part + ((row - cut.run.begin) * heads + head) * cut.stretches;
  }

  // Merges the parts of one head of a token into the first part.
  void merge(const Cut& cut, int64_t row, int64_t head) const {
    int64_t first = first_part(cut, row, head);
    const Partial* of = sums + first;
    float* sum_of_values = parts + first * padded;
    float peak = of[0].peak, total = 0;
    for (int64_t part = 1; part < cut.stretches; ++part) peak = of[part].peak > peak ? of[part].peak : peak;
    for (int64_t part = 0; part < cut.stretches; ++part) {
      // A stretch without a position that the token sees has added nothing.
      float factor = of[part].total == 0 ? 0 : std::exp(of[part].peak - peak);
      total += of[part].total * factor;
      for (int64_t i = 0; i < padded; i += LANES) {
        Floats value = load(sum_of_values + part * padded + i) * broadcast(factor);
        store(sum_of_values + i, part == 0 ? value : load(sum_of_values + i) + value);
      }
    }
    finish(row, head, sum_of_values, total);
  }

  // Divides by the sum of the weights, and applies the gate if there is one.
  void finish(int64_t row, int64_t head, const float* sum_of_values, float total) const {
    Floats inverse = broadcast(1 / total);
    int64_t size = cache.size;
    for (int64_t i = 0; i < size; i += LANES) {
      Floats value = load(sum_of_values + i) * inverse;
      if (query_width > size) value = value * sigmoid(in.load(row * width + head * query_width + size + i, size - i));
      out.store((row * heads + head) * size + i, value, size - i);
    }
  }

  void merge_all() const {
    for (const Cut& cut : cuts) {
      if (cut.stretches == 1) continue;
      auto of_head = [&](int64_t index) { merge(cut, cut.run.begin + index / heads, index % heads); };
      if (cut.run.rows() == 1)
        for (int64_t head = 0; head < heads; ++head) of_head(head);
      else
        parallel(cut.run.rows() * heads, of_head);
    }
  }
};

}  // namespace

extern "C" AOTITorchError aoti_torch_cpu_attend_step(AtenTensorHandle qkv_, AtenTensorHandle* q_norm_, AtenTensorHandle* k_norm_,
                                                     double eps, int64_t heads, int32_t gated, AtenTensorHandle positions_,
                                                     AtenTensorHandle slots_, AtenTensorHandle cos_, AtenTensorHandle sin_,
                                                     AtenTensorHandle keys_, AtenTensorHandle values_,
                                                     AtenTensorHandle table_, int64_t window,
                                                     AtenTensorHandle* result) {
  return guarded("attend_step", [&] {
    Tensor qkv(qkv_), cos(cos_), sin(sin_), positions_of(positions_), slots(slots_), keys(keys_);
    const float *q_norm = Tensor(q_norm_).as<float>(), *k_norm = Tensor(k_norm_).as<float>();
    const int64_t *positions = positions_of.as<int64_t>(), *slot = slots.as<int64_t>();
    Cache cache(keys, Tensor(values_), Tensor(table_), window);
    std::vector<Run> runs = runs_of(slots, positions_of, cache.slots);
    for (const Run& run : runs) cache.check(run, positions);
    int64_t rows = qkv.size(0), width = qkv.size(1), rotated = cos.size(1), size = cache.size;
    int64_t padded = divided_up(size, LANES) * LANES;
    Result made({rows, heads * size}, keys.dtype);
    Array out = made.array(), in = qkv.array();
    for_padding(runs, rows, [&](int64_t begin, int64_t end) { out.clear(begin * heads * size, (end - begin) * heads * size); });

    int64_t query_width = (gated ? 2 : 1) * size;
    Attention attention{cache, heads, heads / cache.kv_heads, padded, width, query_width, positions, in, out};
    attention.queries.reserve(rows * heads * padded);
    float scale = 1 / std::sqrt(float(size));
    for_tokens(slots, [&](int64_t row) {
      Scratch<float> key(padded);
      const float *c = cos.as<float>() + row * rotated, *s = sin.as<float>() + row * rotated;
      for (int64_t head = 0; head < heads; ++head) {
        float* query = attention.queries + (row * heads + head) * padded;
        place(in.from(row * width + head * query_width), size, q_norm, eps, c, s, rotated, query);
        for (int64_t i = 0; i < size; ++i) query[i] *= scale;
        for (int64_t i = size; i < padded; ++i) query[i] = 0;
      }
      for (int64_t head = 0; head < cache.kv_heads; ++head) {
        int64_t from = row * width + heads * query_width + head * size, to = cache.at(slot[row], head, positions[row]);
        place(in.from(from), size, k_norm, eps, c, s, rotated, key);
        for (int64_t i = 0; i < size; i += LANES) {
          cache.keys.store(to + i, Array{key, false}.load(i, size - i), size - i);
          cache.values.store(to + i, in.load(from + cache.kv_heads * size + i, size - i), size - i);
        }
      }
    });

    attention.divide(runs);
    parallel(attention.pieces.size(), [&](int64_t index) {
      const Piece& piece = attention.pieces[index];
#ifdef OSTINATO_AMX
      if (piece.cut->tiles) return attention.run<TileBlock>(piece);
#endif
      attention.run<FloatBlock>(piece);
    }, rows == 1 ? 8 : 64);
    attention.merge_all();
    made.give(result);
  });
}

}  // namespace ostinato
