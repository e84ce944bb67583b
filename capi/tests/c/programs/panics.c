/* A panic in any function is an internal error, and the next call works. The environment names the function. */
#include "check.h"

#define PANICS(name, call)                                    \
    do {                                                      \
        setenv("LARDER_PLANTED_PANIC", #name, 1);             \
        FAILS(LARDER_E_INTERNAL, call);                       \
        setenv("LARDER_PLANTED_PANIC", "", 1);                \
        planted++;                                            \
    } while (0)

int main(int argc, char **argv) {
    larder_open_options options = LARDER_OPEN_OPTIONS_INIT;
    larder_store *store = NULL;
    larder_namespace *ns = NULL;
    larder_queue *queue = NULL;
    larder_finished finished;
    larder_status status = LARDER_OTHER;
    memory given = filled(1, 3);
    uint8_t key[LARDER_KEY_BYTES];
    uint32_t tokens[PAGE_TOKENS] = {0};
    char *json = NULL;
    size_t count = 0;
    int fd, planted = 0;

    CHECK(argc == 2);
    setenv("LARDER_PLANTED_PANIC", "", 1);
    options.size = 256u << 20;
    PANICS(larder_log_fd, larder_log_fd(&fd, e));
    PANICS(larder_open, larder_open(argv[1], &options, &store, e));
    PANICS(larder_attach, larder_attach(argv[1], &options, &store, e));
    CHECK(store == NULL);
    store = opened(argv[1], 0);
    PANICS(larder_namespace_open, larder_namespace_open(store, IDENTITY, &ns, e));
    ns = space(store);
    PANICS(larder_chain, larder_chain(ns, NULL, NULL, tokens, PAGE_TOKENS, key, 1, &count, e));
    chained(ns, 1, 1, key);
    PANICS(larder_put, larder_put(ns, key, given.parts, 1, NULL, &status, e));
    DONE(larder_put(ns, key, given.parts, 1, NULL, &status, e));
    CHECK(status == LARDER_OK);
    PANICS(larder_longest_prefix, larder_longest_prefix(ns, key, 1, &count, e));
    PANICS(larder_contains, larder_contains(ns, key, 1, &status, e));
    PANICS(larder_get, larder_get(ns, key, given.parts, 1, 0, &status, e));
    PANICS(larder_touch, larder_touch(ns, key, 1, e));
    PANICS(larder_queue_open, larder_queue_open(store, NULL, &queue, e));
    DONE(larder_queue_open(store, NULL, &queue, e));
    PANICS(larder_submit_put, larder_submit_put(queue, ns, key, given.parts, 1, NULL, 0, 0, &status, NULL, e));
    PANICS(larder_submit_get, larder_submit_get(queue, ns, key, given.parts, 1, 0, 0, &status, NULL, e));
    PANICS(larder_poll, larder_poll(queue, &finished, 1, 0, &count, e));
    PANICS(larder_delete, larder_delete(ns, key, 1, NULL, e));
    PANICS(larder_clear, larder_clear(ns, NULL, e));
    PANICS(larder_flush, larder_flush(store, e));
    PANICS(larder_stats, larder_stats(store, &json, e));
    PANICS(larder_close, larder_close(store, LARDER_FOREVER, e));
    DONE(larder_get(ns, key, given.parts, 1, LARDER_FOREVER, &status, e));
    CHECK(status == LARDER_OK);
    larder_queue_free(queue);
    larder_namespace_free(ns);
    DONE(larder_close(store, LARDER_FOREVER, e));
    larder_store_free(store);
    freed(&given);
    printf("%d\n", planted);
    return 0;
}
