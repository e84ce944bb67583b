//! `larder doctor --bundle`: an archive of facts about a store and this machine, for a report of a
//! problem.
//!
//! Every text goes through [`Redactor`]. The archive has no page data and no page keys.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use larder_format::FORMAT_VERSION;
use larder_offline::survey::{Sealed, Survey, SurveyOptions};
use larder_store::protocol::Protocol;
use serde_json::{Value, json};

use super::redact::Redactor;
use crate::failure::Failure;
use crate::place::{directory_of, volume_at};
use crate::stat;

/// Last lines of the log, and most bytes of them.
const LOG_LINES: usize = 2000;
const LOG_BYTES: u64 = 1 << 20;

/// Parts of the names of environment variables with credentials.
const CREDENTIALS: [&str; 6] = [
    "TOKEN",
    "SECRET",
    "PASSW",
    "CREDENTIAL",
    "API_KEY",
    "ACCESS_KEY",
];

const README: &str = "\
Facts about a Larder store, for a report of a problem.

versions.json       the release, its protocol and format, the kernel
configuration.json  the store's geometry and namespaces, LARDER_* variables, limits
doctor.json         `larder doctor --json`
stat.json           `larder stat --json`, or the reason why there is none
log.txt             the last lines of the log, if one was named

Salts, tenants, models, buckets, paths, hosts and credentials are replaced by words in brackets.
";

/// Of an archive with lines of a log.
const README_OF_LOG: &str = "Logs are free text: read log.txt before you send the archive.\n";

/// Writes the archive. An existing file is not replaced. `answers`: the volumes may be read.
///
/// # Errors
/// If the log cannot be read, or the archive cannot be written.
pub(super) fn write(
    path: &Path,
    archive: &Path,
    log: Option<&Path>,
    doctor: Value,
    answers: bool,
) -> Result<(), Failure> {
    let store = volume_at(path.to_owned());
    let mut redactor = Redactor::default();
    known_values(&mut redactor);
    let options = SurveyOptions {
        sealed: Sealed::Locked,
        ..SurveyOptions::default()
    };
    let survey = answers.then(|| Survey::new(&store, &options));
    let geometry = match &survey {
        Some(Ok(survey)) => {
            store_values(survey, &mut redactor);
            geometry(survey)
        }
        Some(Err(error)) => json!({ "reason": error.to_string() }),
        None => json!({ "reason": "a volume does not answer" }),
    };
    redactor.knows(&store.to_string_lossy(), "store");
    redactor.knows(&path.to_string_lossy(), "store");
    let mut stat =
        stat::document(&store).unwrap_or_else(|failure| json!({ "reason": failure.to_string() }));
    bucket_values(&stat, &mut redactor);
    quota_names(&mut stat, &mut redactor);
    model_names(&mut stat, &mut redactor);
    let configuration = json!({
        "store": geometry,
        "environment": variables(),
        "limits": limits(),
    });
    let documents = [
        ("versions.json", versions()),
        ("configuration.json", configuration),
        ("doctor.json", doctor),
        ("stat.json", stat),
    ];
    let of_log = if log.is_some() { README_OF_LOG } else { "" };
    let mut entries = vec![("README.txt", format!("{README}{of_log}"))];
    for (name, document) in documents {
        entries.push((name, format!("{:#}\n", redactor.document(document))));
    }
    if let Some(log) = log {
        let failed = |error| {
            Failure::environment(format!(
                "{}: reading the log: {error}; check --log",
                log.display()
            ))
        };
        entries.push(("log.txt", redactor.text(&tail(log).map_err(failed)?)));
    }
    pack(archive, &entries).map_err(|error| {
        let advice = match error.kind() {
            io::ErrorKind::AlreadyExists => "choose another name, or remove the file",
            _ => "check the directory of --bundle, its permissions and its free space",
        };
        Failure::environment(format!(
            "{}: writing the bundle: {error}; {advice}",
            archive.display()
        ))
    })
}

/// Writes the archive under its name when it is complete, for this user alone.
fn pack(archive: &Path, entries: &[(&str, String)]) -> io::Result<()> {
    let file = tempfile::NamedTempFile::new_in(directory_of(archive))?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let mut archive_file = tar::Builder::new(file);
    for (name, text) in entries {
        let mut header = tar::Header::new_gnu();
        header.set_size(text.len() as u64);
        header.set_mode(0o644);
        header.set_mtime(now.as_ref().map_or(0, std::time::Duration::as_secs));
        archive_file.append_data(&mut header, Path::new("larder").join(name), text.as_bytes())?;
    }
    let file = archive_file.into_inner()?;
    file.as_file().sync_all()?;
    file.persist_noclobber(archive)
        .map_err(|error| error.error)?;
    Ok(())
}

/// Names of this machine and its user, and credentials in the environment.
fn known_values(redactor: &mut Redactor) {
    let machine = rustix::system::uname();
    let host = machine.nodename().to_string_lossy().into_owned();
    if let Some((first, _)) = host.split_once('.') {
        redactor.knows(first, "host");
    }
    redactor.knows(&host, "host");
    redactor.knows(
        &machine.domainname().to_string_lossy().replace("(none)", ""),
        "host",
    );
    for (name, value) in std::env::vars_os() {
        let (name, value) = (name.to_string_lossy(), value.to_string_lossy());
        let upper = name.to_ascii_uppercase();
        if CREDENTIALS.iter().any(|part| upper.contains(part)) {
            redactor.knows(&value, "credential");
        } else if name == "HOME" && value.len() > 1 {
            redactor.knows(&value, "home");
        } else if name == "HOSTNAME" {
            redactor.knows(&value, "host");
        } else if matches!(&*name, "USER" | "LOGNAME") && value != "root" {
            redactor.knows(&value, "user");
        }
    }
}

