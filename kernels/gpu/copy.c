/*
 * Copies between host and device memory through pinned staging buffers.
 *
 *   upload      src --all threads--> buffer --DMA--> dst
 *   download    src --DMA--> buffer --all threads--> dst
 *
 * The driver copies pageable memory with one thread, which also takes the page faults: 1 to 2 GB/s
 * when a calibration downloads its Hessians. The staging buffers are used in turn; the event of a
 * buffer is recorded after the last DMA copy from or to the buffer. Everything is on one stream, so
 * the DMA copies of a buffer are in order.
 */
#include "base/base.h"
#include "kernels/gpu/internal.h"

#include <cuda_runtime_api.h>
#include <string.h>

/* CHUNK: bytes of a buffer. PIECE: bytes that a thread copies at a time. */
enum { BUFFERS = 8, CHUNK = 4 << 20, PIECE = 256 << 10 };

struct gpu_staging {
    cudaStream_t stream;
    char *buffers; /* NULL: no pinned memory */
    cudaEvent_t used[BUFFERS];
    size_t next; /* number of the next chunk; chunk i uses buffer i % BUFFERS */
};

void gpu_staging_close(struct gpu_staging *s)
{
    if (!s)
        return;
    cudaStreamSynchronize(s->stream); /* uploads may still be running */
    for (int i = 0; i < BUFFERS; i++)
        if (s->used[i])
            cudaEventDestroy(s->used[i]);
    cudaFreeHost(s->buffers);
    qt_free(s);
}

struct gpu_staging *gpu_staging_open(void *stream)
{
    struct gpu_staging *s;
    bool ok;
    void *p;
    if (qt_array_new(&s, 1, sizeof *s, NULL) < 0)
        return NULL;
    s->stream = stream;
    ok = cudaMallocHost(&p, BUFFERS * (size_t)CHUNK) == cudaSuccess;
    s->buffers = ok ? p : NULL;
    for (int i = 0; i < BUFFERS; i++)
        ok = ok && cudaEventCreateWithFlags(&s->used[i], cudaEventDisableTiming) == cudaSuccess;
    if (ok)
        return s;
    cudaGetLastError(); /* clears the error, which the next launch would report */
    gpu_staging_close(s);
    return NULL;
}

struct copy {
    char *dst;
    const char *src;
    size_t bytes;
};

static void copy_piece(void *ctx, size_t item)
{
    const struct copy *c = ctx;
    const size_t at = item * PIECE;
    memcpy(c->dst + at, c->src + at, qt_min_size(PIECE, c->bytes - at));
}

/* memcpy by all threads. */
static void parallel_memcpy(char *dst, const char *src, size_t bytes)
{
    qt_parallel_for(qt_ceil_div(bytes, PIECE), copy_piece, &(struct copy){dst, src, bytes});
}

static char *buffer_of(const struct gpu_staging *s, size_t number)
{
    return s->buffers + number % BUFFERS * CHUNK;
}

/* Enqueues the DMA copy of chunk `number` and records the event of its buffer. */
static cudaError_t enqueue(struct gpu_staging *s, size_t number, void *dst, const void *src,
                           size_t bytes, enum cudaMemcpyKind kind)
{
    cudaError_t e = cudaMemcpyAsync(dst, src, bytes, kind, s->stream);
    return e == cudaSuccess ? cudaEventRecord(s->used[number % BUFFERS], s->stream) : e;
}

static cudaError_t upload(struct gpu_staging *s, char *dst, const char *src, size_t bytes)
{
    cudaError_t e = cudaSuccess;
    for (size_t at = 0; at < bytes && e == cudaSuccess; at += CHUNK) {
        const size_t number = s->next++, n = qt_min_size(CHUNK, bytes - at);
        e = cudaEventSynchronize(s->used[number % BUFFERS]);
        if (e != cudaSuccess)
            break;
        parallel_memcpy(buffer_of(s, number), src + at, n);
        e = enqueue(s, number, dst + at, buffer_of(s, number), n, cudaMemcpyHostToDevice);
    }
    return e;
}

static cudaError_t download(struct gpu_staging *s, char *dst, const char *src, size_t bytes)
{
    const size_t first = s->next, chunks = qt_ceil_div(bytes, CHUNK);
    cudaError_t e = cudaSuccess;
    for (size_t done = 0; done < chunks && e == cudaSuccess; done++) {
        for (; s->next - first < qt_min_size(chunks, done + BUFFERS) && e == cudaSuccess;
             s->next++) {
            const size_t at = (s->next - first) * CHUNK;
            e = enqueue(s, s->next, buffer_of(s, s->next), src + at, qt_min_size(CHUNK, bytes - at),
                        cudaMemcpyDeviceToHost);
        }
        if (e == cudaSuccess)
            e = cudaEventSynchronize(s->used[(first + done) % BUFFERS]);
        if (e == cudaSuccess)
            parallel_memcpy(dst + done * CHUNK, buffer_of(s, first + done),
                            qt_min_size(CHUNK, bytes - done * CHUNK));
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

int gpu_staging_upload(struct gpu_staging *s, void *stream, void *dst, const void *src,
                       size_t bytes)
{
    if (!s || is_pinned(src))
        return (int)copy_and_wait(stream, dst, src, bytes, cudaMemcpyHostToDevice);
    return (int)upload(s, dst, src, bytes);
}

int gpu_staging_download(struct gpu_staging *s, void *stream, void *dst, const void *src,
                         size_t bytes)
{
    if (!s || is_pinned(dst))
        return (int)copy_and_wait(stream, dst, src, bytes, cudaMemcpyDeviceToHost);
    return (int)download(s, dst, src, bytes);
}
