/* Keys of a GGUF file: a growing byte string. */
#include "pack/export/gguf.h"

#include <string.h>

void qt_gguf_raw(struct qt_gguf_bytes *b, const void *data, size_t size)
{
    size_t end;
    if (b->rc < 0)
        return;
    if (qt_add_overflow(&end, b->size, size))
        b->rc = qt_fail(b->err, QT_E_RESOURCE, NULL, NULL, "the header is too large");
    else
        b->rc = qt_array_grow(&b->data, &b->capacity, end, 1, b->err);
    if (b->rc < 0)
        return;
    memcpy(b->data + b->size, data, size);
    b->size = end;
}

static void put_u32(struct qt_gguf_bytes *b, uint32_t v)
{
    qt_gguf_raw(b, &v, sizeof v);
}

static void put_u64(struct qt_gguf_bytes *b, uint64_t v)
{
    qt_gguf_raw(b, &v, sizeof v);
}

void qt_gguf_text(struct qt_gguf_bytes *b, const char *s, size_t size)
{
    put_u64(b, size);
    qt_gguf_raw(b, s, size);
}

static void key(struct qt_gguf_bytes *b, const char *prefix, const char *name,
                enum qt_gguf_value type)
{
    put_u64(b, strlen(prefix) + strlen(name));
    qt_gguf_raw(b, prefix, strlen(prefix));
    qt_gguf_raw(b, name, strlen(name));
    put_u32(b, (uint32_t)type);
    b->keys++;
}

void qt_gguf_u16(struct qt_gguf_bytes *b, const char *name, uint16_t value)
{
    key(b, "", name, QT_GGUF_U16);
    qt_gguf_raw(b, &value, sizeof value);
}

void qt_gguf_u32(struct qt_gguf_bytes *b, const char *prefix, const char *name, uint32_t value)
{
    key(b, prefix, name, QT_GGUF_U32);
    put_u32(b, value);
}

void qt_gguf_i32(struct qt_gguf_bytes *b, const char *name, int32_t value)
{
    key(b, "", name, QT_GGUF_I32);
    qt_gguf_raw(b, &value, sizeof value);
}

void qt_gguf_f32(struct qt_gguf_bytes *b, const char *prefix, const char *name, float value)
{
    key(b, prefix, name, QT_GGUF_F32);
    qt_gguf_raw(b, &value, sizeof value);
}

void qt_gguf_bool(struct qt_gguf_bytes *b, const char *name, bool value)
{
    const unsigned char byte = value;
    key(b, "", name, QT_GGUF_BOOL);
    qt_gguf_raw(b, &byte, 1);
}

void qt_gguf_string(struct qt_gguf_bytes *b, const char *prefix, const char *name,
                    const char *value)
{
    key(b, prefix, name, QT_GGUF_STRING);
    qt_gguf_text(b, value, strlen(value));
}

void qt_gguf_array(struct qt_gguf_bytes *b, const char *name, enum qt_gguf_value type, size_t count)
{
    key(b, "", name, QT_GGUF_ARRAY);
    put_u32(b, (uint32_t)type);
    put_u64(b, count);
}
