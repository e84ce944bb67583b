//! Metrics of a served store: over HTTP and as text, equal to all other counts, across owners.

use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use larder_engine::Part;
use larder_format::Namespace;
use rustix::net::{AddressFamily, SocketType, connect, socket, sockopt};

use super::prometheus::put;
use super::served::{absent_keys, namespace, read};
use super::support::observe::{Exporter, Samples, samples};
use super::support::served::{Served, are_taken_by_python};
use super::*;

const PATIENCE: Duration = Duration::from_secs(60);

/// The sum of a metric over its labels.
fn sum(of: &Samples, name: &str) -> f64 {
    let labelled = format!("{name}{{");
    let all = of
        .iter()
        .filter(|(key, _)| *key == name || key.starts_with(&labelled));
    all.map(|(_, value)| value).sum()
}

/// Counters, without the series of histograms.
fn counters(of: &Samples) -> BTreeMap<&str, f64> {
    let all = of.iter().filter(|(key, _)| key.contains("_total"));
    all.map(|(key, value)| (&**key, *value)).collect()
}

pub fn serve(store: &str) -> Process {
    serve_with(store, &[])
}

/// The same with further arguments.
pub fn serve_with(store: &str, more: &[&str]) -> Process {
    let mut owner = larder(&[&["serve", store], more].concat())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut first = String::new();
    let told = owner.stdout.take().unwrap();
    BufReader::new(told).read_line(&mut first).unwrap();
    assert!(first.contains("Serving"), "{first}");
    Process(owner)
}

#[test]
fn metrics_documents_and_the_benchmark_count_the_same_and_each_miss_has_a_reason() {
    let directory = directory();
    let path = store_in(&directory);
    let at = text(&path);
    let _owner = serve(at);
    let exporter = Exporter::of(at);
    let pages = ["--page-bytes", "64KiB", "--pages", "64", "--batch", "16"];
    let bench = json(&[&["bench", at, "--op", "put", "--shared"][..], &pages].concat());
    let store = Store::attach(&path, OpenOptions::default()).unwrap();
    let space = store.namespace(&namespace()).unwrap();
    read(&store, space, &absent_keys(7), None);
    let past = Some(Instant::now());
    read(&store, space, &absent_keys(3), past);
    store.flush().unwrap();

    let until = Instant::now() + PATIENCE;
    let told = loop {
        let told = json(&["stat", at]);
        if told["departed"]["clients"] == 1 && told["total"]["pages_missed"] == 10 {
            break told;
        }
        assert!(Instant::now() < until, "{told}");
    };
    are_taken_by_python(&[&Served::of(exporter.ask("GET", "/metrics"))]);
    let printed = String::from_utf8(ends(&["stat", at, "--openmetrics"], 0).stdout).unwrap();
    for of in [exporter.scrape(), samples(&printed)] {
        assert_eq!(sum(&of, "larder_page_hits_total"), bench["verified_pages"]);
        assert_eq!(sum(&of, "larder_put_pages_total"), bench["pages_put"]);
        assert_eq!(sum(&of, "larder_put_pages_total"), 64.0);
        assert_eq!(sum(&of, "larder_page_misses_total"), 10.0);
        let total = &told["total"]["counts"];
        for (metric, value) in [
            ("larder_page_hits_total", &total["pages_hit"]),
            ("larder_page_misses_total", &told["total"]["pages_missed"]),
            ("larder_page_misses_total", &told["totals"]["pages_missed"]),
            (
                "larder_page_hits_total",
                &told["totals"]["counts"]["pages_hit"],
            ),
            ("larder_read_bytes_total", &total["bytes_read"]),
            ("larder_put_pages_total", &total["pages_put"]),
            ("larder_put_bytes_total", &total["bytes_put"]),
            ("larder_pages", &told["pages"]),
            ("larder_live_bytes", &told["live_bytes"]),
            ("larder_capacity_bytes", &told["capacity_bytes"]),
            ("larder_segments", &told["segments"]),
        ] {
            assert_eq!(sum(&of, metric), *value, "{metric}");
        }
        for (reason, count) in total["misses"].as_object().unwrap() {
            let name = format!("larder_page_misses_total{{reason=\"{reason}\"}}");
            assert_eq!(of[&name], *count, "{name}");
        }
        let written = told["totals"]["written"].as_object().unwrap();
        let written: f64 = written.values().map(|of| of.as_f64().unwrap()).sum();
        assert_eq!(sum(&of, "larder_written_bytes_total"), written);
        assert_eq!(written, told["bytes_written"].as_f64().unwrap());
        assert_eq!(sum(&of, "larder_up"), 1.0);
        assert_eq!(of["larder_store_state{state=\"serving\"}"], 1.0);
        assert_eq!(sum(&of, "larder_clients"), 1.0);
        let model = of
            .keys()
            .find(|key| key.starts_with("larder_namespace_pages{"));
        assert!(model.unwrap().contains("model=\"bench"), "{model:?}");
    }
    store.close().unwrap();
}

