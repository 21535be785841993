// Lossless coding of one head's numbers: see windows.py, which describes the format and gives the same bytes.
//
// Every read is checked against the end of the blob, every element is written inside the caller's rows.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace kv {

constexpr size_t BLOCK = 512;   // elements whose codes lie together
constexpr size_t LANES = BLOCK / 8;
constexpr int WINDOW = 7;       // exponents that a code names; the eighth code is the escape
constexpr int ESCAPE = 7;
constexpr int BELOW = 12;       // nibbles for exponents just below the window; then those just above, then the escape
constexpr int ABOVE = 3;
constexpr int FAR = BELOW + ABOVE;
constexpr int BASES = 256 - WINDOW + 1;
constexpr size_t HEAD_BYTES = 12;
constexpr uint8_t PLAIN = 0, WINDOWED = 1;

enum Error : int64_t { BAD = -1, NO_MEMORY = -2 };

// The rows of one head, in memory that belongs to the caller: numbers of a row lie side by side.
struct Rows {
    uint8_t* data;
    int64_t stride;  // bytes from token to token
    size_t tokens, dim;
    size_t size() const { return tokens * dim; }
};

inline uint32_t read32(const uint8_t* at) {
    uint32_t value;
    std::memcpy(&value, at, 4);
    return value;
}

inline void write32(uint8_t* at, uint32_t value) { std::memcpy(at, &value, 4); }

// Sign and mantissa of the upper 16 bits of a number, which for all dtypes here are those of a bfloat16.
template <typename Bits> inline uint16_t upper(Bits bits) { return uint16_t(bits >> (8 * sizeof(Bits) - 16)); }

// Copies elements [first, first + count) of the rows, in order, to or from memory without gaps.
template <typename Bits, bool INTO> inline void move_elements(const Rows& rows, size_t first, size_t count, Bits* flat) {
    size_t token = first / rows.dim, channel = first % rows.dim;
    while (count) {
        size_t run = std::min(count, rows.dim - channel);
        uint8_t* row = rows.data + int64_t(token) * rows.stride + channel * sizeof(Bits);
        if (INTO) std::memcpy(row, flat, run * sizeof(Bits));
        else std::memcpy(flat, row, run * sizeof(Bits));
        flat += run, count -= run, channel = 0, ++token;
    }
}

// codes[k * lanes + j] is bit k of byte j of the three planes.
inline void expand_full(const uint8_t* planes, uint8_t* codes) {
    constexpr uint64_t ONES = 0x0101010101010101u;
    uint64_t low[8], middle[8], high[8];
    std::memcpy(low, planes, LANES);
    std::memcpy(middle, planes + LANES, LANES);
    std::memcpy(high, planes + 2 * LANES, LANES);
    for (int k = 0; k < 8; ++k) {
        uint64_t row[8];
        for (int w = 0; w < 8; ++w)
            row[w] = ((low[w] >> k) & ONES) | (((middle[w] >> k) & ONES) << 1) | (((high[w] >> k) & ONES) << 2);
        std::memcpy(codes + k * LANES, row, LANES);
    }
}

inline void expand_part(const uint8_t* planes, size_t lanes, uint8_t* codes) {
    for (int k = 0; k < 8; ++k)
        for (size_t j = 0; j < lanes; ++j)
            codes[k * lanes + j] = uint8_t(((planes[j] >> k) & 1) | ((planes[lanes + j] >> k) & 1) << 1 |
                                           ((planes[2 * lanes + j] >> k) & 1) << 2);
}

