/* An engine in C on Larder: the toy transformer of tiers/examples/engine.rs. It serves prompts cold, kills itself, starts again, and
 * serves them from the store. Its words are compared with a run without a store. docs/c.md walks through `serve`.
 *
 *     cc -O2 engine.c $(pkg-config --cflags --libs larder) -lm -o engine && ./engine DIRECTORY
 */
#include <larder.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { LAYERS = 4, DIM = 64, WORDS = 64, PAGE = 16, ANSWER = 16, LONGEST = 640, PARTS = 2 * LAYERS };
enum { QUERY, KEY, VALUE, OUTPUT, UP, DOWN, MATRICES };

static float matrices[LAYERS][MATRICES][DIM][DIM], words[WORDS][DIM];

/* The rows of keys (even) and values (odd) of each layer: a page is 4096 bytes in each of the 8 arrays, where it is read and written
 * without a copy. */
typedef float rows[PARTS][LONGEST][DIM];
static _Alignas(4096) rows cached, computed;

static const char *const identity =
    "{\"model\": \"toy\", \"weights\": \"seed 42\", \"dtype\": \"f32\", \"layout\": \"layer, kv, token\", \"page_tokens\": 16,"
    " \"parts\": [4096, 4096, 4096, 4096, 4096, 4096, 4096, 4096]}";

static void check(larder_result result, larder_error *error) {
    if (result == LARDER_DONE) return;
    fprintf(stderr, "engine: %s\n", larder_error_text(error));
    exit(1);
}

static float drawn(uint64_t *state) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (float)(*state >> 40) / (float)(1 << 24) - 0.5f;
}

static void made(void) {
    uint64_t state = 42;
    float *at;
    for (at = &matrices[0][0][0][0]; at < &matrices[0][0][0][0] + LAYERS * MATRICES * DIM * DIM; at++) *at = drawn(&state);
    for (at = &words[0][0]; at < &words[0][0] + WORDS * DIM; at++) *at = drawn(&state);
}

static float dot(const float *a, const float *b) {
    float sum = 0;
    for (int at = 0; at < DIM; at++) sum += a[at] * b[at];
    return sum;
}

static void times(float (*matrix)[DIM], const float *vector, float *to) {
    for (int row = 0; row < DIM; row++) to[row] = dot(matrix[row], vector);
}

static void norm(const float *x, float *to) {
    const float length = sqrtf(dot(x, x) / DIM) + 1e-6f;
    for (int at = 0; at < DIM; at++) to[at] = x[at] / length;
}

/* Computes the rows of a token. Returns the most likely next token. */
static uint32_t forward(rows kv, uint32_t token, size_t position) {
    float x[DIM], input[DIM], query[DIM], mixed[DIM], out[DIM];
    uint32_t best = 0;
    for (int at = 0; at < DIM; at++) x[at] = words[token][at] + sinf((float)position / powf(1.2f, (float)at));
    for (int layer = 0; layer < LAYERS; layer++) {
        float sum = 0;
        norm(x, input);
        times(matrices[layer][KEY], input, kv[2 * layer][position]);
        times(matrices[layer][VALUE], input, kv[2 * layer + 1][position]);
        times(matrices[layer][QUERY], input, query);
        memset(mixed, 0, sizeof mixed);
        for (size_t before = 0; before <= position; before++) {
            const float weight = expf(fminf(dot(query, kv[2 * layer][before]), 40));
            for (int at = 0; at < DIM; at++) mixed[at] += weight * kv[2 * layer + 1][before][at];
            sum += weight;
        }
        for (int at = 0; at < DIM; at++) mixed[at] /= sum;
        times(matrices[layer][OUTPUT], mixed, out);
        for (int at = 0; at < DIM; at++) x[at] += out[at];
        norm(x, input);
        times(matrices[layer][UP], input, mixed);
        for (int at = 0; at < DIM; at++) mixed[at] = fmaxf(mixed[at], 0);
        times(matrices[layer][DOWN], mixed, out);
        for (int at = 0; at < DIM; at++) x[at] += out[at];
    }
    norm(x, input);
    for (uint32_t word = 1; word < WORDS; word++) best = dot(words[word], input) > dot(words[best], input) ? word : best;
    return best;
}

