/* test_base.c - errors, checked sizes, accounted memory, CPU words, decoding of single values. */
#include "base.h"
#include "cpu.h"
#include "crc.h"
#include "dtype.h"
#include "pool.h"
#include "test.h"

#include <math.h>
#include <pthread.h>

static void errors(void) {
    CHECK(!strcmp(mc_status_name(MC_EIO), "MC_EIO"), "%s", mc_status_name(MC_EIO));
    CHECK(!strcmp(mc_status_name(7), "MC_OK"), "a positive count is success");
    for (int c = -20; c <= 1; c++) {
        CHECK(mc_status_name(c) && mc_status_text(c) && *mc_status_text(c), "code %d", c);
        bool known = c >= MC_ESYS;
        CHECK(known == (strcmp(mc_status_name(c), "MC_E?") != 0), "code %d", c);
    }
    mc_error e;
    CHECK(mci_fail(&e, MC_EIO, 5, "%s: got %d", "a\nb", 3) == MC_EIO, "code returned");
    CHECK(e.code == MC_EIO && e.sys == 5 && !strcmp(e.message, "a b: got 3"), "%s", e.message);
    CHECK(mci_fail(NULL, MC_ERANGE, 0, "x") == MC_ERANGE, "NULL is allowed");
    char big[1500];
    for (size_t cut = 0; cut < 4; cut++) { /* two-byte characters around the end of the field */
        memset(big, 'a', cut);
        for (size_t i = cut; i + 2 < sizeof big; i += 2) memcpy(big + i, "\xc3\xa4", 3);
        mci_fail(&e, MC_EIO, 0, "%s", big);
        size_t n = strlen(e.message);
        CHECK(n < sizeof e.message && n > sizeof e.message - 6, "%zu", n);
        CHECK(!strcmp(e.message + n - 3, "..."), "%s", e.message + n - 3);
        CHECK((n - 3 - cut) % 2 == 0, "no half character at %zu", n);
    }
    memset(big, 'b', sizeof big);
    big[sizeof e.message - 1] = 0; /* fits exactly */
    mci_fail(&e, MC_EIO, 0, "%s", big);
    CHECK(!strcmp(e.message, big), "a message that fits is whole");
}

static void sizes(void) {
    int64_t v;
    CHECK(mci_mul(3, 5, &v) && v == 15, "%lld", (long long)v);
    CHECK(mci_mul(0, INT64_MAX, &v) && v == 0, "%lld", (long long)v);
    CHECK(!mci_mul(INT64_C(1) << 32, INT64_C(1) << 31, &v), "overflow");
    CHECK(!mci_mul(-1, 5, &v) && !mci_mul(5, -1, &v), "negative");
    CHECK(mci_add(INT64_MAX - 1, 1, &v) && v == INT64_MAX, "%lld", (long long)v);
    CHECK(!mci_add(INT64_MAX, 1, &v) && !mci_add(-1, 1, &v), "overflow, negative");
    CHECK(mci_round_up(0, 64) == 0 && mci_round_up(1, 64) == 64 && mci_round_up(64, 64) == 64 &&
              mci_round_up(65, 4096) == 4096,
          "round up");
}

static bool clean(const mci_mem *m, int64_t want) {
    int64_t sum = 0;
    for (int k = 0; k < MC_MEM_KINDS; k++) sum += m->now[k];
    return sum == want && m->total == want;
}

