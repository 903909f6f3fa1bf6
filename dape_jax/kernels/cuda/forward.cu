// DAPE attention in one kernel. A block has R rows and all heads; it walks over tiles of L columns from right to left, so that
// the softmax's reference is right from the first tile on.
//
//   scores   S^T = k q^T, 16 columns x R rows x a quarter of the heads a warp    -> shared memory
//   mixing   16 rows x NC columns a warp; a thread keeps its rows and slots, so that sums and maxima need no exchange
//   values   out += P v, P through shared memory, v from global memory, transposed in registers; out stays in registers
//
// There is no exact maximum: a row and head has a reference, renewed only when a number exceeds it by 2^LIMIT, and then the
// tile is mixed again; in practice once, in the first tile. With few rows a block has a chunk of the tiles, and the caller
// joins the partial results in order (as flash decoding).
#include "tile.h"

constexpr int KP = K + 8;
constexpr int HALVES = (H * (R / 16) + NW - 1) / NW;  // 16 rows of a head, for each warp: WHOLE heads and perhaps HALF a head
constexpr int WHOLE = R == 32 ? HALVES / 2 : HALVES;
constexpr bool HALF = R == 32 && HALVES % 2;
constexpr bool FULL = NW * HALVES == H * (R / 16);    // no warp has fewer
constexpr float UNSET = -3e38f;
#ifdef FLOAT16
constexpr float LIMIT = 14;
#else
constexpr float LIMIT = 30;
#endif

struct Shared {
    ALIGNED Plane scores[2 * NS];
    ALIGNED Input probs[H][R][LP];
    ALIGNED Input q[H][R][KP];
    ALIGNED Half weights[FRAGMENTS ? 2 * FRAGMENTS : 1][64];
    Tables tables;
    float reference[R][SLOTS], alpha[R][SLOTS], scratch[RANGES][R][SLOTS];
};
#ifdef SHARED_BYTES
static_assert(sizeof(Shared) <= SHARED_BYTES, "");
#endif

#define EACH_NUMBER                              \
    _Pragma("unroll") for (int n = 0; n < 2 * NS; n++) \
    _Pragma("unroll") for (int f = 0; f < 2; f++)      \
    _Pragma("unroll") for (int e = 0; e < 2; e++)

// Probabilities of a tile, to shared memory; the largest logit of each row and slot and the sum of its probabilities.
DEV void mix(Shared& s, const Walk& walk, const Left& left, const PerSlot& reference, PerSlot& largest, PerSlot& sum) {
    Weights first(&s.weights[0][0]), second(&s.weights[FRAGMENTS][0]);
    const Half* rows = walk.rows(s.scores);
    Pair score[W][NS][4], hidden[W][C16 ? C16 : 1][4], identity = walk.identity();
    Columns columns;
#pragma unroll
    for (int i = 0; i < W - 1; i++) walk.read(score[i], rows, i);
#pragma unroll
    for (int step = 0; step < NC + W - 1; step++) {
        walk.read(score[(step + W - 1) % W], rows, step + W - 1);
        walk.hidden_channels(hidden[step % W], score, first, s.tables, left, step, [](int, int, Pair) {});
        if (step < W - 1) continue;
        const int j = step - (W - 1);
        float z[2 * NS][4];
        walk.logits(z, score, hidden, second, s.tables, left, reference, identity, j);
        EACH_NUMBER {
            float x = z[n][2 * f + e];
            largest[n][f][e] = max_(largest[n][f][e], x);
            x = exp2_(x);
            sum[n][f][e] += x;
            columns.add(s.probs, walk, n, f, e, j, x);
        }
    }
}

typedef float Out[K / 8][4];  // 16 rows of a head: dims K / 8 (2 t + e) + i of row g + 8 f at [i][2 f + e]

// out += P v of N times 16 rows of a head.
template <int N, bool EDGE>
DEV void multiply_values(Shared& s, Out* out, int head, int r0, const Input* v, int column0, int num_keys) {
    int g = lane() / 4, t = lane() % 4;
#pragma unroll
    for (int step = 0; step < L / 16; step++) {
        Pair x[4][K / 16];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int column = column0 + 2 * t + 16 * step + (i & 1) + 8 * (i >> 1);
            if (EDGE) column = clamp(column, num_keys);
            load(x[i], v + (column * G + head / REPEAT) * K + K / 8 * g);
        }
        Pair p[N][4];
#pragma unroll
        for (int m = 0; m < N; m++) load_matrices(p[m], &s.probs[head][r0 + 16 * m + lane() % 16][16 * step + 8 * (lane() / 16)]);
#pragma unroll
        for (int i = 0; i < K / 8; i++) {
            Pair b0 = i % 2 ? highs(x[0][i / 2], x[1][i / 2]) : lows(x[0][i / 2], x[1][i / 2]);
            Pair b1 = i % 2 ? highs(x[2][i / 2], x[3][i / 2]) : lows(x[2][i / 2], x[3][i / 2]);
#pragma unroll
            for (int m = 0; m < N; m++) matmul_input(out[m][i], p[m], b0, b1);
        }
    }
}

