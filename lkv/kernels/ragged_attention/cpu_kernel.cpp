// Attention over ragged KV pools on a CPU, for the few query rows of a decode step.
//
// S spans (one for each batch row and KV head), R query rows a span (new tokens times query heads of the group), D and
// Dv channels of k and v, P entries of the pools. Span s has entries starts[s] to starts[s] + length(s) - 1 of the pools,
// of which the last `added` are the new tokens: this step copies them there. The first entries of a span may be stored
// as codes of 8, 4 or 3 bits or in FP8 instead, value = level(code) * norm (QuantizedKV in arguments.py, which also checks
// all shapes and has the levels; the layout is that of lkv/cache/tiers.py).
//
// The entries of all spans, one span after another, are one axis that is cut into equal slices, so that threads share
// the work equally however unequal the spans are. A slice gives each span that it overlaps a partial softmax (largest
// score, sum of weights, weighted sum of v), and the partial softmaxes of a span are merged at the end. Scores are in
// base 2.
//
// Codes are expanded in registers, one table lookup for kLanes of them, and multiplied by up to kMaxRows queries (each
// lane an entry, so that no sums over lanes are left) or weights there; norms multiply the scores and the weights. Where
// `can_expand` is false and for the last few keys, codes are restored in float32 instead.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

namespace {

using at::Tensor;
using at::vec::fmadd;
using std::max;
using std::min;
using Vec = at::vec::Vectorized<float>;

constexpr int64_t kLanes = Vec::size();
constexpr int64_t kBlock = 64;                // entries that pass through the caches together
constexpr int64_t kTogether = 8;              // entries whose products are computed side by side
constexpr int64_t kGroup = 16;                // entries whose codes are
constexpr int64_t kMinSharedBytes = 1 << 18;  // of keys and values, below which a second thread saves nothing
constexpr int64_t kSlicesPerThread = 2;       // a thread that was interrupted leaves slices to the others
constexpr int64_t kMinSharedProducts = 1 << 17;  // of a rotation, below which a second thread saves nothing
constexpr int64_t kMaxRows = 4;               // rows whose sums are in registers together
constexpr int64_t kMaxExpandedRows = 8;       // beyond that, codes are restored once for all rows
constexpr float kNegInf = -std::numeric_limits<float>::infinity();
static_assert(kBlock % kLanes == 0 && (kLanes == 8 || kLanes == 16 || kLanes == 4));

// {x[0] + x[1], x[2] + x[3], ..., y[0] + y[1], ...}
inline Vec add_neighbours(Vec x, Vec y) {
  auto [even, odd] = at::vec::deinterleave2(x, y);
  return even + odd;
}

// Writes the sums over the lanes of each of kTogether vectors, times `scale`.
inline void store_lane_sums(const Vec (&x)[kTogether], float scale, float* out) {
  Vec low = add_neighbours(add_neighbours(x[0], x[1]), add_neighbours(x[2], x[3]));
  Vec high = add_neighbours(add_neighbours(x[4], x[5]), add_neighbours(x[6], x[7]));
  if constexpr (kLanes == 4) (high * Vec(scale)).store(out + 4);
  Vec sums = kLanes == 4 ? low : add_neighbours(low, high);
  if constexpr (kLanes == 16) sums = add_neighbours(sums, sums);
  (sums * Vec(scale)).store(out, min(kTogether, kLanes));
}

// Calls f(channel, channels) for kLanes channels at a time, and for the rest of `dim`.
template <typename F>
inline void for_lanes(int64_t dim, F f) {
  int64_t c = 0;
  for (; c + kLanes <= dim; c += kLanes) f(c, kLanes);
  if (c < dim) f(c, dim - c);
}

// scores[i] = scale * (q . k[i]) for `count` entries k [count, dim]; there is space for a multiple of kTogether scores.
void dot_products(const float* q, const float* k, int64_t count, int64_t dim, float scale, float* scores) {
  for (int64_t first = 0; first < count; first += kTogether) {
    const float* entry[kTogether];
    Vec sums[kTogether];
    for (int j = 0; j < kTogether; ++j) entry[j] = k + min(first + j, count - 1) * dim, sums[j] = Vec(0.f);
    for_lanes(dim, [&](int64_t c, int64_t lanes) {
      Vec query = Vec::loadu(q + c, lanes);
      for (int j = 0; j < kTogether; ++j) sums[j] = fmadd(query, Vec::loadu(entry[j] + c, lanes), sums[j]);
    });
    store_lane_sums(sums, scale, scores + first);
  }
}

// sums += sum over i of weights[i] * v[i] for N entries v [N, dim].
template <int N>
void add_weighted(const float* weights, const float* v, int64_t dim, float* sums) {
  for_lanes(dim, [&](int64_t c, int64_t lanes) {
    // Two chains of additions, so that neither waits long for its last one.
    Vec even = Vec::loadu(sums + c, lanes), odd(0.f);
    for (int j = 0; j < N; j += 2) {
      even = fmadd(Vec(weights[j]), Vec::loadu(v + j * dim + c, lanes), even);
      if (j + 1 < N) odd = fmadd(Vec(weights[j + 1]), Vec::loadu(v + (j + 1) * dim + c, lanes), odd);
    }
    (even + odd).store(sums + c, lanes);
  });
}

// Adds `count` scores to the partial softmax of a row: extremes [2] (largest score, sum of weights), and sums [dim],
// which shrink where the largest score rises. Turns the scores, which have space for a multiple of kLanes, into weights.
void add_scores(float* scores, int64_t count, int64_t dim, float* extremes, float* sums) {
  int64_t padded = (count + kLanes - 1) / kLanes * kLanes;
  std::fill(scores + count, scores + padded, kNegInf);
  Vec tops = Vec::loadu(scores);
  for (int64_t i = kLanes; i < padded; i += kLanes) tops = at::vec::maximum(tops, Vec::loadu(scores + i));
  float top = at::vec::vec_reduce_all<float>([](Vec& x, Vec& y) { return at::vec::maximum(x, y); }, tops);
  if (!(top <= extremes[0])) {  // larger, or NaN, which makes all of the row NaN
    float shrink = extremes[0] == kNegInf ? 0.f : std::exp2(extremes[0] - top);
    extremes[0] = top;
    extremes[1] *= shrink;
    for (int64_t c = 0; c < dim; ++c) sums[c] *= shrink;
  }
  // Where all scores are -infinity, their difference to the largest would be NaN.
  Vec base(extremes[0] == kNegInf ? 0.f : extremes[0]), weight(0.f);
  for (int64_t i = 0; i < padded; i += kLanes) {
    Vec weights = (Vec::loadu(scores + i) - base).exp2();
    weights.store(scores + i);
    weight = weight + weights;
  }
  extremes[1] += at::vec::vec_reduce_all<float>([](Vec& x, Vec& y) { return x + y; }, weight);
}

// sums += sum over i of weights[i] * v[i] for `count` entries v [count, dim].
void add_values(const float* weights, const float* v, int64_t count, int64_t dim, float* sums) {
  int64_t i = 0;
  for (; i + kTogether <= count; i += kTogether) add_weighted<kTogether>(weights + i, v + i * dim, dim, sums);
  for (; i < count; ++i) add_weighted<1>(weights + i, v + i * dim, dim, sums);
}

// scores[i] = cap tanh(scores[i] / cap) for `count` scores, with space for a multiple of kLanes.
void cap_scores(float* scores, int64_t count, float cap) {
  for (int64_t i = 0; i < count; i += kLanes)
    (Vec(cap) * (Vec::loadu(scores + i) / Vec(cap)).tanh()).store(scores + i);
}

struct Codes {
  const uint8_t *key, *value;                   // [N, bytes of an entry]
  const at::BFloat16 *key_norm, *value_norm;    // [N]
  const int32_t *count, *first;                 // [S] each: entries of a span, and the first of them
  int64_t key_bits, value_bits, entries;
};

struct Step {
  const float* q;           // [S, R, D]
  float *out, *lse;         // [S, R, Dv]; [S, R] or null
  void *k, *v;              // pools [P, D], [P, Dv]
  const void *key, *value;  // new entries [S, added, D], [S, added, Dv], in the dtype of the pools
  const int32_t* starts;    // [S]
  int32_t* lens;            // [S], without the new entries
  int64_t entries, spans, rows, tokens, dim, value_dim, added, slices, slice_size;
  float scale, softcap;     // in base 2; softcap is 0 for none
  bool causal;
  std::vector<Codes> codes;  // the first entries of a span are those of codes[0], the next those of codes[1], ...
  float *sums, *extremes, *scratch;  // [slices + S, R, Dv], [slices + S, R, 2], [slices, scratch_size()]

