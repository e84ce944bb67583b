/* larder.h: pages of a KV cache on NVMe, for engines in C and C++.
 *
 * The header is the contract of the library. docs/c.md has examples.
 *
 * Calls.     Every call may come from any thread. A call marked [waits] may wait for the device,
 *            for the process that owns the store, or until its time-out. All others answer from
 *            memory. The library calls nothing back, and raises no signal. It keeps no pointer of
 *            the caller after a call returned, except the memory of larder_submit_put and
 *            larder_submit_get.
 * Results.   larder_result is about the call as a whole. Each page has a status of its own, so
 *            that a bad page does not hurt the others. A page that cannot be read is a miss, and
 *            no error. A status that this header does not know is a miss or a refusal.
 * Errors.    A call that fails sets *error, unless error is NULL, and then nothing else was set.
 *            The text says what failed, where, and what to do. A defect of the library is
 *            LARDER_E_INTERNAL: nothing unwinds into the caller.
 * Memory.    An object of the library is freed by the free call of its type alone. NULL is allowed
 *            there. A store stays usable until it and all its namespaces and queues are freed.
 *            No object is freed while a call uses it.
 * Structs.   The first field of a struct of options is its size. The _INIT macro sets it. Zero in
 *            any other field is the default. A field that the library does not know must be zero:
 *            else the call is LARDER_E_ARGUMENT. Structs in arrays never grow.
 * Fork.      In a child of fork, handles from before the fork are of no use: pages miss, and all
 *            other calls are LARDER_E_FORKED. Free calls release nothing of the parent there. The
 *            child opens the store itself.
 * Log.       Warnings go to stderr. The environment variable LARDER_LOG sets the levels ("off",
 *            "info"). larder_log_fd takes the lines instead.
 * Versions.  The soname is liblarder.so.N, where N is LARDER_ABI. Functions and fields at the end
 *            of options are added within N. Nothing is removed, and nothing changes its meaning.
 *            A function that is added later has a symbol version of its own, so that a newer
 *            program is refused by the loader, and does not fail later.
 */
#ifndef LARDER_H
#define LARDER_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define LARDER_ABI 1u
#define LARDER_KEY_BYTES 32u
#define LARDER_PARTS_MAX 8u
#define LARDER_BATCH_MAX 1048576u /* keys or pages of a call */
#define LARDER_TOKENS_MAX 67108864u /* tokens of a call */
#define LARDER_FOREVER UINT64_MAX /* in place of milliseconds */

#if defined(__GNUC__)
#define LARDER_API __attribute__((visibility("default")))
#define LARDER_MUST_USE __attribute__((warn_unused_result))
#else
#define LARDER_API
#define LARDER_MUST_USE
#endif

typedef struct larder_store larder_store;
typedef struct larder_namespace larder_namespace;
typedef struct larder_queue larder_queue;
typedef struct larder_error larder_error;

typedef int32_t larder_result;
#define LARDER_DONE 0
#define LARDER_E_ARGUMENT (-1) /* a wrong argument: nothing was done */
#define LARDER_E_STORE (-2)    /* the store cannot be opened or used */
#define LARDER_E_CLOSED (-3)   /* the store or the queue is closed */
#define LARDER_E_FULL (-4)     /* the queue has no room: nothing was accepted */
#define LARDER_E_TIMEOUT (-5)  /* the time is over; the work goes on */
#define LARDER_E_FORKED (-6)   /* the handle is of the parent process */
#define LARDER_E_INTERNAL (-7) /* a defect of the library: close the store */

