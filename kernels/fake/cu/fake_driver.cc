// A libcuda without a GPU, for tests of what stands on it: device memory is memory, and streams are queues that run as late as they
// may and in no reliable order. Kernels are the real ones, run thread by thread (cpu_shim.h).
//
// It is stricter than the real one. What would be undefined there ends the process here: a copy that reaches out of its
// allocation or from one registration into the next, memory that goes while something in flight may touch it. Host memory of
// more than FAKE_LOCKS_AT_MOST bytes cannot be registered.
//
// fake_fail(n) begins anew and has the n-th call from then on fail, and every call after it, as errors of CUDA do: what was in flight
// is never carried out. fake_fail_after(n) does so without beginning anew. fake_calls() counts, fake_called(name) those of one function.
// fake_refuse(name) has the next call of a function fail alone: what is in flight goes on.
//
// fake_capture(1) has the default stream captured, as by another thread in the global mode. fake_broken() counts calls that would have
// invalidated the capture. fake_stall() puts work that never ends into the default stream. Waits for a stream begin once fake_lets_go is 1.
//
// Time is its own: fake_now() moves by calls and by what is waited for. Each stream takes the time of what it carries out, at the speeds
// of fake_speeds(), beside the others, and begins at the first wait. fake_still() has copies take their time and move nothing,
// fake_counted() says how many went which way, fake_device() makes it another device.

#define KV_ON_CPU
#include "kv_copy.cu"
#include "forward.cu"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <unistd.h>
#include <utility>
#include <vector>

KvIndex blockIdx, threadIdx, gridDim, blockDim;
kv_u64 kv_stores;

typedef int Result;
enum { OK = 0, INVALID = 1, NO_MEMORY = 2, NO_DEVICE = 100, NOT_READY = 600, CAPTURE_UNSUPPORTED = 900, UNKNOWN = 999 };
enum { GLOBAL_MODE = 0, RELAXED_MODE = 2 };

struct Event {
    bool recorded, done;
    long at;
};

struct Op {
    Event *after;
    std::function<void()> run;
    long since; // the first wait while it was there
    kv_u64 host, bytes; // registered memory that it touches
};

struct Stream : std::deque<Op> {
    long done_at = 0;
    size_t noticed = 0; // operations whose `since` is known
};

static std::recursive_mutex big;
static Stream legacy;
static std::vector<Stream *> streams = {&legacy};
static std::map<kv_u64, kv_u64> allocated, registered;
static long calls, fail_at = -1;
static std::map<std::string, long> called;
static int retained;
static thread_local void *current;
static thread_local int capture_mode = GLOBAL_MODE;
static bool dead, capturing;
static long broken;
static const char *refused;
static kv_u64 dice = 1;

// In nanoseconds; a call takes this much, a descriptor of a batch that.
static long now_ns;
static const long CALL_NS = 1000, DESCRIPTOR_NS = 200;
enum { COPIES, BATCH, KERNEL, READING, WAYS };
static long ns_per_kib[WAYS] = {20, 20, 20, 1000}, counted[WAYS];
// Of the operation that is carried out.
static long begins_at, takes_ns;
static bool still;
static unsigned char number = 1;
extern "C" {
volatile int fake_lets_go = 1;
}

static void spend(int way, size_t bytes) {
    takes_ns += (long)(bytes * ns_per_kib[way] / 1024);
}

extern "C" long fake_now() {
    return now_ns;
}

extern "C" void fake_speeds(long copies, long batch, long kernel) {
    ns_per_kib[COPIES] = copies;
    ns_per_kib[BATCH] = batch;
    ns_per_kib[KERNEL] = kernel;
}

extern "C" void fake_still(long yes) {
    still = yes;
}

extern "C" long fake_counted(long way) {
    return std::exchange(counted[way], 0);
}

extern "C" void fake_device(long other) {
    number = (unsigned char)other;
}

extern "C" void fake_fail_after(long n) {
    calls = 0;
    fail_at = n;
}

extern "C" void fake_fail(long n) {
    fake_fail_after(n);
    dead = retained = 0;
    current = nullptr;
    legacy = {};
    streams = {&legacy};
    allocated.clear();
    registered.clear();
}

