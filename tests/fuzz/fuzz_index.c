/*
 * model.safetensors.index.json beside three files with the tensors a, b; c; d. Only the correct map
 * may be accepted, and no file of another directory becomes part of the checkpoint.
 */
#include "tests/fuzz/fuzz.h"

#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

static void write_shard(const char *name, const char *tensors)
{
    char text[512] = "........{", *at = text + 9;
    uint64_t header;
    size_t n = strlen(tensors);
    for (size_t i = 0; i < n; i++)
        at += sprintf(at, "%s\"%c\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[%zu,%zu]}",
                      i ? "," : "", tensors[i], i, i + 1);
    at += sprintf(at, "}");
    header = (uint64_t)(at - text) - 8;
    memcpy(text, &header, sizeof header);
    memcpy(at, tensors, n);
    fuzz_write(name, text, (size_t)(at - text) + n);
}

void fuzz_init(void)
{
    FUZZ_CHECK(mkdir(fuzz_path("in"), 0777) == 0);
    write_shard("in/one.safetensors", "ab");
    write_shard("in/two.safetensors", "c");
    write_shard("in/three.safetensors", "d");
    write_shard("outside.safetensors", "e");
}

void fuzz_one(const uint8_t *data, size_t size)
{
    static const char *const where[] = {"one", "one", "two", "three"};
    struct qt_ckpt *ckpt;
    struct qt_err err = {0};
    char path[512];
    fuzz_write("in/model.safetensors.index.json", data, size);
    if (!fuzz_accepted(qt_ckpt_open(&ckpt, fuzz_path("in"), &err), &err))
        return;
    for (size_t i = 0; i < qt_ckpt_count(ckpt); i++) {
        const struct qt_tensor *t = qt_ckpt_tensor(ckpt, i);
        FUZZ_CHECK(strlen(t->name) == 1 && t->name[0] >= 'a' && t->name[0] <= 'd');
        snprintf(path, sizeof path, "%s/in/%s.safetensors", fuzz_dir(), where[t->name[0] - 'a']);
        FUZZ_CHECK(strcmp(t->file, path) == 0);
    }
    for (size_t i = 0, bytes; i < qt_ckpt_file_count(ckpt); i++) {
        snprintf(path, sizeof path, "%s/in/", fuzz_dir());
        FUZZ_CHECK(strncmp(qt_ckpt_file(ckpt, i, &bytes), path, strlen(path)) == 0);
    }
    qt_ckpt_close(ckpt);
}
