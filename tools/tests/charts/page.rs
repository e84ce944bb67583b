//! `larder report`: the page of a store or a trace, as a browser draws it.

use std::path::{Path, PathBuf};
use std::process::Command;

use larder_engine::PageStore;
use larder_engine::format::SEGMENTS_OFFSET;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use super::support::honest::{found, skipped};
use super::support::{
    directory, ends, fails, flip, json, make_trace, overwrite, superblocks, text,
};
use super::{STRANGE, client, put_and_read, serve, serve_damaged};

/// What a browser draws: the texts of the charts with their boxes, the shapes, the page.
const LOOK: &str = r#"
const box = (of) => {
  const b = of.getBoundingClientRect();
  return [b.left, b.top, b.right, b.bottom];
};
const charts = [...document.querySelectorAll("svg")].map((svg) => ({
  box: box(svg),
  about: svg.getAttribute("aria-label"),
  texts: [...svg.querySelectorAll("text")].map((of) => ({
    text: of.textContent.trim(),
    box: box(of),
  })),
  marks: [...svg.querySelectorAll("[fill='#0B5CAD'], [stroke='#0B5CAD']")].map(box),
  ink: getComputedStyle(svg.querySelector("text")).fill,
}));
const seen = {
  charts,
  page: getComputedStyle(document.body).backgroundColor,
  headings: [...document.querySelectorAll("h1, h2")].map((of) => of.textContent),
  rows: [...document.querySelectorAll("tbody th")].map((of) => of.textContent),
  text: document.body.innerText,
  scripts: document.scripts.length,
  loaded: performance.getEntriesByType("resource").length,
  wide: document.documentElement.scrollWidth > document.documentElement.clientWidth,
};
const code = (of) => "\\u00" + of.charCodeAt(0).toString(16);
const escaped = JSON.stringify(seen).replace(/[<>&]/g, code);
const pre = document.createElement("pre");
pre.id = "seen";
pre.textContent = escaped;
document.body.append(pre);
"#;

/// The distribution's Chromium. Otherwise the skip is reported.
fn chromium() -> Option<PathBuf> {
    let paths = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&paths).find_map(|folder| {
        let names = ["chromium", "chromium-browser"].map(|name| folder.join(name));
        names.into_iter().find(|path| path.is_file())
    });
    if found.is_none() {
        skipped("the report in a browser", "there is no chromium");
    }
    found
}

/// The page in a browser, on a dark or a light screen; `None` without a browser.
pub fn drawn(report: &Path, options: &[&str]) -> Option<Value> {
    let browser = chromium()?;
    let html = std::fs::read_to_string(report).unwrap();
    let looked = report.with_extension("looked.html");
    std::fs::write(&looked, format!("{html}<script>{LOOK}</script>\n")).unwrap();
    let profile = directory();
    let output = Command::new(browser)
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"])
        .args(["--disable-dev-shm-usage", "--window-size=1200,900"])
        .arg(format!("--user-data-dir={}", text(profile.path())))
        .args(options)
        .arg(format!("file://{}", text(&looked)))
        .output()
        .unwrap();
    let dom = String::from_utf8_lossy(&output.stdout);
    let (_, seen) = dom.split_once("<pre id=\"seen\">").unwrap_or_else(|| {
        panic!(
            "the browser drew nothing: {}",
            String::from_utf8_lossy(&output.stderr)
        )
    });
    let (seen, _) = seen.split_once("</pre>").unwrap();
    Some(serde_json::from_str(seen).unwrap())
}

fn numbers(of: &Value) -> [f64; 4] {
    let numbers = of.as_array().unwrap().iter().map(|at| at.as_f64().unwrap());
    numbers.collect::<Vec<_>>().try_into().unwrap()
}

fn overlap(a: [f64; 4], b: [f64; 4]) -> bool {
    a[0] + 1.0 < b[2] && b[0] + 1.0 < a[2] && a[1] + 2.0 < b[3] && b[1] + 2.0 < a[3]
}

