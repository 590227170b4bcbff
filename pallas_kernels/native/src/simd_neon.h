// Four vectors of 128 bits with dot products (Armv8.2 dotprod: Apple M1, Graviton 2 and later).
#pragma once

#include <arm_neon.h>
#include <cstdint>

namespace {

constexpr const char* kName = "neon-dotprod";
constexpr int kTileTokens = 2;  // 16 sums, 8 accumulators, 4 weights of the 32 registers

struct Bytes {
  uint8x16_t v[4];
};
struct Ints {
  int32x4_t v[4];
};
struct Floats {
  float32x4_t v[4];
};

template <class To, class Function>
inline To Each(Function function) {
  To to;
  for (int i = 0; i < 4; ++i) to.v[i] = function(i);
  return to;
}

inline Bytes LoadBytes(const uint8_t* p) {
  return Each<Bytes>([&](int i) { return vld1q_u8(p + 16 * i); });
}
inline Bytes LowNibbles(Bytes a) {
  return Each<Bytes>([&](int i) { return vandq_u8(a.v[i], vdupq_n_u8(15)); });
}
inline Bytes HighNibbles(Bytes a) {
  return Each<Bytes>([&](int i) { return vshrq_n_u8(a.v[i], 4); });
}
inline Bytes Lookup(const uint8_t* table, Bytes index) {
  const uint8x16_t row = vld1q_u8(table);
  return Each<Bytes>([&](int i) { return vqtbl1q_u8(row, index.v[i]); });
}

// The instruction takes signed weights.
constexpr int kInt8Bias = 0;
typedef Bytes Small;  // weights from 0 to 24
typedef Bytes Wide;   // int8
inline Wide Widened(Bytes a) {  // stored raised by 128
  return Each<Wide>([&](int i) { return veorq_u8(a.v[i], vdupq_n_u8(128)); });
}

typedef Ints NibbleSums;
inline void Begin(Ints* sums) {
  *sums = Each<Ints>([&](int) { return vdupq_n_s32(0); });
}
inline Ints End(Ints high, Ints low, const int32_t* start) {
  const int32x4_t each = vdupq_n_s32(*start);
  return Each<Ints>(
      [&](int i) { return vaddq_s32(vshlq_n_s32(high.v[i], 8), vaddq_s32(low.v[i], each)); });
}
// sum + four products in each lane
inline Ints Dot(Ints sum, const Bytes& w, const int8_t* x) {
  const int8x16_t each = vreinterpretq_s8_s32(vdupq_n_s32(*(const int32_t*)x));
  return Each<Ints>(
      [&](int i) { return vdotq_s32(sum.v[i], vreinterpretq_s8_u8(w.v[i]), each); });
}

// Two inputs of each output: adjacent lanes have both, the first vectors outputs 0 to 7.
struct Pairs {
  Floats first, second;
};
// Inputs kOdd and kOdd + 2 of four in fp8, as float16: exponents are 8 less. XLA's threads take
// subnormal numbers in float32 for zero, in conversions from float16 they do not.
template <int kOdd>
inline Pairs FloatsOfFp8(const Bytes& a) {
  float32x4_t all[8];
  for (int i = 0; i < 4; ++i) {
    const uint16x8_t two = vreinterpretq_u16_u8(a.v[i]);
    const int16x8_t upper = vreinterpretq_s16_u16(kOdd ? two : vshlq_n_u16(two, 8));
    const uint16x8_t half =
        vandq_u16(vreinterpretq_u16_s16(vshrq_n_s16(upper, 1)), vdupq_n_u16(0xbf80));
    // NaN has all bits of the exponent and the mantissa: the sum reaches the next one
    const uint16x8_t sum = vaddq_u16(half, vdupq_n_u16(0x80));
    const float16x8_t bits =
        vreinterpretq_f16_u16(vorrq_u16(half, vandq_u16(sum, vdupq_n_u16(0x4000))));
    all[2 * i] = vcvt_f32_f16(vget_low_f16(bits));
    all[2 * i + 1] = vcvt_high_f32_f16(bits);
  }
  return {{all[0], all[1], all[2], all[3]}, {all[4], all[5], all[6], all[7]}};
}
inline Floats BroadcastTwo(const float* p) {
  const float32x2_t two = vld1_f32(p);
  return Each<Floats>([&](int) { return vcombine_f32(two, two); });
}
inline Floats SumPairs(const Pairs& x) {
  const auto sums = [](const Floats& a, int i) { return vpaddq_f32(a.v[i], a.v[i + 1]); };
  return {sums(x.first, 0), sums(x.first, 2), sums(x.second, 0), sums(x.second, 2)};
}

inline Floats ToFloats(Ints a) {
  return Each<Floats>([&](int i) { return vcvtq_f32_s32(a.v[i]); });
}
inline Floats Broadcast(float a) {
  return Each<Floats>([&](int) { return vdupq_n_f32(a); });
}
inline Floats Multiply(Floats a, Floats b) {
  return Each<Floats>([&](int i) { return vmulq_f32(a.v[i], b.v[i]); });
}
inline Floats Divide(Floats a, Floats b) {
  return Each<Floats>([&](int i) { return vdivq_f32(a.v[i], b.v[i]); });
}
inline Floats Fma(Floats a, Floats b, Floats c) {
  return Each<Floats>([&](int i) { return vfmaq_f32(c.v[i], a.v[i], b.v[i]); });
}

inline Floats LoadFloats(const float* p) {
  return Each<Floats>([&](int i) { return vld1q_f32(p + 4 * i); });
}
inline Floats LoadHalves(const uint16_t* p) {
  return Each<Floats>(
      [&](int i) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i))); });
}
inline Floats LoadBFloats(const uint16_t* p) {
  return Each<Floats>(
      [&](int i) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16)); });
}
inline Floats LoadUint8(const uint8_t* p) {
  float all[16];
  for (int i = 0; i < 16; ++i) all[i] = (float)p[i];
  return LoadFloats(all);
}
inline Floats LoadInt8(const int8_t* p) {
  float all[16];
  for (int i = 0; i < 16; ++i) all[i] = (float)p[i];
  return LoadFloats(all);
}
inline void Store(float* p, Floats a) {
  for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, a.v[i]);
}
inline float SumLanes(Floats a) {
  const float32x4_t low = vaddq_f32(a.v[0], a.v[1]), high = vaddq_f32(a.v[2], a.v[3]);
  return vaddvq_f32(vaddq_f32(low, high));
}
inline float MaxLanes(Floats a) {
  const float32x4_t low = vmaxq_f32(a.v[0], a.v[1]), high = vmaxq_f32(a.v[2], a.v[3]);
  return vmaxvq_f32(vmaxq_f32(low, high));
}
constexpr int kDots = 4;  // products of a query with keys at a time
inline Floats SumEach(const Floats* x) {
  float sums[16];
  for (int i = 0; i < 16; ++i) sums[i] = SumLanes(x[i]);
  return LoadFloats(sums);
}
inline Floats Max(Floats a, Floats b) {
  return Each<Floats>([&](int i) { return vmaxq_f32(a.v[i], b.v[i]); });
}
inline Ints Round(Floats a) {
  return Each<Ints>([&](int i) { return vcvtnq_s32_f32(a.v[i]); });
}
inline Floats PowerOfTwo(Ints a) {
  return Each<Floats>([&](int i) {
    return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(a.v[i], vdupq_n_s32(127)), 23));
  });
}

}  // namespace
