// One copy for every pair of layouts: rows from strides to strides, for a list of pairs of pages.
//
// Owns the address arithmetic of loads and stores on the device. `KvCopy` is `KvCopyArgs` of src/kernel.rs, field by field; what
// is assumed of it is checked there: 16-byte alignment of everything, counts of at least one, `segments` below 2^32.
//
//   segment  -> (row, segment of the row)      a row is cut into segments of `lanes` * KV_UNROLL units
//   row      -> (layer, part, pair, token, head)   head fastest; a row whose heads lie together counts as one head
//   worker   =  `lanes` neighbouring threads, a power of two up to 32; takes every `workers`-th segment
//   unit     =  16 bytes; a thread loads all its units of a segment before it stores the first, to keep many in flight
//
// Reads and writes pass by the L1 cache: nothing here is read twice. No barrier, no shuffle, no shared memory: the same
// source runs thread by thread on a CPU (cpu_shim.h), where it is checked against an oracle.

#ifdef KV_ON_CPU
#include "cpu_shim.h"
#else
typedef unsigned int kv_u32;
typedef unsigned long long kv_u64;
typedef uint4 kv_unit;

static __device__ __forceinline__ kv_unit kv_load(kv_u64 address) {
    kv_unit unit;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(unit.x), "=r"(unit.y), "=r"(unit.z), "=r"(unit.w)
                 : "l"(address)
                 : "memory");
    return unit;
}

static __device__ __forceinline__ void kv_store(kv_u64 address, kv_unit unit) {
    asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1, %2, %3, %4};"
                 :
                 : "l"(address), "r"(unit.x), "r"(unit.y), "r"(unit.z), "r"(unit.w)
                 : "memory");
}

static __device__ __forceinline__ kv_u64 kv_clock() {
    return clock64();
}
#endif

#define KV_UNIT_BYTES 16
#define KV_UNROLL 8

struct KvStrides {
    kv_u64 part;
    kv_u64 layer;
    kv_u64 page;
    kv_u64 token;
};

struct KvCopy {
    kv_u64 from;         // address of page 0 of part 0, in the first layer to be copied
    kv_u64 to;           // likewise
    kv_u64 pairs;        // address of `pages` pairs of page numbers: L1, L2
    KvStrides from_step; // in bytes
    KvStrides to_step;
    kv_u64 from_head;
    kv_u64 to_head;
    kv_u32 parts;
    kv_u32 layers;
    kv_u32 pages;
    kv_u32 tokens;
    kv_u32 row_units;    // units of a row, or of a head of it
    kv_u32 lanes;        // threads of a worker
    kv_u32 row_segments; // segments of a row
    kv_u32 segments;     // segments of all rows
    kv_u32 from_index;   // which of a pair is copied from: 0 is L1, 1 is L2
    kv_u32 heads;
};

static __device__ __forceinline__ kv_u64 kv_offset(const KvStrides &step, kv_u32 part, kv_u32 layer,
                                                   kv_u32 page, kv_u32 token) {
    return part * step.part + layer * step.layer + page * step.page + token * step.token;
}

extern "C" __global__ void __launch_bounds__(1024) kv_copy(const KvCopy copy) {
    const kv_u32 thread = blockIdx.x * blockDim.x + threadIdx.x;
    const kv_u32 worker = thread / copy.lanes;
    const kv_u32 lane = thread % copy.lanes;
    const kv_u32 workers = gridDim.x * blockDim.x / copy.lanes;
    const kv_u32 *pairs = (const kv_u32 *)copy.pairs;

    // 64 bits: the last step may pass the end of 32.
    for (kv_u64 next = worker; next < copy.segments; next += workers) {
        const kv_u32 segment = (kv_u32)next;
        kv_u32 row = segment / copy.row_segments;
        const kv_u32 first = segment % copy.row_segments * copy.lanes * KV_UNROLL + lane;
        const kv_u32 head = row % copy.heads;
        row /= copy.heads;
        const kv_u32 token = row % copy.tokens;
        row /= copy.tokens;
        const kv_u32 pair = row % copy.pages;
        row /= copy.pages;
        const kv_u32 part = row % copy.parts;
        const kv_u32 layer = row / copy.parts;
        const kv_u32 from_page = pairs[2 * pair + copy.from_index];
        const kv_u32 to_page = pairs[2 * pair + 1 - copy.from_index];
        const kv_u64 from = copy.from + kv_offset(copy.from_step, part, layer, from_page, token) + head * copy.from_head;
        const kv_u64 to = copy.to + kv_offset(copy.to_step, part, layer, to_page, token) + head * copy.to_head;

        kv_unit units[KV_UNROLL];
#pragma unroll
        for (kv_u32 i = 0; i < KV_UNROLL; i++) {
            const kv_u32 unit = first + i * copy.lanes;
            if (unit < copy.row_units) {
                units[i] = kv_load(from + (kv_u64)unit * KV_UNIT_BYTES);
            }
        }
#pragma unroll
        for (kv_u32 i = 0; i < KV_UNROLL; i++) {
            const kv_u32 unit = first + i * copy.lanes;
            if (unit < copy.row_units) {
                kv_store(to + (kv_u64)unit * KV_UNIT_BYTES, units[i]);
            }
        }
    }
}

// What a page of L1 should hold: every word of it follows from the page's seed and the word's place.
struct KvExpected {
    kv_u64 page;
    kv_u64 seed;
};

struct KvRead {
    kv_u64 pool;     // address of page 0 of part 0, in the layer to be read
    kv_u64 expected; // address of `pages` times KvExpected
    kv_u64 wrong;    // address of a number a thread, which grows by the words that are not what they should be
    kv_u64 cycles;   // of waiting before the first read
    KvStrides step;  // in bytes; tokens of a page lie together
    kv_u64 words;    // of 8 bytes, of a page in one layer of one part
    kv_u64 layer;
    kv_u32 parts;
    kv_u32 pages;
};

// A stand-in for compute in tests of order: takes its time, reads all that a layer would read, and counts what should not be there.
extern "C" __global__ void kv_read(const KvRead read) {
    const kv_u32 thread = threadIdx.x + blockIdx.x * blockDim.x;
    const kv_u32 threads = gridDim.x * blockDim.x;
    const kv_u64 start = kv_clock();
    while (kv_clock() - start < read.cycles) {
    }
    const KvExpected *expected = (const KvExpected *)read.expected;
    kv_u64 wrong = 0;
    for (kv_u32 page = 0; page < read.pages; page++) {
        for (kv_u32 part = 0; part < read.parts; part++) {
            const kv_u64 *words =
                (const kv_u64 *)(read.pool + kv_offset(read.step, part, 0, (kv_u32)expected[page].page, 0));
            const kv_u64 first = (part * 4096 + read.layer) * read.words;
            for (kv_u64 word = thread; word < read.words; word += threads) {
                wrong += words[word] != (expected[page].seed + first + word) * 0x9e3779b97f4a7c15u;
            }
        }
    }
    ((kv_u64 *)read.wrong)[thread] += wrong;
}
