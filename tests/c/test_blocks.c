/* test_blocks.c - attention, delta rule and MoE against a plain float64 reference, and the same
 * bits whatever the kernels, threads, chunks, cache and company in the step. */
#include "blocks.h"

enum { T = 70 /* one page and a bit */, N_TEXT = 3 };

/* ---- the reference: formulas of the model families, one token after the other, in double ---- */

static double sigmoid(double x) { return 1 / (1 + exp(-x)); }
static double silu(double x) { return x * sigmoid(x); }

/* y (rows) = W x (+ bias) */
static void mat_vec(const model *m, const mc_tensor *t, const mc_tensor *bias, const double *x,
                    double *y) {
    const double *w = values(m, t), *b = bias ? values(m, bias) : NULL;
    for (int64_t r = 0; r < t->rows; r++) {
        y[r] = b ? b[r] : 0;
        for (int64_t c = 0; c < t->cols; c++) y[r] += w[r * t->cols + c] * x[c];
    }
}

static void rms_norm(const model *m, const mc_norm *n, const double *x, double *y) {
    const double *w = values(m, &n->weight);
    double sum = 0;
    int64_t k = n->weight.cols;
    for (int64_t i = 0; i < k; i++) sum += x[i] * x[i];
    for (int64_t i = 0; i < k; i++)
        y[i] = x[i] / sqrt(sum / (double)k + (double)n->eps) * (w[i] + n->plus_one);
}

static void rotate(const mc_attn_desc *d, int64_t pos, double *x) {
    int half = d->rope_dim / 2;
    for (int i = 0; i < half; i++) {
        double angle = (double)pos / pow(d->rope_theta, 2.0 * i / d->rope_dim);
        double a = x[i], b = x[half + i];
        x[i] = a * cos(angle) - b * sin(angle);
        x[half + i] = b * cos(angle) + a * sin(angle);
    }
}

/* What the cache keeps of a value. */
static double stored(int dtype, double v) {
    if (dtype == MC_F32) return v;
    int e;
    double f = frexp(v, &e); /* 8 bits of significand, ties to even */
    return ldexp(nearbyint(ldexp(f, 8)), e - 8);
}

/* y = what the block adds to x (T, H). */
static void ref_attn(const model *m, const mc_attn_desc *d, int kv, const double *x, double *y) {
    static double k[T][KV_HEADS][D], v[T][KV_HEADS][D];
    double h[H], q[HEADS * D * 2], row[KV_HEADS * D], out[HEADS * D], p[T];
    for (int64_t t = 0; t < T; t++) {
        rms_norm(m, &d->norm, x + t * H, h);
        mat_vec(m, &d->k, &d->k_bias, h, row);
        memcpy(k[t], row, sizeof row);
        mat_vec(m, &d->v, &d->v_bias, h, row);
        memcpy(v[t], row, sizeof row);
        for (int g = 0; g < KV_HEADS; g++) {
            if (values(m, &d->k_norm.weight)) rms_norm(m, &d->k_norm, k[t][g], k[t][g]);
            rotate(d, t, k[t][g]);
            for (int i = 0; i < D; i++) {
                k[t][g][i] = stored(kv, k[t][g][i]);
                v[t][g][i] = stored(kv, v[t][g][i]);
            }
        }
        mat_vec(m, &d->q, &d->q_bias, h, q);
        for (int a = 0; a < HEADS; a++) {
            double *qa = q + a * D * (1 + d->gate), sum = 0;
            int g = a / (HEADS / KV_HEADS);
            if (values(m, &d->q_norm.weight)) rms_norm(m, &d->q_norm, qa, qa);
            rotate(d, t, qa);
            for (int64_t j = 0; j <= t; j++) {
                double dot = 0;
                for (int i = 0; i < D; i++) dot += qa[i] * k[j][g][i];
                sum += p[j] = exp(dot / sqrt(D));
            }
            for (int i = 0; i < D; i++) {
                double o = 0;
                for (int64_t j = 0; j <= t; j++) o += p[j] / sum * v[j][g][i];
                out[a * D + i] = d->gate ? o * sigmoid(qa[D + i]) : o;
            }
        }
        mat_vec(m, &d->o, &d->o_bias, out, y + t * H);
    }
}

