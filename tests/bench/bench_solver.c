/*
 * Time of the calibration steps relative to OpenBLAS on the same core: accumulation of the Hessian
 * relative to ssyrk; its factorization, error compensation and rounds of coordinate descent
 * relative to an sgemm of the matrix's size. Uses the CPU time of one thread, so that other load
 * does not change the ratios.
 */
#include "kernels/kernels.h"
#include "pack/schemes/scheme.h"
#include "tests/bench/bench.h"

#include <cblas.h>
#include <string.h>

enum { N = 4096, K = 4096, TOKENS = 4096, RUNS = 3, ROUNDS = 6 /* as in quantize */ };

/* ---- yardsticks ----------------------------------------------------------------------------- */

static double sgemm_seconds(const float *a, const float *b, float *c)
{
    double best = INFINITY;
    for (int i = 0; i < RUNS; i++) {
        double t = bench_cpu_seconds();
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, N, N, N, 1, a, N, b, N, 0, c, N);
        best = fmin(best, bench_cpu_seconds() - t);
    }
    return best;
}

static double ssyrk_seconds(const float *x, float *c)
{
    double best = INFINITY;
    for (int i = 0; i < RUNS; i++) {
        double t = bench_cpu_seconds();
        cblas_ssyrk(CblasRowMajor, CblasLower, CblasTrans, K, TOKENS, 1, x, K, 0, c, K);
        best = fmin(best, bench_cpu_seconds() - t);
    }
    return best;
}

static double gram_seconds(double *h, const float *x, struct qt_backend *be)
{
    struct qt_err err;
    double best = INFINITY;
    for (int i = 0; i < RUNS; i++) {
        memset(h, 0, sizeof *h * K * K);
        double t = bench_cpu_seconds();
        bench_must(be->gram(be, h, x, TOKENS, K, &err), &err);
        best = fmin(best, bench_cpu_seconds() - t);
    }
    return best;
}

/* ---- solving -------------------------------------------------------------------------------- */

/* Seconds of one solve with this number of descent rounds. */
static double solve_seconds(struct qt_packed *p, const float *w, const struct qt_factor *f,
                            int rounds)
{
    const struct qt_solve_options opt = {.descent_rounds = rounds};
    struct qt_solve_report report;
    struct qt_err err;
    double t = bench_cpu_seconds();
    bench_must(p->spec.scheme->solve(&report, p, w, f, &opt, &err), &err);
    t = bench_cpu_seconds() - t;
    printf("    objective %.6g after compensation, %.6g after %d rounds of descent\n",
           ldexp(report.after_compensation, 2 * p->scale_exp2),
           ldexp(report.after_descent, 2 * p->scale_exp2), rounds);
    return t;
}

static void bench_scheme(const char *text, const float *w, const double *h, double sgemm)
{
    struct qt_matrix m = {w, QT_F32, N, K, "bench", "w"};
    struct qt_packed p;
    struct qt_spec spec;
    struct qt_factor f;
    struct qt_err err;
    printf("%s\n", text);
    bench_must(qt_spec_parse(&spec, text, &err), &err);
    bench_must(qt_packed_quantize(&p, &spec, &m, NULL, NULL, &err), &err);
    struct qt_factor_options opt = {.damp = 0.01, .group = qt_packed_group(&p)};
    double t = bench_cpu_seconds();
    bench_must(qt_factor_new(&f, h, K, &opt, &err), &err);
    double factor = bench_cpu_seconds() - t;
    float *rows; /* weights in the layout of qt_solve */
    bench_must(qt_array_new(&rows, (size_t)N * K, sizeof *rows, &err), &err);
    qt_matrix_rows(rows, &m, 0, N, -p.scale_exp2);
    double pass = solve_seconds(&p, rows, &f, 0), all = solve_seconds(&p, rows, &f, ROUNDS);
    printf("    factorization       %5.2f sgemm\n"
           "    compensation        %5.2f sgemm\n"
           "    both                %5.2f sgemm (target: 4 at most)\n"
           "    descent, %d rounds   %5.2f sgemm\n",
           factor / sgemm, pass / sgemm, (factor + pass) / sgemm, ROUNDS, (all - pass) / sgemm);
    qt_free(rows);
    qt_factor_free(&f);
    qt_packed_free(&p);
}

/* bench_solver [SPEC...] */
int main(int argc, char **argv)
{
    static const char *const usual[] = {"nf4:g=64", "nf3:g=128", "fp6", "mix24"};
    struct qt_backend *be;
    struct qt_err err;
    double *h;
    float *x = bench_random((size_t)TOKENS * K, 1), *w = bench_random((size_t)N * K, 1),
          *c = bench_random((size_t)N * K, 1);
    qt_threads_set(1);
    bench_must(qt_backend_cpu_open(&be, &err), &err); /* sets OpenBLAS to one thread */
    bench_must(qt_array_new(&h, (size_t)K * K, sizeof *h, &err), &err);
    double sgemm = sgemm_seconds(x, w, c), ssyrk = ssyrk_seconds(x, c);
    double gram = gram_seconds(h, x, be);
    printf("processor time of one thread\n");
    printf("sgemm %d^3: %.2f s, %.1f GFLOP/s\n", N, sgemm, 2e-9 * N * N * N / sgemm);
    printf("Hessian of %d tokens, %d channels: %.0f %% of the rate of ssyrk (target: 70)\n", TOKENS,
           K, 100 * ssyrk / gram);
    for (int i = 1; i < argc; i++)
        bench_scheme(argv[i], w, h, sgemm);
    for (size_t i = 0; argc == 1 && i < sizeof usual / sizeof *usual; i++)
        bench_scheme(usual[i], w, h, sgemm);
    be->close(be);
    qt_free(x);
    qt_free(w);
    qt_free(c);
    qt_free(h);
    return 0;
}
