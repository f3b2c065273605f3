/* Floats as planes of bytes. A value is rotated left by one bit first, so that the first plane is its exponent. */
#include <stddef.h>
#include <stdint.h>

void split2(const uint16_t *values, size_t count, uint8_t *planes) {
    for (size_t i = 0; i < count; i++) {
        uint16_t v = values[i] << 1 | values[i] >> 15;
        planes[i] = v >> 8;
        planes[count + i] = v;
    }
}

void join2(const uint8_t *planes, size_t count, uint16_t *values) {
    for (size_t i = 0; i < count; i++) {
        uint16_t v = planes[i] << 8 | planes[count + i];
        values[i] = v >> 1 | v << 15;
    }
}

void split4(const uint32_t *values, size_t count, uint8_t *planes) {
    for (size_t i = 0; i < count; i++) {
        uint32_t v = values[i] << 1 | values[i] >> 31;
        planes[i] = v >> 24;
        planes[count + i] = v >> 16;
        planes[2 * count + i] = v >> 8;
        planes[3 * count + i] = v;
    }
}

void join4(const uint8_t *planes, size_t count, uint32_t *values) {
    for (size_t i = 0; i < count; i++) {
        uint32_t v = (uint32_t)planes[i] << 24 | planes[count + i] << 16 | planes[2 * count + i] << 8 | planes[3 * count + i];
        values[i] = v >> 1 | v << 31;
    }
}

/* The difference to the values of an earlier checkpoint as an integer, its sign in the last bit, rotated back so that
   split2 and split4 find the high bits in their first plane. */
#define DIFFERENCES(bytes, type, signed_type, last)                                                          \
    void subtract##bytes(const type *values, const type *earlier, size_t count, type *out) {                 \
        for (size_t i = 0; i < count; i++) {                                                                 \
            signed_type d = values[i] - earlier[i];                                                          \
            type z = (type)d << 1 ^ d >> last;                                                               \
            out[i] = z >> 1 | z << last;                                                                     \
        }                                                                                                    \
    }                                                                                                        \
    void add##bytes(const type *difference, const type *earlier, size_t count, type *out) {                  \
        for (size_t i = 0; i < count; i++) {                                                                 \
            type z = difference[i] << 1 | difference[i] >> last;                                             \
            out[i] = earlier[i] + (z >> 1 ^ -(z & 1));                                                       \
        }                                                                                                    \
    }

DIFFERENCES(2, uint16_t, int16_t, 15)
DIFFERENCES(4, uint32_t, int32_t, 31)
