/* bench: what its options ask for. */
#include "cli/bench.h"

#include <string.h>

enum { MAX_TOKENS = 1 << 16, MAX_SIDE = 1 << 20, MAX_HEADS = 1 << 12, MAX_LENGTH = 1 << 24 };
enum { MAX_BATCH = 1024 };

static const struct qt_bench_shape named[] = {
    {"llama3-8b:qkv", 6144, 4096},       {"llama3-8b:o", 4096, 4096},
    {"llama3-8b:gate+up", 28672, 4096},  {"llama3-8b:down", 4096, 14336},
    {"llama3-70b:qkv", 10240, 8192},     {"llama3-70b:o", 8192, 8192},
    {"llama3-70b:gate+up", 57344, 8192}, {"llama3-70b:down", 8192, 28672},
};
static const struct qt_bench_cache named_caches[] = {
    {"llama3-8b:attention", 32, 8, 128},
    {"llama3-70b:attention", 64, 8, 128},
};
enum {
    NAMED = sizeof named / sizeof *named,
    NAMED_CACHES = sizeof named_caches / sizeof *named_caches,
};

static const char *const default_schemes[] = {"int4", "nf4", "nf3", "nf2", "fp6", "fp5"};
static const char *const default_shapes[] = {"llama3-8b:o", "llama3-70b:o", "llama3-70b:gate+up"};
static const char *const default_caches[] = {"llama3-8b:attention"};
const char bench_default_m[] = "1,16,64,256";
static const char default_length[] = "2048,8192,32768";

/* A value of --scheme that selects attention over a 4-bit cache instead of a scheme. */
static const char cache_scheme[] = "kv4";

static int add_shape(struct bench_request *r, const struct qt_bench_shape *shape,
                     struct qt_err *err)
{
    int rc = qt_array_grow(&r->shapes, &r->shapes_capacity, r->nshapes + 1, sizeof *shape, err);
    if (rc == QT_OK)
        r->shapes[r->nshapes++] = *shape;
    return rc;
}

/* True if name is `word` or begins with `word` and a colon. */
static bool is_named(const char *name, const char *word)
{
    size_t n = strlen(word);
    return strncmp(name, word, n) == 0 && (name[n] == '\0' || name[n] == ':');
}

static int add_cache(struct bench_request *r, const struct qt_bench_cache *shape,
                     struct qt_err *err)
{
    int rc = qt_array_grow(&r->caches, &r->caches_capacity, r->ncaches + 1, sizeof *shape, err);
    if (rc == QT_OK)
        r->caches[r->ncaches++] = *shape;
    return rc;
}

/* Adds a named shape, or all shapes of a named model. */
static int add_named(struct bench_request *r, const char *text, struct qt_err *err)
{
    const char *names[NAMED + NAMED_CACHES + 2] = {"llama3-8b", "llama3-70b"};
    size_t before = r->nshapes + r->ncaches, n = 2;
    int rc = QT_OK;
    for (size_t i = 0; i < NAMED; i++) {
        names[n++] = named[i].name;
        if (is_named(named[i].name, text))
            QT_TRY(add_shape(r, &named[i], err));
    }
    for (size_t i = 0; i < NAMED_CACHES; i++) {
        names[n++] = named_caches[i].name;
        if (is_named(named_caches[i].name, text))
            QT_TRY(add_cache(r, &named_caches[i], err));
    }
    if (r->nshapes + r->ncaches == before)
        rc = opts_unknown("shape", text, names, n, err);
done:
    return rc;
}

/* Parses a name, NxK or HEADSxKV_HEADSxDIM. */
static int parse_shape(struct bench_request *r, const char *text, struct qt_err *err)
{
    size_t side[3];
    char word[3][24];
    int rc = QT_OK, end = 0, middle = 0;
    int words =
        sscanf(text, "%23[0-9]x%23[0-9]%nx%23[0-9]%n", word[0], word[1], &middle, word[2], &end);
    if (words < 2 || text[words == 3 ? end : middle] != '\0')
        return add_named(r, text, err);
    for (int i = 0; i < words; i++)
        QT_TRY(opts_size(&side[i], "--shape", word[i], 1, words == 2 ? MAX_SIDE : MAX_HEADS, err));
    if (words == 2)
        return add_shape(r, &(struct qt_bench_shape){.n = side[0], .k = side[1]}, err);
    if (side[0] % side[1])
        return qt_fail(err, QT_E_USAGE, NULL, NULL,
                       "--shape %s: %zu query heads are not a multiple of %zu KV heads", text,
                       side[0], side[1]);
    rc = add_cache(r, &(struct qt_bench_cache){NULL, side[0], side[1], side[2]}, err);
done:
    return rc;
}

