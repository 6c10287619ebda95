/*
 * Copies between host and device memory.
 *
 *   upload      src --all threads--> slot --copy engine--> dst
 *   download    src --copy engine--> slot --all threads--> dst
 *
 * The driver copies pageable memory by one thread, which first touches it: 1 to 2 GB/s where a
 * calibration stores its sums. Slots are pinned and go round; the event of a slot is that of the
 * last copy from it or to it. Everything is on one stream, so copies to a slot and from it on the
 * device's side are in order.
 */
#include "base/base.h"
#include "kernels/gpu/internal.h"

#include <cuda_runtime_api.h>
#include <string.h>

enum { SLOTS = 8, SLOT = 4 << 20, PIECE = 256 << 10 };

struct gpu_copier {
    cudaStream_t stream;
    char *slots; /* NULL: there is no pinned memory */
    cudaEvent_t used[SLOTS];
    size_t next; /* slots taken so far */
};

void gpu_copier_close(struct gpu_copier *c)
{
    if (!c)
        return;
    cudaStreamSynchronize(c->stream); /* uploads may still be on their way */
    for (int i = 0; i < SLOTS; i++)
        if (c->used[i])
            cudaEventDestroy(c->used[i]);
    cudaFreeHost(c->slots);
    qt_free(c);
}

struct gpu_copier *gpu_copier_open(void *stream)
{
    struct gpu_copier *c;
    bool made;
    void *p;
    if (qt_array_new(&c, 1, sizeof *c, NULL) < 0)
        return NULL;
    c->stream = stream;
    made = cudaMallocHost(&p, SLOTS * (size_t)SLOT) == cudaSuccess;
    c->slots = made ? p : NULL;
    for (int i = 0; i < SLOTS; i++)
        made = made && cudaEventCreateWithFlags(&c->used[i], cudaEventDisableTiming) == cudaSuccess;
    if (made)
        return c;
    cudaGetLastError(); /* or the next launch would report it */
    gpu_copier_close(c);
    return NULL;
}

struct spread {
    char *dst;
    const char *src;
    size_t bytes;
};

static int copy_piece(void *ctx, size_t item, int thread, struct qt_err *err)
{
    const struct spread *s = ctx;
    const size_t at = item * PIECE;
    (void)thread;
    (void)err;
    memcpy(s->dst + at, s->src + at, qt_min_size(PIECE, s->bytes - at));
    return QT_OK;
}

/* memcpy by all threads. */
static void copy_spread(char *dst, const char *src, size_t bytes)
{
    qt_parallel(qt_ceil_div(bytes, PIECE), copy_piece, &(struct spread){dst, src, bytes}, NULL);
}

/* Chunks of a copy are slots that follow each other. */
static char *slot_of(const struct gpu_copier *c, size_t number)
{
    return c->slots + number % SLOTS * SLOT;
}

static cudaError_t enqueue(struct gpu_copier *c, size_t number, void *dst, const void *src,
                           size_t bytes, enum cudaMemcpyKind kind)
{
    cudaError_t e = cudaMemcpyAsync(dst, src, bytes, kind, c->stream);
    return e == cudaSuccess ? cudaEventRecord(c->used[number % SLOTS], c->stream) : e;
}

static cudaError_t upload(struct gpu_copier *c, char *dst, const char *src, size_t bytes)
{
    cudaError_t e = cudaSuccess;
    for (size_t at = 0; at < bytes && e == cudaSuccess; at += SLOT) {
        const size_t number = c->next++, n = qt_min_size(SLOT, bytes - at);
        e = cudaEventSynchronize(c->used[number % SLOTS]);
        if (e != cudaSuccess)
            break;
        copy_spread(slot_of(c, number), src + at, n);
        e = enqueue(c, number, dst + at, slot_of(c, number), n, cudaMemcpyHostToDevice);
    }
    return e;
}

static cudaError_t download(struct gpu_copier *c, char *dst, const char *src, size_t bytes)
{
    const size_t first = c->next, chunks = qt_ceil_div(bytes, SLOT);
    cudaError_t e = cudaSuccess;
    for (size_t done = 0; done < chunks && e == cudaSuccess; done++) {
        for (; c->next - first < qt_min_size(chunks, done + SLOTS) && e == cudaSuccess; c->next++) {
            const size_t at = (c->next - first) * SLOT;
            e = enqueue(c, c->next, slot_of(c, c->next), src + at, qt_min_size(SLOT, bytes - at),
                        cudaMemcpyDeviceToHost);
        }
        if (e == cudaSuccess)
            e = cudaEventSynchronize(c->used[(first + done) % SLOTS]);
        if (e == cudaSuccess)
            copy_spread(dst + done * SLOT, slot_of(c, first + done),
                        qt_min_size(SLOT, bytes - done * SLOT));
    }
    return e;
}

static bool is_pinned(const void *host)
{
    struct cudaPointerAttributes a;
    if (cudaPointerGetAttributes(&a, host) == cudaSuccess)
        return a.type == cudaMemoryTypeHost;
    cudaGetLastError();
    return false;
}

static cudaError_t copy_and_wait(cudaStream_t stream, void *dst, const void *src, size_t bytes,
                                 enum cudaMemcpyKind kind)
{
    cudaError_t e = cudaMemcpyAsync(dst, src, bytes, kind, stream);
    return e == cudaSuccess ? cudaStreamSynchronize(stream) : e;
}

int gpu_copier_upload(struct gpu_copier *c, void *stream, void *dst, const void *src, size_t bytes)
{
    if (!c || is_pinned(src))
        return (int)copy_and_wait(stream, dst, src, bytes, cudaMemcpyHostToDevice);
    return (int)upload(c, dst, src, bytes);
}

int gpu_copier_download(struct gpu_copier *c, void *stream, void *dst, const void *src,
                        size_t bytes)
{
    if (!c || is_pinned(dst))
        return (int)copy_and_wait(stream, dst, src, bytes, cudaMemcpyDeviceToHost);
    return (int)download(c, dst, src, bytes);
}
