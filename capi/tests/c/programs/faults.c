/* One step of a test with faults. The store, and what is done with it, are arguments:
 *   write PATH           puts pages, and closes
 *   read PATH            opens the store and prints the status of each page
 *   own PATH             puts pages, prints a line, and serves other processes until it is killed
 *   join PATH            reads as a client, prints statuses, waits for a line, and reads again
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

static void put(larder_namespace *ns) {
    memory given = filled(PAGES, 3);
    uint8_t keys[PAGES * LARDER_KEY_BYTES];
    larder_status statuses[PAGES];
    chained(ns, 1, PAGES, keys);
    DONE(larder_put(ns, keys, given.parts, PAGES, NULL, statuses, e));
    CHECK(count_of(statuses, PAGES, LARDER_OK) == PAGES);
    freed(&given);
}

static void get(larder_namespace *ns) {
    memory given = filled(PAGES, 3), read = allocated(PAGES);
    uint8_t keys[PAGES * LARDER_KEY_BYTES];
    larder_status statuses[PAGES];
    size_t at;
    chained(ns, 1, PAGES, keys);
    DONE(larder_get(ns, keys, read.parts, PAGES, 2000, statuses, e));
    for (at = 0; at < PAGES; at++) {
        if (statuses[at] != LARDER_OK) continue;
        CHECK(memcmp(given.first + at * FIRST_PART, read.first + at * FIRST_PART, FIRST_PART) == 0);
        CHECK(memcmp(given.second + at * SECOND_PART, read.second + at * SECOND_PART, SECOND_PART) == 0);
    }
    shown(statuses);
    freed(&given);
    freed(&read);
}

int main(int argc, char **argv) {
    larder_open_options options = LARDER_OPEN_OPTIONS_INIT;
    larder_store *store = NULL;
    larder_namespace *ns = NULL;
    larder_error *error = NULL;
    char line[16];

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
    if (strcmp(argv[1], "own") == 0 || strcmp(argv[1], "join") == 0) {
        CHECK(read(0, line, sizeof line) >= 0);
    }
    if (strcmp(argv[1], "join") == 0) get(ns);
    larder_namespace_free(ns);
    (void)larder_close(store, 20000, NULL);
    larder_store_free(store);
    return 0;
}
