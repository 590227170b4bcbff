// The XLA FFI handlers of the kernels for CPUs, the choice of a variant, and the packing.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "kernel.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace jaxinfer {

extern const Variant kPlain;
#if defined(__x86_64__)
extern const Variant kAvx512, kAvx2;
#elif defined(__aarch64__)
extern const Variant kNeon;
#endif

namespace {

#if defined(__x86_64__)
// By CPUID itself: __builtin_cpu_supports knows nothing in a library that Zig links.
struct Processor {
  bool avx2 = false, avx512 = false;

  Processor() {
    unsigned a = 0, b = 0, c = 0, d = 0, low = 0, high = 0;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return;
    const bool saves = c >> 27 & 1, fma = c >> 12 & 1, f16c = c >> 29 & 1;
    if (!saves || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));  // which registers the system saves
    avx2 = (low & 6) == 6 && fma && f16c && (b >> 5 & 1);
    avx512 = avx2 && (low & 0xe6) == 0xe6 && (b >> 16 & 1) && (b >> 30 & 1) && (b >> 31 & 1) &&
             (c >> 11 & 1);
  }
};
#endif

std::vector<const Variant*> Supported() {
  std::vector<const Variant*> found;
#if defined(__x86_64__)
  const Processor processor;
  if (processor.avx512) found.push_back(&kAvx512);
  if (processor.avx2) found.push_back(&kAvx2);
#elif defined(__aarch64__)
  found.push_back(&kNeon);
#endif
  found.push_back(&kPlain);
  return found;
}

const std::vector<const Variant*>& Variants() {
  static const std::vector<const Variant*> variants = Supported();
  return variants;
}

std::atomic<int> chosen{0};  // index in Variants; only tests change it

// Runs function(0) ... function(count - 1) on XLA's threads and this one.
//
// A call that XLA's threads take up late finds no work and returns; this thread does not wait for
// it, so calls on all of XLA's threads cannot block each other.
struct Work {
  std::atomic<int64_t> next{0}, done{0};
  int64_t count;
  std::function<void(int64_t)> function;

  void Run() {
    for (int64_t i = next++; i < count; i = next++) {
      function(i);
      done.fetch_add(1, std::memory_order_release);
    }
  }
};

void ParallelFor(ffi::ThreadPool& pool, int64_t count, std::function<void(int64_t)> function) {
  const int64_t helpers = std::min<int64_t>(pool.num_threads(), count) - 1;
  if (helpers <= 0) {
    for (int64_t i = 0; i < count; ++i) function(i);
    return;
  }
  auto work = std::make_shared<Work>();
  work->count = count;
  work->function = std::move(function);
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule([work] { work->Run(); });
  work->Run();
  while (work->done.load(std::memory_order_acquire) < count) std::this_thread::yield();
}

// Runs a short function for each token: on this thread if they are few.
void ForTokens(ffi::ThreadPool& pool, int64_t tokens, std::function<void(int64_t)> function) {
  if (tokens < 16) {
    for (int64_t token = 0; token < tokens; ++token) function(token);
  } else {
    ParallelFor(pool, tokens, std::move(function));
  }
}

// True if all are zero. 64 at a time become vectors; a loop that may end at each does not, and such
// loops over padding took 6 % of a prompt of 65 tokens in a step for 256.
bool AreZeros(const float* x, int64_t count) {
  constexpr int64_t kBlock = 64;
  uint32_t bits[kBlock];
  for (int64_t i = 0; i < count; i += kBlock) {
    const int64_t some = std::min(kBlock, count - i);
    std::memcpy(bits, x + i, some * sizeof(float));
    uint32_t any = 0;
    for (int64_t j = 0; j < some; ++j) any |= bits[j];
    if (any << 1) return false;  // without the sign
  }
  return true;
}

// Leaves out the tokens whose activations are all zero, as those of padding are: their results are
// zero, too. `rows` holds the others while the call runs.
void SkipZeros(ffi::ThreadPool& pool, GemmCall* call, std::vector<int32_t>* rows) {
  std::vector<int32_t> maybe;  // without a look at every activation
  for (int64_t token = 0; token < call->tokens; ++token) {
    const bool is_zero = call->x[token * call->inputs] == 0.f;
    (is_zero ? maybe : *rows).push_back(static_cast<int32_t>(token));
  }
  if (maybe.empty()) return;
  std::vector<uint8_t> is_zero(maybe.size());
  ForTokens(pool, maybe.size(), [&](int64_t i) {
    const float* x = call->x + maybe[i] * call->inputs;
    is_zero[i] = AreZeros(x, call->inputs);
    if (is_zero[i]) std::fill_n(call->out + maybe[i] * call->outputs, call->outputs, 0.f);
  });
  for (size_t i = 0; i < maybe.size(); ++i) {
    if (!is_zero[i]) rows->push_back(maybe[i]);
  }
  call->rows = rows->data();
  call->tokens = rows->size();
}

