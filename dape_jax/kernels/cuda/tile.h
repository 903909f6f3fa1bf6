// What both kernels do with a tile of R rows and L columns: sizes, tables, products of queries and keys, and the features of
// the scores. Compiled with -D of: H, G heads of queries and of keys, K head dim, C channels (0 without convolutions), W taps,
// PAD of them left of a column, STRIDE columns between rows, R, L, and NW warps of a block.
//
// Slots. Heads lie in NS groups of 16 slots, each of four quarters, and a quarter's first QH slots have heads: 12 heads are
// 3 in each quarter. The other slots are zero. 16 slots are the depth of a matmul, 8 are 16 bytes, and 4 are what a warp
// computes at a time.
//
// Mixing. A warp takes 16 rows (the M of a matmul) at ONE column and walks along the columns: a tap of a convolution is the
// same fragment one step earlier or later. Scores and hidden channels are read or computed once, stay in registers, and are
// renamed by unrolling; nothing is shifted or exchanged.
//
// Scores are in base 2 (times log2 e), float16.
#include "warp.h"

constexpr int THREADS = 32 * NW;
constexpr int NS = (H + 15) / 16, SLOTS = 16 * NS, QUARTERS = 4 * NS, QH = (H + QUARTERS - 1) / QUARTERS;
constexpr int REPEAT = H / G;                 // heads that share a key
constexpr int AHEAD = W - 1 - PAD;            // columns that a convolution reads to its right
constexpr int HALO = 2 * (W - 1), LS = L + HALO;  // columns of scores beside a tile, and with it
constexpr int LSP = LS | 1;                   // odd, so that rows are in different banks
constexpr int LP = L + 8;
constexpr int REACH = STRIDE * (R - 1);       // columns between the first and the last row
constexpr int ND = REACH + L + W - 1;         // distances of a tile
constexpr int RANGES = NW * 16 / R, NC = L / RANGES;  // ranges of columns of a warp's mixing
constexpr int C8 = C / 8, C16 = C / 16;
constexpr int CA = C ? C : 16;                // size of arrays, which may not be 0
constexpr int FRAGMENTS = W * C8 * NS * 2;    // registers of the weights of a convolution
constexpr float MASKED = -1e30f;
static_assert(K % 16 == 0 && C % 16 == 0 && R % 16 == 0 && NC % 4 == 0 && HALO <= 16 && H % G == 0, "");
#define ALIGNED alignas(8 * sizeof(Half))

typedef Half Plane[R][LSP][8];                // half of a group of slots: [row][column][slot]
typedef float PerSlot[2 * NS][2][2];          // a thread's numbers of two rows: slot 8 n + 2 t + e of row g + 8 f at [n][f][e]

struct Tables {                               // index i has the distance lowest + i
    ALIGNED Half low[ND][CA], high[ND][CA];   // min(knee, 0) and -max(knee, 0)
    ALIGNED float added[ND][SLOTS];
};

// Corrections of the tables in the first columns; see tables.py. In the order of a thread's registers, as the tables.
struct Left {
    const Half* knee;    // [PAD, T, C]
    const float* added;  // [2 PAD, T, SLOTS]
    int row0, num_rows;
    DEV int row(int r) const { return row0 + r < num_rows ? row0 + r : num_rows - 1; }
};

DEV int head_of(int slot) {
    int head = slot / 4 * QH + slot % 4;
    return slot % 4 < QH && head < H ? head : H;
}
DEV int slot_of(int head) { return head / QH * 4 + head % QH; }
DEV int lane() { return THREAD % 32; }
DEV int clamp(int x, int n) { return x < 0 ? 0 : x < n ? x : n - 1; }