// The places in the block of its escapes, in the order of (lane, bit). Returns how many there are. `places` has room for
// a block's and 4 more, since most words have few escapes and writing 4 is faster than guessing how many.
inline size_t find_escapes(const uint8_t* planes, size_t lanes, uint16_t* places) {
    size_t found = 0;
    for (size_t byte = 0; byte < lanes; byte += 8) {
        uint64_t words[3] = {0, 0, 0};
        const size_t length = std::min<size_t>(8, lanes - byte);
        for (int p = 0; p < 3; ++p) std::memcpy(&words[p], planes + p * lanes + byte, length);
        uint64_t mask = words[0] & words[1] & words[2];
        const size_t count = size_t(__builtin_popcountll(mask));
        const auto take = [&](size_t i) {
            const unsigned bit = unsigned(__builtin_ctzll(mask | uint64_t(1) << 63));
            places[found + i] = uint16_t((bit & 7) * lanes + byte + (bit >> 3));
            mask &= mask - 1;
        };
        for (size_t i = 0; i < 4; ++i) take(i);
        for (size_t i = 4; i < count; ++i) take(i);
        found += count;
    }
    return found;
}

inline size_t plane_bytes(size_t size) {
    size_t rest = size % BLOCK;
    return 3 * (size / BLOCK * LANES + (rest + 7) / 8);
}

// Most bytes that a head of so many numbers takes.
inline size_t blob_bound(size_t size, size_t dim, size_t itemsize) { return HEAD_BYTES + dim + size * itemsize + 16; }

// The bases repeated so that any block can read its 512 from (first element % dim) on.
inline void tile_bases(const uint8_t* bases, size_t count, size_t dim, std::vector<uint8_t>& tiled) {
    tiled.resize(dim + BLOCK);
    if (count == 1) std::memset(tiled.data(), bases[0], tiled.size());
    else for (size_t i = 0; i < tiled.size(); i += dim) std::memcpy(&tiled[i], bases, std::min(dim, tiled.size() - i));
}

// Puts exponents, signs and mantissas (and, of float32, the lower halves) together as numbers.
template <typename Bits>
inline void join(const uint8_t* exponents, const uint8_t* rest, const uint8_t* lower, size_t count, Bits* out) {
    for (size_t i = 0; i < count; ++i) {
        uint16_t number = uint16_t((uint16_t(rest[i] & 0x80) << 8) | (uint16_t(exponents[i]) << 7) | (rest[i] & 0x7f));
        if (sizeof(Bits) == 2) {
            out[i] = Bits(number);
        } else {
            uint16_t low;
            std::memcpy(&low, lower + 2 * i, 2);
            out[i] = Bits(uint32_t(number) << 16 | low);
        }
    }
}

struct Escapes {
    const uint8_t* nibbles;
    const uint8_t* far;
    size_t count, far_count, next = 0, next_far = 0;

    // Replaces the exponents at the places of a block. False where the list does not have as many.
    bool fill(const uint16_t* places, size_t number, const uint8_t* base, uint8_t* exponents) {
        static constexpr int8_t FROM_BASE[16] = {-1, -2, -3, -4, -5, -6, -7, -8, -9, -10, -11, -12, 7, 8, 9, 0};
        if (number > count - next) return false;
        for (size_t i = 0; i < number; ++i, ++next) {
            const size_t place = places[i];
            const int nibble = (nibbles[next / 2] >> (next % 2 * 4)) & 15;
            exponents[place] = uint8_t(base[place] + FROM_BASE[nibble]);
            if (nibble != FAR) continue;
            if (next_far == far_count) return false;
            exponents[place] = far[next_far++];
        }
        return true;
    }
};

