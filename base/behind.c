#include "base/behind.h"

#include "base/mem.h"
#include "base/par.h"

#include <pthread.h>
#include <stdbool.h>

struct qt_behind {
    pthread_t thread;
    bool threaded;
    int threads; /* of parallel loops */
    pthread_mutex_t lock;
    pthread_cond_t changed;
    /* The rest is protected by the lock. */
    struct qt_behind_job jobs[QT_BEHIND_SMALL_JOBS];
    size_t added, taken, finished; /* numbers of jobs; job i is at i % QT_BEHIND_SMALL_JOBS */
    size_t done;
    bool closing;
    int rc; /* of the first failed job, with err */
    struct qt_err err;
};

/* Runs a job unless an earlier one has failed. Called with the lock, which is released
 * meanwhile. */
static void do_job(struct qt_behind *b, const struct qt_behind_job *job)
{
    struct qt_err err = {0};
    int rc = b->rc;
    pthread_mutex_unlock(&b->lock);
    if (rc == QT_OK)
        rc = job->run(job->ctx, &err);
    job->drop(job->ctx);
    pthread_mutex_lock(&b->lock);
    if (rc == QT_OK)
        b->done++;
    else if (b->rc == QT_OK) {
        b->rc = rc;
        b->err = err;
    }
}

static void *work(void *ctx)
{
    struct qt_behind *b = ctx;
    qt_threads_set(b->threads);
    pthread_mutex_lock(&b->lock);
    for (;;) {
        while (b->taken == b->added && !b->closing)
            pthread_cond_wait(&b->changed, &b->lock);
        if (b->taken == b->added)
            break;
        const struct qt_behind_job job = b->jobs[b->taken++ % QT_BEHIND_SMALL_JOBS];
        do_job(b, &job);
        b->finished++;
        pthread_cond_broadcast(&b->changed);
    }
    pthread_mutex_unlock(&b->lock);
    return NULL;
}

int qt_behind_open(struct qt_behind **out, struct qt_err *err)
{
    struct qt_behind *b;
    int rc = qt_array_new(out, 1, sizeof **out, err);
    if (rc < 0)
        return rc;
    b = *out;
    pthread_mutex_init(&b->lock, NULL);
    pthread_cond_init(&b->changed, NULL);
    b->threads = qt_threads();
    b->threaded = pthread_create(&b->thread, NULL, work, b) == 0;
    return QT_OK;
}

static int failure(const struct qt_behind *b, struct qt_err *err)
{
    if (b->rc < 0 && err)
        *err = b->err;
    return b->rc;
}

int qt_behind_add(struct qt_behind *b, const struct qt_behind_job *job, struct qt_err *err)
{
    const size_t most = job->small ? QT_BEHIND_SMALL_JOBS : QT_BEHIND_JOBS;
    pthread_mutex_lock(&b->lock);
    while (b->added - b->finished >= most)
        pthread_cond_wait(&b->changed, &b->lock);
    if (b->threaded) {
        b->jobs[b->added++ % QT_BEHIND_SMALL_JOBS] = *job;
        pthread_cond_broadcast(&b->changed);
    } else
        do_job(b, job);
    const int rc = failure(b, err);
    pthread_mutex_unlock(&b->lock);
    return rc;
}

int qt_behind_wait(struct qt_behind *b, struct qt_err *err)
{
    pthread_mutex_lock(&b->lock);
    while (b->finished < b->added)
        pthread_cond_wait(&b->changed, &b->lock);
    const int rc = failure(b, err);
    pthread_mutex_unlock(&b->lock);
    return rc;
}

size_t qt_behind_done(struct qt_behind *b)
{
    pthread_mutex_lock(&b->lock);
    const size_t done = b->done;
    pthread_mutex_unlock(&b->lock);
    return done;
}

void qt_behind_close(struct qt_behind *b)
{
    if (!b)
        return;
    pthread_mutex_lock(&b->lock);
    b->closing = true;
    pthread_cond_broadcast(&b->changed);
    pthread_mutex_unlock(&b->lock);
    if (b->threaded)
        pthread_join(b->thread, NULL);
    pthread_cond_destroy(&b->changed);
    pthread_mutex_destroy(&b->lock);
    qt_free(b);
}
