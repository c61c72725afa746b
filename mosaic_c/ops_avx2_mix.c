/* ops_avx2_mix.c - attention, gated delta rule and causal convolution with AVX2.
 *
 * Bits equal those of ops_ref.c: a sum runs down one lane in the order written there; what runs
 * side by side (heads, positions, channels, value columns) never mixes. */
#include "ops.h"

#if defined(__x86_64__)
#include "ops_avx2.h"

/* ---- attention ------------------------------------------------------------------------------- */

enum { HEADS = 4 }; /* query heads that share each load of K and V */

AVX2_INLINE __m256 load_kv(const uint8_t *p, int64_t c, int64_t left, const int dtype) {
    if (dtype == MC_F32) return load_up_to((const float *)(const void *)p + c, left);
    if (left >= 8) return load_bf16(p + 2 * c);
    uint8_t b[16] = {0};
    memcpy(b, p + 2 * c, (size_t)left * 2);
    return load_bf16(b);
}

/* score[h * ld + i] for nh heads and np positions i whose keys lie one after the other at k. */
AVX2_INLINE void scores_of(const float *q, const uint8_t *k, int64_t D, const int nh, const int np,
                           float scale, float *score, int64_t ld, const int dtype) {
    const int64_t row = D * (dtype == MC_F32 ? 4 : 2);
    __m256 tot[8];
    for (int i = 0; i < 8; i++) tot[i] = _mm256_setzero_ps();
    for (int64_t c0 = 0; c0 < D; c0 += MCI_BLOCK) {
        const int64_t end = MCI_MIN(D, c0 + MCI_BLOCK);
        __m256 acc[HEADS][2];
        for (int h = 0; h < nh; h++)
            for (int i = 0; i < np; i++) acc[h][i] = _mm256_setzero_ps();
        int64_t c = c0;
        for (; c + 8 <= end; c += 8) {
            __m256 kv[2];
            for (int i = 0; i < np; i++) kv[i] = load_kv(k + i * row, c, 8, dtype);
            for (int h = 0; h < nh; h++) {
                __m256 qv = _mm256_loadu_ps(q + h * D + c);
                for (int i = 0; i < np; i++) acc[h][i] = _mm256_fmadd_ps(qv, kv[i], acc[h][i]);
            }
        }
        if (c < end)
            for (int h = 0; h < nh; h++) {
                __m256 qv = load_negzero(q + h * D + c, end - c);
                for (int i = 0; i < np; i++)
                    acc[h][i] = _mm256_fmadd_ps(qv, load_kv(k + i * row, c, end - c, dtype),
                                                acc[h][i]);
            }
        for (int h = 0; h < nh; h++)
            for (int i = 0; i < np; i++) tot[h * 2 + i] = _mm256_add_ps(tot[h * 2 + i], acc[h][i]);
    }
    float s[8];
    _mm256_storeu_ps(s, _mm256_mul_ps(tree8x8(tot), _mm256_set1_ps(scale)));
    for (int h = 0; h < nh; h++)
        for (int i = 0; i < np; i++) score[h * ld + i] = s[h * 2 + i];
}

AVX2_INLINE void page_scores(const mci_attn_args *a, int64_t page, int64_t n, int64_t h,
                             const int nh, const int dtype) {
    const int64_t D = a->head_dim, row = D * (dtype == MC_F32 ? 4 : 2);
    const uint8_t *k = a->k[page];
    float *s = a->scores + h * a->n_pos + page * a->page_tokens;
    int64_t j = 0;
    for (; j + 2 <= n; j += 2)
        scores_of(a->q + h * D, k + j * row, D, nh, 2, a->scale, s + j, a->n_pos, dtype);
    if (j < n) scores_of(a->q + h * D, k + j * row, D, nh, 1, a->scale, s + j, a->n_pos, dtype);
}

/* out[h][c .. c+8*nv) += sum over the page's n positions of e_j * v_j, in order. left: channels
 * from c on, >= 8 for all vectors but the last. */
AVX2_INLINE void add_values(const float *e, int64_t ld, const uint8_t *v, int64_t n, int64_t D,
                            int64_t c, const int nh, const int nv, float *out, const int dtype) {
    const int64_t row = D * (dtype == MC_F32 ? 4 : 2), left = nv == 1 ? D - c : 8;
    __m256 o[HEADS][2];
    for (int h = 0; h < nh; h++)
        for (int i = 0; i < nv; i++) o[h][i] = load_up_to(out + h * D + c + 8 * i, left);
    for (int64_t j = 0; j < n; j++) {
        __m256 vv[2];
        for (int i = 0; i < nv; i++) vv[i] = load_kv(v + j * row, c + 8 * i, left, dtype);
        for (int h = 0; h < nh; h++) {
            __m256 ev = _mm256_broadcast_ss(e + h * ld + j);
            for (int i = 0; i < nv; i++) o[h][i] = _mm256_fmadd_ps(ev, vv[i], o[h][i]);
        }
    }
    for (int h = 0; h < nh; h++)
        for (int i = 0; i < nv; i++) store_up_to(out + h * D + c + 8 * i, o[h][i], left);
}

