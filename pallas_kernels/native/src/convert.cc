// Conversion of stored weights: GGUF's blocks to matrices by rows, and values by rows to tiles. All of
// it also exists in numpy, which defines it (jaxinfer/weights/gguf/blocks.py, arrangements.py).

#include <cstdint>
#include <cstring>

namespace {

// The arrays of a matrix by rows, at the first row to be written; see quantised.py.
struct Rows {
  uint8_t *values, *scales, *offsets, *supers;
};

// Nibbles of two blocks of 32, in each of which byte j holds inputs j and j + 16, as a block of 64.
void JoinNibbles(const uint8_t* first, const uint8_t* second, uint8_t* to) {
  for (int j = 0; j < 16; ++j) {
    to[j] = (first[j] & 15) | (second[j] << 4);
    to[16 + j] = (first[j] >> 4) | (second[j] & 240);
  }
}

// Blocks of 32 inputs in 4 bits: `head` bytes of factors, then 16 of nibbles. `pairs` of them become
// blocks of 64.
void FourBits(const uint8_t* raw, int64_t blocks, int64_t head, bool pairs, Rows to) {
  const int64_t bytes = head + 16;
  for (int64_t b = 0; b < blocks; ++b, raw += bytes) {
    std::memcpy(to.scales + 2 * b, raw, 2);
    if (to.offsets) std::memcpy(to.offsets + 2 * b, raw + 2, 2);
    if (!pairs) {
      std::memcpy(to.values + 16 * b, raw + head, 16);
    } else if (b % 2) {
      JoinNibbles(raw - 16, raw + head, to.values + 16 * (b - 1));
    }
  }
}

// Blocks of 32 inputs in 5 bits: factors, 4 bytes of fifth bits, 16 of nibbles.
void FiveBits(const uint8_t* raw, int64_t blocks, int64_t head, int middle, Rows to) {
  for (int64_t b = 0; b < blocks; ++b, raw += head + 20) {
    std::memcpy(to.scales + 2 * b, raw, 2);
    if (to.offsets) std::memcpy(to.offsets + 2 * b, raw + 2, 2);
    uint32_t fifth;
    std::memcpy(&fifth, raw + head, 4);
    const uint8_t* low = raw + head + 4;
    for (int j = 0; j < 32; ++j) {
      const int nibble = j < 16 ? low[j] & 15 : low[j - 16] >> 4;
      to.values[32 * b + j] = (uint8_t)((nibble | (fifth >> j & 1) << 4) - middle);
    }
  }
}

void EightBits(const uint8_t* raw, int64_t blocks, Rows to) {
  for (int64_t b = 0; b < blocks; ++b, raw += 34) {
    std::memcpy(to.scales + 2 * b, raw, 2);
    std::memcpy(to.values + 32 * b, raw + 2, 32);
  }
}

// The head of a block of 256 inputs: d, dmin, and 6 bits of scale and minimum for each 32.
void KFactors(const uint8_t* raw, int64_t b, Rows to) {
  std::memcpy(to.supers + 4 * b, raw, 4);
  to.supers[4 * b + 3] ^= 0x80;  // minima are subtracted, offsets added
  const uint8_t *first = raw + 4, *second = raw + 8, *third = raw + 12;
  uint8_t *scales = to.scales + 8 * b, *minima = to.offsets + 8 * b;
  for (int i = 0; i < 4; ++i) {
    scales[i] = first[i] & 63;
    scales[4 + i] = (third[i] & 15) | (first[i] >> 6) << 4;
    minima[i] = second[i] & 63;
    minima[4 + i] = third[i] >> 4 | (second[i] >> 6) << 4;
  }
}

void Q4K(const uint8_t* raw, int64_t blocks, Rows to) {
  for (int64_t b = 0; b < blocks; ++b, raw += 144) {
    KFactors(raw, b, to);
    std::memcpy(to.values + 128 * b, raw + 16, 128);  // already in blocks of 64
  }
}

void Q5K(const uint8_t* raw, int64_t blocks, Rows to) {
  for (int64_t b = 0; b < blocks; ++b, raw += 176) {
    KFactors(raw, b, to);
    const uint8_t *fifth = raw + 16, *low = raw + 48;
    uint8_t* values = to.values + 256 * b;
    for (int half = 0; half < 8; ++half) {  // 32 inputs: the low or the high nibbles of 32 bytes
      for (int j = 0; j < 32; ++j) {
        const int nibble = low[half / 2 * 32 + j] >> (half % 2 * 4) & 15;
        values[32 * half + j] = (uint8_t)(nibble | (fifth[j] >> half & 1) << 4);
      }
    }
  }
}

void Q6K(const uint8_t* raw, int64_t blocks, Rows to) {
  for (int64_t b = 0; b < blocks; ++b, raw += 210) {
    for (int part = 0; part < 8; ++part) {  // 32 inputs; two of its six bits are in `high`
      const uint8_t* low = raw + part / 4 * 64 + part % 2 * 32;
      const uint8_t* high = raw + 128 + part / 4 * 32;
      for (int j = 0; j < 32; ++j) {
        const int nibble = low[j] >> (part % 4 / 2 * 4) & 15;
        const int upper = (high[j] >> (part % 4 * 2) & 3) << 4;
        to.values[256 * b + 32 * part + j] = (uint8_t)((nibble | upper) - 32);
      }
    }
    std::memcpy(to.scales + 16 * b, raw + 192, 16);
    std::memcpy(to.supers + 2 * b, raw + 208, 2);
  }
}

}  // namespace

