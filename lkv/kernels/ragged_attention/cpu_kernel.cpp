// Attention over ragged KV pools on a CPU, for the few query rows of a decode step.
//
// S spans (one for each batch row and KV head), R query rows a span (new tokens times query heads of the group), D and
// Dv channels of k and v, P entries of the pools. Span s has entries starts[s] to starts[s] + length(s) - 1 of the pools,
// of which the last `added` are the new tokens: this step copies them there. The first entries of a span may be stored
// as 8- or 4-bit codes instead, value = code * scale + minimum (QuantizedKV in api.py, which also checks all shapes).
//
// The entries of all spans, one span after another, are one axis that is cut into equal slices, so that threads share
// the work equally however unequal the spans are. A slice gives each span that it overlaps a partial softmax (largest
// score, sum of weights, weighted sum of v), and the partial softmaxes of a span are merged at the end. Scores are in
// base 2.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <optional>
#include <utility>

namespace {

using at::Tensor;
using at::vec::fmadd;
using std::max;
using std::min;
using Vec = at::vec::Vectorized<float>;

constexpr int64_t kLanes = Vec::size();
constexpr int64_t kBlock = 64;                // entries that pass through the caches together
constexpr int64_t kTogether = 8;              // entries whose products are computed side by side
constexpr int64_t kMinSharedBytes = 1 << 18;  // of keys and values, below which a second thread saves nothing
constexpr int64_t kSlicesPerThread = 2;       // a thread that was interrupted leaves slices to the others
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
  if constexpr (kLanes == 4) {
    (low * Vec(scale)).store(out);
    (high * Vec(scale)).store(out + 4);
  } else {
    Vec sums = add_neighbours(low, high);
    if constexpr (kLanes == 16) sums = add_neighbours(sums, sums);
    (sums * Vec(scale)).store(out, kTogether);
  }
}

// scores[i] = scale * (q . k[i]) for `count` entries k [count, dim]; there is space for a multiple of kTogether scores.
void dot_products(const float* q, const float* k, int64_t count, int64_t dim, float scale, float* scores) {
  for (int64_t first = 0; first < count; first += kTogether) {
    const float* entry[kTogether];
    Vec sums[kTogether];
    for (int j = 0; j < kTogether; ++j) {
      entry[j] = k + min(first + j, count - 1) * dim;
      sums[j] = Vec(0.f);
    }
    int64_t c = 0;
    for (; c + kLanes <= dim; c += kLanes) {
      Vec query = Vec::loadu(q + c);
      for (int j = 0; j < kTogether; ++j) sums[j] = fmadd(query, Vec::loadu(entry[j] + c), sums[j]);
    }
    if (c < dim) {
      Vec query = Vec::loadu(q + c, dim - c);
      for (int j = 0; j < kTogether; ++j) sums[j] = fmadd(query, Vec::loadu(entry[j] + c, dim - c), sums[j]);
    }
    store_lane_sums(sums, scale, scores + first);
  }
}

// sums += sum over i of weights[i] * v[i] for N entries v [N, dim].
template <int N>
void add_weighted(const float* weights, const float* v, int64_t dim, float* sums) {
  auto add = [&](int64_t c, int64_t lanes) {
    // Two chains of additions, so that neither waits long for its last one.
    Vec even = Vec::loadu(sums + c, lanes), odd(0.f);
    for (int j = 0; j < N; j += 2) {
      even = fmadd(Vec(weights[j]), Vec::loadu(v + j * dim + c, lanes), even);
      if (j + 1 < N) odd = fmadd(Vec(weights[j + 1]), Vec::loadu(v + (j + 1) * dim + c, lanes), odd);
    }
    (even + odd).store(sums + c, lanes);
  };
  int64_t c = 0;
  for (; c + kLanes <= dim; c += kLanes) add(c, kLanes);
  if (c < dim) add(c, dim - c);
}

// Adds `count` entries to the partial softmax of a row: extremes [2] (largest score, sum of weights) and sums [dim].
// `scores` has space for a multiple of kLanes.
void add_block(float* scores, const float* v, int64_t count, int64_t dim, float* extremes, float* sums) {
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
  int64_t i = 0;
  for (; i + kTogether <= count; i += kTogether) add_weighted<kTogether>(scores + i, v + i * dim, dim, sums);
  for (; i < count; ++i) add_weighted<1>(scores + i, v + i * dim, dim, sums);
}