static void unit(double *x, int n, double scale) {
    double sum = 1e-6;
    for (int i = 0; i < n; i++) sum += x[i] * x[i];
    for (int i = 0; i < n; i++) x[i] *= scale / sqrt(sum);
}

static void ref_delta(const model *m, const mc_delta_desc *d, const double *x, double *y) {
    static double u[T][CONV], S[V_HEADS][DK][DV];
    double h[H], z[V_HEADS * DV], a[V_HEADS], b[V_HEADS], c[CONV], o[V_HEADS * DV];
    const double *w = values(m, &d->conv), *a_log = values(m, &d->a_log),
                 *dt = values(m, &d->dt_bias);
    memset(S, 0, sizeof S);
    for (int64_t t = 0; t < T; t++) {
        rms_norm(m, &d->norm, x + t * H, h);
        mat_vec(m, &d->qkv, NULL, h, u[t]);
        mat_vec(m, &d->z, NULL, h, z);
        mat_vec(m, &d->a, NULL, h, a);
        mat_vec(m, &d->b, NULL, h, b);
        for (int i = 0; i < CONV; i++) {
            c[i] = 0;
            for (int j = 0; j < KERNEL; j++) {
                int64_t at = t - (KERNEL - 1) + j;
                if (at >= 0) c[i] += w[i * KERNEL + j] * u[at][i];
            }
            c[i] = silu(c[i]);
        }
        for (int i = 0; i < K_HEADS; i++) {
            unit(c + i * DK, DK, 1 / sqrt(DK));
            unit(c + (K_HEADS + i) * DK, DK, 1);
        }
        for (int n = 0; n < V_HEADS; n++) {
            const double *q = c + n / (V_HEADS / K_HEADS) * DK, *k = q + K_HEADS * DK,
                         *v = c + 2 * K_HEADS * DK + n * DV;
            double alpha = exp(-exp(a_log[n]) * log1p(exp(a[n] + dt[n]))), beta = sigmoid(b[n]);
            for (int j = 0; j < DV; j++) {
                double was = 0, *to = &o[n * DV + j];
                for (int i = 0; i < DK; i++) was += (S[n][i][j] *= alpha) * k[i];
                *to = 0;
                for (int i = 0; i < DK; i++) {
                    S[n][i][j] += k[i] * beta * (v[j] - was);
                    *to += S[n][i][j] * q[i];
                }
            }
            rms_norm(m, &d->out_norm, o + n * DV, o + n * DV);
        }
        for (int i = 0; i < V_HEADS * DV; i++) o[i] *= silu(z[i]);
        mat_vec(m, &d->out, NULL, o, y + t * H);
    }
}

/* y += p * expert(h) */
static void ref_expert(const model *m, const mc_expert *x, double p, const double *h, double *y) {
    double g[SHARED], u[SHARED], o[H];
    mat_vec(m, &x->gate, NULL, h, g);
    mat_vec(m, &x->up, NULL, h, u);
    for (int64_t i = 0; i < x->gate.rows; i++) g[i] = silu(g[i]) * u[i];
    mat_vec(m, &x->down, NULL, g, o);
    for (int i = 0; i < H; i++) y[i] += p * o[i];
}

static void ref_moe(const model *m, const mc_moe_desc *d, const mc_expert *experts, const double *x,
                    double *y, int32_t *routed) {
    double h[H], p[EXPERTS], gate = 0;
    memset(y, 0, sizeof *y * T * H);
    for (int64_t t = 0; t < T; t++) {
        double sum = 0, top = 0;
        int32_t *ids = routed + t * TOP_K;
        rms_norm(m, &d->norm, x + t * H, h);
        if (d->n_expert) mat_vec(m, &d->router, NULL, h, p);
        for (int i = 0; i < d->n_expert; i++) sum += p[i] = exp(p[i]);
        for (int i = 0; i < d->top_k; i++) {
            ids[i] = -1;
            for (int32_t n = 0; n < d->n_expert; n++) {
                bool taken = false;
                for (int j = 0; j < i; j++) taken |= ids[j] == n;
                if (!taken && (ids[i] < 0 || p[n] > p[ids[i]])) ids[i] = n;
            }
            top += p[ids[i]];
        }
        for (int i = 0; i < d->top_k; i++)
            ref_expert(m, &experts[ids[i]], p[ids[i]] / (d->renormalise ? top : sum), h, y + t * H);
        if (!d->shared_width) continue;
        if (values(m, &d->shared_gate)) mat_vec(m, &d->shared_gate, NULL, h, &gate);
        ref_expert(m, &d->shared, values(m, &d->shared_gate) ? sigmoid(gate) : 1, h, y + t * H);
    }
}