extern "C" long fake_calls() {
    return calls;
}

extern "C" long fake_called(const char *function) {
    return called[function];
}

extern "C" void fake_refuse(const char *function) {
    refused = function;
}

extern "C" void fake_capture(long yes) {
    capturing = yes;
    broken = 0;
}

extern "C" long fake_broken() {
    return broken;
}

extern "C" void fake_stall() {
    legacy.push_back({new Event{true, false, 0}, [] {}, 0, 0, 0});
}

static void misused(const char *what) {
    fprintf(stderr, "fake driver: %s\n", what);
    fflush(stderr);
    _exit(77);
}

static Result die() {
    dead = true;
    for (Stream *stream : streams)
        *stream = {};
    return UNKNOWN;
}

#define CALL                                         \
    std::lock_guard<std::recursive_mutex> turn(big); \
    now_ns += CALL_NS;                               \
    called[__func__]++;                              \
    if (dead || ++calls == fail_at)                  \
        return die();                                \
    if (refused && !strcmp(refused, __func__)) {     \
        refused = nullptr;                           \
        return NO_MEMORY;                            \
    }

#define CALL_IN_CONTEXT \
    CALL;               \
    if (!current)       \
        misused("a call without a context");

// Of functions that invalidate the captures of other threads.
#define UNSAFE_CALL                                \
    CALL_IN_CONTEXT;                               \
    if (capturing && capture_mode == GLOBAL_MODE) { \
        broken++;                                  \
        return CAPTURE_UNSUPPORTED;                \
    }

static bool inside(const std::map<kv_u64, kv_u64> &ranges, kv_u64 address, kv_u64 bytes) {
    auto next = ranges.upper_bound(address);
    if (next == ranges.begin())
        return false;
    --next;
    return address + bytes <= next->first + next->second;
}

static bool touches(const std::map<kv_u64, kv_u64> &ranges, kv_u64 address, kv_u64 bytes) {
    for (auto &range : ranges)
        if (address < range.first + range.second && range.first < address + bytes)
            return true;
    return false;
}

// Runs one operation that may run, of a stream that chance picks. Whether there was one.
static bool step() {
    std::vector<Stream *> ready;
    for (Stream *stream : streams)
        for (; stream->noticed < stream->size(); stream->noticed++)
            (*stream)[stream->noticed].since = now_ns;
    for (Stream *stream : streams)
        if (!stream->empty() && (!stream->front().after || stream->front().after->done))
            ready.push_back(stream);
    if (ready.empty())
        return false;
    dice = dice * 6364136223846793005u + 1442695040888963407u;
    Stream *stream = ready[(dice >> 33) % ready.size()];
    Op op = stream->front();
    stream->pop_front();
    stream->noticed--;
    takes_ns = 0;
    begins_at = std::max({stream->done_at, op.since, op.after ? op.after->at : 0});
    op.run();
    stream->done_at = begins_at + takes_ns;
    return true;
}

static void run_until_empty(Stream *stream) {
    while (!stream->empty())
        if (!step())
            misused("a stream waits for what never happens");
    now_ns = std::max(now_ns, stream->done_at);
}

// Except in the default stream, which belongs to other code here.
static void nothing_in_flight(const char *what) {
    for (Stream *stream : streams)
        if (stream != &legacy && !stream->empty())
            misused(what);
}

static Stream *of(void *stream) {
    return stream ? (Stream *)stream : &legacy;
}

static void put(void *stream, std::function<void()> run, kv_u64 host = 0, kv_u64 bytes = 0) {
    of(stream)->push_back({nullptr, run, 0, host, bytes});
}