DEV void load_tables(Tables& s, const Half* knee, const float* added, int lowest, int num_distances, int window) {
    Pair minus = pack(-1.f, -1.f), zero = pack(0.f, 0.f);
    for (int i = THREAD; i < ND * C8; i += THREADS) {
        int c = i % CA % C8 * 8, n = i / (C8 ? C8 : 1), at = lowest + n + AHEAD;
        Pair x[4] = {zero, zero, zero, zero}, y[4];
        if (at >= 0 && at < num_distances) load(x, knee + (long)at * C + c);
        for (int j = 0; j < 4; j++) y[j] = half_min(half_fma(x[j], minus, zero), zero), x[j] = half_min(x[j], zero);
        store(&s.low[n][c], x), store(&s.high[n][c], y);
    }
    for (int i = THREAD; i < ND * SLOTS; i += THREADS) {
        int d = lowest + i / SLOTS, at = d + AHEAD;
        s.added[i / SLOTS][i % SLOTS] = d >= 0 && d < window && at < num_distances ? added[(long)at * SLOTS + i % SLOTS] : MASKED;
    }
}

// Products of 16 columns (M of the matmul: their dims come from global memory, 16 bytes at a time, in any order that both
// operands share) and R rows, for a quarter of the heads. finish(x, head, row) of each is stored; 0 where a row does not see
// the column.
template <class Row, class Finish>
DEV void products(Plane* to, const Input* y, Row row_of, Finish finish, int quarter, int s0, int column0, int position0,
                  int num_keys, int window) {
    int g = lane() / 4, t = lane() % 4, column[2];
#pragma unroll
    for (int f = 0; f < 2; f++) column[f] = clamp(column0 + s0 + g + 8 * f, num_keys) * G;
    float x[QH][R / 8][4];
#pragma unroll
    for (int i = 0; i < QH; i++) {
        int head = clamp(quarter * QH + i, H);
        Pair a[2][K / 8];
#pragma unroll
        for (int f = 0; f < 2; f++) load(a[f], y + (column[f] + head / REPEAT) * K + K / 4 * t);
#pragma unroll
        for (int n = 0; n < R / 8; n++) {
            Pair b[K / 8];
            load(b, row_of(head, 8 * n + g) + K / 4 * t);
#pragma unroll
            for (int e = 0; e < 4; e++) x[i][n][e] = 0;
#pragma unroll
            for (int d = 0; d < K / 16; d++) {
                Pair z[4] = {a[0][2 * d], a[1][2 * d], a[0][2 * d + 1], a[1][2 * d + 1]};
                matmul_input(x[i][n], z, b[2 * d], b[2 * d + 1]);
            }
        }
    }
#pragma unroll
    for (int n = 0; n < R / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++)
#pragma unroll
            for (int i = 0; i < QH; i++) {
                bool is_head = QH * QUARTERS == H || quarter * QH + i < H;
                x[i][n][e] = is_head ? finish(x[i][n][e], 4 * quarter + i, 8 * n + 2 * t + (e & 1)) : 0;
            }
    if (column0 + s0 < 0 || column0 + s0 + 15 > position0 || column0 + s0 <= position0 + REACH - window) {
        seldom();
#pragma unroll
        for (int n = 0; n < R / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                int c = column0 + s0 + g + 8 * (e >> 1), d = position0 + STRIDE * (8 * n + 2 * t + (e & 1)) - c;
                bool seen = c >= 0 && d >= 0 && d < window;
#pragma unroll
                for (int i = 0; i < QH; i++) x[i][n][e] = seen ? x[i][n][e] : 0;
            }
    }
    Half* at = &to[quarter >> 1][2 * t][s0 + g][4 * (quarter & 1)];
#pragma unroll
    for (int n = 0; n < R / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            float v[4] = {};
#pragma unroll
            for (int i = 0; i < QH; i++) v[i] = x[i][n][e];
            if (s0 + 16 <= L || s0 + g + 8 * (e >> 1) < LS)
                store(at + ((8 * n + (e & 1)) * LSP + 8 * (e >> 1)) * 8, pack(v[0], v[1]), pack(v[2], v[3]));
        }
}

