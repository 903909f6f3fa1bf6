// The part of the gradient of DAPE attention that mixes heads: everything is computed again, tile by tile, from q, k, v and lse.
// Written are P and dS, from which the caller makes dv = P^T dout, dq = dS k, dk = dS^T q with ordinary matmuls (for all heads
// dk and dv of a tile fit neither into registers nor, added up in the L2 cache, into its bandwidth), and partial sums of the
// gradients of weights and tables, of each block, so that nothing is added in an unknown order.
//
// A block has R rows and walks over tiles of L columns from right to left. With c0 the first column of a tile:
//   1  scores S, and G = dout v^T - delta, of the columns cz .. cz + L, cz = c0 - 2 AHEAD
//   2  hidden channels and P of these columns, as in forward.cu; G becomes dA = P G; hidden channels stay in shared memory
//   3  P is written out; gradient of Conv2's weights: hidden^T dA
//   4  dh = slope Conv2^T(dA); dS = dA + Conv1^T(dh) of the columns c0 .. c0 + L; gradient of Conv1's weights: S^T dh
//   5  dS is written out; gradients of the tables: sums of dA and dh along diagonals
// S, dA and the signs of LeakyReLU in the next columns to the right are kept from the tile before. Tiles of dS are 2 AHEAD
// columns right of those of P, so that each hidden column counts once. A block that begins left of the last tile computes one
// tile more, without output.
//
// Gradients are float16 times a power of two that the caller chooses so that none can overflow.
#include "tile.h"

constexpr int LM = L + W - 1;          // columns whose signs are kept
constexpr int HR = L * C + 8;          // a row of hidden channels
constexpr int TD = REACH + L;          // distances in the gradients of a tile
constexpr int TC = C + SLOTS;
constexpr int ROW_PARTS = R / 16;

struct Shared {
    ALIGNED Plane scores[2 * NS];
    ALIGNED Plane grads[2 * NS];       // G, then dA
    ALIGNED Half hidden[R][HR];        // then dh
    ALIGNED Input probs[H][R][LP];     // then dS
    ALIGNED Half weights[FRAGMENTS ? 4 * FRAGMENTS : 1][64];
    Tables tables;
    ALIGNED float delta[R][SLOTS];
    float lse[R][SLOTS];
    float sums[TD][TC];                // a ring: a distance keeps its place while blocks pass it
    unsigned signs[ROW_PARTS][LM][32];
};
#ifdef SHARED_BYTES
static_assert(sizeof(Shared) <= SHARED_BYTES, "");
#endif

// 2: hidden channels, P and dA.
DEV void mix(Shared& s, const Walk& walk, const Left& left) {
    int part = walk.r0 / 16, g = walk.g, t = walk.t, begin = walk.begin;
    Weights first(&s.weights[0][0]), second(&s.weights[FRAGMENTS][0]);
    const Half *rows = walk.rows(s.scores), *grad_rows = walk.rows(s.grads);
    Pair score[W][NS][4], hidden[W][C16 ? C16 : 1][4], identity = walk.identity();
    PerSlot lse;
#pragma unroll
    for (int n = 0; n < 2 * NS; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) lse[n][i / 2][i % 2] = s.lse[walk.r0 + g + 8 * (i / 2)][8 * n + 2 * t + i % 2];
    Columns columns;
#pragma unroll
    for (int i = 0; i < W - 1; i++) walk.read(score[i], rows, i);
#pragma unroll
    for (int step = 0; step < NC + W - 1; step++) {
        walk.read(score[(step + W - 1) % W], rows, step + W - 1);
        unsigned signs = 0;
        walk.hidden_channels(hidden[step % W], score, first, s.tables, left, step, [&](int n, int f, Pair x) {
            if (step >= W - 1) add_signs(signs, x, 2 * n + f);
        });
        if (step < W - 1) continue;
        const int j = step - (W - 1);
        s.signs[part][begin + j][lane()] = signs;
#pragma unroll
        for (int n = 0; n < C8; n++)
#pragma unroll
            for (int f = 0; f < 2; f++)
                store(&s.hidden[walk.r0 + g + 8 * f][(begin + j) * C + 8 * n + 2 * t], hidden[step % W][n / 2][2 * (n & 1) + f]);
        float z[2 * NS][4];
        walk.logits(z, score, hidden, second, s.tables, left, lse, identity, j);
        Pair grad[NS][4];
        walk.read(grad, grad_rows, j);
        warp_sync();
#pragma unroll
        for (int n = 0; n < 2 * NS; n++)
#pragma unroll
            for (int f = 0; f < 2; f++) {
                Pair d = grad[n / 2][2 * (n & 1) + f];
                float lo = exp2_(z[n][2 * f]), hi = exp2_(z[n][2 * f + 1]);
                columns.add(s.probs, walk, n, f, 0, j, lo), columns.add(s.probs, walk, n, f, 1, j, hi);
                store(&s.grads[n][walk.r0 + g + 8 * f][begin + j][2 * t], pack(lo * half_lo(d), hi * half_hi(d)));
            }
    }
}

