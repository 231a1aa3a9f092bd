// The operators of linear/linear_cpu.py: products, with the operations before and behind them.
#include "product_cpu.h"
#include "rows_cpu.h"

namespace ostinato {
namespace {

// Rows of x, normed.
Inputs normed(const Weight& weight, const Tensor& x, const Tensor& norm, double eps) {
  int64_t columns = weight.columns;
  Inputs inputs(weight, x.size(0), 0, true);
  fill(inputs, columns, [&](int64_t row, float* to) {
    to_floats(x.array().from(row * columns), columns, to);
    apply_norm(to, columns, norm.as<float>(), eps);
  });
  return inputs;
}

Floats plus(Floats x, const Tensor& bias, int64_t column, int64_t count) {
  return bias ? x + bias.array().load(column, count) : x;
}

// A causal depthwise convolution: its weight, and the last inputs of each session, [slots, width - 1, channels].
struct Convolution {
  const Array weight, state;
  const int64_t channels, width;

  // Replaces the inputs in y [rows, stride] by the SiLU of their convolution, for `count` channels from `channel` on, and
  // updates the states.
  void apply(const Array& y, const std::vector<Run>& runs, int64_t stride, int64_t channel, int64_t count) const {
    int64_t behind = width - 1;
    Floats few[2 * USUAL_WIDTH];
    Scratch<Floats> many(width > USUAL_WIDTH ? 2 * width : 0);
    Floats *window = many ? (Floats*)many : few, *taps = window + width;
    float lanes[LANES] = {};
    for (int64_t tap = 0; tap < width; ++tap) {
      for (int64_t lane = 0; lane < count; ++lane) lanes[lane] = weight[(channel + lane) * width + tap];
      taps[tap] = load(lanes);
    }
    for (const Run& run : runs) {
      Array kept = state.from(run.slot * behind * channels + channel);
      for (int64_t i = 0; i < behind; ++i) window[i] = run.fresh ? zeros() : kept.load(i * channels, count);
      for (int64_t row = run.begin; row < run.end; ++row) {
        window[behind] = y.load(row * stride + channel, count);
        Floats mixed = zeros();
        for (int64_t tap = 0; tap < width; ++tap) mixed = fma(window[tap], taps[tap], mixed);
        y.store(row * stride + channel, silu(mixed), count);
        for (int64_t i = 0; i < behind; ++i) window[i] = window[i + 1];
      }
      for (int64_t i = 0; i < behind; ++i) kept.store(i * channels, window[i], count);
    }
  }

