// Plain C++, for processors without the other instruction sets.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

constexpr const char* kName = "plain";
constexpr int kTokenTile = 4;  // tokens for which weights are unpacked once
constexpr int kWidth = 16;

struct Bytes {
  uint8_t v[4 * kWidth];
};
struct Ints {
  int32_t v[kWidth];
};
struct Floats {
  float v[kWidth];
};

template <class To, class Function>
inline To Each(Function function) {
  To to;
  for (int i = 0; i < static_cast<int>(sizeof(to.v) / sizeof(to.v[0])); ++i) to.v[i] = function(i);
  return to;
}

inline Bytes LoadBytes(const uint8_t* p) {
  return Each<Bytes>([&](int i) { return p[i]; });
}
inline Bytes LowNibbles(Bytes a) {
  return Each<Bytes>([&](int i) { return static_cast<uint8_t>(a.v[i] & 15); });
}
inline Bytes HighNibbles(Bytes a) {
  return Each<Bytes>([&](int i) { return static_cast<uint8_t>(a.v[i] >> 4); });
}
inline Bytes Lookup(const uint8_t* table, Bytes index) {
  return Each<Bytes>([&](int i) { return table[index.v[i]]; });
}
inline Ints Zeros() { return {}; }
inline Ints Add(Ints a, Ints b) {
  return Each<Ints>([&](int i) { return a.v[i] + b.v[i]; });
}
template <bool kSmall>
inline Ints Dot(Ints acc, Bytes w, int32_t quad) {
  int8_t x[4];
  std::memcpy(x, &quad, 4);
  return Each<Ints>([&](int i) {
    const uint8_t* own = w.v + 4 * i;
    return acc.v[i] + own[0] * x[0] + own[1] * x[1] + own[2] * x[2] + own[3] * x[3];
  });
}
inline Floats ToFloats(Ints a) {
  return Each<Floats>([&](int i) { return static_cast<float>(a.v[i]); });
}
inline Floats Broadcast(float a) {
  return Each<Floats>([&](int) { return a; });
}
inline Floats Multiply(Floats a, Floats b) {
  return Each<Floats>([&](int i) { return a.v[i] * b.v[i]; });
}
inline Floats Fma(Floats a, Floats b, Floats c) {
  return Each<Floats>([&](int i) { return std::fma(a.v[i], b.v[i], c.v[i]); });
}
inline float FloatOfBits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
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
inline Floats LoadFloats(const float* p) {
  return Each<Floats>([&](int i) { return p[i]; });
}
inline Floats LoadHalves(const uint16_t* p) {
  return Each<Floats>([&](int i) { return FloatOfHalf(p[i]); });
}
inline Floats LoadBFloats(const uint16_t* p) {
  return Each<Floats>([&](int i) { return FloatOfBits(static_cast<uint32_t>(p[i]) << 16); });
}
inline Floats LoadUint8(const uint8_t* p) {
  return Each<Floats>([&](int i) { return static_cast<float>(p[i]); });
}
inline Floats LoadInt8(const int8_t* p) {
  return Each<Floats>([&](int i) { return static_cast<float>(p[i]); });
}
inline void Store(float* p, Floats a) { std::memcpy(p, a.v, sizeof(a.v)); }
inline float SumLanes(Floats a) {
  float sum = 0.f;
  for (float each : a.v) sum += each;
  return sum;
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
