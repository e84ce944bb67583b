// larder.hpp: larder.h with objects that free themselves, and errors that are thrown. Nothing else:
// each function makes one call of larder.h, which has the rules. Needs C++17.
#ifndef LARDER_HPP
#define LARDER_HPP

#include <larder.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace larder {

using key = std::array<std::uint8_t, LARDER_KEY_BYTES>;
using status = larder_status;
using part = larder_part;
using finished = larder_finished;

constexpr std::uint64_t forever = LARDER_FOREVER;

// Statuses up to this one are a success.
constexpr bool succeeded(status of) noexcept { return of <= LARDER_DUPLICATE; }

// A call that failed.
class error : public std::runtime_error {
public:
    error(larder_result code, const std::string &text) : std::runtime_error(text), code_(code) {}
    larder_result code() const noexcept { return code_; }

private:
    larder_result code_;
};

// Options with their sizes set.
inline larder_open_options open_options() { return LARDER_OPEN_OPTIONS_INIT; }
inline larder_put_options put_options() { return LARDER_PUT_OPTIONS_INIT; }
inline larder_queue_options queue_options() { return LARDER_QUEUE_OPTIONS_INIT; }

namespace detail {

struct free_error {
    void operator()(larder_error *of) const noexcept { larder_error_free(of); }
};

// Makes a call whose last argument is the place of an error.
template <typename Call> void done(Call &&call) {
    larder_error *raw = nullptr;
    const larder_result result = std::forward<Call>(call)(&raw);
    const std::unique_ptr<larder_error, free_error> owned(raw);
    if (result != LARDER_DONE) throw error(result, larder_error_text(raw));
}

inline const std::uint8_t *bytes(const std::vector<key> &keys) {
    return keys.empty() ? nullptr : keys.front().data();
}

struct free_store {
    void operator()(larder_store *of) const noexcept { larder_store_free(of); }
};
struct free_space {
    void operator()(larder_namespace *of) const noexcept { larder_namespace_free(of); }
};
struct free_queue {
    void operator()(larder_queue *of) const noexcept { larder_queue_free(of); }
};
struct free_text {
    void operator()(char *of) const noexcept { larder_text_free(of); }
};

} // namespace detail

// The pages of a model and layout.
class space {
public:
    explicit space(larder_namespace *made) noexcept : at_(made) {}

    larder_namespace *get() const noexcept { return at_.get(); }

    // The keys of the whole pages of tokens.
    std::vector<key> chain(const std::uint32_t *tokens, std::size_t count,
                           const key *before = nullptr, const char *salt = nullptr) const {
        const std::uint8_t *prior = before == nullptr ? nullptr : before->data();
        std::size_t pages = 0;
        detail::done([&](larder_error **e) {
            return larder_chain(get(), prior, salt, tokens, count, nullptr, 0, &pages, e);
        });
        std::vector<key> keys(pages);
        detail::done([&](larder_error **e) {
            std::uint8_t *to = keys.empty() ? nullptr : keys.front().data();
            return larder_chain(get(), prior, salt, tokens, count, to, pages, &pages, e);
        });
        return keys;
    }

    std::size_t longest_prefix(const std::vector<key> &keys) const {
        std::size_t found = 0;
        detail::done([&](larder_error **e) {
            return larder_longest_prefix(get(), detail::bytes(keys), keys.size(), &found, e);
        });
        return found;
    }

    std::vector<status> contains(const std::vector<key> &keys) const {
        std::vector<status> statuses(keys.size());
        detail::done([&](larder_error **e) {
            return larder_contains(get(), detail::bytes(keys), keys.size(), statuses.data(), e);
        });
        return statuses;
    }

    // The parts of all pages, page after page.
    std::vector<status> put(const std::vector<key> &keys, const std::vector<part> &parts,
                            const larder_put_options &options = put_options()) const {
        std::vector<status> statuses(keys.size());
        detail::done([&](larder_error **e) {
            return larder_put(get(), detail::bytes(keys), parts.data(), keys.size(), &options,
                              statuses.data(), e);
        });
        return statuses;
    }

    std::vector<status> get(const std::vector<key> &keys, const std::vector<part> &parts,
                            std::uint64_t timeout_ms = forever) const {
        std::vector<status> statuses(keys.size());
        detail::done([&](larder_error **e) {
            return larder_get(get(), detail::bytes(keys), parts.data(), keys.size(), timeout_ms,
                              statuses.data(), e);
        });
        return statuses;
    }