static int parse_sizes(size_t **out, size_t *count, const char *option, const char *text,
                       size_t most, struct qt_err *err)
{
    size_t capacity = 0;
    char *words = NULL;
    int rc;
    QT_TRY(qt_string_format(&words, err, "%s", text));
    for (char *at = words, *comma; at; at = comma ? comma + 1 : NULL) {
        comma = strchr(at, ',');
        if (comma)
            *comma = '\0';
        QT_TRY(qt_array_grow(out, &capacity, *count + 1, sizeof **out, err));
        QT_TRY(opts_size(&(*out)[*count], option, at, 1, most, err));
        ++*count;
    }
done:
    qt_free(words);
    return rc;
}

static int parse_schemes(struct bench_request *r, const char *const *names, size_t n,
                         struct qt_err *err)
{
    int rc;
    QT_TRY(qt_array_new(&r->specs, n, sizeof *r->specs, err));
    QT_TRY(qt_array_new(&r->names, n, sizeof *r->names, err));
    for (size_t i = 0; i < n; i++) {
        if (strcmp(names[i], cache_scheme) == 0) {
            r->kv4 = true;
            continue;
        }
        r->names[r->nspecs] = names[i];
        QT_TRY(qt_spec_parse(&r->specs[r->nspecs], names[i], err));
        if (!r->specs[r->nspecs++].scheme)
            QT_TRY(qt_fail(err, QT_E_USAGE, NULL, NULL,
                           "--scheme none copies weights: there is no kernel to measure"));
    }
done:
    return rc;
}

/* Parses --shape. Each must suit a scheme; of a model, which has both kinds, one is enough. */
static int parse_shapes(struct bench_request *r, const char *const *texts, size_t n,
                        struct qt_err *err)
{
    for (size_t i = 0; i < n; i++) {
        size_t shapes = r->nshapes, caches = r->ncaches;
        int rc = parse_shape(r, texts[i], err);
        if (rc < 0)
            return rc;
        if (!r->kv4 && r->nshapes == shapes)
            return qt_fail(err, QT_E_USAGE, NULL, NULL,
                           "--shape %s is an attention shape: it needs --scheme %s", texts[i],
                           cache_scheme);
        if (!r->nspecs && r->ncaches == caches)
            return qt_fail(err, QT_E_USAGE, NULL, NULL,
                           "--shape %s is a matrix shape: --scheme %s needs HEADSxKV_HEADSxDIM",
                           texts[i], cache_scheme);
    }
    return QT_OK;
}

/* Checks that every scheme has a shape. */
static int match_shapes(struct bench_request *r, struct qt_err *err)
{
    if (r->kv4 && r->ncaches == 0)
        return qt_fail(err, QT_E_USAGE, NULL, NULL,
                       "--scheme %s needs an attention shape: --shape HEADSxKV_HEADSxDIM",
                       cache_scheme);
    if (r->nspecs && r->nshapes == 0)
        return qt_fail(err, QT_E_USAGE, NULL, NULL, "--scheme %s needs a matrix shape: --shape NxK",
                       r->names[0]);
    if (!r->kv4)
        r->ncaches = 0;
    if (!r->nspecs)
        r->nshapes = 0;
    return QT_OK;
}

