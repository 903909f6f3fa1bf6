// warp.h for a CPU, for tests: each thread of a block is a fiber, and a warp instruction is a meeting of 32 of them.
//
// 16-bit numbers are stored as float. Without ROUND they are not rounded, so that a kernel can be compared with float32 to
// 1e-6; with ROUND they are rounded as on a GPU. Shared memory begins as NaN. Warps take turns in a random order between
// barriers, so that a missing barrier changes the result.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <tuple>
#include <utility>
#include <vector>

#define DEV inline
#define KERNEL static void
#define __launch_bounds__(...)
struct Pair {
    float x, y;
};
typedef float Half;
typedef float Input;

// ---- rounding

DEV float keep_bits(float x, int bits) {  // nearest, ties to even
#ifdef ROUND
    uint32_t u;
    memcpy(&u, &x, 4);
    if ((u & 0x7f800000u) == 0x7f800000u) return x;
    int drop = 24 - bits;
    u += ((1u << (drop - 1)) - 1) + ((u >> drop) & 1);
    u &= ~((1u << drop) - 1);
    memcpy(&x, &u, 4);
#endif
    return x;
}
DEV float round_half(float x) {
#ifdef ROUND
    x = keep_bits(x, 11);
    if (std::fabs(x) > 65504.f) return std::copysign(INFINITY, x);
    if (std::fabs(x) < 6.1e-5f) return std::nearbyint(x * 16777216.f) / 16777216.f;
#endif
    return x;
}
DEV Pair pack(float lo, float hi) { return {round_half(lo), round_half(hi)}; }
#ifdef FLOAT16
DEV Pair pack_input(float lo, float hi) { return pack(lo, hi); }
#else
DEV Pair pack_input(float lo, float hi) { return {keep_bits(lo, 8), keep_bits(hi, 8)}; }
#endif

// ---- fibers

struct Fiber {
    void* sp;
    std::vector<char> stack;
    bool done;
};
struct Warp {
    int arrived = 0;
    long generation = 0;
    float slots[2][32][16];
};
struct Block {
    int arrived = 0, live = 0;
    long generation = 0;
    bool any = false, result = false;
};
static std::vector<Fiber> fibers;
static std::vector<Warp> warps;
static Block block;
static void* main_sp;
static int current;
static long meetings[1024];
static int block_index[3], grid_size[3];
static unsigned char* shared_memory;
static size_t shared_size;
static void (*body)();
extern "C" void fiber_switch(void** save, void* load);
asm(".text\n.globl fiber_switch\nfiber_switch:\npushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"
    "movq %rsp, (%rdi)\nmovq %rsi, %rsp\npopq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\nret\n");
static void yield() { fiber_switch(&fibers[current].sp, main_sp); }
static void entry() {
    body();
    fibers[current].done = true;
    yield();
    abort();
}
static void meet() {
    Warp& w = warps[current / 32];
    long generation = w.generation;
    meetings[current]++;
    if (++w.arrived == 32) w.arrived = 0, w.generation++;
    else while (w.generation == generation) yield();
}
static bool barrier_or(bool x) {
    long generation = block.generation;
    block.any |= x;
    if (++block.arrived == block.live) block.arrived = 0, block.result = block.any, block.any = false, block.generation++;
    else while (block.generation == generation) yield();
    return block.result;
}
static void barrier() { barrier_or(false); }
static void warp_sync() { meet(); }
DEV void seldom() {}

// ---- instructions

