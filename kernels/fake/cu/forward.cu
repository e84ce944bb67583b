// A small model for engines in tests and examples: every word that it gives follows from every byte of the KV that it reads. Compiled
// behind kv_copy.cu, whose names it uses; its numbers are those of src/model.rs.
//
//   state of a token    layer 0: of the token and its place; then of the state before and of all KV of the layer before, its own included
//   row                 every word of it follows from the state
//   output              the state behind the last layer
//
// A layer is two kernels: `forward_rows` writes the rows of the new tokens, `forward_read` reads the rows of all tokens up to each of
// them. No barrier, no shuffle, no shared memory: see kv_copy.cu.

#define FORWARD_GOLDEN 0x9e3779b97f4a7c15u

// `KvForward` of src/forward.rs, field by field.
struct KvForward {
    kv_u64 pool;     // address of page 0 of part 0, in this layer
    kv_u64 pages;    // address of the page numbers of the sequence
    kv_u64 tokens;   // address of the new tokens
    kv_u64 output;   // address of a number for each new token
    kv_u64 states;   // address of the states of the new tokens before this layer
    kv_u64 next;     // likewise, behind it
    kv_u64 sums;     // address of `lanes` sums for each new token, of the layer before
    KvStrides step;  // in bytes
    kv_u64 layer;
    kv_u32 parts;
    kv_u32 words;    // of 8 bytes, of a row
    kv_u32 page_tokens;
    kv_u32 first;    // the place of the first new token
    kv_u32 count;    // new tokens
    kv_u32 lanes;    // threads for each new token, a multiple of `words`
};

static __device__ __forceinline__ kv_u64 forward_mixed(kv_u64 x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

static __device__ __forceinline__ kv_u64 forward_row(const KvForward &pass, kv_u32 part, kv_u64 at) {
    const kv_u32 page = ((const kv_u32 *)pass.pages)[at / pass.page_tokens];
    return pass.pool + kv_offset(pass.step, part, 0, page, (kv_u32)(at % pass.page_tokens));
}

// The state of a new token before this layer.
static __device__ __forceinline__ kv_u64 forward_state(const KvForward &pass, kv_u32 token) {
    if (pass.layer == 0) {
        return forward_mixed(((const kv_u64 *)pass.tokens)[token] * FORWARD_GOLDEN + pass.first + token);
    }
    const kv_u64 *sums = (const kv_u64 *)pass.sums + (kv_u64)token * pass.lanes;
    kv_u64 sum = ((const kv_u64 *)pass.states)[token];
    for (kv_u32 lane = 0; lane < pass.lanes; lane++) {
        sum += sums[lane];
    }
    return forward_mixed(sum);
}

// A thread for each word of each row.
extern "C" __global__ void forward_rows(const KvForward pass) {
    const kv_u32 thread = threadIdx.x + blockIdx.x * blockDim.x;
    const kv_u32 word = thread % pass.words;
    const kv_u32 part = thread / pass.words % pass.parts;
    const kv_u32 token = thread / pass.words / pass.parts;
    if (token >= pass.count) {
        return;
    }
    const kv_u64 state = forward_state(pass, token);
    const kv_u64 value = state + (part * pass.words + word + 1) * FORWARD_GOLDEN + pass.layer;
    ((kv_u64 *)forward_row(pass, part, (kv_u64)pass.first + token))[word] = forward_mixed(value);
    if (word == 0 && part == 0) {
        ((kv_u64 *)pass.next)[token] = state;
    }
}

// `lanes` threads for each new token.
extern "C" __global__ void forward_read(const KvForward pass) {
    const kv_u32 thread = threadIdx.x + blockIdx.x * blockDim.x;
    const kv_u32 lane = thread % pass.lanes;
    const kv_u32 token = thread / pass.lanes;
    if (token >= pass.count) {
        return;
    }
    const kv_u32 word = lane % pass.words;
    kv_u64 sum = 0;
    for (kv_u32 at = lane / pass.words; at <= pass.first + token; at += pass.lanes / pass.words) {
        for (kv_u32 part = 0; part < pass.parts; part++) {
            const kv_u64 place = ((kv_u64)at * pass.parts + part) * pass.words + word;
            sum += (((const kv_u64 *)forward_row(pass, part, at))[word] ^ place) * FORWARD_GOLDEN;
        }
    }
    ((kv_u64 *)pass.sums)[(kv_u64)token * pass.lanes + lane] = sum;
}

// A thread for each new token, behind the last layer.
extern "C" __global__ void forward_output(const KvForward pass) {
    const kv_u32 token = threadIdx.x + blockIdx.x * blockDim.x;
    if (token < pass.count) {
        ((kv_u64 *)pass.output)[token] = forward_state(pass, token);
    }
}
