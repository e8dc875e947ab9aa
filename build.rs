//! Compiles the kernels of `src/model/on_device/kernels/kernels.cu` to PTX with CUDA's compiler. A build without the feature `cuda` does nothing.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

const SOURCE: &str = "src/model/on_device/kernels/kernels.cu";

/// The oldest cards of CUDA 13. The driver compiles the PTX for the card when it is loaded.
const OLDEST: &str = "75";

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed={SOURCE}");
    for variable in ["CUDA_COMPUTE_CAP", "CUDA_HOME", "CUDA_PATH", "NVCC"] {
        println!("cargo::rerun-if-env-changed={variable}");
    }
    if env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return;
    }
    let folder = env::var_os("OUT_DIR").expect("cargo sets OUT_DIR");
    let capability = env::var("CUDA_COMPUTE_CAP").unwrap_or_else(|_| OLDEST.to_string());
    let mut command = Command::new(compiler());
    command.args(["--ptx", "-O3", "--std=c++17"]);
    command.arg(format!("-arch=compute_{}", capability.replace('.', "")));
    command.arg("-o").arg(Path::new(&folder).join("on_device.ptx")).arg(SOURCE);
    match command.status() {
        Ok(status) if status.success() => {}
        Ok(status) => panic!("{command:?} ended with {status}"),
        Err(error) => panic!(
            "{command:?}: {error}. The feature `cuda` needs CUDA's compiler nvcc: put it on PATH, or name it in NVCC"
        ),
    }
}

/// nvcc: the program that NVCC names, or the toolkit's, or the first on PATH.
fn compiler() -> PathBuf {
    if let Some(compiler) = env::var_os("NVCC") {
        return compiler.into();
    }
    let toolkits = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(env::var_os);
    let in_toolkit = toolkits.map(|toolkit| PathBuf::from(toolkit).join("bin/nvcc"));
    in_toolkit.into_iter().find(|compiler| compiler.exists()).unwrap_or_else(|| "nvcc".into())
}
