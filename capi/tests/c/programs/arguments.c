/* Wrong arguments: an error each, with a text, and nothing else happens. */
#include "check.h"

/* The options of a later header. */
typedef struct later_options {
    larder_open_options known;
    uint64_t added;
} later_options;

typedef struct later_put_options {
    larder_put_options known;
    uint64_t added[3];
} later_put_options;

static void stores(const char *path) {
    larder_open_options options = LARDER_OPEN_OPTIONS_INIT;
    later_options later;
    larder_store *store = NULL;
    char empty[4096];

    FAILS(LARDER_E_ARGUMENT, larder_open(NULL, NULL, &store, e));
    FAILS(LARDER_E_ARGUMENT, larder_open(path, NULL, NULL, e));
    FAILS(LARDER_E_ARGUMENT, larder_open("", NULL, &store, e));
    FAILS(LARDER_E_ARGUMENT, larder_open("\xff\xfe", NULL, &store, e));
    CHECK(larder_open(NULL, NULL, &store, NULL) == LARDER_E_ARGUMENT);
    snprintf(empty, sizeof empty, "%s/empty", path);
    FAILS(LARDER_E_STORE, larder_open(empty, NULL, &store, e));
    FAILS(LARDER_E_STORE, larder_open("/dev/null", &options, &store, e));

    options.size = 1;
    FAILS(LARDER_E_STORE, larder_attach(empty, &options, &store, e));
    options.size = UINT64_MAX;
    FAILS(LARDER_E_STORE, larder_attach(empty, &options, &store, e));
    options.size = (uint64_t)1 << 50;
    FAILS(LARDER_E_STORE, larder_attach(empty, &options, &store, e));
    options.size = 256u << 20;
    options.page_bytes = UINT64_MAX;
    FAILS(LARDER_E_STORE, larder_attach(empty, &options, &store, e));
    options.page_bytes = 0;
    options.lease_ms = UINT64_MAX;
    FAILS(LARDER_E_ARGUMENT, larder_attach(empty, &options, &store, e));
    options.lease_ms = 0;
    options.read_only = 2;
    FAILS(LARDER_E_ARGUMENT, larder_open(empty, &options, &store, e));
    options.read_only = 1;
    FAILS(LARDER_E_ARGUMENT, larder_attach(empty, &options, &store, e));
    options.read_only = 0;
    options.settings = "{";
    FAILS(LARDER_E_ARGUMENT, larder_attach(empty, &options, &store, e));
    options.settings = "[1]";
    FAILS(LARDER_E_ARGUMENT, larder_attach(empty, &options, &store, e));
    options.settings = "{\"on_error\": \"miss\"}";
    FAILS(LARDER_E_ARGUMENT, larder_attach(empty, &options, &store, e));
    options.settings = "{\"sync\": \"never\"}";
    FAILS(LARDER_E_ARGUMENT, larder_attach(empty, &options, &store, e));
    options.settings = NULL;
    options.struct_size = 0;
    FAILS(LARDER_E_ARGUMENT, larder_attach(empty, &options, &store, e));
    options.struct_size = SIZE_MAX;
    FAILS(LARDER_E_ARGUMENT, larder_attach(empty, &options, &store, e));

    memset(&later, 0, sizeof later);
    later.known.struct_size = sizeof later;
    later.known.size = 256u << 20;
    later.added = 1;
    FAILS(LARDER_E_ARGUMENT, larder_attach(empty, &later.known, &store, e));
    CHECK(store == NULL);
    later.added = 0;
    later.known.settings = "{\"sync\": \"relaxed\", \"policy\": \"lru\", \"codec\": \"off\"}";
    DONE(larder_attach(empty, &later.known, &store, e));
    DONE(larder_close(store, LARDER_FOREVER, e));
    larder_store_free(store);
}

