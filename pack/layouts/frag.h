/* Codes <-> planes of the fragment layouts (layout_frag.h, layout_frag8.h), block by block on the
 * host. */
#ifndef QT_PACK_LAYOUTS_FRAG_H
#define QT_PACK_LAYOUTS_FRAG_H

#include "pack/layouts/layout_frag8.h"
#include <stddef.h>
#include <stdint.h>

/* One block: codes code[r * stride + c], r < 16, c < 64, of which bits [shift, shift + p) go into
 * (come from) the plane of p bits; words[32 lanes][p]. Unpacking ORs into the codes. QT_FRAG_BYTE
 * has planes of 4 bits only, and takes codes u for values u - 8. QT_FRAG_WHOLE has whole codes, p
 * is 4, and shift is 4 for the first plane and 0 for the second, as if codes were cut. */
void qt_frag_pack(uint32_t *words, const uint8_t *code, size_t stride, enum qt_frag_order order,
                  unsigned p, unsigned shift);
void qt_frag_unpack(uint8_t *code, const uint32_t *words, size_t stride, enum qt_frag_order order,
                    unsigned p, unsigned shift);

/* The same, written bit by bit from qt_frag_bit: the reference for tests. QT_FRAG_NIBBLE and
 * QT_FRAG_HALF. */
void qt_frag_pack_reference(uint32_t *words, const uint8_t *code, size_t stride,
                            enum qt_frag_order order, unsigned p, unsigned shift);

#endif