/// Values of the store's namespaces, and the paths of its volumes.
fn store_values(survey: &Survey, redactor: &mut Redactor) {
    for (number, volume) in survey.volumes.iter().enumerate() {
        redactor.knows(&volume.path.to_string_lossy(), &format!("volume {number}"));
    }
    for namespace in survey.namespaces.iter().filter_map(|of| of.record.as_ref()) {
        let fields = namespace.fields();
        redactor.knows(&fields.model, "model");
        redactor.knows(&fields.weights, "weights");
        for value in fields.extra.values() {
            redactor.knows(value, "namespace field");
        }
    }
}

/// Buckets of the remotes beneath the store, and prefixes in them: errors of a server name both.
fn bucket_values(stat: &Value, redactor: &mut Redactor) {
    let places = stat["l4"]["place"].as_str().unwrap_or_default();
    let buckets = places
        .split(", ")
        .filter_map(|url| url.strip_prefix("s3://"));
    for place in buckets {
        let (bucket, prefix) = place.split_once('/').unwrap_or((place, ""));
        redactor.knows(bucket, "bucket");
        redactor.knows(prefix.trim_matches('/'), "prefix");
    }
}

/// Models and tenants with quotas. They may have no namespace in the store, and names too short to
/// be found in a text.
fn quota_names(stat: &mut Value, redactor: &mut Redactor) {
    let groups = stat.pointer_mut("/quotas/groups");
    let groups = groups.and_then(Value::as_array_mut);
    for group in groups.into_iter().flatten() {
        let kind = group["kind"].as_str().unwrap_or_default().to_owned();
        if kind != "namespace" {
            redactor.knows(group["name"].as_str().unwrap_or_default(), &kind);
            group["name"] = format!("[{kind}]").into();
        }
    }
}

/// Models of namespaces. Without the key of an encrypted store its owner alone knows them.
fn model_names(stat: &mut Value, redactor: &mut Redactor) {
    match stat {
        Value::Object(fields) => {
            for (name, value) in fields {
                match value {
                    Value::String(model) if name == "model" => {
                        redactor.knows(model, "model");
                        "[model]".clone_into(model);
                    }
                    other => model_names(other, redactor),
                }
            }
        }
        Value::Array(list) => list.iter_mut().for_each(|one| model_names(one, redactor)),
        _ => {}
    }
}

/// The store's geometry, and the shapes of its namespaces.
fn geometry(survey: &Survey) -> Value {
    let namespaces = survey.namespaces.iter().map(|of| {
        let fields = of.record.as_ref().map(larder_format::Namespace::fields);
        let shape = fields.map(|fields| {
            json!({
                "dtype": fields.dtype,
                "layout": fields.layout,
                "page_tokens": fields.page_tokens,
                "part_bytes": fields.shape.part_sizes(),
                "tp": fields.tp.to_string(),
                "pp": fields.pp.to_string(),
                "cp": fields.cp.to_string(),
                "pool": fields.pool,
                "extra_fields": fields.extra.len(),
            })
        });
        json!({ "pages": of.pages, "live_bytes": of.bytes, "fields": shape })
    });
    json!({
        "volumes": survey.volumes.len(),
        "segments": survey.segments.len(),
        "unreachable_segments": survey.unreachable,
        "damage": survey.flaws.len(),
        "condition": format!("{:?}", survey.condition),
        "namespaces": namespaces.collect::<Vec<_>>(),
    })
}

fn versions() -> Value {
    let machine = rustix::system::uname();
    json!({
        "release": env!("CARGO_PKG_VERSION"),
        "protocol": Protocol::default(),
        "format": FORMAT_VERSION,
        "kernel": machine.release().to_string_lossy(),
        "system": machine.sysname().to_string_lossy(),
        "machine": machine.machine().to_string_lossy(),
    })
}

/// The variables that change how Larder works.
fn variables() -> Value {
    let larders = |name: &str| name.starts_with("LARDER_");
    let variables = std::env::vars_os().filter_map(|(name, value)| {
        let name = name.into_string().ok().filter(|name| larders(name))?;
        Some((name, Value::from(value.to_string_lossy())))
    });
    Value::Object(variables.collect())
}

/// The limits of this process, as the kernel prints them.
fn limits() -> Value {
    let limits = std::fs::read_to_string("/proc/self/limits").unwrap_or_default();
    limits.lines().map(Value::from).collect()
}

/// The last lines of a file.
fn tail(log: &Path) -> io::Result<String> {
    let mut file = File::open(log)?;
    let bytes = file.seek(SeekFrom::End(0))?;
    let skipped = bytes.saturating_sub(LOG_BYTES);
    file.seek(SeekFrom::Start(skipped))?;
    let mut end = Vec::new();
    file.take(LOG_BYTES).read_to_end(&mut end)?;
    let text = String::from_utf8_lossy(&end);
    // The first line may be cut, and with it a secret.
    let whole = match skipped {
        0 => &text[..],
        _ => text.split_once('\n').map_or("", |(_, rest)| rest),
    };
    let lines: Vec<&str> = whole.lines().collect();
    let last = &lines[lines.len().saturating_sub(LOG_LINES)..];
    Ok(last.iter().map(|line| format!("{line}\n")).collect())
}
