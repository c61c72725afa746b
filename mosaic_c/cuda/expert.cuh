/* expert.cuh - out = down(silu(gate x) * up x) of many experts and tokens in one launch, with the
 * bits of ops_ref.c. It knows slots (gpu.h draws them), chunks and tiles; gpu.cu makes the chunks
 * and launches.
 *
 * A chunk is up to TOK rows of the call that pass through one expert. Its first phase makes act =
 * silu(gate x) * up x in tiles of MCI_TILE columns of act, its second out = down act in tiles of
 * MCI_TILE columns of out. Blocks draw tickets; every ticket of a first phase comes before any of a
 * second one, so a block that waits for a first phase waits for blocks that run already: however
 * few are resident, there is no deadlock.
 *
 * A row of weights belongs to 8 threads, the lanes of the canonical dot product. Rows past the
 * end of a matrix are the last one once more: every thread reaches every shuffle and barrier.
 *
 * act is written and read in one kernel: plain loads only, no __ldg and no const __restrict__. */
#ifndef MCI_EXPERT_CUH
#define MCI_EXPERT_CUH
#include "../ops_poly.h"
#include "gpu.h"

enum { MCI_THREADS = 256, MCI_OCTETS = MCI_THREADS / 8, MCI_TILE = 64, MCI_TOKENS = 8 };

struct mci_chunk {
    int32_t slot, first, n; /* rows first .. first + n - 1 of the call */
    int32_t done;           /* tiles of the first phase */
};

/* Everything of a launch. Vectors are counted in units of 16 bytes, as they are read. */
struct mci_call {
    const uint8_t *slots;
    int64_t slot_bytes;
    mci_slot_shape shape;
    int32_t pieces[2], vector[2]; /* of hidden, of width columns */
    int32_t tiles[2], chunks;     /* a chunk's tiles of either phase */
    int32_t *ticket;
    mci_chunk *chunk;
    const int32_t *token; /* of each row */
    const uint4 *x;
    uint4 *act;
    float *out;
};

/* Of a block: its ticket, and a tile of act before it is quantised. */
struct mci_block {
    int32_t ticket;
    float tile[MCI_TOKENS][MCI_TILE];
};
static __shared__ mci_block mci_shared;

/* ---- numbers --------------------------------------------------------------------------------- */

static __device__ __forceinline__ float mci_float(uint32_t u) { return __uint_as_float(u); }

/* As dtype.h and dtype.c decode them. */
static __device__ __forceinline__ float mci_e8m0(uint32_t b) {
    return mci_float(b == 0xff ? 0x7fc00000u : b ? b << 23 : 0x00400000u);
}
static __device__ __forceinline__ float mci_half(uint32_t h) {
    const uint32_t sign = (h & 0x8000) << 16, mag = h & 0x7fff;
    if (mag >= 0x7c00) return mci_float(sign | 0x7f800000u | mag << 13);
    return mci_float(sign | mag << 13) * 0x1p+112f;
}
static __device__ __forceinline__ float mci_scale16(int32_t dtype, uint32_t h) {
    return dtype == MC_BF16 ? mci_float(h << 16) : mci_half(h);
}

/* As exp, sigmoid and silu of ops_ref.c. */
static __device__ float mci_exp(float x) {
    x = EXP_HI < x ? EXP_HI : x;
    x = EXP_LO > x ? EXP_LO : x;
    const float z = fmaf(x, EXP_LOG2E, EXP_MAGIC);
    const int32_t n = (int32_t)(__float_as_uint(z) - __float_as_uint(EXP_MAGIC)), half = n >> 1;
    const float nf = z - EXP_MAGIC;
    const float r = fmaf(nf, -EXP_LN2_LO, fmaf(nf, -EXP_LN2_HI, x));
    float p = EXP_C6;
    p = fmaf(p, r, EXP_C5);
    p = fmaf(p, r, EXP_C4);
    p = fmaf(p, r, EXP_C3);
    p = fmaf(p, r, EXP_C2);
    p = fmaf(p, r, 1.0f);
    p = fmaf(p, r, 1.0f);
    return p * mci_float((uint32_t)(half + 127) << 23) *
           mci_float((uint32_t)(n - half + 127) << 23);
}
static __device__ float mci_silu(float x) {
    const float e = mci_exp(-fabsf(x));
    return x * ((__float_as_uint(x) >> 31 ? e : 1.0f) / (1.0f + e));
}