static void namespaces(larder_store *store) {
    static const char *const wrong[] = {
        "", "{", "[]", "{}", "{\"model\": 7}",
        "{\"model\":\"m\",\"weights\":\"w\",\"dtype\":\"d\",\"layout\":\"l\",\"page_tokens\":16,\"parts\":[]}",
        "{\"model\":\"m\",\"weights\":\"w\",\"dtype\":\"d\",\"layout\":\"l\",\"page_tokens\":0,\"parts\":[1]}",
        "{\"model\":\"m\",\"weights\":\"w\",\"dtype\":\"d\",\"layout\":\"l\",\"page_tokens\":1,\"parts\":[0]}",
        "{\"model\":\"m\",\"weights\":\"w\",\"dtype\":\"d\",\"layout\":\"l\",\"page_tokens\":1,\"parts\":[1,1,1,1,1,1,1,1,1]}",
        "{\"model\":\"m\",\"weights\":\"w\",\"dtype\":\"d\",\"layout\":\"l\",\"page_tokens\":1,\"parts\":[1],\"tp\":[2,2]}",
        "{\"model\":\"m\",\"weights\":\"w\",\"dtype\":\"d\",\"layout\":\"l\",\"page_tokens\":1,\"parts\":[1],\"bits\":4}",
    };
    larder_namespace *ns = NULL;
    size_t at;
    for (at = 0; at < sizeof wrong / sizeof *wrong; at++) {
        FAILS(LARDER_E_ARGUMENT, larder_namespace_open(store, wrong[at], &ns, e));
    }
    FAILS(LARDER_E_ARGUMENT, larder_namespace_open(NULL, IDENTITY, &ns, e));
    FAILS(LARDER_E_ARGUMENT, larder_namespace_open(store, NULL, &ns, e));
    FAILS(LARDER_E_ARGUMENT, larder_namespace_open(store, IDENTITY, NULL, e));
    CHECK(ns == NULL);
}

