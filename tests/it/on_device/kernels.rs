//! The source of the GPU's kernels, compiled for the CPU: blocks of 1 and of 64 threads compute the formulas.

use std::path::{Path, PathBuf};
use std::process::Command;

#[test]
fn kernels_compute_their_formulas_in_blocks_of_one_and_of_many_threads() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = tempfile::tempdir().expect("a folder");
    let program: PathBuf = folder.path().join("emulated");
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".to_string());
    let kernels = root.join("src/model/on_device/kernels/kernels.cu");
    let compiled = Command::new(&compiler)
        .args(["-std=c++20", "-O1", "-pthread", "-w"])
        .arg(format!("-DKERNELS=\"{}\"", kernels.display()))
        .arg(root.join("tests/it/on_device/emulated.cpp"))
        .arg("-o")
        .arg(&program)
        .output();
    let compiled = match compiled {
        Ok(compiled) => compiled,
        Err(error) if std::env::var_os("CI").is_none() => {
            eprintln!("skipped: {compiler} is not there to compile the kernels: {error}");
            return;
        }
        Err(error) => panic!("{compiler}: {error}"),
    };
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    let ran = Command::new(&program).output().expect("the compiled program starts");
    let report = String::from_utf8_lossy(&ran.stdout);
    assert!(ran.status.success(), "{report}");
    // Ten cases in three types and two sizes of a block.
    assert_eq!(report.lines().filter(|line| line.starts_with("ok ")).count(), 10 * 3 * 2);
}
