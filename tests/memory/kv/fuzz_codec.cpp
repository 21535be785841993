// Encodes arrays of every kind, damages the payloads, decodes them from buffers without a byte to spare. Built with the
// address and undefined-behaviour sanitizers, which end the program at the first access outside a buffer.
//
//     fuzz_codec SEED ARRAYS
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>

#include "../../../memory/kv/codec/codec.cpp"

using Buffer = std::unique_ptr<uint8_t[]>;

static Buffer numbers(std::mt19937_64& random, size_t count, size_t itemsize) {
    Buffer bytes(new uint8_t[count * itemsize]);
    const int kind = int(random() % 5);
    for (size_t i = 0; i < count; ++i) {
        float number = float(random() % 2001) / 1000.0f - 1.0f;
        if (kind == 1) number *= float(std::exp2(int(random() % 40) - 20));
        uint32_t bits = as_bits(number);
        if (kind == 2) bits = uint32_t(random());
        if (kind == 3) bits &= 0x807fffffu;
        if (kind == 4 && random() % 30 == 0) bits = 0x7fc00000u;
        const uint16_t upper_half = uint16_t(bits >> 16);
        if (itemsize == 2) std::memcpy(&bytes[2 * i], &upper_half, 2);
        else std::memcpy(&bytes[4 * i], &bits, 4);
    }
    return bytes;
}

static std::vector<uint8_t> damaged(std::mt19937_64& random, const uint8_t* payload, size_t length) {
    std::vector<uint8_t> bytes(payload, payload + length);
    const int how = int(random() % 4);
    if (how == 0) bytes.resize(random() % (length + 1));
    if (how == 1) bytes.resize(length + 1 + random() % 40, uint8_t(random()));
    const size_t reach = how == 2 ? length : std::min<size_t>(length, 64);
    for (int flips = how >= 2 ? 1 + int(random() % 6) : 0; flips > 0; --flips) bytes[random() % reach] ^= uint8_t(1u << random() % 8);
    return bytes;
}

int main(int, char** arguments) {
    std::mt19937_64 random(std::strtoull(arguments[1], nullptr, 10));
    const size_t dims[] = {1, 2, 3, 7, 8, 31, 64, 65, 130};
    for (long left = std::atol(arguments[2]); left > 0; --left) {
        const size_t itemsize = random() % 2 ? 2 : 4, layers = 1 + random() % 2, heads = 1 + random() % 2;
        const size_t tokens = 1 + (random() % 4 ? random() % 20 : random() % 300), dim = dims[random() % 9];
        const size_t bytes = layers * 2 * heads * tokens * dim * itemsize;
        const int64_t row = int64_t(dim * itemsize), head = row * int64_t(tokens), half = head * int64_t(heads);
        Buffer kv = numbers(random, bytes / itemsize, itemsize), out(new uint8_t[bytes]());
        View view{kv.get(), {2 * half, half, head, row}, layers, 2, heads, tokens, dim, itemsize};
        Buffer room(new uint8_t[kv_bound(&view)]);
        const int bits[] = {0, 8, 4}, mode = bits[random() % 3], per_channel = int(random() % 2);
        const int64_t length = mode ? kv_grouped_encode(&view, mode, per_channel, room.get())
                                    : kv_exact_encode(&view, per_channel, room.get());
        view.data = out.get();
        for (int attempt = 0; attempt < 6; ++attempt) {
            std::vector<uint8_t> payload(room.get(), room.get() + length);
            if (attempt) payload = damaged(random, room.get(), size_t(length));
            Buffer tight(new uint8_t[payload.size()]);
            std::copy(payload.begin(), payload.end(), tight.get());
            const int64_t result = mode ? kv_grouped_decode(tight.get(), payload.size(), mode, &view)
                                        : kv_exact_decode(tight.get(), payload.size(), per_channel, &view);
            if (attempt) continue;
            if (result || (!mode && std::memcmp(kv.get(), out.get(), bytes))) {
                std::puts("a payload that is whole was refused or read wrongly");
                return 1;
            }
        }
    }
    std::puts("done");
}
