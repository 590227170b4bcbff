// Pairs of vectors of 256 bits, without VNNI (AVX2, FMA and F16C: x86-64-v3).
#pragma once

#include <immintrin.h>
#include <cstdint>

namespace {

constexpr const char* kName = "avx2";
constexpr int kTileTokens = 2;  // 8 sums, 4 accumulators, 4 weights: the 16 registers

struct Bytes {
  __m256i a, b;
};
struct Ints {
  __m256i a, b;
};
struct Floats {
  __m256 a, b;
};

inline __m256i Load256(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline __m128i Load128(const void* p) { return _mm_loadu_si128((const __m128i*)p); }

inline Bytes LoadBytes(const uint8_t* p) { return {Load256(p), Load256(p + 32)}; }
inline Bytes LowNibbles(Bytes x) {
  const __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(x.a, mask), _mm256_and_si256(x.b, mask)};
}
inline Bytes HighNibbles(Bytes x) {
  return LowNibbles({_mm256_srli_epi16(x.a, 4), _mm256_srli_epi16(x.b, 4)});
}
inline Bytes Lookup(const uint8_t* table, Bytes index) {
  const __m256i row = _mm256_broadcastsi128_si256(Load128(table));
  return {_mm256_shuffle_epi8(row, index.a), _mm256_shuffle_epi8(row, index.b)};
}

// Sums of two products are 16 bits wide. They hold |weight| * activation for int8 too: at most
// 2 * 128 * 127. The signs of int8 weights go to the activations.
constexpr int kInt8Bias = 0;
typedef Bytes Small;  // weights from 0 to 24
struct Wide {         // int8
  Bytes magnitudes, signs;
};
inline Wide Widened(Bytes x) {  // stored raised by 128
  const __m256i bias = _mm256_set1_epi8(-128);
  const __m256i a = _mm256_xor_si256(x.a, bias), b = _mm256_xor_si256(x.b, bias);
  return {{_mm256_abs_epi8(a), _mm256_abs_epi8(b)}, {a, b}};
}

inline Ints BroadcastInt(const int32_t* p) {
  return {_mm256_set1_epi32(*p), _mm256_set1_epi32(*p)};
}
inline Ints Plus(Ints x, Ints y) {
  return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)};
}
inline void Begin(Ints* sums) { sums->a = sums->b = _mm256_setzero_si256(); }
inline Ints End(Ints high, Ints low, const int32_t* start) {
  const Ints shifted = {_mm256_slli_epi32(high.a, 8), _mm256_slli_epi32(high.b, 8)};
  return Plus(shifted, Plus(low, BroadcastInt(start)));
}

// The sums of the int4 weights of a block fit 16 bits: at most 16 * 15 * 127.
struct NibbleSums {
  __m256i a, b;
};
inline void Begin(NibbleSums* sums) { sums->a = sums->b = _mm256_setzero_si256(); }
inline NibbleSums Dot(NibbleSums sums, Bytes w, const int8_t* x) {
  const __m256i each = _mm256_set1_epi32(*(const int32_t*)x);
  return {_mm256_add_epi16(sums.a, _mm256_maddubs_epi16(w.a, each)),
          _mm256_add_epi16(sums.b, _mm256_maddubs_epi16(w.b, each))};
}
inline Ints ToInts(NibbleSums sums) {
  const __m256i ones = _mm256_set1_epi16(1);
  return {_mm256_madd_epi16(sums.a, ones), _mm256_madd_epi16(sums.b, ones)};
}
inline Ints End(NibbleSums high, NibbleSums low, const int32_t* start) {
  return End(ToInts(high), ToInts(low), start);
}

