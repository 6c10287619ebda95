/* config.json, combined with the tensors of each golden model. The linears of an accepted model
 * match the shapes of its tensors, and its first layer runs. */
#include "calib/calib.h"
#include "kernels/kernels.h"
#include "tests/fuzz/fuzz.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_MODELS = 512, SEQLEN = 3 };

static struct qt_ckpt *models[MAX_MODELS];
static size_t nmodels;
static struct qt_backend *be;

void fuzz_init(void)
{
    struct dirent **items;
    struct qt_err err = {0};
    int n = scandir("tests/golden/models", &items, NULL, alphasort);
    FUZZ_CHECK(n > 2 && n < MAX_MODELS);
    for (int i = 0; i < n; i++) {
        char path[512];
        snprintf(path, sizeof path, "tests/golden/models/%s", items[i]->d_name);
        if (items[i]->d_name[0] != '.')
            fuzz_ok(qt_ckpt_open(&models[nmodels++], path, &err), &err);
        free(items[i]);
    }
    free(items);
    fuzz_ok(qt_backend_cpu_open(&be, &err), &err);
}

static void run_layer(const struct qt_model *model, const struct qt_weights *w)
{
    const struct qt_model_info *info = qt_model_info(model);
    size_t m = qt_min_size(SEQLEN, info->max_positions);
    static float hidden[SEQLEN * 4096];
    struct qt_layer *layer = NULL;
    struct qt_err err = {0};
    FUZZ_CHECK(info->state <= 4096);
    for (size_t i = 0; i < m * info->state; i++)
        hidden[i] = (float)(i % 7) - 3;
    fuzz_ok(qt_layer_open(&layer, model, 0, w, be, &err), &err);
    int rc = qt_layer_run(layer, hidden, m, m, NULL, &err);
    (void)fuzz_accepted(rc, &err);
    qt_layer_close(layer);
}

static void check_model(const struct qt_model *model, const struct qt_ckpt *ckpt)
{
    const struct qt_model_info *info = qt_model_info(model);
    FUZZ_CHECK(info->layers && info->hidden && info->vocab && info->heads && info->kv_heads);
    FUZZ_CHECK(info->heads % info->kv_heads == 0 && info->head_dim && info->max_positions);
    for (size_t l = 0; l < info->layers; l++) {
        const struct qt_linear *linears;
        size_t n = qt_model_linears(&linears, model, l);
        for (size_t i = 0; i < n; i++) {
            const struct qt_tensor *t = qt_ckpt_find(ckpt, linears[i].weight);
            FUZZ_CHECK(t && t->ndim == 2 && t->shape[0] == linears[i].n);
            FUZZ_CHECK(t->shape[1] == linears[i].k && linears[i].input >= 0 &&
                       (size_t)linears[i].input < qt_model_inputs(model, linears[i].layer));
        }
    }
}

void fuzz_one(const uint8_t *data, size_t size)
{
    fuzz_write("config.json", data, size);
    for (size_t i = 0; i < nmodels; i++) {
        struct qt_weights w = qt_weights_of_ckpt(models[i]);
        struct qt_model *model;
        struct qt_err err = {0};
        w.dir = fuzz_dir();
        if (!fuzz_accepted(qt_model_open(&model, &w, &err), &err))
            continue;
        check_model(model, models[i]);
        run_layer(model, &w);
        qt_model_close(model);
    }
}