  int64_t length(int64_t span) const { return int64_t(lens[span]) + added; }
  // Scores of a block, and a block of k or v in float32 (or of norms).
  int64_t scratch_size() const { return kBlock * (rows + max(dim, value_dim)); }
};

// `count` numbers in float32: where they are, or in `buffer`.
template <typename T>
const float* as_float(const T* source, int64_t count, float* buffer) {
  if constexpr (std::is_same_v<T, float>) {
    return source;
  } else {
    int64_t i = 0;
    for (; i + 2 * kLanes <= count; i += 2 * kLanes) {
      auto [low, high] = at::vec::convert_to_float<T>(at::vec::Vectorized<T>::loadu(source + i));
      low.store(buffer + i);
      high.store(buffer + i + kLanes);
    }
    for (; i < count; ++i) buffer[i] = source[i];
    return buffer;
  }
}

// Channels j, j + dim / kVectors, ... are word j: byte j, and of 3 bits half of a byte behind the first dim / 4 ones.
constexpr int kFp8 = -8;
template <int B>
constexpr int kWidth = B < 0 ? -B : B;
template <int B>
constexpr int kVectors = kWidth<B> == 8 ? 1 : B == 4 ? 2 : 4;

// Code c of B bits stands for u (slope + cubic u^2), u = c - middle. Of FP8 its bits, where a float has them, are a number
// that is kFp8Factor times too small.
constexpr float kFp8Factor = 0x1p116f;
template <int B>
constexpr float kSlope = B == 8 ? 0.015859471f : B == 4 ? 0.24050725f : 0.47145524f;
template <int B>
constexpr float kCubic = B == 8 ? 1.0520814e-06f : B == 4 ? 0.0020975307f : 0.011584845f;
template <int B>
inline float level(int code) {
  if constexpr (B == kFp8) return kFp8Factor * std::bit_cast<float>((code & 128) << 24 | (code & 127) << 20);
  float u = float(code) - float((1 << B) - 1) / 2;
  return u * (kSlope<B> + kCubic<B> * (u * u));
}

// `count` entries of codes of B bits from entry `first` on, into `out` [count, dim].
template <int B>
const float* restore(const uint8_t* codes, const at::BFloat16* norms, int64_t first, int64_t count, int64_t dim,
                     float* __restrict out) {
  const uint8_t* __restrict code = codes + first * (dim * kWidth<B> / 8);
  const int64_t stride = dim / kVectors<B>, words = B == 3 ? stride / 2 : stride;
  for (int64_t i = 0; i < count; ++i, out += dim, code += dim * kWidth<B> / 8) {
    const float norm = norms[first + i];
    for (int64_t part = 0; part < (B == 3 ? 2 : 1); ++part) {
      const uint8_t *__restrict low = code + part * words, *__restrict halves = code + stride;
      float* __restrict target = out + part * words;
#pragma omp simd
      for (int64_t c = 0; c < words; ++c) {
        int word = B == 3 ? low[c] | (halves[c] >> 4 * part & 15) << 8 : low[c];
        for (int j = 0; j < kVectors<B>; ++j)
          target[j * stride + c] = norm * level<B>(word >> kWidth<B> * j & ((1 << kWidth<B>) - 1));
      }
    }
  }
  return out - count * dim;
}

// f<B>() for B = `bits`.
template <typename F>
auto with_bits(int64_t bits, F f) {
  if (bits == kFp8) return f.template operator()<kFp8>();
  return bits == 8 ? f.template operator()<8>() : bits == 4 ? f.template operator()<4>() : f.template operator()<3>();
}

// What expands codes: kLanes integers from bytes, levels from a table of 16, of which an index is read modulo 16, and
// 16 bytes from each of kLanes / 4 places.
using Ints = uint32_t __attribute__((vector_size(4 * kLanes)));
#if defined(CPU_CAPABILITY_AVX512)
#define SIMD(operation) _mm512_##operation
using Register = __m512i;
Ints load_bytes(const void* x) { return Ints(_mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(x)))); }
template <int B>
inline Vec look_up(const float* table, Ints index) {
  return _mm512_permutexvar_ps(Register(index), _mm512_loadu_ps(table));
}
inline Register load_lanes(const uint8_t* x, int64_t apart) {
  auto lane = [&](int i) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(x + i * apart)); };
  Register two = _mm512_inserti32x4(_mm512_castsi128_si512(lane(0)), lane(1), 1);
  return _mm512_inserti32x4(_mm512_inserti32x4(two, lane(2), 2), lane(3), 3);
}
#elif defined(CPU_CAPABILITY_AVX2)
#define SIMD(operation) _mm256_##operation
using Register = __m256i;
Ints load_bytes(const void* x) { return Ints(_mm256_cvtepu8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(x)))); }
template <int B>
inline Vec look_up(const float* table, Ints index) {
  __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), Register(index));  // of the index modulo 8
  if constexpr (B == 3) return low;
  __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table + 8), Register(index));
  return _mm256_blendv_ps(low, high, __m256(index << 28));
}
inline Register load_lanes(const uint8_t* x, int64_t apart) {
  return _mm256_loadu2_m128i(reinterpret_cast<const __m128i*>(x + apart), reinterpret_cast<const __m128i*>(x));
}
#endif