template <class Buffer>
const void* DataOrNull(const Buffer& buffer) {
  return buffer.element_count() == 0 ? nullptr : buffer.untyped_data();
}

bool FactorOf(ffi::DataType dtype, Factor* factor) {
  switch (dtype) {
    case ffi::DataType::F32: *factor = Factor::kFloat32; return true;
    case ffi::DataType::F16: *factor = Factor::kFloat16; return true;
    case ffi::DataType::BF16: *factor = Factor::kBFloat16; return true;
    case ffi::DataType::U8: *factor = Factor::kUint8; return true;
    case ffi::DataType::S8: *factor = Factor::kInt8; return true;
    default: return false;
  }
}

ffi::Error Gemm(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::AnyBuffer values,
                ffi::AnyBuffer scales, ffi::AnyBuffer zeros, ffi::AnyBuffer offsets,
                ffi::AnyBuffer supers, ffi::ResultBuffer<ffi::F32> result,
                ffi::ResultBuffer<ffi::U8> workspace, int64_t kind, bool swiglu) {
  const Variant& variant = *Variants()[chosen];
  GemmCall call{};
  call.kind = static_cast<Kind>(kind);
  call.swiglu = swiglu;
  call.tokens = x.dimensions()[0];
  call.inputs = x.dimensions()[1];
  call.outputs = result->dimensions()[1];
  call.group = call.inputs / scales.dimensions()[1];
  call.super_group = supers.element_count() == 0 ? 0 : call.inputs / supers.dimensions()[1];
  call.block_outputs = values.dimensions()[0] / scales.dimensions()[0];
  if (!FactorOf(scales.element_type(), &call.factor)) {
    return ffi::Error::InvalidArgument("quantised_gemm: unknown dtype of scales");
  }
  call.x = x.typed_data();
  call.values = static_cast<const uint8_t*>(values.untyped_data());
  call.scales = scales.untyped_data();
  call.zeros = static_cast<const uint8_t*>(DataOrNull(zeros));
  call.offsets = DataOrNull(offsets);
  call.supers = static_cast<const uint16_t*>(DataOrNull(supers));
  call.out = result->typed_data();
  call.workspace = workspace->typed_data();
  if (static_cast<int64_t>(workspace->element_count()) < WorkspaceBytes(call)) {
    return ffi::Error::InvalidArgument("quantised_gemm: the workspace is too small");
  }

  std::vector<int32_t> rows;
  SkipZeros(pool, &call, &rows);
  const int64_t most = variant.most_tokens, groups = call.inputs / call.group;
  ParallelFor(pool, (call.tokens + most - 1) / most, [&](int64_t index) {
    const int64_t first = index * most, left = call.tokens - first;
    const int64_t size = TileSize(left, most);
    variant.quantise(call, first, std::min(left, size), size,
                     call.workspace + first * BytesOfToken(call), GroupSums(call) + first * groups);
  });
  // enough parts to divide work evenly, each long enough to be worth a hand-over
  const int64_t tiles = call.outputs / kLanes;
  const int64_t per_part = std::max<int64_t>(1, tiles / (8 * (int64_t)pool.num_threads()));
  ParallelFor(pool, (tiles + per_part - 1) / per_part, [&](int64_t part) {
    std::unique_ptr<float[]> factors(new float[FactorFloats(call)]);
    const int64_t end = std::min(tiles, (part + 1) * per_part);
    for (int64_t tile = part * per_part; tile < end; ++tile) {
      variant.tile(call, tile, factors.get());
    }
  });
  return ffi::Error::Success();
}

