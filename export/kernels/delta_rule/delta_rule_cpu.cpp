// The operator of delta_rule/delta_rule_cpu.py: the recurrence of gated delta-net heads.
//
// A column of a head's state, [K, V], depends on no other column. So a task takes a few columns through all tokens of a run,
// one token after the other. Prompts take the same code.
#include "../linear/rows_cpu.h"
#include "../threads_cpu.h"

namespace ostinato {
namespace {

float softplus(float x) { return x > 20 ? x : std::log1p(std::exp(x)); }

// x / |x| * factor.
void normalize(const Array& x, int64_t size, float factor, float* to) {
  to_floats(x, size, to);
  Array values{to, false};
  float scale = factor / std::sqrt(dot(values, values, size) + 1e-6f);
  for (int64_t i = 0; i < size; ++i) to[i] *= scale;
}

// A task has several blocks of LANES columns, so that keys and queries are loaded less often. For a run of more than SHORT
// rows it has WIDE blocks, copied to lie together: with K = 128 they take half of the first-level cache. For other runs it
// has WIDE_IF_SHORT blocks, which stay where they are: memory is read faster in longer stretches. One token of 32 heads of
// 128 x 128 takes 160 us, with WIDE blocks 310 us; 64 tokens take as long with either (one core of an AMD EPYC).
constexpr int64_t SHORT = 16, WIDE = 2, WIDE_IF_SHORT = 8;

struct DeltaRule {
  int64_t rows, width, heads, key_heads, key_dim, value_dim;
  Array mixed, out;
  const float* norm;
  float *state, *squares;
  // Inputs in the form that the recurrence takes.
  Scratch<float> queries{}, keys{};  // [rows, key heads, K], of lengths K^-0.5 and 1
  Scratch<float> both{};             // [rows, key heads], query times key
  Scratch<float> decay{}, write{};   // [rows, heads]: exp(g) and beta

  int64_t blocks() const { return (value_dim + LANES - 1) / LANES; }
  int64_t keys_at() const { return key_heads * key_dim; }

  void reserve() {
    queries.reserve(rows * keys_at());
    keys.reserve(rows * keys_at());
    both.reserve(rows * key_heads);
    decay.reserve(rows * heads);
    write.reserve(rows * heads);
  }

  void prepare(int64_t row, const float* gates, const float* a_log, const float* dt_bias) const {
    for (int64_t head = 0; head < key_heads; ++head) {
      float *query = queries + row * keys_at() + head * key_dim, *key = keys + row * keys_at() + head * key_dim;
      normalize(mixed.from(row * width + head * key_dim), key_dim, 1 / std::sqrt(float(key_dim)), query);
      normalize(mixed.from(row * width + keys_at() + head * key_dim), key_dim, 1, key);
      both[row * key_heads + head] = dot(Array{query, false}, Array{key, false}, key_dim);
    }
    const float* gate = gates + row * 2 * heads;
    for (int64_t head = 0; head < heads; ++head) {
      write[row * heads + head] = 1 / (1 + std::exp(-gate[head]));
      float g = -std::exp(a_log[head]) * softplus(gate[heads + head] + dt_bias[head]);
      decay[row * heads + head] = std::exp(g);
    }
  }

  // Takes COUNT blocks of a head's columns through the tokens of a run.
  template <int COUNT>
  void recur(const Run& run, int64_t head, int64_t block) const {
    constexpr int64_t COLUMNS = COUNT * LANES;
    int64_t column = block * LANES, count = std::min(COLUMNS, value_dim - column);
    Array kept{state + (run.slot * heads + head) * key_dim * value_dim + column, false};
    auto all = [&](float* s, int64_t stride) {
      for (int64_t row = run.begin; row < run.end; ++row)
        step<COUNT>(row, head, block, s, stride, row == run.begin && run.fresh);
    };
    if (run.rows() <= SHORT && count == COLUMNS) return all((float*)kept.data, value_dim);
    Scratch<float> copy(key_dim * COLUMNS);
    auto for_vectors = [&](const auto& work) {
      for (int64_t k = 0; k < key_dim; ++k)
        for (int64_t at = 0; at < count; at += LANES) work(k * value_dim + at, copy + k * COLUMNS + at, count - at);
    };
    for_vectors([&](int64_t from, float* to, int64_t lanes) { store(to, kept.load(from, lanes)); });
    all(copy, COLUMNS);
    for_vectors([&](int64_t to, float* from, int64_t lanes) { kept.store(to, load(from), lanes); });
  }