/* --model: schemes and batch sizes. */
static int parse_model(struct bench_request *r, const struct bench_options *o, struct qt_err *err)
{
    int rc;
    if (o->shape.count || o->moe.count || o->m != bench_default_m || o->length || o->dtype ||
        o->compute || o->dependent)
        return qt_fail(err, QT_E_USAGE, NULL, NULL,
                       "--model takes --scheme, --head, --batch, --prompt, --tokens, --kv, "
                       "--invariant and --price");
    QT_TRY(parse_schemes(r, o->scheme.items, o->scheme.count, err));
    if (r->kv4)
        QT_TRY(qt_fail(err, QT_E_USAGE, NULL, NULL,
                       "with --model, a 4-bit cache is --kv 4, not --scheme %s", cache_scheme));
    QT_TRY(parse_sizes(&r->m, &r->nm, "--batch", o->whole.batch, MAX_BATCH, err));
    if (r->nm > QT_BENCH_BATCHES)
        rc = qt_fail(err, QT_E_USAGE, NULL, NULL, "--batch lists more than %d sizes",
                     QT_BENCH_BATCHES);
done:
    return rc;
}

/* Checks that every option applies to some scheme. */
static int check_options(const struct bench_request *r, const struct bench_options *o,
                         struct qt_err *err)
{
    if (o->length && !r->kv4)
        return qt_fail(err, QT_E_USAGE, NULL, NULL,
                       "--length applies to attention only: it needs --scheme %s", cache_scheme);
    if (o->compute && !r->nspecs)
        return qt_fail(err, QT_E_USAGE, NULL, NULL,
                       "--compute applies to matrix products only, not to --scheme %s",
                       cache_scheme);
    if (o->invariant && !r->nspecs)
        return qt_fail(err, QT_E_USAGE, NULL, NULL,
                       "--invariant applies to matrix products only, not to --scheme %s",
                       cache_scheme);
    return QT_OK;
}

/* --moe: layers of experts instead of single products. */
static int parse_moe(struct bench_request *r, const struct bench_options *o, struct qt_err *err)
{
    const char *other = o->shape.count ? "--shape"
                        : o->length    ? "--length"
                        : o->compute   ? "--compute"
                        : o->invariant ? "--invariant"
                        : r->kv4       ? "--scheme kv4"
                                       : NULL;
    int rc = QT_OK;
    if (other)
        return qt_fail(err, QT_E_USAGE, NULL, NULL, "%s does not apply to --moe", other);
    QT_TRY(qt_array_new(&r->moe, o->moe.count, sizeof *r->moe, err));
    for (; r->nmoe < o->moe.count; r->nmoe++)
        QT_TRY(bench_moe_parse(&r->moe[r->nmoe], o->moe.items[r->nmoe], err));
    QT_TRY(parse_sizes(&r->m, &r->nm, "--m", o->m, MAX_TOKENS, err));
done:
    return rc;
}

int bench_request_parse(struct bench_request *r, const struct bench_options *o, struct qt_err *err)
{
    const char *const *schemes = default_schemes;
    size_t nschemes = sizeof default_schemes / sizeof *default_schemes;
    int rc;
    if (o->whole.path)
        return parse_model(r, o, err);
    if (o->scheme.count)
        schemes = o->scheme.items, nschemes = o->scheme.count;
    QT_TRY(parse_schemes(r, schemes, nschemes, err));
    if (o->moe.count)
        return parse_moe(r, o, err);
    QT_TRY(parse_shapes(r, o->shape.items, o->shape.count, err));
    if (!o->shape.count && r->nspecs)
        QT_TRY(
            parse_shapes(r, default_shapes, sizeof default_shapes / sizeof *default_shapes, err));
    if (!o->shape.count && r->kv4)
        QT_TRY(
            parse_shapes(r, default_caches, sizeof default_caches / sizeof *default_caches, err));
    QT_TRY(match_shapes(r, err));
    QT_TRY(check_options(r, o, err));
    QT_TRY(parse_sizes(&r->m, &r->nm, "--m", o->m, MAX_TOKENS, err));
    QT_TRY(parse_sizes(&r->lengths, &r->nlengths, "--length",
                       o->length ? o->length : default_length, MAX_LENGTH, err));
done:
    return rc;
}

void bench_request_free(struct bench_request *r)
{
    qt_free(r->specs);
    qt_free(r->names);
    qt_free(r->shapes);
    qt_free(r->caches);
    qt_free(r->moe);
    qt_free(r->m);
    qt_free(r->lengths);
}