  static constexpr int64_t USUAL_WIDTH = 8;
};

}  // namespace

extern "C" AOTITorchError aoti_torch_cpu_norm_linear(AtenTensorHandle x_, AtenTensorHandle norm, double eps,
                                                     AtenTensorHandle values, AtenTensorHandle* scale, AtenTensorHandle* minimum,
                                                     AtenTensorHandle* bias_, const char* form, int32_t dtype,
                                                     AtenTensorHandle* result) {
  return guarded("norm_linear", [&] {
    Tensor x(x_), bias(bias_);
    Weight weight{Tensor(values), Tensor(scale), Tensor(minimum), form};
    Result made({x.size(0), weight.rows}, dtype);
    Array out = made.array();
    multiply(weight, normed(weight, x, Tensor(norm), eps), [&](int64_t row, int64_t column, Floats y, int64_t count) {
      out.store(row * weight.rows + column, plus(y, bias, column, count), count);
    });
    made.give(result);
  });
}

extern "C" AOTITorchError aoti_torch_cpu_norm_swiglu(AtenTensorHandle x_, AtenTensorHandle norm, double eps,
                                                     AtenTensorHandle values, AtenTensorHandle* scale, AtenTensorHandle* minimum,
                                                     AtenTensorHandle* bias_, const char* form, AtenTensorHandle* result) {
  return guarded("norm_swiglu", [&] {
    Tensor x(x_), bias(bias_);
    Weight weight{Tensor(values), Tensor(scale), Tensor(minimum), form};
    int64_t half = weight.rows / 2;
    Result made({x.size(0), half}, x.dtype);
    Array out = made.array();
    Inputs inputs = normed(weight, x, Tensor(norm), eps);
    multiply_pairs(weight, inputs, [&](int64_t row, int64_t column, Floats gate, Floats up, int64_t count) {
      gate = plus(gate, bias, column, count);
      up = plus(up, bias, half + column, count);
      out.store(row * half + column, silu(gate) * up, count);
    });
    made.give(result);
  });
}

extern "C" AOTITorchError aoti_torch_cpu_norm_linear_conv(AtenTensorHandle x_, AtenTensorHandle norm_, double eps,
                                                          AtenTensorHandle values, AtenTensorHandle* scale,
                                                          AtenTensorHandle* minimum, AtenTensorHandle* bias_, const char* form,
                                                          AtenTensorHandle gates_, AtenTensorHandle conv_,
                                                          AtenTensorHandle state_, AtenTensorHandle positions,
                                                          AtenTensorHandle slots, AtenTensorHandle* mixed,
                                                          AtenTensorHandle* gated) {
  return guarded("norm_linear_conv", [&] {
    Tensor x(x_), norm(norm_), bias(bias_), taps(conv_), state(state_);
    Weight weight{Tensor(values), Tensor(scale), Tensor(minimum), form}, gates{Tensor(gates_), {}, {}, ""};
    int64_t rows = x.size(0), columns = weight.rows, channels = state.size(2);
    Result made_mixed({rows, columns}, x.dtype), made_gated({rows, gates.rows}, aoti_torch_dtype_float32());
    Array out = made_mixed.array(), gate_out = made_gated.array();
    std::vector<Run> runs = runs_of(Tensor(slots), Tensor(positions), state.size(0));
    Convolution conv{taps.array(), state.array(), channels, taps.size(-1)};
    bool at_once = rows == 1;
    multiply(weight, normed(weight, x, norm, eps), [&](int64_t row, int64_t column, Floats y, int64_t count) {
      out.store(row * columns + column, plus(y, bias, column, count), count);
      if (at_once && column < channels) conv.apply(out, runs, columns, column, std::min(count, channels - column));
    });
    if (!at_once) {
      constexpr int64_t TOGETHER = 4 * LANES;
      parallel((channels + TOGETHER - 1) / TOGETHER, [&](int64_t task) {
        int64_t end = std::min(channels, (task + 1) * TOGETHER);
        for (int64_t channel = task * TOGETHER; channel < end; channel += LANES)
          conv.apply(out, runs, columns, channel, std::min(LANES, end - channel));
      });
    }
    multiply(gates, normed(gates, x, norm, eps), [&](int64_t row, int64_t column, Floats y, int64_t count) {
      gate_out.store(row * gates.rows + column, y, count);
    });
    made_mixed.give(mixed);
    made_gated.give(gated);
  });
}

extern "C" AOTITorchError aoti_torch_cpu_linear_add(AtenTensorHandle x_, AtenTensorHandle values, AtenTensorHandle* scale,
                                                    AtenTensorHandle* minimum, AtenTensorHandle* bias_, const char* form,
                                                    AtenTensorHandle residual_, AtenTensorHandle* squares_, double eps,
                                                    AtenTensorHandle* result) {
  return guarded("linear_add", [&] {
    Tensor x(x_), bias(bias_), residual(residual_), squares(squares_);
    Weight weight{Tensor(values), Tensor(scale), Tensor(minimum), form};
    int64_t rows = x.size(0), columns = weight.columns;
    Result made({rows, weight.rows}, residual.dtype);
    Array out = made.array(), before = residual.array();
    Inputs inputs(weight, rows, 0, true);
    fill(inputs, columns, [&](int64_t row, float* to) {
      to_floats(x.array().from(row * columns), columns, to);
      if (!squares) return;
      int64_t heads = squares.size(0) / rows, parts = squares.size(1), size = columns / heads;
      for (int64_t head = 0; head < heads; ++head) {
        const float* of_head = squares.as<float>() + (row * heads + head) * parts;
        float total = 0;
        for (int64_t part = 0; part < parts; ++part) total += of_head[part];
        float factor = 1 / std::sqrt(total / size + float(eps));
        for (int64_t i = head * size; i < (head + 1) * size; ++i) to[i] *= factor;
      }
    });
    multiply(weight, inputs, [&](int64_t row, int64_t column, Floats y, int64_t count) {
      int64_t at = row * weight.rows + column;
      out.store(at, before.load(at, count) + plus(y, bias, column, count), count);
    });
    made.give(result);
  });
}

}  // namespace ostinato