/* ---- rows ------------------------------------------------------------------------------------ */

/* Two rows of weights as one octet reads them: data at the lane's 16 bytes of the first piece. */
struct mci_rows {
    const uint4 *data[2];
    const uint8_t *scale[2];
};
/* TOK vectors of activations: their beginnings from x, n of them in use. */
template <int TOK> struct mci_vectors {
    const uint4 *x;
    int32_t at[TOK], n;
};

static __device__ __forceinline__ uint32_t mci_word(const uint4 &v, int i) {
    return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

/* The bits of the scales of a piece: 1 of FP8, 8 of MXFP4, 4 of int4. */
template <int FORMAT>
static __device__ __forceinline__ uint4 mci_scales(int32_t dtype, const uint8_t *s, int p) {
    uint4 v = {0, 0, 0, 0};
    if (FORMAT == MC_F8E4M3) {
        v.x = dtype == MC_F32    ? ((const uint32_t *)s)[p]
              : dtype == MC_BF16 ? ((const uint16_t *)s)[p]
                                 : s[p];
    } else if (FORMAT == MC_INT4 && dtype == MC_F32) {
        v = ((const uint4 *)s)[p];
    } else {
        const uint2 half = ((const uint2 *)s)[p];
        v.x = half.x;
        v.y = half.y;
    }
    return v;
}

/* The words of 16 bytes one after the other, without an index that would have to be a constant. */
static __device__ __forceinline__ void mci_next(uint4 &v) {
    const uint32_t first = v.x;
    v.x = v.y;
    v.y = v.z;
    v.z = v.w;
    v.w = first;
}

/* acc and 4 products more, of columns 8 apart. */
static __device__ __forceinline__ float mci_four(const float f[4], const float4 &x, float acc) {
    acc = fmaf(f[0], x.x, acc);
    acc = fmaf(f[1], x.y, acc);
    acc = fmaf(f[2], x.z, acc);
    return fmaf(f[3], x.w, acc);
}

/* One piece of two rows of FP8: 16 weights of each. A byte s eeee mmm in bits 31 and 26..20 is the
 * weight without 2^120, and the product by that is exact, for subnormals too. */
template <int TOK>
static __device__ __forceinline__ void mci_piece_f8(uint4 w[2], const float scale[2],
                                                    const mci_vectors<TOK> &v, int p, int lane,
                                                    float tot[2][TOK]) {
    float acc[2][TOK];
#pragma unroll
    for (int t = 0; t < TOK; t++) acc[0][t] = acc[1][t] = 0.0f;
#pragma unroll(TOK == 1 ? 4 : 1)
    for (int j = 0; j < 4; j++) {
        float f[2][4];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const uint32_t word = w[i / 4].x << (24 - i % 4 * 8);
            f[i / 4][i % 4] = mci_float((uint32_t)((int32_t)word >> 4) & 0x87f00000u) * 0x1p+120f;
        }
#pragma unroll
        for (int t = 0; t < TOK; t++) {
            if (t && t >= v.n) break;
            const float4 x = ((const float4 *)v.x)[v.at[t] + (p * 4 + j) * 8 + lane];
#pragma unroll
            for (int r = 0; r < 2; r++) acc[r][t] = mci_four(f[r], x, acc[r][t]);
        }
        mci_next(w[0]);
        mci_next(w[1]);
    }
#pragma unroll
    for (int t = 0; t < TOK; t++)
#pragma unroll
        for (int r = 0; r < 2; r++) tot[r][t] = fmaf(acc[r][t], scale[r], tot[r][t]);
}

/* The same of MXFP4: 8 blocks of 4 weights, of which `blocks` are there. One that is not must be
 * left out: fma(0, scale, -0) is +0. */
