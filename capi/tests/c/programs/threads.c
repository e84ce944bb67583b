/* Threads that share a store, a namespace and a queue. */
#include "check.h"

#include <pthread.h>

enum { THREADS = 4, ROUNDS = 20 };

typedef struct shared {
    larder_namespace *ns;
    larder_queue *queue;
    uint32_t seed;
    /* Of the jobs: any thread may poll them, so the memory lasts until all threads have ended. */
    memory jobs[ROUNDS];
    larder_status statuses[ROUNDS];
} shared;

static void *work(void *given) {
    shared *with = (shared *)given;
    memory page = filled(1, with->seed), read = allocated(1);
    uint8_t key[LARDER_KEY_BYTES];
    larder_status status;
    size_t found;
    uint32_t round;
    for (round = 0; round < ROUNDS; round++) {
        larder_put_options options = LARDER_PUT_OPTIONS_INIT;
        options.wait_ms = 10000;
        chained(with->ns, with->seed * ROUNDS + round, 1, key);
        DONE(larder_put(with->ns, key, page.parts, 1, &options, &status, e));
        CHECK(status == LARDER_OK);
        DONE(larder_longest_prefix(with->ns, key, 1, &found, e));
        CHECK(found == 1);
        DONE(larder_get(with->ns, key, read.parts, 1, LARDER_FOREVER, &status, e));
        CHECK(status == LARDER_OK && same(&page, &read));
        with->jobs[round] = allocated(1);
        DONE(larder_submit_get(with->queue, with->ns, key, with->jobs[round].parts, 1, LARDER_FOREVER,
                               round, &with->statuses[round], NULL, e));
    }
    freed(&page);
    freed(&read);
    return NULL;
}

int main(int argc, char **argv) {
    pthread_t threads[THREADS];
    static shared given[THREADS];
    larder_store *store;
    larder_namespace *ns;
    larder_queue *queue = NULL;
    larder_finished finished[8];
    size_t count = 0, seen = 0;
    uint32_t at, round;
    CHECK(argc == 2);
    store = opened(argv[1], 0);
    ns = space(store);
    DONE(larder_queue_open(store, NULL, &queue, e));
    for (at = 0; at < THREADS; at++) {
        given[at].ns = ns;
        given[at].queue = queue;
        given[at].seed = at;
        CHECK(pthread_create(&threads[at], NULL, work, &given[at]) == 0);
    }
    while (seen < THREADS * ROUNDS) {
        DONE(larder_poll(queue, finished, 8, LARDER_FOREVER, &count, e));
        seen += count;
    }
    for (at = 0; at < THREADS; at++) {
        CHECK(pthread_join(threads[at], NULL) == 0);
        CHECK(count_of(given[at].statuses, ROUNDS, LARDER_OK) == ROUNDS);
        for (round = 0; round < ROUNDS; round++) freed(&given[at].jobs[round]);
    }
    larder_queue_free(queue);
    larder_namespace_free(ns);
    DONE(larder_close(store, LARDER_FOREVER, e));
    larder_store_free(store);
    return 0;
}
