//! `config.json` beside a good checkpoint: what is computed from a config that is accepted does not overflow either.
#![no_main]

use prune::linalg::StoredDtype;
use prune::model::{Dtypes, ModelConfig, Rotary, footprint};
use prune::run::MemorySettings;

prune_fuzz::target!(input, {
    let path = prune_fuzz::put("m/config.json", input);
    let folder = path.parent().expect("the model's folder");
    let _ = prune::generation::stop_ids(folder, None);
    if let Ok(config) = ModelConfig::load(folder) {
        let settings = MemorySettings::default();
        for seqlen in [2, config.longest_sequence()] {
            let _ = footprint::activations(&config, seqlen, &settings);
            let _ = footprint::hidden_states(&config, seqlen);
            let _ =
                footprint::head(&config, Dtypes::all(StoredDtype::F32), seqlen, 1 << 20, &settings);
        }
        let _ = footprint::parameters(&config);
        let _ = footprint::layer_weights(&config, StoredDtype::F32, &settings);
        let _ = footprint::score(&config, StoredDtype::F32, 1024, &settings);
        if config.head_dim <= 1 << 10 {
            for rope in &config.ropes {
                let rotary = Rotary::new(rope, 16);
                let mut x = vec![1.0; 16 * config.head_dim];
                rotary.apply(&mut x, 0, 1, config.head_dim).expect("the tables fit");
                assert!(x.iter().all(|x| x.is_finite()), "{config:?}");
            }
        }
    }
    prune_fuzz::open("m");
});