/* The status of a page. The numbers are those of larder_kv.Status in Python. */
typedef uint8_t larder_status;
#define LARDER_OK 0u                 /* read, stored or found */
#define LARDER_DUPLICATE 1u          /* put: stored before, and its bytes stay. A success */
#define LARDER_ABSENT 2u             /* not in the store */
#define LARDER_DAMAGED 3u            /* its bytes failed their checksum */
#define LARDER_UNFINISHED 4u         /* the last crash cut its write short */
#define LARDER_READ_ERROR 5u         /* the device failed the read */
#define LARDER_DEADLINE 6u           /* the time was over first */
#define LARDER_HUNG 7u               /* the volume is silent for longer than the hang limit */
#define LARDER_STALE 8u              /* read-only: its segment was reused during the read */
#define LARDER_WRONG_SHAPE 9u        /* its memory is not of the namespace's shape */
#define LARDER_CLOSED 10u            /* the store is closed, or has no owner now */
#define LARDER_NO_SPACE 11u          /* put: no room now */
#define LARDER_BUSY 12u              /* put: too many bytes are being written */
#define LARDER_TOO_LARGE 13u         /* put: it fits no segment */
#define LARDER_UNREACHABLE 14u       /* put: its chain is longer than the store keeps */
#define LARDER_READ_ONLY 15u         /* put: the store was opened read-only */
#define LARDER_EXHAUSTED 16u         /* put: the serial numbers of this run are used up */
#define LARDER_READ_ONLY_SERVICE 17u /* put: every volume is in read-only service */
#define LARDER_WRITE_FAILED 18u      /* put: the device refused the write */
#define LARDER_SYNC_FAILED 19u       /* put: the device refused the sync */
#define LARDER_REFUSED 20u           /* an answer of leases, which this header lacks */
#define LARDER_OTHER 21u             /* another reason */
#define LARDER_NOT_ADMITTED 22u      /* put: the policy of admission does not take it */
#define LARDER_BUDGET 23u            /* put: the budget of writes does not take it */
#define LARDER_QUOTA 24u             /* put: its group is at the maximum of its quota */
#define LARDER_ERASED 25u            /* put: its tenant is being erased */
#define LARDER_KEYRING_FULL 26u      /* put: the keyring takes no more tenants */

/* ---- version, errors, log ----------------------------------------------------------------- */

/* Compare with LARDER_ABI before all else in a library that was loaded by dlopen. */
LARDER_API uint32_t larder_abi(void);
/* Of the package, such as "0.1.0". */
LARDER_API const char *larder_version(void);
/* The name of a status, such as "ABSENT"; never NULL. */
LARDER_API const char *larder_status_name(larder_status status);

/* The result of the call that failed; LARDER_DONE for NULL. */
LARDER_API larder_result larder_error_code(const larder_error *error);
/* UTF-8, valid until the error is freed; "" for NULL. */
LARDER_API const char *larder_error_text(const larder_error *error);
LARDER_API void larder_error_free(larder_error *error);

/* The log as datagrams, one line each (" WARN larder_store: text"), from the level INFO on. Before
 * the first store is opened. The descriptor is the caller's; *fd is -1 if the log has begun. */
LARDER_API LARDER_MUST_USE larder_result larder_log_fd(int *fd, larder_error **error);

/* ---- the store ---------------------------------------------------------------------------- */

typedef struct larder_open_options {
    size_t struct_size;
    uint64_t size;          /* bytes of a store that is created; 0: it must exist */
    uint64_t page_bytes;    /* a new store suits such pages; a store that cannot is refused */
    uint64_t lease_ms;      /* so long a lookup protects the pages that it finds; 0: 10 s */
    uint64_t hang_limit_ms; /* so long a volume may be silent until pages miss; 0: 10 s */
    uint64_t read_only;     /* larder_open alone: 1 takes no lock and writes nothing */
    const char *settings;   /* NULL, or JSON with keys of docs/options.md: codec, disk, key_command,
                               key_credential, key_file, policy, prewrite, sync, write_budget, l4
                               and its kin */
} larder_open_options;
#define LARDER_OPEN_OPTIONS_INIT {sizeof(larder_open_options), 0, 0, 0, 0, 0, NULL}

/* [waits] Uses a store together with other processes. path: a directory, which is created if
 * necessary, or a block device. options may be NULL. */
