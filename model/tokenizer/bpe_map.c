#include "model/tokenizer/bpe.h"

#include <string.h>

static uint64_t mix(uint64_t h, uint64_t word)
{
    h = (h ^ word) * 0x9e3779b97f4a7c15u;
    return h ^ h >> 32;
}

/* Hashes eight bytes at a time; the size comes first, so that zero padding is unambiguous. */
static uint32_t hash_of(const char *s, size_t size)
{
    uint64_t h = mix(0, size), word;
    for (; size >= 8; s += 8, size -= 8) {
        memcpy(&word, s, 8);
        h = mix(h, word);
    }
    word = 0;
    memcpy(&word, s, size);
    return (uint32_t)mix(h, word);
}

/* The slot that holds the key, or the free slot where it belongs. slot_count > 0. */
static struct qt_strmap_slot *slot_of(const struct qt_strmap *map, uint32_t hash, const char *s,
                                      size_t size)
{
    size_t mask = map->slot_count - 1;
    for (size_t i = hash & mask;; i = (i + 1) & mask) {
        struct qt_strmap_slot *slot = &map->slots[i];
        if (slot->value == QT_NO_ID)
            return slot;
        if (slot->hash == hash && slot->size == size &&
            (size == 0 || memcmp(map->text + slot->offset, s, size) == 0))
            return slot;
    }
}

uint32_t qt_strmap_find(const struct qt_strmap *map, const char *s, size_t size)
{
    return map->slot_count ? slot_of(map, hash_of(s, size), s, size)->value : QT_NO_ID;
}

static int enlarge(struct qt_strmap *map, struct qt_err *err)
{
    struct qt_strmap_slot *old = map->slots, *slots;
    size_t old_count = map->slot_count, count = old_count ? 2 * old_count : 1024;
    int rc = qt_array_new(&slots, count, sizeof *slots, err);
    if (rc < 0)
        return rc;
    for (size_t i = 0; i < count; i++)
        slots[i].value = QT_NO_ID;
    map->slots = slots;
    map->slot_count = count;
    for (size_t i = 0; i < old_count; i++)
        if (old[i].value != QT_NO_ID)
            *slot_of(map, old[i].hash, map->text + old[i].offset, old[i].size) = old[i];
    qt_free(old);
    return QT_OK;
}

int qt_strmap_add(struct qt_strmap *map, const char *s, size_t size, uint32_t value,
                  struct qt_err *err)
{
    int rc;
    if (size >= UINT32_MAX - map->text_size)
        return qt_fail(err, QT_E_UNSUPPORTED, NULL, NULL,
                       "more than 4 GiB of strings are not supported");
    if ((map->count + 1) * 3 > map->slot_count * 2)
        QT_TRY(enlarge(map, err));
    QT_TRY(qt_array_grow(&map->text, &map->text_capacity, map->text_size + size, 1, err));
    uint32_t hash = hash_of(s, size);
    struct qt_strmap_slot *slot = slot_of(map, hash, s, size);
    *slot = (struct qt_strmap_slot){hash, (uint32_t)map->text_size, (uint32_t)size, value};
    if (size)
        memcpy(map->text + map->text_size, s, size);
    map->text_size += size;
    map->count++;
    rc = QT_OK;
done:
    return rc;
}

void qt_strmap_free(struct qt_strmap *map)
{
    qt_free(map->slots);
    qt_free(map->text);
    *map = (struct qt_strmap){0};
}
