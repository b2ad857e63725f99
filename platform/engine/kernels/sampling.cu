// The next token of each row of logits: penalties, temperature, top-k, top-p, min-p and the
// Gumbel-max choice with the noise of noise.py, in one launch. One block a row.
//
// Sums are of weights in fixed point (40 bits behind the point), so they are exact and do not depend
// on the order of the threads. Weights are expf((logit - best) / temperature): the best has 1.

constexpr int THREADS = 256;
constexpr int BINS = 256;

// One token that a row changes before it samples. count: of it in the output so far.
struct alignas(16) SamplingEdit {
  int token, count, flags;  // flags: 1 it was seen (repetition penalty), 2 it is masked
  float bias;
};

enum RowMode { SAMPLED, GREEDY, UNREAD };  // UNREAD: its logits stay as they are, -1 is chosen

// What one row asks for. edits: num_edits of them, of different tokens.
struct alignas(16) SamplingRow {
  unsigned long long key;
  const SamplingEdit* edits;
  double top_p, presence, frequency;
  float inverse_temperature, min_p, repetition;
  int top_k, num_edits, mode;
};

__device__ __forceinline__ float edited(float v, const SamplingRow& row, const SamplingEdit& edit) {
  if (edit.flags & 1) v = v > 0.f ? v / row.repetition : v * row.repetition;
  if (edit.count > 0) v -= (float)(row.presence + row.frequency * edit.count);
  v += edit.bias;
  return edit.flags & 2 ? __int_as_float(0xff800000) : v;
}

// An exponential draw for a token: exponentials() of noise.py.
__device__ __forceinline__ double exponential(unsigned long long key, unsigned token) {
  unsigned h = token * 0x9E3779B1u;
  h += (unsigned)key;
  h ^= h >> 17;
  h *= 0xED5AD4BBu;
  h += (unsigned)(key >> 32);
  h ^= h >> 11;
  h *= 0xAC4C1B51u;
  h ^= h >> 15;
  h *= 0x31848BABu;
  h ^= h >> 14;
  return -log((double)h * -0x1p-32 + (1.0 - 0x1p-33));
}

// The larger value's (value, token) of the whole block, of equals the lower token; in every thread.
template <typename V> struct Best {
  V value;
  int token;
};
template <typename V>
__device__ __forceinline__ Best<V> block_best(Best<V> mine, V* values, int* tokens) {
#pragma unroll
  for (int d = 16; d > 0; d >>= 1) {
    const V value = __shfl_xor_sync(0xffffffffu, mine.value, d);
    const int token = __shfl_xor_sync(0xffffffffu, mine.token, d);
    if (value > mine.value || (value == mine.value && token < mine.token)) mine = {value, token};
  }
  __syncthreads();
  if (threadIdx.x % 32 == 0) { values[threadIdx.x / 32] = mine.value; tokens[threadIdx.x / 32] = mine.token; }
  __syncthreads();
  mine = {values[0], tokens[0]};
  for (int w = 1; w < THREADS / 32; w++)
    if (values[w] > mine.value || (values[w] == mine.value && tokens[w] < mine.token)) mine = {values[w], tokens[w]};
  return mine;
}

// Which weights are kept: those whose bits are above `bits`, and of those with just these bits the
// tokens up to `last_token`.
struct Cut {
  unsigned bits;
  int last_token;
};
__device__ __forceinline__ bool keeps(const Cut& cut, float weight, int token) {
  const unsigned bits = __float_as_uint(weight);
  return bits > cut.bits || (bits == cut.bits && token <= cut.last_token);
}
__device__ __forceinline__ unsigned long long mass_of(float weight) {
  return (unsigned long long)(weight * 1099511627776.f);
}

// Shared memory of a search for a cut.
struct Search {
  unsigned long long bins[BINS], above;
  unsigned prefix;
  int last_token;
  int counts[THREADS / 32];
};

// The cut at the largest weight bits at which the tokens kept so far reach `target`, counted by mass
// or by number. Four digits of 8 bits, highest first; `search.above` ends as what lies above.
__device__ __forceinline__ unsigned find_bits(
    Search& search, const float* logits, int vocabulary, float best, float inverse_temperature,
    const Cut& kept, bool by_mass, double target) {
  __syncthreads();  // the last search's result may still be read
  if (threadIdx.x == 0) { search.above = 0; search.prefix = 0; }
  for (int shift = 24; shift >= 0; shift -= 8) {
    for (int b = threadIdx.x; b < BINS; b += THREADS) search.bins[b] = 0;
    __syncthreads();
    const unsigned prefix = search.prefix;
    for (int i = threadIdx.x; i < vocabulary; i += THREADS) {
      const float weight = expf((logits[i] - best) * inverse_temperature);
      const unsigned bits = __float_as_uint(weight);
      const bool in_prefix = shift == 24 || bits >> (shift + 8) == prefix;
      if (in_prefix && keeps(kept, weight, i))
        atomicAdd(&search.bins[bits >> shift & 255], by_mass ? mass_of(weight) : 1ull);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      unsigned long long above = search.above;
      int bin = BINS - 1;
      while (bin > 0 && (double)(above + search.bins[bin]) < target) above += search.bins[bin--];
      search.above = above;
      search.prefix = prefix << 8 | bin;
    }
    __syncthreads();
  }
  return search.prefix;
}