AVX2_INLINE void page_values(const mci_attn_args *a, int64_t page, int64_t n, int64_t h,
                             const int nh, const int dtype) {
    const int64_t D = a->head_dim;
    const float *e = a->scores + h * a->n_pos + page * a->page_tokens;
    float *out = a->out + h * D;
    int64_t c = 0;
    for (; c + 16 <= D; c += 16) add_values(e, a->n_pos, a->v[page], n, D, c, nh, 2, out, dtype);
    for (; c < D; c += 8) add_values(e, a->n_pos, a->v[page], n, D, c, nh, 1, out, dtype);
}

/* Page by page, so that a page read once serves every head of the group from L1. */
AVX2_INLINE void attn_of(const mci_attn_args *a, const int dtype) {
    const int64_t D = a->head_dim, G = a->group, P = a->page_tokens;
    for (int64_t j = 0; j < a->n_pos; j += P) {
        const int64_t n = MCI_MIN(P, a->n_pos - j);
        int64_t h = 0;
        for (; h + HEADS <= G; h += HEADS) page_scores(a, j / P, n, h, HEADS, dtype);
        for (; h < G; h++) page_scores(a, j / P, n, h, 1, dtype);
    }
    memset(a->out, 0, (size_t)(G * D) * sizeof *a->out);
    float inv[HEADS];
    for (int64_t h0 = 0; h0 < G; h0 += HEADS) {
        const int64_t nh = MCI_MIN(G - h0, (int64_t)HEADS);
        for (int64_t h = 0; h < nh; h++)
            inv[h] = 1.0f / mci_avx2_exp_sum(a->scores + (h0 + h) * a->n_pos, a->n_pos);
        for (int64_t j = 0; j < a->n_pos; j += P) {
            const int64_t n = MCI_MIN(P, a->n_pos - j);
            if (nh == HEADS)
                page_values(a, j / P, n, h0, HEADS, dtype);
            else
                for (int64_t h = 0; h < nh; h++) page_values(a, j / P, n, h0 + h, 1, dtype);
        }
        for (int64_t h = 0; h < nh; h++)
            for (int64_t c = 0; c < D; c++) a->out[(h0 + h) * D + c] *= inv[h];
    }
}

AVX2 void mci_avx2_attn(const mci_attn_args *a) {
    if (a->kv_dtype == MC_BF16)
        attn_of(a, MC_BF16);
    else
        attn_of(a, MC_F32);
}

/* ---- gated delta rule ------------------------------------------------------------------------ */

/* All tokens for the columns j .. j+8*nv (mask: of the last vector), so that this slice of the
 * state stays in L1. The first token reads s_in, the others what was written. */
AVX2_INLINE void delta_columns(const mci_delta_args *a, int64_t j, const int nv, __m256i mask) {
    const int64_t dk = a->dk, dv = a->dv;
    const float *from = a->s_in + j;
    float *to = a->s_out + j;
    for (int64_t t = 0; t < a->n_tok; t++, from = to) {
        const float *q = a->q + t * a->ld_qk, *key = a->k + t * a->ld_qk;
        const float *v = a->v + t * a->ld_v + j;
        float *out = a->o + t * a->ld_o + j;
        const __m256 alpha = _mm256_set1_ps(a->alpha[t * a->ld_ab]);
        const __m256 beta = _mm256_set1_ps(a->beta[t * a->ld_ab]);
        __m256 d[4], o[4];
        for (int i = 0; i < nv; i++) d[i] = o[i] = _mm256_setzero_ps();
        for (int64_t k = 0; k < dk; k++) {
            __m256 kk = _mm256_broadcast_ss(key + k);
            for (int i = 0; i < nv; i++) {
                __m256 s = nv == 1 ? _mm256_maskload_ps(from + k * dv, mask)
                                   : _mm256_loadu_ps(from + k * dv + 8 * i);
                d[i] = _mm256_fmadd_ps(_mm256_mul_ps(alpha, s), kk, d[i]);
            }
        }
        for (int i = 0; i < nv; i++) {
            __m256 vv = nv == 1 ? _mm256_maskload_ps(v, mask) : _mm256_loadu_ps(v + 8 * i);
            d[i] = _mm256_mul_ps(beta, _mm256_sub_ps(vv, d[i]));
        }
        for (int64_t k = 0; k < dk; k++) {
            __m256 kk = _mm256_broadcast_ss(key + k), qq = _mm256_broadcast_ss(q + k);
            for (int i = 0; i < nv; i++) {
                __m256 s = nv == 1 ? _mm256_maskload_ps(from + k * dv, mask)
                                   : _mm256_loadu_ps(from + k * dv + 8 * i);
                s = _mm256_fmadd_ps(kk, d[i], _mm256_mul_ps(alpha, s));
                if (nv == 1)
                    _mm256_maskstore_ps(to + k * dv, mask, s);
                else
                    _mm256_storeu_ps(to + k * dv + 8 * i, s);
                o[i] = _mm256_fmadd_ps(s, qq, o[i]);
            }
        }
        for (int i = 0; i < nv; i++) {
            if (nv == 1)
                _mm256_maskstore_ps(out, mask, o[i]);
            else
                _mm256_storeu_ps(out + 8 * i, o[i]);
        }
    }
}

