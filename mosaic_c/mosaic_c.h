/* mosaic_c.h - the whole public interface of the engine.
 *
 * An mc_engine owns threads, kernels, files and memory accounting. Blocks (mc_linear, mc_attn,
 * mc_delta, mc_moe) are weights bound once from byte ranges of files; they are immutable and may be
 * used by any number of sessions. An mc_session is all mutable state of one sequence. An mc_step
 * moves one or more sessions forward together and either commits or leaves all of them unchanged.
 *
 * Conventions
 *   - Every fallible call returns int: 0 or a positive count is success, a negative MC_E... a
 *     failure. The last argument, mc_error *err, may be NULL; otherwise it holds the reason.
 *   - *_create writes an owned handle, released by *_free. *_free(NULL) does nothing. A child keeps
 *     its parents alive, so handles may be freed in any order.
 *   - Activations are float32, row-major (n_tok, hidden). Sizes are bytes, positions are tokens.
 *   - Calls on different sessions may come from different threads: the engine runs them one after
 *     the other. Two steps that hold one session: the second gets MC_EBUSY. A call in a forked
 *     child gets MC_EFORK. Nothing here prints, exits, reads the environment or keeps globals.
 *   - Files are hostile input: every range is checked against the file's size when it is bound.
 *
 * What lies between the two markers is read by cffi: declarations only, no preprocessor.
 */
#ifndef MOSAIC_C_H
#define MOSAIC_C_H
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif
/* cffi begin */

/* ---- errors ---------------------------------------------------------------------------------- */

enum {
    MC_OK = 0,
    MC_EINVAL = -1,  /* an argument or description makes no sense */
    MC_ENOMEM = -2,  /* the system refused memory */
    MC_EBUDGET = -3, /* the memory budget would be exceeded */
    MC_EIO = -4,     /* a read or write failed, or a file is shorter than it must be */
    MC_EFORMAT = -5, /* bytes that break their format */
    MC_ERANGE = -6,  /* an index or id outside its range */
    MC_EFULL = -7,   /* no room left in the context or the page pool */
    MC_EBUSY = -8,   /* the session is in another step */
    MC_EFORK = -9,   /* called in a forked child */
    MC_ECANCEL = -10, /* mc_engine_cancel was called */
    MC_ESYS = -11     /* another system call failed; see mc_error.sys */
};

typedef struct mc_error {
    int32_t code;      /* MC_E... */
    int32_t sys;       /* errno, 0 when no system call was involved */
    char message[496]; /* one line: what, where, expected, got */
} mc_error;

/* "MC_EIO" and "read or write failed"; never NULL. */
const char *mc_status_name(int code);
const char *mc_status_text(int code);

/* ---- tensors in files ------------------------------------------------------------------------ */

enum { MC_F32 = 0, MC_BF16 = 1, MC_F16 = 2, MC_F8E4M3 = 3, MC_F4E2M1 = 4, MC_INT4 = 5, MC_INT8 = 6,
       MC_F8E8M0 = 7 /* scales only */ };

enum { MC_CRC_NONE = 0, MC_CRC_RECORD = 1, MC_CRC_TENSOR = 2 }; /* what a CRC is of */

/* A matrix (rows, cols), row-major, at any byte offset of a file; a vector has rows 1. Each row
 * begins at a whole byte; of two elements in a byte the first is in the low half.
 *
 *   dtype       element                          scale dtype       block_rows x block_cols
 *   MC_F32 MC_BF16 MC_F16                        none
 *   MC_F8E4M3   FP8 E4M3FN                       F32 BF16 F8E8M0   128 x 128, or a row
 *   MC_F4E2M1   MXFP4                            F8E8M0            1 x 32
 *   MC_INT4     0..15, worth -8..7               F32 BF16 F16      a row, 1 x 32, 64 or 128
 *   MC_INT8     -128..127                        F32 BF16 F16      a row, 1 x 32, 64 or 128
 *
 * Elements of one block share a scale, which multiplies; a row is block_rows 1, block_cols 0. The
 * scales are a matrix (ceil(rows / block_rows), ceil(cols / block_cols)), row-major, of which the
 * last blocks may be partial. scale_file -1: none. file -1: the tensor is absent.
 * record MC_CRC_TENSOR: crc is the CRC-32C of its bytes and then of its scales', checked when it is
 * read into memory: bytes that differ are MC_EFORMAT. MC_CRC_RECORD: see mc_expert. */