// Columns 0 .. HALO of the planes become those right of the next tile, which lies to the left.
DEV void keep_halo(Plane* s) {
    for (int i = THREAD; i < 2 * NS * R * HALO; i += THREADS) {
        int n = i % (HALO ? HALO : 1), r = i / (HALO ? HALO : 1) % R, plane = i / (HALO ? HALO : 1) / R;
        Pair x[4];
        load(x, &s[plane][r][n][0]);
        store(&s[plane][r][L + n][0], x);
    }
}

// Weights of a convolution in shared memory, as fragments: 4 registers of a lane are together. They stay in registers if
// there is room.
struct Weights {
    static constexpr bool KEPT = FRAGMENTS <= 32;
    const Half* at;
    Pair kept[KEPT && FRAGMENTS ? FRAGMENTS : 4];
    DEV Weights(const Half* weights) : at(weights + lane() * 8) {
        if constexpr (KEPT)
#pragma unroll
            for (int i = 0; i < FRAGMENTS; i += 4) {
                Pair x[4];
                load(x, at + i * 64);
#pragma unroll
                for (int j = 0; j < 4; j++) kept[i + j] = x[j];
            }
    }
    // d += a times the weights of tap w, outputs 8 n .., inputs 16 c .., of `inputs` times 16.
    DEV void multiply(float (&d)[4], const Pair (&a)[4], int w, int n, int c, int outputs, int inputs) const {
        int i = ((w * outputs + n) * inputs + c) * 2;
        if constexpr (KEPT) matmul(d, a, kept[i], kept[i + 1]);
        else {
            Pair b[2];
            load(b, at + i / 4 * 256 + i % 4 * 2);
            matmul(d, a, b[0], b[1]);
        }
    }
};

DEV void copy_weights(Half* to, const Half* from, int fragments) {
    for (int i = THREAD * 8; i < fragments * 64; i += THREADS * 8) {
        Pair x[4];
        load(x, from + i);
        store(to + i, x);
    }
}

// A warp's walk along NC columns, from `begin` on, of 16 rows, from r0 on. column0, the tile's, is at least -2 AHEAD.
struct Walk {
    int g = lane() / 4, t = lane() % 4, r0 = THREAD / 32 % (R / 16) * 16, begin = THREAD / 32 / (R / 16) * NC, column0;
    bool near_start;  // the first columns of the sequence are in the walk
    DEV Walk(int column0) : column0(column0), near_start(column0 + begin < 2 * PAD + 1) {}
    DEV int entry(int f, int column) const { return STRIDE * (r0 + g + 8 * f) - column + L - 1 + AHEAD; }  // of the tables
    DEV const Half* rows(const Plane* s, int plane = 0) const { return &s[plane + lane() / 16][r0 + lane() % 16][begin][0]; }
    DEV void read(Pair (&x)[NS][4], const Half* rows, int column) const {
#pragma unroll
        for (int i = 0; i < NS; i++) load_matrices(x[i], rows + i * 2 * (sizeof(Plane) / sizeof(Half)) + 8 * column);
    }

