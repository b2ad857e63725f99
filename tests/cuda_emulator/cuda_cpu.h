// cuda_cpu.h -- runs the text of CUDA C++ kernels on the CPU, for tests.
//
// One fiber per CUDA thread, one block at a time, all on the calling OS thread. A fiber runs until
// it reaches a barrier or a warp collective, or returns; the order in which ready fibers run is
// drawn from a seed, so that a missing barrier shows up as a wrong or unstable result.
// Reported as errors (launch() returns non-zero, error() has the text), the process lives on:
// barriers and collectives that can never complete, threads of a block at different barriers,
// shuffles from lanes that take no part, SIGSEGV/SIGBUS (guard pages after dynamic shared memory
// and after the test's own buffers), SIGILL (UBSan in trap mode: misaligned vectors, array bounds).
#pragma once
#include <csetjmp>
#include <csignal>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cmath>
#include <algorithm>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>
#include <dlfcn.h>
#include <sys/mman.h>
#include <ucontext.h>

#ifdef CUDA_CPU_TOOLKIT  // the toolkit's own host implementation of vectors, half and bfloat16
#include <vector_types.h>
#include <vector_functions.h>
#include <cuda_fp16.h>
#include <cuda_bf16.h>
#undef __global__
#undef __device__
#undef __host__
#undef __constant__
#undef __forceinline__
#undef __launch_bounds__
#endif
#define __global__
#define __device__
#define __host__
#define __constant__
#define __grid_constant__
#define __launch_bounds__(...)
#define __forceinline__ inline __attribute__((always_inline))

#ifndef CUDA_CPU_TOOLKIT
#define __align__(n) __attribute__((aligned(n)))
#define CUDA_CPU_VEC(T, N, A1, A2, A4)                                                              \
  struct alignas(A1) N##1 { T x; };                                                                  \
  struct alignas(A2) N##2 { T x, y; };                                                               \
  struct N##3 { T x, y, z; };                                                                        \
  struct alignas(A4) N##4 { T x, y, z, w; };                                                         \
  inline N##2 make_##N##2(T x, T y) { return {x, y}; }                                               \
  inline N##3 make_##N##3(T x, T y, T z) { return {x, y, z}; }                                       \
  inline N##4 make_##N##4(T x, T y, T z, T w) { return {x, y, z, w}; }
CUDA_CPU_VEC(signed char, char, 1, 2, 4)
CUDA_CPU_VEC(unsigned char, uchar, 1, 2, 4)
CUDA_CPU_VEC(short, short, 2, 4, 8)
CUDA_CPU_VEC(unsigned short, ushort, 2, 4, 8)
CUDA_CPU_VEC(int, int, 4, 8, 16)
CUDA_CPU_VEC(unsigned, uint, 4, 8, 16)
CUDA_CPU_VEC(long long, longlong, 8, 16, 16)
CUDA_CPU_VEC(float, float, 4, 8, 16)
CUDA_CPU_VEC(double, double, 8, 16, 16)
struct dim3 { unsigned x = 1, y = 1, z = 1; dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {} };

struct __half { unsigned short b; };
struct __nv_bfloat16 { unsigned short b; };
struct alignas(4) __half2 { __half x, y; };
struct alignas(4) __nv_bfloat162 { __nv_bfloat16 x, y; };
typedef __half half; typedef __half2 half2;
typedef __nv_bfloat16 nv_bfloat16; typedef __nv_bfloat162 nv_bfloat162;
inline float __half2float(__half h) { _Float16 f; memcpy(&f, &h, 2); return (float)f; }
inline __half __float2half_rn(float v) { _Float16 f = (_Float16)v; __half h; memcpy(&h, &f, 2); return h; }
inline __half __float2half(float v) { return __float2half_rn(v); }
inline float __bfloat162float(__nv_bfloat16 h) { unsigned u = (unsigned)h.b << 16; float f; memcpy(&f, &u, 4); return f; }
inline __nv_bfloat16 __float2bfloat16_rn(float v) {
  unsigned u; memcpy(&u, &v, 4);
  if ((u & 0x7fffffffu) > 0x7f800000u) return {0x7fff};
  return {(unsigned short)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16)};
}
inline __nv_bfloat16 __float2bfloat16(float v) { return __float2bfloat16_rn(v); }
inline float2 __half22float2(__half2 v) { return {__half2float(v.x), __half2float(v.y)}; }
inline float2 __bfloat1622float2(__nv_bfloat162 v) { return {__bfloat162float(v.x), __bfloat162float(v.y)}; }
inline __half2 __floats2half2_rn(float a, float b) { return {__float2half_rn(a), __float2half_rn(b)}; }
inline __nv_bfloat162 __floats2bfloat162_rn(float a, float b) { return {__float2bfloat16_rn(a), __float2bfloat16_rn(b)}; }
#endif

