// Intel AMX tiles for bfloat16 products, where the compiler and the machine have them.
#pragma once

#include <cstdint>

#if defined(__AMX_BF16__) && defined(__linux__)
#define POLYLOOM_AMX 1
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace polyloom {

// Whether this process may use AMX. Linux wants to be asked once; the answer holds for all threads.
inline bool amx_usable() {
#if defined(POLYLOOM_AMX)
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  static const bool usable = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return usable;
#else
  return false;
#endif
}

#if defined(POLYLOOM_AMX)

// Eight tiles: 0-3 accumulators, 4-5 left operands, 6-7 right operands; 1 and 3 belong to the
// second left operand. Held by one thread for the scope's lifetime.
class AmxTiles {
 public:
  // rows0, rows1: rows of the two left operands (0 for none). pairs: rows of the right operands,
  // each of 16 columns of 2 values, so the left ones are 2 * pairs values wide.
  AmxTiles(int rows0, int rows1, int pairs) { configure(rows0, rows1, pairs); }
  ~AmxTiles() { _tile_release(); }
  AmxTiles(const AmxTiles&) = delete;
  AmxTiles& operator=(const AmxTiles&) = delete;

  void configure(int rows0, int rows1, int pairs) {
    const int rows[8] = {rows0, rows1, rows0, rows1, rows0, rows1, pairs, pairs};
    Config config{};
    config.palette = 1;
    for (int tile = 0; tile < 8; tile++) {
      if (rows[tile] == 0) continue;
      config.rows[tile] = static_cast<uint8_t>(rows[tile]);
      config.bytes[tile] = static_cast<uint16_t>(tile == 4 || tile == 5 ? 4 * pairs : 64);
    }
    _tile_loadconfig(&config);
  }

 private:
  struct alignas(64) Config {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
  };
};

#endif

}  // namespace polyloom
