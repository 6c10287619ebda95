/*
 * The sections of every scheme: each preset of the table of schemes, and each parameter choice that
 * changes the sections. The first line of the input names the spec; the rest replaces the data of a
 * container with one such matrix. An accepted matrix obeys docs/schemes.md and decodes.
 */
#include "tests/fuzz/quantized.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MAX_PRESETS = 64 };

static struct preset {
    struct qt_packed described;
    char dir[32];
    unsigned char *input; /* the unchanged input: its line, and the file after the header */
    size_t line, size, at;
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
    p->line = strlen(name) + 1;
    p->size = size - p->at;
    p->input = malloc(p->line + p->size);
    FUZZ_CHECK(p->input);
    memcpy(p->input, name, p->line - 1);
    p->input[p->line - 1] = '\n';
    memcpy(p->input + p->line, text + p->at, p->size);
    qt_free(text);
    fuzz_ok(qt_file_create(&p->fd, fuzz_path(file), true, &err), &err);
    count++;
    fuzz_seed(name, p->input, p->line + p->size);
}

/* True if a matrix of this preset with the same section names exists already. */
static bool is_made(const struct qt_packed *p)
{
    for (size_t i = 0; i < count; i++) {
        const struct qt_packed *q = &presets[i].described;
        size_t same = 0;
        while (same < qt_min_size(p->nsections, q->nsections) &&
               strcmp(p->section[same].name, q->section[same].name) == 0)
            same++;
        if (q->spec.preset == p->spec.preset && same == p->nsections && same == q->nsections)
            return true;
    }
    return false;
}

/* Ignores invalid specs: a preset fixes the parameter, or parameters contradict each other. */
static void make_if_new(const char *text)
{
    enum { N = 16, K = 256 };
    struct qt_packed p;
    struct qt_spec spec;
    if (qt_spec_parse(&spec, text, NULL) < 0 || qt_packed_describe(&p, &spec, N, K, NULL) < 0 ||
        is_made(&p))
        return;
    FUZZ_CHECK(count < MAX_PRESETS);
    presets[count].described = p;
    make(&presets[count], text);
}

static void make_all(const struct qt_scheme *s, const char *preset)
{
    const struct qt_param *param;
    char text[QT_SPEC_TEXT];
    make_if_new(preset);
    for (size_t i = 0; (param = qt_scheme_param(s, i)) != NULL; i++) {
        snprintf(text, sizeof text, "%s:%s=%g", preset, param->key, param->min);
        if (!param->choices)
            make_if_new(text);
        for (size_t j = 0; param->choices && param->choices[j]; j++) {
            snprintf(text, sizeof text, "%s:%s=%s", preset, param->key, param->choices[j]);
            make_if_new(text);
        }
    }
}

void fuzz_init(void)
{
    const struct qt_preset *preset;
    const struct qt_scheme *s;
    for (size_t i = 0; (s = qt_scheme_at(i)) != NULL; i++)
        for (size_t p = 0; (preset = qt_scheme_preset(s, p)) != NULL; p++)
            make_all(s, preset->name);
}

static const struct preset *named(const uint8_t *data, size_t size)
{
    for (size_t i = 0; i < count; i++)
        if (size >= presets[i].line && memcmp(data, presets[i].input, presets[i].line) == 0)
            return &presets[i];
    return NULL;
}

void fuzz_one(const uint8_t *data, size_t size)
{
    const struct preset *p = named(data, size);
    struct qt_container *c;
    struct qt_err err = {0};
    if (!p)
        return;
    const unsigned char *rest = p->input + p->line;
    size_t given = qt_min_size(size - p->line, p->size);
    fuzz_ok(qt_file_write_at(p->fd, p->dir, data + p->line, given, p->at, &err), &err);
    fuzz_ok(qt_file_write_at(p->fd, p->dir, rest + given, p->size - given, p->at + given, &err),
            &err);
    fuzz_ok(qt_container_open(&c, fuzz_path(p->dir), &err), &err);
    FUZZ_CHECK(fuzz_check_entries(c) == 1 || !fuzz_must_accept);
    qt_container_close(c);
}