DEV void rescale(Shared& s, Out& out, int head, int r0) {
    int g = lane() / 4;
    float lo = s.alpha[r0 + g][slot_of(head)], hi = s.alpha[r0 + g + 8][slot_of(head)];
#pragma unroll
    for (int i = 0; i < K / 8; i++) out[i][0] *= lo, out[i][1] *= lo, out[i][2] *= hi, out[i][3] *= hi;
}

KERNEL __launch_bounds__(THREADS, 1) dape_forward(
    const Input* q, const Input* k, const Input* v,  // [B, T, H, K], [B, S, G, K]
    const Half* weights,                             // fragments of Conv1, divided by log2 e, and of Conv2, times log2 e
    const Half* knee,                                // [N, C]
    const float* added,                              // [N, SLOTS], times log2 e
    const Half* left_knee, const float* left_added,  // see Left
    const int* first_at,                             // column of the first row
    float* out,                                      // [chunks, B, T, H, K]
    float* lse,                                      // [B, T, H], base 2; of several chunks [chunks, B, T, H, 2], reference and sum
    int num_rows, int num_keys, int num_distances, int window, int tiles_per_chunk, float scale) {
    SHARED_MEMORY;
    Shared& s = *reinterpret_cast<Shared*>(shared_memory);
    int warp = THREAD / 32, g = lane() / 4, t = lane() % 4, batch = BLOCK_Z;
    int first = *first_at, row0 = (GRID_X - 1 - BLOCK_X) * R, position0 = first + STRIDE * row0;  // long rows first
    q += (long)batch * num_rows * H * K, k += (long)batch * num_keys * G * K, v += (long)batch * num_keys * G * K;
    int last_row = (row0 + R < num_rows ? row0 + R : num_rows) - 1;
    int low = position0 - window + 1, tile_low = low > 0 ? low / L : 0, tile_high = (first + STRIDE * last_row) / L + 1;
    tile_low += BLOCK_Y * tiles_per_chunk;
    if (tile_low + tiles_per_chunk < tile_high) tile_high = tile_low + tiles_per_chunk;
    if (tile_low >= tile_high) {  // a chunk without columns
        for (int i = THREAD; i < R * H; i += THREADS)
            if (row0 + i / H < num_rows) {
                float* at = lse + ((((long)BLOCK_Y * GRID_Z + batch) * num_rows + row0 + i / H) * H + i % H) * 2;
                at[0] = MASKED, at[1] = 0;
            }
        return;
    }

    Left left = {left_knee, left_added, row0, num_rows};
    for (int i = THREAD; i < H * R * (K / 8); i += THREADS) {
        int d = i % (K / 8) * 8, h = i / (K / 8) % H, r = i / (K / 8) / H;
        Pair x[4];
        load(x, q + ((long)left.row(r) * H + h) * K + d);
        store(&s.q[h][r][d], x);
    }
    copy_weights(&s.weights[0][0], weights, 2 * FRAGMENTS);
    for (int i = THREAD; i < R * SLOTS; i += THREADS) s.reference[i / SLOTS][i % SLOTS] = UNSET;
    Out whole[WHOLE ? WHOLE : 1][R / 16], half[1];
#pragma unroll
    for (int d = 0; d < K / 8; d++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
#pragma unroll
            for (int h = 0; h < WHOLE; h++)
#pragma unroll
                for (int m = 0; m < R / 16; m++) whole[h][m][d][i] = 0;
            half[0][d][i] = 0;
        }
    // Two warps have WHOLE heads each and share one more.
    const int of_two = 2 * WHOLE + HALF;
    int head0 = HALF ? warp / 2 * of_two + warp % 2 * WHOLE : warp * WHOLE, shared_head = warp / 2 * of_two + 2 * WHOLE, half0 = 16 * (warp & 1);
    auto each_head = [&](auto visit) {  // visit(accumulators, number of 16 rows, head, first row)
#pragma unroll
        for (int h = 0; h < WHOLE; h++)
            if (FULL || head0 + h < H) visit.template operator()<R / 16>(whole[h], head0 + h, 0);
        if (HALF && (FULL || shared_head < H)) visit.template operator()<1>(half, shared_head, half0);
    };
    PerSlot total = {}, reference, largest, sum;
    int r0 = THREAD / 32 % (R / 16) * 16, range = warp / (R / 16);

    for (int tile = tile_high - 1; tile >= tile_low; tile--) {
        int column0 = tile * L;
        barrier();  // q is there; nobody reads the tables of the tile before
        load_tables(s.tables, knee, added, position0 - column0 - L + 1 - AHEAD, num_distances, window);
        int blocks = L / 16 + (tile == tile_high - 1 && HALO > 0);
        for (int item = warp; item < QUARTERS * blocks; item += NW)
            products(
                s.scores, k, [&](int head, int row) { return &s.q[head][row][0]; }, [&](float x, int, int) { return x * scale; },
                item % QUARTERS, item / QUARTERS * 16, column0 - 2 * PAD, position0, num_keys, window);
        barrier();
        Walk walk(column0);
        while (true) {
            EACH_NUMBER {
                float x = s.reference[r0 + g + 8 * f][8 * n + 2 * t + e];
                reference[n][f][e] = x == UNSET ? 0 : x, largest[n][f][e] = MASKED, sum[n][f][e] = 0;
            }
            mix(s, walk, left, reference, largest, sum);
            bool renew = false;
            EACH_NUMBER {
                bool unset = s.reference[r0 + g + 8 * f][8 * n + 2 * t + e] == UNSET;
                renew |= largest[n][f][e] > LIMIT || (largest[n][f][e] > -1e20f && unset);
            }
            if (!barrier_or(renew)) break;
            EACH_NUMBER s.scratch[range][r0 + g + 8 * f][8 * n + 2 * t + e] = largest[n][f][e];
            barrier();
            for (int i = THREAD; i < R * SLOTS; i += THREADS) {
                float most = MASKED, old = s.reference[i / SLOTS][i % SLOTS];
                for (int c = 0; c < RANGES; c++) most = max_(most, s.scratch[c][i / SLOTS][i % SLOTS]);
                bool renewed = most > LIMIT || (old == UNSET && most > -1e20f);
                float now = renewed ? most + (old == UNSET ? 0 : old) : old;
                s.reference[i / SLOTS][i % SLOTS] = now;
                s.alpha[i / SLOTS][i % SLOTS] = old == UNSET ? 1 : exp2_(old - now);
            }
            barrier();
            EACH_NUMBER total[n][f][e] *= s.alpha[r0 + g + 8 * f][8 * n + 2 * t + e];
            each_head([&]<int N>(Out* x, int head, int from) {
#pragma unroll
                for (int m = 0; m < N; m++) rescale(s, x[m], head, from + 16 * m);
            });
        }
        EACH_NUMBER total[n][f][e] += sum[n][f][e];
        keep_halo(s.scores);
        bool is_edge = column0 + L > num_keys;
        each_head([&]<int N>(Out* x, int head, int from) {
            if (is_edge) multiply_values<N, true>(s, x, head, from, v, column0, num_keys);
            else multiply_values<N, false>(s, x, head, from, v, column0, num_keys);
        });
    }
    barrier();
    EACH_NUMBER s.scratch[range][r0 + g + 8 * f][8 * n + 2 * t + e] = total[n][f][e];
    barrier();
    for (int i = THREAD; i < R * SLOTS; i += THREADS) {
        float x = 0, m = s.reference[i / SLOTS][i % SLOTS];
        for (int c = 0; c < RANGES; c++) x += s.scratch[c][i / SLOTS][i % SLOTS];
        if (m == UNSET) m = MASKED;
        s.alpha[i / SLOTS][i % SLOTS] = GRID_Y == 1 ? 1 / x : 1;
        int row = row0 + i / SLOTS, head = head_of(i % SLOTS);
        long at = (((long)BLOCK_Y * GRID_Z + batch) * num_rows + row) * H + head;
        if (head == H || row >= num_rows) continue;
        if (GRID_Y == 1) lse[at] = m + log2_(x);
        else lse[2 * at] = m, lse[2 * at + 1] = x;
    }
    barrier();
    each_head([&]<int N>(Out* x, int head, int from) {
#pragma unroll
        for (int m = 0; m < N; m++) {
            rescale(s, x[m], head, from + 16 * m);
#pragma unroll
            for (int f = 0; f < 2; f++) {
                int row = row0 + from + 16 * m + g + 8 * f;
                if (row >= num_rows) continue;
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    long at = ((((long)BLOCK_Y * GRID_Z + batch) * num_rows + row) * H + head) * K + K / 8 * (2 * t + e);
#pragma unroll
                    for (int i = 0; i < K / 8; i += 2) store(out + at + i, x[m][i][2 * f + e], x[m][i + 1][2 * f + e]);
                }
            }
        }
    });
}
EXPORT(dape_forward)
