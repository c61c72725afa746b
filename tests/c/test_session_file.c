/* test_session_file.c - a session in a file: the same bits after loading, and an error, never a
 * crash or a half-made session, for every damaged, shortened or hostile file. */
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include "blocks.h"
#include "crc.h"

enum {
    POS = 70,
    META = 5,
    HEADER = 168,
    AT_VERSION = 8,
    AT_POS = 144,
    AT_PAGES = 152,
    AT_META = 160
};

static mc_error err;
static const uint8_t id[32] = {3, 1, 4};

#define OK(call) CHECK((call) == MC_OK, "%s", err.message)

static void (*meanwhile)(void); /* called once, in the middle of a save */

int fsync(int fd) { /* in place of libc's */
    void (*f)(void) = meanwhile;
    meanwhile = NULL;
    if (f) f();
    return (int)syscall(SYS_fsync, fd);
}

static int64_t read_file(const char *path, uint8_t **data) {
    FILE *f = fopen(path, "rb");
    struct stat st;
    if (!f || fstat(fileno(f), &st) < 0) exit(1);
    *data = test_alloc((size_t)st.st_size + 8);
    if (fread(*data, 1, (size_t)st.st_size, f) != (size_t)st.st_size) exit(1);
    fclose(f);
    return st.st_size;
}

static void write_file(const char *path, const uint8_t *data, int64_t n) {
    FILE *f = fopen(path, "wb");
    if (!f || fwrite(data, 1, (size_t)n, f) != (size_t)n || fclose(f)) exit(1);
}

/* Loading must fail with one of two codes and leave everything as it was. */
static void fails(const world *w, const char *path, int code, int or_code, const char *what,
                  int64_t at) {
    mc_session *s = (mc_session *)&err;
    uint8_t meta[META];
    int64_t total = w->e->mem.total, pages = w->kv->n_free;
    err.message[0] = 0;
    int64_t rc = mc_session_load(w->kv, path, id, meta, META, &s, &err);
    CHECK((rc == code || rc == or_code) && err.code == rc && err.message[0] && !s,
          "%s at %lld: %lld \"%s\"", what, (long long)at, (long long)rc, err.message);
    CHECK(w->e->mem.total == total && w->kv->n_free == pages, "%s at %lld: leak", what,
          (long long)at);
    if (rc >= 0) mc_session_free(s);
}

static void check_damage(const world *w, const char *path, const uint8_t *data, int64_t n) {
    uint8_t *bad = test_alloc((size_t)n + 8);
    rng r = {5};
    memcpy(bad, data, (size_t)n);
    for (int64_t i = 0; i < n; i += i < HEADER + META ? 1 : 1 + (int64_t)rng_below(&r, 700)) {
        for (int k = 0; k < 2; k++) { /* one bit, and all of them */
            bad[i] = (uint8_t)(data[i] ^ (k ? 0xff : 1 << rng_below(&r, 8)));
            write_file(path, bad, n);
            fails(w, path, MC_EFORMAT, i >= AT_POS && i < AT_PAGES ? MC_EFULL : MC_EFORMAT,
                  "flipped", i);
        }
        bad[i] = data[i];
    }
    for (int64_t i = n - 4; i < n; i++) { /* the CRC itself */
        bad[i] = (uint8_t)(data[i] ^ 1);
        write_file(path, bad, n);
        fails(w, path, MC_EFORMAT, MC_EFORMAT, "flipped CRC", i);
        bad[i] = data[i];
    }
    /* cut at the edge of every section, and one byte to each side */
    int64_t state = HEADER + META + w->kv->state_floats * 4, page = state + w->kv->page_bytes;
    const int64_t edge[] = {0, 8, AT_POS, HEADER, HEADER + META, state, page, n - 4, n};
    for (size_t i = 0; i < sizeof edge / sizeof *edge; i++)
        for (int64_t cut = MCI_MAX(edge[i] - 1, 0); cut <= edge[i] + 1; cut++) {
            if (cut == n) continue;
            memset(bad + n, 0, 8);
            write_file(path, bad, cut);
            fails(w, path, MC_EFORMAT, MC_EFORMAT, "cut", cut);
        }
    free(bad);
}

