/*
 * Sums over the blocks of the windows, in a fixed binary tree: the left half of n blocks is the
 * largest power of two below n. Ranks add up whole subtrees of their own blocks. Then every rank
 * takes one slice of all subtrees and adds up the rest of the tree there, and the slices go back to
 * all ranks. So no addition depends on the number of ranks.
 *
 * Where backend memory is short, a left half waits in host memory and is added to the right one:
 * the order of two summands makes no difference.
 */
#include "calib/calib.h"

#include <string.h>

enum {
    NODES = 2 * QT_SUM_BLOCKS,
    ALIGN = 64,       /* of arrays in packed form */
    PANEL_ROWS = 256, /* of a triangle on its way from or to the backend */
    ITEM = 1 << 16    /* bytes that one thread adds at a time */
};

/* A subtree, which one rank adds up. */
struct node {
    size_t first, end; /* blocks */
    size_t rank;
    /* In the rank itself: backend memory; those of its first node are the caller's. */
    void *array[QT_SUM_ARRAYS];
    char *packed; /* host: all arrays, or this rank's slice of them */
};

struct run {
    const struct qt_sums *s;
    size_t offset[QT_SUM_ARRAYS + 1]; /* of the arrays in packed form */
    struct node node[NODES];
    size_t nodes;
    size_t first, end; /* the slice of this rank */
    char *total;       /* packed: where this rank's first node was */
};

size_t qt_sums_count(size_t chunks)
{
    return qt_min_size(QT_SUM_BLOCKS, chunks);
}

size_t qt_sums_blocks(size_t *first, size_t blocks, const struct qt_comm *comm)
{
    return qt_comm_share(first, blocks, qt_comm_rank(comm), qt_comm_size(comm));
}

size_t qt_sums_block_start(size_t block, size_t blocks, size_t chunk, size_t tokens)
{
    return qt_min_size(block * qt_ceil_div(tokens, chunk) / blocks * chunk, tokens);
}

int qt_sums_join_rows(void *rows, size_t bytes, size_t blocks, size_t chunk, size_t tokens,
                      struct qt_comm *comm, struct qt_err *err)
{
    const size_t size = qt_comm_size(comm);
    size_t *end, first;
    int rc;
    QT_TRY(qt_array_new(&end, size, sizeof *end, err));
    for (size_t i = 0; i < size; i++)
        end[i] =
            qt_sums_block_start(qt_comm_share(&first, blocks, i, size), blocks, chunk, tokens) *
            bytes;
    rc = qt_comm_join(comm, rows, end, err);
done:
    qt_free(end);
    return rc;
}

static size_t half(size_t n)
{
    size_t left = 1;
    while (2 * left < n)
        left *= 2;
    return left;
}

static size_t element(const struct qt_sum *a)
{
    return a->f64 ? sizeof(double) : sizeof(float);
}

/* ---- the blocks of this rank ---------------------------------------------------------------- */

static void free_arrays(const struct qt_sums *s, void **array)
{
    for (size_t i = 0; i < s->count; i++) {
        s->be->free(s->be, array[i]);
        array[i] = NULL;
    }
}

static int new_arrays(void **array, const struct qt_sums *s, struct qt_err *err)
{
    int rc = QT_OK;
    for (size_t i = 0; i < s->count && rc == QT_OK; i++)
        rc = s->be->alloc(s->be, &array[i], s->sum[i].count * element(&s->sum[i]), err);
    return rc;
}

/* Adds to `count` elements of an array like sum[i]. */
static int add_elements(const struct qt_sums *s, size_t i, void *into, const void *from,
                        size_t count, struct qt_err *err)
{
    return s->sum[i].f64 ? s->be->add_f64(s->be, into, from, count, err)
                         : s->be->add(s->be, into, from, count, err);
}

/* Allocates arrays of zeros in memory apart from the host's, if they fit twice: the blocks need
 * memory, too. */
static bool fit_apart(void **array, const struct qt_sums *s)
{
    size_t bytes = 0;
    for (size_t i = 0; i < s->count; i++)
        bytes += s->sum[i].count * element(&s->sum[i]);
    const bool fit =
        (!s->be->room || s->be->room(s->be) / 2 > bytes) && new_arrays(array, s, NULL) == QT_OK;
    if (!fit)
        free_arrays(s, array);
    return fit;
}

