/* test_tier.c - experts in VRAM on a fake device: the same bits whatever lies there, nothing waits
 * for a copy, and whatever fails is said once and costs nothing but the tier. */
#include "blocks.h"
#include "fake_gpu.h"

enum { T = 70, STEPS = 24 };

/* All of layer 0's experts are FP8; layer 1 has one of each dtype and stays on the CPU. */
static int64_t slot_bytes(const model *m) {
    mc_error err;
    int64_t n = mc_tier_slot(m->expert[0], EXPERTS, &err);
    CHECK(n > 3 * H * WIDTH, "%lld", (long long)n);
    CHECK(mc_tier_slot(m->expert[1], EXPERTS, &err) == 0, "mixed formats");
    return n;
}

static mc_tier_opts room_for(const model *m, int64_t slots, int32_t after) {
    int64_t host, slot = slot_bytes(m);
    int64_t work = mc_tier_work(H, WIDTH, TOP_K, CHUNK, slot, &host, NULL);
    CHECK(work > 0 && host > MCI_GPU_STAGES * slot, "%lld %lld", (long long)work, (long long)host);
    return (mc_tier_opts){.after = after, .window = 16, .bytes = work + slots * slot + slot / 2};
}

static mc_stats stats(const world *w) {
    mc_stats st;
    CHECK(mc_engine_stats(w->e, &st, NULL) == MC_OK, "stats");
    return st;
}

/* A prompt of T tokens in chunks, then one token at a time; the activations of every step. */
static int story(const world *w, int64_t chunk, float *out, mc_error *err) {
    mc_session *s = new_session(w);
    int rc = run(w, w->st, s, 1, T, chunk, out, err);
    for (int i = 1; i < STEPS && rc == MC_OK; i++)
        rc = run(w, w->st, s, 1, 1, 1, out + i * H, err);
    mc_session_free(s);
    return rc;
}

static void expect(const world *w, int64_t chunk, const float *want, const char *what) {
    float got[STEPS * H];
    mc_error err = {0};
    int rc = story(w, chunk, got, &err);
    CHECK(rc == MC_OK, "%s: %s", what, err.message);
    CHECK(same_bits(got, want, STEPS * H), "%s: other bits", what);
}

static void check_bits(const model *m, const float *want) {
    static const struct {
        int slots, after, threads, policy, io, cache, ahead, chunk, stall;
    } set[] = {
        {10, 1, 1, MC_POLICY_AUTO, MC_IO_DIRECT, TOP_K, 0, 80, 0},
        {10, 3, 2, MC_POLICY_AUTO, MC_IO_AUTO, 5, 3, 7, 0},
        {1, 1, 1, MC_POLICY_LRU, MC_IO_PREAD, TOP_K, 3, 80, 1},
        {2, 1, 3, MC_POLICY_LFU, MC_IO_DIRECT, 20, 0, 1, 2},
        {3, 1, 2, MC_POLICY_LAYER_LRU, MC_IO_DIRECT, 1, 0, 16, 0},
        {4, 2, 2, MC_POLICY_AUTO, MC_IO_MMAP, 20, 0, 80, 0},
        {9, 1, 2, MC_POLICY_AUTO, MC_IO_DIRECT, TOP_K, TOP_K, 66, 3},
    };
    for (size_t i = 0; i < sizeof set / sizeof *set; i++) {
        char name[32];
        setting s = {.threads = set[i].threads, .kv = MC_F32, .policy = set[i].policy,
                     .io = set[i].io, .slots = set[i].cache, .ahead = set[i].ahead, .pages = 16,
                     .tier = room_for(m, set[i].slots, set[i].after)};
        world w = open_world(m, s);
        const mc_stats before = stats(&w);
        CHECK(before.gpu_slots == set[i].slots, "%lld slots", (long long)before.gpu_slots);
        CHECK(before.gpu_vram > 0 && before.gpu_vram <= s.tier.bytes, "VRAM");
        fake.stall = set[i].stall;
        snprintf(name, sizeof name, "setting %d", (int)i);
        expect(&w, set[i].chunk, want, name);
        /* the thread that copies may lag behind; what it does is the same the second time */
        expect(&w, set[i].chunk, want, name);
        const mc_stats st = stats(&w);
        CHECK(st.gpu_promotions > 0 && st.gpu_hits > 0 && st.gpu_rows >= st.gpu_hits, "%s", name);
        CHECK(st.gpu_bytes_up == st.gpu_promotions * st.gpu_slot_bytes, "%s", name);
        CHECK(st.gpu_bytes_io > 0 && st.gpu_held <= st.gpu_slots, "%s", name);
        CHECK(st.gpu_held + st.gpu_evictions >= st.gpu_promotions, "%s", name);
        CHECK(!*st.gpu_note, "%s: %s", name, st.gpu_note);
        CHECK(st.mem_now[MC_MEM_SCRATCH] == before.mem_now[MC_MEM_SCRATCH], "%s", name);
        close_world(&w);
        CHECK(fake.opened == 0, "%s: a device stays open", name);
    }
    fake.stall = 0;
}

