//! The namespaces that an operator chooses: by fingerprint, or by the name of their model.

use clap::Args;
use larder_engine::format::{Fingerprint, Namespace};

use crate::failure::Failure;

/// Options of commands that work on some namespaces of a store.
#[derive(Args, Clone, Debug)]
#[group(multiple = false)]
pub struct Selection {
    /// One namespace, by its fingerprint as `larder inspect --namespaces` shows it
    #[arg(long, value_name = "FINGERPRINT", value_parser = fingerprint)]
    namespace: Option<Wanted>,
    /// All namespaces of this model: of all its weights, ranks and layouts
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
}

/// The value of `--namespace`.
#[derive(Clone, Copy, Debug)]
enum Wanted {
    All,
    One(Fingerprint),
}

fn fingerprint(text: &str) -> Result<Wanted, String> {
    if text == "all" {
        return Ok(Wanted::All);
    }
    let fingerprint = text.trim().to_ascii_lowercase().parse();
    fingerprint.map(Wanted::One).map_err(|error| {
        format!("{error}; `larder inspect --namespaces` shows fingerprints, `--model` takes a name")
    })
}

impl Selection {
    /// Whether neither a namespace nor a model is named.
    pub fn is_open(&self) -> bool {
        self.model.is_none() && !matches!(self.namespace, Some(Wanted::One(_)))
    }

    /// Whether namespaces are chosen by their model.
    pub fn is_of_a_model(&self) -> bool {
        self.model.is_some()
    }

    /// Whether a namespace is chosen. Its record may be lost: then it has no model.
    pub fn takes(&self, fingerprint: &Fingerprint, namespace: Option<&Namespace>) -> bool {
        if let Some(model) = &self.model {
            return namespace.is_some_and(|namespace| namespace.fields().model == *model);
        }
        match self.namespace {
            Some(Wanted::One(wanted)) => wanted == *fingerprint,
            Some(Wanted::All) | None => true,
        }
    }

    /// The error if none of a store's namespaces is chosen.
    pub fn unmatched<'a>(&self, namespaces: impl Iterator<Item = &'a Namespace>) -> Failure {
        let wanted = match (&self.model, self.namespace) {
            (Some(model), _) => format!("of model {model:?}"),
            (None, Some(Wanted::One(fingerprint))) => fingerprint.to_string(),
            (None, _) => "with pages".to_owned(),
        };
        let mut models: Vec<&str> = namespaces.map(|of| &*of.fields().model).collect();
        models.sort_unstable();
        models.dedup();
        let known = match models.is_empty() {
            true => String::new(),
            false => format!(" (models in it: {})", models.join(", ")),
        };
        Failure::usage(format!(
            "no namespace {wanted} in this store{known}; `larder inspect --namespaces` lists them"
        ))
    }
}
