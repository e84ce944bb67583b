//! `larder remote init`: the settings that a bucket needs, printed for its owner, and the mark of a
//! new remote. Nothing else is set.

use clap::Args;
use larder_engine::CodecChoice;
use larder_remote::RemoteError;
use serde::Serialize;
use serde_json::{Value, json};

use super::place::PlaceArgs;
use crate::failure::{Ending, Failure};
use crate::report::{self, Lines, Report};

/// Make a new remote, and print the settings that a bucket needs
///
/// With --new alone: makes the mark without which owners publish nothing. Looks whether the remote
/// answers. The settings are a rule that expires objects, and a minimal policy: they are not set.
#[derive(Args, Debug)]
pub struct InitArgs {
    #[command(flatten)]
    place: PlaceArgs,
    /// Make a remote of a place that is none yet
    #[arg(long)]
    new: bool,
    /// Encode the pages of objects that nodes publish from now on: off, bf16 or auto; all nodes
    /// read plain and encoded pages [default: as it is; off for a new remote]
    #[arg(long, value_name = "CODEC")]
    codec: Option<CodecChoice>,
    /// Days after which an object expires
    #[arg(long, value_name = "N", default_value_t = 7,
        value_parser = clap::value_parser!(u32).range(1..))]
    days: u32,
    /// The policy of nodes that fetch and do not publish
    #[arg(long)]
    read_only: bool,
    /// The user of a policy that is attached to the bucket instead of the user: an ARN
    #[arg(long, value_name = "ARN")]
    principal: Option<String>,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct InitReport {
    remote: String,
    /// Why the remote does not answer; `null` if it does.
    problem: Option<String>,
    /// Whether it has its mark: owners publish.
    is_marked: bool,
    /// The codec of the objects; `null` if it is not known.
    codec: Option<CodecChoice>,
    /// The settings of a bucket.
    lifecycle: Option<Value>,
    policy: Option<Value>,
}

impl Report for InitReport {
    const COMMAND: &'static str = "remote init";

    fn lines(&self) -> Lines {
        let mut lines = Lines::default();
        let answers = match (&self.problem, self.is_marked) {
            (Some(problem), _) => problem.clone(),
            (None, true) => "ready".to_owned(),
            (None, false) => "no remote yet: --new makes it one".to_owned(),
        };
        lines.row("Remote", format!("{}: {answers}", self.remote));
        if let Some(codec) = self.codec {
            lines.row("Codec", codec.to_string());
        }
        let documents = [("Life cycle", &self.lifecycle), ("Policy", &self.policy)];
        for (what, document) in documents {
            if let Some(document) = document {
                lines.text(format!("\n{what}:"));
                lines.text(format!("{document:#}"));
            }
        }
        if self.policy.is_some() {
            lines.text("\nThey were not set. docs/remote.md has the commands that set them.");
        }
        lines
    }
}

/// Runs the command.
///
/// # Errors
/// The URL names no remote, or the mark cannot be made.
pub fn run(args: &InitArgs) -> Result<Ending, Failure> {
    let url = &args.place.url;
    let remote = args.place.connect()?;
    let mut looked = remote.look(args.place.deadline());
    if args.new && matches!(looked, Err(RemoteError::Unmarked(_))) {
        looked = Ok(remote.mark(args.place.deadline())?);
    }
    let is_marked = looked.is_ok();
    let codec = looked.and_then(|()| {
        if let Some(codec) = args.codec {
            remote.set_codec(codec, args.place.deadline())?;
        }
        remote.codec(args.place.deadline())
    });
    let codec_known = codec.as_ref().ok().copied();
    let problem = codec.err();
    let problem = problem.filter(|problem| !matches!(problem, RemoteError::Unmarked(_)));
    let bucket = url.strip_prefix("s3://").map(|rest| {
        let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        (bucket, prefix.trim_matches('/'))
    });
    let report = InitReport {
        remote: url.clone(),
        problem: problem.map(|problem| problem.to_string()),
        is_marked,
        codec: codec_known,
        lifecycle: bucket.map(|(_, prefix)| lifecycle(prefix, args.days)),
        policy: bucket.map(|(bucket, prefix)| policy(bucket, prefix, args)),
    };
    report::print(&report, args.json)?;
    Ok(Ending::Done.or_findings(report.problem.is_some()))
}

/// Directories of a remote: of the objects, and of the marks of use.
const DIRECTORIES: [&str; 2] = ["v1/", "v1-used/"];

/// The setting of the codec, which does not expire.
const CODEC: &str = "v1-codec";

fn below(prefix: &str, directory: &str) -> String {
    match prefix {
        "" => directory.to_owned(),
        prefix => format!("{prefix}/{directory}"),
    }
}

/// Objects expire, with their old versions and the parts of uploads that were not completed.
fn lifecycle(prefix: &str, days: u32) -> Value {
    let rules = DIRECTORIES.map(|directory| {
        json!({
            "ID": format!("larder {directory}"),
            "Status": "Enabled",
            "Filter": {"Prefix": below(prefix, directory)},
            "Expiration": {"Days": days},
            "NoncurrentVersionExpiration": {"NoncurrentDays": 1},
            "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 1},
        })
    });
    json!({"Rules": rules})
}

/// The rights that a node uses, and no others. `prune` deletes; the life cycle does it otherwise.
fn policy(bucket: &str, prefix: &str, args: &InitArgs) -> Value {
    let bucket = format!("arn:aws:s3:::{bucket}");
    let mut of_objects = vec!["s3:GetObject"];
    if !args.read_only {
        of_objects.push("s3:PutObject");
    }
    let mut resources: Vec<String> = DIRECTORIES
        .iter()
        .map(|directory| format!("{bucket}/{}*", below(prefix, directory)))
        .collect();
    resources.push(format!("{bucket}/{}", below(prefix, CODEC)));
    let objects = json!({
        "Sid": "LarderObjects",
        "Effect": "Allow",
        "Action": of_objects,
        "Resource": resources,
    });
    // Without this right a missing object is answered with 403 instead of 404.
    let list = json!({
        "Sid": "LarderList",
        "Effect": "Allow",
        "Action": ["s3:ListBucket"],
        "Resource": bucket,
    });
    let mut statements = [objects, list];
    if let Some(principal) = &args.principal {
        for statement in &mut statements {
            statement["Principal"] = json!({"AWS": [principal]});
        }
    }
    json!({"Version": "2012-10-17", "Statement": statements})
}
