#define VARIANT kAvx2
#include "simd_avx2.h"
#include "variant.inc"