template <int TOK>
static __device__ __forceinline__ void mci_piece_f4(uint4 w[2], uint4 s[2],
                                                    const mci_vectors<TOK> &v, int p, int blocks,
                                                    int lane, float tot[2][TOK]) {
#pragma unroll(TOK == 1 ? 4 : 1)
    for (int j = 0; j < 8; j += 2) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            if (j + half >= blocks) break;
            float f[2][4], scale[2];
#pragma unroll
            for (int i = 0; i < 8; i++) { /* s ee m in bits 31 and 24..22, without 2^126 */
                const uint32_t word = w[i / 4].x << (28 - half * 16 - i % 4 * 4);
                f[i / 4][i % 4] =
                    mci_float((uint32_t)((int32_t)word >> 6) & 0x81c00000u) * 0x1p+126f;
            }
#pragma unroll
            for (int r = 0; r < 2; r++) scale[r] = mci_e8m0(s[r].x >> half * 8 & 0xff);
#pragma unroll
            for (int t = 0; t < TOK; t++) {
                if (t && t >= v.n) break;
                const float4 x = ((const float4 *)v.x)[v.at[t] + (p * 8 + j + half) * 8 + lane];
#pragma unroll
                for (int r = 0; r < 2; r++)
                    tot[r][t] = fmaf(mci_four(f[r], x, 0.0f), scale[r], tot[r][t]);
            }
        }
#pragma unroll
        for (int r = 0; r < 2; r++) {
            mci_next(w[r]);
            s[r].x = s[r].x >> 16 | s[r].y << 16;
            s[r].y >>= 16;
        }
    }
}

/* The same of int4: a lane has half a group of 64, 4 groups a piece, of which `groups` are there.
 * Lane t keeps the sums of vector t alone, as tot[r][0]. */
template <int TOK>
static __device__ __forceinline__ void
mci_piece_i4(const uint4 w[2], const uint4 s[2], int32_t dtype, const mci_vectors<TOK> &v, int p,
             int pieces, int groups, int lane, float tot[2][TOK]) {
    float scale[2][4];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const uint4 &bits = s[i / 4];
        scale[i / 4][i % 4] =
            dtype == MC_F32 ? mci_float(mci_word(bits, i % 4))
                            : mci_scale16(dtype, mci_word(bits, i % 4 / 2) >> i % 2 * 16 & 0xffff);
    }
#pragma unroll
    for (int t = 0; t < TOK; t++) {
        if (t && t >= v.n) break;
        const uint4 *x = v.x + v.at[t];
        const uint4 q0 = x[p * 16 + lane * 2], q1 = x[p * 16 + lane * 2 + 1];
        const float4 xs = ((const float4 *)x)[pieces * 16 + p];
        const int32_t q8 = ((const int32_t *)(x + pieces * 17))[p * 4 + lane / 2];
        const float xscale[4] = {xs.x, xs.y, xs.z, xs.w};
#pragma unroll
        for (int r = 0; r < 2; r++) {
            int32_t sum = 0;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const uint4 &q = i < 2 ? q0 : q1;
                const uint32_t word = mci_word(w[r], i);
                sum = __dp4a((int32_t)(word & 0x0f0f0f0fu), (int32_t)mci_word(q, i % 2 * 2), sum);
                sum = __dp4a((int32_t)(word >> 4 & 0x0f0f0f0fu),
                             (int32_t)mci_word(q, i % 2 * 2 + 1), sum);
            }
            sum += __shfl_xor_sync(0xffffffffu, sum, 1);
            const float exact = (float)(sum - q8);
            float mine = tot[r][0];
#pragma unroll
            for (int g = 0; g < 4; g++) {
                const float one = __shfl_sync(0xffffffffu, exact, g * 2, 8);
                if (g < groups) mine = fmaf(one, scale[r][g] * xscale[g], mine);
            }
            if (lane == t) tot[r][0] = mine;
        }
    }
}

/* ((t0+t4)+(t2+t6)) + ((t1+t5)+(t3+t7)) of each dot[r][t], t < n, into every lane. */
template <int TOK> static __device__ __forceinline__ void mci_tree(int n, float dot[2][TOK]) {
#pragma unroll
    for (int i = 0; i < 2 * TOK; i++) {
        if (i / 2 && i / 2 >= n) break;
        float &d = dot[i % 2][i / 2];
        d += __shfl_xor_sync(0xffffffffu, d, 4);
        d += __shfl_xor_sync(0xffffffffu, d, 2);
        d += __shfl_xor_sync(0xffffffffu, d, 1);
    }
}

