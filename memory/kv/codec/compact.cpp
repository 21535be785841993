// The inner loops of compact_rans.py, number for number. See there for what they compute.
#include <cstdint>

namespace {

constexpr uint32_t kPrecision = 12;
constexpr uint32_t kTotal = 1u << kPrecision;
constexpr uint32_t kLowest = 1u << 16;

}  // namespace

extern "C" {

// `slots` [classes][4096]: frequency - 1 (12 bits), place within the symbol (12 bits), number + 128 (8 bits).
// `words` holds `lanes` more words than `count`, which are read but not taken. Returns 0, or -1 for foreign words.
int64_t compact_decode(uint32_t* states, uint64_t lanes, const uint16_t* words, uint64_t count, const uint8_t* classes,
                       uint64_t steps, const uint32_t* slots, const int32_t* radius, const int32_t* escapes,
                       uint64_t escaped, int32_t* numbers) {
  uint64_t taken = 0, used = 0;
  for (uint64_t step = 0; step < steps; ++step) {
    const uint32_t* table = slots + static_cast<uint64_t>(classes[step]) * kTotal;
    const int32_t escape = radius[classes[step]] + 1;
    int32_t* row = numbers + step * lanes;
    bool any = false;
    for (uint64_t lane = 0; lane < lanes; ++lane) {
      uint32_t state = states[lane];
      const uint32_t slot = table[state & (kTotal - 1)];
      const int32_t number = static_cast<int32_t>(slot >> 24) - 128;
      row[lane] = number;
      any |= number == escape;
      state = ((slot & (kTotal - 1)) + 1) * (state >> kPrecision) + ((slot >> 12) & (kTotal - 1));
      const bool empty = state < kLowest;
      const uint32_t filled = (state << 16) | words[taken];
      states[lane] = empty ? filled : state;
      taken += empty;
    }
    if (taken > count) return -1;
    if (any) {
      for (uint64_t lane = 0; lane < lanes; ++lane) {
        if (row[lane] != escape) continue;
        if (used == escaped) return -1;
        row[lane] = escapes[used++];
      }
    }
  }
  if (taken != count || used != escaped) return -1;
  for (uint64_t lane = 0; lane < lanes; ++lane) {
    if (states[lane] != kLowest) return -1;
  }
  return 0;
}

// `frequencies` and `below` [classes][symbols]. Words go to the end of `words`, which has room for `room`.
// Returns how many, and writes how many numbers have no symbol to `escaped`.
int64_t compact_encode(const int32_t* numbers, uint64_t steps, uint64_t lanes, const uint8_t* classes,
                       const uint32_t* frequencies, const uint32_t* below, uint64_t symbols, const int32_t* radius,
                       uint32_t* states, uint16_t* words, uint64_t room, uint64_t* escaped) {
  uint16_t* next = words + room;
  *escaped = 0;
  for (uint64_t step = steps; step-- > 0;) {
    const uint32_t* frequency = frequencies + classes[step] * symbols;
    const uint32_t* first = below + classes[step] * symbols;
    const int32_t limit = radius[classes[step]];
    const int32_t* row = numbers + step * lanes;
    for (uint64_t lane = lanes; lane-- > 0;) {
      const int32_t number = row[lane];
      const bool outside = number > limit || number < -limit;
      *escaped += outside;
      const uint32_t symbol = static_cast<uint32_t>(outside ? 2 * limit + 1 : number + limit);
      const uint32_t share = frequency[symbol];
      uint32_t state = states[lane];
      if ((state >> (32 - kPrecision)) >= share) {
        *--next = static_cast<uint16_t>(state);
        state >>= 16;
      }
      states[lane] = ((state / share) << kPrecision) + state % share + first[symbol];
    }
  }
  return words + room - next;
}

}  // extern "C"