// Whether codes can be expanded: no step of 16 bytes crosses the halves that `restore` tells apart, or an entry's end.
bool can_expand(int64_t bits, int64_t dim, int64_t rows) {
  bool fits = std::abs(bits) == 8 ? dim % 16 == 0 : bits == 4 ? dim % 32 == 0 : dim % 128 == 0 || dim == 64;
  return kLanes > 4 && rows <= kMaxExpandedRows && fits;
}

#ifdef SIMD
// Expands codes of B bits, kLanes words (bytes, or 12 bits) at a time, to kVectors vectors `stride` channels apart.
template <int B>
struct Expander {
  int64_t stride, bytes;  // of an entry
  float table[16];

  explicit Expander(int64_t dim) : stride(dim / kVectors<B>), bytes(dim * kWidth<B> / 8) {
    for (int code = 0; code < 16; ++code) table[code] = level<B>(code % (1 << kWidth<B>));
  }

  // Levels, without a norm, of words, above which there may be other bits if B is not 8.
  void expand(Ints word, Vec (&x)[kVectors<B>]) const {
    if constexpr (B == kFp8) {
      using Floats = float __attribute__((vector_size(4 * kLanes)));
      x[0] = Vec(Floats((word & 128) << 24 | (word & 127) << 20)) * Vec(kFp8Factor);
    } else if constexpr (B == 8) {
      Vec u = Vec(SIMD(cvtepi32_ps)(Register(word))) - Vec(127.5f);
      x[0] = u * fmadd(u * u, Vec(kCubic<B>), Vec(kSlope<B>));
    } else {
      for (int i = 0; i < kVectors<B>; ++i) x[i] = look_up<B>(table, word >> (B * i));
    }
  }