/* dot[r][t] = row r times vector t; mci_own gives it to lane t. Weights of DEPTH pieces are on
 * their way at a time, which is what keeps memory busy: as many as registers allow without spills.
 */
template <int FORMAT, int TOK>
static __device__ __forceinline__ void mci_dot(const mci_call &c, const mci_rows &rows,
                                               const mci_vectors<TOK> &v, int pieces, int cols,
                                               int lane, float dot[2][TOK]) {
    const int DEPTH = TOK > 1 ? 2 : FORMAT == MC_INT4 ? 3 : 4;
    const int dtype = c.shape.scale_dtype;
#pragma unroll
    for (int t = 0; t < TOK; t++) dot[0][t] = dot[1][t] = 0.0f;
    for (int p0 = 0; p0 < pieces; p0 += DEPTH) {
        uint4 w[DEPTH][2], s[DEPTH][2];
#pragma unroll
        for (int i = 0; i < 2 * DEPTH; i++) {
            if (p0 + i / 2 >= pieces) break;
            w[i / 2][i % 2] = __ldcs(rows.data[i % 2] + (p0 + i / 2) * 8);
            s[i / 2][i % 2] = mci_scales<FORMAT>(dtype, rows.scale[i % 2], p0 + i / 2);
        }
#pragma unroll
        for (int i = 0; i < DEPTH; i++) {
            const int p = p0 + i;
            if (p >= pieces) break;
            if (FORMAT == MC_F8E4M3) {
                float scale[2];
#pragma unroll
                for (int r = 0; r < 2; r++)
                    scale[r] = dtype == MC_F32    ? mci_float(s[i][r].x)
                               : dtype == MC_BF16 ? mci_float(s[i][r].x << 16)
                                                  : mci_e8m0(s[i][r].x);
                mci_piece_f8<TOK>(w[i], scale, v, p, lane, dot);
            } else if (FORMAT == MC_F4E2M1) {
                mci_piece_f4<TOK>(w[i], s[i], v, p, (cols + 31) / 32 - p * 8, lane, dot);
            } else {
                mci_piece_i4<TOK>(w[i], s[i], dtype, v, p, pieces, (cols + 63) / 64 - p * 4, lane,
                                  dot);
            }
        }
    }
    if (FORMAT != MC_INT4) mci_tree<TOK>(v.n, dot);
}

/* ---- phases ---------------------------------------------------------------------------------- */

/* Rows `a` of matrix i and `b` of matrix j. */
template <int FORMAT>
static __device__ __forceinline__ mci_rows mci_rows_of(const mci_call &c, const mci_chunk &k, int i,
                                                       int a, int j, int b, int pieces, int lane) {
    const uint8_t *slot = c.slots + k.slot * c.slot_bytes;
    const int size = c.shape.scale_dtype == MC_F32 ? 4 : c.shape.scale_dtype == MC_F8E8M0 ? 1 : 2;
    const int rows = FORMAT == MC_F8E4M3 ? 128 : 1;
    const int64_t row = (FORMAT == MC_F8E4M3 ? 1 : FORMAT == MC_F4E2M1 ? 8 : 4) * size * pieces;
    mci_rows r;
    r.data[0] = (const uint4 *)(slot + c.shape.data[i]) + (int64_t)a * pieces * 8 + lane;
    r.data[1] = (const uint4 *)(slot + c.shape.data[j]) + (int64_t)b * pieces * 8 + lane;
    r.scale[0] = slot + c.shape.scale[i] + a / rows * row;
    r.scale[1] = slot + c.shape.scale[j] + b / rows * row;
    return r;
}

/* The product that lane t writes: that of vector t. */
template <int FORMAT, int TOK>
static __device__ __forceinline__ float mci_own(const float dot[TOK], int lane) {
    float own = dot[0];
#pragma unroll
    for (int t = 1; t < TOK; t++)
        if (FORMAT != MC_INT4 && lane == t) own = dot[t];
    return own;
}

