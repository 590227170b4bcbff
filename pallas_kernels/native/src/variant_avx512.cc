#define VARIANT kAvx512
#include "simd_avx512.h"
#include "variant.inc"