// Of addresses in shared memory; the arrays of a call are at any addresses here.
DEV void check_alignment(const Half* p, int numbers) {
    size_t at = (const unsigned char*)p - shared_memory;
    if (at < shared_size && at % (numbers * sizeof(Half))) fprintf(stderr, "address not aligned\n"), abort();
}
static float (*slots())[16] { return warps[current / 32].slots[meetings[current] & 1]; }
static void multiply(float (&d)[4], const Pair* a, const Pair* b, int depth) {
    float(*s)[16] = slots();
    int lane = current % 32, g = lane / 4, t = lane % 4;
    memcpy(s[lane], a, depth / 2 * sizeof(float));
    memcpy(s[lane] + 8, b, depth / 4 * sizeof(float));
    meet();
    for (int i = 0; i < 4; i++) {
        int row = g + 8 * (i / 2), column = 2 * t + i % 2;
        float sum = 0;
        for (int k = 0; k < depth; k++)
            sum += s[row % 8 * 4 + k % 8 / 2][(k / 8 * 2 + row / 8) * 2 + k % 2] * s[column * 4 + k % 8 / 2][8 + k / 8 * 2 + k % 2];
        d[i] += sum;
    }
}
DEV void matmul(float (&d)[4], const Pair (&a)[4], Pair b0, Pair b1) {
    Pair b[2] = {b0, b1};
    multiply(d, a, b, 16);
}
DEV void matmul_input(float (&d)[4], const Pair (&a)[4], Pair b0, Pair b1) { matmul(d, a, b0, b1); }
DEV void matmul8(float (&d)[4], Pair a0, Pair a1, Pair b0) {
    Pair a[2] = {a0, a1}, b[1] = {b0};
    multiply(d, a, b, 8);
}
static void load_matrices(Pair (&r)[4], const Half* p, bool transposed) {
    float(*s)[16] = slots();
    int lane = current % 32, g = lane / 4, t = lane % 4;
    check_alignment(p, 8);
    memcpy(s[lane], &p, sizeof p);
    meet();
    for (int i = 0; i < 4; i++) {
        auto at = [&](int row, int column) {
            const Half* q;
            memcpy(&q, s[8 * i + row], sizeof q);
            return q[column];
        };
        r[i] = transposed ? Pair{at(2 * t, g), at(2 * t + 1, g)} : Pair{at(g, 2 * t), at(g, 2 * t + 1)};
    }
}
DEV void load_matrices(Pair (&r)[4], const Half* p) { load_matrices(r, p, false); }
DEV void load_transposed(Pair (&r)[4], const Half* p) { load_matrices(r, p, true); }
DEV Pair transpose(Pair a) {
    float(*s)[16] = slots();
    int lane = current % 32, g = lane / 4, t = lane % 4;
    memcpy(s[lane], &a, sizeof a);
    meet();
    return {s[8 * t + g / 2][g % 2], s[8 * t + 4 + g / 2][g % 2]};
}
DEV Pair half_add(Pair a, Pair b) { return pack(a.x + b.x, a.y + b.y); }
DEV Pair half_fma(Pair a, Pair b, Pair c) { return pack(a.x * b.x + c.x, a.y * b.y + c.y); }
DEV Pair half_max(Pair a, Pair b) { return {std::max(a.x, b.x), std::max(a.y, b.y)}; }
DEV Pair half_min(Pair a, Pair b) { return {std::min(a.x, b.x), std::min(a.y, b.y)}; }
DEV float half_lo(Pair a) { return a.x; }
DEV float half_hi(Pair a) { return a.y; }
DEV Pair lows(Pair a, Pair b) { return {a.x, b.x}; }
DEV Pair highs(Pair a, Pair b) { return {a.y, b.y}; }
DEV void add_signs(unsigned& bits, Pair a, int i) {
    bits |= (unsigned)std::signbit(a.x) << (15 - i) | (unsigned)std::signbit(a.y) << (31 - i);
}
DEV bool sign_lo(unsigned bits, int i) { return bits >> (15 - i) & 1; }
DEV bool sign_hi(unsigned bits, int i) { return bits >> (31 - i) & 1; }
DEV float exp2_(float x) { return std::exp2(x); }
DEV float log2_(float x) { return std::log2(x); }
DEV float max_(float a, float b) { return std::max(a, b); }
template <int N> DEV void load(Pair (&r)[N], const Half* p) {
    check_alignment(p, N % 4 ? 2 : 8);
    memcpy(r, p, N * sizeof(Pair));
}
DEV void store(Half* p, Pair a) { check_alignment(p, 2), memcpy(p, &a, sizeof a); }
DEV void store(float* p, float lo, float hi) { check_alignment(p, 2), p[0] = lo, p[1] = hi; }
DEV void store(Half* p, Pair a, Pair b) { check_alignment(p, 4), store(p, a), store(p + 2, b); }
DEV void store(Half* p, const Pair (&a)[4]) { check_alignment(p, 8), memcpy(p, a, sizeof a); }
DEV void load(float (&r)[4], const float* p) { memcpy(r, p, sizeof r); }