// A GEMM of floats whose sums have one order for any number of tokens: see skinny_gemm.native.
ffi::Error FixedGemm(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> w,
                     ffi::ResultBuffer<ffi::F32> result, bool by_output) {
  const Variant& variant = *Variants()[chosen];
  const auto dims = result->dimensions();
  const int64_t width = PartWidth(dims[0], dims[1], pool.num_threads());
  const FloatGemm call{dims[0], x.dimensions()[1], dims[1], width, by_output,
                       x.typed_data(), w.typed_data(), result->typed_data()};
  ParallelFor(pool, (call.outputs + width - 1) / width, [&](int64_t part) {
    std::unique_ptr<float[]> scratch(new float[ScratchFloats(call)]);
    variant.float_gemm(call, part, scratch.get());
  });
  return ffi::Error::Success();
}

// 16 sums at a time, which the compiler makes vectors of.
float RootMeanSquareInverse(const float* x, int64_t n, float eps) {
  float sums[16] = {}, sum = 0.f;
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    for (int j = 0; j < 16; ++j) sums[j] += x[i + j] * x[i + j];
  }
  for (; i < n; ++i) sum += x[i] * x[i];
  for (float each : sums) sum += each;
  return 1.f / std::sqrt(sum / static_cast<float>(n) + eps);
}

// The sum of x and delta, and that sum normalised; see residual_norm.api. Without delta (an empty
// array) the sum is x, and is not written.
ffi::Error ResidualNorm(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> delta,
                        ffi::Buffer<ffi::F32> weights, ffi::ResultBuffer<ffi::F32> total,
                        ffi::ResultBuffer<ffi::F32> normed, int64_t row, float eps) {
  const int64_t tokens = x.dimensions()[0], width = x.dimensions()[1];
  const float* weight = weights.typed_data() + row * width;
  auto normalise = [&](int64_t token) {
    const float* from = x.typed_data() + token * width;
    if (delta.element_count() != 0) {
      const float* added = delta.typed_data() + token * width;
      float* sum = total->typed_data() + token * width;
      for (int64_t i = 0; i < width; ++i) sum[i] = from[i] + added[i];
      from = sum;
    }
    const float inverse = RootMeanSquareInverse(from, width, eps);
    float* to = normed->typed_data() + token * width;
    for (int64_t i = 0; i < width; ++i) to[i] = from[i] * inverse * weight[i];
  };
  ForTokens(pool, tokens, normalise);
  return ffi::Error::Success();
}

// Normalises and rotates queries and keys, and writes keys and values into pages, which the results
// alias; see qk_rope_append.api. Without slots (an empty array) row r's token is the last one of its
// context: see append_decode.api.
ffi::Error RopeAppend(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> qkv, ffi::Buffer<ffi::F32> cos,
                      ffi::Buffer<ffi::F32> sin, ffi::Buffer<ffi::F32> norms,
                      ffi::Buffer<ffi::F32>, ffi::Buffer<ffi::F32>, ffi::Buffer<ffi::S32> slots,
                      ffi::Buffer<ffi::S32> table, ffi::Buffer<ffi::S32> lengths,
                      ffi::ResultBuffer<ffi::F32> q, ffi::ResultBuffer<ffi::F32> keys,
                      ffi::ResultBuffer<ffi::F32> values, float eps) {
  const auto dims = keys->dimensions();
  const int64_t page_size = dims[1], kv_heads = dims[2], head_dim = dims[3], half = head_dim / 2;
  const int64_t tokens = qkv.dimensions()[0], heads = qkv.dimensions()[1] - 2 * kv_heads;
  const float* norm = norms.element_count() == 0 ? nullptr : norms.typed_data();
  auto slot_of = [&](int64_t token) -> int64_t {
    if (slots.element_count() != 0) return slots.typed_data()[token];
    const int64_t last = lengths.typed_data()[token] - 1;
    if (last < 0) return 0;
    const int64_t page = table.typed_data()[token * table.dimensions()[1] + last / page_size];
    return page * page_size + last % page_size;
  };
  auto append = [&](int64_t token) {
    const float* from = qkv.typed_data() + token * (heads + 2 * kv_heads) * head_dim;
    const int64_t slot = slot_of(token) * kv_heads * head_dim;
    const float* c = cos.typed_data() + token * half;
    const float* s = sin.typed_data() + token * half;
    for (int64_t head = 0; head < heads + kv_heads; ++head, from += head_dim) {
      float* to = head < heads ? q->typed_data() + (token * heads + head) * head_dim
                               : keys->typed_data() + slot + (head - heads) * head_dim;
      const float* weight = norm == nullptr ? nullptr : norm + (head < heads ? 0 : head_dim);
      const float inverse = norm == nullptr ? 1.f : RootMeanSquareInverse(from, head_dim, eps);
      for (int64_t i = 0; i < half; ++i) {
        float first = from[i], second = from[i + half];
        if (weight != nullptr) {
          first = first * inverse * weight[i];
          second = second * inverse * weight[i + half];
        }
        to[i] = first * c[i] - second * s[i];
        to[i + half] = second * c[i] + first * s[i];
      }
    }
    std::memcpy(values->typed_data() + slot, from, kv_heads * head_dim * sizeof(float));
  };
  ForTokens(pool, tokens, append);
  return ffi::Error::Success();
}

