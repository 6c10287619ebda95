/*
 * make_checkpoint DIR: a synthetic BF16 checkpoint of 6 GB in three files, with the linear layers
 * of 15 blocks of the Llama-7B shape and normally distributed weights; always the same bytes.
 */
#include "formats/formats.h"

#include <stdio.h>
#include <stdlib.h>

enum { FILES = 3, BLOCKS = 5, PARTS = 7, TENSORS = BLOCKS * PARTS, CHUNK = 1 << 20 };

static const struct {
    const char *name;
    size_t n, k;
} parts[PARTS] = {
    {"self_attn.q_proj", 4096, 4096}, {"self_attn.k_proj", 4096, 4096},
    {"self_attn.v_proj", 4096, 4096}, {"self_attn.o_proj", 4096, 4096},
    {"mlp.gate_proj", 11008, 4096},   {"mlp.up_proj", 11008, 4096},
    {"mlp.down_proj", 4096, 11008},
};

struct generator {
    uint64_t state;
    uint16_t normal[65536]; /* BF16 values, drawn from by 16 random bits */
    uint16_t chunk[CHUNK];
};

static uint64_t next_random(struct generator *g)
{
    g->state ^= g->state << 13; /* xorshift64 */
    g->state ^= g->state >> 7;
    g->state ^= g->state << 17;
    return g->state;
}

static void generator_init(struct generator *g)
{
    g->state = 88172645463325252u;
    for (size_t i = 0; i < 65536; i++) {
        double sum = 0; /* of 12 uniform numbers: nearly normal */
        for (int j = 0; j < 12; j++)
            sum += (double)(next_random(g) >> 11) * 0x1p-53;
        g->normal[i] = qt_f32_to_bf16((float)((sum - 6) * 0.02));
    }
}

static int write_tensor(struct generator *g, int fd, const char *path, uint64_t at, size_t count,
                        struct qt_err *err)
{
    int rc = QT_OK;
    while (count && rc == QT_OK) {
        size_t n = qt_min_size(count, CHUNK);
        for (size_t i = 0; i < CHUNK; i += 4)
            for (uint64_t r = next_random(g), j = 0; j < 4; j++)
                g->chunk[i + j] = g->normal[r >> 16 * j & 0xffff];
        rc = qt_file_write_at(fd, path, g->chunk, 2 * n, at, err);
        at += 2 * n;
        count -= n;
    }
    return rc;
}

static int write_file(struct generator *g, const char *dir, int file, struct qt_err *err)
{
    struct qt_tensor tensors[TENSORS];
    char names[TENSORS][80], path[512], *header = NULL;
    uint64_t offsets[TENSORS + 1];
    size_t size;
    int fd = -1, rc;
    for (size_t i = 0; i < TENSORS; i++) {
        snprintf(names[i], sizeof names[i], "model.layers.%zu.%s.weight",
                 (size_t)file * BLOCKS + i / PARTS, parts[i % PARTS].name);
        tensors[i] = (struct qt_tensor){.name = names[i],
                                        .dtype = QT_BF16,
                                        .ndim = 2,
                                        .shape = {parts[i % PARTS].n, parts[i % PARTS].k}};
    }
    snprintf(path, sizeof path, "%s/model-%05d-of-%05d.safetensors", dir, file + 1, FILES);
    QT_TRY(qt_safetensors_header(&header, &size, offsets, tensors, TENSORS, NULL, err));
    QT_TRY(qt_file_create(&fd, path, false, err));
    QT_TRY(qt_file_write_at(fd, path, header, size, 0, err));
    for (size_t i = 0; i < TENSORS; i++)
        QT_TRY(
            write_tensor(g, fd, path, offsets[i], tensors[i].shape[0] * tensors[i].shape[1], err));
    QT_TRY(qt_file_finish(&fd, path, err));
done:
    qt_free(header);
    return rc;
}

int main(int argc, char **argv)
{
    static struct generator g;
    struct qt_err err = {0};
    char text[2048];
    int rc;
    if (argc != 2) {
        fprintf(stderr, "usage: make_checkpoint DIR\n");
        return 2;
    }
    generator_init(&g);
    QT_TRY(qt_dir_make(argv[1], &err));
    for (int file = 0; file < FILES; file++)
        QT_TRY(write_file(&g, argv[1], file, &err));
done:
    if (rc < 0) {
        qt_err_format(text, sizeof text, &err);
        fprintf(stderr, "make_checkpoint: %s\n", text);
    }
    return qt_exit_code((enum qt_status)rc);
}
