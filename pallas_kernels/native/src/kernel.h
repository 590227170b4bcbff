// The call that all variants of the kernel compute, and the layout of its arrays.
//
// Outputs are in tiles of 16, K inputs in groups that share a scale. In memory, for each tile:
//
//   values   int4, fp4: for 8 inputs 64 bytes; byte 4 * o + j has input j of output o in its low
//            half and input j + 4 in its high half
//            int8: for 4 inputs 64 bytes; byte 4 * o + j is 128 + input j of output o
//   scales, zeros, offsets   [groups, 16]
//   supers                   float16[groups of supers, 1 or 2, 16]
//
// A weight of value v is scale * (v - zero) + offset: see quantised.py. Activations are int8 with
// one scale for 32 inputs.
#pragma once

#include <cstdint>

namespace jaxinfer {

constexpr int kLanes = 16;  // outputs of a tile
constexpr int kBlock = 32;  // inputs that share a scale of activations

enum class Kind : int { kInt4 = 0, kInt8 = 1, kFp4 = 2 };
enum class Factor : int { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2, kUint8 = 3, kInt8 = 4 };

struct Matrix {
  Kind kind;
  int64_t outputs, inputs, group, super_group;  // super_group: 0 without supers
  Factor factor;                                // of scales and offsets
  const uint8_t* values;
  const void* scales;
  const uint8_t* zeros;    // or null
  const void* offsets;     // or null
  const uint16_t* supers;  // or null
};

struct Tokens {
  int64_t count;
  const int8_t* values;  // [count, inputs]
  const float* scales;   // [count, inputs / 32]
  const float* sums;     // [count, inputs / group]: of the activations of a group
};

// Computes one tile of 16 outputs for all tokens: out[t * stride + o].
using TileFunction = void (*)(const Matrix&, int64_t tile, const Tokens&, float* out,
                              int64_t stride);
// Quantises a row of activations to int8 in blocks of 32, and sums up groups.
using QuantiseFunction = void (*)(const float* x, int64_t inputs, int64_t group, int8_t* values,
                                  float* scales, float* sums);

// The paged keys and values of a layer: [pages, page_size, heads, head_dim].
struct Pages {
  const float *keys, *values;
  int64_t page_size, heads, head_dim;
};

// Attention of one query and the queries that share its kv head: q and out [queries, head_dim].
// The context is positions oldest to length - 1; position p is in page table[p / page_size].
using AttendFunction = void (*)(const Pages&, int64_t head, const int32_t* table, int64_t oldest,
                                int64_t length, const float* q, int64_t queries, float scale,
                                float* out);

struct Variant {
  const char* name;
  TileFunction tile;
  QuantiseFunction quantise;
  AttendFunction attend;
};

}  // namespace jaxinfer
