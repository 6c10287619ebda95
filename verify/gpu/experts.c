/* Layers of experts in GPU memory. */
#include "verify/gpu/gpu.h"

#include <string.h>

int gpu_experts_new(struct gpu_experts *out, size_t experts, struct qt_err *err)
{
    int rc;
    *out = (struct gpu_experts){.experts = experts};
    QT_TRY(qt_array_new(&out->packed, experts * GPU_EXPERT_MATRICES, sizeof *out->packed, err));
    for (int i = 0; i < GPU_EXPERT_MATRICES; i++) {
        QT_TRY(qt_array_new(&out->weight[i], experts, sizeof *out->weight[i], err));
        QT_TRY(qt_array_new(&out->bias[i], experts, sizeof *out->bias[i], err));
    }
done:
    return rc;
}

int gpu_experts_inputs(struct gpu_experts *e, struct qt_gpu *gpu, const struct qt_act *input,
                       const struct qt_act *inner, struct qt_err *err)
{
    const size_t blocks = qt_ceil_div(inner[0].k, QT_ACT_BLOCK);
    uint32_t *words = NULL;
    int rc;
    for (int i = 0; i < GPU_EXPERT_MATRICES; i++)
        QT_TRY(qt_array_new(&e->w4ax[i], e->experts, sizeof *e->w4ax[i], err));
    QT_TRY(qt_array_new(&e->inner, e->experts, sizeof *e->inner, err));
    QT_TRY(qt_array_new(&words, e->experts * blocks, sizeof *words, err));
    QT_TRY(gpu_w4ax_input_new(&e->input, gpu, input, false, err));
    QT_TRY(gpu_buffer_need(&e->inner_words, gpu, e->experts * blocks * sizeof *words, err));
    for (size_t i = 0; i < e->experts; i++) {
        gpu->w4ax_blocks(words + i * blocks, inner[i].bits, blocks, false);
        e->inner[i] = gpu_w4ax_describe(&inner[i], false);
        e->inner[i].blocks = (const uint32_t *)e->inner_words.data + i * blocks;
    }
    QT_TRY(gpu->upload(gpu, e->inner_words.data, words, e->experts * blocks * sizeof *words, err));
    e->described =
        (struct qtool_moe_w4ax){e->w4ax[0], e->w4ax[1], e->w4ax[2], e->input.in, e->inner};
done:
    qt_free(words);
    return rc;
}

static bool is_plain(const struct qt_act *a, bool in_order)
{
    for (size_t i = 0; i < a->k; i++)
        if (a->factor[i] != 1 || (in_order && a->order[i] != i))
            return false;
    return true;
}

static bool same_input(const struct qt_act *a, const struct qt_act *b)
{
    return a->k == b->k && a->scales == b->scales && a->rotate == b->rotate && a->clip == b->clip &&
           memcmp(a->order, b->order, a->k * sizeof *a->order) == 0 &&
           memcmp(a->bits, b->bits, qt_ceil_div(a->k, QT_ACT_BLOCK)) == 0;
}

static bool plain_rows(const struct qt_packed *p)
{
    const uint32_t *order = gpu_section_of(p, "row_order");
    const int8_t *exp2 = gpu_section_of(p, "row_exp2");
    for (size_t i = 0; i < p->n; i++)
        if (order[i] != i || exp2[i] != 0)
            return false;
    return true;
}

/* Reads the input of matrix p; input: NULL, or what it must be. */
static int read_input(struct qt_act *act, const struct qt_act *input, const struct qt_packed *p,
                      bool down, struct qt_err *err)
{
    int rc = QT_OK;
    if (gpu_is_w4ax(p))
        QT_TRY(gpu_act_of(act, p, err));
    if (!act->k || !is_plain(act, down) || !plain_rows(p) || (input && !same_input(input, act)))
        return qt_fail(err, QT_E_UNSUPPORTED, NULL, NULL,
                       "the grouped products do not support w4ax experts whose channels are stored "
                       "in several orders or with factors");
done:
    return rc;
}

