/*
 * A library that CUDA loads into a program and that writes what the GPU did, by CUPTI: one line per
 * kernel name and kind of copy with SECONDS, COUNT, BYTES (of copies), NAME, separated by tabs, the
 * longest first; then the lines "busy" (time with at least one activity) and "span" (from the first
 * activity to the end of the last).
 *
 *   gcc -O2 -shared -fPIC -I$CUDA_HOME/include -o gpu_activities.so tests/bench/gpu_activities.c \
 *       -L$CUDA_HOME/lib64 -lcupti
 *   QT_ACTIVITIES=OUT.tsv CUDA_INJECTION64_PATH=$PWD/gpu_activities.so qtool quantize ...
 *
 * tests/bench/quantize_time.py does both.
 */
#include <cupti.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { NAMES = 4096, BUFFER = 8 << 20 };

struct total {
    char *name;
    double seconds, bytes;
    long count;
};
struct interval {
    unsigned long long begin, end; /* ns */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct total totals[NAMES];
static size_t ntotals;
static struct interval *intervals;
static size_t nintervals, capacity;

static struct total *total_of(const char *name)
{
    for (size_t i = 0; i < ntotals; i++)
        if (strcmp(totals[i].name, name) == 0)
            return &totals[i];
    if (ntotals == NAMES)
        return NULL;
    totals[ntotals].name = strdup(name);
    return totals[ntotals].name ? &totals[ntotals++] : NULL;
}

static void add(const char *name, unsigned long long begin, unsigned long long end, double bytes)
{
    struct total *t = total_of(name);
    if (nintervals == capacity) {
        struct interval *p = realloc(intervals, (2 * capacity + 4096) * sizeof *p);
        if (!p)
            return;
        intervals = p;
        capacity = 2 * capacity + 4096;
    }
    intervals[nintervals++] = (struct interval){begin, end};
    if (!t)
        return;
    t->seconds += (double)(end - begin) * 1e-9;
    t->bytes += bytes;
    t->count++;
}

static void take_record(CUpti_Activity *record)
{
    char name[40];
    if (record->kind == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) {
        const CUpti_ActivityKernel10 *k = (const void *)record;
        add(k->name, k->start, k->end, 0);
    } else if (record->kind == CUPTI_ACTIVITY_KIND_MEMCPY) {
        const CUpti_ActivityMemcpy6 *c = (const void *)record;
        snprintf(name, sizeof name, "copy %s",
                 c->copyKind == CUPTI_ACTIVITY_MEMCPY_KIND_HTOD   ? "to the device"
                 : c->copyKind == CUPTI_ACTIVITY_MEMCPY_KIND_DTOH ? "to the host"
                                                                  : "on the device");
        add(name, c->start, c->end, (double)c->bytes);
    } else if (record->kind == CUPTI_ACTIVITY_KIND_MEMSET) {
        const CUpti_ActivityMemset4 *m = (const void *)record;
        add("fill", m->start, m->end, (double)m->bytes);
    }
}

static void CUPTIAPI give_buffer(uint8_t **buffer, size_t *size, size_t *most)
{
    *size = BUFFER;
    *most = 0;
    *buffer = aligned_alloc(8, BUFFER);
}

static void CUPTIAPI take_buffer(CUcontext context, uint32_t stream, uint8_t *buffer, size_t size,
                                 size_t valid)
{
    CUpti_Activity *record = NULL;
    (void)context, (void)stream, (void)size;
    pthread_mutex_lock(&lock);
    while (cuptiActivityGetNextRecord(buffer, valid, &record) == CUPTI_SUCCESS)
        take_record(record);
    pthread_mutex_unlock(&lock);
    free(buffer);
}

static int longer(const void *a, const void *b)
{
    const struct total *x = a, *y = b;
    return (x->seconds < y->seconds) - (x->seconds > y->seconds);
}

static int earlier(const void *a, const void *b)
{
    const struct interval *x = a, *y = b;
    return (x->begin > y->begin) - (x->begin < y->begin);
}

static void write_totals(void)
{
    const char *path = getenv("QT_ACTIVITIES");
    unsigned long long end = 0, busy = 0;
    cuptiActivityFlushAll(1);
    FILE *f = path ? fopen(path, "w") : NULL;
    if (!f) {
        fprintf(stderr, "gpu_activities: QT_ACTIVITIES does not name a file that can be written\n");
        return;
    }
    qsort(totals, ntotals, sizeof *totals, longer);
    qsort(intervals, nintervals, sizeof *intervals, earlier);
    for (size_t i = 0; i < nintervals; i++) {
        const struct interval *v = &intervals[i];
        if (v->end > end)
            busy += v->end - (v->begin > end ? v->begin : end);
        end = v->end > end ? v->end : end;
    }
    for (size_t i = 0; i < ntotals; i++)
        fprintf(f, "%.6f\t%ld\t%.0f\t%s\n", totals[i].seconds, totals[i].count, totals[i].bytes,
                totals[i].name);
    fprintf(f, "%.6f\t\t\tbusy\n", (double)busy * 1e-9);
    fprintf(f, "%.6f\t\t\tspan\n", nintervals ? (double)(end - intervals[0].begin) * 1e-9 : 0);
    fclose(f);
}

/* CUDA calls this function. */
int InitializeInjection(void);
int InitializeInjection(void)
{
    cuptiActivityRegisterCallbacks(give_buffer, take_buffer);
    cuptiActivityEnable(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL);
    cuptiActivityEnable(CUPTI_ACTIVITY_KIND_MEMCPY);
    cuptiActivityEnable(CUPTI_ACTIVITY_KIND_MEMSET);
    atexit(write_totals);
    return 1;
}
