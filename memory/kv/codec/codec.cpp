// The codecs' inner loops behind a plain C interface. Each function gives the bits that the Python beside it gives.
//
// A payload is a table of the heads' lengths (u32 each, heads in the order of the array) and the heads' blobs.
// Nothing is thrown at the caller: `BAD` is a payload that does not fit, `NO_MEMORY` what it says.
#include "grouped.h"

namespace {

using namespace kv;

struct View {
    uint8_t* data;
    int64_t strides[4];  // bytes, of layers, keys and values, heads, tokens
    uint64_t layers, pair, heads, tokens, dim, itemsize;

    size_t count() const { return size_t(layers * pair * heads); }
    bool keys(size_t index) const { return index / heads % pair == 0; }
    Rows rows(size_t index) const {
        const int64_t head = int64_t(index % heads), half = int64_t(index / heads % pair), layer = int64_t(index / heads / pair);
        return {data + layer * strides[0] + half * strides[1] + head * strides[2], strides[3], size_t(tokens), size_t(dim)};
    }
};

template <typename Each> int64_t decode_all(const uint8_t* data, uint64_t length, const View& view, Each each) try {
    const size_t table = 4 * view.count();
    if (length < table) return BAD;
    uint64_t at = table;
    for (size_t i = 0; i < view.count(); ++i) {
        const uint64_t blob = read32(data + 4 * i);
        if (blob > length - at) return BAD;
        const int64_t result = each(data + at, blob, i);
        if (result) return result;
        at += blob;
    }
    return at == length ? 0 : int64_t(BAD);
} catch (const std::bad_alloc&) {
    return NO_MEMORY;
}

template <typename Each> int64_t encode_all(const View& view, uint8_t* out, Each each) try {
    uint64_t at = 4 * view.count();
    for (size_t i = 0; i < view.count(); ++i) {
        const uint64_t blob = each(out + at, i);
        write32(out + 4 * i, uint32_t(blob));
        at += blob;
    }
    return int64_t(at);
} catch (const std::bad_alloc&) {
    return NO_MEMORY;
}

}  // namespace

extern "C" {

// Bytes that any payload of the view fits into.
uint64_t kv_bound(const View* view) {
    const size_t blob = grouped_bound(view->rows(0), view->itemsize);
    return view->count() * (4 + blob);
}

int64_t kv_exact_decode(const uint8_t* data, uint64_t length, int per_channel, const View* view) {
    std::vector<uint8_t> tiled;
    return decode_all(data, length, *view, [&](const uint8_t* blob, size_t size, size_t i) {
        return view->itemsize == 2 ? decode_head<uint16_t>(blob, size, per_channel, view->rows(i), tiled)
                                   : decode_head<uint32_t>(blob, size, per_channel, view->rows(i), tiled);
    });
}

int64_t kv_exact_encode(const View* view, int per_channel, uint8_t* out) {
    return encode_all(*view, out, [&](uint8_t* at, size_t i) {
        return view->itemsize == 2 ? encode_head<uint16_t>(view->rows(i), per_channel, at)
                                   : encode_head<uint32_t>(view->rows(i), per_channel, at);
    });
}

int64_t kv_grouped_decode(const uint8_t* data, uint64_t length, int bits, const View* view) {
    std::vector<uint8_t> tiled;
    return decode_all(data, length, *view, [&](const uint8_t* blob, size_t size, size_t i) {
        return view->itemsize == 2 ? decode_grouped<uint16_t>(blob, size, bits, view->rows(i), tiled)
                                   : decode_grouped<uint32_t>(blob, size, bits, view->rows(i), tiled);
    });
}

int64_t kv_grouped_encode(const View* view, int bits, int per_channel, uint8_t* out) {
    return encode_all(*view, out, [&](uint8_t* at, size_t i) {
        const bool keys = view->keys(i);
        return view->itemsize == 2 ? encode_grouped<uint16_t>(view->rows(i), keys, bits, per_channel, at)
                                   : encode_grouped<uint32_t>(view->rows(i), keys, bits, per_channel, at);
    });
}
}