    void touch(const std::vector<key> &keys) const {
        detail::done([&](larder_error **e) {
            return larder_touch(get(), detail::bytes(keys), keys.size(), e);
        });
    }

    std::uint64_t remove(const std::vector<key> &keys) const {
        std::uint64_t removed = 0;
        detail::done([&](larder_error **e) {
            return larder_delete(get(), detail::bytes(keys), keys.size(), &removed, e);
        });
        return removed;
    }

    std::uint64_t clear() const {
        std::uint64_t removed = 0;
        detail::done([&](larder_error **e) { return larder_clear(get(), &removed, e); });
        return removed;
    }

private:
    std::unique_ptr<larder_namespace, detail::free_space> at_;
};

// Jobs. The memory of parts and statuses belongs to a job until poll returned it.
class queue {
public:
    explicit queue(larder_queue *made) noexcept : at_(made) {}

    larder_queue *get() const noexcept { return at_.get(); }
    int fd() const noexcept { return larder_queue_fd(get()); }

    std::uint64_t put(const space &ns, const std::vector<key> &keys, const std::vector<part> &parts,
                      status *statuses, std::uint64_t tag = 0, std::uint64_t timeout_ms = forever,
                      const larder_put_options &options = put_options()) const {
        std::uint64_t job = 0;
        detail::done([&](larder_error **e) {
            return larder_submit_put(get(), ns.get(), detail::bytes(keys), parts.data(), keys.size(),
                                     &options, timeout_ms, tag, statuses, &job, e);
        });
        return job;
    }

    std::uint64_t get(const space &ns, const std::vector<key> &keys, const std::vector<part> &parts,
                      status *statuses, std::uint64_t tag = 0,
                      std::uint64_t timeout_ms = forever) const {
        std::uint64_t job = 0;
        detail::done([&](larder_error **e) {
            return larder_submit_get(get(), ns.get(), detail::bytes(keys), parts.data(), keys.size(),
                                     timeout_ms, tag, statuses, &job, e);
        });
        return job;
    }

    std::vector<finished> poll(std::size_t room = 64, std::uint64_t wait_ms = 0) const {
        std::vector<finished> jobs(room);
        std::size_t count = 0;
        detail::done([&](larder_error **e) {
            return larder_poll(get(), jobs.data(), room, wait_ms, &count, e);
        });
        jobs.resize(count);
        return jobs;
    }

private:
    std::unique_ptr<larder_queue, detail::free_queue> at_;
};

class store {
public:
    // Together with other processes.
    static store attach(const std::string &path, const larder_open_options &options = open_options()) {
        return made(larder_attach, path, options);
    }

    // In this process alone.
    static store open(const std::string &path, const larder_open_options &options = open_options()) {
        return made(larder_open, path, options);
    }

    larder_store *get() const noexcept { return at_.get(); }

    space open_space(const std::string &identity) const {
        larder_namespace *made = nullptr;
        detail::done([&](larder_error **e) {
            return larder_namespace_open(get(), identity.c_str(), &made, e);
        });
        return space(made);
    }

    queue open_queue(const larder_queue_options &options = queue_options()) const {
        larder_queue *made = nullptr;
        detail::done([&](larder_error **e) { return larder_queue_open(get(), &options, &made, e); });
        return queue(made);
    }

    void flush() const {
        detail::done([&](larder_error **e) { return larder_flush(get(), e); });
    }

    std::string stats() const {
        char *json = nullptr;
        detail::done([&](larder_error **e) { return larder_stats(get(), &json, e); });
        const std::unique_ptr<char, detail::free_text> owned(json);
        return json;
    }

    void close(std::uint64_t timeout_ms = forever) const {
        detail::done([&](larder_error **e) { return larder_close(get(), timeout_ms, e); });
    }

private:
    explicit store(larder_store *made) noexcept : at_(made) {}

    template <typename Open>
    static store made(Open open, const std::string &path, const larder_open_options &options) {
        larder_store *made = nullptr;
        detail::done([&](larder_error **e) { return open(path.c_str(), &options, &made, e); });
        return store(made);
    }

    std::unique_ptr<larder_store, detail::free_store> at_;
};

} // namespace larder

#endif