/* Where column c of an f32 vector lies. */
static __device__ __forceinline__ int mci_place(int c) {
    return (c & ~31) + c % 8 * 4 + c % 32 / 8;
}

/* One group of one token, as quantise of ops_ref.c: by a warp, two columns a lane. */
static __device__ void mci_quantise(const float *tile, uint4 *vector, int pieces, int group,
                                    int lane) {
    const float v[2] = {tile[lane], tile[lane + 32]};
    /* bits of absolute values order as the values do, and NaN above them all */
    uint32_t most = max(__float_as_uint(v[0]) & 0x7fffffffu, __float_as_uint(v[1]) & 0x7fffffffu);
    for (int i = 16; i; i >>= 1) most = max(most, __shfl_xor_sync(0xffffffffu, most, i));
    const bool number = most < 0x7f800000u;
    float s = mci_float(most) / 127.0f;
    if (s < 1e-12f) s = 1e-12f;
    int8_t *q = (int8_t *)vector + group * MCI_TILE;
    int32_t sum = 0;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int col = lane + 32 * i;
        const int32_t one = number ? (int32_t)fminf(fmaxf(rintf(v[i] / s), -127.0f), 127.0f) : 0;
        q[(col & -8) + col % 2 * 4 + col % 8 / 2] = (int8_t)one;
        sum += one;
    }
    for (int i = 16; i; i >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, i);
    if (lane) return;
    ((float *)(vector + pieces * 16))[group] = number ? s : mci_float(0x7fc00000u);
    ((int32_t *)(vector + pieces * 17))[group] = 8 * sum;
}

/* What act has beyond its columns, up to a whole piece; of int4 whole groups, as the last one with
 * columns is a tile's. */
template <int FORMAT>
static __device__ __forceinline__ void mci_pad(const mci_call &c, const mci_chunk &k) {
    const int tid = (int)threadIdx.x, pieces = c.pieces[1];
    for (int t = 0; t < k.n; t++) {
        uint4 *act = c.act + (int64_t)(k.first + t) * c.vector[1];
        if (FORMAT == MC_INT4) {
            const int group = c.tiles[0] + tid / 16; /* 16 words of q each */
            if (group >= pieces * 4) continue;
            ((int32_t *)act)[group * 16 + tid % 16] = 0;
            ((int32_t *)(act + pieces * 16))[group] = 0;
            ((int32_t *)(act + pieces * 17))[group] = 0;
        } else {
            const int padded = pieces * (FORMAT == MC_F8E4M3 ? 128 : 256);
            for (int col = c.shape.width + tid; col < padded; col += MCI_THREADS)
                ((float *)act)[mci_place(col)] = -0.0f;
        }
    }
}

/* A tile of act. */
template <int FORMAT, int TOK>
static __device__ __forceinline__ void mci_gate_up(const mci_call &c, const mci_chunk &k,
                                                   int tile) {
    const int tid = (int)threadIdx.x, lane = tid % 8, width = c.shape.width;
    mci_vectors<TOK> v;
    v.x = c.x;
    v.n = k.n;
#pragma unroll
    for (int t = 0; t < TOK; t++) v.at[t] = c.token[k.first + (t < k.n ? t : 0)] * c.vector[0];
    for (int pass = 0; pass < MCI_TILE / MCI_OCTETS; pass++) {
        const int col = pass * MCI_OCTETS + tid / 8, row = tile * MCI_TILE + col;
        const int there = row < width ? row : width - 1;
        float dot[2][TOK];
        mci_dot<FORMAT, TOK>(c, mci_rows_of<FORMAT>(c, k, 0, there, 1, there, c.pieces[0], lane), v,
                             c.pieces[0], c.shape.hidden, lane, dot);
        if (lane >= k.n) continue; /* a chunk has at most as many tokens as an octet lanes */
        const float y =
            mci_silu(mci_own<FORMAT, TOK>(dot[0], lane)) * mci_own<FORMAT, TOK>(dot[1], lane);
        if (FORMAT == MC_INT4) {
            mci_shared.tile[lane][col] = row < width ? y : 0.0f;
        } else if (row < width) {
            ((float *)(c.act + (int64_t)(k.first + lane) * c.vector[1]))[mci_place(row)] = y;
        }
    }
    if (FORMAT == MC_INT4) {
        __syncthreads();
        const int t = tid / 32;
        if (t < k.n)
            mci_quantise(mci_shared.tile[t], c.act + (int64_t)(k.first + t) * c.vector[1],
                         c.pieces[1], tile, tid % 32);
    }
    if (tile == c.tiles[0] - 1) mci_pad<FORMAT>(c, k);
}