    // Hidden channels at one step, change(Conv1(scores), knee) = max(h + min(knee, 0), slope h - max(knee, 0)), as operands
    // of the next matmul. `sign` is called with the sign of the difference.
    template <class Sign>
    DEV void hidden_channels(Pair (&hidden)[C16 ? C16 : 1][4], const Pair (&score)[W][NS][4], const Weights& first, const Tables& s,
                             const Left& left, int step, Sign sign) const {
        Pair slope = pack(0.01f, 0.01f), minus = pack(-1.f, -1.f), zero = pack(0.f, 0.f);
        int column = begin - PAD + step;
        if constexpr (C > 0) {
            float y[CA / 8][4];
#pragma unroll
            for (int n = 0; n < C8; n++) {
#pragma unroll
                for (int e = 0; e < 4; e++) y[n][e] = 0;
#pragma unroll
                for (int w = 0; w < W; w++)
#pragma unroll
                    for (int i = 0; i < NS; i++) first.multiply(y[n], score[(step + w) % W][i], w, n, i, C8, NS);
            }
            Pair low[2][CA / 8], high[2][CA / 8];
#pragma unroll
            for (int f = 0; f < 2; f++) load(low[f], &s.low[entry(f, column)][C / 4 * t]), load(high[f], &s.high[entry(f, column)][C / 4 * t]);
            if (PAD > 0 && step < HALO && near_start && column0 + column >= 0 && column0 + column < PAD) {
                seldom();
#pragma unroll
                for (int f = 0; f < 2; f++) {
                    Pair x[CA / 8];
                    load(x, left.knee + ((long)(column0 + column) * left.num_rows + left.row(r0 + g + 8 * f)) * C + C / 4 * t);
#pragma unroll
                    for (int n = 0; n < C8; n++) {
                        Pair knee = half_fma(high[f][n], minus, half_fma(x[n], minus, low[f][n]));
                        low[f][n] = half_min(knee, zero), high[f][n] = half_min(half_fma(knee, minus, zero), zero);
                    }
                }
            }
            bool exists = step >= PAD + 2 * AHEAD || !near_start || column0 + column >= 0;
#pragma unroll
            for (int n = 0; n < C8; n++)
#pragma unroll
                for (int f = 0; f < 2; f++) {
                    Pair h = pack(y[n][2 * f], y[n][2 * f + 1]), a = half_add(h, low[f][n]), b = half_fma(h, slope, high[f][n]);
                    hidden[n / 2][2 * (n & 1) + f] = exists ? half_max(a, b) : zero;
                    sign(n, f, half_fma(b, minus, a));
                }
        }
    }

    // Input of the softmax at column j of the walk, less `minus`: tables, scores, and Conv2 of the hidden channels.
    DEV void logits(float (&z)[2 * NS][4], const Pair (&score)[W][NS][4], const Pair (&hidden)[W][C16 ? C16 : 1][4],
                    const Weights& second, const Tables& s, const Left& left, const PerSlot& minus, Pair identity, int j) const {
#pragma unroll
        for (int f = 0; f < 2; f++)
#pragma unroll
            for (int n = 0; n < 2 * NS; n += 2) {
                float x[4];
                load(x, &s.added[entry(f, begin + j)][4 * NS * t + 2 * n]);
#pragma unroll
                for (int i = 0; i < 4; i++) z[n + i / 2][2 * f + i % 2] = x[i] - minus[n + i / 2][f][i % 2];
                if (PAD > 0 && j < HALO && near_start && column0 + begin + j >= 0 && column0 + begin + j < 2 * PAD) {
                    seldom();
                    load(x, left.added + ((long)(column0 + begin + j) * left.num_rows + left.row(r0 + g + 8 * f)) * SLOTS + 4 * NS * t + 2 * n);
#pragma unroll
                    for (int i = 0; i < 4; i++) z[n + i / 2][2 * f + i % 2] -= x[i];
                }
            }
#pragma unroll
        for (int n = 0; n < 2 * NS; n++) {
            const Pair(&own)[4] = score[(j + 2 * PAD) % W][n / 2];
            matmul8(z[n], own[2 * (n & 1)], own[2 * (n & 1) + 1], identity);
#pragma unroll
            for (int w = 0; w < W; w++)
#pragma unroll
                for (int c = 0; c < C16; c++) second.multiply(z[n], hidden[(j + w) % W][c], w, n, c, 2 * NS, C16);
        }
    }

    DEV Pair identity() const { return pack(g == 2 * t, g == 2 * t + 1); }
};

// Collects columns of [head][row][column] and stores four at a time.
struct Columns {
    Pair pairs[2 * NS][2][2][2];
    float previous[2 * NS][2][2];
    DEV void add(Input (*to)[R][LP], const Walk& at, int n, int f, int e, int j, float x) {
        if (j % 2 == 0) {
            previous[n][f][e] = x;
            return;
        }
        pairs[n][f][e][j / 2 % 2] = pack_input(previous[n][f][e], x);
        int head = head_of(8 * n + 2 * at.t + e);
        if (j % 4 == 3 && head < H) store(&to[head][at.r0 + at.g + 8 * f][at.begin + j - 3], pairs[n][f][e][0], pairs[n][f][e][1]);
    }
};