/* Copies that never come: everything runs on the CPU and nothing waits; then they come. */
static void check_stalled(const model *m, const float *want) {
    setting s = PLAIN;
    s.tier = room_for(m, 10, 1);
    world w = open_world(m, s);
    fake.stall = 1 << 30;
    const int before = fake.uploads;
    expect(&w, 80, want, "stalled");
    mc_stats st = stats(&w);
    CHECK(st.gpu_hits == 0 && st.gpu_promotions == 0, "hits without a copy");
    CHECK(fake.uploads - before <= MCI_GPU_STAGES, "%d uploads at once", fake.uploads - before);
    fake.stall = 0;
    for (int i = 0; i < 1000 && stats(&w).gpu_hits == 0; i++)
        expect(&w, 80, want, "no longer stalled");
    CHECK(stats(&w).gpu_hits > 0, "no copy came");
    /* a smaller cache waits for copies under way, and a larger one */
    CHECK(mc_store_resize(w.store, TOP_K, NULL) == MC_OK, "resize");
    expect(&w, 80, want, "resized");
    close_world(&w);
    /* closed with copies under way */
    w = open_world(m, s);
    fake.stall = 3;
    expect(&w, 80, want, "closed early");
    close_world(&w);
    fake.stall = 0;
}

/* While the cache shrinks and grows between steps. */
static void check_resized(const model *m, const float *want) {
    float got[STEPS * H];
    setting s = PLAIN;
    mc_error err = {0};
    s.slots = 20;
    s.tier = room_for(m, 4, 1);
    world w = open_world(m, s);
    mc_session *text = new_session(&w);
    for (int i = 0; i < STEPS; i++) {
        CHECK(run(&w, w.st, text, 1, i ? 1 : T, 80, got + i * H, &err) == MC_OK, "%s", err.message);
        fake.stall = i % 3;
        CHECK(mc_store_resize(w.store, i % 4 ? TOP_K + i % 5 : 20, &err) == MC_OK, "%s",
              err.message);
    }
    CHECK(same_bits(got, want, STEPS * H), "other bits");
    mc_session_free(text);
    close_world(&w);
    fake.stall = 0;
}