static void ref_block(const model *m, int block, int kv, const double *x, double *y,
                      int32_t *routed) {
    switch (block) {
    case 0:
        ref_attn(m, &m->attn[0], kv, x, y);
        break;
    case 1:
        ref_moe(m, &m->moe[0], m->expert[0], x, y, routed);
        break;
    case 2:
        ref_delta(m, &m->delta[0], x, y);
        break;
    case 3:
        ref_moe(m, &m->moe[1], m->expert[1], x, y, routed);
        break;
    case 4:
        ref_attn(m, &m->attn[1], kv, x, y);
        break;
    case 5:
        ref_moe(m, &m->moe[2], NULL, x, y, routed);
        break;
    default:
        ref_delta(m, &m->delta[1], x, y);
    }
}

/* ---- the engine against it ---- */

/* Each block gets the engine's own activations, so that errors do not add up over blocks. */
static void check_reference(const model *m, setting set) {
    world w = open_world(m, set);
    mc_session *s = new_session(&w);
    mc_error err = {0};
    float *x = test_alloc(T * H * 4);
    double *in = test_alloc(T * H * 8), *want = test_alloc(T * H * 8);
    int32_t routed[T * TOP_K], ids[T * TOP_K];
    int64_t n = T;
    embed(1, 0, T, x);
    CHECK(mc_step_begin(w.st, &s, 1, &err) == MC_OK, "%s", err.message);
    CHECK(mc_step_chunk(w.st, &n, &err) == MC_OK, "%s", err.message);
    for (int b = 0; b < N_BLOCK; b++) {
        double diff = 0, size = 0;
        bool moe = b == 1 || b == 3;
        for (int i = 0; i < T * H; i++) in[i] = (double)x[i];
        CHECK(block_forward(&w, w.st, b, x, routed, &err) == MC_OK, "%s", err.message);
        ref_block(m, b, set.kv, in, want, ids);
        for (int i = 0; i < T * H; i++) {
            double d = fabs((double)x[i] - in[i] - want[i]);
            diff = d > diff || isnan(d) ? d : diff;
            size = MCI_MAX(size, fabs(want[i]));
        }
        /* a value on the edge between two bf16 numbers may fall either way */
        double tol = set.kv == MC_BF16 && (b == 0 || b == 4) ? 2e-3 : 5e-6;
        CHECK(diff <= tol * size && size > 0.05, "%s, block %d: off by %g of %g", set.isa, b, diff,
              size);
        CHECK(!moe || !memcmp(ids, routed, sizeof ids), "%s, block %d: other experts", set.isa, b);
    }
    CHECK(mc_step_commit(w.st, &err) == MC_OK && mc_session_position(s) == T, "%s", err.message);
    mc_session_free(s);
    free(x);
    free(in);
    free(want);
    close_world(&w);
}

