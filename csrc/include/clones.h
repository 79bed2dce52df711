// Macros for declarations of functions. MARSRL_CLONES compiles a hot function once per instruction set.
#pragma once

#if defined(MARSRL_CLONES)  // the compiler's flags choose a single instruction set, see tests/README.md
#elif defined(__x86_64__) && defined(__GNUC__)
// Clones for AVX-512, AVX2 + FMA and the baseline; the loader picks one by cpuid alone. Keep OpenMP
// parallel regions out of a cloned function: the outlined loop body would be compiled for the baseline only.
#define MARSRL_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define MARSRL_CLONES
#endif

#define MARSRL_API extern "C" __attribute__((visibility("default")))
#define MARSRL_INLINE static inline __attribute__((always_inline))
