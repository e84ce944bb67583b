/* Lookups without I/O: prints the nanoseconds of a call with one key and with 128. */
#include "check.h"

#include <time.h>

enum { PAGES = 128 };

static double nanoseconds(void) {
    struct timespec now;
    CHECK(clock_gettime(CLOCK_MONOTONIC, &now) == 0);
    return (double)now.tv_sec * 1e9 + (double)now.tv_nsec;
}

static double looked_up(larder_namespace *ns, const uint8_t *keys, size_t count, int calls) {
    const double begun = nanoseconds();
    size_t found = 0;
    int at;
    for (at = 0; at < calls; at++) {
        DONE(larder_longest_prefix(ns, keys, count, &found, e));
        CHECK(found == count);
    }
    return (nanoseconds() - begun) / calls;
}

int main(int argc, char **argv) {
    larder_open_options options = LARDER_OPEN_OPTIONS_INIT;
    larder_store *store = NULL;
    larder_namespace *ns;
    memory given = filled(PAGES, 3);
    static uint8_t keys[PAGES * LARDER_KEY_BYTES];
    larder_status statuses[PAGES];
    int calls;
    size_t count;
    double took;

    CHECK(argc == 4);
    count = (size_t)atoi(argv[2]);
    calls = atoi(argv[3]);
    /* io_uring hangs under valgrind. */
    options.settings = "{\"disk\": \"threads\"}";
    options.size = 256u << 20;
    DONE(larder_open(argv[1], &options, &store, e));
    ns = space(store);
    chained(ns, 1, PAGES, keys);
    DONE(larder_put(ns, keys, given.parts, PAGES, NULL, statuses, e));
    took = looked_up(ns, keys, count, calls);
    printf("%d calls with %d keys: %.0f ns each\n", calls, (int)count, took);
    larder_namespace_free(ns);
    DONE(larder_close(store, LARDER_FOREVER, e));
    larder_store_free(store);
    freed(&given);
    return 0;
}