/// Each chart has names and labels on both axes, marks, and no text over another one.
#[track_caller]
pub fn charts_are_readable(seen: &Value, least: usize) {
    let charts = seen["charts"].as_array().unwrap();
    assert!(charts.len() >= least, "{charts:#?}");
    for chart in charts {
        let whole = numbers(&chart["box"]);
        let texts = chart["texts"].as_array().unwrap();
        assert!(texts.len() >= 6 && !chart["about"].as_str().unwrap().is_empty());
        let boxes: Vec<[f64; 4]> = texts.iter().map(|text| numbers(&text["box"])).collect();
        for (at, one) in boxes.iter().enumerate() {
            let inside = one[0] >= whole[0] - 1.0
                && one[1] >= whole[1] - 1.0
                && one[2] <= whole[2] + 1.0
                && one[3] <= whole[3] + 1.0;
            assert!(inside, "{} is outside of {}", texts[at], chart["about"]);
            for (other, text) in boxes.iter().zip(texts).skip(at + 1) {
                assert!(
                    !overlap(*one, *other),
                    "{}, {text}: {}",
                    texts[at],
                    chart["about"]
                );
            }
        }
        let marks = chart["marks"].as_array().unwrap().iter().map(numbers);
        let drawn = { marks }.any(|mark| mark[2] > mark[0] && mark[3] > mark[1]);
        assert!(drawn, "{chart:#}");
    }
    assert_eq!((&seen["loaded"], &seen["wide"]), (&0.into(), &false.into()));
    // The test's own script alone.
    assert_eq!(seen["scripts"], 1);
}

#[track_caller]
pub fn has(seen: &Value, words: &[&str]) {
    let said = seen["text"].as_str().unwrap();
    for word in words {
        assert!(said.contains(word), "no `{word}` in: {said}");
    }
}

fn store_in(directory: &tempfile::TempDir) -> PathBuf {
    let path = directory.path().join("store");
    json(&[
        "create",
        text(&path),
        "--size",
        "256MiB",
        "--page-bytes",
        "16KiB",
    ]);
    path
}

/// Without a browser, too: no script, and nothing from elsewhere.
pub fn report(of: &Path, code: i32) -> PathBuf {
    let out = of.with_extension("html");
    ends(&["report", text(of), "-o", text(&out), "--force"], code);
    let html = std::fs::read_to_string(&out).unwrap();
    assert!(html.starts_with("<!doctype html>") && html.ends_with("</html>\n"));
    let plain = html.replace("xmlns=\"http://www.w3.org/2000/svg\"", "");
    for foreign in ["<script", "http:", "https:", "src=", "@import", "url("] {
        assert!(!plain.contains(foreign), "{foreign}");
    }
    out
}

const QUESTIONS: [&str; 4] = [
    "Is it too small?",
    "Who uses it?",
    "When is the drive worn out?",
    "Is it worth it?",
];

#[test]
fn a_used_store_has_its_charts_on_light_and_dark_screens() {
    let directory = directory();
    let path = store_in(&directory);
    let _owner = serve(&path);
    let trace = directory.path().join("trace.jsonl");
    make_trace(&trace, 600, 3);
    let sizes = ["--capacity", "256MiB", "--page-bytes", "16KiB"];
    let replay = ["replay", "store", text(&trace), "--store", text(&path)];
    json(&[&replay[..], &sizes].concat());
    // The owner counts in rows of five seconds.
    let out = found("a row of the history", || {
        let out = report(&path, 0);
        let html = std::fs::read_to_string(&out).unwrap();
        html.contains("Bytes read from the devices").then_some(out)
    });
    let Some(light) = drawn(&out, &["--blink-settings=preferredColorScheme=1"]) else {
        return;
    };
    charts_are_readable(&light, 6);
    has(&light, &QUESTIONS);
    has(
        &light,
        &[
            "Nothing is wrong now.",
            "replay",
            "bytes for pages",
            "8x",
            "the ring is the present size",
            "Pages found of the pages asked for",
            "Lookups asked for",
            "A store is worth it if",
            "ended (1)",
        ],
    );
    let headings = light["headings"].to_string();
    for heading in [
        "Hit rate by size",
        "Hits and bytes over time",
        "Namespaces",
        "Latencies",
        "Wear",
        "Remote",
        "Incidents",
        "Words",
    ] {
        assert!(headings.contains(heading), "{headings}");
    }
    let dark = drawn(&out, &["--blink-settings=preferredColorScheme=0"]).unwrap();
    assert_ne!(dark["page"], light["page"]);
    assert_ne!(dark["charts"][0]["ink"], light["charts"][0]["ink"]);
    charts_are_readable(&dark, 3);
    let narrow = drawn(&out, &["--window-size=500,900"]).unwrap();
    assert_eq!(narrow["wide"], false);
}

#[test]
fn a_trace_has_its_charts_and_answers() {
    let directory = directory();
    let trace = directory.path().join("trace.jsonl");
    make_trace(&trace, 600, 3);
    let out = report(&trace, 0);
    let Some(seen) = drawn(&out, &[]) else {
        return;
    };
    charts_are_readable(&seen, 1);
    has(&seen, &QUESTIONS);
    has(&seen, &["Requests", "600", "size of the store, blocks"]);
}