namespace cuda_cpu {
enum State : uint8_t { READY, AT_BLOCK, AT_WARP, DONE };
enum Op : uint8_t { SYNC, SHFL, BALLOT };
struct Fiber {
  void* sp; char* stack; uint3 tid; unsigned id; State state; Op op; int line; unsigned mask; int src;
  alignas(8) unsigned char val[8], res[8];
#if defined(__SANITIZE_ADDRESS__)
  void* fake;
#endif
  void* tsan;
};
constexpr size_t STACK = 128 << 10, PAGE = 4096, SMEM_MAX = 256 << 10;
inline std::vector<Fiber> fibers;
inline Fiber* cur;
inline uint3 bid; inline dim3 gdim, bdim;
inline unsigned total, live, arrived, phase; inline int pred_sum, pred_res;
inline void (*entry)(void*); inline void* entry_arg;
inline void* main_sp; inline bool failed; inline char msg[1024]; inline uint64_t rng;
inline char *smem_end, *smem; inline size_t smem_size, smem_static, smem_limit;
inline std::vector<void*> poisoned;
inline sigjmp_buf escape;
inline unsigned warp_waiting[32], warp_living[32];  // lanes at a collective, lanes not done
inline unsigned long long loaded, stored;  // bytes of global memory, by all launches

#if defined(__SANITIZE_ADDRESS__)
extern "C" void __sanitizer_start_switch_fiber(void**, const void*, size_t);
extern "C" void __sanitizer_finish_switch_fiber(void*, const void**, size_t*);
extern "C" void __asan_unpoison_memory_region(void const volatile*, size_t);
inline void* main_fake; inline const void* main_bottom; inline size_t main_size;
#endif

#if defined(__SANITIZE_THREAD__)  // a race detector over shared and global memory: only barriers order threads
extern "C" void* __tsan_get_current_fiber(); extern "C" void* __tsan_create_fiber(unsigned);
extern "C" void __tsan_destroy_fiber(void*); extern "C" void __tsan_switch_to_fiber(void*, unsigned);
extern "C" void __tsan_acquire(void*); extern "C" void __tsan_release(void*);
extern "C" void AnnotateIgnoreReadsBegin(const char*, int); extern "C" void AnnotateIgnoreReadsEnd(const char*, int);
extern "C" void AnnotateIgnoreWritesBegin(const char*, int); extern "C" void AnnotateIgnoreWritesEnd(const char*, int);
inline void* main_tsan; inline char order_block[2], order_warp[32], order_grid;
struct Quiet {  // the runtime's own memory is not looked at
  Quiet() { AnnotateIgnoreReadsBegin("", 0); AnnotateIgnoreWritesBegin("", 0); }
  ~Quiet() { AnnotateIgnoreReadsEnd("", 0); AnnotateIgnoreWritesEnd("", 0); }
};
#define CUDA_CPU_TSAN(...) __VA_ARGS__
#else
struct Quiet { Quiet() {} };
#define CUDA_CPU_TSAN(...)
#endif

#if defined(__x86_64__) && !defined(CUDA_CPU_UCONTEXT)
__attribute__((naked, noinline)) inline void swap_stack(void**, void*) {  // save here, load there
  asm volatile("pushq %rbp\n\tpushq %rbx\n\tpushq %r12\n\tpushq %r13\n\tpushq %r14\n\tpushq %r15\n\t"
               "movq %rsp,(%rdi)\n\tmovq %rsi,%rsp\n\t"
               "popq %r15\n\tpopq %r14\n\tpopq %r13\n\tpopq %r12\n\tpopq %rbx\n\tpopq %rbp\n\tret");
}
inline void* new_stack(char* top, void (*fn)()) {
  void** s = (void**)top - 2; s[0] = (void*)fn; s[1] = nullptr;
  for (int i = 0; i < 6; i++) *--s = nullptr;
  return s;
}
#else  // any other processor: ucontext (slower: a system call a switch)
inline void swap_stack(void** save, void* load) {
  ucontext_t me; *save = &me; swapcontext(&me, (ucontext_t*)load);
}
inline void* new_stack(char* top, void (*fn)()) {
  auto* u = (ucontext_t*)(top - ((sizeof(ucontext_t) + 63) & ~63ul)); getcontext(u);
  u->uc_stack.ss_sp = top - STACK; u->uc_stack.ss_size = (char*)u - (top - STACK); u->uc_link = nullptr;
  makecontext(u, fn, 0); return u;
}
#endif

__attribute__((no_sanitize_address)) inline void to_main(bool dying = false) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(dying ? nullptr : &cur->fake, main_bottom, main_size);
#endif
  (void)dying; Fiber* me = cur;
  CUDA_CPU_TSAN(__tsan_switch_to_fiber(main_tsan, 1));
  swap_stack(&me->sp, main_sp);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(me->fake, &main_bottom, &main_size);
#endif
}
__attribute__((no_sanitize_address)) inline void to_fiber(Fiber& f) {
  cur = &f;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&main_fake, f.stack, STACK);