  // Words c to c + kLanes - 1 of an entry; c < stride.
  Ints words(const uint8_t* entry, int64_t c) const {
    Ints low = load_bytes(entry + c);
    if constexpr (B != 3) return low;
    const uint8_t* halves = entry + stride;
    int64_t count = stride / 2;
#if defined(CPU_CAPABILITY_AVX512)
    if (count == kLanes / 2) {  // the low halves of 8 bytes, then their high ones
      __m128i all = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(halves));
      Ints bytes = Ints(_mm512_cvtepu8_epi32(_mm_unpacklo_epi64(all, all)));
      return low | bytes >> Ints{0, 0, 0, 0, 0, 0, 0, 0, 4, 4, 4, 4, 4, 4, 4, 4} << 8;
    }
#endif
    return low | load_bytes(halves + c % count) >> uint32_t(c < count ? 0 : 4) << 8;
  }

  // Bytes c + 4 w to c + 4 w + 3 of kLanes entries, an entry a lane of low[w]; high[w]: upper bits of such words.
  void load_columns(const uint8_t* entries, int64_t c, Ints (&low)[4], Ints (&high)[4]) const {
    transpose(entries + c, low);
    if constexpr (B == 3) {
      Ints halves[4];
      transpose(entries + stride + (stride == 16 ? -8 : c % (stride / 2)), halves);
      for (int w = 0; w < 4; ++w)
        high[w] = halves[stride == 16 ? 2 + w % 2 : w] >> 4 * uint32_t(stride == 16 ? w / 2 : 2 * c / stride);
    }
  }
  void transpose(const uint8_t* code, Ints (&x)[4]) const {
    Register rows[4];
    for (int i = 0; i < 4; ++i, code += bytes) {
      asm("" : "+r"(code));  // no register for each of kLanes addresses
      rows[i] = load_lanes(code, 4 * bytes);
    }
    Register a = SIMD(unpacklo_epi32)(rows[0], rows[1]), b = SIMD(unpacklo_epi32)(rows[2], rows[3]);
    x[0] = Ints(SIMD(unpacklo_epi64)(a, b)), x[1] = Ints(SIMD(unpackhi_epi64)(a, b));
    a = SIMD(unpackhi_epi32)(rows[0], rows[1]), b = SIMD(unpackhi_epi32)(rows[2], rows[3]);
    x[2] = Ints(SIMD(unpacklo_epi64)(a, b)), x[3] = Ints(SIMD(unpackhi_epi64)(a, b));
  }
};

// scores[r][i] = scale * (q[r] . code[i]), norms left out, for R rows of q [R, dim] and `count` entries, kGroup of them
// at a time, an entry a lane; scores are [R, kBlock].
template <int B, int R>
void coded_products(const float* q, const uint8_t* code, int64_t count, int64_t dim, float scale, float* scores) {
  constexpr int kParts = kGroup / kLanes;
  const Expander<B> expander(dim);
  for (int64_t next = 0; next < count; next += kGroup) {
    const int64_t first = min(next, count - kGroup);  // the last ones may come twice
    Vec sums[R][2], x[kParts][kVectors<B>];
    for (int r = 0; r < R; ++r) sums[r][0] = sums[r][1] = Vec(0.f);
    for (int64_t c = 0; c < expander.stride; c += 16) {
      Ints low[kParts][4], high[kParts][4];
      for (int p = 0; p < kParts; ++p)
        expander.load_columns(code + (first + p * kLanes) * expander.bytes, c, low[p], high[p]);
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) {
        for (int p = 0; p < kParts; ++p) {
          Ints word = low[p][i / 4] >> 8 * (i % 4);
          if constexpr (B == 8) word &= 255;
          if constexpr (B == 3) word = (word & 255) | high[p][i / 4] >> 8 * (i % 4) << 8;
          expander.expand(word, x[p]);
        }
        for (int j = 0; j < kVectors<B>; ++j)
          for (int r = 0; r < R; ++r) {
            Vec query(q[r * dim + j * expander.stride + c + i]);
            for (int p = 0; p < kParts; ++p) {
              Vec& sum = sums[r][kParts == 1 ? i % 2 : p];  // of one part two chains, so that neither waits long
              sum = fmadd(x[p][j], query, sum);
            }
          }
      }
    }
    for (int r = 0; r < R; ++r) {
      if constexpr (kParts == 1) sums[r][0] = sums[r][0] + sums[r][1];
      for (int p = 0; p < kParts; ++p) (sums[r][p] * Vec(scale)).store(scores + r * kBlock + first + p * kLanes);
    }
  }
}

