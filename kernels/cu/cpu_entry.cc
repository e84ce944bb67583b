// Runs kv_copy.cu on the CPU, one case after another: cases come in on stdin, what became of them goes out on stdout. Numbers
// are in this machine's order. Memory of a case lies between guard pages and costs only what is touched.
//
//   in    sizeof(KvCopy), the KvCopy (`from` and `to` as offsets), bytes of both memories, the pairs, grid, block, seed,
//         patches to write (memory, offset, length, bytes), patches to read (memory, offset, length)
//   out   stores, the bytes of the patches to read

#define KV_ON_CPU
#include "kv_copy.cu"

#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

KvIndex blockIdx, threadIdx, gridDim, blockDim;
kv_u64 kv_stores;

static const kv_u64 GUARD_BYTES = 1 << 16;

static bool take(void *into, size_t bytes) {
    return fread(into, 1, bytes, stdin) == bytes;
}

static kv_u64 number() {
    kv_u64 value;
    if (!take(&value, sizeof value)) {
        exit(4);
    }
    return value;
}

struct Memory {
    char *start;
    char *mapping;
    kv_u64 mapped;

    explicit Memory(kv_u64 bytes) {
        const kv_u64 inner = (bytes + 4095) / 4096 * 4096;
        mapped = inner + 2 * GUARD_BYTES;
        mapping = (char *)mmap(0, mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (mapping == MAP_FAILED || mprotect(mapping + GUARD_BYTES, inner, PROT_READ | PROT_WRITE)) {
            exit(5);
        }
        start = mapping + GUARD_BYTES;
    }

    ~Memory() {
        munmap(mapping, mapped);
    }
};

// Every thread of every block, in an order that the seed shuffles.
static void launch(const KvCopy &copy, kv_u32 grid, kv_u32 block, kv_u64 seed) {
    gridDim.x = grid;
    blockDim.x = block;
    const kv_u64 threads = (kv_u64)grid * block;
    kv_u64 *order = (kv_u64 *)malloc(threads * sizeof *order);
    for (kv_u64 i = 0; i < threads; i++) {
        order[i] = i;
    }
    for (kv_u64 i = threads; i > 1; i--) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        const kv_u64 other = (seed >> 33) % i;
        const kv_u64 swapped = order[i - 1];
        order[i - 1] = order[other];
        order[other] = swapped;
    }
    for (kv_u64 i = 0; i < threads; i++) {
        blockIdx.x = (kv_u32)(order[i] / block);
        threadIdx.x = (kv_u32)(order[i] % block);
        kv_copy(copy);
    }
    free(order);
}

static void run_case() {
    KvCopy copy;
    if (!take(&copy, sizeof copy)) {
        exit(4);
    }
    Memory from(number()), to(number());
    char *starts[] = {from.start, to.start};
    kv_u32 *pairs = (kv_u32 *)malloc(copy.pages * 2 * sizeof *pairs + 1);
    if (!take(pairs, copy.pages * 2 * sizeof *pairs)) {
        exit(4);
    }
    const kv_u64 grid = number(), block = number(), seed = number();
    for (kv_u64 patches = number(); patches > 0; patches--) {
        const kv_u64 memory = number(), offset = number(), bytes = number();
        if (!take(starts[memory] + offset, bytes)) {
            exit(4);
        }
    }
    copy.from += (kv_u64)from.start;
    copy.to += (kv_u64)to.start;
    copy.pairs = (kv_u64)pairs;
    kv_stores = 0;
    launch(copy, (kv_u32)grid, (kv_u32)block, seed);
    fwrite(&kv_stores, 1, sizeof kv_stores, stdout);
    for (kv_u64 patches = number(); patches > 0; patches--) {
        const kv_u64 memory = number(), offset = number(), bytes = number();
        fwrite(starts[memory] + offset, 1, bytes, stdout);
    }
    fflush(stdout);
    free(pairs);
}

int main() {
    kv_u64 size;
    while (take(&size, sizeof size)) {
        if (size != sizeof(KvCopy)) {
            return 3;
        }
        run_case();
    }
    return 0;
}
