// The operator of delta_rule/delta_rule_cpu.py: the recurrence of gated delta-net heads.
//
// A column of a head's state, [K, V], depends on no other column. So a task takes LANES columns, which with K = 128 are 8 KB and
// stay in the first cache, through all tokens one after the other; there is no other form for prompts.
#include "../linear/rows_cpu.h"
#include "../threads_cpu.h"

namespace ostinato {
namespace {

float softplus(float x) { return x > 20 ? x : std::log1p(std::exp(x)); }

// Queries, keys and gates of all tokens, as the recurrence takes them.
struct Prepared {
  Scratch<float> queries, keys;  // [rows, key heads, K], of norm K^-0.5 and 1
  Scratch<float> both;           // [rows, key heads], query times key
  Scratch<float> decay, write;   // [rows, heads]: exp(g) and beta
};

// x / |x| * factor.
void normalize(const Array& x, int64_t size, float factor, float* to) {
  to_floats(x, size, to);
  Array values{to, false};
  float scale = factor / std::sqrt(dot(values, values, size) + 1e-6f);
  for (int64_t i = 0; i < size; ++i) to[i] *= scale;
}

}  // namespace

extern "C" AOTITorchError aoti_torch_cpu_delta_step(AtenTensorHandle mixed_, AtenTensorHandle gates_, AtenTensorHandle a_log_,
                                                    AtenTensorHandle dt_bias_, AtenTensorHandle state_,
                                                    AtenTensorHandle positions_, AtenTensorHandle norm_, int64_t key_heads,
                                                    AtenTensorHandle* result, AtenTensorHandle* squares_) {
  return guarded("delta_step", [&] {
    Tensor mixed(mixed_), gates(gates_), state(state_), positions(positions_);
    const float *a_log = Tensor(a_log_).as<float>(), *dt_bias = Tensor(dt_bias_).as<float>(), *norm = Tensor(norm_).as<float>();
    int64_t all = mixed.size(0), rows = length_of(positions), width = mixed.size(1);
    int64_t heads = state.size(0), key_dim = state.size(1), value_dim = state.size(2);
    int64_t blocks = (value_dim + LANES - 1) / LANES, sharing = heads / key_heads;
    int64_t keys_at = key_heads * key_dim, values_at = 2 * keys_at, gate_at = values_at + heads * value_dim;
    Result made({all, heads * value_dim}, mixed.dtype), made_squares({all * heads, blocks}, aoti_torch_dtype_float32());
    Array out = made.array();
    out.clear(rows * heads * value_dim, (all - rows) * heads * value_dim);
    made_squares.array().clear(rows * heads * blocks, (all - rows) * heads * blocks);
    float* squares = made_squares.tensor().as<float>();
    bool fresh = positions.as<int64_t>()[0] == 0;

    Prepared ready;
    ready.queries.reserve(rows * keys_at);
    ready.keys.reserve(rows * keys_at);
    ready.both.reserve(rows * key_heads);
    ready.decay.reserve(rows * heads);
    ready.write.reserve(rows * heads);
    float query_scale = 1 / std::sqrt(float(key_dim));
    auto prepare = [&](int64_t row) {
      for (int64_t head = 0; head < key_heads; ++head) {
        float *query = ready.queries + row * keys_at + head * key_dim, *key = ready.keys + row * keys_at + head * key_dim;
        normalize(mixed.array().from(row * width + head * key_dim), key_dim, query_scale, query);
        normalize(mixed.array().from(row * width + keys_at + head * key_dim), key_dim, 1, key);
        ready.both[row * key_heads + head] = dot(Array{query, false}, Array{key, false}, key_dim);
      }
      const float* gate = gates.as<float>() + row * 2 * heads;
      for (int64_t head = 0; head < heads; ++head) {
        ready.write[row * heads + head] = 1 / (1 + std::exp(-gate[head]));
        float g = -std::exp(a_log[head]) * softplus(gate[heads + head] + dt_bias[head]);
        ready.decay[row * heads + head] = std::exp(g);
      }
    };
    if (rows == 1)
      prepare(0);
    else
      parallel(rows, prepare);

    parallel(heads * blocks, [&](int64_t task) {
      int64_t head = task / blocks, block = task % blocks, column = block * LANES;
      int64_t count = std::min(LANES, value_dim - column), key_head = head / sharing;
      Array kept{state.as<float>() + head * key_dim * value_dim + column, false};
      // With one token the state is read and written where it is; with more it is copied to lie together.
      Scratch<float> copy(rows > 1 || count < LANES ? key_dim * LANES : 0);
      float* s = copy ? (float*)copy : (float*)kept.data;
      int64_t stride = copy ? LANES : value_dim;
      if (copy)
        for (int64_t k = 0; k < key_dim; ++k) store(s + k * LANES, kept.load(k * value_dim, count));
      Floats weight = Array{(void*)norm, false}.load(column, count);
      for (int64_t row = 0; row < rows; ++row) {
        const float* query = ready.queries + row * keys_at + key_head * key_dim;
        const float* key = ready.keys + row * keys_at + key_head * key_dim;
        Floats decay = broadcast(ready.decay[row * heads + head]);
        Floats predicted = zeros(), found = zeros();
        if (row > 0 || !fresh) {
          Floats predicted_odd = zeros(), found_odd = zeros();
          int64_t k = 0;
          for (; k + 1 < key_dim; k += 2) {
            Floats even = load(s + k * stride), odd = load(s + (k + 1) * stride);
            predicted = fma(even, broadcast(key[k]), predicted);
            found = fma(even, broadcast(query[k]), found);
            predicted_odd = fma(odd, broadcast(key[k + 1]), predicted_odd);
            found_odd = fma(odd, broadcast(query[k + 1]), found_odd);
          }
          for (; k < key_dim; ++k) {
            predicted = fma(load(s + k * stride), broadcast(key[k]), predicted);
            found = fma(load(s + k * stride), broadcast(query[k]), found);
          }
          predicted = (predicted + predicted_odd) * decay;
          found = (found + found_odd) * decay;
        }
        Floats value = mixed.array().load(row * width + values_at + head * value_dim + column, count);
        Floats delta = (value - predicted) * broadcast(ready.write[row * heads + head]);
        // The old state counts as zeros there, whatever it is.
        if (row == 0 && fresh)
          for (int64_t k = 0; k < key_dim; ++k) store(s + k * stride, delta * broadcast(key[k]));
        else
          for (int64_t k = 0; k < key_dim; ++k)
            store(s + k * stride, fma(delta, broadcast(key[k]), load(s + k * stride) * decay));
        // q^T (S + k delta^T) in place of another pass over the state.
        Floats o = fma(delta, broadcast(ready.both[row * key_heads + key_head]), found);
        Floats gate = mixed.array().load(row * width + gate_at + head * value_dim + column, count);
        out.store(row * heads * value_dim + head * value_dim + column, o * weight * silu(gate), count);
        float lanes[LANES];
        store(lanes, o * o);
        float total = 0;
        for (int64_t lane = 0; lane < count; ++lane) total += lanes[lane];
        squares[(row * heads + head) * blocks + block] = total;
      }
      if (copy)
        for (int64_t k = 0; k < key_dim; ++k) kept.store(k * value_dim, load(s + k * LANES), count);
    }, rows == 1 ? 2 : 8);
    made.give(result);
    made_squares.give(squares_);
  });
}

}  // namespace ostinato