/* Adds to an array what waited in host memory. */
static int add_from_host(const struct qt_sums *s, size_t i, char *into, const char *from,
                         struct qt_err *err)
{
    const size_t all = s->sum[i].count * element(&s->sum[i]);
    const size_t piece = qt_min_size((size_t)1 << 26, all);
    void *on = NULL;
    int rc = s->be->alloc(s->be, &on, piece, err);
    for (size_t at = 0; at < all && rc == QT_OK; at += piece) {
        const size_t bytes = qt_min_size(piece, all - at);
        rc = s->be->upload(s->be, on, from + at, bytes, err);
        if (rc == QT_OK)
            rc = add_elements(s, i, into + at, on, bytes / element(&s->sum[i]), err);
    }
    s->be->free(s->be, on);
    return rc;
}

static int add_blocks(const struct qt_sums *s, size_t first, size_t end, void *const *into,
                      struct qt_err *err);

/* Adds blocks [first, end) to the same arrays as those before them, which wait in host memory. */
static int add_after_host(const struct qt_sums *s, size_t first, size_t end, void *const *into,
                          struct qt_err *err)
{
    char *left[QT_SUM_ARRAYS] = {NULL};
    int rc = QT_OK;
    for (size_t i = 0; i < s->count; i++) {
        const size_t bytes = s->sum[i].count * element(&s->sum[i]);
        QT_TRY(qt_array_new(&left[i], bytes, 1, err));
        QT_TRY(s->be->download(s->be, left[i], into[i], bytes, err));
        QT_TRY(s->be->zero(s->be, into[i], bytes, err));
    }
    QT_TRY(add_blocks(s, first, end, into, err));
    for (size_t i = 0; i < s->count; i++)
        QT_TRY(add_from_host(s, i, into[i], left[i], err));
done:
    for (size_t i = 0; i < s->count; i++)
        qt_free(left[i]);
    return rc;
}

/* Adds blocks [first, end) to arrays of zeros. */
static int add_blocks(const struct qt_sums *s, size_t first, size_t end, void *const *into,
                      struct qt_err *err)
{
    void *right[QT_SUM_ARRAYS] = {NULL};
    int rc;
    if (end - first == 1)
        return s->block(s->ctx, first, into, err);
    const size_t middle = first + half(end - first);
    QT_TRY(add_blocks(s, first, middle, into, err));
    if (!s->be->host && !fit_apart(right, s))
        return add_after_host(s, middle, end, into, err);
    if (s->be->host)
        QT_TRY(new_arrays(right, s, err));
    QT_TRY(add_blocks(s, middle, end, right, err));
    for (size_t i = 0; i < s->count; i++)
        QT_TRY(add_elements(s, i, into[i], right[i], s->sum[i].count, err));
done:
    free_arrays(s, right);
    return rc;
}

/* ---- packed form ---------------------------------------------------------------------------- */

static size_t packed_bytes(const struct qt_sum *a)
{
    const size_t k = a->lower;
    return qt_round_up((k ? k * (k + 1) / 2 : a->count) * element(a), ALIGN);
}

struct panel {
    double *rows, *packed;
    size_t row, k;
    bool back;
};

static void panel_row(void *ctx, size_t i)
{
    const struct panel *p = ctx;
    const size_t row = p->row + i, bytes = (row + 1) * sizeof *p->rows;
    double *at = p->packed + row * (row + 1) / 2;
    memcpy(p->back ? p->rows + i * p->k : at, p->back ? at : p->rows + i * p->k, bytes);
}

/* Moves the lower triangle of the backend's m[k][k] to packed form, or back. */
static int move_triangle(struct qt_backend *be, double *m, size_t k, double *packed, bool back,
                         struct qt_err *err)
{
    struct panel p = {.packed = packed, .k = k, .back = back};
    int rc = qt_array_new(&p.rows, qt_min_size(PANEL_ROWS, k), k * sizeof *m, err);
    for (; p.row < k && rc == QT_OK; p.row += PANEL_ROWS) {
        const size_t n = qt_min_size(PANEL_ROWS, k - p.row), bytes = n * k * sizeof *m;
        if (!back)
            rc = be->download(be, p.rows, m + p.row * k, bytes, err);
        if (rc == QT_OK)
            qt_parallel_for(n, panel_row, &p);
        if (back && rc == QT_OK)
            rc = be->upload(be, m + p.row * k, p.rows, bytes, err);
    }
    qt_free(p.rows);
    return rc;
}