static void memory(void) {
    mci_mem m = {.budget = 8 << 20};
    mc_error e;
    void *p, *q;
    static const int64_t sizes[] = {1, 63, 64, 65, 4096, (1 << 20) - 1, 1 << 20, (3 << 20) + 5};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        int64_t n = sizes[i];
        CHECK(mci_alloc(&m, MC_MEM_CACHE, n, "x", &p, &e) == MC_OK, "%s", e.message);
        CHECK((uintptr_t)p % (n < 1 << 20 ? MCI_ALIGN : 2 << 20) == 0, "%p for %lld", p,
              (long long)n);
        uint8_t any = 0;
        for (int64_t k = 0; k < n; k++) any |= ((uint8_t *)p)[k];
        CHECK(any == 0, "zeroed");
        memset(p, 1, (size_t)n);
        CHECK(clean(&m, n) && m.now[MC_MEM_CACHE] == n, "counted");
        mci_release(&m, MC_MEM_CACHE, p, n);
        CHECK(clean(&m, 0), "given back");
    }
    CHECK(m.peak[MC_MEM_CACHE] == (3 << 20) + 5 && m.peak[MC_MEM_STATE] == 0, "peak");

    CHECK(mci_alloc(&m, MC_MEM_STATE, 0, "x", &p, &e) == MC_OK && !p, "nothing for nothing");
    mci_release(&m, MC_MEM_STATE, NULL, 77);
    CHECK(clean(&m, 0), "NULL counts nothing");

    CHECK(mci_alloc(&m, MC_MEM_CACHE, 5 << 20, "half", &p, &e) == MC_OK, "%s", e.message);
    q = &m;
    CHECK(mci_alloc(&m, MC_MEM_STATE, (3 << 20) + 1, "KV pages", &q, &e) == MC_EBUDGET && !q,
          "over by one");
    CHECK(!strcmp(e.message, "KV pages: 3145729 bytes asked with 5242880 in use would pass the "
                             "budget of 8388608"),
          "%s", e.message);
    CHECK(clean(&m, 5 << 20) && m.peak[MC_MEM_STATE] == 0, "a refusal leaves no trace");
    CHECK(mci_alloc(&m, MC_MEM_STATE, 3 << 20, "rest", &q, &e) == MC_OK, "%s", e.message);
    mci_release(&m, MC_MEM_STATE, q, 3 << 20);
    mci_release(&m, MC_MEM_CACHE, p, 5 << 20);

    for (int64_t n = -1; n >= -2; n--)
        CHECK(mci_alloc(&m, 0, n, "x", &p, &e) == MC_EINVAL && !p, "negative");
    CHECK(mci_alloc(&m, MC_MEM_KINDS, 1, "x", &p, &e) == MC_EINVAL, "kind");
    m.budget = 0;
    CHECK(mci_alloc(&m, 0, INT64_MAX / 4, "sky", &p, &e) == MC_ENOMEM && !p, "too much");
    CHECK(mci_alloc(&m, 0, INT64_MAX, "sky", &p, &e) == MC_EINVAL, "beyond rounding");
    CHECK(clean(&m, 0), "nothing counted");

    m.fail_after = 3;
    for (int i = 1; i <= 5; i++) {
        int rc = mci_alloc(&m, 0, 100, "x", &p, &e);
        CHECK((rc == MC_ENOMEM) == (i == 3) && (p == NULL) == (i == 3), "allocation %d", i);
        mci_release(&m, 0, p, 100);
    }
    CHECK(clean(&m, 0), "balanced");
}

/* The budget holds for any interleaving. */
static void *spend(void *arg) {
    mci_mem *m = arg;
    for (int i = 0; i < 3000; i++) {
        void *p;
        int64_t n = 1000 + i % 7;
        if (mci_alloc(m, i % MC_MEM_KINDS, n, "x", &p, NULL) == MC_OK)
            mci_release(m, i % MC_MEM_KINDS, p, n);
        if (atomic_load(&m->total) > m->budget) return m;
    }
    return NULL;
}

static void memory_threads(void) {
    mci_mem m = {.budget = 2500};
    pthread_t t[4];
    for (int i = 0; i < 4; i++) pthread_create(&t[i], NULL, spend, &m);
    for (int i = 0; i < 4; i++) {
        void *over;
        pthread_join(t[i], &over);
        CHECK(!over, "total over budget in thread %d", i);
    }
    CHECK(clean(&m, 0), "balanced");
}

/* Values computed from the definition of each format, in double. */
static double by_definition(int exp_bits, int man_bits, uint32_t code, bool infinities) {
    const int bias = (1 << (exp_bits - 1)) - 1, top = (1 << exp_bits) - 1;
    int e = (int)(code >> man_bits) & top, m = (int)code & ((1 << man_bits) - 1);
    double sign = code >> (exp_bits + man_bits) & 1 ? -1.0 : 1.0;
    if (e == top && infinities) return m ? NAN : sign * INFINITY;
    if (e == top && m == (1 << man_bits) - 1) return NAN;
    return sign * (e ? ldexp(1 + ldexp(m, -man_bits), e - bias) : ldexp(m, 1 - bias - man_bits));
}