#endif
  CUDA_CPU_TSAN(__tsan_switch_to_fiber(f.tsan, 1));
  swap_stack(&main_sp, f.sp);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(main_fake, nullptr, nullptr);
#endif
}
inline void describe(const char* fmt, va_list ap) {
  int n = snprintf(msg, sizeof msg, "block (%u,%u,%u) thread (%u,%u,%u): ", bid.x, bid.y, bid.z,
                   cur->tid.x, cur->tid.y, cur->tid.z);
  vsnprintf(msg + n, sizeof msg - n, fmt, ap); failed = true;
}
[[noreturn]] inline void fail(const char* fmt, ...) {  // from a fiber: never comes back
  va_list ap; va_start(ap, fmt); describe(fmt, ap); va_end(ap);
  for (;;) to_main(true);
}

inline void try_block() {  // releases the block's barrier once every thread still alive is there
  if (arrived == 0 || arrived < live) return;
  Fiber* first = nullptr;
  for (auto& f : fibers) if (f.id < total && f.state == AT_BLOCK) {
    if (!first) first = &f;
    else if (f.line != first->line)
      fail("barrier divergence: thread %u waits at line %d, thread %u at line %d", first->id, first->line, f.id, f.line);
  }
  pred_res = pred_sum; pred_sum = 0; arrived = 0; phase++;
  for (unsigned i = 0; i < total; i++) if (fibers[i].state == AT_BLOCK) fibers[i].state = READY;
}
inline int block_barrier(int pred, int line) {
  Quiet q;
  CUDA_CPU_TSAN(char* token = &order_block[phase & 1]; __tsan_release(token));
  cur->state = AT_BLOCK; cur->line = line; arrived++; pred_sum += pred != 0;
  try_block();
  if (cur->state != READY) to_main();
  CUDA_CPU_TSAN(__tsan_acquire(token));
  return pred_res;
}
inline void try_warp(Fiber& f) {  // completes f's collective once all of its living lanes are at it
  unsigned base = f.id & ~31u, n = std::min(32u, total - base), votes = 0;
  for (unsigned l = 0; l < n; l++) if (f.mask >> l & 1) {
    Fiber& o = fibers[base + l];
    if (o.state == DONE) continue;
    if (o.state != AT_WARP || o.mask != f.mask || o.op != f.op || o.line != f.line) return;
    votes |= (unsigned)(o.val[0] != 0) << l;
  }
  for (unsigned l = 0; l < n; l++) if (f.mask >> l & 1) {
    Fiber& o = fibers[base + l];
    if (o.state == DONE) continue;
    if (o.op == BALLOT) memcpy(o.res, &votes, 4);
    if (o.op == SHFL) {
      if ((unsigned)o.src >= n || !(o.mask >> o.src & 1) || fibers[base + o.src].state == DONE)
        fail("line %d: lane %u shuffles from lane %d, which takes no part", o.line, l, o.src);
      memcpy(o.res, fibers[base + o.src].val, 8);
    }
  }
  for (unsigned l = 0; l < n; l++) if ((f.mask >> l & 1) && fibers[base + l].state == AT_WARP) {
    fibers[base + l].state = READY; warp_waiting[base >> 5] &= ~(1u << l);
  }
}
inline void collective(unsigned mask, Op op, int src, int line) {
  Fiber& f = *cur;
  if (!(mask >> (f.id & 31) & 1)) fail("line %d: the calling lane is not in the mask %08x", line, mask);
  f.state = AT_WARP; f.op = op; f.src = src; f.line = line; f.mask = mask;
  const unsigned warp = f.id >> 5;
  warp_waiting[warp] |= 1u << (f.id & 31);
  if (!(mask & warp_living[warp] & ~warp_waiting[warp])) try_warp(f);
  if (f.state != READY) to_main();
}
template <class T> T shuffle(unsigned mask, T v, int src, int line) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable<T>::value, "shuffle of a type over 8 bytes");
  Quiet q;
  memcpy(cur->val, &v, sizeof v); collective(mask, SHFL, src, line);
  memcpy(&v, cur->res, sizeof v); return v;
}
inline int lane() { return cur->id & 31; }
template <class T> T shfl_idx(int line, unsigned m, T v, int s, int w = 32) { return shuffle(m, v, (lane() & ~(w - 1)) | (s & (w - 1)), line); }
template <class T> T shfl_xor(int line, unsigned m, T v, int x, int w = 32) { int s = lane() ^ x; return shuffle(m, v, (s & ~(w - 1)) > (lane() & ~(w - 1)) ? lane() : s, line); }
template <class T> T shfl_down(int line, unsigned m, T v, unsigned d, int w = 32) { int s = lane() + d; return shuffle(m, v, (lane() & (w - 1)) + (int)d >= w ? lane() : s, line); }
template <class T> T shfl_up(int line, unsigned m, T v, unsigned d, int w = 32) { int s = lane() - d; return shuffle(m, v, (lane() & (w - 1)) < (int)d ? lane() : s, line); }
inline unsigned ballot(int line, unsigned m, int p) { Quiet q; unsigned r; cur->val[0] = p != 0; collective(m, BALLOT, 0, line); memcpy(&r, cur->res, 4); return r; }
inline void syncwarp(int line, unsigned m = ~0u) {  // orders memory among its lanes; a shuffle does not
  Quiet q;
  CUDA_CPU_TSAN(char* token = &order_warp[cur->id >> 5]; __tsan_release(token));
  collective(m, SYNC, 0, line);
  CUDA_CPU_TSAN(__tsan_acquire(token));
}