// Decodes a blob of exactly `length` bytes into the rows. Returns 0 or `BAD`.
template <typename Bits>
int64_t decode_head(const uint8_t* blob, size_t length, bool per_channel, const Rows& rows, std::vector<uint8_t>& tiled) {
    const size_t size = rows.size(), low_bytes = size * (sizeof(Bits) - 2), bases = per_channel ? rows.dim : 1;
    if (length < HEAD_BYTES) return BAD;
    const uint8_t mode = blob[0];
    const size_t count = read32(blob + 4), far_count = read32(blob + 8);
    const uint8_t* at = blob + HEAD_BYTES;
    const uint8_t *rest, *planes = nullptr, *plain = nullptr, *lower;
    Escapes escapes{nullptr, nullptr, count, far_count};
    if (mode == PLAIN) {
        if (length != HEAD_BYTES + 2 * size + low_bytes || count || far_count) return BAD;
        rest = at, plain = rest + size, lower = plain + size;
    } else if (mode == WINDOWED) {
        const size_t packed = plane_bytes(size);
        if (length != HEAD_BYTES + bases + size + low_bytes + packed + (count + 1) / 2 + far_count) return BAD;
        tile_bases(at, bases, rows.dim, tiled);
        rest = at + bases, lower = rest + size, planes = lower + low_bytes;
        escapes.nibbles = planes + packed, escapes.far = escapes.nibbles + (count + 1) / 2;
    } else {
        return BAD;
    }
    const bool flat = rows.stride == int64_t(rows.dim * sizeof(Bits));
    size_t channel = 0;
    for (size_t first = 0; first < size; first += BLOCK) {
        const size_t here = std::min(BLOCK, size - first), lanes = (here + 7) / 8;
        alignas(64) uint8_t exponents[BLOCK];
        uint16_t places[BLOCK + 4];
        const uint8_t* source = exponents;
        if (plain) {
            source = plain + first;
        } else {
            const uint8_t* base = tiled.data() + channel;
            if (here == BLOCK) expand_full(planes, exponents);
            else std::memset(exponents, 0, BLOCK), expand_part(planes, lanes, exponents);
            for (size_t i = 0; i < BLOCK; ++i) exponents[i] = uint8_t(exponents[i] + base[i]);
            const size_t number = find_escapes(planes, lanes, places);
            if (!escapes.fill(places, number, base, exponents)) return BAD;
            planes += 3 * lanes;
            channel = (channel + BLOCK) % rows.dim;
        }
        if (flat && here == BLOCK && reinterpret_cast<uintptr_t>(rows.data) % sizeof(Bits) == 0) {
            join(source, rest + first, lower + 2 * first, BLOCK, reinterpret_cast<Bits*>(rows.data) + first);
        } else {
            alignas(64) Bits numbers[BLOCK];
            join(source, rest + first, lower + 2 * first, here, numbers);
            move_elements<Bits, true>(rows, first, here, numbers);
        }
    }
    return escapes.next == count && escapes.next_far == far_count ? 0 : int64_t(BAD);
}

// The first of the bases that cover most of the counted exponents, for each column of counts[exponent][columns].
inline void best_bases(const std::vector<uint32_t>& counts, size_t columns, int least, int most, uint8_t* bases) {
    std::vector<uint32_t> cover(columns, 0), best(columns, 0);
    const int first = std::max(0, least - WINDOW + 1), last = std::min(BASES - 1, most);
    std::memset(bases, first, columns);
    for (int b = first; b <= last; ++b) {
        for (int e = b == first ? b : b + WINDOW - 1; e < b + WINDOW; ++e)
            for (size_t c = 0; c < columns; ++c) cover[c] += counts[size_t(e) * columns + c];
        for (size_t c = 0; c < columns; ++c) {
            bool better = cover[c] > best[c];
            best[c] = better ? cover[c] : best[c];
            bases[c] = better ? uint8_t(b) : bases[c];
            cover[c] -= counts[size_t(b) * columns + c];
        }
    }
}