  // Takes these columns through one token. `fresh`: the old state counts as zeros, whatever it holds.
  template <int COUNT>
  void step(int64_t row, int64_t head, int64_t block, float* s, int64_t stride, bool fresh) const {
    int64_t key_head = head * key_heads / heads, first = row * width + 2 * keys_at() + head * value_dim + block * LANES;
    const float *query = queries + row * keys_at() + key_head * key_dim, *key = keys + row * keys_at() + key_head * key_dim;
    Floats fading = broadcast(decay[row * heads + head]), written = broadcast(write[row * heads + head]);
    Floats predicted[COUNT], found[COUNT], delta[COUNT];
    for (int i = 0; i < COUNT; ++i) predicted[i] = found[i] = zeros();
    if (!fresh) look_up<COUNT>(s, stride, key, query, predicted, found);
    for (int i = 0; i < COUNT; ++i) {
      Floats value = mixed.load(first + i * LANES, value_dim - block * LANES - i * LANES);
      delta[i] = (value - predicted[i] * fading) * written;
    }
    if (fresh) {
      for (int64_t k = 0; k < key_dim; ++k)
        for (int i = 0; i < COUNT; ++i) store(s + k * stride + i * LANES, delta[i] * broadcast(key[k]));
    } else {
      for (int64_t k = 0; k < key_dim; ++k) {
        Floats of_key = broadcast(key[k]);
#pragma GCC unroll 8
        for (int i = 0; i < COUNT; ++i) {
          float* at = s + k * stride + i * LANES;
          store(at, fma(delta[i], of_key, load(at) * fading));
        }
      }
    }
    for (int i = 0; i < COUNT; ++i) {
      int64_t column = (block + i) * LANES, count = value_dim - column;
      // q^T (S + k delta^T), without another pass over the state.
      Floats o = fma(delta[i], broadcast(both[row * key_heads + key_head]), found[i] * fading);
      Floats gate = mixed.load(first + heads * value_dim + i * LANES, count);
      Floats weight = Array{(void*)norm, false}.load(column, count);
      out.store((row * heads + head) * value_dim + column, o * weight * silu(gate), count);
      float lanes[LANES], total = 0;
      store(lanes, o * o);
      for (int64_t lane = 0; lane < std::min(LANES, count); ++lane) total += lanes[lane];
      squares[(row * heads + head) * blocks() + block + i] = total;
    }
  }

  // predicted += S^T key, found += S^T query.
  template <int COUNT>
  void look_up(const float* s, int64_t stride, const float* key, const float* query, Floats* predicted, Floats* found) const {
    // If COUNT is small, even and odd keys have sums of their own, which do not wait for each other.
    constexpr int SUMS = COUNT > WIDE ? 1 : 2;
    Floats of_key[SUMS][COUNT], of_query[SUMS][COUNT];
    for (int sum = 0; sum < SUMS; ++sum)
      for (int i = 0; i < COUNT; ++i) of_key[sum][i] = of_query[sum][i] = zeros();
    auto add = [&](int64_t k, int sum) {
      Floats in_key = broadcast(key[k]), in_query = broadcast(query[k]);
#pragma GCC unroll 8
      for (int i = 0; i < COUNT; ++i) {
        Floats values = load(s + k * stride + i * LANES);
        of_key[sum][i] = fma(values, in_key, of_key[sum][i]);
        of_query[sum][i] = fma(values, in_query, of_query[sum][i]);
      }
    };
    int64_t k = 0;
    for (; k + SUMS <= key_dim; k += SUMS)
      for (int sum = 0; sum < SUMS; ++sum) add(k + sum, sum);
    if (k < key_dim) add(k, 0);
    for (int sum = 0; sum < SUMS; ++sum)
      for (int i = 0; i < COUNT; ++i) {
        predicted[i] = predicted[i] + of_key[sum][i];
        found[i] = found[i] + of_query[sum][i];
      }
  }
};

}  // namespace

extern "C" AOTITorchError aoti_torch_cpu_delta_step(AtenTensorHandle mixed_, AtenTensorHandle gates_, AtenTensorHandle a_log_,
                                                    AtenTensorHandle dt_bias_, AtenTensorHandle state_,
                                                    AtenTensorHandle positions, AtenTensorHandle slots_, AtenTensorHandle norm_,
                                                    int64_t key_heads, AtenTensorHandle* result, AtenTensorHandle* squares_) {
  return guarded("delta_step", [&] {
    Tensor mixed(mixed_), gates(gates_), state(state_), slots(slots_);
    const float *a_log = Tensor(a_log_).as<float>(), *dt_bias = Tensor(dt_bias_).as<float>(), *norm = Tensor(norm_).as<float>();
    int64_t rows = mixed.size(0), heads = state.size(1), value_dim = state.size(3);
    std::vector<Run> runs = runs_of(slots, Tensor(positions), state.size(0));
    int64_t blocks = (value_dim + LANES - 1) / LANES;
    Result made({rows, heads * value_dim}, mixed.dtype), made_squares({rows * heads, blocks}, aoti_torch_dtype_float32());
    DeltaRule rule{rows, mixed.size(1), heads, key_heads, state.size(2), value_dim, mixed.array(), made.array(), norm,
                   state.as<float>(), made_squares.tensor().as<float>()};
    for_padding(runs, rows, [&](int64_t begin, int64_t end) {
      rule.out.clear(begin * heads * value_dim, (end - begin) * heads * value_dim);
      made_squares.array().clear(begin * heads * blocks, (end - begin) * heads * blocks);
    });
    rule.reserve();
    for_tokens(slots, [&](int64_t row) { rule.prepare(row, gates.as<float>(), a_log, dt_bias); });

    struct Part {
      const Run& run;
      int64_t block, count;
    };
    std::vector<Part> parts;
    for (const Run& run : runs) {
      int64_t count = run.rows() <= SHORT ? WIDE_IF_SHORT : WIDE;
      while (value_dim % (count * LANES) && count > 1) count /= 2;
      for (int64_t block = 0; block < blocks; block += count) parts.push_back({run, block, count});
    }
    // The tasks of a head stand side by side, for all runs. So each thread gets some tasks of a long run.
    int64_t of_head = parts.size();
    parallel(heads * of_head, [&](int64_t task) {
      const Part& part = parts[task % of_head];
      switch (part.count) {
        case 1: return rule.recur<1>(part.run, task / of_head, part.block);
        case 2: return rule.recur<2>(part.run, task / of_head, part.block);
        case 4: return rule.recur<4>(part.run, task / of_head, part.block);
        default: return rule.recur<WIDE_IF_SHORT>(part.run, task / of_head, part.block);
      }
    }, rows == 1 ? 4 : runs.size() == 1 ? 8 : 32);
    made.give(result);
    made_squares.give(squares_);
  });
}

}  // namespace ostinato
