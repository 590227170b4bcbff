#define VARIANT kNeon
#include "simd_neon.h"
#include "variant.inc"