static void pages(larder_namespace *ns) {
    static const size_t too_many[] = {SIZE_MAX, SIZE_MAX / 32, (size_t)1 << 40, LARDER_BATCH_MAX + 1u};
    memory given = filled(2, 5);
    uint8_t keys[2 * LARDER_KEY_BYTES];
    larder_status statuses[2] = {99, 99};
    larder_put_options options = LARDER_PUT_OPTIONS_INIT;
    later_put_options later;
    uint32_t token = 1;
    size_t found = 77, at;
    uint64_t removed = 77;

    chained(ns, 9, 2, keys);
    for (at = 0; at < sizeof too_many / sizeof *too_many; at++) {
        const size_t many = too_many[at];
        FAILS(LARDER_E_ARGUMENT, larder_longest_prefix(ns, keys, many, &found, e));
        FAILS(LARDER_E_ARGUMENT, larder_contains(ns, keys, many, statuses, e));
        FAILS(LARDER_E_ARGUMENT, larder_put(ns, keys, given.parts, many, NULL, statuses, e));
        FAILS(LARDER_E_ARGUMENT, larder_get(ns, keys, given.parts, many, 0, statuses, e));
        FAILS(LARDER_E_ARGUMENT, larder_touch(ns, keys, many, e));
        FAILS(LARDER_E_ARGUMENT, larder_delete(ns, keys, many, &removed, e));
    }
    FAILS(LARDER_E_ARGUMENT, larder_chain(ns, NULL, NULL, &token, SIZE_MAX, keys, 2, &found, e));
    FAILS(LARDER_E_ARGUMENT, larder_chain(NULL, NULL, NULL, &token, 1, keys, 2, &found, e));
    FAILS(LARDER_E_ARGUMENT, larder_chain(ns, NULL, NULL, NULL, 16, keys, 2, &found, e));
    FAILS(LARDER_E_ARGUMENT, larder_chain(ns, keys, "salt", &token, 1, keys, 2, &found, e));
    FAILS(LARDER_E_ARGUMENT, larder_chain(ns, NULL, "\xff", &token, 1, keys, 2, &found, e));

    FAILS(LARDER_E_ARGUMENT, larder_longest_prefix(NULL, keys, 2, &found, e));
    FAILS(LARDER_E_ARGUMENT, larder_longest_prefix(ns, NULL, 2, &found, e));
    FAILS(LARDER_E_ARGUMENT, larder_longest_prefix(ns, keys, 2, NULL, e));
    FAILS(LARDER_E_ARGUMENT, larder_contains(NULL, keys, 2, statuses, e));
    FAILS(LARDER_E_ARGUMENT, larder_contains(ns, NULL, 2, statuses, e));
    FAILS(LARDER_E_ARGUMENT, larder_contains(ns, keys, 2, NULL, e));
    FAILS(LARDER_E_ARGUMENT, larder_put(NULL, keys, given.parts, 2, NULL, statuses, e));
    FAILS(LARDER_E_ARGUMENT, larder_put(ns, NULL, given.parts, 2, NULL, statuses, e));
    FAILS(LARDER_E_ARGUMENT, larder_put(ns, keys, NULL, 2, NULL, statuses, e));
    FAILS(LARDER_E_ARGUMENT, larder_put(ns, keys, given.parts, 2, NULL, NULL, e));
    FAILS(LARDER_E_ARGUMENT, larder_get(NULL, keys, given.parts, 2, 0, statuses, e));
    FAILS(LARDER_E_ARGUMENT, larder_get(ns, NULL, given.parts, 2, 0, statuses, e));
    FAILS(LARDER_E_ARGUMENT, larder_get(ns, keys, NULL, 2, 0, statuses, e));
    FAILS(LARDER_E_ARGUMENT, larder_get(ns, keys, given.parts, 2, 0, NULL, e));
    FAILS(LARDER_E_ARGUMENT, larder_touch(NULL, keys, 2, e));
    FAILS(LARDER_E_ARGUMENT, larder_touch(ns, NULL, 2, e));
    FAILS(LARDER_E_ARGUMENT, larder_delete(NULL, keys, 2, &removed, e));
    FAILS(LARDER_E_ARGUMENT, larder_delete(ns, NULL, 2, &removed, e));
    FAILS(LARDER_E_ARGUMENT, larder_clear(NULL, &removed, e));
    CHECK(larder_put(ns, NULL, given.parts, 2, NULL, statuses, NULL) == LARDER_E_ARGUMENT);

    /* Parts of another size, of no memory, and two in the same memory. */
    given.parts[1].length++;
    FAILS(LARDER_E_ARGUMENT, larder_put(ns, keys, given.parts, 2, NULL, statuses, e));
    given.parts[1].length = SIZE_MAX;
    FAILS(LARDER_E_ARGUMENT, larder_get(ns, keys, given.parts, 2, 0, statuses, e));
    given.parts[1].length = SECOND_PART;
    given.parts[2].base = NULL;
    FAILS(LARDER_E_ARGUMENT, larder_put(ns, keys, given.parts, 2, NULL, statuses, e));
    given.parts[2].base = given.first + FIRST_PART - 1;
    FAILS(LARDER_E_ARGUMENT, larder_get(ns, keys, given.parts, 2, 0, statuses, e));
    given.parts[2].base = given.first + FIRST_PART;

    options.loose = 1;
    options.depth = 1;
    FAILS(LARDER_E_ARGUMENT, larder_put(ns, keys, given.parts, 2, &options, statuses, e));
    options.loose = 2;
    FAILS(LARDER_E_ARGUMENT, larder_put(ns, keys, given.parts, 2, &options, statuses, e));
    options.loose = 0;
    options.hint_class = 64;
    FAILS(LARDER_E_ARGUMENT, larder_put(ns, keys, given.parts, 2, &options, statuses, e));
    options.hint_class = 0;
    options.hint_priority = 256;
    FAILS(LARDER_E_ARGUMENT, larder_put(ns, keys, given.parts, 2, &options, statuses, e));
    options.struct_size = sizeof options - 1;
    FAILS(LARDER_E_ARGUMENT, larder_put(ns, keys, given.parts, 2, &options, statuses, e));
    memset(&later, 0, sizeof later);
    later.known.struct_size = sizeof later;
    later.added[2] = (uint64_t)1 << 63;
    FAILS(LARDER_E_ARGUMENT, larder_put(ns, keys, given.parts, 2, &later.known, statuses, e));
    CHECK(found == 77 && removed == 77 && statuses[0] == 99 && statuses[1] == 99);

    /* No page at all is no error. */
    DONE(larder_put(ns, NULL, NULL, 0, NULL, NULL, e));
    DONE(larder_get(ns, NULL, NULL, 0, 0, NULL, e));
    DONE(larder_contains(ns, NULL, 0, NULL, e));
    DONE(larder_longest_prefix(ns, NULL, 0, &found, e));
    CHECK(found == 0);
    /* The largest wait is as good as any. */
    later.added[2] = 0;
    later.known.wait_ms = UINT64_MAX;
    DONE(larder_put(ns, keys, given.parts, 2, &later.known, statuses, e));
    DONE(larder_get(ns, keys, given.parts, 2, UINT64_MAX - 1, statuses, e));
    CHECK(count_of(statuses, 2, LARDER_OK) == 2);
    DONE(larder_delete(ns, keys, 2, NULL, e));
    freed(&given);
}

