/* Packs and unpacks planes of the fragment layouts (layout_frag.h, layout_frag8.h), one fragment
 * block at a time, on the host. */
#ifndef QT_PACK_LAYOUTS_FRAG_H
#define QT_PACK_LAYOUTS_FRAG_H

#include "formats/layouts/layout_frag8.h"
#include <stddef.h>
#include <stdint.h>

/* Packs or unpacks one fragment block: bits [shift, shift + p) of the codes code[r * stride + c], r
 * < 16, c < 64, to or from the plane of p bits, words[32 lanes][p]. Unpacking ORs into the codes.
 * QT_FRAG_BYTE has 4-bit planes only and takes codes u for values u - 8. QT_FRAG_WHOLE has whole
 * codes: p is 4, and shift is 4 for the first plane and 0 for the second. */
void qt_frag_pack(uint32_t *words, const uint8_t *code, size_t stride, enum qt_frag_order order,
                  unsigned p, unsigned shift);
void qt_frag_unpack(uint8_t *code, const uint32_t *words, size_t stride, enum qt_frag_order order,
                    unsigned p, unsigned shift);

/* Same as qt_frag_pack, bit by bit from qt_frag_bit: the reference for tests. QT_FRAG_NIBBLE and
 * QT_FRAG_HALF only. */
void qt_frag_pack_reference(uint32_t *words, const uint8_t *code, size_t stride,
                            enum qt_frag_order order, unsigned p, unsigned shift);

#endif
