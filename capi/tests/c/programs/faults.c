/* One step of a test with faults. The store, and what is done with it, are arguments:
 *   write PATH           puts pages, and closes
 *   read PATH            opens the store and prints the status of each page
 *   own PATH             puts pages, prints a line, and serves other processes until it is killed
 *   join PATH            reads as a client, prints statuses, waits for a line, and reads again
 *   full PATH            after a line puts pages until the disk is full, and prints the status of the
 *                        page refused; after another line puts them until all are stored
 */
#include "check.h"

#include <unistd.h>

enum { PAGES = 8 };

static void shown(const larder_status *statuses) {
    size_t at;
    for (at = 0; at < PAGES; at++) printf("%s%s", at == 0 ? "" : " ", larder_status_name(statuses[at]));
    printf("\n");
    fflush(stdout);
}

/* Puts the pages of the conversation `seed`. */
static void put_all(larder_namespace *ns, uint32_t seed, larder_status *statuses) {
    memory given = filled(PAGES, 2 + seed);
    uint8_t keys[PAGES * LARDER_KEY_BYTES];
    chained(ns, seed, PAGES, keys);
    DONE(larder_put(ns, keys, given.parts, PAGES, NULL, statuses, e));
    freed(&given);
}

/* Reads them, and compares the bytes of those that are read. */
static void get_all(larder_namespace *ns, uint32_t seed, larder_status *statuses) {
    memory given = filled(PAGES, 2 + seed), read = allocated(PAGES);
    uint8_t keys[PAGES * LARDER_KEY_BYTES];
    size_t at;
    chained(ns, seed, PAGES, keys);
    DONE(larder_get(ns, keys, read.parts, PAGES, 2000, statuses, e));
    for (at = 0; at < PAGES; at++) {
        if (statuses[at] != LARDER_OK) continue;
        CHECK(memcmp(given.first + at * FIRST_PART, read.first + at * FIRST_PART, FIRST_PART) == 0);
        CHECK(memcmp(given.second + at * SECOND_PART, read.second + at * SECOND_PART, SECOND_PART) == 0);
    }
    freed(&given);
    freed(&read);
}

static void put(larder_namespace *ns) {
    larder_status statuses[PAGES];
    put_all(ns, 1, statuses);
    CHECK(count_of(statuses, PAGES, LARDER_OK) == PAGES);
}

static void get(larder_namespace *ns) {
    larder_status statuses[PAGES];
    get_all(ns, 1, statuses);
    shown(statuses);
}

static void await_line(void) {
    char line[16];
    CHECK(read(0, line, sizeof line) >= 0);
}

/* Puts on a disk that is full, and on the same one with room again. */
static void fill(larder_store *store, larder_namespace *ns) {
    larder_status statuses[PAGES];
    larder_error *error = NULL;
    uint32_t seed, last;
    size_t at;

    printf("ready\n");
    fflush(stdout);
    await_line();
    for (last = 2;; last++) {
        put_all(ns, last, statuses);
        for (at = 0; at < PAGES && statuses[at] <= LARDER_DUPLICATE; at++) continue;
        if (at < PAGES && statuses[at] != LARDER_BUSY && statuses[at] != LARDER_NO_SPACE) break;
    }
    printf("%s\n", larder_status_name(statuses[at]));
    /* What was put before may be durable. If not, the flush says so. */
    if (larder_flush(store, &error) != LARDER_DONE) {
        CHECK(larder_error_code(error) == LARDER_E_STORE);
        CHECK(strlen(larder_error_text(error)) > 10);
    }
    larder_error_free(error);
    get_all(ns, 1, statuses);
    CHECK(count_of(statuses, PAGES, LARDER_OK) == PAGES);
    for (seed = 2; seed <= last; seed++) get_all(ns, seed, statuses);
    printf("served\n");
    fflush(stdout);
    await_line();
    do {
        put_all(ns, last + 1, statuses);
    } while (count_of(statuses, PAGES, LARDER_OK) + count_of(statuses, PAGES, LARDER_DUPLICATE) < PAGES);
    DONE(larder_flush(store, e));
    for (seed = 1; seed <= last + 1; seed++) {
        get_all(ns, seed, statuses);
        if (seed == 1 || seed > last) CHECK(count_of(statuses, PAGES, LARDER_OK) == PAGES);
    }
    printf("stored\n");
}

int main(int argc, char **argv) {
    larder_open_options options = LARDER_OPEN_OPTIONS_INIT;
    larder_store *store = NULL;
    larder_namespace *ns = NULL;
    larder_error *error = NULL;

    CHECK(argc == 3);
    options.size = 256u << 20;
    options.hang_limit_ms = 1000;
    options.lease_ms = 600000;
    if (larder_attach(argv[2], &options, &store, &error) != LARDER_DONE) {
        CHECK(larder_error_code(error) == LARDER_E_STORE);
        printf("refused: %s\n", larder_error_text(error));
        larder_error_free(error);
        return 0;
    }
    if (larder_namespace_open(store, IDENTITY, &ns, &error) != LARDER_DONE) {
        printf("no namespace: %s\n", larder_error_text(error));
        larder_error_free(error);
        larder_store_free(store);
        return 0;
    }
    if (strcmp(argv[1], "write") == 0) put(ns);
    if (strcmp(argv[1], "read") == 0 || strcmp(argv[1], "join") == 0) get(ns);
    if (strcmp(argv[1], "own") == 0) {
        put(ns);
        printf("ready\n");
        fflush(stdout);
    }
    if (strcmp(argv[1], "own") == 0 || strcmp(argv[1], "join") == 0) await_line();
    if (strcmp(argv[1], "full") == 0) fill(store, ns);
    if (strcmp(argv[1], "join") == 0) get(ns);
    larder_namespace_free(ns);
    (void)larder_close(store, 20000, NULL);
    larder_store_free(store);
    return 0;
}
