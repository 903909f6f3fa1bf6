// The instructions that the kernels need, for a GPU: PTX and no headers, so that NVRTC compiles the file as it is. On a CPU,
// emulator.h defines the same names.
//
// Fragments of a matmul, d[16 x 8] += a[16 x 16] b[16 x 8], in the 32 lanes of a warp, with g = lane / 4, t = lane % 4:
//   a[0], a[1]  rows g and g + 8, columns 2 t and 2 t + 1      a[2], a[3]  the same rows, columns 2 t + 8 and 2 t + 9
//   b0, b1      rows 2 t and 2 t + 1, and 8 more, column g     d           rows g, g + 8 (2 f), columns 2 t + e: d[2 f + e]
#pragma once
#ifdef __CUDACC__

#define DEV __device__ __forceinline__
#define KERNEL extern "C" __global__ void
typedef unsigned int Pair;     // two 16-bit numbers
typedef unsigned short Half;   // float16
typedef unsigned short Input;  // bfloat16, or float16 with -DFLOAT16

#define MATMUL(name, type)                                                                                              \
    DEV void name(float (&d)[4], const Pair (&a)[4], Pair b0, Pair b1) {                                                \
        asm("mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "       \
            "{%0,%1,%2,%3};"                                                                                            \
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                            \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                                            \
    }
#define PACK(name, type)                                                                                                \
    DEV Pair name(float lo, float hi) {                                                                                 \
        Pair d;                                                                                                         \
        asm("cvt.rn." type "x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo));                                          \
        return d;                                                                                                       \
    }
#ifdef FLOAT16
#define INPUT_TYPE "f16"
#else
#define INPUT_TYPE "bf16"
#endif
MATMUL(matmul, "f16")
MATMUL(matmul_input, INPUT_TYPE)
PACK(pack, "f16")
PACK(pack_input, INPUT_TYPE)

// Of 8 columns: a[16 x 8] b[8 x 8].
DEV void matmul8(float (&d)[4], Pair a0, Pair a1, Pair b0) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(b0));
}

// Four 8 x 8 matrices; lane 8 i + j has the address of row j of matrix i.
#define LOAD_MATRICES(name, transposed)                                                                                 \
    DEV void name(Pair(&r)[4], const Half* p) {                                                                         \
        asm volatile("ldmatrix.sync.aligned.m8n8.x4" transposed ".shared.b16 {%0,%1,%2,%3}, [%4];"                      \
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])                                                   \
                     : "r"((unsigned)__cvta_generic_to_shared(p))                                                       \
                     : "memory");                                                                                       \
    }
LOAD_MATRICES(load_matrices, "")
LOAD_MATRICES(load_transposed, ".trans")

// An 8 x 8 matrix, transposed.
DEV Pair transpose(Pair a) {
    Pair d;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(a));
    return d;
}

#define OF_TWO(name, instruction)                                                                                       \
    DEV Pair name(Pair a, Pair b) {                                                                                     \
        Pair d;                                                                                                         \
        asm(instruction " %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));                                                     \
        return d;                                                                                                       \
    }
OF_TWO(half_add, "add.rn.f16x2")
OF_TWO(half_max, "max.f16x2")
OF_TWO(half_min, "min.f16x2")
DEV Pair half_fma(Pair a, Pair b, Pair c) {
    Pair d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
DEV float half_lo(Pair a) {
    float x;
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l;}" : "=f"(x) : "r"(a));
    return x;
}
DEV float half_hi(Pair a) {
    float x;
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h;}" : "=f"(x) : "r"(a));
    return x;
}
DEV Pair lows(Pair a, Pair b) { return __byte_perm(a, b, 0x5410); }
DEV Pair highs(Pair a, Pair b) { return __byte_perm(a, b, 0x7632); }

// Signs of two numbers, as bits i and 16 + i from the left, i < 16.
DEV void add_signs(unsigned& bits, Pair a, int i) { bits |= (a & 0x80008000u) >> i; }
DEV bool sign_lo(unsigned bits, int i) { return bits >> (15 - i) & 1; }
DEV bool sign_hi(unsigned bits, int i) { return bits >> (31 - i) & 1; }

DEV float exp2_(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEV float log2_(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEV float max_(float a, float b) { return fmaxf(a, b); }

// 2 N numbers in a row; aligned to 16 bytes if N is a multiple of 4, else to 4.
template <int N> DEV void load(Pair (&r)[N], const Half* p) {
    if constexpr (N % 4 == 0) {
#pragma unroll
        for (int i = 0; i < N; i += 4) {
            uint4 x = reinterpret_cast<const uint4*>(p)[i / 4];
            r[i] = x.x, r[i + 1] = x.y, r[i + 2] = x.z, r[i + 3] = x.w;
        }
    } else {
#pragma unroll
        for (int i = 0; i < N; i++) r[i] = reinterpret_cast<const Pair*>(p)[i];
    }
}
DEV void store(Half* p, Pair a) { *reinterpret_cast<Pair*>(p) = a; }
DEV void store(float* p, float lo, float hi) { *reinterpret_cast<float2*>(p) = make_float2(lo, hi); }
DEV void store(Half* p, Pair a, Pair b) { *reinterpret_cast<uint2*>(p) = make_uint2(a, b); }
DEV void store(Half* p, const Pair (&a)[4]) { *reinterpret_cast<uint4*>(p) = make_uint4(a[0], a[1], a[2], a[3]); }
DEV void load(float (&r)[4], const float* p) {
    float4 x = *reinterpret_cast<const float4*>(p);
    r[0] = x.x, r[1] = x.y, r[2] = x.z, r[3] = x.w;
}

DEV void seldom() { asm volatile(""); }  // keeps a branch a branch
DEV void warp_sync() { __syncwarp(); }
DEV void barrier() { __syncthreads(); }
DEV bool barrier_or(bool x) { return __syncthreads_or(x); }
#define SHARED_MEMORY extern __shared__ __align__(128) unsigned char shared_memory[]
#define THREAD ((int)threadIdx.x)
#define BLOCK_X ((int)blockIdx.x)
#define BLOCK_Y ((int)blockIdx.y)
#define BLOCK_Z ((int)blockIdx.z)
#define GRID_X ((int)gridDim.x)
#define GRID_Y ((int)gridDim.y)
#define GRID_Z ((int)gridDim.z)
#define EXPORT(kernel)

#else
#include "emulator.h"
#endif