typedef struct mc_tensor {
    int32_t file, dtype;
    int64_t offset, rows, cols;
    int32_t scale_file, scale_dtype;
    int64_t scale_offset;
    int32_t block_rows, block_cols;
    int32_t record;
    uint32_t crc;
} mc_tensor;

/* One expert: gate and up (width, hidden), down (hidden, width).
 *
 * record MC_CRC_RECORD, in all three: they and their scales are a record, which begins with gate at
 * a multiple of 4096, ends at the first one behind the last of them and holds nothing else of use.
 * crc, the same in all three: CRC-32C of the layer (as in mc_moe_desc) and expert, 4 bytes each,
 * then of the whole record. It is checked whenever the expert is read; bytes that differ fail that
 * read with MC_EFORMAT. MC_CRC_NONE: no check. */
typedef struct mc_expert {
    mc_tensor gate, up, down;
} mc_expert;

/* ---- engine ---------------------------------------------------------------------------------- */

typedef struct mc_engine mc_engine;

enum { MC_IO_AUTO = 0, MC_IO_PREAD = 1, MC_IO_DIRECT = 2, MC_IO_URING = 3, MC_IO_MMAP = 4 };

/* How experts are read; dense weights always come into memory of their own.
 *   direct  O_DIRECT past the page cache; a file system that refuses is read by pread
 *   pread   through the page cache, which is emptied of it at once
 *   uring   direct reads in a ring of the kernel (io_uring), kept by the thread that computes
 *   mmap    experts stay in mapped files: all of them must fit the budget
 *   auto    direct or uring with 1, 2 or `most` lanes, whichever a few reads of experts at
 *           mc_store_open show to be the fastest; uring where they differ by less than a tenth */
typedef struct mc_engine_opts {
    int32_t threads;   /* compute threads, 1..256 */
    int32_t lanes;     /* reads under way at once, 1..64; 0: the mode's own number, */
    int32_t most;      /* which for experts may be up to this (mc_io_most); 0: 4 */
    int32_t io;        /* MC_IO_... */
    int64_t budget;    /* bytes the engine may allocate in all; 0: no limit */
    const char *isa;   /* kernel set by name (mc_engine_isas); NULL: the best */
} mc_engine_opts;

int mc_engine_create(const mc_engine_opts *opts, mc_engine **out, mc_error *err);
void mc_engine_free(mc_engine *e);
/* MC_OK where this system can read in a mode; MC_ESYS: it has no io_uring, the message says why.
 * mc_engine_create refuses such a mode the same way. */
int mc_io_mode(int32_t mode, mc_error *err);
/* opts.most for experts of so many bytes: small reads need more at once. The store has a slab for
 * each of them beside its slots (none for mmap). */
int mc_io_most(int32_t mode, int64_t bytes);
/* Opens a file for reading and returns its id (>= 0). Where a file system refuses direct reads it
 * is read buffered: mc_stats says how many files are read each way, and why. */
int mc_engine_file(mc_engine *e, const char *path, mc_error *err);
/* Makes the step in progress end with MC_ECANCEL at its next layer or expert (on = 1); on = 0
 * clears it. Safe from any thread and from a signal handler. */
void mc_engine_cancel(mc_engine *e, int on);
/* The names of the kernel sets that this CPU can run, best first, separated by spaces. */
const char *mc_engine_isas(void);
/* Features of this CPU and OS as words ("avx2 fma f16c ..."). */
const char *mc_engine_cpu(void);
/* How this was compiled, in words that commas part: "gcc 12.2.0, optimized". Others are "not
 * optimized", "fast-math" (its results are no longer the canonical ones), "sanitized", and "AVX
 * everywhere" (-march: it ends with SIGILL on a CPU without AVX). */
const char *mc_engine_build(void);
/* NULL where this build has a GPU tier; otherwise the reason why not. */
const char *mc_engine_gpu(void);

