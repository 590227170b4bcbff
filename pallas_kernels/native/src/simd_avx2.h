// 256-bit vectors in pairs, without VNNI (AVX2 and FMA: x86-64-v3).
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace {

constexpr const char* kName = "avx2";
constexpr int kTokenTile = 4;  // tokens for which weights are unpacked once

struct Bytes {
  __m256i a, b;
};
struct Ints {
  __m256i a, b;
};
struct Floats {
  __m256 a, b;
};

inline Bytes LoadBytes(const uint8_t* p) {
  const __m256i* q = reinterpret_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
inline Bytes LowNibbles(Bytes x) {
  const __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(x.a, mask), _mm256_and_si256(x.b, mask)};
}
inline Bytes HighNibbles(Bytes x) {
  return LowNibbles({_mm256_srli_epi16(x.a, 4), _mm256_srli_epi16(x.b, 4)});
}
inline Bytes Lookup(const uint8_t* table, Bytes index) {
  __m256i row =
      _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
  return {_mm256_shuffle_epi8(row, index.a), _mm256_shuffle_epi8(row, index.b)};
}
inline Ints Zeros() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline Ints Add(Ints x, Ints y) {
  return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)};
}
// Small weights (up to 127) cannot overflow the 16-bit sums of two products; larger ones are
// multiplied as even and odd bytes in 16 bits.
template <bool kSmall>
inline __m256i DotHalf(__m256i w, __m256i x) {
  const __m256i ones = _mm256_set1_epi16(1);
  if constexpr (kSmall) return _mm256_madd_epi16(_mm256_maddubs_epi16(w, x), ones);
  const __m256i low = _mm256_set1_epi16(255);
  __m256i even = _mm256_madd_epi16(_mm256_and_si256(w, low),
                                   _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8));
  __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(w, 8), _mm256_srai_epi16(x, 8));
  return _mm256_add_epi32(even, odd);
}
template <bool kSmall>
inline Ints Dot(Ints acc, Bytes w, int32_t x) {
  const __m256i each = _mm256_set1_epi32(x);
  return Add(acc, {DotHalf<kSmall>(w.a, each), DotHalf<kSmall>(w.b, each)});
}
inline Floats ToFloats(Ints x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline Floats Broadcast(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Floats Multiply(Floats x, Floats y) {
  return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)};
}
inline Floats Fma(Floats x, Floats y, Floats z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
inline Floats LoadFloats(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline __m128i Load128(const void* p) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
}
inline Floats LoadHalves(const uint16_t* p) {
  return {_mm256_cvtph_ps(Load128(p)), _mm256_cvtph_ps(Load128(p + 8))};
}
inline Floats LoadBFloats(const uint16_t* p) {
  __m256i a = _mm256_slli_epi32(_mm256_cvtepu16_epi32(Load128(p)), 16);
  __m256i b = _mm256_slli_epi32(_mm256_cvtepu16_epi32(Load128(p + 8)), 16);
  return {_mm256_castsi256_ps(a), _mm256_castsi256_ps(b)};
}
inline Floats LoadUint8(const uint8_t* p) {
  __m128i raw = Load128(p);
  return ToFloats({_mm256_cvtepu8_epi32(raw), _mm256_cvtepu8_epi32(_mm_srli_si128(raw, 8))});
}
inline Floats LoadInt8(const int8_t* p) {
  __m128i raw = Load128(p);
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
inline Floats Max(Floats x, Floats y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline Ints Round(Floats x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
inline __m256 PowerOfTwoHalf(__m256i n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}
inline Floats PowerOfTwo(Ints n) { return {PowerOfTwoHalf(n.a), PowerOfTwoHalf(n.b)}; }

}  // namespace