// Shared memory [H][R][L] to [H][rows][width] in global memory.
DEV void write_out(Shared& s, Input* x, int row0, int rows, int column, int width) {
    for (int i = THREAD; i < H * R * (L / 8); i += THREADS) {
        int c = i % (L / 8) * 8, r = i / (L / 8) % R, h = i / (L / 8) / R;
        Pair v[4];
        load(v, &s.probs[h][r][c]);
        store(x + ((long)h * rows + row0 + r) * width + column + c, v);
    }
}

// Gradients of the weights: [slots, channels] and [channels, slots] of each tap.
typedef float FirstGradient[W][NS][C8 ? C8 : 1][4];
typedef float SecondGradient[W][C16 ? C16 : 1][2 * NS][4];

// 3: hidden^T dA.
DEV void multiply_second(Shared& s, SecondGradient& out, const Walk& walk) {
    const Half* rows = walk.rows(s.grads);
    const Half* hidden_rows = &s.hidden[walk.r0 + lane() % 8 + lane() / 16 * 8][walk.begin * C + (lane() & 8)];
    Pair grad[W][NS][4];
    auto read = [&](Pair(&to)[NS][4], int column) {
#pragma unroll
        for (int i = 0; i < NS; i++) load_transposed(to[i], rows + i * 2 * (sizeof(Plane) / sizeof(Half)) + 8 * column);
    };
#pragma unroll
    for (int i = 0; i < W - 1; i++) read(grad[i], i);
#pragma unroll
    for (int step = 0; step < NC; step++) {
        read(grad[(step + W - 1) % W], step + W - 1);
#pragma unroll
        for (int c = 0; c < C16; c++) {
            Pair a[4];
            load_transposed(a, hidden_rows + step * C + 16 * c);
#pragma unroll
            for (int w = 0; w < W; w++)
#pragma unroll
                for (int n = 0; n < 2 * NS; n++) {
                    const Pair(&b)[4] = grad[(step + W - 1 - w) % W][n / 2];
                    matmul(out[w][c][n], a, b[2 * (n & 1)], b[2 * (n & 1) + 1]);
                }
        }
    }
}