struct Codes {
  const uint8_t *key, *value;                          // [N, bytes of an entry]
  const at::BFloat16 *key_scale, *value_scale;         // [groups, D], [N, groups of channels]
  const void *key_minimum, *value_minimum;             // the same, float16 or bfloat16
  const int32_t *coded, *first_entry, *first_group;    // [S] each
  int64_t bits, group_size, entries, groups;
  bool is_half;  // the dtype of the minimums
};

struct Step {
  const float* q;           // [S, R, D]
  float *out, *lse;         // [S, R, Dv]; [S, R] or null
  void *k, *v;              // pools [P, D], [P, Dv]
  const void *key, *value;  // new entries [S, added, D], [S, added, Dv], in the dtype of the pools
  const int32_t* starts;    // [S]
  int32_t* lens;            // [S], without the new entries
  int64_t entries, spans, rows, tokens, dim, value_dim, added, slices, slice_size;
  float scale;
  bool causal;
  std::optional<Codes> codes;
  float *sums, *extremes, *scratch;  // [slices + S, R, Dv], [slices + S, R, 2], [slices, scratch_size()]

  int64_t length(int64_t span) const { return int64_t(lens[span]) + added; }
  int64_t coded(int64_t span) const { return codes ? codes->coded[span] : 0; }
  // Scores of a block, a block of k or v in float32, and the scales and minimums of a group of k.
  int64_t scratch_size() const { return kBlock * (rows + max(dim, value_dim)) + 2 * dim; }
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

inline float minimum_at(const Codes& codes, const void* minimums, int64_t index) {
  return codes.is_half ? float(static_cast<const at::Half*>(minimums)[index])
                       : float(static_cast<const at::BFloat16*>(minimums)[index]);
}

// Entries of a span from its code `begin` on, into `out` [count, D]; `scales` has space for 2 * D numbers.
const float* restore_keys(const Step& s, int64_t span, int64_t begin, int64_t count, float* out, float* scales) {
  const Codes& codes = *s.codes;
  int64_t half = (s.dim + 1) / 2, width = codes.bits == 8 ? s.dim : half, last_group = -1;
  float* minimums = scales + s.dim;
  for (int64_t i = 0; i < count; ++i, out += s.dim) {
    int64_t group = codes.first_group[span] + (begin + i) / codes.group_size;
    if (group != last_group) {
      last_group = group;
      as_float(codes.key_scale + group * s.dim, s.dim, scales);
      for (int64_t c = 0; c < s.dim; ++c) minimums[c] = minimum_at(codes, codes.key_minimum, group * s.dim + c);
    }
    const uint8_t* code = codes.key + (codes.first_entry[span] + begin + i) * width;
    if (codes.bits == 8) {
#pragma omp simd
      for (int64_t c = 0; c < s.dim; ++c) out[c] = float(code[c]) * scales[c] + minimums[c];
    } else {
      // The low bits of a byte are a channel of the first half, the high bits one of the second.
      int64_t pairs = s.dim / 2;
#pragma omp simd
      for (int64_t c = 0; c < pairs; ++c) {
        out[c] = float(code[c] & 15) * scales[c] + minimums[c];
        out[half + c] = float(code[c] >> 4) * scales[half + c] + minimums[half + c];
      }
      if (pairs < half) out[pairs] = float(code[pairs] & 15) * scales[pairs] + minimums[pairs];
    }
  }
  return out - count * s.dim;
}

// As restore_keys, where a group is of channels of one entry.
const float* restore_values(const Step& s, int64_t span, int64_t begin, int64_t count, float* out) {
  const Codes& codes = *s.codes;
  int64_t dim = s.value_dim, size = codes.group_size, groups = (dim + size - 1) / size;
  int64_t half = (dim + 1) / 2, width = codes.bits == 8 ? dim : half;
  for (int64_t i = 0; i < count; ++i, out += dim) {
    int64_t entry = codes.first_entry[span] + begin + i;
    const uint8_t* code = codes.value + entry * width;
    auto scale_of = [&](int64_t c) { return float(codes.value_scale[entry * groups + c / size]); };
    auto minimum_of = [&](int64_t c) { return minimum_at(codes, codes.value_minimum, entry * groups + c / size); };
    if (codes.bits == 8) {
      for (int64_t low = 0; low < dim; low += size) {
        float scale = scale_of(low), minimum = minimum_of(low);
#pragma omp simd
        for (int64_t c = low; c < min(low + size, dim); ++c) out[c] = float(code[c]) * scale + minimum;
      }
    } else {
      // Bytes up to the next at which the channel in the low or in the high bits begins a group.
      for (int64_t low = 0, high; low < half; low = high) {
        high = min({half, (low / size + 1) * size, ((half + low) / size + 1) * size - half});
        float scale = scale_of(low), minimum = minimum_of(low);
        int64_t pairs = min(high, dim - half), other = min(half + low, dim - 1);
        float other_scale = scale_of(other), other_minimum = minimum_of(other);
#pragma omp simd
        for (int64_t c = low; c < pairs; ++c) {
          out[c] = float(code[c] & 15) * scale + minimum;
          out[half + c] = float(code[c] >> 4) * other_scale + other_minimum;
        }
        if (pairs < high) out[pairs] = float(code[pairs] & 15) * scale + minimum;
      }
    }
  }
  return out - count * dim;
}

// The partial softmax of all rows of a span over its entries `begin` to `end`, into `slot`.
template <typename T>
void attend_part(const Step& s, float* scores, int64_t slot, int64_t span, int64_t begin, int64_t end) {
  float *block = scores + kBlock * s.rows, *scales = block + kBlock * max(s.dim, s.value_dim);
  float *extremes = s.extremes + 2 * slot * s.rows, *sums = s.sums + slot * s.rows * s.value_dim;
  std::fill_n(sums, s.rows * s.value_dim, 0.f);
  for (int64_t row = 0; row < s.rows; ++row) {
    extremes[2 * row] = kNegInf;
    extremes[2 * row + 1] = 0;
  }
  const T *k_span = static_cast<T*>(s.k) + s.starts[span] * s.dim;
  const T *v_span = static_cast<T*>(s.v) + s.starts[span] * s.value_dim;
  int64_t length = s.length(span), coded = s.coded(span);
  for (int64_t first = begin, count; first < end; first += count) {
    bool is_coded = first < coded;
    count = min(kBlock, (is_coded ? min(end, coded) : end) - first);
    const float* k = is_coded ? restore_keys(s, span, first, count, block, scales)
                              : as_float(k_span + first * s.dim, count * s.dim, block);
    for (int64_t row = 0; row < s.rows; ++row)
      dot_products(s.q + (span * s.rows + row) * s.dim, k, count, s.dim, s.scale, scores + kBlock * row);
    const float* v = is_coded ? restore_values(s, span, first, count, block)
                              : as_float(v_span + first * s.value_dim, count * s.value_dim, block);
    for (int64_t row = 0; row < s.rows; ++row) {
      int64_t seen = s.causal ? min(count, length - s.tokens + row % s.tokens + 1 - first) : count;
      if (seen > 0)
        add_block(scores + kBlock * row, v, seen, s.value_dim, extremes + 2 * row, sums + row * s.value_dim);
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

// What starts, lens and tables say is checked before anything is read or written by it.
void check_spans(const Step& s) {
  for (int64_t span = 0; span < s.spans; ++span) {
    int64_t start = s.starts[span], length = s.length(span), coded = s.coded(span);
    bool fits = 0 <= coded && coded <= s.lens[span] &&
                (length == coded || (start + coded >= 0 && start + length <= s.entries));
    if (fits && coded > 0) {
      int64_t first = s.codes->first_entry[span], group = s.codes->first_group[span];
      int64_t groups = (coded + s.codes->group_size - 1) / s.codes->group_size;
      fits = first >= 0 && first + coded <= s.codes->entries && group >= 0 && group + groups <= s.codes->groups;
    }
    TORCH_CHECK_VALUE(fits, "Span ", span, " of starts and lens reaches beyond the pools or codes: it must lie within "
                      "them, new entries included.");
  }
}

// A storage may have been shrunk below what its tensor's shape says.
void check_storage(const Tensor& x) {
  int64_t extent = x.numel() ? 1 : 0;
  for (int64_t i = 0; i < x.dim() && extent; ++i) extent += (x.size(i) - 1) * x.stride(i);
  TORCH_CHECK_VALUE((extent ? x.storage_offset() + extent : 0) * x.itemsize() <= int64_t(x.storage().nbytes()),
                    "The storage of a tensor of shape ", x.sizes(), " is too small for it: its memory was freed.");
}

// `codes` is empty or the first seven fields of QuantizedKV. Returns outputs [B, Hq, Tq, Dv] and, if wanted, their
// log-sum-exp [B, Hq, Tq]; new entries are appended and counted in lens.
std::tuple<Tensor, Tensor> attend(const Tensor& q, Tensor& k_pool, Tensor& v_pool, const Tensor& starts, Tensor& lens,
                                  double scale, bool causal, bool with_lse, const std::optional<Tensor>& key,
                                  const std::optional<Tensor>& value, at::TensorList codes, int64_t bits,
                                  int64_t group_size) {
  for (const Tensor* x : {&q, &std::as_const(k_pool), &std::as_const(v_pool), &starts, &std::as_const(lens)})
    check_storage(*x);
  if (key) check_storage(*key), check_storage(*value);
  for (const Tensor& x : codes) check_storage(x);
  Step s{};
  s.entries = k_pool.size(0), s.spans = starts.numel(), s.tokens = q.size(2);
  s.rows = s.tokens * (q.size(1) / starts.size(1));
  s.dim = q.size(3), s.value_dim = v_pool.size(1), s.added = key ? key->size(2) : 0;
  s.scale = float(scale * M_LOG2E), s.causal = causal;
  Tensor query = q.to(at::kFloat).contiguous();
  Tensor new_key = key ? key->contiguous() : Tensor(), new_value = value ? value->contiguous() : Tensor();
  Tensor out = at::empty({q.size(0), q.size(1), s.tokens, s.value_dim}, query.options());
  Tensor lse = with_lse ? at::empty({q.size(0), q.size(1), s.tokens}, query.options()) : Tensor();
  s.q = query.const_data_ptr<float>(), s.out = out.mutable_data_ptr<float>();
  s.lse = with_lse ? lse.mutable_data_ptr<float>() : nullptr;
  s.k = k_pool.mutable_data_ptr(), s.v = v_pool.mutable_data_ptr();
  s.key = key ? new_key.const_data_ptr() : nullptr, s.value = value ? new_value.const_data_ptr() : nullptr;
  s.starts = starts.const_data_ptr<int32_t>(), s.lens = lens.mutable_data_ptr<int32_t>();
  int64_t bytes = k_pool.nbytes() + v_pool.nbytes();
  if (!codes.empty()) {
    const int32_t* tables = codes[6].const_data_ptr<int32_t>();
    s.codes = Codes{codes[0].const_data_ptr<uint8_t>(), codes[3].const_data_ptr<uint8_t>(),
                    codes[1].const_data_ptr<at::BFloat16>(), codes[4].const_data_ptr<at::BFloat16>(),
                    codes[2].const_data_ptr(), codes[5].const_data_ptr(),
                    tables, tables + s.spans, tables + 2 * s.spans,
                    bits, group_size, codes[0].size(0), codes[1].size(0), codes[2].scalar_type() == at::kHalf};
    bytes += codes[0].nbytes() + codes[3].nbytes();
  }
  check_spans(s);
  int64_t total = 0;
  for (int64_t span = 0; span < s.spans; ++span) total += s.length(span);
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
  for (int64_t span = 0; span < s.spans; ++span) s.lens[span] += int32_t(s.added);
  return {out.to(q.scalar_type()), lse};
}

TORCH_LIBRARY(lkv, library) {
  library.def(
      "ragged_attention(Tensor q, Tensor(a!) k_pool, Tensor(b!) v_pool, Tensor starts, Tensor(c!) lens, float scale, "
      "bool causal, bool with_lse, Tensor? key, Tensor? value, Tensor[] codes, int bits, int group_size) "
      "-> (Tensor, Tensor)",
      attend);
}

}  // namespace