// Encodes the rows at `out`, which has room for `blob_bound`. Returns the bytes written.
template <typename Bits> size_t encode_head(const Rows& rows, bool per_channel, uint8_t* out) {
    const size_t size = rows.size(), low_bytes = size * (sizeof(Bits) - 2), columns = per_channel ? rows.dim : 1;
    std::vector<uint8_t> exponents(size + BLOCK), tiled;
    std::vector<uint32_t> counts(256 * columns, 0);
    std::vector<uint8_t> bases(columns), planes(plane_bytes(size)), nibbles, far;
    // Sign and mantissa, and the lower halves, lie where a windowed blob has them; a plain one moves them.
    uint8_t *rest = out + HEAD_BYTES + columns, *lower = rest + size;
    for (size_t first = 0; first < size; first += BLOCK) {
        const size_t here = std::min(BLOCK, size - first);
        alignas(64) Bits numbers[BLOCK];
        move_elements<Bits, false>(rows, first, here, numbers);
        for (size_t i = 0; i < here; ++i) {
            const uint16_t number = upper(numbers[i]);
            exponents[first + i] = uint8_t(number >> 7);
            rest[first + i] = uint8_t((number >> 8 & 0x80) | (number & 0x7f));
        }
        if (sizeof(Bits) == 4)
            for (size_t i = 0; i < here; ++i) {
                const uint16_t low = uint16_t(numbers[i]);
                std::memcpy(lower + 2 * (first + i), &low, 2);
            }
    }
    int least = 255, most = 0;
    for (size_t i = 0; i < size; ++i) least = std::min<int>(least, exponents[i]), most = std::max<int>(most, exponents[i]);
    if (per_channel)
        for (size_t t = 0; t < rows.tokens; ++t)
            for (size_t d = 0; d < rows.dim; ++d) ++counts[exponents[t * rows.dim + d] * rows.dim + d];
    else
        for (size_t i = 0; i < size; ++i) ++counts[exponents[i]];
    best_bases(counts, columns, least, most, bases.data());
    tile_bases(bases.data(), columns, rows.dim, tiled);

    uint8_t* plane = planes.data();
    size_t channel = 0;
    uint32_t count = 0;
    for (size_t first = 0; first < size; first += BLOCK) {
        const size_t here = std::min(BLOCK, size - first), lanes = (here + 7) / 8;
        const uint8_t *base = tiled.data() + channel, *exponent = exponents.data() + first;
        alignas(64) uint8_t codes[BLOCK] = {};
        for (size_t i = 0; i < here; ++i) codes[i] = std::min(uint8_t(exponent[i] - base[i]), uint8_t(ESCAPE));
        for (int p = 0; p < 3; ++p) {
            uint8_t* bytes = plane + p * lanes;
            std::memset(bytes, 0, lanes);
            for (int k = 0; k < 8; ++k)
                for (size_t j = 0; j < lanes; ++j) bytes[j] |= uint8_t(((codes[k * lanes + j] >> p) & 1) << k);
        }
        uint16_t places[BLOCK + 4];
        const size_t number = find_escapes(plane, lanes, places);
        for (size_t i = 0; i < number; ++i, ++count) {
            const int e = exponent[places[i]], b = base[places[i]];
            int nibble = FAR;
            if (e < b && b - 1 - e < BELOW) nibble = b - 1 - e;
            else if (e >= b + WINDOW && e - b - WINDOW < ABOVE) nibble = BELOW + e - b - WINDOW;
            else far.push_back(uint8_t(e));
            if (count % 2) nibbles.back() = uint8_t(nibbles.back() | nibble << 4);
            else nibbles.push_back(uint8_t(nibble));
        }
        plane += 3 * lanes;
        channel = (channel + BLOCK) % rows.dim;
    }

    std::memset(out, 0, HEAD_BYTES);
    if (columns + planes.size() + nibbles.size() + far.size() >= size) {
        out[0] = PLAIN;
        std::memmove(out + HEAD_BYTES + 2 * size, lower, low_bytes);
        std::memmove(out + HEAD_BYTES, rest, size);
        std::memcpy(out + HEAD_BYTES + size, exponents.data(), size);
        return HEAD_BYTES + 2 * size + low_bytes;
    }
    out[0] = WINDOWED;
    write32(out + 4, count);
    write32(out + 8, uint32_t(far.size()));
    std::memcpy(out + HEAD_BYTES, bases.data(), columns);
    uint8_t* end = lower + low_bytes;
    for (const auto* part : {&planes, &nibbles, &far}) {
        if (!part->empty()) std::memcpy(end, part->data(), part->size());
        end += part->size();
    }
    return size_t(end - out);
}

}  // namespace kv