// 4: dh, dS, S^T dh.
DEV void mix_back(Shared& s, FirstGradient& out, const Walk& walk, int c0, int position0, int window) {
    int part = walk.r0 / 16, g = walk.g, t = walk.t, begin = walk.begin;
    Weights second(&s.weights[2 * FRAGMENTS][0]), first(&s.weights[3 * FRAGMENTS][0]);
    const Half* rows = walk.rows(s.grads);
    const Half* score_rows = &s.scores[lane() / 8 % 2][walk.r0 + lane() % 8 + lane() / 16 * 8][begin + W - 1][0];
    Pair grad[W][NS][4], dh[W][C16 ? C16 : 1][4], score[W][NS][4];
    bool edge = c0 < 0 || c0 + L - 1 > position0 || c0 <= position0 + REACH - window;
    Columns columns;
    auto read_scores = [&](Pair(&to)[NS][4], int column) {
#pragma unroll
        for (int i = 0; i < NS; i++) load_transposed(to[i], score_rows + i * 2 * (sizeof(Plane) / sizeof(Half)) + 8 * column);
    };
#pragma unroll
    for (int i = 0; i < W - 1; i++) walk.read(grad[i], rows, i), read_scores(score[i], i);
#pragma unroll
    for (int step = 0; step < NC + W - 1; step++) {
        walk.read(grad[(step + W - 1) % W], rows, step + W - 1);
        if (step < NC) read_scores(score[(step + W - 1) % W], step + W - 1);
        unsigned signs = s.signs[part][begin + step][lane()];
        float one = c0 - AHEAD + begin + step < 0 ? 0.f : 1.f, slope = 0.01f * one;
#pragma unroll
        for (int n = 0; n < C8; n++) {
            float y[4] = {};
#pragma unroll
            for (int w = 0; w < W; w++)
#pragma unroll
                for (int i = 0; i < NS; i++) second.multiply(y, grad[(step + W - 1 - w) % W][i], w, n, i, C8, NS);
#pragma unroll
            for (int f = 0; f < 2; f++) {
                float lo = y[2 * f] * (sign_lo(signs, 2 * n + f) ? slope : one), hi = y[2 * f + 1] * (sign_hi(signs, 2 * n + f) ? slope : one);
                Pair x = pack(lo, hi);
                dh[step % W][n / 2][2 * (n & 1) + f] = x;
                if (step < NC) store(&s.hidden[walk.r0 + g + 8 * f][(begin + step) * C + 8 * n + 2 * t], x);
            }
            if (step < NC) {
                Pair b0 = transpose(dh[step % W][n / 2][2 * (n & 1)]), b1 = transpose(dh[step % W][n / 2][2 * (n & 1) + 1]);
#pragma unroll
                for (int w = 0; w < W; w++)
#pragma unroll
                    for (int i = 0; i < NS; i++) matmul(out[w][i][n], score[(step + w) % W][i], b0, b1);
            }
        }
        if (step < W - 1) continue;
        const int j = step - (W - 1);
        bool seen[2] = {true, true};
        if (edge)
#pragma unroll
            for (int f = 0; f < 2; f++) {
                int d = position0 + STRIDE * (walk.r0 + g + 8 * f) - (c0 + begin + j);
                seen[f] = d >= 0 && d < window;
            }
        Pair own[NS][4];
        walk.read(own, rows, j + 2 * AHEAD);
#pragma unroll
        for (int n = 0; n < 2 * NS; n++) {
            Pair a = own[n / 2][2 * (n & 1)], b = own[n / 2][2 * (n & 1) + 1];
            float z[4] = {half_lo(a), half_hi(a), half_lo(b), half_hi(b)};
#pragma unroll
            for (int w = 0; w < W; w++)
#pragma unroll
                for (int c = 0; c < C16; c++) first.multiply(z, dh[(j + W - 1 - w) % W][c], w, n, c, 2 * NS, C16);
#pragma unroll
            for (int f = 0; f < 2; f++)
#pragma unroll
                for (int e = 0; e < 2; e++) columns.add(s.probs, walk, n, f, e, j, seen[f] ? z[2 * f + e] : 0);
        }
    }
}

DEV int in_ring(int n, int base) { return n + base < TD ? n + base : n + base - TD; }

// 5: sums along diagonals. A thread owns a distance and eight channels or slots.
DEV void sum_diagonals(Shared& s, int base) {
    for (int i = THREAD; i < TD * (TC / 8); i += THREADS) {
        int c = i % (TC / 8) * 8, n = i / (TC / 8), from = n > L - 1 ? (n - L + STRIDE) / STRIDE : 0, to = n / STRIDE < R - 1 ? n / STRIDE : R - 1;
        float sum[8] = {};
        for (int row = from; row <= to; row++) {
            int column = STRIDE * row - n + L - 1;
            Pair x[4];
            load(x, c < C ? &s.hidden[row][column * C + c] : &s.grads[(c - C) / 8][row][column][0]);
#pragma unroll
            for (int e = 0; e < 4; e++) sum[2 * e] += half_lo(x[e]), sum[2 * e + 1] += half_hi(x[e]);
        }
#pragma unroll
        for (int e = 0; e < 8; e++) s.sums[in_ring(n, base)][c + e] += sum[e];
    }
}

// Sum over warps, in their order, of size numbers: put(total, is_first) adds a warp's to an array in shared memory.
template <class Put> DEV void sum_warps(float* total, float* out, int size, Put put) {
    for (int turn = 0; turn < NW; turn++) {
        barrier();
        if (THREAD / 32 == turn) put([&](int at, float x) { total[at] = (turn ? total[at] : 0) + x; });
    }
    barrier();
    for (int i = THREAD; i < size; i += THREADS) out[i] = total[i];
}