AVX2 void mci_avx2_delta(const mci_delta_args *a) {
    if (a->n_tok == 0 && a->s_in != a->s_out)
        for (int64_t k = 0; k < a->dk; k++)
            memcpy(a->s_out + k * a->dv + a->j0, a->s_in + k * a->dv + a->j0,
                   (size_t)(a->j1 - a->j0) * sizeof(float));
    int64_t j = a->j0;
    for (; j + 32 <= a->j1; j += 32) delta_columns(a, j, 4, tail_mask(8));
    for (; j < a->j1; j += 8) delta_columns(a, j, 1, tail_mask(a->j1 - j));
}

/* ---- causal convolution ---------------------------------------------------------------------- */

enum { MAX_TAPS = 8 }; /* real models use 4; more goes to ops_ref.c, which gives the same bits */

/* tap[j] = weight j of the channels c .. c+n; w (C, kernel). */
AVX2_INLINE void load_taps(const float *w, int64_t c, int64_t n, int64_t kernel,
                           __m256 tap[MAX_TAPS]) {
    w += c * kernel;
    if (kernel == 4 && n == 8) {
        /*  loads  0 0 0 0 1 1 1 1 | 2 2 2 2 3 3 3 3 | ...   4 taps of channel 0, of channel 1
         *  a[i]   channels i and i + 4, one a half; then a 4x4 transpose in each half */
        __m256 v[4], a[4];
        for (int i = 0; i < 4; i++) v[i] = _mm256_loadu_ps(w + 8 * i);
        a[0] = _mm256_permute2f128_ps(v[0], v[2], 0x20);
        a[1] = _mm256_permute2f128_ps(v[0], v[2], 0x31);
        a[2] = _mm256_permute2f128_ps(v[1], v[3], 0x20);
        a[3] = _mm256_permute2f128_ps(v[1], v[3], 0x31);
        __m256 lo01 = _mm256_unpacklo_ps(a[0], a[1]), hi01 = _mm256_unpackhi_ps(a[0], a[1]);
        __m256 lo23 = _mm256_unpacklo_ps(a[2], a[3]), hi23 = _mm256_unpackhi_ps(a[2], a[3]);
        tap[0] = _mm256_shuffle_ps(lo01, lo23, 0x44);
        tap[1] = _mm256_shuffle_ps(lo01, lo23, 0xee);
        tap[2] = _mm256_shuffle_ps(hi01, hi23, 0x44);
        tap[3] = _mm256_shuffle_ps(hi01, hi23, 0xee);
        return;
    }
    for (int64_t j = 0; j < kernel; j++) {
        float g[8] = {0};
        for (int64_t l = 0; l < n; l++) g[l] = w[l * kernel + j];
        tap[j] = _mm256_loadu_ps(g);
    }
}

AVX2 void mci_avx2_conv(const float *x, int64_t n_tok, int64_t c_total, int64_t c0, int64_t c1,
                        const float *w, int64_t kernel, const float *state_in, float *state_out,
                        float *y) {
    if (kernel > MAX_TAPS) {
        mci_ops_ref.conv(x, n_tok, c_total, c0, c1, w, kernel, state_in, state_out, y);
        return;
    }
    const int64_t past = kernel - 1, C = c_total;
    for (int64_t c = c0; c < c1; c += 8) {
        const int64_t n = MCI_MIN(c1 - c, 8);
        __m256 tap[MAX_TAPS];
        load_taps(w, c, n, kernel, tap);
        for (int64_t t = 0; t < n_tok; t++) {
            __m256 s = _mm256_setzero_ps();
            for (int64_t j = 0; j < kernel; j++) {
                int64_t at = t - past + j;
                const float *u = at < 0 ? state_in + (at + past) * C : x + at * C;
                s = _mm256_fmadd_ps(tap[j], load_up_to(u + c, n), s);
            }
            store_up_to(y + t * C + c, silu8(s), n);
        }
        for (int64_t i = 0; i < past; i++) { /* reads ahead of what it writes: in place is fine */
            int64_t at = n_tok - past + i;
            const float *u = at < 0 ? state_in + (at + past) * C : x + at * C;
            store_up_to(state_out + i * C + c, load_up_to(u + c, n), n);
        }
    }
}
#endif