static int move_arrays(const struct run *r, void *const *array, char *packed, bool back,
                       struct qt_err *err)
{
    const struct qt_sums *s = r->s;
    int rc = QT_OK;
    for (size_t i = 0; i < s->count && rc == QT_OK; i++) {
        char *at = packed + r->offset[i];
        const size_t bytes = s->sum[i].count * element(&s->sum[i]);
        if (s->sum[i].lower)
            rc = move_triangle(s->be, array[i], s->sum[i].lower, (double *)(void *)at, back, err);
        else
            rc = back ? s->be->upload(s->be, array[i], at, bytes, err)
                      : s->be->download(s->be, at, array[i], bytes, err);
    }
    return rc;
}

struct add_job {
    const struct run *r;
    char *into;
    const char *from;
};

/* Adds bytes [item * ITEM, ...) of the slice. Arrays are aligned to ALIGN, which divides ITEM. */
static void add_item(void *ctx, size_t item)
{
    const struct add_job *job = ctx;
    const struct run *r = job->r;
    const size_t begin = r->first + item * ITEM, end = qt_min_size(begin + ITEM, r->end);
    for (size_t i = 0; i < r->s->count; i++) {
        const size_t from = qt_max_size(begin, r->offset[i]),
                     to = qt_min_size(end, r->offset[i + 1]);
        void *into = job->into + (from - r->first);
        const void *more = job->from + (from - r->first);
        for (size_t j = 0; from < to && r->s->sum[i].f64 && j < (to - from) / sizeof(double); j++)
            ((double *)into)[j] += ((const double *)more)[j];
        for (size_t j = 0; from < to && !r->s->sum[i].f64 && j < (to - from) / sizeof(float); j++)
            ((float *)into)[j] += ((const float *)more)[j];
    }
}

/* ---- ranks ---------------------------------------------------------------------------------- */

/* Bounds of a rank's slice. */
static size_t slice(size_t *first, const struct run *r, size_t rank)
{
    const size_t all = r->offset[r->s->count] / ALIGN;
    const size_t end = qt_comm_share(first, all, rank, r->s->comm->size);
    *first *= ALIGN;
    return end * ALIGN;
}

/* Lists the largest subtrees of blocks [first, end) that belong to one rank. */
static void list_nodes(struct run *r, size_t first, size_t end)
{
    const size_t size = r->s->comm->size;
    for (size_t rank = 0, from, to; rank < size; rank++) {
        to = qt_comm_share(&from, r->s->blocks, rank, size);
        if (from <= first && end <= to) {
            r->node[r->nodes++] = (struct node){.first = first, .end = end, .rank = rank};
            return;
        }
    }
    const size_t middle = first + half(end - first);
    list_nodes(r, first, middle);
    list_nodes(r, middle, end);
}

/* Waits until the backend has added up, so that this time does not count as moving data. */
static int wait_for(const struct qt_sums *s, struct qt_err *err)
{
    char byte;
    return s->be->host ? QT_OK : s->be->download(s->be, &byte, s->sum[0].data, sizeof byte, err);
}

/* move_arrays between backends and other ranks. */
static int stage_arrays(const struct run *r, void *const *array, char *packed, bool back,
                        struct qt_err *err)
{
    const double start = qt_clock();
    int rc = move_arrays(r, array, packed, back, err);
    r->s->comm->moved += qt_clock() - start;
    return rc;
}

/* Adds up the blocks of this rank; unless the backends are linked, brings the sums to the host. */
static int run_own(struct run *r, struct qt_err *err)
{
    const struct qt_sums *s = r->s;
    const size_t rank = s->comm->rank;
    bool first = true;
    int rc = QT_OK;
    for (size_t i = 0; i < r->nodes; i++) {
        struct node *node = &r->node[i];
        if (node->rank != rank)
            continue;
        for (size_t a = 0; first && a < s->count; a++)
            node->array[a] = s->sum[a].data;
        if (!first)
            QT_TRY(new_arrays(node->array, s, err));
        QT_TRY(add_blocks(s, node->first, node->end, node->array, err));
        QT_TRY(wait_for(s, err));
        if (!s->be->linked) {
            QT_TRY(stage_arrays(r, node->array, node->packed, false, err));
            if (!first)
                free_arrays(s, node->array);
        }
        first = false;
    }
done:
    return rc;
}

/* The nth node of a rank, or NULL. */
static struct node *nth_node(struct run *r, size_t rank, size_t n)
{
    for (size_t i = 0; i < r->nodes; i++)
        if (r->node[i].rank == rank && n-- == 0)
            return &r->node[i];
    return NULL;
}

/* Divides the host memory, which stays with the caller from one sum to the next: new pages are
 * slow. */
