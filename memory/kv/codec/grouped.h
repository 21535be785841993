// int8 and int4 coding of one head's numbers: see grouped.py, which describes the format and gives the same bytes.
//
// All arithmetic is exactly rounded fp32 without contraction. A product of scale and code is exact, so the only
// rounding of a decoded number is the one to its dtype.
#pragma once

#include <cmath>

#include "windows.h"

namespace kv {

constexpr size_t GROUP = 64;
constexpr size_t GROUP_HEAD_BYTES = 8;
constexpr size_t ESCAPE_SHARE = 8;  // one number of so many may be kept exactly before the whole head is
constexpr uint32_t LIMIT_BITS = 0x7E800000u;  // 2^126: from here on, and NaN, numbers are kept exactly
constexpr uint8_t GROUPED = 0, EXACT = 1;
constexpr int FINE_SHIFT = 19, COARSE_SHIFT = 20;  // scales are floats with 4 or 3 bits of mantissa
constexpr int FINE_FLOOR = 16 * 9, COARSE_FLOOR = 8 * 9;
constexpr int FINE_TOP = 16 * 254, COARSE_TOP = 8 * 254;

inline float as_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

inline uint32_t as_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

template <typename Bits> inline uint32_t float_bits(Bits bits) {
    return sizeof(Bits) == 2 ? uint32_t(bits) << 16 : uint32_t(bits);
}

// Rounds to nearest, ties to even. The number is finite.
template <typename Bits> inline Bits from_float(float value) {
    const uint32_t bits = as_bits(value);
    return sizeof(Bits) == 2 ? Bits((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16) : Bits(bits);
}

inline size_t group_count(size_t length, size_t group) { return std::max<size_t>(1, length / group); }

// How a head is coded: in groups of a channel's consecutive tokens, or of a token's consecutive channels.
struct Coding {
    bool channels;
    int bits;
    size_t row_bytes(size_t dim) const { return bits == 8 ? dim : (dim + 1) / 2; }
    size_t group() const { return channels && bits == 8 ? 4 * GROUP : GROUP; }
    size_t groups(const Rows& rows) const {
        return channels ? group_count(rows.tokens, group()) * rows.dim : rows.tokens * group_count(rows.dim, group());
    }
    bool zeros() const { return channels && bits == 4; }
    bool coarse() const { return !channels && bits == 4; }
    int shift() const { return coarse() ? COARSE_SHIFT : FINE_SHIFT; }
    int floor() const { return coarse() ? COARSE_FLOOR : FINE_FLOOR; }
    int codes() const { return coarse() ? 63 : 255; }
    int top() const { return coarse() ? COARSE_TOP : FINE_TOP; }
};

inline size_t grouped_bound(const Rows& rows, size_t itemsize) {
    return GROUP_HEAD_BYTES + blob_bound(rows.size(), rows.dim, itemsize) + 2 * (rows.size() + rows.dim) +
           (rows.size() / ESCAPE_SHARE + 1) * (4 + itemsize);
}

// Writes (code + zero) * scale for a row of int8 or int4 codes. The zeros are null for int8.
template <typename Bits>
inline void decode_row8(const int8_t* codes, const float* scale, size_t dim, Bits* out) {
    for (size_t d = 0; d < dim; ++d) out[d] = from_float<Bits>(float(codes[d]) * scale[d]);
}

template <typename Bits>
inline void decode_row4(const uint8_t* codes, const float* scale, const float* zero, size_t dim, Bits* out) {
    const size_t half = (dim + 1) / 2, other = dim / 2;
    for (size_t d = 0; d < half; ++d) out[d] = from_float<Bits>((float(codes[d] & 15) + zero[d]) * scale[d]);
    scale += half, zero += half, out += half;
    for (size_t d = 0; d < other; ++d) out[d] = from_float<Bits>((float(codes[d] >> 4) + zero[d]) * scale[d]);
}

// Decodes a blob of exactly `length` bytes into the rows. Returns 0 or `BAD`.
template <typename Bits>
int64_t decode_grouped(const uint8_t* blob, size_t length, int bits, const Rows& rows, std::vector<uint8_t>& tiled) {
    if (length < GROUP_HEAD_BYTES) return BAD;
    if (blob[0] == EXACT)
        return decode_head<Bits>(blob + GROUP_HEAD_BYTES, length - GROUP_HEAD_BYTES, blob[1] != 0, rows, tiled);
    const Coding coding{blob[1] != 0, bits};
    const uint32_t base = uint32_t(blob[2]) | uint32_t(blob[3]) << 8;
    const size_t count = read32(blob + 4), groups = coding.groups(rows), row_bytes = coding.row_bytes(rows.dim);
    const size_t parameters = groups * (coding.zeros() ? 2 : 1);
    if (blob[0] != GROUPED || base + uint32_t(coding.codes()) > uint32_t(coding.top())) return BAD;
    if (count > rows.size() || length != GROUP_HEAD_BYTES + parameters + rows.tokens * row_bytes + count * (4 + sizeof(Bits)))
        return BAD;
    const uint8_t *scales = blob + GROUP_HEAD_BYTES, *zeros = scales + groups, *codes = scales + parameters;
    const uint8_t* escapes = codes + rows.tokens * row_bytes;

    std::vector<float> scale(rows.dim), zero(rows.dim);
    std::vector<Bits> row(rows.dim);
    const bool aligned = reinterpret_cast<uintptr_t>(rows.data) % sizeof(Bits) == 0 && rows.stride % sizeof(Bits) == 0;
    const size_t along = coding.channels ? rows.tokens : rows.dim, number = group_count(along, coding.group());
    for (size_t t = 0; t < rows.tokens; ++t) {
        if (coding.channels && t % coding.group() == 0 && t / coding.group() < number) {
            const size_t first = t / coding.group() * rows.dim;
            for (size_t d = 0; d < rows.dim; ++d) scale[d] = as_float((base + scales[first + d]) << FINE_SHIFT);
            if (coding.zeros())
                for (size_t d = 0; d < rows.dim; ++d) zero[d] = float(int(int8_t(zeros[first + d])) - 8);
        } else if (!coding.channels) {
            for (size_t g = 0; g < number; ++g) {
                const size_t end = g + 1 == number ? rows.dim : (g + 1) * GROUP;
                const uint8_t byte = scales[t * number + g];
                const float s = as_float((base + (coding.coarse() ? byte >> 2 : byte)) << coding.shift());
                const float z = float(int(byte & 3) - 9);
                for (size_t d = g * GROUP; d < end; ++d) scale[d] = s, zero[d] = z;
            }
        }
        uint8_t* target = rows.data + int64_t(t) * rows.stride;
        Bits* out = aligned ? reinterpret_cast<Bits*>(target) : row.data();
        const uint8_t* from = codes + t * row_bytes;
        if (coding.bits == 8) decode_row8<Bits>(reinterpret_cast<const int8_t*>(from), scale.data(), rows.dim, out);
        else decode_row4<Bits>(from, scale.data(), zero.data(), rows.dim, out);
        if (!aligned) std::memcpy(target, row.data(), rows.dim * sizeof(Bits));
    }
    for (size_t i = 0; i < count; ++i) {
        const size_t place = read32(escapes + 4 * i);
        if (place >= rows.size()) return BAD;
        uint8_t* target = rows.data + int64_t(place / rows.dim) * rows.stride + place % rows.dim * sizeof(Bits);
        std::memcpy(target, escapes + 4 * count + i * sizeof(Bits), sizeof(Bits));
    }
    return 0;
}

// Floats as integers of the same order, and back: minima of integers are found many at a time.
inline int32_t ordered(float value) {
    const int32_t bits = int32_t(as_bits(value));
    return bits ^ ((bits >> 31) & 0x7fffffff);
}

inline float from_ordered(int32_t value) { return as_float(uint32_t(value ^ ((value >> 31) & 0x7fffffff))); }

// The step that a group's codes need to reach from low to high, before it is rounded up to a scale that can be written.
inline float needed_step(Coding coding, float low, float high) {
    const float far = std::max(std::fabs(low), std::fabs(high));
    if (coding.bits == 8) return far * (1.0f / 127.0f);
    if (coding.channels) return std::max((high - low) * (1.0f / 15.0f), far * (1.0f / 130.0f));
    return 0.0f;
}

// int4 along channels: the smallest step of those that the four zeros allow, and which of them that is.
inline float step_of_zeros(float low, float high, int& chosen) {
    float best = 0.0f;
    chosen = 0;
    for (int z = 0; z < 4; ++z) {
        const float step = std::max(std::max(low * (-1.0f / float(9 - z)), high * (1.0f / float(6 + z))), 0.0f) + 0.0f;  // not -0
        if (z == 0 || step < best) best = step, chosen = z;
    }
    return best;
}

inline int scale_code(Coding coding, float step) {
    const uint32_t bits = as_bits(step), unit = 1u << coding.shift();
    return int((bits + unit - 1) >> coding.shift());
}

template <typename Bits> struct Head {
    std::vector<float> numbers;  // what cannot be coded is 0 here
    std::vector<uint32_t> places;
    std::vector<Bits> kept;

    void read(const Rows& rows) {
        numbers.resize(rows.size());
        std::vector<Bits> row(rows.dim);
        for (size_t t = 0; t < rows.tokens; ++t) {
            std::memcpy(row.data(), rows.data + int64_t(t) * rows.stride, rows.dim * sizeof(Bits));
            float* to = numbers.data() + t * rows.dim;
            uint32_t any = 0;
            for (size_t d = 0; d < rows.dim; ++d) {
                const uint32_t bits = float_bits(row[d]);
                const bool bad = (bits & 0x7fffffffu) >= LIMIT_BITS;
                any |= uint32_t(bad);
                to[d] = as_float(bad ? 0u : bits) + 0.0f;  // -0 becomes 0, so that minima have one value
            }
            if (!any) continue;
            for (size_t d = 0; d < rows.dim; ++d)
                if ((float_bits(row[d]) & 0x7fffffffu) >= LIMIT_BITS)
                    places.push_back(uint32_t(t * rows.dim + d)), kept.push_back(row[d]);
        }
    }
};

// Every group's range, and the scale it will have.
struct Groups {
    Coding coding;
    size_t number;  // of groups in a row or column
    std::vector<int32_t> low, high;
    std::vector<int> scale, zero;
    int base = 0;

    size_t count() const { return scale.size(); }
    size_t at(size_t position) const { return std::min(position / coding.group(), number - 1); }
    size_t end(size_t group, size_t length) const { return group + 1 == number ? length : (group + 1) * coding.group(); }

    Groups(Coding coding, const Rows& rows, const float* x)
        : coding(coding), number(group_count(coding.channels ? rows.tokens : rows.dim, coding.group())),
          low(coding.groups(rows), 0x7fffffff), high(low.size(), int32_t(0x80000000)), scale(low.size()), zero(low.size(), 0) {
        for (size_t t = 0; t < rows.tokens; ++t)
            if (coding.channels) widen_columns(x + t * rows.dim, rows.dim, at(t) * rows.dim);
            else for (size_t g = 0; g < number; ++g) widen_row(x + t * rows.dim, g * GROUP, end(g, rows.dim), t * number + g);
        int most = 0;
        for (size_t g = 0; g < count(); ++g) {
            const float least = from_ordered(low[g]), greatest = from_ordered(high[g]);
            scale[g] = scale_code(coding, coding.coarse() ? step_of_zeros(least, greatest, zero[g])
                                                          : needed_step(coding, least, greatest));
            most = std::max(most, scale[g]);
        }
        base = std::max(most - coding.codes(), coding.floor());
        for (int& code : scale) code = std::max(code, base);
    }

    void widen_columns(const float* row, size_t dim, size_t first) {
        int32_t *least = low.data() + first, *most = high.data() + first;
        for (size_t d = 0; d < dim; ++d) {
            const int32_t value = ordered(row[d]);
            least[d] = std::min(least[d], value), most[d] = std::max(most[d], value);
        }
    }

    void widen_row(const float* row, size_t first, size_t last, size_t group) {
        int32_t least = 0x7fffffff, most = int32_t(0x80000000);
        for (size_t d = first; d < last; ++d) {
            const int32_t value = ordered(row[d]);
            least = std::min(least, value), most = std::max(most, value);
        }
        low[group] = least, high[group] = most;
    }

    int64_t sum() const {
        int64_t total = 0;
        for (int code : scale) total += code;
        return total;
    }
};

// Whether groups along tokens make the scales of values smaller, on average: in int4, where such groups take more room
// than groups along channels, by an octave.
inline bool better_along_tokens(const Groups& channels, const Groups& tokens, size_t count) {
    const int64_t least = tokens.coding.bits == 4 ? 16 : 0, fine = tokens.coding.coarse() ? 2 : 1;
    const int64_t along = int64_t(channels.count()), across = int64_t(tokens.count());
    return count >= GROUP && fine * tokens.sum() * along - channels.sum() * across > least * along * across;
}

// Encodes the rows at `out`, which has room for `grouped_bound`. Returns the bytes written.
template <typename Bits> size_t encode_grouped(const Rows& rows, bool keys, int bits, bool per_channel, uint8_t* out) {
    std::memset(out, 0, GROUP_HEAD_BYTES);
    Head<Bits> head;
    head.read(rows);
    if (head.places.size() * ESCAPE_SHARE > rows.size()) {
        out[0] = EXACT, out[1] = per_channel;
        return GROUP_HEAD_BYTES + encode_head<Bits>(rows, per_channel, out + GROUP_HEAD_BYTES);
    }
    const float* x = head.numbers.data();
    Groups groups({true, bits}, rows, x);
    if (!keys) {
        Groups tokens({false, bits}, rows, x);
        if (!better_along_tokens(groups, tokens, rows.tokens)) groups = std::move(tokens);
    }
    const Coding coding = groups.coding;
    const size_t dim = rows.dim, count = groups.count(), row_bytes = coding.row_bytes(dim);
    out[1] = coding.channels, out[2] = uint8_t(groups.base), out[3] = uint8_t(groups.base >> 8);
    write32(out + 4, uint32_t(head.places.size()));
    uint8_t *scales = out + GROUP_HEAD_BYTES, *zeros = scales + count;
    uint8_t* codes = zeros + (coding.zeros() ? count : 0);
    std::vector<float> inverse(count), offset(count, 0.0f);
    for (size_t g = 0; g < count; ++g) {
        const int code = groups.scale[g] - groups.base;
        inverse[g] = 1.0f / as_float(uint32_t(groups.scale[g]) << coding.shift());
        scales[g] = uint8_t(coding.coarse() ? code << 2 | groups.zero[g] : code);
        if (coding.coarse()) offset[g] = float(groups.zero[g] - 9);
        if (coding.zeros()) {
            const float middle = from_ordered(groups.low[g]) * 0.5f + from_ordered(groups.high[g]) * 0.5f;
            const float z = std::min(std::max(std::nearbyint(middle * inverse[g] - 7.5f) + 8.0f, -128.0f), 127.0f);
            zeros[g] = uint8_t(int8_t(z));
            offset[g] = z - 8.0f;
        }
    }
    std::vector<float> inverse_row(dim), offset_row(dim);
    const float least_code = bits == 8 ? -127.0f : 0.0f, most_code = bits == 8 ? 127.0f : 15.0f;
    std::vector<uint8_t> row_codes(dim + 1, 0);
    for (size_t t = 0; t < rows.tokens; ++t) {
        const float *by = inverse_row.data(), *less = offset_row.data();
        if (coding.channels) {
            by = inverse.data() + groups.at(t) * dim, less = offset.data() + groups.at(t) * dim;
        } else {
            for (size_t g = 0; g < groups.number; ++g) {
                const size_t from = t * groups.number + g, last = groups.end(g, dim);
                for (size_t d = g * GROUP; d < last; ++d) inverse_row[d] = inverse[from], offset_row[d] = offset[from];
            }
        }
        const float* row = x + t * dim;
        for (size_t d = 0; d < dim; ++d) {
            const float code = std::nearbyint(row[d] * by[d]) - less[d];
            row_codes[d] = uint8_t(int(std::min(std::max(code, least_code), most_code)));
        }
        uint8_t* to = codes + t * row_bytes;
        if (bits == 8) std::memcpy(to, row_codes.data(), dim);
        else for (size_t d = 0; d < row_bytes; ++d) to[d] = uint8_t(row_codes[d] | row_codes[d + row_bytes] << 4);
    }
    uint8_t* end = codes + rows.tokens * row_bytes;
    if (!head.places.empty()) {
        std::memcpy(end, head.places.data(), 4 * head.places.size());
        std::memcpy(end + 4 * head.places.size(), head.kept.data(), sizeof(Bits) * head.kept.size());
    }
    return size_t(end + head.places.size() * (4 + sizeof(Bits)) - out);
}

}  // namespace kv
