/* Attention of a CPU without gradients: products by MKL, everything between them in one pass.

   sigmoid   o_m = sum_n sigma(t q.k + b_m) v_n
   ssmax     o_m = sum_n exp(c_m t q.k - l_m) v_n      by a running maximum, in base 2

   A tile is ROWS queries of one head by KEYS keys. Weights are float, and rounded to the inputs'
   type for their product with the values. */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { ROWS = 128, KEYS = 512 };
#define LOG2E 1.4426950408889634f

typedef void Gemm(const char *, const char *, const int64_t *, const int64_t *, const int64_t *,
                  const float *, const void *, const int64_t *, const void *, const int64_t *,
                  const float *, float *, const int64_t *);

typedef struct {
    const void *data;
    int64_t batch, head, row; /* strides in elements; a row is contiguous */
} Matrix;

typedef struct {
    int64_t B, H, G, M, N, D, V, is_ssmax, is_bf16, threads;
    Matrix query, key, value, output;
    const float *row;         /* [B, H, M] */
    const int32_t *intervals; /* [B, M, 2] */
    float *log_sum_exp;       /* [B, H, M], of ssmax */
    float scaling;
    void *gemm;                    /* Fortran's sgemm, or gemm_bf16bf16f32 */
    void *set_threads;             /* MKL_Set_Num_Threads_Local */
} Call;

/* 2^x within 2e-7 of itself, of x cut to [-126, 127]; NaN stays NaN. */
static inline float power(float x) {
    x = x < -126.0f ? -126.0f : x;
    x = x > 127.0f ? 127.0f : x;
    float shifted = x + 12582912.0f; /* 1.5 * 2^23: rounds to an integer in the low bits */
    float r = x - (shifted - 12582912.0f), p = 1.525273380e-5f;
    p = p * r + 1.540353040e-4f;
    p = p * r + 1.333355814e-3f;
    p = p * r + 9.618129107e-3f;
    p = p * r + 5.550410866e-2f;
    p = p * r + 2.402265069e-1f;
    p = p * r + 6.931471806e-1f;
    p = p * r + 1.0f;
    int32_t bits, scale;
    memcpy(&bits, &shifted, 4);
    scale = (int32_t)(((uint32_t)bits + 127u) << 23);
    float power_of_two;
    memcpy(&power_of_two, &scale, 4);
    return p * power_of_two;
}