typedef struct mc_gpu_info {
    char name[80];
    int64_t total, free;     /* bytes of VRAM */
    int32_t devices;         /* how many there are */
    int32_t capability;      /* 10 * major + minor */
    int32_t driver, runtime; /* CUDA versions, 1000 * major + 10 * minor */
} mc_gpu_info;
/* Looks at a device (from 0), which costs this process the memory of its driver. MC_ESYS: no
 * driver, too old a one, no device, or a lost one; MC_ERANGE: no such device; the message says what
 * to do. Nothing else here touches a GPU, but for mc_store_tier and what it opens. */
int mc_gpu_probe(int32_t device, mc_gpu_info *out, mc_error *err);

enum { MC_MEM_WEIGHTS = 0, MC_MEM_CACHE = 1, MC_MEM_STATE = 2, MC_MEM_SCRATCH = 3, MC_MEM_META = 4,
       MC_MEM_KINDS = 5 };

typedef struct mc_stats {
    int64_t mem_now[5], mem_peak[5];      /* bytes by MC_MEM_... */
    int64_t budget;
    int64_t hits, misses, evictions;      /* distinct experts per layer and step */
    int64_t reads, bytes_read;            /* expert reads: requests and bytes taken from files */
    int64_t ahead_reads, ahead_used;      /* experts read ahead; those that the next line needed */
    int64_t expert_rows;                  /* token-expert pairs computed */
    double read_s;                        /* sum over lanes of time inside reads */
    double busy_s;                        /* wall time with a read under way: bytes_read / busy_s
                                             is the speed reached */
    double wait_s;                        /* compute standing still for reads */
    double moe_s;                         /* time inside mc_moe_forward */
    int64_t slots, held;                  /* cache capacity now, and experts in it */
    int64_t slab_bytes;
    int32_t threads, threads_ran;         /* compute threads; how many of them took work so far */
    int32_t io;                           /* MC_IO_... really in use */
    int32_t lanes, lanes_ran;             /* reads at once; threads that read so far: no ring */
    int32_t depth;                        /* the most reads submitted and not finished */
    int32_t ahead_on;                     /* reading ahead: 1 in use (or on trial) just now */
    int32_t tried;                        /* ways to read that auto measured, in this order: */
    int32_t tried_io[8], tried_lanes[8];
    double tried_gbs[8];                  /* GB/s */
    char io_note[256];                    /* why files are not read directly; "" where they are */
    int32_t files_direct, files_pread;
    int64_t gpu_hits, gpu_rows;           /* as hits and expert_rows: computed on the GPU */
    int64_t gpu_promotions, gpu_evictions; /* experts copied to VRAM; those that left it again */
    int64_t gpu_bytes_up, gpu_bytes_io;   /* over the bus: of promotions; activations, both ways */
    double gpu_wait_s;                    /* compute standing still for the GPU */
    int64_t gpu_slots, gpu_held, gpu_slot_bytes; /* experts in VRAM; 0 slots: no tier */
    int64_t gpu_vram, gpu_host;           /* bytes it takes in VRAM, and of pinned memory here */
    char gpu_note[256];                   /* why the tier was given up; "" while it is in use */
    const char *isa;                      /* static */
    const char *policy;                   /* static; NULL before a store exists */
} mc_stats;

int mc_engine_stats(mc_engine *e, mc_stats *out, mc_error *err);

/* ---- linear ---------------------------------------------------------------------------------- */

typedef struct mc_linear mc_linear;

/* Binds a matrix. resident 1: read into memory now; 0: only mc_linear_rows works, and each row is
 * read when asked for (a large embedding table). */
int mc_linear_create(mc_engine *e, const mc_tensor *w, int resident, mc_linear **out,
                     mc_error *err);
void mc_linear_free(mc_linear *l);
/* The CRC-32C of each row of a matrix that is not resident (copied): from now on a row that is read
 * and has another is MC_EFORMAT. Once, before rows are asked for. */
int mc_linear_row_crc(mc_linear *l, const uint32_t *crc, mc_error *err);
/* y (n_tok, rows) = x (n_tok, cols) * W^T. */
int mc_linear_forward(mc_linear *l, const float *x, int64_t n_tok, float *y, mc_error *err);
/* y (n, cols) = decoded rows ids[0..n); an id outside the matrix is MC_ERANGE. */
int mc_linear_rows(mc_linear *l, const int32_t *ids, int64_t n, float *y, mc_error *err);
/* y (n, rows) = norm(x at the rows pick[0..n) of (.., cols)) * W^T, the logits of the picked
 * tokens. norm: vector of cols, plus_one as in mc_norm. */