// The token that is the `wanted`-th (from 1) of those with just these bits, by token id.
__device__ __forceinline__ int nth_token(
    Search& search, const float* logits, int vocabulary, float best, float inverse_temperature,
    const Cut& kept, unsigned bits, long long wanted) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  long long before = 0;
  if (threadIdx.x == 0) search.last_token = 0x7fffffff;
  for (int first = 0; first < vocabulary; first += THREADS) {
    const int i = first + threadIdx.x;
    bool here = false;
    if (i < vocabulary) {
      const float weight = expf((logits[i] - best) * inverse_temperature);
      here = __float_as_uint(weight) == bits && keeps(kept, weight, i);
    }
    const unsigned votes = __ballot_sync(0xffffffffu, here);
    if (lane == 0) search.counts[warp] = __popc(votes);
    __syncthreads();
    long long rank = before + __popc(votes & ((1u << lane) - 1));
    for (int w = 0; w < THREADS / 32; w++) {
      if (w < warp) rank += search.counts[w];
      before += search.counts[w];
    }
    if (here && rank == wanted - 1) search.last_token = i;
    __syncthreads();
    if (before >= wanted) break;
  }
  return search.last_token;
}

__device__ __forceinline__ Cut top_p_cut(
    Search& search, const float* logits, int vocabulary, float best, float inverse_temperature,
    const Cut& kept, double top_p) {
  find_bits(search, logits, vocabulary, best, inverse_temperature, kept, true, 0x1p63);
  // Nothing reaches that target: the search ends in the lowest bins, and all mass but theirs is above.
  __shared__ unsigned long long total;
  if (threadIdx.x == 0) total = search.above + search.bins[0];
  __syncthreads();
  const double target = fmax(top_p * (double)total, 1.0);  // the likeliest token always stays
  const unsigned bits =
      find_bits(search, logits, vocabulary, best, inverse_temperature, kept, true, target);
  const unsigned long long mass = mass_of(__uint_as_float(bits));
  if (mass == 0) return {bits, 0x7fffffff};
  long long wanted = (long long)((target - (double)search.above) / (double)mass);
  while ((double)(search.above + wanted * mass) < target) wanted++;
  if (wanted < 1) wanted = 1;
  return {bits, nth_token(search, logits, vocabulary, best, inverse_temperature, kept, bits, wanted)};
}

// chosen[row] = the next token, -1 if the logits have a NaN or no finite best, or are not to be read.
// The logits of a row [vocabulary] are changed by its edits. grid (rows), block THREADS.
__global__ void __launch_bounds__(THREADS, 1) sample_rows(
    int* __restrict__ chosen, float* __restrict__ all_logits, const SamplingRow* __restrict__ rows,
    int vocabulary) {
  __shared__ SamplingRow row;
  __shared__ Search search;
  __shared__ double values[THREADS / 32];
  __shared__ float logit_values[THREADS / 32];
  __shared__ int tokens[THREADS / 32];
  float* logits = all_logits + (long long)blockIdx.x * vocabulary;
  if (threadIdx.x == 0) row = rows[blockIdx.x];
  __syncthreads();
  if (row.mode == UNREAD) {
    if (threadIdx.x == 0) chosen[blockIdx.x] = -1;
    return;
  }
  for (int e = threadIdx.x; e < row.num_edits; e += THREADS) {
    const SamplingEdit edit = row.edits[e];
    logits[edit.token] = edited(logits[edit.token], row, edit);
  }
  __syncthreads();
  Best<float> best = {__int_as_float(0xff800000), 0x7fffffff};
  bool broken = false;
  for (int i = threadIdx.x; i < vocabulary; i += THREADS) {
    const float v = logits[i];
    broken |= v != v;
    if (v > best.value) best = {v, i};
  }
  broken = __syncthreads_or(broken);
  best = block_best<float>(best, logit_values, tokens);
  if (broken || fabsf(best.value) > 3.4028234e38f) {
    if (threadIdx.x == 0) chosen[blockIdx.x] = -1;
    return;
  }
  if (row.mode == GREEDY) {
    if (threadIdx.x == 0) chosen[blockIdx.x] = best.token;
    return;
  }
  const float inverse = row.inverse_temperature;
  Cut cut = {0, 0x7fffffff};
  if (row.top_k > 0 && row.top_k < vocabulary)
    cut.bits = find_bits(search, logits, vocabulary, best.value, inverse, cut, false, row.top_k);
  if (row.top_p < 1.0)
    cut = top_p_cut(search, logits, vocabulary, best.value, inverse, cut, row.top_p);
  Best<double> choice = {-1.0, 0x7fffffff};
  for (int i = threadIdx.x; i < vocabulary; i += THREADS) {
    const float weight = expf((logits[i] - best.value) * inverse);
    if (keeps(cut, weight, i) && weight >= row.min_p) {
      const double ratio = (double)weight / exponential(row.key, i);
      if (ratio > choice.value) choice = {ratio, i};
    }
  }
  choice = block_best<double>(choice, values, tokens);
  if (threadIdx.x == 0) chosen[blockIdx.x] = choice.token;
}
