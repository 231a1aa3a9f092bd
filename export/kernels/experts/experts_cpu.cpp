// The operators of experts/experts_cpu.py: the router's logits, and the layers of the chosen experts; no others are read.
#include <numeric>
#include <optional>

#include "../linear/product_cpu.h"
#include "../linear/rows_cpu.h"

namespace ostinato {
namespace {

// One expert of a token: the expert's rank among the token's top_k, and its share.
struct Choice {
  int32_t token, rank;
  float share;
};

// The choice of experts for all tokens.
struct Routing {
  int64_t tokens, top_k, experts, width = 0;
  Array logits{nullptr, false};
  std::vector<int32_t> chosen;   // [tokens, top_k]; `experts` and more stand for no expert
  std::vector<float> shares;     // [tokens, top_k]
  std::vector<Choice> order;     // all choices, sorted by expert
  std::vector<int64_t> begins;   // [experts + 1], the index in `order` of each expert's first choice

  // Chooses the `top_k` experts with the largest logits (of equal ones the first); shares are the softmax over these logits.
  // If slots are given, padding rows take no expert.
  Routing(const Tensor& logits_, int64_t top_k_, int64_t experts_, const Tensor& slots)
      : tokens(logits_.size(0)), top_k(top_k_), experts(experts_), width(logits_.size(1)), logits(logits_.array()) {
    chosen.assign(tokens * top_k, int32_t(experts));
    shares.resize(tokens * top_k);
    if (slots)
      for_tokens(slots, [&](int64_t token) { choose(token); });
    else if (tokens == 1)
      choose(0);
    else
      parallel(tokens, [&](int64_t token) { choose(token); });
    sort();
  }

  // Takes over a choice that the caller has made.
  Routing(const Tensor& weights, const Tensor& chosen_, int64_t experts_)
      : tokens(chosen_.size(0)), top_k(chosen_.size(1)), experts(experts_) {
    chosen.assign(chosen_.as<int32_t>(), chosen_.as<int32_t>() + tokens * top_k);
    shares.assign(weights.as<float>(), weights.as<float>() + tokens * top_k);
    sort();
  }

  float shared_share(int64_t token) const { return 1 / (1 + std::exp(-logits[token * width + experts])); }

 private:
  bool is_somebody(int32_t expert) const { return expert >= 0 && expert < experts; }

  void sort() {
    begins.assign(experts + 1, 0);
    for (int32_t expert : chosen)
      if (is_somebody(expert)) ++begins[expert + 1];
    std::partial_sum(begins.begin(), begins.end(), begins.begin());
    std::vector<int64_t> next(begins.begin(), begins.end() - 1);
    order.resize(begins[experts]);
    for (size_t i = 0; i < chosen.size(); ++i)
      if (is_somebody(chosen[i])) order[next[chosen[i]]++] = {int32_t(i / top_k), int32_t(i % top_k), shares[i]};
  }