/* Computes the tokens from `from` on, and an answer behind them. */
static void answer(rows kv, uint32_t *tokens, size_t prompt, size_t from) {
    for (size_t at = from; at < prompt + ANSWER - 1; at++) {
        const uint32_t word = forward(kv, tokens[at], at);
        if (at + 1 >= prompt) tokens[at + 1] = word;
    }
}

/* Where so many pages from `first` on lie. */
static void parts_of(rows kv, size_t first, size_t pages, larder_part *parts) {
    for (size_t at = 0; at < pages * PARTS; at++) {
        parts[at].base = kv[at % PARTS][(first + at / PARTS) * PAGE];
        parts[at].length = PAGE * DIM * sizeof(float);
    }
}

/* Serves a prompt with its answer. Returns the number of tokens whose rows came from the store. */
static size_t serve(larder_namespace *ns, uint32_t *tokens, size_t prompt) {
    enum { MOST = LONGEST / PAGE };
    uint8_t keys[MOST * LARDER_KEY_BYTES];
    larder_part parts[MOST * PARTS];
    larder_status statuses[MOST];
    larder_put_options options = LARDER_PUT_OPTIONS_INIT;
    larder_error *error = NULL;
    size_t pages, found, good = 0;
    /* The row of the last token is computed, since its output is needed. */
    check(larder_chain(ns, NULL, NULL, tokens, prompt - 1, keys, MOST, &pages, &error), error);
    check(larder_longest_prefix(ns, keys, pages, &found, &error), error);
    parts_of(cached, 0, found, parts);
    check(larder_get(ns, keys, parts, found, 2000, statuses, &error), error);
    /* Behind the first page that cannot be read, everything is computed. */
    while (good < found && statuses[good] == LARDER_OK) good++;
    answer(cached, tokens, prompt, good * PAGE);
    check(larder_chain(ns, NULL, NULL, tokens, prompt + ANSWER - 1, keys, MOST, &pages, &error), error);
    parts_of(cached, good, pages - good, parts);
    options.depth = (uint32_t)good;
    options.before = good > 0 ? keys + (good - 1) * LARDER_KEY_BYTES : NULL;
    options.wait_ms = 2000;
    /* A page that is not stored is computed again one day: no status is an error here. */
    check(larder_put(ns, keys + good * LARDER_KEY_BYTES, parts, pages - good, &options, statuses, &error), error);
    return good * PAGE;
}

static void run(const char *path, const char *name) {
    static const size_t lengths[3] = {570, 590, 610};
    larder_open_options options = LARDER_OPEN_OPTIONS_INIT;
    larder_store *store;
    larder_namespace *ns;
    larder_error *error = NULL;
    uint64_t state = 7;
    options.size = 256u << 20;
    options.page_bytes = PARTS * PAGE * DIM * sizeof(float);
    check(larder_attach(path, &options, &store, &error), error);
    check(larder_namespace_open(store, identity, &ns, &error), error);
    for (int at = 0; at < 3; at++) {
        uint32_t tokens[LONGEST] = {0}, alone[LONGEST];
        for (size_t token = 0; token < lengths[at]; token++) tokens[token] = (uint32_t)((drawn(&state) + 0.5f) * WORDS) % WORDS;
        memcpy(alone, tokens, sizeof tokens);
        const size_t stored = serve(ns, tokens, lengths[at]);
        answer(computed, alone, lengths[at], 0);
        const int same = memcmp(tokens, alone, (lengths[at] + ANSWER) * sizeof *tokens) == 0;
        printf("%-10s prompt of %zu tokens: %3zu from the store, words %s\n", name, lengths[at], stored, same ? "the same" : "DIFFER");
        if (!same) exit(1);
    }
    fflush(stdout);
    /* As in a crash: what was stored stays. */
    if (strcmp(name, "cold") == 0) raise(SIGKILL);
    larder_namespace_free(ns);
    check(larder_close(store, LARDER_FOREVER, &error), error);
    larder_store_free(store);
}

int main(int argc, char **argv) {
    if (argc != 2) return fprintf(stderr, "usage: engine DIRECTORY\n"), 2;
    made();
    const pid_t child = fork();
    if (child == 0) run(argv[1], "cold");
    if (child < 0 || waitpid(child, NULL, 0) != child) return 1;
    run(argv[1], "restarted");
    return 0;
}
