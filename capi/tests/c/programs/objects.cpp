// larder.hpp: objects that free themselves, in any order, and errors that are thrown.
#include <larder.hpp>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>

#define CHECK(what)                                                           \
    do {                                                                      \
        if (!(what)) {                                                        \
            std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #what);   \
            std::exit(1);                                                     \
        }                                                                     \
    } while (false)

static constexpr std::size_t bytes = 4096;
static const char identity[] =
    R"({"model": "toy", "weights": "seed 1", "dtype": "f32", "layout": "rows",
        "page_tokens": 16, "parts": [4096]})";

static std::vector<larder::part> parts_of(std::vector<std::uint8_t> &memory) {
    std::vector<larder::part> parts;
    for (std::size_t at = 0; at < memory.size(); at += bytes) parts.push_back({memory.data() + at, bytes});
    return parts;
}

int main(int argc, char **argv) {
    CHECK(argc == 2);
    try {
        larder::store::open(std::string(argv[1]) + "/none");
        CHECK(false);
    } catch (const larder::error &error) {
        CHECK(error.code() == LARDER_E_STORE && std::strlen(error.what()) > 10);
    }
    auto options = larder::open_options();
    options.size = 256u << 20;
    std::optional<larder::store> store = larder::store::attach(argv[1], options);
    const larder::space space = store->open_space(identity);
    const std::vector<std::uint32_t> tokens(70, 5);
    const auto keys = space.chain(tokens.data(), tokens.size());
    CHECK(keys.size() == 4 && space.longest_prefix(keys) == 0);
    CHECK(space.chain(tokens.data(), 16, &keys[0])[0] == keys[1]);
    CHECK(space.chain(tokens.data(), 3).empty());

    std::vector<std::uint8_t> given(4 * bytes), read(4 * bytes);
    for (std::size_t at = 0; at < given.size(); at++) given[at] = static_cast<std::uint8_t>(at * 31 + at / 256);
    for (const auto status : space.put(keys, parts_of(given))) CHECK(larder::succeeded(status));
    CHECK(space.longest_prefix(keys) == 4);
    for (const auto status : space.contains(keys)) CHECK(status == LARDER_OK);
    for (const auto status : space.get(keys, parts_of(read))) CHECK(status == LARDER_OK);
    CHECK(given == read);
    space.touch(keys);

    larder::queue queue = store->open_queue();
    larder::queue moved = std::move(queue);
    std::vector<larder::status> statuses(4, LARDER_OTHER);
    read.assign(read.size(), 0);
    const auto job = moved.get(space, keys, parts_of(read), statuses.data(), 9);
    const auto jobs = moved.poll(4, larder::forever);
    CHECK(jobs.size() == 1 && jobs[0].job == job && jobs[0].tag == 9 && given == read);
    const auto again = moved.put(space, keys, parts_of(given), statuses.data());
    CHECK(moved.poll(4, larder::forever).at(0).job == again && statuses[3] == LARDER_DUPLICATE);
    CHECK(moved.poll().empty() && moved.fd() >= 0);

    CHECK(store->stats().front() == '{');
    store->flush();
    CHECK(space.remove({keys[3]}) == 1 && space.clear() == 3);
    try {
        space.get(keys, {});
        CHECK(false);
    } catch (const larder::error &error) {
        CHECK(error.code() == LARDER_E_ARGUMENT);
    }
    store->close();
    store.reset();
    return 0;
}