/* Ids from outside take the place of the router's choice and are checked. */
static void check_forced(const model *m, setting set) {
    world w = open_world(m, set);
    mc_session *s = new_session(&w);
    mc_error err = {0};
    float *in = test_alloc(T * H * 4), *x = test_alloc(T * H * 4), *y = test_alloc(T * H * 4);
    int32_t own[T * TOP_K], ids[T * TOP_K], got[T * TOP_K];
    int64_t n = T;
    embed(1, 0, T, in);
    CHECK(mc_step_begin(w.st, &s, 1, &err) == MC_OK, "%s", err.message);
    CHECK(mc_step_chunk(w.st, &n, &err) == MC_OK, "%s", err.message);
    memcpy(x, in, T * H * 4);
    CHECK(mc_moe_forward(w.moe[0], w.st, x, NULL, own, &err) == MC_OK, "%s", err.message);
    memcpy(y, in, T * H * 4);
    CHECK(mc_moe_forward(w.moe[0], w.st, y, own, got, &err) == MC_OK, "%s", err.message);
    CHECK(!memcmp(x, y, T * H * 4) && !memcmp(own, got, sizeof got), "its own choice, forced");
    for (int i = 0; i < T * TOP_K; i++) ids[i] = (i / TOP_K + i % TOP_K) % EXPERTS;
    memcpy(y, in, T * H * 4);
    CHECK(mc_moe_forward(w.moe[0], w.st, y, ids, got, &err) == MC_OK, "%s", err.message);
    CHECK(memcmp(x, y, T * H * 4) && !memcmp(ids, got, sizeof got), "another choice");
    ids[3] = EXPERTS;
    CHECK(mc_moe_forward(w.moe[0], w.st, y, ids, got, &err) == MC_ERANGE, "an id too large");
    ids[3] = -1;
    CHECK(mc_moe_forward(w.moe[0], w.st, y, ids, got, &err) == MC_ERANGE, "an id too small");
    ids[3] = ids[3 / TOP_K * TOP_K == 3 ? 4 : 3 / TOP_K * TOP_K];
    CHECK(mc_moe_forward(w.moe[0], w.st, y, ids, got, &err) == MC_EINVAL, "an id twice");
    mc_session_free(s);
    free(in);
    free(x);
    free(y);
    close_world(&w);
}

static void check_head(const model *m, setting set) {
    world w = open_world(m, set);
    mc_error err = {0};
    enum { N = 300 /* more than the head takes at once */ };
    float *x = test_alloc(CHUNK * H * 4), *y = test_alloc(N * VOCAB * 4),
          *y2 = test_alloc(CHUNK * VOCAB * 4), rows[3 * H];
    double in[H], h[H], want[VOCAB];
    int32_t pick[N], ids[3] = {VOCAB - 1, 0, 17};
    embed(5, 0, CHUNK, x);
    for (int i = 0; i < N; i++) pick[i] = i * 7 % CHUNK;
    CHECK(mc_head_forward(w.head, x, pick, N, y, &err) == MC_OK, "%s", err.message);
    for (int i = 0; i < N; i += 13) {
        for (int c = 0; c < H; c++) in[c] = (double)x[pick[i] * H + c];
        rms_norm(m, &m->final, in, h);
        mat_vec(m, &m->head, NULL, h, want);
        for (int c = 0; c < VOCAB; c++)
            CHECK(fabs((double)y[i * VOCAB + c] - want[c]) <= 1e-5, "token %d, logit %d", i, c);
    }
    CHECK(mc_linear_forward(w.out, x, CHUNK, y2, &err) == MC_OK, "%s", err.message);
    for (int c = 0; c < H; c++) in[c] = (double)x[c];
    mat_vec(m, &m->head, NULL, in, want);
    for (int c = 0; c < VOCAB; c++)
        CHECK(fabs((double)y2[c] - want[c]) <= 1e-4, "linear, row %d", c);
    CHECK(mc_linear_rows(w.table, ids, 3, rows, &err) == MC_OK, "%s", err.message);
    for (int i = 0; i < 3 * H; i++)
        CHECK((double)rows[i] == values(m, &m->table)[ids[i / H] * H + i % H], "table %d", i);
    pick[250] = CHUNK;
    CHECK(mc_head_forward(w.head, x, pick, N, y, &err) == MC_ERANGE, "%s", err.message);
    ids[1] = VOCAB;
    CHECK(mc_linear_rows(w.table, ids, 3, rows, &err) == MC_ERANGE, "%s", err.message);
    ids[1] = -1;
    CHECK(mc_linear_rows(w.table, ids, 3, rows, &err) == MC_ERANGE, "%s", err.message);
    CHECK(mc_linear_forward(w.table, x, 1, y, &err) == MC_EINVAL, "%s", err.message);
    free(x);
    free(y);
    free(y2);
    close_world(&w);
}

/* ---- the same bits ---- */

/* Activations of all tokens of N_TEXT texts after all blocks: text k has T - 9 k tokens. chunk 0:
 * a pattern of sizes, zero now and then. All texts in one step, or one after the other. */