extern "C" {

Result cuInit(unsigned) {
    CALL;
    return getenv("FAKE_NO_DEVICE") ? NO_DEVICE : OK;
}

Result cuDeviceGet(int *device, int ordinal) {
    CALL;
    *device = ordinal;
    return OK;
}

Result cuDeviceGetCount(int *count) {
    CALL;
    *count = 1;
    return OK;
}

Result cuDeviceGetName(char *name, int bytes, int) {
    CALL;
    snprintf(name, bytes, "fake GPU");
    return OK;
}

Result cuDeviceGetUuid_v2(unsigned char *uuid, int) {
    CALL;
    memset(uuid, number, 16);
    return OK;
}

Result cuDriverGetVersion(int *version) {
    CALL;
    *version = 13000;
    return OK;
}

Result cuDeviceGetAttribute(int *value, int attribute, int) {
    CALL;
    // Compute capability 9.0; memory pools.
    *value = attribute == 75 ? 9 : attribute == 76 ? 0 : attribute == 115 ? 1 : 0;
    return OK;
}

Result cuDevicePrimaryCtxRetain(void **context, int) {
    CALL;
    *context = (void *)8;
    retained++;
    return OK;
}

Result cuDevicePrimaryCtxRelease_v2(int) {
    CALL;
    if (--retained > 0)
        return OK;
    nothing_in_flight("the context goes while something is in flight");
    if (!allocated.empty() || !registered.empty() || streams.size() > 1)
        misused("the context goes before what was made in it");
    return OK;
}

Result cuCtxSetCurrent(void *context) {
    CALL;
    now_ns -= CALL_NS; // polls take no time here
    current = context;
    return OK;
}

Result cuCtxGetCurrent(void **context) {
    CALL;
    now_ns -= CALL_NS;
    *context = current;
    return OK;
}

Result cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    CALL_IN_CONTEXT;
    *least = 0;
    *greatest = -5;
    return OK;
}

Result cuStreamCreateWithPriority(void **stream, unsigned, int) {
    CALL_IN_CONTEXT;
    streams.push_back(new Stream);
    *stream = streams.back();
    return OK;
}

Result cuStreamIsCapturing(void *stream, int *status) {
    CALL_IN_CONTEXT;
    *status = capturing && of(stream) == &legacy;
    return OK;
}

Result cuThreadExchangeStreamCaptureMode(int *mode) {
    CALL;
    now_ns -= CALL_NS;
    std::swap(*mode, capture_mode);
    return OK;
}

Result cuStreamSynchronize(void *stream) {
    for (int tries = 0; !fake_lets_go; usleep(1000))
        if (++tries == 60000)
            misused("a wait keeps the thread from running that ends it");
    UNSAFE_CALL;
    run_until_empty(of(stream));
    return OK;
}

Result cuStreamWaitEvent(void *stream, Event *event, unsigned) {
    CALL_IN_CONTEXT;
    broken += capturing && of(stream) == &legacy;
    of(stream)->push_back({event, [] {}, 0, 0, 0});
    return OK;
}

Result cuStreamDestroy_v2(void *stream) {
    CALL_IN_CONTEXT;
    if (!of(stream)->empty())
        misused("a stream goes with something in it");
    for (size_t i = 0; i < streams.size(); i++)
        if (streams[i] == stream)
            streams.erase(streams.begin() + i);
    delete (Stream *)stream;
    return OK;
}

Result cuEventCreate(Event **event, unsigned) {
    CALL_IN_CONTEXT;
    *event = new Event{false, true, 0};
    return OK;
}

Result cuEventRecord(Event *event, void *stream) {
    CALL_IN_CONTEXT;
    broken += capturing && of(stream) == &legacy;
    event->recorded = true;
    event->done = false;
    put(stream, [event] {
        event->done = true;
        event->at = begins_at;
    });
    return OK;
}

Result cuEventQuery(Event *event) {
    UNSAFE_CALL;
    if (!event->done)
        step();
    if (!event->done)
        return NOT_READY;
    now_ns = std::max(now_ns, event->at);
    return OK;
}

// Of tests alone: no function of the crate's.
extern "C" Result cuEventElapsedTime(float *ms, Event *from, Event *to) {
    CALL_IN_CONTEXT;
    if (!from->done || !to->done)
        return NOT_READY;
    *ms = (float)((double)(to->at - from->at) / 1e6);
    return OK;
}

Result cuEventSynchronize(Event *event) {
    UNSAFE_CALL;
    while (!event->done)
        if (!step())
            misused("an event that never happens");
    now_ns = std::max(now_ns, event->at);
    return OK;
}

