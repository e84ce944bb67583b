/* Every call once, as an engine uses it: put, look up, read, jobs, delete, and a second start. */
#include "check.h"

#include <poll.h>

enum { PAGES = 6 };

static void first_run(const char *path) {
    larder_store *store = opened(path, 0);
    larder_namespace *ns = space(store);
    memory given = filled(PAGES, 1), read = allocated(PAGES);
    uint8_t keys[PAGES * LARDER_KEY_BYTES], other[LARDER_KEY_BYTES];
    larder_status statuses[PAGES];
    larder_put_options options = LARDER_PUT_OPTIONS_INIT;
    uint32_t tokens[PAGE_TOKENS * 2 + 3] = {7};
    uint64_t removed = 0;
    size_t found = 9, whole = 0;
    char *json = NULL;

    chained(ns, 1, PAGES, keys);
    DONE(larder_longest_prefix(ns, keys, PAGES, &found, e));
    CHECK(found == 0);
    DONE(larder_get(ns, keys, read.parts, PAGES, LARDER_FOREVER, statuses, e));
    CHECK(count_of(statuses, PAGES, LARDER_ABSENT) == PAGES);

    options.wait_ms = 10000;
    DONE(larder_put(ns, keys, given.parts, 2, &options, statuses, e));
    CHECK(count_of(statuses, 2, LARDER_OK) == 2);
    options.before = keys + LARDER_KEY_BYTES;
    options.depth = 2;
    DONE(larder_put(ns, keys + 2 * LARDER_KEY_BYTES, given.parts + 4, PAGES - 2, &options, statuses, e));
    CHECK(count_of(statuses, PAGES - 2, LARDER_OK) == PAGES - 2);
    DONE(larder_put(ns, keys, given.parts, PAGES, NULL, statuses, e));
    CHECK(count_of(statuses, PAGES, LARDER_DUPLICATE) == PAGES);

    DONE(larder_longest_prefix(ns, keys, PAGES, &found, e));
    CHECK(found == PAGES);
    DONE(larder_contains(ns, keys, PAGES, statuses, e));
    CHECK(count_of(statuses, PAGES, LARDER_OK) == PAGES);
    DONE(larder_get(ns, keys, read.parts, PAGES, 10000, statuses, e));
    CHECK(count_of(statuses, PAGES, LARDER_OK) == PAGES && same(&given, &read));
    DONE(larder_touch(ns, keys, PAGES, e));

    /* A chain in two calls, a salt, and less room than pages. */
    DONE(larder_chain(ns, NULL, NULL, tokens, PAGE_TOKENS * 2 + 3, keys, 1, &whole, e));
    CHECK(whole == 2);
    DONE(larder_chain(ns, keys, NULL, tokens + PAGE_TOKENS, PAGE_TOKENS, other, 1, NULL, e));
    DONE(larder_chain(ns, NULL, NULL, tokens, PAGE_TOKENS * 2 + 3, keys, 2, &whole, e));
    CHECK(memcmp(keys + LARDER_KEY_BYTES, other, LARDER_KEY_BYTES) == 0);
    DONE(larder_chain(ns, NULL, "adapter", tokens, PAGE_TOKENS, other, 1, &whole, e));
    CHECK(whole == 1 && memcmp(keys, other, LARDER_KEY_BYTES) != 0);

    chained(ns, 1, PAGES, keys);
    DONE(larder_delete(ns, keys + (PAGES - 1) * LARDER_KEY_BYTES, 1, &removed, e));
    CHECK(removed == 1);
    DONE(larder_longest_prefix(ns, keys, PAGES, &found, e));
    CHECK(found == PAGES - 1);
    DONE(larder_flush(store, e));
    DONE(larder_stats(store, &json, e));
    CHECK(json[0] == '{' && strstr(json, "\"refused_leases\":0") != NULL);
    larder_text_free(json);
    DONE(larder_close(store, LARDER_FOREVER, e));
    DONE(larder_close(store, 0, e));
    DONE(larder_get(ns, keys, read.parts, PAGES, 0, statuses, e));
    CHECK(count_of(statuses, PAGES, LARDER_CLOSED) == PAGES);
    FAILS(LARDER_E_CLOSED, larder_stats(store, &json, e));
    larder_namespace_free(ns);
    larder_store_free(store);
    freed(&given);
    freed(&read);
}

