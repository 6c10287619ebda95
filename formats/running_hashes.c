/*
 * SHA-256 of shards while they are written. A background thread follows the end of the committed
 * tensors that have none in front of them that is not committed; qt_writer_finish hashes the rest.
 * So a container needs no pass of a single thread over gigabytes at its end.
 */
#include "formats/writer_internal.h"

#include <nettle/sha2.h>
#include <string.h>

/* One shard, up to `hashed`. */
struct qt_running_hash {
    struct sha256_ctx sha;
    uint64_t hashed, to;
    const char *path;
};

struct qt_running_hashes {
    struct qt_running_hash *shard;
    size_t *next; /* by shard: the first place that is not committed */
    size_t count, added;
    struct qt_behind *behind;
};

void qt_running_hashes_close(struct qt_running_hashes *r)
{
    if (!r)
        return;
    qt_behind_close(r->behind);
    qt_free(r->shard);
    qt_free(r->next);
    qt_free(r);
}

static void restart(struct qt_running_hashes *r, const struct qt_writer *w, size_t shard)
{
    struct qt_running_hash *s = &r->shard[shard];
    *s = (struct qt_running_hash){.path = w->shards[shard].path};
    sha256_init(&s->sha);
    r->next[shard] = 0;
    while (r->next[shard] < w->count && w->places[r->next[shard]].shard != shard)
        r->next[shard]++;
}

int qt_running_hashes_open(struct qt_running_hashes **out, const struct qt_writer *w,
                           struct qt_err *err)
{
    struct qt_running_hashes *r;
    int rc = qt_array_new(out, 1, sizeof **out, err);
    if (rc < 0)
        return rc;
    r = *out;
    r->count = w->nshards;
    QT_TRY(qt_array_new(&r->shard, r->count, sizeof *r->shard, err));
    QT_TRY(qt_array_new(&r->next, r->count, sizeof *r->next, err));
    QT_TRY(qt_behind_open(&r->behind, err));
    for (size_t i = 0; i < r->count; i++)
        restart(r, w, i);
done:
    if (rc < 0) {
        qt_running_hashes_close(r);
        *out = NULL;
    }
    return rc;
}

int qt_running_hash_add(struct qt_running_hash *s, uint64_t to, struct qt_err *err)
{
    enum { PIECE = 1 << 24 };
    struct qt_map map;
    int rc = qt_map_open(&map, s->path, err);
    if (rc < 0)
        return rc;
    if (map.size < to)
        rc = qt_fail(err, QT_E_RESOURCE, s->path, NULL, "is shorter than what was written");
    while (s->hashed < to && rc == QT_OK) {
        const size_t n = qt_min_size(PIECE, (size_t)(to - s->hashed));
        sha256_update(&s->sha, n, map.data + s->hashed);
        qt_map_drop(&map, map.data + s->hashed, n);
        s->hashed += n;
        rc = qt_stop_check(err);
    }
    qt_map_close(&map);
    return rc;
}

static int follow(void *ctx, struct qt_err *err)
{
    struct qt_running_hash *s = ctx;
    return qt_running_hash_add(s, s->to, err);
}

static void drop_nothing(void *ctx)
{
    (void)ctx;
}

/* Returns the end of the committed tensors at the start of a shard. */
static uint64_t committed_end(struct qt_running_hashes *r, const struct qt_writer *w, size_t shard)
{
    size_t *next = &r->next[shard];
    while (*next < w->count && w->places[*next].shard == shard &&
           (w->places[*next].committed || w->places[*next].size == 0))
        ++*next;
    if (*next == 0 || w->places[*next - 1].shard != shard)
        return 0;
    return w->places[*next - 1].offset + w->places[*next - 1].size;
}

void qt_running_hashes_advance(struct qt_running_hashes *r, const struct qt_writer *w)
{
    if (!r || qt_behind_done(r->behind) < r->added)
        return;
    for (size_t i = 0; i < r->count; i++) {
        struct qt_running_hash *s = &r->shard[i];
        s->to = committed_end(r, w, i);
        if (s->to <= s->hashed)
            continue;
        if (qt_behind_add(r->behind,
                          &(struct qt_behind_job){.run = follow, .drop = drop_nothing, .ctx = s},
                          NULL) == QT_OK)
            r->added++;
        return;
    }
}

void qt_running_hashes_restart(struct qt_running_hashes *r, const struct qt_writer *w, size_t shard)
{
    if (!r)
        return;
    qt_behind_wait(r->behind, NULL);
    restart(r, w, shard);
}

struct qt_running_hash *qt_running_hashes_of(struct qt_running_hashes *r, const char *path)
{
    for (size_t i = 0; r && i < r->count; i++)
        if (strcmp(r->shard[i].path, path) == 0)
            return &r->shard[i];
    return NULL;
}

int qt_running_hashes_settle(struct qt_running_hashes *r, struct qt_err *err)
{
    return r ? qt_behind_wait(r->behind, err) : QT_OK;
}

void qt_running_hash_digest(struct qt_running_hash *s, uint8_t *digest)
{
    sha256_digest(&s->sha, SHA256_DIGEST_SIZE, digest);
}