#define SHARED_MEMORY
#define THREAD current
#define BLOCK_X block_index[0]
#define BLOCK_Y block_index[1]
#define BLOCK_Z block_index[2]
#define GRID_X grid_size[0]
#define GRID_Y grid_size[1]
#define GRID_Z grid_size[2]

// Run all blocks of a grid.
static void launch(const int* grid, int threads, size_t shared, int seed, void (*kernel)()) {
    std::mt19937 random(seed);
    body = kernel;
    memcpy(grid_size, grid, sizeof grid_size);
    shared_size = shared;
    std::vector<unsigned char> memory(shared + 256);
    shared_memory = memory.data() + (128 - (uintptr_t)memory.data() % 128);
    fibers.resize(threads), warps.resize(threads / 32);
    for (auto& f : fibers) f.stack.resize(1 << 17);
    for (int index = 0; index < grid[0] * grid[1] * grid[2]; index++) {
        block_index[0] = index % grid[0], block_index[1] = index / grid[0] % grid[1], block_index[2] = index / grid[0] / grid[1];
        for (size_t i = 0; i + 4 <= shared; i += 4) {
            float nan = NAN;
            memcpy(shared_memory + i, &nan, 4);
        }
        block = Block();
        block.live = threads;
        for (auto& w : warps) w = Warp();
        for (int i = 0; i < threads; i++) {
            Fiber& f = fibers[i];
            f.done = false, meetings[i] = 0;
            void** sp = (void**)((((uintptr_t)f.stack.data() + f.stack.size()) & ~(uintptr_t)15) - 16);
            *sp = (void*)entry;
            f.sp = sp - 6;
        }
        std::vector<int> order(threads / 32);
        for (size_t i = 0; i < order.size(); i++) order[i] = i;
        for (int left = threads; left;) {
            std::shuffle(order.begin(), order.end(), random);
            for (int w : order)
                for (int turn = 0, mask = random() % 32; turn < 64; turn++)
                    for (int lane = 0; lane < 32; lane++) {
                        current = 32 * w + (lane ^ mask);
                        if (fibers[current].done) continue;
                        fiber_switch(&main_sp, fibers[current].sp);
                        if (fibers[current].done) left--, block.live--;
                    }
        }
    }
}

// A C function `run(pointers, ints, scale, grid, seed)`: the kernel's arguments are the pointers, then the ints, then scale.
static void** run_pointers;
static const int* run_ints;
static float run_scale;
template <class T> T argument(int& pointer, int& integer) {
    if constexpr (std::is_pointer_v<T>) return (T)run_pointers[pointer++];
    else if constexpr (std::is_same_v<T, int>) return run_ints[integer++];
    else return run_scale;
}
template <class... T> void call(void (*kernel)(T...)) {
    int pointer = 0, integer = 0;
    std::tuple<T...> arguments{argument<T>(pointer, integer)...};
    std::apply(kernel, arguments);
}
#define EXPORT(kernel)                                                                                \
    extern "C" void run(void** pointers, const int* ints, float scale, const int* grid, int seed) {   \
        run_pointers = pointers, run_ints = ints, run_scale = scale;                                  \
        launch(grid, THREADS, sizeof(Shared), seed, [] { call(kernel); });                            \
    }