// sums[r] += sum over i of weights[r][i] * code[i], norms left out; weights are [R, kBlock] and sums [R, dim].
template <int B, int R>
void add_coded(const float* weights, const uint8_t* code, int64_t count, int64_t dim, float* sums) {
  const Expander<B> expander(dim);
  for (int64_t c = 0; c < expander.stride; c += kLanes) {
    Vec sum[R][kVectors<B>], x[kVectors<B>];
    for (int r = 0; r < R; ++r)
      for (int i = 0; i < kVectors<B>; ++i) sum[r][i] = Vec::loadu(sums + r * dim + i * expander.stride + c);
#pragma GCC unroll 4
    for (int64_t j = 0; j < count; ++j) {
      expander.expand(expander.words(code + j * expander.bytes, c), x);
      for (int r = 0; r < R; ++r)
        for (int i = 0; i < kVectors<B>; ++i) sum[r][i] = fmadd(Vec(weights[r * kBlock + j]), x[i], sum[r][i]);
    }
    for (int r = 0; r < R; ++r)
      for (int i = 0; i < kVectors<B>; ++i) sum[r][i].store(sums + r * dim + i * expander.stride + c);
  }
}

// Calls f<B, R>(row) for all rows, R of them at a time.
template <typename F>
void for_rows(int64_t bits, int64_t rows, F f) {
  with_bits(bits, [&]<int B>() {
    for (int64_t row = 0; row < rows; row += kMaxRows) {
      switch (min(kMaxRows, rows - row)) {
        case 1: f.template operator()<B, 1>(row); break;
        case 2: f.template operator()<B, 2>(row); break;
        case 3: f.template operator()<B, 3>(row); break;
        default: f.template operator()<B, 4>(row);
      }
    }
  });
}
#else
// Never called, as `can_expand` is false.
template <int, int> void coded_products(const float*, const uint8_t*, int64_t, int64_t, float, float*) {}
template <int, int> void add_coded(const float*, const uint8_t*, int64_t, int64_t, float*) {}
template <typename F> void for_rows(int64_t, int64_t, F) {}
#endif

// Multiplies `rows` rows [rows, kBlock] by the norms of `count` entries; `buffer` has space for kBlock numbers.
void multiply_by_norms(const at::BFloat16* norms, int64_t count, int64_t rows, float* values, float* buffer) {
  as_float(norms, count, buffer);
  std::fill(buffer + count, buffer + kBlock, 0.f);
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t i = 0; i < kBlock; ++i) values[row * kBlock + i] *= buffer[i];
}

// The partial softmax of all rows of a span over its entries `begin` to `end`, into `slot`.
template <typename T>
void attend_part(const Step& s, float* scores, int64_t slot, int64_t span, int64_t begin, int64_t end) {
  float* block = scores + kBlock * s.rows;
  float *extremes = s.extremes + 2 * slot * s.rows, *sums = s.sums + slot * s.rows * s.value_dim;
  std::fill_n(sums, s.rows * s.value_dim, 0.f);
  for (int64_t row = 0; row < s.rows; ++row) extremes[2 * row] = kNegInf, extremes[2 * row + 1] = 0;
  const T *k_span = static_cast<T*>(s.k) + s.starts[span] * s.dim;
  const T *v_span = static_cast<T*>(s.v) + s.starts[span] * s.value_dim;
  int64_t length = s.length(span), earlier = 0;  // entries of parts before this one
  auto part = s.codes.begin();
  for (int64_t first = begin, count; first < end; first += count) {
    for (; part != s.codes.end() && first >= earlier + part->count[span]; ++part) earlier += part->count[span];
    const Codes* codes = part == s.codes.end() ? nullptr : &*part;
    count = min({kBlock, end - first, codes ? earlier + codes->count[span] - first : kBlock});
    int64_t entry = codes ? codes->first[span] + first - earlier : first;
    const float* q = s.q + span * s.rows * s.dim;
    if (codes && count >= kGroup && can_expand(codes->key_bits, s.dim, s.rows)) {
      const uint8_t* code = codes->key + entry * (s.dim * std::abs(codes->key_bits) / 8);
      for_rows(codes->key_bits, s.rows, [&]<int B, int R>(int64_t row) {
        coded_products<B, R>(q + row * s.dim, code, count, s.dim, s.scale, scores + kBlock * row);
      });
      multiply_by_norms(codes->key_norm + entry, count, s.rows, scores, block);
    } else {
      const float* k = codes ? with_bits(codes->key_bits, [&]<int B>() {
        return restore<B>(codes->key, codes->key_norm, entry, count, s.dim, block);
      }) : as_float(k_span + entry * s.dim, count * s.dim, block);
      for (int64_t row = 0; row < s.rows; ++row)
        dot_products(q + row * s.dim, k, count, s.dim, s.scale, scores + kBlock * row);
    }
    auto seen = [&](int64_t row) {  // of `count` entries; later ones are newer than the token of the row
      return s.causal ? std::clamp(length - s.tokens + row % s.tokens + 1 - first, int64_t(0), count) : count;
    };
    for (int64_t row = 0; row < s.rows; ++row) {
      if (s.softcap != 0) cap_scores(scores + kBlock * row, count, s.softcap);
      std::fill(scores + kBlock * row + seen(row), scores + kBlock * row + count, kNegInf);
      add_scores(scores + kBlock * row, count, s.value_dim, extremes + 2 * row, sums + row * s.value_dim);
    }
    if (codes && can_expand(codes->value_bits, s.value_dim, s.rows)) {
      const uint8_t* code = codes->value + entry * (s.value_dim * std::abs(codes->value_bits) / 8);
      multiply_by_norms(codes->value_norm + entry, count, s.rows, scores, block);
      for_rows(codes->value_bits, s.rows, [&]<int B, int R>(int64_t row) {
        add_coded<B, R>(scores + kBlock * row, code, count, s.value_dim, sums + row * s.value_dim);
      });
    } else {
      const float* v = codes ? with_bits(codes->value_bits, [&]<int B>() {
        return restore<B>(codes->value, codes->value_norm, entry, count, s.value_dim, block);
      }) : as_float(v_span + entry * s.value_dim, count * s.value_dim, block);
      for (int64_t row = 0; row < s.rows; ++row)
        add_values(scores + kBlock * row, v, seen(row), s.value_dim, sums + row * s.value_dim);
    }
  }
}