static void queues(larder_store *store, larder_namespace *ns, const char *path) {
    larder_queue_options limits = LARDER_QUEUE_OPTIONS_INIT;
    larder_queue *queue = NULL;
    larder_store *second;
    larder_namespace *foreign;
    larder_finished finished;
    larder_status statuses[2];
    memory given = filled(2, 5);
    uint8_t keys[2 * LARDER_KEY_BYTES];
    char other[4096];
    size_t count;

    chained(ns, 9, 2, keys);
    FAILS(LARDER_E_ARGUMENT, larder_queue_open(NULL, NULL, &queue, e));
    FAILS(LARDER_E_ARGUMENT, larder_queue_open(store, NULL, NULL, e));
    limits.threads = 65;
    FAILS(LARDER_E_ARGUMENT, larder_queue_open(store, &limits, &queue, e));
    limits.threads = UINT64_MAX;
    FAILS(LARDER_E_ARGUMENT, larder_queue_open(store, &limits, &queue, e));
    limits.threads = 0;
    limits.jobs = UINT64_MAX;
    FAILS(LARDER_E_ARGUMENT, larder_queue_open(store, &limits, &queue, e));
    limits.jobs = 0;
    limits.job_bytes = FIRST_PART + SECOND_PART;
    DONE(larder_queue_open(store, &limits, &queue, e));
    CHECK(larder_queue_fd(NULL) == -1);
    FAILS(LARDER_E_ARGUMENT, larder_submit_get(NULL, ns, keys, given.parts, 1, 0, 0, statuses, NULL, e));
    FAILS(LARDER_E_ARGUMENT, larder_submit_get(queue, NULL, keys, given.parts, 1, 0, 0, statuses, NULL, e));
    FAILS(LARDER_E_ARGUMENT, larder_submit_get(queue, ns, NULL, given.parts, 1, 0, 0, statuses, NULL, e));
    FAILS(LARDER_E_ARGUMENT, larder_submit_get(queue, ns, keys, NULL, 1, 0, 0, statuses, NULL, e));
    FAILS(LARDER_E_ARGUMENT, larder_submit_get(queue, ns, keys, given.parts, 1, 0, 0, NULL, NULL, e));
    FAILS(LARDER_E_ARGUMENT, larder_submit_get(queue, ns, keys, given.parts, SIZE_MAX, 0, 0, statuses, NULL, e));
    FAILS(LARDER_E_ARGUMENT, larder_submit_put(queue, ns, keys, given.parts, (size_t)1 << 40, NULL, 0, 0, statuses, NULL, e));
    FAILS(LARDER_E_ARGUMENT, larder_submit_put(NULL, ns, keys, given.parts, 1, NULL, 0, 0, statuses, NULL, e));
    /* More bytes than the queue takes. */
    FAILS(LARDER_E_ARGUMENT, larder_submit_put(queue, ns, keys, given.parts, 2, NULL, 0, 0, statuses, NULL, e));
    FAILS(LARDER_E_ARGUMENT, larder_poll(NULL, &finished, 1, 0, &count, e));
    FAILS(LARDER_E_ARGUMENT, larder_poll(queue, NULL, 1, 0, &count, e));
    FAILS(LARDER_E_ARGUMENT, larder_poll(queue, &finished, 1, 0, NULL, e));
    DONE(larder_poll(queue, NULL, 0, LARDER_FOREVER, &count, e));
    snprintf(other, sizeof other, "%s/other", path);
    second = opened(other, 1);
    foreign = space(second);
    FAILS(LARDER_E_ARGUMENT, larder_submit_get(queue, foreign, keys, given.parts, 1, 0, 0, statuses, NULL, e));
    larder_namespace_free(foreign);
    DONE(larder_close(second, LARDER_FOREVER, e));
    larder_store_free(second);
    larder_queue_free(queue);
    freed(&given);
}

int main(int argc, char **argv) {
    larder_store *store;
    larder_namespace *ns;
    char *json = NULL;
    int fd = 0;
    CHECK(argc == 2);
    larder_error_free(NULL);
    larder_store_free(NULL);
    larder_namespace_free(NULL);
    larder_queue_free(NULL);
    larder_text_free(NULL);
    CHECK(larder_error_code(NULL) == LARDER_DONE && larder_error_text(NULL)[0] == 0);
    FAILS(LARDER_E_ARGUMENT, larder_log_fd(NULL, e));
    FAILS(LARDER_E_ARGUMENT, larder_close(NULL, 0, e));
    FAILS(LARDER_E_ARGUMENT, larder_flush(NULL, e));
    FAILS(LARDER_E_ARGUMENT, larder_stats(NULL, &json, e));
    stores(argv[1]);
    store = opened(argv[1], 0);
    FAILS(LARDER_E_ARGUMENT, larder_stats(store, NULL, e));
    namespaces(store);
    ns = space(store);
    pages(ns);
    queues(store, ns, argv[1]);
    /* The log has begun with the first store. */
    DONE(larder_log_fd(&fd, e));
    CHECK(fd == -1);
    larder_namespace_free(ns);
    DONE(larder_close(store, LARDER_FOREVER, e));
    larder_store_free(store);
    return 0;
}