static inline uint16_t bfloat16(float x) { /* to the nearest, ties to even */
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return x != x ? 0x7fc0 : (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static const char *at(const Matrix *x, int64_t b, int64_t h, int64_t m, int64_t size) {
    return (const char *)x->data + (b * x->batch + h * x->head + m * x->row) * size;
}

/* Weights of one query on the keys [from, to) of a tile of `count`, in place of its scores. */
static void weigh(float *s, int64_t from, int64_t to, int64_t count, float factor, float offset) {
    for (int64_t n = 0; n < from; n++) s[n] = 0.0f;
    for (int64_t n = from; n < to; n++) s[n] = 1.0f / (1.0f + power(-(s[n] * factor + offset)));
    for (int64_t n = to; n < count; n++) s[n] = 0.0f;
}

/* The same of ssmax, relative to the largest logit so far, whose sums then shrink. */
static void weigh_relative(float *s, int64_t from, int64_t to, int64_t count, float factor,
                           float *largest, float *total, float *o, int64_t V) {
    float top = *largest, sum = 0.0f;
#pragma omp simd reduction(max : top)
    for (int64_t n = from; n < to; n++) {
        float x = s[n] *= factor;
        top = x > top ? x : top;
    }
    if (to > from) {
        float shrink = *largest == -INFINITY ? 0.0f : power(*largest - top);
#pragma omp simd reduction(+ : sum)
        for (int64_t n = from; n < to; n++) sum += s[n] = power(s[n] - top);
        *total = *total * shrink + sum, *largest = top;
        if (shrink != 1.0f)
            for (int64_t d = 0; d < V; d++) o[d] *= shrink;
    }
    for (int64_t n = 0; n < from; n++) s[n] = 0.0f;
    for (int64_t n = to; n < count; n++) s[n] = 0.0f;
}

static void block(const Call *c, int64_t b, int64_t h, int64_t start, float *s, uint16_t *narrow,
                  float *o) {
    int64_t rows = c->M - start < ROWS ? c->M - start : ROWS, g = h / (c->H / c->G);
    int64_t size = c->is_bf16 ? 2 : 4, first = c->N, last = 0;
    const float *row = c->row + (b * c->H + h) * c->M + start, one = 1.0f;
    const int32_t *ends = c->intervals + (b * c->M + start) * 2;
    float largest[ROWS], total[ROWS];
    for (int64_t m = 0; m < rows; m++) {
        if (ends[2 * m] < ends[2 * m + 1]) {
            first = ends[2 * m] < first ? ends[2 * m] : first;
            last = ends[2 * m + 1] > last ? ends[2 * m + 1] : last;
        }
        largest[m] = -INFINITY, total[m] = 0.0f;
    }
    memset(o, 0, rows * c->V * sizeof(float));
    for (int64_t n = first; n < last; n += KEYS) {
        int64_t count = last - n < KEYS ? last - n : KEYS;
        const float zero = 0.0f;
        ((Gemm *)c->gemm)("T", "N", &count, &rows, &c->D, &one, at(&c->key, b, g, n, size),
                          &c->key.row, at(&c->query, b, h, start, size), &c->query.row, &zero, s,
                          &count);
        for (int64_t m = 0; m < rows; m++) {
            int64_t from = ends[2 * m] - n, to = ends[2 * m + 1] - n;
            from = from < 0 ? 0 : from > count ? count : from;
            to = to < from ? from : to > count ? count : to;
            if (c->is_ssmax)
                weigh_relative(s + m * count, from, to, count, row[m] * c->scaling * LOG2E,
                               largest + m, total + m, o + m * c->V, c->V);
            else
                weigh(s + m * count, from, to, count, c->scaling * LOG2E, row[m] * LOG2E);
        }
        const void *weights = s;
        if (c->is_bf16) {
            for (int64_t i = 0; i < rows * count; i++) narrow[i] = bfloat16(s[i]);
            weights = narrow;
        }
        ((Gemm *)c->gemm)("N", "N", &c->V, &rows, &count, &one, at(&c->value, b, g, n, size),
                          &c->value.row, weights, &count, &one, o, &c->V);
    }
    for (int64_t m = 0; m < rows; m++) {
        if (c->is_ssmax)
            c->log_sum_exp[(b * c->H + h) * c->M + start + m] = (largest[m] + log2f(total[m])) / LOG2E;
        void *to = (void *)at(&c->output, b, h, start + m, size);
        float scale = !c->is_ssmax ? 1.0f : total[m] > 0.0f || total[m] != total[m] ? 1.0f / total[m] : 0.0f;
        for (int64_t d = 0; d < c->V; d++) {
            float x = o[m * c->V + d] * scale;
            if (c->is_bf16) ((uint16_t *)to)[d] = bfloat16(x);
            else ((float *)to)[d] = x;
        }
    }
}

/* 0, or 1 if there is no memory for a tile. */
int attention(const Call *c) {
    int64_t blocks = (c->M + ROWS - 1) / ROWS, all = c->B * c->H * blocks;
    int failed = 0;
#pragma omp parallel num_threads(c->threads)
    {
        ((int (*)(int))c->set_threads)(1); /* each thread has a block of its own */
        float *s = malloc((ROWS * KEYS + ROWS * c->V) * sizeof(float));
        uint16_t *narrow = malloc(ROWS * KEYS * sizeof(uint16_t));
        if (!s || !narrow) failed = 1;
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < all; i++) { /* late blocks first: causal masks give them the most */
            int64_t j = all - 1 - i;
            int64_t start = blocks - 1 - i / (c->B * c->H), head = j % (c->B * c->H);
            if (!failed) block(c, head / c->H, head % c->H, start * ROWS, s, narrow, s + ROWS * KEYS);
        }
        free(s), free(narrow);
        ((int (*)(int))c->set_threads)(0);
    }
    return failed;
}