#[test]
fn strange_names_of_64_namespaces_are_text() {
    let directory = directory();
    let path = store_in(&directory);
    let _owner = serve(&path);
    let store = client(&path);
    for at in 0..64 {
        let name = format!("{at} {}", STRANGE[at % STRANGE.len()]);
        put_and_read(&store, &name, 100 + at as u64, 1);
    }
    let out = report(&path, 0);
    store.close().unwrap();
    let html = std::fs::read_to_string(&out).unwrap();
    assert!(html.contains("&lt;script&gt;alert(1)") && !html.contains('\u{202e}'));
    let Some(seen) = drawn(&out, &[]) else {
        return;
    };
    charts_are_readable(&seen, 1);
    let rows = seen["rows"].as_array().unwrap();
    for (at, name) in STRANGE.iter().enumerate().filter(|(at, _)| *at != 2) {
        let name = format!("{at} {}", name.replace('\u{200d}', "\u{fffd}"));
        assert!(rows.iter().any(|row| *row == *name), "{name}: {rows:?}");
    }
    assert!(
        rows.iter()
            .any(|row| *row == "2 turned \u{fffd}round\u{fffd}")
    );
}

#[test]
fn an_empty_store_and_a_store_without_an_owner_are_readable() {
    let directory = directory();
    let path = store_in(&directory);
    let owner = serve(&path);
    let out = report(&path, 0);
    let seen = drawn(&out, &[]);
    if let Some(seen) = &seen {
        has(seen, &QUESTIONS);
        has(
            seen,
            &[
                "Not known yet",
                "It has no pages yet.",
                "Nothing is wrong now.",
            ],
        );
    }
    let store = client(&path);
    put_and_read(&store, "tiny", 1, 20);
    store.close().unwrap();
    drop(owner);
    let out = report(&path, 0);
    if let Some(seen) = drawn(&out, &[]) {
        charts_are_readable(&seen, 1);
        has(&seen, &["not_closed", "20, 320 KiB", "tiny", "No damage"]);
    }
}

#[test]
fn damage_is_among_the_incidents() {
    let directory = directory();
    let path = store_in(&directory);
    let mut owner = serve_damaged(&path);
    let html = |code| std::fs::read_to_string(report(&path, code)).unwrap();
    let served = html(0);
    assert!(!served.contains("Nothing is wrong now"), "{served}");
    assert!(served.contains("1 damaged page dropped"), "{served}");
    kill(Pid::from_raw(owner.0.id().cast_signed()), Signal::SIGTERM).unwrap();
    assert!(owner.0.wait().unwrap().success());
    overwrite(&path, SEGMENTS_OFFSET, &vec![7; 32 << 20]);
    let closed = html(1);
    assert!(
        closed.contains("larder verify") && closed.contains("offset"),
        "{closed}"
    );
    // No superblock is left: no process could serve it.
    for offset in superblocks(&path) {
        flip(&path, offset + 73);
    }
    let wreck = html(1);
    assert!(
        wreck.contains("Incidents") && wreck.contains("superblock"),
        "{wreck}"
    );
}

/// Its report takes no key, and shows the facts that need none.
#[test]
fn an_encrypted_store_without_a_process_has_a_report() {
    let directory = directory();
    let at = |name: &str| directory.path().join(name);
    let (key, store) = (at("key"), at("store"));
    ends(&["key", "make", text(&key)], 0);
    let create = ["create", text(&store), "--size", "128MiB", "--key-file"];
    ends(&[&create[..], &[text(&key)]].concat(), 0);
    let html = std::fs::read_to_string(report(&store, 0)).unwrap();
    assert!(html.contains("encrypted: their names") && html.contains("No damage"));
    assert!(!html.contains("Namespaces"), "{html}");
}

#[test]
fn a_report_replaces_no_file_and_refuses_what_is_no_store() {
    let directory = directory();
    let path = store_in(&directory);
    fails(&["report", text(&path), "-o", text(&path)], 3, &["--force"]);
    let nothing = directory.path().join("nothing");
    let out = directory.path().join("out.html");
    fails(
        &["report", text(&nothing), "-o", text(&out)],
        3,
        &["nothing"],
    );
    std::fs::write(&nothing, "{\"no\": \"trace\"}").unwrap();
    fails(
        &["report", text(&nothing), "-o", text(&out)],
        2,
        &["not a request"],
    );
    assert!(!out.exists());
}