typedef struct mc_norm {
    mc_tensor weight;  /* absent: no norm */
    int32_t plus_one;  /* the stored weight is w of (1 + w) */
    float eps;
} mc_norm;
typedef struct mc_head mc_head;
int mc_head_create(mc_engine *e, const mc_norm *norm, mc_linear *w, int64_t max_tok, mc_head **out,
                   mc_error *err);
void mc_head_free(mc_head *h);
int mc_head_forward(mc_head *h, const float *x, const int32_t *pick, int64_t n, float *y,
                    mc_error *err);

/* ---- sessions -------------------------------------------------------------------------------- */

typedef struct mc_kv mc_kv;
typedef struct mc_session mc_session;
typedef struct mc_step mc_step;

/* Shape of the mutable state of one sequence, and of the pool that holds the KV pages of all. */
typedef struct mc_kv_desc {
    int32_t n_attn;              /* full-attention layers */
    int32_t n_kv_head, head_dim;
    int32_t dtype;               /* MC_F32 or MC_BF16 */
    int64_t ctx;                 /* tokens a session may hold */
    int64_t pages;               /* pages in the pool; 0: enough for one session of ctx tokens */
    int32_t n_delta;             /* linear-attention layers */
    int32_t conv_dim, conv_kernel;
    int32_t n_v_head, dk, dv;    /* recurrent state (n_v_head, dk, dv) a layer */
} mc_kv_desc;

enum { MC_PAGE_TOKENS = 64 };

int mc_kv_create(mc_engine *e, const mc_kv_desc *d, mc_kv **out, mc_error *err);
void mc_kv_free(mc_kv *kv);
/* Bytes of the page pool, and of one session's state (both copies, page table included). */
int64_t mc_kv_pool_bytes(const mc_kv_desc *d, mc_error *err);
int64_t mc_kv_session_bytes(const mc_kv_desc *d, mc_error *err);

int mc_session_create(mc_kv *kv, mc_session **out, mc_error *err);
void mc_session_free(mc_session *s);
int64_t mc_session_position(const mc_session *s);
/* Keeps the state at the present position, so that mc_session_rewind can return to it. */
int mc_session_snapshot(mc_session *s, mc_error *err);
/* Back to position n: any n <= position for a model without recurrent state, otherwise 0, the
 * present position or that of a kept snapshot (MC_ERANGE names those kept). Later snapshots go. */
int mc_session_rewind(mc_session *s, int64_t n, mc_error *err);
/* Gives up the snapshot at position n; forks that share it keep it. MC_ERANGE: there is none. */
int mc_session_forget(mc_session *s, int64_t n, mc_error *err);
/* Gives up the room for the state that a step writes, half of what a session with recurrent state
 * takes, until mc_step_begin needs it again (MC_EBUDGET, MC_ENOMEM): for one that is only kept. */
int mc_session_rest(mc_session *s, mc_error *err);
/* An independent copy; full KV pages are shared until one of the two writes. */
int mc_session_fork(mc_session *s, mc_session **out, mc_error *err);
/* The file holds KV, conv and recurrent state, position, `meta` bytes of the caller and a CRC;
 * written beside and renamed. model: 32 bytes that identify the weights. Calls on other sessions go
 * on meanwhile; one on this session gets MC_EBUSY. */
int mc_session_save(mc_session *s, const char *path, const uint8_t *model, const void *meta,
                    int64_t n_meta, mc_error *err);
/* Reads a saved session into a new one. meta: room for n_meta bytes; returns the bytes of meta
 * (MC_ERANGE when the room is too small). Another model, version, shape or a damaged file:
 * MC_EFORMAT. */
int64_t mc_session_load(mc_kv *kv, const char *path, const uint8_t *model, void *meta,
                        int64_t n_meta, mc_session **out, mc_error *err);

