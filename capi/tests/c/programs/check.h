/* Checks of the test programs, and a store with a namespace. Valid in C and C++. */
#ifndef CHECK_H
#define CHECK_H

#include <larder.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(what)                                                       \
    do {                                                                  \
        if (!(what)) {                                                    \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #what);    \
            exit(1);                                                      \
        }                                                                 \
    } while (0)

/* The call is done; else its error is printed. */
#define DONE(call)                                                                         \
    do {                                                                                   \
        larder_error *error = NULL;                                                        \
        larder_error **const e = &error;                                                   \
        const larder_result result = (call);                                               \
        if (result != LARDER_DONE) {                                                       \
            fprintf(stderr, "%s:%d: %d: %s\n", __FILE__, __LINE__, (int)result,            \
                    larder_error_text(error));                                             \
            exit(1);                                                                       \
        }                                                                                  \
        CHECK(error == NULL);                                                              \
    } while (0)

/* The call fails with this result, and an error of the same code and a text. */
#define FAILS(code, call)                                                                  \
    do {                                                                                   \
        larder_error *error = NULL;                                                        \
        larder_error **const e = &error;                                                   \
        const larder_result result = (call);                                               \
        if (result != (code)) {                                                            \
            fprintf(stderr, "%s:%d: %d instead of %d: %s\n", __FILE__, __LINE__,           \
                    (int)result, (int)(code), larder_error_text(error));                   \
            exit(1);                                                                       \
        }                                                                                  \
        CHECK(larder_error_code(error) == (code));                                         \
        CHECK(strlen(larder_error_text(error)) > 10);                                      \
        larder_error_free(error);                                                          \
    } while (0)

enum { FIRST_PART = 8192, SECOND_PART = 1000, PAGE_TOKENS = 16 };

#define IDENTITY                                                                      \
    "{\"model\": \"toy\", \"weights\": \"seed 1\", \"dtype\": \"f32\", "              \
    "\"layout\": \"rows\", \"page_tokens\": 16, \"parts\": [8192, 1000]}"

static inline larder_store *opened(const char *path, int alone) {
    larder_open_options options = LARDER_OPEN_OPTIONS_INIT;
    larder_store *store = NULL;
    options.size = 256u << 20;
    options.page_bytes = FIRST_PART + SECOND_PART;
    if (alone) {
        DONE(larder_open(path, &options, &store, e));
    } else {
        DONE(larder_attach(path, &options, &store, e));
    }
    return store;
}

static inline larder_namespace *space(larder_store *store) {
    larder_namespace *ns = NULL;
    DONE(larder_namespace_open(store, IDENTITY, &ns, e));
    return ns;
}

/* The keys of so many pages of the conversation `seed`. */
static inline void chained(const larder_namespace *ns, uint32_t seed, size_t pages, uint8_t *keys) {
    uint32_t *tokens = (uint32_t *)malloc(pages * PAGE_TOKENS * sizeof(uint32_t));
    size_t whole = 0, at;
    CHECK(tokens != NULL);
    for (at = 0; at < pages * PAGE_TOKENS; at++) tokens[at] = seed * 1000003u + (uint32_t)at;
    DONE(larder_chain(ns, NULL, NULL, tokens, pages * PAGE_TOKENS, keys, pages, &whole, e));
    CHECK(whole == pages);
    free(tokens);
}

/* Memory of pages, with their parts in two places. */
typedef struct memory {
    uint8_t *first, *second;
    larder_part *parts;
    size_t pages;
} memory;

static inline memory allocated(size_t pages) {
    memory made;
    size_t at;
    made.pages = pages;
    made.first = (uint8_t *)aligned_alloc(4096, pages * FIRST_PART);
    made.second = (uint8_t *)calloc(pages, SECOND_PART);
    made.parts = (larder_part *)calloc(pages * 2, sizeof(larder_part));
    CHECK(made.first != NULL && made.second != NULL && made.parts != NULL);
    memset(made.first, 0, pages * FIRST_PART);
    for (at = 0; at < pages; at++) {
        made.parts[2 * at].base = made.first + at * FIRST_PART;
        made.parts[2 * at].length = FIRST_PART;
        made.parts[2 * at + 1].base = made.second + at * SECOND_PART;
        made.parts[2 * at + 1].length = SECOND_PART;
    }
    return made;
}

static inline memory filled(size_t pages, unsigned seed) {
    memory made = allocated(pages);
    size_t at;
    for (at = 0; at < pages * FIRST_PART; at++) made.first[at] = (uint8_t)(seed + at * 7u + at / 256u);
    for (at = 0; at < pages * SECOND_PART; at++) made.second[at] = (uint8_t)(seed * 3u + at);
    return made;
}

static inline int same(const memory *a, const memory *b) {
    return a->pages == b->pages && memcmp(a->first, b->first, a->pages * FIRST_PART) == 0 &&
           memcmp(a->second, b->second, a->pages * SECOND_PART) == 0;
}

static inline void freed(memory *made) {
    free(made->first);
    free(made->second);
    free(made->parts);
}

static inline size_t count_of(const larder_status *statuses, size_t pages, larder_status wanted) {
    size_t at, count = 0;
    for (at = 0; at < pages; at++) count += statuses[at] == wanted;
    return count;
}

#endif
