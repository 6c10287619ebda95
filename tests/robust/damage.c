/*
 * Damages a container in one place at a time: `verify` must find every one. A bit of each stored
 * tensor, bytes of each file, each file truncated, extended, emptied and removed, each value of the
 * manifest. Values that describe how tensors are stored are also changed with SHA256SUMS made to
 * agree: verify must find the contradiction by itself.
 * Usage: damage QTOOL, with QT_FULL=1 for all places instead of some. QT_SEED=N repeats a run.
 */
#include "tests/robust/robust.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static size_t passed, failed;
static bool full;

static void restore(void)
{
    shell("rm -rf box && cp -a clean box");
}

/* Runs verify on the damaged box, then makes it sound again. */
static void expect_found(const char *place)
{
    static const int found[] = {3, 4, -1};
    struct run run;
    qtool(&run, "verify box");
    const char *fault = run_fault(&run, found);
    if (fault) {
        printf("FAIL %s: status %d: %s\n", place, run.status, fault);
        failed++;
    } else {
        passed++;
    }
    restore();
}

/* ---- bytes ---------------------------------------------------------------------------------- */

static void flip(const char *file, size_t at, const char *what)
{
    char path[256], place[1024];
    snprintf(path, sizeof path, "box/%s", file);
    struct bytes b = bytes_read(path);
    b.data[at] ^= (unsigned char)(1u << below(8));
    bytes_write(path, b);
    bytes_free(&b);
    snprintf(place, sizeof place, "byte %zu of %s (%s)", at, file, what);
    expect_found(place);
}

static void damage_tensors(void)
{
    size_t count;
    struct place *places = container_places(&count, "box");
    for (size_t i = 0; i < count; i++)
        for (size_t n = full ? 8 : 1; places[i].size && n > 0; n--)
            flip("model.safetensors", places[i].at + below(places[i].size), places[i].name);
    free(places);
}

/* Bytes of the whole file, or of its first `limit`. */
static void damage_bytes(const char *file, size_t limit)
{
    char path[256];
    snprintf(path, sizeof path, "box/%s", file);
    struct bytes b = bytes_read(path);
    size_t size = limit && limit < b.size ? limit : b.size, some = full ? 150 : 4;
    for (size_t n = size < some ? size : some; n > 0; n--)
        flip(file, below(size), "anywhere");
    bytes_free(&b);
}

static void damage_size(const char *file)
{
    static const char *const ways[] = {
        "truncate -s -1 box/$f",
        "truncate -s +1 box/$f",
        ": >box/$f",
        "rm box/$f",
        "truncate -s $(($(wc -c <box/$f) / 2)) box/$f",
        "rm box/$f && mkdir box/$f",
    };
    char place[256];
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        shell("f=%s; %s", file, ways[i]);
        snprintf(place, sizeof place, "%s, f=%s", ways[i], file);
        expect_found(place);
    }
}

/* ---- manifest ------------------------------------------------------------------------------- */

static json_t *changed(const json_t *value)
{
    char text[1024];
    switch (json_typeof(value)) {
    case JSON_STRING:
        snprintf(text, sizeof text, "%.1000s0", json_string_value(value));
        return json_string(text);
    case JSON_INTEGER:
        return json_integer(json_integer_value(value) + 1);
    case JSON_REAL:
        return json_real(json_real_value(value) * 1.5 + 1e-3);
    default: /* literals, empty arrays and objects */
        return json_string("0");
    }
}

/* Changes value number *skip of the tree and writes where it is; false if there are fewer. Only
 * values that contain no others count. */