inline char* guarded_pages(size_t n, size_t* got = nullptr) {  // n bytes, then a page nothing may touch; returns the end
  n = (n + PAGE - 1) / PAGE * PAGE; if (got) *got = n;
  char* p = (char*)mmap(nullptr, n + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  mprotect(p + n, PAGE, PROT_NONE); return p + n;
}
template <class T> T& shared_alloc() { return *reinterpret_cast<T*>(guarded_pages(sizeof(T)) - (sizeof(T) + 15) / 16 * 16); }
inline void shared_decl(void* p, size_t n) {  // static shared memory holds garbage when a block starts
  Quiet q;
  if (std::find(poisoned.begin(), poisoned.end(), p) != poisoned.end()) return;
  poisoned.push_back(p); memset(p, 0xff, n); smem_static += n;
  if (smem_static + smem_size > smem_limit) fail("%zu bytes of static and %zu of dynamic shared memory, the limit is %zu", smem_static, smem_size, smem_limit);
}
inline void* dyn_shared() { return smem; }

__attribute__((no_sanitize_address)) inline void fiber_main() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &main_bottom, &main_size);
#endif
  entry(entry_arg);
  {
    Quiet q;
    CUDA_CPU_TSAN(__tsan_release(&order_grid));
    cur->state = DONE; live--; warp_living[cur->id >> 5] &= ~(1u << (cur->id & 31));
    try_block();
    unsigned base = cur->id & ~31u;
    for (unsigned i = base; i < std::min(base + 32, total); i++) if (fibers[i].state == AT_WARP) try_warp(fibers[i]);
  }
  for (;;) to_main(true);
}
inline void on_signal(int sig, siginfo_t* si, void* uc) {
  Dl_info d{}; void* pc = nullptr;
#if defined(__x86_64__)
  pc = (void*)((ucontext_t*)uc)->uc_mcontext.gregs[REG_RIP];
#endif
  dladdr(pc, &d);
  auto put = [](const char* f, ...) { va_list ap; va_start(ap, f); describe(f, ap); va_end(ap); };
  if (sig == SIGILL) put("undefined behaviour trapped (misaligned vector access or array index) pc=0x%zx", (size_t)((char*)pc - (char*)d.dli_fbase));
  else put("%s at address %p%s pc=0x%zx", sig == SIGBUS ? "bus error" : "memory fault", si->si_addr,
           (char*)si->si_addr >= smem_end && (char*)si->si_addr < smem_end + PAGE ? " (just past the dynamic shared memory)" : "",
           (size_t)((char*)pc - (char*)d.dli_fbase));
  siglongjmp(escape, 1);
}
inline unsigned draw(unsigned n) { rng ^= rng << 13; rng ^= rng >> 7; rng ^= rng << 17; return (unsigned)((rng >> 32) % n); }