/* A step: begin, then for each chunk of tokens mc_step_chunk followed by every layer in order, then
 * commit. Until the commit the sessions stand where they stood; mc_step_abort (or the next begin,
 * or free) drops the work. */
int mc_step_create(mc_engine *e, mc_step **out, mc_error *err);
void mc_step_free(mc_step *st);
int mc_step_begin(mc_step *st, mc_session *const *sessions, int32_t n, mc_error *err);
/* The next chunk: counts[i] >= 0 tokens of session i; the activations of all are concatenated in
 * that order. MC_EFULL when a session's context or the pool has no room. */
int mc_step_chunk(mc_step *st, const int64_t *counts, mc_error *err);
int mc_step_commit(mc_step *st, mc_error *err);
void mc_step_abort(mc_step *st);

/* ---- full attention -------------------------------------------------------------------------- */

typedef struct mc_attn mc_attn;

typedef struct mc_attn_desc {
    int32_t layer;                       /* index among the attention layers of the mc_kv */
    int32_t hidden, n_head, n_kv_head, head_dim;
    int32_t rope_dim;                    /* leading dims rotated, half-split pairs (i, i + d/2) */
    double rope_theta;
    int32_t gate;                        /* q rows are, per head, head_dim of q then of gate */
    int64_t ctx, max_tok;                /* tokens a session may hold; tokens a chunk may hold */
    mc_norm norm, q_norm, k_norm;        /* input; per head, absent where the family has none */
    mc_tensor q, k, v, o;                /* q: (n_head * head_dim * (1 + gate), hidden) */
    mc_tensor q_bias, k_bias, v_bias, o_bias; /* vectors or absent */
} mc_attn_desc;

int mc_attn_create(mc_engine *e, const mc_attn_desc *d, mc_attn **out, mc_error *err);
void mc_attn_free(mc_attn *a);
/* x (n_tok, hidden) += mixer(norm(x)) for the step's chunk. */
int mc_attn_forward(mc_attn *a, mc_step *st, float *x, mc_error *err);
/* Scratch that blocks of this shape need, tensors apart. Pure; MC_EINVAL: an impossible shape or
 * number of threads. */
int64_t mc_attn_scratch(const mc_attn_desc *d, int32_t threads, mc_error *err);
/* inv_freq (dim/2) and cos, sin (dim/2) at a position, as the attention uses them. */
int mc_rope_table(double theta, int32_t dim, int64_t pos, float *inv_freq, float *c, float *s);

/* ---- gated delta rule ------------------------------------------------------------------------ */

typedef struct mc_delta mc_delta;

/* Gated DeltaNet as in Qwen3.5 (transformers modeling_qwen3_5_moe): conv over [q | k | v]. */
typedef struct mc_delta_desc {
    int32_t layer;                       /* index among the linear layers of the mc_kv */
    int32_t hidden, n_k_head, n_v_head, dk, dv, conv_kernel;
    int64_t max_tok;
    mc_norm norm;                        /* input */
    mc_tensor qkv;                       /* (2 * n_k_head * dk + n_v_head * dv, hidden) */
    mc_tensor z;                         /* (n_v_head * dv, hidden) */
    mc_tensor b, a;                      /* (n_v_head, hidden) */
    mc_tensor conv;                      /* (conv_dim, kernel) */
    mc_tensor a_log, dt_bias;            /* vectors of n_v_head */
    mc_norm out_norm;                    /* vector of dv, then gated by silu(z) */
    mc_tensor out;                       /* (hidden, n_v_head * dv) */
} mc_delta_desc;

int mc_delta_create(mc_engine *e, const mc_delta_desc *d, mc_delta **out, mc_error *err);
void mc_delta_free(mc_delta *d);
int mc_delta_forward(mc_delta *d, mc_step *st, float *x, mc_error *err);
int64_t mc_delta_scratch(const mc_delta_desc *d, mc_error *err);

/* ---- mixture of experts ---------------------------------------------------------------------- */

typedef struct mc_store mc_store;
typedef struct mc_moe mc_moe;

enum { MC_POLICY_AUTO = 0, MC_POLICY_LFU = 1, MC_POLICY_LRU = 2, MC_POLICY_LAYER_LRU = 3,
       MC_POLICY_BELADY = 4 /* replay only: it knows the future */ };

