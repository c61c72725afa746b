/* ops_poly.h - the constants of exp and log1p, shared by every kernel set so that none can drift.
 *
 * exp(x): x is clamped to [EXP_LO, EXP_HI] (NaN passes); n = round(x * log2 e) by adding and
 * subtracting EXP_MAGIC; r = x - n * ln 2 in two parts, |r| <= ln(2)/2; p = 1 + r + r^2 q(r), q of
 * degree 4 (minimax, 0.05 ulp); p * 2^(n>>1) * 2^(n - (n>>1)), in two steps since 2^n alone may be
 * subnormal or infinite. EXP_LO gives 0, EXP_HI infinity.
 *
 * log1p(e), 0 <= e <= 1: d = 2e / (2 + e), u = d^2 / 4 <= 1/9, d + d * u * L(u): the atanh series
 * with L of degree 3 (minimax, 0.08 ulp). A subnormal e comes out as it is. */
#ifndef MCI_OPS_POLY_H
#define MCI_OPS_POLY_H

#define EXP_LO (-104.0f)
#define EXP_HI 89.0f
#define EXP_LOG2E 0x1.715476p+0f
#define EXP_MAGIC 0x1.8p+23f
#define EXP_LN2_HI 0x1.63p-1f /* 10 bits: n * LN2_HI is exact */
#define EXP_LN2_LO (-0x1.bd0106p-13f)
#define EXP_C2 0x1.fffffcp-2f
#define EXP_C3 0x1.55549p-3f
#define EXP_C4 0x1.5558f4p-5f
#define EXP_C5 0x1.123a6cp-7f
#define EXP_C6 0x1.6a234ep-10f

#define LOG_L0 0x1.5555p-2f
#define LOG_L1 0x1.99d238p-3f
#define LOG_L2 0x1.1eb9bap-3f
#define LOG_L3 0x1.1ee98cp-3f
#endif