/* Jobs, and the free calls in an order of no use: the namespace keeps the store. */
static void second_run(const char *path) {
    enum { JOBS = 8 };
    larder_store *store = opened(path, 1);
    larder_namespace *ns = space(store);
    larder_queue *queue = NULL;
    larder_queue_options limits = LARDER_QUEUE_OPTIONS_INIT;
    memory given[JOBS], read = allocated(1);
    uint8_t keys[JOBS][LARDER_KEY_BYTES];
    larder_status statuses[JOBS], status = LARDER_OTHER;
    larder_finished finished[JOBS];
    struct pollfd event;
    unsigned seen = 0, at;
    size_t count = 0, n;
    uint64_t job = 0, removed = 0;

    larder_store_free(store);
    chained(ns, 1, 1, keys[0]);
    DONE(larder_get(ns, keys[0], read.parts, 1, LARDER_FOREVER, &status, e));
    CHECK(status == LARDER_OK);
    larder_namespace_free(ns);

    store = opened(path, 0);
    ns = space(store);
    limits.jobs = JOBS;
    DONE(larder_queue_open(store, &limits, &queue, e));
    event.fd = larder_queue_fd(queue);
    event.events = POLLIN;
    CHECK(event.fd >= 0 && poll(&event, 1, 0) == 0);
    DONE(larder_poll(queue, finished, JOBS, 0, &count, e));
    CHECK(count == 0);
    for (at = 0; at < JOBS; at++) {
        given[at] = filled(1, at);
        chained(ns, 100 + at, 1, keys[at]);
        DONE(larder_submit_put(queue, ns, keys[at], given[at].parts, 1, NULL, LARDER_FOREVER, at,
                               &statuses[at], &job, e));
    }
    FAILS(LARDER_E_FULL, larder_submit_put(queue, ns, keys[0], given[0].parts, 1, NULL, 0, 0,
                                           statuses, NULL, e));
    while (seen < (1u << JOBS) - 1) {
        CHECK(poll(&event, 1, 60000) == 1);
        DONE(larder_poll(queue, finished, JOBS, 0, &count, e));
        for (n = 0; n < count; n++) {
            CHECK(finished[n].pages == 1 && (seen & 1u << finished[n].tag) == 0);
            CHECK(statuses[finished[n].tag] == LARDER_OK);
            seen |= 1u << finished[n].tag;
        }
    }
    CHECK(poll(&event, 1, 0) == 0);
    DONE(larder_submit_get(queue, ns, keys[3], read.parts, 1, LARDER_FOREVER, 77, &status, &job, e));
    DONE(larder_poll(queue, finished, JOBS, LARDER_FOREVER, &count, e));
    CHECK(count == 1 && finished[0].job == job && finished[0].tag == 77);
    CHECK(status == LARDER_OK && same(&read, &given[3]));
    DONE(larder_submit_get(queue, ns, keys[4], read.parts, 1, LARDER_FOREVER, 78, &status, NULL, e));
    DONE(larder_clear(ns, &removed, e));
    CHECK(removed >= JOBS);
    DONE(larder_close(store, LARDER_FOREVER, e));
    DONE(larder_poll(queue, finished, JOBS, LARDER_FOREVER, &count, e));
    CHECK(count == 1 && finished[0].tag == 78);
    FAILS(LARDER_E_CLOSED, larder_poll(queue, finished, JOBS, LARDER_FOREVER, &count, e));
    FAILS(LARDER_E_CLOSED, larder_submit_get(queue, ns, keys[4], read.parts, 1, 0, 0, &status, NULL, e));
    larder_queue_free(queue);
    larder_namespace_free(ns);
    larder_store_free(store);
    for (at = 0; at < JOBS; at++) freed(&given[at]);
    freed(&read);
}

int main(int argc, char **argv) {
    CHECK(argc == 2);
    CHECK(larder_abi() == LARDER_ABI && strlen(larder_version()) >= 5);
    CHECK(strcmp(larder_status_name(LARDER_ABSENT), "ABSENT") == 0);
    CHECK(strcmp(larder_status_name(200), "OTHER") == 0);
    first_run(argv[1]);
    second_run(argv[1]);
    return 0;
}
