//! A file for `--device-map`.
#![no_main]

use prune::placement::Device;
use prune::placement::device_map::Prefixes;

prune_fuzz::target!(input, {
    if let Ok(map) = Prefixes::load(&prune_fuzz::put("map.json", input)) {
        let _ = map.gpus().count();
        for layer in [0, 1, 17, usize::MAX] {
            let _ = map.layer(layer, Device::Cpu);
        }
    }
});
