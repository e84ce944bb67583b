// What kv_copy.cu needs to be C++: its words, and memory that counts what is stored. For tests only.
//
// Nothing is defined that threads could meet by (barriers, shuffles, shared memory): a kernel that needs one does not compile here,
// and must not pretend to have been checked.
#pragma once

#include <stdint.h>
#include <string.h>

typedef uint32_t kv_u32;
typedef uint64_t kv_u64;

struct kv_unit {
    kv_u32 x, y, z, w;
};

struct KvIndex {
    kv_u32 x;
};

extern KvIndex blockIdx, threadIdx, gridDim, blockDim;
extern kv_u64 kv_stores;

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(threads)

static inline kv_unit kv_load(kv_u64 address) {
    kv_unit unit;
    memcpy(&unit, (const void *)address, sizeof unit);
    return unit;
}

static inline void kv_store(kv_u64 address, kv_unit unit) {
    kv_stores++;
    memcpy((void *)address, &unit, sizeof unit);
}

static inline kv_u64 kv_clock() {
    static kv_u64 now;
    return now++;
}