// Draws a token for each row; see sample.api.
ffi::Error Sample(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> logits,
                  ffi::Buffer<ffi::F32> temperature, ffi::Buffer<ffi::S32> top_k,
                  ffi::Buffer<ffi::F32> top_p, ffi::Buffer<ffi::F32> min_p,
                  ffi::Buffer<ffi::S32> seed_low, ffi::Buffer<ffi::S32> seed_high,
                  ffi::Buffer<ffi::S32> positions, ffi::AnyBuffer masks,
                  ffi::ResultBuffer<ffi::S32> token_ids) {
  const Variant& variant = *Variants()[chosen];
  const int64_t rows = logits.dimensions()[0], vocab = logits.dimensions()[1];
  const auto* mask = static_cast<const uint32_t*>(DataOrNull(masks));
  ParallelFor(pool, rows, [&](int64_t row) {
    DrawCall call;
    call.logits = logits.typed_data() + row * vocab;
    call.vocab = vocab;
    call.temperature = temperature.typed_data()[row];
    call.top_k = top_k.typed_data()[row];
    call.top_p = top_p.typed_data()[row];
    call.min_p = min_p.typed_data()[row];
    call.seed_low = static_cast<uint32_t>(seed_low.typed_data()[row]);
    call.seed_high = static_cast<uint32_t>(seed_high.typed_data()[row]);
    call.position = static_cast<uint32_t>(positions.typed_data()[row]);
    call.mask = mask == nullptr ? nullptr : mask + row * masks.dimensions()[1];
    token_ids->typed_data()[row] = variant.draw(call);
  });
  return ffi::Error::Success();
}

#include "attention.inc"
#include "experts.inc"
#include "mask.inc"
#include "delta.inc"
#include "ssd.inc"

}  // namespace
}  // namespace jaxinfer

