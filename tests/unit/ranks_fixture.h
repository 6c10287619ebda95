/* Ranks (base/comm.h) without MPI: every rank is a thread. */
#ifndef QT_TESTS_RANKS_FIXTURE_H
#define QT_TESTS_RANKS_FIXTURE_H

#include "base/base.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { MAX_RANKS = 9 };

/* A queue holds what one rank has sent to another, in order. */
struct channel {
    struct parcel {
        struct parcel *next;
        size_t bytes;
        char data[];
    } * first;
};

struct world {
    size_t size;
    pthread_barrier_t barrier;
    const void *data[MAX_RANKS]; /* what each rank shows to the others */
    size_t moves;                /* broadcasts and gathers */
    pthread_mutex_t lock;        /* of the channels */
    pthread_cond_t sent;
    struct channel channel[MAX_RANKS][MAX_RANKS]; /* [from][to] */
    int (*work)(struct qt_comm *c, void *ctx, struct qt_err *err);
    void *ctx;
};

struct rank {
    struct qt_comm comm;
    int rc;
    struct qt_err err;
    pthread_t thread;
};

static struct rank ranks[MAX_RANKS];

/* Shows `data` to all ranks; what they show stays valid until hide(). */
static void show(struct qt_comm *c, const void *data)
{
    struct world *w = c->ctx;
    w->data[c->rank] = data;
    if (c->rank == 0)
        w->moves++;
    pthread_barrier_wait(&w->barrier);
}

static void hide(struct qt_comm *c)
{
    pthread_barrier_wait(&((struct world *)c->ctx)->barrier);
}

static void rank_broadcast(struct qt_comm *c, void *data, size_t bytes, size_t from)
{
    show(c, data);
    if (c->rank != from)
        memcpy(data, ((struct world *)c->ctx)->data[from], bytes);
    hide(c);
}

static void rank_gather(struct qt_comm *c, void *all, const void *mine, size_t bytes)
{
    show(c, mine);
    for (size_t i = 0; i < c->size; i++)
        memcpy((char *)all + i * bytes, ((struct world *)c->ctx)->data[i], bytes);
    hide(c);
}

static void send(struct world *w, struct channel *channel, const void *data, size_t bytes)
{
    struct parcel *p = malloc(sizeof *p + bytes), **end = &channel->first;
    if (!p)
        abort();
    p->next = NULL;
    p->bytes = bytes;
    memcpy(p->data, data, bytes);
    pthread_mutex_lock(&w->lock);
    while (*end)
        end = &(*end)->next;
    *end = p;
    pthread_cond_broadcast(&w->sent);
    pthread_mutex_unlock(&w->lock);
}

static void receive(struct world *w, struct channel *channel, void *data, size_t bytes)
{
    pthread_mutex_lock(&w->lock);
    while (!channel->first)
        pthread_cond_wait(&w->sent, &w->lock);
    struct parcel *p = channel->first;
    channel->first = p->next;
    pthread_mutex_unlock(&w->lock);
    if (p->bytes != bytes)
        abort(); /* the ranks disagree: MPI would end them or mix up data */
    memcpy(data, p->data, bytes);
    free(p);
}

static void rank_shift(struct qt_comm *c, const void *out, size_t out_bytes, size_t to, void *in,
                       size_t in_bytes, size_t from)
{
    struct world *w = c->ctx;
    if (out_bytes)
        send(w, &w->channel[c->rank][to], out, out_bytes);
    if (in_bytes)
        receive(w, &w->channel[from][c->rank], in, in_bytes);
}

static void *run_rank(void *rank)
{
    struct rank *r = rank;
    const struct world *w = r->comm.ctx;
    qt_threads_set(1 + (int)(r->comm.rank % 2));
    r->rc = w->work(&r->comm, w->ctx, &r->err);
    return NULL;
}

/* Runs `work` in every rank; results are in ranks[]. */
static void run_world(struct world *w, size_t size,
                      int (*work)(struct qt_comm *c, void *ctx, struct qt_err *err), void *ctx)
{
    *w = (struct world){.size = size, .work = work, .ctx = ctx};
    assert_int_equal(pthread_barrier_init(&w->barrier, NULL, (unsigned)size), 0);
    pthread_mutex_init(&w->lock, NULL);
    pthread_cond_init(&w->sent, NULL);
    for (size_t i = 0; i < size; i++) {
        ranks[i] = (struct rank){.comm = {.rank = i,
                                          .size = size,
                                          .broadcast = rank_broadcast,
                                          .gather = rank_gather,
                                          .shift = rank_shift,
                                          .ctx = w}};
        assert_int_equal(pthread_create(&ranks[i].thread, NULL, run_rank, &ranks[i]), 0);
    }
    for (size_t i = 0; i < size; i++)
        assert_int_equal(pthread_join(ranks[i].thread, NULL), 0);
    for (size_t from = 0; from < size; from++)
        for (size_t to = 0; to < size; to++)
            assert_null(w->channel[from][to].first);
    pthread_cond_destroy(&w->sent);
    pthread_mutex_destroy(&w->lock);
    pthread_barrier_destroy(&w->barrier);
}

#endif