inline __m256i Accumulated(__m256i sum, __m256i w, __m256i x) {
  const __m256i pairs = _mm256_maddubs_epi16(w, x);
  return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
// sum + four products in each lane
inline Ints Dot(Ints sum, Bytes w, const int8_t* x) {
  const __m256i each = _mm256_set1_epi32(*(const int32_t*)x);
  return {Accumulated(sum.a, w.a, each), Accumulated(sum.b, w.b, each)};
}
inline Ints Dot(Ints sum, const Wide& w, const int8_t* x) {
  const __m256i each = _mm256_set1_epi32(*(const int32_t*)x);
  return {Accumulated(sum.a, w.magnitudes.a, _mm256_sign_epi8(each, w.signs.a)),
          Accumulated(sum.b, w.magnitudes.b, _mm256_sign_epi8(each, w.signs.b))};
}

// Two inputs of each output: adjacent lanes have both, the first vectors outputs 0 to 7.
struct Pairs {
  Floats first, second;
};
inline Floats FloatsOfHalves(__m256i x) {
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(x)),
          _mm256_cvtph_ps(_mm256_extracti128_si256(x, 1))};
}
template <int kOdd>
inline Floats FloatsOfFp8(__m256i x) {
  const __m256i upper = kOdd ? x : _mm256_slli_epi16(x, 8);
  const __m256i half =
      _mm256_and_si256(_mm256_srai_epi16(upper, 1), _mm256_set1_epi16((short)0xbf80));
  // NaN has all bits of the exponent and the mantissa: the sum reaches the next one
  const __m256i sum = _mm256_add_epi16(half, _mm256_set1_epi16(0x80));
  return FloatsOfHalves(_mm256_or_si256(half, _mm256_and_si256(sum, _mm256_set1_epi16(0x4000))));
}
// Inputs kOdd and kOdd + 2 of four in fp8, as float16: exponents are 8 less. XLA's threads take
// subnormal numbers in float32 for zero, in conversions from float16 they do not.
template <int kOdd>
inline Pairs FloatsOfFp8(Bytes x) {
  return {FloatsOfFp8<kOdd>(x.a), FloatsOfFp8<kOdd>(x.b)};
}
inline Floats BroadcastTwo(const float* p) {
  int64_t two;
  __builtin_memcpy(&two, p, 8);
  const __m256 each = _mm256_castsi256_ps(_mm256_set1_epi64x(two));
  return {each, each};
}
inline __m256 SumAdjacent(Floats x) {  // outputs 0, 1, 4, 5, then 2, 3, 6, 7
  const __m256d sums = _mm256_castps_pd(_mm256_hadd_ps(x.a, x.b));
  return _mm256_castpd_ps(_mm256_permute4x64_pd(sums, 0xd8));
}
inline Floats SumPairs(const Pairs& x) { return {SumAdjacent(x.first), SumAdjacent(x.second)}; }

inline Floats ToFloats(Ints x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline Floats Broadcast(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Floats Multiply(Floats x, Floats y) {
  return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)};
}
inline Floats Divide(Floats x, Floats y) {
  return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)};
}
inline Floats Fma(Floats x, Floats y, Floats z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
inline Floats FloatsOf(Ints x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }

inline Floats LoadFloats(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline Floats LoadHalves(const uint16_t* p) {
  return {_mm256_cvtph_ps(Load128(p)), _mm256_cvtph_ps(Load128(p + 8))};
}
inline Floats LoadBFloats(const uint16_t* p) {
  const __m256i a = _mm256_slli_epi32(_mm256_cvtepu16_epi32(Load128(p)), 16);
  const __m256i b = _mm256_slli_epi32(_mm256_cvtepu16_epi32(Load128(p + 8)), 16);
  return FloatsOf({a, b});
}
inline Floats LoadUint8(const uint8_t* p) {
  const __m128i raw = Load128(p);
  return ToFloats({_mm256_cvtepu8_epi32(raw), _mm256_cvtepu8_epi32(_mm_srli_si128(raw, 8))});
}
inline Floats LoadInt8(const int8_t* p) {
  const __m128i raw = Load128(p);
  return ToFloats({_mm256_cvtepi8_epi32(raw), _mm256_cvtepi8_epi32(_mm_srli_si128(raw, 8))});
}
inline void Store(float* p, Floats x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
inline float SumLanes(Floats x) {
  __m256 both = _mm256_add_ps(x.a, x.b);
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(both), _mm256_extractf128_ps(both, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_shuffle_ps(four, four, 1)));
}
inline float MaxLanes(Floats x) {
  __m256 both = _mm256_max_ps(x.a, x.b);
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(both), _mm256_extractf128_ps(both, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_shuffle_ps(four, four, 1)));
}
constexpr int kDots = 4;  // products of a query with keys at a time
inline Floats SumEach(const Floats* x) {
  float sums[16];
  for (int i = 0; i < 16; ++i) sums[i] = SumLanes(x[i]);
  return LoadFloats(sums);
}
inline Floats Max(Floats x, Floats y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline Ints Round(Floats x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
inline __m256 PowerOfTwoHalf(__m256i n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}
inline Floats PowerOfTwo(Ints n) { return {PowerOfTwoHalf(n.a), PowerOfTwoHalf(n.b)}; }

}  // namespace