LARDER_API LARDER_MUST_USE larder_result larder_attach(
    const char *path, const larder_open_options *options, larder_store **store,
    larder_error **error);
/* [waits] Uses a store in this process alone. */
LARDER_API LARDER_MUST_USE larder_result larder_open(
    const char *path, const larder_open_options *options, larder_store **store,
    larder_error **error);
/* [waits] Ends all queues, makes everything durable, closes. LARDER_E_TIMEOUT: the close goes on,
 * and memory of running jobs is still theirs; call again. */
LARDER_API larder_result larder_close(
    larder_store *store, uint64_t timeout_ms, larder_error **error);
/* A store that is not closed yet is closed in the background. */
LARDER_API void larder_store_free(larder_store *store);
/* [waits] All that was put or deleted before survives a loss of power after it. */
LARDER_API LARDER_MUST_USE larder_result larder_flush(larder_store *store, larder_error **error);
/* [waits] Counters and sizes as JSON (docs/json.md), freed by larder_text_free. */
LARDER_API LARDER_MUST_USE larder_result larder_stats(
    larder_store *store, char **json, larder_error **error);
LARDER_API void larder_text_free(char *text);

/* ---- namespaces and keys ------------------------------------------------------------------ */

/* [waits] identity: JSON with everything that decides the bytes of a page besides its key:
 * {"model", "weights", "dtype", "layout", "page_tokens", "parts": [bytes, ...]}, and if need be
 * "tp", "pp", "cp": [rank, size], "pool", "extra": {"name": "text"}. Pages of different
 * namespaces never mix. */
LARDER_API LARDER_MUST_USE larder_result larder_namespace_open(
    larder_store *store, const char *identity, larder_namespace **ns, larder_error **error);
LARDER_API void larder_namespace_free(larder_namespace *ns);

/* The keys of the whole pages of tokens: key i covers all tokens up to the end of page i, and the
 * salt. At most room keys are written; *pages is the number of whole pages. before: the key of
 * the page before tokens, or NULL at the head of a chain. salt: NULL, or a text that separates
 * pages of the same tokens (adapter, tenant), with the head alone. Keys are SHA-256, equal in each
 * process and release of one ABI. */
LARDER_API LARDER_MUST_USE larder_result larder_chain(
    const larder_namespace *ns, const uint8_t *before, const char *salt, const uint32_t *tokens,
    size_t count, uint8_t *keys, size_t room, size_t *pages, larder_error **error);

/* ---- pages -------------------------------------------------------------------------------- */

/* As struct iovec. Part p of page i is parts[i * P + p], where the namespace has P parts. Memory
 * and lengths that are multiples of 4096 go to the device without a copy. */
typedef struct larder_part {
    void *base;
    size_t length;
} larder_part;

typedef struct larder_put_options {
    size_t struct_size;
    const uint8_t *before; /* the key of the page before the first one, or NULL */
    uint64_t wait_ms;      /* for room; 0: refused at once */
    uint32_t depth;        /* pages before the first one in its chain */
    uint32_t loose;        /* 1: the pages are no chain */
    uint32_t hint_class;   /* docs/retention.md; below 64 */
    uint32_t hint_priority;/* below 256 */
} larder_put_options;
#define LARDER_PUT_OPTIONS_INIT {sizeof(larder_put_options), NULL, 0, 0, 0, 0, 0}

/* How many of the keys, a chain from its head, are stored without a gap. These are protected for
 * the time of the lease. Of another process's store: [waits]. */
LARDER_API LARDER_MUST_USE larder_result larder_longest_prefix(
    larder_namespace *ns, const uint8_t *keys, size_t count, size_t *found, larder_error **error);
/* For each key LARDER_OK, protected as above, or LARDER_ABSENT, or LARDER_CLOSED. */
LARDER_API LARDER_MUST_USE larder_result larder_contains(
    larder_namespace *ns, const uint8_t *keys, size_t count, larder_status *statuses,
    larder_error **error);