static void decodes(void) {
    for (uint32_t i = 0; i < 65536; i++) {
        uint16_t h = (uint16_t)i;
        float got;
        double want = by_definition(5, 10, i, true);
        CHECK(mc_decode(MC_F16, &h, 1, &got, NULL) == MC_OK, "decode");
        CHECK((isnan(want) && isnan(got)) ||
                  (want == (double)got && !signbit(want) == !signbit(got)),
              "f16 %04x", i);
        CHECK(mc_decode(MC_BF16, &h, 1, &got, NULL) == MC_OK, "decode");
        CHECK(mci_bits(got) == i << 16, "bf16 %04x", i);
        CHECK(mci_f32_to_bf16(got) == h || isnan(got), "bf16 back %04x", i);
        CHECK(isnan(got) == isnan(mci_bf16_to_f32(mci_f32_to_bf16(got))), "bf16 NaN %04x", i);
    }
    for (uint32_t i = 0; i < 256; i++) {
        uint8_t b = (uint8_t)i;
        float got;
        double want = by_definition(4, 3, i, false);
        CHECK(mc_decode(MC_F8E4M3, &b, 1, &got, NULL) == MC_OK, "decode");
        CHECK((isnan(want) && isnan(got)) ||
                  (want == (double)got && !signbit(want) == !signbit(got)),
              "f8 %02x", i);
    }
    /* round to nearest even: between 1 and 1 + 2^-7, and past the largest finite value */
    CHECK(mci_f32_to_bf16(0x1.01p0f) == 0x3f80 && mci_f32_to_bf16(0x1.03p0f) == 0x3f82, "ties");
    CHECK(mci_f32_to_bf16(0x1.010002p0f) == 0x3f81, "above the tie");
    CHECK(mci_f32_to_bf16(3.4028234e38f) == 0x7f80, "rounds to infinity");
    CHECK(isnan(mci_bf16_to_f32(mci_f32_to_bf16(mci_f32(0x7f800001)))), "NaN of low bits only");
    mc_error e;
    float f = 0;
    CHECK(mc_decode(9, &f, 1, &f, &e) == MC_EINVAL && mc_decode(-1, &f, 1, &f, &e) == MC_EINVAL,
          "unknown dtype");
    CHECK(mc_decode(MC_F32, NULL, 1, &f, &e) == MC_EINVAL, "NULL");
    CHECK(mc_decode(MC_F32, NULL, 0, NULL, &e) == MC_OK, "nothing");
    CHECK(mc_decode(MC_F32, &f, -1, &f, &e) == MC_EINVAL, "negative count");
}

/* Scales of a 200x300 matrix: 2x3 blocks, the last ones partial. */
static void rows(void) {
    enum { R = 200, C = 300 };
    static uint8_t w[R * C];
    static float row[C];
    const float s[6] = {1, 2, 3, 4, 5, 6};
    for (int i = 0; i < R * C; i++) w[i] = 0x38; /* 1.0 */
    mci_mat m = {.data = w,
                 .scale = (const uint8_t *)s,
                 .rows = R,
                 .cols = C,
                 .dtype = MC_F8E4M3,
                 .scale_dtype = MC_F32,
                 .block_rows = 128,
                 .block_cols = 128};
    for (int r = 0; r < R; r++) {
        mci_mat_row(&m, r, row);
        for (int c = 0; c < C; c++)
            CHECK(row[c] == s[r / 128 * 3 + c / 128], "row %d column %d", r, c);
    }
}

static void cpu(void) {
    const char *words = mc_engine_cpu();
    uint32_t f = mci_cpu_features();
    static const struct {
        uint32_t bit;
        const char *word;
    } names[] = {{MCI_CPU_AVX2, "avx2"},
                 {MCI_CPU_FMA, "fma"},
                 {MCI_CPU_F16C, "f16c"},
                 {MCI_CPU_AVX512, "avx512"},
                 {MCI_CPU_AVX512_VNNI, "avx512_vnni"},
                 {MCI_CPU_AVX_VNNI, "avx_vnni"}};
    char padded[128];
    snprintf(padded, sizeof padded, " %s ", words);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char word[32];
        snprintf(word, sizeof word, " %s ", names[i].word);
        CHECK((strstr(padded, word) != NULL) == ((f & names[i].bit) != 0), "%s in \"%s\"", word,
              words);
    }
    CHECK(strstr(mc_engine_isas(), "scalar"), "%s", mc_engine_isas());
    CHECK(words == mc_engine_cpu(), "static");
}

/* RFC 3720 B.4 gives the values; pieces, alignments and lengths around every border of the three
 * streams are held against the plain way. */
static void crc(void) {
    enum { N = 60000 };
    static uint8_t p[N + 8];
    CHECK(mci_crc32c(0, p, 32) == 0x8a9136aau, "zeros");
    CHECK(mci_crc32c_plain(0, p, 32) == 0x8a9136aau, "zeros, plain");
    CHECK(mci_crc32c(0, "123456789", 9) == 0xe3069283u && mci_crc32c(7, p, 0) == 7, "digits");
    CHECK(mc_crc32c(0, "123456789", 9) == 0xe3069283u, "public");
    for (int i = 0; i < N + 8; i++) p[i] = (uint8_t)(i * 37 + (i >> 7));
    for (int n = 0; n <= N; n += n < 600 ? 1 : n % 4096 < 20 || n % 4096 > 4070 ? 3 : 251) {
        const uint8_t *at = p + n % 9;
        uint32_t want = mci_crc32c_plain(5, at, n), some = mci_crc32c(5, at, n / 3);
        CHECK(mci_crc32c(5, at, n) == want, "%d bytes", n);
        CHECK(mci_crc32c(some, at + n / 3, n - n / 3) == want, "%d bytes in two pieces", n);
        some = mci_crc32c_plain(5, at, n / 3);
        CHECK(mci_crc32c_plain(some, at + n / 3, n - n / 3) == want, "%d bytes, plain", n);
    }
}

int main(void) {
    crc();
    errors();
    sizes();
    memory();
    memory_threads();
    decodes();
    rows();
    cpu();
    return test_end();
}