static int take_memory(struct run *r, struct qt_err *err)
{
    const size_t all = r->offset[r->s->count], part = r->end - r->first;
    size_t need = all;
    for (size_t i = 0; i < r->nodes; i++)
        need += r->node[i].rank == r->s->comm->rank ? all : part;
    int rc = qt_array_grow(&r->s->memory->p, &r->s->memory->bytes, need, 1, err);
    char *at = rc < 0 ? NULL : r->s->memory->p;
    for (size_t i = 0; at && i < r->nodes; i++) {
        r->node[i].packed = at;
        at += r->node[i].rank == r->s->comm->rank ? all : part;
    }
    /* A rank without blocks has no node of its own. */
    const struct node *first = nth_node(r, r->s->comm->rank, 0);
    r->total = first ? first->packed : at;
    return rc;
}

/* Every rank receives its slice of the nodes of all others. */
static void exchange_slices(struct run *r)
{
    struct qt_comm *c = r->s->comm;
    const size_t mine = r->end - r->first;
    for (size_t d = 1; d < c->size; d++) {
        const size_t to = (c->rank + d) % c->size, from = (c->rank + c->size - d) % c->size;
        size_t first;
        const size_t bytes = slice(&first, r, to) - first;
        for (size_t n = 0;; n++) {
            const struct node *out = nth_node(r, c->rank, n), *in = nth_node(r, from, n);
            if (!out && !in)
                break;
            qt_comm_shift(c, out ? out->packed + first : NULL, out ? bytes : 0, to,
                          in ? in->packed : NULL, in ? mine : 0, from);
        }
    }
}

/* Returns the slice of the sum of blocks [first, end). */
static char *combine(struct run *r, size_t first, size_t end)
{
    for (size_t i = 0; i < r->nodes; i++)
        if (r->node[i].first == first && r->node[i].end == end)
            return r->node[i].packed + (r->node[i].rank == r->s->comm->rank ? r->first : 0);
    const size_t middle = first + half(end - first);
    struct add_job job = {r, combine(r, first, middle), NULL};
    job.from = combine(r, middle, end);
    qt_parallel_for(qt_ceil_div(r->end - r->first, ITEM), add_item, &job);
    return job.into;
}

static void share_total(struct run *r)
{
    struct qt_comm *c = r->s->comm;
    for (size_t d = 1; d < c->size; d++) {
        const size_t to = (c->rank + d) % c->size, from = (c->rank + c->size - d) % c->size;
        size_t first;
        const size_t end = slice(&first, r, from);
        qt_comm_shift(c, r->total + r->first, r->end - r->first, to, r->total + first, end - first,
                      from);
    }
}

/* Sums up the nodes of all ranks in host memory. */
static int join_staged(struct run *r, void *const *array, struct qt_err *err)
{
    exchange_slices(r);
    memmove(r->total + r->first, combine(r, 0, r->s->blocks), r->end - r->first);
    share_total(r);
    return stage_arrays(r, array, r->total, true, err);
}

/* ---- ranks whose backends are linked -------------------------------------------------------- */

/* A part of array a of a node, or of the sum. */
struct part {
    char *at;
    size_t bytes, count;
};

/* The slice of `rank`. array: whole; NULL: only its size. */
static struct part part_of(void *array, const struct run *r, size_t a, size_t rank)
{
    const struct qt_sum *sum = &r->s->sum[a];
    size_t first;
    const size_t end = qt_comm_share(&first, sum->count, rank, r->s->comm->size);
    return (struct part){array ? (char *)array + first * element(sum) : NULL,
                         (end - first) * element(sum), end - first};
}

/* Room for this rank's slices of the nodes of others. */
static int prepare_parts(struct run *r, struct qt_err *err)
{
    const struct qt_sums *s = r->s;
    int rc = QT_OK;
    for (size_t i = 0; i < r->nodes; i++)
        for (size_t a = 0; a < s->count && r->node[i].rank != s->comm->rank && rc == QT_OK; a++)
            rc = s->be->alloc(s->be, &r->node[i].array[a], part_of(NULL, r, a, s->comm->rank).bytes,
                              err);
    return rc;
}

