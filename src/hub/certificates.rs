//! The certificates that https trusts: from a variable, else from the system's store, else from the list inside the program.
//!
//! A proxy that inspects TLS answers with certificates of its own authority. Its users have that authority in the system's store, or
//! name it in a variable. The variables come from OpenSSL and the Python client, and replace the store as they do there. A
//! system without any certificates, like an empty container, gets Mozilla's list, which is part of the program.
//!
//! Linux and its relatives keep certificates in files, which are read here. macOS and Windows check certificates themselves, and
//! Windows loads authorities only when they are needed.

use std::env::split_paths;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ureq::tls::{Certificate, PemItem, RootCerts, parse_pem};

use crate::bytes::ByteSize;
use crate::failure::Failure;
use crate::input::{self, Expected};

/// Variables that name certificates; the first that is set counts. Each names a file, or a folder of files.
const VARIABLES: [&str; 4] = ["SSL_CERT_FILE", FOLDERS, "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"];
/// The variable that may name several folders.
const FOLDERS: &str = "SSL_CERT_DIR";
/// The largest file of certificates that is read; a list of the authorities of the world has a quarter of a MiB.
const LARGEST: ByteSize = ByteSize(16 << 20);

/// Trusted certificates.
#[derive(Debug, Clone)]
pub(super) struct Trusted {
    pub(super) roots: RootCerts,
    /// Their place, for messages.
    pub(super) place: String,
}

impl Trusted {
    /// Mozilla's list.
    pub(super) fn built_in() -> Self {
        Self {
            roots: RootCerts::WebPki,
            place: "Mozilla's list inside the program, as the system has no certificates"
                .to_string(),
        }
    }

    /// Reads the certificates that a variable names, else the system's. `lookup` gives the value of a variable.
    ///
    /// # Errors
    /// Fails when a variable names a path that cannot be read or holds no certificate.
    pub(super) fn find(lookup: &dyn Fn(&str) -> Option<OsString>) -> Result<Self, Failure> {
        let is_set = |name: &&str| lookup(name).is_some_and(|value| !value.is_empty());
        let Some(name) = VARIABLES.into_iter().find(is_set) else {
            return Ok(Self::of_system());
        };
        let value = lookup(name).unwrap_or_default();
        let shown = value.display();
        let unusable = |why: &str| {
            Failure::new(format!("{name} names `{shown}`, {why}")).hint(format!(
                "use {name}=/path/to/ca.pem, a text of -----BEGIN CERTIFICATE----- sections, or unset it to trust the system's"
            ))
        };
        let paths: Vec<PathBuf> = match name {
            FOLDERS => split_paths(&value).collect(),
            _ => vec![PathBuf::from(&value)],
        };
        let mut certificates = Vec::new();
        for path in &paths {
            let read = read(path, &mut certificates);
            read.map_err(|error| {
                unusable("which cannot be read").detail(format!("`{}`: {error}", path.display()))
            })?;
        }
        if certificates.is_empty() {
            return Err(unusable("which holds no certificate"));
        }
        Ok(Self::these(certificates, &format!("of {name} (`{shown}`)")))
    }

    /// Trusts the certificates at these paths; without any certificate there, Mozilla's list.
    #[cfg(not(any(windows, target_vendor = "apple")))]
    fn at(paths: &[PathBuf]) -> Self {
        let mut certificates = Vec::new();
        for path in paths {
            // A system's store may hold what this user cannot read.
            let _ = read(path, &mut certificates);
        }
        match certificates.is_empty() {
            true => Self::built_in(),
            false => Self::these(certificates, "of the system"),
        }
    }

    #[cfg(not(any(windows, target_vendor = "apple")))]
    fn of_system() -> Self {
        let found = openssl_probe::probe();
        let paths = found.cert_file.into_iter().chain(found.cert_dir);
        Self::at(&paths.collect::<Vec<_>>())
    }

    #[cfg(any(windows, target_vendor = "apple"))]
    fn of_system() -> Self {
        Self { roots: RootCerts::PlatformVerifier, place: "the system's certificates".to_string() }
    }

    fn these(mut certificates: Vec<Certificate<'static>>, place: &str) -> Self {
        // A store has each certificate up to three times: in a bundle, as a file, and as a link to that.
        certificates.sort_by(|one, other| one.der().cmp(other.der()));
        certificates.dedup_by(|one, other| one.der() == other.der());
        let place = match certificates.len() {
            1 => format!("the one certificate {place}"),
            count => format!("the {count} certificates {place}"),
        };
        Self { roots: RootCerts::Specific(Arc::new(certificates)), place }
    }
}

/// Adds the certificates of a file, or of the files of a folder.
fn read(path: &Path, certificates: &mut Vec<Certificate<'static>>) -> io::Result<()> {
    if !path.is_dir() {
        certificates.extend(of_pem(&input::read(path, LARGEST, Expected::Settings)?));
        return Ok(());
    }
    for entry in fs::read_dir(path)? {
        let file = entry?.path();
        // Links may point nowhere, and the folder may hold unrelated files.
        if file.is_file()
            && let Ok(text) = input::read(&file, LARGEST, Expected::Settings)
        {
            certificates.extend(of_pem(&text));
        }
    }
    Ok(())
}

/// The certificates in a text; keys, comments and damaged sections are left out.
fn of_pem(text: &[u8]) -> impl Iterator<Item = Certificate<'static>> + '_ {
    parse_pem(text).filter_map(|item| match item {
        Ok(PemItem::Certificate(certificate)) => Some(certificate),
        _ => None,
    })
}

#[cfg(all(test, not(any(windows, target_vendor = "apple"))))]
mod tests {
    use super::*;

    /// A section that is read without a look at what it certifies.
    const SECTION: &str = "-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----\n";

    #[test]
    fn a_system_without_certificates_trusts_the_list_of_the_program() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let store = [folder.path().join("bundle.pem"), folder.path().to_path_buf()];
        assert!(matches!(Trusted::at(&[]).roots, RootCerts::WebPki));
        assert!(matches!(Trusted::at(&store).roots, RootCerts::WebPki));
        fs::write(&store[0], SECTION).expect("written");
        fs::write(folder.path().join("the-same"), SECTION).expect("written");
        let found = Trusted::at(&store);
        assert!(
            matches!(&found.roots, RootCerts::Specific(certificates) if certificates.len() == 1)
        );
        assert_eq!(found.place, "the one certificate of the system");
    }

    #[test]
    fn damaged_sections_are_left_out() {
        let text = format!(
            "{SECTION}-----BEGIN CERTIFICATE-----\n?\n-----END CERTIFICATE-----\n{SECTION}-----BEGIN CERTIFICATE-----\nMAA="
        );
        assert_eq!(of_pem(text.as_bytes()).count(), 2);
        assert_eq!(of_pem(b"\x30\x82\x01\x0a\0").count(), 0);
    }
}
