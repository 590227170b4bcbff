// The calls that all variants of the kernels compute, and the layout of their arrays.
//
// Outputs of a quantised matrix are in tiles of 16, K inputs in groups that share a scale. In memory,
// for each tile:
//
//   values   int4, fp4: for 8 inputs 64 bytes; byte 4 * o + j has input j of output o in its low
//            half and input j + 4 in its high half
//            int8: for 4 inputs 64 bytes; byte 4 * o + j is 128 + input j of output o
//            fp8: as int8; the byte is input j of output o with the other sign
//   scales, zeros, offsets   [groups, 16]; scales of blocks of outputs [groups], for each block
//   supers                   float16[groups of supers, 1 or 2, 16]
//
// A weight of value v is scale * (v - zero) + offset: see quantised.py. Activations are integers of 16
// bits, 256 * high + low of two int8, with one scale for a block of 32 inputs, or of 16 where weights
// have groups of 16. With fp8 weights, whose values have exponents, activations stay in float32.
#pragma once

#include <cstdint>

#ifdef NO_UNROLL
#define UNROLL
#elif defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

namespace jaxinfer {

constexpr int kLanes = 16;      // outputs of a tile
constexpr int kMostTokens = 8;  // of a tile of tokens, in any variant

// kFloat: only of experts; kFp8: without zeros, offsets and supers
enum class Kind : int { kInt4 = 0, kInt8 = 1, kFp4 = 2, kFloat = 3, kFp8 = 4 };
enum class Factor : int { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2, kUint8 = 3, kInt8 = 4 };

// One GEMM: out[t, o] = sum over k of x[t, k] * w[o, k].
struct GemmCall {
  Kind kind;
  bool swiglu;                      // the first half of the matrix are gates, the second ups
  int64_t tokens, inputs, outputs;  // outputs: those of the result
  int64_t group, super_group;       // super_group: 0 without supers
  int64_t block_outputs;            // that share scales, in float32 if they are several
  Factor factor;                    // of scales and offsets
  const int32_t* rows;              // of x and out, of each token; null: token t is row t
  const float* x;                   // [rows, inputs]
  const uint8_t* values;
  const void* scales;
  const uint8_t* zeros;    // or null
  const void* offsets;     // or null
  const uint16_t* supers;  // or null
  float* out;              // [rows, outputs]
  uint8_t* workspace;      // WorkspaceBytes
};

inline int64_t RowOf(const GemmCall& call, int64_t token) {
  return call.rows == nullptr ? token : call.rows[token];
}

// Activations that share a scale.
inline int64_t BlockOf(const GemmCall& call) { return call.group % 32 == 0 ? 32 : 16; }

// A tile of n tokens is stored as K / block records: n * block high and n * block low bytes of
// activations, n scales in float32, n start values of sums in int32 (minus the weights' bias times the
// sum of activations). For fp8 weights it is stored as K / 4 records of n tokens: inputs 0, 2, 1 and 3
// of four.
constexpr int64_t BytesOfBlock(int64_t block) { return 2 * block + 8; }
inline int64_t BytesOfToken(const GemmCall& call) {
  if (call.kind == Kind::kFp8) return call.inputs * 4;
  return call.inputs / BlockOf(call) * BytesOfBlock(BlockOf(call));
}

// Tokens of the next tile when `left` remain: `most`, or the power of two that holds the rest.
inline int64_t TileSize(int64_t left, int64_t most) {
  int64_t size = 1;
  while (size < most && size < left) size *= 2;
  return size;
}

// Tokens including the padding of the last tile, in any variant.
inline int64_t PaddedTokens(const GemmCall& call) {
  return (call.tokens + kMostTokens - 1) / kMostTokens * kMostTokens;
}

// The workspace holds records, then the sums of the activations of each group [groups, n] of each
// tile of tokens.
inline float* GroupSums(const GemmCall& call) {
  return reinterpret_cast<float*>(call.workspace + PaddedTokens(call) * BytesOfToken(call));
}
inline int64_t WorkspaceBytes(const GemmCall& call) {
  return PaddedTokens(call) * (BytesOfToken(call) + call.inputs / call.group * 4);
}
// Floats that a tile of outputs needs for its factors.
inline int64_t FactorFloats(const GemmCall& call) { return call.inputs / call.group * kLanes * 4; }

// Writes the records of `count` tokens from `first` on, padded to a tile of `size`.
using QuantiseFunction = void (*)(const GemmCall&, int64_t first, int64_t count, int64_t size,
                                  uint8_t* records, float* group_sums);
// Computes a tile of outputs for all tokens.
using TileFunction = void (*)(const GemmCall&, int64_t tile, float* factors);
// See experts.stack.Activation; a limit may be infinite.
enum class Gate : int { kSilu = 0, kGeluTanh = 1, kRelu2 = 2 };
struct Activation {
  Gate gate;
  float gate_limit, limit, alpha, shift;
  // Outputs of the first product for each hidden value: a gate and an up, or one.
  int64_t halves() const { return gate == Gate::kRelu2 ? 1 : 2; }
};
// The hidden values [width] of a row of gates, then ups (or of one half); the bias, or null, is of all.
using ActivateFunction = void (*)(const Activation&, const float* row, const float* bias,
                                  int64_t width, float* hidden);

// The paged keys and values of a layer: [pages, page_size, heads, head_dim]. Of values the first
// value_dim components count.
struct Pages {
  const float *keys, *values;
  int64_t page_size, heads, head_dim, value_dim;
};

// Attention of consecutive tokens of a row, each with the queries that share a kv head. Position p is
// in page table[p / page_size].
struct AttendCall {
  const Pages* pages;
  const int32_t* table;
  int64_t head;            // of keys and values
  int64_t tokens, length;  // the context of the first token, with itself; 0: it yields zeros
  int64_t window;          // the last positions that a token sees; 0: all
  int64_t group;           // queries of a token
  int64_t stride, out_stride;  // floats from one token to the next
  const float *q, *sinks;  // the sinks [group] are scores of a key without a value, or null
  const float* slopes;     // [group], or null: a score loses so much for each position of distance
  float* out;
  float scale, cap;  // 0: without a cap, else a score x becomes cap * tanh(x / cap)
};
constexpr int64_t kMostQueries = 32;  // of a call
constexpr int64_t kMostAttending = 16;  // tokens of a call; each sees some blocks that others do not
using AttendFunction = void (*)(const AttendCall&);

// One draw: see sample.api.
struct DrawCall {
  const float* logits;  // [vocab]
  int64_t vocab;
  float temperature;
  int32_t top_k;
  float top_p, min_p;
  uint32_t seed_low, seed_high, position;
  const uint32_t* mask;  // or null; bit t % 32 of word t / 32 is 0 if token t may not be drawn
};
using DrawFunction = int32_t (*)(const DrawCall&);

// A token of the gated delta rule in each row: see delta_decode.ref.
struct DeltaCall {
  int64_t channels, key_heads, heads, key_dim, value_dim, width;  // C, K, V, Dk, Dv, W
  bool by_channel, sigmoid;  // each component of keys has a decay; the gate's activation, else SiLU
  const float *qkv, *gates, *z, *conv, *decay, *norm;
  const int32_t *positions, *rows, *keeps;
  float *out, *states, *convs;
  float eps;
};
inline int64_t Padded(int64_t floats) { return (floats + kLanes - 1) / kLanes * kLanes; }
// Floats that a head needs for its vectors.
inline int64_t DeltaFloats(const DeltaCall& call) {
  return 4 * Padded(call.key_dim) + 4 * Padded(call.value_dim);
}
// Computes one head of one row, head + V * row, and makes the state of the next one ready.
using DeltaFunction = void (*)(const DeltaCall&, int64_t unit, int64_t next, float* scratch);

// The convolution of a token in each row, with SiLU, and a token of Mamba-2's state space: see
// ssd_decode.ref. Widths are multiples of 16.
struct SsdCall {
  int64_t heads, groups, width, state_dim, channels, taps;  // H, G, P, N, C, W; no taps: no convolution
  const float *mixed;           // [B, C], of the state space after the convolution
  const float *steps, *decay;   // steps or null
  const float *conv, *bias;     // the bias or null
  const int32_t *positions, *rows, *keeps;
  float *convolved;             // [B, C]
  float *out, *states, *convs;
  float lowest, highest;
};
using ConvolveFunction = void (*)(const SsdCall&, int64_t row, int64_t first, int64_t end);
// Computes one head of one row, head + H * row.
using SsdFunction = void (*)(const SsdCall&, int64_t unit);
constexpr int64_t kMostTaps = 8;

// A GEMM of floats: out[t, o] = sum over k of x[t, k] * w[k, o], in one order of k for any tokens.
struct FloatGemm {
  int64_t tokens, inputs, outputs;
  int64_t width;  // outputs of a part, a multiple of 16
  bool by_output;  // weights are [outputs, inputs], else [inputs, outputs]
  const float *x, *w;
  float* out;  // [tokens, outputs]
};
constexpr int64_t kGemmInputs = 256;  // of a block of weights
constexpr int64_t kManyTokens = 32;  // for which a block of weights is copied
// Outputs of a part: of many tokens so few that a block of weights stays in L2, of few tokens more, as
// longer pieces of memory are read faster, if each thread has several parts.
inline int64_t PartWidth(int64_t tokens, int64_t outputs, int64_t threads) {
  return tokens < kManyTokens && outputs >= 4 * 256 * threads ? 256 : 64;
}
// Floats that a part needs.
inline int64_t ScratchFloats(const FloatGemm& call) {
  return call.by_output ? 0 : (kGemmInputs + 2 * call.tokens) * call.width;
}
using FloatGemmFunction = void (*)(const FloatGemm&, int64_t part, float* scratch);

struct Variant {
  const char* name;
  int64_t most_tokens;  // of a tile of tokens
  TileFunction tile;
  QuantiseFunction quantise;
  AttendFunction attend;
  TileFunction float_tile;  // of weights float32[outputs, inputs]
  ActivateFunction activate;
  DrawFunction draw;
  DeltaFunction delta;
  ConvolveFunction convolve;
  SsdFunction ssd;
  FloatGemmFunction float_gemm;
};

}  // namespace jaxinfer
