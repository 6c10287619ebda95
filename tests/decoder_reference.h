/* The kernels of qtool_decoder.h in plain C on host memory, with sums in FP64: the reference of the
 * GPU tests, and the kernels of a simulated GPU. */
#ifndef QT_TESTS_DECODER_REFERENCE_H
#define QT_TESTS_DECODER_REFERENCE_H

#include "base/base.h"
#include "kernels/include/qtool_decoder.h"
#include "model/model.h"

#include <math.h>
#include <stdlib.h>

static inline double ref_half(const void *x, size_t i)
{
    return (double)qt_f16_to_f32(((const uint16_t *)x)[i]);
}

static inline void ref_store(void *x, size_t i, double v)
{
    v = v > 65504 ? 65504 : v < -65504 ? -65504 : v;
    ((uint16_t *)x)[i] = qt_f32_to_f16((float)v);
}

static inline double ref_at(const float *x, size_t i)
{
    return x ? (double)x[i] : 0;
}

/* Normalizes row[n] with weights from `first` on; statistics over all[count]. */
static inline void ref_norm(double *row, size_t n, const double *all, size_t count, size_t first,
                            const struct qtool_decoder_norm *norm)
{
    double mean = 0, square = 0;
    if (!norm->weight)
        return;
    for (size_t i = 0; norm->kind == QTOOL_DECODER_LAYER_NORM && i < count; i++)
        mean += all[i] / (double)count;
    for (size_t i = 0; i < count; i++)
        square += (all[i] - mean) * (all[i] - mean) / (double)count;
    const double inverse = 1 / sqrt(square + (double)norm->eps);
    for (size_t i = 0; i < n; i++)
        row[i] = (row[i] - mean) * inverse * (double)norm->weight[first + i] +
                 ref_at(norm->bias, first + i);
}

static inline void ref_embed(const struct qtool_decoder_embed *a)
{
    for (size_t t = 0; t < a->m; t++)
        for (size_t i = 0; i < a->n; i++) {
            double v = ref_half(a->table, (size_t)a->ids[t] * a->n + i) * (double)a->factor;
            if (a->positions)
                v += ref_half(a->positions,
                              (size_t)(a->position[t] + a->position_offset) * a->n + i);
            a->hidden[t * a->n + i] = (float)v;
        }
}

static inline void ref_add_norm(const struct qtool_decoder_add_norm *a)
{
    double *row = calloc(a->n, sizeof *row), *add = calloc(a->n, sizeof *add);
    for (size_t t = 0; t < a->m; t++) {
        const size_t at = (a->first + t * a->step) * a->n;
        for (size_t i = 0; i < a->n; i++)
            row[i] = (double)a->hidden[at + i];
        for (size_t j = 0; j < 2; j++) {
            if (!a->add[j].x)
                continue;
            for (size_t i = 0; i < a->n; i++)
                add[i] = ref_half(a->add[j].x, at + i) + ref_at(a->add[j].bias, i);
            ref_norm(add, a->n, add, a->n, 0, &a->add[j].norm);
            for (size_t i = 0; i < a->n; i++)
                row[i] += (double)a->factor * add[i];
        }
        ref_norm(row, a->n, row, a->n, 0, &a->after);
        for (size_t i = 0; a->scale != 0 && i < a->n; i++)
            row[i] *= (double)a->scale;
        for (size_t i = 0; i < a->n; i++)
            a->hidden[at + i] = (float)row[i];
        ref_norm(row, a->n, row, a->n, 0, &a->norm);
        for (size_t i = 0; a->out && i < a->n; i++)
            ref_store(a->out, t * a->n + i, row[i]);
    }
    free(row);
    free(add);
}