// Never freed: a stream may wait for it still, which the real driver allows.
Result cuEventDestroy_v2(Event *) {
    CALL_IN_CONTEXT;
    return OK;
}

Result cuMemAlloc_v2(kv_u64 *address, size_t bytes) {
    UNSAFE_CALL;
    if (bytes > (size_t)1 << 40)
        return NO_MEMORY;
    void *memory = malloc(bytes);
    if (!still)
        memset(memory, 0xab, bytes);
    *address = (kv_u64)memory;
    allocated[*address] = bytes;
    return OK;
}

Result cuMemFree_v2(kv_u64 address) {
    CALL_IN_CONTEXT;
    nothing_in_flight("device memory goes while something is in flight");
    if (!allocated.erase(address))
        misused("memory that was never allocated is freed");
    free((void *)address);
    return OK;
}

Result cuMemAllocAsync(kv_u64 *address, size_t bytes, void *) {
    CALL_IN_CONTEXT;
    *address = (kv_u64)malloc(bytes);
    allocated[*address] = bytes;
    return OK;
}

Result cuMemFreeAsync(kv_u64 address, void *stream) {
    CALL_IN_CONTEXT;
    put(stream, [address] {
        if (!allocated.erase(address))
            misused("memory that was never allocated is freed");
        free((void *)address);
    });
    return OK;
}

Result cuMemsetD8Async(kv_u64 address, unsigned char value, size_t bytes, void *stream) {
    CALL_IN_CONTEXT;
    put(stream, [=] {
        if (!inside(allocated, address, bytes))
            misused("memset out of bounds");
        if (!still)
            memset((void *)address, value, bytes);
    });
    return OK;
}

Result cuMemHostRegister_v2(void *host, size_t bytes, unsigned) {
    CALL_IN_CONTEXT;
    if (getenv("FAKE_LOCKS_NOTHING"))
        return NO_MEMORY;
    const char *most = getenv("FAKE_LOCKS_AT_MOST");
    if (most && bytes > strtoul(most, nullptr, 10))
        return NO_MEMORY;
    const kv_u64 page = 4096, start = (kv_u64)host / page * page, end = ((kv_u64)host + bytes + page - 1) / page * page;
    for (auto &range : registered)
        if (start < (range.first + range.second + page - 1) / page * page && range.first / page * page < end)
            return 712; // already registered
    registered[(kv_u64)host] = bytes;
    return OK;
}

Result cuMemHostUnregister(void *host) {
    CALL_IN_CONTEXT;
    auto range = registered.find((kv_u64)host);
    if (range == registered.end())
        misused("memory that was never registered is unregistered");
    for (Stream *stream : streams)
        for (Op &op : *stream)
            if (range->first < op.host + op.bytes && op.host < range->first + range->second)
                misused("host memory goes while something is in flight in it");
    registered.erase(range);
    return OK;
}

Result cuMemHostGetDevicePointer_v2(kv_u64 *address, void *host, unsigned) {
    CALL_IN_CONTEXT;
    *address = (kv_u64)host + (getenv("FAKE_OTHER_ADDRESSES") ? 1 << 20 : 0);
    return OK;
}

static bool find(const std::map<kv_u64, kv_u64> &ranges, kv_u64 address, std::pair<kv_u64, kv_u64> *found) {
    for (auto &range : ranges)
        if (range.first <= address && address < range.first + range.second) {
            *found = range;
            return true;
        }
    return false;
}

Result cuPointerGetAttribute(void *value, int attribute, kv_u64 address) {
    CALL_IN_CONTEXT;
    std::pair<kv_u64, kv_u64> range;
    const bool device = find(allocated, address, &range);
    if (!device && !find(registered, address, &range))
        return INVALID;
    switch (attribute) {
    case 2: // the type of memory
        *(unsigned *)value = device ? 2 : 1;
        return OK;
    case 9: // the number of the device
        *(int *)value = getenv("FAKE_OTHER_OWNER") ? 1 : 0;
        return OK;
    case 11:
        *(kv_u64 *)value = range.first;
        return OK;
    case 12:
        *(kv_u64 *)value = range.second;
        return OK;
    }
    return INVALID;
}

