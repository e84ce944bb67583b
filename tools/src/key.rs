//! The options that name the key of an encrypted store.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use clap::Args;
use larder_engine::StoreError;
use larder_offline::survey::Sealed;
use larder_seal::{KeySource, SourceError, Vault, WrappingKey};

use crate::failure::Failure;

/// What to do without the key.
pub const OPTIONS: &str = "--key-file, --key-command or --key-credential";

/// Where the key of an encrypted store is.
#[derive(Args, Clone, Debug, Default)]
#[group(id = "store_key", multiple = false)]
pub struct KeyArgs {
    /// Key of an encrypted store: a file that its owner alone can use (`larder key make` makes one)
    #[arg(long, value_name = "FILE")]
    key_file: Option<PathBuf>,
    /// Command that prints the key of an encrypted store, within 10 seconds; a shell runs it
    #[arg(long, value_name = "COMMAND")]
    key_command: Option<String>,
    /// The key is the credential larder.kek of the service manager
    #[arg(long)]
    key_credential: bool,
    /// The key, once it was read: a command runs once.
    #[arg(skip)]
    read: OnceLock<WrappingKey>,
}

impl KeyArgs {
    fn source(&self) -> Option<KeySource> {
        let file = self.key_file.clone().map(KeySource::File);
        let command = self.key_command.clone().map(KeySource::Command);
        let credential = self.key_credential.then_some(KeySource::Credential);
        file.or(command).or(credential)
    }

    /// Whether an option names a key.
    pub fn is_given(&self) -> bool {
        self.source().is_some()
    }

    /// The key; `None` if no option names one.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn read(&self) -> Result<Option<WrappingKey>, Failure> {
        let Some(source) = self.source() else {
            return Ok(None);
        };
        if self.read.get().is_none() {
            let key = source.read(&Vault::new())?;
            let _ = self.read.set(key);
        }
        Ok(self.read.get().cloned())
    }

    /// How a survey reads an encrypted store with these options.
    ///
    /// # Errors
    /// The key cannot be read.
    pub fn sealed(&self) -> Result<Sealed, Failure> {
        Ok(self.read()?.map_or(Sealed::Refused, Sealed::Unlocked))
    }
}

/// Where the key of an encrypted store is, in commands whose `--key-file` is that of a remote.
#[derive(Args, Clone, Debug, Default)]
#[group(id = "key_of_store", multiple = false)]
pub struct StoreKeyArgs {
    /// Key of an encrypted store: a file that its owner alone can use
    #[arg(long, value_name = "FILE")]
    store_key_file: Option<PathBuf>,
    /// Command that prints the key of an encrypted store, within 10 seconds; a shell runs it
    #[arg(long, value_name = "COMMAND")]
    store_key_command: Option<String>,
}

impl StoreKeyArgs {
    /// Refuses to go on without the key of an encrypted store.
    ///
    /// # Errors
    /// No option names it.
    pub fn require(&self, path: &Path) -> Result<(), Failure> {
        match self.as_key().is_given() {
            true => Ok(()),
            false => Err(Failure::environment(format!(
                "{}: the store is encrypted, and no key is given: name it with --store-key-file or \
                 --store-key-command; --key-file is the key of the remote",
                path.display()
            ))),
        }
    }

    /// The same as the options of other commands.
    pub fn as_key(&self) -> KeyArgs {
        KeyArgs {
            key_file: self.store_key_file.clone(),
            key_command: self.store_key_command.clone(),
            ..KeyArgs::default()
        }
    }
}

/// Where the key of an encrypted archive is.
#[derive(Args, Clone, Debug, Default)]
#[group(id = "archive_key", multiple = false)]
pub struct ArchiveKeyArgs {
    /// Key of an encrypted archive: a file that its owner alone can use [default: the key of the
    /// store]
    #[arg(long, value_name = "FILE")]
    archive_key_file: Option<PathBuf>,
    /// Command that prints the key of an encrypted archive, within 10 seconds; a shell runs it
    #[arg(long, value_name = "COMMAND")]
    archive_key_command: Option<String>,
}

impl ArchiveKeyArgs {
    /// Whether a key of the archive itself is named.
    pub fn is_given(&self) -> bool {
        self.archive_key_file.is_some() || self.archive_key_command.is_some()
    }

    /// The key of the archive, beside that of the store.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn read(&self, store: &KeyArgs) -> Result<Option<WrappingKey>, Failure> {
        let file = self.archive_key_file.clone().map(KeySource::File);
        let command = self.archive_key_command.clone().map(KeySource::Command);
        match file.or(command) {
            Some(source) => Ok(Some(source.read(&Vault::new())?)),
            None => store.read(),
        }
    }
}

/// Why keys were not changed.
pub fn not_changed(error: StoreError) -> Failure {
    match error {
        StoreError::Locked { path, holder, .. } => Failure::environment(format!(
            "{}: in use by {holder}: keys change while no process uses the store; stop it first",
            path.display()
        )),
        error => error.into(),
    }
}

impl From<SourceError> for Failure {
    fn from(error: SourceError) -> Failure {
        match error {
            SourceError::Unknown => Failure::usage(error.to_string()),
            error => Failure::environment(error.to_string()),
        }
    }
}
