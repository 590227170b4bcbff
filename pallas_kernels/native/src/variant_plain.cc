#define VARIANT kPlain
#include "simd_plain.h"
#include "variant.inc"