static bool change_value(json_t *tree, size_t *skip, char *path, size_t size)
{
    size_t used = strlen(path), i = 0;
    const char *key;
    void *next;
    json_t *value;
    for (void *at = json_object_iter(tree); at; at = next) {
        next = json_object_iter_next(tree, at);
        key = json_object_iter_key(at);
        value = json_object_iter_value(at);
        snprintf(path + used, size - used, "/%s", key);
        if (json_object_size(value) || json_array_size(value)) {
            if (change_value(value, skip, path, size))
                return true;
        } else if ((*skip)-- == 0) {
            return json_object_set_new(tree, key, changed(value)) == 0;
        }
    }
    json_array_foreach (tree, i, value) {
        snprintf(path + used, size - used, "/%zu", i);
        if (json_object_size(value) || json_array_size(value)) {
            if (change_value(value, skip, path, size))
                return true;
        } else if ((*skip)-- == 0) {
            return json_array_set_new(tree, i, changed(value)) == 0;
        }
    }
    path[used] = 0;
    return false;
}

/* Values that say how tensors are stored, not how they were made or how good they are. */
static bool describes_storage(const char *path)
{
    static const char *const stored[] = {"/scheme",    "/layout",         "/shape/",
                                         "/sections/", "/dtype",          "/crc32",
                                         "/format",    "/format_version", "/bits"};
    bool found = false;
    for (size_t i = 0; i < sizeof stored / sizeof *stored; i++)
        found = found || strstr(path, stored[i]);
    return found && strncmp(path, "/identity", 9) != 0;
}

static void damage_manifest(bool sign)
{
    char place[1100], path[1024];
    for (size_t i = below(full ? 1 : 20);; i += full ? 1 : 1 + below(sign ? 40 : 80)) {
        size_t skip = i;
        json_t *manifest = json_load_file("box/qtool.json", 0, NULL);
        path[0] = 0;
        bool found = change_value(manifest, &skip, path, sizeof path);
        if (found && (!sign || describes_storage(path))) {
            json_dump_file(manifest, "box/qtool.json", JSON_INDENT(2));
            if (sign)
                container_sign("box");
            snprintf(place, sizeof place, "manifest%s%s", path, sign ? ", SHA256SUMS agrees" : "");
            expect_found(place);
        }
        json_decref(manifest);
        if (!found)
            return;
    }
}

/* ---- all ------------------------------------------------------------------------------------ */

static void make_box(const char *root)
{
    static const int sound[] = {0, -1};
    struct run run;
    shell("cp -r '%s/tests/golden/models/llama' llama && chmod -R u+w llama", root);
    qtool(&run,
          "quantize llama -o clean --scheme nf4 --tensor o_proj=mix24 --tensor down_proj=w4ax "
          "--kv 4 --kv-keys static --data llama/ids.u16 --samples 1 --seqlen 16");
    restore();
    if (!run_fault(&run, sound))
        qtool(&run, "verify box --source llama");
    if (run_fault(&run, sound)) {
        fprintf(stderr, "harness: %s: %s\n", run.command, run_fault(&run, sound));
        exit(99);
    }
}

int main(int argc, char **argv)
{
    static const char *const files[] = {"model.safetensors", "qtool.json", "config.json",
                                        "SHA256SUMS"};
    const char *text = getenv("QT_SEED");
    uint64_t header, seed = text ? strtoull(text, NULL, 10) : (uint64_t)time(NULL);
    char root[4096];
    if (argc != 2) {
        fprintf(stderr, "usage: damage QTOOL\n");
        return 2;
    }
    full = getenv("QT_FULL") != NULL;
    printf("QT_SEED=%llu\n", (unsigned long long)seed);
    random_start(seed);
    robust_begin(argv[1], root);
    make_box(root);
    struct bytes weights = bytes_read("box/model.safetensors");
    memcpy(&header, weights.data, 8);
    bytes_free(&weights);
    damage_tensors();
    damage_bytes("model.safetensors", 8 + header);
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        damage_bytes(files[i], 0);
        damage_size(files[i]);
    }
    damage_manifest(false);
    damage_manifest(true);
    robust_end(false);
    printf("%zu passed, %zu failed, 0 skipped\n", passed, failed);
    return failed > 0;
}