#[test]
fn counters_do_not_go_down_when_the_owner_is_killed() {
    let directory = directory();
    let path = store_in(&directory);
    let at = text(&path);
    let owner = serve(at);
    let exporter = Exporter::of(at);
    let pages = ["--page-bytes", "64KiB", "--pages", "64", "--batch", "16"];
    let next = Store::attach(&path, OpenOptions::default()).unwrap();
    ends(
        &[&["bench", at, "--op", "get", "--shared"][..], &pages].concat(),
        0,
    );
    let space = next.namespace(&namespace()).unwrap();
    read(&next, space, &absent_keys(7), None);
    let before = exporter.scrape();
    assert_eq!(sum(&before, "larder_up"), 1.0);
    assert!(sum(&before, "larder_page_hits_total") >= 64.0);
    drop(owner);

    let until = Instant::now() + PATIENCE;
    let mut is_shown_unserved = false;
    let after = loop {
        let scraped = exporter.scrape();
        if sum(&scraped, "larder_up") == 1.0 {
            break scraped;
        }
        is_shown_unserved = true;
        assert_eq!(scraped["larder_store_state{state=\"unserved\"}"], 1.0);
        assert!(counters(&scraped).is_empty(), "{scraped:?}");
        assert!(Instant::now() < until, "no takeover");
    };
    let _ = is_shown_unserved;
    assert_eq!(next.part(), Part::Owner);
    for (name, value) in counters(&before) {
        assert!(
            after[name] >= value,
            "{name}: {value}, then {}",
            after[name]
        );
    }
    let started = "larder_owner_start_time_seconds";
    assert!(after[started] > before[started]);

    read(&next, space, &absent_keys(5), None);
    let absent = "larder_page_misses_total{reason=\"absent\"}";
    assert_eq!(exporter.scrape()[absent], before[absent] + 5.0);
    next.close().unwrap();
    assert_eq!(sum(&exporter.scrape(), "larder_up"), 0.0);
}

#[test]
fn an_exporter_serves_metrics_and_nothing_else() {
    let directory = directory();
    let missing = directory.path().join("missing");
    let exporter = Exporter::of(text(&missing));
    let (status, body) = exporter.ask("GET", "/");
    assert_eq!(status, "HTTP/1.1 404 Not Found");
    assert!(body.contains("/metrics"), "{body}");
    let (status, _) = exporter.ask("POST", "/metrics");
    assert_eq!(status, "HTTP/1.1 405 Method Not Allowed");
    assert_eq!(sum(&exporter.scrape(), "larder_up"), 0.0);
    let taken = ["exporter", text(&missing), "--listen", exporter.address()];
    fails(&taken, 3, &["--listen"]);
}

/// A client that asks and reads nothing, with little room for answers.
fn deaf(exporter: &Exporter, requests: &str) -> TcpStream {
    let client = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    sockopt::set_socket_recv_buffer_size(&client, 2048).unwrap();
    // The exporter's buffer begins as a multiple of the segments that its client takes.
    let bytes: libc::c_int = 536;
    // SAFETY: the pointer and the length are those of a variable that outlives the call.
    let set = unsafe {
        libc::setsockopt(
            client.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_MAXSEG,
            (&raw const bytes).cast(),
            size_of_val(&bytes) as libc::socklen_t,
        )
    };
    assert_eq!(set, 0);
    let address: SocketAddr = exporter.address().parse().unwrap();
    connect(&client, &address).unwrap();
    let mut client = TcpStream::from(client);
    client
        .set_write_timeout(Some(Duration::from_secs(1)))
        .unwrap();
    // It ends early when the exporter reads no more.
    let _ = client.write_all(requests.as_bytes());
    client
}

#[test]
fn clients_that_never_read_do_not_keep_a_scraper_out() {
    let directory = directory();
    let missing = directory.path().join("missing");
    let exporter = Exporter::of(text(&missing));
    let requests = "GET / HTTP/1.1\r\nHost: x\r\n\r\n".repeat(2000);
    let _clients = [(); 32].map(|()| deaf(&exporter, &requests));
    assert_eq!(sum(&exporter.scrape(), "larder_up"), 0.0);
}

#[test]
fn clients_that_do_not_take_a_long_answer_lose_their_place() {
    let directory = directory();
    let path = store_in(&directory);
    let _owner = serve(text(&path));
    let store = Store::attach(&path, OpenOptions::default()).unwrap();
    for model in 0..64 {
        let mut fields = namespace().fields().clone();
        fields.model = format!("{model:0>200}");
        let id = store.namespace(&Namespace::new(fields).unwrap()).unwrap();
        assert!(put(&store, id, model, 1)[0].is_present());
    }
    let exporter = Exporter::of(text(&path));
    let request = "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n";
    let _clients = [(); 32].map(|()| deaf(&exporter, request));
    assert_eq!(sum(&exporter.scrape(), "larder_up"), 1.0);
    store.close().unwrap();
}