inline void run_block(std::vector<unsigned>& order) {
  live = total; arrived = 0; pred_sum = 0; phase = 0; poisoned.clear(); smem_static = 0;
  smem = smem_end - ((smem_size + 15) & ~size_t(15)); memset(smem, 0xff, smem_end - smem);
  for (unsigned w = 0; w * 32 < total; w++) { warp_waiting[w] = 0; warp_living[w] = total - w * 32 < 32 ? (1u << (total - w * 32)) - 1 : ~0u; }
  for (unsigned i = 0; i < total; i++) {
    Fiber& f = fibers[i];
    f.id = i; f.tid = {i % bdim.x, i / bdim.x % bdim.y, i / (bdim.x * bdim.y)}; f.state = READY;
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(f.stack, STACK); f.fake = nullptr;
#endif
    CUDA_CPU_TSAN(if (f.tsan) __tsan_destroy_fiber(f.tsan); f.tsan = __tsan_create_fiber(0));
    f.sp = new_stack(f.stack + STACK - i % 61 * 320, fiber_main);  // or all would share a cache set
  }
  if (rng) for (unsigned i = total; i > 1; i--) std::swap(order[i - 1], order[draw(i)]);
  while (live) {
    bool moved = false;
    // Each round begins elsewhere, in either direction; a whole new order a round would cost most.
    const unsigned first = rng ? draw(total) : 0, back = rng ? draw(2) : 0;
    for (unsigned n = 0; n < total; n++) {
      const unsigned at = first + (back ? total - n : n), i = order[at < total ? at : at - total];
      if (fibers[i].state == READY) { to_fiber(fibers[i]); moved = true; if (failed) return; }
    }
    if (!moved) {
      char what[600]; int n = 0; unsigned shown = 0;
      for (unsigned i = 0; i < total && n < 500; i++) {
        Fiber& f = fibers[i];
        if (i && f.state == fibers[i - 1].state && (f.state == DONE || f.line == fibers[i - 1].line)) continue;
        if (shown++ > 12) break;
        n += f.state == DONE ? snprintf(what + n, sizeof what - n, " from %u: returned;", i)
                             : snprintf(what + n, sizeof what - n, " from %u: %s at line %d (mask %08x);", i, f.state == AT_BLOCK ? "__syncthreads" : "warp collective", f.line, f.state == AT_BLOCK ? 0 : f.mask);
      }
      cur = &fibers[0];
      auto put = [](const char* f, ...) { va_list ap; va_start(ap, f); describe(f, ap); va_end(ap); };
      put("no thread of the block can go on:%s", what);
      return;
    }
  }
}
// cfg: grid x y z, block x y z, dynamic shared bytes, seed (0: threads in order), limit of shared bytes
inline int run(const uint32_t* cfg, void (*fn)(void*), void* arg) {
  gdim = dim3(cfg[0], cfg[1], cfg[2]); bdim = dim3(cfg[3], cfg[4], cfg[5]); smem_size = cfg[6]; smem_limit = cfg[8];
  total = bdim.x * bdim.y * bdim.z; entry = fn; entry_arg = arg; failed = false; msg[0] = 0;
  rng = cfg[7] ? cfg[7] * 0x9E3779B97F4A7C15ull : 0;
  if (total == 0 || total > 1024 || !gdim.x || !gdim.y || !gdim.z || gdim.y > 65535 || gdim.z > 65535 || bdim.z > 64 || smem_size > smem_limit || smem_limit > SMEM_MAX) { snprintf(msg, sizeof msg, "invalid configuration"); return 1; }
  if (!smem_end) smem_end = guarded_pages(SMEM_MAX);
  while (fibers.size() < total) {
    char* p = (char*)mmap(nullptr, STACK + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    mprotect(p, PAGE, PROT_NONE);
    Fiber f{}; f.stack = p + PAGE; fibers.push_back(f);
  }
  Quiet q;
  CUDA_CPU_TSAN(main_tsan = __tsan_get_current_fiber());
  std::vector<unsigned> order(total);
  std::vector<unsigned> blocks((size_t)gdim.x * gdim.y * gdim.z);
  for (unsigned i = 0; i < total; i++) order[i] = i;
  for (unsigned i = 0; i < blocks.size(); i++) blocks[i] = i;
  if (rng) for (unsigned i = blocks.size(); i > 1; i--) std::swap(blocks[i - 1], blocks[draw(i)]);
  static char alt[64 << 10];
  stack_t ss{}, old_ss; ss.ss_sp = alt; ss.ss_size = sizeof alt; sigaltstack(&ss, &old_ss);
  struct sigaction sa{}, old[3]; const int sigs[3] = {SIGSEGV, SIGBUS, SIGILL};
  sa.sa_sigaction = on_signal; sa.sa_flags = SA_SIGINFO | SA_ONSTACK; sigemptyset(&sa.sa_mask);
#if !defined(__SANITIZE_ADDRESS__)
  for (int i = 0; i < 3; i++) sigaction(sigs[i], &sa, &old[i]);
#endif
  if (sigsetjmp(escape, 1) == 0)
    for (unsigned b : blocks) {
      bid = {b % gdim.x, b / gdim.x % gdim.y, b / (gdim.x * gdim.y)};
      run_block(order);
      CUDA_CPU_TSAN(__tsan_acquire(&order_grid));
      if (failed) break;
    }
#if !defined(__SANITIZE_ADDRESS__)
  for (int i = 0; i < 3; i++) sigaction(sigs[i], &old[i], nullptr);
#endif
  sigaltstack(&old_ss, nullptr);
  return failed;
}
// args as for cuLaunchKernel: one pointer to each parameter's value; sizes as the caller packed them
template <class... P, size_t... I>
int launch_(void (*k)(P...), const uint32_t* cfg, void** args, const uint32_t* sizes, unsigned n, std::index_sequence<I...>) {
  const uint32_t want[] = {(uint32_t)sizeof(P)...};
  if (n != sizeof...(P)) { snprintf(msg, sizeof msg, "%u arguments for %zu parameters", n, sizeof...(P)); return 1; }
  for (unsigned i = 0; i < n; i++) if (sizes[i] != want[i]) {
    snprintf(msg, sizeof msg, "argument %u has %u bytes, the kernel's parameter %u", i, sizes[i], want[i]); return 1;
  }
  auto body = [&] { k(*static_cast<std::remove_reference_t<P>*>(args[I])...); };
  return run(cfg, [](void* p) { (*static_cast<decltype(body)*>(p))(); }, &body);
}
template <class... P> int launch(void (*k)(P...), const uint32_t* cfg, void** args, const uint32_t* sizes, unsigned n) {
  return launch_(k, cfg, args, sizes, n, std::index_sequence_for<P...>{});
}
}  // namespace cuda_cpu