/* A head of queries (kind 0), keys (1) or values (2) of token t, in row[head_dim]. */
static inline void ref_head(double *row, const struct qtool_decoder_heads *a, int kind, size_t t,
                            size_t head)
{
    const size_t dim = a->head_dim, half = a->rotary / 2, heads = kind ? a->kv_heads : a->heads;
    const void *x = kind == 0 ? a->q : kind == 1 ? a->k : a->v;
    const size_t stride = kind == 0 ? a->q_stride : kind == 1 ? a->k_stride : a->v_stride;
    const float *bias = kind == 0 ? a->q_bias : kind == 1 ? a->k_bias : a->v_bias;
    const struct qtool_decoder_norm *norm = kind == 0   ? &a->q_norm
                                            : kind == 1 ? &a->k_norm
                                                        : &a->v_norm;
    const float *cos_table = kind == 0 ? a->q_cos : a->k_cos;
    const float *sin_table = kind == 0 ? a->q_sin : a->k_sin;
    double *all = calloc(heads * dim, sizeof *all);
    for (size_t i = 0; i < heads * dim; i++)
        all[i] = ref_half(x, t * stride + i) + ref_at(bias, i);
    for (size_t i = 0; a->clip > 0 && i < heads * dim; i++)
        all[i] = fmin(fmax(all[i], -(double)a->clip), (double)a->clip);
    memcpy(row, all + head * dim, dim * sizeof *row);
    if (kind == 2)
        ref_norm(row, dim, row, dim, 0, norm);
    else if (!a->norm_last)
        ref_norm(row, dim, a->norm_all_heads ? all : all + head * dim,
                 a->norm_all_heads ? heads * dim : dim, a->norm_all_heads ? head * dim : 0, norm);
    for (size_t i = 0; kind < 2 && cos_table && i < half; i++) {
        const size_t u = a->interleaved ? 2 * i : i, v = a->interleaved ? 2 * i + 1 : i + half;
        const size_t at = (size_t)a->position[t] * half + i;
        const double p = row[u], q = row[v], c = (double)cos_table[at], s = (double)sin_table[at];
        row[u] = p * c - q * s;
        row[v] = q * c + p * s;
    }
    if (kind < 2 && a->norm_last)
        ref_norm(row, dim, row, dim, 0, norm);
    free(all);
}

static inline void ref_heads(const struct qtool_decoder_heads *a)
{
    const size_t dim = a->head_dim;
    double *row = calloc(dim, sizeof *row);
    for (size_t t = 0; t < a->m; t++)
        for (int kind = 0; kind < 3; kind++)
            for (size_t h = 0; h < (kind ? a->kv_heads : a->heads); h++) {
                void *cache = kind == 1 ? a->cache_k : a->cache_v;
                void *rows = kind == 1 ? a->row_k : a->row_v;
                const size_t at = (size_t)a->sequence[t] * a->sequence_stride + h * a->head_stride +
                                  (size_t)a->position[t] * dim;
                ref_head(row, a, kind, t, h);
                for (size_t i = 0; i < dim; i++) {
                    if (kind == 0)
                        ref_store(a->q_out, (t * a->heads + h) * dim + i, row[i]);
                    if (kind && cache)
                        ref_store(cache, at + i, row[i]);
                    if (kind && rows)
                        ref_store(rows, (t * a->kv_heads + h) * dim + i, row[i]);
                }
            }
    free(row);
}

static inline double ref_slope_term(const struct qtool_decoder_attention *a, size_t head, size_t j)
{
    const float term = a->slopes ? a->slopes[head] * (float)j : 0;
    return a->slope_factor != 0
               ? (double)a->slope_factor * (double)qt_bf16_to_f32(qt_f32_to_bf16(term))
               : (double)term;
}