extern "C" {

// Converts the blocks of whole rows of a GGUF type, by its number in GGML. `pairs`: nibbles are in
// blocks of 64, see quantised.nibble_block. Returns 0 for a type that it does not know.
int jaxinfer_from_blocks(int type, const uint8_t* raw, int64_t count, bool pairs, uint8_t* values,
                         uint8_t* scales, uint8_t* offsets, uint8_t* supers) {
  const Rows to{values, scales, offsets, supers};
  switch (type) {
    case 2: FourBits(raw, count, 2, pairs, to); return 1;
    case 3: FourBits(raw, count, 4, pairs, to); return 1;
    case 6: FiveBits(raw, count, 2, 16, to); return 1;
    case 7: FiveBits(raw, count, 4, 0, to); return 1;
    case 8: EightBits(raw, count, to); return 1;
    case 12: Q4K(raw, count, to); return 1;
    case 13: Q5K(raw, count, to); return 1;
    case 14: Q6K(raw, count, to); return 1;
    default: return 0;
  }
}

// Orders values by rows into tiles of 64 x 64. `order` has the place in a tile, counted row by row, of
// each value in memory. Nibbles (see quantised.pack_nibbles, blocks of 64), or bytes, which become 128
// higher.
void jaxinfer_pack_tiles(const uint8_t* rows, uint8_t* tiles, int64_t outputs, int64_t inputs,
                         bool nibbles, const int32_t* order) {
  const int64_t row_bytes = nibbles ? inputs / 2 : inputs;
  uint8_t own[64 * 64];
  for (int64_t o = 0; o < outputs; o += 64) {
    for (int64_t i = 0; i < inputs; i += 64) {
      for (int64_t row = 0; row < 64; ++row) {
        uint8_t* to = own + 64 * row;
        const uint8_t* from = rows + (o + row) * row_bytes + (nibbles ? i / 2 : i);
        for (int j = 0; j < (nibbles ? 32 : 64); ++j) {
          to[j] = nibbles ? from[j] & 15 : from[j] ^ 128;
          if (nibbles) to[j + 32] = from[j] >> 4;
        }
      }
      if (nibbles) {
        for (int n = 0; n < 2048; ++n) tiles[n] = own[order[2 * n]] | own[order[2 * n + 1]] << 4;
      } else {
        for (int n = 0; n < 4096; ++n) tiles[n] = own[order[n]];
      }
      tiles += nibbles ? 2048 : 4096;
    }
  }
}

}  // extern "C"