/* Receives this rank's slices of the nodes of all others. */
static int exchange_parts(struct run *r, struct qt_err *err)
{
    struct qt_comm *c = r->s->comm;
    int rc = QT_OK;
    for (size_t d = 1; d < c->size; d++)
        for (size_t n = 0;; n++) {
            const size_t to = (c->rank + d) % c->size, from = (c->rank + c->size - d) % c->size;
            const struct node *out = nth_node(r, c->rank, n), *in = nth_node(r, from, n);
            if (!out && !in)
                break;
            for (size_t a = 0; a < r->s->count; a++) {
                const struct part send = part_of(out ? out->array[a] : NULL, r, a, to);
                const size_t bytes = part_of(NULL, r, a, c->rank).bytes;
                QT_TRY(qt_comm_shift_on(c, r->s->be, send.at, out ? send.bytes : 0, to,
                                        in ? in->array[a] : NULL, in ? bytes : 0, from, err));
            }
        }
done:
    return rc;
}

/* *out: the slice of array a of the sum of blocks [first, end). */
static int combine_parts(void **out, struct run *r, size_t a, size_t first, size_t end,
                         struct qt_err *err)
{
    const struct qt_sums *s = r->s;
    const struct part mine = part_of(NULL, r, a, s->comm->rank);
    void *right;
    int rc = QT_OK;
    for (size_t i = 0; i < r->nodes; i++)
        if (r->node[i].first == first && r->node[i].end == end) {
            *out = r->node[i].rank == s->comm->rank
                       ? part_of(r->node[i].array[a], r, a, s->comm->rank).at
                       : r->node[i].array[a];
            return QT_OK;
        }
    const size_t middle = first + half(end - first);
    QT_TRY(combine_parts(out, r, a, first, middle, err));
    QT_TRY(combine_parts(&right, r, a, middle, end, err));
    rc = add_elements(s, a, *out, right, mine.count, err);
done:
    return rc;
}

/* Sums up the nodes of all ranks in backend memory. */
static int join_linked(struct run *r, void *const *array, struct qt_err *err)
{
    struct qt_comm *c = r->s->comm;
    void *sum;
    int rc;
    QT_TRY(exchange_parts(r, err));
    for (size_t a = 0; a < r->s->count; a++) {
        const struct part mine = part_of(array[a], r, a, c->rank);
        QT_TRY(combine_parts(&sum, r, a, 0, r->s->blocks, err));
        if (sum != mine.at)
            QT_TRY(r->s->be->copy(r->s->be, mine.at, sum, mine.bytes, err));
        for (size_t d = 1; d < c->size; d++) {
            const size_t to = (c->rank + d) % c->size, from = (c->rank + c->size - d) % c->size;
            const struct part in = part_of(array[a], r, a, from);
            QT_TRY(
                qt_comm_shift_on(c, r->s->be, mine.at, mine.bytes, to, in.at, in.bytes, from, err));
        }
    }
done:
    return rc;
}

static int run_ranks(const struct qt_sums *s, struct qt_err *err)
{
    struct run r = {.s = s};
    void *array[QT_SUM_ARRAYS] = {NULL};
    int rc;
    for (size_t i = 0; i < s->count; i++) {
        r.offset[i + 1] = r.offset[i] + packed_bytes(&s->sum[i]);
        array[i] = s->sum[i].data;
    }
    r.end = slice(&r.first, &r, s->comm->rank);
    list_nodes(&r, 0, s->blocks);
    rc = s->be->linked ? QT_OK : take_memory(&r, err);
    if (rc == QT_OK)
        rc = run_own(&r, err);
    if (rc == QT_OK && s->be->linked)
        rc = prepare_parts(&r, err);
    QT_TRY(qt_comm_meet(s->comm, rc, err));
    QT_TRY(s->be->linked ? join_linked(&r, array, err) : join_staged(&r, array, err));
done:
    for (size_t i = 0; i < r.nodes; i++)
        if (r.node[i].array[0] != array[0])
            free_arrays(s, r.node[i].array);
    return rc;
}

int qt_sums_link(struct qt_backend *be, struct qt_comm *comm, const struct qt_log *log,
                 struct qt_err *err)
{
    char how[160];
    if (qt_comm_size(comm) == 1 || !be->link || be->linked)
        return QT_OK;
    int rc = be->link(be, comm, how, sizeof how, err);
    if (rc == QT_OK)
        qt_log_message(log, QT_LOG_INFO, "%zu ranks: GPU memory is moved %s", comm->size, how);
    return rc;
}

int qt_sums_run(const struct qt_sums *s, struct qt_err *err)
{
    void *array[QT_SUM_ARRAYS];
    if (qt_comm_size(s->comm) > 1)
        return run_ranks(s, err);
    for (size_t i = 0; i < s->count; i++)
        array[i] = s->sum[i].data;
    return add_blocks(s, 0, s->blocks, array, err);
}
