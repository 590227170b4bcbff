#define VARIANT kNeon
#include "simd_neon.h"
#include "tile.inc"
