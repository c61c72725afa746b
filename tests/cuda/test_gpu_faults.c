/* test_gpu_faults.c - every failure of the runtime, one at a time: each is an error that says what
 * it was, and nothing is left behind. Of the emulated device only. */
#include "control.h"
#include "gpu_case.h"
#include "test.h"

enum { INVALID = 1, MEMORY = 2, LOST = 719 }; /* cudaError... */

static const gpu_case small = {.dtype = MC_F8E4M3,
                               .scale = MC_BF16,
                               .hidden = 40,
                               .width = 72,
                               .tokens = 2,
                               .experts = 3,
                               .in = UNIT};

static bool one_line(const mc_error *e, int code) {
    return e->code == code && e->message[0] && !strchr(e->message, '\n');
}

/* The nth call fails, for every n; a failure that close alone met is nobody's. */
static void check_each_call(gpu_run *r) {
    static const int with[] = {INVALID, MEMORY, LOST};
    for (int i = 0; i < 3; i++) {
        int n = 1, failures = 0;
        for (;; n++) {
            mc_error err = {0};
            const int64_t from = emu_calls();
            emu_seed((uint64_t)n);
            memset(r->got, 0, (size_t)r->rows * (size_t)r->c.hidden * 4);
            emu_fail(n, with[i]);
            const int rc = gpu_compute(r, 0, &err);
            emu_fail(0, 0);
            CHECK(emu_live() == 0, "call %d: %d left", n, (int)emu_live());
            if (rc == MC_OK) {
                CHECK(gpu_differs(r) < 0, "call %d failed and the result is wrong", n);
                if (emu_calls() - from < n) break;
            } else {
                failures++;
                CHECK(rc == (with[i] == MEMORY ? MC_ENOMEM : MC_ESYS) && one_line(&err, rc),
                      "call %d: %d: %s", n, rc, err.message);
            }
        }
        /* all but those of close: set device, 2 waits, 12 objects */
        CHECK(failures > n - 1 - 20 && failures < n, "%d of %d calls are errors", failures, n - 1);
    }
}

/* The device goes away before the nth call. */
static void check_lost(gpu_run *r) {
    const mci_gpu_api *api = gpu_api();
    const mci_gpu_room room = gpu_room(r);
    for (int when = 0; when < 6; when++) {
        mc_error err = {0};
        mci_gpu *g = NULL;
        const float *out;
        int rc = 0;
        if (when == 0) emu_lose(1);
        rc = api->open(0, &room, &g, &err);
        if (when == 1) emu_lose(1);
        for (int32_t i = 0; rc >= 0 && i < r->c.experts; i++) {
            rc = gpu_put(r, g, 0, i, &err);
            if (when == 2 && i == 1) emu_lose(1);
            while (rc >= 0 && (rc = api->uploaded(g, 0, &err)) == 0) continue;
        }
        if (when == 3) emu_lose(1);
        if (rc >= 0) gpu_input(r, g);
        if (rc >= 0)
            rc =
                api->run(g, &r->shape, r->item, r->c.experts, r->token, r->rows, r->c.tokens, &err);
        if (when >= 4) emu_lose(1);
        if (rc >= 0) rc = api->ran(g, when == 4, &out, &err);
        CHECK(rc == MC_ESYS && one_line(&err, rc), "lost %d: %d: %s", when, rc, err.message);
        CHECK(!g == (when == 0), "lost %d", when);
        api->close(g);
        emu_lose(0);
        CHECK(emu_live() == 0, "lost %d: %d left", when, (int)emu_live());
    }
}

static void check_message(int rc, int code, const mc_error *err, const char *a, const char *b) {
    CHECK(rc == code && one_line(err, code), "%d: %s", rc, err->message);
    CHECK(strstr(err->message, a) && strstr(err->message, b), "%s", err->message);
}

static void check_devices(gpu_run *r) {
    const mci_gpu_api *api = gpu_api();
    mci_gpu_room room = gpu_room(r);
    mc_gpu_info info;
    mci_gpu *g;
    mc_error err = {0};
    CHECK(api->probe(1, &info, &err) == MC_OK, "%s", err.message);
    CHECK(info.devices == 2 && info.capability == 89 && info.total == 1 << 30 &&
              info.free == 1 << 30 && info.driver == 13000 && info.runtime == 13000 &&
              !strcmp(info.name, "emulated GPU 1"),
          "%s: %d devices, %d", info.name, info.devices, info.capability);
    check_message(api->probe(2, &info, &err), MC_ERANGE, &err, "GPU 2", "are 2");
    check_message(api->open(-1, &room, &g, &err), MC_ERANGE, &err, "GPU -1", "are 2");
    emu_devices(1, 13000);
    check_message(api->open(1, &room, &g, &err), MC_ERANGE, &err, "GPU 1", "is 1");
    emu_devices(0, 13000);
    check_message(api->open(0, &room, &g, &err), MC_ESYS, &err, "no NVIDIA GPU", "without");
    emu_devices(2, 12020);
    check_message(api->probe(0, &info, &err), MC_ESYS, &err, "12.2", "13.0");
    emu_devices(2, 0);
    check_message(api->probe(0, &info, &err), MC_ESYS, &err, "no NVIDIA driver", "13.0");
    emu_devices(2, 13000);
    CHECK(api->probe(5, &info, NULL) == MC_ERANGE, "no error wanted");

    room.slots = 1 << 20;
    check_message(api->open(0, &room, &g, &err), MC_ENOMEM, &err, "1024.0 free", "wanted");
    room.slot_bytes += 8;
    CHECK(api->open(0, &room, &g, &err) == MC_EINVAL && !g, "%s", err.message);
    room = gpu_room(r);
    room.rows = INT32_MAX;
    room.vector_act = 64 << 10;
    CHECK(api->open(0, &room, &g, &err) == MC_EINVAL && !g, "%s", err.message);

    /* the sums that were promised are those that are taken */
    room = gpu_room(r);
    const int64_t slots = room.slots * room.slot_bytes, want = api->vram(&room) + slots;
    emu_memory(want + 255); /* the slots are rounded up */
    CHECK(api->open(1, &room, &g, &err) == MC_OK, "%s", err.message);
    int rc = g ? gpu_call(r, g, &err) : -1;
    CHECK(rc == MC_OK && gpu_differs(r) < 0, "device 1: %s", err.message);
    api->close(g);
    emu_memory(want - 1);
    CHECK(api->open(1, &room, &g, &err) == MC_ENOMEM && !g, "%s", err.message);
    emu_memory(1LL << 30);
    api->close(NULL);
    CHECK(emu_live() == 0, "%d left", (int)emu_live());
}

int main(void) {
    gpu_run r;
    gpu_make(&small, &r);
    gpu_reference(&r);
    check_each_call(&r);
    check_lost(&r);
    check_devices(&r);
    gpu_free(&r);
    return test_end();
}