#define threadIdx (::cuda_cpu::cur->tid)
#define blockIdx (::cuda_cpu::bid)
#define blockDim (::cuda_cpu::bdim)
#define gridDim (::cuda_cpu::gdim)
constexpr int warpSize = 32;
#define __syncthreads() ((void)::cuda_cpu::block_barrier(0, __LINE__))
#define __syncthreads_count(p) ::cuda_cpu::block_barrier((p), __LINE__)
#define __syncthreads_or(p) (::cuda_cpu::block_barrier((p), __LINE__) != 0)
#define __syncwarp(...) ::cuda_cpu::syncwarp(__LINE__, ##__VA_ARGS__)
#define __shfl_sync(...) ::cuda_cpu::shfl_idx(__LINE__, __VA_ARGS__)
#define __shfl_xor_sync(...) ::cuda_cpu::shfl_xor(__LINE__, __VA_ARGS__)
#define __shfl_down_sync(...) ::cuda_cpu::shfl_down(__LINE__, __VA_ARGS__)
#define __shfl_up_sync(...) ::cuda_cpu::shfl_up(__LINE__, __VA_ARGS__)
#define __ballot_sync(m, p) ::cuda_cpu::ballot(__LINE__, m, p)
#define __any_sync(m, p) (::cuda_cpu::ballot(__LINE__, m, p) != 0)
#define __all_sync(m, p) (::cuda_cpu::ballot(__LINE__, m, !(p)) == 0)
template <class T, class U> T atomicAdd(T* p, U v) { T o = *p; *p = o + (T)v; return o; }
template <class T, class U> T atomicMin(T* p, U v) { T o = *p; if ((T)v < o) *p = (T)v; return o; }
template <class T, class U> T atomicMax(T* p, U v) { T o = *p; if ((T)v > o) *p = (T)v; return o; }
template <class T, class U> T atomicCAS(T* p, U c, U v) { T o = *p; if (o == (T)c) *p = (T)v; return o; }
// Global memory goes through these, so that the bytes a kernel moves can be counted.
template <class T> T counted_load(const T* p) { ::cuda_cpu::loaded += sizeof(T); return *p; }
template <class T, class U> void counted_store(T* p, U v) { ::cuda_cpu::stored += sizeof(T); *p = v; }
template <class T> T __ldg(const T* p) { return counted_load(p); }
template <class T> T __ldcs(const T* p) { return counted_load(p); }
template <class T> T __ldcg(const T* p) { return counted_load(p); }
template <class T, class U> void __stcs(T* p, U v) { counted_store(p, v); }
template <class T, class U> void __stcg(T* p, U v) { counted_store(p, v); }
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline void __threadfence() {}
inline void __threadfence_block() {}
#ifndef __CUDACC__
template <class A, class B> constexpr std::common_type_t<A, B> min(A a, B b) { return b < a ? b : a; }
template <class A, class B> constexpr std::common_type_t<A, B> max(A a, B b) { return a < b ? b : a; }
#endif
#define __expf(x) expf(x)
#define __exp2f(x) exp2f(x)
#define __logf(x) logf(x)
#define __fdividef(a, b) ((a) / (b))
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline int __float_as_int(float f) { int i; memcpy(&i, &f, 4); return i; }
inline float __int_as_float(int i) { float f; memcpy(&f, &i, 4); return f; }
inline unsigned __float_as_uint(float f) { unsigned i; memcpy(&i, &f, 4); return i; }
inline int __float2int_rn(float f) { return (int)lrintf(f); }
inline float __uint_as_float(unsigned i) { float f; memcpy(&f, &i, 4); return f; }