KERNEL __launch_bounds__(THREADS, 1) dape_backward(
    const Input* q, const Input* k, const Input* v, const Input* dout,  // [B, T, H, K], [B, S, G, K]
    const float* lse, const float* delta,                               // [B, T, H]
    const Half* weights,    // fragments: those of forward.cu, then of the transposed Conv2 and Conv1, not scaled
    const Half* knee, const float* added, const Half* left_knee, const float* left_added, const int* first_at,
    const float* grad_scale_at,  // factor of all gradients, a power of two
    Input* probs,           // [B, H, T filled up to R, width]: column c is at c + 2 AHEAD
    Input* d_scores,        // [B, H, T filled up to R, width], of scores times scale
    float* d_tables,        // [B, layers, blocks of rows, width + 2 STRIDE R + L, C + SLOTS]: entry i is that of knee
                            // (times 0.99) at i - L - STRIDE R, and of added at i - L - STRIDE R + AHEAD. A chunk has
                            // REACH distances in common with the next; chunks of one layer have none.
    float* d_first,         // [blocks, W, SLOTS, C]
    float* d_second,        // [blocks, W, C, SLOTS]
    float* d_left_knee,     // [B, PAD, T, C]
    float* d_left_added,    // [B, 2 PAD, T, SLOTS]
    int num_rows, int num_keys, int num_distances, int window, int tiles_per_chunk, int width, float scale) {
    SHARED_MEMORY;
    Shared& s = *reinterpret_cast<Shared*>(shared_memory);
    int warp = THREAD / 32, batch = BLOCK_Z;
    int first = *first_at, row0 = (GRID_X - 1 - BLOCK_X) * R, position0 = first + STRIDE * row0;
    float grad_scale = *grad_scale_at;
    long number = ((long)batch * GRID_Y + BLOCK_Y) * GRID_X + row0 / R;
    int chunk = tiles_per_chunk * L, layers = 1 + (REACH + chunk - 1) / chunk;
    if (layers > GRID_Y) layers = GRID_Y;
    int last_row = (row0 + R < num_rows ? row0 + R : num_rows) - 1, rows = (num_rows + R - 1) / R * R;
    // Hidden columns from PAD before the first visible one have gradients, and a tile's begin AHEAD before it.
    int low = position0 - window + 1 - PAD + AHEAD, tile_low = low > 0 ? low / L : 0;
    int tile_end = (first + STRIDE * last_row + 2 * AHEAD) / L + 1;
    if (tile_end > width / L) tile_end = width / L;
    tile_low += BLOCK_Y * tiles_per_chunk;
    int tile_high = tile_low + tiles_per_chunk < tile_end ? tile_low + tiles_per_chunk : tile_end;
    if (tile_low >= tile_high) return;
    q += (long)batch * num_rows * H * K, dout += (long)batch * num_rows * H * K;
    k += (long)batch * num_keys * G * K, v += (long)batch * num_keys * G * K;
    probs += (long)batch * H * rows * width, d_scores += (long)batch * H * rows * width;
    d_tables += (((long)batch * layers + BLOCK_Y % layers) * GRID_X + row0 / R) * (width + 2 * STRIDE * R + L) * TC;
    d_left_knee += (long)batch * PAD * num_rows * C, d_left_added += (long)batch * 2 * PAD * num_rows * SLOTS;

    Left left = {left_knee, left_added, row0, num_rows};
    copy_weights(&s.weights[0][0], weights, 4 * FRAGMENTS);
    for (int i = THREAD; i < R * SLOTS; i += THREADS) {
        int row = row0 + i / SLOTS, head = head_of(i % SLOTS);
        bool has = row < num_rows && head < H;
        s.lse[i / SLOTS][i % SLOTS] = has ? lse[((long)batch * num_rows + row) * H + head] : row < num_rows ? 0 : -MASKED;
        s.delta[i / SLOTS][i % SLOTS] = has ? delta[((long)batch * num_rows + row) * H + head] : 0;
    }
    for (int i = THREAD; i < TD * TC; i += THREADS) s.sums[i / TC][i % TC] = 0;
    for (int i = THREAD; i < ROW_PARTS * LM * 32; i += THREADS) s.signs[i / 32 / LM][i / 32 % LM][i % 32] = 0;
    Pair zeros[4];
#pragma unroll
    for (int i = 0; i < 4; i++) zeros[i] = pack(0.f, 0.f);
    for (int i = THREAD; i < 2 * NS * R * HALO; i += THREADS)  // right of all keys
        store(&s.grads[i / (HALO ? HALO : 1) / R][i / (HALO ? HALO : 1) % R][L + i % (HALO ? HALO : 1)][0], zeros);
    FirstGradient first_gradient = {};
    SecondGradient second_gradient = {};

    bool whole = tile_high == tile_end;  // else one more tile, dry
    int start = whole ? tile_high - 1 : tile_high, base = 0;
    for (int tile = start; tile >= tile_low; tile--) {
        int c0 = tile * L, cz = c0 - 2 * AHEAD, blocks = L / 16, of_scores = blocks + (tile == start && HALO > 0);
        bool dry = tile >= tile_high;
        barrier();
        load_tables(s.tables, knee, added, position0 - cz - L + 1 - AHEAD, num_distances, window);
        for (int item = warp; item < QUARTERS * (blocks + of_scores); item += NW) {
            int quarter = item % QUARTERS, at = item / QUARTERS;
            if (at < blocks)
                products(
                    s.grads, v, [&](int head, int row) { return dout + ((long)left.row(row) * H + head) * K; },
                    [&](float x, int slot, int row) { return (x - s.delta[row][slot]) * grad_scale; }, quarter, at * 16, cz, position0,
                    num_keys, window);
            else
                products(
                    s.scores, k, [&](int head, int row) { return q + ((long)left.row(row) * H + head) * K; },
                    [&](float x, int, int) { return x * scale; }, quarter, (at - blocks) * 16, cz - 2 * PAD, position0, num_keys, window);
        }
        barrier();
        Walk walk(cz);
        mix(s, walk, left);
        barrier();
        if (!dry) {
            write_out(s, probs, row0, rows, c0, width);
            multiply_second(s, second_gradient, walk);
            barrier();
            mix_back(s, first_gradient, walk, c0, position0, window);
            barrier();
            write_out(s, d_scores, row0, rows, c0, width);
            sum_diagonals(s, base);  // dh is of columns c0 - AHEAD + i, dA of c0 - 2 AHEAD + i
            if (PAD > 0 && cz < 2 * PAD) {
                for (int i = THREAD; i < PAD * R * C; i += THREADS) {
                    int c = i % CA, r = i / CA % R, m = i / CA / R, at = m - (c0 - AHEAD);
                    Pair x;
                    if (at < 0 || at >= L || row0 + r >= num_rows) continue;
                    load(reinterpret_cast<Pair(&)[1]>(x), &s.hidden[r][at * C + c / 2 * 2]);
                    d_left_knee[((long)m * num_rows + row0 + r) * C + c] = -(c % 2 ? half_hi(x) : half_lo(x)) / 0.99f;
                }
                for (int i = THREAD; i < 2 * PAD * R * SLOTS; i += THREADS) {
                    int c = i % SLOTS, r = i / SLOTS % R, m = i / SLOTS / R, at = m - cz;
                    Pair x;
                    if (at < 0 || at >= L || row0 + r >= num_rows) continue;
                    load(reinterpret_cast<Pair(&)[1]>(x), &s.grads[c / 8][r][at][c % 8 / 2 * 2]);
                    d_left_added[((long)m * num_rows + row0 + r) * SLOTS + c] = -(c % 2 ? half_hi(x) : half_lo(x));
                }
            }
            barrier();
            // The first L distances are complete. Entry n has the distance position0 - (c0 - AHEAD) - (L - 1) + n for dh.
            int lowest = position0 - c0 + 2 * AHEAD + 1 + STRIDE * R, complete = tile == tile_low ? TD : L;
            for (int i = THREAD; i < complete * TC; i += THREADS) {
                float& x = s.sums[in_ring(i / TC, base)][i % TC];
                d_tables[(long)(lowest + i / TC) * TC + i % TC] = x;
                x = 0;
            }
            base = in_ring(base, L);
        }
        keep_halo(s.scores), keep_halo(s.grads);
        for (int i = THREAD; i < ROW_PARTS * (W - 1) * 32; i += THREADS) {
            int n = i / 32 % (W > 1 ? W - 1 : 1), part = i / 32 / (W > 1 ? W - 1 : 1);
            s.signs[part][L + n][i % 32] = s.signs[part][n][i % 32];
        }
    }
    if constexpr (C > 0) {
        float* total = reinterpret_cast<float*>(&s.scores);  // with the gradients' planes
        static_assert(sizeof(s.scores) + sizeof(s.grads) >= W * SLOTS * CA * sizeof(float), "");
        int g = lane() / 4, t = lane() % 4;
        sum_warps(total, d_first + number * W * SLOTS * C, W * SLOTS * C, [&](auto add) {
#pragma unroll
            for (int w = 0; w < W; w++)
#pragma unroll
                for (int m = 0; m < NS; m++)
#pragma unroll
                    for (int n = 0; n < C8; n++)
#pragma unroll
                        for (int i = 0; i < 4; i++)
                            add((w * SLOTS + 16 * m + g + 8 * (i >> 1)) * C + 8 * n + 2 * t + (i & 1), first_gradient[w][m][n][i]);
        });
        sum_warps(total, d_second + number * W * C * SLOTS, W * C * SLOTS, [&](auto add) {
#pragma unroll
            for (int w = 0; w < W; w++)
#pragma unroll
                for (int m = 0; m < C16; m++)
#pragma unroll
                    for (int n = 0; n < 2 * NS; n++)
#pragma unroll
                        for (int i = 0; i < 4; i++)
                            add((w * C + 16 * m + g + 8 * (i >> 1)) * SLOTS + 8 * n + 2 * t + (i & 1), second_gradient[w][m][n][i]);
        });
    }
}
EXPORT(dape_backward)