/* The device refuses: at open, in a copy, in a product. */
static void check_failures(const model *m, const float *want) {
    setting s = PLAIN;
    mc_error err = {0};
    atomic_int *const at[] = {&fake.upload, &fake.copy, &fake.run, &fake.ran};
    for (int i = 0; i < 4; i++)
        for (int n = 1; n < 4; n++) {
            fake.code = n == 2 ? MC_ENOMEM : MC_ESYS;
            s.tier = room_for(m, 10, 1);
            world w = open_world(m, s);
            float got[STEPS * H];
            mc_stats st = stats(&w);
            const int64_t pinned = st.gpu_host, scratch = st.mem_now[MC_MEM_SCRATCH];
            *at[i] = n;
            int failed = 0, rc = 0;
            for (int turn = 0; turn < 50 && !*st.gpu_note; turn++) {
                rc = story(&w, 80, got, &err);
                failed += rc < 0;
                CHECK(rc < 0 || same_bits(got, want, STEPS * H), "other bits");
                st = stats(&w);
            }
            CHECK(strstr(st.gpu_note, "refused") && strstr(st.gpu_note, "CPU"), "%s", st.gpu_note);
            CHECK(failed == (i >= 2), "call %d, the %d. time: %d failed", i, n, failed);
            CHECK(!failed || (err.code == fake.code && strstr(err.message, "refused")), "%s",
                  err.message);
            CHECK(fake.opened == 0, "the device stays open");
            CHECK(st.gpu_slots == 0 && st.gpu_vram == 0 && st.gpu_host == 0, "it stays on");
            CHECK(st.mem_now[MC_MEM_SCRATCH] == scratch - pinned, "pinned memory stays counted");
            const int64_t hits = st.gpu_hits;
            expect(&w, 80, want, "given up");
            CHECK(stats(&w).gpu_hits == hits, "hits of what is given up");
            close_world(&w);
            *at[i] = 0;
        }
    fake.code = MC_ESYS;
}

static void check_open(const model *m, const float *want) {
    setting s = PLAIN;
    mc_error err = {0};
    const mc_tier_opts good = room_for(m, 10, 3);
    struct {
        mc_tier_opts o;
        int rc;
        const char *say;
    } bad[] = {{good, MC_ERANGE, "no device 3"}, {good, MC_ENOMEM, "memory refused"},
               {good, MC_EBUDGET, "VRAM given"}, {good, MC_EINVAL, "window"},
               {good, MC_EINVAL, "hot"},         {good, MC_EINVAL, "window"}};
    bad[0].o.device = 3;
    bad[2].o.bytes = 1000;
    bad[3].o.window = 33;
    bad[4].o.after = 0;
    bad[5].o.window = 0;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        /* the store is opened without: blocks.h stops at the tier */
        s.tier = bad[i].o;
        fake.open = bad[i].rc == MC_ENOMEM;
        fake.code = MC_ENOMEM;
        world w = {.m = m, .set = s};
        CHECK(open_engine(m, s, &w.e, &err) >= 0, "%s", err.message);
        int rc = open_blocks(&w, &err);
        CHECK(rc == bad[i].rc && strstr(err.message, bad[i].say), "%d: %d %s", (int)i, rc,
              err.message);
        CHECK(fake.opened == 0 && stats(&w).gpu_slots == 0 && stats(&w).gpu_vram == 0, "it is on");
        CHECK(mc_store_open(w.store, TOP_K, 0, &err) == MC_OK, "%s", err.message);
        CHECK(mc_store_tier(w.store, &good, &err) == MC_EINVAL && strstr(err.message, "open"),
              "%s", err.message);
        close_world(&w);
    }
    fake.code = MC_ESYS;
    s.tier = good;
    world w = open_world(m, s);
    expect(&w, 80, want, "open");
    close_world(&w);

    /* pinned memory is part of the budget */
    mc_engine_opts o = {.threads = 1, .budget = 1 << 20};
    mc_stats st;
    world u = open_world(m, s);
    st = stats(&u);
    int64_t all = 0;
    for (int i = 0; i < MC_MEM_KINDS; i++) all += st.mem_peak[i];
    close_world(&u);
    o.budget = all - st.gpu_host;
    memset(&u, 0, sizeof u);
    u.m = m;
    u.set = s;
    CHECK(mc_engine_create(&o, &u.e, &err) == MC_OK, "%s", err.message);
    for (int i = 0; i < MODEL_FILES; i++) CHECK(mc_engine_file(u.e, m->path[i], &err) == i, "file");
    int rc = open_blocks(&u, &err);
    CHECK(rc == MC_EBUDGET, "%d %s", rc, err.message);
    close_world(&u);
    CHECK(fake.opened == 0, "a device stays open");
}

