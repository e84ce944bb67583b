//! One Prometheus for all scenes of the process, since it scrapes nothing in the first seconds
//! after its start. Its targets are names. A proxy in this process passes each request on to the
//! exporter of the scene with that name.

use std::collections::{BTreeSet, HashMap};
use std::io::{self, BufRead, BufReader, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, LazyLock, Mutex};
use std::thread;

use crate::support::observe::{Exporter, Prometheus, is_there};

/// More than the scenes of a process.
const SCENES_MAX: usize = 24;

/// Absent where there is no Prometheus.
static SHARED: LazyLock<Option<Shared>> = LazyLock::new(Shared::start);

/// Addresses of exporters by the names of their scenes.
type Exporters = Arc<Mutex<HashMap<String, String>>>;

struct Shared {
    prometheus: Prometheus,
    exporters: Exporters,
}

/// The Prometheus, for one scene.
pub struct Watch {
    shared: &'static Shared,
    /// The name of the scene.
    instance: String,
}

impl Watch {
    /// `None` where there is no Prometheus.
    pub fn of(exporter: &Exporter) -> Option<Watch> {
        let shared = SHARED.as_ref()?;
        let mut exporters = shared.exporters.lock().unwrap();
        assert!(exporters.len() < SCENES_MAX, "more scenes than SCENES_MAX");
        let instance = name(exporters.len());
        exporters.insert(instance.clone(), exporter.address().to_owned());
        Some(Watch { shared, instance })
    }

    /// The sum of the samples of a metric.
    #[track_caller]
    pub fn sum(&self, metric: &str) -> f64 {
        let of = format!("{metric}{{job='larder',instance='{}'}}", self.instance);
        self.shared.prometheus.sum(&of)
    }

    /// Rules that fire.
    pub fn firing(&self) -> BTreeSet<String> {
        let of = format!(",instance='{}'", self.instance);
        self.shared.prometheus.firing_of(&of)
    }
}

/// The target of a scene.
fn name(scene: usize) -> String {
    format!("scene-{scene}:80")
}

impl Shared {
    fn start() -> Option<Shared> {
        if !is_there("prometheus") {
            return None;
        }
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let proxy = format!("proxy_url: 'http://{}',", listener.local_addr().unwrap());
        let exporters = Exporters::default();
        let known = exporters.clone();
        thread::spawn(move || {
            for request in listener.incoming().map_while(Result::ok) {
                let known = known.clone();
                // Prometheus may have left, and the exporter of a scene that is over has.
                thread::spawn(move || pass_on(&request, &known).ok());
            }
        });
        let names: Vec<String> = (0..SCENES_MAX).map(name).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        Some(Shared {
            prometheus: Prometheus::start(&names, &proxy),
            exporters,
        })
    }
}

/// Passes one request on, and the reply back. A scene that has no exporter yet gets no reply.
fn pass_on(mut request: &TcpStream, exporters: &Mutex<HashMap<String, String>>) -> io::Result<()> {
    let lines = BufReader::new(request).lines();
    let head: io::Result<Vec<String>> = lines
        .take_while(|line| line.as_ref().is_ok_and(|line| !line.is_empty()))
        .collect();
    let head = head?;
    let target = head.first().and_then(|line| line.split("://").nth(1));
    let scene = target.and_then(|target| target.split('/').next());
    let known = scene.and_then(|scene| exporters.lock().unwrap().get(scene).cloned());
    let Some(address) = known else {
        return request.shutdown(Shutdown::Both);
    };
    let mut exporter = TcpStream::connect(address)?;
    // Without `Accept-Encoding`: the reply is passed on as text.
    let accepts = head.iter().filter(|line| line.starts_with("Accept:"));
    write!(exporter, "GET /metrics HTTP/1.1\r\nHost: x\r\n")?;
    accepts
        .into_iter()
        .try_for_each(|line| write!(exporter, "{line}\r\n"))?;
    write!(exporter, "Connection: close\r\n\r\n")?;
    io::copy(&mut exporter, &mut request)?;
    request.shutdown(Shutdown::Both)
}