/* The experts of all layers on disk, and the cache of some of them in memory. Layers are bound by
 * mc_moe_create; then mc_store_open sizes the arena once. */
int mc_store_create(mc_engine *e, int32_t n_layer, int32_t n_expert, int32_t top_k, int32_t policy,
                    mc_store **out, mc_error *err);
void mc_store_free(mc_store *s);
/* Memory of one slab that can hold any of the experts: the block-aligned superset of their ranges
 * and of scales beside or between them, which are read with them; *scale_bytes: of all other scales
 * of the n, which are resident, each aligned to 128. Pure; MC_EFORMAT: no such experts. */
int64_t mc_expert_slab(const mc_expert *experts, int64_t n, int64_t *scale_bytes, mc_error *err);
/* Memory that each compute thread takes to multiply by weights of a dtype with rows of `cols`; the
 * most that any weight needs counts. Pure; MC_EINVAL: no such dtype or size. */
int64_t mc_thread_bytes(int32_t dtype, int64_t cols, mc_error *err);
/* slots: experts the cache may hold: in all, or per layer for MC_POLICY_LAYER_LRU. ahead: slabs for
 * experts that the router of the next layer names beforehand (0: no reading ahead; more than 0: the
 * store tries it now and then and does it while it pays). Allocates slots + transit slabs
 * (opts.most, or lanes where given) + ahead; MC_IO_MMAP allocates nothing, counts the slots as
 * memory now and needs one for each expert. Under the hard floor (top_k slots, or 1 per layer):
 * MC_EBUDGET. MC_IO_AUTO measures now. */
int mc_store_open(mc_store *s, int64_t slots, int32_t ahead, mc_error *err);
/* Gives the store a cache of hot experts in VRAM, by which the GPU multiplies: bit for bit what the
 * CPU gives. After the last mc_moe_create and before mc_store_open, which then has MC_TIER_SLABS
 * slabs more (an expert is copied from its slab, by a thread of the tier). When the device fails
 * later (memory, lost) the tier is given up and everything runs on the CPU: stats.gpu_note. A step
 * that waits for it just then ends with MC_ESYS. MC_EINVAL: no layer's experts are of a format that
 * it multiplies, or numbers out of range; MC_EBUDGET: no VRAM for one expert, or no budget for the
 * pinned memory; MC_ENOMEM, MC_ESYS, MC_ERANGE: as mc_gpu_probe. The store stays as it was then,
 * and without a tier where mc_store_open fails. The current CUDA device of the calling thread
 * changes. */
typedef struct mc_tier_opts {
    int32_t device;
    /* calls in the last `window` tokens (1..32) that an expert needs beyond those of the one that
     * leaves for it; one less where a slot is free */
    int32_t after, window;
    int64_t bytes;         /* of VRAM, work space included */
} mc_tier_opts;
enum { MC_TIER_SLABS = 2 };
int mc_store_tier(mc_store *s, const mc_tier_opts *o, mc_error *err);
/* VRAM of a slot for an expert of a layer of n; 0: the GPU does not multiply all of them (other
 * formats, or not one for all). Pure. */
int64_t mc_tier_slot(const mc_expert *experts, int64_t n, mc_error *err);
/* VRAM of the work space beside slots of slot_bytes, for layers of at most this size; *host: pinned
 * memory of this process. Pure. */
int64_t mc_tier_work(int32_t hidden, int32_t width, int32_t top_k, int64_t max_tok,
                     int64_t slot_bytes, int64_t *host, mc_error *err);
/* Changes the capacity of an open store, down to the floor and up to what it was opened with. While
 * a layer is being computed it waits for its end. */
int mc_store_resize(mc_store *s, int64_t slots, mc_error *err);

typedef struct mc_moe_desc {
    int32_t layer;                       /* index among the MoE layers of the store */
    int32_t hidden, n_expert, top_k;     /* n_expert 0: a dense layer, the shared expert alone */
    int32_t width, shared_width;         /* 0: no shared expert */
    int32_t renormalise;                 /* divide the top-k weights by their sum */
    int64_t max_tok;
    mc_norm norm;
    mc_tensor router;                    /* (n_expert, hidden), softmax over all experts */
    mc_expert shared;                    /* resident */
    mc_tensor shared_gate;               /* (1, hidden), sigmoid; absent: weight 1 */
} mc_moe_desc;

