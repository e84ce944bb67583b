/* In a child of fork, handles of the parent miss or fail, and their free calls leave the parent alone. */
#include "check.h"

#include <sys/wait.h>
#include <unistd.h>

enum { PAGES = 3 };

static void child(const char *path, larder_store *store, larder_namespace *ns, larder_queue *queue,
                  const uint8_t *keys, memory *read) {
    larder_status statuses[PAGES];
    larder_namespace *another = NULL;
    larder_queue *more = NULL;
    larder_finished finished;
    larder_store *mine;
    char *json = NULL;
    size_t found = 9, count = 0;
    uint64_t removed;

    DONE(larder_get(ns, keys, read->parts, PAGES, 1000, statuses, e));
    CHECK(count_of(statuses, PAGES, LARDER_CLOSED) == PAGES);
    DONE(larder_put(ns, keys, read->parts, PAGES, NULL, statuses, e));
    CHECK(count_of(statuses, PAGES, LARDER_CLOSED) == PAGES);
    DONE(larder_contains(ns, keys, PAGES, statuses, e));
    CHECK(count_of(statuses, PAGES, LARDER_CLOSED) == PAGES);
    DONE(larder_longest_prefix(ns, keys, PAGES, &found, e));
    CHECK(found == 0);
    DONE(larder_touch(ns, keys, PAGES, e));
    FAILS(LARDER_E_FORKED, larder_flush(store, e));
    FAILS(LARDER_E_FORKED, larder_stats(store, &json, e));
    FAILS(LARDER_E_FORKED, larder_namespace_open(store, IDENTITY, &another, e));
    FAILS(LARDER_E_FORKED, larder_delete(ns, keys, PAGES, &removed, e));
    FAILS(LARDER_E_FORKED, larder_clear(ns, &removed, e));
    FAILS(LARDER_E_FORKED, larder_queue_open(store, NULL, &more, e));
    FAILS(LARDER_E_FORKED, larder_poll(queue, &finished, 1, LARDER_FOREVER, &count, e));
    FAILS(LARDER_E_FORKED, larder_submit_get(queue, ns, keys, read->parts, PAGES, 0, 0, statuses, NULL, e));
    FAILS(LARDER_E_FORKED, larder_close(store, LARDER_FOREVER, e));
    larder_queue_free(queue);
    larder_store_free(store);
    larder_namespace_free(ns);

    /* A store of its own: a client of the parent's. */
    mine = opened(path, 0);
    ns = space(mine);
    DONE(larder_get(ns, keys, read->parts, PAGES, LARDER_FOREVER, statuses, e));
    CHECK(count_of(statuses, PAGES, LARDER_OK) == PAGES);
    larder_namespace_free(ns);
    DONE(larder_close(mine, LARDER_FOREVER, e));
    larder_store_free(mine);
}

int main(int argc, char **argv) {
    larder_store *store;
    larder_namespace *ns;
    larder_queue *queue = NULL;
    memory given = filled(PAGES, 3), read = allocated(PAGES);
    uint8_t keys[PAGES * LARDER_KEY_BYTES];
    larder_status statuses[PAGES];
    larder_finished finished;
    size_t count = 0;
    int state = 0;
    pid_t pid;

    CHECK(argc == 2);
    store = opened(argv[1], 0);
    ns = space(store);
    chained(ns, 1, PAGES, keys);
    DONE(larder_queue_open(store, NULL, &queue, e));
    DONE(larder_submit_put(queue, ns, keys, given.parts, PAGES, NULL, LARDER_FOREVER, 1, statuses, NULL, e));
    DONE(larder_poll(queue, &finished, 1, LARDER_FOREVER, &count, e));
    CHECK(count_of(statuses, PAGES, LARDER_OK) == PAGES);
    pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        child(argv[1], store, ns, queue, keys, &read);
        /* What is the parent's is not freed here, so no search for leaks. */
        _exit(0);
    }
    CHECK(waitpid(pid, &state, 0) == pid && WIFEXITED(state) && WEXITSTATUS(state) == 0);
    DONE(larder_submit_get(queue, ns, keys, read.parts, PAGES, LARDER_FOREVER, 2, statuses, NULL, e));
    DONE(larder_poll(queue, &finished, 1, LARDER_FOREVER, &count, e));
    CHECK(count == 1 && finished.tag == 2);
    CHECK(count_of(statuses, PAGES, LARDER_OK) == PAGES && same(&given, &read));
    larder_queue_free(queue);
    larder_namespace_free(ns);
    DONE(larder_close(store, LARDER_FOREVER, e));
    larder_store_free(store);
    freed(&given);
    freed(&read);
    return 0;
}