// A host range in one registration is read and written when the stream gets there; one in none, at once.
static bool is_registered(kv_u64 host, size_t bytes) {
    if (inside(registered, host, bytes))
        return true;
    if (touches(registered, host, bytes))
        misused("a copy reaches out of its registration");
    return false;
}

Result cuMemcpyHtoDAsync_v2(kv_u64 device, const void *host, size_t bytes, void *stream) {
    CALL_IN_CONTEXT;
    std::vector<char> taken;
    const bool later = is_registered((kv_u64)host, bytes);
    if (!later)
        taken.assign((const char *)host, (const char *)host + bytes);
    counted[COPIES] += later;
    put(stream, [=] {
        if (!inside(allocated, device, bytes))
            misused("a copy out of bounds");
        spend(COPIES, bytes);
        if (!still)
            memcpy((void *)device, later ? host : taken.data(), bytes);
    }, later ? (kv_u64)host : 0, later ? bytes : 0);
    return OK;
}

Result cuMemcpyDtoHAsync_v2(void *host, kv_u64 device, size_t bytes, void *stream) {
    CALL_IN_CONTEXT;
    const bool later = is_registered((kv_u64)host, bytes);
    counted[COPIES] += later;
    put(stream, [=] {
        if (!inside(allocated, device, bytes))
            misused("a copy out of bounds");
        spend(COPIES, bytes);
        if (!still)
            memcpy(host, (void *)device, bytes);
    }, later ? (kv_u64)host : 0, later ? bytes : 0);
    if (!later)
        run_until_empty(of(stream));
    return OK;
}

Result cuMemcpyDtoDAsync_v2(kv_u64 to, kv_u64 from, size_t bytes, void *stream) {
    CALL_IN_CONTEXT;
    put(stream, [=] {
        if (!inside(allocated, to, bytes) || !inside(allocated, from, bytes))
            misused("a copy out of bounds");
        if (!still)
            memcpy((void *)to, (const void *)from, bytes);
    });
    return OK;
}

struct Copy2D {
    size_t from_x, from_y;
    int from_type;
    const char *from_host;
    kv_u64 from_device;
    void *from_array;
    size_t from_pitch, to_x, to_y;
    int to_type;
    char *to_host;
    kv_u64 to_device;
    void *to_array;
    size_t to_pitch, width, height;
};

Result cuMemcpy2DAsync_v2(const Copy2D *given, void *stream) {
    CALL_IN_CONTEXT;
    const Copy2D copy = *given;
    if (copy.from_pitch < copy.width || copy.to_pitch < copy.width || copy.from_type + copy.to_type != 3)
        return INVALID;
    const bool load = copy.from_type == 1;
    const kv_u64 host = load ? (kv_u64)copy.from_host : (kv_u64)copy.to_host;
    const size_t reach = (copy.height - 1) * (load ? copy.from_pitch : copy.to_pitch) + copy.width;
    if (!is_registered(host, reach))
        misused("a 2D copy of memory that is not registered");
    counted[COPIES]++;
    put(stream, [=] {
        spend(COPIES, copy.width * copy.height);
        const char *from = load ? copy.from_host : (const char *)copy.from_device;
        char *to = load ? (char *)copy.to_device : copy.to_host;
        for (size_t row = 0; row < copy.height; row++, from += copy.from_pitch, to += copy.to_pitch) {
            if (!inside(allocated, load ? (kv_u64)to : (kv_u64)from, copy.width))
                misused("a copy out of bounds");
            if (!still)
                memcpy(to, from, copy.width);
        }
    }, host, reach);
    return OK;
}

struct Attributes {
    int order, from_type, from_id, to_type, to_id;
    unsigned flags;
};