  void choose(int64_t token) {
    Array of = logits.from(token * width);
    std::vector<int32_t> all(experts);
    std::iota(all.begin(), all.end(), 0);
    // NaN is the largest, as in torch, so that it shows in the result.
    auto ahead = [&](int32_t a, int32_t b) {
      float x = of[a], y = of[b];
      if (x != x || y != y) return x != x && (y == y || a < b);
      return x > y || (x == y && a < b);
    };
    std::partial_sort(all.begin(), all.begin() + top_k, all.end(), ahead);
    float peak = of[all[0]], total = 0;
    for (int64_t rank = 0; rank < top_k; ++rank) {
      chosen[token * top_k + rank] = all[rank];
      total += shares[token * top_k + rank] = std::exp(of[all[rank]] - peak);
    }
    for (int64_t rank = 0; rank < top_k; ++rank) shares[token * top_k + rank] /= total;
  }
};

// Fills inputs from load(token, float*), which is called once per token. Rows stand in the routing's order; if there is room,
// all tokens follow in their own order. With one token there is a single row.
template <typename Load>
void fill_sorted(Inputs& inputs, const Weight& weight, const Routing& routing, const Load& load) {
  if (routing.tokens == 1) return fill(inputs, weight.columns, load);
  Inputs tokens(weight, routing.tokens, inputs.rows());
  fill(tokens, weight.columns, load);
  int64_t pairs = routing.order.size();
  parallel(inputs.rows(), [&](int64_t row) {
    inputs.take(row, tokens, row < pairs ? routing.order[row].token : row - pairs);
  });
}

// Rows of inputs, at most MAX_ROWS, that one expert's weight multiplies.
struct Piece {
  Weight weight;
  int64_t input, count;
  int64_t first;  // index of the first row in the routing's order; for the shared expert -1 - token
};

// The pieces of the chosen experts. Their inputs stand in the routing's order. With `own_rows` every piece begins at row 0:
// each has inputs of its own, or there is one token, whose row serves all pieces.
std::vector<Piece> pieces_of(const Routing& routing, const Weight& routed, bool own_rows) {
  std::vector<Piece> pieces;
  for (int64_t expert = 0; expert < routing.experts; ++expert)
    for (int64_t begin = routing.begins[expert]; begin < routing.begins[expert + 1]; begin += MAX_ROWS) {
      int64_t count = std::min(MAX_ROWS, routing.begins[expert + 1] - begin);
      pieces.push_back({routed.expert(expert), own_rows ? 0 : begin, count, begin});
    }
  return pieces;
}

// The number of blocks of outputs that `swiglu` makes with this weight.
int64_t swiglu_blocks(const Weight& weight) {
  int64_t half = weight.rows / 2;
  return half % LANES ? 1 : half / LANES;
}

// silu(gate) * up for one block of LANES outputs; or for all outputs, if the up rows do not begin at a block. `next`: the
// block that this thread will read afterwards.
template <typename Emit>
void swiglu(const Piece& piece, const Inputs& x, int64_t block, Block next, const Emit& emit) {
  int64_t half = piece.weight.rows / 2;
  if (half % LANES == 0) {
    alignas(64) float gate[MAX_ROWS * LANES], up[MAX_ROWS * LANES];
    ManyProducts both(piece.count);
    multiply_blocks(piece.weight, x, block, block + half / LANES, piece.input, piece.input + piece.count, gate, up, next);
    for (int64_t row = 0; row < piece.count; ++row)
      emit(row, block * LANES, silu(load(gate + row * LANES)) * load(up + row * LANES), LANES);
    return;
  }
  int64_t blocks = piece.weight.blocks(), wide = blocks * LANES;
  Scratch<float> both(piece.count * wide), out(MAX_ROWS * LANES);
  for (int64_t each = 0; each < blocks; ++each) {
    multiply_block(piece.weight, x, each, piece.input, piece.input + piece.count, out);
    for (int64_t row = 0; row < piece.count; ++row) store(both + row * wide + each * LANES, load(out + row * LANES));
  }
  for (int64_t row = 0; row < piece.count; ++row)
    for (int64_t i = 0; i < half; i += LANES) {
      int64_t count = std::min(LANES, half - i);
      Array gate{both + row * wide + i, false}, up{both + row * wide + half + i, false};
      emit(row, i, silu(gate.load(0, count)) * up.load(0, count), count);
    }
}

// `swiglu` for all pieces: calls emit(piece, row, column, values, count). `shared`: inputs of the shared expert's pieces.
template <typename Emit>
void swiglu_of(const std::vector<Piece>& pieces, const Inputs& x, const Inputs& shared, int64_t each, const Emit& emit) {
  // A task is one block of one piece.
  std::vector<int64_t> begins{0};
  for (const Piece& piece : pieces) begins.push_back(begins.back() + swiglu_blocks(piece.weight));
  parallel(begins.back(), [&](int64_t task) {
    int64_t index = std::upper_bound(begins.begin(), begins.end(), task) - begins.begin() - 1;
    const Piece& piece = pieces[index];
    // Threads take neighbouring tasks together, so this thread's next task is mostly the next block.
    bool ends = task + 1 == begins[index + 1] && index + 1 < int64_t(pieces.size());
    Block next = ends ? Block{&pieces[index + 1].weight, 0} : Block{&piece.weight, task + 1 - begins[index]};
    const Inputs& mine = piece.first < 0 ? shared : x;
    swiglu(piece, mine, task - begins[index], next, [&](int64_t row, int64_t column, Floats y, int64_t count) {
      emit(piece, row, column, y, count);
    });
  }, each);
}

// `swiglu` for several tokens. `tokens` has their rows in their own order; `results` gets the inputs of the next weight. A
// task has a few blocks of one piece, and makes its own copies of the piece's rows: rows that another core has written come
// from its cache, more slowly than a weight comes from memory.
void swiglu_of_prompt(const std::vector<Piece>& pieces, const Routing& routing, const Inputs& tokens, Inputs& results) {
  if (pieces.empty()) return;
  // Blocks per task: 128 outputs, the largest group size of a weight.
  constexpr int64_t TOGETHER = 128 / LANES;
  int64_t half = pieces[0].weight.rows / 2, blocks = swiglu_blocks(pieces[0].weight);
  int64_t chunks = (blocks + TOGETHER - 1) / TOGETHER;
  parallel(int64_t(pieces.size()) * chunks, [&](int64_t task) {
    const Piece& piece = pieces[task / chunks];
    Inputs rows(piece.weight, piece.count);
    for (int64_t row = 0; row < piece.count; ++row) rows.take(row, tokens, routing.order[piece.first + row].token);
    int64_t first = task % chunks * TOGETHER, last = std::min(blocks, first + TOGETHER), begin = first * LANES;
    int64_t width = half % LANES ? half : (last - first) * LANES;
    Scratch<float> hidden(piece.count * width);
    ManyProducts all(piece.count);
    for (int64_t block = first; block < last; ++block)
      swiglu(piece, rows, block, Block{&piece.weight, block + 1}, [&](int64_t row, int64_t column, Floats y, int64_t count) {
        Array{hidden, false}.store(row * width + column - begin, y, count);
      });
    for (int64_t row = 0; row < piece.count; ++row) results.put(piece.first + row, hidden + row * width, begin, width);
  }, 64);
}

// Adds the routed experts' outputs times their shares to sums [tokens, last - first, LANES], blocks `first` to `last` of the
// outputs of all tokens.
void add_routed(const Routing& routing, const std::vector<Piece>& pieces, const Inputs& x, int64_t first, int64_t last,
                float* sums) {
  alignas(64) float product[MAX_ROWS * LANES];
  ManyProducts all(routing.tokens);
  for (const Piece& piece : pieces) {
    const Piece& after = &piece == &pieces.back() ? piece : (&piece)[1];
    for (int64_t block = first; block < last; ++block) {
      Block next = block + 1 < last ? Block{&piece.weight, block + 1} : Block{&after.weight, first};
      multiply_block(piece.weight, x, block, piece.input, piece.input + piece.count, product, next);
      for (int64_t row = 0; row < piece.count; ++row) {
        const Choice& choice = routing.order[piece.first + row];
        float* to = sums + (choice.token * (last - first) + block - first) * LANES;
        store(to, fma(load(product + row * LANES), broadcast(choice.share), load(to)));
      }
    }
  }
}

// Calls work(first, last) for all blocks of outputs, on all threads. It takes up to eight blocks at a time: neighbouring
// blocks of an expert come faster from memory (on one core of an AMD EPYC 10 GB/s, single blocks 7.6). It takes at least two,
// which fill lines of the cache. At the end it takes single blocks, so that all threads finish at the same time.
template <typename Work>
void for_blocks_together(int64_t blocks, const Work& work) {
  int64_t wide = std::clamp<int64_t>(blocks / (4 * thread_count()), 2, 8);
  int64_t pieces = std::max<int64_t>(0, blocks / wide - thread_count());
  parallel(pieces + blocks - pieces * wide, [&](int64_t task) {
    if (task < pieces) return work(task * wide, (task + 1) * wide);
    int64_t block = pieces * wide + task - pieces;
    work(block, block + 1);
  }, 64);
}

}  // namespace

extern "C" AOTITorchError aoti_torch_cpu_experts(AtenTensorHandle x_, AtenTensorHandle weights_, AtenTensorHandle chosen,
                                                 AtenTensorHandle gate_up_, AtenTensorHandle* gate_up_scale,
                                                 AtenTensorHandle* gate_up_minimum, const char* gate_up_form,
                                                 AtenTensorHandle down_, AtenTensorHandle* down_scale,
                                                 AtenTensorHandle* down_minimum, const char* down_form, int32_t pinned,
                                                 AtenTensorHandle* result) {
  PythonGoesOn goes_on;
  return guarded("experts", [&] {
    Tensor x(x_), gate_up_values(gate_up_);
    Weight gate_up{gate_up_values, Tensor(gate_up_scale), Tensor(gate_up_minimum), gate_up_form};
    Weight down{Tensor(down_), Tensor(down_scale), Tensor(down_minimum), down_form};
    int64_t tokens = x.size(0), inner = down.columns, columns = gate_up.columns;
    Result made({tokens, down.rows}, x.dtype, pinned);
    Array out = made.array();
    Inputs inputs(gate_up, tokens, tokens * Tensor(chosen).size(1));
    std::optional<Routing> found;
    auto route = [&] { found.emplace(Tensor(weights_), Tensor(chosen), gate_up_values.size(0)); };
    auto of_token = [&](int64_t token, float* to) { to_floats(x.array().from(token * columns), columns, to); };
    fill(inputs, columns, of_token, route);
    const Routing& routing = *found;
    int64_t pairs = routing.order.size();
    bool one = tokens == 1;
    std::vector<Piece> pieces = pieces_of(routing, gate_up, true);
    // Rows in the routing's order.
    Inputs middle(down, pairs);
    if (one) {
      Scratch<float> hidden(pairs * inner);
      swiglu_of(pieces, inputs, inputs, 3, [&](const Piece& piece, int64_t row, int64_t column, Floats y, int64_t count) {
        Array{hidden, false}.store((piece.first + row) * inner + column, y, count);
      });
      fill(middle, inner, [&](int64_t row, float* to) { std::memcpy(to, hidden + row * inner, inner * sizeof(float)); });
    } else {
      swiglu_of_prompt(pieces, routing, inputs, middle);
    }
    pieces = pieces_of(routing, down, false);
    auto add_blocks = [&](int64_t first, int64_t last) {
      int64_t wide = last - first;
      Scratch<float> sums(tokens * wide * LANES);
      std::memset(sums, 0, tokens * wide * LANES * sizeof(float));
      add_routed(routing, pieces, middle, first, last, sums);
      for (int64_t token = 0; token < tokens; ++token)
        for (int64_t block = first; block < last; ++block)
          out.store(token * down.rows + block * LANES, load(sums + (token * wide + block - first) * LANES), down.rows_of(block));
    };
    for_blocks_together(down.blocks(), add_blocks);
    made.give(result);
  });
}

extern "C" AOTITorchError aoti_torch_cpu_route_logits(AtenTensorHandle x_, AtenTensorHandle norm_, double eps,
                                                      AtenTensorHandle gate_, AtenTensorHandle* shared_,
                                                      AtenTensorHandle* result) {
  return guarded("route_logits", [&] {
    Tensor x(x_), norm(norm_), shared_gate(shared_);
    Weight gate{Tensor(gate_), {}, {}, ""};
    int64_t rows = x.size(0), columns = gate.columns, width = gate.rows + (shared_gate ? 1 : 0);
    Result made({rows, width}, x.dtype);
    Array out = made.array();
    Inputs inputs(gate, rows);
    fill(inputs, columns, [&](int64_t row, float* to) {
      to_floats(x.array().from(row * columns), columns, to);
      apply_norm(to, columns, norm.as<float>(), eps);
      if (shared_gate) out.put(row * width + gate.rows, dot(Array{to, false}, shared_gate.array(), columns));
    });
    multiply(gate, inputs, [&](int64_t row, int64_t column, Floats y, int64_t count) {
      out.store(row * width + column, y, count);
    });
    made.give(result);
  });
}

extern "C" AOTITorchError aoti_torch_cpu_experts_gate_up(AtenTensorHandle x_, AtenTensorHandle norm_, double eps,
                                                         AtenTensorHandle logits, int64_t top_k, AtenTensorHandle values,
                                                         AtenTensorHandle* scale, AtenTensorHandle* minimum, const char* form,
                                                         AtenTensorHandle* shared_values, AtenTensorHandle* shared_scale,
                                                         AtenTensorHandle* shared_minimum, const char* shared_form,
                                                         AtenTensorHandle* slots_,
                                                         AtenTensorHandle* result) {
  return guarded("experts_gate_up", [&] {
    Tensor x(x_), norm(norm_), routed_values(values), one_values(shared_values), slots(slots_);
    Weight routed{routed_values, Tensor(scale), Tensor(minimum), form};
    Routing routing(Tensor(logits), top_k, routed_values.size(0), slots);
    int64_t tokens = x.size(0), pairs = routing.order.size(), inner = routed.rows / 2, columns = routed.columns;
    int64_t shared_inner = one_values ? one_values.size(0) / 2 : 0, width = top_k * inner + shared_inner;
    Result made({tokens, width}, x.dtype);
    Array out = made.array();

    for (int64_t token = 0; slots && token < tokens; ++token)
      if (slots.as<int64_t>()[token] < 0) out.clear(token * width, top_k * inner);

    auto of_token = [&](int64_t token, float* to) {
      to_floats(x.array().from(token * columns), columns, to);
      apply_norm(to, columns, norm.as<float>(), eps);
    };
    // The row of a single token serves all its experts. The rows of several tokens stand in the routing's order. Those of the
    // shared expert stand behind them, or, if its weight needs them in another form, by themselves.
    Weight shared = one_values ? Weight{one_values, Tensor(shared_scale), Tensor(shared_minimum), shared_form} : routed;
    bool one = tokens == 1, apart = !routed.shares_inputs(shared);
    Inputs inputs(routed, one ? 1 : pairs + (one_values && !apart ? tokens : 0)), shared_inputs(shared, apart ? tokens : 0);
    fill_sorted(inputs, routed, routing, of_token);
    fill(shared_inputs, columns, of_token);
    std::vector<Piece> pieces = pieces_of(routing, routed, one);
    if (one_values)
      for (int64_t token = 0; token < tokens; token += MAX_ROWS)
        pieces.push_back({shared, apart ? token : one ? 0 : pairs + token, std::min(MAX_ROWS, tokens - token), -1 - token});
    swiglu_of(pieces, inputs, apart ? shared_inputs : inputs, one ? 3 : 64,
              [&](const Piece& piece, int64_t row, int64_t column, Floats y, int64_t count) {
                int64_t token = -1 - piece.first + row, rank = top_k;
                if (piece.first >= 0) {
                  token = routing.order[piece.first + row].token;
                  rank = routing.order[piece.first + row].rank;
                }
                out.store(token * width + rank * inner + column, y, count);
              });
    made.give(result);
  });
}

extern "C" AOTITorchError aoti_torch_cpu_experts_down(AtenTensorHandle hidden_, AtenTensorHandle logits, int64_t top_k,
                                                      AtenTensorHandle values, AtenTensorHandle* scale, AtenTensorHandle* minimum,
                                                      const char* form, AtenTensorHandle* shared_values,
                                                      AtenTensorHandle* shared_scale, AtenTensorHandle* shared_minimum,
                                                      const char* shared_form,
                                                      AtenTensorHandle residual_, AtenTensorHandle* slots,
                                                      AtenTensorHandle* result) {
  return guarded("experts_down", [&] {
    Tensor hidden(hidden_), residual(residual_), routed_values(values), one_values(shared_values);
    Weight routed{routed_values, Tensor(scale), Tensor(minimum), form};
    Weight shared = one_values ? Weight{one_values, Tensor(shared_scale), Tensor(shared_minimum), shared_form} : routed;
    Routing routing(Tensor(logits), top_k, routed_values.size(0), Tensor(slots));
    int64_t tokens = hidden.size(0), width = hidden.size(1), inner = routed.columns, columns = routed.rows;
    Result made({tokens, columns}, residual.dtype);
    Array out = made.array();
    Inputs inputs(routed, routing.order.size()), shared_inputs(shared, one_values ? tokens : 0);
    fill(inputs, inner, [&](int64_t row, float* to) {
      const Choice& choice = routing.order[row];
      to_floats(hidden.array().from(choice.token * width + choice.rank * inner), inner, to);
    });
    fill(shared_inputs, shared.columns, [&](int64_t token, float* to) {
      to_floats(hidden.array().from(token * width + top_k * inner), shared.columns, to);
    });
    std::vector<Piece> pieces = pieces_of(routing, routed, false);
    // A task has all tokens' sums of a few blocks of outputs, so that nothing is added up between threads.
    auto add_blocks = [&](int64_t first, int64_t last) {
      int64_t wide = last - first;
      Scratch<float> sums(tokens * wide * LANES);
      std::memset(sums, 0, tokens * wide * LANES * sizeof(float));
      add_routed(routing, pieces, inputs, first, last, sums);
      alignas(64) float product[MAX_ROWS * LANES];
      for (int64_t begin = 0; begin < shared_inputs.rows(); begin += MAX_ROWS) {
        int64_t end = std::min(tokens, begin + MAX_ROWS);
        for (int64_t block = first; block < last; ++block) {
          multiply_block(shared, shared_inputs, block, begin, end, product);
          for (int64_t token = begin; token < end; ++token) {
            float* to = sums + (token * wide + block - first) * LANES;
            store(to, fma(load(product + (token - begin) * LANES), broadcast(routing.shared_share(token)), load(to)));
          }
        }
      }
      for (int64_t token = 0; token < tokens; ++token)
        for (int64_t block = first; block < last; ++block) {
          int64_t at = token * columns + block * LANES, count = routed.rows_of(block);
          out.store(at, residual.array().load(at, count) + load(sums + (token * wide + block - first) * LANES), count);
        }
    };
    for_blocks_together(routed.blocks(), add_blocks);
    made.give(result);
  });
}

}  // namespace ostinato