/* Header fields that make no sense under a CRC that is right. */
static void check_hostile(const world *w, const char *path, const uint8_t *data, int64_t n) {
    static const int64_t nasty[] = {
        -1, INT64_MIN, INT64_MAX, INT64_MAX - 167, 1ll << 62, 1ll << 32, 1ll << 31, CTX + 1, 0, 64};
    static const int field[] = {AT_POS, AT_PAGES, AT_META, AT_VERSION, 48,  56,  64,  72,
                                80,     88,       96,      104,        112, 120, 128, 136};
    uint8_t *bad = test_alloc((size_t)n);
    for (size_t i = 0; i < sizeof field / sizeof *field; i++)
        for (size_t k = 0; k < sizeof nasty / sizeof *nasty; k++) {
            memcpy(bad, data, (size_t)n);
            if (!memcmp(bad + field[i], &nasty[k], 8)) continue; /* what the file says anyway */
            memcpy(bad + field[i], &nasty[k], 8);
            uint32_t crc = mci_crc32c(0, bad, n - 4);
            memcpy(bad + n - 4, &crc, 4);
            write_file(path, bad, n);
            fails(w, path, MC_EFORMAT, MC_EFULL, "hostile field", field[i]);
        }
    free(bad);
}

static void check_places(const world *w, const char *dir, const char *path, mc_session *s) {
    char odd[4300], deep[4500];
    mc_session *l = NULL;
    uint8_t other[32] = {3, 1, 5}, meta[META];
    snprintf(odd, sizeof odd, "%s/fifo", dir);
    if (mkfifo(odd, 0600) == 0) fails(w, odd, MC_EFORMAT, MC_EIO, "fifo", 0);
    unlink(odd);
    fails(w, dir, MC_EIO, MC_EFORMAT, "folder", 0);
    fails(w, odd, MC_EIO, MC_EIO, "nothing", 0);
    fails(w, w->m->path[0], MC_EFORMAT, MC_EFORMAT, "another kind of file", 0);
    CHECK(mc_session_load(w->kv, path, other, meta, META, &l, &err) == MC_EFORMAT && !l, "model");
    for (int64_t room = -1; room < META; room++)
        CHECK(mc_session_load(w->kv, path, id, meta, room, &l, &err) == MC_ERANGE && !l,
              "room for %lld", (long long)room);
    snprintf(deep, sizeof deep, "%s/nowhere/x", dir);
    CHECK(mc_session_save(s, deep, id, "", 0, &err) == MC_EIO && err.sys == ENOENT, "%s",
          err.message);
    memset(deep, 'x', sizeof deep - 1);
    deep[sizeof deep - 1] = 0;
    CHECK(mc_session_save(s, deep, id, "", 0, &err) < 0, "a path too long");
    CHECK(mc_session_save(s, dir, id, "", 0, &err) == MC_EINVAL, "over a folder");
    CHECK(mc_session_save(s, odd, id, "", -1, &err) == MC_EINVAL, "negative meta");
    unlink(odd);
    CHECK(!s->busy, "left busy");
}

static const world *at_work;
static mc_session *saved, *other;

/* Another session goes on in pages that it shares with the one being saved, which is busy. */
static void step_beside(void) {
    int rc = pthread_mutex_trylock(&at_work->e->lock);
    CHECK(rc == 0, "the engine waits for a file");
    if (rc) return;
    pthread_mutex_unlock(&at_work->e->lock);
    OK(run(at_work, at_work->st, other, 1, 3, 2, NULL, &err));
    CHECK(mc_session_rewind(saved, 0, &err) == MC_EBUSY, "%s", err.message);
    mc_session_free(saved); /* by its owner: it lives until it is written */
    saved = NULL;
}