/* A tile of out. */
template <int FORMAT, int TOK>
static __device__ __forceinline__ void mci_down(const mci_call &c, const mci_chunk &k, int tile) {
    const int tid = (int)threadIdx.x, lane = tid % 8, last = c.shape.hidden - 1;
    const int row = tile * MCI_TILE + tid / 8;
    mci_vectors<TOK> v;
    v.x = c.act;
    v.n = k.n;
#pragma unroll
    for (int t = 0; t < TOK; t++) v.at[t] = (k.first + (t < k.n ? t : 0)) * c.vector[1];
    float dot[2][TOK];
    mci_dot<FORMAT, TOK>(c,
                         mci_rows_of<FORMAT>(c, k, 2, min(row, last), 2,
                                             min(row + MCI_OCTETS, last), c.pieces[1], lane),
                         v, c.pieces[1], c.shape.width, lane, dot);
    if (lane >= k.n) return;
    float *out = c.out + (int64_t)(k.first + lane) * (last + 1) + row;
    if (row <= last) out[0] = mci_own<FORMAT, TOK>(dot[0], lane);
    if (row + MCI_OCTETS <= last) out[MCI_OCTETS] = mci_own<FORMAT, TOK>(dot[1], lane);
}

/* The chunk, phase and tile of a ticket. */
struct mci_task {
    mci_chunk *chunk;
    int phase, tile;
};
static __device__ __forceinline__ mci_task mci_task_of(const mci_call &c, int ticket) {
    const int firsts = c.chunks * c.tiles[0];
    mci_task t;
    t.phase = ticket < firsts ? 0 : 1;
    t.tile = t.phase ? ticket - firsts : ticket;
    t.chunk = c.chunk + t.tile / c.tiles[t.phase];
    t.tile %= c.tiles[t.phase];
    return t;
}

template <int FORMAT, int TOK>
static __global__ void __launch_bounds__(MCI_THREADS, 2) mci_experts(const mci_call c) {
    const bool first = threadIdx.x == 0;
    if (first) mci_shared.ticket = atomicAdd(c.ticket, 1);
    __syncthreads();
    while (mci_shared.ticket < c.chunks * (c.tiles[0] + c.tiles[1])) {
        /* the next one now, as the answer takes a while; it lies behind this one, so nobody whose
         * turn comes before waits for it */
        int next = 0;
        if (first) next = atomicAdd(c.ticket, 1);
        const mci_task task = mci_task_of(c, mci_shared.ticket);
        mci_chunk k;
        k.slot = task.chunk->slot;
        k.first = task.chunk->first;
        k.n = task.chunk->n;
        if (task.phase == 0) {
            mci_gate_up<FORMAT, TOK>(c, k, task.tile);
        } else {
            if (first) {
                while (*(volatile int32_t *)&task.chunk->done != c.tiles[0]) __nanosleep(100);
                __threadfence();
            }
            __syncthreads(); /* act of other blocks is there */
            mci_down<FORMAT, TOK>(c, k, task.tile);
        }
        __syncthreads(); /* nobody needs the ticket or the tile any more; act is written */
        if (first) {
            /* once more: what lives through the products above costs registers there */
            const mci_task done = mci_task_of(c, *(volatile int32_t *)&mci_shared.ticket);
            if (done.phase == 0) {
                __threadfence();
                atomicAdd(&done.chunk->done, 1);
            }
            mci_shared.ticket = next;
        }
        __syncthreads();
    }
}
#endif
