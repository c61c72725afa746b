/* handles.c - ends of handles for bindings: one function for each kind, all alike. */
#include <stddef.h>

#include "mosaic_c.h"

#define CLEAR(kind)                                                                                \
    void mc_##kind##_clear(mc_##kind **p) {                                                        \
        mc_##kind##_free(*p);                                                                      \
        *p = NULL;                                                                                 \
    }

CLEAR(engine)
CLEAR(linear)
CLEAR(head)
CLEAR(kv)
CLEAR(session)
CLEAR(step)
CLEAR(attn)
CLEAR(delta)
CLEAR(store)
CLEAR(moe)