static void check_beside(const world *w, const char *path, mc_session *s) {
    mc_session *l = NULL, *fork = NULL;
    uint8_t meta[META];
    float a[H], b[H];
    at_work = w;
    OK(mc_session_fork(s, &saved, &err));
    OK(mc_session_fork(s, &other, &err));
    OK(mc_session_fork(s, &fork, &err));
    meanwhile = step_beside;
    OK(mc_session_save(saved, path, id, "hello", META, &err));
    CHECK(!saved && !meanwhile, "no step went on");
    if (saved) mc_session_free(saved);
    CHECK(mc_session_load(w->kv, path, id, meta, META, &l, &err) == META, "%s", err.message);
    OK(run(w, w->st, fork, 2, 3, 2, a, &err));
    OK(run(w, w->st, l, 2, 3, 3, b, &err));
    CHECK(same_bits(a, b, H), "a step beside it changed what was saved");
    mc_session_free(l);
    mc_session_free(fork);
    mc_session_free(other);
}

/* kv: of the pages, f32 or bf16. */
static void check_files(const model *m, const char *dir, int kv) {
    setting set = PLAIN, small = PLAIN;
    set.kv = kv;
    small.kv = MC_F32 + MC_BF16 - kv;
    world w = open_world(m, set), w2 = open_world(m, small);
    mc_session *s = new_session(&w), *l = NULL, *hold[4];
    char path[4200], tmp[4200];
    uint8_t *data, meta[META];
    float a[H], b[H];
    snprintf(path, sizeof path, "%s/session", dir);
    snprintf(tmp, sizeof tmp, "%s/damaged", dir);
    for (int64_t at = 0; at < 3; at++) { /* empty, mid page, at the edge of a page */
        static const int64_t grow[3] = {0, POS, 128 - POS};
        if (at) OK(run(&w, w.st, s, 1, grow[at], CHUNK, NULL, &err));
        OK(mc_session_save(s, path, id, "hello", META, &err));
        CHECK(mc_session_load(w.kv, path, id, meta, META, &l, &err) == META, "%s", err.message);
        CHECK(!memcmp(meta, "hello", META) && mc_session_position(l) == mc_session_position(s),
              "other meta or position");
        mc_session *fork = NULL;
        OK(mc_session_fork(s, &fork, &err));
        OK(run(&w, w.st, fork, 2, 3, 2, a, &err));
        OK(run(&w, w.st, l, 2, 3, 3, b, &err));
        CHECK(same_bits(a, b, H), "other bits after %lld tokens",
              (long long)mc_session_position(s));
        mc_session_free(l);
        mc_session_free(fork);
        if (at != 1) continue;
        check_beside(&w, path, s);
        int64_t n = read_file(path, &data);
        check_damage(&w, tmp, data, n);
        check_hostile(&w, tmp, data, n);
        check_places(&w, dir, path, s);
        fails(&w2, path, MC_EFORMAT, MC_EFORMAT, "other KV dtype", 0);
        free(data);
    }
    /* no pages left for it */
    for (int i = 0; i < 4; i++) {
        OK(mc_session_fork(s, &hold[i], &err));
        OK(mc_session_rewind(hold[i], 0, &err));
        int rc = run(&w, w.st, hold[i], 3, i == 3 ? 64 : CTX, CHUNK, NULL, &err);
        CHECK(rc == MC_OK || i == 3, "%s", err.message);
    }
    fails(&w, path, MC_EFULL, MC_EFULL, "no pages", w.kv->n_free);
    for (int i = 0; i < 4; i++) mc_session_free(hold[i]);
    mc_session_free(s);
    CHECK(w.kv->n_free == w.kv->n_page, "pages lost");
    unlink(path);
    unlink(tmp);
    close_world(&w);
    close_world(&w2);
}

int main(int argc, char **argv) {
    char dir[4096];
    make_dir(argc, argv, dir, sizeof dir);
    alarm(300);
    model *m = make_model(dir);
    check_files(m, dir, MC_F32);
    check_files(m, dir, MC_BF16);
    free_model(m);
    CHECK(rmdir(dir) == 0, "files left behind"); /* a failed save leaves none */
    return test_end();
}
