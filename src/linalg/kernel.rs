//! CPU features of the products. They are part of every result's protocol, since different instructions round differently.

/// The vector features of this CPU that decide the kernel, widest first.
pub fn cpu_features() -> Vec<&'static str> {
    #[cfg(target_arch = "x86_64")]
    {
        let candidates = [
            ("avx512f", std::is_x86_feature_detected!("avx512f")),
            ("avx2", std::is_x86_feature_detected!("avx2")),
            ("fma", std::is_x86_feature_detected!("fma")),
        ];
        candidates.into_iter().filter(|(_, is_there)| *is_there).map(|(name, _)| name).collect()
    }
    #[cfg(target_arch = "aarch64")]
    {
        vec!["neon"]
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    {
        Vec::new()
    }
}
