//! The licences of all dependencies, as their authors declare them, allow redistribution.
//!
//! Known weaknesses of dependencies are not tested: their list is on the network, and the tests use no network (docs/dev/ci.md).

use std::process::Command;

use serde_json::Value;

/// Licences that only ask to be passed on, and licences that cover their own files only.
const ALLOWED: [&str; 13] = [
    "0BSD",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "CC0-1.0",
    "CDLA-Permissive-2.0",
    "ISC",
    "MIT",
    "MPL-2.0",
    "Unicode-3.0",
    "Zlib",
];

/// Returns whether an SPDX expression can be met: one side of each OR, both of each AND. `/` is an old spelling of OR.
fn is_allowed(expression: &str) -> bool {
    let expression = expression.trim();
    let split = |separator: &str| -> Option<Vec<String>> {
        let (mut parts, mut depth, mut start) = (Vec::new(), 0, 0);
        for (at, character) in expression.char_indices() {
            match character {
                '(' => depth += 1,
                ')' => depth -= 1,
                _ if depth == 0 && at >= start && expression[at..].starts_with(separator) => {
                    parts.push(expression[start..at].to_string());
                    start = at + separator.len();
                }
                _ => {}
            }
        }
        parts.push(expression[start..].to_string());
        (parts.len() > 1).then_some(parts)
    };
    for separator in [" OR ", "/"] {
        if let Some(parts) = split(separator) {
            return parts.iter().any(|part| is_allowed(part));
        }
    }
    if let Some(parts) = split(" AND ") {
        return parts.iter().all(|part| is_allowed(part));
    }
    match expression.strip_prefix('(').and_then(|inner| inner.strip_suffix(')')) {
        Some(inner) => is_allowed(inner),
        None => ALLOWED.contains(&expression),
    }
}

#[test]
fn expressions_are_read_as_they_are_meant() {
    for allowed in [
        "MIT",
        "LGPL-2.1-or-later OR MIT",
        "GPL-3.0/MIT",
        "Apache-2.0 AND ISC",
        "(MIT OR GPL-3.0) AND Unicode-3.0",
        "Apache-2.0 WITH LLVM-exception OR GPL-3.0",
    ] {
        assert!(is_allowed(allowed), "{allowed}");
    }
    for refused in ["GPL-3.0", "MIT AND GPL-3.0", "(MIT OR ISC) AND GPL-3.0", ""] {
        assert!(!is_allowed(refused), "{refused}");
    }
}

#[test]
fn every_dependency_may_be_passed_on() {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version", "1", "--offline", "--all-features"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .expect("cargo runs this test");
    if !output.status.success() {
        eprintln!("skipped: {}", String::from_utf8_lossy(&output.stderr));
        return;
    }
    let metadata: Value = serde_json::from_slice(&output.stdout).expect("cargo's JSON");
    let packages = metadata["packages"].as_array().expect("a list");
    assert!(packages.len() > 100, "{}", packages.len());
    let refused: Vec<String> = packages
        .iter()
        .filter(|package| !package["license"].as_str().is_some_and(is_allowed))
        .map(|package| format!("{}: {}", package["name"], package["license"]))
        .collect();
    assert!(refused.is_empty(), "{refused:#?}");
}