// Copies those new entries of a span that are among its entries `begin` to `end` into the pools.
template <typename T>
void append_part(const Step& s, int64_t span, int64_t begin, int64_t end) {
  for (int64_t i = max(begin, int64_t(s.lens[span])); i < end; ++i) {
    int64_t source = span * s.added + i - s.lens[span], target = s.starts[span] + i;
    std::copy_n(static_cast<const T*>(s.key) + source * s.dim, s.dim, static_cast<T*>(s.k) + target * s.dim);
    std::copy_n(static_cast<const T*>(s.value) + source * s.value_dim, s.value_dim,
                static_cast<T*>(s.v) + target * s.value_dim);
  }
}

template <typename T>
void attend_slice(const Step& s, int64_t slice) {
  int64_t low = slice * s.slice_size, flat = 0;
  for (int64_t span = 0; span < s.spans; ++span) {
    int64_t begin = max(low - flat, int64_t(0)), end = min(low + s.slice_size - flat, s.length(span));
    if (begin < end) {
      append_part<T>(s, span, begin, end);
      // From one part to the next either the slice or the span rises, so that their sum is a slot of its own.
      attend_part<T>(s, s.scratch + slice * s.scratch_size(), slice + span, span, begin, end);
    }
    flat += s.length(span);
  }
}

// Outputs and log-sum-exps from the partial softmaxes; a row that sees nothing has 0 and -infinity.
void merge_slices(const Step& s) {
  int64_t flat = 0;
  for (int64_t span = 0; span < s.spans; ++span) {
    int64_t length = s.length(span), first = flat / s.slice_size;
    int64_t last = length > 0 ? (flat + length - 1) / s.slice_size : first - 1;
    for (int64_t row = 0; row < s.rows; ++row) {
      float top = kNegInf, weight = 0, *out = s.out + (span * s.rows + row) * s.value_dim;
      std::fill_n(out, s.value_dim, 0.f);
      for (int64_t slice = first; slice <= last; ++slice)
        top = max(top, s.extremes[2 * ((slice + span) * s.rows + row)]);
      for (int64_t slice = first; slice <= last; ++slice) {
        int64_t slot = (slice + span) * s.rows + row;
        float factor = std::exp2(s.extremes[2 * slot] - (top == kNegInf ? 0.f : top));
        weight += factor * s.extremes[2 * slot + 1];
        for (int64_t c = 0; c < s.value_dim; ++c) out[c] += factor * s.sums[slot * s.value_dim + c];
      }
      if (weight != 0)
        for (int64_t c = 0; c < s.value_dim; ++c) out[c] /= weight;
      if (s.lse) s.lse[span * s.rows + row] = weight != 0 ? (top + std::log2(weight)) * float(M_LN2) : kNegInf;
    }
    flat += length;
  }
}

template <typename T>
void attend_slices(const Step& s, int64_t threads) {
  std::atomic<int64_t> next{0};
  at::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    for (int64_t slice; (slice = next++) < s.slices;) attend_slice<T>(s, slice);
  });
}

// The entries of all spans. What starts, lens and tables say is checked before anything is read or written by it.
int64_t check_spans(const Step& s) {
  int64_t total = 0;
  for (int64_t span = 0; span < s.spans; ++span) {
    int64_t start = s.starts[span], length = s.length(span), coded = 0;
    bool fits = true;
    for (const Codes& part : s.codes) {
      int64_t count = part.count[span], first = part.first[span];
      fits = fits && count >= 0 && (count == 0 || (first >= 0 && first + count <= part.entries));
      coded += count;
    }
    fits = fits && coded <= s.lens[span] && (length == coded || (start + coded >= 0 && start + length <= s.entries));
    TORCH_CHECK_VALUE(fits, "Span ", span, " of starts and lens reaches beyond the pools or codes: it must lie within "
                      "them, new entries included.");
    total += length;
  }
  return total;
}

