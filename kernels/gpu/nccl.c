/*
 * NCCL, loaded at run time: it moves device memory between the GPUs of ranks (base/comm.h), and
 * nothing else, because its sums depend on the number of ranks. The types and constants repeat its
 * C interface, which has been stable since NCCL 2.7.
 */
#include "base/base.h"
#include "kernels/gpu/internal.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { BYTES = 1 /* ncclUint8 */ };

struct unique_id {
    char bytes[128];
};

typedef int version_fn(int *version);
typedef int unique_id_fn(struct unique_id *id);
typedef int init_fn(void **comm, int size, struct unique_id id, int rank);
typedef int group_fn(void);
typedef int send_fn(const void *data, size_t count, int type, int to, void *comm, void *stream);
typedef int receive_fn(void *data, size_t count, int type, int from, void *comm, void *stream);
typedef int broadcast_fn(const void *from, void *to, size_t count, int type, int root, void *comm,
                         void *stream);
typedef const char *error_fn(int status);

struct gpu_nccl {
    void *library, *nccl;
    struct qt_comm *comm;
    cudaStream_t stream;
    unique_id_fn *unique_id;
    init_fn *init;
    group_fn *group_start, *group_end;
    send_fn *send;
    receive_fn *receive;
    broadcast_fn *broadcast;
    error_fn *error;
};

/* The ranks exchange these facts before NCCL starts, because NCCL hangs if they do not agree. */
struct member {
    int version; /* 0: NCCL is not installed */
    char host[64], pci[32];
};

/* Copies the result of dlsym, as ISO C does not define its conversion to a function pointer. */
static bool find(void *out, void *library, const char *name)
{
    void *symbol = dlsym(library, name);
    memcpy(out, &symbol, sizeof symbol);
    return symbol != NULL;
}

/* Returns the version, or 0. */
static int load(struct gpu_nccl *c)
{
    static const char *const libraries[] = {"libnccl.so.2", "libnccl.so"};
    version_fn *get_version;
    int version = 0;
    for (size_t i = 0; !c->library && i < sizeof libraries / sizeof *libraries; i++)
        c->library = dlopen(libraries[i], RTLD_NOW | RTLD_LOCAL);
    return c->library && find(&get_version, c->library, "ncclGetVersion") &&
                   find(&c->unique_id, c->library, "ncclGetUniqueId") &&
                   find(&c->init, c->library, "ncclCommInitRank") &&
                   find(&c->group_start, c->library, "ncclGroupStart") &&
                   find(&c->group_end, c->library, "ncclGroupEnd") &&
                   find(&c->send, c->library, "ncclSend") &&
                   find(&c->receive, c->library, "ncclRecv") &&
                   find(&c->broadcast, c->library, "ncclBroadcast") &&
                   find(&c->error, c->library, "ncclGetErrorString") && get_version(&version) == 0
               ? version
               : 0;
}

/* Returns why NCCL cannot connect these ranks, or NULL. */
static const char *fault_of(const struct member *m, size_t size)
{
    for (size_t i = 0; i < size; i++) {
        if (m[i].version == 0)
            return "libnccl.so is not installed";
        if (m[i].version != m[0].version)
            return "ranks have different versions of NCCL";
        for (size_t k = 0; k < i; k++)
            if (strcmp(m[i].host, m[k].host) == 0 && strcmp(m[i].pci, m[k].pci) == 0)
                return "ranks share a GPU";
    }
    return NULL;
}

/* Multicast over NVLink is left off: it serves sums, and its set-up fails on some machines. */
static int connect(struct gpu_nccl *c, bool *connected, struct qt_err *err)
{
    const size_t size = c->comm->size;
    struct unique_id id = {{0}};
    bool *all = NULL, mine;
    int rc;
    setenv("NCCL_NVLS_ENABLE", "0", 0);
    QT_TRY(qt_array_new(&all, size, sizeof *all, err));
    if (c->comm->rank == 0 && c->unique_id(&id) != 0)
        id = (struct unique_id){{0}};
    QT_TRY(qt_comm_broadcast(c->comm, &id, sizeof id, 0, err));
    mine = memcmp(&id, &(struct unique_id){{0}}, sizeof id) != 0 &&
           c->init(&c->nccl, (int)size, id, (int)c->comm->rank) == 0;
    QT_TRY(qt_comm_gather(c->comm, all, &mine, sizeof mine, err));
    *connected = true;
    for (size_t i = 0; i < size; i++)
        *connected = *connected && all[i];
done:
    qt_free(all);
    return rc;
}

int gpu_nccl_open(struct gpu_nccl **out, char *text, size_t size, struct qt_comm *comm, int device,
                  void *stream, struct qt_err *err)
{
    struct member mine = {0}, *all = NULL;
    struct gpu_nccl *c = NULL;
    const double start = qt_clock();
    const char *fault;
    bool connected = false;
    int rc;
    *out = NULL;
    QT_TRY(qt_array_new(&c, 1, sizeof *c, err));
    QT_TRY(qt_array_new(&all, comm->size, sizeof *all, err));
    c->comm = comm;
    c->stream = stream;
    mine.version = load(c);
    gethostname(mine.host, sizeof mine.host - 1);
    cudaDeviceGetPCIBusId(mine.pci, sizeof mine.pci, device);
    QT_TRY(qt_comm_gather(comm, all, &mine, sizeof mine, err));
    fault = fault_of(all, comm->size);
    if (!fault) {
        QT_TRY(connect(c, &connected, err));
        fault = connected ? NULL : "NCCL does not start";
    }
    if (fault)
        snprintf(text, size, "through host memory (%s)", fault);
    else
        snprintf(text, size, "by NCCL %d.%d.%d, connected in %.1f s", mine.version / 10000,
                 mine.version / 100 % 100, mine.version % 100, qt_clock() - start);
    if (connected) {
        *out = c;
        c = NULL;
    }
done:
    gpu_nccl_close(c);
    qt_free(all);
    return rc;
}

/* A connection is left to the end of the process: to end it here takes NCCL 0.4 s. */
void gpu_nccl_close(struct gpu_nccl *c)
{
    if (c && c->library && !c->nccl)
        dlclose(c->library);
    qt_free(c);
}

/* Waits for the data. The other ranks cannot go on if this one fails: the run ends. */
static int finish(struct gpu_nccl *c, int status, struct qt_err *err)
{
    const cudaError_t e = status == 0 ? cudaStreamSynchronize(c->stream) : cudaSuccess;
    if (status == 0 && e == cudaSuccess)
        return QT_OK;
    int rc = qt_fail(err, QT_E_INTERNAL, NULL, NULL, "NCCL: %s",
                     status ? c->error(status) : cudaGetErrorString(e));
    c->comm->end(c->comm, err);
    return rc;
}

int gpu_nccl_shift(struct gpu_nccl *c, const void *out, size_t out_bytes, size_t to, void *in,
                   size_t in_bytes, size_t from, struct qt_err *err)
{
    int status = c->group_start();
    if (status == 0 && out_bytes)
        status = c->send(out, out_bytes, BYTES, (int)to, c->nccl, c->stream);
    if (status == 0 && in_bytes)
        status = c->receive(in, in_bytes, BYTES, (int)from, c->nccl, c->stream);
    const int ended = c->group_end();
    return finish(c, status ? status : ended, err);
}

int gpu_nccl_broadcast(struct gpu_nccl *c, void *data, size_t bytes, size_t from,
                       struct qt_err *err)
{
    return finish(
        c, bytes ? c->broadcast(data, data, bytes, BYTES, (int)from, c->nccl, c->stream) : 0, err);
}
