// Plain C++, for processors without the other instruction sets.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#define NO_UNROLL  // kernel.h; without registers for vectors it only takes longer to compile

namespace {

constexpr const char* kName = "plain";
constexpr int kTileTokens = 2;

struct Bytes {
  uint8_t v[64];
};
struct Ints {
  int32_t v[16];
};
struct Floats {
  float v[16];
};

template <class To, class Function>
inline To Each(Function function) {
  To to;
  for (int i = 0; i < (int)(sizeof(to.v) / sizeof(to.v[0])); ++i) to.v[i] = function(i);
  return to;
}

inline Bytes LoadBytes(const uint8_t* p) {
  return Each<Bytes>([&](int i) { return p[i]; });
}
inline Bytes LowNibbles(Bytes a) {
  return Each<Bytes>([&](int i) { return (uint8_t)(a.v[i] & 15); });
}
inline Bytes HighNibbles(Bytes a) {
  return Each<Bytes>([&](int i) { return (uint8_t)(a.v[i] >> 4); });
}
inline Bytes Lookup(const uint8_t* table, Bytes index) {
  return Each<Bytes>([&](int i) { return table[index.v[i]]; });
}

constexpr int kInt8Bias = 0;
typedef Bytes Small;  // weights from 0 to 24
struct Wide {         // int8
  int8_t v[64];
};
inline Wide Widened(Bytes a) {
  return Each<Wide>([&](int i) { return (int8_t)(a.v[i] ^ 128); });  // stored raised by 128
}

typedef Ints NibbleSums;
inline void Begin(Ints* sums) { *sums = Ints{}; }
inline Ints End(Ints high, Ints low, const int32_t* start) {
  return Each<Ints>([&](int i) { return 256 * high.v[i] + low.v[i] + *start; });
}
// sum + four products in each lane; w is Small or Wide
template <class Weights>
inline Ints Dot(Ints sum, const Weights& w, const int8_t* x) {
  return Each<Ints>([&](int i) {
    const auto* own = w.v + 4 * i;
    return sum.v[i] + own[0] * x[0] + own[1] * x[1] + own[2] * x[2] + own[3] * x[3];
  });
}

inline Floats ToFloats(Ints a) {
  return Each<Floats>([&](int i) { return (float)a.v[i]; });
}
inline Floats Broadcast(float a) {
  return Each<Floats>([&](int) { return a; });
}
inline Floats Multiply(Floats a, Floats b) {
  return Each<Floats>([&](int i) { return a.v[i] * b.v[i]; });
}
inline Floats Divide(Floats a, Floats b) {
  return Each<Floats>([&](int i) { return a.v[i] / b.v[i]; });
}
inline Floats Fma(Floats a, Floats b, Floats c) {
  return Each<Floats>([&](int i) { return __builtin_fmaf(a.v[i], b.v[i], c.v[i]); });
}

inline float FloatOfBits(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}
// With integers alone: XLA's threads flush subnormal numbers to zero.
inline float FloatOfHalf(uint16_t half) {
  const uint32_t sign = (half & 0x8000u) << 16;
  uint32_t exponent = half >> 10 & 31, mantissa = half & 0x3ffu;
  if (exponent == 31) return FloatOfBits(sign | 0x7f800000u | mantissa << 13);
  if (exponent == 0) {
    const float magnitude = static_cast<float>(mantissa) * FloatOfBits(103u << 23);  // 2^-24
    return sign ? -magnitude : magnitude;
  }
  return FloatOfBits(sign | (exponent + 112) << 23 | mantissa << 13);
}
// Two inputs of each output: adjacent lanes have both, the first array outputs 0 to 7.
struct Pairs {
  Floats first, second;
};
// As float16, whose exponents are 8 less. NaN has all bits of the exponent and the mantissa: the sum
// reaches the next one.
inline float FloatOfFp8(uint8_t value) {
  const uint32_t half = (value & 0x80u) << 8 | (value & 0x7fu) << 7;
  return FloatOfHalf(static_cast<uint16_t>(half | ((half + 0x80u) & 0x4000u)));
}
// Inputs kOdd and kOdd + 2 of four in fp8, times 2^-8.
template <int kOdd>
inline Pairs FloatsOfFp8(const Bytes& a) {
  const auto half = [&](const uint8_t* v) {
    return Each<Floats>([&](int i) { return FloatOfFp8(v[i / 2 * 4 + i % 2 * 2 + kOdd]); });
  };
  return {half(a.v), half(a.v + 32)};
}
inline Floats BroadcastTwo(const float* p) {
  return Each<Floats>([&](int i) { return p[i % 2]; });
}
inline Floats SumPairs(const Pairs& x) {
  return Each<Floats>([&](int i) {
    const float* two = (i < 8 ? x.first.v : x.second.v) + i % 8 * 2;
    return two[0] + two[1];
  });
}
inline Floats LoadFloats(const float* p) {
  return Each<Floats>([&](int i) { return p[i]; });
}
inline Floats LoadHalves(const uint16_t* p) {
  return Each<Floats>([&](int i) { return FloatOfHalf(p[i]); });
}
inline Floats LoadBFloats(const uint16_t* p) {
  return Each<Floats>([&](int i) { return FloatOfBits((uint32_t)p[i] << 16); });
}
inline Floats LoadUint8(const uint8_t* p) {
  return Each<Floats>([&](int i) { return (float)p[i]; });
}
inline Floats LoadInt8(const int8_t* p) {
  return Each<Floats>([&](int i) { return (float)p[i]; });
}
inline void Store(float* p, Floats a) { __builtin_memcpy(p, a.v, sizeof(a.v)); }
inline float SumLanes(Floats a) {
  float sum = 0.f;
  for (float each : a.v) sum += each;
  return sum;
}
inline float MaxLanes(Floats a) {
  float largest = a.v[0];
  for (float each : a.v) largest = each > largest ? each : largest;
  return largest;
}
constexpr int kDots = 4;  // products of a query with keys at a time
inline Floats SumEach(const Floats* x) {
  float sums[16];
  for (int i = 0; i < 16; ++i) sums[i] = SumLanes(x[i]);
  return LoadFloats(sums);
}
inline Floats Max(Floats a, Floats b) {
  return Each<Floats>([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
inline Ints Round(Floats a) {
  return Each<Ints>([&](int i) { return static_cast<int32_t>(std::nearbyint(a.v[i])); });
}
inline Floats PowerOfTwo(Ints a) {
  return Each<Floats>([&](int i) { return FloatOfBits(static_cast<uint32_t>(a.v[i] + 127) << 23); });
}

}  // namespace