extern "C" {

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    JaxinferQuantisedGemm, jaxinfer::Gemm,
    ffi::Ffi::Bind()
        .Ctx<ffi::ThreadPool>()
        .Arg<ffi::Buffer<ffi::F32>>()
        .Arg<ffi::AnyBuffer>()
        .Arg<ffi::AnyBuffer>()
        .Arg<ffi::AnyBuffer>()
        .Arg<ffi::AnyBuffer>()
        .Arg<ffi::AnyBuffer>()
        .Ret<ffi::Buffer<ffi::F32>>()
        .Ret<ffi::Buffer<ffi::U8>>()
        .Attr<int64_t>("kind")
        .Attr<bool>("swiglu"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    JaxinferFixedGemm, jaxinfer::FixedGemm,
    ffi::Ffi::Bind()
        .Ctx<ffi::ThreadPool>()
        .Arg<ffi::Buffer<ffi::F32>>()
        .Arg<ffi::Buffer<ffi::F32>>()
        .Ret<ffi::Buffer<ffi::F32>>()
        .Attr<bool>("by_output"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    JaxinferAttention, jaxinfer::Attention,
    ffi::Ffi::Bind()
        .Ctx<ffi::ThreadPool>()
        .Arg<ffi::Buffer<ffi::F32>>()
        .Arg<ffi::Buffer<ffi::F32>>()
        .Arg<ffi::Buffer<ffi::F32>>()
        .Arg<ffi::Buffer<ffi::S32>>()
        .Arg<ffi::Buffer<ffi::S32>>()
        .Arg<ffi::Buffer<ffi::S32>>()
        .Arg<ffi::Buffer<ffi::F32>>()
        .Arg<ffi::Buffer<ffi::F32>>()
        .Ret<ffi::Buffer<ffi::F32>>()
        .Attr<float>("scale")
        .Attr<float>("cap")
        .Attr<int64_t>("window"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    JaxinferRopeAppend, jaxinfer::RopeAppend,
    ffi::Ffi::Bind()
        .Ctx<ffi::ThreadPool>()
        .Arg<ffi::Buffer<ffi::F32>>()
        .Arg<ffi::Buffer<ffi::F32>>()
        .Arg<ffi::Buffer<ffi::F32>>()
        .Arg<ffi::Buffer<ffi::F32>>()
        .Arg<ffi::Buffer<ffi::F32>>()
        .Arg<ffi::Buffer<ffi::F32>>()
        .Arg<ffi::Buffer<ffi::S32>>()
        .Arg<ffi::Buffer<ffi::S32>>()
        .Arg<ffi::Buffer<ffi::S32>>()
        .Ret<ffi::Buffer<ffi::F32>>()
        .Ret<ffi::Buffer<ffi::F32>>()
        .Ret<ffi::Buffer<ffi::F32>>()
        .Attr<float>("eps"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    JaxinferResidualNorm, jaxinfer::ResidualNorm,
    ffi::Ffi::Bind()
        .Ctx<ffi::ThreadPool>()
        .Arg<ffi::Buffer<ffi::F32>>()
        .Arg<ffi::Buffer<ffi::F32>>()
        .Arg<ffi::Buffer<ffi::F32>>()
        .Ret<ffi::Buffer<ffi::F32>>()
        .Ret<ffi::Buffer<ffi::F32>>()
        .Attr<int64_t>("row")
        .Attr<float>("eps"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    JaxinferSample, jaxinfer::Sample,
    ffi::Ffi::Bind()
        .Ctx<ffi::ThreadPool>()
        .Arg<ffi::Buffer<ffi::F32>>()
        .Arg<ffi::Buffer<ffi::F32>>()
        .Arg<ffi::Buffer<ffi::S32>>()
        .Arg<ffi::Buffer<ffi::F32>>()
        .Arg<ffi::Buffer<ffi::F32>>()
        .Arg<ffi::Buffer<ffi::S32>>()
        .Arg<ffi::Buffer<ffi::S32>>()
        .Arg<ffi::Buffer<ffi::S32>>()
        .Arg<ffi::AnyBuffer>()
        .Ret<ffi::Buffer<ffi::S32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    JaxinferMask, jaxinfer::Mask,
    ffi::Ffi::Bind()
        .Ctx<ffi::ThreadPool>()
        .Arg<ffi::Buffer<ffi::F32>>()
        .Arg<ffi::Buffer<ffi::S32>>()
        .Arg<ffi::Buffer<ffi::S32>>()
        .Arg<ffi::Buffer<ffi::S32>>()
        .Arg<ffi::Buffer<ffi::S32>>()
        .Ret<ffi::Buffer<ffi::F32>>()
        .Ret<ffi::Buffer<ffi::S32>>()
        .Attr<int64_t>("num_slots")
        .Attr<int64_t>("milliseconds"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    JaxinferExperts, jaxinfer::Experts,
    ffi::Ffi::Bind()
        .Ctx<ffi::ThreadPool>()
        .Arg<ffi::Buffer<ffi::F32>>()
        .Arg<ffi::Buffer<ffi::S32>>()
        .Arg<ffi::Buffer<ffi::F32>>()
        .Arg<ffi::AnyBuffer>()
        .Arg<ffi::AnyBuffer>()
        .Arg<ffi::AnyBuffer>()
        .Arg<ffi::AnyBuffer>()
        .Arg<ffi::AnyBuffer>()
        .Arg<ffi::AnyBuffer>()
        .Arg<ffi::AnyBuffer>()
        .Arg<ffi::AnyBuffer>()
        .Arg<ffi::AnyBuffer>()
        .Arg<ffi::AnyBuffer>()
        .Arg<ffi::Buffer<ffi::F32>>()
        .Arg<ffi::Buffer<ffi::F32>>()
        .Ret<ffi::Buffer<ffi::F32>>()
        .Ret<ffi::Buffer<ffi::U8>>()
        .Attr<int64_t>("gate_kind")
        .Attr<int64_t>("down_kind")
        .Attr<int64_t>("gate")
        .Attr<float>("gate_limit")
        .Attr<float>("limit")
        .Attr<float>("alpha")
        .Attr<float>("shift"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    JaxinferDeltaDecode, jaxinfer::DeltaDecode,
    ffi::Ffi::Bind()
        .Ctx<ffi::ThreadPool>()
        .Arg<ffi::Buffer<ffi::F32>>()
        .Arg<ffi::Buffer<ffi::F32>>()
        .Arg<ffi::Buffer<ffi::F32>>()
        .Arg<ffi::Buffer<ffi::F32>>()
        .Arg<ffi::Buffer<ffi::F32>>()
        .Arg<ffi::Buffer<ffi::F32>>()
        .Arg<ffi::Buffer<ffi::F32>>()
        .Arg<ffi::Buffer<ffi::F32>>()
        .Arg<ffi::Buffer<ffi::S32>>()
        .Arg<ffi::Buffer<ffi::S32>>()
        .Arg<ffi::Buffer<ffi::S32>>()
        .Ret<ffi::Buffer<ffi::F32>>()
        .Ret<ffi::Buffer<ffi::F32>>()
        .Ret<ffi::Buffer<ffi::F32>>()
        .Attr<float>("eps")
        .Attr<bool>("sigmoid"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    JaxinferSsdDecode, jaxinfer::SsdDecode,
    ffi::Ffi::Bind()
        .Ctx<ffi::ThreadPool>()
        .Arg<ffi::Buffer<ffi::F32>>()
        .Arg<ffi::Buffer<ffi::F32>>()
        .Arg<ffi::Buffer<ffi::F32>>()
        .Arg<ffi::Buffer<ffi::F32>>()
        .Arg<ffi::Buffer<ffi::F32>>()
        .Arg<ffi::Buffer<ffi::F32>>()
        .Arg<ffi::Buffer<ffi::F32>>()
        .Arg<ffi::Buffer<ffi::S32>>()
        .Arg<ffi::Buffer<ffi::S32>>()
        .Arg<ffi::Buffer<ffi::S32>>()
        .Ret<ffi::Buffer<ffi::F32>>()
        .Ret<ffi::Buffer<ffi::F32>>()
        .Ret<ffi::Buffer<ffi::F32>>()
        .Attr<float>("lowest")
        .Attr<float>("highest"));

// The hash of the sources that this library was built of: see native/sources.py.
const char* jaxinfer_version() { return JAXINFER_VERSION; }

// The names of the variants that this processor runs, the fastest first, joined by spaces.
const char* jaxinfer_variants() {
  static const std::string names = [] {
    std::string joined;
    for (const jaxinfer::Variant* variant : jaxinfer::Variants()) {
      joined += joined.empty() ? variant->name : std::string(" ") + variant->name;
    }
    return joined;
  }();
  return names.c_str();
}

// Chooses a variant by its position in jaxinfer_variants.
void jaxinfer_choose(int index) { jaxinfer::chosen = index; }

// Packs nibbles from rows (see quantised.pack_nibbles; blocks of `block` inputs) into tiles.
void jaxinfer_pack_nibbles(const uint8_t* rows, uint8_t* tiles, int64_t outputs, int64_t inputs,
                           int64_t block) {
  const int64_t row_bytes = inputs / 2, half = block / 2;
  for (int64_t tile = 0; tile < outputs / 16; ++tile) {
    for (int64_t b = 0; b < inputs / block; ++b) {
      for (int64_t o = 0; o < 16; ++o) {
        // the first half of a block are the low nibbles of its bytes, in groups of 8 inputs
        const uint8_t* from = rows + (tile * 16 + o) * row_bytes + b * half;
        uint8_t* to = tiles + tile * 16 * row_bytes + b * half * 16 + 4 * o;
        for (int64_t e = 0; e < half / 8; ++e) {
          for (int j = 0; j < 4; ++j) {
            const uint8_t first = from[8 * e + j], second = from[8 * e + 4 + j];
            to[e * 64 + j] = (first & 15) | (second & 15) << 4;
            to[(e + half / 8) * 64 + j] = (first >> 4) | (second & 240);
          }
        }
      }
    }
  }
}

// Packs bytes from rows into tiles with their highest bit inverted: int8 become 128 higher.
void jaxinfer_pack_bytes(const uint8_t* rows, uint8_t* tiles, int64_t outputs, int64_t inputs) {
  for (int64_t tile = 0; tile < outputs / 16; ++tile) {
    for (int64_t quad = 0; quad < inputs / 4; ++quad) {
      uint8_t* to = tiles + (tile * (inputs / 4) + quad) * 64;
      for (int64_t o = 0; o < 16; ++o) {
        uint32_t four;
        std::memcpy(&four, rows + (tile * 16 + o) * inputs + quad * 4, 4);
        four ^= 0x80808080u;
        std::memcpy(to + 4 * o, &four, 4);
      }
    }
  }
}

}  // extern "C"