/* [waits] Stop a chain at the first status above LARDER_DUPLICATE. The parts are only read. options
 * may be NULL. */
LARDER_API LARDER_MUST_USE larder_result larder_put(
    larder_namespace *ns, const uint8_t *keys, const larder_part *parts, size_t pages,
    const larder_put_options *options, larder_status *statuses, larder_error **error);
/* [waits] The memory of a page that is not LARDER_OK has no particular content. No read starts
 * after timeout_ms. No two parts overlap. */
LARDER_API LARDER_MUST_USE larder_result larder_get(
    larder_namespace *ns, const uint8_t *keys, const larder_part *parts, size_t pages,
    uint64_t timeout_ms, larder_status *statuses, larder_error **error);
/* Marks pages as used, as a hit in a tier above. */
LARDER_API LARDER_MUST_USE larder_result larder_touch(
    larder_namespace *ns, const uint8_t *keys, size_t count, larder_error **error);
/* [waits] *removed, unless NULL, is the number of pages that were there. */
LARDER_API LARDER_MUST_USE larder_result larder_delete(
    larder_namespace *ns, const uint8_t *keys, size_t count, uint64_t *removed,
    larder_error **error);
/* [waits] Deletes all pages of the namespace. */
LARDER_API LARDER_MUST_USE larder_result larder_clear(
    larder_namespace *ns, uint64_t *removed, larder_error **error);

/* ---- jobs: for an engine that must not wait ----------------------------------------------- */

typedef struct larder_queue_options {
    size_t struct_size;
    uint64_t threads;   /* for reads, and as many for writes; 0: 2; at most 64 */
    uint64_t jobs;      /* most jobs that are not polled yet; 0: 1024 */
    uint64_t job_bytes; /* most bytes of their pages; 0: no limit */
} larder_queue_options;
#define LARDER_QUEUE_OPTIONS_INIT {sizeof(larder_queue_options), 0, 0, 0}

typedef struct larder_finished {
    uint64_t job;
    uint64_t tag;  /* of the caller */
    size_t pages;  /* their statuses are in the array that the submit named */
} larder_finished;

/* options may be NULL. */
LARDER_API LARDER_MUST_USE larder_result larder_queue_open(
    larder_store *store, const larder_queue_options *options, larder_queue **queue,
    larder_error **error);
/* Readable while there are finished jobs. It belongs to the queue; -1 for NULL. */
LARDER_API int larder_queue_fd(const larder_queue *queue);
/* Queues a put. The memory of the parts and the statuses belong to the job until larder_poll
 * returned it; the other arguments are copied. job may be NULL. A job that has not started after
 * timeout_ms is LARDER_DEADLINE. */
LARDER_API LARDER_MUST_USE larder_result larder_submit_put(
    larder_queue *queue, larder_namespace *ns, const uint8_t *keys, const larder_part *parts,
    size_t pages, const larder_put_options *options, uint64_t timeout_ms, uint64_t tag,
    larder_status *statuses, uint64_t *job, larder_error **error);
/* Queues a get, with the same rules. */
LARDER_API LARDER_MUST_USE larder_result larder_submit_get(
    larder_queue *queue, larder_namespace *ns, const uint8_t *keys, const larder_part *parts,
    size_t pages, uint64_t timeout_ms, uint64_t tag, larder_status *statuses, uint64_t *job,
    larder_error **error);
/* Finished jobs, each once. *count is their number, at most room. Waits for the first, at most
 * wait_ms. LARDER_E_CLOSED: the queue is closed, and no job is left. */
LARDER_API LARDER_MUST_USE larder_result larder_poll(
    larder_queue *queue, larder_finished *finished, size_t room, uint64_t wait_ms, size_t *count,
    larder_error **error);
/* [waits] Refuses further jobs, waits for running ones, frees the queue. The memory of all its
 * jobs is free after it. */
LARDER_API void larder_queue_free(larder_queue *queue);

#ifdef __cplusplus
}
#endif
#endif
