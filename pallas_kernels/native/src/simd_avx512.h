// Vectors of 512 bits with VNNI (Intel Ice Lake, AMD Zen 4 and later).
#pragma once

#include <immintrin.h>
#include <cstdint>

namespace {

constexpr const char* kName = "avx512-vnni";
constexpr int kTileTokens = 8;  // 16 sums and 8 accumulators of the 32 registers

struct Bytes {
  __m512i v;
};
struct Ints {
  __m512i v;
};
struct Floats {
  __m512 v;
};

inline Bytes LoadBytes(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
inline Bytes LowNibbles(Bytes a) { return {_mm512_and_si512(a.v, _mm512_set1_epi8(15))}; }
inline Bytes HighNibbles(Bytes a) {
  return {_mm512_and_si512(_mm512_srli_epi16(a.v, 4), _mm512_set1_epi8(15))};
}
inline Bytes Lookup(const uint8_t* table, Bytes index) {
  const __m128i row = _mm_loadu_si128((const __m128i*)table);
  return {_mm512_shuffle_epi8(_mm512_broadcast_i32x4(row), index.v)};
}

// The instruction takes unsigned weights, as int8 are stored: raised by 128.
constexpr int kInt8Bias = 128;
typedef Bytes Small;  // weights from 0 to 24
typedef Bytes Wide;   // int8
inline Wide Widened(Bytes a) { return a; }

inline Ints BroadcastInt(const int32_t* p) { return {_mm512_set1_epi32(*p)}; }
typedef Ints NibbleSums;
inline void Begin(Ints* sums) { sums->v = _mm512_setzero_si512(); }
inline Ints End(Ints high, Ints low, const int32_t* start) {
  const __m512i started = _mm512_add_epi32(low.v, BroadcastInt(start).v);
  return {_mm512_add_epi32(_mm512_slli_epi32(high.v, 8), started)};
}
// sum + four products in each lane
inline Ints Dot(Ints sum, Bytes w, const int8_t* x) {
  return {_mm512_dpbusd_epi32(sum.v, w.v, _mm512_set1_epi32(*(const int32_t*)x))};
}

// Two inputs of each output: adjacent lanes have both, the first vector outputs 0 to 7.
struct Pairs {
  Floats first, second;
};
// Inputs kOdd and kOdd + 2 of four in fp8, as float16: exponents are 8 less. XLA's threads take
// subnormal numbers in float32 for zero, in conversions from float16 they do not.
template <int kOdd>
inline Pairs FloatsOfFp8(Bytes a) {
  const __m512i upper = kOdd ? a.v : _mm512_slli_epi16(a.v, 8);
  const __m512i half =
      _mm512_and_si512(_mm512_srai_epi16(upper, 1), _mm512_set1_epi16((short)0xbf80));
  // NaN has all bits of the exponent and the mantissa: the sum reaches the next one
  const __m512i sum = _mm512_add_epi16(half, _mm512_set1_epi16(0x80));
  const __m512i bits =
      _mm512_ternarylogic_epi32(half, sum, _mm512_set1_epi16(0x4000), 0xf8);  // a | (b & c)
  return {{_mm512_cvtph_ps(_mm512_castsi512_si256(bits))},
          {_mm512_cvtph_ps(_mm512_extracti64x4_epi64(bits, 1))}};
}
inline Floats BroadcastTwo(const float* p) {
  int64_t two;
  __builtin_memcpy(&two, p, 8);
  return {_mm512_castsi512_ps(_mm512_set1_epi64(two))};
}
inline Floats SumPairs(const Pairs& x) {
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
  return {_mm512_add_ps(_mm512_permutex2var_ps(x.first.v, even, x.second.v),
                        _mm512_permutex2var_ps(x.first.v, odd, x.second.v))};
}

inline Floats ToFloats(Ints a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline Floats Broadcast(float a) { return {_mm512_set1_ps(a)}; }
inline Floats Multiply(Floats a, Floats b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Floats Divide(Floats a, Floats b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Floats Fma(Floats a, Floats b, Floats c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }

inline Floats LoadFloats(const float* p) { return {_mm512_loadu_ps(p)}; }
inline Floats LoadHalves(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))};
}
inline Floats LoadBFloats(const uint16_t* p) {
  const __m256i raw = _mm256_loadu_si256((const __m256i*)p);
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16))};
}
inline Floats LoadUint8(const uint8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)))};
}
inline Floats LoadInt8(const int8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)))};
}
inline void Store(float* p, Floats a) { _mm512_storeu_ps(p, a.v); }
inline float SumLanes(Floats a) { return _mm512_reduce_add_ps(a.v); }
inline float MaxLanes(Floats a) { return _mm512_reduce_max_ps(a.v); }
constexpr int kDots = 16;  // products of a query with keys at a time
// The sums of the lanes of 16 vectors: halves of four lanes, then four vectors together.
inline Floats SumEach(const Floats* x) {
  __m512 two[8], four[4], eight[2];
  for (int i = 0; i < 8; ++i) {
    const __m512 a = x[2 * i].v, b = x[2 * i + 1].v;
    two[i] = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  }
  for (int i = 0; i < 4; ++i) {
    const __m512 a = two[2 * i], b = two[2 * i + 1];
    four[i] = _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
  }
  for (int i = 0; i < 2; ++i) {
    const __m512 a = four[2 * i], b = four[2 * i + 1];
    eight[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  }
  return {_mm512_add_ps(_mm512_shuffle_f32x4(eight[0], eight[1], 0x88),
                        _mm512_shuffle_f32x4(eight[0], eight[1], 0xdd))};
}
inline Floats Max(Floats a, Floats b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Ints Round(Floats a) { return {_mm512_cvtps_epi32(a.v)}; }
inline Floats PowerOfTwo(Ints a) {
  __m512i biased = _mm512_add_epi32(a.v, _mm512_set1_epi32(127));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(biased, 23))};
}

}  // namespace