static inline void ref_attend(const struct qtool_decoder_attention *a, size_t t, size_t head,
                              double *p, double *out)
{
    const size_t dim = a->head_dim, end = (size_t)a->position[t] + 1;
    const size_t begin = a->window && end > a->window ? end - a->window : 0;
    const size_t base =
        t / a->queries * a->sequence_stride + head * a->kv_heads / a->heads * a->head_stride;
    const double cap = (double)a->softcap;
    double top = a->sinks ? (double)a->sinks[head] : -INFINITY, sum;
    for (size_t j = begin; j < end; j++) {
        double dot = 0;
        for (size_t i = 0; i < dim; i++)
            dot += ref_half(a->q, (t * a->heads + head) * dim + i) *
                   ref_half(a->k, base + j * dim + i);
        dot *= (double)a->scale;
        p[j] = (cap > 0 ? cap * tanh(dot / cap) : dot) + ref_slope_term(a, head, j);
        top = fmax(top, p[j]);
    }
    sum = a->sinks ? exp((double)a->sinks[head] - top) : 0;
    for (size_t i = 0; i < dim; i++)
        out[i] = 0;
    for (size_t j = begin; j < end; j++) {
        p[j] = exp(p[j] - top);
        sum += p[j];
        for (size_t i = 0; i < dim; i++)
            out[i] += p[j] * ref_half(a->v, base + j * dim + i);
    }
    for (size_t i = 0; i < dim; i++)
        out[i] /= sum;
}

static inline void ref_attention(const struct qtool_decoder_attention *a)
{
    const size_t m = a->sequences * a->queries;
    size_t most = 0;
    for (size_t t = 0; t < m; t++)
        most = qt_max_size(most, (size_t)a->position[t] + 1);
    double *p = calloc(most, sizeof *p), *out = calloc(a->head_dim, sizeof *out);
    for (size_t t = 0; t < m; t++)
        for (size_t h = 0; h < a->heads; h++) {
            ref_attend(a, t, h, p, out);
            for (size_t i = 0; i < a->head_dim; i++)
                ref_store(a->out, (t * a->heads + h) * a->head_dim + i, out[i]);
        }
    free(p);
    free(out);
}

static inline double ref_act(enum qtool_decoder_act act, double g, double u)
{
    switch (act) {
    case QTOOL_DECODER_SILU:
        return g / (1 + exp(-g)) * u;
    case QTOOL_DECODER_GELU_TANH:
        return .5 * g * (1 + tanh(sqrt(2 / acos(-1)) * (g + .044715 * g * g * g))) * u;
    case QTOOL_DECODER_GELU:
        return .5 * g * (1 + erf(g / sqrt(2))) * u;
    case QTOOL_DECODER_RELU:
        return fmax(g, 0) * u;
    case QTOOL_DECODER_RELU2:
        return fmax(g, 0) * fmax(g, 0) * u;
    case QTOOL_DECODER_SIGMOID:
        return 1 / (1 + exp(-g)) * u;
    default:
        g = fmin(g, 7);
        return g / (1 + exp(-1.702 * g)) * (fmin(fmax(u, -7), 7) + 1);
    }
}

static inline void ref_activation(const struct qtool_decoder_activation *a)
{
    for (size_t t = 0; t < a->m; t++)
        for (size_t i = 0; i < a->n; i++) {
            const double g = ref_half(a->gate, t * a->gate_stride + i) + ref_at(a->gate_bias, i);
            const double u =
                a->up ? ref_half(a->up, t * a->up_stride + i) + ref_at(a->up_bias, i) : 1;
            const double z =
                a->token_gate ? (double)a->token_gate[t * a->token_gate_stride] : INFINITY;
            ref_store(a->out, t * a->n + i, ref_act(a->act, g, u) / (1 + exp(-z)));
        }
}