// Older drivers have none.
Result cuMemcpyBatchAsync_v2(const kv_u64 *to, const kv_u64 *from, const size_t *bytes, size_t count,
                             const Attributes *attributes, const size_t *first, size_t kinds, void *stream) {
    CALL_IN_CONTEXT;
    if (getenv("FAKE_REFUSES_BATCHES"))
        return 801; // not supported
    if (!stream || !count || kinds != 1 || first[0] != 0 || attributes->order != 1)
        return INVALID;
    now_ns += DESCRIPTOR_NS * (long)count;
    counted[BATCH]++;
    for (size_t row = 0; row < count; row++) {
        const kv_u64 f = from[row], t = to[row];
        const size_t n = bytes[row];
        const bool load = inside(allocated, t, n);
        if (!n)
            return INVALID;
        if (!is_registered(load ? f : t, n))
            misused("a batch of memory that is not registered");
        put(stream, [=] {
            if (!inside(allocated, load ? t : f, n))
                misused("a copy out of bounds");
            spend(BATCH, n);
            if (!still)
                memcpy((void *)t, (const void *)f, n);
        }, load ? f : t, n);
    }
    return OK;
}

Result cuModuleLoadData(void **module, const void *image) {
    CALL_IN_CONTEXT;
    if (memcmp(image, "// kv_copy.cu ", 14) && memcmp(image, "\x7f"
                                                             "ELF",
                                                      4))
        return INVALID;
    *module = (void *)8;
    return OK;
}

static const char *const KERNELS[] = {"kv_copy", "kv_read", "forward_rows", "forward_read", "forward_output"};
enum { KV_COPY, KV_READ, FORWARD_ROWS, FORWARD_READ, FORWARD_OUTPUT, KERNELS_END };

Result cuModuleGetFunction(void **function, void *, const char *name) {
    CALL_IN_CONTEXT;
    for (long kernel = 0; kernel < KERNELS_END; kernel++)
        if (!strcmp(name, KERNELS[kernel])) {
            *function = (void *)(8 + kernel);
            return OK;
        }
    return INVALID;
}

Result cuModuleUnload(void *) {
    CALL_IN_CONTEXT;
    nothing_in_flight("a module goes while something is in flight");
    return OK;
}

Result cuLaunchKernel(void *function, unsigned grid, unsigned, unsigned, unsigned block, unsigned, unsigned, unsigned, void *stream,
                      void **arguments, void **) {
    CALL_IN_CONTEXT;
    if (!grid || !block || block > 1024)
        return INVALID;
    const auto every_thread = [=](auto kernel, auto argument) {
        gridDim.x = grid;
        blockDim.x = block;
        for (blockIdx.x = 0; blockIdx.x < grid; blockIdx.x++)
            for (threadIdx.x = 0; threadIdx.x < block; threadIdx.x++)
                kernel(argument);
    };
    const long kernel = (long)function - 8;
    if (kernel >= FORWARD_ROWS) {
        const KvForward pass = *(const KvForward *)arguments[0];
        put(stream, [=] {
            if (kernel == FORWARD_READ)
                spend(READING, (size_t)pass.words * 8 * pass.parts * pass.count * (pass.first + pass.count));
            if (!still)
                every_thread(kernel == FORWARD_ROWS ? forward_rows : kernel == FORWARD_READ ? forward_read : forward_output, pass);
        });
        return OK;
    }
    if (kernel == KV_READ) {
        KvRead read = *(const KvRead *)arguments[0];
        // Waiting takes time of the stream's alone.
        const long cycles = (long)read.cycles;
        read.cycles = 0;
        put(stream, [=] {
            takes_ns += cycles;
            spend(READING, (size_t)read.words * 8 * read.parts * read.pages);
            if (!still)
                every_thread(kv_read, read);
        });
        return OK;
    }
    if (getenv("FAKE_OTHER_ADDRESSES"))
        misused("a kernel is given the host's address of memory that it knows by another");
    const KvCopy copy = *(const KvCopy *)arguments[0];
    counted[KERNEL]++;
    // Somewhere in the registration from which it copies.
    std::pair<kv_u64, kv_u64> host = {0, 0};
    find(registered, copy.from, &host) || find(registered, copy.to, &host);
    put(stream, [=] {
        spend(KERNEL, (size_t)copy.segments / copy.row_segments * copy.row_units * 16);
        if (!still)
            every_thread(kv_copy, copy);
    }, host.first, host.second);
    return OK;
}
}
