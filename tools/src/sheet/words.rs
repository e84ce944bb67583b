//! The words of a report.

use super::page::Section;

const WORDS: [(&str, &str); 16] = [
    (
        "page",
        "the KV cache of some consecutive tokens, 16 to 512 of them, on one rank",
    ),
    (
        "block",
        "the tokens that a trace names by one number: a page of the store, or several",
    ),
    (
        "lookup",
        "a question of an engine: how many pages of this prompt, from its begin, are there?",
    ),
    (
        "found",
        "pages or tokens of lookups that the store had; an engine may read fewer of them",
    ),
    (
        "hit rate by size",
        "the part of the pages of lookups that a store of each size would find",
    ),
    (
        "rough",
        "too few lookups for a good estimate: fewer than 5 % of all",
    ),
    (
        "reads without loss",
        "pages that were read and verified, of the pages that were to be read",
    ),
    (
        "put",
        "a page that an engine stores; a page that is there already is not written again",
    ),
    (
        "segment",
        "a part of a volume that is written once, and written anew when no page is left in it",
    ),
    (
        "full",
        "all usable bytes have pages: the usual state; then each new page takes the place of \
         another",
    ),
    (
        "rank",
        "one of the processes that hold the parts of a model; each has pages of its own",
    ),
    ("evicted", "removed to make room for other pages"),
    (
        "age at eviction",
        "time since the last use of an evicted page",
    ),
    (
        "namespace",
        "pages that engines may exchange: same model, weights, type, layout and rank",
    ),
    (
        "copies",
        "pages that were written again to free the segment that they were in",
    ),
    (
        "prefill",
        "the computation of the KV cache of a prompt, which a page that is read saves",
    ),
];

/// The meaning of the words, for a reader who has the report alone.
pub fn words() -> Section {
    let row = |(word, meaning): &(&'static str, &str)| (*word, (*meaning).to_owned());
    Section {
        terms: WORDS.iter().map(row).collect(),
        ..Section::new("Words")
    }
}