// A storage may have been shrunk below what its tensor's shape says.
void check_storage(const Tensor& x) {
  int64_t extent = x.numel() ? 1 : 0;
  for (int64_t i = 0; i < x.dim() && extent; ++i) extent += (x.size(i) - 1) * x.stride(i);
  TORCH_CHECK_VALUE((extent ? x.storage_offset() + extent : 0) * x.itemsize() <= int64_t(x.storage().nbytes()),
                    "The storage of a tensor of shape ", x.sizes(), " is too small for it: its memory was freed.");
}

// Calls f(row, buffer) for all rows, with space for dim + kTogether numbers.
template <typename F>
void for_each_row(int64_t rows, int64_t dim, F f) {
  at::parallel_for(0, rows, max(int64_t(1), kMinSharedProducts / (dim * dim)), [&](int64_t begin, int64_t end) {
    std::vector<float> buffer(dim + kTogether);
    for (int64_t row = begin; row < end; ++row) f(row, buffer.data());
  });
}

// The coordinates of the entries stored: k' = (k - mean) / scale . key_rotation, v' = v . value_rotation (Basis in
// basis.py); all of it in float32.
struct Basis {
  const float *mean, *scale, *key_rotation, *value_rotation;  // [S, D], [S, D], [D, D], [Dv, Dv]
  int64_t spans;

  // q' = (q scale) . key_rotation of queries [B, Hq, Tq, D], which has the products of q and k - mean.
  Tensor enter_queries(const Tensor& q) const {
    return rotate(q, key_rotation, [&](float x, int64_t channel) { return x * scale[channel]; });
  }
  // k' of keys [B, Hkv, T, D], in their dtype.
  Tensor enter_keys(const Tensor& key) const {
    return rotate(key, key_rotation, [&](float x, int64_t channel) { return (x - mean[channel]) / scale[channel]; });
  }
  // v' of values [B, Hkv, T, Dv], in their dtype.
  Tensor enter_values(const Tensor& value) const {
    return rotate(value, value_rotation, [](float x, int64_t) { return x; });
  }
  // Outputs [B, Hq, Tq, Dv] from those over v', in place.
  void leave_outputs(Tensor& out) const {
    int64_t dim = out.size(3);
    float* data = out.mutable_data_ptr<float>();
    for_each_row(out.numel() / dim, dim, [&](int64_t row, float* buffer) {
      dot_products(data + row * dim, value_rotation, dim, dim, 1.f, buffer);
      std::copy_n(buffer, dim, data + row * dim);
    });
  }
  // Log-sum-exps from those of q' and k', which lack `factor` times the products of q and the mean.
  void leave_lse(Tensor& lse, const Tensor& q, float factor) const {
    int64_t dim = q.size(3), rows = max(int64_t(1), lse.numel() / spans);
    const float* x = q.const_data_ptr<float>();
    float* target = lse.mutable_data_ptr<float>();
    for (int64_t row = 0; row < lse.numel(); ++row) {
      float product = 0;
      for (int64_t c = 0; c < dim; ++c) product += x[row * dim + c] * mean[row / rows * dim + c];
      target[row] += factor * product;
    }
  }

 private:
  // prepare(x, channel of [S, dim]) . rotation for each row x of [B, H, T, dim], in its dtype.
  template <typename F>
  Tensor rotate(const Tensor& x, const float* rotation, F prepare) const {
    Tensor input = x.to(at::kFloat).contiguous(), result = at::empty(x.sizes(), input.options());
    int64_t dim = x.size(3), all = x.numel() / dim, rows = max(int64_t(1), all / spans);
    const float* source = input.const_data_ptr<float>();
    float* target = result.mutable_data_ptr<float>();
    for_each_row(all, dim, [&](int64_t row, float* buffer) {
      for (int64_t c = 0; c < dim; ++c) buffer[c] = prepare(source[row * dim + c], row / rows * dim + c);
      std::fill_n(target + row * dim, dim, 0.f);
      add_values(buffer, rotation, dim, dim, target + row * dim);
    });
    return result.to(x.scalar_type());
  }
};

