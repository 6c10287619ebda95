/*
 * The sections of every scheme that needs no data, by the table of schemes. The first byte of the
 * input chooses the preset; the rest is laid over the data of a container that holds one matrix of
 * it. What is accepted decodes, and what also passes the repacking check is the only packing of its
 * codes.
 */
#include "tests/fuzz/quantized.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MAX_PRESETS = 64 };

static struct preset {
    char dir[32];
    unsigned char *data; /* of the file, behind its header */
    size_t size, at;
    int fd;
} presets[MAX_PRESETS];
static size_t count;

static void make(struct preset *p, const char *name)
{
    char file[64], *text;
    uint64_t header;
    size_t size;
    struct qt_err err = {0};
    snprintf(p->dir, sizeof p->dir, "c%zu", count);
    snprintf(file, sizeof file, "%s/model.safetensors", p->dir);
    fuzz_quantized(p->dir, &name, 1);
    fuzz_ok(qt_file_read(&text, &size, fuzz_path(file), 1 << 24, &err), &err);
    memcpy(&header, text, sizeof header);
    p->at = 8 + (size_t)header;
    p->size = size - p->at;
    p->data = malloc(p->size + 1);
    FUZZ_CHECK(p->data);
    p->data[0] = (unsigned char)count;
    memcpy(p->data + 1, text + p->at, p->size);
    qt_free(text);
    fuzz_ok(qt_file_create(&p->fd, fuzz_path(file), true, &err), &err);
    count++;
    fuzz_seed(name, p->data, p->size + 1);
}

void fuzz_init(void)
{
    const struct qt_preset *preset;
    const struct qt_scheme *s;
    for (size_t i = 0; (s = qt_scheme_at(i)) != NULL; i++)
        for (size_t p = 0; count < MAX_PRESETS && (preset = qt_scheme_preset(s, p)) != NULL; p++)
            if (!qt_scheme_needs_data(s))
                make(&presets[count], preset->name);
}

void fuzz_one(const uint8_t *data, size_t size)
{
    struct qt_container *c;
    struct qt_err err = {0};
    if (size == 0)
        return;
    const struct preset *p = &presets[data[0] % count];
    size_t given = qt_min_size(size - 1, p->size);
    fuzz_ok(qt_file_write_at(p->fd, p->dir, data + 1, given, p->at, &err), &err);
    fuzz_ok(
        qt_file_write_at(p->fd, p->dir, p->data + 1 + given, p->size - given, p->at + given, &err),
        &err);
    fuzz_ok(qt_container_open(&c, fuzz_path(p->dir), &err), &err);
    FUZZ_CHECK(fuzz_check_entries(c) == 1 || !fuzz_must_accept);
    qt_container_close(c);
}
