/* A program of the first release of ABI 1, with the header of that release. Neither ever changes. */
#include "larder.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(what)                                                    \
    do {                                                               \
        if (!(what)) {                                                 \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #what); \
            exit(1);                                                   \
        }                                                              \
    } while (0)

static const char identity[] =
    "{\"model\": \"toy\", \"weights\": \"1\", \"dtype\": \"f16\", \"layout\": \"l\", "
    "\"page_tokens\": 4, \"parts\": [512, 64], \"tp\": [0, 2], \"pool\": \"p\", "
    "\"extra\": {\"build\": \"7\"}}";

/* The begin of the SHA-256 of the tokens 0 to 3. */
static const uint8_t first_key[4] = {0xba, 0xed, 0x64, 0x23};

int main(int argc, char **argv) {
    larder_open_options options = LARDER_OPEN_OPTIONS_INIT;
    larder_put_options putting = LARDER_PUT_OPTIONS_INIT;
    larder_queue_options limits = LARDER_QUEUE_OPTIONS_INIT;
    larder_store *store = NULL;
    larder_namespace *ns = NULL;
    larder_queue *queue = NULL;
    larder_error *error = NULL;
    larder_finished finished[2];
    larder_status statuses[2];
    larder_part parts[4];
    uint8_t memory[2 * 576], read[2 * 576], keys[2 * LARDER_KEY_BYTES];
    uint32_t tokens[8] = {0, 1, 2, 3, 4, 5, 6, 7};
    uint64_t job = 0, removed = 0;
    size_t at, pages = 0, found = 0;
    char *json = NULL;

    CHECK(argc == 2 && larder_abi() == 1 && larder_version() != NULL);
    options.size = 256u << 20;
    options.page_bytes = 576;
    options.lease_ms = 1000;
    options.hang_limit_ms = 60000;
    options.settings = "{\"sync\": \"relaxed\", \"policy\": \"lru\", \"prewrite\": false}";
    CHECK(larder_open(argv[1], &options, &store, &error) == LARDER_DONE);
    CHECK(larder_namespace_open(store, identity, &ns, &error) == LARDER_DONE);
    CHECK(larder_namespace_open(store, "{}", &ns, &error) == LARDER_E_ARGUMENT);
    CHECK(larder_error_code(error) == LARDER_E_ARGUMENT && larder_error_text(error)[0] != 0);
    larder_error_free(error);
    CHECK(larder_chain(ns, NULL, NULL, tokens, 8, keys, 2, &pages, NULL) == LARDER_DONE && pages == 2);
    CHECK(memcmp(keys, first_key, sizeof first_key) == 0);
    for (at = 0; at < sizeof memory; at++) memory[at] = (uint8_t)(at * 5);
    for (at = 0; at < 4; at++) {
        parts[at].base = memory + at / 2 * 576 + at % 2 * 512;
        parts[at].length = at % 2 == 0 ? 512 : 64;
    }
    putting.wait_ms = 10000;
    putting.hint_class = 2;
    putting.hint_priority = 1;
    CHECK(larder_put(ns, keys, parts, 2, &putting, statuses, NULL) == LARDER_DONE);
    CHECK(statuses[0] == LARDER_OK && statuses[1] == LARDER_OK);
    CHECK(larder_longest_prefix(ns, keys, 2, &found, NULL) == LARDER_DONE && found == 2);
    CHECK(larder_contains(ns, keys, 2, statuses, NULL) == LARDER_DONE && statuses[1] == LARDER_OK);
    CHECK(larder_touch(ns, keys, 2, NULL) == LARDER_DONE);
    for (at = 0; at < 4; at++) parts[at].base = read + at / 2 * 576 + at % 2 * 512;
    CHECK(larder_get(ns, keys, parts, 2, 10000, statuses, NULL) == LARDER_DONE);
    CHECK(statuses[0] == LARDER_OK && memcmp(memory, read, sizeof memory) == 0);
    limits.threads = 1;
    limits.jobs = 4;
    limits.job_bytes = 1 << 20;
    CHECK(larder_queue_open(store, &limits, &queue, NULL) == LARDER_DONE && larder_queue_fd(queue) >= 0);
    CHECK(larder_submit_put(queue, ns, keys, parts, 2, &putting, LARDER_FOREVER, 1, statuses, &job, NULL) ==
          LARDER_DONE);
    CHECK(larder_poll(queue, finished, 2, LARDER_FOREVER, &found, NULL) == LARDER_DONE && found == 1);
    CHECK(finished[0].job == job && finished[0].tag == 1 && finished[0].pages == 2);
    CHECK(statuses[1] == LARDER_DUPLICATE);
    memset(read, 0, sizeof read);
    CHECK(larder_submit_get(queue, ns, keys, parts, 2, LARDER_FOREVER, 2, statuses, NULL, NULL) == LARDER_DONE);
    CHECK(larder_poll(queue, finished, 2, LARDER_FOREVER, &found, NULL) == LARDER_DONE && found == 1);
    CHECK(statuses[0] == LARDER_OK && memcmp(memory, read, sizeof memory) == 0);
    larder_queue_free(queue);
    CHECK(larder_flush(store, NULL) == LARDER_DONE);
    CHECK(larder_stats(store, &json, NULL) == LARDER_DONE && json[0] == '{');
    larder_text_free(json);
    CHECK(larder_delete(ns, keys + LARDER_KEY_BYTES, 1, &removed, NULL) == LARDER_DONE && removed == 1);
    CHECK(larder_clear(ns, &removed, NULL) == LARDER_DONE && removed == 1);
    larder_namespace_free(ns);
    CHECK(larder_close(store, LARDER_FOREVER, NULL) == LARDER_DONE);
    larder_store_free(store);
    CHECK(strcmp(larder_status_name(LARDER_NOT_ADMITTED), "NOT_ADMITTED") == 0);
    return 0;
}
