//! Certificates: a hub on the loopback speaks https with a certificate of its own authority, like a proxy that inspects TLS.

use std::fs;
use std::sync::Arc;

use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use rustls::ServerConfig;
use rustls::crypto::ring;
use rustls::pki_types::PrivateKeyDer;

use super::server::Server;
use super::{QUICK, command, refuses, with_model_on};
use crate::support::{Place, ran};

/// Variables that a person may have set here.
const VARIABLES: [&str; 4] =
    ["SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"];

/// A hub with https and a model. `ca.pem` is its authority, `other.pem` another one.
fn with_authority() -> (Server, Place) {
    let authority = |name: &str| {
        let mut params = CertificateParams::new([]).expect("no names");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(rcgen::DnType::CommonName, name);
        let key = KeyPair::generate().expect("a key");
        let certificate = params.self_signed(&key).expect("signed");
        (certificate.pem(), Issuer::new(params, key))
    };
    let (ca, issuer) = authority("inspection");
    let names = ["localhost".to_string(), "127.0.0.1".to_string()];
    let key = KeyPair::generate().expect("a key");
    let leaf = CertificateParams::new(names).expect("names");
    let leaf = leaf.signed_by(&key, &issuer).expect("signed");
    let tls = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .expect("versions of ring")
        .with_no_client_auth()
        .with_single_cert(
            vec![leaf.der().clone()],
            PrivateKeyDer::Pkcs8(key.serialize_der().into()),
        )
        .expect("a key and its certificate");
    let (server, place) = with_model_on(Server::start_with(Some(tls)));
    fs::create_dir(place.path("folder")).expect("a new folder");
    for (file, text) in [
        ("ca.pem", ca.clone()),
        ("other.pem", authority("other").0),
        ("both.pem", format!("# ours\n{ca}{}", authority("third").0)),
        ("empty.pem", String::new()),
        ("key.pem", key.serialize_pem()),
        ("folder/ca.crt", ca),
        ("folder/README", "nothing".to_string()),
    ] {
        fs::write(place.path(file), text).expect("written");
    }
    (server, place)
}

fn with(place: &Place, server: &Server, variables: &[(&str, &str)]) -> std::process::Command {
    let mut command = command(place, server, QUICK);
    for name in VARIABLES {
        command.env_remove(name);
    }
    command.envs(variables.iter().copied());
    command
}

#[test]
fn a_named_authority_is_trusted() {
    let (server, place) = with_authority();
    for variables in [
        [("SSL_CERT_FILE", "ca.pem"), ("SSL_CERT_DIR", "nowhere")],
        [("SSL_CERT_FILE", "both.pem"), ("CURL_CA_BUNDLE", "nowhere")],
        [("SSL_CERT_FILE", ""), ("SSL_CERT_DIR", "folder")],
        [("SSL_CERT_FILE", ""), ("REQUESTS_CA_BUNDLE", "ca.pem")],
        [("SSL_CERT_FILE", ""), ("CURL_CA_BUNDLE", "folder")],
    ] {
        let _ = fs::remove_dir_all(place.path("hf"));
        let ran = ran(&mut with(&place, &server, &variables));
        assert_eq!(ran.code, 0, "{variables:?}: {}", ran.stderr);
        let seen = server.seen();
        assert!(seen.iter().any(|request| !request.is_home), "{variables:?}");
    }
}

#[test]
fn an_unknown_authority_is_refused_at_once_with_the_variable_that_names_it() {
    let (server, place) = with_authority();
    let first = format!("error: the certificate of `{}` is not trusted", server.host());
    let hint = "hint: name the file of that authority: SSL_CERT_FILE=/path/to/ca.pem; without such a proxy, check the clock and HF_ENDPOINT";
    for (variables, trusted) in [
        (vec![], "  it is checked against "),
        (
            vec![("SSL_CERT_FILE", "other.pem")],
            "  it is checked against the one certificate of SSL_CERT_FILE (`other.pem`)\n",
        ),
    ] {
        let ran = refuses(&mut with(&place, &server, &variables), 1, &first, hint);
        for detail in [
            "  io: invalid peer certificate: UnknownIssuer\n",
            trusted,
            "  a proxy may be inspecting TLS: it answers with a certificate of its own authority\n",
        ] {
            assert!(ran.stderr.contains(detail), "{}", ran.stderr);
        }
        assert!(!ran.stderr.contains("trying again"), "{}", ran.stderr);
    }
    assert!(server.seen().is_empty(), "no request, so no token");
}

#[test]
fn a_variable_without_certificates_is_refused_before_any_transfer() {
    let (server, place) = with_authority();
    fs::create_dir(place.path("bare")).expect("a new folder");
    for (name, path, why) in [
        ("SSL_CERT_FILE", "missing.pem", "which cannot be read"),
        ("SSL_CERT_FILE", "empty.pem", "which holds no certificate"),
        ("SSL_CERT_FILE", "key.pem", "which holds no certificate"),
        ("SSL_CERT_DIR", "bare", "which holds no certificate"),
        ("SSL_CERT_DIR", "folder:missing", "which cannot be read"),
        ("REQUESTS_CA_BUNDLE", "missing.pem", "which cannot be read"),
    ] {
        let ran = refuses(
            &mut with(&place, &server, &[(name, path)]),
            1,
            &format!("error: {name} names `{path}`, {why}"),
            &format!(
                "hint: use {name}=/path/to/ca.pem, a text of -----BEGIN CERTIFICATE----- sections, or unset it to trust the system's"
            ),
        );
        if why.ends_with("read") {
            let missing = path.rsplit(':').next().unwrap_or(path);
            let detail = format!("  `{missing}`: No such file or directory (os error 2)\n");
            assert!(ran.stderr.contains(&detail), "{}", ran.stderr);
        }
    }
    assert!(server.seen().is_empty());
    // Runs without a hub do not look.
    let mut local = with(&place, &server, &[("SSL_CERT_FILE", "missing.pem")]);
    let offline = refuses(
        local.env("HF_HUB_OFFLINE", "1"),
        1,
        "error: the model `some-owner/Tiny-Llama` (revision `main`) is not in the cache, and HF_HUB_OFFLINE forbids to download it",
        "hint: run once without HF_HUB_OFFLINE where there is a network, name the right cache with --cache-dir, or give a local \
         folder to --model",
    );
    assert!(!offline.stderr.contains("SSL_CERT_FILE"));
}