// `codes` are the first five fields of each QuantizedKV and `bits` the others, `basis` the fields of a Basis or nothing.
// Returns outputs [B, Hq, Tq, Dv] and, if wanted, their log-sum-exp [B, Hq, Tq]; new entries are appended and counted in
// lens.
std::tuple<Tensor, Tensor> attend(const Tensor& q, Tensor& k_pool, Tensor& v_pool, const Tensor& starts, Tensor& lens,
                                  double scale, bool causal, bool with_lse, const std::optional<Tensor>& key,
                                  const std::optional<Tensor>& value, at::TensorList codes, at::IntArrayRef bits,
                                  at::TensorList basis_tensors, std::optional<double> softcap) {
  for (const Tensor* x : {&q, &std::as_const(k_pool), &std::as_const(v_pool), &starts, &std::as_const(lens)})
    check_storage(*x);
  if (key) check_storage(*key), check_storage(*value);
  for (at::TensorList tensors : {codes, basis_tensors})
    for (const Tensor& x : tensors) check_storage(x);
  Step s{};
  s.entries = k_pool.size(0), s.spans = starts.numel(), s.tokens = q.size(2);
  s.rows = s.tokens * (q.size(1) / starts.size(1));
  s.dim = q.size(3), s.value_dim = v_pool.size(1), s.added = key ? key->size(2) : 0;
  s.scale = float(scale * M_LOG2E), s.softcap = float(softcap.value_or(0) * M_LOG2E), s.causal = causal;
  TORCH_CHECK_VALUE(basis_tensors.empty() || basis_tensors.size() == 4, "A basis has four tensors.");
  std::optional<Basis> basis;
  Tensor mean, channel_scale;
  if (!basis_tensors.empty()) {
    mean = basis_tensors[0].to(at::kFloat), channel_scale = basis_tensors[1].to(at::kFloat);
    basis = Basis{mean.const_data_ptr<float>(), channel_scale.const_data_ptr<float>(),
                  basis_tensors[2].const_data_ptr<float>(), basis_tensors[3].const_data_ptr<float>(), s.spans};
  }
  Tensor original = q.to(at::kFloat).contiguous(), query = basis ? basis->enter_queries(original) : original;
  Tensor new_key = !key ? Tensor() : basis ? basis->enter_keys(*key) : key->contiguous();
  Tensor new_value = !key ? Tensor() : basis ? basis->enter_values(*value) : value->contiguous();
  Tensor out = at::empty({q.size(0), q.size(1), s.tokens, s.value_dim}, query.options());
  Tensor lse = with_lse ? at::empty({q.size(0), q.size(1), s.tokens}, query.options()) : Tensor();
  s.q = query.const_data_ptr<float>(), s.out = out.mutable_data_ptr<float>();
  s.lse = with_lse ? lse.mutable_data_ptr<float>() : nullptr;
  s.k = k_pool.mutable_data_ptr(), s.v = v_pool.mutable_data_ptr();
  s.key = key ? new_key.const_data_ptr() : nullptr, s.value = key ? new_value.const_data_ptr() : nullptr;
  s.starts = starts.const_data_ptr<int32_t>(), s.lens = lens.mutable_data_ptr<int32_t>();
  int64_t bytes = k_pool.nbytes() + v_pool.nbytes();
  TORCH_CHECK_VALUE(2 * codes.size() == 5 * bits.size(), "Each quantised part has five tensors and two widths.");
  for (size_t part = 0; 2 * part < bits.size(); ++part) {
    const Tensor* x = codes.data() + 5 * part;
    const int32_t* tables = x[4].const_data_ptr<int32_t>();
    s.codes.push_back({x[0].const_data_ptr<uint8_t>(), x[2].const_data_ptr<uint8_t>(),
                       x[1].const_data_ptr<at::BFloat16>(), x[3].const_data_ptr<at::BFloat16>(), tables,
                       tables + s.spans, bits[2 * part], bits[2 * part + 1], x[0].size(0)});
    bytes += x[0].nbytes() + x[2].nbytes();
  }
  int64_t total = check_spans(s);
  int64_t threads = bytes < kMinSharedBytes ? 1 : at::get_num_threads();
  s.slices = threads == 1 ? 1 : kSlicesPerThread * threads;
  s.slice_size = max(int64_t(1), (total + s.slices - 1) / s.slices);
  int64_t parts = (s.slices + s.spans) * s.rows;
  Tensor buffer = at::empty({parts * (s.value_dim + 2) + s.slices * s.scratch_size()}, query.options());
  s.sums = buffer.mutable_data_ptr<float>();
  s.extremes = s.sums + parts * s.value_dim, s.scratch = s.extremes + 2 * parts;
  switch (k_pool.scalar_type()) {
    case at::kFloat: attend_slices<float>(s, threads); break;
    case at::kBFloat16: attend_slices<at::BFloat16>(s, threads); break;
    case at::kHalf: attend_slices<at::Half>(s, threads); break;
    default: TORCH_CHECK_VALUE(false, "The pools have dtype ", k_pool.scalar_type(), ".");
  }
  merge_slices(s);
  if (basis) basis->leave_outputs(out);
  if (basis && with_lse) basis->leave_lse(lse, original, float(scale));
  for (int64_t span = 0; span < s.spans; ++span) s.lens[span] += int32_t(s.added);
  return {out.to(q.scalar_type()), lse};
}

TORCH_LIBRARY(lkv, library) {
  library.def(
      "ragged_attention(Tensor q, Tensor(a!) k_pool, Tensor(b!) v_pool, Tensor starts, Tensor(c!) lens, float scale, "
      "bool causal, bool with_lse, Tensor? key, Tensor? value, Tensor[] codes, int[] bits, Tensor[] basis, "
      "float? softcap) -> (Tensor, Tensor)",
      attend);
}

}  // namespace