static void run_texts(const model *m, setting set, int64_t chunk, bool together,
                      float y[N_TEXT][T * H]) {
    static const int64_t pattern[] = {1, 7, 0, 13, 1, 2, 17, 5};
    world w = open_world(m, set);
    mc_session *s[N_TEXT];
    mc_error err = {0};
    float *x = test_alloc(N_TEXT * T * H * 4);
    int64_t at[N_TEXT] = {0};
    for (int k = 0; k < N_TEXT; k++) s[k] = new_session(&w);
    for (int round = 0, left = 1; left; round++) {
        int64_t n[N_TEXT] = {0}, sum = 0;
        left = 0;
        for (int k = 0; k < N_TEXT; k++) {
            int64_t rest = T - 9 * k - at[k];
            left |= rest > 0;
            if (!together && sum) continue;
            n[k] = MCI_MIN(rest, chunk ? chunk : pattern[(round + k) % 8]);
            n[k] = MCI_MIN(n[k], CHUNK - sum);
            embed((uint64_t)k, at[k], n[k], x + sum * H);
            sum += n[k];
        }
        if (!sum) continue;
        int rc = mc_step_begin(w.st, s, N_TEXT, &err);
        if (rc == MC_OK) rc = mc_step_chunk(w.st, n, &err);
        if (rc == MC_OK) rc = all_blocks(&w, w.st, x, &err);
        if (rc == MC_OK) rc = mc_step_commit(w.st, &err);
        CHECK(rc == MC_OK, "%s", err.message);
        if (rc < 0) break;
        for (int64_t k = 0, from = 0; k < N_TEXT; k++) {
            memcpy(y[k] + at[k] * H, x + from * H, (size_t)(n[k] * H) * 4);
            from += n[k];
            at[k] += n[k];
        }
    }
    mc_stats q;
    CHECK(mc_engine_stats(w.e, &q, &err) == MC_OK && q.threads == set.threads &&
              (!set.isa || !strcmp(q.isa, set.isa)) && (q.threads_ran > 1 || set.threads == 1) &&
              (q.evictions > 0 || set.slots > 6),
          "%s, %d threads, %d ran, %lld evictions", q.isa, q.threads, q.threads_ran,
          (long long)q.evictions);
    for (int k = 0; k < N_TEXT; k++) mc_session_free(s[k]);
    free(x);
    close_world(&w);
}

static void check_bits(const model *m, int kv, int settings) {
    float (*want)[T * H] = test_alloc(N_TEXT * sizeof *want),
                      (*got)[T * H] = test_alloc(N_TEXT * sizeof *got);
    const bool avx2 = strstr(mc_engine_isas(), "avx2") != NULL;
    setting set = PLAIN;
    set.kv = kv;
    set.isa = "scalar";
    run_texts(m, set, CHUNK, false, want);
    for (int i = 0; i < settings; i++) {
        static const int64_t chunks[3] = {0, 1, CHUNK};
        set.isa = !avx2 || i % 4 == 0 ? "scalar" : i % 4 == 3 ? NULL : "avx2"; /* NULL: the best */
        set.threads = i % 2 ? 3 : 1;
        set.slots = i % 3 ? TOP_K + i % 3 : 2 * EXPERTS;
        set.io = i % 3;
        set.policy = MC_POLICY_AUTO + i % 3;
        set.ahead = i % 2 * TOP_K;
        memset(got, 0, N_TEXT * sizeof *got);
        run_texts(m, set, chunks[i / 2 % 3], i % 4 != 2, got);
        for (int k = 0; k < N_TEXT; k++)
            CHECK(same_bits(got[k], want[k], (T - 9 * k) * H), "setting %d, text %d", i, k);
    }
    free(want);
    free(got);
}

int main(int argc, char **argv) {
    char dir[4096];
    make_dir(argc, argv, dir, sizeof dir);
    alarm(300);
    model *m = make_model(dir);
    for (int i = 0; i < 8; i++) {
        setting set = PLAIN;
        set.isa = i % 2 ? "avx2" : "scalar";
        set.threads = i & 2 ? 3 : 1;
        set.kv = i & 4 ? MC_BF16 : MC_F32;
        if (!strstr(mc_engine_isas(), set.isa)) continue;
        check_reference(m, set);
        if (i < 4) check_head(m, set);
        if (i < 4) check_forced(m, set);
    }
    check_bits(m, MC_F32, 12);
    check_bits(m, MC_BF16, 5);
    free_model(m);
    rmdir(dir);
    return test_end();
}
