// How functions of csrc/ are declared: for the host compiler with one clone of each hot CPU function per instruction
// set, and for nvcc so that the arithmetic of a row is one source for both.
#pragma once

#if defined(MARSRL_CLONES)  // one set for all, by the compiler's flags: tests/processors.py
#elif defined(__x86_64__) && defined(__GNUC__) && !defined(__CUDACC__)
// AVX-512, AVX2 + FMA, baseline; the loader picks once, by cpuid: no variable of the environment changes that. Keep a cloned function free of OpenMP parallel regions:
// the outlined loop body would be compiled for the baseline only.
#define MARSRL_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define MARSRL_CLONES
#endif

#define MARSRL_API extern "C" __attribute__((visibility("default")))
#ifdef __CUDACC__
#define MARSRL_INLINE static __host__ __device__ __forceinline__
#else
#define MARSRL_INLINE static inline __attribute__((always_inline))
#endif
