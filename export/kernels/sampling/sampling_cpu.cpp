// The operators of sampling/sampling_cpu.py: the next token, as delegate/sampling.py and delegate/logits_processing.py define it,
// and log-probabilities.
#include <algorithm>
#include <bit>
#include <cfloat>
#include <functional>
#include <limits>
#include <numeric>
#include <vector>

#include "../linear/rows_cpu.h"
#include "../tensors_cpu.h"
#include "../threads_cpu.h"

namespace ostinato {
namespace {

constexpr int64_t PIECE = 16384;  // tokens of a task

// Makes a logit finite: NaN becomes the lowest number, infinities become the lowest and the highest, -0 becomes 0.
float finite(float x) {
  x = x >= -FLT_MAX ? x : -FLT_MAX;
  return (x <= FLT_MAX ? x : FLT_MAX) + 0.0f;
}

struct Best {
  float score;
  int64_t token;
};

int64_t pieces_of(int64_t vocab) { return (vocab + PIECE - 1) / PIECE; }

// Calls of_piece(begin, end) for pieces of the vocabulary, and returns the best result; the first one of equal results.
template <typename OfPiece>
Best best_of(int64_t vocab, const OfPiece& of_piece) {
  int64_t pieces = pieces_of(vocab);
  Scratch<Best> found(pieces);
  parallel(pieces, [&](int64_t piece) { found[piece] = of_piece(piece * PIECE, std::min(vocab, (piece + 1) * PIECE)); });
  Best best = found[0];
  for (int64_t piece = 1; piece < pieces; ++piece)
    if (found[piece].score > best.score) best = found[piece];
  return best;
}

// The token with the largest logit.
Best most_likely(const float* logits, int64_t vocab) {
  return best_of(vocab, [=](int64_t begin, int64_t end) {
    Best best{-std::numeric_limits<float>::infinity(), begin};
    for (int64_t token = begin; token < end; ++token) {
      float x = finite(logits[token]);
      if (x > best.score) best = {x, token};
    }
    return best;
  });
}

// An integer that orders as x does: larger floats have larger keys.
uint32_t key_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

float float_of(uint32_t key) {
  uint32_t bits = key & 0x80000000u ? key & 0x7fffffffu : ~key;
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

// Some of the logits, and the weight of each.
struct Candidates {
  std::vector<float> logits, weights;
};

// The logits from `lowest` to `highest`, and their weights if there are any. The others are not looked at again.
Candidates narrowed(const float* logits, const float* weights, int64_t count, float lowest, float highest) {
  std::vector<Candidates> found(pieces_of(count));
  parallel(found.size(), [&](int64_t piece) {
    int64_t begin = piece * PIECE, here = std::min(count - begin, PIECE), kept = 0;
    Scratch<int32_t> places(here);
    // Without a branch: a processor cannot predict which ones are kept.
    for (int64_t i = 0; i < here; ++i) {
      float x = finite(logits[begin + i]);
      places[kept] = int32_t(i);
      kept += (x >= lowest) & (x <= highest);
    }
    found[piece].logits.resize(kept);
    for (int64_t i = 0; i < kept; ++i) found[piece].logits[i] = finite(logits[begin + places[i]]);
    if (!weights) return;
    found[piece].weights.resize(kept);
    for (int64_t i = 0; i < kept; ++i) found[piece].weights[i] = weights[begin + places[i]];
  });
  Candidates all;
  for (const Candidates& piece : found) {
    all.logits.insert(all.logits.end(), piece.logits.begin(), piece.logits.end());
    all.weights.insert(all.weights.end(), piece.weights.begin(), piece.weights.end());
  }
  return all;
}

// The lowest logit that is kept: a logit is kept if all larger logits together weigh less than `wanted`. Its key is found
// eleven bits at a time, the highest bits first. Without weights each logit weighs one; logits of weight 0 are left out.
float lowest_within(const float* logits, const float* weights, int64_t count, double wanted) {
  constexpr int SHIFTS[] = {21, 10, 0};
  constexpr int64_t BINS = 1 << 11;
  uint32_t prefix = 0;
  double ahead = 0;
  Candidates left;
  for (int shift : SHIFTS) {
    uint32_t mask = shift ? BINS - 1 : (BINS / 2) - 1;
    int64_t pieces = pieces_of(count);
    Scratch<double> totals(pieces * BINS);
    parallel(pieces, [&](int64_t piece) {
      double* bins = totals + piece * BINS;
      std::memset(bins, 0, BINS * sizeof(double));
      int64_t end = std::min(count, (piece + 1) * PIECE);
      uint32_t bin[LANES];
      for (int64_t begin = piece * PIECE; begin < end; begin += LANES) {
        int64_t here = std::min(LANES, end - begin);
        for (int64_t i = 0; i < here; ++i) bin[i] = key_of(finite(logits[begin + i])) >> shift & mask;
        for (int64_t i = 0; i < here; ++i) bins[bin[i]] += weights ? weights[begin + i] : 1;
      }
    });
    // The lowest bin that begins before the sum reaches `wanted`.
    int64_t lowest = -1;
    double ahead_of_lowest = ahead;
    for (int64_t bin = mask; bin >= 0 && ahead < wanted; --bin) {
      double total = 0;
      for (int64_t piece = 0; piece < pieces; ++piece) total += totals[piece * BINS + bin];
      if (total <= 0) continue;
      lowest = bin;
      ahead_of_lowest = ahead;
      ahead += total;
    }
    if (lowest < 0) break;
    ahead = ahead_of_lowest;
    prefix |= uint32_t(lowest) << shift;
    if (shift == 0) break;
    left = narrowed(logits, weights, count, float_of(prefix), float_of(prefix | ((1u << shift) - 1)));
    logits = left.logits.data();
    weights = weights ? left.weights.data() : nullptr;
    count = left.logits.size();
  }
  return float_of(prefix);
}

// The k-th largest logit, or a lower number: the k-th largest of the largest logits of groups of LANES neighbours.
float not_above_kth(const float* logits, int64_t vocab, int64_t k) {
  int64_t groups = (vocab + LANES - 1) / LANES;
  if (k >= groups) return -FLT_MAX;
  Scratch<float> largest_of(groups);
  parallel(pieces_of(vocab), [&](int64_t piece) {
    for (int64_t begin = piece * PIECE; begin < std::min(vocab, (piece + 1) * PIECE); begin += LANES) {
      float peak = -FLT_MAX;
      for (int64_t i = begin; i < std::min(begin + LANES, vocab); ++i) peak = std::max(peak, finite(logits[i]));
      largest_of[begin / LANES] = peak;
    }
  });
  std::nth_element(largest_of + 0, largest_of + (k - 1), largest_of + groups, std::greater<float>());
  return largest_of[k - 1];
}

// Writes probabilities relative to that of the largest logit to `weights`, and returns their sum.
double weigh(const float* logits, int64_t count, float largest, float temperature, float* weights) {
  int64_t pieces = pieces_of(count);
  Scratch<double> totals(pieces);
  parallel(pieces, [&](int64_t piece) {
    double total[LANES] = {};
    for (int64_t begin = piece * PIECE; begin < std::min(count, (piece + 1) * PIECE); begin += LANES) {
      float lanes[LANES] = {};
      int64_t here = std::min(LANES, count - begin);
      for (int64_t lane = 0; lane < here; ++lane) lanes[lane] = (finite(logits[begin + lane]) - largest) / temperature;
      store(lanes, exponential(load(lanes)));
      for (int64_t lane = 0; lane < here; ++lane) {
        // `exponential` gives nothing below e^-87, so that counts as 0.
        float weight = lanes[lane] > 1e-37f ? lanes[lane] : 0;
        weights[begin + lane] = weight;
        total[lane] += weight;
      }
    }
    totals[piece] = std::accumulate(total, total + LANES, 0.0);
  });
  return std::accumulate(totals + 0, totals + pieces, 0.0);
}

// The lowest logit that top_k, top_p and min_p keep.
float lowest_kept(const float* logits, int64_t vocab, float largest, float temperature, int64_t top_k, float top_p, float min_p) {
  float lowest = -FLT_MAX;
  Candidates left;
  int64_t count = vocab;
  const float* some = logits;
  auto keep = [&](float from) {
    lowest = from;
    left = narrowed(some, nullptr, count, lowest, FLT_MAX);
    some = left.logits.data();
    count = left.logits.size();
  };
  if (top_k > 0 && top_k < vocab) {
    keep(not_above_kth(logits, vocab, top_k));
    keep(lowest_within(some, nullptr, count, double(top_k)));
  }
  if (top_p < 1) {
    Scratch<float> weights(count);
    double total = weigh(some, count, largest, temperature, weights);
    lowest = lowest_within(some, weights, count, double(top_p) * total);
  }
  return min_p > 0 ? std::max(lowest, largest + temperature * std::log(min_p)) : lowest;
}

// Philox 4x32-10 of the counter (quad, 0, position) with a seed as key: four words.
void philox(uint64_t quad, uint64_t position, uint64_t seed, uint32_t words[4]) {
  uint32_t c0 = uint32_t(quad), c1 = 0, c2 = uint32_t(position), c3 = uint32_t(position >> 32);
  uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    uint64_t first = uint64_t(0xD2511F53u) * c0, second = uint64_t(0xCD9E8D57u) * c2;
    uint32_t next0 = uint32_t(second >> 32) ^ c1 ^ k0, next2 = uint32_t(first >> 32) ^ c3 ^ k1;
    c1 = uint32_t(second);
    c3 = uint32_t(first);
    c0 = next0;
    c2 = next2;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  words[0] = c0;
  words[1] = c1;
  words[2] = c2;
  words[3] = c3;
}

float gumbel_noise(double uniform) { return float(-std::log(-std::log1p(-uniform))); }

// An upper bound of the noise, which is at most -log(u) = -log((word + 0.5) / 2^32).
float noise_bound(uint32_t word) { return float(1 + std::countl_zero(word)) * 0.6932f + 1e-3f; }

// Among the tokens whose logit is at least `lowest`, the one with the largest sum of logit / temperature and noise.
int64_t sample_kept(const float* logits, int64_t vocab, float lowest, float temperature, int64_t position, int64_t seed) {
  auto of_piece = [=](int64_t begin, int64_t end) {
    Best best{-std::numeric_limits<float>::infinity(), begin};
    uint32_t words[4];
    int64_t quad = -1;  // the four tokens whose words these are
    for (int64_t token = begin; token < end; ++token) {
      float x = finite(logits[token]);
      if (x < lowest) continue;
      if (token / 4 != quad) philox(quad = token / 4, position, seed, words);
      uint32_t word = words[token % 4];
      // Logarithms only for the few tokens that may be the best.
      if (x / temperature + noise_bound(word) <= best.score) continue;
      float score = x / temperature + gumbel_noise((double(word) + 0.5) * 0x1p-32);
      if (score > best.score) best = {score, token};
    }
    return best;
  };
  return best_of(vocab, of_piece).token;
}

// The sampling parameters of a slot: SamplingParams of delegate/sampling.py.
struct Params {
  float temperature, top_p, min_p;
  int64_t top_k, seed;
};

int64_t sample(const float* logits, int64_t vocab, const Params& params, int64_t position) {
  Best likely = most_likely(logits, vocab);
  if (!(params.temperature > 0)) return likely.token;
  float lowest = lowest_kept(logits, vocab, likely.score, params.temperature, params.top_k, params.top_p, params.min_p);
  return sample_kept(logits, vocab, lowest, params.temperature, position, params.seed);
}

// Values of Processing of delegate/logits_processing.py.
constexpr int64_t OFF = 0, IN_STEP = 1, LATER = 2;

// What changes the logits of a slot: ProcessingTensors of delegate/logits_processing.py.
struct Processing {
  float repetition_penalty, presence_penalty, frequency_penalty;
  const int32_t *prompt_tokens, *output_counts, *allowed_tokens;
  const int64_t *bias_tokens, *bias_ends;
  const float* bias_values;
  int64_t biases;
};

bool has_bit(const int32_t* words, int64_t token) { return words[token / 32] >> (token % 32) & 1; }

// Writes the logits from which the token at `position` is sampled.
void process(const float* logits, int64_t vocab, const Processing& by, int64_t position, float* changed) {
  std::memcpy(changed, logits, vocab * sizeof(float));
  for (int64_t i = 0; i < by.biases; ++i) {
    int64_t token = by.bias_tokens[i];
    if (position < by.bias_ends[i] && token >= 0 && token < vocab) changed[token] += by.bias_values[i];
  }
  parallel(pieces_of(vocab), [&](int64_t piece) {
    for (int64_t token = piece * PIECE; token < std::min(vocab, (piece + 1) * PIECE); ++token) {
      float x = has_bit(by.allowed_tokens, token) ? changed[token] : -std::numeric_limits<float>::infinity();
      int32_t count = by.output_counts[token];
      bool repeated = has_bit(by.prompt_tokens, token) | (count > 0);
      // Products are rounded by themselves: as they stand, the compiler makes one operation of a product and a difference.
      float raised = x / by.repetition_penalty, lowered = std::fma(x, by.repetition_penalty, 0.0f);
      x = repeated ? (x > 0 ? raised : lowered) : x;
      x -= std::fma(by.frequency_penalty, float(count), 0.0f);
      changed[token] = x - (count > 0 ? by.presence_penalty : 0.0f);
    }
  });
}

// One row of `logprob_tensors` of delegate/logits_processing.py.
void logprobs_of(const float* logits, int64_t vocab, int64_t token, int64_t count, int32_t* numbers, float* values) {
  float largest = most_likely(logits, vocab).score, own = finite(logits[token]);
  float bound = not_above_kth(logits, vocab, count);
  Scratch<float> weights(vocab);
  float total = float(std::log(weigh(logits, vocab, largest, 1, weights)));
  std::vector<std::vector<Best>> found(pieces_of(vocab));
  std::vector<int64_t> reached(found.size());
  parallel(found.size(), [&](int64_t piece) {
    for (int64_t i = piece * PIECE; i < std::min(vocab, (piece + 1) * PIECE); ++i) {
      float x = finite(logits[i]);
      reached[piece] += x >= own;
      if (x >= bound) found[piece].push_back({x, i});
    }
  });
  std::vector<Best> all;
  for (const std::vector<Best>& piece : found) all.insert(all.end(), piece.begin(), piece.end());
  auto ahead = [](const Best& a, const Best& b) { return a.score > b.score || (a.score == b.score && a.token < b.token); };
  std::partial_sort(all.begin(), all.begin() + count, all.end(), ahead);
  numbers[0] = int32_t(std::accumulate(reached.begin(), reached.end(), int64_t(0)));
  values[0] = own - largest - total;
  for (int64_t place = 0; place < count; ++place) {
    numbers[1 + place] = int32_t(all[place].token);
    values[1 + place] = all[place].score - largest - total;
  }
}

}  // namespace

extern "C" AOTITorchError aoti_torch_cpu_logprobs(AtenTensorHandle logits_, AtenTensorHandle tokens_, int64_t count,
                                                  AtenTensorHandle* result_0, AtenTensorHandle* result_1) {
  return guarded("logprobs", [&] {
    Tensor logits(logits_);
    const int64_t *tokens = Tensor(tokens_).as<int64_t>(), rows = logits.size(0), vocab = logits.size(1);
    for (int64_t row = 0; row < rows; ++row)
      if (tokens[row] < 0 || tokens[row] >= vocab)
        throw std::out_of_range("token " + std::to_string(tokens[row]) + ": there are " + std::to_string(vocab));
    Result numbers({rows, 1 + count}, aoti_torch_dtype_int32()), values({rows, 1 + count}, aoti_torch_dtype_float32());
    auto of_row = [&](int64_t row) {
      int64_t place = row * (1 + count);
      logprobs_of(logits.as<float>() + row * vocab, vocab, tokens[row], count, numbers.tensor().as<int32_t>() + place,
                  values.tensor().as<float>() + place);
    };
    // All threads share the vocabulary of a single row.
    if (rows == 1)
      of_row(0);
    else
      parallel(rows, of_row, 64);
    numbers.give(result_0);
    values.give(result_1);
  });
}

extern "C" AOTITorchError aoti_torch_cpu_sample_next(
    AtenTensorHandle logits_, AtenTensorHandle positions_, AtenTensorHandle slots_, AtenTensorHandle token_,
    AtenTensorHandle position_, AtenTensorHandle temperature, AtenTensorHandle top_k, AtenTensorHandle top_p,
    AtenTensorHandle seed, AtenTensorHandle min_p, AtenTensorHandle processed_, AtenTensorHandle repetition_penalty,
    AtenTensorHandle presence_penalty, AtenTensorHandle frequency_penalty, AtenTensorHandle prompt_tokens,
    AtenTensorHandle output_counts, AtenTensorHandle bias_tokens, AtenTensorHandle bias_values, AtenTensorHandle bias_ends,
    AtenTensorHandle allowed_tokens, int32_t late, AtenTensorHandle* result) {
  return guarded("sample_next", [&] {
    Tensor logits(logits_), slots(slots_), token(token_);
    int64_t rows = logits.size(0), vocab = logits.size(1), count = token.size(0);
    const int64_t *slot = slots.as<int64_t>(), *positions = Tensor(positions_).as<int64_t>();
    for (int64_t row = 0; row < rows; ++row) check_slot(slot[row], count);
    const int64_t* processed = Tensor(processed_).as<int64_t>();
    int32_t* counts = Tensor(output_counts).as<int32_t>();
    auto changes = [&](int64_t of) { return processed[of] == IN_STEP || (late && processed[of] != OFF); };
    auto processing = [&](int64_t of) {
      int64_t words = (vocab + 31) / 32, biases = Tensor(bias_tokens).size(1);
      return Processing{Tensor(repetition_penalty).as<float>()[of], Tensor(presence_penalty).as<float>()[of],
                        Tensor(frequency_penalty).as<float>()[of], Tensor(prompt_tokens).as<int32_t>() + of * words,
                        counts + of * vocab, Tensor(allowed_tokens).as<int32_t>() + of * words,
                        Tensor(bias_tokens).as<int64_t>() + of * biases, Tensor(bias_ends).as<int64_t>() + of * biases,
                        Tensor(bias_values).as<float>() + of * biases, biases};
    };
    auto params = [&](int64_t of) {
      bool waits = processed[of] == LATER && !late;
      return Params{waits ? 0 : Tensor(temperature).as<float>()[of], Tensor(top_p).as<float>()[of], Tensor(min_p).as<float>()[of],
                 Tensor(top_k).as<int64_t>()[of], Tensor(seed).as<int64_t>()[of]};
    };
    Result made({rows}, aoti_torch_dtype_int64());
    int64_t* sampled = made.tensor().as<int64_t>();
    auto sample_row = [&](int64_t row) {
      sampled[row] = 0;
      if (slot[row] < 0) return;
      const float* x = logits.as<float>() + row * vocab;
      int64_t position = positions[row] + 1;
      bool change = changes(slot[row]);
      Scratch<float> changed(change ? vocab : 0);
      if (change) process(x, vocab, processing(slot[row]), position, changed);
      sampled[row] = sample(change ? changed : x, vocab, params(slot[row]), position);
    };
    // All threads share the vocabulary of a single row.
    if (rows == 1)
      sample_row(0);
    else
      parallel(rows, sample_row, 64);
    for (int64_t row = 0; row < rows; ++row) {
      if (slot[row] < 0) continue;
      token.as<int64_t>()[slot[row]] = sampled[row];
      Tensor(position_).as<int64_t>()[slot[row]] = positions[row] + 1;
      // Of a slot with several rows, the last one's token is kept.
      if (changes(slot[row]) && std::find(slot + row + 1, slot + rows, slot[row]) == slot + rows)
        ++counts[slot[row] * vocab + sampled[row]];
    }
    made.give(result);
  });
}

}  // namespace ostinato