int gpu_experts_read_inputs(struct gpu_experts *e, struct qt_gpu *gpu, struct qt_err *err)
{
    struct qt_act input = {.k = 0}, other = {.k = 0}, *inner = NULL;
    int rc;
    QT_TRY(qt_array_new(&inner, e->experts, sizeof *inner, err));
    QT_TRY(read_input(&input, NULL, e->packed, false, err));
    for (size_t i = 0; i < e->experts; i++) {
        const struct qt_packed *p = &e->packed[i * GPU_EXPERT_MATRICES];
        for (int j = 0; j < 2; j++) {
            QT_TRY(read_input(&other, &input, &p[j], false, err));
            qt_act_free(&other);
        }
        QT_TRY(read_input(&inner[i], NULL, &p[2], true, err));
    }
    QT_TRY(gpu_experts_inputs(e, gpu, &input, inner, err));
done:
    for (size_t i = 0; inner && i < e->experts; i++)
        qt_act_free(&inner[i]);
    qt_free(inner);
    qt_act_free(&other);
    qt_act_free(&input);
    return rc;
}

void gpu_experts_free(struct gpu_experts *e, struct qt_gpu *gpu)
{
    qt_free(e->packed);
    for (int i = 0; i < GPU_EXPERT_MATRICES; i++) {
        qt_free(e->weight[i]);
        qt_free(e->bias[i]);
        qt_free(e->w4ax[i]);
    }
    gpu_w4ax_input_free(&e->input, gpu);
    gpu_buffer_free(&e->inner_words, gpu);
    qt_free(e->inner);
    *e = (struct gpu_experts){.experts = 0};
}

static size_t table_bytes(const struct gpu_experts *e)
{
    return qt_round_up(e->experts * QTOOL_MOE_TABLE_EXPERT, 256);
}

size_t gpu_experts_bytes(const struct gpu_experts *e)
{
    size_t bytes = table_bytes(e);
    for (size_t i = 0; i < e->experts * GPU_EXPERT_MATRICES; i++)
        for (size_t s = 0; s < gpu_sections(&e->packed[i]); s++)
            bytes += gpu_section_stride(e->packed[i].section[s].bytes);
    return bytes;
}

struct qtool_moe_layer gpu_experts_layer(const struct gpu_experts *e)
{
    return (struct qtool_moe_layer){.experts = e->experts,
                                    .gate = e->weight[0],
                                    .up = e->weight[1],
                                    .down = e->weight[2],
                                    .bias = {e->bias[0], e->bias[1], e->bias[2]},
                                    .w4ax = e->w4ax[0] ? &e->described : NULL};
}

/* Fills e->weight or e->w4ax, and uploads the sections behind the table. */
static int place_sections(struct gpu_experts *e, struct qt_gpu *gpu, char *memory, bool upload,
                          struct qt_err *err)
{
    char *at = memory + table_bytes(e);
    int rc = QT_OK;
    for (size_t i = 0; i < e->experts * GPU_EXPERT_MATRICES; i++) {
        const struct qt_packed *p = &e->packed[i];
        const void *section[QT_MAX_SECTIONS] = {NULL};
        for (size_t s = 0; s < gpu_sections(p); s++) {
            section[s] = at;
            if (upload)
                QT_TRY(gpu->upload(gpu, at, p->section[s].data, p->section[s].bytes, err));
            at += gpu_section_stride(p->section[s].bytes);
        }
        const size_t matrix = i % GPU_EXPERT_MATRICES, expert = i / GPU_EXPERT_MATRICES;
        QT_TRY(e->w4ax[matrix] ? qt_gpu_w4ax_weight(&e->w4ax[matrix][expert], p, section, err)
                               : qt_gpu_weight(&e->weight[matrix][expert], p, section, err));
    }
done:
    return rc;
}

int gpu_experts_place(struct gpu_experts *e, struct qt_gpu *gpu, void *memory, bool upload,
                      struct qt_err *err)
{
    const struct qtool_moe_layer layer = gpu_experts_layer(e);
    const size_t bytes = e->experts * QTOOL_MOE_TABLE_EXPERT;
    void *table = NULL;
    int rc;
    e->table = memory;
    e->same_tables = true;
    for (size_t i = 0; i < e->experts; i++)
        e->same_tables &= gpu_same_table(&e->packed[i * GPU_EXPERT_MATRICES],
                                         &e->packed[i * GPU_EXPERT_MATRICES + 1]);
    QT_TRY(place_sections(e, gpu, memory, upload, err));
    QT_TRY(qt_array_new(&table, bytes, 1, err));
    QT_TRY(gpu->moe_table(gpu, table, &layer, err));
    QT_TRY(gpu->upload(gpu, memory, table, bytes, err));
done:
    qt_free(table);
    return rc;
}
