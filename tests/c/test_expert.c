/* test_expert.c - where experts lie: exact slab sizes for every arrangement of the three matrices,
 * and few reads for many scales. test_store.c checks the bytes. */
#include <fcntl.h>
#include <libgen.h>
#include <unistd.h>

#include "store.h"
#include "test.h"

enum { BLOCK = MCI_IO_BLOCK };

static mc_tensor tensor(int file, int64_t offset, int64_t rows, int64_t cols, int dtype) {
    return (mc_tensor){.file = file,
                       .dtype = dtype,
                       .offset = offset,
                       .rows = rows,
                       .cols = cols,
                       .scale_file = dtype == MC_F8E4M3 ? 0 : -1,
                       .scale_dtype = MC_BF16,
                       .scale_offset = 1ll << 40, /* far away */
                       .block_rows = dtype == MC_F8E4M3 ? 128 : 0,
                       .block_cols = dtype == MC_F8E4M3 ? 128 : 0};
}

static void check_slab(void) {
    enum { H = 2048, W = 512, M = H * W };
    int64_t scales = -1;
#define EXPERT(f1, o1, f2, o2, f3, o3)                                                             \
    (mc_expert) {                                                                                  \
        tensor(f1, o1, W, H, MC_F8E4M3), tensor(f2, o2, W, H, MC_F8E4M3),                          \
            tensor(f3, o3, H, W, MC_F8E4M3)                                                        \
    }
    const struct {
        mc_expert x;
        int64_t slab;
    } known[] = {{EXPERT(0, 0, 0, M, 0, 2 * M), 3 * M},
                 {EXPERT(0, 7, 0, M + 7, 0, 2 * M + 7), 3 * M + BLOCK}, /* one run, one edge */
                 {EXPERT(0, M + 7, 0, 2 * M + 7, 0, 7), 3 * M + BLOCK}, /* in any order */
                 {EXPERT(0, 2 * M + 7, 0, 7, 0, M + 7), 3 * M + BLOCK},
                 {EXPERT(0, 7, 0, M + 100, 0, 2 * M + 200), 3 * M + BLOCK},     /* small gaps */
                 {EXPERT(0, 7, 0, 2 * M + 7, 0, 9 * M), 2 * (M + BLOCK) + M},   /* three runs */
                 {EXPERT(0, 7, 1, M + 7, 0, M + 7), 2 * M + BLOCK + M + BLOCK}, /* another file */
                 {EXPERT(0, 0, 1, 0, 2, 0), 3 * M},
                 {EXPERT(0, 5, 0, 5, 0, 5), M + BLOCK},                 /* the same bytes */
                 {EXPERT(0, 0, 0, M + BLOCK, 0, 2 * M + BLOCK), 3 * M}, /* a whole block between */
                 {EXPERT(0, 0, 0, M + 1, 0, 2 * M + 1), 3 * M + BLOCK}};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        int64_t slab = mc_expert_slab(&known[i].x, 1, &scales, NULL);
        CHECK(slab == known[i].slab && scales == 384, "case %zu: slab %lld, expected %lld", i,
              (long long)slab, (long long)known[i].slab);
    }
    mc_expert two[2] = {known[0].x, known[5].x};
    CHECK(mc_expert_slab(two, 2, &scales, NULL) == known[5].slab && scales == 768,
          "the largest counts");
    two[1].gate = tensor(0, 0, 1, 10, MC_F32);
    CHECK(mc_expert_slab(two, 2, NULL, NULL) > 0, "shapes may differ");
    two[1].gate.rows = INT64_MAX / 2;
    CHECK(mc_expert_slab(two, 2, NULL, NULL) == MC_EFORMAT, "overflow");
    two[1].gate = tensor(0, INT64_MAX - 5, 1, 10, MC_F32);
    CHECK(mc_expert_slab(two, 2, NULL, NULL) == MC_EFORMAT, "overflow of the offset");
    two[1].gate = tensor(0, 0, 1, 10, 77);
    CHECK(mc_expert_slab(two, 2, NULL, NULL) == MC_EFORMAT, "dtype");
    two[1].gate = tensor(-1, 0, 1, 10, MC_F32);
    CHECK(mc_expert_slab(two, 2, NULL, NULL) == MC_EFORMAT, "absent");
}

/* Counts calls; only one thread makes them here. */
static int64_t counted(void *ctx, int fd, void *buf, int64_t n, int64_t off) {
    ++*(int64_t *)ctx;
    return pread(fd, buf, (size_t)n, off);
}

static void check_scale_reads(const char *dir) {
    enum { N = 64, W = 256, H = 256, MAT = W * H };
    char path[4200];
    mc_error err = {0};
    mc_expert x[N];
    int64_t calls = 0;
    mc_engine_opts o = {.threads = 1, .lanes = 1, .io = MC_IO_PREAD};
    mc_engine *e = NULL;
    mc_store *s = NULL;
    CHECK(mc_engine_create(&o, &e, &err) == MC_OK, "%s", err.message);
    snprintf(path, sizeof path, "%s/scales", dir);
    int fd = open(path, O_CREAT | O_RDWR, 0600);
    /* all scales behind all weights, but no block next to them; the file is a hole */
    int64_t at = (int64_t)N * 3 * MAT + 2 * BLOCK;
    CHECK(ftruncate(fd, at + N * 3 * 16) == 0, "sparse file");
    close(fd);
    int file = mc_engine_file(e, path, &err);
    for (int i = 0; i < N; i++) {
        mc_tensor *const t[3] = {&x[i].down, &x[i].gate, &x[i].up};
        for (int k = 0; k < 3; k++) {
            *t[k] = tensor(file, ((int64_t)i * 3 + k) * MAT, W, H, MC_F8E4M3);
            t[k]->scale_dtype = MC_F32;
            t[k]->scale_offset = at + (i * 3 + k) * 16;
        }
    }
    mci_io_inject(e->io, counted, &calls);
    mc_store_create(e, 1, N, 8, MC_POLICY_LFU, &s, &err);
    CHECK(mci_store_bind(s, LAYER(0, N, 8, H, W), x, &err) == MC_OK, "%s", err.message);
    CHECK(calls == 1, "%lld reads for the scales of a layer", (long long)calls);
    CHECK(e->mem.now[MC_MEM_WEIGHTS] == N * 3 * 128, "scales take %lld bytes",
          (long long)e->mem.now[MC_MEM_WEIGHTS]);
    mc_store_free(s);
    mc_engine_free(e);
    unlink(path);
}

int main(int argc, char **argv) {
    char at[4000];
    (void)argc;
    snprintf(at, sizeof at, "%s", argv[0]);
    check_slab();
    check_scale_reads(dirname(at));
    return test_end();
}