/* experts: n_expert of them (read during the call); store NULL and experts NULL for a dense
 * layer. */
int mc_moe_create(mc_engine *e, mc_store *s, const mc_moe_desc *d, const mc_expert *experts,
                  mc_moe **out, mc_error *err);
void mc_moe_free(mc_moe *m);
/* x (n_tok, hidden) += moe(norm(x)). forced: NULL, or (n_tok, top_k) distinct expert ids that take
 * the place of the router's choice (its probabilities still weigh them): replay of a recorded
 * routing. routed: NULL, or room for (n_tok, top_k) expert ids, best first. */
int mc_moe_forward(mc_moe *m, mc_step *st, float *x, const int32_t *forced, int32_t *routed,
                   mc_error *err);
int64_t mc_moe_scratch(const mc_moe_desc *d, mc_error *err);

/* ---- cache policy on a trace, no model ------------------------------------------------------- */

/* Replays n_line lines; line i is layer[i] and ids[start[i] .. start[i+1]), a new token begins
 * where token[i] differs from token[i-1]. slots as in mc_store_open. Experts of a line touch the
 * cache in the order given. hits, misses: totals; line_misses: NULL, or room for those of each
 * line (n_line). */
int mc_policy_replay(int32_t policy, int32_t n_layer, int32_t n_expert, int64_t slots,
                     int64_t n_line, const int32_t *layer, const int64_t *token,
                     const int64_t *start, const int32_t *ids, int64_t *hits, int64_t *misses,
                     int32_t *line_misses, mc_error *err);

/* The same lines through the rule by which experts come into VRAM (after, window: mc_tier_opts):
 * what a line promotes serves from the layer's next line on. line_served, line_loads: NULL, or room
 * for those of each line (n_line). MC_EINVAL: slots under 1, window not 1..32, after not
 * 1..window. */
typedef struct mc_hot_counts {
    int64_t calls, served;    /* experts called; those that the GPU had */
    int64_t loads, evictions; /* copied to VRAM; those that left it for one */
} mc_hot_counts;
int mc_hot_replay(int32_t n_layer, int32_t n_expert, int64_t slots, int32_t after, int32_t window,
                  int64_t n_line, const int32_t *layer, const int64_t *start, const int32_t *ids,
                  mc_hot_counts *out, int32_t *line_served, int32_t *line_loads, mc_error *err);

/* ---- ends of handles, for a binding ---------------------------------------------------------- */

/* Each frees *p and makes it NULL: a destructor that runs no code of the binding's language, where
 * an interrupt would be lost, or the handle. */
void mc_engine_clear(mc_engine **p);
void mc_linear_clear(mc_linear **p);
void mc_head_clear(mc_head **p);
void mc_kv_clear(mc_kv **p);
void mc_session_clear(mc_session **p);
void mc_step_clear(mc_step **p);
void mc_attn_clear(mc_attn **p);
void mc_delta_clear(mc_delta **p);
void mc_store_clear(mc_store **p);
void mc_moe_clear(mc_moe **p);

/* ---- decoding, for tests and tools ----------------------------------------------------------- */

/* CRC-32C of bytes whose CRC is crc (0: none yet) followed by n more. */
uint32_t mc_crc32c(uint32_t crc, const void *data, int64_t n);

/* n unscaled values of a dtype to float32, exactly. */
int mc_decode(int32_t dtype, const void *src, int64_t n, float *dst, mc_error *err);
/* y (n_tok, rows) = x (n_tok, cols) * W^T by the named kernel set (NULL: the best), in the calling
 * thread. t: rows, cols, dtype, scale dtype and block of W, whose files are not looked at: w, scale
 * are its bytes, at any alignment (scale NULL: none). MC_EINVAL, MC_EFORMAT, MC_ENOMEM. */
int mc_gemm(const char *isa, const mc_tensor *t, const void *w, const void *scale, const float *x,
            int64_t n_tok, float *y, mc_error *err);

/* cffi end */
#ifdef __cplusplus
}
#endif
#endif
