//! The list of a repository's files at a revision, with its commit: one request.

use std::collections::BTreeMap;
use std::io::Read;

use serde::Deserialize;

use super::cache::is_plain_commit;
use super::http::{Client, HttpRequest};
use super::id::HubRepo;
use super::refusal::{self, Asked, RequestError};
use crate::bytes::ByteSize;
use crate::failure::Failure;

/// The longest answer that is read; the list of a model has some kilobytes.
const MAX_LISTING: u64 = 64 << 20;

/// A repository's files.
#[derive(Debug)]
pub(super) struct Listing {
    pub(super) commit: String,
    /// Name → bytes, if the hub gives them.
    pub(super) files: BTreeMap<String, Option<u64>>,
}

#[derive(Deserialize)]
struct Info {
    sha: String,
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
    #[serde(default)]
    size: Option<u64>,
}

/// Requests the list.
pub(super) fn listing(client: &Client, repo: &HubRepo) -> Result<Listing, RequestError> {
    let asked = Asked { repo, file: None };
    let answer = client.send(&HttpRequest {
        asked,
        path: format!("/api/{}?blobs=true", repo.repo().api_url()),
        is_head: false,
        headers: Vec::new(),
    })?;
    let origin = answer.origin;
    let mut text = Vec::new();
    let body = answer.response.into_body().into_reader();
    body.take(MAX_LISTING)
        .read_to_end(&mut text)
        .map_err(|error| {
            refusal::unanswered(client.settings(), &origin, &ureq::Error::from(error))
        })?;
    let unlike = |why: String| {
        Failure::new(format!("`{origin}` does not answer like a hub"))
            .detail(format!("its list of files: {why}"))
            .hint("check HF_ENDPOINT; a login page of the network may answer in its place")
    };
    if text.len() as u64 == MAX_LISTING {
        return Err(unlike(format!("more than {}", ByteSize(MAX_LISTING))).into());
    }
    let info: Info = serde_json::from_slice(&text).map_err(|error| unlike(error.to_string()))?;
    if !is_plain_commit(&info.sha) {
        return Err(unlike("the commit is no hash".to_string()).into());
    }
    let files = info.siblings.into_iter();
    Ok(Listing {
        commit: info.sha,
        files: files.map(|file| (file.rfilename, file.size)).collect(),
    })
}