/* Each allocation of a tier refused in turn: an error, no device and nothing counted stays. */
static void check_refused(const model *m, const float *want) {
    setting s = PLAIN;
    mc_error err = {0};
    int n = 1, rc = MC_ENOMEM;
    const mc_tier_opts o = room_for(m, 10, 1);
    for (; rc != MC_OK && n < 20; n++) {
        world w = {.m = m, .set = s};
        CHECK(open_engine(m, s, &w.e, &err) >= 0, "%s", err.message);
        CHECK(mc_store_create(w.e, 1, EXPERTS, TOP_K, MC_POLICY_LRU, &w.store, &err) == MC_OK,
              "%s", err.message);
        CHECK(mc_moe_create(w.e, w.store, &m->moe[0], m->expert[0], &w.moe[0], &err) == MC_OK,
              "%s", err.message);
        const mc_stats before = stats(&w);
        w.e->mem.fail_after = n;
        rc = mc_store_tier(w.store, &o, &err);
        const int64_t left = w.e->mem.fail_after;
        w.e->mem.fail_after = 0;
        CHECK(rc == MC_ENOMEM || (rc == MC_OK && left > 0), "%d %s", rc, err.message);
        const mc_stats after = stats(&w);
        CHECK(rc == MC_OK || !memcmp(before.mem_now, after.mem_now, sizeof after.mem_now),
              "memory stays counted");
        CHECK(rc == MC_OK || fake.opened == 0, "a device stays open");
        close_world(&w);
    }
    CHECK(rc == MC_OK && n > 2, "%d allocations", n - 2);
    s.tier = o;
    world w = open_world(m, s);
    expect(&w, 80, want, "after refusals");
    close_world(&w);
}

/* An expert with a NaN code never leaves the CPU; the others do. */
static void check_nan(model *m) {
    const mc_tensor *g = &m->expert[0][2].up;
    float want[STEPS * H], got[STEPS * H];
    uint8_t old, nan = 0xff;
    setting s = PLAIN;
    mc_error err = {0};
    FILE *f = fopen(m->path[g->file], "r+b");
    CHECK(f && !fseek(f, (long)g->offset + 77, SEEK_SET) && fread(&old, 1, 1, f) == 1, "read");
    CHECK(!fseek(f, (long)g->offset + 77, SEEK_SET) && fwrite(&nan, 1, 1, f) == 1, "write");
    fflush(f);
    world w = open_world(m, s);
    CHECK(story(&w, 80, want, &err) == MC_OK, "%s", err.message);
    close_world(&w);
    s.tier = room_for(m, 10, 1);
    w = open_world(m, s);
    for (int i = 0; i < 3; i++) CHECK(story(&w, 80, got, &err) == MC_OK, "%s", err.message);
    CHECK(memcmp(got, want, sizeof got) == 0, "other bits");
    CHECK(stats(&w).gpu_held == EXPERTS - 1, "%d held", (int)stats(&w).gpu_held);
    CHECK(!*stats(&w).gpu_note, "%s", stats(&w).gpu_note);
    close_world(&w);
    CHECK(!fseek(f, (long)g->offset + 77, SEEK_SET) && fwrite(&old, 1, 1, f) == 1, "write");
    fclose(f);
}

int main(int argc, char **argv) {
    char dir[4100];
    float want[STEPS * H];
    mc_error err = {0};
    make_dir(argc, argv, dir, sizeof dir);
    model *m = make_model(dir);
    world w = open_world(m, PLAIN);
    CHECK(story(&w, 80, want, &err) == MC_OK, "%s", err.message);
    CHECK(stats(&w).gpu_slots == 0 && stats(&w).gpu_hits == 0 && fake.opened == 0, "no tier");
    close_world(&w);
    check_bits(m, want);
    check_stalled(m, want);
    check_resized(m, want);
    check_failures(m, want);
    check_open(m, want);
    check_refused(m, want);
    check_nan(m);
    free_model(m);
    rmdir(dir);
    return test_end();
}