static inline void ref_route(const struct qtool_decoder_route *a)
{
    double *s = calloc(2 * a->experts, sizeof *s), *rank = s + a->experts;
    for (size_t t = 0; t < a->m; t++) {
        int *ids = a->ids + t * a->top_k;
        float *weights = a->weights + t * a->top_k;
        double most = -INFINITY, sum = 0, chosen = 0;
        for (size_t e = 0; e < a->experts; e++) {
            s[e] = (double)a->logits[t * a->stride + e] + ref_at(a->bias, e);
            most = fmax(most, s[e]);
        }
        for (size_t e = 0; e < a->experts; e++)
            sum += s[e] = a->sigmoid ? 1 / (1 + exp(-s[e])) : exp(s[e] - most);
        for (size_t e = 0; e < a->experts; e++) {
            s[e] /= a->sigmoid ? 1 : sum;
            rank[e] = s[e] + ref_at(a->select_bias, e);
        }
        for (size_t c = 0; c < a->top_k; c++) {
            size_t best = 0;
            for (size_t e = 1; e < a->experts; e++)
                best = rank[e] > rank[best] ? e : best;
            rank[best] = -INFINITY;
            chosen += s[best];
            ids[c] = (int)best;
            weights[c] = (float)s[best];
        }
        for (size_t c = 0; c < a->top_k; c++)
            weights[c] = (float)((double)weights[c] * (double)a->scale /
                                 (a->normalize ? chosen + (double)a->eps : 1));
    }
    free(s);
}

static inline void ref_expert_product(const struct qtool_decoder_expert_product *a)
{
    for (size_t i = 0; i < a->m; i++)
        for (size_t row = 0; row < a->n; row++) {
            double sum = 0;
            for (size_t term = i * a->terms; term < (i + 1) * a->terms; term++) {
                const size_t w = ((size_t)a->ids[term] * a->n + row) * a->k;
                double dot = 0;
                for (size_t c = 0; c < a->k; c++)
                    dot += ref_half(a->w, w + c) * ref_half(a->x, term / a->share * a->k + c);
                sum += dot * (a->factor ? (double)a->factor[term] : 1);
            }
            ref_store(a->y, i * a->n + row, sum);
        }
}

static inline void ref_next(const struct qtool_decoder_next *a)
{
    for (size_t s = 0; s < a->sequences; s++) {
        float *logits = a->logits + s * a->vocab;
        size_t best = 0;
        for (size_t i = 0; i < a->vocab; i++) {
            const double cap = (double)a->softcap;
            const double product =
                a->half ? ref_half(a->half, s * a->vocab + i) : (double)logits[i];
            const double v = product * (double)a->factor + ref_at(a->bias, i);
            logits[i] = (float)(cap > 0 ? cap * tanh(v / cap) : v);
            if (a->fault && !isfinite(logits[i]))
                *a->fault = 1;
            best = logits[i] > logits[best] ? i : best;
        }
        if (!a->ids)
            continue;
        if (a->temperature > 0) {
            const struct qt_sampling how = {
                .temperature = (double)a->temperature, a->top_p, a->top_k, a->seed};
            uint32_t id = 0;
            qt_sample(&id, logits, a->vocab, &how, s, (uint64_t)a->position[s] + 1, NULL);
            best = id;
        }
        a->ids[s] = (int)best;
        a->position[s]++;
        a->length[s] = a->position[s] + 1;
        if (a->text && (size_t)a->position[s] < a->capacity)
            a->text[s * a->capacity + (size_t)a->position[s]] = (int)best;
    }
}

static inline void ref_decode(const struct qtool_decoder_op *op)
{
    switch (op->kind) {
    case QTOOL_DECODER_EMBED:
        ref_embed(&op->embed);
        break;
    case QTOOL_DECODER_ADD_NORM:
        ref_add_norm(&op->add_norm);
        break;
    case QTOOL_DECODER_HEADS:
        ref_heads(&op->heads);
        break;
    case QTOOL_DECODER_ATTENTION:
        ref_attention(&op->attention);
        break;
    case QTOOL_DECODER_ACTIVATION:
        ref_activation(&op->activation);
        break;
    case QTOOL_DECODER_ROUTE:
        ref_route(&op->route);
        break;
    case QTOOL_DECODER_EXPERT_PRODUCT:
        ref_expert_product(&op->expert_product);
        break;
    case QTOOL_DECODER_NEXT:
        ref_next(&op->next);
        break;
    }
}

#endif
